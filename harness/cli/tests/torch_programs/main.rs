//! Unmodified PyTorch programs on simulated GPUs, run by `harness exec`. Each must print the
//! expected figures, to the byte.
//!
//! `programs/` has small programs with their expected output, and larger programs with recorded
//! figures. [`PYTHON`] names a Python with torch 2.11.0 for CUDA 13, with or without NVIDIA's
//! packages; `ci/torch` creates one. [`CUDNN`] names `libcudnn_graph.so.9` of `pip install
//! --no-deps nvidia-cudnn-cu13==9.19.0.56`. Without them, the tests are ignored, with the reason.
//!
//! With [`ALL`]=1, all trials run, as every night. Without it, trials that only repeat a check with
//! another program, GPU or setting are ignored, and some trials check fewer cases: [`runs_all`].

mod claims;
#[path = "../kept_report/mod.rs"]
mod kept_report;

use std::os::unix::{ffi::OsStrExt as _, fs::PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};
use std::{collections::BTreeMap, ffi::OsStr};

use harness_allocator::units::Bytes;
use harness_explain::causes::{self, Options};
use harness_explain::state::At;
use harness_staging::trials::{self, Skip};
use harness_trace::snapshot::{Action, Event, ExtraId, Snapshot};
use libtest_mimic::{Arguments, Failed, Trial};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The variable that names a Python with torch.
const PYTHON: &str = "HARNESS_TEST_PYTHON";
/// The variable that names cuDNN's library.
const CUDNN: &str = "HARNESS_TEST_CUDNN";
/// The variable that names a folder with Triton: `pip install --no-deps --target FOLDER
/// triton==3.6.0`.
const TRITON: &str = "HARNESS_TEST_TRITON";
/// The variable for the trials of `nightly.yml`.
const ALL: &str = "HARNESS_TEST_ALL";

const WITH_TORCH: &str = "`HARNESS_TEST_PYTHON=$(ci/torch) cargo test --test torch_programs`";
const WITH_ALL: &str = "the same command with HARNESS_TEST_ALL=1";
const WITH_CUDNN: &str = "set it to libcudnn_graph.so.9 of `pip install --no-deps --target FOLDER \
     nvidia-cudnn-cu13==9.19.0.56`";
const WITH_TRITON: &str = "set it to FOLDER of `pip install --no-deps --target FOLDER \
     triton==3.6.0`";

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let python = std::env::var_os(PYTHON)
        .filter(|python| !python.is_empty())
        .map(PathBuf::from)
        .ok_or_else(|| {
            let why = format!("{PYTHON} names no Python with torch 2.11.0");
            Skip::new(why, WITH_TORCH)
        });
    let cudnn = std::env::var_os(CUDNN).map(PathBuf::from).ok_or_else(|| {
        let why = format!("{CUDNN} names no library of cuDNN");
        Skip::new(why, WITH_CUDNN)
    });
    let every = if runs_all() {
        python.clone()
    } else {
        python.clone().and_then(|_| {
            let why = "they repeat a check with another program, GPU or setting";
            Err(Skip::new(why, WITH_ALL))
        })
    };
    // Trials start in this order, so the longest are first.
    let mut trials = Vec::new();
    for (name, python, check) in [
        (
            "the claims have the kept verdicts and figures",
            &every,
            claims::have_the_kept_figures as fn(&Path),
        ),
        (
            "a sample of the claims has the kept verdicts and figures",
            &python,
            claims::of_the_sample_have_the_kept_figures,
        ),
    ] {
        trials.push(of_python(name, python, move |python| {
            check(python);
            Ok(())
        }));
    }
    for (scenario, allocator, python) in [
        ("batch_beside_server", "caching", &every),
        ("halve_batch", "expandable", &every),
        ("halve_batch", "caching", &python),
    ] {
        let check = move |python: &Path| behaves_the_same_on_a_gpu(scenario, allocator, python);
        trials.push(of_python(
            &format!(
                "scenarios/programs/{scenario}.yaml with {allocator} behaves the same on a GPU"
            ),
            python,
            check,
        ));
    }
    trials.extend(rows_by_options("expected.tsv").map(|rows| of_rows(rows, &python)));
    trials.extend(rows("expected_nightly.tsv").map(|row| trial(row, &every, printed)));
    trials.extend(rows("recorded.tsv").map(|row| trial(row, &python, recorded)));
    // The parent in shared_tensors.py waits forever for a child that ran out of memory, and that in
    // engine.py for its engine. captures.py keeps the pools of failed captures. handles.py has no
    // memory for libraries.
    let excluded = [
        "--values cpu",
        "--fail",
        "--devices",
        "--context-overhead",
        "shared_tensors.py",
        "engine.py",
        "captures.py",
    ];
    let is_first = |row: &Row| {
        !excluded
            .iter()
            .any(|text| row.options.contains(text) || row.program == *text)
    };
    let brief = ["workers.py"];
    // Comparisons of many runs. Those of other programs run every night.
    let python_for = |is_brief: bool| if is_brief { &python } else { &every };
    let mut copied: BTreeMap<String, Row> = BTreeMap::new();
    for row in rows("expected.tsv")
        .chain(rows("expected_nightly.tsv"))
        .filter(is_first)
    {
        copied.entry(row.program.clone()).or_insert(row);
    }
    let larger = rows("recorded.tsv").filter(|row| !row.options.contains("--alloc-conf"));
    let predicted: Vec<Row> = copied.values().cloned().chain(larger).collect();
    trials.extend(copied.values().cloned().map(|row| {
        let name = format!(
            "{}: runs that begin as copies end like new starts",
            row.program
        );
        let python = python_for(brief.contains(&row.program.as_str()));
        let check = move |python: &Path| {
            copies_end_like_new_starts(
                &row.program,
                &[row.options.as_str(), "--every-fault=sample:2"],
                python,
            )
        };
        of_python(&name, python, check)
    }));
    for row in predicted {
        if row.program == "mlp_adam.py" {
            let row = row.clone();
            let check = move |python: &Path| predictions_equal_runs(&row, &EIGHT[..3], python);
            let name = "mlp_adam.py: predictions for three settings equal runs";
            trials.push(of_python(name, &python, check));
        }
        let name = format!("{}: predictions for eight settings equal runs", row.program);
        let check = move |python: &Path| predictions_equal_runs(&row, &EIGHT, python);
        trials.push(of_python(&name, &every, check));
    }
    trials.push(of_python(
        "train.py: four runs find the least memory with eight settings",
        &python,
        four_runs_find_the_least_memory,
    ));
    trials.push(of_python(
        "train.py: the least memory with eight settings is that of the full search",
        &every,
        full_search_finds_the_same,
    ));
    for (program, options) in PREDICTED {
        let name = format!(
            "{program} {options}: four runs confirm the least memory, which is that of the full \
             search"
        );
        trials.push(of_python(&name, &every, move |python| {
            four_runs_confirm(program, options, python)
        }));
    }
    let limited = ["halve_on_oom.py", "mlp_adam.py", "retry.py"];
    let is_limited =
        |row: &Row| limited.contains(&row.program.as_str()) && !row.options.contains("--values");
    trials.extend(
        rows("expected.tsv")
            .chain(rows("expected_nightly.tsv"))
            .filter(is_limited)
            .map(|mut row| {
                let is_brief = row.options.contains("cudaMalloc:5:4")
                    || row.program == "halve_on_oom.py"
                        && copied[&row.program].options == row.options;
                let python = python_for(is_brief);
                row.options.insert_str(0, LIMITED);
                trial(row, python, printed)
            }),
    );
    trials.push(of_python(
        "a correct recovery survives each fault",
        &python,
        a_correct_recovery_survives_each_fault,
    ));
    trials.push(of_python(
        "each call of a library fails, and its error is a clean end",
        &python,
        library_errors,
    ));
    trials.push(of_python(
        "random_reads.py: each line that reads numbers which nothing computes is named",
        &python,
        reads_of_random_numbers_are_named,
    ));
    trials.push(of_python(
        "saved_values.py: to save a value is no read of it, and to load it is one",
        &python,
        saved_values_are_read_by_what_may_see_them,
    ));
    trials.push(of_python(
        "rank_reads.py: what a sender does not know, or what comes too late, is unknown",
        &python,
        ranks_do_not_know_more_than_their_senders,
    ));
    let launchers = [
        ["torchrun", "torch.distributed.run", "--standalone"],
        [
            "accelerate",
            "accelerate.commands.launch",
            "--num_processes=1",
        ],
    ];
    for [name, module, processes] in launchers {
        // An environment that an earlier `ci/torch` made lacks accelerate.
        let package = module.split('.').next().unwrap_or_default();
        let find = format!("import importlib.util; assert importlib.util.find_spec('{package}')");
        let has_it = |python: &PathBuf| {
            Command::new(python)
                .args(["-c", &find])
                .output()
                .is_ok_and(|it| it.status.success())
        };
        let python = python.clone().and_then(|python| {
            has_it(&python).then_some(python).ok_or_else(|| {
                let remedy = "remove the environment that `ci/torch` made, and call it again";
                Skip::new(format!("the Python lacks {package}"), remedy)
            })
        });
        let faults = if runs_all() {
            "--every-fault"
        } else {
            "--every-fault=sample:1"
        };
        let check = move |python: &Path| {
            ends_cleanly(python, &["-m", module, processes], "launched.py", faults)
        };
        trials.push(of_python(
            &format!("{name}: an out of memory error of the program is a clean end"),
            &python,
            check,
        ));
    }
    let triton = std::env::var_os(TRITON).ok_or_else(|| {
        let why = format!("{TRITON} names no folder with Triton");
        Skip::new(why, WITH_TRITON)
    });
    let check = |python: &Path| ends_cleanly(python, &[], "triton_kernel.py", "--every-fault");
    trials.push(of_python(
        "Triton: an out of memory error of the program is a clean end",
        &python.clone().and_then(|python| triton.map(|_| python)),
        check,
    ));
    trials.push(of_python(
        "a broken recovery is recorded in the demo",
        &python,
        a_broken_recovery_is_recorded_in_the_demo,
    ));
    trials.push(of_python(
        "a correct recovery survives on a squeezed GPU",
        &python,
        a_correct_recovery_survives_on_a_squeezed_gpu,
    ));
    trials.push(of_python(
        "pluggable.py: the library decides as PyTorch's own allocator, and a full pool of it \
         raises PyTorch's own error",
        &python,
        pluggable,
    ));
    trials.push(of_python(
        "convolutions that were not measured are listed and can be measured",
        &python,
        unmeasured_convolutions,
    ));
    let with_cudnn = python
        .clone()
        .and_then(|python| cudnn.clone().map(|_| python));
    let cudnn = cudnn.unwrap_or_default();
    let library = cudnn.clone();
    let check = move |python: &Path| library_of_cudnn(python, &cudnn);
    trials.push(of_python(
        "workspaces.py: cuDNN's own library requests the measured workspaces",
        &with_cudnn,
        check,
    ));
    let check = move |python: &Path| clusters(python, &library);
    trials.push(of_python(
        "workspaces.py: the peak has bounds on a GPU for which cuDNN plans clusters of blocks",
        &with_cudnn,
        check,
    ));
    trials.push(of_python(
        "convolutions.py: another library in place of cuDNN's is reported, and sizes are estimates",
        &python,
        not_cudnn,
    ));
    trials.push(of_python(
        "a program that ends with an error of values runs again with values",
        &python,
        error_of_values,
    ));
    for (name, values) in [("small", "copies"), ("CPU", "cpu")] {
        trials.push(of_python(
            &format!("failing_hook.py: no failure of the hook reaches the program, {name} values"),
            &python,
            move |python: &Path| a_failing_hook(python, values),
        ));
    }
    trials.push(of_python(
        "a program that does not import torch has the reason for its missing figures",
        &python,
        without_torch,
    ));
    trials.push(of_python(
        "a torch of an unknown version runs without small values, and the summary says so",
        &python,
        unknown_torch,
    ));
    trials.push(of_python(
        "the hook needs neither `open` nor the standard error of the program, and adds no thread",
        &python,
        own_open_and_threads,
    ));
    trials.push(of_python(
        "names that are no text hide no figure, no line and no error",
        &python,
        names_that_are_no_text,
    ));
    trials.push(of_python(
        "effects.py: a program runs again only if nothing remains of the first run",
        &python,
        effects,
    ));
    trials.push(of_python(
        "a command that changes PYTHONPATH keeps its statistics and values",
        &python,
        hook_stays,
    ));
    trials.push(of_python(
        "a baseline: equal runs agree, and the line that allocates more is named",
        &python,
        baseline,
    ));
    trials.push(of_python(
        "two environments are compared by line",
        &python,
        two_environments_are_compared_by_line,
    ));
    trials.push(of_python(
        "killed.py: a process keeps its statistics however it ends",
        &python,
        killed_processes,
    ));
    trials.push(of_python(
        "record_stream.py, polls.py: peaks that depend on the timing of the GPU are marked",
        &python,
        peaks_that_depend_on_timing,
    ));
    trials.push(of_python(
        "host_ahead.py: a replay shows the peak of a host that runs ahead of the GPU",
        &python,
        hosts_ahead,
    ));
    trials.push(of_python(
        "idle_streams.py: only a stream that may still work makes peaks depend on timing",
        &python,
        idle_streams,
    ));
    trials.push(of_python(
        "categories.py: categories from stacks and lifetimes equal those of the program's tensors",
        &python,
        categories,
    ));
    trials.push(of_python(
        "ranks that wait forever are named, with and without computed values",
        &python,
        ranks_that_wait_forever,
    ));
    trials.push(of_python(
        "ranks: each runs out of memory in turn, and the others hang",
        &python,
        each_rank_runs_out_of_memory,
    ));
    trials.push(of_python(
        "engine.py: an engine in a forked process is reported",
        &python,
        engine,
    ));
    trials.push(of_python(
        "GeForce GPUs do not reach each other's memory, and others do",
        &python,
        peers,
    ));
    trials.push(of_python(
        "shared_startup.py: starts that hung a DGX Spark lack memory in the reported phase",
        &python,
        starts_that_hung_a_machine,
    ));
    trials.push(of_python(
        "psutil reports the memory of a machine whose GPU shares it",
        &python,
        psutil_reports_the_memory_of_the_machine,
    ));
    trials.push(of_python(
        "addresses.py: the peak is an interval if it depends on the addresses",
        &python,
        orders_of_addresses,
    ));
    trials.push(of_python(
        "explain shows pinned host memory, unless PyTorch wrote the snapshot",
        &python,
        pinned_host_memory,
    ));
    trials.push(of_python(
        "pinned host memory is reported without device memory, and its injected failure",
        &python,
        only_host_memory,
    ));
    trials.push(of_python(
        "pinned.py is reported, and its advice is verified",
        &python,
        advised,
    ));
    trials::run(&arguments, trials)
}

/// Whether trials run that only repeat a check with another program, GPU or setting.
fn runs_all() -> bool {
    std::env::var_os(ALL).is_some()
}

/// A program with its arguments, options of `harness exec`, and its expected figures.
#[derive(Clone)]
struct Row {
    program: String,
    options: String,
    figures: BTreeMap<String, Value>,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn folder() -> PathBuf {
    root().join("harness/cli/tests/programs")
}

fn rows(file: &str) -> impl Iterator<Item = Row> {
    let text = std::fs::read_to_string(folder().join(file)).expect("read the table");
    let lines: Vec<String> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(str::to_owned)
        .collect();
    lines.into_iter().map(|line| {
        let fields: Vec<&str> = line.split('\t').collect();
        let [program, options, figures] = fields[..] else {
            panic!("a row has three fields: {line}")
        };
        let figures = serde_json::from_str(figures).expect("figures are JSON");
        Row {
            program: program.to_owned(),
            options: options.to_owned(),
            figures,
        }
    })
}

/// The rows of a table, those with the same options together.
fn rows_by_options(file: &str) -> impl Iterator<Item = Vec<Row>> {
    let mut groups: Vec<Vec<Row>> = Vec::new();
    for row in rows(file) {
        match groups
            .iter_mut()
            .find(|group| group[0].options == row.options)
        {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    groups.into_iter()
}

/// A trial of rows with the same options, whose programs start one Python.
fn of_rows(mut rows: Vec<Row>, python: &Result<PathBuf, Skip>) -> Trial {
    if rows.len() == 1 {
        return trial(rows.remove(0), python, printed);
    }
    let programs: Vec<&str> = rows.iter().map(|row| row.program.as_str()).collect();
    let name = format!("{} {}", programs.join(", "), rows[0].options);
    of_python(&name, python, move |python| printed_together(&rows, python))
}

fn of_python(
    name: &str,
    python: &Result<PathBuf, Skip>,
    check: impl FnOnce(&Path) -> Result<(), Failed> + Send + 'static,
) -> Trial {
    let (python, skip) = match python.clone() {
        Ok(python) => (python, None),
        Err(skip) => (PathBuf::new(), Some(skip)),
    };
    trials::trial(name, skip, move || check(&python))
}

fn trial(
    row: Row,
    python: &Result<PathBuf, Skip>,
    check: fn(&Row, &Path) -> Result<(), Failed>,
) -> Trial {
    of_python(
        &format!("{} {}", row.program, row.options),
        python,
        move |python| check(&row, python),
    )
}

/// Marks options of a program that runs with a limit (`--device`) on a simulated GPU of 80 GiB, in
/// place of a smaller simulated GPU.
const LIMITED: &str = "--device cuda:0 ";

/// The arguments of `harness` before the program.
fn arguments(options: &str) -> Vec<String> {
    let Some(options) = options.strip_prefix(LIMITED) else {
        return ["exec"]
            .into_iter()
            .chain(options.split(' '))
            .map(str::to_owned)
            .collect();
    };
    let of_gpu = ["--gpu", "--cudnn-workspace"];
    let words: Vec<&str> = options.split(' ').collect();
    let (outer, inner): (Vec<&[&str]>, Vec<&[&str]>) =
        words.chunks(2).partition(|pair| of_gpu.contains(&pair[0]));
    let outer = ["exec", "--memory", "80GiB"]
        .into_iter()
        .chain(outer.concat());
    let inner = [
        "--",
        env!("CARGO_BIN_EXE_harness"),
        "exec",
        "--device",
        "cuda:0",
    ]
    .into_iter()
    .chain(inner.concat());
    outer.chain(inner).map(str::to_owned).collect()
}

/// The command with a time limit, so a hang is a failed test. The longest command of a trial takes
/// a minute on an idle machine and has taken 8 minutes beside 20 busy processes.
fn harness() -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", "3600", env!("CARGO_BIN_EXE_harness")]);
    command
}

/// Runs a program on a simulated GPU.
fn run(row: &Row, python: &Path, variables: &[(&str, &Path)]) -> Result<Output, Failed> {
    let mut command = command(&row.options, &row.program, python);
    ended_well(command.envs(variables.iter().copied()))
}

/// The command that runs a program on a simulated GPU.
fn command(options: &str, program: &str, python: &Path) -> Command {
    let mut words = program.split(' ');
    let script = folder().join(words.next().unwrap_or_default());
    let mut command = harness();
    command
        .args(arguments(options))
        .arg("--")
        .arg(python)
        .arg(script)
        .args(words);
    // The user's own settings must not change the result.
    for variable in [
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "CUDA_VISIBLE_DEVICES",
    ] {
        command.env_remove(variable);
    }
    command
}

fn ended_well(command: &mut Command) -> Result<Output, Failed> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(output);
    }
    Err(format!(
        "{command:?} ended with {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    )
    .into())
}

struct Many {
    /// Without the number of runs of each search, and without the basis of each row.
    document: Value,
    /// The runs of each search.
    runs: Vec<u64>,
    /// The number of predicted rows.
    predicted: usize,
    /// Why there are none.
    unpredicted: Value,
}

fn many(program: &str, options: &[&str], python: &Path) -> Result<Many, Failed> {
    let mut words = program.split(' ');
    let script = folder().join(words.next().unwrap_or_default());
    let mut command = harness();
    command
        .arg("exec")
        .args(options.iter().flat_map(|option| option.split(' ')))
        .args(["--format", "json", "--"])
        .arg(python)
        .arg(script);
    // Recorded programs write their figures there.
    command.args(words).env("SNAP_RESULT", "/dev/null");
    let output = command
        .env_remove("PYTORCH_ALLOC_CONF")
        .env_remove("PYTORCH_CUDA_ALLOC_CONF")
        .output()?;
    let mut document: Value = document_of(&output)?;
    let (mut runs, mut predicted, mut unpredicted) = (Vec::new(), 0, Value::Null);
    let mut searches: Vec<&mut Value> = Vec::new();
    for (name, value) in document.as_object_mut().into_iter().flatten() {
        match (name.as_str(), value) {
            ("orders", orders) => searches.push(orders),
            ("rows", Value::Array(rows)) => {
                for row in rows.iter_mut().filter_map(Value::as_object_mut) {
                    predicted += usize::from(
                        row.remove("basis")
                            .is_some_and(|basis| basis == "predicted"),
                    );
                    for other in row
                        .get_mut("other_orders")
                        .and_then(Value::as_array_mut)
                        .into_iter()
                        .flatten()
                    {
                        other["basis"] = Value::Null;
                    }
                }
                searches.extend(
                    rows.iter_mut()
                        .filter_map(|row| row.get_mut("least_by_order")),
                );
            }
            ("unpredicted", reason) => unpredicted = reason.take(),
            _ => {}
        }
    }
    for search in searches {
        let orders = || search.as_array().into_iter().flatten();
        runs.push(orders().filter_map(|order| order["runs"].as_u64()).sum());
        for order in search.as_array_mut().into_iter().flatten() {
            order["runs"] = Value::Null;
        }
    }
    document
        .as_object_mut()
        .map(|document| document.remove("unpredicted"));
    Ok(Many {
        document,
        runs,
        predicted,
        unpredicted,
    })
}

fn copies_end_like_new_starts(
    program: &str,
    options: &[&str],
    python: &Path,
) -> Result<(), Failed> {
    let copied = many(program, options, python)?.document;
    let fresh = many(program, &[options, &["--fresh"]].concat(), python)?.document;
    if copied == fresh {
        Ok(())
    } else {
        Err(format!("{copied:#}\ninstead of\n{fresh:#}").into())
    }
}

/// Programs whose least memory replays predict, with options.
const PREDICTED: [(&str, &str); 3] = [
    ("mlp_adam.py", "--memory 4GiB"),
    ("graph.py", "--memory 4GiB"),
    ("streams.py", "--memory 4GiB --events synchronize"),
];

fn four_runs_confirm(program: &str, options: &str, python: &Path) -> Result<(), Failed> {
    let predicted = many(program, &[options, "--least-memory"], python)?;
    let searched = many(program, &[options, "--least-memory", "--fresh"], python)?;
    let is_right =
        predicted.document == searched.document && predicted.runs[0] <= 4 && searched.runs[0] > 4;
    let (runs, more) = (predicted.runs, searched.runs);
    let different = || {
        format!(
            "{runs:?} instead of {more:?} runs: {:#}\ninstead of\n{:#}",
            predicted.document, searched.document
        )
    };
    if is_right {
        Ok(())
    } else {
        Err(different().into())
    }
}

const EIGHT: [&str; 8] = [
    "--alloc-conf=",
    "--alloc-conf=expandable_segments:True",
    "--alloc-conf=max_split_size_mb:64",
    "--alloc-conf=roundup_power2_divisions:8",
    "--alloc-conf=garbage_collection_threshold:0.8,per_process_memory_fraction:0.9",
    "--alloc-conf=large_segment_size_mb:64",
    "--alloc-conf=max_split_size_mb:32",
    "--alloc-conf=expandable_segments:True,roundup_power2_divisions:4",
];

/// Compares predictions for these settings with runs. Runs give the first row, the best row, and
/// rows with out of memory errors.
fn predictions_equal_runs(row: &Row, settings: &[&str], python: &Path) -> Result<(), Failed> {
    let options = [&[row.options.as_str()], settings].concat();
    let predicted = many(&row.program, &options, python)?;
    let run = many(&row.program, &[&options, &["--fresh"][..]].concat(), python)?;
    let rows = |field: &str| {
        run.document["rows"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|row| row[field].as_u64())
            .collect::<Vec<_>>()
    };
    let ooms = rows("num_ooms").iter().filter(|ooms| **ooms > 0).count();
    let is_predicted =
        predicted.predicted + ooms + 2 >= settings.len() || predicted.unpredicted.is_string();
    if predicted.document == run.document && is_predicted && run.predicted == 0 {
        return Ok(());
    }
    Err(format!(
        "{} predictions: {:#}\ninstead of\n{:#}",
        predicted.predicted, predicted.document, run.document
    )
    .into())
}

const LEAST_OF_TRAIN: [&str; 2] = [
    "../../../../ci/pytest/train.py",
    "--memory 4GiB --least-memory",
];

fn four_runs_find_the_least_memory(python: &Path) -> Result<(), Failed> {
    let logs = tempfile::tempdir()?;
    let folder = format!("--logs={}", logs.path().display());
    let [program, options] = LEAST_OF_TRAIN;
    let found = many(
        program,
        &[&[options, folder.as_str()], &EIGHT[..]].concat(),
        python,
    )?;
    let runs = 1 + logs
        .path()
        .read_dir()?
        .filter_map(Result::ok)
        .filter(|file| file.path().extension() == Some("stdout".as_ref()))
        .count();
    let has_least = found.document["rows"]
        .as_array()
        .is_some_and(|rows| rows.len() == 8 && rows.iter().all(|row| row["least_memory"].is_u64()));
    if has_least && found.predicted == 7 && runs <= 4 {
        Ok(())
    } else {
        Err(format!("{runs} runs: {:#}", found.document).into())
    }
}

fn full_search_finds_the_same(python: &Path) -> Result<(), Failed> {
    let [program, options] = LEAST_OF_TRAIN;
    let options = [&[options], &EIGHT[..]].concat();
    let predicted = many(program, &options, python)?;
    let searched = many(program, &[&options, &["--fresh"][..]].concat(), python)?;
    if predicted.document == searched.document {
        return Ok(());
    }
    Err(format!(
        "{:#}\ninstead of\n{:#}",
        predicted.document, searched.document
    )
    .into())
}

fn two_environments_are_compared_by_line(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    std::fs::write(
        folder.path().join("grows.py"),
        "import os, torch\ntorch.ones(int(os.environ['ROWS']), 1024, device='cuda')\n",
    )?;
    for (name, rows) in [("old", 512), ("new", 1024)] {
        let wrapper = folder.path().join(name).join("python");
        std::fs::create_dir(folder.path().join(name))?;
        std::fs::write(
            &wrapper,
            format!(
                "#!/bin/sh\nROWS={rows} exec '{}' \"$@\"\n",
                python.display()
            ),
        )?;
        std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755))?;
    }
    let compare = |new: &str| {
        let mut command = harness();
        command.args([
            "exec",
            "--memory",
            "1GiB",
            "--python",
            "old/python",
            "--python",
            new,
            "--",
            "grows.py",
        ]);
        let output = command
            .current_dir(&folder)
            .env_remove("PYTORCH_ALLOC_CONF")
            .output()?;
        Ok::<_, Failed>((
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        ))
    };
    let (grown, same) = (compare("new/python")?, compare("old/python")?);
    let line = "grows.py:2 allocates 2 MiB more at the peak: 4 MiB instead of 2 MiB";
    let is_right = grown.0 == Some(1)
        && grown.1.contains(line)
        && same.0 == Some(0)
        && same.1.contains("no difference");
    if is_right {
        Ok(())
    } else {
        Err(format!("{grown:?}\n{same:?}").into())
    }
}

fn a_correct_recovery_survives_each_fault(python: &Path) -> Result<(), Failed> {
    let program = root().join("ci/pytest/train.py");
    let mut command = harness();
    command.args([
        "exec",
        "--memory",
        "4GiB",
        "--every-fault=sample:6",
        "--expect",
        "recovers",
        "--format",
        "json",
        "--",
    ]);
    let output = command
        .arg(python)
        .arg(&program)
        .env_remove("PYTORCH_ALLOC_CONF")
        .output()?;
    let document: Value = document_of(&output)?;
    let cases = document["cases"]
        .as_array()
        .ok_or("the document has no cases")?;
    let is_right = |case: &&Value| {
        let is_in_program = case["stack"][0]["file"]
            .as_str()
            .is_some_and(|file| Path::new(file).file_name() == program.file_name());
        is_in_program && case["outcome"] == "recovered" && case["holds_memory"] == false
    };
    if output.status.success() && cases.len() == 6 && cases.iter().filter(is_right).count() == 6 {
        return Ok(());
    }
    Err(format!("{:?}: {document:#}", output.status).into())
}

/// The document that a command prints. Without one, the error has the command's end.
fn document_of<T: DeserializeOwned>(output: &Output) -> Result<T, Failed> {
    serde_json::from_slice(&output.stdout).map_err(|error| {
        let errors = String::from_utf8_lossy(&output.stderr);
        format!("no document ({error}), {:?}:\n{errors}", output.status).into()
    })
}

/// Frameworks print more after the traceback, and Triton does at the end of a process.
fn ends_cleanly(
    python: &Path,
    launcher: &[&str],
    program: &str,
    faults: &str,
) -> Result<(), Failed> {
    let mut command = harness();
    command
        .args([
            "exec",
            "--memory",
            "1GiB",
            faults,
            "--expect",
            "ends-cleanly",
            "--format",
            "json",
            "--",
        ])
        .arg(python);
    command.args(launcher).arg(folder().join(program));
    if let Some(triton) = std::env::var_os(TRITON).filter(|_| launcher.is_empty()) {
        command.env("PYTHONPATH", triton);
    }
    let output = command.output()?;
    let document: Value = document_of(&output)?;
    let cases = document["cases"]
        .as_array()
        .ok_or("the document has no cases")?;
    let is_clean = |case: &Value| {
        case["is_clean_end"] == true
            && (case["outcome"] == "out_of_memory") == case["call"].is_null()
    };
    let is_right = cases.iter().any(|case| case["call"].is_null()) && cases.iter().all(is_clean);
    if output.status.success() && is_right {
        Ok(())
    } else {
        Err(format!("{:?}: {document:#}", output.status).into())
    }
}

fn library_errors(python: &Path) -> Result<(), Failed> {
    let mut command = harness();
    command.args([
        "exec",
        "--memory",
        "1GiB",
        "--every-fault",
        "--expect",
        "ends-cleanly",
        "--format",
        "json",
        "--",
    ]);
    let output = command
        .arg(python)
        .arg(folder().join("library_errors.py"))
        .output()?;
    let document: Value = document_of(&output)?;
    let cases = document["cases"]
        .as_array()
        .ok_or("the document has no cases")?
        .iter();
    let found: Vec<_> = cases
        .filter(|case| !case["call"].is_null())
        .map(|case| {
            let line = &case["stack"][0]["line"];
            [&case["call"], &case["outcome"], &case["is_clean_end"], line]
        })
        .collect();
    let expected: [[Value; 4]; 2] = [
        [
            "cublasCreate".into(),
            "recovered".into(),
            false.into(),
            6.into(),
        ],
        [
            "cusolverDnCreate".into(),
            "other_error".into(),
            true.into(),
            9.into(),
        ],
    ];
    let is_right = found.iter().map(|case| case.map(Clone::clone)).eq(expected);
    if output.status.success() && is_right {
        Ok(())
    } else {
        Err(format!("{:?}: {document:#}", output.status).into())
    }
}

fn documents_of_many_runs_name_their_doubts(python: &Path) -> Result<(), Failed> {
    let program = "import torch; torch.rand(65, device='cuda').sum().item(); '{n}'";
    let modes: [&[&str]; 4] = [
        &["--least-memory"],
        &["--every-fault=sample:1"],
        &["--alloc-conf", "", "--alloc-conf", "max_split_size_mb:32"],
        &["--largest", "n=1..1"],
    ];
    for mode in modes {
        let mut run = harness();
        run.args(["exec", "--memory", "1GiB", "--format", "json"]);
        run.args(mode).arg("--").arg(python);
        let run = run.args(["-c", program]).output()?;
        let text = String::from_utf8_lossy(&run.stdout);
        if !text.contains("uncomputed_reads") {
            return Err(format!("{mode:?} has no doubt: {run:?}").into());
        }
    }
    Ok(())
}

fn reads_of_random_numbers_are_named(python: &Path) -> Result<(), Failed> {
    documents_of_many_runs_name_their_doubts(python)?;
    reads_are_those_of_lines(python, "random_reads.py", &[], "# read")
}

fn saved_values_are_read_by_what_may_see_them(python: &Path) -> Result<(), Failed> {
    reads_are_those_of_lines(python, "saved_values.py", &[], "# read")
}

fn ranks_do_not_know_more_than_their_senders(python: &Path) -> Result<(), Failed> {
    reads_are_those_of_lines(python, "rank_reads.py", &["--devices", "2"], "# read")
}

/// Checks that each line of a program with this end, and no other, reads one value that nothing
/// computed.
fn reads_are_those_of_lines(
    python: &Path,
    program: &str,
    options: &[&str],
    end: &str,
) -> Result<(), Failed> {
    let (run, program) = (tempfile::tempdir()?, folder().join(program));
    let record = run.path().join("run.json");
    let mut command = harness();
    command
        .current_dir(&run)
        .args(["exec", "--memory", "1GiB"])
        .args(options)
        .arg("--record")
        .arg(&record)
        .arg("--");
    let output = command.arg(python).arg(&program).output()?;
    let record: Value = serde_json::from_slice(&std::fs::read(record)?)?;
    let text = std::fs::read_to_string(program)?;
    let lines = text.lines().zip(1_u64..);
    let expected: Vec<u64> = lines
        .filter(|(line, _)| line.ends_with(end))
        .map(|(_, number)| number)
        .collect();
    let processes = record["processes"].as_array().ok_or("it has processes")?;
    let frames = |process: &Value| process["uncomputed_reads_at"].as_array().cloned();
    let mut noted: Vec<u64> = processes
        .iter()
        .flat_map(|process| frames(process).unwrap_or_default())
        .filter_map(|frame| frame["line"].as_u64())
        .collect();
    noted.sort_unstable();
    let counts = processes.iter().map(|process| &process["uncomputed_reads"]);
    let count: u64 = counts.filter_map(Value::as_u64).sum();
    if output.status.success() && noted == expected && count == expected.len() as u64 {
        Ok(())
    } else {
        Err(format!("{count} at {noted:?} are noted, not {expected:?}: {output:?}").into())
    }
}

fn orders_of_addresses(python: &Path) -> Result<(), Failed> {
    let mut command = harness();
    command.args(["exec", "--addresses", "linux", "--addresses", "wsl", "--"]);
    let output = command
        .arg(python)
        .arg(folder().join("addresses.py"))
        .env_remove("PYTORCH_ALLOC_CONF")
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let interval =
        "The program reserves at most 1.18 GiB to 1.27 GiB, depending on the order of addresses.";
    let lines = [
        r#"{"peak": 1268776960}"#,
        interval,
        "(no settings): with addresses reuse: success, peak reserved +88 MiB.",
    ];
    if output.status.success() && lines.iter().all(|line| text.contains(line)) {
        Ok(())
    } else {
        Err(format!("{text}: {output:?}").into())
    }
}

/// One rank ends, calls something else, or waits in another communicator or in the store. A slow
/// recovery is no hang.
fn ranks_that_wait_forever(python: &Path) -> Result<(), Failed> {
    // One Python runs these one after another.
    const RECOVERIES: &str = "slow sleeps child ahead";
    let reduces = "rank 0 waits in all_reduce of 1024 float32 (number 2) at hangs.py:48 for rank 1";
    let of_cycle = |rank: usize| {
        let number = rank + 1;
        format!(
            "rank {rank} waits in all_reduce of 1024 float32 (number 2 of communicator {number}) \
             at hangs.py:37 for rank {}",
            1 - rank
        )
    };
    let cycle = [of_cycle(0), of_cycle(1)];
    let cases = [
        (RECOVERIES, ["", ""]),
        ("started", ["", ""]),
        (
            "oom",
            [
                "rank 1 has ended with exit code 1 and OutOfMemoryError at hangs.py:23",
                reduces,
            ],
        ),
        (
            "caught",
            [
                reduces,
                "rank 1 waits in broadcast of 1024 float32 with root 0 (number 2) at hangs.py:28 \
                 for rank 0 after an Out",
            ],
        ),
        ("fewer", [reduces, "rank 1 has ended with exit code 0"]),
        ("cycle", [&cycle[0], &cycle[1]]),
        (
            "sizes",
            [
                reduces,
                "rank 1 waits in all_reduce of 1025 float32 (number 2) at hangs.py:48 for rank 0",
            ],
        ),
        (
            "init",
            [
                "rank 0 waits in init_process_group at hangs.py:13 for rank 1",
                "rank 1 has not joined",
            ],
        ),
        (
            "killed",
            ["rank 0 waits in ", "rank 1 was killed by SIGKILL"],
        ),
        (
            "store",
            [
                reduces,
                "rank 1 waits in store.get at hangs.py:47 for rank 0",
            ],
        ),
        (
            "backward",
            [
                "rank 0 waits in backward at hangs.py:43 for rank 1",
                "rank 1 waits in store.get at hangs.py:47 for rank 0",
            ],
        ),
    ];
    let check = |(mode, values, lines): &(&str, &str, [&str; 2])| -> Result<(), String> {
        let mut command = harness();
        command.args([
            "exec",
            "--memory",
            "2GiB",
            "--devices",
            "2",
            "--values",
            values,
            "--",
        ]);
        command
            .arg(python)
            .arg(folder().join("hangs.py"))
            .args(mode.split(' '))
            .env_remove("PYTORCH_ALLOC_CONF");
        let output = command.output().map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.stderr);
        let is_right = match *mode {
            RECOVERIES | "started" => output.status.success(),
            "sizes" if *values == "copies" => {
                output.status.success() && text.contains("different sizes: rank ")
            }
            _ => output.status.code() == Some(124) && lines.iter().all(|line| text.contains(line)),
        };
        if is_right {
            Ok(())
        } else {
            Err(format!(
                "{mode} with {values}: {}: {lines:?} in {text}",
                output.status
            ))
        }
    };
    let of_both = cases
        .into_iter()
        .flat_map(|(mode, lines)| ["copies", "cpu"].map(|values| (mode, values, lines)));
    // Values change only what the collectives exchange.
    let with_values: &[&str] = if runs_all() {
        &["oom", "sizes"]
    } else {
        &["sizes"]
    };
    let runs: Vec<_> = of_both
        .filter(|(mode, values, _)| *values == "copies" || with_values.contains(mode))
        .collect();
    // Most of the time is that of waits.
    harness_base::parallel::in_parallel_by(6, &runs, check)?;
    Ok(())
}

fn each_rank_runs_out_of_memory(python: &Path) -> Result<(), Failed> {
    let mut command = harness();
    command.args([
        "exec",
        "--memory",
        "4GiB",
        "--devices",
        "2",
        "--every-fault=sample:4",
        "--expect",
        "ends-cleanly",
        "--format",
        "json",
        "--",
    ]);
    let output = command
        .arg(python)
        .arg(folder().join("ranks_recovery.py"))
        .env_remove("PYTORCH_ALLOC_CONF")
        .output()?;
    let document: Value = document_of(&output)?;
    let found: Vec<[&Value; 3]> = document["cases"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|case| [&case["rank"], &case["outcome"], &case["ranks"][0]])
        .collect();
    let waits = [
        "rank 0 waits in all_reduce of 4196352 float32 (number ",
        " at ranks_recovery.py:17 for rank 1",
    ];
    let is_right = |[rank, outcome, line]: &[&Value; 3]| match (rank.as_u64(), outcome.as_str()) {
        // The model does not fit.
        (Some(_), Some("out_of_memory")) => true,
        (Some(rank), Some("hang")) => {
            rank == 0
                || line
                    .as_str()
                    .is_some_and(|line| line.starts_with(waits[0]) && line.ends_with(waits[1]))
        }
        _ => false,
    };
    let hangs_of_last = found
        .iter()
        .filter(|[rank, outcome, _]| rank.as_u64() == Some(1) && *outcome == "hang")
        .count();
    if output.status.code() == Some(1)
        && found.len() == 4
        && found.iter().all(is_right)
        && hangs_of_last > 0
    {
        return Ok(());
    }
    Err(format!("{:?}: {document:#}", output.status).into())
}

/// The same command as in the GPU suite (`ci/bundle-run.sh`). The program fits into the GPU, but
/// not into its free memory.
fn a_correct_recovery_survives_on_a_squeezed_gpu(python: &Path) -> Result<(), Failed> {
    let harness = env!("CARGO_BIN_EXE_harness");
    let train = |rest: &[&str]| -> Result<(bool, String), Failed> {
        let mut command = Command::new(harness);
        command
            .args(["exec", "--memory", "16GiB", "--"])
            .args(rest)
            .arg(python)
            .arg(root().join("ci/pytest/train.py"))
            .arg("131072");
        let output = command.env_remove("PYTORCH_ALLOC_CONF").output()?;
        Ok((
            output.status.success(),
            String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
        ))
    };
    for (rest, rows, summary) in [
        (&[][..], "rows 131072\n", "0 out of memory errors"),
        (
            &[harness, "exec", "--leave-free", "4GiB", "--"],
            "rows 65536\n",
            "12 GiB taken of cuda:0, 4 GiB free at the start",
        ),
    ] {
        let (passed, output) = train(rest)?;
        if !passed || !output.contains(rows) || !output.contains(summary) {
            return Err(
                format!("{rest:?}: expected {rows:?} and {summary:?}, found {output}").into(),
            );
        }
    }
    Ok(())
}

/// Twelve blocks of 256 MiB wait for another stream. After the last one no request asks for the
/// event.
fn peaks_that_depend_on_timing(python: &Path) -> Result<(), Failed> {
    for (events, peak, waits) in [
        (
            "instant",
            "256 MiB",
            "waited 11 times for another stream, so peaks depend on timing: 256 MiB are reserved \
             by torch at the peak if the GPU keeps up with the host, 3 GiB if the host runs ahead \
             (a replay of the same requests)",
        ),
        (
            "synchronize",
            "3 GiB",
            "waited for another stream, so peaks depend on timing: these assume",
        ),
    ] {
        let mut command = harness();
        command
            .args(["exec", "--memory", "8GiB", "--events", events, "--"])
            .arg(python)
            .arg(folder().join("record_stream.py"));
        let shown = String::from_utf8_lossy(&command.output()?.stderr).into_owned();
        let waits = format!("freed memory {waits}");
        if !shown.contains(&format!("peak reserved {peak} ")) || !shown.contains(&waits) {
            return Err(format!("{events}: {shown}").into());
        }
    }
    for (program, why) in [
        (
            "record_stream.py",
            "freed memory waited 11 times for another stream, so peaks depend",
        ),
        (
            "polls.py",
            "the program asked whether the GPU had finished at polls.py:12, so peaks can depend",
        ),
    ] {
        let mut command = harness();
        command.args(["exec", "--memory", "8GiB", "--events", "range", "--"]);
        command.arg(python).arg(folder().join(program));
        let output = command.output()?;
        let shown = String::from_utf8_lossy(&output.stderr).into_owned();
        let range = format!(
            "{why} on timing: 256 MiB are held at the peak if the GPU keeps up with the host, \
             3 GiB if the host runs ahead"
        );
        if !shown.contains(&range) || String::from_utf8_lossy(&output.stdout).lines().count() > 1 {
            return Err(shown.into());
        }
    }
    Ok(())
}

/// Each peak equals that of a run with `--events synchronize`, unless the program makes other
/// requests then.
fn hosts_ahead(python: &Path) -> Result<(), Failed> {
    const INCOMPLETE: &str = "not all requests are recorded";
    /// MiB by device, of a host that keeps up and of one that runs ahead; or why they are unknown.
    type Peaks = Result<&'static [[u64; 2]], &'static str>;
    let cases: [(&str, Peaks); 18] = [
        ("gathers", Ok(&[[74, 554]])),
        ("thread", Ok(&[[74, 554]])),
        ("loader", Ok(&[[192, 336]])),
        ("pinned", Ok(&[[32, 128]])),
        ("window", Ok(&[[122, 122]])),
        ("polling", Ok(&[[64, 192]])),
        ("devices", Ok(&[[40, 80], [50, 200]])),
        ("streams", Ok(&[[24, 144]])),
        ("growing", Ok(&[[232, 384]])),
        ("emptied", Ok(&[[114, 188]])),
        ("recovered", Ok(&[[160, 320]])),
        ("limited", Ok(&[[64, 192]])),
        ("backward", Ok(&[[400, 560]])),
        (
            "relimited",
            Err("a replay does not follow its memory fraction"),
        ),
        ("resets", Err(INCOMPLETE)),
        ("history", Err(INCOMPLETE)),
        ("killed", Err(INCOMPLETE)),
        ("graph", Err("CUDA graphs or private pools defer frees too")),
    ];
    let programs = cases.map(|(case, _)| format!("host_ahead.py {case}"));
    let folder = tempfile::tempdir()?;
    let record = folder.path().join("run.json");
    let options = format!("--devices 2 --record {}", record.display());
    let (ended, output) = together(&options, &programs, &[], python)?;
    let record: Value = serde_json::from_slice(&std::fs::read(record)?)?;
    for ((case, expected), Ended { pid, code, .. }) in cases.iter().zip(ended) {
        let peaks = expected.ok().map(|peaks| {
            let mib = |(device, of): (usize, &[u64; 2])| {
                serde_json::json!({
                    "device": device, "least": of[0] << 20, "most": of[1] << 20,
                    "runs_out_of_memory": false,
                })
            };
            peaks.iter().enumerate().map(mib).collect::<Value>()
        });
        let processes = record["processes"].as_array();
        let process = processes.and_then(|all| all.iter().find(|one| one["pid"] == pid));
        let found = process.is_some_and(|process| {
            process.get("peaks_by_timing") == peaks.as_ref()
                && process["not_replayed"].as_str() == expected.err()
        });
        if !found || (code != 0) != (*case == "killed") {
            return Err(format!(
                "{case}, exit code {code}: expected {expected:?}, found {process:#?}\n\
                 alone: harness exec -- python host_ahead.py {case}\n{}",
                String::from_utf8_lossy(&output.stderr)
            )
            .into());
        }
    }
    peaks_of_hosts_ahead_are_said(python)
}

fn peaks_of_hosts_ahead_are_said(python: &Path) -> Result<(), Failed> {
    let ahead = "if the host runs ahead";
    for (case, options, expected) in [
        (
            "gathers",
            "--memory 4GiB",
            format!(
                "timing: 74 MiB are reserved by torch at the peak if the GPU keeps up with the \
                 host, 554 MiB {ahead} (a replay of the"
            ),
        ),
        (
            "devices",
            "--devices 2",
            format!(
                "timing: 40 MiB of device 0 are reserved by torch at the peak if the GPU keeps up \
                 with the host, 80 MiB {ahead}, 50 MiB of device 1 are reserved by torch at the \
                 peak if the GPU keeps up with the host, 200 MiB {ahead} (a replay of the"
            ),
        ),
        (
            "relimited",
            "--memory 80GiB",
            "runs ahead (not replayed: a replay does not follow its memory fraction)".to_owned(),
        ),
    ] {
        let mut command = command(options, &format!("host_ahead.py {case}"), python);
        let shown = String::from_utf8_lossy(&command.output()?.stderr).into_owned();
        if !shown.contains(&expected) {
            return Err(format!("{case} {options}: expected {expected}, found {shown}").into());
        }
    }
    Ok(())
}

/// Queries that CUDA refuses do not count, and those of other threads have their lines.
fn idle_streams(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let record = folder.path().join("run.json");
    for (events, cases) in [
        ("synchronize", &[("idle", 0, &[][..])][..]),
        (
            "instant",
            &[("idle", 0, &[]), ("busy", 9, &[]), ("thread", 0, &[80])],
        ),
    ] {
        let options = format!(
            "--memory 4GiB --events {events} --record {}",
            record.display()
        );
        let programs: Vec<String> = cases
            .iter()
            .map(|(case, ..)| format!("idle_streams.py {case}"))
            .collect();
        let (ended, output) = together(&options, &programs, &[], python)?;
        let record: Value = serde_json::from_slice(&std::fs::read(&record)?)?;
        let processes = record["processes"].as_array();
        for ((case, waits, lines), Ended { pid, code, .. }) in cases.iter().zip(ended) {
            let process = processes.and_then(|all| all.iter().find(|one| one["pid"] == pid));
            let is_right = process.is_some_and(|process| {
                let polls = process["polled_at"].as_array().into_iter().flatten();
                process["waits_of_frees"] == *waits
                    && polls.map(|frame| &frame["line"]).eq(lines.iter())
            });
            if code != 0 || !is_right {
                return Err(format!("{case} with {events}: {process:#?}\n{output:?}").into());
            }
        }
        let shown = String::from_utf8_lossy(&output.stderr);
        let is_noted = cases
            .iter()
            .any(|(_, waits, lines)| *waits > 0 || !lines.is_empty());
        if shown.contains("timing") != is_noted {
            return Err(format!("with {events}: {shown}").into());
        }
    }
    Ok(())
}

/// Each process has its own peak, and the last one a snapshot of its error.
fn killed_processes(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let [record, snapshot] = ["run.json", "oom.pickle"].map(|name| folder.path().join(name));
    let mut command = harness();
    command
        .args(["exec", "--memory", "4GiB", "--record"])
        .arg(&record)
        .arg("--snapshot")
        .arg(&snapshot)
        .arg("--");
    let output = command
        .arg(python)
        .arg(self::folder().join("killed.py"))
        .output()?;
    let [numbers, shown] =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let record: Value = serde_json::from_slice(&std::fs::read(record)?)?;
    let peak = |pid: &str| {
        let process = record["processes"].as_array()?.iter().find(|process| {
            process["pid"]
                .as_u64()
                .is_some_and(|found| found.to_string() == pid)
        })?;
        let stats = &process["torch"]["memory_stats"]["0"];
        Some((
            stats["allocated_bytes.all.peak"].as_u64()? >> 24,
            stats["num_ooms"].as_u64()?,
            process["torch"]["resets"].as_u64()?,
        ))
    };
    let found: Vec<_> = numbers
        .lines()
        .filter_map(|line| peak(line.split(' ').nth(1)?))
        .collect();
    let expected: Vec<_> = (1..=8)
        .map(|number| (number, u64::from(number == 8), u64::from(number % 2 == 0)))
        .collect();
    let of_error = "at an out-of-memory error, the last one that it wrote before it ended";
    // The GPU has memory of its own.
    if found != expected
        || record.get("machine_memory").is_some()
        || !shown.contains(of_error)
        || !shown.contains("asked for at killed.py:23 runs_out_of_memory")
    {
        return Err(format!("{found:?} instead of {expected:?}: {shown}").into());
    }
    Ok(())
}

/// `harness demo` shows this recording, and the README its table. The broken program ends with
/// OutOfMemoryError outside of its loop, and with another error in its first step.
fn a_broken_recovery_is_recorded_in_the_demo(python: &Path) -> Result<(), Failed> {
    let path = root().join("harness/cli/src/demo/broken_recovery.json");
    let options = "exec --memory 4GiB --every-fault=sample:4 --expect recovers --format json --";
    let output = harness()
        .args(options.split(' '))
        .arg(python)
        .arg("broken_recovery.py")
        .current_dir(folder())
        .env_remove("PYTORCH_ALLOC_CONF")
        .output()?;
    let recorded = String::from_utf8_lossy(&output.stdout);
    let folder = folder().canonicalize()?;
    let recorded = recorded.replace(&format!("{}/", folder.display()), "");
    if output.status.code() == Some(1) && std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, recorded)?;
    } else if output.status.code() != Some(1) || recorded != std::fs::read_to_string(path)? {
        let status = output.status;
        return Err(
            format!("{status}, and not as in the demo; UPDATE=1 renews it: {recorded}").into(),
        );
    }
    Ok(())
}

/// On the simulated GPU, measuring the listed convolutions gives their estimates, and the table of
/// them leaves none to list.
fn unmeasured_convolutions(python: &Path) -> Result<(), Failed> {
    let directory = tempfile::tempdir()?;
    let [listed, measured, none] =
        ["listed.tsv", "measured.tsv", "none.tsv"].map(|name| directory.path().join(name));
    let exec = |options: &[&OsStr], program: &[&Path]| -> Result<String, Failed> {
        let mut command = harness();
        command
            .args(["exec", "--gpu", "l4-24"])
            .args(options)
            .arg("--")
            .arg(python)
            .args(program)
            .env_remove("PYTORCH_ALLOC_CONF");
        let output = command.output()?;
        match output.status.success() {
            true => Ok(String::from_utf8(output.stdout)?),
            false => {
                Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)).into())
            }
        }
    };
    let (program, script) = (
        folder().join("convolutions.py"),
        root().join("harness/cli/src/calibrate/workspaces.py"),
    );
    let estimate = ["--cudnn-workspace".as_ref(), "estimate".as_ref()];
    exec(
        &[&estimate[..], &["--unmeasured".as_ref(), listed.as_ref()]].concat(),
        &[&program],
    )?;
    std::fs::write(&measured, exec(&estimate, &[&script, &listed])?)?;
    let (listed, found) = (
        std::fs::read_to_string(&listed)?,
        std::fs::read_to_string(&measured)?,
    );
    if listed.lines().count() < 20 || found.split_once('\n').map(|(_, rows)| rows) != Some(&listed)
    {
        return Err(format!("listed:\n{listed}\nmeasured:\n{found}").into());
    }
    let options = [
        "--cudnn-workspace".as_ref(),
        measured.as_ref(),
        "--unmeasured".as_ref(),
        none.as_ref(),
    ];
    exec(&options, &[&program])?;
    let rest = std::fs::read_to_string(&none)?;
    if rest.lines().count() == 1 {
        Ok(())
    } else {
        Err(format!("these are in the table: {rest}").into())
    }
}

/// The library requests the bytes that were measured on two GPUs, which are multiples of 512 there.
fn library_of_cudnn(python: &Path, library: &Path) -> Result<(), Failed> {
    for row in rows("expected.tsv").filter(|row| row.program == "workspaces.py") {
        let measured = row.figures.clone();
        let row = Row {
            options: row.options.replace("estimate", &library.to_string_lossy()),
            ..row
        };
        let output = run(&row, python, &[])?;
        let found: BTreeMap<String, Value> = document_of(&output)?;
        let bytes = |figure: &Value| figure.as_u64().unwrap_or(u64::MAX - 512);
        let is_measured = |(name, figure): (&String, &Value)| {
            bytes(figure).next_multiple_of(512) == bytes(&measured[name])
        };
        if !found.iter().all(is_measured) || found == measured {
            return Err(format!("{}: {measured:?} measured, {found:?} found", row.options).into());
        }
    }
    Ok(())
}

fn clusters(python: &Path, library: &Path) -> Result<(), Failed> {
    let mut row = rows("expected.tsv")
        .find(|row| row.program == "workspaces.py")
        .ok_or("no row has workspaces.py")?;
    for (gpu, has_bounds) in [("h100-80", true), ("rtx3090ti-24", false)] {
        row.options = format!("--gpu {gpu} --cudnn-workspace {}", library.display());
        let summary = String::from_utf8(run(&row, python, &[])?.stderr)?;
        if summary.contains("cuDNN's workspaces are estimates") != has_bounds {
            return Err(format!("{gpu}: {summary}").into());
        }
    }
    Ok(())
}

fn not_cudnn(python: &Path) -> Result<(), Failed> {
    let other = std::env::current_exe()?.with_file_name("libharness_allocator_abi.so");
    let options = format!("--gpu l4-24 --cudnn-workspace {}", other.display());
    let output = run(
        &Row {
            program: "convolutions.py".to_owned(),
            options,
            figures: BTreeMap::new(),
        },
        python,
        &[],
    )?;
    let errors = String::from_utf8(output.stderr)?;
    let count = |text: &str| errors.matches(text).count();
    let notes = (
        count(": it has no cudnnBackendCreateDescriptor;"),
        count("; cuDNN workspace sizes are estimates\n"),
    );
    if notes == (1, 1) {
        Ok(())
    } else {
        Err(errors.into())
    }
}

/// The events of an allocator, one per line. A block is located by the index of its segment, in
/// order of creation, and its offset.
fn events(snapshot: &Path) -> Result<Vec<String>, Failed> {
    let snapshot = Snapshot::read(snapshot)?;
    let mut segments: Vec<(u64, u64)> = Vec::new();
    let events = snapshot.traces.first().ok_or("the snapshot has no trace")?;
    let line = |event: &Event| {
        if event.action == Action::SegmentAlloc {
            segments.push((event.address, event.size.0));
        }
        let around = |&(start, size): &(u64, u64)| (start..start + size).contains(&event.address);
        let place = segments
            .iter()
            .rposition(around)
            .map(|index| (index, event.address - segments[index].0));
        format!(
            "{} of {} on {} at {place:?}",
            event.action.name(),
            event.size.0,
            event.stream
        )
    };
    Ok(events.iter().map(line).collect())
}

/// Runs `pluggable.py`, which writes a snapshot, with PyTorch's own allocator and with those of the
/// library.
fn pluggable(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let library = std::env::current_exe()?.with_file_name("libharness_allocator_abi.so");
    let pools = ["harness_caching", "harness_bfc", "harness_rmm_pool"];
    let snapshot = |name: &str| folder.path().join(name).with_extension("pickle");
    let program =
        |name: &str, rest: &str| format!("pluggable.py {}{rest}", snapshot(name).display());
    let of_library = |rest: &str| format!(" {} {rest}", library.display());
    let programs: Vec<String> = [
        program("native", ""),
        program("ours", &of_library("harness_caching change")),
    ]
    .into_iter()
    .chain(pools.map(|pool| program(pool, &of_library(&format!("{pool} pool")))))
    .collect();
    // The library records only if this is set.
    let recorded = [("HARNESS_ALLOCATOR_RECORD", "1")];
    let options = "--memory 8GiB --addresses up";
    let (ended, output) = together(options, &programs, &recorded, python)?;
    if let Some(failed) = ended.iter().find(|program| program.code != 0) {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {}\n{errors}", failed.program, failed.code).into());
    }
    decides_alike(&snapshot("native"), &snapshot("ours"))?;
    // PyTorch's allocator requests segments from the library. Null becomes the error that programs
    // expect.
    for (pool, program) in pools.iter().zip(&ended[2..]) {
        let segments = events(&snapshot(pool))?
            .iter()
            .filter(|line| line.starts_with("alloc "))
            .count();
        let printed = program.output.trim();
        if printed != "torch.OutOfMemoryError" || segments == 0 {
            return Err(
                format!("{pool}: {segments} requests; the program printed {printed}").into(),
            );
        }
    }
    Ok(())
}

/// With both allocators, the program makes the same requests and gets equal segments in the same
/// order, with equal blocks at the same offsets.
fn decides_alike(native: &Path, ours: &Path) -> Result<(), Failed> {
    let (native, ours) = (events(native)?, events(ours)?);
    let requests = native
        .iter()
        .filter(|line| line.starts_with("alloc "))
        .count();
    if requests < 500 {
        return Err(format!("{requests} requests are too few for a comparison").into());
    }
    if let Some(index) = native
        .iter()
        .zip(&ours)
        .position(|(native, ours)| native != ours)
    {
        return Err(format!(
            "event {index}: PyTorch has {}, the library {}",
            native[index], ours[index]
        )
        .into());
    }
    if native.len() != ours.len() {
        return Err(format!(
            "PyTorch has {} events, the library {}",
            native.len(),
            ours.len()
        )
        .into());
    }
    Ok(())
}

/// Runs a scenario with programs on the simulated device and on a GPU of 80 GiB. The driver and
/// NVML of that GPU are the simulated GPU's, which executes the kernels of the CUDA device. The
/// reports of the steps must be equal.
fn behaves_the_same_on_a_gpu(scenario: &str, allocator: &str, python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let wrapper = folder.path().join("python");
    std::fs::write(
        &wrapper,
        "#!/bin/sh\nHARNESS_GPU=\"$OF_PROGRAMS\" exec \"$PYTHON_OF_PROGRAMS\" \"$@\"\n",
    )?;
    std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755))?;
    let harness = env!("CARGO_BIN_EXE_harness");
    let run = [
        "run",
        &format!("scenarios/programs/{scenario}.yaml"),
        "--allocator",
        allocator,
        "--no-report",
        "--repeat",
        "1",
        "--format",
        "json",
        "--device",
    ];
    let mut simulated = Command::new(harness);
    simulated.args(run).arg("sim").env("HARNESS_PYTHON", python);
    let with_kernels = "OF_PROGRAMS=\"$HARNESS_GPU\" \
                        HARNESS_GPU=$(echo \"$HARNESS_GPU\" | sed 's/\"noop\"/\"execute\"/; \
                        s/\"processes\":false/\"processes\":true/') exec \"$@\"";
    let mut on_gpu = Command::new(harness);
    on_gpu
        .args(["exec", "--memory", "80GiB", "--python"])
        .arg(python)
        .args(["--", "sh", "-c", with_kernels, "sh", harness]);
    on_gpu
        .args(run)
        .arg("cuda:0")
        .env("HARNESS_PYTHON", &wrapper)
        .env("PYTHON_OF_PROGRAMS", python);
    let mut reports = Vec::new();
    for command in [&mut simulated, &mut on_gpu] {
        let output = command
            .current_dir(root())
            .env_remove("PYTORCH_ALLOC_CONF")
            .output()?;
        if !output.status.success() {
            let [out, err] =
                [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
            return Err(format!("{command:?} ended with {}\n{out}{err}", output.status).into());
        }
        let document: Value = document_of(&output)?;
        let steps = document["runs"]
            .as_array()
            .ok_or("the document has no runs")?
            .iter()
            .flat_map(|run| run["steps"].as_array().into_iter().flatten());
        reports.push(
            steps
                .map(|step| {
                    [&step["kind"], &step["reports"], &step["notes"]]
                        .map(Value::to_string)
                        .join(" ")
                })
                .collect::<Vec<_>>(),
        );
    }
    let programs = reports[0]
        .iter()
        .filter(|step| step.contains("peak reserved"))
        .count();
    if reports[0] == reports[1] && programs >= 2 {
        Ok(())
    } else {
        Err(format!("{programs} programs: {reports:#?}").into())
    }
}

/// Compares expected figures with the figures of a program.
fn compare(row: &Row, found: &BTreeMap<String, Value>) -> Result<(), Failed> {
    let wrong: Vec<String> = row
        .figures
        .iter()
        .filter(|(name, figure)| found.get(*name) != Some(figure))
        .map(|(name, figure)| {
            format!(
                "{name}: {figure} expected, {} found",
                found.get(name).unwrap_or(&Value::Null)
            )
        })
        .collect();
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(wrong.join("\n").into())
    }
}

/// Runs a program that prints its figures in its last line.
fn printed(row: &Row, python: &Path) -> Result<(), Failed> {
    let output = run(row, python, &[])?;
    calls_are_modelled(&output)?;
    has_figures(row, &String::from_utf8(output.stdout)?)
}

/// How a program ended that `together.py` ran.
#[derive(serde::Deserialize)]
struct Ended {
    program: String,
    pid: u32,
    code: i32,
    output: String,
}

/// Runs programs in forks of one Python.
fn together(
    options: &str,
    programs: &[String],
    variables: &[(&str, &str)],
    python: &Path,
) -> Result<(Vec<Ended>, Output), Failed> {
    let mut command = command(options, "together.py", python);
    command.envs(variables.iter().copied());
    let output = ended_well(command.args(programs))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let ended: Result<Vec<Ended>, _> = text.lines().map(serde_json::from_str).collect();
    let ended = ended?;
    if !ended.iter().map(|it| &it.program).eq(programs) {
        return Err(format!("{command:?} ran other programs: {text}").into());
    }
    Ok((ended, output))
}

/// Runs such programs in forks of one Python. An error has the command that runs the program alone.
fn printed_together(rows: &[Row], python: &Path) -> Result<(), Failed> {
    let programs: Vec<String> = rows.iter().map(|row| row.program.clone()).collect();
    let (ended, output) = together(&rows[0].options, &programs, &[], python)?;
    calls_are_modelled(&output)?;
    let mut wrong = String::new();
    for (row, Ended { code, output, .. }) in rows.iter().zip(ended) {
        let found = match code {
            0 => has_figures(row, &output),
            _ => Err(format!("exit code {code}").into()),
        };
        if let Err(error) = found {
            let why = error.message().unwrap_or_default();
            let options = arguments(&row.options).join(" ");
            let program = &row.program;
            wrong += &format!("{program}: {why}\nalone: harness {options} -- python {program}\n");
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    Err(format!("{wrong}{}", String::from_utf8_lossy(&output.stderr)).into())
}

fn calls_are_modelled(output: &Output) -> Result<(), Failed> {
    let summary = String::from_utf8_lossy(&output.stderr);
    match summary
        .lines()
        .find(|line| line.starts_with("not modelled"))
    {
        Some(names) => Err(format!("functions without a model were called: {names}").into()),
        None => Ok(()),
    }
}

/// Compares the figures in the last line of an output with the expected ones.
fn has_figures(row: &Row, output: &str) -> Result<(), Failed> {
    compare(
        row,
        &serde_json::from_str(output.lines().last().unwrap_or_default())?,
    )
}

/// Runs a program that writes its figures to a file.
fn recorded(row: &Row, python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let result = folder.path().join("result.json");
    run(row, python, &[("SNAP_RESULT", &result)])?;
    compare(
        row,
        &serde_json::from_str(&std::fs::read_to_string(result)?)?,
    )
}

/// A program that runs out of memory is reported, and completes with the recommended settings.
fn advised(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let harness = |arguments: &[&str]| {
        let mut command = harness();
        command
            .current_dir(folder.path())
            .args(arguments)
            .arg("--")
            .arg(python)
            .arg(self::folder().join("pinned.py"));
        command
            .env_remove("PYTORCH_ALLOC_CONF")
            .env_remove("PYTORCH_CUDA_ALLOC_CONF")
            .output()
    };
    let options = [
        "exec",
        "--memory",
        "1GiB",
        "--snapshot",
        "oom.pickle",
        "--report",
        "report.md",
        "--junit",
        "junit.xml",
    ];
    let failed = harness(&options)?;
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name));
    let (report, picture, junit) = (read("report.md")?, read("report.svg")?, read("junit.xml")?);
    let in_report = [
        "An out of memory error ended the program",
        "last = block(750)",
        "| cudaMalloc | 3 | 2 |",
        "report.svg",
        "pinned.py:12",
    ];
    let missing: Vec<&str> = in_report
        .into_iter()
        .filter(|words| !report.contains(words))
        .collect();
    if failed.status.code() != Some(1) || !missing.is_empty() {
        return Err(format!(
            "{:?}; missing: {missing:?}\n{report}\n{}",
            failed.status,
            String::from_utf8_lossy(&failed.stderr)
        )
        .into());
    }
    if !picture.contains("at most 300 MiB reserved")
        || !picture.contains("2 attempts refused")
        || !junit.contains("<failure")
    {
        return Err(format!("{picture}\n{junit}").into());
    }
    let verified = harness(&["advise", "oom.pickle", "--verify", "--format", "json"])?;
    let document: Value = serde_json::from_slice(&verified.stdout)?;
    let seen = &document["verified"];
    let (reserved, predicted) = (
        seen["peak_reserved_seen"].as_u64(),
        seen["peak_reserved_predicted"].as_u64(),
    );
    if verified.status.code() == Some(0)
        && seen["held"] == true
        && reserved.is_some()
        && reserved == predicted
    {
        return Ok(());
    }
    Err(format!(
        "{:?}: {seen:#}\n{}",
        verified.status,
        String::from_utf8_lossy(&verified.stderr)
    )
    .into())
}

/// The program resets the peaks.
fn only_host_memory(python: &Path) -> Result<(), Failed> {
    let program = "import torch; \
         pinned = torch.empty(100 << 20, dtype=torch.uint8, pin_memory=True); del pinned; \
         torch._C._host_emptyCache(); torch.cuda.init(); \
         torch.cuda.reset_peak_host_memory_stats(); \
         torch.cuda.reset_accumulated_host_memory_stats()";
    let run = |fault: &[&str]| {
        let mut run = harness();
        run.arg("exec").args(fault).arg("--").arg(python);
        run.args(["-c", program]).output()
    };
    let failed = "cudaHostAlloc: 1 failed, 1 of them injected by `--fail`";
    let peaks = "pinned host memory: peak allocated unknown, peak reserved 128 MiB; at the end \
         allocated unknown, reserved 0 B";
    let cases: [(&[&str], _, _); 2] =
        [(&[], 0, peaks), (&["--fail", "cudaHostAlloc:1"], 1, failed)];
    for (fault, code, is) in cases {
        let ran = run(fault)?;
        let text = String::from_utf8_lossy(&ran.stderr);
        let is_unused =
            text.contains("no process used") || text.contains("no memory was requested");
        if ran.status.code() != Some(code) || !text.contains(is) || is_unused {
            return Err(format!("{fault:?}: {ran:?}").into());
        }
    }
    let killed = format!(
        "{program}; torch.cuda.reset_peak_memory_stats(); import os; os.kill(os.getpid(), 9)"
    );
    let mut run = harness();
    run.arg("exec").arg("--").arg(python);
    let ran = run.args(["-c", &killed]).output()?;
    let kept = "peak reserved 128 MiB; later peaks are unknown";
    if !String::from_utf8_lossy(&ran.stderr).contains(kept) {
        return Err(format!("killed: {ran:?}").into());
    }
    Ok(())
}

/// `harness exec` and `harness.observe` write snapshots of the same error.
fn pinned_host_memory(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let mut command = harness();
    command
        .args([
            "exec",
            "--memory",
            "1GiB",
            "--snapshot",
            "exec.pickle",
            "--",
        ])
        .arg(python)
        .args(["-m", "harness.observe"]);
    command
        .env("PYTHONPATH", root().join("harness/cli/python"))
        .env("HARNESS_OBSERVE_DIR", "observed");
    let ended = command
        .arg(self::folder().join("host_memory.py"))
        .current_dir(&folder)
        .output()?;
    let observed = std::fs::read_dir(folder.path().join("observed"))?
        .next()
        .ok_or("harness.observe wrote no snapshot")??
        .path();
    for (snapshot, is_known) in [
        ("exec.pickle".into(), true),
        (observed, true),
        ("plain.pickle".into(), false),
    ] {
        let explained = Command::new(env!("CARGO_BIN_EXE_harness"))
            .arg("explain")
            .arg(&snapshot)
            .current_dir(&folder)
            .output()?;
        let shown = String::from_utf8_lossy(&explained.stdout);
        let figures = "pinned host memory at the time of the snapshot, besides the figures above: ";
        let is_shown = shown.contains(figures)
            && shown.contains("allocated unknown, reserved 160 MiB (peak allocated unknown")
            && shown.contains("peak reserved 160 MiB)");
        if is_shown != is_known || shown.contains("pinned host memory") != is_known {
            return Err(format!("{}: {shown}\n{ended:?}", snapshot.display()).into());
        }
    }
    Ok(())
}

fn engine(python: &Path) -> Result<(), Failed> {
    let mut command = harness();
    let output = command
        .args(["exec", "--memory", "12GiB", "--"])
        .arg(python)
        .arg(folder().join("engine.py"))
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let lines = [
        "peak allocated 4.00 MiB",
        "vLLM: requested 11 GiB of 12 GiB; weights 3 GiB; buffers and libraries 1 GiB; activations \
         in the profile run 1 GiB; \
         CUDA graphs 256 MiB (512 MiB estimated); KV cache 5 GiB (1000 blocks of 16 tokens); free \
         after the start 11.98 GiB",
        "SGLang: requested 9 GiB of 12 GiB; weights 8 MiB; buffers and libraries 10 MiB; CUDA \
         graphs 2 MiB; \
         KV cache 0 B (64 blocks of 64 tokens); free after the start 11.98 GiB",
        "FlashInfer 0.8.1 may differ from a run on a real GPU (tested: 0.7.2.post1)\n",
        "CuTe DSL of unknown version may differ from a run on a real GPU (tested: 4.8.0)\n",
    ];
    let missing: Vec<&str> = lines
        .into_iter()
        .filter(|line| !text.contains(line))
        .collect();
    // The tested version has no line.
    if output.status.success() && missing.is_empty() && !text.contains("vLLM 0.33.0") {
        Ok(())
    } else {
        Err(format!("missing: {missing:?}\n{text}").into())
    }
}

fn peers(python: &Path) -> Result<(), Failed> {
    // As torch.cuda.can_device_access_peer, without the import of torch.
    let program = "import ctypes; runtime, can = ctypes.CDLL('libcudart.so.13'), ctypes.c_int()\n\
         for peer in 0, 1:\n    \
         runtime.cudaDeviceCanAccessPeer(ctypes.byref(can), 0, peer); print(can.value)";
    let printed = |gpu: &str| {
        harness()
            .args(["exec", "--gpu", gpu, "--devices", "2", "--"])
            .arg(python)
            .args(["-c", program])
            .output()
    };
    let (of_center, of_desk) = (printed("a40-48")?.stdout, printed("rtx4090-24")?.stdout);
    let is_right = of_center == b"0\n1\n" && of_desk == b"0\n0\n";
    if is_right {
        Ok(())
    } else {
        Err(String::from_utf8([of_center, of_desk].concat())?.into())
    }
}

/// Runs shared_startup.py for a report with options of `harness exec`. Returns its output and what
/// the record has of the machine's memory.
fn startup(
    python: &Path,
    report: &str,
    options: &str,
) -> Result<(Output, BTreeMap<String, Value>), Failed> {
    let folder = tempfile::tempdir()?;
    let record = folder.path().join("record.json");
    let output = harness()
        .arg("exec")
        .args(options.split(' '))
        .arg("--record")
        .arg(&record)
        .arg("--")
        .arg(python)
        .arg(self::folder().join("shared_startup.py"))
        .arg(report)
        .env_remove("PYTORCH_ALLOC_CONF")
        .env_remove("PYTORCH_CUDA_ALLOC_CONF")
        .output()?;
    let record: Value = serde_json::from_slice(&std::fs::read(record)?)?;
    let memory = record.get("machine_memory").cloned();
    let memory = memory.map_or(Ok(BTreeMap::new()), serde_json::from_value)?;
    Ok((output, memory))
}

/// The reports name the phase in which the host hung. Without a limit by the host's memory, each
/// start succeeds.
fn starts_that_hung_a_machine(python: &Path) -> Result<(), Failed> {
    let small = "--gpu gb10-128 --memory 3830MiB";
    for (report, options, phase) in [
        ("46307", small, "profile_run"),
        ("56824", small, "capture_graphs"),
        ("55569", "--gpu gb10-128", "prefill"),
    ] {
        let (output, memory) = startup(python, report, options)?;
        let text = String::from_utf8_lossy(&output.stderr);
        let stack = memory.get("short").map(|short| short["stack"].clone());
        let frames = stack.as_ref().and_then(Value::as_array);
        let mut names = frames.into_iter().flatten().map(|frame| &frame["name"]);
        let shown = ", called at shared_startup.py:";
        if !output.status.success()
            || !names.any(|name| name == phase)
            || !text.contains("short of memory at shared_startup.py:")
            || !text.contains(shown)
        {
            return Err(
                format!("{report}: no lack of memory in {phase}: {stack:?}\n{text}").into(),
            );
        }
    }
    let expandable = "--gpu gb10-128 --alloc-conf expandable_segments:True";
    let (output, memory) = startup(python, "55569", expandable)?;
    if !output.status.success() || !memory.contains_key("most") || memory.contains_key("short") {
        return Err(format!("the workaround of the report does not help: {memory:?}").into());
    }
    // If the host's memory counts, the request fails.
    let resident = format!("{small} --shared-memory resident");
    let (output, _) = startup(python, "56824", &resident)?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(1)
        && text.contains("in capture_graphs")
        && text.contains("OutOfMemoryError")
    {
        Ok(())
    } else {
        Err(format!("no request fails in capture_graphs:\n{text}").into())
    }
}

fn psutil_reports_the_memory_of_the_machine(python: &Path) -> Result<(), Failed> {
    // The test needs no psutil: the hook changes any module of this name.
    let folder = tempfile::tempdir()?;
    let module = "import collections\nmemory = collections.namedtuple('svmem', 'total available \
         percent used free cached')\ndef virtual_memory():\n    return memory(1, 1, 1, 1, 1, 1)\n";
    std::fs::write(folder.path().join("psutil.py"), module)?;
    let program = "import ctypes, psutil; from ctypes import byref\n\
         c, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_void_p(); c.cuInit(0)\n\
         c.cuDevicePrimaryCtxRetain(byref(context), 0); c.cuCtxSetCurrent(context)\n\
         c.cuMemAlloc_v2(byref(ctypes.c_uint64()), ctypes.c_size_t(1 << 30))\n\
         print(*psutil.virtual_memory())";
    let printed = |gpu: &str| {
        let mut command = harness();
        command
            .args(["exec", "--gpu", gpu, "--memory", "4GiB", "--"])
            .arg(python)
            .args(["-c", program])
            .env("PYTHONPATH", folder.path());
        command.output()
    };
    let (shared, own) = (printed("gb10-128")?, printed("h100-80")?);
    let free = 3_u64 << 30;
    let expected = format!("{} {free} 25.0 {} {free} 0\n", 4_u64 << 30, 1 << 30);
    if shared.stdout == expected.as_bytes() && own.stdout == b"1 1 1 1 1 1\n" {
        Ok(())
    } else {
        Err(format!("{shared:?}\n{own:?}").into())
    }
}

fn hook_stays(python: &Path) -> Result<(), Failed> {
    let program = "import torch; print(torch.ones(3, device='cuda').sum().item())";
    for change in ["PYTHONPATH=.", "PYTHONPATH=", "--unset=PYTHONPATH"] {
        let mut command = harness();
        let output = command
            .args(["exec", "--values", "cpu", "--", "env", change])
            .arg(python)
            .args(["-c", program])
            .output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        if output.stdout != b"3.0\n" || !text.contains("peak allocated") {
            return Err(format!("{change}: {output:?}").into());
        }
    }
    Ok(())
}

fn error_of_values(python: &Path) -> Result<(), Failed> {
    let program = "import torch; print(torch.distributions.Categorical(torch.ones(100, \
         device='cuda')).sample().item() < 100)";
    let exec = |options: &[&str]| {
        let mut command = harness();
        command
            .arg("exec")
            .args(options)
            .arg("--")
            .arg(python)
            .args(["-c", program])
            .output()
    };
    let (again, once) = (exec(&[])?, exec(&["--values", "zeros"])?);
    let text = String::from_utf8_lossy(&again.stderr);
    let is_right = again.status.success()
        && again.stdout == b"True\n"
        && text.contains("it runs again with `--values cpu`");
    if is_right && once.status.code() == Some(1) && once.stdout.is_empty() {
        Ok(())
    } else {
        Err(format!("{again:?}\n{once:?}").into())
    }
}

fn a_failing_hook(python: &Path, values: &str) -> Result<(), Failed> {
    let run = |arguments: &[&str]| {
        harness()
            .args(["exec", "--values", values, "--"])
            .arg(python)
            .arg(folder().join("failing_hook.py"))
            .args(arguments)
            .output()
    };
    let (each, all) = (run(&[])?, run(&["end"])?);
    let is_unchanged = each.status.success()
        && each
            .stdout
            .starts_with(b"0 parts change what the program sees; at least ");
    let text = String::from_utf8_lossy(&all.stderr);
    let ends = all.status.code() == Some(3) && all.stdout == b"the program ends\n";
    let is_noted = String::from_utf8_lossy(&each.stderr).contains("the hook of harness failed");
    if is_unchanged && ends && is_noted && !text.contains("Traceback") {
        Ok(())
    } else {
        Err(format!("{each:?}\n{all:?}").into())
    }
}

fn without_torch(python: &Path) -> Result<(), Failed> {
    let program = "import ctypes; from ctypes import byref; c = ctypes.CDLL('libcuda.so.1')\n\
         context, address = ctypes.c_void_p(), ctypes.c_uint64(); print(c.cuInit(0))\n\
         c.cuDevicePrimaryCtxRetain(byref(context), 0); c.cuCtxSetCurrent(context)\n\
         c.cuMemAlloc_v2(byref(address), ctypes.c_size_t(1 << 20))\n\
         print(c.cuGetExportTable(byref(context), b'0' * 16))";
    let no_hook = "Python did not start the hook of harness, as with its options -I, -E and -S";
    for (options, reason) in [
        (
            &["-c"][..],
            "the process imported no library that reports statistics",
        ),
        (&["-I", "-c"], no_hook),
        (&["-E", "-c"], no_hook),
        (&["-S", "-c"], no_hook),
    ] {
        let output = harness()
            .args(["exec", "--"])
            .arg(python)
            .args(options)
            .arg(program)
            .output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        let is_listed =
            text.contains("not supported\", other libraries success): cuGetExportTable");
        if output.stdout != b"0\n801\n" || !text.contains(reason) || !is_listed {
            return Err(format!("{options:?}: {output:?}").into());
        }
    }
    let output = harness()
        .args(["exec", "--"])
        .arg(python)
        .args(["-I", "-c", "import torch; torch.ones(4, device='cuda')"])
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let expected =
        format!("torch: peak allocated 512 B, 0 retries, 0 out of memory errors; {no_hook}");
    if text.contains(&expected) {
        Ok(())
    } else {
        Err(format!("{output:?}").into())
    }
}

fn unknown_torch(python: &Path) -> Result<(), Failed> {
    let missing = "not adapted: values of small tensors";
    for (version, value, is_missing) in [("2.15.0", "3.0\n", false), ("9.9.0", "0.0\n", true)] {
        let program = format!(
            "import torch; torch.__version__ = torch.torch_version.TorchVersion('{version}'); \
             print(torch.ones(3, device='cuda').sum().item())"
        );
        let output = harness()
            .args(["exec", "--"])
            .arg(python)
            .args(["-c", &program])
            .output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        let is_said = [missing, "not adapted"].map(|words| text.contains(words));
        if output.stdout != value.as_bytes() || is_said != [is_missing; 2] {
            return Err(format!("{version}: {output:?}").into());
        }
    }
    Ok(())
}

fn own_open_and_threads(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let program = "import builtins, sys, threading, torch; del sys.stderr; builtins.open = None; \
         print(torch.ones(3, device='cuda').sum().item(), threading.active_count())";
    let output = harness()
        .args(["exec", "--report"])
        .arg(folder.path().join("report.md"))
        .arg("--")
        .arg(python)
        .args(["-c", program])
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let figures = "peak allocated 1 KiB, 0 retries, 0 out of memory errors\n";
    let is_failed = ["the hook of harness", "or could not write"].map(|it| text.contains(it));
    if output.stdout == b"3.0 1\n" && text.contains(figures) && is_failed == [false; 2] {
        Ok(())
    } else {
        Err(format!("{output:?}").into())
    }
}

fn names_that_are_no_text(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join(OsStr::from_bytes(b"caf\xe9.py"));
    let program = "import ctypes, mmap, torch\n\
        ctypes.CDLL(None).prctl(15, b'caf\\xe9')\n\
        file = open(b'caf\\xe9', 'wb+')\n\
        file.truncate(8192)\n\
        mapped = mmap.mmap(file.fileno(), 8192)\n\
        x = torch.empty(100 << 20, dtype=torch.uint8, device='cuda')\n\
        x[5].item()\n\
        open(b'missing/caf\\xe9')\n";
    std::fs::write(&script, program)?;
    let mut command = harness();
    command.current_dir(folder.path()).args(["exec", "--"]);
    let output = command.arg(python).arg(&script).output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let expected = [
        "peak allocated 100 MiB, 0 retries, 0 out of memory errors, unless",
        "1 read, at caf?.py:7",
        "writes caf?",
    ];
    let is_missing = |words: &&str| !text.contains(*words);
    let missing: Vec<&str> = expected.into_iter().filter(is_missing).collect();
    if missing.is_empty() && !text.contains("the hook of harness") {
        Ok(())
    } else {
        Err(format!("lacks {missing:?}: {text}").into())
    }
}

/// Modes of `effects.py` without an effect outside of the processes of the program: it runs again.
const REPEATED: [&str; 8] = [
    "nothing",
    "temporary",
    "temporary_after_use",
    "python",
    "python_after_use",
    "workers",
    "reads_file",
    "exit",
];
/// Modes with an effect, in the words of the message. The program does not run again.
const ONCE: [(&str, &str); 17] = [
    ("writes", "writes log.txt"),
    ("saves", "writes model.pt"),
    ("saves_after_use", "writes model.pt"),
    ("traces", "writes trace.json"),
    ("observes", "writes execution.json"),
    ("shares", "writes shared.bin"),
    ("stores", "writes shared.bin"),
    ("meets", "writes store"),
    ("scripts", "writes script.pt"),
    ("scripts_for_phones", "writes phone.ptl"),
    ("removes", "removes old.txt"),
    ("removes_after_use", "removes old.txt"),
    ("socket", "opens a socket to 127.0.0.1:0"),
    ("starts", "starts true"),
    ("starts_after_use", "starts true"),
    ("child", "writes child.txt"),
    ("isolated", "starts "),
];
/// Modes whose runs are not repeated for another reason than an effect that the hook notes.
const WHOLE: [(&str, &str); 5] = [
    ("input", "it has read its standard input"),
    ("input_after_use", "it has read its standard input"),
    ("shell", "it begins with another program than Python"),
    (
        "shell_becomes_python",
        "it begins with another program than Python",
    ),
    ("no_read", ""),
];
/// Modes whose whole runs are tested on each change. Of the others, the effects are tested, and the
/// whole runs every night.
const RUN: [&str; 8] = [
    "temporary_after_use",
    "workers",
    "exit",
    "saves_after_use",
    "child",
    "input_after_use",
    "shell_becomes_python",
    "no_read",
];

fn effects(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let modes = || REPEATED.into_iter().chain(ONCE.map(|(mode, _)| mode));
    for mode in modes().chain(WHOLE.map(|(mode, _)| mode)) {
        for place in ["noted", "run"].map(|kind| folder.path().join(kind).join(mode)) {
            std::fs::create_dir_all(&place)?;
            std::fs::write(place.join("old.txt"), "")?;
        }
    }
    let mut noted = harness();
    noted.current_dir(folder.path().join("noted"));
    noted
        .args(["exec", "--"])
        .arg(python)
        .arg(self::folder().join("effects.py"));
    let noted: BTreeMap<String, Vec<String>> = document_of(&noted.args(modes()).output()?)?;
    let found = |mode: &str| noted[mode].iter().map(String::as_str).collect::<Vec<_>>();
    for mode in REPEATED {
        if !found(mode).is_empty() {
            return Err(format!("{mode}: {:?} is no effect", found(mode)).into());
        }
    }
    for (mode, effect) in ONCE {
        if !matches!(found(mode)[..], [text] if text.starts_with(effect)) {
            return Err(format!("{mode}: expected {effect:?}, found {:?}", found(mode)).into());
        }
    }
    let mut cases: Vec<_> = REPEATED
        .into_iter()
        .map(|mode| (mode, None))
        .chain(
            ONCE.into_iter()
                .chain(WHOLE)
                .map(|(mode, why)| (mode, Some(why))),
        )
        .collect();
    let is_mode = |mode: &&str| cases.iter().any(|(other, _)| other == mode);
    assert!(RUN.iter().all(is_mode), "{RUN:?}");
    cases.retain(|(mode, _)| runs_all() || RUN.contains(mode));
    let check = |(mode, why): &(&str, Option<&str>)| {
        has_effect(python, &folder.path().join("run").join(mode), mode, *why)
    };
    harness_base::parallel::in_parallel_by(4, &cases, check)?;
    Ok(())
}

/// Runs a program with an effect in a folder; `why` says why it does not run again.
fn has_effect(python: &Path, place: &Path, mode: &str, why: Option<&str>) -> Result<(), String> {
    let mut command = harness();
    command
        .current_dir(place)
        .env_remove("HARNESS_VALUES")
        .args(["exec", "--"]);
    match mode {
        "shell" => command.args(["sh", "-c", "echo x >> log.txt; \"$@\"; exit $?", "sh"]),
        "shell_becomes_python" => command.args(["sh", "-c", "exec \"$@\"", "sh"]),
        _ => &mut command,
    };
    if mode.starts_with("input") {
        let input = std::fs::write(place.join("input.txt"), "a line\n")
            .and_then(|()| std::fs::File::open(place.join("input.txt")));
        command.stdin(input.map_err(|error| error.to_string())?);
    }
    let output = command
        .arg(python)
        .arg(folder().join("effects.py"))
        .arg(mode)
        .output()
        .map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stderr);
    let (ends_well, begins_again) = (
        output.status.success(),
        text.contains("it runs again with `--values cpu`"),
    );
    let is_right = match why {
        None => ends_well && begins_again && output.stdout.ends_with(b"trained on 699\n"),
        Some(why) => !ends_well && !begins_again && text.contains(why),
    };
    if is_right {
        Ok(())
    } else {
        Err(format!("{mode}: {output:?}"))
    }
}

fn baseline(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let (file, junit) = (
        folder.path().join("peaks.json"),
        folder.path().join("junit.xml"),
    );
    std::fs::write(
        folder.path().join("train.py"),
        "import sys, torch\nmodel = torch.nn.Linear(1024, 4096).cuda()\n\n\ndef step(rows):\n    \
         loss = model(torch.ones(rows, 1024, device='cuda')).square().mean()\n    \
         loss.backward()\n\n\nfor _ in range(2):\n    step(int(sys.argv[1]))\n",
    )?;
    std::fs::write(
        folder.path().join("any_size.py"),
        "import os, torch\ntorch.ones(1 + int.from_bytes(os.urandom(2)), 512, device='cuda')\n",
    )?;
    let exec = |options: &[&str], program: &[&str]| {
        let mut command = harness();
        command
            .args(["exec", "--memory", "4GiB", "--baseline", "peaks.json"])
            .args(options)
            .arg("--")
            .arg(python)
            .args(program);
        let output = command
            .current_dir(&folder)
            .env_remove("PYTORCH_ALLOC_CONF")
            .env_remove("PYTORCH_CUDA_ALLOC_CONF")
            .env("GITHUB_ACTIONS", "true")
            .env(
                "GITHUB_WORKSPACE",
                folder.path().parent().unwrap_or(Path::new("/")),
            )
            .output()?;
        Ok::<_, Failed>((
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        ))
    };
    let train = &["train.py", "1024"];
    let written = exec(&["--update"], train)?;
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    if written.0 != Some(0) || !text.contains("\"train.py:6 step\": ") {
        return Err(format!("{written:?}\n{text}").into());
    }
    let same = exec(&[], train)?;
    if same.0 != Some(0) || !same.1.contains("baseline: no difference from peaks.json") {
        return Err(format!("{same:?}").into());
    }
    let options = "--junit junit.xml --code-quality lines.json --sarif lines.sarif";
    let options: Vec<&str> = options.split(' ').collect();
    let more = exec(&options, &["train.py", "1025"])?;
    let case = std::fs::read_to_string(&junit)?;
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name));
    let lines = [read("lines.json")?, read("lines.sarif")?];
    let named = "train.py:6 step allocates 20 KiB more at the peak: 53.02 MiB instead of 53.00 MiB";
    let random = exec(&["--update"], &["any_size.py"])?;
    let first = "the program is not deterministic: after 0 allocations, process 1 allocates ";
    let is_right = more.0 == Some(1)
        && [&more.1, &case].iter().all(|text| text.contains(named))
        && more.1.contains("3 further runs have the same figures")
        && more
            .1
            .contains("/train.py,line=6,title=GPU memory::train.py:6 step allocates")
        && lines
            .iter()
            .all(|text| text.contains(named) && text.contains("/train.py\""))
        && lines[0].contains("\"begin\": 6")
        && lines[1].contains("\"startLine\": 6")
        && random.0 == Some(1)
        && random.1.contains(first)
        && random.1.contains(" at any_size.py:2;")
        && std::fs::read_to_string(&file)? == text;
    if is_right {
        Ok(())
    } else {
        Err(format!("{more:?}\n{case}\n{lines:?}\n{random:?}").into())
    }
}

/// Snapshots with the addresses of the program's tensors, which are then removed: both must have
/// the same categories, to the byte.
fn categories(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let program = self::folder().join("categories.py");
    let models = [
        "transformer",
        "transformer_bf16",
        "checkpointed",
        "convolutions",
        "lstm",
        "kept_gradients",
        "own",
        "own_cpp",
        "accumulated",
        "adapters",
        "averaged",
        "hooks",
        "parallel",
        "late",
        "late_cpp",
    ];
    let mut command = harness();
    let ended = command
        .args(["exec", "--memory", "8GiB", "--"])
        .arg(python)
        .arg(&program)
        .arg(folder.path())
        .args(models)
        .output()?;
    if !ended.status.success() {
        return Err(String::from_utf8_lossy(&ended.stderr).into_owned().into());
    }
    for model in models {
        for moment in ["forward", "backward", "step", "zero_grad"] {
            let mut snapshot =
                Snapshot::read(&folder.path().join(format!("{model}-{moment}.pickle")))?;
            let found = |snapshot: &Snapshot| {
                let explanation = causes::explain(
                    snapshot,
                    0,
                    Options {
                        at: At::End,
                        ..Options::default()
                    },
                );
                let categories = explanation.map(|explanation| explanation.categories);
                categories.map(|all| {
                    all.into_iter()
                        .map(|of| (of.category, (of.bytes, of.blocks)))
                        .collect::<BTreeMap<_, _>>()
                })
            };
            let recorded = found(&snapshot)?;
            if snapshot.extra == ExtraId::NONE {
                return Err(format!(
                    "{model}, {moment}: the snapshot does not name the program's tensors"
                )
                .into());
            }
            snapshot.extra = ExtraId::NONE;
            let derived = found(&snapshot)?;
            let of = |category: &str| {
                recorded
                    .get(category)
                    .map_or(Bytes::ZERO, |&(bytes, _)| bytes)
            };
            let has_all = ["parameters", "gradients", "optimizer_state"]
                .iter()
                .all(|category| of(category) > Bytes::ZERO);
            if derived != recorded || (moment == "step" && !has_all) {
                return Err(format!(
                    "{model}, {moment}: derived {derived:?}, recorded {recorded:?}"
                )
                .into());
            }
        }
    }
    Ok(())
}
