//! Runs the catalogue and the scenarios that fail on purpose on the simulated GPU.
//!
//! The verdicts and figures of every run are compared with `kept_report/catalogue.txt`. Three of
//! the scenarios make the report in `reports/example`, which is compared byte for byte. `UPDATE=1
//! cargo test --test cli example_report::` rewrites all of it. Review the difference before you
//! commit it.

use std::path::{Path, PathBuf};
use std::{env, fs, process::Command, sync::Arc};

use harness_devices::DeviceSource;
use harness_record::{Records, RunRecord, Verdict};
use harness_report::store;
use harness_run::session::{Plan, Selection};
use harness_scenario::{ParameterSettings, Scenario};

use crate::kept_report;

const EXAMPLE: &str = "reports/example";
/// The scenarios of the example report.
const SHOWN: [&str; 3] = ["adapters", "oom_retry", "recovery_chain"];

/// Set in the child process.
const CHILD: &str = "EXAMPLE_REPORT_TEST_CHILD";

/// Paths in the report are relative to the project's root, so the test runs in a child process
/// there.
#[test]
fn the_catalogue_gives_the_kept_figures_and_the_example_report() {
    if env::var_os(CHILD).is_none() {
        return run_child();
    }
    // Processes of scenarios run the program, which this test is not.
    harness_allocator::allocator::library::name_program(env!("CARGO_BIN_EXE_harness").into());
    let paths = [
        files_in("scenarios", "yaml"),
        files_in("scenarios/failing", "yaml"),
    ]
    .concat();
    let plan = Plan {
        scenarios: paths
            .iter()
            .flat_map(|path| {
                Scenario::load_points(path, &ParameterSettings::new())
                    .expect("the catalogue is valid")
            })
            .collect(),
        selection: Selection::default(),
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program: "cargo run --".to_owned(),
    };
    let records = plan
        .run(&DeviceSource::simulated(), &Arc::default())
        .expect("the simulated device opens");
    let failed = records.runs.iter().filter(|run| {
        !matches!(
            run.verdict,
            Verdict::Passed | Verdict::FailedAsExpected { .. }
        )
    });
    let failed: Vec<(&str, &str)> = failed
        .map(|run| (run.scenario.path.as_str(), run.allocator.as_str()))
        .collect();
    assert_eq!(
        failed,
        [("scenarios/failing/adapters.yaml", "caching")],
        "only the scenario that fails on purpose fails"
    );
    kept_report::compare_figures(
        &records,
        Path::new("harness/cli/tests/kept_report/catalogue.txt"),
        false,
    );
    compare_report(records);
}

fn run_child() {
    let mut command = Command::new(env::current_exe().expect("the test program has a path"));
    let name = concat!(
        "example_report::",
        "the_catalogue_gives_the_kept_figures_and_the_example_report"
    );
    let output = command
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
        .output()
        .expect("the test program starts");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{}\n{text}",
        output.status
    );
}

fn compare_report(records: Records) {
    let is_shown = |run: &RunRecord| SHOWN.contains(&run.scenario.name.as_str());
    let records = Records {
        runs: records.runs.into_iter().filter(is_shown).collect(),
        ..records
    };
    let made = tempfile::tempdir().expect("a temporary folder can be created");
    store::save_into(made.path(), &records).expect("the temporary folder can be written");
    if kept_report::updates() {
        kept_report::replace(made.path(), Path::new(EXAMPLE));
    }
    let (made, kept) = (
        kept_report::files(made.path()),
        kept_report::files(Path::new(EXAMPLE)),
    );
    for name in made.keys().chain(kept.keys()) {
        assert!(
            made.get(name) == kept.get(name),
            "{EXAMPLE}/{name} differs from what this build writes: run with UPDATE=1"
        );
    }
}

fn files_in(folder: &str, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("the folder exists");
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == extension));
    paths.sort();
    paths
}
