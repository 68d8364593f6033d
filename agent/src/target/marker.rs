//! Finds `dislodge_mark` in a process: by its mapping, through the mapping, so that containers, deleted files and
//! memory files are all the same.

use std::{
    fs::{self, File},
    io::{self, Read as _},
    path::PathBuf,
};

use object::{Object as _, ObjectSegment as _, ObjectSymbol as _};

/// The hook's marker function.
pub const MARKER_SYMBOL: &str = "dislodge_mark";

/// A mapped file of this name part may be the hook's marker library (`dislodge_hook/marker/x86_64.so`).
const MARKER_LIBRARY: &str = "dislodge_hook/marker/";

/// Largest file that is parsed: the marker library has a few kilobytes; a server may map anything under its name.
const MAX_LIBRARY: u64 = 1 << 20;

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
    #[error("cannot read the mappings of the process: {0}")]
    Mappings(io::Error),
    /// No library of that name is mapped.
    #[error("the hook's marker library is not mapped")]
    NotMapped,
    /// The library cannot be read.
    #[error("cannot read the marker library: {0}")]
    Unreadable(io::Error),
    /// The library is not one.
    #[error("the mapped marker library is not one that this agent can use: {0}")]
    Unusable(&'static str),
}

/// Finds the marker of a process.
pub fn find(pid: u32) -> Result<MarkerSite, MarkerError> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).map_err(MarkerError::Mappings)?;
    let range = maps.lines().find_map(executable_marker_mapping).ok_or(MarkerError::NotMapped)?;
    let file = PathBuf::from(format!("/proc/{pid}/map_files/{range}"));
    let mut bytes = Vec::new();
    File::open(&file)
        .and_then(|file| file.take(MAX_LIBRARY).read_to_end(&mut bytes))
        .map_err(MarkerError::Unreadable)?;
    let file_offset = symbol_offset(&bytes).map_err(MarkerError::Unusable)?;
    Ok(MarkerSite { file, file_offset })
}

/// The address range of a line of `/proc/PID/maps`, when it maps the marker library's code.
fn executable_marker_mapping(line: &str) -> Option<&str> {
    let mut words = line.split_ascii_whitespace();
    let (range, rights) = (words.next()?, words.next()?);
    (rights.contains('x') && line.contains(MARKER_LIBRARY)).then_some(range)
}

fn symbol_offset(bytes: &[u8]) -> Result<u64, &'static str> {
    let elf = object::File::parse(bytes).map_err(|_| "it is not an ELF file")?;
    let symbol = elf.dynamic_symbols().find(|symbol| symbol.name() == Ok(MARKER_SYMBOL)).ok_or("no dislodge_mark")?;
    let segment = elf
        .segments()
        .find(|segment| (segment.address()..segment.address() + segment.size()).contains(&symbol.address()))
        .ok_or("dislodge_mark is in no segment")?;
    let offset = symbol.address() - segment.address() + segment.file_range().0;
    match bytes.get(offset as usize) {
        // What every kernel emulates, instead of a trap of its own for the instruction: one-byte nop.
        Some(0x90) => Ok(offset),
        _ => Err("dislodge_mark does not begin with a nop: it is not this hook's"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_executable_mappings_of_the_marker_count() {
        let line = "7f00-7f01 r-xp 00001000 08:01 12 /opt/hook/dislodge_hook/marker/x86_64.so";
        assert_eq!(executable_marker_mapping(line), Some("7f00-7f01"));
        assert_eq!(executable_marker_mapping(&line.replace("r-xp", "r--p")), None);
        assert_eq!(executable_marker_mapping("7f00-7f01 r-xp 00001000 08:01 12 /usr/lib/libc.so.6"), None);
        assert_eq!(executable_marker_mapping(""), None);
    }

    #[test]
    fn what_is_no_library_is_refused_with_a_reason() {
        assert_eq!(symbol_offset(b"#!/bin/sh"), Err("it is not an ELF file"));
        let own = fs::read("/proc/self/exe").unwrap();
        assert_eq!(symbol_offset(&own), Err("no dislodge_mark"));
    }

    #[test]
    fn a_process_without_the_hook_has_no_marker() {
        assert!(matches!(find(std::process::id()), Err(MarkerError::NotMapped)));
    }
}
