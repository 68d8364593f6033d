//! `dislodge demo`: a small server, real probes, a pinned request, and the way out of it.
//!
//! What is shown as happening comes from the agent's pipeline and from the webhook's receiver; lines that begin with
//! `»` say what the demo asks the server to do. Unless the whole story comes through the pipeline, the demo fails.

mod receiver;
mod server;
mod story;

use std::{process::ExitCode, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use clap::Args;
use dislodge::{
    check::read_rules,
    config::Config,
    kernel::{
        Kernel,
        canary::ReturnProbes,
        preflight::{Machine, Outcome, judge},
    },
    metrics::Metrics,
    pipeline::{Parts, Pipeline, Requests, notice::Notice},
    rule::Mode,
    server::status::Health,
};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;

use receiver::Received;
use server::DemoServer;
use story::{Chapter, Story};

/// How long each part of the story may take.
const PATIENCE: Duration = Duration::from_secs(12);
/// Notices that may wait to be printed.
const MAX_NOTICES: usize = 4096;
/// The room that two requests share.
const SHARED_ROOM: u64 = 77;

#[derive(Args, Debug)]
pub(super) struct Demo {
    /// Python 3.10 or newer to run the server with; looked for when not given
    #[arg(long, value_name = "PROGRAM")]
    python: Option<String>,
    /// Attach nothing: shows that the demo then fails
    #[arg(long, hide = true)]
    without_bpf: bool,
}

impl Demo {
    pub(super) fn run(self) -> ExitCode {
        match self.try_run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => super::fail(format!("{error:#}")),
        }
    }

    fn try_run(self) -> anyhow::Result<()> {
        let bad: Vec<String> = judge(&Machine::inspect())
            .into_iter()
            .filter(|check| check.outcome == Outcome::Bad)
            .map(|check| format!("{}: {}; {}", check.name, check.found, check.fix.unwrap_or_default()))
            .collect();
        if !bad.is_empty() {
            bail!("the demo cannot run here\n  {}", bad.join("\n  "));
        }
        let folder = tempfile::tempdir().context("making a temporary folder")?;
        let server = DemoServer::start(folder.path(), self.python.as_deref())?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        runtime.block_on(watch(server, folder.path(), self.without_bpf))
    }
}

async fn watch(mut server: DemoServer, folder: &std::path::Path, without_bpf: bool) -> anyhow::Result<()> {
    let (receiver, mut received) = receiver::start().await?;
    let config = Config {
        mode: Mode::Enforce,
        alertmanager: dislodge::config::Alertmanager { urls: vec![receiver], ..Default::default() },
        audit: dislodge::config::Audit { path: Some(folder.join("audit.jsonl")) },
        scan_interval: Duration::from_millis(200),
        ..Config::default()
    };
    let rules = read_rules(Some(&folder.join("demo").join("rules")))
        .map_err(|problems| anyhow::anyhow!("the demo's own rules: {problems:?}"))?;
    let (kernel, ring) = Kernel::load(config.sizes())?;
    let (notices, mut noticed) = mpsc::channel(MAX_NOTICES);
    let parts = Parts {
        config,
        rules,
        kernel,
        ring,
        metrics: Metrics::default(),
        health: Arc::new(Health::default()),
        notices: Some(notices),
        // The pid of no process, so that nothing is attached.
        only: vec![if without_bpf { u32::MAX } else { server.pid() }],
        // The demo's server has no transfer engine.
        returns: ReturnProbes::Refused { why: "not tried in the demo".to_owned() },
        resynchronise: true,
        record_for: None,
    };
    let stop = CancellationToken::new();
    let (_ask, asked) = mpsc::channel(1);
    let (_reload, reload) = mpsc::channel(1);
    let (_dump, dump) = mpsc::channel(1);
    let requests = Requests { questions: asked, reload, dump };
    let pipeline = tokio::spawn(Pipeline::start(parts)?.run(stop.clone(), requests));

    let mut story = Story::default();
    let mut inputs = Inputs { noticed: &mut noticed, received: &mut received };
    inputs.until(&mut story, Chapter::Attached).await?;
    println!("» three healthy requests");
    server.ask("healthy 3")?;
    inputs.until(&mut story, Chapter::Healthy).await?;
    println!("» two requests that share room {SHARED_ROOM}; the first ends and clears it");
    let rids = server.ask(&format!("dup {SHARED_ROOM}"))?;
    let pinned = rids.get("second").and_then(|rid| rid.as_str()).context("the server named no second request")?;
    inputs.until(&mut story, Chapter::Pinned).await?;
    println!("» abort {pinned}, as a client that hangs up does");
    server.ask(&format!("abort {pinned}"))?;
    inputs.until(&mut story, Chapter::Resolved).await?;
    stop.cancel();
    pipeline.await.context("the pipeline")?;
    println!("» done: found, explained, freed and read back in {:.1} s", story.seconds());
    println!("» on a node, `dislodge explain {SHARED_ROOM}` tells all of this about one request");
    Ok(())
}

/// What the story is made of.
struct Inputs<'a> {
    noticed: &'a mut mpsc::Receiver<Notice>,
    received: &'a mut mpsc::Receiver<Received>,
}

impl Inputs<'_> {
    /// Prints what happens until a chapter is complete.
    async fn until(&mut self, story: &mut Story, chapter: Chapter) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while let Some(missing) = story.missing(chapter) {
            let next = timeout_at(deadline, async {
                tokio::select! {
                    notice = self.noticed.recv() => notice.map(|notice| story.notice(&notice)),
                    received = self.received.recv() => received.map(|received| story.received(&received)),
                }
            });
            match next.await {
                Ok(Some(lines)) => lines.iter().for_each(|line| println!("{line}")),
                Ok(None) => bail!("the pipeline stopped before this was seen: {missing}"),
                Err(_) => bail!(
                    "this was not seen within {} s: {missing}; `dislodge doctor` says what may be in the way",
                    PATIENCE.as_secs()
                ),
            }
        }
        Ok(())
    }
}
