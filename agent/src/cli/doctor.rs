//! `dislodge doctor`: what this machine allows, and of each server whether the hook is in it or why not.

use std::{collections::HashMap, fs, iter, process::ExitCode};

use clap::Args;
use dislodge::{
    event::{Backend, Hello},
    kernel::{
        Kernel, Sizes,
        preflight::{Check, Machine, Outcome, judge},
    },
    remedy::guard::is_proved,
    target::{
        Target, discover,
        hook::{self, HookFile},
        marker,
    },
};
use procfs::process::Process;
use serde::Serialize;

use super::{Output, fail};

/// Smallest ring that can be loaded, to see whether the kernel takes the programs.
const TRIAL: Sizes = Sizes { ring: 64 << 10, calls: 64 };
/// Longest environment of a server that is read.
const MAX_ENVIRONMENT: usize = 1 << 20;
/// A scheduler and the processes above it that are asked for its environment: SGLang has one or two.
const MAX_LINEAGE: usize = 4;
/// Name of the hook's entry point in the group `sglang.srt.plugins`.
const PLUGIN: &str = "dislodge";

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
}

#[derive(Debug, Serialize)]
struct Server {
    #[serde(flatten)]
    target: Target,
    /// The hook, when it is active, and what it says of its server.
    hook: Option<HookFile>,
    /// Whether tests have failed a sender of this backend and read it back: only then may `enforce` act.
    proved: bool,
    /// Whether the marker library is mapped.
    marker: bool,
    /// Why the hook is not active, and what to do.
    advice: Option<String>,
}

impl Doctor {
    pub(super) fn run(self) -> ExitCode {
        let mut checks = judge(&Machine::inspect());
        checks.push(trial());
        let report = Report { servers: discover::schedulers().into_iter().map(examine).collect(), checks };
        match self.output {
            Output::Json => match serde_json::to_string_pretty(&report) {
                Ok(json) => println!("{json}"),
                Err(error) => return fail(error),
            },
            Output::Text => report.print(),
        }
        let bad = report.checks.iter().any(|check| check.outcome == Outcome::Bad);
        if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }
}

/// Loads the programs and lets go of them.
fn trial() -> Check {
    let (outcome, found, fix) = match Kernel::load(TRIAL) {
        Ok(_) => (Outcome::Good, "the kernel takes them".to_owned(), None),
        Err(error) => (Outcome::Bad, error.to_string(), Some("see the checks above".to_owned())),
    };
    Check { name: "bpf programs", outcome, found, fix }
}

fn examine(target: Target) -> Server {
    let pid = target.key.pid;
    let marker = marker::find(pid);
    let hook = hook::inspect(pid);
    let advice = match (&marker, &hook) {
        (Ok(_), Ok(hook)) if hook.protocol == hook::PROTOCOL => None,
        (Ok(_), Ok(_)) => Some("its hook is of another version: install the hook of this agent's".to_owned()),
        (Ok(_), Err(error)) => Some(format!(
            "{error}: it becomes active with the first pass of a prefill scheduler; a decode server has none"
        )),
        (Err(marker::MarkerError::NotMapped), _) => Some(why_not_loaded(&environment(pid))),
        (Err(error), _) => Some(error.to_string()),
    };
    let hook = hook.ok();
    let proved = hook.as_ref().is_some_and(|hook| hook.server.backend.as_deref().is_some_and(is_proved_name));
    Server { target, hook, proved, marker: marker.is_ok(), advice }
}

fn is_proved_name(backend: &str) -> bool {
    [Backend::Nixl, Backend::Fake].into_iter().any(|proved| is_proved(proved) && proved.name() == backend)
}

/// Releases, ranks and flag of a server in a line.
fn in_words(server: &Hello, proved: bool) -> String {
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "?".to_owned());
    let size = |value: Option<u32>| value.map_or("?".to_owned(), |size| size.to_string());
    let flag = server.flag.map_or("?", |flag| flag.name());
    let proof = if proved { "proved" } else { "unproved: observed only, enforce refuses" };
    format!(
        "sglang {}, {}, python {}, {} over {}, failure flag {flag} ({proof}), tp {} cp {} pp {}",
        text(&server.sglang),
        text(&server.engine),
        text(&server.python),
        text(&server.sender),
        text(&server.backend),
        size(server.tp),
        size(server.cp),
        size(server.pp)
    )
}

/// What the server's environment says about why the hook was not loaded.
fn why_not_loaded(environment: &HashMap<String, String>) -> String {
    if let Some(allowed) = environment.get("SGLANG_PLUGINS").filter(|list| !list.trim().is_empty())
        && !allowed.split(',').any(|name| name.trim() == PLUGIN)
    {
        return format!(
            "SGLANG_PLUGINS={allowed} does not allow the hook: add `{PLUGIN}` to it and restart the server"
        );
    }
    match environment.get("PYTHONPATH") {
        Some(path) if path.split(':').any(|folder| folder.trim_end_matches('/').ends_with("hook")) => {
            "PYTHONPATH seems to name the hook, but it is not loaded: SGLang before 0.5.11 needs the folder \
             hook/sitecustomize on PYTHONPATH too; from 0.5.11 look for `Failed to load plugin dislodge` in its log"
                .to_owned()
        }
        _ => "the hook is not loaded: put the folder `hook` on the server's PYTHONPATH (and `hook/sitecustomize` for \
              SGLang before 0.5.11) and restart it"
            .to_owned(),
    }
}

/// The environment that a server was started with. `setproctitle` wipes it in the scheduler itself; the process that
/// started the scheduler has the same, and has not lost it.
fn environment(pid: u32) -> HashMap<String, String> {
    iter::successors(Some(pid), |pid| parent(*pid))
        .take(MAX_LINEAGE)
        .map(initial_environment)
        .find(|variables| !variables.is_empty())
        .unwrap_or_default()
}

fn parent(pid: u32) -> Option<u32> {
    let parent = Process::new(i32::try_from(pid).ok()?).ok()?.stat().ok()?.ppid;
    u32::try_from(parent).ok().filter(|parent| *parent > 1)
}

/// The variables at the process's start, as far as it has not written over them.
fn initial_environment(pid: u32) -> HashMap<String, String> {
    let mut bytes = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    bytes.truncate(MAX_ENVIRONMENT);
    bytes
        .split(|byte| *byte == 0)
        .filter_map(|entry| std::str::from_utf8(entry).ok()?.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

impl Report {
    fn print(&self) {
        for check in &self.checks {
            let mark = match check.outcome {
                Outcome::Good => "ok  ",
                Outcome::Degraded => "warn",
                Outcome::Bad => "FAIL",
            };
            println!("{mark}  {:<16} {}", check.name, check.found);
            if let Some(fix) = &check.fix {
                println!("      {:<16} → {fix}", "");
            }
        }
        if self.servers.is_empty() {
            println!(
                "no SGLang scheduler runs on this node (process titles that begin with {})",
                discover::SCHEDULER_TITLE
            );
        }
        for Server { target, hook, proved, advice, .. } in &self.servers {
            let version = hook.as_ref().map_or("not active".to_owned(), |hook| format!("active, {}", hook.hook));
            println!("pid {:<9} {}  hook: {version}", target.key.pid, target.title);
            if let Some(hook) = hook {
                println!("      {}", in_words(&hook.server, *proved));
            }
            if let Some(advice) = advice {
                println!("      {:<16} → {advice}", "");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(variables: &[(&str, &str)]) -> String {
        why_not_loaded(&variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn an_allow_list_that_leaves_the_hook_out_is_named_with_the_fix() {
        assert!(advice(&[("SGLANG_PLUGINS", "otel, other")]).contains("add `dislodge`"));
        assert!(!advice(&[("SGLANG_PLUGINS", "otel, dislodge")]).contains("SGLANG_PLUGINS"));
        assert!(!advice(&[("SGLANG_PLUGINS", " ")]).contains("SGLANG_PLUGINS"));
    }

    #[test]
    fn a_path_that_names_the_hook_leads_to_the_log() {
        assert!(advice(&[("PYTHONPATH", "/a:/opt/dislodge/hook/")]).contains("log"));
        assert!(advice(&[]).contains("PYTHONPATH"));
    }
}
