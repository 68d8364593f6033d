//! Pinned requests of SGLang's released code: seen, named, and freed where the mode says so.

#[path = "support/support.rs"]
mod support;

use support::{
    agent,
    environment::{on_each, pinning_releases, releases},
    rules,
    server::{Setup, text},
    wait::until_true,
};

#[test]
fn healthy_requests_end_without_a_verdict() {
    on_each(&releases(), |release| {
        let mut server = Setup::of(release).start();
        let agent = agent::Setup::watching(&[server.pid()], &rules::shipped()).mode("enforce").attach();
        server.serve(5);
        server.command("warmup");
        agent.wait_for_rest(&mut server);

        assert!(agent.metric("dislodge_events_applied_total", &[]) > 50.0, "it saw nothing of them");
        let total = |name: &str| agent.metric(&format!("dislodge_{name}_total"), &[]);
        until_true("every mark to be accounted for", || {
            total("events_seen") == total("events_applied") + total("decode_errors") + total("events_lost")
        });
        assert_eq!(agent.logged(" alert "), [""; 0], "not even a pending one");
        assert_eq!((agent.audit().len(), agent.status()["alerts"].as_array().unwrap().len()), (0, 0));
        for nothing in ["events_lost", "details_lost", "decode_errors", "control_discarded", "remediations"] {
            assert_eq!(agent.metric(&format!("dislodge_{nothing}_total"), &[]), 0.0, "{nothing}");
        }
        let hello = &agent.server(server.pid()).unwrap()["hello"];
        assert_eq!((&hello["sglang"], &hello["tp"]), (&release.into(), &1.into()), "{hello}");
    });
}

#[test]
fn a_pinned_request_is_named_by_an_observer_tried_by_a_dry_run_and_freed_by_enforce() {
    on_each(&pinning_releases(), |release| {
        let mut server = Setup::of(release).start();
        let pid = server.pid();
        let watching = || agent::Setup::watching(&[pid], &rules::shipped());

        let mut observer = watching().attach();
        let rid = server.pin(77);
        let alert = observer.wait_for_alert(&rid);
        assert_eq!((&alert["cause"], &alert["rule"]), (&"RoomCollision".into(), &"RoomCollision".into()), "{alert}");
        assert_eq!((&alert["confidence"], &alert["room"]), (&"high".into(), &"77".into()), "{alert}");
        assert!(alert["evidence"].to_string().contains("cleared room 77"), "{alert}");
        observer.wait_some_ticks(&rid);
        observer.assert_refused(&rid, "observing");
        assert_eq!(server.queue(), [rid.as_str()], "an observer touches nothing");
        assert!(observer.terminate().success());

        let mut trying = watching().mode("dry-run").attach();
        trying.wait_some_ticks(&rid);
        assert_eq!((trying.remediations("would_act"), trying.remediations("effective")), (1.0, 0.0));
        assert_eq!(trying.steps(&rid), ["would_act"]);
        assert_eq!(server.queue(), [rid.as_str()], "a dry run touches nothing");
        trying.kill();

        let enforcing = watching().mode("enforce").attach();
        enforcing.wait_until_freed(&rid);
        assert_eq!(server.queue(), [""; 0]);
        let end = server.finished(&rid).unwrap();
        assert_eq!((&end["type"], &end["released"]), (&"abort".into(), &1.into()), "{end}");
        let message = text(&end["message"]);
        assert!(message.contains("dislodge") && message.contains("RoomCollision"), "{message}");
        until_true("the alert's end", || enforcing.firing().is_empty());
        server.serve(2);
        enforcing.wait_for_rest(&mut server);
        assert_eq!(enforcing.metric("dislodge_remediations_total", &[]), 1.0, "once and never again");
    });
}

#[test]
fn a_second_request_on_a_room_that_the_server_fails_itself_is_not_called_stuck() {
    on_each(&["0.5.23"], |release| {
        let mut server = Setup::of(release).start();
        let agent = agent::Setup::watching(&[server.pid()], &rules::shipped()).mode("enforce").attach();
        let second = text(&server.command("dup 77")["second"]);
        agent.wait_for_rest(&mut server);
        assert_eq!(server.finished(&second).unwrap()["type"], "abort");
        assert_eq!(agent.logged("firing"), [""; 0]);
        assert_eq!(agent.metric("dislodge_remediations_total", &[]), 0.0);
    });
}

#[test]
fn an_abort_that_nobody_reads_is_named_and_carried_out() {
    // In 0.5.10 `abort()` sets a flag that `poll()` does not look at; the later releases fail the room.
    on_each(&["0.5.10"], |release| {
        let mut server = Setup::of(release).start();
        let pid = server.pid();
        let watching = || agent::Setup::watching(&[pid], &rules::shipped());
        let mut observer = watching().attach();
        let rid = text(&server.command("park")["rids"][0]);
        assert_eq!(server.command(&format!("abort {rid}"))["aborted"][0], *rid);
        let alert = observer.wait_for_alert(&rid);
        assert_eq!((&alert["cause"], &alert["quiescence"]), (&"AbortIgnored".into(), &"NeverPosted".into()), "{alert}");
        observer.assert_refused(&rid, "observing");
        assert_eq!(server.queue(), [rid.as_str()]);
        observer.kill();

        let enforcing = watching().mode("enforce").attach();
        enforcing.wait_until_freed(&rid);
        server.wait_for_empty_queue();
        let end = server.finished(&rid).unwrap();
        assert_eq!((&end["type"], &end["released"]), (&"abort".into(), &1.into()), "{end}");
        server.serve(1);
    });
}

#[test]
fn a_request_that_waits_is_named_by_what_it_waits_for_and_left_alone() {
    on_each(&releases(), |release| {
        let mut server = Setup::of(release).start();
        let agent = agent::Setup::watching(&[server.pid()], rules::WAITING).mode("enforce").attach();
        let parked = text(&server.command("park")["rids"][0]);
        let orphan = text(&server.command("orphan")["rid"]);
        assert_eq!(agent.wait_for_alert(&parked)["cause"], "Parked");
        agent.wait_some_ticks(&parked);
        until_true("the orphan's alert", || agent.firing().iter().any(|alert| alert["cause"] == "NeverBootstrapped"));
        agent.assert_refused(&parked, "cause_not_curable");
        assert!(agent.refusals("not_inflight") >= 1.0);
        assert_eq!(server.queue(), [parked.as_str()]);
        assert_eq!(server.command("bootstrap")[0]["rid"], *orphan);
    });
}

#[test]
fn what_is_recorded_of_an_action_is_what_was_true_when_it_was_done() {
    on_each(&["0.5.10"], |release| {
        let mut server = Setup::of(release).start();
        let agent = agent::Setup::watching(&[server.pid()], rules::EVERYTHING).mode("enforce").attach();
        let rid = text(&server.command("park")["rids"][0]);
        assert_eq!(agent.wait_for_alert(&rid)["cause"], "Parked", "it fires before the abort");
        server.command(&format!("abort {rid}"));
        agent.wait_until_freed(&rid);
        let records = agent.audit();
        let acting = records.iter().find(|record| record["step"]["step"] == "acting").unwrap();
        assert_eq!(acting["cause"], "AbortIgnored", "{acting}");
    });
}
