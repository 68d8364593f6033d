//! What an event looks like in the ring buffer.
//!
//! Every event starts with a [`Header`]; a [`Mark`] follows where the hook is the author, a [`Native`] where a transfer
//! engine's library is (kinds from 100 on), and for the kinds that need them `header.detail_length` bytes after it:
//! UTF-8 of a mark, a notification's own bytes of a transfer. Integers are in the byte order of the machine.

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
    /// The detail, or what else was to be read there, could not be read from the server's memory. Set in BPF.
    pub const DETAIL_FAULT: u16 = 1 << 9;
    /// [`super::Native::size`] is extrapolated from the first descriptors. Set in BPF.
    pub const SIZE_ESTIMATED: u16 = 1 << 10;
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

/// What a call into a transfer engine said. The meaning of `value` and `size` depends on the kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Native {
    /// What it is about: the address of a NIXL handle, a Mooncake batch id, the address of a UCX endpoint; 0 where
    /// there is none. Engines reuse them.
    pub object: u64,
    /// Depends on the kind; a signed status is sign-extended.
    pub value: u64,
    /// Depends on the kind: bytes, or a number of descriptors.
    pub size: u64,
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
    /// NIXL made a transfer (`createXferReq` or `makeXferReq` returned): object = handle, value = operation (0 READ,
    /// 1 WRITE) | number of descriptors << 8, size = bytes, or 0 where only prepared descriptors say. Carries the
    /// notification.
    NixlMade = 100,
    /// NIXL refused to make a transfer: value = `nixl_status_t`.
    NixlNotMade = 101,
    /// `postXferReq` was entered: object = handle, value = address of its list of local descriptors where the handle
    /// holds a pointer to it (up to 1.1; later the list is in the handle, [`NIXL_LOCAL_LIST`] bytes on).
    NixlPosting = 102,
    /// `postXferReq` returned something else than "in progress": object = handle, value = `nixl_status_t`.
    NixlPosted = 103,
    /// `getXferStatus` returned another status than before: object = handle, value = `nixl_status_t`. Only during a look.
    NixlStatus = 104,
    /// `releaseXferReq` was entered: object = handle, value = the status that the handle had, or [`STATUS_NOT_READ`].
    NixlReleasing = 105,
    /// A notification arrived. Carries it as UCX delivered it (serialised), size = its whole length.
    NixlNotificationArrived = 106,
    /// A notification was handed to UCX. Carries it, size = its whole length, value = 1 when serialised.
    NixlNotificationSent = 107,
    /// NIXL's UCX plugin has posted a range of a transfer and asked UCX to flush it: object = address of the list of
    /// local descriptors, value = the flush request (0: done already; a small negative number: an error),
    /// size = descriptors | nanoseconds since the range was begun << 32.
    NixlRangePosted = 108,
    /// A flush of UCX ended: object = address of the completion in its request, value = `ucs_status_t`, sign-extended.
    UcpFlushed = 109,
    /// Mooncake allocated a batch: object = batch id, value = how many transfers it has room for.
    MooncakeAllocated = 120,
    /// `submitTransfer` was entered: object = batch id, value = opcode (0 READ, 1 WRITE) | bytes of the vector of
    /// requests << 8, size = length of the first.
    MooncakeSubmitting = 121,
    /// `submitTransfer` returned an error: object = batch id, value = Mooncake's status code.
    MooncakeNotSubmitted = 122,
    /// `getBatchTransferStatus` gave another status than before: object = batch id, value = `TransferStatusEnum`,
    /// size = bytes transferred. Only during a look.
    MooncakeStatus = 123,
    /// `freeBatchID` returned, or was entered where returns are not probed: object = batch id, value = what it returned
    /// (0: freed) | [`batch`] flags, size = tasks that are not complete | failed ones << 32, among those that were read.
    MooncakeFreed = 124,
    /// UCX or NIXL gave up an endpoint: object = endpoint or interface, value = `ucs_status_t` | [`ErrorPoint`] << 8.
    EndpointError = 140,
    /// A work completion with an error: object = `wr_id`, value = `ibv_wc_status` | vendor error << 32,
    /// size = QP number.
    CompletionError = 141,
}

/// Bits of the value of a [`Kind::MooncakeFreed`].
pub mod batch {
    /// Not every task of the batch could be read.
    pub const NOT_ALL_READ: u64 = 1 << 16;
    /// What `freeBatchID` returned is not known.
    pub const RESULT_NOT_SEEN: u64 = 1 << 17;
}

/// Where an endpoint's error was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ErrorPoint {
    /// `nixlUcxEp::err_cb`.
    NixlErrorCallback = 0,
    /// `ucp_ep_set_lanes_failed`, `ucp_ep_set_failed`.
    UcpEndpoint = 1,
    /// `uct_iface_handle_ep_err`.
    UctInterface = 2,
}

impl Kind {
    /// Whether the hook passes a detail with this kind.
    pub const fn has_detail(self) -> bool {
        matches!(self, Self::Hello | Self::Entry | Self::StateEnd | Self::Enter)
    }

    /// The kinds that the hook marks.
    pub fn marks() -> impl Iterator<Item = &'static Self> {
        Self::ALL.iter().filter(|kind| !kind.is_native())
    }

    /// Whether the event comes from a transfer engine's library and carries a [`Native`].
    pub const fn is_native(self) -> bool {
        self as u16 >= Self::NixlMade as u16
    }
}

/// Where `nixlXferReqH` has its list of local descriptors, or (up to 1.1) a pointer to it, in bytes.
pub const NIXL_LOCAL_LIST: u64 = 16;
/// [`Native::value`] of a release whose status BPF could not read. No engine has such a status.
pub const STATUS_NOT_READ: i64 = i32::MIN as i64;

const _: () = assert!(size_of::<Native>() == size_of::<Mark>());
const _: () = assert!(size_of::<Header>() == 32);
const _: () = assert!(size_of::<MarkEvent>() == 56);
const _: () = assert!(size_of::<MarkEvent>() <= 128);
const _: () = assert!(size_of::<DetailedEvent>() == DETAILED_EVENT_SIZE);
const _: () = assert!(MAX_DETAIL == 456);
