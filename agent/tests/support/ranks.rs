//! A prefill server of several ranks of the test-bed (`tests/sglang/ranks.py`): a scheduler process for each, of one parent,
//! whose collectives really exchange and really hang.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc,
    thread,
};

use serde_json::{Value, json};

use super::{
    agent::Agent,
    environment::sglang,
    repository,
    server::Slot,
    wait::{PATIENCE, until, until_true},
};

/// Schedulers of a server; each has a decode too.
const RANKS: usize = 2;

/// A running server; ends with its test.
pub struct Ranks {
    process: Child,
    pids: Vec<u32>,
    stdin: ChildStdin,
    lines: mpsc::Receiver<String>,
    folder: tempfile::TempDir,
    release: String,
    _slot: Slot,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // Its ranks die with it.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if thread::panicking() {
            let log = std::fs::read_to_string(self.folder.path().join("stderr")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(60)..];
            println!("the ranks' ({}) last lines:\n{}", self.release, last.join("\n"));
        }
    }
}

impl Ranks {
    /// A server of this release with such groups, as `["--tp", "2"]`, each rank with the hook in it.
    pub fn start(release: &str, groups: &[&str]) -> Self {
        let slot = Slot::take(RANKS);
        let environment = sglang().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let mut process = Command::new(&environment.python)
            .arg(repository().join("tests/sglang/ranks.py"))
            .arg(environment.folder(release))
            .args(groups)
            .env("PYTHONPATH", repository().join("hook"))
            .env_remove("SGLANG_PLUGINS")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(folder.path().join("stderr")).unwrap())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let stdin = process.stdin.take().unwrap();
        let release = release.to_owned();
        let mut ranks = Self { process, pids: Vec::new(), stdin, lines, folder, release, _slot: slot };
        let ready = ranks.answer("their start");
        ranks.pids = serde_json::from_value(ready["ready"].clone()).unwrap_or_else(|_| panic!("{ready}"));
        ranks
    }

    /// Process ids, in the order of the ranks.
    pub fn pids(&self) -> &[u32] {
        &self.pids
    }

    /// Process id of a rank.
    pub fn pid(&self, rank: usize) -> u32 {
        self.pids[rank]
    }

    /// Gives a command to all ranks and waits for the answer of each.
    pub fn command(&mut self, line: &str) -> Vec<Value> {
        writeln!(self.stdin, "{line}").unwrap();
        let answers: Vec<Value> = serde_json::from_value(self.answer(line)).unwrap();
        let is_good = |answer: &Value| answer.get("error").is_none() && answer.get("died").is_none();
        assert!(answers.iter().all(is_good), "{line}: {answers:?}");
        answers
    }

    fn answer(&self, to: &str) -> Value {
        let line = self.lines.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("no answer to {to}: {error}"));
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{to}: {line}: {error}"))
    }

    /// Healthy requests, one after the other; each must end well on each rank, with the right data.
    pub fn serve(&mut self, count: u32) {
        for _ in 0..count {
            let answers = self.command("healthy 1");
            assert!(answers.iter().all(|answer| answer["good"] == 1), "{answers:?}");
        }
    }

    /// The rids in the inflight queue of each rank.
    pub fn queues(&mut self) -> Vec<Vec<String>> {
        let rids = |queue: &Value| {
            let entries = queue.as_array().unwrap().iter();
            entries.map(|entry| super::server::text(&entry["rid"])).collect()
        };
        self.command("queue").iter().map(rids).collect()
    }

    /// Waits until no rank has a request in its queue.
    pub fn wait_for_empty_queues(&mut self) {
        until_true("empty queues", || self.queues().iter().all(Vec::is_empty));
    }

    /// Waits until each rank's decode has a request's data, which must be right.
    pub fn wait_for_good_data(&mut self, rid: &str) {
        until_true("the decodes' data", || self.command("good").iter().all(|good| !good[rid].is_null()));
        let good = self.command("good");
        assert!(good.iter().all(|good| good[rid] == json!(true)), "{good:?}");
    }
}

/// What the agent says of the server's ranks, once it sees them all.
pub fn replica(agent: &Agent, ranks: &Ranks) -> Value {
    until("all ranks side by side", || {
        let replicas = agent.status()["replicas"].clone();
        let pids =
            |replica: &Value| replica["ranks"].as_array().unwrap().iter().map(|rank| rank["pid"].clone()).collect();
        let ours = |replica: &&Value| {
            let pids: Vec<Value> = pids(replica);
            ranks.pids().iter().all(|pid| pids.contains(&json!(pid)))
        };
        replicas.as_array().unwrap().iter().find(ours).cloned()
    })
}

/// The alert that fires for a request on a rank.
pub fn alert(agent: &Agent, pid: u32, rid: &str) -> Option<Value> {
    agent.firing().into_iter().find(|alert| alert["pid"] == pid && alert["rid"]["text"] == rid)
}

/// Waits until the alert of a request on a rank has this cause.
pub fn wait_for_cause(agent: &Agent, pid: u32, rid: &str, cause: &str) -> Value {
    let mut last = Value::Null;
    let look = || {
        last = alert(agent, pid, rid).unwrap_or_default();
        (last["cause"] == cause).then(|| last.clone())
    };
    let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| until(cause, look)));
    found.unwrap_or_else(|_| panic!("waited for {cause}; the alert of {rid}, pid {pid}, says {last}"))
}

/// Whether some evidence of an alert says that.
pub fn says(alert: &Value, what: &str) -> bool {
    alert["evidence"].as_array().unwrap().iter().any(|evidence| evidence["fact"].as_str().unwrap().contains(what))
}

/// Waits until no rank has made a pass for so many seconds, by the agent's clock.
pub fn wait_until_stopped(agent: &Agent, ranks: &Ranks, seconds: f64) {
    until_true("the ranks to stop", || {
        let replica = replica(agent, ranks);
        let stopped = |rank: &Value| rank["turned_seconds_ago"].as_f64().is_some_and(|ago| ago > seconds);
        replica["ranks"].as_array().unwrap().iter().all(stopped)
    });
}
