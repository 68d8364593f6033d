//! What each rule says of a request: since when it fires or is pending, when it would, or why it does not match.

use std::{collections::BTreeMap, time::Duration};

use super::{
    answer::{RuleOutlook, RuleState},
    state::Times,
};
use crate::{
    core::Core,
    event::clock::Monotonic,
    request::tracker::Tracked,
    rule::{
        Rule, RuleIndex, RuleSet,
        alert::AlertState,
        condition::{Scope, root},
        field::Subject,
    },
    verdict::Verdict,
};

/// How far ahead is looked.
const HORIZON: Duration = Duration::from_secs(1_800);
/// In which steps.
const STEP: Duration = Duration::from_secs(1);
/// Conditions that are evaluated for that; where there are many rules, the look ahead is shorter.
const MAX_EVALUATIONS: usize = 100_000;
/// A scheduler that made a pass within this time goes on making passes.
const TURNS_WITHIN: Duration = Duration::from_secs(10);
/// Passes that a scheduler tells of in a second, about.
const PASSES: u64 = 10;
/// For how long a request is shown to rules that gave its pages back too early (`request::process::released`).
const SHOWN_FOR: Duration = Duration::from_secs(60);

/// Every rule of `core`, for one request at `now`.
pub fn outlook(core: &Core, tracked: &Tracked<'_>, now: Monotonic, times: &Times<'_>) -> Vec<RuleOutlook> {
    let rules = core.evaluator().rules();
    let active: BTreeMap<&str, &Verdict> =
        core.active().filter(|verdict| verdict.request == tracked.key).map(|it| (&*it.rule, &**it)).collect();
    let ahead = look_ahead(rules, tracked, now);
    let subject = Subject::of(*tracked, now);
    let of = |(index, rule): (RuleIndex, &Rule)| {
        let state = match (active.get(&*rule.name), ahead.get(&index)) {
            (Some(verdict), _) => alert(verdict, rule, times),
            (None, Some(Ahead { matches, fires })) => {
                RuleState::Later { matches: times.moment(*matches), fires: fires.map(|at| times.moment(at)) }
            }
            (None, None) => RuleState::No { because: why_not(rule, &subject) },
        };
        RuleOutlook {
            rule: rule.name.to_string(),
            severity: rule.severity.name().to_owned(),
            action: rule.action.name().to_owned(),
            for_seconds: rule.hold.as_secs_f64(),
            state,
        }
    };
    rules.iter().map(of).collect()
}

fn alert(verdict: &Verdict, rule: &Rule, times: &Times<'_>) -> RuleState {
    let since = times.moment(verdict.since);
    match verdict.state {
        AlertState::Firing => RuleState::Firing { since, fired: times.moment(verdict.at) },
        AlertState::Pending | AlertState::Resolved => {
            RuleState::Pending { since, fires: times.moment(verdict.since.plus(rule.hold)) }
        }
    }
}

fn why_not(rule: &Rule, subject: &Subject<'_>) -> Vec<String> {
    let because = rule.condition.why_not(subject);
    if because.is_empty() { vec!["its condition is false".to_owned()] } else { because }
}

/// When a rule would match and fire.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    matches: Monotonic,
    fires: Option<Monotonic>,
}

/// Which rules would match, and when, if nothing happens from `now` on but passes of a scheduler that makes them now.
fn look_ahead(rules: &RuleSet, tracked: &Tracked<'_>, now: Monotonic) -> BTreeMap<RuleIndex, Ahead> {
    let mut server = tracked.server.clone();
    let turns = server.turned.is_some_and(|turned| now.since(turned) < TURNS_WITHIN) && !server.paused;
    let ended = tracked.request.ended.as_ref().map(|ended| ended.at);
    let end = ended.map_or(now.plus(HORIZON), |at| at.plus(SHOWN_FOR));
    let root = root();
    let mut since: BTreeMap<RuleIndex, Monotonic> = BTreeMap::new();
    let mut ahead: BTreeMap<RuleIndex, Ahead> = BTreeMap::new();
    let (mut at, mut evaluations) = (now, 0);
    while at <= end && evaluations < MAX_EVALUATIONS {
        if turns {
            server.turned = server.turned.max(Some(at));
            server.queue_length = server.queue_length.map(|(length, _)| (length, at));
            server.passes = tracked.server.passes.saturating_add(now_to(now, at) * PASSES);
        }
        let subject = Subject::of(Tracked { server: &server, ..*tracked }, at);
        let mut matched = Vec::new();
        for (index, rule) in rules.for_cause(subject.conclusion.cause) {
            evaluations += 1;
            if holds(rule, &subject, &root) {
                matched.push(index);
                let since = *since.entry(index).or_insert(at);
                let known = ahead.entry(index).or_insert(Ahead { matches: since, fires: None });
                if known.fires.is_none() && at.since(since) >= rule.hold {
                    *known = Ahead { matches: since, fires: Some(at) };
                }
            }
        }
        since.retain(|index, _| matched.contains(index));
        at = at.plus(STEP);
        evaluations += 1;
    }
    ahead
}

fn now_to(now: Monotonic, at: Monotonic) -> u64 {
    at.since(now).as_secs()
}

fn holds(rule: &Rule, subject: &Subject<'_>, root: &cel::Context<'static, 'static>) -> bool {
    rule.condition.decide(subject).unwrap_or_else(|| rule.condition.matches(&Scope::of(root, subject)).unwrap_or(false))
}
