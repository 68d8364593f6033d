//! Probes are taken off in threads of their own. The kernel waits for a grace period for each, tens of milliseconds, seconds
//! where every processor is busy: long enough for a ring to overflow meanwhile. Side by side they wait for the same ones.

use std::thread::{self, JoinHandle};

use aya::programs::uprobe::UProbeLink;

/// Threads that take one server's probes off: a server has some twenty.
const SIDE_BY_SIDE: usize = 16;

/// The probes that are being taken off.
#[derive(Debug, Default)]
pub(super) struct Removal {
    /// Each with the slot that its probes' cookies name.
    threads: Vec<(u32, JoinHandle<()>)>,
}

impl Removal {
    /// Begins to take probes off whose cookies name a slot.
    pub(super) fn begin(&mut self, slot: u32, links: Vec<UProbeLink>) {
        self.threads.retain(|(_, thread)| !thread.is_finished());
        let mut shares: Vec<Vec<UProbeLink>> = Vec::new();
        for (index, link) in links.into_iter().enumerate() {
            match shares.get_mut(index % SIDE_BY_SIDE) {
                Some(share) => share.push(link),
                None => shares.push(vec![link]),
            }
        }
        // Where there can be no further thread, what it was given is dropped here and now.
        let spawn =
            |share| thread::Builder::new().name("probe removal".to_owned()).spawn(move || drop::<Vec<_>>(share));
        self.threads.extend(shares.into_iter().filter_map(|share| spawn(share).ok()).map(|thread| (slot, thread)));
    }

    /// Slots that a probe may still speak for. Given to a process now, it would speak for that one.
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> {
        self.threads.iter().filter(|(_, thread)| !thread.is_finished()).map(|(slot, _)| *slot)
    }

    /// Waits until all of them are off.
    pub(super) fn wait(&mut self) {
        for (_, thread) in self.threads.drain(..) {
            // Nothing in there panics.
            let _ = thread.join();
        }
    }
}
