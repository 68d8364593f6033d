//! Whatever events come, in whatever order.

use proptest::prelude::*;

use super::*;

fn any_body() -> impl Strategy<Value = Body> {
    let sender = 1..6_u64;
    prop_oneof![
        sender.clone().prop_map(open),
        sender.clone().prop_map(|sender| Body::Close { room: ROOM, sender }),
        (sender.clone(), 0..5_usize).prop_map(|(sender, new)| phase(sender, None, Phase::ALL[new])),
        sender.clone().prop_map(enter),
        sender.clone().prop_map(send),
        sender.clone().prop_map(abort),
        sender.clone().prop_map(clear),
        sender.clone().prop_map(|sender| Body::Failure { room: ROOM, sender }),
        sender.clone().prop_map(|sender| leave(sender, LeaveReason::Failed)),
        sender.clone().prop_map(|sender| leave(sender, LeaveReason::Removed)),
        (0..3_u16, 0..3_u16).prop_map(|(queued, working)| chunk(ChunkStep::Queued, queued, working)),
        Just(dropped()),
        (0..4_u32).prop_map(pass),
        Just(Body::StateBegin { epoch: EPOCH }),
        (sender, Just(pinned_entry())).prop_map(|(sender, entry)| Body::Entry {
            room: ROOM,
            sender,
            epoch: EPOCH,
            entry: Box::new(entry)
        }),
        (0..4_u64).prop_map(|entries| Body::StateEnd { epoch: EPOCH, entries }),
    ]
}

/// An event, or the hook is asked for its state.
fn any_step() -> impl Strategy<Value = Option<Body>> {
    prop_oneof![8 => any_body().prop_map(Some), 1 => Just(None)]
}

impl World {
    fn step(&mut self, step: Option<Body>) {
        match step {
            Some(body) => self.see(body),
            None => self.tracker.asked(PROCESS, EPOCH, ResyncReason::EventsLost, Monotonic(self.time)),
        }
    }

    /// The requests whose diagnoses are believed.
    fn confident(&self) -> Vec<u64> {
        let now = Monotonic(self.time);
        let believed = |tracked: &Tracked<'_>| diagnose(tracked, now).confidence == Confidence::High;
        self.tracker.requests().filter(believed).map(|tracked| tracked.key.serial).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn events_that_come_twice_never_raise_confidence(
        steps in prop::collection::vec((any_step(), any::<bool>()), 0..80)
    ) {
        let (mut once, mut twice) = (World::synchronised(), World::synchronised());
        for (step, again) in steps {
            once.step(step.clone());
            if again && step.is_some() {
                twice.step(step.clone());
            }
            twice.step(step);
            let confident = once.confident();
            prop_assert!(twice.confident().iter().all(|serial| confident.contains(serial)));
        }
    }

    #[test]
    fn after_a_loss_nothing_is_believed_before_the_hook_was_asked(
        before in prop::collection::vec(any_step(), 0..40),
        after in prop::collection::vec(any_body(), 0..40),
    ) {
        let mut world = World::synchronised();
        before.into_iter().for_each(|step| world.step(step));
        world.tracker.needs_resync(PROCESS.pid, ResyncReason::EventsLost);
        for body in after {
            world.see(body);
            prop_assert_eq!(world.confident(), Vec::<u64>::new());
        }
    }

    /// What is believed after an answer was complete: each sender that the hook told of is known, and no other one.
    #[test]
    fn an_answer_with_entries_lost_or_doubled_is_not_believed(
        senders in prop::collection::btree_set(1..9_u64, 1..6),
        copies in prop::collection::vec(0..3_usize, 6),
        begins in 1..3_usize,
    ) {
        let mut world = World::synchronised();
        world.tracker.asked(PROCESS, EPOCH, ResyncReason::Attached, Monotonic(world.time));
        world.see_all(vec![Body::StateBegin { epoch: EPOCH }; begins]);
        for (sender, copies) in senders.iter().zip(&copies) {
            let entry = || Box::new(pinned_entry());
            world.see_all((0..*copies).map(|_| Body::Entry { room: ROOM, sender: *sender, epoch: EPOCH, entry: entry() }));
        }
        world.see(Body::StateEnd { epoch: EPOCH, entries: senders.len() as u64 });
        let all_came = copies.iter().take(senders.len()).all(|copies| *copies > 0);
        prop_assert_eq!(world.sync() == Sync::Complete, all_came, "{:?}", world.sync());
    }
}

proptest! {
    /// Whatever a hostile server makes its hook say: no panic, and the books balance.
    #[test]
    fn any_order_of_events_keeps_the_books(bodies in prop::collection::vec(any_body(), 0..200)) {
        let mut world = World::synchronised();
        world.tracker.asked(PROCESS, EPOCH, ResyncReason::EventsLost, Monotonic(world.time));
        world.see_all(bodies);
        let known: Vec<_> = world.tracker.requests().map(|tracked| tracked.key.serial).collect();
        for tracked in world.tracker.requests() {
            prop_assert!(tracked.room.senders.contains(&tracked.key.serial), "each request is on its room");
            prop_assert!(tracked.room.senders.iter().all(|serial| known.contains(serial)), "no room has a ghost");
            diagnose(&tracked, Monotonic(u64::MAX));
        }
        // The count of the queue is the requests in it: otherwise a right `pass` would look wrong for ever.
        let inflight = world.tracker.requests().filter(|tracked| tracked.request.is_inflight()).count() as u32;
        world.resynchronise(&[]);
        prop_assert_eq!(world.tracker.requests().count(), 0);
        world.see_all([pass(0), pass(0), pass(0)]);
        prop_assert_eq!(world.sync(), Sync::Complete, "{} were in flight", inflight);
    }
}
