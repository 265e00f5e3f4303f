use std::time::{SystemTime, UNIX_EPOCH};

use chrono::{DateTime, NaiveDate, Utc};
use derive_more::Display;
use serde::Deserialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Display)]
#[serde(try_from = "String")]
pub struct Date(NaiveDate);

impl Date {
    /// Returns the day of a moment. Moments before 1970 give 1970-01-01.
    pub fn of(moment: SystemTime) -> Self {
        Self(DateTime::<Utc>::from(moment.max(UNIX_EPOCH)).date_naive())
    }
}

impl TryFrom<String> for Date {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        // The parser accepts other forms too, for example a sign and fewer digits.
        let date = text
            .parse()
            .map(Self)
            .ok()
            .filter(|date| date.to_string() == text);
        date.ok_or_else(|| {
            format!("`{text}` is not a day: write year, month and day, as in `2026-11-20`")
        })
    }
}

#[cfg(test)]
mod tests;
