//! The scalars of the language as the file writes them: text with a place, a JSON Schema and a documented form.
//!
//! They are parsed in the check and not while YAML is read, so that every mistake is answered with its place and the accepted forms.

use std::ops::RangeInclusive;

use harness_allocator::units::{Bytes, Nanos};

use crate::error::Problem;
use crate::located::Located;

/// Declares a scalar: its Rust name, its name in the schema, its schema and what it is.
#[macro_export]
macro_rules! scalars {
    ($($(#[doc = $doc:literal])+ $type:ident = $name:literal, $schema:tt;)*) => {
        $(
            $(#[doc = $doc])+
            #[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize)]
            #[serde(transparent)]
            pub struct $type(pub $crate::located::Located<String>);

            impl $type {
                /// As the file writes it.
                #[must_use]
                pub fn text(&self) -> &str {
                    &self.0.value
                }
            }

            impl std::ops::Deref for $type {
                type Target = $crate::located::Located<String>;
                fn deref(&self) -> &Self::Target {
                    &self.0
                }
            }

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

        /// Every kind of scalar: its name and what it is.
        #[must_use]
        pub fn scalar_kinds() -> Vec<(&'static str, &'static str)> {
            vec![$(($name, concat!($($doc),+).trim())),*]
        }
    };
}

scalars! {
    /// A letter or `_`, then letters, digits and `_`, at most 64 in all, for example `weights`.
    NameText = "name", { "type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}$" };
    /// An amount of memory: a number and one of B, KiB, MiB, GiB, TiB, PiB or EiB, for example `400MiB` or `1.5GiB`; a bare integer is bytes. Decimal units such as MB are errors.
    SizeText = "size", { "anyOf": [{ "type": "integer", "minimum": 0 }, { "type": "string", "pattern": "^[0-9][0-9_.]* ?([KMGTPE]i)?B$|^[0-9][0-9_]*$" }] };
    /// A size, or a formula with `+`, `-`, `*`, `/`, parentheses, `min` and `max` that comes to one, of parameters, loop variables and metrics that are known at that point: `4MiB * batch / 8`, `storm.failed_request`, `device.free - 2MiB`. Part of a byte is rounded off.
    AmountText = "amount", { "type": ["string", "integer"] };
    /// A whole number, or a formula of parameters that comes to one, for example `64` or `2 * batch`.
    CountText = "count", { "type": ["integer", "string"] };
    /// The name of a buffer, or of one element of many: `weights`, `kv[3]`, `kv[i]`, `kv[i - 1]`.
    BufferText = "buffer", { "type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,63}(\\[.+\\])?$" };
    /// A span of time: a number and one of ns, us, ms, s or min, at most one hour, for example `5ms`.
    DurationText = "duration", { "type": "string", "pattern": "^[0-9]+([.][0-9]*)? *(ns|us|µs|ms|s|m|min)$" };
    /// A comparison, for example `reserved == 400MiB`, `(reserved - allocated) / reserved < 20%` or `device.used == before.device.used +- 2MiB`.
    ExpressionText = "expression", { "type": "string", "pattern": "==|!=|<|<=|>|>=" };
}

/// A size as scenarios write it, exactly: in the largest unit of which it is a whole number.
#[must_use]
pub fn exact_size(bytes: Bytes) -> String {
    let units = [(Bytes::gib(1), "GiB"), (Bytes::mib(1), "MiB"), (Bytes::kib(1), "KiB")];
    let whole = units.into_iter().find(|(unit, _)| bytes.0 > 0 && bytes.0.is_multiple_of(unit.0));
    whole.map_or_else(|| format!("{}B", bytes.0), |(unit, name)| format!("{}{name}", bytes.0 / unit.0))
}

/// Longest name.
const MAX_NAME: usize = 64;

impl NameText {
    /// The name, if it is one.
    ///
    /// # Errors
    /// [`Problem`] with the form of names.
    pub fn checked(&self) -> Result<&str, Problem> {
        let text = self.text();
        let mut chars = text.chars();
        let starts_well = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        if starts_well && chars.all(|c| c.is_ascii_alphanumeric() || c == '_') && text.len() <= MAX_NAME {
            return Ok(text);
        }
        Err(Problem::new(self.position(), format!("`{text}` is not a name"))
            .help(format!("a name is a letter or `_`, then letters, digits and `_`, at most {MAX_NAME} in all, as in `activations_2`")))
    }
}

/// A number inside its bounds.
///
/// # Errors
/// [`Problem`] with the bounds.
pub fn bounded(given: &Located<u64>, what: &str, bounds: RangeInclusive<u64>) -> Result<u64, Problem> {
    if bounds.contains(&given.value) {
        return Ok(given.value);
    }
    let help = if *bounds.end() == u64::MAX {
        format!("`{what}` is {} or more", bounds.start())
    } else {
        format!("`{what}` is from {} to {}", bounds.start(), bounds.end())
    };
    Err(Problem::new(given.position(), format!("`{what}` cannot be {}", given.value)).help(help))
}

/// A size.
///
/// # Errors
/// [`Problem`] with the accepted forms.
pub fn size(text: &SizeText) -> Result<Bytes, Problem> {
    Bytes::parse(text.text()).map_err(|why| Problem::new(text.position(), why.to_string()).label("a size"))
}

/// A size of at least one byte.
///
/// # Errors
/// [`Problem`] with the accepted forms.
pub fn positive_size(text: &SizeText, what: &str) -> Result<Bytes, Problem> {
    match size(text)? {
        Bytes::ZERO => {
            Err(Problem::new(text.position(), format!("`{what}` cannot be 0"))
                .help(format!("`{what}` is a size of 1 B or more, as in `2MiB`")))
        }
        bytes => Ok(bytes),
    }
}

/// A duration that is not zero.
///
/// # Errors
/// [`Problem`] with the accepted forms.
pub fn duration(text: &DurationText) -> Result<Nanos, Problem> {
    match Nanos::parse(text.text()) {
        Ok(Nanos::ZERO) => Err(Problem::new(text.position(), "a duration of nothing does nothing").help("as in `5ms`")),
        Ok(nanos) => Ok(nanos),
        Err(why) => Err(Problem::new(text.position(), why.to_string()).label("a duration")),
    }
}
