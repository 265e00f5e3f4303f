//! Expectations: comparisons of sums of metrics and literals, parsed once, with units checked, evaluated in 128 bits. Which metrics there are
//! is up to the caller, who turns names into a type of their own: a [`Quantity`].
//!
//! ```text
//! EXPECTATION = SUM ( == | != | < | <= | > | >= ) SUM
//! SUM         = TERM ( ( + | - ) TERM )*
//! TERM        = metric | integer | size | duration          reserved_bytes.all.peak, 3, 400MiB, 5ms
//! ```

use std::fmt;

use harness_allocator::units::{Bytes, Nanos, ParseBytesError};

/// What a name in an expression stands for: something with a value that is not known before the expression is evaluated.
pub trait Quantity {
    /// What its values count.
    fn unit(&self) -> Unit;
}

/// What a value counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Pieces.
    Count,
    /// Nanoseconds on the device's clock.
    Time,
}

impl Unit {
    /// The noun for it.
    #[must_use]
    pub const fn noun(self) -> &'static str {
        match self {
            Self::Bytes => "an amount of memory",
            Self::Count => "a count",
            Self::Time => "a time",
        }
    }

    /// The word in tables.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Count => "count",
            Self::Time => "ns",
        }
    }
}

/// Something that should hold: one comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expectation<Q> {
    /// What stands on the left.
    pub left: Sum<Q>,
    /// How the two compare.
    pub comparison: Comparison,
    /// What stands on the right.
    pub right: Sum<Q>,
    /// As the scenario says it.
    pub text: String,
}

impl<Q> Expectation<Q> {
    /// Looks every metric up once, in order, and compares.
    ///
    /// # Errors
    /// Whatever the look-up fails with.
    pub fn evaluate<E>(&self, mut value: impl FnMut(&Q) -> Result<u64, E>) -> Result<Evaluation, E> {
        let left = self.left.evaluate(&mut value)?;
        let right = self.right.evaluate(&mut value)?;
        Ok(Evaluation { left, right, unit: self.unit(), holds: self.comparison.holds(left, right) })
    }

    /// What both sides are; [`Unit::Count`] where the literals leave it open.
    #[must_use]
    pub fn unit(&self) -> Unit {
        self.left.unit.or(self.right.unit).unwrap_or(Unit::Count)
    }

    /// The metrics in it, in order.
    pub fn metrics(&self) -> impl Iterator<Item = &Q> {
        self.left.metrics().chain(self.right.metrics())
    }
}

impl<Q> fmt::Display for Expectation<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// An expectation, looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evaluation {
    /// What the left side came to.
    pub left: i128,
    /// What the right side came to.
    pub right: i128,
    /// What both are.
    pub unit: Unit,
    /// Whether the comparison holds.
    pub holds: bool,
}

/// How two sums compare.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// `==`
    Equal,
    /// `!=`
    NotEqual,
    /// `<`
    Less,
    /// `<=`
    AtMost,
    /// `>`
    Greater,
    /// `>=`
    AtLeast,
}

impl Comparison {
    /// The ones there are, each with its sign; a sign that begins with another stands before it.
    const SIGNS: [(&'static str, Self); 6] =
        [("==", Self::Equal), ("!=", Self::NotEqual), ("<=", Self::AtMost), (">=", Self::AtLeast), ("<", Self::Less), (">", Self::Greater)];

    /// Whether it holds.
    #[must_use]
    pub const fn holds(self, left: i128, right: i128) -> bool {
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

/// Metrics and literals, added and subtracted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sum<Q> {
    /// From left to right; the first is never subtracted.
    pub terms: Vec<(Sign, Term<Q>)>,
    /// What it is; `None` where it is made of plain integers only, which fit everything.
    pub unit: Option<Unit>,
}

impl<Q> Sum<Q> {
    /// Looks every metric up once, in order, and adds up. No sum of the at most [`MAX_TERMS`] 64-bit terms leaves 128 bits.
    ///
    /// # Errors
    /// Whatever the look-up fails with.
    pub fn evaluate<E>(&self, mut value: impl FnMut(&Q) -> Result<u64, E>) -> Result<i128, E> {
        let mut sum = 0_i128;
        for (sign, term) in &self.terms {
            let term = match term {
                Term::Metric(metric) => i128::from(value(metric)?),
                Term::Literal(number, _) => i128::from(*number),
            };
            match sign {
                Sign::Plus => sum += term,
                Sign::Minus => sum -= term,
            }
        }
        Ok(sum)
    }

    fn metrics(&self) -> impl Iterator<Item = &Q> {
        self.terms.iter().filter_map(|(_, term)| match term {
            Term::Metric(metric) => Some(metric),
            Term::Literal(..) => None,
        })
    }
}

/// Whether a term is added or subtracted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// Added.
    Plus,
    /// Subtracted.
    Minus,
}

/// One term of a sum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Term<Q> {
    /// To be looked up.
    Metric(Q),
    /// A number and what it is; a plain integer fits everything.
    Literal(u64, Option<Unit>),
}

/// An amount of memory that may depend on what happened before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Amount<Q> {
    /// Known beforehand.
    Fixed(Bytes),
    /// Computed when the step runs; the text is as the scenario says it.
    Computed {
        /// Bytes, as a sum.
        sum: Sum<Q>,
        /// As the scenario says it.
        text: String,
    },
}

impl<Q> Amount<Q> {
    /// The metrics in it, in order.
    pub fn metrics(&self) -> impl Iterator<Item = &Q> {
        let sum = match self {
            Self::Fixed(_) => None,
            Self::Computed { sum, .. } => Some(sum),
        };
        sum.into_iter().flat_map(Sum::metrics)
    }

    /// Looks every metric up once, in order, and adds up.
    ///
    /// # Errors
    /// [`AmountError::OutOfRange`], or whatever the look-up fails with.
    pub fn evaluate<E>(&self, value: impl FnMut(&Q) -> Result<u64, E>) -> Result<Bytes, AmountError<E>> {
        match self {
            Self::Fixed(bytes) => Ok(*bytes),
            Self::Computed { sum, .. } => {
                let bytes = sum.evaluate(value).map_err(AmountError::LookUp)?;
                u64::try_from(bytes).map(Bytes).map_err(|_| AmountError::OutOfRange(bytes))
            }
        }
    }
}

/// Why an amount could not be computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AmountError<E> {
    /// A metric could not be looked up.
    #[error("{0}")]
    LookUp(E),
    /// The sum came out negative, or beyond 64 bits.
    #[error("the amount comes to {0} B, which is not between 0 and 2^64 - 1")]
    OutOfRange(i128),
}

impl<Q> fmt::Display for Amount<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(bytes) => bytes.fmt(f),
            Self::Computed { text, .. } => f.write_str(text),
        }
    }
}

/// Most terms that one sum may have.
pub const MAX_TERMS: usize = 64;

/// A mistake in an expression and the piece to blame, in characters from its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpressionError {
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub help: String,
    /// Where the piece begins, in characters from the start of the expression.
    pub start: usize,
    /// Its length in characters.
    pub length: usize,
}

/// Why a name is no metric: what is wrong, and what to do.
pub type Unresolved = (String, String);

/// Turns a name into what it stands for.
pub type Resolve<'a, Q> = &'a dyn Fn(&str) -> Result<Q, Unresolved>;

const FORMS: &str = "write a comparison of two sums with ==, !=, <, <=, > or >=, as in `reserved_bytes.all.peak <= 1GiB` or `a.device.used - start.device.used == 400MiB`";

/// Parses an expectation. Linear in the length of the text, look-ups apart.
///
/// # Errors
/// [`ExpressionError`]: it cannot be read, names what does not exist, mixes units, or checks nothing.
pub fn parse_expectation<Q: Quantity + PartialEq>(text: &str, resolve: Resolve<'_, Q>) -> Result<Expectation<Q>, ExpressionError> {
    let mut parser = Parser::new(text, FORMS, resolve)?;
    let (left, _) = parser.sum()?;
    let Some(Token { kind: TokenKind::Comparison(comparison), .. }) = parser.next() else {
        return Err(parser.unexpected("a comparison", FORMS));
    };
    let (right, right_at) = parser.sum()?;
    parser.finish()?;
    if let (Some(a), Some(b)) = (left.unit, right.unit)
        && a != b
    {
        return Err(mismatch(right_at, a, b));
    }
    let expectation = Expectation { left, comparison, right, text: text.trim().to_owned() };
    let whole = (0, text.chars().count());
    if expectation.metrics().next().is_none() {
        return Err(error(whole, "no metric in this expectation: it can never change", FORMS));
    }
    if expectation.left.terms == expectation.right.terms {
        return Err(error(whole, "both sides of this expectation are the same: it checks nothing", FORMS));
    }
    Ok(expectation)
}

/// Parses a size, or a sum of bytes. Linear in the length of the text, look-ups apart.
///
/// # Errors
/// [`ExpressionError`]: it cannot be read, names what does not exist, or is no amount of memory.
pub fn parse_amount<Q: Quantity>(text: &str, resolve: Resolve<'_, Q>) -> Result<Amount<Q>, ExpressionError> {
    const HELP: &str = "write a size, as in `400MiB`, or a sum with metrics, as in `storm.failed_request` or `device.free - 2MiB`";
    if let Err(negative @ ParseBytesError::Negative(_)) = Bytes::parse(text) {
        return Err(error((0, text.chars().count()), negative.to_string(), HELP));
    }
    let mut parser = Parser::new(text, HELP, resolve)?;
    let (sum, at) = parser.sum()?;
    parser.finish()?;
    if let Some(unit) = sum.unit.filter(|&unit| unit != Unit::Bytes) {
        return Err(error(at, format!("an amount of memory is wanted here, and this is {}", unit.noun()), HELP));
    }
    if sum.metrics().next().is_some() {
        return Ok(Amount::Computed { sum, text: text.trim().to_owned() });
    }
    match sum.evaluate(|_| Ok::<_, std::convert::Infallible>(0)) {
        Ok(bytes) => match u64::try_from(bytes) {
            Ok(bytes) => Ok(Amount::Fixed(Bytes(bytes))),
            Err(_) => Err(error(at, format!("this comes to {bytes} B, and a size is 0 or more and below 16 EiB"), HELP)),
        },
        Err(never) => match never {},
    }
}

type Range = (usize, usize);

fn error((start, length): Range, message: impl Into<String>, help: &str) -> ExpressionError {
    ExpressionError { message: message.into(), help: help.to_owned(), start, length }
}

fn mismatch(at: Range, first: Unit, second: Unit) -> ExpressionError {
    let message = format!("{} cannot be put beside {}", second.noun(), first.noun());
    error(at, message, "bytes go with bytes, counts with counts, times with times; a plain integer goes with all of them")
}

#[derive(Clone, Debug)]
struct Token {
    kind: TokenKind,
    at: Range,
}

#[derive(Clone, Debug)]
enum TokenKind {
    Name(String),
    Literal(u64, Option<Unit>),
    Sign(Sign),
    Comparison(Comparison),
}

struct Parser<'a, Q> {
    tokens: std::iter::Peekable<std::vec::IntoIter<Token>>,
    /// The last token read, or where one is missing.
    last: Range,
    last_text: Option<String>,
    text: Vec<char>,
    /// What is accepted here.
    forms: &'static str,
    resolve: Resolve<'a, Q>,
}

impl<'a, Q: Quantity> Parser<'a, Q> {
    fn new(text: &str, forms: &'static str, resolve: Resolve<'a, Q>) -> Result<Self, ExpressionError> {
        let text: Vec<char> = text.chars().collect();
        let tokens = tokens(&text, forms)?.into_iter().peekable();
        Ok(Self { tokens, last: (0, 1), last_text: None, text, forms, resolve })
    }

    fn next(&mut self) -> Option<Token> {
        let token = self.tokens.next();
        self.last = token.as_ref().map_or((self.text.len().saturating_sub(1), 1), |token| token.at);
        self.last_text = token.as_ref().map(|token| self.text[token.at.0..token.at.0 + token.at.1].iter().collect());
        token
    }

    fn unexpected(&self, wanted: &str, help: &str) -> ExpressionError {
        match &self.last_text {
            Some(text) => error(self.last, format!("`{text}` stands where {wanted} is wanted"), help),
            None => error(self.last, format!("the expression ends where {wanted} is wanted"), help),
        }
    }

    fn sum(&mut self) -> Result<(Sum<Q>, Range), ExpressionError> {
        let mut sum = Sum { terms: Vec::new(), unit: None };
        let mut sign = Sign::Plus;
        let start = self.tokens.peek().map_or(0, |token| token.at.0);
        loop {
            let term = self.term()?;
            let unit = match &term {
                Term::Metric(metric) => Some(metric.unit()),
                Term::Literal(_, unit) => *unit,
            };
            match (sum.unit, unit) {
                (Some(a), Some(b)) if a != b => return Err(mismatch(self.last, a, b)),
                (None, Some(_)) => sum.unit = unit,
                _ => {}
            }
            sum.terms.push((sign, term));
            if sum.terms.len() > MAX_TERMS {
                return Err(error(self.last, format!("more than {MAX_TERMS} terms in one sum"), self.forms));
            }
            match self.tokens.peek() {
                Some(&Token { kind: TokenKind::Sign(next), .. }) => sign = next,
                _ => return Ok((sum, (start, self.last.0 + self.last.1 - start))),
            }
            self.next();
        }
    }

    fn term(&mut self) -> Result<Term<Q>, ExpressionError> {
        match self.next().map(|token| token.kind) {
            Some(TokenKind::Name(name)) => match (self.resolve)(&name) {
                Ok(metric) => Ok(Term::Metric(metric)),
                Err((message, help)) => Err(error(self.last, message, &help)),
            },
            Some(TokenKind::Literal(number, unit)) => Ok(Term::Literal(number, unit)),
            _ => Err(self.unexpected("a metric, a number, a size or a duration", self.forms)),
        }
    }

    fn finish(&mut self) -> Result<(), ExpressionError> {
        match self.next() {
            None => Ok(()),
            Some(Token { kind: TokenKind::Comparison(_), .. }) => {
                Err(self
                    .unexpected("the end of the expression", "one comparison at a time: write two expectations, as in `[a >= 1, a <= 2]`"))
            }
            Some(_) => Err(self.unexpected("the end of the expression", self.forms)),
        }
    }
}

fn tokens(text: &[char], forms: &str) -> Result<Vec<Token>, ExpressionError> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < text.len() {
        if text[at].is_whitespace() {
            at += 1;
            continue;
        }
        let token = token(text, at, forms)?;
        at += token.at.1;
        tokens.push(token);
    }
    Ok(tokens)
}

fn token(text: &[char], at: usize, forms: &str) -> Result<Token, ExpressionError> {
    let take = |from: usize, accepted: &dyn Fn(char) -> bool| text[from..].iter().take_while(|&&c| accepted(c)).count();
    let first = text[at];
    if first.is_ascii_alphabetic() || first == '_' {
        let length = take(at, &|c| c.is_ascii_alphanumeric() || c == '_' || c == '.');
        return Ok(Token { kind: TokenKind::Name(text[at..at + length].iter().collect()), at: (at, length) });
    }
    if first.is_ascii_digit() {
        let digits = take(at, &|c| c.is_ascii_digit() || c == '_' || c == '.');
        let spaces = take(at + digits, &|c| c == ' ');
        let unit = take(at + digits + spaces, &char::is_alphabetic);
        let length = if unit == 0 { digits } else { digits + spaces + unit };
        return literal(&text[at..at + length].iter().collect::<String>(), (at, length));
    }
    match first {
        '+' => return Ok(Token { kind: TokenKind::Sign(Sign::Plus), at: (at, 1) }),
        '-' => return Ok(Token { kind: TokenKind::Sign(Sign::Minus), at: (at, 1) }),
        _ => {}
    }
    let next_two: String = text[at..].iter().take(2).collect();
    for (sign, comparison) in Comparison::SIGNS {
        if next_two.starts_with(sign) {
            return Ok(Token { kind: TokenKind::Comparison(comparison), at: (at, sign.len()) });
        }
    }
    let help = if first == '=' { "equality is written `==`" } else { forms };
    Err(error((at, 1), format!("`{first}` means nothing in an expression"), help))
}

fn literal(text: &str, at: Range) -> Result<Token, ExpressionError> {
    let is_time =
        ["ns", "us", "µs", "ms", "s"].iter().any(|unit| text.strip_suffix(unit).is_some_and(|rest| !rest.ends_with(char::is_alphabetic)));
    let (number, unit) = if is_time {
        (Nanos::parse(text).map(Nanos::get).map_err(|why| why.to_string()), Some(Unit::Time))
    } else {
        let unit = text.ends_with(char::is_alphabetic).then_some(Unit::Bytes);
        (Bytes::parse(text).map(Bytes::get).map_err(|why| why.to_string()), unit)
    };
    match number {
        Ok(number) => Ok(Token { kind: TokenKind::Literal(number, unit), at }),
        Err(why) => Err(error(at, why, "literals are integers, sizes as in `400MiB` and durations as in `5ms`")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    #[derive(Debug, PartialEq)]
    struct Named(&'static str, Unit);

    impl Quantity for Named {
        fn unit(&self) -> Unit {
            self.1
        }
    }

    fn resolve(name: &str) -> Result<Named, Unresolved> {
        let known = [
            ("num_ooms", Unit::Count),
            ("reserved_bytes.all.peak", Unit::Bytes),
            ("device.used", Unit::Bytes),
            ("device.free", Unit::Bytes),
            ("time.now", Unit::Time),
        ];
        let found = known.into_iter().find(|(known, _)| *known == name).map(|(name, unit)| Named(name, unit));
        found.ok_or_else(|| (format!("no {name}"), String::new()))
    }

    fn seen(text: &str, value: u64) -> Evaluation {
        parse_expectation(text, &resolve).unwrap().evaluate(|_| Ok::<_, ()>(value)).unwrap()
    }

    #[test]
    fn sums_are_taken_from_left_to_right_and_may_be_negative() {
        assert_eq!(seen("num_ooms - 5 + 2 == 0 - 2", 1), Evaluation { left: -2, right: -2, unit: Unit::Count, holds: true });
        assert_eq!(seen("reserved_bytes.all.peak-1.5 GiB<1KiB", 1 << 30).left, -(1 << 29));
        assert_eq!(seen("time.now >= 5ms", 5_000_000).unit, Unit::Time);
    }

    #[test]
    fn every_comparison_means_what_it_says() {
        for (sign, below, equal, above) in [
            ("==", false, true, false),
            ("!=", true, false, true),
            ("<", true, false, false),
            ("<=", true, true, false),
            (">", false, false, true),
            (">=", false, true, true),
        ] {
            let holds = |value| seen(&format!("num_ooms {sign} 7"), value).holds;
            assert_eq!((holds(6), holds(7), holds(8)), (below, equal, above), "{sign}");
        }
    }

    #[test]
    fn the_longest_sums_do_not_overflow() {
        let long = vec!["device.used"; MAX_TERMS].join(" + ");
        assert_eq!(seen(&format!("{long} > 0"), u64::MAX).left, i128::from(u64::MAX) * MAX_TERMS as i128);
        assert!(parse_expectation(&format!("{long} + 1 > 0"), &resolve).is_err());
    }

    #[test]
    fn an_amount_that_comes_out_negative_is_an_error_and_not_a_huge_size() {
        let amount = parse_amount("device.free - 2MiB", &resolve).unwrap();
        assert_eq!(amount.evaluate(|_| Ok::<_, ()>(3 << 20)), Ok(Bytes::mib(1)));
        assert_eq!(amount.evaluate(|_| Ok::<_, ()>(0)), Err(AmountError::OutOfRange(-(2 << 20))));
        assert_eq!(parse_amount("1MiB + 512", &resolve), Ok(Amount::Fixed(Bytes((1 << 20) + 512))));
    }

    proptest::proptest! {
        #[test]
        fn a_sum_of_literals_is_their_sum(first in 0_u64..1 << 40, rest in proptest::collection::vec((proptest::bool::ANY, 0_u64..1 << 40), 0..20)) {
            let mut text = format!("num_ooms + {first}");
            let mut expected = 1 + i128::from(first);
            for (minus, number) in rest {
                text += &format!(" {} {number}", if minus { '-' } else { '+' });
                expected += i128::from(number) * if minus { -1 } else { 1 };
            }
            proptest::prop_assert_eq!(seen(&format!("{text} == 0"), 1).left, expected);
        }
    }
}
