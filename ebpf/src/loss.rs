//! What was seen and what was lost, per process, counted where it happens.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Counters of one traced process, in the map [`crate::PROCESSES_MAP`]. At rest `seen = delivered + ring_full`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ProcessCounters {
    /// Marks that the program saw; also the last sequence number given.
    pub seen: u64,
    /// Events written to the ring.
    pub delivered: u64,
    /// Events lost because the ring had no room.
    pub ring_full: u64,
    /// Details that could not be read from the server's memory (the event was delivered without).
    pub detail_fault: u64,
    /// Details that were cut (the event was delivered).
    pub detail_truncated: u64,
}

impl ProcessCounters {
    /// Events that are lost for good.
    pub const fn lost(&self) -> u64 {
        self.ring_full
    }

    /// Whether every event seen is accounted for. Only at rest: a program may be between two counters.
    pub const fn reconciles(&self) -> bool {
        self.seen == self.delivered + self.lost()
    }
}
