//! The flight recorder: the last minutes of what the core was told, in memory, encoded, bounded.
//!
//! Inputs go into blocks. A block begins with a snapshot of what the core knew then, so the oldest ones can be dropped and
//! what is left still gives the verdicts that the running agent gave. Blocks begin after a tick: there every alert says
//! what its request looks like, so a snapshot need not carry the words of alerts.

use std::{collections::VecDeque, convert::Infallible, io, sync::Arc, time::Duration};

use minicbor::{Encode as _, Encoder, encode};

use super::{
    codec::Plain,
    format::{Dropped, FrameKind, Header, MAX_PAYLOAD, write_frame},
};
use crate::{
    core::{Core, Input, write_snapshot},
    event::clock::Monotonic,
};

/// Blocks that a full recorder consists of, about: what is dropped at once.
const BLOCKS: usize = 16;
/// Smallest block, in bytes.
const SMALLEST: usize = 64 << 10;
/// Largest block before it is closed, in bytes: at most half of what a reader takes.
const LARGEST: usize = MAX_PAYLOAD / 4;
/// How long nothing is recorded when there was no room for a snapshot.
const PATIENCE: Duration = Duration::from_secs(30);

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// How long, at least while it fits.
    pub time: Duration,
    /// How much, at most.
    pub bytes: usize,
}

/// The recorder.
#[derive(Debug)]
pub struct Recorder {
    span: Span,
    closed: VecDeque<Block>,
    closed_bytes: usize,
    open: Option<Open>,
    dropped: Dropped,
    again_at: Monotonic,
}

#[derive(Debug)]
struct Block {
    data: Arc<Vec<u8>>,
    inputs: u64,
    began: Monotonic,
}

#[derive(Debug)]
struct Open {
    data: Vec<u8>,
    snapshot: usize,
    inputs: u64,
    began: Monotonic,
}

impl Recorder {
    /// An empty recorder; it records from the first [`turn`](Self::turn) on.
    pub fn new(span: Span) -> Self {
        let dropped = Dropped::default();
        Self { span, closed: VecDeque::new(), closed_bytes: 0, open: None, dropped, again_at: Monotonic(0) }
    }

    /// Takes in what the core is told.
    pub fn record(&mut self, input: &Input) {
        let Some(open) = &mut self.open else {
            self.dropped.not_recorded += 1;
            return;
        };
        // A vector takes everything, and no value refuses to be written.
        let written: Result<(), encode::Error<Infallible>> =
            input.encode(&mut Encoder::new(&mut open.data), &mut Plain);
        debug_assert!(written.is_ok());
        open.inputs += 1;
        if self.closed_bytes + open.data.len() > self.span.bytes || open.data.len() > MAX_PAYLOAD {
            self.make_room();
        }
    }

    fn make_room(&mut self) {
        let open = self.open.as_ref().map_or(0, |open| open.data.len());
        while self.closed_bytes + open > self.span.bytes && self.drop_oldest() {}
        if (open > self.span.bytes || open > MAX_PAYLOAD)
            && let Some(open) = self.open.take()
        {
            self.dropped.inputs += open.inputs;
            self.dropped.bytes += open.data.len() as u64;
        }
    }

    fn drop_oldest(&mut self) -> bool {
        let Some(block) = self.closed.pop_front() else { return false };
        self.closed_bytes -= block.data.len();
        self.dropped.inputs += block.inputs;
        self.dropped.bytes += block.data.len() as u64;
        true
    }

    /// After a tick: begins a new block where one is due, and drops what is too old.
    pub fn turn(&mut self, core: &Core, now: Monotonic) {
        let is_due = match &self.open {
            None => now >= self.again_at,
            Some(open) => {
                // At least as much as the snapshot takes, so that snapshots are at most half of everything.
                let enough = (self.span.bytes / BLOCKS).clamp(SMALLEST, LARGEST).max(open.snapshot * 2);
                open.data.len() >= enough || now.since(open.began) >= self.span.time / BLOCKS as u32
            }
        };
        if !is_due {
            return;
        }
        self.close();
        while self.closed.get(1).is_some_and(|second| now.since(second.began) >= self.span.time) {
            self.drop_oldest();
        }
        let mut data = Bounded { bytes: Vec::new(), limit: (self.span.bytes / 2).min(LARGEST * 2) };
        let written = write_snapshot(core, now, &mut Encoder::new(&mut data), &mut Plain);
        if written.is_err() {
            self.again_at = now.plus(PATIENCE);
            return;
        }
        self.open = Some(Open { snapshot: data.bytes.len(), data: data.bytes, inputs: 0, began: now });
        self.make_room();
    }

    fn close(&mut self) {
        let Some(Open { mut data, inputs, began, .. }) = self.open.take() else { return };
        data.shrink_to_fit();
        self.closed_bytes += data.len();
        self.closed.push_back(Block { data: Arc::new(data), inputs, began });
    }

    /// What is kept now; `header` says where it comes from.
    pub fn recording(&self, mut header: Header) -> Recording {
        header.dropped = self.dropped;
        let open = self.open.as_ref().map(|open| Arc::new(open.data.clone()));
        Recording { header, blocks: self.closed.iter().map(|block| Arc::clone(&block.data)).chain(open).collect() }
    }

    /// What was not kept so far.
    pub fn dropped(&self) -> Dropped {
        self.dropped
    }

    /// Bytes that are kept.
    pub fn bytes(&self) -> usize {
        self.closed_bytes + self.open.as_ref().map_or(0, |open| open.data.len())
    }
}

/// What was kept at one moment, ready to be written by another thread.
#[derive(Clone, Debug)]
pub struct Recording {
    /// Where it comes from.
    pub header: Header,
    blocks: Vec<Arc<Vec<u8>>>,
}

impl Recording {
    /// Writes it.
    ///
    /// # Errors
    ///
    /// Those of the writer.
    pub fn write(&self, out: &mut impl io::Write) -> io::Result<()> {
        write_header(out, &self.header, &mut Plain)?;
        self.blocks.iter().try_for_each(|block| write_frame(out, FrameKind::Block, block))?;
        write_frame(out, FrameKind::End, &[])
    }
}

pub(super) fn write_header(
    out: &mut impl io::Write,
    header: &Header,
    names: &mut impl super::codec::Names,
) -> io::Result<()> {
    let mut payload = Vec::new();
    header.encode(&mut Encoder::new(&mut payload), names).map_err(io::Error::other)?;
    write_frame(out, FrameKind::Header, &payload)
}

/// A vector that is full at some point.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

/// There was no room.
#[derive(Debug)]
struct Full;

impl encode::Write for Bounded {
    type Error = Full;

    fn write_all(&mut self, bytes: &[u8]) -> Result<(), Full> {
        if self.bytes.len() + bytes.len() > self.limit {
            return Err(Full);
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }
}

#[cfg(test)]
#[path = "recorder_tests.rs"]
mod tests;
