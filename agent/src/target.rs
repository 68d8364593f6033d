//! The servers of this node: which processes, whether the hook is in them, where its marker is, which libraries of the
//! transfer path they have loaded and where in those to put a probe.

pub mod code;
pub mod device;
pub mod discover;
pub mod handle;
pub mod hook;
pub mod launcher;
pub mod library;
pub mod mapping;
pub mod marker;
mod memory;
pub mod scrape;
pub mod symbol;
pub mod verbs;

use serde::Serialize;

use crate::event::ProcessKey;

/// A scheduler process of SGLang.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Target {
    /// The process.
    pub key: ProcessKey,
    /// Its title: `sglang::scheduler…`.
    pub title: String,
}
