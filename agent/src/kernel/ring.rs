//! The reading end of the ring buffer.
//!
//! BPF wakes nobody: a wake-up would cost the server four times what the event costs. The pipeline drains the ring
//! on a timer instead; the ring itself is the queue, and what does not fit is counted in BPF, per process.

use std::fmt;

use aya::maps::{MapData, RingBuf};

use crate::event::{
    Event,
    decode::{DecodeError, decode},
};

/// The reading end.
pub struct Ring(RingBuf<MapData>);

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ring")
    }
}

impl Ring {
    pub(super) fn new(ring: RingBuf<MapData>) -> Self {
        Self(ring)
    }

    /// Hands at most `limit` waiting events to `receive` and returns how many there were.
    pub fn drain(&mut self, limit: usize, mut receive: impl FnMut(Result<Event, DecodeError>)) -> usize {
        for count in 0..limit {
            let Some(item) = self.0.next() else { return count };
            receive(decode(&item));
        }
        limit
    }
}
