//! One run as a user meets it in a report.
#![allow(clippy::unwrap_used)]

use harness_exec::errors::{ErrorFrame, OutOfMemoryError};
use harness_exec::record::DeviceRecord;
use harness_exec::timeline::Sample;
use harness_exec::torch_record::{Statistics, TorchRecord};
use harness_gpu_settings::{attempts::DriverFree, calls::Call, gpus::Gpu};

use super::*;

fn attempt(size: u64, submitted: u64, outcome: AttemptOutcome, held: u64) -> Attempt {
    Attempt {
        call: Call::Malloc,
        size: Bytes::mib(size),
        submitted,
        outcome,
        device: 0,
        number: 0,
        held: Bytes::mib(held),
    }
}

/// A process that holds 400 MiB, is refused 700 MiB of 1 GiB twice, gives 100 MiB back meanwhile,
/// and ends.
fn run() -> (Record, Machine, Vec<ProgramTimeline>) {
    let settings = Settings::new(Gpu::named("a100-40").unwrap(), Bytes::gib(1));
    let torch = TorchRecord {
        version: "2.11.0+cu130".to_owned(),
        other_library: None,
        rank: None,
        started: 0,
        ended_out_of_memory: true,
        ended_by_library: false,
        caught: false,
        ended_in_handler: false,
        memory_stats: serde_json::from_value(
            serde_json::json!({"0": {"allocated_bytes.all.peak": 300 << 20, "num_ooms": 1,
                "num_alloc_retries": 1}}),
        )
        .unwrap(),
        statistics: Statistics::Reported,
        resets: 0,
        earlier: [].into(),
        host_memory_stats: None,
        problem: None,
        late_import: None,
        not_computed: None,
        engine: None,
        engines: Vec::new(),
        error: None,
        traceback: [
            "Traceback (most recent call last):",
            "  File \"train.py\", line 7, in <module>",
            "torch.OutOfMemoryError: CUDA out of memory.",
        ]
        .map(str::to_owned)
        .to_vec(),
    };
    let device = DeviceRecord {
        index: 0,
        memory: 1 << 30,
        peak_reserved: 400 << 20,
        mallocs: 4,
        frees: 1,
        failed: 2,
        injected: 1,
    };
    let process = Process {
        pid: 7,
        imports: Some(vec!["torch".to_owned()]),
        program: "python3.11".to_owned(),
        refusal: None,
        torch: Some(torch),
        devices: vec![device],
        reads_free_memory: false,
        uncomputed_reads: 0,
        uncomputed_reads_at: Vec::new(),
        waits_of_frees: 0,
        peaks_by_timing: Vec::new(),
        not_replayed: None,
        polled_at: Vec::new(),
        graph_requests: 0,
        submitted: 40,
        cudnn_workspace_bounds: [1 << 20, 2 << 20],
        slow_calls: Vec::new(),
        failed_calls: Vec::new(),
        not_modelled: vec!["cufileRead".to_owned()],
    };
    let record = Record {
        exit_code: 1,
        signal: None,
        gpu: settings.gpu.name.clone(),
        settings: settings.to_string(),
        hang: None,
        different_sizes: None,
        outlived: Vec::new(),
        host_ahead: None,
        machine_memory: None,
        without_variables: Vec::new(),
        own_errors: Vec::new(),
        effect: None,
        is_watched: true,
        peak_held: vec![400 << 20],
        processes: vec![process],
    };
    let timeline = ProgramTimeline {
        pid: 7,
        attempts: vec![
            attempt(300, 0, AttemptOutcome::Served, 0),
            attempt(100, 10, AttemptOutcome::Served, 300),
            attempt(700, 20, AttemptOutcome::Injected, 400),
            attempt(700, 20, AttemptOutcome::Refused, 300),
        ],
        frees: vec![DriverFree {
            attempts: 3,
            submitted: 20,
            device: 0,
            held: Bytes::mib(300),
        }],
        errors: vec![OutOfMemoryError {
            attempts: 4,
            frames: vec![ErrorFrame {
                file: "/home/me/train.py".to_owned(),
                line: 7,
                name: "<module>".to_owned(),
            }],
        }],
        samples: vec![Sample {
            submitted: 5,
            device: 0,
            allocated: Bytes::mib(300),
        }],
    };
    (record, Machine::Simulated(settings), vec![timeline])
}

fn with_program<T>(missed: Option<&str>, act: impl FnOnce(&ProgramReport<'_>) -> T) -> T {
    let (record, machine, timelines) = run();
    act(&ProgramReport {
        command: "python train.py",
        again: "harness exec --memory 1GiB -- python train.py",
        machine: &machine,
        gpu: None,
        record: &record,
        timelines: &timelines,
        missed,
        differences: &[],
    })
}

#[test]
fn a_page_says_how_the_program_ended_with_its_traceback_calls_and_models() {
    insta::assert_snapshot!(with_program(None, |program| markdown(
        program,
        Some("report.svg")
    )));
}

#[test]
fn peaks_after_a_read_of_a_value_that_nothing_computed_are_marked() {
    let (mut record, machine, timelines) = run();
    record.processes[0].uncomputed_reads = 1;
    let program = ProgramReport {
        command: "python train.py",
        again: "harness exec --memory 1GiB -- python train.py",
        machine: &machine,
        gpu: None,
        record: &record,
        timelines: &timelines,
        missed: None,
        differences: &[],
    };
    let page = markdown(&program, None);
    assert!(page.contains("| 400 MiB † | 300 MiB † |"), "{page}");
    assert!(page.contains("† Unless a branch depends"), "{page}");
    assert!(!with_program(None, |program| markdown(program, None)).contains('†'));
}

#[test]
fn a_picture_says_in_words_what_it_shows() {
    let svg = with_program(None, picture).unwrap();
    let words = "process 7, device 0: at most 400 MiB reserved and 300 MiB allocated; 1 attempt \
         refused, 1 injected, 1 out of memory error.";
    assert!(svg.contains(words), "{svg}");
}

#[test]
fn differences_from_a_baseline_fail_the_test_case_and_are_listed() {
    let (mut record, machine, timelines) = run();
    record.exit_code = 0;
    record
        .processes
        .iter_mut()
        .filter_map(|process| process.torch.as_mut())
        .for_each(|torch| torch.traceback.clear());
    let differences = &[
        "train.py:21 <lambda> allocates 64 MiB more at the peak: 128 MiB instead of 64 MiB"
            .to_owned(),
    ];
    let program = ProgramReport {
        command: "true",
        again: "",
        machine: &machine,
        gpu: None,
        record: &record,
        timelines: &timelines,
        missed: None,
        differences,
    };
    let (case, page) = (junit(&program), markdown(&program, None));
    assert!(
        case.contains("; 1 difference from the baseline")
            && case.contains("train.py:21 &lt;lambda&gt; allocates 64 MiB more"),
        "{case}"
    );
    assert!(
        page.contains("## Differences from the baseline")
            && page.contains("64 MiB more at the peak"),
        "{page}"
    );
}

#[test]
fn a_test_case_fails_with_the_traceback_or_for_a_failure_that_was_not_reached() {
    insta::assert_snapshot!(with_program(Some("--fail cudaMalloc:40:2:0"), junit));
    let (mut record, machine, timelines) = run();
    record.exit_code = 0;
    let program = ProgramReport {
        command: "true",
        again: "harness exec -- true",
        machine: &machine,
        gpu: None,
        record: &record,
        timelines: &timelines,
        missed: None,
        differences: &[],
    };
    assert!(!junit(&program).contains("<failure"), "{}", junit(&program));
}

#[test]
fn a_page_of_a_real_gpu_says_what_is_limited_and_counts_calls_for_memory() {
    let (record, _, timelines) = run();
    let limits = Limits {
        device: Bytes::gib(80),
        memory: Some(Bytes::gib(1)),
        faults: vec!["cudaMalloc:3".parse().unwrap()],
        latencies: vec!["cudaFree:3ms".parse().unwrap()],
    };
    let record = Record {
        gpu: "cuda:0".to_owned(),
        settings: limits.to_string(),
        peak_held: Vec::new(),
        ..record
    };
    let program = ProgramReport {
        command: "python train.py",
        again: "harness exec --device cuda:0 --memory 1GiB -- python train.py",
        machine: &Machine::Real(0, limits),
        gpu: Some("NVIDIA H100 80GB HBM3"),
        record: &record,
        timelines: &timelines,
        missed: None,
        differences: &[],
    };
    insta::assert_snapshot!(markdown(&program, Some("report.svg")));
    let svg = picture(&program).unwrap();
    assert!(
        svg.contains("Memory over the calls of the program for memory")
            && !svg.contains("work submitted"),
        "{svg}"
    );
}
