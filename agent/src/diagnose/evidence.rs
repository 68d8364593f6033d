//! What speaks for a diagnosis: each item with where and when it was seen. Displays as sentences.

use std::fmt;

use serde::Serialize;

use super::{
    Cause, GaugeFact,
    cause::{MOVES_WITHIN, is_bootstrapping, work_ahead},
    codes::{ucs_status_name, wc_status_name},
    decode, gauge_evidence, other_end,
    quiescence::{SETTLES_WITHIN, is_watched},
    rank_evidence::{RankFact, of_ranks},
    ranks::diverges,
    stalled::stalled_since,
};
use crate::{
    event::{
        Backend, Phase, Room,
        clock::Monotonic,
        native::{Engine, failure_name},
    },
    request::{
        DeviceError, Queue, ReleaseProof, Resurrected, Sync,
        ends::{RoomEnd, Side},
        rank::Rank,
        tracker::Tracked,
        transfer::Looked,
    },
};

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
    /// Calls into the transfer engine's library.
    Transfers,
    /// Completions and failed endpoints of UCX, Mooncake or libibverbs.
    Completions,
    /// Counters of the RDMA devices that the server has open.
    Devices,
    /// The other end of the room: a server of this node, or the agent of another one.
    Peer,
    /// The server's own `/metrics`.
    ServerMetrics,
}

impl Source {
    /// Its name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Transfers => "transfers",
            Self::Completions => "completions",
            Self::Devices => "devices",
            Self::Peer => "peer",
            Self::ServerMetrics => "server_metrics",
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
    TransfersUnderWay { count: usize },
    TransfersDone { count: u64 },
    TransferFailed { engine: Engine, code: i32 },
    TransfersNotProvedOver { count: u64 },
    NothingMoved { since_ms: u64 },
    EndpointGivenUp { status: i8 },
    WorkCompletionError { status: u32 },
    DeviceCounted { device: String, port: u32, counter: String, by: u64 },
    WorkersHold { room: Room, rooms: usize },
    ChunkLeft,
    StatusAskedFor { polls: u64 },
    NobodyAsksForStatus,
    SourcesDisagree { hook_counts: u32, transfers: usize },
    TransfersNotAllSeen,
    PagesReleased { transfers: usize },
    EndNotSeenByRelease { transfers: usize },
    RanOn,
    NoPass { since_ms: u64 },
    BatchMayRun { requests: u32 },
    NothingToPrefill,
    RanksDiffer { room: Room },
    DroppedByRank { rank: Rank, pid: u32 },
    Ranks { what: RankFact },
    Resurrected { room: Room, to: Phase },
    FakeSender,
    OtherEnd(RoomEnd),
    OtherEndNotSeen,
    PeerEnded { pid: u32 },
    EnteredDecodeQueue { queue: Queue },
    PrefillNotKnown,
    WaitsForMemory,
    PrefillTold { pages: u64 },
    WaitsForPrefill,
    NotCommitted,
    ServerGauge(GaugeFact),
}

impl Fact {
    /// What a device counted.
    pub fn of_device(error: &DeviceError) -> Self {
        let DeviceError { device, port, counter, by, .. } = error;
        Self::DeviceCounted { device: device.clone(), port: *port, counter: counter.clone(), by: *by }
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PollUnchanged { phase: Some(phase), passes } => {
                write!(f, "poll() returns {phase} ever since, in {passes} passes that were seen")
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
            Self::TransfersUnderWay { count } => write!(f, "{count} transfers of the room are under way since"),
            Self::TransfersDone { count } => write!(f, "{count} transfers of the room are done"),
            Self::TransferFailed { engine, code } => {
                write!(f, "{} said {} ({code})", engine.name(), failure_name(*engine, *code))
            }
            Self::TransfersNotProvedOver { count } => {
                write!(f, "{count} transfers were given up before their end was seen: the device may still write")
            }
            Self::NothingMoved { since_ms } => {
                write!(f, "no transfer of the room was posted or ended for {} s", since_ms / 1000)
            }
            Self::EndpointGivenUp { status } => {
                write!(f, "an endpoint of the server was given up: {} ({status})", ucs_status_name(*status))
            }
            Self::WorkCompletionError { status } => {
                write!(f, "a work completion of the server failed: {} ({status})", wc_status_name(*status))
            }
            Self::DeviceCounted { device, port, counter, by } => {
                write!(f, "{device} port {port} counted {by} more {counter}, of all that use it")
            }
            Self::WorkersHold { room, rooms } => {
                if *rooms == 1 {
                    return write!(f, "the transfer worker that it waits for holds a chunk of room {room} since");
                }
                write!(f, "it waits for one of {rooms} transfer workers; one holds a chunk of room {room} since")
            }
            Self::ChunkLeft => f.write_str(
                "a worker has left a chunk of the room, which does not prove that what it had posted is over",
            ),
            Self::StatusAskedFor { polls } => {
                write!(f, "looked at: the server asked the engine {polls} times, and the transfer is still in progress")
            }
            Self::PagesReleased { transfers } => write!(
                f,
                "left the inflight queue as failed, its pages given to others, with {transfers} transfers of its room under way"
            ),
            Self::EndNotSeenByRelease { transfers } => write!(
                f,
                "left the inflight queue as failed, its pages given to others, when the end of {transfers} transfers of its room \
                 had not been seen: they may have been over"
            ),
            Self::RanOn => f.write_str("read in the server's memory after that: a transfer of it is not over"),
            Self::TransfersNotAllSeen => {
                f.write_str("not every call into the transfer engine was seen since the request was made")
            }
            Self::NoPass { since_ms } => {
                write!(
                    f,
                    "the scheduler made its last pass: it has polled nobody for {} s, and is not paused",
                    since_ms / 1000
                )
            }
            Self::RanksDiffer { room } => {
                write!(f, "one rank of this server dropped the request of room {room}, another one has it still")
            }
            Self::DroppedByRank { rank, pid } => {
                write!(f, "left the queue of rank {rank}, pid {pid}, and is in this one's still")
            }
            Self::Ranks { what } => what.fmt(f),
            Self::BatchMayRun { requests } => write!(
                f,
                "{requests} requests of the server are not in its inflight queue: a batch of them may be running, whose kernels are compiled"
            ),
            Self::NothingToPrefill => {
                f.write_str("every request of the server is in its inflight queue: it cannot be running a batch")
            }
            Self::Resurrected { room, to } => write!(f, "room {room} had Failed, and was made {to} again"),
            Self::FakeSender => {
                f.write_str("a fake sender, of a warm-up or a health check: it has nothing to transfer")
            }
            Self::OtherEnd(end) => end.fmt(f),
            Self::OtherEndNotSeen => f.write_str(
                "what the other end of the room does is not seen: no server of this node has it, and no agent of another one \
                 (`peers.urls`) told of it",
            ),
            Self::PeerEnded { pid } => {
                write!(f, "pid {pid} has ended, the only process that this server was seen to write to")
            }
            Self::EnteredDecodeQueue { queue } => write!(f, "entered the {} queue", queue.name()),
            Self::PrefillNotKnown => f.write_str(
                "the prefill is not known here yet; or, where decode allocates late, it has not said that it is done",
            ),
            Self::WaitsForMemory => f.write_str("waits for a slot or KV memory of this decode, its prefill is known"),
            Self::PrefillTold { pages } => write!(f, "the prefill was told where to write its {pages} pages"),
            Self::WaitsForPrefill => f.write_str("waits for the prefill to write them, and to say so"),
            Self::NotCommitted => {
                f.write_str("poll() says that it is over; its metadata, or another rank, is still waited for")
            }
            Self::NobodyAsksForStatus => f.write_str("looked at: nobody asks the engine where the transfer stands"),
            Self::ServerGauge(fact) => fact.fmt(f),
            Self::SourcesDisagree { hook_counts, transfers } => {
                write!(
                    f,
                    "the hook counts {hook_counts} chunks at work, the engine has {transfers} transfers under way"
                )
            }
        }
    }
}

pub(super) fn evidence(tracked: &Tracked<'_>, cause: Cause, now: Monotonic) -> Vec<Evidence> {
    let Tracked { request, server, .. } = *tracked;
    let mut evidence = Vec::with_capacity(8);
    let mut seen = |at, fact| evidence.push(Evidence { source: Source::Calls, at, fact });
    if let Some(entered) = request.entered {
        seen(entered, Fact::EnteredQueue);
    }
    let passes = server.passes.saturating_sub(request.phase_passes);
    seen(request.phase_since, Fact::PollUnchanged { phase: request.phase, passes });
    if let Some(other) = request.shared_with {
        seen(request.created, Fact::RoomShared { room: request.room, other });
    }
    if let Some(other) = request.cleared_by {
        seen(request.cleared_at.unwrap_or(request.phase_since), Fact::RoomClearedByOther { room: request.room, other });
    }
    if let Some(aborted) = &request.aborted {
        seen(aborted.at, Fact::AbortCalled { passes_since: server.passes.saturating_sub(aborted.passes) });
    }
    if let Some(at) = request.peer_aborted {
        seen(at, Fact::PeerAborted);
    }
    if let Some(at) = request.update_dropped {
        seen(at, Fact::UpdateDropped { room: request.room });
    }
    if let Some(&Resurrected { at, to }) = request.resurrected.as_deref() {
        seen(at, Fact::Resurrected { room: request.room, to });
    }
    if let Some(dropped) = &request.dropped_by {
        seen(dropped.at, Fact::DroppedByRank { rank: dropped.rank, pid: dropped.process.pid });
    } else if let Some(room) = diverges(tracked, now) {
        let differ = server.ranks.as_ref().and_then(|ranks| ranks.differ);
        seen(differ.map_or(request.created, |differ| differ.at), Fact::RanksDiffer { room });
    }
    if let Some(since) = stalled_since(tracked, now) {
        seen(since, Fact::NoPass { since_ms: now.since(since).as_millis() as u64 });
        let requests = server.to_prefill;
        seen(since, if requests > 0 { Fact::BatchMayRun { requests } } else { Fact::NothingToPrefill });
    }
    if request.backend == Backend::Fake {
        seen(request.created, Fact::FakeSender);
    }
    if request.side() == Side::Decode {
        decode::evidence(tracked, &mut seen);
    } else {
        if is_bootstrapping(tracked) {
            seen(request.created, Fact::NoDecodeRegistered);
        }
        if request.sent_chunks == 0 {
            seen(request.waiting_since(), Fact::NothingSent);
        } else {
            seen(request.waiting_since(), Fact::Sent { chunks: request.sent_chunks, pages: request.sent_pages });
        }
    }
    if let Sync::Asked { at, .. } = server.sync {
        seen(at, Fact::EventsMissing);
    }
    other_end::evidence(tracked, cause, &mut evidence);
    of_ranks(tracked, cause, now, &mut evidence);
    of_transfers(tracked, now, &mut evidence);
    evidence.extend(gauge_evidence(tracked, now));
    evidence.sort_by_key(|evidence| evidence.at);
    evidence
}

fn of_transfers(tracked: &Tracked<'_>, now: Monotonic, evidence: &mut Vec<Evidence>) {
    let Tracked { request, room, server, transfers, .. } = *tracked;
    let mut seen = |source, at, fact| evidence.push(Evidence { source, at, fact });
    if let Some(ended) = &request.ended
        && let Some(released) = &ended.unsafe_release
    {
        let transfers = released.transfers;
        seen(
            Source::Transfers,
            ended.at,
            if released.is_proved() {
                Fact::PagesReleased { transfers }
            } else {
                Fact::EndNotSeenByRelease { transfers }
            },
        );
        if let ReleaseProof::RanOn { at } = released.proof {
            seen(Source::Transfers, at, Fact::RanOn);
        }
    }
    if let Some(known) = transfers.of_room(request.room) {
        if let Some((count, oldest)) = known.under_way() {
            seen(Source::Transfers, oldest, Fact::TransfersUnderWay { count });
            let moved = known.last_moved().unwrap_or(oldest);
            let quiet = now.since(moved);
            if quiet >= MOVES_WITHIN {
                seen(Source::Transfers, moved, Fact::NothingMoved { since_ms: quiet.as_millis() as u64 });
            }
            match known.looked {
                Some(Looked { at, polls: 0 }) => seen(Source::Transfers, at, Fact::NobodyAsksForStatus),
                Some(Looked { at, polls }) => seen(Source::Transfers, at, Fact::StatusAskedFor { polls }),
                None => {}
            }
            let hook_counts = room.chunks.filter(|counts| !counts.no_queues).map(|counts| counts.working.into());
            if hook_counts == Some(0) && now.since(oldest) >= SETTLES_WITHIN {
                seen(Source::Transfers, oldest, Fact::SourcesDisagree { hook_counts: 0, transfers: count });
            }
        }
        if !is_watched(tracked) {
            seen(Source::Transfers, request.created, Fact::TransfersNotAllSeen);
        }
        if let (1.., Some(ended)) = (known.done, known.last_ended) {
            seen(Source::Transfers, ended, Fact::TransfersDone { count: known.done });
        }
        if let Some((at, engine, code)) = known.failure {
            seen(Source::Transfers, at, Fact::TransferFailed { engine, code });
        }
        if let (1.., Some(ended)) = (known.unproved, known.last_ended) {
            seen(Source::Transfers, ended, Fact::TransfersNotProvedOver { count: known.unproved });
        }
    }
    if let Some(failure) = server.native.endpoint_error.filter(|failure| failure.at >= request.created) {
        seen(Source::Completions, failure.at, Fact::EndpointGivenUp { status: failure.status });
    }
    if let Some((at, status)) = server.native.completion_error.filter(|(at, _)| *at >= request.created) {
        seen(Source::Completions, at, Fact::WorkCompletionError { status });
    }
    let waits = transfers.of_room(request.room).is_some_and(|known| known.failure.is_some() || !known.is_over());
    for error in server.native.device_errors.iter().filter(|error| waits && error.at >= request.created) {
        seen(Source::Devices, error.at, Fact::of_device(error));
    }
    let Some(counts) = room.chunks else { return };
    if counts.abandoned {
        seen(Source::Calls, room.busy_until.unwrap_or(now), Fact::ChunkLeft);
    }
    if counts.queued > 0
        && let Some(longest) =
            work_ahead(transfers, request.room, room.queue).min_by_key(|work| (work.since, work.room))
    {
        let rooms = work_ahead(transfers, request.room, room.queue).count();
        seen(Source::Calls, longest.since, Fact::WorkersHold { room: longest.room, rooms });
        if !is_watched(tracked) && transfers.of_room(request.room).is_none() {
            seen(Source::Transfers, request.created, Fact::TransfersNotAllSeen);
        }
    }
}
