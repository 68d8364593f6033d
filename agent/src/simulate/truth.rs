//! What is true of each simulated request, beside what can be seen of it.

use serde::Serialize;

use super::family::Family;
use crate::{
    event::{Backend, clock::Monotonic},
    request::RequestKey,
};

/// What is true of one sender's request.
#[derive(Clone, Debug, Serialize)]
pub struct Truth {
    /// Which.
    pub request: RequestKey,
    /// Its room.
    pub room: u64,
    /// SGLang's id of the request.
    pub rid: String,
    /// Its sender's backend.
    pub backend: Backend,
    /// The family that it was made for.
    pub family: Family,
    /// Whether another sender had its room at some time in its life.
    pub is_shared: bool,
    /// What became of it.
    pub fate: Fate,
    /// When its sender was created.
    pub created: Monotonic,
    /// When it entered the inflight queue.
    pub entered: Option<Monotonic>,
    /// When it was aborted first.
    pub aborted: Option<Monotonic>,
    /// When it was over, or its process was.
    pub ended: Option<Monotonic>,
    /// What may be said of it, and when: not only what it is stuck for, but what holds for a moment too, such as that no
    /// decode has registered yet.
    pub holds: Vec<Holds>,
    /// Its own poll has said that it is over: nothing more is true of it than that it gave its pages away,
    /// or that nobody lets it go.
    #[serde(skip)]
    pub(super) is_concluded: bool,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "fate", rename_all = "snake_case")]
pub enum Fate {
    /// Nothing is wrong with it.
    Healthy,
    /// It moves, slowly.
    Slow,
    /// It waits for others that move, slowly.
    Backpressured,
    /// It is done on this rank, and waits for its group.
    HeldByOtherRank,
    /// It will not go on by itself.
    Stuck(Stuck),
}

/// Why a request is stuck.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stuck {
    /// The cause, as it is or will be named.
    pub cause: &'static str,
    /// Since when.
    pub since: Monotonic,
    /// From when on what can be seen shows it.
    pub shows: Monotonic,
    /// Whether the agent saw what shows it.
    pub seen: bool,
}

/// A cause that may be said of a request from one time to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holds {
    /// The cause.
    pub cause: &'static str,
    /// From when on.
    pub from: Monotonic,
    /// Until when; to the end where there is nothing.
    pub until: Option<Monotonic>,
}

/// What shows a cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    /// The server's method calls, which the hook can tell again.
    Calls,
    /// What happened at its moment only: transfers, what workers took.
    Once,
}

/// Shows never, so far.
pub(super) const NEVER: Monotonic = Monotonic(u64::MAX);

/// What shows a cause, and how far it goes before others: the diagnosis names the first that holds.
pub(super) fn standing(cause: &str) -> (u8, Shown) {
    match cause {
        "UnsafeRelease" | "RankDivergence" | "LoopStalled" => (0, Shown::Once),
        "RoomCollision" => (1, Shown::Calls),
        "UpdateDropped" => (2, Shown::Calls),
        "AbortIgnored" => (3, Shown::Calls),
        "NeverBootstrapped" => (4, Shown::Calls),
        "Parked" => (5, Shown::Calls),
        _ => (6, Shown::Once),
    }
}

impl Truth {
    /// From `at` on this may be said.
    pub(super) fn holds(&mut self, cause: &'static str, at: Monotonic) {
        if !self.is_true(cause, at) && (!self.is_concluded || standing(cause).0 == 0) {
            self.holds.push(Holds { cause, from: at, until: None });
        }
    }

    /// From `at` on it may not be said any more, and is not what the request is stuck for.
    pub(super) fn is_over(&mut self, cause: &'static str, at: Monotonic) {
        for holds in self.holds.iter_mut().filter(|holds| holds.cause == cause) {
            holds.until.get_or_insert(at);
        }
        if matches!(&self.fate, Fate::Stuck(stuck) if stuck.cause == cause) {
            self.fate = Fate::Healthy;
        }
    }

    /// Its own poll says that it is over, or it has ended. What it did to others stays true, and that nobody lets it go until
    /// somebody does.
    pub(super) fn ends(&mut self, at: Monotonic) {
        self.is_concluded = true;
        let lives = self.ended.is_none();
        let stays = |cause: &str| cause == "UnsafeRelease" || (lives && standing(cause).0 == 0);
        for holds in self.holds.iter_mut().filter(|holds| !stays(holds.cause)) {
            holds.until.get_or_insert(at);
        }
        if !matches!(&self.fate, Fate::Stuck(stuck) if stays(stuck.cause)) {
            self.fate = Fate::Healthy;
        }
    }

    /// It is stuck; what goes before that stays.
    pub(super) fn stuck(&mut self, cause: &'static str, since: Monotonic, shows: Monotonic) {
        if self.is_concluded && standing(cause).0 != 0 {
            return;
        }
        self.holds(cause, since);
        match &mut self.fate {
            Fate::Stuck(stuck) if stuck.cause == cause => stuck.shows = shows,
            Fate::Stuck(stuck) if standing(stuck.cause).0 <= standing(cause).0 => {}
            fate => *fate = Fate::Stuck(Stuck { cause, since, shows, seen: true }),
        }
    }

    /// Whether a cause may be said of it at that time.
    pub fn is_true(&self, cause: &str, at: Monotonic) -> bool {
        self.holds.iter().any(|it| it.cause == cause && it.from <= at && it.until.is_none_or(|until| at <= until))
    }

    /// What it is stuck for, if it is.
    pub fn why_stuck(&self) -> Option<&Stuck> {
        match &self.fate {
            Fate::Stuck(stuck) => Some(stuck),
            _ => None,
        }
    }
}
