//! The ranks of a server side by side, as `/status` shows them.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    core::Core,
    event::{Phase, ProcessKey, Room, clock::Monotonic},
    request::{
        Sync,
        rank::{Rank, Replica},
        tracker::{Tracked, Tracker},
    },
};

/// Rooms, and missing ranks, that are listed of a replica; the rest is counted.
const MAX_LISTED: usize = 20;

/// The ranks of one data-parallel replica, which drop the same requests.
#[derive(Clone, Debug, Serialize)]
pub struct ReplicaStatus {
    /// Those that are seen.
    pub ranks: Vec<RankStatus>,
    /// Those that are not: nothing is said of what the others have dropped then.
    pub missing: Vec<Rank>,
    /// Missing ranks beyond those.
    pub missing_not_listed: usize,
    /// Over how many nodes the server is spread, where it is.
    pub nodes: Option<u32>,
    /// The first room that one rank has dropped and another one has.
    pub differs_on: Option<Room>,
    /// Rooms in a rank's inflight queue that not every rank polls alike, or has; the oldest first.
    pub rooms: Vec<RoomStatus>,
    /// Rooms beyond those.
    pub rooms_not_listed: usize,
}

/// One rank.
#[derive(Clone, Debug, Serialize)]
pub struct RankStatus {
    /// Which.
    pub rank: Rank,
    /// Its process.
    pub pid: u32,
    /// Whether every live request is known.
    pub synchronised: bool,
    /// Whether generation is paused.
    pub paused: bool,
    /// Requests in its inflight queue, by what `poll()` returned last.
    pub inflight: BTreeMap<&'static str, usize>,
    /// How long ago its loop last showed that it turns, in seconds.
    pub turned_seconds_ago: Option<f64>,
}

/// A room that the ranks see differently.
#[derive(Clone, Debug, Serialize)]
pub struct RoomStatus {
    /// Which.
    pub room: Room,
    /// For how long it has been in a queue, in seconds.
    pub inflight_seconds: f64,
    /// What `poll()` returned last, by rank; `absent` where a rank has no request of the room.
    pub phases: BTreeMap<String, &'static str>,
}

impl ReplicaStatus {
    /// What is known of a replica's ranks.
    pub fn of(replica: &Replica, core: &Core, now: Monotonic) -> Self {
        let tracker = core.tracker();
        let first = replica.seen.first().and_then(|(key, _)| tracker.server(*key));
        let differ = first.and_then(|state| state.ranks.as_ref()?.differ);
        let mut rooms = rooms(replica, tracker, now);
        let rooms_not_listed = rooms.len().saturating_sub(MAX_LISTED);
        rooms.truncate(MAX_LISTED);
        Self {
            ranks: replica.seen.iter().map(|(key, rank)| RankStatus::of(*key, *rank, tracker, now)).collect(),
            missing: replica.missing.iter().take(MAX_LISTED).copied().collect(),
            missing_not_listed: replica.missing.len().saturating_sub(MAX_LISTED),
            nodes: replica.nodes,
            differs_on: differ.map(|differ| differ.room),
            rooms,
            rooms_not_listed,
        }
    }
}

impl RankStatus {
    fn of(key: ProcessKey, rank: Rank, tracker: &Tracker, now: Monotonic) -> Self {
        let state = tracker.server(key);
        let mut inflight = BTreeMap::new();
        for tracked in tracker.requests().filter(|it| it.key.process == key && it.request.is_inflight()) {
            *inflight.entry(phase(&tracked)).or_default() += 1;
        }
        let turned = state.and_then(|state| state.turned);
        Self {
            rank,
            pid: key.pid,
            synchronised: state.is_some_and(|state| state.sync == Sync::Complete),
            paused: state.is_some_and(|state| state.paused),
            inflight,
            turned_seconds_ago: turned.map(|turned| now.since(turned).as_secs_f64()),
        }
    }
}

fn phase(tracked: &Tracked<'_>) -> &'static str {
    tracked.request.phase.map_or("NotPolled", Phase::name)
}

fn rooms(replica: &Replica, tracker: &Tracker, now: Monotonic) -> Vec<RoomStatus> {
    let ranks: BTreeMap<ProcessKey, Rank> = replica.seen.iter().copied().collect();
    let mut rooms: BTreeMap<Room, (BTreeMap<Rank, &'static str>, Option<Monotonic>)> = BTreeMap::new();
    for tracked in tracker.requests() {
        let Some(rank) = ranks.get(&tracked.key.process) else { continue };
        let (phases, entered) = rooms.entry(tracked.request.room).or_default();
        phases.insert(*rank, phase(&tracked));
        *entered = [*entered, tracked.request.entered].into_iter().flatten().min();
    }
    let mut differing: Vec<(Monotonic, RoomStatus)> = rooms
        .into_iter()
        .filter_map(|(room, (mut phases, entered))| {
            let entered = entered?;
            ranks.values().for_each(|rank| {
                phases.entry(*rank).or_insert("absent");
            });
            let first = phases.values().next();
            let differs = phases.values().any(|phase| Some(phase) != first);
            let inflight_seconds = now.since(entered).as_secs_f64();
            let phases = || phases.into_iter().map(|(rank, phase)| (rank.to_string(), phase)).collect();
            differs.then(|| (entered, RoomStatus { room, inflight_seconds, phases: phases() }))
        })
        .collect();
    differing.sort_by_key(|(entered, it)| (*entered, it.room));
    differing.into_iter().map(|(_, room)| room).collect()
}
