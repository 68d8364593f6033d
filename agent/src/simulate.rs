//! A simulator of prefill servers: what the agent would be told of one, and what is true of it.
//!
//! One node: the ranks of one server ([`Rank`](server)), each with a scheduler whose passes run in step, a hook, transfer
//! workers with their queues and an engine; and the agent's side ([`agent`]): when it comes, what it loses, when it asks. A
//! [`schedule`] is drawn from the seed, then lived through event by event ([`world`]). The truth about each request is noted
//! where it comes about, not where it is planned: a fault that is planned and overtaken by another one is not true.
//!
//! A stand-in for servers where what is to be judged is the diagnosis: that servers behave like this is for the tests on
//! SGLang's released code to show. The same seed gives the same stream on every machine, as long as `rand` stays the same.

mod agent;
mod chance;
mod family;
mod halt;
mod life;
mod pass;
mod process;
mod schedule;
mod server;
pub mod truth;
mod work;
mod world;

use std::time::Duration;

pub use family::{Family, Support};
use truth::Truth;

use crate::{
    core::{Core, Effects, Input, Pace},
    event::clock::Monotonic,
    record::{
        format::{Dropped, Header},
        recorder::{Recorder, Recording, Span},
    },
    rule::RuleSet,
};

/// What to simulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// What happens.
    pub family: Family,
    /// Decides everything else.
    pub seed: u64,
    /// How many requests, at least one.
    pub requests: usize,
    /// Ranks of the server, of a tensor-parallel group or pipeline stages; at least one.
    pub ranks: usize,
}

impl Settings {
    /// A small schedule of whatever family, as the seed will have it.
    pub fn of_seed(seed: u64) -> Self {
        let mut chance = chance::Chance::of(seed ^ u64::MAX);
        let family = usize::try_from(chance.between(0, Family::ALL.len() as u64 - 1)).unwrap_or(0);
        let family = Family::ALL.get(family).copied().unwrap_or(Family::ClearedRoom);
        let ranks = match chance.percent(75) {
            _ if family.diverges() => chance.between(2, 3) as usize,
            true => 1,
            false => 2,
        };
        Self { family, seed, requests: chance.between(1, 4) as usize, ranks }
    }
}

/// What came of it.
#[derive(Debug)]
pub struct Simulation {
    /// What the agent's core is told, in the order of time.
    pub inputs: Vec<Input>,
    /// What is true of each request.
    pub truth: Vec<Truth>,
    /// The server's own time-out of a bootstrap, which its `hello` says.
    pub bootstrap_timeout: Duration,
}

/// Simulates.
pub fn simulate(settings: &Settings) -> Simulation {
    let world = world::World::new(settings);
    let bootstrap_timeout = world.schedule.bootstrap_timeout;
    let (inputs, truth) = world.run();
    Simulation { inputs, truth, bootstrap_timeout }
}

/// A recording of what a core was told, as an agent with these rules would have made it.
pub fn recording(inputs: Vec<Input>, rules: RuleSet) -> Recording {
    recording_from(inputs, 0, rules)
}

/// The same of a recorder that came after so many inputs: it begins with what was known by then.
pub fn recording_from(inputs: Vec<Input>, first: usize, rules: RuleSet) -> Recording {
    let header = Header {
        agent: env!("CARGO_PKG_VERSION").to_owned(),
        kernel: "simulated".to_owned(),
        boot: "simulated".to_owned(),
        node: "simulated".to_owned(),
        at: world::BEGINS,
        wall: 0,
        rules: rules.digest().to_owned(),
        limits: agent::LIMITS,
        dropped: Dropped::default(),
        anonymized: false,
    };
    let mut core = Core::new(rules, agent::LIMITS);
    let mut recorder = Recorder::new(Span { time: Duration::MAX, bytes: usize::MAX / 2 });
    let mut now = Monotonic(0);
    for (place, input) in inputs.into_iter().enumerate() {
        if place == first {
            recorder.turn(&core, now);
        }
        let is_recorded = place >= first;
        let mut effects = Effects::default();
        if let Input::Tick { now: at, .. } = input {
            now = at;
            core.apply(input, &mut effects);
            if is_recorded {
                recorder.record(&Input::Tick { now, pace: Pace::As(effects.stopped) });
                recorder.turn(&core, now);
            }
        } else {
            if is_recorded {
                recorder.record(&input);
            }
            core.apply(input, &mut effects);
        }
    }
    recorder.recording(header)
}
