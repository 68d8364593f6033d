//! Transfers whose peer stops, goes on or dies, and transfers that the server gives up: what the tracker knows of them by
//! the probes on released NIXL and Mooncake wheels.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "transfers_faults/mooncake.rs"]
mod mooncake;
#[path = "support/support.rs"]
mod support;

use std::{thread, time::Duration};

use dislodge::{
    event::{
        ProcessKey,
        native::{Engine, ErrorPoint, NIXL_REMOTE_DISCONNECT, NativeEvent, TransferStatus},
    },
    kernel::{canary::ReturnProbes, probe::ProbeSet},
    request::transfer::{SubjectTransfers, TransferEnd, TransferState},
    target::library::LibraryRole,
};
use serde_json::{Value, json};
use support::{
    native::{BIG, Peer, Release, on, on_each, pair},
    transfers::{Watcher, make, number, surveyed},
    wait::until,
};

const ROOM: u64 = 4711;
/// How long what should not happen is waited for. UCX over loopback needs some 50 ms to write what a decode that goes on
/// has not taken.
const LONG_ENOUGH: Duration = Duration::from_secs(2);

/// A prefill that is watched and its decode.
struct Bench {
    watcher: Watcher,
    prefill: Peer,
    decode: Peer,
    key: ProcessKey,
}

impl Bench {
    fn set_up(release: &Release) -> Self {
        let (mut prefill, decode) = pair(release, BIG);
        let (mut watcher, key) = (Watcher::new(), prefill.key());
        if release.engine() == "nixl" {
            // The connection is made before anything is looked at.
            warm(&mut prefill);
        }
        watcher.attach(key);
        Self { watcher, prefill, decode, key }
    }

    /// As if the library that tells of flushes were of a release that does not.
    fn set_up_without_flushes(release: &Release) -> Self {
        let mut bench = Self::set_up(release);
        bench.watcher = Watcher::new();
        bench.watcher.attach_where(bench.key, |library| library.role != LibraryRole::Ucp);
        bench
    }

    /// A transfer to a decode that is stopped.
    fn in_flight(&mut self) -> u64 {
        let pages: Vec<u64> = (0..BIG.1).collect();
        let handle = make(&mut self.prefill, json!({"room": ROOM, "pages": pages}));
        self.decode.stop();
        let posted = self.prefill.ask(json!({"do": "post", "handle": handle}));
        assert_eq!(posted["status"], "PROC");
        self.watcher.drain();
        assert_eq!(self.state(handle), Some(TransferState::InFlight));
        assert_eq!(self.watcher.room(self.key, ROOM).unwrap().under_way().map(|(count, _)| count), Some(1));
        handle
    }

    fn state(&self, handle: u64) -> Option<TransferState> {
        self.watcher.transfer(self.key, handle).map(|transfer| transfer.state)
    }

    fn unproved(&self) -> Option<u64> {
        self.watcher.room(self.key, ROOM).map(|room| room.unproved)
    }

    fn until_over(&mut self) {
        let key = self.key;
        let is_over = |watcher: &Watcher| watcher.room(key, ROOM).is_none_or(SubjectTransfers::is_over);
        self.watcher.until("the room's transfers to be over", is_over);
    }

    fn poll(&mut self, handle: u64) -> Value {
        self.prefill.try_ask(json!({"do": "poll", "handle": handle, "within": 30}))
    }
}

fn warm(prefill: &mut Peer) {
    let handle = make(prefill, json!({"room": 1, "pages": [0]}));
    prefill.ask(json!({"do": "post", "handle": handle}));
    prefill.ask(json!({"do": "poll", "handle": handle, "within": 30}));
    prefill.ask(json!({"do": "release", "handle": handle}));
}

/// Whether the ends of ranges are seen: they are not in 0.3.1, which posts without `sendXferRange`.
fn has_ranges(release: &Release) -> bool {
    release.is_since([0, 5, 1])
}

#[test]
fn a_transfer_to_a_stopped_decode_is_in_flight_and_done_when_it_goes_on_though_nobody_polls() {
    on_each("nixl", |release| {
        let mut bench = Bench::set_up(release);
        let handle = bench.in_flight();
        thread::sleep(LONG_ENOUGH);
        bench.watcher.drain().observe(bench.key);
        assert_eq!(bench.state(handle), Some(TransferState::InFlight));
        bench.decode.go_on();
        if has_ranges(release) {
            let key = bench.key;
            let done = Some(TransferState::Ended(TransferEnd::Done));
            bench.watcher.until("its flush", |it| it.transfer(key, handle).map(|it| it.state) == done);
            assert!(bench.watcher.room(key, ROOM).is_none(), "over, and no sender lives");
        }
        assert_eq!(bench.poll(handle)["status"], "DONE");
        bench.prefill.ask(json!({"do": "release", "handle": handle}));
        bench.until_over();
        assert_eq!(bench.watcher.ended(bench.key, Engine::Nixl, "done"), 1);
        bench.watcher.assert_nothing_lost(bench.key);
    });
}

#[test]
fn without_the_flushes_its_end_is_read_in_the_servers_memory_once_somebody_polled() {
    on_each("nixl", |release| {
        let mut bench = Bench::set_up_without_flushes(release);
        bench.watcher.drain();
        let handle = bench.in_flight();
        // The offset of the status is libnixl's, which is attached to.
        bench.decode.go_on();
        let arrived = bench.decode.ask(json!({"do": "check", "pages": [BIG.1 - 1], "within": 30}));
        assert_eq!(arrived["ok"], true);
        thread::sleep(LONG_ENOUGH);
        bench.watcher.observe(bench.key);
        assert_eq!(bench.state(handle), Some(TransferState::InFlight), "it arrived, and nobody asked");
        assert_eq!(bench.poll(handle)["status"], "DONE");
        bench.watcher.observe(bench.key);
        assert_eq!(bench.state(handle), Some(TransferState::Ended(TransferEnd::Done)));
    });
}

#[test]
fn a_killed_decode_fails_the_transfer_and_an_endpoint_error_says_why() {
    on_each("nixl", |release| {
        // It does not complete the flush while nobody polls, and aborts in its own `releaseXferReq` then, probed or not.
        if release.name == "nixl-0.5.1" {
            return;
        }
        let mut bench = Bench::set_up(release);
        let (handle, key) = (bench.in_flight(), bench.key);
        bench.decode.kill();
        let events = bench
            .watcher
            .take_until("the endpoint's error", key, |event| matches!(event, NativeEvent::EndpointError { .. }));
        if has_ranges(release) {
            let failed = TransferState::Ended(TransferEnd::Failed { code: NIXL_REMOTE_DISCONNECT });
            bench.watcher.until("its flush", |it| it.transfer(key, handle).map(|it| it.state) == Some(failed));
        } else {
            let _ = bench.poll(handle);
            bench.prefill.ask(json!({"do": "release", "handle": handle}));
        }
        bench.until_over();
        assert_eq!(bench.watcher.ended(key, Engine::Nixl, "failed"), 1);
        let events: Vec<NativeEvent> = events.into_iter().chain(bench.watcher.take(key)).collect();
        let mut points: Vec<(ErrorPoint, i8)> = events
            .iter()
            .filter_map(|event| match event {
                NativeEvent::EndpointError { point, status, .. } => Some((*point, *status)),
                _ => None,
            })
            .collect();
        points.sort_by_key(|(point, _)| *point as u8);
        points.dedup();
        println!("{}: {points:?}", release.name);
        let seen_by = |at: ErrorPoint| points.iter().any(|(point, _)| *point == at);
        assert!(seen_by(ErrorPoint::Uct) && seen_by(ErrorPoint::Ucp), "{points:?}");
        assert_eq!(seen_by(ErrorPoint::Nixl), release.is_since([0, 10, 1]), "{points:?}");
        let error = bench.watcher.tracker.server(key).unwrap().native.endpoint_error.unwrap();
        assert!(error.status < 0, "{error:?}");
        bench.watcher.assert_nothing_lost(key);
    });
}

#[test]
fn without_the_flushes_a_killed_decode_shows_in_the_status_that_a_poll_left() {
    on("nixl-1.5.1", |release| {
        let mut bench = Bench::set_up_without_flushes(release);
        let handle = bench.in_flight();
        bench.decode.kill();
        let polled = bench.poll(handle);
        assert!(polled["raised"].is_string() || polled["status"] == "ERR", "{polled}");
        bench.prefill.ask(json!({"do": "release", "handle": handle}));
        let events = bench.watcher.take(bench.key);
        let code = NIXL_REMOTE_DISCONNECT;
        assert!(
            events.iter().any(|event| matches!(event, NativeEvent::Releasing { status, .. }
                if *status == Some(TransferStatus::Failed { code }))),
            "{events:#?}"
        );
        assert_eq!(bench.watcher.ended(bench.key, Engine::Nixl, "failed"), 1);
    });
}

#[test]
fn a_transfer_that_is_released_in_progress_is_unproved_until_its_flush() {
    on_each("nixl", |release| {
        let mut bench = Bench::set_up(release);
        let handle = bench.in_flight();
        bench.prefill.ask(json!({"do": "release", "handle": handle}));
        bench.watcher.drain();
        assert_eq!((bench.state(handle), bench.unproved()), (None, Some(1)));
        assert_eq!(bench.watcher.ended(bench.key, Engine::Nixl, "given_up"), 1);
        thread::sleep(LONG_ENOUGH);
        bench.watcher.drain().observe(bench.key);
        let room = bench.watcher.room(bench.key, ROOM).unwrap();
        assert!(room.under_way().is_none() && !room.is_over(), "{room:?}");
        bench.decode.go_on();
        if has_ranges(release) {
            bench.until_over();
        } else {
            let arrived = bench.decode.ask(json!({"do": "check", "pages": [BIG.1 - 1], "within": 30}));
            assert_eq!(arrived["ok"], true);
            assert_eq!(bench.watcher.drain().room(bench.key, ROOM).unwrap().unproved, 1, "nothing tells");
        }
        bench.watcher.assert_nothing_lost(bench.key);
    });
}

#[test]
fn without_the_flushes_a_transfer_that_was_released_in_progress_stays_unproved() {
    on("nixl-1.5.1", |release| {
        let mut bench = Bench::set_up_without_flushes(release);
        let handle = bench.in_flight();
        bench.prefill.ask(json!({"do": "release", "handle": handle}));
        bench.decode.go_on();
        let arrived = bench.decode.ask(json!({"do": "check", "pages": [BIG.1 - 1], "within": 30}));
        assert_eq!(arrived["ok"], true);
        thread::sleep(LONG_ENOUGH);
        bench.watcher.drain().observe(bench.key);
        assert_eq!(bench.unproved(), Some(1));
    });
}

#[test]
fn a_released_transfer_to_a_killed_decode_is_proved_over_too() {
    on("nixl-1.5.1", |release| {
        let mut bench = Bench::set_up(release);
        let handle = bench.in_flight();
        bench.prefill.ask(json!({"do": "release", "handle": handle}));
        bench.watcher.drain();
        assert_eq!(bench.unproved(), Some(1));
        bench.decode.kill();
        bench.until_over();
    });
}

#[test]
fn a_second_post_that_nixl_refuses_leaves_the_first_to_its_flush() {
    on("nixl-1.5.1", |release| {
        let mut bench = Bench::set_up(release);
        let handle = bench.in_flight();
        let again = bench.prefill.try_ask(json!({"do": "post", "handle": handle}));
        assert_eq!(again["raised"], "nixlRepostActiveError");
        bench.watcher.drain();
        assert_eq!(bench.state(handle), Some(TransferState::InFlight));
        bench.decode.go_on();
        bench.until_over();
        assert_eq!(bench.state(handle), Some(TransferState::Ended(TransferEnd::Done)));
    });
}

#[test]
fn a_look_tells_a_transfer_that_is_polled_from_one_that_nobody_polls() {
    on_each("nixl", |release| {
        let mut bench = Bench::set_up(release);
        let (handle, key) = (bench.in_flight(), bench.key);
        let look = |bench: &mut Bench| {
            let look = bench.watcher.kernel.begin_look(key, &surveyed(key), &[ProbeSet::Polls], &ReturnProbes::Allowed);
            let look = look.unwrap();
            thread::sleep(Duration::from_millis(100));
            let seen = bench.watcher.kernel.end_look(look);
            seen.into_iter().filter(|(object, _)| *object == handle).map(|(_, polls)| polls).collect::<Vec<_>>()
        };
        assert_eq!(look(&mut bench), []);
        let polling = bench.prefill.send(json!({"do": "poll", "handle": handle, "within": 30, "on": "worker"}));
        let polls = until("polls", || look(&mut bench).pop());
        println!("{}: {} polls in 100 ms", release.name, polls.count);
        assert!(polls.count > 0 && polls.status as i32 == 1, "{polls:?}");
        bench.decode.go_on();
        assert_eq!(bench.prefill.answer(polling, Duration::from_secs(60)).unwrap()["status"], "DONE");
        assert_eq!(look(&mut bench), [], "it is not polled any more, and what the last look saw is gone");
        bench.watcher.drain();
        assert_eq!(bench.watcher.counters(key).lost(), 0);
    });
}
