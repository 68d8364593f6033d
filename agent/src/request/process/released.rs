//! Requests that gave their pages back while a transfer of theirs was under way. They have ended; what they did has not:
//! they are kept for a while, for rules to see. Nothing can be done about them any more.

use std::{collections::BTreeMap, time::Duration};

use super::{
    super::{ReleaseProof, Request, RoomState},
    Serials,
};
use crate::{event::clock::Monotonic, record::codec::recorded};

/// For how long they are shown. An alert has to be told, and an agent that is busy to come to it.
const SHOWN_FOR: Duration = Duration::from_secs(60);
/// Of one process; the oldest go first. How many there were is counted in any case.
pub(super) const MAX_RELEASED: usize = 1_024;

#[derive(Debug, Default)]
pub(super) struct Released {
    requests: BTreeMap<u64, Request>,
    /// What is known of a room that is known no more.
    no_room: RoomState,
}

recorded!(struct Released { requests } else { no_room: RoomState::default() });

impl Released {
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn keep(&mut self, request: Request) {
        self.requests.insert(request.serial, request);
        if self.requests.len() > MAX_RELEASED {
            self.requests.pop_first();
        }
    }

    pub(super) fn forget(&mut self, serial: u64) {
        self.requests.remove(&serial);
    }

    /// A transfer of one was read in the server's memory at `at` and was not over. Returns whether that proves what was not
    /// shown before.
    pub(super) fn ran_on(&mut self, serial: u64, at: Monotonic) -> bool {
        let Some(ended) = self.requests.get_mut(&serial).and_then(|request| request.ended.as_mut()) else {
            return false;
        };
        let released_at = ended.at;
        let Some(release) = ended.unsafe_release.as_mut() else { return false };
        let proves = release.proof == ReleaseProof::NotShown && at >= released_at;
        if proves {
            release.proof = ReleaseProof::RanOn { at };
        }
        proves
    }

    /// Those that are shown at `now`, in order.
    pub(super) fn shown(&self, now: Monotonic, serials: Serials) -> impl Iterator<Item = &Request> {
        let is_shown = move |request: &&Request| {
            request.ended.as_ref().is_some_and(|ended| now.since(ended.known_at()) < SHOWN_FOR)
        };
        self.requests.range(serials).map(|(_, request)| request).filter(is_shown)
    }

    /// Forgets those that ended before `before`.
    pub(super) fn prune(&mut self, before: Monotonic) {
        self.requests.retain(|_, request| request.ended.as_ref().is_some_and(|ended| ended.at >= before));
    }

    pub(super) fn no_room(&self) -> &RoomState {
        &self.no_room
    }
}
