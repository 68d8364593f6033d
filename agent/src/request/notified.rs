//! Which process writes to which, by the notifications that one sends and another one gets: so that it is known, without any
//! hook, that the peer of a transfer is gone.
//!
//! Said only of a process that writes to one peer, and that one on this node: every notification that it sent arrived there.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    time::Duration,
};

use super::ends::Ends;
use crate::{
    event::{
        ProcessKey,
        clock::Monotonic,
        native::{NativeEvent, Notification},
    },
    record::codec::recorded,
};

/// How long a notification may be on its way.
const ARRIVES_WITHIN: Duration = Duration::from_secs(5);
/// For how long it counts that one did not arrive on this node.
const ELSEWHERE_KEPT: Duration = Duration::from_secs(300);
/// Notifications that are on their way; further ones count as going elsewhere.
const MAX_ON_THEIR_WAY: usize = 16_384;

/// The only process that a server was seen to write to has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerEnded {
    /// Its process id.
    pub pid: u32,
    /// When that was seen.
    pub at: Monotonic,
}

/// A notification that was sent and has not arrived yet.
#[derive(Clone, Copy, Debug)]
struct Sent {
    from: ProcessKey,
    at: Monotonic,
}

/// To whom a process writes.
#[derive(Debug, Default)]
struct Peers {
    /// Those on this node, and when a notification arrived there last.
    here: BTreeMap<ProcessKey, Monotonic>,
    /// When it last sent one that arrived nowhere on this node.
    elsewhere: Option<Monotonic>,
}

/// Notifications on their way, and who writes to whom.
#[derive(Debug, Default)]
pub(super) struct Notified {
    on_their_way: HashMap<u64, Sent>,
    order: VecDeque<(Monotonic, u64)>,
    peers: BTreeMap<ProcessKey, Peers>,
}

recorded!(struct PeerEnded { pid, at });
recorded!(struct Sent { from, at });
recorded!(struct Peers { here, elsewhere });
recorded!(struct Notified { on_their_way, order, peers });

impl Notified {
    /// Applies a call of `process`.
    pub(super) fn apply(&mut self, event: &NativeEvent, process: ProcessKey, at: Monotonic) {
        match event {
            NativeEvent::NotificationSent { notification } => self.sent(digest(notification), process, at),
            NativeEvent::NotificationArrived { notification, .. } => {
                let sent = self.on_their_way.remove(&digest(notification));
                if let Some(Sent { from, .. }) = sent.filter(|sent| sent.from != process) {
                    self.peers.entry(from).or_default().here.insert(process, at);
                }
            }
            _ => {}
        }
    }

    fn sent(&mut self, digest: u64, from: ProcessKey, at: Monotonic) {
        if self.order.len() >= MAX_ON_THEIR_WAY {
            self.peers.entry(from).or_default().elsewhere = Some(at);
            return;
        }
        self.order.push_back((at, digest));
        if let Some(former) = self.on_their_way.insert(digest, Sent { from, at }) {
            // The same words twice: which of them arrives cannot be told.
            self.peers.entry(former.from).or_default().elsewhere = Some(at);
        }
    }

    /// Gives up what has not arrived in time.
    pub(super) fn prune(&mut self, now: Monotonic, ends: &Ends) {
        while let Some((at, digest)) = self.order.front().copied()
            && now.since(at) >= ARRIVES_WITHIN
        {
            self.order.pop_front();
            let Some(Sent { from, .. }) = self.on_their_way.get(&digest).copied().filter(|sent| sent.at == at) else {
                continue;
            };
            self.on_their_way.remove(&digest);
            let peers = self.peers.entry(from).or_default();
            // What was on its way to a process that ended could not arrive.
            let ended = peers.here.keys().filter_map(|peer| ends.gone(*peer)).max();
            if ended.is_none_or(|ended| at.plus(ARRIVES_WITHIN) < ended) {
                peers.elsewhere = Some(at);
            }
        }
        for peers in self.peers.values_mut() {
            peers.elsewhere = peers.elsewhere.filter(|at| now.since(*at) < ELSEWHERE_KEPT);
            // One that has ended is succeeded by the one that is written to since.
            if peers.here.keys().any(|peer| ends.gone(*peer).is_none()) {
                peers.here.retain(|peer, _| ends.gone(*peer).is_none());
            }
        }
    }

    /// A process is not tracked any more: to whom it wrote does not matter.
    pub(super) fn forget(&mut self, process: ProcessKey) {
        self.peers.remove(&process);
    }

    /// Whether the only process that `process` writes to has ended.
    pub(super) fn only_peer_ended(&self, process: ProcessKey, ends: &Ends) -> Option<PeerEnded> {
        let Peers { here, elsewhere: None } = self.peers.get(&process)? else { return None };
        let mut here = here.keys();
        let (peer, None) = (here.next()?, here.next()) else { return None };
        ends.gone(*peer).map(|at| PeerEnded { pid: peer.pid, at })
    }
}

/// Of the words of a notification; the same in a replay.
fn digest(notification: &Notification) -> u64 {
    let mut hasher = DefaultHasher::new();
    notification.bytes.hash(&mut hasher);
    hasher.finish()
}
