//! The control channel of a hook in a real server, used as no agent would.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{fs, process::Command, time::Duration};

use dislodge::{
    event::clock::Monotonic,
    target::{
        discover,
        hook::{self, TakeError},
    },
};
use serde_json::{Value, json};
use support::{
    agent,
    channel::{Hand, Named},
    environment::{on_each, releases},
    repository, rules,
    server::{Setup, SglangServer, text},
    wait::{until, until_true},
};

const RELEASE: &str = "0.5.22";
const SOON: Duration = Duration::from_secs(30);

/// A server with a request that is pinned and that the hook would fail if it were asked rightly.
fn pinned() -> (SglangServer, Named) {
    let mut server = Setup::of(RELEASE).start();
    let rid = server.pin(77);
    let agent = agent::Setup::watching(&[server.pid()], rules::COLLISION).attach();
    let named = Named::of(&agent.wait_for_alert(&rid), &mut server);
    (server, named)
}

fn refused(reply: &Value) -> &str {
    assert_eq!(reply["ok"], false, "{reply}");
    reply["refused"].as_str().unwrap()
}

#[test]
fn what_is_no_request_is_refused_and_the_server_serves_on() {
    on_each(&[RELEASE], |_| {
        let (mut server, named) = pinned();
        let mut hand = Hand::take(&server);
        let whole = hand.request(&named.arguments(), SOON);
        let bytes = whole.to_string().into_bytes();
        let changed = |key: &str, value: Value| {
            let mut request = whole.clone();
            request[key] = value;
            request.to_string().into_bytes()
        };
        let malformed = [
            b"\0\xff garbage \x80".to_vec(),
            bytes[..bytes.len() / 2].to_vec(),
            [bytes.clone(), vec![b' '; 5000]].concat(),
            format!("{}1{}", "[".repeat(2000), "]".repeat(2000)).into_bytes(),
            b"[]".to_vec(),
            b"null".to_vec(),
            b"NaN".to_vec(),
            changed("protocol", json!(2)),
            changed("epoch", json!(-1)),
            changed("epoch", json!("1")),
            changed("id", json!(1.5)),
            changed("deadline", json!(null)),
            changed("deadline", json!(1e300)),
            changed("verb", json!(7)),
            changed("serial", json!("1")),
            changed("serial", json!(true)),
            changed("rid", json!(null)),
            changed("room", json!(77)),
            changed("phase", json!("2")),
            changed("reason", json!([])),
        ];
        for message in malformed {
            let reply = hand.ask_raw(&message);
            assert_eq!(refused(&reply), "malformed", "{}: {reply}", String::from_utf8_lossy(&message));
        }
        assert_eq!(refused(&hand.ask_raw(&changed("verb", json!("shutdown")))), "unknown_verb");
        assert_eq!(refused(&hand.ask_raw(&changed("deadline", json!(Monotonic::now().0)))), "expired");
        assert_eq!(refused(&hand.ask_raw(&changed("epoch", json!(hand.epoch() - 1)))), "stale_epoch");
        hand.assert_hook_is_well();
        assert_eq!(server.queue(), [named.rid.as_str()], "nothing was done");
        server.serve(1);
    });
}

#[test]
fn a_request_that_is_named_wrongly_is_not_failed_and_one_that_is_named_rightly_is() {
    on_each(&[RELEASE], |_| {
        let (mut server, named) = pinned();
        let mut hand = Hand::take(&server);
        let longer = format!("{}x", named.rid);
        let wrong = [
            (Named { serial: named.serial + 1, ..named.clone() }, "unknown_sender"),
            (Named { serial: named.serial - 1, ..named.clone() }, "unknown_sender"),
            (Named { room: "78".to_owned(), ..named.clone() }, "room_mismatch"),
            (Named { room: "077".to_owned(), ..named.clone() }, "room_mismatch"),
            (Named { rid: named.rid[..named.rid.len() - 1].to_owned(), ..named.clone() }, "rid_mismatch"),
            (Named { rid: longer, ..named.clone() }, "rid_mismatch"),
            (Named { phase: 3, ..named.clone() }, "phase_changed"),
        ];
        for (wrong, reason) in wrong {
            assert_eq!(hand.fail(&wrong).as_deref(), Some(reason), "{}", wrong.arguments());
        }
        assert_eq!(server.queue(), [named.rid.as_str()]);

        assert_eq!(hand.fail(&named), None, "every guard holds");
        server.wait_for_empty_queue();
        assert_eq!(server.finished(&named.rid).unwrap()["type"], "abort");
        assert!(hand.fail(&named).is_some(), "once is enough");
        hand.assert_hook_is_well();
        server.serve(1);
    });
}

#[test]
fn a_warm_up_that_never_leaves_can_be_failed_too() {
    // The releases in which an empty last chunk is never sent: until 0.5.20.
    let releases: Vec<_> = releases().into_iter().filter(|release| !["0.5.22", "0.5.23"].contains(release)).collect();
    on_each(&releases, |release| {
        let mut server = Setup::of(release).start();
        let rid = text(&server.command("warmup_pinned")["rid"]);
        let agent = agent::Setup::watching(&[server.pid()], rules::EVERYTHING).attach();
        let named = Named::of(&agent.wait_for_alert(&rid), &mut server);
        drop(agent);
        let mut hand = Hand::take(&server);
        let wrong = Named { phase: 3, ..named.clone() };
        assert_eq!(hand.fail(&wrong).as_deref(), Some("phase_changed"));
        assert_eq!(hand.fail(&named), None);
        server.wait_for_empty_queue();
        let end = server.finished(&rid).unwrap();
        assert_eq!((&end["type"], &end["released"]), (&"abort".into(), &1.into()), "{end}");
        hand.assert_hook_is_well();
        server.serve(1);
    });
}

/// The hook with other words in one of its files.
fn changed_hook(file: &str, from: &str, to: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let copied = Command::new("cp").arg("-r").arg(repository().join("hook")).arg(folder.path()).status().unwrap();
    assert!(copied.success());
    let path = folder.path().join("hook/dislodge_hook").join(file);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{file} looks different now");
    fs::write(path, text.replace(from, to)).unwrap();
    folder
}

#[test]
fn a_hook_of_another_protocol_is_observed_and_never_asked() {
    on_each(&[RELEASE], |_| {
        let folder = changed_hook("control.py", "PROTOCOL = 1", "PROTOCOL = 2");
        let mut server = Setup::of(RELEASE).hooks(&[folder.path().join("hook")]).start();
        let agent = agent::Setup::watching(&[server.pid()], rules::COLLISION).mode("enforce").start();
        until_true("the look at it", || agent.server(server.pid()).is_some_and(|it| it["state"] == "without_control"));
        let why = agent.server(server.pid()).unwrap()["control"]["why"].clone();
        assert!(text(&why).contains("protocol 2"), "{why}");
        assert_eq!(agent.metric("dislodge_attach_errors_total", &[("reason", "other_protocol")]), 1.0);

        let rid = server.pin(77);
        agent.wait_some_ticks(&rid);
        agent.assert_refused(&rid, "blind");
        assert_eq!(server.queue(), [rid.as_str()]);
        server.serve(1);
    });
}

#[test]
fn a_hook_that_is_loaded_twice_is_one_hook() {
    on_each(&[RELEASE], |_| {
        let hook = repository().join("hook");
        let both = [hook.clone(), hook.join("sitecustomize")];
        let mut server = Setup::of(RELEASE).hooks(&both).start();
        let agent = agent::Setup::watching(&[server.pid()], rules::COLLISION).mode("enforce").attach();
        server.serve(2);
        let rid = server.pin(77);
        agent.wait_until_freed(&rid);
        agent.wait_for_rest(&mut server);
        for nothing in ["events_unused", "decode_errors", "events_lost"] {
            assert_eq!(agent.metric(&format!("dislodge_{nothing}_total"), &[]), 0.0, "{nothing}");
        }
        drop(agent);
        Hand::take(&server).assert_hook_is_well();
        server.serve(1);
    });
}

#[test]
fn a_second_agent_is_kept_out_until_the_first_is_gone() {
    on_each(&[RELEASE], |_| {
        let mut server = Setup::of(RELEASE).start();
        let pid = server.pid();
        let key = discover::process_key(pid).unwrap();
        let mut first = agent::Setup::watching(&[pid], rules::COLLISION).attach();
        assert!(matches!(hook::take(key), Err(TakeError::HeldByAnother)));

        let second = agent::Setup::watching(&[pid], rules::COLLISION).mode("enforce").start();
        let control = until("the second agent's look", || {
            second
                .server(pid)
                .filter(|server| server["state"] == "without_control")
                .map(|server| server["control"].clone())
        });
        assert!(text(&control["why"]).contains("another agent"), "{control}");
        assert_eq!(second.metric("dislodge_attach_errors_total", &[("reason", "held_by_another")]), 1.0);

        first.kill();
        second.wait_for_server(pid, true);
        let rid = server.pin(77);
        second.wait_until_freed(&rid);
    });
}

#[test]
fn what_a_dead_agent_left_in_the_channel_does_nothing() {
    on_each(&[RELEASE], |_| {
        let (mut server, named) = pinned();
        server.command("pause"); // no pass: nobody reads the channel
        let mut dead = Hand::take(&server);
        let command = dead.request(&named.arguments(), Duration::from_millis(200));
        dead.send(command.to_string().as_bytes());
        let question = dead.request(&json!({"verb": "ping"}), SOON);
        dead.send(question.to_string().as_bytes());
        drop(dead);
        until_true("the deadline", || Monotonic::now().0 > command["deadline"].as_u64().unwrap());
        server.command("resume");

        // The twin's replies are in the channel by now, or come before the answer to the new agent: neither is its own.
        let mut hand = Hand::take(&server);
        let request = hand.request(&json!({"verb": "ping"}), SOON);
        hand.send(request.to_string().as_bytes());
        let reply = until("the reply to the new agent", || {
            let reply = hand.receive()?;
            if reply["epoch"] != request["epoch"] {
                assert!(reply["ok"] == true || reply["refused"] == "expired", "{reply}");
                return None;
            }
            Some(reply)
        });
        assert_eq!((&reply["ok"], &reply["id"]), (&json!(true), &request["id"]));
        assert_eq!(server.queue(), [named.rid.as_str()], "the dead agent's command was carried out");

        // The twin: in time, the same command of a living agent is.
        assert_eq!(hand.fail(&named), None);
        server.wait_for_empty_queue();
    });
}

#[test]
fn a_request_that_ends_by_itself_while_it_is_to_be_failed_ends_well() {
    on_each(&[RELEASE], |_| {
        let mut server = Setup::of(RELEASE).start();
        let rid = text(&server.command("stop")["rids"][0]);
        let agent = agent::Setup::watching(&[server.pid()], rules::EVERYTHING).attach();
        let named = Named::of(&agent.wait_for_alert(&rid), &mut server);
        drop(agent);

        server.command("pause");
        let mut hand = Hand::take(&server);
        let command = hand.request(&named.arguments(), SOON);
        hand.send(command.to_string().as_bytes());
        server.command("cont");
        server.wait_for_good_data(&rid);
        server.command("resume"); // the pass reads the command before it polls
        let reply = until("the reply", || hand.receive());
        assert!(matches!(refused(&reply), "phase_changed" | "terminal" | "not_in_queue" | "unknown_sender"), "{reply}");
        server.wait_for_empty_queue();
        let end = server.finished(&rid).unwrap();
        assert_eq!((&end["type"], &end["released"]), (&"length".into(), &1.into()), "{end}");
        server.assert_pages_intact();
        hand.assert_hook_is_well();
    });
}
