//! Tests of rules, in the manner of `promtool test rules`: what happens on a server, and which alerts there are at which
//! times. Whatever is not expected is expected not to be there.
//!
//! [`load`](self::load_file) reads a file of tests, [`run`](self::run) tells a core what happens, as a replay does, and
//! compares.

mod event;
mod load;
mod run;

use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

pub use load::load_file;
pub use run::{RunError, run};

use super::{RuleSet, alert::AlertState};
use crate::{event::Hello, problem::Problem};
use event::Step;

/// One test.
#[derive(Debug)]
pub struct RuleTest {
    /// What it shows.
    pub name: String,
    /// The line in its file that it begins at.
    pub line: u64,
    happens: Happens,
    expected: Vec<Expected>,
}

/// Where a test's events come from.
#[derive(Debug)]
enum Happens {
    /// A file that `dislodge record` or `dislodge simulate` wrote.
    Recorded(PathBuf),
    /// What the test says. The rules are evaluated each `interval`, and the server's scheduler makes its passes.
    Told { server: Box<Hello>, interval: Duration, steps: Vec<Step> },
}

/// Every alert that there is at a time, no other.
#[derive(Debug)]
struct Expected {
    at: Duration,
    line: u64,
    alerts: Vec<Alert>,
}

/// A pending or firing alert. What a test leaves out may be anything.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alert {
    /// Name of its rule.
    pub rule: String,
    /// Whether it fires; else it is pending.
    pub fires: bool,
    /// The request's room.
    pub room: Option<String>,
    /// The request's id.
    pub rid: Option<String>,
}

impl Alert {
    /// Whether `got` is what this expects.
    fn is_met_by(&self, got: &Self) -> bool {
        let is_it = |expected: &Option<String>, got: &Option<String>| expected.is_none() || expected == got;
        self.rule == got.rule && self.fires == got.fires && is_it(&self.room, &got.room) && is_it(&self.rid, &got.rid)
    }
}

impl fmt::Display for Alert {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.fires { AlertState::Firing } else { AlertState::Pending };
        write!(f, "{} {}", self.rule, state.name())?;
        for (name, value) in [("room", &self.room), ("rid", &self.rid)] {
            if let Some(value) = value {
                write!(f, ", {name} {value}")?;
            }
        }
        Ok(())
    }
}

/// A time at which other alerts were there than were expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The time, since the beginning.
    pub at: Duration,
    /// The line in the test's file that expects something else.
    pub line: u64,
    /// Expected and not there.
    pub missing: Vec<Alert>,
    /// There and not expected.
    pub unexpected: Vec<Alert>,
}

/// The rules of `rules` that no test expects to fire.
pub fn untested<'a>(rules: &'a RuleSet, tests: &[RuleTest]) -> Vec<&'a str> {
    let alerts = tests.iter().flat_map(|test| &test.expected).flat_map(|expected| &expected.alerts);
    let tested: BTreeSet<&str> = alerts.filter(|alert| alert.fires).map(|alert| alert.rule.as_str()).collect();
    rules.iter().map(|(_, rule)| &*rule.name).filter(|name| !tested.contains(name)).collect()
}

/// The files of tests that `path` names: itself, or every `*.yaml` and `*.yml` in it, by name.
///
/// # Errors
///
/// The folder cannot be read, or has none.
pub fn files(path: &Path) -> Result<Vec<PathBuf>, Problem> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let name = path.display().to_string();
    match super::load::rule_files(path) {
        Ok(files) if files.is_empty() => Err(Problem::of_file(&name, "has no file with the ending .yaml")),
        Ok(files) => Ok(files),
        Err(error) => Err(Problem::of_file(&name, format!("cannot be read: {error}"))),
    }
}
