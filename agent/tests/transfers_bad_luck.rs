//! Servers that leak, libraries that are replaced, doubled, stripped or of another release, pointers that lead nowhere.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{fs, os::unix::fs::MetadataExt as _, path::PathBuf, process::Command, time::Duration};

use dislodge::{
    event::{
        ProcessKey,
        native::{Engine, NativeEvent, Operation},
    },
    kernel::{Sizes, plan::ProbeState},
    request::{
        Watch,
        tracker::Limits,
        transfer::{TransferEnd, TransferState},
    },
    target::{library::LibraryRole, mapping::Presence},
};
use serde_json::json;
use support::{
    environment,
    native::{Peer, Release, SMALL, on, pair},
    needs, repository,
    transfers::{Watcher, libraries, make, number},
    wait::until,
};
use tempfile::TempDir;

const RELEASE: &str = "nixl-1.5.1";
const LIMITS: Limits = Limits { requests: 1_000, transfers: 4_096 };

/// Makes, posts, polls to the end and releases; the watcher must see all of it.
fn assert_seen(watcher: &mut Watcher, prefill: &mut Peer, room: u64) {
    let key = prefill.key();
    watcher.take(key);
    let handle = make(prefill, json!({"room": room, "pages": [0, 1, 2]}));
    prefill.ask(json!({"do": "post", "handle": handle}));
    assert_eq!(prefill.ask(json!({"do": "poll", "handle": handle, "within": 30}))["status"], "DONE");
    watcher.drain();
    let state = watcher.transfer(key, handle).map(|transfer| transfer.state);
    assert_eq!(state, Some(TransferState::Ended(TransferEnd::Done)));
    prefill.ask(json!({"do": "release", "handle": handle}));
    let events = watcher.take(key);
    let count = |is: &dyn Fn(&NativeEvent) -> bool| events.iter().filter(|event| is(event)).count();
    let seen = [
        count(&|event| matches!(event, NativeEvent::Made { .. })),
        count(&|event| matches!(event, NativeEvent::Posting { .. })),
        count(&|event| matches!(event, NativeEvent::RangePosted { .. })),
        count(&|event| matches!(event, NativeEvent::Releasing { .. })),
    ];
    assert_eq!(seen, [1; 4], "{events:#?}");
}

fn is_watched(watcher: &Watcher, key: ProcessKey) -> bool {
    watcher.tracker.server(key).unwrap().native.watch != Watch::No
}

#[test]
fn a_hundred_thousand_handles_that_the_server_leaks_cost_bounded_memory_and_later_transfers_are_seen() {
    const LEAKED: u64 = 100_000;
    on(RELEASE, |release| {
        let (mut prefill, _decode) = pair(release, SMALL);
        let key = prefill.key();
        let mut watcher = Watcher::with(Sizes { ring: 16 << 20, calls: 1024 }, LIMITS);
        watcher.attach(key);
        assert!(is_watched(&watcher, key));
        let leaking = prefill.send(json!({"do": "leak", "count": LEAKED, "pages": [0], "room": 5}));
        let answer = until("the leaks", || {
            watcher.drain().events.clear();
            prefill.answer(leaking, Duration::from_millis(1))
        });
        assert_eq!(answer["handles"], LEAKED);
        watcher.drain().events.clear();
        assert_eq!(watcher.counters(key).seen, LEAKED);
        let transfers = watcher.transfers(key);
        assert_eq!(transfers.live().count(), LIMITS.transfers);
        assert_eq!((transfers.counted().not_kept, transfers.subjects().count()), (0, 0));
        assert!(transfers.live().any(|it| it.handle.number == number(&answer, "last")), "the oldest went");
        assert!(transfers.live().all(|it| it.handle.number != number(&answer, "first")), "the oldest went");
        assert_seen(&mut watcher, &mut prefill, 6);
        watcher.assert_nothing_lost(key);
    });
}

/// A copy of the wheel in which these files are files of their own, and two peers that run on it.
fn on_a_copy(release: &Release, change: impl FnOnce(&Release)) -> (Peer, Peer, Release, TempDir) {
    let (copy, folder) = release.copy();
    change(&copy);
    let (prefill, decode) = pair(&copy, SMALL);
    (prefill, decode, copy, folder)
}

#[test]
fn libraries_that_were_upgraded_under_the_running_process_are_those_that_it_runs() {
    on(RELEASE, |release| {
        let (mut prefill, _decode, copy, _folder) = on_a_copy(release, |_| {});
        let before: Vec<PathBuf> = libraries(prefill.key()).into_iter().map(|it| it.name.into()).collect();
        let upgraded = [LibraryRole::Nixl, LibraryRole::NixlUcxPlugin, LibraryRole::Ucp];
        for path in copy.files() {
            if before.iter().any(|name| Some(name.as_os_str()) == path.file_name()) {
                copy.replace(&path, b"of another release");
            }
        }
        let mut watcher = Watcher::new();
        let table = watcher.attach(prefill.key());
        for role in upgraded {
            let library = libraries(prefill.key()).into_iter().find(|library| library.role == role).unwrap();
            assert_eq!(library.presence, Presence::Deleted, "{role:?}");
        }
        assert!(is_watched(&watcher, prefill.key()), "{table:#?}");
        assert_seen(&mut watcher, &mut prefill, 7);
        watcher.assert_nothing_lost(prefill.key());
    });
}

#[test]
fn of_two_copies_of_a_library_both_are_probed_and_a_transfer_is_seen_once() {
    on(RELEASE, |release| {
        let (mut prefill, _decode, _, folder) = on_a_copy(release, |_| {});
        let key = prefill.key();
        let libnixl = |key| -> Vec<PathBuf> {
            let of_role = libraries(key).into_iter().filter(|library| library.role == LibraryRole::Nixl);
            of_role.map(|library| library.path).collect()
        };
        let other = folder.path().join("libnixl.so");
        fs::copy(&libnixl(key)[0], &other).unwrap();
        prefill.ask(json!({"do": "load", "path": other}));
        assert_eq!(libnixl(key).len(), 2);
        let mut watcher = Watcher::new();
        let table = watcher.attach(key);
        let posts = table.0.iter().filter(|row| row.function == "nixlAgent::postXferReq");
        assert_eq!(posts.filter(|row| row.state == ProbeState::Attached).count(), 2);
        assert_seen(&mut watcher, &mut prefill, 8);
        watcher.assert_nothing_lost(key);
    });
}

#[test]
fn a_stripped_library_is_probed_by_what_it_exports() {
    let strip = Command::new("strip").arg("--version").output();
    let Some(_) = needs(strip.map_err(|error| format!("strip (binutils): {error}"))) else { return };
    on(RELEASE, |release| {
        let mut whole = 0;
        let (mut prefill, _decode, ..) = on_a_copy(release, |copy| {
            for path in ["libnixl.so", "libplugin_UCX.so"].iter().flat_map(|name| copy.files_named(name)) {
                whole += fs::metadata(&path).unwrap().len();
                // `strip` writes a new file, but under the old inode when that has several names.
                copy.replace(&path, &fs::read(&path).unwrap());
                assert!(Command::new("strip").arg("--strip-all").arg(&path).status().unwrap().success());
                let stripped = fs::metadata(&path).unwrap();
                assert_eq!(stripped.nlink(), 1);
                whole -= stripped.len();
            }
        });
        assert!(whole > 0, "there was nothing to strip");
        let mut watcher = Watcher::new();
        let table = watcher.attach(prefill.key());
        assert!(is_watched(&watcher, prefill.key()), "{table:#?}");
        assert_seen(&mut watcher, &mut prefill, 9);
        watcher.assert_nothing_lost(prefill.key());
    });
}

#[test]
fn a_function_that_the_library_does_not_have_is_missing_and_the_rest_is_probed() {
    on(RELEASE, |release| {
        let (mut prefill, decode, ..) = on_a_copy(release, |copy| {
            for path in copy.files_named("libplugin_UCX.so") {
                copy.rename_function(&path, b"9notifAmCbEPvPKvmS0_mPK17ucp_am_recv_param");
            }
        });
        let mut watcher = Watcher::new();
        let table = watcher.attach(prefill.key());
        assert_eq!(table.not_attached(), ["nixlUcxEngine::notifAmCb"]);
        assert_eq!(*table.state("nixlUcxEngine::notifAmCb"), ProbeState::Missing);
        assert!(is_watched(&watcher, prefill.key()), "transfers can be followed without it");
        watcher.attach(decode.key());
        assert_seen(&mut watcher, &mut prefill, 10);
        assert_eq!(watcher.take(decode.key()), []);
        assert_eq!(watcher.transfers(prefill.key()).counted().notifications_sent, 1);
    });
}

#[test]
fn without_a_function_that_is_required_transfers_are_seen_but_not_said_to_be_all_seen() {
    on(RELEASE, |release| {
        let (mut prefill, _decode, ..) = on_a_copy(release, |copy| {
            copy.rename_release_of_nixl();
        });
        let (mut watcher, key) = (Watcher::new(), prefill.key());
        let table = watcher.attach(key);
        assert_eq!(table.not_attached(), ["nixlAgent::releaseXferReq"]);
        assert!(!is_watched(&watcher, key));
        let handle = make(&mut prefill, json!({"room": 11, "pages": [0]}));
        prefill.ask(json!({"do": "post", "handle": handle}));
        watcher.until("the transfer's end", |it| it.ended(key, Engine::Nixl, "done") == 1);
        prefill.ask(json!({"do": "release", "handle": handle}));
        // The handle is used again: its former transfer must have been released.
        let again = make(&mut prefill, json!({"room": 11, "pages": [0]}));
        assert_eq!((watcher.drain().transfers(key).live().count(), again == handle), (1, true));
    });
}

/// A process that calls a stand-in's functions.
struct StandIn {
    peer: Peer,
    _folder: TempDir,
}

const LIBRARIES: [&str; 4] = ["libnixl.so", "libplugin_UCX.so", "libucp.so.0", "mooncake/engine.so"];
const NIXL: usize = 0;
const PLUGIN: usize = 1;
const UCP: usize = 2;
const MOONCAKE: usize = 3;
const CREATE: &str = "_ZNK9nixlAgent13createXferReqEv";
const POST: &str = "_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs";
const RELEASE_REQUEST: &str = "_ZNK9nixlAgent14releaseXferReqEP12nixlXferReqH";
const ARRIVED: &str = "_ZN13nixlUcxEngine9notifAmCbEPvPKvmS0_mPK17ucp_am_recv_param";
const SEND: &str = "_ZNK13nixlUcxEngine13notifSendPrivEv";
const SUBMIT: &str =
    "_ZN8mooncake14MultiTransport14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE";
const FREE: &str = "_ZN8mooncake14MultiTransport11freeBatchIDEm";

impl StandIn {
    fn start() -> Result<Self, String> {
        environment::bpf()?;
        let (folder, python) = (tempfile::tempdir().unwrap(), environment::python()?);
        let paths: Vec<PathBuf> = LIBRARIES.map(|name| folder.path().join(name)).into();
        for path in &paths {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let source = repository().join("agent/tests/support/engine_stand_in.c");
            let done = Command::new("cc").args(["-shared", "-fPIC", "-O2", "-o"]).arg(path).arg(source).output();
            let done = done.map_err(|error| format!("cc: {error}"))?;
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        }
        let script = repository().join("agent/tests/support/engine_stand_in.py");
        Ok(Self { peer: Peer::run(Command::new(python).arg(script).args(paths)), _folder: folder })
    }

    fn call(&mut self, library: usize, function: &str, arguments: &[u64]) {
        self.peer.ask(json!({"do": "call", "library": library, "function": function, "arguments": arguments}));
    }

    fn memory(&mut self, words: &[u64]) -> u64 {
        let hex: String = words.iter().flat_map(|word| word.to_le_bytes()).map(|byte| format!("{byte:02x}")).collect();
        number(&self.peer.ask(json!({"do": "memory", "hex": hex})), "address")
    }

    /// Makes a transfer of two descriptors with a notification, every pointer of which is good.
    fn make(&mut self, handle: u64) {
        let [operation, out, text] = [self.memory(&[1]), self.memory(&[handle]), self.memory(&[0x7875_615f_3737])];
        let begin = self.memory(&[0x1000, 100, 0, 0x2000, 200, 0]);
        let list = self.memory(&[0x7f00_0000_0000, 0, begin, begin + 48]);
        let options = self.memory(&[0, 0, 0, text, 6, 0, 0, 1]);
        self.call(NIXL, CREATE, &[0, operation, list, 0, 0, out, options]);
    }
}

#[test]
fn pointers_that_lead_nowhere_are_counted_and_the_next_transfer_is_seen() {
    let Some(mut stand_in) = needs(StandIn::start()) else { return };
    let (mut watcher, key) = (Watcher::new(), stand_in.peer.key());
    let table = watcher.attach(key);
    assert!(is_watched(&watcher, key), "{table:#?}");
    let mut faults = 0;
    for wild in [0, 0x10, 0xdead_0000_0000_0000, u64::MAX, u64::MAX - 16, 1 << 47] {
        stand_in.call(NIXL, CREATE, &[wild; 7]);
        stand_in.call(NIXL, POST, &[wild, wild, wild]);
        stand_in.call(NIXL, RELEASE_REQUEST, &[wild, wild]);
        stand_in.call(PLUGIN, ARRIVED, &[wild, wild, wild, wild, 100, wild]);
        stand_in.call(PLUGIN, SEND, &[wild, wild, wild]);
        stand_in.call(UCP, "ucp_ep_flush_completion", &[wild]);
        stand_in.call(MOONCAKE, SUBMIT, &[wild; 4]);
        stand_in.call(MOONCAKE, FREE, &[wild; 3]);
        // Handle, status, what arrived, what was sent, the first request, what submitting returned.
        faults += 6;
        watcher.drain();
        assert_eq!(watcher.counters(key).detail_fault, faults, "{wild:x}");
    }
    watcher.take(key);
    stand_in.make(0x5000);
    let made = watcher.take(key).pop().unwrap();
    let NativeEvent::Made { operation, parts, size, notification, .. } = made else { panic!("{made:?}") };
    assert_eq!((operation, parts, size.unwrap().bytes), (Some(Operation::Write), 2, 300));
    assert_eq!(notification.unwrap().bytes, b"77_aux");
    watcher.assert_nothing_lost(key);
}

#[test]
fn a_list_of_descriptors_that_cannot_be_is_not_believed() {
    let Some(mut stand_in) = needs(StandIn::start()) else { return };
    let (mut watcher, key) = (Watcher::new(), stand_in.peer.key());
    watcher.attach(key);
    let (operation, out) = (stand_in.memory(&[1]), stand_in.memory(&[0x5000]));
    let good = stand_in.memory(&[0x1000, 100, 0, 0x2000, u64::MAX, 0]);
    for (begin, end) in [(good, u64::MAX), (good + 48, good), (u64::MAX, 0), (8, 8 + 24 * 1000), (good, good + 48)] {
        let list = stand_in.memory(&[0x7f00_0000_0000, 0, begin, end]);
        let bad_string = stand_in.memory(&[0, 0, 0, 0x10, u64::MAX, 0, 0, 1]);
        stand_in.call(NIXL, CREATE, &[0, operation, list, 0, 0, out, bad_string]);
        stand_in.call(NIXL, POST, &[0, 0x5000, 0]);
        watcher.drain();
        println!("{begin:x} {end:x}: {:?}", watcher.transfer(key, 0x5000).unwrap());
        assert_eq!(watcher.transfer(key, 0x5000).unwrap().state, TransferState::InFlight);
    }
    assert_eq!(watcher.counters(key).detail_fault, 5, "the notifications");
    watcher.assert_nothing_lost(key);
}

/// Nothing collects them yet: this says what it costs.
#[test]
fn calls_that_never_return_take_places_of_a_bounded_map_and_what_finds_none_is_counted() {
    const PLACES: u32 = 4;
    let Some(mut stand_in) = needs(StandIn::start()) else { return };
    let mut watcher = Watcher::with(Sizes { ring: 1 << 20, calls: PLACES }, LIMITS);
    let key = stand_in.peer.key();
    watcher.attach(key);
    for thread in 0..2 * PLACES {
        let hang = json!({"do": "call", "library": NIXL, "function": CREATE, "arguments": [1, 0, 0, 0, 0, 0, 0],
            "on": format!("worker {thread}")});
        stand_in.peer.send(hang);
    }
    watcher.until("the calls", |it| it.counters(key).calls_full == u64::from(PLACES));
    // The thread that is killed with its process has no return.
    stand_in.peer.kill();
    watcher.kernel.detach(key);

    let Some(mut next) = needs(StandIn::start()) else { return };
    let key = next.peer.key();
    watcher.attach(key);
    next.make(0x6000);
    let counters = watcher.drain().counters(key);
    println!("after {PLACES} calls of dead threads: {counters:?}, {} events", watcher.take(key).len());
    assert!(counters.calls_full + counters.seen >= 1, "either it is seen, or said not to be: {counters:?}");
    assert_eq!(counters.calls_full, counters.returns_unmatched);
}
