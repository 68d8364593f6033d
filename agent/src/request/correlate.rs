//! Which room or request a notification is about, by the formats of the engines that send them. Bytes, not strings:
//! anything may be in them.

use minicbor::{Decode, Decoder, Encode, Encoder, decode, encode};
use serde::Serialize;

use crate::{
    event::{Room, native::Notification},
    record::codec::{Names, recorded},
};

/// Longest request id that is kept.
const MAX_REQUEST_ID: usize = 128;

/// What a transfer is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferSubject {
    /// SGLang: a room.
    Room(Room),
    /// vLLM: the request id of the side that holds the blocks.
    Request(String),
}

/// A request is a word, a room is what a room is.
impl<C: Names> Encode<C> for TransferSubject {
    fn encode<W: encode::Write>(&self, e: &mut Encoder<W>, names: &mut C) -> Result<(), encode::Error<W::Error>> {
        match self {
            Self::Room(room) => room.encode(e, names),
            Self::Request(request) => e.str(&names.word(request))?.ok(),
        }
    }
}

impl<'b, C> Decode<'b, C> for TransferSubject {
    fn decode(d: &mut Decoder<'b>, context: &mut C) -> Result<Self, decode::Error> {
        match d.datatype()? {
            minicbor::data::Type::String => Ok(Self::Request(d.str()?.to_owned())),
            _ => Room::decode(d, context).map(Self::Room),
        }
    }
}

/// How it is known what a transfer is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Joined {
    /// Its notification says so.
    ByNotification(TransferSubject),
    /// Its thread was working on a chunk of that room, by the hook's marks.
    ByThread(Room),
    /// It is not known.
    Not(NotJoined),
}

/// Why a transfer cannot be joined to a room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum NotJoined {
    /// It has no notification, and its thread was not working on a chunk that the hook knows of.
    NoNotification,
    /// Its notification has no format that is known.
    UnknownFormat,
    /// Its notification was cut before it said.
    Cut,
    /// It was made before the agent looked.
    NotSeen,
}

recorded!(enum Joined { 0 ByNotification(subject), 1 ByThread(room), 2 Not(why) });
recorded!(number NotJoined { 0 NoNotification, 1 UnknownFormat, 2 Cut, 3 NotSeen });

impl NotJoined {
    /// Every reason.
    pub const ALL: [Self; 4] = [Self::NoNotification, Self::UnknownFormat, Self::Cut, Self::NotSeen];

    /// Label value of metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoNotification => "no_notification",
            Self::UnknownFormat => "unknown_format",
            Self::Cut => "cut",
            Self::NotSeen => "not_seen",
        }
    }
}

impl Joined {
    /// What it is about, if that is known.
    pub fn subject(&self) -> Option<TransferSubject> {
        match self {
            Self::ByNotification(subject) => Some(subject.clone()),
            Self::ByThread(room) => Some(TransferSubject::Room(*room)),
            Self::Not(_) => None,
        }
    }
}

/// What a transfer is about: what its notification says, else what its thread works on.
pub fn join(notification: Option<&Notification>, working_on: Option<Room>) -> Joined {
    let why = match notification.map(subject) {
        Some(Ok(subject)) => return Joined::ByNotification(subject),
        Some(Err(why)) => why,
        None => NotJoined::NoNotification,
    };
    working_on.map_or(Joined::Not(why), Joined::ByThread)
}

/// What a notification is about.
pub fn subject(notification: &Notification) -> Result<TransferSubject, NotJoined> {
    let Notification { bytes, cut } = notification;
    if let Some(room) = sglang(bytes) {
        return Ok(TransferSubject::Room(room));
    }
    if *cut {
        // What was cut off may be the very field that matters: vLLM's count of consumers comes last.
        return Err(NotJoined::Cut);
    }
    vllm(bytes).map(TransferSubject::Request).ok_or(NotJoined::UnknownFormat)
}

/// SGLang's prefill, 0.4.9 to 0.5.22 (`disaggregation/nixl/conn.py`): `{room}_kv_{chunk}_{last}[_{rank}][_part_{i}_{n}]`,
/// `{room}_state_{rank}[_{i}]`, `{room}_stg_…`, `{room}_aux[_nokv_…]`. From 0.5.23 on it sends none.
fn sglang(bytes: &[u8]) -> Option<Room> {
    let underscore = bytes.iter().position(|byte| *byte == b'_')?;
    let (number, rest) = bytes.split_at(underscore);
    let kind = rest.get(1..)?.split(|byte| *byte == b'_').next()?;
    if !matches!(kind, b"kv" | b"state" | b"stg" | b"aux") {
        return None;
    }
    if number.is_empty() || !number.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let number = std::str::from_utf8(number).ok()?;
    Some(number.parse().map_or(Room::OutOfRange, Room::Number))
}

/// vLLM's NIXL connector (`distributed/kv_transfer/kv_connector/v1/nixl_connector.py`): `{request}:{consumers}` when blocks
/// were read. Heartbeats (`HB:…`) and registrations (`PUSH_REG:…`) are about no single transfer.
fn vllm(bytes: &[u8]) -> Option<String> {
    if bytes.starts_with(b"HB:") || bytes.starts_with(b"PUSH_REG:") {
        return None;
    }
    let colon = bytes.iter().rposition(|byte| *byte == b':')?;
    let (request, consumers) = (bytes.get(..colon)?, bytes.get(colon + 1..)?);
    let counts = !consumers.is_empty() && consumers.len() <= 6 && consumers.iter().all(u8::is_ascii_digit);
    if !counts || request.is_empty() || request.len() > MAX_REQUEST_ID {
        return None;
    }
    let request = std::str::from_utf8(request).ok()?;
    request.chars().all(|c| c.is_ascii_graphic()).then(|| request.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn whole(bytes: &[u8]) -> Notification {
        Notification { bytes: bytes.to_vec(), cut: false }
    }

    #[test]
    fn every_notification_of_sglang_names_its_room() {
        for text in [
            "77_kv_0_1",
            "77_kv_0_1_0",
            "77_kv_3_0_2_part_1_4",
            "77_state_0",
            "77_state_0_1",
            "77_stg_0_1_2_3_4",
            "77_aux",
            "77_aux_nokv_0",
            "77_aux_nokv_0_3",
        ] {
            assert_eq!(subject(&whole(text.as_bytes())), Ok(TransferSubject::Room(Room::Number(77))), "{text}");
        }
        let beyond = format!("{}0_kv_0_1_0", u64::MAX);
        assert_eq!(subject(&whole(beyond.as_bytes())), Ok(TransferSubject::Room(Room::OutOfRange)));
    }

    #[test]
    fn vllms_notification_names_the_request_and_its_heartbeat_nobody() {
        let request = "cmpl-9f:a-0";
        assert_eq!(subject(&whole(format!("{request}:2").as_bytes())), Ok(TransferSubject::Request(request.into())));
        for text in ["HB:a,b:1", "PUSH_REG:\u{1}x:1", "a:", ":1", "a:b", "a:1234567"] {
            assert_eq!(subject(&whole(text.as_bytes())), Err(NotJoined::UnknownFormat), "{text}");
        }
    }

    #[test]
    fn a_cut_notification_of_sglang_still_names_its_room_and_one_of_vllm_does_not() {
        let cut = |bytes: &[u8]| Notification { bytes: bytes.to_vec(), cut: true };
        assert_eq!(subject(&cut(b"77_kv_0_")), Ok(TransferSubject::Room(Room::Number(77))));
        assert_eq!(subject(&cut(b"77")), Err(NotJoined::Cut));
        assert_eq!(subject(&cut(b"77_k")), Err(NotJoined::Cut));
        assert_eq!(subject(&cut(b"request:1")), Err(NotJoined::Cut));
    }

    #[test]
    fn a_notification_is_believed_before_a_thread_and_a_thread_before_nothing() {
        let (notified, unknown) = (whole(b"77_aux"), whole(b"\xff\x00"));
        let working = Some(Room::Number(5));
        assert_eq!(join(Some(&notified), working), Joined::ByNotification(TransferSubject::Room(Room::Number(77))));
        assert_eq!(join(Some(&unknown), working), Joined::ByThread(Room::Number(5)));
        assert_eq!(join(None, working), Joined::ByThread(Room::Number(5)));
        assert_eq!(join(None, None), Joined::Not(NotJoined::NoNotification));
        assert_eq!(join(Some(&unknown), None), Joined::Not(NotJoined::UnknownFormat));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>, cut: bool) {
            let _ = subject(&Notification { bytes, cut });
        }

        #[test]
        fn only_digits_before_the_underscore_are_a_room(prefix in "[0-9a-z ]{0,8}") {
            let text = format!("{prefix}_kv_0_1");
            let is_room = !prefix.is_empty() && prefix.bytes().all(|byte| byte.is_ascii_digit());
            prop_assert_eq!(matches!(subject(&whole(text.as_bytes())), Ok(TransferSubject::Room(_))), is_room);
        }
    }
}
