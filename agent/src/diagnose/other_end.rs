//! What the other end of a room shows of a request that waits at this one. Nothing is concluded where it is not seen.

use std::time::Duration;

use super::{Cause, Evidence, Fact, Source};
use crate::{
    event::clock::Monotonic,
    request::{
        ends::{Conclusion, EndState},
        tracker::Tracked,
    },
};

/// How long an end may take to hear how the other one ended: a completion may be late by a drain period.
const HEARS_WITHIN: Duration = Duration::from_secs(5);

/// Why a request waits, by what the other end of its room has done.
pub(super) fn cause(tracked: &Tracked<'_>, now: Monotonic) -> Option<Cause> {
    let request = tracked.request;
    // Whose end it is cannot be told where two of this server had the room.
    let end = request.other_end.as_deref().filter(|_| request.shared_with.is_none())?;
    match end.state {
        EndState::Lives { .. } => None,
        EndState::ProcessEnded { .. } => Some(Cause::PeerGone),
        EndState::Left { at, .. } if now.since(at) < HEARS_WITHIN => None,
        EndState::Left { how: Conclusion::Success, .. } => Some(Cause::CompletionLost),
        EndState::Left { how: Conclusion::Failed | Conclusion::Dropped, .. } => Some(Cause::FailureNotTold),
    }
}

/// Whether what the request waits for can be told only by somebody who sees the other end, and nobody does.
pub(super) fn is_missed(tracked: &Tracked<'_>, cause: Cause) -> bool {
    let says_its_side = tracked.server.hello.as_deref().is_some_and(|hello| hello.role.is_some());
    cause == Cause::Unknown && says_its_side && tracked.request.ended.is_none() && tracked.request.other_end.is_none()
}

/// What is seen of the other end, and that it is missed.
pub(super) fn evidence(tracked: &Tracked<'_>, cause: Cause, evidence: &mut Vec<Evidence>) {
    let mut seen = |at, fact| evidence.push(Evidence { source: Source::Peer, at, fact });
    if let Some(end) = &tracked.request.other_end {
        seen(end.state.at(), Fact::OtherEnd(end.as_ref().clone()));
    } else if is_missed(tracked, cause) {
        seen(tracked.request.waiting_since(), Fact::OtherEndNotSeen);
    }
    if let Some(peer) =
        tracked.server.native.peer_ended.filter(|_| tracked.transfers.of_room(tracked.request.room).is_some())
    {
        seen(peer.at, Fact::PeerEnded { pid: peer.pid });
    }
}
