//! Everything that the core knows at one moment, so that a recording can begin there.
//!
//! It is a copy, not a summary: what a diagnosis reads is all in it, doubts included. An answer of the hook to "tell me
//! everything" would be less (it does not know transfers, passes, or what the agent doubts) and would end doubts that the
//! running agent still had.

use std::{collections::HashMap, sync::Arc};

use minicbor::{
    Decode, Decoder, Encode, Encoder, decode,
    encode::{self, Write},
};

use super::Core;
use crate::{
    event::{Backend, ProcessKey, Room, clock::Monotonic},
    record::codec::{Fields, Names, recorded},
    request::{
        RequestKey,
        tracker::{Tracked, Tracker},
    },
    rule::{
        alert::{AlertState, Transition},
        field::Subject,
    },
    verdict::{ServerIdentity, Verdict},
};

/// What was known at one moment.
#[derive(Debug)]
pub struct Snapshot {
    at: Monotonic,
    tracker: Tracker,
    identities: HashMap<ProcessKey, Arc<ServerIdentity>>,
    alerts: Vec<ActiveAlert>,
    reached: Option<RequestKey>,
}

/// An alert that is pending or fires. Rules are known by their names: another set may have other numbers.
#[derive(Debug)]
struct ActiveAlert {
    key: RequestKey,
    rule: String,
    /// As it was told: a hook that gives a serial twice may have made it another one's.
    room: Room,
    backend: Backend,
    since: Monotonic,
    at: Monotonic,
    firing: bool,
}

recorded!(struct ActiveAlert { key, rule, room, backend, since, at, firing });

/// Writes what `core` knows at `at`, as an [`Input::Snapshot`](super::Input::Snapshot).
///
/// # Errors
///
/// Those of the writer.
pub(crate) fn write<W: Write, C: Names>(
    core: &Core,
    at: Monotonic,
    encoder: &mut Encoder<W>,
    names: &mut C,
) -> Result<(), encode::Error<W::Error>> {
    encoder.array(2)?.u16(0)?;
    let alerts: Vec<ActiveAlert> = core
        .active
        .iter()
        .map(|((key, _), verdict)| ActiveAlert {
            key: *key,
            rule: verdict.rule.to_string(),
            room: verdict.room,
            backend: verdict.backend,
            since: verdict.since,
            at: verdict.at,
            firing: verdict.state == AlertState::Firing,
        })
        .collect();
    write_parts(encoder, names, at, &core.tracker, &core.identities, &alerts, core.evaluator.reached())
}

fn write_parts<W: Write, C: Names>(
    encoder: &mut Encoder<W>,
    names: &mut C,
    at: Monotonic,
    tracker: &Tracker,
    identities: &HashMap<ProcessKey, Arc<ServerIdentity>>,
    alerts: &[ActiveAlert],
    reached: Option<RequestKey>,
) -> Result<(), encode::Error<W::Error>> {
    encoder.array(5)?;
    at.encode(encoder, names)?;
    tracker.encode(encoder, names)?;
    encoder.map(identities.len() as u64)?;
    for (process, identity) in identities {
        process.encode(encoder, names)?;
        identity.as_ref().encode(encoder, names)?;
    }
    alerts.encode(encoder, names)?;
    reached.encode(encoder, names)
}

impl<C: Names> Encode<C> for Snapshot {
    fn encode<W: Write>(&self, encoder: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        let Self { at, tracker, identities, alerts, reached } = self;
        write_parts(encoder, names, *at, tracker, identities, alerts, *reached)
    }
}

impl<'b, C> Decode<'b, C> for Snapshot {
    fn decode(decoder: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        let mut fields = Fields::of(decoder)?;
        let (at, tracker) = (fields.next(decoder, context)?, fields.next(decoder, context)?);
        let identities: HashMap<ProcessKey, ServerIdentity> = fields.next(decoder, context)?;
        let (alerts, reached) = (fields.next(decoder, context)?, fields.next(decoder, context)?);
        fields.end(decoder)?;
        let identities = identities.into_iter().map(|(process, identity)| (process, Arc::new(identity))).collect();
        Ok(Self { at, tracker, identities, alerts, reached })
    }
}

impl Core {
    /// Knows from now on what a snapshot knows. Alerts of rules that do not exist any more are left out.
    pub(super) fn restore(&mut self, snapshot: Snapshot) {
        let Snapshot { at, tracker, identities, alerts, reached } = snapshot;
        self.tracker = tracker;
        self.identities = identities;
        self.active.clear();
        self.evaluator.reset(reached);
        // Not only those that live: an alert may be about one that has given its pages away.
        let judged: HashMap<RequestKey, Tracked<'_>> = self.tracker.judged(at).map(|it| (it.key, it)).collect();
        for ActiveAlert { key, rule: name, room, backend, since, at: changed, firing } in alerts {
            let found = self.evaluator.rules().iter().find(|(_, rule)| *rule.name == *name);
            let (Some((index, rule)), Some(&tracked)) = (found, judged.get(&key)) else { continue };
            let state = if firing { AlertState::Firing } else { AlertState::Pending };
            let transition = Transition { key, rule: index, state, since, at: changed };
            let subject = Subject::of(tracked, at);
            let identity = self.identities.get(&key.process).cloned().unwrap_or_default();
            let verdict = Verdict { room, backend, ..Verdict::new(&transition, rule, &subject, identity) };
            self.active.insert((key, index), Arc::new(verdict));
            self.evaluator.restore(key, index, since, firing);
        }
    }
}
