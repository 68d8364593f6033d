//! What a decode server's hook says of its receivers and queues, applied.

use super::{
    super::{Receiving, Request, tracker::Step},
    Applying, Process,
};
use crate::{
    event::{
        LeaveReason, Rid,
        receiver::{DecodeLeave, DecodeQueue, ReceiverEvent},
    },
    record::codec::recorded,
};

/// Requests in the queues of a decode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QueueLengths {
    prealloc: u32,
    transfer: u32,
}

recorded!(struct QueueLengths { prealloc, transfer });

impl QueueLengths {
    fn of(&mut self, queue: DecodeQueue) -> &mut u32 {
        match queue {
            DecodeQueue::Prealloc => &mut self.prealloc,
            DecodeQueue::Transfer => &mut self.transfer,
        }
    }

    /// A request was put into this place.
    pub(super) fn count(&mut self, receiving: Option<Receiving>) {
        if let Some(queue) = receiving.and_then(|receiving| receiving.queue) {
            let length = self.of(queue);
            *length = length.saturating_add(1);
        }
    }

    /// A request was taken from this place.
    pub(super) fn discount(&mut self, receiving: Option<Receiving>) {
        if let Some(queue) = receiving.and_then(|receiving| receiving.queue) {
            let length = self.of(queue);
            *length = length.saturating_sub(1);
        }
    }
}

impl Process {
    pub(super) fn receiver(&mut self, event: &ReceiverEvent, applying: &mut Applying<'_>) {
        match event {
            ReceiverEvent::Open { room, sender, backend } => {
                self.opened(Request::received(*sender, *room, *backend, applying.at), applying);
            }
            ReceiverEvent::Entry { room, sender, epoch, queue, entry } => {
                self.entry(*room, *sender, *epoch, entry, Some(*queue), applying);
            }
            ReceiverEvent::Enter { sender, queue, rid, .. } => {
                self.enter_decode(*sender, *queue, rid.as_ref(), applying);
            }
            ReceiverEvent::Leave { sender, queue, reason, .. } => {
                self.leave_decode(*sender, *queue, *reason, applying);
            }
            ReceiverEvent::Pass { prealloc, transfer, passes } => {
                let lengths = QueueLengths { prealloc: *prealloc, transfer: *transfer };
                let is_known = self.queued == lengths && self.inflight == 0;
                self.passed(prealloc.saturating_add(*transfer), *passes, is_known, applying.at);
            }
        }
    }

    /// Puts a request into a place, whichever it was in.
    fn place(&mut self, serial: u64, receiving: Receiving) {
        if let Some(request) = self.requests.get_mut(&serial) {
            self.queued.discount(request.receiving);
            request.receiving = Some(receiving);
            self.queued.count(request.receiving);
        }
    }

    fn enter_decode(&mut self, serial: u64, queue: DecodeQueue, rid: Option<&Rid>, applying: &mut Applying<'_>) {
        let at = applying.at;
        let Some(request) = self.request(serial, applying) else { return };
        request.rid = rid.cloned().or(request.rid.take());
        if request.receiving.is_some_and(|receiving| receiving.queue == Some(queue)) {
            return;
        }
        self.place(serial, Receiving { queue: Some(queue), since: at });
        self.changed(serial, Step::Entered, applying);
    }

    fn leave_decode(&mut self, serial: u64, queue: DecodeQueue, reason: DecodeLeave, applying: &mut Applying<'_>) {
        let since = applying.at;
        match reason {
            DecodeLeave::Success => self.forget(serial, Some(LeaveReason::Success), applying),
            DecodeLeave::Failed => self.forget(serial, Some(LeaveReason::Failed), applying),
            DecodeLeave::Removed | DecodeLeave::Preallocated => {
                let Some(request) = self.request(serial, applying) else { return };
                if request.failed.is_some() {
                    // Another rank's poll failed it: polls are MIN-reduced, and this one's own did not say so.
                    self.forget(serial, Some(LeaveReason::Failed), applying);
                } else if request.receiving.is_some_and(|receiving| receiving.queue == Some(queue)) {
                    self.place(serial, Receiving { queue: None, since });
                    if reason == DecodeLeave::Removed {
                        self.changed(serial, Step::Left(LeaveReason::Removed), applying);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "receiving_tests.rs"]
mod tests;
