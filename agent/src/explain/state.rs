//! What a core knows of a request at one moment.

use super::{
    answer::{Diagnosis, Ended, Evidence, Explanation, Instance, Moment, Server, Standing},
    meaning,
    outlook::outlook,
    remediation::{Surroundings, remediation},
    wanted::Wanted,
    words,
};
use crate::{
    core::Core,
    diagnose::{self, Confidence, diagnose},
    event::{
        LeaveReason, ProcessKey,
        clock::{Monotonic, WallClock},
    },
    request::{Request, RequestKey, RoomState, ServerState, Sync, Watch, tracker::Tracked},
};

/// Times of one request.
#[derive(Clone, Copy, Debug)]
pub struct Times<'a> {
    wall: &'a WallClock,
    created: Monotonic,
}

impl<'a> Times<'a> {
    /// Those of a request that was made at `created`.
    pub fn new(wall: &'a WallClock, created: Monotonic) -> Self {
        Self { wall, created }
    }

    /// A moment of it.
    pub fn moment(&self, at: Monotonic) -> Moment {
        let (after, before) = (at.since(self.created).as_secs_f64(), self.created.since(at).as_secs_f64());
        Moment { time: self.wall.timestamp(at), seconds: if at < self.created { -before } else { after } }
    }
}

/// The requests that are meant, the newest first, of those that a core knows now.
pub fn find(core: &Core, wanted: &Wanted, now: Monotonic) -> Vec<RequestKey> {
    let mut found: Vec<(Monotonic, RequestKey)> = core
        .tracker()
        .judged(now)
        .filter(|tracked| wanted.is(tracked.key, tracked.request))
        .map(|tracked| (tracked.request.created, tracked.key))
        .collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, key)| key).collect()
}

/// What to say where no request is known of what is meant, and transfers are.
pub fn without_request(core: &Core, wanted: &Wanted) -> Option<String> {
    wanted.has_transfers(core).then(|| {
        "transfers of it are seen, and no request: is the hook in that server (`dislodge doctor`)? `/status` tells of the \
         transfers"
            .to_owned()
    })
}

/// Which request a key is, of those that a core knows now.
pub fn name(core: &Core, key: RequestKey, now: Monotonic, wall: &WallClock) -> Option<Instance> {
    let tracked = core.tracker().judge(key, now)?;
    Some(instance(key, tracked.request, &Times::new(wall, tracked.request.created)))
}

/// Explains a request that `core` knows at `now`, without a timeline; nothing when it does not know it.
pub fn explain(
    core: &Core,
    key: RequestKey,
    now: Monotonic,
    wall: &WallClock,
    surroundings: &Surroundings,
) -> Option<Explanation> {
    let tracked = core.tracker().judge(key, now)?;
    let times = Times::new(wall, tracked.request.created);
    let diagnosis = diagnose(&tracked, now);
    let rules = outlook(core, &tracked, now, &times);
    Some(Explanation {
        instance: instance(key, tracked.request, &times),
        server: server(core, key.process, tracked.request.created),
        standing: standing(tracked.request, Some(tracked.room), now, &times),
        timeline: None,
        remediation: remediation(&tracked, &diagnosis, &rules, surroundings),
        diagnosis: in_words(&diagnosis, doubts(&tracked, &diagnosis), &times),
        rules,
    })
}

pub(super) fn instance(key: RequestKey, request: &Request, times: &Times<'_>) -> Instance {
    Instance {
        pid: key.process.pid,
        start: key.process.start,
        serial: key.serial,
        room: request.room.to_string(),
        rid: request.rid.clone(),
        created: times.moment(request.created).time,
    }
}

pub(super) fn server(core: &Core, process: ProcessKey, created: Monotonic) -> Server {
    let identity = core.identity(process).cloned().unwrap_or_default();
    let state = core.tracker().server(process);
    let hello = state.and_then(|state| state.hello.as_deref());
    Server {
        title: identity.title.clone(),
        node: identity.node.clone(),
        container: identity.container.clone(),
        role: hello.and_then(|hello| hello.role.clone()),
        sglang: hello.and_then(|hello| hello.sglang.clone()),
        engine: hello.and_then(|hello| hello.engine.clone()),
        ranks: hello.and_then(words::ranks),
        queue_length: state.and_then(|state| state.queue_length).map(|(length, _)| length),
        paused: state.is_some_and(|state| state.paused),
        synchronised: state.is_some_and(|state| state.sync == Sync::Complete),
        transfers: state.map_or_else(|| "not seen".to_owned(), |state| watched(state, created)),
    }
}

fn watched(state: &ServerState, created: Monotonic) -> String {
    match state.native.watch {
        Watch::No => "not all of them are seen".to_owned(),
        Watch::Since { at, engine } if at <= created => format!("each one is seen ({})", engine.name()),
        Watch::Since { engine, .. } => format!("each one is seen only since after it was made ({})", engine.name()),
    }
}

pub(super) fn standing(request: &Request, room: Option<&RoomState>, now: Monotonic, times: &Times<'_>) -> Standing {
    let end = request.ended.as_ref().map_or(now, |ended| ended.at);
    Standing {
        backend: request.backend.name().to_owned(),
        phase: words::phase_name(request.phase).to_owned(),
        phase_since: times.moment(request.phase_since),
        queue: request.queue().name().to_owned(),
        entered: request.entered.map(|at| times.moment(at)),
        age_seconds: end.since(request.created).as_secs_f64(),
        sent_chunks: request.sent_chunks,
        sent_pages: request.sent_pages,
        room_shared_with: room
            .map(|room| room.senders.iter().copied().filter(|serial| *serial != request.serial).collect())
            .unwrap_or_default(),
        ended: request.ended.as_ref().map(|ended| Ended {
            at: times.moment(ended.at),
            how: match ended.left {
                Some(LeaveReason::Success) => "left the inflight queue: success",
                Some(LeaveReason::Failed) => "left the inflight queue: failed",
                Some(LeaveReason::Removed) => "was taken out of the inflight queue",
                None => "ended without having left the inflight queue by itself, or its server did",
            }
            .to_owned(),
        }),
    }
}

/// Why a diagnosis is not certain.
pub(super) fn doubts(tracked: &Tracked<'_>, diagnosis: &diagnose::Diagnosis) -> Vec<String> {
    let mut doubts = Vec::new();
    match tracked.server.sync {
        Sync::Complete => {}
        Sync::Needed(why) => doubts.push(format!("not everything of the server is known: {}", why.name())),
        Sync::Asked { reason, .. } => {
            doubts.push(format!("not everything of the server is known: {}; the hook was asked", reason.name()));
        }
    }
    if diagnosis.confidence == Confidence::Low {
        if let Some(other) = tracked.request.shared_with {
            doubts.push(format!("sender {other} had its room too: whose transfers they are cannot be told"));
        }
        let is_watched =
            matches!(tracked.server.native.watch, Watch::Since { at, .. } if at <= tracked.request.created);
        if !is_watched {
            doubts.push("not each of its transfers was seen".to_owned());
        }
    }
    doubts
}

pub(super) fn in_words(diagnosis: &diagnose::Diagnosis, doubts: Vec<String>, times: &Times<'_>) -> Diagnosis {
    Diagnosis {
        cause: diagnosis.cause.name().to_owned(),
        meaning: meaning::meaning(diagnosis.cause).to_owned(),
        advice: meaning::advice(diagnosis.cause).to_owned(),
        quiescence: diagnosis.quiescence.to_string(),
        confidence: diagnosis.confidence.name().to_owned(),
        doubts,
        evidence: diagnosis
            .evidence
            .iter()
            .map(|evidence| Evidence {
                at: times.moment(evidence.at),
                source: evidence.source.name().to_owned(),
                text: evidence.fact.to_string(),
            })
            .collect(),
        is_past: false,
    }
}

/// Of a request that came and went between two ticks.
pub(super) fn not_said() -> Diagnosis {
    Diagnosis {
        cause: diagnose::Cause::Unknown.name().to_owned(),
        meaning: "it ended before it was diagnosed once".to_owned(),
        advice: "nothing".to_owned(),
        quiescence: "not known".to_owned(),
        confidence: Confidence::Low.name().to_owned(),
        doubts: Vec::new(),
        evidence: Vec::new(),
        is_past: true,
    }
}
