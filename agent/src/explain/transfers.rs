//! What an input did to the transfers of a room: read off what the core knows before and after, so that each way in which
//! an engine says something is told alike.

use std::borrow::Cow;

use super::lines::{Origin, Weight};
use crate::{
    core::Input,
    diagnose::Fact,
    event::{Body, clock::Monotonic, native::NativeEvent},
    request::transfer::{Looked, SubjectTransfers},
};

/// What was known of a room's transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Known {
    posted: u64,
    done: u64,
    failed: u64,
    unproved: u64,
    moved: Option<Monotonic>,
    looked: Option<Looked>,
}

/// How it came to be known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// A call into the engine.
    Call,
    /// A flush behind it.
    Flush,
    /// Its memory was read.
    Memory,
}

impl Way {
    pub(super) fn of(input: &Input) -> Self {
        match input {
            Input::Observed { .. } => Self::Memory,
            Input::Event(event) => match &event.body {
                Body::Native(native) if matches!(**native, NativeEvent::Flushed { .. }) => Self::Flush,
                _ => Self::Call,
            },
            _ => Self::Call,
        }
    }

    fn in_words(self) -> &'static str {
        match self {
            Self::Call => "",
            Self::Flush => ", by the flush behind it",
            Self::Memory => ", read in the server's memory",
        }
    }
}

type Told = (Origin, Weight, Cow<'static, str>);

impl Known {
    /// Takes in what is known now, and says what is new.
    pub(super) fn becomes(&mut self, known: Option<&SubjectTransfers>, way: Way) -> Vec<Told> {
        let now = known.map_or_else(Self::default, Self::of);
        let before = std::mem::replace(self, now);
        // What is over is forgotten with the room's last sender.
        let (Some(known), true) = (known, before != now) else { return Vec::new() };
        let mut told = Vec::new();
        let mut tell = |weight, text: Cow<'static, str>| told.push((Origin::Transfers, weight, text));
        let by = way.in_words();
        if now.posted > before.posted {
            tell(Weight::Routine, "a transfer of the room was posted".into());
        }
        if now.done > before.done {
            let late = if now.unproved < before.unproved { " after all" } else { "" };
            tell(Weight::Routine, format!("a transfer of the room is done{late}{by}").into());
        }
        if let (true, Some((_, engine, code))) = (now.failed > before.failed, known.failure) {
            tell(
                Weight::Step,
                format!("a transfer of the room failed{by}: {}", Fact::TransferFailed { engine, code }).into(),
            );
        }
        if now.unproved > before.unproved {
            tell(
                Weight::Step,
                "a transfer of the room was given up before its end was seen: the device may still write".into(),
            );
        }
        if now.moved > before.moved {
            tell(Weight::Routine, "bytes of a transfer were seen to have moved".into());
        }
        if let Some(Looked { polls, .. }) = now.looked.filter(|looked| before.looked != Some(*looked)) {
            let fact = if polls == 0 { Fact::NobodyAsksForStatus } else { Fact::StatusAskedFor { polls } };
            tell(Weight::Step, fact.to_string().into());
        }
        told
    }

    fn of(known: &SubjectTransfers) -> Self {
        let SubjectTransfers { posted, done, failed, unproved, last_progress, looked, .. } = *known;
        Self { posted, done, failed, unproved, moved: last_progress, looked }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::native::Engine;

    fn texts(told: &[Told]) -> Vec<&str> {
        told.iter().map(|(_, _, text)| &**text).collect()
    }

    #[test]
    fn what_changed_is_told_and_what_did_not_is_not() {
        let mut known = Known::default();
        let mut now = SubjectTransfers::default();
        now.posted += 1;
        assert_eq!(texts(&known.becomes(Some(&now), Way::Call)), ["a transfer of the room was posted"]);
        assert!(known.becomes(Some(&now), Way::Call).is_empty());
        now.unproved = 1;
        assert_eq!(known.becomes(Some(&now), Way::Call).len(), 1);
        (now.unproved, now.done) = (0, 1);
        let told = known.becomes(Some(&now), Way::Flush);
        assert_eq!(texts(&told), ["a transfer of the room is done after all, by the flush behind it"]);
        (now.failed, now.failure) = (1, Some((Monotonic(1), Engine::Nixl, -3)));
        let told = known.becomes(Some(&now), Way::Memory);
        assert_eq!(
            texts(&told),
            ["a transfer of the room failed, read in the server's memory: nixl said BACKEND (-3)"]
        );
        assert!(known.becomes(None, Way::Call).is_empty(), "forgotten is not undone");
    }
}
