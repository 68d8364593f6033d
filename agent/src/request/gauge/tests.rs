use super::*;
use crate::event::exposition::Page;

const SECOND: u64 = 1_000_000_000;

fn at(seconds: u64) -> Monotonic {
    Monotonic((100 + seconds) * SECOND)
}

/// A server whose queue has had `length` requests since 0 and was last seen at `now`, of that release.
fn server(length: u32, now: u64, release: &str) -> ServerState {
    ServerState {
        hello: Some(Box::new(Hello { sglang: Some(release.to_owned()), ..Hello::default() })),
        queue_length: Some((length, at(now))),
        gauge: ServerGauge { queue_rests: Some(at(0)), read: None },
        ..ServerState::new(Sync::Complete)
    }
}

fn gauges(inflight: u32) -> Gauges {
    Gauges { prefill_inflight: Some(inflight), ..Gauges::default() }
}

/// The check at the last of these readings.
fn check(mut server: ServerState, readings: &[(u64, u32)]) -> GaugeCheck {
    let mut state = None;
    for (seconds, inflight) in readings {
        state = Some(GaugeState::after(state, gauges(*inflight), at(*seconds)));
    }
    server.gauge.read = state.map(Box::new);
    GaugeCheck::of(&server, server.queue_length.map_or(at(0), |(_, at)| at))
}

use GaugeCheck::{Agrees, Frozen, NotKnown, NotRefreshed};
use GaugeNotKnown::{NoSeries, NotRead, QueueMoves, QueueNotSeen, ReadOnce, RefreshDue};

#[test]
fn a_gauge_that_says_what_was_seen_agrees() {
    assert_eq!(check(server(1, 60, "0.5.22"), &[(50, 1)]), Agrees);
    assert_eq!(check(server(0, 60, "0.5.2"), &[(50, 0)]), Agrees);
    assert_eq!(check(server(1, 60, "0.5.22"), &[(0, 1)]), Agrees, "read at the moment of the change");
}

#[test]
fn another_number_that_does_not_move_while_a_request_is_pinned_is_frozen() {
    assert_eq!(check(server(1, 60, "0.5.22"), &[(20, 2)]), NotKnown(ReadOnce));
    assert_eq!(check(server(1, 60, "0.5.22"), &[(20, 2), (35, 2)]), Frozen);
    assert_eq!(check(server(2, 60, "0.5.22"), &[(20, 0), (35, 0)]), Frozen, "too few is as wrong as too many");
    assert_eq!(check(server(1, 60, "0.5.22"), &[(20, 2), (35, 3)]), NotKnown(ReadOnce), "it moves");
    assert_eq!(check(server(1, 60, "0.5.2"), &[(20, 2), (35, 2)]), Frozen, "and so on old releases");
}

#[test]
fn a_gauge_above_zero_on_an_idle_server_is_a_false_positive_of_old_releases() {
    for release in ["0.4.6.post5", "0.5.0", "0.5.2", "0.5.2rc1"] {
        assert_eq!(check(server(0, 60, release), &[(5, 1)]), NotRefreshed, "{release}");
    }
    for release in ["0.5.3", "0.5.10", "0.5.22", "1.0", "nonsense"] {
        assert_eq!(check(server(0, 60, release), &[(5, 1), (20, 1)]), NotKnown(RefreshDue), "{release}");
        assert_eq!(
            check(server(0, 60, release), &[(20, 1), (40, 1)]),
            Frozen,
            "{release}: it waits for something else"
        );
    }
    let mut old = server(0, 60, "0.5.22");
    let state = GaugeState::after(None, Gauges { is_old_spelling: true, ..gauges(1) }, at(30));
    old.gauge.read = Some(Box::new(state));
    assert_eq!(GaugeCheck::of(&old, at(60)), NotRefreshed, "the spelling gives a release away");
}

#[test]
fn a_gauge_is_not_held_against_a_queue_that_moves_or_is_not_seen() {
    assert_eq!(check(server(1, 60, "0.5.22"), &[]), NotKnown(NotRead));
    assert_eq!(check(server(1, 60, "0.5.22"), &[(1, 2)]), NotKnown(QueueMoves), "the batch may not be reported yet");
    let mut moved = server(1, 60, "0.5.22");
    moved.gauge.queue_rests = Some(at(58));
    assert_eq!(check(moved.clone(), &[(20, 1), (50, 1)]), NotKnown(QueueMoves), "the same number, of before");
    assert_eq!(check(moved.clone(), &[(20, 2), (50, 2)]), NotKnown(QueueMoves));
    let mut doubted = server(1, 60, "0.5.22");
    doubted.sync = Sync::Needed(crate::request::ResyncReason::EventsLost);
    assert_eq!(check(doubted, &[(20, 2), (50, 2)]), NotKnown(QueueNotSeen));
    let mut stalled = server(1, 60, "0.5.22");
    stalled.gauge.read = Some(Box::new(GaugeState { gauges: gauges(1), at: at(50), since: at(20), readings: 2 }));
    assert_eq!(GaugeCheck::of(&stalled, at(71)), NotKnown(QueueNotSeen), "no pass for eleven seconds");
    let mut other = server(1, 60, "0.5.22");
    other.gauge.read = Some(Box::new(GaugeState { gauges: Gauges::default(), at: at(50), since: at(50), readings: 1 }));
    assert_eq!(GaugeCheck::of(&other, at(60)), NotKnown(NoSeries));
}

#[test]
fn a_decodes_gauge_of_prefills_is_held_against_nothing() {
    let mut decode = server(3, 60, "0.5.22");
    decode.hello = Some(Box::new(Hello { role: Some("decode".to_owned()), ..Hello::default() }));
    assert_eq!(check(decode, &[(20, 0), (35, 0)]), NotKnown(NoSeries));
}

#[test]
fn a_reading_with_the_same_value_keeps_its_beginning() {
    let first = GaugeState::after(None, gauges(2), at(1));
    let second = GaugeState::after(Some(first), Gauges { prefill_bootstrap: Some(9), ..gauges(2) }, at(5));
    assert_eq!((second.since, second.at, second.readings), (at(1), at(5), 2));
    let third = GaugeState::after(Some(second), gauges(3), at(9));
    assert_eq!((third.since, third.readings), (at(9), 1));
}

#[test]
fn a_scheduler_is_given_the_series_of_its_own_rank() {
    let mut page = Page::default();
    page.feed(
        br#"sglang:num_prefill_inflight_queue_reqs{dp_rank="0",pp_rank="0",tp_rank="0"} 1.0
sglang:num_prefill_inflight_queue_reqs{dp_rank="1",pp_rank="0",tp_rank="2"} 2.0
sglang:num_prefill_inflight_queue_reqs{dp_rank="1",pp_rank="1",tp_rank="2"} 3.0
sglang:num_prefill_inflight_queue_reqs{dp_rank="2",pp_rank="0",tp_rank="4"} 4.0
sglang:num_prefill_inflight_queue_reqs{dp_rank="2",pp_rank="0",tp_rank="5"} 5.0
sglang:num_prefill_inflight_queue_reqs{dp_rank="3",pp_rank="0",tp_rank="6"} 6.0
sglang:num_prefill_inflight_queue_reqs{dp_rank="3",pp_rank="0",tp_rank="6"} 7.0
sglang:num_prefill_inflight_queue_reqs{dp_rank="4",pp_rank="0",tp_rank="8"} NaN
"#,
    );
    let (samples, _) = page.end();
    let inflight = |title: &str| Gauges::of_rank(&samples, Rank::of_title(title)).prefill_inflight;
    assert_eq!(inflight("sglang::scheduler_DP0_PP0_TP0"), Some(1));
    assert_eq!(inflight("sglang::scheduler_DP1_PP0_TP3"), Some(2), "the first of its group stands for it");
    assert_eq!(inflight("sglang::scheduler_DP1_PP1_TP3"), Some(3));
    assert_eq!(inflight("sglang::scheduler_DP2_PP0_TP5"), Some(5), "its own where there is one");
    assert_eq!(inflight("sglang::scheduler_DP3_PP0_TP6"), None, "it contradicts itself");
    assert_eq!(inflight("sglang::scheduler_DP4_PP0_TP8"), None, "no count");
    assert_eq!(inflight("sglang::scheduler_TP0"), None, "another server's");
    assert_eq!(inflight("sglang::scheduler_DP9"), None);
}
