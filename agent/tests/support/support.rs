//! What the integration tests share: real servers, a real agent, and what this machine needs for them.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of this")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used, reason = "a test that cannot go on fails")]

pub mod agent;
pub mod channel;
pub mod daemon;
pub mod environment;
pub mod http;
pub mod marks;
pub mod native;
pub mod ranks;
pub mod rules;
pub mod server;
pub mod transfers;
pub mod wait;

use std::{
    io::Write as _,
    path::{Path, PathBuf},
};

/// The repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the repository").to_owned()
}

/// Whether every release is to be run: `DISLODGE_FULL=1`.
pub fn full() -> bool {
    std::env::var("DISLODGE_FULL").as_deref() == Ok("1")
}

/// What a test needs; or nothing, loudly, where this machine does not have it. With `CI=true` that is a failure.
pub fn needs<T>(found: Result<T, String>) -> Option<T> {
    match found {
        Ok(found) => Some(found),
        Err(why) => {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("a test");
            // Not through a macro: the test harness would keep it to itself.
            let line = format!("SKIPPED: {test}: {why}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            assert!(std::env::var("CI").as_deref() != Ok("true"), "in CI nothing is skipped: {why}");
            None
        }
    }
}
