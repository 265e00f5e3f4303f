//! `harness run --try-settings` and `--least-memory`: tries scenarios with other settings and other
//! amounts of memory on the simulated device, even if the runs themselves use a GPU. The result is
//! one sentence per scenario or configuration.

use std::{fmt::Write as _, sync::Arc};

use harness_allocator::allocator::{AllocatorSpec, caching::Config};
use harness_allocator::units::Bytes;
use harness_base::{parallel::in_parallel, printable::printable, words::count};
use harness_devices::DeviceSource;
use harness_explain::{grid::SETTINGS, least::least_memory};
use harness_record::Verdict;
use harness_run::session::{Plan, has_pytorchs};
use harness_scenario::{MAX_MEMORY, Scenario};
use indicatif::ProgressBar;

use super::error::CliError;

/// The precision of the search for the least memory.
const STEP: Bytes = Bytes::mib(2);
const MOST: u64 = 64;

enum Outcome {
    Passed,
    Failed,
    /// The scenario cannot run on the device, for this reason.
    Skipped(String),
}

pub(crate) struct WhatIf<'a> {
    plan: &'a Plan,
    source: DeviceSource,
}

impl<'a> WhatIf<'a> {
    /// Uses the device profile of `source` if it simulates a device.
    pub(crate) fn new(plan: &'a Plan, source: &DeviceSource) -> Self {
        let source = if source.simulated_because().is_some() {
            source.clone()
        } else {
            DeviceSource::simulated()
        };
        Self { plan, source }
    }

    fn with_pytorchs(&self) -> impl Iterator<Item = &'a Scenario> {
        self.plan
            .scenarios
            .iter()
            .filter(|scenario| has_pytorchs(scenario))
    }

    pub(crate) fn settings_to_try(&self) -> u64 {
        (self.with_pytorchs().count() * SETTINGS.len()) as u64
    }

    /// Returns a sentence per scenario that lists PyTorch's allocator: the settings with which it
    /// passes. The bar advances with each trial.
    pub(crate) fn try_settings(&self, bar: &ProgressBar) -> Result<String, CliError> {
        let mut text = String::new();
        for scenario in self.with_pytorchs() {
            bar.set_message(printable(&format!("settings for {}", scenario.name)).into_owned());
            let configs = SETTINGS.iter().filter_map(|conf| {
                Some((*conf, AllocatorSpec::caching(Config::parse(conf).ok()?)))
            });
            let configs: Vec<(&str, AllocatorSpec)> = configs.collect();
            let outcomes = in_parallel(&configs, |(_, arm)| {
                let outcome = self.outcome(
                    scenario,
                    arm,
                    self.plan.memory.unwrap_or(scenario.needs.memory),
                );
                bar.inc(1);
                outcome
            })?;
            let _ = writeln!(
                text,
                "{}: {} (on the simulated device).",
                scenario.name,
                settings_sentence(&configs, &outcomes)
            );
        }
        Ok(text)
    }

    /// Returns a sentence per configuration: the memory in which it passes. The bar advances with
    /// each configuration.
    pub(crate) fn least(&self, bar: &ProgressBar) -> Result<String, CliError> {
        let mut text = String::new();
        for scenario in &self.plan.scenarios {
            for arm in self.plan.selection.of(scenario) {
                let _ = writeln!(
                    text,
                    "{} with {arm}: {} (on the simulated device).",
                    scenario.name,
                    self.least_of(scenario, arm, bar)?
                );
                bar.inc(1);
            }
        }
        Ok(text)
    }

    fn least_of(
        &self,
        scenario: &Scenario,
        arm: &AllocatorSpec,
        bar: &ProgressBar,
    ) -> Result<String, CliError> {
        let given = self.plan.memory.unwrap_or(scenario.needs.memory);
        let try_memory = |memory: Bytes| {
            bar.set_message(
                printable(&format!("{} with {arm}: in {memory}?", scenario.name)).into_owned(),
            );
            self.outcome(scenario, arm, memory)
        };
        let mut high = given;
        loop {
            match try_memory(high)? {
                Outcome::Passed => break,
                Outcome::Skipped(why) if high == given => return Ok(format!("not tried: {why}")),
                Outcome::Skipped(_) => {
                    return Ok(format!(
                        "it does not pass in {given}, and not in {}, the most that the device has \
                         room for",
                        Bytes(high.0 / 2)
                    ));
                }
                Outcome::Failed if high.0 >= given.0.saturating_mul(MOST) || high >= MAX_MEMORY => {
                    return Ok(format!(
                        "it does not pass in {given}, and not in larger amounts up to {high}"
                    ));
                }
                Outcome::Failed => high = Bytes(high.0 * 2),
            }
        }
        let least = least_memory(STEP, high, STEP, |memory| {
            try_memory(memory).map(|outcome| matches!(outcome, Outcome::Passed))
        })?;
        let doubt = if least.is_monotonic {
            ""
        } else {
            "; more memory hurts here: some larger amounts are not enough"
        };
        Ok(format!(
            "{} would be enough, and {} would not{doubt}",
            least.enough, least.too_little
        ))
    }

    fn outcome(
        &self,
        scenario: &Scenario,
        arm: &AllocatorSpec,
        memory: Bytes,
    ) -> Result<Outcome, CliError> {
        let scenarios = vec![Scenario {
            allocators: vec![arm.clone()],
            ..scenario.clone()
        }];
        let seed = self.plan.seed;
        let plan = Plan {
            scenarios,
            seed,
            memory: Some(memory),
            repetitions: 1,
            fail_fast: true,
            ..Plan::default()
        };
        let runs = plan
            .run(&self.source.clone().with_room_for(memory), &Arc::default())?
            .runs;
        let skipped = runs.iter().find_map(|run| match &run.verdict {
            Verdict::Skipped { reason, .. } => Some(Outcome::Skipped(reason.clone())),
            _ => None,
        });
        let has_passed = runs.iter().all(|run| {
            matches!(
                run.verdict,
                Verdict::Passed | Verdict::FailedAsExpected { .. }
            )
        });
        Ok(skipped.unwrap_or(if has_passed {
            Outcome::Passed
        } else {
            Outcome::Failed
        }))
    }
}

fn settings_sentence(configs: &[(&str, AllocatorSpec)], outcomes: &[Outcome]) -> String {
    if let Some(why) = outcomes.iter().find_map(|outcome| {
        if let Outcome::Skipped(why) = outcome {
            Some(why)
        } else {
            None
        }
    }) {
        return format!("not tried: {why}");
    }
    let passing: Vec<&str> = configs
        .iter()
        .zip(outcomes)
        .filter(|(_, outcome)| matches!(outcome, Outcome::Passed))
        .map(|((conf, _), _)| *conf)
        .collect();
    let all = configs.len();
    match passing.as_slice() {
        [] => format!("none of {} makes it pass", count(all, "setting")),
        ["", rest @ ..] if rest.len() + 1 == all => "it passes with every setting".to_owned(),
        ["", ..] => format!(
            "it passes without settings, and fails with {} of {all} settings",
            all - passing.len()
        ),
        [only] => format!(
            "PYTORCH_CUDA_ALLOC_CONF={only} makes it pass, and none of the other {} settings does",
            all - 1
        ),
        [first, rest @ ..] => {
            format!(
                "PYTORCH_CUDA_ALLOC_CONF={first} makes it pass, and so do {} of {all} other \
                 settings: {}",
                rest.len(),
                rest.join(" ")
            )
        }
    }
}

#[cfg(test)]
mod tests;
