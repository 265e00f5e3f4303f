//! Types for amounts of memory and time, so they cannot be confused with each other or with counts.

use std::fmt;
use std::ops::{Add, AddAssign, Sub, SubAssign};

use serde::{Deserialize, Serialize};

/// An amount of memory in bytes. A plain integer in JSON.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    pub const ZERO: Self = Self(0);

    /// The largest amount: 16 EiB less one byte.
    pub const MAX: Self = Self(u64::MAX);

    /// `n` KiB (1024 B each), limited to [`Self::MAX`].
    pub const fn kib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 10))
    }

    /// `n` MiB (1024² B each), limited to [`Self::MAX`].
    pub const fn mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// `n` GiB (1024³ B each), limited to [`Self::MAX`].
    pub const fn gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    pub const fn get(self) -> u64 {
        self.0
    }

    /// Rounds up to a multiple of `unit` (not zero), or returns `None` if the result exceeds 64
    /// bits.
    pub const fn checked_round_up(self, unit: Self) -> Option<Self> {
        match self.0.checked_next_multiple_of(unit.0) {
            Some(rounded) => Some(Self(rounded)),
            None => None,
        }
    }

    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// Parses `400MiB`, `1.5 GiB`, `4B` or a plain number of bytes. Only binary units, whole bytes
    /// and amounts below 16 EiB are valid. Fails with a [`ParseBytesError`] that has the accepted
    /// forms.
    pub fn parse(text: &str) -> Result<Self, ParseBytesError> {
        parse_bytes(text.trim())
    }
}

impl fmt::Display for Bytes {
    /// Formats with binary units: `400 MiB`, `1.5 GiB`, `512 B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const FORMAT: humansize::FormatSizeOptions = humansize::BINARY;
        f.pad(&humansize::format_size(self.0, FORMAT))
    }
}

/// Sums saturate at [`Bytes::MAX`], which exceeds any limit, as the true sum does.
impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl SubAssign for Bytes {
    fn sub_assign(&mut self, other: Self) {
        self.0 -= other.0;
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseBytesError {
    #[error(
        "`{0}` is not a size: write a number and one of B, KiB, MiB, GiB, TiB, PiB or EiB, as in \
         `400MiB`, `1.5 GiB` or `512B`"
    )]
    Malformed(String),
    /// Decimal units differ by up to a tenth from the binary ones that are usually meant.
    #[error("`{text}` uses the decimal unit {unit}: sizes are binary here, write `{suggestion}`")]
    DecimalUnit {
        text: String,
        unit: String,
        suggestion: String,
    },
    #[error("`{0}` is negative: a size is 0 or more, as in `400MiB`")]
    Negative(String),
    #[error("`{0}` is too large: a size is at most 16EiB - 1 (18446744073709551615 B)")]
    TooLarge(String),
    #[error("`{0}` is not a whole number of bytes")]
    Fractional(String),
}

fn parse_bytes(text: &str) -> Result<Bytes, ParseBytesError> {
    let malformed = || ParseBytesError::Malformed(text.to_owned());
    if text.starts_with('-') {
        return Err(ParseBytesError::Negative(text.to_owned()));
    }
    let digits_end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_')
        .unwrap_or(text.len());
    let (number, unit) = (
        text[..digits_end].replace('_', ""),
        text[digits_end..].trim_start(),
    );
    let shift = match unit {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        "PiB" => 50,
        "EiB" => 60,
        "KB" | "kB" | "MB" | "GB" | "TB" | "PB" | "EB" => {
            let suggestion = format!("{number}{}iB", &unit[..1].to_uppercase());
            return Err(ParseBytesError::DecimalUnit {
                text: text.to_owned(),
                unit: unit.to_owned(),
                suggestion,
            });
        }
        _ => return Err(malformed()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
    let has_point = number.contains('.');
    if whole.is_empty()
        || (has_point && fraction.is_empty())
        || fraction.contains('.')
        || fraction.len() > 18
    {
        return Err(malformed());
    }
    let too_large = || ParseBytesError::TooLarge(text.to_owned());
    // An exact decimal fraction: (whole·10^k + fraction)·2^shift / 10^k must be a whole number.
    let scale = 10_u128.pow(fraction.len() as u32);
    let digits: u128 = format!("{whole}{fraction}")
        .parse()
        .map_err(|_| too_large())?;
    let scaled = digits.checked_mul(1_u128 << shift).ok_or_else(too_large)?;
    if scaled % scale != 0 {
        return Err(ParseBytesError::Fractional(text.to_owned()));
    }
    u64::try_from(scaled / scale)
        .map(Bytes)
        .map_err(|_| too_large())
}

/// A duration in nanoseconds, or a time since the start of a device. A plain integer in JSON.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Nanos(pub u64);

impl Nanos {
    pub const ZERO: Self = Self(0);

    /// `n` microseconds, limited to about 584 years.
    pub const fn micros(n: u64) -> Self {
        Self(n.saturating_mul(1_000))
    }

    /// `n` milliseconds, limited to about 584 years.
    pub const fn millis(n: u64) -> Self {
        Self(n.saturating_mul(1_000_000))
    }

    pub const fn get(self) -> u64 {
        self.0
    }

    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Parses `250us`, `3ms`, `1.5s`, `800ns`, `20min` or `20m`.
    /// Fails with a [`ParseNanosError`] that has the accepted forms.
    pub fn parse(text: &str) -> Result<Self, ParseNanosError> {
        let error = || ParseNanosError(text.to_owned());
        let text = text.trim();
        let end = text
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(text.len());
        let number: f64 = text[..end].parse().map_err(|_| error())?;
        let scale = match text[end..].trim_start() {
            "ns" => 1.0,
            "us" | "µs" => 1e3,
            "ms" => 1e6,
            "s" => 1e9,
            "m" | "min" => 6e10,
            _ => return Err(error()),
        };
        let nanos = number * scale;
        // A step of more than an hour is a mistake, and below 2^53 the product is exact enough.
        if nanos.is_finite() && nanos <= 3.6e12 {
            Ok(Self(nanos.round() as u64))
        } else {
            Err(error())
        }
    }
}

impl fmt::Display for Nanos {
    /// Three significant digits and a suitable unit: `850 ns`, `1.20 µs`, `3.41 ms`, `2.00 s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0 as f64;
        let (value, unit) = match self.0 {
            0..=999 => return f.pad(&format!("{} ns", self.0)),
            1_000..=999_999 => (nanos / 1e3, "µs"),
            1_000_000..=999_999_999 => (nanos / 1e6, "ms"),
            _ => (nanos / 1e9, "s"),
        };
        let decimals = if value < 10.0 {
            2
        } else {
            usize::from(value < 100.0)
        };
        f.pad(&format!("{value:.decimals$} {unit}"))
    }
}

/// Sums saturate at 64 bits, about 584 years.
impl Add for Nanos {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Nanos {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl std::iter::Sum for Nanos {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a duration: write a number and one of ns, us, ms, s or min, at most one hour, as \
     in `250us` or `3ms`"
)]
pub struct ParseNanosError(String);

#[cfg(test)]
mod tests;
