//! Medians over the nights.

use std::collections::BTreeMap;

use crate::bench::record::{Build, EntryOutcome, EntrySummary, NightRecord, Quantity, SuiteRecord};

/// What identifies a series within a suite: case, arm, quantity.
pub(super) type Key<'a> = (String, &'a str, Quantity);

/// The nights of a suite since it was last defined anew, oldest first.
pub(super) struct Trend<'a> {
    /// Each night.
    pub(super) nights: Vec<Night<'a>>,
    /// A figure for each night, where there is one.
    pub(super) series: BTreeMap<Key<'a>, Vec<Option<EntrySummary>>>,
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
    pub(super) fn new(name: &str, nights: &[&'a NightRecord]) -> Self {
        let suites: Vec<(&NightRecord, &SuiteRecord)> =
            nights.iter().filter_map(|night| night.suites.iter().find(|suite| suite.name == name).map(|suite| (*night, suite))).collect();
        let hash = suites.last().map(|(_, suite)| suite.hash.as_str());
        let same = suites.iter().rev().take_while(|(_, suite)| Some(suite.hash.as_str()) == hash).count();
        let suites = &suites[suites.len() - same..];
        let mut series: BTreeMap<Key<'a>, Vec<Option<EntrySummary>>> = BTreeMap::new();
        for (index, (_, suite)) in suites.iter().enumerate() {
            for entry in &suite.entries {
                if let EntryOutcome::Measured(measured) = &entry.outcome {
                    let key = (entry.case(), entry.arm.as_str(), entry.quantity);
                    series.entry(key).or_insert_with(|| vec![None; suites.len()])[index] = Some(measured.summary);
                }
            }
        }
        let nights = suites.iter().map(|(night, _)| Night {
            started: &night.started,
            build: &night.build,
            is_contended: !night.conditions.contended.is_empty(),
        });
        Self { nights: nights.collect(), series }
    }

    /// All figures of a quantity as one: 1 at the first night, and from night to night the geometric mean of the ratios of those entries
    /// that both nights have, so that an entry which comes or goes moves nothing. A ratio to or from zero is left out.
    pub(super) fn index(&self, quantity: Quantity) -> Vec<f64> {
        let mut level = 1.0_f64;
        let mut index = vec![level; self.nights.len().min(1)];
        for night in 1..self.nights.len() {
            let (mut sum, mut number) = (0.0, 0_u32);
            for figures in self.series.iter().filter(|((_, _, of), _)| *of == quantity).map(|(_, figures)| figures) {
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
