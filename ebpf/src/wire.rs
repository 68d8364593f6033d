//! What an event looks like in the ring buffer.
//!
//! Every event starts with a [`Header`]; a [`Mark`] follows, and for the rare marks that need words,
//! `header.detail_length` bytes of UTF-8 after it. Integers are in the byte order of the machine.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size in bytes of an event that carries a detail, whatever the detail's length.
pub const DETAILED_EVENT_SIZE: usize = 512;
/// Longest detail in bytes that an event carries; a longer one is cut and flagged [`flag::DETAIL_TRUNCATED`].
pub const MAX_DETAIL: usize = DETAILED_EVENT_SIZE - size_of::<Header>() - size_of::<Mark>();

/// Bits of [`Header::flags`].
pub mod flag {
    /// The room is not a number of 0 … 2⁶⁴−1; [`super::Mark::room`] is 0. Set by the hook.
    pub const ROOM_OUT_OF_RANGE: u16 = 1;
    /// The detail was longer than [`super::MAX_DETAIL`]. Set in BPF.
    pub const DETAIL_TRUNCATED: u16 = 1 << 8;
    /// The detail could not be read from the server's memory; the event carries none. Set in BPF.
    pub const DETAIL_FAULT: u16 = 1 << 9;
}

/// The first bytes of every event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Header {
    /// What happened: a value of [`Kind`].
    pub kind: u16,
    /// Bits of [`flag`].
    pub flags: u16,
    /// Process id, in the root pid namespace.
    pub tgid: u32,
    /// Thread id, in the root pid namespace.
    pub tid: u32,
    /// Bytes of detail that follow the payload.
    pub detail_length: u32,
    /// CLOCK_MONOTONIC in nanoseconds, without a time namespace's offset.
    pub time_ns: u64,
    /// Number of this event among those seen of this process, from 1. A gap is a lost event.
    pub sequence: u64,
}

/// What a call of `dislodge_mark` said. The meaning of `value` depends on the kind (ARCHITECTURE.md, "The mark").
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Mark {
    /// SGLang's `bootstrap_room`; 0 where the mark is not about a room.
    pub room: u64,
    /// Depends on the kind.
    pub value: u64,
    /// Serial of the sender, from 1; 0 where there is none.
    pub sender: u64,
}

/// A mark without words, as it stands in the ring.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct MarkEvent {
    /// What, who, when.
    pub header: Header,
    /// The call's arguments.
    pub mark: Mark,
}

/// A mark with words, as it stands in the ring; of `detail` only `header.detail_length` bytes count.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct DetailedEvent {
    /// What, who, when.
    pub header: Header,
    /// The call's arguments.
    pub mark: Mark,
    /// UTF-8, of which `header.detail_length` bytes count.
    pub detail: [u8; MAX_DETAIL],
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal),* $(,)?) => {
        /// The kinds of event. Numbers are part of the contract with the hook.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Kind { $($(#[$doc])* $name = $number),* }

        impl Kind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The kind of this number, if there is one.
            pub const fn from_number(number: u16) -> Option<Self> {
                match number { $($number => Some(Self::$name),)* _ => None }
            }
        }
    };
}

kinds! {
    /// Who the server is: versions, ranks, capabilities. Carries JSON.
    Hello = 1,
    /// The entries of a resynchronisation follow.
    StateBegin = 2,
    /// One live sender, as the hook knows it. Carries JSON.
    Entry = 3,
    /// The entries of a resynchronisation are complete. Carries JSON.
    StateEnd = 4,
    /// A sender was created.
    Open = 10,
    /// A sender's object is gone.
    Close = 11,
    /// `poll()` returned another status than before.
    Phase = 12,
    /// `abort()` was called.
    Abort = 13,
    /// `update_status()` changed a room's status, or was dropped.
    Update = 14,
    /// `send()` was called.
    Send = 15,
    /// `clear()` was called.
    Clear = 16,
    /// `failure_exception()` was called.
    Failure = 17,
    /// A request entered the inflight queue. Carries the rid.
    Enter = 18,
    /// A request left the inflight queue.
    Leave = 19,
    /// The decode side aborted a room.
    PeerAbort = 20,
    /// A chunk was put into a transfer queue.
    ChunkQueued = 21,
    /// A transfer worker took a chunk.
    WorkBegin = 22,
    /// A transfer worker is done with a chunk.
    WorkEnd = 23,
    /// The scheduler passed its inflight queue.
    Pass = 24,
    /// Generation was paused: no passes until resumed.
    Paused = 25,
    /// Generation was resumed.
    Resumed = 26,
    /// The hook set a failure flag.
    Remedy = 27,
}

impl Kind {
    /// Whether the hook passes a detail with this kind.
    pub const fn has_detail(self) -> bool {
        matches!(self, Self::Hello | Self::Entry | Self::StateEnd | Self::Enter)
    }
}

const _: () = assert!(size_of::<Header>() == 32);
const _: () = assert!(size_of::<MarkEvent>() == 56);
const _: () = assert!(size_of::<MarkEvent>() <= 128);
const _: () = assert!(size_of::<DetailedEvent>() == DETAILED_EVENT_SIZE);
const _: () = assert!(MAX_DETAIL == 456);
