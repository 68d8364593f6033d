//! A request that is over on one rank and not on another. Times are in seconds.

use super::{
    rank_world::{Group, ROOM, Ranks, rank},
    *,
};
use crate::{
    core::Input,
    event::{Body, Hello, Phase},
    request::ResyncReason,
};

#[test]
fn what_is_over_here_and_not_on_another_rank_is_held_by_that_one_and_says_why_it_is() {
    let mut ranks = Ranks::with_request(Group::Tp, 3, &[0, 1, 2]);
    ranks.poll(0, 3.0, Phase::Success);
    ranks.poll(2, 3.0, Phase::Success);
    ranks.see(1, 4.0, Body::Abort { room: ROOM, sender: 1, room_present: true });
    let diagnosis = ranks.pass(20.0, &[0, 1, 2]).diagnosis(0, 1, 20.0);
    assert_eq!((diagnosis.cause, diagnosis.confidence), (Cause::HeldByOtherRank, Confidence::High));
    let by = RankFact::HoldsUp {
        rank: Group::Tp.rank(1),
        pid: 11,
        phase: Some(Phase::Transferring),
        over_on: 2,
        cause: Some(Cause::AbortIgnored),
    };
    assert_eq!(
        by.to_string(),
        "rank TP1, pid 11, polls Transferring since; 2 of the ranks are done with the room and wait for it. \
         Its cause there is AbortIgnored"
    );
    assert_eq!(ranks.says(0, 20.0), [Fact::Ranks { what: by }]);
    assert_eq!(ranks.cause(1, 20.0), Cause::AbortIgnored, "what is stuck is there");
    assert_eq!(ranks.says(1, 20.0), []);
    assert!(!diagnosis.cause.is_stuck(), "one that waits for another one's is not counted");
    ranks.poll(1, 21.0, Phase::Success);
    assert_eq!(ranks.pass(21.1, &[0, 1, 2]).cause(0, 21.1), Cause::Unknown, "it leaves in this pass");
}

#[test]
fn a_stage_that_has_failed_a_request_waits_for_the_others_too() {
    let mut ranks = Ranks::with_request(Group::Pp, 2, &[0, 1]);
    ranks.poll(0, 3.0, Phase::Failed);
    assert_eq!(ranks.pass(20.0, &[0, 1]).cause(0, 20.0), Cause::HeldByOtherRank);
    ranks.poll(1, 21.0, Phase::Failed);
    assert_eq!(ranks.pass(21.1, &[0, 1]).cause(0, 21.1), Cause::Unknown);
}

#[test]
fn ranks_that_poll_an_end_less_than_a_second_apart_hold_nothing_up() {
    let mut ranks = Ranks::with_request(Group::Tp, 2, &[0, 1]);
    ranks.poll(0, 3.0, Phase::Success);
    assert_eq!(ranks.pass(3.9, &[0, 1]).cause(0, 3.9), Cause::Unknown);
    assert_eq!(ranks.pass(4.0, &[0, 1]).cause(0, 4.0), Cause::HeldByOtherRank);
}

#[test]
fn a_rank_that_is_not_seen_or_not_known_is_named_where_nothing_else_explains_the_wait() {
    let spread = |number| Hello { nodes: Some(2), node_rank: Some(0), ..Group::Tp.hello(4, number) };
    let mut unseen = Ranks::told([0, 1].into_iter().map(|number| (number, spread(number))), &[9]);
    unseen.open(0, 1, ROOM);
    unseen.open(1, 1, ROOM);
    unseen.poll(0, 3.0, Phase::Success);
    unseen.poll(1, 3.0, Phase::Success);
    let says = unseen.pass(20.0, &[0, 1]).says(0, 20.0);
    let what = RankFact::NotSeen { rank: Group::Tp.rank(2), ranks: 2, nodes: Some(2) };
    assert_eq!((unseen.cause(0, 20.0), says), (Cause::Unknown, vec![Fact::Ranks { what: what.clone() }]));
    assert_eq!(
        what.to_string(),
        "rank TP2 of this server is not seen, and 1 more (the server is spread over 2 nodes): it may hold the room up"
    );

    let mut doubted = Ranks::with_request(Group::Tp, 2, &[0, 1]);
    doubted.poll(0, 3.0, Phase::Success);
    doubted.tell(Input::Doubt { process: rank(1), why: ResyncReason::EventsLost });
    let says = doubted.pass(20.0, &[0, 1]).says(0, 20.0);
    let what = RankFact::NotKnown { rank: Group::Tp.rank(1), pid: 11 };
    assert_eq!((doubted.cause(0, 20.0), says), (Cause::Unknown, vec![Fact::Ranks { what }]));
}
