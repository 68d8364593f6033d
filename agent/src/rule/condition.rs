//! The `when` of a rule: a CEL expression over the [fields](super::field).
//!
//! The language is CEL without what a condition has no use for: macros (`all`, `exists`, `map` …), maps, messages,
//! bytes and unsigned numbers. What is left ends after a bounded number of steps, and its types can be checked when it
//! is loaded, so that a typing error is found then and not in the night in which the rule should have fired.

mod decision;
mod prefilter;
mod types;
mod why;

use std::sync::{Arc, OnceLock};

use cel::{Context, Env, ExecutionError, Program, common::ast::SourceInfo};

use decision::Decision;
pub use prefilter::Prefilter;

use super::field::Subject;
use crate::{
    diagnose::{Cause, Conclusion, Confidence, Quiescence},
    event::{Backend, ProcessKey, Room, clock::Monotonic},
    request::{Request, RequestKey, RoomState, ServerState, Sync, tracker::Tracked, transfers::Transfers},
};

/// Longest source of a condition, in bytes.
pub const MAX_SOURCE: usize = 4_096;
/// Most operators in a condition. It bounds time, and the depth of the tree that the parser recurses into.
pub const MAX_OPERATORS: usize = 256;

/// What is wrong with a condition, and where in its text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConditionError {
    /// Line of its text, from 1.
    pub line: usize,
    /// Column in that line, from 1.
    pub column: usize,
    /// What is wrong and what to write instead.
    pub message: String,
}

/// Why a condition could not be evaluated for a request.
#[derive(Debug, thiserror::Error)]
pub enum EvaluationError {
    /// CEL failed: integers overflowed, or were divided by zero.
    #[error(transparent)]
    Cel(#[from] ExecutionError),
    /// The condition's value is not a bool: loading has to refuse such conditions.
    #[error("the condition is {0} instead of a bool")]
    NotBool(String),
}

/// A checked condition.
#[derive(Debug)]
pub struct Condition {
    program: Program,
    prefilter: Prefilter,
    decision: Decision,
}

impl Condition {
    /// Compiles and checks `source`.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with it; of syntax errors those that the parser finds.
    pub fn compile(source: &str) -> Result<Self, Vec<ConditionError>> {
        let refuse = |message: String| Err(vec![ConditionError { line: 1, column: 1, message }]);
        if source.trim().is_empty() {
            return refuse("the condition is empty; write a CEL expression such as `inflight_seconds > 60`".to_owned());
        }
        if source.len() > MAX_SOURCE {
            return refuse(format!("the condition has {} bytes, more than {MAX_SOURCE}; split the rule", source.len()));
        }
        let operators = count_operators(source);
        if operators > MAX_OPERATORS {
            return refuse(format!(
                "the condition has {operators} operators, more than {MAX_OPERATORS}; split the rule"
            ));
        }
        let program = environment().compile(source).map_err(|errors| {
            errors.errors.into_iter().map(|error| syntax_error(error.pos, &error.msg)).collect::<Vec<_>>()
        })?;
        types::check(&program)?;
        let prefilter = Prefilter::of(program.expression());
        let decision = Decision::of(program.expression());
        let condition = Self { program, prefilter, decision };
        // The checker allows what CEL can do; a sample keeps the two honest.
        match condition.matches_sample() {
            Err(EvaluationError::Cel(
                ExecutionError::DivisionByZero(_) | ExecutionError::RemainderByZero(_) | ExecutionError::Overflow(..),
            ))
            | Ok(_) => Ok(condition),
            Err(error) => refuse(format!("the condition cannot be evaluated: {error}")),
        }
    }

    /// What can be said without evaluating it.
    pub fn prefilter(&self) -> Prefilter {
        self.prefilter
    }

    /// Whether it holds for `subject`, where that can be told without CEL: always the same as [`Condition::matches`].
    pub fn decide(&self, subject: &Subject<'_>) -> Option<bool> {
        self.decision.decide(subject)
    }

    /// Whether it holds for a subject, by CEL.
    ///
    /// # Errors
    ///
    /// Integers overflowed, or were divided by zero.
    pub fn matches(&self, scope: &Scope<'_>) -> Result<bool, EvaluationError> {
        match self.program.execute(&scope.0)? {
            cel::Value::Bool(matched) => Ok(matched),
            other => Err(EvaluationError::NotBool(other.type_of().to_string())),
        }
    }

    fn matches_sample(&self) -> Result<bool, EvaluationError> {
        let now = Monotonic(1_000_000_000_000);
        let opened = Request::opened(1, Room::Number(1), Backend::Nixl, Monotonic(1_000_000_000));
        let request = Request { sent_chunks: 1, sent_pages: 1, ..opened };
        let server = ServerState::new(Sync::Complete);
        let (quiescence, confidence) = (Quiescence::NeverPosted, Confidence::High);
        let conclusion = Conclusion { cause: Cause::Unknown, quiescence, confidence };
        let (room, transfers) = (RoomState::default(), Transfers::new(0));
        let key = RequestKey { process: ProcessKey { pid: 1, start: 1 }, serial: 1 };
        let tracked = Tracked { key, request: &request, room: &room, server: &server, transfers: &transfers };
        let subject = Subject { tracked, conclusion, now };
        let root = root();
        self.matches(&Scope::of(&root, &subject))
    }
}

/// A request's fields as CEL sees them: made once per request, then used for every rule.
pub struct Scope<'a>(Context<'a, 'a>);

impl<'a> Scope<'a> {
    /// The fields of `subject` within `root`. A field is computed when a condition asks for it.
    pub fn of(root: &'a Context<'static, 'static>, subject: &'a Subject<'a>) -> Self {
        let root: &Context<'_, 'a> = root;
        let mut scope = root.new_inner_scope();
        scope.set_variable_resolver(subject);
        Self(scope)
    }
}

/// A context that [`Scope`]s are made in. Costs some microseconds: keep it.
pub fn root() -> Context<'static, 'static> {
    Context::with_env(Arc::clone(environment()))
}

fn environment() -> &'static Arc<Env> {
    static ENVIRONMENT: OnceLock<Arc<Env>> = OnceLock::new();
    ENVIRONMENT.get_or_init(|| Arc::new(Env::default().with_optional_support(false).with_stdlib()))
}

/// An upper bound of the operators in `source`: those in its strings count as well, which harms nobody.
fn count_operators(source: &str) -> usize {
    let characters = source.bytes().filter(|byte| b"+-*/%.[({<>=!?&|".contains(byte)).count();
    characters + source.matches("in").count()
}

fn syntax_error((line, column): (isize, isize), message: &str) -> ConditionError {
    let message = message.strip_prefix("Syntax error: ").unwrap_or(message);
    ConditionError {
        line: usize::try_from(line).unwrap_or(1).max(1),
        column: usize::try_from(column).unwrap_or(1).max(1),
        message: format!("the condition is not CEL: {message}"),
    }
}

/// Line and column, from 1, of a node of a parsed condition.
fn place(source: &SourceInfo, id: u64) -> (usize, usize) {
    let offset = source.offset_for(id).map_or(0, |(start, _)| start as usize);
    let before: String = source.source.chars().take(offset).collect();
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|character| *character != '\n').count() + 1;
    (line, column)
}
