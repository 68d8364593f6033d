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
    /// The server fails the request at about the time when they end.
    Close,
    /// One goes on while its worker gives it up and fails the request.
    GivenUp,
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
    /// A fake sender that never finishes.
    pub(super) pinned: bool,
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

/// One rank drops the first request by itself, then a collective hangs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Divergence {
    pub(super) at: Duration,
    /// How long the ranks go on after that.
    pub(super) hangs_after: Duration,
}

/// For some time the scheduler makes no pass, and then goes on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Halt {
    pub(super) from: Duration,
    pub(super) until: Duration,
    /// Paused by its server, and not just busy with one pass.
    pub(super) is_pause: bool,
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
    /// Whether the ranks are pipeline stages.
    pub(super) stages: bool,
    /// How much later than the one before each further rank drops what all agreed on.
    pub(super) lag: Duration,
    pub(super) diverges: Option<Divergence>,
    pub(super) halt: Option<Halt>,
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
        // What a second fault shows needs passes, and ranks that agree on who is there.
        let stands_alone =
            family.diverges() || matches!(family, Family::WarmupPinned | Family::Paused | Family::LongPass);
        if plans.len() > 1 && !stands_alone && chance.percent(25) {
            also(&mut plans, chance);
        }
        let stages = match family {
            Family::PipelineDivergence => true,
            Family::TensorDivergence => false,
            _ => chance.percent(40),
        };
        let apart = if family == Family::TransientDisagreement { 900 } else { 200 };
        let lag = chance.millis(0, apart) / u32::try_from(settings.ranks.saturating_sub(1).max(1)).unwrap_or(1);
        let halt = halt(family, chance);
        // SGLang's own is 300 s; others are shorter here, to come to their end.
        let bootstrap_timeout = Duration::from_secs(if halt.is_some() { 300 } else { chance.between(4, 8) });
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
            loop_stops: (family == Family::LoopStalled).then(|| chance.millis(1_500, 4_000)),
            stages,
            // The ranks of a tensor-parallel group drop a request in one pass.
            lag: if stages { lag } else { Duration::ZERO },
            diverges: (family.diverges() && settings.ranks > 1).then(|| divergence(family, chance)),
            halt,
            restarts: (family == Family::SamePid).then(|| chance.millis(1_500, 6_000)),
            ends: Duration::ZERO,
        };
        schedule.ends = schedule.ends_after(family, chance);
        schedule.blind(family, chance);
        schedule
    }

    /// Long enough for the family's rule to fire, where there is one.
    fn ends_after(&self, family: Family, chance: &mut Chance) -> Duration {
        use Family::*;
        let seconds = match family {
            ParkedPrefill | BootstrapThreadDied | OrphanRoom => 80,
            ClearedRoom | AbortIgnored => 52,
            Backpressure => 60,
            WarmupPinned => 45,
            // A minute until a loop is called stalled, five more for its rule.
            LoopStalled if chance.percent(10) => 370,
            // The same, and one for its rule; stages that hang at once are not told from a long pass for five.
            PipelineDivergence if chance.percent(10) => 380,
            PipelineDivergence | TensorDivergence if chance.percent(40) => 145,
            LoopStalled | PipelineDivergence | TensorDivergence => 72,
            _ => 32,
        };
        let ends = Duration::from_secs(seconds);
        self.halt.map_or(ends, |halt| halt.until + Duration::from_secs(20))
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
        TransferNeverEnds | CompletionLost | FailureNotTold | Resurrection | PeerDied | Blackholed | WorkerBlocked
    )
}

fn divergence(family: Family, chance: &mut Chance) -> Divergence {
    let hangs_after = match chance.between(0, 2) {
        // In the next collective: at once in a tensor-parallel group.
        0 => Duration::ZERO,
        _ if family == Family::TensorDivergence => chance.millis(0, 100),
        1 => chance.millis(1_500, 4_000),
        _ => chance.millis(6_000, 9_000),
    };
    Divergence { at: chance.millis(1_500, 4_000), hangs_after }
}

fn halt(family: Family, chance: &mut Chance) -> Option<Halt> {
    let is_pause = match family {
        Family::Paused => true,
        Family::LongPass => false,
        _ => return None,
    };
    let from = chance.millis(300, 6_000);
    let takes = if chance.percent(10) { chance.millis(61_000, 300_000) } else { chance.millis(5_000, 100_000) };
    Some(Halt { from, until: from + takes, is_pause })
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
        pinned: false,
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
        Family::UnsafeRelease => fault(match chance.between(0, 3) {
            0 => Fault::Close,
            1 => Fault::GivenUp,
            _ => Fault::Unsafe,
        }),
        Family::Resurrection => fault(Fault::Resurrected),
        Family::TransientDisagreement => plans.iter_mut().for_each(|plan| plan.skew = chance.millis(50, 300)),
        Family::PeerDied => fault(Fault::Failed { reset: true }),
        Family::Blackholed => fault(Fault::Failed { reset: false }),
        Family::WorkerBlocked => {
            (first.fault, first.on, first.arrives) = (Fault::Never, one_rank, Duration::from_millis(100));
        }
        Family::WarmupPinned => (first.backend, first.pinned) = (Backend::Fake, true),
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
        // It stays where it is, on every rank, until one drops it.
        Family::PipelineDivergence | Family::TensorDivergence => first.fault = Fault::NoDecode,
        // A warm-up among them, which ends.
        Family::Paused | Family::LongPass if chance.percent(30) => first.backend = Backend::Fake,
        Family::LoopStalled | Family::AgentBlind | Family::SamePid | Family::Paused | Family::LongPass => {}
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
