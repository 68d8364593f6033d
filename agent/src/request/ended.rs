//! How a request ended, and what that may have done to others.

use crate::{
    event::{LeaveReason, clock::Monotonic},
    record::codec::recorded,
};

/// The end of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// When.
    pub at: Monotonic,
    /// Why it left the inflight queue; nothing when it ended without having been there.
    pub left: Option<LeaveReason>,
    /// What was under way when it gave its pages back, where that may harm others.
    pub unsafe_release: Option<Box<UnsafeRelease>>,
}

/// Pages that were given back while a transfer still read them: who gets them next may have its bytes sent in their place,
/// or sees its own overwritten on the decode side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsafeRelease {
    /// Transfers of the room whose end had not been seen.
    pub transfers: usize,
    /// When the oldest of them was posted.
    pub oldest: Monotonic,
    /// What shows that one was under way.
    pub proof: ReleaseProof,
}

/// What shows that a transfer was under way when its pages were given back. That its end had not been seen is not enough:
/// Mooncake's is seen when a worker frees the batch, and NIXL's without its flushes when somebody has asked for the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReleaseProof {
    /// Its end is seen on the wire when it comes, and had not come.
    OnTheWire,
    /// It was read in the server's memory after that, and was not over.
    RanOn {
        /// When.
        at: Monotonic,
    },
    /// Nothing so far: it may have been over.
    NotShown,
    /// Nothing ever will: its end may be among what was not seen, or it may be another request's.
    NotAllSeen,
}

impl UnsafeRelease {
    /// Whether it is proved.
    pub fn is_proved(&self) -> bool {
        matches!(self.proof, ReleaseProof::OnTheWire | ReleaseProof::RanOn { .. })
    }
}

impl Ended {
    /// When it was known last what it did to others.
    pub fn known_at(&self) -> Monotonic {
        match self.unsafe_release.as_deref() {
            Some(UnsafeRelease { proof: ReleaseProof::RanOn { at }, .. }) => self.at.max(*at),
            _ => self.at,
        }
    }
}

recorded!(struct Ended { at, left, unsafe_release });
recorded!(struct UnsafeRelease { transfers, oldest, proof });
recorded!(enum ReleaseProof { 0 OnTheWire {}, 1 RanOn { at }, 2 NotShown {}, 3 NotAllSeen {} });
