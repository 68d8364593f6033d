//! The servers of this node: which processes, whether the hook is in them, where its marker is.

pub mod discover;
pub mod hook;
pub mod marker;
pub mod memory;

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
