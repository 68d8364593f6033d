//! What a process has mapped: `/proc/PID/maps`, read within bounds, and the files behind it, opened through the
//! mapping itself.
//!
//! Parsed here rather than with `procfs`: a traced process chooses its files' names, and that crate reads without
//! bound, gives up on the whole list for one name that is not UTF-8, and panics on a file called `/SYSV`.

use std::{
    collections::HashMap,
    ffi::OsStr,
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Read as _},
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::PathBuf,
};

use serde::Serialize;

/// Mappings of a process that are looked at: four times the kernel's default limit (`vm.max_map_count`, 65,530).
const MAX_MAPPINGS: usize = 1 << 18;
/// Bytes of `/proc/PID/maps` that are read. A server with CUDA and torch has about one mebibyte.
const MAX_BYTES: u64 = 64 << 20;
/// What the kernel puts behind the name of a file that is no longer where it was.
const DELETED: &[u8] = b" (deleted)";
/// The only character that the kernel escapes in a mapped file's name (`show_map_vma` in `fs/proc/task_mmu.c`).
const ESCAPED_NEWLINE: &[u8] = b"\\012";

/// Why the mappings of a process could not be read.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The process is gone, or may not be looked at.
    #[error("cannot read the mappings of the process: {0}")]
    Unreadable(#[from] io::Error),
    /// More than anything but an attack has.
    #[error("the process has more than {MAX_MAPPINGS} mappings, or more than {} MiB of names", MAX_BYTES >> 20)]
    TooMany,
}

/// Why a mapped file could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The rights for `/proc/PID/map_files` are missing, and the path leads nowhere.
    #[error(
        "cannot open it through the mapping ({mapping}) nor by its path ({path}): grant CAP_CHECKPOINT_RESTORE or \
         CAP_SYS_ADMIN"
    )]
    Unreachable {
        /// What opening `/proc/PID/map_files/…` said.
        mapping: io::Error,
        /// What opening the path in the process's root said.
        path: io::Error,
    },
    /// The rights for `/proc/PID/map_files` are missing, and the path leads to another file by now.
    #[error(
        "cannot open it through the mapping ({0}), and its path leads to another file: grant CAP_CHECKPOINT_RESTORE \
         or CAP_SYS_ADMIN"
    )]
    Replaced(io::Error),
    /// A device or the like, whose opening may have effects.
    #[error("it is not a regular file")]
    NotRegular,
}

/// A file, as `/proc/PID/maps` names it: the same for every path and every mount namespace that leads to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct FileId {
    /// Major number of the file system's device.
    pub major: u32,
    /// Minor number of the file system's device.
    pub minor: u32,
    /// Inode.
    pub inode: u64,
}

/// One line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// Address behind the last.
    pub end: u64,
    /// May be read.
    pub read: bool,
    /// May be written.
    pub write: bool,
    /// May be executed.
    pub execute: bool,
    /// Where it begins in its file, in bytes.
    pub file_offset: u64,
    /// Its file; nothing for anonymous memory.
    pub file: Option<FileId>,
    /// As the kernel writes it: a path in the process's mount namespace, `[heap]` or the like, or nothing. Newlines are
    /// `\012`, and ` (deleted)` may stand behind.
    pub name: Vec<u8>,
}

/// A file and every mapping of it.
#[derive(Clone, Debug)]
pub struct MappedFile<'a> {
    /// Which file.
    pub id: FileId,
    /// Its mappings, by address; at least one.
    pub mappings: Vec<&'a Mapping>,
}

/// Whether a mapped file is still where it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Presence {
    /// Its path leads to it, as far as the kernel says.
    Present,
    /// Removed or replaced since it was mapped, as an upgrade under a running process does.
    Deleted,
}

/// Every mapping of a process, by address.
pub fn read(pid: u32) -> Result<Vec<Mapping>, MappingError> {
    let mut lines = BufReader::new(File::open(format!("/proc/{pid}/maps"))?.take(MAX_BYTES));
    let (mut mappings, mut line) = (Vec::new(), Vec::new());
    while lines.read_until(b'\n', &mut line)? > 0 {
        if mappings.len() == MAX_MAPPINGS || line.pop() != Some(b'\n') {
            return Err(MappingError::TooMany);
        }
        mappings.extend(parse_line(&line));
        line.clear();
    }
    Ok(mappings)
}

/// One line of `/proc/PID/maps`, without its newline; nothing when it is not one.
pub fn parse_line(line: &[u8]) -> Option<Mapping> {
    let mut fields = line.splitn(6, |byte| *byte == b' ');
    let mut field = || std::str::from_utf8(fields.next()?).ok();
    let hexadecimal = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = field()?.split_once('-')?;
    let (start, end) = (hexadecimal(start)?, hexadecimal(end)?);
    let rights = field()?.as_bytes();
    let file_offset = hexadecimal(field()?)?;
    let (major, minor) = field()?.split_once(':')?;
    let (major, minor) = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
    let inode = field()?.parse().ok()?;
    let may = |index: usize, right: u8| rights.get(index) == Some(&right);
    (start < end).then(|| Mapping {
        start,
        end,
        read: may(0, b'r'),
        write: may(1, b'w'),
        execute: may(2, b'x'),
        file_offset,
        file: (inode != 0).then_some(FileId { major, minor, inode }),
        name: fields.next().unwrap_or_default().trim_ascii_start().to_vec(),
    })
}

/// The mapped files, in the order of their first mapping.
pub fn by_file(mappings: &[Mapping]) -> Vec<MappedFile<'_>> {
    let mut files: Vec<MappedFile<'_>> = Vec::new();
    let mut places: HashMap<FileId, usize> = HashMap::new();
    for mapping in mappings {
        let Some(id) = mapping.file else { continue };
        let place = *places.entry(id).or_insert_with(|| {
            files.push(MappedFile { id, mappings: Vec::new() });
            files.len() - 1
        });
        if let Some(file) = files.get_mut(place) {
            file.mappings.push(mapping);
        }
    }
    files
}

impl Mapping {
    /// The last part of the file's path, without ` (deleted)`. Empty for anonymous memory.
    pub fn file_name(&self) -> &[u8] {
        self.path().rsplit(|byte| *byte == b'/').next().unwrap_or_default()
    }

    /// The name of the folder that the file is in; empty where there is none.
    pub fn folder_name(&self) -> &[u8] {
        self.path().rsplit(|byte| *byte == b'/').nth(1).unwrap_or_default()
    }

    /// The path without ` (deleted)`. A file whose name really ends so is taken for a deleted one here.
    fn path(&self) -> &[u8] {
        self.name.strip_suffix(DELETED).unwrap_or(&self.name)
    }

    /// Whether the file is still where it was.
    pub fn presence(&self, pid: u32) -> Presence {
        // Any file may be *called* "… (deleted)". Then that very path leads to it.
        if self.name.ends_with(DELETED) && !paths(pid, &self.name).iter().any(|path| self.is_file_at(path)) {
            Presence::Deleted
        } else {
            Presence::Present
        }
    }

    /// Where the mapped file can be opened, and where a probe can be put on it: the mapping itself, which needs
    /// CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN and leads to containers', deleted and memory files alike; without those
    /// rights the path in the process's root, where it leads to the same file.
    ///
    /// The file may be on a file system that another process serves (FUSE) and never answers: call this, and read what
    /// it leads to, where waiting does no harm.
    pub fn open_path(&self, pid: u32) -> Result<PathBuf, OpenError> {
        let mapped = PathBuf::from(format!("/proc/{pid}/map_files/{:x}-{:x}", self.start, self.end));
        let path = match fs::metadata(&mapped) {
            Ok(_) => mapped,
            Err(error) => self.path_in_root(pid, error)?,
        };
        // Looked at before anything opens it: to open a device may do something.
        match fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() => Ok(path),
            _ => Err(OpenError::NotRegular),
        }
    }

    fn path_in_root(&self, pid: u32, mapping: io::Error) -> Result<PathBuf, OpenError> {
        let mut failure = None;
        for path in [&self.name, self.path()].into_iter().flat_map(|name| paths(pid, name)) {
            match fs::metadata(&path) {
                Ok(_) if self.is_file_at(&path) => return Ok(path),
                Ok(_) => return Err(OpenError::Replaced(mapping)),
                Err(error) => failure = Some(error),
            }
        }
        let path = failure.unwrap_or_else(|| io::ErrorKind::NotFound.into());
        Err(OpenError::Unreachable { mapping, path })
    }

    fn is_file_at(&self, path: &PathBuf) -> bool {
        fs::metadata(path).is_ok_and(|metadata| {
            let device = metadata.dev();
            let found =
                FileId { major: rustix::fs::major(device), minor: rustix::fs::minor(device), inode: metadata.ino() };
            self.file == Some(found)
        })
    }
}

/// Where a name leads in the root of a process. The kernel escapes a newline, but not the backslash it escapes it with:
/// such a name may mean two things.
fn paths(pid: u32, name: &[u8]) -> Vec<PathBuf> {
    let unescaped = unescape_newlines(name);
    let mut names = vec![name];
    if unescaped != name {
        names.push(&unescaped);
    }
    let root = format!("/proc/{pid}/root").into_bytes();
    let path = |name: &&[u8]| PathBuf::from(OsStr::from_bytes(&[&root, *name].concat()));
    names.iter().filter(|name| name.starts_with(b"/")).map(path).collect()
}

fn unescape_newlines(name: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((first, behind)) = rest.split_first() {
        if let Some(behind) = rest.strip_prefix(ESCAPED_NEWLINE) {
            plain.push(b'\n');
            rest = behind;
        } else {
            plain.push(*first);
            rest = behind;
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Mapping {
        parse_line(text.as_bytes()).unwrap()
    }

    #[test]
    fn a_line_is_read_in_every_part() {
        let mapping = line("7f00a000-7f00b000 r-xp 00001000 fe:01 12 /opt/a b/libnixl.so (deleted)");
        assert_eq!((mapping.start, mapping.end, mapping.file_offset), (0x7f00_a000, 0x7f00_b000, 0x1000));
        assert!(mapping.read && !mapping.write && mapping.execute);
        assert_eq!(mapping.file, Some(FileId { major: 0xfe, minor: 1, inode: 12 }));
        assert_eq!(mapping.file_name(), b"libnixl.so");
        assert_eq!(mapping.folder_name(), b"a b");
    }

    #[test]
    fn anonymous_memory_has_no_file() {
        let heap = line("55d0-55d1 rw-p 00000000 00:00 0                          [heap]");
        assert_eq!((heap.file, heap.name.as_slice()), (None, &b"[heap]"[..]));
        assert_eq!(line("55d0-55d1 rw-p 00000000 00:00 0 ").name, b"");
        assert_eq!(line("55d0-55d1 rw-p 00000000 00:00 0").file_name(), b"");
    }

    #[test]
    fn a_hostile_name_is_a_name_and_nothing_else() {
        for name in ["/SYSV", "/SYSV000000zz (deleted)", "/a\\012b-c r-xp", "/[stack:", "/x\u{1}y", "/ 7f-80 r-xp"] {
            assert_eq!(line(&format!("7f00-7f01 r--p 0 08:01 3 {name}")).name, name.as_bytes());
        }
        let mut latin = b"7f00-7f01 r-xp 0 08:01 3 /".to_vec();
        latin.extend([0xff, 0xfe, 0xe9]);
        assert_eq!(parse_line(&latin).unwrap().file_name(), [0xff, 0xfe, 0xe9]);
    }

    #[test]
    fn what_is_no_line_is_left_out() {
        for text in
            ["", "7f", "7f-7e r-xp 0 8:1 1 /a", "zz-7f r-xp 0 8:1 1 /a", "7e-7f r-xp 0 81 1", "7e-7f r-xp 0 8:1 -1"]
        {
            assert_eq!(parse_line(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn mappings_of_one_file_are_together_and_two_copies_apart() {
        let mappings = [
            line("1000-2000 r--p 0 08:01 3 /a/libnixl.so"),
            line("2000-3000 r-xp 1000 08:01 3 /a/libnixl.so"),
            line("4000-5000 rw-p 0 00:00 0"),
            line("6000-7000 r-xp 0 08:01 4 /b/libnixl.so"),
            line("8000-9000 r-xp 1000 08:01 3 /other/name"),
        ];
        let files = by_file(&mappings);
        assert_eq!(files.iter().map(|file| (file.id.inode, file.mappings.len())).collect::<Vec<_>>(), [(3, 3), (4, 1)]);
    }

    #[test]
    fn newlines_come_back() {
        assert_eq!(unescape_newlines(b"/a\\012b\\01"), b"/a\nb\\01");
    }

    #[test]
    fn this_process_is_read_and_its_program_opened() {
        let mappings = read(std::process::id()).unwrap();
        let program = fs::metadata("/proc/self/exe").unwrap().ino();
        let own = mappings.iter().find(|m| m.execute && m.file.is_some_and(|file| file.inode == program)).unwrap();
        assert_eq!(own.presence(std::process::id()), Presence::Present);
        assert_eq!(fs::metadata(own.open_path(std::process::id()).unwrap()).unwrap().ino(), program);
    }
}
