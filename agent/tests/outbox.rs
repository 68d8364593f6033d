//! What is told to an Alertmanager, when, and how often: bounded state, no queue of messages.

#[path = "fixtures/request.rs"]
mod request;

use std::{collections::BTreeMap, time::Duration};

use dislodge::{
    rule::alert::AlertState,
    sink::alertmanager::outbox::{MAX_ALERTS, MAX_REQUESTS, Outbox},
};
use proptest::prelude::*;
use request::{at, key, verdict};

fn outbox() -> Outbox {
    Outbox::new(Duration::from_secs(60))
}

/// Tells what is due at `now`; how many alerts that were.
fn tell(outbox: &mut Outbox, now: f64) -> usize {
    let due = outbox.due(at(now));
    outbox.told(&due, at(now));
    due.len()
}

#[test]
fn an_alert_is_due_at_once_and_then_every_interval() {
    let mut outbox = outbox();
    assert_eq!(tell(&mut outbox, 0.0), 0);
    outbox.apply(&verdict("A", 1, AlertState::Pending, at(0.0)));
    assert_eq!(tell(&mut outbox, 0.0), 0, "a pending alert is nobody's business");
    outbox.apply(&verdict("A", 1, AlertState::Firing, at(0.0)));
    assert_eq!(tell(&mut outbox, 0.0), 1);
    assert_eq!(outbox.next_due(at(10.0)), Duration::from_secs(50));
    assert_eq!((tell(&mut outbox, 59.0), tell(&mut outbox, 60.0), tell(&mut outbox, 61.0)), (0, 1, 0));
}

#[test]
fn an_end_is_told_at_once_and_three_times_more() {
    let mut outbox = outbox();
    outbox.apply(&verdict("A", 1, AlertState::Firing, at(0.0)));
    tell(&mut outbox, 0.0);
    outbox.apply(&verdict("A", 1, AlertState::Resolved, at(10.0)));
    let told: Vec<f64> = (0..400).map(f64::from).filter(|now| *now >= 10.0 && tell(&mut outbox, *now) == 1).collect();
    assert_eq!(told, [10.0, 70.0, 130.0, 190.0]);
}

#[test]
fn the_alert_ends_with_its_last_request() {
    let mut outbox = outbox();
    outbox.apply(&verdict("A", 1, AlertState::Firing, at(0.0)));
    outbox.apply(&verdict("A", 2, AlertState::Firing, at(0.0)));
    tell(&mut outbox, 0.0);
    outbox.apply(&verdict("A", 1, AlertState::Resolved, at(1.0)));
    let due = outbox.due(at(6.0));
    let alert = outbox.alert(&due[0]).unwrap();
    assert_eq!((alert.requests.len(), alert.resolved), (1, None));
    outbox.apply(&verdict("A", 2, AlertState::Resolved, at(7.0)));
    let alert = outbox.alert(&due[0]).unwrap();
    assert_eq!(
        (alert.requests.keys().collect::<Vec<_>>(), alert.resolved),
        (vec![&key(2)], Some(at(7.0))),
        "the last one says what it was about"
    );
}

#[test]
fn an_alert_that_changes_often_is_told_every_few_seconds() {
    let mut outbox = outbox();
    let mut messages = 0;
    for serial in 0..100_u32 {
        let now = f64::from(serial) / 10.0;
        outbox.apply(&verdict("A", serial.into(), AlertState::Firing, at(now)));
        messages += tell(&mut outbox, now);
    }
    assert_eq!(messages, 2);
}

#[test]
fn what_changes_while_it_is_told_is_told_again() {
    let mut outbox = outbox();
    outbox.apply(&verdict("A", 1, AlertState::Firing, at(0.0)));
    let due = outbox.due(at(0.0));
    outbox.apply(&verdict("A", 1, AlertState::Resolved, at(3.0)));
    outbox.told(&due, at(4.0));
    let due = outbox.due(at(4.0));
    assert_eq!(outbox.alert(&due[0]).unwrap().resolved, Some(at(3.0)));
}

#[test]
fn an_alert_that_fires_again_after_its_end_is_a_new_one() {
    let mut outbox = outbox();
    outbox.apply(&verdict("A", 1, AlertState::Firing, at(100.0)));
    tell(&mut outbox, 100.0);
    outbox.apply(&verdict("A", 1, AlertState::Resolved, at(110.0)));
    tell(&mut outbox, 110.0);
    outbox.apply(&verdict("A", 1, AlertState::Firing, at(150.0)));
    let due = outbox.due(at(150.0));
    let alert = outbox.alert(&due[0]).unwrap();
    assert_eq!((alert.resolved, alert.since), (None, at(120.0)));
}

#[test]
fn an_outbox_is_bounded_and_what_is_dropped_is_counted() {
    let mut outbox = outbox();
    for number in 0..MAX_ALERTS + 5 {
        outbox.apply(&verdict(&format!("A{number}"), 1, AlertState::Firing, at(0.0)));
    }
    assert_eq!(outbox.dropped(), 5);
    for serial in 0..MAX_REQUESTS as u64 {
        outbox.apply(&verdict("A0", serial, AlertState::Firing, at(0.0)));
    }
    assert_eq!(outbox.dropped(), 5 + MAX_ALERTS as u64 - 1);
    outbox.apply(&verdict(&format!("A{}", MAX_ALERTS + 1), 1, AlertState::Resolved, at(1.0)));
    let mut told = 0;
    for _ in 0..100 {
        told += tell(&mut outbox, 2.0);
    }
    assert_eq!(told, MAX_ALERTS, "in messages of a bounded size");
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Fire(u64),
    Resolve(u64),
    Told,
    Lost,
}

proptest! {
    /// Whatever fires, ends and is lost on the way: once all has ended, Alertmanager hears so, and nothing is left over.
    #[test]
    fn nothing_that_was_resolved_is_left_firing(steps in proptest::collection::vec(prop_oneof![
        (1..4_u64).prop_map(Step::Fire),
        (1..4_u64).prop_map(Step::Resolve),
        Just(Step::Told),
        Just(Step::Lost),
    ], 0..40)) {
        let mut outbox = outbox();
        let mut ended = BTreeMap::new();
        let mut now = 0.0;
        let finish = (1..4).map(Step::Resolve).chain((0..400).map(|_| Step::Told));
        for step in steps.into_iter().chain(finish) {
            now += 3.0;
            match step {
                Step::Fire(serial) => outbox.apply(&verdict(if serial == 1 { "A" } else { "B" }, serial, AlertState::Firing, at(now))),
                Step::Resolve(serial) => outbox.apply(&verdict(if serial == 1 { "A" } else { "B" }, serial, AlertState::Resolved, at(now))),
                Step::Lost => drop(outbox.due(at(now))),
                Step::Told => {
                    let due = outbox.due(at(now));
                    for alert in due.iter().filter_map(|due| outbox.alert(due)) {
                        prop_assert!(!alert.requests.is_empty());
                        ended.insert(alert.rule.clone(), alert.resolved.is_some());
                    }
                    outbox.told(&due, at(now));
                }
            }
        }
        prop_assert!(ended.values().all(|ended| *ended), "{ended:?}");
        prop_assert!(outbox.due(at(now + 1e6)).is_empty());
    }
}
