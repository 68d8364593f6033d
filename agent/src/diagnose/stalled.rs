//! Whether the scheduler's loop turns.
//!
//! The hook marks a `pass` each 100 ms while it does: `process_disagg_prefill_inflight_queue` runs in each turn, with an empty
//! queue too (SGLang 0.5.10 to 0.5.23, `disaggregation/prefill.py`, `managers/scheduler_pp_mixin.py`; older ones only with a
//! queue that is not), and an idle scheduler that sleeps is woken each second (`IdleSleeper.maybe_sleep`). Between two passes
//! lies at most one batch: its forward, and whatever is compiled for it.

use std::time::Duration;

use crate::{
    event::clock::Monotonic,
    request::{ends::Side, tracker::Tracked},
};

/// A batch is one chunk of a prefill (8,192 tokens unless set: some seconds), or a whole prompt where chunking is off, which
/// takes a minute for the longest. A kernel that is compiled for a first batch takes minutes; then this is called a stall
/// though it ends: a rule has to wait longer than the server's own watchdog (`--watchdog-timeout`, 300 s), which ends the
/// process when one batch takes so long.
pub(super) const PASSES_WITHIN: Duration = Duration::from_secs(60);

/// Since when the scheduler of this request has made no pass, if that is a stall. Never while it is paused, nor where it was
/// never seen to make one, nor with an empty queue: nobody waits for a pass then.
pub(super) fn stalled_since(tracked: &Tracked<'_>, now: Monotonic) -> Option<Monotonic> {
    let Tracked { request, server, .. } = *tracked;
    let has_queue = match request.side() {
        // Who came or left since the last pass that was marked counts.
        Side::Prefill => server.inflight > 0,
        Side::Decode => request.is_inflight() || server.queue_length.is_some_and(|(length, _)| length > 0),
    };
    let lives = request.ended.is_none();
    server.turned.filter(|turned| lives && has_queue && !server.paused && now.since(*turned) >= PASSES_WITHIN)
}
