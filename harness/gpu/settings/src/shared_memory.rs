//! [`MemoryInUse`]: the memory of a machine whose GPU shares it with the host.
//!
//! The shares of GPU and page-locked memory are exact, from the ledger. The rest of a process's
//! memory is measured on the host that simulates, so it is approximate.

use std::{fs, path::Path};

use harness_allocator::units::Bytes;
use serde::{Deserialize, Serialize};

use crate::{counters, settings::RUN};

/// The beginning of the name of a file in the folder of [`RUN`] with the [`MemoryNotes`] of a
/// process, before its number.
pub const NOTES: &str = "memory-in-use-";
/// The same of the file with its Python stacks at the first moment without enough memory.
pub const STACK: &str = "memory-short-";
/// The beginning of the name of a file that shows a process of Python, before its number.
pub const HOOKED: &str = "python-";

/// What a process noted of the machine's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryNotes {
    /// The most memory in use.
    pub most: MemoryInUse,
    /// The first moment with more than the machine has, in nanoseconds of the monotonic clock.
    pub short: Option<(u64, MemoryInUse)>,
}

/// The memory of a machine in use at a moment, by process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInUse {
    pub processes: Vec<MemoryShare>,
}

/// A process's share of a machine's memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryShare {
    pub pid: u32,
    /// Memory that CUDA allocates for the GPU, with the context.
    pub gpu: u64,
    /// Page-locked memory.
    pub pinned: u64,
    /// Its other memory that is resident or swapped, without files and memory that processes share.
    pub pageable: u64,
}

impl MemoryInUse {
    /// The sum of one kind of memory over all processes.
    pub fn sum(&self, kind: impl Fn(&MemoryShare) -> u64) -> Bytes {
        Bytes(self.processes.iter().map(kind).sum())
    }

    pub fn total(&self) -> Bytes {
        self.sum(|share| share.gpu + share.pinned + share.pageable)
    }
}

/// Returns the numbers of the processes in the folder of a run that use the GPU or run Python.
pub fn processes(run: &Path) -> Vec<u32> {
    let number = |name: &str| {
        name.strip_prefix(HOOKED)
            .or_else(|| name.strip_suffix(counters::ENDING))?
            .parse()
            .ok()
    };
    let mut found: Vec<u32> = fs::read_dir(run)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| number(entry.file_name().to_str()?))
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Returns the memory of a process of a run that is resident or swapped, without files and memory
/// that processes share. 0 if it has ended.
pub fn resident(pid: u32, run: &Path) -> Bytes {
    let is_of_run = || {
        let variables = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let run = [RUN.as_bytes(), b"=", run.as_os_str().as_encoded_bytes()].concat();
        Some(variables.split(|byte| *byte == 0).any(|it| *it == run))
    };
    let anonymous = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let figures = status.lines().filter_map(|line| {
            let names = ["RssAnon:", "VmSwap:"];
            let figure = names.iter().find_map(|name| line.strip_prefix(name))?;
            figure.trim().strip_suffix(" kB")?.parse::<u64>().ok()
        });
        Some(figures.sum::<u64>())
    };
    // The number of an ended process may be that of another program.
    let is_own = pid == std::process::id();
    let found = (is_own || is_of_run() == Some(true)).then(anonymous);
    Bytes(found.flatten().unwrap_or(0) << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resident_memory_of_a_process_grows_when_it_writes_memory() {
        let run = Path::new("/nonexistent");
        let before = resident(std::process::id(), run);
        let written = std::hint::black_box(vec![1_u8; 256 << 20]);
        let after = resident(std::process::id(), run);
        assert!(after >= before + Bytes::mib(128), "{before} and {after}");
        drop(written);
        // The first process belongs to no run.
        assert_eq!(resident(1, run), Bytes::ZERO);
    }

    #[test]
    fn the_folder_of_a_run_names_its_processes() {
        let run = tempfile::tempdir().expect("make a folder");
        for name in [
            "python-7",
            "7.counters",
            "12.counters",
            "python-3",
            "ledger",
            "python",
        ] {
            fs::write(run.path().join(name), "").expect("write a file");
        }
        assert_eq!(processes(run.path()), [3, 7, 12]);
        assert!(processes(&run.path().join("missing")).is_empty());
    }
}
