//! Making, posting, ending and releasing a transfer.

use super::{
    super::{
        correlate::{Joined, NotJoined, TransferSubject, join},
        transfer::{SubjectTransfers, Transfer, TransferEnd, TransferState},
    },
    Transfers, subject_mut,
};
use crate::event::{
    Room,
    clock::Monotonic,
    native::{Engine, Handle, NativeEvent, Notification, Operation, Size},
};

/// Rooms and requests of which something is kept.
pub(super) const MAX_SUBJECTS: usize = 262_144;

/// Threads of a process whose last post is remembered; when there are more, all are forgotten.
const MAX_THREADS: usize = 4096;

/// What is known of a transfer when it is made.
pub(super) struct Made {
    pub(super) operation: Option<Operation>,
    pub(super) parts: u64,
    pub(super) size: Option<Size>,
}

impl Transfers {
    pub(super) fn follow_flushes(&mut self, handle: Handle, lists: [u64; 2], tid: u32) {
        let followed = |transfer: &&Transfer| handle.engine == Engine::Nixl && transfer.parts > 0;
        if let Some(transfer) = self.live.get(&handle).map(Box::as_ref).filter(followed) {
            self.flushes.posting(transfer.generation, transfer.parts, lists);
            self.flushed_handles.insert(transfer.generation, handle);
            if self.posting.len() >= MAX_THREADS {
                self.posting.clear();
            }
            self.posting.insert(tid, transfer.generation);
        }
    }

    /// A call proves that the one before it on its thread has returned, and a release that posting that handle has. (What NIXL
    /// calls inside of a post, ranges, flushes and notifications, does not.)
    pub(super) fn returned_before(
        &mut self,
        event: &NativeEvent,
        at: Monotonic,
        tid: u32,
        has_senders: impl Fn(Room) -> bool,
    ) {
        let released = match event {
            NativeEvent::Releasing { handle, .. } => self.live.get(handle).map(|transfer| transfer.generation),
            NativeEvent::Made { .. }
            | NativeEvent::NotMade { .. }
            | NativeEvent::Posting { .. }
            | NativeEvent::Posted { .. } => None,
            _ => return,
        };
        for generation in self.posting.remove(&tid).into_iter().chain(released) {
            let end = self.flushes.returned(generation);
            self.over_on_the_wire(end, at, &has_senders);
        }
    }

    pub(super) fn made(
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
        self.released(handle);
        if !self.make_room() {
            // One that cannot be remembered is counted when it is posted.
            if self.refused.len() < self.limit && self.refused.insert(handle) {
                self.counted.not_kept += 1;
            }
            return false;
        }
        let joined = join(notification, self.room_of_worker(tid));
        self.keep(handle, made, joined, at, tid);
        self.put_aside(handle, self.generation);
        true
    }

    /// Keeps a transfer that is not posted yet, under the next generation.
    fn keep(&mut self, handle: Handle, made: Made, joined: Joined, at: Monotonic, tid: u32) {
        self.generation = self.generation.saturating_add(1);
        let Made { operation, parts, size } = made;
        let (generation, state) = (self.generation, TransferState::Made);
        let transfer = Transfer { handle, generation, operation, parts, size, joined, tid, since: at, state, moved: 0 };
        self.live.insert(handle, Box::new(transfer));
    }

    pub(super) fn posting(
        &mut self,
        handle: Handle,
        operation: Option<Operation>,
        first_length: Option<u64>,
        at: Monotonic,
        tid: u32,
    ) -> bool {
        let working_on = self.room_of_worker(tid);
        if !self.live.contains_key(&handle) {
            let is_counted = self.refused.remove(&handle);
            if !self.make_room() {
                self.counted.not_kept += u64::from(!is_counted);
                return false;
            }
            let joined = working_on.map_or(Joined::Not(NotJoined::NotSeen), Joined::ByThread);
            self.keep(handle, Made { operation, parts: 0, size: None }, joined, at, tid);
        }
        let Some(transfer) = self.live.get_mut(&handle) else { return false };
        match transfer.state {
            TransferState::InFlight => return true,
            TransferState::Made => {}
            // Posted again it is another transfer: what was read of the former in memory is not this one's.
            TransferState::Ended(_) => {
                self.awaited.remove(&transfer.generation);
                self.generation = self.generation.saturating_add(1);
                transfer.generation = self.generation;
                transfer.moved = 0;
            }
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
        let (joined, size, generation) = (transfer.joined.clone(), transfer.size, transfer.generation);
        let subject = joined.subject();
        if !subject.as_ref().is_none_or(|subject| self.keeps(subject)) {
            // Kept without its room it would end in a room that has not seen it begin.
            self.live.remove(&handle);
            self.counted.not_kept += 1;
            return false;
        }
        if let Joined::Not(why) = joined {
            *self.counted.not_joined.entry(why).or_default() += 1;
        }
        if size.is_none_or(|size| size.estimated) {
            self.counted.size_not_known += 1;
        }
        let bytes = size.map_or(0, |size| size.bytes);
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
            let Some((handle, generation)) = self.idle.pop_front() else { return false };
            let is_idle =
                |transfer: &Transfer| transfer.generation == generation && transfer.state != TransferState::InFlight;
            if self.live.get(&handle).map(Box::as_ref).is_some_and(is_idle) {
                self.live.remove(&handle);
            }
        }
        true
    }

    /// Notes that a transfer is not under way: it may go when there are too many.
    fn put_aside(&mut self, handle: Handle, generation: u64) {
        self.idle.push_back((handle, generation));
        // Entries of handles that were released or posted again are only taken out here. A transfer has two at most: when it
        // was made, and when it ended.
        if self.idle.len() > self.limit.saturating_mul(3) {
            let live = &self.live;
            self.idle.retain(|(handle, generation)| {
                live.get(handle).is_some_and(|transfer| {
                    transfer.generation == *generation && transfer.state != TransferState::InFlight
                })
            });
        }
    }

    pub(super) fn end(&mut self, handle: Handle, end: TransferEnd, at: Monotonic, has_senders: impl Fn(Room) -> bool) {
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
        self.put_aside(handle, generation);
        if !was_under_way {
            return;
        }
        subject_mut(&mut self.subjects, &mut self.not_joined, subject.clone()).end(
            posted,
            generation,
            handle.engine,
            end,
            at,
        );
        if end.is_proved_over() {
            self.stop_following(generation);
        }
        self.forget_if_over(subject, has_senders);
    }

    /// What is over is forgotten, unless a live sender's request may ask for it.
    pub(super) fn forget_if_over(&mut self, subject: Option<TransferSubject>, has_senders: impl Fn(Room) -> bool) {
        let Some(subject) = subject else { return };
        let is_asked_for = matches!(&subject, TransferSubject::Room(room) if has_senders(*room));
        // A failure is kept for a while: somebody will ask what it was.
        let is_done = |known: &SubjectTransfers| known.is_over() && known.failure.is_none();
        if !is_asked_for && self.subjects.get(&subject).map(Box::as_ref).is_some_and(is_done) {
            self.subjects.remove(&subject);
        }
    }

    /// Forgets failures of rooms without senders that are older than `before`.
    pub fn prune(&mut self, before: Monotonic, has_senders: impl Fn(Room) -> bool) {
        self.subjects.retain(|subject, known| {
            let is_asked_for = matches!(subject, TransferSubject::Room(room) if has_senders(*room));
            is_asked_for || !known.is_over() || known.last_moved().is_some_and(|moved| moved >= before)
        });
    }

    /// A handle is released. A transfer that was given up may go on: its flushes, or its batch's memory, will tell.
    pub(super) fn released(&mut self, handle: Handle) {
        self.refused.remove(&handle);
        let Some(transfer) = self.live.remove(&handle) else { return };
        let goes_on = match transfer.state {
            TransferState::Ended(TransferEnd::GivenUp | TransferEnd::NotSeen) => {
                handle.engine == Engine::Mooncake || self.flushed_handles.contains_key(&transfer.generation)
            }
            _ => false,
        };
        if goes_on && self.abandoned.len() < self.limit {
            let subject = transfer.joined.subject();
            let place = (transfer.since, transfer.generation);
            subject_mut(&mut self.subjects, &mut self.not_joined, subject).given_up.push(place);
            self.abandoned.insert(transfer.generation, transfer);
        } else {
            self.stop_following(transfer.generation);
        }
    }
}
