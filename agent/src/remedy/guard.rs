//! Whether acting is allowed. One pure function; the same conditions that the server alone can know are checked again
//! in the server, on its thread, at the moment of acting. The agent's evidence is necessary, never sufficient.

use serde::Serialize;

use crate::{
    diagnose::{Cause, Confidence, Diagnosis},
    event::{Backend, Room},
    request::{Request, ServerState, Side, Sync},
    rule::Mode,
};

/// Why nothing is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// The configuration or the rule says to observe.
    Observing,
    /// The kill-switch file exists.
    KillSwitch,
    /// The audit log cannot be written: what cannot be recorded is not done.
    AuditUnavailable,
    /// More actions in this minute than are allowed.
    RateLimited,
    /// The cause is not one that the failure flag cures.
    CauseNotCurable,
    /// Events are missing: the picture may be wrong.
    Blind,
    /// This agent has no control channel to the hook.
    NoControlChannel,
    /// Generation is paused: no command runs.
    Paused,
    /// This request was acted on before.
    OncePerRequest,
    /// The request is not in the inflight queue.
    NotInflight,
    /// It ended, or polls a terminal phase.
    Terminal,
    /// The request id is unknown or was cut: SGLang matches by prefix.
    RidIncomplete,
    /// The room is not a number: others may hide behind it.
    RoomOutOfRange,
    /// Another live sender has the room: failing one of two kills or pins the other.
    RoomShared,
    /// It is not proved that no write is under way.
    NotQuiescent,
    /// The hook calls handles of its room abandoned, and cannot see itself whether they are over: it would refuse.
    AbandonedHandles,
    /// The server has not said how many ranks it has.
    RanksUnknown,
    /// Polls are reduced over a tensor-parallel group: one rank's flag frees pages on all.
    TensorParallel,
    /// The same for a context-parallel group.
    ContextParallel,
    /// A pipeline's stages must drop the same requests.
    PipelineParallel,
    /// No test has failed a sender of this backend, or not on this release of SGLang.
    BackendUnproved,
    /// The request is a decode's: its pages are written by the prefill, which nothing here can prove to have stopped.
    DecodeSide,
}

impl Refusal {
    /// Every refusal.
    pub const ALL: [Self; 22] = [
        Self::Observing,
        Self::KillSwitch,
        Self::AuditUnavailable,
        Self::RateLimited,
        Self::CauseNotCurable,
        Self::Blind,
        Self::NoControlChannel,
        Self::Paused,
        Self::OncePerRequest,
        Self::NotInflight,
        Self::Terminal,
        Self::RidIncomplete,
        Self::RoomOutOfRange,
        Self::RoomShared,
        Self::NotQuiescent,
        Self::AbandonedHandles,
        Self::RanksUnknown,
        Self::TensorParallel,
        Self::ContextParallel,
        Self::PipelineParallel,
        Self::BackendUnproved,
        Self::DecodeSide,
    ];

    /// Label value of metrics, and its name in the audit log.
    pub fn name(self) -> &'static str {
        match self {
            Self::Observing => "observing",
            Self::KillSwitch => "kill_switch",
            Self::AuditUnavailable => "audit_unavailable",
            Self::RateLimited => "rate_limited",
            Self::CauseNotCurable => "cause_not_curable",
            Self::Blind => "blind",
            Self::NoControlChannel => "no_control_channel",
            Self::Paused => "paused",
            Self::OncePerRequest => "once_per_request",
            Self::NotInflight => "not_inflight",
            Self::Terminal => "terminal",
            Self::RidIncomplete => "rid_incomplete",
            Self::RoomOutOfRange => "room_out_of_range",
            Self::RoomShared => "room_shared",
            Self::NotQuiescent => "not_quiescent",
            Self::AbandonedHandles => "abandoned_handles",
            Self::RanksUnknown => "ranks_unknown",
            Self::TensorParallel => "tensor_parallel",
            Self::ContextParallel => "context_parallel",
            Self::PipelineParallel => "pipeline_parallel",
            Self::BackendUnproved => "backend_unproved",
            Self::DecodeSide => "decode_side",
        }
    }
}

/// What a decision needs beside the request and its diagnosis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// The lower of the configured mode and the rule's action.
    pub mode: Mode,
    /// Whether the kill-switch file exists.
    pub kill_switch: bool,
    /// Whether the audit log can be written.
    pub audit_available: bool,
    /// Actions that this minute still allows.
    pub actions_left: u32,
    /// Whether there is a control channel to the server's hook.
    pub has_control_channel: bool,
    /// Whether this request was acted on before.
    pub acted_before: bool,
    /// Live senders on the request's room, itself among them.
    pub senders_on_room: usize,
    /// Whether the hook calls handles of the room abandoned.
    pub abandoned_handles: bool,
}

/// Releases of SGLang on which a backend's senders may be failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProvedOn {
    /// All: what differs between releases is read from the server's own code, by the hook.
    Every,
    /// These: that a chunk's end is the end of its writes was proved for each of them.
    These(&'static [&'static str]),
}

/// Backends whose senders tests have failed and read back, on SGLang's released code with the real engine, over TCP on one
/// host (`agent/tests/sglang_refusals.rs`, `agent/tests/sglang_mooncake.rs`). Over RDMA the engines were run without SGLang: what they
/// call done is (`tests/vm/guest/transfers.py`). mori and ascend ran on a
/// stand-in for their engine only. The hook has the same list (`backend.PROVED`), and refuses by it once more.
pub static PROVED: [(Backend, ProvedOn); 3] = [
    (Backend::Nixl, ProvedOn::Every),
    (Backend::Fake, ProvedOn::Every),
    (Backend::Mooncake, ProvedOn::These(&["0.5.10", "0.5.12.post1", "0.5.15", "0.5.18", "0.5.22", "0.5.23"])),
];

/// Whether a sender of this backend may be failed on this release of SGLang; `None` is a server that has not said which.
pub fn is_proved(backend: Backend, sglang: Option<&str>) -> bool {
    PROVED.iter().any(|(proved, releases)| {
        *proved == backend
            && match releases {
                ProvedOn::Every => true,
                ProvedOn::These(releases) => sglang.is_some_and(|sglang| releases.contains(&sglang)),
            }
    })
}

/// Whether the failure flag of this request may be set. Everything but the mode is looked at first, so that a dry run
/// and an observer learn what enforcing would meet.
pub fn may_act(
    request: &Request,
    server: &ServerState,
    diagnosis: &Diagnosis,
    context: &Context,
) -> Result<(), Refusal> {
    let refuse_unless = |holds: bool, refusal| if holds { Ok(()) } else { Err(refusal) };
    let hello = server.hello.as_deref();
    let rid_is_whole = request.rid.as_ref().is_some_and(|rid| !rid.truncated && !rid.text.is_empty());
    let curable = matches!(diagnosis.cause, Cause::RoomCollision | Cause::UpdateDropped | Cause::AbortIgnored);
    let blind = server.sync != Sync::Complete || diagnosis.confidence != Confidence::High;

    refuse_unless(request.side() == Side::Prefill, Refusal::DecodeSide)?;
    refuse_unless(request.ended.is_none(), Refusal::Terminal)?;
    refuse_unless(request.is_inflight(), Refusal::NotInflight)?;
    refuse_unless(request.phase.is_some_and(|phase| !phase.is_terminal()), Refusal::Terminal)?;
    refuse_unless(!blind, Refusal::Blind)?;
    refuse_unless(curable, Refusal::CauseNotCurable)?;
    refuse_unless(rid_is_whole, Refusal::RidIncomplete)?;
    refuse_unless(matches!(request.room, Room::Number(_)), Refusal::RoomOutOfRange)?;
    refuse_unless(context.senders_on_room == 1, Refusal::RoomShared)?;
    refuse_unless(diagnosis.quiescence.is_proved_idle(), Refusal::NotQuiescent)?;
    refuse_unless(!context.abandoned_handles, Refusal::AbandonedHandles)?;
    let size = |size: Option<u32>| size.ok_or(Refusal::RanksUnknown);
    refuse_unless(size(hello.and_then(|hello| hello.tp))? == 1, Refusal::TensorParallel)?;
    refuse_unless(size(hello.and_then(|hello| hello.cp))? == 1, Refusal::ContextParallel)?;
    refuse_unless(size(hello.and_then(|hello| hello.pp))? == 1, Refusal::PipelineParallel)?;
    let sglang = hello.and_then(|hello| hello.sglang.as_deref());
    refuse_unless(is_proved(request.backend, sglang), Refusal::BackendUnproved)?;
    refuse_unless(!context.acted_before && request.remedied.is_none(), Refusal::OncePerRequest)?;
    refuse_unless(!server.paused, Refusal::Paused)?;
    refuse_unless(context.has_control_channel, Refusal::NoControlChannel)?;
    refuse_unless(!context.kill_switch, Refusal::KillSwitch)?;
    refuse_unless(context.audit_available, Refusal::AuditUnavailable)?;
    refuse_unless(context.actions_left > 0, Refusal::RateLimited)?;
    refuse_unless(context.mode != Mode::Observe, Refusal::Observing)
}

#[cfg(test)]
#[path = "guard_tests.rs"]
mod tests;
