//! The server's own gauge, of SGLang's released collectors, beside a queue that is seen: what it says is named.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{collections::HashMap, path::PathBuf, process::Command};

use dislodge::{
    core::{Core, Effects, Input},
    event::{
        Body, Event, Hello, ProcessKey,
        clock::Monotonic,
        exposition::{Page, Rank},
    },
    request::{
        ResyncReason,
        gauge::{GaugeCheck, GaugeNotKnown, Gauges},
        tracker::Limits,
    },
    rule::load,
    verdict::ServerIdentity,
};
use serde::Deserialize;
use serde_json::Value;
use support::{
    agent,
    environment::{on_each, pinning_releases, prepared},
    needs, repository, rules,
    server::{Setup, text},
    wait::{until, until_true},
};

/// What `/status` says of a server's gauge.
fn gauge(agent: &agent::Agent, pid: u32) -> Value {
    agent.server(pid).unwrap()["server_metrics"].clone()
}

#[test]
fn a_gauge_that_is_frozen_by_a_pinned_request_is_named_with_both_numbers() {
    on_each(&pinning_releases(), |release| {
        // As in a container: on the loopback interface and SGLang's own port, in a network namespace.
        let mut server = Setup::of(release).launcher(&["--enable-metrics"]).own_network().start();
        let pid = server.pid();
        let agent = agent::Setup::watching(&[pid], &rules::shipped()).config("server_metrics: {interval: 1s}").attach();
        let rid = server.pin(77);
        until_true("a gauge that agrees", || gauge(&agent, pid)["gauge"] == "agrees");
        assert_eq!(gauge(&agent, pid)["said"]["prefill_inflight"], 1);

        // A healthy request comes and goes; the gauge was set when there were two.
        server.serve(1);
        let said = until("a frozen gauge", || Some(gauge(&agent, pid)).filter(|it| it["gauge"] == "frozen"));
        assert_eq!(said["said"]["prefill_inflight"], 2, "{said}");
        assert!(said["in_words"].as_str().unwrap().contains("the queue was seen to hold 1: frozen"), "{said}");
        let alert = agent.wait_until_alert(&rid, "the gauge in the evidence", |alert| {
            let evidence = alert["evidence"].as_array().unwrap();
            evidence
                .iter()
                .any(|it| it["source"] == "server_metrics" && it["fact"].as_str().unwrap().contains("frozen"))
        });
        assert_eq!(
            (&alert["cause"], &alert["confidence"]),
            (&"RoomCollision".into(), &"high".into()),
            "it changes neither"
        );
        until_true("the metric", || agent.metric("dislodge_server_gauges", &[("gauge", "frozen")]) == 1.0);
        assert!(agent.metric("dislodge_server_metrics_reads_total", &[("outcome", "read")]) >= 3.0);
    });
}

#[test]
fn a_server_without_metrics_is_told_apart_from_one_that_does_not_answer() {
    on_each(&["0.5.22"], |release| {
        let mut server = Setup::of(release).launcher(&["--port", "31000"]).own_network().start();
        let pid = server.pid();
        let agent = agent::Setup::watching(&[pid], &rules::shipped()).config("server_metrics: {interval: 1s}").attach();
        server.pin(77);
        let failure = until("the reason", || gauge(&agent, pid)["failure"].as_str().map(str::to_owned));
        assert_eq!(failure, "the server was started without --enable-metrics");
        assert!(agent.metric("dislodge_server_metrics_reads_total", &[("outcome", "off")]) >= 1.0);
        assert_eq!(gauge(&agent, pid)["gauge"], "not_known");
    });
}

#[test]
fn a_server_whose_launcher_is_another_program_is_read_on_the_port_that_is_said_or_not_at_all() {
    on_each(&["0.5.23"], |release| {
        let mut server = Setup::of(release).start();
        let pid = server.pid();
        let port = server.command("metrics")["port"].as_u64().unwrap();
        let parked = text(&server.command("park")["rids"][0]);
        let watching = |config: String| agent::Setup::watching(&[pid], rules::WAITING).config(&config).attach();
        let told = watching(format!("server_metrics: {{interval: 1s, ports: [{port}]}}"));
        until_true("a gauge that agrees", || gauge(&told, pid)["gauge"] == "agrees");
        drop(told);
        let off = watching(format!("server_metrics: {{read: off, ports: [{port}]}}"));
        off.wait_some_ticks(&parked);
        until_true("a request that would be a reason to read", || {
            off.firing().iter().any(|alert| alert["waiting_seconds"].as_f64().unwrap() > 8.0)
        });
        assert_eq!(
            (gauge(&off, pid)["why"].clone(), off.metric("dislodge_server_metrics_reads_total", &[])),
            ("not_read".into(), 0.0)
        );
    });
}

/// What `idle_gauge.py` runs on.
#[derive(Debug, Deserialize)]
struct Released {
    python: PathBuf,
    releases: HashMap<String, PathBuf>,
}

const SECOND: u64 = 1_000_000_000;
const SERVER: ProcessKey = ProcessKey { pid: 7, start: 1 };

/// A core that has seen a server of that release with an empty queue from second 0 on; it is told what its page said at
/// second `read`.
fn seen_idle(release: &str, page: &str, read: u64) -> GaugeCheck {
    let limits = Limits { requests: 10, transfers: 10 };
    let mut core = Core::new(load::defaults().unwrap(), limits);
    let identity = ServerIdentity { title: "sglang::scheduler".to_owned(), ..ServerIdentity::default() };
    let event = |second: u64, body| {
        Input::Event(Event { pid: 7, tid: 7, at: Monotonic(second * SECOND), sequence: 0, detail_lost: false, body })
    };
    let hello = Hello { sglang: Some(release.to_owned()), ..Hello::default() };
    let mut reader = Page::default();
    reader.feed(page.as_bytes());
    let gauges = Gauges::of_rank(&reader.end().0, Rank::default());
    let at = Monotonic(read * SECOND);
    let mut effects = Effects::default();
    for input in [
        Input::Attach { process: SERVER, identity: Box::new(identity), clock_offset: 0 },
        Input::Asked { process: SERVER, epoch: 5, why: ResyncReason::Attached, at: Monotonic(0) },
        event(0, Body::Hello(Box::new(hello))),
        event(0, Body::StateBegin { epoch: 5 }),
        event(0, Body::StateEnd { epoch: 5, entries: 0 }),
        event(0, Body::Pass { queue_length: 0, passes: 1 }),
        event(read, Body::Pass { queue_length: 0, passes: 1 }),
        Input::ServerMetrics { process: SERVER, gauges, at },
    ] {
        core.apply(input, &mut effects);
    }
    GaugeCheck::of(core.tracker().server(SERVER).unwrap(), at)
}

#[test]
fn the_gauge_of_0_5_2_stays_above_zero_on_an_idle_server_and_is_called_a_false_positive() {
    let made = prepared::<Released>("tests/sglang/prepare.py", "DISLODGE_TEST_SGLANG", "sglang", &["0.5.2", "0.5.3"]);
    let Some(made) = needs(made) else { return };
    let pages = |release: &str| -> Vec<String> {
        let script = repository().join("tests/sglang/idle_gauge.py");
        let done = Command::new(&made.python).arg(script).arg(&made.releases[release]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        serde_json::from_slice(&done.stdout).unwrap()
    };
    // After the batch, and after each of two reports of the released code that the server is idle.
    let old = pages("0.5.2");
    for (page, read) in old.iter().zip([5, 40, 80]) {
        assert_eq!(seen_idle("0.5.2", page, read), GaugeCheck::NotRefreshed, "at {read} s");
    }
    let new = pages("0.5.3");
    assert_eq!(seen_idle("0.5.3", &new[0], 5), GaugeCheck::NotKnown(GaugeNotKnown::RefreshDue));
    assert_eq!(seen_idle("0.5.3", &new[1], 40), GaugeCheck::Agrees, "the idle report sets it anew");
}
