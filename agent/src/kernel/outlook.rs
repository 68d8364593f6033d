//! What would become of the probes on a library, without attaching one: the judgement that `attach` acts on. Pure.

use std::collections::HashMap;

use serde::Serialize;

use super::{
    canary::ReturnProbes,
    plan::{Planned, ProbeRow, Surveyed},
    probe::ProbeSpec,
};

/// How much of a probe is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner<'a> {
    /// All of it.
    Whole,
    /// Its entry, though it has a return: what the function returns is not seen.
    EntryOnly {
        /// Why.
        why: &'a str,
    },
    /// None of it: it tells nothing without its return.
    Refused {
        /// Why.
        why: &'a str,
    },
}

impl ProbeSpec {
    /// How much of it is used where return probes are allowed or not.
    pub(super) fn manner<'a>(&self, returns: &'a ReturnProbes) -> Manner<'a> {
        match (self.exit, returns) {
            (None, _) | (Some(_), ReturnProbes::Allowed) => Manner::Whole,
            (Some(_), ReturnProbes::Refused { why }) if self.entry_is_useful_alone => Manner::EntryOnly { why },
            (Some(_), ReturnProbes::Refused { why }) => Manner::Refused { why },
        }
    }

    /// The programs of it that are used. The return's first: an entry whose return is not probed would leave its call in
    /// the map.
    pub(super) fn programs(&self, manner: Manner<'_>) -> impl Iterator<Item = &'static str> + use<> {
        let (exit, entry) = match manner {
            Manner::Whole => (self.exit, self.entry),
            Manner::EntryOnly { .. } => (None, self.entry),
            Manner::Refused { .. } => (None, None),
        };
        exit.into_iter().chain(entry)
    }
}

/// What would become of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "outlook", rename_all = "snake_case")]
pub enum Outlook {
    /// It can be attached; the kernel has the last word.
    Attachable,
    /// Only its entry can: what it returns would not be seen.
    EntryOnly {
        /// Why.
        why: String,
    },
    /// The library has no such function: another release.
    Missing,
    /// The kernel, or the agent, would not.
    Refused {
        /// Why.
        why: String,
    },
}

impl Outlook {
    /// Its name in output.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Attachable => "attachable",
            Self::EntryOnly { .. } => "entry only",
            Self::Missing => "missing",
            Self::Refused { .. } => "refused",
        }
    }

    /// Why it is not wholly attachable, where there is more to say than that.
    pub fn why(&self) -> Option<&str> {
        match self {
            Self::Attachable | Self::Missing => None,
            Self::EntryOnly { why } | Self::Refused { why } => Some(why),
        }
    }
}

/// What would become of a probe, before anything is attached.
pub type ProbeOutlook = ProbeRow<Outlook>;

impl Surveyed {
    /// What would become of each probe on this library: `returns` is the canary's judgement, `not_loaded` the programs that
    /// this kernel would not load, and why.
    pub fn outlook(&self, returns: &ReturnProbes, not_loaded: &HashMap<String, String>) -> Vec<ProbeOutlook> {
        let row = |planned: &Planned| {
            ProbeOutlook::of(planned.spec(), self.library.name.clone(), outlook(planned, returns, not_loaded))
        };
        self.planned.iter().map(row).collect()
    }
}

fn outlook(planned: &Planned, returns: &ReturnProbes, not_loaded: &HashMap<String, String>) -> Outlook {
    let spec = match planned {
        Planned::At(site) => site.spec,
        Planned::Missing(_) => return Outlook::Missing,
        Planned::Unusable(_, why) => return Outlook::Refused { why: why.clone() },
    };
    let manner = spec.manner(returns);
    if let Some(error) = spec.programs(manner).find_map(|program| not_loaded.get(program)) {
        return Outlook::Refused { why: program_refused(error) };
    }
    match manner {
        Manner::Whole => Outlook::Attachable,
        Manner::EntryOnly { why } => Outlook::EntryOnly { why: why.to_owned() },
        Manner::Refused { why } => Outlook::Refused { why: why.to_owned() },
    }
}

/// Why a probe cannot be attached whose program was not loaded.
pub(super) fn program_refused(error: &str) -> String {
    format!("the kernel refuses the program: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        kernel::{plan::Site, probe::PROBES},
        target::code::Prologue,
    };

    fn spec(function: &str) -> &'static ProbeSpec {
        PROBES.iter().find(|spec| spec.function == function).unwrap()
    }

    fn at(function: &str) -> Planned {
        let spec = spec(function);
        Planned::At(Site { spec, symbol: String::new(), file_offset: 0, parameter: 0, prologue: Prologue::Push })
    }

    fn refused() -> ReturnProbes {
        ReturnProbes::Refused { why: "a canary died".to_owned() }
    }

    const RELEASE: &str = "nixlAgent::releaseXferReq";
    const POST: &str = "nixlAgent::postXferReq";
    const CREATE: &str = "nixlAgent::createXferReq";

    #[test]
    fn what_becomes_of_a_probe_depends_on_return_probes_only_where_it_has_a_return() {
        let of = |function: &str, returns: &ReturnProbes| outlook(&at(function), returns, &HashMap::new());
        for function in [RELEASE, POST, CREATE] {
            assert_eq!(of(function, &ReturnProbes::Allowed), Outlook::Attachable);
        }
        let why = || "a canary died".to_owned();
        assert_eq!(of(RELEASE, &refused()), Outlook::Attachable);
        assert_eq!(of(POST, &refused()), Outlook::EntryOnly { why: why() });
        assert_eq!(of(CREATE, &refused()), Outlook::Refused { why: why() });
    }

    #[test]
    fn a_program_that_the_kernel_refused_matters_where_it_would_be_used() {
        let not_loaded = HashMap::from([("nixl_posted".to_owned(), "invalid".to_owned())]);
        let refusal = Outlook::Refused { why: "the kernel refuses the program: invalid".to_owned() };
        assert_eq!(outlook(&at(POST), &ReturnProbes::Allowed, &not_loaded), refusal);
        assert!(matches!(outlook(&at(POST), &refused(), &not_loaded), Outlook::EntryOnly { .. }));
        assert_eq!(outlook(&at(RELEASE), &ReturnProbes::Allowed, &not_loaded), Outlook::Attachable);
    }

    #[test]
    fn a_function_that_is_not_there_is_missing_and_one_that_cannot_be_read_is_refused() {
        let terms = (ReturnProbes::Allowed, HashMap::new());
        assert_eq!(outlook(&Planned::Missing(spec(POST)), &terms.0, &terms.1), Outlook::Missing);
        let unusable = Planned::Unusable(spec(POST), "not an ELF file".to_owned());
        assert_eq!(outlook(&unusable, &terms.0, &terms.1), Outlook::Refused { why: "not an ELF file".to_owned() });
    }
}
