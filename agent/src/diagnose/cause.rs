//! Why a request is where it is.

use std::{fmt, time::Duration};

use serde::Serialize;

use crate::{
    event::{
        Phase, Room,
        clock::Monotonic,
        native::{Engine, NIXL_REMOTE_DISCONNECT},
    },
    request::{
        NativeState,
        tracker::Tracked,
        transfer::SubjectTransfers,
        transfers::{Transfers, Work},
    },
};

/// Why a request is stuck, in the field's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Cause {
    /// Two requests share one room, and the other one ended it.
    RoomCollision,
    /// `update_status(Failed)` came after the room had been cleared, and did nothing.
    UpdateDropped,
    /// `abort()` was called and `poll()` does not say so.
    AbortIgnored,
    /// In the inflight queue, but nothing was ever sent.
    Parked,
    /// The decode side never registered.
    NeverBootstrapped,
    /// The engine, or the device, said that a transfer failed, and `poll()` does not say so.
    CompletionError,
    /// The peer's process or connection is gone, and `poll()` does not say so.
    PeerGone,
    /// A transfer is under way and nothing of the room has moved for some time.
    TransferStalled,
    /// Transfers of the room are under way, and others of it ended meanwhile.
    Slow,
    /// A transfer worker holds another room's chunk and does not get on; this room's chunks wait behind it.
    WorkerBlocked,
    /// This room's chunks wait for workers that do get on.
    CapacityStall,
    /// Every transfer is done, and `poll()` does not say so.
    CompletionLost,
    /// No sign that the sources at hand could show.
    Unknown,
}

impl Cause {
    /// Every cause that can be diagnosed.
    pub const ALL: [Self; 13] = [
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
        Self::Unknown,
    ];

    /// Its place in [`Cause::ALL`].
    pub fn index(self) -> usize {
        self as usize
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
/// How long after the last transfer's end the server may take to say so.
const CONCLUDES_WITHIN: Duration = Duration::from_secs(5);

/// Why a request waits. The server's own words first: they say what to do; then what its transfers show.
pub fn cause(tracked: &Tracked<'_>, now: Monotonic) -> Cause {
    let Tracked { request, room, server, .. } = *tracked;
    if request.phase.is_some_and(Phase::is_terminal) {
        return Cause::Unknown;
    }
    let collided = request.cleared_by.is_some() || (request.shared_with.is_some() && room.known_absent);
    if collided {
        return Cause::RoomCollision;
    }
    if request.update_dropped.is_some() {
        return Cause::UpdateDropped;
    }
    if let Some(aborted) = request.aborted
        && now.since(aborted.at) >= ABORT_GRACE
        && server.passes.saturating_sub(aborted.passes) >= ABORT_PASSES
    {
        return Cause::AbortIgnored;
    }
    if request.phase == Some(Phase::Bootstrapping) {
        return Cause::NeverBootstrapped;
    }
    if request.is_inflight() && request.sent_chunks == 0 && request.phase == Some(Phase::WaitingForInput) {
        return Cause::Parked;
    }
    cause_by_transfers(tracked, now).unwrap_or(Cause::Unknown)
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
        let all_done = known.is_over() && known.done > 0 && known.done == known.posted;
        let may_conclude = known.last_ended.is_some_and(|ended| now.since(ended) < CONCLUDES_WITHIN);
        if all_done && !may_conclude && request.sent_last && room.chunks.unwrap_or_default().queued == 0 {
            return Some(Cause::CompletionLost);
        }
    }
    if room.chunks.is_some_and(|counts| counts.queued > 0 && counts.working == 0) {
        let (work, _) = longest_work_of_others(transfers, request.room)?;
        let blocked = now.since(work.since) >= MOVES_WITHIN;
        return Some(if blocked { Cause::WorkerBlocked } else { Cause::CapacityStall });
    }
    None
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
        let is_gone = (engine, code) == (Engine::Nixl, NIXL_REMOTE_DISCONNECT) && !has_timed_out(native, since, at);
        return Some(if is_gone { Cause::PeerGone } else { Cause::CompletionError });
    }
    let (_, oldest) = known.under_way()?;
    let stalled = now.since(known.last_moved().unwrap_or(oldest)) >= MOVES_WITHIN;
    let slow = now.since(oldest) >= MOVES_WITHIN;
    if stalled { Some(Cause::TransferStalled) } else { slow.then_some(Cause::Slow) }
}

/// Whether the device's retries ran out between those times: the way to the peer is broken, its process may well live.
fn has_timed_out(native: &NativeState, since: Monotonic, failed: Monotonic) -> bool {
    const UCS_ERR_ENDPOINT_TIMEOUT: i8 = -80;
    let endpoint = native.endpoint_error.filter(|failure| failure.at >= since && failure.at <= failed.plus(SECOND));
    endpoint.is_some_and(|failure| failure.status == UCS_ERR_ENDPOINT_TIMEOUT)
}

/// What a worker has been doing longest for a room other than this one, and how many such rooms there are.
pub(super) fn longest_work_of_others(transfers: &Transfers, room: Room) -> Option<(Work, usize)> {
    let others = transfers.workers().values().filter(|work| work.room != room);
    others.clone().min_by_key(|work| work.since).map(|work| (*work, others.count()))
}
