//! A real server, a real agent: what the running agent says of a request is what its recording says.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::process::{Command, Output, Stdio};

use serde_json::Value;
use support::{
    agent::{self, Agent},
    environment::{bpf, on_each},
    needs, rules,
    server::Setup,
    wait::until_true,
};

const RELEASE: &str = "0.5.22";

fn dislodge(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dislodge")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn said(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn explain(agent: &Agent, arguments: &[&str]) -> Output {
    let url = format!("http://{}", agent.address());
    dislodge(&[&["explain", "--agent", &url], arguments].concat())
}

/// The answer, which must be one.
fn answer(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", said(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn guards(request: &Value) -> Vec<String> {
    let refusals = request["remediation"]["refusals"].as_array().unwrap();
    refusals.iter().map(|refused| refused["guard"].as_str().unwrap().to_owned()).collect()
}

/// The lines up to the alert, without what goes on.
fn story(request: &Value) -> Vec<String> {
    let lines = request["timeline"]["lines"].as_array().unwrap();
    let told = lines.iter().map(|line| format!("{} {} {}", line["seconds"], line["source"], line["text"]));
    let mut story: Vec<String> = told.collect();
    let end = story.iter().rposition(|line| line.contains("fires")).unwrap();
    story.truncate(end + 1);
    story
}

#[test]
fn a_running_agent_and_its_recording_say_the_same_of_a_pinned_request() {
    on_each(&[RELEASE], |_| {
        let mut server = Setup::of(RELEASE).start();
        let folder = tempfile::tempdir().unwrap();
        let config = format!("record: {{folder: {}, on_firing: false}}\n", folder.path().display());
        let agent = agent::Setup::watching(&[server.pid()], rules::COLLISION).mode("dry-run").config(&config).attach();
        server.serve(3);
        let rid = server.pin(77);
        agent.wait_for_alert(&rid);

        let live = answer(&explain(&agent, &[&rid, "-o", "json"]));
        let config = folder.path().join("config.yaml");
        std::fs::write(&config, format!("record: {{folder: {}}}\n", folder.path().display())).unwrap();
        let made = dislodge(&["record", "--config", config.to_str().unwrap()]);
        let file = said(&made.stdout).trim().to_owned();
        assert_eq!(made.status.code(), Some(0), "{}", said(&made.stderr));
        let left = std::fs::read_dir(folder.path())
            .unwrap()
            .filter(|it| it.as_ref().unwrap().file_name().to_string_lossy().ends_with(".cborseq"));
        assert_eq!(left.count(), 1, "what was written for explain alone is gone");

        let rules = agent.rules_file("");
        let rules = rules.to_str().unwrap();
        let recorded = answer(&dislodge(&["explain", &rid, "--file", &file, "--rules", rules, "-o", "json"]));
        let (live, recorded) = (&live["requests"][0], &recorded["requests"][0]);
        assert!(story(live).len() > 5, "{live:#}");
        assert_eq!(story(live), story(recorded));
        for same in [
            "/room",
            "/rid",
            "/serial",
            "/diagnosis/cause",
            "/diagnosis/quiescence",
            "/diagnosis/confidence",
            "/rules/0/state",
            "/rules/0/since/seconds",
            "/rules/0/fired/seconds",
            "/remediation/flag",
            "/server/sglang",
            "/standing/entered/seconds",
        ] {
            assert_eq!(live.pointer(same), recorded.pointer(same), "{same}");
            assert!(live.pointer(same).is_some(), "{same}: {live:#}");
        }
        assert_eq!(live["diagnosis"]["cause"], "RoomCollision");
        assert_eq!((guards(live), guards(recorded)), (Vec::new(), Vec::new()));
        assert_eq!(
            (&live["remediation"]["mode"], &live["remediation"]["decision"]),
            (&"dry-run".into(), &"would_act".into())
        );
        let steps = agent.steps(&rid);
        assert_eq!(steps, ["would_act"], "as the agent itself decided");

        let both = explain(&agent, &["77"]);
        let page = said(&both.stdout);
        assert!(both.status.success() && page.contains("what happened") && page.contains(&rid), "{page}");
        assert!(page.matches("what happened").count() == 2, "the other one of the room has ended: {page}");
    });
}

#[test]
fn an_agent_that_records_nothing_says_what_it_knows_now_and_that_there_is_no_timeline() {
    on_each(&[RELEASE], |_| {
        let mut server = Setup::of(RELEASE).start();
        let agent = agent::Setup::watching(&[server.pid()], rules::COLLISION).attach();
        let rid = server.pin(77);
        agent.wait_for_alert(&rid);
        let live = answer(&explain(&agent, &[&rid, "-o", "json"]));
        let request = &live["requests"][0];
        assert!(live["notes"][0].as_str().unwrap().contains("the agent records nothing"), "{live:#}");
        assert_eq!((&request["timeline"], &request["diagnosis"]["cause"]), (&Value::Null, &"RoomCollision".into()));
        assert_eq!((guards(request), &request["rules"][0]["state"]), (vec!["observing".to_owned()], &"firing".into()));
        let page = said(&explain(&agent, &[&rid]).stdout);
        assert!(page.contains("note: no timeline") && page.contains("why: RoomCollision"), "{page}");
    });
}

#[test]
fn of_what_a_running_agent_does_not_know_it_is_said_what_was_looked_through() {
    if needs(bpf()).is_none() {
        return;
    }
    let agent = agent::Setup::watching(&[std::process::id()], rules::COLLISION).start();
    until_true("readiness", || agent.page("/ready") == Some((200, "ready\n".to_owned())));
    let unknown = explain(&agent, &["4711"]);
    let complaint = said(&unknown.stderr);
    assert_eq!(unknown.status.code(), Some(1), "{complaint}");
    assert!(
        complaint.contains("looked through 0 requests of 0 servers") && complaint.contains("record.folder"),
        "{complaint}"
    );
    for (query, status) in
        [("", 400), ("?name=", 400), ("?name=1&pid=x", 400), ("?name=1", 200), ("?name=%1b%5b2J", 200)]
    {
        assert_eq!(agent.page(&format!("/explain{query}")).unwrap().0, status, "{query}");
    }
}

/// A recording can be had only of an agent of the same user: a folder that is named to root must not have it signal
/// whatever process stands in there.
#[test]
fn a_folder_of_somebody_else_is_not_asked() {
    if needs(bpf()).is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let config = format!("record: {{folder: {}}}\n", folder.path().display());
    let agent = agent::Setup::watching(&[std::process::id()], rules::COLLISION).config(&config).start();
    until_true("readiness", || agent.page("/ready") == Some((200, "ready\n".to_owned())));
    let recorded = explain(&agent, &["4711"]);
    assert!(said(&recorded.stderr).contains("what it recorded since"), "{}", said(&recorded.stderr));
    std::os::unix::fs::chown(folder.path().join("agent.pid"), Some(65_534), None).unwrap();
    let refused = explain(&agent, &["4711"]);
    let complaint = said(&refused.stderr);
    assert!(refused.status.code() == Some(1) && complaint.contains("runs as another user"), "{complaint}");
}
