//! Parses expressions: tokens, precedence, units. Takes linear time, apart from lookups.

use harness_allocator::units::{Bytes, Nanos};
use num_traits::Zero;

use super::{
    AmountOf, Choice, Comparison, Dimension, ExpectationOf, ExpressionOf, MAX_DEPTH, MAX_TERMS,
    Node, Number, Operator, Quantity, Tolerance, Unit, Value, value::parse_decimal,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpressionError {
    pub message: String,
    pub help: String,
    /// In characters from the start of the expression.
    pub start: usize,
    /// In characters.
    pub length: usize,
}

/// Why a name is unknown: the message and the advice.
pub type Unresolved = (String, String);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResolvedName<Q> {
    /// Looked up when the expression is evaluated.
    Quantity(Q),
    Constant(Value),
}

/// Resolves a name, or `function(name)`.
pub type Resolve<'a, Q> = &'a dyn Fn(&str) -> Result<ResolvedName<Q>, Unresolved>;

const FORMS: &str = "write a comparison with ==, !=, <, <=, > or >=, as in `reserved.peak <= \
     1GiB`, `(reserved - allocated) / reserved < 20%` or `a.device.used == start.device.used + \
     400MiB`";

/// Parses an expectation. Fails on a syntax error, an unknown name, mixed units, or an expectation
/// that checks nothing.
pub fn parse_expectation<Q: Quantity + PartialEq>(
    text: &str,
    resolve: Resolve<'_, Q>,
) -> Result<ExpectationOf<Q>, ExpressionError> {
    let mut parser = Parser::new(text, FORMS, resolve)?;
    let (left, _) = parser.sum(0)?;
    let Some(Token {
        kind: TokenKind::Comparison(comparison),
        ..
    }) = parser.next()
    else {
        return Err(parser.unexpected("a comparison", FORMS));
    };
    let (right, right_at) = parser.sum(0)?;
    let together = parser.same_dimension(left.dimension, right.dimension, right_at)?;
    let tolerance = parser.tolerance(comparison, together)?;
    parser.finish()?;
    let expectation = ExpectationOf {
        left,
        comparison,
        right,
        tolerance,
        text: text.trim().to_owned(),
    };
    let whole = (0, text.chars().count());
    if expectation.quantities().next().is_none() {
        return Err(error(
            whole,
            "no metric in this expectation: it can never change",
            FORMS,
        ));
    }
    if expectation.left.node == expectation.right.node {
        return Err(error(
            whole,
            "both sides of this expectation are the same: it checks nothing",
            FORMS,
        ));
    }
    Ok(expectation)
}

const AMOUNT: &str = "write a size, as in `400MiB`, or a formula that evaluates to a size, as in \
     `storm.failed_request`, `device.free - 2MiB` or `4MiB * batch`";

/// Parses a size, or a formula that evaluates to bytes. A number without a unit is in bytes.
pub fn parse_amount<Q: Quantity>(
    text: &str,
    resolve: Resolve<'_, Q>,
) -> Result<AmountOf<Q>, ExpressionError> {
    let whole = (0, text.chars().count());
    let is_literal = text
        .trim()
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | ' '));
    if text.trim_start().starts_with(|c: char| c.is_ascii_digit()) && is_literal
        || text.trim_start().starts_with('-')
    {
        return Bytes::parse(text)
            .map(AmountOf::Fixed)
            .map_err(|why| error(whole, why.to_string(), AMOUNT));
    }
    let (sum, at) = formula(text, AMOUNT, resolve)?;
    if let Some(dimension) = sum
        .dimension
        .filter(|&dimension| dimension != Dimension::BYTES)
    {
        let help = if dimension == Dimension::NUMBER {
            "give it a unit, as in `4MiB * 8` or `512B`"
        } else {
            AMOUNT
        };
        return Err(error(
            at,
            format!("expected an amount of memory, found {dimension}"),
            help,
        ));
    }
    match sum.constant() {
        None => Ok(AmountOf::Computed(sum)),
        Some(Err(why)) => Err(error(at, why.to_string(), AMOUNT)),
        Some(Ok(number)) => match u64::try_from(number.floor().to_integer()) {
            Ok(bytes) => Ok(AmountOf::Fixed(Bytes(bytes))),
            Err(_) => Err(error(
                at,
                format!(
                    "this evaluates to {} B, but a size is 0 or more and below 16 EiB",
                    number.floor()
                ),
                AMOUNT,
            )),
        },
    }
}

/// Parses a number that may depend on quantities, for example an index.
pub fn parse_count<Q: Quantity>(
    text: &str,
    resolve: Resolve<'_, Q>,
) -> Result<ExpressionOf<Q>, ExpressionError> {
    const HELP: &str = "write a number, or a formula that evaluates to one, as in `i + 1`";
    let (sum, at) = formula(text, HELP, resolve)?;
    match sum.dimension {
        None | Some(Dimension::NUMBER) => Ok(sum),
        Some(other) => Err(error(
            at,
            format!("expected a plain number, found {other}"),
            HELP,
        )),
    }
}

/// Parses a formula of any unit. It must contain a metric.
pub fn parse_formula<Q: Quantity>(
    text: &str,
    resolve: Resolve<'_, Q>,
) -> Result<ExpressionOf<Q>, ExpressionError> {
    const HELP: &str = "write a metric or a formula of metrics, as in `reserved.peak` or \
         `training.reserved / training.allocated`";
    let (sum, at) = formula(text, HELP, resolve)?;
    if sum.quantities().is_empty() {
        Err(error(
            at,
            "no metric in this formula: it can never change",
            HELP,
        ))
    } else {
        Ok(sum)
    }
}

/// Parses a value that is known before the run: a literal, or a formula of literals and constants.
pub fn parse_constant<Q: Quantity>(
    text: &str,
    resolve: Resolve<'_, Q>,
) -> Result<Value, ExpressionError> {
    const HELP: &str = "write a number, a size or a duration, as in `64`, `20%`, `1.5GiB` or `5ms`";
    let (sum, at) = formula(text, HELP, resolve)?;
    match sum.constant() {
        Some(Ok(number)) => Ok(Value {
            number,
            dimension: sum.dimension(),
        }),
        Some(Err(why)) => Err(error(at, why.to_string(), HELP)),
        None => Err(error(
            at,
            "this is known only while the scenario runs",
            HELP,
        )),
    }
}

type Range = (usize, usize);

const SUM: [Operator; 2] = [Operator::Add, Operator::Subtract];
const PRODUCT: [Operator; 2] = [Operator::Multiply, Operator::Divide];

/// Parses a text that is one formula. Returns its position too.
fn formula<Q: Quantity>(
    text: &str,
    forms: &'static str,
    resolve: Resolve<'_, Q>,
) -> Result<(ExpressionOf<Q>, Range), ExpressionError> {
    let mut parser = Parser::new(text, forms, resolve)?;
    let sum = parser.sum(0)?;
    parser.finish()?;
    Ok(sum)
}

fn error((start, length): Range, message: impl Into<String>, help: &str) -> ExpressionError {
    ExpressionError {
        message: message.into(),
        help: help.to_owned(),
        start,
        length,
    }
}

fn mismatch(at: Range, first: Dimension, second: Dimension) -> ExpressionError {
    let message = format!("{second} cannot be combined with {first}");
    let is_plain = first == Dimension::NUMBER || second == Dimension::NUMBER;
    let other = if first == Dimension::NUMBER {
        second
    } else {
        first
    };
    let help = match other {
        Dimension::BYTES if is_plain => {
            "give the number a unit, as in `400MiB` or `512B`; only 0 needs none"
        }
        Dimension::TIME if is_plain => {
            "give the number a unit, as in `5ms` or `200us`; only 0 needs none"
        }
        _ => {
            "combine bytes with bytes, counts with counts, and times with times; a quotient of two \
             of them is a plain number"
        }
    };
    error(at, message, help)
}

#[derive(Clone, Debug)]
struct Token {
    kind: TokenKind,
    at: Range,
}

#[derive(Clone, Debug)]
enum TokenKind {
    Name(String),
    /// `min(` or `max(`.
    Choice(Choice),
    /// A value, and whether it is a percentage.
    Literal(Value, bool),
    Operator(Operator),
    Open,
    Close,
    Comma,
    Tolerance,
    Comparison(Comparison),
}

struct Parser<'a, Q> {
    tokens: std::iter::Peekable<std::vec::IntoIter<Token>>,
    /// The last token read, or the position where one is missing.
    last: Range,
    last_text: Option<String>,
    text: Vec<char>,
    terms: usize,
    /// The forms that are accepted here.
    forms: &'static str,
    resolve: Resolve<'a, Q>,
}

impl<'a, Q: Quantity> Parser<'a, Q> {
    fn new(
        text: &str,
        forms: &'static str,
        resolve: Resolve<'a, Q>,
    ) -> Result<Self, ExpressionError> {
        let text: Vec<char> = text.chars().collect();
        let tokens = tokens(&text, forms)?.into_iter().peekable();
        Ok(Self {
            tokens,
            last: (0, 1),
            last_text: None,
            text,
            terms: 0,
            forms,
            resolve,
        })
    }

    fn next(&mut self) -> Option<Token> {
        let token = self.tokens.next();
        self.last = token
            .as_ref()
            .map_or((self.text.len().saturating_sub(1), 1), |token| token.at);
        self.last_text = token.as_ref().map(|token| self.piece(token.at));
        token
    }

    fn piece(&self, (start, length): Range) -> String {
        self.text[start..start + length].iter().collect()
    }

    fn unexpected(&self, wanted: &str, help: &str) -> ExpressionError {
        match &self.last_text {
            Some(text) => error(
                self.last,
                format!("expected {wanted}, found `{text}`"),
                help,
            ),
            None => error(
                self.last,
                format!("expected {wanted}, found the end of the expression"),
                help,
            ),
        }
    }

    fn peek_operator(&mut self, accepted: [Operator; 2]) -> Option<Operator> {
        match self.tokens.peek() {
            Some(&Token {
                kind: TokenKind::Operator(operator),
                ..
            }) if accepted.contains(&operator) => Some(operator),
            _ => None,
        }
    }

    fn start(&mut self) -> usize {
        self.tokens.peek().map_or(0, |token| token.at.0)
    }

    fn range_from(&self, start: usize) -> Range {
        (start, (self.last.0 + self.last.1).saturating_sub(start))
    }

    fn sum(&mut self, depth: usize) -> Result<(ExpressionOf<Q>, Range), ExpressionError> {
        let start = self.start();
        let sum = self.operation(depth, SUM)?;
        Ok((sum, self.range_from(start)))
    }

    /// Parses operands with these operators between them. The operands of a sum are products.
    fn operation(
        &mut self,
        depth: usize,
        operators: [Operator; 2],
    ) -> Result<ExpressionOf<Q>, ExpressionError> {
        let start = self.start();
        let operand = |parser: &mut Self| {
            if operators == SUM {
                parser.operation(depth, PRODUCT)
            } else {
                parser.value(depth)
            }
        };
        let mut left = operand(self)?;
        while let Some(operator) = self.peek_operator(operators) {
            self.next();
            let right_start = self.start();
            let right = operand(self)?;
            if operator == Operator::Divide
                && matches!(&right.node, Node::Literal(number) if number.is_zero())
            {
                return Err(error(self.last, "division by zero", self.forms));
            }
            let dimension = match operator {
                Operator::Add | Operator::Subtract => self.same_dimension(
                    left.dimension,
                    right.dimension,
                    self.range_from(right_start),
                )?,
                Operator::Multiply => left.dimension().times(right.dimension()),
                Operator::Divide => left.dimension().over(right.dimension()),
            };
            if operators == PRODUCT && dimension.is_none() {
                return Err(error(
                    self.last,
                    "too many units are multiplied",
                    self.forms,
                ));
            }
            let node = Node::Operation {
                operator,
                left: Box::new(left),
                right: Box::new(right),
            };
            left = ExpressionOf {
                node,
                dimension,
                text: self.piece(self.range_from(start)),
            };
        }
        Ok(left)
    }

    fn value(&mut self, depth: usize) -> Result<ExpressionOf<Q>, ExpressionError> {
        self.terms += 1;
        if self.terms > MAX_TERMS {
            return Err(error(
                self.last,
                format!("more than {MAX_TERMS} terms in one expression"),
                self.forms,
            ));
        }
        let start = self.start();
        let token = self.next();
        let at = self.last;
        match token.map(|token| token.kind) {
            Some(TokenKind::Name(name)) => self.name(&name, at),
            Some(TokenKind::Literal(Value { number, dimension }, _)) => {
                let dimension =
                    (!number.is_zero() || dimension != Dimension::NUMBER).then_some(dimension);
                Ok(ExpressionOf {
                    node: Node::Literal(number),
                    dimension,
                    text: self.piece(at),
                })
            }
            Some(TokenKind::Open) => {
                self.nested(depth)?;
                let (inside, _) = self.sum(depth + 1)?;
                self.close()?;
                Ok(ExpressionOf {
                    text: self.piece(self.range_from(start)),
                    ..inside
                })
            }
            Some(TokenKind::Choice(choice)) => {
                self.nested(depth)?;
                self.choice(choice, start, depth)
            }
            _ => Err(self.unexpected("a metric, a number, a size or a duration", self.forms)),
        }
    }

    fn name(&mut self, name: &str, at: Range) -> Result<ExpressionOf<Q>, ExpressionError> {
        let text = self.piece(at);
        match (self.resolve)(name) {
            Ok(ResolvedName::Quantity(quantity)) => {
                let dimension = Some(quantity.dimension());
                Ok(ExpressionOf {
                    node: Node::Quantity(quantity),
                    dimension,
                    text,
                })
            }
            Ok(ResolvedName::Constant(Value { number, dimension })) => Ok(ExpressionOf {
                node: Node::Literal(number),
                dimension: Some(dimension),
                text,
            }),
            Err((message, help)) => Err(error(at, message, &help)),
        }
    }

    fn nested(&self, depth: usize) -> Result<(), ExpressionError> {
        if depth < MAX_DEPTH {
            return Ok(());
        }
        Err(error(
            self.last,
            format!("parentheses are nested more than {MAX_DEPTH} deep"),
            self.forms,
        ))
    }

    fn close(&mut self) -> Result<(), ExpressionError> {
        match self.next() {
            Some(Token {
                kind: TokenKind::Close,
                ..
            }) => Ok(()),
            _ => Err(self.unexpected("`)`", self.forms)),
        }
    }

    /// Parses the arguments of `min(` or `max(`, which have one unit.
    fn choice(
        &mut self,
        choice: Choice,
        start: usize,
        depth: usize,
    ) -> Result<ExpressionOf<Q>, ExpressionError> {
        let mut all = Vec::new();
        let mut dimension = None;
        loop {
            let (one, at) = self.sum(depth + 1)?;
            dimension = self.same_dimension(dimension, one.dimension, at)?;
            all.push(one);
            match self.next() {
                Some(Token {
                    kind: TokenKind::Comma,
                    ..
                }) => {}
                Some(Token {
                    kind: TokenKind::Close,
                    ..
                }) => break,
                _ => return Err(self.unexpected("`,` or `)`", self.forms)),
            }
        }
        if all.len() < 2 {
            return Err(error(
                self.range_from(start),
                "`min` and `max` need two values or more",
                "as in `min(reserved, 1GiB)`",
            ));
        }
        Ok(ExpressionOf {
            node: Node::Choice(choice, all),
            dimension,
            text: self.piece(self.range_from(start)),
        })
    }

    fn same_dimension(
        &self,
        first: Option<Dimension>,
        second: Option<Dimension>,
        at: Range,
    ) -> Result<Option<Dimension>, ExpressionError> {
        match (first, second) {
            (Some(a), Some(b)) if a != b => Err(mismatch(at, a, b)),
            _ => Ok(first.or(second)),
        }
    }

    fn tolerance(
        &mut self,
        comparison: Comparison,
        of: Option<Dimension>,
    ) -> Result<Option<Tolerance>, ExpressionError> {
        const HELP: &str = "as in `reserved == 1GiB +- 5%` or `device.used == reserved +- 2MiB`";
        if !matches!(
            self.tokens.peek(),
            Some(Token {
                kind: TokenKind::Tolerance,
                ..
            })
        ) {
            return Ok(None);
        }
        self.next();
        if !matches!(comparison, Comparison::Equal | Comparison::NotEqual) {
            return Err(error(
                self.last,
                "only `==` and `!=` take a tolerance",
                HELP,
            ));
        }
        match self.next().map(|token| token.kind) {
            Some(TokenKind::Literal(Value { number, .. }, true)) => {
                Ok(Some(Tolerance::Share(number)))
            }
            Some(TokenKind::Literal(Value { number, dimension }, false)) => {
                self.same_dimension(of, Some(dimension), self.last)?;
                Ok(Some(Tolerance::Amount(number)))
            }
            _ => Err(self.unexpected("a percentage or an amount", HELP)),
        }
    }

    fn finish(&mut self) -> Result<(), ExpressionError> {
        match self.next() {
            None => Ok(()),
            Some(Token {
                kind: TokenKind::Comparison(_),
                ..
            }) => Err(self.unexpected(
                "the end of the expression",
                "write two expectations, as in `[a >= 1, a <= 2]`",
            )),
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

fn count_while(text: &[char], accepted: impl Fn(char) -> bool) -> usize {
    text.iter().take_while(|&&c| accepted(c)).count()
}

fn token(text: &[char], at: usize, forms: &str) -> Result<Token, ExpressionError> {
    let first = text[at];
    if first.is_ascii_alphabetic() || first == '_' {
        return Ok(name(text, at));
    }
    if first.is_ascii_digit() {
        return literal(text, at);
    }
    let next_two: String = text[at..].iter().take(2).collect();
    let of = |kind, length| {
        Ok(Token {
            kind,
            at: (at, length),
        })
    };
    for (sign, comparison) in Comparison::SIGNS {
        if next_two.starts_with(sign) {
            return of(TokenKind::Comparison(comparison), sign.len());
        }
    }
    match first {
        _ if next_two == "+-" => of(TokenKind::Tolerance, 2),
        '±' => of(TokenKind::Tolerance, 1),
        '+' => of(TokenKind::Operator(Operator::Add), 1),
        '-' => of(TokenKind::Operator(Operator::Subtract), 1),
        '*' | '×' => of(TokenKind::Operator(Operator::Multiply), 1),
        '/' => of(TokenKind::Operator(Operator::Divide), 1),
        '(' => of(TokenKind::Open, 1),
        ')' => of(TokenKind::Close, 1),
        ',' => of(TokenKind::Comma, 1),
        _ => {
            let help = if first == '=' {
                "equality is written `==`"
            } else {
                forms
            };
            Err(error((at, 1), format!("unknown character `{first}`"), help))
        }
    }
}

/// Reads a name, `min(`, `max(`, or a function of one name.
fn name(text: &[char], at: usize) -> Token {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let length = count_while(&text[at..], is_name);
    let name: String = text[at..at + length].iter().collect();
    let choice = match name.as_str() {
        "min" => Some(Choice::Least),
        "max" => Some(Choice::Greatest),
        _ => None,
    };
    let rest = &text[at + length..];
    match (rest.first(), choice) {
        (Some('('), Some(choice)) => {
            return Token {
                kind: TokenKind::Choice(choice),
                at: (at, length + 1),
            };
        }
        (Some('('), None) => {
            let inside = count_while(&rest[1..], |c| is_name(c) || c == ' ');
            if rest.get(1 + inside) == Some(&')') {
                let argument: String = rest[1..=inside].iter().filter(|c| **c != ' ').collect();
                return Token {
                    kind: TokenKind::Name(format!("{name}({argument})")),
                    at: (at, length + inside + 2),
                };
            }
        }
        _ => {}
    }
    Token {
        kind: TokenKind::Name(name),
        at: (at, length),
    }
}

/// Reads a number, with a percent sign or a unit if one follows.
fn literal(text: &[char], start: usize) -> Result<Token, ExpressionError> {
    let rest = &text[start..];
    let digits = count_while(rest, |c| c.is_ascii_digit() || c == '_' || c == '.');
    let spaces = count_while(&rest[digits..], |c| c == ' ');
    let unit = count_while(&rest[digits + spaces..], char::is_alphabetic);
    let percent = unit == 0 && rest.get(digits + spaces) == Some(&'%');
    let length = match (unit, percent) {
        (0, false) => digits,
        (0, true) => digits + spaces + 1,
        (unit, _) => digits + spaces + unit,
    };
    let piece: String = rest[..length].iter().collect();
    let at = (start, length);
    let refuse = |why: String| {
        error(
            at,
            why,
            "literals are numbers, percentages, sizes as in `400MiB` and durations as in `5ms`",
        )
    };
    let number: String = rest[..digits].iter().collect();
    let value = if unit == 0 {
        let number = parse_decimal(&number).ok_or_else(|| {
            refuse(format!(
                "`{number}` is not a number from 0 to 18446744073709551615"
            ))
        })?;
        Value {
            number: if percent {
                number / Number::from_integer(100)
            } else {
                number
            },
            dimension: Dimension::NUMBER,
        }
    } else if is_time(&piece) {
        Value::of(
            Nanos::parse(&piece)
                .map_err(|why| refuse(why.to_string()))?
                .get(),
            Unit::Time,
        )
    } else {
        Value::of(
            Bytes::parse(&piece)
                .map_err(|why| refuse(why.to_string()))?
                .get(),
            Unit::Bytes,
        )
    };
    Ok(Token {
        kind: TokenKind::Literal(value, percent),
        at,
    })
}

fn is_time(text: &str) -> bool {
    ["ns", "us", "µs", "ms", "s", "m", "min"]
        .iter()
        .any(|unit| {
            text.strip_suffix(unit)
                .is_some_and(|rest| !rest.ends_with(char::is_alphabetic))
        })
}
