//! `dislodge check`: every problem of configuration and rules at once, without a kernel or a server.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::{
    config::Config,
    problem::{Problem, read_file},
    rule::{Mode, RuleSet, Severity, load},
};

/// What a check found.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// Whether the agent would start with these files.
    pub ok: bool,
    /// Every problem.
    pub problems: Vec<Problem>,
    /// The configuration with its defaults, when it is sound.
    pub config: Option<Config>,
    /// The rules, when all of them are sound.
    pub rules: Vec<RuleSummary>,
}

/// A rule in a few words.
#[derive(Debug, Serialize)]
pub struct RuleSummary {
    /// Its name.
    pub name: String,
    /// How urgent.
    pub severity: Severity,
    /// For how long it must match, in seconds.
    pub for_seconds: f64,
    /// The most that it allows to be done, with the configuration's mode taken into account.
    pub action: Mode,
}

/// Checks a configuration file and a folder of rules. Without `rules`, those of the configuration are checked, or
/// those that come with the agent.
pub fn check(config: Option<&Path>, rules: Option<&Path>) -> Report {
    let mut report = Report::default();
    match read_config(config) {
        Ok(config) => report.config = Some(config),
        Err(problems) => report.problems.extend(problems),
    }
    let of_config = report.config.as_ref().and_then(|config| config.rules.clone());
    match read_rules(rules.map(PathBuf::from).or(of_config).as_deref()) {
        Ok(rules) => {
            let mode = report.config.as_ref().map(|config| config.mode).unwrap_or_default();
            report.rules = rules
                .iter()
                .map(|(_, rule)| RuleSummary {
                    name: rule.name.to_string(),
                    severity: rule.severity,
                    for_seconds: rule.hold.as_secs_f64(),
                    action: rule.action.min(mode),
                })
                .collect();
        }
        Err(problems) => report.problems.extend(problems),
    }
    report.ok = report.problems.is_empty();
    report
}

/// The configuration of `file`, or the defaults.
///
/// # Errors
///
/// Every problem of the file.
pub fn read_config(file: Option<&Path>) -> Result<Config, Vec<Problem>> {
    let Some(file) = file else { return Ok(Config::default()) };
    let text = read_file(file).map_err(|problem| vec![problem])?;
    Config::load(&text, &file.display().to_string())
}

/// The rules of `folder`, or those that come with the agent.
///
/// # Errors
///
/// Every problem of every file.
pub fn read_rules(folder: Option<&Path>) -> Result<RuleSet, Vec<Problem>> {
    folder.map_or_else(load::defaults, load::load_folder)
}
