//! Processes that still run when the program has ended. They are ended with it, so what they would
//! have done with the GPU is unknown.

use std::ffi::OsStr;
use std::path::Path;
use std::{fs, io};

use harness_gpu_settings::counters::ENDING;
use harness_gpu_settings::settings::RUN;
use harness_gpu_settings::shared_memory::HOOKED;
use libc::pid_t;
use procfs::process::Process;

use crate::files::{COPIES, read_of_kernel};
use crate::{process::processes, torch};

/// The file in the folder of a run with a process per line.
const FILE: &str = "outlived";
/// What the command lines of processes contain that Python and torch leave for a moment. They use
/// no GPU.
const HELPERS: [&str; 3] = [
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "compile_worker",
];
/// Characters shown of a command.
const SHOWN: usize = 80;

/// Finds the processes of a run that still run and use the GPU, or could: they are Python. Those in
/// the process group of the program are its own, and those with the variables of the run. Names
/// them in the folder of the run.
pub(crate) fn find(run: &Path, group: pid_t) -> Vec<pid_t> {
    let since = Process::myself()
        .and_then(|own| own.stat())
        .map_or(0, |stat| stat.starttime);
    let mut found = Vec::new();
    let mut lines = String::new();
    for process in processes() {
        let is_live = process.stat().is_ok_and(|stat| {
            stat.state != 'Z' && stat.starttime >= since && {
                stat.pgrp == group || is_of(&process, run)
            }
        });
        if is_live && let Some(command) = command_with_gpu(&process, run) {
            found.push(process.pid);
            lines += &format!("process {} (`{command}`)\n", process.pid);
        }
    }
    let file = run.join(FILE);
    if found.is_empty() {
        let _ = fs::remove_file(file);
    } else {
        let _ = fs::write(file, lines);
    }
    found
}

/// Returns the processes that [`find`] found last.
pub(crate) fn read(run: &Path) -> io::Result<Vec<String>> {
    match fs::read_to_string(run.join(FILE)) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Returns whether a process has the variables of a run. The process that later runs begin as
/// copies of has those of the run that it comes from.
fn is_of(process: &Process, run: &Path) -> bool {
    process.environ().is_ok_and(|variables| {
        !variables.contains_key(OsStr::new(COPIES))
            && variables
                .get(OsStr::new(RUN))
                .is_some_and(|of| Path::new(of) == run)
    })
}

/// Returns the command of a process that uses the GPU, or could.
fn command_with_gpu(process: &Process, run: &Path) -> Option<String> {
    let pid = process.pid;
    let line = read_of_kernel(pid, "cmdline");
    let mut words: Vec<&str> = line.split('\0').filter(|word| !word.is_empty()).collect();
    let program = words.first_mut()?;
    *program = program.rsplit('/').next().unwrap_or_default();
    let command = words.join(" ");
    let is_python = || {
        run.join(format!("{HOOKED}{pid}")).exists()
            || process
                .exe()
                .is_ok_and(|program| program.file_name().is_some_and(torch::is_python))
    };
    let is_helper = HELPERS.iter().any(|helper| command.contains(helper));
    if !run.join(format!("{pid}{ENDING}")).exists() && (is_helper || !is_python()) {
        return None;
    }
    let line = command.lines().next().unwrap_or_default();
    let shown: String = line.chars().take(SHOWN).collect();
    let end = if shown.len() < command.len() {
        "…"
    } else {
        ""
    };
    Some(format!("{shown}{end}"))
}
