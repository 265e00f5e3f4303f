//! Expectations, and computed amounts and counts. An expression is parsed once, with its units
//! checked, and evaluated exactly. The caller decides which quantities exist: it turns names into
//! its own type, a [`Quantity`].
//!
//! ```text
//! EXPECTATION = SUM ( == | != | < | <= | > | >= ) SUM ( +- TOLERANCE )? SUM         = PRODUCT ( (
//! + | - ) PRODUCT )* PRODUCT     = VALUE ( ( * | / ) VALUE )* VALUE       = name | number |
//! percentage | size | duration          reserved.peak, 1.1, 20%, 400MiB, 5ms
//!             | ( SUM ) | min( SUM, … ) | max( SUM, … ) | function( name )
//! TOLERANCE   = percentage | number | size | duration                 a percentage is of the right
//! side
//! ```

mod parse;
mod value;

use std::convert::Infallible;

use derive_more::Display;
use harness_allocator::units::Bytes;
use num_traits::{One, Zero};

pub use parse::{
    ExpressionError, Resolve, ResolvedName, Unresolved, parse_amount, parse_constant, parse_count,
    parse_expectation, parse_formula,
};
pub use value::{ArithmeticError, Dimension, Number, Operator, Unit, Value};

pub const MAX_TERMS: usize = 64;
pub const MAX_DEPTH: usize = 16;

/// The value of a name, which is known only when the expression is evaluated.
pub trait Quantity {
    fn dimension(&self) -> Dimension;
}

#[derive(Clone, Debug, PartialEq, Eq, Display)]
#[display("{text}")]
pub struct ExpressionOf<Q> {
    pub(in crate::expression) node: Node<Q>,
    /// `None` if it consists of zeros only, which fit every unit.
    pub(in crate::expression) dimension: Option<Dimension>,
    /// As the file writes it.
    pub(in crate::expression) text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::expression) enum Node<Q> {
    Literal(Number),
    Quantity(Q),
    Operation {
        operator: Operator,
        left: Box<ExpressionOf<Q>>,
        right: Box<ExpressionOf<Q>>,
    },
    Choice(Choice, Vec<ExpressionOf<Q>>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::expression) enum Choice {
    Least,
    Greatest,
}

impl<Q> ExpressionOf<Q> {
    /// Computes the value. `value` is called once per quantity, from left to right.
    pub fn evaluate<E>(
        &self,
        value: &mut impl FnMut(&Q) -> Result<Number, E>,
    ) -> Result<Number, EvaluateError<E>> {
        match &self.node {
            Node::Literal(number) => Ok(*number),
            Node::Quantity(quantity) => value(quantity).map_err(EvaluateError::LookUp),
            Node::Operation {
                operator,
                left,
                right,
            } => {
                let (first, second) = (left.evaluate(value)?, right.evaluate(value)?);
                if *operator == Operator::Divide && second.is_zero() {
                    return Err(ArithmeticError::DivisionByZero(self.text.clone()).into());
                }
                operator
                    .apply(&first, &second)
                    .ok_or_else(|| ArithmeticError::Overflow.into())
            }
            Node::Choice(choice, all) => {
                let numbers: Vec<Number> = all
                    .iter()
                    .map(|one| one.evaluate(value))
                    .collect::<Result<_, _>>()?;
                let chosen = match choice {
                    Choice::Least => numbers.into_iter().min(),
                    Choice::Greatest => numbers.into_iter().max(),
                };
                chosen.ok_or_else(|| ArithmeticError::Overflow.into())
            }
        }
    }

    pub fn quantities(&self) -> Vec<&Q> {
        match &self.node {
            Node::Literal(_) => Vec::new(),
            Node::Quantity(quantity) => vec![quantity],
            Node::Operation { left, right, .. } => [left.quantities(), right.quantities()].concat(),
            Node::Choice(_, all) => all.iter().flat_map(Self::quantities).collect(),
        }
    }

    pub fn dimension(&self) -> Dimension {
        self.dimension.unwrap_or_default()
    }

    pub const fn is_computed(&self) -> bool {
        !matches!(self.node, Node::Literal(_) | Node::Quantity(_))
    }

    /// Its value, if it has no quantities.
    fn constant(&self) -> Option<Result<Number, ArithmeticError>> {
        if !self.quantities().is_empty() {
            return None;
        }
        match self.evaluate(&mut |_| Ok::<_, Infallible>(Number::one())) {
            Ok(number) => Some(Ok(number)),
            Err(EvaluateError::Arithmetic(error)) => Some(Err(error)),
            Err(EvaluateError::LookUp(never)) => match never {},
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EvaluateError<E> {
    /// The lookup of a quantity failed.
    #[error("{0}")]
    LookUp(E),
    /// Dividing by zero, or overflow.
    #[error(transparent)]
    Arithmetic(#[from] ArithmeticError),
}

#[derive(Clone, Debug, PartialEq, Eq, Display)]
#[display("{text}")]
pub struct ExpectationOf<Q> {
    pub left: ExpressionOf<Q>,
    pub comparison: Comparison,
    pub right: ExpressionOf<Q>,
    /// Largest accepted distance between both sides, for `==` and `!=`.
    pub tolerance: Option<Tolerance>,
    /// As the file writes it.
    pub text: String,
}

/// How far two sides may differ and still count as equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tolerance {
    /// A share of the right side: 1/20 for `5%`.
    Share(Number),
    /// An amount in the unit of both sides.
    Amount(Number),
}

impl<Q> ExpectationOf<Q> {
    /// Compares both sides. `value` is called once per quantity, in order.
    pub fn evaluate<E>(
        &self,
        mut value: impl FnMut(&Q) -> Result<Number, E>,
    ) -> Result<Evaluation, EvaluateError<E>> {
        let (left, right) = (
            self.left.evaluate(&mut value)?,
            self.right.evaluate(&mut value)?,
        );
        let holds = match self.tolerance {
            None => self.comparison.holds(&left, &right),
            Some(tolerance) => {
                let is_near = is_near(&left, &right, tolerance).ok_or(ArithmeticError::Overflow)?;
                is_near == (self.comparison == Comparison::Equal)
            }
        };
        let dimension = self.dimension();
        let value = |number| Value { number, dimension };
        Ok(Evaluation {
            left: value(left),
            right: value(right),
            holds,
        })
    }

    pub fn dimension(&self) -> Dimension {
        self.left
            .dimension
            .or(self.right.dimension)
            .unwrap_or_default()
    }

    pub fn quantities(&self) -> impl Iterator<Item = &Q> {
        self.left
            .quantities()
            .into_iter()
            .chain(self.right.quantities())
    }

    /// Returns whether it is written in percent. Its values are then shown in percent too.
    pub fn is_in_percent(&self) -> bool {
        self.dimension() == Dimension::NUMBER
            && [&self.left.text, &self.right.text]
                .iter()
                .any(|text| text.contains('%'))
    }
}

fn is_near(left: &Number, right: &Number, tolerance: Tolerance) -> Option<bool> {
    let absolute = |number: Number| {
        if number < Number::from_integer(0) {
            -number
        } else {
            number
        }
    };
    let distance = absolute(Operator::Subtract.apply(left, right)?);
    let most = match tolerance {
        Tolerance::Amount(amount) => amount,
        Tolerance::Share(share) => Operator::Multiply.apply(&absolute(*right), &share)?,
    };
    Some(distance <= most)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evaluation {
    pub left: Value,
    pub right: Value,
    pub holds: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    Equal,
    NotEqual,
    Less,
    AtMost,
    Greater,
    AtLeast,
}

impl Comparison {
    /// Every operator with its sign. A sign that starts with another sign comes first.
    const SIGNS: [(&'static str, Self); 6] = [
        ("==", Self::Equal),
        ("!=", Self::NotEqual),
        ("<=", Self::AtMost),
        (">=", Self::AtLeast),
        ("<", Self::Less),
        (">", Self::Greater),
    ];

    pub fn holds(self, left: &Number, right: &Number) -> bool {
        match self {
            Self::Equal => left == right,
            Self::NotEqual => left != right,
            Self::Less => left < right,
            Self::AtMost => left <= right,
            Self::Greater => left > right,
            Self::AtLeast => left >= right,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Display)]
pub enum AmountOf<Q> {
    /// Known before the run.
    Fixed(Bytes),
    /// Computed when the step runs.
    Computed(ExpressionOf<Q>),
}

impl<Q> AmountOf<Q> {
    pub fn quantities(&self) -> Vec<&Q> {
        match self {
            Self::Fixed(_) => Vec::new(),
            Self::Computed(expression) => expression.quantities(),
        }
    }

    /// Computes the amount, rounded down to whole bytes.
    pub fn evaluate<E>(
        &self,
        mut value: impl FnMut(&Q) -> Result<Number, E>,
    ) -> Result<Bytes, AmountError<E>> {
        match self {
            Self::Fixed(bytes) => Ok(*bytes),
            Self::Computed(expression) => {
                let bytes = expression.evaluate(&mut value)?.floor().to_integer();
                u64::try_from(bytes)
                    .map(Bytes)
                    .map_err(|_| AmountError::OutOfRange(bytes))
            }
        }
    }
}

/// Why an amount could not be computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AmountError<E> {
    #[error(transparent)]
    Evaluate(#[from] EvaluateError<E>),
    /// The amount is negative, or needs more than 64 bits.
    #[error("the amount evaluates to {0} B, which is not between 0 and 2^64 - 1")]
    OutOfRange(i128),
}

#[cfg(test)]
mod tests;
