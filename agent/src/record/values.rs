//! The format of what the core is told: numbers and order of everything in an event.

use minicbor::{Decode, Decoder, Encode, Encoder, decode, encode};

use super::codec::{Fields, Names, recorded};
use crate::{
    core::{Input, Pace, Rules},
    event::{
        Backend, Body, ChunkCounts, ChunkStep, Entry, Event, FailureFlag, Hello, LeaveReason, Phase, ProcessKey, Rid,
        Room,
        clock::Monotonic,
        native::{Engine, ErrorPoint, Flush, Handle, NativeEvent, Notification, Operation, Peer, Size, TransferStatus},
        receiver::{DecodeLeave, DecodeQueue, ReceiverEvent},
    },
    request::{
        DeviceError, RequestKey, ResyncReason,
        ends::{EndState, RoomEnd},
        tracker::Parting,
        transfer::Observation,
    },
    target::device::DeviceErrorKind,
    verdict::ServerIdentity,
};

recorded!(enum Input {
    0 Snapshot(snapshot),
    1 Attach { process, identity, clock_offset },
    2 Detach { process, why, at },
    3 Event(event),
    4 Doubt { process, why },
    5 Asked { process, epoch, why, at },
    6 Watch { process, engine, at },
    7 NativeLost { process, at },
    8 Observed { process, seen, at },
    9 Looked { process, polls, began, at },
    10 Rules { rules, at },
    11 Tick { now, pace },
    12 DeviceError { process, error },
    13 RoomEnds { room, side, ends, at },
    14 ServerMetrics { process, gauges, at },
});
recorded!(struct ProcessKey { pid, start });
recorded!(number Parting { 0 Ended, 1 Unseen });
recorded!(struct RequestKey { process, serial });
recorded!(struct Event { pid, tid, at, sequence, detail_lost, body });
recorded!(struct Observation { handle, generation, status, moved });
recorded!(number ResyncReason {
    0 Attached, 1 EventsLost, 2 QueueLengthDiffers, 3 UnknownSender, 4 DetailLost, 5 EntriesMissing,
});

// The numbers of the contract between hook and agent (`dislodge_ebpf::wire::Kind`) where there is one.
recorded!(enum Body {
    1 Hello(hello),
    2 StateBegin { epoch },
    3 Entry { room, sender, epoch, entry },
    4 StateEnd { epoch, entries },
    10 Open { room, sender, backend },
    11 Close { room, sender },
    12 Phase { room, sender, old, new },
    13 Abort { room, sender, room_present },
    14 Update { room, requested, before, after },
    15 Send { room, sender, pages, last },
    16 Clear { room, sender, removed },
    17 Failure { room, sender },
    18 Enter { room, sender, rid, queue_length },
    19 Leave { room, sender, reason },
    20 PeerAbort { room, room_present },
    21 Chunk { room, step, counts, queue },
    24 Pass { queue_length, passes },
    25 Paused {},
    26 Resumed {},
    27 Remedy { room, sender, flag },
    99 Receiver(event),
    100 Native(native),
});
recorded!(enum ReceiverEvent {
    3 Entry { room, sender, epoch, queue, entry },
    10 Open { room, sender, backend },
    18 Enter { room, sender, queue, rid },
    19 Leave { room, sender, queue, reason },
    24 Pass { prealloc, transfer, passes },
});
recorded!(number DecodeQueue { 1 Prealloc, 2 Transfer });
recorded!(number DecodeLeave { 1 Success, 2 Failed, 3 Removed, 4 Preallocated });
recorded!(number Phase { 0 Failed, 1 Bootstrapping, 2 WaitingForInput, 3 Transferring, 4 Success });
recorded!(number Backend { 0 Other, 1 Nixl, 2 Fake, 3 Mooncake, 4 Mori, 5 Ascend });
recorded!(number FailureFlag { 1 SendFailed, 2 ConcludeState, 3 MarkingPoll });
recorded!(number LeaveReason { 1 Success, 2 Failed, 3 Removed });
recorded!(number ChunkStep { 0 Queued, 1 Begun, 2 Ended });
recorded!(struct ChunkCounts { queued, working, abandoned, attached_late, no_queues });
recorded!(struct Entry {
    backend, phase, phase_since, created, entered, sent_chunks, sent_pages, sent_last, aborted, dropped, shared_with,
    cleared_by, chunks, rid,
});

recorded!(enum NativeEvent {
    0 Made { handle, operation, parts, size, notification },
    1 NotMade { code },
    2 Posting { handle, operation, first_length, lists },
    3 RangePosted { list, flush, descriptors, took },
    4 Flushed { completion, status },
    5 Status { handle, status, moved },
    6 Posted { handle, status },
    7 Releasing { handle, status },
    8 NotificationArrived { peer, notification },
    9 NotificationSent { notification },
    10 EndpointError { endpoint, point, status },
    11 CompletionError { status, vendor_error, qp },
});
recorded!(struct Handle { engine, number });
recorded!(struct Size { bytes, estimated });
recorded!(struct DeviceError { at, device, port, counter, kind, by });
recorded!(number DeviceErrorKind { 0 Retried, 1 GaveUp, 2 Link });
recorded!(number Engine { 0 Nixl, 1 Mooncake });
recorded!(number Operation { 0 Read, 1 Write, 2 NotRead });
recorded!(number ErrorPoint { 0 Nixl, 1 Ucp, 2 Uct });
recorded!(enum TransferStatus { 0 NotPosted {}, 1 InProgress {}, 2 Done {}, 3 Failed { code } });
recorded!(enum Flush { 0 Done {}, 1 Failed { status }, 2 UnderWay { request } });

impl<C> Encode<C> for Monotonic {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, _: &mut C) -> Result<(), encode::Error<W::Error>> {
        e.u64(self.0)?.ok()
    }
}

impl<'b, C> Decode<'b, C> for Monotonic {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<Self, decode::Error> {
        d.u64().map(Self)
    }
}

/// A number; null for a room that is none.
impl<C: Names> Encode<C> for Room {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        match self {
            Self::Number(number) => e.u64(names.room(*number))?.ok(),
            Self::OutOfRange => e.null()?.ok(),
        }
    }
}

impl<'b, C> Decode<'b, C> for Room {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        let number: Option<u64> = Decode::decode(d, context)?;
        Ok(number.map_or(Self::OutOfRange, Self::Number))
    }
}

impl<C: Names> Encode<C> for Rid {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        let Self { text, truncated } = self;
        e.array(2)?.str(&names.word(text))?.bool(*truncated)?.ok()
    }
}

impl<'b, C> Decode<'b, C> for Rid {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        let (text, truncated) = Decode::decode(d, context)?;
        Ok(Self { text, truncated })
    }
}

impl<C: Names> Encode<C> for Peer {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        e.str(&names.word(&self.0))?.ok()
    }
}

impl<'b, C> Decode<'b, C> for Peer {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<Self, decode::Error> {
        d.str().map(|name| Self(name.to_owned()))
    }
}

impl<C: Names> Encode<C> for Notification {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        let Self { bytes, cut } = &*names.notification(self);
        e.array(2)?.bytes(bytes)?.bool(*cut)?.ok()
    }
}

impl<'b, C> Decode<'b, C> for Notification {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        let (bytes, cut): (&minicbor::bytes::ByteSlice, bool) = Decode::decode(d, context)?;
        Ok(Self { bytes: bytes.to_vec(), cut })
    }
}

impl<C: Names> Encode<C> for RoomEnd {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        let Self { node, pid, state } = self;
        let node = node.as_deref().map(|node| names.word(node).into_owned());
        (node, pid, state).encode(e, names)
    }
}

impl<'b, C> Decode<'b, C> for RoomEnd {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        let (node, pid, state): (Option<String>, u32, EndState) = Decode::decode(d, context)?;
        Ok(Self { node, pid, state })
    }
}

/// Words, ranks, then the rest.
impl<C: Names> Encode<C> for Hello {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        let Self { hook, epoch, sglang, engine, python, role, backend, sender, flag, counts, late, .. } = self;
        let Self { tp, tp_rank, pp, pp_rank, cp, dp, dp_rank, bootstrap_timeout, waiting_timeout, .. } = self;
        let public = |word: &Option<String>| word.as_deref().map(|word| names.public(word).into_owned());
        let words = [hook, sglang, engine, python, role, backend, sender, counts].map(public);
        let ranks = [*tp, *tp_rank, *pp, *pp_rank, *cp, *dp, *dp_rank];
        (words, ranks, epoch, flag, late, bootstrap_timeout, waiting_timeout).encode(e, names)
    }
}

impl<'b, C> Decode<'b, C> for Hello {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        let (words, ranks, epoch, flag, late, bootstrap_timeout, waiting_timeout) = Decode::decode(d, context)?;
        let [hook, sglang, engine, python, role, backend, sender, counts]: [Option<String>; 8] = words;
        let [tp, tp_rank, pp, pp_rank, cp, dp, dp_rank]: [Option<u32>; 7] = ranks;
        Ok(Self {
            hook,
            epoch,
            sglang,
            engine,
            python,
            role,
            backend,
            sender,
            flag,
            counts,
            late,
            tp,
            tp_rank,
            pp,
            pp_rank,
            cp,
            dp,
            dp_rank,
            bootstrap_timeout,
            waiting_timeout,
        })
    }
}

impl<C: Names> Encode<C> for ServerIdentity {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        let Self { pid, start, title, node, container, parent } = self;
        let container = container.as_deref().map(|name| names.word(name).into_owned());
        (pid, start, names.word(title).as_ref(), names.word(node).as_ref(), container, *parent).encode(e, names)
    }
}

impl<'b, C> Decode<'b, C> for ServerIdentity {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        let mut fields = Fields::of(d)?;
        let (pid, start) = (fields.next(d, context)?, fields.next(d, context)?);
        let (title, node) = (fields.next(d, context)?, fields.next(d, context)?);
        let (container, parent) = (fields.next(d, context)?, fields.next(d, context)?);
        fields.end(d)?;
        Ok(Self { pid, start, title, node, container, parent })
    }
}

/// The look at its clock at which a tick stopped. A tick that is still to come has not stopped.
impl<C> Encode<C> for Pace {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, context: &mut C) -> Result<(), encode::Error<W::Error>> {
        match self {
            Self::As(stopped) => stopped.encode(e, context),
            Self::Within(_) => e.null()?.ok(),
        }
    }
}

impl<'b, C> Decode<'b, C> for Pace {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        Decode::decode(d, context).map(Self::As)
    }
}

/// Of rules there is only the digest in a recording.
impl<C> Encode<C> for Rules {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, _: &mut C) -> Result<(), encode::Error<W::Error>> {
        e.str(self.digest())?.ok()
    }
}

impl<'b, C> Decode<'b, C> for Rules {
    fn decode(d: &mut Decoder<'b>, _: &mut C) -> Result<Self, decode::Error> {
        d.str().map(|digest| Self::Elsewhere { digest: digest.to_owned() })
    }
}
