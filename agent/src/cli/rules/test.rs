//! `dislodge rules test`.
//!
//! Exit status: 0 every test passed and every rule has one, 1 not so, 2 a file is wrong.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use dislodge::{
    check::read_rules,
    rule::test::{Mismatch, RuleTest, files, load_file, run, untested},
};

use crate::cli::reject;

#[derive(Args, Debug)]
pub(super) struct Test {
    /// Files of tests, or folders of them
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Folder of rules to test, instead of the rules that come with the agent
    #[arg(long, value_name = "DIR")]
    rules: Option<PathBuf>,
    /// Only list the rules that no test expects to fire, instead of failing
    #[arg(long)]
    allow_untested: bool,
}

impl Test {
    pub(super) fn run(self) -> ExitCode {
        let rules = match read_rules(self.rules.as_deref()) {
            Ok(rules) => rules,
            Err(problems) => return reject(&problems),
        };
        let mut problems = Vec::new();
        let mut loaded: Vec<(PathBuf, Vec<RuleTest>)> = Vec::new();
        for path in &self.files {
            let found = files(path).map_err(|problem| problems.push(problem)).unwrap_or_default();
            for file in found {
                match load_file(&file, &rules) {
                    Ok(tests) => loaded.push((file, tests)),
                    Err(more) => problems.extend(more),
                }
            }
        }
        if !problems.is_empty() {
            return reject(&problems);
        }
        let failed = loaded.iter().filter(|(file, tests)| !self.passes(file, tests)).count();
        let tests: Vec<RuleTest> = loaded.into_iter().flat_map(|(_, tests)| tests).collect();
        let untested = untested(&rules, &tests);
        if !untested.is_empty() {
            let how = if self.allow_untested { "Untested" } else { "FAILED" };
            println!("{how}: no test expects these rules to fire: {}", untested.join(", "));
        }
        if failed == 0 && (untested.is_empty() || self.allow_untested) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// Runs a file's tests and says what came of them.
    fn passes(&self, file: &Path, tests: &[RuleTest]) -> bool {
        println!("Testing rules: {}", file.display());
        let mut failures = Vec::new();
        for test in tests {
            match run(test, || read_rules(self.rules.as_deref())) {
                Ok(mismatches) => failures.extend(mismatches.iter().map(|it| in_words(file, test, it))),
                Err(error) => failures.push(format!("    {}: {error}\n", test.name)),
            }
        }
        if failures.is_empty() {
            println!("  SUCCESS ({} tests)\n", tests.len());
        } else {
            println!("  FAILED:\n{}", failures.join("\n"));
        }
        failures.is_empty()
    }
}

/// What was expected and not there, with a minus, and what was there and not expected, with a plus.
fn in_words(file: &Path, test: &RuleTest, mismatch: &Mismatch) -> String {
    let Mismatch { at, line, missing, unexpected } = mismatch;
    let mut words = format!("    {}, time: {} s ({}:{line})\n", test.name, at.as_secs_f64(), file.display());
    for (sign, what, alerts) in [('-', "expected", missing), ('+', "got", unexpected)] {
        for alert in alerts {
            words += &format!("      {sign} {alert} ({what})\n");
        }
    }
    words
}
