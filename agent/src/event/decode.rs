//! Bytes of the ring buffer → [`Event`]. Pure; everything in the bytes may be wrong, since a traced process is the
//! author of most of it.

use dislodge_ebpf::wire::{Header, Kind, MAX_DETAIL, Mark, Native, flag};
use serde::Deserialize;
use zerocopy::FromBytes;

use super::{
    Backend, Body, ChunkCounts, ChunkStep, Entry, Event, FailureFlag, LeaveReason, Phase, Rid, Room,
    clock::Monotonic,
    native::native_event,
    receiver::{DecodeLeave, DecodeQueue, ReceiverEvent},
};

/// The status that stands for "none": never polled, or a room that is absent.
const NO_STATUS: u8 = 0xff;

/// Why bytes are not an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum DecodeError {
    /// Fewer bytes than a header and a mark, or than the detail that the header announces.
    #[error("the event is truncated")]
    Truncated,
    /// A detail longer than any event can carry.
    #[error("the event announces more detail than an event can carry")]
    Oversized,
    /// A kind that this agent does not know: the hook is of another version.
    #[error("the event's kind is unknown")]
    UnknownKind,
    /// A value that its kind does not allow.
    #[error("the event's value is not one that its kind allows")]
    BadValue,
    /// Words that are not what their kind asks for.
    #[error("the event's detail is not what its kind asks for")]
    BadDetail,
}

impl DecodeError {
    /// Every error.
    pub const ALL: [Self; 5] = [Self::Truncated, Self::Oversized, Self::UnknownKind, Self::BadValue, Self::BadDetail];

    /// Label value of metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Truncated => "truncated",
            Self::Oversized => "oversized",
            Self::UnknownKind => "unknown_kind",
            Self::BadValue => "bad_value",
            Self::BadDetail => "bad_detail",
        }
    }
}

/// Decodes one event of the ring.
pub fn decode(bytes: &[u8]) -> Result<Event, DecodeError> {
    let (header, rest) = Header::read_from_prefix(bytes).map_err(|_| DecodeError::Truncated)?;
    let (mark, rest) = Mark::read_from_prefix(rest).map_err(|_| DecodeError::Truncated)?;
    let length = usize::try_from(header.detail_length).map_err(|_| DecodeError::Oversized)?;
    if length > MAX_DETAIL {
        return Err(DecodeError::Oversized);
    }
    let detail = rest.get(..length).ok_or(DecodeError::Truncated)?;
    let kind = Kind::from_number(header.kind).ok_or(DecodeError::UnknownKind)?;
    let detail_lost = header.flags & (flag::DETAIL_TRUNCATED | flag::DETAIL_FAULT) != 0;
    Ok(Event {
        pid: header.tgid,
        tid: header.tid,
        at: Monotonic(header.time_ns),
        sequence: header.sequence,
        detail_lost: detail_lost && !kind.is_native(),
        body: match kind.is_native() {
            true => {
                let native = Native { object: mark.room, value: mark.value, size: mark.sender };
                Body::Native(Box::new(native_event(kind, header.flags, &native, detail)?))
            }
            false => body(kind, &header, &mark, detail, detail_lost)?,
        },
    })
}

fn chunk(room: Room, step: ChunkStep, mark: &Mark) -> Body {
    let queue = (mark.sender != 0).then_some(mark.sender);
    Body::Chunk { room, step, counts: ChunkCounts::unpack(mark.value), queue }
}

fn body(kind: Kind, header: &Header, mark: &Mark, detail: &[u8], detail_lost: bool) -> Result<Body, DecodeError> {
    let room = if header.flags & flag::ROOM_OUT_OF_RANGE == 0 { Room::Number(mark.room) } else { Room::OutOfRange };
    let &Mark { value, sender, .. } = mark;
    let low = value as u32;
    let high = (value >> 32) as u32;
    Ok(match kind {
        Kind::Hello => Body::Hello(Box::new(parse(detail)?)),
        Kind::StateBegin => Body::StateBegin { epoch: value },
        Kind::Entry => entry(room, sender, value, parse(detail)?)?,
        Kind::StateEnd => Body::StateEnd { epoch: value, entries: parse::<WireStateEnd>(detail)?.entries },
        Kind::Open => open(room, sender, value),
        Kind::Close => Body::Close { room, sender },
        Kind::Phase => Body::Phase { room, sender, old: status(value)?, new: status(value >> 8)? },
        Kind::Abort => Body::Abort { room, sender, room_present: value != 0 },
        Kind::Update => {
            Body::Update { room, requested: status(value)?, before: status(value >> 8)?, after: status(value >> 16)? }
        }
        Kind::Send => Body::Send { room, sender, pages: low, last: high & 1 != 0 },
        Kind::Clear => Body::Clear { room, sender, removed: value != 0 },
        Kind::Failure => Body::Failure { room, sender },
        Kind::Enter if high != 0 => {
            let queue = decode_queue(high.into())?;
            Body::Receiver(ReceiverEvent::Enter { room, sender, queue, rid: rid(detail, detail_lost)? })
        }
        Kind::Enter => Body::Enter { room, sender, rid: rid(detail, detail_lost)?, queue_length: value },
        Kind::Leave if value > 0xff => {
            let reason = DecodeLeave::from_number(value & 0xff).ok_or(DecodeError::BadValue)?;
            Body::Receiver(ReceiverEvent::Leave { room, sender, queue: decode_queue(value >> 8)?, reason })
        }
        Kind::Leave => Body::Leave { room, sender, reason: leave_reason(value)? },
        Kind::PeerAbort => Body::PeerAbort { room, room_present: value != 0 },
        Kind::ChunkQueued => chunk(room, ChunkStep::Queued, mark),
        Kind::WorkBegin => chunk(room, ChunkStep::Begun, mark),
        Kind::WorkEnd => chunk(room, ChunkStep::Ended, mark),
        Kind::Pass if sender != 0 => {
            let transfer = u32::try_from(sender - 1).map_err(|_| DecodeError::BadValue)?;
            Body::Receiver(ReceiverEvent::Pass { prealloc: low, transfer, passes: high })
        }
        Kind::Pass => Body::Pass { queue_length: low, passes: high },
        Kind::Paused => Body::Paused,
        Kind::Resumed => Body::Resumed,
        Kind::Remedy => Body::Remedy { room, sender, flag: FailureFlag::from_number(value) },
        _ => return Err(DecodeError::UnknownKind),
    })
}

/// Set in the value of `open` by a receiver.
const RECEIVER: u64 = 1 << 8;

fn open(room: Room, sender: u64, value: u64) -> Body {
    let backend = Backend::from_number(value & !RECEIVER);
    if value & RECEIVER == 0 {
        return Body::Open { room, sender, backend };
    }
    Body::Receiver(ReceiverEvent::Open { room, sender, backend })
}

fn entry(room: Room, sender: u64, epoch: u64, entry: WireEntry) -> Result<Body, DecodeError> {
    let (receiver, queue) = (entry.receiver, entry.queue);
    let entry = Box::new(entry.into_entry()?);
    if !receiver {
        return Ok(Body::Entry { room, sender, epoch, entry });
    }
    let queue = if queue == 0 { None } else { Some(decode_queue(queue)?) };
    Ok(Body::Receiver(ReceiverEvent::Entry { room, sender, epoch, queue, entry }))
}

fn decode_queue(number: u64) -> Result<DecodeQueue, DecodeError> {
    DecodeQueue::from_number(number).ok_or(DecodeError::BadValue)
}

fn status(value: u64) -> Result<Option<Phase>, DecodeError> {
    match value as u8 {
        NO_STATUS => Ok(None),
        number => Phase::from_number(number).map(Some).ok_or(DecodeError::BadValue),
    }
}

fn leave_reason(value: u64) -> Result<LeaveReason, DecodeError> {
    match value {
        1 => Ok(LeaveReason::Success),
        2 => Ok(LeaveReason::Failed),
        3 => Ok(LeaveReason::Removed),
        _ => Err(DecodeError::BadValue),
    }
}

fn rid(detail: &[u8], detail_lost: bool) -> Result<Option<Rid>, DecodeError> {
    let text = match std::str::from_utf8(detail) {
        Ok(text) => text,
        // BPF cuts at a byte, not at a character.
        Err(error) if detail_lost => std::str::from_utf8(&detail[..error.valid_up_to()]).unwrap_or_default(),
        Err(_) => return Err(DecodeError::BadDetail),
    };
    Ok((!text.is_empty()).then(|| Rid { text: text.to_owned(), truncated: detail_lost }))
}

fn parse<'a, T: Deserialize<'a>>(detail: &'a [u8]) -> Result<T, DecodeError> {
    serde_json::from_slice(detail).map_err(|_| DecodeError::BadDetail)
}

#[derive(Deserialize)]
struct WireStateEnd {
    entries: u64,
}

#[derive(Deserialize)]
#[serde(default)]
struct WireEntry {
    backend: u64,
    phase: u8,
    phase_since: u64,
    created: u64,
    entered: u64,
    sent_chunks: u32,
    sent_pages: u64,
    sent_last: bool,
    aborted: u64,
    dropped: u64,
    shared_with: u64,
    cleared_by: u64,
    chunks: u64,
    rid: Option<String>,
    rid_truncated: bool,
    receiver: bool,
    queue: u64,
}

impl Default for WireEntry {
    fn default() -> Self {
        Self {
            backend: 0,
            phase: NO_STATUS,
            phase_since: 0,
            created: 0,
            entered: 0,
            sent_chunks: 0,
            sent_pages: 0,
            sent_last: false,
            aborted: 0,
            dropped: 0,
            shared_with: 0,
            cleared_by: 0,
            chunks: 0,
            rid: None,
            rid_truncated: false,
            receiver: false,
            queue: 0,
        }
    }
}

impl WireEntry {
    fn into_entry(self) -> Result<Entry, DecodeError> {
        let time = |nanoseconds| (nanoseconds != 0).then_some(Monotonic(nanoseconds));
        let serial = |serial| (serial != 0).then_some(serial);
        Ok(Entry {
            backend: Backend::from_number(self.backend),
            phase: status(self.phase.into())?,
            phase_since: time(self.phase_since),
            created: time(self.created),
            entered: time(self.entered),
            sent_chunks: self.sent_chunks,
            sent_pages: self.sent_pages,
            sent_last: self.sent_last,
            aborted: time(self.aborted),
            dropped: time(self.dropped),
            shared_with: serial(self.shared_with),
            cleared_by: serial(self.cleared_by),
            chunks: ChunkCounts::unpack(self.chunks),
            rid: self.rid.map(|text| Rid { text, truncated: self.rid_truncated }),
        })
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    fn bytes(kind: u16, flags: u16, mark: Mark, detail: &[u8]) -> Vec<u8> {
        let detail_length = detail.len() as u32;
        let header = Header { kind, flags, tgid: 7, tid: 8, detail_length, time_ns: 9, sequence: 10 };
        [header.as_bytes(), mark.as_bytes(), detail].concat()
    }

    fn mark(room: u64, value: u64, sender: u64) -> Mark {
        Mark { room, value, sender }
    }

    #[test]
    fn a_phase_change_is_decoded_with_both_phases() {
        let event = decode(&bytes(12, 0, mark(77, 0x01ff, 3), b"")).unwrap();
        assert_eq!((event.pid, event.tid, event.at, event.sequence), (7, 8, Monotonic(9), 10));
        let new = Some(Phase::Bootstrapping);
        assert_eq!(event.body, Body::Phase { room: Room::Number(77), sender: 3, old: None, new });
    }

    #[test]
    fn every_shorter_prefix_of_an_event_is_truncated() {
        let whole = bytes(18, 0, mark(1, 1, 1), b"rid");
        for length in 0..whole.len() {
            assert_eq!(decode(&whole[..length]), Err(DecodeError::Truncated), "{length} bytes");
        }
        assert!(decode(&whole).is_ok());
    }

    #[test]
    fn an_unknown_kind_is_an_error() {
        assert_eq!(decode(&bytes(999, 0, mark(0, 0, 0), b"")), Err(DecodeError::UnknownKind));
    }

    #[test]
    fn a_detail_longer_than_an_event_is_oversized() {
        let mut event = bytes(18, 0, mark(1, 1, 1), &[b'x'; MAX_DETAIL]);
        event[12..16].copy_from_slice(&(MAX_DETAIL as u32 + 1).to_ne_bytes());
        event.push(b'x');
        assert_eq!(decode(&event), Err(DecodeError::Oversized));
    }

    #[test]
    fn values_that_a_kind_does_not_allow_are_refused() {
        assert_eq!(decode(&bytes(12, 0, mark(1, 0x0005, 1), b"")), Err(DecodeError::BadValue));
        assert_eq!(decode(&bytes(19, 0, mark(1, 4, 1), b"")), Err(DecodeError::BadValue));
        assert_eq!(decode(&bytes(1, 0, mark(0, 0, 0), b"{")), Err(DecodeError::BadDetail));
        assert_eq!(decode(&bytes(18, 0, mark(1, 0, 1), b"\xff\xfe")), Err(DecodeError::BadDetail));
    }

    #[test]
    fn a_cut_rid_keeps_its_whole_characters_and_says_so() {
        let event = decode(&bytes(18, flag::DETAIL_TRUNCATED, mark(1, 4, 1), b"rid-\xe6\x97")).unwrap();
        let Body::Enter { rid, .. } = event.body else { panic!("{event:?}") };
        assert_eq!(rid, Some(Rid { text: "rid-".into(), truncated: true }));
    }

    #[test]
    fn a_room_out_of_range_is_not_a_number() {
        let event = decode(&bytes(11, flag::ROOM_OUT_OF_RANGE, mark(0, 0, 5), b"")).unwrap();
        assert_eq!(event.body, Body::Close { room: Room::OutOfRange, sender: 5 });
    }

    #[test]
    fn an_entry_takes_zero_as_never() {
        let detail = br#"{"backend":1,"phase":2,"created":5,"entered":0,"chunks":4294967297,"rid":"r"}"#;
        let event = decode(&bytes(3, 0, mark(1, 6, 2), detail)).unwrap();
        let Body::Entry { entry, epoch, .. } = event.body else { panic!() };
        assert_eq!(epoch, 6);
        assert_eq!((entry.phase, entry.entered), (Some(Phase::WaitingForInput), None));
        assert_eq!((entry.chunks.queued, entry.chunks.abandoned), (1, true));
    }

    #[test]
    fn marks_of_a_decode_are_told_from_a_prefills() {
        let (room, sender) = (Room::Number(7), 3);
        let says = |kind: u16, mark: Mark, detail: &[u8]| match decode(&bytes(kind, 0, mark, detail)).unwrap().body {
            Body::Receiver(event) => event,
            other => panic!("{other:?}"),
        };
        let opened = ReceiverEvent::Open { room, sender, backend: Backend::Mooncake };
        assert_eq!(says(10, mark(7, 3 | 1 << 8, 3), b""), opened);
        let rid = Some(Rid { text: "r".into(), truncated: false });
        let entered = ReceiverEvent::Enter { room, sender, queue: DecodeQueue::Transfer, rid };
        assert_eq!(says(18, mark(7, 9 | 2 << 32, 3), b"r"), entered);
        let left = |reason| ReceiverEvent::Leave { room, sender, queue: DecodeQueue::Prealloc, reason };
        assert_eq!(says(19, mark(7, 4 | 1 << 8, 3), b""), left(DecodeLeave::Preallocated));
        assert_eq!(says(19, mark(7, 2 | 1 << 8, 3), b""), left(DecodeLeave::Failed));
        let passed = ReceiverEvent::Pass { prealloc: 5, transfer: 0, passes: 40 };
        assert_eq!(says(24, mark(0, 5 | 40 << 32, 1), b""), passed, "an empty transfer queue");
        let detail = br#"{"queue":1,"receiver":true,"backend":1,"entered":5}"#;
        let ReceiverEvent::Entry { queue, entry, epoch: 6, .. } = says(3, mark(7, 6, 3), detail) else { panic!() };
        assert_eq!((queue, entry.entered), (Some(DecodeQueue::Prealloc), Some(Monotonic(5))));
    }

    #[test]
    fn queues_and_reasons_that_a_decode_does_not_have_are_refused() {
        for (kind, value, sender) in [(18, 3 << 32, 1), (19, 1 | 3 << 8, 1), (19, 5 | 1 << 8, 1), (24, 0, u64::MAX)] {
            let event = bytes(kind, 0, mark(7, value, sender), b"");
            assert_eq!(decode(&event), Err(DecodeError::BadValue), "{kind} {value:x}");
        }
        let entry = bytes(3, 0, mark(7, 1, 1), br#"{"receiver":true,"queue":9}"#);
        assert_eq!(decode(&entry), Err(DecodeError::BadValue));
    }

    #[test]
    fn every_kind_decodes_with_some_value() {
        for kind in Kind::ALL {
            let detail: &[u8] = match kind {
                Kind::StateEnd => br#"{"entries":0}"#,
                kind if kind.has_detail() && *kind != Kind::Enter => b"{}",
                _ => b"",
            };
            assert!(decode(&bytes(*kind as u16, 0, mark(1, 1, 1), detail)).is_ok(), "{kind:?}");
        }
    }
}
