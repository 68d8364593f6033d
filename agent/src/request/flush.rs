//! When NIXL's transfers are over on the wire, whether or not anybody asks NIXL.
//!
//! NIXL's UCX plugin posts a transfer in ranges of descriptors, each followed by a flush of the endpoint; when the flush has
//! completed, everything before it has. The completion comes from UCX's progress thread: it needs nobody who polls the
//! handle, and it comes for a handle that was released in progress too. (NIXL 0.5.1 to 1.5.1, `nixlUcxEngine::sendXferRange`;
//! earlier releases are not seen this way.)

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use crate::{
    event::{clock::Monotonic, native::Flush},
    record::codec::recorded,
};

/// Where UCX's flush requests have their completion, counted back from the request that the caller got: 0x80 in the
/// wheels of NIXL 0.8.0 to 1.5.1, 0x78 in those of 0.3.1 to 0.7.1.
const REQUEST_BEHIND_COMPLETION: [u64; 2] = [0x80, 0x78];
/// Completions that came before the flush that they belong to was told of: another thread may be that quick.
const MAX_EARLY: usize = 256;

/// What a transfer's flushes say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WireEnd {
    /// Everything arrived.
    Done,
    /// The endpoint failed: what was not done by then is not done any more.
    Failed {
        /// `ucs_status_t`.
        status: i8,
    },
}

/// The flushes of a process's transfers. A transfer is known by its generation.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    lists: HashMap<u64, u64>,
    requests: HashMap<u64, u64>,
    transfers: HashMap<u64, Progress>,
    early: VecDeque<(u64, i8, Monotonic)>,
}

#[derive(Debug)]
struct Progress {
    lists: [u64; 2],
    descriptors: u64,
    posted: u64,
    returned: bool,
    under_way: u32,
    failure: Option<i8>,
}

recorded!(struct Flushes { lists, requests, transfers, early });
recorded!(struct Progress { lists, descriptors, posted, returned, under_way, failure });

impl Flushes {
    /// A transfer of so many descriptors is being posted; its descriptors are listed at one of `lists`.
    pub(super) fn posting(&mut self, generation: u64, descriptors: u64, lists: [u64; 2]) {
        if descriptors == 0 {
            return;
        }
        self.forget(generation);
        for list in lists {
            if list != 0 {
                self.lists.insert(list, generation);
            }
        }
        let progress = Progress { lists, descriptors, posted: 0, returned: false, under_way: 0, failure: None };
        self.transfers.insert(generation, progress);
    }

    /// The call that posted a transfer has returned: by then all its ranges were posted (LAYOUTS.md), which may be fewer
    /// descriptors than it was made of, since NIXL merges neighbours. Returns the transfer and its end, when it is over with that.
    pub(super) fn returned(&mut self, generation: u64) -> Option<(u64, WireEnd)> {
        self.transfers.get_mut(&generation)?.returned = true;
        self.end(generation)
    }

    /// A range was posted. Returns the transfer and its end, when it is over with that.
    pub(super) fn range_posted(
        &mut self,
        list: u64,
        flush: Flush,
        descriptors: u64,
        at: Monotonic,
        took: Duration,
    ) -> Option<(u64, WireEnd)> {
        let generation = *self.lists.get(&list)?;
        let progress = self.transfers.get_mut(&generation)?;
        progress.posted = progress.posted.saturating_add(descriptors);
        match flush {
            Flush::Done => {}
            Flush::Failed { status } => progress.failure = Some(status),
            Flush::UnderWay { request } => match self
                .early
                .iter()
                .position(|(completion, _, when)| is_of(request, *completion) && at.since(*when) <= took)
            {
                Some(place) => {
                    let status = self.early.remove(place).map_or(0, |(_, status, _)| status);
                    if status != 0 {
                        progress.failure = Some(status);
                    }
                }
                None => {
                    progress.under_way = progress.under_way.saturating_add(1);
                    self.requests.insert(request, generation);
                }
            },
        }
        self.end(generation)
    }

    /// A flush completed. Returns the transfer and its end, when it is over with that.
    pub(super) fn flushed(&mut self, completion: u64, status: i8, at: Monotonic) -> Option<(u64, WireEnd)> {
        let request = REQUEST_BEHIND_COMPLETION
            .iter()
            .map(|offset| completion.wrapping_add(*offset))
            .find(|request| self.requests.contains_key(request));
        let Some(generation) = request.and_then(|request| self.requests.remove(&request)) else {
            if self.early.len() >= MAX_EARLY {
                self.early.pop_front();
            }
            self.early.push_back((completion, status, at));
            return None;
        };
        let progress = self.transfers.get_mut(&generation)?;
        progress.under_way = progress.under_way.saturating_sub(1);
        if status != 0 {
            progress.failure = Some(status);
        }
        self.end(generation)
    }

    /// Whether a flush of a transfer is out: its end is seen when it comes.
    pub(super) fn is_under_way(&self, generation: u64) -> bool {
        self.transfers.get(&generation).is_some_and(|progress| progress.under_way > 0)
    }

    /// A transfer is posted anew, or not kept any more: what its flushes say does not matter.
    pub(super) fn forget(&mut self, generation: u64) {
        if let Some(progress) = self.transfers.remove(&generation) {
            for list in progress.lists {
                if self.lists.get(&list) == Some(&generation) {
                    self.lists.remove(&list);
                }
            }
            if progress.under_way > 0 {
                self.requests.retain(|_, other| *other != generation);
            }
        }
    }

    fn end(&mut self, generation: u64) -> Option<(u64, WireEnd)> {
        let progress = self.transfers.get(&generation)?;
        let all_posted = progress.posted >= progress.descriptors || (progress.returned && progress.posted > 0);
        if !all_posted || progress.under_way > 0 {
            return None;
        }
        let end = progress.failure.map_or(WireEnd::Done, |status| WireEnd::Failed { status });
        self.forget(generation);
        Some((generation, end))
    }
}

fn is_of(request: u64, completion: u64) -> bool {
    REQUEST_BEHIND_COMPLETION.iter().any(|offset| completion.wrapping_add(*offset) == request)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: u64 = 0x1010;
    const REQUEST: u64 = 0x9080;
    const COMPLETION: u64 = 0x9000;

    fn at(microseconds: u64) -> Monotonic {
        Monotonic(microseconds * 1_000)
    }

    fn took(microseconds: u64) -> Duration {
        Duration::from_micros(microseconds)
    }

    fn flush(request: u64) -> Flush {
        Flush::UnderWay { request }
    }

    fn posted(descriptors: u64) -> Flushes {
        let mut flushes = Flushes::default();
        flushes.posting(7, descriptors, [LIST, 0x5000]);
        flushes
    }

    #[test]
    fn a_transfer_is_over_when_the_flush_behind_its_last_range_is() {
        let mut flushes = posted(1500);
        assert_eq!(flushes.range_posted(LIST, flush(REQUEST), 1024, at(2), took(1)), None);
        assert_eq!(flushes.flushed(COMPLETION, 0, at(3)), None, "476 descriptors are not posted yet");
        assert_eq!(flushes.range_posted(LIST, flush(REQUEST), 476, at(4), took(1)), None);
        assert_eq!(flushes.flushed(COMPLETION, 0, at(5)), Some((7, WireEnd::Done)));
        assert_eq!(flushes.flushed(COMPLETION, 0, at(6)), None, "the request is another one's by now");
    }

    #[test]
    fn of_a_transfer_whose_neighbours_were_merged_all_is_posted_when_the_call_has_returned() {
        let mut flushes = posted(1024);
        assert_eq!(flushes.range_posted(LIST, flush(REQUEST), 4, at(2), took(1)), None);
        assert_eq!(flushes.returned(7), None, "the flush is under way");
        assert_eq!(flushes.flushed(COMPLETION, 0, at(3)), Some((7, WireEnd::Done)));

        let mut flushes = posted(1024);
        assert_eq!(flushes.range_posted(LIST, flush(REQUEST), 4, at(2), took(1)), None);
        assert_eq!(flushes.flushed(COMPLETION, 0, at(3)), None, "another range may follow");
        assert_eq!(flushes.returned(7), Some((7, WireEnd::Done)));
        assert_eq!(posted(1024).returned(7), None, "of this one no range was seen");
    }

    #[test]
    fn both_layouts_of_the_request_and_both_places_of_the_list_are_known() {
        for (list, request) in [(LIST, 0x9080), (LIST, 0x9078), (0x5000, 0x9080)] {
            let mut flushes = posted(1);
            assert_eq!(flushes.range_posted(list, flush(request), 1, at(2), took(1)), None);
            assert_eq!(flushes.flushed(COMPLETION, 0, at(3)), Some((7, WireEnd::Done)), "{list:x} {request:x}");
        }
    }

    #[test]
    fn a_failed_flush_is_the_end_too_and_says_why() {
        let mut flushes = posted(2);
        assert_eq!(flushes.range_posted(LIST, flush(REQUEST), 1, at(2), took(1)), None);
        assert_eq!(flushes.range_posted(LIST, flush(0xa080), 1, at(2), took(1)), None);
        assert_eq!(flushes.flushed(COMPLETION, -25, at(3)), None);
        assert_eq!(flushes.flushed(0xa000, 0, at(3)), Some((7, WireEnd::Failed { status: -25 })));
    }

    #[test]
    fn a_flush_that_had_nothing_to_wait_for_is_over_at_once() {
        assert_eq!(posted(1).range_posted(LIST, Flush::Done, 1, at(2), took(1)), Some((7, WireEnd::Done)));
        let failed = Flush::Failed { status: -3 };
        assert_eq!(posted(1).range_posted(LIST, failed, 1, at(2), took(1)), Some((7, WireEnd::Failed { status: -3 })));
    }

    #[test]
    fn a_completion_that_overtakes_its_flush_counts_and_an_older_one_of_the_same_request_does_not() {
        let mut flushes = posted(1);
        assert_eq!(flushes.flushed(COMPLETION, 0, at(90)), None);
        assert_eq!(flushes.range_posted(LIST, flush(REQUEST), 1, at(100), took(20)), Some((7, WireEnd::Done)));
        let mut flushes = posted(1);
        assert_eq!(flushes.flushed(COMPLETION, 0, at(70)), None, "somebody else's");
        assert_eq!(flushes.range_posted(LIST, flush(REQUEST), 1, at(100), took(20)), None);
        assert_eq!(flushes.flushed(COMPLETION, 0, at(101)), Some((7, WireEnd::Done)));
    }

    #[test]
    fn what_is_not_known_changes_nothing() {
        let mut flushes = posted(1);
        assert_eq!(flushes.range_posted(0x7777, flush(REQUEST), 1, at(2), took(1)), None);
        assert_eq!(flushes.flushed(COMPLETION, 0, at(3)), None);
        flushes.forget(7);
        assert_eq!(flushes.range_posted(LIST, Flush::Done, 1, at(4), took(1)), None);
        for n in 0..1_000 {
            assert_eq!(flushes.flushed(n, 0, at(5)), None);
        }
        assert!(flushes.early.len() <= MAX_EARLY && flushes.lists.is_empty() && flushes.requests.is_empty());
    }
}
