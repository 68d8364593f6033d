//! Finds `dislodge_mark` in a process: by its mapping, through the mapping, so that containers, deleted files and
//! memory files are all the same.

use std::path::{Path, PathBuf};

use super::{
    code::{self, Prologue},
    mapping::{self, Mapping, MappingError, OpenError},
    symbol::{SymbolError, SymbolPattern, SymbolTable},
};

/// The hook's marker function.
pub const MARKER_SYMBOL: &str = "dislodge_mark";

/// A mapped file with this in its path may be the hook's marker library (`dislodge_hook/marker/x86_64.so`).
const MARKER_LIBRARY: &[u8] = b"dislodge_hook/marker/";

/// Where to put the probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkerSite {
    /// The library, as the kernel finds it: `/proc/PID/map_files/…`.
    pub file: PathBuf,
    /// Where the marker is in the file, in bytes.
    pub file_offset: u64,
}

/// Why no marker was found.
#[derive(Debug, thiserror::Error)]
pub enum MarkerError {
    /// The process cannot be looked at.
    #[error(transparent)]
    Mappings(#[from] MappingError),
    /// No library of that name is mapped.
    #[error("the hook's marker library is not mapped")]
    NotMapped,
    /// The library cannot be opened.
    #[error("the hook's marker library: {0}")]
    Unreachable(#[from] OpenError),
    /// The library cannot be read, or is not one.
    #[error("the hook's marker library: {0}")]
    Unreadable(#[from] SymbolError),
    /// The library is not the hook's.
    #[error("the mapped marker library is not one that this agent can use: {0}")]
    Unusable(&'static str),
}

/// Finds the marker of a process.
pub fn find(pid: u32) -> Result<MarkerSite, MarkerError> {
    let mappings = mapping::read(pid)?;
    let file = mappings.iter().find(|mapping| maps_marker(mapping)).ok_or(MarkerError::NotMapped)?.open_path(pid)?;
    let file_offset = marker_offset(&file)?;
    Ok(MarkerSite { file, file_offset })
}

/// Whether this is the marker library's code.
fn maps_marker(mapping: &Mapping) -> bool {
    mapping.execute && mapping.name.windows(MARKER_LIBRARY.len()).any(|part| part == MARKER_LIBRARY)
}

fn marker_offset(library: &Path) -> Result<u64, MarkerError> {
    let table = SymbolTable::read(library)?;
    let symbols = table.resolve(&SymbolPattern::Exact(MARKER_SYMBOL));
    let symbol = symbols.first().ok_or(MarkerError::Unusable("no dislodge_mark"))?;
    let entry = code::entry_point(table.architecture(), &table.code(symbol, code::ENTRY_BYTES)?);
    if entry.prologue == Prologue::Nop {
        Ok(symbol.file_offset)
    } else {
        Err(MarkerError::Unusable("dislodge_mark does not begin with a nop: it is not this hook's"))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    const MARKER: &[u8] = include_bytes!("../../../hook/dislodge_hook/marker/x86_64.so");

    #[test]
    fn only_executable_mappings_of_the_marker_count() {
        let is_marker = |line: &str| mapping::parse_line(line.as_bytes()).is_some_and(|mapping| maps_marker(&mapping));
        let line = "7f00-7f01 r-xp 00001000 08:01 12 /opt/hook/dislodge_hook/marker/x86_64.so";
        assert!(is_marker(line));
        assert!(!is_marker(&line.replace("r-xp", "r--p")));
        assert!(!is_marker("7f00-7f01 r-xp 00001000 08:01 12 /usr/lib/libc.so.6"));
    }

    #[test]
    fn what_is_no_library_is_refused_with_a_reason() {
        let offset = |bytes: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(bytes).unwrap();
            marker_offset(file.path())
        };
        assert!(matches!(offset(b"#!/bin/sh"), Err(MarkerError::Unreadable(SymbolError::NotElf(_)))));
        let own = marker_offset(Path::new("/proc/self/exe")).unwrap_err();
        assert!(own.to_string().contains("no dislodge_mark"), "{own}");
        let at = offset(MARKER).unwrap() as usize;
        let mut other = MARKER.to_vec();
        other[at] = 0xc3;
        assert!(offset(&other).unwrap_err().to_string().contains("nop"));
    }

    #[test]
    fn a_process_without_the_hook_has_no_marker() {
        assert!(matches!(find(std::process::id()), Err(MarkerError::NotMapped)));
    }
}
