//! [`Counters`]: how a process used its simulated GPUs, in a mapped file that is complete even if
//! the process is killed.
//!
//! The process counts in the mapped file. The program that started it reads the file with
//! [`ProcessCounters::read_folder`] after the process ends.

use std::fs::{self, OpenOptions};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::{io, ops::Deref, ptr, thread, time::Duration};

use harness_allocator::units::{Bytes, Nanos};

use crate::mapping::{Mapped, SharedLayout};
use crate::{calls::Call, latency::Latency, settings::MOST_DEVICES};

/// The end of the name of a file of counters, after the process number.
pub const ENDING: &str = ".counters";
/// The first word of a file: a magic number that includes the version of the layout.
const MARK: u64 = 0x4841_524e_4750_550a;
/// Functions without a model that are listed by name.
const MOST_NAMES: usize = 128;
/// Longer names are cut.
const NAME_BYTES: usize = 56;

/// The layout of the file: atomics that start at zero.
#[derive(Debug)]
#[repr(C)]
pub struct Counters {
    mark: AtomicU64,
    devices: AtomicU64,
    memory: AtomicU64,
    /// Kernels, graphs, copies, host functions and event records submitted.
    submitted: AtomicU64,
    memory_reads: AtomicU64,
    uncomputed_reads: AtomicU64,
    waits_of_frees: AtomicU64,
    figures: [Figures; MOST_DEVICES as usize],
    /// The bounds of estimated cuDNN workspaces: the most bytes above the lower bound, and below
    /// the upper bound.
    workspace_bounds: [AtomicU64; 2],
    graph_requests: AtomicU64,
    /// Calls with an injected latency.
    slow: [AtomicU64; Call::ALL.len()],
    /// Failed calls that request no device memory for the program, and those of them with an
    /// injected failure.
    failed_calls: [[AtomicU64; 2]; Call::ALL.len()],
    /// The file name of the program that the process executes.
    program: Text,
    /// The error of the first call that the GPU refused for another reason than its memory, and
    /// the function.
    refusal: AtomicU64,
    refused: Text,
    names: AtomicU64,
    texts: [Text; MOST_NAMES],
}

type Text = [AtomicU64; NAME_BYTES / 8];

/// Stores a text, which ends at its first zero.
fn store(text: &Text, value: &[u8]) {
    let mut bytes = [0_u8; NAME_BYTES];
    let len = value.len().min(NAME_BYTES);
    bytes[..len].copy_from_slice(&value[..len]);
    for (word, chunk) in text.iter().zip(bytes.as_chunks().0) {
        word.store(u64::from_le_bytes(*chunk), Ordering::Relaxed);
    }
}

/// [`DeviceCounters`] in the file.
#[derive(Debug)]
#[repr(C)]
struct Figures {
    used: AtomicU64,
    peak: AtomicU64,
    mallocs: AtomicU64,
    frees: AtomicU64,
    failed: AtomicU64,
    injected: AtomicU64,
    /// The most bytes in use since the program last wrote this word (`counters.py`).
    recent_peak: AtomicU64,
}

// SAFETY: all of it is atomics, and any bytes are valid atomics.
unsafe impl SharedLayout for Counters {}

/// The counters of the running process. A forked child starts its own; a program after `exec`
/// continues those of the process.
#[derive(Debug)]
pub struct OwnCounters {
    /// Null until the process counts something.
    counters: AtomicPtr<Counters>,
    folder: Option<PathBuf>,
    devices: u32,
    memory: Bytes,
}

impl OwnCounters {
    /// Counts in a file of `folder`; without a folder in private memory.
    pub fn new(folder: Option<&Path>, devices: u32, memory: Bytes) -> Self {
        Self {
            counters: AtomicPtr::new(ptr::null_mut()),
            folder: folder.map(Path::to_owned),
            devices,
            memory,
        }
    }

    /// Opens the counters unless they are open.
    pub fn open(&self) -> &'static Counters {
        let known = self.counters.load(Ordering::Acquire);
        // SAFETY: the pointer is null or came from a reference that lives as long as the program.
        unsafe { known.as_ref() }.unwrap_or_else(|| {
            let counters = self.create();
            let opened = ptr::from_ref(counters).cast_mut();
            let stored = self.counters.compare_exchange(
                ptr::null_mut(),
                opened,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            // SAFETY: as above; another thread may have opened the file at the same time.
            stored.map_or_else(|other| unsafe { &*other }, |_| counters)
        })
    }

    fn create(&self) -> &'static Counters {
        let path = self
            .folder
            .as_ref()
            .map(|folder| folder.join(format!("{}{ENDING}", std::process::id())));
        let counters = path.map_or_else(in_memory, |path| {
            map(&path).unwrap_or_else(|error| {
                eprintln!(
                    "harness: process {} is not counted: {}: {error}",
                    std::process::id(),
                    path.display()
                );
                in_memory()
            })
        });
        counters
            .devices
            .store(self.devices.into(), Ordering::Relaxed);
        counters.memory.store(self.memory.0, Ordering::Relaxed);
        let program = fs::read_link("/proc/self/exe").unwrap_or_default();
        store(
            &counters.program,
            program.file_name().unwrap_or_default().as_bytes(),
        );
        counters
            .figures
            .iter()
            .for_each(|figures| figures.used.store(0, Ordering::Relaxed));
        counters.mark.store(MARK, Ordering::Release);
        counters
    }

    /// Applies the injected latencies of a call, and counts it if there are any. Returns their sum.
    pub fn delay(&self, latencies: &[Latency], call: Call) -> Nanos {
        let by = Latency::sum(latencies, call);
        if by > Nanos::ZERO {
            self.open().slow[call as usize].fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_nanos(by.0));
        }
        by
    }

    /// Starts the counters of a forked child, which are opened when it first counts something.
    pub fn start_child(&self) {
        self.counters.store(ptr::null_mut(), Ordering::Release);
    }
}

impl Deref for OwnCounters {
    type Target = Counters;

    fn deref(&self) -> &Counters {
        self.open()
    }
}

impl Counters {
    pub fn count_allocation(&self, device: usize, used: Bytes, injected: bool, failed: bool) {
        let figures = &self.figures[device];
        figures.mallocs.fetch_add(1, Ordering::Relaxed);
        figures.failed.fetch_add(failed.into(), Ordering::Relaxed);
        figures
            .injected
            .fetch_add(injected.into(), Ordering::Relaxed);
        self.set_used(device, used);
    }

    pub fn count_frees(&self, device: usize, used: Bytes, freed: u64) {
        self.figures[device]
            .frees
            .fetch_add(freed, Ordering::Relaxed);
        self.set_used(device, used);
    }

    /// Counts a failed call that requests host memory, or memory of a library.
    pub fn count_failed_call(&self, call: Call, injected: bool) {
        let [failed, of_them_injected] = &self.failed_calls[call as usize];
        failed.fetch_add(1, Ordering::Relaxed);
        of_them_injected.fetch_add(injected.into(), Ordering::Relaxed);
    }

    /// Sets the bytes of a device in use and raises the peak.
    pub fn set_used(&self, device: usize, used: Bytes) {
        let figures = &self.figures[device];
        figures.used.store(used.0, Ordering::Relaxed);
        for peak in [&figures.peak, &figures.recent_peak] {
            peak.fetch_max(used.0, Ordering::Relaxed);
        }
    }

    /// Notes an estimated workspace of cuDNN, which is this much above its lower and below its
    /// upper bound.
    pub fn note_workspace(&self, above_least: u64, below_most: u64) {
        for (bound, distance) in self.workspace_bounds.iter().zip([above_least, below_most]) {
            bound.fetch_max(distance, Ordering::Relaxed);
        }
    }

    /// The clock of the simulated GPUs: the number of pieces of work submitted so far.
    pub const fn submitted(&self) -> &AtomicU64 {
        &self.submitted
    }

    /// Counts a freed block of PyTorch's allocator that waited for the work of another stream.
    pub fn count_wait_of_free(&self) {
        self.waits_of_frees.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request of a CUDA graph for device memory.
    pub fn count_graph_request(&self) {
        self.graph_requests.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a read of the amount of free memory.
    pub fn count_memory_read(&self) {
        self.memory_reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a read of values that no model has computed.
    pub fn count_uncomputed_read(&self) {
        self.uncomputed_reads.fetch_add(1, Ordering::Relaxed);
    }

    pub fn uncomputed_reads(&self) -> u64 {
        self.uncomputed_reads.load(Ordering::Relaxed)
    }

    /// Notes a call that the GPU refused for another reason than its memory. Keeps the first.
    pub fn note_refusal(&self, function: &[u8], error: u64) {
        let first = self
            .refusal
            .compare_exchange(0, error, Ordering::Relaxed, Ordering::Relaxed);
        if first.is_ok() {
            store(&self.refused, function);
        }
    }

    /// Lists a function without a model that was called. Callers list each function once.
    pub fn note_unmodelled(&self, name: &[u8]) {
        let index = self.names.fetch_add(1, Ordering::AcqRel) as usize;
        let Some(text) = self.texts.get(index) else {
            return;
        };
        store(text, name);
    }
}

/// Maps the file of this process. A program before `exec` may have created it.
fn map(path: &Path) -> io::Result<&'static Counters> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    let counters: &'static Mapped<Counters> = Box::leak(Box::new(Mapped::create(&file)?));
    Ok(counters)
}

fn in_memory() -> &'static Counters {
    // SAFETY: zeros are valid atomics.
    Box::leak(unsafe { Box::new_zeroed().assume_init() })
}

/// The counters of one process, read from its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessCounters {
    pub pid: u32,
    pub devices: Vec<DeviceCounters>,
    pub submitted: u64,
    /// How often the process read the amount of free memory.
    pub memory_reads: u64,
    /// How often the process copied bytes from a device that only real kernels would have computed.
    /// 0 with computed values.
    pub uncomputed_reads: u64,
    /// How often freed blocks of PyTorch's allocator waited for the work of another stream.
    pub waits_of_frees: u64,
    /// How often CUDA graphs requested device memory for their nodes.
    pub graph_requests: u64,
    /// How far estimated cuDNN workspaces may be below and above their estimates.
    pub workspace_bounds: [u64; 2],
    /// The number of calls with an injected latency, by function.
    pub slow: Vec<(Call, u64)>,
    /// Failed calls that request host memory or memory of a library: all, and those with an
    /// injected failure.
    pub failed_calls: Vec<(Call, [u64; 2])>,
    /// Called functions without a model, in the order of their first calls.
    pub not_modelled: Vec<String>,
    /// The file name of the program that the process executed last.
    pub program: String,
    /// The first call that the GPU refused for another reason than its memory, and the error.
    pub refusal: Option<(String, u64)>,
}

/// The counters of one process on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCounters {
    pub memory: Bytes,
    /// Bytes in use when the file was read, without the context.
    pub used: Bytes,
    /// The most bytes ever in use, without the context.
    pub peak: Bytes,
    pub mallocs: u64,
    pub frees: u64,
    /// Failed requests, including injected failures.
    pub failed: u64,
    pub injected: u64,
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn name(words: &Text) -> String {
    let bytes = words.each_ref().map(|word| read(word).to_le_bytes());
    let bytes = bytes.concat();
    let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(name).into_owned()
}

impl ProcessCounters {
    /// Reads the counters in a folder, by process number. Skips other files and processes that
    /// ended before they had a device.
    pub fn read_folder(folder: &Path) -> io::Result<Vec<Self>> {
        let paths = fs::read_dir(folder)?
            .map(|entry| Ok(entry?.path()))
            .collect::<io::Result<Vec<PathBuf>>>()?;
        let numbered = paths.iter().filter_map(|path| {
            Some((
                path.file_name()?
                    .to_str()?
                    .strip_suffix(ENDING)?
                    .parse()
                    .ok()?,
                path,
            ))
        });
        let read = |(pid, path): (u32, &PathBuf)| {
            let file = OpenOptions::new().read(true).write(true).open(path)?;
            Ok(Mapped::open(&file)
                .ok()
                .and_then(|counters| Self::new(pid, &counters)))
        };
        let mut counters: Vec<Self> = numbered
            .filter_map(|file| read(file).transpose())
            .collect::<io::Result<_>>()?;
        counters.sort_by_key(|process| process.pid);
        Ok(counters)
    }

    /// Reads a file of counters; `None` for other files.
    fn new(pid: u32, counters: &Counters) -> Option<Self> {
        if counters.mark.load(Ordering::Acquire) != MARK {
            return None;
        }
        let device = |Figures {
                          used,
                          peak,
                          mallocs,
                          frees,
                          failed,
                          injected,
                          recent_peak: _,
                      }: &Figures| DeviceCounters {
            memory: Bytes(read(&counters.memory)),
            used: Bytes(read(used)),
            peak: Bytes(read(peak)),
            mallocs: read(mallocs),
            frees: read(frees),
            failed: read(failed),
            injected: read(injected),
        };
        Some(Self {
            pid,
            devices: counters
                .figures
                .iter()
                .take(read(&counters.devices) as usize)
                .map(device)
                .collect(),
            submitted: read(&counters.submitted),
            memory_reads: read(&counters.memory_reads),
            uncomputed_reads: read(&counters.uncomputed_reads),
            waits_of_frees: read(&counters.waits_of_frees),
            graph_requests: read(&counters.graph_requests),
            workspace_bounds: counters.workspace_bounds.each_ref().map(read),
            slow: Call::ALL
                .iter()
                .copied()
                .zip(counters.slow.iter().map(read))
                .filter(|(_, calls)| *calls > 0)
                .collect(),
            failed_calls: Call::ALL
                .iter()
                .copied()
                .zip(
                    counters
                        .failed_calls
                        .iter()
                        .map(|figures| figures.each_ref().map(read)),
                )
                .filter(|(_, [failed, _])| *failed > 0)
                .collect(),
            not_modelled: counters
                .texts
                .iter()
                .take(read(&counters.names) as usize)
                .map(name)
                .collect(),
            program: name(&counters.program),
            refusal: match read(&counters.refusal) {
                0 => None,
                error => Some((name(&counters.refused), error)),
            },
        })
    }
}

#[cfg(test)]
mod tests;
