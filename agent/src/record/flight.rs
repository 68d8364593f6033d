//! A core with a recorder beside it. Whoever has it can look at the core, but can tell it nothing that the recorder does
//! not hear.

use std::{fs, ops::Deref};

use super::{
    format::{Dropped, Header},
    recorder::{Recorder, Recording, Span},
};
use crate::{
    core::{Core, Effects, Input, Pace},
    event::{
        ProcessKey,
        clock::{Monotonic, WallClock},
    },
    request::{tracker::Limits, transfers::Counted},
    rule::RuleSet,
};

/// A core whose inputs are recorded.
pub struct Flight {
    core: Core,
    recorder: Option<Recorder>,
    node: String,
    limits: Limits,
}

impl Deref for Flight {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Flight {
    /// A core that knows nothing yet, and a recorder that keeps so much, if anything.
    pub fn new(rules: RuleSet, limits: Limits, node: &str, span: Option<Span>, now: Monotonic) -> Self {
        let core = Core::new(rules, limits);
        let mut recorder = span.map(Recorder::new);
        if let Some(recorder) = &mut recorder {
            recorder.turn(&core, now);
        }
        Self { core, recorder, node: node.to_owned(), limits }
    }

    /// Tells the core something, and appends what came of it.
    pub fn apply(&mut self, input: Input, effects: &mut Effects) {
        let Self { core, recorder: Some(recorder), .. } = self else { return self.core.apply(input, effects) };
        if let Input::Tick { now, .. } = input {
            core.apply(input, effects);
            recorder.record(&Input::Tick { now, pace: Pace::As(effects.stopped) });
            recorder.turn(core, now);
        } else {
            recorder.record(&input);
            core.apply(input, effects);
        }
    }

    /// See [`Core::take_counted`].
    pub fn take_counted(&mut self, key: ProcessKey) -> Counted {
        self.core.take_counted(key)
    }

    /// What is recorded now; nothing where nothing is.
    pub fn recording(&self) -> Option<Recording> {
        let recorder = self.recorder.as_ref()?;
        let clock = WallClock::now();
        let at = Monotonic::now();
        Some(recorder.recording(Header {
            agent: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned(),
            node: self.node.clone(),
            at,
            wall: i64::try_from(clock.timestamp(at).as_nanosecond()).unwrap_or(i64::MAX),
            rules: self.core.evaluator().rules().digest().to_owned(),
            limits: self.limits,
            dropped: Dropped::default(),
            anonymized: false,
        }))
    }

    /// Bytes that are recorded, and what was not kept.
    pub fn recorded(&self) -> Option<(usize, Dropped)> {
        self.recorder.as_ref().map(|recorder| (recorder.bytes(), recorder.dropped()))
    }
}
