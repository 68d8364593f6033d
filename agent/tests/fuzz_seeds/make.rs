//! Seeds: what simulated servers would have put into the ring, the rules that come with the agent, a recording, answers of a
//! hook, a library. Small, since each is read by every run.

use std::{fs, path::Path};

use dislodge::{
    core::Input,
    event::{
        Body, ChunkCounts, ChunkStep, Event, LeaveReason, Phase, Room,
        native::{Flush, NativeEvent, TransferStatus},
    },
    record::{
        format::{FRAME_HEAD, FrameHead},
        reader::Reader,
    },
    rule::load,
    simulate::{Family, Settings, recording, simulate},
};
use dislodge_ebpf::wire::{Header, Kind, Mark, flag};
use zerocopy::IntoBytes as _;

/// Target, name, bytes.
type Seed = (&'static str, String, Vec<u8>);

/// Events of each stream.
const EVENTS: usize = 48;

pub(crate) fn all() -> Vec<Seed> {
    [decode(), events(), rules(), recordings(), control(), library()].concat()
}

fn inputs(family: Family) -> Vec<Input> {
    simulate(&Settings { family, seed: 3, requests: 2, ranks: 1 }).inputs
}

/// The events of a server, as the ring has them.
fn records(family: Family) -> Vec<Vec<u8>> {
    let events = inputs(family).into_iter().filter_map(|input| match input {
        Input::Event(event) => Some(event),
        _ => None,
    });
    events.filter_map(|event| record(&event)).collect()
}

fn decode() -> Vec<Seed> {
    let mut seeds: Vec<Seed> = Vec::new();
    let families = [Family::ClearedRoom, Family::UnsafeRelease, Family::PeerDied, Family::AgentBlind, Family::Paused];
    for record in families.into_iter().flat_map(records) {
        let Some(kind) = record.first() else { continue };
        let name = format!("kind-{kind}");
        if seeds.iter().all(|(_, other, _)| *other != name) {
            seeds.push(("decode", name, record));
        }
    }
    seeds
}

fn events() -> Vec<Seed> {
    let stream = |family: Family| {
        let records = records(family).into_iter().take(EVENTS);
        let framed = records.map(|record| [&(record.len() as u16).to_le_bytes(), &record[..]].concat());
        ("events", family.name().to_owned(), framed.collect::<Vec<_>>().concat())
    };
    [Family::ClearedRoom, Family::UnsafeRelease, Family::PeerDied].map(stream).to_vec()
}

fn rules() -> Vec<Seed> {
    let text = include_str!("../../../rules/default.yaml");
    let begin = text.find("  - name: Parked").unwrap();
    let end = text.find("  # The server failed a request").unwrap();
    let some = format!("rules:\n{}", &text[begin..end]);
    let labelled = "rules:\n  - {name: A, when: 'sent_pages > 3 || room_shared', for: 1m30s, severity: info, \
                    labels: {team: kv}, summary: s, action: dry-run}\n";
    let wrong = "rules:\n  - name: A\n    name: B\n    when: cause === 1 && nothing\n    for: -3s\n    severty: info\n";
    let named = [("default", some), ("labelled", labelled.to_owned()), ("wrong", wrong.to_owned())];
    named.map(|(name, text)| ("rules", name.to_owned(), text.into_bytes())).to_vec()
}

fn recordings() -> Vec<Seed> {
    let mut inputs = inputs(Family::ClearedRoom);
    inputs.truncate(60);
    let mut file = Vec::new();
    recording(inputs, load::defaults().unwrap()).write(&mut file).unwrap();
    assert!(Reader::open(&file[..]).is_ok());
    // The payloads of its header and of its first block, for a right checksum to be made (`fuzz::recording`).
    let length = |frame: &[u8]| FrameHead::read(frame[..FRAME_HEAD].try_into().unwrap()).unwrap().length as usize;
    let (header, rest) = file[FRAME_HEAD..].split_at(length(&file));
    let block = &rest[FRAME_HEAD..FRAME_HEAD + length(rest)];
    let payloads = [&(header.len() as u16).to_le_bytes(), header, block].concat();
    vec![("recording", "file".to_owned(), file), ("recording", "payloads".to_owned(), payloads)]
}

fn control() -> Vec<Seed> {
    let texts = [
        r#"{"protocol":1,"epoch":5,"id":3,"ok":true,"flag":"send_failed","entries":7}"#,
        r#"{"protocol":1,"epoch":5,"id":3,"ok":false,"refused":"room_shared","detail":"\u001b[2Jmore of it"}"#,
        r#"{"hook":"0.1.0","protocol":1,"fd":7,"server":{"hook":"0.1.0","epoch":1,"sglang":"0.5.22","tp":2,"tp_rank":0}}"#,
    ];
    let numbered = texts.iter().enumerate();
    numbered.map(|(number, text)| ("control", format!("reply-{number}"), text.as_bytes().to_vec())).collect()
}

fn library() -> Vec<Seed> {
    let maps = "7f0000000000-7f0000001000 r-xp 00001000 08:01 42 /s/.nixl.mesonpy.libs/libnixl.so\n\
                7f0000001000-7f0000002000 rw-p 00000000 00:00 0 [heap]\n\
                7f0000002000-7f0000003000 r--p 00000000 00:2a 7 /memfd:a\\012b (deleted)\n";
    let marker = Path::new(env!("CARGO_MANIFEST_DIR")).join("../hook/dislodge_hook/marker/x86_64.so");
    vec![
        ("library", "maps".to_owned(), maps.as_bytes().to_vec()),
        ("library", "marker".to_owned(), fs::read(marker).unwrap()),
    ]
}

/// An event as BPF writes it; nothing for those that the simulator does not make.
fn record(event: &Event) -> Option<Vec<u8>> {
    let (kind, room, value, sender, detail) = fields(&event.body)?;
    let flags = if room == Room::OutOfRange { flag::ROOM_OUT_OF_RANGE } else { 0 };
    let room = if let Room::Number(room) = room { room } else { 0 };
    let header = Header {
        kind: kind as u16,
        flags,
        tgid: event.pid,
        tid: event.tid,
        detail_length: detail.len() as u32,
        time_ns: event.at.0,
        sequence: event.sequence,
    };
    Some([header.as_bytes(), Mark { room, value, sender }.as_bytes(), &detail[..]].concat())
}

fn fields(body: &Body) -> Option<(Kind, Room, u64, u64, Vec<u8>)> {
    let status = |phase: &Option<Phase>| u64::from(phase.map_or(0xff, Phase::number));
    let nothing = Vec::new();
    Some(match body {
        Body::Hello(_) => {
            (Kind::Hello, Room::Number(0), 5, 0, br#"{"epoch":5,"sglang":"0.5.22","tp":1,"pp":1}"#.to_vec())
        }
        Body::StateBegin { epoch } => (Kind::StateBegin, Room::Number(0), *epoch, 0, nothing),
        Body::StateEnd { epoch, entries } => {
            (Kind::StateEnd, Room::Number(0), *epoch, 0, format!(r#"{{"entries":{entries}}}"#).into_bytes())
        }
        Body::Entry { room, sender, epoch, entry } => {
            let text = format!(
                r#"{{"backend":1,"phase":2,"created":{},"sent_chunks":{},"chunks":1,"rid":"rid"}}"#,
                entry.created?.0, entry.sent_chunks
            );
            (Kind::Entry, *room, *epoch, *sender, text.into_bytes())
        }
        Body::Paused => (Kind::Paused, Room::Number(0), 0, 0, nothing),
        Body::Resumed => (Kind::Resumed, Room::Number(0), 0, 0, nothing),
        Body::Open { room, sender, .. } => (Kind::Open, *room, 1, *sender, nothing),
        Body::Close { room, sender } => (Kind::Close, *room, 0, *sender, nothing),
        Body::Phase { room, sender, old, new } => {
            (Kind::Phase, *room, status(old) | status(new) << 8, *sender, nothing)
        }
        Body::Abort { room, sender, room_present } => (Kind::Abort, *room, (*room_present).into(), *sender, nothing),
        Body::Update { room, requested, before, after } => {
            (Kind::Update, *room, status(requested) | status(before) << 8 | status(after) << 16, 0, nothing)
        }
        Body::Send { room, sender, pages, last } => {
            (Kind::Send, *room, u64::from(*pages) | u64::from(*last) << 32, *sender, nothing)
        }
        Body::Clear { room, sender, removed } => (Kind::Clear, *room, (*removed).into(), *sender, nothing),
        Body::Failure { room, sender } => (Kind::Failure, *room, 0, *sender, nothing),
        Body::Enter { room, sender, rid, queue_length } => {
            let rid = rid.as_ref().map_or(nothing, |rid| rid.text.clone().into_bytes());
            (Kind::Enter, *room, *queue_length, *sender, rid)
        }
        Body::Leave { room, sender, reason } => {
            let reasons = [LeaveReason::Success, LeaveReason::Failed, LeaveReason::Removed];
            let number = reasons.iter().position(|other| other == reason)? as u64 + 1;
            (Kind::Leave, *room, number, *sender, nothing)
        }
        Body::Chunk { room, step, counts, queue } => {
            let kind = match step {
                ChunkStep::Queued => Kind::ChunkQueued,
                ChunkStep::Begun => Kind::WorkBegin,
                ChunkStep::Ended => Kind::WorkEnd,
            };
            let ChunkCounts { queued, working, abandoned, .. } = counts;
            let counts = u64::from(*queued) | u64::from(*working) << 16 | u64::from(*abandoned) << 32;
            (kind, *room, counts, queue.unwrap_or(0), nothing)
        }
        Body::Pass { queue_length, passes } => {
            (Kind::Pass, Room::Number(0), u64::from(*queue_length) | u64::from(*passes) << 32, 0, nothing)
        }
        Body::Native(native) => return of_native(native),
        _ => return None,
    })
}

fn of_native(event: &NativeEvent) -> Option<(Kind, Room, u64, u64, Vec<u8>)> {
    let code = |status: &TransferStatus| match status {
        TransferStatus::NotPosted => -1,
        TransferStatus::InProgress => 1,
        TransferStatus::Done => 0,
        TransferStatus::Failed { code } => *code,
    };
    let nothing = Vec::new();
    let (kind, object, value, size, detail) = match event {
        NativeEvent::Made { handle, parts, size, notification, .. } => {
            let bytes = notification.as_ref().map_or(nothing, |it| it.bytes.clone());
            (Kind::NixlMade, handle.number, 1 | parts << 8, size.map_or(0, |size| size.bytes), bytes)
        }
        NativeEvent::Posting { handle, .. } => (Kind::NixlPosting, handle.number, 0, 0, nothing),
        NativeEvent::RangePosted { list, flush: Flush::UnderWay { request }, descriptors, took } => {
            (Kind::NixlRangePosted, *list, *request, descriptors | (took.as_nanos() as u64) << 32, nothing)
        }
        NativeEvent::Flushed { completion, status } => {
            (Kind::UcpFlushed, *completion, i64::from(*status) as u64, 0, nothing)
        }
        NativeEvent::Releasing { handle, status: Some(status) } => {
            (Kind::NixlReleasing, handle.number, i64::from(code(status)) as u64, 0, nothing)
        }
        NativeEvent::EndpointError { endpoint, status, .. } => {
            (Kind::EndpointError, *endpoint, u64::from(*status as u8) | 1 << 8, 0, nothing)
        }
        _ => return None,
    };
    Some((kind, Room::Number(object), value, size, detail))
}
