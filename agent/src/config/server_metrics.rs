//! The settings of reading the servers' own metrics.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Setter;
use crate::{problem::Text, rule::load::one_of};

/// Reading the servers' own `/metrics`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ServerMetrics {
    /// Whether they are read at all.
    pub read: ReadMetrics,
    /// The least time between two requests to a server.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// Ports on which servers answer whose command lines do not say so.
    pub ports: Vec<u16>,
}

/// Whether the servers' own metrics are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ReadMetrics {
    /// Where a server has them, when there is something to hold them against.
    Auto,
    /// Never.
    Off,
}

impl Default for ServerMetrics {
    fn default() -> Self {
        Self { read: ReadMetrics::Auto, interval: Duration::from_secs(15), ports: Vec::new() }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct RawServerMetrics {
    read: Option<Text>,
    interval: Option<Text>,
    ports: Option<Vec<Text>>,
}

impl ServerMetrics {
    pub(super) fn set(&mut self, raw: RawServerMetrics, set: &mut Setter<'_, '_>) {
        let choices = [("auto", ReadMetrics::Auto), ("off", ReadMetrics::Off)];
        if let Some(read) = raw.read.and_then(|text| one_of("read", &text, &choices, set.problems)) {
            self.read = read;
        }
        set.duration(&mut self.interval, raw.interval, Duration::from_secs(1), Duration::from_secs(3_600));
        for text in raw.ports.unwrap_or_default() {
            let mut port = 0;
            set.number(&mut port, Some(text), 1, u16::MAX);
            self.ports.extend((port > 0).then_some(port));
        }
    }
}
