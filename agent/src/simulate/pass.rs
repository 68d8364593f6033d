//! A pass of the schedulers, in step on every rank: who entered is marked, senders are polled, who is over is released.

use super::{
    truth::NEVER,
    world::{Act, World},
};
use crate::event::{Body, LeaveReason, Phase, Room, native::Engine};

/// Passes that a scheduler makes between two that are simulated.
const UNSEEN: u32 = 8;
/// After so many a pass is marked, where passes are short.
pub(super) const MARKED_AFTER: u32 = UNSEEN * 2;
/// `pass` marks are at most ten a second.
const MARKED_EVERY: u32 = 10;

impl World {
    pub(super) fn pass(&mut self) {
        if self.is_stopped {
            return;
        }
        for rank in 0..self.ranks.len() {
            self.enter(rank);
            self.poll_all(rank);
        }
        self.release_all();
        for rank in 0..self.ranks.len() {
            self.mark_pass(rank);
            self.answer(rank);
        }
    }

    fn enter(&mut self, rank: usize) {
        let now = self.now;
        let Some(it) = self.ranks.get(rank) else { return };
        let is_new = |place: &usize| it.senders.get(*place).is_some_and(|sender| sender.truth.entered.is_none());
        let new: Vec<usize> = it.queue.iter().copied().filter(is_new).collect();
        for place in new {
            self.entered(rank, place, now);
        }
    }

    /// Those in the bootstrap queue and those in the inflight queue are polled.
    fn poll_all(&mut self, rank: usize) {
        let Some(it) = self.ranks.get(rank) else { return };
        let bootstraps = |phase: Option<Phase>| phase.is_none_or(|phase| phase == Phase::Bootstrapping);
        let polled = it.senders.iter().enumerate();
        let polled = polled.filter(|(_, it)| it.is_live() && (it.is_queued || bootstraps(it.polled)));
        let polls: Vec<(usize, Phase)> = polled.map(|(place, sender)| (place, it.poll(sender))).collect();
        for (place, phase) in polls {
            self.polled(rank, place, phase);
        }
    }

    /// The group agrees on the least of its polls.
    fn release_all(&mut self) {
        let (now, diverged) = (self.now, self.diverged);
        for plan in (0..self.schedule.plans.len()).filter(|plan| diverged != Some(*plan)) {
            let mut group = Vec::new();
            for (rank, it) in self.ranks.iter().enumerate() {
                let its = it.senders.iter().enumerate();
                group.extend(
                    its.filter(|(_, sender)| sender.plan == plan && sender.is_live())
                        .map(|(place, sender)| (rank, place, sender.polled, sender.is_queued)),
                );
            }
            let least = group.iter().map(|(_, _, polled, _)| polled.unwrap_or(Phase::Bootstrapping)).min();
            for (rank, place, polled, is_queued) in group {
                let lag = self.schedule.lag * rank as u32;
                let Some(sender) = self.ranks.get_mut(rank).and_then(|rank| rank.senders.get_mut(place)) else {
                    continue;
                };
                if let Some(least) = least.filter(|least| least.is_terminal()) {
                    sender.agreed.get_or_insert((now, least));
                }
                if let Some((_, least)) = sender.agreed.filter(|(at, _)| now >= at.plus(lag)) {
                    self.drop_request(rank, place, least, polled, is_queued);
                }
            }
        }
    }

    /// A rank drops what all have agreed on.
    fn drop_request(&mut self, rank: usize, place: usize, least: Phase, polled: Option<Phase>, is_queued: bool) {
        if is_queued && least == Phase::Success {
            self.clear(rank, place);
        }
        if least == Phase::Failed {
            self.fail_sender(rank, place);
        }
        if !is_queued {
            return self.is_over(rank, place);
        }
        let own = if polled == Some(Phase::Failed) { LeaveReason::Failed } else { LeaveReason::Success };
        let is_terminal = polled.is_some_and(Phase::is_terminal);
        self.release(rank, place, if is_terminal { own } else { LeaveReason::Removed });
        let after = self.chance.millis(1, 60);
        self.later(after, Act::Close { rank, sender: place });
    }

    fn clear(&mut self, rank: usize, place: usize) {
        let (now, tid) = (self.now, self.scheduler(rank));
        let Some(it) = self.ranks.get_mut(rank) else { return };
        let Some(sender) = it.senders.get(place) else { return };
        let (room, serial) = (sender.truth.room, sender.truth.request.serial);
        let removed = it.status.remove(&room).is_some();
        for other in it.live_on(room).into_iter().filter(|other| *other != place && removed) {
            let Some(other) = it.senders.get_mut(other) else { continue };
            other.cleared_by = Some(serial);
            // One that has polled Success is released with this one.
            if other.polled != Some(Phase::Success) {
                other.truth.stuck("RoomCollision", now, now);
            }
        }
        self.mark(rank, tid, Body::Clear { room: Room::Number(room), sender: serial, removed });
    }

    pub(super) fn fail_sender(&mut self, rank: usize, place: usize) {
        let tid = self.scheduler(rank);
        let Some(sender) = self.ranks.get(rank).and_then(|rank| rank.senders.get(place)) else { return };
        let (room, sender) = (Room::Number(sender.truth.room), sender.truth.request.serial);
        self.mark(rank, tid, Body::Failure { room, sender });
    }

    /// A request leaves the queue, and gives its pages back.
    pub(super) fn release(&mut self, rank: usize, place: usize, reason: LeaveReason) {
        let (now, tid) = (self.now, self.scheduler(rank));
        let Some(it) = self.ranks.get_mut(rank) else { return };
        it.queue.retain(|other| *other != place);
        let is_writing = it.is_writing(place);
        let Some(sender) = it.senders.get_mut(place) else { return };
        let (room, serial) = (Room::Number(sender.truth.room), sender.truth.request.serial);
        if is_writing && reason != LeaveReason::Success {
            // Of a batch it shows once it is read, and is not over then.
            let shows = if self.schedule.engine == Engine::Nixl { now } else { NEVER };
            sender.truth.stuck("UnsafeRelease", now, shows);
        }
        self.is_over(rank, place);
        self.mark(rank, tid, Body::Leave { room, sender: serial, reason });
    }

    /// The sender's object is gone.
    pub(super) fn close(&mut self, rank: usize, place: usize) {
        let tid = self.scheduler(rank);
        let Some(sender) = self.ranks.get(rank).and_then(|rank| rank.senders.get(place)) else { return };
        let (room, sender) = (Room::Number(sender.truth.room), sender.truth.request.serial);
        self.mark(rank, tid, Body::Close { room, sender });
    }

    fn is_over(&mut self, rank: usize, place: usize) {
        let now = self.now;
        let Some(sender) = self.ranks.get_mut(rank).and_then(|rank| rank.senders.get_mut(place)) else { return };
        sender.is_queued = false;
        sender.truth.ended = Some(now);
        sender.truth.ends(now);
    }

    fn mark_pass(&mut self, rank: usize) {
        let tid = self.scheduler(rank);
        let pass = self.schedule.pass.as_millis();
        let Some(it) = self.ranks.get_mut(rank) else { return };
        it.passes += UNSEEN;
        if pass < 100 && it.passes < MARKED_AFTER {
            return;
        }
        let passes = std::mem::take(&mut it.passes).min(UNSEEN * MARKED_EVERY);
        let queue_length = u32::try_from(it.queue.len()).unwrap_or(u32::MAX);
        self.mark(rank, tid, Body::Pass { queue_length, passes });
    }

    /// The hook tells everything that lives, when it was asked.
    fn answer(&mut self, rank: usize) {
        let (ranks, backend) = (self.ranks.len(), self.backend());
        let Some(it) = self.ranks.get_mut(rank) else { return };
        let (tid, Some(epoch)) = (it.process.pid, it.asked.take()) else { return };
        let hello = it.hello(epoch, ranks, &self.schedule, backend);
        let entries = it.entries(epoch);
        let count = entries.len() as u64;
        let answer = [hello, Body::StateBegin { epoch }].into_iter().chain(entries);
        for body in answer.chain([Body::StateEnd { epoch, entries: count }]) {
            self.mark(rank, tid, body);
        }
    }
}
