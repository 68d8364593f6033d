//! Dislodge: finds requests that are pinned in an LLM server's inflight queue, says why, and gets them out.
//!
//! Modules in data-flow order:
//!
//! ```text
//! server ──mark──► BPF ──ring──► event::decode ─► request::tracker ─► diagnose ─► rule ─► verdict ─► sink
//!                  (kernel)                                                               └► remedy ─► hook
//! ```
#![forbid(unsafe_code)]

pub mod check;
mod client;
pub mod config;
pub mod core;
pub mod diagnose;
pub mod event;
pub mod explain;
pub mod kernel;
pub mod metrics;
pub mod pipeline;
pub mod problem;
pub mod record;
pub mod remedy;
pub mod request;
pub mod rule;
pub mod server;
pub mod simulate;
pub mod sink;
pub mod target;
pub mod verdict;
