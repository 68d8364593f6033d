//! What the transfer engine says of SGLang's released code: with the hook it joins what the hook says, without it the
//! room is known all the same.

#[path = "support/support.rs"]
mod support;

use serde_json::Value;
use support::{
    agent::{self, Agent},
    environment::{on_each, releases},
    rules,
    server::{Setup, SglangServer, text},
    wait::{until, until_true},
};

/// What the agent says of the transfers of a server, once it sees each of them.
fn transfers(agent: &Agent, server: &SglangServer) -> Option<Value> {
    // An agent that has just been started does not answer yet.
    agent.page("/status")?;
    let transfers = agent.server(server.pid())?.get("transfers")?.clone();
    (transfers["watch"] == "since").then_some(transfers)
}

/// What it says of the only room or request that has some which are not over.
fn subject(agent: &Agent, server: &SglangServer) -> Option<Value> {
    transfers(agent, server)?["subjects"].as_array()?.first().cloned()
}

/// Releases whose notifications name the room; 0.5.23 sends none.
fn notifying() -> Vec<&'static str> {
    releases().into_iter().filter(|release| *release != "0.5.23").collect()
}

fn watching(server: &SglangServer) -> Agent {
    let agent = agent::Setup::watching(&[server.pid()], rules::EVERYTHING).mode("dry-run").start();
    until("the agent sees each transfer", || transfers(&agent, server));
    agent
}

#[test]
fn without_the_hook_a_frozen_decodes_room_is_in_flight_until_its_transfers_have_ended() {
    on_each(&notifying(), |release| {
        let mut server = Setup::of(release).unhooked().start();
        let agent = watching(&server);
        server.serve(1);
        let rids = server.command("stop");
        let frozen = until("a room in flight", || subject(&agent, &server));
        assert_eq!(frozen["state"], "InFlight", "{frozen} of {rids}");
        assert!(frozen["room"].as_str().is_some_and(|room| room.parse::<u64>().is_ok()), "{frozen}");
        let stalled = || subject(&agent, &server).is_some_and(|it| it["cause"] == "TransferStalled");
        until_true("it is called stalled", stalled);
        server.command("cont");
        until_true("it is over", || subject(&agent, &server).is_none());
        assert_eq!(agent.server(server.pid()).unwrap()["events_lost"], 0);
    });
}

#[test]
fn with_the_hook_both_sources_say_that_a_frozen_decodes_room_is_in_flight() {
    on_each(&releases(), |release| {
        let mut server = Setup::of(release).start();
        let agent = agent::Setup::watching(&[server.pid()], rules::EVERYTHING).mode("dry-run").attach();
        until("the agent sees each transfer", || transfers(&agent, &server));
        let rid = text(&server.command("stop")["rids"][0]);
        // Where no notification names the room (0.5.23), the worker's thread does.
        let alert = until("transfers of the room in the alert", || {
            let alert = agent.wait_for_alert(&rid);
            let is_told = |it: &Value| it["source"] == "transfers";
            alert["evidence"].as_array()?.iter().any(is_told).then_some(alert)
        });
        assert!(alert["quiescence"].as_str().unwrap().starts_with("InFlight"), "{alert}");
        server.command("cont");
        server.wait_for_empty_queue();
        until_true("it is over", || subject(&agent, &server).is_none());
        assert_eq!(agent.metric("dislodge_unsafe_releases_total", &[]), 0.0);
    });
}
