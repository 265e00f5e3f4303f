//! [`MemoryInUse`]: the memory of a machine whose GPU shares it with the host.
//!
//! The shares of GPU and page-locked memory are exact, from the ledger. The rest of a process's
//! memory is measured on the host that simulates, so it is approximate.

use std::{collections::BTreeMap, fs, path::Path};

use harness_allocator::units::Bytes;
use procfs::process::{MMPermissions, MemoryMap, Process};
use serde::{Deserialize, Serialize};

use crate::{counters, settings::RUN};

/// The beginning of the name of a file in the folder of [`RUN`] with the [`MemoryNotes`] of a
/// process, before its number.
pub const NOTES: &str = "memory-in-use-";
/// The same of the file with its Python stacks at the first moment without enough memory.
pub const STACK: &str = "memory-short-";
/// The beginning of the name of a file that shows a process of Python, before its number.
pub const HOOKED: &str = "python-";

/// The least size of a page, in bytes.
const PAGE: u64 = 4096;

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

/// The memory of processes that is resident or swapped, without files and memory that processes
/// share. Pages that a forked child shares with its parent count once.
#[derive(Debug, Default)]
pub struct Resident(BTreeMap<u32, Share>);

/// The memory of a process that shares pages, when they were last counted.
#[derive(Clone, Copy, Debug)]
struct Share {
    then: Memory,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Memory {
    anonymous: u64,
    /// Each makes at most one page of memory the process's own.
    faults: u64,
    /// Equal in a child only if it was forked and runs the same program.
    stack: u64,
}

impl Resident {
    /// Returns the memory of the processes of a run that have not ended.
    pub fn read(&mut self, pids: &[u32], run: &Path) -> BTreeMap<u32, Bytes> {
        let all: BTreeMap<u32, Memory> = pids
            .iter()
            .filter_map(|pid| Some((*pid, memory(*pid, run)?)))
            .collect();
        let mut stacks: BTreeMap<u64, usize> = BTreeMap::new();
        for memory in all.values() {
            *stacks.entry(memory.stack).or_default() += 1;
        }
        let mut sharing = all.clone();
        sharing.retain(|_, memory| stacks[&memory.stack] > 1);
        if !self.is_recent(&sharing) {
            // The count takes a second for some GiB.
            let counted = |(pid, then): (u32, Memory)| {
                let names = ["Pss_Anon:", "SwapPss:"];
                let found = figures(&format!("/proc/{pid}/smaps_rollup"), names);
                let bytes = found.unwrap_or(then.anonymous);
                (pid, Share { then, bytes })
            };
            self.0 = sharing.into_iter().map(counted).collect();
        }
        let now = |(pid, memory): (u32, Memory)| {
            let bytes = self.0.get(&pid).map_or(memory.anonymous, |share| {
                (share.bytes + memory.anonymous).saturating_sub(share.then.anonymous)
            });
            (pid, Bytes(bytes))
        };
        all.into_iter().map(now).collect()
    }

    /// Whether the same processes share pages as at the last count, and few pages can have become
    /// their own.
    fn is_recent(&self, sharing: &BTreeMap<u32, Memory>) -> bool {
        let changed = self.0.iter().map(|(pid, share)| {
            let now = sharing.get(pid)?;
            let faults = now.faults.saturating_sub(share.then.faults);
            Some(faults * PAGE + now.anonymous.abs_diff(share.then.anonymous))
        });
        let total: u64 = self.0.values().map(|share| share.bytes).sum();
        self.0.keys().eq(sharing.keys())
            && changed
                .sum::<Option<u64>>()
                .is_some_and(|changed| changed <= total / 16)
    }
}

/// The memory of a process. `None` if it has ended or is not of the run.
fn memory(pid: u32, run: &Path) -> Option<Memory> {
    let is_of_run = || {
        let variables = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let run = [RUN.as_bytes(), b"=", run.as_os_str().as_encoded_bytes()].concat();
        Some(variables.split(|byte| *byte == 0).any(|it| *it == run))
    };
    // The number of an ended process may be that of another program.
    let is_own = pid == std::process::id();
    if !is_own && is_of_run() != Some(true) {
        return None;
    }
    let stat = Process::new(i32::try_from(pid).ok()?).ok()?.stat().ok()?;
    Some(Memory {
        anonymous: figures(&format!("/proc/{pid}/status"), ["RssAnon:", "VmSwap:"])?,
        faults: stat.minflt,
        stack: stat.startstack,
    })
}

/// The bytes of a range of this process's memory that [`Resident`] has if they are resident:
/// without memory that processes share. All of them if the kernel does not say.
pub fn private_part(start: usize, size: usize) -> Bytes {
    let end = start.saturating_add(size) as u64;
    let of_map = |map: &MemoryMap| {
        let (first, last) = map.address;
        last.min(end).saturating_sub(first.max(start as u64))
    };
    let maps = Process::myself().and_then(|process| process.maps());
    Bytes(maps.map_or(size as u64, |maps| {
        maps.iter()
            .filter(|map| !map.perms.contains(MMPermissions::SHARED))
            .map(of_map)
            .sum()
    }))
}

/// The sum of two figures of a file of the kernel, in bytes. `None` if it has neither.
fn figures(path: &str, names: [&str; 2]) -> Option<u64> {
    // The name of a process may be no text.
    let content = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&content);
    let of_line = |line: &str| {
        let figure = names.iter().find_map(|name| line.strip_prefix(name))?;
        figure.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    let found: Vec<u64> = text.lines().filter_map(of_line).collect();
    (!found.is_empty()).then(|| found.iter().sum::<u64>() << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resident_memory_of_a_process_grows_when_it_writes_memory() {
        let run = Path::new("/nonexistent");
        let own = std::process::id();
        let mut resident = Resident::default();
        let before = resident.read(&[own], run)[&own];
        let written = std::hint::black_box(vec![1_u8; 256 << 20]);
        let after = resident.read(&[own], run)[&own];
        assert!(after >= before + Bytes::mib(128), "{before} and {after}");
        drop(written);
        // The first process belongs to no run.
        assert!(resident.read(&[1], run).is_empty());
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
