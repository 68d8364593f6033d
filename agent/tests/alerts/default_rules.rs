//! The default rules: on what each fires, when, and on what none does.

use super::*;

const CASES: [(Cause, &str, f64); 9] = [
    (Cause::RoomCollision, "RoomCollision", 30.0),
    (Cause::UpdateDropped, "UpdateDropped", 30.0),
    (Cause::AbortIgnored, "AbortIgnored", 31.0),
    (Cause::Parked, "Parked", 60.5),
    (Cause::NeverBootstrapped, "NeverBootstrapped", 345.5),
    (Cause::LoopStalled, "LoopStalled", 360.0),
    (Cause::RankDivergence, "RankDivergence", 60.0),
    (Cause::Resurrected, "Resurrected", 60.0),
    (Cause::Unknown, "PinnedUnknown", 390.5),
];

/// Causes that are about the server as a whole: a warm-up shows them as well.
const OF_THE_SERVER: [Cause; 2] = [Cause::LoopStalled, Cause::RankDivergence];

/// Causes that transfers show, whatever else is known of the request: when the rule fires, and how urgent it is.
const OF_TRANSFERS: [(Cause, f64, Severity); 7] = [
    (Cause::TransferStalled, 70.5, Severity::Critical),
    (Cause::WorkerBlocked, 70.5, Severity::Critical),
    (Cause::CompletionLost, 35.5, Severity::Warning),
    (Cause::CompletionError, 60.0, Severity::Warning),
    (Cause::PeerGone, 60.0, Severity::Warning),
    (Cause::Slow, 70.5, Severity::Info),
    (Cause::CapacityStall, 70.5, Severity::Info),
];

#[test]
fn each_cause_has_a_default_rule_of_its_own() {
    let rules = load::defaults().unwrap();
    for cause in Cause::ALL {
        let allows = |rule: &&dislodge::rule::Rule| rule.condition.prefilter().allows(cause, f64::MAX);
        let of_cause: Vec<&str> = rules.iter().map(|(_, rule)| rule).filter(allows).map(|rule| &*rule.name).collect();
        let (decodes, names): (Vec<&str>, Vec<&str>) = of_cause.iter().partition(|name| name.starts_with("Decode"));
        let name = if cause == Cause::Unknown { "PinnedUnknown" } else { cause.name() };
        assert_eq!(names, [name]);
        let decode = match cause {
            Cause::Unknown => Some("DecodePinned"),
            Cause::RoomCollision | Cause::UpdateDropped => Some("DecodeRoomCollision"),
            _ => None,
        };
        assert_eq!(decodes, Vec::from_iter(decode));
    }
    assert_eq!(rules.len(), Cause::ALL.len() + 2);
}

#[test]
fn each_default_rule_about_transfers_fires_on_its_cause_and_not_before_its_time() {
    for (cause, seconds, severity) in OF_TRANSFERS {
        let mut evaluator = Evaluator::new(load::defaults().unwrap(), 100);
        let mut fired = Vec::new();
        for now in ticks(0.0, 300.0) {
            let mut transitions = Vec::new();
            look_as(&World::healthy(), cause, at(now), |it| evaluator.evaluate(key(1), it, &mut transitions));
            fired.extend(transitions.iter().filter(|it| it.state == AlertState::Firing).map(|it| (it.rule, now)));
        }
        let names: Vec<(&str, f64, Severity)> = fired
            .iter()
            .map(|(index, now)| evaluator.rules().get(*index).map(|it| (&*it.name, *now, it.severity)).unwrap())
            .collect();
        assert_eq!(names, [(cause.name(), seconds, severity)]);
    }
}

#[test]
fn slow_and_waiting_requests_are_never_worth_more_than_information() {
    let rules = load::defaults().unwrap();
    for cause in [Cause::Slow, Cause::CapacityStall, Cause::WarmupPinned] {
        let allows = |rule: &&dislodge::rule::Rule| rule.condition.prefilter().allows(cause, f64::MAX);
        let loudest = rules.iter().map(|(_, rule)| rule).filter(allows).map(|rule| rule.severity).max();
        assert_eq!(loudest, Some(Severity::Info), "{cause}");
        assert!(!cause.is_stuck());
    }
}

#[test]
fn each_default_rule_fires_on_its_case_and_on_no_other() {
    for (cause, rule, seconds) in CASES {
        assert_eq!(fired(&World::pinned(cause), 0.0, 800.0), [(rule.to_owned(), seconds)], "{cause}");
    }
}

#[test]
fn a_default_rule_that_fires_is_resolved_when_the_request_moves_on() {
    for (cause, rule, seconds) in CASES {
        let mut evaluator = Evaluator::new(load::defaults().unwrap(), 100);
        run(&mut evaluator, &World::pinned(cause), ticks(0.0, seconds));
        let ended = evaluator.forget(key(1), at(seconds + 1.0));
        assert_eq!(ended.iter().map(|it| it.state).collect::<Vec<_>>(), [AlertState::Resolved], "{rule}");
    }
}

#[test]
fn an_agent_that_starts_after_the_pin_alerts_within_the_hold_and_a_second() {
    for (cause, rule, _) in CASES {
        let hold = load::defaults().unwrap().iter().find(|(_, it)| *it.name == *rule).map(|(_, it)| it.hold).unwrap();
        let alerts = fired(&World::pinned(cause), 10_000.2, 10_100.2 + hold.as_secs_f64());
        assert_eq!(alerts.len(), 1, "{cause}");
        assert!(alerts[0].1 <= 10_000.2 + hold.as_secs_f64() + 1.0, "{cause}: {alerts:?}");
    }
}

#[test]
fn no_default_rule_fires_on_a_healthy_or_a_slow_request() {
    assert_eq!(fired(&World::healthy(), 0.0, 20.0), []);
    let mut queued = World::healthy();
    queued.request.entered = None;
    queued.request.phase = Some(dislodge::event::Phase::Bootstrapping);
    assert_eq!(fired(&queued, 0.0, 280.0), [], "waits for a decode, as it may");
    // Bytes still move, the decode side is full: longer than usual, not longer than the server's own time-outs.
    assert_eq!(fired(&World::healthy(), 0.0, 350.0), []);
    let mut patient = World::healthy();
    patient.server.hello =
        Some(Box::new(Hello { waiting_timeout: Some(3_600.0), bootstrap_timeout: Some(3_600.0), ..Hello::default() }));
    assert_eq!(fired(&patient, 0.0, 3_600.0), [], "the server's own time-outs count");
    let mut transient = World::pinned(Cause::Parked);
    transient.request.entered = Some(at(0.0));
    assert_eq!(fired(&transient, 0.0, 20.0), []);
}

#[test]
fn no_default_rule_fires_while_generation_is_paused() {
    for (cause, ..) in CASES {
        let mut world = World::pinned(cause);
        world.server.paused = true;
        assert_eq!(fired(&world, 0.0, 2_000.0), [], "{cause}");
        world.request.backend = Backend::Fake;
        assert_eq!(fired(&world, 0.0, 2_000.0), [], "{cause}, fake");
    }
}

#[test]
fn a_warm_up_is_information_only() {
    for (cause, ..) in CASES.into_iter().filter(|(cause, ..)| !OF_THE_SERVER.contains(cause)) {
        let mut world = World::pinned(cause);
        world.request.backend = Backend::Fake;
        assert_eq!(fired(&world, 0.0, 800.0), [], "{cause}: it was not polled long enough to tell");
        world.server.queue_length = Some((1, at(10.0)));
        assert_eq!(fired(&world, 0.0, 800.0), [("WarmupPinned".to_owned(), 330.5)], "{cause}");
    }
    assert_eq!(fired(&World::pinned(Cause::WarmupPinned), 0.0, 800.0), [("WarmupPinned".to_owned(), 330.5)]);
    assert_eq!(
        load::defaults().unwrap().iter().find(|(_, rule)| &*rule.name == "WarmupPinned").unwrap().1.severity,
        Severity::Info
    );
}

#[test]
fn low_confidence_makes_the_default_rules_wait_longer_but_not_for_ever() {
    for (cause, rule, seconds) in CASES {
        let mut world = World::pinned(cause);
        world.server.sync = Sync::Needed(ResyncReason::EventsLost);
        let alerts = fired(&world, 0.0, 2_000.0);
        assert_eq!(alerts.len(), 1, "{cause}");
        assert!(alerts[0].0 == rule && alerts[0].1 > seconds + 20.0, "{cause}: {alerts:?}");
    }
}

#[test]
fn a_moment_of_low_confidence_does_not_end_a_default_alert_that_has_fired_long_ago() {
    for (cause, ..) in CASES {
        let mut evaluator = Evaluator::new(load::defaults().unwrap(), 100);
        let mut world = World::pinned(cause);
        run(&mut evaluator, &world, ticks(0.0, 1_000.0));
        world.server.sync = Sync::Needed(ResyncReason::EventsLost);
        assert_eq!(run(&mut evaluator, &world, [1_000.5]), [], "{cause}");
    }
}

#[test]
fn the_default_rules_file_lists_every_field() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../rules/default.yaml")).unwrap();
    for field in &FIELDS {
        let line = format!("#   {} ({}): {}\n", field.name, field.kind.name(), field.meaning);
        assert!(text.contains(&line), "rules/default.yaml needs the line\n{line}");
    }
}

#[test]
fn only_pins_that_nothing_else_ends_may_be_enforced_by_default() {
    let enforced: Vec<String> = load::defaults()
        .unwrap()
        .iter()
        .filter(|(_, rule)| rule.action == Mode::Enforce)
        .map(|(_, rule)| rule.name.to_string())
        .collect();
    assert_eq!(enforced, ["RoomCollision", "UpdateDropped", "AbortIgnored"]);
    assert!(load::defaults().unwrap().iter().all(|(_, rule)| rule.action != Mode::DryRun));
}

#[test]
fn a_young_healthy_request_costs_no_evaluation() {
    let world = World::healthy();
    world.look(at(20.0), |subject| {
        for (_, rule) in load::defaults().unwrap().iter() {
            assert!(
                !rule.condition.prefilter().allows(subject.conclusion.cause, subject.age().as_secs_f64()),
                "{}",
                rule.name
            );
        }
    });
}
