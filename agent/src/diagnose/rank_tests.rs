//! Servers of several ranks, and what they have dropped. Times are in seconds.

use super::{cause_world::at, *};
use crate::{
    core::{Core, Effects, Input, Pace},
    event::{Backend, Body, Event, Hello, LeaveReason, Phase, ProcessKey, Room},
    request::{
        RequestKey, ResyncReason,
        tracker::{Limits, Parting},
    },
    rule::RuleSet,
    verdict::ServerIdentity,
};

const ROOM: Room = Room::Number(77);

fn rank(number: u32) -> ProcessKey {
    ProcessKey { pid: 10 + number, start: 1 }
}

/// Schedulers with a parent, each with its stage.
struct Ranks(Core);

impl Ranks {
    /// A server of so many stages, of which these are seen.
    fn new(stages: u32, seen: &[u32]) -> Self {
        Self::with_parents(stages, seen, &[9])
    }

    /// The same with a request that is in the queue of each since 1, of a tensor-parallel group.
    fn of_group(size: u32, seen: &[u32]) -> Self {
        let mut ranks = Self::with_request(size, seen);
        for number in seen {
            let (tp, pp, tp_rank, pp_rank, cp) = (Some(size), Some(1), Some(*number), Some(0), Some(1));
            ranks.see(*number, 1.0, Body::Hello(Box::new(Hello { tp, tp_rank, pp, pp_rank, cp, ..Hello::default() })));
        }
        ranks
    }

    fn with_parents(stages: u32, seen: &[u32], parents: &[u32]) -> Self {
        let mut ranks = Self(Core::new(RuleSet::default(), Limits { requests: 100, transfers: 100 }));
        for (number, parent) in seen.iter().zip(parents.iter().cycle()) {
            let process = rank(*number);
            let parent = Some(ProcessKey { pid: *parent, start: 1 });
            let identity = Box::new(ServerIdentity { parent, ..ServerIdentity::default() });
            ranks.tell(Input::Attach { process, identity, clock_offset: 0 });
            ranks.tell(Input::Asked { process, epoch: 1, why: ResyncReason::Attached, at: at(0.0) });
            let (tp, pp) = (Some(1), Some(stages));
            let (tp_rank, pp_rank, cp) = (Some(0), Some(*number), Some(1));
            let hello = Hello { tp, tp_rank, pp, pp_rank, cp, ..Hello::default() };
            ranks.see(*number, 0.0, Body::Hello(Box::new(hello)));
            ranks.see(*number, 0.0, Body::StateBegin { epoch: 1 });
            ranks.see(*number, 0.0, Body::StateEnd { epoch: 1, entries: 0 });
        }
        ranks
    }

    /// The same with a request that is in the queue of each since 1.
    fn with_request(stages: u32, seen: &[u32]) -> Self {
        let mut ranks = Self::new(stages, seen);
        for number in seen {
            ranks.open(*number, 1, ROOM);
        }
        ranks
    }

    fn open(&mut self, number: u32, sender: u64, room: Room) {
        self.see(number, 1.0, Body::Open { room, sender, backend: Backend::Nixl });
        self.see(number, 1.0, Body::Phase { room, sender, old: None, new: Some(Phase::Transferring) });
        self.see(number, 1.0, Body::Send { room, sender, pages: 1, last: true });
        self.see(number, 1.0, Body::Enter { room, sender, rid: None, queue_length: 1 });
    }

    fn tell(&mut self, input: Input) {
        self.0.apply(input, &mut Effects::default());
    }

    fn see(&mut self, number: u32, seconds: f64, body: Body) {
        let event = Event { pid: rank(number).pid, tid: 1, at: at(seconds), sequence: 1, detail_lost: false, body };
        self.tell(Input::Event(event));
    }

    fn leave(&mut self, number: u32, seconds: f64) {
        self.see(number, seconds, Body::Leave { room: ROOM, sender: 1, reason: LeaveReason::Failed });
    }

    /// Passes of these ranks, and a tick.
    fn pass(&mut self, seconds: f64, turning: &[u32]) -> &mut Self {
        for number in turning {
            let of_rank = self.0.tracker().requests().filter(|it| it.key.process == rank(*number));
            let queue_length = of_rank.filter(|it| it.request.is_inflight()).count() as u32;
            self.see(*number, seconds, Body::Pass { queue_length, passes: 10 });
        }
        self.tell(Input::Tick { now: at(seconds), pace: Pace::As(None) });
        self
    }

    fn diagnosis(&self, number: u32, sender: u64, seconds: f64) -> Diagnosis {
        let key = RequestKey { process: rank(number), serial: sender };
        self.0.diagnose(key, at(seconds)).expect("it is tracked").1
    }

    fn cause(&self, number: u32, seconds: f64) -> Cause {
        self.diagnosis(number, 1, seconds).cause
    }
}

#[test]
fn ranks_diverge_once_one_has_polled_for_five_seconds_what_another_one_dropped() {
    let mut ranks = Ranks::with_request(2, &[0, 1]);
    ranks.leave(0, 10.0);
    assert_eq!(ranks.pass(10.9, &[0, 1]).cause(1, 10.9), Cause::Unknown, "stages drop a microbatch apart");
    assert_eq!(ranks.pass(14.9, &[0, 1]).cause(1, 14.9), Cause::Unknown);
    let diagnosis = ranks.pass(15.0, &[0, 1]).diagnosis(1, 1, 15.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::RankDivergence, Confidence::High));
    super::cause_world::assert_says(&diagnosis, &[Fact::DroppedByRank { pid: 10 }]);
    ranks.leave(1, 16.0);
    ranks.pass(17.0, &[0, 1]);
    assert!(ranks.0.tracker().servers().all(|(_, server)| server.ranks_differ.is_none()), "they agree again");
}

#[test]
fn ranks_that_drop_the_same_a_moment_apart_do_not_diverge() {
    let mut ranks = Ranks::with_request(2, &[0, 1]);
    ranks.leave(0, 10.0);
    ranks.pass(10.5, &[0, 1]).leave(1, 10.9);
    assert_eq!(ranks.pass(60.0, &[0, 1]).0.tracker().requests().count(), 0);
}

#[test]
fn a_request_that_another_rank_has_not_prefilled_yet_is_no_divergence() {
    let mut ranks = Ranks::new(2, &[0, 1]);
    ranks.open(0, 1, ROOM);
    ranks.see(1, 1.0, Body::Open { room: ROOM, sender: 1, backend: Backend::Nixl });
    assert_eq!(ranks.pass(300.0, &[0, 1]).cause(0, 300.0), Cause::Unknown);
    let mut behind = Ranks::new(2, &[0, 1]);
    behind.open(0, 1, ROOM);
    assert_eq!(behind.pass(300.0, &[0, 1]).cause(0, 300.0), Cause::Unknown, "nobody saw the other one have it");
}

#[test]
fn a_collective_hang_with_differing_queues_is_a_divergence_of_every_request_and_no_stalled_loop() {
    let mut ranks = Ranks::with_request(2, &[0, 1]);
    ranks.open(0, 2, Room::Number(78));
    ranks.open(1, 2, Room::Number(78));
    ranks.pass(9.9, &[0, 1]).leave(0, 10.0);
    ranks.pass(11.0, &[0, 1]);
    for seconds in [20.0, 40.0, 70.0] {
        assert_eq!(ranks.pass(seconds, &[]).cause(1, seconds), Cause::Unknown, "a stage may compile a kernel");
    }
    ranks.pass(71.0, &[]);
    assert_eq!(ranks.cause(1, 71.0), Cause::RankDivergence);
    for number in [0, 1] {
        let of_other = ranks.diagnosis(number, 2, 71.0);
        assert_eq!(of_other.cause, Cause::RankDivergence);
        super::cause_world::assert_says(&of_other, &[Fact::RanksDiffer { room: ROOM }]);
    }
}

#[test]
fn a_stage_that_has_made_no_pass_since_another_one_dropped_a_request_may_be_compiling_and_drop_it_then() {
    let mut ranks = Ranks::with_request(2, &[0, 1]);
    ranks.pass(9.9, &[0, 1]).leave(0, 10.0);
    for seconds in [70.0, 200.0, 309.0] {
        assert_eq!(ranks.pass(seconds, &[]).cause(1, seconds), Cause::LoopStalled, "no pass: that is certain");
    }
    assert_eq!(ranks.pass(310.0, &[]).cause(1, 310.0), Cause::RankDivergence, "its watchdog would have ended it");
}

#[test]
fn ranks_of_a_tensor_parallel_group_that_hang_after_one_dropped_a_request_diverge_once_that_is_a_stall() {
    let mut ranks = Ranks::of_group(2, &[0, 1]);
    ranks.pass(9.9, &[0, 1]).leave(0, 10.0);
    assert_eq!(ranks.pass(69.0, &[]).cause(1, 69.0), Cause::Unknown);
    assert_eq!(ranks.pass(70.0, &[]).cause(1, 70.0), Cause::RankDivergence);
}

#[test]
fn a_hang_with_equal_queues_is_a_stalled_loop() {
    let mut ranks = Ranks::with_request(2, &[0, 1]);
    ranks.pass(9.9, &[0, 1]).pass(70.0, &[]);
    assert_eq!([ranks.cause(0, 70.0), ranks.cause(1, 70.0)], [Cause::LoopStalled; 2]);
}

#[test]
fn nothing_is_said_of_ranks_that_are_not_all_seen_or_not_all_known() {
    let mut unseen = Ranks::with_request(3, &[0, 1]);
    unseen.leave(0, 10.0);
    assert_eq!(unseen.pass(30.0, &[0, 1]).cause(1, 30.0), Cause::Unknown, "the third is on another node");

    let mut doubted = Ranks::with_request(2, &[0, 1]);
    doubted.tell(Input::Doubt { process: rank(0), why: ResyncReason::EventsLost });
    doubted.leave(0, 10.0);
    assert_eq!(doubted.pass(30.0, &[0, 1]).cause(1, 30.0), Cause::Unknown);

    let mut gone = Ranks::with_request(2, &[0, 1]);
    gone.leave(0, 10.0);
    assert_eq!(gone.pass(30.0, &[0, 1]).cause(1, 30.0), Cause::RankDivergence);
    gone.tell(Input::Detach { process: rank(0), why: Parting::Ended, at: at(31.0) });
    assert_eq!(gone.pass(32.0, &[1]).cause(1, 32.0), Cause::Unknown, "it died: that is what is to be seen");
}

#[test]
fn a_rank_that_has_the_room_again_has_not_dropped_it() {
    let mut ranks = Ranks::with_request(2, &[0, 1]);
    ranks.leave(0, 10.0);
    ranks.see(0, 10.1, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    assert_eq!(ranks.pass(30.0, &[0, 1]).cause(1, 30.0), Cause::Unknown, "retried there first");
}

#[test]
fn a_shared_room_says_nothing_of_ranks() {
    let mut ranks = Ranks::with_request(2, &[0, 1]);
    ranks.see(1, 2.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    ranks.leave(0, 10.0);
    assert_eq!(ranks.pass(30.0, &[0, 1]).cause(1, 30.0), Cause::Unknown);
}

#[test]
fn schedulers_of_other_servers_are_not_compared() {
    let mut ranks = Ranks::with_parents(2, &[0, 1], &[8, 9]);
    ranks.open(0, 1, ROOM);
    ranks.open(1, 1, ROOM);
    ranks.leave(0, 10.0);
    assert_eq!(ranks.pass(30.0, &[0, 1]).cause(1, 30.0), Cause::Unknown, "a router may use a room on both");
}
