//! What a process's transfer engine says, applied.

use std::collections::HashMap;

use super::{
    super::{
        EndpointFailure, Watch,
        transfer::Observation,
        transfers::{Counted, Transfers},
    },
    Applying, Process,
};
use crate::event::{
    Room,
    clock::Monotonic,
    native::{Engine, NativeEvent},
};

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

    pub(super) fn native(&mut self, event: &NativeEvent, applying: &Applying<'_>) {
        let at = applying.at;
        match event {
            NativeEvent::EndpointError { point, status, .. } => {
                self.state.native.endpoint_error = Some(EndpointFailure { at, point: *point, status: *status });
            }
            NativeEvent::CompletionError { status, .. } => self.state.native.completion_error = Some((at, *status)),
            _ => {}
        }
        let rooms = &self.rooms;
        let has_senders = |room: Room| rooms.get(&room).is_some_and(|state| !state.senders.is_empty());
        if !self.transfers.apply(event, at, applying.tid, has_senders) {
            self.native_lost(at);
        }
    }

    /// Forgets failures of rooms without senders that are older than `before`.
    pub(in crate::request) fn prune(&mut self, before: Monotonic) {
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

    /// A request leaves the inflight queue: the server gives its pages to others.
    pub(super) fn pages_released(&mut self, room: Room) {
        if self.transfers.of_room(room).is_some_and(|known| known.under_way().is_some()) {
            self.transfers.count_unsafe_release();
        }
    }

    /// What was read of a transfer in the server's memory.
    pub(in crate::request) fn observed(&mut self, seen: Observation, at: Monotonic) {
        let rooms = &self.rooms;
        let has_senders = |room: Room| rooms.get(&room).is_some_and(|state| !state.senders.is_empty());
        self.transfers.observed(seen, at, has_senders);
    }
}
