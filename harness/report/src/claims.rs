use harness_record::{Claim, ClaimFigure, Verdict};

use super::{Report, ScenarioGroup};

pub(super) struct Tested<'a> {
    pub(super) scenario: &'a ScenarioGroup<'a>,
    pub(super) claim: &'a Claim,
    /// Figures of the first arm that has any.
    pub(super) figures: &'a [ClaimFigure],
    pub(super) verdict: String,
}

pub(super) fn tested<'a>(report: &'a Report<'a>) -> Vec<Tested<'a>> {
    let of_scenario = |scenario: &'a ScenarioGroup<'a>| {
        let claim = scenario.info.claim.as_ref()?;
        let arms = || {
            scenario
                .by_device
                .iter()
                .flat_map(|on_device| &on_device.arms)
        };
        let figures = arms()
            .map(|arm| arm.shown().figures.as_slice())
            .find(|figures| !figures.is_empty())
            .unwrap_or_default();
        let verdict = match claim.verdict.words() {
            verdict if arms().any(|arm| matches!(arm.shown().verdict, Verdict::Failed { .. })) => {
                format!("unproven: {verdict}; its scenario fails")
            }
            verdict if arms().any(|arm| arm.shown().verdict == Verdict::Passed) => {
                verdict.to_owned()
            }
            verdict => format!("not tested; expected: {verdict}"),
        };
        Some(Tested {
            scenario,
            claim,
            figures,
            verdict,
        })
    };
    report.scenarios.iter().filter_map(of_scenario).collect()
}
