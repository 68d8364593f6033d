//! Requests that gave their pages back while a transfer of theirs was under way. Times are in seconds.

use super::{cause_world::*, *};
use crate::{
    core::{Core, Effects, Input, Pace},
    event::{
        Backend, Body, ChunkStep, LeaveReason, Phase,
        native::{Engine, Handle, NativeEvent, TransferStatus},
    },
    request::{
        RequestKey, ResyncReason,
        tracker::{Limits, Tracked},
        transfer::Observation,
    },
    rule::{alert::AlertState, load},
};

const REQUEST: RequestKey = RequestKey { process: PROCESS, serial: 1 };

impl World {
    /// Fails the request at this time.
    fn leave(&mut self, seconds: f64, reason: LeaveReason) -> &mut Self {
        let phase = if reason == LeaveReason::Success { Phase::Success } else { Phase::Failed };
        self.see(seconds, Body::Phase { room: ROOM, sender: 1, old: Some(Phase::Transferring), new: Some(phase) });
        self.see(seconds, Body::Leave { room: ROOM, sender: 1, reason })
    }

    fn judged(&self, seconds: f64) -> Option<Tracked<'_>> {
        self.tracker.judged(at(seconds)).find(|tracked| tracked.key == REQUEST)
    }

    fn released(&self, seconds: f64) -> Diagnosis {
        diagnose(&self.judged(seconds).expect("rules see it"), at(seconds))
    }
}

#[test]
fn a_request_that_fails_with_a_transfer_under_way_is_shown_for_a_minute_as_an_unsafe_release() {
    let mut world = World::in_flight();
    world.leave(6.0, LeaveReason::Failed);
    let diagnosis = world.released(6.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::UnsafeRelease, Confidence::High));
    assert_says(&diagnosis, &[Fact::PagesReleased { transfers: 1 }, Fact::TransfersUnderWay { count: 1 }]);
    assert!(matches!(diagnosis.quiescence, Quiescence::InFlight { transfers: 1, .. }), "{diagnosis:?}");
    assert!(world.tracker.get(REQUEST).is_none(), "nothing can be done about it");
    assert_eq!(world.tracker.requests().count(), 0, "it does not live");

    world.status(7.0, 1, TransferStatus::Done);
    let later = world.released(65.9);
    assert_eq!(later.cause, Cause::UnsafeRelease, "what it did stays done");
    assert!(!later.quiescence.is_proved_idle(), "nothing stands on it");
    assert!(world.judged(66.0).is_none());
    assert_eq!(world.tracker.take_counted(PROCESS).unsafe_releases, 1);
}

#[test]
fn a_release_is_not_called_unsafe_unless_a_transfer_of_the_request_was_under_way_when_it_failed() {
    let mut done = World::done();
    done.leave(7.0, LeaveReason::Failed);
    assert!(done.judged(7.0).is_none());

    let mut succeeded = World::in_flight();
    succeeded.leave(6.0, LeaveReason::Success);
    assert!(succeeded.judged(6.0).is_none(), "the server had asked: its end was not seen here yet");

    let mut removed = World::in_flight();
    removed.see(6.0, Body::Leave { room: ROOM, sender: 1, reason: LeaveReason::Removed });
    assert_eq!(removed.released(6.0).cause, Cause::Unknown, "it lives on, with its pages");

    let mut shared = World::in_flight();
    shared.see(5.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    let mut beside = World::in_flight();
    beside.see(5.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    beside.leave(6.0, LeaveReason::Failed);
    assert!(beside.judged(6.0).is_some(), "the other one has sent nothing");
    shared.see(5.5, Body::Send { room: ROOM, sender: 2, pages: 8, last: true });
    shared.leave(6.0, LeaveReason::Failed);
    assert!(shared.judged(6.0).is_none(), "the transfer may be the other one's");

    for mut world in [done, succeeded, removed, shared] {
        assert_eq!(world.tracker.take_counted(PROCESS).unsafe_releases, 0);
    }
}

#[test]
fn a_request_that_another_rank_fails_has_failed_here_too_whatever_its_own_poll_says() {
    let fail = |world: &mut World| {
        world.see(6.0, Body::Failure { room: ROOM, sender: 1 });
        world.see(6.0, Body::Leave { room: ROOM, sender: 1, reason: LeaveReason::Removed });
    };
    let mut world = World::in_flight();
    fail(&mut world);
    let diagnosis = world.released(6.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::UnsafeRelease, Confidence::High));
    assert_eq!(world.tracker.requests().count(), 0, "it does not live");
    let mut done = World::done();
    fail(&mut done);
    assert_eq!((done.judged(7.0).is_none(), done.tracker.requests().count()), (true, 0));
}

#[test]
fn what_a_former_request_of_the_room_left_under_way_is_not_the_next_ones() {
    let mut world = World::in_flight();
    world.leave(6.0, LeaveReason::Failed);
    let (room, sender) = (ROOM, 2);
    world.see(7.0, Body::Open { room, sender, backend: Backend::Nixl });
    world.see(7.0, Body::Enter { room, sender, rid: None, queue_length: 1 });
    let next = RequestKey { process: PROCESS, serial: sender };
    let tracked = world.tracker.get(next).unwrap();
    let diagnosis = diagnose(&tracked, at(60.0));
    assert_eq!(diagnosis.cause, Cause::Unknown, "nothing of it was posted");
    assert!(matches!(diagnosis.quiescence, Quiescence::InFlight { transfers: 1, .. }), "the room is busy all the same");
    world.see(61.0, Body::Phase { room, sender, old: None, new: Some(Phase::Failed) });
    world.see(61.0, Body::Leave { room, sender, reason: LeaveReason::Failed });
    assert!(world.tracker.judged(at(61.0)).all(|it| it.key != next));
}

#[test]
fn of_two_that_fail_on_one_room_the_second_is_not_surely_the_one_that_was_written() {
    let mut world = World::in_flight();
    world.see(5.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    world.see(5.0, Body::Enter { room: ROOM, sender: 2, rid: None, queue_length: 2 });
    world.see(5.0, Body::Send { room: ROOM, sender: 2, pages: 8, last: true });
    world.posted(WORKER, 5.5, 2);
    for sender in [1, 2] {
        world.see(6.0, Body::Phase { room: ROOM, sender, old: None, new: Some(Phase::Failed) });
        world.see(6.0, Body::Leave { room: ROOM, sender, reason: LeaveReason::Failed });
    }
    let released: Vec<_> = world.tracker.judged(at(6.0)).map(|it| (it.key.serial, diagnose(&it, at(6.0)))).collect();
    let [(2, diagnosis)] = &released[..] else { panic!("{released:?}") };
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::UnsafeRelease, Confidence::Low));
}

#[test]
fn a_release_is_called_unsafe_with_low_confidence_where_the_transfers_end_may_have_been_missed() {
    let mut lost = World::in_flight();
    lost.tracker.native_lost(PROCESS, at(5.0));
    let mut unwatched = World::in_flight();
    unwatched.tracker.watch(PROCESS, None, at(5.0));
    let mut in_doubt = World::in_flight();
    in_doubt.tracker.needs_resync(PROCESS.pid, ResyncReason::EventsLost);
    for mut world in [lost, unwatched, in_doubt] {
        let diagnosis = world.leave(6.0, LeaveReason::Failed).released(7.0);
        assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::UnsafeRelease, Confidence::Low));
    }
    let mut later = World::in_flight();
    later.leave(6.0, LeaveReason::Failed);
    later.tracker.native_lost(PROCESS, at(7.0));
    assert_eq!(later.released(8.0).confidence, Confidence::High, "what is lost afterwards takes nothing back");
}

#[test]
fn a_room_that_is_used_again_says_of_both_requests_what_is_true_of_each() {
    let mut world = World::in_flight();
    world.leave(6.0, LeaveReason::Failed);
    world.see(7.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    assert_eq!(world.released(8.0).cause, Cause::UnsafeRelease);
    let next = world.tracker.judged(at(8.0)).find(|tracked| tracked.key.serial == 2).unwrap();
    assert_eq!(diagnose(&next, at(8.0)).cause, Cause::Unknown);
    world.see(9.0, Body::Open { room: OTHER, sender: 1, backend: Backend::Nixl });
    assert_eq!(world.tracker.judged(at(9.0)).filter(|it| it.key == REQUEST).count(), 1, "the serial is another's now");
}

/// A request in the queue whose Mooncake batch was submitted at 4.
fn batch_in_flight() -> World {
    let mut world = World::queued();
    world.tracker.watch(PROCESS, Some(Engine::Mooncake), at(0.0));
    world.chunk(WORKER, 2.0, ROOM, ChunkStep::Begun, (0, 1)).posted_unseen(WORKER, 4.0, BATCH, 0);
    world
}

const BATCH: Handle = Handle { engine: Engine::Mooncake, number: 0x7000 };

/// The batch, or a handle, is read in the server's memory.
fn read(world: &mut World, seconds: f64, handle: Handle, status: TransferStatus) {
    let seen = Observation { handle, generation: 1, status, moved: None };
    world.tracker.observed(PROCESS, seen, at(seconds));
}

fn freed(world: &mut World, seconds: f64, status: TransferStatus) {
    world.native(WORKER, seconds, NativeEvent::Releasing { handle: BATCH, status: Some(status) });
}

#[test]
fn a_batch_that_is_freed_after_the_release_may_have_been_over_before_and_nobody_is_woken() {
    let mut world = batch_in_flight();
    read(&mut world, 5.9, BATCH, TransferStatus::InProgress);
    world.leave(6.0, LeaveReason::Failed);
    let released = world.released(6.0);
    assert_eq!((released.cause, released.confidence), (Cause::UnsafeRelease, Confidence::Low));
    assert_says(&released, &[Fact::EndNotSeenByRelease { transfers: 1 }]);
    let due = world.tracker.transfers(PROCESS).unwrap().to_observe(at(0.0), 1);
    assert_eq!(due, [(BATCH, 1)], "it is read at once, however young");
    freed(&mut world, 6.001, TransferStatus::Done);
    for seconds in [6.2, 65.9] {
        read(&mut world, seconds, BATCH, TransferStatus::InProgress);
        assert_eq!(world.released(seconds).confidence, Confidence::Low, "somebody else's memory by now");
    }
    assert_eq!(world.tracker.take_counted(PROCESS).unsafe_releases, 0);
}

#[test]
fn a_batch_that_runs_on_after_the_release_proves_that_it_was_unsafe() {
    let mut world = batch_in_flight();
    world.leave(6.0, LeaveReason::Failed);
    read(&mut world, 5.99, BATCH, TransferStatus::InProgress);
    assert_eq!(world.released(6.1).confidence, Confidence::Low, "that was before");
    read(&mut world, 6.2, BATCH, TransferStatus::InProgress);
    read(&mut world, 6.4, BATCH, TransferStatus::InProgress);
    let released = world.released(6.4);
    assert_eq!((released.cause, released.confidence), (Cause::UnsafeRelease, Confidence::High));
    assert_says(&released, &[Fact::PagesReleased { transfers: 1 }, Fact::RanOn]);
    freed(&mut world, 7.0, TransferStatus::Done);
    assert_eq!(world.released(66.1).confidence, Confidence::High, "what it did stays done");
    assert!(world.judged(66.2).is_none(), "a minute after it was known");
    assert_eq!(world.tracker.take_counted(PROCESS).unsafe_releases, 1);
}

#[test]
fn what_the_server_gave_up_before_it_failed_the_request_is_under_way_all_the_same() {
    // MC_TRANSFER_TIMEOUT: the batch is not freed, SGLang fails the request.
    let mut timed_out = batch_in_flight();
    freed(&mut timed_out, 5.5, TransferStatus::InProgress);
    timed_out.leave(6.0, LeaveReason::Failed);
    assert_eq!(timed_out.released(6.0).confidence, Confidence::Low);
    read(&mut timed_out, 6.2, BATCH, TransferStatus::InProgress);
    assert_eq!(timed_out.released(6.2).confidence, Confidence::High);

    let mut over_by_then = batch_in_flight();
    freed(&mut over_by_then, 5.5, TransferStatus::InProgress);
    read(&mut over_by_then, 5.8, BATCH, TransferStatus::Done);
    over_by_then.leave(6.0, LeaveReason::Failed);
    assert!(over_by_then.judged(6.0).is_none());

    let given_up = NativeEvent::Releasing { handle: nixl(1), status: Some(TransferStatus::InProgress) };
    let mut on_nixl = World::in_flight();
    on_nixl.native(WORKER, 5.5, given_up.clone()).leave(6.0, LeaveReason::Failed);
    assert_eq!(on_nixl.released(6.0).confidence, Confidence::High, "its flush is out");

    let mut flushed = World::in_flight();
    flushed.native(WORKER, 5.5, given_up).native(WORKER, 5.8, NativeEvent::Flushed { completion: 0x8080, status: 0 });
    flushed.leave(6.0, LeaveReason::Failed);
    assert!(flushed.judged(6.0).is_none());
}

#[test]
fn a_nixl_transfer_whose_flushes_are_not_seen_proves_nothing_by_a_status_that_nobody_asked_for() {
    let mut world = World::queued();
    world.chunk(WORKER, 2.0, ROOM, ChunkStep::Begun, (0, 1)).posted_unseen(WORKER, 4.0, nixl(1), 0);
    world.leave(6.0, LeaveReason::Failed);
    read(&mut world, 6.2, nixl(1), TransferStatus::InProgress);
    let released = world.released(6.2);
    assert_eq!((released.cause, released.confidence), (Cause::UnsafeRelease, Confidence::Low));
}

#[test]
fn a_reading_proves_nothing_of_a_request_whose_batch_may_be_another_ones() {
    let mut world = batch_in_flight();
    world.see(3.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Mooncake });
    world.see(5.0, Body::Send { room: ROOM, sender: 2, pages: 8, last: true });
    for sender in [1, 2] {
        world.see(6.0, Body::Phase { room: ROOM, sender, old: None, new: Some(Phase::Failed) });
        world.see(6.0, Body::Enter { room: ROOM, sender, rid: None, queue_length: 2 });
        world.see(6.0, Body::Leave { room: ROOM, sender, reason: LeaveReason::Failed });
    }
    read(&mut world, 6.2, BATCH, TransferStatus::InProgress);
    let judged = world.tracker.judged(at(6.2)).map(|it| (it.key.serial, diagnose(&it, at(6.2)).confidence));
    assert_eq!(judged.collect::<Vec<_>>(), [(2, Confidence::Low)]);
}

/// A core that has been told what a request's server did until it left the queue at 6, its transfers seen from 0 on, and until
/// `watched_until`.
fn core_of_unsafe_release(watched_until: f64) -> Core {
    let mut core = Core::new(load::defaults().unwrap(), Limits { requests: 10, transfers: 10 });
    let mut world = World::in_flight();
    world.leave(6.0, LeaveReason::Failed);
    let mut tell = |input| core.apply(input, &mut Effects::default());
    let (process, why) = (PROCESS, ResyncReason::Attached);
    tell(Input::Attach { process, identity: Box::default(), clock_offset: 0 });
    tell(Input::Watch { process, engine: Some(Engine::Nixl), at: at(0.0) });
    tell(Input::Asked { process, epoch: EPOCH, why, at: at(0.0) });
    let (before, after): (Vec<_>, Vec<_>) = world.events.into_iter().partition(|event| event.at < at(watched_until));
    before.into_iter().for_each(|event| tell(Input::Event(event)));
    tell(Input::Watch { process, engine: None, at: at(watched_until) });
    after.into_iter().for_each(|event| tell(Input::Event(event)));
    core
}

/// The alerts that change in a tick: rule, state, severity.
fn tick(core: &mut Core, seconds: f64) -> Vec<(String, AlertState, &'static str)> {
    let mut effects = Effects::default();
    core.apply(Input::Tick { now: at(seconds), pace: Pace::As(None) }, &mut effects);
    effects.verdicts.iter().map(|it| (it.rule.to_string(), it.state, it.severity.name())).collect()
}

#[test]
fn an_unsafe_release_fires_at_once_ends_after_a_minute_and_counts_as_no_stuck_request() {
    let mut core = core_of_unsafe_release(7.0);
    let alert = |state| [("UnsafeRelease".to_owned(), state, "critical")];
    assert_eq!(tick(&mut core, 6.2), alert(AlertState::Firing));
    assert_eq!((tick(&mut core, 60.0), core.stuck_by_cause().len()), (Vec::new(), 0));
    assert_eq!(tick(&mut core, 66.2), alert(AlertState::Resolved));
}

#[test]
fn nobody_is_woken_by_a_release_that_may_have_been_safe() {
    assert_eq!(tick(&mut core_of_unsafe_release(5.0), 6.2), []);
}
