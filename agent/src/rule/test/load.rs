//! YAML → tests. Every problem of a file is found in one go, each with its place.

use std::{collections::BTreeMap, path::Path, time::Duration};

use serde::Deserialize;
use serde_yaml::Spanned;

use super::{
    Alert, Expected, Happens, RuleTest,
    event::{self, Known, LONGEST, Raw, at, step},
};
use crate::{
    event::Hello,
    problem::{Problem, Problems, Shape, Text, duration, nearest, read_file},
    rule::{RuleSet, load::one_of},
};

/// How often rules are evaluated where a test does not say so. The agent does so five times a second.
const INTERVAL: Duration = Duration::from_secs(1);
/// Most ranks in one direction.
const MAX_SIZE: u32 = 8;
/// Most evaluations of one test.
const MAX_TICKS: u128 = 200_000;

const SHAPE: Shape = Shape::Map(&[(
    "tests",
    Shape::List(&Shape::Map(&[
        ("name", Shape::Any),
        ("recording", Shape::Any),
        ("events", Shape::List(&event::SHAPE)),
        ("interval", Shape::Any),
        (
            "server",
            Shape::Map(&[
                ("sglang", Shape::Any),
                ("tp", Shape::Any),
                ("pp", Shape::Any),
                ("cp", Shape::Any),
                ("bootstrap_timeout", Shape::Any),
                ("waiting_timeout", Shape::Any),
            ]),
        ),
        (
            "expect",
            Shape::List(&Shape::Map(&[
                ("at", Shape::Any),
                (
                    "alerts",
                    Shape::List(&Shape::Map(&[
                        ("rule", Shape::Any),
                        ("state", Shape::Any),
                        ("room", Shape::Any),
                        ("rid", Shape::Any),
                    ])),
                ),
            ])),
        ),
    ])),
)]);

#[derive(Deserialize)]
struct RawFile {
    tests: Option<Vec<Spanned<RawTest>>>,
}

#[derive(Deserialize)]
struct RawTest {
    name: Option<Text>,
    recording: Option<Text>,
    events: Option<Vec<Raw>>,
    interval: Option<Text>,
    server: Option<BTreeMap<String, Text>>,
    expect: Option<Vec<Spanned<RawExpected>>>,
}

#[derive(Deserialize)]
struct RawExpected {
    at: Option<Text>,
    alerts: Option<Vec<Spanned<RawAlert>>>,
}

#[derive(Deserialize)]
struct RawAlert {
    rule: Option<Text>,
    state: Option<Text>,
    room: Option<Text>,
    rid: Option<Text>,
}

/// The tests of a file, for `rules`: an alert of any other rule would be expected in vain.
///
/// # Errors
///
/// Every problem of the file.
pub fn load_file(path: &Path, rules: &RuleSet) -> Result<Vec<RuleTest>, Vec<Problem>> {
    let text = read_file(path).map_err(|problem| vec![problem])?;
    let name = path.display().to_string();
    let mut problems = Problems::of(&name);
    let mut tests = Vec::new();
    if let Some(file) = problems.parse::<RawFile>(&text, &SHAPE) {
        let raw = file.tests.unwrap_or_default();
        if raw.is_empty() {
            problems.of_file("has no test; write a list named `tests`");
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        tests.extend(raw.into_iter().filter_map(|raw| test(raw, folder, rules, &mut problems)));
    }
    let mut found = problems.into_found();
    found.sort();
    if found.is_empty() { Ok(tests) } else { Err(found) }
}

fn test(raw: Spanned<RawTest>, folder: &Path, rules: &RuleSet, problems: &mut Problems<'_>) -> Option<RuleTest> {
    let line = raw.referenced.line();
    if raw.value.name.is_none() {
        problems.at(&raw, "a test needs `name`: what it shows, in a sentence");
    }
    if raw.value.expect.as_ref().is_none_or(Vec::is_empty) {
        problems.at(&raw, "a test needs `expect`: a list of times, each with its alerts");
    }
    if raw.value.recording.is_some() == raw.value.events.is_some() {
        problems.at(&raw, "a test needs either `recording` or `events`");
    }
    if let (Some(recording), true) = (&raw.value.recording, raw.value.interval.is_some() || raw.value.server.is_some())
    {
        problems.at(recording, "a recording has its own `server` and `interval`");
    }
    let raw = raw.value;
    let expected = expected(raw.expect.unwrap_or_default(), rules, problems);
    let end = expected.last().map_or(Duration::ZERO, |expected| expected.at);
    let happens = match (raw.recording, raw.events) {
        (Some(recording), _) => Some(Happens::Recorded(folder.join(&recording.value))),
        (None, Some(events)) => {
            let interval = raw.interval.map_or(Some(INTERVAL), |text| interval(&text, end, problems));
            let server = server(raw.server.unwrap_or_default(), problems);
            let (mut known, ranks) = (Known::default(), ranks(&server));
            let steps = events.iter().filter_map(|raw| step(raw, ranks, &mut known, problems)).collect();
            interval.map(|interval| Happens::Told { server: Box::new(server), interval, steps })
        }
        (None, None) => None,
    };
    Some(RuleTest { name: raw.name?.value, line, happens: happens?, expected })
}

fn interval(text: &Text, end: Duration, problems: &mut Problems<'_>) -> Option<Duration> {
    let interval = duration(&text.value, LONGEST).map_err(|message| problems.at(text, message)).ok()?;
    if interval.is_zero() || end.as_nanos() / interval.as_nanos() > MAX_TICKS {
        problems.at(text, format!("`{}` is too short; a test has at most {MAX_TICKS} evaluations", text.value));
        return None;
    }
    Some(interval)
}

fn server(raw: BTreeMap<String, Text>, problems: &mut Problems<'_>) -> Hello {
    let mut hello = Hello { tp: Some(1), pp: Some(1), cp: Some(1), ..Hello::default() };
    for (key, text) in raw {
        let wrong = || format!("`{}` is no number that `{key}` can be", text.value.escape_debug());
        let seconds = || text.value.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0);
        let sound = match key.as_str() {
            "tp" | "pp" | "cp" => {
                let size = text.value.parse().ok().filter(|size| (1..=MAX_SIZE).contains(size));
                match key.as_str() {
                    "tp" => hello.tp = size,
                    "pp" => hello.pp = size,
                    _ => hello.cp = size,
                }
                size.is_some()
            }
            "bootstrap_timeout" => {
                hello.bootstrap_timeout = seconds();
                hello.bootstrap_timeout.is_some()
            }
            "waiting_timeout" => {
                hello.waiting_timeout = seconds();
                hello.waiting_timeout.is_some()
            }
            "sglang" => {
                hello.sglang = Some(text.value.clone());
                true
            }
            _ => true,
        };
        if !sound {
            problems.at(&text, wrong());
        }
    }
    hello
}

/// How many ranks a server has.
pub(super) fn ranks(server: &Hello) -> u32 {
    server.tp.unwrap_or(1) * server.cp.unwrap_or(1) * server.pp.unwrap_or(1)
}

fn expected(raw: Vec<Spanned<RawExpected>>, rules: &RuleSet, problems: &mut Problems<'_>) -> Vec<Expected> {
    let mut expected: Vec<Expected> = Vec::new();
    for raw in raw {
        let line = raw.referenced.line();
        if raw.value.alerts.is_none() {
            problems.at(&raw, "needs `alerts`; write `alerts: []` where there is to be none");
        }
        let time = at(&raw, raw.value.at.as_ref(), problems);
        if let (Some(time), Some(last)) = (time, expected.last())
            && time < last.at
        {
            problems.at(&raw, "is before the time above it; write times in their order");
        }
        let alerts = raw.value.alerts.unwrap_or_default();
        let alerts = alerts.into_iter().filter_map(|raw| alert(raw, rules, problems)).collect();
        expected.extend(time.map(|at| Expected { at, line, alerts }));
    }
    expected
}

fn alert(raw: Spanned<RawAlert>, rules: &RuleSet, problems: &mut Problems<'_>) -> Option<Alert> {
    if raw.value.rule.is_none() {
        problems.at(&raw, "an alert needs `rule`");
    }
    let raw = raw.value;
    let fires = match &raw.state {
        Some(text) => one_of("state", text, &[("pending", false), ("firing", true)], problems),
        None => Some(true),
    };
    let rule = raw.rule?;
    let names: Vec<&str> = rules.iter().map(|(_, rule)| &*rule.name).collect();
    if !names.contains(&rule.value.as_str()) {
        problems
            .at(&rule, format!("there is no rule `{}`; {}", rule.value.escape_debug(), nearest(&rule.value, &names)));
    }
    let text = |text: Option<Text>| text.map(|text| text.value);
    Some(Alert { rule: rule.value, fires: fires?, room: text(raw.room), rid: text(raw.rid) })
}
