//! Transfer workers: chunks are taken, posted, ended, given back.

use std::time::Duration;

use super::{
    schedule::Fault,
    server::{Chunk, Job, Left, Part},
    truth::Fate,
    world::{Act, World},
};
use crate::event::{
    Body, ChunkCounts, ChunkStep, Phase, Room,
    native::{Engine, ErrorPoint, Flush, NativeEvent, Notification, Operation, Size, TransferStatus},
};

/// Without a sign for so long a transfer is called stalled, a worker blocked.
pub(super) const STANDS: Duration = Duration::from_secs(10);
/// So long a server that polls may take to say that everything is done.
const CONCLUDES: Duration = Duration::from_secs(5);
/// `UCS_ERR_CONNECTION_RESET`, `UCS_ERR_ENDPOINT_TIMEOUT`.
const RESET: i8 = -25;
const TIMEOUT: i8 = -80;

impl World {
    /// A chunk's counts have changed.
    pub(super) fn count(&mut self, rank: usize, tid: u32, room: u64, step: ChunkStep, abandoned: bool) {
        let Some(it) = self.ranks.get_mut(rank) else { return };
        let counts = it.counts.entry(room).or_default();
        let ChunkCounts { queued, working, .. } = *counts;
        (counts.queued, counts.working) = match step {
            ChunkStep::Queued => (queued + 1, working),
            ChunkStep::Begun => (queued.saturating_sub(1), working + 1),
            ChunkStep::Ended => (queued, working.saturating_sub(1)),
        };
        counts.abandoned |= abandoned;
        let counts = *counts;
        let queue = self.schedule.names_queues.then(|| it.shard(room) as u64 + 1);
        self.mark(rank, tid, Body::Chunk { room: Room::Number(room), step, counts, queue });
    }

    /// A worker takes its next chunk, if it has none in hand.
    pub(super) fn take(&mut self, rank: usize, worker: usize) {
        let now = self.now;
        let Some(hands) = self.ranks.get_mut(rank).and_then(|rank| rank.workers.get_mut(worker)) else { return };
        if hands.job.is_some() {
            return;
        }
        let (tid, Some(chunk)) = (hands.tid, hands.queue.pop_front()) else { return };
        hands.job = Some(Job { chunk, began: now, parts: Vec::new(), hangs: false });
        let Some((room, fault)) = self.of(rank, chunk.sender) else { return };
        self.count(rank, tid, room, ChunkStep::Begun, false);
        self.waits_no_more(rank, room);
        let is_known = self.ranks.get(rank).is_some_and(|rank| rank.status.contains_key(&room));
        if !is_known || fault == Fault::NoDecode {
            let after = self.chance.millis(1, 20);
            return self.later(after, Act::Give { rank, worker, chunk, tells: false });
        }
        self.update(rank, tid, room, Phase::Transferring);
        let parts = if fault == Fault::Slow { self.chance.between(4, 8) } else { 1 + self.chance.between(0, 1) };
        let mut after = Duration::ZERO;
        let mut over = Duration::ZERO;
        for part in 0..parts {
            after += self.chance.millis(1, 30);
            self.later(after, Act::Post { rank, worker, chunk });
            let is_slow = fault == Fault::Slow;
            let takes = if is_slow { over + self.chance.millis(1_500, 7_000) } else { self.chance.millis(2, 400) };
            over = over.max(after + takes);
            let is_faulty = chunk.is_last && part == 0;
            match fault {
                Fault::Never | Fault::Unsafe | Fault::GivenUp if is_faulty => {}
                Fault::Failed { reset } if is_faulty => {
                    let status = if reset { RESET } else { TIMEOUT };
                    self.later(after + takes, Act::Wire { rank, worker, chunk, part, status });
                }
                Fault::Told if is_faulty => {
                    self.later(after + takes, Act::Wire { rank, worker, chunk, part, status: TIMEOUT });
                }
                _ => self.later(after + takes, Act::Wire { rank, worker, chunk, part, status: 0 }),
            }
        }
        self.conclude(rank, worker, chunk, fault, over);
    }

    /// How the worker ends a chunk whose transfers are over so long after now.
    fn conclude(&mut self, rank: usize, worker: usize, chunk: Chunk, fault: Fault, over: Duration) {
        let (soon, late) = (over + self.chance.millis(1, 15), over + self.chance.millis(1_000, 4_500));
        let fails = self.chance.millis(500, 12_000);
        let give = |tells| Act::Give { rank, worker, chunk, tells };
        match fault {
            Fault::Late => self.later(late, give(true)),
            _ if !chunk.is_last => self.later(soon, give(true)),
            Fault::Never => self.later(over, Act::Hang { rank, worker, cause: "TransferStalled" }),
            Fault::Swallowed { hangs: true } => {
                self.later(over, Act::Hang { rank, worker, cause: "CompletionLost" });
            }
            Fault::Swallowed { hangs: false } | Fault::Failed { .. } => self.later(soon, give(false)),
            Fault::Unsafe => {
                self.later(over, Act::Hang { rank, worker, cause: "TransferStalled" });
                self.later(over + fails, Act::Fail { rank, worker, chunk });
            }
            Fault::Close => {
                let at = over * u32::try_from(self.chance.between(0, 120)).unwrap_or(0) / 100;
                self.later(at, Act::Fail { rank, worker, chunk });
                self.later(soon, give(false));
            }
            Fault::GivenUp => {
                self.later(over, Act::Hang { rank, worker, cause: "TransferStalled" });
                // Before it counts as stalled.
                let times_out = self.chance.millis(5_000, 9_000);
                self.later(over + times_out, Act::GiveUp { rank, worker, chunk });
            }
            Fault::Told | Fault::Resurrected => self.later(soon, Act::Fail { rank, worker, chunk }),
            _ => self.later(soon, give(true)),
        }
    }

    pub(super) fn post(&mut self, rank: usize, worker: usize, chunk: Chunk) {
        let Some((room, _)) = self.of(rank, chunk.sender) else { return };
        let (engine, notifies) = (self.schedule.engine, self.schedule.notifies);
        self.requests += 1;
        let request = 0x10_0000 + self.requests * 0x1000;
        let Some(it) = self.ranks.get_mut(rank) else { return };
        let handle = it.take_handle(engine);
        let Some(hands) = it.workers.get_mut(worker) else { return };
        let (tid, Some(job)) = (hands.tid, hands.job.as_mut()) else { return };
        let number = job.parts.len();
        job.parts.push(Part { handle, request, is_over: false });
        let text = format!("{room}_kv_{}_{}_{number}", chunk.number, u8::from(chunk.is_last));
        let notification = notifies.then(|| Notification { bytes: text.into_bytes(), cut: false });
        let (parts, size) = (8, Some(Size { bytes: 1 << 20, estimated: false }));
        let operation = Some(Operation::Write);
        self.native(rank, tid, NativeEvent::Made { handle, operation, parts, size, notification });
        let list = handle.number + 0x10;
        self.native(rank, tid, NativeEvent::Posting { handle, operation, first_length: None, lists: [list, 0] });
        if engine == Engine::Nixl {
            let flush = Flush::UnderWay { request: request + 0x80 };
            let took = Duration::from_micros(200);
            self.native(rank, tid, NativeEvent::RangePosted { list, flush, descriptors: parts, took });
        }
    }

    /// A transfer is over on the wire.
    pub(super) fn wire(&mut self, rank: usize, worker: usize, chunk: Chunk, part: u64, status: i8) {
        let (now, engine) = (self.now, self.schedule.engine);
        let Some(hands) = self.ranks.get_mut(rank).and_then(|rank| rank.workers.get_mut(worker)) else { return };
        let tid = hands.tid;
        let Some(part) = hands.job.as_mut().and_then(|job| job.parts.get_mut(part as usize)) else { return };
        part.is_over = true;
        let completion = part.request;
        if status != 0 {
            let error = NativeEvent::EndpointError { endpoint: 0x5000, point: ErrorPoint::Ucp, status };
            self.native(rank, tid, error);
            let cause = if status == RESET { "PeerGone" } else { "CompletionError" };
            if let Some(truth) = self.truth(rank, chunk.sender) {
                truth.stuck(cause, now, now);
            }
        }
        if engine == Engine::Nixl {
            self.native(rank, tid, NativeEvent::Flushed { completion, status });
        }
    }

    /// The worker never comes back.
    pub(super) fn hang(&mut self, rank: usize, worker: usize, cause: &'static str) {
        let now = self.now;
        let Some(hands) = self.ranks.get_mut(rank).and_then(|rank| rank.workers.get_mut(worker)) else { return };
        let Some(job) = &mut hands.job else { return };
        job.hangs = true;
        let (chunk, waiting) = (job.chunk, hands.queue.clone());
        let shows = now.plus(if cause == "CompletionLost" { CONCLUDES } else { STANDS });
        if let Some(truth) = self.truth(rank, chunk.sender) {
            truth.stuck(cause, now, shows);
        }
        for chunk in waiting {
            self.is_blocked(rank, worker, chunk.sender);
        }
    }

    /// A request has a chunk behind a worker that hangs.
    pub(super) fn is_blocked(&mut self, rank: usize, worker: usize, sender: usize) {
        let now = self.now;
        let job = self.ranks.get(rank).and_then(|rank| rank.workers.get(worker)?.job.as_ref());
        let Some((chunk, began, hangs)) = job.map(|job| (job.chunk, job.began, job.hangs)) else { return };
        let (Some((room, _)), Some((held, fault))) = (self.of(rank, sender), self.of(rank, chunk.sender)) else {
            return;
        };
        let Some(truth) = self.truth(rank, sender).filter(|_| room != held) else { return };
        if hangs {
            truth.stuck("WorkerBlocked", began, now.plus(STANDS));
        } else if fault == Fault::Slow && truth.fate == Fate::Healthy {
            truth.fate = Fate::Backpressured;
        }
    }

    fn waits_no_more(&mut self, rank: usize, room: u64) {
        let now = self.now;
        let Some(rank) = self.ranks.get_mut(rank) else { return };
        for place in rank.live_on(room) {
            if let Some(sender) = rank.senders.get_mut(place) {
                sender.truth.is_over("WorkerBlocked", now);
            }
        }
    }

    /// The server fails the request of a chunk, whatever its transfers do.
    pub(super) fn fail(&mut self, rank: usize, worker: usize, chunk: Chunk) {
        let now = self.now;
        let Some((room, fault)) = self.of(rank, chunk.sender) else { return };
        let Some(tid) = self.ranks.get(rank).and_then(|rank| rank.workers.get(worker)).map(|it| it.tid) else { return };
        self.update(rank, tid, room, Phase::Failed);
        if fault == Fault::Resurrected {
            // sglang#30685: between two passes a worker's late max() takes the failure back. Nobody polls it.
            if let Some(it) = self.ranks.get_mut(rank) {
                it.status.insert(room, Phase::Transferring);
            }
            let (requested, after) = (Some(Phase::Transferring), Some(Phase::Transferring));
            let room = Room::Number(room);
            self.mark(rank, tid, Body::Update { room, requested, before: Some(Phase::Failed), after });
            if let Some(truth) = self.truth(rank, chunk.sender) {
                truth.stuck("Resurrected", now, now);
            }
        }
        if !matches!(fault, Fault::Unsafe | Fault::Close) {
            self.give(rank, worker, chunk, false);
        }
    }

    /// The worker gives a chunk back and takes the next.
    pub(super) fn give(&mut self, rank: usize, worker: usize, chunk: Chunk, tells: bool) {
        let now = self.now;
        let Some((room, fault)) = self.of(rank, chunk.sender) else { return };
        let Some(it) = self.ranks.get_mut(rank) else { return };
        let Some(hands) = it.workers.get_mut(worker) else { return };
        let (tid, Some(job)) = (hands.tid, hands.job.take()) else { return };
        let failed = matches!(fault, Fault::Failed { .. } | Fault::Told) && chunk.is_last;
        let posted = !job.parts.is_empty();
        for part in &job.parts {
            it.free_handle(part.handle);
        }
        for (number, part) in job.parts.iter().enumerate() {
            let status = match (part.is_over, failed && number == 0) {
                (_, true) => TransferStatus::Failed { code: -10 },
                (true, false) => TransferStatus::Done,
                (false, false) => TransferStatus::InProgress,
            };
            self.native(rank, tid, NativeEvent::Releasing { handle: part.handle, status: Some(status) });
        }
        if tells && chunk.is_last {
            self.update(rank, tid, room, Phase::Success);
        }
        self.count(rank, tid, room, ChunkStep::Ended, failed);
        if posted
            && !tells
            && matches!(fault, Fault::Swallowed { .. })
            && let Some(truth) = self.truth(rank, chunk.sender)
        {
            truth.stuck("CompletionLost", now, now.plus(CONCLUDES));
        }
        self.later(Duration::from_micros(300), Act::Take { rank, worker });
    }

    /// The worker waits no longer for its chunk's transfers, fails the request and takes the next.
    pub(super) fn give_up(&mut self, rank: usize, worker: usize, chunk: Chunk) {
        let now = self.now;
        let Some((room, _)) = self.of(rank, chunk.sender) else { return };
        let Some(it) = self.ranks.get_mut(rank) else { return };
        let Some(hands) = it.workers.get_mut(worker) else { return };
        let (tid, Some(job)) = (hands.tid, hands.job.take()) else { return };
        for part in job.parts {
            let status = if part.is_over { TransferStatus::Done } else { TransferStatus::InProgress };
            self.native(rank, tid, NativeEvent::Releasing { handle: part.handle, status: Some(status) });
            let Some(it) = self.ranks.get_mut(rank) else { return };
            if part.is_over || part.handle.engine == Engine::Nixl {
                // Mooncake does not free a batch that is not complete.
                it.free_handle(part.handle);
            }
            if !part.is_over {
                let left = it.left.len();
                it.left.push(Left { sender: chunk.sender, part });
                if self.chance.percent(50) {
                    let after = self.chance.millis(1, 5_000);
                    self.later(after, Act::LeftEnds { rank, left });
                }
            }
        }
        if let Some(truth) = self.truth(rank, chunk.sender) {
            truth.is_over("TransferStalled", now);
        }
        self.update(rank, tid, room, Phase::Failed);
        self.count(rank, tid, room, ChunkStep::Ended, true);
        self.later(Duration::from_micros(300), Act::Take { rank, worker });
    }

    /// What a worker gave up is over on the wire.
    pub(super) fn left_ends(&mut self, rank: usize, left: usize) {
        let Some(it) = self.ranks.get_mut(rank) else { return };
        let (tid, Some(left)) = (it.process.pid + 1, it.left.get_mut(left)) else { return };
        left.part.is_over = true;
        let Part { handle, request, .. } = left.part;
        if handle.engine == Engine::Nixl {
            self.native(rank, tid, NativeEvent::Flushed { completion: request, status: 0 });
        }
    }
}
