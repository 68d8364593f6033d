//! Servers of several ranks whose events are made up. Times are in seconds.

use super::{cause_world::at, *};
use crate::{
    core::{Core, Effects, Input, Pace},
    event::{Backend, Body, Event, Hello, LeaveReason, Phase, ProcessKey, Room},
    request::{RequestKey, ResyncReason, rank::Rank, tracker::Limits},
    rule::RuleSet,
    verdict::ServerIdentity,
};

pub(super) const ROOM: Room = Room::Number(77);
pub(super) const OTHER: Room = Room::Number(78);

pub(super) fn rank(number: u32) -> ProcessKey {
    ProcessKey { pid: 10 + number, start: 1 }
}

/// A group that ranks belong to: all of a server's are in one.
#[derive(Clone, Copy)]
pub(super) enum Group {
    Tp,
    Cp,
    Pp,
}

impl Group {
    pub(super) fn hello(self, size: u32, number: u32) -> Hello {
        let hello = Hello { tp: Some(1), cp: Some(1), pp: Some(1), ..Hello::default() };
        match self {
            Self::Tp => Hello { tp: Some(size), tp_rank: Some(number), ..hello },
            Self::Cp => Hello { cp: Some(size), cp_rank: Some(number), ..hello },
            Self::Pp => Hello { pp: Some(size), pp_rank: Some(number), ..hello },
        }
    }

    pub(super) fn rank(self, number: u32) -> Rank {
        match self {
            Self::Tp => Rank { tp: Some(number), ..Rank::default() },
            Self::Cp => Rank { cp: Some(number), ..Rank::default() },
            Self::Pp => Rank { pp: Some(number), ..Rank::default() },
        }
    }
}

/// Schedulers with a parent, each with its rank.
pub(super) struct Ranks(pub(super) Core);

impl Ranks {
    /// A server of so many ranks, of which these are seen.
    pub(super) fn new(group: Group, size: u32, seen: &[u32]) -> Self {
        Self::with_parents(group, size, seen, &[9])
    }

    pub(super) fn with_parents(group: Group, size: u32, seen: &[u32], parents: &[u32]) -> Self {
        let told = |number| group.hello(size, number);
        Self::told(seen.iter().map(|number| (*number, told(*number))), parents)
    }

    pub(super) fn told(seen: impl Iterator<Item = (u32, Hello)>, parents: &[u32]) -> Self {
        let mut ranks = Self(Core::new(RuleSet::default(), Limits { requests: 100, transfers: 100 }));
        for ((number, hello), parent) in seen.zip(parents.iter().cycle()) {
            let process = rank(number);
            let parent = Some(ProcessKey { pid: *parent, start: 1 });
            let identity = Box::new(ServerIdentity { parent, ..ServerIdentity::default() });
            ranks.tell(Input::Attach { process, identity, clock_offset: 0 });
            ranks.tell(Input::Asked { process, epoch: 1, why: ResyncReason::Attached, at: at(0.0) });
            ranks.see(number, 0.0, Body::Hello(Box::new(hello)));
            ranks.see(number, 0.0, Body::StateBegin { epoch: 1 });
            ranks.see(number, 0.0, Body::StateEnd { epoch: 1, entries: 0 });
        }
        ranks
    }

    /// The same with a request that is in the queue of each since 1.
    pub(super) fn with_request(group: Group, size: u32, seen: &[u32]) -> Self {
        let mut ranks = Self::new(group, size, seen);
        for number in seen {
            ranks.open(*number, 1, ROOM);
        }
        ranks
    }

    pub(super) fn open(&mut self, number: u32, sender: u64, room: Room) {
        self.see(number, 1.0, Body::Open { room, sender, backend: Backend::Nixl });
        self.see(number, 1.0, Body::Phase { room, sender, old: None, new: Some(Phase::Transferring) });
        self.see(number, 1.0, Body::Send { room, sender, pages: 1, last: true });
        self.see(number, 1.0, Body::Enter { room, sender, rid: None, queue_length: 1 });
    }

    pub(super) fn tell(&mut self, input: Input) {
        self.0.apply(input, &mut Effects::default());
    }

    pub(super) fn see(&mut self, number: u32, seconds: f64, body: Body) {
        let event = Event { pid: rank(number).pid, tid: 1, at: at(seconds), sequence: 1, detail_lost: false, body };
        self.tell(Input::Event(event));
    }

    pub(super) fn poll(&mut self, number: u32, seconds: f64, new: Phase) {
        let old = Some(Phase::Transferring);
        self.see(number, seconds, Body::Phase { room: ROOM, sender: 1, old, new: Some(new) });
    }

    /// A request that is not prefilled yet.
    pub(super) fn make(&mut self, number: u32, sender: u64, room: Room) {
        self.see(number, 1.0, Body::Open { room, sender, backend: Backend::Nixl });
    }

    pub(super) fn leave(&mut self, number: u32, seconds: f64) {
        self.see(number, seconds, Body::Leave { room: ROOM, sender: 1, reason: LeaveReason::Failed });
    }

    /// Passes of these ranks, and a tick.
    pub(super) fn pass(&mut self, seconds: f64, turning: &[u32]) -> &mut Self {
        for number in turning {
            let of_rank = self.0.tracker().requests().filter(|it| it.key.process == rank(*number));
            let queue_length = of_rank.filter(|it| it.request.is_inflight()).count() as u32;
            self.see(*number, seconds, Body::Pass { queue_length, passes: 10 });
        }
        self.tell(Input::Tick { now: at(seconds), pace: Pace::As(None) });
        self
    }

    pub(super) fn diagnosis(&self, number: u32, sender: u64, seconds: f64) -> Diagnosis {
        let key = RequestKey { process: rank(number), serial: sender };
        self.0.diagnose(key, at(seconds)).expect("it is tracked").1
    }

    pub(super) fn cause(&self, number: u32, seconds: f64) -> Cause {
        self.diagnosis(number, 1, seconds).cause
    }

    pub(super) fn differ(&self) -> bool {
        self.0.tracker().servers().any(|(_, server)| server.ranks.as_ref().is_some_and(|ranks| ranks.differ.is_some()))
    }

    /// What is said of other ranks, and of batches, in the evidence for the first request of a rank.
    pub(super) fn says(&self, number: u32, seconds: f64) -> Vec<Fact> {
        let is_of_ranks = |fact: &Fact| {
            matches!(fact, Fact::Ranks { .. } | Fact::RanksDiffer { .. } | Fact::DroppedByRank { .. })
                || matches!(fact, Fact::BatchMayRun { .. } | Fact::NothingToPrefill)
        };
        self.diagnosis(number, 1, seconds).evidence.into_iter().map(|it| it.fact).filter(is_of_ranks).collect()
    }
}
