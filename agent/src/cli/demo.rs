//! `dislodge demo`.

use std::process::ExitCode;

use clap::Args;

#[derive(Args, Debug)]
pub(super) struct Demo {}

impl Demo {
    pub(super) fn run(self) -> ExitCode {
        super::fail("not here yet")
    }
}
