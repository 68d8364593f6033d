//! Telling a core what a recording says.

use std::{collections::BTreeMap, io::Read, sync::Arc};

use serde::Serialize;

use super::{
    format::{Dropped, Header},
    reader::{End, Found, Item, ReadError, Reader, Soundness},
};
use crate::{
    core::{Core, Effects, Input},
    event::clock::Monotonic,
    request::{
        ResyncReason,
        tracker::{Limits, Step},
    },
    rule::{RuleSet, alert::AlertState},
    verdict::Verdict,
};

/// More than an agent could have known (some hundred bytes each): a file that says so was not written by one.
const MAX_WEIGHT: usize = 4_000_000;
/// How often that is looked at, in inputs.
const WEIGHED_EVERY: u64 = 1_024;
/// Most requests, and most transfers, of one server: what the configuration allows.
const MAX_LIMIT: usize = 10_000_000;

/// Why a replay stops.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// What the file says would not fit.
    #[error("says more than an agent can have known: it was not written by one")]
    TooMuch,
}

/// What a replay saw.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Events of servers.
    pub events: u64,
    /// Requests: those that the recording began with are not counted.
    pub requests: u64,
    /// Ticks.
    pub ticks: u64,
    /// Alerts that fired, by rule.
    pub alerts: BTreeMap<String, u64>,
    /// How often events of a server were lost while it was recorded.
    pub losses: u64,
    /// What the recorder had not kept.
    pub dropped: Dropped,
    /// How often other rules came to apply.
    pub other_rules: u64,
    /// Items that this agent does not know.
    pub unknown: u64,
    /// Blocks that are damaged; it went on with the next one's snapshot.
    pub damaged: u64,
    /// Time of the first tick and of the last.
    #[serde(skip)]
    pub span: Option<(Monotonic, Monotonic)>,
    /// How the file ends; nothing when it was not read to the end.
    pub end: Option<End>,
}

/// A replay that is under way.
pub struct Replay<R> {
    reader: Reader<R>,
    core: Core,
    effects: Effects,
    inputs: u64,
    summary: Summary,
}

/// Somebody who watches a replay, input by input.
pub trait Observer {
    /// A tick is about to be evaluated. `false` ends the replay before it.
    fn tick(&mut self, _now: Monotonic) -> bool {
        true
    }

    /// The core is about to be told something.
    fn before(&mut self, _input: &Input, _core: &Core) {}

    /// The core was told it, and this came of it.
    fn after(&mut self, _core: &Core, _effects: &Effects) {}
}

/// Tells a closure of ticks and verdicts.
struct Telling<F>(F);

impl<F: FnMut(Told<'_>) -> bool> Observer for Telling<F> {
    fn tick(&mut self, now: Monotonic) -> bool {
        self.0(Told::Tick(now))
    }

    fn after(&mut self, _: &Core, effects: &Effects) {
        for verdict in &effects.verdicts {
            self.0(Told::Verdict(verdict));
        }
    }
}

/// What a replay tells as it happens.
#[derive(Debug)]
pub enum Told<'a> {
    /// A tick is about to be evaluated. `false` as an answer ends the replay before it.
    Tick(Monotonic),
    /// An alert changed.
    Verdict(&'a Arc<Verdict>),
}

impl<R: Read> Replay<R> {
    /// A replay with these rules.
    pub fn new(reader: Reader<R>, rules: RuleSet) -> Self {
        let Limits { requests, transfers } = reader.header().limits;
        let limits = Limits { requests: requests.min(MAX_LIMIT), transfers: transfers.min(MAX_LIMIT) };
        let summary = Summary {
            events: 0,
            requests: 0,
            ticks: 0,
            alerts: BTreeMap::new(),
            losses: 0,
            dropped: reader.header().dropped,
            other_rules: 0,
            unknown: 0,
            damaged: 0,
            span: None,
            end: None,
        };
        Self { reader, core: Core::new(rules, limits), effects: Effects::default(), inputs: 0, summary }
    }

    /// Where the recording comes from.
    pub fn header(&self) -> &Header {
        self.reader.header()
    }

    /// [`RuleSet::digest`] of the rules that are evaluated.
    pub fn rules(&self) -> &str {
        self.core.evaluator().rules().digest()
    }

    /// Replays until the end, or until `tell` says no.
    ///
    /// # Errors
    ///
    /// Reading failed, or the file says more than an agent can have known.
    pub fn run(self, tell: impl FnMut(Told<'_>) -> bool) -> Result<(Summary, Core), ReplayError> {
        self.observed_by(&mut Telling(tell))
    }

    /// The same, watched by somebody who sees more.
    ///
    /// # Errors
    ///
    /// As [`Replay::run`].
    pub fn observed_by(mut self, observer: &mut impl Observer) -> Result<(Summary, Core), ReplayError> {
        let mut lost = true;
        loop {
            let block = match self.reader.next_block()? {
                Found::Block(block) => block,
                Found::End(end) => {
                    self.summary.end = Some(end);
                    return Ok((self.summary, self.core));
                }
            };
            if block.soundness == Soundness::Damaged {
                self.summary.damaged += 1;
                lost = true;
                continue;
            }
            for item in block.items(lost) {
                match item {
                    Item::Input(input) if lost && !matches!(*input, Input::Snapshot(_)) => {}
                    Item::Input(input) => {
                        lost = false;
                        if !self.input(*input, observer)? {
                            return Ok((self.summary, self.core));
                        }
                    }
                    Item::Unknown => self.summary.unknown += 1,
                    Item::Broken if block.soundness == Soundness::Cut => {}
                    Item::Broken => {
                        self.summary.damaged += 1;
                        lost = true;
                    }
                }
            }
        }
    }

    fn input(&mut self, input: Input, observer: &mut impl Observer) -> Result<bool, ReplayError> {
        let summary = &mut self.summary;
        let mut is_heavy = false;
        match &input {
            Input::Event(_) => summary.events += 1,
            Input::Doubt { why: ResyncReason::EventsLost, .. } | Input::NativeLost { .. } => summary.losses += 1,
            Input::Rules { .. } => summary.other_rules += 1,
            Input::Tick { now, .. } => {
                if !observer.tick(*now) {
                    return Ok(false);
                }
                summary.ticks += 1;
                summary.span = Some((summary.span.map_or(*now, |(first, _)| first), *now));
            }
            Input::Snapshot(_) => is_heavy = true,
            _ => {}
        }
        observer.before(&input, &self.core);
        self.core.apply(input, &mut self.effects);
        self.inputs += 1;
        if (is_heavy || self.inputs.is_multiple_of(WEIGHED_EVERY)) && self.core.tracker().weight() > MAX_WEIGHT {
            return Err(ReplayError::TooMuch);
        }
        observer.after(&self.core, &self.effects);
        let is_new = |step: &Step| matches!(step, Step::Opened | Step::Resynchronised);
        self.summary.requests += self.effects.changes.drain(..).filter(|change| is_new(&change.step)).count() as u64;
        for verdict in self.effects.verdicts.drain(..) {
            if verdict.state == AlertState::Firing {
                *self.summary.alerts.entry(verdict.rule.to_string()).or_default() += 1;
            }
        }
        Ok(true)
    }
}
