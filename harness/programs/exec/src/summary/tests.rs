//! Summaries as users see them.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use crate::errors::ErrorFrame;
use harness_gpu_settings::gpus::Gpu;
use harness_gpu_settings::shared_memory::{MemoryInUse, MemoryShare};
use serde_json::json;

use super::*;
use crate::hang::{Hang, HangingRank, RankState};
use crate::machine_memory::{MachineMemory, ShortMemory};
use crate::record::{FailedCalls, SlowCalls};
use crate::torch_record::{AdaptedEngine, TorchRecord};

fn process(pid: u32, rank: Option<&str>) -> Process {
    let stats = json!({"0": {"allocated_bytes.all.peak": 5_u64 << 30, "num_ooms": 1,
        "num_alloc_retries": 1}});
    Process {
        refusal: None,
        pid,
        imports: Some(vec!["torch".to_owned()]),
        program: "python3.11".to_owned(),
        torch: Some(TorchRecord {
            version: "2.11.0+cu130".to_owned(),
            other_library: None,
            rank: rank.map(str::to_owned),
            started: 0,
            ended_out_of_memory: true,
            ended_by_library: false,
            caught: false,
            ended_in_handler: false,
            memory_stats: serde_json::from_value(stats).unwrap(),
            statistics: Statistics::Reported,
            resets: 0,
            earlier: [].into(),
            host_memory_stats: None,
            problem: None,
            traceback: Vec::new(),
            error: None,
            late_import: None,
            not_computed: None,
            engine: None,
            engines: Vec::new(),
        }),
        devices: vec![DeviceRecord {
            index: 0,
            memory: 8 << 30,
            peak_reserved: 6 << 30,
            mallocs: 41,
            frees: 1,
            failed: 3,
            injected: 2,
        }],
        submitted: 0,
        reads_free_memory: false,
        uncomputed_reads: 0,
        uncomputed_reads_at: Vec::new(),
        waits_of_frees: 0,
        peaks_by_timing: Vec::new(),
        not_replayed: None,
        polled_at: Vec::new(),
        graph_requests: 0,
        cudnn_workspace_bounds: [0; 2],
        slow_calls: Vec::new(),
        failed_calls: Vec::new(),
        not_modelled: Vec::new(),
    }
}

fn record(processes: Vec<Process>) -> (Record, Settings) {
    let settings = Settings::new(Gpu::named("a100-40").unwrap(), Bytes::gib(8));
    (
        Record {
            exit_code: 1,
            signal: None,
            gpu: settings.gpu.name.clone(),
            settings: settings.to_string(),
            peak_held: vec![7 << 30],
            hang: None,
            different_sizes: None,
            outlived: Vec::new(),
            host_ahead: None,
            machine_memory: None,
            without_variables: Vec::new(),
            own_errors: Vec::new(),
            effect: None,
            is_watched: true,
            processes,
        },
        settings,
    )
}

#[test]
fn the_summary_of_one_process_omits_its_id() {
    let process = Process {
        cudnn_workspace_bounds: [1 << 30, 1 << 20],
        ..process(7, None)
    };
    let (record, settings) = record(vec![process]);
    insta::assert_snapshot!(simulated(&record, &settings));
}

#[test]
fn several_processes_are_labelled_and_missing_statistics_reported() {
    let mut killed = process(9, None);
    killed.torch = None;
    killed.not_modelled = (0..10)
        .map(|number| format!("cudaFictional{number}"))
        .collect();
    let idle = Process {
        devices: Vec::new(),
        ..process(3, None)
    };
    let mut broken = process(8, Some("1"));
    broken.torch.as_mut().unwrap().problem =
        Some("CUDAPluggableAllocator does not yet support getDeviceStats".to_owned());
    let (record, mut settings) = record(vec![idle, process(7, Some("0")), broken, killed]);
    settings.devices = 2;
    settings.context_overhead = Bytes::mib(500);
    settings.cudnn_workspace = CudnnWorkspace::None;
    settings.values = Values::Copies;
    insta::assert_snapshot!(simulated(&record, &settings));
}

#[test]
fn an_engine_of_an_untested_version_or_without_a_known_part_is_named() {
    let warning = |version: Option<&str>, unchanged: &[&str]| {
        let unchanged = unchanged.iter().copied().map(str::to_owned).collect();
        AdaptedEngine {
            name: "vLLM".to_owned(),
            version: version.map(str::to_owned),
            tested: ["0.32.0", "0.33.1"].map(str::to_owned),
            unchanged,
        }
        .warning()
    };
    for tested in ["0.32.0", "0.33.0.post2", "0.33.1+cu130"] {
        assert_eq!(warning(Some(tested), &[]), None);
    }
    for other in ["0.31.9", "0.34.0", "0.33.10", "main"] {
        let expected =
            format!("vLLM {other} may differ from a run on a real GPU (tested: 0.32.0 to 0.33.1)");
        assert_eq!(warning(Some(other), &[]), Some(expected));
    }
    assert_eq!(
        warning(None, &["vllm.v1.worker.gpu_worker"]).unwrap(),
        "vLLM of unknown version may differ from a run on a real GPU (tested: 0.32.0 to 0.33.1); \
         not adapted: vllm.v1.worker.gpu_worker"
    );
}

/// A process that ended with an error after a read of a value that nothing computed, without
/// injected failures.
fn failed() -> Process {
    let mut failed = process(7, None);
    let torch = failed.torch.as_mut().unwrap();
    torch.ended_out_of_memory = false;
    torch.traceback = vec!["ValueError: no edges".to_owned()];
    torch.error = torch.traceback.first().cloned();
    failed.devices[0].injected = 0;
    failed.uncomputed_reads = 1;
    failed
}

#[test]
fn a_process_without_torch_has_the_reason_for_its_missing_statistics() {
    let reason = |imports: Option<&[&str]>, program: &str| {
        let imports = imports.map(|names| names.iter().copied().map(str::to_owned).collect());
        let process = Process {
            torch: None,
            imports,
            program: program.to_owned(),
            ..process(7, None)
        };
        of_torch(&process, "")
    };
    assert_eq!(
        reason(Some(&[]), "python3.11"),
        "the process imported no library that reports statistics"
    );
    let begin = "no statistics from torch: ";
    assert_eq!(
        reason(Some(&["torch"]), "python3.11"),
        format!(
            "{begin}the process ended without Python's exit handlers, before it used the GPU \
             through torch"
        )
    );
    assert_eq!(
        reason(Some(&["numba.cuda"]), "python3.11"),
        "the process imported numba.cuda, and no library that reports statistics"
    );
    assert_eq!(reason(None, "python3.11"), format!("{begin}{WITHOUT_HOOK}"));
    assert_eq!(
        reason(None, "nbody"),
        "plain calls of CUDA by `nbody`, without a library that reports statistics"
    );
}

#[test]
fn another_library_is_named_with_its_allocator_and_the_figures_that_it_publishes() {
    let mut process = process(7, None);
    let torch = process.torch.as_mut().unwrap();
    torch.version = "0.12.0".to_owned();
    torch.other_library = Some(OtherLibrary {
        errors: Some(0),
        name: "JAX".to_owned(),
        allocator: "XLA's BFC allocator".to_owned(),
        versions: BTreeMap::new(),
    });
    let stats = json!({"0": {"allocated_bytes.all.peak": 5_u64 << 30,
        "reserved_bytes.all.peak": 6_u64 << 30}});
    torch.memory_stats = serde_json::from_value(stats).unwrap();
    assert_eq!(
        of_torch(&process, ""),
        "JAX 0.12.0, XLA's BFC allocator: peak allocated 5 GiB, peak reserved 6 GiB; an out of \
         memory error ended the program"
    );
    let torch = process.torch.as_mut().unwrap();
    torch.other_library.as_mut().unwrap().errors = Some(2);
    assert!(of_torch(&process, "").contains("peak reserved 6 GiB, 2 out of memory errors"));
    let torch = process.torch.as_mut().unwrap();
    torch.other_library.as_mut().unwrap().errors = None;
    // A killed process, and one that used several libraries.
    let torch = process.torch.as_mut().unwrap();
    torch.memory_stats.clear();
    (torch.statistics, torch.ended_out_of_memory) = (Statistics::AtLeast, false);
    assert_eq!(
        of_torch(&process, ""),
        "JAX 0.12.0, XLA's BFC allocator: the process ended before it could report"
    );
    let torch = process.torch.as_mut().unwrap();
    (torch.statistics, torch.version) = (Statistics::Reported, String::new());
    torch.other_library = Some(OtherLibrary {
        errors: Some(0),
        name: "JAX and CuPy".to_owned(),
        allocator: "XLA's BFC allocator and CuPy's memory pool".to_owned(),
        versions: BTreeMap::new(),
    });
    assert_eq!(
        of_torch(&process, ""),
        "JAX and CuPy, XLA's BFC allocator and CuPy's memory pool: no statistics"
    );
}

#[test]
fn a_package_that_a_library_misses_is_named_for_its_cuda_release() {
    let mut process = process(7, None);
    let torch = process.torch.as_mut().unwrap();
    torch.error = Some("InternalError: libdevice not found at ./libdevice.10.bc".to_owned());
    let (record, mut settings) = record(vec![process]);
    let line = |settings: &Settings| missing_package(&record, settings);
    let begin = "the program lacks a part of CUDA, on a real GPU too: install nvidia-cuda-nvcc";
    assert_eq!(line(&settings), format!("{begin} for CUDA 13\n"));
    settings.cuda = Cuda::V12;
    assert_eq!(line(&settings), format!("{begin}-cu12 for CUDA 12\n"));
}

#[test]
fn an_error_without_counted_reads_recommends_values_of_the_cpu() {
    let hint = "if the end depends on values that the program read back, use `--values cpu`";
    let is_shown = |process: &Process, values| {
        let (record, mut settings) = record(vec![process.clone()]);
        settings.values = values;
        simulated(&record, &settings)
            .lines()
            .any(|line| line == hint)
    };
    let mut failed = failed();
    assert!(!is_shown(&failed, Values::Copies), "reads are counted");
    assert!(is_shown(&failed, Values::Zeros));
    failed.devices[0].injected = 1;
    assert!(!is_shown(&failed, Values::Zeros));
}

#[test]
fn an_end_depends_on_values_only_after_a_read_of_one_that_nothing_computed() {
    let end = |change: &dyn Fn(&mut Process), exit_code| {
        let mut process = failed();
        change(&mut process);
        let (record, _) = record(vec![process]);
        Record {
            exit_code,
            ..record
        }
        .end_by_values()
    };
    let torch = |process: &mut Process, change: &dyn Fn(&mut TorchRecord)| {
        change(process.torch.as_mut().unwrap())
    };
    assert_eq!(
        end(&|_| {}, 1).as_deref(),
        Some("with `ValueError: no edges`")
    );
    assert_eq!(
        end(&|process| torch(process, &|torch| torch.error = None), 3).as_deref(),
        Some("with exit code 3")
    );
    assert_eq!(end(&|process| process.uncomputed_reads = 0, 1), None);
    assert_eq!(end(&|process| process.devices[0].injected = 1, 1), None);
    assert_eq!(
        end(
            &|process| process.failed_calls = vec![FailedCalls {
                call: "cudaHostAlloc",
                failed: 1,
                injected: 1
            }],
            1
        ),
        None
    );
    assert_eq!(
        end(
            &|process| torch(process, &|torch| torch.ended_out_of_memory = true),
            1
        ),
        None
    );
    assert_eq!(
        [end(&|_| {}, 0), end(&|_| {}, 139)],
        [None, None],
        "it ended well, or by a signal"
    );
}

#[test]
fn a_hang_depends_on_values_unless_a_rank_ran_out_of_memory() {
    let of_rank = |out_of_memory| HangingRank {
        rank: 0,
        pid: None,
        state: RankState::Missing,
        out_of_memory,
    };
    let end = |rank| {
        let (record, _) = record(vec![failed()]);
        Record {
            exit_code: 124,
            hang: Some(Hang { ranks: vec![rank] }),
            ..record
        }
        .end_by_values()
    };
    assert_eq!(
        end(of_rank(None)).as_deref(),
        Some("in a hang of its ranks")
    );
    let line = ErrorFrame {
        file: "train.py".to_owned(),
        line: 4,
        name: "main".to_owned(),
    };
    assert_eq!(end(of_rank(Some(line))), None);
}

#[test]
fn an_effect_or_another_program_than_python_is_the_reason_for_one_run() {
    let last = |effect: Option<&str>, is_watched| {
        let (record, mut settings) = record(vec![failed()]);
        settings.values = Values::Copies;
        let record = Record {
            exit_code: 1,
            effect: effect.map(str::to_owned),
            is_watched,
            ..record
        };
        simulated(&record, &settings)
            .lines()
            .last()
            .map(str::to_owned)
            .unwrap()
    };
    let begin = "the program ended with `ValueError: no edges`; it is not repeated with `--values \
         cpu`, because it ";
    assert_eq!(
        last(Some("writes log.txt"), true),
        format!("{begin}writes log.txt")
    );
    assert_eq!(
        last(None, false),
        format!("{begin}begins with another program than Python, whose effects are unknown")
    );
    assert!(last(None, true).starts_with("the program read values that nothing computed"));
}

#[test]
fn reads_of_values_that_nothing_computed_are_counted_and_named_once_per_line() {
    let at = |line| ErrorFrame {
        file: "/home/user/loss.py".to_owned(),
        line,
        name: "branch".to_owned(),
    };
    let read = |pid, uncomputed_reads, lines: &[u64]| Process {
        uncomputed_reads,
        uncomputed_reads_at: lines.iter().copied().map(at).collect(),
        ..process(pid, None)
    };
    let line = |processes| {
        let (record, settings) = record(processes);
        simulated(&record, &settings)
            .lines()
            .find(|line| line.starts_with("the program read values"))
            .map(str::to_owned)
    };
    assert_eq!(line(vec![read(7, 0, &[])]), None);
    let of_two = line(vec![read(7, 2, &[41]), read(8, 1, &[41, 12])]).unwrap();
    assert!(
        of_two.contains("(3 reads, at loss.py:41, loss.py:12)"),
        "{of_two}"
    );
    let of_many = line(vec![read(7, 20, &(1..11).collect::<Vec<_>>())]).unwrap();
    assert!(of_many.contains("loss.py:8 and 2 more"), "{of_many}");
    let figures = |processes| {
        let (mut record, settings) = record(processes);
        record.peak_held = vec![1 << 30];
        simulated(&record, &settings)
            .matches(", unless a branch depends on a value below")
            .count()
    };
    let of_both = |reads| figures(vec![read(7, reads, &[]), read(8, 0, &[])]);
    assert_eq!(
        [of_both(0), of_both(1)],
        [0, 3],
        "the reserved and the allocated peak of one process, and the peak of both"
    );
    let without_gpu = || Process {
        devices: Vec::new(),
        torch: None,
        ..read(9, 1, &[12])
    };
    let of_child = line(vec![read(7, 0, &[]), without_gpu()]).unwrap();
    assert!(of_child.contains("(1 read, at loss.py:12)"), "{of_child}");
    let marked = figures(vec![read(7, 0, &[]), without_gpu()]);
    assert_eq!(marked, 2, "the peaks of the process with a GPU");
}

#[test]
fn a_peak_without_room_for_the_context_of_each_process_is_named_unless_requests_failed() {
    let names_context = |held: Bytes, processes: u32, failed: u64, overhead: Bytes| {
        let of = |pid| {
            let process = process(pid, None);
            Process {
                devices: vec![DeviceRecord {
                    failed,
                    injected: 0,
                    ..process.devices[0].clone()
                }],
                ..process
            }
        };
        let (mut record, mut settings) = record((0..processes).map(of).collect());
        (record.peak_held, settings.context_overhead) = (vec![held.0], overhead);
        simulated(&record, &settings).contains("`--context-overhead h200` adds them")
    };
    let full = Bytes::gib(8) - Bytes::mib(526);
    assert!(names_context(full, 1, 0, Bytes::ZERO));
    assert!(!names_context(full - Bytes::mib(1), 1, 0, Bytes::ZERO));
    assert!(
        names_context(full - Bytes::mib(500), 2, 0, Bytes::ZERO),
        "two contexts"
    );
    assert!(!names_context(full, 1, 1, Bytes::ZERO) && !names_context(full, 1, 0, Bytes::mib(2)));
}

#[test]
fn the_summary_of_a_real_gpu_shows_its_limit() {
    let (mut record, _) = record(vec![process(7, None)]);
    record.gpu = "cuda:0".to_owned();
    let mut limits = Limits {
        device: Bytes::gib(80),
        memory: Some(Bytes::gib(8)),
        faults: Vec::new(),
        latencies: Vec::new(),
    };
    let with_limit = limited(&record, "NVIDIA H100 80GB HBM3", &limits);
    limits.memory = None;
    record.processes.clear();
    insta::assert_snapshot!(format!(
        "{with_limit}\n{}",
        limited(&record, "NVIDIA H100 80GB HBM3", &limits)
    ));
}

#[test]
fn failures_of_host_memory_and_of_libraries_are_shown() {
    let failed = |call, injected| FailedCalls {
        call,
        failed: 2,
        injected,
    };
    let failed_calls = vec![failed("cudaHostAlloc", 1), failed("cublasCreate", 0)];
    let (record, settings) = record(vec![Process {
        failed_calls,
        ..process(7, None)
    }]);
    let text = simulated(&record, &settings);
    assert!(
        text.contains(
            "cudaHostAlloc: 2 failed, 1 of them injected by `--fail`\ncublasCreate: 2 failed\n"
        ),
        "{text}"
    );
}

#[test]
fn each_latency_is_shown_with_its_number_of_calls() {
    let slow_calls = [("cudaMalloc", 3), ("cudaFree", 1)]
        .map(|(call, calls)| SlowCalls { call, calls })
        .to_vec();
    let (record, mut settings) = record(vec![Process {
        slow_calls,
        ..process(7, None)
    }]);
    settings.latencies = ["any:5ms", "all:1ms", "cuMemUnmap:1s"]
        .map(|text| text.parse().unwrap())
        .to_vec();
    let text = simulated(&record, &settings);
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("latency"))
        .collect();
    assert_eq!(
        lines,
        [
            "latency any:5ms: 3 calls delayed, 15.0 ms in total",
            "latency all:1ms: 4 calls delayed, 4.00 ms in total",
            "latency cuMemUnmap:1s: 0 calls delayed, 0 ns in total",
        ]
    );
    assert_eq!(
        record
            .latency_not_reached(&settings.latencies)
            .map(ToString::to_string)
            .as_deref(),
        Some("cuMemUnmap:1s")
    );
}

#[test]
fn the_summary_reports_that_no_process_used_the_gpu() {
    let (record, settings) = record(Vec::new());
    insta::assert_snapshot!(simulated(&record, &settings));
}

#[test]
fn a_program_that_starts_no_watched_python_may_have_lost_the_variables_of_the_run() {
    let (record, settings) = record(Vec::new());
    let record = Record {
        is_watched: false,
        ..record
    };
    let text = simulated(&record, &settings);
    assert!(
        text.contains(
            "no process used the simulated GPU: none called CUDA or NVML; a process without the \
             variables of the run, as after `env -i` or `sudo`, does not see the simulated GPU\n"
        ),
        "{text}"
    );
}

#[test]
fn programs_that_were_started_without_the_variables_of_the_run_are_one_line() {
    let (record, settings) = record(Vec::new());
    let started = |program: &str, line: u64| StartedProgram {
        program: program.to_owned(),
        at: ErrorFrame {
            file: "/home/me/train.py".to_owned(),
            line,
            name: "step".to_owned(),
        },
    };
    let record = Record {
        without_variables: vec![started("sh", 9), started("python3", 5), started("sh", 9)],
        ..record
    };
    let text = simulated(&record, &settings);
    let line = "started without the variables of the run, so without the simulated GPU: `python3` \
                at train.py:5, `sh` at train.py:9; pass them on, as in `env={**os.environ, ...}`\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn a_process_that_requests_no_memory_is_shown_with_its_first_failed_call() {
    let mut refused = process(7, None);
    refused.torch = None;
    refused.devices[0].mallocs = 0;
    refused.refusal = Some(("cuDeviceGetLuid".to_owned(), 801));
    let text = |process: Process| {
        let (record, settings) = record(vec![process]);
        simulated(&record, &settings)
    };
    let called = "CUDA or NVML was called, but no memory was requested";
    let shown = text(refused.clone());
    assert!(
        !shown.contains("no process used")
            && shown.contains(&format!(
                "{called}: cuDeviceGetLuid was the first call that failed, with error 801 in \
             `python3.11`"
            )),
        "{shown}"
    );
    refused.refusal = None;
    let failed = FailedCalls {
        call: "cudaHostAlloc",
        failed: 1,
        injected: 0,
    };
    let shown = text(Process {
        failed_calls: vec![failed],
        ..refused.clone()
    });
    let is_right = shown.contains("cudaHostAlloc: 1 failed\n") && !shown.contains(called);
    assert!(is_right, "{shown}");
    let shown = text(Process {
        not_modelled: vec!["cuGetExportTable".to_owned()],
        ..refused.clone()
    });
    let why = format!("{called}: cuGetExportTable is not modelled in `python3.11`");
    assert!(shown.contains(&why), "{shown}");
    let shown = text(refused);
    assert!(
        shown.contains(&format!("{called}, and no call failed\n")),
        "{shown}"
    );
}

#[test]
fn the_summary_names_what_the_cpu_did_not_compute() {
    let mut computed = process(7, None);
    let operations = [
        ("_sparse_addmm".to_owned(), 2),
        ("quantize_per_tensor".to_owned(), 1),
    ]
    .into();
    let not_computed = crate::torch_record::NotComputed {
        kernels: 1,
        operations,
        beyond_limit: 4,
    };
    computed.torch.as_mut().unwrap().not_computed = Some(not_computed);
    let (record, mut settings) = record(vec![computed]);
    settings.values = Values::Cpu;
    settings.host_memory = Bytes::gib(6);
    let text = simulated(&record, &settings);
    let line = "not computed: 1 launch of compiled code, CUDA graphs, extensions or foreign \
         threads; 3 operations that the CPU lacks (_sparse_addmm, quantize_per_tensor); \
                4 operations beyond 6 GiB of host memory\n";
    assert!(
        text.contains(line)
            && text.contains("the CPU computes the values, in at most 6 GiB of host memory"),
        "{text}"
    );
}

#[test]
fn a_machine_without_enough_memory_has_the_line_and_the_share_of_each_process() {
    let (mut record, mut settings) = record(vec![process(7, None)]);
    settings.shared_memory = SharedMemory::Pinned;
    let share = |pid, [gpu, pinned, pageable]: [u64; 3]| MemoryShare {
        pid,
        gpu: gpu << 30,
        pinned: pinned << 30,
        pageable: pageable << 30,
    };
    let frame = |line, name: &str| ErrorFrame {
        file: "/home/me/serve.py".to_owned(),
        line,
        name: name.to_owned(),
    };
    let stack = vec![frame(31, "allocate"), frame(88, "profile_run")];
    let most = MemoryInUse {
        processes: vec![share(7, [6, 1, 1]), share(9, [0, 0, 2])],
    };
    let short = MemoryInUse {
        processes: vec![share(7, [6, 1, 2])],
    };
    record.machine_memory = Some(MachineMemory {
        memory: 8 << 30,
        most,
        short: Some(ShortMemory {
            pid: 7,
            stack,
            in_use: short,
        }),
    });
    insta::assert_snapshot!(simulated(&record, &settings));
}
