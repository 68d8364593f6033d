//! What is joined of marks and the engine's calls: which worker a chunk waits for, and what an abandoned room's transfers prove.

use std::time::Duration;

use super::*;
use crate::{
    event::{
        Backend, Body, ChunkCounts, ChunkStep, Event, Phase, ProcessKey, Rid, Room,
        native::{Engine, Flush, Handle, NativeEvent, Notification, Operation, TransferStatus},
    },
    request::{
        RequestKey, ResyncReason,
        tracker::{Limits, Tracker},
        transfer::Observation,
    },
};

const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
const ROOM: Room = Room::Number(1);
const OTHER: Room = Room::Number(2);
const THIRD: Room = Room::Number(3);
const SECOND: u64 = 1_000_000_000;
const LIST: u64 = 0x110;

/// A tracker, and a clock that goes on a millisecond with each event.
struct World {
    tracker: Tracker,
    time: u64,
}

impl World {
    /// A server that is completely known, and whose transfers are all seen if they are `watched`.
    fn new(watched: bool) -> Self {
        let mut world = Self { tracker: Tracker::new(Limits { requests: 100, transfers: 100 }), time: SECOND };
        world.tracker.attach(PROCESS, 0);
        if watched {
            world.tracker.watch(PROCESS, Some(Engine::Nixl), Monotonic(world.time));
        }
        world.resynchronise();
        world
    }

    fn resynchronise(&mut self) {
        self.tracker.asked(PROCESS, 1, ResyncReason::Attached, Monotonic(self.time));
        self.see(7, Body::StateBegin { epoch: 1 });
        self.see(7, Body::StateEnd { epoch: 1, entries: 0 });
    }

    fn see(&mut self, tid: u32, body: Body) {
        self.time += 1_000_000;
        let event = Event { pid: 7, tid, at: Monotonic(self.time), sequence: 1, detail_lost: false, body };
        self.tracker.apply(&event, &mut Vec::new());
    }

    fn native(&mut self, tid: u32, event: NativeEvent) {
        self.see(tid, Body::Native(Box::new(event)));
    }

    /// A request in the inflight queue that was sent.
    fn request(&mut self, serial: u64, room: Room) {
        self.see(7, Body::Open { room, sender: serial, backend: Backend::Nixl });
        self.see(7, Body::Phase { room, sender: serial, old: None, new: Some(Phase::WaitingForInput) });
        let rid = Some(Rid { text: format!("rid-{serial}"), truncated: false });
        self.see(7, Body::Enter { room, sender: serial, rid, queue_length: 1 });
        self.see(7, Body::Send { room, sender: serial, pages: 8, last: true });
    }

    fn chunk(&mut self, tid: u32, room: Room, step: ChunkStep, (queued, working): (u16, u16), queue: Option<u64>) {
        let counts = ChunkCounts { queued, working, ..ChunkCounts::default() };
        self.see(tid, Body::Chunk { room, step, counts, queue });
    }

    fn taken(&mut self, tid: u32, room: Room, queue: Option<u64>) {
        self.chunk(7, room, ChunkStep::Queued, (1, 0), queue);
        self.chunk(tid, room, ChunkStep::Begun, (0, 1), queue);
    }

    /// The worker leaves its chunk with an error.
    fn left(&mut self, tid: u32, room: Room) {
        let counts = ChunkCounts { abandoned: true, ..ChunkCounts::default() };
        self.see(tid, Body::Chunk { room, step: ChunkStep::Ended, counts, queue: Some(1) });
    }

    fn posted(&mut self, tid: u32, handle: Handle, room: u64) {
        let notification = Some(Notification { bytes: format!("{room}_kv_0_1").into_bytes(), cut: false });
        let operation = Some(Operation::Write);
        self.native(tid, NativeEvent::Made { handle, operation, parts: 9, size: None, notification });
        self.native(tid, NativeEvent::Posting { handle, operation: None, first_length: None, lists: [LIST, 0] });
        let flush = Flush::UnderWay { request: 0x9080 };
        self.native(tid, NativeEvent::RangePosted { list: LIST, flush, descriptors: 1, took: Duration::ZERO });
    }

    fn diagnosis(&self, serial: u64, later: u64) -> Diagnosis {
        let tracked = self.tracker.get(RequestKey { process: PROCESS, serial }).expect("the request is tracked");
        diagnose(&tracked, Monotonic(self.time + later * SECOND))
    }

    fn quiescence(&self, serial: u64) -> String {
        self.diagnosis(serial, 0).quiescence.to_string()
    }
}

fn nixl(number: u64) -> Handle {
    Handle { engine: Engine::Nixl, number }
}

fn held(diagnosis: &Diagnosis) -> Option<(Room, usize)> {
    diagnosis.evidence.iter().find_map(|evidence| match evidence.fact {
        Fact::WorkersHold { room, rooms } => Some((room, rooms)),
        _ => None,
    })
}

#[test]
fn the_worker_of_a_chunks_own_queue_is_named_though_another_is_stuck_for_longer() {
    let mut world = World::new(true);
    world.taken(20, OTHER, Some(2));
    world.taken(10, THIRD, Some(1));
    world.request(1, ROOM);
    world.chunk(7, ROOM, ChunkStep::Queued, (1, 0), Some(1));
    assert_eq!(world.diagnosis(1, 1).cause, Cause::CapacityStall);
    let blocked = world.diagnosis(1, 11);
    assert_eq!((blocked.cause, held(&blocked)), (Cause::WorkerBlocked, Some((THIRD, 1))));
    world.see(10, Body::Chunk { room: THIRD, step: ChunkStep::Ended, counts: ChunkCounts::default(), queue: Some(1) });
    let free = world.diagnosis(1, 11);
    assert_eq!((free.cause, held(&free)), (Cause::Unknown, None), "the stuck one is another queue's");
}

#[test]
fn where_the_queue_is_not_known_a_chunk_is_behind_a_blocked_worker_when_all_are() {
    let mut world = World::new(true);
    world.taken(20, OTHER, None);
    world.time += 8 * SECOND;
    world.taken(10, THIRD, None);
    world.request(1, ROOM);
    world.chunk(7, ROOM, ChunkStep::Queued, (1, 0), None);
    assert_eq!(world.diagnosis(1, 5).cause, Cause::CapacityStall);
    let blocked = world.diagnosis(1, 11);
    assert_eq!((blocked.cause, held(&blocked)), (Cause::WorkerBlocked, Some((OTHER, 2))));
}

#[test]
fn a_worker_whose_transfer_moves_is_not_blocked() {
    let mut world = World::new(true);
    world.taken(10, OTHER, Some(1));
    world.posted(10, nixl(0x100), 2);
    world.request(1, ROOM);
    world.chunk(7, ROOM, ChunkStep::Queued, (1, 0), Some(1));
    assert_eq!(world.diagnosis(1, 11).cause, Cause::WorkerBlocked);
    world.time += 8 * SECOND;
    let seen =
        Observation { handle: nixl(0x100), generation: 1, status: TransferStatus::InProgress, moved: Some(4096) };
    world.tracker.observed(PROCESS, seen, Monotonic(world.time));
    assert_eq!(world.diagnosis(1, 3).cause, Cause::CapacityStall);
    assert_eq!(world.diagnosis(1, 11).cause, Cause::WorkerBlocked);
}

/// A request whose worker left a chunk that it had posted, of which NIXL merged nine descriptors into one.
fn abandoned(watched: bool) -> World {
    let mut world = World::new(watched);
    world.request(1, ROOM);
    world.taken(10, ROOM, Some(1));
    world.posted(10, nixl(0x100), 1);
    world.native(10, NativeEvent::NotMade { code: -4 });
    world.left(10, ROOM);
    world
}

fn flushed() -> NativeEvent {
    NativeEvent::Flushed { completion: 0x9000, status: 0 }
}

fn released() -> NativeEvent {
    NativeEvent::Releasing { handle: nixl(0x100), status: Some(TransferStatus::InProgress) }
}

#[test]
fn what_a_worker_left_running_is_in_flight_then_given_up_then_over() {
    let mut world = abandoned(true);
    assert_eq!(world.quiescence(1), "InFlight{1}");
    world.native(10, released());
    assert_eq!(world.quiescence(1), "Unknown{transfer given up}");
    world.native(3, flushed());
    assert_eq!(world.quiescence(1), "Quiescent");
    assert!(world.diagnosis(1, 0).evidence.iter().any(|evidence| evidence.fact == Fact::ChunkLeft));
}

#[test]
fn the_end_of_what_was_seen_proves_nothing_where_more_may_have_been_posted() {
    let mut unwatched = abandoned(false);
    unwatched.native(3, flushed());
    assert_eq!(unwatched.quiescence(1), "Unknown{abandoned handles}");

    let mut lossy = abandoned(true);
    lossy.tracker.native_lost(PROCESS, Monotonic(lossy.time));
    lossy.native(3, flushed());
    assert_eq!(lossy.quiescence(1), "Unknown{abandoned handles}");
}

#[test]
fn what_another_request_of_the_room_left_before_the_agent_came_is_not_proved_over_by_this_ones_end() {
    let mut world = World::new(true);
    world.request(1, ROOM);
    let (queued, working) = (0, 1);
    let counts = ChunkCounts { queued, working, abandoned: true, ..ChunkCounts::default() };
    world.see(10, Body::Chunk { room: ROOM, step: ChunkStep::Begun, counts, queue: Some(1) });
    world.posted(10, nixl(0x100), 1);
    world.native(10, NativeEvent::Posted { handle: nixl(0x100), status: TransferStatus::Done });
    world.left(10, ROOM);
    assert_eq!(world.quiescence(1), "Unknown{abandoned handles}");
}

#[test]
fn a_completion_is_lost_when_the_server_went_on_polling_and_its_worker_had_posted_all() {
    let done = |mut world: World| {
        world.native(10, NativeEvent::Posted { handle: nixl(0x100), status: TransferStatus::Done });
        assert_eq!(world.diagnosis(1, 60).cause, Cause::Unknown, "nobody has polled since");
        world.time += 6 * SECOND;
        world.see(7, Body::Pass { queue_length: 1, passes: 600 });
        world.diagnosis(1, 0).cause
    };
    let mut whole = World::new(true);
    whole.request(1, ROOM);
    whole.taken(10, ROOM, Some(1));
    whole.posted(10, nixl(0x100), 1);
    whole.chunk(10, ROOM, ChunkStep::Ended, (0, 0), Some(1));
    assert_eq!((done(whole), done(abandoned(true))), (Cause::CompletionLost, Cause::Unknown));
}

#[test]
fn the_passes_of_a_poll_are_those_since_it_changed() {
    let mut world = World::new(true);
    world.see(7, Body::Pass { queue_length: 0, passes: 900 });
    world.request(1, ROOM);
    world.see(7, Body::Pass { queue_length: 1, passes: 5 });
    let passes = world.diagnosis(1, 0).evidence.iter().find_map(|evidence| match evidence.fact {
        Fact::PollUnchanged { passes, .. } => Some(passes),
        _ => None,
    });
    assert_eq!(passes, Some(5));
}
