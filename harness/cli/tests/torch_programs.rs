//! Unmodified PyTorch programs on simulated GPUs, by `harness exec`: each prints what is recorded of it, to the byte.
//!
//! The programs lie in `programs/`: small ones with what they print, and larger ones of which PyTorch was recorded. The Python to run them is named by
//! [`PYTHON`] and has torch 2.11.0 for CUDA 13, without or with NVIDIA's packages: `ci/torch` makes one. Where none is named, the tests are
//! shown as ignored, with the reason.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

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
    trials.extend([("recovers.py", 0), ("broken_recovery.py", 1)].map(|(program, code)| recovery(program, code, &python)));
    trials.push(of_python("pinned.py is verified with the advice on it, and reported", &python, advised));
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A program with its arguments, options of `harness exec`, and the figures that are expected of it.
struct Row {
    program: String,
    options: String,
    figures: BTreeMap<String, Value>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs")
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

fn of_python(name: &str, python: &Option<PathBuf>, check: fn(&Path) -> Result<(), Failed>) -> Trial {
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

/// Runs a program on a simulated GPU.
fn run(row: &Row, python: &Path, variables: &[(&str, &Path)]) -> Result<Output, Failed> {
    let mut words = row.program.split(' ');
    let script = folder().join(words.next().unwrap_or_default());
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command.arg("exec").args(row.options.split(' ')).arg("--").arg(python).arg(script).args(words);
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

/// A program whose attempts to get memory fail one after the other, and the exit code of expecting that it recovers.
fn recovery(program: &'static str, code: i32, python: &Option<PathBuf>) -> Trial {
    let name = format!("{program} --every-fault --expect recovers");
    match python.clone() {
        None => Trial::test(name, || Ok(())).with_ignored_flag(true),
        Some(python) => Trial::test(name, move || every_fault(program, code, &python)),
    }
}

fn every_fault(program: &str, code: i32, python: &Path) -> Result<(), Failed> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_harness"));
    command.args(["exec", "--memory", "4GiB", "--every-fault=sample:6", "--expect", "recovers", "--format", "json", "--"]);
    let output = command.arg(python).arg(folder().join(program)).env_remove("PYTORCH_ALLOC_CONF").output()?;
    let document: Value = serde_json::from_slice(&output.stdout)?;
    let cases = document["cases"].as_array().ok_or("there are no cases")?;
    let outcomes: Vec<&str> = cases.iter().filter_map(|case| case["outcome"].as_str()).collect();
    let known = |place: &Value| place["file"].as_str().is_some_and(|file| file.ends_with(program));
    if output.status.code() != Some(code) {
        return Err(format!("{:?}: {}", output.status, String::from_utf8_lossy(&output.stdout)).into());
    }
    if outcomes.len() != 6 || !cases.iter().all(|case| known(&case["stack"][0])) {
        return Err(format!("a run for each attempt, with its place in {program}: {document:#}").into());
    }
    let is_recovered = |outcome: &&str| *outcome == "recovered";
    let held = cases.iter().filter(|case| case["holds_memory"] == true).count();
    let as_expected = if code == 0 {
        outcomes.iter().all(is_recovered) && held == 0
    } else {
        // It ends with OutOfMemoryError outside of the loop and with another error in its first step; later it goes on and holds memory.
        outcomes.contains(&"out_of_memory") && outcomes.contains(&"other_error")
    };
    if as_expected { Ok(()) } else { Err(format!("{document:#}").into()) }
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
