//! `dislodge run`: the agent.

use std::{net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc};

use clap::Args;
use dislodge::{
    kernel::{
        Kernel,
        canary::{self, ReturnProbes},
        preflight::{Machine, Outcome, judge},
    },
    metrics::Metrics,
    pipeline::{Parts, Pipeline, Requests},
    rule::Mode,
    server::{Api, bind, serve, status::Health},
};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_util::sync::CancellationToken;

use super::{Files, fail, reject, signals};

#[derive(Args, Debug)]
pub(super) struct Run {
    #[command(flatten)]
    files: Files,
    /// The most that may be done about stuck requests; overrides the configuration
    #[arg(long, value_parser = mode)]
    mode: Option<Mode>,
    /// Address of /metrics, /live, /ready, /status and /explain; overrides the configuration
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Base URL of an Alertmanager (repeatable); overrides the configuration
    #[arg(long, value_name = "URL")]
    alertmanager: Vec<reqwest::Url>,
    /// Audit log; overrides the configuration
    #[arg(long, value_name = "FILE")]
    audit: Option<PathBuf>,
    /// Watch only this process (repeatable), instead of every scheduler of the node
    #[arg(long, value_name = "PID")]
    pid: Vec<u32>,
    /// Never ask servers for their state: shows what is not known then
    #[arg(long, hide = true)]
    no_resynchronise: bool,
}

fn mode(text: &str) -> Result<Mode, String> {
    Mode::ALL
        .into_iter()
        .find(|mode| mode.name() == text)
        .ok_or_else(|| format!("write {}", Mode::ALL.map(Mode::name).join(", ")))
}

impl Run {
    pub(super) fn run(self) -> ExitCode {
        let (mut config, rules) = match self.files.read() {
            Ok(read) => read,
            Err(problems) => return reject(&problems),
        };
        config.mode = self.mode.unwrap_or(config.mode);
        config.listen = self.listen.unwrap_or(config.listen);
        if !self.alertmanager.is_empty() {
            config.alertmanager.urls = self.alertmanager;
        }
        config.audit.path = self.audit.or(config.audit.path);
        log();
        let bad: Vec<_> =
            judge(&Machine::inspect()).into_iter().filter(|check| check.outcome == Outcome::Bad).collect();
        if !bad.is_empty() {
            for check in bad {
                eprintln!("dislodge: {}: {}; {}", check.name, check.found, check.fix.unwrap_or_default());
            }
            return ExitCode::FAILURE;
        }
        let outcome = canary::check();
        if let ReturnProbes::Refused { why } = ReturnProbes::from(&outcome) {
            tracing::warn!("transfers are followed in part only: {why}");
        }
        let (kernel, ring) = match Kernel::load(config.sizes()) {
            Ok(loaded) => loaded,
            Err(error) => return fail(error),
        };
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => return fail(error),
        };
        runtime.block_on(async move {
            let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
            let (ask, asked) = mpsc::channel(8);
            let (reload, reloads) = mpsc::channel(1);
            let (dump, dumps) = mpsc::channel(1);
            let metrics = Metrics::default();
            let health = Arc::new(Health::default());
            let registry = Arc::new(metrics.register());
            let listener = match bind(config.listen).await {
                Ok(listener) => listener,
                Err(error) => return fail(error),
            };
            if let Ok(address) = listener.local_addr() {
                tracing::info!(%address, mode = config.mode.name(), "serving /metrics, /live, /ready, /status, /explain");
            }
            let api = Api { registry, health: Arc::clone(&health), questions: ask };
            let (notices, only, resynchronise, record_for) = (None, self.pid, !self.no_resynchronise, None);
            let returns = ReturnProbes::from(&outcome);
            let parts = Parts {
                config,
                rules,
                kernel,
                ring,
                metrics,
                health,
                notices,
                only,
                returns,
                resynchronise,
                record_for,
            };
            let pipeline = match Pipeline::start(parts) {
                Ok(pipeline) => pipeline,
                Err(error) => return fail(error),
            };
            if let Err(error) = signals::watch(stop.clone(), reload, dump) {
                return fail(error);
            }
            tasks.spawn(serve(listener, api, stop.clone()));
            pipeline.run(stop, Requests { questions: asked, reload: reloads, dump: dumps }).await;
            // The HTTP server finishes what it was asked, but a client that never ends keeps nobody.
            let _ = tokio::time::timeout(std::time::Duration::from_secs(1), tasks.join_next()).await;
            ExitCode::SUCCESS
        })
    }
}

/// Logs to stderr; `RUST_LOG` selects.
pub(super) fn log() {
    use tracing_subscriber::{EnvFilter, fmt};
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).init();
}
