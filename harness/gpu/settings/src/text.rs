//! Settings as texts: options that a user writes and their error messages, and environment
//! variables.

use std::{fmt::Display, str::FromStr};

use serde::{Serialize, de::DeserializeOwned};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(pub(crate) String);

/// Writes settings as the value of an environment variable.
pub fn to_variable(settings: &impl Serialize) -> String {
    serde_json::to_string(settings).unwrap_or_default()
}

/// Reads the value of an environment variable that [`to_variable`] wrote.
pub fn of_variable<T: DeserializeOwned>(text: &str) -> Result<T, SettingsError> {
    serde_json::from_str(text).map_err(|error| SettingsError(error.to_string()))
}

/// The value of an environment variable. A program must not run with settings other than the
/// requested ones.
pub fn or_abort<T>(library: &str, variable: &str, value: Result<T, impl Display>) -> T {
    value.unwrap_or_else(|error| {
        eprintln!("{library}: {variable}: {error}");
        std::process::abort()
    })
}

pub(crate) fn number<T: FromStr>(text: &str) -> Result<T, SettingsError> {
    text.parse()
        .map_err(|_| SettingsError(format!("`{text}` is not a number in range")))
}

pub(crate) fn expected(
    text: &str,
    what: &str,
    accepted: impl Iterator<Item = &'static str>,
) -> SettingsError {
    SettingsError(format!(
        "`{text}` is not {what}: write {}",
        accepted.collect::<Vec<_>>().join(", ")
    ))
}

/// Implements parsing for an enumeration of names.
macro_rules! words {
    ($type:ty, $what:literal) => {
        impl FromStr for $type {
            type Err = SettingsError;

            fn from_str(text: &str) -> Result<Self, SettingsError> {
                Self::from_name(text).ok_or_else(|| {
                    expected(text, $what, Self::ALL.iter().map(|named| named.name()))
                })
            }
        }
    };
}

pub(crate) use words;
