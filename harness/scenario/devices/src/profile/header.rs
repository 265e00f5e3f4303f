//! The beginning of every profile: its format version and its name.

use std::fmt;

use serde::Deserialize;

/// The profile version that this build reads and writes.
pub const PROFILE_VERSION: u32 = 1;

/// A profile's version, which must be [`PROFILE_VERSION`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u32")]
pub struct Version;

impl TryFrom<u32> for Version {
    type Error = String;

    fn try_from(version: u32) -> Result<Self, Self::Error> {
        match version {
            PROFILE_VERSION => Ok(Self),
            _ => Err(format!(
                "this harness reads device profiles of version {PROFILE_VERSION}, not {version}: \
                 use the harness that wrote it"
            )),
        }
    }
}

/// A profile's name: at most 64 letters, digits, `-`, `_` and `.`, beginning with a letter or
/// digit. It is also a valid file name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ProfileName(String);

impl ProfileName {
    /// Derives a name from a device's: lowercase, with `-` for other characters, such as
    /// `nvidia-h200` for `NVIDIA H200`.
    pub fn of_device(name: &str) -> Self {
        let words = name
            .split(|character: char| !character.is_ascii_alphanumeric())
            .filter(|word| !word.is_empty());
        let mut slug = words.collect::<Vec<_>>().join("-").to_ascii_lowercase();
        slug.truncate(MAX_NAME);
        Self(if slug.is_empty() {
            "unnamed".to_owned()
        } else {
            slug
        })
    }
}

/// Maximum number of characters of a name.
const MAX_NAME: usize = 64;

impl TryFrom<String> for ProfileName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        let allowed = |character: char| {
            character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.')
        };
        let fits = name.len() <= MAX_NAME
            && name.starts_with(|first: char| first.is_ascii_alphanumeric())
            && name.chars().all(allowed);
        if fits {
            Ok(Self(name))
        } else {
            Err(format!(
                "`{name}` is not a valid profile name: write letters, digits, `-`, `_` and `.`, as \
                 in `nvidia-h200`"
            ))
        }
    }
}

impl fmt::Display for ProfileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for ProfileName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::try_from(name.to_owned())
    }
}
