//! What the loop shows of its state: gauges, and the answer to `/status`.

use std::collections::HashMap;

use super::{Pipeline, notice::Notice, servers::Server};
use crate::{
    diagnose::{Cause, Fact, gauge_evidence},
    event::{Phase, clock::Monotonic},
    metrics::{AlertLabel, CauseLabel, Metrics, PhaseLabel, RuleLabel, StateLabel, TargetLabel, reason},
    request::{NativeState, Side, transfers::Transfers},
    server::status::{AlertStatus, ControlStatus, ServerStatus, Status, SubjectStatus, TransfersStatus},
    verdict::Verdict,
};

/// Alerts that `/status` lists; the rest is counted.
const MAX_LISTED: usize = 100;

impl Pipeline {
    pub(super) fn publish(&mut self, now: Monotonic) {
        self.publish_requests(now);
        self.publish_alerts();
        self.publish_queues();
        self.publish_transfers(now);
        self.publish_recorder();
        self.publish_gauges(now);
        let metrics = &self.metrics;
        for state in ["watched", "without_control", "without_hook"] {
            let count = self.servers.values().filter(|server| server.state() == state).count();
            metrics.servers.get_or_create(&StateLabel { state }).set(count as i64);
        }
        let unused = self.core.tracker().unused();
        for (name, total) in [
            ("unknown_process", unused.unknown_process),
            ("unknown_sender", unused.unknown_sender),
            ("retired", unused.retired),
            ("rooms_dropped", unused.rooms_dropped),
        ] {
            Metrics::raise(&metrics.events_unused.get_or_create(&reason(name)), total);
        }
    }

    fn publish_requests(&self, now: Monotonic) {
        let (mut inflight, mut oldest) = (0, 0.0_f64);
        let mut counts: HashMap<PhaseLabel, i64> = HashMap::new();
        for tracked in self.core.tracker().requests() {
            let request = tracked.request;
            let (role, queue) = (request.side().name(), request.queue().name());
            let phase = request.phase.map_or("none", Phase::name);
            *counts.entry(PhaseLabel { role, queue, phase }).or_default() += 1;
            if let Some(entered) = tracked.request.entered {
                inflight += 1;
                oldest = oldest.max(now.since(entered).as_secs_f64());
            }
        }
        self.metrics.inflight.set(inflight);
        self.metrics.oldest_inflight.set(oldest);
        let phases = || Phase::ALL.iter().map(|phase| phase.name()).chain(["none"]);
        let places = Side::ALL.into_iter().flat_map(|role| role.queues().map(|queue| (role.name(), queue.name())));
        for (role, queue) in places {
            for label in phases().map(|phase| PhaseLabel { role, queue, phase }) {
                let count = counts.get(&label).copied().unwrap_or(0);
                self.metrics.requests.get_or_create(&label).set(count);
            }
        }
    }

    fn publish_queues(&mut self) {
        let lengths: Vec<_> = self
            .core
            .tracker()
            .servers()
            .filter_map(|(key, state)| state.queue_length.map(|(length, _)| (key, length)))
            .collect();
        for (process, length) in lengths {
            if let Some(server) = self.servers.get_mut(&process)
                && server.shown_length.replace(length) != Some(length)
            {
                self.notify(Notice::QueueLength { process, length });
            }
        }
    }

    fn publish_alerts(&self) {
        let metrics = &self.metrics;
        let stuck = self.core.stuck_by_cause();
        for cause in Cause::ALL {
            let count = stuck.get(&cause).copied().unwrap_or(0);
            metrics.stuck.get_or_create(&CauseLabel { cause: cause.name() }).set(count as i64);
        }
        let evaluator = self.core.evaluator();
        let counts = evaluator.alerts().counts();
        for (index, rule) in evaluator.rules().iter() {
            let of_rule = counts.get(&index).copied().unwrap_or_default();
            for (state, count) in [("pending", of_rule.pending), ("firing", of_rule.firing)] {
                let label = AlertLabel { rule: rule.name.to_string(), severity: rule.severity.name(), state };
                metrics.alerts.get_or_create(&label).set(count as i64);
            }
        }
        for (index, errors) in evaluator.errors() {
            if let Some(rule) = evaluator.rules().get(index) {
                Metrics::raise(&metrics.rule_errors.get_or_create(&RuleLabel { rule: rule.name.to_string() }), errors);
            }
        }
        Metrics::raise(&metrics.evaluation_overruns, evaluator.overruns());
        if let Some(sink) = &self.alertmanager {
            for (url, delivery) in sink.deliveries() {
                let target = format!("{}:{}", url.host_str().unwrap_or(""), url.port_or_known_default().unwrap_or(0));
                for (result, total) in
                    [("sent", delivery.sent()), ("failed", delivery.failures()), ("rejected", delivery.rejected())]
                {
                    let label = TargetLabel { target: target.clone(), result };
                    Metrics::raise(&metrics.alertmanager.get_or_create(&label), total);
                }
            }
            Metrics::raise(&metrics.alertmanager_dropped, sink.dropped());
        }
    }

    fn transfers_status(&self, server: &Server, now: Monotonic) -> TransfersStatus {
        let key = server.target.key;
        let transfers = self.core.tracker().transfers(key);
        let native = self.core.tracker().server(key).map(|state| state.native.clone()).unwrap_or_default();
        let mut subjects: Vec<SubjectStatus> = transfers
            .into_iter()
            .flat_map(Transfers::subjects)
            .filter_map(|(subject, transfers)| SubjectStatus::of(subject, transfers, &native, now))
            .collect();
        subjects.sort_by(|a, b| b.oldest_seconds.total_cmp(&a.oldest_seconds));
        let not_joined =
            transfers.and_then(|transfers| transfers.not_joined().under_way()).map_or(0, |(count, _)| count);
        let under_way = subjects.iter().map(|subject| subject.under_way).sum::<usize>() + not_joined;
        let subjects_not_listed = subjects.len().saturating_sub(MAX_LISTED);
        subjects.truncate(MAX_LISTED);
        TransfersStatus {
            watch: native.watch,
            errors: errors(&native),
            probes: server.engine.probes.clone(),
            unreachable: server.engine.unreachable.clone(),
            under_way,
            under_way_not_joined: not_joined,
            subjects,
            subjects_not_listed,
        }
    }

    pub(super) fn status(&self, now: Monotonic) -> Status {
        let mut servers: Vec<ServerStatus> = self
            .servers
            .values()
            .map(|server| {
                let key = server.target.key;
                let state = self.core.tracker().server(key);
                ServerStatus {
                    pid: key.pid,
                    title: server.target.title.clone(),
                    state: server.state(),
                    probe: server.probe.clone().err(),
                    control: match &server.control {
                        Ok(channel) => ControlStatus::Taken { hook: channel.hook_version().to_owned() },
                        Err(error) => ControlStatus::Missing { why: error.clone() },
                    },
                    synchronised: state.is_some_and(|state| state.sync == crate::request::Sync::Complete),
                    hello: state.and_then(|state| state.hello.as_deref().cloned()),
                    queue_length: state.and_then(|state| state.queue_length).map(|(length, _)| length),
                    paused: state.is_some_and(|state| state.paused),
                    requests: self.core.tracker().requests().filter(|tracked| tracked.key.process == key).count(),
                    transfers: self.transfers_status(server, now),
                    server_metrics: self.gauge_status(server, now),
                    events_seen: self.kernel.counters(key).map_or(0, |counters| counters.seen),
                    events_lost: self.kernel.counters(key).map_or(0, |counters| counters.lost()),
                }
            })
            .collect();
        servers.sort_by_key(|server| server.pid);
        let active = self.core.active().count();
        Status {
            version: env!("CARGO_PKG_VERSION"),
            mode: self.config.mode,
            node: self.config.node.clone(),
            servers,
            alerts: self.core.active().take(MAX_LISTED).map(|verdict| self.alert_status(verdict, now)).collect(),
            alerts_not_listed: active.saturating_sub(MAX_LISTED),
        }
    }
}

impl Pipeline {
    /// An alert as it was told last, with what its server's gauge says by now: that changes while nothing of the request does.
    fn alert_status(&self, verdict: &Verdict, now: Monotonic) -> AlertStatus {
        let gauge = self.core.tracker().get(verdict.request).and_then(|tracked| gauge_evidence(&tracked, now));
        AlertStatus::of(verdict, gauge.as_ref(), now)
    }
}

fn errors(native: &NativeState) -> Vec<String> {
    let endpoint = native.endpoint_error.map(|failure| Fact::EndpointGivenUp { status: failure.status });
    let completion = native.completion_error.map(|(_, status)| Fact::WorkCompletionError { status });
    let devices = native.device_errors.iter().map(Fact::of_device);
    endpoint.into_iter().chain(completion).chain(devices).map(|fact| fact.to_string()).collect()
}
