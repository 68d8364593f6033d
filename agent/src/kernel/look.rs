//! A look: probes on functions that are too busy to be probed always, for a moment, on one process.

use aya::maps::MapError;
use dislodge_ebpf::look::{CompletionKey, Completions, PollKey, Polls};

use super::{
    Kernel,
    attach::Link,
    canary::ReturnProbes,
    plan::{ProbeReport, ProbeState, Surveyed},
    probe::ProbeSet,
};
use crate::event::ProcessKey;

/// Probes that somebody looks through. To be ended with [`Kernel::end_look`], or they stay.
#[derive(Debug)]
pub struct Look {
    key: ProcessKey,
    links: Vec<Link>,
}

impl Kernel {
    /// Attaches the probes of some sets. Fails when none could be, with what the table says.
    pub fn begin_look(
        &mut self,
        key: ProcessKey,
        libraries: &[Surveyed],
        sets: &[ProbeSet],
        returns: &ReturnProbes,
    ) -> Result<Look, Vec<ProbeReport>> {
        if let Some(slot) = self.traced.get(&key).map(|traced| traced.slot) {
            // The last look's probes went on counting until they were off.
            self.forget_polls(slot, &self.polls_of(slot));
        }
        let mut look = Look { key, links: Vec::new() };
        let mut rows = Vec::new();
        for surveyed in libraries {
            rows.extend(self.attach_sets(key, surveyed, sets, returns, &mut look.links));
        }
        rows.retain(|row| sets.contains(&row.set));
        if rows.iter().any(|row| row.state == ProbeState::Attached) {
            return Ok(look);
        }
        self.drop_links(key, look.links);
        Err(rows)
    }

    /// Takes the probes off again and hands out the polls that they counted, by handle or batch.
    pub fn end_look(&mut self, look: Look) -> Vec<(u64, Polls)> {
        self.drop_links(look.key, look.links);
        let Some(slot) = self.traced.get(&look.key).map(|traced| traced.slot) else { return Vec::new() };
        let polls = self.polls_of(slot);
        self.forget_polls(slot, &polls);
        polls
    }

    fn forget_polls(&mut self, slot: u32, polls: &[(u64, Polls)]) {
        for (object, _) in polls {
            let key = PollKey { slot: slot.into(), object: *object };
            // Gone already is as good.
            let _ = self.polls.remove(&zerocopy::transmute!(key));
        }
    }

    /// The completions of a process that were counted so far.
    pub fn completions(&self, key: ProcessKey) -> Vec<(CompletionKey, Completions)> {
        self.traced.get(&key).map(|traced| self.completions_of(traced.slot)).unwrap_or_default()
    }

    /// The slot's next process begins with nothing.
    pub(super) fn forget_looks(&mut self, slot: u32) {
        self.forget_polls(slot, &self.polls_of(slot));
        for (key, _) in self.completions_of(slot) {
            let _ = self.completions.remove(&zerocopy::transmute!(key));
        }
    }

    fn polls_of(&self, slot: u32) -> Vec<(u64, Polls)> {
        entries(self.polls.iter(), |raw| zerocopy::transmute!(raw), |raw| zerocopy::transmute!(raw))
            .filter(|(key, _): &(PollKey, Polls)| key.slot == u64::from(slot))
            .map(|(key, polls)| (key.object, polls))
            .collect()
    }

    fn completions_of(&self, slot: u32) -> Vec<(CompletionKey, Completions)> {
        entries(self.completions.iter(), |raw| zerocopy::transmute!(raw), |raw| zerocopy::transmute!(raw))
            .filter(|(key, _): &(CompletionKey, Completions)| key.slot == slot)
            .collect()
    }
}

/// Entries that vanish while they are read are left out.
fn entries<RawKey, RawValue, Key, Value>(
    entries: impl Iterator<Item = Result<(RawKey, RawValue), MapError>>,
    key: impl Fn(RawKey) -> Key,
    value: impl Fn(RawValue) -> Value,
) -> impl Iterator<Item = (Key, Value)> {
    entries.filter_map(Result::ok).map(move |(raw_key, raw_value)| (key(raw_key), value(raw_value)))
}
