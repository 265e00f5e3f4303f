mod summary;

use std::collections::BTreeSet;

use harness_allocator::{device::Clock, units::Bytes};
use harness_base::{files::slug, statistics::LEAST_FOR_P99};

use super::claims::{self, Tested};
use super::escape::{code, fenced, prose, prose_block};
use super::timing::{self, Timing};
use super::words::{self, Grid, NOTHING};
use super::{
    ArmGroup, DeviceGroup, Report, ScenarioGroup, ScenarioOnDevice, page::Page, picture, recovery,
    steps::Selection, why,
};
use harness_record::{
    ClaimFigure, CostFigure, PinnedSegment, RunRecord, StepRecord, Table, Verdict, Violation,
};

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
        self.devices(report);
        self.verdicts(report);
        self.skipped(report);
        self.claims(report);
    }

    fn failures_in_brief(&mut self, report: &Report<'_>) {
        let lines = report.arms().filter_map(|(scenario, device, arm)| {
            let first = arm.shown().verdict.violation()?;
            let place = where_it_ran(report, scenario, device, arm);
            let line = first
                .at
                .as_ref()
                .map_or_else(String::new, |at| format!(" at line {}", at.line));
            Some(format!(
                "[{place}](#failure-{}){line}: expected {}; seen: {}",
                arm.slug,
                prose(&first.expected),
                prose(&first.seen)
            ))
        });
        self.bounded_list(lines.collect(), "failure");
    }

    fn skipped(&mut self, report: &Report<'_>) {
        let lines = report.arms().filter_map(|(scenario, device, arm)| {
            let (word, reason) = match &arm.shown().verdict {
                Verdict::Skipped { reason, .. } => ("Skipped", reason),
                Verdict::Contended { reason } => ("Contended", reason),
                _ => return None,
            };
            Some(format!(
                "{word}: {}: {}",
                where_it_ran(report, scenario, device, arm),
                prose(reason)
            ))
        });
        self.bounded_list(lines.collect(), "skipped or contended arm");
    }

    fn bounded_list(&mut self, lines: Vec<String>, noun: &str) {
        self.list(words::at_most(lines, LINES_ON_TOP, |more| {
            format!("… {} more in the sections below", words::count(more, noun))
        }));
    }

    fn verdicts(&mut self, report: &Report<'_>) {
        let allocators = words::distinct(report.arms().map(|(_, _, arm)| arm.allocator));
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
        let mut arms = report.arms().map(|(_, _, arm)| arm);
        if arms.any(|arm| leaves_out_steps(report, arm)) {
            self.block(
                "The report of several scenarios leaves out the steps of runs that passed. \
                 `records.json` has them, and so does the report of one scenario.",
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

    fn devices(&mut self, report: &Report<'_>) {
        let heads = [
            "device",
            "memory",
            "clock",
            "driver",
            "CUDA",
            "clocks (SM / memory)",
            "identity and state at the start",
        ];
        self.table(&Grid::new(
            "l",
            heads,
            report.devices.iter().map(device_cells),
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

fn device_cells(device: &DeviceGroup<'_>) -> Vec<String> {
    let print = &device.info.fingerprint;
    let (sm, memory): (BTreeSet<u32>, BTreeSet<u32>) = device.clocks_mhz.iter().copied().unzip();
    let clocks =
        (!sm.is_empty()).then(|| format!("{} / {} MHz", words::range(&sm), words::range(&memory)));
    let mut state: Vec<String> = print
        .uuid_hash
        .iter()
        .map(|hash| format!("UUID hash {hash}"))
        .collect();
    state.extend(
        print
            .mig
            .map(|on| if on { "MIG on" } else { "MIG off" }.to_owned()),
    );
    state.extend(
        print
            .ecc
            .map(|on| if on { "ECC on" } else { "ECC off" }.to_owned()),
    );
    state.extend(
        device
            .other_processes
            .map(|number| format!("other processes: {number}")),
    );
    if !device.throttle_reasons.is_empty() {
        let reasons: Vec<&str> = device.throttle_reasons.iter().copied().collect();
        state.push(format!("throttled: {}", reasons.join(", ")));
    }
    let cells = [
        device.label.clone(),
        words::memory(device),
        words::clock(device),
        words::or_nothing(print.driver.as_deref()),
        words::or_nothing(print.cuda.as_deref()),
        words::or_nothing(clocks),
        words::unless_empty(state.join(", ")),
    ];
    cells.map(|cell| prose(&cell)).to_vec()
}

fn where_it_ran(
    report: &Report<'_>,
    scenario: &ScenarioGroup<'_>,
    device: &DeviceGroup<'_>,
    arm: &ArmGroup<'_>,
) -> String {
    let place = format!("{} with {}", code(&scenario.info.name), code(arm.allocator));
    if report.devices.len() > 1 {
        format!("{place} on {}", prose(&device.label))
    } else {
        place
    }
}

impl Page {
    fn failures(&mut self, report: &Report<'_>) {
        if report.counts.failed == 0 {
            return;
        }
        self.block("## Failures");
        for (scenario, device, arm) in report.arms() {
            let run = arm.shown();
            if let Verdict::Failed { first, rest } = &run.verdict {
                self.anchor(&format!("failure-{}", arm.slug));
                self.block(format!(
                    "### {}",
                    where_it_ran(report, scenario, device, arm)
                ));
                self.failure(arm, run, first, rest);
            }
        }
    }

    fn failure(
        &mut self,
        arm: &ArmGroup<'_>,
        run: &RunRecord,
        first: &Violation,
        rest: &[Violation],
    ) {
        self.violation(first);
        self.why(run);
        if !rest.is_empty() {
            self.block("Other violations at the same step:");
            rest.iter().for_each(|violation| self.violation(violation));
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
        self.where_the_memory_was(run, last);
        self.pinned_segments(last);
        let shown_above: Vec<&str> = std::iter::once(first)
            .chain(rest)
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

    fn why(&mut self, run: &RunRecord) {
        if let Some(last) = run.steps.last()
            && let Some(failed_request) = &last.failed_request
        {
            let request = format!(
                "The request: {}, {} ({}).",
                words::step_name(last),
                why::request(failed_request),
                words::step_place(last)
            );
            self.block(format!(
                "**{}:** {} {}",
                why::title(failed_request),
                prose(&why::explain(failed_request)),
                prose(&request)
            ));
        }
    }

    fn pinned_segments(&mut self, last: &StepRecord) {
        let Some(failed_request) = last
            .failed_request
            .as_ref()
            .filter(|failed_request| !failed_request.pinned.is_empty())
        else {
            return;
        };
        let cells = |segment: &PinnedSegment| {
            vec![
                words::size(segment.size),
                words::size(segment.free),
                why::holders_of(segment),
            ]
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
        self.grid(&Grid::new(
            "rrl",
            ["segment of", "free in it", "live in it"],
            failed_request.pinned.iter().map(cells),
        ));
    }

    /// Adds a table of memory by owner, at the moment of the failed request or else after the last
    /// step.
    fn where_the_memory_was(&mut self, run: &RunRecord, last: &StepRecord) {
        let accounts = last
            .failed_request
            .as_ref()
            .map_or(&last.accounts, |failed_request| &failed_request.accounts);
        let device = &accounts.device;
        let unallocated = accounts.reserved.saturating_sub(accounts.active);
        // The counters belong to the last step of the run. If steps are unrecorded, that is not
        // this step.
        let after = (run.unrecorded_steps == 0)
            .then_some(Bytes(run.stats.inactive_split_bytes.all.current));
        let split = last
            .failed_request
            .as_ref()
            .map(|failed_request| failed_request.inactive_split)
            .or(after);
        let split = split
            .map(|split| split.min(unallocated))
            .filter(|&split| split > Bytes::ZERO);
        let beyond = device.used.saturating_sub(
            device.context_overhead + accounts.reserved + device.pressure + device.processes,
        );
        let always = |name, size| Some((name, size));
        let if_any = |name, size| (size > Bytes::ZERO).then_some((name, size));
        let rows = [
            always("limit", run.scenario.memory),
            always("free on the device", device.free),
            if_any("in use by other processes", device.pressure),
            if_any("in use by other processes of the run", device.processes),
            if_any(
                "device used beyond reserved (the driver's rounding, other processes)",
                beyond,
            ),
            always("reserved by the allocator", accounts.reserved),
            always("– allocated", accounts.allocated),
            if_any(
                "– freed, but waiting for an event",
                accounts.active.saturating_sub(accounts.allocated),
            ),
            always("– free", unallocated),
            split.and_then(|split| {
                always("– – in segments with live blocks (inactive split)", split)
            }),
            split.and_then(|split| {
                always("– – in free segments", unallocated.saturating_sub(split))
            }),
        ];
        let rows = rows
            .into_iter()
            .flatten()
            .map(|(name, size)| vec![name.to_owned(), words::size(size)]);
        let when = if last.failed_request.is_some() {
            "when the request failed in"
        } else {
            "after"
        };
        self.block(format!("Memory by owner {when} step {}:", last.number));
        self.grid(&Grid::new("lr", ["the memory", "size"], rows));
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

impl Page {
    fn scenario(&mut self, report: &Report<'_>, scenario: &ScenarioGroup<'_>) {
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
            for arm in &on_device.arms {
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
        self.block(prose(&timing.footnotes.join(" ")));
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

    fn steps(&mut self, selection: &Selection<'_>) {
        if selection.left_out() > 0 {
            self.block(
                "Long run: the table has the first and last steps, and steps with events between \
                 them. `records.json` has all of them.",
            );
        }
        self.grid(&selection.grid());
        self.unrecorded(selection.run);
        self.list(
            selection
                .steps()
                .flat_map(|step| notes(step, &[]).into_iter().chain(counted(step))),
        );
        self.step_tables(selection, UNFOLDED);
    }

    fn unrecorded(&mut self, run: &RunRecord) {
        words::unrecorded(run)
            .iter()
            .for_each(|text| self.block(text));
    }

    fn step_tables(&mut self, selection: &Selection<'_>, unfolded: usize) {
        for (step, table) in selection
            .steps()
            .flat_map(|step| step.tables.iter().map(move |table| (step, table)))
        {
            self.step_table(step, table, unfolded);
        }
    }

    fn step_table(&mut self, step: &StepRecord, table: &Table, unfolded: usize) {
        let title = format!("Step {}: {}", step.number, prose(&table.title));
        let grid = Grid::new("l", &table.columns, table.rows.clone());
        if table.rows.len() > unfolded {
            self.fold(&title, |page| page.grid(&grid));
        } else {
            self.block(title);
            self.grid(&grid);
        }
    }
}

/// Returns whether the report of several scenarios leaves out the steps of these runs.
fn leaves_out_steps(report: &Report<'_>, arm: &ArmGroup<'_>) -> bool {
    report.scenarios.len() > 1 && arm.shown().verdict == Verdict::Passed
}

/// Returns whether the run was checked and timed. `None` if it did not start, and in records of
/// older builds.
const fn checks(run: &RunRecord) -> Option<&'static str> {
    match (run.audited, run.timed) {
        (None, _) => None,
        (Some(true), true) => Some("Audited and timed."),
        (Some(false), true) => Some("Timed, not audited."),
        (Some(true), false) => Some("Audited, not timed."),
        (Some(false), false) => Some("Neither audited nor timed."),
    }
}

fn notes(step: &StepRecord, shown_above: &[&str]) -> Vec<String> {
    let new = step
        .notes
        .iter()
        .filter(|note| !shown_above.contains(&note.as_str()));
    new.map(|note| format!("Step {}: {}", step.number, prose(note)))
        .collect()
}

fn counted(step: &StepRecord) -> Option<String> {
    let figures: Vec<String> = step
        .reports
        .iter()
        .map(|(name, &value)| format!("{} = {}", code(name), prose(&words::metric(name, value))))
        .collect();
    (!figures.is_empty()).then(|| format!("Step {} counted: {}", step.number, figures.join(", ")))
}

impl Page {
    fn how_to_read(&mut self, report: &Report<'_>) {
        self.block("## How to read this");
        let max = format!(
            "**max**: the largest sample, shown instead of p99 for fewer than {LEAST_FOR_P99} \
             samples."
        );
        let lines = [
            "**requested**: bytes requested by the caller.",
            "**allocated**: requested bytes after rounding.",
            "**active**: allocated bytes, plus freed blocks that wait for an event of another \
             stream.",
            "**reserved**: memory obtained from the driver, including cached memory.",
            "**device used**: NVML's figure for the whole device; the tables show it without the \
             context overhead.",
            "**context overhead**: device used before the first allocation: the CUDA context, its \
             modules, and other processes.",
            "**peak**: the maximum since the start of the run or the last reset.",
            "**allocator retry**: a failed driver allocation, after which the allocator released \
             its cache and tried again (`num_alloc_retries`).",
            "**OOM**: a request that failed after all allocator retries.",
            "**fits after 1 retry**: the step's recovery policy repeated a failed request. \
             Allocator retries do not count.",
            "**rank**: position among completed trainings of the same arm with the same model and \
             first request, but other recovery policies. \
             Ordered by throughput (completed samples divided by the time of the step), then by \
             effective batch.",
            "**memory summary**: the allocator's counters at the end of a run that did not pass, \
             laid out as by `torch.cuda.memory_summary()`; \
             *non-releasable*: free memory in segments with live blocks. Oversize allocations are \
             not counted. `harness run --memory-summary` \
             prints it for every run.",
            "**runs**: repetitions that passed. Allocators take turns, so a drift of the device \
             affects all of them.",
            "**audited and timed**: a run is checked after every operation. If it passes, it is \
             repeated on a new device without checks, to \
             measure times.",
            "**median, MAD, p99**: the median sample, the median absolute deviation (unscaled), \
             and the 99th percentile by nearest rank.",
            &max,
            "**(n)**: number of samples; `a of b`: a random sample of a from b operations.",
            "**÷ direct**: the median divided by the median of `direct`, which calls the driver \
             for every request. Below 1 is faster.",
        ];
        let is_simulated = report
            .devices
            .iter()
            .any(|device| device.info.clock == Clock::Simulated);
        let model_times = is_simulated.then_some(
            "**0 ns**, as a model time: an operation without a device call, for example an \
             allocation from the cache. The model charges \
             device calls only, not the allocator's work on the host.",
        );
        let lines = lines.into_iter().chain(model_times).map(str::to_owned);
        self.list(lines);
        self.block(format!(
            "Written from records of harness {}.",
            prose(&report.records.harness)
        ));
        self.block(format!(
            "Sizes have binary units (1 MiB = {} bytes); if the short form rounds, the bytes \
             follow in parentheses.",
            Bytes::mib(1).get()
        ));
    }

    /// Adds each cost model once, even if several devices use it.
    fn cost_models(&mut self, report: &Report<'_>) {
        let mut shown: Vec<(Option<&str>, &[&CostFigure])> = Vec::new();
        for device in report
            .devices
            .iter()
            .filter(|device| !device.cost_figures.is_empty())
        {
            let model = (
                device.info.fingerprint.cost_model.as_deref(),
                device.cost_figures.as_slice(),
            );
            if !shown.contains(&model) {
                shown.push(model);
                self.cost_model(model.0.unwrap_or("without a name"), model.1);
            }
        }
    }

    pub(super) fn cost_figures<'f>(&mut self, figures: impl Iterator<Item = &'f CostFigure>) {
        let cells = |figure: &CostFigure| {
            vec![
                figure.name.clone(),
                figure.value.clone(),
                figure.source.clone(),
            ]
        };
        self.grid(&Grid::new(
            "lrl",
            ["operation", "charge", "source"],
            figures.map(cells),
        ));
    }

    fn cost_model(&mut self, name: &str, figures: &[&CostFigure]) {
        self.fold(
            &format!(
                "Cost model {}: the charge for each operation, and its source",
                prose(name)
            ),
            |page| {
                page.cost_figures(figures.iter().copied());
            },
        );
    }
}

#[cfg(test)]
mod tests;
