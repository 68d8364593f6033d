//! What happened, line by line: what repeats is one line with a count, and there are never more lines than a person reads.

use std::{borrow::Cow, collections::VecDeque};

use crate::event::clock::Monotonic;

/// Lines of the beginning that are kept.
const FIRST: usize = 40;
/// Lines of the end that are kept.
const LAST: usize = 80;
/// How many lines back something that goes on and on is looked for.
const LOOK_BACK: usize = 12;

/// Where something was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// Marks of the hook.
    Calls,
    /// Calls into the transfer engine.
    Transfers,
    /// Completions and endpoints.
    Completions,
    /// Counters of devices.
    Devices,
    /// Another rank of the server.
    Ranks,
    /// The other end of the room, or another server that has it.
    Peer,
    /// The agent itself: what it did, what it missed.
    Agent,
    /// What the diagnosis says.
    Diagnosis,
    /// What the rules say.
    Rules,
}

impl Origin {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Transfers => "transfers",
            Self::Completions => "completions",
            Self::Devices => "devices",
            Self::Ranks => "ranks",
            Self::Peer => "peer",
            Self::Agent => "agent",
            Self::Diagnosis => "diagnosis",
            Self::Rules => "rules",
        }
    }
}

/// How a line repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weight {
    /// A step: what goes on again after it is another line.
    Step,
    /// Goes on and on, such as chunks and transfers: one line between two steps.
    Routine,
    /// Of a kind that is not known here: one line of it in all.
    Unknown,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Happened {
    pub(super) at: Monotonic,
    pub(super) until: Monotonic,
    pub(super) count: u64,
    pub(super) origin: Origin,
    pub(super) weight: Weight,
    pub(super) text: Cow<'static, str>,
}

/// The lines so far.
#[derive(Debug, Default)]
pub(super) struct Lines {
    lines: VecDeque<Happened>,
    left_out: u64,
}

impl Lines {
    /// Takes in something that happened; in the order of time, about.
    pub(super) fn push(&mut self, at: Monotonic, origin: Origin, weight: Weight, text: impl Into<Cow<'static, str>>) {
        let text = text.into();
        if let Some(before) = self.before(origin, weight, &text) {
            before.count += 1;
            before.until = before.until.max(at);
            return;
        }
        self.lines.push_back(Happened { at, until: at, count: 1, origin, weight, text });
        if self.lines.len() > FIRST + LAST
            && let Some(dropped) = self.lines.remove(FIRST)
        {
            self.left_out = self.left_out.saturating_add(dropped.count);
        }
    }

    /// The line that says the same, if what is said again belongs there.
    fn before(&mut self, origin: Origin, weight: Weight, text: &str) -> Option<&mut Happened> {
        let how_far = match weight {
            Weight::Step => 1,
            Weight::Routine => LOOK_BACK,
            Weight::Unknown => FIRST + LAST,
        };
        let mut is_over = false;
        let place = self.lines.iter().rev().take(how_far).take_while(|line| {
            let goes_on = !is_over;
            is_over = weight == Weight::Routine && line.weight == Weight::Step;
            goes_on
        });
        let is_same = |line: &Happened| match weight {
            // What was in the first one stands for all of a kind.
            Weight::Unknown => line.weight == weight && kind(&line.text) == kind(text),
            Weight::Step | Weight::Routine => line.text == text,
        };
        let back = place.enumerate().find(|(_, line)| line.origin == origin && is_same(line))?.0;
        let index = self.lines.len().checked_sub(back + 1)?;
        self.lines.get_mut(index)
    }

    /// Every line that was kept, in the order of time.
    pub(super) fn sorted(&self) -> Vec<Happened> {
        let mut lines: Vec<Happened> = self.lines.iter().cloned().collect();
        lines.sort_by_key(|line| line.at);
        lines
    }

    /// How often something happened that is in no line any more.
    pub(super) fn left_out(&self) -> u64 {
        self.left_out
    }
}

fn kind(text: &str) -> &str {
    text.split(' ').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(things: &[(Weight, &'static str)]) -> Vec<(String, u64)> {
        let mut lines = Lines::default();
        for (at, (weight, text)) in things.iter().enumerate() {
            lines.push(Monotonic(at as u64), Origin::Calls, *weight, *text);
        }
        lines.sorted().into_iter().map(|line| (line.text.into_owned(), line.count)).collect()
    }

    #[test]
    fn what_goes_on_and_on_is_one_line_until_there_is_a_step() {
        let (step, routine) = (Weight::Step, Weight::Routine);
        let told = lines(&[
            (step, "enters"),
            (routine, "send"),
            (routine, "posted"),
            (routine, "send"),
            (routine, "posted"),
            (step, "abort"),
            (step, "abort"),
            (routine, "send"),
        ]);
        let expected = [("enters", 1), ("send", 2), ("posted", 2), ("abort", 2), ("send", 1)];
        assert_eq!(told, expected.map(|(text, count)| (text.to_owned(), count)));
    }

    #[test]
    fn of_very_many_lines_the_first_and_the_last_stay_and_the_others_are_counted() {
        let mut lines = Lines::default();
        for at in 0..10_000_u64 {
            lines.push(Monotonic(at), Origin::Calls, Weight::Step, format!("step {at}"));
        }
        let kept = lines.sorted();
        assert_eq!((kept.len() as u64 + lines.left_out(), kept.len()), (10_000, FIRST + LAST));
        assert_eq!((&*kept[0].text, &*kept[FIRST + LAST - 1].text), ("step 0", "step 9999"));
    }

    #[test]
    fn what_is_not_known_here_is_one_line_however_much_lies_between() {
        let mut things = vec![(Weight::Unknown, "Weather (first: rain)")];
        things.extend((0..30).map(|step| (Weight::Step, if step % 2 == 0 { "a" } else { "b" })));
        things.push((Weight::Unknown, "Weather (first: sun)"));
        assert_eq!(lines(&things)[0], ("Weather (first: rain)".to_owned(), 2));
    }
}
