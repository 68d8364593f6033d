//! Explaining from a recording: it is gone through twice with the core beside it, since a request's id is known only when
//! it enters the queue, and what happened before that is to be told as well.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read,
};

use jiff::Timestamp;

use super::{
    answer::{Answer, Instance, Origin, SCHEMA, Searched},
    follow::Follower,
    remediation::Surroundings,
    state::{self, Times},
    wanted::Wanted,
};
use crate::{
    core::{Core, Effects, Input},
    event::{
        Body, ProcessKey,
        clock::{Monotonic, WallClock},
    },
    record::{
        format::Header,
        reader::End,
        replay::{Observer, Replay, ReplayError, Summary},
    },
    request::{Request, RequestKey},
};

/// Requests that are explained at once; others that were meant are named.
pub const MAX_EXPLAINED: usize = 4;
/// Others that are named.
pub const MAX_NAMED: usize = 50;
/// Requests that are remembered as meant; the oldest go first.
const MAX_FOUND: usize = 4_096;

/// Explains what is meant by `wanted` in a recording, of which `first` and `second` are two replays, as it was at `until`
/// (at its end where there is nothing).
///
/// # Errors
///
/// It cannot be read, or says more than an agent can have known.
pub fn explain<R: Read>(
    (first, second): (Replay<R>, Replay<R>),
    file: &str,
    wanted: &Wanted,
    until: Option<Timestamp>,
) -> Result<Answer, ReplayError> {
    let header = first.header().clone();
    let rules_differ = first.rules() != header.rules;
    let wall = header.clock();
    let mut finder = Finder::of(wanted, wall, until);
    let (summary, core) = first.observed_by(&mut finder)?;
    finder.look_everywhere(&core);
    let found = finder.newest_first();
    let (explained, others) = found.split_at(found.len().min(MAX_EXPLAINED));
    let followers = explained.iter().map(|(key, _)| Follower::of(*key)).collect();
    let mut following = Following { followers, clock: Clock { wall, until, now: Monotonic(0) } };
    let (_, core) = second.observed_by(&mut following)?;
    let now = following.clock.now;
    let surroundings = Surroundings::NotRecorded;
    let requests =
        following.followers.into_iter().filter_map(|it| it.explain(&core, now, &wall, &surroundings)).collect();
    let others: Vec<Instance> = others
        .iter()
        .take(MAX_NAMED)
        .map(|(key, request)| state::instance(*key, request, &Times::new(&wall, request.created)))
        .collect();
    let mut notes = notes(&header, &summary, rules_differ);
    if found.is_empty() {
        notes.extend(state::without_request(&core, wanted));
    }
    Ok(Answer {
        schema: SCHEMA,
        asked: wanted.name.clone(),
        as_of: wall.timestamp(now),
        searched: finder.searched(),
        notes,
        origin: Origin::Recording {
            file: file.to_owned(),
            node: header.node,
            first: summary.span.map(|(first, _)| wall.timestamp(first)),
            last: summary.span.map(|(_, last)| wall.timestamp(last)),
            anonymized: header.anonymized,
        },
        requests,
        others,
    })
}

fn notes(header: &Header, summary: &Summary, rules_differ: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let mut note = |holds: bool, text: String| notes.extend(holds.then_some(text));
    let dropped = summary.dropped.inputs + summary.dropped.not_recorded;
    note(header.anonymized, "names are hashed in this recording: ask by the room or id that it has".to_owned());
    note(rules_differ, "other rules applied when it was recorded: --rules names a folder of rules".to_owned());
    note(dropped > 0, format!("{dropped} things that happened before it begins were not kept"));
    note(summary.losses > 0, format!("events were lost {} times while it was recorded", summary.losses));
    note(summary.other_rules > 0, "other rules came to apply in the middle of it".to_owned());
    note(summary.damaged > 0, format!("{} parts of it are damaged and were passed over", summary.damaged));
    note(summary.unknown > 0, format!("{} things in it are of a newer agent and were passed over", summary.unknown));
    note(matches!(summary.end, Some(End::Cut { .. } | End::Damaged { .. })), "its end is missing".to_owned());
    notes
}

/// How far a replay has got, and how far it is to get.
struct Clock {
    wall: WallClock,
    until: Option<Timestamp>,
    now: Monotonic,
}

impl Clock {
    fn goes_on(&self, now: Monotonic) -> bool {
        self.until.is_none_or(|until| self.wall.timestamp(now) < until)
    }

    fn hear(&mut self, input: &Input) {
        let at = match input {
            Input::Event(event) => event.at,
            Input::Tick { now, .. } => *now,
            _ => return,
        };
        self.now = self.now.max(at);
    }
}

/// Finds the requests that are meant.
struct Finder<'a> {
    wanted: &'a Wanted,
    clock: Clock,
    found: BTreeMap<RequestKey, Box<Request>>,
    requests: BTreeSet<RequestKey>,
    servers: BTreeSet<ProcessKey>,
    cut: BTreeSet<RequestKey>,
    look_everywhere: bool,
}

impl<'a> Finder<'a> {
    fn of(wanted: &'a Wanted, wall: WallClock, until: Option<Timestamp>) -> Self {
        Self {
            wanted,
            clock: Clock { wall, until, now: Monotonic(0) },
            found: BTreeMap::new(),
            requests: BTreeSet::new(),
            servers: BTreeSet::new(),
            cut: BTreeSet::new(),
            look_everywhere: false,
        }
    }

    fn see(&mut self, key: RequestKey, request: &Request) {
        self.requests.insert(key);
        self.servers.insert(key.process);
        if request.rid.as_ref().is_some_and(|rid| rid.truncated) {
            self.cut.insert(key);
        }
        if self.wanted.is(key, request) {
            self.found.insert(key, Box::new(request.clone()));
            if self.found.len() > MAX_FOUND
                && let Some(oldest) = self.found.iter().min_by_key(|(_, request)| request.created).map(|(key, _)| *key)
            {
                self.found.remove(&oldest);
            }
        }
    }

    fn look_everywhere(&mut self, core: &Core) {
        self.servers.extend(core.tracker().servers().map(|(key, _)| key));
        for tracked in core.tracker().judged(self.clock.now) {
            self.see(tracked.key, tracked.request);
        }
    }

    fn newest_first(&self) -> Vec<(RequestKey, Box<Request>)> {
        let mut found: Vec<_> = self.found.iter().map(|(key, request)| (*key, request.clone())).collect();
        found.sort_by_key(|(key, request)| std::cmp::Reverse((request.created, *key)));
        found
    }

    fn searched(&self) -> Searched {
        let [servers, requests, ids_cut] =
            [self.servers.len(), self.requests.len(), self.cut.len()].map(|it| it as u64);
        Searched { servers, requests, ids_cut }
    }
}

impl Observer for Finder<'_> {
    fn tick(&mut self, now: Monotonic) -> bool {
        self.clock.goes_on(now)
    }

    fn before(&mut self, input: &Input, _: &Core) {
        self.clock.hear(input);
        // An answer of the hook may tell the id of a request that is known.
        self.look_everywhere = match input {
            Input::Snapshot(_) => true,
            Input::Event(event) => matches!(event.body, Body::StateEnd { .. }),
            _ => false,
        };
    }

    fn after(&mut self, core: &Core, effects: &Effects) {
        for change in &effects.changes {
            match (&change.ended, core.tracker().get(change.key)) {
                (Some(request), _) => self.see(change.key, request),
                (None, Some(tracked)) => self.see(change.key, tracked.request),
                (None, None) => {}
            }
        }
        if self.look_everywhere {
            self.look_everywhere(core);
        }
    }
}

/// Follows them.
struct Following {
    followers: Vec<Follower>,
    clock: Clock,
}

impl Observer for Following {
    fn tick(&mut self, now: Monotonic) -> bool {
        self.clock.goes_on(now)
    }

    fn before(&mut self, input: &Input, core: &Core) {
        self.clock.hear(input);
        self.followers.iter_mut().for_each(|follower| follower.before(input, core));
    }

    fn after(&mut self, core: &Core, effects: &Effects) {
        self.followers.iter_mut().for_each(|follower| follower.after(core, effects));
    }
}
