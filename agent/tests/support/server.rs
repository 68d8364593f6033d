//! A prefill server of the test-bed (`tests/sglang/server.py`): SGLang's released code and real NIXL.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Condvar, Mutex, mpsc},
    thread,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{
    environment::sglang,
    repository,
    wait::{PATIENCE, until},
};

/// Servers that run at the same time: each keeps most of a core busy.
const AT_ONCE: usize = 3;

static RUNNING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// The right to run a server.
struct Slot;

impl Slot {
    fn take() -> Self {
        let mut running = RUNNING.1.wait_while(RUNNING.0.lock().unwrap(), |running| *running >= AT_ONCE).unwrap();
        *running += 1;
        Self
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        *RUNNING.0.lock().unwrap() -= 1;
        RUNNING.1.notify_one();
    }
}

/// How to start a server.
pub struct Setup<'a> {
    release: &'a str,
    arguments: Vec<&'a str>,
    variables: Vec<(&'a str, &'a str)>,
    hooks: Vec<PathBuf>,
    waits: bool,
    launched: bool,
    launcher: Option<Vec<&'a str>>,
    own_network: bool,
    companion: bool,
}

impl<'a> Setup<'a> {
    /// The release, with the hook in it.
    pub fn of(release: &'a str) -> Self {
        let (arguments, variables) = (Vec::new(), Vec::new());
        let hook = repository().join("hook");
        let sitecustomize = (release == "0.5.10").then(|| hook.join("sitecustomize"));
        let hooks = [hook].into_iter().chain(sitecustomize).collect();
        Self {
            release,
            arguments,
            variables,
            hooks,
            waits: false,
            launched: false,
            launcher: None,
            own_network: false,
            companion: false,
        }
    }

    /// Options of `server.py`.
    pub fn arguments(mut self, arguments: &[&'a str]) -> Self {
        self.arguments.extend(arguments);
        self
    }

    /// A variable of its environment.
    pub fn variable(mut self, name: &'a str, value: &'a str) -> Self {
        self.variables.push((name, value));
        self
    }

    /// Without the hook on its path.
    pub fn unhooked(mut self) -> Self {
        self.hooks.clear();
        self
    }

    /// With these folders on its path, instead of the hook's.
    pub fn hooks(mut self, folders: &[PathBuf]) -> Self {
        self.hooks = folders.to_vec();
        self
    }

    /// The process is there, and becomes a server with [`SglangServer::go`].
    pub fn waiting(mut self) -> Self {
        self.waits = true;
        self
    }

    /// Started as SGLang starts its schedulers: by a process that lives as long and has the same environment.
    pub fn launched(mut self) -> Self {
        self.launched = true;
        self
    }

    /// Started by what stands for `sglang.launch_server`, with these options: it serves the metrics.
    pub fn launcher(mut self, options: &[&'a str]) -> Self {
        self.launcher = Some(options.to_vec());
        self
    }

    /// In a network namespace of its own, as a container has one.
    pub fn own_network(mut self) -> Self {
        self.own_network = true;
        self
    }

    /// The second server of a test that has one: it must not wait for the first one's end.
    pub fn companion(mut self) -> Self {
        self.companion = true;
        self
    }

    /// Starts the server and waits until it is ready.
    pub fn start(self) -> SglangServer {
        let waits = self.waits;
        let mut server = self.spawn();
        if !waits {
            server.wait_until_ready();
        }
        server
    }

    fn spawn(self) -> SglangServer {
        let slot = (!self.companion).then(Slot::take);
        let environment = sglang().unwrap();
        let folder = tempfile::tempdir().unwrap();
        // Where the shell becomes Python, the process that waits is the process that serves.
        let script = match (self.waits, self.launched) {
            (true, _) => "read go; exec \"$@\"",
            (false, false) => "exec \"$@\"",
            (false, true) => "\"$@\"; exit $?",
        };
        let (mut command, script) = if self.own_network {
            let mut command = Command::new("unshare");
            command.args(["--net", "sh"]);
            (command, format!("ip link set lo up && {script}"))
        } else {
            (Command::new("sh"), script.to_owned())
        };
        command.args(["-c", &script, "sh"]).arg(&environment.python);
        match &self.launcher {
            Some(options) => {
                let script = repository().join("tests/sglang/launch_server.py");
                command.arg(script).args(options).arg("--").env("PROMETHEUS_MULTIPROC_DIR", folder.path())
            }
            None => command.arg(repository().join("tests/sglang/server.py")),
        };
        let mut process = command
            .arg(environment.folder(self.release))
            .args(&self.arguments)
            .env("PYTHONPATH", std::env::join_paths(self.hooks).unwrap())
            .env_remove("SGLANG_PLUGINS")
            .envs(self.variables)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(folder.path().join("stderr")).unwrap())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        let stdin = process.stdin.take().unwrap();
        let (pid, release) = (process.id(), self.release.to_owned());
        SglangServer { process, pid, stdin, lines, folder, release, _slot: slot }
    }
}

/// A running server; ends with its test.
pub struct SglangServer {
    process: Child,
    pid: u32,
    stdin: ChildStdin,
    lines: mpsc::Receiver<String>,
    folder: tempfile::TempDir,
    release: String,
    _slot: Option<Slot>,
}

impl Drop for SglangServer {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            let log = std::fs::read_to_string(self.folder.path().join("stderr")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            println!(
                "the server's ({}) last lines:\n{}",
                self.release,
                lines[lines.len().saturating_sub(60)..].join("\n")
            );
        }
    }
}

impl SglangServer {
    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Lets a waiting process become a server, and waits until it is one.
    pub fn go(&mut self) {
        writeln!(self.stdin).unwrap();
        self.wait_until_ready();
    }

    fn wait_until_ready(&mut self) {
        let ready = self.answer("its start");
        self.pid = ready["ready"].as_u64().and_then(|pid| pid.try_into().ok()).unwrap_or_else(|| panic!("{ready}"));
    }

    /// Gives a command and waits for its answer.
    pub fn command(&mut self, line: &str) -> Value {
        writeln!(self.stdin, "{line}").unwrap();
        let answer = self.answer(line);
        assert!(answer.get("error").is_none() && answer.get("died").is_none(), "{line}: {answer}");
        answer
    }

    /// Gives many commands at once and waits for all answers.
    pub fn commands(&mut self, lines: &[&str], times: usize) {
        let text = format!("{}\n", lines.join("\n")).repeat(times);
        self.stdin.write_all(text.as_bytes()).unwrap();
        for _ in 0..lines.len() * times {
            self.answer("many commands");
        }
    }

    fn answer(&self, to: &str) -> Value {
        let line = self.lines.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("no answer to {to}: {error}"));
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{to}: {line}: {error}"))
    }

    /// The rids in the inflight queue.
    pub fn queue(&mut self) -> Vec<String> {
        let queue = self.command("queue");
        queue.as_array().unwrap().iter().map(|entry| text(&entry["rid"])).collect()
    }

    /// Waits until the inflight queue is empty.
    pub fn wait_for_empty_queue(&mut self) {
        until("an empty inflight queue", || self.queue().is_empty().then_some(()));
    }

    /// Pins a request by a second one on its room; returns its rid.
    pub fn pin(&mut self, room: u64) -> String {
        text(&self.command(&format!("dup {room}"))["second"])
    }

    /// `count` healthy requests; each must end well, with the right data.
    pub fn serve(&mut self, count: u32) {
        let answer = self.command(&format!("healthy {count}"));
        assert_eq!(answer["good"], count, "{answer}");
    }

    /// How a request has ended; nothing as long as it has not.
    pub fn finished(&mut self, rid: &str) -> Option<Value> {
        self.command("finished").get(rid).cloned()
    }

    /// Waits until the decode has a request's data, and that is right.
    pub fn wait_for_good_data(&mut self, rid: &str) {
        let good = until("the decode's data", || self.command("good")[rid].as_bool());
        assert!(good, "the data of {rid} is wrong");
    }

    /// Asserts that no page was given back that an unfinished write still reads.
    pub fn assert_pages_intact(&mut self) {
        let pages = self.command("pages_intact");
        assert_eq!(pages["released"], serde_json::json!([]), "{pages}");
    }

    /// Ends the server at once.
    pub fn kill(&mut self) {
        if self.pid != self.process.id()
            && let Some(pid) = Pid::from_raw(self.pid.cast_signed())
        {
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A JSON string as text.
pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_owned()
}
