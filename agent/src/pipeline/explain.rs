//! Answering `dislodge explain`: what is known of a request now, and what the guards would say.

use super::Pipeline;
use crate::{
    event::clock::{Monotonic, WallClock},
    explain::{
        answer::{Answer, Instance, Live, Origin, SCHEMA, Searched},
        recording::{MAX_EXPLAINED, MAX_NAMED},
        remediation::Surroundings,
        state::{explain, find, name, without_request},
        wanted::Wanted,
    },
    rule::Mode,
};

impl Pipeline {
    /// Says what is known of the requests that are meant. Nothing is done about them.
    pub(super) fn explain(&mut self, wanted: &Wanted, now: Monotonic) -> Live {
        let wall = WallClock::now();
        let found = find(&self.core, wanted, now);
        let (explained, others) = found.split_at(found.len().min(MAX_EXPLAINED));
        let (mode, kill_switch) = (self.config.mode, self.kill_switch());
        let mut requests = Vec::new();
        for key in explained {
            // The mode is the lower one of the agent's and that of the rule that fires, which `explain` finds.
            let context = self.guarded_by(*key, Mode::Observe, kill_switch, now);
            requests.extend(explain(&self.core, *key, now, &wall, &Surroundings::Live { mode, context }));
        }
        let others: Vec<Instance> =
            others.iter().take(MAX_NAMED).filter_map(|key| name(&self.core, *key, now, &wall)).collect();
        let notes = if found.is_empty() { without_request(&self.core, wanted) } else { None };
        let notes = notes.into_iter().collect();
        Live {
            answer: Answer {
                schema: SCHEMA,
                asked: wanted.name.clone(),
                origin: Origin::Agent {
                    node: self.config.node.clone(),
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    recorded_since: None,
                },
                as_of: wall.timestamp(now),
                searched: self.searched(now),
                notes,
                requests,
                others,
            },
            rules: self.core.evaluator().rules().digest().to_owned(),
            rules_folder: self.config.rules.clone(),
            recordings: self.config.record.folder.clone(),
        }
    }

    fn searched(&self, now: Monotonic) -> Searched {
        let mut searched = Searched { servers: self.core.tracker().servers().count() as u64, ..Searched::default() };
        for tracked in self.core.tracker().judged(now) {
            searched.requests += 1;
            searched.ids_cut += u64::from(tracked.request.rid.as_ref().is_some_and(|rid| rid.truncated));
        }
        searched
    }
}
