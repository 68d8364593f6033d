//! How well a process is known: what raises doubt, and the resynchronisation that ends it.

use std::{collections::HashSet, time::Duration};

use super::{
    super::{Aborted, Receiving, Request, ResyncReason, Sync, tracker::Step},
    Applying, Process,
};
use crate::{
    event::{Entry, Room, clock::Monotonic, receiver::DecodeQueue},
    record::codec::recorded,
};

/// `pass` marks with a wrong queue length, one after the other, before the tracker doubts itself: a mark of the same
/// thread may still be on its way into the ring when the first is read.
const PASSES_IN_DOUBT: u32 = 2;

/// A resynchronisation whose entries are arriving.
#[derive(Debug)]
pub(super) struct Resync {
    epoch: u64,
    /// The senders that were told of: one that is told of twice does not stand for another one.
    entries: HashSet<u64>,
    pub(super) alive: HashSet<u64>,
}

recorded!(struct Resync { epoch, entries, alive });

impl Process {
    pub(in crate::request) fn needs_resync(&mut self, reason: ResyncReason) {
        // While the first answer is outstanding the first reason stays: it explains why nothing is known.
        if !matches!(self.state.sync, Sync::Needed(_)) {
            self.state.sync = Sync::Needed(reason);
        }
        self.resync = None;
    }

    pub(in crate::request) fn to_ask(&self, now: Monotonic, patience: Duration) -> Option<ResyncReason> {
        match self.state.sync {
            Sync::Needed(reason) => Some(reason),
            Sync::Asked { at, reason, .. } if now.since(at) >= patience => Some(reason),
            Sync::Asked { .. } | Sync::Complete => None,
        }
    }

    pub(in crate::request) fn asked(&mut self, epoch: u64, reason: ResyncReason, at: Monotonic) {
        self.state.sync = Sync::Asked { epoch, at, reason };
        self.resync = None;
    }

    pub(super) fn pass(&mut self, queue_length: u32, passes: u32, at: Monotonic) {
        self.passed(queue_length, passes, queue_length == self.inflight, at);
    }

    /// The scheduler makes passes, and so many requests are in its queues; `is_known` says whether those are the tracker's.
    pub(super) fn passed(&mut self, queue_length: u32, passes: u32, is_known: bool, at: Monotonic) {
        self.state.paused = false;
        self.state.passes = self.state.passes.saturating_add(passes.into());
        if self.state.queue_length.is_none_or(|(before, _)| before != queue_length) {
            self.state.gauge.queue_rests = Some(at);
        }
        self.state.queue_length = Some((queue_length, at));
        self.state.turned = Some(at);
        if is_known || self.state.sync != Sync::Complete {
            self.passes_in_doubt = 0;
            return;
        }
        self.passes_in_doubt = self.passes_in_doubt.saturating_add(1);
        if self.passes_in_doubt >= PASSES_IN_DOUBT {
            self.passes_in_doubt = 0;
            self.needs_resync(ResyncReason::QueueLengthDiffers);
        }
    }

    pub(super) fn begin_resync(&mut self, epoch: u64) {
        let has_begun = self.resync.as_ref().is_some_and(|resync| resync.epoch == epoch);
        if let Sync::Asked { epoch: asked, reason, .. } = self.state.sync
            && asked == epoch
            && !has_begun
        {
            if reason.is_loss() {
                // That a worker was done with its chunk may be among what was lost.
                self.transfers.forget_workers();
                // So may be that a room has a status again: the entries say of which it was removed.
                self.rooms.values_mut().for_each(|room| room.known_absent = false);
            }
            self.resync = Some(Resync { epoch, entries: HashSet::new(), alive: HashSet::new() });
        }
    }

    /// One live sender; or a receiver, with the queue that it is in.
    pub(super) fn entry(
        &mut self,
        room: Room,
        serial: u64,
        epoch: u64,
        entry: &Entry,
        receiver: Option<Option<DecodeQueue>>,
        applying: &mut Applying<'_>,
    ) {
        let Some(resync) = self.resync.as_mut().filter(|resync| resync.epoch == epoch) else { return };
        resync.entries.insert(serial);
        resync.alive.insert(serial);
        let entry = entry.clone().in_clock_of_the_node(self.clock_offset);
        let known = self.take_out(serial);
        let passes = self.state.passes;
        let state = self.room(room);
        state.counted(entry.chunks, applying.at);
        state.sent_chunks = state.sent_chunks.max(entry.sent_chunks.into());
        state.known_absent |= entry.dropped.is_some() || entry.cleared_by.is_some();
        let is_new = known.is_none();
        let former_room = known.as_ref().map(|known| known.room);
        let before = known.map_or_else(|| Request::opened(serial, room, entry.backend, applying.at), |known| *known);
        let since = entry.entered.or(entry.created).unwrap_or(before.created);
        let request = Request {
            room,
            receiving: receiver.map(|queue| Receiving { queue, since }),
            rid: entry.rid.or(before.rid),
            created: entry.created.unwrap_or(before.created),
            phase: entry.phase,
            phase_since: entry.phase_since.unwrap_or(before.phase_since),
            // As with an abort: what passed before the agent came is not known.
            phase_passes: if before.phase == entry.phase { before.phase_passes } else { passes },
            entered: entry.entered.filter(|_| receiver.is_none()),
            sent_chunks: entry.sent_chunks,
            sent_pages: entry.sent_pages,
            sent_last: entry.sent_last,
            aborted: entry.aborted.map(|at| {
                // Passes before the agent came are not known; those since the resynchronisation count.
                let passes = before.aborted.as_ref().map_or(passes, |aborted| aborted.passes);
                Box::new(Aborted { at, passes })
            }),
            update_dropped: entry.dropped,
            shared_with: entry.shared_with.or(before.shared_with),
            cleared_by: entry.cleared_by,
            ..before
        };
        self.insert(request, applying);
        if let Some(former) = former_room.filter(|former| *former != room) {
            self.drop_idle_room(former, applying);
        }
        if is_new {
            self.changed(serial, Step::Resynchronised, applying);
        }
    }

    pub(super) fn end_resync(&mut self, epoch: u64, entries: u64, applying: &mut Applying<'_>) {
        let Some(resync) = self.resync.take_if(|resync| resync.epoch == epoch) else { return };
        if resync.entries.len() as u64 != entries {
            self.needs_resync(ResyncReason::EntriesMissing);
            return;
        }
        for serial in self.serials() {
            if !resync.alive.contains(&serial) {
                self.forget_unseen(serial, applying);
            }
        }
        self.passes_in_doubt = 0;
        self.state.sync = Sync::Complete;
    }
}
