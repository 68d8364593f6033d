//! Which schedulers are the ranks of one server. The hook tells ranks and sizes, not the server; the schedulers of a server on
//! a node have one parent: SGLang starts them from its launcher (`Engine._launch_scheduler_processes`), or, with several
//! data-parallel replicas, from one controller.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    event::{Hello, ProcessKey},
    request::rank::{Rank, Replica, Sizes},
};

/// What the ranks of a replica have in common: the process that started them, the number of the replica, its sizes, and what it
/// serves as.
type Common<'a> = (ProcessKey, Option<u32>, Sizes, Option<&'a str>);
/// Its ranks that are seen, and over how many nodes they say that it is spread.
type Seen = (Vec<(ProcessKey, Rank)>, Option<u32>);

/// The replicas among these schedulers (with the parent of each, and what it says of itself) that have more than one rank. One
/// of which two schedulers say that they are the same rank is left out: which of them it is cannot be told. One whose
/// starter is gone is seen alone.
pub fn replicas<'a>(schedulers: impl Iterator<Item = (ProcessKey, Option<ProcessKey>, &'a Hello)>) -> Vec<Replica> {
    let mut replicas: BTreeMap<Common<'a>, Seen> = BTreeMap::new();
    for (key, parent, hello) in schedulers {
        let Some(sizes) = Sizes::of(hello) else { continue };
        let Some(rank) = sizes.rank(hello) else { continue };
        let common = (parent.unwrap_or(key), rank.dp, sizes, hello.role.as_deref());
        let (seen, nodes) = replicas.entry(common).or_default();
        seen.push((key, rank));
        *nodes = (*nodes).max(hello.nodes);
    }
    let replica = |((_, dp, sizes, _), (mut seen, nodes)): (Common<'a>, Seen)| {
        let ranks: BTreeSet<Rank> = seen.iter().map(|(_, rank)| *rank).collect();
        // A replay has to see them in the same order.
        seen.sort_unstable();
        let is_told_apart = ranks.len() == seen.len();
        let missing = sizes.all(dp).filter(|rank| !ranks.contains(rank)).collect();
        is_told_apart.then_some(Replica { seen, missing, stages: sizes.pp, nodes })
    };
    replicas.into_iter().filter_map(replica).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(pid: u32) -> ProcessKey {
        ProcessKey { pid, start: 1 }
    }

    /// A scheduler with these (size, rank): TP, CP, PP, DP.
    fn hello(tp: (u32, u32), cp: (u32, u32), pp: (u32, u32), dp: (u32, u32)) -> Hello {
        let pair = |(size, rank)| (Some(size), Some(rank));
        let ((tp, tp_rank), (cp, cp_rank), (pp, pp_rank), (dp, dp_rank)) = (pair(tp), pair(cp), pair(pp), pair(dp));
        Hello { tp, tp_rank, cp, cp_rank, pp, pp_rank, dp, dp_rank, ..Hello::default() }
    }

    fn found(schedulers: &[(u32, u32, Hello)]) -> Vec<(Vec<String>, Vec<String>)> {
        let schedulers = schedulers.iter().map(|(pid, parent, hello)| (key(*pid), Some(key(*parent)), hello));
        let names = |ranks: Vec<Rank>| ranks.iter().map(Rank::to_string).collect();
        let seen = |replica: &Replica| replica.seen.iter().map(|(_, rank)| *rank).collect::<Vec<_>>();
        replicas(schedulers).into_iter().map(|it| (names(seen(&it)), names(it.missing))).collect()
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    const ONE: (u32, u32) = (1, 0);

    #[test]
    fn tp_cp_and_pp_ranks_of_one_parent_are_one_replica() {
        let mut schedulers = Vec::new();
        for (pid, (tp, cp, pp)) in
            (10..).zip([(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)])
        {
            schedulers.push((pid, 9, hello((2, tp), (2, cp), (2, pp), ONE)));
        }
        let seen = [
            "PP0_ATTN_CP0_TP0",
            "PP0_ATTN_CP0_TP1",
            "PP0_ATTN_CP1_TP0",
            "PP0_ATTN_CP1_TP1",
            "PP1_ATTN_CP0_TP0",
            "PP1_ATTN_CP0_TP1",
            "PP1_ATTN_CP1_TP0",
        ];
        assert_eq!(found(&schedulers), [(names(&seen), names(&["PP1_ATTN_CP1_TP1"]))]);
    }

    #[test]
    fn replicas_of_one_controller_and_servers_of_different_launchers_are_apart() {
        let of = |tp: u32, dp: u32| hello((2, tp), ONE, ONE, (2, dp));
        let schedulers = [(1, 9, of(0, 0)), (2, 9, of(1, 0)), (3, 9, of(0, 1)), (4, 9, of(1, 1)), (5, 8, of(1, 1))];
        let whole = |dp: u32| (vec![format!("DP{dp}_TP0"), format!("DP{dp}_TP1")], Vec::new());
        let other = (names(&["DP1_TP1"]), names(&["DP1_TP0"]));
        assert_eq!(found(&schedulers), [other, whole(0), whole(1)]);
    }

    #[test]
    fn a_prefill_and_a_decode_of_one_parent_are_apart() {
        let of = |tp: u32, role: &str| Hello { role: Some(role.to_owned()), ..hello((2, tp), ONE, ONE, ONE) };
        let schedulers = [(1, 9, of(0, "prefill")), (2, 9, of(1, "decode"))];
        assert_eq!(found(&schedulers).len(), 2);
    }

    #[test]
    fn a_server_of_one_rank_or_of_unknown_or_impossible_ones_is_no_replica() {
        let of = |tp: (u32, u32)| hello(tp, ONE, ONE, ONE);
        let unknown = Hello { cp_rank: None, ..hello(ONE, (2, 0), ONE, ONE) };
        for hello in [of((1, 0)), of((0, 0)), of((2, 2)), of((u32::MAX, 1)), of((5_000, 1)), unknown, Hello::default()]
        {
            assert_eq!(found(&[(1, 9, hello)]), []);
        }
        let huge = hello((u32::MAX, 1), (u32::MAX, 1), (u32::MAX, 1), ONE);
        assert_eq!(found(&[(1, 9, huge)]), []);
    }

    #[test]
    fn two_schedulers_that_say_they_are_the_same_rank_are_not_compared() {
        let of = |tp: u32| hello((2, tp), ONE, ONE, ONE);
        assert_eq!(found(&[(1, 9, of(0)), (2, 9, of(0)), (3, 9, of(1))]), []);
    }

    #[test]
    fn ranks_whose_starter_is_gone_are_seen_alone() {
        let (first, second) = (hello((2, 0), ONE, ONE, ONE), hello((2, 1), ONE, ONE, ONE));
        let found = replicas([(key(1), None, &first), (key(2), None, &second)].into_iter());
        assert_eq!(found.iter().map(|it| (it.seen.len(), it.missing.len())).collect::<Vec<_>>(), [(1, 1), (1, 1)]);
    }
}
