//! The demo's story: turns notices into lines, and knows what has not been seen yet.

use dislodge::{
    event::{LeaveReason, Phase, clock::Monotonic},
    pipeline::notice::Notice,
    request::{
        RequestKey,
        tracker::{Change, Step},
    },
    rule::alert::AlertState,
    sink::audit::RemediationStep,
    verdict::Verdict,
};

use super::receiver::Received;

/// Healthy requests that must be seen to end.
const HEALTHY: u32 = 3;

/// Parts of the story, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Chapter {
    /// The probe is on.
    Attached,
    /// Healthy requests came and went.
    Healthy,
    /// A request sits in the queue whose room another one has cleared.
    Pinned,
    /// It was diagnosed, alerted, freed, read back; the alert is over.
    Resolved,
}

/// What was seen so far.
#[derive(Debug)]
pub(super) struct Story {
    began: Monotonic,
    attached: bool,
    healthy: u32,
    waiting: Option<RequestKey>,
    aborted: bool,
    update_dropped: bool,
    pending: bool,
    firing: bool,
    delivered_firing: bool,
    acting: bool,
    flagged: bool,
    polled_failed: bool,
    left_failed: bool,
    effective: bool,
    queue_empty: bool,
    resolved: bool,
    delivered_resolved: bool,
}

impl Default for Story {
    fn default() -> Self {
        Self {
            began: Monotonic::now(),
            attached: false,
            healthy: 0,
            waiting: None,
            aborted: false,
            update_dropped: false,
            pending: false,
            firing: false,
            delivered_firing: false,
            acting: false,
            flagged: false,
            polled_failed: false,
            left_failed: false,
            effective: false,
            queue_empty: false,
            resolved: false,
            delivered_resolved: false,
        }
    }
}

impl Story {
    /// Seconds since it began.
    pub(super) fn seconds(&self) -> f64 {
        Monotonic::now().since(self.began).as_secs_f64()
    }

    /// What a chapter, and those before it, still wait for.
    pub(super) fn missing(&self, chapter: Chapter) -> Option<&'static str> {
        let waits = [
            (Chapter::Attached, self.attached, "a probe on the server's marker"),
            (Chapter::Healthy, self.healthy >= HEALTHY, "healthy requests that leave the queue"),
            (Chapter::Pinned, self.waiting.is_some(), "a second request on the room in the queue"),
            (Chapter::Resolved, self.aborted, "the abort"),
            (Chapter::Resolved, self.update_dropped, "the update that the abort made and that was dropped"),
            (Chapter::Resolved, self.pending, "the alert pending"),
            (Chapter::Resolved, self.firing, "the alert firing"),
            (Chapter::Resolved, self.delivered_firing, "the webhook with the firing alert"),
            (Chapter::Resolved, self.acting, "the decision to act"),
            (Chapter::Resolved, self.flagged, "the failure flag"),
            (Chapter::Resolved, self.polled_failed, "the poll that reads the flag"),
            (Chapter::Resolved, self.left_failed, "the request leaving the queue"),
            (Chapter::Resolved, self.effective, "the action read back as effective"),
            (Chapter::Resolved, self.queue_empty, "the queue back at 0"),
            (Chapter::Resolved, self.resolved, "the alert resolved"),
            (Chapter::Resolved, self.delivered_resolved, "the webhook with the resolved alert"),
        ];
        waits.into_iter().find(|(of, seen, _)| *of <= chapter && !seen).map(|(_, _, what)| what)
    }

    /// Takes in a notice and says it in lines.
    pub(super) fn notice(&mut self, notice: &Notice) -> Vec<String> {
        match notice {
            Notice::Attached(server) => {
                self.attached = true;
                vec![self.now(format!("attached to pid {}, {}", server.pid, server.title))]
            }
            Notice::Detached(process) => vec![self.now(format!("pid {} is gone", process.pid))],
            Notice::Step { change, rid } => {
                let rid = rid.as_ref().map_or(String::new(), |rid| format!(" {}", rid.text));
                self.step(change)
                    .map(|what| self.line(change.at, &format!("sender {}{rid}: {what}", change.key.serial)))
                    .into_iter()
                    .collect()
            }
            Notice::QueueLength { length, .. } => {
                self.queue_empty = *length == 0 && self.left_failed;
                vec![self.now(format!("inflight queue: {length}"))]
            }
            Notice::Verdict(verdict) => self.verdict(verdict),
            Notice::Remediation { step, .. } => {
                let what = match step {
                    RemediationStep::Acting { flag } => {
                        self.acting = true;
                        format!("every guard allows it; asking the hook for {flag}")
                    }
                    RemediationStep::Effective => {
                        self.effective = true;
                        "effective: the server read the flag and dropped the request".to_owned()
                    }
                    other => format!("{other:?}"),
                };
                vec![self.now(format!("remediation: {what}"))]
            }
        }
    }

    /// Takes in a delivery of the webhook and says it in lines.
    pub(super) fn received(&mut self, received: &Received) -> Vec<String> {
        let mut lines = Vec::new();
        for alert in &received.alerts {
            let is_over = alert.ends_at <= received.at;
            self.delivered_firing |= !is_over;
            self.delivered_resolved |= is_over;
            let label = |name| alert.labels.get(name).map_or("?", String::as_str);
            let state = if is_over { "resolved" } else { "firing" };
            lines.push(self.now(format!("webhook delivered: {} {state} ({})", label("alertname"), label("severity"))));
        }
        lines
    }

    fn step(&mut self, change: &Change) -> Option<String> {
        let is_pinned = self.waiting == Some(change.key);
        Some(match &change.step {
            Step::Opened => "created".to_owned(),
            Step::Resynchronised => "known from a resynchronisation".to_owned(),
            Step::Phase { old, new } => {
                self.polled_failed |= is_pinned && *new == Phase::Failed;
                let old = old.map_or("–", Phase::name);
                format!("poll() {old} → {new}")
            }
            Step::Aborted => {
                self.aborted |= is_pinned;
                "abort() was called".to_owned()
            }
            Step::UpdateDropped => {
                self.update_dropped |= is_pinned;
                "update_status(Failed) was dropped: its room is not there any more".to_owned()
            }
            Step::Entered => {
                if self.healthy >= HEALTHY {
                    self.waiting = Some(change.key);
                }
                "entered the inflight queue".to_owned()
            }
            Step::Left(LeaveReason::Success) => {
                self.healthy += 1;
                "left the inflight queue: success".to_owned()
            }
            Step::Left(LeaveReason::Failed) => {
                self.left_failed |= is_pinned;
                "left the inflight queue: failed".to_owned()
            }
            Step::Left(LeaveReason::Removed) => "was taken out of the inflight queue".to_owned(),
            Step::Remedied(flag) => {
                self.flagged |= is_pinned;
                let flag = flag.map_or("a flag", |flag| flag.name());
                format!("{flag} set on thread {} of the server", change.tid)
            }
            Step::Ended => return None,
        })
    }

    fn verdict(&mut self, verdict: &Verdict) -> Vec<String> {
        match verdict.state {
            AlertState::Pending => self.pending = true,
            AlertState::Firing => self.firing = true,
            AlertState::Resolved => self.resolved = true,
        }
        let diagnosis = &verdict.diagnosis;
        let mut lines = vec![self.line(
            verdict.at,
            &format!(
                "alert {} {}: {}, transfer {}, confidence {}",
                verdict.rule,
                verdict.state.name(),
                diagnosis.cause,
                diagnosis.quiescence,
                diagnosis.confidence.name()
            ),
        )];
        if verdict.state == AlertState::Firing {
            lines.extend(diagnosis.evidence.iter().map(|evidence| {
                self.line(evidence.at, &format!("  evidence ({}): {}", evidence.source.name(), evidence.fact))
            }));
        }
        lines
    }

    fn now(&self, text: String) -> String {
        self.line(Monotonic::now(), &text)
    }

    fn line(&self, at: Monotonic, text: &str) -> String {
        format!("{:8.3}s  {text}", at.since(self.began).as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_story_in_which_nothing_was_seen_waits_for_everything() {
        let story = Story::default();
        for chapter in [Chapter::Attached, Chapter::Healthy, Chapter::Pinned, Chapter::Resolved] {
            assert_eq!(story.missing(chapter), Some("a probe on the server's marker"), "{chapter:?}");
        }
    }

    #[test]
    fn an_effect_on_another_request_does_not_count() {
        let process = dislodge::event::ProcessKey { pid: 1, start: 1 };
        let change = |serial, step| Notice::Step {
            change: Box::new(Change {
                key: RequestKey { process, serial },
                at: Monotonic::now(),
                tid: 1,
                step,
                ended: None,
            }),
            rid: None,
        };
        let mut story = Story { attached: true, healthy: HEALTHY, ..Story::default() };
        story.notice(&change(9, Step::Entered));
        story.notice(&change(8, Step::Aborted));
        assert_eq!(story.missing(Chapter::Resolved), Some("the abort"));
        story.notice(&change(9, Step::Aborted));
        assert_ne!(story.missing(Chapter::Resolved), Some("the abort"));
    }
}
