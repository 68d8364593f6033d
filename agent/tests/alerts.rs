//! From matches to alerts, and the rules that come with the agent.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "alerts/default_rules.rs"]
mod default_rules;
#[path = "fixtures/request.rs"]
mod request;
#[path = "alerts/server_timeouts.rs"]
mod server_timeouts;

use std::{cell::Cell, ops::RangeInclusive, time::Duration};

use dislodge::{
    diagnose::Cause,
    event::{Backend, Hello},
    problem::Problem,
    request::{RequestKey, ResyncReason, Sync, tracker::Tracked},
    rule::{
        Mode, RuleIndex, RuleSet, Severity,
        alert::{AlertState, Alerts, Transition},
        evaluate::Evaluator,
        field::{FIELDS, Field, Value},
        load::{self, Source},
    },
};
use request::{World, at, key, look_as};

fn load_text(text: &str) -> Result<RuleSet, Vec<Problem>> {
    load::load(&[Source { file: "r.yaml", text }])
}

// Alerts

fn transition(serial: u64, state: AlertState, since: f64, now: f64) -> Option<Transition> {
    Some(Transition { key: key(serial), rule: RuleIndex(0), state, since: at(since), at: at(now) })
}

fn observe(alerts: &mut Alerts, serial: u64, matched: bool, now: f64) -> Option<Transition> {
    let matched = [(RuleIndex(0), Duration::from_secs(30))].into_iter().filter(|_| matched).collect::<Vec<_>>();
    observe_rules(alerts, serial, &matched, now).pop()
}

fn observe_rules(alerts: &mut Alerts, serial: u64, matched: &[(RuleIndex, Duration)], now: f64) -> Vec<Transition> {
    let mut transitions = Vec::new();
    alerts.observe(key(serial), matched, at(now), &mut transitions);
    transitions
}

#[test]
fn an_alert_is_pending_then_firing_then_resolved() {
    let mut alerts = Alerts::new(10);
    assert_eq!(observe(&mut alerts, 1, false, 0.0), None);
    assert_eq!(observe(&mut alerts, 1, true, 1.0), transition(1, AlertState::Pending, 1.0, 1.0));
    assert_eq!(observe(&mut alerts, 1, true, 30.5), None);
    assert_eq!(observe(&mut alerts, 1, true, 31.0), transition(1, AlertState::Firing, 1.0, 31.0));
    assert_eq!(observe(&mut alerts, 1, true, 500.0), None, "it is told once");
    assert_eq!(observe(&mut alerts, 1, false, 501.0), transition(1, AlertState::Resolved, 1.0, 501.0));
    assert_eq!(observe(&mut alerts, 1, false, 502.0), None);
    assert_eq!(
        observe(&mut alerts, 1, true, 503.0),
        transition(1, AlertState::Pending, 503.0, 503.0),
        "it begins anew"
    );
}

#[test]
fn a_break_in_the_match_starts_the_wait_again() {
    let mut alerts = Alerts::new(10);
    observe(&mut alerts, 1, true, 0.0);
    assert_eq!(observe(&mut alerts, 1, false, 29.0), None, "a pending alert ends without a word");
    observe(&mut alerts, 1, true, 29.5);
    assert_eq!(observe(&mut alerts, 1, true, 59.0), None);
    assert_eq!(observe(&mut alerts, 1, true, 59.5), transition(1, AlertState::Firing, 29.5, 59.5));
}

#[test]
fn without_a_hold_an_alert_fires_at_once() {
    let mut alerts = Alerts::new(10);
    let fired = observe_rules(&mut alerts, 1, &[(RuleIndex(0), Duration::ZERO)], 0.0);
    assert_eq!(fired, Vec::from_iter(transition(1, AlertState::Firing, 0.0, 0.0)));
}

#[test]
fn the_end_of_a_request_resolves_what_fired_and_drops_what_was_pending() {
    let mut alerts = Alerts::new(10);
    observe(&mut alerts, 1, true, 0.0);
    observe(&mut alerts, 1, true, 30.0);
    let both = [(RuleIndex(0), Duration::from_secs(30)), (RuleIndex(1), Duration::from_secs(60))];
    assert_eq!(observe_rules(&mut alerts, 1, &both, 30.0).len(), 1);
    observe(&mut alerts, 2, true, 30.0);
    assert_eq!(alerts.of(key(1)).collect::<Vec<_>>(), [(RuleIndex(0), true), (RuleIndex(1), false)]);
    assert_eq!(alerts.forget(key(1), at(31.0)), Vec::from_iter(transition(1, AlertState::Resolved, 0.0, 31.0)));
    assert_eq!(alerts.forget(key(1), at(32.0)), []);
    assert_eq!(alerts.keys().collect::<Vec<_>>(), [key(2)], "the other request's alert stays");
}

#[test]
fn alerts_are_bounded_and_what_is_dropped_is_counted() {
    let mut alerts = Alerts::new(2);
    for serial in 1..=5 {
        observe(&mut alerts, serial, true, 0.0);
    }
    assert_eq!((alerts.len(), alerts.keys().count(), alerts.dropped()), (2, 2, 3));
    observe(&mut alerts, 1, false, 1.0);
    assert!(observe(&mut alerts, 3, true, 1.0).is_some(), "there is room again");
}

// The evaluator

fn run(
    evaluator: &mut Evaluator,
    world: &World,
    seconds: impl IntoIterator<Item = f64>,
) -> Vec<(String, AlertState, f64)> {
    let mut told = Vec::new();
    for now in seconds {
        let mut transitions = Vec::new();
        world.look(at(now), |subject| evaluator.evaluate(key(1), subject, &mut transitions));
        told.extend(transitions.into_iter().map(|transition| {
            let rule = evaluator.rules().get(transition.rule).unwrap();
            (rule.name.to_string(), transition.state, now)
        }));
    }
    told
}

fn ticks(from: f64, to: f64) -> impl Iterator<Item = f64> {
    let count = ((to - from) * 2.0) as u32;
    (0..=count).map(move |tick| from + f64::from(tick) / 2.0)
}

fn fired(world: &World, from: f64, to: f64) -> Vec<(String, f64)> {
    let mut evaluator = Evaluator::new(load::defaults().unwrap(), 100);
    let told = run(&mut evaluator, world, ticks(from, to));
    told.into_iter().filter(|(_, state, _)| *state == AlertState::Firing).map(|(name, _, now)| (name, now)).collect()
}

/// `worlds` as a tick wants them.
fn after(worlds: &[World], reached: Option<RequestKey>) -> impl Iterator<Item = Tracked<'_>> {
    let first = worlds.iter().take_while(|world| Some(world.tracked().key) <= reached).count();
    let (up_to, after) = worlds.split_at(first);
    after.iter().chain(up_to).map(World::tracked)
}

fn worlds(serials: RangeInclusive<u64>) -> Vec<World> {
    let world = |serial| {
        let mut world = World::healthy();
        world.request.serial = serial;
        world.room.senders = vec![serial];
        world
    };
    serials.map(world).collect()
}

#[test]
fn a_tick_stops_at_its_budget_and_the_next_one_goes_on_from_there() {
    let rules = load_text("rules: [{name: Any, when: inflight, severity: info}]").unwrap();
    let mut evaluator = Evaluator::new(rules, 10_000);
    let worlds = worlds(1..=1_000);
    let mut seen = Vec::new();
    let clock = Cell::new(Duration::ZERO);
    let step = || {
        clock.set(clock.get() + Duration::from_millis(1));
        clock.get()
    };
    for _ in 0..4 {
        clock.set(Duration::ZERO);
        let requests = after(&worlds, evaluator.reached());
        let tick = evaluator.tick(requests, at(1.0), Duration::from_millis(4), step);
        assert_eq!((tick.evaluated, tick.stopped), (256, true));
        seen.extend(tick.transitions.iter().map(|transition| transition.key.serial));
    }
    seen.sort_unstable();
    assert_eq!(seen, Vec::from_iter(1..=1_000), "four ticks reach everybody, once");
    assert_eq!((evaluator.overruns(), evaluator.evaluated()), (4, 1_024));
    let requests = after(&worlds, evaluator.reached());
    let tick = evaluator.tick(requests, at(1.0), Duration::ZERO, || Duration::from_secs(9));
    assert_eq!(tick.evaluated, 64, "even without a budget it moves on");
}

#[test]
fn alerts_of_requests_that_are_gone_end_before_the_tick() {
    let rules = load_text("rules: [{name: Any, when: inflight, severity: info}]").unwrap();
    let mut evaluator = Evaluator::new(rules, 10);
    let worlds = worlds(1..=3);
    let budget = Duration::from_secs(1);
    let tick = evaluator.tick(after(&worlds, None), at(1.0), budget, || Duration::ZERO);
    assert_eq!((tick.transitions.len(), evaluator.reached()), (3, None), "it reached all");
    let ended = evaluator.end_others([key(0), key(2), key(4)].into_iter(), at(2.0));
    let resolved = |serial| (key(serial), AlertState::Resolved);
    assert_eq!(ended.iter().map(|it| (it.key, it.state)).collect::<Vec<_>>(), [resolved(1), resolved(3)]);
    assert_eq!(evaluator.end_others(std::iter::empty(), at(3.0)).len(), 1);
    assert!(evaluator.alerts().is_empty() && evaluator.alerts().counts().is_empty());
}

#[test]
fn what_an_alerted_request_looks_like_is_told_when_it_changes() {
    let rules = load_text("rules: [{name: Any, when: inflight, severity: info}]").unwrap();
    let mut evaluator = Evaluator::new(rules, 10);
    let mut worlds = worlds(1..=2);
    let mut changed = |worlds: &[World], now: f64| {
        evaluator.tick(after(worlds, None), at(now), Duration::MAX, || Duration::ZERO).changed
    };
    assert_eq!(changed(&worlds, 1.0), [key(1), key(2)]);
    assert_eq!(changed(&worlds, 2.0), []);
    worlds[1].request.cleared_by = Some(9);
    assert_eq!(changed(&worlds, 3.0), [key(2)], "it has another cause");
    worlds[0].request.rid = None;
    assert_eq!(changed(&worlds, 4.0), [key(1)]);
}

// The rules that come with the agent
