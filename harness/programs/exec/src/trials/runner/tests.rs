//! Names of output files, and shell commands in place of Python programs.
#![allow(clippy::unwrap_used)]

use std::ffi::OsString;

use harness_allocator::units::Bytes;
use harness_gpu_settings::{gpus::GPUS, settings::Settings};

use super::*;
use crate::machine::Machine;
use crate::tests::{fake::trial, fixture::setup};

/// Calls `act` with a runner of a shell command.
fn with_runner<T>(
    script: &str,
    limit: Duration,
    logs: Option<&Path>,
    act: impl FnOnce(&Runner<'_>) -> T,
) -> T {
    let command = ["/bin/sh", "-c", script].map(OsString::from);
    let machine = Machine::Simulated(Settings::new(&GPUS[0], Bytes::gib(1)));
    // An old C library, because an empty list preloads nothing.
    let setup = setup(Path::new("/nonexistent"), &[], (2, 34));
    let stop = AtomicBool::new(false);
    let launch = Launch {
        command: &command,
        machine: &machine,
        setup: &setup,
        alloc_conf: None,
        snapshot: false,
        ledger: None,
    };
    act(&Runner {
        launch,
        logs,
        limit,
        copies: Copies::none(),
        stop: &stop,
    })
}

#[test]
fn output_is_kept_and_its_last_lines_are_read() {
    let logs = tempfile::tempdir().unwrap();
    let fault = Trial {
        faults: vec!["any:12:2".parse().unwrap()],
        ..trial(Bytes::gib(1))
    };
    let script = "echo out; echo \"KeyError: $HARNESS_GPU\" >&2; exit 3";
    let seen = with_runner(
        script,
        Duration::from_secs(60),
        Some(logs.path()),
        |runner| runner.run(&fault).unwrap().unwrap(),
    );
    assert_eq!(seen.ending, TrialEnd::By(End::Code(3)));
    assert!(
        seen.last_lines.concat().contains(r#""first":12,"count":2"#),
        "{:?}",
        seen.last_lines
    );
    assert_eq!(
        fs::read_to_string(logs.path().join("fault-12.stdout")).unwrap(),
        "out\n"
    );
    assert!(logs.path().join("fault-12.stderr").is_file());
}

#[test]
fn a_program_that_exceeds_its_time_is_killed_with_its_descendants() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let script = format!(
        "setsid sleep 1000 & echo $! > {}; sleep 1000",
        pid.display()
    );
    // On a busy machine, the script needs a longer limit to start its descendant.
    let limits = (1..=8).map(|power| Duration::from_millis(100) * 3_u32.pow(power));
    let is_started = |limit| {
        let seen = with_runner(&script, limit, None, |runner| {
            runner.run(&trial(Bytes::gib(1))).unwrap().unwrap()
        });
        assert_eq!(seen.ending, TrialEnd::Hang);
        fs::read_to_string(&pid)
            .ok()
            .filter(|pid| pid.ends_with('\n'))
    };
    let sleeper = limits.into_iter().find_map(is_started).unwrap();
    harness_staging::wait_for_end(&sleeper);
}

#[test]
fn remaining_processes_end_with_the_program() {
    let seen = with_runner(
        "sleep 1000 & exit 0",
        Duration::from_secs(60),
        None,
        |runner| runner.run(&trial(Bytes::gib(1))).unwrap().unwrap(),
    );
    assert_eq!(seen.ending, TrialEnd::By(End::Code(0)));
}

#[test]
fn nothing_runs_after_an_interrupt() {
    let seen = with_runner("exit 0", Duration::from_secs(60), None, |runner| {
        let stop = AtomicBool::new(true);
        Runner {
            stop: &stop,
            copies: Copies::none(),
            ..*runner
        }
        .run(&trial(Bytes::gib(1)))
        .unwrap()
    });
    assert_eq!(seen, None);
}

#[test]
fn output_files_are_named_after_the_trials_differences() {
    let with = |faults: &[&str], conf: Option<&str>| {
        let faults = faults.iter().map(|fault| fault.parse().unwrap()).collect();
        name(&Trial {
            faults,
            alloc_conf: conf.map(str::to_owned),
            ..trial(Bytes::gib(1))
        })
    };
    assert_eq!(with(&["any:12:2"], None), "fault-12");
    assert_eq!(with(&["any:12:1"], None), "fault-12-alone");
    assert_eq!(with(&[], None), "1024-linux");
    assert_eq!(
        with(&[], Some("expandable_segments:True")),
        "1024-linux-expandable_segments-true"
    );
    let long = |last| format!("roundup_power2_divisions:[256:1,512:2,1024:4,2048:4,>:{last}]");
    let [four, eight] = [4, 8].map(|last| with(&[], Some(&long(last))));
    assert_ne!(four, eight);
}
