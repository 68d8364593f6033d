//! Alerts → Alertmanager (`POST /api/v2/alerts`), one task per Alertmanager.
//!
//! A sink holds the *state* of its alerts instead of a queue of messages: a verdict that comes while an Alertmanager is
//! slow changes what is told next, so nothing that was resolved is left firing, and the caller never waits. The state
//! is bounded ([`outbox::MAX_ALERTS`], [`outbox::MAX_REQUESTS`]); a firing verdict beyond that is dropped and counted.
//!
//! Firing alerts are told again every interval and carry an end four intervals ahead: an agent that dies lets them
//! expire, and one that stops on purpose leaves them to do the same, since stopping the agent frees no request.

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
use reqwest::{Client, StatusCode, Url, redirect};
use tokio::{sync::Notify, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{
    event::clock::{Monotonic, WallClock},
    verdict::Verdict,
};
use outbox::Outbox;
use payload::PostableAlert;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const TOTAL_TIMEOUT: Duration = Duration::from_secs(5);
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(2);
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LONGEST_RETRY: Duration = Duration::from_secs(30);
/// How far the wall clock may have been stepped before alerts' times follow it.
const MAX_CLOCK_ERROR: jiff::SignedDuration = jiff::SignedDuration::from_secs(1);
/// Longest bearer token that is read from its file.
const MAX_TOKEN: usize = 16 << 10;
/// Bytes of an Alertmanager's complaint that are repeated.
const MAX_COMPLAINT: usize = 256;

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

/// Why a sink cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The authorities' file cannot be read.
    #[error("the ca_file {path} cannot be read: {source}", path = path.display())]
    CaFile {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The authorities' file has no certificate, or one that is broken.
    #[error("the ca_file {path} has no usable PEM certificate", path = path.display())]
    NoCertificate {
        /// The file.
        path: PathBuf,
    },
    /// TLS cannot be set up.
    #[error("the HTTP client cannot be made; where no authorities are installed, set ca_file: {0}")]
    Client(#[from] reqwest::Error),
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

    /// Messages that it refused for good (a status of 400 to 499 other than 408 and 429).
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
        let client = client(&settings)?;
        let settings = Arc::new(settings);
        let stop = CancellationToken::new();
        let mut workers = JoinSet::new();
        let mut targets = Vec::new();
        for base in &settings.urls {
            let target = Arc::new(Target {
                url: alerts_url(base),
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

impl Target {
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
        let batch = target.outbox().due(now);
        if batch.is_empty() {
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
        let runbook = target.settings.runbook_url.as_deref();
        let alerts: Vec<PostableAlert> = {
            let outbox = target.outbox();
            batch
                .iter()
                .filter_map(|due| payload::of(outbox.alert(due)?, outbox.lifetime(), runbook, now, &clock))
                .collect()
        };
        match post(&target, &alerts).await {
            Ok(()) => {
                target.outbox().told(&batch, now);
                target.delivery.sent.fetch_add(alerts.len() as u64, Ordering::Relaxed);
                backoff = self::backoff();
                if !reachable {
                    tracing::info!(url = %target.url, "alertmanager takes alerts again");
                }
                reachable = true;
            }
            Err(PostError::Rejected { status, complaint }) => {
                // The same message would be refused again; the next interval's may not be.
                target.outbox().told(&batch, now);
                target.delivery.rejected.fetch_add(1, Ordering::Relaxed);
                tracing::error!(url = %target.url, %status, complaint, alerts = alerts.len(), "alertmanager refused alerts");
            }
            Err(error) => {
                target.delivery.failures.fetch_add(1, Ordering::Relaxed);
                if reachable {
                    tracing::warn!(url = %target.url, %error, alerts = alerts.len(), "alertmanager does not take alerts; trying again");
                }
                reachable = false;
                let wait = backoff.next().unwrap_or(LONGEST_RETRY);
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(wait) => {}
                }
            }
        }
    }
}

/// `clock` as long as it is right: read anew for each message, an alert's start would differ by microseconds each time.
fn steady(clock: WallClock, now: Monotonic) -> WallClock {
    let off = clock.timestamp(now).duration_since(jiff::Timestamp::now()).abs();
    if off > MAX_CLOCK_ERROR { WallClock::now() } else { clock }
}

#[derive(Debug, thiserror::Error)]
enum PostError {
    #[error("the bearer_token_file cannot be read: {0}")]
    Token(std::io::Error),
    #[error("the bearer_token_file has no token that fits a header")]
    BadToken,
    #[error(transparent)]
    Http(#[from] reqwest::Error),
    #[error("it answered {status}: {complaint}")]
    Busy { status: StatusCode, complaint: String },
    #[error("it answered {status}: {complaint}")]
    Rejected { status: StatusCode, complaint: String },
}

async fn post(target: &Target, alerts: &[PostableAlert]) -> Result<(), PostError> {
    let mut request = target.client.post(target.url.clone()).json(alerts);
    if let Some(file) = &target.settings.bearer_token_file {
        let token = std::fs::read_to_string(file).map_err(PostError::Token)?;
        let token = token.trim();
        if token.is_empty() || token.len() > MAX_TOKEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(PostError::BadToken);
        }
        request = request.bearer_auth(token);
    }
    let mut response = request.send().await?;
    let status = response.status();
    if status.is_success() {
        return Ok(());
    }
    let complaint = response.chunk().await.ok().flatten().unwrap_or_default();
    let complaint =
        String::from_utf8_lossy(complaint.get(..MAX_COMPLAINT).unwrap_or(&complaint)).escape_debug().to_string();
    let again =
        !status.is_client_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
    Err(if again { PostError::Busy { status, complaint } } else { PostError::Rejected { status, complaint } })
}

fn client(settings: &Settings) -> Result<Client, SetupError> {
    // An error says that somebody has installed one already, which is what is needed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .timeout(TOTAL_TIMEOUT)
        .redirect(redirect::Policy::none())
        .no_proxy()
        .user_agent(concat!("dislodge/", env!("CARGO_PKG_VERSION")));
    if let Some(path) = &settings.ca_file {
        let pem = std::fs::read(path).map_err(|source| SetupError::CaFile { path: path.clone(), source })?;
        let authorities = reqwest::Certificate::from_pem_bundle(&pem).unwrap_or_default();
        if authorities.is_empty() {
            return Err(SetupError::NoCertificate { path: path.clone() });
        }
        builder = builder.tls_certs_only(authorities);
    } else if settings.urls.iter().all(|url| url.scheme() == "http") {
        // Without this the system's authorities are looked for, and a container often has none.
        builder = builder.tls_certs_only([]);
    }
    Ok(builder.build()?)
}

fn backoff() -> <ExponentialBuilder as BackoffBuilder>::Backoff {
    ExponentialBuilder::default()
        .with_jitter()
        .with_min_delay(FIRST_RETRY)
        .with_max_delay(LONGEST_RETRY)
        .without_max_times()
        .build()
}

/// `base` with the path of the alerts' API behind its own.
fn alerts_url(base: &Url) -> Url {
    let mut url = base.clone();
    url.set_path(&format!("{}/api/v2/alerts", base.path().trim_end_matches('/')));
    url
}
