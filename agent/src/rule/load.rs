//! YAML files → rules. Every problem of every file is found in one go, each with its place.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::{Mode, Rule, RuleSet, Severity, condition::Condition};
use crate::problem::{Problem, Problems, Shape, Text, duration, nearest, read_file};

/// The rules that come with the agent: for operators without a folder of their own.
const DEFAULTS: [(&str, &str); 1] = [("rules/default.yaml", include_str!("../../../rules/default.yaml"))];

/// Longest `for`.
const LONGEST_HOLD: Duration = Duration::from_secs(7 * 24 * 3_600);
const MAX_NAME: usize = 64;
const MAX_SUMMARY: usize = 512;
const MAX_LABELS: usize = 16;
const MAX_LABEL_VALUE: usize = 128;

/// Labels that the agent or Alertmanager sets itself.
pub const RESERVED_LABELS: [&str; 8] =
    ["alertname", "severity", "cause", "node", "server", "pid", "backend", "instance"];

const SHAPE: Shape = Shape::Map(&[(
    "rules",
    Shape::List(&Shape::Map(&[
        ("name", Shape::Any),
        ("when", Shape::Any),
        ("for", Shape::Any),
        ("severity", Shape::Any),
        ("labels", Shape::Any),
        ("summary", Shape::Any),
        ("action", Shape::Any),
    ])),
)]);

#[derive(Deserialize)]
struct RawFile {
    rules: Option<Vec<serde_yaml::Spanned<RawRule>>>,
}

#[derive(Deserialize)]
struct RawRule {
    name: Option<Text>,
    when: Option<Text>,
    #[serde(rename = "for")]
    hold: Option<Text>,
    severity: Option<Text>,
    labels: Option<BTreeMap<String, Text>>,
    summary: Option<Text>,
    action: Option<Text>,
}

/// A rule file's name and text.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Its name in problems.
    pub file: &'a str,
    /// Its YAML.
    pub text: &'a str,
}

/// The rules that come with the agent.
///
/// # Errors
///
/// None, as long as the tests of this crate pass.
pub fn defaults() -> Result<RuleSet, Vec<Problem>> {
    load(&DEFAULTS.map(|(file, text)| Source { file, text }))
}

/// The rules of every `*.yaml` and `*.yml` in `folder`, by file name. Files that start with a dot are left out, as are
/// folders; symbolic links are followed.
///
/// # Errors
///
/// Every problem of every file, or that the folder cannot be read or has no rule file.
pub fn load_folder(folder: &Path) -> Result<RuleSet, Vec<Problem>> {
    let name = folder.display().to_string();
    let files =
        rule_files(folder).map_err(|error| vec![Problem::of_file(&name, format!("cannot be read: {error}"))])?;
    if files.is_empty() {
        return Err(vec![Problem::of_file(
            &name,
            "has no rule file; put one with the ending .yaml there, or leave `rules` out to get the default rules",
        )]);
    }
    let mut problems = Vec::new();
    let mut texts = Vec::new();
    for file in files {
        match read_file(&file) {
            Ok(text) => texts.push((file.display().to_string(), text)),
            Err(problem) => problems.push(problem),
        }
    }
    let sources: Vec<Source<'_>> = texts.iter().map(|(file, text)| Source { file, text }).collect();
    match load(&sources) {
        Ok(rules) if problems.is_empty() => Ok(rules),
        Ok(_) => Err(problems),
        Err(more) => {
            problems.extend(more);
            problems.sort();
            Err(problems)
        }
    }
}

pub(super) fn rule_files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_yaml = path.extension().is_some_and(|ending| ending == "yaml" || ending == "yml");
        let is_hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if is_yaml && !is_hidden && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The rules of `sources`, in that order.
///
/// # Errors
///
/// Every problem of every source.
pub fn load(sources: &[Source<'_>]) -> Result<RuleSet, Vec<Problem>> {
    let mut rules = Vec::new();
    let mut found = Vec::new();
    let mut places = HashMap::new();
    for source in sources {
        let mut problems = Problems::of(source.file);
        load_file(source, &mut rules, &mut places, &mut problems);
        found.extend(problems.into_found());
    }
    if rules.len() > RuleSet::MAX {
        found.push(Problem::of_file("rules", format!("there are {} rules, more than {}", rules.len(), RuleSet::MAX)));
    }
    if found.is_empty() { Ok(RuleSet::new(rules, digest(sources))) } else { Err(found) }
}

fn digest(sources: &[Source<'_>]) -> String {
    let digest = sources.iter().fold(Sha256::new(), |digest, source| digest.chain_update(source.text));
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn load_file(
    source: &Source<'_>,
    rules: &mut Vec<Rule>,
    places: &mut HashMap<String, String>,
    problems: &mut Problems<'_>,
) {
    let Some(file) = problems.parse::<RawFile>(source.text, &SHAPE) else { return };
    let raw_rules = file.rules.unwrap_or_default();
    if raw_rules.is_empty() {
        problems.of_file("has no rule; write a list named `rules`");
    }
    for raw in raw_rules {
        if let Some(name) = &raw.value.name {
            let place = format!("{}:{}", source.file, name.referenced.line());
            if let Some(first) = places.insert(name.value.clone(), place) {
                problems.at(name, format!("there is a rule `{}` in {first} already", name.value));
            }
        }
        rules.extend(rule(raw, source.text, problems));
    }
}

fn rule(raw: serde_yaml::Spanned<RawRule>, source: &str, problems: &mut Problems<'_>) -> Option<Rule> {
    for (key, missing) in [
        ("name", raw.value.name.is_none()),
        ("when", raw.value.when.is_none()),
        ("severity", raw.value.severity.is_none()),
    ] {
        if missing {
            problems.at(&raw, format!("a rule needs `{key}`"));
        }
    }
    let raw = raw.value;
    let name = raw.name.and_then(|text| rule_name(text, problems));
    let condition = raw.when.and_then(|text| condition(&text, source, problems));
    let severity = raw.severity.and_then(|text| {
        one_of("severity", &text, &Severity::ALL.map(|severity| (severity.name(), severity)), problems)
    });
    let action = match raw.action {
        Some(text) => one_of("action", &text, &Mode::ALL.map(|mode| (mode.name(), mode)), problems),
        None => Some(Mode::default()),
    };
    let hold = match raw.hold {
        Some(text) => duration(&text.value, LONGEST_HOLD).map_err(|message| problems.at(&text, message)).ok(),
        None => Some(Duration::ZERO),
    };
    let labels = labels(raw.labels.unwrap_or_default(), problems);
    let summary = raw.summary.map(|text| summary(text, problems));
    Some(Rule {
        name: name?,
        condition: condition?,
        hold: hold?,
        severity: severity?,
        labels: Arc::new(labels?),
        summary: summary.unwrap_or_default(),
        action: action?,
    })
}

fn rule_name(text: Text, problems: &mut Problems<'_>) -> Option<Arc<str>> {
    let name = &text.value;
    let fits = name.starts_with(|first: char| first.is_ascii_uppercase())
        && name.chars().all(|character| character.is_ascii_alphanumeric());
    if !fits || name.len() > MAX_NAME {
        let form = format!("letters and digits after a capital, at most {MAX_NAME}, such as RoomCollision");
        problems.at(&text, format!("`{}` is not a rule's name; write {form}", name.escape_debug()));
        return None;
    }
    Some(name.as_str().into())
}

fn summary(text: Text, problems: &mut Problems<'_>) -> Option<String> {
    if text.value.len() > MAX_SUMMARY {
        problems.at(&text, format!("the summary has {} bytes, more than {MAX_SUMMARY}; shorten it", text.value.len()));
    }
    let summary = text.value.trim();
    (!summary.is_empty()).then(|| summary.into())
}

fn labels(raw: BTreeMap<String, Text>, problems: &mut Problems<'_>) -> Option<BTreeMap<String, String>> {
    let mut sound = raw.len() <= MAX_LABELS;
    if let (false, Some((_, value))) = (sound, raw.iter().next()) {
        problems.at(value, format!("a rule has at most {MAX_LABELS} labels, this has {}", raw.len()));
    }
    for (name, value) in &raw {
        let text = &value.value;
        let complaint = if RESERVED_LABELS.contains(&name.as_str()) {
            format!("the label `{name}` is set by the agent; choose another name")
        } else if name.starts_with("__") || !is_label_name(name) {
            format!(
                "`{}` is not a label's name; write letters, digits and _, not a digit first, not __ in front",
                name.escape_debug()
            )
        } else if text.is_empty() || text.len() > MAX_LABEL_VALUE || text.chars().any(char::is_control) {
            format!("the value of label `{name}` must have 1 to {MAX_LABEL_VALUE} bytes without control characters")
        } else {
            continue;
        };
        problems.at(value, complaint);
        sound = false;
    }
    sound.then(|| raw.into_iter().map(|(name, value)| (name, value.value)).collect())
}

fn is_label_name(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
        && name.chars().all(|character| character.is_ascii_alphanumeric() || character == '_')
        && name.len() <= MAX_LABEL_VALUE
}

/// The value of that name, or a problem that names them all.
pub(crate) fn one_of<T: Copy>(key: &str, text: &Text, known: &[(&str, T)], problems: &mut Problems<'_>) -> Option<T> {
    let found = known.iter().find(|(name, _)| *name == text.value);
    if found.is_none() {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        problems.at(text, format!("`{}` is no {key}; {}", text.value.escape_debug(), nearest(&text.value, &names)));
    }
    found.map(|(_, value)| *value)
}

fn condition(text: &Text, source: &str, problems: &mut Problems<'_>) -> Option<Condition> {
    let errors = match Condition::compile(&text.value) {
        Ok(condition) => return Some(condition),
        Err(errors) => errors,
    };
    for error in errors {
        let (line, column) = place_in_file(text, source, error.line, error.column);
        problems.at_place(line, column, error.message);
    }
    None
}

/// Where line and column of a scalar's text are in its file. Exact where the file has its lines as they are (one line,
/// or a block after `|`); elsewhere, as in folded text, the problem is said to be where the text begins.
fn place_in_file(text: &Text, source: &str, line: usize, column: usize) -> (u64, u64) {
    let (first_line, first_column) = (text.referenced.line(), text.referenced.column());
    let start = || {
        let file_line = usize::try_from(first_line).ok()?.checked_add(line)?.checked_sub(2)?;
        let indent = usize::try_from(first_column).ok()?.checked_sub(1)?;
        let written: String = source.lines().nth(file_line)?.chars().skip(indent).collect();
        let quoted = line == 1 && written.starts_with(['"', '\'']);
        let written = if quoted { written.get(1..)? } else { &written };
        let is_there = written.starts_with(text.value.lines().nth(line.checked_sub(1)?)?);
        is_there.then(|| (first_line + line as u64 - 1, first_column + u64::from(quoted)))
    };
    match start() {
        Some((line, start)) => (line, start + column as u64 - 1),
        None => (first_line, first_column),
    }
}
