//! The host's memory: how much is available, and how much ranks need.

use std::fs;
use std::path::Path;

use harness_allocator::units::Bytes;
use procfs::{Current as _, Meminfo, process::Process};

/// The least memory of a rank: `MemAvailable` fell by this much for each of 24 processes that
/// imported torch 2.11. A small training with FSDP2 took 232 MiB.
const OF_RANK: Bytes = Bytes::mib(160);
/// Where control groups of version 2 are mounted. In a container, this folder is the container's
/// own group.
const GROUPS: &str = "/sys/fs/cgroup";

/// Returns the host's memory that programs can use: of the whole host (`MemAvailable`), or less in
/// a control group with a limit.
pub(crate) fn available() -> Bytes {
    let of_host = Meminfo::current()
        .ok()
        .and_then(|memory| memory.mem_available)
        .map_or(Bytes::ZERO, Bytes);
    let groups = Process::myself()
        .and_then(|process| process.cgroups())
        .into_iter()
        .flatten();
    let of_groups = groups
        .filter(|group| group.hierarchy == 0)
        .filter_map(|group| left_in(Path::new(GROUPS), &group.pathname));
    of_groups.fold(of_host, Bytes::min)
}

/// Returns the memory left in a control group, at most that left in each group around it, or `None`
/// if no group has a limit. Inactive pages of files count as left, because the kernel drops them
/// when a group reaches its limit
/// (<https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files>).
fn left_in(root: &Path, group: &str) -> Option<Bytes> {
    let left = |folder: &Path| {
        let number = |name: &str| {
            fs::read_to_string(folder.join(name))
                .ok()?
                .trim()
                .parse::<u64>()
                .ok()
        };
        let limit = number("memory.max")?;
        let statistics = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
        let inactive = statistics
            .lines()
            .find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok())
            .unwrap_or(0);
        Some(Bytes(limit.saturating_sub(
            number("memory.current")?.saturating_sub(inactive),
        )))
    };
    let folder = root.join(group.trim_start_matches('/'));
    folder
        .ancestors()
        .take_while(|folder| folder.starts_with(root))
        .filter_map(left)
        .min()
}

/// The memory of a run with one rank for each of `devices`.
fn of_run(devices: u32) -> Bytes {
    Bytes(OF_RANK.0 * u64::from(devices))
}

/// Returns how many runs with one rank for each of `devices` fit the host's memory at once, and at
/// least one.
fn most_runs(devices: u32, available: Bytes) -> usize {
    usize::try_from(available.0 / of_run(devices).0).map_or(usize::MAX, |runs| runs.max(1))
}

/// Returns the default number of parallel runs on these simulated GPUs: the number of cores, or
/// fewer if the host's memory is too small.
pub fn usual_jobs(devices: u32) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    cores.min(most_runs(devices, available()))
}

/// Returns a warning if one rank for each of `devices` needs more than the host's memory.
pub fn warning(devices: u32) -> Option<String> {
    warning_for(devices, available())
}

fn warning_for(devices: u32, available: Bytes) -> Option<String> {
    let needed = of_run(devices);
    (devices > 1 && needed > available).then(|| {
        format!(
            "warning: {devices} ranks, one for each GPU, need at least {needed} of host memory \
             ({OF_RANK} each), but only {available} is available. Use \
             fewer `--devices`, or import torch once and fork the ranks"
        )
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn ranks_that_need_more_than_the_hosts_memory_are_warned_about() {
        assert_eq!(warning_for(64, Bytes::mib(64 * 160)), None);
        let text = warning_for(64, Bytes::gib(8)).unwrap();
        assert!(
            text.contains("64 ranks")
                && text.contains("10 GiB")
                && text.contains("8 GiB is available"),
            "{text}"
        );
        // A program with one GPU may have any number of processes.
        assert_eq!(warning_for(1, Bytes::ZERO), None);
    }

    #[test]
    fn parallel_runs_fit_the_hosts_memory() {
        assert_eq!(most_runs(1, Bytes::gib(19)), 121);
        assert_eq!(most_runs(8, Bytes::gib(19)), 15);
        assert_eq!(most_runs(64, Bytes::ZERO), 1);
    }

    #[test]
    fn the_tightest_control_group_limits_the_memory_and_cached_files_do_not_count() {
        let root = tempfile::tempdir().unwrap();
        let write = |group: &str, limit: &str, current: u64, inactive: u64| {
            let folder = root.path().join(group);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("memory.max"), format!("{limit}\n")).unwrap();
            fs::write(folder.join("memory.current"), format!("{current}\n")).unwrap();
            fs::write(
                folder.join("memory.stat"),
                format!("anon 5\ninactive_file {inactive}\nactive_file 7\n"),
            )
            .unwrap();
        };
        write("outer", "1000", 900, 300);
        write("outer/inner", "max", 900, 300);
        assert_eq!(left_in(root.path(), "/outer/inner"), Some(Bytes(400)));
        write("outer/inner", "800", 900, 0);
        assert_eq!(left_in(root.path(), "/outer/inner"), Some(Bytes::ZERO));
        assert_eq!(left_in(root.path(), "/"), None);
        assert_eq!(left_in(root.path(), "/elsewhere"), None);
    }

    #[test]
    fn this_host_has_memory() {
        assert!(available() > Bytes::ZERO);
    }
}
