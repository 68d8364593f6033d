//! The agent's metrics. Label values are bounded: never a room or a request id.

use std::sync::atomic::{AtomicI64, AtomicU64};

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
        info::Info,
    },
    registry::{Registry, Unit},
};

/// One label, `reason`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Reason {
    /// Why.
    pub reason: String,
}

/// One label, `outcome`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabel {
    /// How it ended.
    pub outcome: &'static str,
}

/// One label, `cause`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CauseLabel {
    /// A diagnosis' cause.
    pub cause: &'static str,
}

/// One label, `gauge`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct GaugeLabel {
    /// How a server's own gauge compares with what was seen.
    pub gauge: &'static str,
}

/// Labels of requests.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PhaseLabel {
    /// `prefill` or `decode`: the side that their server is on.
    pub role: &'static str,
    /// The queue that they are in; `none` when in none.
    pub queue: &'static str,
    /// SGLang's name of the phase; `none` before the first poll.
    pub phase: &'static str,
}

/// One label, `state`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StateLabel {
    /// How far the agent has got with a server.
    pub state: &'static str,
}

/// Labels of transfers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TransferLabel {
    /// `nixl` or `mooncake`.
    pub engine: &'static str,
    /// Where they stand, or how they ended.
    pub state: &'static str,
}

/// One label, `engine`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct EngineLabel {
    /// `nixl` or `mooncake`.
    pub engine: &'static str,
}

/// Labels of completions.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CompletionLabel {
    /// Where they were seen.
    pub point: &'static str,
    /// `ibv_wc_status` of a work completion, `ucs_status_t` of a UCX request or endpoint.
    pub status: i64,
}

/// Labels of RDMA devices' own counters.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DeviceLabel {
    /// The device's name.
    pub device: String,
    /// The port's number.
    pub port: u32,
    /// The counter, as the driver names it.
    pub counter: &'static str,
}

/// Labels of probes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ProbeLabel {
    /// The kind of library.
    pub role: &'static str,
    /// The function.
    pub function: &'static str,
    /// What became of the probe.
    pub state: &'static str,
}

/// Labels of recordings.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RecordingLabel {
    /// `alert` or `request`.
    pub reason: &'static str,
    /// `written` or `failed`.
    pub outcome: &'static str,
}

/// Labels of an alert.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct AlertLabel {
    /// The rule's name.
    pub rule: String,
    /// The rule's severity.
    pub severity: &'static str,
    /// `pending` or `firing`.
    pub state: &'static str,
}

/// One label, `rule`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RuleLabel {
    /// The rule's name.
    pub rule: String,
}

/// Labels of an Alertmanager.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TargetLabel {
    /// Its host and port.
    pub target: String,
    /// `sent`, `failed` or `rejected`.
    pub result: &'static str,
}

type Count = Counter<u64, AtomicU64>;
type Seconds = Gauge<f64, AtomicU64>;
type Number = Gauge<i64, AtomicI64>;

/// Durations from 100 µs to some 100 s.
#[derive(Clone, Debug)]
pub struct Durations(pub Histogram);

impl Default for Durations {
    fn default() -> Self {
        Self(Histogram::new(exponential_buckets(0.0001, 4.0, 11)))
    }
}

/// Every metric of the agent.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Marks that the BPF program saw.
    pub events_seen: Count,
    /// Events that the agent applied.
    pub events_applied: Count,
    /// Events lost on the way, by reason.
    pub events_lost: Family<Reason, Count>,
    /// Details that were cut or could not be read, by reason.
    pub details_lost: Family<Reason, Count>,
    /// Transfers that are under way, made or given up, by engine and state.
    pub transfers: Family<TransferLabel, Number>,
    /// Age of the oldest transfer that is under way, by engine.
    pub oldest_transfer: Family<EngineLabel, Seconds>,
    /// Transfers that ended, by engine and how.
    pub transfers_ended: Family<TransferLabel, Count>,
    /// Bytes of transfers that ended, as far as known, by engine and how.
    pub transfer_bytes: Family<TransferLabel, Count>,
    /// Transfers of which it is not known what they are about, by reason.
    pub transfers_not_joined: Family<Reason, Count>,
    /// What is not known of transfers, by reason.
    pub transfers_not_known: Family<Reason, Count>,
    /// Notifications, `sent` and `arrived`.
    pub notifications: Family<OutcomeLabel, Count>,
    /// Completions, by where they were seen and their status.
    pub completions: Family<CompletionLabel, Count>,
    /// Errors that RDMA devices of the servers counted, by device, port and counter.
    pub device_errors: Family<DeviceLabel, Count>,
    /// Requests for servers' own pages, by outcome.
    pub server_metrics_reads: Family<OutcomeLabel, Count>,
    /// Samples of queues on servers' own pages that could not be used.
    pub server_metrics_left_out: Count,
    /// Schedulers by how their own gauge of the inflight queue compares with what was seen.
    pub server_gauges: Family<GaugeLabel, Number>,
    /// From the end of a room's last transfer until `poll()` said so.
    pub completion_to_status: Durations,
    /// Requests whose pages were released while a transfer of theirs was under way.
    pub unsafe_releases: Count,
    /// Probes on transfer engines, by function and what became of them.
    pub probes: Family<ProbeLabel, Number>,
    /// Looks at servers whose transfers do not get on, by outcome.
    pub looks: Family<OutcomeLabel, Count>,
    /// Questions to the agents of other nodes about a room's other end, by outcome.
    pub peer_questions: Family<OutcomeLabel, Count>,
    /// Calls into transfer engines whose return could not be joined to its entry, by reason.
    pub calls_lost: Family<Reason, Count>,
    /// Events that could not be decoded, by reason.
    pub decode_errors: Family<Reason, Count>,
    /// Events that the tracker could not use, by reason.
    pub events_unused: Family<Reason, Count>,
    /// Servers by how far the agent has got with them.
    pub servers: Family<StateLabel, Number>,
    /// Failures to attach to a server or to take its hook's channel, by reason.
    pub attach_errors: Family<Reason, Count>,
    /// Resynchronisations asked for, by reason.
    pub resynchronisations: Family<Reason, Count>,
    /// Messages of a hook that could not be used, by reason.
    pub control_discarded: Family<Reason, Count>,
    /// Live requests by role, queue and phase.
    pub requests: Family<PhaseLabel, Number>,
    /// Requests in inflight queues.
    pub inflight: Number,
    /// Age of the oldest request in an inflight queue.
    pub oldest_inflight: Seconds,
    /// Requests for which an alert fires, by cause.
    pub stuck: Family<CauseLabel, Number>,
    /// Alerts by rule, severity and state.
    pub alerts: Family<AlertLabel, Number>,
    /// Conditions that failed when evaluated, by rule.
    pub rule_errors: Family<RuleLabel, Count>,
    /// Ticks whose budget did not reach every request.
    pub evaluation_overruns: Count,
    /// Reloads of the rules by outcome.
    pub reloads: Family<OutcomeLabel, Count>,
    /// Messages to Alertmanagers by target and result.
    pub alertmanager: Family<TargetLabel, Count>,
    /// Firing verdicts that found the Alertmanager sink full.
    pub alertmanager_dropped: Count,
    /// Records that could not be written to the audit log.
    pub audit_errors: Count,
    /// Recordings by reason and outcome.
    pub recordings: Family<RecordingLabel, Count>,
    /// Bytes that the flight recorder keeps.
    pub recorder_bytes: Number,
    /// Inputs that the flight recorder does not keep any more, or could not, by reason.
    pub recorder_dropped: Family<Reason, Count>,
    /// Remediations by outcome.
    pub remediations: Family<OutcomeLabel, Count>,
    /// Remediations that a guard refused, by reason: of the agent's, and `hook_…` of the hook's.
    pub refusals: Family<Reason, Count>,
}

impl Metrics {
    /// Registers every metric.
    pub fn register(&self) -> Registry {
        let mut registry = Registry::with_prefix("dislodge");
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The agent's version", build);
        let r = &mut registry;
        r.register("events_seen", "Marks that the BPF program saw", self.events_seen.clone());
        r.register("events_applied", "Events that the agent applied", self.events_applied.clone());
        r.register("events_lost", "Events lost on the way from BPF to the agent", self.events_lost.clone());
        r.register("details_lost", "Details of events that were cut or could not be read", self.details_lost.clone());
        self.register_transfers(r);
        r.register("calls_lost", "Calls into transfer engines that could not be followed", self.calls_lost.clone());
        r.register("decode_errors", "Events that could not be decoded", self.decode_errors.clone());
        r.register("events_unused", "Events that the tracker could not use", self.events_unused.clone());
        r.register("servers", "SGLang schedulers on this node, by how they are watched", self.servers.clone());
        r.register("attach_errors", "Failures to attach to a server or its hook", self.attach_errors.clone());
        r.register("resynchronisations", "Resynchronisations asked for", self.resynchronisations.clone());
        r.register("control_discarded", "Messages of a hook that could not be used", self.control_discarded.clone());
        let reads = "Requests for the servers' own /metrics, by outcome";
        r.register("server_metrics_reads", reads, self.server_metrics_reads.clone());
        let left_out = "Samples of queues on the servers' own pages that could not be used";
        r.register("server_metrics_left_out_samples", left_out, self.server_metrics_left_out.clone());
        let gauges = "Schedulers by how their own num_prefill_inflight_queue_reqs compares with what was seen";
        r.register("server_gauges", gauges, self.server_gauges.clone());
        r.register("requests", "Live requests by role, queue and phase", self.requests.clone());
        r.register("inflight_requests", "Requests in prefill inflight queues", self.inflight.clone());
        let oldest = "Age of the oldest request in a prefill inflight queue";
        r.register_with_unit("oldest_inflight_request_age", oldest, Unit::Seconds, self.oldest_inflight.clone());
        r.register("stuck_requests", "Requests for which an alert fires, by cause", self.stuck.clone());
        r.register("alerts", "Alerts by rule, severity and state", self.alerts.clone());
        r.register("rule_errors", "Conditions that failed when evaluated", self.rule_errors.clone());
        let overruns = "Ticks whose budget did not reach every request";
        r.register("evaluation_overruns", overruns, self.evaluation_overruns.clone());
        r.register("rule_reloads", "Reloads of the rules by outcome", self.reloads.clone());
        r.register("alertmanager_messages", "Messages to Alertmanagers by result", self.alertmanager.clone());
        let dropped = "Firing alerts that found the Alertmanager sink full";
        r.register("alertmanager_dropped", dropped, self.alertmanager_dropped.clone());
        r.register("audit_errors", "Records that could not be written to the audit log", self.audit_errors.clone());
        r.register("recordings", "Recordings by reason and outcome", self.recordings.clone());
        let kept = "What the flight recorder keeps in memory";
        r.register_with_unit("recorder", kept, Unit::Bytes, self.recorder_bytes.clone());
        let dropped = "Inputs that the flight recorder does not keep any more, or could not";
        r.register("recorder_dropped_inputs", dropped, self.recorder_dropped.clone());
        r.register("remediations", "Remediations by outcome", self.remediations.clone());
        r.register("remediation_refusals", "Remediations that a guard refused", self.refusals.clone());
        registry
    }

    fn register_transfers(&self, r: &mut Registry) {
        r.register("transfers", "Transfers that are not over, by engine and state", self.transfers.clone());
        let oldest = "Age of the oldest transfer that is under way";
        r.register_with_unit("oldest_transfer_age", oldest, Unit::Seconds, self.oldest_transfer.clone());
        r.register("transfers_ended", "Transfers that ended, by engine and how", self.transfers_ended.clone());
        let bytes = "Bytes of transfers that ended, as far as known";
        r.register_with_unit("transfer", bytes, Unit::Bytes, self.transfer_bytes.clone());
        let not_joined = "Transfers of which it is not known which room or request they are about";
        r.register("transfers_not_joined", not_joined, self.transfers_not_joined.clone());
        let not_known = "Transfers of which something is not known";
        r.register("transfers_not_known", not_known, self.transfers_not_known.clone());
        r.register("notifications", "Notifications of transfer engines", self.notifications.clone());
        let completions = "Completions and errors of UCX, Mooncake and libibverbs, where they are counted";
        r.register("completions", completions, self.completions.clone());
        let devices = "Errors that the RDMA devices of the servers counted themselves, of all that use them";
        r.register("device_errors", devices, self.device_errors.clone());
        let lag = "From the end of a room's last transfer until poll() returned Success";
        r.register_with_unit("completion_to_status", lag, Unit::Seconds, self.completion_to_status.0.clone());
        let unsafe_releases = "Requests whose pages were released while a transfer of theirs was under way";
        r.register("unsafe_releases", unsafe_releases, self.unsafe_releases.clone());
        r.register("probes", "Probes on transfer engines, by what became of them", self.probes.clone());
        r.register("peer_questions", "Questions to other agents about a room's other end", self.peer_questions.clone());
        r.register("looks", "Looks at servers whose transfers do not get on", self.looks.clone());
    }

    /// Adds to a counter what it lacks of `total`: for counts that are kept elsewhere.
    pub fn raise(counter: &Count, total: u64) {
        counter.inc_by(total.saturating_sub(counter.get()));
    }
}

/// A `reason` label.
pub fn reason(reason: &str) -> Reason {
    Reason { reason: reason.to_owned() }
}
