//! Runs a test: a core is told what happens, and its alerts are compared with what is expected at each time.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufReader},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use super::{
    Alert, Expected, Happens, Mismatch, RuleTest,
    event::{SCHEDULER, Step, What},
    load::ranks,
};
use crate::{
    core::{Core, Effects, Input, Pace},
    event::{Body, Event, Hello, ProcessKey, Room, clock::Monotonic, native::Engine, receiver::ReceiverEvent},
    problem::Problem,
    record::{
        reader::{ReadError, Reader},
        replay::{Replay, ReplayError, Told},
    },
    request::{
        Queue, ResyncReason,
        ends::{EndState, RoomEnd, Side},
        tracker::{Limits, Parting},
    },
    rule::{RuleSet, alert::AlertState},
    verdict::{ServerIdentity, Verdict},
};

/// What started the ranks of the server.
const PARENT: ProcessKey = ProcessKey { pid: 1, start: 1 };
const EPOCH: u64 = 1;
const LIMITS: Limits = Limits { requests: 100_000, transfers: 100_000 };
/// The clock at a test's beginning: what happened before it, if only in a diagnosis, must have a time as well.
const BEGIN: Monotonic = Monotonic(1_000_000_000_000);
/// Passes between two evaluations: at most ten a second are marked, each telling of some more.
const PASSES: u32 = 10;

/// Why a test could not be run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The rules could not be read once more.
    #[error("the rules cannot be read any more")]
    Rules(Vec<Problem>),
    /// There is no such recording.
    #[error("{}: {source}", path.display())]
    File {
        /// The recording.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is none.
    #[error("{}: {source}", path.display())]
    Recording {
        /// The recording.
        path: PathBuf,
        /// Why.
        source: ReplayError,
    },
    /// It ends before a time at which something is expected.
    #[error("{}: ends after {} s, before {} s", path.display(), length.as_secs(), at.as_secs())]
    Ends {
        /// The recording.
        path: PathBuf,
        /// How long it is.
        length: Duration,
        /// The time.
        at: Duration,
    },
}

/// Runs a test with the rules that `rules` gives: an evaluation owns them, and a recording is replayed once for each time.
///
/// # Errors
///
/// The rules or the recording cannot be read.
pub fn run(test: &RuleTest, rules: impl Fn() -> Result<RuleSet, Vec<Problem>>) -> Result<Vec<Mismatch>, RunError> {
    match &test.happens {
        Happens::Recorded(path) => {
            let alerts = |expected: &Expected| recorded(path, expected.at, rules().map_err(RunError::Rules)?);
            let compared = test.expected.iter().map(|expected| Ok(compare(expected, alerts(expected)?)));
            compared.filter_map(Result::transpose).collect()
        }
        Happens::Told { server, interval, steps } => {
            let mut scene = Scene::new(rules().map_err(RunError::Rules)?, server, *interval);
            let mut steps = steps.iter().peekable();
            let mut mismatches = Vec::new();
            for expected in &test.expected {
                scene.run_until(expected.at, &mut steps);
                mismatches.extend(compare(expected, alerts(&scene.core)));
            }
            Ok(mismatches)
        }
    }
}

/// The alerts of a core.
fn alerts(core: &Core) -> Vec<Alert> {
    let alert = |verdict: &Arc<Verdict>| Alert {
        rule: verdict.rule.to_string(),
        fires: verdict.state == AlertState::Firing,
        room: Some(verdict.room.to_string()),
        rid: verdict.rid.as_ref().map(|rid| rid.text.clone()),
    };
    core.active().map(alert).collect()
}

fn compare(expected: &Expected, mut unexpected: Vec<Alert>) -> Option<Mismatch> {
    // The ones that say most choose first: what is left for the others is what may be anything.
    let mut wanted = expected.alerts.clone();
    wanted.sort_by_key(|alert| (alert.room.is_none(), alert.rid.is_none()));
    let mut missing: Vec<Alert> = Vec::new();
    for alert in wanted {
        match unexpected.iter().position(|got| alert.is_met_by(got)) {
            Some(place) => drop(unexpected.swap_remove(place)),
            None => missing.push(alert),
        }
    }
    missing.sort();
    unexpected.sort();
    let differs = !missing.is_empty() || !unexpected.is_empty();
    differs.then_some(Mismatch { at: expected.at, line: expected.line, missing, unexpected })
}

/// The alerts that a recording gives at a time after its first evaluation.
fn recorded(path: &Path, at: Duration, rules: RuleSet) -> Result<Vec<Alert>, RunError> {
    let path = || path.to_owned();
    let file = File::open(path()).map_err(|source| RunError::File { path: path(), source })?;
    let wrong = |source: ReplayError| RunError::Recording { path: path(), source };
    let reader = Reader::open(BufReader::new(file)).map_err(|error: ReadError| wrong(error.into()))?;
    let mut first = None;
    let mut last = Duration::ZERO;
    let (_, core) = Replay::new(reader, rules)
        .run(|told| {
            let Told::Tick(now) = told else { return true };
            last = now.since(*first.get_or_insert(now));
            last <= at
        })
        .map_err(wrong)?;
    if last < at { Err(RunError::Ends { path: path(), length: last, at }) } else { Ok(alerts(&core)) }
}

/// A server whose ranks are completely known, whose transfers are all seen, and whose loops turn unless a test says otherwise.
struct Scene {
    core: Core,
    interval: Duration,
    next_tick: Duration,
    sequence: u64,
    /// The ranks that live, and whether their loops turn.
    turns: BTreeMap<u32, bool>,
    /// What the other ends of rooms do, which is asked for again and again.
    other_ends: BTreeMap<Room, EndState>,
}

impl Scene {
    fn new(rules: RuleSet, server: &Hello, interval: Duration) -> Self {
        let core = Core::new(rules, LIMITS);
        let mut scene = Self {
            core,
            interval,
            next_tick: Duration::ZERO,
            sequence: 0,
            turns: BTreeMap::new(),
            other_ends: BTreeMap::new(),
        };
        for rank in 0..ranks(server) {
            scene.add(rank, server);
        }
        scene
    }

    fn add(&mut self, rank: u32, server: &Hello) {
        let (process, at) = (process(rank), BEGIN);
        let identity = ServerIdentity { parent: Some(PARENT), ..ServerIdentity::default() };
        let tp = server.tp.unwrap_or(1);
        let role = server.role.clone().or_else(|| Some(Side::Prefill.name().to_owned()));
        let hello = Hello { role, tp_rank: Some(rank % tp), pp_rank: Some(rank / tp), ..server.clone() };
        self.turns.insert(rank, true);
        self.tell(Input::Attach { process, identity: Box::new(identity), clock_offset: 0 });
        self.tell(Input::Watch { process, engine: Some(Engine::Nixl), at });
        self.tell(Input::Asked { process, epoch: EPOCH, why: ResyncReason::Attached, at });
        self.see(rank, SCHEDULER, Duration::ZERO, Body::Hello(Box::new(hello)));
        self.see(rank, SCHEDULER, Duration::ZERO, Body::StateBegin { epoch: EPOCH });
        self.see(rank, SCHEDULER, Duration::ZERO, Body::StateEnd { epoch: EPOCH, entries: 0 });
    }

    fn tell(&mut self, input: Input) {
        self.core.apply(input, &mut Effects::default());
    }

    fn see(&mut self, rank: u32, tid: u32, at: Duration, body: Body) {
        self.sequence += 1;
        let (sequence, at) = (self.sequence, BEGIN.plus(at));
        self.tell(Input::Event(Event { pid: process(rank).pid, tid, at, sequence, detail_lost: false, body }));
    }

    /// What happens up to `end`, which is evaluated too.
    fn run_until<'a>(&mut self, end: Duration, steps: &mut std::iter::Peekable<impl Iterator<Item = &'a Step>>) {
        while self.next_tick <= end {
            let tick = self.next_tick;
            self.steps_until(tick, steps);
            self.tick(tick);
            self.next_tick = tick.saturating_add(self.interval);
        }
        self.steps_until(end, steps);
        self.tick(end);
    }

    fn steps_until<'a>(&mut self, end: Duration, steps: &mut std::iter::Peekable<impl Iterator<Item = &'a Step>>) {
        while let Some(step) = steps.next_if(|step| step.at <= end) {
            let rank = step.rank.unwrap_or_default();
            let (process, at) = (process(rank), BEGIN.plus(step.at));
            match &step.what {
                What::Seen(thread, bodies) => {
                    for body in bodies {
                        self.see(rank, *thread, step.at, body.clone());
                    }
                }
                What::Loop(turn) => {
                    let those = self.turns.iter_mut().filter(|(rank, _)| step.rank.is_none_or(|it| it == **rank));
                    those.for_each(|(_, turns)| *turns = *turn);
                }
                What::MarksLost => self.tell(Input::Doubt { process, why: ResyncReason::EventsLost }),
                What::TransfersLost => self.tell(Input::NativeLost { process, at }),
                What::OtherEnd(room, state) => {
                    self.other_ends.insert(*room, state(at));
                }
                What::Exit => {
                    self.turns.remove(&rank);
                    self.tell(Input::Detach { process, why: Parting::Ended, at });
                }
            }
        }
    }

    fn tick(&mut self, at: Duration) {
        for (room, state) in self.other_ends.clone() {
            let ends = vec![RoomEnd { node: Some("other".to_owned()), pid: 1, state }];
            self.tell(Input::RoomEnds { room, side: Side::Decode, ends, at: BEGIN.plus(at) });
        }
        let turning: Vec<u32> = self.turns.iter().filter(|(_, turns)| **turns).map(|(rank, _)| *rank).collect();
        for rank in turning {
            let tracker = self.core.tracker();
            if tracker.server(process(rank)).is_some_and(|server| server.paused) {
                continue;
            }
            let count = |queue: Queue| {
                let of_rank = tracker.requests().filter(|tracked| tracked.key.process == process(rank));
                u32::try_from(of_rank.filter(|it| it.request.queue() == queue).count()).unwrap_or(u32::MAX)
            };
            let (prealloc, transfer) = (count(Queue::Prealloc), count(Queue::Transfer));
            let is_decode =
                tracker.requests().any(|it| it.key.process == process(rank) && it.request.side() == Side::Decode);
            let pass = if is_decode {
                Body::Receiver(ReceiverEvent::Pass { prealloc, transfer, passes: PASSES })
            } else {
                Body::Pass { queue_length: count(Queue::Inflight), passes: PASSES }
            };
            self.see(rank, SCHEDULER, at, pass);
        }
        self.tell(Input::Tick { now: BEGIN.plus(at), pace: Pace::As(None) });
    }
}

/// The scheduler of a rank.
fn process(rank: u32) -> ProcessKey {
    ProcessKey { pid: PARENT.pid + 1 + rank, start: 1 }
}
