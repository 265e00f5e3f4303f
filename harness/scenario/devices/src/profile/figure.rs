//! [`MeasuredFigure`]: a measured figure of a profile, with its unit as a type.

use std::{fmt, marker::PhantomData};

use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};

/// A figure and its measurement. In the file: `{ value: 50200, unit: ns, samples: 315, spread:
/// 12.5, fit_error: { … } }`.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, bound = "U: UnitText")]
pub struct MeasuredFigure<U> {
    pub value: u64,
    unit: Unit<U>,
    pub samples: u64,
    /// Spread of samples of the same quantity.
    pub spread: Spread,
    /// The model's error relative to the measurement.
    pub fit_error: FitError,
}

impl<U: UnitText> MeasuredFigure<U> {
    /// A figure in the unit of its type.
    pub const fn new(value: u64, samples: u64, spread: Spread, fit_error: FitError) -> Self {
        Self {
            value,
            unit: Unit(PhantomData),
            samples,
            spread,
            fit_error,
        }
    }

    /// Returns a figure that was read once and does not vary.
    pub const fn exact(value: u64) -> Self {
        Self::new(
            value,
            1,
            Decimal(0.0),
            FitError {
                median: Decimal(0.0),
                worst: Decimal(0.0),
            },
        )
    }
}

/// As [`MeasuredFigure`] is displayed.
impl<U: UnitText> Serialize for MeasuredFigure<U> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<U: UnitText> fmt::Display for MeasuredFigure<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            value,
            unit: _,
            samples,
            spread,
            fit_error: FitError { median, worst },
        } = self;
        write!(
            f,
            "{{ value: {value}, unit: {}, samples: {samples}, spread: {}, ",
            U::TEXT,
            spread.0
        )?;
        write!(
            f,
            "fit_error: {{ median: {}, worst: {} }} }}",
            median.0, worst.0
        )
    }
}

/// A unit, as written in files.
pub trait UnitText {
    /// For example `ns per MiB`.
    const TEXT: &'static str;
}

/// Defines units as marker types.
macro_rules! units {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name;

        impl UnitText for $name {
            const TEXT: &'static str = $text;
        }
    )*};
}

units! {
    ByteCount = "bytes";
    Nanoseconds = "ns";
    NanosecondsPerMib = "ns per MiB";
    NanosecondsPerGib = "ns per GiB";
}

/// The unit in the file, which must match the figure's type.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Unit<U>(PhantomData<U>);

impl<'de, U: UnitText> Deserialize<'de> for Unit<U> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match String::deserialize(deserializer)? {
            text if text == U::TEXT => Ok(Self(PhantomData)),
            text => Err(D::Error::custom(format_args!(
                "this figure is in `{}`, not in `{text}`",
                U::TEXT
            ))),
        }
    }
}

/// Relative error of a model: over all measured sizes, or over all samples if there is one size.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FitError {
    pub median: Share,
    pub worst: Share,
}

/// A ratio: 0.03 is 3 %.
pub type Share = Decimal<4>;
/// A median absolute deviation, in the unit of its figure.
pub type Spread = Decimal<1>;

/// A number with this many decimals that is not negative.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "f64")]
pub struct Decimal<const PLACES: i32>(f64);

impl<const PLACES: i32> Decimal<PLACES> {
    /// Rounds a number; 0 for negative values and NaN.
    pub fn of(number: f64) -> Self {
        let parts = 10_f64.powi(PLACES);
        // Beyond 2^53 a number has no decimals, and no measured deviation is that large.
        Self((number.clamp(0.0, 2_f64.powi(53)) * parts).round().max(0.0) / parts)
    }
}

impl<const PLACES: i32> TryFrom<f64> for Decimal<PLACES> {
    type Error = String;

    fn try_from(number: f64) -> Result<Self, Self::Error> {
        if number.is_finite() && number >= 0.0 {
            Ok(Self(number))
        } else {
            Err(format!("{number} is not a number of at least 0"))
        }
    }
}

impl fmt::Display for Share {
    /// For example `3 %`, or `0.4 %` below one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = 100.0 * self.0;
        if percent > 0.0 && percent < 1.0 {
            write!(f, "{percent:.1} %")
        } else {
            write!(f, "{percent:.0} %")
        }
    }
}
