//! The control channel to one hook: one bounded message in, one out, never waited for.

use std::{collections::HashMap, os::fd::AsFd as _, time::Duration};

use rustix::{
    io::Errno,
    net::{RecvFlags, SendFlags},
};
use serde::{Deserialize, Serialize};

use crate::{
    event::{FailureFlag, Phase, ProcessKey, Room, clock::Monotonic},
    target::hook::{MAX_MESSAGE, PROTOCOL, Taken},
};

/// Replies that are read at one look: a hostile server must not keep the agent busy.
const MAX_REPLIES: usize = 16;
/// Requests that may be outstanding; further ones are refused.
const MAX_OUTSTANDING: usize = 64;

/// What the hook is asked for.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "verb", rename_all = "snake_case")]
pub enum Verb {
    /// Whether it is there.
    Ping,
    /// Mark everything that lives.
    State,
    /// Set the failure flag of a sender.
    Fail {
        /// Its serial.
        serial: u64,
        /// The whole request id.
        rid: String,
        /// Its room.
        room: Room,
        /// What it polled last, as diagnosed: SGLang's number.
        phase: u8,
        /// Why: reaches the server's log.
        reason: String,
    },
}

impl Verb {
    /// Asks for the failure flag.
    pub fn fail(serial: u64, rid: &str, room: Room, phase: Phase, reason: &str) -> Self {
        Self::Fail { serial, rid: rid.to_owned(), room, phase: phase.number(), reason: reason.to_owned() }
    }
}

#[derive(Serialize)]
struct Request<'a> {
    protocol: u32,
    epoch: u64,
    id: u64,
    deadline: u64,
    #[serde(flatten)]
    verb: &'a Verb,
}

/// What the hook answers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Reply {
    protocol: u32,
    epoch: u64,
    /// The request that this answers.
    pub id: u64,
    ok: bool,
    refused: Option<String>,
    #[serde(default)]
    detail: Option<String>,
    flag: Option<FailureFlag>,
    entries: Option<u64>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// It was done.
    Done {
        /// For `fail`: the flag that was set.
        flag: Option<FailureFlag>,
        /// For `state`: the entries that follow as marks.
        entries: Option<u64>,
    },
    /// The hook refused.
    Refused {
        /// The contract's reason, bounded.
        reason: String,
        /// More of it, bounded.
        detail: Option<String>,
    },
    /// No answer came by the deadline. The hook refuses it from then on.
    Expired,
}

/// Why a message could not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The hook does not read: its scheduler makes no pass.
    #[error("the hook does not read its channel: the scheduler makes no pass")]
    Full,
    /// The server is gone.
    #[error("the hook's channel is closed")]
    Closed,
    /// The message is longer than the protocol allows.
    #[error("the message is longer than {MAX_MESSAGE} bytes")]
    TooLong,
    /// Too many requests wait for an answer.
    #[error("{MAX_OUTSTANDING} requests wait for an answer")]
    Busy,
}

/// Messages that could not be used, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Discarded {
    /// Not JSON of the protocol, or longer than it allows.
    pub malformed: u64,
    /// An answer to nothing that was asked: of an earlier agent, or late.
    pub unasked: u64,
}

/// The channel to one hook.
#[derive(Debug)]
pub struct Channel {
    key: ProcessKey,
    taken: Taken,
    epoch: u64,
    clock_offset: i64,
    next_id: u64,
    deadlines: HashMap<u64, Monotonic>,
    discarded: Discarded,
}

impl Channel {
    /// A channel that speaks for the agent of this epoch. `clock_offset` is the server's, in nanoseconds.
    pub fn new(key: ProcessKey, taken: Taken, epoch: u64, clock_offset: i64) -> Self {
        let (next_id, deadlines, discarded) = (1, HashMap::new(), Discarded::default());
        Self { key, taken, epoch, clock_offset, next_id, deadlines, discarded }
    }

    /// The server.
    pub fn key(&self) -> ProcessKey {
        self.key
    }

    /// The version that the hook names.
    pub fn hook_version(&self) -> &str {
        &self.taken.hook.hook
    }

    /// Messages that could not be used so far.
    pub fn discarded(&self) -> Discarded {
        self.discarded
    }

    /// Whether an answer is outstanding.
    pub fn is_waiting(&self) -> bool {
        !self.deadlines.is_empty()
    }

    /// Sends a request that the hook may carry out within `patience`; returns its id. Never blocks.
    pub fn send(&mut self, verb: &Verb, now: Monotonic, patience: Duration) -> Result<u64, SendError> {
        if self.deadlines.len() >= MAX_OUTSTANDING {
            return Err(SendError::Busy);
        }
        let (id, deadline) = (self.next_id, now.plus(patience));
        let message = Request {
            protocol: PROTOCOL,
            epoch: self.epoch,
            id,
            deadline: deadline.0.saturating_add_signed(self.clock_offset),
            verb,
        };
        let bytes = serde_json::to_vec(&message).map_err(|_| SendError::TooLong)?;
        if bytes.len() > MAX_MESSAGE {
            return Err(SendError::TooLong);
        }
        match rustix::net::send(self.taken.socket.as_fd(), &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) => {}
            Err(Errno::AGAIN) => return Err(SendError::Full),
            Err(_) => return Err(SendError::Closed),
        }
        self.next_id += 1;
        self.deadlines.insert(id, deadline);
        Ok(id)
    }

    /// The answers that have come, and the requests that will not be answered any more.
    pub fn receive(&mut self, now: Monotonic) -> Vec<(u64, Answer)> {
        let mut answers = Vec::new();
        let mut buffer = [0; MAX_MESSAGE + 1];
        for _ in 0..MAX_REPLIES {
            let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
            let Ok((_, length)) = rustix::net::recv(self.taken.socket.as_fd(), &mut buffer, flags) else { break };
            if length == 0 {
                break;
            }
            match buffer
                .get(..length)
                .filter(|_| length <= MAX_MESSAGE)
                .and_then(|bytes| Reply::read(bytes, self.epoch))
            {
                Some(reply) if self.deadlines.remove(&reply.id).is_some() => answers.push((reply.id, reply.answer())),
                Some(_) => self.discarded.unasked += 1,
                None => self.discarded.malformed += 1,
            }
        }
        let expired: Vec<u64> =
            self.deadlines.iter().filter(|(_, deadline)| now > **deadline).map(|(id, _)| *id).collect();
        for id in expired {
            self.deadlines.remove(&id);
            answers.push((id, Answer::Expired));
        }
        answers
    }
}

impl Reply {
    /// A message of a hook; nothing when it is none of this protocol, or no answer to the agent of this epoch.
    pub fn read(bytes: &[u8], epoch: u64) -> Option<Self> {
        let reply: Self = serde_json::from_slice(bytes).ok()?;
        (reply.protocol == PROTOCOL && reply.epoch == epoch).then_some(reply)
    }

    /// What it says, bounded.
    pub fn answer(self) -> Answer {
        if self.ok {
            return Answer::Done { flag: self.flag, entries: self.entries };
        }
        let bounded = |text: String| text.chars().filter(|c| !c.is_control()).take(200).collect();
        Answer::Refused {
            reason: self.refused.map_or_else(|| "unnamed".to_owned(), bounded),
            detail: self.detail.map(bounded),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_looks_as_the_contract_says() {
        let verb = Verb::fail(7, "rid", Room::Number(u64::MAX), Phase::WaitingForInput, "why");
        let request = Request { protocol: 1, epoch: 2, id: 3, deadline: 4, verb: &verb };
        let json = serde_json::to_string(&request).unwrap();
        assert_eq!(
            json,
            r#"{"protocol":1,"epoch":2,"id":3,"deadline":4,"verb":"fail","serial":7,"rid":"rid","room":"18446744073709551615","phase":2,"reason":"why"}"#
        );
    }

    #[test]
    fn answers_are_bounded_and_free_of_control_characters() {
        let text = format!(r#"{{"protocol":1,"epoch":1,"id":1,"ok":false,"refused":"\u001b[2J{}"}}"#, "x".repeat(999));
        let reply: Reply = serde_json::from_str(&text).unwrap();
        let Answer::Refused { reason, .. } = reply.answer() else { panic!() };
        assert_eq!(reason.len(), 200);
        assert!(reason.starts_with("[2Jx"));
    }
}
