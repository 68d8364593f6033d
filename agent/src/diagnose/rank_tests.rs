//! What ranks have dropped, and that they hang, each with its silence. Times are in seconds.

use super::{
    cause_world::at,
    rank_world::{Group, OTHER, ROOM, Ranks, rank},
    *,
};
use crate::{
    core::Input,
    event::{Backend, Body, Phase},
    request::{ResyncReason, tracker::Parting},
};

#[test]
fn stages_diverge_once_one_has_polled_for_five_seconds_what_another_one_dropped() {
    let mut ranks = Ranks::with_request(Group::Pp, 2, &[0, 1]);
    ranks.leave(0, 10.0);
    assert_eq!(ranks.pass(10.9, &[0, 1]).cause(1, 10.9), Cause::Unknown, "stages drop a microbatch apart");
    assert_eq!(ranks.pass(14.9, &[0, 1]).cause(1, 14.9), Cause::Unknown);
    let diagnosis = ranks.pass(15.0, &[0, 1]).diagnosis(1, 1, 15.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::RankDivergence, Confidence::High));
    super::cause_world::assert_says(&diagnosis, &[Fact::DroppedByRank { rank: Group::Pp.rank(0), pid: 10 }]);
    ranks.leave(1, 16.0);
    ranks.pass(17.0, &[0, 1]);
    assert!(!ranks.differ(), "they agree again");
}

#[test]
fn stages_whose_microbatches_take_long_are_given_the_passes_that_a_release_takes() {
    let mut ranks = Ranks::with_request(Group::Pp, 8, &[0, 1, 2, 3, 4, 5, 6, 7]);
    ranks.leave(0, 10.0);
    for seconds in [12.0, 20.0, 28.0] {
        assert_eq!(ranks.pass(seconds, &[1, 7]).cause(7, seconds), Cause::Unknown, "{seconds}");
    }
    assert_eq!(ranks.pass(36.0, &[1, 7]).pass(44.0, &[1, 7]).cause(7, 44.0), Cause::RankDivergence);
}

#[test]
fn tp_and_cp_ranks_diverge_once_one_has_polled_for_a_second_what_another_one_dropped() {
    for group in [Group::Tp, Group::Cp] {
        let mut ranks = Ranks::with_request(group, 2, &[0, 1]);
        ranks.leave(0, 10.0);
        assert_eq!(ranks.pass(10.5, &[0, 1]).cause(1, 10.5), Cause::Unknown);
        assert_eq!(ranks.pass(10.9, &[0, 1]).cause(1, 10.9), Cause::Unknown);
        assert_eq!(ranks.pass(11.0, &[0, 1]).cause(1, 11.0), Cause::RankDivergence);
        assert_eq!(ranks.says(1, 11.0), [Fact::DroppedByRank { rank: group.rank(0), pid: 10 }]);
    }
}

#[test]
fn ranks_that_drop_the_same_a_moment_apart_do_not_diverge() {
    for group in [Group::Tp, Group::Pp] {
        let mut ranks = Ranks::with_request(group, 2, &[0, 1]);
        ranks.leave(0, 10.0);
        assert_eq!(ranks.pass(10.8, &[0, 1]).cause(1, 10.8), Cause::Unknown);
        ranks.leave(1, 10.9);
        assert_eq!(ranks.pass(60.0, &[0, 1]).0.tracker().requests().count(), 0);
        assert!(!ranks.differ());
    }
}

#[test]
fn a_request_that_another_rank_has_not_prefilled_yet_is_no_divergence() {
    let mut ranks = Ranks::new(Group::Pp, 2, &[0, 1]);
    ranks.open(0, 1, ROOM);
    ranks.make(1, 1, ROOM);
    assert_eq!(ranks.pass(300.0, &[0, 1]).cause(0, 300.0), Cause::Unknown);
    let mut behind = Ranks::new(Group::Pp, 2, &[0, 1]);
    behind.open(0, 1, ROOM);
    assert_eq!(behind.pass(300.0, &[0, 1]).cause(0, 300.0), Cause::Unknown, "nobody saw the other one have it");
}

#[test]
fn a_rank_that_stops_before_it_drops_what_was_dropped_in_the_same_pass_hangs_in_a_collective() {
    let mut ranks = Ranks::with_request(Group::Tp, 2, &[0, 1]);
    ranks.make(1, 2, OTHER);
    ranks.pass(9.9, &[0, 1]).leave(0, 10.0);
    assert_eq!(ranks.pass(19.9, &[0]).cause(1, 19.9), Cause::Unknown, "the machine may hold it up");
    assert_eq!(ranks.pass(20.0, &[0]).cause(1, 20.0), Cause::RankDivergence, "whoever goes on");
    assert_eq!(ranks.pass(300.0, &[]).cause(1, 300.0), Cause::RankDivergence, "or nobody");
    assert_eq!(ranks.diagnosis(1, 2, 300.0).cause, Cause::RankDivergence, "and every request of a rank that hangs");
}

#[test]
fn a_collective_hang_with_differing_queues_is_a_divergence_of_every_request_and_no_stalled_loop() {
    let mut ranks = Ranks::with_request(Group::Pp, 2, &[0, 1]);
    ranks.open(0, 2, OTHER);
    ranks.open(1, 2, OTHER);
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
fn a_stage_that_compiles_while_another_one_drops_a_request_is_stalled_and_does_not_diverge() {
    let mut ranks = Ranks::with_request(Group::Pp, 2, &[0, 1]);
    ranks.make(1, 2, OTHER);
    ranks.pass(9.9, &[0, 1]).leave(0, 10.0);
    assert_eq!(ranks.pass(70.0, &[]).cause(1, 70.0), Cause::LoopStalled, "its batch may be running");
    assert_eq!(ranks.pass(309.0, &[]).cause(1, 309.0), Cause::LoopStalled);
    assert!(ranks.says(1, 309.0).contains(&Fact::BatchMayRun { requests: 1 }));
    assert_eq!(ranks.pass(310.0, &[]).cause(1, 310.0), Cause::RankDivergence, "SGLang's watchdog ends a batch by then");
    ranks.leave(1, 311.0);
    assert!(!ranks.pass(312.0, &[0, 1]).differ(), "it was a long one");
}

#[test]
fn a_divergence_that_was_seen_before_the_loops_stopped_stays_one_whatever_may_be_running() {
    let mut ranks = Ranks::with_request(Group::Pp, 2, &[0, 1]);
    ranks.make(1, 2, OTHER);
    ranks.leave(0, 10.0);
    ranks.pass(11.0, &[0, 1]).pass(16.0, &[0, 1]);
    assert_eq!(ranks.pass(76.0, &[]).cause(1, 76.0), Cause::RankDivergence);
    assert_eq!(ranks.diagnosis(1, 2, 76.0).cause, Cause::RankDivergence);
}

#[test]
fn a_hang_with_equal_queues_is_a_stalled_loop_and_the_rank_that_stopped_first_is_named() {
    let mut ranks = Ranks::with_request(Group::Tp, 3, &[0, 1, 2]);
    ranks.pass(9.9, &[0, 1, 2]).pass(70.0, &[]);
    assert_eq!([ranks.cause(0, 70.0), ranks.cause(1, 70.0)], [Cause::LoopStalled; 2]);
    let all = Fact::Ranks { what: RankFact::AllStopped { ranks: 3 } };
    assert_eq!(ranks.says(0, 70.0), [Fact::NothingToPrefill, all]);

    let mut first = Ranks::with_request(Group::Tp, 3, &[0, 1, 2]);
    first.pass(9.9, &[0, 1, 2]).pass(12.4, &[0, 2]).pass(80.0, &[]);
    assert_eq!([first.cause(0, 80.0), first.cause(1, 80.0)], [Cause::LoopStalled; 2]);
    let stopped = RankFact::StoppedFirst { rank: Group::Tp.rank(1), pid: 11, before_ms: 2_500 };
    for number in [0, 1, 2] {
        assert!(first.says(number, 80.0).contains(&Fact::Ranks { what: stopped.clone() }), "{number}");
    }
}

#[test]
fn one_rank_that_stops_while_another_one_goes_on_is_stalled_and_the_other_one_is_named() {
    let mut ranks = Ranks::with_request(Group::Pp, 2, &[0, 1]);
    ranks.pass(9.9, &[0, 1]).pass(70.0, &[0]);
    assert_eq!([ranks.cause(0, 70.0), ranks.cause(1, 70.0)], [Cause::Unknown, Cause::LoopStalled]);
    let goes_on = Fact::Ranks { what: RankFact::GoesOn { rank: Group::Pp.rank(0), pid: 10 } };
    assert!(ranks.says(1, 70.0).contains(&goes_on));
    assert_eq!(ranks.says(0, 70.0), [], "nothing is wrong with it");
}

#[test]
fn ranks_that_are_paused_neither_diverge_nor_stall() {
    let mut ranks = Ranks::with_request(Group::Tp, 2, &[0, 1]);
    ranks.leave(0, 10.0);
    ranks.pass(10.1, &[0, 1]).see(0, 10.2, Body::Paused);
    ranks.see(1, 10.2, Body::Paused);
    assert_eq!(ranks.pass(1_000.0, &[]).cause(1, 1_000.0), Cause::Unknown);
    ranks.see(0, 1_000.0, Body::Resumed);
    ranks.see(1, 1_000.0, Body::Resumed);
    assert_eq!(ranks.pass(1_000.1, &[]).cause(1, 1_000.1), Cause::Unknown, "it has not polled since");
    assert_eq!(ranks.pass(1_000.2, &[0, 1]).cause(1, 1_000.2), Cause::RankDivergence);

    let mut first = Ranks::with_request(Group::Tp, 2, &[0, 1]);
    first.leave(0, 10.0);
    first.pass(10.1, &[0, 1]).see(0, 10.2, Body::Paused);
    assert_eq!(first.pass(50.0, &[]).cause(1, 50.0), Cause::Unknown, "this one learns of it in its next pass");
}

#[test]
fn nothing_is_said_of_ranks_that_are_not_all_seen_or_not_all_known() {
    let mut unseen = Ranks::with_request(Group::Pp, 3, &[0, 1]);
    unseen.leave(0, 10.0);
    assert_eq!(unseen.pass(30.0, &[0, 1]).cause(1, 30.0), Cause::Unknown, "the third is on another node");

    let mut doubted = Ranks::with_request(Group::Pp, 2, &[0, 1]);
    doubted.tell(Input::Doubt { process: rank(0), why: ResyncReason::EventsLost });
    doubted.leave(0, 10.0);
    assert_eq!(doubted.pass(30.0, &[0, 1]).cause(1, 30.0), Cause::Unknown);

    let mut gone = Ranks::with_request(Group::Pp, 2, &[0, 1]);
    gone.leave(0, 10.0);
    assert_eq!(gone.pass(30.0, &[0, 1]).pass(36.0, &[0, 1]).cause(1, 36.0), Cause::RankDivergence);
    gone.tell(Input::Detach { process: rank(0), why: Parting::Ended, at: at(37.0) });
    assert_eq!(gone.pass(38.0, &[1]).cause(1, 38.0), Cause::Unknown, "it died: that is what is to be seen");
    assert!(!gone.differ());
}

#[test]
fn a_rank_that_has_the_room_again_has_not_dropped_it() {
    let mut ranks = Ranks::with_request(Group::Pp, 2, &[0, 1]);
    ranks.leave(0, 10.0);
    ranks.see(0, 10.1, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    assert_eq!(ranks.pass(30.0, &[0, 1]).pass(60.0, &[0, 1]).cause(1, 60.0), Cause::Unknown, "retried there first");
}

#[test]
fn a_shared_room_says_nothing_of_ranks() {
    let mut ranks = Ranks::with_request(Group::Pp, 2, &[0, 1]);
    ranks.see(1, 2.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    ranks.leave(0, 10.0);
    assert_eq!(ranks.pass(30.0, &[0, 1]).pass(60.0, &[0, 1]).cause(1, 60.0), Cause::Unknown);
    let mut held = Ranks::with_request(Group::Tp, 2, &[0, 1]);
    held.poll(0, 3.0, Phase::Success);
    held.see(1, 4.0, Body::Open { room: ROOM, sender: 2, backend: Backend::Nixl });
    assert_eq!(held.pass(30.0, &[0, 1]).cause(0, 30.0), Cause::Unknown, "which of them holds it up is not known");
}

#[test]
fn schedulers_of_other_servers_are_not_compared() {
    let mut ranks = Ranks::with_parents(Group::Pp, 2, &[0, 1], &[8, 9]);
    ranks.open(0, 1, ROOM);
    ranks.open(1, 1, ROOM);
    ranks.leave(0, 10.0);
    assert_eq!(
        ranks.pass(30.0, &[0, 1]).pass(60.0, &[0, 1]).cause(1, 60.0),
        Cause::Unknown,
        "a router may use a room on both"
    );
}
