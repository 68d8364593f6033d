//! What happens to whole processes: the agent finds them, looks at them, they are replaced; and what is true in the end.

use std::time::Duration;

use super::{
    agent::TICK,
    server::Rank,
    truth::{Fate, Shown, Stuck, standing},
    world::{Act, BEGINS, World},
};
use crate::{
    core::Input,
    event::{
        ProcessKey,
        clock::Monotonic,
        native::{Engine, TransferStatus},
    },
    request::tracker::Parting,
    request::transfer::Observation,
    verdict::ServerIdentity,
};

/// A transfer's memory is read when it is older (`pipeline::engines`).
const OBSERVED_AFTER: Duration = Duration::from_millis(500);

impl World {
    /// The agent finds a rank.
    pub(super) fn attach(&mut self, rank: usize) {
        let (at, engine) = (self.now, self.schedule.engine);
        let Some(process) = self.ranks.get(rank).map(|rank| rank.process) else { return };
        let identity = Box::new(ServerIdentity {
            pid: process.pid,
            start: process.start,
            title: format!("sglang::scheduler_TP{rank}"),
            node: "simulated".to_owned(),
            container: None,
            parent: None,
        });
        let agent = &mut self.agent;
        agent.tracker.attach(process, 0);
        agent.tracker.watch(process, Some(engine), at);
        agent.inputs.push(Input::Attach { process, identity, clock_offset: 0 });
        agent.inputs.push(Input::Watch { process, engine: Some(engine), at });
        if at > BEGINS {
            agent.gaps.push((process, Monotonic(0), at));
        }
    }

    pub(super) fn tick(&mut self) {
        let now = self.now;
        for rank in 0..self.ranks.len() {
            let Some(process) = self.ranks.get(rank).map(|rank| rank.process) else { continue };
            self.agent.account(process, now);
            self.observe(rank, process);
        }
        for (process, epoch) in self.agent.ask(now) {
            if let Some(rank) = self.ranks.iter_mut().find(|rank| rank.process == process) {
                rank.asked = Some(epoch);
            }
        }
        self.agent.tick(now);
        self.later(TICK, Act::Tick);
    }

    /// Reads where old transfers stand.
    fn observe(&mut self, rank: usize, process: ProcessKey) {
        let at = self.now;
        let before = Monotonic(at.0.saturating_sub(OBSERVED_AFTER.as_nanos() as u64));
        let due = self.agent.tracker.transfers(process).map(|it| it.to_observe(before, 16)).unwrap_or_default();
        let Some(it) = self.ranks.get(rank) else { return };
        let jobs = it.workers.iter().filter_map(|worker| worker.job.as_ref());
        let parts: Vec<_> = jobs.flat_map(|job| job.parts.iter().copied()).collect();
        for (handle, generation) in due {
            let Some(part) = parts.iter().find(|part| part.handle == handle) else { continue };
            // A NIXL handle's status is what a poll left there; a batch counts by itself.
            let is_done = part.is_over && handle.engine == Engine::Mooncake;
            let status = if is_done { TransferStatus::Done } else { TransferStatus::InProgress };
            let seen = Observation { handle, generation, status, moved: None };
            self.agent.tracker.observed(process, seen, at);
            self.agent.inputs.push(Input::Observed { process, seen, at });
        }
    }

    /// The server is gone; one of the same pids comes.
    pub(super) fn restart(&mut self) {
        let at = self.now;
        self.generation += 1;
        self.conclude_truth();
        let is_watched = at >= BEGINS.plus(self.schedule.attaches);
        for rank in 0..self.ranks.len() {
            let Some(it) = self.ranks.get_mut(rank) else { continue };
            let former = it.process;
            *it = Rank::new(rank, former.start + 1, self.schedule.workers);
            if is_watched {
                self.agent.tracker.detach(former, Parting::Ended, at, &mut Vec::new());
                self.agent.inputs.push(Input::Detach { process: former, why: Parting::Ended, at });
                self.attach(rank);
            }
        }
    }

    /// Says what became of everything that is not over.
    pub(super) fn conclude_truth(&mut self) {
        let now = self.now;
        let is_end = now >= self.ends;
        for rank in &mut self.ranks {
            for mut sender in std::mem::take(&mut rank.senders) {
                sender.truth.is_shared = sender.shared_with.is_some();
                if sender.truth.ended.is_none() && !is_end {
                    sender.truth.ended = Some(now);
                }
                self.over.push(sender.truth);
            }
        }
        let stuck: Vec<String> =
            self.over.iter().filter(|truth| truth.why_stuck().is_some()).map(|truth| truth.rid.clone()).collect();
        let (gaps, blind) = (&self.agent.gaps, &self.agent.blind_until);
        for truth in &mut self.over {
            let process = truth.request.process;
            let until = truth.ended.unwrap_or(now);
            // What shows it may be older than the request: the chunk of another one that a worker holds.
            let since = truth.why_stuck().map_or(truth.created, |stuck| stuck.since.min(truth.created));
            let is_gap = |from: Monotonic, to: Monotonic| from <= until && to >= since;
            // Whose the transfers of a shared room are is not seen.
            let missed = truth.is_shared || gaps.iter().any(|(gap, from, to)| *gap == process && is_gap(*from, *to));
            match &mut truth.fate {
                Fate::Stuck(Stuck { cause, shows, seen, .. }) => {
                    *seen = standing(cause).1 == Shown::Calls || !missed;
                    if let Some(blind) = blind.get(&process) {
                        *shows = (*shows).max(blind.plus(TICK));
                    }
                }
                fate if truth.ended.is_none() && stuck.contains(&truth.rid) => *fate = Fate::HeldByOtherRank,
                _ => {}
            }
        }
    }
}
