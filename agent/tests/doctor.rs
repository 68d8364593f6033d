//! What `dislodge doctor` says of the transfer engine of a process that poses as a scheduler and runs a released NIXL or
//! Mooncake: compared with what the agent's own code makes of the same process.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    collections::BTreeSet,
    fs,
    process::{Command, Stdio},
};

use dislodge::{
    kernel::plan::{ProbeReport, ProbeState},
    target::library::LibraryRole,
};
use serde_json::Value;
use support::{
    native::{Peer, Release, SMALL, on, on_each},
    needs,
    server::text,
    transfers::{Table, Watcher, libraries},
};

/// Rights without which `/proc/PID/map_files` cannot be opened.
const WITHOUT_RIGHTS: [&str; 2] = ["setpriv", "--bounding-set=-sys_admin,-checkpoint_restore"];

fn scheduler(release: &Release) -> Peer {
    let peer = Peer::start(release, "prefill", SMALL);
    peer.pose_as_scheduler();
    peer
}

fn doctor(before: &[&str], arguments: &[&str]) -> String {
    let mut words = before.iter().copied().chain([env!("CARGO_BIN_EXE_dislodge"), "doctor"]);
    let mut command = Command::new(words.next().unwrap());
    let done = command.args(words).args(arguments).stdin(Stdio::null()).output().unwrap();
    String::from_utf8(done.stdout).unwrap()
}

/// What it says of a process's transfers, for machines.
fn engine(peer: &Peer, before: &[&str]) -> Value {
    let report: Value = serde_json::from_str(&doctor(before, &["-o", "json"])).unwrap();
    let servers = report["servers"].as_array().unwrap();
    let server = servers.iter().find(|server| server["key"]["pid"] == peer.key().pid);
    server.unwrap_or_else(|| panic!("the scheduler is not found: {report}"))["engine"].clone()
}

/// The same for people: what stands between its line and the next server's.
fn words(peer: &Peer) -> Vec<String> {
    let text = doctor(&[], &[]);
    let begin = format!("pid {} ", peer.key().pid);
    let own = text.lines().skip_while(|line| !line.starts_with(&begin));
    own.take_while(|line| line.starts_with(&begin) || !line.starts_with("pid ")).map(ToOwned::to_owned).collect()
}

/// Role, library, function and what becomes of it.
type Row = (String, String, String, &'static str);

fn planned(engine: &Value) -> BTreeSet<Row> {
    let row = |row: &Value| {
        let outlook = match row["outlook"].as_str().unwrap() {
            "attachable" => "can be attached",
            "missing" => "missing",
            _ => panic!("{row}"),
        };
        (text(&row["role"]), text(&row["library"]), text(&row["function"]), outlook)
    };
    // Providers have a test of their own: the agent looks for their function only once it has seen a transfer.
    engine["probes"].as_array().unwrap().iter().filter(|row| !is_poll_cq(row)).map(row).collect()
}

fn attached(Table(rows): &Table) -> BTreeSet<Row> {
    let row = |row: &ProbeReport| {
        let state = match &row.state {
            ProbeState::Attached | ProbeState::OnDemand => "can be attached",
            ProbeState::Missing => "missing",
            other => panic!("{other:?}"),
        };
        (row.role.name().to_owned(), row.library.clone(), row.function.to_owned(), state)
    };
    rows.iter().map(row).collect()
}

fn what_is_planned_is_what_the_agent_attaches(release: &Release) {
    let peer = scheduler(release);
    let engine = engine(&peer, &[]);
    let table = Watcher::new().attach(peer.key());
    assert_eq!(planned(&engine), attached(&table));
    assert!(table.0.iter().any(|row| row.required), "{table:#?}");
    assert_eq!((&engine["findings"], &engine["unreachable"]), (&Value::from([(); 0]), &Value::from([(); 0])));
    let words = words(&peer);
    assert!(words.iter().any(|line| line.starts_with("ok    transfers")), "{words:#?}");
    assert!(words.iter().any(|line| line.trim_start().starts_with("OUTLOOK")), "{words:#?}");
}

#[test]
fn of_a_scheduler_with_nixl_doctor_plans_what_the_agent_attaches() {
    on_each("nixl", what_is_planned_is_what_the_agent_attaches);
}

#[test]
fn of_a_scheduler_with_mooncake_doctor_plans_what_the_agent_attaches() {
    on_each("mooncake", what_is_planned_is_what_the_agent_attaches);
}

#[test]
fn a_required_function_that_a_release_lacks_is_named_first_with_what_it_costs() {
    on("nixl-1.5.1", |release| {
        let (copy, _folder) = release.copy();
        copy.rename_release_of_nixl();
        let peer = scheduler(&copy);
        let engine = engine(&peer, &[]);
        let first = &engine["probes"][0];
        assert_eq!((&first["function"], &first["outlook"]), (&"nixlAgent::releaseXferReq".into(), &"missing".into()));
        assert_eq!(first["required"], true);
        let findings = engine["findings"].as_array().unwrap();
        assert!(text(&findings[0]["what"]).contains("NIXL can't be followed: 1 of"), "{findings:?}");
        assert!(text(&findings[0]["means"]).contains("`enforce` will refuse"), "{findings:?}");

        let words = words(&peer);
        let place = |text: &str| words.iter().position(|line| line.contains(text)).unwrap_or_else(|| panic!("{text}"));
        let (warning, table) = (place("NIXL can't be followed"), place("OUTLOOK"));
        assert!(words[table + 1].contains("missing") && words[table + 1].contains("releaseXferReq"), "{words:#?}");
        assert!(warning < table && words[warning + 2].contains("→ run a release that the probes know"), "{words:#?}");
    });
}

#[test]
fn of_verbs_providers_without_an_open_device_it_is_said_that_nothing_polls() {
    on("nixl-1.5.1", |release| {
        let peer = scheduler(release);
        let mapped = libraries(peer.key());
        let providers: Vec<_> = mapped.iter().filter(|library| library.role == LibraryRole::VerbsProvider).collect();
        let has_providers =
            if providers.is_empty() { Err("NIXL has loaded no verbs provider".to_owned()) } else { Ok(()) };
        let has_device = fs::exists("/dev/infiniband/uverbs0").unwrap_or(false);
        let no_device = if has_device { Err("this machine has an RDMA device".to_owned()) } else { Ok(()) };
        if needs(has_providers.and(no_device)).is_none() {
            return;
        }
        let engine = engine(&peer, &[]);
        let rows: Vec<&Value> = engine["probes"].as_array().unwrap().iter().filter(|row| is_poll_cq(row)).collect();
        let [row] = rows[..] else { panic!("{rows:?}") };
        assert_eq!((&row["required"], &row["role"]), (&false.into(), &"verbs_provider".into()), "{row}");
        assert!(providers.iter().all(|library| text(&row["library"]).contains(&library.name)), "{row}");
        assert!(row["outlook"] == "refused" && text(&row["why"]).contains("no device is open"), "{row}");
        assert_eq!(engine["findings"], Value::from([(); 0]), "transfers are followed without it");
    });
}

fn is_poll_cq(row: &Value) -> bool {
    row["function"] == "poll_cq"
}

#[test]
fn an_engine_that_cannot_be_opened_is_named_with_the_rights_that_are_missing() {
    on("nixl-1.5.1", |release| {
        let (copy, _folder) = release.copy();
        let peer = scheduler(&copy);
        let is_nixl = |role: LibraryRole| role == LibraryRole::Nixl;
        let loaded = libraries(peer.key()).into_iter().find(|library| is_nixl(library.role)).unwrap();
        for path in copy.files_named(&loaded.name) {
            fs::remove_file(path).unwrap();
        }
        let engine = engine(&peer, &WITHOUT_RIGHTS);
        let closed = &engine["unreachable"][0];
        assert_eq!((&closed["role"], &closed["library"]), (&"nixl".into(), &loaded.name.into()), "{engine}");
        assert!(text(&closed["why"]).contains("CAP_CHECKPOINT_RESTORE"), "{engine}");
        assert!(text(&engine["findings"][0]["what"]).contains("cannot be opened"), "{engine}");
    });
}
