//! `dislodge rules`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use dislodge::check::check;

use super::{Files, Output, reject};

#[derive(Args, Debug)]
pub(super) struct Rules {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the rules with what they may do under the configuration
    List(List),
}

#[derive(Args, Debug)]
struct List {
    #[command(flatten)]
    files: Files,
    /// How to write the result
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Rules {
    pub(super) fn run(self) -> ExitCode {
        let Command::List(list) = self.command;
        let report = check(list.files.config.as_deref(), list.files.rules.as_deref());
        if !report.ok {
            return reject(&report.problems);
        }
        if list.output == Output::Json {
            match serde_json::to_string_pretty(&report.rules) {
                Ok(json) => println!("{json}"),
                Err(error) => return super::fail(error),
            }
            return ExitCode::SUCCESS;
        }
        println!("{:<20} {:<10} {:>6}  ACTION", "RULE", "SEVERITY", "FOR");
        for rule in &report.rules {
            let hold = format!("{}s", rule.for_seconds);
            println!("{:<20} {:<10} {hold:>6}  {}", rule.name, rule.severity.name(), rule.action.name());
        }
        ExitCode::SUCCESS
    }
}
