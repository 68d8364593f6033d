//! The audit log.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "fixtures/request.rs"]
mod request;

use std::{os::unix::fs::PermissionsExt, path::Path};

use dislodge::{
    diagnose::Cause,
    rule::{Mode, alert::AlertState},
    sink::audit::{Audit, AuditError, AuditRecord, Remediation, RemediationStep},
};
use request::{at, verdict};

fn time() -> jiff::Timestamp {
    "2026-01-02T03:04:05.678Z".parse().unwrap()
}

fn remediation(step: RemediationStep) -> AuditRecord {
    let verdict = verdict("RoomCollision", 1, AlertState::Firing, at(40.0));
    AuditRecord::Remediation(Box::new(Remediation {
        rule: verdict.rule.clone(),
        request: verdict.request,
        rid: verdict.rid.clone(),
        room: verdict.room,
        server: verdict.server.clone(),
        cause: Cause::RoomCollision,
        quiescence: verdict.diagnosis.quiescence,
        mode: Mode::Enforce,
        step,
    }))
}

fn lines(path: &Path) -> Vec<serde_json::Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn each_record_is_a_json_line_with_schema_and_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.jsonl");
    let mut audit = Audit::open(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    for state in [AlertState::Pending, AlertState::Firing, AlertState::Resolved] {
        audit.record(&AuditRecord::Verdict(verdict("RoomCollision", 1, state, at(40.0))), time()).unwrap();
    }
    audit
        .record(
            &remediation(RemediationStep::Refused { guard: "room_shared".into(), detail: "sender 9".into() }),
            time(),
        )
        .unwrap();
    audit.record(&remediation(RemediationStep::Acting { flag: "send_failed".into() }), time()).unwrap();
    audit.record(&remediation(RemediationStep::Effective), time()).unwrap();

    let lines = lines(&path);
    assert_eq!(lines.len(), 5, "a pending alert is not recorded");
    for line in &lines {
        assert_eq!((&line["schema"], &line["time"]), (&1.into(), &"2026-01-02T03:04:05.678Z".into()));
    }
    assert_eq!(
        (&lines[0]["record"], &lines[0]["state"], &lines[1]["state"]),
        (&"verdict".into(), &"firing".into(), &"resolved".into())
    );
    assert_eq!(
        (&lines[0]["rule"], &lines[0]["room"], &lines[0]["server"]["node"]),
        (&"RoomCollision".into(), &"7001".into(), &"node-a".into())
    );
    assert_eq!(lines[0]["diagnosis"]["evidence"][0]["fact"]["fact"], "room_cleared_by_other");
    assert_eq!(
        (&lines[2]["record"], &lines[2]["step"]["step"], &lines[2]["step"]["guard"]),
        (&"remediation".into(), &"refused".into(), &"room_shared".into())
    );
    assert_eq!(
        (&lines[3]["step"]["flag"], &lines[3]["mode"], &lines[4]["step"]["step"]),
        (&"send_failed".into(), &"enforce".into(), &"effective".into())
    );
}

#[test]
fn an_existing_log_is_appended_to_and_a_rotated_one_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.jsonl");
    Audit::open(&path).unwrap().record(&remediation(RemediationStep::Acted), time()).unwrap();
    let mut audit = Audit::open(&path).unwrap();
    audit.record(&remediation(RemediationStep::Acted), time()).unwrap();
    assert_eq!(lines(&path).len(), 2);
    std::fs::rename(&path, folder.path().join("audit.1")).unwrap();
    audit.reopen().unwrap();
    audit.record(&remediation(RemediationStep::Acted), time()).unwrap();
    assert_eq!((lines(&path).len(), lines(&folder.path().join("audit.1")).len()), (1, 2));
}

#[test]
fn what_cannot_be_an_audit_log_is_refused_with_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Audit::open(&folder.path().join("no/audit")).unwrap_err().to_string();
    assert!(missing.contains("create the folder") && missing.contains("/no"), "{missing}");
    assert!(matches!(Audit::open(folder.path()), Err(AuditError::Open { .. })));
    let fifo = folder.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    assert!(Audit::open(&fifo).is_err(), "and it does not wait for a reader");
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("/dev/null", &link).unwrap();
    assert!(Audit::open(&link).is_err());
    assert!(matches!(Audit::open(Path::new("/dev/null")), Err(AuditError::NotAFile { .. })));
}

/// Runs the test of that name again in a process whose files may have 1 KiB. A shell is needed to ignore the signal
/// that comes with the error.
fn again_with_small_files(name: &str) {
    // Through pipes: what the tests print may go to a file, for which the limit holds too.
    let output = std::process::Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -S -f 2; exec \"$@\"", "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env("AUDIT_SMALL_FILES", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn a_record_that_cannot_be_written_is_an_error_and_does_not_spoil_the_next_one() {
    if std::env::var_os("AUDIT_SMALL_FILES").is_none() {
        return again_with_small_files("a_record_that_cannot_be_written_is_an_error_and_does_not_spoil_the_next_one");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("audit.jsonl");
    let mut audit = Audit::open(&path).unwrap();
    let mut records = 0;
    let failed = loop {
        match audit.record(&remediation(RemediationStep::Acted), time()) {
            Ok(()) => records += 1,
            Err(error) => break error,
        }
        assert!(records < 100, "the limit does not hold");
    };
    assert!(matches!(failed, AuditError::Write { .. }) && failed.to_string().contains("cannot be written"), "{failed}");
    assert_eq!(audit.errors(), 1);

    let limit = rustix::process::getrlimit(rustix::process::Resource::Fsize);
    rustix::process::setrlimit(
        rustix::process::Resource::Fsize,
        rustix::process::Rlimit { current: limit.maximum, ..limit },
    )
    .unwrap();
    audit.record(&remediation(RemediationStep::Effective), time()).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    let whole = text.lines().filter(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()).count();
    assert_eq!((text.lines().count(), whole), (records + 2, records + 1), "half a line stands alone: {text}");
}
