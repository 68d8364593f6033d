//! Warm-ups and health checks: requests to SGLang's fake bootstrap host, which have a `FakeKVSender` on any backend
//! (`disaggregation/fake/conn.py`). It transfers nothing: it polls Success in the pass after its last `send()`. 0.5.11 to 0.5.20
//! never call `send()` for a last chunk without pages, and it polls WaitingForInput for ever.

use std::time::Duration;

use crate::request::tracker::Tracked;

/// How long it may be polled in the queue: many passes, whatever the scheduler has to do besides.
pub(super) const ENDS_WITHIN: Duration = Duration::from_secs(10);

/// Whether the request of a fake sender was polled in the inflight queue for so long that it never ends. Passes count, not
/// time: a scheduler that compiles its first kernels polls nobody.
pub(super) fn is_pinned(tracked: &Tracked<'_>) -> bool {
    let Tracked { request, server, .. } = *tracked;
    let entered = request.entered.filter(|_| request.is_inflight());
    let polled = server.queue_length.map(|(_, passed)| passed);
    entered.zip(polled).is_some_and(|(entered, polled)| polled >= entered.plus(ENDS_WITHIN))
}
