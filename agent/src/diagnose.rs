//! Why a request is where it is. A pure function over what is known; `now` is an argument.

mod cause;
mod codes;
mod decode;
mod evidence;
mod gauge;
mod other_end;
mod quiescence;
mod ranks;
mod stalled;
mod warmup;

use serde::Serialize;

pub use cause::{Cause, cause, cause_of_room};
pub use evidence::{Evidence, Fact, Source};
pub use gauge::{GaugeFact, gauge_evidence, gauge_fact};
pub use quiescence::{NotKnown, Quiescence};

use crate::{
    event::clock::Monotonic,
    request::{Sync, tracker::Tracked},
};

/// How far a diagnosis can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// No event of the hook is missing. (Whether transfers are seen too, the server's `watch` says.)
    High,
    /// Events of the hook are missing, or the picture is not complete yet.
    Low,
}

impl Confidence {
    /// Its name in rules and labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Low => "low",
        }
    }
}

/// What is wrong with a request, as far as one can tell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// Why it is stuck, if it is.
    pub cause: Cause,
    /// What speaks for it.
    pub evidence: Vec<Evidence>,
    /// Whether a write may still be under way.
    pub quiescence: Quiescence,
    /// How far this can be trusted.
    pub confidence: Confidence,
}

/// What a diagnosis says, without what speaks for it. Rules ask for no more, and it allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conclusion {
    /// Why the request is stuck, if it is.
    pub cause: Cause,
    /// Whether a write may still be under way.
    pub quiescence: Quiescence,
    /// How far this can be trusted.
    pub confidence: Confidence,
}

impl Diagnosis {
    /// What it says.
    pub fn conclusion(&self) -> Conclusion {
        Conclusion { cause: self.cause, quiescence: self.quiescence, confidence: self.confidence }
    }
}

/// Says why a request waits, what speaks for it, whether a write may be under way, and how sure that is.
pub fn diagnose(tracked: &Tracked<'_>, now: Monotonic) -> Diagnosis {
    let Conclusion { cause, quiescence, confidence } = conclude(tracked, now);
    Diagnosis { cause, evidence: evidence::evidence(tracked, cause, now), quiescence, confidence }
}

/// What [`diagnose`] says, without the evidence.
pub fn conclude(tracked: &Tracked<'_>, now: Monotonic) -> Conclusion {
    let cause = cause::cause(tracked, now);
    let synchronised = tracked.server.sync == Sync::Complete;
    let released = tracked.request.ended.as_ref().and_then(|ended| ended.unsafe_release.as_deref().copied());
    // Whose the transfers of a room are that another sender had too cannot be told.
    let are_its_own = tracked.request.shared_with.is_none();
    let by_transfers = cause.rests_on_transfers() && other_end::cause(tracked, now) != Some(cause);
    let seen = synchronised && (!by_transfers || are_its_own && quiescence::is_watched(tracked));
    Conclusion {
        cause,
        quiescence: quiescence::quiescence(tracked),
        confidence: if released.map_or(seen, |released| released.certain) { Confidence::High } else { Confidence::Low },
    }
}

#[cfg(test)]
mod cause_world;
#[cfg(test)]
mod decode_tests;
#[cfg(test)]
mod rank_tests;
#[cfg(test)]
mod release_tests;
#[cfg(test)]
mod server_tests;
#[cfg(test)]
#[path = "diagnose/tests.rs"]
mod tests;
