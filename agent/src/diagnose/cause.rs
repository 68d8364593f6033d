//! Why a request is where it is.

use std::{fmt, time::Duration};

use serde::Serialize;

use super::{
    decode, other_end,
    quiescence::{is_proved_by_transfers, is_watched},
    ranks::diverges,
    stalled::stalled_since,
    warmup,
};
use crate::{
    event::{
        Backend, Phase, Room,
        clock::Monotonic,
        native::{Engine, NIXL_REMOTE_DISCONNECT},
    },
    request::{
        NativeState, Side,
        tracker::Tracked,
        transfer::SubjectTransfers,
        transfers::{Transfers, Work},
    },
};

/// Why a request is stuck, in the field's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Cause {
    /// Two requests share one room, and the other one ended it. On a decode the server's waiting time-out ends that.
    RoomCollision,
    /// `update_status(Failed)` came after the room had been cleared, and did nothing.
    UpdateDropped,
    /// `abort()` was called and `poll()` does not say so.
    AbortIgnored,
    /// In the inflight queue, but nothing was ever sent.
    Parked,
    /// The other side never registered: on a decode, the prefill is not known, or has not said that it has the room.
    NeverBootstrapped,
    /// The engine, or the device, said that a transfer failed, and `poll()` does not say so.
    CompletionError,
    /// The peer's process or connection is gone, and `poll()` does not say so.
    PeerGone,
    /// A transfer is under way and nothing of the room has moved for some time.
    TransferStalled,
    /// Transfers of the room are under way, and others of it ended meanwhile.
    Slow,
    /// The transfer worker that this room's chunks wait for has held another room's chunk for some time without getting on, and
    /// they have waited as long.
    WorkerBlocked,
    /// This room's chunks wait for a worker that gets on, or have not waited for long; on a decode, it waits for memory or a slot.
    CapacityStall,
    /// Every transfer is done, or the other end of the room says so, and `poll()` does not say so.
    CompletionLost,
    /// It has left the queue as failed, and given its pages to others, while a transfer of it was under way. Not a reason to
    /// wait: what happened.
    UnsafeRelease,
    /// The scheduler itself is stuck: it makes no pass over its queue, so it polls nobody.
    LoopStalled,
    /// The ranks of its server have dropped different requests: their collectives hang, or will.
    RankDivergence,
    /// It had failed, and a late call made its room's status better than that again.
    Resurrected,
    /// The other end of the room has given the request up, and this one waits on: nobody told it.
    FailureNotTold,
    /// A warm-up or a health check, which has nothing to transfer, and does not end.
    WarmupPinned,
    /// It is over on this rank of its server and not on another one, where it may be stuck: the evidence names that.
    HeldByOtherRank,
    /// No sign that the sources at hand could show.
    Unknown,
}

impl Cause {
    /// Every cause that can be diagnosed.
    pub const ALL: [Self; 20] = [
        Self::RoomCollision,
        Self::UpdateDropped,
        Self::AbortIgnored,
        Self::Parked,
        Self::NeverBootstrapped,
        Self::CompletionError,
        Self::PeerGone,
        Self::TransferStalled,
        Self::Slow,
        Self::WorkerBlocked,
        Self::CapacityStall,
        Self::CompletionLost,
        Self::UnsafeRelease,
        Self::LoopStalled,
        Self::RankDivergence,
        Self::Resurrected,
        Self::FailureNotTold,
        Self::WarmupPinned,
        Self::HeldByOtherRank,
        Self::Unknown,
    ];

    /// Its place in [`Cause::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }

    /// Whether the request has ended with it.
    pub fn is_past(self) -> bool {
        self == Self::UnsafeRelease
    }

    /// Whether a request that has it counts as stuck. Not one that has ended, nor one that waits its turn or gets on, nor a
    /// warm-up, for which nobody waits, nor one that counts on another rank.
    pub fn is_stuck(self) -> bool {
        let waits = matches!(self, Self::Slow | Self::CapacityStall | Self::WarmupPinned | Self::HeldByOtherRank);
        !self.is_past() && !waits
    }

    /// Whether it is read from the engine's calls: without all of them another cause may hold.
    pub(super) fn rests_on_transfers(self) -> bool {
        matches!(
            self,
            Self::CompletionError
                | Self::PeerGone
                | Self::TransferStalled
                | Self::Slow
                | Self::WorkerBlocked
                | Self::CompletionLost
        )
    }

    /// Its name in rules, labels and output.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoomCollision => "RoomCollision",
            Self::UpdateDropped => "UpdateDropped",
            Self::AbortIgnored => "AbortIgnored",
            Self::Parked => "Parked",
            Self::NeverBootstrapped => "NeverBootstrapped",
            Self::CompletionError => "CompletionError",
            Self::PeerGone => "PeerGone",
            Self::TransferStalled => "TransferStalled",
            Self::Slow => "Slow",
            Self::WorkerBlocked => "WorkerBlocked",
            Self::CapacityStall => "CapacityStall",
            Self::CompletionLost => "CompletionLost",
            Self::UnsafeRelease => "UnsafeRelease",
            Self::LoopStalled => "LoopStalled",
            Self::RankDivergence => "RankDivergence",
            Self::Resurrected => "Resurrected",
            Self::FailureNotTold => "FailureNotTold",
            Self::WarmupPinned => "WarmupPinned",
            Self::HeldByOtherRank => "HeldByOtherRank",
            Self::Unknown => "Unknown",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How long after an `abort()` the next polls are waited for before it counts as ignored.
const ABORT_GRACE: Duration = Duration::from_secs(1);
/// Passes after an `abort()` that must have polled the sender before it counts as ignored.
const ABORT_PASSES: u64 = 3;
/// A transfer that has not ended while nothing of its room moved for this long is stalled. The default time-out of
/// Mooncake's transfers is 30 s, of UCX's endpoints some 20 s.
pub(super) const MOVES_WITHIN: Duration = Duration::from_secs(10);
/// How far the reports of one failure may be apart.
const SECOND: Duration = Duration::from_secs(1);
/// How long a server that goes on polling may take after the last transfer's end to say so.
const CONCLUDES_WITHIN: Duration = Duration::from_secs(5);
/// How long a server may go on posting to a peer that has ended.
const NOTICED_WITHIN: Duration = Duration::from_secs(60);
/// `UCS_ERR_CONNECTION_RESET` (`ucs/type/status.h`): what UCX says of an endpoint over TCP whose peer was killed (NIXL 0.3.1 to
/// 1.5.1). Where a device's retries run out it says endpoint timeout, -80: the peer's process may well live.
const UCS_ERR_CONNECTION_RESET: i8 = -25;

/// Why a request waits. Whether anybody polls comes first, since the rest is read from polls; then the server's own words: they
/// say what to do; then what its transfers show.
pub fn cause(tracked: &Tracked<'_>, now: Monotonic) -> Cause {
    let Tracked { request, room, server, .. } = *tracked;
    if request.ended.as_ref().is_some_and(|ended| ended.unsafe_release.is_some()) {
        return Cause::UnsafeRelease;
    }
    if diverges(tracked, now).is_some() {
        return Cause::RankDivergence;
    }
    if stalled_since(tracked, now).is_some() {
        return Cause::LoopStalled;
    }
    if request.phase.is_some_and(Phase::is_terminal) {
        // Ranks poll an end less than a second apart (sglang#20485); what lasts longer holds it up.
        let is_held = request.held_by.is_some() && now.since(request.phase_since) >= SECOND;
        return if is_held { Cause::HeldByOtherRank } else { Cause::Unknown };
    }
    if request.side() == Side::Decode {
        return decode::cause(tracked, now);
    }
    // A fake sender has no room in `request_status`, and nothing of what follows is true of it.
    if request.backend == Backend::Fake {
        return if warmup::is_pinned(tracked) { Cause::WarmupPinned } else { Cause::Unknown };
    }
    let collided = request.cleared_by.is_some() || (request.shared_with.is_some() && room.known_absent);
    if collided {
        return Cause::RoomCollision;
    }
    if request.update_dropped.is_some() {
        return Cause::UpdateDropped;
    }
    if request.resurrected.is_some() {
        return Cause::Resurrected;
    }
    if let Some(aborted) = &request.aborted
        && now.since(aborted.at) >= ABORT_GRACE
        && server.passes.saturating_sub(aborted.passes) >= ABORT_PASSES
    {
        return Cause::AbortIgnored;
    }
    let by_other_end = other_end::cause(tracked, now);
    if by_other_end == Some(Cause::PeerGone) {
        return Cause::PeerGone;
    }
    if is_bootstrapping(tracked) {
        return by_other_end.unwrap_or(Cause::NeverBootstrapped);
    }
    if request.is_inflight() && request.sent_chunks == 0 && request.phase == Some(Phase::WaitingForInput) {
        return by_other_end.unwrap_or(Cause::Parked);
    }
    cause_by_transfers(tracked, now).or(by_other_end).unwrap_or(Cause::Unknown)
}

/// Whether no decode has registered. One that has shows in the room's status, before a pass has polled it.
pub(super) fn is_bootstrapping(tracked: &Tracked<'_>) -> bool {
    let has_registered = tracked.room.status.is_some_and(|status| status > Phase::Bootstrapping);
    tracked.request.phase == Some(Phase::Bootstrapping) && !has_registered
}

fn cause_by_transfers(tracked: &Tracked<'_>, now: Monotonic) -> Option<Cause> {
    let Tracked { request, room, server, transfers, .. } = *tracked;
    if let Some(known) = transfers.of_room(request.room) {
        if let Some(cause) = cause_of_room(known, &server.native, request.created, now) {
            return Some(cause);
        }
        if known.under_way().is_some() {
            return None;
        }
        if is_completion_lost(tracked, known) {
            return Some(Cause::CompletionLost);
        }
    }
    if room.chunks.is_some_and(|counts| counts.queued > 0 && counts.working == 0) {
        // Behind which of several is not known where the hook does not say: blocked for certain when all are. (A worker that
        // holds nobody's chunk would have taken this one.)
        let mut ahead = work_ahead(transfers, request.room, room.queue).peekable();
        ahead.peek()?;
        let waits_since = |work| room.busy_until.max(Some(last_moved(transfers, work)));
        let blocked = ahead.all(|work| waits_since(work).is_some_and(|since| now.since(since) >= MOVES_WITHIN));
        return Some(if blocked { Cause::WorkerBlocked } else { Cause::CapacityStall });
    }
    None
}

/// Whether everything that the request sent is done and the server, which goes on polling, does not say so. Not said where a
/// transfer of it may have been missed, or may not have been posted yet.
fn is_completion_lost(tracked: &Tracked<'_>, known: &SubjectTransfers) -> bool {
    let Tracked { request, room, server, .. } = *tracked;
    let (Some(posted), Some(ended)) = (known.last_posted, known.last_ended) else { return false };
    let all_seen = is_watched(tracked) && is_proved_by_transfers(tracked);
    let all_done = known.done == known.posted && posted >= request.created && all_seen;
    let alone = room.senders.iter().all(|serial| *serial == request.serial);
    let was_polled = server.queue_length.is_some_and(|(_, passed)| passed >= ended.plus(CONCLUDES_WITHIN));
    request.sent_last && all_done && alone && is_all_posted(tracked, posted) && was_polled
}

/// Whether no chunk of the room is still to be posted, the last posting having been at `posted`.
fn is_all_posted(tracked: &Tracked<'_>, posted: Monotonic) -> bool {
    let Tracked { request, room, server, transfers, .. } = *tracked;
    let counts_handles = || server.hello.as_deref().is_some_and(|hello| hello.counts.as_deref() == Some("handles"));
    match room.chunks {
        // Without queues send() itself posts.
        Some(counts) if counts.no_queues => true,
        None => counts_handles(),
        Some(counts) => {
            // A worker that took its chunk after the last posting has posted nothing of it yet; one that left a chunk with an
            // error may not have posted all of it.
            let own = transfers.workers().values().filter(|work| work.room == request.room && work.since <= posted);
            counts.queued == 0
                && !counts.attached_late
                && !counts.abandoned
                && own.count() >= usize::from(counts.working)
        }
    }
}

/// What a room's transfers alone show to be wrong with them, whether or not anything is known of its requests. What
/// failed before `since` is another request's.
pub fn cause_of_room(
    known: &SubjectTransfers,
    native: &NativeState,
    since: Monotonic,
    now: Monotonic,
) -> Option<Cause> {
    if let Some((at, engine, code)) = known.failure.filter(|(at, ..)| *at >= since) {
        let was_reset = (engine, code) == (Engine::Nixl, NIXL_REMOTE_DISCONNECT) && was_reset(native, since, at);
        return Some(if was_reset || is_peer_gone(known, native) { Cause::PeerGone } else { Cause::CompletionError });
    }
    // What was posted before goes on under a room that is used again.
    let (_, oldest) = known.under_way_since(since)?;
    if is_peer_gone(known, native) {
        return Some(Cause::PeerGone);
    }
    let stalled = now.since(known.last_moved().unwrap_or(oldest)) >= MOVES_WITHIN;
    let slow = now.since(oldest) >= MOVES_WITHIN;
    if stalled { Some(Cause::TransferStalled) } else { slow.then_some(Cause::Slow) }
}

/// Whether the only process to which this server writes has ended, not long before the last of these was posted, or since.
/// Where a device's retries run out that is all that tells a process that is gone from a way that is broken.
fn is_peer_gone(known: &SubjectTransfers, native: &NativeState) -> bool {
    let ended = native.peer_ended.map(|peer| peer.at.plus(NOTICED_WITHIN));
    ended.is_some_and(|ended| known.last_posted.is_some_and(|posted| ended >= posted))
}

/// Whether an endpoint was reset between those times. It has to be seen: that no other reason was seen says nothing where the
/// probe on endpoints is missing.
fn was_reset(native: &NativeState, since: Monotonic, failed: Monotonic) -> bool {
    let endpoint = native.endpoint_error.filter(|failure| failure.at >= since && failure.at <= failed.plus(SECOND));
    endpoint.is_some_and(|failure| failure.status == UCS_ERR_CONNECTION_RESET)
}

/// What the worker does that a room's chunks wait for, which are in `queue`: each transfer queue has one worker. Where the hook
/// does not say which queue, any other worker may be it.
pub(super) fn work_ahead(transfers: &Transfers, room: Room, queue: Option<u64>) -> impl Iterator<Item = Work> {
    let may_be_its = move |work: &&Work| work.queue.is_none() || queue.is_none() || work.queue == queue;
    transfers.workers().values().filter(move |work| work.room != room).filter(may_be_its).copied()
}

/// When a worker was last seen to get on with its chunk.
fn last_moved(transfers: &Transfers, work: Work) -> Monotonic {
    let moved = transfers.of_room(work.room).and_then(SubjectTransfers::last_moved);
    moved.map_or(work.since, |moved| moved.max(work.since))
}

#[cfg(test)]
#[path = "cause_tests.rs"]
mod tests;
