//! The kernel's side: the BPF object, the probes on the servers' markers, the ring.

pub mod preflight;
pub mod ring;

use std::{collections::HashMap, io, num::NonZeroU32};

use aya::{
    Ebpf, EbpfLoader, include_bytes_aligned,
    maps::{HashMap as BpfHashMap, MapData, MapError, RingBuf},
    programs::{
        ProgramError, UProbe,
        uprobe::{UProbeAttachLocation, UProbeLinkId, UProbeScope},
    },
};
use dislodge_ebpf::{EVENTS_MAP, MARK_PROGRAM, PROCESSES_MAP, loss::ProcessCounters};
use zerocopy::{FromBytes as _, IntoBytes as _};

use crate::{event::ProcessKey, target::marker::MarkerSite};
use ring::Ring;

/// The compiled programs: committed as `ebpf/dislodge.bpf.o`, checked against their sources by the build script.
static OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/dislodge.bpf.o"));

/// The counters of a process as they stand in the map.
type RawCounters = [u64; size_of::<ProcessCounters>() / size_of::<u64>()];

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
    /// The map of traced processes is full, or cannot be written.
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
#[derive(Debug)]
pub struct Kernel {
    ebpf: Ebpf,
    processes: BpfHashMap<MapData, u32, RawCounters>,
    links: HashMap<ProcessKey, UProbeLinkId>,
}

impl Kernel {
    /// Loads the programs with a ring of `ring_size` bytes (a power of two, at least a page).
    pub fn load(ring_size: u32) -> Result<(Self, Ring), LoadError> {
        let mut ebpf = EbpfLoader::new().map_max_entries(EVENTS_MAP, ring_size).load(OBJECT)?;
        uprobe(&mut ebpf).ok_or(LoadError::Missing(MARK_PROGRAM))?.load()?;
        let events = ebpf.take_map(EVENTS_MAP).ok_or(LoadError::Missing(EVENTS_MAP))?;
        let processes = ebpf.take_map(PROCESSES_MAP).ok_or(LoadError::Missing(PROCESSES_MAP))?;
        let ring = Ring::new(RingBuf::try_from(events)?);
        Ok((Self { ebpf, processes: BpfHashMap::try_from(processes)?, links: HashMap::new() }, ring))
    }

    /// Puts a probe on the marker of one process. Only that process pays for it, though others may map the same file.
    pub fn attach(&mut self, key: ProcessKey, site: &MarkerSite) -> Result<(), AttachError> {
        let pid = NonZeroU32::new(key.pid).ok_or(AttachError::NoProcess)?;
        let zero = RawCounters::default();
        self.processes.insert(key.pid, zero, 0)?;
        let program = uprobe(&mut self.ebpf).ok_or(AttachError::Missing(MARK_PROGRAM))?;
        let attached = program.attach(
            UProbeAttachLocation::AbsoluteOffset(site.file_offset),
            &site.file,
            UProbeScope::OneProcess(pid),
        );
        match attached {
            Ok(link) => {
                self.links.insert(key, link);
                Ok(())
            }
            Err(error) => {
                self.processes.remove(&key.pid)?;
                Err(error.into())
            }
        }
    }

    /// Takes the probe off again. Its counters are gone with it.
    pub fn detach(&mut self, key: ProcessKey) {
        if let Some(link) = self.links.remove(&key) {
            if let Some(program) = uprobe(&mut self.ebpf)
                && let Err(error) = program.detach(link)
            {
                tracing::warn!(pid = key.pid, %error, "cannot detach");
            }
            if let Err(error) = self.processes.remove(&key.pid) {
                tracing::warn!(pid = key.pid, %error, "cannot take the process out of the map of traced processes");
            }
        }
    }

    /// What was seen and lost of a traced process so far.
    pub fn counters(&self, key: ProcessKey) -> Option<ProcessCounters> {
        let raw = self.processes.get(&key.pid, 0).ok()?;
        ProcessCounters::read_from_bytes(raw.as_bytes()).ok()
    }

    /// The processes that have a probe.
    pub fn attached(&self) -> impl Iterator<Item = ProcessKey> {
        self.links.keys().copied()
    }
}

fn uprobe(ebpf: &mut Ebpf) -> Option<&mut UProbe> {
    ebpf.program_mut(MARK_PROGRAM)?.try_into().ok()
}

/// Whether an error of attaching says that rights are missing.
pub fn is_permission_error(error: &ProgramError) -> bool {
    matches!(error, ProgramError::SyscallError(error) if error.io_error.kind() == io::ErrorKind::PermissionDenied)
}
