//! Marks are edge-triggered: an agent that missed some asks for the state, and then says the same as one that saw it
//! all. Each test has a twin that must not ask, and must then not know.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use rustix::process::Signal;
use support::{
    agent::{self, Agent},
    environment::{on_each, pinning_releases},
    rules,
    server::{Setup, SglangServer},
    wait::until_true,
};

/// The pinned request is diagnosed as one that was seen to be pinned, and freed.
fn assert_diagnosed_and_freed(server: &mut SglangServer, agent: &Agent, rid: &str) {
    let alert = agent.wait_for_alert(rid);
    assert_eq!((&alert["cause"], &alert["confidence"]), (&"RoomCollision".into(), &"high".into()), "{alert}");
    assert!(alert["evidence"].to_string().contains("cleared room 77"), "{alert}");
    agent.wait_until_freed(rid);
    server.wait_for_empty_queue();
    assert_eq!(server.finished(rid).unwrap()["released"], 1);
    server.serve(1);
}

/// The agent watches, since it diagnoses a later pin, and yet it knows nothing of the first.
fn assert_not_diagnosed(server: &mut SglangServer, agent: &Agent, rid: &str) {
    let later = server.command("dup 78")["second"].as_str().unwrap().to_owned();
    agent.wait_some_ticks(&later);
    let firing = agent.firing();
    assert!(firing.iter().all(|alert| alert["rid"]["text"] != *rid), "{firing:?}");
    assert_eq!(server.queue(), [rid, later.as_str()]);
    assert_eq!(agent.metric("dislodge_remediations_total", &[]), 0.0, "it is blind");
}

#[test]
fn an_agent_that_starts_after_the_pin_diagnoses_it() {
    on_each(&pinning_releases(), |release| {
        let mut server = Setup::of(release).start();
        let rid = server.pin(77);
        let agent = agent::Setup::watching(&[server.pid()], rules::COLLISION).mode("enforce").attach();
        assert_diagnosed_and_freed(&mut server, &agent, &rid);
    });
}

#[test]
fn an_agent_that_starts_after_the_pin_knows_nothing_of_it_without_the_state() {
    on_each(&pinning_releases(), |release| {
        let mut server = Setup::of(release).start();
        let rid = server.pin(77);
        let setup = agent::Setup::watching(&[server.pid()], rules::COLLISION).mode("enforce");
        let agent = setup.without_resynchronisation().attach();
        assert_not_diagnosed(&mut server, &agent, &rid);
    });
}

/// A pin that an agent has seen, and the end of that agent.
fn pinned_and_orphaned(release: &str) -> (SglangServer, String) {
    let mut server = Setup::of(release).start();
    let mut agent = agent::Setup::watching(&[server.pid()], rules::COLLISION).attach();
    let rid = server.pin(77);
    agent.wait_for_alert(&rid);
    agent.kill();
    (server, rid)
}

#[test]
fn an_agent_after_one_that_was_killed_diagnoses_the_same() {
    on_each(&pinning_releases(), |release| {
        let (mut server, rid) = pinned_and_orphaned(release);
        let agent = agent::Setup::watching(&[server.pid()], rules::COLLISION).mode("enforce").attach();
        assert_diagnosed_and_freed(&mut server, &agent, &rid);
    });
}

#[test]
fn an_agent_after_one_that_was_killed_knows_nothing_without_the_state() {
    on_each(&pinning_releases(), |release| {
        let (mut server, rid) = pinned_and_orphaned(release);
        let setup = agent::Setup::watching(&[server.pid()], rules::COLLISION).mode("enforce");
        let agent = setup.without_resynchronisation().attach();
        assert_not_diagnosed(&mut server, &agent, &rid);
    });
}

/// The agent is stopped, its ring fills, and only then the request gets pinned: every mark of that is lost.
fn pin_while_the_ring_is_full(
    release: &str,
    setup: impl FnOnce(agent::Setup) -> agent::Setup,
) -> (SglangServer, Agent, String) {
    let mut server = Setup::of(release).start();
    let first = agent::Setup::watching(&[server.pid()], rules::COLLISION).mode("enforce").config("ring_size: 65536");
    let agent = setup(first).attach();
    agent.signal(Signal::STOP);
    server.commands(&["pause", "resume"], 800);
    let rid = server.pin(77);
    agent.signal(Signal::CONT);
    until_true("the count of what was lost", || {
        agent.metric("dislodge_events_lost_total", &[("reason", "ring_full")]) > 0.0
    });
    (server, agent, rid)
}

#[test]
fn an_agent_whose_ring_was_full_diagnoses_what_it_missed() {
    on_each(&pinning_releases(), |release| {
        let (mut server, agent, rid) = pin_while_the_ring_is_full(release, |setup| setup);
        assert_diagnosed_and_freed(&mut server, &agent, &rid);
        let asked = agent.metric("dislodge_resynchronisations_total", &[("reason", "events_lost")]);
        assert!(asked >= 1.0, "it did not ask because of the loss");
        let status = agent.server(server.pid()).unwrap();
        assert!(status["events_lost"].as_u64().unwrap() > 0, "{status}");
    });
}

#[test]
fn an_agent_whose_ring_was_full_has_missed_it_without_the_state() {
    on_each(&pinning_releases(), |release| {
        let (mut server, agent, rid) = pin_while_the_ring_is_full(release, agent::Setup::without_resynchronisation);
        assert_not_diagnosed(&mut server, &agent, &rid);
    });
}
