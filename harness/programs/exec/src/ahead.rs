//! [`PeakAhead`]: the peak of a program whose host runs ahead of the GPU. Freed memory then waits
//! for other streams until the host has waited for their work.
//!
//! A run with [`Events::Instant`] has recorded its requests and, for each free that waited for
//! another stream, when the host waited for that stream. A replay of the same requests, with frees
//! that end this late, has the other bound of the peak.

use std::collections::{BTreeMap, BTreeSet};
use std::{fs, path::Path};

use harness_allocator::allocator::{AllocatorSpec, MemoryFraction};
use harness_allocator::units::Bytes;
use harness_explain::fidelity;
use harness_gpu_settings::settings::{Events, Settings};
use harness_trace::program::{Placement, RecordedProgram, ReplaySetup};
use harness_trace::snapshot::{Action, Snapshot};
use serde::Serialize;

use crate::machine::Machine;

/// Why there is no replay. The texts follow the words "not replayed:".
const NOT_RECORDED: &str = "not all requests are recorded";
const HAS_GRAPHS: &str = "CUDA graphs or private pools defer frees too";
const DIFFERS: &str = "a replay differs from the run";
const HAS_LIMITS: &str = "a replay does not follow its memory fraction";

/// The peak reserved memory of a process on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PeakAhead {
    pub device: u32,
    /// If the GPU keeps up with the host, as in the run.
    pub least: u64,
    /// If the host runs ahead and makes the same requests.
    pub most: u64,
    /// Whether a request then fails that succeeded in the run.
    pub runs_out_of_memory: bool,
}

/// Returns the settings of a simulated GPU that keeps up with the host.
pub(crate) fn settings(machine: &Machine) -> Option<&Settings> {
    match machine {
        Machine::Simulated(settings) if settings.events == Events::Instant => Some(settings),
        Machine::Simulated(_) | Machine::Real(..) => None,
    }
}

/// What a process wrote about its frees that waited for other streams, by device.
#[derive(Debug, Default)]
struct Waits {
    /// The numbers of allocations and of frees at the end.
    all: BTreeMap<u32, [u64; 2]>,
    /// By number of the free: how many allocations had been made when the host had waited for all
    /// streams that used the block; `None` if it never did.
    frees: BTreeMap<u32, BTreeMap<u64, Option<u64>>>,
    /// The most that the program allows its allocator to reserve, by what it set.
    limits: BTreeMap<u32, BTreeSet<u64>>,
}

impl Waits {
    fn read(text: &str) -> Option<Self> {
        let mut waits = Self::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let [kind, device, first, rest @ ..] = words.as_slice() else {
                return None;
            };
            let (device, first) = (device.parse().ok()?, first.parse().ok()?);
            match (*kind, rest) {
                ("all", [second]) => {
                    waits.all.insert(device, [first, second.parse().ok()?]);
                }
                ("limit", []) => {
                    waits.limits.entry(device).or_default().insert(first);
                }
                ("free", [second]) => {
                    let ended = match *second {
                        "never" => None,
                        ended => Some(ended.parse().ok()?),
                    };
                    let of_device = waits.frees.entry(device).or_default();
                    // A block can wait for several streams.
                    let known = of_device.entry(first).or_insert(Some(0));
                    *known = known.zip(ended).map(|(one, other)| one.max(other));
                }
                _ => return None,
            }
        }
        Some(waits)
    }
}

/// Returns the bounds of each device on which frees of the process waited, or why they are unknown.
/// `reserved` returns the peak of a device, and `available` the memory that is left to torch.
pub(crate) fn of_process(
    run: &Path,
    pid: u32,
    settings: &Settings,
    reserved: impl Fn(u32) -> Option<u64>,
    available: impl Fn(u32) -> Bytes,
) -> Result<Vec<PeakAhead>, &'static str> {
    let of_run = ["history", "snapshot"].map(|name| run.join(format!("{name}-{pid}.pickle")));
    let recorded = of_run
        .iter()
        .find(|path| path.exists())
        .ok_or(NOT_RECORDED)?;
    let text = fs::read_to_string(run.join(format!("waits-{pid}"))).map_err(|_| HAS_GRAPHS)?;
    let waits = Waits::read(&text).ok_or(NOT_RECORDED)?;
    let snapshot = Snapshot::read(recorded).map_err(|_| NOT_RECORDED)?;
    let of_device = |(device, frees): (&u32, &BTreeMap<u64, Option<u64>>)| {
        let device = *device;
        let (least, available) = (reserved(device).ok_or(DIFFERS)?, available(device));
        let limits = waits.limits.get(&device);
        let limits: Vec<u64> = limits.into_iter().flatten().copied().collect();
        let available = match *limits.as_slice() {
            [] => available,
            [limit] => available.min(Bytes(limit)),
            _ => return Err(HAS_LIMITS),
        };
        let all = waits.all.get(&device).ok_or(NOT_RECORDED)?;
        let ends = ends(&snapshot, device, *all, frees).ok_or(NOT_RECORDED)?;
        let recovered = fidelity::recover(&snapshot, device, Some(available));
        let recovered = recovered.ok().filter(|(_, fidelity)| fidelity.faithful);
        let (program, _) = recovered.ok_or(DIFFERS)?;
        let collects = program.config.garbage_collection_threshold.is_some();
        if program.config.memory_fraction != MemoryFraction::ALL || (collects && !limits.is_empty())
        {
            return Err(HAS_LIMITS);
        }
        let later = program.with_later_frees(&ends).ok_or(HAS_GRAPHS)?;
        let replay = |program: &RecordedProgram| {
            let replayed = program.prepare().ok()?.replay(&ReplaySetup {
                allocator: AllocatorSpec::caching(program.config.clone()),
                memory: program.memory.unwrap_or(available),
                placement: Placement::InOrder(settings.addresses),
            });
            replayed.ok()
        };
        let replays = replay(&program).zip(replay(&later));
        let (again, ahead) = replays.ok_or(DIFFERS)?;
        let [least_again, most] = [&again, &ahead].map(|of| of.stats.reserved_bytes.all.peak);
        // Before the recording, the peak can have been higher.
        if least_again > least {
            return Err(DIFFERS);
        }
        Ok(PeakAhead {
            device,
            least,
            most: least.max(most),
            runs_out_of_memory: ahead.oom.is_some() && again.oom.is_none(),
        })
    };
    waits.frees.iter().map(of_device).collect()
}

/// Returns the free events of a device that waited, each with the allocation event before which it
/// completes. `None` if the recording lacks one of them.
fn ends(
    snapshot: &Snapshot,
    device: u32,
    all: [u64; 2],
    frees: &BTreeMap<u64, Option<u64>>,
) -> Option<BTreeMap<u32, Option<u32>>> {
    let events = || snapshot.events_of(device).iter().zip(0_u32..);
    let of = |action: Action| -> Vec<u32> {
        let of_action = events().filter(|(event, _)| event.action == action);
        of_action.map(|(_, index)| index).collect()
    };
    let recorded = [of(Action::Alloc), of(Action::FreeRequested)];
    // Numbers count from the beginning of the program, the recording ends with it.
    let place = |kind: usize, number: u64| {
        let before = all[kind].checked_sub(recorded[kind].len() as u64)?;
        usize::try_from(number.checked_sub(before)?).ok()
    };
    let end = |(number, ended): (&u64, &Option<u64>)| {
        let free = *recorded[1].get(place(1, *number)?.checked_sub(1)?)?;
        let end = match ended {
            Some(ended) => recorded[0].get(place(0, *ended)?).copied(),
            None => None,
        };
        Some((free, end))
    };
    frees.iter().map(end).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_free_that_waits_for_several_streams_ends_with_the_last() {
        let text = "all 0 9 7\nlimit 0 64\nfree 0 2 5\n\
                    free 0 2 8\nfree 0 3 6\nfree 0 3 never\nfree 1 1 4\n";
        let waits = Waits::read(text).expect("is valid");
        assert_eq!(waits.all, BTreeMap::from([(0, [9, 7])]));
        assert_eq!(waits.limits, BTreeMap::from([(0, BTreeSet::from([64]))]));
        assert_eq!(
            waits.frees,
            BTreeMap::from([
                (0, BTreeMap::from([(2, Some(8)), (3, None)])),
                (1, BTreeMap::from([(1, Some(4))])),
            ])
        );
        for cut in [
            "free 0 2",
            "free 0 2 x",
            "all 0 9",
            "free 0 2 5 6",
            "limit 0 1 2",
            "",
        ] {
            let is_read = Waits::read(&format!("free 1 1 4\n{cut}\n")).is_some();
            assert!(!is_read, "{cut}");
        }
    }
}
