//! What a look counts: polls of one transfer, completions of one process. Kept in maps, not sent as events: these
//! functions run up to a million times a second.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Whose polls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct PollKey {
    /// Slot of the process.
    pub slot: u64,
    /// Handle or batch id.
    pub object: u64,
}

/// The polls of one transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Polls {
    /// How many.
    pub count: u64,
    /// When the last one returned, CLOCK_MONOTONIC in nanoseconds.
    pub last_ns: u64,
    /// What it returned, sign-extended.
    pub status: u64,
    /// Bytes transferred so far, where the engine says.
    pub bytes: u64,
}

/// Whose completions, of what, how ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct CompletionKey {
    /// Slot of the process.
    pub slot: u32,
    /// A [`CompletionPoint`].
    pub point: u16,
    /// `ibv_wc_status` of a work completion, `ucs_status_t` of a UCX request.
    pub status: i16,
}

/// Where completions are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum CompletionPoint {
    /// `mooncake::RdmaContext::poll`.
    MooncakePoll = 0,
    /// The provider's `poll_cq`, found at run time.
    VerbsPollCq = 1,
    /// `uct_rc_ep_send_op_completion_handler` and its likes: rc_verbs, rc_mlx5, dc_mlx5.
    UctRcOperation = 2,
    /// `ucp_proto_request_zcopy_completion`: any transport.
    UcpRequest = 3,
}

impl CompletionPoint {
    /// Every point.
    pub const ALL: [Self; 4] = [Self::MooncakePoll, Self::VerbsPollCq, Self::UctRcOperation, Self::UcpRequest];
}

/// The completions of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Completions {
    /// How many.
    pub count: u64,
    /// When the last one was seen, CLOCK_MONOTONIC in nanoseconds.
    pub last_ns: u64,
}
