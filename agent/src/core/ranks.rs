//! Which schedulers are the ranks of one server. The hook tells ranks and sizes, not the server; the schedulers of a server on
//! a node have one parent: SGLang starts them from its launcher (`Engine._launch_scheduler_processes`), or, with several
//! data-parallel replicas, from one controller.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use crate::{
    event::{Hello, ProcessKey},
    request::tracker::Tracker,
    verdict::ServerIdentity,
};

/// A replica's parent, number and sizes (TP, PP).
type Replica = (ProcessKey, Option<u32>, (u32, u32));

/// The ranks of each server that has more than one, where all of them are seen: as many as it says, each of them once. With
/// context parallelism the ranks cannot be told apart: the hook does not tell that rank.
pub(super) fn groups(identities: &HashMap<ProcessKey, Arc<ServerIdentity>>, tracker: &Tracker) -> Vec<Vec<ProcessKey>> {
    let mut replicas: BTreeMap<Replica, Vec<(ProcessKey, u32, u32)>> = BTreeMap::new();
    for (key, identity) in identities {
        let hello = tracker.server(*key).and_then(|server| server.hello.as_deref());
        if let Some((replica, tp_rank, pp_rank)) = hello.and_then(|hello| place(identity, hello)) {
            replicas.entry(replica).or_default().push((*key, tp_rank, pp_rank));
        }
    }
    let is_whole = |((.., (tp, pp)), ranks): &(Replica, Vec<(ProcessKey, u32, u32)>)| {
        let places: HashSet<(u32, u32)> = ranks.iter().map(|(_, tp, pp)| (*tp, *pp)).collect();
        let size = tp.checked_mul(*pp).and_then(|size| usize::try_from(size).ok());
        size == Some(ranks.len()) && places.len() == ranks.len()
    };
    let keys = |(_, ranks): (Replica, Vec<(ProcessKey, u32, u32)>)| {
        let mut keys: Vec<ProcessKey> = ranks.into_iter().map(|(key, ..)| key).collect();
        // A replay has to see them in the same order.
        keys.sort_unstable();
        keys
    };
    replicas.into_iter().filter(is_whole).map(keys).collect()
}

/// Which replica a scheduler belongs to, and its ranks in it; nothing where it has one rank, or that is not known.
fn place(identity: &ServerIdentity, hello: &Hello) -> Option<(Replica, u32, u32)> {
    let (tp, pp) = (hello.tp?, hello.pp?);
    let has_ranks = (tp > 1 || pp > 1) && hello.cp == Some(1);
    let replica = (identity.parent?, hello.dp_rank, (tp, pp));
    let (tp_rank, pp_rank) = (hello.tp_rank?, hello.pp_rank?);
    (has_ranks && tp_rank < tp && pp_rank < pp).then_some((replica, tp_rank, pp_rank))
}
