//! `dislodge record`: what the running agent's flight recorder has; or, with `--for`, what an agent of its own sees.
//!
//! The running agent is asked by a signal: who may send one is the kernel's business, nothing new listens, and no request
//! id goes out through the port of the metrics. Its answer is a file that only its owner can read.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args;
use dislodge::{
    config::Config,
    kernel::{
        Kernel,
        canary::{self, ReturnProbes},
    },
    metrics::Metrics,
    pipeline::{Parts, Pipeline, Requests},
    record::folder::{dumps, running, running_as_me, write_whole},
    rule::{Mode, RuleSet},
    server::status::Health,
};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Files, anonymize::without_names, fail, reject, run, signals};

/// How long the running agent may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often its folder is looked at.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Args, Debug)]
pub(super) struct Record {
    #[command(flatten)]
    files: Files,
    /// Watch for this long (or until Ctrl-C), beside a running agent or without one, instead of asking it
    #[arg(long = "for", value_name = "DURATION", value_parser = humantime)]
    duration: Option<Duration>,
    /// Where to write; without it, where the running agent does
    #[arg(short, long, value_name = "FILE", required_if_eq("anonymize", "true"))]
    output: Option<PathBuf>,
    /// Without names: request ids, rooms, notifications, titles and the node are hashed
    #[arg(long)]
    anonymize: bool,
    /// Watch only this process (repeatable); with --for
    #[arg(long, value_name = "PID", requires = "duration")]
    pid: Vec<u32>,
}

fn humantime(text: &str) -> Result<Duration, String> {
    let duration: Option<Duration> = text.parse::<jiff::SignedDuration>().ok().and_then(|it| it.try_into().ok());
    duration
        .filter(|duration| (Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(duration))
        .ok_or_else(|| "write a duration from 1s to 24h, such as 60s".to_owned())
}

impl Record {
    pub(super) fn run(self) -> ExitCode {
        let (config, rules) = match self.files.read() {
            Ok(read) => read,
            Err(problems) => return reject(&problems),
        };
        let written = match self.duration {
            Some(duration) => self.watch(config, rules, duration),
            None => self.ask(&config),
        };
        match written {
            Ok(path) => {
                println!("{}", path.display());
                ExitCode::SUCCESS
            }
            Err(error) => fail(error),
        }
    }

    fn ask(&self, config: &Config) -> Result<PathBuf, String> {
        let Some(folder) = config.record.folder.as_deref() else {
            return Err(
                "no `record.folder` is configured: name the running agent's --config, or watch with --for".to_owned()
            );
        };
        let dump = ask(folder, running)?;
        let Some(output) = &self.output else { return Ok(dump) };
        if self.anonymize {
            without_names(&dump, output)?;
        } else {
            write_whole(output, |out| std::io::copy(&mut fs::File::open(&dump)?, out).map(drop))
                .map_err(|error| format!("{}: {error}", output.display()))?;
        }
        Ok(output.clone())
    }

    fn watch(&self, mut config: Config, rules: RuleSet, duration: Duration) -> Result<PathBuf, String> {
        let Some(output) = &self.output else { return Err("--for needs a file to write: -o FILE".to_owned()) };
        run::log();
        // It only watches: alerts, remediation and the folder of dumps are the running agent's.
        let Config { record, .. } = Config::default();
        config.mode = Mode::Observe;
        config.audit.path = None;
        config.alertmanager.urls.clear();
        config.record = dislodge::config::Record { max_bytes: config.record.max_bytes, ..record };
        let (kernel, ring) = Kernel::load(config.sizes()).map_err(|error| error.to_string())?;
        let parts = Parts {
            config,
            rules,
            kernel,
            ring,
            metrics: Metrics::default(),
            health: Arc::new(Health::default()),
            notices: None,
            only: self.pid.clone(),
            returns: ReturnProbes::from(&canary::check()),
            resynchronise: true,
            record_for: Some(duration),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let recording = runtime.map_err(|error| error.to_string())?.block_on(async {
            let stop = CancellationToken::new();
            let (_ask, questions) = mpsc::channel(1);
            let (reload_, reload) = mpsc::channel(1);
            let (dump_, dump) = mpsc::channel(1);
            signals::watch(stop.clone(), reload_, dump_).map_err(|error| error.to_string())?;
            let pipeline = Pipeline::start(parts).map_err(|error| error.to_string())?;
            let end = stop.clone();
            tokio::spawn(async move {
                tokio::time::sleep(duration).await;
                end.cancel();
            });
            let recording = pipeline.run(stop, Requests { questions, reload, dump }).await;
            recording.ok_or_else(|| "nothing was recorded".to_owned())
        })?;
        if !self.anonymize {
            let written = write_whole(output, |out| recording.write(out));
            return written.map(|()| output.clone()).map_err(|error| format!("{}: {error}", output.display()));
        }
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let named = folder.path().join("recording");
        write_whole(&named, |out| recording.write(out)).map_err(|error| error.to_string())?;
        without_names(&named, output).map(|_| output.clone())
    }
}

/// The same for somebody to whom another one named the folder: only that of an agent that runs as this very user is asked,
/// since a signal to anything else may be its end.
pub(super) fn ask_for_recording(folder: &Path) -> Result<PathBuf, String> {
    ask(folder, running_as_me)
}

/// Has the running agent write what it has, and waits for the file.
fn ask(folder: &Path, running: fn(&Path) -> Option<u32>) -> Result<PathBuf, String> {
    let error = |error: &dyn std::fmt::Display| format!("{}: {error}", folder.display());
    let nobody = || format!("no agent records in {}; one that runs as another user cannot be asked", folder.display());
    let pid = running(folder).and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)).ok_or_else(nobody)?;
    let agent = pidfd_open(pid, PidfdFlags::empty()).map_err(|source| error(&source))?;
    // It still has the folder, so the pid was its own when it was opened.
    if running(folder) != u32::try_from(pid.as_raw_nonzero().get()).ok() {
        return Err(nobody());
    }
    let before = dumps(folder).map_err(|source| error(&source))?;
    pidfd_send_signal(&agent, Signal::USR1).map_err(|source| error(&source))?;
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        let now = dumps(folder).map_err(|source| error(&source))?;
        let is_answer = |path: &&PathBuf| {
            path.file_name().is_some_and(|name| name.to_string_lossy().contains("-request")) && !before.contains(path)
        };
        if let Some(dump) = now.iter().rfind(is_answer) {
            return Ok(dump.clone());
        }
        std::thread::sleep(LOOK);
    }
    Err(format!("the agent (pid {pid:?}) wrote nothing for {} s: its log says why", PATIENCE.as_secs()))
}
