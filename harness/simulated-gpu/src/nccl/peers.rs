//! [`Peers`]: the ranks of a communicator, as processes of one run. They exchange data through files in the folder of the run.
//!
//! A rank publishes its part of a collective in a file of its own, and then the number of the collective in memory that all ranks map. It waits only
//! for the parts that it needs, so sends and roots of broadcasts never wait.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{collections::BTreeMap, io};

use harness_gpu_settings::mapping::{Mapped, SharedLayout};
use harness_gpu_settings::process::is_running;

/// The most ranks of a communicator.
const MOST_RANKS: usize = 1024;

/// How long a wait lasts before it looks whether the other process still runs.
static LOOK: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 200_000_000 };

#[derive(Debug)]
pub(super) struct Peers {
    /// The path of the shared file; the names of other files begin with it.
    path: PathBuf,
    id: u64,
    rank: usize,
    size: usize,
    shared: Mapped<Ranks>,
    own: Mutex<Own>,
}

/// The state of a rank that all ranks see.
#[derive(Debug)]
#[repr(C)]
struct Shared {
    /// The process of the rank, once it has joined.
    process: AtomicU32,
    /// The number of its last published collective, from 1.
    published: AtomicU32,
    /// The number of messages to it.
    messages: AtomicU32,
}

/// The shared file.
#[derive(Debug)]
#[repr(C)]
struct Ranks([Shared; MOST_RANKS]);

// SAFETY: all of it is atomics, for which any bytes are valid.
unsafe impl SharedLayout for Ranks {}

#[derive(Debug, Default)]
struct Own {
    /// The number of collectives so far.
    collectives: u32,
    /// The oldest collective whose file exists.
    kept: u32,
    /// The numbers of messages to and from each rank.
    sent: BTreeMap<usize, u32>,
    received: BTreeMap<usize, u32>,
}

/// Why an exchange fails.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("rank {own} waits in {call} for rank {rank}, whose process {process} has ended")]
    Ended { own: usize, call: String, rank: usize, process: u32 },
    #[error("rank {own} calls {call}, number {number} of its communicator, where rank {rank} calls {theirs}")]
    Mismatch { own: usize, call: String, number: u32, rank: usize, theirs: String },
    #[error("ranks cannot exchange data: {0}")]
    Io(#[from] io::Error),
}

impl Peers {
    pub(super) fn join(folder: &Path, id: u64, ranks: usize, rank: usize) -> io::Result<Self> {
        let path = folder.join(format!("nccl-{id:x}"));
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        let peers =
            Self { path, id, rank, size: ranks, shared: Mapped::create(&file)?, own: Mutex::new(Own { kept: 1, ..Own::default() }) };
        peers.state(rank).ok_or(io::ErrorKind::InvalidInput)?.process.store(std::process::id(), Ordering::Relaxed);
        Ok(peers)
    }

    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    fn state(&self, rank: usize) -> Option<&Shared> {
        self.shared.0[..self.size.min(MOST_RANKS)].get(rank)
    }

    fn own(&self) -> MutexGuard<'_, Own> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, name: &str) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(name);
        path.into()
    }

    /// Publishes this rank's data of the next collective, and returns the data of the needed ranks. Empty data are zeros.
    pub(super) fn exchange(&self, call: String, data: Vec<u8>, needs: impl Fn(usize) -> bool) -> Result<Vec<Vec<u8>>, Failure> {
        let mut own = self.own();
        own.collectives += 1;
        let number = own.collectives;
        fs::write(self.file(&format!("-{number}-{}", self.rank)), [call.as_bytes(), b"\n", &data].concat())?;
        let published = &self.shared.0[self.rank].published;
        published.store(number, Ordering::Release);
        wake(published);
        let mut all = vec![Vec::new(); self.size];
        for rank in (0..self.size).filter(|rank| needs(*rank) && *rank != self.rank) {
            self.wait(&call, rank, &self.shared.0[rank].published, |published| published >= number)?;
            let mut bytes = fs::read(self.file(&format!("-{number}-{rank}")))?;
            let rest = bytes.split_off(bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |end| end + 1));
            let theirs = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            if theirs != call {
                return Err(Failure::Mismatch { own: self.rank, call, number, rank, theirs });
            }
            all[rank] = rest;
        }
        all[self.rank] = data;
        // Ranks that published a later collective have read the files of this one.
        let read = self.shared.0[..self.size].iter().map(|rank| rank.published.load(Ordering::Acquire)).min().unwrap_or(0);
        while own.kept < read {
            fs::remove_file(self.file(&format!("-{}-{}", own.kept, self.rank)))?;
            own.kept += 1;
        }
        Ok(all)
    }

    pub(super) fn send(&self, to: usize, data: &[u8]) -> Result<(), Failure> {
        let number = next(&mut self.own().sent, to);
        let (unfinished, file) = (self.file(&format!("-unfinished-{}", self.rank)), self.file(&format!("-{}-to-{to}-{number}", self.rank)));
        fs::write(&unfinished, data)?;
        fs::rename(unfinished, file)?;
        let messages = &self.state(to).ok_or(io::Error::from(io::ErrorKind::InvalidInput))?.messages;
        messages.fetch_add(1, Ordering::Release);
        wake(messages);
        Ok(())
    }

    /// Waits for the next message of a rank.
    pub(super) fn receive(&self, from: usize) -> Result<Vec<u8>, Failure> {
        let number = next(&mut self.own().received, from);
        let file = self.file(&format!("-{from}-to-{}-{number}", self.rank));
        self.wait("receive", from, &self.shared.0[self.rank].messages, |_| file.exists())?;
        let data = fs::read(&file)?;
        fs::remove_file(file)?;
        Ok(data)
    }

    /// Waits until `done` accepts the value of a word, which a rank changes.
    fn wait(&self, call: &str, rank: usize, word: &AtomicU32, done: impl Fn(u32) -> bool) -> Result<(), Failure> {
        loop {
            let value = word.load(Ordering::Acquire);
            if done(value) {
                return Ok(());
            }
            let process = self.state(rank).map_or(0, |state| state.process.load(Ordering::Relaxed));
            let ended = process != 0 && !is_running(process);
            if ended && !done(word.load(Ordering::Acquire)) {
                return Err(Failure::Ended { own: self.rank, call: call.to_owned(), rank, process });
            }
            // SAFETY: the word stays mapped; other processes wake its waiters, or the time ends.
            unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, value, &raw const LOOK) };
        }
    }
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
