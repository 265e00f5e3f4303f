//! Tests of `harness exec`: programs run unchanged on a simulated GPU, and the results are printed.
//!
//! Most tests use a fake torch: a few lines of Python on the library of the simulated GPU. If
//! HARNESS_TEST_PYTHON names an interpreter with a real torch, that is tested too. Tests that lack
//! their interpreter are shown as ignored.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::{fs, os::unix::fs::PermissionsExt as _};

use harness_exec::stub_library::StubLibrary;
use harness_staging::trials::{self, Skip};
use harness_staging::{Staging, strict, wait_for, wait_for_end};
use harness_trace::snapshot::Snapshot;
use libtest_mimic::Arguments;
use serde_json::{Value, json};
use tempfile::TempDir;

fn main() -> ExitCode {
    let has_python = Command::new("python3").arg("--version").output().is_ok();
    let trial = |name: &str, skip: &Option<Skip>, test: fn(World)| {
        trials::trial(name, skip.clone(), move || {
            test(World::new());
            Ok(())
        })
    };
    macro_rules! trials {
        ($skip:expr, $($test:ident)*) => { vec![$(trial(stringify!($test), $skip, $test)),*] };
    }
    let skip = |can_run: bool, why: &str, remedy| (!can_run).then(|| Skip::new(why, remedy));
    let no_python = skip(has_python, "there is no python3", "install it");
    let no_tools = skip(
        cfg!(feature = "mcp"),
        "the program is built without `harness mcp`",
        "`cargo test --features mcp --test exec tool`",
    );
    let no_torch = skip(
        python_with_torch().is_some(),
        "HARNESS_TEST_PYTHON names no Python with torch",
        "`HARNESS_TEST_PYTHON=$(ci/torch) cargo test --test exec`",
    );
    let no_tools = no_python.clone().or(no_tools);
    let mut trials = trials! { &no_python,
        the_summary_goes_to_standard_error_and_leaves_output_and_exit_code_alone
        an_end_without_a_python_frame_keeps_its_exit_code
        a_signal_gives_the_exit_code_of_a_shell_and_keeps_the_counters
        what_a_killed_process_could_not_report_is_refused
        figures_are_unknown_if_a_process_that_could_use_the_gpu_outlives_the_program
        descendants_of_a_shell_script_are_simulated
        processes_of_a_program_share_the_memory_of_a_gpu_until_they_end
        a_forked_child_gets_the_drivers_error_for_its_parents_context
        a_fatal_out_of_memory_error_is_explained_from_its_snapshot
        a_caught_out_of_memory_error_is_not_explained
        injected_failures_are_counted_separately
        a_program_on_a_real_gpu_gets_and_sees_only_its_limit
        managed_and_pitched_memory_and_arrays_count_towards_the_limit
        failures_are_injected_on_a_real_gpu_without_a_limit
        latencies_delay_calls_by_the_clocks_of_host_and_gpu
        a_kernel_takes_a_tenth_of_a_millisecond_by_events
        a_latency_without_effect_is_reported_and_an_invalid_one_rejected
        options_that_a_real_gpu_cannot_meet_are_rejected_before_the_run
        frees_are_recorded_and_a_real_gpu_has_the_same_curve
        a_program_without_torch_runs_and_one_without_a_request_is_told_so
        a_process_has_the_name_and_figures_of_the_libraries_that_it_uses
        a_setting_of_the_repository_stops_no_program_without_torch
        the_command_of_a_report_repeats_the_run
        nvidia_smi_prints_whole_lines_for_the_named_gpus
        a_library_is_asked_only_by_a_process_that_uses_the_gpu_and_for_its_devices
        a_runtime_that_is_linked_in_is_replaced_or_named
        the_functions_of_cuda_bindings_are_those_of_the_simulated_runtime
        cudnn_and_nvjitlink_get_an_error_in_place_of_the_tables_of_the_driver
        a_program_that_cannot_load_the_simulated_gpu_is_named_before_the_run
        a_cuda_release_or_gpu_that_the_program_lacks_is_named
        a_function_needed_only_by_an_extension_exists
        functions_for_a_default_stream_per_thread_use_the_stream_of_the_thread
        the_users_sitecustomize_runs_and_the_module_path_is_unchanged
        functions_that_the_hook_replaces_are_to_the_program_as_without_it
        a_library_of_another_build_is_rejected_before_the_run
        a_command_that_cannot_run_is_rejected_before_the_run
        an_output_that_is_a_named_pipe_is_refused_before_the_run
        an_output_goes_to_a_device_or_an_open_file
        what_a_program_changes_outside_of_itself_is_an_effect
        signals_reach_the_program
        remaining_processes_end_with_the_program
        a_killed_exec_leaves_neither_processes_nor_its_folder
        a_cache_that_the_linker_or_other_users_would_misuse_is_refused
        figures_of_many_runs_are_printed_although_their_report_cannot_be_written
        a_python_that_calls_cuda_itself_has_no_retry_of_torch
        a_process_that_cannot_write_its_files_says_so_in_a_line
        a_program_without_the_simulated_gpus_library_is_stopped_whatever_its_options
        a_program_that_writes_too_much_ends_with_a_named_signal
        a_file_size_limit_of_harness_is_an_error_with_a_reason
        a_small_stack_is_an_error_with_the_command_that_enlarges_it
        every_allocation_fails_once_and_the_expectation_decides_the_exit_code
        memory_that_a_random_program_keeps_by_chance_does_not_count
        an_end_is_clean_if_an_out_of_memory_error_and_nothing_else_ended_the_program
        the_end_of_a_worker_decides_whether_the_end_is_clean
        runs_begin_as_copies_that_behave_like_new_starts
        what_copies_would_share_is_named_and_each_run_starts_anew
        shards_run_the_cases_of_the_whole_and_are_merged
        shards_of_a_changed_program_or_with_other_variables_are_not_merged
        shards_with_another_module_or_input_file_are_not_merged
        a_program_that_is_started_without_the_variables_of_the_run_is_named
        last_failed_runs_only_the_cases_that_the_program_did_not_survive
        the_least_memory_is_found
        the_largest_value_that_fits_is_found_on_each_gpu
        a_value_in_a_configuration_file_is_searched
        no_copy_of_a_configuration_file_outlives_harness
        unusable_configuration_files_are_rejected_before_a_run
        arguments_and_variables_that_may_save_memory_are_tried
        settings_are_compared_by_running_the_program_with_each
        many_runs_on_a_limited_real_gpu_match_a_simulated_one
        runs_on_a_real_gpu_are_sequential_by_default
        an_injected_failure_without_effect_is_reported_and_fails
        pointless_runs_are_rejected_with_advice
        the_progress_of_every_fault_begins_with_a_finished_run
        an_unusable_baseline_is_rejected_before_the_run
        programs_of_a_scenario_share_its_memory
        processes_of_a_program_and_of_those_beside_it_are_counted_together
        a_failed_program_is_shown_with_its_last_lines_and_a_reproducing_command
        a_scenario_with_unusable_programs_is_skipped_with_the_reason
        a_scenario_for_another_gpu_is_skipped
        a_failed_program_on_a_gpu_is_shown_with_its_command
        an_optional_program_that_cannot_run_is_skipped_with_its_expectations
    };
    let no_events = skip(
        python_with_events().is_some(),
        "there is no Python 3.12 or later, which shows the errors that a program catches",
        "install it",
    );
    trials.extend(trials! { &no_events,
        recovery_is_judged_by_the_error_of_another_library
        a_baseline_names_another_version_of_a_library
    });
    trials.extend(trials! { &no_tools,
        a_tool_ends_with_its_call_and_its_server
        few_tools_run_at_a_time
    });
    trials.extend(trials! { &no_torch,
        a_real_torch_runs_on_the_simulated_gpu
        the_report_of_the_largest_value_has_a_picture_and_a_short_table
    });
    // An environment that an earlier `ci/torch` made lacks them.
    let has_apps = |python: String| {
        Command::new(python)
            .args(["-c", "import hydra, typer, pytest"])
            .output()
            .is_ok_and(|it| it.status.success())
    };
    let no_apps = skip(
        python_with_torch().is_none_or(has_apps),
        "the Python lacks hydra, typer or pytest",
        "remove the environment that `ci/torch` made, and call it again",
    );
    let no_apps = no_torch.or(no_apps);
    trials.extend(
        trials! { &no_apps, the_end_is_that_of_the_exception_which_hydra_typer_or_pytest_prints },
    );
    trials::run(&Arguments::from_args(), trials)
}

/// Returns the interpreter with a real torch.
fn python_with_torch() -> Option<String> {
    std::env::var("HARNESS_TEST_PYTHON")
        .ok()
        .filter(|python| !python.is_empty())
}

/// Returns the first Python in PATH that shows the errors that a program catches.
fn python_with_events() -> Option<&'static str> {
    let has_events = |python: &&str| {
        let ran = Command::new(python)
            .args(["-c", "import sys; sys.monitoring"])
            .output();
        ran.is_ok_and(|ran| ran.status.success())
    };
    ["python3", "python3.14", "python3.13", "python3.12"]
        .into_iter()
        .find(has_events)
}

/// The functions of torch that the programs and the exit hook use.
const TORCH: [(&str, &str); 4] = [
    (
        "__init__.py",
        "import types\nclass OutOfMemoryError(RuntimeError): pass\nfrom .version import \
         __version__\n\
         _observers = []\n_C = types.SimpleNamespace(_cuda_init=lambda: None, \
         _cuda_attach_out_of_memory_observer=_observers.append)\nfrom . import cuda\n",
    ),
    (
        "version.py",
        "__version__ = '2.11.0+cu130'\ncuda = '13.0'\nhip = None\n",
    ),
    (
        "cuda/__init__.py",
        r#"
import ctypes, torch
from . import memory
_runtime = ctypes.CDLL("libcudart.so.13")
_queued, _initialized, _ooms = [], False, 0

def is_initialized():
    return _initialized

def _lazy_call(call):
    _queued.append(call)

def device_count():
    count = ctypes.c_int()
    assert _runtime.cudaGetDeviceCount(ctypes.byref(count)) == 0
    return count.value

def malloc(size):
    global _initialized, _ooms
    if not _initialized:
        _initialized = True
        torch._C._cuda_init()
        for call in _queued:
            call()
    pointer = ctypes.c_void_p()
    if _runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) != 0:
        _ooms += 1
        for observe in torch._observers:
            observe(0, size, 0, 0)
        raise torch.OutOfMemoryError("CUDA out of memory.")

def memory_stats(device):
    return {"num_ooms": _ooms if device == 0 else 0}
"#,
    ),
    (
        "cuda/memory.py",
        "import gzip, os, pickle\n_recorded = []\ndef _record_memory_history(**settings): \
         _recorded.append(settings)\n\
         def _snapshot():\n    assert len(_recorded) == 1, _recorded\n    return \
         pickle.load(gzip.open(os.environ['RECORDED'])) if 'RECORDED' in os.environ else {}\n",
    ),
];

/// A folder with a fake torch, in which programs run.
struct World {
    folder: TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self {
            folder: TempDir::new().unwrap(),
        };
        for (name, text) in TORCH {
            world.write(&format!("site/torch/{name}"), text);
        }
        // Like the real torch, it depends on the CUDA runtime.
        let library = StubLibrary {
            soname: "libtorch_cuda.so",
            nodes: vec![],
            symbols: vec![],
            core: "libcudart.so.13",
        };
        let path = world.path("site/torch/lib/libtorch_cuda.so");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, library.bytes()).unwrap();
        fs::create_dir(world.path("tmp")).unwrap();
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Runs `harness exec OPTIONS -- COMMAND` with 1 GiB, unless the options contain a size.
    fn command(&self, options: &[&str], command: &[&str]) -> Command {
        let mut harness = self.harness();
        harness.arg("exec").args(options);
        if !options.contains(&"--memory") {
            harness.args(["--memory", "1GiB"]);
        }
        harness.arg("--").args(command);
        harness
    }

    /// Runs a scenario with these steps on the simulated device.
    fn run_scenario(&self, steps: &str) -> Ran {
        self.write(
            "scenarios/test.yaml",
            &format!(
                "about: A test.\nneeds: {{ memory: 1GiB \
             }}\nallocators: [expandable]\nsteps:\n{steps}"
            ),
        );
        self.run_written_scenario(&[])
    }

    fn run_written_scenario(&self, options: &[&str]) -> Ran {
        let mut harness = self.harness();
        harness.args([
            "run",
            "scenarios/test.yaml",
            "--device",
            "sim",
            "--no-report",
        ]);
        Ran::of(harness.args(options).output().unwrap())
    }

    /// Runs a scenario on a GPU. The driver and NVML are those of a simulated GPU with 8 GiB, which
    /// executes the kernels of the CUDA device but not those of programs.
    fn run_scenario_on_gpu(&self, steps: &str, format: &str) -> Ran {
        self.write(
            "scenarios/test.yaml",
            &format!(
                "about: A test.\nneeds: {{ memory: 1GiB \
             }}\nallocators: [expandable]\nsteps:\n{steps}"
            ),
        );
        let python =
            "#!/bin/sh\nHARNESS_GPU=\"$OF_PROGRAMS\" PATH=\"${PATH#*:}\" exec python3 \"$@\"\n";
        self.write("bin/python3", python);
        fs::set_permissions(self.path("bin/python3"), fs::Permissions::from_mode(0o755)).unwrap();
        let script = "OF_PROGRAMS=\"$HARNESS_GPU\" \
                      HARNESS_GPU=$(echo \"$HARNESS_GPU\" | sed 's/\"noop\"/\"execute\"/; \
                      s/\"processes\":false/\"processes\":true/') PATH=\"$PWD/bin:$PATH\" \
                      exec \"$1\" run scenarios/test.yaml --device cuda:0 --no-report --repeat 1 \
                      --format \"$2\"";
        self.run(
            &["--memory", "8GiB"],
            &[
                "sh",
                "-c",
                script,
                "sh",
                env!("CARGO_BIN_EXE_harness"),
                format,
            ],
        )
    }

    /// Runs `harness` in this folder, with its torch.
    fn harness(&self) -> Command {
        self.wrapped(&[env!("CARGO_BIN_EXE_harness")])
    }

    /// Runs a command that starts `harness`.
    fn wrapped(&self, command: &[&str]) -> Command {
        let mut harness = Command::new(command[0]);
        harness
            .args(&command[1..])
            .current_dir(self.folder.path())
            .stdin(Stdio::null());
        for variable in [
            "CARGO",
            "LD_AUDIT",
            "LD_PRELOAD",
            "RANK",
            "PYTORCH_ALLOC_CONF",
            "HARNESS_SIMULATED_GPU_LIBRARY",
            "HARNESS_PYTHON",
        ] {
            harness.env_remove(variable);
        }
        let variables = [
            ("HARNESS_CACHE", "cache"),
            ("PYTHONPATH", "site"),
            ("TMPDIR", "tmp"),
        ];
        harness
            .envs(variables.map(|(name, folder)| (name, self.path(folder))))
            .env("NO_COLOR", "1");
        harness
    }

    fn run(&self, options: &[&str], command: &[&str]) -> Ran {
        let ran = Ran::of(self.command(options, command).output().unwrap());
        let left: Vec<_> = fs::read_dir(self.path("tmp"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        assert!(left.is_empty(), "left behind: {left:?}");
        ran
    }

    fn record(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("run.json")).unwrap()).unwrap()
    }
}

struct Ran {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Ran {
    fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }
}

const RECORD: [&str; 2] = ["--record", "run.json"];

/// The words of a message without line breaks and frames.
fn plain(message: &str) -> String {
    message
        .split_whitespace()
        .filter(|word| *word != "│")
        .collect::<Vec<_>>()
        .join(" ")
}

fn the_summary_goes_to_standard_error_and_leaves_output_and_exit_code_alone(world: World) {
    world.write(
        "train.py",
        "import sys, torch\ntorch.cuda.malloc(3 << 20)\nprint('loss', \
         sys.argv[1])\nprint('warned', file=sys.stderr)\nsys.exit(7)\n",
    );
    let ran = world.run(&[], &["python3", "train.py", "0.5"]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(7), "loss 0.5\n"));
    let summary = "warned\n\nsimulated GPU: NVIDIA H100 80GB HBM3 (h100-80, compute capability \
         9.0), 1 GiB\n\
                   peak reserved 4 MiB (0.4 %); driver: 1 allocation, 0 frees, 0 failed\n\
                   torch 2.11.0+cu130: peak allocated 0 B, 0 retries, 0 out of memory errors\n";
    assert!(ran.err.starts_with(summary), "{}", ran.err);
}

fn an_end_without_a_python_frame_keeps_its_exit_code(world: World) {
    for end in [
        "atexit.register(os._exit, 7)",
        "_thread.start_new_thread(os._exit, (7,)); time.sleep(60)",
    ] {
        let program = format!("import _thread, atexit, os, time, torch\n{end}");
        let ran = world.run(&[], &["python3", "-c", &program]);
        assert_eq!(ran.code, Some(7), "{end}: {}", ran.err);
        assert!(!ran.err.contains("Traceback"), "{end}: {}", ran.err);
    }
}

fn a_signal_gives_the_exit_code_of_a_shell_and_keeps_the_counters(world: World) {
    let program = "import os, signal, torch; torch.cuda.malloc(1 << 20); os.kill(os.getpid(), \
         signal.SIGKILL)";
    let ran = world.run(&RECORD, &["python3", "-c", program]);
    let record = world.record();
    assert_eq!(
        (ran.code, &record["exit_code"], &record["signal"]),
        (Some(137), &137.into(), &9.into())
    );
    let process = &record["processes"][0];
    assert_eq!(
        (
            &process["torch"]["statistics"],
            &process["devices"][0]["mallocs"]
        ),
        (&"at_least".into(), &1.into()),
        "{record}"
    );
    assert!(
        ran.err
            .contains("peak allocated unknown: the process ended before torch could report"),
        "{}",
        ran.err
    );
}

/// The fake torch has no allocator whose memory keeps its statistics.
fn what_a_killed_process_could_not_report_is_refused(world: World) {
    let child = "import os, signal, torch; torch.cuda.malloc(1 << 20); os.kill(os.getpid(), \
         signal.SIGKILL)";
    let program =
        format!("import subprocess, sys; subprocess.run([sys.executable, '-c', {child:?}])");
    let unknown =
        "ended before torch could report, so its allocated peak and its errors are unknown";
    let least = world.run(
        &["--memory", "1GiB", "--least-memory"],
        &["python3", "-c", &program],
    );
    assert!(
        least.code == Some(1) && least.err.contains("The least memory is unknown: process"),
        "{}",
        least.err
    );
    assert!(least.err.contains(unknown), "{}", least.err);
    let file = world.path("peaks.json").display().to_string();
    let baseline = world.run(
        &["--memory", "1GiB", "--baseline", &file, "--update"],
        &["python3", "-c", &program],
    );
    assert!(
        baseline.code == Some(1)
            && baseline.err.contains(unknown)
            && !world.path("peaks.json").exists(),
        "{}",
        baseline.err
    );
}

fn figures_are_unknown_if_a_process_that_could_use_the_gpu_outlives_the_program(world: World) {
    let program = |command: &str, is_own_session: bool| {
        let session = if is_own_session { "True" } else { "False" };
        format!(
            "import subprocess, sys, torch; torch.cuda.malloc(1 << 20); \
             subprocess.Popen({command}, start_new_session={session})"
        )
    };
    let python = "[sys.executable, '-c', 'while True: __import__(\"time\").sleep(1)']";
    let unknown = "still ran when the program had ended, and was ended too";
    for is_own_session in [false, true] {
        let program = program(python, is_own_session);
        let run = |options: &[&str]| world.run(options, &["python3", "-c", &program]);
        let ran = run(&RECORD);
        assert!(
            ran.code == Some(0) && ran.err.contains(unknown),
            "{}",
            ran.err
        );
        assert_eq!(world.record()["outlived"].as_array().unwrap().len(), 1);
        let least = run(&["--memory", "1GiB", "--least-memory"]);
        assert!(
            least.code == Some(1) && least.err.contains("The least memory is unknown: process"),
            "{}",
            least.err
        );
        let file = world.path("peaks.json").display().to_string();
        let baseline = run(&["--baseline", &file, "--update"]);
        assert!(
            baseline.code == Some(1) && baseline.err.contains(unknown),
            "{}",
            baseline.err
        );
        assert!(!world.path("peaks.json").exists());
    }
    let helper = "[sys.executable, '-c', 'import time; time.sleep(1000) # compile_worker']";
    for harmless in ["['sleep', '1000']", helper] {
        let ran = world.run(&[], &["python3", "-c", &program(harmless, false)]);
        assert!(
            ran.code == Some(0) && !ran.err.contains("still ran"),
            "{}",
            ran.err
        );
    }
}

fn descendants_of_a_shell_script_are_simulated(world: World) {
    world.write(
        "train.py",
        "import subprocess, sys, torch\ntorch.cuda.malloc(1 << 20)\nif \
         len(sys.argv) > 1:\n    subprocess.run([sys.executable, 'train.py'], check=True)\n",
    );
    let ran = world.run(
        &RECORD,
        &[
            "sh",
            "-c",
            "RANK=1 python3 train.py child && exec python3 train.py",
        ],
    );
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let record = world.record();
    let processes = record["processes"].as_array().unwrap();
    let ranks: Vec<&Value> = processes
        .iter()
        .map(|process| &process["torch"]["rank"])
        .collect();
    assert_eq!(
        (
            processes.len(),
            ranks.iter().filter(|rank| ***rank == "1").count()
        ),
        (3, 2),
        "{record}"
    );
}

fn processes_of_a_program_share_the_memory_of_a_gpu_until_they_end(world: World) {
    world.write("train.py", include_str!("programs/shared.py"));
    let ran = world.run(
        &["--record", "run.json", "--context-overhead", "10MiB"],
        &["python3", "train.py"],
    );
    let seen = "second 0 first 2 0\nfree 304 used 720 held 110 610\nkilled: free 914 first 0 used \
         710\nforked: 3 free 314\n";
    assert_eq!(ran.out, seen, "{}", ran.err);
    assert_eq!(world.record()["peak_held"], serde_json::json!([720 << 20]));
    assert!(
        ran.err
            .contains("all processes: peak of 720 MiB held together, of 1 GiB"),
        "{}",
        ran.err
    );
}

/// The results of a forked child, first of a process without a context, then of one with a context.
const FORKED: &str = r#"
import ctypes, os, torch
runtime, driver = torch.cuda._runtime, ctypes.CDLL("libcuda.so.1")

def codes():
    place, number, other = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    return [
        runtime.cudaGetDeviceCount(ctypes.byref(number)),
        runtime.cudaMalloc(ctypes.byref(place), ctypes.c_size_t(1 << 20)),
        runtime.cudaMemGetInfo(ctypes.byref(number), ctypes.byref(other)),
        runtime.cudaStreamCreate(ctypes.byref(place)),
        runtime.cudaDeviceSynchronize(),
        runtime.cudaMemset(ctypes.c_void_p(), 0, ctypes.c_size_t()),
        driver.cuInit(0),
        driver.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(1 << 20)),
    ]

def of_child():
    child = os.fork()
    if child == 0:
        print(codes(), runtime.cudaGetLastError(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)

of_child()
print(codes(), flush=True)
of_child()
print(codes())
"#;

fn a_forked_child_gets_the_drivers_error_for_its_parents_context(world: World) {
    world.write("train.py", FORKED);
    let ran = world.run(&RECORD, &["python3", "train.py"]);
    let (fine, refused) = ("[0, 0, 0, 0, 0, 0, 0, 0]", "[3, 3, 3, 3, 3, 3, 3, 3]");
    assert_eq!(
        (ran.code, ran.out),
        (Some(0), format!("{fine} 0\n{fine}\n{refused} 3\n{fine}\n")),
        "{}",
        ran.err
    );
    // Each process counts its own attempts. The attempts of the child with a context fail before
    // they count.
    let record = world.record();
    let mallocs: Vec<u64> = record["processes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|process| process["devices"][0]["mallocs"].as_u64().unwrap())
        .collect();
    assert_eq!(mallocs.iter().sum::<u64>(), 6, "{record}");
}

fn a_fatal_out_of_memory_error_is_explained_from_its_snapshot(world: World) {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../snapshot/explain/tests/snapshots/features.pickle.gz");
    world.write(
        "train.py",
        "import torch\ntorch.cuda.malloc(1 << 20)\ntorch.cuda.malloc(2 << 30)\n",
    );
    let options = [
        "--record",
        "run.json",
        "--snapshot",
        "new/oom.pickle",
        "--memory",
        "2GiB",
    ];
    let ran = Ran::of(
        world
            .command(&options, &["python3", "train.py"])
            .env("RECORDED", &recorded)
            .output()
            .unwrap(),
    );
    assert_eq!(ran.code, Some(1));
    let record = world.record();
    let torch = &record["processes"][0]["torch"];
    assert_eq!(
        (
            &torch["ended_out_of_memory"],
            &torch["memory_stats"]["0"]["num_ooms"]
        ),
        (&true.into(), &1.into()),
        "{}",
        ran.err
    );
    assert_eq!(record["processes"][0]["devices"][0]["failed"], 1);
    let [written, recorded] =
        [world.path("new/oom.pickle"), recorded].map(|path| Snapshot::read(&path).unwrap());
    assert!(written == recorded, "{written:?}");
    assert!(
        ran.err.contains("OutOfMemoryError")
            && ran
                .err
                .contains("1 out of memory error; one ended the program"),
        "{}",
        ran.err
    );
    assert!(
        ran.err
            .contains("new/oom.pickle: out of memory, after event 1883"),
        "as `harness explain` says it: {}",
        ran.err
    );
}

fn a_caught_out_of_memory_error_is_not_explained(world: World) {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../snapshot/explain/tests/snapshots/features.pickle.gz");
    let program = "import torch\nfor size in (2 << 30, 1 << 20):\n    try: \
         torch.cuda.malloc(size)\n    except torch.OutOfMemoryError: print('smaller')\n";
    world.write("train.py", program);
    let mut command = world.command(&["--snapshot", "end.pickle"], &["python3", "train.py"]);
    let ran = Ran::of(command.env("RECORDED", recorded).output().unwrap());
    assert_eq!((ran.code, ran.out.as_str()), (Some(0), "smaller\n"));
    assert!(
        ran.err.contains("end.pickle") && !ran.err.contains("after event"),
        "{}",
        ran.err
    );
}

fn injected_failures_are_counted_separately(world: World) {
    let program = "import torch\nfor size in range(4):\n    try: torch.cuda.malloc(1 << 20); \
         print('ok')\n    except torch.OutOfMemoryError: print('oom')\n";
    world.write("train.py", program);
    let ran = world.run(
        &["--fail", "cudaMalloc:2:2", "--record", "run.json"],
        &["python3", "train.py"],
    );
    assert_eq!(ran.out, "ok\noom\noom\nok\n", "{}", ran.err);
    let device = &world.record()["processes"][0]["devices"][0];
    assert_eq!(
        ["mallocs", "failed", "injected"].map(|name| device[name].as_u64().unwrap()),
        [4, 2, 2]
    );
}

/// Queries the memory from the runtime, the driver and NVML.
const LIMITED: &str = r#"
import ctypes, torch
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p, CFUNCTYPE, POINTER
libraries = "libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1"
runtime, driver, nvml = (ctypes.CDLL(name) for name in libraries)
MIB = 1 << 20

def told(function):
    free, total = c_size_t(), c_size_t()
    assert function(byref(free), byref(total)) == 0
    return free.value // MIB, total.value // MIB

def get(function, mib, *more):
    address = c_void_p()
    return function(byref(address), c_size_t(mib * MIB), *more), address

print("at first", told(runtime.cudaMemGetInfo))
code, first = get(runtime.cudaMalloc, 3)
print("two pages", code, told(runtime.cudaMemGetInfo), told(driver.cuMemGetInfo_v2))
print("too much", get(runtime.cudaMalloc, 1021)[0], [runtime.cudaGetLastError() for _ in range(2)])
print("too much of the driver", *(get(driver.cuMemAlloc_v2, mib)[0] for mib in (1021, 1020)))
code, last = get(runtime.cudaMalloc, 1)
print("nothing is left", code)
print("given back", runtime.cudaFree(first), told(runtime.cudaMemGetInfo))

found = c_void_p()
assert driver.cuGetProcAddress_v2(b"cuMemAlloc", byref(found), 13000, c_uint64(0), None) == 0
by_address = CFUNCTYPE(c_int, POINTER(c_void_p), c_size_t)(found.value)
print("by address", get(by_address, 5)[0], get(by_address, 4)[0])

handle, memory = c_void_p(), (c_uint64 * 3)()
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(handle)) == 0
assert nvml.nvmlDeviceGetMemoryInfo(handle, memory) == 0
print("NVML", [bytes // MIB for bytes in memory])
properties, total = ctypes.create_string_buffer(4096), c_size_t()
assert runtime.cudaGetDeviceProperties_v2(properties, 0) == 0
assert driver.cuDeviceTotalMem_v2(byref(total), 0) == 0
print("properties", int.from_bytes(properties.raw[288:296], "little") // MIB, total.value // MIB)
"#;

/// The output with a limit of 1 GiB.
const LIMITED_PRINTS: &str = "at first (1024, 1024)
two pages 0 (1020, 1024) (1020, 1024)
too much 2 [2, 0]
too much of the driver 2 0
nothing is left 2
given back 0 (4, 1024)
by address 2 0
NVML [1024, 0, 1024]
properties 1024 1024
";

/// Runs `harness exec --device cuda:0 OPTIONS -- COMMAND`. Driver, NVML and runtime are those of a
/// simulated GPU with 8 GiB.
fn limited(world: &World, options: &[&str], command: &[&str]) -> Ran {
    let inner = [
        &[env!("CARGO_BIN_EXE_harness"), "exec"],
        options,
        &["--"],
        command,
    ]
    .concat();
    world.run(&["--memory", "8GiB"], &inner)
}

fn a_program_on_a_real_gpu_gets_and_sees_only_its_limit(world: World) {
    world.write("train.py", LIMITED);
    let options = [
        "--device", "cuda:0", "--memory", "1GiB", "--record", "run.json",
    ];
    let ran = limited(&world, &options, &["python3", "train.py"]);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(0), LIMITED_PRINTS),
        "{}",
        ran.err
    );
    let record = world.record();
    let device = &record["processes"][0]["devices"][0];
    let figures = [
        "memory",
        "peak_reserved",
        "mallocs",
        "frees",
        "failed",
        "injected",
    ]
    .map(|name| device[name].as_u64().unwrap());
    assert_eq!(
        (&record["gpu"], figures),
        (&"cuda:0".into(), [1 << 30, 1 << 30, 7, 1, 4, 0]),
        "{record}"
    );
    assert!(
        ran.err.contains(
            "cuda:0 (NVIDIA H100 80GB HBM3): 1 GiB of its 8 GiB for each \
         process\npeak reserved 1 GiB"
        ),
        "{}",
        ran.err
    );
}

/// Requests managed memory, pitched memory and arrays from the driver. Prints the result code and
/// the free memory in MiB.
const KINDS: &str = r#"
import ctypes, torch
from ctypes import byref, c_size_t, c_uint, c_void_p
runtime, driver = torch.cuda._runtime, ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20

class Flat(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", c_uint), ("channels", c_uint)]

class Array(ctypes.Structure):
    _fields_ = [(name, c_size_t) for name in ("width", "height", "depth")] + [
        (name, c_uint) for name in ("format", "channels", "flags")]

def free():
    left, total = c_size_t(), c_size_t()
    assert runtime.cudaMemGetInfo(byref(left), byref(total)) == 0
    return left.value // MIB

def told(name, give, get, *arguments):
    place = c_void_p()
    code = get(byref(place), *arguments)
    held = free()
    print(name, code, held, give(place) if code == 0 else "-", free())

FLOAT = 0x20
pitch = c_size_t()
flat, array, large, mipmap = Flat(1024, 512, FLOAT, 4), Array(1024, 512, 4, FLOAT, 4, 0), \
    Array(8192, 8192, 2, FLOAT, 4, 0), Array(1024, 1024, 0, FLOAT, 4, 0)
told("managed", driver.cuMemFree_v2, driver.cuMemAllocManaged, c_size_t(100 * MIB), 1)
told("managed of the runtime", runtime.cudaFree, runtime.cudaMallocManaged, c_size_t(100 * MIB), 1)
told("pitched", driver.cuMemFree_v2, driver.cuMemAllocPitch_v2, byref(pitch), c_size_t(300),
    c_size_t(1 << 16), 4)
print("pitch", pitch.value)
told("array", driver.cuArrayDestroy, driver.cuArrayCreate_v2, byref(flat))
told("3D", driver.cuArrayDestroy, driver.cuArray3DCreate_v2, byref(array))
told("mipmap", driver.cuMipmappedArrayDestroy, driver.cuMipmappedArrayCreate, byref(mipmap), 2)
told("too much", driver.cuMemFree_v2, driver.cuMemAllocManaged, c_size_t(1025 * MIB), 1)
told("too large", driver.cuArrayDestroy, driver.cuArray3DCreate_v2, byref(large))
"#;

/// The output with 1 GiB: 65,536 rows of 512 bytes are 32 MiB; 1024² elements of 16 bytes plus a
/// quarter are 20 MiB.
const KINDS_PRINTS: &str = "managed 0 924 0 1024
managed of the runtime 0 924 0 1024
pitched 0 992 0 1024
pitch 512
array 0 1016 0 1024
3D 0 992 0 1024
mipmap 0 1004 0 1024
too much 2 1024 - 1024
too large 2 1024 - 1024
";

fn managed_and_pitched_memory_and_arrays_count_towards_the_limit(world: World) {
    world.write("train.py", KINDS);
    let simulated = world.run(&["--memory", "1GiB"], &["python3", "train.py"]);
    assert_eq!(
        (simulated.code, simulated.out.as_str()),
        (Some(0), KINDS_PRINTS),
        "{}",
        simulated.err
    );
    let limited = limited(
        &world,
        &["--device", "cuda:0", "--memory", "1GiB"],
        &["python3", "train.py"],
    );
    assert_eq!(
        (limited.code, limited.out.as_str()),
        (Some(0), KINDS_PRINTS),
        "{}",
        limited.err
    );
}

fn failures_are_injected_on_a_real_gpu_without_a_limit(world: World) {
    let program = "import ctypes, torch\nfor size in range(4):\n    try: torch.cuda.malloc(1 << \
         20); print('ok')\n    except torch.OutOfMemoryError: print('oom', \
         torch.cuda._runtime.cudaGetLastError())\n";
    world.write("train.py", program);
    let options = [
        "--device",
        "cuda:0",
        "--record",
        "run.json",
        "--fail",
        "cudaMalloc:2:2",
    ];
    let ran = limited(&world, &options, &["python3", "train.py"]);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(0), "ok\noom 2\noom 2\nok\n"),
        "{}",
        ran.err
    );
    let device = &world.record()["processes"][0]["devices"][0];
    assert_eq!(
        ["memory", "mallocs", "failed", "injected"].map(|name| device[name].as_u64().unwrap()),
        [8 << 30, 4, 2, 2]
    );
    let ran = limited(
        &world,
        &["--device", "cuda:0", "--fail", "cudaMalloc:5"],
        &["python3", "train.py"],
    );
    assert!(
        ran.code == Some(1) && ran.err.contains("had no effect"),
        "{}",
        ran.err
    );
}

/// Calls functions between two events.
const EVENTS: &str = r#"
import ctypes, time, torch
from ctypes import c_float, c_size_t, c_void_p
runtime = torch.cuda._runtime
runtime.cudaEventElapsedTime.argtypes = [ctypes.POINTER(c_float), c_void_p, c_void_p]
runtime.cudaEventRecord.argtypes = [c_void_p, c_void_p]
runtime.cudaFree.argtypes = [c_void_p]

def event():
    made = c_void_p()
    assert runtime.cudaEventCreate(ctypes.byref(made)) == 0
    assert runtime.cudaEventRecord(made, None) == 0
    return made

def timed(call):
    first, began = event(), time.perf_counter()
    call()
    took, last, between = time.perf_counter() - began, event(), ctypes.c_float()
    assert runtime.cudaEventElapsedTime(ctypes.byref(between), first, last) == 0
    return took, between.value

memory = ctypes.c_void_p()
"#;

/// Prints whether slow calls took at least 40 ms by the host's clock, and which calls did by
/// events.
const TIMED: &str = r#"
def shown(name, is_slow, call):
    took, between = timed(call)
    print(name, took >= 0.04 or not is_slow, between >= 40)

shown("malloc", True, lambda: runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(1 << 20)))
other = ctypes.byref(c_void_p())
shown("async", False, lambda: runtime.cudaMallocAsync(other, c_size_t(1 << 20), None))
shown("free", True, lambda: runtime.cudaFree(memory))
shown("synchronize", False, lambda: runtime.cudaDeviceSynchronize())
"#;

/// With a microsecond, Triton's autotuner repeats each kernel 57,000 times.
fn a_kernel_takes_a_tenth_of_a_millisecond_by_events(world: World) {
    let fills = "for _ in range(8): assert runtime.cudaMemsetAsync(memory, 0, ctypes.c_size_t(1 << \
         20), None) == 0";
    let program = format!(
        "{EVENTS}assert runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == \
         0\ndef fill():\n    {fills}\n\
         print(round(timed(fill)[1], 1), round(timed(lambda: None)[1], 1))"
    );
    world.write("train.py", &program);
    let ran = world.run(&[], &["python3", "train.py"]);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(0), "0.9 0.1\n"),
        "{}",
        ran.err
    );
}

fn latencies_delay_calls_by_the_clocks_of_host_and_gpu(world: World) {
    world.write("train.py", &format!("{EVENTS}{TIMED}"));
    let options = [
        "--latency",
        "cudaMalloc:40ms",
        "--latency",
        "cudaFree:40ms",
        "--record",
        "run.json",
    ];
    let ran = world.run(&options, &["python3", "train.py"]);
    let timed = |events: bool| {
        let told = |slow: bool| {
            if slow && events {
                "True True"
            } else {
                "True False"
            }
        };
        format!(
            "malloc {}\nasync {}\nfree {}\nsynchronize {}\n",
            told(true),
            told(false),
            told(true),
            told(false)
        )
    };
    assert_eq!((ran.code, ran.out), (Some(0), timed(true)), "{}", ran.err);
    assert!(
        ran.err
            .contains("latency cudaMalloc:40ms: 1 call delayed, 40.0 ms in total\n"),
        "{}",
        ran.err
    );
    let calls = |record: &Value| record["processes"][0]["slow_calls"].clone();
    let expected = ["cudaMalloc", "cudaFree"].map(|call| json!({ "call": call, "calls": 1 }));
    let expected = Value::from(expected.to_vec());
    assert_eq!(calls(&world.record()), expected);
    // The clock of the simulated GPU does not include the wait.
    let ran = limited(
        &world,
        &[&["--device", "cuda:0"][..], &options].concat(),
        &["python3", "train.py"],
    );
    assert_eq!((ran.code, ran.out), (Some(0), timed(false)), "{}", ran.err);
    assert_eq!(calls(&world.record()), expected);
    assert!(
        ran.err
            .contains("latency cudaFree:40ms: 1 call delayed, 40.0 ms in total\n"),
        "{}",
        ran.err
    );
}

fn a_latency_without_effect_is_reported_and_an_invalid_one_rejected(world: World) {
    world.write("train.py", FOUR);
    for device in [&[][..], &["--device", "cuda:0"]] {
        let options = [
            device,
            &["--latency", "any:1ms", "--latency", "cuMemUnmap:3ms"],
        ]
        .concat();
        let run = |options: &[&str]| {
            if device.is_empty() {
                world.run(options, &["python3", "train.py"])
            } else {
                limited(&world, options, &["python3", "train.py"])
            }
        };
        let ran = run(&options);
        assert!(
            ran.code == Some(1) && ran.err.contains("`--latency cuMemUnmap:3ms` had no effect"),
            "{}",
            ran.err
        );
    }
    let many = world.run(
        &["--latency", "cuMemUnmap:3ms", "--every-fault=largest:1"],
        &["python3", "train.py"],
    );
    assert!(
        many.err
            .contains("`--latency cuMemUnmap:3ms` had no effect in the first run"),
        "{}",
        many.err
    );
    let refused = world.run(&["--latency", "cudaMalloc:3"], &["python3", "train.py"]);
    assert!(
        refused.code == Some(2)
            && refused
                .err
                .contains("`cudaMalloc:3` is not CALL:DURATION with a duration above 0"),
        "{}",
        refused.err
    );
}

fn options_that_a_real_gpu_cannot_meet_are_rejected_before_the_run(world: World) {
    let refused = |options: &[&str]| {
        let ran = limited(&world, options, &["python3", "-c", "print('ran')"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{}", ran.err);
        ran.err
            .replace('│', " ")
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert!(refused(&["--device", "cuda:1"]).contains("the driver has one device, cuda:0"));
    assert!(
        refused(&["--device", "sim"]).contains(
            "expected a real GPU, as in `cuda:0`; without `--device` the GPU is simulated"
        )
    );
    assert!(
        refused(&["--device", "cuda:0", "--memory", "9GiB"])
            .contains("has 8 GiB, which is less than `--memory 9 GiB`")
    );
    for option in [
        &["--gpu", "a100-80"][..],
        &["--events", "instant"],
        &["--devices", "2"],
        &["--addresses", "up"],
    ] {
        let said = refused(&[&["--device", "cuda:0"], option].concat());
        assert!(
            said.contains("'--device <cuda:N>' cannot be used with"),
            "{said}"
        );
    }
}

/// Allocates memory and frees some of it in between. Prints the outcome, size and held bytes of
/// each attempt, and the frees. The simulated GPU records the same, and so does the limiting
/// library if it is loaded.
const GIVES_BACK: &str = r#"
import ctypes, os, torch
runtime, memory, other = torch.cuda._runtime, ctypes.c_void_p(), ctypes.c_void_p()
assert runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(20 << 20)) == 0
torch.cuda.malloc(4 << 20)
runtime.cudaMemset(memory, 0, 64)
assert runtime.cudaFree(memory) == 0
assert runtime.cudaMalloc(ctypes.byref(other), ctypes.c_size_t(9 << 30)) == 2
assert runtime.cudaMalloc(ctypes.byref(other), ctypes.c_size_t(6 << 20)) == 0
assert runtime.cudaFree(other) == 0

def rows(folder, kind):
    noted = open("%s/%d.%s" % (os.environ[folder], os.getpid(), kind), "rb").read()
    words = [int.from_bytes(noted[at:at + 8], "little") for at in range(0, len(noted), 8)]
    return [words[at:at + 4] for at in range(0, len(words), 4)]

for folder in ("HARNESS_GPU_RUN", "HARNESS_GPU_LIMITS_RUN"):
    if folder in os.environ:
        attempts, frees = rows(folder, "attempts"), rows(folder, "frees")
        asked = [(kind >> 8, 0 if kind >> 8 else size >> 20, held >> 20)
            for kind, size, _, held in attempts]
        print(asked, [(before, held >> 20) for before, _, _, held in frees])
        print([row[2] for row in attempts], [row[1] for row in frees])
"#;

fn frees_are_recorded_and_a_real_gpu_has_the_same_curve(world: World) {
    world.write("train.py", GIVES_BACK);
    let (curve, work) = (
        "[(0, 20, 0), (0, 4, 20), (1, 0, 4), (0, 6, 4)] [(2, 4), (4, 4)]\n",
        "[0, 0, 1, 1] [1, 1]\n",
    );
    let reported = |ran: Ran, printed: &str| {
        assert_eq!(
            (ran.code, ran.out.as_str()),
            (Some(0), printed),
            "{}",
            ran.err
        );
        ["report.md", "report.svg"].map(|file| fs::read_to_string(world.path(file)).unwrap())
    };
    let [page, picture] = reported(
        world.run(&["--report", "report.md"], &["python3", "train.py"]),
        &format!("{curve}{work}"),
    );
    assert!(
        page.contains("reserved memory changes at driver allocations and frees"),
        "{page}"
    );
    // The simulated driver in place of a real one records the same. Without a count of stream work,
    // it counts calls for memory.
    let ran = limited(
        &world,
        &[
            "--device",
            "cuda:0",
            "--memory",
            "1GiB",
            "--report",
            "report.md",
        ],
        &["python3", "train.py"],
    );
    let [limited_page, limited_picture] =
        reported(ran, &format!("{curve}{work}{curve}[0, 1, 3, 4] [2, 5]\n"));
    let in_words = |picture: &str| {
        picture
            .split_once("device 0: ")
            .unwrap()
            .1
            .split_once("</desc>")
            .unwrap()
            .0
            .to_owned()
    };
    assert_eq!(in_words(&picture), in_words(&limited_picture));
    let calls = |page: &str| {
        page.split_once("## Driver calls")
            .unwrap()
            .1
            .split_once("## ")
            .unwrap()
            .0
            .to_owned()
    };
    assert_eq!(calls(&page), calls(&limited_page));
    let again = "harness exec --device cuda:0 --memory 1073741824B -- python3 train.py";
    assert!(
        limited_page.contains("calls of the program for memory") && limited_page.contains(again),
        "{limited_page}"
    );
}

fn a_program_without_torch_runs_and_one_without_a_request_is_told_so(world: World) {
    let source = "#include <dlfcn.h>\n#include <stdio.h>\n\
         int main(int count, char **given) {\n\
         void *driver = dlopen(\"libcuda.so\", RTLD_NOW); unsigned long address; void *context;\n\
         int (*init)(unsigned) = dlsym(driver, \"cuInit\");\n\
         int (*retain)(void **, int) = dlsym(driver, \"cuDevicePrimaryCtxRetain\");\n\
         int (*set)(void *) = dlsym(driver, \"cuCtxSetCurrent\");\n\
         int (*allocate)(unsigned long *, unsigned long) = dlsym(driver, \"cuMemAlloc_v2\");\n\
         init(0); retain(&context, 0); set(context);\n\
         for (int i = 1; i < count; i++) printf(\"%d \", allocate(&address, 600 << 20));\n\
         return init(7) != 1; }\n";
    world.write("program.c", source);
    let made = Command::new("cc")
        .args(["-o", "program", "program.c", "-ldl"])
        .current_dir(world.folder.path())
        .status();
    assert!(made.unwrap().success(), "a C compiler is required");
    let ran = world.run(&["--require-gpu"], &["./program", "one", "two"]);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(0), "0 2 "),
        "{}",
        ran.err
    );
    assert!(
        ran.err.contains("driver: 2 allocations, 0 frees, 1 failed"),
        "{}",
        ran.err
    );
    let ran = world.run(&["--require-gpu"], &["./program"]);
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    let why = "CUDA or NVML was called, but no memory was requested: cuInit was the first call \
         that failed, with error 1 in `program`";
    assert!(ran.err.contains(why), "{}", ran.err);
    // The torch of the environment is not the program's.
    let ran = world.run(&["--values", "cpu"], &["./program", "one"]);
    assert!(ran.err.contains("computed values (zeros)"), "{}", ran.err);
    let python = [
        "python3",
        "-I",
        "-c",
        "import ctypes; ctypes.CDLL('libcudart.so.13').cudaSetDevice(3)",
    ];
    let ran = world.run(&[], &python);
    let why = "a function of the runtime was the first call that failed, with error 101";
    assert!(ran.err.contains(why), "{}", ran.err);
    let python = ["python3", "-I", "-c", "print(1)"];
    let ran = world.run(&["--values", "cpu"], &python);
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    let why = "`--values cpu` computes the operations of torch, and the program has no torch";
    assert!(ran.err.contains(why), "{}", ran.err);
    let ran = world.run(&[], &python);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(0), "1\n"),
        "{}",
        ran.err
    );
    assert!(
        ran.err
            .contains("has no torch and no other package that uses CUDA")
            && ran
                .err
                .contains("no process used the simulated GPU: none called"),
        "{}",
        ran.err
    );
}

/// Libraries without torch, as far as the hook asks them, and `used`, which requests memory for
/// them.
const LIBRARIES: [(&str, &str); 7] = [
    (
        "used.py",
        "import collections, ctypes\n_runtime = ctypes.CDLL('libcudart.so.13')\n\
         by = collections.Counter()\n\
         def malloc(library, size):\n    pointer = ctypes.c_void_p()\n    \
         assert _runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == 0\n    \
         by[library] += size\n",
    ),
    ("jax/__init__.py", "__version__ = '0.9.0'\n"),
    ("jax/_src/__init__.py", ""),
    (
        "jax/_src/xla_bridge.py",
        "import used\nclass _Device:\n    \
         platform, local_hardware_id = 'gpu', 0\n    \
         def memory_stats(self):\n        \
         return dict.fromkeys(('peak_bytes_in_use', 'bytes_in_use'), used.by['jax'])\n\
         class _Backend:\n    def __init__(self, *devices): self.devices = devices\n    \
         def local_devices(self): return self.devices\n\
         def backends_are_initialized(): return used.by['jax'] > 0\n\
         def backends(): return {'cpu': _Backend(), 'cuda': _Backend(_Device())}\n",
    ),
    ("onnxruntime.py", "__version__ = '1.25.0'\n"),
    (
        "cupy/__init__.py",
        "import used\nfrom . import cuda\n__version__ = '14.2.0'\nclass _Pool:\n    \
         used_bytes = total_bytes = lambda self: used.by['cupy']\n    \
         def malloc(self): pass\n_pool = _Pool()\n\
         def get_default_memory_pool(): return _pool\n\
         cuda.allocator = _pool.malloc\nclass OtherPool(_Pool):\n    \
         used_bytes = total_bytes = lambda self: used.by['other']\n",
    ),
    (
        "cupy/cuda.py",
        "def get_allocator(): return allocator\n\
         class Device:\n    def __init__(self, device): print('asks for', device)\n    \
         def __enter__(self): pass\n    def __exit__(self, *error): pass\n\
         class runtime:\n    def getDeviceCount(): print('asks')\n",
    ),
];

fn a_process_has_the_name_and_figures_of_the_libraries_that_it_uses(world: World) {
    for (name, text) in LIBRARIES {
        world.write(&format!("site/{name}"), text);
    }
    let jax = "JAX 0.9.0, XLA's BFC allocator: ";
    let of_jax = format!("{jax}peak allocated 1 MiB, allocated at the end 1 MiB");
    let killed = "os.kill(os.getpid(), signal.SIGKILL)";
    let by_jax = "import jax, used; used.malloc('jax', 1 << 20)";
    for (program, end, told) in [
        (by_jax, "pass", of_jax.as_str()),
        (by_jax, "os._exit(0)", &of_jax),
        // torch is imported, but not used.
        (
            "import jax, torch, used; used.malloc('jax', 1 << 20)",
            "os._exit(0)",
            &of_jax,
        ),
        (
            by_jax,
            killed,
            &format!("{jax}the process ended before it could report"),
        ),
        (
            "import jax, torch; torch.cuda.malloc(1 << 20)",
            killed,
            "torch 2.11.0+cu130: peak allocated unknown: the process ended before torch could \
             report",
        ),
        (
            "import jax, onnxruntime, used; used.malloc('onnxruntime', 1 << 20)",
            "pass",
            "JAX and ONNX Runtime, XLA's BFC allocator and ONNX Runtime's arena: reserved at the \
             end 2 MiB",
        ),
        (
            "import jax, cupy, used; used.malloc('jax', 1 << 20); used.malloc('cupy', 1 << 20)",
            "pass",
            "JAX and CuPy, XLA's BFC allocator and CuPy's memory pool: allocated at the end 2 MiB",
        ),
        (
            "import cupy, used; used.malloc('cupy', 1 << 20)\n\
             cupy.cuda.allocator = cupy.OtherPool().malloc; used.malloc('other', 2 << 20)",
            "pass",
            "CuPy 14.2.0, CuPy's OtherPool: allocated at the end 3 MiB, reserved at the end 3 MiB",
        ),
        (
            "import cupy, used; used.malloc('other', 1 << 20)\n\
             def allocate(size): pass\ncupy.cuda.allocator = allocate",
            "pass",
            "CuPy 14.2.0, its allocator `allocate`: reserved at the end 2 MiB",
        ),
        (
            "import jax, os; os.environ['XLA_PYTHON_CLIENT_ALLOCATOR'] = 'cuda_async'\n\
             import used; used.malloc('jax', 1 << 20)",
            "pass",
            "JAX 0.9.0, XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async: peak allocated 1 MiB, allocated at \
             the end 1 MiB",
        ),
    ] {
        let program = format!("import os, signal\n{program}\n{end}");
        let ran = world.run(&[], &["python3", "-c", &program]);
        let lines: Vec<&str> = ran.err.lines().map(str::trim).collect();
        assert!(lines.contains(&told), "{program}: {}", ran.err);
    }
}

/// A module of cuda.bindings, whose own functions return 999, and a program that calls them as
/// other modules of cuda.bindings do.
const BINDINGS: [(&str, &str); 2] = [
    (
        "site/linked.py",
        "import ctypes\n\
         of = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)\n\
         own = of(lambda *given: 999)\n\
         new = ctypes.pythonapi.PyCapsule_New\n\
         new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], \
         ctypes.py_object\n\
         NAME = b'cudaError_t (void **, size_t)'\n\
         __pyx_capi__ = {name: new(ctypes.cast(own, ctypes.c_void_p), NAME, None)\n    \
         for name in ('_cudaMalloc', '_cudaOfNoRuntime', 'getDriverEglFrame')}\n",
    ),
    (
        "bound.py",
        "import ctypes, importlib, linked, sys\n\
         find = ctypes.pythonapi.PyCapsule_GetPointer\n\
         find.argtypes, find.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p\n\
         type_of = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)\n\
         for module in sys.argv[1:]:\n    \
         functions = importlib.import_module('cuda.bindings.' + module).__pyx_capi__\n    \
         for name in functions:\n        \
         place = ctypes.c_void_p()\n        \
         print(type_of(find(functions[name], linked.NAME))(ctypes.byref(place), 1 << 20))\n",
    ),
];

fn the_functions_of_cuda_bindings_are_those_of_the_simulated_runtime(world: World) {
    let modules = [
        "_bindings.cyruntime",
        "_bindings.cyruntime_ptds",
        "_internal.runtime",
        "_internal.runtime_ptds",
    ];
    for (name, text) in BINDINGS {
        world.write(name, text);
    }
    for module in modules {
        let file = format!("site/cuda/bindings/{}.py", module.replace('.', "/"));
        world.write(
            &file,
            "from linked import __pyx_capi__\n__pyx_capi__ = dict(__pyx_capi__)\n",
        );
    }
    for (version, of_runtime) in [("13.5.0", 0), ("12.9.4", 999)] {
        // Python takes a compiled file for current if size and second of the change are the same.
        let package = format!("__version__ = '{version}'  # {of_runtime}\n");
        world.write("site/cuda/bindings/__init__.py", &package);
        let command = [&["python3", "bound.py"], &modules[..]].concat();
        let ran = world.run(&[], &command);
        let expected = format!("{of_runtime}\n999\n999\n").repeat(modules.len());
        assert_eq!(ran.out, expected, "{version}: {}", ran.err);
    }
}

fn a_library_is_asked_only_by_a_process_that_uses_the_gpu_and_for_its_devices(world: World) {
    for (name, text) in LIBRARIES {
        world.write(&format!("site/{name}"), text);
    }
    let run = |program: &str| {
        let options = [&RECORD[..], &["--devices", "2"]].concat();
        let ran = world.run(&options, &["python3", "-c", program]);
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        ran
    };
    let only_imported = run("import cupy");
    assert_eq!(only_imported.out, "");
    assert!(
        only_imported
            .err
            .contains("no process used the simulated GPU: none called"),
        "{}",
        only_imported.err
    );
    let used = run("import cupy, used; used.malloc('cupy', 1 << 20)");
    assert!(
        used.out.contains("asks for 0") && !used.out.contains("asks for 1"),
        "{}",
        used.out
    );
    // The figures of a parent are not those of its child, whose library must not be used.
    for end in ["os._exit(0)", "sys.exit()"] {
        run(&format!(
            "import jax._src.xla_bridge, os, sys, used\nused.malloc('jax', 1 << 20)\n\
             if os.fork():\n    os.wait()\n\
             else:\n    jax._src.xla_bridge.backends = lambda: os.abort()\n    {end}"
        ));
        let record = world.record();
        let stats = |process: &Value| process["torch"]["memory_stats"]["0"].is_object();
        let with_stats = record["processes"].as_array().unwrap().iter();
        assert_eq!(with_stats.filter(|of| stats(of)).count(), 1, "{record}");
    }
}

fn a_setting_of_the_repository_stops_no_program_without_torch(world: World) {
    world.write(".harness.yml", "values: cpu\n");
    for program in [
        ["python3", "-I", "-c", "print(1)"],
        ["sh", "-c", "echo 1", "sh"],
    ] {
        let ran = world.run(&[], &program);
        let ended = (ran.code, ran.out.as_str());
        assert_eq!(ended, (Some(0), "1\n"), "{}", ran.err);
    }
}

fn the_command_of_a_report_repeats_the_run(world: World) {
    let options = [
        "--cuda",
        "13",
        "--require-gpu",
        "--events",
        "range",
        "--report",
        "report.md",
    ];
    let ran = world.run(&options, &["python3", "-c", "print(1)"]);
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    let report = fs::read_to_string(world.path("report.md")).unwrap();
    for told in [
        "--cuda 13",
        "--events range",
        "--require-gpu --",
        "`--require-gpu` is not met",
    ] {
        assert!(report.contains(told), "{told}: {report}");
    }
    // A baseline is of one run.
    let options = ["--events", "range", "--baseline", "peaks.json", "--update"];
    let ran = world.run(&options, &["python3", "-c", "print(1)"]);
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    assert!(ran.err.contains("`--events range`"), "{}", ran.err);
}

fn nvidia_smi_prints_whole_lines_for_the_named_gpus(world: World) {
    let asked = |words: &str| {
        let words = format!("nvidia-smi {words}");
        let ran = world.run(&["--devices", "3"], &["sh", "-c", &words]);
        assert_eq!(ran.code, Some(0), "{words}: {}", ran.err);
        ran.out
    };
    assert_eq!(
        asked("--query-gpu=index --format=csv -i 0,2"),
        "index\n0\n2\n"
    );
    assert_eq!(
        asked("--query-compute-apps=pid,used_memory --format=csv"),
        "pid, used_memory [MiB]\n"
    );
    let unknown = asked("--query-gpu=power.draw,temperature.gpu --format=csv,noheader -i 1");
    assert_eq!(unknown, "[N/A], [N/A]\n");
    let table = asked("");
    assert!(table.contains(" N/A ") && table.ends_with("+\n"), "{table}");
    assert_eq!(asked("-L").lines().count(), 3);
}

/// Functions of CUDA's runtime for a program to link, each of which fails with error 35.
const LINKED_RUNTIME: &str = "int cudaMalloc(void **at, unsigned long size) { return 35; }\n\
     int cudaMemGetInfo(unsigned long *left, unsigned long *total) { return 35; }\n\
     int __cudaRegisterFatBinaryEnd(void **handle) { return 35; }\n";

fn a_runtime_that_is_linked_in_is_replaced_or_named(world: World) {
    world.write("runtime.c", LINKED_RUNTIME);
    let main = "#include <stdio.h>\nextern int cudaMalloc(void **, unsigned long), \
         cudaMemGetInfo(unsigned long *, unsigned long *);\n\
         __attribute__((constructor)) static void early(void)\n\
         { void *at; cudaMalloc(&at, 1 << 20); }\n\
         int main(void) { unsigned long left = 0, total = 0; void *at;\n\
         int asked = cudaMemGetInfo(&left, &total), got = cudaMalloc(&at, 2ul << 30);\n\
         printf(\"%d %d %d\", asked, total == 1ul << 30, got); }\n";
    world.write("main.c", main);
    let release = "int cudaMemGetDefaultMemPool(void) { return 35; }";
    world.write("release.c", release);
    let build = |options: &[&str]| {
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-o", "linked", "main.c", "runtime.c"]);
        let made = compiler.args(options).current_dir(world.folder.path());
        assert!(made.status().unwrap().success(), "a C compiler is required");
    };
    // Replaced in a program and in a position-dependent one, for constructors too.
    for position in ["-pie", "-no-pie"] {
        build(&["release.c", position]);
        let ran = world.run(&["--cuda", "13"], &["./linked"]);
        let ended = (ran.code, ran.out.as_str());
        assert_eq!(ended, (Some(0), "0 1 2"), "{position}: {}", ran.err);
        let calls = "driver: 2 allocations, 0 frees, 1 failed";
        assert!(ran.err.contains(calls), "{}", ran.err);
    }
    let named = |options: &[&str], why: &str| {
        let ran = world.run(options, &["./linked"]);
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{}", ran.err);
        // The error is broken into lines.
        let words: Vec<&str> = ran
            .err
            .split([' ', '\n', '│'])
            .filter(|word| !word.is_empty())
            .collect();
        let told = words.join(" ");
        assert!(told.contains("linked`") && told.contains(why), "{told}");
    };
    named(&["--cuda", "12"], "use `--cuda 13`");
    build(&[]);
    named(&["--cuda", "13"], "neither of CUDA 12 nor of CUDA 13");
    world.write(
        "small.c",
        "__asm__(\".type cudaFree, @function\\ncudaFree: ret\\n.size cudaFree, 1\\n\\\n\
         .type after, @function\\nafter: ret\\n.size after, 1\\n\");\n",
    );
    build(&["release.c", "small.c"]);
    named(&["--cuda", "13"], "its function `cudaFree` is too small");
    // If a command starts the dynamic linker, the program is not the executed file.
    build(&["release.c"]);
    let linker = "/lib64/ld-linux-x86-64.so.2";
    let ran = world.run(&["--cuda", "13"], &[linker, "./linked"]);
    let ended = (ran.code, ran.out.as_str());
    assert_eq!(ended, (Some(0), "0 1 2"), "{}", ran.err);
    // Without its symbols, the runtime remains and asks for the driver's tables.
    build(&["release.c", "-s"]);
    let ran = world.run(&["--cuda", "13"], &["./linked"]);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(0), "35 0 35"),
        "{}",
        ran.err
    );
    // Functions without a size only forward, so they stay.
    let forwarding = ["cudaMalloc", "cudaMemGetInfo", "__cudaRegisterFatBinaryEnd"].map(|name| {
        format!(".globl {name}\\n.type {name}, @function\\n{name}: mov $35, %eax\\nret\\n")
    });
    world.write(
        "runtime.c",
        &format!("__asm__(\"{}\");\n", forwarding.concat()),
    );
    build(&[]);
    let ran = world.run(&["--cuda", "13"], &["./linked"]);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(0), "35 0 35"),
        "{}",
        ran.err
    );
    let tables = "#include <dlfcn.h>\nint main(void) {\n\
         void *driver = dlopen(\"libcuda.so.1\", RTLD_NOW);\n\
         int (*tables)(void *, void *) = dlsym(driver, \"cuGetExportTable\");\n\
         return tables(0, 0) + 7; }\n";
    world.write("main.c", tables);
    build(&["-s", "-ldl"]);
    named(&[], "asks for internal tables of NVIDIA's driver");
}

fn cudnn_and_nvjitlink_get_an_error_in_place_of_the_tables_of_the_driver(world: World) {
    world.write(
        "planner.c",
        "#include <dlfcn.h>\nint plan(void) { int (*tables)(void *, void *) = \
         dlsym(dlopen(\"libcuda.so.1\", RTLD_NOW), \"cuGetExportTable\");\n\
         return tables(0, 0) + 7; }\n",
    );
    world.write(
        "main.c",
        "#include <stdio.h>\nint plan(void);\nint main(void) { printf(\"%d\", plan()); }\n",
    );
    let compile = |arguments: &[&str]| {
        let mut compiler = Command::new("cc");
        let made = compiler
            .args(arguments)
            .current_dir(world.folder.path())
            .status();
        assert!(made.unwrap().success(), "a C compiler is required");
    };
    for library in ["./libcudnn_planner.so", "./libnvJitLink.so.13"] {
        compile(&["-shared", "-fPIC", "-o", library, "planner.c", "-ldl"]);
        compile(&["-o", "program", "main.c", library]);
        let ran = world.run(&["--cuda", "13"], &["./program"]);
        // Seven more than CUDA_ERROR_NOT_SUPPORTED.
        assert_eq!(
            (ran.code, ran.out.as_str()),
            (Some(0), "808"),
            "{library}: {}",
            ran.err
        );
    }
}

/// Programs of another processor or C library end before the run; a static one starts others.
fn a_program_that_cannot_load_the_simulated_gpu_is_named_before_the_run(world: World) {
    let executable = |name: &str, bytes: &[u8]| {
        fs::write(world.path(name), bytes).unwrap();
        fs::set_permissions(world.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    };
    let mut header = b"\x7fELF\x02\x01\x01".to_vec();
    header.resize(64, 0);
    header[18] = 183;
    executable("arm", &header);
    let ran = world.run(&[], &["./arm"]);
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    let why = "arm` is built for aarch64: the simulated GPU requires x86-64 Linux";
    assert!(plain(&ran.err).contains(why), "{}", ran.err);
    executable("script", b"#!./arm\n");
    assert!(plain(&world.run(&[], &["./script"]).err).contains(why));

    world.write("main.c", "int main(void) { return 0; }\n");
    let build = |name: &str, options: &[&str]| {
        let mut compiler = Command::new("cc");
        compiler.args(["-o", name, "main.c"]).args(options);
        let made = compiler.current_dir(world.folder.path()).status();
        assert!(made.unwrap().success(), "a C compiler is required");
    };
    build("musl", &["-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"]);
    let ran = world.run(&[], &["./musl"]);
    assert_eq!(ran.code, Some(2), "{}", ran.err);
    let why = "musl` starts with the dynamic linker `/lib/ld-musl-x86_64.so.1`: the simulated GPU \
         requires that of the GNU C library";
    assert!(plain(&ran.err).contains(why), "{}", ran.err);

    build("static", &["-static"]);
    let ran = world.run(&[], &["./static"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let why = "static` is linked statically: it cannot load the simulated GPU, only programs that \
         it starts can";
    assert!(plain(&ran.err).contains(why), "{}", ran.err);
}

fn a_cuda_release_or_gpu_that_the_program_lacks_is_named(world: World) {
    world.write("train.py", "import torch\ntorch.cuda.malloc(1 << 20)\n");
    let ran = world.run(&["--cuda", "12"], &["python3", "train.py"]);
    let why = "torch 2.11.0+cu130 is built for CUDA 13: it finds none of its libraries with \
         `--cuda 12`";
    assert!(plain(&ran.err).contains(why), "{}", ran.err);
    let ran = world.run(&["--gpu", "jetson-agx-xavier-16"], &["python3", "train.py"]);
    let why = "has compute capability 7.2: libraries built for CUDA 13 have code for 7.5 and later \
         only";
    assert!(plain(&ran.err).contains(why), "{}", ran.err);
    fs::remove_dir_all(world.path("site/torch")).unwrap();
    let packages = "packages/site-packages";
    let package = format!("{packages}/nvidia_cublas_cu12-12.9.1.dist-info/METADATA");
    world.write(&package, "");
    let mut command = world.command(&["--cuda", "13"], &["python3", "-c", ""]);
    command.env("PYTHONPATH", world.path(packages));
    let ran = Ran::of(command.output().unwrap());
    let why = "nothing of the program is built for CUDA 13: `nvidia_cublas_cu12 12.9.1` is built \
         for CUDA 12";
    assert!(plain(&ran.err).contains(why), "{}", ran.err);
}

/// Captures the default stream of the thread, in which the legacy stream cannot be used.
const PER_THREAD: &str = r#"
import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
runtime, driver = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libcuda.so.1")
place, graph, code, none = c_void_p(), c_void_p(), c_int(), c_void_p()
config = (c_uint64 * 7)(*[1 << 32 | 1] * 3)  # a grid of one thread
found = {}
for flags in 0, 2:
    function = c_void_p()
    name = b"cuStreamIsCapturing"
    assert driver.cuGetProcAddress_v2(name, byref(function), 13000, c_uint64(flags), none) == 0
    found[flags] = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)(function.value)
assert runtime.cudaStreamBeginCapture(none, 0) == 900
assert runtime.cudaStreamBeginCapture_ptsz(none, 0) == 0
codes = [
    runtime.cudaMallocAsync_ptsz(byref(place), c_size_t(1 << 20), none),
    runtime.cudaMemset2DAsync_ptsz(place, c_size_t(8), 0, c_size_t(8), c_size_t(8), none),
    runtime.cudaMemcpy2DAsync_ptsz(place, c_size_t(8), place, c_size_t(8), c_size_t(8),
                                   c_size_t(1), 3, none),
    driver.cuMemsetD8Async_ptsz(place, 0, c_size_t(8), none),
    runtime.cudaLaunchKernelExC_ptsz(config, none, none),
    runtime.cudaFreeAsync_ptsz(place, none),
    found[2](none, ctypes.addressof(code)),
]
print(codes, code.value, found[0](none, ctypes.addressof(code)))
print(runtime.cudaStreamEndCapture_ptsz(none, byref(graph)), graph.value is not None)
assert runtime.cudaStreamBeginCapture_ptsz(none, 0) == 0
print(runtime.cudaMallocAsync(byref(place), c_size_t(1 << 20), none))
"#;

fn functions_for_a_default_stream_per_thread_use_the_stream_of_the_thread(world: World) {
    world.write("train.py", PER_THREAD);
    let ran = world.run(&[], &["python3", "train.py"]);
    let seen = "[0, 0, 0, 0, 0, 0, 0] 1 906\n0 True\n906\n";
    assert_eq!(
        (ran.code, ran.out),
        (Some(0), seen.to_owned()),
        "{}",
        ran.err
    );
}

fn a_function_needed_only_by_an_extension_exists(world: World) {
    // It replaces the runtime, so it has the runtime's name.
    let runtime = StubLibrary {
        soname: "libcudart.so.13",
        nodes: vec![],
        symbols: vec![],
        core: "libc.so.6",
    };
    world.write(
        "env/site-packages/fast/ops.c",
        "extern int cudaOnlyForExtensions(void); int call(void) { return cudaOnlyForExtensions(); \
         }",
    );
    fs::write(world.path("runtime.so"), runtime.bytes()).unwrap();
    let folder = world.path("env/site-packages/fast");
    let mut compiler = Command::new("cc");
    compiler.args([
        "-shared",
        "-fPIC",
        "-Wl,--no-as-needed",
        "-Wl,--allow-shlib-undefined",
        "-o",
        "ops.so",
        "ops.c",
    ]);
    assert!(
        compiler
            .arg(world.path("runtime.so"))
            .current_dir(&folder)
            .status()
            .unwrap()
            .success(),
        "a C compiler is required"
    );
    world.write(
        "train.py",
        "import ctypes, fast, os, torch\ntorch.cuda.malloc(1 << \
         20)\nprint(ctypes.CDLL(os.path.join(fast.__path__[0], 'ops.so')).call())\n",
    );
    let search = format!(
        "{}:{}",
        world.path("site").display(),
        world.path("env/site-packages").display()
    );
    let ran = Ran::of(
        world
            .command(&[], &["python3", "train.py"])
            .env("PYTHONPATH", search)
            .output()
            .unwrap(),
    );
    // cudaErrorNotSupported, as for all functions of the runtime without a model.
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(0), "801\n"),
        "{}",
        ran.err
    );
    assert!(
        ran.err.contains("success): cudaOnlyForExtensions"),
        "{}",
        ran.err
    );
}

fn the_users_sitecustomize_runs_and_the_module_path_is_unchanged(world: World) {
    world.write(
        "site/sitecustomize.py",
        "import os\nos.environ['CUSTOMIZED'] = __file__\n",
    );
    let program = "import os, sys, sitecustomize\nprint(os.environ['CUSTOMIZED'] == \
         sitecustomize.__file__, any('harness-gpu' in path for path in sys.path))";
    let ran = world.run(&[], &["python3", "-c", program]);
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(0), "True False\n"),
        "{}",
        ran.err
    );
    fs::remove_file(world.path("site/sitecustomize.py")).unwrap();
    let ran = world.run(
        &[],
        &[
            "python3",
            "-c",
            "import json; print('torch' in __import__('sys').modules)",
        ],
    );
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(0), "False\n"),
        "{}",
        ran.err
    );
    assert!(
        ran.err.contains("no process used the simulated GPU"),
        "{}",
        ran.err
    );
}

fn functions_that_the_hook_replaces_are_to_the_program_as_without_it(world: World) {
    world.write("plain.py", include_str!("programs/replaced.py"));
    let alone = Ran::of(world.wrapped(&["python3", "plain.py"]).output().unwrap());
    let within = world.run(&[], &["python3", "plain.py"]);
    assert_eq!((alone.code, &*alone.err), (Some(3), ""));
    assert_eq!((within.code, &*within.out), (Some(3), &*alone.out));
    assert!(
        !within.err.contains("the hook of harness"),
        "{}",
        within.err
    );
}

fn an_output_that_is_a_named_pipe_is_refused_before_the_run(world: World) {
    let made = Command::new("mkfifo").arg(world.path("pipe")).status();
    assert!(made.unwrap().success());
    fs::create_dir(world.path("folder")).unwrap();
    let made = Command::new("mkfifo")
        .arg(world.path("folder/report.md"))
        .status();
    assert!(made.unwrap().success());
    for options in [
        &["--record", "pipe"][..],
        &["--snapshot", "pipe"],
        &["--junit", "pipe"],
        &["--unmeasured", "pipe"],
        &["--baseline", "pipe", "--update"],
        &["--baseline", "peaks.json", "--sarif", "pipe"],
        &["--baseline", "peaks.json", "--code-quality", "pipe"],
        &["--report", "pipe"],
        &["--report", "folder"],
        &["--every-fault", "--report", "pipe"],
    ] {
        let ran = world.run(options, &["touch", "started"]);
        let is_refused = plain(&ran.err).contains("this is a named pipe, not a file");
        assert!(
            ran.code == Some(2) && is_refused,
            "{options:?}: {}",
            ran.err
        );
    }
    assert!(!world.path("started").exists());
    let ran = world.run(&["--junit", "folder"], &["touch", "started"]);
    assert!(
        ran.code == Some(2) && !world.path("started").exists(),
        "{}",
        ran.err
    );
}

fn an_output_goes_to_a_device_or_an_open_file(world: World) {
    let ran = world.run(&["--junit", "/dev/stdout", "-q"], &["echo", "first"]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
    assert!(ran.out.starts_with("first\n<?xml"), "{}", ran.out);
    let ran = world.run(&["--record", "/dev/null", "-q"], &["true"]);
    assert_eq!((ran.code, ran.err.as_str()), (Some(0), ""));
}

/// Statements of Python, with the effect that each has.
const EFFECTS: [(&str, &str); 33] = [
    ("os.mkfifo('pipe')", "creates pipe"),
    ("os.mkfifo(path='pipe')", "creates pipe"),
    ("os.mknod('node')", "creates node"),
    ("os.open('empty', os.O_RDONLY | os.O_CREAT)", "writes empty"),
    ("os.link('old', 'new')", "links new"),
    ("os.symlink('old', 'new')", "links new"),
    ("os.rename('old', 'new')", "renames old"),
    ("os.truncate('old', 0)", "truncates old"),
    ("os.chmod('old', 0o600)", "changes old"),
    ("os.setxattr('old', 'user.a', b'1')", "changes old"),
    ("shutil.rmtree('folder')", "removes file"),
    ("sqlite3.connect('data').close()", "opens data"),
    (
        "socket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))",
        "opens a socket",
    ),
    (
        "socket.socket().bind(('127.0.0.1', 0))",
        "opens a socket to 127.0.0.1:0",
    ),
    // The import of urllib3, and so that of TensorFlow.
    (
        "exec('def _has_ipv6(host): socket.socket().bind((host, 0))\\n_has_ipv6(\"127.0.0.1\")', \
         {'socket': socket, '__name__': 'urllib3.util.connection'})",
        "",
    ),
    ("subprocess.run(['true'])", "starts true"),
    (
        "os.kill(os.getppid(), signal.SIGCONT)",
        "sends a signal to process ",
    ),
    ("open(b'new\\xff', 'w')", "writes new?"),
    ("os.mkdir('new', dir_fd=99)", ""),
    (
        "exec('class Last:\\n def __del__(self, open=open): open(\"new\", \"w\")'); last = Last()",
        "writes new",
    ),
    (
        "name = '_interpreters' if sys.version_info >= (3, 13) else '_xxsubinterpreters'; \
         other = __import__(name); \
         other.run_string(other.create(), 'open(\"new\", \"w\")')",
        "writes new",
    ),
    ("os.write(3, b'x')", "writes the descriptor 3"),
    ("os.pwrite(3, b'x', 0)", "writes the descriptor 3"),
    ("open(3, 'w')", "writes the descriptor 3"),
    ("os.ftruncate(3, 0)", "truncates the descriptor 3"),
    (
        "ctypes.CDLL(None).write(3, b'x', 1)",
        "uses the C function write",
    ),
    (
        "ctypes.CDLL('libc.so.6').fopen(b'new', b'w')",
        "uses the C function fopen",
    ),
    ("os.kill(os.getpid(), 0); os.kill(os.getppid(), 0)", ""),
    (
        "child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(99,)); \
      child.start(); child.kill(); child.join()",
        "",
    ),
    // A process that has ended and is not reaped.
    (
        "child = os.fork() or os._exit(0); os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT); \
         os.kill(child, signal.SIGTERM)",
        "",
    ),
    ("subprocess.run(['file', 'old'])", ""),
    (
        "file = tempfile.NamedTemporaryFile(suffix='.ptx'); name = file.name + '.o'; \
          open(name, 'w').close(); os.remove(name)",
        "",
    ),
    (
        "ctypes.CDLL(None).strlen(b'x'); open(os.open('old', os.O_RDONLY)).read()",
        "",
    ),
];

fn what_a_program_changes_outside_of_itself_is_an_effect(world: World) {
    let imports = "import ctypes, multiprocessing, os, shutil, signal, socket, sqlite3, \
                   subprocess, sys, tempfile, time\n";
    for (statement, effect) in EFFECTS {
        world.write("old", "");
        world.write("folder/file", "");
        world.write("given", "");
        for name in ["new", "pipe", "node"] {
            let _ = fs::remove_file(world.path(name));
        }
        let lines = statement.replace("; ", "\n    ");
        let program = format!("{imports}try:\n    {lines}\nexcept OSError: pass\n");
        world.write("train.py", &program);
        let mut command = world.wrapped(&["sh", "-c", "exec \"$@\" 3>>given", "sh"]);
        command.arg(env!("CARGO_BIN_EXE_harness"));
        command.args(["exec", "--record", "run.json", "--", "python3", "train.py"]);
        let ran = Ran::of(command.output().unwrap());
        assert_eq!(ran.code, Some(0), "{statement}: {}", ran.err);
        assert!(!ran.err.contains("the hook of harness"), "{}", ran.err);
        let found = world.record()["effect"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let is_right = if effect.is_empty() {
            found.is_empty()
        } else {
            found.starts_with(effect)
        };
        assert!(is_right, "{statement}: {found}");
    }
}

fn a_library_of_another_build_is_rejected_before_the_run(world: World) {
    let program = Path::new(env!("CARGO_BIN_EXE_harness"));
    let file = "deps/libharness_simulated_gpu.so";
    let own = fs::read(program.with_file_name(file)).unwrap();
    let mark = b" (interface ";
    let at = own.windows(mark.len()).position(|part| part == mark);
    let digit = at.unwrap() + mark.len();
    let mut other = own.clone();
    other[digit] = if own[digit] == b'0' { b'1' } else { b'0' };
    let version = |library: &[u8]| {
        let end = digit + 16;
        String::from_utf8_lossy(&library[digit - mark.len() + 1..=end]).into_owned()
    };
    let library = world.path("other.so");
    for (content, found) in [
        (other.as_slice(), version(&other)),
        (b"no library", "older or unknown".to_owned()),
    ] {
        fs::write(&library, content).unwrap();
        let mut command = world.command(&[], &["python3", "-c", "print('ran')"]);
        command.env("HARNESS_SIMULATED_GPU_LIBRARY", &library);
        let ran = Ran::of(command.output().unwrap());
        let text = plain(&ran.err);
        assert_eq!((ran.code, ran.out.as_str()), (Some(4), ""), "{text}");
        assert!(
            text.contains("is of another build than this program")
                && text.contains(&found)
                && text.contains(&version(&own))
                && text.contains("`ci/install`"),
            "{text}"
        );
    }
}

fn a_command_that_cannot_run_is_rejected_before_the_run(world: World) {
    let refused = |options: &[&str], command: &[&str]| {
        let ran = world.run(options, command);
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{}", ran.err);
        ran.err
            .replace('│', " ")
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert!(
        refused(&[], &["no-such-program"]).contains("cannot find the program `no-such-program`")
    );
    assert!(
        refused(&["--fail", "cudaMalloc:0"], &["true"])
            .contains("CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`")
    );
    assert!(
        refused(&["--events", "late"], &["true"]).contains("write instant, synchronize, lag:N")
    );
    assert!(
        refused(&["--gpu", "rtx4091-24"], &["true"])
            .contains("unknown GPU; did you mean `rtx4090-24`?")
    );
    for (given, found) in [
        ("h100", "(h100-80, "),
        ("H200", "(h200-141, "),
        ("RTX 4090", "(rtx4090-24, "),
        ("4090", "(rtx4090-24, "),
    ] {
        let ran = world.run(&["--gpu", given], &["python3", "-c", ""]);
        assert!(
            ran.code == Some(0) && ran.err.contains(found),
            "{}",
            ran.err
        );
    }
    assert!(refused(&["--gpu", "a100"], &["true"]).contains("did you mean `a100-40`, `a100-80`"));
    assert!(
        refused(&["--gpu", "k80"], &["true"]).contains("unknown GPU; `harness list gpus` lists")
    );
    fs::write(
        world.path("my-gpu.yaml"),
        "version: 1\nname: mine\nmemory: 24GB\n",
    )
    .unwrap();
    assert!(refused(&["--gpu", "my-gpu.yaml"], &["python3", "-c", ""]).contains("my-gpu.yaml:3:9"));
    assert!(
        refused(&["--context-overhead", "2GiB"], &["python3", "-c", ""])
            .contains("uses all of 1 GiB")
    );
    fs::remove_file(world.path("site/torch/lib/libtorch_cuda.so")).unwrap();
    assert!(
        refused(&[], &["python3", "-c", "print('ran')"])
            .contains("is built for CPUs: install a PyTorch built for CUDA")
    );
}

/// A program that has reported that it is ready.
fn ready(mut command: Command) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    (child, lines)
}

fn signals_reach_the_program(world: World) {
    for signal in ["INT", "TERM", "HUP", "USR1"] {
        let program = format!(
            "import signal, sys, time\nsignal.signal(signal.SIG{signal}, lambda *_: \
             sys.exit(5))\nprint('ready', flush=True)\ntime.sleep(60)"
        );
        let (mut child, _lines) = ready(world.command(&[], &["python3", "-c", &program]));
        assert!(
            Command::new("kill")
                .args([format!("-{signal}"), child.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
        assert_eq!(child.wait().unwrap().code(), Some(5), "{signal}");
    }
}

fn remaining_processes_end_with_the_program(world: World) {
    // Its parent has ended, and it ignores signals.
    let stubborn = "trap '' TERM; echo $$ > pid; while :; do sleep 0.1; done";
    let program = format!(
        "(setsid sh -c \"{stubborn}\" &) ; while ! test -s pid; do sleep 0.1; done; exit 3"
    )
    .replace("$$", "\\$\\$");
    let ran = world.run(&[], &["sh", "-c", &program]);
    assert_eq!(ran.code, Some(3), "{}", ran.err);
    let pid = fs::read_to_string(world.path("pid")).unwrap();
    assert!(
        !Path::new("/proc").join(pid.trim()).exists(),
        "{pid} still runs"
    );
}

fn a_killed_exec_leaves_neither_processes_nor_its_folder(world: World) {
    // The program's child ignores SIGTERM.
    let program =
        "sh -c \"trap '' TERM; sleep 1000 & wait; wait\" & echo $! > pid; echo ready; wait";
    for signal in ["KILL", "TERM"] {
        let options: &[&str] = if signal == "TERM" {
            &["--every-fault"]
        } else {
            &[]
        };
        let (mut child, _lines) = ready(world.command(options, &["sh", "-c", program]));
        assert!(
            Command::new("kill")
                .args([format!("-{signal}"), child.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
        child.wait().unwrap();
        wait_for_end(&fs::read_to_string(world.path("pid")).unwrap());
        wait_for("an empty temporary folder", || {
            (fs::read_dir(world.path("tmp")).unwrap().count() == 0).then_some(())
        });
    }
}

/// A server of tools, after its handshake.
fn tools(world: &World) -> Child {
    let mut command = world.harness();
    let mut server = command
        .args(["mcp", "--allow-exec"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let client = json!({ "protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": { "name": "test", "version": "1" } });
    send(
        &mut server,
        &json!({ "jsonrpc": "2.0", "id": "start", "method": "initialize", "params": client }),
    );
    send(
        &mut server,
        &json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }),
    );
    server
}

fn send(server: &mut Child, message: &Value) {
    writeln!(server.stdin.as_mut().unwrap(), "{message}").unwrap();
}

fn call_exec(server: &mut Child, id: usize, arguments: Value) {
    let params = json!({ "name": "exec", "arguments": arguments });
    send(
        server,
        &json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params }),
    );
}

fn a_tool_ends_with_its_call_and_its_server(world: World) {
    // The program and its child ignore SIGINT and SIGTERM.
    let program =
        "trap '' INT TERM; sleep 1000 & echo $! > child; echo $$ > new; mv new pid; wait; wait";
    for end in ["cancelled", "end of input", "TERM", "KILL"] {
        let _ = fs::remove_file(world.path("pid"));
        let mut server = tools(&world);
        call_exec(&mut server, 1, json!({ "command": ["sh", "-c", program] }));
        wait_for("the start of the program", || {
            world.path("pid").exists().then_some(())
        });
        match end {
            "cancelled" => {
                send(
                    &mut server,
                    &json!({ "jsonrpc": "2.0", "method": "notifications/cancelled",
                        "params": { "requestId": 1 } }),
                );
            }
            "end of input" => drop(server.stdin.take()),
            signal => assert!(
                Command::new("kill")
                    .args([format!("-{signal}"), server.id().to_string()])
                    .status()
                    .unwrap()
                    .success()
            ),
        }
        for file in ["pid", "child"] {
            wait_for_end(&fs::read_to_string(world.path(file)).unwrap());
        }
        drop(server.stdin.take());
        assert_eq!(
            server.wait().unwrap().success(),
            !["TERM", "KILL"].contains(&end),
            "{end}"
        );
    }
}

fn few_tools_run_at_a_time(world: World) {
    let most = std::thread::available_parallelism().unwrap().get();
    let mut server = tools(&world);
    // Each program counts itself and those that run with it.
    let program =
        "mkdir -p running; touch running/$$; ls running | wc -l; sleep 0.1; rm running/$$";
    let calls = 3 * most;
    for id in 0..calls {
        call_exec(&mut server, id, json!({ "command": ["sh", "-c", program] }));
    }
    let mut lines = BufReader::new(server.stdout.take().unwrap())
        .lines()
        .skip(1);
    for _ in 0..calls {
        let answer: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        let text = answer["result"]["content"][0]["text"].as_str().unwrap();
        let running: usize = text.lines().next().unwrap().trim().parse().unwrap();
        assert!((1..=most).contains(&running), "{running} of {most}");
    }
    drop(server.stdin.take());
    assert!(server.wait().unwrap().success());
}

fn a_cache_that_the_linker_or_other_users_would_misuse_is_refused(world: World) {
    let refused = |cache: PathBuf| {
        let mut command = world.command(&[], &["python3", "-c", "print('ran')"]);
        let ran = Ran::of(command.env("HARNESS_CACHE", cache).output().unwrap());
        assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{}", ran.err);
        ran.err
    };
    assert!(plain(&refused(world.path("$LIB"))).contains("must contain no colon, space or `$`"));
    assert!(
        plain(&refused(world.path(&"long/".repeat(600))))
            .contains("must contain no colon, space or `$`")
    );
    let shared = world.path("shared");
    fs::create_dir(&shared).unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(refused(shared).contains("other users can write to"));
    world.write("file", "");
    let mut command = world.command(&[], &["python3", "-c", "print('ran')"]);
    command.env("HARNESS_CACHE", world.path("file/cache"));
    let ran = Ran::of(command.output().unwrap());
    assert_eq!((ran.code, ran.out.as_str()), (Some(4), ""), "{}", ran.err);
}

fn figures_of_many_runs_are_printed_although_their_report_cannot_be_written(world: World) {
    world.write("train.py", "import torch; torch.cuda.malloc(4 << 20)");
    let options = ["--every-fault", "--report", "/dev/full"];
    for (more, printed) in [
        (&[][..], "The program survives none of 1 injected failure"),
        (&["--shard", "1/1", "--format", "json"], "\"hash\""),
    ] {
        let ran = world.run(&[&options[..], more].concat(), &["python3", "train.py"]);
        assert_eq!(ran.code, Some(4), "{}{}", ran.out, ran.err);
        assert!(ran.out.contains(printed), "{}{}", ran.out, ran.err);
        assert!(
            plain(&ran.err).contains("cannot write to `/dev/full`"),
            "{}",
            ran.err
        );
    }
}

fn a_process_that_cannot_write_its_files_says_so_in_a_line(world: World) {
    // Python ignores the signal of this limit, as a full disk sends none.
    let program = "import torch, resource\ntorch.cuda.malloc(4 << 20)\n\
                   resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n\
                   torch.cuda.malloc(4 << 20)\n";
    world.write("train.py", program);
    let ran = world.run(&["--snapshot", "s.pickle"], &["python3", "train.py"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    for line in [
        "is incomplete: File too large",
        "harness: cannot write the figures of this process: [Errno 27] File too large",
        "peak reserved 8 MiB",
    ] {
        assert!(ran.err.contains(line), "{line}: {}", ran.err);
    }
    assert!(!ran.err.contains("Traceback"), "{}", ran.err);
}

fn a_python_that_calls_cuda_itself_has_no_retry_of_torch(world: World) {
    let program = "import ctypes\nmalloc = ctypes.CDLL('libcudart.so.13').cudaMalloc\n\
                   malloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4 << 20))\n";
    world.write("call.py", program);
    let ran = world.run(&["--every-fault"], &["python3", "call.py"]);
    assert!(
        ran.out.contains("recovers from the injected failure") && !ran.out.contains("PyTorch"),
        "{}{}",
        ran.out,
        ran.err
    );
    let why = "anew, because it calls CUDA without PyTorch or another library that harness knows";
    assert!(plain(&ran.err).contains(why), "{}", ran.err);
    // It ignores a refused request.
    let ran = world.run(&["--least-memory", "--exact"], &["python3", "call.py"]);
    assert!(
        ran.out.starts_with("4 MiB are enough, 2 MiB are not."),
        "{}{}",
        ran.out,
        ran.err
    );
}

fn a_program_without_the_simulated_gpus_library_is_stopped_whatever_its_options(world: World) {
    // With -I, Python does not run the hook. A library with a name of NVIDIA's stands for the real
    // one.
    let driver = StubLibrary {
        soname: "libcuda.so.1",
        nodes: vec![],
        symbols: vec![],
        core: "libc.so.6",
    };
    fs::write(world.path("libcuda.so.1"), driver.bytes()).unwrap();
    let program = "import ctypes, time; ctypes.CDLL('./libcuda.so.1'); time.sleep(1000)";
    let stripped = format!("exec env -u LD_AUDIT -u LD_PRELOAD python3 -I -c \"{program}\"");
    let ran = world.run(&[], &["sh", "-c", &stripped]);
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{}", ran.err);
    assert!(
        plain(&ran.err).contains("did not load the simulated GPU's library"),
        "{}",
        ran.err
    );
    // A scenario stops it too, before its time limit.
    world.write("scenarios/stripped.py", program);
    fs::write(world.path("scenarios/libcuda.so.1"), driver.bytes()).unwrap();
    let command = "[sh, -c, exec env -u LD_AUDIT -u LD_PRELOAD python3 -I stripped.py]";
    let ran = world.run_scenario(&format!(
        "  - exec: {{ command: {command} }}\n    timeout: 10min\n"
    ));
    let text = plain(&format!("{}{}", ran.out, ran.err));
    assert!(
        ran.code == Some(1) && text.contains("did not load the simulated GPU's library"),
        "{text}"
    );
    // `env` removes the variable by which the dynamic linker loads the library.
    let ran = world.run(
        &[],
        &[
            "env",
            "-u",
            "LD_AUDIT",
            "-u",
            "LD_PRELOAD",
            "python3",
            "-c",
            "print('ran')",
        ],
    );
    assert_eq!((ran.code, ran.out.as_str()), (Some(2), ""), "{}", ran.err);
    assert!(
        plain(&ran.err).contains("did not load the simulated GPU's library")
            && plain(&ran.err).contains("keep the run's variables, of which LD_AUDIT"),
        "{}",
        ran.err
    );
}

fn a_program_that_writes_too_much_ends_with_a_named_signal(world: World) {
    let cause = "SIGXFSZ: a file would have become larger than `ulimit -f` allows";
    for (program, printed, reported) in [
        (
            "ulimit -f 1; exec head -c 100000 /dev/zero > large",
            format!("signal 25 ended the program: {cause}"),
            "Signal 25 (SIGXFSZ: ",
        ),
        (
            "(ulimit -f 1; head -c 100000 /dev/zero > large); exit $?",
            format!("exit code 153 means that a signal ended a process: {cause}"),
            "exit code 153",
        ),
    ] {
        let ran = world.run(&["--report", "report.md"], &["sh", "-c", program]);
        assert_eq!(ran.code, Some(153), "{}", ran.err);
        assert!(plain(&ran.err).contains(&printed), "{}", ran.err);
        assert!(
            fs::read_to_string(world.path("report.md"))
                .unwrap()
                .contains(reported)
        );
    }
}

fn a_small_stack_is_an_error_with_the_command_that_enlarges_it(_: World) {
    let script = format!("ulimit -s 128; {} list", env!("CARGO_BIN_EXE_harness"));
    let output = std::process::Command::new("sh")
        .args(["-c", &script])
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{error}");
    assert_eq!(
        error,
        "error: the stack has 128 KiB, and harness needs 512 KiB: enter `ulimit -s 512` or more \
         first\n"
    );
}

fn a_file_size_limit_of_harness_is_an_error_with_a_reason(world: World) {
    let script = "ulimit -f 1; exec \"$0\" exec --memory 1GiB -- true";
    let ran = Ran::of(
        world
            .wrapped(&["sh", "-c", script, env!("CARGO_BIN_EXE_harness")])
            .output()
            .unwrap(),
    );
    assert_eq!(ran.code, Some(4), "{}", ran.err);
    assert!(plain(&ran.err).contains("File too large"), "{}", ran.err);
}

fn a_real_torch_runs_on_the_simulated_gpu(world: World) {
    let python = python_with_torch().unwrap();
    let program = "import torch\nprint(torch.cuda.is_available(), \
         torch.cuda.get_device_capability())\n\
                   kept = [torch.empty(64 << 20, dtype=torch.uint8, device='cuda') for _ in \
                   range(100)]";
    let options = [
        "--gpu",
        "a100-40",
        "--record",
        "run.json",
        "--snapshot",
        "oom.pickle",
    ];
    let ran = Ran::of(
        world
            .command(&options, &[&python, "-c", program])
            .env_remove("PYTHONPATH")
            .output()
            .unwrap(),
    );
    assert_eq!(
        (ran.code, ran.out.as_str()),
        (Some(1), "True (8, 0)\n"),
        "{}",
        ran.err
    );
    let torch = &world.record()["processes"][0]["torch"];
    let figures = ["num_ooms", "allocated_bytes.all.peak"]
        .map(|name| torch["memory_stats"]["0"][name].as_u64());
    assert_eq!(
        (figures, &torch["ended_out_of_memory"]),
        ([Some(1), Some(1 << 30)], &true.into()),
        "{torch}"
    );
    assert!(
        ran.err.contains("oom.pickle: out of memory, after event"),
        "{}",
        ran.err
    );
}

fn the_report_of_the_largest_value_has_a_picture_and_a_short_table(world: World) {
    let python = python_with_torch().unwrap();
    world.write(
        "layer.py",
        "import sys, torch\nmodel = torch.nn.Linear(4096, 4096, device='cuda')\n\
         rows = torch.rand(int(sys.argv[1]) << 10, 4096, device='cuda')\n\
         model(rows).relu().sum().backward()\n",
    );
    let options = ["--largest", "batch=1..64", "--report", "report.md"];
    let ran = Ran::of(
        world
            .command(
                &[&options[..], &["--format", "json"]].concat(),
                &[&python, "layer.py", "{batch}"],
            )
            .env_remove("PYTHONPATH")
            .output()
            .unwrap(),
    );
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    let points = report["curves"][0]["points"].as_array().unwrap();
    let last = points.last().unwrap();
    let row = &report["rows"][0];
    assert_eq!(last["value"], row["largest"], "{report:#}");
    assert_eq!(last["peak_reserved"], row["peak_reserved"], "{report:#}");
    let parameters = |point: &Value| {
        let categories = point["categories"].as_array().unwrap();
        let of = categories.iter().find(|of| of["category"] == "parameters");
        of.unwrap()["bytes"].as_u64()
    };
    // The weights and their bias do not depend on the batch.
    let weights = Some((4096 * 4096 + 4096) * 4);
    assert!(
        points.iter().all(|point| parameters(point) == weights),
        "{report:#}"
    );
    let page = fs::read_to_string(world.path("report.md")).unwrap();
    let short = format!("| h100-80 | 1 GiB | {} |", row["largest"]);
    assert!(
        page.contains("| GPU | memory | fits up to batch |") && page.contains(&short),
        "{page}"
    );
    assert!(page.contains("](report.svg)"), "{page}");
    let picture = fs::read_to_string(world.path("report.svg")).unwrap();
    assert!(picture.contains("parameters and buffers"), "{picture}");
}

/// Keeps its allocations. Only a failure of the first allocation is fatal.
const FOUR: &str = "import torch\ntorch.cuda.malloc(4 << 20)\nfor size in [2, 6, 8]:\n    \
     try:\n        torch.cuda.malloc(size << 20)\n    except torch.OutOfMemoryError:\n        \
     pass\nprint('done')\n";

/// The programs of `fake_library`, and what the output says about them.
const OF_LIBRARY: [(&str, i32, &[&str]); 7] = [
    (
        "recovers",
        0,
        &["recovers from all 2 injected failures", "recovers.py:8"],
    ),
    (
        "leaks",
        1,
        &["2 times it continues, but up to 8 MiB more stay allocated at its end"],
    ),
    (
        "repeats",
        0,
        &[
            "the next request is at least as large as the failed one, so it fails again if the \
             GPU stays full: 1, 2.",
        ],
    ),
    (
        "grows",
        0,
        &["at least as large as the failed one, so it fails again if the GPU stays full: 1, 2."],
    ),
    (
        "swallows",
        0,
        &[
            "continues with less work after failures of these attempts, so results may be \
             missing: 1, 2",
        ],
    ),
    (
        "ends",
        1,
        &["2 times it ends with the out of memory error of CuPy at ends.py:4."],
    ),
    ("generator", 0, &["recovers from all 2 injected failures"]),
];

fn fake_library() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_library")
}

/// Installs the library, and returns the folder for `PYTHONPATH`.
fn install_fake_library(world: &World) -> PathBuf {
    let packages = world.path("packages/site-packages");
    let (given, package) = (fake_library(), packages.join("cupy"));
    fs::create_dir_all(&package).unwrap();
    fs::copy(given.join("cupy/__init__.py"), package.join("__init__.py")).unwrap();
    let runtime = StubLibrary {
        soname: "libcudart.so.13",
        nodes: vec![],
        symbols: vec![],
        core: "libcudart.so.13",
    };
    fs::write(package.join("libcudart.so.13"), runtime.bytes()).unwrap();
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,--no-as-needed", "-o"])
        .arg(package.join("_core.so"))
        .arg(given.join("core.c"))
        .arg(package.join("libcudart.so.13"))
        .args(["-Wl,--allow-shlib-undefined"])
        .status();
    assert!(made.unwrap().success(), "a C compiler is required");
    fs::remove_file(package.join("libcudart.so.13")).unwrap();
    packages
}

fn a_baseline_names_another_version_of_a_library(world: World) {
    let python = python_with_events().unwrap();
    let packages = install_fake_library(&world);
    fs::copy(
        fake_library().join("recovers.py"),
        world.path("recovers.py"),
    )
    .unwrap();
    let run = |options: &[&str]| {
        let options = [&["--baseline", "peaks.json"], options].concat();
        let mut command = world.command(&options, &[python, "recovers.py"]);
        Ran::of(command.env("PYTHONPATH", &packages).output().unwrap())
    };
    let written = run(&["--update"]);
    let file = fs::read_to_string(world.path("peaks.json")).unwrap();
    assert!(
        written.code == Some(0) && file.contains(r#""CuPy": "14.2.0""#),
        "{} {file}",
        written.err
    );
    assert_eq!(run(&[]).code, Some(0));
    let package = packages.join("cupy/__init__.py");
    let other = fs::read_to_string(&package)
        .unwrap()
        .replace("14.2.0", "15.0.0");
    fs::write(package, other).unwrap();
    let ran = run(&[]);
    let text = ran.err.replace("\n  │ ", " ");
    assert!(
        ran.code == Some(2)
            && text.contains("the baseline has CuPy=14.2.0; this run has CuPy=15.0.0"),
        "{}",
        ran.err
    );
    // An earlier harness recorded no version.
    let earlier: Value = serde_json::from_str(&file).unwrap();
    let mut earlier = earlier.as_object().unwrap().clone();
    earlier.remove("libraries");
    world.write("peaks.json", &Value::from(earlier).to_string());
    let ran = run(&[]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
}

/// The library tries again with less memory, and catches its own error once.
fn recovery_is_judged_by_the_error_of_another_library(world: World) {
    let python = python_with_events().unwrap();
    let (given, packages) = (fake_library(), install_fake_library(&world));
    let run = |options: &[&str], program: &str| {
        let mut command = world.command(options, &[python, program]);
        command.env("PYTHONPATH", &packages);
        Ran::of(command.output().unwrap())
    };
    for (name, code, expected) in OF_LIBRARY {
        let program = format!("{name}.py");
        fs::copy(given.join(&program), world.path(&program)).unwrap();
        let ran = run(&["--every-fault", "--expect", "recovers"], &program);
        let told = plain(&ran.out);
        assert_eq!(ran.code, Some(code), "{name}: {told} {}", ran.err);
        for part in expected {
            assert!(told.contains(part), "{name}: {told}");
        }
        let extent =
            "Each run fails attempts until the program gets the out of memory error of CuPy.";
        let alone = "With a single failed attempt, CuPy continued without an error in 2 of 2 runs.";
        assert!(
            told.contains(extent) && told.contains(alone),
            "{name}: {told}"
        );
        assert!(!ran.err.contains("started the program anew"), "{}", ran.err);
    }
    // Both errors of the second step are counted once.
    let ran = run(&["--memory", "8MiB"], "repeats.py");
    assert_eq!(ran.out, "retry 0\nretry 1\nretry 2\n", "{}", ran.err);
    assert!(ran.err.contains("3 out of memory errors"), "{}", ran.err);
    let ran = run(&["--alloc-conf", "expandable_segments:True"], "repeats.py");
    let why = "`--alloc-conf` has settings of torch's allocator, and the program has no torch";
    assert!(ran.code == Some(2) && ran.err.contains(why), "{}", ran.err);
    let ran = run(&["--least-memory", "--exact"], "repeats.py");
    assert!(
        ran.out.contains("12 MiB are enough, 10 MiB are not"),
        "{} {}",
        ran.out,
        ran.err
    );
}

fn every_allocation_fails_once_and_the_expectation_decides_the_exit_code(world: World) {
    world.write("train.py", FOUR);
    let options = [
        "--every-fault",
        "--expect",
        "recovers",
        "--logs",
        "logs",
        "--report",
        "faults.md",
        "--jobs",
        "2",
    ];
    let ran = world.run(&options, &["python3", "train.py"]);
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    assert!(
        ran.out.starts_with(
            "done\nThe program recovers from 3 of 4 injected failures; once it \
             ends with OutOfMemoryError at train.py:2."
        ),
        "{}",
        ran.out
    );
    assert!(
        fs::read_to_string(world.path("faults.md"))
            .unwrap()
            .contains("| attempt |")
    );
    assert!(
        fs::read_to_string(world.path("logs/fault-1.stderr"))
            .unwrap()
            .contains("OutOfMemoryError")
    );
    assert_eq!(
        world
            .run(
                &["--every-fault", "--expect", "ends-cleanly"],
                &["python3", "train.py"]
            )
            .code,
        Some(0)
    );
    let json = world.run(
        &["--every-fault=largest:1", "--format", "json"],
        &["python3", "train.py"],
    );
    let document: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(
        (
            &document["cases"][0]["attempt"],
            &document["cases"][0]["size"]
        ),
        (&4.into(), &(8 << 20).into()),
        "{document:#}"
    );
    assert!(json.err.contains("done"), "{}", json.err);
}

/// Keeps 20 MiB more in the runs whose numbers are the argument.
const KEEPS: &str = "import os, sys, torch\nopen('runs', 'a').write('x')\n\
     keeps = str(os.path.getsize('runs')) in sys.argv[1:]\n\
     torch.cuda.memory_stats = lambda device: {} if device else {'num_ooms': torch.cuda._ooms, \
     'allocated_bytes.all.current': (64 + 20 * keeps) << 20}\n\
     for size in [4, 6]:\n    try:\n        torch.cuda.malloc(size << 20)\n    except \
     torch.OutOfMemoryError:\n        pass\n";

fn memory_that_a_random_program_keeps_by_chance_does_not_count(world: World) {
    world.write("train.py", KEEPS);
    // Two runs without failures, two with a failure, three without failures, three with the same.
    for (keeps, code, expected) in [
        ("3 8 9 10", 1, "it continues, but up to 20 MiB more stay"),
        (
            "3 8 9",
            0,
            "after the same failure of attempt 1, it leaves 64 MiB",
        ),
        (
            "3 6",
            0,
            "in another run without failures, it leaves 84 MiB",
        ),
    ] {
        let _ = fs::remove_file(world.path("runs"));
        let command: Vec<&str> = ["python3", "train.py"]
            .into_iter()
            .chain(keeps.split(' '))
            .collect();
        let options = "--every-fault=sample:1 --expect recovers --jobs 1".split(' ');
        let ran = world.run(&options.collect::<Vec<_>>(), &command);
        assert!(
            ran.code == Some(code) && ran.out.contains(expected),
            "{keeps}: {} {}",
            ran.out,
            ran.err
        );
    }
}

/// How a program can react to an OutOfMemoryError, the outcome, and whether that is a clean end.
const REACTIONS: [(&str, &str, bool); 19] = [
    ("raise error", "out_of_memory", true),
    (
        "sys.excepthook = lambda *_: print('rich', file=sys.stderr); raise error",
        "out_of_memory",
        true,
    ),
    (
        "traceback.print_exc(); print('Set HYDRA_FULL_ERROR=1', file=sys.stderr); sys.exit(1)",
        "exit_code",
        true,
    ),
    ("sys.exit('no memory')", "exit_code", true),
    (
        "raise RuntimeError('the step failed') from error",
        "out_of_memory",
        true,
    ),
    (
        "raise ExceptionGroup('tasks', [error, ExceptionGroup('more', [error])])",
        "out_of_memory",
        true,
    ),
    ("asyncio.run(fails(error))", "out_of_memory", true),
    ("raise SystemExit(3)", "exit_code", true),
    ("os._exit(1)", "exit_code", true),
    (
        "threading.Thread(target=fail, args=[error]).start(); exits.append(1)",
        "exit_code",
        true,
    ),
    ("sys.exit(0)", "ended_in_handler", true),
    ("{}['loss']", "KeyError: 'loss'", false),
    (
        "raise ExceptionGroup('tasks', [error, KeyError('loss')])",
        "ExceptionGroup: tasks (2 sub-exceptions)",
        false,
    ),
    ("fail_again()", "KeyError: 'loss'", false),
    ("show(error); sys.exit(1)", "exit_code", true),
    ("show(error); fail_again()", "KeyError: 'loss'", false),
    (
        "threading.Thread(target=fail, args=[KeyError('loss')]).start(); exits.append(1)",
        "KeyError: 'loss'",
        false,
    ),
    ("raise KeyboardInterrupt", "signal", false),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "signal", false),
];

/// What follows the traceback in the output, as with Triton, is no matter.
fn an_end_is_clean_if_an_out_of_memory_error_and_nothing_else_ended_the_program(world: World) {
    let mut program = "import asyncio, atexit, code, ctypes, faulthandler, logging, os, signal, \
         sys, threading, traceback, torch\n\
         libc, exits = ctypes.CDLL(None), []\n\
         leaks = ctypes.CFUNCTYPE(None)(lambda: libc.write(2, b'nanobind: leaked 4 instances!\\n', \
         30))\n\
         for print_last in (leaks, lambda: print('bye', file=sys.stderr), \
         faulthandler.dump_traceback, lambda: logging.error('bye')):\n    \
         atexit.register(print_last)\n\
         def fail(error):\n    raise error\n\
         async def fails(error):\n    raise error\n\
         def show(error):\n    shell = code.InteractiveInterpreter({'error': error})\n    \
         shell.runsource('raise error')\n\
         def fail_again():\n    try:\n        {}['loss']\n    except KeyError:\n        \
         traceback.print_exc()\n        sys.exit(1)\n\
         def end():\n    while threading.active_count() > 1: pass\n    sys.exit(1)\n"
        .to_owned();
    for (reaction, ..) in REACTIONS {
        program += &format!(
            "try: torch.cuda.malloc(2 << 20)\nexcept torch.OutOfMemoryError as error: \
             {reaction}\nif exits: end()\n"
        );
    }
    world.write("train.py", &program);
    for options in [
        &["--every-fault", "--expect", "ends-cleanly"][..],
        &["--every-fault", "--fresh"],
    ] {
        let (document, .., message) = many(&world, options, &["python3", "train.py"]);
        let ends = document["cases"].as_array().unwrap().iter().map(|case| {
            let outcome = if case["outcome"] == "other_error" {
                &case["error"]
            } else {
                &case["outcome"]
            };
            (
                outcome.as_str().unwrap(),
                case["is_clean_end"] == true || case["outcome"] == "recovered",
            )
        });
        assert_eq!(
            ends.collect::<Vec<_>>(),
            REACTIONS.map(|(_, outcome, is_clean)| (outcome, is_clean)),
            "{options:?}: {message}"
        );
    }
}

/// A worker runs out of memory, and another process reports its end.
fn the_end_of_a_worker_decides_whether_the_end_is_clean(world: World) {
    let worker = |reaction: &str| {
        format!(
            "import os, sys, torch\ndef work():\n    try: torch.cuda.malloc(2 << 20)\n    except \
             torch.OutOfMemoryError as error: {reaction}\n"
        )
    };
    let started = |method: &str| {
        format!(
            "import multiprocessing, work\nif __name__ == '__main__':\n    process = \
             multiprocessing.get_context('{method}').Process(target=work.work)\n    \
             process.start()\n    process.join()\n    if process.exitcode: raise RuntimeError('a \
             worker failed')\n"
        )
    };
    let launched =
        "import subprocess, sys, torch\nsubprocess.run([sys.executable, '-c', 'import work; \
         work.work()'], check=True)\n"
            .to_owned();
    let failed = "{}['loss']";
    for (launcher, reaction, outcome, code) in [
        (&launched, "raise", "out_of_memory", 0),
        (&launched, failed, "KeyError: 'loss'", 1),
        (&started("fork"), "raise", "out_of_memory", 0),
        (&started("fork"), failed, "KeyError: 'loss'", 1),
        (&started("spawn"), "sys.exit(1)", "exit_code", 0),
        (&started("spawn"), failed, "KeyError: 'loss'", 1),
        (&launched, "os.abort()", "exit_code", 1),
    ] {
        world.write("work.py", &worker(reaction));
        world.write("train.py", launcher);
        let ran = world.run(
            &[
                "--every-fault",
                "--expect",
                "ends-cleanly",
                "--format",
                "json",
            ],
            &["python3", "train.py"],
        );
        let document: Value = serde_json::from_str(&ran.out).unwrap();
        let case = &document["cases"][0];
        let found = if case["outcome"] == "other_error" {
            &case["error"]
        } else {
            &case["outcome"]
        };
        assert_eq!(
            (found.as_str(), ran.code),
            (Some(outcome), Some(code)),
            "{launcher} {reaction}: {document:#} {}",
            ran.err
        );
    }
}

/// Each prints more after the traceback, or in its place.
fn the_end_is_that_of_the_exception_which_hydra_typer_or_pytest_prints(world: World) {
    let python = python_with_torch().unwrap();
    let work = |error: &str| {
        format!(
            "import torch\ndef work():\n    try: torch.cuda.malloc(2 << 20)\n    except \
             torch.OutOfMemoryError: {error}\n"
        )
    };
    world.write("config/main.yaml", "rows: 2\n");
    world.write(
        "hydra_app.py",
        "import hydra, work\n@hydra.main(version_base=None, \
         config_path='config', config_name='main')\ndef main(config): work.work()\nmain()\n",
    );
    world.write(
        "typer_app.py",
        "import typer, work\napp = typer.Typer()\n@app.command()\ndef main(): work.work()\napp()\n",
    );
    world.write(
        "rich_app.py",
        "import rich.traceback, work\nrich.traceback.install()\nwork.work()\n",
    );
    world.write(
        "test_app.py",
        "import work\ndef test_first(): work.work()\ndef test_second(): pass\n",
    );
    world.write(
        "case_app.py",
        "import unittest, work\nclass Test(unittest.TestCase):\n    def \
         test(self): work.work()\nunittest.main()\n",
    );
    for (error, outcome) in [
        ("raise", "out_of_memory"),
        ("{}['loss']", "KeyError: 'loss'"),
    ] {
        world.write("work.py", &work(error));
        for app in [
            &["hydra_app.py"][..],
            &["typer_app.py"],
            &["rich_app.py"],
            &["-m", "pytest", "-q", "test_app.py"],
            &["case_app.py"],
        ] {
            let ran = world.run(
                &[
                    "--every-fault",
                    "--expect",
                    "ends-cleanly",
                    "--format",
                    "json",
                ],
                &[&[python.as_str()], app].concat(),
            );
            let document: Value = serde_json::from_str(&ran.out).unwrap_or_default();
            let case = &document["cases"][0];
            let found = if case["outcome"] == "other_error" {
                &case["error"]
            } else {
                &case["outcome"]
            };
            let code = i32::from(outcome != "out_of_memory");
            assert_eq!(
                (found.as_str(), ran.code),
                (Some(outcome), Some(code)),
                "{app:?} {error}: {document:#} {}",
                ran.err
            );
        }
    }
}

/// Prints where and when it runs, reads a file, and ends with another code after an out-of-memory
/// error.
const COPIED: &str = "import os, sys, torch\nprint('start', os.getpid())\ndata = \
     open('data')\ndata.read(2)\ntorch.cuda.malloc(4 << 20)\n\
                      assert os.environ['HARNESS_GPU_RUN'] in \
                      os.environ['PYTHONPATH']\nprint(os.getcwd(), sys.argv, data.read(2), \
                      sys.stdin.read())\n\
                      try:\n    torch.cuda.malloc(8 << 20)\nexcept torch.OutOfMemoryError as \
                      error:\n    print(error, file=sys.stderr)\n    sys.exit(3)\n";

/// The document of a command, the output of its runs except the first, and its messages.
fn many(world: &World, options: &[&str], command: &[&str]) -> (Value, Vec<String>, String) {
    let _ = fs::remove_dir_all(world.path("logs"));
    let ran = world.run(
        &[options, &["--format", "json", "--logs", "logs"]].concat(),
        command,
    );
    assert!(matches!(ran.code, Some(0 | 1)), "{}", ran.err);
    let mut logs: Vec<PathBuf> = fs::read_dir(world.path("logs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    logs.sort();
    (
        serde_json::from_str(&ran.out).unwrap(),
        logs.iter()
            .map(|log| fs::read_to_string(log).unwrap())
            .collect(),
        ran.err,
    )
}

fn runs_begin_as_copies_that_behave_like_new_starts(world: World) {
    world.write("data", "abcdef");
    world.write("train.py", COPIED);
    let command = ["python3", "train.py", "--rows", "2"];
    for options in [
        &["--every-fault"][..],
        &["--least-memory", "--exact"],
        &["--alloc-conf", "", "--alloc-conf", "max_split_size_mb:32"],
    ] {
        let (mut copied, copies, message) = many(&world, options, &command);
        let (mut fresh, starts, _) = many(&world, &[options, &["--fresh"]].concat(), &command);
        let without_runs = |document: &mut Value| {
            let orders = document["orders"].as_array_mut().into_iter().flatten();
            orders.for_each(|order| order["runs"] = 0.into());
            document["unpredicted"] = Value::Null;
        };
        [&mut copied, &mut fresh].into_iter().for_each(without_runs);
        assert_eq!(copied, fresh, "{options:?}");
        let pids = |logs: &[String]| {
            logs.iter()
                .filter_map(|log| Some(log.strip_prefix("start ")?.lines().next()?.to_owned()))
                .collect()
        };
        let [one, all]: [std::collections::BTreeSet<String>; 2] = [pids(&copies), pids(&starts)];
        assert!(
            one.len() == 1
                && all.len()
                    == starts
                        .iter()
                        .filter(|log| log.starts_with("start "))
                        .count(),
            "{one:?} {all:?} {message}"
        );
        let rest = |logs: &[String]| {
            logs.iter()
                .map(|log| {
                    log.lines()
                        .filter(|line| !line.starts_with("start "))
                        .collect()
                })
                .collect()
        };
        let [copies, starts]: [Vec<String>; 2] = [rest(&copies), rest(&starts)];
        assert!(
            copies == starts
                && copies
                    .iter()
                    .any(|log| log.contains("['train.py', '--rows', '2'] cd")),
            "{copies:?} {starts:?}"
        );
    }
}

fn what_copies_would_share_is_named_and_each_run_starts_anew(world: World) {
    let train = |before: &str| {
        format!(
            "import os, signal, sys, torch\n{before}\n{}",
            COPIED.replace("data.read(2)", "'cd'")
        )
    };
    world.write("data", "");
    for (before, reason) in [
        (
            "import threading; threading.Thread(target=lambda: signal.sigwait([signal.SIGUSR1]), \
             daemon=True).start()",
            "it has 2 threads when",
        ),
        (
            "open('result', 'w').write('x')",
            "it writes result before it uses the GPU",
        ),
        (
            "import tempfile; tempfile.TemporaryDirectory()",
            "it creates a temporary folder before",
        ),
        (
            "if os.fork() == 0: os._exit(0)\nos.wait()",
            "it forks before",
        ),
        (
            "import subprocess; subprocess.run(['true'])",
            "it starts other programs before",
        ),
        (
            "signal.setitimer(signal.ITIMER_REAL, 100)",
            "it has set a timer",
        ),
        (
            "import mmap; shared = mmap.mmap(-1, 4096)",
            "it shares memory with other processes",
        ),
        ("out, into = os.pipe()", "it has opened pipe:"),
        ("os.dup2(2, 1)", "it redirects its output"),
        // pytest does this to capture output.
        (
            "kept = os.dup(1)",
            "it has another descriptor of its output",
        ),
        (
            "size = torch.ctypes.c_size_t(); \
             torch.cuda._runtime.cudaMemGetInfo(torch.ctypes.byref(size), \
             torch.ctypes.byref(size))",
            "it uses the GPU before torch initializes CUDA",
        ),
    ] {
        world.write(
            "train.py",
            &train(&before.replace("torch.ctypes", "torch.cuda.ctypes")),
        );
        let (copied, logs, message) = many(&world, &["--every-fault"], &["python3", "train.py"]);
        let expected = format!("Each run started the program anew, because {reason}");
        // Two files for each of the second run without failures, two failures in a row, and two
        // failures alone.
        assert!(
            message.contains(&expected) && logs.len() == 10,
            "{before}: {message} {logs:?}"
        );
        let (fresh, ..) = many(
            &world,
            &["--every-fault", "--fresh"],
            &["python3", "train.py"],
        );
        assert_eq!(copied, fresh, "{before}");
    }
    world.write("train.py", &train(""));
    let (.., message) = many(
        &world,
        &["--every-fault"],
        &["sh", "-c", "python3 train.py; exit $?"],
    );
    assert!(
        message.contains("anew, because it starts a process that uses the GPU"),
        "{message}"
    );
}

fn shards_run_the_cases_of_the_whole_and_are_merged(world: World) {
    world.write("train.py", FOUR);
    for options in [
        &["--every-fault"][..],
        &[
            "--alloc-conf",
            "a",
            "--alloc-conf",
            "b",
            "--alloc-conf",
            "c",
        ],
    ] {
        let (whole, ..) = many(&world, options, &["python3", "train.py"]);
        for index in 1..=3 {
            let (part, ..) = many(
                &world,
                &[options, &["--shard", &format!("{index}/3")]].concat(),
                &["python3", "train.py"],
            );
            world.write(&format!("{index}.json"), &part.to_string());
        }
        let merge = |shards: &[&str]| {
            Ran::of(
                world
                    .harness()
                    .args(["report", "merge", "-o", "merged.json"])
                    .args(shards)
                    .output()
                    .unwrap(),
            )
        };
        let merged = merge(&["3.json", "1.json", "2.json"]);
        assert_eq!(merged.code, Some(0), "{}", merged.err);
        assert_eq!(
            serde_json::from_slice::<Value>(&fs::read(world.path("merged.json")).unwrap()).unwrap(),
            whole
        );
        for (shards, error) in [
            (&["1.json", "3.json"][..], "missing: shard 2/3"),
            (&["1.json", "1.json"], "shard 1/3 appears twice"),
            (
                &["1.json", "train.py"],
                "train.py: this is not a result of `harness exec`",
            ),
        ] {
            let refused = merge(shards);
            assert!(
                refused.code == Some(2) && refused.err.contains(error),
                "{shards:?}: {}",
                refused.err
            );
        }
    }
}

fn shards_of_a_changed_program_or_with_other_variables_are_not_merged(world: World) {
    world.write("train.py", FOUR);
    let shard = |index: u32, conf: &str| {
        let shard = format!("{index}/2");
        let options = ["--every-fault", "--shard", &shard, "--format", "json"];
        let mut command = world.command(&options, &["python3", "train.py"]);
        if !conf.is_empty() {
            command.env("PYTORCH_ALLOC_CONF", conf);
        }
        world.write(
            &format!("{index}.json"),
            &Ran::of(command.output().unwrap()).out,
        );
    };
    let refused = || {
        let merge = ["report", "merge", "1.json", "2.json", "-o", "merged.json"];
        let ran = Ran::of(world.harness().args(merge).output().unwrap());
        assert_eq!(ran.code, Some(2), "{}", ran.err);
        plain(&ran.err)
    };
    shard(1, "");
    shard(2, "expandable_segments:True");
    let differ = "shards 1/2 and 2/2 differ in the settings of PyTorch's allocator: `unset` and \
         `expandable_segments:True`";
    assert!(refused().contains(differ), "{}", refused());
    world.write("train.py", &format!("{FOUR}# changed\n"));
    shard(2, "");
    let differ = "shards 1/2 and 2/2 differ in the file train.py: `hash ";
    assert!(refused().contains(differ), "{}", refused());
}

fn shards_with_another_module_or_input_file_are_not_merged(world: World) {
    let program = "import json, sys, torch, pieces.sizes\njson.load(open(sys.argv[1]))\n\
                   open(sys.argv[2], 'a').write('.')\ntorch.cuda.malloc(4 << 20)\n";
    world.write("train.py", program);
    world.write("pieces/__init__.py", "");
    let shard = |index: u32, code: &str, conf: &str| {
        world.write("pieces/sizes.py", code);
        world.write("conf.json", conf);
        let shard = format!("{index}/2");
        let options = ["--every-fault", "--shard", &shard, "--format", "json"];
        let run = ["python3", "train.py", "conf.json", "log.json"];
        let ran = Ran::of(world.command(&options, &run).output().unwrap());
        world.write(&format!("{index}.json"), &ran.out);
        serde_json::from_str::<Value>(&ran.out).unwrap()["run"].clone()
    };
    let [input, module] = ["the file conf.json", "the module pieces.sizes"];
    let run = shard(1, "", "1");
    assert!(run[module].is_string() && run[input].is_string(), "{run}");
    assert!(run["the file log.json"].is_null(), "{run}");
    for (code, conf, differs) in [
        ("", "1", None),
        ("# other\n", "1", Some(module)),
        ("", "17", Some(input)),
    ] {
        shard(2, code, conf);
        let merge = ["report", "merge", "1.json", "2.json", "-o", "merged.json"];
        let ran = Ran::of(world.harness().args(merge).output().unwrap());
        let code = if differs.is_some() { 2 } else { 0 };
        assert_eq!(ran.code, Some(code), "{}", ran.err);
        let text = differs.map(|name| format!("1/2 and 2/2 differ in {name}: `hash "));
        assert!(
            plain(&ran.err).contains(&text.unwrap_or_default()),
            "{}",
            ran.err
        );
    }
}

fn a_program_that_is_started_without_the_variables_of_the_run_is_named(world: World) {
    let program = "import os, subprocess, sys\n\
                   def start(env):\n    subprocess.run([sys.executable, '-c', 'pass'], env=env)\n\
                   start(None)\nstart({**os.environ, 'A': 'b'})\nstart({})\n\
                   open('log', 'w')\n\
                   os.spawnve(os.P_WAIT, '/bin/sh', ['sh', '-c', 'exit'], {})\n\
                   subprocess.run(['uname'], env={}, stdout=subprocess.DEVNULL)\n";
    world.write("start.py", program);
    let ran = world.run(&RECORD, &["python3", "start.py"]);
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let started = world.record()["without_variables"].clone();
    let places: Vec<String> = started
        .as_array()
        .unwrap()
        .iter()
        .map(|at| format!("{}:{}", at["name"].as_str().unwrap(), at["line"]))
        .collect();
    assert_eq!(places, ["start:3", "<module>:8"], "{started}");
    let line = "started without the variables of the run, so without the simulated GPU: `python3";
    assert!(
        ran.err.contains(line)
            && ran
                .err
                .contains("` at start.py:3, `sh` at start.py:8; pass"),
        "{}",
        ran.err
    );
}

fn last_failed_runs_only_the_cases_that_the_program_did_not_survive(world: World) {
    world.write("train.py", FOUR);
    let attempts = |options: &[&str]| -> Vec<u64> {
        let options = [&["--every-fault"], options].concat();
        let (report, ..) = many(&world, &options, &["python3", "train.py"]);
        let cases = report["cases"].as_array().unwrap();
        cases
            .iter()
            .map(|case| case["attempt"].as_u64().unwrap())
            .collect()
    };
    // Without a list, all run. The first attempt is outside of `try`.
    assert_eq!(attempts(&["--last-failed"]), [1, 2, 3, 4]);
    assert_eq!(attempts(&["--last-failed"]), [1]);
    // Another expectation or another machine has its own list.
    let cleanly = ["--last-failed", "--expect", "ends-cleanly"];
    assert_eq!(attempts(&cleanly), [1, 2, 3, 4]);
    let machine = ["--last-failed", "--gpu", "rtx4090-24"];
    assert_eq!(attempts(&machine), [1, 2, 3, 4]);
    // The line that fails is now the second attempt. It also fails together with the first.
    let above = "for size in [3]:\n    try: torch.cuda.malloc(size << 20)\n    \
         except torch.OutOfMemoryError: pass\n";
    let shifted = FOUR.replacen("import torch\n", &format!("import torch\n{above}"), 1);
    world.write("train.py", &shifted);
    assert_eq!(attempts(&["--last-failed"]), [1, 2, 3, 4, 5]);
    assert_eq!(attempts(&["--last-failed"]), [1, 2]);
    world.write("train.py", FOUR);
    assert_eq!(attempts(&[]), [1, 2, 3, 4]);
    let caught = "try:\n    torch.cuda.malloc(4 << 20)\nexcept torch.OutOfMemoryError: pass\n";
    world.write(
        "train.py",
        &FOUR.replacen("torch.cuda.malloc(4 << 20)\n", caught, 1),
    );
    assert_eq!(attempts(&["--last-failed"]), [1]);
    assert_eq!(attempts(&["--last-failed"]), [1, 2, 3, 4]);
    // Two attempts of one size change places.
    let swapped = |calls: &str| {
        let program = "import torch\ndef bad(): torch.cuda.malloc(4 << 20)\ndef good():\n    \
             try: torch.cuda.malloc(4 << 20)\n    except torch.OutOfMemoryError: pass\n";
        world.write("train.py", &format!("{program}{calls}\n"));
    };
    swapped("bad(); good()");
    assert_eq!(attempts(&[]), [1, 2]);
    swapped("good(); bad()");
    assert_eq!(attempts(&["--last-failed"]), [1, 2]);
    // A case that its run does not reach has no other call stack, and stays in the list.
    let short = "import os, torch\nopen('runs', 'a').write('x')\n\
                 if os.path.getsize('runs') != 3:\n    torch.cuda.malloc(4 << 20)\n    \
                 try: torch.cuda.malloc(2 << 20)\n    except torch.OutOfMemoryError: pass\n";
    world.write("train.py", short);
    world.write("runs", &"x".repeat(3));
    assert_eq!(attempts(&[]), [1, 2]);
    world.write("runs", "");
    for _ in 0..2 {
        assert_eq!(attempts(&["--last-failed"]), [1]);
    }
}

fn the_least_memory_is_found(world: World) {
    world.write("train.py", FOUR);
    let ran = world.run(&["--least-memory", "--exact"], &["python3", "train.py"]);
    assert!(
        ran.code == Some(0)
            && ran
                .out
                .starts_with("done\n20 MiB are enough, 18 MiB are not."),
        "{}{}",
        ran.out,
        ran.err
    );
    let allowed = world.run(
        &["--least-memory", "--exact", "--allow-ooms"],
        &["python3", "train.py"],
    );
    assert!(
        allowed
            .out
            .starts_with("done\n4 MiB are enough, 2 MiB are not."),
        "{}{}",
        allowed.out,
        allowed.err
    );
}

fn the_largest_value_that_fits_is_found_on_each_gpu(world: World) {
    let program = "import sys, torch\nfor _ in range(int(sys.argv[1])):\n    \
         torch.cuda.malloc(int(sys.argv[2]) << 20)\n";
    world.write("train.py", program);
    let search = |options: &[&str], arguments: &[&str]| {
        let all = [&["--largest", "count=1..4096"], options].concat();
        world.run(&all, &[&["python3", "train.py"], arguments].concat())
    };
    let gpus = [
        "--gpu",
        "h100-80",
        "--gpu",
        "rtx4090-24",
        "--largest",
        "mib=100,200",
    ];
    let ran = search(
        &[&gpus[..], &["--format", "json"]].concat(),
        &["{count}", "{mib}"],
    );
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let found: Vec<_> = rows
        .iter()
        .map(|row| {
            (
                row["gpu"].as_str().unwrap(),
                row["others"]["mib"].as_u64(),
                row["largest"].as_u64(),
            )
        })
        .collect();
    let expected = [
        ("h100-80", 100, 10),
        ("rtx4090-24", 100, 10),
        ("h100-80", 200, 5),
        ("rtx4090-24", 200, 5),
    ];
    assert_eq!(
        found,
        expected.map(|(gpu, mib, largest)| (gpu, Some(mib), Some(largest)))
    );
    assert_eq!(rows[1]["next"]["value"], 11, "{report:#}");
    // In text, with the exit code of a check.
    let ran = search(&["--at-least", "11"], &["{count}", "100"]);
    assert!(
        ran.code == Some(1) && ran.out.starts_with("The largest count that fits is 10."),
        "{}{}",
        ran.out,
        ran.err
    );
    for (options, arguments, code, message) in [
        (
            &[][..],
            &["1", "1"][..],
            2,
            "no argument of the command contains `{count}`",
        ),
        (
            &["--largest", "count=1,2"],
            &["{count}", "1"],
            2,
            "is given more than once",
        ),
        (
            &["--gpu", "h100", "--gpu", "h100-80"],
            &["{count}", "1"],
            2,
            "is given more than once",
        ),
        (
            &["--every-fault"],
            &["{count}", "1"],
            2,
            "cannot be used with",
        ),
        (
            &["--record", "run.json"],
            &["{count}", "1"],
            2,
            "are for one run",
        ),
        (
            &[],
            &["{count}", "2000"],
            1,
            "The smallest count, 1, does not fit.",
        ),
        (
            &[],
            &["{count}", "no"],
            1,
            "with count 8 it ends with exit code 1",
        ),
    ] {
        let ran = search(options, arguments);
        assert!(
            ran.code == Some(code) && format!("{}{}", ran.out, ran.err).contains(message),
            "{options:?}: {:?} {}{}",
            ran.code,
            ran.out,
            ran.err
        );
    }
    let two = world.run(
        &["--gpu", "h100-80", "--gpu", "l40s-48"],
        &["python3", "train.py"],
    );
    assert!(two.code == Some(2) && two.err.contains("`--gpu` is given more than once"));
}

/// Allocates as often as a file says, and reads another file next to it.
const CONFIGURED: &str = "\
import os, sys, torch
path = sys.argv[1].removeprefix('--config=')
other = os.path.join(os.path.dirname(path), 'other.txt')
assert path.endswith('.yaml') and open(other).read() == 'other'
lines = open(path).read().splitlines()
assert lines[1:] == ['same: ${count}', 'mib: {100}'], lines
for _ in range(int(lines[0].removeprefix('count: '))):
    torch.cuda.malloc(100 << 20)
";

fn a_value_in_a_configuration_file_is_searched(world: World) {
    world.write("train.py", CONFIGURED);
    world.write("conf/other.txt", "other");
    let text = "count: {count}\nsame: ${count}\nmib: {100}\n";
    world.write("conf/train.yaml", text);
    let options = [
        "--largest",
        "count=1..64",
        "--config",
        "conf/train.yaml",
        "--jobs",
        "2",
    ];
    let absolute = world.path("conf/train.yaml");
    let absolute = format!("--config={}", absolute.display());
    for argument in ["conf/train.yaml", "./conf/../conf/train.yaml", &absolute] {
        let ran = world.run(&options, &["python3", "train.py", argument]);
        assert!(
            ran.code == Some(0) && ran.out.starts_with("The largest count that fits is 10."),
            "{argument}: {}{}",
            ran.out,
            ran.err
        );
    }
    // The copies are gone, and the file is as it was.
    assert_eq!(fs::read_dir(world.path("conf")).unwrap().count(), 2);
    assert_eq!(
        fs::read_to_string(world.path("conf/train.yaml")).unwrap(),
        text
    );
}

fn no_copy_of_a_configuration_file_outlives_harness(world: World) {
    world.write("conf/train.yaml", "count: {count}");
    let mut options = vec!["--largest", "count=1..64", "--config", "conf/train.yaml"];
    options.extend(["--fresh", "--jobs", "2"]);
    let program = "test -s $0 && echo $$ > new$$; mv new$$ pid; exec sleep 1000";
    for signal in ["KILL", "TERM"] {
        let _ = fs::remove_file(world.path("pid"));
        let command = ["sh", "-c", program, "conf/train.yaml"];
        let mut run = world.command(&options, &command);
        let mut child = run.stderr(Stdio::null()).spawn().unwrap();
        let pid = wait_for("a run", || fs::read_to_string(world.path("pid")).ok());
        let kill = format!("kill -{signal} {}", child.id());
        let sent = Command::new("sh").args(["-c", &kill]).status().unwrap();
        assert!(sent.success(), "{signal}");
        child.wait().unwrap();
        wait_for_end(&pid);
        wait_for("the end of the copies", || {
            (fs::read_dir(world.path("conf")).unwrap().count() == 1).then_some(())
        });
    }
}

fn unusable_configuration_files_are_rejected_before_a_run(world: World) {
    world.write("train.py", "open('ran', 'w')");
    world.write("train.yaml", "count: {count}");
    world.write("plain.yaml", "count: 1, ${count}, { count }");
    fs::write(world.path("bytes.yaml"), b"count: {count} \xff").unwrap();
    let largest = ["--largest", "count=1..64"];
    for (options, command, message) in [
        (
            &["--config", "none.yaml"][..],
            "none.yaml",
            "cannot read `--config none.yaml`",
        ),
        (&["--config", "."], ".", "cannot read `--config .`"),
        (
            &["--config", "bytes.yaml"],
            "bytes.yaml",
            "cannot read `--config bytes.yaml`",
        ),
        (
            &["--config", "plain.yaml"],
            "plain.yaml",
            "`--config plain.yaml` does not contain `{count}`",
        ),
        (
            &["--config", "train.yaml"],
            "--train",
            "no argument of the command is `train.yaml` or ends with `=train.yaml`",
        ),
        (
            &["--config", "train.yaml", "--largest", "length=1,2"],
            "train.yaml",
            "no argument of the command contains `{length}`",
        ),
        (
            &[],
            "${count}",
            "no argument of the command contains `{count}`",
        ),
    ] {
        let ran = world.run(
            &[&largest[..], options].concat(),
            &["python3", "train.py", command],
        );
        let message_in_one_line = ran.err.replace('│', " ");
        let words: Vec<&str> = message_in_one_line.split_whitespace().collect();
        assert!(
            ran.code == Some(2) && words.join(" ").contains(message),
            "{options:?}: {:?} {}",
            ran.code,
            ran.err
        );
    }
    let alone = world.run(&["--config", "train.yaml"], &["python3", "train.py"]);
    assert!(alone.code == Some(2) && alone.err.contains("`--config` needs `--largest`"));
    assert!(!world.path("ran").exists());
}

fn arguments_and_variables_that_may_save_memory_are_tried(world: World) {
    world.write(
        "levers.py",
        "import os, sys, torch\nmib = 100 if '--small' in sys.argv else 200\n\
         mib //= int(os.environ.get('PARTS', '1'))\n\
         for _ in range(int(sys.argv[1])):\n    torch.cuda.malloc(mib << 20)\n",
    );
    let levers = [
        "--largest",
        "count=1..64",
        "--try",
        "small: --small",
        "--try",
        "parts: PARTS=4",
    ];
    let ran = world.run(
        &[&levers[..], &["--format", "json"]].concat(),
        &["python3", "levers.py", "{count}"],
    );
    assert_eq!(ran.code, Some(0), "{}", ran.err);
    let report: Value = serde_json::from_str(&ran.out).unwrap();
    let found: Vec<_> = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            (
                row["lever"].as_str(),
                row["largest"].as_u64(),
                row["saves"].as_i64(),
            )
        })
        .collect();
    let mib = |mib: i64| Some(mib << 20);
    assert_eq!(
        found,
        [
            (None, Some(5), None),
            (Some("parts"), Some(20), mib(750)),
            (Some("small"), Some(10), mib(500))
        ]
    );
    let twice = [
        "--largest",
        "count=1,2",
        "--try",
        "a: --a",
        "--try",
        "a: --b",
    ];
    let ran = world.run(&twice, &["python3", "levers.py", "{count}"]);
    assert!(ran.code == Some(2) && ran.err.contains("`--try 'a: …'` is given more than once"));
}

fn settings_are_compared_by_running_the_program_with_each(world: World) {
    world.write(
        "train.py",
        "import os, torch\ntorch.cuda.malloc((40 if \
         os.environ['PYTORCH_ALLOC_CONF'] == '' else 8) << 20)\n",
    );
    let ran = world.run(
        &[
            "--alloc-conf",
            "",
            "--alloc-conf",
            "expandable_segments:True",
        ],
        &["python3", "train.py"],
    );
    assert!(
        ran.out.starts_with(
            "expandable_segments:True is best: it reserves at most 8 MiB. The \
             program succeeds with 2 of 2 settings."
        ),
        "{}{}",
        ran.out,
        ran.err
    );
    assert!(
        ran.code == Some(0) && ran.out.contains("(no settings)"),
        "{}",
        ran.out
    );
}

/// The document of many runs on a simulated GPU with 1 GiB, and on a real GPU with the same limit.
fn simulated_and_limited(world: &World, options: &[&str]) -> [Value; 2] {
    let options = [&["--format", "json", "--memory", "1GiB"], options].concat();
    let simulated = world.run(&options, &["python3", "train.py"]);
    let limited = limited(
        world,
        &[&["--device", "cuda:0"], options.as_slice()].concat(),
        &["python3", "train.py"],
    );
    assert_eq!(
        (simulated.code, limited.code),
        (Some(0), Some(0)),
        "{}{}",
        simulated.err,
        limited.err
    );
    [simulated, limited].map(|ran| serde_json::from_str(&ran.out).unwrap())
}

fn many_runs_on_a_limited_real_gpu_match_a_simulated_one(world: World) {
    world.write("train.py", FOUR);
    let [simulated, limited] = simulated_and_limited(&world, &["--every-fault"]);
    assert_eq!(
        (simulated["cases"].as_array().unwrap().len(), &simulated),
        (4, &limited)
    );
    let settings = [
        "--alloc-conf",
        "",
        "--alloc-conf",
        "expandable_segments:True",
        "--least-memory",
        "--exact",
    ];
    let [mut simulated, mut limited] = simulated_and_limited(&world, &settings);
    // A real GPU has only one order of addresses.
    let orders = [&mut simulated, &mut limited].map(|document| {
        let rows = document["rows"].as_array_mut().unwrap();
        rows.iter_mut()
            .map(|row| {
                row.as_object_mut()
                    .unwrap()
                    .remove("least_by_order")
                    .unwrap()
                    .as_array()
                    .unwrap()
                    .len()
            })
            .collect::<Vec<_>>()
    });
    assert_eq!(
        (orders, &simulated["rows"]),
        ([vec![2, 2], vec![1, 1]], &limited["rows"])
    );
    assert_eq!(limited["rows"][1]["least_memory"], 20 << 20, "{limited:#}");
    let [simulated, limited] = simulated_and_limited(&world, &["--least-memory", "--exact"]);
    let figures = |document: &Value| {
        ["enough", "too_little"].map(|name| document["orders"][0][name].as_u64().unwrap() >> 20)
    };
    assert_eq!(
        (figures(&simulated), figures(&limited)),
        ([20, 18], [20, 18])
    );
    assert_eq!(
        (
            &limited["orders"][0]["addresses"],
            limited["orders"].as_array().unwrap().len()
        ),
        (&"driver".into(), 1)
    );
}

fn runs_on_a_real_gpu_are_sequential_by_default(world: World) {
    // Records the number of parallel runs until it is as expected. The first run is alone.
    let program = "import os, sys, time, torch
open('runs/%d' % os.getpid(), 'w').close()
torch.cuda.malloc(1 << 20)
expected = int(sys.argv[1]) if os.path.getsize('most') else 1
began = time.monotonic()
while True:
    with open('most', 'a') as most:
        most.write('%d\\n' % len(os.listdir('runs')))
    waited, seen = time.monotonic() - began, max(map(int, open('most').read().split()))
    if waited > 0.2 and (seen >= expected or waited > 300):
        break
    time.sleep(0.01)
os.remove('runs/%d' % os.getpid())
";
    world.write("train.py", program);
    let most = |options: &[&str], expected: &str| {
        fs::create_dir_all(world.path("runs")).unwrap();
        world.write("most", "");
        let settings = [
            "--device",
            "cuda:0",
            "--alloc-conf",
            "",
            "--alloc-conf",
            "a",
            "--alloc-conf",
            "b",
        ];
        let ran = limited(
            &world,
            &[&settings, options].concat(),
            &["python3", "train.py", expected],
        );
        assert_eq!(ran.code, Some(0), "{}", ran.err);
        fs::read_to_string(world.path("most"))
            .unwrap()
            .lines()
            .map(|line| line.parse::<u32>().unwrap())
            .max()
    };
    assert_eq!(
        (most(&[], "1"), most(&["--jobs", "2"], "2")),
        (Some(1), Some(2))
    );
}

fn an_injected_failure_without_effect_is_reported_and_fails(world: World) {
    world.write("train.py", FOUR);
    let ran = world.run(&["--fail", "any:9:2"], &["python3", "train.py"]);
    assert!(
        ran.code == Some(1) && ran.err.contains("`--fail any:9:2:0` had no effect"),
        "{}",
        ran.err
    );
}

fn the_progress_of_every_fault_begins_with_a_finished_run(world: World) {
    world.write("train.py", FOUR);
    let on_terminal = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)";
    let mut command = world.wrapped(&["python3", "-c", on_terminal]);
    command
        .args([env!("CARGO_BIN_EXE_harness"), "exec", "--memory", "8GiB"])
        .args(["--every-fault", "--", "python3", "train.py"])
        .env("TERM", "xterm");
    let ran = Ran::of(command.output().unwrap());
    assert!(
        ran.out.contains("/8 runs, ") && !ran.out.contains(" 0/8 runs, "),
        "{:?} {}{}",
        ran.code,
        ran.out,
        ran.err
    );
}

fn pointless_runs_are_rejected_with_advice(world: World) {
    for (options, program, code, message) in [
        (
            &["--every-fault=some:3"][..],
            "",
            2,
            "does not select attempts",
        ),
        (
            &["--every-fault", "--alloc-conf", "a", "--alloc-conf", "b"],
            "",
            2,
            "takes one `--alloc-conf`",
        ),
        (&["--jobs", "2"], "", 2, "`--jobs` is for many runs"),
        (&["--shard", "1/2"], "", 2, "`--shard` is for many runs"),
        (
            &["--every-fault", "--shard", "9/8"],
            "",
            2,
            "shard 9 of 8 does not exist",
        ),
        (
            &["--least-memory", "--require-gpu"],
            "",
            2,
            "`--require-gpu` and `--events range` are for one run",
        ),
        (
            &["--every-fault", "--events", "range"],
            "",
            2,
            "`--require-gpu` and `--events range` are for one run",
        ),
        (
            &["--least-memory", "--record", "run.json"],
            "",
            2,
            "are for one run",
        ),
        (
            &["--python", "no/python", "--python", "no/python"],
            "",
            2,
            "the program's Python, `no/python`, does not work",
        ),
        (
            &["--python", "a", "--python", "b", "--least-memory"],
            "",
            2,
            "two `--python` compare two runs",
        ),
        (
            &["--python", "a", "--python", "b", "--python", "c"],
            "",
            2,
            "`--python` is given more than twice",
        ),
        (
            &[
                "--gpu", "h200", "--gpu", "h100-80", "--python", "a", "--python", "b",
            ],
            "",
            2,
            "`--gpu` is given more than once",
        ),
        (&["--every", "1s"], "", 2, "`--every` needs `--leave-free`"),
        (
            &["--every-fault"],
            "raise SystemExit(3)",
            1,
            "The program ends with exit code 3 without injected failures",
        ),
        (
            &["--every-fault"],
            "import torch",
            1,
            "allocated no device memory",
        ),
        (
            &["--least-memory", "--time-limit", "500ms"],
            "import time; time.sleep(60)",
            1,
            "exceeds its time limit",
        ),
    ] {
        let ran = world.run(options, &["python3", "-c", program]);
        assert!(
            ran.code == Some(code) && ran.err.contains(message),
            "{options:?}: {:?} {}",
            ran.code,
            ran.err
        );
    }
}

fn an_unusable_baseline_is_rejected_before_the_run(world: World) {
    let file = world.path("peaks.json").display().to_string();
    let run = |text: Option<&str>, options: &[&str]| {
        let _ = text.map(|text| world.write("peaks.json", text));
        world.run(
            &[&["--baseline", &file], options].concat(),
            &["python3", "-c", "print('started')"],
        )
    };
    for (text, options, message) in [
        (None, &[][..], "there is no such baseline"),
        (
            Some("{\n  \"settings\": 3\n}"),
            &[],
            ":2:15: this is not a baseline: invalid type",
        ),
        (
            Some(r#"{"version": 1, "settings": ["torch=2.9.0", "gpu=h100-80"], "processes": {}}"#),
            &[],
            "the baseline has torch=2.9.0; this run has torch=2.11.0",
        ),
        (None, &["--every-fault"], "are for one run"),
        (None, &["--least-memory"], "are for one run"),
        (
            None,
            &["--alloc-conf", "a", "--alloc-conf", "b"],
            "are for one run",
        ),
        (
            None,
            &["--device", "cuda:0"],
            "cannot be used with '--device",
        ),
    ] {
        let ran = run(text, options);
        let text = ran.err.replace("\n  │ ", " ");
        assert!(
            ran.code == Some(2) && ran.out.is_empty() && text.contains(message),
            "{options:?}: {:?} {}{}",
            ran.code,
            ran.err,
            ran.out
        );
    }
    let without_file = world.run(&["--update"], &["true"]);
    assert!(
        without_file.code == Some(2) && without_file.err.contains("`--update` needs `--baseline`"),
        "{}",
        without_file.err
    );
}

/// Requests the number of MiB in its argument. Exits with 3 if a variable has an unexpected value.
const ASKS: &str = "import os, sys, torch\ntorch.cuda.malloc(int(sys.argv[1]) << 20)\nassert \
     os.environ['PYTORCH_ALLOC_CONF'] == \
     'expandable_segments:True'\nsys.exit(int(os.environ.get('CODE', '0')))\n";

fn programs_of_a_scenario_share_its_memory(world: World) {
    world.write("scenarios/asks.py", ASKS);
    // It holds 600 MiB until another process holds 100 MiB.
    world.write(
        "scenarios/holds.py",
        "import ctypes, torch\ntorch.cuda.malloc(600 << 20)\nleft, \
         all = ctypes.c_size_t(1 << 30), ctypes.c_size_t()\nwhile left.value > 324 << 20:\n    \
         torch.cuda._runtime.cudaMemGetInfo(ctypes.byref(left), ctypes.byref(all))\n",
    );
    // It requests more memory when the other process appears, and continues when that process has
    // ended.
    world.write(
        "scenarios/waits.py",
        "import ctypes, torch\nleft, all = ctypes.c_size_t(), \
         ctypes.c_size_t()\ndef free():\n    \
         torch.cuda._runtime.cudaMemGetInfo(ctypes.byref(left), ctypes.byref(all))\n    return \
         left.value >> 20\nwhile free() > 424: pass\ntry:\n    torch.cuda.malloc(600 << \
         20)\nexcept torch.OutOfMemoryError:\n    torch.cuda.malloc(100 << 20)\nwhile free() < \
         924: pass\ntorch.cuda.malloc(600 << 20)\n",
    );
    let steps = "  - alloc: { buffer: own, size: 600MiB }
  - exec: { id: refused, command: [python3, asks.py, 600], expect: oom }
  - expect: [ refused.exit_code == 1, refused.num_ooms == 1, refused.malloc_failures == 1,
        refused.peak_reserved == 0 ]
  - free: own
  - empty_cache
  - exec: { id: served, command: [python3, asks.py, 600], env: { CODE: 5 }, expect: 5 }
  - expect: [ served.peak_reserved == 600MiB, served.malloc_calls == 1, served.processes == 1,
        reserved == 0 ]
  - exec: { id: holds, command: [python3, holds.py] }
    meanwhile:
      - exec: { id: waits, command: [python3, waits.py] }
  - expect: [ waits.ooms == 1, waits.peak_reserved == 700MiB, holds.ooms == 0 ]
  - exec: { id: injected, command: [python3, asks.py, 4], fail: [\"cudaMalloc:1\"], expect: oom }
  - expect: injected.injected_failures == 1
";
    for ran in [
        world.run_scenario(steps),
        world.run_scenario_on_gpu(steps, "text"),
    ] {
        assert_eq!(ran.code, Some(0), "{}{}", ran.out, ran.err);
    }
}

/// The program holds 100 MiB and its two children 200 MiB each while the other program holds 64 MiB
/// and the scenario 20 MiB. Earlier, the program alone held 300 MiB.
fn processes_of_a_program_and_of_those_beside_it_are_counted_together(world: World) {
    world.write(
        "scenarios/child.py",
        "import torch\ntorch.cuda.malloc(200 << 20)\nprint(flush=True)\ninput()\n",
    );
    world.write(
        "scenarios/parent.py",
        "import ctypes, os, subprocess, sys, time, torch\nfirst = \
         ctypes.c_void_p()\ntorch.cuda._runtime.cudaMalloc(ctypes.byref(first), \
         ctypes.c_size_t(300 << \
         20))\ntorch.cuda._runtime.cudaFree(first)\ntorch.cuda.malloc(100 << 20)\nwhile not \
         os.path.exists('holds'): time.sleep(0.01)\nchildren = [subprocess.Popen([sys.executable, \
         'child.py'], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]\nfor child \
         in children: child.stdout.readline()\nfor child in children: \
         child.communicate(b'\\n')\nopen('done', 'w').close()\n",
    );
    world.write(
        "scenarios/other.py",
        "import os, time, torch\ntorch.cuda.malloc(64 << 20)\nopen('holds', \
         'w').close()\nwhile not os.path.exists('done'): time.sleep(0.01)\n",
    );
    world.write(
        "scenarios/test.yaml",
        "about: A test.
needs: { memory: 1GiB }
allocators: [expandable]
steps:
  - alloc: { buffer: own, size: 20MiB }
  - exec: { id: program, command: [python3, parent.py] }
    meanwhile:
      - exec: { id: other, command: [python3, other.py] }
",
    );
    let ran = world.run_written_scenario(&["--format", "json"]);
    let document: serde_json::Value =
        serde_json::from_str(&ran.out).unwrap_or_else(|error| panic!("{error}: {}", ran.err));
    let processes = &document["runs"][0]["processes"];
    let each = processes["each"]
        .as_array()
        .unwrap_or_else(|| panic!("{}{}", ran.out, ran.err));
    let reserved = |one: &serde_json::Value| one["peak_reserved"].as_u64().map(|peak| peak >> 20);
    let mut found: Vec<_> = each
        .iter()
        .map(|one| (one["name"].as_str().unwrap(), reserved(one).unwrap()))
        .collect();
    found.sort_unstable();
    assert_eq!(
        found,
        [
            ("main process", 20),
            ("other", 64),
            ("process 1 of program", 300),
            ("process 2 of program", 200),
            ("process 3 of program", 200)
        ]
    );
    let together = &processes["together"];
    assert_eq!(
        reserved(together),
        Some(20 + 64 + 100 + 2 * 200),
        "{together}"
    );
    assert!(together["peak_allocated"].is_null(), "{together}");
}

fn a_failed_program_is_shown_with_its_last_lines_and_a_reproducing_command(world: World) {
    world.write("scenarios/asks.py", ASKS);
    let failed = |step: &str, shown: &[&str]| {
        let ran = world.run_scenario(&format!("  - exec: {step}\n"));
        let text = format!("{}{}", ran.out, ran.err);
        assert!(
            ran.code == Some(1) && shown.iter().all(|shown| text.contains(shown)),
            "{text}"
        );
    };
    failed(
        "{ command: [python3, asks.py, 2000], env: { CODE: 5 } }",
        &[
            "the program to end with exit code 0",
            "exit code 1, by an out of memory error\n",
            "| Traceback (most recent call last)",
            "| torch.OutOfMemoryError: CUDA out of memory.\n",
        ],
    );
    let json = world.run_written_scenario(&["--format", "json"]);
    let again = "cd scenarios && CODE=5 harness exec --gpu h100-80 --memory 1073741824B \
         --alloc-conf expandable_segments:True -- python3 asks.py 2000";
    assert!(json.out.contains(again), "{}", json.out);
    failed(
        "{ command: [python3, asks.py, 2], expect: oom }",
        &[
            "the program to end with an out-of-memory error",
            "exit code 0",
        ],
    );
    failed(
        "{ command: [python3, asks.py, 2], fail: [\"any:2\"] }",
        &["`any:2:1:0` to be reached"],
    );
    failed(
        "{ command: [python3, -c, \"import time, torch; time.sleep(60)\"] }\n    timeout: 1s",
        &["to take at most 1.00 s", "it was stopped after"],
    );
}

fn a_scenario_with_unusable_programs_is_skipped_with_the_reason(world: World) {
    let skipped = |steps: &str, reason: &str| {
        let ran = world.run_scenario(steps);
        let text = format!("{}{}", ran.out, ran.err).replace('\n', " ");
        let words: Vec<&str> = text.split_whitespace().collect();
        assert!(words.join(" ").contains(reason), "{text}");
    };
    skipped(
        "  - exec: { command: [python3, -I, train.py] }\n",
        "has no torch",
    );
    skipped(
        "  - exec: { command: [no-such-program] }\n",
        "`no-such-program` cannot run on a simulated GPU: cannot find the program \
         `no-such-program`",
    );
    skipped(
        "  - exec: { command: [python3, train.py], modules: [torch, no_such_module] }\n",
        "has no no_such_module",
    );
}

fn a_scenario_for_another_gpu_is_skipped(world: World) {
    let steps = "about: A test.\nneeds: { memory: 64MiB }\nallocators: [caching]\nsteps:\n  - \
         exec: { command: [python3, train.py], gpu: a100-40 }\n";
    world.write("scenarios/program.yaml", steps);
    let staging = Staging::new(&strict()).unwrap();
    let mut harness = world.harness();
    staging.apply(harness.args([
        "run",
        "scenarios/program.yaml",
        "--device",
        "cuda:0",
        "--no-report",
    ]));
    let ran = Ran::of(harness.output().unwrap());
    let text = format!("{}{}", ran.out, ran.err);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains(
            "`python3 train.py` requires the GPU a100-40 (NVIDIA A100-SXM4-40GB), \
         but this GPU is Simulated GPU"
        ),
        "{text}"
    );
}

fn a_failed_program_on_a_gpu_is_shown_with_its_command(world: World) {
    world.write("scenarios/asks.py", ASKS);
    let step = "  - exec: { command: [python3, asks.py, 2000], env: { CODE: 5 }, fail: \
         [\"cudaMalloc:2\"] }\n";
    let ran = world.run_scenario_on_gpu(step, "json");
    let text = format!("{}{}", ran.out, ran.err);
    let shown = [
        "exit code 1, by an out of memory error",
        "| torch.OutOfMemoryError: CUDA out of memory.",
        "`cudaMalloc:2:1:0` to be reached",
        "CODE=5 harness exec --device cuda:0 --memory 1073741824B --alloc-conf \
         expandable_segments:True --fail cudaMalloc:2:1:0 -- python3 asks.py 2000",
    ];
    assert!(
        ran.code == Some(1) && shown.iter().all(|shown| text.contains(shown)),
        "{text}"
    );
}

fn an_optional_program_that_cannot_run_is_skipped_with_its_expectations(world: World) {
    let steps = "  - exec: { id: program, command: [python3, -I, train.py], optional: true }
  - expect: program.reserved == 382MiB
  - alloc: { buffer: x, size: 400000000B }
  - expect: reserved == 400MiB
claim:
  says: It reserves 20 pages of 20 MiB.
  verdict: holds
  figures: { reserved: { pytorch: program.reserved, harness: reserved } }
";
    let ran = world.run_scenario(steps);
    let text = format!("{}{}", ran.out, ran.err);
    assert!(
        ran.code == Some(0) && text.contains("reserved: PyTorch –, harness 400 MiB"),
        "{text}"
    );
    let ran = world.run_scenario(&steps.replace(
        "alloc: { buffer: x, size: 400000000B }",
        "alloc: { buffer: x, size: 1MiB }",
    ));
    let text = format!("{}{}", ran.out, ran.err);
    assert!(
        text.contains("unproven: holds; its scenario fails"),
        "{text}"
    );
}
