//! The kernel's side: the BPF object, the probes on the servers' markers and transfer engines, the ring.

pub mod attach;
pub mod canary;
pub mod look;
pub mod outlook;
pub mod plan;
pub mod preflight;
pub mod probe;
mod removal;
pub mod ring;

use std::{
    collections::{HashMap, HashSet},
    fmt,
};

use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    maps::{Array, HashMap as BpfHashMap, MapData, MapError, RingBuf},
    programs::{ProgramError, UProbe},
};
use dislodge_ebpf::{
    CALLS_MAP, COMPLETIONS_MAP, EVENTS_MAP, MARK_PROGRAM, POLLS_MAP, PROCESSES_MAP,
    loss::ProcessCounters,
    process::{AttachCookie, MAX_PROCESSES, TracedProcess},
};

use crate::{event::ProcessKey, target::marker::MarkerSite};
use attach::Link;
use removal::Removal;
use ring::Ring;

/// The compiled programs: committed as `ebpf/dislodge.bpf.o`, checked against their sources by the build script.
static OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/dislodge.bpf.o"));

/// A slot of the map of traced processes as it stands there.
type RawSlot = [u64; size_of::<TracedProcess>() / size_of::<u64>()];

/// Why the programs could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The kernel refused the object.
    #[error("cannot load the BPF programs: {0}; `dislodge doctor` says what is missing")]
    Object(#[from] aya::EbpfError),
    /// The kernel refused a program.
    #[error("the kernel refuses the BPF program: {0}; `dislodge doctor` says what is missing")]
    Program(#[from] ProgramError),
    /// A map is not what it should be.
    #[error("cannot use a BPF map: {0}")]
    Map(#[from] MapError),
    /// The object is not the one that this agent was written for.
    #[error("the BPF object has no {0}: it is not of this agent's version")]
    Missing(&'static str),
}

/// Why a process could not be attached to.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The pid is none.
    #[error("0 is not a process")]
    NoProcess,
    /// Every slot of the map of traced processes is taken.
    #[error("{MAX_PROCESSES} processes are traced already, which is as many as there can be")]
    TooMany,
    /// The map of traced processes cannot be written.
    #[error("cannot enter the process into the map of traced processes: {0}")]
    Map(#[from] MapError),
    /// The kernel refused the probe.
    #[error("cannot attach the probe: {0}")]
    Probe(#[from] ProgramError),
    /// The program is gone.
    #[error("the BPF object has no {0}")]
    Missing(&'static str),
}

/// How much the kernel keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of the ring: a power of two, at least a page.
    pub ring: u32,
    /// Calls into transfer engines that are under way at once: one a thread.
    pub calls: u32,
}

/// The loaded programs and what they are attached to.
pub struct Kernel {
    ebpf: Ebpf,
    /// Programs of probes on transfer engines that this kernel would not load, and why.
    not_loaded: HashMap<String, String>,
    processes: Array<MapData, RawSlot>,
    polls: BpfHashMap<MapData, [u64; 2], [u64; 4]>,
    completions: BpfHashMap<MapData, u64, [u64; 2]>,
    calls: BpfHashMap<MapData, [u32; 2], [u64; 5]>,
    traced: HashMap<ProcessKey, Traced>,
    removal: Removal,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("traced", &self.traced).finish_non_exhaustive()
    }
}

/// What belongs to one traced process.
#[derive(Debug)]
struct Traced {
    slot: u32,
    links: Vec<Link>,
}

impl Kernel {
    /// Loads the programs. Without the one for the hook's marks nothing can be done; of the others, those that this
    /// kernel refuses are left out, and what needs them says so.
    pub fn load(sizes: Sizes) -> Result<(Self, Ring), LoadError> {
        let mut loader = EbpfLoader::new();
        loader.map_max_entries(EVENTS_MAP, sizes.ring).map_max_entries(CALLS_MAP, sizes.calls);
        let mut ebpf = loader.load(OBJECT)?;
        let mut not_loaded = HashMap::new();
        for (name, program) in ebpf.programs_mut() {
            let loaded = <&mut UProbe>::try_from(program).and_then(UProbe::load);
            match loaded {
                Ok(()) => {}
                Err(error) if name == MARK_PROGRAM => return Err(error.into()),
                Err(error) => {
                    tracing::debug!(name, %error, "not loaded");
                    // The verifier's whole protocol follows; its verdict is what people need.
                    let error = error.to_string();
                    let verdict =
                        error.lines().rev().find(|line| line.contains("disallowed") || line.contains("invalid"));
                    let first = error.lines().next().unwrap_or_default();
                    not_loaded
                        .insert(name.to_owned(), format!("{}: {}", cut(first), verdict.unwrap_or("see the debug log")));
                }
            }
        }
        let mut take = |name: &'static str| ebpf.take_map(name).ok_or(LoadError::Missing(name));
        let ring = Ring::new(RingBuf::try_from(take(EVENTS_MAP)?)?);
        let processes = Array::try_from(take(PROCESSES_MAP)?)?;
        let polls = BpfHashMap::try_from(take(POLLS_MAP)?)?;
        let completions = BpfHashMap::try_from(take(COMPLETIONS_MAP)?)?;
        let calls = BpfHashMap::try_from(take(CALLS_MAP)?)?;
        let (traced, removal) = (HashMap::new(), Removal::default());
        Ok((Self { ebpf, not_loaded, processes, polls, completions, calls, traced, removal }, ring))
    }

    /// Programs that this kernel would not load, and why.
    pub fn not_loaded(&self) -> &HashMap<String, String> {
        &self.not_loaded
    }

    /// Puts a probe on the marker of one process. Only that process pays for it, though others may map the same file.
    pub fn attach(&mut self, key: ProcessKey, site: &MarkerSite) -> Result<(), AttachError> {
        let slot = self.slot(key)?;
        let cookie = AttachCookie { slot, parameter: 0 };
        let attached = self.attach_uprobe(key, MARK_PROGRAM, &site.file, site.file_offset, cookie);
        let traced = self.traced.get_mut(&key);
        match (attached, traced) {
            (Ok(id), Some(traced)) => {
                traced.links.push(Link { program: MARK_PROGRAM, slot, id });
                Ok(())
            }
            (attached, _) => {
                self.detach_if_unused(key);
                attached.map(|_| ())
            }
        }
    }

    /// Takes every probe off a process again. Its counters are gone with them. Nothing is seen of it any more; what a probe
    /// costs the process ends a little later ([`Self::wait_for_removal`]).
    pub fn detach(&mut self, key: ProcessKey) {
        if let Some(Traced { slot, links }) = self.traced.remove(&key) {
            self.drop_links(key, links);
            self.forget_looks(slot);
            if let Err(error) = self.occupy(slot, TracedProcess::default()) {
                tracing::warn!(pid = key.pid, %error, "cannot take the process out of the map of traced processes");
            }
        }
    }

    /// Waits until every probe that was taken off is gone.
    pub fn wait_for_removal(&mut self) {
        self.removal.wait();
    }

    /// Takes out the calls of threads that do not live any more; returns how many there were. A call that is under way
    /// stays, however long it takes.
    pub fn collect_calls(&mut self) -> usize {
        let is_dead = |tid: u32| !std::path::Path::new(&format!("/proc/{tid}")).exists();
        let dead: Vec<[u32; 2]> = self.calls.keys().filter_map(Result::ok).filter(|[tid, _]| is_dead(*tid)).collect();
        dead.iter().filter(|key| self.calls.remove(key).is_ok()).count()
    }

    /// Gives up the slot of a process that has no probe.
    pub fn detach_if_unused(&mut self, key: ProcessKey) {
        if self.traced.get(&key).is_some_and(|traced| traced.links.is_empty()) {
            self.detach(key);
        }
    }

    /// The slot of a process, a new one where it has none.
    fn slot(&mut self, key: ProcessKey) -> Result<u32, AttachError> {
        if let Some(traced) = self.traced.get(&key) {
            return Ok(traced.slot);
        }
        let slot = free_slot(self.traced.values().map(|traced| traced.slot).chain(self.removal.slots()))
            .ok_or(AttachError::TooMany)?;
        self.occupy(slot, TracedProcess { tgid: u64::from(key.pid), ..TracedProcess::default() })?;
        self.traced.insert(key, Traced { slot, links: Vec::new() });
        Ok(slot)
    }

    fn occupy(&mut self, slot: u32, process: TracedProcess) -> Result<(), MapError> {
        let raw: RawSlot = zerocopy::transmute!(process);
        self.processes.set(slot, raw, 0)
    }

    /// What was seen and lost of a traced process so far.
    pub fn counters(&self, key: ProcessKey) -> Option<ProcessCounters> {
        let raw = self.processes.get(&self.traced.get(&key)?.slot, 0).ok()?;
        let process: TracedProcess = zerocopy::transmute!(raw);
        Some(process.counters)
    }

    /// The processes that have a probe.
    pub fn attached(&self) -> impl Iterator<Item = ProcessKey> {
        self.traced.keys().copied()
    }
}

/// The beginning of a line that may be long.
fn cut(line: &str) -> &str {
    line.split(" Verifier output").next().unwrap_or(line)
}

/// The lowest slot that is not taken.
fn free_slot(taken: impl Iterator<Item = u32>) -> Option<u32> {
    let taken: HashSet<u32> = taken.collect();
    (0..MAX_PROCESSES).find(|slot| !taken.contains(slot))
}
