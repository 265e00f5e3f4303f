//! [`ConfError`]: an invalid configuration string, with PyTorch's rule in words and the place
//! ([`ConfExcerpt`]).

use std::fmt;

use super::Setting;
use crate::allocator::caching::TorchVersion;

/// A configuration string that PyTorch would refuse, or that requests a missing feature.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfError {
    #[error("`{key}` is not a setting of PyTorch's allocator\n{at}")]
    UnknownKey { key: String, at: ConfExcerpt },
    #[error("PyTorch {torch} has no setting `{key}`: PyTorch {since} added it\n{at}")]
    TooNew {
        key: &'static str,
        since: TorchVersion,
        torch: TorchVersion,
        at: ConfExcerpt,
    },
    #[error("expected {expected}; settings are written `KEY:VALUE,KEY:VALUE`\n{at}")]
    Syntax {
        expected: &'static str,
        at: ConfExcerpt,
    },
    #[error("{key} must be {form}\n{at}")]
    NotANumber {
        key: &'static str,
        form: &'static str,
        at: ConfExcerpt,
    },
    #[error("{key} must be {rule}\n{at}")]
    OutOfRange {
        key: &'static str,
        rule: String,
        at: ConfExcerpt,
    },
    #[error("{key} must be `True` or `False`, capital letter included\n{at}")]
    NotABoolean { key: &'static str, at: ConfExcerpt },
    #[error(
        "the only backend here is `native`: `cudaMallocAsync` is the allocator `async_pool`, and \
         PyTorch has no others\n{at}"
    )]
    Backend { at: ConfExcerpt },
}

impl ConfError {
    /// The byte offset in the text, or the text's length if something is missing at the end.
    pub fn offset(&self) -> usize {
        self.at().offset
    }

    /// The length of the invalid part, or 0 if something is missing.
    pub fn length(&self) -> usize {
        self.at().length
    }

    /// The error in one line, without the excerpt that [`fmt::Display`] adds.
    pub fn rule(&self) -> String {
        self.to_string()
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned()
    }

    /// The setting whose value is wrong, if there is one.
    pub fn setting(&self) -> Option<&'static Setting> {
        match self {
            // Items of a list are named by their kind, not by the key.
            Self::NotANumber { key, .. } | Self::OutOfRange { key, .. }
                if key.contains("an interval") =>
            {
                Setting::from_name("roundup_power2_divisions")
            }
            Self::NotANumber { key, .. }
            | Self::OutOfRange { key, .. }
            | Self::NotABoolean { key, .. } => Setting::from_name(key),
            Self::Backend { .. } => Setting::from_name("backend"),
            Self::TooNew { key, .. } => Setting::from_name(key),
            Self::UnknownKey { .. } | Self::Syntax { .. } => None,
        }
    }

    fn at(&self) -> &ConfExcerpt {
        match self {
            Self::UnknownKey { at, .. }
            | Self::TooNew { at, .. }
            | Self::Syntax { at, .. }
            | Self::NotANumber { at, .. }
            | Self::OutOfRange { at, .. }
            | Self::NotABoolean { at, .. }
            | Self::Backend { at } => at,
        }
    }
}

/// A place in a configuration string. It displays the string and a line of carets below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfExcerpt {
    pub(super) text: String,
    pub(super) offset: usize,
    pub(super) length: usize,
}

impl fmt::Display for ConfExcerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One column per character: tabs and line ends become spaces.
        let line: String = self
            .text
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        let column = self.text[..self.offset].chars().count();
        let carets = self.text[self.offset..self.offset + self.length]
            .chars()
            .count()
            .max(1);
        // Format widths end at 65,535, so they are not used here.
        write!(
            f,
            "  `{line}`\n   {}{}",
            " ".repeat(column),
            "^".repeat(carets)
        )
    }
}
