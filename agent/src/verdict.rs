//! What sinks receive: an alert's change of state, with everything that they may say about it.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Serialize, Serializer};

use crate::{
    diagnose::{Cause, Conclusion, Diagnosis, diagnose},
    event::{Backend, Phase, ProcessKey, Rid, Room, clock::Monotonic},
    request::{Queue, RequestKey, Side},
    rule::{
        Mode, Rule, Severity,
        alert::{AlertState, Transition},
        field::Subject,
    },
};

/// A server process as people know it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServerIdentity {
    /// Process id in the agent's (root) pid namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start: u64,
    /// Its process title or command, short: a label value, so it must not hold anything that changes.
    pub title: String,
    /// Name of the node.
    pub node: String,
    /// Container id, where it runs in one.
    pub container: Option<String>,
    /// The process that started it, which starts every rank of a server that this node has: SGLang's launcher, or its
    /// data-parallel controller. Not known where that is gone.
    #[serde(skip)]
    pub parent: Option<ProcessKey>,
}

/// One alert's change of state.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    /// Name of the rule.
    #[serde(serialize_with = "shared")]
    pub rule: Arc<str>,
    /// How urgent.
    pub severity: Severity,
    /// The rule's labels.
    #[serde(serialize_with = "shared")]
    pub labels: Arc<BTreeMap<String, String>>,
    /// The rule's summary.
    pub summary: Option<String>,
    /// The most that the rule allows to be done.
    pub action: Mode,
    /// The request.
    pub request: RequestKey,
    /// SGLang's id of the request, where known.
    pub rid: Option<Rid>,
    /// Its room.
    pub room: Room,
    /// Its transfer backend.
    pub backend: Backend,
    /// The side that its server is on.
    pub role: Side,
    /// The queue that it is in.
    pub queue: Queue,
    /// What it polled last.
    pub phase: Option<Phase>,
    /// Since when it waits.
    pub waiting_since: Monotonic,
    /// Its server.
    #[serde(serialize_with = "shared")]
    pub server: Arc<ServerIdentity>,
    /// Why it waits.
    pub cause: Cause,
    /// The whole diagnosis.
    pub diagnosis: Diagnosis,
    /// The alert's new state.
    pub state: AlertState,
    /// Since when the rule had matched.
    pub since: Monotonic,
    /// When the state changed.
    pub at: Monotonic,
}

impl Verdict {
    /// The verdict of `transition`, an alert of `rule` for the request that `subject` shows, which is diagnosed for it.
    pub fn new(transition: &Transition, rule: &Rule, subject: &Subject<'_>, server: Arc<ServerIdentity>) -> Self {
        let request = subject.tracked.request;
        Self {
            rule: Arc::clone(&rule.name),
            severity: rule.severity,
            labels: Arc::clone(&rule.labels),
            summary: rule.summary.clone(),
            action: rule.action,
            request: transition.key,
            rid: request.rid.clone(),
            room: request.room,
            backend: request.backend,
            role: request.side(),
            queue: request.queue(),
            phase: request.phase,
            waiting_since: request.waiting_since(),
            server,
            cause: subject.conclusion.cause,
            diagnosis: diagnose(&subject.tracked, subject.now),
            state: transition.state,
            since: transition.since,
            at: transition.at,
        }
    }

    /// The same alert with what is known of its request by now; nothing when that is what it says already.
    pub fn refreshed(&self, subject: &Subject<'_>) -> Option<Self> {
        let request = subject.tracked.request;
        let (known, now): (Conclusion, Conclusion) = (self.diagnosis.conclusion(), subject.conclusion);
        let differs = (known, self.phase, &self.rid, self.room, self.queue, self.waiting_since)
            != (now, request.phase, &request.rid, request.room, request.queue(), request.waiting_since());
        differs.then(|| Self {
            rid: request.rid.clone(),
            room: request.room,
            backend: request.backend,
            role: request.side(),
            queue: request.queue(),
            phase: request.phase,
            waiting_since: request.waiting_since(),
            cause: now.cause,
            diagnosis: diagnose(&subject.tracked, subject.now),
            ..self.clone()
        })
    }

    /// The end of an alert whose request is not known any more, from the verdict that said it fires.
    pub fn resolved(firing: &Self, at: Monotonic) -> Self {
        Self { state: AlertState::Resolved, at, ..firing.clone() }
    }
}

/// Serialises what is behind an `Arc`, which serde does with a feature that nothing else here needs.
pub(crate) fn shared<T: Serialize + ?Sized, S: Serializer>(value: &Arc<T>, serializer: S) -> Result<S::Ok, S::Error> {
    (**value).serialize(serializer)
}
