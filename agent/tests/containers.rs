//! A server in pid, mount and time namespaces of its own, as in a container: found, diagnosed with the right times, freed.

#[path = "support/support.rs"]
mod support;

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, Command, Stdio},
};

use dislodge::target::discover::schedulers;
use support::{
    agent,
    environment::{bpf, python},
    needs, repository, rules,
    wait::{until, until_true},
};

/// A day: a server that is taken at its word would have waited for that long.
const CLOCK_OFFSET: &str = "86400";
/// Makes the folder `$1` a file system of its own with the hook and the demo's server on it, and becomes that server.
const CONTAINER: &str = r#"
mount -t tmpfs none "$1" && cp -r "$2/hook" "$2/agent/demo" "$1" &&
PYTHONPATH="$1/hook" exec "$3" "$1/demo/prefill_server.py""#;

/// The container's first process outside; everything inside ends with it.
struct Container(Child);

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_server_in_namespaces_of_its_own_is_watched_and_freed_like_any_other() {
    let (Some(()), Some(python)) = (needs(bpf()), needs(python())) else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    command
        .args(["--fork", "--kill-child", "--pid", "--mount", "--mount-proc", "--time", "--monotonic", CLOCK_OFFSET])
        .args(["sh", "-c", CONTAINER, "sh"])
        .arg(folder.path())
        .arg(repository())
        .arg(python)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut container = Container(command.spawn().unwrap());
    let mut commands = container.0.stdin.take().unwrap();
    let mut answers = BufReader::new(container.0.stdout.take().unwrap()).lines();
    let mut answer = || answers.next().expect("the server answers").unwrap();
    assert!(answer().contains("ready"));
    let own = fs::read_link("/proc/self/ns/pid").unwrap();
    let pid = until("the scheduler in its namespace", || {
        let elsewhere = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|namespace| namespace != own);
        let mine = |pid: u32| {
            let root = fs::read_to_string(format!("/proc/{pid}/mounts")).unwrap_or_default();
            root.contains(&*folder.path().to_string_lossy())
        };
        schedulers().into_iter().map(|target| target.key.pid).find(|pid| elsewhere(*pid) && mine(*pid))
    });
    writeln!(commands, "dup 77").unwrap();
    let pinned: serde_json::Value = serde_json::from_str(&answer()).unwrap();
    let rid = pinned["second"].as_str().unwrap();

    let agent = agent::Setup::watching(&[pid], rules::COLLISION).mode("enforce").attach();
    until_true("the request to be freed", || agent.remediations("effective") == 1.0);
    let records = agent.audit();
    assert_eq!((&records[0]["cause"], &records[0]["rid"]["text"]), (&"RoomCollision".into(), &rid.into()));
    let waiting_since = records[0]["waiting_since"].as_u64().unwrap();
    let now = dislodge::event::clock::Monotonic::now().0;
    assert!(now - waiting_since < 600_000_000_000, "its times are of another clock: {waiting_since} at {now}");
    writeln!(commands, "queue").unwrap();
    assert_eq!(answer(), "[]");
}
