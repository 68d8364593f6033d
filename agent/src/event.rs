//! What the agent reads from the ring buffer, in the agent's own words.
//!
//! [`decode`] turns bytes into [`Event`]s; nothing else in the agent knows how the wire looks.

pub mod clock;
pub mod decode;
pub mod exposition;
pub mod hello;
pub mod native;
pub mod receiver;

use std::fmt;

use serde::{Deserialize, Serialize};

use clock::Monotonic;
use native::NativeEvent;
use receiver::ReceiverEvent;

/// A process of this node that cannot be confused with a later one of the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcessKey {
    /// Process id in the agent's (root) pid namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot (`/proc/PID/stat`, field 22).
    pub start: u64,
}

/// SGLang's `bootstrap_room`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String")]
pub enum Room {
    /// A room as SGLang's router chooses them.
    Number(u64),
    /// A client chose something else than a number of 0 … 2⁶⁴−1: several rooms may hide behind this one.
    OutOfRange,
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::OutOfRange => f.write_str("out of range"),
        }
    }
}

impl From<Room> for String {
    fn from(room: Room) -> Self {
        room.to_string()
    }
}

impl TryFrom<String> for Room {
    type Error = std::num::ParseIntError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        if text == Self::OutOfRange.to_string() {
            return Ok(Self::OutOfRange);
        }
        text.parse().map(Self::Number)
    }
}

/// What `poll()` returns: SGLang's `KVPoll` (`disaggregation/base/conn.py`, 0.4.5 to 0.5.23).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// Over, without success.
    Failed,
    /// The decode side has not registered yet.
    Bootstrapping,
    /// The decode side is ready, nothing is known to be on its way.
    WaitingForInput,
    /// A worker took a chunk.
    Transferring,
    /// Over.
    Success,
}

impl Phase {
    /// Every phase, in the order of SGLang's numbers.
    pub const ALL: [Self; 5] =
        [Self::Failed, Self::Bootstrapping, Self::WaitingForInput, Self::Transferring, Self::Success];

    /// SGLang's number.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// The phase of SGLang's number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Whether the scheduler drops a request that polls this.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Failed | Self::Success)
    }

    /// SGLang's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Failed => "Failed",
            Self::Bootstrapping => "Bootstrapping",
            Self::WaitingForInput => "WaitingForInput",
            Self::Transferring => "Transferring",
            Self::Success => "Success",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The transfer backend that a sender belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// A class that the hook does not know.
    #[default]
    Other,
    /// `disaggregation/nixl`.
    Nixl,
    /// `disaggregation/fake`: warm-up and health checks, on any backend.
    Fake,
    /// `disaggregation/mooncake`.
    Mooncake,
    /// `disaggregation/mori`.
    Mori,
    /// `disaggregation/ascend`.
    Ascend,
}

impl Backend {
    /// Every backend.
    pub const ALL: [Self; 6] = [Self::Other, Self::Nixl, Self::Fake, Self::Mooncake, Self::Mori, Self::Ascend];

    fn from_number(number: u64) -> Self {
        match number {
            1 => Self::Nixl,
            2 => Self::Fake,
            3 => Self::Mooncake,
            4 => Self::Mori,
            5 => Self::Ascend,
            _ => Self::Other,
        }
    }

    /// Its name in SGLang's `--disaggregation-transfer-backend`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Other => "other",
            Self::Nixl => "nixl",
            Self::Fake => "fake",
            Self::Mooncake => "mooncake",
            Self::Mori => "mori",
            Self::Ascend => "ascend",
        }
    }
}

/// How a failure is told to a sender, by what the sender has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureFlag {
    /// `_send_error`, then `_send_failed` (NIXL 0.5.12 … 0.5.22).
    SendFailed,
    /// `conclude_state`, where `poll()` reads it (NIXL 0.5.23, fake from 0.5.13).
    ConcludeState,
    /// A `poll` on the instance that returns Failed (the others).
    MarkingPoll,
}

impl FailureFlag {
    fn from_number(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::SendFailed),
            2 => Some(Self::ConcludeState),
            3 => Some(Self::MarkingPoll),
            _ => None,
        }
    }

    /// Its name in the contract.
    pub fn name(self) -> &'static str {
        match self {
            Self::SendFailed => "send_failed",
            Self::ConcludeState => "conclude_state",
            Self::MarkingPoll => "marking_poll",
        }
    }
}

/// A request id as SGLang has it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rid {
    /// The id, or its beginning.
    pub text: String,
    /// Whether the id goes on: such a one is never matched, since SGLang matches by prefix.
    pub truncated: bool,
}

/// Why a request left the inflight queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaveReason {
    /// Its sender had polled Success.
    Success,
    /// Its sender had polled Failed.
    Failed,
    /// Its sender had polled neither: the queue was emptied by other means.
    Removed,
}

/// Chunks of a room in the server's own transfer queues and workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkCounts {
    /// Handed to a transfer queue, not taken by a worker yet.
    pub queued: u16,
    /// Taken by a worker that has not come back for the next one.
    pub working: u16,
    /// A chunk of this room ended with an error: a handle may still be running.
    pub abandoned: bool,
    /// The hook was loaded after a worker had entered its queue: the counts may be too low.
    pub attached_late: bool,
    /// This release has no transfer queues (NIXL up to 0.5.11): the counts say nothing.
    pub no_queues: bool,
}

impl ChunkCounts {
    fn unpack(value: u64) -> Self {
        Self {
            queued: value as u16,
            working: (value >> 16) as u16,
            abandoned: value & (1 << 32) != 0,
            attached_late: value & (1 << 33) != 0,
            no_queues: value & (1 << 34) != 0,
        }
    }
}

/// A step in the life of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChunkStep {
    /// Put into a transfer queue.
    Queued,
    /// Taken by a worker.
    Begun,
    /// The worker came back.
    Ended,
}

/// What a server says of itself: ARCHITECTURE.md, `hello`. Every value may be missing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hello {
    /// Version of the hook.
    pub hook: Option<String>,
    /// The agent's epoch that this answers, 0 when unasked.
    pub epoch: u64,
    /// SGLang's version.
    pub sglang: Option<String>,
    /// The transfer engine and its version.
    pub engine: Option<String>,
    /// Python's version.
    pub python: Option<String>,
    /// `prefill` or `decode`.
    pub role: Option<String>,
    /// The transfer backend.
    pub backend: Option<String>,
    /// Class of the senders.
    pub sender: Option<String>,
    /// How a failure is told to its senders.
    pub flag: Option<FailureFlag>,
    /// What counts chunks: `queues`, `handles` or `none`.
    pub counts: Option<String>,
    /// Whether the hook was loaded after the transfer workers had started.
    pub late: bool,
    /// Size of the attention TP group.
    pub tp: Option<u32>,
    /// This scheduler's rank in it.
    pub tp_rank: Option<u32>,
    /// Pipeline stages.
    pub pp: Option<u32>,
    /// This scheduler's stage.
    pub pp_rank: Option<u32>,
    /// Size of the attention CP group.
    pub cp: Option<u32>,
    /// Data-parallel replicas.
    pub dp: Option<u32>,
    /// This scheduler's replica.
    pub dp_rank: Option<u32>,
    /// `SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT` in seconds.
    pub bootstrap_timeout: Option<f64>,
    /// `SGLANG_DISAGGREGATION_WAITING_TIMEOUT` in seconds.
    pub waiting_timeout: Option<f64>,
}

/// One live sender as the hook knows it: ARCHITECTURE.md, `entry`. Times are of the agent's clock once
/// [`Entry::in_clock_of_the_node`] was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its backend.
    pub backend: Backend,
    /// What it polled last.
    pub phase: Option<Phase>,
    /// Since when.
    pub phase_since: Option<Monotonic>,
    /// When it was created.
    pub created: Option<Monotonic>,
    /// When its request entered the inflight queue, if it is there.
    pub entered: Option<Monotonic>,
    /// Chunks given to `send()`.
    pub sent_chunks: u32,
    /// Pages given to `send()`.
    pub sent_pages: u64,
    /// Whether the last chunk was among them.
    pub sent_last: bool,
    /// When `abort()` was called last.
    pub aborted: Option<Monotonic>,
    /// When an `update_status(Failed)` of its room was dropped last.
    pub dropped: Option<Monotonic>,
    /// Serial of the other live sender that was last seen on its room.
    pub shared_with: Option<u64>,
    /// Serial of the other sender that removed its room's status.
    pub cleared_by: Option<u64>,
    /// Chunks of its room.
    pub chunks: ChunkCounts,
    /// Its request, when it is in the inflight queue.
    pub rid: Option<Rid>,
}

impl Entry {
    /// Takes the offset of the server's time namespace (`/proc/PID/timens_offsets`, nanoseconds) out of every time.
    #[must_use]
    pub fn in_clock_of_the_node(mut self, offset: i64) -> Self {
        let times = [&mut self.phase_since, &mut self.created, &mut self.entered, &mut self.aborted, &mut self.dropped];
        for time in times.into_iter().flatten() {
            time.0 = time.0.saturating_add_signed(offset.saturating_neg());
        }
        self
    }
}

/// One event of one process.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Process id, in the root pid namespace.
    pub pid: u32,
    /// Thread id, in the root pid namespace.
    pub tid: u32,
    /// When.
    pub at: Monotonic,
    /// Number among the events seen of this process, from 1.
    pub sequence: u64,
    /// Whether its words were cut or could not be read.
    pub detail_lost: bool,
    /// What.
    pub body: Body,
}

/// What happened. The kinds are those of `dislodge_ebpf::wire::Kind`, which tells each one's meaning.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are named after the contract's, which explains them")]
pub enum Body {
    Hello(Box<Hello>),
    StateBegin { epoch: u64 },
    Entry { room: Room, sender: u64, epoch: u64, entry: Box<Entry> },
    StateEnd { epoch: u64, entries: u64 },
    Open { room: Room, sender: u64, backend: Backend },
    Close { room: Room, sender: u64 },
    Phase { room: Room, sender: u64, old: Option<Phase>, new: Option<Phase> },
    Abort { room: Room, sender: u64, room_present: bool },
    Update { room: Room, requested: Option<Phase>, before: Option<Phase>, after: Option<Phase> },
    Send { room: Room, sender: u64, pages: u32, last: bool },
    Clear { room: Room, sender: u64, removed: bool },
    Failure { room: Room, sender: u64 },
    Enter { room: Room, sender: u64, rid: Option<Rid>, queue_length: u64 },
    Leave { room: Room, sender: u64, reason: LeaveReason },
    PeerAbort { room: Room, room_present: bool },
    Chunk { room: Room, step: ChunkStep, counts: ChunkCounts, queue: Option<u64> },
    Pass { queue_length: u32, passes: u32 },
    Paused,
    Resumed,
    Remedy { room: Room, sender: u64, flag: Option<FailureFlag> },
    Receiver(ReceiverEvent),
    Native(Box<NativeEvent>),
}
