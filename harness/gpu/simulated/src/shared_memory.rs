//! [`Shared`]: the memory of a GPU that shares it with the host. Page-locked memory is charged to
//! the device. The rest of the processes' memory is read at each request, for the notes of the
//! run and, with [`SharedMemory::Resident`], for the answer.

use std::path::{Path, PathBuf};

use harness_allocator::units::Bytes;
use harness_gpu_settings::ledger::Holding;
use harness_gpu_settings::settings::{Settings, SharedMemory, publish};
use harness_gpu_settings::shared_memory::{
    MemoryInUse, MemoryNotes, MemoryShare, NOTES, Resident, STACK, processes,
};
use harness_gpu_settings::text::to_variable;

use crate::stack::write_stacks;

/// The least growth of the memory in use that is written at once, as a part of the machine's
/// memory.
const STEP: u64 = 1024;

/// What this process knows of the machine's memory.
#[derive(Debug)]
pub(crate) struct Shared {
    mode: SharedMemory,
    /// `None` if the memory of processes is not read.
    run: Option<PathBuf>,
    resident: Resident,
    notes: MemoryNotes,
    /// The most memory in use that the file has.
    written: Bytes,
    /// The resident memory of the run's processes that counts.
    counted: Bytes,
}

impl Shared {
    /// Reads no process's memory if there are several devices, because each of them is in a machine
    /// of its own.
    pub(crate) fn new(settings: &Settings, run: Option<&Path>) -> Self {
        let is_read = settings.shared_memory != SharedMemory::None && settings.devices == 1;
        Self {
            mode: settings.shared_memory,
            run: run.filter(|_| is_read).map(Path::to_owned),
            resident: Resident::default(),
            notes: MemoryNotes::default(),
            written: Bytes::ZERO,
            counted: Bytes::ZERO,
        }
    }

    /// The memory in use besides that of the devices and page-locked memory, if it counts.
    pub(crate) const fn counted(&self) -> Bytes {
        self.counted
    }

    /// Whether the memory of processes counts in the next request.
    pub(crate) fn counts_resident(&self) -> bool {
        self.mode == SharedMemory::Resident
    }

    /// Starts the notes of a forked child.
    pub(crate) fn start_child(&mut self) {
        self.notes = MemoryNotes::default();
        self.written = Bytes::ZERO;
    }

    /// Whether the memory of processes is read.
    pub(crate) const fn is_read(&self) -> bool {
        self.run.is_some()
    }

    /// Reads the memory in use, notes it, and counts that of processes for the next request if the
    /// settings say so.
    pub(crate) fn look(&mut self, holdings: &[Holding], memory: Bytes) {
        if let Some(in_use) = self.in_use(holdings) {
            if self.counts_resident() {
                self.counted = in_use.sum(|share| share.pageable);
            }
            self.note(in_use, memory);
        }
    }

    /// The memory in use: of the run's processes, and of those that hold memory of the GPU.
    fn in_use(&mut self, holdings: &[Holding]) -> Option<MemoryInUse> {
        let run = self.run.as_deref()?;
        let mut pids: Vec<u32> = processes(run);
        pids.extend(holdings.iter().map(|holding| holding.pid));
        pids.sort_unstable();
        pids.dedup();
        let resident = self.resident.read(&pids, run);
        let share = |pid: u32| {
            let holding = holdings.iter().find(|holding| holding.pid == pid);
            let [held, pinned, registered] = holding.map_or([Bytes::ZERO; 3], |holding| {
                [holding.held, holding.pinned, holding.registered]
            });
            let of_process = resident.get(&pid).copied().unwrap_or_default();
            MemoryShare {
                pid,
                gpu: held.saturating_sub(pinned).0,
                pinned: pinned.0,
                pageable: of_process.saturating_sub(registered).0,
            }
        };
        let shares = pids.into_iter().map(share);
        Some(MemoryInUse {
            processes: shares
                .filter(|it| it.gpu + it.pinned + it.pageable > 0)
                .collect(),
        })
    }

    /// Notes the memory in use if it is the most so far, or the first that the machine lacks.
    fn note(&mut self, in_use: MemoryInUse, memory: Bytes) {
        let total = in_use.total();
        let is_first_short = total > memory && self.notes.short.is_none();
        if is_first_short {
            self.notes.short = Some((monotonic(), in_use.clone()));
            self.run.iter().for_each(|run| {
                write_stacks(run, &run.join(format!("{STACK}{}", std::process::id())));
            });
        }
        if total > self.notes.most.total() {
            self.notes.most = in_use;
        }
        if is_first_short || total > self.written + Bytes(memory.0 / STEP) {
            self.write();
        }
    }

    /// Writes the notes, unless the file has them.
    pub(crate) fn write(&mut self) {
        let total = self.notes.most.total();
        if let Some(run) = self.run.as_ref().filter(|_| total > self.written) {
            let file = run.join(format!("{NOTES}{}", std::process::id()));
            // On a full disk, the notes of the other processes remain.
            let _ = publish(&file, &to_variable(&self.notes));
            self.written = total;
        }
    }
}

/// Nanoseconds of a clock that all processes share.
fn monotonic() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes the time.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
