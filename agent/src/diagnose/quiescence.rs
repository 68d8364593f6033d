//! Whether a write of a request may still be under way: what every action depends on.

use std::{fmt, time::Duration};

use serde::Serialize;

use crate::{
    event::clock::Monotonic,
    request::{Side, Sync, Watch, tracker::Tracked, transfer::SubjectTransfers},
};

/// Whether a write of this request may still be under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Quiescence {
    /// Nothing was ever handed to the transfer engine.
    NeverPosted,
    /// Chunks wait in the server's transfer queues.
    Queued {
        /// How many.
        chunks: u32,
    },
    /// Workers hold chunks, or the transfer engine has transfers under way.
    InFlight {
        /// Chunks that workers hold, by the hook's count.
        chunks: u32,
        /// Transfers that were posted and have not ended, by the engine's calls.
        transfers: u32,
        /// When the oldest of those was posted.
        oldest: Option<Monotonic>,
    },
    /// Everything that was handed over has ended.
    Quiescent {
        /// Since when, as far as the agent saw.
        since: Option<Monotonic>,
    },
    /// It cannot be told.
    Unknown {
        /// Why not.
        why: NotKnown,
    },
}

/// Why quiescence cannot be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NotKnown {
    /// The hook has not said anything of this room.
    NotReported,
    /// Another live sender has the room.
    RoomShared,
    /// A chunk of the room ended with an error: a handle may still be running.
    AbandonedHandles,
    /// The hook was loaded after a worker had entered its queue.
    AttachedLate,
    /// This release has no transfer queues to count.
    NoTransferQueues,
    /// Events of this process are missing.
    NotSynchronised,
    /// A transfer of the room was given up, or posted in part: the device may still write.
    TransferGivenUp,
    /// The request is a decode's: its prefill writes, and is not seen from here.
    WrittenByPrefill,
}

impl NotKnown {
    /// Its name in rules and output.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotReported => "not reported",
            Self::RoomShared => "room shared",
            Self::AbandonedHandles => "abandoned handles",
            Self::AttachedLate => "attached late",
            Self::NoTransferQueues => "no transfer queues",
            Self::NotSynchronised => "not synchronised",
            Self::TransferGivenUp => "transfer given up",
            Self::WrittenByPrefill => "written by the prefill",
        }
    }
}

impl Quiescence {
    /// Its name in rules and labels, without numbers.
    pub fn name(self) -> &'static str {
        match self {
            Self::NeverPosted => "NeverPosted",
            Self::Queued { .. } => "Queued",
            Self::InFlight { .. } => "InFlight",
            Self::Quiescent { .. } => "Quiescent",
            Self::Unknown { .. } => "Unknown",
        }
    }

    /// Whether it is proved that no write is under way.
    pub fn is_proved_idle(self) -> bool {
        matches!(self, Self::NeverPosted | Self::Quiescent { .. })
    }
}

impl fmt::Display for Quiescence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeverPosted | Self::Quiescent { .. } => f.write_str(self.name()),
            Self::Queued { chunks } => write!(f, "{}{{{chunks}}}", self.name()),
            Self::InFlight { chunks, transfers, .. } => write!(f, "{}{{{}}}", self.name(), chunks.max(transfers)),
            Self::Unknown { why } => write!(f, "Unknown{{{}}}", why.name()),
        }
    }
}

/// How long the hook and the engine may see the same thing differently: they are not told at the same instant.
pub(super) const SETTLES_WITHIN: Duration = Duration::from_secs(1);

/// Joins the hook's count of a room's chunks and what the engine shows of its transfers: either one that says busy wins.
pub(super) fn quiescence(tracked: &Tracked<'_>) -> Quiescence {
    let Tracked { request, room, server, transfers, .. } = *tracked;
    let unknown = |why| Quiescence::Unknown { why };
    // What is under way on a shared room belongs to the room: nobody can say whose it is.
    if room.senders.iter().any(|serial| *serial != request.serial) {
        return unknown(NotKnown::RoomShared);
    }
    if request.side() == Side::Decode {
        let told = request.sent_chunks > 0;
        return if told { unknown(NotKnown::WrittenByPrefill) } else { Quiescence::NeverPosted };
    }
    // Busy wins over every other doubt: a count above zero was seen, whatever else is missing.
    let known = transfers.of_room(request.room);
    let under_way = known.and_then(SubjectTransfers::under_way);
    let counts = room.chunks.unwrap_or_default();
    if counts.working > 0 || under_way.is_some() {
        return Quiescence::InFlight {
            chunks: counts.working.into(),
            transfers: under_way.map_or(0, |(count, _)| u32::try_from(count).unwrap_or(u32::MAX)),
            oldest: under_way.map(|(_, oldest)| oldest),
        };
    }
    if counts.queued > 0 {
        return Quiescence::Queued { chunks: counts.queued.into() };
    }
    if server.sync != Sync::Complete {
        return unknown(NotKnown::NotSynchronised);
    }
    if known.is_some_and(|known| known.unproved > 0) {
        return unknown(NotKnown::TransferGivenUp);
    }
    match room.chunks {
        // The hook saw a chunk end badly, or cannot count; the engine shows each transfer's end.
        Some(counts) if (counts.abandoned || counts.no_queues) && is_proved_by_transfers(tracked) => {
            Quiescence::Quiescent { since: known.and_then(|known| known.last_ended) }
        }
        Some(counts) if counts.abandoned => unknown(NotKnown::AbandonedHandles),
        Some(counts) if counts.attached_late => unknown(NotKnown::AttachedLate),
        _ if room.sent_chunks == 0 && request.sent_chunks == 0 && known.is_none_or(|known| known.posted == 0) => {
            Quiescence::NeverPosted
        }
        Some(counts) if counts.no_queues => unknown(NotKnown::NoTransferQueues),
        Some(_) => Quiescence::Quiescent { since: room.busy_until },
        None => unknown(NotKnown::NotReported),
    }
}

/// Whether the engine's calls alone prove that nothing of the room is under way: each was watched since a time at which the
/// hook said so (on releases without transfer queues, which it has no counts of: since before the request existed), some
/// were posted, each one's end was seen, and no transfer that is under way could be another one's of this room.
pub(super) fn is_proved_by_transfers(tracked: &Tracked<'_>) -> bool {
    let Tracked { request, room, server, transfers, .. } = *tracked;
    let has_queues = room.chunks.is_some_and(|counts| !counts.no_queues);
    let Some(settled) = (if has_queues { room.settled_at } else { Some(request.created) }) else { return false };
    let watched = matches!(server.native.watch, Watch::Since { at, .. } if at <= settled);
    let over = transfers.of_room(request.room).is_some_and(|known| known.posted > 0 && known.is_over());
    let others = transfers.not_joined();
    let since_then = |at: Option<Monotonic>| at.is_some_and(|at| at >= settled);
    let others_may_be_its = others.under_way().is_some() || (others.unproved > 0 && since_then(others.last_ended));
    watched && over && !others_may_be_its
}

/// Whether every call into the engine was seen since before the request existed.
pub(super) fn is_watched(tracked: &Tracked<'_>) -> bool {
    matches!(tracked.server.native.watch, Watch::Since { at, .. } if at <= tracked.request.created)
}
