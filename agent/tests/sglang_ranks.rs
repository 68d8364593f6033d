//! Several ranks of one server, on SGLang's released code: what holds a request up, what puts ranks out of step, what they hang
//! for. The agent would fail every request; it must leave all of these alone.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use serde_json::{Value, json};
use support::{
    agent::{self, Agent},
    channel::{Hand, Named},
    environment::on_each,
    full,
    ranks::{Ranks, alert, replica, says, wait_for_cause, wait_until_stopped},
    rules,
    server::text,
    wait::{until, until_true},
};

/// The releases of this run: servers of two ranks take long to start.
fn releases() -> Vec<&'static str> {
    if full() { vec!["0.5.12.post1", "0.5.22", "0.5.23"] } else { vec!["0.5.22"] }
}

/// The kinds of ranks of this run: the first, or all.
fn kinds<T>(kinds: [T; 2]) -> impl Iterator<Item = T> {
    kinds.into_iter().take(if full() { 2 } else { 1 })
}

/// What ranks have to do with each other.
const OF_RANKS: &str = "
rules:
  - name: Ranks
    when: cause in [\"RankDivergence\", \"LoopStalled\", \"HeldByOtherRank\"]
    for: 0s
    severity: critical
    action: enforce
";

/// What is held up or out of step, when the one that holds it has been diagnosed.
const HELD: &str = "
rules:
  - name: Held
    when: cause == \"HeldByOtherRank\"
    for: 15s
    severity: info
    action: enforce
  - name: Stalled
    when: cause == \"TransferStalled\"
    for: 1s
    severity: critical
    action: enforce
";

/// An agent that would do whatever these rules say.
fn watching(ranks: &Ranks, rules: &str) -> Agent {
    let agent = agent::Setup::watching(ranks.pids(), rules).mode("enforce").attach();
    let replica = replica(&agent, ranks);
    assert_eq!(replica["missing"], json!([]), "{replica}");
    agent
}

/// It has done nothing to any rank.
fn assert_nothing_done(agent: &Agent) {
    assert_eq!(agent.metric("dislodge_remediations_total", &[]), 0.0, "{:?}", agent.audit());
}

/// The hook refuses to fail a request, asked behind the agent's back.
fn assert_hook_refuses(pid: u32, alert: &Value, phase: u8, reason: &str) {
    let (rid, room) = (text(&alert["rid"]["text"]), text(&alert["room"]));
    let named = Named { serial: alert["serial"].as_u64().unwrap(), rid, room, phase };
    assert_eq!(Hand::of(pid).fail(&named).as_deref(), Some(reason));
}

fn names(replica: &Value) -> Vec<&str> {
    replica["ranks"].as_array().unwrap().iter().map(|rank| rank["rank"].as_str().unwrap()).collect()
}

#[test]
fn healthy_ranks_are_seen_side_by_side_and_nothing_is_said_of_them() {
    on_each(&releases(), |release| {
        for (groups, expected) in kinds([(["--tp", "2"], ["TP0", "TP1"]), (["--pp", "2"], ["PP0", "PP1"])]) {
            let mut ranks = Ranks::start(release, &groups);
            let mut agent = watching(&ranks, OF_RANKS);
            ranks.serve(3);
            // A stage drops a request a microbatch after the one before it.
            let replica = until("empty queues on all", || {
                let replica = replica(&agent, &ranks);
                (replica["rooms"] == json!([])).then_some(replica)
            });
            assert_eq!((names(&replica), &replica["differs_on"]), (expected.to_vec(), &Value::Null), "{replica}");
            assert!(agent.audit().iter().all(|record| record["rule"] != "Ranks"), "{:?}", agent.audit());
            assert_eq!(agent.firing(), [Value::Null; 0]);
            assert!(agent.terminate().success());
            // From 0.5.22 on stages keep the statuses of rooms in a store of their own, not in a dictionary.
            ranks.pids().iter().for_each(|pid| Hand::of(*pid).assert_hook_is_well());
        }
    });
}

#[test]
fn a_request_whose_transfer_hangs_on_one_rank_is_held_by_it_on_the_other_one() {
    on_each(&releases(), |release| {
        for (groups, name) in kinds([(["--tp", "2"], "TP1"), (["--pp", "2"], "PP1")]) {
            let mut ranks = Ranks::start(release, &groups);
            let agent = watching(&ranks, HELD);
            ranks.pids().iter().for_each(|pid| agent.wait_for_transfers(*pid));
            ranks.serve(1);
            let held = ranks.command("held 1");
            let (rid, room) = (text(&held[0]["rid"]), text(&held[0]["room"]));

            let mut phases = Value::Null;
            until_true("what each rank polls", || {
                phases = replica(&agent, &ranks)["rooms"][0].clone();
                phases["room"] == room && phases["phases"][name.replace('1', "0")] == "Success"
            });
            assert_ne!(phases["phases"][name], "Success", "{phases}");
            assert_eq!(ranks.queues(), [[rid.clone()], [rid.clone()]], "the polls are reduced");

            let culprit = wait_for_cause(&agent, ranks.pid(1), &rid, "TransferStalled");
            let held = wait_for_cause(&agent, ranks.pid(0), &rid, "HeldByOtherRank");
            assert!(says(&held, &format!("rank {name}, pid {}, polls ", ranks.pid(1))), "{held}");
            assert!(says(&held, "Its cause there is TransferStalled"), "{held}");
            assert!(!says(&culprit, "polls Success since"), "{culprit}");

            assert_nothing_done(&agent);
            ranks.command("cont");
            ranks.wait_for_empty_queues();
            ranks.wait_for_good_data(&rid);
            until_true("silence", || agent.firing().is_empty());
        }
    });
}

#[test]
fn ranks_that_dropped_different_requests_diverge_also_once_they_hang_and_nothing_is_done() {
    on_each(&releases(), |release| {
        let mut ranks = Ranks::start(release, &["--tp", "2"]);
        let mut agent = watching(&ranks, rules::EVERYTHING);
        let crossed = ranks.command("crossed");
        let [first, second] = [text(&crossed[0]["rids"][0]), text(&crossed[0]["rids"][1])];
        let pids = [ranks.pid(0), ranks.pid(1)];
        for (pid, rid) in [(pids[0], &first), (pids[1], &second)] {
            assert_eq!(wait_for_cause(&agent, pid, rid, "Parked")["confidence"], "high");
        }

        // Polls are reduced by their places in the queues: the first of each fails.
        ranks.command(&format!("only 0 abort {first}"));
        let differ = [
            wait_for_cause(&agent, pids[0], &second, "RankDivergence"),
            wait_for_cause(&agent, pids[1], &first, "RankDivergence"),
        ];
        assert_eq!(ranks.queues(), [[second.clone()], [first.clone()]]);
        for (alert, (name, pid)) in differ.iter().zip([("TP1", pids[1]), ("TP0", pids[0])]) {
            assert!(says(alert, &format!("left the queue of rank {name}, pid {pid}")), "{alert}");
        }

        // One more on one of them: the next collective hangs.
        let third = text(&ranks.command("alone 0")[0]["rid"]);
        wait_until_stopped(&agent, &ranks, 12.0);
        for (pid, rid) in [(pids[0], &second), (pids[1], &first)] {
            assert_eq!(alert(&agent, pid, rid).unwrap()["cause"], "RankDivergence");
        }
        assert_eq!(alert(&agent, pids[0], &third).unwrap()["cause"], "Parked", "its loop may still go on");
        wait_until_stopped(&agent, &ranks, 40.0);
        let other = wait_for_cause(&agent, pids[0], &third, "RankDivergence");
        assert!(says(&other, "one rank of this server dropped the request of room"), "{other}");
        assert!(agent.refusals("cause_not_curable") >= 2.0, "{:?}", agent.audit());
        assert_nothing_done(&agent);
        assert!(agent.terminate().success());
    });
}

#[test]
fn the_hook_of_a_rank_that_diverges_refuses_as_well() {
    on_each(&["0.5.22"], |release| {
        let mut ranks = Ranks::start(release, &["--tp", "2"]);
        let mut agent = watching(&ranks, rules::EVERYTHING);
        let rids = ranks.command("crossed")[0]["rids"].clone();
        ranks.command(&format!("only 0 abort {}", text(&rids[0])));
        let alert = wait_for_cause(&agent, ranks.pid(1), &text(&rids[0]), "RankDivergence");
        assert!(agent.terminate().success());
        assert_hook_refuses(ranks.pid(1), &alert, 2, "tensor_parallel");
        assert_eq!(ranks.queues()[1], [text(&rids[0])]);
    });
}

#[test]
fn ranks_of_which_one_takes_its_time_to_drop_a_request_do_not_diverge_nor_do_paused_ones() {
    on_each(&releases(), |release| {
        let mut ranks = Ranks::start(release, &["--tp", "2"]);
        let agent = watching(&ranks, &OF_RANKS.replace("\"HeldByOtherRank\"", "\"Resurrected\""));
        for _ in 0..3 {
            let rid = text(&ranks.command("held 0")[0]["rid"]);
            let is_old = |pid: u32| agent.server(pid).is_some_and(|server| server["queue_length"] == 1);
            until_true("both have it", || ranks.pids().iter().all(|pid| is_old(*pid)));
            until_true("it is old enough to be compared", || {
                let room = replica(&agent, &ranks)["rooms"][0].clone();
                room["inflight_seconds"].as_f64().is_some_and(|seconds| seconds > 2.5)
            });
            ranks.command("late 1 700");
            ranks.command("cont");
            ranks.wait_for_empty_queues();
            ranks.wait_for_good_data(&rid);
        }
        ranks.command("crossed");
        ranks.command("pause");
        wait_until_stopped(&agent, &ranks, 12.0);
        assert_eq!(agent.firing(), [Value::Null; 0]);
        ranks.command("resume");
        until_true("passes", || replica(&agent, &ranks)["ranks"][1]["turned_seconds_ago"].as_f64().unwrap() < 1.0);
        let verdicts = agent.audit();
        assert!(verdicts.iter().all(|record| record["rule"] != "Ranks"), "{verdicts:?}");
    });
}

#[test]
fn ranks_that_hang_without_having_dropped_anything_are_stalled() {
    on_each(&["0.5.22"], |release| {
        let mut ranks = Ranks::start(release, &["--tp", "2"]);
        let agent = watching(&ranks, rules::EVERYTHING);
        ranks.serve(1);
        let rid = text(&ranks.command("alone 0")[0]["rid"]);
        wait_until_stopped(&agent, &ranks, 40.0);
        assert_eq!(alert(&agent, ranks.pid(0), &rid).unwrap()["cause"], "Parked");
        let stalled = wait_for_cause(&agent, ranks.pid(0), &rid, "LoopStalled");
        assert!(says(&stalled, "all 2 ranks of the server stopped within a second"), "{stalled}");
        assert!(says(&stalled, "it cannot be running a batch"), "{stalled}");
        assert_nothing_done(&agent);
    });
}

#[test]
fn a_stage_on_which_a_late_update_undoes_a_failure_keeps_what_the_other_one_dropped() {
    on_each(&["0.5.12.post1"], |release| {
        let mut ranks = Ranks::start(release, &["--pp", "2"]);
        let agent = watching(&ranks, rules::EVERYTHING);
        let rid = text(&ranks.command("resurrected 1")[0]["rid"]);
        until_true("one stage to drop it", || ranks.queues() == [vec![], vec![rid.clone()]]);
        let alert = wait_for_cause(&agent, ranks.pid(1), &rid, "RankDivergence");
        assert!(says(&alert, &format!("left the queue of rank PP0, pid {}", ranks.pid(0))), "{alert}");
        assert_nothing_done(&agent);
    });
}
