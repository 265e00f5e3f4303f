//! Scalars as the file writes them: text with a position, a JSON Schema and a documented form.
//!
//! The check parses them, not the YAML reader, so that every mistake is reported with its position
//! and the accepted forms.

use std::{fmt, ops::RangeInclusive};

use harness_allocator::units::{Bytes, Nanos};

use crate::error::Problem;
use crate::located::{Located, Position};

/// Declares a scalar: its Rust name, its name in the schema, its schema and its documentation.
#[macro_export]
macro_rules! scalars {
    ($($(#[doc = $doc:literal])+ $type:ident = $name:literal, $schema:tt;)*) => {
        $(
            $(#[doc = $doc])+
            #[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
            #[serde(transparent)]
            pub struct $type(pub $crate::located::Located<String>);

            impl $type {
                pub fn text(&self) -> &str {
                    &self.0.value
                }
            }

            impl From<$crate::located::Located<String>> for $type {
                fn from(text: $crate::located::Located<String>) -> Self {
                    Self(text)
                }
            }

            impl std::ops::Deref for $type {
                type Target = $crate::located::Located<String>;
                fn deref(&self) -> &Self::Target {
                    &self.0
                }
            }

            #[cfg(feature = "schema")]
            impl schemars::JsonSchema for $type {
                fn schema_name() -> std::borrow::Cow<'static, str> {
                    $name.into()
                }
                fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                    let mut schema = schemars::json_schema!($schema);
                    schema.insert("description".to_owned(), concat!($($doc),+).trim().into());
                    schema
                }
            }
        )*

        /// Every kind of scalar, with its documentation.
        pub fn scalar_kinds() -> Vec<(&'static str, &'static str)> {
            vec![$(($name, concat!($($doc),+).trim())),*]
        }
    };
}

scalars! {
    /// A letter or `_`, then letters, digits and `_`, at most 64 characters: `weights`.
    NameText = "name", { "type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$" };
    /// An amount of memory: a number with B, KiB, MiB, GiB, TiB, PiB or EiB, as in `400MiB` or
    /// `1.5GiB`. A plain integer is bytes. Decimal units such as MB are errors.
    SizeText = "size", { "anyOf": [
        { "type": "integer", "minimum": 0 },
        { "type": "string", "pattern": "^[0-9][0-9_.]* ?([KMGTPE]i)?B$|^[0-9][0-9_]*$" },
    ] };
    /// A size, or a formula that evaluates to a size. It may use `+`, `-`, `*`, `/`, parentheses,
    /// `min`, `max`, parameters, loop variables and known metrics: `4MiB * batch / 8`,
    /// `storm.failed_request`, `device.free - 2MiB`. Fractions of a byte are dropped.
    AmountText = "amount", { "type": ["string", "integer"] };
    /// A whole number, or a formula of parameters that evaluates to one: `64` or `2 * batch`.
    CountText = "count", { "type": ["integer", "string"] };
    /// The name of a buffer, or of one numbered buffer: `weights`, `kv[3]`, `kv[i]`, `kv[i - 1]`.
    BufferText = "buffer", {
        "type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}(\\[.+\\])?$"
    };
    /// A time span: a number with ns, us, ms, s or min, at most one hour: `5ms`.
    DurationText = "duration", { "type": "string", "pattern": "^[0-9]+([.][0-9]*)? \
         *(ns|us|µs|ms|s|m|min)$" };
    /// A comparison: `reserved == 400MiB`, `(reserved - allocated) / reserved < 20%` or
    /// `device.used == before.device.used +- 2MiB`.
    ExpressionText = "expression", { "type": "string", "pattern": "==|!=|<|<=|>|>=" };
}

/// Writes a size exactly, in the largest unit that needs no fraction.
pub fn exact_size(bytes: Bytes) -> String {
    let units = [
        (Bytes::gib(1), "GiB"),
        (Bytes::mib(1), "MiB"),
        (Bytes::kib(1), "KiB"),
    ];
    let whole = units
        .into_iter()
        .find(|(unit, _)| bytes.0 > 0 && bytes.0.is_multiple_of(unit.0));
    whole.map_or_else(
        || format!("{}B", bytes.0),
        |(unit, name)| format!("{}{name}", bytes.0 / unit.0),
    )
}

/// Most characters of a name.
const MAX_NAME: usize = 64;

impl NameText {
    pub fn checked(&self) -> Result<&str, Problem> {
        let text = self.text();
        let mut chars = text.chars();
        let starts_well = chars
            .next()
            .is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        if starts_well
            && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
            && text.len() <= MAX_NAME
        {
            return Ok(text);
        }
        Err(
            Problem::new(self.at, format!("`{text}` is not a name")).help(format!(
                "a name is a letter or `_`, then letters, digits and `_`, at most \
                 {MAX_NAME} characters, as in `activations_2`"
            )),
        )
    }
}

pub fn bounded(
    given: &Located<u64>,
    what: &str,
    bounds: RangeInclusive<u64>,
) -> Result<u64, Problem> {
    if bounds.contains(&given.value) {
        Ok(given.value)
    } else {
        Err(out_of_bounds(given.at, what, &given.value, &bounds))
    }
}

pub fn out_of_bounds(
    at: Position,
    what: &str,
    given: &dyn fmt::Display,
    bounds: &RangeInclusive<u64>,
) -> Problem {
    let help = if *bounds.end() == u64::MAX {
        format!("`{what}` must be {} or more", bounds.start())
    } else {
        format!(
            "`{what}` must be from {} to {}",
            bounds.start(),
            bounds.end()
        )
    };
    Problem::new(at, format!("`{what}` cannot be {given}")).help(help)
}

pub fn size(text: &SizeText) -> Result<Bytes, Problem> {
    Bytes::parse(text.text()).map_err(|why| Problem::new(text.at, why.to_string()).label("a size"))
}

pub fn positive_size(text: &SizeText, what: &str) -> Result<Bytes, Problem> {
    not_zero(size(text)?, what, text.at)
}

pub fn not_zero(size: Bytes, what: &str, at: Position) -> Result<Bytes, Problem> {
    match size {
        Bytes::ZERO => Err(Problem::new(at, format!("`{what}` cannot be 0"))
            .help(format!("`{what}` must be at least 1 B, as in `2MiB`"))),
        bytes => Ok(bytes),
    }
}

pub fn duration(text: &DurationText) -> Result<Nanos, Problem> {
    match Nanos::parse(text.text()) {
        Ok(Nanos::ZERO) => {
            Err(Problem::new(text.at, "the duration cannot be 0").help("as in `5ms`"))
        }
        Ok(nanos) => Ok(nanos),
        Err(why) => Err(Problem::new(text.at, why.to_string()).label("a duration")),
    }
}
