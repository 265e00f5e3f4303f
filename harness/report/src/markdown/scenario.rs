//! The section of a scenario: its picture, times and recoveries, and each of its arms.

use harness_base::files::slug;
use harness_record::{RunRecord, Verdict};

use super::{STEPS_OF_A_FAILURE, UNFOLDED, leaves_out_steps};
use crate::escape::{code, prose, prose_block};
use crate::timing::{self, Timing};
use crate::words;
use crate::{
    ArmGroup, DeviceGroup, Report, ScenarioGroup, ScenarioOnDevice, page::Page, picture, recovery,
    steps::Selection, why,
};

impl Page {
    pub(super) fn scenario(&mut self, report: &Report<'_>, scenario: &ScenarioGroup<'_>) {
        self.anchor(&format!("scenario-{}", scenario.slug));
        self.block(format!("## {}", code(&scenario.info.name)));
        self.block(prose_block(&scenario.info.about));
        self.block(format!(
            "File: {}. Memory limit: {}.",
            code(&scenario.info.path),
            prose(&words::size(scenario.info.memory))
        ));
        for on_device in &scenario.by_device {
            let device = &report.devices[on_device.device];
            if report.devices.len() > 1 {
                self.block(format!("### On {}", prose(&device.label)));
            }
            self.settings(on_device);
            let runs: Vec<&RunRecord> = on_device.arms.iter().map(ArmGroup::shown).collect();
            if let Some(svg) = picture::draw(&runs) {
                let file_name =
                    self.picture(&format!("{}-{}", scenario.slug, slug(&device.label)), svg);
                let name = &scenario.info.name;
                let alt = format!(
                    "Allocated, reserved and device used over the steps of {name}, one panel per \
                     allocator"
                );
                self.block(format!("![{}]({file_name})", prose(&alt)));
            }
            self.timing(on_device, device);
            self.recovery(on_device, device);
            let (brief, full): (Vec<&ArmGroup<'_>>, Vec<_>) =
                (on_device.arms.iter()).partition(|arm| is_brief(report, arm));
            if !brief.is_empty() {
                self.list(brief.into_iter().map(passed));
            }
            for arm in full {
                self.arm(arm, leaves_out_steps(report, arm));
            }
        }
    }

    fn settings(&mut self, on_device: &ScenarioOnDevice<'_>) {
        let arms = on_device.arms.iter().filter_map(|arm| {
            Some(format!(
                "{}: {}",
                code(arm.allocator),
                code(arm.unnamed_settings()?)
            ))
        });
        let arms: Vec<String> = arms.collect();
        if !arms.is_empty() {
            self.block(format!(
                "Settings in the form of `PYTORCH_ALLOC_CONF`: {}.",
                arms.join("; ")
            ));
        }
    }

    fn timing(&mut self, on_device: &ScenarioOnDevice<'_>, device: &DeviceGroup<'_>) {
        let Some(timing) = Timing::new(on_device, device) else {
            return;
        };
        self.block(format!(
            "**{}** on {}",
            timing::title(timing.clock),
            prose(&device.label)
        ));
        self.grid(&timing.grid());
        if !timing.footnotes.is_empty() {
            self.block(prose(&timing.footnotes.join(" ")));
        }
    }

    fn recovery(&mut self, on_device: &ScenarioOnDevice<'_>, device: &DeviceGroup<'_>) {
        let rows = recovery::rows(on_device);
        if rows.is_empty() {
            return;
        }
        self.block("**Recovery**");
        self.grid(&recovery::grid(&rows, device.info.clock));
        for row in rows.iter().filter(|row| !row.recovery.listed.is_empty()) {
            let title = format!(
                "Attempts of {} with {}",
                prose(&words::step_name(row.step)),
                code(row.allocator)
            );
            self.fold(&title, |page| page.grid(&row.attempts()));
        }
    }

    fn arm(&mut self, arm: &ArmGroup<'_>, leaves_out_steps: bool) {
        self.anchor(&format!("arm-{}", arm.slug));
        self.block(format!(
            "#### {}: {}",
            code(arm.allocator),
            words::arm_verdicts(arm)
        ));
        let run = arm.shown();
        let is_above = matches!(run.verdict, Verdict::Failed { .. })
            && (1..=STEPS_OF_A_FAILURE).contains(&run.steps.len());
        match &run.verdict {
            Verdict::Skipped { reason, .. } => {
                return self.block(format!("Skipped: {}", prose(reason)));
            }
            Verdict::Failed { .. } => {
                let steps = if is_above {
                    ", with all its steps,"
                } else {
                    ""
                };
                self.block(format!(
                    "Described in full{steps} [among the failures](#failure-{}).",
                    arm.slug
                ));
            }
            Verdict::Contended { reason } => self.block(format!(
                "Contended: {} The completed steps follow. Repeat the run while no other process \
                 uses the device.",
                prose(&words::sentence(reason))
            )),
            Verdict::Interrupted => self.block(
                "The run was stopped early; the completed steps \
                 follow.",
            ),
            Verdict::FailedAsExpected { reason, first, .. } => {
                self.block(format!(
                    "Failed as expected: {}. {}",
                    prose(reason),
                    prose(&first.to_string())
                ));
            }
            Verdict::Passed => {}
        }
        self.facts(arm, run);
        if let Some(processes) = &run.processes {
            self.grid(&words::processes(processes));
        }
        self.expected_failed_requests(run);
        let selection = Selection::notable(run);
        match run.steps.len() {
            _ if is_above || leaves_out_steps => {}
            0 => self.block("No step ran."),
            steps if steps > UNFOLDED => {
                self.fold(
                    &format!("{} with memory after each", words::count(steps, "step")),
                    |page| page.steps(&selection),
                );
            }
            _ => self.steps(&selection),
        }
        if run.verdict != Verdict::Passed {
            self.fold("Memory summary", |page| {
                page.block(format!("```text\n{}```", run.stats.summary()))
            });
        }
    }

    fn expected_failed_requests(&mut self, run: &RunRecord) {
        if matches!(run.verdict, Verdict::Failed { .. }) {
            return;
        }
        let lines = why::failed_requests(run).map(|(step, failed_request)| {
            let step = format!(
                "{} ({}), {}",
                words::step_name(step),
                words::step_place(step),
                why::request(failed_request)
            );
            format!(
                "Out of memory: {}: {}",
                prose(&step),
                prose(&why::explain(failed_request))
            )
        });
        self.bounded_list(lines.collect(), "failed request");
    }

    fn facts(&mut self, arm: &ArmGroup<'_>, run: &RunRecord) {
        let mut facts = vec![format!("Seed {}.", run.seed)];
        if run.only_observed {
            facts.push(
                "Observed, not judged: unmet expectations of the scenario are noted and do \
                 not fail the run."
                    .to_owned(),
            );
        }
        facts.extend(
            run.settings
                .iter()
                .map(|settings| format!("Settings: {}.", code(settings))),
        );
        facts.extend(checks(run).map(str::to_owned));
        if arm.runs.len() > 1 {
            facts.push(format!(
                "The steps belong to repetition {} of {}.",
                run.repetition + 1,
                arm.runs.len()
            ));
        }
        if let Some(step) = run.steps.last() {
            facts.push(format!(
                "Context overhead: {}.",
                prose(&words::size(step.accounts.device.context_overhead))
            ));
        }
        facts.push(format!("Reproduce: {}", code(&run.reproduce)));
        self.block(facts.join(" "));
    }
}

/// Returns whether the report of several scenarios has one line for these runs.
fn is_brief(report: &Report<'_>, arm: &ArmGroup<'_>) -> bool {
    let run = arm.shown();
    leaves_out_steps(report, arm)
        && run.processes.is_none()
        && why::failed_requests(run).next().is_none()
}

/// The line of runs that passed.
fn passed(arm: &ArmGroup<'_>) -> String {
    format!(
        "<a id=\"arm-{}\"></a>{}: {}. Reproduce: {}",
        arm.slug,
        code(arm.allocator),
        words::arm_verdicts(arm),
        code(&arm.shown().reproduce)
    )
}

/// Returns whether the run was checked and timed. `None` if it did not start.
const fn checks(run: &RunRecord) -> Option<&'static str> {
    match (run.audited, run.timed) {
        (None, _) => None,
        (Some(true), true) => Some("Audited and timed."),
        (Some(false), true) => Some("Timed, not audited."),
        (Some(true), false) => Some("Audited, not timed."),
        (Some(false), false) => Some("Neither audited nor timed."),
    }
}
