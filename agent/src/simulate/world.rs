//! The simulated node: what happens next, and when.

use std::{collections::BTreeMap, time::Duration};

use super::{
    Settings,
    agent::Agent,
    chance::Chance,
    schedule::{Fault, Schedule},
    server::{Chunk, Rank},
    truth::Truth,
};
use crate::{
    core::Input,
    event::{
        Backend, Body, Event, Phase, Room,
        clock::Monotonic,
        native::{Engine, NativeEvent},
    },
};

/// When a simulation begins: not at 0, which means "never" in a hook's entries.
pub(super) const BEGINS: Monotonic = Monotonic(1_000_000_000_000);

/// Something that happens.
#[derive(Clone, Copy, Debug)]
pub(super) enum Act {
    Open { plan: usize, rank: usize },
    Register { rank: usize, sender: usize },
    Send { rank: usize, sender: usize, number: u32 },
    Abort { rank: usize, sender: usize },
    Vanish { rank: usize, sender: usize },
    Close { rank: usize, sender: usize },
    TimeOut { rank: usize, sender: usize },
    Take { rank: usize, worker: usize },
    Post { rank: usize, worker: usize, chunk: Chunk },
    Wire { rank: usize, worker: usize, chunk: Chunk, part: u64, status: i8 },
    Hang { rank: usize, worker: usize, cause: &'static str },
    Fail { rank: usize, worker: usize, chunk: Chunk },
    Give { rank: usize, worker: usize, chunk: Chunk, tells: bool },
    GiveUp { rank: usize, worker: usize, chunk: Chunk },
    LeftEnds { rank: usize, left: usize },
    Pass,
    Stop,
    Diverge,
    Hung,
    Halt,
    GoOn,
    Restart,
    Attach,
    Deaf { until: Monotonic },
    Tick,
}

/// Whether the scheduler's thread does it, which is to make a pass.
fn is_of_scheduler(act: &Act) -> bool {
    matches!(
        act,
        Act::Open { .. } | Act::Send { .. } | Act::Abort { .. } | Act::Close { .. } | Act::TimeOut { .. } | Act::Pass
    )
}

/// The node.
#[derive(Debug)]
pub(super) struct World {
    pub(super) now: Monotonic,
    pub(super) ends: Monotonic,
    pub(super) chance: Chance,
    pub(super) schedule: Schedule,
    pub(super) ranks: Vec<Rank>,
    pub(super) agent: Agent,
    pub(super) requests: u64,
    pub(super) is_stopped: bool,
    /// A plan whose ranks do not agree any more.
    pub(super) diverged: Option<usize>,
    /// Until when the schedulers do nothing.
    pub(super) halted_until: Option<Monotonic>,
    /// Counts the server's processes: acts of a former one are void.
    pub(super) generation: u32,
    acts: BTreeMap<(Monotonic, u64), (u32, Act)>,
    numbers: u64,
    pub(super) over: Vec<Truth>,
}

impl World {
    pub(super) fn new(settings: &Settings) -> Self {
        let mut chance = Chance::of(settings.seed);
        let schedule = Schedule::draw(settings, &mut chance);
        let ranks = (0..settings.ranks.max(1)).map(|number| Rank::new(number, 1, schedule.workers)).collect();
        let mut world = Self {
            now: BEGINS,
            ends: BEGINS.plus(schedule.ends),
            chance,
            schedule,
            ranks,
            agent: Agent::new(),
            requests: 0,
            is_stopped: false,
            diverged: None,
            halted_until: None,
            generation: 0,
            acts: BTreeMap::new(),
            numbers: 0,
            over: Vec::new(),
        };
        world.prepare();
        world
    }

    fn prepare(&mut self) {
        let schedule = self.schedule.clone();
        for (plan, it) in schedule.plans.iter().enumerate() {
            for rank in 0..self.ranks.len() {
                self.later(it.arrives, Act::Open { plan, rank });
            }
        }
        for (from, until) in schedule.deaf {
            self.later(from, Act::Deaf { until: BEGINS.plus(until) });
        }
        self.later(schedule.attaches, Act::Attach);
        self.later(schedule.attaches, Act::Tick);
        self.later(Duration::from_millis(10), Act::Pass);
        if let Some(at) = schedule.loop_stops {
            self.later(at, Act::Stop);
        }
        if let Some(divergence) = schedule.diverges {
            self.later(divergence.at, Act::Diverge);
        }
        if let Some(halt) = schedule.halt {
            self.later(halt.from, Act::Halt);
            self.later(halt.until, Act::GoOn);
        }
        if let Some(at) = schedule.restarts {
            self.later(at, Act::Restart);
        }
    }

    /// Something happens so long after now.
    pub(super) fn later(&mut self, after: Duration, act: Act) {
        self.numbers += 1;
        self.acts.insert((self.now.plus(after), self.numbers), (self.generation, act));
    }

    /// Lets everything happen, and says what the agent was told and what is true.
    pub(super) fn run(mut self) -> (Vec<Input>, Vec<Truth>) {
        while let Some(((at, _), (generation, act))) = self.acts.pop_first() {
            if at > self.ends {
                break;
            }
            self.now = at;
            let outlives = matches!(act, Act::Tick | Act::Deaf { .. } | Act::Attach | Act::Open { .. } | Act::Pass);
            if outlives || generation == self.generation {
                self.act(act);
            }
        }
        self.now = self.ends;
        self.conclude_truth();
        (self.agent.inputs, self.over)
    }

    fn act(&mut self, act: Act) {
        if let (true, Some(until)) = (is_of_scheduler(&act), self.halted_until) {
            return self.later(until.since(self.now), act);
        }
        match act {
            Act::Open { plan, rank } => self.open(plan, rank),
            Act::Register { rank, sender } => self.register(rank, sender),
            Act::Send { rank, sender, number } => self.send(rank, sender, number),
            Act::Abort { rank, sender } => self.abort(rank, sender),
            Act::Vanish { rank, sender } => self.vanish(rank, sender),
            Act::Close { rank, sender } => self.close(rank, sender),
            Act::TimeOut { rank, sender } => self.time_out(rank, sender),
            Act::Take { rank, worker } => self.take(rank, worker),
            Act::Post { rank, worker, chunk } => self.post(rank, worker, chunk),
            Act::Wire { rank, worker, chunk, part, status } => self.wire(rank, worker, chunk, part, status),
            Act::Hang { rank, worker, cause } => self.hang(rank, worker, cause),
            Act::Fail { rank, worker, chunk } => self.fail(rank, worker, chunk),
            Act::Give { rank, worker, chunk, tells } => self.give(rank, worker, chunk, tells),
            Act::GiveUp { rank, worker, chunk } => self.give_up(rank, worker, chunk),
            Act::LeftEnds { rank, left } => self.left_ends(rank, left),
            Act::Pass => {
                self.pass();
                let after = self.schedule.pass;
                self.later(after, Act::Pass);
            }
            Act::Stop => self.stop("LoopStalled"),
            Act::Diverge => self.diverge(),
            Act::Hung => self.stop("RankDivergence"),
            Act::Halt => self.halt(),
            Act::GoOn => self.go_on(),
            Act::Restart => self.restart(),
            Act::Attach => (0..self.ranks.len()).for_each(|rank| self.attach(rank)),
            Act::Deaf { until } => self.agent.is_deaf(until),
            Act::Tick => self.tick(),
        }
    }

    /// Puts a mark, or a call of the engine, into the ring.
    pub(super) fn mark(&mut self, rank: usize, tid: u32, body: Body) {
        let at = self.now;
        let Some(rank) = self.ranks.get_mut(rank) else { return };
        rank.sequence += 1;
        let (pid, sequence) = (rank.process.pid, rank.sequence);
        self.agent.see(Event { pid, tid, at, sequence, detail_lost: false, body });
    }

    pub(super) fn native(&mut self, rank: usize, tid: u32, event: NativeEvent) {
        self.mark(rank, tid, Body::Native(Box::new(event)));
    }

    /// SGLang's `update_status`, of NIXL: Failed wins, else the greater one; Failed of an absent room does nothing.
    pub(super) fn update(&mut self, rank: usize, tid: u32, room: u64, requested: Phase) {
        let Some(it) = self.ranks.get_mut(rank) else { return };
        let before = it.status.get(&room).copied();
        let after = match (before, requested) {
            (None, Phase::Failed) => None,
            (_, Phase::Failed) => Some(Phase::Failed),
            (Some(before), requested) => Some(before.max(requested)),
            (None, requested) => Some(requested),
        };
        if let Some(after) = after {
            it.status.insert(room, after);
        }
        self.status_came(rank, room, before, after);
        if before != after || after != Some(requested) {
            let requested = Some(requested);
            self.mark(rank, tid, Body::Update { room: Room::Number(room), requested, before, after });
        }
    }

    /// The room of a sender, and what is wrong with its transfers on this rank.
    pub(super) fn of(&self, rank: usize, sender: usize) -> Option<(u64, Fault)> {
        let sender = self.ranks.get(rank)?.senders.get(sender)?;
        let plan = self.schedule.plans.get(sender.plan)?;
        let is_here = plan.on.is_none_or(|on| on == rank);
        Some((sender.truth.room, if is_here { plan.fault } else { Fault::None }))
    }

    pub(super) fn truth(&mut self, rank: usize, sender: usize) -> Option<&mut Truth> {
        let sender = self.ranks.get_mut(rank)?.senders.get_mut(sender)?;
        (sender.truth.ended.is_none()).then_some(&mut sender.truth)
    }

    /// The backend of the server's senders.
    pub(super) fn backend(&self) -> Backend {
        if self.schedule.engine == Engine::Nixl { Backend::Nixl } else { Backend::Mooncake }
    }
}
