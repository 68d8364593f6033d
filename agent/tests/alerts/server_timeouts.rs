//! The server's own time-outs: no default rule fires while the server may still end what the rule is about.

use std::collections::BTreeSet;

use dislodge::event::Phase;

use super::*;

/// Time-outs that an operator may have set, in seconds.
const SET: [f64; 3] = [30.0, 300.0, 1_000.0];
/// Servers that end a bootstrap.
const THAT_END_IT: [(&str, Backend, &str); 3] =
    [("mooncake", Backend::Mooncake, "0.5.10"), ("nixl", Backend::Nixl, "0.5.18"), ("mori", Backend::Mori, "0.5.22")];

/// The same request on a server that says so of itself.
fn on(mut world: World, backend: (&str, Backend, &str), bootstrap: f64, waiting: f64) -> World {
    let (name, backend, release) = backend;
    if world.request.backend != Backend::Fake {
        world.request.backend = backend;
    }
    world.server.hello = Some(Box::new(Hello {
        backend: Some(name.to_owned()),
        sglang: Some(release.to_owned()),
        bootstrap_timeout: Some(bootstrap),
        waiting_timeout: Some(waiting),
        ..Hello::default()
    }));
    world
}

/// Causes of one request that lives; what is said of the server as a whole does not end with a request.
fn of_a_request() -> impl Iterator<Item = Cause> {
    Cause::ALL.into_iter().filter(|cause| {
        !matches!(cause, Cause::LoopStalled | Cause::RankDivergence | Cause::UnsafeRelease | Cause::WarmupPinned)
    })
}

#[test]
fn no_default_rule_fires_on_a_bootstrap_that_the_server_will_still_end() {
    let mut late = BTreeSet::new();
    for (backend, seconds) in THAT_END_IT.into_iter().flat_map(|backend| SET.map(|seconds| (backend, seconds))) {
        for cause in of_a_request() {
            for is_inflight in [true, false] {
                let mut world = on(World::pinned(cause), backend, seconds, 300.0);
                world.request.phase = Some(Phase::Bootstrapping);
                world.request.entered = world.request.entered.filter(|_| is_inflight);
                for (rule, fired) in fired(&world, 0.0, seconds + 500.0) {
                    assert!(fired > seconds, "{rule} fires at {fired} s, {cause}, time-out {seconds} s, {backend:?}");
                    late.insert(rule);
                }
            }
        }
    }
    let expected = ["AbortIgnored", "NeverBootstrapped", "Resurrected", "RoomCollision", "UpdateDropped"];
    assert_eq!(late.iter().map(String::as_str).collect::<Vec<_>>(), expected, "later they do");
}

#[test]
fn a_bootstrap_that_the_server_did_not_end_is_told_soon_after_its_time_out() {
    for (seconds, told) in [(30.0, 75.5), (300.0, 345.5), (1_000.0, 1_045.5)] {
        let world = on(World::pinned(Cause::NeverBootstrapped), THAT_END_IT[0], seconds, 300.0);
        assert_eq!(fired(&world, 0.0, 2_000.0), [("NeverBootstrapped".to_owned(), told)]);
    }
}

#[test]
fn a_release_that_has_the_time_out_but_does_not_look_at_it_is_taken_to_have_none() {
    // NIXL's senders until 0.5.17: what an operator set there means nothing.
    for seconds in SET {
        let world = on(World::pinned(Cause::NeverBootstrapped), ("nixl", Backend::Nixl, "0.5.15"), seconds, 300.0);
        assert_eq!(fired(&world, 0.0, 2_000.0), [("NeverBootstrapped".to_owned(), 345.5)], "{seconds}");
        world.look(at(1.0), |subject| {
            let field = Field::named("server_bootstrap_timeout_seconds").unwrap();
            assert_eq!(field.value(subject), Value::Seconds(0.0));
        });
    }
}

#[test]
fn nothing_that_waits_for_no_known_cause_is_told_before_every_time_out_of_the_server() {
    for (bootstrap, waiting) in SET.into_iter().flat_map(|one| SET.map(|other| (one, other))) {
        let world = on(World::pinned(Cause::Unknown), THAT_END_IT[1], bootstrap, waiting);
        let alerts = fired(&world, 0.0, 2_000.0);
        assert!(alerts.len() == 1 && alerts[0].1 > bootstrap.max(waiting) + 60.0, "{alerts:?}");
    }
    let without = on(World::pinned(Cause::Unknown), ("nixl", Backend::Nixl, "0.5.5"), 30.0, 30.0);
    assert_eq!(
        fired(&without, 0.0, 2_000.0),
        [("PinnedUnknown".to_owned(), 390.5)],
        "it has none: as if it had said nothing"
    );
}

#[test]
fn a_warm_up_is_told_once_its_own_time_out_is_over() {
    // From 0.5.21 on a fake sender ends after the time-out of waiting.
    for (waiting, told) in [(30.0, 330.5), (300.0, 330.5), (1_000.0, 1_030.5)] {
        let world = on(World::pinned(Cause::WarmupPinned), THAT_END_IT[1], 300.0, waiting);
        assert_eq!(fired(&world, 0.0, 2_000.0), [("WarmupPinned".to_owned(), told)]);
    }
}
