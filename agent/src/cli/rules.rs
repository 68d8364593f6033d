//! `dislodge rules`.

mod test;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use dislodge::{
    check::check,
    rule::field::{Description, FIELDS, Field},
};
use serde::Serialize;

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
    /// List the fields that a rule's `when` can ask about
    Fields(Fields),
    /// Test rules as promtool does: files say what happens, and which alerts there are at which times
    Test(test::Test),
}

#[derive(Args, Debug)]
struct List {
    #[command(flatten)]
    files: Files,
    /// How to write the result
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

#[derive(Args, Debug)]
struct Fields {
    /// How to write the result
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

impl Rules {
    pub(super) fn run(self) -> ExitCode {
        match self.command {
            Command::List(list) => list.run(),
            Command::Fields(fields) => fields.run(),
            Command::Test(test) => test.run(),
        }
    }
}

impl Fields {
    fn run(self) -> ExitCode {
        let fields: Vec<Description> = FIELDS.iter().map(Field::describe).collect();
        if self.output == Output::Json {
            return print_json(&fields);
        }
        println!("{:<33} {:<7} {:<9} {:<26} MEANING", "FIELD", "TYPE", "UNIT", "SOURCE");
        for field in &fields {
            let Description { name, r#type, unit, source, meaning, values } = field;
            println!("{name:<33} {type:<7} {:<9} {source:<26} {meaning}", unit.unwrap_or("-"));
            if !values.is_empty() {
                println!("{:<78} one of {}", "", values.join(", "));
            }
        }
        ExitCode::SUCCESS
    }
}

fn print_json(value: &impl Serialize) -> ExitCode {
    match serde_json::to_string_pretty(value) {
        Ok(json) => println!("{json}"),
        Err(error) => return super::fail(error),
    }
    ExitCode::SUCCESS
}

impl List {
    fn run(self) -> ExitCode {
        let report = check(self.files.config.as_deref(), self.files.rules.as_deref());
        if !report.ok {
            return reject(&report.problems);
        }
        if self.output == Output::Json {
            return print_json(&report.rules);
        }
        println!("{:<20} {:<10} {:>6}  ACTION", "RULE", "SEVERITY", "FOR");
        for rule in &report.rules {
            let hold = format!("{}s", rule.for_seconds);
            println!("{:<20} {:<10} {hold:>6}  {}", rule.name, rule.severity.name(), rule.action.name());
        }
        ExitCode::SUCCESS
    }
}
