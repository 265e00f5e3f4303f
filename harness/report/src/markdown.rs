//! Reports as GitHub-flavored Markdown, one file per part of the page.

mod failure;
mod legend;
mod scenario;
mod steps;
mod summary;

use harness_record::{ClaimFigure, Verdict};

use super::claims::{self, Tested};
use super::escape::{code, prose};
use super::sections::{self, Place};
use super::words::{self, Grid, NOTHING};
use super::{ArmGroup, Report, page::Page};

pub(super) use self::summary::summary;

/// Steps shown with a failure; the scenario's section has all of them.
const STEPS_OF_A_FAILURE: usize = 10;
/// Longer tables are collapsed.
const UNFOLDED: usize = 12;
/// Maximum number of failures, and of skipped arms, at the top of the report.
const LINES_ON_TOP: usize = 15;

/// Renders a report with its pictures, as GitHub-flavored Markdown.
pub(super) fn render(report: &Report<'_>) -> Page {
    let mut page = Page::default();
    page.summary(report);
    if report.counts.total() > 0 {
        page.failures(report);
        for scenario in &report.scenarios {
            page.scenario(report, scenario);
        }
        page.how_to_read(report);
        page.cost_models(report);
    }
    page.ended()
}

impl Page {
    fn summary(&mut self, report: &Report<'_>) {
        self.block("# Out-of-memory report");
        self.block(format!("**{}**", words::verdict_line(report.counts)));
        let remarks = [
            words::not_started(report.records),
            words::model_time_warning(report),
        ];
        remarks
            .iter()
            .flatten()
            .for_each(|text| self.block(prose(text)));
        if report.counts.total() == 0 {
            return;
        }
        self.failures_in_brief(report);
        self.grid(&sections::devices(report));
        self.verdicts(report);
        self.unjudged(report);
        self.claims(report);
    }

    fn failures_in_brief(&mut self, report: &Report<'_>) {
        let lines = report.failures().map(|(place, failure)| {
            let first = failure.first;
            let line = first
                .at
                .as_ref()
                .map_or_else(String::new, |at| format!(" at line {}", at.line));
            format!(
                "[{}](#failure-{}){line}: expected {}; seen: {}",
                place.markdown(),
                place.arm.slug,
                prose(&first.expected),
                prose(&first.seen)
            )
        });
        self.bounded_list(lines.collect(), "failure");
    }

    fn unjudged(&mut self, report: &Report<'_>) {
        let lines = report.unjudged().map(|(place, verdict, reason)| {
            let word = if verdict == "skipped" {
                "Skipped"
            } else {
                "Contended"
            };
            format!("{word}: {}: {}", place.markdown(), prose(reason))
        });
        self.bounded_list(lines.collect(), "skipped or contended arm");
    }

    fn bounded_list(&mut self, lines: Vec<String>, noun: &str) {
        self.list(words::at_most(lines, LINES_ON_TOP, |more| {
            format!("… {} more in the sections below", words::count(more, noun))
        }));
    }

    fn verdicts(&mut self, report: &Report<'_>) {
        let allocators = words::distinct(report.places().map(|place| place.arm.allocator));
        let has_devices = report.devices.len() > 1;
        let names = ["scenario"]
            .into_iter()
            .chain(has_devices.then_some("device"))
            .map(str::to_owned);
        let heads = names.chain(allocators.iter().map(|allocator| code(allocator)));
        let rows = report.by_device().map(|(scenario, on_device)| {
            let mut row = vec![format!(
                "[{}](#scenario-{})",
                code(&scenario.info.name),
                scenario.slug
            )];
            row.extend(has_devices.then(|| prose(&report.devices[on_device.device].label)));
            row.extend(allocators.iter().map(|allocator| {
                let arm = on_device
                    .arms
                    .iter()
                    .find(|arm| arm.allocator == *allocator);
                arm.map_or_else(|| NOTHING.to_owned(), verdict_cell)
            }));
            row
        });
        self.table(&Grid::new("l", heads, rows));
        if report
            .places()
            .any(|place| leaves_out_steps(report, place.arm))
        {
            self.block(
                "The report of several scenarios leaves out the steps of runs that passed. The \
                 report of one scenario has them.",
            );
        }
    }

    fn claims(&mut self, report: &Report<'_>) {
        let rows: Vec<Vec<String>> = claims::tested(report).iter().flat_map(claim_rows).collect();
        if rows.is_empty() {
            return;
        }
        self.block("## Claims");
        self.block(
            "Tested claims about GPU memory. The column PyTorch is measured with a real PyTorch \
             program on the simulated GPU, \
             the column harness with the harness's own allocators.",
        );
        self.table(&Grid::new(
            "lllr",
            ["claim", "verdict", "figure", "PyTorch", "harness"],
            rows,
        ));
    }
}

fn claim_rows(tested: &Tested<'_>) -> Vec<Vec<String>> {
    let Tested {
        scenario,
        claim,
        figures,
        ..
    } = tested;
    let source = match &claim.source {
        Some(url) if url.starts_with("https://") => {
            format!(" ([source](<{}>))", url.replace(['<', '>', '|', '\n'], ""))
        }
        Some(title) => format!(" ({})", prose(title)),
        None => String::new(),
    };
    let says = format!(
        "[{}](#scenario-{}){source}",
        prose(&claim.says),
        scenario.slug
    );
    let because = claim
        .because
        .as_ref()
        .map(|because| format!(": {}", prose(because)))
        .unwrap_or_default();
    let verdict = format!("**{}**{because}", prose(&tested.verdict));
    let cells = |figure: &ClaimFigure| {
        [
            Some(&figure.name),
            figure.pytorch.as_ref(),
            figure.harness.as_ref(),
        ]
        .map(|text| prose(&words::or_nothing(text)))
    };
    let figures = if figures.is_empty() {
        vec![[NOTHING; 3].map(str::to_owned)]
    } else {
        figures.iter().map(cells).collect()
    };
    let names = std::iter::once([says, verdict]).chain(std::iter::repeat_with(Default::default));
    names
        .zip(figures)
        .map(|(names, figure)| names.into_iter().chain(figure).collect())
        .collect()
}

fn verdict_cell(arm: &ArmGroup<'_>) -> String {
    let (words, slug) = (words::arm_verdicts(arm), &arm.slug);
    match &arm.shown().verdict {
        Verdict::Failed { first, .. } => {
            let line = first
                .at
                .as_ref()
                .map_or_else(String::new, |at| format!(", line {}", at.line));
            format!("[**{words}**{line}](#failure-{slug})")
        }
        Verdict::Skipped { .. } => words,
        _ => format!("[{words}](#arm-{slug})"),
    }
}

impl Place<'_, '_> {
    /// The scenario, the allocator and, if the report has several devices, the device.
    fn markdown(&self) -> String {
        let name = &self.scenario.info.name;
        let place = format!("{} with {}", code(name), code(self.arm.allocator));
        if self.has_devices {
            format!("{place} on {}", prose(&self.device.label))
        } else {
            place
        }
    }
}

/// Returns whether the report of several scenarios leaves out the steps of these runs.
fn leaves_out_steps(report: &Report<'_>, arm: &ArmGroup<'_>) -> bool {
    report.scenarios.len() > 1 && arm.shown().verdict == Verdict::Passed
}

#[cfg(test)]
mod tests;
