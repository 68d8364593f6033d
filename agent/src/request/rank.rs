//! The ranks of one server: which there are, which of them are seen here, and how they compare.
//!
//! `poll()` of the requests in the inflight queue is MIN-reduced over the attention TP and CP groups of one replica and stage
//! (`poll_and_all_reduce_attn_cp_tp_group`, `disaggregation/utils.py`), and stages drop what all of them poll as over
//! (`_pp_pd_get_prefill_transferred_ids`, `managers/scheduler_pp_mixin.py`; both SGLang 0.5.10 to 0.5.23). So one rank on which
//! a request is not over holds it up on all, and what one rank does alone puts it out of step.

use std::{fmt, time::Duration};

use serde::Serialize;

use crate::{
    diagnose::Cause,
    event::{Hello, Phase, ProcessKey, Room, clock::Monotonic},
    record::codec::recorded,
    request::RequestKey,
};

/// Which rank a scheduler is. A dimension of which the server has one only is left out. Displays as SGLang's process titles
/// have it, `PP0_TP1`; TP and CP are those of attention, which title their scheduler differently with data-parallel attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank {
    /// The data-parallel replica.
    pub dp: Option<u32>,
    /// The pipeline stage.
    pub pp: Option<u32>,
    /// In the attention CP group.
    pub cp: Option<u32>,
    /// In the attention TP group.
    pub tp: Option<u32>,
}

impl Rank {
    /// Whether a rank's polls are reduced together with the other one's, when both are of one replica.
    pub fn is_reduced_with(self, other: Self) -> bool {
        self.pp == other.pp
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dimensions = [("DP", self.dp), ("PP", self.pp), ("ATTN_CP", self.cp), ("TP", self.tp)];
        let mut told = dimensions.into_iter().filter_map(|(name, rank)| Some((name, rank?)));
        if let Some((name, rank)) = told.next() {
            write!(f, "{name}{rank}")?;
        }
        told.try_for_each(|(name, rank)| write!(f, "_{name}{rank}"))
    }
}

impl Serialize for Rank {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The ranks of one replica: all that drop the same requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Those that are seen, in the order of their keys.
    pub seen: Vec<(ProcessKey, Rank)>,
    /// Those that are not: of a server on several nodes, or without the hook, or gone.
    pub missing: Vec<Rank>,
    /// Pipeline stages.
    pub stages: u32,
    /// Over how many nodes the server is spread, where it is.
    pub nodes: Option<u32>,
}

/// What a rank knows of the others of its replica, as of the last tick.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranks {
    /// Which it is.
    pub rank: Rank,
    /// The others that are seen.
    pub others: Vec<OtherRank>,
    /// The first that is not.
    pub first_missing: Option<Rank>,
    /// How many are not.
    pub missing: u32,
    /// Over how many nodes the server is spread, where it is.
    pub nodes: Option<u32>,
    /// Whether one of them is paused: all of them are then, or will be in a moment.
    pub paused: bool,
    /// The first request on which the ranks differ.
    pub differ: Option<Difference>,
}

/// Another rank of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherRank {
    /// Its process.
    pub process: ProcessKey,
    /// Which it is.
    pub rank: Rank,
    /// Whether everything that lives there is known.
    pub is_known: bool,
    /// When its loop last showed that it turns.
    pub turned: Option<Monotonic>,
}

/// A request that one rank has dropped and another one has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Difference {
    /// When it was dropped.
    pub at: Monotonic,
    /// Its room.
    pub room: Room,
    /// Whether the polls of the two ranks are reduced together: they drop a request in the same pass then.
    pub is_reduced: bool,
    /// Whether the rank that has it has polled on for so long that it will not drop it.
    pub is_settled: bool,
}

/// A request that left the queue of one rank of a server and not of another: every rank has to drop the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DroppedBy {
    /// When it left.
    pub at: Monotonic,
    /// Whose queue.
    pub process: ProcessKey,
    /// Which rank that is.
    pub rank: Rank,
    /// Whether the two ranks' polls are reduced together.
    pub is_reduced: bool,
    /// Passes that the rank which has it still had made when that was noticed.
    pub passes: u64,
    /// Passes after which a rank that is in step has dropped it too.
    pub drops_within: u64,
}

/// Another rank of the replica on which a request, over on its own, is not over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldBy {
    /// The request there.
    pub request: RequestKey,
    /// Which rank that is.
    pub rank: Rank,
    /// What `poll()` returns there; nothing where it was not polled yet.
    pub phase: Option<Phase>,
    /// Since when.
    pub since: Monotonic,
    /// On how many ranks it is over.
    pub over_on: u32,
    /// What is diagnosed there.
    pub cause: Option<Cause>,
}

recorded!(struct Rank { dp, pp, cp, tp });
recorded!(struct Ranks { rank, others, first_missing, missing, nodes, paused, differ });
recorded!(struct OtherRank { process, rank, is_known, turned });
recorded!(struct Difference { at, room, is_reduced, is_settled });
recorded!(struct DroppedBy { at, process, rank, is_reduced, passes, drops_within });
recorded!(struct HeldBy { request, rank, phase, since, over_on } else { cause: None });

/// How long ranks whose polls are reduced together may take to drop the same request: they do in one pass.
const REDUCED_SETTLE_WITHIN: Duration = Duration::from_secs(1);
/// How long stages may: a microbatch takes seconds at most, and clocks of stages were seen to differ by less than one
/// (sglang#20485).
const STAGES_SETTLE_WITHIN: Duration = Duration::from_secs(5);

impl DroppedBy {
    /// Whether the rank that has the request still, and has made so many passes, the last one then, will not drop it any more.
    pub fn is_settled(&self, passes: u64, turned: Option<Monotonic>) -> bool {
        let within = if self.is_reduced { REDUCED_SETTLE_WITHIN } else { STAGES_SETTLE_WITHIN };
        let has_polled = passes.saturating_sub(self.passes) >= self.drops_within;
        has_polled && turned.is_some_and(|turned| turned >= self.at.plus(within))
    }
}

/// More ranks than any server has: what says that it has more is not believed.
const MAX_RANKS: u32 = 4_096;

/// A replica's sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Sizes {
    pub(crate) tp: u32,
    pub(crate) cp: u32,
    pub(crate) pp: u32,
}

impl Sizes {
    /// Sizes of a server with more than one rank, as far as that is known and can be.
    pub(crate) fn of(hello: &Hello) -> Option<Self> {
        let sizes = Self { tp: hello.tp?, cp: hello.cp?, pp: hello.pp? };
        let ranks = sizes.tp.checked_mul(sizes.cp)?.checked_mul(sizes.pp)?;
        (2..=MAX_RANKS).contains(&ranks).then_some(sizes)
    }

    /// The rank that a server says it is; nothing where it does not say, or cannot be.
    pub(crate) fn rank(self, hello: &Hello) -> Option<Rank> {
        let of = |size: u32, rank: Option<u32>| match (size, rank) {
            (1, _) => Some(None),
            (_, rank) => rank.filter(|rank| *rank < size).map(Some),
        };
        Some(Rank {
            dp: hello.dp_rank.filter(|_| hello.dp.is_some_and(|dp| dp > 1)),
            pp: of(self.pp, hello.pp_rank)?,
            cp: of(self.cp, hello.cp_rank)?,
            tp: of(self.tp, hello.tp_rank)?,
        })
    }

    /// Every rank of a replica.
    pub(crate) fn all(self, dp: Option<u32>) -> impl Iterator<Item = Rank> {
        let ranks = |size: u32| (0..size).map(move |rank| (size > 1).then_some(rank));
        ranks(self.pp).flat_map(move |pp| {
            ranks(self.cp).flat_map(move |cp| ranks(self.tp).map(move |tp| Rank { dp, pp, cp, tp }))
        })
    }
}
