//! What the ranks of one server have dropped, compared. Only what was seen counts: a room that left one rank's queue, by the
//! hook's mark, while another rank has it in its own.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use super::super::{DroppedBy, Sync};
use super::Process;
use crate::{
    event::{ProcessKey, Room, clock::Monotonic},
    record::codec::recorded,
};

/// A request younger than this, in the queue, is not looked at: healthy ones are gone by then.
const LOOKED_AT_AFTER: Duration = Duration::from_secs(2);
/// Rooms that a rank remembers: what left in a few seconds.
const MAX_LEFT: usize = 4_096;

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

/// Requests that one rank of a group has and another one dropped, by rank and sender.
#[derive(Debug, Default)]
pub(in crate::request) struct Differences {
    by_rank: HashMap<ProcessKey, HashMap<u64, DroppedBy>>,
    first: Option<(Monotonic, Room)>,
}

/// The differences of these ranks; nothing while one of them is not completely known: nothing changes then.
pub(in crate::request) fn differences(ranks: &[&Process], now: Monotonic) -> Option<Differences> {
    if ranks.iter().any(|rank| rank.state.sync != Sync::Complete) {
        return None;
    }
    let mut differences = Differences::default();
    for rank in ranks {
        let mut dropped = HashMap::new();
        for request in rank.requests.values() {
            let is_old = request.entered.is_some_and(|entered| now.since(entered) >= LOOKED_AT_AFTER);
            let is_alone = rank.rooms.get(&request.room).is_some_and(|room| room.senders.len() == 1);
            if !is_old || !is_alone || !request.is_inflight() || matches!(request.room, Room::OutOfRange) {
                continue;
            }
            let others = ranks.iter().filter(|other| other.key != rank.key);
            let mut dropped_by = others.filter_map(|other| {
                let has_it = other.rooms.get(&request.room).is_some_and(|room| !room.senders.is_empty());
                let before =
                    request.dropped_by.as_deref().filter(|before| before.rank == other.key).map(|before| before.at);
                let at = before.or_else(|| other.left.after(request.room, request.created)).filter(|_| !has_it)?;
                Some(DroppedBy { at, rank: other.key })
            });
            if let Some(by) = dropped_by.next() {
                dropped.insert(request.serial, by);
                let first = differences.first.get_or_insert((by.at, request.room));
                *first = (*first).min((by.at, request.room));
            }
        }
        differences.by_rank.insert(rank.key, dropped);
    }
    Some(differences)
}

impl Process {
    /// Whether its server says that it has more ranks than this one.
    pub(super) fn has_other_ranks(&self) -> bool {
        self.state.hello.as_deref().is_some_and(|hello| [hello.tp, hello.pp].into_iter().flatten().any(|size| size > 1))
    }

    /// Takes over what differs between the ranks of its server.
    pub(in crate::request) fn ranks_differ(&mut self, differences: &Differences) {
        if self.state.ranks_differ.is_none() && differences.first.is_none() {
            return;
        }
        self.state.ranks_differ = differences.first;
        let dropped = differences.by_rank.get(&self.key);
        for request in self.requests.values_mut() {
            request.dropped_by = dropped.and_then(|dropped| dropped.get(&request.serial)).map(|by| Box::new(*by));
        }
    }

    /// Not every rank of its server is seen: nothing can be said.
    pub(in crate::request) fn ranks_not_seen(&mut self) {
        self.ranks_differ(&Differences::default());
    }
}
