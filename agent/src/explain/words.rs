//! What inputs say, in words. What is not known here is named as the agent names it.

use std::{
    borrow::Cow,
    fmt::{self, Write as _},
};

use super::lines::Weight;
use crate::event::{
    Body, ChunkStep, Hello, LeaveReason, Phase, Room,
    receiver::{DecodeLeave, DecodeQueue, ReceiverEvent},
};

/// Characters of something that is not known here.
const MAX_UNKNOWN: usize = 120;

/// What an event's words mean.
pub(super) type Said = (Weight, Cow<'static, str>);

/// Whose an event is: the room and the sender that it names.
pub(super) fn of_whom(body: &Body) -> (Option<Room>, Option<u64>) {
    match body {
        Body::Entry { room, sender, .. }
        | Body::Open { room, sender, .. }
        | Body::Close { room, sender }
        | Body::Phase { room, sender, .. }
        | Body::Abort { room, sender, .. }
        | Body::Send { room, sender, .. }
        | Body::Clear { room, sender, .. }
        | Body::Failure { room, sender }
        | Body::Enter { room, sender, .. }
        | Body::Leave { room, sender, .. }
        | Body::Remedy { room, sender, .. } => (Some(*room), Some(*sender)),
        Body::Receiver(
            ReceiverEvent::Open { room, sender, .. }
            | ReceiverEvent::Entry { room, sender, .. }
            | ReceiverEvent::Enter { room, sender, .. }
            | ReceiverEvent::Leave { room, sender, .. },
        ) => (Some(*room), Some(*sender)),
        Body::Update { room, .. } | Body::PeerAbort { room, .. } | Body::Chunk { room, .. } => (Some(*room), None),
        _ => (None, None),
    }
}

/// What an event of a request, or of its room, says.
pub(super) fn of_request(body: &Body) -> Said {
    let step = |text: Cow<'static, str>| (Weight::Step, text);
    match body {
        Body::Open { room, backend, .. } => {
            step(format!("its sender was made, on room {room} ({})", backend.name()).into())
        }
        Body::Entry { entry, .. } => {
            let place = if entry.entered.is_some() { "in the inflight queue" } else { "not in the inflight queue" };
            let phase = phase_name(entry.phase);
            let chunks = count(u64::from(entry.sent_chunks), "chunk");
            step(format!("the hook tells of it again: {phase}, {place}, {chunks} sent").into())
        }
        Body::Close { .. } => step("its sender is gone".into()),
        Body::Phase { old, new, .. } => {
            step(format!("poll() {} \u{2192} {}", phase_name(*old), phase_name(*new)).into())
        }
        Body::Abort { room_present: true, .. } => step("abort() was called".into()),
        Body::Abort { .. } => step("abort() was called; its room is not in request_status".into()),
        Body::Update { requested, before, after, .. } => update(*requested, *before, *after),
        Body::Send { last: true, pages, .. } => {
            step(format!("send(): {}, the last chunk", count((*pages).into(), "page")).into())
        }
        Body::Send { pages, .. } => (Weight::Routine, format!("send(): {}", count((*pages).into(), "page")).into()),
        Body::Clear { removed: true, .. } => step("clear() removed the room's status".into()),
        Body::Clear { .. } => step("clear() was called; the room's status was gone before".into()),
        Body::Failure { .. } => step("failure_exception() was called".into()),
        Body::Enter { queue_length, .. } => step(format!("entered the inflight queue, {queue_length} in it").into()),
        Body::Leave { reason, .. } => step(
            match reason {
                LeaveReason::Success => "left the inflight queue: success",
                LeaveReason::Failed => "left the inflight queue: failed",
                LeaveReason::Removed => "was taken out of the inflight queue",
            }
            .into(),
        ),
        Body::PeerAbort { room_present: true, .. } => step("the decode side aborted the room".into()),
        Body::PeerAbort { .. } => step("the decode side aborted the room, which is not in request_status".into()),
        Body::Chunk { step: what, counts, .. } => {
            let text = match what {
                ChunkStep::Queued => "a chunk was put into a transfer queue",
                ChunkStep::Begun => "a worker took a chunk",
                ChunkStep::Ended if counts.abandoned => "a worker left a chunk with an error",
                ChunkStep::Ended => "a worker is done with a chunk",
            };
            (if counts.abandoned { Weight::Step } else { Weight::Routine }, text.into())
        }
        Body::Remedy { flag, .. } => {
            let flag = flag.map_or("a failure flag", |flag| flag.name());
            step(format!("{flag} was set: it is to be failed").into())
        }
        Body::Receiver(receiver) => of_receiver(receiver),
        other => unknown(other),
    }
}

/// What an event of a decode's receiver says.
fn of_receiver(event: &ReceiverEvent) -> Said {
    let text = match event {
        ReceiverEvent::Open { room, backend, .. } => {
            format!("its receiver was made, on room {room} ({})", backend.name())
        }
        ReceiverEvent::Entry { queue, entry, .. } => {
            let queue = queue.map_or("no queue".to_owned(), |queue| format!("the {} queue", queue_name(queue)));
            format!("the hook tells of it again: {}, in {queue}", phase_name(entry.phase))
        }
        ReceiverEvent::Enter { queue, .. } => format!("entered the {} queue", queue_name(*queue)),
        ReceiverEvent::Leave { queue, reason, .. } => {
            let queue = queue_name(*queue);
            match reason {
                DecodeLeave::Success => format!("left the {queue} queue: success"),
                DecodeLeave::Failed => format!("left the {queue} queue: failed"),
                DecodeLeave::Removed => format!("was taken out of the {queue} queue"),
                DecodeLeave::Preallocated => format!("left the {queue} queue: it has its memory"),
            }
        }
        other @ ReceiverEvent::Pass { .. } => return unknown(other),
    };
    (Weight::Step, text.into())
}

fn queue_name(queue: DecodeQueue) -> &'static str {
    match queue {
        DecodeQueue::Prealloc => "prealloc",
        DecodeQueue::Transfer => "transfer",
    }
}

fn update(requested: Option<Phase>, before: Option<Phase>, after: Option<Phase>) -> Said {
    let (requested, shown) = (phase_name(requested), |phase: Option<Phase>| phase.map_or("absent", Phase::name));
    match (before, after) {
        (None, None) => {
            (Weight::Step, format!("update_status({requested}) was dropped: the room is not in request_status").into())
        }
        (before, after) if before == after => {
            (Weight::Routine, format!("update_status({requested}) leaves {}", shown(after)).into())
        }
        (before, after) => {
            (Weight::Step, format!("update_status({requested}): {} \u{2192} {}", shown(before), shown(after)).into())
        }
    }
}

/// What an event of the server as a whole says; nothing where it is not told line by line.
pub(super) fn of_server(body: &Body) -> Option<Said> {
    match body {
        Body::Hello(hello) => Some((Weight::Step, format!("the server says what it is: {}", introduced(hello)).into())),
        Body::StateEnd { entries, .. } => {
            let senders = count(*entries, "sender");
            Some((Weight::Step, format!("the hook has told of everything that lives: {senders}").into()))
        }
        Body::Paused => Some((Weight::Step, "generation was paused: nobody is polled".into())),
        Body::Resumed => Some((Weight::Step, "generation was resumed".into())),
        Body::StateBegin { .. } | Body::Pass { .. } | Body::Native(_) | Body::Receiver(_) => None,
        other => Some(unknown(other)),
    }
}

/// Release, role and backend, as far as known.
pub(super) fn introduced(hello: &Hello) -> String {
    let sglang = hello.sglang.as_ref().map(|release| format!("SGLang {release}"));
    let parts = [sglang, hello.role.clone(), hello.engine.clone().or_else(|| hello.backend.clone())];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

/// The ranks of a scheduler.
pub(super) fn ranks(hello: &Hello) -> Option<String> {
    let place = |name: &str, rank: Option<u32>, size: Option<u32>| {
        let size = size?;
        Some(rank.map_or_else(|| format!("{name} of {size}"), |rank| format!("{name} {rank} of {size}")))
    };
    let parts = [
        place("TP", hello.tp_rank, hello.tp),
        place("PP", hello.pp_rank, hello.pp),
        place("CP", None, hello.cp),
        place("DP", hello.dp_rank, hello.dp),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// So many of something.
pub(super) fn count(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

pub(super) fn phase_name(phase: Option<Phase>) -> &'static str {
    phase.map_or("NotPolled", Phase::name)
}

/// Something that is not known here, by the name that the agent has for it: of a bounded length, however much is in it.
pub(super) fn unknown(what: &impl fmt::Debug) -> Said {
    let mut text = Bounded(String::new());
    // Full is full.
    let _ = write!(text, "{what:?}");
    let name = text.0.split([' ', '(', '{']).next().unwrap_or_default().to_owned();
    (Weight::Unknown, format!("{name} (first: {})", text.0).into())
}

struct Bounded(String);

impl fmt::Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            if self.0.len() >= MAX_UNKNOWN {
                return Err(fmt::Error);
            }
            self.0.push(character);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_update_that_was_dropped_is_told_apart_from_one_that_changed_nothing() {
        let failed = Some(Phase::Failed);
        assert!(update(failed, None, None).1.contains("was dropped"));
        assert_eq!(update(failed, failed, failed), (Weight::Routine, "update_status(Failed) leaves Failed".into()));
        let (weight, text) = update(failed, Some(Phase::Transferring), failed);
        assert_eq!((weight, &*text), (Weight::Step, "update_status(Failed): Transferring \u{2192} Failed"));
    }

    #[test]
    fn what_is_not_known_here_is_named_and_no_longer_than_a_line() {
        #[derive(Debug)]
        #[expect(dead_code, reason = "only shown")]
        struct Weather {
            clouds: Vec<u64>,
        }
        let (weight, text) = unknown(&Weather { clouds: (0..100_000).collect() });
        assert_eq!(weight, Weight::Unknown);
        assert!(text.starts_with("Weather (first: Weather { clouds: [0, 1,") && text.len() < 160, "{text}");
    }
}
