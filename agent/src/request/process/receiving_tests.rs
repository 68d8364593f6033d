use super::*;
use crate::{
    event::{Backend, Body, Entry, Event, Phase, ProcessKey, Room, clock::Monotonic},
    request::{
        Queue, RequestKey, ResyncReason, Side, Sync,
        tracker::{Change, Limits, Tracker},
    },
};

const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
const ROOM: Room = Room::Number(77);
const EPOCH: u64 = 5;

struct World {
    tracker: Tracker,
    time: u64,
    changes: Vec<Change>,
}

impl World {
    /// A server that is completely known.
    fn synchronised() -> Self {
        let mut world =
            Self { tracker: Tracker::new(Limits { requests: 100, transfers: 100 }), time: 1, changes: Vec::new() };
        world.tracker.attach(PROCESS, 0);
        world.resynchronise(&[]);
        assert_eq!(world.sync(), Sync::Complete);
        world
    }

    fn see(&mut self, body: Body) {
        self.time += 1;
        let event = Event { pid: 7, tid: 7, at: Monotonic(self.time), sequence: 1, detail_lost: false, body };
        self.tracker.apply(&event, &mut self.changes);
    }

    fn say(&mut self, event: ReceiverEvent) {
        self.see(Body::Receiver(event));
    }

    fn open(&mut self, sender: u64) {
        self.say(ReceiverEvent::Open { room: ROOM, sender, backend: Backend::Nixl });
    }

    fn enter(&mut self, sender: u64, queue: DecodeQueue) {
        let rid = Some(Rid { text: format!("rid-{sender}"), truncated: false });
        self.say(ReceiverEvent::Enter { room: ROOM, sender, queue, rid });
    }

    fn leave(&mut self, sender: u64, queue: DecodeQueue, reason: DecodeLeave) {
        self.say(ReceiverEvent::Leave { room: ROOM, sender, queue, reason });
    }

    fn pass(&mut self, prealloc: u32, transfer: u32) {
        self.say(ReceiverEvent::Pass { prealloc, transfer, passes: 50 });
    }

    fn resynchronise(&mut self, entries: &[(u64, Option<DecodeQueue>)]) {
        self.tracker.asked(PROCESS, EPOCH, ResyncReason::Attached, Monotonic(self.time));
        self.see(Body::StateBegin { epoch: EPOCH });
        for (sender, queue) in entries {
            let (sender, queue, entry) = (*sender, *queue, Box::new(entry()));
            self.say(ReceiverEvent::Entry { room: ROOM, sender, epoch: EPOCH, queue, entry });
        }
        self.see(Body::StateEnd { epoch: EPOCH, entries: entries.len() as u64 });
    }

    fn sync(&self) -> Sync {
        self.tracker.server(PROCESS).unwrap().sync
    }

    fn queue(&self, serial: u64) -> Option<Queue> {
        Some(self.tracker.get(RequestKey { process: PROCESS, serial })?.request.queue())
    }

    fn steps(&self) -> Vec<Step> {
        self.changes.iter().map(|change| change.step.clone()).collect()
    }
}

fn entry() -> Entry {
    Entry {
        backend: Backend::Nixl,
        phase: Some(Phase::WaitingForInput),
        phase_since: Some(Monotonic(10)),
        created: Some(Monotonic(5)),
        entered: Some(Monotonic(20)),
        sent_chunks: 1,
        sent_pages: 8,
        sent_last: true,
        aborted: None,
        dropped: None,
        shared_with: None,
        cleared_by: None,
        chunks: Default::default(),
        rid: Some(Rid { text: "rid".into(), truncated: false }),
    }
}

#[test]
fn a_healthy_request_of_a_decode_goes_through_both_queues_without_a_trace() {
    let mut world = World::synchronised();
    world.open(1);
    world.enter(1, DecodeQueue::Prealloc);
    world.pass(1, 0);
    assert_eq!(world.queue(1), Some(Queue::Prealloc));
    world.leave(1, DecodeQueue::Prealloc, DecodeLeave::Preallocated);
    assert_eq!(world.queue(1), Some(Queue::None));
    world.enter(1, DecodeQueue::Transfer);
    world.pass(0, 1);
    assert_eq!(world.queue(1), Some(Queue::Transfer));
    world.see(Body::Phase { room: ROOM, sender: 1, old: None, new: Some(Phase::Success) });
    world.see(Body::Clear { room: ROOM, sender: 1, removed: true });
    assert_eq!(world.queue(1), Some(Queue::Transfer), "its end comes with the reason");
    world.leave(1, DecodeQueue::Transfer, DecodeLeave::Success);
    world.see(Body::Close { room: ROOM, sender: 1 });
    for _ in 0..3 {
        world.pass(0, 0);
    }
    assert_eq!((world.queue(1), world.sync()), (None, Sync::Complete));
    assert_eq!(world.steps().last(), Some(&Step::Left(LeaveReason::Success)));
    assert_eq!(world.changes.last().unwrap().ended.as_ref().unwrap().side(), Side::Decode);
    assert_eq!(world.tracker.unused(), Default::default());
}

#[test]
fn a_failed_handshake_ends_with_its_reason() {
    let mut world = World::synchronised();
    world.open(1);
    world.enter(1, DecodeQueue::Prealloc);
    world.see(Body::Failure { room: ROOM, sender: 1 });
    assert_eq!(world.queue(1), Some(Queue::Prealloc));
    world.leave(1, DecodeQueue::Prealloc, DecodeLeave::Failed);
    assert_eq!((world.queue(1), world.steps().last()), (None, Some(&Step::Left(LeaveReason::Failed))));
}

#[test]
fn what_another_rank_failed_has_failed_and_what_was_emptied_lives_on() {
    let mut world = World::synchronised();
    for sender in [1, 2] {
        world.open(sender);
        world.enter(sender, DecodeQueue::Transfer);
    }
    world.see(Body::Failure { room: ROOM, sender: 1 });
    world.leave(1, DecodeQueue::Transfer, DecodeLeave::Removed);
    assert_eq!((world.queue(1), world.steps().last()), (None, Some(&Step::Left(LeaveReason::Failed))));
    world.leave(2, DecodeQueue::Transfer, DecodeLeave::Removed);
    assert_eq!((world.queue(2), world.steps().last()), (Some(Queue::None), Some(&Step::Left(LeaveReason::Removed))));
    world.pass(0, 0);
    world.see(Body::Close { room: ROOM, sender: 2 });
    assert_eq!((world.queue(2), world.sync()), (None, Sync::Complete));
}

#[test]
fn lengths_that_are_not_the_trackers_in_either_queue_raise_doubt() {
    for (prealloc, transfer) in [(2, 1), (0, 1), (1, 0), (0, 2), (2, 0)] {
        let mut world = World::synchronised();
        for (sender, queue) in [(1, DecodeQueue::Prealloc), (2, DecodeQueue::Transfer)] {
            world.open(sender);
            world.enter(sender, queue);
        }
        world.pass(1, 1);
        world.pass(1, 1);
        assert_eq!(world.sync(), Sync::Complete);
        world.pass(prealloc, transfer);
        world.pass(prealloc, transfer);
        assert_eq!(world.sync(), Sync::Needed(ResyncReason::QueueLengthDiffers), "{prealloc} {transfer}");
    }
}

#[test]
fn a_resynchronisation_puts_each_receiver_into_its_queue() {
    let mut world = World::synchronised();
    world.open(1);
    world.enter(1, DecodeQueue::Prealloc);
    world.resynchronise(&[(1, Some(DecodeQueue::Transfer)), (2, Some(DecodeQueue::Prealloc)), (3, None)]);
    assert_eq!([1, 2, 3].map(|serial| world.queue(serial).unwrap()), [Queue::Transfer, Queue::Prealloc, Queue::None]);
    let tracked = world.tracker.get(RequestKey { process: PROCESS, serial: 2 }).unwrap();
    assert_eq!((tracked.request.side(), tracked.request.entered), (Side::Decode, None));
    assert_eq!(tracked.request.receiving.unwrap().since, Monotonic(20));
    for _ in 0..3 {
        world.pass(1, 1);
    }
    assert_eq!(world.sync(), Sync::Complete);
}

#[test]
fn a_receiver_that_is_opened_twice_or_retired_is_counted_once() {
    let mut world = World::synchronised();
    for _ in 0..2 {
        world.open(1);
        world.enter(1, DecodeQueue::Transfer);
        world.enter(1, DecodeQueue::Transfer);
    }
    world.pass(0, 1);
    world.pass(0, 1);
    assert_eq!(world.sync(), Sync::Complete);
    world.open(1);
    world.pass(0, 0);
    world.pass(0, 0);
    assert_eq!(world.sync(), Sync::Complete);
}

#[test]
fn a_sender_s_serial_that_is_said_to_be_in_a_decode_s_queue_is_a_decode_s() {
    let mut world = World::synchronised();
    world.see(Body::Open { room: ROOM, sender: 1, backend: Backend::Nixl });
    world.see(Body::Enter { room: ROOM, sender: 1, rid: None, queue_length: 1 });
    world.enter(1, DecodeQueue::Prealloc);
    let tracked = world.tracker.get(RequestKey { process: PROCESS, serial: 1 }).unwrap();
    assert_eq!(tracked.request.side(), Side::Decode, "nothing is done to it");
    world.leave(1, DecodeQueue::Prealloc, DecodeLeave::Failed);
    for _ in 0..3 {
        world.pass(0, 0);
    }
    assert_eq!((world.queue(1), world.sync()), (None, Sync::Complete), "the books balance");
}
