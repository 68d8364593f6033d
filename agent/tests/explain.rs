//! `dislodge explain` on recordings of simulated servers: what it says is what happened.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "fixtures/made.rs"]
mod made;

use dislodge::{
    core::{Effects, Input},
    event::{Body, Event, Rid, clock::Monotonic},
    explain::{
        answer::{Answer, Decision, Explanation, RuleState},
        text::{Style, render},
        wanted::Wanted,
    },
    record::{
        flight::Flight,
        reader::Reader,
        recorder::Span,
        replay::{Replay, Told},
    },
    request::tracker::Limits,
    rule::load::defaults,
    simulate::{Family, Settings, simulate},
};
use jiff::{Timestamp, ToSpan as _};
use made::{Made, file, healthy, named, place, texts, this};
use std::time::Duration;

fn state<'a>(explanation: &'a Explanation, rule: &str) -> &'a RuleState {
    &explanation.rules.iter().find(|it| it.rule == rule).unwrap().state
}

fn guards(explanation: &Explanation) -> Vec<&str> {
    explanation.remediation.refusals.iter().map(|refused| refused.guard.as_str()).collect()
}

#[test]
fn a_request_whose_room_another_one_cleared_is_told_from_its_making_to_its_alert() {
    let (made, truth) = Made::stuck(Family::ClearedRoom, "RoomCollision", 1);
    let told = made.explained(&truth);
    let lines = texts(&told);
    let expected = [
        "calls: its sender was made",
        "calls: poll() NotPolled",
        "diagnosis: RoomCollision",
        "rules: alert RoomCollision (critical) is pending",
        "rules: alert RoomCollision (critical) fires",
    ];
    assert!(expected.map(|words| place(&lines, words)).is_sorted(), "{lines:#?}");
    place(&lines, "calls: entered the inflight queue");
    let seconds: Vec<f64> = told.timeline.as_ref().unwrap().lines.iter().map(|line| line.at.seconds).collect();
    assert!(seconds.is_sorted() && seconds[0] == 0.0, "{seconds:?}");
    assert_eq!((&*told.diagnosis.cause, &*told.diagnosis.confidence), ("RoomCollision", "high"));
    let evidence = told.diagnosis.evidence.iter().map(|it| format!("{}: {}", it.source, it.text)).collect::<Vec<_>>();
    place(&evidence, "calls: poll() returns");
    place(&evidence, &format!("cleared room {}", truth.room));
    assert!(guards(&told).is_empty() && told.remediation.decision == Decision::Acts, "{:?}", told.remediation);
    assert_eq!((told.remediation.mode.as_deref(), &*told.remediation.action), (None, "enforce"));
    assert!(told.remediation.assumed.iter().any(|assumed| assumed.contains("control channel")));
    let RuleState::No { because } = state(&told, "Parked") else { panic!("{:?}", told.rules) };
    assert!(because.contains(&"cause is RoomCollision".to_owned()), "{because:?}");
    assert_eq!(told.instance.rid, Some(Rid { text: truth.rid, truncated: false }));
}

#[test]
fn a_rule_fires_when_it_was_said_that_it_would() {
    let (made, truth) = Made::stuck(Family::ParkedPrefill, "Parked", 1);
    let told = made.explained(&truth);
    let RuleState::Firing { since, fired } = state(&told, "Parked") else { panic!("{:?}", told.rules) };
    assert!((fired.seconds - since.seconds - 30.0).abs() < 0.3, "{since:?} {fired:?}");

    let before =
        |at: &dyn Fn(Timestamp) -> Timestamp| made.ask_at(&this(&truth), Some(at(since.time))).requests.remove(0);
    let pending = before(&|since| since + 10.seconds());
    let RuleState::Pending { since: said, fires } = state(&pending, "Parked") else { panic!("{:?}", pending.rules) };
    assert_eq!(said, since);
    assert!((fires.seconds - fired.seconds).abs() < 0.3, "{fires:?} {fired:?}");

    let earlier = before(&|since| since - 10.seconds());
    let RuleState::Later { matches, fires: Some(fires) } = state(&earlier, "Parked") else {
        panic!("{:?}", earlier.rules)
    };
    assert!((matches.seconds - since.seconds).abs() < 1.3 && (fires.seconds - fired.seconds).abs() < 2.3, "{fires:?}");
    assert!(texts(&earlier).len() < texts(&told).len(), "what comes later is not told");
    assert_eq!((guards(&earlier)[0], earlier.remediation.decision), ("cause_not_curable", Decision::Refused));
}

#[test]
fn a_transfer_that_never_ends_is_told_and_every_guard_that_it_offends_is_named() {
    let (made, truth) = Made::stuck(Family::TransferNeverEnds, "TransferStalled", 1);
    let told = made.explained(&truth);
    let lines = texts(&told);
    place(&lines, "transfers: a transfer of the room was posted");
    place(&lines, "diagnosis: TransferStalled, transfer InFlight");
    assert_eq!(guards(&told), ["cause_not_curable", "not_quiescent", "observing"]);
    assert!(told.diagnosis.evidence.iter().any(|it| it.source == "transfers"), "{:?}", told.diagnosis.evidence);
}

#[test]
fn other_ranks_of_the_server_are_told_beside_it() {
    let (made, truth) = Made::stuck(Family::ClearedRoom, "RoomCollision", 2);
    let answer = made.ask(&named(&truth.rid));
    assert_eq!(answer.requests.len(), 2, "one of each rank");
    for told in &answer.requests {
        let lines = texts(told);
        let other = answer.requests.iter().find(|other| other.instance.pid != told.instance.pid).unwrap();
        place(&lines, &format!("ranks: pid {} (TP", other.instance.pid));
        let of_ranks = ["tensor_parallel", "pipeline_parallel"];
        assert!(guards(told).iter().any(|guard| of_ranks.contains(guard)), "{:?}", guards(told));
    }
}

#[test]
fn what_the_agent_missed_stands_among_what_happened() {
    for seed in 0..60 {
        let made = Made::of(Family::AgentBlind, seed, 3, 1);
        for truth in &made.truth {
            let answer = made.ask(&this(truth));
            let Some(told) = answer.requests.first() else { continue };
            let lines = texts(told);
            if lines.iter().any(|line| line.starts_with("agent: the picture of the server may be wrong: events_lost")) {
                place(&lines, "agent: the hook was asked for everything that lives");
                assert!(answer.notes.iter().any(|note| note.starts_with("events were lost")), "{:?}", answer.notes);
                return;
            }
        }
    }
    panic!("no request of any seed lived while events were lost");
}

#[test]
fn a_recording_that_has_lost_its_beginning_tells_what_is_left_of_a_request() {
    let seconds = |time| Span { time: Duration::from_secs(time), bytes: 64 << 20 };
    let simulation = simulate(&Settings { family: Family::ParkedPrefill, seed: 1, requests: 3, ranks: 1 });
    let limits = Limits { requests: 100, transfers: 100 };
    let mut flight = Flight::new(defaults().unwrap(), limits, "node", Some(seconds(10)), Monotonic(0));
    simulation.inputs.into_iter().for_each(|input| flight.apply(input, &mut Effects::default()));
    let mut file = Vec::new();
    flight.recording().unwrap().write(&mut file).unwrap();
    let made = Made { file, truth: simulation.truth };
    let truth = made.truth.iter().find(|truth| truth.why_stuck().is_some()).unwrap();
    let answer = made.ask(&this(truth));
    assert!(answer.notes.iter().any(|note| note.contains("were not kept")), "{:?}", answer.notes);
    let first = &answer.requests[0].timeline.as_ref().unwrap().lines[0];
    assert_eq!((&*first.source, &*first.text), ("agent", "was there already when this begins"));
    assert!((1.0..100.0).contains(&first.at.seconds), "{first:?}");
    assert!(matches!(state(&answer.requests[0], "Parked"), RuleState::Firing { .. }));
}

#[test]
fn a_request_that_has_ended_is_told_with_its_end() {
    let made = Made::of(Family::LateCompletion, 1, 3, 1);
    let truth = made.truth.iter().find(|truth| truth.ended.is_some() && truth.entered.is_some()).unwrap();
    let told = made.explained(truth);
    let ended = told.standing.ended.as_ref().unwrap();
    assert_eq!(ended.how, "left the inflight queue: success");
    assert!(told.rules.is_empty() && told.diagnosis.is_past);
    assert_eq!(guards(&told), ["terminal"]);
    assert_eq!(told.server.sglang.as_deref().map(|release| release.starts_with("0.")), Some(true), "{:?}", told.server);
    place(&texts(&told), "calls: left the inflight queue: success");
}

#[test]
fn in_every_family_what_is_said_is_what_the_core_says_in_lines_that_fit() {
    for family in Family::ALL {
        for (seed, ranks) in [(1, 1), (4, 2)] {
            let made = Made::of(family, seed, 3, ranks);
            let mut core = None;
            let replay = Replay::new(Reader::open(&*made.file).unwrap(), defaults().unwrap());
            let mut last = Monotonic(0);
            let mut observe = |told: Told<'_>| {
                if let Told::Tick(now) = told {
                    last = now;
                }
                true
            };
            core.get_or_insert(replay.run(&mut observe).unwrap().1);
            for truth in &made.truth {
                let answer = made.ask(&this(truth));
                let page = render(&answer, Style::Plain);
                assert!(page.lines().all(|line| line.chars().count() <= 100 && line == line.trim_end()), "{page}");
                let Some(told) = answer.requests.first() else { continue };
                let lines = &told.timeline.as_ref().unwrap().lines;
                assert!(lines.is_sorted_by_key(|line| line.at.time) && lines.len() <= 120, "{page}");
                if let Some((_, diagnosis)) = core.as_ref().unwrap().diagnose(truth.request, last) {
                    assert_eq!(told.diagnosis.cause, diagnosis.cause.name(), "{family:?} {seed}: {page}");
                    assert_eq!(told.diagnosis.evidence.len(), diagnosis.evidence.len());
                }
                for rule in &told.rules {
                    let fires = matches!(rule.state, RuleState::Firing { .. });
                    let is_firing = core
                        .as_ref()
                        .unwrap()
                        .firing()
                        .any(|verdict| verdict.request == truth.request && *verdict.rule == *rule.rule);
                    assert_eq!(fires, is_firing, "{family:?} {seed} {}: {page}", rule.rule);
                }
            }
        }
    }
}

#[test]
fn a_room_that_was_used_again_shows_each_use_the_newest_first_and_names_the_others() {
    let mut inputs = healthy(9, |serial| format!("rid-{serial}"));
    inputs.retain(|input| !matches!(input, Input::Event(Event { body: Body::Close { .. }, .. })));
    let made = Made { file: file(inputs), truth: Vec::new() };
    let answer = made.ask(&named("77"));
    let serials = |answer: &Answer| answer.requests.iter().map(|it| it.instance.serial).collect::<Vec<_>>();
    assert_eq!(serials(&answer), [9, 8, 7, 6]);
    assert_eq!(answer.others.iter().map(|other| other.serial).collect::<Vec<_>>(), [5, 4, 3, 2, 1]);
    assert!(render(&answer, Style::Plain).contains("--serial N"));
    let one = made.ask(&Wanted::new("77".to_owned(), None, Some(2)));
    assert_eq!((serials(&one), one.others.len()), (vec![2], 0));
    assert_eq!(serials(&made.ask(&named("rid-5"))), [5]);
    assert!(made.ask(&Wanted::new("77".to_owned(), Some(8), None)).requests.is_empty());
}
