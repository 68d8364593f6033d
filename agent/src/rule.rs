//! Rules: which diagnoses are worth somebody's attention, after how long, and how much may be done about them.
//!
//! [`load`] turns YAML into [`Rule`]s, [`condition`] decides whether a rule matches a request, [`alert`] turns matches
//! over time into pending, firing and resolved alerts, and [`evaluate`] does so for every request within a budget.

pub mod alert;
pub mod condition;
pub mod evaluate;
pub mod field;
pub mod load;
pub mod test;

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use serde::Serialize;

use condition::Condition;

use crate::diagnose::Cause;

/// How urgent an alert is. Ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Worth knowing.
    Info,
    /// Look at it today.
    Warning,
    /// Wake somebody.
    Critical,
}

impl Severity {
    /// Every severity, the mildest first.
    pub const ALL: [Self; 3] = [Self::Info, Self::Warning, Self::Critical];

    /// Its name in rules and labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How much may be done about a stuck request. Ordered: of two that apply, the lower one wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Nothing.
    #[default]
    Observe,
    /// Every guard is asked and the decision is recorded, but nothing is sent to the server.
    DryRun,
    /// The request is failed, where every guard allows it.
    Enforce,
}

impl Mode {
    /// Every mode, the most careful first.
    pub const ALL: [Self; 3] = [Self::Observe, Self::DryRun, Self::Enforce];

    /// Its name in configuration and rules.
    pub fn name(self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::DryRun => "dry-run",
            Self::Enforce => "enforce",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One rule, checked.
#[derive(Debug)]
pub struct Rule {
    /// Its name: the alert's name.
    pub name: Arc<str>,
    /// When it matches.
    pub condition: Condition,
    /// For how long it must match without a break before the alert fires.
    pub hold: Duration,
    /// How urgent its alert is.
    pub severity: Severity,
    /// Labels that its alert carries beside ours.
    pub labels: Arc<BTreeMap<String, String>>,
    /// What its alert says in a line.
    pub summary: Option<String>,
    /// The most that may be done about a request that it fires for.
    pub action: Mode,
}

impl Default for RuleSet {
    fn default() -> Self {
        Self::new(Vec::new(), String::new())
    }
}

/// Number of a rule in its set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct RuleIndex(pub u16);

/// Rules in the order in which they were read. Their names are unique.
#[derive(Debug)]
pub struct RuleSet {
    rules: Vec<Rule>,
    digest: String,
    /// By [`Cause::index`].
    of_causes: [OfCause; Cause::ALL.len()],
}

/// The rules that a request of one cause may meet.
#[derive(Debug)]
struct OfCause {
    rules: Vec<RuleIndex>,
    /// No younger request meets one of them, in seconds.
    min_age: f64,
}

impl RuleSet {
    /// More rules than this in one set are refused.
    pub const MAX: usize = 1_000;

    fn new(rules: Vec<Rule>, digest: String) -> Self {
        let of_causes = Cause::ALL.map(|cause| {
            let ages = (0..).map(RuleIndex).zip(&rules);
            let ages = ages.filter_map(|(index, rule)| Some((index, rule.condition.prefilter().min_age(cause)?)));
            let min_age = ages.clone().map(|(_, age)| age).fold(f64::INFINITY, f64::min);
            OfCause { rules: ages.map(|(index, _)| index).collect(), min_age }
        });
        Self { rules, digest, of_causes }
    }

    /// SHA-256 of the files that they come from, one after the other, as 64 hexadecimal digits.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    fn of_cause(&self, cause: Cause) -> Option<&OfCause> {
        self.of_causes.get(cause.index())
    }

    /// Whether a request of that cause and age in seconds may meet one of the rules.
    pub fn may_match(&self, cause: Cause, age: f64) -> bool {
        self.of_cause(cause).is_some_and(|of_cause| age >= of_cause.min_age)
    }

    /// The rules that a request of that cause may meet, with their numbers, in order.
    pub fn for_cause(&self, cause: Cause) -> impl Iterator<Item = (RuleIndex, &Rule)> {
        let rules = self.of_cause(cause).map_or(&[][..], |of_cause| &of_cause.rules);
        rules.iter().filter_map(|index| Some((*index, self.get(*index)?)))
    }

    /// The rule of that number.
    pub fn get(&self, index: RuleIndex) -> Option<&Rule> {
        self.rules.get(usize::from(index.0))
    }

    /// Every rule with its number.
    pub fn iter(&self) -> impl Iterator<Item = (RuleIndex, &Rule)> {
        (0..).map(RuleIndex).zip(&self.rules)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }
}
