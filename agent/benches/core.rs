//! How many events a second one core decodes, applies and diagnoses, and what a tick over many requests costs.
//!
//! `cargo bench --bench core`
#![expect(clippy::expect_used, reason = "a benchmark that cannot go on fails")]

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{Criterion, Throughput, criterion_group};
use dislodge::{
    core::{EVALUATION_BUDGET, Effects, Input, Pace},
    diagnose::{Cause, diagnose},
    event::{ProcessKey, clock::Monotonic, decode::decode},
    record::{
        flight::Flight,
        recorder::{Recorder, Span},
    },
    request::{RequestKey, tracker::Limits},
    rule::{
        RuleSet,
        load::{self, Source},
    },
};
use dislodge_ebpf::wire::{Header, Kind, Mark};
use zerocopy::IntoBytes as _;

const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
const REQUESTS: u64 = 1_000;
/// Requests that live while a tick is timed.
const LIVE: u64 = 100_000;
const LIMITS: Limits = Limits { requests: 1_000_000, transfers: 65_536 };

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
    flight_of(rules, span)
}

fn flight_of(rules: RuleSet, span: Option<Span>) -> Flight {
    let mut flight = Flight::new(rules, LIMITS, "node", span, Monotonic(0));
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

/// Twenty-five rules as people write them: one per cause as in the rules that come with the agent, others that
/// ask about more, and one about warm-ups.
fn rules() -> RuleSet {
    let common = "inflight && backend != 'fake' && !paused";
    let confident = "(confidence == 'high' || inflight_seconds > server_waiting_timeout_seconds + 600.0)";
    let mut text = String::from("rules:\n");
    for (number, cause) in Cause::ALL.into_iter().chain(Cause::ALL).take(24).enumerate() {
        let when = match number {
            number if number < Cause::ALL.len() => {
                format!("cause == '{cause}' && {common} && inflight_seconds > 60.0 && {confident}")
            }
            _ => {
                format!("cause in ['{cause}', 'Unknown'] && {common} && waiting_seconds > 3600.0 && queue_length > 64")
            }
        };
        text += &format!("- {{name: Rule{number}, when: \"{when}\", for: 30s, severity: info}}\n");
    }
    text += "- {name: Warmup, when: \"backend == 'fake' && inflight_seconds > 300.0 && !paused\", severity: info}\n";
    load::load(&[Source { file: "bench.yaml", text: &text }]).expect("the rules load")
}

/// A hundred thousand requests that are being transferred since second 1, under 25 rules.
fn busy() -> Flight {
    let rules = rules();
    assert_eq!(rules.len(), 25);
    let mut core = flight_of(rules, None);
    let mut effects = Effects::default();
    for sender in 1..=LIVE {
        // All but the last four steps: in the queue, being transferred.
        for bytes in &healthy(sender, 1_000_000_000)[..8] {
            core.apply(Input::Event(decode(bytes).expect("it is an event")), &mut effects);
        }
        effects.changes.clear();
    }
    assert!(core.tracker().get(RequestKey { process: PROCESS, serial: LIVE }).is_some());
    core
}

/// The fastest of some ticks, after as many that may tell of alerts, and what they did.
fn tick() {
    for (name, age) in [("young", 1), ("older than every threshold", 7_000)] {
        let mut core = busy();
        let now = |number: u64| Monotonic(1_000_000_000 * (age + 1) + number * 200_000_000);
        let tick = |core: &mut Flight, number| {
            let mut effects = Effects::default();
            core.apply(Input::Tick { now: now(number), pace: Pace::Within(EVALUATION_BUDGET) }, &mut effects);
            effects.verdicts.len()
        };
        let first = Instant::now();
        let mut told = tick(&mut core, 0);
        let first = first.elapsed();
        told += (1..200).map(|number| tick(&mut core, number)).sum::<usize>();
        let (evaluated, overruns) = (core.evaluator().evaluated(), core.evaluator().overruns());
        let took = |number| {
            let began = Instant::now();
            assert_eq!(black_box(tick(&mut core, number)), 0, "nothing new to tell");
            began.elapsed()
        };
        let mut times: Vec<Duration> = (200..240).map(took).collect();
        times.sort_unstable();
        let per_tick = (core.evaluator().evaluated() - evaluated) / times.len() as u64;
        println!(
            "a tick over {LIVE} requests, {name}: {:.1} ms at best, {:.1} in the middle, {:.1} the first; evaluates {per_tick}, \
             told {told}, {} of {} stopped at the budget",
            milliseconds(times[0]),
            milliseconds(times[times.len() / 2]),
            milliseconds(first),
            core.evaluator().overruns() - overruns,
            times.len(),
        );
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
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

criterion_group!(benches, events, snapshot);

fn main() {
    tick();
    benches();
    Criterion::default().configure_from_args().final_summary();
}
