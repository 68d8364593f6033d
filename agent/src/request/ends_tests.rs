use super::*;
use crate::{
    core::{Core, Effects, Input, Pace},
    diagnose::{Cause, Confidence, Diagnosis, Fact},
    event::{
        Backend, Body, Event, Hello, LeaveReason, Phase,
        native::{Engine, Handle, NIXL_REMOTE_DISCONNECT, NativeEvent, Notification, TransferStatus},
    },
    request::{
        RequestKey, ResyncReason,
        tracker::{Limits, Parting},
    },
    rule::RuleSet,
};

const ROOM: Room = Room::Number(77);

fn at(seconds: f64) -> Monotonic {
    Monotonic((seconds * 1e9) as u64)
}

fn process(pid: u32) -> ProcessKey {
    ProcessKey { pid, start: 1 }
}

/// Prefills have the pids from 10 on, decodes those from 20 on.
struct Node(Core);

impl Node {
    /// These servers, completely known, with a request of [`ROOM`] each since 1.
    fn with_request(pids: &[u32]) -> Self {
        let mut node = Self::with(pids);
        pids.iter().for_each(|pid| node.open(*pid, 1, 1.0));
        node
    }

    fn with(pids: &[u32]) -> Self {
        let mut node = Self(Core::new(RuleSet::default(), Limits { requests: 100, transfers: 100 }));
        pids.iter().for_each(|pid| node.attach(*pid));
        node
    }

    fn attach(&mut self, pid: u32) {
        let process = process(pid);
        self.tell(Input::Attach { process, identity: Box::default(), clock_offset: 0 });
        self.tell(Input::Watch { process, engine: Some(Engine::Nixl), at: at(0.0) });
        self.tell(Input::Asked { process, epoch: 1, why: ResyncReason::Attached, at: at(0.0) });
        let role = Some(if pid < 20 { "prefill" } else { "decode" }.to_owned());
        self.see(pid, 0.0, Body::Hello(Box::new(Hello { role, ..Hello::default() })));
        self.see(pid, 0.0, Body::StateBegin { epoch: 1 });
        self.see(pid, 0.0, Body::StateEnd { epoch: 1, entries: 0 });
    }

    fn open(&mut self, pid: u32, sender: u64, seconds: f64) {
        let room = ROOM;
        self.see(pid, seconds, Body::Open { room, sender, backend: Backend::Nixl });
        self.see(pid, seconds, Body::Phase { room, sender, old: None, new: Some(Phase::Transferring) });
        self.see(pid, seconds, Body::Send { room, sender, pages: 1, last: true });
        self.see(pid, seconds, Body::Enter { room, sender, rid: None, queue_length: 1 });
    }

    fn tell(&mut self, input: Input) {
        self.0.apply(input, &mut Effects::default());
    }

    fn see(&mut self, pid: u32, seconds: f64, body: Body) {
        self.tell(Input::Event(Event { pid, tid: pid, at: at(seconds), sequence: 1, detail_lost: false, body }));
    }

    fn native(&mut self, pid: u32, seconds: f64, event: NativeEvent) {
        self.see(pid, seconds, Body::Native(Box::new(event)));
    }

    fn leave(&mut self, pid: u32, seconds: f64, reason: LeaveReason) {
        self.see(pid, seconds, Body::Leave { room: ROOM, sender: 1, reason });
    }

    fn end(&mut self, pid: u32, seconds: f64, why: Parting) {
        self.tell(Input::Detach { process: process(pid), why, at: at(seconds) });
    }

    /// What is said then of a server's request that has the serial 1.
    fn diagnosis(&mut self, pid: u32, seconds: f64) -> Diagnosis {
        self.turn(seconds);
        self.0.diagnose(RequestKey { process: process(pid), serial: 1 }, at(seconds)).expect("it lives").1
    }

    fn cause(&mut self, pid: u32, seconds: f64) -> Cause {
        self.diagnosis(pid, seconds).cause
    }

    /// Passes of each loop, so that none is stalled, and a tick.
    fn turn(&mut self, seconds: f64) {
        let pids: Vec<u32> = self.0.tracker().servers().map(|(key, _)| key.pid).collect();
        for pid in pids {
            let of_it = self.0.tracker().requests().filter(|it| it.key.process.pid == pid);
            let queue_length = of_it.filter(|it| it.request.is_inflight()).count() as u32;
            self.see(pid, seconds, Body::Pass { queue_length, passes: 10 });
        }
        self.tell(Input::Tick { now: at(seconds), pace: Pace::As(None) });
    }
}

fn says(diagnosis: &Diagnosis, fact: &Fact) -> bool {
    diagnosis.evidence.iter().any(|evidence| evidence.fact == *fact)
}

#[test]
fn a_failure_that_the_other_end_was_not_told_of_is_named_once_it_should_have_heard() {
    let mut node = Node::with_request(&[10, 20]);
    node.leave(10, 3.0, LeaveReason::Failed);
    assert_eq!(node.cause(20, 7.9), Cause::Unknown, "it may be told still");
    let told = node.diagnosis(20, 9.0);
    assert_eq!((told.cause, told.confidence), (Cause::FailureNotTold, Confidence::High));
    let end = RoomEnd { node: None, pid: 10, state: EndState::Left { how: Conclusion::Failed, at: at(3.0) } };
    assert!(says(&told, &Fact::OtherEnd(end)), "{told:#?}");
}

#[test]
fn the_prefill_that_waits_for_a_decode_that_gave_up_is_not_told_either() {
    let mut node = Node::with_request(&[10, 20]);
    node.leave(20, 3.0, LeaveReason::Failed);
    assert_eq!(node.cause(10, 9.0), Cause::FailureNotTold);
}

#[test]
fn a_success_that_the_other_end_does_not_hear_of_is_a_lost_completion() {
    let mut node = Node::with_request(&[10, 20]);
    node.leave(10, 3.0, LeaveReason::Success);
    assert_eq!(node.cause(20, 7.9), Cause::Unknown, "late is not lost");
    assert_eq!(node.cause(20, 9.0), Cause::CompletionLost);
}

#[test]
fn a_process_that_ended_is_a_peer_that_is_gone_and_one_that_is_only_not_seen_is_not() {
    let mut node = Node::with_request(&[10, 20]);
    node.end(20, 3.0, Parting::Ended);
    let gone = node.diagnosis(10, 4.0);
    assert_eq!((gone.cause, gone.confidence), (Cause::PeerGone, Confidence::High));
    let end = RoomEnd { node: None, pid: 20, state: EndState::ProcessEnded { at: at(3.0) } };
    assert!(says(&gone, &Fact::OtherEnd(end)));
    let mut node = Node::with_request(&[10, 20]);
    node.end(20, 3.0, Parting::Unseen);
    let unseen = node.diagnosis(10, 4.0);
    assert!(unseen.cause == Cause::Unknown && says(&unseen, &Fact::OtherEndNotSeen), "{unseen:#?}");
}

#[test]
fn while_both_ends_have_the_room_each_says_what_the_other_one_polls_and_nothing_is_wrong() {
    let mut node = Node::with_request(&[10, 20]);
    for pid in [10, 20] {
        let here = node.diagnosis(pid, 9.0);
        let state = EndState::Lives { phase: Some(Phase::Transferring), since: at(1.0) };
        let end = RoomEnd { node: None, pid: 30 - pid, state };
        assert!(here.cause == Cause::Unknown && says(&here, &Fact::OtherEnd(end)), "{here:#?}");
        assert!(!says(&here, &Fact::OtherEndNotSeen));
    }
}

#[test]
fn of_two_unrelated_servers_that_have_the_room_nothing_is_said() {
    let mut node = Node::with_request(&[10, 20, 21]);
    node.leave(21, 3.0, LeaveReason::Failed);
    assert_eq!(node.cause(10, 9.0), Cause::Unknown, "which of the two is its other end?");
    node.leave(20, 10.0, LeaveReason::Failed);
    assert_eq!(node.cause(10, 16.0), Cause::FailureNotTold, "both gave it up: as the ranks of one server do");
}

#[test]
fn how_a_room_ended_before_a_request_was_made_says_nothing_of_it() {
    let mut node = Node::with_request(&[20]);
    node.leave(20, 3.0, LeaveReason::Success);
    node.attach(10);
    node.open(10, 1, 5.0);
    assert_eq!(node.cause(10, 20.0), Cause::Unknown);
}

#[test]
fn where_two_senders_of_a_server_share_the_room_its_other_end_says_nothing_of_either() {
    let mut node = Node::with_request(&[10, 20]);
    node.open(10, 2, 2.0);
    node.leave(20, 3.0, LeaveReason::Success);
    assert_ne!(node.cause(10, 20.0), Cause::CompletionLost);
}

#[test]
fn a_request_that_was_forgotten_for_want_of_room_has_not_ended_at_that_end() {
    let mut node = Node::with_request(&[10, 20]);
    for sender in 2..200 {
        let room = Room::Number(1_000 + sender);
        node.see(10, 2.0, Body::Open { room, sender, backend: Backend::Nixl });
    }
    assert!(node.0.tracker().get(RequestKey { process: process(10), serial: 1 }).is_none(), "it was forgotten");
    assert_eq!(node.cause(20, 20.0), Cause::Unknown);
}

#[test]
fn what_agents_of_other_nodes_tell_counts_where_this_node_sees_no_other_end_and_for_a_minute() {
    let mut node = Node::with_request(&[10]);
    let remote = |how, seconds| RoomEnd {
        node: Some("other".to_owned()),
        pid: 5,
        state: EndState::Left { how, at: at(seconds) },
    };
    let asks = |node: &Node, seconds| node.0.tracker().ends_to_ask(Duration::from_secs(10), at(seconds));
    node.turn(10.5);
    assert_eq!(asks(&node, 10.5), [], "it has not waited for long");
    assert_eq!(asks(&node, 11.0), [(ROOM, Side::Decode)]);
    let (room, side) = (ROOM, Side::Decode);
    node.tell(Input::RoomEnds { room, side, ends: vec![remote(Conclusion::Failed, 4.0)], at: at(12.0) });
    assert_eq!(node.cause(10, 13.0), Cause::FailureNotTold);
    assert_eq!(asks(&node, 13.0), [(ROOM, Side::Decode)], "it is asked about again");
    assert_eq!(node.cause(10, 72.5), Cause::Unknown, "the answer is old");
    // Its own node's word counts more.
    node.attach(20);
    node.open(20, 1, 73.0);
    node.tell(Input::RoomEnds { room, side, ends: vec![remote(Conclusion::Failed, 4.0)], at: at(74.0) });
    assert_eq!(node.cause(10, 80.0), Cause::Unknown);
    assert_eq!(asks(&node, 80.0), []);
}

#[test]
fn what_is_told_of_one_end_does_not_replace_what_was_told_of_the_other() {
    let mut node = Node::with_request(&[10]);
    let tell = |node: &mut Node, side, how| {
        let state = EndState::Left { how, at: at(4.0) };
        let ends = vec![RoomEnd { node: Some("other".to_owned()), pid: 5, state }];
        node.tell(Input::RoomEnds { room: ROOM, side, ends, at: at(12.0) });
    };
    tell(&mut node, Side::Decode, Conclusion::Failed);
    tell(&mut node, Side::Prefill, Conclusion::Success);
    assert_eq!(node.cause(10, 13.0), Cause::FailureNotTold);
}

#[test]
fn what_this_node_tells_others_is_what_each_of_its_servers_at_that_side_does_with_the_room() {
    let mut node = Node::with_request(&[10, 20, 21]);
    node.leave(21, 3.0, LeaveReason::Failed);
    node.end(20, 4.0, Parting::Ended);
    let told = node.0.tracker().ends_of(ROOM, Side::Decode);
    let end = |pid, state| RoomEnd { node: None, pid, state };
    assert_eq!(
        told,
        [
            end(21, EndState::Left { how: Conclusion::Failed, at: at(3.0) }),
            end(20, EndState::ProcessEnded { at: at(4.0) })
        ]
    );
    assert_eq!(node.0.tracker().ends_of(Room::Number(78), Side::Decode), []);
}

/// A prefill whose only transfer was done and its notification got by pid 20; then it posts another one, which fails.
fn written_to(node: &mut Node) {
    let told = |number: u64| Notification { bytes: format!("{number}_kv_0_1_0").into_bytes(), cut: false };
    node.native(10, 1.0, NativeEvent::NotificationSent { notification: told(1) });
    node.native(20, 1.1, NativeEvent::NotificationArrived { peer: None, notification: told(1) });
    post(node, 2.0);
}

fn post(node: &mut Node, seconds: f64) {
    let notification = Some(Notification { bytes: b"77_kv_0_1_0".to_vec(), cut: false });
    let handle = Handle { engine: Engine::Nixl, number: 9 };
    node.native(10, seconds, NativeEvent::Made { handle, operation: None, parts: 1, size: None, notification });
    node.native(10, seconds, NativeEvent::Posting { handle, operation: None, first_length: None, lists: [0; 2] });
}

fn fail(node: &mut Node, seconds: f64) {
    let (handle, code) = (Handle { engine: Engine::Nixl, number: 9 }, NIXL_REMOTE_DISCONNECT);
    node.native(10, seconds, NativeEvent::Status { handle, status: TransferStatus::Failed { code }, moved: None });
}

fn cause_of_room(node: &mut Node, seconds: f64) -> Option<Cause> {
    node.turn(seconds);
    let transfers = node.0.tracker().transfers(process(10))?;
    let native = &node.0.tracker().server(process(10))?.native;
    crate::diagnose::cause_of_room(transfers.of_room(ROOM)?, native, Monotonic(0), at(seconds))
}

#[test]
fn retries_that_run_out_after_the_only_process_that_was_written_to_ended_are_a_peer_that_is_gone() {
    let mut node = Node::with(&[10, 20]);
    written_to(&mut node);
    node.end(20, 3.0, Parting::Ended);
    assert_eq!(cause_of_room(&mut node, 4.0), Some(Cause::PeerGone), "while the device still tries");
    fail(&mut node, 8.0);
    assert_eq!(cause_of_room(&mut node, 9.0), Some(Cause::PeerGone));
}

#[test]
fn the_same_without_its_end_is_an_error_of_the_way() {
    let mut node = Node::with(&[10, 20]);
    written_to(&mut node);
    fail(&mut node, 8.0);
    assert_eq!(cause_of_room(&mut node, 9.0), Some(Cause::CompletionError));
    node.end(20, 10.0, Parting::Unseen);
    assert_eq!(cause_of_room(&mut node, 11.0), Some(Cause::CompletionError));
}

#[test]
fn a_server_that_writes_to_others_too_may_have_written_to_those() {
    let somewhere = || Notification { bytes: b"5_kv_0_1_0".to_vec(), cut: false };
    for elsewhere in [false, true] {
        let mut node = Node::with(&[10, 20, 21]);
        written_to(&mut node);
        node.native(10, 1.5, NativeEvent::NotificationSent { notification: somewhere() });
        if !elsewhere {
            node.native(21, 1.6, NativeEvent::NotificationArrived { peer: None, notification: somewhere() });
        }
        node.turn(7.0);
        node.end(20, 13.0, Parting::Ended);
        fail(&mut node, 14.0);
        assert_eq!(cause_of_room(&mut node, 15.0), Some(Cause::CompletionError), "elsewhere: {elsewhere}");
    }
}

#[test]
fn a_peer_that_was_succeeded_by_another_one_is_not_the_reason() {
    let mut node = Node::with(&[10, 20]);
    written_to(&mut node);
    node.end(20, 3.0, Parting::Ended);
    node.attach(21);
    let told = || Notification { bytes: b"6_kv_0_1_0".to_vec(), cut: false };
    node.native(10, 4.0, NativeEvent::NotificationSent { notification: told() });
    node.native(21, 4.1, NativeEvent::NotificationArrived { peer: None, notification: told() });
    fail(&mut node, 5.0);
    assert_eq!(cause_of_room(&mut node, 6.0), Some(Cause::CompletionError));
}
