//! The ranks of a server as doctor finds them: all of them, or which are missing and what that costs.

use dislodge::{
    core::replicas,
    request::rank::{Rank, Replica},
    target::discover,
};
use serde::Serialize;

use super::server::Server;

/// Missing ranks that are named; the rest is counted.
const MAX_NAMED: usize = 8;

/// The ranks of one data-parallel replica.
#[derive(Debug, Serialize)]
pub(super) struct ReplicaReport {
    /// Those whose schedulers have the hook: rank and process.
    pub(super) ranks: Vec<(Rank, u32)>,
    /// The first of those that are not seen.
    pub(super) missing: Vec<Rank>,
    /// Those beyond.
    pub(super) missing_not_listed: usize,
    /// Over how many nodes the server is spread, where it is.
    pub(super) nodes: Option<u32>,
}

/// The servers of several ranks among these schedulers.
pub(super) fn of(servers: &[Server]) -> Vec<ReplicaReport> {
    let known = servers.iter().filter_map(|server| {
        let key = server.target.key;
        Some((key, discover::parent(key.pid), server.hook.as_ref()?.server.as_ref()))
    });
    replicas(known).into_iter().map(ReplicaReport::from).collect()
}

impl From<Replica> for ReplicaReport {
    fn from(Replica { seen, mut missing, nodes, .. }: Replica) -> Self {
        let mut ranks: Vec<(Rank, u32)> = seen.into_iter().map(|(key, rank)| (rank, key.pid)).collect();
        ranks.sort_unstable();
        let missing_not_listed = missing.len().saturating_sub(MAX_NAMED);
        missing.truncate(MAX_NAMED);
        Self { ranks, missing, missing_not_listed, nodes }
    }
}

/// In lines: what there is, what it means that some is missing, and what to do.
pub(super) fn in_words(replica: &ReplicaReport) -> Vec<String> {
    let seen: Vec<String> = replica.ranks.iter().map(|(rank, pid)| format!("{rank} pid {pid}")).collect();
    let seen = seen.join(", ");
    if replica.missing.is_empty() {
        return vec![format!("ok    {:<16} {seen}", "ranks")];
    }
    let missing: Vec<String> = replica.missing.iter().map(ToString::to_string).collect();
    let more = match replica.missing_not_listed {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let fix = match replica.nodes {
        Some(nodes) => format!("the server is spread over {nodes} nodes, and an agent sees the ranks of its own"),
        None => "the hook has to be in every scheduler of the server".to_owned(),
    };
    vec![
        format!("warn  {:<16} {seen}; not seen: {}{more}", "ranks", missing.join(", ")),
        format!("      {:<16} = nothing is said of what one rank has dropped and another one has", ""),
        format!("      {:<16} → {fix}", ""),
    ]
}

#[cfg(test)]
mod tests {
    use dislodge::event::ProcessKey;

    use super::*;

    fn tp(rank: u32) -> Rank {
        Rank { tp: Some(rank), ..Rank::default() }
    }

    fn words(seen: &[u32], missing: std::ops::Range<u32>, nodes: Option<u32>) -> String {
        let seen = seen.iter().map(|rank| (ProcessKey { pid: 10 + rank, start: 1 }, tp(*rank))).collect();
        let replica = Replica { seen, missing: missing.map(tp).collect(), stages: 1, nodes };
        in_words(&replica.into()).join("\n")
    }

    #[test]
    fn a_server_whose_ranks_are_all_seen_is_said_to_be_well() {
        assert_eq!(words(&[1, 0], 0..0, None), "ok    ranks            TP0 pid 10, TP1 pid 11");
    }

    #[test]
    fn missing_ranks_are_named_with_what_they_cost_and_what_to_do() {
        let text = words(&[0], 1..2, None);
        assert!(text.starts_with("warn  ranks            TP0 pid 10; not seen: TP1\n"), "{text}");
        assert!(text.ends_with("→ the hook has to be in every scheduler of the server"), "{text}");
        let spread = words(&[0], 1..16, Some(2));
        assert!(
            spread.contains("TP8 and 7 more\n") && spread.ends_with("2 nodes, and an agent sees the ranks of its own"),
            "{spread}"
        );
    }
}
