//! Time. Events carry CLOCK_MONOTONIC (`bpf_ktime_get_ns`); wall-clock time exists in output only.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// CLOCK_MONOTONIC of the node, in nanoseconds: the clock of `bpf_ktime_get_ns`, of Rust's `Instant` and of Python's
/// `time.monotonic_ns`, without any time namespace's offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Monotonic(pub u64);

impl Monotonic {
    /// The time now.
    pub fn now() -> Self {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Self(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
    }

    /// The time since `earlier`; zero when it is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The time `after` this one.
    pub fn plus(self, after: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// Translates between a monotonic time and the wall clock, as both stand at one moment.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    monotonic: Monotonic,
    wall: jiff::Timestamp,
}

impl WallClock {
    /// Reads both clocks.
    pub fn now() -> Self {
        Self { monotonic: Monotonic::now(), wall: jiff::Timestamp::now() }
    }

    /// Both clocks as given: for tests and replays.
    pub fn at(monotonic: Monotonic, wall: jiff::Timestamp) -> Self {
        Self { monotonic, wall }
    }

    /// The wall-clock time of `time`.
    pub fn timestamp(&self, time: Monotonic) -> jiff::Timestamp {
        let offset = i128::from(time.0) - i128::from(self.monotonic.0);
        i64::try_from(offset)
            .ok()
            .and_then(|nanoseconds| self.wall.checked_add(jiff::SignedDuration::from_nanos(nanoseconds)).ok())
            .unwrap_or(self.wall)
    }
}
