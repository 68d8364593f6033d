//! The test-bed of real engines (`tests/native/prepare.py`) and its peer programs, which are driven by lines of JSON.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use dislodge::{event::ProcessKey, target::discover::process_key};
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
        serde_json::from_str(&line).unwrap_or_else(|_| Value::String(line))
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

    /// Processor time of its main thread, which carries out what it is asked: `/proc/PID/task/TID/schedstat`.
    pub(crate) fn main_thread(&self) -> Duration {
        let pid = self.child.id();
        let line = fs::read_to_string(format!("/proc/{pid}/task/{pid}/schedstat")).expect("the peer runs");
        let nanoseconds = line.split(' ').next().and_then(|number| number.parse().ok()).expect("nanoseconds");
        Duration::from_nanos(nanoseconds)
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
        Self { prefill, decode }
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

    /// That many polls of one transfer that does not end: nanoseconds of processor time per poll.
    pub(crate) fn polls(&mut self, count: u64) -> f64 {
        let before = self.prefill.main_thread();
        let answer = self.prefill.ask(&json!({"do": "bench", "what": "polls", "count": count, "pages": [0]}));
        assert_eq!(answer["count"], count, "the transfer ended");
        (self.prefill.main_thread() - before).as_nanos() as f64 / count as f64
    }
}
