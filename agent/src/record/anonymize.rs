//! Taking names out of a recording, so that it can be shown to others: request ids, rooms, notifications, titles, nodes.
//!
//! Each becomes a keyed hash (HMAC-SHA-256) whose key is thrown away: the same name has the same hash within a file, so
//! the verdicts are the same, and nobody can try names. What everybody knows stays: releases, backends, ranks, times,
//! statuses, serials.

use std::{
    borrow::Cow,
    io::{self, Read, Write},
};

use hmac::{Hmac, Mac as _};
use minicbor::{Encode as _, Encoder};
use sha2::Sha256;

use super::{
    codec::Names,
    format::{FrameKind, write_frame},
    reader::{End, Found, Item, ReadError, Reader},
    recorder::write_header,
};
use crate::{
    event::{Room, native::Notification},
    request::correlate::{NotJoined, TransferSubject, subject},
};

/// Words that say nothing about an operator: what SGLang, the engines and the hook call things.
const PUBLIC: [&str; 33] = [
    "prefill",
    "decode",
    "null",
    "nixl",
    "mooncake",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "nixl-cu12",
    "nixl-cu13",
    "fake",
    "mori",
    "ascend",
    "queues",
    "handles",
    "none",
    "NixlKVSender",
    "MooncakeKVSender",
    "FakeKVSender",
    "MoriKVSender",
    "AscendKVSender",
    "CommonKVSender",
    "NixlKVReceiver",
    "MooncakeKVReceiver",
    "FakeKVReceiver",
    "MoriKVReceiver",
    "AscendKVReceiver",
    "CommonKVReceiver",
    "sglang",
    "python",
    "amd",
    "gpu",
    "other",
];

/// Names as hashes.
#[derive(Clone)]
pub struct Hashed(Hmac<Sha256>);

impl Hashed {
    /// Under a new key, which nobody knows.
    ///
    /// # Errors
    ///
    /// The kernel has no randomness.
    pub fn new() -> io::Result<Self> {
        let mut key = [0; 32];
        let mut filled = 0;
        while let Some(rest) = key.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())?;
        }
        Hmac::new_from_slice(&key).map(Self).map_err(io::Error::other)
    }

    fn hash(&self, kind: &[u8], name: &[u8]) -> u64 {
        let hash = self.0.clone().chain_update(kind).chain_update(name).finalize().into_bytes();
        hash.iter().take(8).fold(0, |hash, byte| hash << 8 | u64::from(*byte))
    }

    fn in_hexadecimal(&self, name: &[u8]) -> String {
        format!("{:016x}", self.hash(b"word", name))
    }
}

impl Names for Hashed {
    fn room(&self, number: u64) -> u64 {
        self.hash(b"room", &number.to_be_bytes())
    }

    fn word<'a>(&self, word: &'a str) -> Cow<'a, str> {
        if word.is_empty() { Cow::Borrowed(word) } else { self.in_hexadecimal(word.as_bytes()).into() }
    }

    fn public<'a>(&self, word: &'a str) -> Cow<'a, str> {
        let words: Vec<Cow<'_, str>> = word
            .split(' ')
            .map(|word| {
                if PUBLIC.contains(&word) {
                    word.into()
                } else {
                    release(word).map_or_else(|| self.word(word), Cow::from)
                }
            })
            .collect();
        words.join(" ").into()
    }

    /// Joins to the hash of what it joined to, by the same rules.
    fn notification<'a>(&self, notification: &'a Notification) -> Cow<'a, Notification> {
        let text = match subject(notification) {
            Ok(TransferSubject::Room(Room::Number(room))) => format!("{}_kv", self.room(room)),
            Ok(TransferSubject::Room(Room::OutOfRange)) => format!("{}0_kv", u64::MAX),
            Ok(TransferSubject::Request(request)) => format!("{}:1", self.word(&request)),
            Err(NotJoined::NoNotification | NotJoined::UnknownFormat | NotJoined::Cut | NotJoined::NotSeen) => {
                self.in_hexadecimal(&notification.bytes)
            }
        };
        Cow::Owned(Notification { bytes: text.into_bytes(), cut: notification.cut })
    }
}

/// The beginning of a version that everybody may know: digits and dots, and the suffixes of Python's releases.
fn release(word: &str) -> Option<String> {
    let end = word.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(word.len());
    let (number, rest) = word.split_at(end);
    let digits = |text: &str| !text.is_empty() && text.len() <= 4 && text.bytes().all(|byte| byte.is_ascii_digit());
    let known = ["post", "rc", "a", "b"].iter().find_map(|kind| {
        let after = rest.trim_start_matches('.').strip_prefix(kind)?;
        let end = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let number = after.get(..end).filter(|number| digits(number))?;
        Some(format!("{kind}{number}"))
    });
    let number = number.trim_end_matches('.');
    (number.len() <= 24 && number.split('.').all(digits)).then(|| match known {
        Some(suffix) => format!("{number}.{suffix}"),
        None => number.to_owned(),
    })
}

/// Writes `reader`'s recording to `out` without names, as far as it can be read; returns how it ends. Items that this
/// agent does not know are left out: there may be names in them.
///
/// # Errors
///
/// Reading or writing failed.
pub fn anonymize<R: Read>(mut reader: Reader<R>, out: &mut impl Write) -> Result<End, ReadError> {
    let mut names = Hashed::new()?;
    let mut header = reader.header().clone();
    header.anonymized = true;
    write_header(out, &header, &mut names)?;
    loop {
        let block = match reader.next_block()? {
            Found::Block(block) => block,
            Found::End(end) => {
                if end == End::Whole {
                    write_frame(out, FrameKind::End, &[])?;
                }
                return Ok(end);
            }
        };
        if block.soundness == super::reader::Soundness::Damaged {
            continue;
        }
        let mut payload = Vec::new();
        for item in block.items(true) {
            if let Item::Input(input) = item {
                input.encode(&mut Encoder::new(&mut payload), &mut names).map_err(io::Error::other)?;
            }
        }
        write_frame(out, FrameKind::Block, &payload)?;
    }
}
