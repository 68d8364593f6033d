//! Reading recordings. Everything in a file may be wrong: nothing here trusts a length, and a file that is cut is read up
//! to the cut.

use std::io::{self, Read};

use minicbor::{Decode as _, Decoder, decode};

use super::format::{FRAME_HEAD, FrameHead, FrameKind, Header, MAX_PAYLOAD, VERSION, version};
use crate::core::Input;

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// Reading failed.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// It does not begin like a recording, or is cut in its header.
    #[error("is no recording of dislodge, or is cut before it says anything")]
    NoRecording,
    /// It is of another version.
    #[error("is a recording of version {version}; this agent reads version {VERSION}")]
    OtherVersion {
        /// Which.
        version: u16,
    },
}

/// How a file ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "end", rename_all = "snake_case")]
pub enum End {
    /// As it was written.
    Whole,
    /// It was cut.
    Cut {
        /// Where, in bytes.
        at: u64,
    },
    /// Something that is no frame: what follows cannot be read.
    Damaged {
        /// Where, in bytes.
        at: u64,
    },
}

/// How good a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Soundness {
    /// As it was written.
    Sound,
    /// Cut: what is there is likely good.
    Cut,
    /// Its checksum is wrong.
    Damaged,
}

/// A block of inputs.
#[derive(Debug)]
pub struct Block {
    payload: Vec<u8>,
    /// How good it is.
    pub soundness: Soundness,
}

/// Something that a reader found.
#[derive(Debug)]
pub enum Found {
    /// The next block.
    Block(Block),
    /// The end; nothing follows.
    End(End),
}

/// A recording that is being read.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    header: Header,
    at: u64,
    end: Option<End>,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    ///
    /// It is none that this agent reads.
    pub fn open(mut input: R) -> Result<Self, ReadError> {
        let Some((head, payload)) = frame(&mut input)? else { return Err(ReadError::NoRecording) };
        let is_whole = payload.len() as u64 == head.length && crc32fast::hash(&payload) == head.crc;
        if head.kind != FrameKind::Header || !is_whole {
            return Err(ReadError::NoRecording);
        }
        match version(&payload) {
            None => return Err(ReadError::NoRecording),
            Some(VERSION) => {}
            Some(version) => return Err(ReadError::OtherVersion { version }),
        }
        let header = Header::decode(&mut Decoder::new(&payload), &mut ()).map_err(|_| ReadError::NoRecording)?;
        let at = (FRAME_HEAD + payload.len()) as u64;
        Ok(Self { input, header, at, end: None })
    }

    /// Where it comes from.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Reads on.
    ///
    /// # Errors
    ///
    /// Reading failed.
    pub fn next_block(&mut self) -> Result<Found, ReadError> {
        loop {
            if let Some(end) = self.end {
                return Ok(Found::End(end));
            }
            let at = self.at;
            let mut head = [0; FRAME_HEAD];
            let read = read_up_to(&mut self.input, &mut head)?;
            let head = FrameHead::read(&head).filter(|head| head.length <= MAX_PAYLOAD as u64);
            let head = match head {
                _ if read < FRAME_HEAD => {
                    self.end = Some(End::Cut { at: at + read as u64 });
                    continue;
                }
                None => {
                    self.end = Some(End::Damaged { at });
                    continue;
                }
                Some(head) => head,
            };
            let payload = payload(&mut self.input, head.length)?;
            self.at += (FRAME_HEAD + payload.len()) as u64;
            let soundness = if (payload.len() as u64) < head.length {
                self.end = Some(End::Cut { at: self.at });
                Soundness::Cut
            } else if crc32fast::hash(&payload) == head.crc {
                Soundness::Sound
            } else {
                Soundness::Damaged
            };
            match head.kind {
                FrameKind::Block => return Ok(Found::Block(Block { payload, soundness })),
                FrameKind::End => self.end = Some(self.end.unwrap_or(End::Whole)),
                FrameKind::Header | FrameKind::Unknown => {}
            }
        }
    }
}

fn frame(input: &mut impl Read) -> Result<Option<(FrameHead, Vec<u8>)>, ReadError> {
    let mut head = [0; FRAME_HEAD];
    if read_up_to(input, &mut head)? < FRAME_HEAD {
        return Ok(None);
    }
    let Some(head) = FrameHead::read(&head).filter(|head| head.length <= MAX_PAYLOAD as u64) else { return Ok(None) };
    Ok(Some((head, payload(input, head.length)?)))
}

/// What is there of a payload: memory is taken for what comes, not for what was promised.
fn payload(input: &mut impl Read, length: u64) -> io::Result<Vec<u8>> {
    let mut payload = Vec::new();
    input.take(length).read_to_end(&mut payload)?;
    Ok(payload)
}

fn read_up_to(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while let Some(rest) = buffer.get_mut(read..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

/// An item of a block.
#[derive(Debug)]
pub enum Item {
    /// What the core was told.
    Input(Box<Input>),
    /// Something that was added later.
    Unknown,
    /// The rest of the block is not there, or is no item.
    Broken,
}

/// The items of a block.
#[derive(Debug)]
pub struct Items<'a> {
    decoder: Decoder<'a>,
    broken: bool,
    /// Whether snapshots are wanted; they are passed over else.
    pub snapshots: bool,
}

impl Block {
    /// What is in it.
    pub fn items(&self, snapshots: bool) -> Items<'_> {
        Items { decoder: Decoder::new(&self.payload), broken: false, snapshots }
    }
}

impl Iterator for Items<'_> {
    type Item = Item;

    fn next(&mut self) -> Option<Item> {
        loop {
            if self.broken || self.decoder.position() >= self.decoder.input().len() {
                return None;
            }
            let begin = self.decoder.position();
            if !self.snapshots && is_snapshot(&mut self.decoder.probe()).unwrap_or(false) {
                if self.decoder.skip().is_ok() {
                    continue;
                }
                self.broken = true;
                return Some(Item::Broken);
            }
            match Input::decode(&mut self.decoder, &mut ()) {
                Ok(input) => return Some(Item::Input(Box::new(input))),
                Err(_) => {
                    self.decoder.set_position(begin);
                    if self.decoder.skip().is_ok() {
                        return Some(Item::Unknown);
                    }
                    self.broken = true;
                    return Some(Item::Broken);
                }
            }
        }
    }
}

fn is_snapshot(decoder: &mut Decoder<'_>) -> Result<bool, decode::Error> {
    decoder.array()?;
    Ok(decoder.u16()? == 0)
}
