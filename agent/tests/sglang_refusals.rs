//! What must never be done, on SGLang's released code: the agent refuses, and so does the hook when asked behind the
//! agent's back. Every rule here wants everything failed.

#[path = "support/support.rs"]
mod support;

use support::{
    agent::{self, Agent},
    channel::{Hand, Named},
    environment::{on_each, pinning_releases, releases, releases_with_queues},
    rules,
    server::{Setup, SglangServer, text},
    wait::until_true,
};

/// An agent that is to fail everything.
fn reckless(server: &SglangServer) -> Agent {
    agent::Setup::watching(&[server.pid()], rules::EVERYTHING).mode("enforce").attach()
}

/// The agent does nothing about these requests, and says why; neither does the hook, asked directly.
fn assert_refused(server: &mut SglangServer, mut agent: Agent, rids: &[String], agents: &str, hooks: &[&str]) {
    let named: Vec<Named> = rids
        .iter()
        .map(|rid| {
            agent.wait_some_ticks(rid);
            agent.assert_refused(rid, agents);
            Named::of(&agent.wait_for_alert(rid), server)
        })
        .collect();
    assert!(agent.terminate().success());

    let mut hand = Hand::take(server);
    for named in &named {
        let refused = hand.fail(named).unwrap_or_else(|| "nothing".to_owned());
        assert!(hooks.contains(&refused.as_str()), "the hook refused {refused}, not {hooks:?}");
    }
    hand.assert_hook_is_well();
    assert_eq!(server.queue(), rids);
    server.assert_pages_intact();
}

#[test]
fn of_two_senders_on_a_room_neither_is_failed_while_the_first_is_in_flight() {
    on_each(&pinning_releases(), |release| {
        let mut server = Setup::of(release).start();
        let agent = reckless(&server);
        let both = server.command("dup_inflight 77 unsent");
        let rids = [text(&both["first"]), text(&both["second"])];
        assert_refused(&mut server, agent, &rids, "cause_not_curable", &["room_shared"]);

        assert_eq!(server.command("end_first")["reason"], "length");
        server.wait_for_empty_queue();
        server.wait_for_good_data(&rids[0]);
        server.serve(1);
    });
}

#[test]
fn of_two_senders_on_a_room_the_second_is_freed_once_the_first_has_ended_well() {
    on_each(&pinning_releases(), |release| {
        let mut server = Setup::of(release).start();
        let agent = reckless(&server);
        let both = server.command("dup_inflight 77 later");
        let (first, second) = (text(&both["first"]), text(&both["second"]));
        agent.wait_some_ticks(&first);
        agent.assert_refused(&first, "cause_not_curable");
        assert_eq!(server.queue(), [first.as_str()]);

        assert_eq!(server.command("end_first")["reason"], "length");
        agent.wait_until_freed(&second);
        assert_eq!(server.queue(), [""; 0]);
        server.wait_for_good_data(&first);
        let end = server.finished(&second).unwrap();
        assert_eq!((&end["type"], &end["released"]), (&"abort".into(), &1.into()), "{end}");
        server.assert_pages_intact();
    });
}

#[test]
fn a_request_whose_decode_is_frozen_is_not_failed_while_its_write_is_in_flight() {
    on_each(&releases(), |release| {
        let mut server = Setup::of(release).start();
        let agent = reckless(&server);
        let rids = [text(&server.command("stop")["rids"][0])];
        let in_flight = if release == "0.5.10" { "transfer_in_flight" } else { "chunks_working" };
        assert_refused(&mut server, agent, &rids, "cause_not_curable", &[in_flight]);

        server.command("cont");
        server.wait_for_empty_queue();
        assert_eq!(server.finished(&rids[0]).unwrap()["type"], "length");
        server.wait_for_good_data(&rids[0]);
    });
}

#[test]
fn a_request_whose_chunk_waits_behind_a_blocked_worker_is_not_failed() {
    on_each(&releases_with_queues(), |release| {
        let mut server = Setup::of(release).arguments(&["--queues", "1"]).start();
        let agent = reckless(&server);
        let blocked = server.command("blocked");
        let rids = [text(&blocked["culprit"]), text(&blocked["victims"][0])];
        assert_refused(&mut server, agent, &rids, "cause_not_curable", &["chunks_working", "chunks_queued"]);

        server.command("cont");
        server.wait_for_empty_queue();
        for rid in &rids {
            assert_eq!(server.finished(rid).unwrap()["type"], "length");
            server.wait_for_good_data(rid);
        }
    });
}

#[test]
fn a_request_of_a_server_with_several_ranks_is_not_failed() {
    let groups = [("--tp", "tensor_parallel"), ("--cp", "context_parallel"), ("--pp", "pipeline_parallel")];
    on_each(&["0.5.22"], |release| {
        for (option, reason) in groups {
            let mut server = Setup::of(release).arguments(&[option, "2"]).start();
            let agent = reckless(&server);
            let rids = [server.pin(77)];
            assert_refused(&mut server, agent, &rids, reason, &[reason]);
        }
        // The twin: a single rank, and everything else the same.
        let mut server = Setup::of(release).start();
        let agent = reckless(&server);
        let rid = server.pin(77);
        agent.wait_until_freed(&rid);
    });
}

#[test]
fn what_cannot_be_recorded_what_is_too_much_and_what_is_switched_off_is_not_done() {
    on_each(&["0.5.22"], |release| {
        let mut server = Setup::of(release).start();
        let rid = server.pin(77);
        let pid = server.pid();
        let watching = || agent::Setup::watching(&[pid], rules::COLLISION).mode("enforce");

        let unaudited = watching().unaudited().attach();
        unaudited.wait_some_ticks(&rid);
        assert!(unaudited.refusals("audit_unavailable") >= 1.0);
        assert_eq!(unaudited.metric("dislodge_remediations_total", &[]), 0.0);
        drop(unaudited);

        let limited = watching().config("remediation: {max_per_minute: 0}").attach();
        limited.wait_some_ticks(&rid);
        limited.assert_refused(&rid, "rate_limited");
        drop(limited);

        let folder = tempfile::tempdir().unwrap();
        let switch = folder.path().join("stop");
        std::fs::write(&switch, "").unwrap();
        let agent = watching().config(&format!("remediation: {{kill_switch: {}}}", switch.display())).attach();
        agent.wait_some_ticks(&rid);
        agent.assert_refused(&rid, "kill_switch");
        server.command("pause");
        until_true("the pause", || agent.refusals("paused") >= 1.0);
        std::fs::remove_file(&switch).unwrap();
        agent.wait_some_ticks(&rid);
        agent.assert_refused(&rid, "paused");
        assert_eq!(server.queue(), [rid.as_str()]);

        // The twin: recorded, allowed, switched on, running.
        server.command("resume");
        agent.wait_until_freed(&rid);
        server.wait_for_empty_queue();
        server.serve(1);
    });
}
