//! Modes of `harness exec` refuse the options that they do not use.

use std::collections::BTreeSet;
use std::fs;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};

use crate::{Cli, Command};

/// Options that `--leave-free` and `--matrix` use.
const OF_BOTH: [&[&str]; 2] = [&["--report", "report.md"], &["--format", "json"]];
/// `--leave-free`, and options that only it uses.
const OF_LEAVE_FREE: [&[&str]; 5] = [
    &["--leave-free", "1GiB"],
    &["--device", "cuda:0"],
    &["--every", "1s"],
    &["--quiet"],
    &["--record", "run.json"],
];
/// `--matrix`, and options that only it uses.
const OF_MATRIX: [&[&str]; 8] = [
    &["--matrix", "runs.yaml"],
    &["--compare", "earlier.jsonl"],
    &["--jobs", "2"],
    &["--launch", "srun"],
    &["--logs", "logs"],
    &["--rows", "rows.jsonl"],
    &["--shard", "1/2"],
    &["--time-limit", "1s"],
];
/// All other options of `harness exec`.
const OF_NEITHER: [&[&str]; 36] = [
    &["--addresses", "linux"],
    &["--alloc-conf", "a:1"],
    &["--allow-ooms"],
    &["--alone"],
    &["--at-least", "2"],
    &["--baseline", "peaks.json"],
    &["--code-quality", "lines.json"],
    &["--config", "train.yaml"],
    &["--context-overhead", "1MiB"],
    &["--cuda", "13"],
    &["--cudnn-workspace", "none"],
    &["--devices", "2"],
    &["--events", "instant"],
    &["--every-fault"],
    &["--exact"],
    &["--expect", "recovers"],
    &["--fail", "cudaMalloc:1"],
    &["--figures", "figures.json"],
    &["--fresh"],
    &["--gpu", "h200"],
    &["--junit", "junit.xml"],
    &["--largest", "n=1..4"],
    &["--last-failed"],
    &["--latency", "cudaFree:3ms"],
    &["--least-memory"],
    &["--memory", "1GiB"],
    &["--python", "python3"],
    &["--require-gpu"],
    &["--sarif", "lines.sarif"],
    &["--shared-memory", "pinned"],
    &["--snapshot", "snapshot.pickle"],
    &["--try", "half: --half"],
    &["--unmeasured", "rest.tsv"],
    &["--update"],
    &["--values", "zeros"],
    &["--nccl-memory"],
];

/// Whether `harness exec` accepts these options.
fn is_accepted(words: &[&str]) -> bool {
    match Cli::try_parse_from([&["harness", "exec"], words].concat()) {
        Ok(Cli {
            command: Command::Exec(exec),
            ..
        }) => exec.check_needed().is_ok(),
        Ok(_) => unreachable!("the command is `exec`"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::ArgumentConflict, "{error}");
            false
        }
    }
}

#[test]
fn options_without_effect_on_free_memory_or_a_matrix_are_refused() {
    let folder = tempfile::tempdir().expect("there is a folder for temporary files");
    let table = folder.path().join("nccl.tsv");
    fs::write(&table, "ranks\tcollective\tpoint_to_point\n2\t544MiB\t0B\n")
        .expect("it can be written");
    let table = table.to_str().expect("the name is text");
    let listed = [&OF_BOTH[..], &OF_LEAVE_FREE, &OF_MATRIX, &OF_NEITHER].concat();
    let names: BTreeSet<&str> = listed.iter().map(|option| option[0]).collect();
    let command = Cli::command();
    let exec = command.find_subcommand("exec").expect("it is a command");
    let options = exec.get_arguments().filter_map(|option| option.get_long());
    let options: BTreeSet<String> = options.map(|name| format!("--{name}")).collect();
    assert_eq!(names, options.iter().map(String::as_str).collect());
    for (mode, end, used) in [
        (OF_LEAVE_FREE[0], &["--", "true"][..], &OF_LEAVE_FREE[1..]),
        (OF_MATRIX[0], &[], &OF_MATRIX[1..]),
    ] {
        for option in listed.iter().filter(|option| **option != mode) {
            let value = if option[0] == "--nccl-memory" {
                &[table][..]
            } else {
                &[]
            };
            let words = [mode, option, value, end].concat();
            let is_used = used.contains(option) || OF_BOTH.contains(option);
            assert_eq!(is_accepted(&words), is_used, "{words:?}");
        }
    }
}
