//! The `dislodge` command: one module per subcommand under `cli`.

mod cli;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    cli::Cli::parse().run()
}
