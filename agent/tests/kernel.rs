//! The BPF programs in this machine's kernel, on the marker library that the hook loads.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::collections::HashSet;

use dislodge::{
    event::{
        Backend, Body, ChunkCounts, ChunkStep, Entry, Event, FailureFlag, Hello, LeaveReason, Phase, Rid, Room,
        clock::Monotonic, decode::DecodeError,
    },
    kernel::{Kernel, Sizes, ring::Ring},
    target::marker,
};
use dislodge_ebpf::{loss::ProcessCounters, wire::Kind};
use serde_json::{Value, json};
use support::{environment, marks::Marker, needs, wait::until_true};

type Received = Vec<Result<Event, DecodeError>>;

const RING: u32 = 8 << 20;

/// The programs, attached to a process that makes marks.
struct Bench {
    marker: Marker,
    kernel: Kernel,
    ring: Ring,
}

impl Bench {
    /// Nothing, loudly, where BPF or Python is missing.
    fn set_up(ring_size: u32) -> Option<Self> {
        needs(environment::bpf().and(environment::python()))?;
        let (mut kernel, ring) = Kernel::load(Sizes { ring: ring_size, calls: 1024 }).unwrap();
        let marker = Marker::start();
        attach(&mut kernel, &marker);
        Some(Self { marker, kernel, ring })
    }

    fn tell(&mut self, command: Value) -> &mut Self {
        self.marker.tell(&command);
        self
    }

    fn receive(&mut self) -> Received {
        let mut received = Vec::new();
        self.ring.drain(usize::MAX, |event| received.push(event));
        received
    }

    fn receive_one(&mut self) -> Event {
        let received = self.receive();
        let [Ok(event)] = &received[..] else { panic!("{received:?}") };
        event.clone()
    }

    fn counters(&self) -> ProcessCounters {
        self.kernel.counters(self.marker.key()).unwrap()
    }
}

fn attach(kernel: &mut Kernel, marker: &Marker) {
    let key = marker.key();
    kernel.attach(key, &marker::find(key.pid).unwrap()).unwrap();
}

fn room(number: u64) -> Room {
    Room::Number(number)
}

const ENTRY: &str = r#"{"backend":1,"phase":2,"phase_since":11,"created":12,"entered":13,"sent_chunks":14,"sent_pages":15,
"sent_last":true,"aborted":16,"dropped":17,"shared_with":18,"cleared_by":19,"chunks":30064902147,"rid":"r","rid_truncated":false}"#;

/// Each kind: what the hook says, and what the agent has to understand.
fn every_kind() -> Vec<(Kind, Value, Body)> {
    let far = u64::MAX;
    let mark = |kind: Kind, room: u64, value: u64, sender: u64| json!(["mark", kind as u16, room, value, sender]);
    let detail = |kind: Kind, room: u64, value: u64, sender: u64, text: &str| {
        json!(["detail", kind as u16, room, value, sender, text])
    };
    let hello = Hello { hook: Some("0.1.0".into()), epoch: 5, tp: Some(1), ..Hello::default() };
    let at = |time| Some(Monotonic(time));
    let entry = Entry {
        backend: Backend::Nixl,
        phase: Some(Phase::WaitingForInput),
        phase_since: at(11),
        created: at(12),
        entered: at(13),
        sent_chunks: 14,
        sent_pages: 15,
        sent_last: true,
        aborted: at(16),
        dropped: at(17),
        shared_with: Some(18),
        cleared_by: Some(19),
        chunks: ChunkCounts { queued: 3, working: 2, abandoned: true, attached_late: true, no_queues: true },
        rid: Some(Rid { text: "r".into(), truncated: false }),
    };
    let chunks = ChunkCounts { queued: 0xffff, working: 1, ..ChunkCounts::default() };
    let update = Body::Update { room: room(7), requested: Some(Phase::Failed), before: None, after: None };
    let chunk = |step| Body::Chunk { room: room(7), step, counts: chunks, queue: Some(3) };
    vec![
        (Kind::Hello, detail(Kind::Hello, 0, 5, 0, r#"{"hook":"0.1.0","epoch":5,"tp":1}"#), Body::Hello(hello.into())),
        (Kind::StateBegin, mark(Kind::StateBegin, 0, far, 0), Body::StateBegin { epoch: far }),
        (
            Kind::Entry,
            detail(Kind::Entry, far, 5, 9, ENTRY),
            Body::Entry { room: room(far), sender: 9, epoch: 5, entry: entry.into() },
        ),
        (
            Kind::StateEnd,
            detail(Kind::StateEnd, 0, 5, 0, r#"{"entries":64}"#),
            Body::StateEnd { epoch: 5, entries: 64 },
        ),
        (
            Kind::Open,
            mark(Kind::Open, far, 2, far),
            Body::Open { room: room(far), sender: far, backend: Backend::Fake },
        ),
        (Kind::Close, mark(Kind::Close, 7, 0, 9), Body::Close { room: room(7), sender: 9 }),
        (
            Kind::Phase,
            mark(Kind::Phase, 7, 0x3ff, 9),
            Body::Phase { room: room(7), sender: 9, old: None, new: Some(Phase::Transferring) },
        ),
        (Kind::Abort, mark(Kind::Abort, 7, 1, 9), Body::Abort { room: room(7), sender: 9, room_present: true }),
        (Kind::Update, mark(Kind::Update, 7, 0xff_ff00, 0), update),
        (
            Kind::Send,
            mark(Kind::Send, 7, 1 << 32 | 0xffff_ffff, 9),
            Body::Send { room: room(7), sender: 9, pages: u32::MAX, last: true },
        ),
        (Kind::Clear, mark(Kind::Clear, 7, 1, 9), Body::Clear { room: room(7), sender: 9, removed: true }),
        (Kind::Failure, mark(Kind::Failure, 7, 0, 9), Body::Failure { room: room(7), sender: 9 }),
        (
            Kind::Enter,
            detail(Kind::Enter, 7, 3, 9, "réq"),
            Body::Enter {
                room: room(7),
                sender: 9,
                rid: Some(Rid { text: "réq".into(), truncated: false }),
                queue_length: 3,
            },
        ),
        (
            Kind::Leave,
            mark(Kind::Leave, 7, 2, 9),
            Body::Leave { room: room(7), sender: 9, reason: LeaveReason::Failed },
        ),
        (Kind::PeerAbort, mark(Kind::PeerAbort, 7, 0, 0), Body::PeerAbort { room: room(7), room_present: false }),
        (Kind::ChunkQueued, mark(Kind::ChunkQueued, 7, 0x1_ffff, 3), chunk(ChunkStep::Queued)),
        (Kind::WorkBegin, mark(Kind::WorkBegin, 7, 0x1_ffff, 3), chunk(ChunkStep::Begun)),
        (Kind::WorkEnd, mark(Kind::WorkEnd, 7, 0x1_ffff, 3), chunk(ChunkStep::Ended)),
        (Kind::Pass, mark(Kind::Pass, 0, 5 << 32 | 64, 0), Body::Pass { queue_length: 64, passes: 5 }),
        (Kind::Paused, mark(Kind::Paused, 0, 0, 0), Body::Paused),
        (Kind::Resumed, mark(Kind::Resumed, 0, 0, 0), Body::Resumed),
        (
            Kind::Remedy,
            mark(Kind::Remedy, 7, 3, 9),
            Body::Remedy { room: room(7), sender: 9, flag: Some(FailureFlag::MarkingPoll) },
        ),
    ]
}

#[test]
fn the_kernel_loads_every_program() {
    let Some(bench) = Bench::set_up(RING) else { return };
    assert!(bench.kernel.not_loaded().is_empty(), "{:?}", bench.kernel.not_loaded());
}

#[test]
fn the_hook_cannot_speak_for_the_transfer_engine() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    // A server that claims that its transfers are over, by the number of that kind.
    for kind in Kind::ALL.iter().filter(|kind| kind.is_native()) {
        let received = bench.tell(json!(["mark", *kind as u16, 7, 0, 9])).receive();
        assert!(matches!(received[..], [Err(DecodeError::UnknownKind)]), "{kind:?}: {received:?}");
    }
}

#[test]
fn every_kind_arrives_as_it_was_marked() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    let kinds = every_kind();
    for kind in Kind::marks() {
        assert!(kinds.iter().any(|(tested, ..)| tested == kind), "{kind:?} is not tested");
    }
    let pid = bench.marker.key().pid;
    for ((kind, command, body), sequence) in kinds.into_iter().zip(1..) {
        let before = Monotonic::now();
        let event = bench.tell(command).receive_one();
        assert_eq!(event.body, body, "{kind:?}");
        assert_eq!((event.pid, event.tid, event.sequence, event.detail_lost), (pid, pid, sequence, false), "{kind:?}");
        assert!(before < event.at && event.at < Monotonic::now(), "{kind:?} has another clock");
    }
}

#[test]
fn a_room_that_is_no_number_is_flagged_and_not_masked() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    for no_number in [json!(-1), json!("seven"), json!(null), json!(1.5)] {
        let event = bench.tell(json!(["mark", Kind::Close as u16, no_number, 0, 9])).receive_one();
        assert_eq!(event.body, Body::Close { room: Room::OutOfRange, sender: 9 }, "{no_number}");
    }
    let mut mark = |room: &str| {
        bench.marker.tell(&format!(r#"["mark", {}, {room}, 0, 9]"#, Kind::Close as u16));
        bench.receive_one().body
    };
    assert_eq!(mark("18446744073709551616"), Body::Close { room: Room::OutOfRange, sender: 9 }, "2⁶⁴");
    assert_eq!(mark("18446744073709551615"), Body::Close { room: room(u64::MAX), sender: 9 }, "2⁶⁴ − 1");
}

#[test]
fn a_detail_arrives_whole_up_to_its_limit_and_beyond_it_cut_flagged_and_counted() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    for (length, arrives, cut) in [(0, 0, 0), (1, 1, 0), (455, 455, 0), (456, 456, 0), (457, 456, 1), (5000, 456, 2)] {
        let event = bench.tell(json!(["detail", Kind::Enter as u16, 7, 1, 9, "x".repeat(length)])).receive_one();
        let Body::Enter { rid, .. } = event.body else { panic!("{event:?}") };
        let lost = length > arrives;
        let expected = (arrives > 0).then(|| Rid { text: "x".repeat(arrives), truncated: lost });
        assert_eq!((rid, event.detail_lost), (expected, lost), "{length} bytes");
        assert_eq!(bench.counters().detail_truncated, cut, "{length} bytes");
    }
    let Err(error) = &bench.tell(json!(["detail", Kind::Hello as u16, 0, 0, 0, "x".repeat(457)])).receive()[0] else {
        panic!("JSON that was cut must not be understood")
    };
    assert_eq!(*error, DecodeError::BadDetail);
    assert_eq!(bench.counters().lost(), 0);
}

#[test]
fn a_detail_that_cannot_be_read_is_counted_and_its_event_arrives_without() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    let enter = Kind::Enter as u16;
    let unreadable =
        [json!(["raw", enter, 7, 1, 9, 8]), json!(["raw", enter, 7, 1, 9, u64::MAX]), json!(["torn", enter, 7, 1, 9])];
    for (command, faults) in unreadable.into_iter().zip(1..) {
        let event = bench.tell(command.clone()).receive_one();
        assert_eq!(event.body, Body::Enter { room: room(7), sender: 9, rid: None, queue_length: 1 }, "{command}");
        assert!(event.detail_lost, "{command}");
        assert_eq!(bench.counters().detail_fault, faults, "{command}");
    }
    assert_eq!(bench.counters().lost(), 0);
}

#[test]
fn an_unknown_kind_passes_bpf_and_is_an_error_of_decoding() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    for kind in [0, 5, 28, 0xffff_u64] {
        let received = bench.tell(json!(["mark", kind, 7, 0, 9])).receive();
        assert!(matches!(received[..], [Err(DecodeError::UnknownKind)]), "{kind}: {received:?}");
    }
    bench.tell(json!(["detail", 28, 7, 0, 9, "x"])).tell(json!(["mark", Kind::Leave as u16, 7, 4, 9]));
    let received = bench.receive();
    assert!(matches!(received[..], [Err(DecodeError::UnknownKind), Err(DecodeError::BadValue)]), "{received:?}");
    assert_eq!((bench.counters().seen, bench.counters().delivered()), (6, 6));
}

#[test]
fn of_two_processes_that_map_the_marker_only_the_attached_one_is_seen() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    let mut other = Marker::start();
    other.tell(&json!(["many", 100]));
    assert!(bench.receive().is_empty() && bench.counters().seen == 0, "it sees a process that it is not attached to");
    assert_eq!(bench.kernel.counters(other.key()), None);

    // The twin: attached, the same process is seen.
    attach(&mut bench.kernel, &other);
    other.tell(&json!(["many", 3]));
    bench.tell(json!(["many", 2]));
    let pids: Vec<u32> = bench.receive().into_iter().map(|event| event.unwrap().pid).collect();
    let (one, two) = (bench.marker.key().pid, other.key().pid);
    assert_eq!(pids, [two, two, two, one, one]);
    assert_eq!((bench.counters().seen, bench.kernel.counters(other.key()).unwrap().seen), (2, 3));
}

#[test]
fn what_a_full_ring_does_not_take_is_counted_and_delivery_goes_on_once_it_is_read() {
    let Some(mut bench) = Bench::set_up(64 << 10) else { return };
    bench.tell(json!(["many", 5_000]));
    let full = bench.counters();
    assert_eq!(full.seen, 5_000);
    assert!(full.ring_full > 0 && full.delivered() > 0, "{full:?}");
    assert_eq!(bench.receive().len() as u64, full.delivered());

    let event = bench.tell(json!(["many", 1])).receive_one();
    assert_eq!(event.sequence, 5_001, "the gap in the numbers is what was lost");
    assert_eq!(bench.counters().ring_full, full.ring_full);
}

#[test]
fn marks_of_threads_side_by_side_are_numbered_once_each_and_none_is_lost() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    bench.tell(json!(["threads", 8, 5_000]));
    let events: Vec<Event> = bench.receive().into_iter().map(Result::unwrap).collect();
    let sequences: HashSet<u64> = events.iter().map(|event| event.sequence).collect();
    assert_eq!((events.len(), sequences.len(), sequences.iter().max()), (40_000, 40_000, Some(&40_000)));
    let threads: HashSet<u32> = events.iter().map(|event| event.tid).collect();
    assert_eq!(threads.len(), 8);
    let counters = bench.counters();
    assert_eq!((counters.delivered(), counters.lost()), (40_000, 0), "{counters:?}");
}

#[test]
fn detached_a_process_is_seen_no_more_and_attached_again_it_is() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    bench.tell(json!(["many", 1])).receive_one();
    let key = bench.marker.key();
    bench.kernel.detach(key);
    bench.tell(json!(["many", 10]));
    assert!(bench.receive().is_empty());
    assert_eq!((bench.kernel.counters(key), bench.kernel.attached().count()), (None, 0));

    attach(&mut bench.kernel, &bench.marker);
    assert_eq!(bench.tell(json!(["many", 1])).receive_one().sequence, 1);
}

#[test]
fn a_process_that_is_killed_takes_nobody_with_it() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    let key = bench.marker.key();
    bench.tell(json!(["many", 10]));
    bench.marker.kill();
    until_true("the process's end", || dislodge::target::discover::process_key(key.pid) != Some(key));
    assert_eq!(bench.receive().len(), 10, "what it said before stays");
    bench.kernel.detach(key);

    let mut next = Marker::start();
    attach(&mut bench.kernel, &next);
    next.tell(&json!(["many", 2]));
    assert_eq!(bench.receive().len(), 2);
}

#[test]
fn a_forked_child_is_not_seen() {
    let Some(mut bench) = Bench::set_up(RING) else { return };
    assert_eq!(bench.marker.tell(&json!(["fork", 100])), 0);
    assert!(bench.receive().is_empty() && bench.counters().seen == 0);
    bench.tell(json!(["many", 1])).receive_one();
}
