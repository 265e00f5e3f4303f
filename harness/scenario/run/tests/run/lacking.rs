//! GPUs that lack a feature of an allocator: those allocators are skipped with the reason, and the
//! others run.
//!
//! A process loads the simulated GPU once and permanently, so each GPU is opened in a child process
//! of this program.

use std::{path::Path, process::Command, sync::Arc};

use harness_cuda::machine;
use harness_devices::{DeviceChoice, DeviceSource};
use harness_gpu_settings::settings::Settings;
use harness_record::{Event, RunRecord, Verdict};
use harness_run::control::Control;
use harness_run::session::{Plan, Selection, Sinks};
use harness_scenario::Scenario;
use harness_staging::{Staging, strict};

/// Set for a child process, which prints each allocator's verdict.
const CHILD: &str = "HARNESS_LACKING_CHILD";

const TEXT: &str = "about: A test.\nneeds: { memory: 64MiB }\nallocators: [caching, expandable, \
     async_pool]\nsteps:\n  - alloc: { buffer: a, size: 30MiB }\n  - fill: { buffer: a }\n";

/// The verdicts on such a GPU, by allocator.
fn verdicts(config: &Settings) -> String {
    let staging = Staging::new(config).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "--nocapture", "lacking::child"])
        .env(CHILD, "1");
    staging.apply(&mut command);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text.lines()
        .filter_map(|line| line.split_once("arm "))
        .map(|(_, verdict)| format!("{verdict}\n"))
        .collect()
}

/// Does nothing in the parent process.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let scenario =
        Scenario::parse(TEXT, Path::new("test.yaml")).unwrap_or_else(|error| panic!("{error}"));
    let source = DeviceSource::new(DeviceChoice::Cuda(0), &machine::probe(), true).unwrap();
    let (scenarios, selection, program) =
        (vec![scenario], Selection::default(), "harness".to_owned());
    let plan = Plan {
        scenarios,
        selection,
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program,
    };
    let mut runs: Vec<RunRecord> = Vec::new();
    let mut keep = |event| {
        if let Event::RunEnded(run) = event {
            runs.push(*run);
        }
    };
    plan.observe(
        &source,
        &Arc::new(Control::default()),
        &Sinks::default(),
        &mut keep,
    )
    .unwrap();
    for run in runs {
        let verdict = match run.verdict {
            Verdict::Passed => "passed".to_owned(),
            Verdict::Skipped { reason, .. } => format!("skipped: {reason}"),
            verdict => format!("{verdict:?}"),
        };
        println!("arm {}: {verdict}", run.allocator);
    }
}

#[test]
fn a_gpu_that_has_everything_runs_every_arm() {
    assert_eq!(
        verdicts(&strict()),
        "caching: passed\nexpandable: passed\nasync_pool: passed\n"
    );
}

#[test]
fn arms_that_need_memory_mapping_are_skipped_without_it() {
    let expandable = "expandable segments: this device cannot map memory to reserved addresses; \
         use the allocator without expandable_segments";
    let config = Settings {
        mapping: false,
        ..strict()
    };
    assert_eq!(
        verdicts(&config),
        format!("caching: passed\nexpandable: skipped: {expandable}\nasync_pool: passed\n")
    );
}

#[test]
fn arms_that_need_pools_of_the_driver_are_skipped_without_them() {
    let async_pool = "the allocator `async_pool`: this device has no stream-ordered memory pools; \
         choose another allocator";
    let config = Settings {
        pools: false,
        ..strict()
    };
    assert_eq!(
        verdicts(&config),
        format!("caching: passed\nexpandable: passed\nasync_pool: skipped: {async_pool}\n")
    );
}
