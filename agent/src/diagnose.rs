//! Why a request is where it is. A pure function over what is known; `now` is an argument.

use std::{fmt, time::Duration};

use serde::Serialize;

use crate::{
    event::{Phase, Room, clock::Monotonic},
    request::{Request, RoomState, ServerState, Sync},
};

/// Why a request is stuck, in the field's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Cause {
    /// Two requests share one room, and the other one ended it.
    RoomCollision,
    /// `update_status(Failed)` came after the room had been cleared, and did nothing.
    UpdateDropped,
    /// `abort()` was called and `poll()` does not say so.
    AbortIgnored,
    /// In the inflight queue, but nothing was ever sent.
    Parked,
    /// The decode side never registered.
    NeverBootstrapped,
    /// No sign that the sources at hand could show.
    Unknown,
}

impl Cause {
    /// Every cause that can be diagnosed.
    pub const ALL: [Self; 6] = [
        Self::RoomCollision,
        Self::UpdateDropped,
        Self::AbortIgnored,
        Self::Parked,
        Self::NeverBootstrapped,
        Self::Unknown,
    ];

    /// Its name in rules, labels and output.
    pub fn name(self) -> &'static str {
        match self {
            Self::RoomCollision => "RoomCollision",
            Self::UpdateDropped => "UpdateDropped",
            Self::AbortIgnored => "AbortIgnored",
            Self::Parked => "Parked",
            Self::NeverBootstrapped => "NeverBootstrapped",
            Self::Unknown => "Unknown",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

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
    /// Workers hold chunks.
    InFlight {
        /// How many.
        chunks: u32,
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
            Self::Queued { chunks } | Self::InFlight { chunks } => write!(f, "{}{{{chunks}}}", self.name()),
            Self::Unknown { why } => write!(f, "Unknown{{{}}}", why.name()),
        }
    }
}

/// How far a diagnosis can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// Everything that would show another cause was watched all the time.
    High,
    /// Events are missing, or the picture is not complete yet.
    Low,
}

impl Confidence {
    /// Its name in rules and labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Low => "low",
        }
    }
}

/// Something that a person can check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Evidence {
    /// Where it was seen.
    pub source: Source,
    /// When.
    pub at: Monotonic,
    /// What.
    pub fact: Fact,
}

/// Where evidence comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Marks of the hook: the server's own method calls.
    Calls,
}

impl Source {
    /// Its name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
        }
    }
}

/// What was seen. Displays as a sentence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "fact", rename_all = "snake_case")]
#[expect(missing_docs, reason = "each is explained by how it displays")]
pub enum Fact {
    PollUnchanged { phase: Option<Phase>, passes: u64 },
    EnteredQueue,
    RoomShared { room: Room, other: u64 },
    RoomClearedByOther { room: Room, other: u64 },
    AbortCalled { passes_since: u64 },
    PeerAborted,
    UpdateDropped { room: Room },
    NothingSent,
    Sent { chunks: u32, pages: u64 },
    NoDecodeRegistered,
    EventsMissing,
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PollUnchanged { phase: Some(phase), passes } => {
                write!(f, "poll() returns {phase} ever since; {passes} passes seen")
            }
            Self::PollUnchanged { phase: None, .. } => f.write_str("was never polled"),
            Self::EnteredQueue => f.write_str("entered the inflight queue"),
            Self::RoomShared { room, other } => write!(f, "sender {other} had room {room} at the same time"),
            Self::RoomClearedByOther { room, other } => write!(f, "sender {other} cleared room {room}"),
            Self::AbortCalled { passes_since } => {
                write!(f, "abort() was called; {passes_since} passes later poll() has not changed")
            }
            Self::PeerAborted => f.write_str("the decode side aborted the room"),
            Self::UpdateDropped { room } => {
                write!(f, "update_status(Failed) was dropped: room {room} is not in request_status")
            }
            Self::NothingSent => f.write_str("send() was never called"),
            Self::Sent { chunks, pages } => write!(f, "send() was called for {chunks} chunks, {pages} pages"),
            Self::NoDecodeRegistered => f.write_str("no decode has registered for the room"),
            Self::EventsMissing => f.write_str("events of this server are missing since"),
        }
    }
}

/// What is wrong with a request, as far as one can tell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// Why it is stuck, if it is.
    pub cause: Cause,
    /// What speaks for it.
    pub evidence: Vec<Evidence>,
    /// Whether a write may still be under way.
    pub quiescence: Quiescence,
    /// How far this can be trusted.
    pub confidence: Confidence,
}

/// How long after an `abort()` the next polls are waited for before it counts as ignored.
const ABORT_GRACE: Duration = Duration::from_secs(1);
/// Passes after an `abort()` that must have polled the sender before it counts as ignored.
const ABORT_PASSES: u64 = 3;

/// Says why `request` waits, what speaks for it, whether a write may be under way, and how sure that is.
pub fn diagnose(request: &Request, room: &RoomState, server: &ServerState, now: Monotonic) -> Diagnosis {
    let synchronised = server.sync == Sync::Complete;
    let cause = cause(request, room, server, now);
    Diagnosis {
        cause,
        evidence: evidence(request, server),
        quiescence: quiescence(request, room, server),
        confidence: if synchronised { Confidence::High } else { Confidence::Low },
    }
}

fn cause(request: &Request, room: &RoomState, server: &ServerState, now: Monotonic) -> Cause {
    if request.phase.is_some_and(Phase::is_terminal) {
        return Cause::Unknown;
    }
    let collided = request.cleared_by.is_some() || (request.shared_with.is_some() && room.known_absent);
    if collided {
        return Cause::RoomCollision;
    }
    if request.update_dropped.is_some() {
        return Cause::UpdateDropped;
    }
    if let Some(aborted) = request.aborted
        && now.since(aborted.at) >= ABORT_GRACE
        && server.passes.saturating_sub(aborted.passes) >= ABORT_PASSES
    {
        return Cause::AbortIgnored;
    }
    if request.phase == Some(Phase::Bootstrapping) {
        return Cause::NeverBootstrapped;
    }
    if request.is_inflight() && request.sent_chunks == 0 && request.phase == Some(Phase::WaitingForInput) {
        return Cause::Parked;
    }
    Cause::Unknown
}

fn evidence(request: &Request, server: &ServerState) -> Vec<Evidence> {
    let mut evidence = Vec::with_capacity(8);
    let mut seen = |at, fact| evidence.push(Evidence { source: Source::Calls, at, fact });
    if let Some(entered) = request.entered {
        seen(entered, Fact::EnteredQueue);
    }
    seen(request.phase_since, Fact::PollUnchanged { phase: request.phase, passes: server.passes });
    if let Some(other) = request.shared_with {
        seen(request.created, Fact::RoomShared { room: request.room, other });
    }
    if let Some(other) = request.cleared_by {
        seen(request.cleared_at.unwrap_or(request.phase_since), Fact::RoomClearedByOther { room: request.room, other });
    }
    if let Some(aborted) = request.aborted {
        seen(aborted.at, Fact::AbortCalled { passes_since: server.passes.saturating_sub(aborted.passes) });
    }
    if let Some(at) = request.peer_aborted {
        seen(at, Fact::PeerAborted);
    }
    if let Some(at) = request.update_dropped {
        seen(at, Fact::UpdateDropped { room: request.room });
    }
    if request.phase == Some(Phase::Bootstrapping) {
        seen(request.created, Fact::NoDecodeRegistered);
    }
    if request.sent_chunks == 0 {
        seen(request.waiting_since(), Fact::NothingSent);
    } else {
        seen(request.waiting_since(), Fact::Sent { chunks: request.sent_chunks, pages: request.sent_pages });
    }
    if let Sync::Asked { at, .. } = server.sync {
        seen(at, Fact::EventsMissing);
    }
    evidence.sort_by_key(|evidence| evidence.at);
    evidence
}

fn quiescence(request: &Request, room: &RoomState, server: &ServerState) -> Quiescence {
    let unknown = |why| Quiescence::Unknown { why };
    // Busy wins over every doubt: a count above zero was seen, whatever else is missing.
    if let Some(counts) = room.chunks {
        if counts.working > 0 {
            return Quiescence::InFlight { chunks: counts.working.into() };
        }
        if counts.queued > 0 {
            return Quiescence::Queued { chunks: counts.queued.into() };
        }
    }
    if server.sync != Sync::Complete {
        return unknown(NotKnown::NotSynchronised);
    }
    if room.senders.iter().any(|serial| *serial != request.serial) {
        return unknown(NotKnown::RoomShared);
    }
    match room.chunks {
        Some(counts) if counts.abandoned => unknown(NotKnown::AbandonedHandles),
        Some(counts) if counts.attached_late => unknown(NotKnown::AttachedLate),
        _ if room.sent_chunks == 0 && request.sent_chunks == 0 => Quiescence::NeverPosted,
        Some(counts) if counts.no_queues => unknown(NotKnown::NoTransferQueues),
        Some(_) => Quiescence::Quiescent { since: room.busy_until },
        None => unknown(NotKnown::NotReported),
    }
}
