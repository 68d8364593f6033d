//! What is known of one request, of its room and of its server.
//!
//! A request is known by its *sender's serial* in its process: rooms are reused and shared, and CPython gives a new
//! sender the address of a freed one, so neither is ever a key.

pub mod correlate;
mod ended;
pub mod ends;
mod flush;
pub mod gauge;
mod notified;
mod place;
mod process;
pub mod rank;
pub mod tracker;
pub mod transfer;
pub mod transfers;

use serde::Serialize;

pub use ended::{Ended, ReleaseProof, UnsafeRelease};
use ends::RoomEnd;
pub use ends::Side;
use gauge::ServerGauge;
pub use notified::PeerEnded;
pub use place::{Queue, Receiving};
use rank::{DroppedBy, HeldBy, Ranks};

use crate::{
    event::{
        Backend, ChunkCounts, Hello, Phase, ProcessKey, Rid, Room,
        clock::Monotonic,
        native::{Engine, ErrorPoint},
    },
    record::codec::recorded,
    target::device::DeviceErrorKind,
};

/// A request instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct RequestKey {
    /// Its server process.
    pub process: ProcessKey,
    /// The serial that the hook gave its sender: from 1, never reused in a process.
    pub serial: u64,
}

/// What is known of one sender and its request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Serial of the sender.
    pub serial: u64,
    /// SGLang's `bootstrap_room`.
    pub room: Room,
    /// SGLang's request id: known once the request is in the inflight queue.
    pub rid: Option<Rid>,
    /// The transfer backend.
    pub backend: Backend,
    /// When the sender was created.
    pub created: Monotonic,
    /// What the sender polled last.
    pub phase: Option<Phase>,
    /// Since when.
    pub phase_since: Monotonic,
    /// Passes that the scheduler had made by then, as far as the agent saw.
    pub phase_passes: u64,
    /// When the request entered the inflight queue; nothing while it is not there.
    pub entered: Option<Monotonic>,
    /// Chunks given to `send()`.
    pub sent_chunks: u32,
    /// Pages given to `send()`.
    pub sent_pages: u64,
    /// Whether the last chunk was among them.
    pub sent_last: bool,
    /// When `abort()` was called last, and how many passes the scheduler had made by then.
    pub aborted: Option<Box<Aborted>>,
    /// When an `update_status(Failed)` of this room was dropped last, while this sender lived.
    pub update_dropped: Option<Monotonic>,
    /// When the decode side aborted the room last.
    pub peer_aborted: Option<Monotonic>,
    /// The other sender that was last seen on this room while both were live.
    pub shared_with: Option<u64>,
    /// The other sender that removed this room's status.
    pub cleared_by: Option<u64>,
    /// When it did, where the agent saw it.
    pub cleared_at: Option<Monotonic>,
    /// When its room, which had Failed, was made something better again, and what. Nothing once it has failed for good.
    pub resurrected: Option<Box<Resurrected>>,
    /// Another rank of the server that dropped it, while this one has it in its queue still.
    pub dropped_by: Option<Box<DroppedBy>>,
    /// Another rank of the server that holds it up: over here, it is not over there.
    pub held_by: Option<Box<HeldBy>>,
    /// What the other end of its room does, where exactly one is seen. Not looked at while the request is young.
    pub other_end: Option<Box<RoomEnd>>,
    /// When a failure flag was set by us.
    pub remedied: Option<Monotonic>,
    /// How it ended, when it did.
    pub ended: Option<Box<Ended>>,
    /// Where a decode server has it; nothing on a prefill.
    pub receiving: Option<Receiving>,
    /// When `failure_exception()` was called: its group fails it, whatever its own `poll()` says.
    pub failed: Option<Monotonic>,
}

recorded!(struct Request {
    serial, room, rid, backend, created, phase, phase_since, phase_passes, entered, sent_chunks, sent_pages, sent_last, aborted,
    update_dropped, peer_aborted, shared_with, cleared_by, cleared_at, remedied, ended, failed,
    resurrected, dropped_by, held_by, other_end, receiving,
});
recorded!(struct Aborted { at, passes });
recorded!(struct Resurrected { at, to });

/// An `abort()` that was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aborted {
    /// When.
    pub at: Monotonic,
    /// Passes that the scheduler had made by then, as far as the agent saw.
    pub passes: u64,
}

/// A failure that was overwritten: `update_status` keeps the larger number up to 0.5.15, and Failed is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resurrected {
    /// When.
    pub at: Monotonic,
    /// By what.
    pub to: Phase,
}

impl Request {
    /// A sender that has just been created, at `at`: nothing has happened to it.
    pub fn opened(serial: u64, room: Room, backend: Backend, at: Monotonic) -> Self {
        Self {
            serial,
            room,
            rid: None,
            backend,
            created: at,
            phase: None,
            phase_since: at,
            phase_passes: 0,
            entered: None,
            sent_chunks: 0,
            sent_pages: 0,
            sent_last: false,
            aborted: None,
            update_dropped: None,
            peer_aborted: None,
            shared_with: None,
            cleared_by: None,
            cleared_at: None,
            resurrected: None,
            dropped_by: None,
            held_by: None,
            other_end: None,
            remedied: None,
            ended: None,
            failed: None,
            receiving: None,
        }
    }

    /// Whether it is in the inflight queue.
    pub fn is_inflight(&self) -> bool {
        self.entered.is_some() && self.ended.is_none()
    }

    /// The time of the oldest thing that is known of it.
    pub fn oldest(&self) -> Monotonic {
        let queued = self.entered.or(self.receiving.map(|receiving| receiving.since));
        let others = [Some(self.phase_since), queued, self.aborted.as_ref().map(|aborted| aborted.at)];
        others.into_iter().flatten().fold(self.created, Monotonic::min)
    }
}

/// What is known of a room in one process.
#[derive(Clone, Debug, Default)]
pub struct RoomState {
    /// Serials of the live senders on it.
    pub senders: Vec<u64>,
    /// Its chunks, once the hook has said.
    pub chunks: Option<ChunkCounts>,
    /// The transfer queue that its last chunk was put into, where the hook says.
    pub queue: Option<u64>,
    /// When the hook last said that no chunk of it was at work or abandoned: all that it had posted by then was over.
    pub settled_at: Option<Monotonic>,
    /// When its counts were last above zero.
    pub busy_until: Option<Monotonic>,
    /// What `update_status` left behind last; nothing when the room was removed or never seen.
    pub status: Option<Phase>,
    /// Whether the room's status is known to be absent.
    pub known_absent: bool,
    /// Chunks given to `send()` by any sender of this room that the agent knows of.
    pub sent_chunks: u64,
}

impl RoomState {
    /// The hook says how many chunks there are.
    fn counted(&mut self, counts: ChunkCounts, at: Monotonic) {
        self.chunks = Some(counts);
        if counts.working == 0 && !counts.abandoned && !counts.attached_late {
            self.settled_at = Some(at);
        }
    }
}

recorded!(struct RoomState { senders, chunks, queue, settled_at, busy_until, status, known_absent, sent_chunks });

/// Why the tracker's picture of a process may be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ResyncReason {
    /// The agent has just attached.
    Attached,
    /// Events were lost.
    EventsLost,
    /// The queue length that the scheduler reports is not the tracker's.
    QueueLengthDiffers,
    /// An event named a sender that the tracker does not know.
    UnknownSender,
    /// An event's words were lost.
    DetailLost,
    /// Fewer entries came than the hook marked.
    EntriesMissing,
}

impl ResyncReason {
    /// Whether events are missing that the hook's answer does not tell of: what each worker is doing.
    pub(crate) fn is_loss(self) -> bool {
        match self {
            Self::EventsLost | Self::QueueLengthDiffers | Self::UnknownSender | Self::EntriesMissing => true,
            Self::Attached | Self::DetailLost => false,
        }
    }

    /// Label value of metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attached => "attached",
            Self::EventsLost => "events_lost",
            Self::QueueLengthDiffers => "queue_length_differs",
            Self::UnknownSender => "unknown_sender",
            Self::DetailLost => "detail_lost",
            Self::EntriesMissing => "entries_missing",
        }
    }
}

/// How well the tracker knows a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// Everything that lives is known.
    Complete,
    /// A resynchronisation is needed.
    Needed(ResyncReason),
    /// The hook was asked; its answer is not complete yet.
    Asked {
        /// The epoch asked for.
        epoch: u64,
        /// When.
        at: Monotonic,
        /// Why.
        reason: ResyncReason,
    },
}

/// What is known of a server process, beside its requests.
#[derive(Clone, Debug)]
pub struct ServerState {
    /// What it said of itself.
    pub hello: Option<Box<Hello>>,
    /// How well it is known.
    pub sync: Sync,
    /// Length of the inflight queue as the scheduler reported it last, and when.
    pub queue_length: Option<(u32, Monotonic)>,
    /// Requests in its inflight queue, as far as the agent knows: who came or left since the last pass that it saw counts.
    pub inflight: u32,
    /// Passes that the scheduler made, as far as the agent saw.
    pub passes: u64,
    /// When the scheduler's loop last showed that it turns: by a pass, or by resuming after one; nothing before the first
    /// pass that the agent saw.
    pub turned: Option<Monotonic>,
    /// How it compares with the other ranks of its replica; nothing where it has one rank, or has not said which it is.
    pub ranks: Option<Box<Ranks>>,
    /// Senders whose requests are not in the inflight queue, as of the last tick: for a batch to run, one of them is in it.
    pub to_prefill: u32,
    /// Whether generation is paused.
    pub paused: bool,
    /// What its transfer engine shows.
    pub native: NativeState,
    /// What its own `/metrics` says of its queues, where that was read.
    pub gauge: ServerGauge,
}

recorded!(struct ServerState {
    hello, sync, queue_length, inflight, passes, paused, native, turned, ranks, to_prefill, gauge,
});
recorded!(enum Sync { 0 Complete {}, 1 Needed(reason), 2 Asked { epoch, at, reason } });

impl ServerState {
    /// A server that has said nothing yet.
    pub fn new(sync: Sync) -> Self {
        let native = NativeState::default();
        Self {
            hello: None,
            sync,
            queue_length: None,
            inflight: 0,
            passes: 0,
            turned: None,
            ranks: None,
            to_prefill: 0,
            paused: false,
            native,
            gauge: ServerGauge::default(),
        }
    }
}

/// Whether a process's transfers are seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "watch", rename_all = "snake_case")]
pub enum Watch {
    /// They are not, or not all of them.
    #[default]
    No,
    /// Each one that was made since then: its posting, and its end.
    Since {
        /// When the probes were in place, or the last loss ended.
        at: Monotonic,
        /// Of which engine.
        engine: Engine,
    },
}

/// What the probes on a process's transfer engine tell, beside its transfers.
#[derive(Clone, Debug, Default)]
pub struct NativeState {
    /// Whether transfers are seen.
    pub watch: Watch,
    /// The endpoint that was given up last.
    pub endpoint_error: Option<EndpointFailure>,
    /// The work completion with an error that came last: when, its `ibv_wc_status`.
    pub completion_error: Option<(Monotonic, u32)>,
    /// What its RDMA devices counted last, of each kind of error.
    pub device_errors: Vec<DeviceError>,
    /// That the only process to which it was seen to write has ended.
    pub peer_ended: Option<PeerEnded>,
}

/// An error that an RDMA device counted: of whoever uses it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceError {
    /// When it was read.
    pub at: Monotonic,
    /// The device's name.
    pub device: String,
    /// The port's number.
    pub port: u32,
    /// The counter, as the driver names it.
    pub counter: String,
    /// What it counts.
    pub kind: DeviceErrorKind,
    /// How many more since the reading before.
    pub by: u64,
}

recorded!(enum Watch { 0 No {}, 1 Since { at, engine } });
recorded!(struct NativeState { watch, endpoint_error, completion_error, device_errors, peer_ended });
recorded!(struct EndpointFailure { at, point, status });

/// An endpoint that was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointFailure {
    /// When.
    pub at: Monotonic,
    /// Where it was seen.
    pub point: ErrorPoint,
    /// `ucs_status_t`.
    pub status: i8,
}
