//! `dislodge canary`, which only the agent itself starts.

use std::process::ExitCode;

use dislodge::kernel::canary;

use super::fail;

/// Stands under a seccomp filter and calls a function that its parent probes.
pub(super) fn run() -> ExitCode {
    match canary::sing() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(error),
    }
}
