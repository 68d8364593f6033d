//! Whether the ranks of a server have dropped different requests.
//!
//! `poll()` is MIN-reduced over the attention TP and CP groups, and pipeline stages drop what all of them agree on
//! (`poll_and_all_reduce_attn_cp_tp_group`, `_pp_pd_get_prefill_transferred_ids`): ranks drop a request in the same pass, or
//! stages a microbatch apart. One that keeps what another has dropped waits in a collective that the other never enters.

use std::time::Duration;

use super::stalled::stalled_since;
use crate::{
    event::{Room, clock::Monotonic},
    request::tracker::Tracked,
};

/// How long a rank goes on polling what another one has dropped before that is a divergence. A microbatch takes seconds at
/// most; clocks of stages were seen to differ by less than one (sglang#20485).
pub(super) const SETTLES_WITHIN: Duration = Duration::from_secs(5);

/// How far stages that agree may be apart: a rank that has made a pass so long after another one dropped a request has had its
/// turn to drop it.
const LAGS_WITHIN: Duration = Duration::from_secs(1);
/// A pass in which a kernel is compiled may take so long: then SGLang's own watchdog ends the process.
const LONGEST_PASS: Duration = Duration::from_secs(300);

/// The room of a request on which the ranks of this one's server differ: its own, where this rank has polled it for long since
/// another one dropped it; any, where the rank makes no pass any more: it hangs in a collective, whoever waits with it.
///
/// A stage that compiles a kernel makes no pass either, so that alone is no divergence before it is a stall; and where it has
/// made none since another stage dropped the request, it may still do the same, until its watchdog would have ended it. The ranks
/// of a tensor-parallel group drop it in one pass, between two collectives.
pub(super) fn diverges(tracked: &Tracked<'_>, now: Monotonic) -> Option<Room> {
    let Tracked { request, server, .. } = *tracked;
    if request.ended.is_some() {
        return None;
    }
    if let Some(turned) = stalled_since(tracked, now) {
        let has_stages = server.hello.as_deref().and_then(|hello| hello.pp).is_some_and(|stages| stages > 1);
        let may_follow =
            |at: Monotonic| has_stages && turned < at.plus(LAGS_WITHIN) && now.since(turned) < LONGEST_PASS;
        return server.ranks_differ.filter(|(at, _)| !may_follow(*at)).map(|(_, room)| room);
    }
    let polled_since = |at: Monotonic| server.turned.is_some_and(|turned| turned >= at.plus(SETTLES_WITHIN));
    request.dropped_by.as_deref().filter(|dropped| polled_since(dropped.at)).map(|_| request.room)
}
