//! Which probes belong where in one library, and what became of them: the file's code in, a plan out.

use std::{fs::File, io, os::unix::fs::FileExt as _};

use serde::Serialize;

use super::probe::{POLL_CQ, PROBES, Parameter, ProbeSet, ProbeSpec};
use crate::target::{
    code::{ENTRY_BYTES, HOST, Prologue, entry_point, status_offset},
    library::{LibraryRole, MappedLibrary},
    symbol::{SymbolError, SymbolTable},
    verbs::{self, Limits, PollCq},
};

/// Longest code of a function that is decoded, in bytes.
const MAX_CODE: usize = 1 << 14;

/// What became of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum ProbeState {
    /// It is attached.
    Attached,
    /// Only its entry is attached: what it returns is not seen.
    EntryOnly {
        /// Why.
        why: String,
    },
    /// It is attached when somebody looks.
    OnDemand,
    /// The library has no such function: another release.
    Missing,
    /// The kernel, or the agent, would not.
    Refused {
        /// Why.
        why: String,
    },
}

impl ProbeState {
    /// Label value of metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Attached => "attached",
            Self::EntryOnly { .. } => "entry_only",
            Self::OnDemand => "on_demand",
            Self::Missing => "missing",
            Self::Refused { .. } => "refused",
        }
    }
}

/// A row of the table of probes: what became of it, or ([`super::outlook`]) what would.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProbeRow<State> {
    /// The kind of library.
    pub role: LibraryRole,
    /// File name of the library.
    pub library: String,
    /// The function.
    pub function: &'static str,
    /// Whether transfers can't be followed without it.
    pub required: bool,
    /// When it is attached.
    pub set: ProbeSet,
    /// What became of it.
    #[serde(flatten)]
    pub state: State,
}

impl<State> ProbeRow<State> {
    /// The row of a probe on a library of that file name.
    pub fn of(spec: &'static ProbeSpec, library: String, state: State) -> Self {
        let ProbeSpec { role, function, required, set, .. } = *spec;
        Self { role, library, function, required, set, state }
    }
}

/// What became of a probe.
pub type ProbeReport = ProbeRow<ProbeState>;

/// Where a probe belongs.
#[derive(Clone, Debug)]
pub struct Site {
    /// What it is for.
    pub spec: &'static ProbeSpec,
    /// The function's mangled name.
    pub symbol: String,
    /// Where in the file, in bytes: behind an `endbr64` where there is one.
    pub file_offset: u64,
    /// What the program is told.
    pub parameter: u32,
    /// The instruction that the kernel has to step over: what a hit costs depends on it.
    pub prologue: Prologue,
}

/// A probe of the table, for one library.
#[derive(Clone, Debug)]
pub enum Planned {
    /// It belongs here.
    At(Site),
    /// No form of the function is in the library.
    Missing(&'static ProbeSpec),
    /// The library cannot be used for it.
    Unusable(&'static ProbeSpec, String),
}

/// A library, and where the probes belong in it.
#[derive(Clone, Debug)]
pub struct Surveyed {
    /// Which.
    pub library: MappedLibrary,
    /// What belongs where.
    pub planned: Vec<Planned>,
}

impl Surveyed {
    /// Reads the library's functions. May take long on a slow file system: not for the loop.
    pub fn of(library: MappedLibrary) -> Self {
        let planned = match SymbolTable::read(&library.path) {
            Ok(symbols) => plan(library.role, &symbols),
            Err(error) => PROBES
                .iter()
                .filter(|spec| spec.role == library.role)
                .map(|spec| Planned::Unusable(spec, error.to_string()))
                .collect(),
        };
        Self { library, planned }
    }

    /// A verbs provider of which it was found where it polls its completion queues.
    ///
    /// # Errors
    ///
    /// The file cannot be read there.
    pub fn polls_at(library: MappedLibrary, poll_cq: &PollCq) -> io::Result<Self> {
        let mut code = [0; ENTRY_BYTES];
        File::open(&library.path)?.read_exact_at(&mut code, poll_cq.file_offset)?;
        let entry = entry_point(HOST, &code);
        let site = Site {
            spec: &POLL_CQ,
            symbol: POLL_CQ.function.to_owned(),
            file_offset: poll_cq.file_offset + entry.skip,
            parameter: 0,
            prologue: entry.prologue,
        };
        Ok(Self { library, planned: vec![Planned::At(site)] })
    }

    /// Where the verbs providers of a process poll their completion queues: its memory is searched, for two seconds at most.
    ///
    /// # Errors
    ///
    /// In words: no device is open, or the process or the provider's file cannot be read.
    pub fn providers(pid: u32, libraries: &[MappedLibrary]) -> Result<Vec<Self>, String> {
        let search = verbs::find_poll_cq(pid, libraries, Limits::default()).map_err(|error| error.to_string())?;
        let provider = |found: &PollCq| libraries.iter().find(|library| library.file == found.file).cloned();
        let places: Vec<Self> = search
            .found
            .iter()
            .filter_map(|found| Some(Self::polls_at(provider(found)?, found)))
            .collect::<io::Result<_>>()
            .map_err(|error| format!("the provider's file cannot be read: {error}"))?;
        if places.is_empty() {
            return Err(format!(
                "no device is open: no verbs context in {} MiB ({})",
                search.bytes >> 20,
                search.coverage
            ));
        }
        Ok(places)
    }

    /// Whether its completions are seen without the provider's `poll_cq`, which it calls.
    pub fn sees_work_completions(&self) -> bool {
        let polls =
            |planned: &Planned| matches!(planned, Planned::At(site) if site.spec.entry == Some("mooncake_poll"));
        self.planned.iter().any(polls)
    }

    /// Where NIXL's handles have their status, where this library's code shows it.
    pub fn status_offset(&self) -> Option<u32> {
        self.planned.iter().find_map(Planned::status_offset)
    }
}

/// Where each probe of a role belongs in a library.
pub fn plan(role: LibraryRole, symbols: &SymbolTable) -> Vec<Planned> {
    let mut planned: Vec<Planned> = Vec::new();
    let is_called_by_another =
        |spec: &ProbeSpec| spec.unless.as_ref().is_some_and(|other| !symbols.resolve(other).is_empty());
    for spec in PROBES.iter().filter(|spec| spec.role == role && !is_called_by_another(spec)) {
        let found = symbols.resolve(&spec.symbol);
        for symbol in &found {
            let site = symbols.code(symbol, ENTRY_BYTES).and_then(|code| {
                let entry = entry_point(symbols.architecture(), &code);
                Ok(Site {
                    spec,
                    symbol: symbol.name.clone(),
                    file_offset: symbol.file_offset + entry.skip,
                    parameter: parameter(spec, symbols, symbol)?,
                    prologue: entry.prologue,
                })
            });
            planned.push(match site {
                Ok(site) => Planned::At(site),
                Err(error) => Planned::Unusable(spec, error.to_string()),
            });
        }
        if found.is_empty() {
            planned.push(Planned::Missing(spec));
        }
    }
    // One form of a function is enough.
    let there: Vec<&str> =
        planned.iter().filter(|planned| !matches!(planned, Planned::Missing(_))).map(|it| it.spec().function).collect();
    planned.retain(|it| !matches!(it, Planned::Missing(spec) if there.contains(&spec.function)));
    planned.dedup_by(|a, b| matches!((a, b), (Planned::Missing(a), Planned::Missing(b)) if a.function == b.function));
    planned
}

impl Planned {
    fn status_offset(&self) -> Option<u32> {
        match self {
            Self::At(site) if site.spec.parameter == Parameter::StatusOffset && site.parameter != 0 => {
                Some(site.parameter)
            }
            _ => None,
        }
    }

    /// The row of the table.
    pub fn spec(&self) -> &'static ProbeSpec {
        match self {
            Self::At(site) => site.spec,
            Self::Missing(spec) | Self::Unusable(spec, _) => spec,
        }
    }
}

fn parameter(
    spec: &ProbeSpec,
    symbols: &SymbolTable,
    symbol: &crate::target::symbol::Symbol,
) -> Result<u32, SymbolError> {
    match spec.parameter {
        Parameter::Fixed(number) => Ok(number),
        Parameter::StatusOffset => {
            let code = symbols.code(symbol, MAX_CODE)?;
            Ok(status_offset(symbols.architecture(), &code).unwrap_or(0))
        }
    }
}

/// Whether each transfer of the library's engine is seen: its posting and its end.
pub fn is_complete(rows: &[ProbeReport]) -> bool {
    let mut required = rows.iter().filter(|row| row.required).peekable();
    required.peek().is_some() && required.all(|row| row.state == ProbeState::Attached)
}
