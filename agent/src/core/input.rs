//! Everything that the core is told. What is not here cannot change a verdict, so a record of these is a record of
//! everything.

use std::{
    cell::Cell,
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use super::Snapshot;
use crate::{
    event::{Event, ProcessKey, Room, clock::Monotonic, native::Engine},
    request::{
        DeviceError, ResyncReason,
        ends::{RoomEnd, Side},
        gauge::Gauges,
        tracker::{Change, Parting},
        transfer::Observation,
    },
    rule::RuleSet,
    verdict::{ServerIdentity, Verdict},
};

/// One thing that the core is told.
#[derive(Debug)]
pub enum Input {
    /// Everything that was known at one moment: replaces what is known. A recording that has lost its beginning begins
    /// with it.
    Snapshot(Box<Snapshot>),
    /// A server is tracked from now on.
    Attach {
        /// Which.
        process: ProcessKey,
        /// Who it is.
        identity: Box<ServerIdentity>,
        /// Offset of its time namespace's CLOCK_MONOTONIC in nanoseconds.
        clock_offset: i64,
    },
    /// A server is gone, or not tracked any more: its requests end.
    Detach {
        /// Which.
        process: ProcessKey,
        /// Why.
        why: Parting,
        /// When.
        at: Monotonic,
    },
    /// Agents of other nodes told of a room.
    RoomEnds {
        /// Which.
        room: Room,
        /// At which of its ends they were asked to look.
        side: Side,
        /// What they know there.
        ends: Vec<RoomEnd>,
        /// When.
        at: Monotonic,
    },
    /// An event came out of the ring.
    Event(Event),
    /// The picture of a server may be wrong.
    Doubt {
        /// Which.
        process: ProcessKey,
        /// Why.
        why: ResyncReason,
    },
    /// The hook was asked for everything that lives.
    Asked {
        /// Which server's.
        process: ProcessKey,
        /// The epoch that its answer will carry.
        epoch: u64,
        /// Why.
        why: ResyncReason,
        /// When.
        at: Monotonic,
    },
    /// Each transfer of a server is seen from now on, and of which engine; or (`None`) not.
    Watch {
        /// Which server's.
        process: ProcessKey,
        /// Of which engine.
        engine: Option<Engine>,
        /// Since when.
        at: Monotonic,
    },
    /// What was seen of a server's transfers until now may have gaps.
    NativeLost {
        /// Which server's.
        process: ProcessKey,
        /// When.
        at: Monotonic,
    },
    /// Where a transfer stands was read in a server's memory.
    Observed {
        /// Which server's.
        process: ProcessKey,
        /// What was read.
        seen: Observation,
        /// When.
        at: Monotonic,
    },
    /// A look at a server's status polls ended.
    Looked {
        /// Which server's.
        process: ProcessKey,
        /// How often the status of each handle was asked for.
        polls: HashMap<u64, u64>,
        /// When the look began.
        began: Monotonic,
        /// When it ended.
        at: Monotonic,
    },
    /// An RDMA device that a server has open counted an error.
    DeviceError {
        /// Which server.
        process: ProcessKey,
        /// What it counted.
        error: DeviceError,
    },
    /// A server's own `/metrics` was read.
    ServerMetrics {
        /// Which scheduler of the server's.
        process: ProcessKey,
        /// What it says of that one's queues.
        gauges: Gauges,
        /// When it was read.
        at: Monotonic,
    },
    /// Other rules apply from now on.
    Rules {
        /// They.
        rules: Rules,
        /// When.
        at: Monotonic,
    },
    /// Time has passed: the rules are evaluated.
    Tick {
        /// The time now.
        now: Monotonic,
        /// How many requests are evaluated before the tick ends.
        pace: Pace,
    },
}

/// Rules that are to apply.
#[derive(Debug)]
pub enum Rules {
    /// These.
    Here(Box<RuleSet>),
    /// Some that are not at hand: a recording has their digest only. The rules that apply stay.
    Elsewhere {
        /// [`RuleSet::digest`].
        digest: String,
    },
}

impl Rules {
    /// [`RuleSet::digest`].
    pub fn digest(&self) -> &str {
        match self {
            Self::Here(rules) => rules.digest(),
            Self::Elsewhere { digest } => digest,
        }
    }
}

/// How far a tick gets. The clock decides while the agent runs, which is an input as well: a replay stops at the same
/// request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Until this time is spent.
    Within(Duration),
    /// As far as a tick got that stopped at so many looks at its clock; `None`: that reached every request.
    As(Option<u32>),
}

/// What came of an input.
#[derive(Clone, Debug, Default)]
pub struct Effects {
    /// Changes of requests.
    pub changes: Vec<Change>,
    /// Alerts that changed.
    pub verdicts: Vec<Arc<Verdict>>,
    /// The look at its clock at which the last tick stopped; `None` when it reached every request.
    pub stopped: Option<u32>,
}

/// A tick's clock, which can be set to stop where another one did.
#[derive(Debug)]
pub(super) struct Stopwatch {
    pace: Pace,
    began: Instant,
    looks: Cell<u32>,
    stopped: Cell<Option<u32>>,
}

impl Stopwatch {
    pub(super) fn start(pace: Pace) -> Self {
        Self { pace, began: Instant::now(), looks: Cell::new(0), stopped: Cell::new(None) }
    }

    /// What the tick may take.
    pub(super) fn budget(&self) -> Duration {
        match self.pace {
            Pace::Within(budget) => budget,
            Pace::As(_) => Duration::MAX,
        }
    }

    /// What it has taken so far.
    pub(super) fn elapsed(&self) -> Duration {
        let look = self.looks.get().saturating_add(1);
        self.looks.set(look);
        let elapsed = match self.pace {
            Pace::Within(_) => self.began.elapsed(),
            Pace::As(Some(stopped)) if look >= stopped => Duration::MAX,
            Pace::As(_) => Duration::ZERO,
        };
        if elapsed >= self.budget() {
            self.stopped.set(Some(look));
        }
        elapsed
    }

    /// The look at which it stopped.
    pub(super) fn stopped(&self) -> Option<u32> {
        self.stopped.get()
    }
}
