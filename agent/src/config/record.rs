//! The settings of the flight recorder.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use super::Setter;
use crate::{problem::Text, record::recorder::Span};

/// The flight recorder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Record {
    /// Where dumps are written. None: nothing is recorded.
    pub folder: Option<PathBuf>,
    /// How many minutes are kept.
    pub minutes: u64,
    /// How many bytes are kept, at most.
    pub max_bytes: usize,
    /// Whether it is dumped when an alert fires.
    pub on_firing: bool,
    /// How many dumps are kept.
    pub max_files: usize,
}

impl Default for Record {
    fn default() -> Self {
        Self { folder: None, minutes: 5, max_bytes: 64 << 20, on_firing: true, max_files: 20 }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct RawRecord {
    folder: Option<Text>,
    minutes: Option<Text>,
    max_bytes: Option<Text>,
    on_firing: Option<Text>,
    max_files: Option<Text>,
}

impl Record {
    /// How much is kept in memory; nothing where no dump could be written.
    pub fn span(&self) -> Option<Span> {
        let time = Duration::from_secs(self.minutes.saturating_mul(60));
        self.folder.as_ref().map(|_| Span { time, bytes: self.max_bytes })
    }

    pub(super) fn set(&mut self, raw: RawRecord, set: &mut Setter<'_, '_>) {
        set.path(&mut self.folder, raw.folder);
        set.number(&mut self.minutes, raw.minutes, 1, 1_440);
        set.number(&mut self.max_bytes, raw.max_bytes, 1 << 20, 1 << 30);
        set.to(&mut self.on_firing, raw.on_firing, |text| {
            text.parse().map_err(|_| format!("`{text}` is neither true nor false"))
        });
        set.number(&mut self.max_files, raw.max_files, 1, 10_000);
    }
}
