//! Actions under way: sent to the hook, answered, and read back from what the server itself then does.
//!
//! An action is *effective* when the sender polls Failed and the request leaves the inflight queue, both seen as
//! marks of the server's own calls after the command was sent. The hook's own reply proves nothing.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    time::Duration,
};

use serde::Serialize;

use super::control::Answer;
use crate::{
    event::{FailureFlag, LeaveReason, Phase, clock::Monotonic},
    request::{
        RequestKey,
        tracker::{Change, Step},
    },
};

/// How long the hook has to carry out a command: then it refuses it.
pub const COMMAND_PATIENCE: Duration = Duration::from_secs(2);
/// How long the server has to poll the flag and drop the request.
pub const READ_BACK_PATIENCE: Duration = Duration::from_secs(5);
/// Requests acted on that are remembered, so that none is acted on twice. Serials are never reused, so a forgotten one
/// can only be one that has long ended.
const MAX_REMEMBERED: usize = 100_000;
/// Over which the rate of actions is limited.
const RATE_WINDOW: Duration = Duration::from_secs(60);

/// How an action ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Outcome {
    /// The sender polled Failed and the request left the queue.
    Effective {
        /// The flag that was set, when the hook said so.
        flag: Option<FailureFlag>,
    },
    /// The flag was set and nothing followed in time.
    NoEffect,
    /// The request ended some other way while the command was under way.
    Overtaken,
    /// The hook refused, with the contract's reason.
    Refused {
        /// Why.
        reason: String,
    },
    /// The hook did not answer in time: it will refuse the command if it ever reads it.
    Unanswered,
    /// The command could not be sent.
    NotSent {
        /// Why.
        reason: String,
    },
}

impl Outcome {
    /// Label value of metrics, and its name in output.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Effective { .. } => "effective",
            Self::NoEffect => "no_effect",
            Self::Overtaken => "overtaken",
            Self::Refused { .. } => "refused",
            Self::Unanswered => "unanswered",
            Self::NotSent { .. } => "not_sent",
        }
    }
}

/// An action that is under way.
#[derive(Clone, Debug)]
struct Action {
    command: u64,
    sent: Monotonic,
    flagged: Option<(Option<FailureFlag>, Monotonic)>,
    polled_failed: bool,
    left_failed: bool,
}

/// The actions under way and those of the past that must not be repeated.
#[derive(Debug)]
pub struct Ladder {
    under_way: HashMap<RequestKey, Action>,
    acted: HashSet<RequestKey>,
    order: VecDeque<RequestKey>,
    recent: VecDeque<Monotonic>,
    max_per_minute: u32,
}

impl Ladder {
    /// Allows `max_per_minute` actions in any minute.
    pub fn new(max_per_minute: u32) -> Self {
        Self {
            under_way: HashMap::new(),
            acted: HashSet::new(),
            order: VecDeque::new(),
            recent: VecDeque::new(),
            max_per_minute,
        }
    }

    /// Actions that are still allowed at this moment.
    pub fn actions_left(&mut self, now: Monotonic) -> u32 {
        while self.recent.front().is_some_and(|at| now.since(*at) >= RATE_WINDOW) {
            self.recent.pop_front();
        }
        self.max_per_minute.saturating_sub(u32::try_from(self.recent.len()).unwrap_or(u32::MAX))
    }

    /// Whether a request was acted on before.
    pub fn acted_before(&self, key: RequestKey) -> bool {
        self.acted.contains(&key)
    }

    /// A command was sent for a request.
    pub fn sent(&mut self, key: RequestKey, command: u64, now: Monotonic) {
        self.remember(key, now);
        let action = Action { command, sent: now, flagged: None, polled_failed: false, left_failed: false };
        self.under_way.insert(key, action);
    }

    /// A command could not be sent. It counts as an action: something is wrong with that server.
    pub fn not_sent(&mut self, key: RequestKey, now: Monotonic) {
        self.remember(key, now);
    }

    fn remember(&mut self, key: RequestKey, now: Monotonic) {
        self.recent.push_back(now);
        if self.acted.insert(key) {
            self.order.push_back(key);
        }
        if self.order.len() > MAX_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.acted.remove(&oldest);
        }
    }

    /// The hook of `process` answered a command.
    pub fn answered(
        &mut self,
        process: crate::event::ProcessKey,
        command: u64,
        answer: &Answer,
        now: Monotonic,
    ) -> Option<(RequestKey, Outcome)> {
        let key = *self
            .under_way
            .iter()
            .find(|(key, action)| key.process == process && action.command == command)
            .map(|(key, _)| key)?;
        match answer {
            Answer::Done { flag, .. } => {
                let action = self.under_way.get_mut(&key)?;
                action.flagged = Some((*flag, now));
                self.conclude(key)
            }
            Answer::Refused { reason, .. } => self.end(key, Outcome::Refused { reason: reason.clone() }),
            // The flag may have been set and the reply lost: what the server does next tells.
            Answer::Expired => None,
        }
    }

    /// The server did something with a request.
    pub fn observe(&mut self, change: &Change) -> Option<(RequestKey, Outcome)> {
        let action = self.under_way.get_mut(&change.key)?;
        match &change.step {
            Step::Remedied(flag) => {
                action.flagged.get_or_insert((*flag, change.at));
                None
            }
            Step::Phase { new: Phase::Failed, .. } => {
                action.polled_failed = true;
                None
            }
            Step::Left(LeaveReason::Failed) => {
                action.left_failed = true;
                self.conclude(change.key)
            }
            Step::Left(_) | Step::Ended => self.end(change.key, Outcome::Overtaken),
            _ => None,
        }
    }

    fn conclude(&mut self, key: RequestKey) -> Option<(RequestKey, Outcome)> {
        let action = self.under_way.get(&key)?;
        if !action.left_failed {
            return None;
        }
        match action.flagged {
            Some((flag, _)) if action.polled_failed => self.end(key, Outcome::Effective { flag }),
            // It failed by itself before the flag was set.
            _ => self.end(key, Outcome::Overtaken),
        }
    }

    /// The actions whose time is up.
    pub fn expire(&mut self, now: Monotonic) -> Vec<(RequestKey, Outcome)> {
        let up: Vec<_> = self
            .under_way
            .iter()
            .filter_map(|(key, action)| match action.flagged {
                Some((_, at)) if now.since(at) > READ_BACK_PATIENCE => Some((*key, Outcome::NoEffect)),
                None if now.since(action.sent) > COMMAND_PATIENCE + READ_BACK_PATIENCE => {
                    Some((*key, Outcome::Unanswered))
                }
                _ => None,
            })
            .collect();
        for (key, _) in &up {
            self.under_way.remove(key);
        }
        up
    }

    fn end(&mut self, key: RequestKey, outcome: Outcome) -> Option<(RequestKey, Outcome)> {
        self.under_way.remove(&key).map(|_| (key, outcome))
    }
}

#[cfg(test)]
#[path = "ladder_tests.rs"]
mod tests;
