//! One rank of a simulated server: what its scheduler, its hook and its transfer workers know.

use std::collections::{BTreeMap, VecDeque};

use super::{schedule::Schedule, truth::Truth};
use crate::{
    event::{
        Backend, Body, ChunkCounts, Entry, Hello, Phase, ProcessKey, Rid, Room,
        clock::Monotonic,
        native::{Engine, Handle},
    },
    request::RequestKey,
};

/// One rank.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) process: ProcessKey,
    pub(super) number: usize,
    pub(super) senders: Vec<Sender>,
    /// SGLang's `request_status`.
    pub(super) status: BTreeMap<u64, Phase>,
    pub(super) counts: BTreeMap<u64, ChunkCounts>,
    pub(super) workers: Vec<Worker>,
    /// The inflight queue: places in `senders`.
    pub(super) queue: Vec<usize>,
    pub(super) serials: u64,
    pub(super) sequence: u64,
    /// Passes since the last mark of one.
    pub(super) passes: u32,
    /// An epoch to answer with everything that lives.
    pub(super) asked: Option<u64>,
    pub(super) handles: Vec<bool>,
    /// Transfers that a worker gave up.
    pub(super) left: Vec<Left>,
}

/// A transfer that its worker gave up, and that may go on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Left {
    pub(super) sender: usize,
    pub(super) part: Part,
}

/// A sender and its request, as the hook knows them, and as they are.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) plan: usize,
    pub(super) polled: Option<Phase>,
    pub(super) polled_since: Monotonic,
    pub(super) is_queued: bool,
    pub(super) sent: u32,
    pub(super) pages: u64,
    pub(super) sent_last: bool,
    pub(super) dropped: Option<Monotonic>,
    pub(super) shared_with: Option<u64>,
    pub(super) cleared_by: Option<u64>,
    /// A fake sender that never finishes.
    pub(super) is_pinned: bool,
    /// What its ranks have agreed on, and when: it is dropped.
    pub(super) agreed: Option<(Monotonic, Phase)>,
    pub(super) truth: Truth,
}

/// A transfer worker and its queue.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) tid: u32,
    pub(super) queue: VecDeque<Chunk>,
    pub(super) job: Option<Job>,
}

/// A chunk of a sender's request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    pub(super) sender: usize,
    pub(super) number: u32,
    pub(super) is_last: bool,
}

/// A chunk that a worker has in hand.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) chunk: Chunk,
    pub(super) began: Monotonic,
    pub(super) parts: Vec<Part>,
    /// It never comes back.
    pub(super) hangs: bool,
}

/// A transfer of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) handle: Handle,
    pub(super) request: u64,
    pub(super) is_over: bool,
}

impl Rank {
    pub(super) fn new(number: usize, start: u64, workers: u64) -> Self {
        let pid = 4_000 + number as u32 * 100;
        let worker = |index: u64| Worker { tid: pid + 10 + index as u32, queue: VecDeque::new(), job: None };
        Self {
            process: ProcessKey { pid, start },
            number,
            senders: Vec::new(),
            status: BTreeMap::new(),
            counts: BTreeMap::new(),
            workers: (0..workers).map(worker).collect(),
            queue: Vec::new(),
            serials: 0,
            sequence: 0,
            passes: 0,
            asked: None,
            handles: Vec::new(),
            left: Vec::new(),
        }
    }

    pub(super) fn key(&self, serial: u64) -> RequestKey {
        RequestKey { process: self.process, serial }
    }

    /// Which worker has a room's chunks.
    pub(super) fn shard(&self, room: u64) -> usize {
        usize::try_from(room % self.workers.len().max(1) as u64).unwrap_or(0)
    }

    /// Those on a room that are not over.
    pub(super) fn live_on(&self, room: u64) -> Vec<usize> {
        let senders = self.senders.iter().enumerate();
        senders.filter(|(_, it)| it.truth.room == room && it.is_live()).map(|(place, _)| place).collect()
    }

    /// A handle that is free: engines give the addresses of released ones again.
    pub(super) fn take_handle(&mut self, engine: Engine) -> Handle {
        let slot = self.handles.iter().position(|taken| !taken).unwrap_or(self.handles.len());
        if slot == self.handles.len() {
            self.handles.push(true);
        } else if let Some(taken) = self.handles.get_mut(slot) {
            *taken = true;
        }
        Handle { engine, number: 0x7f00_0000 + slot as u64 * 0x100 }
    }

    /// Whether a transfer of a sender's request is under way.
    pub(super) fn is_writing(&self, sender: usize) -> bool {
        let jobs = self.workers.iter().filter_map(|worker| worker.job.as_ref());
        let mut parts = jobs.filter(|job| job.chunk.sender == sender).flat_map(|job| &job.parts);
        let mut left = self.left.iter().filter(|left| left.sender == sender);
        parts.any(|part| !part.is_over) || left.any(|left| !left.part.is_over)
    }

    pub(super) fn free_handle(&mut self, handle: Handle) {
        let slot = usize::try_from(handle.number.saturating_sub(0x7f00_0000) / 0x100).unwrap_or(usize::MAX);
        if let Some(taken) = self.handles.get_mut(slot) {
            *taken = false;
        }
    }

    /// What a sender's own poll returns.
    pub(super) fn poll(&self, sender: &Sender) -> Phase {
        let last = sender.polled.unwrap_or(Phase::WaitingForInput);
        if sender.truth.backend == Backend::Fake {
            let is_over = sender.sent_last && !sender.is_pinned;
            return if is_over { Phase::Success } else { Phase::WaitingForInput };
        }
        // Of a room that has no status NIXL goes on saying what it said (0.5.15, 0.5.22).
        self.status.get(&sender.truth.room).copied().unwrap_or(last)
    }

    /// What it says of itself.
    pub(super) fn hello(&self, epoch: u64, ranks: usize, schedule: &Schedule, backend: Backend) -> Body {
        let (size, rank) = (u32::try_from(ranks).ok(), u32::try_from(self.number).ok());
        let ((tp, tp_rank), (pp, pp_rank)) = match schedule.stages {
            true => ((Some(1), Some(0)), (size, rank)),
            false => ((size, rank), (Some(1), Some(0))),
        };
        Body::Hello(Box::new(Hello {
            hook: Some("0.1.0".to_owned()),
            epoch,
            sglang: Some("0.5.22".to_owned()),
            role: Some("prefill".to_owned()),
            backend: Some(backend.name().to_owned()),
            counts: Some("queues".to_owned()),
            tp,
            tp_rank,
            pp,
            pp_rank,
            cp: Some(1),
            bootstrap_timeout: Some(schedule.bootstrap_timeout.as_secs_f64()),
            waiting_timeout: Some(300.0),
            ..Hello::default()
        }))
    }

    /// Everything that lives, as the hook tells it.
    pub(super) fn entries(&self, epoch: u64) -> Vec<Body> {
        let live = self.senders.iter().filter(|sender| sender.is_live());
        live.map(|sender| {
            let truth = &sender.truth;
            let room = Room::Number(truth.room);
            let chunks = self.counts.get(&truth.room).copied().unwrap_or_default();
            Body::Entry { room, sender: truth.request.serial, epoch, entry: Box::new(sender.entry(chunks)) }
        })
        .collect()
    }
}

impl Sender {
    pub(super) fn is_live(&self) -> bool {
        self.truth.ended.is_none()
    }

    pub(super) fn rid(&self) -> Rid {
        Rid { text: self.truth.rid.clone(), truncated: false }
    }

    fn entry(&self, chunks: ChunkCounts) -> Entry {
        let truth = &self.truth;
        Entry {
            backend: truth.backend,
            phase: self.polled,
            phase_since: Some(self.polled_since),
            created: Some(truth.created),
            entered: truth.entered,
            sent_chunks: self.sent,
            sent_pages: self.pages,
            sent_last: self.sent_last,
            aborted: truth.aborted,
            dropped: self.dropped,
            shared_with: self.shared_with,
            cleared_by: self.cleared_by,
            chunks,
            rid: truth.entered.map(|_| self.rid()),
        }
    }
}
