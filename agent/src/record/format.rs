//! The file: a CBOR sequence (RFC 8742) of frames, each with its checksum; a header, blocks, an end.

use std::io::{self, Write};

use jiff::Timestamp;
use minicbor::{Decode, Decoder, Encode, Encoder, decode, encode};

use super::codec::{Fields, Names};
use crate::{
    event::clock::{Monotonic, WallClock},
    record::codec::recorded,
    request::tracker::Limits,
};

/// Version of the format. Within one, kinds and fields may be added; nothing else changes.
pub const VERSION: u16 = 1;
/// Longest payload of a frame, in bytes: a reader takes so much into memory.
pub const MAX_PAYLOAD: usize = 64 << 20;
/// Bytes before a frame's payload: an array of three, the kind, the checksum, the payload's length.
pub const FRAME_HEAD: usize = 16;
/// What a header begins with.
const MAGIC: &str = "dislodge recording";

/// What a frame holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameKind {
    /// A [`Header`].
    Header,
    /// Inputs of the core, the first of them a snapshot.
    Block,
    /// Nothing follows.
    End,
    /// Something that was added later.
    Unknown,
}

impl FrameKind {
    fn number(self) -> u8 {
        match self {
            Self::Header => 0,
            Self::Block => 1,
            Self::End => 2,
            Self::Unknown => 23,
        }
    }

    fn of(number: u8) -> Self {
        [Self::Header, Self::Block, Self::End].into_iter().find(|kind| kind.number() == number).unwrap_or(Self::Unknown)
    }
}

/// Writes a frame.
///
/// # Errors
///
/// Those of the writer.
pub fn write_frame(out: &mut impl Write, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
    let mut head = [0; FRAME_HEAD];
    let [array, number, crc, crc_bytes @ .., _, _, _, _, _, _, _, _, _] = &mut head;
    (*array, *number, *crc) = (0x83, kind.number(), 0x1a);
    crc_bytes.copy_from_slice(&crc32fast::hash(payload).to_be_bytes());
    let [.., bytes, a, b, c, d, e, f, g, h] = &mut head;
    *bytes = 0x5b;
    [*a, *b, *c, *d, *e, *f, *g, *h] = (payload.len() as u64).to_be_bytes();
    out.write_all(&head)?;
    out.write_all(payload)
}

/// The beginning of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHead {
    /// What it holds.
    pub kind: FrameKind,
    /// CRC-32 (IEEE) of the payload.
    pub crc: u32,
    /// Bytes of the payload.
    pub length: u64,
}

impl FrameHead {
    /// Reads it; nothing when it is none.
    pub fn read(head: &[u8; FRAME_HEAD]) -> Option<Self> {
        let mut decoder = Decoder::new(head);
        (decoder.array().ok()? == Some(3)).then_some(())?;
        let (kind, crc) = (FrameKind::of(decoder.u8().ok()?), decoder.u32().ok()?);
        let [.., bytes, a, b, c, d, e, f, g, h] = *head;
        let length = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
        (decoder.position() == 7 && bytes == 0x5b).then_some(Self { kind, crc, length })
    }
}

/// Where a recording comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The agent's version.
    pub agent: String,
    /// The kernel's release.
    pub kernel: String,
    /// `/proc/sys/kernel/random/boot_id`: monotonic times of two recordings can be compared when it is the same.
    pub boot: String,
    /// The node's name.
    pub node: String,
    /// When it was written.
    pub at: Monotonic,
    /// When that was, in nanoseconds since 1970 UTC.
    pub wall: i64,
    /// [`RuleSet::digest`](crate::rule::RuleSet::digest) of the rules that applied then.
    pub rules: String,
    /// How much the agent kept of each server.
    pub limits: Limits,
    /// What is not in it any more.
    pub dropped: Dropped,
    /// Whether names are hashed.
    pub anonymized: bool,
}

/// What a recorder did not keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Dropped {
    /// Inputs that were too old, or too many.
    pub inputs: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Inputs that came while nothing could be recorded: what was known was too much for the recorder's memory.
    pub not_recorded: u64,
}

recorded!(struct Dropped { inputs, bytes, not_recorded });

impl Header {
    /// The clocks as they stood when it was written.
    pub fn clock(&self) -> WallClock {
        let wall = Timestamp::from_nanosecond(self.wall.into()).unwrap_or(Timestamp::UNIX_EPOCH);
        WallClock::at(self.at, wall)
    }
}

impl<C: Names> Encode<C> for Header {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        let Self { agent, kernel, boot, node, at, wall, rules, limits, dropped, anonymized } = self;
        e.array(12)?.str(MAGIC)?.u16(VERSION)?.str(&names.public(agent))?.str(&names.public(kernel))?;
        e.str(&names.word(boot))?.str(&names.word(node))?.u64(at.0)?.i64(*wall)?.str(rules)?;
        limits.encode(e, names)?;
        dropped.encode(e, names)?;
        e.bool(*anonymized)?.ok()
    }
}

impl<'b, C> Decode<'b, C> for Header {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        let mut fields = Fields::of(d)?;
        if fields.next::<C, &str>(d, context)? != MAGIC {
            return Err(decode::Error::message("no recording"));
        }
        let version: u16 = fields.next(d, context)?;
        if version != VERSION {
            return Err(decode::Error::message("another version"));
        }
        let header = Self {
            agent: fields.next(d, context)?,
            kernel: fields.next(d, context)?,
            boot: fields.next(d, context)?,
            node: fields.next(d, context)?,
            at: fields.next(d, context)?,
            wall: fields.next(d, context)?,
            rules: fields.next(d, context)?,
            limits: fields.next(d, context)?,
            dropped: fields.next(d, context)?,
            anonymized: fields.next(d, context)?,
        };
        fields.end(d)?;
        Ok(header)
    }
}

/// The version that a header says, if it is one of a recording.
pub(super) fn version(payload: &[u8]) -> Option<u16> {
    let mut decoder = Decoder::new(payload);
    decoder.array().ok()?;
    (decoder.str().ok()? == MAGIC).then_some(())?;
    decoder.u16().ok()
}
