//! What a server's own gauge of its inflight queue says, beside what was seen. It speaks for no cause: a number that is named,
//! so that who sees it elsewhere knows what to make of it.

use std::fmt;

use serde::Serialize;

use super::{Evidence, Fact, Source};
use crate::{
    event::clock::Monotonic,
    request::{ServerState, gauge::GaugeCheck, tracker::Tracked},
};

/// A gauge beside the queue. Displays as a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct GaugeFact {
    /// How they compare.
    #[serde(flatten)]
    pub check: GaugeCheck,
    /// What the gauge says.
    pub says: u32,
    /// Requests that the queue was seen to hold.
    pub seen: u32,
    /// Readings in which it said so, one after the other.
    pub readings: u32,
}

impl fmt::Display for GaugeFact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { check, says, seen, readings } = self;
        write!(f, "the server's gauge num_prefill_inflight_queue_reqs says {says} since")?;
        match check {
            GaugeCheck::Agrees => f.write_str(", as the queue was seen to hold"),
            GaugeCheck::Frozen => write!(
                f,
                ", in {readings} readings; the queue was seen to hold {seen}: frozen, it is set at batches only"
            ),
            GaugeCheck::NotRefreshed => f.write_str(
                ", and the queue was seen to be empty: up to 0.5.2 an idle server does not set it anew, so nothing is pinned",
            ),
            GaugeCheck::NotKnown(_) => write!(f, "; the queue was seen to hold {seen}, perhaps at another time"),
        }
    }
}

/// What the gauge says, as evidence about a request that it counts.
pub fn gauge_evidence(tracked: &Tracked<'_>, now: Monotonic) -> Option<Evidence> {
    let since = tracked.server.gauge.read.as_deref().filter(|_| tracked.request.is_inflight())?.since;
    Some(Evidence {
        source: Source::ServerMetrics,
        at: since,
        fact: Fact::ServerGauge(gauge_fact(tracked.server, now)?),
    })
}

/// How a server's own gauge compares with the queue that was seen; nothing where it cannot be told.
pub fn gauge_fact(server: &ServerState, now: Monotonic) -> Option<GaugeFact> {
    let read = server.gauge.read.as_deref()?;
    let (says, (seen, _)) = (read.gauges.prefill_inflight?, server.queue_length?);
    match GaugeCheck::of(server, now) {
        GaugeCheck::NotKnown(_) => None,
        check => Some(GaugeFact { check, says, seen, readings: read.readings }),
    }
}
