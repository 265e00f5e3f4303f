//! Parsers for settings and their error messages.

use std::str::FromStr;

/// An error in the text of a setting; the message lists the accepted values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(pub(crate) String);

pub(crate) fn number<T: FromStr>(text: &str) -> Result<T, SettingsError> {
    text.parse().map_err(|_| SettingsError(format!("`{text}` is not a number in range")))
}

pub(crate) fn expected(text: &str, what: &str, accepted: impl Iterator<Item = &'static str>) -> SettingsError {
    SettingsError(format!("`{text}` is not {what}: write {}", accepted.collect::<Vec<_>>().join(", ")))
}

/// Parses `N` numbers separated by colons.
pub(crate) fn numbers<const N: usize>(text: &str, form: &str) -> Result<[u64; N], SettingsError> {
    let wrong = || SettingsError(format!("`{text}` is not {form}"));
    let numbers: Vec<u64> = text.split(':').map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
    numbers.try_into().map_err(|_| wrong())
}

/// Implements display and parsing for an enumeration of words.
macro_rules! words {
    ($type:ty, $what:literal, $($value:path = $word:literal),+) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($value => $word),+ })
            }
        }

        impl FromStr for $type {
            type Err = SettingsError;

            fn from_str(text: &str) -> Result<Self, SettingsError> {
                match text {
                    $($word => Ok($value),)+
                    _ => Err(expected(text, $what, [$($word),+].into_iter())),
                }
            }
        }
    };
}

pub(crate) use words;
