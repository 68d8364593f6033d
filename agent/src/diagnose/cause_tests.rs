//! Causes that are read from transfers and workers, from sequences of events, each with its neighbouring silence. Times are
//! in seconds.

use super::{super::cause_world::*, *};
use crate::{
    diagnose::{Confidence, Fact, NotKnown, Quiescence, diagnose},
    event::{Backend, Body, ChunkStep, native::TransferStatus},
    request::{RequestKey, ResyncReason, Sync, transfer::Observation},
};

#[test]
fn a_completion_is_lost_once_the_server_has_polled_for_five_seconds_after_the_last_end() {
    let mut world = World::done();
    assert_eq!(world.pass(10.9).cause(10.9), Cause::Unknown, "it may say so yet");
    let diagnosis = world.pass(11.0).diagnosis(11.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::CompletionLost, Confidence::High));
    assert_says(&diagnosis, &[Fact::TransfersDone { count: 1 }, Fact::Sent { chunks: 1, pages: 8 }]);
    assert_eq!(diagnosis.quiescence, Quiescence::Quiescent { since: Some(at(6.0)) });
}

#[test]
fn no_completion_is_lost_while_nobody_polls() {
    let mut world = World::done();
    world.pass(9.0);
    assert_eq!(world.cause(60.0), Cause::Unknown, "the scheduler is stuck, or paused, not the completion");
    assert_eq!(world.pass(61.0).cause(61.0), Cause::CompletionLost);
}

#[test]
fn no_completion_is_lost_of_a_request_that_polls_success() {
    let mut world = World::done();
    world.see(7.0, Body::Phase { room: ROOM, sender: 1, old: None, new: Some(Phase::Success) });
    assert_eq!(world.pass(20.0).cause(20.0), Cause::Unknown);
}

#[test]
fn no_completion_is_lost_while_more_is_to_come() {
    let mut queued = World::done();
    queued.chunk(SCHEDULER, 7.0, ROOM, ChunkStep::Queued, (1, 0));
    assert_eq!(queued.pass(20.0).cause(20.0), Cause::Unknown, "a chunk waits");

    let mut in_hand = World::done();
    in_hand.chunk(WORKER, 7.0, ROOM, ChunkStep::Begun, (0, 1));
    assert_eq!(in_hand.pass(20.0).cause(20.0), Cause::Unknown, "a worker has taken a chunk and posted nothing of it");
    in_hand.posted(WORKER, 20.0, 2).status(21.0, 2, TransferStatus::Done);
    let diagnosis = in_hand.pass(26.0).diagnosis(26.0);
    assert_eq!(diagnosis.cause, Cause::CompletionLost, "it stands there though its transfer is done");
    assert!(matches!(diagnosis.quiescence, Quiescence::InFlight { chunks: 1, transfers: 0, .. }), "{diagnosis:?}");

    let mut part = World::new();
    let (room, sender) = (ROOM, 1);
    part.see(1.0, Body::Open { room, sender, backend: Backend::Nixl })
        .see(1.0, Body::Send { room, sender, pages: 8, last: false })
        .chunk(WORKER, 2.0, ROOM, ChunkStep::Begun, (0, 1))
        .posted(WORKER, 4.0, 1)
        .status(6.0, 1, TransferStatus::Done)
        .chunk(WORKER, 6.0, ROOM, ChunkStep::Ended, (0, 0));
    assert_eq!(part.pass(20.0).cause(20.0), Cause::Unknown, "it was not the last chunk");
}

#[test]
fn no_completion_is_lost_where_a_transfer_may_have_been_missed() {
    let mut lost = World::done();
    lost.tracker.native_lost(PROCESS, at(5.0));
    assert_eq!(lost.pass(20.0).cause(20.0), Cause::Unknown, "one that was posted may be among what was lost");
    let mut unwatched = World::done();
    unwatched.tracker.watch(PROCESS, None, at(7.0));
    assert_eq!(unwatched.pass(20.0).cause(20.0), Cause::Unknown);
    let mut somebodys = World::done();
    somebodys.posted(SECOND_WORKER, 7.0, 9);
    assert_eq!(somebodys.pass(20.0).cause(20.0), Cause::Unknown, "of which room that is, is not known");
    somebodys.status(20.0, 9, TransferStatus::Done);
    assert_eq!(somebodys.pass(21.0).cause(21.0), Cause::CompletionLost);
}

#[test]
fn no_completion_is_lost_of_a_room_that_is_shared_or_whose_transfers_were_another_requests() {
    let mut shared = World::done();
    shared.see(7.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    assert_eq!(shared.pass(20.0).cause(20.0), Cause::Unknown, "whose transfers they were is not known");
    let mut later = World::in_flight();
    later.see(5.0, Body::Close { room: ROOM, sender: 1 });
    later.see(7.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    later.see(7.0, Body::Send { room: ROOM, sender: 2, pages: 8, last: true });
    later.status(8.0, 1, TransferStatus::Done).chunk(WORKER, 8.0, ROOM, ChunkStep::Ended, (0, 0));
    later.pass(30.0);
    let tracked = later.tracker.get(RequestKey { process: PROCESS, serial: 2 }).unwrap();
    assert_eq!(diagnose(&tracked, at(30.0)).cause, Cause::Unknown, "it was posted before the request was made");
}

#[test]
fn a_worker_is_blocked_once_a_chunk_has_waited_for_it_for_ten_seconds() {
    let mut world = World::new();
    world.chunk(WORKER, 0.5, OTHER, ChunkStep::Begun, (0, 1));
    let (room, sender) = (ROOM, 1);
    world
        .see(9.0, Body::Open { room, sender, backend: Backend::Nixl })
        .see(9.0, Body::Send { room, sender, pages: 8, last: true })
        .chunk(SCHEDULER, 9.0, ROOM, ChunkStep::Queued, (1, 0));
    assert_eq!(world.cause(9.0), Cause::CapacityStall);
    assert_eq!(
        world.cause(18.9),
        Cause::CapacityStall,
        "the worker is at it for long, the chunk does not wait for long"
    );
    let diagnosis = world.diagnosis(19.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::WorkerBlocked, Confidence::High));
    assert_says(&diagnosis, &[Fact::WorkersHold { room: OTHER, rooms: 1 }]);
    assert_eq!(diagnosis.quiescence, Quiescence::Queued { chunks: 1 });
}

#[test]
fn chunks_wait_for_capacity_while_workers_get_on() {
    let mut world = World::queued();
    for second in 2..40 {
        let (begun, ended) = (f64::from(second), f64::from(second) + 0.9);
        world.chunk(WORKER, begun, OTHER, ChunkStep::Begun, (0, 1));
        assert_eq!(world.cause(begun + 0.5), Cause::CapacityStall);
        world.chunk(WORKER, ended, OTHER, ChunkStep::Ended, (0, 0));
    }
    let diagnosis = world.diagnosis(40.0);
    assert_eq!(diagnosis.cause, Cause::Unknown, "no worker is known to hold anything");
    world.chunk(WORKER, 40.0, OTHER, ChunkStep::Begun, (0, 1));
    let diagnosis = world.diagnosis(49.9);
    assert_eq!((diagnosis.cause, diagnosis.quiescence), (Cause::CapacityStall, Quiescence::Queued { chunks: 1 }));
    assert_says(&diagnosis, &[Fact::WorkersHold { room: OTHER, rooms: 1 }]);
    assert_eq!(world.cause(50.0), Cause::WorkerBlocked);
}

#[test]
fn a_worker_whose_transfers_end_one_after_the_other_blocks_nobody() {
    let mut world = World::queued();
    world.chunk(WORKER, 2.0, OTHER, ChunkStep::Begun, (0, 1));
    for handle in 1..=4 {
        world.posted(WORKER, 3.0, handle);
    }
    for handle in 1..=3 {
        let ends = 3.0 + 9.0 * handle as f64;
        assert_eq!(world.cause(ends), Cause::CapacityStall, "{ends}");
        world.status(ends, handle, TransferStatus::Done);
    }
    assert_eq!(world.cause(39.9), Cause::CapacityStall);
    assert_eq!(world.cause(40.0), Cause::WorkerBlocked, "nothing has moved for ten seconds");
}

#[test]
fn a_worker_is_blocked_with_low_confidence_where_its_transfers_may_move_unseen() {
    let mut lost = World::queued();
    lost.chunk(WORKER, 2.0, OTHER, ChunkStep::Begun, (0, 1));
    lost.tracker.native_lost(PROCESS, at(5.0));
    let mut unwatched = World::queued();
    unwatched.chunk(WORKER, 2.0, OTHER, ChunkStep::Begun, (0, 1));
    unwatched.tracker.watch(PROCESS, None, at(5.0));
    for world in [lost, unwatched] {
        let diagnosis = world.diagnosis(20.0);
        assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::WorkerBlocked, Confidence::Low));
        assert_says(&diagnosis, &[Fact::TransfersNotAllSeen]);
    }
}

#[test]
fn a_chunk_that_a_worker_holds_waits_for_nobody() {
    let mut world = World::queued();
    world.chunk(WORKER, 2.0, OTHER, ChunkStep::Begun, (0, 1));
    world.chunk(SECOND_WORKER, 3.0, ROOM, ChunkStep::Begun, (0, 1));
    assert_eq!(world.cause(60.0), Cause::Unknown);
}

#[test]
fn what_workers_do_is_not_known_once_marks_were_lost() {
    let mut world = World::queued();
    world.chunk(WORKER, 2.0, OTHER, ChunkStep::Begun, (0, 1));
    assert_eq!(world.diagnosis(20.0).confidence, Confidence::High);
    world.tracker.needs_resync(7, ResyncReason::EventsLost);
    let diagnosis = world.diagnosis(20.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::WorkerBlocked, Confidence::Low));
    world.tracker.asked(PROCESS, EPOCH, ResyncReason::EventsLost, at(20.0));
    world.see(20.0, Body::StateBegin { epoch: EPOCH });
    assert_eq!(world.cause(20.0), Cause::Unknown, "that it was done may be among what was lost");
    world.chunk(WORKER, 21.0, OTHER, ChunkStep::Begun, (0, 1));
    assert_eq!(world.cause(30.9), Cause::CapacityStall);
    assert_eq!(world.cause(31.0), Cause::WorkerBlocked);
}

#[test]
fn a_transfer_is_slow_while_others_end_and_stalled_once_nothing_moves_for_ten_seconds() {
    let mut world = World::in_flight();
    world.posted(WORKER, 4.0, 2);
    world.status(9.0, 2, TransferStatus::Done);
    assert_eq!(world.cause(13.9), Cause::Unknown, "ten seconds are not over");
    let slow = world.diagnosis(14.0);
    assert_eq!((slow.cause, slow.confidence), (Cause::Slow, Confidence::High));
    assert_says(&slow, &[Fact::TransfersUnderWay { count: 1 }, Fact::TransfersDone { count: 1 }]);
    assert!(!says(&slow, &Fact::NothingMoved { since_ms: 5_000 }) && !says(&slow, &Fact::TransfersNotAllSeen));
    assert_eq!(world.cause(18.9), Cause::Slow);
    let stalled = world.diagnosis(19.0);
    assert_eq!((stalled.cause, stalled.confidence), (Cause::TransferStalled, Confidence::High));
    assert_says(&stalled, &[Fact::TransfersUnderWay { count: 1 }, Fact::NothingMoved { since_ms: 10_000 }]);
    let in_flight = Quiescence::InFlight { chunks: 1, transfers: 1, oldest: Some(at(4.0)) };
    assert_eq!((slow.quiescence, stalled.quiescence), (in_flight, in_flight));
    world.status(20.0, 1, TransferStatus::Done);
    assert_eq!(world.cause(20.0), Cause::Unknown, "it has ended");
}

#[test]
fn of_two_requests_on_one_room_neither_surely_has_the_transfer_that_stalls() {
    let mut world = World::in_flight();
    assert_eq!(world.diagnosis(20.0).confidence, Confidence::High);
    world.see(5.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    world.posted(WORKER, 6.0, 2);
    for serial in [1, 2] {
        let tracked = world.tracker.get(RequestKey { process: PROCESS, serial }).unwrap();
        let diagnosis = diagnose(&tracked, at(20.0));
        assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::TransferStalled, Confidence::Low));
    }
}

#[test]
fn bytes_that_were_read_to_move_keep_a_transfer_slow() {
    let mut world = World::in_flight();
    let read =
        |moved| Observation { handle: nixl(1), generation: 1, status: TransferStatus::InProgress, moved: Some(moved) };
    world.tracker.observed(PROCESS, read(4096), at(13.0));
    assert_eq!(world.cause(22.9), Cause::Slow);
    world.tracker.observed(PROCESS, read(4096), at(22.0));
    assert_eq!(world.cause(23.0), Cause::TransferStalled, "the same bytes once more are no progress");
}

#[test]
fn a_transfer_whose_end_may_have_been_missed_is_stalled_with_low_confidence() {
    for cause in [Cause::Slow, Cause::TransferStalled] {
        let mut world = World::in_flight();
        let now = if cause == Cause::Slow { 14.0 } else { 19.0 };
        world.posted(WORKER, 4.0, 2).status(9.0, 2, TransferStatus::Done);
        world.tracker.native_lost(PROCESS, at(5.0));
        let lost = world.diagnosis(now);
        assert_eq!((lost.cause, lost.confidence), (cause, Confidence::Low));
        assert_says(&lost, &[Fact::TransfersNotAllSeen]);
        assert!(matches!(lost.quiescence, Quiescence::InFlight { .. }), "what was seen is not taken back");
        world.tracker.watch(PROCESS, None, at(6.0));
        assert_eq!(world.diagnosis(now).confidence, Confidence::Low);
    }
}

#[test]
fn a_peer_is_gone_when_its_connection_was_reset_and_the_transfer_failed_of_it() {
    let mut world = World::failed(NIXL_REMOTE_DISCONNECT);
    world.endpoint_failed(6.5, UCS_ERR_CONNECTION_RESET);
    let diagnosis = world.diagnosis(7.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::PeerGone, Confidence::High));
    let failed = Fact::TransferFailed { engine: Engine::Nixl, code: NIXL_REMOTE_DISCONNECT };
    assert_says(&diagnosis, &[failed, Fact::EndpointGivenUp { status: UCS_ERR_CONNECTION_RESET }]);
    assert_eq!(diagnosis.quiescence, Quiescence::Quiescent { since: Some(at(6.0)) }, "its flush has ended");
}

#[test]
fn a_peer_is_not_said_to_be_gone_unless_its_reset_was_seen_with_the_failure() {
    const TIMEOUT: i8 = -80;
    let with = |endpoint: Option<(f64, i8)>, code: i32| {
        let mut world = World::failed(code);
        if let Some((seconds, status)) = endpoint {
            world.endpoint_failed(seconds, status);
        }
        let diagnosis = world.diagnosis(20.0);
        assert_says(&diagnosis, &[Fact::TransferFailed { engine: Engine::Nixl, code }]);
        assert!(diagnosis.quiescence.is_proved_idle(), "{diagnosis:?}");
        diagnosis.cause
    };
    let reset = UCS_ERR_CONNECTION_RESET;
    for (endpoint, code, cause) in [
        (Some((6.0, reset)), NIXL_REMOTE_DISCONNECT, Cause::PeerGone),
        (None, NIXL_REMOTE_DISCONNECT, Cause::CompletionError),
        (Some((6.0, TIMEOUT)), NIXL_REMOTE_DISCONNECT, Cause::CompletionError),
        (Some((7.1, reset)), NIXL_REMOTE_DISCONNECT, Cause::CompletionError),
        (Some((6.0, reset)), -1, Cause::CompletionError),
    ] {
        assert_eq!(with(endpoint, code), cause, "{endpoint:?} {code}");
    }
    let mut before = World::new();
    before.endpoint_failed(0.5, reset);
    before.queue();
    before.post();
    before.fail(NIXL_REMOTE_DISCONNECT);
    assert_eq!(before.cause(20.0), Cause::CompletionError);
}

#[test]
fn a_failure_is_told_with_low_confidence_where_not_all_was_seen_and_not_at_all_of_a_former_request() {
    for endpoint in [None, Some(UCS_ERR_CONNECTION_RESET)] {
        let mut world = World::failed(NIXL_REMOTE_DISCONNECT);
        if let Some(status) = endpoint {
            world.endpoint_failed(6.0, status);
        }
        world.tracker.native_lost(PROCESS, at(8.0));
        let diagnosis = world.diagnosis(9.0);
        assert!(matches!(diagnosis.cause, Cause::PeerGone | Cause::CompletionError), "{diagnosis:?}");
        assert_eq!(diagnosis.confidence, Confidence::Low);
        assert_eq!(diagnosis.quiescence, Quiescence::Unknown { why: NotKnown::AbandonedHandles });
    }
    let mut next = World::failed(NIXL_REMOTE_DISCONNECT);
    next.see(7.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    let tracked = next.tracker.get(RequestKey { process: PROCESS, serial: 2 }).unwrap();
    assert_eq!(tracked.server.sync, Sync::Complete);
    assert_eq!(diagnose(&tracked, at(30.0)).cause, Cause::Unknown);
}
