//! The claims that scenarios test, each with its verdict and figures.

use harness_record::{Claim, ClaimFigure, Verdict};

use super::words::NOTHING;
use super::{Report, ScenarioGroup};

/// A claim with the results of its scenario.
pub(super) struct Tested<'a> {
    pub(super) scenario: &'a ScenarioGroup<'a>,
    pub(super) claim: &'a Claim,
    /// Figures of the first arm that has any.
    pub(super) figures: &'a [ClaimFigure],
    /// `true` if all runs of the scenario passed. Only then is the verdict proven.
    pub(super) shown: Shown,
}

/// The evidence for a claim's verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    Passed,
    Failed,
    NotRun,
}

/// All claims of a report, in the order of their scenarios.
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
    /// The verdict, with a warning if the scenario failed or did not run.
    pub(super) fn verdict(&self) -> String {
        match self.shown {
            Shown::Passed => self.claim.verdict.to_string(),
            Shown::Failed => format!("unproven: {}; its scenario fails", self.claim.verdict),
            Shown::NotRun => format!("not tested; expected: {}", self.claim.verdict),
        }
    }
}

/// The figure, or [`NOTHING`].
pub(super) fn or_nothing(figure: Option<&str>) -> &str {
    figure.unwrap_or(NOTHING)
}
