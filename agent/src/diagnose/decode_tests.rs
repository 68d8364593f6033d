//! Why a request of a decode waits, each with what it must not be taken for beside it.

use super::{Cause, Confidence, Fact, NotKnown, Quiescence, cause_world::*};
use crate::{
    event::{
        Backend, Body, Phase,
        receiver::{DecodeLeave, DecodeQueue, ReceiverEvent},
    },
    request::{Queue, RequestKey, Side},
};

fn receiver(event: ReceiverEvent) -> Body {
    Body::Receiver(event)
}

impl World {
    /// A request of a decode that is in the prealloc queue since 1.
    fn preallocating(backend: Backend) -> Self {
        let mut world = Self::new();
        let (room, sender) = (ROOM, 1);
        world.see(1.0, receiver(ReceiverEvent::Open { room, sender, backend })).moves_to(1.0, DecodeQueue::Prealloc);
        world
    }

    /// The same, told where to write at `seconds`: in the transfer queue.
    fn transferring(seconds: f64) -> Self {
        let mut world = Self::preallocating(Backend::Nixl);
        world.polls(2.0, Phase::Bootstrapping).polls(3.0, Phase::WaitingForInput);
        world.see(seconds, Body::Send { room: ROOM, sender: 1, pages: 8, last: true });
        let reason = DecodeLeave::Preallocated;
        world.see(
            seconds,
            receiver(ReceiverEvent::Leave { room: ROOM, sender: 1, queue: DecodeQueue::Prealloc, reason }),
        );
        world.moves_to(seconds, DecodeQueue::Transfer);
        world
    }

    fn moves_to(&mut self, seconds: f64, queue: DecodeQueue) -> &mut Self {
        self.see(seconds, receiver(ReceiverEvent::Enter { room: ROOM, sender: 1, queue, rid: None }))
    }

    fn polls(&mut self, seconds: f64, new: Phase) -> &mut Self {
        self.see(seconds, Body::Phase { room: ROOM, sender: 1, old: None, new: Some(new) })
    }

    fn passes(&mut self, seconds: f64, prealloc: u32, transfer: u32) -> &mut Self {
        self.see(seconds, receiver(ReceiverEvent::Pass { prealloc, transfer, passes: 1000 }))
    }

    /// Another receiver on the room, which ends well and clears it at `seconds`.
    fn other_ends(&mut self, seconds: f64) -> &mut Self {
        let (room, sender, queue) = (ROOM, 2, DecodeQueue::Transfer);
        self.see(seconds, receiver(ReceiverEvent::Open { room, sender, backend: Backend::Nixl }))
            .see(seconds, receiver(ReceiverEvent::Enter { room, sender, queue, rid: None }))
            .see(seconds, Body::Phase { room, sender, old: None, new: Some(Phase::Success) })
            .see(seconds, Body::Clear { room, sender, removed: true })
            .see(seconds, receiver(ReceiverEvent::Leave { room, sender, queue, reason: DecodeLeave::Success }))
    }
}

#[test]
fn a_decode_that_does_not_know_its_prefill_waits_for_that() {
    let mut world = World::preallocating(Backend::Nixl);
    assert_eq!(world.cause(100.0), Cause::Unknown, "nobody has polled it");
    world.polls(2.0, Phase::Bootstrapping);
    let diagnosis = world.diagnosis(100.0);
    assert_eq!((diagnosis.cause, diagnosis.quiescence), (Cause::NeverBootstrapped, Quiescence::NeverPosted));
    assert_says(&diagnosis, &[Fact::EnteredDecodeQueue { queue: Queue::Prealloc }, Fact::PrefillNotKnown]);
    assert!(!says(&diagnosis, &Fact::NoDecodeRegistered), "those are a prefill's words");
    world.polls(3.0, Phase::WaitingForInput);
    assert_eq!(world.cause(100.0), Cause::CapacityStall);
}

#[test]
fn a_decode_that_waits_for_memory_is_not_stuck_and_its_clock_starts_there() {
    for backend in [Backend::Nixl, Backend::Mooncake, Backend::Fake] {
        let mut world = World::preallocating(backend);
        world.polls(2.0, Phase::Bootstrapping).polls(900.0, Phase::WaitingForInput);
        let diagnosis = world.diagnosis(2000.0);
        assert_eq!(diagnosis.cause, Cause::CapacityStall, "{backend:?}");
        assert!(!diagnosis.cause.is_stuck());
        assert_says(&diagnosis, &[Fact::WaitsForMemory]);
        let tracked = world.tracker.get(RequestKey { process: PROCESS, serial: 1 }).unwrap();
        assert_eq!(tracked.request.waiting_since(), at(900.0));
    }
}

#[test]
fn a_decode_whose_prefill_does_not_write_is_unknown_and_says_what_is_missing() {
    let world = World::transferring(500.0);
    let diagnosis = world.diagnosis(1000.0);
    let why = NotKnown::WrittenByPrefill;
    assert_eq!((diagnosis.cause, diagnosis.quiescence), (Cause::Unknown, Quiescence::Unknown { why }));
    assert_eq!(diagnosis.confidence, Confidence::High);
    assert_says(&diagnosis, &[Fact::PrefillTold { pages: 8 }, Fact::WaitsForPrefill]);
    let tracked = world.tracker.get(RequestKey { process: PROCESS, serial: 1 }).unwrap();
    assert_eq!((tracked.request.side(), tracked.request.queue()), (Side::Decode, Queue::Transfer));
    assert_eq!(tracked.request.waiting_since(), at(500.0), "what it waited for memory does not count");
}

#[test]
fn a_decode_that_polls_success_and_stays_waits_for_its_metadata_or_another_rank() {
    let mut world = World::transferring(5.0);
    world.polls(6.0, Phase::Success);
    let diagnosis = world.diagnosis(100.0);
    assert_eq!(diagnosis.cause, Cause::Unknown);
    assert_says(&diagnosis, &[Fact::NotCommitted]);
    assert!(!says(&diagnosis, &Fact::WaitsForPrefill));
}

#[test]
fn of_two_receivers_on_a_room_the_one_that_is_left_has_collided() {
    let mut world = World::transferring(5.0);
    world.other_ends(10.0);
    assert_eq!(world.cause(11.0), Cause::RoomCollision);

    let mut waiting = World::preallocating(Backend::Nixl);
    waiting.polls(3.0, Phase::WaitingForInput).other_ends(10.0);
    assert_eq!(waiting.cause(11.0), Cause::CapacityStall, "it has sent nothing yet");
}

#[test]
fn an_abort_of_a_receiver_is_never_called_ignored() {
    let mut world = World::transferring(5.0);
    world.see(6.0, Body::Abort { room: ROOM, sender: 1, room_present: false });
    world.see(6.0, Body::Update { room: ROOM, requested: Some(Phase::Failed), before: None, after: None });
    world.passes(60.0, 0, 1);
    assert_eq!(world.cause(61.0), Cause::Unknown, "passes without polls: requests were retracted");

    let mut failed = World::transferring(5.0);
    failed.see(6.0, Body::Update { room: ROOM, requested: Some(Phase::Failed), before: None, after: None });
    assert_eq!(failed.cause(61.0), Cause::UpdateDropped, "a failure that nobody but the room was told");
}

#[test]
fn a_decode_whose_loop_makes_no_pass_is_stalled_with_either_queue() {
    let mut waits = World::preallocating(Backend::Nixl);
    waits.polls(3.0, Phase::WaitingForInput).passes(10.0, 1, 0);
    assert_eq!((waits.cause(69.0), waits.cause(71.0)), (Cause::CapacityStall, Cause::LoopStalled));
    let mut moves = World::transferring(5.0);
    moves.passes(10.0, 0, 1);
    assert_eq!((moves.cause(69.0), moves.cause(71.0)), (Cause::Unknown, Cause::LoopStalled));
    moves.see(72.0, Body::Paused);
    assert_eq!(moves.cause(200.0), Cause::Unknown, "a paused one makes none");
}
