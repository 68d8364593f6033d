//! `dislodge check`.

use std::process::ExitCode;

use clap::Args;
use dislodge::check::check;

use super::{Files, Output, reject};

#[derive(Args, Debug)]
pub(super) struct Check {
    #[command(flatten)]
    files: Files,
    /// How to write the result
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Check {
    pub(super) fn run(self) -> ExitCode {
        let report = check(self.files.config.as_deref(), self.files.rules.as_deref());
        if self.output == Output::Json {
            match serde_json::to_string_pretty(&report) {
                Ok(json) => println!("{json}"),
                Err(error) => return super::fail(error),
            }
        } else if report.ok {
            println!("good: {} rules", report.rules.len());
        } else {
            return reject(&report.problems);
        }
        if report.ok { ExitCode::SUCCESS } else { ExitCode::from(2) }
    }
}
