//! Everything that is left to chance, from one seed.

use std::time::Duration;

use rand::{RngExt as _, SeedableRng as _};
use rand_pcg::Pcg64Mcg;

/// A source of choices: the same ones for the same seed.
#[derive(Debug)]
pub(super) struct Chance(Pcg64Mcg);

impl Chance {
    pub(super) fn of(seed: u64) -> Self {
        Self(Pcg64Mcg::seed_from_u64(seed))
    }

    /// A number from `least` to `most`, both included.
    pub(super) fn between(&mut self, least: u64, most: u64) -> u64 {
        self.0.random_range(least..=most.max(least))
    }

    /// Milliseconds from `least` to `most`.
    pub(super) fn millis(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_micros(self.between(least * 1_000, most * 1_000))
    }

    /// Whether something happens that happens so many times in a hundred.
    pub(super) fn percent(&mut self, percent: u64) -> bool {
        self.between(1, 100) <= percent
    }
}
