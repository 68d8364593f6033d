//! Matches over time → alerts, per rule and request: inactive → pending → firing → resolved, as in Prometheus.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    time::Duration,
};

use serde::Serialize;

use super::RuleIndex;
use crate::{event::clock::Monotonic, request::RequestKey};

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
    since: Monotonic,
    firing: bool,
}

/// Every pending and firing alert.
#[derive(Debug)]
pub struct Alerts {
    active: BTreeMap<(RequestKey, RuleIndex), Active>,
    limit: usize,
    dropped: u64,
}

impl Alerts {
    /// No alert yet, and never more than `limit` at once: further ones are dropped and counted.
    pub fn new(limit: usize) -> Self {
        Self { active: BTreeMap::new(), limit, dropped: 0 }
    }

    /// Takes over an alert of an earlier set of rules, as it is.
    pub fn restore(&mut self, key: RequestKey, rule: RuleIndex, since: Monotonic, firing: bool) {
        self.active.insert((key, rule), Active { since, firing });
    }

    /// Forgets every alert without a word.
    pub fn clear(&mut self) {
        self.active.clear();
    }

    /// Takes in whether `rule`, which fires after matching for `hold`, matches `key` now. A pending alert whose rule
    /// stops matching ends without a word, as in Prometheus.
    pub fn observe(
        &mut self,
        key: RequestKey,
        rule: RuleIndex,
        hold: Duration,
        matched: bool,
        now: Monotonic,
    ) -> Option<Transition> {
        let full = self.active.len() >= self.limit;
        let change = |state, since| Some(Transition { key, rule, state, since, at: now });
        match (self.active.entry((key, rule)), matched) {
            (Entry::Vacant(_), false) => None,
            (Entry::Vacant(_), true) if full => {
                self.dropped += 1;
                None
            }
            (Entry::Vacant(entry), true) => {
                let firing = hold.is_zero();
                entry.insert(Active { since: now, firing });
                change(if firing { AlertState::Firing } else { AlertState::Pending }, now)
            }
            (Entry::Occupied(entry), false) => {
                let active = entry.remove();
                if active.firing { change(AlertState::Resolved, active.since) } else { None }
            }
            (Entry::Occupied(mut entry), true) => {
                let active = entry.get_mut();
                if active.firing || now.since(active.since) < hold {
                    return None;
                }
                active.firing = true;
                change(AlertState::Firing, active.since)
            }
        }
    }

    /// Ends every alert of a request that has ended: those that fired are resolved.
    pub fn forget(&mut self, key: RequestKey, now: Monotonic) -> Vec<Transition> {
        let ended: Vec<RuleIndex> = self.of(key).map(|(rule, _)| rule).collect();
        ended.into_iter().filter_map(|rule| self.observe(key, rule, Duration::ZERO, false, now)).collect()
    }

    /// The alerts of a request: their rules, and whether they fire.
    pub fn of(&self, key: RequestKey) -> impl Iterator<Item = (RuleIndex, bool)> {
        let rules = (key, RuleIndex(0))..=(key, RuleIndex(u16::MAX));
        self.active.range(rules).map(|((_, rule), active)| (*rule, active.firing))
    }

    /// Whether no alert is pending or fires.
    pub fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// Whether `rule` has a pending or firing alert for a request.
    pub fn contains(&self, key: RequestKey, rule: RuleIndex) -> bool {
        self.active.contains_key(&(key, rule))
    }

    /// Every request that has an alert.
    pub fn keys(&self) -> Vec<RequestKey> {
        let mut keys: Vec<RequestKey> = self.active.keys().map(|(key, _)| *key).collect();
        keys.dedup();
        keys
    }

    /// How many alerts of each rule are pending, and how many fire.
    pub fn counts(&self) -> BTreeMap<RuleIndex, AlertCounts> {
        let mut counts: BTreeMap<RuleIndex, AlertCounts> = BTreeMap::new();
        for ((_, rule), active) in &self.active {
            let of_rule = counts.entry(*rule).or_default();
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
