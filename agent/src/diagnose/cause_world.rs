//! A server whose events are made up, to diagnose its request: 1, in room 77. Times are in seconds.

use std::time::Duration;

use crate::{
    diagnose::{Cause, Diagnosis, Fact, diagnose},
    event::{
        Backend, Body, ChunkCounts, ChunkStep, Event, Phase, ProcessKey, Room,
        clock::Monotonic,
        native::{Engine, ErrorPoint, Flush, Handle, NativeEvent, TransferStatus},
    },
    request::{
        RequestKey, ResyncReason,
        tracker::{Limits, Tracker},
    },
};

pub(super) const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
pub(super) const ROOM: Room = Room::Number(77);
pub(super) const OTHER: Room = Room::Number(78);
/// The scheduler's thread, and two transfer workers.
pub(super) const SCHEDULER: u32 = 7;
pub(super) const WORKER: u32 = 21;
pub(super) const SECOND_WORKER: u32 = 22;
pub(super) const EPOCH: u64 = 5;

pub(super) fn at(seconds: f64) -> Monotonic {
    Monotonic((seconds * 1e9) as u64)
}

pub(super) struct World {
    pub(super) tracker: Tracker,
    /// What was seen, for a core to see too.
    pub(super) events: Vec<Event>,
}

impl World {
    /// A server that is completely known and whose transfers are all seen, from 0 on.
    pub(super) fn new() -> Self {
        let mut world = Self { tracker: Tracker::new(Limits { requests: 100, transfers: 100 }), events: Vec::new() };
        world.tracker.attach(PROCESS, 0);
        world.tracker.watch(PROCESS, Some(Engine::Nixl), at(0.0));
        world.resynchronise(0.0, ResyncReason::Attached);
        world
    }

    pub(super) fn resynchronise(&mut self, seconds: f64, reason: ResyncReason) {
        self.tracker.asked(PROCESS, EPOCH, reason, at(seconds));
        self.see(seconds, Body::StateBegin { epoch: EPOCH });
        self.see(seconds, Body::StateEnd { epoch: EPOCH, entries: 0 });
    }

    pub(super) fn see(&mut self, seconds: f64, body: Body) -> &mut Self {
        self.see_on(SCHEDULER, seconds, body)
    }

    pub(super) fn see_on(&mut self, tid: u32, seconds: f64, body: Body) -> &mut Self {
        let event = Event { pid: 7, tid, at: at(seconds), sequence: 1, detail_lost: false, body };
        self.tracker.apply(&event, &mut Vec::new());
        self.events.push(event);
        self
    }

    /// A request that is in the queue since 1 and has sent its only chunk; a transfer worker has not taken it.
    pub(super) fn queued() -> Self {
        let mut world = Self::new();
        world.queue();
        world
    }

    /// The same, taken at 2 by a worker that posted a transfer at 4.
    pub(super) fn in_flight() -> Self {
        let mut world = Self::queued();
        world.post();
        world
    }

    /// The same, done at 6 with its chunk.
    pub(super) fn done() -> Self {
        let mut world = Self::in_flight();
        world.status(6.0, 1, TransferStatus::Done).chunk(WORKER, 6.0, ROOM, ChunkStep::Ended, (0, 0));
        world
    }

    /// The same, failed at 6 with this code.
    pub(super) fn failed(code: i32) -> Self {
        let mut world = Self::in_flight();
        world.fail(code);
        world
    }

    pub(super) fn queue(&mut self) {
        let (room, sender) = (ROOM, 1);
        self.see(1.0, Body::Open { room, sender, backend: Backend::Nixl })
            .see(1.0, Body::Phase { room, sender, old: None, new: Some(Phase::WaitingForInput) })
            .see(1.0, Body::Send { room, sender, pages: 8, last: true })
            .chunk(SCHEDULER, 1.0, ROOM, ChunkStep::Queued, (1, 0))
            .see(1.0, Body::Enter { room, sender, rid: None, queue_length: 1 });
    }

    pub(super) fn post(&mut self) {
        self.chunk(WORKER, 2.0, ROOM, ChunkStep::Begun, (0, 1)).posted(WORKER, 4.0, 1);
        self.see(4.0, Body::Phase { room: ROOM, sender: 1, old: None, new: Some(Phase::Transferring) });
    }

    pub(super) fn fail(&mut self, code: i32) {
        self.status(6.0, 1, TransferStatus::Failed { code });
        let counts = ChunkCounts { abandoned: true, ..ChunkCounts::default() };
        self.see_on(WORKER, 6.0, Body::Chunk { room: ROOM, step: ChunkStep::Ended, counts, queue: None });
    }

    pub(super) fn chunk(
        &mut self,
        tid: u32,
        seconds: f64,
        room: Room,
        step: ChunkStep,
        (queued, working): (u16, u16),
    ) -> &mut Self {
        let counts = ChunkCounts { queued, working, ..ChunkCounts::default() };
        self.see_on(tid, seconds, Body::Chunk { room, step, counts, queue: None })
    }

    pub(super) fn native(&mut self, tid: u32, seconds: f64, event: NativeEvent) -> &mut Self {
        self.see_on(tid, seconds, Body::Native(Box::new(event)))
    }

    /// A transfer is posted, its flush is out.
    pub(super) fn posted(&mut self, tid: u32, seconds: f64, handle: u64) -> &mut Self {
        let (list, request) = (handle << 8, (handle << 8) + 0x8000);
        let (flush, took) = (Flush::UnderWay { request }, Duration::ZERO);
        self.posted_unseen(tid, seconds, nixl(handle), list).native(
            tid,
            seconds,
            NativeEvent::RangePosted { list, flush, descriptors: 1, took },
        )
    }

    /// A transfer is posted whose end is not seen when it comes.
    pub(super) fn posted_unseen(&mut self, tid: u32, seconds: f64, handle: Handle, list: u64) -> &mut Self {
        let made = NativeEvent::Made { handle, operation: None, parts: 1, size: None, notification: None };
        let posting = NativeEvent::Posting { handle, operation: None, first_length: None, lists: [list, 0] };
        self.native(tid, seconds, made).native(tid, seconds, posting)
    }

    pub(super) fn status(&mut self, seconds: f64, handle: u64, status: TransferStatus) -> &mut Self {
        self.native(WORKER, seconds, NativeEvent::Status { handle: nixl(handle), status, moved: None })
    }

    pub(super) fn endpoint_failed(&mut self, seconds: f64, status: i8) -> &mut Self {
        self.native(WORKER, seconds, NativeEvent::EndpointError { point: ErrorPoint::Ucp, status, endpoint: 0 })
    }

    pub(super) fn pass(&mut self, seconds: f64) -> &mut Self {
        self.see(seconds, Body::Pass { queue_length: 1, passes: 10 })
    }

    pub(super) fn diagnosis(&self, seconds: f64) -> Diagnosis {
        let tracked = self.tracker.get(RequestKey { process: PROCESS, serial: 1 }).expect("the request is tracked");
        diagnose(&tracked, at(seconds))
    }

    pub(super) fn cause(&self, seconds: f64) -> Cause {
        self.diagnosis(seconds).cause
    }
}

pub(super) fn nixl(number: u64) -> Handle {
    Handle { engine: Engine::Nixl, number }
}

pub(super) fn says(diagnosis: &Diagnosis, fact: &Fact) -> bool {
    diagnosis.evidence.iter().any(|evidence| evidence.fact == *fact)
}

pub(super) fn assert_says(diagnosis: &Diagnosis, facts: &[Fact]) {
    for fact in facts {
        assert!(says(diagnosis, fact), "{fact:?} is not in {:#?}", diagnosis.evidence);
    }
}
