//! The probes on transfer engines and what the tracker makes of them, without the rest of the agent.

use std::collections::HashMap;

use dislodge::{
    event::{
        Body, Event, ProcessKey, Room,
        clock::Monotonic,
        native::{Engine, Handle, NativeEvent},
    },
    kernel::{
        Kernel, Sizes,
        canary::ReturnProbes,
        plan::{ProbeReport, ProbeState, Surveyed, is_complete},
        probe::ProbeSet,
        ring::Ring,
    },
    request::{
        tracker::{Limits, Tracker},
        transfer::{Observation, SubjectTransfers, Transfer},
        transfers::Transfers,
    },
    target::{
        handle::EngineMemory,
        library::{self, LibraryRole, MappedLibrary},
    },
};
use dislodge_ebpf::loss::ProcessCounters;

use super::{native::Peer, wait::until};

const SIZES: Sizes = Sizes { ring: 16 << 20, calls: 1024 };
const LIMITS: Limits = Limits { requests: 1_000, transfers: 4_096 };

/// The programs, what they are attached to, what they said.
pub struct Watcher {
    pub kernel: Kernel,
    pub ring: Ring,
    pub tracker: Tracker,
    /// Events in their order, by process. Not emptied by itself.
    pub events: HashMap<u32, Vec<Event>>,
    offsets: HashMap<ProcessKey, u32>,
    received: HashMap<u32, u64>,
}

/// What became of the probes on a process.
#[derive(Debug)]
pub struct Table(pub Vec<ProbeReport>);

impl Table {
    /// The state of the probe on a function, in whichever library.
    pub fn state(&self, function: &str) -> &ProbeState {
        &self.0.iter().find(|row| row.function == function).unwrap_or_else(|| panic!("{function}: {self:#?}")).state
    }

    /// Functions whose probe is neither attached nor on demand.
    pub fn not_attached(&self) -> Vec<&'static str> {
        let fine = |state: &ProbeState| matches!(state, ProbeState::Attached | ProbeState::OnDemand);
        self.0.iter().filter(|row| !fine(&row.state)).map(|row| row.function).collect()
    }
}

impl Watcher {
    pub fn new() -> Self {
        Self::with(SIZES, LIMITS)
    }

    pub fn with(sizes: Sizes, limits: Limits) -> Self {
        let (kernel, ring) = Kernel::load(sizes).unwrap();
        assert!(kernel.not_loaded().is_empty(), "{:?}", kernel.not_loaded());
        let (tracker, events) = (Tracker::new(limits), HashMap::new());
        Self { kernel, ring, tracker, events, offsets: HashMap::new(), received: HashMap::new() }
    }

    /// Attaches to every library of a process, as the agent does.
    pub fn attach(&mut self, key: ProcessKey) -> Table {
        self.attach_where(key, |_| true)
    }

    /// Attaches to those libraries of a process only.
    pub fn attach_where(&mut self, key: ProcessKey, wanted: impl Fn(&MappedLibrary) -> bool) -> Table {
        self.tracker.attach(key, 0);
        let mut table = Vec::new();
        for library in libraries(key).iter().filter(|library| wanted(library)) {
            let surveyed = Surveyed::of(library.clone());
            let sets = [ProbeSet::Transfers];
            table.extend(self.kernel.attach_library(key, &surveyed, &sets, &ReturnProbes::Allowed));
            self.offsets.extend(surveyed.status_offset().map(|offset| (key, offset)));
        }
        let complete = |role: LibraryRole| {
            is_complete(&table.iter().filter(|row| row.role == role).cloned().collect::<Vec<ProbeReport>>())
        };
        let nixl = complete(LibraryRole::Nixl).then_some(Engine::Nixl);
        let engine = nixl.or(complete(LibraryRole::MooncakeEngine).then_some(Engine::Mooncake));
        self.tracker.watch(key, engine, Monotonic::now());
        Table(table)
    }

    /// Applies what waits in the ring.
    pub fn drain(&mut self) -> &mut Self {
        let (events, tracker, received) = (&mut self.events, &mut self.tracker, &mut self.received);
        self.ring.drain(usize::MAX, |event| {
            let event = event.expect("BPF writes what can be decoded");
            tracker.apply(&event, &mut Vec::new());
            *received.entry(event.pid).or_default() += 1;
            events.entry(event.pid).or_default().push(event);
        });
        self
    }

    /// Reads where transfers stand in the processes' memory, as the agent does for those that have been under way for some
    /// time.
    pub fn observe(&mut self, key: ProcessKey) -> &mut Self {
        let Ok(memory) = EngineMemory::open(key.pid) else { return self };
        let read = |handle: Handle| match handle.engine {
            Engine::Nixl => self
                .offsets
                .get(&key)
                .and_then(|offset| memory.nixl_status(handle.number, *offset))
                .map(|it| (it, None)),
            Engine::Mooncake => memory.mooncake_batch(handle.number).map(|it| (it.status, Some(it.moved))),
        };
        let due = self.tracker.transfers(key).unwrap().to_observe(Monotonic::now(), 256);
        let seen: Vec<Observation> = due
            .into_iter()
            .filter_map(|(handle, generation)| {
                read(handle).map(|(status, moved)| Observation { handle, generation, status, moved })
            })
            .collect();
        self.drain();
        for observation in seen {
            self.tracker.observed(key, observation, Monotonic::now());
        }
        self
    }

    /// What a process's engine said since the last time.
    pub fn take(&mut self, key: ProcessKey) -> Vec<NativeEvent> {
        self.drain();
        let events = self.events.remove(&key.pid).unwrap_or_default();
        events
            .into_iter()
            .map(|event| match event.body {
                Body::Native(native) => *native,
                other => panic!("{other:?}"),
            })
            .collect()
    }

    /// Waits until a process's engine said something, and takes everything that it said until then.
    pub fn take_until(&mut self, what: &str, key: ProcessKey, is: impl Fn(&NativeEvent) -> bool) -> Vec<NativeEvent> {
        let mut taken = Vec::new();
        until(what, || {
            taken.extend(self.take(key));
            taken.iter().any(&is).then_some(())
        });
        taken
    }

    pub fn transfers(&self, key: ProcessKey) -> &Transfers {
        self.tracker.transfers(key).unwrap()
    }

    pub fn counters(&self, key: ProcessKey) -> ProcessCounters {
        self.kernel.counters(key).unwrap()
    }

    /// A live transfer.
    pub fn transfer(&self, key: ProcessKey, number: u64) -> Option<&Transfer> {
        self.transfers(key).live().find(|transfer| transfer.handle.number == number)
    }

    pub fn room(&self, key: ProcessKey, room: u64) -> Option<&SubjectTransfers> {
        self.transfers(key).of_room(Room::Number(room))
    }

    /// How many transfers ended in that way, of those that the process had.
    pub fn ended(&self, key: ProcessKey, engine: Engine, end: &'static str) -> u64 {
        self.transfers(key).counted().ended.get(&(engine, end)).map_or(0, |(count, _)| *count)
    }

    /// Waits, applying what comes, until it is so.
    pub fn until(&mut self, what: &str, is: impl Fn(&Self) -> bool) {
        until(what, || is(self.drain()).then_some(()));
    }

    /// Fails where something was lost, or more or less arrived than was seen.
    pub fn assert_nothing_lost(&mut self, key: ProcessKey) {
        let received = self.drain().received.get(&key.pid).copied().unwrap_or_default();
        let counters = self.counters(key);
        assert_eq!((counters.lost(), counters.calls_full, counters.returns_unmatched), (0, 0, 0), "{counters:?}");
        assert_eq!((counters.seen, counters.delivered()), (received, received), "{counters:?}");
    }
}

/// The libraries of a process that probes can be put on.
pub fn libraries(key: ProcessKey) -> Vec<MappedLibrary> {
    library::find(key.pid).unwrap().mapped
}

/// The libraries of a process, and where the probes belong in them.
pub fn surveyed(key: ProcessKey) -> Vec<Surveyed> {
    libraries(key).into_iter().map(Surveyed::of).collect()
}

/// The number that a peer gave for a handle or batch.
pub fn number(answer: &serde_json::Value, field: &str) -> u64 {
    answer[field].as_u64().unwrap_or_else(|| panic!("{answer}"))
}

/// Makes a transfer and returns its handle.
pub fn make(prefill: &mut Peer, mut command: serde_json::Value) -> u64 {
    command["do"] = "make".into();
    number(&prefill.ask(command), "handle")
}
