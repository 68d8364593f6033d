//! A real server, a real agent, its recording: the same verdict again.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use serde_json::Value;
use support::{
    agent::{self, Agent},
    environment::{bpf, on_each},
    needs, rules,
    server::{Setup, SglangServer},
    wait::{until, until_true},
};

const RELEASE: &str = "0.5.22";

fn dislodge(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dislodge")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A folder of recordings with the configuration that names it.
fn recording() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let config = format!("record: {{folder: {}}}\n", folder.path().display());
    (folder, config)
}

fn recordings(folder: &Path, reason: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| text(path).ends_with(&format!("-{reason}.cborseq"))).collect()
}

/// The verdicts of a replay, and its summary.
fn replay(file: &Path, agent: &Agent, arguments: &[&str]) -> (Vec<Value>, Value) {
    let rules = agent.rules_file("");
    let output = dislodge(&[&["replay", text(file), "--rules", text(&rules), "-o", "json"], arguments].concat());
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<Value> =
        String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (summary, verdicts) = lines.split_last().unwrap();
    (verdicts.iter().map(|line| without_time(&line["verdict"])).collect(), summary["summary"].clone())
}

fn without_time(verdict: &Value) -> Value {
    let mut verdict = verdict.clone();
    for key in ["time", "schema", "record"] {
        verdict.as_object_mut().unwrap().remove(key);
    }
    verdict
}

/// The verdict of the audit log that says that an alert fires.
fn fired(agent: &Agent) -> Value {
    let records = agent.audit();
    let fired = |record: &&Value| record["record"] == "verdict" && record["state"] == "firing";
    without_time(records.iter().find(fired).unwrap())
}

#[test]
fn a_recording_that_an_alert_made_gives_its_verdict_again_word_for_word() {
    on_each(&[RELEASE], |_| {
        let mut server = Setup::of(RELEASE).start();
        let (folder, config) = recording();
        let agent = agent::Setup::watching(&[server.pid()], rules::COLLISION).config(&config).attach();
        server.serve(3);
        let rid = server.pin(77);
        agent.wait_for_alert(&rid);
        let dump = until("the recording", || recordings(folder.path(), "alert").pop());
        assert_eq!(fs::metadata(&dump).unwrap().permissions().mode() & 0o777, 0o600);

        let (verdicts, summary) = replay(&dump, &agent, &[]);
        let fired = fired(&agent);
        assert!(verdicts.contains(&fired), "{fired:#}\n{verdicts:#?}");
        assert_eq!((&fired["cause"], &fired["room"]), (&"RoomCollision".into(), &"77".into()));
        assert_eq!(
            (&summary["end"]["end"], &summary["alerts"]["Collision"]),
            (&"whole".into(), &1.into()),
            "{summary}"
        );

        without_names(&dump, &rid, &agent);
        on_request(&folder, &mut server, &agent, &fired);
    });
}

fn without_names(dump: &Path, rid: &str, agent: &Agent) {
    let shared = dump.with_extension("shared");
    let output = dislodge(&["anonymize", text(dump), "-o", text(&shared)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let has = |file: &Path, word: &str| fs::read(file).unwrap().windows(word.len()).any(|it| it == word.as_bytes());
    for word in [rid, "sglang::scheduler"] {
        assert!(has(dump, word) && !has(&shared, word), "{word}");
    }
    let (verdicts, _) = replay(&shared, agent, &[]);
    let states = |verdicts: &[Value]| -> Vec<(Value, Value, Value)> {
        verdicts.iter().map(|it| (it["cause"].clone(), it["state"].clone(), it["at"].clone())).collect()
    };
    assert_eq!(states(&verdicts), states(&replay(dump, agent, &[]).0));
    assert!(verdicts.iter().all(|verdict| verdict["room"] != "77"));
}

/// The running agent is asked by `dislodge record`, and by nobody else for its folder.
fn on_request(folder: &tempfile::TempDir, server: &mut SglangServer, agent: &Agent, fired: &Value) {
    let config = folder.path().join("config.yaml");
    fs::write(&config, format!("record: {{folder: {}}}\n", folder.path().display())).unwrap();
    let copy = folder.path().join("copy");
    server.serve(1);
    let output = dislodge(&["record", "--config", text(&config), "-o", text(&copy)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(recordings(folder.path(), "request").len(), 1);
    let (verdicts, summary) = replay(&copy, agent, &[]);
    assert!(verdicts.contains(fired), "{verdicts:#?}");
    assert!(summary["events"].as_u64().unwrap() > 20, "{summary}");
    let (none, cut) = replay(&copy, agent, &["--until", summary["first"].as_str().unwrap()]);
    assert_eq!((none.len(), &cut["ticks"], &cut["end"]), (0, &0.into(), &Value::Null));

    let second = dislodge(&["run", "--listen", "127.0.0.1:0", "--pid", "1", "--config", text(&config)]);
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(second.status.code() == Some(1) && said.contains("another agent (pid"), "{said}");
}

#[test]
fn an_agent_that_only_records_sees_what_one_that_runs_would() {
    on_each(&[RELEASE], |_| {
        let mut server = Setup::of(RELEASE).start();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("recording");
        let mut recorder = Command::new(env!("CARGO_BIN_EXE_dislodge"))
            .args(["record", "--for", "1h", "-o", text(&file), "--pid", &server.pid().to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(folder.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let log = || fs::read_to_string(folder.path().join("log")).unwrap();
        until_true("a server", || log().contains("control channel taken"));
        server.serve(3);
        server.pin(77);
        let pid = rustix::process::Pid::from_child(&recorder);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        assert_eq!(until("its end", || recorder.try_wait().unwrap()).code(), Some(0), "{}", log());
        let output = dislodge(&["replay", text(&file)]);
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("the recording is whole") && !said.starts_with("0 events"), "{said}");
    });
}

/// A file system of two pages.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn at(folder: &Path) -> Result<Self, String> {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=8k", "tmpfs", text(folder)]).status();
        let is_mounted = mounted.is_ok_and(|status| status.success());
        is_mounted.then(|| Self(folder.to_owned())).ok_or_else(|| "no tmpfs can be mounted".to_owned())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The agent that uses it may live for a moment more.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn a_folder_that_is_full_is_counted_and_observing_goes_on() {
    if needs(bpf()).is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let Some(_small) = needs(SmallDisk::at(folder.path())) else { return };
    let config = format!("record: {{folder: {}}}\n", folder.path().display());
    let agent = agent::Setup::watching(&[std::process::id()], rules::COLLISION).config(&config).start();
    until_true("readiness", || agent.page("/ready") == Some((200, "ready\n".to_owned())));
    fs::write(folder.path().join("filler"), vec![0; 1 << 20]).unwrap_err();
    agent.signal(rustix::process::Signal::USR1);
    let failed = || agent.metric("dislodge_recordings_total", &[("reason", "request"), ("outcome", "failed")]);
    until_true("the failure", || failed() == 1.0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left behind: agent.pid and the filler");
    fs::remove_file(folder.path().join("filler")).unwrap();
    agent.signal(rustix::process::Signal::USR1);
    until_true("a recording", || recordings(folder.path(), "request").len() == 1);
    assert_eq!(agent.page("/live").unwrap().0, 200);
}
