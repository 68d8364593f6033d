//! Whatever the engine says, in whatever order.

use super::*;

fn handles() -> impl Strategy<Value = Handle> {
    (any::<bool>(), 0..4u64).prop_map(|(is_nixl, number)| if is_nixl { nixl(number << 8) } else { batch(number << 8) })
}

fn statuses() -> impl Strategy<Value = TransferStatus> {
    let failed = prop_oneof![-12..-1i32, 2..7i32].prop_map(|code| TransferStatus::Failed { code });
    prop_oneof![Just(TransferStatus::NotPosted), Just(TransferStatus::InProgress), Just(TransferStatus::Done), failed]
}

fn notifications() -> impl Strategy<Value = Option<Notification>> {
    let any_bytes = (any::<Vec<u8>>(), any::<bool>()).prop_map(|(bytes, cut)| Some(Notification { bytes, cut }));
    prop_oneof![(0..3u64).prop_map(notified), Just(None), any_bytes]
}

/// Events of an engine's calls, without what is on the wire.
fn calls() -> impl Strategy<Value = NativeEvent> {
    let size = proptest::option::of((any::<u64>(), any::<bool>()))
        .prop_map(|size| size.map(|(bytes, estimated)| Size { bytes, estimated }));
    prop_oneof![
        (handles(), any::<u64>(), size, notifications()).prop_map(|(handle, parts, size, notification)| {
            NativeEvent::Made { handle, operation: None, parts, size, notification }
        }),
        (handles(), proptest::option::of(any::<u64>())).prop_map(|(handle, first_length)| {
            let lists = [handle.number.wrapping_add(16), handle.number];
            NativeEvent::Posting { handle, operation: None, first_length, lists }
        }),
        (handles(), statuses(), proptest::option::of(any::<u64>()))
            .prop_map(|(handle, status, moved)| NativeEvent::Status { handle, status, moved }),
        (handles(), statuses()).prop_map(|(handle, status)| NativeEvent::Posted { handle, status }),
        (handles(), proptest::option::of(statuses()))
            .prop_map(|(handle, status)| NativeEvent::Releasing { handle, status }),
        any::<i32>().prop_map(|code| NativeEvent::NotMade { code }),
    ]
}

fn wire() -> impl Strategy<Value = NativeEvent> {
    let request = 0x9000..0x9200u64;
    let flush = prop_oneof![
        Just(Flush::Done),
        any::<i8>().prop_map(|status| Flush::Failed { status }),
        request.clone().prop_map(|request| Flush::UnderWay { request }),
    ];
    prop_oneof![
        (0..4u64, flush, 0..3u64).prop_map(|(list, flush, descriptors)| NativeEvent::RangePosted {
            list: (list << 8) + 16,
            flush,
            descriptors,
            took: Duration::ZERO
        }),
        (request, any::<i8>()).prop_map(|(completion, status)| NativeEvent::Flushed { completion, status }),
    ]
}

/// Whether a handle is in flight, by nothing but what was said of it last.
fn follow(in_flight: &mut HashMap<Handle, bool>, event: &NativeEvent) {
    match event {
        NativeEvent::Made { handle, .. } | NativeEvent::Releasing { handle, .. } => {
            in_flight.remove(handle);
        }
        NativeEvent::Posting { handle, .. } => {
            in_flight.insert(*handle, true);
        }
        NativeEvent::Status { handle, status, .. } => {
            let failed = matches!(status, TransferStatus::Failed { code } if *code != -7);
            let over = *status == TransferStatus::Done || failed && handle.engine == Engine::Nixl;
            in_flight.entry(*handle).and_modify(|it| *it &= !over);
        }
        NativeEvent::Posted { handle, status } => {
            let goes_on = matches!(status, TransferStatus::Failed { code: -7 }) && handle.engine == Engine::Nixl;
            in_flight.entry(*handle).and_modify(|it| *it &= goes_on || !status.is_terminal());
        }
        _ => {}
    }
}

fn is_consistent(transfers: &Transfers, limit: usize) -> Result<(), TestCaseError> {
    let in_flight = transfers.live.values().filter(|it| it.state == TransferState::InFlight).count();
    prop_assert_eq!(under_way(transfers), in_flight);
    prop_assert!(transfers.live.len() <= limit && transfers.abandoned.len() <= limit);
    prop_assert!(transfers.idle.len() <= 3 * limit + 1);
    let unproved: u64 =
        transfers.subjects.values().map(Box::as_ref).chain([&transfers.not_joined]).map(|it| it.unproved).sum();
    let given_up: usize =
        transfers.subjects.values().map(Box::as_ref).chain([&transfers.not_joined]).map(|it| it.given_up.len()).sum();
    prop_assert_eq!(given_up, transfers.abandoned.len());
    prop_assert!(unproved >= transfers.abandoned.len() as u64, "{unproved} of {}", transfers.abandoned.len());
    let is_kept_for_nothing = |subject: &SubjectTransfers| subject.is_over() && subject.failure.is_none();
    prop_assert!(!transfers.subjects.values().map(Box::as_ref).any(is_kept_for_nothing), "no room has senders here");
    Ok(())
}

proptest! {
    #[test]
    fn as_many_are_under_way_as_a_naive_count_says(events in prop::collection::vec(calls(), 0..200)) {
        let (mut transfers, mut in_flight) = (Transfers::new(100), HashMap::new());
        for (now, event) in (1..).zip(&events) {
            prop_assert!(transfers.apply(event, at(now), 1, |_| false));
            follow(&mut in_flight, event);
            prop_assert_eq!(under_way(&transfers), in_flight.values().filter(|it| **it).count(), "after {:?}", event);
            is_consistent(&transfers, 100)?;
        }
    }

    #[test]
    fn whatever_comes_nothing_panics_and_the_numbers_agree(
        events in prop::collection::vec(prop_oneof![3 => calls(), 1 => wire()], 0..200),
        limit in 1..6usize,
        readings in prop::collection::vec((statuses(), proptest::option::of(any::<u64>())), 0..8),
    ) {
        let mut transfers = Transfers::new(limit);
        for (now, event) in (1..).zip(&events) {
            let due = transfers.to_observe(at(now), 10);
            transfers.apply(event, at(now), (now % 3) as u32, |_| false);
            for ((handle, generation), (status, moved)) in due.into_iter().zip(&readings) {
                let seen = Observation { handle, generation, status: *status, moved: *moved };
                transfers.observed(seen, at(now), |_| false);
            }
            is_consistent(&transfers, limit)?;
        }
    }
}
