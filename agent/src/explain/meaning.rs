//! What a cause means and what to do about it, and what a guard's refusal means: one sentence each, for somebody who was
//! woken by it. Tables, so that a cause or guard that is new is shown by its name until it has its sentence.

use crate::{diagnose::Cause, remedy::guard::Refusal};

/// What each cause means, and what to do about it.
static CAUSES: [(Cause, &str, &str); 20] = [
    (
        Cause::FailureNotTold,
        "the other end of its room has given it up, and nobody told this one",
        "nothing for this request if its own time-out ends it; else look at the way between the two servers",
    ),
    (
        Cause::RoomCollision,
        "two requests had one room, and the other one's end took away the status that poll() reads",
        "it will not end by itself: let the agent fail it, or restart the server; then find who sent one room twice",
    ),
    (
        Cause::UpdateDropped,
        "its failure was written to a room that had been cleared, so poll() never says it",
        "it will not end by itself: let the agent fail it, or restart the server",
    ),
    (
        Cause::AbortIgnored,
        "abort() set a state that poll() of this release does not read",
        "it will not end by itself: let the agent fail it, or restart the server",
    ),
    (
        Cause::Parked,
        "it is in the inflight queue, and nothing was ever given to send()",
        "look at why the prefill ended before its bootstrap; the server may still send",
    ),
    (
        Cause::NeverBootstrapped,
        "no decode has registered for its room yet",
        "look at the decode and the router; the server ends it after its own time-out",
    ),
    (
        Cause::CompletionError,
        "a transfer of its room failed, and poll() does not say so",
        "look at the network and the decode; the server should say so within a minute",
    ),
    (
        Cause::PeerGone,
        "the other end's process or connection is gone, and poll() does not say so",
        "look at the decode process; the server should notice by its heartbeats",
    ),
    (
        Cause::TransferStalled,
        "a transfer is under way, and for ten seconds nothing of its room has moved",
        "look at the decode and the fabric; do not free its pages: a write may be under way",
    ),
    (
        Cause::Slow,
        "its transfers are slow, but they get on",
        "nothing for this request: look at the load of the decode side if it goes on",
    ),
    (
        Cause::WorkerBlocked,
        "its chunks wait for a transfer worker that another room's transfer holds up",
        "look at the room that the evidence names, not at this one",
    ),
    (
        Cause::CapacityStall,
        "its chunks wait for transfer workers that are busy with others",
        "nothing for this request: look at the load of the decode side if it goes on",
    ),
    (
        Cause::CompletionLost,
        "all its transfers are done, and poll() does not say so",
        "look at the server's transfer workers; restart the server if it does not end",
    ),
    (
        Cause::UnsafeRelease,
        "it was failed and gave its pages to others while a transfer still read them",
        "distrust what was decoded meanwhile; nothing can be undone",
    ),
    (
        Cause::LoopStalled,
        "the scheduler makes no pass, so nobody is polled: this request is not at fault",
        "look at the server (py-spy dump, a hanging collective); it will need a restart",
    ),
    (
        Cause::RankDivergence,
        "the ranks of its server dropped different requests, so their collectives hang or will",
        "look at the server (py-spy dump, a hanging collective); it will need a restart",
    ),
    (
        Cause::HeldByOtherRank,
        "it is over on this rank, and another rank of its server still polls it as under way",
        "look at the other rank's request of this room: that one says why",
    ),
    (
        Cause::Resurrected,
        "it had failed, and a late update overwrote that",
        "wait a minute: as a rule the worker gets it to Success; then restart the server",
    ),
    (
        Cause::WarmupPinned,
        "it is a warm-up or health check that does not end; nobody waits for it",
        "nothing, unless many do",
    ),
    (
        Cause::Unknown,
        "nothing that is seen from here says that anything is wrong with it",
        "nothing, unless it stays in the queue beyond the server's own time-outs",
    ),
];

/// What each guard's refusal means.
static REFUSALS: [(Refusal, &str); 22] = [
    (
        Refusal::DecodeSide,
        "it is a decode's: the prefill writes its pages, and nothing here proves that it has stopped",
    ),
    (Refusal::Observing, "the mode, or every rule that fires, says to observe only"),
    (Refusal::KillSwitch, "the kill-switch file exists"),
    (Refusal::AuditUnavailable, "no audit log can be written: what cannot be recorded is not done"),
    (Refusal::RateLimited, "as many requests were failed in this minute as are allowed"),
    (Refusal::CauseNotCurable, "the failure flag does not cure this cause"),
    (Refusal::Blind, "the picture may be wrong: events are missing, or the diagnosis is not certain"),
    (Refusal::NoControlChannel, "the agent has no channel to the server's hook"),
    (Refusal::Paused, "generation is paused: no command runs"),
    (Refusal::OncePerRequest, "it was acted on before"),
    (Refusal::NotInflight, "it is not in the inflight queue"),
    (Refusal::Terminal, "it has ended, or poll() says that it is over"),
    (Refusal::RidIncomplete, "its request id is not known in full: SGLang matches by prefix"),
    (Refusal::RoomOutOfRange, "its room is no number: others may hide behind it"),
    (Refusal::RoomShared, "another live sender has its room: failing one kills or pins the other"),
    (Refusal::NotQuiescent, "it is not proved that no write is under way: freed pages would be read or written"),
    (
        Refusal::AbandonedHandles,
        "a worker left a chunk of its room behind, and the hook cannot see whether that is over",
    ),
    (Refusal::RanksUnknown, "the server has not said how many ranks it has"),
    (Refusal::TensorParallel, "the server has several TP ranks: one rank's flag frees pages on all"),
    (Refusal::ContextParallel, "the server has several CP ranks: one rank's flag frees pages on all"),
    (Refusal::PipelineParallel, "the server has several pipeline stages, which have to drop the same requests"),
    (Refusal::BackendUnproved, "no test has failed a sender of this backend on this release"),
];

/// What a cause means.
pub(super) fn meaning(cause: Cause) -> &'static str {
    CAUSES.iter().find(|(of, ..)| *of == cause).map_or("it has no sentence yet", |(_, meaning, _)| meaning)
}

/// What to do about a cause.
pub(super) fn advice(cause: Cause) -> &'static str {
    CAUSES.iter().find(|(of, ..)| *of == cause).map_or("it has no sentence yet", |(.., advice)| advice)
}

/// Why a guard refuses.
pub(super) fn refusal(refusal: Refusal) -> &'static str {
    REFUSALS.iter().find(|(of, _)| *of == refusal).map_or("it has no sentence yet", |(_, why)| why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cause_and_every_guard_has_its_sentence() {
        for cause in Cause::ALL {
            assert!([meaning(cause), advice(cause)].iter().all(|text| !text.contains("no sentence")), "{cause}");
        }
        for guard in Refusal::ALL {
            assert!(!refusal(guard).contains("no sentence"), "{guard:?}");
        }
    }
}
