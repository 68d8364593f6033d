use super::*;
use crate::event::ProcessKey;

const KEY: RequestKey = RequestKey { process: ProcessKey { pid: 1, start: 2 }, serial: 3 };
const SECOND: u64 = 1_000_000_000;

fn change(step: Step) -> Change {
    Change { key: KEY, at: Monotonic(5), tid: 7, step, ended: None }
}

fn polled_failed() -> Change {
    change(Step::Phase { old: Some(Phase::WaitingForInput), new: Phase::Failed })
}

fn sent() -> Ladder {
    let mut ladder = Ladder::new(6);
    ladder.sent(KEY, 9, Monotonic(0));
    ladder
}

fn done() -> Answer {
    Answer::Done { flag: Some(FailureFlag::SendFailed), entries: None }
}

#[test]
fn an_action_is_effective_once_failed_was_polled_and_the_request_left() {
    let mut ladder = sent();
    assert_eq!(ladder.answered(KEY.process, 9, &done(), Monotonic(1)), None, "the reply alone proves nothing");
    assert_eq!(ladder.observe(&polled_failed()), None, "the poll alone proves nothing");
    let outcome = ladder.observe(&change(Step::Left(LeaveReason::Failed)));
    assert_eq!(outcome, Some((KEY, Outcome::Effective { flag: Some(FailureFlag::SendFailed) })));
}

#[test]
fn a_lost_reply_does_not_hide_the_effect() {
    let mut ladder = sent();
    ladder.answered(KEY.process, 9, &Answer::Expired, Monotonic(1));
    ladder.observe(&change(Step::Remedied(Some(FailureFlag::ConcludeState))));
    ladder.observe(&polled_failed());
    let outcome = ladder.observe(&change(Step::Left(LeaveReason::Failed)));
    assert_eq!(outcome, Some((KEY, Outcome::Effective { flag: Some(FailureFlag::ConcludeState) })));
}

#[test]
fn a_flag_that_nothing_follows_has_no_effect() {
    let mut ladder = sent();
    ladder.answered(KEY.process, 9, &done(), Monotonic(0));
    assert_eq!(ladder.expire(Monotonic(5 * SECOND)), []);
    assert_eq!(ladder.expire(Monotonic(5 * SECOND + 1)), [(KEY, Outcome::NoEffect)]);
    assert_eq!(ladder.expire(Monotonic(9 * SECOND)), [], "told once");
}

#[test]
fn a_command_that_nobody_answers_is_unanswered() {
    let mut ladder = sent();
    ladder.answered(KEY.process, 9, &Answer::Expired, Monotonic(2 * SECOND));
    assert_eq!(ladder.expire(Monotonic(7 * SECOND)), []);
    assert_eq!(ladder.expire(Monotonic(7 * SECOND + 1)), [(KEY, Outcome::Unanswered)]);
}

#[test]
fn a_request_that_ends_by_itself_overtakes_the_action() {
    let overtakers: [&[Change]; 3] = [
        &[change(Step::Left(LeaveReason::Success))],
        &[change(Step::Ended)],
        &[polled_failed(), change(Step::Left(LeaveReason::Failed))],
    ];
    for changes in overtakers {
        let mut ladder = sent();
        let outcomes: Vec<_> = changes.iter().filter_map(|change| ladder.observe(change)).collect();
        assert_eq!(outcomes, [(KEY, Outcome::Overtaken)], "{changes:?}");
    }
}

#[test]
fn the_hooks_refusal_ends_the_action() {
    let mut ladder = sent();
    let refused = Answer::Refused { reason: "room_shared".into(), detail: None };
    let outcome = ladder.answered(KEY.process, 9, &refused, Monotonic(1));
    assert_eq!(outcome, Some((KEY, Outcome::Refused { reason: "room_shared".into() })));
}

#[test]
fn an_answer_of_another_process_is_not_this_actions() {
    let mut ladder = sent();
    let other = ProcessKey { pid: 1, start: 3 };
    assert_eq!(ladder.answered(other, 9, &done(), Monotonic(1)), None);
    assert!(ladder.under_way[&KEY].flagged.is_none());
}

#[test]
fn no_request_is_acted_on_twice_and_no_minute_has_too_many() {
    let mut ladder = Ladder::new(1);
    assert!(!ladder.acted_before(KEY));
    assert_eq!(ladder.actions_left(Monotonic(0)), 1);
    ladder.not_sent(KEY, Monotonic(0));
    assert!(ladder.acted_before(KEY));
    assert_eq!(ladder.actions_left(Monotonic(59 * SECOND)), 0);
    assert_eq!(ladder.actions_left(Monotonic(60 * SECOND)), 1);
}
