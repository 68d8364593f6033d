//! How requests get stuck, or seem to: the families that are known from the field.

use serde::Serialize;

/// A family of faults, or of what looks like one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[expect(missing_docs, reason = "`Family::story` tells each")]
pub enum Family {
    ClearedRoom,
    AbortIgnored,
    ParkedPrefill,
    TransferNeverEnds,
    CompletionLost,
    LateCompletion,
    FailureNotTold,
    UnsafeRelease,
    Resurrection,
    PipelineDivergence,
    TensorDivergence,
    TransientDisagreement,
    LoopStalled,
    PeerDied,
    Blackholed,
    WorkerBlocked,
    WarmupPinned,
    BootstrapThreadDied,
    OrphanRoom,
    Backpressure,
    AgentBlind,
    SamePid,
    Paused,
    LongPass,
}

/// How far a family can be simulated and judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// Its streams are made, and the diagnosis is held against the truth.
    Simulated,
    /// Its streams are made, but no cause of today says what is true of them.
    NotYet(&'static str),
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 24] = [
        Self::ClearedRoom,
        Self::AbortIgnored,
        Self::ParkedPrefill,
        Self::TransferNeverEnds,
        Self::CompletionLost,
        Self::LateCompletion,
        Self::FailureNotTold,
        Self::UnsafeRelease,
        Self::Resurrection,
        Self::PipelineDivergence,
        Self::TensorDivergence,
        Self::TransientDisagreement,
        Self::LoopStalled,
        Self::PeerDied,
        Self::Blackholed,
        Self::WorkerBlocked,
        Self::WarmupPinned,
        Self::BootstrapThreadDied,
        Self::OrphanRoom,
        Self::Backpressure,
        Self::AgentBlind,
        Self::SamePid,
        Self::Paused,
        Self::LongPass,
    ];

    /// Whether today's diagnosis can be held against it.
    pub fn support(self) -> Support {
        match self {
            Self::FailureNotTold => Support::NotYet("what the decode side knows is not seen from here"),
            _ => Support::Simulated,
        }
    }

    /// Whether the ranks of its servers drop different requests.
    pub fn diverges(self) -> bool {
        matches!(self, Self::PipelineDivergence | Self::TensorDivergence)
    }

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::ClearedRoom => "cleared-room",
            Self::AbortIgnored => "abort-ignored",
            Self::ParkedPrefill => "parked-prefill",
            Self::TransferNeverEnds => "transfer-never-ends",
            Self::CompletionLost => "completion-lost",
            Self::LateCompletion => "late-completion",
            Self::FailureNotTold => "failure-not-told",
            Self::UnsafeRelease => "unsafe-release",
            Self::Resurrection => "resurrection",
            Self::PipelineDivergence => "pipeline-divergence",
            Self::TensorDivergence => "tensor-divergence",
            Self::TransientDisagreement => "transient-disagreement",
            Self::LoopStalled => "loop-stalled",
            Self::PeerDied => "peer-died",
            Self::Blackholed => "blackholed",
            Self::WorkerBlocked => "worker-blocked",
            Self::WarmupPinned => "warmup-pinned",
            Self::BootstrapThreadDied => "bootstrap-thread-died",
            Self::OrphanRoom => "orphan-room",
            Self::Backpressure => "backpressure",
            Self::AgentBlind => "agent-blind",
            Self::SamePid => "same-pid",
            Self::Paused => "paused",
            Self::LongPass => "long-pass",
        }
    }

    /// The family of that name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.name() == name)
    }

    /// What happens in it.
    pub fn story(self) -> &'static str {
        match self {
            Self::ClearedRoom => "two senders share a room, or it is removed: the second one polls for ever",
            Self::AbortIgnored => "abort() sets a state that poll() never reads",
            Self::ParkedPrefill => "the prefill ends before the bootstrap: in the queue, nothing is ever sent",
            Self::TransferNeverEnds => "the peer is frozen: a transfer that was posted never ends",
            Self::CompletionLost => {
                "every transfer is done, poll() never says so (what shows here of a lost notification)"
            }
            Self::LateCompletion => "every transfer is done, poll() says so seconds later",
            Self::FailureNotTold => "failed here, the decode side waits on",
            Self::UnsafeRelease => "failed, its pages given back, with a transfer under way",
            Self::Resurrection => "failed, then promoted again by a worker",
            Self::PipelineDivergence => "pipeline stages drop different requests, a collective hangs",
            Self::TensorDivergence => "one rank drops a request that the others keep, a collective hangs",
            Self::TransientDisagreement => "ranks see and drop the same requests, up to 0.9 s apart",
            Self::LoopStalled => "the scheduler polls nobody any more",
            Self::PeerDied => "the peer's connection is reset, poll() does not say so",
            Self::Blackholed => "a transfer runs out of retries, poll() does not say so",
            Self::WorkerBlocked => "a worker spins on a transfer that never ends, rooms wait behind it",
            Self::WarmupPinned => "a fake sender never finishes",
            Self::BootstrapThreadDied => "from some time on no decode can register",
            Self::OrphanRoom => "the decode of one room never registers",
            Self::Backpressure => "everything is slow, and moves",
            Self::AgentBlind => "healthy, while the agent loses events or comes late",
            Self::SamePid => "the server is replaced by one of the same pid",
            Self::Paused => "generation is paused for up to two minutes, then goes on",
            Self::LongPass => "one pass takes up to five minutes, as where a kernel is compiled, then all goes on",
        }
    }
}
