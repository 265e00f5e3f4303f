//! [`Ledger`]: how much of each simulated GPU each process holds, in a file that all processes of a run map, so that they share its memory.
//!
//! A process enters what it holds and nothing else, each figure with one store, so the file is right at every moment, also when a process is killed
//! between two of them. Who asks for more first takes the lock, adds up what the others hold, and enters what it got. The lock is free again when
//! its holder dies, and what a process that is gone held is given back when somebody is refused or asks for figures.

use std::cell::UnsafeCell;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use harness_allocator::units::Bytes;

use crate::settings::MOST_DEVICES;

/// The variable with the path of the ledger.
pub const LEDGER: &str = "HARNESS_GPU_LEDGER";
/// Processes that can hold memory at one time.
const MOST_PROCESSES: usize = 1024;
/// The first word of a file: a mark, and the version of the layout.
const MARK: u64 = 0x4841_524e_4c45_4401;
const DEVICES: usize = MOST_DEVICES as usize;

/// The layout of the file.
#[repr(C)]
struct Layout {
    mark: AtomicU64,
    lock: UnsafeCell<libc::pthread_mutex_t>,
    /// Entries behind these were never used.
    used_entries: AtomicU64,
    /// By device: the most bytes that all processes ever held together.
    peaks: [AtomicU64; DEVICES],
    entries: [Entry; MOST_PROCESSES],
}

/// What one process holds. A process is known by its number and the time at which it started, since numbers are used again.
#[repr(C)]
struct Entry {
    /// 0 where the entry is free.
    pid: AtomicU64,
    started: AtomicU64,
    held: [AtomicU64; DEVICES],
}

/// The file, mapped into this process.
#[derive(Debug)]
pub struct Ledger {
    layout: NonNull<Layout>,
}

// SAFETY: the mapping belongs to the process, not to a thread; all of it is atomics and a lock made to be shared.
unsafe impl Send for Ledger {}
// SAFETY: as above.
unsafe impl Sync for Ledger {}

/// What a process holds of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Holding {
    pub pid: u32,
    /// Its context included.
    pub held: Bytes,
}

impl Ledger {
    /// Makes the file.
    ///
    /// # Errors
    /// That it cannot be made.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.set_len(size_of::<Layout>() as u64)?;
        let ledger = Self::map(&file)?;
        init_lock(ledger.layout().lock.get())?;
        ledger.layout().mark.store(MARK, Ordering::Release);
        Ok(ledger)
    }

    /// Opens a file that [`Ledger::create`] made.
    ///
    /// # Errors
    /// That it cannot be opened, or is no ledger.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let no_ledger = || io::Error::new(io::ErrorKind::InvalidData, "not a ledger of simulated GPUs");
        if file.metadata()?.len() != size_of::<Layout>() as u64 {
            return Err(no_ledger());
        }
        let ledger = Self::map(&file)?;
        if ledger.layout().mark.load(Ordering::Acquire) == MARK { Ok(ledger) } else { Err(no_ledger()) }
    }

    fn map(file: &File) -> io::Result<Self> {
        // SAFETY: a new mapping of a file that is as long as `Layout`; nothing is replaced.
        let address = unsafe {
            libc::mmap(ptr::null_mut(), size_of::<Layout>(), libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        match NonNull::new(address) {
            Some(address) if address.as_ptr() != libc::MAP_FAILED => Ok(Self { layout: address.cast() }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    const fn layout(&self) -> &Layout {
        // SAFETY: the mapping is page-aligned, as large as `Layout`, and lives as long as this; any bytes are valid atomics.
        unsafe { self.layout.as_ref() }
    }

    /// What living processes hold of a device, by entry: those that hold nothing are left out.
    #[must_use]
    pub fn holdings(&self, device: u32) -> Vec<Holding> {
        let locked = self.lock();
        locked.give_back_of_the_dead(None);
        let holding = |entry: &Entry| Holding {
            pid: u32::try_from(entry.pid.load(Ordering::Relaxed)).unwrap_or(0),
            held: Bytes(entry.held.get(device as usize).map_or(0, |held| held.load(Ordering::Relaxed))),
        };
        locked.entries().iter().map(holding).filter(|holding| holding.pid != 0 && holding.held > Bytes::ZERO).collect()
    }

    /// Enters what another living process holds of a device, until it says otherwise or ends: for programs that use no device of ours.
    ///
    /// # Errors
    /// That there is no such process, or that too many are entered.
    pub fn enter(&self, pid: u32, device: u32, held: Bytes) -> io::Result<()> {
        let locked = self.lock();
        let entered = locked.entries().iter().position(|entry| entry.pid.load(Ordering::Relaxed) == u64::from(pid));
        let entry = entered.or_else(|| locked.enter(pid.into())).map(|index| &self.layout().entries[index]);
        let held_of = entry.and_then(|entry| entry.held.get(device as usize)).ok_or(io::ErrorKind::NotFound)?;
        held_of.store(held.0, Ordering::Relaxed);
        Ok(())
    }

    /// Gives back what processes held that are gone.
    pub fn give_back_of_the_dead(&self) {
        self.lock().give_back_of_the_dead(None);
    }

    /// The most bytes of a device that all processes ever held together.
    #[must_use]
    pub fn peak(&self, device: u32) -> Bytes {
        Bytes(self.layout().peaks.get(device as usize).map_or(0, |peak| peak.load(Ordering::Relaxed)))
    }

    fn lock(&self) -> Locked<'_> {
        let lock = self.layout().lock.get();
        // SAFETY: the lock was made by `create` and lives as long as the mapping. What its dead holder left is whole, as the module says.
        unsafe {
            if libc::pthread_mutex_lock(lock) == libc::EOWNERDEAD {
                libc::pthread_mutex_consistent(lock);
            }
        }
        Locked { layout: self.layout() }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing refers to it any more.
        unsafe { libc::munmap(self.layout.as_ptr().cast(), size_of::<Layout>()) };
    }
}

/// Makes a lock that processes share and that is free again when its holder dies.
fn init_lock(lock: *mut libc::pthread_mutex_t) -> io::Result<()> {
    let mut attributes = MaybeUninit::uninit();
    // SAFETY: the attributes are initialized by the first call that gets them; the lock lies in a mapping that nobody else knows yet.
    let answers = unsafe {
        [
            libc::pthread_mutexattr_init(attributes.as_mut_ptr()),
            libc::pthread_mutexattr_setpshared(attributes.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED),
            libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST),
            libc::pthread_mutex_init(lock, attributes.as_ptr()),
            libc::pthread_mutexattr_destroy(attributes.as_mut_ptr()),
        ]
    };
    answers.into_iter().find(|answer| *answer != 0).map_or(Ok(()), |error| Err(io::Error::from_raw_os_error(error)))
}

/// The ledger while this thread has its lock.
struct Locked<'a> {
    layout: &'a Layout,
}

impl Locked<'_> {
    /// Those that were ever used.
    fn entries(&self) -> &[Entry] {
        let used = self.layout.used_entries.load(Ordering::Relaxed) as usize;
        &self.layout.entries[..used.min(MOST_PROCESSES)]
    }

    /// What all processes but one hold of a device.
    fn held_by_others(&self, device: usize, own: Option<usize>) -> Bytes {
        let others = self.entries().iter().enumerate().filter(|(index, _)| Some(*index) != own);
        Bytes(others.fold(0, |sum, (_, entry)| sum.saturating_add(entry.held[device].load(Ordering::Relaxed))))
    }

    /// Frees the entries of processes that are gone; `own` is known not to be. Tells whether there were any.
    fn give_back_of_the_dead(&self, own: Option<usize>) -> bool {
        let mut found = false;
        for (_, entry) in self.entries().iter().enumerate().filter(|(index, _)| Some(*index) != own) {
            let pid = entry.pid.load(Ordering::Relaxed);
            if pid != 0 && started(pid) != Some(entry.started.load(Ordering::Relaxed)) {
                entry.held.iter().for_each(|held| held.store(0, Ordering::Relaxed));
                entry.pid.store(0, Ordering::Relaxed);
                found = true;
            }
        }
        found
    }

    /// A free entry for a process. `None` where so many live already.
    fn enter(&self, pid: u64) -> Option<usize> {
        let is_free = |entry: &Entry| entry.pid.load(Ordering::Relaxed) == 0;
        let free = |locked: &Self| locked.entries().iter().position(is_free);
        let fresh = || Some(self.entries().len()).filter(|index| *index < MOST_PROCESSES);
        let index = free(self).or_else(fresh).or_else(|| self.give_back_of_the_dead(None).then(|| free(self)).flatten())?;
        let entry = &self.layout.entries[index];
        entry.started.store(started(pid)?, Ordering::Relaxed);
        entry.pid.store(pid, Ordering::Relaxed);
        self.layout.used_entries.fetch_max(index as u64 + 1, Ordering::Relaxed);
        Some(index)
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // SAFETY: this thread has the lock.
        unsafe { libc::pthread_mutex_unlock(self.layout.lock.get()) };
    }
}

/// When a living process was started, in ticks since the machine was. `None` for one that has ended, waited for or not.
fn started(pid: u64) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may hold anything: the state is the third word of the file, the number of threads the twentieth.
    let words: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let (state, threads) = (words.first()?, words.get(17)?);
    // A process whose first thread has ended lives as long as it has others.
    let has_ended = matches!(*state, "X" | "x") || (*state == "Z" && *threads <= "1");
    (!has_ended).then(|| words.get(19)?.parse().ok())?
}

/// What this process holds, entered in a ledger.
#[derive(Debug)]
pub struct Account {
    /// Missing where memory is not shared.
    ledger: Option<Ledger>,
    entry: Option<usize>,
}

impl Account {
    /// An account that enters nothing before memory is asked for. Without a ledger this process is alone on its devices.
    #[must_use]
    pub const fn new(ledger: Option<Ledger>) -> Self {
        Self { ledger, entry: None }
    }

    /// The ledger.
    #[must_use]
    pub const fn ledger(&self) -> Option<&Ledger> {
        self.ledger.as_ref()
    }

    /// Does what may change how much this process holds of a device. `change` is told how much others hold, and tells how much this process holds
    /// when it is done. Where it fails and processes are gone that held something, it is done once more. A process that is one too many is told
    /// that others hold everything.
    ///
    /// # Errors
    /// What `change` says.
    pub fn change<T, E>(&mut self, device: u32, mut change: impl FnMut(Bytes) -> (Result<T, E>, Bytes)) -> Result<T, E> {
        let Some(ledger) = &self.ledger else { return change(Bytes::ZERO).0 };
        let (locked, device) = (ledger.lock(), device as usize);
        if self.entry.is_none() {
            self.entry = locked.enter(std::process::id().into());
        }
        let Some(index) = self.entry else { return change(Bytes(u64::MAX)).0 };
        let mut others = locked.held_by_others(device, Some(index));
        let (mut result, mut held) = change(others);
        if result.is_err() && others > Bytes::ZERO && locked.give_back_of_the_dead(Some(index)) {
            others = locked.held_by_others(device, Some(index));
            (result, held) = change(others);
        }
        locked.layout.entries[index].held[device].store(held.0, Ordering::Relaxed);
        locked.layout.peaks[device].fetch_max(held.0.saturating_add(others.0), Ordering::Relaxed);
        result
    }

    /// Enters that this process gave memory back, so that it holds this much.
    pub fn gave_back(&self, device: u32, held: Bytes) {
        if let (Some(ledger), Some(index)) = (&self.ledger, self.entry) {
            ledger.layout().entries[index].held[device as usize].store(held.0, Ordering::Relaxed);
        }
    }

    /// What other living processes hold of a device.
    #[must_use]
    pub fn held_by_others(&self, device: u32) -> Bytes {
        let Some(ledger) = &self.ledger else { return Bytes::ZERO };
        let own = std::process::id();
        ledger.holdings(device).iter().filter(|holding| holding.pid != own).map(|holding| holding.held).sum()
    }

    /// What other processes have entered of a device, of one that is gone until somebody gives it back: that none is gone is not looked after, which takes long.
    #[must_use]
    pub fn entered_by_others(&self, device: u32) -> Bytes {
        self.ledger.as_ref().map_or(Bytes::ZERO, |ledger| ledger.lock().held_by_others(device as usize, self.entry))
    }

    /// Gives back what processes held that are gone.
    pub fn give_back_of_the_dead(&self) {
        if let Some(ledger) = &self.ledger {
            ledger.lock().give_back_of_the_dead(self.entry);
        }
    }

    /// To be called in a forked child: the entry is its parent's.
    pub const fn forked(&mut self) {
        self.entry = None;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// The account of another living process.
    fn account_of(ledger: Ledger, pid: u32) -> Account {
        let entry = ledger.lock().enter(pid.into());
        Account { ledger: Some(ledger), entry }
    }

    fn folder() -> (tempfile::TempDir, std::path::PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ledger");
        (folder, path)
    }

    /// Holds so much in all, where that fits in 10 bytes.
    fn hold(account: &mut Account, bytes: u64) -> Result<(), Bytes> {
        account.change(0, |others| if others.0 + bytes > 10 { (Err(others), Bytes::ZERO) } else { (Ok(()), Bytes(bytes)) })
    }

    #[test]
    fn what_one_process_holds_the_others_cannot_have_and_what_it_gives_back_they_can() {
        let (_folder, path) = folder();
        let mut first = Account::new(Some(Ledger::create(&path).unwrap()));
        let mut second = account_of(Ledger::open(&path).unwrap(), std::os::unix::process::parent_id());
        assert_eq!((hold(&mut first, 7), hold(&mut second, 4)), (Ok(()), Err(Bytes(7))));
        let ledger = first.ledger().unwrap();
        assert_eq!(ledger.holdings(0), [Holding { pid: std::process::id(), held: Bytes(7) }]);
        assert_eq!((ledger.holdings(1), ledger.peak(0)), (vec![], Bytes(7)));
        first.gave_back(0, Bytes(5));
        assert_eq!((hold(&mut second, 4), first.ledger().unwrap().peak(0)), (Ok(()), Bytes(9)));
    }

    #[test]
    fn what_a_killed_process_held_is_given_back_whether_somebody_waited_for_it_or_not() {
        let (_folder, path) = folder();
        let mut first = Account::new(Some(Ledger::create(&path).unwrap()));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut gone = account_of(Ledger::open(&path).unwrap(), child.id());
        assert_eq!((hold(&mut gone, 6), hold(&mut first, 5)), (Ok(()), Err(Bytes(6))));
        child.kill().unwrap();
        // It is not waited for: the entry in /proc is still there.
        while started(child.id().into()).is_some() {
            std::thread::yield_now();
        }
        assert_eq!(hold(&mut first, 5), Ok(()));
        child.wait().unwrap();
        assert_eq!(first.ledger().unwrap().holdings(0).len(), 1);
    }

    #[test]
    fn what_is_entered_for_another_process_is_held_until_that_ends() {
        let (_folder, path) = folder();
        let mut first = Account::new(Some(Ledger::create(&path).unwrap()));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let ledger = Ledger::open(&path).unwrap();
        ledger.enter(child.id(), 0, Bytes(9)).unwrap();
        ledger.enter(child.id(), 0, Bytes(6)).unwrap();
        assert_eq!((hold(&mut first, 5), hold(&mut first, 4)), (Err(Bytes(6)), Ok(())));
        assert_eq!(ledger.holdings(0).len(), 2, "one entry for each process");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(hold(&mut first, 5), Ok(()));
        assert!(ledger.enter(child.id(), 0, Bytes(6)).is_err(), "it is gone");
    }

    #[test]
    fn a_process_with_the_number_of_one_that_is_gone_holds_nothing_of_what_that_held() {
        let (_folder, path) = folder();
        let mut first = Account::new(Some(Ledger::create(&path).unwrap()));
        let mut before = account_of(Ledger::open(&path).unwrap(), std::os::unix::process::parent_id());
        hold(&mut before, 8).unwrap();
        // As if the number had been used again: the process with it was started at another time.
        let started = &before.ledger().unwrap().layout().entries[before.entry.unwrap()].started;
        started.fetch_sub(1, Ordering::Relaxed);
        assert_eq!(hold(&mut first, 9), Ok(()));
    }

    #[test]
    fn the_lock_is_free_again_when_a_thread_ends_that_has_it() {
        let (_folder, path) = folder();
        let ledger = Ledger::create(&path).unwrap();
        std::thread::scope(|scope| scope.spawn(|| std::mem::forget(ledger.lock())).join().unwrap());
        assert_eq!(hold(&mut Account::new(Some(ledger)), 10), Ok(()));
    }

    #[test]
    fn two_threads_with_accounts_of_their_own_never_hold_more_than_there_is() {
        let (_folder, path) = folder();
        let ledger = Ledger::create(&path).unwrap();
        let most = AtomicU64::new(0);
        let go = |ledger: Ledger, pid: u32| {
            let mut account = account_of(ledger, pid);
            for bytes in (0..2000).map(|round| round % 11) {
                if hold(&mut account, bytes).is_ok() {
                    let all: u64 = account.ledger().unwrap().holdings(0).iter().map(|holding| holding.held.0).sum();
                    most.fetch_max(all, Ordering::Relaxed);
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| go(Ledger::open(&path).unwrap(), std::process::id()));
            go(Ledger::open(&path).unwrap(), std::os::unix::process::parent_id());
        });
        assert!((1..=10).contains(&most.into_inner()) && ledger.peak(0) <= Bytes(10), "{}", ledger.peak(0));
    }

    #[test]
    fn a_file_that_is_no_ledger_is_refused_and_one_is_never_made_twice() {
        let (_folder, path) = folder();
        fs::write(&path, "something else").unwrap();
        assert_eq!(Ledger::open(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(Ledger::create(&path).is_err());
    }
}
