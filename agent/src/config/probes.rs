//! The settings of the probes on transfer engines.

use serde::{Deserialize, Serialize};

use super::Setter;
use crate::{kernel::probe::ProbeSet, problem::Text, rule::load::one_of};

/// The probes on transfer engines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Probes {
    /// Whether transfers are traced: a few hits per transfer.
    pub transfers: bool,
    /// When completions are counted.
    pub completions: Completions,
}

/// When completions of UCX, Mooncake and libibverbs are counted: up to a million hits a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Completions {
    /// Never.
    Off,
    /// For a moment, when a transfer does not get on.
    Look,
    /// Always: for tests and measurements.
    Always,
}

impl Completions {
    const ALL: [Self; 3] = [Self::Off, Self::Look, Self::Always];

    fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Look => "look",
            Self::Always => "always",
        }
    }
}

impl Default for Probes {
    fn default() -> Self {
        Self { transfers: true, completions: Completions::Look }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct RawProbes {
    transfers: Option<Text>,
    completions: Option<Text>,
}

impl Probes {
    /// The sets that are always attached.
    pub fn always(&self) -> Vec<ProbeSet> {
        match (self.transfers, self.completions) {
            (false, _) => Vec::new(),
            (true, Completions::Always) => vec![ProbeSet::Transfers, ProbeSet::Completions],
            (true, Completions::Off | Completions::Look) => vec![ProbeSet::Transfers],
        }
    }

    pub(super) fn set(&mut self, raw: RawProbes, set: &mut Setter<'_, '_>) {
        set.to(&mut self.transfers, raw.transfers, |text| {
            text.parse().map_err(|_| format!("`{text}` is neither true nor false"))
        });
        let completions = Completions::ALL.map(|when| (when.name(), when));
        if let Some(when) = raw.completions.and_then(|text| one_of("completions", &text, &completions, set.problems)) {
            self.completions = when;
        }
    }
}
