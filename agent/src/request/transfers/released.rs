//! What is not over as a request leaves the queue, and what may prove that it was not.

use super::Transfers;
use crate::event::{Room, clock::Monotonic};

/// Transfers of a room whose end was not seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::request) struct NotOver {
    /// How many.
    pub(in crate::request) transfers: usize,
    /// When the oldest was posted.
    pub(in crate::request) oldest: Monotonic,
    /// Whether one is certainly under way: a flush of it is out, whose end is seen when it comes.
    pub(in crate::request) on_the_wire: bool,
}

impl Transfers {
    /// What is not over of a room's transfers that were posted at `since` or later.
    pub(in crate::request) fn not_over(&self, room: Room, since: Monotonic) -> Option<NotOver> {
        let known = self.of_room(room)?;
        let oldest = known.not_over_since(since).map(|(posted, _)| posted).min()?;
        let on_the_wire = known.not_over_since(since).any(|(_, generation)| self.flushes.is_under_way(generation));
        Some(NotOver { transfers: known.not_over_since(since).count(), oldest, on_the_wire })
    }

    /// The request of a sender has left while these were not over: the next reading of one may prove that it ran on.
    pub(in crate::request) fn await_reading(&mut self, room: Room, since: Monotonic, serial: u64) {
        let Some(known) = self.subjects.get(&super::TransferSubject::Room(room)) else { return };
        let free = self.limit.saturating_sub(self.awaited.len());
        self.awaited.extend(known.not_over_since(since).take(free).map(|(_, generation)| (generation, serial)));
    }
}
