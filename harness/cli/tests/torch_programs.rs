//! Unmodified PyTorch programs on simulated GPUs, by `harness exec`: each prints what is recorded of it, to the byte.
//!
//! The programs lie in `programs/`: small ones with what they print, and larger ones of which PyTorch was recorded. The Python to run them is named by
//! [`PYTHON`] and has torch 2.11.0 for CUDA 13, without or with NVIDIA's packages: `ci/torch` makes one. Where none is named, the tests are
//! shown as ignored, with the reason.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use harness_trace::snapshot::{Action, Event, Snapshot};
use libtest_mimic::{Arguments, Failed, Trial};
use serde_json::Value;

/// The variable that names a Python with torch.
const PYTHON: &str = "HARNESS_TEST_PYTHON";

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let python = std::env::var_os(PYTHON).map(PathBuf::from);
    if python.is_none() && !arguments.list {
        eprintln!("programs: ignored, {PYTHON} names no Python with torch 2.11.0; `ci/torch` makes one and prints its path");
    }
    let mut trials = rows("expected.tsv").map(|row| trial(row, &python, printed)).collect::<Vec<_>>();
    trials.extend(rows("recorded.tsv").map(|row| trial(row, &python, recorded)));
    let limited = ["halve_on_oom.py", "mlp_adam.py", "retry.py"];
    let is_limited = |row: &Row| limited.contains(&row.program.as_str()) && !row.options.contains("--values");
    trials.extend(rows("expected.tsv").filter(is_limited).map(|mut row| {
        row.options.insert_str(0, LIMITED);
        trial(row, &python, printed)
    }));
    trials.push(runs_of("a correct recovery survives each fault", &python, a_correct_recovery_survives_each_fault));
    trials.push(runs_of("a broken recovery is told as the README shows it", &python, a_broken_recovery_is_told_as_the_readme_shows_it));
    trials.push(runs_of("a correct recovery goes on where a GPU is squeezed", &python, a_correct_recovery_goes_on_where_a_gpu_is_squeezed));
    trials.push(of_library("pluggable.py: the library decides as PyTorch's own allocator does", decides_alike, &python));
    trials.push(of_library(
        "pluggable.py: out of memory in a pool of the library is PyTorch's own error",
        out_of_memory_in_a_pool,
        &python,
    ));
    trials.push(of_python("pinned.py is verified with the advice on it, and reported", &python, advised));
    for scenario in ["batch_beside_server", "halve_batch"] {
        let check = move |python: &Path| does_the_same_on_a_gpu(scenario, python);
        trials.push(of_python(&format!("scenarios/programs/{scenario}.yaml does the same on a GPU"), &python, check));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A program with its arguments, options of `harness exec`, and the figures that are expected of it.
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
    let text = std::fs::read_to_string(folder().join(file)).expect("the table is part of the project");
    let lines: Vec<String> = text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect();
    lines.into_iter().map(|line| {
        let fields: Vec<&str> = line.split('\t').collect();
        let [program, options, figures] = fields[..] else { panic!("a row has three fields: {line}") };
        let figures = serde_json::from_str(figures).expect("figures are JSON");
        Row { program: program.to_owned(), options: options.to_owned(), figures }
    })
}

fn of_python(name: &str, python: &Option<PathBuf>, check: impl FnOnce(&Path) -> Result<(), Failed> + Send + 'static) -> Trial {
    match python.clone() {
        None => Trial::test(name, || Ok(())).with_ignored_flag(true),
        Some(python) => Trial::test(name, move || check(&python)),
    }
}

fn trial(row: Row, python: &Option<PathBuf>, check: fn(&Row, &Path) -> Result<(), Failed>) -> Trial {
    let name = format!("{} {}", row.program, row.options);
    match python.clone() {
        None => Trial::test(name, || Ok(())).with_ignored_flag(true),
        Some(python) => Trial::test(name, move || check(&row, &python)),
    }
}

/// In front of the options of a program that has less than a GPU of 80 GiB, by `--device` in place of a smaller simulated GPU: the driver and the runtime that it
/// takes for real ones are those of the simulated GPU.
const LIMITED: &str = "--device cuda:0 ";

/// The arguments of `harness` in front of those of a program.
fn arguments(options: &str) -> Vec<String> {
    let Some(options) = options.strip_prefix(LIMITED) else {
        return ["exec"].into_iter().chain(options.split(' ')).map(str::to_owned).collect();
    };
    let of_gpu = ["--gpu", "--cudnn-workspace"];
    let words: Vec<&str> = options.split(' ').collect();
    let (outer, inner): (Vec<&[&str]>, Vec<&[&str]>) = words.chunks(2).partition(|pair| of_gpu.contains(&pair[0]));
    let outer = ["exec", "--memory", "80GiB"].into_iter().chain(outer.concat());
    let inner = ["--", env!("CARGO_BIN_EXE_harness"), "exec", "--device", "cuda:0"].into_iter().chain(inner.concat());
    outer.chain(inner).map(str::to_owned).collect()
}

/// Runs a program on a simulated GPU.
fn run(row: &Row, python: &Path, variables: &[(&str, &Path)]) -> Result<Output, Failed> {
    let mut words = row.program.split(' ');
    let script = folder().join(words.next().unwrap_or_default());
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command.args(arguments(&row.options)).arg("--").arg(python).arg(script).args(words);
    // Somebody's own settings must not decide what comes out.
    for variable in ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_VISIBLE_DEVICES"] {
        command.env_remove(variable);
    }
    command.envs(variables.iter().copied());
    let output = command.output()?;
    if output.status.success() {
        return Ok(output);
    }
    Err(format!("{command:?} ended with {}\n{}", output.status, String::from_utf8_lossy(&output.stderr)).into())
}

/// A trial of many runs of a program.
fn runs_of(name: &str, python: &Option<PathBuf>, check: fn(&Path) -> Result<(), Failed>) -> Trial {
    match python.clone() {
        None => Trial::test(name, || Ok(())).with_ignored_flag(true),
        Some(python) => Trial::test(name, move || check(&python)),
    }
}

fn a_correct_recovery_survives_each_fault(python: &Path) -> Result<(), Failed> {
    let program = root().join("ci/pytest/train.py");
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command.args(["exec", "--memory", "4GiB", "--every-fault=sample:6", "--expect", "recovers", "--format", "json", "--"]);
    let output = command.arg(python).arg(&program).env_remove("PYTORCH_ALLOC_CONF").output()?;
    let document: Value = serde_json::from_slice(&output.stdout)?;
    let cases = document["cases"].as_array().ok_or("there are no cases")?;
    let is_right = |case: &&Value| {
        let is_in_program = case["stack"][0]["file"].as_str().is_some_and(|file| Path::new(file).file_name() == program.file_name());
        is_in_program && case["outcome"] == "recovered" && case["holds_memory"] == false
    };
    if output.status.success() && cases.len() == 6 && cases.iter().filter(is_right).count() == 6 {
        return Ok(());
    }
    Err(format!("{:?}: {document:#}", output.status).into())
}

/// As the GPU suite runs it (`ci/bundle-run.sh`): what it asks for fits into the GPU, and not into what is left of it.
fn a_correct_recovery_goes_on_where_a_gpu_is_squeezed(python: &Path) -> Result<(), Failed> {
    let harness = env!("CARGO_BIN_EXE_harness");
    let train = |rest: &[&str]| -> Result<(bool, String), Failed> {
        let mut command = Command::new(harness);
        command.args(["exec", "--memory", "16GiB", "--"]).args(rest).arg(python).arg(root().join("ci/pytest/train.py")).arg("131072");
        let output = command.env_remove("PYTORCH_ALLOC_CONF").output()?;
        Ok((output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()))
    };
    for (rest, rows, said) in [
        (&[][..], "rows 131072\n", "0 out of memory errors"),
        (&[harness, "squeeze", "--leave-free", "4GiB", "--"], "rows 65536\n", "12 GiB taken of cuda:0, 4 GiB free at the start"),
    ] {
        let (passed, told) = train(rest)?;
        if !passed || !told.contains(rows) || !told.contains(said) {
            return Err(format!("{rest:?}, where {rows:?} and {said:?} are expected: {told}").into());
        }
    }
    Ok(())
}

/// Outside of its loop the broken one ends with OutOfMemoryError, in its first step with another error.
fn a_broken_recovery_is_told_as_the_readme_shows_it(python: &Path) -> Result<(), Failed> {
    let readme = std::fs::read_to_string(root().join("README.md"))?;
    let (_, excerpt) = readme.split_once("<!-- excerpt: every fault -->\n```text\n").ok_or("the README has the excerpt's beginning")?;
    let (excerpt, _) = excerpt.split_once("\n```\n<!-- end -->").ok_or("the README has the excerpt's end")?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command.args(["exec", "--memory", "4GiB", "--every-fault=sample:4", "--expect", "recovers", "--"]);
    let output = command.arg(python).arg("broken_recovery.py").current_dir(folder()).env_remove("PYTORCH_ALLOC_CONF").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let text: Vec<&str> = text.lines().map(str::trim_end).collect();
    if output.status.code() == Some(1) && text.join("\n").contains(excerpt) {
        return Ok(());
    }
    Err(format!("{:?}, and not what the README shows: {}", output.status, text.join("\n")).into())
}

/// A program under the allocators of `harness-allocator-abi`.
fn of_library(name: &str, check: fn(&Path) -> Result<(), Failed>, python: &Option<PathBuf>) -> Trial {
    match python.clone() {
        None => Trial::test(name, || Ok(())).with_ignored_flag(true),
        Some(python) => Trial::test(name, move || check(&python)),
    }
}

/// Runs `pluggable.py`, which writes a snapshot, under PyTorch's own allocator or, where arguments name one, of the library. Returns what it prints.
fn pluggable(python: &Path, snapshot: &Path, allocator: &str) -> Result<String, Failed> {
    let library = std::env::current_exe()?.with_file_name("libharness_allocator_abi.so");
    let program = match allocator {
        "" => format!("pluggable.py {}", snapshot.display()),
        _ => format!("pluggable.py {} {} {allocator}", snapshot.display(), library.display()),
    };
    let row = Row { program, options: "--memory 8GiB".to_owned(), figures: BTreeMap::new() };
    let output = run(&row, python, &[("HARNESS_ALLOCATOR_RECORD", Path::new("1"))])?;
    Ok(String::from_utf8(output.stdout)?)
}

/// What an allocator did, one line an event: the place of a block is its segment, by when it was made, and the offset in it.
fn events(snapshot: &Path) -> Result<Vec<String>, Failed> {
    let snapshot = Snapshot::read(snapshot)?;
    let mut segments: Vec<(u64, u64)> = Vec::new();
    let events = snapshot.traces.first().ok_or("nothing was recorded")?;
    let line = |event: &Event| {
        if event.action == Action::SegmentAlloc {
            segments.push((event.address, event.size.0));
        }
        let around = |&(start, size): &(u64, u64)| (start..start + size).contains(&event.address);
        let place = segments.iter().rposition(around).map(|index| (index, event.address - segments[index].0));
        format!("{} of {} on {} at {place:?}", event.action.name(), event.size.0, event.stream)
    };
    Ok(events.iter().map(line).collect())
}

/// The same program under both: the same requests, segments of the same sizes in the same order, and each block at the same place.
fn decides_alike(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let (native, ours) = (folder.path().join("native.pickle"), folder.path().join("ours.pickle"));
    pluggable(python, &native, "")?;
    pluggable(python, &ours, "harness_caching change")?;
    let (native, ours) = (events(&native)?, events(&ours)?);
    let requests = native.iter().filter(|line| line.starts_with("alloc ")).count();
    if requests < 500 {
        return Err(format!("{requests} requests are too few to tell").into());
    }
    if let Some(index) = native.iter().zip(&ours).position(|(native, ours)| native != ours) {
        return Err(format!("event {index}: PyTorch has {}, the library {}", native[index], ours[index]).into());
    }
    if native.len() != ours.len() {
        return Err(format!("PyTorch has {} events, the library {}", native.len(), ours.len()).into());
    }
    Ok(())
}

/// PyTorch's allocator asks the library for segments, and null is the error that programs expect.
fn out_of_memory_in_a_pool(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    for allocator in ["harness_caching", "harness_bfc", "harness_rmm_pool"] {
        let snapshot = folder.path().join("pool.pickle");
        let printed = pluggable(python, &snapshot, &format!("{allocator} pool"))?;
        let segments = events(&snapshot)?.iter().filter(|line| line.starts_with("alloc ")).count();
        if printed.trim() != "torch.OutOfMemoryError" || segments == 0 {
            return Err(format!("{allocator}: {segments} requests, and printed is {printed}").into());
        }
    }
    Ok(())
}

/// Runs a scenario with programs on the simulated device, and on a GPU whose driver and NVML are those of a simulated one of 80 GiB, which does the kernels of the CUDA device. What
/// its steps report is the same.
fn does_the_same_on_a_gpu(scenario: &str, python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let wrapper = folder.path().join("python");
    std::fs::write(&wrapper, "#!/bin/sh\nHARNESS_GPU=\"$OF_PROGRAMS\" exec \"$PYTHON_OF_PROGRAMS\" \"$@\"\n")?;
    std::fs::set_permissions(&wrapper, std::fs::Permissions::from_mode(0o755))?;
    let harness = env!("CARGO_BIN_EXE_harness");
    let run = ["run", &format!("scenarios/programs/{scenario}.yaml"), "--no-report", "--repeat", "1", "--format", "json", "--device"];
    let mut simulated = Command::new(harness);
    simulated.args(run).arg("sim").env("HARNESS_PYTHON", python);
    let with_kernels = "OF_PROGRAMS=\"$HARNESS_GPU\" HARNESS_GPU=\"$HARNESS_GPU;kernels=done;processes=1\" exec \"$@\"";
    let mut on_gpu = Command::new(harness);
    on_gpu.args(["exec", "--memory", "80GiB", "--python"]).arg(python).args(["--", "sh", "-c", with_kernels, "sh", harness]);
    on_gpu.args(run).arg("cuda:0").env("HARNESS_PYTHON", &wrapper).env("PYTHON_OF_PROGRAMS", python);
    let mut told = Vec::new();
    for command in [&mut simulated, &mut on_gpu] {
        let output = command.current_dir(root()).env_remove("PYTORCH_ALLOC_CONF").output()?;
        if !output.status.success() {
            let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
            return Err(format!("{command:?} ended with {}\n{out}{err}", output.status).into());
        }
        let document: Value = serde_json::from_slice(&output.stdout)?;
        let steps =
            document["runs"].as_array().ok_or("there are no runs")?.iter().flat_map(|run| run["steps"].as_array().into_iter().flatten());
        told.push(steps.map(|step| [&step["kind"], &step["reports"], &step["notes"]].map(Value::to_string).join(" ")).collect::<Vec<_>>());
    }
    let programs = told[0].iter().filter(|step| step.contains("peak reserved")).count();
    if told[0] == told[1] && programs >= 4 { Ok(()) } else { Err(format!("{programs} programs: {told:#?}").into()) }
}

/// Compares figures that are there with those that are expected.
fn compare(row: &Row, found: &BTreeMap<String, Value>) -> Result<(), Failed> {
    let wrong: Vec<String> = row
        .figures
        .iter()
        .filter(|(name, figure)| found.get(*name) != Some(figure))
        .map(|(name, figure)| format!("{name}: {figure} expected, {} found", found.get(name).unwrap_or(&Value::Null)))
        .collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("\n").into()) }
}

/// A program whose last line is its figures.
fn printed(row: &Row, python: &Path) -> Result<(), Failed> {
    let output = run(row, python, &[])?;
    let summary = String::from_utf8(output.stderr)?;
    if let Some(names) = summary.lines().find(|line| line.starts_with("not modelled")) {
        return Err(format!("each function has a model: {names}").into());
    }
    let text = String::from_utf8(output.stdout)?;
    compare(row, &serde_json::from_str(text.lines().last().unwrap_or_default())?)
}

/// A program that writes its figures to a file.
fn recorded(row: &Row, python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let result = folder.path().join("result.json");
    run(row, python, &[("SNAP_RESULT", &result)])?;
    compare(row, &serde_json::from_str(&std::fs::read_to_string(result)?)?)
}

/// A program that runs out of memory is reported, and runs to its end with what is recommended for it.
fn advised(python: &Path) -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let harness = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
        command.current_dir(folder.path()).args(arguments).arg("--").arg(python).arg(self::folder().join("pinned.py"));
        command.env_remove("PYTORCH_ALLOC_CONF").env_remove("PYTORCH_CUDA_ALLOC_CONF").output()
    };
    let options = ["exec", "--memory", "1GiB", "--snapshot", "oom.pickle", "--report", "report.md", "--junit", "junit.xml"];
    let failed = harness(&options)?;
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name));
    let (report, picture, junit) = (read("report.md")?, read("report.svg")?, read("junit.xml")?);
    let in_report =
        ["An out of memory error ended the program", "last = block(750)", "| cudaMalloc | 3 | 2 |", "report.svg", "pinned.py:12"];
    let missing: Vec<&str> = in_report.into_iter().filter(|words| !report.contains(words)).collect();
    if failed.status.code() != Some(1) || !missing.is_empty() {
        return Err(format!("{:?}; missing: {missing:?}\n{report}\n{}", failed.status, String::from_utf8_lossy(&failed.stderr)).into());
    }
    if !picture.contains("at most 300 MiB reserved") || !picture.contains("2 attempts refused") || !junit.contains("<failure") {
        return Err(format!("{picture}\n{junit}").into());
    }
    let verified = harness(&["advise", "oom.pickle", "--verify", "--format", "json"])?;
    let document: Value = serde_json::from_slice(&verified.stdout)?;
    let seen = &document["verified"];
    let (reserved, predicted) = (seen["peak_reserved_seen"].as_u64(), seen["peak_reserved_predicted"].as_u64());
    if verified.status.code() == Some(0) && seen["held"] == true && reserved.is_some() && reserved == predicted {
        return Ok(());
    }
    Err(format!("{:?}: {seen:#}\n{}", verified.status, String::from_utf8_lossy(&verified.stderr)).into())
}
