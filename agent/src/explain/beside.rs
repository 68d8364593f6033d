//! What goes on beside a request: its scheduler's passes, and who else has its room.

use std::time::Duration;

use super::{answer::Passes, lines::Origin, state::Times, words};
use crate::{core::Core, event::clock::Monotonic, request::RequestKey};

/// A time without a pass that is told as such. A pass is told each 100 ms; a batch takes seconds at most.
const LONG_GAP: Duration = Duration::from_secs(5);

/// Passes so far.
#[derive(Debug, Default)]
pub(super) struct Counted {
    count: u64,
    longest: Duration,
    least: Option<u32>,
    most: Option<u32>,
    last: Option<Monotonic>,
}

impl Counted {
    /// A pass was told; returns the time since the one before where that is long.
    pub(super) fn take(&mut self, queue_length: u32, at: Monotonic) -> Option<Duration> {
        let gap = self.last.map_or(Duration::ZERO, |last| at.since(last));
        self.count += 1;
        self.longest = self.longest.max(gap);
        self.least = Some(self.least.map_or(queue_length, |least| least.min(queue_length)));
        self.most = self.most.max(Some(queue_length));
        self.last = Some(at);
        (gap >= LONG_GAP).then_some(gap)
    }

    pub(super) fn told(&self, times: &Times<'_>) -> Passes {
        Passes {
            count: self.count,
            longest_gap_seconds: self.longest.as_secs_f64(),
            queue_least: self.least,
            queue_most: self.most,
            last: self.last.map(|at| times.moment(at)),
        }
    }
}

/// Another process that has a request on the same room: another rank of the server where they have one parent, or where
/// that is not known, which both say that they are ranks of as many.
pub(super) fn whose(pid: u32, key: RequestKey, core: &Core) -> (Origin, String) {
    let Some((other, state)) = core.tracker().servers().find(|(key, _)| key.pid == pid) else {
        return (Origin::Peer, format!("pid {pid}"));
    };
    let parent = |process| core.identity(process).and_then(|identity| identity.parent);
    let hello = |process| core.tracker().server(process).and_then(|server| server.hello.as_deref());
    let sizes = |process| hello(process).map(|hello| (hello.tp, hello.pp)).filter(|sizes| *sizes != (Some(1), Some(1)));
    let is_rank = parent(other) == parent(key.process) && sizes(other).is_some() && sizes(other) == sizes(key.process);
    let ranks = state.hello.as_deref().and_then(words::ranks).filter(|_| is_rank);
    let rank = ranks.map(|ranks| (Origin::Ranks, format!("pid {pid} ({ranks})")));
    rank.unwrap_or_else(|| (Origin::Peer, format!("another server, pid {pid}")))
}
