//! The one loop that owns all state: it drains the ring, evaluates, acts, and feeds the sinks.
//!
//! Draining, evaluating and looking for servers take turns in one `select!`; nothing else touches the state. The ring
//! is the queue in front of the loop (what does not fit is counted in BPF), and each sink has its own behind it.

mod devices;
mod dumps;
mod engines;
mod explain;
mod looks;
pub mod notice;
mod peers;
mod publish;
mod reload;
mod remediate;
mod server_metrics;
mod servers;
mod transfers;

use std::{collections::HashMap, pin::pin, sync::Arc, time::Duration};

use tokio::{
    sync::mpsc,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tokio_util::sync::CancellationToken;

use crate::{
    config::Config,
    core::{EVALUATION_BUDGET, Effects, Input, Pace},
    event::{
        ProcessKey, Rid,
        clock::{Monotonic, WallClock},
    },
    kernel::{Kernel, canary::ReturnProbes, ring::Ring},
    metrics::{Metrics, reason},
    record::{
        flight::Flight,
        folder::{Folder, FolderError},
        recorder::{Recording, Span},
    },
    remedy::ladder::Ladder,
    request::{
        RequestKey,
        tracker::{Change, Limits},
    },
    rule::{Mode, RuleSet, alert::AlertState},
    server::{Question, status::Health},
    sink::{
        alertmanager::{AlertmanagerSink, SetupError},
        audit::{Audit, AuditError, AuditRecord},
    },
    verdict::Verdict,
};
use devices::{Devices, Reading};
use dumps::Dumps;
use engines::Survey;
use looks::{Looking, until_look_ends};
use notice::Notice;
use peers::{Peers, Told};
use remediate::Decision;
use server_metrics::ServerMetrics;
use servers::Server;

/// How often rules are evaluated and the state is looked after: a fifth of the second that detection may take.
const TICK: Duration = Duration::from_millis(200);
/// Events applied before the loop looks at anything else.
const MAX_BATCH: usize = 65_536;
/// Events in a look at the ring that make it a busy one.
const BUSY: usize = 64;
/// Looks at the ring without much in it, one after the other, before the loop looks less often.
const QUIET_AFTER: u32 = 5;
/// How often it then looks, where it is not set to look less often anyway: the ring holds what a burst brings meanwhile.
const QUIET_INTERVAL: Duration = Duration::from_millis(50);

/// What the pipeline is made of.
pub struct Parts {
    /// Settings.
    pub config: Config,
    /// The rules to begin with.
    pub rules: RuleSet,
    /// The loaded programs.
    pub kernel: Kernel,
    /// The ring that they write.
    pub ring: Ring,
    /// The metrics to keep.
    pub metrics: Metrics,
    /// What the HTTP server asks about.
    pub health: Arc<Health>,
    /// Who watches what happens, as it happens (`dislodge demo`). A full channel drops the notice.
    pub notices: Option<mpsc::Sender<Notice>>,
    /// The only processes to watch; every scheduler of the node when empty.
    pub only: Vec<u32>,
    /// Whether return probes may be put on servers.
    pub returns: ReturnProbes,
    /// Whether servers are asked for their state. Off only in tests, which show what is not known then.
    pub resynchronise: bool,
    /// Records so long even where no folder is configured: [`Pipeline::run`] returns it.
    pub record_for: Option<Duration>,
}

/// What others ask of a running pipeline.
#[derive(Debug)]
pub struct Requests {
    /// The HTTP server: for the status, or for what is known of a request.
    pub questions: mpsc::Receiver<Question>,
    /// For the rules to be read again.
    pub reload: mpsc::Receiver<()>,
    /// For what the flight recorder has.
    pub dump: mpsc::Receiver<()>,
}

/// Why a pipeline cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The audit log.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// The Alertmanagers.
    #[error(transparent)]
    Alertmanager(#[from] SetupError),
    /// What asks other agents.
    #[error("the HTTP client for other agents cannot be made: {0}")]
    Peers(reqwest::Error),
    /// The folder of recordings.
    #[error(transparent)]
    Recordings(#[from] FolderError),
}

/// The loop's state.
pub struct Pipeline {
    config: Config,
    core: Flight,
    dumps: Option<Dumps>,
    kernel: Kernel,
    ring: Ring,
    metrics: Metrics,
    health: Arc<Health>,
    notices: Option<mpsc::Sender<Notice>>,
    only: Vec<u32>,
    returns: ReturnProbes,
    looking: Option<Looking>,
    surveyed: mpsc::Sender<Survey>,
    surveys: Option<mpsc::Receiver<Survey>>,
    devices: Devices,
    readings: Option<mpsc::Receiver<Reading>>,
    peers: Peers,
    telling: Option<mpsc::Receiver<Told>>,
    server_metrics: ServerMetrics,
    resynchronise: bool,
    epoch: u64,
    servers: HashMap<ProcessKey, Server>,
    ladder: Ladder,
    decisions: HashMap<RequestKey, Decision>,
    acting: HashMap<RequestKey, Arc<Verdict>>,
    alertmanager: Option<AlertmanagerSink>,
    audit: Option<Audit>,
    audit_failing: bool,
}

impl Pipeline {
    /// Opens the sinks. Nothing is attached before [`run`](Self::run).
    ///
    /// # Errors
    ///
    /// The audit log cannot be opened, the Alertmanagers' settings cannot be used, or the folder of recordings is not there
    /// or another agent's.
    pub fn start(parts: Parts) -> Result<Self, StartError> {
        let Parts { config, rules, kernel, ring, metrics, health, notices, only, returns, resynchronise, record_for } =
            parts;
        let audit = config.audit.path.as_deref().map(Audit::open).transpose()?;
        let alertmanager = (!config.alertmanager.urls.is_empty())
            .then(|| AlertmanagerSink::start(config.alertmanager.clone().into()))
            .transpose()?;
        if config.mode > Mode::Observe && audit.is_none() {
            tracing::warn!(mode = config.mode.name(), "no audit.path is set: what cannot be recorded is not done");
        }
        let dumps = config.record.folder.as_deref().map(Folder::take).transpose()?;
        let dumps = dumps.map(|folder| Dumps::new(folder, config.record.on_firing, config.record.max_files));
        let record_for = record_for.map(|time| Span { time, bytes: config.record.max_bytes });
        let span = record_for.or(config.record.span());
        let limits = Limits { requests: config.max_requests, transfers: config.max_transfers };
        let (surveyed, surveys) = mpsc::channel(1);
        let (devices, readings) = Devices::new();
        let (peers, telling) = Peers::new(config.peers.urls.clone()).map_err(StartError::Peers)?;
        Ok(Self {
            core: Flight::new(rules, limits, &config.node, span, Monotonic::now()),
            dumps,
            ladder: Ladder::new(config.remediation.max_per_minute),
            epoch: Monotonic::now().0,
            servers: HashMap::new(),
            decisions: HashMap::new(),
            acting: HashMap::new(),
            audit_failing: false,
            config,
            kernel,
            ring,
            metrics,
            health,
            notices,
            only,
            returns,
            looking: None,
            surveyed,
            surveys: Some(surveys),
            devices,
            readings: Some(readings),
            peers,
            telling: Some(telling),
            server_metrics: ServerMetrics::new(),
            resynchronise,
            alertmanager,
            audit,
        })
    }

    /// Runs until `stop`; then it tells what it has recorded.
    pub async fn run(mut self, stop: CancellationToken, requests: Requests) -> Option<Recording> {
        let Requests { mut questions, mut reload, mut dump } = requests;
        let mut drain = pin!(sleep(Duration::ZERO));
        let mut quiet_looks = 0_u32;
        let mut tick = interval(TICK);
        let mut scan = interval(self.config.scan_interval);
        for timer in [&mut tick, &mut scan] {
            timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        let (found, mut targets) = mpsc::channel(1);
        let (mut surveys, mut readings) = (self.surveys.take()?, self.readings.take()?);
        let (mut telling, mut pages) = (self.telling.take()?, self.server_metrics.take_readings()?);
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                () = &mut drain => {
                    quiet_looks = if self.drain() < BUSY { quiet_looks.saturating_add(1) } else { 0 };
                    let pause = match self.config.drain_interval {
                        pause if quiet_looks >= QUIET_AFTER => pause.max(QUIET_INTERVAL),
                        pause => pause,
                    };
                    drain.as_mut().reset(Instant::now() + pause);
                }
                _ = tick.tick() => self.tick(Monotonic::now()),
                _ = scan.tick() => servers::look(found.clone(), self.only.clone()),
                Some(found) = targets.recv() => self.meet(found),
                () = until_look_ends(self.looking.as_ref().map(|looking| looking.until)) => self.end_look(),
                Some(survey) = surveys.recv() => self.attach_engine(survey),
                Some(reading) = readings.recv() => self.devices_read(reading),
                Some(told) = telling.recv() => self.peers_told(told),
                Some(page) = pages.recv() => self.server_metrics_read(page),
                Some(question) = questions.recv() => self.answer(question, Monotonic::now()),
                Some(()) = reload.recv() => self.reload(),
                Some(()) = dump.recv() => self.request_dump(),
            }
        }
        self.end_look();
        self.drain();
        let recording = self.core.recording();
        self.shut_down().await;
        recording
    }

    /// Applies what waits in the ring; returns how many events that were.
    fn drain(&mut self) -> usize {
        let Self { ring, core, metrics, .. } = self;
        let (mut effects, mut applied) = (Effects::default(), 0);
        let count = ring.drain(MAX_BATCH, |event| match event {
            Ok(event) => {
                applied += 1;
                core.apply(Input::Event(event), &mut effects);
            }
            Err(error) => {
                metrics.decode_errors.get_or_create(&reason(error.name())).inc();
            }
        });
        self.metrics.events_applied.inc_by(applied);
        self.take_in(effects);
        self.hear();
        count
    }

    /// Tells the core something, and everybody else what comes of it.
    fn apply(&mut self, input: Input) {
        let mut effects = Effects::default();
        self.core.apply(input, &mut effects);
        self.take_in(effects);
    }

    fn take_in(&mut self, effects: Effects) {
        self.changed(effects.changes);
        for verdict in effects.verdicts {
            if verdict.state == AlertState::Firing {
                self.alert_dump();
            }
            self.tell(verdict);
        }
    }

    fn changed(&mut self, changes: Vec<Change>) {
        // A request that ended in this very batch is not tracked any more, but its earlier steps are to be named too.
        let ended: HashMap<RequestKey, Option<Rid>> = match &self.notices {
            Some(_) => changes.iter().filter_map(|c| Some((c.key, c.ended.as_ref()?.rid.clone()))).collect(),
            None => HashMap::new(),
        };
        for change in changes {
            self.measure_status(&change);
            if let Some((key, outcome)) = self.ladder.observe(&change) {
                self.acted(key, outcome);
            }
            if change.ended.is_some() {
                self.decisions.remove(&change.key);
            }
            if self.notices.is_some() {
                let rid = match ended.get(&change.key) {
                    Some(rid) => rid.clone(),
                    None => self.core.tracker().get(change.key).and_then(|tracked| tracked.request.rid.clone()),
                };
                self.notify(Notice::Step { change: Box::new(change), rid });
            }
        }
    }

    fn tick(&mut self, now: Monotonic) {
        self.account(now);
        self.resynchronise(now);
        self.observe(now);
        self.begin_look(now);
        self.read_devices(now);
        self.ask_peers(now);
        self.read_server_metrics(now);
        self.apply(Input::Tick { now, pace: Pace::Within(EVALUATION_BUDGET) });
        self.dump(now);
        for (key, outcome) in self.ladder.expire(now) {
            self.acted(key, outcome);
        }
        self.remediate(now);
        self.publish(now);
        self.health.ticked(now);
    }

    fn tell(&mut self, verdict: Arc<Verdict>) {
        tracing::info!(
            rule = &*verdict.rule,
            state = verdict.state.name(),
            cause = verdict.cause.name(),
            pid = verdict.server.pid,
            room = %verdict.room,
            rid = verdict.rid.as_ref().map(|rid| rid.text.as_str()),
            quiescence = %verdict.diagnosis.quiescence,
            "alert"
        );
        self.record(&AuditRecord::Verdict(Arc::clone(&verdict)));
        if let Some(sink) = &self.alertmanager {
            sink.send(&verdict);
        }
        self.notify(Notice::Verdict(verdict));
    }

    /// Writes a record; `false` when it is not on disk. Without an audit log nothing is recorded.
    fn record(&mut self, record: &AuditRecord) -> bool {
        let Some(audit) = &mut self.audit else { return false };
        let result = audit.record(record, WallClock::now().timestamp(Monotonic::now()));
        let failing = result.is_err();
        if let Err(error) = result {
            self.metrics.audit_errors.inc();
            if !self.audit_failing {
                tracing::error!(%error, "nothing is done while the audit log cannot be written; observing goes on");
            }
        } else if self.audit_failing {
            tracing::info!("the audit log can be written again");
        }
        self.audit_failing = failing;
        !failing
    }

    fn answer(&mut self, question: Question, now: Monotonic) {
        // Who asked may have gone.
        let _ = match question {
            Question::Status(asker) => asker.send(self.status(now)).is_ok(),
            Question::Room(room, side, asker) => asker.send(self.told_to_peer(room, side, now)).is_ok(),
            Question::Explain(wanted, asker) => asker.send(Box::new(self.explain(&wanted, now))).is_ok(),
        };
    }

    fn notify(&self, notice: Notice) {
        if let Some(notices) = &self.notices {
            // A watcher that does not keep up misses some; the agent never waits for it.
            let _ = notices.try_send(notice);
        }
    }

    async fn shut_down(mut self) {
        let attached: Vec<ProcessKey> = self.kernel.attached().collect();
        for key in attached {
            self.kernel.detach(key);
        }
        self.kernel.wait_for_removal();
        if let Some(sink) = self.alertmanager.take() {
            sink.shutdown().await;
        }
    }
}
