//! What happens to a room, applied to those that have a sender on it.

use super::{Applying, Process};
use crate::{
    event::{ChunkCounts, Phase, Room},
    request::{Request, Resurrected, tracker::Step},
};

impl Process {
    /// A room without a live sender is kept while a chunk of it is counted or a handle of it may still be running: its next
    /// sender is to be told. There is always a place for a room that has a sender.
    pub(super) fn drop_idle_room(&mut self, room: Room, applying: &mut Applying<'_>) {
        let Some(state) = self.rooms.get(&room).filter(|state| state.senders.is_empty()) else { return };
        let is_idle = |counts: ChunkCounts| counts.queued == 0 && counts.working == 0 && !counts.abandoned;
        let gone = if state.chunks.is_none_or(is_idle) {
            self.dead.forget(room);
            Some(room)
        } else {
            let oldest = self.dead.keep(room);
            applying.unused.rooms_dropped += u64::from(oldest.is_some());
            oldest
        };
        if let Some(room) = gone {
            self.rooms.remove(&room);
            self.transfers.room_without_senders(room);
        }
    }

    pub(super) fn update(
        &mut self,
        room: Room,
        requested: Option<Phase>,
        before: Option<Phase>,
        after: Option<Phase>,
        applying: &mut Applying<'_>,
    ) {
        let dropped = requested == Some(Phase::Failed) && before.is_none() && after.is_none();
        let state = self.room(room);
        state.status = after;
        state.known_absent = after.is_none();
        let senders = state.senders.clone();
        let resurrected = resurrected(before, after).filter(|_| senders.len() == 1);
        for serial in senders {
            let Some(request) = self.requests.get_mut(&serial) else { continue };
            if let Some(to) = resurrected {
                request.resurrected = Some(Box::new(Resurrected { at: applying.at, to }));
            } else if after == Some(Phase::Failed) {
                request.resurrected = None;
            }
            if dropped {
                request.update_dropped.get_or_insert(applying.at);
                self.changed(serial, Step::UpdateDropped, applying);
            } else if after.is_some() {
                // The room is registered again: what a clear or a dropped update did to it is over.
                request.cleared_by = None;
                request.cleared_at = None;
                request.update_dropped = None;
            }
        }
        self.drop_idle_room(room, applying);
    }

    pub(super) fn clear(&mut self, room: Room, serial: u64, removed: bool, applying: &mut Applying<'_>) {
        if removed {
            let state = self.room(room);
            state.status = None;
            state.known_absent = true;
            for other in state.senders.clone() {
                if other != serial
                    && let Some(other) = self.requests.get_mut(&other)
                {
                    other.cleared_by = Some(serial);
                    other.cleared_at = Some(applying.at);
                }
            }
        }
        let over = |request: &mut Request| !request.is_queued() && request.phase == Some(Phase::Success);
        if self.request(serial, applying).is_some_and(over) {
            self.forget(serial, None, applying);
        }
        self.drop_idle_room(room, applying);
    }
}

/// What a room's status became though it was Failed. Bootstrapping is none: a new sender on a room whose former one failed
/// begins with it.
fn resurrected(before: Option<Phase>, after: Option<Phase>) -> Option<Phase> {
    let is_better = |after: &Phase| !matches!(after, Phase::Failed | Phase::Bootstrapping);
    after.filter(|after| before == Some(Phase::Failed) && is_better(after))
}
