//! What only a decode server's hook says: of its receivers, and of its two queues (`disaggregation/decode.py`, SGLang 0.5.10
//! to 0.5.23). Everything else that happens to a receiver is marked as it is for a sender.

use super::{Backend, Entry, LeaveReason, Rid, Room};

/// A queue of a decode scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecodeQueue {
    /// `DecodePreallocQueue`: waits for the prefill's address, then for a slot and KV memory.
    Prealloc,
    /// `DecodeTransferQueue`: the prefill was told where to write.
    Transfer,
}

impl DecodeQueue {
    /// The queue of the contract's number.
    pub(super) fn from_number(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Prealloc),
            2 => Some(Self::Transfer),
            _ => None,
        }
    }
}

/// Why a request left a queue of a decode scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DecodeLeave {
    /// Its receiver had polled Success.
    Success,
    /// Its receiver had polled Failed.
    Failed,
    /// Its receiver had polled neither: the queue was emptied by other means.
    Removed,
    /// It has its memory, and goes on to the transfer queue.
    Preallocated,
}

impl DecodeLeave {
    pub(super) fn from_number(number: u64) -> Option<Self> {
        match number {
            1 => Some(Self::Success),
            2 => Some(Self::Failed),
            3 => Some(Self::Removed),
            4 => Some(Self::Preallocated),
            _ => None,
        }
    }
}

impl From<LeaveReason> for DecodeLeave {
    fn from(reason: LeaveReason) -> Self {
        match reason {
            LeaveReason::Success => Self::Success,
            LeaveReason::Failed => Self::Failed,
            LeaveReason::Removed => Self::Removed,
        }
    }
}

/// What happened. The fields are named after the contract's, which explains them.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the fields are named after the contract's, which explains them")]
pub enum ReceiverEvent {
    Open { room: Room, sender: u64, backend: Backend },
    Entry { room: Room, sender: u64, epoch: u64, queue: Option<DecodeQueue>, entry: Box<Entry> },
    Enter { room: Room, sender: u64, queue: DecodeQueue, rid: Option<Rid> },
    Leave { room: Room, sender: u64, queue: DecodeQueue, reason: DecodeLeave },
    Pass { prealloc: u32, transfer: u32, passes: u32 },
}
