//! Events and time in, verdicts out: everything between the ring and the sinks, without a kernel, a clock or a
//! network. It is told one [`Input`] after the other, by one method: what the pipeline tells it live, a replay tells it
//! again.

mod input;
mod ranks;
mod snapshot;

use std::{
    collections::{BTreeMap, HashMap},
    ops::RangeInclusive,
    sync::Arc,
    time::Duration,
};

use input::Stopwatch;
pub use input::{Effects, Input, Pace, Rules};
pub use snapshot::Snapshot;
pub(crate) use snapshot::write as write_snapshot;

use crate::{
    diagnose::{Cause, Diagnosis, diagnose},
    event::{ProcessKey, clock::Monotonic},
    request::{
        RequestKey,
        tracker::{Limits, Tracked, Tracker},
        transfers::Counted,
    },
    rule::{RuleIndex, RuleSet, alert::AlertState, evaluate::Evaluator, field::Subject},
    verdict::{ServerIdentity, Verdict},
};

/// How long evaluating the rules may take in a tick; what is left over comes first in the next.
pub const EVALUATION_BUDGET: Duration = Duration::from_millis(50);
/// How long a failure of a room is known after the room is over.
const FAILURES_KEPT: Duration = Duration::from_secs(300);
/// Pending and firing alerts at once; further ones are dropped and counted.
const MAX_ALERTS: usize = 100_000;

/// The state between the ring and the sinks.
pub struct Core {
    tracker: Tracker,
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

    /// Takes in one thing, and appends what came of it.
    pub fn apply(&mut self, input: Input, effects: &mut Effects) {
        let tracker = &mut self.tracker;
        match input {
            Input::Event(event) => tracker.apply(&event, &mut effects.changes),
            Input::Attach { process, identity, clock_offset } => {
                self.identities.insert(process, identity.into());
                tracker.attach(process, clock_offset);
            }
            Input::Detach { process, why, at } => {
                tracker.detach(process, why, at, &mut effects.changes);
                self.identities.remove(&process);
            }
            Input::Doubt { process, why } => tracker.needs_resync(process.pid, why),
            Input::Asked { process, epoch, why, at } => tracker.asked(process, epoch, why, at),
            Input::Watch { process, engine, at } => tracker.watch(process, engine, at),
            Input::NativeLost { process, at } => tracker.native_lost(process, at),
            Input::Observed { process, seen, at } => tracker.observed(process, seen, at),
            Input::DeviceError { process, error } => tracker.device_error(process, error),
            Input::ServerMetrics { process, gauges, at } => tracker.server_metrics(process, gauges, at),
            Input::Looked { process, polls, began, at } => tracker.looked(process, &polls, began, at),
            Input::RoomEnds { room, side, ends, at } => tracker.told_of_ends(room, side, ends, at),
            Input::Snapshot(snapshot) => self.restore(*snapshot),
            Input::Rules { rules: Rules::Here(rules), at } => {
                effects.verdicts.extend(self.replace_rules(*rules, at));
            }
            Input::Rules { rules: Rules::Elsewhere { .. }, .. } => {}
            Input::Tick { now, pace } => {
                tracker.compare_ranks(&ranks::groups(&self.identities, tracker), now);
                tracker.compare_ends(now);
                let stopwatch = Stopwatch::start(pace);
                effects.verdicts.extend(self.tick(now, &stopwatch));
                effects.stopped = stopwatch.stopped();
                self.tracker.prune(Monotonic(now.0.saturating_sub(FAILURES_KEPT.as_nanos() as u64)));
            }
        }
    }

    /// What is known of the node's requests.
    pub fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// What was counted of a server's transfers since the last time. No verdict depends on it.
    pub fn take_counted(&mut self, key: ProcessKey) -> Counted {
        self.tracker.take_counted(key)
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
    fn tick(&mut self, now: Monotonic, stopwatch: &Stopwatch) -> Vec<Arc<Verdict>> {
        let tracker = &self.tracker;
        let mut transitions = self.evaluator.end_others(tracker.judged_keys(now), now);
        let requests = tracker.judged_after(self.evaluator.reached(), now);
        let tick = self.evaluator.tick(requests, now, stopwatch.budget(), || stopwatch.elapsed());
        transitions.extend(tick.transitions);
        let subject = |key: RequestKey| Some(Subject::of(tracker.judge(key, now)?, now));
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

    /// Requests for which an alert fires, by cause: those of [`Cause::is_stuck`].
    pub fn stuck_by_cause(&self) -> HashMap<Cause, usize> {
        let stuck: BTreeMap<RequestKey, Cause> = self
            .firing()
            .map(|verdict| (verdict.request, verdict.cause))
            .filter(|(_, cause)| cause.is_stuck())
            .collect();
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
    fn replace_rules(&mut self, rules: RuleSet, now: Monotonic) -> Vec<Arc<Verdict>> {
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
        event::{Backend, Body, Event, Phase, Room},
        rule::load::{Source, load},
    };

    const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn an_alert_that_fires_shows_its_request_as_it_is_now_and_is_told_once() {
        let text = "rules: [{name: Any, when: inflight, severity: info}]";
        let mut core =
            Core::new(load(&[Source { file: "r.yaml", text }]).unwrap(), Limits { requests: 10, transfers: 10 });
        let attach = Input::Attach { process: PROCESS, identity: Box::default(), clock_offset: 0 };
        core.apply(attach, &mut Effects::default());
        let (room, sender) = (Room::Number(1), 1);
        let see = |core: &mut Core, seconds: u64, body: Body| {
            let at = Monotonic(seconds * SECOND);
            let event = Event { pid: 7, tid: 7, at, sequence: 1, detail_lost: false, body };
            core.apply(Input::Event(event), &mut Effects::default());
        };
        let tick = |core: &mut Core, seconds: u64| {
            let mut effects = Effects::default();
            let now = Monotonic(seconds * SECOND);
            core.apply(Input::Tick { now, pace: Pace::As(None) }, &mut effects);
            effects.verdicts
        };
        see(&mut core, 1, Body::Open { room, sender, backend: Backend::Nixl });
        see(&mut core, 1, Body::Phase { room, sender, old: None, new: Some(Phase::WaitingForInput) });
        see(&mut core, 1, Body::Enter { room, sender, rid: None, queue_length: 1 });
        let told = tick(&mut core, 2);
        assert_eq!(told.iter().map(|verdict| verdict.cause).collect::<Vec<_>>(), [Cause::Parked]);
        see(&mut core, 3, Body::Abort { room, sender, room_present: true });
        see(&mut core, 4, Body::Pass { queue_length: 1, passes: 9 });
        assert!(tick(&mut core, 5).is_empty(), "nothing new to tell");
        assert_eq!(core.stuck_by_cause(), HashMap::from([(Cause::AbortIgnored, 1)]));
        see(&mut core, 6, Body::Close { room, sender });
        let told = tick(&mut core, 7);
        assert_eq!(told.iter().map(|verdict| verdict.state).collect::<Vec<_>>(), [AlertState::Resolved]);
        assert!(core.active().next().is_none() && core.stuck_by_cause().is_empty());
    }
}
