//! The other end of a room: what the server that receives what this one sends (or sends what this one receives) does with
//! it, as far as it is seen: on this node, or by the agent of another one.
//!
//! A room is joined to another server's by its number alone, so only where one server of the other side has it: clients
//! that choose rooms themselves may give the same one to unrelated servers, of which then nothing is said.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    fmt,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{Request, process::Process, tracker::Tracker};
use crate::{
    event::{Phase, ProcessKey, Room, clock::Monotonic},
    record::codec::recorded,
};

/// A request younger than this is not looked at: healthy ones are gone by then.
const LOOKED_AT_AFTER: Duration = Duration::from_secs(2);
/// How often other ends are looked at.
const COMPARED_EVERY: Duration = Duration::from_secs(1);
/// For how long it is known that a process ended, and what rooms it had.
const GONE_KEPT: Duration = Duration::from_secs(300);
/// Processes that ended; the oldest go first.
const MAX_GONE: usize = 64;
/// Rooms of one process that are remembered when it ends.
const MAX_ROOMS: usize = 65_536;
/// For how long an agent's answer counts.
const ANSWER_KEPT: Duration = Duration::from_secs(60);
/// Answers that are kept; further ones are dropped.
const MAX_ANSWERS: usize = 4_096;
/// Ends of one room that are kept of an agent's answer.
const MAX_ENDS: usize = 16;

/// Which end of a room a server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    /// It computes the prompt's keys and values, and sends them.
    Prefill,
    /// It receives them, and goes on.
    Decode,
}

impl Side {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Prefill, Self::Decode];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// The side of a name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|side| side.name() == name)
    }

    /// The other one.
    pub fn other(self) -> Self {
        match self {
            Self::Prefill => Self::Decode,
            Self::Decode => Self::Prefill,
        }
    }
}

/// How a request ended at an end of its room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Conclusion {
    /// It polled Success.
    Success,
    /// It failed.
    Failed,
    /// Its sender or receiver is gone, and had polled neither.
    Dropped,
}

/// What an end does with the room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum EndState {
    /// It has it.
    Lives {
        /// What it polled last.
        phase: Option<Phase>,
        /// Since when.
        since: Monotonic,
    },
    /// It has let go of it.
    Left {
        /// How.
        how: Conclusion,
        /// When.
        at: Monotonic,
    },
    /// Its process ended while it had it.
    ProcessEnded {
        /// When that was seen.
        at: Monotonic,
    },
}

impl EndState {
    /// Since when it is so.
    pub fn at(self) -> Monotonic {
        match self {
            Self::Lives { since: at, .. } | Self::Left { at, .. } | Self::ProcessEnded { at } => at,
        }
    }
}

/// An end of a room. Displays as a sentence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RoomEnd {
    /// Its node; nothing for this one.
    pub node: Option<String>,
    /// Its process, on its node.
    pub pid: u32,
    /// What it does with the room.
    #[serde(flatten)]
    pub state: EndState,
}

impl fmt::Display for RoomEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at the other end of the room, pid {}", self.pid)?;
        if let Some(node) = &self.node {
            write!(f, " on {}", node.escape_debug())?;
        }
        match self.state {
            EndState::Lives { phase: Some(phase), .. } => write!(f, " has it still, and polls {phase} ever since"),
            EndState::Lives { phase: None, .. } => f.write_str(" has it still, and has not polled it"),
            EndState::Left { how: Conclusion::Success, .. } => f.write_str(" is done with it: success"),
            EndState::Left { how: Conclusion::Failed, .. } => f.write_str(" is done with it: failed"),
            EndState::Left { how: Conclusion::Dropped, .. } => f.write_str(" dropped it before it was over"),
            EndState::ProcessEnded { .. } => f.write_str(" ended while it had it"),
        }
    }
}

/// A process that ended, and what it had then.
#[derive(Debug)]
struct Gone {
    key: ProcessKey,
    side: Option<Side>,
    at: Monotonic,
    rooms: HashSet<Room>,
}

/// What agents of other nodes said of an end of a room.
#[derive(Debug)]
struct Answer {
    ends: Vec<RoomEnd>,
    at: Monotonic,
}

/// What is known of other ends beside the processes that are tracked.
#[derive(Debug, Default)]
pub(super) struct Ends {
    compared: Monotonic,
    gone: VecDeque<Gone>,
    answers: HashMap<(Room, Side), Answer>,
}

recorded!(number Side { 0 Prefill, 1 Decode });
recorded!(number Conclusion { 0 Success, 1 Failed, 2 Dropped });
recorded!(enum EndState { 0 Lives { phase, since }, 1 Left { how, at }, 2 ProcessEnded { at } });
recorded!(struct Gone { key, side, at, rooms });
recorded!(struct Answer { ends, at });
recorded!(struct Ends { compared, gone, answers });

impl Ends {
    /// A process ended.
    pub(super) fn ended(&mut self, process: &Process, at: Monotonic) {
        if self.gone.len() >= MAX_GONE {
            self.gone.pop_front();
        }
        let rooms = process.rooms_with_senders().take(MAX_ROOMS).collect();
        self.gone.push_back(Gone { key: process.key(), side: process.side(), at, rooms });
    }

    /// When a process ended, if that is known still.
    pub(super) fn gone(&self, key: ProcessKey) -> Option<Monotonic> {
        self.gone.iter().find(|gone| gone.key == key).map(|gone| gone.at)
    }

    fn prune(&mut self, now: Monotonic) {
        self.gone.retain(|gone| now.since(gone.at) < GONE_KEPT);
        self.answers.retain(|_, answer| now.since(answer.at) < ANSWER_KEPT);
    }

    /// What each of these processes, and of those that ended, does with the room, or did at `since` or later.
    fn here<'a>(
        &'a self,
        room: Room,
        side: Side,
        since: Monotonic,
        processes: impl Iterator<Item = &'a Process> + 'a,
    ) -> impl Iterator<Item = RoomEnd> + 'a {
        let live = processes.filter_map(move |process| Some((process.key().pid, process.end_of_room(room, since)?)));
        let gone = self
            .gone
            .iter()
            .filter(move |gone| gone.side == Some(side) && gone.at >= since && gone.rooms.contains(&room))
            .map(|gone| (gone.key.pid, EndState::ProcessEnded { at: gone.at }));
        live.chain(gone).map(|(pid, state)| RoomEnd { node: None, pid, state })
    }

    /// The one end of that side that has or had the room since then: of this node, else of another one.
    fn of_room(&self, room: Room, side: Side, since: Monotonic, processes: &[&Process]) -> Option<RoomEnd> {
        let mut here = self.here(room, side, since, processes.iter().copied()).peekable();
        if here.peek().is_some() {
            return the_one(here);
        }
        let answer = self.answers.get(&(room, side))?;
        the_one(answer.ends.iter().filter(|end| is_of(end.state, since)).cloned())
    }
}

/// Whether that is an end of a request that was made at `since`, not of one before it in the same room.
fn is_of(state: EndState, since: Monotonic) -> bool {
    match state {
        EndState::Lives { .. } => true,
        EndState::Left { at, .. } | EndState::ProcessEnded { at } => at >= since,
    }
}

/// One end; of several (ranks of one server) the first, if they are alike.
fn the_one(mut ends: impl Iterator<Item = RoomEnd>) -> Option<RoomEnd> {
    let first = ends.next()?;
    ends.all(|end| are_alike(first.state, end.state)).then_some(first)
}

fn are_alike(one: EndState, other: EndState) -> bool {
    match (one, other) {
        (EndState::Lives { .. }, EndState::Lives { .. })
        | (EndState::ProcessEnded { .. }, EndState::ProcessEnded { .. }) => true,
        (EndState::Left { how: one, .. }, EndState::Left { how: other, .. }) => one == other,
        _ => false,
    }
}

/// Whether the other end of this request can matter: it has waited for a while.
fn waits(request: &Request, now: Monotonic) -> bool {
    now.since(request.created) >= LOOKED_AT_AFTER
        && matches!(request.room, Room::Number(_))
        && !request.phase.is_some_and(Phase::is_terminal)
}

impl Tracker {
    /// Looks what the other end of each room does whose request waits; once a second.
    pub fn compare_ends(&mut self, now: Monotonic) {
        if now.since(self.ends.compared) < COMPARED_EVERY {
            return;
        }
        self.ends.compared = now;
        self.ends.prune(now);
        self.notified.prune(now, &self.ends);
        let mut found = Vec::new();
        for process in self.processes.values() {
            let Some(side) = process.side().map(Side::other) else { continue };
            let others: Vec<&Process> = self.processes.values().filter(|other| other.side() == Some(side)).collect();
            for request in process.requests().filter(|request| waits(request, now)) {
                let end = self.ends.of_room(request.room, side, request.created, &others);
                if end.as_ref() != request.other_end.as_deref() {
                    found.push((process.key(), request.serial, end));
                }
            }
        }
        for (key, serial, end) in found {
            if let Some(process) = self.process_mut(key) {
                process.other_end(serial, end);
            }
        }
        let (ends, notified) = (&self.ends, &self.notified);
        for process in self.processes.values_mut() {
            process.only_peer_ended(notified.only_peer_ended(process.key(), ends));
        }
    }

    /// What this node knows of a room at one of its sides: for the agent of the node at the other one.
    pub fn ends_of(&self, room: Room, side: Side) -> Vec<RoomEnd> {
        let processes = self.processes.values().filter(move |process| process.side() == Some(side));
        self.ends.here(room, side, Monotonic(0), processes).take(MAX_ENDS).collect()
    }

    /// Takes over what agents of other nodes said of a room at that side.
    pub fn told_of_ends(&mut self, room: Room, side: Side, mut ends: Vec<RoomEnd>, at: Monotonic) {
        ends.truncate(MAX_ENDS);
        if self.ends.answers.len() < MAX_ANSWERS || self.ends.answers.contains_key(&(room, side)) {
            self.ends.answers.insert((room, side), Answer { ends, at });
        }
    }

    /// Rooms whose request has waited for so long, and whose other end is not seen on this node, with the side to ask about;
    /// those that have waited longest first.
    pub fn ends_to_ask(&self, waited: Duration, now: Monotonic) -> Vec<(Room, Side)> {
        let mut asking: Vec<(Monotonic, Room, Side)> = Vec::new();
        for process in self.processes.values() {
            let Some(side) = process.side().map(Side::other) else { continue };
            let is_asked = |request: &&Request| {
                waits(request, now)
                    && now.since(request.phase_since) >= waited
                    && request.other_end.as_deref().is_none_or(|end| end.node.is_some())
            };
            asking.extend(process.requests().filter(is_asked).map(|request| (request.phase_since, request.room, side)));
        }
        asking.sort_unstable();
        asking.dedup_by_key(|(_, room, side)| (*room, *side));
        asking.into_iter().map(|(_, room, side)| (room, side)).collect()
    }
}

#[cfg(test)]
#[path = "ends_tests.rs"]
mod tests;
