//! What a process's transfer engine says, applied.

use std::{collections::HashMap, time::Duration};

use super::{
    super::{
        DeviceError, EndpointFailure, Side, Sync, UnsafeRelease, Watch,
        transfer::Observation,
        transfers::{Counted, Transfers, Work},
    },
    Applying, Process,
};
use crate::event::{
    ChunkCounts, ChunkStep, LeaveReason, Room,
    clock::Monotonic,
    native::{Engine, NativeEvent},
};

/// `IBV_WC_WR_FLUSH_ERR` (`infiniband/verbs.h`): a queue pair that has failed gives back everything else like this.
const WR_FLUSH_ERR: u32 = 5;
/// How long after a queue pair's failure what was flushed may still be polled.
const FLUSHED_WITHIN: Duration = Duration::from_secs(10);

impl Process {
    /// Its transfers.
    pub(in crate::request) fn transfers(&self) -> &Transfers {
        &self.transfers
    }

    /// From now on each transfer is seen, or (`None`) not.
    pub(in crate::request) fn watch(&mut self, engine: Option<Engine>, at: Monotonic) {
        self.state.native.watch = engine.map_or(Watch::No, |engine| Watch::Since { at, engine });
    }

    /// Events were lost, or could not be kept: what the transfers show is whole again for what is made from now on.
    pub(in crate::request) fn native_lost(&mut self, now: Monotonic) {
        if let Watch::Since { at, .. } = &mut self.state.native.watch {
            *at = now;
        }
    }

    pub(super) fn chunk(
        &mut self,
        room: Room,
        step: ChunkStep,
        counts: ChunkCounts,
        queue: Option<u64>,
        applying: &mut Applying<'_>,
    ) {
        let state = self.room(room);
        state.counted(counts, applying.at);
        if step == ChunkStep::Queued {
            state.queue = queue;
        }
        state.busy_until = Some(applying.at);
        match step {
            ChunkStep::Queued => {}
            ChunkStep::Begun => {
                self.transfers.working_on(applying.tid, Some(Work { room, since: applying.at, queue }));
            }
            ChunkStep::Ended => self.transfers.working_on(applying.tid, None),
        }
        self.drop_idle_room(room, applying);
    }

    pub(super) fn native(&mut self, event: &NativeEvent, applying: &Applying<'_>) {
        let at = applying.at;
        match event {
            NativeEvent::EndpointError { point, status, .. } => {
                self.state.native.endpoint_error = Some(EndpointFailure { at, point: *point, status: *status });
            }
            NativeEvent::CompletionError { status, .. } => {
                let before = self.state.native.completion_error;
                let follows =
                    *status == WR_FLUSH_ERR && before.is_some_and(|(first, _)| at.since(first) < FLUSHED_WITHIN);
                if !follows {
                    self.state.native.completion_error = Some((at, *status));
                }
            }
            _ => {}
        }
        let rooms = &self.rooms;
        let has_senders = |room: Room| rooms.get(&room).is_some_and(|state| !state.senders.is_empty());
        if !self.transfers.apply(event, at, applying.tid, has_senders) {
            self.native_lost(at);
        }
    }

    /// Forgets failures of rooms without senders, and unsafe releases, that are older than `before`.
    pub(in crate::request) fn prune(&mut self, before: Monotonic) {
        self.released.prune(before);
        let rooms = &self.rooms;
        self.transfers.prune(before, |room| rooms.get(&room).is_some_and(|state| !state.senders.is_empty()));
    }

    /// What was counted of its transfers since the last time.
    pub(in crate::request) fn take_counted(&mut self) -> Counted {
        self.transfers.take_counted()
    }

    /// How often the status of each handle was asked for in a look.
    pub(in crate::request) fn looked(&mut self, polls: &HashMap<u64, u64>, began: Monotonic, at: Monotonic) {
        self.transfers.looked(polls, began, at);
    }

    /// A device that it has open counted an error.
    pub(in crate::request) fn device_error(&mut self, error: DeviceError) {
        let errors = &mut self.state.native.device_errors;
        errors.retain(|other| other.kind != error.kind);
        errors.push(error);
    }

    /// What is under way as a request leaves the inflight queue, and the server gives its pages to others. A server that
    /// polled Success had asked each handle: what is left then is that its end was not seen here yet.
    pub(super) fn unsafe_release(&self, serial: u64, left: LeaveReason) -> Option<UnsafeRelease> {
        let has_sent = |serial: &u64| self.requests.get(serial).is_some_and(|request| request.sent_chunks > 0);
        let request = self.requests.get(&serial).filter(|_| left == LeaveReason::Failed && has_sent(&serial))?;
        if request.side() == Side::Decode {
            return None; // what it sent was where to write; the prefill's transfers are not seen here
        }
        // What is under way on a room may be another sender's that has sent something too.
        let room = self.rooms.get(&request.room)?;
        let alone = !room.senders.iter().any(|other| *other != serial && has_sent(other));
        let (transfers, oldest) =
            self.transfers.of_room(request.room).filter(|_| alone)?.under_way_since(request.created)?;
        let watched = matches!(self.state.native.watch, Watch::Since { at, .. } if at <= request.created);
        // One that has had the room with it, sent something and left may have left them.
        let sends_nothing = |other: u64| self.requests.contains_key(&other) && !has_sent(&other);
        let are_its_own = request.shared_with.is_none_or(sends_nothing);
        Some(UnsafeRelease { transfers, oldest, certain: watched && are_its_own && self.state.sync == Sync::Complete })
    }

    /// What was read of a transfer in the server's memory. Of a handle that was posted before events were lost, the
    /// release may be among those: what was read may be somebody else's memory by now.
    pub(in crate::request) fn observed(&mut self, seen: Observation, at: Monotonic) {
        let Watch::Since { at: watched_since, .. } = self.state.native.watch else { return };
        let posted_at = self.transfers.posted_at(seen.handle, seen.generation);
        if posted_at.is_some_and(|posted_at| posted_at < watched_since) {
            return;
        }
        let rooms = &self.rooms;
        let has_senders = |room: Room| rooms.get(&room).is_some_and(|state| !state.senders.is_empty());
        self.transfers.observed(seen, at, has_senders);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::{
            Body, Event, ProcessKey,
            native::{Handle, TransferStatus},
        },
        request::tracker::{Limits, Tracker},
    };

    const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
    const HANDLE: Handle = Handle { engine: Engine::Nixl, number: 0x77 };

    /// A server whose transfers are watched since 1, and a transfer of it that was posted at 5.
    fn posted() -> Tracker {
        let mut tracker = Tracker::new(Limits { requests: 10, transfers: 10 });
        tracker.attach(PROCESS, 0);
        tracker.watch(PROCESS, Some(Engine::Nixl), Monotonic(1));
        let posting = NativeEvent::Posting { handle: HANDLE, operation: None, first_length: None, lists: [0; 2] };
        let body = Body::Native(Box::new(posting));
        let event = Event { pid: 7, tid: 7, at: Monotonic(5), sequence: 1, detail_lost: false, body };
        tracker.apply(&event, &mut Vec::new());
        tracker
    }

    fn is_under_way_after_a_reading(tracker: &mut Tracker) -> bool {
        let seen = Observation { handle: HANDLE, generation: 1, status: TransferStatus::Done, moved: None };
        tracker.observed(PROCESS, seen, Monotonic(9));
        tracker.transfers(PROCESS).unwrap().not_joined().under_way().is_some()
    }

    #[test]
    fn what_a_failed_queue_pair_gives_back_does_not_hide_why_it_failed() {
        let mut tracker = posted();
        let mut error = |at, status| {
            let body = Body::Native(Box::new(NativeEvent::CompletionError { status, vendor_error: 0, qp: 1 }));
            let event = Event { pid: 7, tid: 7, at: Monotonic(at), sequence: 2, detail_lost: false, body };
            tracker.apply(&event, &mut Vec::new());
            tracker.server(PROCESS).unwrap().native.completion_error.unwrap()
        };
        let (retries_exceeded, long) = (12, FLUSHED_WITHIN.as_nanos() as u64);
        assert_eq!(error(10, WR_FLUSH_ERR), (Monotonic(10), WR_FLUSH_ERR));
        assert_eq!(error(20, retries_exceeded), (Monotonic(20), retries_exceeded));
        assert_eq!(error(30, WR_FLUSH_ERR), (Monotonic(20), retries_exceeded));
        assert_eq!(error(20 + long, WR_FLUSH_ERR), (Monotonic(20 + long), WR_FLUSH_ERR));
    }

    #[test]
    fn a_reading_ends_a_transfer_that_was_watched_all_the_time() {
        assert!(!is_under_way_after_a_reading(&mut posted()));
    }

    #[test]
    fn a_reading_proves_nothing_once_events_were_lost_or_not_all_are_seen() {
        let mut lost = posted();
        lost.native_lost(PROCESS, Monotonic(6));
        assert!(is_under_way_after_a_reading(&mut lost), "its release may be among what was lost");
        let mut unwatched = posted();
        unwatched.watch(PROCESS, None, Monotonic(6));
        assert!(is_under_way_after_a_reading(&mut unwatched), "nobody sees releases");
    }
}
