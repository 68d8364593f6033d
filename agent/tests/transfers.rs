//! Transfers of released NIXL and Mooncake wheels, as the probes on them and the tracker see them: two peer programs
//! that transfer over this host's loopback.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use dislodge::{
    event::{
        ProcessKey, Room,
        native::{Engine, Handle, NativeEvent, Notification, Operation, Size, TransferStatus},
    },
    request::{
        Watch,
        correlate::{Joined, NotJoined, TransferSubject},
        transfer::{TransferEnd, TransferState},
    },
};
use dislodge_ebpf::wire::MAX_DETAIL;
use serde_json::{Value, json};
use support::{
    native::{BIG, Peer, Release, SMALL, on, on_each, pair},
    transfers::{Watcher, make, number},
};

/// Two peers, both watched.
struct Bench {
    watcher: Watcher,
    prefill: Peer,
    decode: Peer,
    sender: ProcessKey,
    receiver: ProcessKey,
}

impl Bench {
    fn set_up(release: &Release) -> Self {
        let (prefill, decode) = pair(release, SMALL);
        let (sender, receiver) = (prefill.key(), decode.key());
        let mut watcher = Watcher::new();
        watcher.attach(sender);
        watcher.attach(receiver);
        Self { watcher, prefill, decode, sender, receiver }
    }

    /// Posts and waits for the end by polling.
    fn transfer(&mut self, handle: u64) {
        self.prefill.ask(json!({"do": "post", "handle": handle}));
        let polled = self.prefill.ask(json!({"do": "poll", "handle": handle, "within": 30}));
        assert_eq!(polled["status"], "DONE");
    }

    fn state(&self, handle: u64) -> TransferState {
        self.watcher.transfer(self.sender, handle).unwrap().state
    }
}

fn nixl(number: u64) -> Handle {
    Handle { engine: Engine::Nixl, number }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How many events of each sort a transfer has: made, posting, ended by its flush or its release.
fn made_posted_released(events: &[NativeEvent], of: Handle) -> [usize; 3] {
    let count = |is: &dyn Fn(&NativeEvent) -> bool| events.iter().filter(|event| is(event)).count();
    [
        count(&|event| matches!(event, NativeEvent::Made { handle, .. } if *handle == of)),
        count(&|event| matches!(event, NativeEvent::Posting { handle, .. } if *handle == of)),
        count(&|event| matches!(event, NativeEvent::Releasing { handle, .. } if *handle == of)),
    ]
}

#[test]
fn each_transfer_of_nixl_is_seen_once_from_its_making_to_its_end() {
    on_each("nixl", |release| {
        let mut bench = Bench::set_up(release);
        let (sender, receiver) = (bench.sender, bench.receiver);
        for (room, form, operation) in
            [(71, "create", "WRITE"), (72, "prepped", "WRITE"), (73, "create", "READ"), (74, "prepped", "READ")]
        {
            let pages = [3, 1, 4, 15, 9];
            let command = json!({"room": room, "pages": pages, "form": form, "operation": operation});
            let handle = make(&mut bench.prefill, command);
            bench.watcher.drain();
            let transfer = bench.watcher.transfer(sender, handle).unwrap();
            assert_eq!(transfer.state, TransferState::Made);
            let subject = TransferSubject::Room(Room::Number(room));
            assert_eq!(transfer.joined, Joined::ByNotification(subject), "{form}");
            let expected = if operation == "READ" { Operation::Read } else { Operation::Write };
            assert_eq!((transfer.operation, transfer.parts), (Some(expected), 5), "{form}");
            let size = (form == "create").then_some(Size { bytes: 5 * SMALL.0, estimated: false });
            assert_eq!(transfer.size, size, "{form}: indices have no size");

            bench.transfer(handle);
            // The flush, where it is seen, is the end; else the release is, with the status that a poll left.
            if release.is_since([0, 5, 1]) {
                bench.watcher.drain();
                assert_eq!(bench.state(handle), TransferState::Ended(TransferEnd::Done), "{form}");
            }
            bench.prefill.ask(json!({"do": "release", "handle": handle}));
            let events = bench.watcher.take(sender);
            assert_eq!(made_posted_released(&events, nixl(handle)), [1, 1, 1], "{events:#?}");
            assert!(
                events.contains(&NativeEvent::Releasing { handle: nixl(handle), status: Some(TransferStatus::Done) })
            );
            assert!(bench.watcher.transfer(sender, handle).is_none() && bench.watcher.room(sender, room).is_none());
        }
        assert_eq!(bench.watcher.ended(sender, Engine::Nixl, "done"), 4);
        assert_eq!(bench.watcher.transfers(sender).counted().ended.len(), 1);
        assert_eq!(bench.watcher.transfers(receiver).counted().ended.len(), 0, "decode only looks");
        bench.watcher.assert_nothing_lost(sender);
        bench.watcher.assert_nothing_lost(receiver);
    });
}

#[test]
fn a_notification_is_seen_byte_for_byte_where_it_is_given_sent_and_arrives() {
    on_each("nixl", |release| {
        let mut bench = Bench::set_up(release);
        let every_byte: Vec<u8> = (0..=255).chain((0..=255).rev()).take(300).collect();
        for (form, bytes) in [
            ("create", b"1234567890_kv_0_1_0".to_vec()),
            ("prepped", every_byte),
            ("create", vec![0; 40]),
            ("prepped", vec![0xff]),
        ] {
            let command = json!({"pages": [0], "form": form, "notification_hex": hex(&bytes)});
            let handle = make(&mut bench.prefill, command);
            bench.transfer(handle);
            bench.prefill.ask(json!({"do": "release", "handle": handle}));
            let arrived = bench.watcher.take_until("the notification", bench.receiver, is_arrived);
            let given = bench.watcher.take(bench.sender);
            let whole = Notification { bytes: bytes.clone(), cut: false };
            assert_eq!(of_made(&given), [Some(&whole)], "{form}");
            assert_eq!(sent(&given), [&whole], "{form}");
            let peer = bench.prefill.ready["agent"].as_str().unwrap().to_owned();
            assert_eq!(all_arrived(&arrived), [(Some(peer), whole)], "{form}");
            let told = bench.decode.ask(json!({"do": "notifications", "within": 30}));
            assert_eq!(told["notifications"], json!([hex(&bytes)]));
        }
        for key in [bench.sender, bench.receiver] {
            let counters = bench.watcher.counters(key);
            assert_eq!((counters.detail_truncated, counters.detail_fault), (0, 0));
            bench.watcher.assert_nothing_lost(key);
        }
        assert_eq!(bench.watcher.transfers(bench.receiver).counted().notifications_arrived, 4);
        assert_eq!(bench.watcher.transfers(bench.sender).counted().notifications_sent, 4);
    });
}

#[test]
fn no_notification_is_none_and_one_without_a_transfer_is_seen() {
    on_each("nixl", |release| {
        let mut bench = Bench::set_up(release);
        for form in ["create", "prepped"] {
            let handle = make(&mut bench.prefill, json!({"pages": [0], "form": form, "notification": ""}));
            bench.transfer(handle);
            bench.watcher.drain();
            let joined = &bench.watcher.transfer(bench.sender, handle).unwrap().joined;
            assert_eq!(joined, &Joined::Not(NotJoined::NoNotification));
            bench.prefill.ask(json!({"do": "release", "handle": handle}));
            let given = bench.watcher.take(bench.sender);
            assert_eq!((of_made(&given), sent(&given).len()), (vec![None], 0), "{form}");
        }
        bench.prefill.ask(json!({"do": "send_notification", "notification": "HB:a,b"}));
        let arrived = bench.watcher.take_until("the notification", bench.receiver, is_arrived);
        let whole = Notification { bytes: b"HB:a,b".to_vec(), cut: false };
        let [(_, message)] = &all_arrived(&arrived)[..] else { panic!("{arrived:#?}") };
        assert_eq!(message, &whole);
        assert_eq!(sent(&bench.watcher.take(bench.sender)), [&whole]);
        bench.watcher.assert_nothing_lost(bench.sender);
    });
}

#[test]
fn a_notification_of_a_mebibyte_is_cut_said_to_be_and_counted() {
    on_each("nixl", |release| {
        let mut bench = Bench::set_up(release);
        let mut command = json!({"do": "make", "pages": [0], "notification_size": 1 << 20});
        for form in ["create", "prepped"] {
            command["form"] = form.into();
            let made = bench.prefill.ask(command.clone());
            let whole = made["notification_hex"].as_str().unwrap();
            bench.transfer(number(&made, "handle"));
            let arrived = bench.watcher.take_until("the notification", bench.receiver, is_arrived);
            let given = bench.watcher.take(bench.sender);
            let begins = |part: &Notification, least: usize| {
                assert!(part.cut && part.bytes.len() >= least && part.bytes.len() <= MAX_DETAIL, "{part:?}");
                assert!(whole.starts_with(&hex(&part.bytes)), "{form}");
            };
            let [Some(made)] = of_made(&given)[..] else { panic!("{given:#?}") };
            begins(made, MAX_DETAIL);
            // What arrives, and in 1.5 what is sent, has the sender's name before it.
            let [message] = sent(&given)[..] else { panic!("{given:#?}") };
            begins(message, MAX_DETAIL - 128);
            let [(_, message)] = &all_arrived(&arrived)[..] else { panic!("{arrived:#?}") };
            begins(message, MAX_DETAIL - 128);
            assert_eq!(bench.decode.ask(json!({"do": "notifications", "within": 30}))["notifications"], json!([whole]));
        }
        let counted = |key| bench.watcher.counters(key).detail_truncated;
        assert_eq!((counted(bench.sender), counted(bench.receiver)), (4, 2));
        bench.watcher.assert_nothing_lost(bench.sender);
        bench.watcher.assert_nothing_lost(bench.receiver);
    });
}

fn is_arrived(event: &NativeEvent) -> bool {
    matches!(event, NativeEvent::NotificationArrived { .. })
}

fn of_made(events: &[NativeEvent]) -> Vec<Option<&Notification>> {
    let made = events.iter().filter_map(|event| match event {
        NativeEvent::Made { notification, .. } => Some(notification.as_ref()),
        _ => None,
    });
    made.collect()
}

fn sent(events: &[NativeEvent]) -> Vec<&Notification> {
    let sent = events.iter().filter_map(|event| match event {
        NativeEvent::NotificationSent { notification } => Some(notification),
        _ => None,
    });
    sent.collect()
}

fn all_arrived(events: &[NativeEvent]) -> Vec<(Option<String>, Notification)> {
    let of = |event: &NativeEvent| match event {
        NativeEvent::NotificationArrived { peer, notification } => {
            Some((peer.as_ref().map(|peer| peer.0.clone()), notification.clone()))
        }
        _ => None,
    };
    events.iter().filter_map(of).collect()
}

#[test]
fn a_transfer_that_is_posted_again_is_seen_each_time() {
    on_each("nixl", |release| {
        let mut bench = Bench::set_up(release);
        let handle = make(&mut bench.prefill, json!({"room": 5, "pages": [0, 1]}));
        for _ in 0..3 {
            bench.transfer(handle);
        }
        bench.prefill.ask(json!({"do": "release", "handle": handle}));
        let events = bench.watcher.take(bench.sender);
        assert_eq!(made_posted_released(&events, nixl(handle)), [1, 3, 1]);
        let done = if release.is_since([0, 5, 1]) { 3 } else { 1 };
        assert_eq!(bench.watcher.ended(bench.sender, Engine::Nixl, "done"), done);
    });
}

#[test]
fn many_transfers_on_reused_handles_are_each_seen() {
    on_each("nixl", |release| {
        let mut bench = Bench::set_up(release);
        bench.prefill.ask(json!({"do": "bench", "what": "transfers", "count": 50, "pages": [0, 1, 2]}));
        bench.watcher.drain();
        assert_eq!(bench.watcher.ended(bench.sender, Engine::Nixl, "done"), 50);
        // The last one that was made was not posted.
        assert_eq!(bench.watcher.ended(bench.sender, Engine::Nixl, "never_posted"), 1);
        assert_eq!(bench.watcher.transfers(bench.sender).live().count(), 0);
        bench.watcher.assert_nothing_lost(bench.sender);
    });
}

#[test]
fn a_transfer_in_ranges_of_nixls_threads_is_over_with_the_last_of_them() {
    on("nixl-1.5.1", |release| {
        let release = release.clone().with_arguments(&["--threads", "8"]);
        let (mut prefill, _decode) = pair(&release, (64, 4096));
        let (mut watcher, key) = (Watcher::new(), prefill.key());
        watcher.attach(key);
        let pages: Vec<u64> = (0..3000).collect();
        let handle = make(&mut prefill, json!({"room": 9, "pages": pages}));
        prefill.ask(json!({"do": "post", "handle": handle}));
        // The workers of the pool are progressed by polls only.
        let polled = prefill.ask(json!({"do": "poll", "handle": handle, "within": 30}));
        assert_eq!(polled["status"], "DONE");
        let events = watcher.take(key);
        let ranges: Vec<u64> = events
            .iter()
            .filter_map(|event| match event {
                NativeEvent::RangePosted { descriptors, .. } => Some(*descriptors),
                _ => None,
            })
            .collect();
        assert_eq!((ranges.len(), ranges.iter().sum::<u64>()), (3, 3000), "{ranges:?}");
        assert_eq!(watcher.transfer(key, handle).unwrap().state, TransferState::Ended(TransferEnd::Done));
        watcher.assert_nothing_lost(key);
    });
}

#[test]
fn each_batch_of_mooncake_is_seen_once_and_done_when_it_is_freed() {
    on_each("mooncake", |release| {
        let mut bench = Bench::set_up(release);
        let key = bench.sender;
        let Watch::Since { engine, .. } = bench.watcher.tracker.server(key).unwrap().native.watch else {
            panic!("not watched")
        };
        assert_eq!(engine, Engine::Mooncake);
        let all: Vec<u64> = (0..8).collect();
        for (command, parts) in [
            (json!({"do": "transfer", "pages": all}), 8),
            (json!({"do": "transfer", "pages": [9], "kind": "single"}), 1),
            (json!({"do": "transfer", "pages": [10, 11], "on": "worker"}), 2),
        ] {
            let answer = bench.prefill.ask(command);
            assert_eq!(answer["code"], 0);
            let (batch, events) = one_batch(bench.watcher.take(key));
            let releasing = NativeEvent::Releasing { handle: batch, status: Some(TransferStatus::Done) };
            assert_eq!(events.last(), Some(&releasing), "{events:#?}");
            assert!(matches!(&events[0], NativeEvent::Made { parts: made, .. } if *made == parts), "{events:#?}");
            let NativeEvent::Posting { operation, first_length, .. } = &events[1] else { panic!("{events:#?}") };
            assert_eq!((*operation, *first_length), (Some(Operation::Write), Some(SMALL.0)));
        }
        let batch = number(&bench.prefill.ask(json!({"do": "submit", "page": 12})), "batch");
        bench.watcher.drain();
        assert_eq!(bench.state(batch), TransferState::InFlight, "nobody asked for its end yet");
        assert_eq!(bench.prefill.ask(json!({"do": "poll", "batch": batch, "within": 30}))["code"], 1);
        bench.watcher.drain();
        assert!(bench.watcher.transfer(key, batch).is_none());
        let counted = bench.watcher.transfers(key).counted();
        assert_eq!(counted.ended.get(&(Engine::Mooncake, "done")), Some(&(4, 12 * SMALL.0)));
        assert_eq!((counted.ended.len(), counted.not_joined[&NotJoined::NoNotification]), (1, 4));
        assert!(bench.watcher.transfers(key).not_joined().is_over());
        bench.watcher.assert_nothing_lost(key);
    });
}

/// The batch that all of the events are about.
fn one_batch(events: Vec<NativeEvent>) -> (Handle, Vec<NativeEvent>) {
    let NativeEvent::Made { handle, .. } = events[0] else { panic!("{events:#?}") };
    let [made, posted, released] = made_posted_released(&events, handle);
    assert_eq!((made, posted, released, events.len()), (1, 1, 1, 3), "{events:#?}");
    (handle, events)
}

#[test]
fn a_process_that_maps_the_same_libraries_and_is_not_attached_to_is_not_seen() {
    let not_seen = |release: &Release, transfer: &dyn Fn(&mut Peer)| {
        let (mut attached, _decode) = pair(release, BIG);
        let (mut other, _other_decode) = pair(release, BIG);
        let (mut watcher, key) = (Watcher::new(), attached.key());
        watcher.attach(key);
        transfer(&mut other);
        assert_eq!((watcher.drain().counters(key).seen, watcher.events.len()), (0, 0));
        assert_eq!(watcher.kernel.counters(other.key()), None);
        // The twin: the same of the attached one is seen.
        transfer(&mut attached);
        assert!(watcher.drain().counters(key).seen > 0);
        assert_eq!(watcher.events.keys().collect::<Vec<_>>(), [&key.pid]);
    };
    on("nixl-1.5.1", |release| {
        not_seen(release, &|peer| {
            let handle = make(peer, json!({"room": 1, "pages": [0]}));
            peer.ask(json!({"do": "post", "handle": handle}));
            peer.ask(json!({"do": "poll", "handle": handle, "within": 30}));
        });
    });
    on("mooncake-0.3.13.post1", |release| {
        not_seen(release, &|peer| {
            let answer: Value = peer.ask(json!({"do": "transfer", "pages": [0]}));
            assert_eq!(answer["code"], 0);
        });
    });
}
