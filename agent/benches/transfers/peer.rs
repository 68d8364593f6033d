//! The test-bed of real engines (`tests/native/prepare.py`) and its peer programs, which are driven by lines of JSON.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use dislodge::{event::ProcessKey, target::discover::process_key};
use rustix::{
    process::{Pid, setpriority_process},
    thread::{CpuSet, sched_setaffinity},
};
use serde_json::{Value, json};

const TESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/native");

/// What `prepare.py` made: the interpreter, and each engine's environment.
pub(crate) struct Bed(Value);

impl Bed {
    /// The folder is that of `DISLODGE_TEST_NATIVE`, else `target/native`.
    pub(crate) fn prepare(engines: &[&str]) -> Self {
        let into = std::env::var_os("DISLODGE_TEST_NATIVE")
            .map_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/native")), PathBuf::from);
        let made = Command::new("python3")
            .arg(format!("{TESTS}/prepare.py"))
            .arg("--into")
            .arg(into)
            .args(engines.iter().map(|engine| engine.replacen('-', "==", 1)))
            .stderr(Stdio::inherit())
            .output()
            .expect("python3 runs");
        assert!(made.status.success(), "prepare.py failed; it says above why");
        let last = made.stdout.split(|byte| *byte == b'\n').rfind(|line| !line.is_empty()).expect("prepare.py answers");
        Self(serde_json::from_slice(last).expect("prepare.py's last line is JSON"))
    }

    fn peer(&self, engine: &str, role: &str, arguments: &[String]) -> Peer {
        let python = self.0["python"].as_str().expect("an interpreter");
        let environment = self.0["engines"][engine]["environment"].as_object().expect("an environment");
        let program = engine.split('-').next().unwrap_or_default();
        let mut child = Command::new(python)
            .arg(format!("{TESTS}/{program}_peer.py"))
            .arg(role)
            .args(arguments)
            .envs(environment.iter().map(|(name, value)| (name, value.as_str().unwrap_or_default())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the peer starts");
        let answers = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut peer = Peer { child, answers, ready: Value::Null };
        peer.ready = peer.line();
        peer
    }
}

/// One process with the engine.
pub(crate) struct Peer {
    child: Child,
    answers: BufReader<ChildStdout>,
    ready: Value,
}

impl Peer {
    fn line(&mut self) -> Value {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the peer's output can be read");
        serde_json::from_str(&line).unwrap_or(Value::String(line))
    }

    pub(crate) fn ask(&mut self, request: &Value) -> Value {
        let stdin = self.child.stdin.as_mut().expect("a pipe");
        writeln!(stdin, "{request}").expect("the peer takes commands");
        let answer = self.line();
        assert!(answer.is_object() && answer.get("raised").is_none(), "{request}: {answer}");
        answer
    }

    pub(crate) fn key(&self) -> ProcessKey {
        process_key(self.child.id()).expect("the peer runs")
    }

    pub(crate) fn stop(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("the peer can be stopped");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn threads(pid: u32) -> impl Iterator<Item = Pid> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the peer runs");
    tasks.flatten().filter_map(|task| Pid::from_raw(task.file_name().to_str()?.parse().ok()?))
}

/// A prefill and a decode that know each other.
pub(crate) struct Pair {
    pub(crate) prefill: Peer,
    pub(crate) decode: Peer,
}

impl Pair {
    pub(crate) fn start(bed: &Bed, engine: &str, page: u64, pages: u64) -> Self {
        let arguments = ["--page".to_owned(), page.to_string(), "--pages".to_owned(), pages.to_string()];
        let mut prefill = bed.peer(engine, "prefill", &arguments);
        let mut decode = bed.peer(engine, "decode", &arguments);
        decode.ask(&json!({"do": "connect", "peer": prefill.ready}));
        prefill.ask(&json!({"do": "connect", "peer": decode.ready}));
        let mut pair = Self { prefill, decode };
        pair.transfers(2, &[0]); // starts the threads that there will be
        pair.keep_apart(engine.starts_with("nixl"));
        pair
    }

    /// Gives the prefill's polling thread a core of its own: both engines poll without a pause, NIXL in a thread of its own
    /// in each process besides, and with more of them than cores a transfer takes as long as the scheduler makes it.
    fn keep_apart(&self, progress_is_idle: bool) {
        let main = self.prefill.child.id();
        for thread in threads(main).chain(threads(self.decode.child.id())) {
            let mut cpus = CpuSet::new();
            cpus.set(usize::from(thread.as_raw_nonzero().get().unsigned_abs() != main));
            // A thread may have ended meanwhile; a machine with one core has nothing to give.
            let _ = sched_setaffinity(Some(thread), &cpus);
        }
        // The main thread's own polls make progress (NIXL's getXferStatus): the prefill's other thread only competes.
        for thread in threads(main).filter(|it| progress_is_idle && it.as_raw_nonzero().get().unsigned_abs() != main) {
            let _ = setpriority_process(Some(thread), 19);
        }
    }

    /// That many transfers of all `pages`, one after the other: seconds per transfer.
    pub(crate) fn transfers(&mut self, count: u64, pages: &[u64]) -> f64 {
        let answer = self.prefill.ask(&json!({"do": "bench", "what": "transfers", "count": count, "pages": pages}));
        assert_eq!(answer["count"], count, "a transfer failed");
        answer["seconds"].as_f64().expect("seconds") / count as f64
    }

    /// Transfers for that long, a few at a time: seconds per transfer of each few.
    pub(crate) fn transfers_for(&mut self, time: Duration, few: u64, pages: &[u64]) -> Vec<f64> {
        let begin = Instant::now();
        let mut times = Vec::new();
        while times.is_empty() || begin.elapsed() < time {
            times.push(self.transfers(few, pages));
        }
        times
    }

    /// A transfer that does not end while the decode is stopped, as `poll` wants it.
    pub(crate) fn endless(&mut self) -> Value {
        if self.prefill.ready["engine"] == "mooncake" {
            let made = self.prefill.ask(&json!({"do": "submit", "page": 0}));
            return json!({"batch": made["batch"]});
        }
        let made = self.prefill.ask(&json!({"do": "make", "room": 1, "pages": [0]}));
        self.prefill.ask(&json!({"do": "post", "handle": made["handle"]}));
        json!({"handle": made["handle"]})
    }

    /// That many polls of one: seconds per poll.
    pub(crate) fn polls(&mut self, count: u64, of: &Value) -> f64 {
        let mut request = of.clone();
        request["do"] = json!("poll");
        request["times"] = json!(count);
        let answer = self.prefill.ask(&request);
        assert_eq!(answer["polls"], count, "the transfer ended");
        answer["seconds"].as_f64().expect("seconds") / count as f64
    }

    /// Polls of a new one for that long, a few at a time: seconds per poll of each few.
    pub(crate) fn polls_for(&mut self, time: Duration, few: u64) -> Vec<f64> {
        let of = self.endless();
        let begin = Instant::now();
        let mut times = Vec::new();
        while times.is_empty() || begin.elapsed() < time {
            times.push(self.polls(few, &of));
        }
        times
    }
}
