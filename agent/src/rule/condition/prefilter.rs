//! What a condition needs at least, read off its text once: a request that passes no rule's filter is not diagnosed.

use cel::{
    IdedExpr,
    common::ast::{Expr, LiteralValue, operators},
};

use crate::{diagnose::Cause, rule::field::Field};

/// A necessary condition: where it says no, the condition is not met.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prefilter {
    /// Bit n: the condition may be met with the cause of that [`Cause::index`].
    causes: u32,
    /// The condition is not met by anything younger, in seconds.
    min_age: f64,
}

impl Prefilter {
    const ANYTHING: Self = Self { causes: u32::MAX, min_age: 0.0 };

    /// Whether the condition may be met by a request of that cause and age in seconds.
    pub fn allows(&self, cause: Cause, age: f64) -> bool {
        self.min_age(cause).is_some_and(|min_age| age >= min_age)
    }

    /// The age in seconds below which the condition is never met with that cause; nothing where it never is.
    pub fn min_age(&self, cause: Cause) -> Option<f64> {
        (self.causes & 1 << cause.index() != 0).then_some(self.min_age)
    }

    pub(super) fn of(expression: &IdedExpr) -> Self {
        let Expr::Call(call) = &expression.expr else { return Self::ANYTHING };
        let [left, right] = call.args.as_slice() else { return Self::ANYTHING };
        match call.func_name.as_str() {
            operators::LOGICAL_AND => Self::of(left).and(Self::of(right)),
            operators::LOGICAL_OR => Self::of(left).or(Self::of(right)),
            operators::EQUALS => match (cause_and_text(left, right), cause_and_text(right, left)) {
                (Some(cause), _) | (_, Some(cause)) => Self { causes: bit(cause), ..Self::ANYTHING },
                _ => Self::ANYTHING,
            },
            operators::NOT_EQUALS => match (cause_and_text(left, right), cause_and_text(right, left)) {
                (Some(cause), _) | (_, Some(cause)) => Self { causes: !bit(cause), ..Self::ANYTHING },
                _ => Self::ANYTHING,
            },
            operators::IN => match &right.expr {
                Expr::List(list) => {
                    let causes: Option<Vec<&str>> =
                        list.elements.iter().map(|element| cause_and_text(left, element)).collect();
                    causes.map_or(Self::ANYTHING, |causes| Self {
                        causes: causes.into_iter().map(bit).fold(0, |all, one| all | one),
                        ..Self::ANYTHING
                    })
                }
                _ => Self::ANYTHING,
            },
            operators::GREATER | operators::GREATER_EQUALS => Self::older_than(left, right),
            operators::LESS | operators::LESS_EQUALS => Self::older_than(right, left),
            _ => Self::ANYTHING,
        }
    }

    fn older_than(age: &IdedExpr, limit: &IdedExpr) -> Self {
        let is_age = matches!(&age.expr, Expr::Ident(name) if Field::named(name).is_some_and(|field| field.is_age));
        let limit = match &limit.expr {
            Expr::Literal(LiteralValue::Double(limit)) => *limit.inner(),
            Expr::Literal(LiteralValue::Int(limit)) => *limit.inner() as f64,
            _ => return Self::ANYTHING,
        };
        if is_age { Self { min_age: limit.max(0.0), ..Self::ANYTHING } } else { Self::ANYTHING }
    }

    fn and(self, other: Self) -> Self {
        Self { causes: self.causes & other.causes, min_age: self.min_age.max(other.min_age) }
    }

    fn or(self, other: Self) -> Self {
        Self { causes: self.causes | other.causes, min_age: self.min_age.min(other.min_age) }
    }
}

/// The text that `cause` is compared with, when that is what the two are.
fn cause_and_text<'a>(field: &IdedExpr, value: &'a IdedExpr) -> Option<&'a str> {
    match (&field.expr, &value.expr) {
        (Expr::Ident(name), Expr::Literal(LiteralValue::String(text))) if name == "cause" => Some(text.inner()),
        _ => None,
    }
}

fn bit(cause: &str) -> u32 {
    Cause::ALL.iter().find(|known| known.name() == cause).map_or(0, |known| 1 << known.index())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::condition::Condition;

    fn prefilter(source: &str) -> Prefilter {
        Condition::compile(source).unwrap().prefilter()
    }

    #[test]
    fn conjunctions_narrow_and_disjunctions_widen() {
        let filter = prefilter("cause == 'Parked' && inflight_seconds > 60 && phase_seconds >= 90.5");
        assert_eq!(filter.min_age(Cause::Parked), Some(90.5));
        assert!(filter.allows(Cause::Parked, 91.0));
        assert!(!filter.allows(Cause::Parked, 90.0));
        assert!(!filter.allows(Cause::Unknown, 91.0));

        let filter = prefilter("(cause in ['Parked', 'Unknown'] && 5 < waiting_seconds) || cause == 'AbortIgnored'");
        assert!(filter.allows(Cause::AbortIgnored, 0.0));
        assert!(filter.allows(Cause::Unknown, 0.0), "one age bounds both sides");
        assert!(!filter.allows(Cause::RoomCollision, 100.0));
    }

    #[test]
    fn each_cause_has_a_bit_of_its_own() {
        for (place, cause) in Cause::ALL.into_iter().enumerate() {
            assert!(cause.index() == place && place < 32, "{cause}");
        }
    }

    #[test]
    fn what_it_does_not_understand_may_be_anything() {
        for source in [
            "true",
            "!(cause == 'Parked')",
            "paused ? inflight : inflight_seconds > 5",
            "inflight_seconds + 1.0 > 5",
            "server_waiting_timeout_seconds > 5",
            "inflight_seconds > -1",
        ] {
            assert_eq!(prefilter(source), Prefilter::ANYTHING, "{source}");
        }
        assert!(!prefilter("cause != 'Parked'").allows(Cause::Parked, 0.0));
    }
}
