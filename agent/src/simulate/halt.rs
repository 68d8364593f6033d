//! Schedulers that make no pass: for good, with their ranks apart or not; or for some time.

use std::time::Duration;

use super::{
    pass::MARKED_AFTER,
    server::Rank,
    world::{Act, World},
};
use crate::event::{Body, LeaveReason, Phase};

/// Without a pass for so long a scheduler counts as stuck.
const PASSES_WITHIN: Duration = Duration::from_secs(60);
/// So long a rank polls what another one has dropped before that shows.
const SETTLES_WITHIN: Duration = Duration::from_secs(5);
/// A stage that has made no pass since another one dropped something may be in a long pass, which takes so long at most.
const LONGEST_PASS: Duration = Duration::from_secs(300);
/// A stage that goes on for longer than that has seen what the other one dropped.
const LAGS_WITHIN: Duration = Duration::from_secs(1);

/// Whether somebody waits for a pass: nobody does over an empty queue, and who came to it after the last pass is not known to be
/// in it.
fn has_entered(rank: &Rank) -> bool {
    rank.queue.iter().any(|place| rank.senders.get(*place).is_some_and(|it| it.truth.entered.is_some()))
}

impl World {
    /// The scheduler polls nobody any more.
    pub(super) fn stop(&mut self, cause: &'static str) {
        let now = self.now;
        let goes_on_for = self.schedule.diverges.map_or(Duration::ZERO, |divergence| divergence.hangs_after);
        let is_told_apart = cause == "LoopStalled" || !self.schedule.stages || goes_on_for > LAGS_WITHIN;
        let shows = now.plus(if is_told_apart { PASSES_WITHIN } else { LONGEST_PASS });
        self.is_stopped = true;
        let agent = &self.agent;
        for rank in self.ranks.iter_mut().filter(|rank| has_entered(rank)) {
            let is_shown = agent.saw_pass(rank.process);
            for sender in rank.senders.iter_mut().filter(|sender| sender.is_live()) {
                sender.truth.holds("LoopStalled", now);
                if sender.truth.why_stuck().is_some_and(|stuck| stuck.cause == cause) {
                    continue;
                }
                if is_shown {
                    sender.truth.stuck(cause, now, shows);
                } else {
                    sender.truth.holds(cause, now);
                }
            }
        }
    }

    /// One rank drops the first request by itself, which is in the queue of each.
    pub(super) fn diverge(&mut self) {
        let (now, Some(last)) = (self.now, self.ranks.len().checked_sub(1)) else { return };
        let Some(divergence) = self.schedule.diverges else { return };
        let of_plan = |rank: &Rank| {
            rank.queue.iter().copied().find(|place| {
                rank.senders.get(*place).is_some_and(|it| it.plan == 0 && it.is_live() && it.truth.entered.is_some())
            })
        };
        let places: Option<Vec<usize>> = self.ranks.iter().map(of_plan).collect();
        let Some((dropped, kept)) = places.as_deref().and_then(<[usize]>::split_last) else {
            return self.later(Duration::from_millis(100), Act::Diverge);
        };
        self.diverged = Some(0);
        for (rank, place) in kept.iter().enumerate() {
            let Some(sender) = self.ranks.get_mut(rank).and_then(|rank| rank.senders.get_mut(*place)) else { continue };
            if divergence.hangs_after > SETTLES_WITHIN {
                // Not before a pass five seconds later is marked.
                sender.truth.stuck("RankDivergence", now, now.plus(SETTLES_WITHIN + Duration::from_millis(500)));
            } else {
                sender.truth.holds("RankDivergence", now);
            }
        }
        let Some(room) = self.of(last, *dropped).map(|(room, _)| room) else { return };
        self.update(last, self.scheduler(last), room, Phase::Failed);
        self.polled(last, *dropped, Phase::Failed);
        self.fail_sender(last, *dropped);
        self.release(last, *dropped, LeaveReason::Failed);
        self.close(last, *dropped);
        self.later(divergence.hangs_after, Act::Hung);
    }

    /// For some time the scheduler makes no pass.
    pub(super) fn halt(&mut self) {
        let (now, Some(halt)) = (self.now, self.schedule.halt) else { return };
        self.halted_until = Some(now.plus(halt.until.saturating_sub(halt.from)));
        for rank in 0..self.ranks.len() {
            if halt.is_pause {
                self.mark(rank, self.scheduler(rank), Body::Paused);
            } else if let Some(rank) = self.ranks.get_mut(rank).filter(|rank| has_entered(rank)) {
                rank.senders.iter_mut().for_each(|sender| sender.truth.holds("LoopStalled", now));
            }
        }
    }

    /// It goes on.
    pub(super) fn go_on(&mut self) {
        let (now, Some(halt)) = (self.now, self.schedule.halt) else { return };
        self.halted_until = None;
        for rank in 0..self.ranks.len() {
            if halt.is_pause {
                self.mark(rank, self.scheduler(rank), Body::Resumed);
            }
            if let Some(rank) = self.ranks.get_mut(rank) {
                // It is marked: the last mark is long ago.
                rank.passes += MARKED_AFTER;
                rank.senders.iter_mut().for_each(|sender| sender.truth.is_over("LoopStalled", now));
            }
        }
        // The pass that took so long ends.
        self.pass();
    }
}
