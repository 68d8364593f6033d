//! What is to happen: drawn from the seed before anything happens.

use std::time::Duration;

use super::{Settings, chance::Chance, family::Family};
use crate::event::{Backend, native::Engine};

/// What is wrong with a request's transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// One never ends.
    Never,
    /// They are done, the worker sees it late.
    Late,
    /// They are done, and nobody says so: the worker does not come back, or does and says nothing.
    Swallowed {
        hangs: bool,
    },
    /// One fails, and nobody says so.
    Failed {
        reset: bool,
    },
    /// The worker finds nobody to send to, and does not say so.
    NoDecode,
    /// One goes on while the server fails the request.
    Unsafe,
    /// They end one after the other, seconds apart.
    Slow,
    /// One fails, and the server says so.
    Told,
    /// The server says that it failed, then that it goes on.
    Resurrected,
}

/// What is to happen to one request, on every rank.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) family: Family,
    pub(super) room: u64,
    pub(super) arrives: Duration,
    /// After its arrival; never where there is nothing.
    pub(super) registers: Option<Duration>,
    /// How much later each further rank sees that.
    pub(super) skew: Duration,
    /// From its arrival to the first chunk.
    pub(super) prefill: Duration,
    pub(super) chunks: u32,
    pub(super) backend: Backend,
    /// Enters the queue without sending.
    pub(super) parked: bool,
    /// After it has entered the queue.
    pub(super) abort: Option<Duration>,
    pub(super) fault: Fault,
    /// The one rank that the fault is on, or every one.
    pub(super) on: Option<usize>,
    /// Its room's status is removed by nobody that is seen, and an update dropped.
    pub(super) vanishes: bool,
    /// The server's time-out ends its bootstrap.
    pub(super) times_out: bool,
    pub(super) pages: u32,
}

/// What is to happen.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    pub(super) plans: Vec<Plan>,
    pub(super) engine: Engine,
    /// Whether transfers have notifications that name their room (NIXL before SGLang 0.5.23).
    pub(super) notifies: bool,
    /// Whether the hook says which transfer queue a chunk is in.
    pub(super) names_queues: bool,
    pub(super) workers: u64,
    pub(super) pass: Duration,
    pub(super) bootstrap_timeout: Duration,
    /// When events are lost.
    pub(super) deaf: Vec<(Duration, Duration)>,
    pub(super) attaches: Duration,
    pub(super) loop_stops: Option<Duration>,
    /// The last rank drops the first request before that.
    pub(super) diverges: bool,
    pub(super) restarts: Option<Duration>,
    pub(super) ends: Duration,
}

impl Schedule {
    pub(super) fn draw(settings: &Settings, chance: &mut Chance) -> Self {
        let family = settings.family;
        let engine = if needs_nixl(family) || chance.percent(70) { Engine::Nixl } else { Engine::Mooncake };
        let backend = if engine == Engine::Nixl { Backend::Nixl } else { Backend::Mooncake };
        let rooms = chance.between(1, 1 << 40);
        let mut plans: Vec<Plan> = (0..settings.requests.max(1) as u64)
            .map(|number| healthy(family, rooms + number * 7919, backend, chance))
            .collect();
        let blackout = Duration::from_millis(chance.between(1_000, 3_000));
        inject(family, &mut plans, blackout, settings.ranks, chance);
        if plans.len() > 1 && family != Family::WarmupPinned && chance.percent(25) {
            also(&mut plans, chance);
        }
        let bootstrap_timeout = Duration::from_secs(chance.between(4, 8));
        let mut schedule = Self {
            plans,
            engine,
            notifies: engine == Engine::Nixl && chance.percent(50),
            names_queues: chance.percent(70),
            workers: if family == Family::WorkerBlocked { 1 } else { chance.between(1, 3) },
            pass: chance.millis(40, 150),
            bootstrap_timeout,
            deaf: Vec::new(),
            attaches: Duration::ZERO,
            loop_stops: None,
            diverges: matches!(family, Family::PipelineDivergence | Family::TensorDivergence),
            restarts: (family == Family::SamePid).then(|| chance.millis(1_500, 6_000)),
            ends: ends_after(family),
        };
        if schedule.diverges || family == Family::LoopStalled {
            schedule.loop_stops = Some(chance.millis(1_500, 4_000));
        }
        schedule.blind(family, chance);
        schedule
    }

    /// What the agent does not see.
    fn blind(&mut self, family: Family, chance: &mut Chance) {
        let often = if family == Family::AgentBlind { 80 } else { 15 };
        if chance.percent(often) {
            for _ in 0..chance.between(1, 3) {
                let from = chance.millis(200, 12_000);
                self.deaf.push((from, from + chance.millis(5, 800)));
            }
        }
        if chance.percent(often / 2) {
            self.attaches = chance.millis(500, 5_000);
        }
    }
}

/// Those whose faults are of NIXL: Mooncake gives a transfer up after 30 s, and its errors are told.
fn needs_nixl(family: Family) -> bool {
    use Family::*;
    matches!(
        family,
        TransferNeverEnds
            | CompletionLost
            | FailureNotTold
            | UnsafeRelease
            | Resurrection
            | PeerDied
            | Blackholed
            | WorkerBlocked
    )
}

/// Long enough for the family's rule to fire, where there is one.
fn ends_after(family: Family) -> Duration {
    use Family::*;
    Duration::from_secs(match family {
        ParkedPrefill | BootstrapThreadDied | OrphanRoom | LoopStalled => 80,
        ClearedRoom | AbortIgnored => 52,
        Backpressure => 60,
        WarmupPinned => 45,
        _ => 32,
    })
}

fn healthy(family: Family, room: u64, backend: Backend, chance: &mut Chance) -> Plan {
    let registers = chance.millis(5, 400);
    Plan {
        family,
        room,
        arrives: chance.millis(100, 5_000),
        registers: Some(registers),
        skew: chance.millis(0, 3),
        prefill: registers + chance.millis(200, 1_200),
        chunks: u32::try_from(chance.between(1, 3)).unwrap_or(1),
        backend,
        parked: false,
        abort: None,
        fault: Fault::None,
        on: None,
        vanishes: false,
        times_out: false,
        pages: u32::try_from(chance.between(1, 64)).unwrap_or(1),
    }
}

/// Makes the first request, or all, what the family tells of.
fn inject(family: Family, plans: &mut Vec<Plan>, from: Duration, ranks: usize, chance: &mut Chance) {
    let one_rank = chance.percent(50).then(|| chance.between(0, ranks.max(1) as u64 - 1) as usize);
    let shared = plans.first().cloned();
    let Some(first) = plans.first_mut() else { return };
    let mut fault = |fault| (first.fault, first.on) = (fault, one_rank);
    match family {
        Family::ClearedRoom if chance.percent(25) => (first.vanishes, first.fault) = (true, Fault::NoDecode),
        Family::ClearedRoom => {
            let Some(mut second) = shared else { return };
            second.arrives += chance.millis(1, 180);
            second.prefill += chance.millis(20, 1_500);
            second.abort = chance.percent(50).then(|| chance.millis(500, 4_000));
            plans.push(second);
        }
        Family::AbortIgnored => (first.fault, first.abort) = (Fault::NoDecode, Some(chance.millis(500, 4_000))),
        Family::ParkedPrefill => {
            first.parked = true;
            first.registers = Some(first.prefill + chance.millis(300, 4_000));
        }
        Family::TransferNeverEnds => fault(Fault::Never),
        Family::CompletionLost => fault(Fault::Swallowed { hangs: chance.percent(50) }),
        Family::LateCompletion => plans.iter_mut().for_each(|plan| plan.fault = Fault::Late),
        Family::FailureNotTold => fault(Fault::Told),
        Family::UnsafeRelease => fault(Fault::Unsafe),
        Family::Resurrection => fault(Fault::Resurrected),
        Family::TransientDisagreement => plans.iter_mut().for_each(|plan| plan.skew = chance.millis(50, 300)),
        Family::PeerDied => fault(Fault::Failed { reset: true }),
        Family::Blackholed => fault(Fault::Failed { reset: false }),
        Family::WorkerBlocked => {
            (first.fault, first.on, first.arrives) = (Fault::Never, one_rank, Duration::from_millis(100));
        }
        Family::WarmupPinned => first.backend = Backend::Fake,
        Family::BootstrapThreadDied => {
            for plan in plans.iter_mut().filter(|plan| plan.arrives + plan.registers.unwrap_or_default() >= from) {
                plan.registers = None;
            }
        }
        Family::OrphanRoom => (first.registers, first.times_out) = (None, chance.percent(40)),
        Family::Backpressure => {
            first.fault = Fault::Slow;
            for plan in plans.iter_mut().skip(1).filter(|_| chance.percent(30)) {
                plan.fault = Fault::Slow;
            }
        }
        Family::PipelineDivergence | Family::TensorDivergence => fault(Fault::NoDecode),
        Family::LoopStalled | Family::AgentBlind | Family::SamePid => {}
    }
}

/// A second fault, on the last request: one that goes with every engine.
fn also(plans: &mut [Plan], chance: &mut Chance) {
    let former = plans.first().map(|plan| plan.room);
    let Some(last) = plans.last_mut().filter(|plan| plan.fault == Fault::None) else { return };
    match chance.between(0, 3) {
        0 => last.registers = None,
        1 => (last.fault, last.abort) = (Fault::NoDecode, Some(chance.millis(500, 4_000))),
        // An abort of one that gets on, or not: that is up to the other fault.
        2 => last.abort = Some(chance.millis(0, 200)),
        // A room that is used again, mostly after its first request is over.
        _ => {
            let Some(room) = former else { return };
            (last.room, last.arrives) = (room, last.arrives + Duration::from_secs(4));
        }
    }
}
