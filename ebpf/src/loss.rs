//! What was seen and what was lost, per process, counted where it happens.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Counters of one traced process. What a reader has received is, at rest, [`ProcessCounters::delivered`]:
/// who reads counts, so that the probed thread does not have to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ProcessCounters {
    /// Marks that the program saw; also the last sequence number given.
    pub seen: u64,
    /// Events lost because the ring had no room.
    pub ring_full: u64,
    /// Details that could not be read from the server's memory (the event was delivered without).
    pub detail_fault: u64,
    /// Details that were cut (the event was delivered).
    pub detail_truncated: u64,
    /// Calls whose entry could not be remembered until their return: the map of calls was full.
    pub calls_full: u64,
    /// Polls and completions that a look could not count: its map was full.
    pub look_full: u64,
    /// Returns whose entry was not seen: the call was under way when the probe was attached.
    pub returns_unmatched: u64,
}

impl ProcessCounters {
    /// Events that are lost for good.
    pub const fn lost(&self) -> u64 {
        self.ring_full
    }

    /// Events that were written to the ring. Only at rest: a program may be between seeing and writing.
    pub const fn delivered(&self) -> u64 {
        self.seen.saturating_sub(self.lost())
    }
}
