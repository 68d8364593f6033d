//! What the ranks of one replica have in their queues and have dropped, compared. Only what was seen counts: a room that left
//! one rank's queue, by the hook's mark, while another rank has it in its own; one that is over on one rank and not on another.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use super::{super::Sync, Process};
use crate::{
    diagnose::Cause,
    event::{Phase, ProcessKey, Room, clock::Monotonic},
    record::codec::recorded,
    request::{
        Request,
        rank::{Difference, DroppedBy, HeldBy, OtherRank, Rank, Ranks, Replica},
    },
};

/// A request younger than this, in the queue, is not looked at: healthy ones are gone by then.
const LOOKED_AT_AFTER: Duration = Duration::from_secs(2);
/// Rooms that a rank remembers: what left in a few seconds.
const MAX_LEFT: usize = 4_096;
/// Passes within which ranks whose polls are reduced together have dropped the same: they do so in the same one.
const REDUCED_DROP_WITHIN: u64 = 3;
/// Passes for each stage within which all stages have dropped the same: what is to be released goes round once, with a pass of
/// each stage for each microbatch on the way (`event_loop_pp_disagg_prefill`, SGLang 0.5.10 to 0.5.23).
const STAGES_DROP_WITHIN: u64 = 4;

/// Rooms whose requests left the queue lately, the oldest first.
#[derive(Debug, Default)]
pub(super) struct LeftRooms {
    rooms: VecDeque<LeftRoom>,
}

#[derive(Debug)]
struct LeftRoom {
    room: Room,
    at: Monotonic,
}

recorded!(struct LeftRooms { rooms });
recorded!(struct LeftRoom { room, at });

impl LeftRooms {
    pub(super) fn keep(&mut self, room: Room, at: Monotonic) {
        if self.rooms.len() >= MAX_LEFT {
            self.rooms.pop_front();
        }
        self.rooms.push_back(LeftRoom { room, at });
    }

    /// When the room's last request left, if that was after `since`.
    fn after(&self, room: Room, since: Monotonic) -> Option<Monotonic> {
        self.rooms.iter().rev().find(|left| left.room == room && left.at >= since).map(|left| left.at)
    }
}

/// What one rank is to know of the others.
#[derive(Debug)]
pub(in crate::request) struct Comparison {
    pub(in crate::request) process: ProcessKey,
    ranks: Ranks,
    held: HashMap<u64, HeldBy>,
    /// Requests that another rank dropped; nothing where that cannot be said now: what was said stays.
    dropped: Option<HashMap<u64, DroppedBy>>,
}

#[derive(Clone, Copy)]
struct Member<'a> {
    process: &'a Process,
    rank: Rank,
}

/// Compares the ranks of a replica. `process` finds what is known of one.
pub(in crate::request) fn compare<'a>(
    replica: &Replica,
    process: impl Fn(ProcessKey) -> Option<&'a Process>,
    now: Monotonic,
) -> Vec<Comparison> {
    let found = replica.seen.iter().map(|(key, rank)| Some(Member { process: process(*key)?, rank: *rank }));
    let Some(members) = found.collect::<Option<Vec<_>>>() else { return Vec::new() };
    let paused = members.iter().any(|member| member.process.state.paused);
    // Of those that are not all seen nothing is said, also not what was said before; while one is paused or in doubt that stays.
    let is_whole = replica.missing.is_empty();
    let is_known = members.iter().all(|member| member.process.state.sync == Sync::Complete);
    let compares = is_whole && is_known && !paused;
    let mut differ = None;
    let mut comparisons: Vec<Comparison> = members
        .iter()
        .map(|member| {
            let dropped = compares.then(|| member.dropped(&members, replica.stages, now));
            for (serial, by) in dropped.iter().flatten() {
                let difference = member.difference(*serial, by);
                let settled_first = |it: &Difference| (!it.is_settled, *it);
                differ = differ.into_iter().chain([difference]).min_by_key(settled_first);
            }
            let others = members.iter().filter(|other| other.process.key != member.process.key);
            let ranks = Ranks {
                rank: member.rank,
                others: others.map(Member::as_other).collect(),
                first_missing: replica.missing.first().copied(),
                missing: u32::try_from(replica.missing.len()).unwrap_or(u32::MAX),
                nodes: replica.nodes,
                paused,
                differ: member.process.state.ranks.as_ref().and_then(|ranks| ranks.differ).filter(|_| is_whole),
            };
            let dropped = if is_whole { dropped } else { Some(HashMap::new()) };
            Comparison { process: member.process.key, ranks, held: member.held(&members), dropped }
        })
        .collect();
    if compares {
        comparisons.iter_mut().for_each(|comparison| comparison.ranks.differ = differ);
    }
    comparisons
}

impl Member<'_> {
    fn as_other(&self) -> OtherRank {
        let Process { key, state, .. } = self.process;
        let is_known = state.sync == Sync::Complete;
        OtherRank { process: *key, rank: self.rank, is_known, turned: state.turned }
    }

    /// Its requests that another rank has dropped.
    fn dropped(&self, members: &[Self], stages: u32, now: Monotonic) -> HashMap<u64, DroppedBy> {
        let is_old = |request: &&Request| request.entered.is_some_and(|entered| now.since(entered) >= LOOKED_AT_AFTER);
        let of = |request: &Request| {
            let others = members.iter().filter(|other| other.process.key != self.process.key);
            others.filter_map(|other| self.dropped_by(request, other, stages)).min_by_key(|by| (!by.is_reduced, by.at))
        };
        self.queue().filter(is_old).filter_map(|request| Some((request.serial, of(request)?))).collect()
    }

    fn dropped_by(&self, request: &Request, other: &Self, stages: u32) -> Option<DroppedBy> {
        let has_it = other.process.rooms.get(&request.room).is_some_and(|room| !room.senders.is_empty());
        let before = request.dropped_by.as_deref().filter(|before| before.process == other.process.key);
        if has_it {
            return None;
        }
        let is_reduced = self.rank.is_reduced_with(other.rank);
        let drops_within = if is_reduced { REDUCED_DROP_WITHIN } else { STAGES_DROP_WITHIN * u64::from(stages) };
        before.copied().or_else(|| {
            let at = other.process.left.after(request.room, request.created)?;
            let passes = self.process.state.passes;
            Some(DroppedBy { at, process: other.process.key, rank: other.rank, is_reduced, passes, drops_within })
        })
    }

    fn difference(&self, serial: u64, by: &DroppedBy) -> Difference {
        let Process { requests, state, .. } = self.process;
        let room = requests.get(&serial).map_or(Room::OutOfRange, |request| request.room);
        let is_settled = by.is_settled(state.passes, state.turned);
        Difference { at: by.at, room, is_reduced: by.is_reduced, is_settled }
    }

    /// Its requests that are over, and not on another rank.
    fn held(&self, members: &[Self]) -> HashMap<u64, HeldBy> {
        let is_over = |request: &&Request| request.phase.is_some_and(Phase::is_terminal);
        self.queue()
            .filter(is_over)
            .filter_map(|request| Some((request.serial, held_by(request.room, members)?)))
            .collect()
    }

    /// Requests in its queue that can be told by their room.
    fn queue(&self) -> impl Iterator<Item = &Request> {
        let is_told_by_room = |request: &&Request| self.only_one_of(request.room).is_some();
        self.process.requests.values().map(Box::as_ref).filter(|request| request.is_inflight()).filter(is_told_by_room)
    }

    fn only_one_of(&self, room: Room) -> Option<&Request> {
        let known = self.process.rooms.get(&room).filter(|_| !matches!(room, Room::OutOfRange))?;
        let [serial] = known.senders[..] else { return None };
        self.process.requests.get(&serial).map(Box::as_ref)
    }
}

/// The rank on which the request of a room has not been over for longest.
fn held_by(room: Room, members: &[Member<'_>]) -> Option<HeldBy> {
    let known = members.iter().filter(|member| member.process.state.sync == Sync::Complete);
    let of_room: Vec<(&Member<'_>, &Request)> =
        known.filter_map(|member| Some((member, member.only_one_of(room)?))).collect();
    let is_over = |request: &Request| request.phase.is_some_and(Phase::is_terminal);
    let over_on = of_room.iter().filter(|(_, request)| is_over(request)).count();
    let others = of_room.iter().filter(|(_, request)| !is_over(request));
    let (member, request) = others.min_by_key(|(member, request)| (request.phase_since, member.process.key))?;
    Some(HeldBy {
        request: member.process.request_key(request.serial),
        rank: member.rank,
        phase: request.phase,
        since: request.phase_since,
        over_on: u32::try_from(over_on).unwrap_or(u32::MAX),
        cause: None,
    })
}

impl Process {
    /// Whether its server says that it has more ranks than this one.
    pub(super) fn has_other_ranks(&self) -> bool {
        let sizes = |hello: &crate::event::Hello| [hello.tp, hello.cp, hello.pp];
        self.state.hello.as_deref().is_some_and(|hello| sizes(hello).into_iter().flatten().any(|size| size > 1))
    }

    /// Senders whose requests are not in the queue. A batch prefills such: their senders are made before it runs, and they enter
    /// the queue after.
    fn to_prefill(&self) -> usize {
        self.requests.len().saturating_sub(self.state.inflight as usize)
    }

    /// Takes over whether a batch may be running.
    pub(in crate::request) fn count_to_prefill(&mut self) {
        self.state.to_prefill = u32::try_from(self.to_prefill()).unwrap_or(u32::MAX);
    }

    /// Takes over how it compares with the other ranks.
    pub(in crate::request) fn compared(&mut self, comparison: Comparison) {
        let Comparison { ranks, mut held, dropped, .. } = comparison;
        self.state.ranks = Some(Box::new(ranks));
        for request in self.requests.values_mut() {
            request.held_by = held.remove(&request.serial).map(Box::new);
            if let Some(dropped) = &dropped {
                request.dropped_by = dropped.get(&request.serial).map(|by| Box::new(*by));
            }
        }
    }

    /// It has no other ranks, or none that could be told apart.
    pub(in crate::request) fn is_alone(&mut self) {
        if self.state.ranks.take().is_some() {
            for request in self.requests.values_mut() {
                (request.held_by, request.dropped_by) = (None, None);
            }
        }
    }

    /// Its requests that another rank holds up, with the request there.
    pub(in crate::request) fn held(&self) -> impl Iterator<Item = (u64, &HeldBy)> {
        self.requests.values().filter_map(|request| Some((request.serial, request.held_by.as_deref()?)))
    }

    /// Takes over what is diagnosed of the request that holds this one up.
    pub(in crate::request) fn held_for(&mut self, serial: u64, cause: Cause) {
        if let Some(held) = self.requests.get_mut(&serial).and_then(|request| request.held_by.as_deref_mut()) {
            held.cause = Some(cause);
        }
    }
}
