mod properties;

use std::{collections::HashMap, time::Duration};

use proptest::prelude::*;

use super::*;
use crate::{
    event::native::{Flush, Notification, Operation, Size},
    request::correlate::Joined,
};

const ROOM: Room = Room::Number(77);
const LISTS: [u64; 2] = [0x110, 0x900];

fn at(milliseconds: u64) -> Monotonic {
    Monotonic(milliseconds * 1_000_000)
}

fn nixl(number: u64) -> Handle {
    Handle { engine: Engine::Nixl, number }
}

fn batch(number: u64) -> Handle {
    Handle { engine: Engine::Mooncake, number }
}

fn notified(room: u64) -> Option<Notification> {
    Some(Notification { bytes: format!("{room}_kv_0_1").into_bytes(), cut: false })
}

fn made(handle: Handle) -> NativeEvent {
    let size = Some(Size { bytes: 10, estimated: false });
    let notification = if handle.engine == Engine::Nixl { notified(77) } else { None };
    NativeEvent::Made { handle, operation: Some(Operation::Write), parts: 2, size, notification }
}

fn posting(handle: Handle) -> NativeEvent {
    NativeEvent::Posting { handle, operation: None, first_length: None, lists: LISTS }
}

fn releasing(handle: Handle, status: TransferStatus) -> NativeEvent {
    NativeEvent::Releasing { handle, status: Some(status) }
}

fn polled(handle: Handle, status: TransferStatus) -> NativeEvent {
    NativeEvent::Status { handle, status, moved: None }
}

/// Both descriptors, with one flush behind them.
fn range() -> NativeEvent {
    let (flush, took) = (Flush::UnderWay { request: 0x9080 }, Duration::ZERO);
    NativeEvent::RangePosted { list: LISTS[0], flush, descriptors: 2, took }
}

fn flushed() -> NativeEvent {
    NativeEvent::Flushed { completion: 0x9000, status: 0 }
}

/// Applies events a millisecond apart, from `from` on; no room has a sender. Whether everything was kept.
fn apply(transfers: &mut Transfers, from: u64, events: &[NativeEvent]) -> bool {
    events.iter().zip(from..).fold(true, |kept, (event, now)| transfers.apply(event, at(now), 1, |_| false) && kept)
}

fn after(events: &[NativeEvent]) -> Transfers {
    let mut transfers = Transfers::new(100);
    assert!(apply(&mut transfers, 1, events));
    transfers
}

fn ended(transfers: &Transfers, engine: Engine, end: &'static str) -> u64 {
    transfers.counted.ended.get(&(engine, end)).map_or(0, |(count, _)| *count)
}

fn under_way(transfers: &Transfers) -> usize {
    let all = transfers.subjects.values().map(Box::as_ref).chain([&transfers.not_joined]);
    all.filter_map(SubjectTransfers::under_way).map(|(count, _)| count).sum()
}

fn observation(transfers: &Transfers, handle: Handle, status: TransferStatus) -> Observation {
    let due = transfers.to_observe(at(u64::MAX / 1_000_000), 10);
    let (handle, generation) = *due.iter().find(|(it, _)| *it == handle).unwrap();
    Observation { handle, generation, status, moved: None }
}

#[test]
fn a_handle_that_is_made_again_is_another_transfer_and_the_former_was_released_unseen() {
    let handle = nixl(0x100);
    let transfers = after(&[made(handle), posting(handle), made(handle)]);
    let now = transfers.live[&handle].clone();
    assert_eq!((now.generation, now.state), (2, TransferState::Made));
    assert_eq!(ended(&transfers, Engine::Nixl, "not_seen"), 1);
    let room = transfers.of_room(ROOM).unwrap();
    assert_eq!((room.under_way(), room.unproved, room.is_over()), (None, 1, false));
}

#[test]
fn a_transfer_that_is_posted_again_is_counted_each_time_and_under_way_again() {
    let handle = nixl(0x100);
    let once = [posting(handle), polled(handle, TransferStatus::Done)];
    let mut transfers = after(&[&[made(handle)], &once[..], &once[..]].concat());
    assert_eq!(ended(&transfers, Engine::Nixl, "done"), 2);
    apply(&mut transfers, 20, &[posting(handle)]);
    assert_eq!(transfers.of_room(ROOM).unwrap().under_way(), Some((1, at(20))));
}

#[test]
fn what_was_read_in_memory_before_a_transfer_was_posted_again_is_not_believed_of_it() {
    let handle = nixl(0x100);
    let mut transfers = after(&[made(handle), posting(handle)]);
    let seen = observation(&transfers, handle, TransferStatus::Done);
    apply(&mut transfers, 10, &[polled(handle, TransferStatus::Done), posting(handle)]);
    transfers.observed(seen, at(12), |_| false);
    assert_eq!(transfers.live[&handle].state, TransferState::InFlight);
    transfers.observed(observation(&transfers, handle, TransferStatus::Done), at(13), |_| false);
    assert_eq!(transfers.live[&handle].state, TransferState::Ended(TransferEnd::Done), "the twin");
}

#[test]
fn what_was_read_in_memory_of_a_nixl_handle_is_not_believed_of_one_that_was_released_meanwhile() {
    let (handle, released) = (nixl(0x100), releasing(nixl(0x100), TransferStatus::InProgress));
    let mut transfers = after(&[made(handle), posting(handle), range()]);
    // The handle was another one's, and done, when it was read.
    let seen = observation(&transfers, handle, TransferStatus::Done);
    apply(&mut transfers, 10, &[released, made(handle)]);
    transfers.observed(seen, at(12), |_| false);
    assert_eq!(transfers.of_room(ROOM).unwrap().unproved, 1);
    apply(&mut transfers, 20, &[flushed()]);
    assert!(transfers.of_room(ROOM).is_none(), "its flush proves it");
}

#[test]
fn a_batch_that_was_given_up_is_over_when_its_memory_says_so() {
    let handle = batch(0x100);
    let mut transfers = after(&[made(handle), posting(handle), releasing(handle, TransferStatus::InProgress)]);
    assert_eq!((transfers.live.len(), transfers.not_joined.unproved), (0, 1));
    transfers.observed(observation(&transfers, handle, TransferStatus::InProgress), at(10), |_| false);
    assert_eq!(transfers.not_joined.unproved, 1);
    transfers.observed(observation(&transfers, handle, TransferStatus::Done), at(11), |_| false);
    assert!(transfers.not_joined.is_over() && transfers.abandoned.is_empty());
}

#[test]
fn a_release_without_a_post_is_no_transfer() {
    let handle = nixl(0x100);
    let transfers = after(&[made(handle), releasing(handle, TransferStatus::NotPosted)]);
    assert_eq!(ended(&transfers, Engine::Nixl, "never_posted"), 1);
    assert!(transfers.subjects.is_empty() && transfers.live.is_empty() && transfers.not_joined.posted == 0);
}

#[test]
fn a_post_of_an_unknown_handle_is_kept_and_belongs_to_what_its_thread_works_on() {
    let handle = nixl(0x100);
    let transfers = after(&[posting(handle)]);
    assert_eq!(transfers.live[&handle].joined, Joined::Not(NotJoined::NotSeen));
    assert_eq!(transfers.not_joined.under_way(), Some((1, at(1))));
    let mut transfers = Transfers::new(100);
    transfers.working_on(1, Some(Work { room: ROOM, since: at(0), queue: None }));
    apply(&mut transfers, 1, &[posting(handle), releasing(handle, TransferStatus::InProgress)]);
    assert_eq!(transfers.of_room(ROOM).unwrap().unproved, 1);
    assert!(transfers.abandoned.is_empty(), "its flushes are not known: nothing will tell");
}

#[test]
fn a_second_post_that_is_refused_leaves_the_first_to_its_flush() {
    let handle = nixl(0x100);
    let refused = NativeEvent::Posted { handle, status: TransferStatus::Failed { code: -7 } };
    let mut transfers = after(&[made(handle), posting(handle), range(), posting(handle), refused]);
    assert_eq!(transfers.live[&handle].state, TransferState::InFlight);
    apply(&mut transfers, 10, &[flushed()]);
    assert_eq!(transfers.live[&handle].state, TransferState::Ended(TransferEnd::Done));
    assert_eq!(ended(&transfers, Engine::Nixl, "done"), 1);
}

#[test]
fn without_room_what_is_not_under_way_goes_first_and_when_all_is_the_new_one_is_not_kept() {
    let mut transfers = Transfers::new(2);
    assert!(apply(&mut transfers, 1, &[made(nixl(1)), made(nixl(2)), made(nixl(3))]));
    assert!(!transfers.live.contains_key(&nixl(1)) && transfers.live.len() == 2);
    assert!(apply(&mut transfers, 5, &[posting(nixl(2)), posting(nixl(3))]));
    assert!(!apply(&mut transfers, 7, &[made(nixl(4))]));
    assert_eq!((transfers.counted.not_kept, transfers.live.len(), under_way(&transfers)), (1, 2, 2));
    assert!(!apply(&mut transfers, 8, &[posting(nixl(5))]));
    apply(&mut transfers, 9, &[polled(nixl(2), TransferStatus::Done)]);
    assert!(apply(&mut transfers, 10, &[made(nixl(6))]));
}

#[test]
fn a_reading_of_a_transfer_that_has_ended_meanwhile_leaves_nothing_behind() {
    let handle = nixl(1);
    let mut transfers = after(&[made(handle), posting(handle), polled(handle, TransferStatus::Done)]);
    let status = TransferStatus::InProgress;
    transfers.observed(Observation { handle, generation: 1, status, moved: Some(1) }, at(9), |_| false);
    assert_eq!(transfers.subjects.len(), 0);
}

#[test]
fn a_transfer_that_is_not_kept_is_counted_once() {
    let full = || {
        let mut transfers = Transfers::new(2);
        assert!(apply(&mut transfers, 1, &[posting(nixl(1)), posting(nixl(2))]));
        transfers
    };
    let not_kept = |events: &[NativeEvent]| {
        let mut transfers = full();
        assert!(!apply(&mut transfers, 3, events));
        (transfers.counted.not_kept, transfers.counted.not_joined.values().sum::<u64>(), under_way(&transfers))
    };
    let of = nixl(9);
    let released = || releasing(of, TransferStatus::InProgress);
    assert_eq!(not_kept(&[made(of)]), (1, 2, 2));
    assert_eq!(not_kept(&[posting(of)]), (1, 2, 2));
    assert_eq!(not_kept(&[made(of), posting(of), polled(of, TransferStatus::Done), released()]), (1, 2, 2));
    assert_eq!(not_kept(&[made(of), released(), made(of), posting(of)]), (2, 2, 2), "the handle was another one's");
    assert_eq!(not_kept(&[made(of), posting(of), posting(of)]), (2, 2, 2), "posted again it is another transfer");
    assert_eq!(not_kept(&[made(of), made(nixl(8)), posting(of), posting(nixl(8))]), (2, 2, 2));
    let mut later = full();
    apply(&mut later, 3, &[made(of), polled(nixl(1), TransferStatus::Done), posting(of)]);
    assert_eq!((later.counted.not_kept, under_way(&later)), (1, 2), "there is room when it is posted");
    assert!(later.refused.is_empty());
}

#[test]
fn handles_that_are_refused_and_never_come_back_cost_bounded_memory_and_are_counted_once() {
    let mut transfers = Transfers::new(2);
    apply(&mut transfers, 1, &[posting(nixl(1)), posting(nixl(2))]);
    for number in 10..20 {
        apply(&mut transfers, number, &[made(nixl(number))]);
    }
    assert!(transfers.refused.len() <= 2, "{:?}", transfers.refused);
    for number in 10..20 {
        apply(&mut transfers, number, &[posting(nixl(number))]);
    }
    assert_eq!(transfers.counted.not_kept, 10);
}

#[test]
fn a_transfer_whose_room_cannot_be_kept_is_not_kept_either() {
    let mut transfers = Transfers::new(usize::MAX);
    let of_room = |number: u64| {
        let (handle, notification) = (nixl(number), notified(number));
        NativeEvent::Made { handle, operation: None, parts: 1, size: None, notification }
    };
    for number in 0..super::lifecycle::MAX_SUBJECTS as u64 {
        assert!(apply(&mut transfers, number, &[of_room(number), posting(nixl(number))]));
    }
    let size_not_known = transfers.counted.size_not_known;
    let one_more = u64::MAX;
    let kept = apply(&mut transfers, 1, &[of_room(one_more), posting(nixl(one_more))]);
    apply(&mut transfers, 2, &[polled(nixl(one_more), TransferStatus::Done)]);
    assert!(!kept && transfers.of_room(Room::Number(one_more)).is_none());
    assert_eq!((transfers.counted.not_kept, transfers.counted.size_not_known), (1, size_not_known));
    apply(&mut transfers, 3, &[polled(nixl(0), TransferStatus::Done), of_room(one_more), posting(nixl(one_more))]);
    assert_eq!(transfers.counted.not_kept, 1, "what is over makes room");
    assert!(transfers.of_room(Room::Number(one_more)).is_some());
}

#[test]
fn leaked_handles_leave_nothing_behind_but_the_last_of_them() {
    let mut transfers = Transfers::new(10);
    for number in 0..10_000 {
        assert!(apply(&mut transfers, number, &[made(nixl(number))]));
    }
    assert_eq!((transfers.live.len(), transfers.subjects.len(), transfers.counted.not_kept), (10, 0, 0));
    assert!(transfers.idle.len() <= 31, "{}", transfers.idle.len());
}

#[test]
fn a_handle_that_is_posted_again_and_again_leaves_nothing_behind() {
    let (mut transfers, handle) = (Transfers::new(10), nixl(0x100));
    apply(&mut transfers, 1, &[made(handle)]);
    for now in 0..10_000 {
        apply(&mut transfers, now, &[posting(handle), polled(handle, TransferStatus::Done)]);
    }
    assert_eq!((ended(&transfers, Engine::Nixl, "done"), transfers.live.len()), (10_000, 1));
    assert!(transfers.idle.len() <= 31, "{}", transfers.idle.len());
}

#[test]
fn what_is_over_is_kept_for_a_room_with_a_sender_and_goes_with_its_last() {
    let handle = nixl(0x100);
    let mut transfers = Transfers::new(100);
    for event in [made(handle), posting(handle), polled(handle, TransferStatus::Done)] {
        transfers.apply(&event, at(1), 1, |room| room == ROOM);
    }
    assert_eq!(transfers.of_room(ROOM).unwrap().done, 1);
    transfers.room_without_senders(ROOM);
    assert!(transfers.of_room(ROOM).is_none());
}
