//! Probes are taken off in threads of their own. The kernel waits for a grace period for each, tens of milliseconds, seconds
//! where every processor is busy: long enough for a ring to overflow meanwhile. Side by side they wait for the same ones.

use std::thread::{self, JoinHandle};

use aya::programs::uprobe::UProbeLink;

/// Threads that take one server's probes off: a server has some twenty.
const SIDE_BY_SIDE: usize = 16;

/// The probes that are being taken off.
#[derive(Debug, Default)]
pub(super) struct Removal {
    /// Each with the slots that its probes' cookies name.
    threads: Vec<(Vec<u32>, JoinHandle<()>)>,
}

impl Removal {
    /// Begins to take probes off, each with the slot that its cookie names.
    pub(super) fn begin(&mut self, links: Vec<(u32, UProbeLink)>) {
        self.threads.retain(|(_, thread)| !thread.is_finished());
        let mut shares: Vec<Vec<(u32, UProbeLink)>> = Vec::new();
        for (index, link) in links.into_iter().enumerate() {
            match shares.get_mut(index % SIDE_BY_SIDE) {
                Some(share) => share.push(link),
                None => shares.push(vec![link]),
            }
        }
        // Where there can be no further thread, what it was given is dropped here and now.
        self.threads.extend(shares.into_iter().filter_map(|share| {
            let slots = share.iter().map(|(slot, _)| *slot).collect();
            let thread = thread::Builder::new().name("probe removal".to_owned()).spawn(move || drop(share));
            Some((slots, thread.ok()?))
        }));
    }

    /// Slots that a probe may still speak for. Given to a process now, it would speak for that one.
    pub(super) fn slots(&self) -> impl Iterator<Item = u32> {
        self.threads.iter().filter(|(_, thread)| !thread.is_finished()).flat_map(|(slots, _)| slots).copied()
    }

    /// Waits until all of them are off.
    pub(super) fn wait(&mut self) {
        for (_, thread) in self.threads.drain(..) {
            // Nothing in there panics.
            let _ = thread.join();
        }
    }
}
