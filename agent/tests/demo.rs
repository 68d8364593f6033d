//! `dislodge demo` as a new user runs it; and that it cannot succeed without probes.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::process::{Command, Output};

use support::{
    environment::{bpf, python},
    needs,
};

fn demo(arguments: &[&str]) -> Option<Output> {
    needs(bpf())?;
    needs(python())?;
    Some(Command::new(env!("CARGO_BIN_EXE_dislodge")).arg("demo").args(arguments).output().unwrap())
}

#[test]
fn the_demo_tells_the_whole_story_in_order() {
    let Some(output) = demo(&[]) else { return };
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    let mut rest = text.as_str();
    for part in [
        "attached to pid",
        "poll() WaitingForInput → Transferring",
        "left the inflight queue: success",
        "abort() was called",
        "update_status(Failed) was dropped",
        "RoomCollision pending",
        "RoomCollision firing",
        "evidence (calls)",
        "asking the hook for send_failed",
        "send_failed set on thread",
        "poll() WaitingForInput → Failed",
        "» done",
    ] {
        let (_, after) =
            rest.split_once(part).unwrap_or_else(|| panic!("{part} is missing or out of order in:\n{text}"));
        rest = after;
    }
    // These come from several sources, whose order among each other is not given.
    for part in [
        "webhook delivered: RoomCollision firing (critical)",
        "webhook delivered: RoomCollision resolved (critical)",
        "remediation: effective",
        "left the inflight queue: failed",
        "alert RoomCollision resolved",
        "inflight queue: 0",
        "cleared room 77",
    ] {
        assert!(text.contains(part), "{part} is missing in:\n{text}");
    }
}

#[test]
fn without_a_probe_the_demo_fails_and_says_what_was_not_seen() {
    let Some(output) = demo(&["--without-bpf"]) else { return };
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(complaint.contains("a probe on the server's marker"), "{complaint}");
    assert!(complaint.contains("dislodge doctor"), "{complaint}");
}

#[test]
fn a_python_that_is_none_is_named() {
    if needs(bpf()).is_none() {
        return;
    }
    let output =
        Command::new(env!("CARGO_BIN_EXE_dislodge")).args(["demo", "--python", "/bin/false"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("/bin/false is not a Python 3.10 or newer"));
}
