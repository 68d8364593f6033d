//! What calls into a transfer engine's library say, in the engines' own terms but one shape.

mod decode;

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

pub(super) use decode::native_event;

/// A transfer engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// NIXL: a transfer is a `nixlXferReqH`.
    Nixl,
    /// Mooncake: a transfer is a batch.
    Mooncake,
}

impl Engine {
    /// Every engine.
    pub const ALL: [Self; 2] = [Self::Nixl, Self::Mooncake];

    /// Label value of metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
        }
    }
}

/// A transfer as its engine names it. Engines reuse the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Handle {
    /// Whose.
    pub engine: Engine,
    /// Address of the NIXL handle, or the batch id.
    pub number: u64,
}

/// Which way the bytes go, as seen by who posts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// From the peer.
    Read,
    /// To the peer: what SGLang's prefill does.
    Write,
    /// The memory that says could not be read.
    NotRead,
}

impl Operation {
    fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Read,
            1 => Self::Write,
            _ => Self::NotRead,
        }
    }
}

/// What an engine says of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum TransferStatus {
    /// Made or allocated, not posted.
    NotPosted,
    /// Under way.
    InProgress,
    /// Over, everything arrived.
    Done,
    /// Over, with the engine's code: `nixl_status_t`, or Mooncake's `TransferStatusEnum`.
    Failed {
        /// The code.
        code: i32,
    },
}

impl TransferStatus {
    /// Of a `nixl_status_t` (NIXL, `src/api/cpp/nixl_types.h`).
    pub fn of_nixl(code: i32) -> Self {
        match code {
            1 => Self::InProgress,
            0 => Self::Done,
            -1 => Self::NotPosted,
            code => Self::Failed { code },
        }
    }

    /// Of a `TransferStatusEnum` (Mooncake, `transport/transport.h`).
    pub fn of_mooncake(code: i32) -> Self {
        match code {
            0 | 1 => Self::InProgress,
            4 => Self::Done,
            code => Self::Failed { code },
        }
    }

    /// Whether nothing of the transfer is under way any more.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Done | Self::Failed { .. })
    }
}

/// The engine's name of a failure's code.
pub fn failure_name(engine: Engine, code: i32) -> &'static str {
    match (engine, code) {
        (Engine::Nixl, -2) => "INVALID_PARAM",
        (Engine::Nixl, -3) => "BACKEND",
        (Engine::Nixl, -4) => "NOT_FOUND",
        (Engine::Nixl, -5) => "MISMATCH",
        (Engine::Nixl, -6) => "NOT_ALLOWED",
        (Engine::Nixl, -7) => "REPOST_ACTIVE",
        (Engine::Nixl, -8) => "UNKNOWN",
        (Engine::Nixl, -9) => "NOT_SUPPORTED",
        (Engine::Nixl, NIXL_REMOTE_DISCONNECT) => "REMOTE_DISCONNECT",
        (Engine::Nixl, -11) => "CANCELED",
        (Engine::Nixl, -12) => "NO_TELEMETRY",
        (Engine::Mooncake, 2) => "INVALID",
        (Engine::Mooncake, 3) => "CANCELED",
        (Engine::Mooncake, 5) => "TIMEOUT",
        (Engine::Mooncake, 6) => "FAILED",
        _ => "unknown code",
    }
}

/// `NIXL_ERR_REMOTE_DISCONNECT`.
pub const NIXL_REMOTE_DISCONNECT: i32 = -10;

/// How many bytes a transfer moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Bytes.
    pub bytes: u64,
    /// Whether they are extrapolated from its first descriptors.
    pub estimated: bool,
}

/// Bytes that an application attached to a transfer, or sent beside one.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notification {
    /// The bytes, or the first of them.
    pub bytes: Vec<u8>,
    /// Whether there are more.
    pub cut: bool,
}

/// Name of an agent of the engine, as its application chose it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer(pub String);

impl fmt::Debug for Notification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Notification({}{})", self.bytes.escape_ascii(), if self.cut { "…" } else { "" })
    }
}

/// Where the end of an endpoint was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorPoint {
    /// `nixlUcxEp::err_cb`.
    Nixl,
    /// `ucp_ep_set_lanes_failed`, `ucp_ep_set_failed`.
    Ucp,
    /// `uct_iface_handle_ep_err`.
    Uct,
}

/// What UCX returned for a flush (`ucs_status_ptr_t`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Nothing was under way.
    Done,
    /// It could not be asked for.
    Failed {
        /// `ucs_status_t`.
        status: i8,
    },
    /// This request is under way.
    UnderWay {
        /// Its address.
        request: u64,
    },
}

impl Flush {
    fn of_pointer(pointer: u64) -> Self {
        match pointer as i64 {
            0 => Self::Done,
            // UCS_ERR_LAST is −100.
            error @ -100..0 => Self::Failed { status: error as i8 },
            _ => Self::UnderWay { request: pointer },
        }
    }
}

/// A call into a transfer engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NativeEvent {
    /// A transfer was made; nothing moves yet.
    Made {
        /// Which.
        handle: Handle,
        /// Which way; Mooncake says so when it is submitted.
        operation: Option<Operation>,
        /// Descriptors or requests that it has, or has room for.
        parts: u64,
        /// Bytes, where they are known.
        size: Option<Size>,
        /// What the peer is to be told when it is done.
        notification: Option<Notification>,
    },
    /// The engine refused to make a transfer.
    NotMade {
        /// The engine's code.
        code: i32,
    },
    /// A transfer is being posted: from now on bytes may move.
    Posting {
        /// Which.
        handle: Handle,
        /// Which way, where this call says.
        operation: Option<Operation>,
        /// Bytes of its first request, where this call says.
        first_length: Option<u64>,
        /// Where its local descriptors may be listed: NIXL's handles have the list in them, or a pointer to it.
        lists: [u64; 2],
    },
    /// A range of a transfer's descriptors was posted, and a flush behind it.
    RangePosted {
        /// Address of the list of local descriptors.
        list: u64,
        /// The flush.
        flush: Flush,
        /// How many descriptors.
        descriptors: u64,
        /// How long posting them took.
        took: Duration,
    },
    /// A flush ended: what was posted before it is over.
    Flushed {
        /// Address of the completion in its request.
        completion: u64,
        /// `ucs_status_t`.
        status: i8,
    },
    /// What the engine said of a transfer.
    Status {
        /// Which.
        handle: Handle,
        /// What.
        status: TransferStatus,
        /// Bytes that have moved, where the engine says.
        moved: Option<u64>,
    },
    /// What posting a transfer returned, where that is not "in progress".
    Posted {
        /// Which.
        handle: Handle,
        /// What.
        status: TransferStatus,
    },
    /// A transfer's handle is being released.
    Releasing {
        /// Which.
        handle: Handle,
        /// The status that it had, where it could be read.
        status: Option<TransferStatus>,
    },
    /// A notification of a peer arrived.
    NotificationArrived {
        /// Who sent it, where that could be read.
        peer: Option<Peer>,
        /// What.
        notification: Notification,
    },
    /// A notification was sent.
    NotificationSent {
        /// What.
        notification: Notification,
    },
    /// An endpoint was given up.
    EndpointError {
        /// Address of the endpoint.
        endpoint: u64,
        /// Where that was seen.
        point: ErrorPoint,
        /// `ucs_status_t`: −3 IO, −16 CANCELED, −25 CONNECTION_RESET, −80 ENDPOINT_TIMEOUT.
        status: i8,
    },
    /// A work completion with an error.
    CompletionError {
        /// `ibv_wc_status`.
        status: u32,
        /// The device's own code.
        vendor_error: u32,
        /// Number of the queue pair.
        qp: u32,
    },
}
