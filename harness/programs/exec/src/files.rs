//! The files in the folder of a run.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::{fs, io};

use harness_gpu_settings::settings::HOOK;
use serde::de::DeserializeOwned;

/// The variable that makes the hook offer copies of a process, with the process ID of harness, a
/// module to import early, and the path of a socket.
pub(crate) const COPIES: &str = "HARNESS_GPU_COPIES";

pub(crate) fn hook_folder(run: &Path) -> PathBuf {
    run.join(HOOK)
}

/// Returns the file of the hook, which is written before the program starts, and never again.
pub(crate) fn hook_script(run: &Path) -> PathBuf {
    hook_folder(run).join("sitecustomize.py")
}

/// Returns the ledger of a run that shares its devices with no other.
pub(crate) fn own_ledger(run: &Path) -> PathBuf {
    run.join("ledger")
}

/// Reads a file of the kernel about a process, empty without one. Its name, and those of the files
/// that it has mapped, may be no text.
pub(crate) fn read_of_kernel(pid: impl Display, name: &str) -> String {
    let content = fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    String::from_utf8_lossy(&content).into_owned()
}

/// Reads a file with a value in JSON per line. Ignores a line that the process's end cut. Empty
/// without a file.
pub(crate) fn read_lines<T: DeserializeOwned>(path: &Path) -> Vec<T> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

/// Reads the lines of the files named after process IDs that begin with a text.
pub(crate) fn numbered_lines<T: DeserializeOwned>(
    folder: &Path,
    begin: &str,
) -> io::Result<Vec<T>> {
    let files = numbered(folder, begin, ".jsonl")?;
    Ok(files
        .iter()
        .flat_map(|(_, path)| read_lines(path))
        .collect())
}

/// Returns the files named after process IDs, in their order.
pub(crate) fn numbered(folder: &Path, begin: &str, end: &str) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix(begin)?.strip_suffix(end)?.parse().ok());
        found.extend(number.map(|pid| (pid, entry.path())));
    }
    found.sort();
    Ok(found)
}
