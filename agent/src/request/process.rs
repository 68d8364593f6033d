//! One traced process: its senders, rooms and queue, and how well all of it is known.

mod concluded;
mod dead;
mod gauge;
mod inflight;
mod native;
mod ranks;
mod receiving;
mod released;
mod resync;
mod rooms;

use std::{
    collections::{BTreeMap, HashMap},
    iter,
    ops::Bound,
};

use super::{
    Aborted, Ended, Request, RequestKey, Resurrected, ResyncReason, RoomState, ServerState, Sync,
    tracker::{Change, Step, Tracked, Unused},
    transfers::Transfers,
};
use concluded::{ConcludedRooms, conclusion};
use dead::DeadRooms;
use ranks::LeftRooms;
pub(super) use ranks::differences;
use receiving::QueueLengths;
use released::Released;
use resync::Resync;

use crate::{
    event::{Body, Event, LeaveReason, Phase, ProcessKey, Room, clock::Monotonic},
    record::codec::recorded,
};

/// Serials from one bound to the other.
pub(super) type Serials = (Bound<u64>, Bound<u64>);

pub(super) const ALL_SERIALS: Serials = (Bound::Unbounded, Bound::Unbounded);

#[derive(Debug)]
pub(super) struct Process {
    key: ProcessKey,
    clock_offset: i64,
    state: ServerState,
    /// By serial, the oldest first: what is walked in order gives the same verdicts in a replay. Boxed, since a tree's
    /// nodes are half empty.
    requests: BTreeMap<u64, Box<Request>>,
    released: Released,
    left: LeftRooms,
    concluded: ConcludedRooms,
    /// Those that have a sender, and those that are kept without one. Boxed, since a table of many entries is more than
    /// half empty once it has grown.
    rooms: HashMap<Room, Box<RoomState>>,
    dead: DeadRooms,
    transfers: Transfers,
    inflight: u32,
    queued: QueueLengths,
    newest_serial: u64,
    passes_in_doubt: u32,
    resync: Option<Resync>,
}

recorded!(struct Process {
    key, clock_offset, state, requests, rooms, dead, transfers, inflight, newest_serial, passes_in_doubt, resync,
    released, left, concluded, queued,
});

/// What applying an event needs beside the process.
pub(super) struct Applying<'a> {
    pub(super) at: Monotonic,
    pub(super) tid: u32,
    pub(super) changes: &'a mut Vec<Change>,
    pub(super) unused: &'a mut Unused,
    pub(super) max_requests: usize,
}

impl Process {
    pub(super) fn new(key: ProcessKey, clock_offset: i64, max_transfers: usize) -> Self {
        Self {
            key,
            clock_offset,
            state: ServerState::new(Sync::Needed(ResyncReason::Attached)),
            requests: BTreeMap::new(),
            released: Released::default(),
            left: LeftRooms::default(),
            concluded: ConcludedRooms::default(),
            rooms: HashMap::new(),
            dead: DeadRooms::default(),
            transfers: Transfers::new(max_transfers),
            inflight: 0,
            queued: QueueLengths::default(),
            newest_serial: 0,
            passes_in_doubt: 0,
            resync: None,
        }
    }

    pub(super) fn key(&self) -> ProcessKey {
        self.key
    }

    pub(super) fn state(&self) -> &ServerState {
        &self.state
    }

    pub(super) fn weight(&self) -> usize {
        const ITSELF: usize = 8;
        ITSELF + self.requests.len() + self.released.len() + self.rooms.len() + self.transfers.weight()
    }

    pub(super) fn tracked(&self, serial: u64) -> Option<Tracked<'_>> {
        self.requests.get(&serial).and_then(|request| self.with_room(request))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = Tracked<'_>> {
        self.requests.values().filter_map(|request| self.with_room(request))
    }

    /// The requests that [`Process::judged`] shows.
    pub(super) fn judged_keys(&self, now: Monotonic) -> impl Iterator<Item = RequestKey> {
        self.to_judge(now, ALL_SERIALS).map(|request| self.request_key(request.serial))
    }

    /// Every live request, and those that ended in a way that rules are to see, whose serials are within these bounds, in
    /// order.
    pub(super) fn judged(&self, now: Monotonic, serials: Serials) -> impl Iterator<Item = Tracked<'_>> {
        self.to_judge(now, serials).filter_map(|request| {
            let room = self.rooms.get(&request.room).map(Box::as_ref);
            let room = room.or(request.ended.is_some().then(|| self.released.no_room()))?;
            let key = self.request_key(request.serial);
            Some(Tracked { key, request, room, server: &self.state, transfers: &self.transfers })
        })
    }

    fn to_judge(&self, now: Monotonic, serials: Serials) -> impl Iterator<Item = &Request> {
        let mut live = self.requests.range(serials).map(|(_, request)| request.as_ref()).peekable();
        let mut released = self.released.shown(now, serials).peekable();
        iter::from_fn(move || match (live.peek(), released.peek()) {
            (Some(first), Some(other)) if other.serial < first.serial => released.next(),
            (Some(_), _) => live.next(),
            (None, _) => released.next(),
        })
    }

    fn with_room<'a>(&'a self, request: &'a Request) -> Option<Tracked<'a>> {
        let key = self.request_key(request.serial);
        let room = self.rooms.get(&request.room)?;
        Some(Tracked { key, request, room, server: &self.state, transfers: &self.transfers })
    }

    fn request_key(&self, serial: u64) -> RequestKey {
        RequestKey { process: self.key, serial }
    }

    /// The process is gone, and all its requests with it.
    pub(super) fn end(mut self, at: Monotonic, changes: &mut Vec<Change>) {
        let mut unused = Unused::default();
        let mut applying = Applying { at, tid: 0, changes, unused: &mut unused, max_requests: usize::MAX };
        for serial in self.serials() {
            self.forget(serial, None, &mut applying);
        }
    }

    fn serials(&self) -> Vec<u64> {
        self.requests.keys().copied().collect()
    }

    pub(super) fn apply(&mut self, event: &Event, applying: &mut Applying<'_>) {
        let at = event.at;
        if event.detail_lost {
            self.needs_resync(ResyncReason::DetailLost);
        }
        if matches!(event.body, Body::Enter { .. } | Body::Leave { .. }) {
            self.state.gauge.queue_rests = Some(at);
        }
        match &event.body {
            Body::Hello(hello) => self.state.hello = Some(hello.clone()),
            Body::StateBegin { epoch } => self.begin_resync(*epoch),
            Body::Entry { room, sender, epoch, entry } => self.entry(*room, *sender, *epoch, entry, None, applying),
            Body::StateEnd { epoch, entries } => self.end_resync(*epoch, *entries, applying),
            Body::Open { room, sender, backend } => {
                self.opened(Request::opened(*sender, *room, *backend, at), applying);
            }
            Body::Receiver(event) => self.receiver(event, applying),
            Body::Close { sender, .. } => {
                if self.requests.contains_key(sender) {
                    self.forget(*sender, None, applying);
                }
            }
            Body::Phase { sender, old, new, .. } => {
                let passes = self.state.passes;
                if let (Some(request), Some(new)) = (self.request(*sender, applying), *new) {
                    if *old == Some(Phase::Failed) {
                        request.resurrected = Some(Box::new(Resurrected { at, to: new }));
                    }
                    request.phase = Some(new);
                    request.phase_since = at;
                    request.phase_passes = passes;
                    self.changed(*sender, Step::Phase { old: *old, new }, applying);
                }
            }
            Body::Abort { sender, .. } => {
                let passes = self.state.passes;
                if let Some(request) = self.request(*sender, applying) {
                    // The first one counts: a client that repeats itself must not start the clock again.
                    request.aborted.get_or_insert_with(|| Box::new(Aborted { at, passes }));
                    self.changed(*sender, Step::Aborted, applying);
                }
            }
            Body::Update { room, requested, before, after } => {
                self.update(*room, *requested, *before, *after, applying)
            }
            Body::Send { sender, pages, last, .. } => {
                if let Some(request) = self.request(*sender, applying) {
                    request.sent_chunks = request.sent_chunks.saturating_add(1);
                    request.sent_pages = request.sent_pages.saturating_add(u64::from(*pages));
                    request.sent_last |= last;
                    let room = request.room;
                    let state = self.room(room);
                    state.sent_chunks = state.sent_chunks.saturating_add(1);
                }
            }
            Body::Clear { room, sender, removed } => self.clear(*room, *sender, *removed, applying),
            Body::Failure { sender, .. } => {
                if let Some(request) = self.request(*sender, applying) {
                    request.failed = Some(at);
                    // In a queue the `leave` mark follows, with the reason.
                    if !request.is_queued() {
                        self.forget(*sender, None, applying);
                    }
                }
            }
            Body::Enter { sender, rid, .. } => self.enter(*sender, rid.as_ref(), applying),
            Body::Leave { sender, reason, .. } => self.leave(*sender, *reason, applying),
            Body::PeerAbort { room, .. } => {
                for serial in self.room(*room).senders.clone() {
                    if let Some(request) = self.requests.get_mut(&serial) {
                        request.peer_aborted = Some(at);
                    }
                }
                self.drop_idle_room(*room, applying);
            }
            Body::Chunk { room, step, counts, queue } => self.chunk(*room, *step, *counts, *queue, applying),
            Body::Pass { queue_length, passes } => self.pass(*queue_length, *passes, at),
            Body::Paused => self.state.paused = true,
            Body::Resumed => {
                self.state.paused = false;
                // A pause may be longer than any stall; only a loop that was seen to turn is expected to go on.
                self.state.turned = self.state.turned.map(|_| at);
            }
            Body::Remedy { sender, flag, .. } => {
                if let Some(request) = self.request(*sender, applying) {
                    request.remedied = Some(at);
                    self.changed(*sender, Step::Remedied(*flag), applying);
                }
            }
            Body::Native(native) => self.native(native, applying),
        }
    }

    fn room(&mut self, room: Room) -> &mut RoomState {
        self.rooms.entry(room).or_default()
    }

    /// The request of a sender; an unknown one that is newer than all known means that its `open` was missed.
    fn request(&mut self, serial: u64, applying: &mut Applying<'_>) -> Option<&mut Request> {
        if !self.requests.contains_key(&serial) {
            if serial > self.newest_serial {
                applying.unused.unknown_sender += 1;
                if self.state.sync == Sync::Complete {
                    self.needs_resync(ResyncReason::UnknownSender);
                }
            }
            return None;
        }
        self.requests.get_mut(&serial).map(Box::as_mut)
    }

    fn changed(&self, serial: u64, step: Step, applying: &mut Applying<'_>) {
        applying.changes.push(Change {
            key: self.request_key(serial),
            at: applying.at,
            tid: applying.tid,
            step,
            ended: None,
        });
    }

    fn opened(&mut self, request: Request, applying: &mut Applying<'_>) {
        let serial = request.serial;
        self.insert(request, applying);
        if let Some(resync) = &mut self.resync {
            resync.alive.insert(serial);
        }
        self.changed(serial, Step::Opened, applying);
    }

    fn insert(&mut self, mut request: Request, applying: &mut Applying<'_>) {
        if self.requests.len() >= applying.max_requests
            && let Some(oldest) = self.requests.first_key_value().map(|(serial, _)| *serial)
        {
            applying.unused.retired += 1;
            self.forget_unseen(oldest, applying);
        }
        let (serial, room) = (request.serial, request.room);
        // A serial that is opened again is a hook's fault; the books must balance all the same.
        let former = self.take_out(serial);
        self.newest_serial = self.newest_serial.max(serial);
        let state = self.rooms.entry(room).or_default();
        if let Some(&other) = state.senders.iter().rfind(|other| **other != serial) {
            request.shared_with.get_or_insert(other);
            if let Some(other) = self.requests.get_mut(&other) {
                other.shared_with.get_or_insert(serial);
            }
        }
        if !state.senders.contains(&serial) {
            // Nearly every room has one; a vector that grows by itself begins with four.
            state.senders.reserve_exact(1);
            state.senders.push(serial);
        }
        if request.is_inflight() {
            self.inflight = self.inflight.saturating_add(1);
        }
        self.queued.count(request.receiving);
        self.dead.forget(room);
        self.released.forget(serial);
        self.requests.insert(serial, Box::new(request));
        if let Some(former) = former.filter(|former| former.room != room) {
            self.drop_idle_room(former.room, applying);
        }
    }

    fn take_out(&mut self, serial: u64) -> Option<Box<Request>> {
        let request = self.requests.remove(&serial)?;
        if request.is_inflight() {
            self.inflight = self.inflight.saturating_sub(1);
        }
        self.queued.discount(request.receiving);
        if let Some(room) = self.rooms.get_mut(&request.room) {
            room.senders.retain(|other| *other != serial);
        }
        Some(request)
    }

    /// Takes a request out and reports it as ended.
    fn forget(&mut self, serial: u64, left: Option<LeaveReason>, applying: &mut Applying<'_>) {
        let unsafe_release = left.and_then(|left| self.unsafe_release(serial, left));
        let Some(mut request) = self.take_out(serial) else { return };
        request.ended = Some(Box::new(Ended { at: applying.at, left, unsafe_release: unsafe_release.map(Box::new) }));
        if unsafe_release.is_some() {
            self.transfers.count_unsafe_release();
            self.released.keep(request.as_ref().clone());
        }
        self.concluded.keep(request.room, conclusion(&request, left), applying.at);
        if left.is_some() && self.has_other_ranks() {
            self.left.keep(request.room, applying.at);
        }
        self.drop_idle_room(request.room, applying);
        applying.changes.push(Change {
            key: self.request_key(serial),
            at: applying.at,
            tid: applying.tid,
            step: left.map_or(Step::Ended, Step::Left),
            ended: Some(request),
        });
    }

    /// The same of a request whose end was not seen, and may be still to come.
    fn forget_unseen(&mut self, serial: u64, applying: &mut Applying<'_>) {
        let room = self.requests.get(&serial).map(|request| request.room);
        self.forget(serial, None, applying);
        if let Some(room) = room {
            self.concluded.forget(room);
        }
    }
}

#[cfg(test)]
#[path = "process/room_tests.rs"]
mod room_tests;
