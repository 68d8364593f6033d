//! The search for a provider's `poll_cq` in a running process. The process is a stand-in: it loads the hook's marker library
//! as if that were soft-RoCE's provider, and writes `struct ibv_context`s by hand; its device is a plain file that only it
//! sees under `/dev/infiniband`. The real thing needs a machine with an RDMA device.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/support.rs"]
mod support;

use std::{
    fs::{self, File},
    io::{BufRead as _, BufReader},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    process::{Child, Command, Stdio},
    time::Duration,
};

use dislodge::target::{
    library,
    verbs::{self, Coverage, Limits, Search},
};
use serde::Deserialize;
use support::{environment::python, needs, repository};
use tempfile::TempDir;

/// Loads the provider that its argument names and writes contexts: one on the heap, some that lie across the borders of
/// mebibytes, and some that are none.
const PROGRAM: &str = r#"
import ctypes, json, re, struct, sys
provider = sys.argv[1]
library = ctypes.CDLL(provider)
libc = ctypes.CDLL(None, use_errno=True)
libc.calloc.restype = libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
for line in open("/proc/self/maps"):
    if line.rstrip().endswith(provider) and " r-xp " in line:
        start, end, offset = (int(part, 16) for part in re.match(r"(\w+)-(\w+) \S+ (\w+)", line).groups())
device, other = open("/dev/infiniband/uverbs0"), open("/dev/infiniband/issm0")

def context(poll_cq, post_send=None, fd=None):
    words = [0] * 34
    words[0], words[12], words[26], words[27] = 0x1000, start + poll_cq, post_send or start + 9, start + 10
    words[33] = (device.fileno() if fd is None else fd) & 0xffffffff | 77 << 32
    return struct.pack("<34Q", *words)

def put(address, content):
    ctypes.memmove(address, content, len(content))

MIB = 1 << 20
heap = libc.calloc(1, 400)
put(heap, context(1))
# A mapping of its own, between two that cannot be read.
area = libc.mmap(None, 6 * MIB, 0, 0x22, -1, 0) + MIB
libc.mprotect(area, 4 * MIB, 3)
ctypes.memset(area, 0x5a, 4 * MIB)
for border in range(1, 4):
    put(area + border * MIB - 128, context(1 + border))
put(area + 8192, context(40, post_send=0x1000))
put(area + 12288, context(41, fd=other.fileno()))
put(area + 16384, context(42, fd=-1))
untouched = libc.mmap(None, 64 * MIB, 3, 0x22, -1, 0)
libc.madvise(ctypes.c_void_p(untouched), ctypes.c_size_t(64 * MIB), 15)
print(json.dumps({"start": start, "offset": offset, "untouched": untouched, "bytes": 64 * MIB}), flush=True)
sys.stdin.read()
"#;

#[derive(Deserialize)]
struct Said {
    start: u64,
    offset: u64,
    untouched: u64,
    bytes: u64,
}

struct StandIn {
    process: Child,
    said: Said,
    provider: u64,
    _folder: TempDir,
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl StandIn {
    /// Nothing, with the reason, where its own `/dev` cannot be had.
    fn start() -> Result<Self, String> {
        let folder = tempfile::tempdir().unwrap();
        let provider = folder.path().join("librxe-rdmav34.so");
        fs::copy(repository().join("hook/dislodge_hook/marker/x86_64.so"), &provider).unwrap();
        let script = r#"mount -t tmpfs none /dev && mkdir /dev/infiniband || exit 3
            : > /dev/infiniband/uverbs0; : > /dev/infiniband/issm0; exec "$1" -c "$2" "$3""#;
        let mut process = Command::new("unshare")
            .args(["--mount", "sh", "-c", script, "sh"])
            .arg(python()?)
            .arg(PROGRAM)
            .arg(&provider)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("unshare: {error}"))?;
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let Ok(said) = serde_json::from_str(&line) else {
            let ended = process.wait().unwrap();
            assert_eq!(ended.code(), Some(3), "the stand-in failed");
            return Err("a file system cannot be mounted here".to_owned());
        };
        let inode = fs::metadata(&provider).unwrap().ino();
        Ok(Self { process, said, provider: inode, _folder: folder })
    }

    fn search(&self, limits: Limits) -> Search {
        let libraries = library::find(self.process.id()).unwrap();
        assert!(libraries.unreachable.is_empty(), "{libraries:?}");
        verbs::find_poll_cq(self.process.id(), &libraries.mapped, limits).unwrap()
    }

    /// Pages of the memory that the stand-in never touched that are there.
    fn faulted_in(&self) -> usize {
        let page = rustix::param::page_size() as u64;
        let mut entries = vec![0; (self.said.bytes / page) as usize * 8];
        let pagemap = File::open(format!("/proc/{}/pagemap", self.process.id())).unwrap();
        pagemap.read_exact_at(&mut entries, self.said.untouched / page * 8).unwrap();
        entries.chunks_exact(8).filter(|entry| entry[7] & 0x80 != 0).count()
    }
}

/// Enough for any machine: what is tested is not speed.
const PATIENT: Limits = Limits { bytes: 2 << 30, time: Duration::from_secs(60) };

#[test]
fn every_context_of_a_verbs_device_is_found_with_its_place_in_the_providers_file() {
    let Some(process) = needs(StandIn::start()) else { return };
    let search = process.search(PATIENT);
    println!("{} bytes searched", search.bytes);
    assert_eq!(search.coverage, Coverage::Whole);
    let mut found: Vec<_> = search.found.iter().map(|found| (found.address, found.file_offset)).collect();
    found.sort_unstable();
    let Said { start, offset, .. } = process.said;
    assert_eq!(found, [1, 2, 3, 4].map(|function| (start + function, offset + function)));
    for found in search.found {
        assert_eq!((found.provider.as_str(), found.file.inode), ("librxe-rdmav34.so", process.provider));
        assert_eq!(fs::metadata(found.path).unwrap().ino(), process.provider);
    }
}

#[test]
fn memory_that_the_process_never_touched_is_not_faulted_in() {
    let Some(process) = needs(StandIn::start()) else { return };
    assert_eq!(process.faulted_in(), 0);
    let search = process.search(PATIENT);
    assert_eq!((search.found.len(), process.faulted_in()), (4, 0));
}

#[test]
fn a_search_stays_within_its_limits_and_says_so() {
    let Some(process) = needs(StandIn::start()) else { return };
    let search = process.search(Limits { bytes: 64 << 10, ..PATIENT });
    assert_eq!(search.coverage, Coverage::OutOfBytes);
    assert!(search.bytes < (64 << 10) + (1 << 20), "{}", search.bytes);
    let search = process.search(Limits { time: Duration::ZERO, ..PATIENT });
    assert_eq!((search.coverage, search.bytes), (Coverage::OutOfTime, 0));
}
