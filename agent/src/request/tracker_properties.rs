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
