//! Events and time in, verdicts out: everything between the ring and the sinks, without a kernel, a clock or a
//! network. The pipeline feeds it live; tests and replays feed it whatever they like.

use std::{
    collections::{BTreeMap, HashMap},
    ops::RangeInclusive,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    diagnose::{Cause, Diagnosis, diagnose},
    event::{Event, ProcessKey, clock::Monotonic},
    request::{
        RequestKey,
        tracker::{Change, Limits, Tracked, Tracker},
    },
    rule::{RuleIndex, RuleSet, alert::AlertState, evaluate::Evaluator, field::Subject},
    verdict::{ServerIdentity, Verdict},
};

/// How long evaluating the rules may take in a tick; what is left over comes first in the next.
const EVALUATION_BUDGET: Duration = Duration::from_millis(50);
/// Pending and firing alerts at once; further ones are dropped and counted.
const MAX_ALERTS: usize = 100_000;

/// The state between the ring and the sinks.
pub struct Core {
    /// What is known of the node's requests.
    pub tracker: Tracker,
    evaluator: Evaluator,
    identities: HashMap<ProcessKey, Arc<ServerIdentity>>,
    active: BTreeMap<(RequestKey, RuleIndex), Arc<Verdict>>,
}

impl Core {
    /// A core that evaluates `rules` and keeps so much per server.
    pub fn new(rules: RuleSet, limits: Limits) -> Self {
        Self {
            tracker: Tracker::new(limits),
            evaluator: Evaluator::new(rules, MAX_ALERTS),
            identities: HashMap::new(),
            active: BTreeMap::new(),
        }
    }

    /// Starts to track a server. `clock_offset` is its time namespace's, in nanoseconds.
    pub fn attach(&mut self, key: ProcessKey, identity: ServerIdentity, clock_offset: i64) {
        self.identities.insert(key, Arc::new(identity));
        self.tracker.attach(key, clock_offset);
    }

    /// Forgets a server; its requests end.
    pub fn detach(&mut self, key: ProcessKey, now: Monotonic) -> Vec<Change> {
        let mut changes = Vec::new();
        self.tracker.detach(key, now, &mut changes);
        self.identities.remove(&key);
        changes
    }

    /// Applies one event and appends what it changed.
    pub fn apply(&mut self, event: &Event, changes: &mut Vec<Change>) {
        self.tracker.apply(event, changes);
    }

    /// Who a server is.
    pub fn identity(&self, key: ProcessKey) -> Option<&Arc<ServerIdentity>> {
        self.identities.get(&key)
    }

    /// Diagnoses one request.
    pub fn diagnose(&self, key: RequestKey, now: Monotonic) -> Option<(Tracked<'_>, Diagnosis)> {
        let tracked = self.tracker.get(key)?;
        Some((tracked, diagnose(&tracked, now)))
    }

    /// Evaluates the rules and returns every alert that changed.
    pub fn tick(&mut self, now: Monotonic) -> Vec<Arc<Verdict>> {
        let began = Instant::now();
        let tracker = &self.tracker;
        let mut transitions = self.evaluator.end_others(tracker.keys(), now);
        let requests = tracker.requests_after(self.evaluator.reached());
        let tick = self.evaluator.tick(requests, now, EVALUATION_BUDGET, || began.elapsed());
        transitions.extend(tick.transitions);
        let subject = |key: RequestKey| Some(Subject::of(tracker.get(key)?, now));
        let mut verdicts = Vec::new();
        for transition in transitions {
            let place = (transition.key, transition.rule);
            let verdict = match (subject(transition.key), self.evaluator.rules().get(transition.rule)) {
                (Some(subject), Some(rule)) => {
                    let identity = self.identities.get(&transition.key.process).cloned().unwrap_or_default();
                    Some(Arc::new(Verdict::new(&transition, rule, &subject, identity)))
                }
                _ => self.active.get(&place).map(|active| Arc::new(Verdict::resolved(active, now))),
            };
            let Some(verdict) = verdict else { continue };
            match transition.state {
                AlertState::Resolved => {
                    self.active.remove(&place);
                }
                AlertState::Pending | AlertState::Firing => {
                    self.active.insert(place, Arc::clone(&verdict));
                }
            }
            verdicts.push(verdict);
        }
        // A pending alert whose rule stops matching ends without a word, as in Prometheus.
        let alerts = self.evaluator.alerts();
        if self.active.len() != alerts.len() {
            self.active.retain(|(key, rule), _| alerts.contains(*key, *rule));
        }
        // An alert is told once, as it was when it fired; who asks later is to see the request as it is now.
        for subject in tick.changed.into_iter().filter_map(subject) {
            for (_, verdict) in self.active.range_mut(all_of(subject.tracked.key)) {
                if let Some(changed) = verdict.refreshed(&subject) {
                    *verdict = Arc::new(changed);
                }
            }
        }
        verdicts
    }

    /// The alerts that fire.
    pub fn firing(&self) -> impl Iterator<Item = &Arc<Verdict>> {
        self.active.values().filter(|verdict| verdict.state == AlertState::Firing)
    }

    /// The alerts that are pending or fire.
    pub fn active(&self) -> impl Iterator<Item = &Arc<Verdict>> {
        self.active.values()
    }

    /// Requests for which an alert fires, by cause.
    pub fn stuck_by_cause(&self) -> HashMap<Cause, usize> {
        let stuck: BTreeMap<RequestKey, Cause> =
            self.firing().map(|verdict| (verdict.request, verdict.cause)).collect();
        let mut counts = HashMap::new();
        for cause in stuck.into_values() {
            *counts.entry(cause).or_default() += 1;
        }
        counts
    }

    /// The rules and their counts.
    pub fn evaluator(&self) -> &Evaluator {
        &self.evaluator
    }

    /// Takes other rules. An alert that fires goes on when its rule still exists and still matches; the others end.
    pub fn replace_rules(&mut self, rules: RuleSet, now: Monotonic) -> Vec<Arc<Verdict>> {
        let mut evaluator = Evaluator::new(rules, MAX_ALERTS);
        let mut kept = BTreeMap::new();
        let mut ended = Vec::new();
        for ((key, _), verdict) in std::mem::take(&mut self.active) {
            let same = evaluator.rules().iter().find(|(_, rule)| rule.name == verdict.rule).map(|(index, _)| index);
            match same {
                Some(index) => {
                    evaluator.restore(key, index, verdict.since, verdict.state == AlertState::Firing);
                    kept.insert((key, index), verdict);
                }
                None if verdict.state == AlertState::Firing => {
                    ended.push(Arc::new(Verdict::resolved(&verdict, now)));
                }
                None => {}
            }
        }
        self.evaluator = evaluator;
        self.active = kept;
        ended
    }
}

/// The places of every alert of a request.
fn all_of(key: RequestKey) -> RangeInclusive<(RequestKey, RuleIndex)> {
    (key, RuleIndex(0))..=(key, RuleIndex(u16::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        event::{Backend, Body, Phase, Room},
        rule::load::{Source, load},
    };

    const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn an_alert_that_fires_shows_its_request_as_it_is_now_and_is_told_once() {
        let text = "rules: [{name: Any, when: inflight, severity: info}]";
        let mut core =
            Core::new(load(&[Source { file: "r.yaml", text }]).unwrap(), Limits { requests: 10, transfers: 10 });
        core.attach(PROCESS, ServerIdentity::default(), 0);
        let (room, sender) = (Room::Number(1), 1);
        let see = |core: &mut Core, seconds: u64, body: Body| {
            let at = Monotonic(seconds * SECOND);
            let event = Event { pid: 7, tid: 7, at, sequence: 1, detail_lost: false, body };
            core.apply(&event, &mut Vec::new());
        };
        see(&mut core, 1, Body::Open { room, sender, backend: Backend::Nixl });
        see(&mut core, 1, Body::Phase { room, sender, old: None, new: Some(Phase::WaitingForInput) });
        see(&mut core, 1, Body::Enter { room, sender, rid: None, queue_length: 1 });
        let told = core.tick(Monotonic(2 * SECOND));
        assert_eq!(told.iter().map(|verdict| verdict.cause).collect::<Vec<_>>(), [Cause::Parked]);
        see(&mut core, 3, Body::Abort { room, sender, room_present: true });
        see(&mut core, 4, Body::Pass { queue_length: 1, passes: 9 });
        assert!(core.tick(Monotonic(5 * SECOND)).is_empty(), "nothing new to tell");
        assert_eq!(core.stuck_by_cause(), HashMap::from([(Cause::AbortIgnored, 1)]));
        see(&mut core, 6, Body::Close { room, sender });
        let told = core.tick(Monotonic(7 * SECOND));
        assert_eq!(told.iter().map(|verdict| verdict.state).collect::<Vec<_>>(), [AlertState::Resolved]);
        assert!(core.active().next().is_none() && core.stuck_by_cause().is_empty());
    }
}
