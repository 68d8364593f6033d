//! Which process a probe was attached for.
//!
//! The kernel hands a probe's attach cookie to the program (`bpf_get_attach_cookie`, Linux 5.15), so that no program has
//! to look its process up by number: the cookie names a slot of the map [`crate::PROCESSES_MAP`].

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::loss::ProcessCounters;

/// How many processes can be traced at once.
pub const MAX_PROCESSES: u32 = 4096;

/// One slot of the map [`crate::PROCESSES_MAP`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct TracedProcess {
    /// Process id in the root pid namespace; 0 in a slot that is free. Compared in BPF: a child that was forked with
    /// the probe in its memory is not the process that was asked for.
    pub tgid: u64,
    /// What was seen and lost.
    pub counters: ProcessCounters,
}

/// What the agent tells a program about the probe that runs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachCookie {
    /// Index into the map [`crate::PROCESSES_MAP`].
    pub slot: u32,
    /// What the program has to know of the function: a [`MakeForm`], a [`NotificationForm`], the offset of a field, an
    /// [`crate::wire::ErrorPoint`]; 0 where there is nothing to know.
    pub parameter: u32,
}

impl AttachCookie {
    /// Bit of the parameter: the function's return is not probed.
    pub const ENTRY_ONLY: u32 = 1 << 31;

    /// As the kernel keeps it.
    pub const fn to_bits(self) -> u64 {
        self.slot as u64 | (self.parameter as u64) << 32
    }

    /// The inverse of [`AttachCookie::to_bits`].
    pub const fn from_bits(bits: u64) -> Self {
        Self { slot: bits as u32, parameter: (bits >> 32) as u32 }
    }
}

/// The forms in which NIXL makes a transfer: they differ in where their arguments are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MakeForm {
    /// `createXferReq`: lists of descriptors.
    Create = 0,
    /// `makeXferReq` with vectors of indices into prepared lists (0.1 to 1.5).
    PreparedVector = 1,
    /// `makeXferReq` with spans of indices (since 1.5).
    PreparedSpan = 2,
}

/// How NIXL's UCX plugin is handed a notification to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum NotificationForm {
    /// `notifSendPriv(peer, message, …)`: the bytes themselves.
    Plain = 0,
    /// `sendNotif(unique_ptr<string>&&, …)` (since 1.5): serialised.
    Serialised = 1,
}
