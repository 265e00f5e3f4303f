//! Processes of scenarios, and `harness exec --leave-free`, on the simulated device and on the
//! driver of the simulated GPU.

use std::{fs, path::Path, process::Command};

use harness_allocator::units::Bytes;
use harness_gpu_settings::settings::Settings;
use harness_staging::{Staging, strict, wait_for};
use tempfile::TempDir;

/// Runs the program in a folder. Returns the exit code, standard output and standard error.
fn harness(
    folder: &Path,
    staging: Option<&Staging>,
    arguments: &[&str],
) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command
        .args(arguments)
        .current_dir(folder)
        .env_remove("CARGO")
        .env_remove("HARNESS_DEVICE")
        .env("NO_COLOR", "1");
    if let Some(staging) = staging {
        staging.apply(&mut command);
    }
    let output = command.output().expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

/// A machine with a GPU that several processes share.
fn gpu() -> Staging {
    Staging::new(&Settings {
        processes: true,
        ..strict()
    })
    .expect("the simulated GPU is built")
}

/// Runs a scenario. Returns the exit code and all output.
fn run(staging: Option<&Staging>, scenario: &str) -> (Option<i32>, String) {
    let folder = TempDir::new().expect("there is a folder for temporary files");
    fs::write(folder.path().join("scenario.yaml"), scenario).expect("it can be written");
    let device = if staging.is_some() { "cuda:0" } else { "sim" };
    let (code, out, err) = harness(
        folder.path(),
        staging,
        &[
            "run",
            "scenario.yaml",
            "--no-report",
            "--repeat",
            "1",
            "--device",
            device,
        ],
    );
    (code, out + &err)
}

/// The peak of reserved memory of each process, and of all at the same time, in MiB.
fn peaks(scenario: &str) -> (Vec<(String, Option<u64>)>, Option<u64>) {
    let folder = TempDir::new().expect("there is a folder for temporary files");
    fs::write(folder.path().join("scenario.yaml"), scenario).expect("it can be written");
    let run = [
        "run",
        "scenario.yaml",
        "--no-report",
        "--device",
        "sim",
        "--allocator",
        "caching",
        "--format",
        "json",
    ];
    let (code, out, err) = harness(folder.path(), None, &run);
    assert_eq!(code, Some(0), "{out}{err}");
    let document: serde_json::Value = serde_json::from_str(&out).expect("the output is JSON");
    let curve = document["runs"][0]["curve"]
        .as_array()
        .expect("there is a curve");
    assert!(
        curve
            .iter()
            .all(|point| point["used"].as_u64() >= point["reserved"].as_u64()),
        "{curve:?}"
    );
    let processes = &document["runs"][0]["processes"];
    let peak =
        |figures: &serde_json::Value| figures["peak_reserved"].as_u64().map(|bytes| bytes >> 20);
    let each = processes["each"].as_array().expect("there are processes");
    let each = each.iter().map(|one| {
        (
            one["name"].as_str().unwrap_or_default().to_owned(),
            peak(one),
        )
    });
    (each.collect(), peak(&processes["together"]))
}

#[test]
fn the_peak_of_all_processes_together_may_be_less_than_the_sum_of_their_peaks() {
    // The second process begins after the first has released its memory, and the main process holds
    // 64 MiB throughout.
    let scenario = "about: Two processes take turns.
needs: { memory: 1GiB }
processes: [first, second]
steps:
  - alloc: { buffer: a, size: 64MiB }
  - process: first
    steps:
      - alloc: { buffer: a, size: 200MiB }
      - free: a
      - empty_cache
  - process: second
    steps: [alloc: { buffer: a, size: 300MiB }]
";
    let named = |figures: [(&str, u64); 3]| {
        figures
            .map(|(name, peak)| (name.to_owned(), Some(peak)))
            .to_vec()
    };
    assert_eq!(
        peaks(scenario),
        (
            named([("main process", 64), ("first", 200), ("second", 300)]),
            Some(364)
        )
    );
    let both = scenario.replace("      - free: a\n      - empty_cache\n", "");
    assert_eq!(
        peaks(&both),
        (
            named([("main process", 64), ("first", 200), ("second", 300)]),
            Some(564)
        )
    );
}

#[test]
fn a_process_that_is_killed_and_starts_again_keeps_its_highest_peak() {
    let scenario = "about: A process is restarted.
needs: { memory: 1GiB }
processes: [worker]
steps:
  - process: worker
    steps: [alloc: { buffer: a, size: 400MiB }]
  - kill: worker
  - process: worker
    steps: [alloc: { buffer: a, size: 100MiB }, reset_peak_stats]
";
    assert_eq!(
        peaks(scenario),
        (vec![("worker".to_owned(), Some(400))], Some(400))
    );
}

const TWO: &str = "about: Two processes.
needs: { memory: 512MiB, features: [process_memory] }
allocators: [caching, expandable, direct]
processes: [first, { name: second, memory: 256MiB }]
steps:
  - measure: alone
  - process: first
    steps:
      - alloc: { buffer: a, size: 200MiB }
      - fill: a
      - expect: device.process - start.device.process == reserved +- 2MiB
  - process: second
    steps:
      - alloc: { buffer: a, size: 200MiB }
      - alloc: { buffer: b, size: 100MiB, expect: oom }
      - expect: [ device.total == 256MiB,
            device.process - start.device.process == reserved +- 2MiB ]
  - alloc: { buffer: a, size: 200MiB, expect: { oom: others_hold } }
  - expect:
      - first.device.process - second.device.process == first.reserved - second.reserved +- 2MiB
      - device.used - alone.device.used == first.device.process + second.device.process +- 4MiB
  - kill: first
  - expect: device.used - alone.device.used == second.device.process +- 4MiB
  - alloc: { buffer: a, size: 200MiB }
";

/// A scenario that kills and restarts its worker, with these faults.
fn faulty(faults: &str, expected: &str) -> String {
    format!(
        "about: x\nneeds: {{ memory: 64MiB }}\nallocators: [caching]\nstreams: [side]\nprocesses: \
         [worker]\nfaults:\n{faults}\nsteps:\n  - alloc: {{ buffer: a, size: 8MiB }}\n  - process: \
         worker\n    steps:\n      - alloc: {{ buffer: a, size: 8MiB }}\n  - kill: worker\n  - \
         process: worker\n    steps:\n      - alloc: {{ buffer: a, size: 8MiB }}\n      - fill: \
         a\n      - free: a\n      - empty_cache\n  - expect: {expected}\n"
    )
}

#[test]
fn a_fault_of_a_process_counts_only_its_calls_across_restarts() {
    let second = "  - { process: worker, call: cudaMalloc, skip: 1 }\n  - { call: cudaMalloc }";
    for staging in [None, Some(gpu())] {
        let (code, said) = run(
            staging.as_ref(),
            &faulty(
                second,
                "[ num_alloc_retries == 1, worker.num_alloc_retries == 1 ]",
            ),
        );
        assert_eq!(code, Some(0), "{said}");
    }
    let (code, said) = run(
        None,
        &faulty(
            "  - { process: worker, call: cudaMalloc, skip: 2 }",
            "worker.num_ooms == 0",
        ),
    );
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("scenario.yaml:7:5: fault"), "{said}");
    assert!(
        said.contains(
            "the process `worker` made 2 matching calls, and the fault skips the first 2"
        ),
        "{said}"
    );
}

#[test]
fn an_error_of_a_process_ends_the_run_and_releases_a_working_device() {
    let (code, said) = run(
        None,
        &faulty(
            "  - { process: worker, call: cudaFree, expect: error }",
            "worker.num_ooms == 0",
        ),
    );
    assert_eq!(code, Some(0), "{said}");
    let lost = "  - { process: worker, call: cudaLaunchKernel, error: device_lost, expect: error }";
    let (code, said) = run(None, &faulty(lost, "worker.num_ooms == 0"));
    assert_eq!(
        code,
        Some(0),
        "no memory can be released on a lost device: {said}"
    );
    let twice = "  - { process: worker, call: cudaFree, expect: error }\n  - { process: worker, \
         call: cudaStreamDestroy }";
    let (code, said) = run(None, &faulty(twice, "worker.num_ooms == 0"));
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("in the process `worker`: the driver call to succeed"),
        "{said}"
    );
    assert!(
        said.contains("cudaFree failed") && said.contains("cudaStreamDestroy failed"),
        "{said}"
    );
    let at_the_end = "  - { process: worker, call: cudaStreamDestroy, expect: error }";
    let (code, said) = run(None, &faulty(at_the_end, "worker.num_ooms == 0"));
    assert_eq!(code, Some(0), "the error appears once: {said}");
    // If one process fails, the others release their memory too.
    let others = "  - { call: cudaMalloc, error: unknown, expect: error, skip: 1 }\n  - { process: \
         worker, call: cudaStreamDestroy }";
    let (code, said) = run(
        None,
        &faulty(others, "worker.num_ooms == 0").replace(
            "  - expect:",
            "  - alloc: { buffer: z, size: 20MiB }\n  - expect:",
        ),
    );
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("cudaStreamDestroy failed"), "{said}");
}

#[test]
fn a_process_that_a_fault_keeps_from_starting_says_by_which_call() {
    let (code, said) = run(
        None,
        &faulty(
            "  - { process: worker, call: cudaStreamCreate, skip: 1 }",
            "worker.num_ooms == 0",
        ),
    );
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("in the process `worker`: the driver call to succeed"),
        "{said}"
    );
    assert!(
        said.contains("cudaStreamCreate failed: CUDA_ERROR_UNKNOWN (999)"),
        "{said}"
    );
    let (code, said) = run(
        None,
        &faulty(
            "  - { process: worker, call: cudaEventRecord, never_completes: true, count: 2 }",
            "worker.num_ooms == 0",
        )
        .replace(
            "      - empty_cache",
            "      - record: { event: done }\n      - synchronize: { event: done }",
        ),
    );
    assert!(
        code == Some(1) && said.contains("cudaEventSynchronize never returns"),
        "{said}"
    );
}

#[test]
fn nvml_reports_the_memory_of_each_process_and_none_of_a_killed_one() {
    for staging in [None, Some(gpu())] {
        let (code, said) = run(staging.as_ref(), TWO);
        assert_eq!(code, Some(0), "{said}");
    }
}

#[test]
fn a_process_that_takes_too_long_is_killed_and_the_run_has_failed_by_its_time_limit() {
    let steps = "about: x\nneeds: { memory: 64MiB }\nprocesses: [slow]\nsteps:\n  - process: \
         slow\n    steps:\n      - repeat: 2\n        steps:\n          - storm: { id: s, \
         operations: 4000000, sizes: [512B], live: 32MiB, lifetime: { min: 1, max: 9 } \
         }\n            timeout: 50ms\n          - free: s\n";
    let (code, said) = run(None, steps);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("to take at most 50.0 ms") || said.contains("to do the step in 50.0 ms"),
        "{said}"
    );
}

#[test]
fn a_process_that_cannot_start_fails_the_run_and_says_why() {
    // A GPU of this size has no memory for a second context.
    let staging = Staging::new(&Settings {
        processes: true,
        memory: Bytes::mib(2048),
        context_overhead: Bytes::mib(1100),
        ..strict()
    })
    .expect("the simulated GPU is built");
    let (code, said) = run(
        Some(&staging),
        "about: x\nneeds: { memory: 64MiB }\nprocesses: [worker]\nsteps:\n  - process: worker\n    \
         steps: [ alloc: { buffer: a, size: 2MiB } ]\n",
    );
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("expected: the process `worker` to start"),
        "{said}"
    );
}

#[test]
fn what_the_driver_refuses_a_process_fails_the_run_and_names_the_process() {
    // A context that breaks during the run does not affect other processes.
    let staging = Staging::new(
        &Settings {
            processes: true,
            ..strict()
        }
        .failing("cuMemAlloc_v2", 3, 719),
    )
    .expect("it is built");
    let (code, said) = run(
        Some(&staging),
        "about: x\nneeds: { memory: 64MiB }\nallocators: [direct]\nprocesses: [worker]\nsteps:\n  \
         - process: worker\n    steps:\n      - alloc: { buffer: a, size: 2MiB }\n      - alloc: { \
         buffer: b, size: 2MiB }\n      - alloc: { buffer: c, size: 2MiB }\n",
    );
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("the process `worker`") && said.contains("CUDA_ERROR_LAUNCH_FAILED"),
        "{said}"
    );
}

/// The CPU time of a process after its start phase, in clock ticks of 10 ms.
const AT_WORK: u64 = 20;

/// The CPU time of a process in clock ticks: the fields `utime` and `stime`
/// (<https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html>).
fn ticks(stat: &str) -> u64 {
    let behind_the_name = stat.rsplit(')').next().unwrap_or_default();
    behind_the_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum()
}

/// Waits until a child of this process, a process of a scenario, is busy. Returns its process
/// number.
fn process_of(parent: u32) -> u32 {
    wait_for("a busy process of the scenario", || {
        for entry in fs::read_dir("/proc").expect("this is Linux").flatten() {
            let Some(pid) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse::<u32>().ok())
            else {
                continue;
            };
            let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
            let is_child = read("status")
                .lines()
                .any(|line| line == format!("PPid:\t{parent}"));
            if is_child
                && read("cmdline").contains("scenario-process")
                && ticks(&read("stat")) >= AT_WORK
            {
                return Some(pid);
            }
        }
        None
    })
}

/// A process that is busy for a long time.
const LONG: &str = "about: x\nneeds: { memory: 64MiB }\nprocesses: [worker]\nsteps:\n  - process: \
     worker\n    steps:\n      - storm: { id: s, operations: 9000000, sizes: { min: 512B, max: \
     1MiB }, live: 32MiB, lifetime: { min: 1, max: 900 } }\n";

fn start_long(folder: &TempDir) -> std::process::Child {
    fs::write(folder.path().join("scenario.yaml"), LONG).expect("it can be written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command
        .args(["run", "scenario.yaml", "--no-report", "--device", "sim"])
        .current_dir(folder.path());
    command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("the program starts")
}

fn signal(pid: u32, signal: &str) {
    assert!(
        Command::new("kill")
            .args([signal, &pid.to_string()])
            .status()
            .expect("there is `kill`")
            .success()
    );
}

#[test]
fn a_process_that_is_killed_from_outside_fails_the_run_with_the_signal_and_the_step() {
    let folder = TempDir::new().expect("there is a folder for temporary files");
    let run = start_long(&folder);
    signal(process_of(run.id()), "-KILL");
    let output = run.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("expected: the process `worker` to run its steps"),
        "{said}"
    );
    assert!(
        said.contains("SIGKILL ended it") && said.contains("while it ran step 1 (line 7: storm"),
        "{said}"
    );
}

#[test]
fn no_process_outlives_a_run_that_is_killed() {
    let folder = TempDir::new().expect("there is a folder for temporary files");
    let mut run = start_long(&folder);
    let process = process_of(run.id());
    run.kill().expect("it runs");
    run.wait().expect("it ends");
    let has_ended = || (!Path::new(&format!("/proc/{process}/stat")).exists()).then_some(());
    wait_for("the end of the process", has_ended);
}

#[test]
fn a_squeezed_gpu_has_the_given_free_memory_and_all_of_it_after_the_program() {
    let (staging, folder) = (
        gpu(),
        TempDir::new().expect("there is a folder for temporary files"),
    );
    let harness_itself = env!("CARGO_BIN_EXE_harness");
    let squeeze = |leave: &str, rest: &[&str]| {
        let arguments = [
            &[
                "exec",
                "--leave-free",
                leave,
                "--every",
                "1ms",
                "--record",
                "record.json",
                "--",
            ],
            rest,
        ]
        .concat();
        harness(folder.path(), Some(&staging), &arguments)
    };
    // A context takes 300 MiB of the 2 GiB, so 700 MiB minus one context are free for `doctor`.
    let (code, out, err) = squeeze(
        "700MiB",
        &[
            harness_itself,
            "doctor",
            "--format",
            "json",
            "--require-gpu",
        ],
    );
    assert_eq!(code, Some(0), "{out}{err}");
    let found: serde_json::Value =
        serde_json::from_str(&out).expect("standard output is the program's");
    assert_eq!(
        found["devices"][0]["free"],
        serde_json::json!(700_u64 << 20),
        "{found}"
    );
    assert!(
        err.contains("1.02 GiB taken of cuda:0, 700 MiB free at the start")
            && err.contains("exit code 0, after"),
        "{err}"
    );
    let record: serde_json::Value = serde_json::from_str(
        &fs::read_to_string(folder.path().join("record.json")).expect("it is written"),
    )
    .expect("it is JSON");
    assert_eq!(
        (&record["taken"], &record["free_at_start"]),
        (
            &serde_json::json!(1048_u64 << 20),
            &serde_json::json!(700_u64 << 20)
        )
    );
    assert!(
        record["curve"]
            .as_array()
            .is_some_and(|curve| !curve.is_empty()),
        "{record}"
    );
    let printed = [
        "squeeze",
        "--leave-free",
        "700MiB",
        "--format",
        "json",
        "--report",
        "report/",
        "--",
        "echo",
        "hello",
    ];
    let (code, out, err) = harness(folder.path(), Some(&staging), &printed);
    let told: serde_json::Value =
        serde_json::from_str(&out).expect("standard output is the document");
    assert_eq!(
        (code, &told["exit_code"], &told["taken"], &told["command"]),
        (Some(0), &0.into(), &record["taken"], &"echo hello".into())
    );
    assert!(
        err.contains("hello")
            && err.contains("report: report/report.md")
            && !err.contains("squeezed"),
        "{err}"
    );
    let page = fs::read_to_string(folder.path().join("report/report.md")).expect("it is written");
    assert!(
        page.starts_with("# echo hello")
            && page.contains("](report.svg)")
            && page.contains(&format!("{harness_itself} exec --leave-free"))
            && page.contains("700 MiB"),
        "{page}"
    );
    assert!(
        fs::read_to_string(folder.path().join("report/report.svg"))
            .is_ok_and(|svg| svg.contains("device used (driver)"))
    );
    // A scenario that needs more than the free memory is rejected, and our exit code is the
    // program's.
    fs::write(
        folder.path().join("scenario.yaml"),
        "about: x\nneeds: { memory: 1GiB }\nsteps: [ alloc: { buffer: a, size: 1GiB } ]\n",
    )
    .expect("it can be written");
    let run = [
        harness_itself,
        "run",
        "scenario.yaml",
        "--no-report",
        "--device",
        "cuda:0",
    ];
    assert_eq!(squeeze("700MiB", &run).0, Some(3), "it does not fit");
    assert_eq!(
        harness(folder.path(), Some(&staging), &run[1..]).0,
        Some(0),
        "everything came back"
    );
}

#[test]
fn a_program_with_little_free_memory_needs_a_gpu_and_enough_free_memory() {
    let (staging, folder) = (
        gpu(),
        TempDir::new().expect("there is a folder for temporary files"),
    );
    let (code, _, err) = harness(
        folder.path(),
        Some(&staging),
        &["exec", "--leave-free", "3GiB", "--", "true"],
    );
    assert!(
        code == Some(3) && err.contains("cuda:0 has only 1.71 GiB free"),
        "{code:?} {err}"
    );
    let (code, _, err) = harness(
        folder.path(),
        Some(&staging),
        &["exec", "--leave-free", "1GiB", "--", "./nothing"],
    );
    assert!(
        code == Some(2) && err.contains("`./nothing` cannot be started"),
        "{code:?} {err}"
    );
    let (code, _, err) = harness(
        folder.path(),
        Some(&staging),
        &[
            "exec",
            "--leave-free",
            "1GiB",
            "--",
            "sh",
            "-c",
            "kill -TERM $$",
        ],
    );
    assert!(
        code == Some(128 + 15) && err.contains("signal 15 ended it (exit code 143)"),
        "{code:?} {err}"
    );
    let none = Staging::without_driver().expect("a folder can be made");
    let (code, _, err) = harness(
        folder.path(),
        Some(&none),
        &["squeeze", "--leave-free", "1GiB", "--", "true"],
    );
    assert_eq!(code, Some(3), "{err}");
    for (arguments, message) in [
        (&["squeeze", "--", "true"][..], "--leave-free <SIZE>"),
        (
            &["squeeze", "--memory", "1GiB", "--", "true"],
            "--leave-free <SIZE>",
        ),
        (
            &["exec", "--leave-free", "1GiB", "--exact", "--", "true"],
            "`--exact` needs `--least-memory`",
        ),
    ] {
        let (code, _, err) = harness(folder.path(), Some(&none), arguments);
        assert!(
            code == Some(2) && err.contains(message),
            "{arguments:?}: {code:?} {err}"
        );
    }
}
