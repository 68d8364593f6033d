//! All traced processes and their requests: events in, changes out. Bounded; owned by the pipeline's one loop.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashMap},
    ops::Bound,
    time::Duration,
};

use super::{
    DeviceError, Request, RequestKey, ResyncReason, RoomState, ServerState,
    ends::Ends,
    gauge::Gauges,
    notified::Notified,
    process::{ALL_SERIALS, Applying, Process, differences},
    transfer::Observation,
    transfers::{Counted, Transfers},
};
use crate::{
    event::{Body, Event, FailureFlag, LeaveReason, Phase, ProcessKey, clock::Monotonic, native::Engine},
    record::codec::recorded,
};

/// What an event changed for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Its sender was created.
    Opened,
    /// A resynchronisation told of it.
    Resynchronised,
    /// `poll()` returned another phase than before.
    Phase {
        /// The phase before; nothing for the first poll.
        old: Option<Phase>,
        /// The phase since.
        new: Phase,
    },
    /// `abort()` was called.
    Aborted,
    /// `update_status(Failed)` was dropped.
    UpdateDropped,
    /// It entered the inflight queue.
    Entered,
    /// It left the inflight queue.
    Left(LeaveReason),
    /// The hook set a failure flag.
    Remedied(Option<FailureFlag>),
    /// It is over, or out of sight.
    Ended,
}

/// A change of one request.
#[derive(Clone, Debug)]
pub struct Change {
    /// Which.
    pub key: RequestKey,
    /// When.
    pub at: Monotonic,
    /// The server's thread that did it; 0 when the agent concluded it.
    pub tid: u32,
    /// What.
    pub step: Step,
    /// The request itself where it is not tracked any more.
    pub ended: Option<Box<Request>>,
}

/// Events that the tracker could not use, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unused {
    /// Events of a process that is not (or no longer) traced.
    pub unknown_process: u64,
    /// Events about a sender that the tracker does not know.
    pub unknown_sender: u64,
    /// Requests that were forgotten because there were too many.
    pub retired: u64,
    /// Rooms without a sender that were forgotten because there were too many: a handle of theirs may still be running.
    pub rooms_dropped: u64,
}

/// Why a process is not tracked any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parting {
    /// It has ended.
    Ended,
    /// It goes on, unseen.
    Unseen,
}

/// Everything that is known of the node's requests.
#[derive(Debug)]
pub struct Tracker {
    pub(super) processes: BTreeMap<u32, Process>,
    pub(super) ends: Ends,
    pub(super) notified: Notified,
    limits: Limits,
    unused: Unused,
}

/// How much is kept of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests; the oldest ones go first.
    pub requests: usize,
    /// Transfers; those that are not under way go first, and when all are, no further one is kept.
    pub transfers: usize,
}

recorded!(struct Tracker { processes, limits, ends, notified } else { unused: Unused::default() });
recorded!(struct Limits { requests, transfers });

/// A request with everything that a diagnosis needs.
#[derive(Clone, Copy, Debug)]
pub struct Tracked<'a> {
    /// Which.
    pub key: RequestKey,
    /// The request.
    pub request: &'a Request,
    /// Its room.
    pub room: &'a RoomState,
    /// Its server.
    pub server: &'a ServerState,
    /// Its server's transfers.
    pub transfers: &'a Transfers,
}

impl Tracker {
    /// A tracker that keeps so much per process.
    pub fn new(limits: Limits) -> Self {
        let (ends, notified) = (Ends::default(), Notified::default());
        Self { processes: BTreeMap::new(), ends, notified, limits, unused: Unused::default() }
    }

    /// Starts to track a process. `clock_offset` is its time namespace's offset of CLOCK_MONOTONIC in nanoseconds.
    pub fn attach(&mut self, key: ProcessKey, clock_offset: i64) {
        self.processes.insert(key.pid, Process::new(key, clock_offset, self.limits.transfers));
    }

    /// Forgets a process; what it had is reported as ended.
    pub fn detach(&mut self, key: ProcessKey, why: Parting, at: Monotonic, changes: &mut Vec<Change>) {
        if self.processes.get(&key.pid).is_some_and(|process| process.key() == key)
            && let Some(process) = self.processes.remove(&key.pid)
        {
            if why == Parting::Ended {
                self.ends.ended(&process, at);
            }
            self.notified.forget(key);
            process.end(at, changes);
        }
    }

    /// Applies one event and appends what it changed.
    pub fn apply(&mut self, event: &Event, changes: &mut Vec<Change>) {
        let Some(process) = self.processes.get_mut(&event.pid) else {
            self.unused.unknown_process += 1;
            return;
        };
        if let Body::Native(native) = &event.body {
            self.notified.apply(native, process.key(), event.at);
        }
        let mut applying = Applying {
            at: event.at,
            tid: event.tid,
            changes,
            unused: &mut self.unused,
            max_requests: self.limits.requests,
        };
        process.apply(event, &mut applying);
    }

    /// Says that events of a process are missing.
    pub fn needs_resync(&mut self, pid: u32, reason: ResyncReason) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.needs_resync(reason);
        }
    }

    /// The processes to ask for their state now, with the reason. A question that was not answered within `patience`
    /// counts as not asked.
    pub fn to_ask(&self, now: Monotonic, patience: Duration) -> Vec<(ProcessKey, ResyncReason)> {
        self.processes.values().filter_map(|process| Some((process.key(), process.to_ask(now, patience)?))).collect()
    }

    /// Says that a process was asked for its state.
    pub fn asked(&mut self, key: ProcessKey, epoch: u64, reason: ResyncReason, at: Monotonic) {
        if let Some(process) = self.processes.get_mut(&key.pid) {
            process.asked(epoch, reason, at);
        }
    }

    /// Says that each transfer of a process is seen from now on, and of which engine; or (`None`) that not.
    pub fn watch(&mut self, key: ProcessKey, engine: Option<Engine>, at: Monotonic) {
        if let Some(process) = self.process_mut(key) {
            process.watch(engine, at);
        }
    }

    /// Says that what was seen of a process's transfers until `at` may have gaps.
    pub fn native_lost(&mut self, key: ProcessKey, at: Monotonic) {
        if let Some(process) = self.process_mut(key) {
            process.native_lost(at);
        }
    }

    /// Looks whether the ranks of each of these servers have dropped the same requests. A group is every rank of a server:
    /// of one that is not all seen nothing is said.
    pub fn compare_ranks(&mut self, groups: &[Vec<ProcessKey>], now: Monotonic) {
        for process in self.processes.values_mut() {
            if !groups.iter().flatten().any(|key| *key == process.key()) {
                process.ranks_not_seen();
            }
        }
        for group in groups {
            let ranks: Option<Vec<&Process>> = group.iter().map(|key| self.process(*key)).collect();
            let Some(differences) = ranks.and_then(|ranks| differences(&ranks, now)) else { continue };
            for key in group {
                if let Some(process) = self.process_mut(*key) {
                    process.ranks_differ(&differences);
                }
            }
        }
    }

    fn process(&self, key: ProcessKey) -> Option<&Process> {
        self.processes.get(&key.pid).filter(|process| process.key() == key)
    }

    /// Forgets failures of rooms without senders, and unsafe releases, that are older than `before`.
    pub fn prune(&mut self, before: Monotonic) {
        self.processes.values_mut().for_each(|process| process.prune(before));
    }

    /// What was counted of a process's transfers since the last time.
    pub fn take_counted(&mut self, key: ProcessKey) -> Counted {
        self.process_mut(key).map(Process::take_counted).unwrap_or_default()
    }

    /// Takes over how often, in a look, a process asked for the status of each handle.
    pub fn looked(&mut self, key: ProcessKey, polls: &HashMap<u64, u64>, began: Monotonic, at: Monotonic) {
        if let Some(process) = self.process_mut(key) {
            process.looked(polls, began, at);
        }
    }

    /// Takes over what a device that a process has open counted.
    pub fn device_error(&mut self, key: ProcessKey, error: DeviceError) {
        if let Some(process) = self.process_mut(key) {
            process.device_error(error);
        }
    }

    /// Takes over what a server's own page said of its queues when it was read.
    pub fn server_metrics(&mut self, key: ProcessKey, gauges: Gauges, at: Monotonic) {
        if let Some(process) = self.process_mut(key) {
            process.server_metrics(gauges, at);
        }
    }

    /// Takes over what was read, at `at`, of a transfer in a server's memory.
    pub fn observed(&mut self, key: ProcessKey, seen: Observation, at: Monotonic) {
        if let Some(process) = self.process_mut(key) {
            process.observed(seen, at);
        }
    }

    pub(super) fn process_mut(&mut self, key: ProcessKey) -> Option<&mut Process> {
        self.processes.get_mut(&key.pid).filter(|process| process.key() == key)
    }

    /// The transfers of a process.
    pub fn transfers(&self, key: ProcessKey) -> Option<&Transfers> {
        let process = self.processes.get(&key.pid)?;
        (process.key() == key).then(|| process.transfers())
    }

    /// One request.
    pub fn get(&self, key: RequestKey) -> Option<Tracked<'_>> {
        let process = self.processes.get(&key.process.pid)?;
        (process.key() == key.process).then(|| process.tracked(key.serial)).flatten()
    }

    /// What a process said of itself, and how well it is known.
    pub fn server(&self, key: ProcessKey) -> Option<&ServerState> {
        let process = self.processes.get(&key.pid)?;
        (process.key() == key).then(|| process.state())
    }

    /// Every tracked process.
    pub fn servers(&self) -> impl Iterator<Item = (ProcessKey, &ServerState)> {
        self.processes.values().map(|process| (process.key(), process.state()))
    }

    /// One request of those that are [judged](Tracker::judged).
    pub fn judge(&self, key: RequestKey, now: Monotonic) -> Option<Tracked<'_>> {
        let process = self.processes.get(&key.process.pid).filter(|process| process.key() == key.process)?;
        process.judged(now, (Bound::Included(key.serial), Bound::Included(key.serial))).next()
    }

    /// The keys of the requests that are [judged](Tracker::judged), in order.
    pub fn judged_keys(&self, now: Monotonic) -> impl Iterator<Item = RequestKey> {
        self.processes.values().flat_map(move |process| process.judged_keys(now))
    }

    /// The requests that are [judged](Tracker::judged), in the order of their keys, from the one after `reached` on, round
    /// to that one.
    pub fn judged_after(&self, reached: Option<RequestKey>, now: Monotonic) -> impl Iterator<Item = Tracked<'_>> {
        let after = self.processes.values().flat_map(move |process| {
            let first = match reached.map(|reached| (process.key().cmp(&reached.process), reached.serial)) {
                Some((Ordering::Less, _)) => Bound::Excluded(u64::MAX),
                Some((Ordering::Equal, serial)) => Bound::Excluded(serial),
                Some((Ordering::Greater, _)) | None => Bound::Unbounded,
            };
            process.judged(now, (first, Bound::Unbounded))
        });
        let others = self.processes.values().flat_map(move |process| {
            let last = match reached.map(|reached| (process.key().cmp(&reached.process), reached.serial)) {
                Some((Ordering::Less, _)) => Bound::Unbounded,
                Some((Ordering::Equal, serial)) => Bound::Included(serial),
                Some((Ordering::Greater, _)) | None => Bound::Excluded(0),
            };
            process.judged(now, (Bound::Unbounded, last))
        });
        after.chain(others)
    }

    /// Every live request, in the order of their keys.
    pub fn requests(&self) -> impl Iterator<Item = Tracked<'_>> {
        self.processes.values().flat_map(Process::all)
    }

    /// How much is kept, in things of some hundred bytes: what grows with what a file or a server says.
    pub fn weight(&self) -> usize {
        self.processes.values().map(Process::weight).sum()
    }

    /// Every live request, and for a minute each one that gave its pages back while a transfer of it was under way: what
    /// rules are about.
    pub fn judged(&self, now: Monotonic) -> impl Iterator<Item = Tracked<'_>> {
        self.processes.values().flat_map(move |process| process.judged(now, ALL_SERIALS))
    }

    /// Events that could not be used so far.
    pub fn unused(&self) -> Unused {
        self.unused
    }
}

#[cfg(test)]
#[path = "tracker_tests.rs"]
mod tests;
