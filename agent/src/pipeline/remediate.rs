//! From a firing alert to a command: asks the guards, records, sends, and tells what came of it.

use std::{collections::BTreeMap, fs, sync::Arc};

use super::{Pipeline, notice::Notice, servers::Server};
use crate::{
    event::{Phase, clock::Monotonic},
    metrics::{OutcomeLabel, reason},
    remedy::{
        control::Verb,
        guard::{Context, Refusal, may_act},
        ladder::{COMMAND_PATIENCE, Outcome},
    },
    request::RequestKey,
    rule::Mode,
    sink::audit::{AuditRecord, Remediation, RemediationStep},
    verdict::Verdict,
};

/// What was decided about a request last: only a change is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Refused(Refusal),
    WouldAct,
    Act,
}

/// A request that an alert fires for, and how far the rules allow to go.
struct Candidate {
    verdict: Arc<Verdict>,
    mode: Mode,
}

impl Pipeline {
    /// Decides about every request that an alert fires for.
    pub(super) fn remediate(&mut self, now: Monotonic) {
        let candidates = self.candidates();
        self.decisions.retain(|key, _| candidates.contains_key(key) || self.acting.contains_key(key));
        if candidates.is_empty() {
            return;
        }
        let kill_switch = self.config.remediation.kill_switch.as_deref().is_some_and(|path| {
            // A switch that cannot be looked at counts as set.
            fs::exists(path).unwrap_or(true)
        });
        for (key, candidate) in candidates {
            if self.acting.contains_key(&key) {
                continue;
            }
            let decision = self.decide(key, candidate.mode, kill_switch, now);
            if self.decisions.insert(key, decision) != Some(decision) {
                self.carry_out(key, &candidate, decision, now);
            }
        }
    }

    /// Of the alerts that fire for a request, the one that allows most.
    fn candidates(&self) -> BTreeMap<RequestKey, Candidate> {
        let mut candidates: BTreeMap<RequestKey, Candidate> = BTreeMap::new();
        for verdict in self.core.firing() {
            let mode = verdict.action.min(self.config.mode);
            let better = candidates.get(&verdict.request).is_none_or(|candidate| candidate.mode < mode);
            if better {
                candidates.insert(verdict.request, Candidate { verdict: Arc::clone(verdict), mode });
            }
        }
        candidates
    }

    fn decide(&mut self, key: RequestKey, mode: Mode, kill_switch: bool, now: Monotonic) -> Decision {
        let room = self.core.tracker().get(key).map(|tracked| tracked.room);
        let context = Context {
            mode,
            kill_switch,
            audit_available: self.audit.is_some() && !self.audit_failing,
            actions_left: self.ladder.actions_left(now),
            has_control_channel: self.servers.get(&key.process).is_some_and(|server| server.control.is_ok()),
            acted_before: self.ladder.acted_before(key),
            senders_on_room: room.map_or(0, |room| room.senders.len()),
            abandoned_handles: room.and_then(|room| room.chunks).is_some_and(|chunks| chunks.abandoned),
        };
        let Some((tracked, diagnosis)) = self.core.diagnose(key, now) else {
            return Decision::Refused(Refusal::Terminal);
        };
        match may_act(tracked.request, tracked.server, &diagnosis, &context) {
            Err(refusal) => Decision::Refused(refusal),
            Ok(()) if mode == Mode::DryRun => Decision::WouldAct,
            Ok(()) => Decision::Act,
        }
    }

    fn carry_out(&mut self, key: RequestKey, candidate: &Candidate, decision: Decision, now: Monotonic) {
        let verdict = &candidate.verdict;
        match decision {
            Decision::Refused(refusal) => {
                self.metrics.refusals.get_or_create(&reason(refusal.name())).inc();
                let detail = verdict.diagnosis.quiescence.to_string();
                let step = RemediationStep::Refused { guard: refusal.name().to_owned(), detail };
                self.record_step(verdict, candidate.mode, step);
            }
            Decision::WouldAct => {
                self.count_outcome("would_act");
                let step = RemediationStep::WouldAct { flag: self.flag_of(key) };
                self.record_step(verdict, candidate.mode, step);
            }
            Decision::Act => {
                let step = RemediationStep::Acting { flag: self.flag_of(key) };
                if self.record_step(verdict, candidate.mode, step) {
                    self.acting.insert(key, Arc::clone(verdict));
                    self.send_failure(key, verdict, now);
                } else {
                    // Looked at again in the next tick, which then sees that the log cannot be written.
                    self.decisions.remove(&key);
                }
            }
        }
    }

    fn send_failure(&mut self, key: RequestKey, verdict: &Verdict, now: Monotonic) {
        let request = self.core.tracker().get(key).map(|tracked| tracked.request.clone());
        let server = self.servers.get_mut(&key.process);
        let (Some(request), Some(Server { control: Ok(channel), .. })) = (request, server) else {
            self.ladder.not_sent(key, now);
            return self.acted(key, Outcome::NotSent { reason: "the server is gone".to_owned() });
        };
        let rid = request.rid.as_ref().map_or("", |rid| rid.text.as_str());
        let why = format!("{} (rule {})", verdict.cause, verdict.rule);
        let phase = request.phase.unwrap_or(Phase::Failed);
        match channel.send(&Verb::fail(key.serial, rid, request.room, phase, &why), now, COMMAND_PATIENCE) {
            Ok(command) => self.ladder.sent(key, command, now),
            Err(error) => {
                self.ladder.not_sent(key, now);
                self.acted(key, Outcome::NotSent { reason: error.to_string() });
            }
        }
    }

    /// Tells how an action ended.
    pub(super) fn acted(&mut self, key: RequestKey, outcome: Outcome) {
        self.count_outcome(outcome.name());
        let Some(verdict) = self.acting.remove(&key) else { return };
        let step = match outcome {
            Outcome::Effective { .. } => RemediationStep::Effective,
            Outcome::NoEffect => RemediationStep::NoEffect,
            Outcome::Overtaken => RemediationStep::Failed { reason: "it ended by itself meanwhile".to_owned() },
            Outcome::Unanswered => RemediationStep::Failed { reason: "the hook did not answer".to_owned() },
            Outcome::NotSent { reason } => RemediationStep::Failed { reason },
            Outcome::Refused { reason: refused } => {
                self.metrics.refusals.get_or_create(&reason(&format!("hook_{}", bounded(&refused)))).inc();
                RemediationStep::Failed { reason: format!("the hook refused: {refused}") }
            }
        };
        self.record_step(&verdict, Mode::Enforce, step);
    }

    fn record_step(&mut self, verdict: &Verdict, mode: Mode, step: RemediationStep) -> bool {
        tracing::info!(
            pid = verdict.server.pid,
            room = %verdict.room,
            rid = verdict.rid.as_ref().map(|rid| rid.text.as_str()),
            cause = verdict.cause.name(),
            mode = mode.name(),
            ?step,
            "remediation"
        );
        self.notify(Notice::Remediation { request: verdict.request, step: step.clone() });
        self.record(&AuditRecord::Remediation(Box::new(Remediation {
            rule: Arc::clone(&verdict.rule),
            request: verdict.request,
            rid: verdict.rid.clone(),
            room: verdict.room,
            server: Arc::clone(&verdict.server),
            cause: verdict.cause,
            quiescence: verdict.diagnosis.quiescence,
            mode,
            step,
        })))
    }

    fn flag_of(&self, key: RequestKey) -> String {
        let hello = self.core.tracker().server(key.process).and_then(|server| server.hello.as_deref());
        hello.and_then(|hello| hello.flag).map_or("unknown", |flag| flag.name()).to_owned()
    }

    fn count_outcome(&self, outcome: &'static str) {
        self.metrics.remediations.get_or_create(&OutcomeLabel { outcome }).inc();
    }
}

/// Reasons that the contract names; a hook that says anything else must not make labels.
const HOOK_REFUSALS: [&str; 26] = [
    "malformed",
    "expired",
    "stale_epoch",
    "unknown_verb",
    "unknown_sender",
    "rid_mismatch",
    "room_mismatch",
    "phase_changed",
    "terminal",
    "not_in_queue",
    "room_shared",
    "chunks_queued",
    "chunks_working",
    "transfer_in_flight",
    "abandoned_handles",
    "attached_late",
    "counts_unknown",
    "ranks_unknown",
    "tensor_parallel",
    "context_parallel",
    "pipeline_parallel",
    "backend_unproved",
    "already_failed",
    "no_sender_flag",
    "decode_side",
    "internal_error",
];

fn bounded(reason: &str) -> &str {
    HOOK_REFUSALS.iter().find(|known| **known == reason).unwrap_or(&"other")
}
