//! The agent's side: what it is told, when it asks, and what it does not see.

use std::collections::BTreeMap;

use crate::{
    core::{Input, Pace},
    event::{Event, ProcessKey, clock::Monotonic},
    request::{
        ResyncReason,
        tracker::{Limits, Tracker},
    },
};

/// How often the rules are evaluated (`pipeline`).
pub(super) const TICK: std::time::Duration = std::time::Duration::from_millis(200);
/// How long an answer of the hook is waited for (`pipeline::servers`).
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(5);
/// The epoch of everything that it asks.
const EPOCH: u64 = 5;
/// How much the agent keeps.
pub(super) const LIMITS: Limits = Limits { requests: 10_000, transfers: 10_000 };

/// What the agent is told, and a tracker of its own: when the state is asked for, the tracker decides.
#[derive(Debug)]
pub(super) struct Agent {
    pub(super) inputs: Vec<Input>,
    pub(super) tracker: Tracker,
    deaf_until: Monotonic,
    lost: BTreeMap<u32, u64>,
    /// Until when the agent did not see everything of a process, or had not been told again.
    pub(super) blind_until: BTreeMap<ProcessKey, Monotonic>,
    /// Times between which events of a process were not seen.
    pub(super) gaps: Vec<(ProcessKey, Monotonic, Monotonic)>,
}

impl Agent {
    pub(super) fn new() -> Self {
        Self {
            inputs: Vec::new(),
            tracker: Tracker::new(LIMITS),
            deaf_until: Monotonic(0),
            lost: BTreeMap::new(),
            blind_until: BTreeMap::new(),
            gaps: Vec::new(),
        }
    }

    /// Nothing comes through until then.
    pub(super) fn is_deaf(&mut self, until: Monotonic) {
        self.deaf_until = self.deaf_until.max(until);
    }

    /// An event is put into the ring, or lost there.
    pub(super) fn see(&mut self, event: Event) {
        if self.tracker.servers().all(|(key, _)| key.pid != event.pid) {
            return;
        }
        if event.at < self.deaf_until {
            *self.lost.entry(event.pid).or_default() += 1;
            return;
        }
        self.tracker.apply(&event, &mut Vec::new());
        self.inputs.push(Input::Event(event));
    }

    /// Whether it has seen a process make a pass.
    pub(super) fn saw_pass(&self, process: ProcessKey) -> bool {
        self.tracker.server(process).is_some_and(|server| server.turned.is_some())
    }

    /// Takes account of what was lost.
    pub(super) fn account(&mut self, process: ProcessKey, now: Monotonic) {
        if self.lost.remove(&process.pid).is_none() {
            return;
        }
        let why = ResyncReason::EventsLost;
        self.tracker.needs_resync(process.pid, why);
        self.tracker.native_lost(process, now);
        self.inputs.push(Input::Doubt { process, why });
        self.inputs.push(Input::NativeLost { process, at: now });
        self.gaps.push((process, Monotonic(now.0.saturating_sub(1_200_000_000)), now));
    }

    /// Asks those that are not known well. Returns whom, and the epoch.
    pub(super) fn ask(&mut self, now: Monotonic) -> Vec<(ProcessKey, u64)> {
        let mut due = self.tracker.to_ask(now, PATIENCE);
        due.sort_unstable();
        for (process, why) in &due {
            self.tracker.asked(*process, EPOCH, *why, now);
            self.inputs.push(Input::Asked { process: *process, epoch: EPOCH, why: *why, at: now });
        }
        due.into_iter().map(|(process, _)| (process, EPOCH)).collect()
    }

    pub(super) fn tick(&mut self, now: Monotonic) {
        let in_doubt = self.tracker.servers().filter(|(_, state)| state.sync != crate::request::Sync::Complete);
        for (process, _) in in_doubt {
            self.blind_until.insert(process, now);
            // The answer ends it: what workers had taken until then is forgotten with it.
            if let Some((_, _, until)) = self.gaps.iter_mut().rfind(|(gap, ..)| *gap == process) {
                *until = now.plus(TICK);
            }
        }
        self.inputs.push(Input::Tick { now, pace: Pace::As(None) });
    }
}
