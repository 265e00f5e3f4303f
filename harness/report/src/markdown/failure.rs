//! The failures of a report, each in full.

use harness_record::{RunRecord, Violation};

use super::STEPS_OF_A_FAILURE;
use super::steps::{counted, notes};
use crate::escape::{code, fenced, prose};
use crate::sections::{self, Failure};
use crate::words;
use crate::{ArmGroup, Report, page::Page, steps::Selection, why};

impl Page {
    pub(super) fn failures(&mut self, report: &Report<'_>) {
        if report.counts.failed == 0 {
            return;
        }
        self.block("## Failures");
        for (place, failure) in report.failures() {
            self.anchor(&format!("failure-{}", place.arm.slug));
            self.block(format!("### {}", place.markdown()));
            self.failure(place.arm, &failure);
        }
    }

    fn failure(&mut self, arm: &ArmGroup<'_>, failure: &Failure<'_>) {
        let run = failure.run;
        self.violation(failure.first);
        self.why(failure);
        if !failure.rest.is_empty() {
            self.block("Other violations at the same step:");
            failure
                .rest
                .iter()
                .for_each(|violation| self.violation(violation));
        }
        self.other_failures(arm, run);
        if let Some(settings) = arm.unnamed_settings() {
            self.block(format!("Settings: {}", code(settings)));
        }
        self.block("Reproduce it:");
        self.command(&run.reproduce);
        let selection = Selection::last(run, STEPS_OF_A_FAILURE);
        let Some(last) = selection.steps().last() else {
            return;
        };
        let when = if failure.request.is_some() {
            "when the request failed in"
        } else {
            "after"
        };
        self.block(format!("Memory by owner {when} step {}:", last.number));
        self.grid(&sections::memory_by_owner(run, last));
        self.pinned_segments(failure);
        let shown_above: Vec<&str> = failure
            .violations()
            .map(|violation| violation.seen.as_str())
            .collect();
        self.list(selection.steps().flat_map(|step| notes(step, &shown_above)));
        self.step_tables(&selection, usize::MAX);
        let shown = words::count(selection.steps().count(), "step");
        let which = if selection.left_out() > 0 {
            format!("The last {shown}")
        } else {
            "All steps".to_owned()
        };
        self.block(format!("{which} ([picture and times](#arm-{})):", arm.slug));
        self.grid(&selection.grid());
        self.list(selection.steps().filter_map(counted));
        self.unrecorded(run);
    }

    fn why(&mut self, failure: &Failure<'_>) {
        if let Some((last, failed_request)) = failure.request
            && let Some((title, why)) = failure.why()
        {
            let request = format!(
                "The request: {}, {} ({}).",
                words::step_name(last),
                why::request(failed_request),
                words::step_place(last)
            );
            self.block(format!(
                "**{}:** {} {}",
                title,
                prose(&why),
                prose(&request)
            ));
        }
    }

    fn pinned_segments(&mut self, failure: &Failure<'_>) {
        let Some((_, failed_request)) = failure
            .request
            .filter(|(_, failed_request)| !failed_request.pinned.is_empty())
        else {
            return;
        };
        let unlisted = failed_request.pinned_unlisted;
        let more = if unlisted.count == 0 {
            String::new()
        } else {
            format!(
                " {} more such segments have {} free.",
                unlisted.count,
                words::size(unlisted.free)
            )
        };
        self.block(format!(
            "Segments whose free memory cannot be released to the driver, because \
             they contain live blocks.{more}"
        ));
        self.grid(&sections::pinned_segments(failed_request));
    }

    fn violation(&mut self, violation: &Violation) {
        self.block(fenced("text", &words::violation(violation)));
    }

    fn other_failures(&mut self, arm: &ArmGroup<'_>, shown: &RunRecord) {
        let others = arm.runs.iter().filter(|run| !std::ptr::eq(**run, shown));
        let line = |run: &&RunRecord| {
            Some(format!(
                "repetition {} (seed {}): {}",
                run.repetition + 1,
                run.seed,
                prose(&run.verdict.violation()?.to_string())
            ))
        };
        let others: Vec<String> = others.filter_map(line).collect();
        if !others.is_empty() {
            let (shown, total) = (shown.repetition + 1, arm.runs.len());
            self.block(format!(
                "This is repetition {shown} of {total}. Other repetitions failed too:"
            ));
            self.bounded_list(others, "failed repetition");
        }
    }
}
