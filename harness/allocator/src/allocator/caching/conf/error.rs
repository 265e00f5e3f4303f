//! What can be wrong with a configuration string: [`ConfError`], with PyTorch's rule in words and the place ([`Excerpt`]).

use std::fmt;

use super::Setting;

/// A configuration string that PyTorch would refuse, or that asks for what is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum ConfError {
    /// Correct the key to one of [`Setting::ALL`], or leave the setting out.
    #[error("`{key}` is not a setting of PyTorch 2.11's allocator\n{at}")]
    UnknownKey { key: String, at: Excerpt },
    /// Write what is expected.
    #[error("expected {expected}; settings are written `KEY:VALUE,KEY:VALUE`\n{at}")]
    Syntax {
        /// What is accepted there.
        expected: &'static str,
        at: Excerpt,
    },
    /// Write a number.
    #[error("{key} must be {form}\n{at}")]
    NotANumber { key: &'static str, form: &'static str, at: Excerpt },
    /// Choose a value that PyTorch allows.
    #[error("{key} must be {rule}\n{at}")]
    OutOfRange {
        key: &'static str,
        /// What PyTorch allows.
        rule: String,
        at: Excerpt,
    },
    /// Write `True` or `False`.
    #[error("{key} must be `True` or `False`, capital letter included\n{at}")]
    NotABoolean { key: &'static str, at: Excerpt },
    /// Leave the backend out.
    #[error("the only backend here is `native`: PyTorch's `cudaMallocAsync` is not this allocator, and it knows no others\n{at}")]
    Backend { at: Excerpt },
}

impl ConfError {
    /// Where in the text, in bytes; its length for something missing at the end.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.at().offset
    }

    /// How many bytes are meant; 0 for something missing.
    #[must_use]
    pub fn length(&self) -> usize {
        self.at().length
    }

    /// What is wrong and what would be right, in one line, without the excerpt that [`fmt::Display`] adds.
    #[must_use]
    pub fn rule(&self) -> String {
        self.to_string().lines().next().unwrap_or_default().to_owned()
    }

    /// The setting whose value is wrong, where it is one.
    #[must_use]
    pub fn setting(&self) -> Option<&'static Setting> {
        match self {
            // A list's items are told by what they are, not by the key.
            Self::NotANumber { key, .. } | Self::OutOfRange { key, .. } if key.contains("an interval") => {
                Setting::from_name("roundup_power2_divisions")
            }
            Self::NotANumber { key, .. } | Self::OutOfRange { key, .. } | Self::NotABoolean { key, .. } => Setting::from_name(key),
            Self::Backend { .. } => Setting::from_name("backend"),
            Self::UnknownKey { .. } | Self::Syntax { .. } => None,
        }
    }

    fn at(&self) -> &Excerpt {
        match self {
            Self::UnknownKey { at, .. }
            | Self::Syntax { at, .. }
            | Self::NotANumber { at, .. }
            | Self::OutOfRange { at, .. }
            | Self::NotABoolean { at, .. }
            | Self::Backend { at } => at,
        }
    }
}

/// A place in a configuration string: displayed as the string and a line of carets below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    pub(super) text: String,
    pub(super) offset: usize,
    pub(super) length: usize,
}

impl fmt::Display for Excerpt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One column a character: tabs and line ends become blanks.
        let line: String = self.text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        let column = self.text[..self.offset].chars().count();
        let carets = self.text[self.offset..self.offset + self.length].chars().count().max(1);
        // Not as widths of a format: those end at 65,535.
        write!(f, "  `{line}`\n   {}{}", " ".repeat(column), "^".repeat(carets))
    }
}
