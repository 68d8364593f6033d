//! One scheduler as doctor sees it: its hook, or why it has none; its transfer engine.

use std::{collections::HashMap, fs, iter};

use dislodge::{
    event::{Backend, Hello},
    remedy::guard::is_proved,
    request::Side,
    target::{
        Target,
        hook::{self, HookFile},
        marker,
    },
};
use procfs::process::Process;
use serde::Serialize;

use super::engine::{EngineReport, Surveyor};

/// Longest environment of a server that is read.
const MAX_ENVIRONMENT: usize = 1 << 20;
/// A scheduler and the processes above it that are asked for its environment: SGLang has one or two.
const MAX_LINEAGE: usize = 4;
/// Name of the hook's entry point in the group `sglang.srt.plugins`.
const PLUGIN: &str = "dislodge";

#[derive(Debug, Serialize)]
pub(super) struct Server {
    #[serde(flatten)]
    pub(super) target: Target,
    /// The hook, when it is active, and what it says of its server.
    pub(super) hook: Option<HookFile>,
    /// Whether tests have failed a sender of this backend on this release and read it back: only then may `enforce` act.
    pub(super) proved: bool,
    /// Whether the marker library is mapped.
    pub(super) marker: bool,
    /// Why the hook is not active, and what to do.
    pub(super) advice: Option<String>,
    /// What would be seen of its transfers.
    pub(super) engine: EngineReport,
}

pub(super) fn examine(target: Target, surveyor: &mut Surveyor) -> Server {
    let pid = target.key.pid;
    let marker = marker::find(pid);
    let hook = hook::inspect(pid);
    let advice = match (&marker, &hook) {
        (Ok(_), Ok(hook)) if hook.protocol == hook::PROTOCOL => None,
        (Ok(_), Ok(_)) => Some("its hook is of another version: install the hook of this agent's".to_owned()),
        (Ok(_), Err(error)) => {
            Some(format!("{error}: it becomes active with the first pass of a prefill or decode scheduler"))
        }
        (Err(marker::MarkerError::NotMapped), _) => Some(why_not_loaded(&environment(pid))),
        (Err(error), _) => Some(error.to_string()),
    };
    let hook = hook.ok();
    let proved = hook.as_ref().is_some_and(|hook| is_proved_server(&hook.server));
    let engine = surveyor.survey(pid);
    Server { target, hook, proved, marker: marker.is_ok(), advice, engine }
}

/// Whether senders of the server's own backend may be failed on its release.
fn is_proved_server(server: &Hello) -> bool {
    let own = |backend: &Backend| server.backend.as_deref() == Some(backend.name());
    Backend::ALL.into_iter().find(own).is_some_and(|backend| is_proved(backend, server.sglang.as_deref()))
}

/// Releases, ranks and flag of a server in a line.
pub(super) fn in_words(server: &Hello, proved: bool) -> String {
    let is_decode = server.role.as_deref() == Some(Side::Decode.name());
    let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "?".to_owned());
    let size = |value: Option<u32>| value.map_or("?".to_owned(), |size| size.to_string());
    let flag = server.flag.map_or("?", |flag| flag.name());
    let proof = if proved { "proved over TCP" } else { "unproved on this release: observed only, enforce refuses" };
    let act = if is_decode {
        "a decode: observed only, enforce refuses".to_owned()
    } else {
        format!("failure flag {flag} ({proof})")
    };
    format!(
        "sglang {}, {}, python {}, {} over {}, {act}, tp {} cp {} pp {}",
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

#[cfg(test)]
mod tests {
    use super::*;

    fn advice(variables: &[(&str, &str)]) -> String {
        why_not_loaded(&variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn a_server_is_proved_by_its_backend_and_its_release() {
        let of = |backend: Option<&str>, sglang: &str| {
            let backend = backend.map(ToOwned::to_owned);
            is_proved_server(&Hello { backend, sglang: Some(sglang.to_owned()), ..Hello::default() })
        };
        assert!(of(Some("nixl"), "0.5.99") && of(Some("mooncake"), "0.5.22"));
        assert!(!of(Some("mooncake"), "0.5.99") && !of(Some("mori"), "0.5.22") && !of(None, "0.5.22"));
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
