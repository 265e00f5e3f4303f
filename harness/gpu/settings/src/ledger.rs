//! [`Ledger`]: how much of each simulated GPU each process holds, in a file that all processes of a
//! run map.
//!
//! A process writes only its own entry, one store per figure. So the file is valid at every moment,
//! even after a process is killed. A process that needs more memory takes the lock, adds up the
//! entries of the others and enters its new total. The lock is free again when its holder dies.
//! Memory of ended processes is released when a process enters, when a request fails or when a
//! process asks for figures.

use std::sync::atomic::{AtomicU64, Ordering};
use std::{cell::UnsafeCell, fs::OpenOptions, io, mem::MaybeUninit, path::Path};

use harness_allocator::units::Bytes;

use crate::mapping::{Mapped, SharedLayout};
use crate::{process::Program, settings::MOST_DEVICES};

/// The variable with the path of the ledger.
pub const LEDGER: &str = "HARNESS_GPU_LEDGER";
/// Processes that can hold memory at the same time.
const MOST_PROCESSES: usize = 1024;
/// The first word of a file: a magic number that includes the version of the layout.
const MARK: u64 = 0x4841_524e_4c45_4403;
const DEVICES: usize = MOST_DEVICES as usize;

/// The layout of the file.
#[derive(Debug)]
#[repr(C)]
struct Layout {
    mark: AtomicU64,
    lock: UnsafeCell<libc::pthread_mutex_t>,
    /// Later entries were never used.
    used_entries: AtomicU64,
    /// By device: the most bytes that all processes ever held together.
    peaks: [AtomicU64; DEVICES],
    entries: [Entry; MOST_PROCESSES],
}

// SAFETY: all of it is atomics and a lock that processes share; any bytes are valid atomics, and
// `open` checks the mark before it uses the lock.
unsafe impl SharedLayout for Layout {}

#[derive(Debug)]
#[repr(C)]
struct Entry {
    /// 0 if the entry is free.
    pid: AtomicU64,
    started: AtomicU64,
    stack: AtomicU64,
    /// Page-locked memory among the memory held, and the part of it that the program allocated
    /// itself.
    pinned: AtomicU64,
    registered: AtomicU64,
    held: [AtomicU64; DEVICES],
}

impl Entry {
    /// Starts the entry of a program that holds nothing.
    fn start(&self, pid: u64, Program { started, stack }: Program) {
        self.held
            .iter()
            .for_each(|held| held.store(0, Ordering::Relaxed));
        self.pinned.store(0, Ordering::Relaxed);
        self.registered.store(0, Ordering::Relaxed);
        self.started.store(started, Ordering::Relaxed);
        self.stack.store(stack, Ordering::Relaxed);
        self.pid.store(pid, Ordering::Relaxed);
    }

    fn is_alive(&self) -> bool {
        let entered = Program {
            started: self.started.load(Ordering::Relaxed),
            stack: self.stack.load(Ordering::Relaxed),
        };
        Program::of_process(self.pid.load(Ordering::Relaxed))
            .is_some_and(|program| program.is(entered))
    }
}

/// The file, mapped into this process.
#[derive(Debug)]
pub struct Ledger(Mapped<Layout>);

/// The memory of a device that a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    pub pid: u32,
    /// Includes its context.
    pub held: Bytes,
    /// The part of it that is page-locked memory, on all devices.
    pub pinned: Bytes,
    /// The part of that which the program allocated itself.
    pub registered: Bytes,
}

impl Ledger {
    /// Creates the file and reserves its space on the disk.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)?;
        let with_path = |error: io::Error| {
            io::Error::new(
                error.kind(),
                format!("cannot reserve space for {}: {error}", path.display()),
            )
        };
        let layout: Mapped<Layout> = Mapped::create(&file).map_err(with_path)?;
        init_lock(layout.lock.get())?;
        layout.mark.store(MARK, Ordering::Release);
        Ok(Self(layout))
    }

    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let layout = Mapped::<Layout>::open(&file)
            .ok()
            .filter(|layout| layout.mark.load(Ordering::Acquire) == MARK);
        layout.map(Self).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "not a ledger of simulated GPUs")
        })
    }

    /// Lists the living processes that hold memory of a device, in the order of their entries.
    pub fn holdings(&self, device: u32) -> Vec<Holding> {
        let locked = self.lock();
        locked.release_ended(None);
        let holding = |entry: &Entry| Holding {
            pid: u32::try_from(entry.pid.load(Ordering::Relaxed)).unwrap_or(0),
            held: Bytes(
                entry
                    .held
                    .get(device as usize)
                    .map_or(0, |held| held.load(Ordering::Relaxed)),
            ),
            pinned: Bytes(entry.pinned.load(Ordering::Relaxed)),
            registered: Bytes(entry.registered.load(Ordering::Relaxed)),
        };
        locked
            .entries()
            .iter()
            .map(holding)
            .filter(|holding| holding.pid != 0 && holding.held > Bytes::ZERO)
            .collect()
    }

    /// Enters how much another living process holds of a device, until the next such call or its
    /// end. For programs that use no simulated device. Fails if there is no such process or device,
    /// or too many processes are entered.
    pub fn enter(&self, pid: u32, device: u32, held: Bytes) -> io::Result<()> {
        let locked = self.lock();
        let entry = locked
            .find(pid.into())
            .or_else(|| locked.enter(pid.into()))
            .map(|index| &self.0.entries[index]);
        let held_of = entry
            .and_then(|entry| entry.held.get(device as usize))
            .ok_or(io::ErrorKind::NotFound)?;
        held_of.store(held.0, Ordering::Relaxed);
        Ok(())
    }

    /// Releases the memory of ended processes.
    pub fn release_ended(&self) {
        self.lock().release_ended(None);
    }

    /// The most bytes of a device that all processes ever held together.
    pub fn peak(&self, device: u32) -> Bytes {
        Bytes(
            self.0
                .peaks
                .get(device as usize)
                .map_or(0, |peak| peak.load(Ordering::Relaxed)),
        )
    }

    /// Begins new peaks, from what all processes hold.
    pub fn begin_peaks(&self) {
        let locked = self.lock();
        locked.release_ended(None);
        for (device, peak) in self.0.peaks.iter().enumerate() {
            peak.store(locked.held_by_others(device, None).0, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> Locked<'_> {
        let lock = self.0.lock.get();
        // SAFETY: `create` made the lock, and it lives as long as the mapping. After the death of a
        // holder the file is still valid.
        unsafe {
            if libc::pthread_mutex_lock(lock) == libc::EOWNERDEAD {
                libc::pthread_mutex_consistent(lock);
            }
        }
        Locked { layout: &self.0 }
    }
}

/// Initializes a lock that processes share and that is free again when its holder dies.
fn init_lock(lock: *mut libc::pthread_mutex_t) -> io::Result<()> {
    let mut attributes = MaybeUninit::uninit();
    // SAFETY: the first call initializes the attributes; no other process knows the new mapping of
    // the lock yet.
    let answers = unsafe {
        [
            libc::pthread_mutexattr_init(attributes.as_mut_ptr()),
            libc::pthread_mutexattr_setpshared(
                attributes.as_mut_ptr(),
                libc::PTHREAD_PROCESS_SHARED,
            ),
            libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST),
            libc::pthread_mutex_init(lock, attributes.as_ptr()),
            libc::pthread_mutexattr_destroy(attributes.as_mut_ptr()),
        ]
    };
    answers
        .into_iter()
        .find(|answer| *answer != 0)
        .map_or(Ok(()), |error| Err(io::Error::from_raw_os_error(error)))
}

struct Locked<'a> {
    layout: &'a Layout,
}

impl Locked<'_> {
    /// The entries that were ever used.
    fn entries(&self) -> &[Entry] {
        let used = self.layout.used_entries.load(Ordering::Relaxed) as usize;
        &self.layout.entries[..used.min(MOST_PROCESSES)]
    }

    /// The entry with a process number; 0 finds a free entry.
    fn find(&self, pid: u64) -> Option<usize> {
        self.entries()
            .iter()
            .position(|entry| entry.pid.load(Ordering::Relaxed) == pid)
    }

    fn held_by_others(&self, device: usize, own: Option<usize>) -> Bytes {
        let others = self
            .entries()
            .iter()
            .enumerate()
            .filter(|(index, _)| Some(*index) != own);
        Bytes(others.fold(0, |sum, (_, entry)| {
            sum.saturating_add(entry.held[device].load(Ordering::Relaxed))
        }))
    }

    fn release_ended(&self, own: Option<usize>) -> bool {
        let mut found = false;
        for (_, entry) in self
            .entries()
            .iter()
            .enumerate()
            .filter(|(index, _)| Some(*index) != own)
        {
            if entry.pid.load(Ordering::Relaxed) != 0 && !entry.is_alive() {
                entry.start(
                    0,
                    Program {
                        started: 0,
                        stack: 0,
                    },
                );
                found = true;
            }
        }
        found
    }

    /// Starts an entry for a living process. `None` if too many processes are entered.
    fn enter(&self, pid: u64) -> Option<usize> {
        let fresh = || Some(self.entries().len()).filter(|index| *index < MOST_PROCESSES);
        let index = self
            .find(0)
            .or_else(fresh)
            .or_else(|| self.release_ended(None).then(|| self.find(0)).flatten())?;
        self.layout.entries[index].start(pid, Program::of_process(pid)?);
        self.layout
            .used_entries
            .fetch_max(index as u64 + 1, Ordering::Relaxed);
        Some(index)
    }

    /// Starts the entry of this process. If an entry already has its process ID, an earlier program
    /// of this process wrote it and then called `exec`, which freed the program's memory.
    fn enter_this_process(&self) -> Option<usize> {
        self.release_ended(None);
        let pid = std::process::id().into();
        let Some(index) = self.find(pid) else {
            return self.enter(pid);
        };
        self.layout.entries[index].start(pid, Program::of_process(pid)?);
        Some(index)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread holds the lock.
        unsafe { libc::pthread_mutex_unlock(self.layout.lock.get()) };
    }
}

/// The memory that this process holds, entered in a ledger.
#[derive(Debug)]
pub struct LedgerAccount {
    /// `None` if processes do not share memory.
    ledger: Option<Ledger>,
    entry: Option<usize>,
}

impl LedgerAccount {
    /// Starts an account that enters nothing before the first request. Without a ledger this
    /// process is alone on its devices.
    pub const fn new(ledger: Option<Ledger>) -> Self {
        Self {
            ledger,
            entry: None,
        }
    }

    pub const fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }

    /// Runs `change` under the lock. It gets the bytes of a device that others hold; it returns its
    /// result and the new usage of this process. On failure, releases the memory of ended processes
    /// and retries once. Ended processes do not count in peaks. If too many processes are entered,
    /// others seem to hold everything.
    pub fn change<T, E>(
        &mut self,
        device: u32,
        mut change: impl FnMut(Bytes) -> (Result<T, E>, Bytes),
    ) -> Result<T, E> {
        let Some(ledger) = &self.ledger else {
            return change(Bytes::ZERO).0;
        };
        let (locked, device) = (ledger.lock(), device as usize);
        if self.entry.is_none() {
            self.entry = locked.enter_this_process();
        }
        let Some(index) = self.entry else {
            return change(Bytes(u64::MAX)).0;
        };
        let mut others = locked.held_by_others(device, Some(index));
        let (mut result, mut held) = change(others);
        if result.is_err() && others > Bytes::ZERO && locked.release_ended(Some(index)) {
            others = locked.held_by_others(device, Some(index));
            (result, held) = change(others);
        }
        locked.layout.entries[index].held[device].store(held.0, Ordering::Relaxed);
        let peak = &locked.layout.peaks[device];
        let is_higher =
            |others: Bytes| held.0.saturating_add(others.0) > peak.load(Ordering::Relaxed);
        if is_higher(others) && others > Bytes::ZERO && locked.release_ended(Some(index)) {
            others = locked.held_by_others(device, Some(index));
        }
        peak.fetch_max(held.0.saturating_add(others.0), Ordering::Relaxed);
        result
    }

    pub fn released(&self, device: u32, held: Bytes) {
        if let (Some(ledger), Some(index)) = (&self.ledger, self.entry) {
            ledger.0.entries[index].held[device as usize].store(held.0, Ordering::Relaxed);
        }
    }

    /// Enters how much of the memory that this process holds is page-locked, and how much of that
    /// the program allocated itself.
    pub fn set_pinned(&self, pinned: Bytes, registered: Bytes) {
        if let (Some(ledger), Some(index)) = (&self.ledger, self.entry) {
            let entry = &ledger.0.entries[index];
            entry.pinned.store(pinned.0, Ordering::Relaxed);
            entry.registered.store(registered.0, Ordering::Relaxed);
        }
    }

    pub fn held_by_others(&self, device: u32) -> Bytes {
        let Some(ledger) = &self.ledger else {
            return Bytes::ZERO;
        };
        let own = std::process::id();
        ledger
            .holdings(device)
            .iter()
            .filter(|holding| holding.pid != own)
            .map(|holding| holding.held)
            .sum()
    }

    /// The bytes of a device that other processes have entered. Faster than
    /// [`LedgerAccount::held_by_others`]: it does not look for ended processes.
    pub fn entered_by_others(&self, device: u32) -> Bytes {
        self.ledger.as_ref().map_or(Bytes::ZERO, |ledger| {
            ledger.lock().held_by_others(device as usize, self.entry)
        })
    }

    pub fn release_ended(&self) {
        if let Some(ledger) = &self.ledger {
            ledger.lock().release_ended(self.entry);
        }
    }

    /// Starts the account of a forked child: the entry is its parent's.
    pub const fn start_child(&mut self) {
        self.entry = None;
    }
}

#[cfg(test)]
mod tests;
