//! A tick leaves out what can't meet a rule; a twin that evaluates everything by CEL alone must tell the same alerts.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    time::{Duration, Instant},
};

use dislodge::{
    core::{Core, Effects, Input, Pace},
    diagnose::diagnose,
    event::{
        Backend, Body, ChunkCounts, ChunkStep, Event, LeaveReason, Phase, ProcessKey, Rid, Room,
        clock::Monotonic,
        native::{Engine, Handle, NativeEvent, Notification, TransferStatus},
    },
    request::{
        RequestKey, ResyncReason,
        tracker::{Limits, Tracker},
    },
    rule::{
        RuleIndex, RuleSet,
        alert::{AlertState, Transition},
        condition::{Scope, root},
        evaluate::Evaluator,
        field::Subject,
        load::{self, Source},
    },
};
use proptest::prelude::*;

const SERVERS: [ProcessKey; 2] = [ProcessKey { pid: 7, start: 1 }, ProcessKey { pid: 9, start: 1 }];
const SECOND: u64 = 1_000_000_000;
const LIMITS: Limits = Limits { requests: 1_000_000, transfers: 1_000 };

fn rules(text: &str) -> RuleSet {
    load::load(&[Source { file: "r.yaml", text }]).unwrap()
}

// What is not evaluated

/// A core under these rules with so many requests that entered the queue in second 1 and are being transferred.
fn busy(requests: u64, rules: RuleSet) -> Core {
    let mut core = Core::new(rules, LIMITS);
    let attach = Input::Attach { process: SERVERS[0], identity: Box::default(), clock_offset: 0 };
    core.apply(attach, &mut Effects::default());
    for sender in 1..=requests {
        let room = Room::Number(1_000 + sender);
        for body in [
            Body::Open { room, sender, backend: Backend::Nixl },
            Body::Send { room, sender, pages: 8, last: true },
            Body::Enter { room, sender, rid: None, queue_length: sender },
            Body::Phase { room, sender, old: None, new: Some(Phase::Transferring) },
        ] {
            see(&mut core, SECOND, body);
        }
    }
    core
}

fn see(core: &mut Core, at: u64, body: Body) {
    let event = Event { pid: SERVERS[0].pid, tid: 1, at: Monotonic(at), sequence: 1, detail_lost: false, body };
    core.apply(Input::Event(event), &mut Effects::default());
}

/// How many requests the next tick evaluates.
fn evaluated(core: &mut Core, seconds: u64) -> u64 {
    let before = core.evaluator().evaluated();
    let tick = Input::Tick { now: Monotonic(seconds * SECOND), pace: Pace::As(None) };
    core.apply(tick, &mut Effects::default());
    core.evaluator().evaluated() - before
}

#[test]
fn healthy_requests_are_not_evaluated_before_the_smallest_threshold_of_their_cause() {
    let mut core = busy(500, load::defaults().unwrap());
    assert_eq!(evaluated(&mut core, 2), 0);
    assert_eq!(evaluated(&mut core, 60), 0, "PinnedUnknown is about requests older than 60 s");
    assert_eq!(evaluated(&mut core, 61), 500);
}

#[test]
fn a_young_request_with_a_cause_that_has_no_threshold_is_evaluated_alone() {
    let dropped = "{name: Dropped, when: cause == 'UpdateDropped', severity: info}";
    let old = "{name: Old, when: inflight_seconds > 60, severity: info}";
    let mut core = busy(500, rules(&format!("rules: [{dropped}, {old}]")));
    see(
        &mut core,
        SECOND,
        Body::Update { room: Room::Number(1_007), requested: Some(Phase::Failed), before: None, after: None },
    );
    assert_eq!(evaluated(&mut core, 2), 1);
    assert_eq!(
        core.active().map(|verdict| (&*verdict.rule, verdict.request.serial)).collect::<Vec<_>>(),
        [("Dropped", 7)]
    );
    see(
        &mut core,
        3 * SECOND,
        Body::Update {
            room: Room::Number(1_007),
            requested: Some(Phase::Bootstrapping),
            before: None,
            after: Some(Phase::Bootstrapping),
        },
    );
    assert_eq!(evaluated(&mut core, 4), 1, "it has an alert, which ends");
    assert_eq!((core.active().count(), evaluated(&mut core, 5)), (0, 0));
}

#[test]
fn each_request_is_reached_in_turn_when_the_budget_is_too_short() {
    let rules = rules("rules: [{name: Any, when: inflight, severity: info}]");
    let mut evaluator = Evaluator::new(rules, 10_000);
    let mut tracker = Tracker::new(LIMITS);
    for server in SERVERS {
        tracker.attach(server, 0);
        for sender in 1..=300 {
            let room = Room::Number(sender);
            for body in [
                Body::Open { room, sender, backend: Backend::Nixl },
                Body::Enter { room, sender, rid: None, queue_length: sender },
            ] {
                let event = Event { pid: server.pid, tid: 1, at: Monotonic(1), sequence: 1, detail_lost: false, body };
                tracker.apply(&event, &mut Vec::new());
            }
        }
    }
    let mut seen = Vec::new();
    for _ in 0..10 {
        let requests = tracker.judged_after(evaluator.reached(), Monotonic(2));
        let tick = evaluator.tick(requests, Monotonic(2), Duration::ZERO, || Duration::ZERO);
        assert_eq!(tick.evaluated, 64);
        seen.extend(tick.transitions.iter().map(|transition| transition.key));
    }
    assert_eq!(
        seen,
        tracker.judged_keys(Monotonic(2)).collect::<Vec<_>>(),
        "ten times 64 reach 600, in order; none is told of twice"
    );
}

// The twin

/// Rules of every kind: with and without thresholds, causes and holds, some that only CEL can decide, one that fails.
fn odd_rules() -> RuleSet {
    let mut text = String::from("rules:\n");
    for (number, (when, hold)) in [
        ("cause == 'RoomCollision' && inflight", 2),
        ("cause == 'Parked' && inflight_seconds > 5", 0),
        ("cause == 'TransferStalled'", 3),
        ("cause in ['Slow', 'TransferStalled', 'CompletionLost'] && waiting_seconds >= 7.5", 1),
        ("cause != 'Unknown' && phase_seconds > 20", 4),
        ("abort_seconds > 3.0 || cause == 'UpdateDropped'", 2),
        ("inflight_seconds > server_waiting_timeout_seconds + 5.0", 2),
        ("!(cause == 'Unknown') && confidence == 'low'", 6),
        ("room_shared && waiting_seconds > 10", 0),
        ("phase == 'Bootstrapping' && 12 < waiting_seconds", 1),
        ("quiescence in ['InFlight', 'Queued'] && waiting_seconds > 4", 5),
        ("paused ? cause == 'Parked' : inflight_seconds * 2.0 > 31.0", 2),
        ("10 / sent_chunks > 4 && inflight_seconds > 2", 1),
        ("queue_length > 2 && inflight_seconds > 15", 3),
        ("backend != 'fake' && inflight && waiting_seconds > 30", 10),
    ]
    .into_iter()
    .enumerate()
    {
        writeln!(text, "- {{name: R{number}, when: \"{when}\", for: {hold}s, severity: info}}").unwrap();
    }
    rules(&text)
}

/// A step of a stream: what happens in which server, and how many milliseconds later.
#[derive(Clone, Debug)]
enum Step {
    See(usize, Body),
    Resync(usize),
    Tick,
}

fn steps() -> impl Strategy<Value = Vec<(Step, u64)>> {
    let step = prop_oneof![
        6 => (0..2_usize, bodies()).prop_map(|(server, body)| Step::See(server, body)),
        1 => (0..2_usize).prop_map(Step::Resync),
        3 => Just(Step::Tick),
    ];
    let later = prop_oneof![3 => 0..500_u64, 2 => 500..4_000_u64, 1 => 4_000..30_000_u64];
    prop::collection::vec((step, later), 0..120)
}

fn bodies() -> impl Strategy<Value = Body> {
    let room = || (0..3_u64).prop_map(Room::Number);
    let sender = || 1..6_u64;
    let phase = || (0..5_usize).prop_map(|number| Some(Phase::ALL[number]));
    let handle = || (1..4_u64).prop_map(|number| Handle { engine: Engine::Nixl, number });
    let native = |event| Body::Native(Box::new(event));
    let status = || {
        prop::sample::select(vec![
            TransferStatus::InProgress,
            TransferStatus::Done,
            TransferStatus::Failed { code: -3 },
        ])
    };
    prop_oneof![
        4 => (room(), sender()).prop_map(|(room, sender)| Body::Open { room, sender, backend: Backend::Nixl }),
        1 => (room(), sender()).prop_map(|(room, sender)| Body::Close { room, sender }),
        4 => (room(), sender(), phase()).prop_map(|(room, sender, new)| Body::Phase { room, sender, old: None, new }),
        4 => (room(), sender(), any::<bool>()).prop_map(|(room, sender, told)| {
            let rid = told.then(|| Rid { text: format!("rid-{sender}"), truncated: false });
            Body::Enter { room, sender, rid, queue_length: 1 }
        }),
        1 => (room(), sender()).prop_map(|(room, sender)| Body::Abort { room, sender, room_present: true }),
        1 => (room(), phase(), any::<bool>()).prop_map(|(room, after, dropped)| {
            let after = after.filter(|_| !dropped);
            Body::Update { room, requested: Some(Phase::Failed), before: None, after }
        }),
        2 => (room(), sender()).prop_map(|(room, sender)| Body::Send { room, sender, pages: 8, last: true }),
        1 => (room(), sender()).prop_map(|(room, sender)| Body::Clear { room, sender, removed: true }),
        1 => (room(), sender(), any::<bool>()).prop_map(|(room, sender, removed)| {
            let reason = if removed { LeaveReason::Removed } else { LeaveReason::Failed };
            Body::Leave { room, sender, reason }
        }),
        2 => (room(), 0..2_u16, 0..2_u16).prop_map(|(room, queued, working)| Body::Chunk {
            room,
            step: if working > 0 { ChunkStep::Begun } else { ChunkStep::Queued },
            counts: ChunkCounts { queued, working, ..ChunkCounts::default() },
            queue: None,
        }),
        2 => (0..4_u32).prop_map(|queue_length| Body::Pass { queue_length, passes: 5 }),
        1 => prop::sample::select(vec![Body::Paused, Body::Resumed]),
        2 => (handle(), 0..3_u64).prop_map(move |(handle, room)| {
            let notification = Some(Notification { bytes: format!("{room}_kv_0_1").into_bytes(), cut: false });
            native(NativeEvent::Made { handle, operation: None, parts: 1, size: None, notification })
        }),
        3 => handle().prop_map(move |handle| {
            native(NativeEvent::Posting { handle, operation: None, first_length: None, lists: [0; 2] })
        }),
        2 => (handle(), status()).prop_map(move |(handle, status)| {
            native(NativeEvent::Status { handle, status, moved: None })
        }),
        1 => (handle(), status()).prop_map(move |(handle, status)| {
            native(NativeEvent::Releasing { handle, status: Some(status) })
        }),
    ]
}

/// Every rule on every request, by CEL, and alerts as Prometheus has them.
struct Twin {
    rules: RuleSet,
    active: BTreeMap<(RequestKey, RuleIndex), (Monotonic, bool)>,
}

impl Twin {
    fn tick(&mut self, tracker: &Tracker, now: Monotonic) -> Vec<(RequestKey, RuleIndex, AlertState)> {
        let root = root();
        let mut matched = BTreeMap::new();
        for tracked in tracker.judged(now) {
            let subject = Subject { tracked, conclusion: diagnose(&tracked, now).conclusion(), now };
            for (index, rule) in self.rules.iter() {
                if rule.condition.matches(&Scope::of(&root, &subject)).unwrap_or(false) {
                    matched.insert((tracked.key, index), rule.hold);
                }
            }
        }
        let mut told = Vec::new();
        self.active.retain(|place, (_, firing)| {
            let goes_on = matched.contains_key(place);
            if !goes_on && *firing {
                told.push((place.0, place.1, AlertState::Resolved));
            }
            goes_on
        });
        for (place, hold) in matched {
            let known = self.active.get(&place).copied();
            let (since, fired) = known.unwrap_or((now, false));
            let fires = now.since(since) >= hold;
            self.active.insert(place, (since, fires));
            match (known, fired, fires) {
                (_, false, true) => told.push((place.0, place.1, AlertState::Firing)),
                (None, ..) => told.push((place.0, place.1, AlertState::Pending)),
                _ => {}
            }
        }
        told.sort_unstable_by_key(|(key, rule, _)| (*key, *rule));
        told
    }
}

fn told(mut transitions: Vec<Transition>) -> Vec<(RequestKey, RuleIndex, AlertState)> {
    transitions.sort_by_key(|transition| (transition.key, transition.rule));
    transitions.iter().map(|transition| (transition.key, transition.rule, transition.state)).collect()
}

/// What people are shown of each request.
fn looks(tracker: &Tracker, now: Monotonic) -> BTreeMap<RequestKey, String> {
    let look =
        |key| tracker.judge(key, now).map(|it| format!("{:?} {:?}", diagnose(&it, now).conclusion(), it.request.phase));
    tracker.judged_keys(now).filter_map(|key| Some((key, look(key)?))).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_tick_tells_what_its_twin_tells_that_evaluates_everything(steps in steps(), default: bool) {
        let set = || if default { load::defaults().unwrap() } else { odd_rules() };
        let mut evaluator = Evaluator::new(set(), 10_000);
        let mut twin = Twin { rules: set(), active: BTreeMap::new() };
        let mut tracker = Tracker::new(LIMITS);
        let mut now = Monotonic(1_000 * SECOND);
        let mut shown: BTreeMap<RequestKey, String> = BTreeMap::new();
        for server in SERVERS {
            tracker.attach(server, 0);
        }
        for (step, later) in steps {
            now = now.plus(Duration::from_millis(later));
            match step {
                Step::See(server, body) => {
                    let pid = SERVERS[server].pid;
                    tracker.apply(&Event { pid, tid: 1, at: now, sequence: 1, detail_lost: false, body }, &mut Vec::new());
                }
                Step::Resync(server) => {
                    let known: Vec<_> = tracker.judged_keys(now).filter(|key| key.process == SERVERS[server]).collect();
                    tracker.asked(SERVERS[server], 5, ResyncReason::Attached, now);
                    let pid = SERVERS[server].pid;
                    for body in [Body::StateBegin { epoch: 5 }, Body::StateEnd { epoch: 5, entries: 0 }] {
                        tracker.apply(&Event { pid, tid: 1, at: now, sequence: 1, detail_lost: false, body }, &mut Vec::new());
                    }
                    prop_assert!(known.iter().all(|key| tracker.get(*key).is_none()));
                }
                Step::Tick => {
                    let mut transitions = evaluator.end_others(tracker.judged_keys(now), now);
                    let reached = evaluator.reached();
                    let tick = evaluator.tick(tracker.judged_after(reached, now), now, Duration::MAX, || Duration::ZERO);
                    transitions.extend(tick.transitions);
                    prop_assert_eq!(told(transitions), twin.tick(&tracker, now));
                    let looks = looks(&tracker, now);
                    for key in evaluator.alerts().keys() {
                        let differs = shown.get(&key).is_some_and(|shown| Some(shown) != looks.get(&key));
                        prop_assert!(!differs || tick.changed.contains(&key), "{key:?} looks otherwise");
                    }
                    shown = looks;
                }
            }
        }
    }
}

/// The numbers above are about work; this one shows that the work is small. It asserts nothing about time.
#[test]
fn a_tick_over_many_healthy_requests_evaluates_none() {
    let mut core = busy(20_000, load::defaults().unwrap());
    let began = Instant::now();
    assert_eq!(evaluated(&mut core, 2), 0);
    println!("a tick over 20,000 young requests took {:?} in this build", began.elapsed());
}
