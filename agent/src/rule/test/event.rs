//! What a test says that happens: a flat map of words and numbers → what the core is told. Small, since people write it:
//! one server, one transfer engine (NIXL), each mark by its name.

use std::{
    collections::{BTreeMap, HashMap},
    str::FromStr,
    time::Duration,
};

use serde_yaml::Spanned;

use crate::{
    event::{
        Backend, Body, ChunkCounts, ChunkStep, LeaveReason, Phase, Rid, Room,
        clock::Monotonic,
        native::{Engine, ErrorPoint, Handle, NativeEvent, Notification, TransferStatus},
        receiver::{DecodeLeave, DecodeQueue, ReceiverEvent},
    },
    problem::{Problems, Shape, Text, duration, nearest},
    request::ends::{Conclusion, EndState, Side},
    rule::load::one_of,
};

/// Threads of the server: what the scheduler calls, and a transfer worker where nothing else is said.
pub(super) const SCHEDULER: u32 = 1;
const WORKER: u32 = 2;
/// Longest test.
pub(super) const LONGEST: Duration = Duration::from_secs(86_400);

/// One thing that happens.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) at: Duration,
    /// Of which rank, from 0; nothing where it is of every one.
    pub(super) rank: Option<u32>,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// Events come out of the ring, of this thread.
    Seen(u32, Vec<Body>),
    /// The scheduler's loop makes passes from now on, or none.
    Loop(bool),
    /// Marks were lost, and the hook's answer is not there yet.
    MarksLost,
    /// Calls into the transfer engine were lost.
    TransfersLost,
    /// The agent of another node tells what the decode at the other end of a room did just then.
    OtherEnd(Room, EndAt),
    /// The process is gone.
    Exit,
}

/// What the other end of a room did, at a time that is still to be said.
pub(super) type EndAt = fn(Monotonic) -> EndState;

pub(super) type Raw = Spanned<BTreeMap<String, Text>>;

/// What can happen, with the keys that it needs and those that it may have beside `at`, `what` and `rank`.
const KINDS: [(&str, &[&str], &[&str]); 24] = [
    ("open", &["room", "sender"], &["backend", "role"]),
    ("close", &["sender"], &[]),
    ("phase", &["sender", "to"], &[]),
    ("abort", &["sender"], &[]),
    ("update", &["room", "from", "to"], &["requested"]),
    ("send", &["sender"], &["pages", "last"]),
    ("clear", &["sender"], &[]),
    ("failure", &["sender"], &[]),
    ("enter", &["sender"], &["rid", "queue"]),
    ("leave", &["sender", "reason"], &[]),
    ("peer_abort", &["room"], &[]),
    ("chunk", &["room", "step"], &["queue", "queued", "working", "abandoned", "thread"]),
    ("post", &["handle"], &["room", "thread"]),
    ("transfer", &["handle", "status"], &["code"]),
    ("endpoint_error", &["code"], &[]),
    ("completion_error", &["code"], &[]),
    ("other_end", &["room", "state"], &[]),
    ("paused", &[], &[]),
    ("resumed", &[], &[]),
    ("loop_stops", &[], &[]),
    ("loop_turns", &[], &[]),
    ("marks_lost", &[], &[]),
    ("transfers_lost", &[], &[]),
    ("exit", &[], &[]),
];

pub(super) const SHAPE: Shape = Shape::Map(&[
    ("at", Shape::Any),
    ("what", Shape::Any),
    ("room", Shape::Any),
    ("sender", Shape::Any),
    ("rank", Shape::Any),
    ("backend", Shape::Any),
    ("role", Shape::Any),
    ("from", Shape::Any),
    ("to", Shape::Any),
    ("requested", Shape::Any),
    ("pages", Shape::Any),
    ("last", Shape::Any),
    ("rid", Shape::Any),
    ("reason", Shape::Any),
    ("step", Shape::Any),
    ("queue", Shape::Any),
    ("queued", Shape::Any),
    ("working", Shape::Any),
    ("abandoned", Shape::Any),
    ("thread", Shape::Any),
    ("handle", Shape::Any),
    ("status", Shape::Any),
    ("code", Shape::Any),
    ("state", Shape::Any),
]);

/// What is known of the events before: a sender's room and phase need not be said again.
#[derive(Debug, Default)]
pub(super) struct Known {
    senders: HashMap<(u32, u64), (Room, Option<Phase>)>,
    /// Receivers, with the queue that each is in.
    receivers: HashMap<(u32, u64), Option<DecodeQueue>>,
    at: Duration,
}

/// The step that `raw` says; nothing where it is not sound, with every problem noted.
pub(super) fn step(raw: &Raw, ranks: u32, known: &mut Known, problems: &mut Problems<'_>) -> Option<Step> {
    let event = Event { raw, known, problems, rank: 0 };
    event.read(ranks)
}

struct Event<'a, 'b, 'c> {
    raw: &'a Raw,
    known: &'b mut Known,
    problems: &'b mut Problems<'c>,
    rank: u32,
}

impl<'a> Event<'a, '_, '_> {
    fn read(mut self, ranks: u32) -> Option<Step> {
        let at = self.at();
        let raw = self.raw;
        let Some(what) = raw.value.get("what") else {
            self.problems.at(raw, "an event needs `what`, such as `what: open`");
            return None;
        };
        let Some((name, needed, optional)) = KINDS.iter().find(|(name, ..)| *name == what.value) else {
            let names = KINDS.map(|(name, ..)| name);
            self.problems.at(
                what,
                format!("`{}` is nothing that happens; {}", what.value.escape_debug(), nearest(&what.value, &names)),
            );
            return None;
        };
        let mut sound = at.is_some();
        for missing in needed.iter().filter(|key| !raw.value.contains_key(**key)) {
            self.problems.at(raw, format!("`{name}` needs `{missing}`"));
            sound = false;
        }
        for (key, value) in &raw.value {
            let key = key.as_str();
            let is_known = matches!(SHAPE, Shape::Map(known) if known.iter().any(|(known, _)| *known == key));
            if is_known && !["at", "what", "rank"].contains(&key) && !needed.contains(&key) && !optional.contains(&key)
            {
                self.problems.at(value, format!("`{name}` has no `{key}`"));
                sound = false;
            }
        }
        self.rank = self.number("rank", 0)?;
        if let (Some(text), true) = (self.text("rank"), self.rank >= ranks) {
            self.problems.at(text, format!("the server has {ranks} ranks, from 0 on; `server` says how many"));
            return None;
        }
        let what = sound.then(|| self.what(name)).flatten()?;
        // A loop that stops stops all of them: they wait for each other.
        let of_all = matches!(what, What::Loop(_)) && self.text("rank").is_none();
        Some(Step { at: at?, rank: (!of_all).then_some(self.rank), what })
    }

    fn at(&mut self) -> Option<Duration> {
        let at = at(self.raw, self.raw.value.get("at"), self.problems)?;
        if at < self.known.at {
            self.problems.at(self.raw, "is before the event above it; write events in the order of time");
            return None;
        }
        self.known.at = at;
        Some(at)
    }

    fn text(&self, key: &str) -> Option<&'a Text> {
        self.raw.value.get(key)
    }

    /// A number, or `default` where nothing is said.
    fn number<T: FromStr>(&mut self, key: &str, default: T) -> Option<T> {
        let Some(text) = self.text(key) else { return Some(default) };
        let number = text.value.parse().ok();
        if number.is_none() {
            self.problems.at(text, format!("`{}` is no number that `{key}` can be", text.value.escape_debug()));
        }
        number
    }

    fn word<T: Copy>(&mut self, key: &str, known: &[(&str, T)]) -> Option<T> {
        one_of(key, self.text(key)?, known, self.problems)
    }

    fn flag(&mut self, key: &str) -> Option<bool> {
        if self.text(key).is_none() { Some(false) } else { self.word(key, &[("true", true), ("false", false)]) }
    }

    fn status(&mut self, key: &str) -> Option<Option<Phase>> {
        let phases = Phase::ALL.map(|phase| (phase.name(), Some(phase)));
        one_of("status", self.text(key)?, &[&phases[..], &[("none", None)]].concat(), self.problems)
    }

    fn room(&mut self) -> Option<Room> {
        self.number("room", 0).map(Room::Number)
    }

    /// A sender that was opened, with its room.
    fn sender(&mut self) -> Option<(u64, Room)> {
        let sender = self.number("sender", 0)?;
        let room = self.known.senders.get(&(self.rank, sender)).map(|(room, _)| *room);
        if let (None, Some(text)) = (room, self.text("sender")) {
            self.problems.at(text, format!("sender {sender} was not opened before"));
        }
        Some((sender, room?))
    }

    fn what(&mut self, name: &str) -> Option<What> {
        let thread = self.number("thread", if ["chunk", "post"].contains(&name) { WORKER } else { SCHEDULER })?;
        let native = |event| Body::Native(Box::new(event));
        let body = match name {
            "open" => self.open()?,
            "close" => self.sender().map(|(sender, room)| Body::Close { room, sender })?,
            "phase" => self.phase()?,
            "abort" => self.sender().map(|(sender, room)| Body::Abort { room, sender, room_present: true })?,
            "update" => {
                let (room, before, after) = (self.room()?, self.status("from")?, self.status("to")?);
                let requested = if self.text("requested").is_some() { self.status("requested")? } else { after };
                Body::Update { room, requested, before, after }
            }
            "send" => {
                let ((sender, room), pages, last) = (self.sender()?, self.number("pages", 1)?, self.flag("last")?);
                Body::Send { room, sender, pages, last }
            }
            "clear" => self.sender().map(|(sender, room)| Body::Clear { room, sender, removed: true })?,
            "failure" => self.sender().map(|(sender, room)| Body::Failure { room, sender })?,
            "enter" => {
                let (sender, room) = self.sender()?;
                let rid = self.text("rid").map(|text| Rid { text: text.value.clone(), truncated: false });
                match self.text("queue") {
                    Some(_) => return self.enter_decode(sender, room, rid),
                    None => Body::Enter { room, sender, rid, queue_length: 0 },
                }
            }
            "leave" => {
                let reasons = [
                    ("success", LeaveReason::Success),
                    ("failed", LeaveReason::Failed),
                    ("removed", LeaveReason::Removed),
                ];
                let ((sender, room), reason) = (self.sender()?, self.word("reason", &reasons)?);
                match self.known.receivers.insert((self.rank, sender), None).flatten() {
                    Some(queue) => left(sender, room, queue, reason.into()),
                    None => Body::Leave { room, sender, reason },
                }
            }
            "peer_abort" => Body::PeerAbort { room: self.room()?, room_present: true },
            "chunk" => self.chunk()?,
            "post" => {
                let handle = self.handle()?;
                let notification = if self.text("room").is_some() { Some(notification(self.room()?)) } else { None };
                let made = NativeEvent::Made { handle, operation: None, parts: 1, size: None, notification };
                let posting = NativeEvent::Posting { handle, operation: None, first_length: None, lists: [0; 2] };
                return Some(What::Seen(thread, vec![native(made), native(posting)]));
            }
            "transfer" => native(self.transfer()?),
            "endpoint_error" => {
                let status = self.number("code", 0)?;
                native(NativeEvent::EndpointError { point: ErrorPoint::Ucp, status, endpoint: 0 })
            }
            "completion_error" => {
                native(NativeEvent::CompletionError { status: self.number("code", 0)?, vendor_error: 0, qp: 0 })
            }
            "paused" => Body::Paused,
            "resumed" => Body::Resumed,
            "loop_stops" | "loop_turns" => return Some(What::Loop(name == "loop_turns")),
            "marks_lost" => return Some(What::MarksLost),
            "other_end" => {
                let states: [(&str, EndAt); 5] = [
                    ("lives", |since| EndState::Lives { phase: Some(Phase::Transferring), since }),
                    ("success", |at| EndState::Left { how: Conclusion::Success, at }),
                    ("failed", |at| EndState::Left { how: Conclusion::Failed, at }),
                    ("dropped", |at| EndState::Left { how: Conclusion::Dropped, at }),
                    ("process_ended", |at| EndState::ProcessEnded { at }),
                ];
                let (room, state) = (self.room()?, self.word("state", &states)?);
                return Some(What::OtherEnd(room, state));
            }
            "transfers_lost" => return Some(What::TransfersLost),
            "exit" => return Some(What::Exit),
            _ => return None,
        };
        Some(What::Seen(thread, vec![body]))
    }

    fn open(&mut self) -> Option<Body> {
        let backends = Backend::ALL.map(|backend| (backend.name(), backend));
        let backend = if self.text("backend").is_some() { self.word("backend", &backends)? } else { Backend::Nixl };
        let (room, sender) = (self.room()?, self.number("sender", 0)?);
        self.known.senders.insert((self.rank, sender), (room, None));
        let roles = Side::ALL.map(|role| (role.name(), role));
        let role = if self.text("role").is_some() { self.word("role", &roles)? } else { Side::Prefill };
        Some(match role {
            Side::Prefill => Body::Open { room, sender, backend },
            Side::Decode => Body::Receiver(ReceiverEvent::Open { room, sender, backend }),
        })
    }

    /// Of a decode: what leaves one queue for the other leaves it first.
    fn enter_decode(&mut self, sender: u64, room: Room, rid: Option<Rid>) -> Option<What> {
        let queues = [("prealloc", DecodeQueue::Prealloc), ("transfer", DecodeQueue::Transfer)];
        let queue = self.word("queue", &queues)?;
        let before = self.known.receivers.insert((self.rank, sender), Some(queue)).flatten();
        let before = before.map(|before| left(sender, room, before, DecodeLeave::Preallocated));
        let entered = Body::Receiver(ReceiverEvent::Enter { room, sender, queue, rid });
        Some(What::Seen(SCHEDULER, before.into_iter().chain([entered]).collect()))
    }

    fn phase(&mut self) -> Option<Body> {
        let ((sender, room), new) = (self.sender()?, self.status("to")?);
        let old = self.known.senders.insert((self.rank, sender), (room, new)).and_then(|(_, phase)| phase);
        Some(Body::Phase { room, sender, old, new })
    }

    fn chunk(&mut self) -> Option<Body> {
        let steps = [("queued", ChunkStep::Queued), ("begun", ChunkStep::Begun), ("ended", ChunkStep::Ended)];
        let (room, step) = (self.room()?, self.word("step", &steps)?);
        let (queued, working, abandoned) =
            (self.number("queued", 0)?, self.number("working", 0)?, self.flag("abandoned")?);
        let queue = if self.text("queue").is_some() { Some(self.number("queue", 0)?) } else { None };
        Some(Body::Chunk {
            room,
            step,
            queue,
            counts: ChunkCounts { queued, working, abandoned, ..ChunkCounts::default() },
        })
    }

    fn handle(&mut self) -> Option<Handle> {
        self.number("handle", 0).map(|number| Handle { engine: Engine::Nixl, number })
    }

    fn transfer(&mut self) -> Option<NativeEvent> {
        let code = self.number("code", -1)?;
        let statuses = [
            ("done", TransferStatus::Done),
            ("in_progress", TransferStatus::InProgress),
            ("failed", TransferStatus::Failed { code }),
        ];
        Some(NativeEvent::Status { handle: self.handle()?, status: self.word("status", &statuses)?, moved: None })
    }
}

fn left(sender: u64, room: Room, queue: DecodeQueue, reason: DecodeLeave) -> Body {
    Body::Receiver(ReceiverEvent::Leave { room, sender, queue, reason })
}

/// What the decode side is told when a transfer is done, as SGLang up to 0.5.22 writes it: whose transfer it is.
fn notification(room: Room) -> Notification {
    Notification { bytes: format!("{room}_kv_0_1_0").into_bytes(), cut: false }
}

/// The time that `text`, a part of `within`, says.
pub(super) fn at<T>(within: &Spanned<T>, text: Option<&Text>, problems: &mut Problems<'_>) -> Option<Duration> {
    let Some(text) = text else {
        problems.at(within, "needs `at`: the time since the beginning, such as `at: 30s`");
        return None;
    };
    duration(&text.value, LONGEST).map_err(|message| problems.at(text, message)).ok()
}
