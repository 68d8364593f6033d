//! `dislodge doctor`: what this machine allows, and of each server whether the hook is in it or why not, and what would
//! be seen of its transfers.

mod engine;
mod replica;
mod server;
mod text;

use std::{collections::HashMap, process::ExitCode};

use clap::Args;
use dislodge::{
    kernel::{
        Kernel, Sizes,
        canary::{self, ReturnProbes},
        preflight::{Check, Machine, Outcome, judge},
        probe::PROBES,
    },
    target::discover,
};
use serde::Serialize;

use super::{Output, fail};
use engine::Surveyor;
use replica::ReplicaReport;
use server::{Server, examine};

/// Smallest ring that can be loaded, to see whether the kernel takes the programs.
const TRIAL: Sizes = Sizes { ring: 64 << 10, calls: 64 };

#[derive(Args, Debug)]
pub(super) struct Doctor {
    /// How to write the result
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

#[derive(Debug, Serialize)]
struct Report {
    checks: Vec<Check>,
    servers: Vec<Server>,
    replicas: Vec<ReplicaReport>,
}

impl Doctor {
    pub(super) fn run(self) -> ExitCode {
        let mut checks = judge(&Machine::inspect());
        let (programs, not_loaded) = trial();
        let (return_probes, returns) = canary();
        checks.extend([programs, return_probes]);
        let mut surveyor = Surveyor::new(returns, not_loaded);
        let servers: Vec<Server> =
            discover::schedulers().into_iter().map(|target| examine(target, &mut surveyor)).collect();
        let report = Report { checks, replicas: replica::of(&servers), servers };
        match self.output {
            Output::Json => match serde_json::to_string_pretty(&report) {
                Ok(json) => println!("{json}"),
                Err(error) => return fail(error),
            },
            Output::Text => print!("{}", text::render(&report)),
        }
        let bad = report.checks.iter().any(|check| check.outcome == Outcome::Bad);
        if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }
}

/// Loads the programs and lets go of them. Returns those that the kernel would not load too, and why.
fn trial() -> (Check, HashMap<String, String>) {
    let check = |outcome, found, fix: Option<&str>| Check {
        name: "bpf programs",
        outcome,
        found,
        fix: fix.map(ToOwned::to_owned),
    };
    match Kernel::load(TRIAL) {
        Ok((kernel, _)) if kernel.not_loaded().is_empty() => {
            (check(Outcome::Good, "the kernel takes them".to_owned(), None), HashMap::new())
        }
        Ok((kernel, _)) => {
            let mut names: Vec<&str> = kernel.not_loaded().keys().map(String::as_str).collect();
            names.sort_unstable();
            let found = format!("the kernel refuses {}", names.join(", "));
            let fix = "probes that need them are off: the tables below say which; a newer kernel may take them";
            (check(Outcome::Degraded, found, Some(fix)), kernel.not_loaded().clone())
        }
        Err(error) => {
            let programs = PROBES.iter().flat_map(|spec| spec.entry.into_iter().chain(spec.exit));
            let why = "see the check `bpf programs`";
            let none = programs.map(|program| (program.to_owned(), why.to_owned())).collect();
            (check(Outcome::Bad, error.to_string(), Some("see the checks above")), none)
        }
    }
}

/// Judges return probes as `run` does.
fn canary() -> (Check, ReturnProbes) {
    let outcome = canary::check();
    let returns = ReturnProbes::from(&outcome);
    let (outcome, found, fix) = match &returns {
        ReturnProbes::Allowed => (Outcome::Good, "a canary under a seccomp filter survived one".to_owned(), None),
        ReturnProbes::Refused { why } => {
            let fix = "without them transfers are followed in part only: the tables below say what is missing";
            (Outcome::Degraded, why.clone(), Some(fix.to_owned()))
        }
    };
    (Check { name: "return probes", outcome, found, fix }, returns)
}
