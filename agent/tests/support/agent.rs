//! The agent as it is shipped: the binary, seen through its HTTP interface, its log and its audit log.

use std::{
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{http, server::SglangServer, wait::until, wait::until_true};

/// How to start an agent.
pub struct Setup {
    pids: Vec<u32>,
    mode: &'static str,
    listen: String,
    rules: String,
    config: String,
    arguments: Vec<String>,
    audited: bool,
}

impl Setup {
    /// An agent that watches these processes only, with these rules, and does nothing about what it finds.
    pub fn watching(pids: &[u32], rules: &str) -> Self {
        let (config, arguments) = (String::new(), Vec::new());
        let (mode, listen) = ("observe", "127.0.0.1:0".to_owned());
        Self { pids: pids.to_vec(), mode, listen, rules: rules.to_owned(), config, arguments, audited: true }
    }

    /// The most that it may do.
    pub fn mode(mut self, mode: &'static str) -> Self {
        self.mode = mode;
        self
    }

    /// Where it serves its interface, instead of on any port.
    pub fn listen(mut self, address: &str) -> Self {
        self.listen = address.to_owned();
        self
    }

    /// Lines of its configuration.
    pub fn config(mut self, text: &str) -> Self {
        self.config = text.to_owned();
        self
    }

    /// Without an audit log.
    pub fn unaudited(mut self) -> Self {
        self.audited = false;
        self
    }

    /// It never asks a server for its state.
    pub fn without_resynchronisation(mut self) -> Self {
        self.arguments.push("--no-resynchronise".to_owned());
        self
    }

    /// Starts it and waits until it serves its interface.
    pub fn start(self) -> Agent {
        let folder = tempfile::tempdir().unwrap();
        let rules = folder.path().join("rules");
        std::fs::create_dir(&rules).unwrap();
        std::fs::write(rules.join("test.yaml"), &self.rules).unwrap();
        let config = folder.path().join("config.yaml");
        std::fs::write(&config, format!("scan_interval: 200ms\n{}", self.config)).unwrap();
        let mut process = Command::new(env!("CARGO_BIN_EXE_dislodge"))
            .args(["run", "--listen", &self.listen, "--mode", self.mode])
            .arg("--rules")
            .arg(&rules)
            .arg("--config")
            .arg(&config)
            .args(self.audited.then(|| format!("--audit={}", folder.path().join("audit.jsonl").display())))
            .args(self.pids.iter().flat_map(|pid| ["--pid".to_owned(), pid.to_string()]))
            .args(&self.arguments)
            .env("RUST_LOG", "debug,hyper=info,hyper_util=info")
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        let (stderr, kept) = (BufReader::new(process.stderr.take().unwrap()), Arc::clone(&log));
        thread::spawn(move || stderr.lines().map_while(Result::ok).for_each(|line| kept.lock().unwrap().push(line)));
        let mut agent = Agent { process, log, folder, address: String::new() };
        agent.address = until("the agent's address", || {
            assert!(agent.process.try_wait().unwrap().is_none(), "it ended: {:?}", agent.log.lock().unwrap());
            let log = agent.log.lock().unwrap();
            let line = log.iter().find(|line| line.contains("serving"))?;
            Some(line.split_once("address=")?.1.split(' ').next()?.to_owned())
        });
        agent
    }

    /// Starts it and waits until it knows everything about its servers that it will.
    pub fn attach(self) -> Agent {
        let asks = !self.arguments.iter().any(|argument| argument == "--no-resynchronise");
        let pids = self.pids.clone();
        let agent = self.start();
        for pid in pids {
            agent.wait_for_server(pid, asks);
        }
        agent
    }
}

/// A running agent; ends with its test.
pub struct Agent {
    process: Child,
    log: Arc<Mutex<Vec<String>>>,
    folder: tempfile::TempDir,
    address: String,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            let log = self.log.lock().unwrap();
            let last = &log[log.len().saturating_sub(60)..];
            println!("the agent's last lines:\n{}\n{}", last.join("\n"), self.audit_text());
        }
    }
}

impl Agent {
    /// Where it serves its interface.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// A page of it, with its status.
    pub fn page(&self, path: &str) -> Option<(u16, String)> {
        http::get(&self.address, path)
    }

    /// `/status`.
    pub fn status(&self) -> Value {
        let (status, body) = until("an answer", || self.page("/status"));
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }

    /// What `/status` says of a server; nothing when it knows none of that pid.
    pub fn server(&self, pid: u32) -> Option<Value> {
        let status = self.status();
        status["servers"].as_array().unwrap().iter().find(|server| server["pid"] == pid).cloned()
    }

    /// The alerts that fire, as `/status` lists them.
    pub fn firing(&self) -> Vec<Value> {
        let mut alerts = self.status()["alerts"].as_array().unwrap().clone();
        alerts.retain(|alert| alert["state"] == "firing");
        alerts
    }

    /// The sum of a metric over all series that have these labels; 0 where there is none.
    pub fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let (_, text) = until("an answer", || self.page("/metrics"));
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}=\"{value}\"")).collect();
        text.lines()
            .filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])))
            .filter(|line| labels.iter().all(|label| line.contains(label)))
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
            .sum()
    }

    /// Remediations that ended like this.
    pub fn remediations(&self, outcome: &str) -> f64 {
        self.metric("dislodge_remediations_total", &[("outcome", outcome)])
    }

    /// Remediations that were refused for this reason.
    pub fn refusals(&self, reason: &str) -> f64 {
        self.metric("dislodge_remediation_refusals_total", &[("reason", reason)])
    }

    /// Waits until a server is watched, its channel taken and, if it `asks`, all its requests known.
    pub fn wait_for_server(&self, pid: u32, asks: bool) {
        until_true("a watched server", || {
            self.server(pid)
                .is_some_and(|server| server["state"] == "watched" && (!asks || server["synchronised"] == true))
        });
    }

    /// Waits until each transfer that a server makes from now on is seen.
    pub fn wait_for_transfers(&self, pid: u32) {
        until_true("each transfer to be seen", || {
            self.server(pid).is_some_and(|server| server["transfers"]["watch"] == "since")
        });
    }

    /// Waits until the alert of a request says that.
    pub fn wait_until_alert(&self, rid: &str, what: &str, says: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let look = || {
            last = self.firing().into_iter().find(|alert| alert["rid"]["text"] == rid).unwrap_or_default();
            says(&last).then(|| last.clone())
        };
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| until(what, look)));
        found.unwrap_or_else(|_| panic!("waited for {what}; the alert of {rid} says {last}"))
    }

    /// Waits until an alert fires for a request.
    pub fn wait_for_alert(&self, rid: &str) -> Value {
        until("an alert", || self.firing().into_iter().find(|alert| alert["rid"]["text"] == rid))
    }

    /// Waits until the alert of a request has fired for some ticks more: what was to be done would have been.
    pub fn wait_some_ticks(&self, rid: &str) {
        let seconds = |alert: Value| alert["waiting_seconds"].as_f64().unwrap();
        let begin = seconds(self.wait_for_alert(rid));
        until_true("some ticks", || seconds(self.wait_for_alert(rid)) > begin + 1.5);
    }

    /// Waits until it has applied everything that has happened in a server, whose queue is empty.
    pub fn wait_for_rest(&self, server: &mut SglangServer) {
        server.wait_for_empty_queue();
        let pid = server.pid();
        until_true("rest", || {
            self.server(pid).is_some_and(|server| server["requests"] == 0 && server["queue_length"] == 0)
        });
    }

    /// The records of the audit log.
    pub fn audit(&self) -> Vec<Value> {
        self.audit_text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn audit_text(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("audit.jsonl")).unwrap_or_default()
    }

    /// The steps of remediations in the audit log, for one request.
    pub fn steps(&self, rid: &str) -> Vec<String> {
        let mut records = self.audit();
        records.retain(|record| record["record"] == "remediation" && record["rid"]["text"] == rid);
        records.iter().map(|record| super::server::text(&record["step"]["step"])).collect()
    }

    /// It has done nothing about a request, and has said so.
    pub fn assert_refused(&self, rid: &str, reason: &str) {
        let steps = self.steps(rid);
        assert!(!steps.is_empty() && steps.iter().all(|step| step == "refused"), "{steps:?}");
        assert!(self.refusals(reason) >= 1.0, "it was not for this reason: {:?}", self.audit());
        assert_eq!(self.metric("dislodge_remediations_total", &[]), 0.0);
    }

    /// Waits until it has freed a request, which it must have done once.
    pub fn wait_until_freed(&self, rid: &str) {
        until_true("the effect", || self.remediations("effective") >= 1.0);
        let mut steps = self.steps(rid);
        steps.retain(|step| step != "refused");
        assert_eq!(steps, ["acting", "effective"]);
    }

    /// Lines of its log that have this text.
    pub fn logged(&self, text: &str) -> Vec<String> {
        self.log.lock().unwrap().iter().filter(|line| line.contains(text)).cloned().collect()
    }

    /// A file of its rules folder.
    pub fn rules_file(&self, name: &str) -> PathBuf {
        self.folder.path().join("rules").join(name)
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Asks it to stop and waits until it has.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        until("the agent's end", || self.process.try_wait().unwrap())
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
