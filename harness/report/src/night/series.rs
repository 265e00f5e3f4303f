//! Medians over the nights.

use std::collections::BTreeMap;

use harness_base::statistics;
use harness_bench::record::{Build, EntryOutcome, EntrySummary, NightRecord, Quantity, SuiteRecord};

/// What identifies a series within a suite: case, arm, quantity.
pub(super) type Key<'a> = (String, &'a str, Quantity);

/// Figures of one entry over the nights.
pub(super) struct Series<'a> {
    /// Its group: entries of one group and arm make a curve.
    pub(super) group: &'a str,
    /// One a night, where there is one. Host times are corrected by the yardstick, to what it took in the last night.
    pub(super) figures: Vec<Option<EntrySummary>>,
    /// Nights in which it failed.
    pub(super) failed: Vec<usize>,
}

/// The nights of a suite since it was last defined anew, oldest first.
pub(super) struct Trend<'a> {
    /// Each night.
    pub(super) nights: Vec<Night<'a>>,
    /// Its entries.
    pub(super) series: BTreeMap<Key<'a>, Series<'a>>,
}

/// What is told of a night in a trend.
#[derive(Clone, Copy)]
pub(super) struct Night<'a> {
    pub(super) started: &'a str,
    pub(super) build: &'a Build,
    pub(super) is_contended: bool,
}

impl<'a> Trend<'a> {
    /// The trend of a suite up to its last night. Takes time in proportion to the entries of all nights.
    pub(super) fn new(name: &str, all: &[&'a NightRecord]) -> Self {
        let mut trend = Self { nights: Vec::new(), series: BTreeMap::new() };
        let hash = all.iter().rev().find_map(|night| parts(night, name).next()).map(|suite| suite.hash.as_str());
        let is_same = |night: &&NightRecord| parts(night, name).all(|suite| Some(suite.hash.as_str()) == hash);
        let first = all.iter().rposition(|night| !is_same(night)).map_or(0, |redefined| redefined + 1);
        let nights: Vec<&'a NightRecord> = all[first..].iter().copied().filter(|night| parts(night, name).next().is_some()).collect();
        let reference = nights.last().and_then(|night| parts(night, name).find_map(yardstick));
        for (index, &night) in nights.iter().enumerate() {
            let is_contended = !night.conditions.contended.is_empty();
            trend.nights.push(Night { started: &night.started, build: &night.build, is_contended });
            for suite in parts(night, name) {
                let correction = reference.zip(yardstick(suite)).map_or(1.0, |(reference, then)| reference / then);
                trend.add(suite, index, nights.len(), correction);
            }
        }
        trend
    }

    fn add(&mut self, suite: &'a SuiteRecord, index: usize, nights: usize, correction: f64) {
        for entry in &suite.entries {
            let key = (entry.case(), entry.arm.as_str(), entry.quantity);
            let correction = if entry.quantity == Quantity::HostTime { correction } else { 1.0 };
            let none = || Series { group: &entry.group, figures: vec![None; nights], failed: Vec::new() };
            match &entry.outcome {
                EntryOutcome::Measured(measured) => {
                    self.series.entry(key).or_insert_with(none).figures[index] = Some(corrected(measured.summary, correction));
                }
                EntryOutcome::Failed { .. } => self.series.entry(key).or_insert_with(none).failed.push(index),
                EntryOutcome::Skipped { .. } => {}
            }
        }
    }

    /// All figures of a quantity as one: 1 at the first night, and from night to night the geometric mean of the ratios of those entries
    /// that both nights have, so that an entry which comes or goes moves nothing. A ratio to or from zero is left out.
    pub(super) fn index(&self, quantity: Quantity) -> Vec<f64> {
        let mut level = 1.0_f64;
        let mut index = vec![level; self.nights.len().min(1)];
        for night in 1..self.nights.len() {
            let (mut sum, mut number) = (0.0, 0_u32);
            for (_, Series { figures, .. }) in self.series.iter().filter(|((_, _, of), _)| *of == quantity) {
                if let (Some(before), Some(after)) = (figures[night - 1], figures[night])
                    && before.median > 0
                    && after.median > 0
                {
                    sum += (after.median as f64 / before.median as f64).ln();
                    number += 1;
                }
            }
            if number > 0 {
                level *= (sum / f64::from(number)).exp();
            }
            index.push(level);
        }
        index
    }
}

/// The suite of that name; where it was done in parts, each of them.
fn parts<'a>(night: &'a NightRecord, name: &str) -> impl Iterator<Item = &'a SuiteRecord> {
    night.suites.iter().filter(move |suite| suite.name == name)
}

/// What the yardstick took, in picoseconds.
fn yardstick(suite: &SuiteRecord) -> Option<f64> {
    statistics::median(&mut suite.yardstick_ps.clone()).filter(|&picoseconds| picoseconds > 0).map(|picoseconds| picoseconds as f64)
}

fn corrected(summary: EntrySummary, by: f64) -> EntrySummary {
    let scaled = |value: u64| (value as f64 * by).round() as u64;
    EntrySummary { median: scaled(summary.median), low: scaled(summary.low), high: scaled(summary.high), ..summary }
}
