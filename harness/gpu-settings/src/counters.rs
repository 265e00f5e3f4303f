//! [`Counters`]: what a process did on its simulated GPUs, kept in a file that is shared memory, so that it is complete however the process ends.
//!
//! The process maps the file and counts in it; whoever started the program reads it with [`Tally::read`] when the process is gone.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use harness_allocator::units::{Bytes, Nanos};

use crate::calls::SlowCall;
use crate::latency::Latency;
use crate::settings::MOST_DEVICES;

/// How the name of a file of counters ends; in front of it stands the number of the process.
pub const ENDING: &str = ".counters";
/// The first words of a file: a mark, and the version of the layout.
const MARK: u64 = 0x4841_524e_4750_5502;
/// How many functions without a model are noted by name.
const MOST_NAMES: usize = 128;
/// Longer names are cut.
const NAME_BYTES: usize = 56;

/// The figures of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Figure {
    /// Bytes used now, the context apart.
    Used,
    /// The most bytes ever used, the context apart.
    Peak,
    /// Allocations asked for: `cudaMalloc`, `cudaMallocAsync`, `cuMemCreate` and their like. Failed ones count.
    Mallocs,
    /// Allocations given back.
    Frees,
    /// Allocations that failed, injected failures included.
    Failed,
    /// Allocations that failed because that was asked for.
    Injected,
}

const FIGURES: usize = 6;

/// The layout of the file. All of it is atomics, zero at first.
#[repr(C)]
pub struct Counters {
    mark: AtomicU64,
    devices: AtomicU64,
    memory: AtomicU64,
    /// Kernels, graphs, copies, host functions and records submitted.
    submitted: AtomicU64,
    figures: [[AtomicU64; FIGURES]; MOST_DEVICES as usize],
    /// Calls that took longer because that was asked for.
    slow: [AtomicU64; SlowCall::ALL.len()],
    names: AtomicU64,
    texts: [[AtomicU64; NAME_BYTES / 8]; MOST_NAMES],
}

impl Counters {
    /// Counters of a process, in a new file of a folder, or where that cannot be made, or none is given, in memory of its own.
    pub fn of_this_process(folder: Option<&Path>, devices: u32, memory: Bytes) -> &'static Self {
        let counters =
            folder.and_then(|folder| map(&folder.join(format!("{}{ENDING}", std::process::id()))).ok()).unwrap_or_else(in_memory);
        counters.devices.store(devices.into(), Ordering::Relaxed);
        counters.memory.store(memory.0, Ordering::Relaxed);
        counters.mark.store(MARK, Ordering::Release);
        counters
    }

    /// Counts one more.
    pub fn add(&self, device: usize, figure: Figure) {
        self.figures[device][figure as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an allocation that was asked for, and how it ended.
    pub fn count_allocation(&self, device: usize, used: Bytes, injected: bool, failed: bool) {
        self.add(device, Figure::Mallocs);
        if failed {
            self.add(device, Figure::Failed);
        }
        if injected {
            self.add(device, Figure::Injected);
        }
        self.set_used(device, used);
    }

    /// Notes how many bytes of a device are used from now on.
    pub fn set_used(&self, device: usize, used: Bytes) {
        let figures = &self.figures[device];
        figures[Figure::Used as usize].store(used.0, Ordering::Relaxed);
        figures[Figure::Peak as usize].fetch_max(used.0, Ordering::Relaxed);
    }

    /// Has this call take as much longer as these ask for, and counts it. Returns by how much.
    pub fn wait(&self, latencies: &[Latency], call: SlowCall) -> Nanos {
        let by: Nanos = latencies.iter().filter(|latency| latency.is_of(call)).map(|latency| latency.by).sum();
        if by > Nanos::ZERO {
            self.slow[call as usize].fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_nanos(by.0));
        }
        by
    }

    /// The clock of the simulated GPUs: how much work was submitted so far.
    pub const fn submitted(&self) -> &AtomicU64 {
        &self.submitted
    }

    /// Notes a function that was called and has no model. Each is to be noted once.
    pub fn note_unmodelled(&self, name: &[u8]) {
        let index = self.names.fetch_add(1, Ordering::AcqRel) as usize;
        let Some(text) = self.texts.get(index) else { return };
        let mut bytes = [0_u8; NAME_BYTES];
        let len = name.len().min(NAME_BYTES);
        bytes[..len].copy_from_slice(&name[..len]);
        for (word, chunk) in text.iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_le_bytes(*chunk), Ordering::Relaxed);
        }
    }
}

/// The file, mapped into memory and shared with whoever else maps it.
fn map(path: &Path) -> io::Result<&'static Counters> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
    file.set_len(size_of::<Counters>() as u64)?;
    // SAFETY: a new mapping of a file that is as long as `Counters`; nothing is replaced.
    let address = unsafe {
        libc::mmap(std::ptr::null_mut(), size_of::<Counters>(), libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is page-aligned, never unmapped, as large as `Counters`, and any bytes are valid atomics.
    Ok(unsafe { &*address.cast::<Counters>() })
}

fn in_memory() -> &'static Counters {
    Box::leak(Box::new(Counters {
        mark: AtomicU64::new(0),
        devices: AtomicU64::new(0),
        memory: AtomicU64::new(0),
        submitted: AtomicU64::new(0),
        figures: [const { [const { AtomicU64::new(0) }; FIGURES] }; MOST_DEVICES as usize],
        slow: [const { AtomicU64::new(0) }; SlowCall::ALL.len()],
        names: AtomicU64::new(0),
        texts: [const { [const { AtomicU64::new(0) }; NAME_BYTES / 8] }; MOST_NAMES],
    }))
}

/// What one process did, read from its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tally {
    /// The number of the process.
    pub pid: u32,
    /// Its devices, by index.
    pub devices: Vec<DeviceTally>,
    /// Kernels, graphs, copies, host functions and records submitted.
    pub submitted: u64,
    /// Calls that took longer because that was asked for, and how many there were.
    pub slow: Vec<(SlowCall, u64)>,
    /// Functions that were called and have no model, in the order of their first calls.
    pub not_modelled: Vec<String>,
}

/// What one process did on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct DeviceTally {
    pub memory: Bytes,
    /// Bytes used when the file was read, the context apart.
    pub used: Bytes,
    /// The most bytes ever used, the context apart.
    pub peak: Bytes,
    /// Allocations asked for, failed ones included.
    pub mallocs: u64,
    /// Allocations given back.
    pub frees: u64,
    /// Allocations that failed, injected failures included.
    pub failed: u64,
    /// Allocations that failed because that was asked for.
    pub injected: u64,
}

impl Tally {
    /// What the processes did that left counters in a folder, by their numbers. Other files, and those of processes that ended before they had a
    /// device, are passed over.
    ///
    /// # Errors
    /// That the folder or a file in it cannot be read.
    pub fn read_folder(folder: &Path) -> io::Result<Vec<Self>> {
        let paths = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<PathBuf>>>()?;
        let numbered = paths.iter().filter_map(|path| Some((path.file_name()?.to_str()?.strip_suffix(ENDING)?.parse().ok()?, path)));
        let read = |(pid, path): (u32, &PathBuf)| Ok(Self::read(pid, &fs::read(path)?));
        let mut tallies: Vec<Self> = numbered.filter_map(|file| read(file).transpose()).collect::<io::Result<_>>()?;
        tallies.sort_by_key(|tally| tally.pid);
        Ok(tallies)
    }

    /// What a file of counters says. `None` where it is not one.
    #[must_use]
    pub fn read(pid: u32, file: &[u8]) -> Option<Self> {
        let words: Vec<u64> = file.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let ([mark, devices, memory, submitted], rest) = words.split_first_chunk()?;
        if *mark != MARK || file.len() != size_of::<Counters>() {
            return None;
        }
        let (figures, rest) = rest.split_at(FIGURES * MOST_DEVICES as usize);
        let devices = figures.as_chunks::<FIGURES>().0.iter().take(usize::try_from(*devices).ok()?).map(|figures| {
            let figure = |figure: Figure| figures[figure as usize];
            DeviceTally {
                memory: Bytes(*memory),
                used: Bytes(figure(Figure::Used)),
                peak: Bytes(figure(Figure::Peak)),
                mallocs: figure(Figure::Mallocs),
                frees: figure(Figure::Frees),
                failed: figure(Figure::Failed),
                injected: figure(Figure::Injected),
            }
        });
        let (slow, rest) = rest.split_at_checked(SlowCall::ALL.len())?;
        let slow = SlowCall::ALL.into_iter().zip(slow.iter().copied()).filter(|(_, calls)| *calls > 0);
        let (names, texts) = rest.split_first()?;
        let name = |words: &[u64; NAME_BYTES / 8]| {
            let bytes = words.map(u64::to_le_bytes).concat();
            let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..len]).into_owned()
        };
        let not_modelled = texts.as_chunks().0.iter().take(usize::try_from(*names).unwrap_or(MOST_NAMES)).map(name).collect();
        Some(Self { pid, devices: devices.collect(), submitted: *submitted, slow: slow.collect(), not_modelled })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn what_a_process_counted_is_read_from_its_file() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let counters = Counters::of_this_process(Some(folder.path()), 2, Bytes::gib(8));
        counters.add(1, Figure::Mallocs);
        counters.add(1, Figure::Failed);
        counters.set_used(1, Bytes::mib(6));
        counters.set_used(1, Bytes::mib(4));
        counters.wait(&["cudaFree:1ns".parse().expect("a latency")], SlowCall::Free);
        counters.note_unmodelled(b"cufileRead");
        counters.note_unmodelled(&[b'x'; 80]);
        fs::write(folder.path().join("1.counters"), "damaged").expect("a file can be written");
        let none = DeviceTally { memory: Bytes::gib(8), used: Bytes(0), peak: Bytes(0), mallocs: 0, frees: 0, failed: 0, injected: 0 };
        let expected = Tally {
            pid: std::process::id(),
            devices: vec![none, DeviceTally { used: Bytes::mib(4), peak: Bytes::mib(6), mallocs: 1, failed: 1, ..none }],
            submitted: 0,
            slow: vec![(SlowCall::Free, 1)],
            not_modelled: vec!["cufileRead".to_owned(), "x".repeat(NAME_BYTES)],
        };
        assert_eq!(Tally::read_folder(folder.path()).expect("it can be read"), [expected]);
    }

    #[test]
    fn without_a_folder_a_process_counts_for_itself() {
        let counters = Counters::of_this_process(Some(Path::new("/nonexistent")), 1, Bytes::gib(1));
        counters.add(0, Figure::Frees);
        assert_eq!(counters.figures[0][Figure::Frees as usize].load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_call_takes_as_much_longer_as_all_that_name_it_ask_for_and_is_counted() {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let counters = Counters::of_this_process(Some(folder.path()), 1, Bytes::gib(1));
        let latencies = ["cudaMalloc:2ms", "any:1ms", "all:500us"].map(|text| text.parse().expect("a latency"));
        let began = Instant::now();
        let waited = [SlowCall::Malloc, SlowCall::Create, SlowCall::Free, SlowCall::Malloc].map(|call| counters.wait(&latencies, call));
        assert!(began.elapsed() >= Duration::from_millis(9));
        assert_eq!(waited, [3500, 1500, 500, 3500].map(Nanos::micros));
        assert_eq!(counters.wait(&latencies[1..2], SlowCall::HostAlloc), Nanos::ZERO);
        let tally = Tally::read_folder(folder.path()).expect("it can be read").remove(0);
        assert_eq!(tally.slow, [(SlowCall::Malloc, 2), (SlowCall::Create, 1), (SlowCall::Free, 1)]);
    }
}
