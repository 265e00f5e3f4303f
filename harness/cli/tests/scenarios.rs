//! Runs every scenario of the catalogue with each of its allocators on each device of this machine,
//! as one test each.
//!
//! The tests run on the simulated device, and one after the other on a GPU. Tests that cannot run
//! are ignored, with the reason. `cargo test --test scenarios oom_retry` runs the tests whose name
//! contains `oom_retry`.
//!
//! Programs of `exec` steps need a Python with torch, from HARNESS_TEST_PYTHON or PATH.
//! `tests/torch_programs` runs the claims on the simulated device.
//!
//! A bundle runs this program on machines without the project. There, [`ROOT`] names the folder
//! with `scenarios/` and `harness`.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, PoisonError};

use harness_allocator::allocator::AllocatorSpec;
use harness_cuda::machine::{self};
use harness_devices::{DeviceChoice, DeviceSource};
use harness_record::Verdict;
use harness_report::text::step_table;
use harness_run::session::{Plan, Selection};
use harness_scenario::{ParameterSettings, Scenario};
use harness_staging::trials::{self, Skip};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// The variable that names the folder to run in, instead of the project.
const ROOT: &str = "HARNESS_ROOT";
/// The folder of claims, which another test runs on the simulated device.
const CLAIMS: &str = "claims";
/// The variable that names a Python with torch, for tests.
const TEST_PYTHON: &str = "HARNESS_TEST_PYTHON";
/// The variable that names the Python of `exec` steps.
const PYTHON: &str = "HARNESS_PYTHON";

const ON_A_GPU: &str = "`cargo test --test scenarios cuda` on a machine with a GPU";
const WITH_TORCH: &str = "`HARNESS_TEST_PYTHON=$(ci/torch) cargo test --test scenarios`";

fn main() -> ExitCode {
    // A scenario starts this program again for its further processes.
    if std::env::args().nth(1).as_deref() == Some(harness_run::processes::SUBCOMMAND) {
        return harness_run::session::serve_process();
    }
    if let Some(code) = with_python_of_tests() {
        return code;
    }
    // Messages contain paths relative to this folder.
    let (root, program) = match std::env::var_os(ROOT) {
        Some(root) => (PathBuf::from(root), "./harness"),
        None => (
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."),
            "cargo run --release --",
        ),
    };
    if let Err(error) = std::env::set_current_dir(&root) {
        eprintln!("{}: {error}", root.display());
        return ExitCode::FAILURE;
    }
    let arguments = Arguments::from_args();
    let simulated = Ok(DeviceSource::simulated());
    let cuda = DeviceSource::new(DeviceChoice::Cuda(0), &machine::probe(), false)
        .map_err(|error| error.to_string());
    let mut trials = Vec::new();
    for folder in ["", "programs", "faults", CLAIMS] {
        let scenarios = match catalogue(&Path::new("scenarios").join(folder)) {
            Ok(scenarios) => scenarios,
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::FAILURE;
            }
        };
        for scenario in &scenarios {
            for allocator in &scenario.allocators {
                // Folders have scenarios of the same name.
                let name = format!(
                    "{}::{allocator}",
                    Path::new(folder).join(&scenario.name).display()
                );
                if folder != CLAIMS {
                    trials.push(trial(
                        format!("{name}::sim"),
                        scenario,
                        allocator,
                        &simulated,
                        program,
                    ));
                }
                trials.push(trial(
                    format!("{name}::cuda"),
                    scenario,
                    allocator,
                    &cuda,
                    program,
                ));
            }
        }
    }
    trials::run(&arguments, trials)
}

/// Runs this program again with the Python of tests for `exec` steps, if one is set. Returns its
/// exit code.
fn with_python_of_tests() -> Option<ExitCode> {
    let python = std::env::var_os(TEST_PYTHON)
        .filter(|python| !python.is_empty() && std::env::var_os(PYTHON).is_none())?;
    let again = std::env::current_exe().and_then(|program| {
        Command::new(program)
            .args(std::env::args_os().skip(1))
            .env(PYTHON, python)
            .status()
    });
    Some(match again {
        Ok(status) if status.success() => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("this program cannot start itself: {error}");
            ExitCode::FAILURE
        }
    })
}

fn catalogue(folder: &Path) -> Result<Vec<Scenario>, String> {
    let entries =
        std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "yaml"));
    paths.sort();
    let points: Result<Vec<_>, _> = paths
        .iter()
        .map(|path| Scenario::load_points(path, &ParameterSettings::new()))
        .collect();
    Ok(points
        .map_err(|error| error.to_string())?
        .into_iter()
        .flatten()
        .collect())
}

fn trial(
    name: String,
    scenario: &Scenario,
    allocator: &AllocatorSpec,
    source: &Result<DeviceSource, String>,
    program: &str,
) -> Trial {
    let plan = Plan {
        scenarios: vec![scenario.clone()],
        selection: Selection::only([allocator]),
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program: program.to_owned(),
    };
    match source {
        Ok(source) => {
            let source = source.clone();
            Trial::ignorable_test(name, move || run(&plan, &source))
        }
        Err(reason) => {
            let skip = Skip::new(reason, ON_A_GPU);
            Trial::ignorable_test(name, move || Ok(skip.count("no GPU can be used")))
        }
    }
}

fn run(plan: &Plan, source: &DeviceSource) -> Result<Completion, Failed> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    // All tests share the memory of the GPU; each has its own simulated device.
    let turn = source
        .simulated_because()
        .is_none()
        .then(|| ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner));
    let arm = plan.arms().next().ok_or("nothing to run")?;
    let record = &plan.run_arm(&arm, source, &Arc::default())?;
    drop(turn);
    match &record.verdict {
        Verdict::Passed | Verdict::FailedAsExpected { .. } => Ok(Completion::Completed),
        Verdict::Skipped { reason, .. } => {
            let why = "the device or the Python lacks what the scenario needs";
            Ok(Skip::new(why, WITH_TORCH).count(reason))
        }
        Verdict::Failed { .. } | Verdict::Contended { .. } | Verdict::Interrupted => {
            Err(step_table(record).into())
        }
    }
}
