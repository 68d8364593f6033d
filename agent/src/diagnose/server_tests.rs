//! Causes that are about the server as a whole, or its own calls, each with its neighbouring silence. Times are in seconds.

use super::{cause_world::*, *};
use crate::{
    event::{Backend, Body, LeaveReason, Phase, Room},
    request::{RequestKey, ResyncReason},
};

fn update(world: &mut World, seconds: f64, before: Phase, after: Phase) {
    world.see(seconds, Body::Update { room: ROOM, requested: Some(after), before: Some(before), after: Some(after) });
}

#[test]
fn the_loop_is_stalled_once_no_pass_was_made_for_a_minute() {
    let mut world = World::queued();
    world.pass(5.0);
    assert_eq!(world.cause(64.9), Cause::Unknown, "a long batch, or a kernel that is compiled");
    let diagnosis = world.diagnosis(65.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::LoopStalled, Confidence::High));
    assert_says(&diagnosis, &[Fact::NoPass { since_ms: 60_000 }]);
    assert_eq!(world.pass(65.1).cause(65.1), Cause::Unknown, "it was a long batch");
    assert!(!says(&world.diagnosis(65.1), &Fact::NoPass { since_ms: 0 }));
}

#[test]
fn a_stall_comes_before_what_is_read_from_polls_and_is_every_requests_of_the_server() {
    let mut world = World::queued();
    world.pass(2.0).see(2.0, Body::Abort { room: ROOM, sender: 1, room_present: true });
    world.see(3.0, Body::Open { room: OTHER, sender: 2, backend: Backend::Nixl });
    world.see(3.0, Body::Phase { room: OTHER, sender: 2, old: None, new: Some(Phase::Bootstrapping) });
    let of_other = |world: &World, seconds| {
        let tracked = world.tracker.get(RequestKey { process: PROCESS, serial: 2 }).unwrap();
        diagnose(&tracked, at(seconds)).cause
    };
    world.pass(9.0);
    assert_eq!((world.cause(9.0), of_other(&world, 9.0)), (Cause::AbortIgnored, Cause::NeverBootstrapped));
    assert_eq!((world.cause(69.0), of_other(&world, 69.0)), (Cause::LoopStalled, Cause::LoopStalled));
    world.see(70.0, Body::Phase { room: ROOM, sender: 1, old: None, new: Some(Phase::Failed) });
    assert_eq!(world.cause(70.0), Cause::LoopStalled, "nobody drops it either");
}

#[test]
fn a_paused_server_is_not_stalled_and_a_resumed_one_not_before_its_time() {
    let mut world = World::queued();
    world.pass(5.0).see(6.0, Body::Paused);
    assert_eq!(world.cause(5_000.0), Cause::Unknown);
    world.see(5_000.0, Body::Resumed);
    assert_eq!(world.cause(5_059.9), Cause::Unknown, "the pause was longer than a stall");
    assert_eq!(world.cause(5_060.0), Cause::LoopStalled);
}

#[test]
fn no_stall_is_said_of_a_loop_that_was_never_seen_to_turn() {
    let mut world = World::queued();
    assert_eq!(world.cause(5_000.0), Cause::Unknown, "a server that starts captures its graphs, compiles its kernels");
    world.see(5_000.0, Body::Resumed);
    assert_eq!(world.cause(9_000.0), Cause::Unknown);
}

#[test]
fn no_stall_is_said_of_a_server_with_an_empty_queue() {
    let mut world = World::new();
    world.see(1.0, Body::Open { room: ROOM, sender: 1, backend: Backend::Nixl });
    world.see(1.0, Body::Phase { room: ROOM, sender: 1, old: None, new: Some(Phase::Bootstrapping) });
    world.see(2.0, Body::Pass { queue_length: 0, passes: 1 });
    assert_eq!(world.cause(500.0), Cause::NeverBootstrapped, "releases before 0.5 make no pass over an empty queue");
}

#[test]
fn whose_queue_it_is_counts_as_of_now_and_not_of_the_last_pass_that_was_marked() {
    // At most ten passes a second are marked.
    let mut entered = World::new();
    entered.see(2.0, Body::Pass { queue_length: 0, passes: 1 });
    entered.queue();
    entered.see(2.0, Body::Open { room: OTHER, sender: 2, backend: Backend::Nixl });
    let of_other = entered.tracker.get(RequestKey { process: PROCESS, serial: 2 }).unwrap();
    assert_eq!(
        diagnose(&of_other, at(70.0)).cause,
        Cause::LoopStalled,
        "it waits for a pass as the one in the queue does"
    );

    let mut left = World::queued();
    left.pass(2.0).see(2.0, Body::Open { room: OTHER, sender: 2, backend: Backend::Nixl });
    left.see(2.05, Body::Leave { room: ROOM, sender: 1, reason: LeaveReason::Success });
    let of_other = left.tracker.get(RequestKey { process: PROCESS, serial: 2 }).unwrap();
    assert_eq!(diagnose(&of_other, at(70.0)).cause, Cause::Unknown, "nobody is in the queue");
}

#[test]
fn a_decode_that_has_registered_is_seen_before_a_pass_has_polled_it() {
    let mut world = World::new();
    world.see(1.0, Body::Open { room: ROOM, sender: 1, backend: Backend::Nixl });
    world.see(1.0, Body::Phase { room: ROOM, sender: 1, old: None, new: Some(Phase::Bootstrapping) });
    update(&mut world, 1.0, Phase::Bootstrapping, Phase::Bootstrapping);
    assert_eq!(world.cause(2.0), Cause::NeverBootstrapped);
    update(&mut world, 3.0, Phase::Bootstrapping, Phase::WaitingForInput);
    assert_eq!(world.cause(3.0), Cause::Unknown);
    assert!(!says(&world.diagnosis(3.0), &Fact::NoDecodeRegistered));
}

#[test]
fn a_stall_is_told_with_low_confidence_where_passes_may_be_among_what_was_lost() {
    let mut world = World::queued();
    world.pass(5.0).tracker.needs_resync(PROCESS.pid, ResyncReason::EventsLost);
    let diagnosis = world.diagnosis(70.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::LoopStalled, Confidence::Low));
}

#[test]
fn a_failed_room_that_is_made_better_again_is_resurrected() {
    for after in [Phase::WaitingForInput, Phase::Transferring, Phase::Success] {
        let mut world = World::queued();
        world.pass(4.0).see(4.0, Body::Abort { room: ROOM, sender: 1, room_present: true });
        update(&mut world, 4.0, Phase::WaitingForInput, Phase::Failed);
        update(&mut world, 4.1, Phase::Failed, after);
        world.pass(9.0);
        let diagnosis = world.diagnosis(9.0);
        assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::Resurrected, Confidence::High), "{after}");
        assert_says(&diagnosis, &[Fact::Resurrected { room: ROOM, to: after }, Fact::AbortCalled { passes_since: 10 }]);
        update(&mut world, 10.0, after, Phase::Failed);
        assert_eq!(world.cause(10.0), Cause::AbortIgnored, "it has failed once more");
    }
}

#[test]
fn a_poll_that_returned_failed_before_is_a_resurrection() {
    let mut world = World::in_flight();
    let phase = |old, new| Body::Phase { room: ROOM, sender: 1, old: Some(old), new: Some(new) };
    world.see(5.0, phase(Phase::Transferring, Phase::Failed));
    assert_eq!(world.cause(5.0), Cause::Unknown, "it is dropped in this pass");
    world.see(5.1, phase(Phase::Failed, Phase::Transferring));
    let diagnosis = world.diagnosis(5.1);
    assert_eq!(diagnosis.cause, Cause::Resurrected);
    assert_says(&diagnosis, &[Fact::Resurrected { room: ROOM, to: Phase::Transferring }]);
    world.see(6.0, phase(Phase::Transferring, Phase::Success));
    assert_eq!(world.cause(6.0), Cause::Unknown, "it ends as if nothing had been");
}

#[test]
fn no_resurrection_is_said_of_a_room_that_is_used_again_or_shared_or_that_moves_on() {
    let mut again = World::new();
    again.see(1.0, Body::Open { room: ROOM, sender: 1, backend: Backend::Nixl });
    update(&mut again, 1.0, Phase::Failed, Phase::Bootstrapping);
    update(&mut again, 2.0, Phase::Bootstrapping, Phase::WaitingForInput);
    assert_eq!(again.cause(3.0), Cause::Unknown, "a former request had failed on it");

    let mut shared = World::queued();
    shared.see(2.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    update(&mut shared, 3.0, Phase::WaitingForInput, Phase::Failed);
    update(&mut shared, 3.0, Phase::Failed, Phase::Transferring);
    assert_eq!(shared.cause(4.0), Cause::Unknown, "whose failure it was is not known");

    let mut moves = World::queued();
    update(&mut moves, 2.0, Phase::WaitingForInput, Phase::Transferring);
    assert_eq!(moves.cause(3.0), Cause::Unknown);
}

/// A health check in the queue since 1, that has sent nothing.
fn health_check() -> World {
    let mut world = World::new();
    let (room, sender) = (Room::Number(0), 1);
    world
        .see(1.0, Body::Open { room, sender, backend: Backend::Fake })
        .see(1.0, Body::Phase { room, sender, old: None, new: Some(Phase::WaitingForInput) })
        .see(1.0, Body::Enter { room, sender, rid: None, queue_length: 1 });
    world
}

#[test]
fn a_warm_up_is_pinned_once_it_was_polled_for_ten_seconds() {
    let mut world = health_check();
    assert_eq!(world.pass(10.9).cause(59.0), Cause::Unknown, "nobody has polled it since: kernels are compiled");
    let diagnosis = world.pass(11.0).diagnosis(11.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::WarmupPinned, Confidence::High));
    assert_says(&diagnosis, &[Fact::FakeSender, Fact::NothingSent]);
    assert!(!diagnosis.cause.is_stuck(), "nobody waits for it");
    world.see(12.0, Body::Phase { room: Room::Number(0), sender: 1, old: None, new: Some(Phase::Success) });
    assert_eq!(world.cause(12.0), Cause::Unknown);
}

#[test]
fn health_checks_that_share_room_0_collide_with_nobody() {
    let mut world = health_check();
    world.see(2.0, Body::Open { room: Room::Number(0), sender: 2, backend: Backend::Fake });
    world.see(2.0, Body::Clear { room: Room::Number(0), sender: 2, removed: true });
    assert_eq!(world.pass(3.0).cause(3.0), Cause::Unknown);
    world.see(4.0, Body::Leave { room: Room::Number(0), sender: 1, reason: LeaveReason::Success });
    assert!(world.tracker.get(RequestKey { process: PROCESS, serial: 1 }).is_none());
}
