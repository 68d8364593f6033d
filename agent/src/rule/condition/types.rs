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
            Expr::Literal(literal) => self.literal(expression, literal),
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
            Expr::Call(call) => match (&call.target, call.args.as_slice()) {
                (None, [operand]) => self.unary(expression, call, operand),
                (None, [left, right]) => self.binary(expression, call, left, right),
                (None, [condition, yes, no]) if call.func_name == operators::CONDITIONAL => {
                    self.conditional(condition, yes, no)
                }
                (Some(target), arguments) => self.member(expression, call, target, arguments),
                _ => self.unknown_function(expression, call),
            },
            Expr::List(_) => self.error(expression, "a list can only stand after `in`"),
            Expr::Map(_) | Expr::Struct(_) => self.error(expression, "maps and messages have no use in a condition"),
            Expr::Comprehension(_) | Expr::Unspecified => self.error(expression, "macros have no use in a condition"),
        }
    }

    fn literal(&mut self, at: &IdedExpr, literal: &LiteralValue) -> Option<Kind> {
        match literal {
            LiteralValue::Boolean(_) => Some(Kind::Flag),
            LiteralValue::Int(_) => Some(Kind::Count),
            LiteralValue::Double(_) => Some(Kind::Seconds),
            LiteralValue::String(_) => Some(Kind::Text),
            LiteralValue::UInt(_) => self.error(at, "no field is unsigned; write the number without `u`"),
            LiteralValue::Bytes(_) => self.error(at, "no field is of bytes; write a string without `b`"),
            LiteralValue::Null => self.error(at, "no field is ever null: what is not known has a value of its own"),
        }
    }

    fn unary(&mut self, at: &IdedExpr, call: &CallExpr, operand: &IdedExpr) -> Option<Kind> {
        match call.func_name.as_str() {
            operators::LOGICAL_NOT => self.want(operand, &[Kind::Flag], "what stands after `!`"),
            operators::NEGATE => self.want(operand, &NUMBERS, "what stands after `-`"),
            "size" => self.want(operand, &[Kind::Text], "the argument of size").and(Some(Kind::Count)),
            "double" => self.want(operand, &NUMBERS, "the argument of double").and(Some(Kind::Seconds)),
            "int" => self.want(operand, &NUMBERS, "the argument of int").and(Some(Kind::Count)),
            "has" => self.error(at, "`has` is not needed: every field is always there"),
            _ => self.unknown_function(at, call),
        }
    }

    fn binary(&mut self, at: &IdedExpr, call: &CallExpr, left: &IdedExpr, right: &IdedExpr) -> Option<Kind> {
        let name = call.func_name.as_str();
        match name {
            operators::LOGICAL_AND | operators::LOGICAL_OR => {
                self.both(name, left, right, &[Kind::Flag]).map(|_| Kind::Flag)
            }
            operators::EQUALS | operators::NOT_EQUALS => self.equality(at, left, right),
            operators::LESS | operators::LESS_EQUALS | operators::GREATER | operators::GREATER_EQUALS => {
                let (left, right) = self.both(name, left, right, &[Kind::Count, Kind::Seconds, Kind::Text])?;
                match (left, right) {
                    (Kind::Text, Kind::Text) => {
                        self.error(at, "strings have no useful order: \"0.5.9\" would come after \"0.5.22\"")
                    }
                    (Kind::Text, number) | (number, Kind::Text) => {
                        self.error(at, format!("string and {} cannot be compared", number.name()))
                    }
                    _ => Some(Kind::Flag),
                }
            }
            operators::ADD | operators::SUBSTRACT | operators::MULTIPLY | operators::DIVIDE | operators::MODULO => {
                let (left, right) = self.both(name, left, right, &NUMBERS)?;
                let sign = sign(name);
                if left != right {
                    let kinds = format!("{} and {}", left.name(), right.name());
                    return self.error(at, format!("`{sign}` does not take {kinds}; write 2.0 for 2, or double(…)"));
                }
                if name == operators::MODULO && left != Kind::Count {
                    return self.error(at, "`%` takes two ints");
                }
                Some(left)
            }
            operators::IN => self.membership(left, right),
            operators::INDEX => self.error(at, "no field is a list: nothing can be indexed"),
            _ => self.unknown_function(at, call),
        }
    }

    /// The types of both operands, which must be among `wanted`.
    fn both(&mut self, name: &str, left: &IdedExpr, right: &IdedExpr, wanted: &[Kind]) -> Option<(Kind, Kind)> {
        let sign = sign(name);
        let left = self.want(left, wanted, &format!("what stands before `{sign}`"));
        let right = self.want(right, wanted, &format!("what stands after `{sign}`"));
        left.zip(right)
    }

    fn conditional(&mut self, condition: &IdedExpr, yes: &IdedExpr, no: &IdedExpr) -> Option<Kind> {
        self.want(condition, &[Kind::Flag], "what stands before `?`");
        let (yes_kind, no_kind) = (self.kind(yes), self.kind(no));
        let (yes_kind, no_kind) = yes_kind.zip(no_kind)?;
        if yes_kind != no_kind {
            let kinds = format!("{} and {}", yes_kind.name(), no_kind.name());
            return self.error(no, format!("both sides of `:` must have one type, these are {kinds}"));
        }
        Some(yes_kind)
    }

    fn member(&mut self, at: &IdedExpr, call: &CallExpr, target: &IdedExpr, arguments: &[IdedExpr]) -> Option<Kind> {
        let name = call.func_name.as_str();
        match (name, arguments) {
            ("contains" | "startsWith" | "endsWith", [part]) => {
                let target = self.want(target, &[Kind::Text], &format!("what stands before `.{name}`"));
                let part = self.want(part, &[Kind::Text], &format!("the argument of {name}"));
                target.and(part).and(Some(Kind::Flag))
            }
            ("size", []) => self.want(target, &[Kind::Text], "what stands before `.size`").and(Some(Kind::Count)),
            ("all" | "exists" | "exists_one" | "map" | "filter", _) => {
                self.error(at, format!("the macro `{name}` has no use in a condition: no field is a list"))
            }
            _ => self.unknown_function(at, call),
        }
    }

    fn unknown_function(&mut self, at: &IdedExpr, call: &CallExpr) -> Option<Kind> {
        let (name, arguments) = (sign(&call.func_name), call.args.len());
        let known = "known are contains, startsWith, endsWith, size, double and int";
        self.error(at, format!("unknown function `{name}` of {arguments} arguments; {known}"))
    }

    fn equality(&mut self, at: &IdedExpr, left: &IdedExpr, right: &IdedExpr) -> Option<Kind> {
        let (left_kind, right_kind) = (self.kind(left), self.kind(right));
        let (left_kind, right_kind) = left_kind.zip(right_kind)?;
        if !comparable(left_kind, right_kind) {
            return self.error(at, format!("{} and {} are never equal", left_kind.name(), right_kind.name()));
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
            let Some((kind, element_kind)) = kind.zip(self.kind(element)) else { continue };
            if comparable(kind, element_kind) {
                self.possible(item, element);
            } else {
                self.error(element, format!("{} and {} are never equal", kind.name(), element_kind.name()));
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

fn comparable(left: Kind, right: Kind) -> bool {
    left == right || (NUMBERS.contains(&left) && NUMBERS.contains(&right))
}

/// How an operator is written: CEL calls `&&` `_&&_`.
fn sign(operator: &str) -> &str {
    operator.trim_matches('_')
}
