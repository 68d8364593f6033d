//! How many events a second one core decodes, applies and diagnoses, and what a tick over many requests costs.
//!
//! `cargo bench --bench core`
#![expect(clippy::expect_used, reason = "a benchmark that cannot go on fails")]

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dislodge::{
    core::{EVALUATION_BUDGET, Effects, Input, Pace},
    diagnose::diagnose,
    event::{ProcessKey, clock::Monotonic, decode::decode},
    record::{
        flight::Flight,
        recorder::{Recorder, Span},
    },
    request::{RequestKey, tracker::Limits},
    rule::load,
};
use dislodge_ebpf::wire::{Header, Kind, Mark};
use zerocopy::IntoBytes as _;

const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
const REQUESTS: u64 = 1_000;

fn bytes(kind: Kind, at: u64, room: u64, value: u64, sender: u64, detail: &[u8]) -> Vec<u8> {
    let header = Header {
        kind: kind as u16,
        flags: 0,
        tgid: PROCESS.pid,
        tid: PROCESS.pid,
        detail_length: detail.len() as u32,
        time_ns: at,
        sequence: at,
    };
    [header.as_bytes(), Mark { room, value, sender }.as_bytes(), detail].concat()
}

/// The marks of one healthy request, as the hook makes them.
fn healthy(sender: u64, at: u64) -> Vec<Vec<u8>> {
    let room = 1_000_000 + sender;
    let mark = |kind, value| bytes(kind, at, room, value, sender, b"");
    vec![
        mark(Kind::Open, 1),
        mark(Kind::Phase, 0x01ff),
        mark(Kind::Phase, 0x0201),
        mark(Kind::Send, 8 | 1 << 32),
        mark(Kind::ChunkQueued, 1),
        bytes(Kind::Enter, at, room, 1, sender, b"0123456789abcdef0123456789abcdef"),
        mark(Kind::WorkBegin, 1 << 16),
        mark(Kind::Phase, 0x0302),
        mark(Kind::WorkEnd, 0),
        mark(Kind::Phase, 0x0403),
        mark(Kind::Clear, 1),
        mark(Kind::Leave, 1),
        mark(Kind::Close, 0),
    ]
}

fn flight(span: Option<Span>) -> Flight {
    let rules = load::defaults().expect("the default rules load");
    let limits = Limits { requests: 1_000_000, transfers: 65_536 };
    let mut flight = Flight::new(rules, limits, "node", span, Monotonic(0));
    let attach = Input::Attach { process: PROCESS, identity: Box::default(), clock_offset: 0 };
    flight.apply(attach, &mut Effects::default());
    flight
}

fn events(criterion: &mut Criterion) {
    // Many requests at once, so that the tables are as large as on a busy server.
    let stories: Vec<_> = (1..=REQUESTS).map(|sender| healthy(sender, sender * 1_000)).collect();
    let steps = stories[0].len();
    let stream: Vec<&[u8]> =
        (0..steps).flat_map(|step| stories.iter().map(move |story| story[step].as_slice())).collect();
    let mut group = criterion.benchmark_group("events");
    group.throughput(Throughput::Elements(stream.len() as u64)).measurement_time(Duration::from_secs(5));
    for (name, span) in [("", None), (", record", Some(Span { time: Duration::from_secs(300), bytes: 64 << 20 }))] {
        group.bench_function(format!("decode, apply, diagnose{name}"), |bencher| {
            let mut core = flight(span);
            let mut effects = Effects::default();
            let mut now = 0;
            bencher.iter(|| {
                for bytes in &stream {
                    let event = decode(bytes).expect("it is an event");
                    let at = event.at;
                    core.apply(Input::Event(event), &mut effects);
                    for change in effects.changes.drain(..) {
                        if change.ended.is_none()
                            && let Some(tracked) = core.tracker().get(change.key)
                        {
                            black_box(diagnose(&tracked, at));
                        }
                    }
                }
                // Nothing is left to evaluate; blocks end with a tick.
                now += 20_000_000;
                core.apply(Input::Tick { now: Monotonic(now), pace: Pace::As(None) }, &mut effects);
            });
        });
    }
    group.finish();
}

fn tick(criterion: &mut Criterion) {
    let mut core = flight(None);
    let mut effects = Effects::default();
    for sender in 1..=100_000 {
        // All but the last four steps: in the queue, being transferred.
        for bytes in &healthy(sender, 1_000_000_000)[..8] {
            core.apply(Input::Event(decode(bytes).expect("it is an event")), &mut effects);
        }
        effects.changes.clear();
    }
    assert!(core.tracker().get(RequestKey { process: PROCESS, serial: 1 }).is_some());
    let mut group = criterion.benchmark_group("tick");
    group.sample_size(10);
    for (name, age) in [("young", 1), ("older than every threshold", 4_000)] {
        let now = Monotonic(1_000_000_000 * (age + 1));
        group.bench_function(format!("100,000 {name} requests"), |bencher| {
            bencher.iter(|| {
                let mut effects = Effects::default();
                core.apply(Input::Tick { now, pace: Pace::Within(EVALUATION_BUDGET) }, &mut effects);
                black_box(effects)
            });
        });
    }
    group.finish();
}

/// What a block's beginning costs.
fn snapshot(criterion: &mut Criterion) {
    let mut effects = Effects::default();
    let mut group = criterion.benchmark_group("snapshot");
    group.sample_size(10);
    for requests in [1_000, 100_000] {
        let mut core = flight(None);
        for sender in 1..=requests {
            for bytes in &healthy(sender, 1_000_000_000)[..8] {
                core.apply(Input::Event(decode(bytes).expect("it is an event")), &mut effects);
            }
            effects.changes.clear();
        }
        group.bench_function(format!("{requests} requests"), |bencher| {
            bencher.iter(|| {
                let mut recorder = Recorder::new(Span { time: Duration::from_secs(300), bytes: 1 << 30 });
                recorder.turn(&core, Monotonic(2_000_000_000));
                black_box(recorder.bytes())
            });
        });
        let mut recorder = Recorder::new(Span { time: Duration::from_secs(300), bytes: 1 << 30 });
        recorder.turn(&core, Monotonic(2_000_000_000));
        println!("a snapshot of {requests} requests has {} bytes", recorder.bytes());
    }
    group.finish();
}

criterion_group!(benches, events, tick, snapshot);
criterion_main!(benches);
