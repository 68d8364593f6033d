//! What the agent would see of a server's transfers: every library of its engine, every probe, and what is missing. Nothing is
//! attached; doctor plans by the code that the agent attaches by.

use std::collections::HashMap;

use dislodge::{
    kernel::{
        canary::ReturnProbes,
        outlook::{Outlook, ProbeOutlook},
        plan::{Planned, Surveyed},
        probe::POLL_CQ,
    },
    target::{
        library::{self, Libraries, LibraryRole, MappedLibrary, Unreachable},
        mapping::{FileId, MappingError},
    },
};
use serde::Serialize;

/// The libraries that make transfers, and the releases whose functions the probes know (`kernel::probe`).
const ENGINES: [(LibraryRole, &str, &str); 2] = [
    (LibraryRole::Nixl, "NIXL", "NIXL 0.3.1 to 1.5.1"),
    (LibraryRole::MooncakeEngine, "Mooncake", "Mooncake 0.3.4 to 0.3.13"),
];
/// What it costs when an engine's transfers can't be followed.
const NOT_FOLLOWED: &str = "why a transfer stalls or fails is not seen; where the hook's own counts prove nothing (a chunk \
                            that failed, NIXL in SGLang up to 0.5.11) `enforce` will refuse: not_quiescent";

/// What would be seen of a server's transfers.
#[derive(Debug, Default, Serialize)]
pub(super) struct EngineReport {
    /// What stands in the way of following transfers, the worst first; nothing where they will be followed.
    pub(super) findings: Vec<Finding>,
    /// The table of probes: what is required and missing first.
    pub(super) probes: Vec<ProbeOutlook>,
    /// Libraries that cannot be opened.
    pub(super) unreachable: Vec<Closed>,
}

/// Something that stands in the way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// What was found.
    pub(super) what: String,
    /// What it costs.
    pub(super) means: String,
    /// What to do about it.
    pub(super) fix: String,
}

/// A library that is loaded but cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Closed {
    /// What it does.
    pub(super) role: LibraryRole,
    /// Its file's name.
    pub(super) library: String,
    /// Why it cannot be opened, and what to do.
    pub(super) why: String,
}

impl From<&Unreachable> for Closed {
    fn from(library: &Unreachable) -> Self {
        Self { role: library.role, library: library.name.clone(), why: library.why.to_string() }
    }
}

/// Looks servers over. Ranks of one server map the same files: each is read once.
pub(super) struct Surveyor {
    returns: ReturnProbes,
    not_loaded: HashMap<String, String>,
    read: HashMap<FileId, Vec<Planned>>,
}

impl Surveyor {
    pub(super) fn new(returns: ReturnProbes, not_loaded: HashMap<String, String>) -> Self {
        Self { returns, not_loaded, read: HashMap::new() }
    }

    pub(super) fn survey(&mut self, pid: u32) -> EngineReport {
        match library::find(pid) {
            Ok(found) => self.report(pid, found),
            Err(error) => {
                EngineReport { findings: vec![not_readable(&error)], probes: Vec::new(), unreachable: Vec::new() }
            }
        }
    }

    fn report(&mut self, pid: u32, found: Libraries) -> EngineReport {
        let mut probes: Vec<ProbeOutlook> = Vec::new();
        let mut wants_poll_cq = found.mapped.iter().any(|library| library.role == LibraryRole::VerbsProvider);
        let libraries = found.mapped.clone();
        for library in found.mapped {
            let surveyed = match self.read.get(&library.file) {
                Some(planned) => Surveyed { library, planned: planned.clone() },
                None => {
                    let surveyed = Surveyed::of(library);
                    self.read.insert(surveyed.library.file, surveyed.planned.clone());
                    surveyed
                }
            };
            wants_poll_cq &= !surveyed.sees_work_completions();
            probes.extend(surveyed.outlook(&self.returns, &self.not_loaded));
        }
        if wants_poll_cq {
            probes.extend(self.poll_cq(pid, &libraries));
        }
        probes.sort_by_key(|row| (urgency(row), row.role, row.set, row.library.clone()));
        let unreachable: Vec<Closed> = found.unreachable.iter().map(Closed::from).collect();
        EngineReport { findings: findings(&probes, &unreachable), probes, unreachable }
    }
}

impl Surveyor {
    /// The providers' `poll_cq`, which has no symbol: the agent looks for it as soon as a transfer was seen.
    fn poll_cq(&self, pid: u32, libraries: &[MappedLibrary]) -> Vec<ProbeOutlook> {
        match Surveyed::providers(pid, libraries) {
            Ok(found) => found.iter().flat_map(|it| it.outlook(&self.returns, &self.not_loaded)).collect(),
            Err(why) => {
                let is_provider = |library: &&MappedLibrary| library.role == POLL_CQ.role;
                let names: Vec<&str> = libraries.iter().filter(is_provider).map(|it| it.name.as_str()).collect();
                vec![ProbeOutlook::of(&POLL_CQ, names.join(", "), Outlook::Refused { why })]
            }
        }
    }
}

/// How soon a row has to be read, 0 first.
fn urgency(row: &ProbeOutlook) -> u8 {
    match (&row.state, row.required) {
        (Outlook::Attachable, _) => 2,
        (_, false) => 1,
        (_, true) => 0,
    }
}

fn not_readable(error: &MappingError) -> Finding {
    Finding {
        what: format!("its libraries cannot be looked for: {error}"),
        means: NOT_FOLLOWED.to_owned(),
        fix: "run as root, or grant CAP_SYS_PTRACE; if the server has ended meanwhile, look again".to_owned(),
    }
}

/// What stands in the way of following each engine's transfers. As the agent, it takes all libraries of an engine
/// together: Mooncake has its engine in engine.so and, once more, in store.so.
fn findings(probes: &[ProbeOutlook], unreachable: &[Closed]) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut has_engine = false;
    for (role, engine, known) in ENGINES {
        let required: Vec<&ProbeOutlook> = probes.iter().filter(|row| row.role == role && row.required).collect();
        has_engine |= !required.is_empty();
        let lacking: Vec<&ProbeOutlook> =
            required.iter().copied().filter(|row| row.state != Outlook::Attachable).collect();
        if !lacking.is_empty() {
            found.push(Finding {
                what: format!(
                    "transfers of {engine} can't be followed: {} of {} required functions will not be fully probed",
                    lacking.len(),
                    required.len()
                ),
                means: NOT_FOLLOWED.to_owned(),
                fix: fix(&lacking, known),
            });
        }
        for closed in unreachable.iter().filter(|closed| closed.role == role) {
            has_engine = true;
            found.push(Finding {
                what: format!("transfers of {engine} can't be followed: {} cannot be opened", closed.library),
                means: NOT_FOLLOWED.to_owned(),
                fix: closed.why.clone(),
            });
        }
    }
    if !has_engine {
        found.push(Finding {
            what: "neither NIXL nor Mooncake is loaded: there is no transfer to follow".to_owned(),
            means: NOT_FOLLOWED.to_owned(),
            fix: "nothing, if it runs another backend; if it has just started, look again in a minute".to_owned(),
        });
    }
    found
}

/// What to do about required functions that will not be probed, by the first of them that says.
fn fix(lacking: &[&ProbeOutlook], known: &str) -> String {
    if lacking.iter().any(|row| row.state == Outlook::Missing) {
        return format!("run a release that the probes know ({known}), or an agent that knows this one");
    }
    let why = lacking.iter().find_map(|row| row.state.why()).unwrap_or_default();
    format!("mend this: {why}")
}

#[cfg(test)]
pub(super) mod tests {
    use dislodge::kernel::probe::ProbeSet;

    use super::*;

    pub(in crate::cli::doctor) fn row(function: &'static str, required: bool, outlook: Outlook) -> ProbeOutlook {
        let library = "libnixl.so".to_owned();
        ProbeOutlook { role: LibraryRole::Nixl, library, function, required, set: ProbeSet::Transfers, state: outlook }
    }

    fn refused(why: &str) -> Outlook {
        Outlook::Refused { why: why.to_owned() }
    }

    #[test]
    fn an_engine_whose_required_functions_are_attachable_has_nothing_in_the_way() {
        let rows = [row("post", true, Outlook::Attachable), row("status", false, Outlook::Missing)];
        assert_eq!(findings(&rows, &[]), []);
    }

    #[test]
    fn what_is_required_and_lacking_is_counted_with_what_it_costs_and_the_fix() {
        let rows = [
            row("post", true, Outlook::EntryOnly { why: "a canary died: use another kernel".to_owned() }),
            row("make", true, refused("a canary died: use another kernel")),
            row("release", true, Outlook::Attachable),
        ];
        let [finding] = &findings(&rows, &[])[..] else { panic!("one engine, one finding") };
        assert!(finding.what.contains("NIXL can't be followed: 2 of 3"), "{finding:?}");
        assert!(finding.means.contains("`enforce` will refuse"), "{finding:?}");
        assert!(finding.fix.contains("use another kernel"), "{finding:?}");
    }

    #[test]
    fn a_release_without_a_required_function_is_told_which_releases_have_it() {
        let rows = [row("post", true, refused("x")), row("make", true, Outlook::Missing)];
        assert!(findings(&rows, &[])[0].fix.contains("NIXL 0.3.1 to 1.5.1"));
    }

    #[test]
    fn a_second_copy_of_the_engine_counts_as_well() {
        let mooncake = |library: &str, outlook| {
            let library = library.to_owned();
            ProbeOutlook { role: LibraryRole::MooncakeEngine, library, ..row("submit", true, outlook) }
        };
        let rows = [mooncake("engine.so", Outlook::Attachable), mooncake("store.so", Outlook::Missing)];
        assert!(findings(&rows, &[])[0].what.contains("Mooncake can't be followed: 1 of 2"));
    }

    #[test]
    fn an_engine_that_cannot_be_opened_is_no_engine_that_is_not_there() {
        let why = "grant CAP_CHECKPOINT_RESTORE".to_owned();
        let closed = Closed { role: LibraryRole::Nixl, library: "libnixl.so".to_owned(), why };
        let [finding] = &findings(&[], &[closed])[..] else { panic!("one library, one finding") };
        assert!(finding.what.contains("libnixl.so cannot be opened") && finding.fix.contains("CAP_CHECKPOINT_RESTORE"));
        assert!(findings(&[], &[])[0].what.contains("neither NIXL nor Mooncake"));
    }

    #[test]
    fn what_is_required_and_lacking_comes_first() {
        let mut rows = [
            row("attachable", true, Outlook::Attachable),
            row("optional", false, Outlook::Missing),
            row("required", true, refused("x")),
        ];
        rows.sort_by_key(urgency);
        assert_eq!(rows.map(|row| row.function), ["required", "optional", "attachable"]);
    }
}
