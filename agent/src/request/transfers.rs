//! The transfers of one process, as its transfer engine's library tells of them: which are under way, of which room,
//! and how the others ended. Pure; bounded.

use std::collections::{HashMap, VecDeque};

use super::{
    correlate::{Joined, NotJoined, TransferSubject, join},
    transfer::{
        Observation, SubjectTransfers, Transfer, TransferEnd, TransferState, end_of_posting, end_of_release,
        end_of_status,
    },
};
use crate::event::{
    Room,
    clock::Monotonic,
    native::{Engine, Handle, NativeEvent, Notification, Operation, Size, TransferStatus},
};

/// Rooms and requests of which something is kept.
const MAX_SUBJECTS: usize = 262_144;

/// What was counted of a process's transfers.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// Transfers that ended: by engine and name of the end, how many and how many bytes.
    pub ended: HashMap<(Engine, &'static str), (u64, u64)>,
    /// Transfers that could not be joined, by reason.
    pub not_joined: HashMap<NotJoined, u64>,
    /// Transfers that were not kept, because there were too many.
    pub not_kept: u64,
    /// Transfers whose bytes are extrapolated, or not known at all.
    pub size_not_known: u64,
    /// Notifications that arrived.
    pub notifications_arrived: u64,
    /// Notifications that were sent.
    pub notifications_sent: u64,
    /// Transfers that the engine refused to make.
    pub not_made: u64,
}

/// What a worker thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The room whose chunk it took.
    pub room: Room,
    /// When.
    pub since: Monotonic,
}

/// The transfers of one process.
#[derive(Debug)]
pub struct Transfers {
    live: HashMap<Handle, Transfer>,
    /// Handles that were not under way when they were put here: the first to go when there are too many.
    idle: VecDeque<(Handle, u64)>,
    subjects: HashMap<TransferSubject, SubjectTransfers>,
    not_joined: SubjectTransfers,
    workers: HashMap<u32, Work>,
    generation: u64,
    limit: usize,
    counted: Counted,
}

impl Transfers {
    /// Keeps at most `limit` transfers. What is over or was never posted goes first; when all are under way, no further
    /// one is kept, which is counted.
    pub fn new(limit: usize) -> Self {
        Self {
            live: HashMap::new(),
            idle: VecDeque::new(),
            subjects: HashMap::new(),
            not_joined: SubjectTransfers::default(),
            workers: HashMap::new(),
            generation: 0,
            limit,
            counted: Counted::default(),
        }
    }

    /// What is known of a room's transfers.
    pub fn of_room(&self, room: Room) -> Option<&SubjectTransfers> {
        self.subjects.get(&TransferSubject::Room(room))
    }

    /// Every room and request of which something is known.
    pub fn subjects(&self) -> impl Iterator<Item = (&TransferSubject, &SubjectTransfers)> {
        self.subjects.iter()
    }

    /// The transfers that belong to nobody that is known.
    pub fn not_joined(&self) -> &SubjectTransfers {
        &self.not_joined
    }

    /// Every transfer whose handle lives.
    pub fn live(&self) -> impl Iterator<Item = &Transfer> {
        self.live.values()
    }

    /// What was counted so far.
    pub fn counted(&self) -> &Counted {
        &self.counted
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

    fn room_of_worker(&self, tid: u32) -> Option<Room> {
        self.workers.get(&tid).map(|work| work.room)
    }

    /// The last sender of a room is gone: what is over is forgotten.
    pub fn room_without_senders(&mut self, room: Room) {
        let subject = TransferSubject::Room(room);
        if self.subjects.get(&subject).is_some_and(SubjectTransfers::is_over) {
            self.subjects.remove(&subject);
        }
    }

    /// Applies a call. `has_senders` says of which rooms something is to be kept though it is over. Returns whether
    /// everything could be kept.
    pub fn apply(&mut self, event: &NativeEvent, at: Monotonic, tid: u32, has_senders: impl Fn(Room) -> bool) -> bool {
        match event {
            NativeEvent::Made { handle, operation, parts, size, notification } => {
                let made = Made { operation: *operation, parts: *parts, size: *size };
                self.made(*handle, made, notification.as_ref(), at, tid, has_senders)
            }
            NativeEvent::NotMade { .. } => {
                self.counted.not_made += 1;
                true
            }
            NativeEvent::Posting { handle, operation, first_length } => {
                self.posting(*handle, *operation, *first_length, at, tid)
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
                // A batch that is given up is not freed: its memory goes on to say where it stands.
                if handle.engine != Engine::Mooncake || end != TransferEnd::GivenUp {
                    self.live.remove(handle);
                }
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
            NativeEvent::EndpointError { .. } | NativeEvent::CompletionError { .. } => true,
        }
    }

    /// The transfers of which the server's memory should be read: those that have been under way for some time, and
    /// batches that were given up, which Mooncake does not free. The oldest first, at most `most`.
    pub fn to_observe(&self, posted_before: Monotonic, most: usize) -> Vec<(Handle, u64)> {
        let is_due = |transfer: &&Transfer| match transfer.state {
            TransferState::InFlight => transfer.since <= posted_before,
            TransferState::Ended(TransferEnd::GivenUp) => transfer.handle.engine == Engine::Mooncake,
            _ => false,
        };
        let mut due: Vec<&Transfer> = self.live.values().filter(is_due).collect();
        due.sort_unstable_by_key(|transfer| transfer.generation);
        due.into_iter().take(most).map(|transfer| (transfer.handle, transfer.generation)).collect()
    }

    /// Takes over what was read of a transfer in the server's memory, unless the handle is another one's by now.
    pub fn observed(&mut self, seen: Observation, at: Monotonic, has_senders: impl Fn(Room) -> bool) {
        let Some(transfer) = self.live.get_mut(&seen.handle) else { return };
        if transfer.generation != seen.generation {
            return;
        }
        let subject = transfer.joined.subject();
        if let Some(moved) = seen.moved.filter(|moved| *moved > transfer.moved) {
            transfer.moved = moved;
            subject_mut(&mut self.subjects, &mut self.not_joined, subject.clone()).last_progress = Some(at);
        }
        let Some(end) = end_of_status(seen.handle.engine, seen.status) else { return };
        if transfer.state == TransferState::Ended(TransferEnd::GivenUp) {
            transfer.state = TransferState::Ended(end);
            subject_mut(&mut self.subjects, &mut self.not_joined, subject).proved_over(seen.handle.engine, end, at);
            self.live.remove(&seen.handle);
        } else {
            self.end(seen.handle, end, at, has_senders);
        }
    }

    /// One of a batch's requests failed; the others may go on.
    fn failed_in_part(&mut self, handle: Handle, code: i32, at: Monotonic) {
        if let Some(transfer) = self.live.get(&handle).filter(|transfer| transfer.state == TransferState::InFlight) {
            let subject = transfer.joined.subject();
            subject_mut(&mut self.subjects, &mut self.not_joined, subject).failure = Some((at, handle.engine, code));
        }
    }

    fn made(
        &mut self,
        handle: Handle,
        made: Made,
        notification: Option<&Notification>,
        at: Monotonic,
        tid: u32,
        has_senders: impl Fn(Room) -> bool,
    ) -> bool {
        // The handle's former transfer must have been released, though that was not seen.
        self.end(handle, TransferEnd::NotSeen, at, has_senders);
        self.live.remove(&handle);
        if !self.make_room() {
            return false;
        }
        self.generation += 1;
        let joined = join(notification, self.room_of_worker(tid));
        let transfer = Transfer {
            handle,
            generation: self.generation,
            operation: made.operation,
            parts: made.parts,
            size: made.size,
            joined,
            tid,
            since: at,
            state: TransferState::Made,
            moved: 0,
        };
        self.idle.push_back((handle, transfer.generation));
        self.live.insert(handle, transfer);
        true
    }

    fn posting(
        &mut self,
        handle: Handle,
        operation: Option<Operation>,
        first_length: Option<u64>,
        at: Monotonic,
        tid: u32,
    ) -> bool {
        let working_on = self.room_of_worker(tid);
        if !self.live.contains_key(&handle) {
            if !self.make_room() {
                return false;
            }
            self.generation += 1;
            let joined = working_on.map_or(Joined::Not(NotJoined::NotSeen), Joined::ByThread);
            let transfer = Transfer {
                handle,
                generation: self.generation,
                operation,
                parts: 0,
                size: None,
                joined,
                tid,
                since: at,
                state: TransferState::Made,
                moved: 0,
            };
            self.live.insert(handle, transfer);
        }
        let Some(transfer) = self.live.get_mut(&handle) else { return false };
        if transfer.state == TransferState::InFlight {
            return true;
        }
        transfer.state = TransferState::InFlight;
        transfer.since = at;
        transfer.tid = tid;
        transfer.operation = operation.or(transfer.operation);
        if let (None, Some(length)) = (transfer.size, first_length) {
            let bytes = length.saturating_mul(transfer.parts.max(1));
            transfer.size = Some(Size { bytes, estimated: transfer.parts != 1 });
        }
        // Made by one thread and posted by a worker: the worker knows.
        if let (Joined::Not(NotJoined::NoNotification), Some(room)) = (&transfer.joined, working_on) {
            transfer.joined = Joined::ByThread(room);
        }
        if let Joined::Not(why) = transfer.joined {
            *self.counted.not_joined.entry(why).or_default() += 1;
        }
        if transfer.size.is_none_or(|size| size.estimated) {
            self.counted.size_not_known += 1;
        }
        let (subject, generation) = (transfer.joined.subject(), transfer.generation);
        let bytes = transfer.size.map_or(0, |size| size.bytes);
        let kept = subject.as_ref().is_none_or(|subject| self.keeps(subject));
        if !kept {
            self.counted.not_kept += 1;
            return false;
        }
        subject_mut(&mut self.subjects, &mut self.not_joined, subject).begin(at, generation, bytes);
        true
    }

    /// Whether there is room for a subject; what is over goes first.
    fn keeps(&mut self, subject: &TransferSubject) -> bool {
        if self.subjects.len() >= MAX_SUBJECTS && !self.subjects.contains_key(subject) {
            self.subjects.retain(|_, transfers| !transfers.is_over());
        }
        self.subjects.len() < MAX_SUBJECTS || self.subjects.contains_key(subject)
    }

    /// Makes room for one more handle: those that were put aside first and are still not under way go.
    fn make_room(&mut self) -> bool {
        while self.live.len() >= self.limit {
            let Some((handle, generation)) = self.idle.pop_front() else {
                self.counted.not_kept += 1;
                return false;
            };
            let is_idle =
                |transfer: &Transfer| transfer.generation == generation && transfer.state != TransferState::InFlight;
            if self.live.get(&handle).is_some_and(is_idle) {
                self.live.remove(&handle);
            }
        }
        // Entries of handles that were released are only taken out here.
        if self.idle.len() > self.limit.saturating_mul(2) {
            let live = &self.live;
            self.idle.retain(|(handle, generation)| {
                live.get(handle).is_some_and(|transfer| {
                    transfer.generation == *generation && transfer.state != TransferState::InFlight
                })
            });
        }
        true
    }

    fn end(&mut self, handle: Handle, end: TransferEnd, at: Monotonic, has_senders: impl Fn(Room) -> bool) {
        let Some(transfer) = self.live.get_mut(&handle) else { return };
        let (posted, generation) = (transfer.since, transfer.generation);
        let end = match (transfer.state, end) {
            (TransferState::InFlight, end) => end,
            (TransferState::Made, TransferEnd::GivenUp | TransferEnd::NotSeen) => TransferEnd::NeverPosted,
            (TransferState::Made | TransferState::Ended(_), _) => return,
        };
        let was_under_way = transfer.state == TransferState::InFlight;
        transfer.state = TransferState::Ended(end);
        let (subject, bytes) = (transfer.joined.subject(), transfer.size.map_or(0, |size| size.bytes));
        let counted = self.counted.ended.entry((handle.engine, end.name())).or_default();
        counted.0 += 1;
        counted.1 = counted.1.saturating_add(bytes);
        self.idle.push_back((handle, generation));
        if !was_under_way {
            return;
        }
        let room = match &subject {
            Some(TransferSubject::Room(room)) => Some(*room),
            _ => None,
        };
        let is_request = matches!(subject, Some(TransferSubject::Request(_)));
        let transfers = subject_mut(&mut self.subjects, &mut self.not_joined, subject.clone());
        transfers.end(posted, generation, handle.engine, end, at);
        if transfers.is_over()
            && (is_request || room.is_some_and(|room| !has_senders(room)))
            && let Some(subject) = subject
        {
            self.subjects.remove(&subject);
        }
    }
}

struct Made {
    operation: Option<Operation>,
    parts: u64,
    size: Option<Size>,
}

fn subject_mut<'a>(
    subjects: &'a mut HashMap<TransferSubject, SubjectTransfers>,
    not_joined: &'a mut SubjectTransfers,
    subject: Option<TransferSubject>,
) -> &'a mut SubjectTransfers {
    match subject {
        Some(subject) => subjects.entry(subject).or_default(),
        None => not_joined,
    }
}
