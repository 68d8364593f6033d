//! What a condition can say about a request: the one table of fields, and the only place where a request becomes
//! CEL values.

use std::time::Duration;

use cel::{
    common::{
        types::{CelBool, CelDouble, CelInt, CelString},
        value::CowVal,
    },
    context::VariableResolver,
};
use serde::Serialize;

use crate::{
    diagnose::{Cause, Conclusion, conclude},
    event::{Hello, Phase, clock::Monotonic, hello::ServerTimeout},
    request::{Queue, Side, gauge::GaugeCheck, tracker::Tracked},
};

/// SGLang's own default of both time-outs, in seconds: for servers that have not said theirs.
const DEFAULT_TIMEOUT: f64 = 300.0;

/// A time-out of the server's, in seconds; 0 where it has none. A server that has not said anything has the default.
fn timeout(subject: &Subject<'_>, of: impl Fn(&Hello) -> ServerTimeout) -> f64 {
    match subject.tracked.server.hello.as_deref().map_or(ServerTimeout::NotKnown, of) {
        ServerTimeout::After(seconds) => seconds,
        ServerTimeout::Never => 0.0,
        ServerTimeout::NotKnown => DEFAULT_TIMEOUT,
    }
}

/// A request with everything that conditions may ask about it, at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// The request, its room, its server and its transfers.
    pub tracked: Tracked<'a>,
    /// What its diagnosis says.
    pub conclusion: Conclusion,
    /// When.
    pub now: Monotonic,
}

impl<'a> Subject<'a> {
    /// A request as it is at `now`.
    pub fn of(tracked: Tracked<'a>, now: Monotonic) -> Self {
        Self { tracked, conclusion: conclude(&tracked, now), now }
    }

    /// The age of the oldest thing that is known of the request: no field in seconds exceeds it, other than the
    /// server's time-outs.
    pub fn age(&self) -> Duration {
        self.now.since(self.tracked.request.oldest())
    }

    fn seconds_since(&self, earlier: Monotonic) -> f64 {
        self.now.since(earlier).as_secs_f64()
    }

    fn hello<T>(&self, field: impl Fn(&Hello) -> Option<T>) -> Option<T> {
        self.tracked.server.hello.as_deref().and_then(field)
    }
}

impl VariableResolver for Subject<'_> {
    fn resolve<'b>(&'b self, variable: &str) -> Option<CowVal<'b, 'b>> {
        Some(match (Field::named(variable)?.get)(self) {
            Value::Text(text) => CowVal::owned(CelString::from(text)),
            Value::Flag(flag) => CowVal::owned(CelBool::from(flag)),
            Value::Count(count) => CowVal::owned(CelInt::from(count)),
            Value::Seconds(seconds) => CowVal::owned(CelDouble::from(seconds)),
        })
    }
}

/// CEL type of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `string`
    Text,
    /// `bool`
    Flag,
    /// `int`
    Count,
    /// `double`
    Seconds,
}

impl Kind {
    /// CEL's name of the type.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "string",
            Self::Flag => "bool",
            Self::Count => "int",
            Self::Seconds => "double",
        }
    }
}

/// Value of a field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// Of a [`Kind::Text`].
    Text(&'a str),
    /// Of a [`Kind::Flag`].
    Flag(bool),
    /// Of a [`Kind::Count`].
    Count(i64),
    /// Of a [`Kind::Seconds`].
    Seconds(f64),
}

/// One field.
#[derive(Debug)]
pub struct Field {
    /// Its name in conditions.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// What it counts, or in which unit; nothing for what is no number.
    pub unit: Option<&'static str>,
    /// What it means, with what stands for "not known".
    pub meaning: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    /// Every value that it can have, when these are few: conditions that compare it with another one are refused.
    pub values: fn() -> Vec<&'static str>,
    /// Whether it is a time since something that is known of the request: never more than [`Subject::age`].
    pub is_age: bool,
    get: for<'a> fn(&Subject<'a>) -> Value<'a>,
}

/// A field as `dislodge rules fields -o json` writes it.
#[derive(Clone, Debug, Serialize)]
pub struct Description {
    /// Its name in conditions.
    pub name: &'static str,
    /// CEL's name of its type.
    pub r#type: &'static str,
    /// What it counts, or in which unit.
    pub unit: Option<&'static str>,
    /// Where it comes from.
    pub source: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// Every value that it can have, when these are few.
    pub values: Vec<&'static str>,
}

impl Field {
    /// What a person who writes rules has to know of it.
    pub fn describe(&self) -> Description {
        let Self { name, kind, unit, meaning, source, values, .. } = *self;
        Description { name, r#type: kind.name(), unit, source, meaning, values: values() }
    }

    /// The field of that name.
    pub fn named(name: &str) -> Option<&'static Self> {
        FIELDS.iter().find(|field| field.name == name)
    }

    /// Its value for a request.
    pub fn value<'a>(&self, subject: &Subject<'a>) -> Value<'a> {
        (self.get)(subject)
    }
}

const fn text(
    name: &'static str,
    meaning: &'static str,
    source: &'static str,
    values: fn() -> Vec<&'static str>,
    get: for<'a> fn(&Subject<'a>) -> Value<'a>,
) -> Field {
    Field { name, kind: Kind::Text, unit: None, meaning, source, values, is_age: false, get }
}

const fn flag(
    name: &'static str,
    meaning: &'static str,
    source: &'static str,
    get: for<'a> fn(&Subject<'a>) -> Value<'a>,
) -> Field {
    Field { name, kind: Kind::Flag, unit: None, meaning, source, values: Vec::new, is_age: false, get }
}

const fn count(
    name: &'static str,
    unit: &'static str,
    meaning: &'static str,
    source: &'static str,
    get: for<'a> fn(&Subject<'a>) -> Value<'a>,
) -> Field {
    Field { name, kind: Kind::Count, unit: Some(unit), meaning, source, values: Vec::new, is_age: false, get }
}

const fn seconds(
    name: &'static str,
    meaning: &'static str,
    source: &'static str,
    is_age: bool,
    get: for<'a> fn(&Subject<'a>) -> Value<'a>,
) -> Field {
    Field { name, kind: Kind::Seconds, unit: Some("s"), meaning, source, values: Vec::new, is_age, get }
}

/// What stands for the phase of a request that was never polled.
const NOT_POLLED: &str = "NotPolled";

/// Every field.
pub static FIELDS: [Field; 24] = [
    text(
        "cause",
        "why the request waits",
        "diagnosis",
        || Cause::ALL.map(Cause::name).to_vec(),
        |it| Value::Text(it.conclusion.cause.name()),
    ),
    text(
        "phase",
        "what poll() returned last, NotPolled before the first poll",
        "marks: phase, entry",
        || Phase::ALL.iter().map(|phase| phase.name()).chain([NOT_POLLED]).collect(),
        |it| Value::Text(it.tracked.request.phase.map_or(NOT_POLLED, Phase::name)),
    ),
    text(
        "role",
        "the side that its server is on",
        "marks: open, entry",
        || Side::ALL.map(Side::name).to_vec(),
        |it| Value::Text(it.tracked.request.side().name()),
    ),
    text(
        "queue",
        "the queue that it is in: of a prefill, inflight, or bootstrap until that is done; of a decode, prealloc or transfer",
        "marks: enter, leave, entry",
        || Queue::ALL.map(Queue::name).to_vec(),
        |it| Value::Text(it.tracked.request.queue().name()),
    ),
    text(
        "backend",
        "the transfer backend of the sender or receiver; fake ones are warm-ups and health checks",
        "marks: open, entry",
        || vec!["other", "nixl", "fake", "mooncake", "mori", "ascend"],
        |it| Value::Text(it.tracked.request.backend.name()),
    ),
    text(
        "quiescence",
        "whether a write of the request may still be under way",
        "diagnosis",
        || vec!["NeverPosted", "Queued", "InFlight", "Quiescent", "Unknown"],
        |it| Value::Text(it.conclusion.quiescence.name()),
    ),
    text(
        "confidence",
        "how far the diagnosis can be trusted; low while events of the server are missing",
        "diagnosis",
        || vec!["high", "low"],
        |it| Value::Text(it.conclusion.confidence.name()),
    ),
    flag(
        "inflight",
        "whether it is in the inflight queue now; never true of a decode",
        "marks: enter, leave, entry",
        |it| Value::Flag(it.tracked.request.is_inflight()),
    ),
    seconds("inflight_seconds", "time in the inflight queue; 0 when not there", "marks: enter, entry", true, |it| {
        let entered = it.tracked.request.entered.filter(|_| it.tracked.request.is_inflight());
        Value::Seconds(entered.map_or(0.0, |entered| it.seconds_since(entered)))
    }),
    seconds("phase_seconds", "time since poll() last returned something else", "marks: phase, entry", true, |it| {
        Value::Seconds(it.seconds_since(it.tracked.request.phase_since))
    }),
    seconds(
        "waiting_seconds",
        "time in its queue, or since its sender was created when it is in none; of a decode that waits for memory, since it does",
        "marks: open, enter, phase, entry",
        true,
        |it| Value::Seconds(it.seconds_since(it.tracked.request.waiting_since())),
    ),
    seconds("abort_seconds", "time since abort() was called last; -1 when never", "marks: abort, entry", true, |it| {
        Value::Seconds(it.tracked.request.aborted.as_ref().map_or(-1.0, |aborted| it.seconds_since(aborted.at)))
    }),
    count(
        "sent_chunks",
        "chunks",
        "chunks given to send(); of a decode, 1 once send_metadata() has told the prefill where to write",
        "marks: send, entry",
        |it| Value::Count(it.tracked.request.sent_chunks.into()),
    ),
    count("sent_pages", "pages", "KV pages given to send() or send_metadata()", "marks: send, entry", |it| {
        Value::Count(i64::try_from(it.tracked.request.sent_pages).unwrap_or(i64::MAX))
    }),
    flag("room_shared", "whether another live sender has the room now", "marks: open, entry", |it| {
        Value::Flag(it.tracked.room.senders.iter().any(|serial| *serial != it.tracked.request.serial))
    }),
    count(
        "queue_length",
        "requests",
        "requests in the server's inflight queue, or in both of a decode's; -1 when not reported yet",
        "marks: pass",
        |it| Value::Count(it.tracked.server.queue_length.map_or(-1, |(length, _)| length.into())),
    ),
    text("sglang", "the server's version; empty when not known", "marks: hello", Vec::new, |it| {
        Value::Text(it.tracked.server.hello.as_deref().and_then(|hello| hello.sglang.as_deref()).unwrap_or_default())
    }),
    count("tp", "ranks", "size of the attention TP group; 0 when not known", "marks: hello", |it| {
        Value::Count(it.hello(|hello| hello.tp).map_or(0, i64::from))
    }),
    count("pp", "stages", "pipeline stages; 0 when not known", "marks: hello", |it| {
        Value::Count(it.hello(|hello| hello.pp).map_or(0, i64::from))
    }),
    count("cp", "ranks", "size of the attention CP group; 0 when not known", "marks: hello", |it| {
        Value::Count(it.hello(|hello| hello.cp).map_or(0, i64::from))
    }),
    seconds(
        "server_bootstrap_timeout_seconds",
        "the server's own time-out of a bootstrap; 0 where its release has none, 300, SGLang's default, when not known",
        "marks: hello",
        false,
        |it| Value::Seconds(timeout(it, Hello::ends_bootstraps)),
    ),
    seconds(
        "server_waiting_timeout_seconds",
        "the server's own time-out of a decode that waits; 0 where its release has none, 300, SGLang's default, when not known",
        "marks: hello",
        false,
        |it| Value::Seconds(timeout(it, Hello::ends_waiting)),
    ),
    flag("paused", "whether generation is paused: a paused scheduler polls nobody", "marks: paused, resumed", |it| {
        Value::Flag(it.tracked.server.paused)
    }),
    text(
        "server_gauge",
        "whether the server's own gauge num_prefill_inflight_queue_reqs says what was seen; frozen gauges keep another number",
        "the server's /metrics",
        || GaugeCheck::NAMES.to_vec(),
        |it| Value::Text(GaugeCheck::of(it.tracked.server, it.now).name()),
    ),
];
