//! The simulator itself: the same seed gives the same stream, every family gives one, `dislodge replay` reads what
//! `dislodge simulate` writes. And the core on its streams: cut in two, with events twice, with events lost.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::{Command, Output},
    time::Duration,
};

use dislodge::{
    core::{Core, Effects, Input},
    diagnose::{Cause, Confidence, diagnose},
    event::clock::Monotonic,
    record::{
        flight::Flight,
        reader::Reader,
        recorder::Span,
        replay::{Replay, Told},
    },
    request::{RequestKey, ResyncReason, tracker::Limits},
    rule::load::defaults,
    simulate::{Family, Settings, simulate, truth::Fate},
    verdict::Verdict,
};
use proptest::prelude::*;

const LIMITS: Limits = Limits { requests: 10_000, transfers: 10_000 };

fn settings(family: Family, seed: u64) -> Settings {
    Settings { family, seed, requests: 3, ranks: 2 }
}

fn dislodge(arguments: &[&str], folder: &Path) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_dislodge")).args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn the_same_seed_gives_the_same_stream_and_another_one_another() {
    let told = |seed| format!("{:?}", simulate(&settings(Family::AgentBlind, seed)));
    assert_eq!(told(7), told(7));
    assert_ne!(told(7), told(8));
}

#[test]
fn every_family_gives_a_stream_in_order_and_what_it_is_about_does_happen() {
    for family in Family::ALL {
        let mut fates = BTreeSet::new();
        for seed in 0..30 {
            let simulation = simulate(&settings(family, seed));
            let times = simulation.inputs.iter().filter_map(|input| match input {
                Input::Event(event) => Some(event.at),
                Input::Tick { now, .. } => Some(*now),
                _ => None,
            });
            assert!(times.is_sorted(), "{family:?} {seed}");
            fates.extend(simulation.truth.into_iter().map(|truth| match truth.fate {
                Fate::Stuck(stuck) => stuck.cause,
                Fate::Slow => "slow",
                _ => "healthy",
            }));
        }
        let expected = match family {
            Family::ClearedRoom => "RoomCollision",
            Family::AbortIgnored => "AbortIgnored",
            Family::ParkedPrefill => "Parked",
            Family::TransferNeverEnds => "TransferStalled",
            Family::CompletionLost => "CompletionLost",
            Family::UnsafeRelease => "UnsafeRelease",
            Family::Resurrection => "Resurrected",
            Family::PipelineDivergence | Family::TensorDivergence => "RankDivergence",
            Family::LoopStalled => "LoopStalled",
            Family::PeerDied => "PeerGone",
            Family::Blackholed => "CompletionError",
            Family::WorkerBlocked => "WorkerBlocked",
            Family::WarmupPinned => "WarmupPinned",
            Family::BootstrapThreadDied | Family::OrphanRoom => "NeverBootstrapped",
            Family::Backpressure => "slow",
            _ => "healthy",
        };
        assert!(fates.contains(expected), "{family:?}: {fates:?}");
    }
}

#[test]
fn what_is_written_is_replayed_to_the_alert_that_the_truth_beside_it_names() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["simulate", "--family", "cleared-room", "--seed", "3", "--requests", "2", "-o", "made"];
    dislodge(&arguments, folder.path());
    let truth = std::fs::read_to_string(folder.path().join("made.truth.json")).unwrap();
    let truth: serde_json::Value = serde_json::from_str(&truth).unwrap();
    let stuck = truth["truth"].as_array().unwrap().iter().find(|truth| truth["fate"]["fate"] == "stuck").unwrap();
    let replayed = dislodge(&["replay", "made", "-o", "json"], folder.path());
    let lines = String::from_utf8(replayed.stdout).unwrap();
    let mut verdicts = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let fired = verdicts.find(|line| line["verdict"]["state"] == "firing").unwrap();
    assert_eq!(fired["verdict"]["cause"], stuck["fate"]["cause"]);
    assert_eq!(fired["verdict"]["request"]["serial"], stuck["request"]["serial"]);

    let printed = dislodge(&arguments[..arguments.len() - 2], folder.path());
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&printed.stdout).unwrap(), truth);
    let made = std::fs::read(folder.path().join("made")).unwrap();
    dislodge(&arguments, folder.path());
    assert_eq!(std::fs::read(folder.path().join("made")).unwrap(), made, "the same file again");
}

#[test]
fn a_family_that_does_not_exist_is_refused_by_name() {
    let refused =
        Command::new(env!("CARGO_BIN_EXE_dislodge")).args(["simulate", "--family", "gremlins"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("no family `gremlins`"));
}

/// What a verdict says; its evidence may be worded anew after a snapshot (docs/recording.md).
fn said(verdict: &Verdict) -> impl PartialEq + std::fmt::Debug + use<> {
    let diagnosis = (verdict.cause, verdict.diagnosis.quiescence, verdict.diagnosis.confidence);
    (verdict.rule.to_string(), verdict.state, verdict.request, diagnosis, verdict.since, verdict.at)
}

/// Cause and confidence of each request at each tick.
fn diagnoses(inputs: Vec<Input>) -> BTreeMap<(Monotonic, RequestKey), (Cause, Confidence)> {
    let mut core = Core::new(dislodge::rule::load::load(&[]).unwrap(), LIMITS);
    let mut all = BTreeMap::new();
    for input in inputs {
        let tick = if let Input::Tick { now, .. } = input { Some(now) } else { None };
        core.apply(input, &mut Effects::default());
        let Some(now) = tick else { continue };
        all.extend(core.tracker().judged(now).map(|tracked| {
            let diagnosis = diagnose(&tracked, now);
            ((now, tracked.key), (diagnosis.cause, diagnosis.confidence))
        }));
    }
    all
}

/// The stream with some events twice, and some lost, which is noticed at the next tick.
fn disturbed(inputs: Vec<Input>, twice: &[usize], lost: &[usize]) -> Vec<Input> {
    let (mut disturbed, mut doubts) = (Vec::new(), BTreeSet::new());
    let mut processes = BTreeMap::new();
    for (place, input) in inputs.into_iter().enumerate() {
        match input {
            Input::Event(event) if lost.contains(&place) => {
                doubts.insert(event.pid);
            }
            Input::Event(event) => {
                if twice.contains(&place) {
                    disturbed.push(Input::Event(event.clone()));
                }
                disturbed.push(Input::Event(event));
            }
            Input::Tick { now, pace } => {
                for process in std::mem::take(&mut doubts).iter().filter_map(|pid| processes.get(pid)) {
                    disturbed.push(Input::Doubt { process: *process, why: ResyncReason::EventsLost });
                    disturbed.push(Input::NativeLost { process: *process, at: now });
                }
                disturbed.push(Input::Tick { now, pace });
            }
            input => {
                if let Input::Attach { process, .. } = &input {
                    processes.insert(process.pid, *process);
                }
                disturbed.push(input);
            }
        }
    }
    disturbed
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_stream_that_begins_with_a_snapshot_anywhere_gives_the_verdicts_of_the_whole(seed: u64, seconds in 4_u64..60) {
        let span = Span { time: Duration::from_secs(seconds), bytes: 64 << 20 };
        let mut flight = Flight::new(defaults().unwrap(), LIMITS, "node", Some(span), Monotonic(0));
        let mut effects = Effects::default();
        simulate(&Settings::of_seed(seed)).inputs.into_iter().for_each(|input| flight.apply(input, &mut effects));
        let mut file = Vec::new();
        flight.recording().unwrap().write(&mut file).unwrap();
        let mut again = Vec::new();
        let (summary, _) = Replay::new(Reader::open(&file[..]).unwrap(), defaults().unwrap())
            .run(|told| {
                if let Told::Verdict(verdict) = told {
                    again.push(said(verdict));
                }
                true
            })
            .unwrap();
        let (first, _) = summary.span.unwrap();
        let whole: Vec<_> = effects.verdicts.iter().filter(|verdict| verdict.at >= first).map(|it| said(it)).collect();
        prop_assert_eq!(again, whole);
    }

    #[test]
    fn events_that_come_twice_or_are_lost_never_raise_confidence(
        seed: u64,
        twice in prop::collection::vec(0_usize..1_500, 0..60),
        lost in prop::collection::vec(0_usize..1_500, 0..20),
    ) {
        let settings = Settings::of_seed(seed);
        let whole = diagnoses(simulate(&settings).inputs);
        for (place, (cause, confidence)) in diagnoses(disturbed(simulate(&settings).inputs, &twice, &lost)) {
            let Some((before, Confidence::Low)) = whole.get(&place).filter(|(before, _)| *before == cause) else { continue };
            prop_assert_eq!(confidence, Confidence::Low, "{:?} {} {:?}", place, before, settings);
        }
    }
}
