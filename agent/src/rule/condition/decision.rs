//! The common conditions without CEL's interpreter, which allocates for each: `&&`, `||` and `!` over flags, over
//! fields compared with what is written in the rule, and over fields compared with fields. Everything else is left to CEL.

use cel::{
    IdedExpr,
    common::ast::{Expr, LiteralValue, operators},
};

use crate::rule::field::{Field, Kind, Subject, Value};

/// Integers up to here are doubles exactly: a comparison of both is then one of numbers.
const EXACT: u64 = 1 << 53;

/// A condition, as far as it is understood.
#[derive(Debug)]
pub(super) enum Decision {
    Flag(&'static Field),
    /// A text field that has, or has not, one of these values.
    OneOf {
        field: &'static Field,
        values: Vec<String>,
        is: bool,
    },
    Compare {
        left: Number,
        order: Order,
        right: Number,
    },
    Not(Box<Self>),
    Both(Box<[Self; 2]>),
    Either(Box<[Self; 2]>),
    Constant(bool),
    /// CEL has to say.
    Ask,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Less,
    LessOrEqual,
    Equal,
    NotEqual,
    GreaterOrEqual,
    Greater,
}

/// A number of seconds, or of things that are compared with a number of things.
#[derive(Debug)]
pub(super) enum Number {
    Field(&'static Field),
    Seconds(f64),
    Count(i64),
    /// A field and a number that is written: with only one field in it, it is never infinite minus infinite.
    Sum(&'static Field, f64),
}

impl Decision {
    /// A checked condition, understood as far as it goes.
    pub(super) fn of(expression: &IdedExpr) -> Self {
        let call = match &expression.expr {
            Expr::Literal(LiteralValue::Boolean(value)) => return Self::Constant(*value.inner()),
            Expr::Ident(name) => {
                return Field::named(name).filter(|field| field.kind == Kind::Flag).map_or(Self::Ask, Self::Flag);
            }
            Expr::Call(call) if call.target.is_none() => call,
            _ => return Self::Ask,
        };
        let order = match (call.func_name.as_str(), call.args.as_slice()) {
            (operators::LOGICAL_NOT, [operand]) => return Self::Not(Box::new(Self::of(operand))),
            (operators::LOGICAL_AND, [left, right]) => return Self::Both(Box::new([Self::of(left), Self::of(right)])),
            (operators::LOGICAL_OR, [left, right]) => return Self::Either(Box::new([Self::of(left), Self::of(right)])),
            (operators::IN, [field, list]) => return Self::membership(field, list).unwrap_or(Self::Ask),
            (operators::EQUALS, _) => Order::Equal,
            (operators::NOT_EQUALS, _) => Order::NotEqual,
            (operators::LESS, _) => Order::Less,
            (operators::LESS_EQUALS, _) => Order::LessOrEqual,
            (operators::GREATER, _) => Order::Greater,
            (operators::GREATER_EQUALS, _) => Order::GreaterOrEqual,
            _ => return Self::Ask,
        };
        let [left, right] = call.args.as_slice() else { return Self::Ask };
        let equality = Self::equality(left, right, order).or_else(|| Self::equality(right, left, order));
        equality.or_else(|| Self::comparison(left, right, order)).unwrap_or(Self::Ask)
    }

    fn membership(field: &IdedExpr, list: &IdedExpr) -> Option<Self> {
        let Expr::List(list) = &list.expr else { return None };
        let values = list.elements.iter().map(text).collect::<Option<Vec<_>>>()?;
        Some(Self::OneOf { field: text_field(field)?, values, is: true })
    }

    fn equality(field: &IdedExpr, value: &IdedExpr, order: Order) -> Option<Self> {
        let is = match order {
            Order::Equal => true,
            Order::NotEqual => false,
            _ => return None,
        };
        Some(Self::OneOf { field: text_field(field)?, values: vec![text(value)?], is })
    }

    fn comparison(left: &IdedExpr, right: &IdedExpr, order: Order) -> Option<Self> {
        let (left, right) = (Number::of(left)?, Number::of(right)?);
        Some(Self::Compare { left, order, right })
    }

    /// Whether the condition holds; nothing where CEL has to say. As in CEL, what decides a side decides the whole though
    /// the other side cannot be told.
    pub(super) fn decide(&self, subject: &Subject<'_>) -> Option<bool> {
        match self {
            Self::Constant(value) => Some(*value),
            Self::Flag(field) => match field.value(subject) {
                Value::Flag(flag) => Some(flag),
                _ => None,
            },
            Self::OneOf { field, values, is } => match field.value(subject) {
                Value::Text(text) => Some(values.iter().any(|value| value == text) == *is),
                _ => None,
            },
            Self::Compare { left, order, right } => order.holds(left.value(subject)?, right.value(subject)?),
            Self::Not(operand) => operand.decide(subject).map(|holds| !holds),
            Self::Both(operands) => Self::decide_both(operands, subject, false),
            Self::Either(operands) => Self::decide_both(operands, subject, true),
            Self::Ask => None,
        }
    }

    /// `deciding` is the value of either operand that is the value of the whole.
    fn decide_both(operands: &[Self; 2], subject: &Subject<'_>, deciding: bool) -> Option<bool> {
        let [left, right] = operands;
        let left = left.decide(subject);
        if left == Some(deciding) {
            return left;
        }
        let right = right.decide(subject);
        if right == Some(deciding) { right } else { left.and(right) }
    }
}

impl Number {
    fn of(expression: &IdedExpr) -> Option<Self> {
        match &expression.expr {
            Expr::Ident(name) => Field::named(name).filter(|field| field.kind != Kind::Text).map(Self::Field),
            Expr::Literal(LiteralValue::Double(value)) => Some(Self::Seconds(*value.inner())),
            Expr::Literal(LiteralValue::Int(value)) => Some(Self::Count(*value.inner())),
            Expr::Call(call) if call.func_name == operators::ADD => {
                let [left, right] = call.args.as_slice() else { return None };
                match (Self::of(left)?, Self::of(right)?) {
                    (Self::Field(field), Self::Seconds(value)) | (Self::Seconds(value), Self::Field(field)) => {
                        Some(Self::Sum(field, value))
                    }
                    _ => None,
                }
            }
            _ => None,
        }
    }

    fn value(&self, subject: &Subject<'_>) -> Option<Value<'static>> {
        match self {
            Self::Seconds(value) => Some(Value::Seconds(*value)),
            Self::Count(value) => Some(Value::Count(*value)),
            Self::Field(field) => match field.value(subject) {
                Value::Count(value) => Some(Value::Count(value)),
                Value::Seconds(value) => Some(Value::Seconds(value)),
                Value::Text(_) | Value::Flag(_) => None,
            },
            Self::Sum(field, value) => match field.value(subject) {
                Value::Seconds(seconds) => Some(Value::Seconds(seconds + value)),
                _ => None,
            },
        }
    }
}

impl Order {
    /// Whether `left` and `right` are in this order; nothing where CEL has to say.
    fn holds(self, left: Value<'_>, right: Value<'_>) -> Option<bool> {
        let ordering = match (left, right) {
            (Value::Count(left), Value::Count(right)) => left.cmp(&right),
            (Value::Seconds(left), Value::Seconds(right)) => left.partial_cmp(&right)?,
            (Value::Seconds(left), Value::Count(right)) if right.unsigned_abs() <= EXACT => {
                left.partial_cmp(&(right as f64))?
            }
            (Value::Count(left), Value::Seconds(right)) if left.unsigned_abs() <= EXACT => {
                (left as f64).partial_cmp(&right)?
            }
            _ => return None,
        };
        Some(match self {
            Self::Less => ordering.is_lt(),
            Self::LessOrEqual => ordering.is_le(),
            Self::Equal => ordering.is_eq(),
            Self::NotEqual => ordering.is_ne(),
            Self::GreaterOrEqual => ordering.is_ge(),
            Self::Greater => ordering.is_gt(),
        })
    }
}

fn text_field(expression: &IdedExpr) -> Option<&'static Field> {
    let Expr::Ident(name) = &expression.expr else { return None };
    Field::named(name).filter(|field| field.kind == Kind::Text)
}

fn text(expression: &IdedExpr) -> Option<String> {
    match &expression.expr {
        Expr::Literal(LiteralValue::String(text)) => Some(text.inner().to_owned()),
        _ => None,
    }
}
