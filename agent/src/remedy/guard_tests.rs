use super::*;
use crate::{
    diagnose::{NotKnown, Quiescence},
    event::{Hello, Phase, Rid, clock::Monotonic, receiver::DecodeQueue},
    request::{Ended, Receiving, ResyncReason},
};

struct Case {
    request: Request,
    server: ServerState,
    diagnosis: Diagnosis,
    context: Context,
}

impl Case {
    /// A case that every guard lets pass.
    fn allowed() -> Self {
        let at = Monotonic(1);
        Self {
            request: Request {
                rid: Some(Rid { text: "rid".into(), truncated: false }),
                phase: Some(Phase::WaitingForInput),
                entered: Some(at),
                sent_chunks: 1,
                sent_pages: 8,
                sent_last: true,
                shared_with: Some(1),
                cleared_by: Some(1),
                cleared_at: Some(at),
                ..Request::opened(2, Room::Number(77), Backend::Nixl, at)
            },
            server: ServerState {
                hello: Some(Box::new(Hello { tp: Some(1), cp: Some(1), pp: Some(1), ..Hello::default() })),
                queue_length: Some((1, at)),
                passes: 100,
                ..ServerState::new(Sync::Complete)
            },
            diagnosis: Diagnosis {
                cause: Cause::RoomCollision,
                evidence: Vec::new(),
                quiescence: Quiescence::Quiescent { since: Some(at) },
                confidence: Confidence::High,
            },
            context: Context {
                mode: Mode::Enforce,
                kill_switch: false,
                audit_available: true,
                actions_left: 1,
                has_control_channel: true,
                acted_before: false,
                senders_on_room: 1,
                abandoned_handles: false,
            },
        }
    }

    fn hello(&mut self) -> &mut Hello {
        self.server.hello.as_mut().unwrap()
    }

    fn verdict(&self) -> Result<(), Refusal> {
        may_act(&self.request, &self.server, &self.diagnosis, &self.context)
    }
}

type Spoil = fn(&mut Case);

const REFUSED: &[(Refusal, Spoil)] = &[
    (Refusal::Observing, |case| case.context.mode = Mode::Observe),
    (Refusal::KillSwitch, |case| case.context.kill_switch = true),
    (Refusal::AuditUnavailable, |case| case.context.audit_available = false),
    (Refusal::RateLimited, |case| case.context.actions_left = 0),
    (Refusal::CauseNotCurable, |case| case.diagnosis.cause = Cause::Unknown),
    (Refusal::CauseNotCurable, |case| case.diagnosis.cause = Cause::Parked),
    (Refusal::CauseNotCurable, |case| case.diagnosis.cause = Cause::UnsafeRelease),
    (Refusal::CauseNotCurable, |case| case.diagnosis.cause = Cause::NeverBootstrapped),
    (Refusal::Blind, |case| case.server.sync = Sync::Needed(ResyncReason::EventsLost)),
    (Refusal::Blind, |case| case.diagnosis.confidence = Confidence::Low),
    (Refusal::NoControlChannel, |case| case.context.has_control_channel = false),
    (Refusal::Paused, |case| case.server.paused = true),
    (Refusal::OncePerRequest, |case| case.context.acted_before = true),
    (Refusal::OncePerRequest, |case| case.request.remedied = Some(Monotonic(5))),
    (Refusal::NotInflight, |case| case.request.entered = None),
    (Refusal::DecodeSide, |case| {
        case.request.receiving = Some(Receiving { queue: Some(DecodeQueue::Transfer), since: Monotonic(1) })
    }),
    (Refusal::Terminal, |case| case.request.phase = Some(Phase::Failed)),
    (Refusal::Terminal, |case| case.request.phase = None),
    (Refusal::Terminal, |case| {
        case.request.ended = Some(Box::new(Ended { at: Monotonic(9), left: None, unsafe_release: None }))
    }),
    (Refusal::RidIncomplete, |case| case.request.rid = None),
    (Refusal::RidIncomplete, |case| case.request.rid.as_mut().unwrap().truncated = true),
    (Refusal::RidIncomplete, |case| case.request.rid.as_mut().unwrap().text.clear()),
    (Refusal::RoomOutOfRange, |case| case.request.room = Room::OutOfRange),
    (Refusal::RoomShared, |case| case.context.senders_on_room = 2),
    (Refusal::AbandonedHandles, |case| case.context.abandoned_handles = true),
    (Refusal::RoomShared, |case| case.context.senders_on_room = 0),
    (Refusal::NotQuiescent, |case| {
        case.diagnosis.quiescence = Quiescence::InFlight { chunks: 1, transfers: 0, oldest: None }
    }),
    (Refusal::NotQuiescent, |case| case.diagnosis.quiescence = Quiescence::Queued { chunks: 1 }),
    (Refusal::NotQuiescent, |case| case.diagnosis.quiescence = Quiescence::Unknown { why: NotKnown::AttachedLate }),
    (Refusal::RanksUnknown, |case| case.server.hello = None),
    (Refusal::RanksUnknown, |case| case.hello().tp = None),
    (Refusal::RanksUnknown, |case| case.hello().cp = None),
    (Refusal::RanksUnknown, |case| case.hello().pp = None),
    (Refusal::TensorParallel, |case| case.hello().tp = Some(2)),
    (Refusal::ContextParallel, |case| case.hello().cp = Some(2)),
    (Refusal::PipelineParallel, |case| case.hello().pp = Some(2)),
    (Refusal::BackendUnproved, |case| case.request.backend = Backend::Mori),
    (Refusal::BackendUnproved, |case| case.request.backend = Backend::Other),
    (Refusal::BackendUnproved, |case| {
        case.request.backend = Backend::Mooncake;
        case.hello().sglang = Some("0.5.99".into());
    }),
    (Refusal::BackendUnproved, |case| {
        case.request.backend = Backend::Mooncake;
        case.hello().sglang = None;
    }),
];

#[test]
fn every_single_guard_refuses_on_its_own() {
    assert_eq!(Case::allowed().verdict(), Ok(()), "the twin without a spoiled condition must be allowed");
    for (index, (refusal, spoil)) in REFUSED.iter().enumerate() {
        let mut case = Case::allowed();
        spoil(&mut case);
        assert_eq!(case.verdict(), Err(*refusal), "case {index}");
    }
}

#[test]
fn every_refusal_has_a_case() {
    for refusal in Refusal::ALL {
        assert!(REFUSED.iter().any(|(tested, _)| *tested == refusal), "{refusal:?}");
    }
}

#[test]
fn a_curable_cause_with_nothing_posted_is_allowed() {
    for cause in [Cause::RoomCollision, Cause::UpdateDropped, Cause::AbortIgnored] {
        let mut case = Case::allowed();
        case.diagnosis.cause = cause;
        case.diagnosis.quiescence = Quiescence::NeverPosted;
        assert_eq!(case.verdict(), Ok(()), "{cause}");
    }
}

#[test]
fn mooncake_is_allowed_on_the_releases_on_which_it_was_proved() {
    for release in ["0.5.10", "0.5.12.post1", "0.5.15", "0.5.18", "0.5.22", "0.5.23"] {
        let mut case = Case::allowed();
        case.request.backend = Backend::Mooncake;
        case.hello().sglang = Some(release.into());
        assert_eq!(case.verdict(), Ok(()), "{release}");
        case.request.backend = Backend::Ascend;
        assert_eq!(case.verdict(), Err(Refusal::BackendUnproved), "{release}");
    }
}

#[test]
fn a_dry_run_passes_the_same_guards() {
    let mut case = Case::allowed();
    case.context.mode = Mode::DryRun;
    assert_eq!(case.verdict(), Ok(()));
    case.context.senders_on_room = 2;
    assert_eq!(case.verdict(), Err(Refusal::RoomShared));
}

#[test]
fn the_lower_of_two_modes_wins() {
    assert_eq!(Mode::Enforce.min(Mode::DryRun), Mode::DryRun);
    assert_eq!(Mode::DryRun.min(Mode::Observe), Mode::Observe);
    assert_eq!(Mode::default(), Mode::Observe);
}
