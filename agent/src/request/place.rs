//! On which side a request is, and in which queue.

use serde::Serialize;

use super::{Request, ends::Side};
use crate::{
    event::{Backend, Phase, Room, clock::Monotonic, receiver::DecodeQueue},
    record::codec::recorded,
};

impl Side {
    /// The queues that a request of this side can be in.
    pub fn queues(self) -> [Queue; 3] {
        match self {
            Self::Prefill => [Queue::None, Queue::Bootstrap, Queue::Inflight],
            Self::Decode => [Queue::None, Queue::Prealloc, Queue::Transfer],
        }
    }
}

/// The queue that a request is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Queue {
    /// None of these: it is computed, or waits for that, or for its end.
    None,
    /// Of a prefill: its bootstrap is not done.
    Bootstrap,
    /// Of a prefill: the inflight queue.
    Inflight,
    /// Of a decode: `DecodePreallocQueue`.
    Prealloc,
    /// Of a decode: `DecodeTransferQueue`.
    Transfer,
}

impl Queue {
    /// Every queue.
    pub const ALL: [Self; 5] = [Self::None, Self::Bootstrap, Self::Inflight, Self::Prealloc, Self::Transfer];

    /// Its name in rules, labels and output.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Bootstrap => "bootstrap",
            Self::Inflight => "inflight",
            Self::Prealloc => "prealloc",
            Self::Transfer => "transfer",
        }
    }
}

/// Where a decode server has a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receiving {
    /// In which queue, if in one.
    pub queue: Option<DecodeQueue>,
    /// Since when.
    pub since: Monotonic,
}

recorded!(struct Receiving { queue, since });

impl Request {
    /// A receiver of a decode that has just been created, at `at`: it is in no queue yet.
    pub fn received(serial: u64, room: Room, backend: Backend, at: Monotonic) -> Self {
        Self { receiving: Some(Receiving { queue: None, since: at }), ..Self::opened(serial, room, backend, at) }
    }

    /// The side that it is on here.
    pub fn side(&self) -> Side {
        if self.receiving.is_some() { Side::Decode } else { Side::Prefill }
    }

    /// The queue that it is in.
    pub fn queue(&self) -> Queue {
        if self.ended.is_some() {
            return Queue::None;
        }
        match self.receiving.map(|receiving| receiving.queue) {
            Some(Some(DecodeQueue::Prealloc)) => Queue::Prealloc,
            Some(Some(DecodeQueue::Transfer)) => Queue::Transfer,
            Some(None) => Queue::None,
            None if self.entered.is_some() => Queue::Inflight,
            None if self.phase.is_none_or(|phase| phase == Phase::Bootstrapping) => Queue::Bootstrap,
            None => Queue::None,
        }
    }

    /// Whether the scheduler polls it in a queue, so that a `leave` will tell its end.
    pub fn is_queued(&self) -> bool {
        matches!(self.queue(), Queue::Inflight | Queue::Prealloc | Queue::Transfer)
    }

    /// Since when it waits: for its queue to let it go, or for its bootstrap. On a decode that waits for memory, since it does.
    pub fn waiting_since(&self) -> Monotonic {
        let Some(receiving) = self.receiving.filter(|receiving| receiving.queue.is_some()) else {
            return self.entered.unwrap_or(self.created);
        };
        if self.waits_for_memory() { self.phase_since.max(receiving.since) } else { receiving.since }
    }

    /// Whether a decode knows its prefill and has not told it where to write: it waits for a slot, a metadata buffer or KV
    /// memory (`DecodePreallocQueue.pop_preallocated`).
    pub fn waits_for_memory(&self) -> bool {
        let is_known = self.phase == Some(Phase::WaitingForInput);
        self.queue() == Queue::Prealloc && is_known && self.sent_chunks == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn the_clock_of_a_decode_starts_where_its_waiting_starts() {
        let at = |seconds: u64| Monotonic(seconds * 1_000_000_000);
        let mut request = Request::received(1, Room::Number(7), Backend::Nixl, at(1));
        assert_eq!((request.side(), request.queue(), request.waiting_since()), (Side::Decode, Queue::None, at(1)));
        request.receiving = Some(Receiving { queue: Some(DecodeQueue::Prealloc), since: at(2) });
        (request.phase, request.phase_since) = (Some(Phase::Bootstrapping), at(3));
        assert_eq!((request.queue(), request.waiting_since()), (Queue::Prealloc, at(2)), "for the prefill");
        (request.phase, request.phase_since) = (Some(Phase::WaitingForInput), at(200));
        assert_eq!((request.waits_for_memory(), request.waiting_since()), (true, at(200)), "for memory");
        request.receiving = Some(Receiving { queue: Some(DecodeQueue::Transfer), since: at(400) });
        request.sent_chunks = 1;
        assert_eq!((request.queue(), request.waiting_since()), (Queue::Transfer, at(400)), "for its pages");
    }

    #[test]
    fn a_prefill_s_request_is_in_its_bootstrap_until_it_polls_something_else() {
        let mut request = Request::opened(1, Room::Number(7), Backend::Nixl, Monotonic(1));
        assert_eq!((request.side(), request.queue()), (Side::Prefill, Queue::Bootstrap));
        request.phase = Some(Phase::Bootstrapping);
        assert_eq!(request.queue(), Queue::Bootstrap);
        request.phase = Some(Phase::WaitingForInput);
        assert_eq!((request.queue(), request.is_queued()), (Queue::None, false));
        request.entered = Some(Monotonic(2));
        assert_eq!((request.queue(), request.is_queued()), (Queue::Inflight, true));
    }
}
