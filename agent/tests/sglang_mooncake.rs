//! Requests of SGLang's released code on Mooncake's real engine, over TCP: what the agent says of them, and what may be done.

#[path = "support/support.rs"]
mod support;

use serde_json::Value;
use support::{
    agent::{self, Agent},
    channel::{Hand, Named},
    environment::{mooncake, on_each, releases},
    needs, rules,
    server::{Setup, SglangServer, text},
    wait::{until, until_true},
};

/// Longer than a test takes: Mooncake does not give a transfer up.
const PATIENT: (&str, &str) = ("MC_TRANSFER_TIMEOUT", "120");
/// The shortest that Mooncake takes, in seconds.
const HASTY: (&str, &str) = ("MC_TRANSFER_TIMEOUT", "5");

/// Runs a test on each of these releases where there is Mooncake.
fn on_mooncake(releases: &[&'static str], test: impl Fn(&'static str) + Sync) {
    if needs(mooncake()).is_some() {
        on_each(releases, test);
    }
}

/// A server whose engine is connected with the decode's: before that Mooncake's worker waits for a handshake.
fn server<'a>(release: &'a str, arguments: &[&'a str], timeout: (&'a str, &'a str)) -> SglangServer {
    let setup = Setup::of(release).arguments(&["--backend", "mooncake"]).arguments(arguments);
    let mut server = setup.variable(timeout.0, timeout.1).start();
    server.serve(1);
    server
}

/// An agent that is to fail everything.
fn reckless(server: &SglangServer) -> Agent {
    agent::Setup::watching(&[server.pid()], rules::EVERYTHING).mode("enforce").attach()
}

/// What has to be said of a request to fail it, from an agent that then goes.
fn named(server: &mut SglangServer, mut agent: Agent, rid: &str) -> Named {
    let named = Named::of(&agent.wait_for_alert(rid), server);
    assert!(agent.terminate().success());
    named
}

/// Pages on the decode side that hold the byte which overwrote what was sent.
fn overwritten(server: &mut SglangServer, rid: &str) -> u64 {
    let look = server.command(&format!("look {rid}"));
    look["pages"].get(text(&look["poison"])).and_then(Value::as_u64).unwrap_or(0)
}

#[test]
fn healthy_requests_end_without_a_verdict_and_the_server_says_what_it_runs() {
    on_mooncake(&releases(), |release| {
        let mut server = server(release, &[], PATIENT);
        let agent = agent::Setup::watching(&[server.pid()], &rules::shipped()).mode("enforce").attach();
        server.serve(5);
        server.command("warmup");
        agent.wait_for_rest(&mut server);
        assert_eq!(agent.logged(" alert "), [""; 0], "not even a pending one");
        for nothing in ["events_lost", "details_lost", "decode_errors", "control_discarded", "remediations"] {
            assert_eq!(agent.metric(&format!("dislodge_{nothing}_total"), &[]), 0.0, "{nothing}");
        }
        let hello = &agent.server(server.pid()).unwrap()["hello"];
        assert_eq!((&hello["sglang"], &hello["backend"]), (&release.into(), &"mooncake".into()), "{hello}");
        assert_eq!((&hello["flag"], &hello["counts"]), (&"conclude_state".into(), &"queues".into()), "{hello}");
        assert!(text(&hello["engine"]).starts_with("mooncake-transfer-engine"), "{hello}");
    });
}

#[test]
fn a_request_whose_decode_is_frozen_is_in_flight_and_not_failed() {
    on_mooncake(&releases(), |release| {
        let mut server = server(release, &[], PATIENT);
        let agent = reckless(&server);
        let rid = text(&server.command("stop")["rids"][0]);
        agent.wait_some_ticks(&rid);
        let alert = agent.wait_for_alert(&rid);
        assert_eq!((&alert["quiescence"], &alert["confidence"]), (&"InFlight{1}".into(), &"high".into()), "{alert}");
        agent.assert_refused(&rid, "cause_not_curable");
        let named = named(&mut server, agent, &rid);
        let mut hand = Hand::take(&server);
        assert_eq!(hand.fail(&named).as_deref(), Some("chunks_working"));
        hand.assert_hook_is_well();
        assert_eq!(server.queue(), [rid.as_str()]);
        server.assert_pages_intact();

        server.command("cont");
        server.wait_for_empty_queue();
        assert_eq!(server.finished(&rid).unwrap()["type"], "length");
        server.wait_for_good_data(&rid);
    });
}

#[test]
fn a_request_behind_a_blocked_worker_is_queued_and_not_failed() {
    on_mooncake(&releases(), |release| {
        let mut server = server(release, &["--queues", "1"], PATIENT);
        let agent = reckless(&server);
        let victim = text(&server.command("blocked")["victims"][0]);
        assert_eq!(agent.wait_for_alert(&victim)["quiescence"], "Queued{1}");
        let named = named(&mut server, agent, &victim);
        let mut hand = Hand::take(&server);
        assert_eq!(hand.fail(&named).as_deref(), Some("chunks_queued"));
        hand.assert_hook_is_well();

        server.command("cont");
        server.wait_for_empty_queue();
        server.wait_for_good_data(&victim);
    });
}

#[test]
fn a_request_whose_decode_is_killed_is_failed_by_the_server_and_left_alone() {
    on_mooncake(&releases(), |release| {
        let mut server = server(release, &[], PATIENT);
        let agent = reckless(&server);
        let rid = text(&server.command("stop")["rids"][0]);
        agent.wait_for_alert(&rid);
        server.command("kill");
        server.wait_for_empty_queue();
        assert_eq!(server.finished(&rid).unwrap()["type"], "abort");
        until_true("the alert's end", || agent.firing().is_empty());
        server.serve(2);
        agent.wait_for_rest(&mut server);
        assert_eq!(agent.metric("dislodge_remediations_total", &[]), 0.0);
    });
}

#[test]
fn a_request_for_which_nothing_was_posted_is_freed_when_the_hook_is_asked() {
    on_mooncake(&releases(), |release| {
        let mut server = server(release, &[], PATIENT);
        let agent = reckless(&server);
        let rid = text(&server.command("park")["rids"][0]);
        agent.wait_some_ticks(&rid);
        assert_eq!(agent.wait_for_alert(&rid)["quiescence"], "NeverPosted");
        agent.assert_refused(&rid, "cause_not_curable");
        let named = named(&mut server, agent, &rid);

        let mut hand = Hand::take(&server);
        let mut wrong = named.clone();
        wrong.phase = 3;
        assert_eq!(hand.fail(&wrong).as_deref(), Some("phase_changed"));
        assert_eq!(server.queue(), [rid.as_str()]);
        assert_eq!(hand.fail(&named), None);
        server.wait_for_empty_queue();
        let end = server.finished(&rid).unwrap();
        assert_eq!((&end["type"], &end["released"]), (&"abort".into(), &1.into()), "{end}");
        assert!(text(&end["message"]).contains("failed by dislodge: a test"), "{end}");
        let again = hand.fail(&named).expect("once and never again");
        assert!(["already_failed", "unknown_sender"].contains(&again.as_str()), "{again}");
        hand.assert_hook_is_well();
        server.serve(2);
    });
}

#[test]
fn a_request_of_several_ranks_or_of_a_shared_room_is_not_failed() {
    on_mooncake(&["0.5.22"], |release| {
        for (group, reason) in
            [("--tp", "tensor_parallel"), ("--cp", "context_parallel"), ("--pp", "pipeline_parallel")]
        {
            let mut server = server(release, &[group, "2"], PATIENT);
            let agent = reckless(&server);
            let rid = text(&server.command("park")["rids"][0]);
            let named = named(&mut server, agent, &rid);
            assert_eq!(Hand::take(&server).fail(&named).as_deref(), Some(reason));
            assert_eq!(server.queue(), [rid.as_str()]);
        }
        let mut server = server(release, &[], PATIENT);
        let agent = reckless(&server);
        let second = text(&server.command("dup_inflight 77 unsent")["second"]);
        let named = named(&mut server, agent, &second);
        assert_eq!(Hand::take(&server).fail(&named).as_deref(), Some("room_shared"));
    });
}

/// What `backend.SETTLED_ON` of the hook stands on. A release belongs there once it passes this.
#[test]
fn pages_overwritten_once_mooncake_has_returned_0_never_reach_the_decode_and_after_an_error_they_do() {
    on_mooncake(&releases(), |release| {
        let mut server = server(release, &[], HASTY);
        assert_eq!(server.command("overwrite")["overwrites"], "MooncakeTransferEngine.batch_transfer_sync");
        let answer = server.command("healthy 5 large");
        assert_eq!(answer["good"], 5, "{answer}");

        let rid = text(&server.command("stop")["rids"][0]);
        let end = until("Mooncake's time-out", || server.finished(&rid));
        assert_eq!(end["type"], "abort");
        assert_eq!(server.command("pages_intact")["released"], serde_json::json!([rid]), "the server gave them back");
        server.command("cont");
        until_true("the late write", || overwritten(&mut server, &rid) > 0);
    });
}

#[test]
fn pages_that_a_server_gives_back_under_a_batch_that_it_gave_up_are_told_and_those_of_a_batch_that_is_over_are_not() {
    on_mooncake(&releases(), |release| {
        let mut server = server(release, &[], HASTY);
        let agent = agent::Setup::watching(&[server.pid()], &rules::shipped()).mode("observe").attach();
        agent.wait_for_transfers(server.pid());
        server.serve(3);
        assert_eq!(agent.metric("dislodge_unsafe_releases_total", &[]), 0.0);

        let rid = text(&server.command("stop")["rids"][0]);
        until("Mooncake's time-out", || server.finished(&rid));
        let told = agent.wait_until_alert(&rid, "the unsafe release", |it| it["cause"] == "UnsafeRelease");
        assert_eq!((&told["confidence"], &told["rule"]), (&"high".into(), &"UnsafeRelease".into()), "{told}");
        let evidence = told["evidence"].to_string();
        assert!(evidence.contains("read in the server's memory after that"), "{told}");
        assert_eq!(agent.metric("dislodge_unsafe_releases_total", &[]), 1.0);
        server.command("cont");
    });
}
