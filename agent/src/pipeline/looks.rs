//! Looks: for a moment, at a server whose transfer does not get on, through probes that are too busy to stay.

use std::{collections::HashMap, time::Duration};

use tokio::time::{Instant, sleep_until};

use super::Pipeline;
use crate::{
    config::Completions,
    core::Input,
    event::{ProcessKey, clock::Monotonic},
    kernel::{look::Look, probe::ProbeSet},
    metrics::OutcomeLabel,
};

/// A server is looked at when its oldest transfer has been under way for this long.
const LOOK_AFTER: Duration = Duration::from_secs(10);
/// How long a look takes.
const LOOK_FOR: Duration = Duration::from_millis(100);
/// How long a server is left alone after a look.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// A look that is under way.
#[derive(Debug)]
pub(super) struct Looking {
    key: ProcessKey,
    look: Look,
    began: Monotonic,
    pub(super) until: Instant,
}

impl Looking {
    /// Whether it looks at that server.
    pub(super) fn is_at(&self, key: ProcessKey) -> bool {
        self.key == key
    }
}

impl Pipeline {
    /// Begins to look at the server that has waited longest for one of its transfers, if one has waited long.
    pub(super) fn begin_look(&mut self, now: Monotonic) {
        if self.looking.is_some() || !self.config.probes.transfers {
            return;
        }
        let is_due = |key: &ProcessKey| {
            let looked_at = self.servers.get(key).and_then(|server| server.engine.looked_at);
            looked_at.is_none_or(|at| now.since(at) >= LOOK_AGAIN)
        };
        let oldest = |key: ProcessKey| Some((self.core.tracker().transfers(key)?.oldest()?, key));
        let waiting = self.servers.keys().copied().filter(is_due).filter_map(oldest).min();
        let Some((_, key)) = waiting.filter(|(since, _)| now.since(*since) >= LOOK_AFTER) else { return };
        let Some(server) = self.servers.get_mut(&key) else { return };
        server.engine.looked_at = Some(now);
        let sets: &[ProbeSet] = match self.config.probes.completions {
            Completions::Look => &[ProbeSet::Polls, ProbeSet::Completions],
            Completions::Off | Completions::Always => &[ProbeSet::Polls],
        };
        let outcome = match self.kernel.begin_look(key, &server.engine.libraries, sets, &self.returns) {
            Ok(look) => {
                self.looking = Some(Looking { key, look, began: now, until: Instant::now() + LOOK_FOR });
                "begun"
            }
            Err(rows) => {
                tracing::debug!(pid = key.pid, ?rows, "cannot look at the server's transfers");
                "not_possible"
            }
        };
        self.metrics.looks.get_or_create(&OutcomeLabel { outcome }).inc();
    }

    /// Ends the look that is under way.
    pub(super) fn end_look(&mut self) {
        let Some(Looking { key, look, began, .. }) = self.looking.take() else { return };
        let polls = self.kernel.end_look(look);
        // What ended meanwhile is in the ring: it is not to be called asked for.
        self.drain();
        let polls: HashMap<u64, u64> = polls.into_iter().map(|(object, polls)| (object, polls.count)).collect();
        self.apply(Input::Looked { process: key, polls, began, at: Monotonic::now() });
    }
}

/// Waits for the end of a look; for ever where there is none.
pub(super) async fn until_look_ends(until: Option<Instant>) {
    match until {
        Some(until) => sleep_until(until).await,
        None => std::future::pending().await,
    }
}
