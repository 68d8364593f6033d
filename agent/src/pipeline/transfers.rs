//! What the loop shows of transfers: metrics.

use std::collections::HashMap;

use dislodge_ebpf::look::CompletionPoint;

use super::Pipeline;
use crate::{
    event::{Phase, ProcessKey, clock::Monotonic, native::Engine},
    metrics::{CompletionLabel, EngineLabel, OutcomeLabel, ProbeLabel, TransferLabel, reason},
    request::{
        correlate::NotJoined,
        tracker::{Change, Step},
        transfer::TransferState,
        transfers::Counted,
    },
};

impl Pipeline {
    /// Takes over what was counted of a server's transfers.
    pub(super) fn count_transfers(&mut self, key: ProcessKey) {
        let counted = self.core.take_counted(key);
        let metrics = &self.metrics;
        for ((engine, end), (count, bytes)) in &counted.ended {
            let label = TransferLabel { engine: engine.name(), state: end };
            metrics.transfers_ended.get_or_create(&label).inc_by(*count);
            metrics.transfer_bytes.get_or_create(&label).inc_by(*bytes);
        }
        for why in NotJoined::ALL {
            let count = counted.not_joined.get(&why).copied().unwrap_or(0);
            metrics.transfers_not_joined.get_or_create(&reason(why.name())).inc_by(count);
        }
        let Counted { not_kept, size_not_known, not_made, unsafe_releases, .. } = counted;
        for (what, count) in [("not_kept", not_kept), ("size", size_not_known), ("not_made", not_made)] {
            metrics.transfers_not_known.get_or_create(&reason(what)).inc_by(count);
        }
        let (sent, arrived) = (counted.notifications_sent, counted.notifications_arrived);
        for (outcome, count) in [("sent", sent), ("arrived", arrived)] {
            metrics.notifications.get_or_create(&OutcomeLabel { outcome }).inc_by(count);
        }
        let endpoints = counted.endpoint_errors.iter().map(|(status, count)| ("endpoint", i64::from(*status), count));
        let completions = counted.completion_errors.iter().map(|(status, count)| ("error", i64::from(*status), count));
        for (point, status, count) in endpoints.chain(completions) {
            metrics.completions.get_or_create(&CompletionLabel { point, status }).inc_by(*count);
        }
        metrics.unsafe_releases.inc_by(unsafe_releases);
        if unsafe_releases > 0 {
            tracing::warn!(
                pid = key.pid,
                requests = unsafe_releases,
                "the server released pages of requests while their transfers were under way: tokens may be wrong"
            );
        }
        self.count_completions(key);
    }

    fn count_completions(&mut self, key: ProcessKey) {
        let now: HashMap<_, _> = self.kernel.completions(key).into_iter().collect();
        let Some(server) = self.servers.get_mut(&key) else { return };
        for (at, completions) in now {
            let before = server.engine.completions.insert(at, completions.count).unwrap_or(0);
            let label = CompletionLabel { point: point_name(at.point), status: i64::from(at.status) };
            self.metrics.completions.get_or_create(&label).inc_by(completions.count.saturating_sub(before));
        }
    }

    pub(super) fn publish_transfers(&mut self, now: Monotonic) {
        let keys: Vec<ProcessKey> = self.servers.keys().copied().collect();
        for key in &keys {
            self.count_transfers(*key);
        }
        let mut standing: HashMap<(Engine, &'static str), i64> = HashMap::new();
        let mut oldest: HashMap<Engine, f64> = HashMap::new();
        for transfers in keys.iter().filter_map(|key| self.core.tracker().transfers(*key)) {
            for transfer in transfers.live() {
                let engine = transfer.handle.engine;
                let state = match transfer.state {
                    TransferState::Made => "made",
                    TransferState::InFlight => {
                        let age = oldest.entry(engine).or_default();
                        *age = age.max(now.since(transfer.since).as_secs_f64());
                        "in_flight"
                    }
                    TransferState::Ended(_) => continue,
                };
                *standing.entry((engine, state)).or_default() += 1;
            }
            for (engine, count) in transfers.given_up() {
                *standing.entry((engine, "given_up")).or_default() += count as i64;
            }
        }
        for engine in Engine::ALL {
            for state in ["made", "in_flight", "given_up"] {
                let count = standing.get(&(engine, state)).copied().unwrap_or(0);
                self.metrics.transfers.get_or_create(&TransferLabel { engine: engine.name(), state }).set(count);
            }
            let age = oldest.get(&engine).copied().unwrap_or(0.0);
            self.metrics.oldest_transfer.get_or_create(&EngineLabel { engine: engine.name() }).set(age);
        }
        self.publish_probes();
    }

    fn publish_probes(&self) {
        let mut probes: HashMap<ProbeLabel, i64> = HashMap::new();
        for row in self.servers.values().flat_map(|server| &server.engine.probes) {
            let label = ProbeLabel { role: row.role.name(), function: row.function, state: row.state.name() };
            *probes.entry(label).or_default() += 1;
        }
        self.metrics.probes.clear();
        for (label, count) in probes {
            self.metrics.probes.get_or_create(&label).set(count);
        }
    }

    /// Measures how long the server took to say that a room's transfers are done.
    pub(super) fn measure_status(&self, change: &Change) {
        if !matches!(change.step, Step::Phase { new: Phase::Success, .. }) {
            return;
        }
        let Some(tracked) = self.core.tracker().get(change.key) else { return };
        let known = tracked.transfers.of_room(tracked.request.room);
        if let Some(ended) = known.and_then(|known| known.last_ended).filter(|ended| *ended <= change.at) {
            self.metrics.completion_to_status.0.observe(change.at.since(ended).as_secs_f64());
        }
    }
}

fn point_name(point: u16) -> &'static str {
    let is = |other: &CompletionPoint| *other as u16 == point;
    match CompletionPoint::ALL.iter().find(|other| is(other)) {
        Some(CompletionPoint::MooncakePoll) => "mooncake_poll",
        Some(CompletionPoint::VerbsPollCq) => "verbs_poll_cq",
        Some(CompletionPoint::UctRcOperation) => "uct_rc",
        Some(CompletionPoint::UcpRequest) => "ucp_request",
        None => "unknown",
    }
}
