//! [`Peers`]: the ranks of a communicator, as processes of one run. They meet in memory that all of them map. Small data is in such memory too, and
//! large data in files in the folder of the run.
//!
//! A rank publishes each collective and waits only for the ranks whose data it needs, so sends and roots of broadcasts never wait. A wait has no end:
//! the program that started the run sees who waits for whom, and ends a run that hangs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use std::{collections::BTreeMap, collections::BTreeSet, io, mem::MaybeUninit, ptr};

use harness_allocator::units::Bytes;
use harness_gpu_settings::collectives::{
    Call, PREFIX, Rank, Ranks, SIZES, STACK_SIGNAL, STACKS, SmallData, Wait, beside, message_file, stack_file,
};
use harness_gpu_settings::mapping::Mapped;

/// The longest sleep within a wait. Longer waits record their Python stack.
const LOOK: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Peers {
    /// The path of the shared file; the names of other files begin with it.
    path: PathBuf,
    id: u64,
    rank: usize,
    shared: Mapped<Ranks>,
    /// The small data of all ranks, opened when needed.
    small: Vec<OnceLock<Mapped<SmallData>>>,
    /// `true` if different counts are an error. If values are not computed, a program may choose counts that ranks would have agreed on.
    is_strict: bool,
    has_noted_sizes: AtomicBool,
    is_aborted: AtomicBool,
    own: Mutex<Own>,
}

#[derive(Debug, Default)]
struct Own {
    /// The number of collectives so far.
    collectives: u32,
    /// Those whose data is not read yet.
    unread: BTreeSet<u32>,
    /// Those whose own data is in a file.
    files: BTreeSet<u32>,
    /// The numbers of messages to and from each rank.
    sent: BTreeMap<usize, u32>,
    received: BTreeMap<usize, u32>,
}

/// The ranks whose data a rank needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    Nothing,
    All,
    Rank(usize),
}

/// Why an exchange fails.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("rank {own} calls {call}, number {number} of its communicator, where rank {rank} calls {theirs}")]
    Mismatch { own: usize, call: Call, number: u32, rank: usize, theirs: Call },
    #[error("the communicator was aborted")]
    Aborted,
    #[error("NCCL needs {0} for its buffers, and the device has less free memory")]
    Memory(Bytes),
    #[error("ranks cannot exchange data: {0}")]
    Io(#[from] io::Error),
}

impl Peers {
    pub(super) fn join(folder: &Path, id: u64, ranks: usize, rank: usize, is_strict: bool) -> io::Result<Self> {
        let path = folder.join(format!("{PREFIX}{id:x}"));
        let shared = Ranks::join(&path, ranks)?;
        let process = &shared.all().get(rank).ok_or(io::ErrorKind::InvalidInput)?.process;
        // A restarted rank may read the ID of an earlier attempt from its store. NCCL cannot connect then.
        process.compare_exchange(0, std::process::id(), Ordering::AcqRel, Ordering::Acquire).map_err(|earlier| {
            io::Error::other(format!("rank {rank} cannot join a communicator that process {earlier} joined as rank {rank}"))
        })?;
        let (has_noted_sizes, is_aborted) = Default::default();
        let small = (0..ranks).map(|_| OnceLock::new()).collect();
        Ok(Self { path, id, rank, shared, small, is_strict, has_noted_sizes, is_aborted, own: Mutex::default() })
    }

    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    fn state(&self) -> &Rank {
        &self.shared.all()[self.rank]
    }

    fn own(&self) -> MutexGuard<'_, Own> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn data_file(&self, number: u32, rank: usize) -> PathBuf {
        beside(&self.path, &format!("-{number}-{rank}"))
    }

    /// Publishes the next collective with this rank's data, and returns its number. Empty data are zeros.
    pub(super) fn publish(&self, call: Call, data: &[u8]) -> io::Result<u32> {
        let own = &mut *self.own();
        own.collectives += 1;
        let number = own.collectives;
        own.unread.insert(number);
        if !data.is_empty() {
            let small = self.small(self.rank)?;
            if let Some((old, data)) = small.replaced(number).filter(|(old, _)| *old > self.least(|rank| &rank.read)) {
                self.write(own, old, &data)?;
            }
            if !small.store(number, data) {
                self.write(own, number, data)?;
            }
        }
        self.state().publish(number, call, !data.is_empty());
        wake(&self.state().published);
        // The last rank completes the collective for all.
        let least = self.least(|rank| &rank.published);
        if least >= number && self.shared.complete.fetch_max(least, Ordering::SeqCst) < least {
            wake(&self.shared.complete);
        }
        Ok(number)
    }

    fn write(&self, own: &mut Own, number: u32, data: &[u8]) -> io::Result<()> {
        own.files.insert(number);
        fs::write(self.data_file(number, self.rank), data)
    }

    fn small(&self, rank: usize) -> io::Result<&SmallData> {
        if let Some(small) = self.small[rank].get() {
            return Ok(small);
        }
        let opened = SmallData::open(&self.path, rank)?;
        Ok(self.small[rank].get_or_init(|| opened))
    }

    fn least(&self, word: impl Fn(&Rank) -> &AtomicU32) -> u32 {
        self.shared.all().iter().map(|rank| word(rank).load(Ordering::SeqCst)).min().unwrap_or(0)
    }

    /// Waits for the needed ranks to publish the collective, and returns their data, by rank. `None` if they do not within `patience`.
    pub(super) fn collect(
        &self,
        (number, call): (u32, Call),
        needs: Needs,
        patience: Option<Duration>,
    ) -> Result<Option<Vec<Vec<u8>>>, Failure> {
        let ranks = self.shared.all();
        let (word, from) = match needs {
            Needs::Rank(rank) => (&ranks.get(rank).ok_or(io::Error::from(io::ErrorKind::InvalidInput))?.published, Some(rank)),
            Needs::All | Needs::Nothing => (&self.shared.complete, None),
        };
        let is_done = || needs == Needs::Nothing || word.load(Ordering::Acquire) >= number;
        if !self.wait(Wait::Collective(number, from), word, patience, is_done)? {
            return Ok(None);
        }
        let mut all = vec![Vec::new(); ranks.len()];
        let is_needed = |rank: usize| rank != self.rank && (needs == Needs::All || needs == Needs::Rank(rank));
        for (rank, data) in all.iter_mut().enumerate().filter(|(rank, _)| is_needed(*rank)) {
            let has_data = match ranks[rank].call(number) {
                Some((theirs, _)) if theirs != call && (self.is_strict || Call { count: call.count, ..theirs } != call) => {
                    return Err(Failure::Mismatch { own: self.rank, call, number, rank, theirs });
                }
                Some((theirs, has_data)) => {
                    if theirs.count != call.count && !self.has_noted_sizes.swap(true, Ordering::Relaxed) {
                        let note = Failure::Mismatch { own: self.rank, call, number, rank, theirs }.to_string();
                        fs::write(self.path.with_file_name(format!("{SIZES}{}", std::process::id())), note)?;
                    }
                    has_data
                }
                None => true,
            };
            if !has_data {
                continue;
            }
            if let Some(small) = self.small(rank)?.load(number) {
                *data = small;
                continue;
            }
            match fs::read(self.data_file(number, rank)) {
                Ok(bytes) => *data = bytes,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        let own = &mut *self.own();
        own.unread.remove(&number);
        self.state().read.store(own.unread.first().map_or(own.collectives, |unread| unread - 1), Ordering::SeqCst);
        if !own.files.is_empty() {
            let read = self.least(|rank| &rank.read);
            while let Some(file) = own.files.first().copied().filter(|file| *file <= read) {
                own.files.remove(&file);
                fs::remove_file(self.data_file(file, self.rank))?;
            }
        }
        Ok(Some(all))
    }

    /// Publishes the next collective, waits for all ranks and returns the data of all.
    pub(super) fn exchange(&self, call: Call, data: Vec<u8>) -> Result<Vec<Vec<u8>>, Failure> {
        let number = self.publish(call, &data)?;
        let mut all = self.collect((number, call), Needs::All, None)?.unwrap_or_default();
        all[self.rank] = data;
        Ok(all)
    }

    pub(super) fn send(&self, to: usize, data: &[u8]) -> Result<(), Failure> {
        let number = next(&mut self.own().sent, to);
        let unfinished = beside(&self.path, &format!("-unfinished-{}-{to}-{number}", self.rank));
        fs::write(&unfinished, data)?;
        fs::rename(unfinished, message_file(&self.path, self.rank, to, number))?;
        let messages = &self.shared.all().get(to).ok_or(io::Error::from(io::ErrorKind::InvalidInput))?.messages;
        messages.fetch_add(1, Ordering::Release);
        wake(messages);
        Ok(())
    }

    /// The number of the next message from a rank.
    pub(super) fn expect(&self, from: usize) -> u32 {
        next(&mut self.own().received, from)
    }

    /// Waits for a message of a rank; `None` if it does not arrive within `patience`.
    pub(super) fn receive(&self, from: usize, number: u32, patience: Option<Duration>) -> Result<Option<Vec<u8>>, Failure> {
        let file = message_file(&self.path, from, self.rank, number);
        if !self.wait(Wait::Message(number, from), &self.state().messages, patience, || file.exists())? {
            return Ok(None);
        }
        let data = fs::read(&file)?;
        fs::remove_file(file)?;
        Ok(Some(data))
    }

    /// Waits until `is_done`, which depends on a word that other ranks change. Returns whether it is.
    fn wait(&self, wait: Wait, word: &AtomicU32, patience: Option<Duration>, is_done: impl Fn() -> bool) -> Result<bool, Failure> {
        if self.is_aborted.load(Ordering::Acquire) {
            return Err(Failure::Aborted);
        }
        if is_done() || patience == Some(Duration::ZERO) {
            return Ok(is_done());
        }
        self.state().set_wait(Some(wait));
        let began = Instant::now();
        let mut has_stack = false;
        let result = loop {
            let value = word.load(Ordering::Acquire);
            if is_done() {
                break Ok(true);
            }
            if self.is_aborted.load(Ordering::Acquire) {
                break Err(Failure::Aborted);
            }
            if patience.is_some_and(|patience| began.elapsed() >= patience) {
                break Ok(false);
            }
            let time = libc::timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
            // SAFETY: the word stays mapped; other processes wake its waiters, or the time ends.
            unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const time) };
            if !has_stack && began.elapsed() >= LOOK && !is_done() {
                has_stack = true;
                // The call of a collective that is late has written it.
                let file = stack_file(&self.path, self.rank, wait);
                if !file.exists() {
                    write_stacks(&self.path, &file);
                }
            }
        };
        self.state().set_wait(None);
        result
    }

    /// Waits for a collective that never completes, because another rank calls another one.
    pub(super) fn wait_in_vain(&self, number: u32) -> Failure {
        let wait = Wait::Collective(number, None);
        self.wait(wait, &self.shared.complete, None, || false).err().unwrap_or(Failure::Aborted)
    }

    /// Leaves the communicator. If it is aborted, all waits of this rank end.
    pub(super) fn leave(&self, is_aborted: bool) {
        self.is_aborted.fetch_or(is_aborted, Ordering::Release);
        self.state().leave();
    }
}

/// Copies the Python stacks of this process, which the handler of the hook writes, to a file.
fn write_stacks(communicator: &Path, to: &Path) {
    let signal = libc::SIGRTMIN() + STACK_SIGNAL;
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the output is valid, and zeros are a valid action.
    let handler = unsafe {
        libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
        action.assume_init().sa_sigaction
    };
    let stacks = communicator.with_file_name(format!("{STACKS}{}", std::process::id()));
    if [libc::SIG_DFL, libc::SIG_IGN].contains(&handler) || File::options().write(true).truncate(true).open(&stacks).is_err() {
        return;
    }
    // SAFETY: the signal has a handler, which runs in this thread before the call returns.
    unsafe { libc::raise(signal) };
    let _ = fs::copy(stacks, to);
}

/// Wakes all that wait for a change of a word.
fn wake(word: &AtomicU32) {
    // SAFETY: the word stays mapped.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

fn next(numbers: &mut BTreeMap<usize, u32>, rank: usize) -> u32 {
    let number = numbers.entry(rank).or_default();
    *number += 1;
    *number
}

#[cfg(test)]
mod tests;
