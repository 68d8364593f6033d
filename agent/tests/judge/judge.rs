//! Holds what the core says of a simulated stream against what is true of it.

use std::{collections::BTreeMap, time::Duration};

use dislodge::{
    core::{Core, Effects, Input, Pace},
    diagnose::{Cause, Conclusion, Confidence, conclude as diagnose},
    event::clock::Monotonic,
    request::{
        RequestKey,
        tracker::{Limits, Parting},
    },
    rule::{RuleSet, alert::AlertState},
    simulate::{
        Simulation,
        truth::{Fate, Truth},
    },
    verdict::Verdict,
};

/// How late a diagnosis or an alert may be.
const LATE: Duration = Duration::from_secs(1);

/// Something that should not have been said, or should have been.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Disagreement {
    /// A cause that is not true, with high confidence.
    WrongCause { cause: Cause },
    /// An alert on a request of which its cause is not true.
    FalseAlert { rule: String, cause: Cause },
    /// It was stuck for so long, and what was said was this.
    NotDiagnosed { expected: &'static str, said: Cause },
    /// Its rule did not fire in time.
    NoAlert { rule: &'static str },
    /// A request that does not exist.
    NoSuchRequest,
}

/// Of which request, and when.
#[derive(Clone, Debug)]
pub(crate) struct Finding {
    pub(crate) request: RequestKey,
    pub(crate) at: Monotonic,
    pub(crate) what: Disagreement,
}

/// What was said in one stream.
#[derive(Debug, Default)]
pub(crate) struct Judgement {
    pub(crate) findings: Vec<Finding>,
    /// Truth and diagnosis of each request that was seen.
    pub(crate) pairs: Vec<(&'static str, &'static str)>,
    /// Alerts that were due and fired.
    pub(crate) alerts: u64,
    /// Stuck requests whose diagnosis was due and came.
    pub(crate) diagnosed: u64,
    /// Those that were stuck when what shows it could not be seen.
    pub(crate) not_shown: u64,
}

#[derive(Default)]
struct Said {
    last: Option<Cause>,
    wrong: Option<Cause>,
    was_due: bool,
    fired: BTreeMap<String, Monotonic>,
    is_found: bool,
}

/// Causes that accuse nobody: what is slow, what waits, what is not known.
fn is_silence(cause: Cause) -> bool {
    matches!(cause, Cause::Unknown | Cause::Slow | Cause::CapacityStall | Cause::HeldByOtherRank)
}

/// From when on the rule of a request's cause matches, as `rules/default.yaml` has it.
fn matches_from(cause: &str, truth: &Truth, shows: Monotonic, bootstrap_timeout: Duration) -> Option<Monotonic> {
    let seconds = Duration::from_secs;
    match cause {
        "RoomCollision" | "UpdateDropped" | "AbortIgnored" => Some(shows.max(truth.entered?)),
        "WarmupPinned" => Some(shows.max(truth.entered?.plus(seconds(300)))),
        "Parked" => Some(shows.max(truth.entered?.plus(seconds(30)))),
        "NeverBootstrapped" => Some(shows.max(truth.created.plus(bootstrap_timeout + seconds(30)))),
        _ => Some(shows),
    }
}

/// A core to judge by. It can be used again: making the rules takes longer than a schedule.
pub(crate) fn core(rules: RuleSet) -> Core {
    Core::new(rules, Limits { requests: 10_000, transfers: 10_000 })
}

/// Tells a core all of it, then that all servers are gone.
pub(crate) fn judge(simulation: Simulation, core: &mut Core) -> Judgement {
    let Simulation { inputs, truth, bootstrap_timeout } = simulation;
    let truths: BTreeMap<RequestKey, &Truth> = truth.iter().map(|truth| (truth.request, truth)).collect();
    let mut said: BTreeMap<RequestKey, Said> = BTreeMap::new();
    let mut judgement = Judgement::default();
    let mut ends = Monotonic(0);
    for input in inputs {
        let tick = if let Input::Tick { now, .. } = input { Some(now) } else { None };
        let mut effects = Effects::default();
        core.apply(input, &mut effects);
        let Some(now) = tick else { continue };
        ends = now;
        for verdict in effects.verdicts.iter().filter(|verdict| verdict.state == AlertState::Firing) {
            fired(verdict, &truths, &mut said, &mut judgement.findings);
        }
        for tracked in core.tracker().judged(now) {
            let diagnosis = diagnose(&tracked, now);
            let said = said.entry(tracked.key).or_default();
            let Some(truth) = truths.get(&tracked.key) else {
                find(&mut judgement.findings, said, tracked.key, now, Disagreement::NoSuchRequest);
                continue;
            };
            hear(truth, &diagnosis, said, now, &mut judgement.findings);
        }
    }
    for (key, mut said) in said {
        let Some(truth) = truths.get(&key) else { continue };
        conclude(truth, &mut said, core.evaluator().rules(), ends, bootstrap_timeout, &mut judgement);
    }
    let servers: Vec<_> = core.tracker().servers().map(|(process, _)| process).collect();
    for process in servers {
        core.apply(Input::Detach { process, why: Parting::Ended, at: ends }, &mut Effects::default());
    }
    core.apply(Input::Tick { now: ends, pace: Pace::As(None) }, &mut Effects::default());
    assert_eq!(core.active().count(), 0, "the next schedule begins with nothing");
    judgement
}

fn find(findings: &mut Vec<Finding>, said: &mut Said, request: RequestKey, at: Monotonic, what: Disagreement) {
    if !said.is_found {
        said.is_found = true;
        findings.push(Finding { request, at, what });
    }
}

fn fired(
    verdict: &Verdict,
    truths: &BTreeMap<RequestKey, &Truth>,
    said: &mut BTreeMap<RequestKey, Said>,
    findings: &mut Vec<Finding>,
) {
    let (key, at) = (verdict.request, verdict.at);
    let said = said.entry(key).or_default();
    said.fired.entry(verdict.rule.to_string()).or_insert(at);
    let is_true = truths.get(&key).is_some_and(|truth| {
        let of_server = [Cause::LoopStalled, Cause::RankDivergence];
        let is_for_good = truth.why_stuck().is_some_and(|stuck| of_server.iter().any(|it| it.name() == stuck.cause));
        // A server that goes on by itself is not to be started again.
        truth.is_true(verdict.cause.name(), at) && (is_for_good || !of_server.contains(&verdict.cause))
    });
    if !is_true {
        let what = Disagreement::FalseAlert { rule: verdict.rule.to_string(), cause: verdict.cause };
        find(findings, said, key, at, what);
    }
}

/// One diagnosis of one request.
fn hear(truth: &Truth, diagnosis: &Conclusion, said: &mut Said, now: Monotonic, findings: &mut Vec<Finding>) {
    let cause = diagnosis.cause;
    said.last = Some(cause);
    let is_wrong = diagnosis.confidence == Confidence::High && !is_silence(cause) && !truth.is_true(cause.name(), now);
    if is_wrong {
        said.wrong = Some(cause);
        find(findings, said, truth.request, now, Disagreement::WrongCause { cause });
    }
    let Some(stuck) = truth.why_stuck().filter(|stuck| stuck.seen && now >= stuck.shows.plus(LATE)) else { return };
    said.was_due = true;
    if cause.name() != stuck.cause {
        let what = Disagreement::NotDiagnosed { expected: stuck.cause, said: cause };
        find(findings, said, truth.request, now, what);
    }
}

fn conclude(
    truth: &Truth,
    said: &mut Said,
    rules: &RuleSet,
    ends: Monotonic,
    bootstrap_timeout: Duration,
    judgement: &mut Judgement,
) {
    let Some(last) = said.last else { return };
    let label = match &truth.fate {
        Fate::Healthy => "healthy",
        Fate::Slow => "slow",
        Fate::Backpressured => "backpressured",
        Fate::HeldByOtherRank => "held by another rank",
        Fate::Stuck(stuck) => stuck.cause,
    };
    judgement.diagnosed += u64::from(said.was_due);
    let Some(stuck) = truth.why_stuck() else {
        // Of one that is not stuck everything is silence that is true at its time.
        let heard = said.wrong.map_or("silence", Cause::name);
        judgement.pairs.push((label, heard));
        return;
    };
    judgement.not_shown += u64::from(!stuck.seen);
    if said.was_due {
        judgement.pairs.push((label, last.name()));
    }
    let Some((_, rule)) = rules.iter().find(|(_, rule)| &*rule.name == stuck.cause) else { return };
    let Some(from) = matches_from(stuck.cause, truth, stuck.shows, bootstrap_timeout).filter(|_| stuck.seen) else {
        return;
    };
    let due = from.plus(rule.hold + LATE);
    if due > ends || truth.ended.is_some_and(|ended| ended < due && stuck.cause != "UnsafeRelease") {
        return;
    }
    match said.fired.get(stuck.cause) {
        Some(at) if *at <= due => judgement.alerts += 1,
        _ => find(&mut judgement.findings, said, truth.request, due, Disagreement::NoAlert { rule: stuck.cause }),
    }
}
