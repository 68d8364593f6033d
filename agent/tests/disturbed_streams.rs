//! The core on whole streams of simulated servers that are cut anywhere, out of order, with events twice, with events lost.
//!
//! A loss that is counted is told at the next tick, as the loop tells it. One that nobody counts cannot be made good: then
//! nothing panics, and that is all.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "judge/judge.rs"]
mod judge;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use dislodge::{
    core::{Core, Effects, Input},
    diagnose::{Cause, Conclusion, Confidence, conclude, diagnose},
    event::clock::Monotonic,
    record::{
        flight::Flight,
        reader::Reader,
        recorder::{Recording, Span},
        replay::{Replay, Told},
    },
    request::{RequestKey, ResyncReason, tracker::Limits},
    rule::{alert::AlertState, load::defaults},
    simulate::{Settings, Simulation, Support, recording_from, simulate},
    verdict::Verdict,
};
use judge::{Disagreement, Finding};
use proptest::prelude::*;

const LIMITS: Limits = Limits { requests: 10_000, transfers: 10_000 };
/// Longer than most streams; what is beyond their end does nothing.
const PLACES: usize = 1_500;

/// What a verdict says; its evidence may be worded anew after a snapshot (docs/recording.md).
#[derive(Debug, PartialEq)]
struct Said {
    rule: String,
    state: AlertState,
    request: RequestKey,
    conclusion: Conclusion,
    since: Monotonic,
    at: Monotonic,
}

fn said(verdict: &Verdict) -> Said {
    Said {
        rule: verdict.rule.to_string(),
        state: verdict.state,
        request: verdict.request,
        conclusion: verdict.diagnosis.conclusion(),
        since: verdict.since,
        at: verdict.at,
    }
}

/// The verdicts of a replay, and when its first tick was.
fn replayed(recording: &Recording) -> (Vec<Said>, Option<Monotonic>) {
    let mut file = Vec::new();
    recording.write(&mut file).unwrap();
    let mut verdicts = Vec::new();
    let (summary, _) = Replay::new(Reader::open(&file[..]).unwrap(), defaults().unwrap())
        .run(|told| {
            if let Told::Verdict(verdict) = told {
                verdicts.push(said(verdict));
            }
            true
        })
        .unwrap();
    (verdicts, summary.span.map(|(first, _)| first))
}

fn verdicts(inputs: Vec<Input>) -> Effects {
    let (mut core, mut effects) = (Core::new(defaults().unwrap(), LIMITS), Effects::default());
    inputs.into_iter().for_each(|input| core.apply(input, &mut effects));
    effects
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
            let diagnosis = conclude(&tracked, now);
            ((now, tracked.key), (diagnosis.cause, diagnosis.confidence))
        }));
    }
    all
}

/// What is done to a stream.
#[derive(Clone, Debug)]
struct Disturbance {
    twice: Vec<usize>,
    lost: Vec<usize>,
    /// Places of events that come so many places later.
    late: Vec<(usize, usize)>,
}

/// How far events may be out of order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// In any.
    Any,
    /// Those of one thread are in theirs: it puts one after the other into the ring. What other threads do at the same time may
    /// come before or after.
    OfThreads,
}

fn disturbances() -> impl Strategy<Value = Disturbance> {
    let places = |most| prop::collection::vec(0..PLACES, 0..most);
    let late = prop::collection::vec((0..PLACES, 1..6_usize), 0..40);
    (places(60), places(20), late).prop_map(|(twice, lost, late)| Disturbance { twice, lost, late })
}

impl Disturbance {
    /// The stream as it comes then. What is late was put into the ring between the same two looks at it; what was lost is noticed
    /// at the next tick.
    fn done_to(&self, mut inputs: Vec<Input>, order: Order) -> Vec<Input> {
        for (place, by) in &self.late {
            let Some([Input::Event(first), passed @ ..]) = inputs.get(*place..=place + by) else { continue };
            let thread = (first.pid, first.tid);
            let may_pass = |input: &Input| matches!(input, Input::Event(event) if order == Order::Any || (event.pid, event.tid) != thread);
            if passed.iter().all(may_pass) {
                inputs[*place..=place + by].rotate_left(1);
            }
        }
        let (mut disturbed, mut doubts) = (Vec::new(), BTreeSet::new());
        let mut processes = BTreeMap::new();
        for (place, input) in inputs.into_iter().enumerate() {
            match input {
                Input::Event(event) if self.lost.contains(&place) => {
                    doubts.insert(event.pid);
                }
                Input::Event(event) => {
                    if self.twice.contains(&place) {
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
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_stream_that_begins_with_a_snapshot_anywhere_gives_the_verdicts_of_the_whole(seed: u64, seconds in 4_u64..60) {
        let span = Span { time: Duration::from_secs(seconds), bytes: 64 << 20 };
        let mut flight = Flight::new(defaults().unwrap(), LIMITS, "node", Some(span), Monotonic(0));
        let mut effects = Effects::default();
        simulate(&Settings::of_seed(seed)).inputs.into_iter().for_each(|input| flight.apply(input, &mut effects));
        let (again, first) = replayed(&flight.recording().unwrap());
        let whole: Vec<_> =
            effects.verdicts.iter().filter(|verdict| Some(verdict.at) >= first).map(|verdict| said(verdict)).collect();
        prop_assert_eq!(again, whole);
    }

    #[test]
    fn a_stream_that_is_cut_in_two_between_any_two_inputs_gives_the_verdicts_of_the_whole(seed: u64, place: usize) {
        let inputs = || simulate(&Settings::of_seed(seed)).inputs;
        let first = place % inputs().len();
        let (again, first) = replayed(&recording_from(inputs(), first, defaults().unwrap()));
        let whole: Vec<_> =
            verdicts(inputs()).verdicts.iter().filter(|it| first.is_some_and(|at| it.at >= at)).map(|verdict| said(verdict)).collect();
        prop_assert_eq!(again, whole);
    }

    #[test]
    fn events_that_come_twice_out_of_order_or_never_do_not_raise_confidence(seed: u64, disturbance in disturbances()) {
        let settings = Settings::of_seed(seed);
        let whole = diagnoses(simulate(&settings).inputs);
        for (place, (cause, confidence)) in diagnoses(disturbance.done_to(simulate(&settings).inputs, Order::Any)) {
            let Some((before, Confidence::Low)) = whole.get(&place).filter(|(before, _)| *before == cause) else { continue };
            prop_assert_eq!(confidence, Confidence::Low, "{:?} {} {:?}", place, before, settings);
        }
    }

    #[test]
    fn events_that_come_twice_out_of_order_or_never_name_no_wrong_cause_with_high_confidence(
        seed: u64,
        disturbance in disturbances(),
    ) {
        let settings = Settings::of_seed(seed);
        let simulation = simulate(&settings);
        prop_assume!(settings.family.support() == Support::Simulated);
        let disturbed = Simulation { inputs: disturbance.done_to(simulation.inputs, Order::OfThreads), ..simulation };
        let judgement = judge::judge(disturbed, &mut judge::core(defaults().unwrap()));
        for Finding { request, at, what } in judgement.findings {
            let is_wrong = matches!(what, Disagreement::WrongCause { .. } | Disagreement::FalseAlert { .. });
            prop_assert!(!is_wrong, "{:?} of {:?} at {:?}: {:?}", what, request, at, settings);
        }
    }

    /// Whatever is lost, doubled and mixed up over the whole stream, and not counted: there is an answer to every tick.
    #[test]
    fn nothing_panics_whatever_is_lost_or_out_of_order_without_being_counted(
        seed: u64,
        order in prop::collection::vec((0..PLACES, 0..PLACES), 0..200),
        lost in prop::collection::vec(0..PLACES, 0..100),
    ) {
        let mut inputs = simulate(&Settings::of_seed(seed)).inputs;
        let ticks = inputs.iter().filter(|input| matches!(input, Input::Tick { .. })).count();
        for (one, other) in order {
            if one.max(other) < inputs.len() {
                inputs.swap(one, other);
            }
        }
        let mut place = 0;
        inputs.retain(|input| {
            place += 1;
            matches!(input, Input::Tick { .. }) || !lost.contains(&place)
        });
        let mut answers = 0;
        let mut core = Core::new(defaults().unwrap(), LIMITS);
        for input in inputs {
            let tick = if let Input::Tick { now, .. } = input { Some(now) } else { None };
            core.apply(input, &mut Effects::default());
            let Some(now) = tick else { continue };
            answers += 1;
            let evidence = core.tracker().judged(now).flat_map(|tracked| diagnose(&tracked, now).evidence);
            evidence.for_each(|evidence| assert!(!evidence.fact.to_string().is_empty()));
        }
        prop_assert_eq!(answers, ticks);
    }
}
