//! What a hundred thousand live requests cost, and that it stays so while others come and go.
//!
//! `cargo test --release --test memory -- --nocapture` prints the figures of docs/overhead.md. What is measured is the
//! whole process: one test runs in it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::ops::RangeInclusive;

use dislodge::{
    core::{Core, Effects, Input, Pace},
    event::{
        Backend, Body, ChunkCounts, ChunkStep, Event, LeaveReason, Phase, ProcessKey, Rid, Room,
        clock::Monotonic,
        native::{Engine, Handle, NativeEvent, Notification, TransferStatus},
    },
    request::tracker::Limits,
    rule::load,
};

const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
const LIVE: u64 = 100_000;
/// A build without optimisation takes minutes for a million.
const THROUGH: u64 = if cfg!(debug_assertions) { 200_000 } else { 1_000_000 };
const MIB: u64 = 1 << 20;
const SECOND: u64 = 1_000_000_000;

/// Resident bytes of this process.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64
}

struct World {
    core: Core,
    time: u64,
    with_transfers: bool,
}

impl World {
    fn new(with_transfers: bool) -> Self {
        let limits = Limits { requests: 2 * LIVE as usize, transfers: LIVE as usize + 1 };
        let mut core = Core::new(load::defaults().unwrap(), limits);
        let attach = Input::Attach { process: PROCESS, identity: Box::default(), clock_offset: 0 };
        core.apply(attach, &mut Effects::default());
        Self { core, time: SECOND, with_transfers }
    }

    fn see(&mut self, body: Body) {
        self.time += 1_000;
        let event = Event { pid: PROCESS.pid, tid: 7, at: Monotonic(self.time), sequence: 1, detail_lost: false, body };
        self.core.apply(Input::Event(event), &mut Effects::default());
    }

    /// A request gets as far as being transferred.
    fn begin(&mut self, sender: u64) {
        let (room, handle) = (room(sender), handle(sender));
        let counts = ChunkCounts { queued: 1, ..ChunkCounts::default() };
        let rid = Some(Rid { text: format!("{sender:032x}"), truncated: false });
        self.see(Body::Open { room, sender, backend: Backend::Nixl });
        self.see(Body::Phase { room, sender, old: None, new: Some(Phase::WaitingForInput) });
        self.see(Body::Send { room, sender, pages: 8, last: true });
        self.see(Body::Chunk { room, step: ChunkStep::Queued, queue: None, counts });
        self.see(Body::Enter { room, sender, rid, queue_length: 1 });
        self.see(Body::Phase { room, sender, old: None, new: Some(Phase::Transferring) });
        if self.with_transfers {
            let Room::Number(number) = room else { return };
            let notification = Some(Notification { bytes: format!("{number}_kv_0_1_0").into_bytes(), cut: false });
            self.native(NativeEvent::Made { handle, operation: None, parts: 1, size: None, notification });
            self.native(NativeEvent::Posting { handle, operation: None, first_length: Some(65_536), lists: [0; 2] });
        }
    }

    /// It ends well.
    fn end(&mut self, sender: u64) {
        let (room, handle) = (room(sender), handle(sender));
        if self.with_transfers {
            self.native(NativeEvent::Releasing { handle, status: Some(TransferStatus::Done) });
        }
        self.see(Body::Chunk { room, step: ChunkStep::Ended, queue: None, counts: ChunkCounts::default() });
        self.see(Body::Phase { room, sender, old: None, new: Some(Phase::Success) });
        self.see(Body::Leave { room, sender, reason: LeaveReason::Success });
        self.see(Body::Close { room, sender });
    }

    fn native(&mut self, event: NativeEvent) {
        self.see(Body::Native(Box::new(event)));
    }
}

/// As a router chooses them: anywhere in 63 bits.
fn room(sender: u64) -> Room {
    Room::Number(sender.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 1)
}

fn handle(sender: u64) -> Handle {
    Handle { engine: Engine::Nixl, number: sender << 8 }
}

/// Growth with so many live requests, and after so many others have gone through.
fn growth(with_transfers: bool) -> [u64; 2] {
    let before = resident();
    let mut world = World::new(with_transfers);
    let ticked = |world: &mut World| {
        let mut effects = Effects::default();
        world.core.apply(Input::Tick { now: Monotonic(world.time), pace: Pace::As(None) }, &mut effects);
        assert!(effects.verdicts.is_empty(), "nobody is stuck");
        resident().saturating_sub(before)
    };
    (1..=LIVE).for_each(|sender| world.begin(sender));
    let live = ticked(&mut world);
    let through = |world: &mut World, numbers: RangeInclusive<u64>| {
        for sender in numbers {
            world.begin(LIVE + sender);
            world.end(sender);
        }
        ticked(world)
    };
    let half = through(&mut world, 1..=THROUGH / 2);
    let steady = through(&mut world, THROUGH / 2 + 1..=THROUGH);
    assert!(steady <= half + 8 * MIB, "{steady} bytes after {half}: it grows");
    assert_eq!(world.core.tracker().requests().count() as u64, LIVE);
    (THROUGH + 1..=LIVE + THROUGH).for_each(|sender| world.end(sender));
    assert_eq!(world.core.tracker().requests().count(), 0);
    println!(
        "{LIVE} live requests, transfers {with_transfers}: {:.1} MiB; after {THROUGH} went through: {:.1} MiB",
        live as f64 / MIB as f64,
        steady as f64 / MIB as f64,
    );
    [live, steady]
}

#[test]
fn a_hundred_thousand_live_requests_fit_into_64_mib_however_many_went_before() {
    let [live, steady] = growth(false);
    assert!(live <= 64 * MIB && steady <= 64 * MIB, "{live} bytes, then {steady}");
    // What the first one freed would count for a second one in the same process.
    let program = std::env::current_exe().unwrap();
    let arguments = ["--exact", "with_a_transfer_of_each_they_fit_into_160_mib", "--ignored", "--nocapture"];
    assert!(std::process::Command::new(program).args(arguments).status().unwrap().success());
}

#[test]
#[ignore = "run by the other one, in a process of its own"]
fn with_a_transfer_of_each_they_fit_into_160_mib() {
    let [live, steady] = growth(true);
    assert!(live <= 160 * MIB && steady <= 160 * MIB, "{live} bytes, then {steady}");
}
