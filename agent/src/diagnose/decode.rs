//! Why a request of a decode server waits.
//!
//! A decode waits for its prefill's address, for its own memory, then for the prefill's write. The first two are seen here.
//! Of the third only that it has not come: why not, the other end of its room may show ([`other_end`]).
//!
//! What cannot happen here in the released code (0.5.10 to 0.5.23, `NixlKVReceiver`, `MooncakeKVReceiver`,
//! `CommonKVReceiver`): an abort that is ignored, since each `poll()` looks at the `conclude_state` that `abort()` sets; and a
//! failure that is overwritten, since `poll()` latches it. Nor is it known how often one was polled: with requests retracted
//! for lack of memory `process_decode_queue` returns before it polls.

use super::{Cause, Fact, other_end};
use crate::{
    event::{Phase, clock::Monotonic},
    request::{Queue, Side, tracker::Tracked},
};

/// Why it waits, whoever is polled being polled.
pub(super) fn cause(tracked: &Tracked<'_>, now: Monotonic) -> Cause {
    let Tracked { request, room, .. } = *tracked;
    let by_other_end = other_end::cause(tracked, now);
    if by_other_end == Some(Cause::PeerGone) {
        return Cause::PeerGone;
    }
    if request.phase == Some(Phase::Bootstrapping) {
        return by_other_end.unwrap_or(Cause::NeverBootstrapped);
    }
    // Of one that has not been told where to write, a success would be another request's, of before.
    if request.waits_for_memory() {
        return by_other_end.filter(|cause| *cause == Cause::FailureNotTold).unwrap_or(Cause::CapacityStall);
    }
    // Its room's status is gone: `poll()` says WaitingForInput until the server's own waiting time-out ends it.
    let collided = request.cleared_by.is_some() || (request.shared_with.is_some() && room.known_absent);
    if collided {
        return Cause::RoomCollision;
    }
    // After an abort the update says nothing: `conclude_state` is Failed in any case.
    if request.update_dropped.is_some() && request.aborted.is_none() {
        return Cause::UpdateDropped;
    }
    by_other_end.unwrap_or(Cause::Unknown)
}

/// Whether all that is missing is the prefill's write, or its word that it is done.
pub(super) fn waits_for_prefill(tracked: &Tracked<'_>) -> bool {
    let request = tracked.request;
    let is_over = request.phase.is_some_and(Phase::is_terminal);
    request.side() == Side::Decode && request.queue() == Queue::Transfer && !is_over
}

/// What is seen of how far it has got.
pub(super) fn evidence(tracked: &Tracked<'_>, seen: &mut impl FnMut(Monotonic, Fact)) {
    let request = tracked.request;
    let since = request.waiting_since();
    if let Some(receiving) = request.receiving.filter(|_| request.is_queued()) {
        seen(receiving.since, Fact::EnteredDecodeQueue { queue: request.queue() });
    }
    if request.phase == Some(Phase::Bootstrapping) {
        seen(since, Fact::PrefillNotKnown);
    }
    if request.waits_for_memory() {
        seen(since, Fact::WaitsForMemory);
    }
    if request.sent_chunks > 0 {
        seen(since, Fact::PrefillTold { pages: request.sent_pages });
    }
    if waits_for_prefill(tracked) {
        seen(since, Fact::WaitsForPrefill);
    } else if request.queue() == Queue::Transfer {
        seen(request.phase_since, Fact::NotCommitted);
    }
}
