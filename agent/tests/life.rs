//! Servers come and go, rules change, and the agent lives on until it is told to stop.

#[path = "support/support.rs"]
mod support;

use std::{
    net::TcpListener,
    process::{Command, Stdio},
};

use rustix::process::Signal;
use serde_json::Value;
use support::{
    agent::{self, Agent},
    environment::{bpf, on_each},
    needs, rules,
    server::{Setup, text},
    wait::until_true,
};

const RELEASE: &str = "0.5.22";

/// An agent that finds nothing to watch.
fn idle() -> Agent {
    agent::Setup::watching(&[std::process::id()], rules::COLLISION).start()
}

fn watched(agent: &Agent) -> f64 {
    agent.metric("dislodge_servers", &[("state", "watched")])
}

#[test]
fn an_agent_picks_up_a_server_that_starts_later_and_lets_go_of_it_when_it_ends() {
    on_each(&[RELEASE], |_| {
        let mut server = Setup::of(RELEASE).waiting().start();
        let agent = agent::Setup::watching(&[server.pid()], rules::COLLISION).mode("enforce").start();
        until_true("readiness", || agent.page("/ready") == Some((200, "ready\n".to_owned())));
        assert_eq!((agent.server(server.pid()), watched(&agent)), (None, 0.0));

        server.go();
        agent.wait_for_server(server.pid(), true);
        until_true("the gauge", || watched(&agent) == 1.0);
        let rid = server.pin(77);
        agent.wait_until_freed(&rid);

        server.command("quit");
        until_true("the end of it", || agent.server(server.pid()).is_none());
        until_true("the gauge", || watched(&agent) == 0.0);
        assert_eq!(agent.page("/live").unwrap().0, 200);
    });
}

#[test]
fn a_server_that_is_killed_in_the_middle_of_a_request_does_not_keep_the_agent_from_the_others() {
    on_each(&[RELEASE], |_| {
        let mut one = Setup::of(RELEASE).start();
        let mut other = Setup::of(RELEASE).companion().start();
        let pids = [one.pid(), other.pid()];
        let agent = agent::Setup::watching(&pids, rules::EVERYTHING).mode("enforce").attach();
        let rid = text(&one.command("stop")["rids"][0]);
        agent.wait_for_alert(&rid);
        one.kill();
        until_true("the end of it", || agent.server(pids[0]).is_none());
        until_true("the end of its alert", || agent.firing().is_empty());

        let rid = other.pin(77);
        agent.wait_until_freed(&rid);
        other.serve(1);
    });
}

#[test]
fn a_server_serves_on_when_its_agent_stops_or_is_killed() {
    on_each(&[RELEASE], |_| {
        let mut server = Setup::of(RELEASE).start();
        let watching = || agent::Setup::watching(&[server.pid()], rules::COLLISION);
        let (mut stopped, mut killed);
        stopped = watching().attach();
        assert_eq!(stopped.terminate().code(), Some(0));
        killed = watching().attach();
        killed.kill();
        server.serve(2);
    });
}

#[test]
fn good_rules_are_reloaded_and_bad_ones_leave_the_old() {
    if needs(bpf()).is_none() {
        return;
    }
    let agent = idle();
    let reloads = |outcome| agent.metric("dislodge_rule_reloads_total", &[("outcome", outcome)]);
    let has_rule = |name| agent.page("/metrics").unwrap().1.contains(&format!("dislodge_alerts{{rule=\"{name}\""));
    until_true("the first rules", || has_rule("Collision"));

    std::fs::write(agent.rules_file("more.yaml"), rules::EVERYTHING).unwrap();
    agent.signal(Signal::HUP);
    until_true("the reload", || reloads("loaded") == 1.0 && has_rule("Everything"));

    std::fs::write(agent.rules_file("more.yaml"), "rules:\n  - name: Bad\n    when: no_such_field > 1\n").unwrap();
    agent.signal(Signal::HUP);
    until_true("the refusal", || reloads("refused") == 1.0);
    let said = agent.logged("more.yaml");
    assert!(said.iter().any(|line| line.contains("more.yaml:3:") && line.contains("no_such_field")), "{said:?}");
    assert!(has_rule("Everything") && has_rule("Collision") && !has_rule("Bad"));
    assert_eq!(reloads("loaded"), 1.0);
}

#[test]
fn an_idle_agent_is_live_and_ready_and_stops_when_told() {
    if needs(bpf()).is_none() {
        return;
    }
    let mut agent = idle();
    until_true("life", || agent.page("/live") == Some((200, "live\n".to_owned())));
    until_true("readiness", || agent.page("/ready") == Some((200, "ready\n".to_owned())));
    let status = agent.status();
    assert_eq!((&status["mode"], &status["servers"]), (&"observe".into(), &Value::Array(Vec::new())), "{status}");
    assert_eq!(agent.page("/nothing").unwrap().0, 404);
    assert_eq!(agent.terminate().code(), Some(0));
}

#[test]
fn an_agent_that_cannot_listen_says_so_and_ends() {
    if needs(bpf()).is_none() {
        return;
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let done = Command::new(env!("CARGO_BIN_EXE_dislodge"))
        .args(["run", "--listen", &address, "--pid", &std::process::id().to_string()])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains(&address) && said.contains("set `listen` to a free address"), "{said}");
}

#[test]
fn a_pid_that_is_no_server_is_named() {
    if needs(bpf()).is_none() {
        return;
    }
    let agent = idle();
    let complaint = format!("pid {} is not an SGLang scheduler (yet)", std::process::id());
    until_true("the complaint", || !agent.logged(&complaint).is_empty());
}
