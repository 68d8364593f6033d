//! What the other ranks of a server have to do with a request, in words.

use std::{fmt, time::Duration};

use serde::Serialize;

use super::{
    Cause,
    evidence::{Evidence, Fact, Source},
    ranks::HANGS_AFTER,
    stalled::stalled_since,
};
use crate::{
    event::{Phase, clock::Monotonic},
    request::{
        rank::{Rank, Ranks},
        tracker::Tracked,
    },
};

/// How far the last passes of ranks that stopped together may be apart: each marks one in 100 ms.
const TOGETHER: Duration = Duration::from_secs(1);

/// What was seen of other ranks. Displays as a sentence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "seen", rename_all = "snake_case")]
#[expect(missing_docs, reason = "each is explained by how it displays")]
pub enum RankFact {
    HoldsUp { rank: Rank, pid: u32, phase: Option<Phase>, over_on: u32, cause: Option<Cause> },
    NotSeen { rank: Rank, ranks: u32, nodes: Option<u32> },
    NotKnown { rank: Rank, pid: u32 },
    AllStopped { ranks: usize },
    StoppedFirst { rank: Rank, pid: u32, before_ms: u64 },
    GoesOn { rank: Rank, pid: u32 },
}

impl fmt::Display for RankFact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HoldsUp { rank, pid, phase, over_on, cause } => {
                let polls = phase.map_or("was never polled", |_| "polls");
                write!(f, "rank {rank}, pid {pid}, {polls}")?;
                phase.iter().try_for_each(|phase| write!(f, " {phase}"))?;
                write!(f, " since; {over_on} of the ranks are done with the room and wait for it")?;
                match cause {
                    Some(cause) => write!(f, ". Its cause there is {cause}"),
                    None => Ok(()),
                }
            }
            Self::NotSeen { rank, ranks, nodes } => {
                write!(f, "rank {rank} of this server is not seen")?;
                if *ranks > 1 {
                    write!(f, ", and {} more", ranks - 1)?;
                }
                match nodes {
                    Some(nodes) => write!(f, " (the server is spread over {nodes} nodes): it may hold the room up"),
                    None => f.write_str(" (without the hook, or gone): it may hold the room up"),
                }
            }
            Self::NotKnown { rank, pid } => {
                write!(f, "rank {rank}, pid {pid}, is not completely known: it may hold the room up")
            }
            Self::AllStopped { ranks } => {
                write!(
                    f,
                    "all {ranks} ranks of the server stopped within a second: they wait for each other, or for one step"
                )
            }
            Self::StoppedFirst { rank, pid, before_ms } => {
                let seconds = *before_ms as f64 / 1000.0;
                write!(
                    f,
                    "rank {rank}, pid {pid}, made its last pass {seconds:.1} s before any other one: they wait for it"
                )
            }
            Self::GoesOn { rank, pid } => write!(f, "rank {rank}, pid {pid}, goes on making passes"),
        }
    }
}

/// What other ranks have to do with it that this one waits.
pub(super) fn of_ranks(tracked: &Tracked<'_>, cause: Cause, now: Monotonic, evidence: &mut Vec<Evidence>) {
    let Tracked { request, server, .. } = *tracked;
    let Some(ranks) = server.ranks.as_deref() else { return };
    let mut seen = |at, what| evidence.push(Evidence { source: Source::Calls, at, fact: Fact::Ranks { what } });
    if let Some(held) = request.held_by.as_deref() {
        let (rank, pid) = (held.rank, held.request.process.pid);
        let what = RankFact::HoldsUp { rank, pid, phase: held.phase, over_on: held.over_on, cause: held.cause };
        seen(held.since, what);
    }
    let is_unexplained = matches!(cause, Cause::Unknown | Cause::LoopStalled | Cause::HeldByOtherRank);
    if !is_unexplained || !request.is_inflight() {
        return;
    }
    if let Some(rank) = ranks.first_missing {
        seen(request.waiting_since(), RankFact::NotSeen { rank, ranks: ranks.missing, nodes: ranks.nodes });
    }
    for other in ranks.others.iter().filter(|other| !other.is_known) {
        seen(request.waiting_since(), RankFact::NotKnown { rank: other.rank, pid: other.process.pid });
    }
    if let Some(since) = stalled_since(tracked, now) {
        let this = (since, ranks.rank, tracked.key.process.pid);
        for (at, what) in who_stopped(this, ranks, now) {
            seen(at, what);
        }
    }
}

/// Of a rank that stopped: which others did, and who was the first.
fn who_stopped(this: (Monotonic, Rank, u32), ranks: &Ranks, now: Monotonic) -> Vec<(Monotonic, RankFact)> {
    let others = ranks.others.iter().filter_map(|other| Some((other.turned?, other.rank, other.process.pid)));
    let (go_on, stopped): (Vec<_>, Vec<_>) = others.partition(|(turned, ..)| now.since(*turned) < HANGS_AFTER);
    let mut facts: Vec<_> = go_on.into_iter().map(|(at, rank, pid)| (at, RankFact::GoesOn { rank, pid })).collect();
    let mut stopped: Vec<_> = stopped.into_iter().chain([this]).collect();
    stopped.sort_unstable();
    if let [(first, rank, pid), (second, ..), ..] = stopped[..] {
        let before = second.since(first);
        let last = stopped.last().map_or(first, |(last, ..)| *last);
        let is_all = stopped.len() == ranks.others.len() + 1 && ranks.missing == 0;
        if before >= TOGETHER {
            facts.push((first, RankFact::StoppedFirst { rank, pid, before_ms: before.as_millis() as u64 }));
        } else if is_all && last.since(first) < TOGETHER {
            facts.push((first, RankFact::AllStopped { ranks: stopped.len() }));
        }
    }
    facts
}
