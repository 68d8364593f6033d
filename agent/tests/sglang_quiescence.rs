//! Whether a write may be under way, on SGLang's released code: what the hook counts and what the engine shows, joined.
//! The agent is told to fail everything; nothing here may be failed while that is in doubt.

#[path = "support/support.rs"]
mod support;

use serde_json::Value;
use support::{
    agent::{self, Agent},
    environment::{on_each, pinning_releases, releases, releases_with_queues},
    rules,
    server::{Setup, SglangServer, text},
    wait::until_true,
};

/// An agent that is to fail everything, and sees each transfer.
fn reckless(server: &SglangServer) -> Agent {
    in_mode(server, "enforce")
}

fn in_mode(server: &SglangServer, mode: &'static str) -> Agent {
    let agent = agent::Setup::watching(&[server.pid()], rules::EVERYTHING).mode(mode).attach();
    agent.wait_for_transfers(server.pid());
    agent
}

fn quiescence(alert: &Value) -> &str {
    alert["quiescence"].as_str().unwrap_or_default()
}

/// Whether a piece of evidence has all these words.
fn tells(alert: &Value, words: &[&str]) -> bool {
    let has = |it: &Value| it["fact"].as_str().is_some_and(|fact| words.iter().all(|word| fact.contains(word)));
    alert["evidence"].as_array().is_some_and(|evidence| evidence.iter().any(has))
}

/// What is recorded before a command is sent was never recorded, and each refusal was.
fn assert_left_alone(agent: &Agent, rids: &[&str]) {
    for rid in rids {
        let steps = agent.steps(rid);
        assert!(!steps.is_empty() && steps.iter().all(|step| step == "refused"), "{rid}: {steps:?}");
    }
    assert_eq!(agent.metric("dislodge_remediations_total", &[]), 0.0);
    assert!(agent.metric("dislodge_remediation_refusals_total", &[]) >= rids.len() as f64);
}

#[test]
fn a_chunk_behind_a_blocked_worker_is_queued_and_the_room_that_holds_the_worker_is_named() {
    on_each(&releases_with_queues(), |release| {
        let mut server = Setup::of(release).arguments(&["--queues", "1"]).start();
        let agent = reckless(&server);
        let blocked = server.command("blocked");
        let (culprit, room) = (text(&blocked["culprit"]), text(&blocked["room"]));
        let victim = text(&blocked["victims"][0]);

        let early = agent.wait_until_alert(&victim, "its place in the queue", |it| quiescence(it) == "Queued{1}");
        assert_eq!(early["cause"], "CapacityStall", "the worker has only just begun: {early}");
        let stalled = agent.wait_until_alert(&culprit, "the stall", |it| it["cause"] == "TransferStalled");
        assert!(quiescence(&stalled).starts_with("InFlight") && tells(&stalled, &["under way"]), "{stalled}");
        assert!(stalled["waiting_seconds"].as_f64().unwrap() >= 10.0, "{stalled}");
        let waits = agent.wait_until_alert(&victim, "the block", |it| it["cause"] == "WorkerBlocked");
        assert!(quiescence(&waits) == "Queued{1}" && tells(&waits, &["holds a chunk", &room]), "{waits}");
        assert_left_alone(&agent, &[&culprit, &victim]);

        server.command("cont");
        server.wait_for_empty_queue();
        for rid in [&culprit, &victim] {
            assert_eq!(server.finished(rid).unwrap()["type"], "length");
            server.wait_for_good_data(rid);
        }
    });
}

#[test]
fn of_two_rooms_that_hold_workers_the_one_in_the_chunks_own_queue_is_named() {
    // From 0.5.17 on the decode's port chooses the queue.
    let by_room: Vec<_> = releases().into_iter().filter(|it| matches!(*it, "0.5.12.post1" | "0.5.15")).collect();
    on_each(&by_room, |release| {
        let mut server = Setup::of(release).start();
        let agent = reckless(&server);
        let blocked = server.command("blocked 1 beside");
        let (room, victim) = (text(&blocked["room"]), text(&blocked["victims"][0]));
        let waits = agent.wait_until_alert(&victim, "the block", |it| it["cause"] == "WorkerBlocked");
        assert!(tells(&waits, &["holds a chunk", &room]), "the other room has held its worker for longer: {waits}");
        server.command("cont");
        server.wait_for_empty_queue();
    });
}

#[test]
fn a_parked_request_was_never_posted_until_it_is_sent_after_all() {
    on_each(&releases(), |release| {
        let mut server = Setup::of(release).start();
        let agent = reckless(&server);
        let rid = text(&server.command("park 1 large")["rids"][0]);
        let parked = agent.wait_for_alert(&rid);
        assert_eq!((&parked["cause"], quiescence(&parked)), (&"Parked".into(), "NeverPosted"), "{parked}");
        agent.wait_some_ticks(&rid);
        assert_eq!(agent.server(server.pid()).unwrap()["transfers"]["watch"], "since");
        assert_left_alone(&agent, &[&rid]);

        server.command(&format!("unpark {rid}"));
        let sent = agent.wait_until_alert(&rid, "the write", |it| quiescence(it).starts_with("InFlight"));
        assert!(sent["cause"] != "Parked" && tells(&sent, &["under way"]), "{sent}");
        agent.wait_some_ticks(&rid);
        assert_left_alone(&agent, &[&rid]);
        server.command("cont");
        server.wait_for_empty_queue();
        server.wait_for_good_data(&rid);
    });
}

#[test]
fn a_shared_rooms_transfers_are_nobodys_until_the_first_sender_has_gone() {
    on_each(&pinning_releases(), |release| {
        let mut server = Setup::of(release).start();
        let agent = in_mode(&server, "dry-run");
        let both = server.command("dup_inflight 77 unsent");
        let both = [text(&both["first"]), text(&both["second"])];
        for rid in &both {
            let shared = agent.wait_until_alert(rid, "the transfers", |it| tells(it, &["under way"]));
            assert_eq!(quiescence(&shared), "Unknown{room shared}", "{shared}");
        }
        agent.wait_some_ticks(&both[1]);
        assert_left_alone(&agent, &[&both[0], &both[1]]);
        server.command("end_first");
        server.wait_for_empty_queue();

        // One that is not in the queue yet shares the room too, and is pinned when the first has ended.
        let both = server.command("dup_inflight 78 later");
        let (first, second) = (text(&both["first"]), text(&both["second"]));
        let shared = agent.wait_until_alert(&first, "the transfers", |it| tells(it, &["under way"]));
        assert_eq!(quiescence(&shared), "Unknown{room shared}", "{shared}");
        server.command("end_first");
        let alone = agent.wait_for_alert(&second);
        assert_eq!((&alone["cause"], quiescence(&alone)), (&"RoomCollision".into(), "Quiescent"), "{alone}");
        assert!(tells(&alone, &["2 transfers", "done"]) && !tells(&alone, &["under way"]), "{alone}");
        until_true("a dry run that would act now", || agent.remediations("would_act") >= 1.0);
    });
}

#[test]
fn a_transfer_that_its_worker_left_running_is_followed_to_its_end() {
    // The older releases' workers give a chunk up at once, and the server then polls Failed.
    on_each(&["0.5.22", "0.5.23"], |release| {
        let mut server = Setup::of(release).arguments(&["--queues", "1"]).start();
        let agent = reckless(&server);
        let broken = server.command("broken paused");
        let rid = text(&broken["first"]);
        let left = agent.wait_until_alert(&rid, "the worker's leaving", |it| tells(it, &["left a chunk"]));
        assert_eq!(quiescence(&left), "InFlight{1}", "{left}");
        let both_told = |it: &Value| tells(it, &["the hook counts 0 chunks", "1 transfers under way"]);
        agent.wait_until_alert(&rid, "the sources' disagreement", both_told);

        // With its next chunk the worker lets go of the handle.
        server.command("next");
        let released = agent.wait_until_alert(&rid, "its release", |it| quiescence(it).starts_with("Unknown"));
        assert_eq!(quiescence(&released), "Unknown{transfer given up}", "{released}");
        agent.wait_some_ticks(&rid);

        server.command("cont");
        let over = agent.wait_until_alert(&rid, "its end", |it| quiescence(it) == "Quiescent");
        assert!(tells(&over, &["1 transfers", "done"]) && !tells(&over, &["given up"]), "{over}");
        agent.wait_some_ticks(&rid);
        assert_left_alone(&agent, &[&rid]);
        server.command("resume");
        server.wait_for_empty_queue();
        assert_eq!(agent.metric("dislodge_unsafe_releases_total", &[]), 0.0);
        server.assert_pages_intact();
    });
}

/// Releases in which a request is pinned by the failure of the first one on its room, which leaves a transfer running. In
/// 0.5.12 the room's Failed outlives the first request, and 0.5.23 fails the second one at once.
fn pinned_by_a_failure() -> Vec<&'static str> {
    pinning_releases().into_iter().filter(|it| *it != "0.5.12.post1").collect()
}

#[test]
fn a_second_request_is_held_by_what_the_first_one_on_its_room_left_running() {
    on_each(&pinned_by_a_failure(), |release| {
        let mut server = Setup::of(release).start();
        let agent = reckless(&server);
        let second = text(&server.command("broken shared")["other"]);
        // The second has sent nothing yet: what runs is the first one's, whose pages the server has given to others.
        until_true("the unsafe release", || agent.metric("dislodge_unsafe_releases_total", &[]) == 1.0);
        server.command("next");
        let held = agent.wait_until_alert(&second, "the cause", |it| it["cause"] == "RoomCollision");
        assert!(quiescence(&held).starts_with("InFlight") && tells(&held, &["left a chunk"]), "{held}");
        agent.wait_some_ticks(&second);
        assert!(agent.refusals("not_quiescent") >= 1.0);
        assert_left_alone(&agent, &[&second]);

        server.command("cont");
        let over = agent.wait_until_alert(&second, "its end", |it| quiescence(it) == "Quiescent");
        assert!(tells(&over, &["1 transfers", "done"]), "{over}");
        // The agent saw it end. The hook, which did not, would refuse by its own counts: it is not asked.
        until_true("the refusal", || agent.refusals("abandoned_handles") >= 1.0);
        agent.wait_some_ticks(&second);
        assert_left_alone(&agent, &[&second]);
        assert_eq!(server.queue(), vec![second]);
    });
}

#[test]
fn an_agent_that_came_after_the_transfer_never_takes_its_end_for_proved() {
    on_each(&pinned_by_a_failure(), |release| {
        let mut server = Setup::of(release).start();
        let second = text(&server.command("broken shared")["other"]);
        server.command("next");
        let agent = reckless(&server);
        for whether_it_runs_or_not in ["queue", "cont", "healthy"] {
            server.command(whether_it_runs_or_not);
            agent.wait_some_ticks(&second);
            let alert = agent.wait_for_alert(&second);
            assert_eq!(quiescence(&alert), "Unknown{abandoned handles}", "{alert}");
        }
        assert!(agent.refusals("not_quiescent") >= 1.0);
        assert_left_alone(&agent, &[&second]);
    });
}

#[test]
fn pages_that_a_server_releases_under_a_write_are_counted_as_such() {
    on_each(&releases_with_queues(), |release| {
        let mut server = Setup::of(release).start();
        let agent = in_mode(&server, "observe");
        let broken = server.command("broken alone");
        assert_eq!(server.command("pages_intact")["released"], serde_json::json!([broken["first"]]));
        let count = || agent.metric("dislodge_unsafe_releases_total", &[]);
        until_true("the unsafe release", || count() == 1.0);

        // The twin: one that ends well.
        server.command("cont");
        server.command("next");
        agent.wait_for_rest(&mut server);
        assert_eq!(count(), 1.0);
    });
}

#[test]
fn each_transfer_is_joined_to_a_room_by_its_notification_or_by_its_worker() {
    on_each(&releases(), |release| {
        let mut server = Setup::of(release).start();
        let agent = in_mode(&server, "observe");
        server.serve(3);
        let rid = text(&server.command("stop")["rids"][0]);
        agent.wait_until_alert(&rid, "the transfers", |it| tells(it, &["under way"]));
        server.command("cont");
        agent.wait_for_rest(&mut server);
        // Of each request its pages' and its record's; nothing else is transferred, no warm-up either.
        let ended = || agent.metric("dislodge_transfers_ended_total", &[("state", "done")]);
        until_true("the end of eight transfers", || ended() == 8.0);
        assert_eq!(agent.metric("dislodge_transfers_not_joined_total", &[]), 0.0);
        let status = agent.server(server.pid()).unwrap();
        assert_eq!((&status["transfers"]["under_way"], &status["events_lost"]), (&0.into(), &0.into()));
        drop((agent, server));

        // The twin: without marks only a notification tells, of which 0.5.23 sends none.
        if !matches!(release, "0.5.22" | "0.5.23") {
            return;
        }
        let mut unhooked = Setup::of(release).unhooked().start();
        let agent = agent::Setup::watching(&[unhooked.pid()], rules::EVERYTHING).start();
        agent.wait_for_transfers(unhooked.pid());
        unhooked.serve(2);
        let ended = || agent.metric("dislodge_transfers_ended_total", &[("state", "done")]);
        until_true("the end of four transfers", || ended() == 4.0);
        let not_joined = agent.metric("dislodge_transfers_not_joined_total", &[("reason", "no_notification")]);
        assert_eq!(not_joined, if release == "0.5.23" { 4.0 } else { 0.0 });
    });
}
