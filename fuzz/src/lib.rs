//! What is done with whatever bytes come: once by libFuzzer (`fuzz/run`), and with the seeds in each `cargo test`
//! (`agent/tests/fuzz_seeds.rs`). Nothing may panic, hang or take more memory than the bytes justify.

use std::{fs::File, hint::black_box, io::Write as _, os::fd::AsRawFd as _, path::Path};

use dislodge::{
    core::{Core, Effects, Input, Pace},
    diagnose::diagnose,
    event::{ProcessKey, clock::Monotonic, decode, native::Engine},
    record::{
        format::{FrameKind, write_frame},
        reader::Reader,
        replay::Replay,
    },
    remedy::control::Reply,
    request::{ResyncReason, tracker::Limits},
    rule::{
        RuleSet,
        load::{self, Source},
    },
    target::{
        code::{entry_point, status_offset},
        hook::HookFile,
        mapping::{self, Mapping},
        symbol::{SymbolPattern, SymbolTable},
    },
};

const PROCESS: ProcessKey = ProcessKey { pid: 7, start: 1 };
const EPOCH: u64 = 5;
/// Time between two events of a stream that says nothing else: ticks are to see them age.
const APART: u64 = 50_000_000;

/// One event of the ring.
pub fn decode(bytes: &[u8]) {
    let _ = decode::decode(bytes);
}

/// Events of the ring, each behind its length in two bytes, as one server would have made them; what the agent then says.
pub fn events(bytes: &[u8]) {
    let mut core = Core::new(load::defaults().unwrap_or_default(), Limits { requests: 50, transfers: 50 });
    let mut tell = |input| core.apply(input, &mut Effects::default());
    tell(Input::Attach { process: PROCESS, identity: Box::default(), clock_offset: 0 });
    tell(Input::Watch { process: PROCESS, engine: Some(Engine::Nixl), at: Monotonic(1) });
    tell(Input::Asked { process: PROCESS, epoch: EPOCH, why: ResyncReason::Attached, at: Monotonic(1) });
    let (mut rest, mut now) = (bytes, Monotonic(1));
    while let Some((length, after)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(after.len());
        let (record, after) = after.split_at(length);
        rest = after;
        now = Monotonic(now.0.saturating_add(APART));
        if let Ok(mut event) = decode::decode(record) {
            event.pid = PROCESS.pid;
            core.apply(Input::Event(event), &mut Effects::default());
        }
        if now.0.is_multiple_of(APART * 4) {
            core.apply(Input::Tick { now, pace: Pace::As(None) }, &mut Effects::default());
        }
    }
    for now in [now, Monotonic(now.0.saturating_add(600_000_000_000)), Monotonic(u64::MAX)] {
        for tracked in core.tracker().judged(now) {
            let evidence = diagnose(&tracked, now).evidence;
            evidence.iter().for_each(|evidence| drop(evidence.fact.to_string()));
        }
        core.apply(Input::Tick { now, pace: Pace::As(None) }, &mut Effects::default());
    }
}

/// A rule file.
pub fn rules(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Err(problems) = load::load(&[Source { file: "rules.yaml", text }]) {
        assert!(!problems.is_empty(), "refused without a word");
        problems.iter().for_each(|problem| drop(problem.to_string()));
    }
}

/// A recording: as it is; and what follows its header as the payload of a block whose checksum is right, since no change of
/// one would come as far else.
pub fn recording(bytes: &[u8]) {
    replay(bytes);
    let Some((length, after)) = bytes.split_first_chunk::<2>() else { return };
    let length = usize::from(u16::from_le_bytes(*length)).min(after.len());
    let (header, block) = after.split_at(length);
    let mut file = Vec::new();
    let frames = [(FrameKind::Header, header), (FrameKind::Block, block), (FrameKind::End, &[])];
    if frames.iter().try_for_each(|(kind, payload)| write_frame(&mut file, *kind, payload)).is_ok() {
        replay(&file);
    }
}

fn replay(file: &[u8]) {
    if let Ok(reader) = Reader::open(file) {
        let _ = Replay::new(reader, RuleSet::default()).run(|_| true);
    }
}

/// What a hook answers, and what its memory file says.
pub fn control(bytes: &[u8]) {
    if let Some(reply) = Reply::read(bytes, EPOCH) {
        drop(format!("{:?}", reply.answer()));
    }
    if let Ok(hook) = serde_json::from_slice::<HookFile>(bytes) {
        drop(format!("{:?}", hook.server));
    }
}

/// What a process has mapped, line by line; and a file as a library of it.
pub fn library(bytes: &[u8]) {
    let mappings: Vec<Mapping> = bytes.split(|byte| *byte == b'\n').filter_map(mapping::parse_line).collect();
    mappings.iter().for_each(|mapping| {
        black_box((mapping.file_name(), mapping.folder_name()));
    });
    assert!(mapping::by_file(&mappings).len() <= mappings.len());
    let Some(file) = in_memory(bytes) else { return };
    let Ok(table) = SymbolTable::read(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd()))) else { return };
    for symbol in table.resolve(&SymbolPattern::Prefix("")).into_iter().take(64) {
        let Ok(code) = table.code(&symbol, 256) else { continue };
        black_box((entry_point(table.architecture(), &code), status_offset(table.architecture(), &code)));
    }
}

fn in_memory(bytes: &[u8]) -> Option<File> {
    let file = rustix::fs::memfd_create("library", rustix::fs::MemfdFlags::CLOEXEC).ok()?;
    let mut file = File::from(file);
    file.write_all(bytes).ok().map(|()| file)
}
