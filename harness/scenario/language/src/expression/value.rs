//! Values of expressions: exact numbers with a unit.

use std::fmt;

use harness_allocator::units::{Bytes, Nanos};
use num_rational::Ratio;
use num_traits::{CheckedAdd, CheckedDiv, CheckedMul, CheckedSub};

/// An exact fraction of two 128-bit integers: `1.1` is 11/10, and a third stays a third.
pub type Number = Ratio<i128>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    Bytes,
    Count,
    /// Nanoseconds on the device's clock.
    Time,
}

impl Unit {
    pub const fn word(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::Count => "count",
            Self::Time => "ns",
        }
    }
}

/// A power of bytes times a power of time. A plain number has neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dimension {
    bytes: i8,
    time: i8,
}

impl Dimension {
    pub const NUMBER: Self = Self { bytes: 0, time: 0 };
    pub const BYTES: Self = Self { bytes: 1, time: 0 };
    pub const TIME: Self = Self { bytes: 0, time: 1 };

    pub(super) fn times(self, other: Self) -> Option<Self> {
        Some(Self {
            bytes: self.bytes.checked_add(other.bytes)?,
            time: self.time.checked_add(other.time)?,
        })
    }

    pub(super) fn over(self, other: Self) -> Option<Self> {
        Some(Self {
            bytes: self.bytes.checked_sub(other.bytes)?,
            time: self.time.checked_sub(other.time)?,
        })
    }
}

impl From<Unit> for Dimension {
    fn from(unit: Unit) -> Self {
        match unit {
            Unit::Bytes => Self::BYTES,
            Unit::Count => Self::NUMBER,
            Unit::Time => Self::TIME,
        }
    }
}

impl fmt::Display for Dimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.bytes, self.time) {
            (0, 0) => f.write_str("a plain number"),
            (1, 0) => f.write_str("an amount of memory"),
            (0, 1) => f.write_str("a time"),
            (1, -1) => f.write_str("memory over time"),
            (bytes, time) => write!(f, "bytes^{bytes} × time^{time}"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value {
    /// In bytes, nanoseconds, or a product of them.
    pub number: Number,
    pub dimension: Dimension,
}

impl Value {
    pub fn count(number: u64) -> Self {
        Self::of(number, Unit::Count)
    }

    pub fn of(number: u64, unit: Unit) -> Self {
        Self {
            number: Number::from_integer(i128::from(number)),
            dimension: unit.into(),
        }
    }

    pub fn whole(&self) -> Option<i128> {
        self.number.is_integer().then(|| self.number.to_integer())
    }

    /// The value times 100: `34.2 %`.
    pub fn percent(&self) -> String {
        match self.number.checked_mul(&Number::from_integer(100)) {
            Some(hundredths) => format!("{} %", decimal(hundredths)),
            None => self.to_string(),
        }
    }
}

impl fmt::Display for Value {
    /// `4096 B (4 KiB)`, `1.50 ms`, `3`, `0.342`, `200 MiB/s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = self.number.round().to_integer();
        let sign = if whole < 0 { "-" } else { "" };
        let magnitude = u64::try_from(whole.unsigned_abs()).unwrap_or(u64::MAX);
        match self.dimension {
            Dimension::BYTES if magnitude < 1024 => write!(f, "{sign}{}", Bytes(magnitude)),
            Dimension::BYTES => write!(f, "{sign}{magnitude} B ({sign}{})", Bytes(magnitude)),
            Dimension::TIME => write!(f, "{sign}{}", Nanos(magnitude)),
            Dimension::NUMBER => f.write_str(&decimal(self.number)),
            Dimension { bytes: 1, time: -1 } => {
                let second = self
                    .number
                    .checked_mul(&Number::from_integer(1_000_000_000))
                    .map(|rate| rate.round().to_integer());
                let rate = second.unwrap_or(i128::MAX);
                let magnitude = u64::try_from(rate.unsigned_abs()).unwrap_or(u64::MAX);
                write!(
                    f,
                    "{}{}/s",
                    if rate < 0 { "-" } else { "" },
                    Bytes(magnitude)
                )
            }
            _ => write!(f, "{} ({})", decimal(self.number), self.dimension),
        }
    }
}

/// Writes whole numbers exactly, and others with four significant digits.
fn decimal(number: Number) -> String {
    if number.is_integer() {
        return number.to_integer().to_string();
    }
    let value = *number.numer() as f64 / *number.denom() as f64;
    let digits = 3 - (value.abs().log10().floor() as i32);
    let text = format!("{value:.*}", digits.clamp(0, 12) as usize);
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArithmeticError {
    #[error("`{0}` divides by zero")]
    DivisionByZero(String),
    #[error("the value needs more than 128 bits")]
    Overflow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
}

impl Operator {
    /// The exact result; `None` on overflow or division by zero.
    pub fn apply(self, left: &Number, right: &Number) -> Option<Number> {
        match self {
            Self::Add => left.checked_add(right),
            Self::Subtract => left.checked_sub(right),
            Self::Multiply => left.checked_mul(right),
            Self::Divide => left.checked_div(right),
        }
    }
}

/// Parses digits with `_` between them and at most one point.
pub(super) fn parse_decimal(text: &str) -> Option<Number> {
    let digits: String = text.chars().filter(|&c| c != '_').collect();
    let (whole, fraction) = digits.split_once('.').unwrap_or((&digits, ""));
    if whole.is_empty() || !(whole.chars().chain(fraction.chars())).all(|c| c.is_ascii_digit()) {
        return None;
    }
    let denominator = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let number = Number::new(format!("{whole}{fraction}").parse().ok()?, denominator);
    (number <= Number::from_integer(i128::from(u64::MAX))).then_some(number)
}
