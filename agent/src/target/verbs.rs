//! Where a verbs provider polls its completion queues, in a process that runs already.
//!
//! `ibv_poll_cq` is inline: it calls `cq->context->ops.poll_cq`, a function that providers neither export nor name (nor is
//! it the one in the file's tables: mlx5 replaces it at run time). So the process's memory is searched for a
//! `struct ibv_context`, whose layout is public ABI and the same from rdma-core v28 to v64.

mod context;

use std::{
    collections::HashMap,
    fmt, fs, io,
    path::PathBuf,
    time::{Duration, Instant},
};

pub use context::{Candidate, ProviderCode, candidates};

use super::{
    library::{LibraryRole, MappedLibrary},
    mapping::{self, FileId, Mapping, MappingError},
    memory::Memory,
};

/// Bytes that are read at once.
const CHUNK: usize = 1 << 20;
/// Different functions that are kept: one per provider, two where a provider has two.
const MAX_FOUND: usize = 16;
/// What the device's file of a verbs context is called.
const DEVICE: &[u8] = b"/dev/infiniband/uverbs";

/// How much of a process is searched.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of memory.
    pub bytes: u64,
    /// Time.
    pub time: Duration,
}

impl Default for Limits {
    /// Two gibibytes, two seconds. A context lies in the heap or in a thread's arena; those come first.
    fn default() -> Self {
        Self { bytes: 2 << 30, time: Duration::from_secs(2) }
    }
}

/// A function that polls completion queues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollCq {
    /// The provider's file, where a probe can be put on it.
    pub path: PathBuf,
    /// Which file that is.
    pub file: FileId,
    /// The provider's file name.
    pub provider: String,
    /// Where the function is in memory.
    pub address: u64,
    /// Where it is in the file, in bytes.
    pub file_offset: u64,
}

/// Why a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coverage {
    /// All memory that is present was searched.
    Whole,
    /// The limit of bytes was reached.
    OutOfBytes,
    /// The limit of time was reached.
    OutOfTime,
    /// As many functions were found as are kept.
    Enough,
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole => "all that is present",
            Self::OutOfBytes => "not all: it is more than is searched",
            Self::OutOfTime => "not all: it took too long",
            Self::Enough => "not all: enough was found",
        })
    }
}

/// What a search found.
#[derive(Clone, Debug)]
pub struct Search {
    /// The functions, each once.
    pub found: Vec<PollCq>,
    /// How far it got.
    pub coverage: Coverage,
    /// Bytes that were searched.
    pub bytes: u64,
}

/// Why no search was made.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// Nobody polls anything there.
    #[error("no verbs provider is loaded")]
    NoProvider,
    /// The process is gone, or may not be looked at.
    #[error(transparent)]
    Mappings(#[from] MappingError),
    /// The rights are missing.
    #[error("cannot read the memory of the process: {0}: grant CAP_SYS_PTRACE")]
    Memory(io::Error),
}

/// Finds what polls completion queues in a process with these libraries.
///
/// Memory that is not present is left alone: to read it would fault it in, in a server that must not notice.
pub fn find_poll_cq(pid: u32, libraries: &[MappedLibrary], limits: Limits) -> Result<Search, SearchError> {
    let providers: Vec<&MappedLibrary> =
        libraries.iter().filter(|library| library.role == LibraryRole::VerbsProvider).collect();
    if providers.is_empty() {
        return Err(SearchError::NoProvider);
    }
    let code: Vec<Vec<(u64, u64)>> =
        providers.iter().map(|provider| provider.code.iter().map(|part| (part.start, part.end)).collect()).collect();
    let places = where_contexts_lie(mapping::read(pid)?);
    let mut searcher = Searcher {
        code: ProviderCode::new(&code),
        providers,
        memory: Memory::open(pid, CHUNK + context::SIZE).map_err(SearchError::Memory)?,
        devices: Devices { pid, known: HashMap::new() },
        limits,
        deadline: Instant::now() + limits.time,
        found: Vec::new(),
        bytes: 0,
    };
    let coverage = places.iter().find_map(|mapping| searcher.search(mapping));
    Ok(Search { found: searcher.found, coverage: coverage.unwrap_or(Coverage::Whole), bytes: searcher.bytes })
}

/// A search under way.
struct Searcher<'a> {
    providers: Vec<&'a MappedLibrary>,
    code: ProviderCode,
    memory: Memory,
    devices: Devices,
    limits: Limits,
    deadline: Instant,
    found: Vec<PollCq>,
    bytes: u64,
}

impl Searcher<'_> {
    /// Searches a mapping, and says why the search ends there if it does.
    fn search(&mut self, mapping: &Mapping) -> Option<Coverage> {
        let left = self.limits.bytes.saturating_sub(self.bytes);
        for (start, end) in self.memory.present(mapping, left, self.deadline) {
            let mut at = start;
            while at < end {
                if let Some(ended) = self.ended() {
                    return Some(ended);
                }
                // A context may begin in one chunk and end in the next: chunks overlap by one.
                let length = (end - at).min((CHUNK + context::SIZE) as u64);
                let bytes = self.memory.read(at, length as usize);
                for candidate in candidates(bytes, &self.code) {
                    if let Some(found) = poll_cq(&candidate, &self.providers)
                        && !self.found.contains(&found)
                        && self.devices.is_verbs(candidate.cmd_fd)
                    {
                        self.found.push(found);
                    }
                    if self.found.len() == MAX_FOUND {
                        return Some(Coverage::Enough);
                    }
                }
                let step = length.min(CHUNK as u64);
                self.bytes += step;
                at += step;
            }
        }
        self.ended()
    }

    fn ended(&self) -> Option<Coverage> {
        if self.bytes >= self.limits.bytes {
            return Some(Coverage::OutOfBytes);
        }
        (Instant::now() >= self.deadline).then_some(Coverage::OutOfTime)
    }
}

fn poll_cq(candidate: &Candidate, providers: &[&MappedLibrary]) -> Option<PollCq> {
    let provider = providers.get(candidate.provider)?;
    let file_offset = provider.code.iter().find_map(|range| range.file_offset_of(candidate.poll_cq))?;
    Some(PollCq {
        path: provider.path.clone(),
        file: provider.file,
        provider: provider.name.clone(),
        address: candidate.poll_cq,
        file_offset,
    })
}

/// Where `calloc` may have put a context, likeliest first: the heap, then other anonymous memory, small before large (a
/// server's caches are large).
fn where_contexts_lie(mappings: Vec<Mapping>) -> Vec<Mapping> {
    let mut places: Vec<Mapping> = mappings
        .into_iter()
        .filter(|mapping| mapping.read && mapping.write && mapping.file.is_none())
        .filter(|mapping| mapping.name.is_empty() || mapping.name == b"[heap]" || mapping.name.starts_with(b"[anon:"))
        .collect();
    places.sort_by_key(|mapping| (mapping.name != b"[heap]", mapping.end - mapping.start));
    places
}

/// Which descriptors of a process are verbs devices.
struct Devices {
    pid: u32,
    known: HashMap<i32, bool>,
}

impl Devices {
    fn is_verbs(&mut self, fd: i32) -> bool {
        let pid = self.pid;
        // No process can have more (`fs.nr_open`): garbage is not looked up.
        (0..=1 << 20).contains(&fd)
            && *self.known.entry(fd).or_insert_with(|| {
                fs::read_link(format!("/proc/{pid}/fd/{fd}"))
                    .is_ok_and(|link| link.as_os_str().as_encoded_bytes().starts_with(DEVICE))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heaps_come_first_and_files_never() {
        let mapping = |line: &str| mapping::parse_line(line.as_bytes()).unwrap();
        let places = where_contexts_lie(vec![
            mapping("10000-90000 rw-p 0 00:00 0"),
            mapping("100000-102000 rw-p 0 00:00 0"),
            mapping("200000-300000 rw-p 0 00:00 0 [heap]"),
            mapping("400000-401000 r--p 0 00:00 0"),
            mapping("500000-501000 rw-p 0 08:01 7 /a"),
            mapping("600000-601000 rw-p 0 00:00 0 [stack]"),
        ]);
        assert_eq!(places.iter().map(|place| place.start).collect::<Vec<_>>(), [0x20_0000, 0x10_0000, 0x1_0000]);
    }

    #[test]
    fn a_process_without_a_provider_is_not_searched() {
        let error = find_poll_cq(std::process::id(), &[], Limits::default()).unwrap_err();
        assert!(matches!(error, SearchError::NoProvider));
    }
}
