//! The scheduler's side of a request's life: created, registered, sent, polled, released.

use std::time::Duration;

use super::{
    schedule::{Fault, Plan},
    server::{Chunk, Sender},
    truth::{Fate, Truth},
    world::{Act, World},
};
use crate::event::{Backend, Body, ChunkStep, Phase, Room, clock::Monotonic};

/// A warm-up that is in the queue for longer is pinned.
const WARM_UP_ENDS_WITHIN: Duration = Duration::from_secs(10);

impl World {
    pub(super) fn scheduler(&self, rank: usize) -> u32 {
        self.ranks.get(rank).map_or(0, |rank| rank.process.pid)
    }

    fn plan(&self, rank: usize, sender: usize) -> Option<Plan> {
        let plan = self.ranks.get(rank)?.senders.get(sender)?.plan;
        self.schedule.plans.get(plan).cloned()
    }

    /// A sender is made.
    pub(super) fn open(&mut self, plan: usize, rank: usize) {
        let (now, number) = (self.now, plan);
        if self.is_stopped {
            return;
        }
        let Some(plan) = self.schedule.plans.get(plan).cloned() else { return };
        let (room, backend) = (plan.room, plan.backend);
        let Some(it) = self.ranks.get_mut(rank) else { return };
        it.serials += 1;
        let (serial, place) = (it.serials, it.senders.len());
        let others = it.live_on(room);
        let other = others.last().and_then(|other| it.senders.get(*other)).map(|other| other.truth.request.serial);
        for other in others {
            if let Some(other) = it.senders.get_mut(other) {
                other.shared_with.get_or_insert(serial);
            }
        }
        it.senders.push(Sender {
            plan: number,
            polled: None,
            polled_since: now,
            is_queued: false,
            sent: 0,
            pages: 0,
            sent_last: false,
            dropped: None,
            shared_with: other,
            cleared_by: None,
            is_pinned: plan.pinned,
            agreed: None,
            truth: Truth {
                request: it.key(serial),
                room,
                rid: format!("rid-{number}-{}", plan.room),
                backend,
                family: plan.family,
                is_shared: false,
                fate: Fate::Healthy,
                created: now,
                entered: None,
                aborted: None,
                ended: None,
                holds: Vec::new(),
                is_concluded: false,
            },
        });
        let tid = self.scheduler(rank);
        self.mark(rank, tid, Body::Open { room: Room::Number(room), sender: serial, backend });
        self.update(rank, tid, room, Phase::Bootstrapping);
        if let Some(registers) = plan.registers {
            self.later(registers + plan.skew * rank as u32, Act::Register { rank, sender: place });
            self.later(
                plan.prefill + plan.skew * self.ranks.len() as u32,
                Act::Send { rank, sender: place, number: 0 },
            );
        } else if plan.times_out {
            self.later(self.schedule.bootstrap_timeout, Act::TimeOut { rank, sender: place });
        } else if let Some(truth) = self.truth(rank, place) {
            truth.stuck("NeverBootstrapped", now, now.plus(Duration::from_millis(400)));
        }
    }

    pub(super) fn register(&mut self, rank: usize, sender: usize) {
        let Some((room, _)) = self.of(rank, sender) else { return };
        let tid = self.ranks.get(rank).map_or(0, |rank| rank.process.pid + 1);
        self.update(rank, tid, room, Phase::WaitingForInput);
    }

    pub(super) fn time_out(&mut self, rank: usize, sender: usize) {
        if let Some((room, _)) = self.of(rank, sender) {
            self.update(rank, self.scheduler(rank), room, Phase::Failed);
        }
    }

    /// A chunk is prefilled: it is sent, and after the last one the request enters the queue.
    pub(super) fn send(&mut self, rank: usize, place: usize, number: u32) {
        let now = self.now;
        let Some(plan) = self.plan(rank, place).filter(|_| !self.is_stopped) else { return };
        let (is_last, room, tid) = (number + 1 >= plan.chunks, plan.room, self.scheduler(rank));
        let Some(it) = self.ranks.get_mut(rank) else { return };
        let worker = it.shard(room);
        let Some(sender) = it.senders.get_mut(place).filter(|sender| sender.is_live()) else { return };
        let serial = sender.truth.request.serial;
        if is_last || plan.parked {
            sender.is_queued = true;
            it.queue.push(place);
        }
        if plan.parked {
            return;
        }
        let Some(sender) = it.senders.get_mut(place) else { return };
        sender.sent += 1;
        sender.pages += u64::from(plan.pages);
        sender.sent_last |= is_last;
        if let Some(hands) = it.workers.get_mut(worker).filter(|_| plan.backend != Backend::Fake) {
            hands.queue.push_back(Chunk { sender: place, number, is_last });
        }
        self.mark(rank, tid, Body::Send { room: Room::Number(room), sender: serial, pages: plan.pages, last: is_last });
        if plan.backend != Backend::Fake {
            self.count(rank, tid, room, ChunkStep::Queued, false);
            self.is_blocked(rank, worker, place);
            self.later(Duration::from_micros(200), Act::Take { rank, worker });
        } else if let Some(truth) = self.truth(rank, place).filter(|_| is_last && plan.pinned) {
            truth.stuck("WarmupPinned", now, now.plus(WARM_UP_ENDS_WITHIN));
        }
        if !is_last {
            let after = self.chance.millis(50, 600);
            self.later(after, Act::Send { rank, sender: place, number: number + 1 });
        }
    }

    /// SGLang's `abort()`, which sets a state that nobody reads; and an update where the room has no status.
    pub(super) fn abort(&mut self, rank: usize, place: usize) {
        let (now, tid) = (self.now, self.scheduler(rank));
        let Some(it) = self.ranks.get_mut(rank).filter(|_| !self.is_stopped) else { return };
        let Some(sender) = it.senders.get_mut(place).filter(|sender| sender.is_live()) else { return };
        let (room, serial) = (sender.truth.room, sender.truth.request.serial);
        sender.truth.aborted.get_or_insert(now);
        sender.truth.stuck("AbortIgnored", now, now.plus(Duration::from_millis(1_200)));
        let room_present = it.status.contains_key(&room);
        self.mark(rank, tid, Body::Abort { room: Room::Number(room), sender: serial, room_present });
        if !room_present {
            self.update(rank, tid, room, Phase::Failed);
        }
    }

    /// The status of a room is removed by somebody who is not seen, then a failure of it is dropped.
    pub(super) fn vanish(&mut self, rank: usize, place: usize) {
        let Some((room, _)) = self.of(rank, place) else { return };
        if let Some(it) = self.ranks.get_mut(rank) {
            it.status.remove(&room);
        }
        self.update(rank, self.scheduler(rank), room, Phase::Failed);
    }

    /// A room's status was set, or an update of it dropped.
    pub(super) fn status_came(&mut self, rank: usize, room: u64, before: Option<Phase>, after: Option<Phase>) {
        let now = self.now;
        let Some(it) = self.ranks.get_mut(rank) else { return };
        for place in it.live_on(room) {
            let Some(sender) = it.senders.get_mut(place) else { continue };
            if after > Some(Phase::Bootstrapping) {
                sender.truth.is_over("NeverBootstrapped", now);
            }
            if before == Some(Phase::Failed) && after > before {
                sender.truth.holds("Resurrected", now);
            }
            if after.is_some() && before.is_none() {
                (sender.cleared_by, sender.dropped) = (None, None);
                sender.truth.is_over("RoomCollision", now);
                sender.truth.is_over("UpdateDropped", now);
            } else if after.is_none() {
                sender.dropped = Some(now);
                sender.truth.stuck("UpdateDropped", now, now);
                if sender.shared_with.is_some() {
                    // Whoever removed the status: two requests had the room, and it is gone.
                    sender.truth.stuck("RoomCollision", now, now);
                }
            }
        }
    }

    /// A sender polls this.
    pub(super) fn polled(&mut self, rank: usize, place: usize, phase: Phase) {
        let (now, tid) = (self.now, self.scheduler(rank));
        let Some(sender) = self.ranks.get_mut(rank).and_then(|rank| rank.senders.get_mut(place)) else { return };
        let old = sender.polled;
        let is_parked = sender.sent == 0 && sender.is_queued && phase == Phase::WaitingForInput;
        if phase == Phase::Bootstrapping {
            sender.truth.holds("NeverBootstrapped", now);
        } else {
            sender.truth.is_over("NeverBootstrapped", now);
        }
        if is_parked && sender.truth.backend != Backend::Fake && !sender.truth.is_true("Parked", now) {
            sender.truth.stuck("Parked", now, now);
        }
        if old == Some(phase) {
            return;
        }
        if phase.is_terminal() {
            sender.truth.ends(now);
        }
        (sender.polled, sender.polled_since) = (Some(phase), now);
        let (room, sender) = (Room::Number(sender.truth.room), sender.truth.request.serial);
        self.mark(rank, tid, Body::Phase { room, sender, old, new: Some(phase) });
    }

    /// When a request enters the queue.
    pub(super) fn entered(&mut self, rank: usize, place: usize, at: Monotonic) {
        let tid = self.scheduler(rank);
        let Some(plan) = self.plan(rank, place) else { return };
        let Some(it) = self.ranks.get_mut(rank) else { return };
        let queue_length = it.queue.len() as u64;
        let Some(sender) = it.senders.get_mut(place) else { return };
        sender.truth.entered = Some(at);
        let (room, serial) = (Room::Number(plan.room), sender.truth.request.serial);
        if plan.fault == Fault::Slow {
            sender.truth.fate = Fate::Slow;
        }
        let rid = Some(sender.rid());
        self.mark(rank, tid, Body::Enter { room, sender: serial, rid, queue_length });
        if let Some(after) = plan.abort {
            self.later(after, Act::Abort { rank, sender: place });
        }
        if plan.vanishes {
            let after = self.chance.millis(500, 3_000);
            self.later(after, Act::Vanish { rank, sender: place });
        }
    }
}
