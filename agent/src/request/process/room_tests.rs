//! Which rooms are kept, and for how long.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::event::{Backend, ChunkCounts, ChunkStep, Entry};

const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
const EPOCH: u64 = 5;
const ABANDONED: ChunkCounts =
    ChunkCounts { queued: 0, working: 0, abandoned: true, attached_late: false, no_queues: false };

struct World {
    process: Process,
    unused: Unused,
    changes: Vec<Change>,
    max_requests: usize,
}

impl World {
    fn new(max_requests: usize) -> Self {
        let mut world = Self {
            process: Process::new(PROCESS, 0, 10),
            unused: Unused::default(),
            changes: Vec::new(),
            max_requests,
        };
        world.process.asked(EPOCH, ResyncReason::Attached, Monotonic(1));
        world.see(Body::StateBegin { epoch: EPOCH });
        world.see(Body::StateEnd { epoch: EPOCH, entries: 0 });
        world
    }

    fn see(&mut self, body: Body) {
        let event = Event { pid: 7, tid: 7, at: Monotonic(2), sequence: 1, detail_lost: false, body };
        self.changes.clear();
        let (changes, unused) = (&mut self.changes, &mut self.unused);
        let mut applying = Applying { at: event.at, tid: 7, changes, unused, max_requests: self.max_requests };
        self.process.apply(&event, &mut applying);
    }

    fn open(&mut self, room: u64, sender: u64) {
        self.see(Body::Open { room: Room::Number(room), sender, backend: Backend::Mori });
    }

    /// A request whose chunk's end proves nothing, from its beginning to its end.
    fn abandon(&mut self, room: u64, sender: u64) {
        self.open(room, sender);
        let room = Room::Number(room);
        self.see(Body::Chunk { room, step: ChunkStep::Ended, counts: ABANDONED, queue: None });
        self.see(Body::Leave { room, sender, reason: LeaveReason::Success });
    }

    fn chunks(&self, sender: u64) -> Option<ChunkCounts> {
        self.process.tracked(sender).unwrap().room.chunks
    }
}

#[test]
fn no_live_room_goes_for_dead_ones_and_those_that_go_are_counted() {
    const BEYOND: u64 = 10;
    let dead = dead::MAX_DEAD_ROOMS as u64 + BEYOND;
    let mut world = World::new(100);
    world.open(u64::MAX, 1);
    let counts = ChunkCounts { working: 1, ..ChunkCounts::default() };
    world.see(Body::Chunk { room: Room::Number(u64::MAX), step: ChunkStep::Begun, counts, queue: None });
    for room in 0..dead {
        world.abandon(room, room + 2);
    }
    assert_eq!(world.chunks(1), Some(counts), "the live one is as it was");
    assert_eq!((world.process.state.sync, world.unused.rooms_dropped), (Sync::Complete, BEYOND));
    assert_eq!(world.process.rooms.len(), dead::MAX_DEAD_ROOMS + 1);
    for (room, kept) in [(0, None), (BEYOND - 1, None), (BEYOND, Some(ABANDONED)), (dead - 1, Some(ABANDONED))] {
        let sender = dead + 10 + room;
        world.open(room, sender);
        assert_eq!(world.chunks(sender), kept, "room {room}");
    }
}

#[test]
fn as_many_rooms_as_there_are_requests_have_a_place() {
    let requests = dead::MAX_DEAD_ROOMS as u64 + 10;
    let mut world = World::new(requests as usize);
    (1..=requests).for_each(|number| world.open(number, number));
    assert_eq!((world.process.all().count() as u64, world.unused), (requests, Unused::default()));
    assert_eq!(world.process.state.sync, Sync::Complete);
}

#[test]
fn a_sender_that_is_said_to_be_in_one_room_after_the_other_leaves_none_behind() {
    let mut world = World::new(100);
    for room in 0..1_000 {
        world.open(room, 1);
        world.see(Body::Send { room: Room::Number(room + 5_000), sender: 1, pages: 1, last: true });
    }
    assert_eq!(world.process.rooms.keys().collect::<Vec<_>>(), [&Room::Number(999)]);
    world.process.asked(EPOCH, ResyncReason::EventsLost, Monotonic(3));
    world.see(Body::StateBegin { epoch: EPOCH });
    for room in 0..1_000 {
        world.see(Body::Entry { room: Room::Number(room), sender: 1, epoch: EPOCH, entry: Box::new(entry(false)) });
    }
    assert_eq!(world.process.rooms.keys().collect::<Vec<_>>(), [&Room::Number(999)]);
    assert_eq!(world.process.requests[&1].room, Room::Number(999));
}

fn entry(abandoned: bool) -> Entry {
    Entry {
        backend: Backend::Mori,
        phase: Some(Phase::WaitingForInput),
        phase_since: None,
        created: None,
        entered: None,
        sent_chunks: 1,
        sent_pages: 8,
        sent_last: true,
        aborted: None,
        dropped: None,
        shared_with: None,
        cleared_by: None,
        chunks: ChunkCounts { abandoned, ..ChunkCounts::default() },
        rid: None,
    }
}

fn any_body() -> impl Strategy<Value = Body> {
    let (room, sender) = ((0..4_u64).prop_map(Room::Number), 1..5_u64);
    let both = (room.clone(), sender.clone());
    let counts = (0..2_u16, 0..2_u16, any::<bool>());
    prop_oneof![
        4 => both.clone().prop_map(|(room, sender)| Body::Open { room, sender, backend: Backend::Mori }),
        1 => both.clone().prop_map(|(room, sender)| Body::Close { room, sender }),
        1 => both.clone().prop_map(|(room, sender)| Body::Send { room, sender, pages: 1, last: true }),
        1 => both.clone().prop_map(|(room, sender)| Body::Leave { room, sender, reason: LeaveReason::Failed }),
        1 => both.clone().prop_map(|(room, sender)| Body::Clear { room, sender, removed: true }),
        1 => (both, any::<bool>()).prop_map(|((room, sender), abandoned)| {
            Body::Entry { room, sender, epoch: EPOCH, entry: Box::new(entry(abandoned)) }
        }),
        1 => room.clone().prop_map(|room| Body::PeerAbort { room, room_present: true }),
        1 => room.clone().prop_map(|room| Body::Update {
            room,
            requested: Some(Phase::Failed),
            before: None,
            after: None
        }),
        4 => (room, counts).prop_map(|(room, (queued, working, abandoned))| Body::Chunk {
            room,
            step: ChunkStep::Ended,
            counts: ChunkCounts { queued, working, abandoned, ..ChunkCounts::default() },
            queue: None,
        }),
        1 => Just(Body::StateBegin { epoch: EPOCH }),
    ]
}

proptest! {
    #[test]
    fn a_room_has_a_sender_or_is_among_the_dead(bodies in prop::collection::vec(any_body(), 0..100)) {
        let mut world = World::new(3);
        world.process.asked(EPOCH, ResyncReason::EventsLost, Monotonic(3));
        for body in bodies {
            world.see(body.clone());
            let process = &world.process;
            let without_sender: BTreeSet<Room> =
                process.rooms.iter().filter(|(_, state)| state.senders.is_empty()).map(|(room, _)| *room).collect();
            prop_assert_eq!(&without_sender, &process.dead.rooms().collect(), "after {:?}", body);
            for request in process.requests.values() {
                prop_assert!(process.rooms[&request.room].senders.contains(&request.serial), "after {:?}", body);
            }
        }
    }
}
