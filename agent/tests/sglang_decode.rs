//! A decode server of SGLang's released code (`tests/sglang/decode_server.py` names what of it is a stand-in): its requests are seen
//! in their queues, diagnosed, and never touched.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use dislodge::{
    event::{
        Body, Phase,
        receiver::{DecodeLeave, DecodeQueue, ReceiverEvent},
    },
    kernel::{Kernel, Sizes},
    target::{discover, marker},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::{
    agent::{self, Agent},
    channel::Hand,
    environment::{self, mooncake, on_each},
    full, needs, rules,
    server::{Setup, SglangServer, text},
    wait::{until, until_true},
};

/// The releases of this run: the oldest whose decode is known, and the newest but one.
fn releases() -> Vec<&'static str> {
    if full() { environment::releases() } else { vec!["0.5.10", "0.5.22"] }
}

/// Every request of a decode is to be failed: only the guards stand between.
const EVERYTHING: &str = "
rules:
  - name: Everything
    when: role == \"decode\"
    for: 1s
    severity: critical
    action: enforce
";

/// A server whose decode is one with queues; and the decode's pid.
fn start(release: &str) -> (SglangServer, u32) {
    start_with(release, "nixl")
}

/// The same with this engine.
fn start_with(release: &str, backend: &str) -> (SglangServer, u32) {
    let mut server = Setup::of(release).arguments(&["--decode-server", "--backend", backend]).start();
    let decode = server.command("decode")["decode"].as_u64().unwrap();
    (server, decode.try_into().unwrap())
}

/// How many are in the decode's prealloc queue, and how many in its transfer queue.
fn lengths(server: &mut SglangServer) -> (usize, usize) {
    let queues = server.command("decode_queues");
    let length = |name: &str| queues[name].as_array().unwrap().len();
    (length("prealloc"), length("transfer"))
}

/// The alert of the only request that has one.
fn the_alert(agent: &Agent) -> Value {
    until("an alert", || agent.firing().first().cloned())
}

fn says(alert: &Value, words: &str) -> bool {
    alert["evidence"].to_string().contains(words)
}

#[test]
fn each_request_of_a_decode_is_seen_to_enter_and_to_leave_both_queues() {
    on_each(&releases(), |release| assert_all_is_marked(start(release)));
}

#[test]
fn with_mooncake_s_receivers_it_is_as_well() {
    if needs(mooncake()).is_some() {
        on_each(&releases(), |release| assert_all_is_marked(start_with(release, "mooncake")));
    }
}

/// Three healthy requests, and every step of each is marked, in order.
fn assert_all_is_marked((mut server, decode): (SglangServer, u32)) {
    let (mut kernel, mut ring) = Kernel::load(Sizes { ring: 1 << 20, calls: 1024 }).unwrap();
    let site = until("the marker", || marker::find(decode).ok());
    kernel.attach(discover::process_key(decode).unwrap(), &site).unwrap();
    server.serve(3);
    let mut marks = Vec::new();
    until_true("the receivers' ends", || {
        ring.drain(usize::MAX, |event| marks.push(event.unwrap().body));
        marks.iter().filter(|mark| matches!(mark, Body::Close { .. })).count() == 3
    });
    let opened = marks.iter().filter_map(|mark| match mark {
        Body::Receiver(ReceiverEvent::Open { sender, .. }) => Some(*sender),
        _ => None,
    });
    let opened: Vec<u64> = opened.collect();
    assert_eq!(opened.len(), 3);
    for sender in opened {
        let of_it: Vec<&str> = marks.iter().filter_map(|mark| step(mark, sender)).collect();
        let expected = [
            "open",
            "in prealloc",
            "waits",
            "told",
            "out of prealloc",
            "in transfer",
            "success",
            "clear",
            "out of transfer",
            "close",
        ];
        assert_eq!(of_it, expected, "sender {sender}");
    }
}

/// What a mark says of a request, in a word; nothing of its way to WaitingForInput, which it may have gone before the first poll.
fn step(mark: &Body, of_sender: u64) -> Option<&'static str> {
    let (sender, word) = match mark {
        Body::Receiver(ReceiverEvent::Open { sender, .. }) => (sender, "open"),
        Body::Receiver(ReceiverEvent::Enter { sender, queue: DecodeQueue::Prealloc, .. }) => (sender, "in prealloc"),
        Body::Receiver(ReceiverEvent::Enter { sender, queue: DecodeQueue::Transfer, .. }) => (sender, "in transfer"),
        Body::Receiver(ReceiverEvent::Leave { sender, queue, reason, .. }) => match (queue, reason) {
            (DecodeQueue::Prealloc, DecodeLeave::Preallocated) => (sender, "out of prealloc"),
            (DecodeQueue::Transfer, DecodeLeave::Success) => (sender, "out of transfer"),
            _ => (sender, "out otherwise"),
        },
        Body::Phase { sender, new: Some(Phase::WaitingForInput), .. } => (sender, "waits"),
        Body::Phase { sender, new: Some(Phase::Success), .. } => (sender, "success"),
        Body::Send { sender, pages: 8, last: true, .. } => (sender, "told"),
        Body::Clear { sender, .. } => (sender, "clear"),
        Body::Close { sender, .. } => (sender, "close"),
        _ => return None,
    };
    (*sender == of_sender).then_some(word)
}

#[test]
fn healthy_requests_of_a_decode_end_without_a_verdict() {
    on_each(&releases(), |release| {
        let (mut server, decode) = start(release);
        let agent = agent::Setup::watching(&[decode], &rules::shipped()).mode("enforce").attach();
        server.serve(5);
        until_true("rest", || {
            agent.server(decode).is_some_and(|server| server["requests"] == 0 && server["queue_length"] == 0)
        });
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
        let hello = &agent.server(decode).unwrap()["hello"];
        assert_eq!((&hello["sglang"], &hello["role"]), (&release.into(), &"decode".into()), "{hello}");
        assert_eq!(agent.server(decode).unwrap()["synchronised"], true);
        drop(agent);
        Hand::of(decode).assert_hook_is_well();
    });
}

#[test]
fn a_decode_whose_prefill_sends_nothing_waits_for_that_and_is_left_alone() {
    on_each(&releases(), |release| {
        let (mut server, decode) = start(release);
        let agent = agent::Setup::watching(&[decode], EVERYTHING).mode("enforce").attach();
        let parked = text(&server.command("park")["rids"][0]);
        let alert = the_alert(&agent);
        let rid = text(&alert["rid"]["text"]);
        let wanted = json!(["transfer", "decode", "Unknown", "high", "Unknown{written by the prefill}"]);
        assert_eq!(
            json!(["queue", "role", "cause", "confidence", "quiescence"].map(|key| &alert[key])),
            wanted,
            "{alert}"
        );
        assert!(says(&alert, "waits for the prefill") && says(&alert, "where to write its 8 pages"), "{alert}");
        agent.wait_some_ticks(&rid);
        agent.assert_refused(&rid, "decode_side");
        assert_eq!((lengths(&mut server), server.queue()), ((0, 1), vec![parked]));
        drop(agent);

        let mut hand = Hand::of(decode);
        let room = text(&alert["room"]);
        let fail = json!({"verb": "fail", "serial": alert["serial"], "rid": rid, "room": room, "phase": 2, "reason": "a test"});
        assert_eq!(hand.ask(&fail)["refused"], "decode_side");
        hand.assert_hook_is_well();
        assert_eq!(lengths(&mut server), (0, 1));
    });
}

#[test]
fn a_decode_whose_prefill_is_frozen_waits_for_that_and_gets_its_pages_when_it_goes_on() {
    on_each(&["0.5.22"], |release| {
        let (mut server, decode) = start(release);
        let agent = agent::Setup::watching(&[decode], EVERYTHING).mode("enforce").attach();
        let rid = text(&server.command("park")["rids"][0]);
        let prefill = Pid::from_raw(server.pid().cast_signed()).unwrap();
        kill_process(prefill, Signal::STOP).unwrap();
        let alert = the_alert(&agent);
        let seen = text(&alert["rid"]["text"]);
        agent.wait_some_ticks(&seen);
        assert_eq!((&alert["queue"], &alert["cause"]), (&"transfer".into(), &"Unknown".into()), "{alert}");
        assert!(says(&alert, "waits for the prefill"), "{alert}");
        agent.assert_refused(&seen, "decode_side");
        kill_process(prefill, Signal::CONT).unwrap();
        server.command(&format!("send {rid}"));
        server.wait_for_good_data(&rid);
        until_true("the alert's end", || agent.firing().is_empty());
    });
}

#[test]
fn a_decode_that_knows_no_prefill_says_so_until_the_server_gives_up() {
    on_each(&releases(), |release| {
        let (mut server, decode) = start(release);
        let agent = agent::Setup::watching(&[decode], EVERYTHING).mode("enforce").attach();
        let room = text(&server.command("stranger")["room"]);
        let alert = until("an alert", || agent.firing().into_iter().find(|alert| alert["room"] == *room));
        let rid = text(&alert["rid"]["text"]);
        let wanted = json!(["prealloc", "NeverBootstrapped", "NeverPosted"]);
        assert_eq!(json!(["queue", "cause", "quiescence"].map(|key| &alert[key])), wanted, "{alert}");
        assert!(says(&alert, "the prefill is not known here yet"), "{alert}");
        agent.wait_some_ticks(&rid);
        agent.assert_refused(&rid, "decode_side");
        assert_eq!(lengths(&mut server), (1, 0));
        // 15 attempts, a second apart: `DecodePreallocQueue._ensure_prefill_info`.
        until_true("the server's own end of it", || agent.firing().is_empty());
        assert_eq!(lengths(&mut server), (0, 0));
        assert_eq!(agent.metric("dislodge_remediations_total", &[]), 0.0);
    });
}

#[test]
fn a_decode_that_waits_for_memory_is_silent_and_in_the_right_queue() {
    on_each(&releases(), |release| {
        let (mut server, decode) = start(release);
        server.command("decode_slots 0");
        let agent = agent::Setup::watching(&[decode], &rules::shipped()).mode("enforce").attach();
        server.command("admit 2");
        let waiting = [("role", "decode"), ("queue", "prealloc"), ("phase", "WaitingForInput")];
        until_true("two that wait for memory", || agent.metric("dislodge_requests", &waiting) == 2.0);
        let later = until("some passes", || {
            let applied = agent.metric("dislodge_events_applied_total", &[]);
            (applied > 100.0).then_some(applied)
        });
        until_true("more passes", || agent.metric("dislodge_events_applied_total", &[]) > later + 30.0);
        assert_eq!(agent.logged(" alert "), [""; 0]);
        assert_eq!(lengths(&mut server), (2, 0));

        server.command("decode_slots 32");
        until_true("the transfer queue", || lengths(&mut server) == (0, 2));
        let told = [("role", "decode"), ("queue", "transfer")];
        until_true("two that wait for their pages", || agent.metric("dislodge_requests", &told) == 2.0);
        assert_eq!(agent.metric("dislodge_requests", &waiting), 0.0);
    });
}

#[test]
fn an_agent_that_comes_later_learns_which_receivers_are_in_which_queue() {
    on_each(&releases(), |release| {
        let (mut server, decode) = start(release);
        server.command("park 2");
        server.command("decode_slots 0");
        server.command("admit 1");
        until_true("the queues", || lengths(&mut server) == (1, 2));
        let agent = agent::Setup::watching(&[decode], &rules::shipped()).attach();
        let count = |queue| agent.metric("dislodge_requests", &[("role", "decode"), ("queue", queue)]);
        until_true("both queues", || (count("prealloc"), count("transfer")) == (1.0, 2.0));
        until_true("its length", || agent.server(decode).is_some_and(|server| server["queue_length"] == 3));
        assert_eq!(agent.server(decode).unwrap()["synchronised"], true);
    });
}

#[test]
fn an_agent_that_sees_both_ends_says_what_the_prefill_did_and_did_not_tell() {
    // The decode hears of an abort on the prefill's side from 0.5.20 on at the earliest.
    on_each(&["0.5.12.post1"], |release| {
        let (mut server, decode) = start(release);
        // The other end is looked at once a request is two seconds old.
        let rules = EVERYTHING.replace("when: role == \"decode\"", "when: role == \"decode\" && waiting_seconds > 5.0");
        let agent = agent::Setup::watching(&[server.pid(), decode], &rules).mode("enforce").attach();
        let parked = text(&server.command("park")["rids"][0]);
        let alert = the_alert(&agent);
        let rid = text(&alert["rid"]["text"]);
        assert_eq!((&alert["cause"], &alert["queue"]), (&"Unknown".into(), &"transfer".into()), "{alert}");
        let lives =
            format!("at the other end of the room, pid {} has it still, and polls WaitingForInput", server.pid());
        assert!(says(&alert, &lives), "{alert}");

        server.command(&format!("abort {parked}"));
        server.wait_for_empty_queue();
        let alert = agent.wait_until_alert(&rid, "the cause", |alert| alert["cause"] == "FailureNotTold");
        assert!(says(&alert, "is done with it: failed"), "{alert}");
        agent.wait_some_ticks(&rid);
        agent.assert_refused(&rid, "decode_side");
        assert_eq!(lengths(&mut server), (0, 1));
    });
}
