use super::*;
use crate::{
    diagnose::{Cause, Confidence, NotKnown, Quiescence, diagnose},
    event::{Backend, Body, ChunkCounts, ChunkStep, Entry, Rid, Room},
    request::Sync,
};

const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
const ROOM: Room = Room::Number(77);
const EPOCH: u64 = 5;
const MILLISECOND: u64 = 1_000_000;

fn limits(requests: usize) -> Limits {
    Limits { requests, transfers: 1000 }
}

/// Workers hold so many chunks; of transfers nothing is known.
fn at_work(chunks: u32) -> Quiescence {
    Quiescence::InFlight { chunks, transfers: 0, oldest: None }
}

/// A tracker, a clock that goes on a millisecond with each event, and what has changed.
struct World {
    tracker: Tracker,
    time: u64,
    changes: Vec<Change>,
}

impl World {
    /// A server that has just been attached to and is completely known: it has no request.
    fn synchronised() -> Self {
        let mut world = Self { tracker: Tracker::new(limits(1000)), time: MILLISECOND, changes: Vec::new() };
        world.tracker.attach(PROCESS, 0);
        world.resynchronise(&[]);
        assert_eq!(world.sync(), Sync::Complete);
        world
    }

    fn see(&mut self, body: Body) {
        self.time += MILLISECOND;
        let event = Event { pid: 7, tid: 7, at: Monotonic(self.time), sequence: 1, detail_lost: false, body };
        self.tracker.apply(&event, &mut self.changes);
    }

    fn see_all(&mut self, bodies: impl IntoIterator<Item = Body>) {
        bodies.into_iter().for_each(|body| self.see(body));
    }

    fn resynchronise(&mut self, entries: &[(u64, Entry)]) {
        self.tracker.asked(PROCESS, EPOCH, ResyncReason::Attached, Monotonic(self.time));
        self.see(Body::StateBegin { epoch: EPOCH });
        for (sender, entry) in entries {
            self.see(Body::Entry { room: ROOM, sender: *sender, epoch: EPOCH, entry: Box::new(entry.clone()) });
        }
        self.see(Body::StateEnd { epoch: EPOCH, entries: entries.len() as u64 });
    }

    fn sync(&self) -> Sync {
        self.tracker.server(PROCESS).unwrap().sync
    }

    fn request(&self, serial: u64) -> Option<Tracked<'_>> {
        self.tracker.get(RequestKey { process: PROCESS, serial })
    }

    /// The cause and quiescence of a request, `later` milliseconds on.
    fn diagnosis(&self, serial: u64, later: u64) -> (Cause, Quiescence, Confidence) {
        let tracked = self.request(serial).expect("the request is tracked");
        let now = Monotonic(self.time + later * MILLISECOND);
        let diagnosis = diagnose(&tracked, now);
        (diagnosis.cause, diagnosis.quiescence, diagnosis.confidence)
    }
}

fn open(sender: u64) -> Body {
    Body::Open { room: ROOM, sender, backend: Backend::Nixl }
}

fn phase(sender: u64, old: Option<Phase>, new: Phase) -> Body {
    Body::Phase { room: ROOM, sender, old, new: Some(new) }
}

fn enter(sender: u64) -> Body {
    let rid = Some(Rid { text: format!("rid-{sender}"), truncated: false });
    Body::Enter { room: ROOM, sender, rid, queue_length: 1 }
}

fn send(sender: u64) -> Body {
    Body::Send { room: ROOM, sender, pages: 8, last: true }
}

fn chunk(step: ChunkStep, queued: u16, working: u16) -> Body {
    Body::Chunk { room: ROOM, step, counts: ChunkCounts { queued, working, ..ChunkCounts::default() }, queue: None }
}

fn clear(sender: u64) -> Body {
    Body::Clear { room: ROOM, sender, removed: true }
}

fn leave(sender: u64, reason: LeaveReason) -> Body {
    Body::Leave { room: ROOM, sender, reason }
}

fn pass(queue_length: u32) -> Body {
    Body::Pass { queue_length, passes: 50 }
}

fn dropped() -> Body {
    Body::Update { room: ROOM, requested: Some(Phase::Failed), before: None, after: None }
}

fn abort(sender: u64) -> Body {
    Body::Abort { room: ROOM, sender, room_present: false }
}

/// A request on its way into the queue, sent and transferred.
fn healthy(sender: u64) -> Vec<Body> {
    vec![
        open(sender),
        phase(sender, None, Phase::Bootstrapping),
        phase(sender, Some(Phase::Bootstrapping), Phase::WaitingForInput),
        send(sender),
        chunk(ChunkStep::Queued, 1, 0),
        enter(sender),
        chunk(ChunkStep::Begun, 0, 1),
        phase(sender, Some(Phase::WaitingForInput), Phase::Transferring),
        chunk(ChunkStep::Ended, 0, 0),
        phase(sender, Some(Phase::Transferring), Phase::Success),
        clear(sender),
        leave(sender, LeaveReason::Success),
    ]
}

/// Two requests on one room: the second waits, the first ends and clears it (SGLang 0.5.12 to 0.5.22).
fn collision() -> Vec<Body> {
    let waiting =
        [open(2), phase(2, None, Phase::Bootstrapping), phase(2, Some(Phase::Bootstrapping), Phase::WaitingForInput)];
    let mut story = healthy(1);
    story.splice(3..3, waiting);
    story.extend([send(2), enter(2)]);
    story
}

fn pinned_entry() -> Entry {
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
        shared_with: Some(1),
        cleared_by: Some(1),
        chunks: ChunkCounts::default(),
        rid: Some(Rid { text: "rid-2".into(), truncated: false }),
    }
}

#[test]
fn a_healthy_request_comes_and_goes_without_a_trace() {
    let mut world = World::synchronised();
    world.see_all(healthy(1));
    assert!(world.request(1).is_none());
    assert_eq!(world.tracker.requests().count(), 0);
    let last = world.changes.last().unwrap();
    assert_eq!(last.step, Step::Left(LeaveReason::Success));
    assert_eq!(last.ended.as_ref().unwrap().rid.as_ref().unwrap().text, "rid-1");
    world.see(pass(0));
    assert_eq!(world.sync(), Sync::Complete);
}

#[test]
fn a_chunk_makes_its_room_queued_then_in_flight_then_quiescent() {
    let mut world = World::synchronised();
    let story = healthy(1);
    world.see_all(story[..6].iter().cloned());
    assert_eq!(world.diagnosis(1, 0).1, Quiescence::Queued { chunks: 1 });
    world.see_all(story[6..8].iter().cloned());
    assert_eq!(world.diagnosis(1, 0).1, at_work(1));
    world.see(story[8].clone());
    assert!(matches!(world.diagnosis(1, 0).1, Quiescence::Quiescent { since: Some(_) }));
}

#[test]
fn the_second_request_of_a_cleared_room_is_a_room_collision_and_quiescent() {
    let mut world = World::synchronised();
    world.see_all(collision());
    let (cause, quiescence, confidence) = world.diagnosis(2, 0);
    assert_eq!((cause, confidence), (Cause::RoomCollision, Confidence::High));
    assert!(quiescence.is_proved_idle(), "{quiescence}");
}

#[test]
fn while_both_live_the_room_is_shared_and_nothing_is_proved() {
    let mut world = World::synchronised();
    world.see_all(collision().into_iter().take(12));
    assert_eq!(world.diagnosis(2, 0).1, Quiescence::Unknown { why: NotKnown::RoomShared });
    assert_eq!(world.request(2).unwrap().request.shared_with, Some(1));
    assert_eq!(world.request(1).unwrap().request.shared_with, Some(2));
}

#[test]
fn a_room_that_is_registered_again_is_no_collision() {
    let mut world = World::synchronised();
    world.see_all(collision());
    let again = Some(Phase::Bootstrapping);
    world.see(Body::Update { room: ROOM, requested: again, before: None, after: again });
    assert_eq!(world.diagnosis(2, 0).0, Cause::Unknown);
}

#[test]
fn a_room_that_is_registered_again_while_events_are_lost_is_no_collision() {
    let mut world = World::synchronised();
    world.see_all([open(1), phase(1, None, Phase::WaitingForInput), open(2), dropped()]);
    assert_eq!(world.diagnosis(1, 0).0, Cause::RoomCollision);
    let registered = |serial: u64| Entry { shared_with: Some(3 - serial), cleared_by: None, ..pinned_entry() };
    world.tracker.asked(PROCESS, EPOCH, ResyncReason::EventsLost, Monotonic(world.time));
    world.see(Body::StateBegin { epoch: EPOCH });
    for sender in [1, 2] {
        world.see(Body::Entry { room: ROOM, sender, epoch: EPOCH, entry: Box::new(registered(sender)) });
    }
    world.see(Body::StateEnd { epoch: EPOCH, entries: 2 });
    assert_eq!((world.sync(), world.diagnosis(1, 0).0), (Sync::Complete, Cause::Unknown));
}

#[test]
fn an_update_that_is_dropped_without_a_collision_is_named_so() {
    let mut world = World::synchronised();
    world.see_all([open(1), phase(1, None, Phase::WaitingForInput), send(1), enter(1), abort(1), dropped()]);
    assert_eq!(world.diagnosis(1, 0).0, Cause::UpdateDropped);
}

#[test]
fn an_abort_is_ignored_only_after_a_second_and_several_passes() {
    let mut world = World::synchronised();
    world.see_all([open(1), phase(1, None, Phase::Transferring), send(1), enter(1), abort(1)]);
    assert_eq!(world.diagnosis(1, 5_000).0, Cause::Unknown, "no pass was seen");
    world.see(pass(1));
    assert_eq!(world.diagnosis(1, 500).0, Cause::Unknown, "half a second is not long");
    assert_eq!(world.diagnosis(1, 1_500).0, Cause::AbortIgnored);
    world.see(phase(1, Some(Phase::Transferring), Phase::Failed));
    assert_eq!(world.diagnosis(1, 1_500).0, Cause::Unknown, "it was read");
}

#[test]
fn in_the_queue_with_nothing_sent_is_parked_and_never_posted() {
    let mut world = World::synchronised();
    world.see_all([open(1), phase(1, None, Phase::WaitingForInput), enter(1)]);
    let (cause, quiescence, _) = world.diagnosis(1, 0);
    assert_eq!((cause, quiescence), (Cause::Parked, Quiescence::NeverPosted));
}

#[test]
fn a_request_that_no_decode_registers_never_bootstrapped() {
    let mut world = World::synchronised();
    world.see_all([open(1), phase(1, None, Phase::Bootstrapping)]);
    assert_eq!(world.diagnosis(1, 0).0, Cause::NeverBootstrapped);
}

#[test]
fn abandoned_handles_outlive_the_request_and_spoil_the_room_for_the_next_one() {
    let mut world = World::synchronised();
    let abandoned = ChunkCounts { abandoned: true, ..ChunkCounts::default() };
    world.see_all([open(1), send(1), enter(1)]);
    world.see(Body::Chunk { room: ROOM, step: ChunkStep::Ended, counts: abandoned, queue: None });
    let unknown = Quiescence::Unknown { why: NotKnown::AbandonedHandles };
    assert_eq!(world.diagnosis(1, 0).1, unknown);
    world.see_all([leave(1, LeaveReason::Failed), open(2), enter(2)]);
    assert_eq!(world.diagnosis(2, 0).1, unknown);
}

#[test]
fn without_a_resynchronisation_a_request_pinned_before_is_not_known() {
    let mut world = World { tracker: Tracker::new(limits(9)), time: 1, changes: Vec::new() };
    world.tracker.attach(PROCESS, 0);
    world.see_all([pass(1), pass(1), abort(2), dropped()]);
    assert!(world.request(2).is_none());
    assert_eq!(world.sync(), Sync::Needed(ResyncReason::Attached));
}

#[test]
fn a_resynchronisation_tells_of_a_request_pinned_before() {
    let mut world = World::synchronised();
    world.resynchronise(&[(2, pinned_entry())]);
    let tracked = world.request(2).unwrap();
    assert_eq!(tracked.request.entered, Some(Monotonic(20)), "its clock began where the waiting did");
    assert_eq!(world.diagnosis(2, 0).0, Cause::RoomCollision);
    world.see(pass(1));
    assert_eq!(world.sync(), Sync::Complete);
}

#[test]
fn times_of_a_server_in_a_time_namespace_are_shifted() {
    let mut world = World::synchronised();
    world.tracker.attach(PROCESS, 4);
    world.resynchronise(&[(2, pinned_entry())]);
    assert_eq!(world.request(2).unwrap().request.entered, Some(Monotonic(16)));
}

#[test]
fn a_resynchronisation_forgets_what_is_gone_and_keeps_what_came_meanwhile() {
    let mut world = World::synchronised();
    world.see_all([open(1), open(2)]);
    world.tracker.asked(PROCESS, EPOCH, ResyncReason::EventsLost, Monotonic(world.time));
    world.see(Body::StateBegin { epoch: EPOCH });
    let entry = Box::new(pinned_entry());
    world.see(Body::Entry { room: ROOM, sender: 2, epoch: EPOCH, entry });
    world.see(open(3));
    world.see(Body::StateEnd { epoch: EPOCH, entries: 1 });
    assert!(world.request(1).is_none() && world.request(2).is_some() && world.request(3).is_some());
}

#[test]
fn entries_that_are_missing_make_the_resynchronisation_start_again() {
    let mut world = World::synchronised();
    world.tracker.asked(PROCESS, EPOCH, ResyncReason::EventsLost, Monotonic(world.time));
    world.see_all([Body::StateBegin { epoch: EPOCH }, Body::StateEnd { epoch: EPOCH, entries: 1 }]);
    assert_eq!(world.sync(), Sync::Needed(ResyncReason::EntriesMissing));
}

#[test]
fn the_entries_of_another_agents_question_are_not_taken() {
    let mut world = World::synchronised();
    world.tracker.asked(PROCESS, EPOCH, ResyncReason::EventsLost, Monotonic(world.time));
    world.see_all([Body::StateBegin { epoch: 4 }, Body::StateEnd { epoch: 4, entries: 0 }]);
    assert!(matches!(world.sync(), Sync::Asked { epoch: EPOCH, .. }));
}

#[test]
fn a_queue_length_that_stays_wrong_asks_for_a_resynchronisation() {
    let mut world = World::synchronised();
    world.see(pass(1));
    assert_eq!(world.sync(), Sync::Complete, "once may be a mark on its way");
    world.see(pass(1));
    assert_eq!(world.sync(), Sync::Needed(ResyncReason::QueueLengthDiffers));
}

#[test]
fn a_sender_whose_opening_was_missed_asks_for_a_resynchronisation() {
    let mut world = World::synchronised();
    world.see(enter(9));
    assert_eq!(world.sync(), Sync::Needed(ResyncReason::UnknownSender));
    assert_eq!(world.tracker.unused().unknown_sender, 1);
}

#[test]
fn a_lost_event_lowers_confidence_and_hides_quiescence_but_never_hides_work() {
    let mut world = World::synchronised();
    world.see_all(collision());
    world.tracker.needs_resync(7, ResyncReason::EventsLost);
    let (_, quiescence, confidence) = world.diagnosis(2, 0);
    assert_eq!(confidence, Confidence::Low);
    assert_eq!(quiescence, Quiescence::Unknown { why: NotKnown::NotSynchronised });
    world.see(chunk(ChunkStep::Begun, 0, 1));
    assert_eq!(world.diagnosis(2, 0).1, at_work(1));
}

#[test]
fn a_question_without_an_answer_is_asked_again() {
    let mut world = World::synchronised();
    let patience = Duration::from_secs(5);
    world.tracker.asked(PROCESS, EPOCH, ResyncReason::EventsLost, Monotonic(0));
    assert!(world.tracker.to_ask(Monotonic(4_999 * MILLISECOND), patience).is_empty());
    let again = world.tracker.to_ask(Monotonic(5_000 * MILLISECOND), patience);
    assert_eq!(again, [(PROCESS, ResyncReason::EventsLost)]);
}

#[test]
fn a_server_that_ends_takes_its_requests_along_but_not_those_of_the_next_with_its_pid() {
    let mut world = World::synchronised();
    world.see_all([open(1), enter(1)]);
    world.tracker.detach(ProcessKey { pid: 7, start: 2 }, Parting::Ended, Monotonic(1), &mut world.changes);
    assert!(world.request(1).is_some(), "another process");
    world.tracker.detach(PROCESS, Parting::Ended, Monotonic(1), &mut world.changes);
    assert!(world.request(1).is_none());
    assert!(world.changes.last().unwrap().ended.is_some());
    world.see(open(2));
    assert_eq!(world.tracker.unused().unknown_process, 1);
}

#[test]
fn too_many_requests_retire_the_oldest_and_count_it() {
    let mut world = World::synchronised();
    world.tracker = Tracker::new(limits(2));
    world.tracker.attach(PROCESS, 0);
    world.see_all([open(1), open(2), open(3)]);
    assert!(world.request(1).is_none() && world.request(3).is_some());
    assert_eq!(world.tracker.unused().retired, 1);
}

#[path = "tracker_properties.rs"]
mod properties;
