//! Every rule over every request, within a budget of time per tick.

use std::time::Duration;

use cel::Context;

use super::{
    RuleIndex, RuleSet,
    alert::{Alerts, Transition},
    condition::{Scope, root},
    field::Subject,
};
use crate::{event::clock::Monotonic, request::RequestKey};

/// Requests between two looks at the clock.
const STRIDE: usize = 64;

/// What happened in a tick.
#[derive(Debug, Default)]
pub struct Tick {
    /// Alerts that changed their state.
    pub transitions: Vec<Transition>,
    /// Requests that were looked at.
    pub evaluated: usize,
    /// Requests that the budget did not reach; the next tick begins with them.
    pub left: usize,
}

/// Rules with the state of their alerts.
pub struct Evaluator {
    rules: RuleSet,
    alerts: Alerts,
    root: Context<'static, 'static>,
    errors: Vec<u64>,
    overruns: u64,
    reached: Option<RequestKey>,
}

impl Evaluator {
    /// Rules without any alert yet, and never more than `max_alerts` at once.
    pub fn new(rules: RuleSet, max_alerts: usize) -> Self {
        let errors = vec![0; rules.len()];
        Self { rules, alerts: Alerts::new(max_alerts), root: root(), errors, overruns: 0, reached: None }
    }

    /// Evaluates the requests of `keys` until `elapsed` says that `budget` is spent. What is left over is counted and
    /// comes first in the next tick; at least some requests are evaluated in every tick. Alerts of requests that are
    /// not among `keys` any more end.
    ///
    /// `subject` shows a request as it is now; nothing when it is gone. `elapsed` is the time since the tick began.
    pub fn tick<'a>(
        &mut self,
        mut keys: Vec<RequestKey>,
        now: Monotonic,
        subject: impl Fn(RequestKey) -> Option<Subject<'a>>,
        budget: Duration,
        elapsed: impl Fn() -> Duration,
    ) -> Tick {
        keys.sort_unstable();
        let mut tick = Tick::default();
        for gone in self.alerts.keys().into_iter().filter(|key| keys.binary_search(key).is_err()) {
            tick.transitions.extend(self.alerts.forget(gone, now));
        }
        if let Some(reached) = self.reached.take() {
            let next = keys.partition_point(|key| *key <= reached);
            keys.rotate_left(next);
        }
        for stride in keys.chunks(STRIDE) {
            if tick.evaluated > 0 && elapsed() >= budget {
                tick.left = keys.len() - tick.evaluated;
                self.overruns += 1;
                break;
            }
            for key in stride {
                match subject(*key) {
                    Some(subject) => self.evaluate(*key, &subject, &mut tick.transitions),
                    None => tick.transitions.extend(self.alerts.forget(*key, now)),
                }
            }
            tick.evaluated += stride.len();
            self.reached = stride.last().copied();
        }
        if tick.left == 0 {
            self.reached = None;
        }
        tick
    }

    /// Evaluates one request and appends what changed.
    pub fn evaluate(&mut self, key: RequestKey, subject: &Subject<'_>, transitions: &mut Vec<Transition>) {
        let age = subject.age();
        let has_alerts = !self.alerts.is_empty() && self.alerts.of(key).next().is_some();
        let mut scope = None;
        for (index, rule) in self.rules.iter() {
            let matched = if rule.condition.prefilter().allows(subject.diagnosis.cause, age) {
                let scope = scope.get_or_insert_with(|| Scope::of(&self.root, subject));
                rule.condition.matches(scope).unwrap_or_else(|_| {
                    if let Some(errors) = self.errors.get_mut(usize::from(index.0)) {
                        *errors += 1;
                    }
                    false
                })
            } else {
                false
            };
            if matched || has_alerts {
                transitions.extend(self.alerts.observe(key, index, rule.hold, matched, subject.now));
            }
        }
    }

    /// Takes over an alert of an earlier set of rules.
    pub fn restore(&mut self, key: RequestKey, rule: RuleIndex, since: Monotonic, firing: bool) {
        self.alerts.restore(key, rule, since, firing);
    }

    /// The last request of a tick that could not reach all.
    pub fn reached(&self) -> Option<RequestKey> {
        self.reached
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

    /// Ticks that did not reach every request within their budget.
    pub fn overruns(&self) -> u64 {
        self.overruns
    }
}
