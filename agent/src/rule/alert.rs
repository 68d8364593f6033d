//! Matches over time → alerts, per rule and request: inactive → pending → firing → resolved, as in Prometheus.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    time::Duration,
};

use serde::Serialize;

use super::RuleIndex;
use crate::{
    diagnose::Conclusion,
    event::{Phase, Room, clock::Monotonic},
    request::RequestKey,
};

/// State of an alert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AlertState {
    /// The rule matches, not for long enough yet.
    Pending,
    /// The rule has matched for as long as it says.
    Firing,
    /// It fired, and the rule does not match any more or the request has ended.
    Resolved,
}

impl AlertState {
    /// Its name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Firing => "firing",
            Self::Resolved => "resolved",
        }
    }
}

/// An alert's change of state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The request.
    pub key: RequestKey,
    /// The rule.
    pub rule: RuleIndex,
    /// The new state.
    pub state: AlertState,
    /// Since when the rule had matched.
    pub since: Monotonic,
    /// When the state changed.
    pub at: Monotonic,
}

#[derive(Clone, Copy, Debug)]
struct Active {
    rule: RuleIndex,
    since: Monotonic,
    firing: bool,
}

/// The alerts of one request, in the order of their rules, and what it looked like when they were evaluated last.
#[derive(Debug, Default)]
struct Alerted {
    active: Vec<Active>,
    look: Option<Look>,
}

/// What people are shown of a request that has an alert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// What its diagnosis says.
    pub conclusion: Conclusion,
    /// What it polled last.
    pub phase: Option<Phase>,
    /// Its room: another one where a serial was opened again.
    pub room: Room,
    /// Since when it waits.
    pub waiting_since: Monotonic,
    /// Whether its id is known: it is never another one later.
    pub has_rid: bool,
}

/// Every pending and firing alert.
#[derive(Debug)]
pub struct Alerts {
    requests: BTreeMap<RequestKey, Alerted>,
    count: usize,
    limit: usize,
    dropped: u64,
}

impl Alerts {
    /// No alert yet, and never more than `limit` at once: further ones are dropped and counted.
    pub fn new(limit: usize) -> Self {
        Self { requests: BTreeMap::new(), count: 0, limit, dropped: 0 }
    }

    /// Takes over an alert of an earlier set of rules, as it is.
    pub fn restore(&mut self, key: RequestKey, rule: RuleIndex, since: Monotonic, firing: bool) {
        let active = &mut self.requests.entry(key).or_default().active;
        self.count -= active.len();
        active.retain(|active| active.rule != rule);
        active.push(Active { rule, since, firing });
        active.sort_unstable_by_key(|active| active.rule);
        self.count += active.len();
    }

    /// Forgets every alert without a word.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.count = 0;
    }

    /// Takes in which rules match `key` now, each with how long it must until it fires, in their order; no other one
    /// matches. Appends what changed. A pending alert whose rule stops matching ends without a word, as in Prometheus.
    pub fn observe(
        &mut self,
        key: RequestKey,
        matched: &[(RuleIndex, Duration)],
        now: Monotonic,
        transitions: &mut Vec<Transition>,
    ) {
        if matched.is_empty() && self.requests.is_empty() {
            return;
        }
        let mut entry = match self.requests.entry(key) {
            Entry::Occupied(entry) => entry,
            Entry::Vacant(_) if matched.is_empty() => return,
            Entry::Vacant(entry) => entry.insert_entry(Alerted::default()),
        };
        let active = &mut entry.get_mut().active;
        let mut change = |rule, state, since| transitions.push(Transition { key, rule, state, since, at: now });
        active.retain(|active| {
            let goes_on = matched.iter().any(|(rule, _)| *rule == active.rule);
            if !goes_on {
                self.count -= 1;
                if active.firing {
                    change(active.rule, AlertState::Resolved, active.since);
                }
            }
            goes_on
        });
        for (place, (rule, hold)) in matched.iter().enumerate() {
            match active.iter_mut().find(|active| active.rule == *rule) {
                Some(active) if active.firing || now.since(active.since) < *hold => {}
                Some(active) => {
                    active.firing = true;
                    change(*rule, AlertState::Firing, active.since);
                }
                None if self.count >= self.limit => self.dropped += 1,
                None => {
                    let firing = hold.is_zero();
                    active.insert(place.min(active.len()), Active { rule: *rule, since: now, firing });
                    self.count += 1;
                    change(*rule, if firing { AlertState::Firing } else { AlertState::Pending }, now);
                }
            }
        }
        if active.is_empty() {
            entry.remove();
        }
    }

    /// Takes in what a request looks like. Whether it has an alert and looks otherwise than before.
    pub fn looks(&mut self, key: RequestKey, look: Look) -> bool {
        let alerted = self.requests.get_mut(&key);
        alerted.is_some_and(|alerted| alerted.look.replace(look) != Some(look))
    }

    /// Ends every alert of a request that has ended: those that fired are resolved.
    pub fn forget(&mut self, key: RequestKey, now: Monotonic) -> Vec<Transition> {
        let mut transitions = Vec::new();
        self.observe(key, &[], now, &mut transitions);
        transitions
    }

    /// The alerts of a request: their rules, and whether they fire.
    pub fn of(&self, key: RequestKey) -> impl Iterator<Item = (RuleIndex, bool)> {
        let active = self.requests.get(&key).map_or(&[][..], |alerted| &alerted.active);
        active.iter().map(|active| (active.rule, active.firing))
    }

    /// How many alerts are pending or fire.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether no alert is pending or fires.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether `rule` has a pending or firing alert for a request.
    pub fn contains(&self, key: RequestKey, rule: RuleIndex) -> bool {
        self.of(key).any(|(other, _)| other == rule)
    }

    /// Every request that has an alert, in order.
    pub fn keys(&self) -> impl Iterator<Item = RequestKey> {
        self.requests.keys().copied()
    }

    /// Whether a request has an alert.
    pub fn has(&self, key: RequestKey) -> bool {
        self.requests.contains_key(&key)
    }

    /// How many alerts of each rule are pending, and how many fire.
    pub fn counts(&self) -> BTreeMap<RuleIndex, AlertCounts> {
        let mut counts: BTreeMap<RuleIndex, AlertCounts> = BTreeMap::new();
        for active in self.requests.values().flat_map(|alerted| &alerted.active) {
            let of_rule = counts.entry(active.rule).or_default();
            if active.firing { of_rule.firing += 1 } else { of_rule.pending += 1 }
        }
        counts
    }

    /// How often an alert could not become pending because there were too many.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

/// Alerts of one rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AlertCounts {
    /// Pending.
    pub pending: usize,
    /// Firing.
    pub firing: usize,
}
