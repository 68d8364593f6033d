//! What is answered, as tools read it. Every time is said twice: on the wall clock, and in seconds since the request was
//! made (negative: before it).

use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::event::Rid;

/// Version of the structure.
pub const SCHEMA: u32 = 1;

/// The whole answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What was asked for: a room or a request id.
    pub asked: String,
    /// Where it was looked for.
    pub origin: Origin,
    /// The moment that it is about.
    pub as_of: Timestamp,
    /// How many requests were looked through, in how many servers.
    pub searched: Searched,
    /// What must be known to read it rightly: what is missing, what could not be asked.
    pub notes: Vec<String>,
    /// Every request that it fits, the newest first.
    pub requests: Vec<Explanation>,
    /// Those that it fits beyond those.
    pub others: Vec<Instance>,
}

/// Where a request was looked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Origin {
    /// In a recording.
    Recording {
        /// The file.
        file: String,
        /// The node.
        node: String,
        /// When it begins.
        first: Option<Timestamp>,
        /// When it ends, or was to end.
        last: Option<Timestamp>,
        /// Whether names are hashed in it.
        anonymized: bool,
    },
    /// In a running agent.
    Agent {
        /// The node.
        node: String,
        /// Its version.
        version: String,
        /// How far back its flight recorder went for the time lines; nothing where there are none.
        recorded_since: Option<Timestamp>,
    },
}

/// What was looked through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Searched {
    /// Servers.
    pub servers: u64,
    /// Requests.
    pub requests: u64,
    /// Requests whose id was cut: they are found by their room alone.
    pub ids_cut: u64,
}

/// A moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// On the wall clock.
    pub time: Timestamp,
    /// In seconds since the request was made.
    pub seconds: f64,
}

/// Which request: enough to ask for this one alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instance {
    /// Process id of its server.
    pub pid: u32,
    /// When that process started, in clock ticks since boot.
    pub start: u64,
    /// Serial of its sender.
    pub serial: u64,
    /// SGLang's room.
    pub room: String,
    /// SGLang's id of the request, once known.
    pub rid: Option<Rid>,
    /// When its sender was made.
    pub created: Timestamp,
}

/// One request, explained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Which.
    #[serde(flatten)]
    pub instance: Instance,
    /// Its server.
    pub server: Server,
    /// Where it stands.
    pub standing: Standing,
    /// What happened to it; nothing where nothing was recorded.
    pub timeline: Option<Timeline>,
    /// Why it waits.
    pub diagnosis: Diagnosis,
    /// What each rule says.
    pub rules: Vec<RuleOutlook>,
    /// What would be done about it.
    pub remediation: Remediation,
}

/// Its server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Server {
    /// Title of the process.
    pub title: String,
    /// The node.
    pub node: String,
    /// The container, where there is one.
    pub container: Option<String>,
    /// `prefill` or `decode`.
    pub role: Option<String>,
    /// SGLang's release.
    pub sglang: Option<String>,
    /// The transfer engine and its version.
    pub engine: Option<String>,
    /// The ranks of the scheduler, in words.
    pub ranks: Option<String>,
    /// Length of the inflight queue as reported last.
    pub queue_length: Option<u32>,
    /// Whether generation is paused.
    pub paused: bool,
    /// Whether everything that lives in it is known.
    pub synchronised: bool,
    /// Whether each of its transfers is seen, in words.
    pub transfers: String,
}

/// Where a request stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Standing {
    /// The sender's backend.
    pub backend: String,
    /// What `poll()` returned last; `NotPolled` before the first poll.
    pub phase: String,
    /// Since when.
    pub phase_since: Moment,
    /// The queue of its scheduler that it is in: `inflight`, `bootstrap`; on a decode `prealloc`, `transfer`; `none`.
    pub queue: String,
    /// When it entered the inflight queue, if it is there.
    pub entered: Option<Moment>,
    /// How old it is, in seconds.
    pub age_seconds: f64,
    /// Chunks given to `send()`.
    pub sent_chunks: u32,
    /// Pages given to `send()`.
    pub sent_pages: u64,
    /// Other live senders on its room, by serial.
    pub room_shared_with: Vec<u64>,
    /// Its end, when it has ended.
    pub ended: Option<Ended>,
}

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ended {
    /// When.
    #[serde(flatten)]
    pub at: Moment,
    /// How, in words.
    pub how: String,
}

/// What happened, in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// What.
    pub lines: Vec<Line>,
    /// Things that happened between the first lines and the last ones, and are not listed.
    pub left_out: u64,
    /// The scheduler's passes meanwhile.
    pub passes: Passes,
}

/// The passes of a scheduler while the request lived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Passes {
    /// How many were told.
    pub count: u64,
    /// The longest time between two tellings, in seconds.
    pub longest_gap_seconds: f64,
    /// The shortest inflight queue.
    pub queue_least: Option<u32>,
    /// The longest.
    pub queue_most: Option<u32>,
    /// When the last one was told.
    pub last: Option<Moment>,
}

/// One thing that happened, once or again and again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// When (first).
    #[serde(flatten)]
    pub at: Moment,
    /// When last, where it happened more than once.
    pub until: Option<Moment>,
    /// How often.
    pub count: u64,
    /// Where it was seen: `calls`, `transfers`, `completions`, `devices`, `ranks`; `agent` for what the agent did or missed,
    /// `diagnosis` and `rules` for what it concluded.
    pub source: String,
    /// What.
    pub text: String,
}

/// Why it waits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// The cause.
    pub cause: String,
    /// What that means.
    pub meaning: String,
    /// What to do.
    pub advice: String,
    /// Whether a write may be under way.
    pub quiescence: String,
    /// `high` or `low`.
    pub confidence: String,
    /// Why it is not high.
    pub doubts: Vec<String>,
    /// What speaks for it.
    pub evidence: Vec<Evidence>,
    /// It is what was said of a request last that has ended since.
    pub is_past: bool,
}

/// One piece of evidence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evidence {
    /// When.
    #[serde(flatten)]
    pub at: Moment,
    /// Where it was seen.
    pub source: String,
    /// What.
    pub text: String,
}

/// What one rule says of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RuleOutlook {
    /// The rule.
    pub rule: String,
    /// How urgent.
    pub severity: String,
    /// The most that it allows to be done.
    pub action: String,
    /// How long it has to match before it fires.
    pub for_seconds: f64,
    /// Whether it matches.
    #[serde(flatten)]
    pub state: RuleState,
}

/// Whether a rule matches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum RuleState {
    /// It has matched for long enough.
    Firing {
        /// Since when it matches.
        since: Moment,
        /// When it fired.
        fired: Moment,
    },
    /// It matches, not for long enough yet.
    Pending {
        /// Since when.
        since: Moment,
        /// When it fires, if nothing changes.
        fires: Moment,
    },
    /// It would match later, if nothing changes.
    Later {
        /// From when on.
        matches: Moment,
        /// When it would fire; nothing where it stops matching before.
        fires: Option<Moment>,
    },
    /// It does not match.
    No {
        /// Which comparisons are false, as far as that can be told.
        because: Vec<String>,
    },
}

/// What would be done about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Remediation {
    /// The agent's own mode; nothing where it is not known.
    pub mode: Option<String>,
    /// The most that the rules allow which fire, or would next.
    pub action: String,
    /// How the failure would be told to the sender.
    pub flag: Option<String>,
    /// What comes of it.
    pub decision: Decision,
    /// Every guard that refuses, in the order in which they are asked: the first one is the reason that would be told.
    pub refusals: Vec<Refused>,
    /// What is not known here, and was taken to allow it.
    pub assumed: Vec<String>,
}

/// What comes of the guards' answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// A guard refuses.
    Refused,
    /// No guard refuses, no alert fires yet.
    Waits,
    /// It would be recorded as what would be done, and nothing is sent.
    WouldAct,
    /// The request is failed.
    Acts,
}

/// A guard that refuses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refused {
    /// Its name in the audit log and in metrics.
    pub guard: String,
    /// Why.
    pub why: String,
}

/// What a running agent answers: what it knows now, and how to get at what it has recorded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Live {
    /// What it knows now, without time lines.
    pub answer: Answer,
    /// SHA-256 of its rules' files.
    pub rules: String,
    /// Their folder; nothing where the rules apply that come with it.
    pub rules_folder: Option<PathBuf>,
    /// Where its flight recorder writes; nothing where nothing is recorded.
    pub recordings: Option<PathBuf>,
}
