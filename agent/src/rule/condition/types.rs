//! Types of conditions. CEL finds most typing errors only when it evaluates the part that has them, and calls
//! `phase == 3` false; this finds them when the rule is loaded.

use cel::{
    IdedExpr, Program,
    common::ast::{CallExpr, Expr, LiteralValue, operators},
};

use super::{ConditionError, place};
use crate::{
    problem::nearest,
    rule::field::{FIELDS, Field, Kind},
};

/// Checks that every name in `program` is a field, every operator fits its operands, and the whole is a bool.
///
/// # Errors
///
/// Everything that is wrong.
pub(super) fn check(program: &Program) -> Result<(), Vec<ConditionError>> {
    let mut checker = Checker { program, errors: Vec::new() };
    let root = program.expression();
    checker.want(root, &[Kind::Flag], "the condition");
    if checker.errors.is_empty() { Ok(()) } else { Err(checker.errors) }
}

struct Checker<'a> {
    program: &'a Program,
    errors: Vec<ConditionError>,
}

const NUMBERS: [Kind; 2] = [Kind::Count, Kind::Seconds];

impl Checker<'_> {
    /// Notes an error; an expression without a type has been complained about.
    fn error(&mut self, at: &IdedExpr, message: impl Into<String>) -> Option<Kind> {
        let (line, column) = place(self.program.source_info(), at.id);
        self.errors.push(ConditionError { line, column, message: message.into() });
        None
    }

    /// The type of `expression`, which must be one of `wanted`.
    fn want(&mut self, expression: &IdedExpr, wanted: &[Kind], what: &str) -> Option<Kind> {
        let kind = self.kind(expression)?;
        if wanted.contains(&kind) {
            return Some(kind);
        }
        let wanted: Vec<&str> = wanted.iter().map(|kind| kind.name()).collect();
        self.error(expression, format!("{what} must be {}, this is {}", wanted.join(" or "), kind.name()))
    }

    fn kind(&mut self, expression: &IdedExpr) -> Option<Kind> {
        match &expression.expr {
            Expr::Literal(literal) => match literal {
                LiteralValue::Boolean(_) => Some(Kind::Flag),
                LiteralValue::Int(_) => Some(Kind::Count),
                LiteralValue::Double(_) => Some(Kind::Seconds),
                LiteralValue::String(_) => Some(Kind::Text),
                LiteralValue::UInt(_) => self.error(expression, "no field is unsigned; write the number without `u`"),
                LiteralValue::Bytes(_) => self.error(expression, "no field is of bytes; write a string without `b`"),
                LiteralValue::Null => self
                    .error(expression, "no field is ever null: what is not known has a value, see the list of fields"),
            },
            Expr::Ident(name) => match Field::named(name) {
                Some(field) => Some(field.kind),
                None => {
                    let names: Vec<&str> = FIELDS.iter().map(|field| field.name).collect();
                    self.error(expression, format!("unknown field `{name}`; {}", nearest(name, &names)))
                }
            },
            Expr::Select(select) => {
                // An unknown name before the dot is the error to report, if it is one.
                let kind = self.kind(&select.operand)?;
                self.error(expression, format!("unknown member `{}`: a {} has none", select.field, kind.name()))
            }
            Expr::Call(call) => self.call(expression, call),
            Expr::List(_) => self.error(expression, "a list can only stand after `in`"),
            Expr::Map(_) | Expr::Struct(_) => self.error(expression, "maps and messages have no use in a condition"),
            Expr::Comprehension(_) | Expr::Unspecified => self.error(expression, "macros have no use in a condition"),
        }
    }

    fn call(&mut self, at: &IdedExpr, call: &CallExpr) -> Option<Kind> {
        let name = call.func_name.as_str();
        match (name, &call.target, call.args.as_slice()) {
            (operators::LOGICAL_AND | operators::LOGICAL_OR, None, [left, right]) => {
                let sign = sign(name);
                let left = self.want(left, &[Kind::Flag], &format!("what stands before `{sign}`"));
                let right = self.want(right, &[Kind::Flag], &format!("what stands after `{sign}`"));
                left.and(right)
            }
            (operators::LOGICAL_NOT, None, [operand]) => self.want(operand, &[Kind::Flag], "what stands after `!`"),
            (operators::NEGATE, None, [operand]) => self.want(operand, &NUMBERS, "what stands after `-`"),
            (operators::CONDITIONAL, None, [condition, yes, no]) => {
                self.want(condition, &[Kind::Flag], "what stands before `?`");
                let yes = self.kind(yes);
                let (yes, no_kind) = (yes?, self.kind(no)?);
                if yes != no_kind {
                    return self.error(no, format!("both sides of `:` must have one type; they are {} and {}", yes.name(), no_kind.name()));
                }
                Some(yes)
            }
            (operators::EQUALS | operators::NOT_EQUALS, None, [left, right]) => self.equality(at, left, right),
            (operators::LESS | operators::LESS_EQUALS | operators::GREATER | operators::GREATER_EQUALS, None, [left, right]) => {
                let sign = sign(name);
                let left_kind = self.kind(left);
                if left_kind == Some(Kind::Text) && self.kind(right) == Some(Kind::Text) {
                    return self.error(at, format!("`{sign}` compares numbers; strings have no useful order (\"0.5.9\" would come after \"0.5.22\")"));
                }
                let left = self.number(left_kind, left, &format!("what stands before `{sign}`"));
                let right = self.want(right, &NUMBERS, &format!("what stands after `{sign}`"));
                left.and(right).and(Some(Kind::Flag))
            }
            (operators::ADD | operators::SUBSTRACT | operators::MULTIPLY | operators::DIVIDE | operators::MODULO, None, [left, right]) => {
                let sign = sign(name);
                let left_kind = self.want(left, &NUMBERS, &format!("what stands before `{sign}`"));
                let right_kind = self.want(right, &NUMBERS, &format!("what stands after `{sign}`"));
                let (left_kind, right_kind) = (left_kind?, right_kind?);
                if left_kind != right_kind {
                    return self.error(at, format!("`{sign}` needs two of one type, not {} and {}; write 2.0 for 2, or double(…)", left_kind.name(), right_kind.name()));
                }
                if name == operators::MODULO && left_kind != Kind::Count {
                    return self.error(at, "`%` needs two ints");
                }
                Some(left_kind)
            }
            (operators::IN, None, [item, list]) => self.membership(item, list),
            (operators::INDEX, None, _) => self.error(at, "no field is a list: nothing can be indexed"),
            ("contains" | "startsWith" | "endsWith", Some(target), [part]) => {
                let target = self.want(target, &[Kind::Text], &format!("what stands before `.{name}`"));
                let part = self.want(part, &[Kind::Text], &format!("the argument of {name}"));
                target.and(part).and(Some(Kind::Flag))
            }
            ("size", None, [text]) => self.want(text, &[Kind::Text], "the argument of size").and(Some(Kind::Count)),
            ("size", Some(text), []) => self.want(text, &[Kind::Text], "the argument of size").and(Some(Kind::Count)),
            ("double", None, [number]) => self.want(number, &NUMBERS, "the argument of double").and(Some(Kind::Seconds)),
            ("int", None, [number]) => self.want(number, &NUMBERS, "the argument of int").and(Some(Kind::Count)),
            ("has", None, [_]) => self.error(at, "`has` is not needed: every field is always there"),
            ("all" | "exists" | "exists_one" | "map" | "filter", Some(_), _) => {
                self.error(at, format!("the macro `{name}` has no use in a condition: no field is a list"))
            }
            _ => self.error(at, format!("unknown function `{}` with {} arguments; known are contains, startsWith, endsWith, size, double, int", name.trim_matches('_'), call.args.len())),
        }
    }

    fn number(&mut self, kind: Option<Kind>, at: &IdedExpr, what: &str) -> Option<Kind> {
        let kind = kind?;
        if NUMBERS.contains(&kind) {
            return Some(kind);
        }
        self.error(at, format!("{what} must be int or double, this is {}", kind.name()))
    }

    fn equality(&mut self, at: &IdedExpr, left: &IdedExpr, right: &IdedExpr) -> Option<Kind> {
        let (left_kind, right_kind) = (self.kind(left), self.kind(right));
        let (left_kind, right_kind) = (left_kind?, right_kind?);
        if left_kind != right_kind && !(NUMBERS.contains(&left_kind) && NUMBERS.contains(&right_kind)) {
            return self.error(at, format!("a {} never equals a {}", left_kind.name(), right_kind.name()));
        }
        self.possible(left, right);
        self.possible(right, left);
        Some(Kind::Flag)
    }

    fn membership(&mut self, item: &IdedExpr, list: &IdedExpr) -> Option<Kind> {
        let kind = self.kind(item);
        let Expr::List(list) = &list.expr else {
            return self.error(list, "after `in` there must be a list, such as [\"high\", \"low\"]");
        };
        for element in &list.elements {
            let (Some(kind), Some(element_kind)) = (kind, self.kind(element)) else { continue };
            let comparable = kind == element_kind || (NUMBERS.contains(&kind) && NUMBERS.contains(&element_kind));
            if comparable {
                self.possible(item, element);
            } else {
                self.error(element, format!("a {} is never in a list with a {}", kind.name(), element_kind.name()));
            }
        }
        kind.and(Some(Kind::Flag))
    }

    /// Complains when `field` is a field that can never have the literal `value`.
    fn possible(&mut self, field: &IdedExpr, value: &IdedExpr) {
        let (Expr::Ident(name), Expr::Literal(LiteralValue::String(text))) = (&field.expr, &value.expr) else { return };
        let values = Field::named(name).map(|field| (field.values)()).unwrap_or_default();
        let text: &str = text.inner();
        if !values.is_empty() && !values.contains(&text) {
            self.error(value, format!("`{name}` is never \"{text}\"; {}", nearest(text, &values)));
        }
    }
}

/// How an operator is written: CEL calls `&&` `_&&_`.
fn sign(operator: &str) -> &str {
    operator.trim_matches('_')
}
