//! What `/status` says, and whether the agent is alive and ready.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use serde::Serialize;

use crate::{
    diagnose::{Cause, Evidence, Source, cause_of_room},
    event::{Hello, Rid, Room, clock::Monotonic, native::failure_name},
    kernel::plan::ProbeReport,
    request::{
        NativeState, Queue, Side, Watch,
        correlate::TransferSubject,
        gauge::{GaugeCheck, Gauges},
        transfer::SubjectTransfers,
    },
    rule::Mode,
    verdict::Verdict,
};

/// How long the loop may take for a turn before the agent counts as dead.
const LONGEST_TURN: Duration = Duration::from_secs(10);

/// The state of the agent.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// The agent's version.
    pub version: &'static str,
    /// The most that may be done about stuck requests.
    pub mode: Mode,
    /// Name of the node.
    pub node: String,
    /// The schedulers of the node.
    pub servers: Vec<ServerStatus>,
    /// The alerts that are pending or fire.
    pub alerts: Vec<AlertStatus>,
    /// Alerts beyond those.
    pub alerts_not_listed: usize,
}

/// The state of one scheduler.
#[derive(Clone, Debug, Serialize)]
pub struct ServerStatus {
    /// Process id.
    pub pid: u32,
    /// Process title.
    pub title: String,
    /// `watched`, `without_control` or `without_hook`.
    pub state: &'static str,
    /// Why there is no probe; nothing where there is one.
    pub probe: Option<String>,
    /// The control channel.
    pub control: ControlStatus,
    /// Whether every live request is known.
    pub synchronised: bool,
    /// What the server said of itself.
    pub hello: Option<Hello>,
    /// Length of the inflight queue, or of both of a decode's, as the scheduler reported it last.
    pub queue_length: Option<u32>,
    /// Whether generation is paused.
    pub paused: bool,
    /// Live requests.
    pub requests: usize,
    /// What its transfer engine shows.
    pub transfers: TransfersStatus,
    /// What its own `/metrics` says.
    pub server_metrics: GaugeStatus,
    /// Events that BPF saw.
    pub events_seen: u64,
    /// Events that were lost.
    pub events_lost: u64,
}

/// What a server says of its queues itself.
#[derive(Clone, Debug, Serialize)]
pub struct GaugeStatus {
    /// How its gauge of the inflight queue compares with what was seen.
    #[serde(flatten)]
    pub check: GaugeCheck,
    /// The same in words, where it can be told.
    pub in_words: Option<String>,
    /// What it said last.
    pub said: Option<Gauges>,
    /// How long ago.
    pub read_seconds_ago: Option<f64>,
    /// For how long the gauge of the inflight queue has had that value, as far as it was read.
    pub unchanged_seconds: Option<f64>,
    /// Why its page cannot be read.
    pub failure: Option<String>,
}

/// The transfers of one server.
#[derive(Clone, Debug, Serialize)]
pub struct TransfersStatus {
    /// Whether each one is seen.
    #[serde(flatten)]
    pub watch: Watch,
    /// What was seen of the last endpoint that was given up, of the last work completion with an error, and of the errors
    /// that its devices counted last.
    pub errors: Vec<String>,
    /// The probes on the libraries of its transfer engine.
    pub probes: Vec<ProbeReport>,
    /// Libraries that cannot be opened, and why.
    pub unreachable: Vec<String>,
    /// Transfers that are under way.
    pub under_way: usize,
    /// Those of which it is not known what they are about.
    pub under_way_not_joined: usize,
    /// Rooms and requests with transfers that are under way or were given up, the longest first.
    pub subjects: Vec<SubjectStatus>,
    /// Rooms and requests beyond those.
    pub subjects_not_listed: usize,
}

/// The transfers of one room or request.
#[derive(Clone, Debug, Serialize)]
pub struct SubjectStatus {
    /// Which room or request.
    #[serde(flatten)]
    pub subject: TransferSubject,
    /// `InFlight` while one is under way, `Unknown` after one was given up, else `Quiescent`.
    pub state: &'static str,
    /// What is wrong with them, by the transfers alone.
    pub cause: Option<&'static str>,
    /// What the engine said of the last one that failed.
    pub failure: Option<String>,
    /// How many are under way.
    pub under_way: usize,
    /// Since when the oldest is, in seconds.
    pub oldest_seconds: f64,
    /// When one of them was posted, moved or ended last, in seconds ago.
    pub moved_seconds_ago: f64,
    /// How many were posted.
    pub posted: u64,
    /// How many are done.
    pub done: u64,
    /// How many failed.
    pub failed: u64,
    /// How many were given up before their end was seen.
    pub given_up: u64,
}

impl SubjectStatus {
    /// What is known of a room's or request's transfers; nothing when all are over and none has failed.
    pub fn of(
        subject: &TransferSubject,
        transfers: &SubjectTransfers,
        native: &NativeState,
        now: Monotonic,
    ) -> Option<Self> {
        if transfers.is_over() && transfers.failure.is_none() {
            return None;
        }
        let under_way = transfers.under_way();
        let seconds = |since: Option<Monotonic>| since.map_or(0.0, |since| now.since(since).as_secs_f64());
        Some(Self {
            subject: subject.clone(),
            state: match (under_way, transfers.is_over()) {
                (Some(_), _) => "InFlight",
                (None, true) => "Quiescent",
                (None, false) => "Unknown",
            },
            cause: cause_of_room(transfers, native, Monotonic(0), now).map(Cause::name),
            failure: transfers.failure.map(|(_, engine, code)| format!("{} ({code})", failure_name(engine, code))),
            under_way: under_way.map_or(0, |(count, _)| count),
            oldest_seconds: seconds(under_way.map(|(_, oldest)| oldest)),
            moved_seconds_ago: seconds(transfers.last_moved()),
            posted: transfers.posted,
            done: transfers.done,
            failed: transfers.failed,
            given_up: transfers.unproved,
        })
    }
}

/// The state of a control channel.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum ControlStatus {
    /// This agent has it.
    Taken {
        /// Version of the hook.
        hook: String,
    },
    /// This agent does not have it.
    Missing {
        /// Why not.
        why: String,
    },
}

/// An alert that is pending or fires.
#[derive(Clone, Debug, Serialize)]
pub struct AlertStatus {
    /// The rule's name.
    pub rule: String,
    /// `pending` or `firing`.
    pub state: &'static str,
    /// `info`, `warning` or `critical`.
    pub severity: &'static str,
    /// Process id of the server.
    pub pid: u32,
    /// SGLang's request id.
    pub rid: Option<Rid>,
    /// SGLang's room.
    pub room: Room,
    /// The side that the server is on.
    pub role: Side,
    /// The queue that the request is in.
    pub queue: Queue,
    /// Serial of the sender.
    pub serial: u64,
    /// Why it waits.
    pub cause: &'static str,
    /// `high` or `low`.
    pub confidence: &'static str,
    /// Whether a write may be under way.
    pub quiescence: String,
    /// For how long it has waited.
    pub waiting_seconds: f64,
    /// What speaks for the cause.
    pub evidence: Vec<EvidenceStatus>,
}

/// One piece of evidence in words.
#[derive(Clone, Debug, Serialize)]
pub struct EvidenceStatus {
    /// Where it was seen.
    pub source: &'static str,
    /// How long ago.
    pub seconds_ago: f64,
    /// What.
    pub fact: String,
}

impl AlertStatus {
    /// The state of the alert that `verdict` told of last, and what its server's gauge says of the queue now.
    pub fn of(verdict: &Verdict, gauge: Option<&Evidence>, now: Monotonic) -> Self {
        let in_words = |evidence: &Evidence| EvidenceStatus {
            source: evidence.source.name(),
            seconds_ago: now.since(evidence.at).as_secs_f64(),
            fact: evidence.fact.to_string(),
        };
        let seen = verdict.diagnosis.evidence.iter().filter(|it| it.source != Source::ServerMetrics);
        Self {
            rule: verdict.rule.to_string(),
            state: verdict.state.name(),
            severity: verdict.severity.name(),
            pid: verdict.server.pid,
            rid: verdict.rid.clone(),
            room: verdict.room,
            role: verdict.role,
            queue: verdict.queue,
            serial: verdict.request.serial,
            cause: verdict.cause.name(),
            confidence: verdict.diagnosis.confidence.name(),
            quiescence: verdict.diagnosis.quiescence.to_string(),
            waiting_seconds: now.since(verdict.waiting_since).as_secs_f64(),
            evidence: seen.chain(gauge).map(in_words).collect(),
        }
    }
}

/// Whether the pipeline runs: written by its loop, read by the HTTP server.
#[derive(Debug, Default)]
pub struct Health {
    last_tick: AtomicU64,
    scanned: AtomicBool,
}

impl Health {
    /// The loop has made a turn.
    pub fn ticked(&self, now: Monotonic) {
        self.last_tick.store(now.0, Ordering::Relaxed);
    }

    /// The node was looked over for servers; returns whether that was the first time.
    pub fn scanned(&self) -> bool {
        !self.scanned.swap(true, Ordering::Relaxed)
    }

    /// Whether the loop turns.
    pub fn is_live(&self, now: Monotonic) -> bool {
        now.since(Monotonic(self.last_tick.load(Ordering::Relaxed))) < LONGEST_TURN
    }

    /// Whether the loop turns and has looked for servers.
    pub fn is_ready(&self, now: Monotonic) -> bool {
        self.is_live(now) && self.scanned.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_live_while_its_loop_turns_and_ready_once_it_has_looked_around() {
        let health = Health::default();
        let at = |seconds: u64| Monotonic(seconds * 1_000_000_000);
        assert!(!health.is_live(at(100)));
        health.ticked(at(100));
        assert!(health.is_live(at(109)) && !health.is_ready(at(109)));
        assert!(health.scanned() && !health.scanned(), "the first time is told apart");
        assert!(health.is_ready(at(109)));
        assert!(!health.is_live(at(110)) && !health.is_ready(at(110)));
    }
}
