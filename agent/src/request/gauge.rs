//! The server's own gauge of its inflight queue, held against the queue as the hook's marks show it.
//!
//! The gauge is no measurement of now: SGLang sets it when it reports a prefill batch (`report_prefill_stats`), and when the
//! server has been *fully* idle for 30 s since the last report (`_maybe_log_idle_metrics`). A pinned request keeps the server
//! from being idle, so the gauge keeps what the queue held at the last batch; up to 0.5.2 the idle report is made too, but does
//! not take the queue's length anew (`check_memory`; 0.5.3 does), so there it stays above zero on a server with nothing to do.
//! So the gauge is named beside what was seen, and never believed against it.

use std::time::Duration;

use serde::Serialize;

use super::{ServerState, Sync};
use crate::{
    event::{
        Hello,
        clock::Monotonic,
        exposition::{Queue, Rank, Sample},
    },
    record::codec::recorded,
};

/// How long after the queue's last change a batch may still be on its way into the gauge: it is reported once its result has
/// been processed, and then written into a file that the HTTP server reads.
const SETTLES_WITHIN: Duration = Duration::from_secs(2);
/// How long after the queue's last change an idle server (0.5.3 and newer) may take to say so: 30 s, and a turn of its loop.
const REFRESHED_WITHIN: Duration = Duration::from_secs(35);
/// A scheduler that turns marks a pass ten times a second, one that sleeps each second.
const SEEN_WITHIN: Duration = Duration::from_secs(10);
/// The first release whose idle report takes the queues' lengths anew.
const REFRESHES_SINCE: [u32; 3] = [0, 5, 3];

/// What a server's page says of one scheduler. Nothing where the page has no such gauge for its rank, or contradicts itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gauges {
    /// `num_prefill_inflight_queue_reqs` (`…infight…` up to 0.5.1).
    pub prefill_inflight: Option<u32>,
    /// `num_prefill_bootstrap_queue_reqs` (`…prealloc…` up to 0.5.11).
    pub prefill_bootstrap: Option<u32>,
    /// `num_decode_prealloc_queue_reqs`.
    pub decode_prealloc: Option<u32>,
    /// `num_decode_transfer_queue_reqs`.
    pub decode_transfer: Option<u32>,
    /// Whether the first is spelt as only releases up to 0.5.1 do.
    pub is_old_spelling: bool,
}

recorded!(struct Gauges { prefill_inflight, prefill_bootstrap, decode_prealloc, decode_transfer, is_old_spelling });

impl Gauges {
    /// What the page says of the scheduler with that rank. Only the first attention-TP rank reports unless a server is told
    /// otherwise (`--enable-metrics-for-all-schedulers`); the queue is the same on each of them, so its series stands for the
    /// others of its replica and stage.
    pub fn of_rank(samples: &[Sample], rank: Rank) -> Self {
        let length = |queue: Queue| {
            let same = |it: &&Sample| it.queue == queue && (it.rank.dp, it.rank.pp) == (rank.dp, rank.pp);
            let nearest = samples.iter().filter(same).map(|it| it.rank.tp).min_by_key(|tp| (*tp != rank.tp, *tp))?;
            let mut lengths = samples.iter().filter(same).filter(|it| it.rank.tp == nearest).map(|it| it.length);
            let first = lengths.next()?;
            lengths.all(|other| other == first).then_some(first).flatten()
        };
        Self {
            prefill_inflight: length(Queue::PrefillInflight),
            prefill_bootstrap: length(Queue::PrefillBootstrap),
            decode_prealloc: length(Queue::DecodePrealloc),
            decode_transfer: length(Queue::DecodeTransfer),
            is_old_spelling: samples.iter().any(|it| it.is_old_spelling),
        }
    }
}

/// What was read of a server's gauges, the last time and before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GaugeState {
    /// The last reading.
    pub gauges: Gauges,
    /// When that was.
    pub at: Monotonic,
    /// When the inflight gauge was first read with the value that it has had in each reading since.
    pub since: Monotonic,
    /// Readings with that value.
    pub readings: u32,
}

recorded!(struct GaugeState { gauges, at, since, readings });

impl GaugeState {
    /// After another reading.
    pub(super) fn after(before: Option<Self>, gauges: Gauges, at: Monotonic) -> Self {
        match before.filter(|before| before.gauges.prefill_inflight == gauges.prefill_inflight) {
            Some(Self { since, readings, .. }) => Self { gauges, at, since, readings: readings.saturating_add(1) },
            None => Self { gauges, at, since: at, readings: 1 },
        }
    }
}

/// What is known of a server's gauges, and of the queue that the first of them is held against.
#[derive(Clone, Debug, Default)]
pub struct ServerGauge {
    /// When the inflight queue last changed: by a mark, or by the length that a pass reported.
    pub queue_rests: Option<Monotonic>,
    /// What was read, if anything.
    pub read: Option<Box<GaugeState>>,
}

recorded!(struct ServerGauge { queue_rests, read });

/// How the server's gauge of its inflight queue compares with the queue that was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "gauge", content = "why", rename_all = "snake_case")]
pub enum GaugeCheck {
    /// They say the same.
    Agrees,
    /// It keeps another number, which the queue had at the last batch: the server is not idle, so nothing sets it anew.
    Frozen,
    /// It is above zero though the queue is empty, and stays there until the next batch: what releases up to 0.5.2 do on an
    /// idle server.
    NotRefreshed,
    /// It cannot be told.
    NotKnown(GaugeNotKnown),
}

/// Why it cannot be told how a gauge compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GaugeNotKnown {
    /// The gauge was never read.
    NotRead,
    /// The page has no such gauge for this scheduler's rank.
    NoSeries,
    /// It is not known completely what is in the queue.
    QueueNotSeen,
    /// The queue has changed since the gauge was read, or just before.
    QueueMoves,
    /// They differ, and the server may still report that it is idle.
    RefreshDue,
    /// They differ, in one reading so far: whether the gauge moves is not known.
    ReadOnce,
}

impl GaugeCheck {
    /// Every outcome.
    pub const NAMES: [&str; 4] = ["agrees", "frozen", "not_refreshed", "not_known"];

    /// Its name in rules, labels and output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Agrees => "agrees",
            Self::Frozen => "frozen",
            Self::NotRefreshed => "not_refreshed",
            Self::NotKnown(_) => "not_known",
        }
    }

    /// How the gauge of this server compares with its queue, as far as both are known at `now`.
    pub fn of(server: &ServerState, now: Monotonic) -> Self {
        use GaugeNotKnown::{NoSeries, NotRead, QueueMoves, QueueNotSeen, ReadOnce, RefreshDue};
        let Some(state) = server.gauge.read.as_deref() else { return Self::NotKnown(NotRead) };
        // A decode's page has the gauge of prefills too, at 0, and what its passes count is not the inflight queue.
        let is_decode = server.hello.as_deref().is_some_and(|hello| hello.role.as_deref() == Some("decode"));
        let Some(gauge) = state.gauges.prefill_inflight.filter(|_| !is_decode) else { return Self::NotKnown(NoSeries) };
        let (Some((length, passed)), Some(rests)) = (server.queue_length, server.gauge.queue_rests) else {
            return Self::NotKnown(QueueNotSeen);
        };
        if server.sync != Sync::Complete || now.since(passed) > SEEN_WITHIN {
            return Self::NotKnown(QueueNotSeen);
        }
        // A gauge that was read before the queue's last change says nothing of the queue since.
        if state.at < rests {
            return Self::NotKnown(QueueMoves);
        }
        if gauge == length {
            return Self::Agrees;
        }
        if state.at < rests.plus(SETTLES_WITHIN) {
            return Self::NotKnown(QueueMoves);
        }
        if length == 0 && !refreshes_when_idle(server.hello.as_deref(), state.gauges.is_old_spelling) {
            return Self::NotRefreshed;
        }
        if length == 0 && state.at < rests.plus(REFRESHED_WITHIN) {
            return Self::NotKnown(RefreshDue);
        }
        if state.readings < 2 { Self::NotKnown(ReadOnce) } else { Self::Frozen }
    }
}

/// Whether an idle server of this release sets its gauges of queues anew. One that does not say its release does: that asks
/// for more before a gauge is called stale.
fn refreshes_when_idle(hello: Option<&Hello>, is_old_spelling: bool) -> bool {
    let release = hello.and_then(Hello::release);
    !is_old_spelling && release.is_none_or(|release| release >= REFRESHES_SINCE)
}

#[cfg(test)]
#[path = "gauge/tests.rs"]
mod tests;
