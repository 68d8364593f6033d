//! Every rule over every request that may meet one, within a budget of time per tick.

use std::time::Duration;

use cel::Context;

use super::{
    RuleIndex, RuleSet,
    alert::{Alerts, Look, Transition},
    condition::{Scope, root},
    field::Subject,
};
use crate::{
    diagnose::cause,
    event::clock::Monotonic,
    request::{RequestKey, tracker::Tracked},
};

/// Evaluated requests between two looks at the clock.
const STRIDE: usize = 64;

/// What happened in a tick.
#[derive(Debug, Default)]
pub struct Tick {
    /// Alerts that changed their state.
    pub transitions: Vec<Transition>,
    /// Requests with an alert that look otherwise than in the tick before.
    pub changed: Vec<RequestKey>,
    /// Requests that were evaluated: every other one that was reached can't meet a rule.
    pub evaluated: usize,
    /// Whether the budget was spent before every request was reached; the next tick begins with the others.
    pub stopped: bool,
}

/// Rules with the state of their alerts.
pub struct Evaluator {
    rules: RuleSet,
    alerts: Alerts,
    root: Context<'static, 'static>,
    errors: Vec<u64>,
    evaluated: u64,
    overruns: u64,
    reached: Option<RequestKey>,
}

impl Evaluator {
    /// Rules without any alert yet, and never more than `max_alerts` at once.
    pub fn new(rules: RuleSet, max_alerts: usize) -> Self {
        let errors = vec![0; rules.len()];
        Self { rules, alerts: Alerts::new(max_alerts), root: root(), errors, evaluated: 0, overruns: 0, reached: None }
    }

    /// The last request that the tick before reached, when it did not reach all.
    pub fn reached(&self) -> Option<RequestKey> {
        self.reached
    }

    /// Ends the alerts of requests that are not among `live`, which is in order.
    pub fn end_others(&mut self, live: impl Iterator<Item = RequestKey>, now: Monotonic) -> Vec<Transition> {
        let mut live = live.peekable();
        let is_gone = |key: &RequestKey| {
            while live.next_if(|live| live < key).is_some() {}
            live.peek() != Some(key)
        };
        let gone: Vec<RequestKey> = self.alerts.keys().filter(is_gone).collect();
        gone.into_iter().flat_map(|key| self.alerts.forget(key, now)).collect()
    }

    /// Evaluates those of `requests` that may meet a rule or have an alert, until `elapsed` says that `budget` is spent.
    /// The requests come in order, from the one after [`Evaluator::reached`] on, round to that one; at least some are
    /// evaluated in every tick. `elapsed` is the time since the tick began.
    pub fn tick<'a>(
        &mut self,
        requests: impl Iterator<Item = Tracked<'a>>,
        now: Monotonic,
        budget: Duration,
        elapsed: impl Fn() -> Duration,
    ) -> Tick {
        let mut tick = Tick::default();
        let mut reached = None;
        for tracked in requests {
            if !self.concerns(&tracked, now) {
                continue;
            }
            if tick.evaluated > 0 && tick.evaluated.is_multiple_of(STRIDE) && elapsed() >= budget {
                tick.stopped = true;
                self.overruns += 1;
                break;
            }
            let subject = Subject::of(tracked, now);
            self.evaluate(tracked.key, &subject, &mut tick.transitions);
            let request = tracked.request;
            let look = Look {
                conclusion: subject.conclusion,
                phase: request.phase,
                room: request.room,
                waiting_since: request.waiting_since(),
                has_rid: request.rid.is_some(),
            };
            if self.alerts.looks(tracked.key, look) {
                tick.changed.push(tracked.key);
            }
            tick.evaluated += 1;
            reached = Some(tracked.key);
        }
        self.reached = reached.filter(|_| tick.stopped);
        tick
    }

    /// Whether a request has to be evaluated: it has an alert, or may meet a rule by its cause and its age.
    fn concerns(&self, tracked: &Tracked<'_>, now: Monotonic) -> bool {
        let age = now.since(tracked.request.oldest()).as_secs_f64();
        self.rules.may_match(cause(tracked, now), age) || self.alerts.has(tracked.key)
    }

    /// Evaluates one request and appends what changed.
    pub fn evaluate(&mut self, key: RequestKey, subject: &Subject<'_>, transitions: &mut Vec<Transition>) {
        self.evaluated += 1;
        let cause = subject.conclusion.cause;
        let age = subject.age().as_secs_f64();
        let mut scope = None;
        let mut matched = Vec::new();
        for (index, rule) in self.rules.for_cause(cause) {
            if !rule.condition.prefilter().allows(cause, age) {
                continue;
            }
            let holds = rule.condition.decide(subject).unwrap_or_else(|| {
                let scope = scope.get_or_insert_with(|| Scope::of(&self.root, subject));
                rule.condition.matches(scope).unwrap_or_else(|_| {
                    if let Some(errors) = self.errors.get_mut(usize::from(index.0)) {
                        *errors += 1;
                    }
                    false
                })
            });
            if holds {
                matched.push((index, rule.hold));
            }
        }
        self.alerts.observe(key, &matched, subject.now, transitions);
    }

    /// Takes over an alert of an earlier set of rules.
    pub fn restore(&mut self, key: RequestKey, rule: RuleIndex, since: Monotonic, firing: bool) {
        self.alerts.restore(key, rule, since, firing);
    }

    /// Forgets every alert; the next tick begins after `reached`.
    pub fn reset(&mut self, reached: Option<RequestKey>) {
        self.alerts.clear();
        self.reached = reached;
    }

    /// Ends the alerts of a request that has ended.
    pub fn forget(&mut self, key: RequestKey, now: Monotonic) -> Vec<Transition> {
        self.alerts.forget(key, now)
    }

    /// The rules.
    pub fn rules(&self) -> &RuleSet {
        &self.rules
    }

    /// The alerts.
    pub fn alerts(&self) -> &Alerts {
        &self.alerts
    }

    /// How often each rule could not be evaluated: integers overflowed, or were divided by zero.
    pub fn errors(&self) -> impl Iterator<Item = (RuleIndex, u64)> {
        (0..).map(RuleIndex).zip(self.errors.iter().copied())
    }

    /// Requests that were evaluated, each as often as it was.
    pub fn evaluated(&self) -> u64 {
        self.evaluated
    }

    /// Ticks that did not reach every request within their budget.
    pub fn overruns(&self) -> u64 {
        self.overruns
    }
}
