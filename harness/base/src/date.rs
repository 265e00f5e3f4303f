//! Calendar dates.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Deserialize;

/// A day in UTC, written as `2026-11-20`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct Date {
    year: u16,
    month: u8,
    day: u8,
}

impl Date {
    /// Returns the day of a moment. Moments before 1970 give 1970-01-01.
    pub fn of(moment: SystemTime) -> Self {
        let seconds = moment.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        civil(seconds / 86_400)
    }

    /// Returns the following day.
    pub const fn next(self) -> Self {
        let Self { year, month, day } = self;
        match (day < days_of(year, month), month < 12) {
            (true, _) => Self { day: day + 1, ..self },
            (false, true) => Self { month: month + 1, day: 1, ..self },
            (false, false) => Self { year: year + 1, month: 1, day: 1 },
        }
    }
}

/// Converts days since 1 January 1970 to a date, with `civil_from_days` of
/// <https://howardhinnant.github.io/date_algorithms.html>. Years begin in March, and the calendar repeats every 400 years.
const fn civil(days: u64) -> Date {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + (month <= 2) as u64;
    Date { year: year as u16, month: month as u8, day: day as u8 }
}

const fn days_of(year: u16, month: u8) -> u8 {
    match month {
        4 | 6 | 9 | 11 => 30,
        2 if year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400)) => 29,
        2 => 28,
        _ => 31,
    }
}

impl TryFrom<String> for Date {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let read = || {
            let [year, month, day] = text.split('-').collect::<Vec<_>>()[..] else { return None };
            let digits = [(year, 4), (month, 2), (day, 2)];
            let plain = digits.iter().all(|(field, len)| field.len() == *len && field.bytes().all(|byte| byte.is_ascii_digit()));
            let (year, month, day) = (year.parse().ok()?, month.parse().ok()?, day.parse().ok()?);
            (plain && (1..=12).contains(&month) && (1..=days_of(year, month)).contains(&day)).then_some(Self { year, month, day })
        };
        read().ok_or_else(|| format!("`{text}` is not a day: write year, month and day, as in `2026-11-20`"))
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

#[cfg(test)]
mod tests;
