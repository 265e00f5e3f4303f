//! `harness run --try-settings` and `--least-memory`: which setting would have saved a scenario, and how much memory would have been enough for it, in
//! one sentence for each. Tried on the simulated device, whatever the scenario runs on.

use std::fmt::Write as _;
use std::sync::Arc;

use harness_allocator::allocator::AllocatorSpec;
use harness_allocator::allocator::caching::Config;
use harness_allocator::units::Bytes;
use harness_base::words::count;
use harness_devices::DeviceSource;
use harness_explain::grid::{SETTINGS, in_parallel};
use harness_explain::least::least_memory;
use harness_record::{RunRecord, Verdict};
use harness_run::session::{Plan, Selection, has_pytorchs};
use harness_scenario::Scenario;
use indicatif::ProgressBar;

use super::error::CliError;

/// Memory is looked for in steps of a page.
const STEP: Bytes = Bytes::mib(2);
/// No more than so many times what a scenario asks for.
const MOST: u64 = 64;

/// How often [`try_settings`] runs a scenario.
pub(crate) fn settings_to_try(scenarios: &[Scenario]) -> u64 {
    (scenarios.iter().filter(|scenario| has_pytorchs(scenario)).count() * SETTINGS.len()) as u64
}

/// A sentence about each scenario that lists PyTorch's allocator: under which settings it passes. The bar advances with each run.
pub(crate) fn try_settings(scenarios: &[Scenario], memory: Option<Bytes>, bar: &ProgressBar) -> Result<String, CliError> {
    let mut text = String::new();
    for scenario in scenarios.iter().filter(|scenario| has_pytorchs(scenario)) {
        bar.set_message(format!("settings tried, for {}", scenario.name));
        let configs = SETTINGS.iter().filter_map(|conf| Config::parse(conf).ok().map(|config| (*conf, AllocatorSpec::caching(config))));
        let configs: Vec<(&str, AllocatorSpec)> = configs.collect();
        let passed = in_parallel(&configs, |(_, arm)| {
            let passed = passes(scenario, arm, memory);
            bar.inc(1);
            passed
        })?;
        let saving: Vec<&str> = configs.iter().zip(&passed).filter(|(_, passed)| **passed).map(|((conf, _), _)| *conf).collect();
        let all = configs.len();
        let sentence = match saving.as_slice() {
            [] => format!("none of {} makes it pass", count(all, "setting")),
            ["", rest @ ..] if rest.len() + 1 == all => "it passes under every setting".to_owned(),
            ["", ..] => format!("it passes without any settings, and not under {} of {all} settings", all - saving.len()),
            [first] => {
                format!("PYTORCH_CUDA_ALLOC_CONF={first} makes it pass, and none other of {all} settings")
            }
            [first, rest @ ..] => {
                format!(
                    "PYTORCH_CUDA_ALLOC_CONF={first} makes it pass, and so do {} other of {all} settings: {}",
                    rest.len(),
                    rest.join(" ")
                )
            }
        };
        let _ = writeln!(text, "{}: {sentence} (on the simulated device).", scenario.name);
    }
    Ok(text)
}

/// A sentence about each scenario with each of its allocators: in how much memory it passes. The bar advances with each allocator.
pub(crate) fn least(scenarios: &[Scenario], selection: &Selection, memory: Option<Bytes>, bar: &ProgressBar) -> Result<String, CliError> {
    let mut text = String::new();
    for scenario in scenarios {
        for arm in selection.of(scenario) {
            let given = memory.unwrap_or(scenario.needs.memory);
            let _ = writeln!(text, "{} with {arm}: {} (on the simulated device).", scenario.name, least_of(scenario, arm, given, bar)?);
            bar.inc(1);
        }
    }
    Ok(text)
}

fn least_of(scenario: &Scenario, arm: &AllocatorSpec, given: Bytes, bar: &ProgressBar) -> Result<String, CliError> {
    let try_memory = |memory: Bytes| {
        bar.set_message(format!("{} with {arm}: in {memory}?", scenario.name));
        passes(scenario, arm, Some(memory))
    };
    let mut high = given;
    while !try_memory(high)? {
        if high.0 >= given.0.saturating_mul(MOST) || high >= harness_scenario::MAX_MEMORY {
            return Ok(format!("it does not pass in {given}, nor in any of up to {high}"));
        }
        high = Bytes(high.0 * 2);
    }
    let least = least_memory(STEP, high, STEP, try_memory)?;
    let doubt = if least.is_monotonic { "" } else { "; more memory hurts here: some amounts above this do not do" };
    Ok(format!("{} would be enough, and {} are not{doubt}", least.enough, least.too_little))
}

/// Whether a scenario passes with an allocator in that memory, or in what it needs.
fn passes(scenario: &Scenario, arm: &AllocatorSpec, memory: Option<Bytes>) -> Result<bool, CliError> {
    let scenario = Scenario { allocators: vec![arm.clone()], ..scenario.clone() };
    let plan = Plan {
        scenarios: vec![scenario],
        selection: Selection::default(),
        seed: None,
        memory,
        repetitions: 1,
        audit: false,
        fail_fast: true,
        program: String::new(),
    };
    let source = DeviceSource::simulated();
    let runs: Vec<RunRecord> = plan.run(&source, &Arc::default())?.runs;
    Ok(runs.iter().all(|run| matches!(run.verdict, Verdict::Passed | Verdict::FailedAsExpected { .. })))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const SCENARIO: &str = "about: A test.
needs: { memory: 64MiB }
allocators: [caching, bfc]
steps:
  - alloc: { buffer: a, size: 30MiB }
";

    #[test]
    fn the_bars_are_full_when_everything_was_tried() {
        let scenarios = [Scenario::parse(SCENARIO, Path::new("test.yaml")).expect("a valid scenario")];
        let bar = ProgressBar::hidden();
        let tried = try_settings(&scenarios, None, &bar).expect("the simulated device is always there");
        assert_eq!(bar.position(), settings_to_try(&scenarios), "{tried}");
        let bar = ProgressBar::hidden();
        let least = least(&scenarios, &Selection::default(), None, &bar).expect("the simulated device is always there");
        assert_eq!(bar.position(), 2, "{least}");
        assert_eq!(bar.message(), "test with bfc: in 38 MiB?", "{least}");
    }
}
