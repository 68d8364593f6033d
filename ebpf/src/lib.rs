//! The contract between Dislodge's BPF programs and its agent: one definition, compiled for both sides.
//!
//! The library half of this package is `no_std` and is built for the host and for BPF alike; the binary half
//! (`main.rs`) holds the programs and is built for BPF only.
#![no_std]
#![forbid(unsafe_code)]

pub mod look;
pub mod loss;
pub mod process;
pub mod wire;

/// Name of the ring buffer map that carries every event.
pub const EVENTS_MAP: &str = "EVENTS";
/// Name of the array of traced processes: slot → [`process::TracedProcess`]. A probe's attach cookie names the slot.
pub const PROCESSES_MAP: &str = "PROCESSES";
/// Name of the hash map of calls that were entered and have not returned: who calls → what its entry said.
pub const CALLS_MAP: &str = "CALLS";
/// Name of the hash map that looks fill: handle or batch → [`look::Polls`].
pub const POLLS_MAP: &str = "POLLS";
/// Name of the hash map of work and request completions: [`look::CompletionKey`] → [`look::Completions`].
pub const COMPLETIONS_MAP: &str = "COMPLETIONS";
/// Name of the program attached to the entry of `dislodge_mark`.
pub const MARK_PROGRAM: &str = "mark";
