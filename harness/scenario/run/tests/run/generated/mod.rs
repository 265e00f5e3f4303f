//! Scenarios made from the grammar. The check accepts each of them. With every allocator that it
//! lists, checked and timed, a run ends in a verdict. It may fail by what the scenario expects, and
//! not by an always-checked invariant, the device, or an expectation that always holds. A second
//! run leaves the same record. The tests of harness-schemas compare them with the schema.
//!
//! `HARNESS_FUZZ_CASES` and `HARNESS_FUZZ_SEED` make other and more of them.

mod steps;
mod writer;

use std::{cell::Cell, collections::BTreeSet, path::Path, sync::Arc};

use harness_allocator::device::DeviceError;
use harness_devices::DeviceSource;
use harness_record::{Invariant, Records, Rule, RunRecord, Verdict, Violation};
use harness_run::control::Control;
use harness_run::run::{Run, RunObserver, RunRequest};
use harness_run::session::{Plan, Selection};
use harness_scenario::{ParameterSettings, Scenario, Step, StepKind};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use proptest::{prelude::*, strategy::ValueTree};

use self::writer::{Generated, genes, head, write};

/// Takes a few seconds without optimization.
const CASES: u32 = 600;
/// Generates the scenarios of the default run.
const SEED: u8 = 1;

fn number<T: std::str::FromStr>(variable: &str, default: T) -> T {
    std::env::var(variable)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

/// The seed is fixed, so every machine tests the same scenarios.
fn runner() -> TestRunner {
    let (cases, seed) = (
        number("HARNESS_FUZZ_CASES", CASES),
        number("HARNESS_FUZZ_SEED", SEED),
    );
    println!("HARNESS_FUZZ_CASES={cases} HARNESS_FUZZ_SEED={seed}");
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..Config::default()
    };
    TestRunner::new_with_rng(
        config,
        TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]),
    )
}

fn generated() -> impl Strategy<Value = Generated> {
    (head(), genes()).prop_map(|(head, genes)| write(&head, &genes))
}

fn points(text: &str) -> Result<Vec<Scenario>, TestCaseError> {
    Scenario::parse_points(
        text,
        Path::new("tests/run/generated/generated.yaml"),
        &ParameterSettings::new(),
    )
    .map_err(|error| TestCaseError::fail(error.to_string()))
}

fn plan(scenarios: Vec<Scenario>) -> Plan {
    let (selection, program) = (Selection::default(), "harness".to_owned());
    Plan {
        scenarios,
        selection,
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program,
    }
}

fn records(plan: &Plan) -> Result<Records, TestCaseError> {
    plan.run(&DeviceSource::simulated(), &Arc::default())
        .map_err(|error| TestCaseError::fail(error.to_string()))
}

/// Returns whether a retry without progress may be the scenario's own: the policy of its step may
/// find nothing that it can do. One that frees a buffer finds something where that has memory:
/// unless it is empty, or may be another program's, or its request failed and the run went on. One
/// that halves the batch finds something until it is at its floor.
fn may_find_nothing_to_do(violation: &Violation, text: &str, went_on: bool) -> bool {
    let Some(step) = violation
        .at
        .as_ref()
        .and_then(|at| text.lines().nth(at.line as usize - 1))
    else {
        return false;
    };
    let Some((_, policy)) = step.split_once("on_oom: { ") else {
        return false;
    };
    if let Some((_, fields)) = policy.split_once("halve_batch: {") {
        let floor = fields.split_once("floor: ").map_or("1", |(_, rest)| {
            rest.split(|c: char| !c.is_ascii_digit())
                .next()
                .unwrap_or_default()
        });
        let rest = violation
            .seen
            .strip_prefix(&format!("it asked for a batch of {floor}"));
        return rest.is_some_and(|rest| rest.starts_with([' ', ',']));
    }
    let freed = policy
        .strip_prefix("free: { buffers: [")
        .and_then(|rest| rest.split(']').next());
    freed.is_none_or(|name| {
        went_on
            || text.contains("\nprograms: ")
            || text.contains(&format!("buffer: {name}, size: 0,"))
    })
}

/// The results that a run must not have.
fn accusation<'v>(
    verdict: &'v Verdict,
    generated: &Generated,
    went_on: bool,
) -> Option<&'v Violation> {
    let violations = match verdict {
        Verdict::Failed { first, rest } | Verdict::FailedAsExpected { first, rest, .. } => {
            std::iter::once(first).chain(rest)
        }
        _ => return None,
    };
    let is_certain = |violation: &Violation| {
        generated
            .certain
            .iter()
            .any(|text| violation.expected.ends_with(text))
    };
    // A measure may be unknown if a loop ended before it. Variables always have a value in their
    // scope.
    let is_variable = |metric: &str| !metric.contains('.');
    let is_unknown = |violation: &Violation| {
        violation
            .seen
            .strip_suffix(" was not reported")
            .is_some_and(is_variable)
    };
    violations
        .into_iter()
        .find(|violation| match violation.rule {
            Rule::Invariant(Invariant::RetryMakesProgress) => {
                !may_find_nothing_to_do(violation, &generated.text, went_on)
            }
            Rule::Invariant(_) | Rule::DeviceFailure | Rule::TimeLimit | Rule::Fault => true,
            Rule::Expectation => is_certain(violation) || is_unknown(violation),
            Rule::BetweenArms | Rule::ExpectedFailure | Rule::ExpectedViolation => false,
        })
}

fn is_innocent(
    what: &str,
    arm: &str,
    verdict: &Verdict,
    generated: &Generated,
) -> Result<(), TestCaseError> {
    let is_over = !matches!(verdict, Verdict::Interrupted | Verdict::Contended { .. });
    prop_assert!(is_over, "the {what} run with {arm} ended {verdict:?}");
    match accusation(verdict, generated, what != "checked") {
        None => Ok(()),
        Some(violation) => Err(TestCaseError::fail(format!(
            "the {what} run with {arm}: {violation:#?}"
        ))),
    }
}

/// A failed run stops early and is not timed. Here it continues to its end, whatever the scenario
/// expects, and is timed.
fn runs_on(scenario: &Scenario, record: &RunRecord) -> Result<[Verdict; 2], DeviceError> {
    let allocator = scenario
        .allocators
        .iter()
        .find(|arm| arm.to_string() == record.allocator)
        .expect("the scenario lists it");
    let (seed, reproduce, interrupt) = (scenario.seed, String::new(), Arc::default());
    let request = RunRequest {
        scenario,
        allocator,
        seed,
        repetition: 0,
        reproduce,
        audit: true,
        interrupt,
    };
    let source = DeviceSource::simulated();
    let device = || {
        source
            .open()
            .and_then(|device| source.limit(device, scenario.needs.memory))
    };
    let (mut checked_events, mut timed_events) = (|_| {}, |_| {});
    let observer = |emit| RunObserver {
        control: Arc::new(Control::new(Arc::default())),
        only_observed: true,
        emit: Some(emit),
        record: None,
    };
    let checked = Run::new(&request, device()?)
        .observed(observer(&mut checked_events))
        .checked()?;
    let timed = Run::new(&request, device()?)
        .observed(observer(&mut timed_events))
        .timed()?;
    Ok([checked.verdict, timed.record.verdict])
}

#[test]
fn whatever_the_grammar_says_ends_in_a_verdict_that_is_the_scenarios_own() {
    let mut runner = runner();
    let (passed, all) = (Cell::new(0), Cell::new(0));
    let outcome = runner.run(&generated(), |generated| {
        let plan = plan(points(&generated.text)?);
        let first = records(&plan)?;
        for record in &first.runs {
            let scenario = plan
                .scenarios
                .iter()
                .find(|scenario| scenario.name == record.scenario.name)
                .expect("it was planned");
            is_innocent("checked", &record.allocator, &record.verdict, &generated)?;
            if matches!(record.verdict, Verdict::Failed { .. }) {
                let [checked, timed] = runs_on(scenario, record)
                    .map_err(|error| TestCaseError::fail(error.to_string()))?;
                is_innocent("observed", &record.allocator, &checked, &generated)?;
                is_innocent("timed", &record.allocator, &timed, &generated)?;
            }
            all.set(all.get() + 1);
            passed.set(passed.get() + u32::from(record.verdict == Verdict::Passed));
        }
        prop_assert!(first == records(&plan)?, "the second time is another one");
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
    let (passed, all) = (passed.get(), all.get());
    println!("{passed} of {all} runs passed");
    assert!(
        3 * passed > all,
        "only {passed} of {all} runs passed: most of what is generated is never reached"
    );
}

fn kinds(steps: &[Step], seen: &mut BTreeSet<StepKind>) {
    for step in steps {
        seen.insert(step.action.kind());
        kinds(step.action.steps(), seen);
        kinds(&step.meanwhile, seen);
    }
}

#[test]
fn steps_of_every_kind_are_generated() {
    let (mut runner, mut seen) = (runner(), BTreeSet::new());
    for _ in 0..CASES {
        let generated = generated().new_tree(&mut runner).unwrap().current();
        points(&generated.text)
            .unwrap()
            .iter()
            .for_each(|scenario| kinds(&scenario.steps, &mut seen));
    }
    let starts_something =
        |kind: &&StepKind| matches!(kind, StepKind::Exec | StepKind::Process | StepKind::Kill);
    let missing: Vec<&StepKind> = StepKind::ALL
        .iter()
        .filter(|kind| !starts_something(kind) && !seen.contains(kind))
        .collect();
    assert!(
        missing.is_empty(),
        "no scenario has a step of these kinds: {missing:?}"
    );
}
