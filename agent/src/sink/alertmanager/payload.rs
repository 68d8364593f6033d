//! An alert in Alertmanager's words (API v2, `postableAlert`).

use std::{collections::BTreeMap, fmt::Write, time::Duration};

use serde::Serialize;

use super::outbox::Alert;
use crate::{
    event::clock::{Monotonic, WallClock},
    verdict::Verdict,
};

/// Requests that a description lists.
const LISTED: usize = 10;
/// Pieces of evidence that it lists for each.
const LISTED_EVIDENCE: usize = 6;
/// Characters of a request id that it shows.
const SHOWN_RID: usize = 64;
/// Characters of a server's title in a label.
const SHOWN_TITLE: usize = 128;

/// One alert of a message.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PostableAlert {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<&'static str, String>,
    starts_at: jiff::Timestamp,
    ends_at: jiff::Timestamp,
}

/// `alert` as it is told at `now`; a firing one ends by itself after `lifetime`. Nothing when it is about no request.
pub(super) fn of(
    alert: &Alert,
    lifetime: Duration,
    runbook: Option<&str>,
    now: Monotonic,
    clock: &WallClock,
) -> Option<PostableAlert> {
    let first = alert.requests.values().next()?;
    let mut annotations = BTreeMap::from([
        ("summary", summary(alert)),
        ("description", description(alert, first, now)),
        ("requests", alert.requests.len().to_string()),
    ]);
    if let Some(url) = runbook {
        annotations.insert("runbook_url", url.replace("{cause}", alert.cause.name()));
    }
    Some(PostableAlert {
        labels: labels(alert),
        annotations,
        starts_at: clock.timestamp(alert.since),
        ends_at: clock.timestamp(alert.resolved.unwrap_or_else(|| now.plus(lifetime))),
    })
}

fn labels(alert: &Alert) -> BTreeMap<String, String> {
    let mut labels = (*alert.labels).clone();
    labels.extend(
        [
            ("alertname", alert.rule.to_string()),
            ("severity", alert.severity.name().to_owned()),
            ("cause", alert.cause.name().to_owned()),
            ("node", known(&alert.server.node)),
            ("server", known(&alert.server.title)),
            ("pid", alert.server.pid.to_string()),
            ("backend", alert.backend.name().to_owned()),
        ]
        .map(|(name, value)| (name.to_owned(), value)),
    );
    labels
}

/// A label's value; Alertmanager takes an empty one for a missing label.
fn known(text: &str) -> String {
    if text.is_empty() { "unknown".to_owned() } else { shown(text, SHOWN_TITLE) }
}

fn summary(alert: &Alert) -> String {
    let count = alert.requests.len();
    let requests = if count == 1 { "request" } else { "requests" };
    let place = format!(
        "{count} {requests} in {} (pid {}) on {}",
        known(&alert.server.title),
        alert.server.pid,
        known(&alert.server.node)
    );
    match &alert.summary {
        Some(summary) => format!("{summary}: {place}"),
        None => format!("{}: {place}", alert.cause),
    }
}

fn description(alert: &Alert, first: &Verdict, now: Monotonic) -> String {
    let mut text = String::new();
    let at = alert.resolved.unwrap_or(now);
    for verdict in alert.requests.values().take(LISTED) {
        line(&mut text, verdict, at);
    }
    if let Some(more @ 1..) = alert.requests.len().checked_sub(LISTED) {
        let _ = writeln!(text, "… and {more} more");
    }
    let _ = writeln!(text, "evidence for the first of them, when its alert fired:");
    for evidence in first.diagnosis.evidence.iter().take(LISTED_EVIDENCE) {
        let _ = writeln!(
            text,
            "- {} ({}, {} s before)",
            evidence.fact,
            evidence.source.name(),
            first.at.since(evidence.at).as_secs()
        );
    }
    text.trim_end().to_owned()
}

fn line(text: &mut String, verdict: &Verdict, now: Monotonic) {
    let rid = match &verdict.rid {
        Some(rid) if rid.truncated => format!("{}…", shown(&rid.text, SHOWN_RID)),
        Some(rid) => shown(&rid.text, SHOWN_RID),
        None => "not known".to_owned(),
    };
    let _ = writeln!(
        text,
        "room {}, rid {rid}: waits for {} s, quiescence {}, confidence {}",
        verdict.room,
        now.since(verdict.waiting_since).as_secs(),
        verdict.diagnosis.quiescence,
        verdict.diagnosis.confidence.name(),
    );
}

/// At most `limit` characters of a text that a client chose, without control characters.
fn shown(text: &str, limit: usize) -> String {
    let mut shown: String = text.chars().take(limit).flat_map(char::escape_debug).collect();
    if text.chars().nth(limit).is_some() {
        shown.push('…');
    }
    shown
}
