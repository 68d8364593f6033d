//! The functions of one library file: names, addresses, where they are in the file, and their code.
//!
//! Only headers and symbol tables are read, within a budget: the file belongs to the traced process.

use std::{cell::Cell, fs::File, io, ops::Range, os::unix::fs::FileExt as _, path::Path};

use object::{
    Architecture, Endianness, Object as _, ReadCache, ReadRef, elf,
    read::elf::{ElfFile64, FileHeader as _, ProgramHeader as _, SectionHeader as _, Sym as _},
};

/// Bytes that are read of one file: UCX and NIXL take less than 2 MB, Mooncake's store.so with all its C++ some 10.
const READ_BUDGET: u64 = 96 << 20;
/// Functions of one file that are kept.
const MAX_SYMBOLS: usize = 1 << 19;
/// Longest name that is kept: nixlAgent's longest mangled name has about 300 bytes.
const MAX_NAME: usize = 1024;
/// Most bytes of all names together.
const MAX_NAMES: usize = 64 << 20;

/// Why the functions of a file cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum SymbolError {
    /// The file cannot be opened or read.
    #[error("cannot read it: {0}")]
    Unreadable(#[from] io::Error),
    /// The file is not what was expected, or was cut off.
    #[error("it is not a 64-bit ELF file that makes sense: {0}")]
    NotElf(#[from] object::read::Error),
    /// Section headers or both symbol tables were stripped.
    #[error("it has no symbol table, not even the dynamic one")]
    NoTable,
    /// More than any library that is looked for has.
    #[error("it has more symbols than are looked at ({MAX_SYMBOLS} functions, {} MiB of names)", MAX_NAMES >> 20)]
    TooMany,
    /// The code of a function is not in the file.
    #[error("the code of {0} is not in the file")]
    NoCode(String),
}

/// What is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SymbolPattern {
    /// This (mangled) name.
    Exact(&'static str),
    /// Every name that begins so: where releases mangle the parameters differently.
    Prefix(&'static str),
}

/// A function of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Mangled name.
    pub name: String,
    /// Address in the library, before it is loaded anywhere.
    pub address: u64,
    /// Where its first instruction is in the file, in bytes: what a uprobe wants.
    pub file_offset: u64,
    /// Bytes of code; 0 where the table does not say.
    pub size: u64,
}

/// The functions of one file, sorted by name.
#[derive(Debug)]
pub struct SymbolTable {
    file: File,
    architecture: Architecture,
    build_id: Option<String>,
    names: Vec<u8>,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    name: Range<u32>,
    address: u64,
    file_offset: u64,
    size: u64,
}

/// A part of the file that is loaded executable.
#[derive(Clone, Copy)]
struct Code {
    address: u64,
    file_offset: u64,
    size: u64,
}

impl SymbolTable {
    /// Reads the functions of a library from `.dynsym` and, where it is not stripped, `.symtab`.
    pub fn read(path: &Path) -> Result<Self, SymbolError> {
        let file = File::open(path)?;
        let (cache, left) = (ReadCache::new(file.try_clone()?), Cell::new(READ_BUDGET));
        let elf = ElfFile64::<Endianness, _>::parse(Budgeted { cache: &cache, left: &left })?;
        let mut table = Self {
            file,
            architecture: elf.architecture(),
            build_id: elf.build_id()?.map(hexadecimal),
            names: Vec::new(),
            entries: Vec::new(),
        };
        table.fill(&elf)?;
        Ok(table)
    }

    fn fill<'a>(&mut self, elf: &ElfFile64<'a, Endianness, Budgeted<'a>>) -> Result<(), SymbolError> {
        let (header, endian, data) = (elf.elf_header(), elf.endian(), elf.data());
        let file_length = self.file.metadata()?.len();
        let code: Vec<Code> = header
            .program_headers(endian, data)?
            .iter()
            .filter(|segment| segment.p_type(endian) == elf::PT_LOAD && segment.p_flags(endian) & elf::PF_X != 0)
            .map(|segment| Code {
                address: segment.p_vaddr(endian),
                file_offset: segment.p_offset(endian),
                size: segment.p_filesz(endian).min(file_length.saturating_sub(segment.p_offset(endian))),
            })
            .collect();
        let sections = elf.elf_section_table();
        let mut tables = 0;
        for section in
            sections.iter().filter(|section| matches!(section.sh_type(endian), elf::SHT_DYNSYM | elf::SHT_SYMTAB))
        {
            let symbols: &[elf::Sym64<Endianness>] = section.data_as_array(endian, data)?;
            let strings = sections.section(section.link(endian))?.data(endian, data)?;
            tables += 1;
            for symbol in
                symbols.iter().filter(|symbol| symbol.st_type() == elf::STT_FUNC && !symbol.is_undefined(endian))
            {
                let (address, size) = (symbol.st_value(endian), symbol.st_size(endian));
                let Some(file_offset) = file_offset(&code, address) else { continue };
                let Some(name) = name_at(strings, symbol.st_name(endian)).filter(|name| is_function(name)) else {
                    continue;
                };
                self.keep(name, address, file_offset, size)?;
            }
        }
        if tables == 0 {
            return Err(SymbolError::NoTable);
        }
        self.sort();
        Ok(())
    }

    fn keep(&mut self, name: &[u8], address: u64, file_offset: u64, size: u64) -> Result<(), SymbolError> {
        let end = self.names.len() + name.len();
        if self.entries.len() == MAX_SYMBOLS || end > MAX_NAMES {
            return Err(SymbolError::TooMany);
        }
        // MAX_NAMES is far below 2³².
        let range = self.names.len() as u32..end as u32;
        self.names.extend(name);
        self.entries.push(Entry { name: range, address, file_offset, size });
        Ok(())
    }

    /// By name, then address; what both tables name is kept once.
    fn sort(&mut self) {
        let Self { names, entries, .. } = self;
        entries.sort_unstable_by(|a, b| {
            (bytes_of(names, a), a.address, b.size).cmp(&(bytes_of(names, b), b.address, a.size))
        });
        entries.dedup_by(|a, b| a.address == b.address && bytes_of(names, a) == bytes_of(names, b));
    }

    /// The processor that the library is for.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// The linker's fingerprint of the library, in hexadecimal.
    pub fn build_id(&self) -> Option<&str> {
        self.build_id.as_deref()
    }

    /// How many functions there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Every function that a pattern names, by name. An exact name can have several: versions of an exported function
    /// (`ibv_create_cq` has two), or local functions of two source files.
    pub fn resolve(&self, pattern: &SymbolPattern) -> Vec<Symbol> {
        let (SymbolPattern::Exact(text) | SymbolPattern::Prefix(text)) = pattern;
        let text = text.as_bytes();
        let first = self.entries.partition_point(|entry| bytes_of(&self.names, entry) < text);
        self.entries
            .iter()
            .skip(first)
            .take_while(|entry| match pattern {
                SymbolPattern::Exact(_) => bytes_of(&self.names, entry) == text,
                SymbolPattern::Prefix(_) => bytes_of(&self.names, entry).starts_with(text),
            })
            .map(|entry| Symbol {
                name: String::from_utf8_lossy(bytes_of(&self.names, entry)).into_owned(),
                address: entry.address,
                file_offset: entry.file_offset,
                size: entry.size,
            })
            .collect()
    }

    /// The first `most` bytes of a function's code, fewer where it is shorter.
    pub fn code(&self, symbol: &Symbol, most: usize) -> Result<Vec<u8>, SymbolError> {
        let length = match usize::try_from(symbol.size) {
            Ok(size) if size > 0 => size.min(most),
            _ => most,
        };
        let mut code = vec![0; length];
        let mut have = 0;
        while let Some(rest) = code.get_mut(have..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, symbol.file_offset.saturating_add(have as u64)) {
                Ok(0) => break,
                Ok(read) => have += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        code.truncate(have);
        if code.is_empty() { Err(SymbolError::NoCode(symbol.name.clone())) } else { Ok(code) }
    }
}

/// The build id of a library, in hexadecimal; nothing where it has none or is not one.
pub(super) fn build_id(path: &Path) -> Option<String> {
    let (cache, left) = (ReadCache::new(File::open(path).ok()?), Cell::new(READ_BUDGET));
    let elf = ElfFile64::<Endianness, _>::parse(Budgeted { cache: &cache, left: &left }).ok()?;
    elf.build_id().ok()?.map(hexadecimal)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().take(64).map(|byte| format!("{byte:02x}")).collect()
}

fn bytes_of<'a>(names: &'a [u8], entry: &Entry) -> &'a [u8] {
    names.get(entry.name.start as usize..entry.name.end as usize).unwrap_or_default()
}

fn name_at(strings: &[u8], offset: u32) -> Option<&[u8]> {
    let rest = strings.get(offset as usize..)?;
    let rest = rest.get(..=MAX_NAME).unwrap_or(rest);
    let length = rest.iter().position(|byte| *byte == 0)?;
    rest.get(..length).filter(|name| !name.is_empty())
}

/// Whether a name is a function's, and not that of a piece which the compiler split off it or made a variant of
/// (`….cold`, `….part.0`, `….constprop.0`): no caller enters those with the function's arguments.
fn is_function(name: &[u8]) -> bool {
    !name.contains(&b'.')
}

fn file_offset(code: &[Code], address: u64) -> Option<u64> {
    code.iter().find_map(|segment| {
        let inside = address.checked_sub(segment.address).filter(|inside| *inside < segment.size)?;
        segment.file_offset.checked_add(inside)
    })
}

/// Reads of a file until the budget is spent.
#[derive(Clone, Copy, Debug)]
struct Budgeted<'a> {
    cache: &'a ReadCache<File>,
    left: &'a Cell<u64>,
}

impl<'a> ReadRef<'a> for Budgeted<'a> {
    fn len(self) -> Result<u64, ()> {
        self.cache.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        self.left.set(self.left.get().checked_sub(size).ok_or(())?);
        self.cache.read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        let found = self.cache.read_bytes_at_until(range, delimiter)?;
        self.left.set(self.left.get().checked_sub(found.len() as u64).ok_or(())?);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// The hook's marker library: small, and stripped of `.symtab`.
    const MARKER: &[u8] = include_bytes!("../../../hook/dislodge_hook/marker/x86_64.so");

    fn read(bytes: &[u8]) -> Result<SymbolTable, SymbolError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        SymbolTable::read(file.path())
    }

    #[test]
    fn a_stripped_librarys_exported_functions_are_found_with_their_code() {
        let table = read(MARKER).unwrap();
        let found = table.resolve(&SymbolPattern::Exact("dislodge_mark"));
        assert_eq!(table.resolve(&SymbolPattern::Prefix("dislodge_m")), found);
        let [mark] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!(table.code(mark, 2).unwrap(), [0x90, 0xc3]);
        for missing in
            [SymbolPattern::Exact("dislodge_mar"), SymbolPattern::Prefix("dislodge_mark_"), SymbolPattern::Exact("")]
        {
            assert_eq!(table.resolve(&missing), [], "{missing:?}");
        }
    }

    #[test]
    fn functions_come_by_name_and_no_name_is_missed() {
        let table = SymbolTable::read(Path::new("/proc/self/exe")).unwrap();
        let all = table.resolve(&SymbolPattern::Prefix(""));
        assert_eq!(all.len(), table.len());
        assert!(all.len() > 1000 && all.is_sorted_by_key(|symbol| symbol.name.clone()));
        let unique: Vec<_> = all.iter().map(|symbol| (&symbol.name, symbol.address)).collect();
        assert!(unique.windows(2).all(|pair| pair[0] != pair[1]), "what two tables name is there once");
    }

    #[test]
    fn what_is_no_library_is_refused_with_what_it_is() {
        for bytes in [&b""[..], b"#!/bin/sh", b"\x7fELF", b"\x7fELF\x01\x01\x01"] {
            assert!(matches!(read(bytes), Err(SymbolError::NotElf(_))), "{bytes:?}");
        }
        assert!(matches!(SymbolTable::read(Path::new("/nowhere")), Err(SymbolError::Unreadable(_))));
    }

    #[test]
    fn a_file_cut_off_anywhere_is_refused_or_has_fewer_functions() {
        let error = read(&MARKER[..MARKER.len() / 2]).unwrap_err();
        assert!(matches!(error, SymbolError::NotElf(_)), "{error}");
        for length in (0..MARKER.len()).step_by(61) {
            drop(read(&MARKER[..length]));
        }
    }

    #[test]
    fn a_file_without_section_headers_says_that_it_has_no_symbols() {
        let mut bytes = MARKER.to_vec();
        bytes[0x28..0x30].fill(0); // e_shoff
        bytes[0x3c..0x40].fill(0); // e_shnum, e_shstrndx
        let error = read(&bytes).unwrap_err();
        assert!(matches!(error, SymbolError::NoTable), "{error}");
    }

    #[test]
    fn any_byte_may_be_wrong() {
        for place in 0..MARKER.len() {
            let mut broken = MARKER.to_vec();
            broken[place] ^= 0xff;
            if let Ok(table) = read(&broken) {
                for symbol in table.resolve(&SymbolPattern::Prefix("")) {
                    drop(table.code(&symbol, 64));
                }
            }
        }
    }

    #[test]
    fn a_table_that_claims_the_whole_address_space_is_refused() {
        let mut bytes = MARKER.to_vec();
        let sections = u64::from_le_bytes(bytes[0x28..0x30].try_into().unwrap()) as usize;
        bytes[sections + 64 + 0x20..][..8].fill(0x7f); // sh_size of .dynsym, the first section
        assert!(matches!(read(&bytes), Err(SymbolError::NotElf(_))));
    }

    #[test]
    fn names_are_bounded() {
        let mut long = vec![b'a'; MAX_NAME + 1];
        long.push(0);
        assert_eq!(name_at(&long, 0), None);
        assert_eq!(name_at(&long, 1).map(<[u8]>::len), Some(MAX_NAME));
        assert_eq!(name_at(b"a", 0), None, "not terminated");
        assert_eq!(name_at(b"\0", 0), None);
        assert_eq!(name_at(b"a\0", 9), None);
    }

    #[test]
    fn what_the_compiler_split_off_is_no_function() {
        assert!(is_function(b"_ZNK9nixlAgent14releaseXferReqEP12nixlXferReqH"));
        assert!(!is_function(b"ucp_ep_set_failed.cold"));
    }

    #[test]
    fn addresses_outside_the_code_have_no_offset() {
        let code = [Code { address: 0x1000, file_offset: 0x200, size: 0x10 }];
        assert_eq!(file_offset(&code, 0x100f), Some(0x20f));
        assert_eq!(file_offset(&code, 0x1010), None);
        assert_eq!(file_offset(&code, 0), None);
        assert_eq!(file_offset(&[Code { address: 0, file_offset: u64::MAX, size: u64::MAX }], 5), None);
    }
}
