//! One transfer, and what is known of all transfers of a room; how a transfer has ended, by what its engine said.

use std::collections::BTreeSet;

use serde::Serialize;

use super::correlate::Joined;
use crate::{
    event::{
        clock::Monotonic,
        native::{Engine, Handle, Operation, Size, TransferStatus},
    },
    record::codec::recorded,
};

/// `NIXL_ERR_REPOST_ACTIVE`: the transfer goes on.
const NIXL_REPOST_ACTIVE: i32 = -7;
/// What NIXL finds out before it posts anything: INVALID_PARAM, NOT_FOUND, MISMATCH, NOT_ALLOWED, NOT_SUPPORTED.
const NIXL_REFUSALS: [i32; 5] = [-2, -4, -5, -6, -9];

/// Where a transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum TransferState {
    /// Made, not posted.
    Made,
    /// Posted; its end was not seen.
    InFlight,
    /// Over.
    Ended(TransferEnd),
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(tag = "end", rename_all = "snake_case")]
pub enum TransferEnd {
    /// Everything arrived.
    Done,
    /// The engine said that it failed.
    Failed {
        /// The engine's code.
        code: i32,
    },
    /// The server gave it up while it was in progress: for NIXL a release, for Mooncake a batch freed without a terminal
    /// status, which is its time-out. The device may still write.
    GivenUp,
    /// It was released, and what its status was then could not be seen. The device may still write.
    NotSeen,
    /// Posting it failed. Some of its descriptors may have been posted before: the device may still write.
    PostFailed {
        /// The engine's code.
        code: i32,
    },
    /// It was released without ever having been posted.
    NeverPosted,
}

impl TransferEnd {
    /// Label value of metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed { .. } => "failed",
            Self::GivenUp => "given_up",
            Self::NotSeen => "not_seen",
            Self::PostFailed { .. } => "post_failed",
            Self::NeverPosted => "never_posted",
        }
    }

    /// Whether it is proved that the device is done with it.
    pub fn is_proved_over(self) -> bool {
        matches!(self, Self::Done | Self::Failed { .. } | Self::NeverPosted)
    }
}

/// One transfer.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// Its handle, which others may have had before and will have after it.
    pub handle: Handle,
    /// Number of the transfer in its process, from 1.
    pub generation: u64,
    /// Which way.
    pub operation: Option<Operation>,
    /// Descriptors or requests in it.
    pub parts: u64,
    /// Bytes in it.
    pub size: Option<Size>,
    /// What it is about.
    pub joined: Joined,
    /// The thread that made or posted it.
    pub tid: u32,
    /// When it was posted last; when it was made, before that.
    pub since: Monotonic,
    /// Where it stands.
    pub state: TransferState,
    /// Bytes that had moved when its memory was read last, where the engine says.
    pub moved: u64,
}

/// What the server's memory says of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// Which.
    pub handle: Handle,
    /// Which of those that had this handle.
    pub generation: u64,
    /// Where it stands: terminal only if nothing of it is under way.
    pub status: TransferStatus,
    /// Bytes that have moved, where the engine says.
    pub moved: Option<u64>,
}

/// What a look at the status polls of a transfer saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Looked {
    /// When it ended.
    pub at: Monotonic,
    /// How often the server asked the engine for the status meanwhile.
    pub polls: u64,
}

/// The transfers of one room or request.
#[derive(Clone, Debug, Default)]
pub struct SubjectTransfers {
    /// Those that are under way: when posted, generation.
    under_way: BTreeSet<(Monotonic, u64)>,
    /// Those that were given up and whose end may still be seen: when posted, generation.
    pub(super) given_up: Vec<(Monotonic, u64)>,
    /// How many were posted.
    pub posted: u64,
    /// How many of those are done.
    pub done: u64,
    /// How many failed.
    pub failed: u64,
    /// How many were given up or released unseen: the device may still write.
    pub unproved: u64,
    /// Bytes of those that were posted, as far as known.
    pub bytes: u64,
    /// When the last one was posted.
    pub last_posted: Option<Monotonic>,
    /// When the last one ended.
    pub last_ended: Option<Monotonic>,
    /// When bytes of one were seen to have moved last, where the engine says.
    pub last_progress: Option<Monotonic>,
    /// What the last look at the status polls of one of them saw.
    pub looked: Option<Looked>,
    /// The last failure: when, of which engine, its code.
    pub failure: Option<(Monotonic, Engine, i32)>,
}

recorded!(struct Transfer {
    handle, generation, operation, parts, size, joined, tid, since, state, moved,
});
recorded!(enum TransferState { 0 Made {}, 1 InFlight {}, 2 Ended(end) });
recorded!(enum TransferEnd {
    0 Done {}, 1 Failed { code }, 2 GivenUp {}, 3 NotSeen {}, 4 PostFailed { code }, 5 NeverPosted {},
});
recorded!(struct Looked { at, polls });
recorded!(struct SubjectTransfers {
    under_way, given_up, posted, done, failed, unproved, bytes, last_posted, last_ended, last_progress, looked, failure,
});

impl SubjectTransfers {
    /// A transfer is posted.
    pub(super) fn begin(&mut self, at: Monotonic, generation: u64, bytes: u64) {
        self.under_way.insert((at, generation));
        self.posted = self.posted.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes);
        self.last_posted = Some(at);
    }

    /// A transfer that was posted at `posted` has ended.
    pub(super) fn end(&mut self, posted: Monotonic, generation: u64, engine: Engine, end: TransferEnd, at: Monotonic) {
        self.under_way.remove(&(posted, generation));
        self.last_ended = Some(at);
        match end {
            TransferEnd::Done => self.done = self.done.saturating_add(1),
            TransferEnd::Failed { code } | TransferEnd::PostFailed { code } => {
                self.failed = self.failed.saturating_add(1);
                self.failure = Some((at, engine, code));
            }
            TransferEnd::GivenUp | TransferEnd::NotSeen | TransferEnd::NeverPosted => {}
        }
        if !end.is_proved_over() {
            self.unproved = self.unproved.saturating_add(1);
        }
    }

    /// What was given up, of this time and generation, is over after all.
    pub(super) fn proved_over(&mut self, which: (Monotonic, u64), engine: Engine, end: TransferEnd, at: Monotonic) {
        self.given_up.retain(|other| *other != which);
        self.unproved = self.unproved.saturating_sub(1);
        self.last_ended = Some(at);
        match end {
            TransferEnd::Failed { code } => {
                self.failed = self.failed.saturating_add(1);
                self.failure = Some((at, engine, code));
            }
            _ => self.done = self.done.saturating_add(1),
        }
    }

    /// How many are under way, and since when the oldest.
    pub fn under_way(&self) -> Option<(usize, Monotonic)> {
        self.under_way.first().map(|(oldest, _)| (self.under_way.len(), *oldest))
    }

    /// The same of those that were posted at `since` or later.
    pub fn under_way_since(&self, since: Monotonic) -> Option<(usize, Monotonic)> {
        let mut later = self.under_way.range((since, 0)..);
        later.next().map(|(oldest, _)| (later.count() + 1, *oldest))
    }

    /// Those that were posted at `since` or later and whose end was not seen, though it may still be: when posted, generation.
    pub(super) fn not_over_since(&self, since: Monotonic) -> impl Iterator<Item = (Monotonic, u64)> {
        let given_up = self.given_up.iter().filter(move |(posted, _)| *posted >= since);
        self.under_way.range((since, 0)..).chain(given_up).copied()
    }

    /// When one of them was posted, moved or ended last.
    pub fn last_moved(&self) -> Option<Monotonic> {
        self.last_posted.max(self.last_ended).max(self.last_progress)
    }

    /// Whether none is under way and the end of each is proved.
    pub fn is_over(&self) -> bool {
        self.under_way.is_empty() && self.unproved == 0
    }
}

/// How a transfer has ended that has this status; nothing while it is under way.
pub(super) fn end_of_status(engine: Engine, status: TransferStatus) -> Option<TransferEnd> {
    match status {
        TransferStatus::Done => Some(TransferEnd::Done),
        TransferStatus::Failed { code: NIXL_REPOST_ACTIVE } if engine == Engine::Nixl => None,
        TransferStatus::Failed { code } => Some(TransferEnd::Failed { code }),
        TransferStatus::NotPosted | TransferStatus::InProgress => None,
    }
}

/// How a transfer has ended whose handle is released with this status.
pub(super) fn end_of_release(engine: Engine, status: Option<TransferStatus>) -> TransferEnd {
    match status {
        Some(status) => end_of_status(engine, status).unwrap_or(TransferEnd::GivenUp),
        None => TransferEnd::NotSeen,
    }
}

/// How a transfer has ended whose posting returned this; nothing when it goes on.
pub(super) fn end_of_posting(engine: Engine, status: TransferStatus) -> Option<TransferEnd> {
    match status {
        TransferStatus::Failed { code } if engine == Engine::Mooncake => Some(TransferEnd::PostFailed { code }),
        TransferStatus::Failed { code } if NIXL_REFUSALS.contains(&code) => Some(TransferEnd::Failed { code }),
        TransferStatus::Failed { code: NIXL_REPOST_ACTIVE } => None,
        TransferStatus::Failed { code } => Some(TransferEnd::PostFailed { code }),
        status => end_of_status(engine, status),
    }
}
