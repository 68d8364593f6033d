//! The transfer engine of each server: finding its libraries, attaching probes, reading where transfers stand.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use dislodge_ebpf::look::CompletionKey;

use super::Pipeline;
use crate::{
    config::Completions,
    core::Input,
    event::{
        ProcessKey,
        clock::Monotonic,
        native::{Engine, Handle, TransferStatus},
    },
    kernel::{
        plan::{ProbeReport, ProbeState, Surveyed, is_complete},
        probe::POLL_CQ,
    },
    request::{Watch, transfer::Observation, transfers::Transfers},
    target::{
        device,
        handle::EngineMemory,
        library::{self, LibraryRole},
        mapping::FileId,
    },
};

/// How soon a server is looked over again for libraries after the first time; twice as late each time until
/// [`SURVEY_AT_LAST`].
const SURVEY_AT_FIRST: Duration = Duration::from_secs(1);
/// How often a server is looked over at last: engines may load plugins late.
const SURVEY_AT_LAST: Duration = Duration::from_secs(60);
/// A transfer that has been under way for this long has its status read in the server's memory.
const OBSERVED_AFTER: Duration = Duration::from_millis(500);
/// Times that a server's memory is searched for where its verbs provider polls: a device may be opened late.
const SEARCHES: u32 = 3;
/// Transfers of one server whose status is read in one tick.
const OBSERVED_AT_ONCE: usize = 256;

/// What was found in a server.
pub(super) struct Survey {
    key: ProcessKey,
    libraries: Vec<Surveyed>,
    unreachable: Vec<String>,
    poll_cq: Option<PollCqFound>,
    devices: BTreeSet<Arc<str>>,
}

/// Where a server's verbs providers poll their completion queues, or why that is not known.
type PollCqFound = Result<Vec<Surveyed>, String>;

/// What is known of a server's transfer engine.
pub(super) struct EngineState {
    /// The libraries that it has loaded.
    pub(super) libraries: Vec<Surveyed>,
    /// The table of probes.
    pub(super) probes: Vec<ProbeReport>,
    /// Libraries that cannot be opened, and why.
    pub(super) unreachable: Vec<String>,
    /// Where NIXL's handles have their status.
    status_offset: Option<u32>,
    memory: Result<EngineMemory, String>,
    /// The RDMA devices that it has open.
    pub(super) devices: BTreeSet<Arc<str>>,
    /// Completions of it that were counted already.
    pub(super) completions: HashMap<CompletionKey, u64>,
    /// When it was looked at last.
    pub(super) looked_at: Option<Monotonic>,
    survey_at: Monotonic,
    survey_after: Duration,
    /// Searches of the server's memory for `poll_cq` that may still be made.
    searches_left: u32,
}

impl EngineState {
    pub(super) fn new(now: Monotonic) -> Self {
        Self {
            libraries: Vec::new(),
            probes: Vec::new(),
            unreachable: Vec::new(),
            status_offset: None,
            memory: Err("not opened yet".to_owned()),
            devices: BTreeSet::new(),
            completions: HashMap::new(),
            looked_at: None,
            survey_at: now,
            survey_after: SURVEY_AT_FIRST,
            searches_left: SEARCHES,
        }
    }

    /// Whether it is to be found out where the provider polls: completions are wanted, and the engine's own functions do
    /// not show them.
    fn wants_poll_cq(&self) -> bool {
        self.searches_left > 0
            && self.libraries.iter().any(|known| known.library.role == LibraryRole::VerbsProvider)
            && !self.libraries.iter().any(Surveyed::sees_work_completions)
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
    /// Has a server looked over, off the loop, for libraries that it has loaded since the last time.
    pub(super) fn survey(&mut self, key: ProcessKey, now: Monotonic) {
        let Some(server) = self.servers.get_mut(&key) else { return };
        let engine = &mut server.engine;
        // Where there is a transfer, there is what it is posted to.
        let search = self.config.probes.completions != Completions::Off
            && engine.wants_poll_cq()
            && self.core.tracker().transfers(key).is_some_and(Transfers::has_seen_any);
        let is_first_search = search && engine.searches_left == SEARCHES;
        if !self.config.probes.transfers || (now < engine.survey_at && !is_first_search) {
            return;
        }
        // One at a time; who finds no place comes next time.
        let Ok(permit) = self.surveyed.clone().try_reserve_owned() else { return };
        engine.survey_at = now.plus(engine.survey_after);
        engine.survey_after = (engine.survey_after * 2).min(SURVEY_AT_LAST);
        engine.searches_left -= u32::from(search);
        let known: Vec<FileId> = engine.libraries.iter().map(|known| known.library.file).collect();
        tokio::task::spawn_blocking(move || permit.send(survey(key, &known, search)));
    }

    /// Attaches to the libraries that were found in a server.
    pub(super) fn attach_engine(&mut self, survey: Survey) {
        let key = survey.key;
        let Some(server) = self.servers.get_mut(&key) else { return };
        server.engine.unreachable = survey.unreachable;
        server.engine.devices = survey.devices;
        if !survey.libraries.is_empty() {
            // Where there is one, more may be on their way.
            server.engine.survey_after = SURVEY_AT_FIRST;
        }
        for surveyed in survey.libraries {
            self.attach_library(key, surveyed);
        }
        match survey.poll_cq {
            Some(Ok(found)) => {
                self.forget_poll_cq(key, 0);
                found.into_iter().for_each(|surveyed| self.attach_library(key, surveyed));
            }
            Some(Err(why)) => {
                self.forget_poll_cq(key, SEARCHES);
                tracing::debug!(pid = key.pid, why, "work completions are not seen");
                if let Some(server) = self.servers.get_mut(&key) {
                    server.engine.probes.push(ProbeReport::of(&POLL_CQ, String::new(), ProbeState::Refused { why }));
                }
            }
            None => {}
        }
    }

    /// Forgets what the last search said; `most` more are made at most.
    fn forget_poll_cq(&mut self, key: ProcessKey, most: u32) {
        if let Some(server) = self.servers.get_mut(&key) {
            server.engine.probes.retain(|row| row.role != LibraryRole::VerbsProvider);
            server.engine.searches_left = server.engine.searches_left.min(most);
        }
    }

    fn attach_library(&mut self, key: ProcessKey, surveyed: Surveyed) {
        let rows = self.kernel.attach_library(key, &surveyed, &self.config.probes.always(), &self.returns);
        let library = surveyed.library.name.as_str();
        for row in &rows {
            if let ProbeState::Refused { why } | ProbeState::EntryOnly { why } = &row.state {
                tracing::warn!(pid = key.pid, library, function = row.function, "{why}");
            }
        }
        let attached = rows.iter().filter(|row| row.state == ProbeState::Attached).count();
        if !rows.is_empty() {
            tracing::info!(pid = key.pid, library, probes = attached, "transfer engine");
        }
        if attached > 0 {
            self.track(key);
        }
        let Some(server) = self.servers.get_mut(&key) else { return };
        let engine = &mut server.engine;
        engine.status_offset = surveyed.status_offset().or(engine.status_offset);
        if engine.memory.is_err() {
            engine.memory = EngineMemory::open(key.pid).map_err(|error| error.to_string());
        }
        engine.probes.extend(rows);
        engine.libraries.push(surveyed);
        let watched = engine.watched();
        let before = self.core.tracker().server(key).map(|state| state.native.watch);
        // Each library comes for itself; the watch begins with the one that makes it complete.
        if watched.is_some() != matches!(before, Some(Watch::Since { .. })) {
            self.apply(Input::Watch { process: key, engine: watched, at: Monotonic::now() });
        }
    }

    /// Reads in the servers' memory where transfers stand that have been under way for some time.
    pub(super) fn observe(&mut self, now: Monotonic) {
        let Some(before) = now.0.checked_sub(OBSERVED_AFTER.as_nanos() as u64).map(Monotonic) else { return };
        let mut seen: Vec<(ProcessKey, Observation)> = Vec::new();
        for (key, server) in &self.servers {
            let Some(transfers) = self.core.tracker().transfers(*key) else { continue };
            for (handle, generation) in transfers.to_observe(before, OBSERVED_AT_ONCE) {
                if let Some((status, moved)) = server.engine.observe(handle) {
                    seen.push((*key, Observation { handle, generation, status, moved }));
                }
            }
        }
        if seen.is_empty() {
            return;
        }
        // Whatever happened to these handles until they were read is in the ring, or was lost: it has to be known first.
        self.drain();
        self.account(now);
        for (process, seen) in seen {
            self.apply(Input::Observed { process, seen, at: now });
        }
    }
}

/// What a process has loaded, beside what is known already; and, where that is asked, where its providers poll.
fn survey(key: ProcessKey, known: &[FileId], search: bool) -> Survey {
    let found = library::find(key.pid).unwrap_or_else(|error| {
        tracing::debug!(pid = key.pid, %error, "cannot look for transfer engines");
        library::Libraries::default()
    });
    let poll_cq = search.then(|| Surveyed::providers(key.pid, &found.mapped));
    let new = found.mapped.into_iter().filter(|library| !known.contains(&library.file));
    Survey {
        key,
        libraries: new.map(Surveyed::of).collect(),
        unreachable: found.unreachable.iter().map(|library| format!("{}: {}", library.name, library.why)).collect(),
        poll_cq,
        devices: device::of_process(key.pid),
    }
}
