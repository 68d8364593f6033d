//! What the hook marks of SGLang's released code on Mooncake's real engine; and of its mori and ascend code, on a stand-in for
//! their engines (`tests/sglang/engine_stand_in.py`: they need ROCm, and an Ascend driver).
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use dislodge::{
    event::{Backend, Body, ChunkCounts, ChunkStep, FailureFlag, LeaveReason, Phase, Room},
    kernel::{Kernel, Sizes, ring::Ring},
    target::{discover, marker},
};
use serde_json::Value;
use support::{
    environment::{mooncake, on_each, releases},
    needs,
    server::{Setup, SglangServer, text},
    wait::{until, until_true},
};

/// The newest release; on the others of these backends the marks are not looked at.
const NEWEST: &str = "0.5.23";

/// A server whose marks are read as an agent reads them.
struct Watched {
    server: SglangServer,
    _kernel: Kernel,
    ring: Ring,
    marks: Vec<Body>,
}

impl Watched {
    fn start(release: &str, backend: &str) -> Self {
        let setup = Setup::of(release).arguments(&["--backend", backend]).variable("MC_TRANSFER_TIMEOUT", "5");
        let server = setup.start();
        let (mut kernel, ring) = Kernel::load(Sizes { ring: 1 << 20, calls: 1024 }).unwrap();
        let key = discover::process_key(server.pid()).unwrap();
        let site = until("the marker", || marker::find(server.pid()).ok());
        kernel.attach(key, &site).unwrap();
        Self { server, _kernel: kernel, ring, marks: Vec::new() }
    }

    /// The marks of a room so far.
    fn of(&mut self, room: u64) -> Vec<Body> {
        let marks = &mut self.marks;
        self.ring.drain(usize::MAX, |event| marks.push(event.unwrap().body));
        self.marks.iter().filter(|mark| room_of(mark) == Some(Room::Number(room))).cloned().collect()
    }

    /// The room of a request in the queue.
    fn room(&mut self, rid: &str) -> u64 {
        let queue = self.server.command("queue");
        queue.as_array().unwrap().iter().find(|entry| entry["rid"] == rid).unwrap()["room"].as_u64().unwrap()
    }

    /// Waits until a request's room has such a mark.
    fn wait_for(&mut self, room: u64, what: &str, is_it: impl Fn(&Body) -> bool) -> Vec<Body> {
        until_true(what, || self.of(room).iter().any(&is_it));
        self.of(room)
    }

    /// A request that ends well: the marks of its room.
    fn healthy(&mut self) -> Vec<Body> {
        let before = self.server.command("finished").as_object().unwrap().len();
        self.server.serve(1);
        let finished = self.server.command("finished");
        let rid = finished.as_object().unwrap().keys().nth(before).unwrap().clone();
        let room = rid.split('-').nth(1).unwrap().parse().unwrap();
        self.wait_for(room, "its last mark", |mark| matches!(mark, Body::Chunk { step: ChunkStep::Ended, .. }));
        self.wait_for(room, "its leaving", |mark| matches!(mark, Body::Leave { .. }))
    }
}

fn room_of(mark: &Body) -> Option<Room> {
    match mark {
        Body::Open { room, .. }
        | Body::Phase { room, .. }
        | Body::Abort { room, .. }
        | Body::Update { room, .. }
        | Body::Send { room, .. }
        | Body::Clear { room, .. }
        | Body::Failure { room, .. }
        | Body::Enter { room, .. }
        | Body::Leave { room, .. }
        | Body::PeerAbort { room, .. }
        | Body::Chunk { room, .. }
        | Body::Remedy { room, .. } => Some(*room),
        _ => None,
    }
}

/// What the chunks' marks say, in their order.
fn chunks(marks: &[Body]) -> Vec<(ChunkStep, ChunkCounts)> {
    let chunk = |mark: &Body| match mark {
        Body::Chunk { step, counts, .. } => Some((*step, *counts)),
        _ => None,
    };
    marks.iter().filter_map(chunk).collect()
}

fn counts(queued: u16, working: u16) -> ChunkCounts {
    ChunkCounts { queued, working, ..ChunkCounts::default() }
}

/// One chunk from its queue to its end.
fn one_chunk(abandoned: bool) -> Vec<(ChunkStep, ChunkCounts)> {
    let end = ChunkCounts { abandoned, ..counts(0, 0) };
    vec![(ChunkStep::Queued, counts(1, 0)), (ChunkStep::Begun, counts(0, 1)), (ChunkStep::Ended, end)]
}

fn assert_has(marks: &[Body], what: &str, is_it: impl Fn(&Body) -> bool) {
    assert!(marks.iter().any(is_it), "no {what} in {marks:#?}");
}

/// Everything but its chunks of a request that ended well.
fn assert_ended_well(marks: &[Body], backend: Backend) {
    assert_has(marks, "open", |mark| matches!(mark, Body::Open { backend: it, .. } if *it == backend));
    assert_has(marks, "phase", |mark| matches!(mark, Body::Phase { new: Some(Phase::WaitingForInput), .. }));
    assert_has(marks, "send", |mark| matches!(mark, Body::Send { pages: 8, last: true, .. }));
    assert_has(marks, "enter", |mark| matches!(mark, Body::Enter { .. }));
    assert_has(marks, "update", |mark| matches!(mark, Body::Update { after: Some(Phase::Success), .. }));
    assert_has(marks, "end", |mark| matches!(mark, Body::Phase { new: Some(Phase::Success), .. }));
    assert_has(marks, "clear", |mark| matches!(mark, Body::Clear { removed: true, .. }));
    assert_has(marks, "leave", |mark| matches!(mark, Body::Leave { reason: LeaveReason::Success, .. }));
}

/// Everything but its chunks of a request that the server failed.
fn assert_failed(marks: &[Body]) {
    assert_has(marks, "update", |mark| matches!(mark, Body::Update { after: Some(Phase::Failed), .. }));
    assert_has(marks, "failure", |mark| matches!(mark, Body::Failure { .. }));
    assert_has(marks, "leave", |mark| matches!(mark, Body::Leave { reason: LeaveReason::Failed, .. }));
}

fn left(mark: &Body) -> bool {
    matches!(mark, Body::Leave { .. })
}

fn chunk_ended(mark: &Body) -> bool {
    matches!(mark, Body::Chunk { step: ChunkStep::Ended, .. })
}

#[test]
fn a_request_of_mooncake_is_marked_from_its_opening_to_its_leaving() {
    let Some(()) = needs(mooncake()) else { return };
    on_each(&releases(), |release| {
        let mut watched = Watched::start(release, "mooncake");
        let marks = watched.healthy();
        assert_ended_well(&marks, Backend::Mooncake);
        assert_eq!(chunks(&marks), one_chunk(false));
    });
}

#[test]
fn a_transfer_that_mooncake_gives_up_leaves_its_room_abandoned_and_one_that_was_never_posted_does_not() {
    let Some(()) = needs(mooncake()) else { return };
    on_each(&releases(), |release| {
        let mut watched = Watched::start(release, "mooncake");
        watched.server.serve(1); // without a connection Mooncake waits 60 s for its handshake, and posts nothing
        let stopped = watched.server.command("stop 2");
        let [timed_out, behind] = [0, 1].map(|n| text(&stopped["rids"][n]));
        let (timed_out, behind) = (watched.room(&timed_out), watched.room(&behind));
        watched.wait_for(timed_out, "its leaving", left);
        let marks = watched.wait_for(timed_out, "its chunk's end", chunk_ended);
        assert_failed(&marks);
        assert_eq!(chunks(&marks), one_chunk(true));
        // Its session has failed: the worker drops it before it posts anything.
        watched.wait_for(behind, "its leaving", left);
        let marks = watched.wait_for(behind, "its chunk's end", chunk_ended);
        assert_failed(&marks);
        assert_eq!(chunks(&marks), one_chunk(false));
    });
}

#[test]
fn a_transfer_whose_decode_was_killed_leaves_its_room_abandoned() {
    let Some(()) = needs(mooncake()) else { return };
    on_each(&releases(), |release| {
        let mut watched = Watched::start(release, "mooncake");
        watched.server.serve(1);
        let rid = text(&watched.server.command("stop")["rids"][0]);
        let room = watched.room(&rid);
        watched.server.command("kill");
        watched.wait_for(room, "its leaving", left);
        let marks = watched.wait_for(room, "its chunk's end", chunk_ended);
        assert_failed(&marks);
        assert_eq!(chunks(&marks), one_chunk(true));
        assert_eq!(chunks(&watched.healthy()), one_chunk(false), "the next decode's");
    });
}

#[test]
fn an_abort_of_mooncakes_is_marked_and_carried_out_whoever_asked() {
    let Some(()) = needs(mooncake()) else { return };
    on_each(&releases(), |release| {
        let mut watched = Watched::start(release, "mooncake");
        let parked = watched.server.command("park 2");
        let [ours, decodes] = [0, 1].map(|n| text(&parked["rids"][n]));
        let (room, other) = (watched.room(&ours), watched.room(&decodes));
        watched.server.command(&format!("abort {ours}"));
        let marks = watched.wait_for(room, "its leaving", left);
        assert_has(&marks, "abort", |mark| matches!(mark, Body::Abort { room_present: true, .. }));
        assert_has(&marks, "failure", |mark| matches!(mark, Body::Failure { .. }));
        if matches!(release, "0.5.10" | "0.5.12.post1") {
            return; // decode told nobody
        }
        watched.server.command(&format!("decode_abort {decodes}"));
        let marks = watched.wait_for(other, "its leaving", left);
        assert_failed(&marks);
        // Until 0.5.18 the frame is looked at in the middle of a thread's loop: there is no call to mark.
        let marked = marks.iter().any(|mark| matches!(mark, Body::PeerAbort { room_present: true, .. }));
        assert_eq!(marked, !matches!(release, "0.5.15" | "0.5.18"), "{marks:#?}");
    });
}

#[test]
fn mori_and_ascend_on_a_stand_in_engine_are_marked_and_every_chunk_that_posted_leaves_its_room_abandoned() {
    on_each(&[NEWEST], |release| {
        for (name, backend) in [("mori", Backend::Mori), ("ascend", Backend::Ascend)] {
            let mut watched = Watched::start(release, name);
            let marks = watched.healthy();
            assert_ended_well(&marks, backend);
            assert_eq!(chunks(&marks), one_chunk(true), "{name}: nothing proves its end");

            watched.server.command("engine hangs");
            let rid = text(&watched.server.command("stop")["rids"][0]);
            let room = watched.room(&rid);
            let marks = watched.wait_for(room, "its work", |mark| matches!(mark, Body::Enter { .. }));
            assert_eq!(chunks(&marks), one_chunk(true)[..2], "{name}: in flight");
            watched.server.command("engine fails");
            watched.wait_for(room, "its leaving", left);
            let marks = watched.wait_for(room, "its chunk's end", chunk_ended);
            assert_failed(&marks);
            assert_eq!(chunks(&marks), one_chunk(true), "{name}: failed");
        }
    });
}

#[test]
fn the_server_says_what_a_sender_of_each_backend_is_failed_by() {
    on_each(&[NEWEST], |release| {
        for (name, class) in [("mori", "MoriKVSender"), ("ascend", "AscendKVSender")] {
            let server = Setup::of(release).arguments(&["--backend", name]).start();
            let hello = hello(&server);
            assert_eq!((&hello["backend"], &hello["sender"]), (&name.into(), &class.into()), "{hello}");
            let flag = FailureFlag::ConcludeState;
            assert_eq!((&hello["flag"], &hello["counts"]), (&serde_json::json!(flag), &"queues".into()), "{hello}");
        }
    });
}

/// What the server says of itself to who looks at the hook's memory file.
fn hello(server: &SglangServer) -> Value {
    until("the hook's memory file", || {
        let files = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).ok()?;
        let is_it = |path: &std::path::Path| {
            std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("memfd:dislodge-hook"))
        };
        let path = files.flatten().map(|entry| entry.path()).find(|path| is_it(path))?;
        let content: Value = serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()?;
        content.get("server").cloned()
    })
}
