//! The claims that scenarios put to the test, each with its verdict and figures.

use harness_record::{Claim, ClaimFigure, Verdict};

use super::words::NOTHING;
use super::{Report, ScenarioGroup};

/// A claim with what the runs of its scenario found.
pub(super) struct Tested<'a> {
    pub(super) scenario: &'a ScenarioGroup<'a>,
    pub(super) claim: &'a Claim,
    /// Of the first arm that has some.
    pub(super) figures: &'a [ClaimFigure],
    /// Whether the scenario was run and all its runs passed, so that the verdict is shown by them.
    pub(super) shown: Shown,
}

/// What the runs say of a claim's verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    Passed,
    Failed,
    NotRun,
}

/// All claims of a report, in the order in which their scenarios ran.
pub(super) fn tested<'a>(report: &'a Report<'a>) -> Vec<Tested<'a>> {
    report.scenarios.iter().filter_map(of_scenario).collect()
}

fn of_scenario<'a>(scenario: &'a ScenarioGroup<'a>) -> Option<Tested<'a>> {
    let claim = scenario.info.claim.as_ref()?;
    let arms = || scenario.by_device.iter().flat_map(|on_device| &on_device.arms);
    let figures = arms().map(|arm| arm.shown().figures.as_slice()).find(|figures| !figures.is_empty()).unwrap_or_default();
    let shown = match arms().any(|arm| matches!(arm.shown().verdict, Verdict::Failed { .. })) {
        true => Shown::Failed,
        false if arms().any(|arm| arm.shown().verdict == Verdict::Passed) => Shown::Passed,
        false => Shown::NotRun,
    };
    Some(Tested { scenario, claim, figures, shown })
}

impl Tested<'_> {
    /// The verdict in words; that of a scenario that failed, or was not run, is not shown to be true.
    pub(super) fn verdict(&self) -> String {
        match self.shown {
            Shown::Passed => self.claim.verdict.to_string(),
            Shown::Failed => format!("was said to be: {}; its scenario fails", self.claim.verdict),
            Shown::NotRun => format!("not tried; it is said: {}", self.claim.verdict),
        }
    }
}

/// A figure of a claim, or that there is none.
pub(super) fn or_nothing(figure: Option<&str>) -> &str {
    figure.unwrap_or(NOTHING)
}
