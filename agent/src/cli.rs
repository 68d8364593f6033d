//! The command line.
//!
//! Exit status: 0 done, 1 it does not work here or now (the message says why), 2 wrong input.

mod anonymize;
mod canary;
mod check;
mod demo;
mod doctor;
mod explain;
mod record;
mod replay;
mod rules;
mod run;
mod signals;
mod simulate;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand, ValueEnum};
use dislodge::{
    check::{read_config, read_rules},
    config::Config,
    problem::Problem,
    rule::RuleSet,
};

/// Finds requests that are pinned in an LLM server's inflight queue, says why, and gets them out.
#[derive(Debug, Parser)]
#[command(version, about)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Watch every SGLang scheduler of this node, alert, and (only where the configuration says so) free what is stuck
    Run(run::Run),
    /// Show it at work: pin a request in a small server, diagnose it, free it. Needs root, Python 3.10 or newer, 30 s
    Demo(demo::Demo),
    /// Check configuration and rules: every problem with file, line and column
    Check(check::Check),
    /// Say what this machine allows, of each server whether the hook is in it, and what would be seen of its transfers
    ///
    /// It plans as the agent would, by the same code, and attaches nothing to a server: the kernel has the last word when
    /// the agent does. An agent may run meanwhile. Probes of the sets `polls` and `completions` are attached for a moment
    /// only, when a transfer does not get on.
    Doctor(doctor::Doctor),
    /// Write a recording: of what the running agent has seen in the last minutes, or of what is to be seen from now on
    Record(record::Record),
    /// Tell the rules again what a recording says: the same verdicts as live
    Replay(replay::ReplayCommand),
    /// Explain one request: what happened to it, why it waits, what the rules say and when, what would be done about it
    ///
    /// Asks the running agent; with --file a recording. The time line of a running agent comes from its flight recorder
    /// (`record.folder`), which can be asked on its node, by its user.
    Explain(explain::Explain),
    /// Take the names out of a recording, so that it can be shown to others
    Anonymize(anonymize::Anonymize),
    /// Make up a server with faults: a recording of it, and what is true of its requests
    Simulate(simulate::Simulate),
    /// Look at the rules
    Rules(rules::Rules),
    /// What the agent starts itself, to learn whether return probes are safe on this kernel
    #[command(hide = true, name = dislodge::kernel::canary::SUBCOMMAND)]
    Canary,
}

/// How output is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    #[default]
    Text,
    /// For machines.
    Json,
}

#[derive(Args, Debug)]
struct Files {
    /// Configuration file (YAML); without it every setting has its default
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Folder of rules that replaces the rules that come with the agent
    #[arg(long, value_name = "DIR")]
    rules: Option<PathBuf>,
}

impl Files {
    /// The configuration and the rules; or every problem of both.
    fn read(&self) -> Result<(Config, RuleSet), Vec<Problem>> {
        let config = read_config(self.config.as_deref()).map(|mut config| {
            if let Some(rules) = &self.rules {
                config.rules = Some(rules.clone());
            }
            config
        });
        let folder = config.as_ref().map_or_else(|_| self.rules.clone(), |config| config.rules.clone());
        match (config, read_rules(folder.as_deref())) {
            (Ok(config), Ok(rules)) => Ok((config, rules)),
            (config, rules) => Err([config.err(), rules.err()].into_iter().flatten().flatten().collect()),
        }
    }
}

impl Cli {
    pub(crate) fn run(self) -> ExitCode {
        match self.command {
            Command::Run(run) => run.run(),
            Command::Demo(demo) => demo.run(),
            Command::Check(check) => check.run(),
            Command::Doctor(doctor) => doctor.run(),
            Command::Record(record) => record.run(),
            Command::Replay(replay) => replay.run(),
            Command::Explain(explain) => explain.run(),
            Command::Anonymize(anonymize) => anonymize.run(),
            Command::Simulate(simulate) => simulate.run(),
            Command::Rules(rules) => rules.run(),
            Command::Canary => canary::run(),
        }
    }
}

/// Says what is wrong; exit status 1.
fn fail(message: impl std::fmt::Display) -> ExitCode {
    eprintln!("dislodge: {message}");
    ExitCode::FAILURE
}

/// Says what is wrong with the input; exit status 2.
fn reject(problems: &[Problem]) -> ExitCode {
    for problem in problems {
        eprintln!("{problem}");
    }
    ExitCode::from(2)
}
