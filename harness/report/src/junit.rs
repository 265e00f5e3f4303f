//! JUnit output for continuous integration: scenario runs and benchmark entries as test cases.
//!
//! Readers of JUnit take `time` for measured time, so simulated times are properties instead.

use std::time::Duration;

use harness_allocator::{device::Clock, units::Nanos};
use quick_junit::{NonSuccessKind, Report as Document, TestCase, TestCaseStatus, TestSuite};

use super::{ArmGroup, DeviceGroup, Report, ScenarioGroup, bench, sections::Failure, why, words};
use harness_bench::record::{
    BenchRun, Change, Entry, EntryName, EntryResult, SuiteRecord, Verdict as BenchVerdict,
};
use harness_record::{RunRecord, Verdict};

/// Renders scenario runs: one suite per scenario, one case per allocator and repetition.
pub fn of_runs(report: &Report<'_>) -> String {
    let mut document = Document::new("harness run");
    for scenario in &report.scenarios {
        let mut suite = TestSuite::new(scenario.info.id());
        suite.add_property(("file", scenario.info.path.as_str()));
        for on_device in &scenario.by_device {
            for arm in &on_device.arms {
                suite.add_test_cases(arm.runs.iter().map(|run| {
                    run_case(
                        report,
                        scenario,
                        &report.devices[on_device.device],
                        arm,
                        run,
                    )
                }));
            }
        }
        document.add_test_suite(suite);
    }
    if !report.records.not_started.is_empty() {
        let mut suite = TestSuite::new("not started");
        suite.add_test_cases(report.records.not_started.iter().map(|run| {
            let name = format!("{}, repetition {}", run.allocator, run.repetition + 1);
            let mut case = TestCase::new(name, skipped("not started", "not started"));
            case.set_classname(run.scenario.as_str());
            case
        }));
        document.add_test_suite(suite);
    }
    written(&document)
}

fn run_case(
    report: &Report<'_>,
    scenario: &ScenarioGroup<'_>,
    device: &DeviceGroup<'_>,
    arm: &ArmGroup<'_>,
    run: &RunRecord,
) -> TestCase {
    let mut name = run.allocator.clone();
    if report.devices.len() > 1 {
        name.push_str(&format!(" on {}", device.label));
    }
    if arm.runs.len() > 1 {
        name.push_str(&format!(", repetition {}", run.repetition + 1));
    }
    let mut case = TestCase::new(name, run_status(run));
    case.set_classname(scenario.info.id());
    case.add_property(("device", device.label.as_str()));
    case.add_property(("seed", run.seed.to_string().as_str()));
    case.add_property(("reproduce", run.reproduce.as_str()));
    for (step, failed_request) in why::failed_requests(run) {
        let value = format!(
            "{}: {}",
            harness_record::cause_names(failed_request).join(", "),
            why::explain(failed_request)
        );
        case.add_property((
            format!("out of memory at line {}", step.line).as_str(),
            value.as_str(),
        ));
    }
    if run.verdict == Verdict::Passed && run.timings.scenario > Nanos::ZERO {
        if run.device.clock == Clock::Measured {
            case.set_time(Duration::from_nanos(run.timings.scenario.get()));
        } else {
            case.add_property((
                "model time (simulated clock), not measured",
                run.timings.scenario.to_string().as_str(),
            ));
        }
    }
    case
}

fn run_status(run: &RunRecord) -> TestCaseStatus {
    match &run.verdict {
        Verdict::Passed | Verdict::FailedAsExpected { .. } => TestCaseStatus::success(),
        Verdict::Failed { first, rest } => {
            let failed = Failure::new(run, first, rest);
            let violations: Vec<String> = failed.violations().map(words::violation).collect();
            let why = failed
                .why()
                .map_or_else(String::new, |(title, why)| format!("\n\n{title}: {why}"));
            let description = format!(
                "{}{why}\n\nReproduce it:\n{}",
                violations.join("\n"),
                run.reproduce
            );
            failure(&first.rule.to_string(), &first.to_string(), &description)
        }
        Verdict::Skipped { reason, .. } => skipped("skipped", reason),
        Verdict::Contended { reason } => skipped("contended", reason),
        Verdict::Interrupted => skipped("interrupted", "stopped before its end"),
    }
}

/// Renders a benchmark run: one suite per suite, one case per entry. Regressions and broken entries
/// are failures.
pub fn of_bench(record: &BenchRun) -> String {
    let mut document = Document::new(format!("harness bench on {}", record.machine.device));
    for suite in &record.suites {
        let mut cases = TestSuite::new(suite.name.as_str());
        cases.add_property(("run", record.started.as_str()));
        cases.add_property((
            "commit",
            record.build.commit.as_deref().unwrap_or("unknown"),
        ));
        if !record.conditions.contended.is_empty() {
            cases.add_property(("contended", record.conditions.contended.join("; ").as_str()));
        }
        cases.add_test_cases(
            suite
                .entries
                .iter()
                .map(|entry| entry_case(record, suite, entry)),
        );
        document.add_test_suite(cases);
    }
    written(&document)
}

fn entry_case(record: &BenchRun, suite: &SuiteRecord, entry: &Entry) -> TestCase {
    let mut case = TestCase::new(
        format!(
            "{} by {} ({})",
            entry.case(),
            entry.arm,
            bench::short(entry.quantity)
        ),
        entry_status(record, suite, entry),
    );
    case.set_classname(suite.name.as_str());
    if let EntryResult::Measured(measured) = &entry.outcome {
        let median = measured.summary.median;
        if !entry.quantity.is_exact() {
            // Rounded to nanoseconds; JUnit has milliseconds, and the property has all digits.
            case.set_time(Duration::from_nanos(median / 1_000));
        }
        case.add_property((
            bench::short(entry.quantity),
            bench::amount(entry.quantity, median).as_str(),
        ));
    }
    case
}

fn entry_status(record: &BenchRun, suite: &SuiteRecord, entry: &Entry) -> TestCaseStatus {
    let reproduce = |what: &str| format!("{what}\n\nReproduce it:\n{}", record.reproduce);
    match (&entry.outcome, change(record, suite, entry)) {
        (EntryResult::Failed { reason }, _) => failure("broken", reason, &reproduce(reason)),
        (EntryResult::OutOfMemory { reason }, Some(change))
            if change.verdict == BenchVerdict::Broken =>
        {
            failure(
                "out of memory",
                reason,
                &reproduce(&format!("It fit before: {reason}")),
            )
        }
        (EntryResult::Skipped { reason } | EntryResult::OutOfMemory { reason }, _) => {
            skipped("skipped", reason)
        }
        (EntryResult::Measured(_), Some(change)) if change.verdict == BenchVerdict::Worse => {
            let figures = bench::in_figures(change);
            failure("worse", &figures, &reproduce(&figures))
        }
        (EntryResult::Measured(_), _) => TestCaseStatus::success(),
    }
}

fn change<'a>(record: &'a BenchRun, suite: &SuiteRecord, entry: &Entry) -> Option<&'a Change> {
    let name = EntryName::of(suite, entry);
    let comparison = record
        .comparison
        .as_ref()
        .filter(|_| record.is_side_by_side())?;
    comparison
        .changes
        .iter()
        .find(|change| change.entry == name)
}

pub(super) fn failure(kind: &str, message: &str, description: &str) -> TestCaseStatus {
    let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
    status
        .set_type(kind)
        .set_message(message)
        .set_description(description);
    status
}

fn skipped(kind: &str, reason: &str) -> TestCaseStatus {
    let mut status = TestCaseStatus::skipped();
    status.set_type(kind).set_message(reason);
    status
}

pub(super) fn written(document: &Document) -> String {
    let text = document
        .to_string()
        .expect("writing a document without dates to memory cannot fail");
    // quick-junit removes control characters, but XML 1.0 forbids these as well.
    text.replace('\u{fffe}', r"\u{fffe}")
        .replace('\u{ffff}', r"\u{ffff}")
}

#[cfg(test)]
mod tests;
