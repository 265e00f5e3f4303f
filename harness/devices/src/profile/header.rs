//! What every profile begins with, measured or not: the version of its form, and its name.

use std::fmt;

use serde::Deserialize;

/// The version of profiles that this build writes and reads.
pub const PROFILE_VERSION: u32 = 1;

/// The version that a profile says it has: [`PROFILE_VERSION`], and no other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u32")]
pub struct Version;

impl TryFrom<u32> for Version {
    type Error = String;

    fn try_from(version: u32) -> Result<Self, Self::Error> {
        match version {
            PROFILE_VERSION => Ok(Self),
            _ => Err(format!(
                "this harness reads device profiles of version {PROFILE_VERSION}, not {version}: use the harness that wrote it"
            )),
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PROFILE_VERSION}")
    }
}

/// What a profile is called: letters, digits, `-`, `_` and `.`, at most 64, the first a letter or digit. So it can be a file's name too.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct ProfileName(String);

impl ProfileName {
    /// As a device is called, in small letters with `-` for everything else: `nvidia-h200` for `NVIDIA H200`.
    #[must_use]
    pub fn of_device(name: &str) -> Self {
        let words = name.split(|character: char| !character.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        let mut slug = words.collect::<Vec<_>>().join("-").to_ascii_lowercase();
        slug.truncate(MAX_NAME);
        Self(if slug.is_empty() { "unnamed".to_owned() } else { slug })
    }
}

/// Most characters of a name.
const MAX_NAME: usize = 64;

impl TryFrom<String> for ProfileName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, Self::Error> {
        let allowed = |character: char| character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.');
        let fits = name.len() <= MAX_NAME && name.starts_with(|first: char| first.is_ascii_alphanumeric()) && name.chars().all(allowed);
        if fits {
            Ok(Self(name))
        } else {
            Err(format!("`{name}` is not a profile's name: write letters, digits, `-`, `_` and `.`, as in `nvidia-h200`"))
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
