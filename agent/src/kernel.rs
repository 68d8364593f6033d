//! The kernel's side: the BPF object, the probes on the servers' markers, the ring.

pub mod canary;
pub mod preflight;
pub mod ring;

use std::{
    collections::{HashMap, HashSet},
    fmt, io,
    num::NonZeroU32,
};

use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    maps::{Array, MapData, MapError, RingBuf},
    programs::{
        ProgramError, UProbe,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLinkId, UProbeScope},
    },
};
use dislodge_ebpf::{
    EVENTS_MAP, MARK_PROGRAM, PROCESSES_MAP,
    loss::ProcessCounters,
    process::{AttachCookie, MAX_PROCESSES, TracedProcess},
};

use crate::{event::ProcessKey, target::marker::MarkerSite};
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
    #[error("cannot attach to dislodge_mark: {0}")]
    Probe(#[from] ProgramError),
    /// The program is gone.
    #[error("the BPF object has no {0}")]
    Missing(&'static str),
}

/// The loaded programs and what they are attached to.
pub struct Kernel {
    ebpf: Ebpf,
    processes: Array<MapData, RawSlot>,
    traced: HashMap<ProcessKey, Traced>,
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
    link: UProbeLinkId,
}

impl Kernel {
    /// Loads the programs with a ring of `ring_size` bytes (a power of two, at least a page).
    pub fn load(ring_size: u32) -> Result<(Self, Ring), LoadError> {
        let mut ebpf = EbpfLoader::new().map_max_entries(EVENTS_MAP, ring_size).load(OBJECT)?;
        uprobe(&mut ebpf).ok_or(LoadError::Missing(MARK_PROGRAM))?.load()?;
        let events = ebpf.take_map(EVENTS_MAP).ok_or(LoadError::Missing(EVENTS_MAP))?;
        let processes = ebpf.take_map(PROCESSES_MAP).ok_or(LoadError::Missing(PROCESSES_MAP))?;
        let ring = Ring::new(RingBuf::try_from(events)?);
        Ok((Self { ebpf, processes: Array::try_from(processes)?, traced: HashMap::new() }, ring))
    }

    /// Puts a probe on the marker of one process. Only that process pays for it, though others may map the same file.
    pub fn attach(&mut self, key: ProcessKey, site: &MarkerSite) -> Result<(), AttachError> {
        let pid = NonZeroU32::new(key.pid).ok_or(AttachError::NoProcess)?;
        let slot = free_slot(self.traced.values().map(|traced| traced.slot)).ok_or(AttachError::TooMany)?;
        self.occupy(slot, TracedProcess { tgid: u64::from(key.pid), ..TracedProcess::default() })?;
        let program = uprobe(&mut self.ebpf).ok_or(AttachError::Missing(MARK_PROGRAM))?;
        let point = UProbeAttachPoint {
            location: UProbeAttachLocation::AbsoluteOffset(site.file_offset),
            cookie: Some(AttachCookie { slot }.to_bits()),
        };
        match program.attach(point, &site.file, UProbeScope::OneProcess(pid)) {
            Ok(link) => {
                self.traced.insert(key, Traced { slot, link });
                Ok(())
            }
            Err(error) => {
                self.occupy(slot, TracedProcess::default())?;
                Err(error.into())
            }
        }
    }

    /// Takes the probe off again. Its counters are gone with it.
    pub fn detach(&mut self, key: ProcessKey) {
        if let Some(Traced { slot, link }) = self.traced.remove(&key) {
            if let Some(program) = uprobe(&mut self.ebpf)
                && let Err(error) = program.detach(link)
            {
                tracing::warn!(pid = key.pid, %error, "cannot detach");
            }
            if let Err(error) = self.occupy(slot, TracedProcess::default()) {
                tracing::warn!(pid = key.pid, %error, "cannot take the process out of the map of traced processes");
            }
        }
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

/// The lowest slot that is not taken.
fn free_slot(taken: impl Iterator<Item = u32>) -> Option<u32> {
    let taken: HashSet<u32> = taken.collect();
    (0..MAX_PROCESSES).find(|slot| !taken.contains(slot))
}

fn uprobe(ebpf: &mut Ebpf) -> Option<&mut UProbe> {
    ebpf.program_mut(MARK_PROGRAM)?.try_into().ok()
}

/// Whether an error of attaching says that rights are missing.
pub fn is_permission_error(error: &ProgramError) -> bool {
    matches!(error, ProgramError::SyscallError(error) if error.io_error.kind() == io::ErrorKind::PermissionDenied)
}
