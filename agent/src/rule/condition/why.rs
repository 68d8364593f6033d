//! Which comparison of a condition is false: for people who ask why a rule does not match.

use super::{
    Condition,
    decision::{Decision, Number, Order},
};
use crate::rule::field::{Field, Subject, Value};

/// Reasons that are told of one condition.
const MAX_REASONS: usize = 4;

impl Condition {
    /// Which of its comparisons make it false for `subject`, with the values that they see. Empty where it holds, or where
    /// only CEL can say.
    pub fn why_not(&self, subject: &Subject<'_>) -> Vec<String> {
        let mut reasons = Vec::new();
        false_parts(&self.decision, subject, true, &mut reasons);
        reasons.truncate(MAX_REASONS);
        reasons
    }
}

/// Appends what makes `decision` other than `wanted`.
fn false_parts(decision: &Decision, subject: &Subject<'_>, wanted: bool, reasons: &mut Vec<String>) {
    if decision.decide(subject) != Some(!wanted) || reasons.len() >= MAX_REASONS {
        return;
    }
    match decision {
        Decision::Not(operand) => false_parts(operand, subject, !wanted, reasons),
        Decision::Both(operands) | Decision::Either(operands) => {
            operands.iter().for_each(|operand| false_parts(operand, subject, wanted, reasons));
        }
        Decision::Flag(field) => reasons.push(format!("{} is {}", field.name, shown(field, subject))),
        Decision::OneOf { field, .. } => reasons.push(format!("{} is {}", field.name, shown(field, subject))),
        Decision::Compare { left, order, right } => {
            let (left_name, left_value) = number(left, subject);
            let (right_name, right_value) = number(right, subject);
            let not = if wanted { "not " } else { "" };
            let left = left_value.map_or(left_name.clone(), |value| format!("{left_name} is {value},"));
            let right = right_value.map_or(right_name.clone(), |value| format!("{right_name} ({value})"));
            reasons.push(format!("{left} {not}{} {right}", symbol(*order)));
        }
        Decision::Constant(value) => reasons.push(format!("it says {value}")),
        Decision::Ask => {}
    }
}

fn shown(field: &Field, subject: &Subject<'_>) -> String {
    match field.value(subject) {
        Value::Text("") => "empty".to_owned(),
        Value::Text(text) => text.to_owned(),
        Value::Flag(flag) => flag.to_string(),
        Value::Count(count) => count.to_string(),
        Value::Seconds(seconds) => format!("{seconds:.1}"),
    }
}

/// A number's name, and its value where that is not its name.
fn number(number: &Number, subject: &Subject<'_>) -> (String, Option<String>) {
    match number {
        Number::Field(field) => (field.name.to_owned(), Some(shown(field, subject))),
        Number::Seconds(seconds) => (format!("{seconds:?}"), None),
        Number::Count(count) => (count.to_string(), None),
        Number::Sum(field, more) => match field.value(subject) {
            Value::Seconds(seconds) => (format!("{} + {more:?}", field.name), Some(format!("{:.1}", seconds + more))),
            _ => (format!("{} + {more:?}", field.name), None),
        },
    }
}

fn symbol(order: Order) -> &'static str {
    match order {
        Order::Less => "<",
        Order::LessOrEqual => "<=",
        Order::Equal => "==",
        Order::NotEqual => "!=",
        Order::GreaterOrEqual => ">=",
        Order::Greater => ">",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        diagnose::{Cause, Conclusion, Confidence, Quiescence},
        event::{Backend, ProcessKey, Room, clock::Monotonic},
        request::{Request, RequestKey, RoomState, ServerState, Sync, tracker::Tracked, transfers::Transfers},
    };

    /// Why a condition does not hold of a request that has waited in the queue for 12 s, parked.
    fn why_not(condition: &str) -> Vec<String> {
        let now = Monotonic(20_000_000_000);
        let opened = Request::opened(1, Room::Number(1), Backend::Nixl, Monotonic(1));
        let request = Request { entered: Some(Monotonic(8_000_000_000)), ..opened };
        let conclusion =
            Conclusion { cause: Cause::Parked, quiescence: Quiescence::NeverPosted, confidence: Confidence::Low };
        let (server, room, transfers) = (ServerState::new(Sync::Complete), RoomState::default(), Transfers::new(0));
        let key = RequestKey { process: ProcessKey { pid: 1, start: 1 }, serial: 1 };
        let tracked = Tracked { key, request: &request, room: &room, server: &server, transfers: &transfers };
        Condition::compile(condition).unwrap().why_not(&Subject { tracked, conclusion, now })
    }

    #[test]
    fn the_comparisons_that_are_false_are_named_with_what_they_see() {
        for (condition, expected) in [
            ("cause == \"Parked\" && inflight_seconds > 30.0", &["inflight_seconds is 12.0, not > 30.0"][..]),
            ("cause == \"PeerGone\" && !inflight", &["cause is Parked", "inflight is true"]),
            (
                "confidence == \"high\" || inflight_seconds > 120.0",
                &["confidence is low", "inflight_seconds is 12.0, not > 120.0"],
            ),
            ("!(sent_chunks < 1)", &["sent_chunks is 0, < 1"]),
            (
                "waiting_seconds > server_bootstrap_timeout_seconds + 30.0",
                &["waiting_seconds is 12.0, not > server_bootstrap_timeout_seconds + 30.0 (330.0)"],
            ),
            ("sglang.startsWith(\"0.5\") && inflight_seconds > 30.0", &["inflight_seconds is 12.0, not > 30.0"]),
        ] {
            assert_eq!(why_not(condition), expected, "{condition}");
        }
    }

    #[test]
    fn nothing_is_named_of_what_holds_and_of_what_only_cel_can_say() {
        assert!(why_not("cause == \"Parked\"").is_empty());
        assert!(why_not("sglang.startsWith(\"0.5\")").is_empty());
    }
}
