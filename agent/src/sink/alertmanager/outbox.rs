//! What one Alertmanager has to be told, and when. Pure: `now` is an argument.
//!
//! Alertmanager gets one alert per rule, severity, cause, backend and server process, however many requests it is
//! about: rooms and request ids would make every alert a new one.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

use crate::{
    diagnose::Cause,
    event::{Backend, ProcessKey, clock::Monotonic},
    request::RequestKey,
    rule::{Severity, alert::AlertState},
    verdict::{ServerIdentity, Verdict},
};

/// Most alerts at once.
pub const MAX_ALERTS: usize = 1_000;
/// Most requests within these alerts.
pub const MAX_REQUESTS: usize = 20_000;
/// Alerts in one message.
const BATCH: usize = 64;
/// The least time between two messages about one alert whose requests change.
const SETTLE: Duration = Duration::from_secs(5);
/// How many intervals an alert lives after it was told last.
const LIFETIME_INTERVALS: u32 = 4;
/// How often the end of an alert is told again, in case it was lost.
const RESOLVED_REPEATS: u32 = 3;

/// What makes an alert one alert.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AlertId {
    rule: Arc<str>,
    severity: Severity,
    cause: Cause,
    backend: Backend,
    process: ProcessKey,
}

/// An alert as Alertmanager knows it.
#[derive(Debug)]
pub struct Alert {
    /// Name of the rule.
    pub rule: Arc<str>,
    /// How urgent.
    pub severity: Severity,
    /// The cause that its requests had when it fired for them.
    pub cause: Cause,
    /// The backend of its requests.
    pub backend: Backend,
    /// Labels of the rule.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Summary of the rule.
    pub summary: Option<String>,
    /// The server.
    pub server: Arc<ServerIdentity>,
    /// Since when the rule has matched.
    pub since: Monotonic,
    /// When it ended, if it has.
    pub resolved: Option<Monotonic>,
    /// Its requests as they were when the rule fired for them; as they were at the end, when it has ended.
    pub requests: BTreeMap<RequestKey, Arc<Verdict>>,
    told: Option<Monotonic>,
    due: Monotonic,
    repeats: u32,
    revision: u64,
}

/// An alert that is to be told, in the state in which it was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Due {
    id: AlertId,
    revision: u64,
}

/// What one Alertmanager has to be told.
#[derive(Debug)]
pub struct Outbox {
    alerts: HashMap<AlertId, Alert>,
    members: HashMap<(Arc<str>, RequestKey), AlertId>,
    interval: Duration,
    dropped: u64,
}

impl Outbox {
    /// Nothing to tell; firing alerts will be told again every `interval`.
    pub fn new(interval: Duration) -> Self {
        Self { alerts: HashMap::new(), members: HashMap::new(), interval, dropped: 0 }
    }

    /// Takes in a verdict.
    pub fn apply(&mut self, verdict: &Arc<Verdict>) {
        match verdict.state {
            AlertState::Pending => {}
            AlertState::Firing => self.fire(verdict),
            AlertState::Resolved => self.resolve(verdict),
        }
    }

    fn fire(&mut self, verdict: &Arc<Verdict>) {
        let member = (Arc::clone(&verdict.rule), verdict.request);
        if self.members.contains_key(&member) {
            return;
        }
        let id = AlertId {
            rule: Arc::clone(&verdict.rule),
            severity: verdict.severity,
            cause: verdict.cause,
            backend: verdict.backend,
            process: verdict.request.process,
        };
        let full = self.alerts.len() >= MAX_ALERTS && !self.alerts.contains_key(&id);
        if full || self.members.len() >= MAX_REQUESTS {
            self.dropped += 1;
            return;
        }
        let alert = self.alerts.entry(id.clone()).or_insert_with(|| Alert::of(verdict));
        if alert.resolved.is_some() {
            let revision = alert.revision;
            *alert = Alert::of(verdict);
            alert.revision = revision;
        }
        alert.requests.insert(verdict.request, Arc::clone(verdict));
        alert.since = alert.since.min(verdict.since);
        alert.changed(verdict.at, alert.told.map_or(verdict.at, |told| told.plus(SETTLE)));
        self.members.insert(member, id);
    }

    fn resolve(&mut self, verdict: &Verdict) {
        let Some(id) = self.members.remove(&(Arc::clone(&verdict.rule), verdict.request)) else { return };
        let Some(alert) = self.alerts.get_mut(&id) else { return };
        if alert.requests.len() > 1 {
            alert.requests.remove(&verdict.request);
            alert.changed(verdict.at, alert.told.map_or(verdict.at, |told| told.plus(SETTLE)));
        } else {
            // The last request stays, so that the end can still say what it was about.
            alert.resolved = Some(verdict.at);
            alert.repeats = RESOLVED_REPEATS;
            alert.changed(verdict.at, verdict.at);
        }
    }

    /// Alerts to tell now, the longest due first; as many as fit one message.
    pub fn due(&self, now: Monotonic) -> Vec<Due> {
        let mut due: Vec<(&AlertId, &Alert)> = self.alerts.iter().filter(|(_, alert)| alert.due <= now).collect();
        due.sort_by_key(|(_, alert)| alert.due);
        due.truncate(BATCH);
        due.into_iter().map(|(id, alert)| Due { id: id.clone(), revision: alert.revision }).collect()
    }

    /// The time until something is due; an interval at most.
    pub fn next_due(&self, now: Monotonic) -> Duration {
        let next = self.alerts.values().map(|alert| alert.due.since(now)).min();
        next.unwrap_or(self.interval).min(self.interval)
    }

    /// The alert of `due`.
    pub fn alert(&self, due: &Due) -> Option<&Alert> {
        self.alerts.get(&due.id)
    }

    /// Notes that Alertmanager was told at `now`. What has changed since it was looked at stays due.
    pub fn told(&mut self, told: &[Due], now: Monotonic) {
        for due in told {
            let Some(alert) = self.alerts.get_mut(&due.id) else { continue };
            alert.told = Some(now);
            if alert.revision != due.revision {
                continue;
            }
            alert.due = now.plus(self.interval);
            if alert.resolved.is_some() {
                if alert.repeats == 0 {
                    self.alerts.remove(&due.id);
                } else {
                    alert.repeats -= 1;
                }
            }
        }
    }

    /// How long an alert lives after it was told last.
    pub fn lifetime(&self) -> Duration {
        self.interval * LIFETIME_INTERVALS
    }

    /// Firing verdicts that were dropped because there were too many.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }
}

impl Alert {
    fn of(verdict: &Verdict) -> Self {
        Self {
            rule: Arc::clone(&verdict.rule),
            severity: verdict.severity,
            cause: verdict.cause,
            backend: verdict.backend,
            labels: Arc::clone(&verdict.labels),
            summary: verdict.summary.clone(),
            server: Arc::clone(&verdict.server),
            since: verdict.since,
            resolved: None,
            requests: BTreeMap::new(),
            told: None,
            due: verdict.at,
            repeats: 0,
            revision: 0,
        }
    }

    fn changed(&mut self, now: Monotonic, due: Monotonic) {
        self.revision += 1;
        self.due = self.due.min(due).max(now);
    }
}
