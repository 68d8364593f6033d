//! The transfer engine of each server: finding its libraries, attaching probes, reading where transfers stand.

use std::time::Duration;

use super::Pipeline;
use crate::{
    event::{
        ProcessKey,
        clock::Monotonic,
        native::{Engine, Handle, TransferStatus},
    },
    kernel::plan::{ProbeReport, ProbeState, is_complete},
    request::transfer::Observation,
    target::{
        handle::Memory,
        library::{self, LibraryRole, MappedLibrary},
    },
};

/// How soon a server is looked over again for libraries after the first time; twice as late each time until
/// [`LOOK_OVER_AT_LAST`].
const LOOK_OVER_AT_FIRST: Duration = Duration::from_secs(1);
/// How often a server is looked over at last: engines may load plugins late.
const LOOK_OVER_AT_LAST: Duration = Duration::from_secs(60);
/// A transfer that has been under way for this long has its status read in the server's memory.
const OBSERVED_AFTER: Duration = Duration::from_millis(500);
/// Transfers of one server whose status is read in one tick.
const OBSERVED_AT_ONCE: usize = 256;

/// What is known of a server's transfer engine.
pub(super) struct EngineState {
    /// The libraries that probes were put on.
    pub(super) libraries: Vec<MappedLibrary>,
    /// The table of probes.
    pub(super) probes: Vec<ProbeReport>,
    /// Libraries that cannot be opened, and why.
    pub(super) unreachable: Vec<String>,
    /// Where NIXL's handles have their status.
    status_offset: Option<u32>,
    memory: Result<Memory, String>,
    look_over_at: Monotonic,
    look_over_after: Duration,
}

impl EngineState {
    pub(super) fn new(now: Monotonic) -> Self {
        Self {
            libraries: Vec::new(),
            probes: Vec::new(),
            unreachable: Vec::new(),
            status_offset: None,
            memory: Err("not opened yet".to_owned()),
            look_over_at: now,
            look_over_after: LOOK_OVER_AT_FIRST,
        }
    }

    /// The engine whose transfers are all seen.
    fn watched(&self) -> Option<Engine> {
        let complete = |role: LibraryRole| {
            let rows: Vec<ProbeReport> = self.probes.iter().filter(|row| row.role == role).cloned().collect();
            is_complete(&rows)
        };
        if complete(LibraryRole::Nixl) {
            Some(Engine::Nixl)
        } else {
            complete(LibraryRole::MooncakeEngine).then_some(Engine::Mooncake)
        }
    }

    /// Where a transfer stands, by the server's memory.
    fn observe(&self, handle: Handle) -> Option<(TransferStatus, Option<u64>)> {
        let memory = self.memory.as_ref().ok()?;
        match handle.engine {
            Engine::Nixl => memory.nixl_status(handle.number, self.status_offset?).map(|status| (status, None)),
            Engine::Mooncake => memory.mooncake_batch(handle.number).map(|batch| (batch.status, Some(batch.moved))),
        }
    }
}

impl Pipeline {
    /// Looks for libraries of transfer engines that a server has loaded since the last time, and attaches to them.
    pub(super) fn look_over(&mut self, key: ProcessKey, now: Monotonic) {
        let Some(server) = self.servers.get_mut(&key) else { return };
        let engine = &mut server.engine;
        if !self.config.probes.transfers || now < engine.look_over_at {
            return;
        }
        let found = match library::find(key.pid) {
            Ok(found) => found,
            Err(error) => {
                tracing::debug!(pid = key.pid, %error, "cannot look for transfer engines");
                library::Libraries::default()
            }
        };
        engine.unreachable =
            found.unreachable.iter().map(|library| format!("{}: {}", library.name, library.why)).collect();
        let new: Vec<MappedLibrary> = found
            .mapped
            .into_iter()
            .filter(|library| engine.libraries.iter().all(|known| known.file != library.file))
            .collect();
        engine.look_over_after = match new.is_empty() {
            true => (engine.look_over_after * 2).min(LOOK_OVER_AT_LAST),
            false => LOOK_OVER_AT_FIRST,
        };
        engine.look_over_at = now.plus(engine.look_over_after);
        for library in new {
            self.attach_library(key, library);
        }
    }

    fn attach_library(&mut self, key: ProcessKey, library: MappedLibrary) {
        let sets = self.config.probe_sets();
        let (rows, offset) = self.kernel.attach_library(key, &library, &sets, &self.returns);
        for row in &rows {
            if let ProbeState::Refused { why } | ProbeState::EntryOnly { why } = &row.state {
                tracing::warn!(pid = key.pid, library = row.library, function = row.function, "{why}");
            }
        }
        let attached = rows.iter().filter(|row| row.state == ProbeState::Attached).count();
        tracing::info!(pid = key.pid, library = library.name, probes = attached, "transfer engine");
        if attached > 0 {
            self.track(key);
        }
        let Some(server) = self.servers.get_mut(&key) else { return };
        let engine = &mut server.engine;
        engine.status_offset = offset.or(engine.status_offset);
        if engine.memory.is_err() {
            engine.memory = Memory::open(key.pid).map_err(|error| error.to_string());
        }
        engine.probes.extend(rows);
        engine.libraries.push(library);
        let watched = engine.watched();
        self.core.tracker.watch(key, watched, Monotonic::now());
    }

    /// Reads in the servers' memory where transfers stand that have been under way for some time.
    pub(super) fn observe(&mut self, now: Monotonic) {
        let Some(before) = now.0.checked_sub(OBSERVED_AFTER.as_nanos() as u64).map(Monotonic) else { return };
        let mut seen: Vec<(ProcessKey, Observation)> = Vec::new();
        for (key, server) in &self.servers {
            let Some(transfers) = self.core.tracker.transfers(*key) else { continue };
            for (handle, generation) in transfers.to_observe(before, OBSERVED_AT_ONCE) {
                if let Some((status, moved)) = server.engine.observe(handle) {
                    seen.push((*key, Observation { handle, generation, status, moved }));
                }
            }
        }
        if seen.is_empty() {
            return;
        }
        // Whatever happened to these handles until they were read is in the ring: it has to be known first.
        self.drain();
        for (key, observation) in seen {
            self.core.tracker.observed(key, observation, now);
        }
    }
}
