//! Whether the ranks of a server have dropped different requests, and whether that is what they hang for.
//!
//! Ranks whose polls are reduced together drop a request in the same pass, right after their collective has given all of them
//! the same polls; stages do so a microbatch apart (`request::rank`). One that keeps what another has dropped gives the next
//! collective something else than the others do, or enters one that they never enter: it hangs, and the rest with it, for as
//! long as the collective waits (an hour, sglang#34572).

use std::time::Duration;

use super::stalled::stalled_since;
use crate::{
    event::{Room, clock::Monotonic},
    request::{
        rank::{Difference, DroppedBy},
        tracker::Tracked,
    },
};

/// A rank that makes no pass for so long, and has not dropped what another one dropped in the same pass, hangs. Between its
/// polls and its drop there is no batch to run or kernel to compile, but it may be held up by the machine.
pub(super) const HANGS_AFTER: Duration = Duration::from_secs(10);
/// A stage that has not passed on since another one dropped a request may run a batch, whose kernels are compiled. SGLang's
/// own watchdog ends that (`--watchdog-timeout`, 300 s unless set).
const BATCH_ENDS_WITHIN: Duration = Duration::from_secs(300);
/// How far stages that agree may be apart: one that has made a pass so long after another one dropped a request has had its
/// turn to drop it.
const LAGS_WITHIN: Duration = Duration::from_secs(1);

/// The room of a request on which the ranks of this one's server differ: its own, where this rank keeps it for good; any, where
/// the rank makes no pass any more since.
///
/// Never while a rank is paused. A stage that compiles a kernel makes no pass either, so that alone is no divergence.
pub(super) fn diverges(tracked: &Tracked<'_>, now: Monotonic) -> Option<Room> {
    let Tracked { request, server, .. } = *tracked;
    let ranks = server.ranks.as_deref().filter(|ranks| !ranks.paused)?;
    if request.ended.is_some() {
        return None;
    }
    if request.dropped_by.as_deref().is_some_and(|by| keeps(by, tracked, now)) {
        return Some(request.room);
    }
    let stalled = now.since(stalled_since(tracked, now)?);
    let passed_on = |at: Monotonic| server.turned.is_some_and(|turned| turned >= at.plus(LAGS_WITHIN));
    let explains = |it: &Difference| it.is_settled || it.is_reduced || passed_on(it.at) || stalled >= BATCH_ENDS_WITHIN;
    ranks.differ.filter(explains).map(|it| it.room)
}

/// Whether this rank will not drop what another one has dropped.
fn keeps(by: &DroppedBy, Tracked { server, .. }: &Tracked<'_>, now: Monotonic) -> bool {
    let stands_since = server.turned.map(|turned| turned.max(by.at));
    let hangs = by.is_reduced && !server.paused && stands_since.is_some_and(|since| now.since(since) >= HANGS_AFTER);
    by.is_settled(server.passes, server.turned) || hangs
}
