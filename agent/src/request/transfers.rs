//! The transfers of one process, as its transfer engine's library tells of them: which are under way, of which room,
//! and how the others ended. Pure; bounded.

mod lifecycle;
mod released;

use std::collections::{HashMap, HashSet, VecDeque};

use super::{
    correlate::{NotJoined, TransferSubject},
    flush::{Flushes, WireEnd},
    transfer::{
        Looked, Observation, SubjectTransfers, Transfer, TransferEnd, TransferState, end_of_posting, end_of_release,
        end_of_status,
    },
};
use crate::{
    event::{
        Room,
        clock::Monotonic,
        native::{Engine, Handle, NIXL_REMOTE_DISCONNECT, NativeEvent, TransferStatus},
    },
    record::codec::recorded,
};
use lifecycle::Made;
pub(super) use released::NotOver;

/// What was counted of a process's transfers.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// Transfers that ended: by engine and name of the end, how many and how many bytes.
    pub ended: HashMap<(Engine, &'static str), (u64, u64)>,
    /// Transfers that could not be joined, by reason.
    pub not_joined: HashMap<NotJoined, u64>,
    /// Transfers that were not kept, because there were too many. Each is counted once, whether it is known by its making
    /// or by its posting.
    pub not_kept: u64,
    /// Transfers whose bytes are extrapolated, or not known at all.
    pub size_not_known: u64,
    /// Notifications that arrived.
    pub notifications_arrived: u64,
    /// Notifications that were sent.
    pub notifications_sent: u64,
    /// Transfers that the engine refused to make.
    pub not_made: u64,
    /// Endpoints that were given up, by `ucs_status_t`.
    pub endpoint_errors: HashMap<i8, u64>,
    /// Work completions with an error, by `ibv_wc_status`.
    pub completion_errors: HashMap<u32, u64>,
    /// Requests that left the inflight queue, and with it their pages, while a transfer of theirs was under way: those of which
    /// that is proved.
    pub unsafe_releases: u64,
}

/// What a worker thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The room whose chunk it took.
    pub room: Room,
    /// When.
    pub since: Monotonic,
    /// From which transfer queue, where the hook says.
    pub queue: Option<u64>,
}

/// The transfers of one process.
#[derive(Debug)]
pub struct Transfers {
    /// What is large is boxed: a table of many entries is more than half empty once it has grown.
    live: HashMap<Handle, Box<Transfer>>,
    /// Handles whose transfer could not be kept when it was made, and is counted.
    refused: HashSet<Handle>,
    /// Handles that were not under way when they were put here: the first to go when there are too many.
    idle: VecDeque<(Handle, u64)>,
    /// Transfers that were given up and may go on, by generation: they have no handle any more.
    abandoned: HashMap<u64, Box<Transfer>>,
    /// Those whose reading may prove that a request gave its pages back too early: its serial, by generation.
    awaited: HashMap<u64, u64>,
    flushes: Flushes,
    /// Handles of those transfers whose flushes are followed, by generation.
    flushed_handles: HashMap<u64, Handle>,
    /// What each thread posted last, as long as that call is not known to have returned.
    posting: HashMap<u32, u64>,
    subjects: HashMap<TransferSubject, Box<SubjectTransfers>>,
    not_joined: SubjectTransfers,
    workers: HashMap<u32, Work>,
    generation: u64,
    limit: usize,
    counted: Counted,
}

recorded!(struct Transfers {
    live, idle, abandoned, awaited, flushes, flushed_handles, posting, subjects, not_joined, workers, generation, limit,
} else { counted: Counted::default(), refused: HashSet::new() });
recorded!(struct Work { room, since, queue });

impl Transfers {
    /// Keeps at most `limit` transfers. What is over or was never posted goes first; when all are under way, no further
    /// one is kept, which is counted.
    pub fn new(limit: usize) -> Self {
        Self {
            live: HashMap::new(),
            refused: HashSet::new(),
            idle: VecDeque::new(),
            abandoned: HashMap::new(),
            awaited: HashMap::new(),
            flushes: Flushes::default(),
            flushed_handles: HashMap::new(),
            posting: HashMap::new(),
            subjects: HashMap::new(),
            not_joined: SubjectTransfers::default(),
            workers: HashMap::new(),
            generation: 0,
            limit,
            counted: Counted::default(),
        }
    }

    /// Whether there ever was one.
    pub fn has_seen_any(&self) -> bool {
        self.generation > 0
    }

    /// What is known of a room's transfers.
    pub fn of_room(&self, room: Room) -> Option<&SubjectTransfers> {
        self.subjects.get(&TransferSubject::Room(room)).map(Box::as_ref)
    }

    /// How many transfers were given up whose end may still be seen, by engine.
    pub fn given_up(&self) -> impl Iterator<Item = (Engine, usize)> {
        let count = |engine| self.abandoned.values().filter(|transfer| transfer.handle.engine == engine).count();
        Engine::ALL.into_iter().map(move |engine| (engine, count(engine)))
    }

    /// Every room and request of which something is known.
    pub fn subjects(&self) -> impl Iterator<Item = (&TransferSubject, &SubjectTransfers)> {
        self.subjects.iter().map(|(subject, known)| (subject, known.as_ref()))
    }

    /// The transfers that belong to nobody that is known.
    pub fn not_joined(&self) -> &SubjectTransfers {
        &self.not_joined
    }

    /// Every transfer whose handle lives.
    pub fn live(&self) -> impl Iterator<Item = &Transfer> {
        self.live.values().map(Box::as_ref)
    }

    pub(super) fn weight(&self) -> usize {
        self.live.len() + self.abandoned.len() + self.subjects.len() + self.workers.len()
    }

    /// What was counted since it was taken last.
    pub fn counted(&self) -> &Counted {
        &self.counted
    }

    /// What was counted since the last time.
    pub fn take_counted(&mut self) -> Counted {
        std::mem::take(&mut self.counted)
    }

    /// Counts a request that left its pages to others while a transfer of its room is under way.
    pub(super) fn count_unsafe_release(&mut self) {
        self.counted.unsafe_releases += 1;
    }

    /// When the oldest transfer that is under way was posted.
    pub fn oldest(&self) -> Option<Monotonic> {
        self.live.values().filter(|it| it.state == TransferState::InFlight).map(|it| it.since).min()
    }

    /// Takes over what a look that ended at `at` saw: how often the status of each handle was asked for.
    pub fn looked(&mut self, polls: &HashMap<u64, u64>, began: Monotonic, at: Monotonic) {
        let is_watched = |it: &&Transfer| it.state == TransferState::InFlight && it.since <= began;
        let mut watched: Vec<&Transfer> = self.live.values().map(Box::as_ref).filter(is_watched).collect();
        // Of several of a room, what is said of the oldest counts.
        watched.sort_unstable_by_key(|transfer| std::cmp::Reverse(transfer.generation));
        for transfer in watched {
            let polls = polls.get(&transfer.handle.number).copied().unwrap_or(0);
            let subject = transfer.joined.subject();
            subject_mut(&mut self.subjects, &mut self.not_joined, subject).looked = Some(Looked { at, polls });
        }
    }

    /// What each worker thread that holds a chunk is doing.
    pub fn workers(&self) -> &HashMap<u32, Work> {
        &self.workers
    }

    /// A worker thread takes a chunk, or is done with the one that it had.
    pub fn working_on(&mut self, tid: u32, work: Option<Work>) {
        match work {
            Some(work) => self.workers.insert(tid, work),
            None => self.workers.remove(&tid),
        };
    }

    /// What workers are doing is not known any more.
    pub(super) fn forget_workers(&mut self) {
        self.workers.clear();
    }

    fn room_of_worker(&self, tid: u32) -> Option<Room> {
        self.workers.get(&tid).map(|work| work.room)
    }

    /// The last sender of a room is gone: what is over is forgotten.
    pub fn room_without_senders(&mut self, room: Room) {
        let subject = TransferSubject::Room(room);
        if self.subjects.get(&subject).is_some_and(|known| known.is_over()) {
            self.subjects.remove(&subject);
        }
    }

    /// Applies a call. `has_senders` says of which rooms something is to be kept though it is over. Returns whether
    /// everything could be kept.
    pub fn apply(&mut self, event: &NativeEvent, at: Monotonic, tid: u32, has_senders: impl Fn(Room) -> bool) -> bool {
        self.returned_before(event, at, tid, &has_senders);
        match event {
            NativeEvent::Made { handle, operation, parts, size, notification } => {
                let made = Made { operation: *operation, parts: *parts, size: *size };
                self.made(*handle, made, notification.as_ref(), at, tid, has_senders)
            }
            NativeEvent::NotMade { .. } => {
                self.counted.not_made += 1;
                true
            }
            NativeEvent::Posting { handle, operation, first_length, lists } => {
                // A second post of one that is under way is refused: what it waits for stays as it is.
                let goes_on = self.is_in_flight(*handle);
                let posted = self.posting(*handle, *operation, *first_length, at, tid);
                if !goes_on {
                    self.follow_flushes(*handle, *lists, tid);
                }
                posted
            }
            NativeEvent::RangePosted { list, flush, descriptors, took } => {
                let end = self.flushes.range_posted(*list, *flush, *descriptors, at, *took);
                self.over_on_the_wire(end, at, has_senders);
                true
            }
            NativeEvent::Flushed { completion, status } => {
                let end = self.flushes.flushed(*completion, *status, at);
                self.over_on_the_wire(end, at, has_senders);
                true
            }
            NativeEvent::Status { handle, status: TransferStatus::Failed { code }, .. }
                if handle.engine == Engine::Mooncake =>
            {
                self.failed_in_part(*handle, *code, at);
                true
            }
            NativeEvent::Status { handle, status, .. } => {
                if let Some(end) = end_of_status(handle.engine, *status) {
                    self.end(*handle, end, at, has_senders);
                }
                true
            }
            NativeEvent::Posted { handle, status } => {
                if let Some(end) = end_of_posting(handle.engine, *status) {
                    self.end(*handle, end, at, has_senders);
                }
                true
            }
            NativeEvent::Releasing { handle, status } => {
                let end = end_of_release(handle.engine, *status);
                self.end(*handle, end, at, has_senders);
                self.released(*handle);
                true
            }
            NativeEvent::NotificationArrived { .. } => {
                self.counted.notifications_arrived += 1;
                true
            }
            NativeEvent::NotificationSent { .. } => {
                self.counted.notifications_sent += 1;
                true
            }
            NativeEvent::EndpointError { status, .. } => {
                *self.counted.endpoint_errors.entry(*status).or_default() += 1;
                true
            }
            NativeEvent::CompletionError { status, .. } => {
                *self.counted.completion_errors.entry(*status).or_default() += 1;
                true
            }
        }
    }

    /// The transfers of which the server's memory should be read: those that have been under way for some time or whose
    /// request has left, and batches that were given up, which Mooncake does not free. The oldest first, at most `most`, those
    /// that somebody waits for before all others.
    pub fn to_observe(&self, posted_before: Monotonic, most: usize) -> Vec<(Handle, u64)> {
        let is_due = |it: &Transfer| it.since <= posted_before || self.awaited.contains_key(&it.generation);
        let in_flight = self.live.values().filter(|it| it.state == TransferState::InFlight && is_due(it));
        let given_up = self.abandoned.values().filter(|it| it.handle.engine == Engine::Mooncake);
        let mut due: Vec<(Handle, u64)> = in_flight.chain(given_up).map(|it| (it.handle, it.generation)).collect();
        due.sort_unstable_by_key(|(_, generation)| (!self.awaited.contains_key(generation), *generation));
        due.truncate(most);
        due
    }

    /// When a transfer was posted last, while its handle is its own.
    pub(super) fn posted_at(&self, handle: Handle, generation: u64) -> Option<Monotonic> {
        self.live.get(&handle).filter(|transfer| transfer.generation == generation).map(|transfer| transfer.since)
    }

    /// Takes over what was read of a transfer in the server's memory, unless it has ended, or the handle is another one's, by
    /// now. Returns the serial of the request that has left, where that shows that its transfer ran on: a batch counts by itself,
    /// while a NIXL handle has the status that a poll left there.
    pub fn observed(&mut self, seen: Observation, at: Monotonic, has_senders: impl Fn(Room) -> bool) -> Option<u64> {
        let is_it = |it: &&mut Box<Transfer>| it.generation == seen.generation && it.state == TransferState::InFlight;
        let live = self.live.get_mut(&seen.handle).filter(is_it);
        // Mooncake keeps a batch that was given up; NIXL's handle may have been another transfer's when it was read.
        let given_up = self.abandoned.get_mut(&seen.generation).filter(|it| it.handle.engine == Engine::Mooncake);
        let transfer = live.or(given_up)?;
        if let Some(moved) = seen.moved.filter(|moved| *moved > transfer.moved) {
            transfer.moved = moved;
            let subject = transfer.joined.subject();
            subject_mut(&mut self.subjects, &mut self.not_joined, subject).last_progress = Some(at);
        }
        match end_of_status(seen.handle.engine, seen.status) {
            Some(end) => self.proved(seen.generation, seen.handle, end, at, has_senders),
            None if seen.handle.engine == Engine::Mooncake => return self.awaited.get(&seen.generation).copied(),
            None => {}
        }
        None
    }

    fn is_in_flight(&self, handle: Handle) -> bool {
        self.live.get(&handle).is_some_and(|transfer| transfer.state == TransferState::InFlight)
    }

    fn over_on_the_wire(&mut self, end: Option<(u64, WireEnd)>, at: Monotonic, has_senders: impl Fn(Room) -> bool) {
        let Some((generation, end)) = end else { return };
        let Some(handle) = self.flushed_handles.remove(&generation) else { return };
        let end = match end {
            WireEnd::Done => TransferEnd::Done,
            WireEnd::Failed { .. } => TransferEnd::Failed { code: NIXL_REMOTE_DISCONNECT },
        };
        self.proved(generation, handle, end, at, has_senders);
    }

    /// It is proved that the device is done with a transfer, which may have been given up before.
    fn proved(
        &mut self,
        generation: u64,
        handle: Handle,
        end: TransferEnd,
        at: Monotonic,
        has_senders: impl Fn(Room) -> bool,
    ) {
        if let Some(transfer) = self.abandoned.remove(&generation) {
            self.stop_following(generation);
            let subject = transfer.joined.subject();
            let known = subject_mut(&mut self.subjects, &mut self.not_joined, subject.clone());
            known.proved_over((transfer.since, generation), handle.engine, end, at);
            self.forget_if_over(subject, has_senders);
        } else if self.live.get(&handle).is_some_and(|transfer| transfer.generation == generation) {
            self.end(handle, end, at, has_senders);
        }
    }

    fn stop_following(&mut self, generation: u64) {
        self.awaited.remove(&generation);
        self.flushes.forget(generation);
        self.flushed_handles.remove(&generation);
    }

    /// One of a batch's requests failed; the others may go on.
    fn failed_in_part(&mut self, handle: Handle, code: i32, at: Monotonic) {
        if let Some(transfer) = self.live.get(&handle).filter(|transfer| transfer.state == TransferState::InFlight) {
            let subject = transfer.joined.subject();
            subject_mut(&mut self.subjects, &mut self.not_joined, subject).failure = Some((at, handle.engine, code));
        }
    }
}

fn subject_mut<'a>(
    subjects: &'a mut HashMap<TransferSubject, Box<SubjectTransfers>>,
    not_joined: &'a mut SubjectTransfers,
    subject: Option<TransferSubject>,
) -> &'a mut SubjectTransfers {
    match subject {
        Some(subject) => subjects.entry(subject).or_default(),
        None => not_joined,
    }
}

#[cfg(test)]
mod tests;
