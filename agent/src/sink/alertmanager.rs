//! Alerts → Alertmanager (`POST /api/v2/alerts`), one task per Alertmanager.
//!
//! A sink holds the *state* of its alerts instead of a queue of messages: a verdict that comes while an Alertmanager is
//! slow changes what is told next, so nothing that was resolved is left firing, and the caller never waits. The state
//! is bounded ([`outbox::MAX_ALERTS`], [`outbox::MAX_REQUESTS`]); a firing verdict beyond that is dropped and counted.
//!
//! Firing alerts are told again every interval and carry an end four intervals ahead: an agent that dies lets them
//! expire, and one that stops on purpose leaves them to do the same, since stopping the agent frees no request.

mod http;
pub mod outbox;
mod payload;

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use backon::{BackoffBuilder, ExponentialBuilder};
use reqwest::{Client, Url};
use tokio::{sync::Notify, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    event::clock::{Monotonic, WallClock},
    verdict::Verdict,
};
use http::PostError;
pub use http::SetupError;
use outbox::{Due, Outbox};
use payload::PostableAlert;

const SHUTDOWN_LIMIT: Duration = Duration::from_secs(2);
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// How far the wall clock may have been stepped before alerts' times follow it.
const MAX_CLOCK_ERROR: jiff::SignedDuration = jiff::SignedDuration::from_secs(1);

/// What a sink must know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Base URLs; every Alertmanager of a cluster, since each must know every alert.
    pub urls: Vec<Url>,
    /// How often a firing alert is told again.
    pub resend_interval: Duration,
    /// PEM file with the only authorities to trust; the system's when not set.
    pub ca_file: Option<PathBuf>,
    /// File with a bearer token; read for each message, since tokens are rotated.
    pub bearer_token_file: Option<PathBuf>,
    /// URL of a runbook, `{cause}` standing for the cause.
    pub runbook_url: Option<String>,
}

/// What one Alertmanager was told. Alerts are counted once per message.
#[derive(Debug, Default)]
pub struct Delivery {
    sent: AtomicU64,
    failures: AtomicU64,
    rejected: AtomicU64,
}

impl Delivery {
    /// Alerts that it took.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Messages that did not get through and were tried again.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Messages that it refused for good (a status of 400 to 499 other than 401, 403, 408 and 429).
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }
}

/// Sends verdicts to every Alertmanager.
#[derive(Debug)]
pub struct AlertmanagerSink {
    targets: Vec<Arc<Target>>,
    workers: JoinSet<()>,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Target {
    url: Url,
    settings: Arc<Settings>,
    client: Client,
    outbox: Mutex<Outbox>,
    changed: Notify,
    delivery: Delivery,
}

impl AlertmanagerSink {
    /// Starts a task for each URL on the current runtime.
    ///
    /// # Errors
    ///
    /// The authorities' file is unusable, or TLS cannot be set up.
    pub fn start(settings: Settings) -> Result<Self, SetupError> {
        let client = http::client(&settings)?;
        let settings = Arc::new(settings);
        let stop = CancellationToken::new();
        let mut workers = JoinSet::new();
        let mut targets = Vec::new();
        for base in &settings.urls {
            let target = Arc::new(Target {
                url: http::alerts_url(base),
                settings: Arc::clone(&settings),
                client: client.clone(),
                outbox: Mutex::new(Outbox::new(settings.resend_interval)),
                changed: Notify::new(),
                delivery: Delivery::default(),
            });
            workers.spawn(deliver(Arc::clone(&target), stop.clone()));
            targets.push(target);
        }
        Ok(Self { targets, workers, stop })
    }

    /// Takes in a verdict. Never waits.
    pub fn send(&self, verdict: &Arc<Verdict>) {
        for target in &self.targets {
            target.outbox().apply(verdict);
            target.changed.notify_one();
        }
    }

    /// What each Alertmanager was told.
    pub fn deliveries(&self) -> impl Iterator<Item = (&Url, &Delivery)> {
        self.targets.iter().map(|target| (&target.url, &target.delivery))
    }

    /// Firing verdicts that were dropped because there were too many.
    pub fn dropped(&self) -> u64 {
        self.targets.iter().map(|target| target.outbox().dropped()).max().unwrap_or_default()
    }

    /// Tells what is still to be told, for two seconds at most. Resolves nothing that still fires.
    pub async fn shutdown(mut self) {
        self.stop.cancel();
        let drained = tokio::time::timeout(SHUTDOWN_LIMIT, async { while self.workers.join_next().await.is_some() {} });
        if drained.await.is_err() {
            tracing::warn!("alertmanager did not take the last alerts in time");
        }
    }
}

impl Delivery {
    fn count(&self, answer: &Result<(), PostError>, alerts: usize) {
        let (counter, more) = match answer {
            Ok(()) => (&self.sent, alerts as u64),
            Err(PostError::Again(_)) => (&self.failures, 1),
            Err(PostError::Refused { .. }) => (&self.rejected, 1),
        };
        counter.fetch_add(more, Ordering::Relaxed);
    }
}

impl Target {
    fn message(&self, due: &[Due], now: Monotonic, clock: &WallClock) -> Vec<PostableAlert> {
        let outbox = self.outbox();
        let runbook = self.settings.runbook_url.as_deref();
        let alerts = due.iter().filter_map(|due| outbox.alert(due));
        alerts.filter_map(|alert| payload::of(alert, outbox.lifetime(), runbook, now, clock)).collect()
    }

    /// Says what changed: an Alertmanager that is away for an hour is one line, not one for each attempt.
    fn log(&self, answer: &Result<(), PostError>, alerts: usize, was_reachable: bool) {
        let url = &self.url;
        match answer {
            Ok(()) if !was_reachable => tracing::info!(%url, "alertmanager takes alerts again"),
            Err(error @ PostError::Refused { .. }) => {
                tracing::error!(%url, %error, alerts, "alertmanager refused alerts")
            }
            Err(error) if was_reachable => {
                tracing::warn!(%url, %error, alerts, "alertmanager does not take alerts; trying again");
            }
            _ => {}
        }
    }

    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        // The outbox is sound after any of its methods: a panic elsewhere does not make it worse.
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells an Alertmanager what it has to know until `stop`, then what is left.
async fn deliver(target: Arc<Target>, stop: CancellationToken) {
    let mut backoff = backoff();
    let mut reachable = true;
    let mut clock = WallClock::now();
    loop {
        let now = Monotonic::now();
        let due = target.outbox().due(now);
        if due.is_empty() {
            if stop.is_cancelled() {
                return;
            }
            let wait = target.outbox().next_due(now);
            tokio::select! {
                () = stop.cancelled() => {}
                () = target.changed.notified() => {}
                () = tokio::time::sleep(wait) => {}
            }
            continue;
        }
        clock = steady(clock, now);
        let answer =
            http::post(&target.client, &target.url, &target.settings, &target.message(&due, now, &clock)).await;
        target.delivery.count(&answer, due.len());
        target.log(&answer, due.len(), reachable);
        reachable = !matches!(answer, Err(PostError::Again(_)));
        if reachable {
            // What it refused for good would be refused again: its next turn comes with the interval as well.
            target.outbox().told(&due, now);
            backoff = self::backoff();
            continue;
        }
        let wait = backoff.next().unwrap_or(LONGEST_RETRY);
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
    }
}

/// `clock` as long as it is right: read anew for each message, an alert's start would differ by microseconds each time.
fn steady(clock: WallClock, now: Monotonic) -> WallClock {
    let off = clock.timestamp(now).duration_since(jiff::Timestamp::now()).abs();
    if off > MAX_CLOCK_ERROR { WallClock::now() } else { clock }
}

fn backoff() -> <ExponentialBuilder as BackoffBuilder>::Backoff {
    ExponentialBuilder::default()
        .with_jitter()
        .with_min_delay(FIRST_RETRY)
        .with_max_delay(LONGEST_RETRY)
        .without_max_times()
        .build()
}
