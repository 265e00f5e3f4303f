//! [`Ranks`]: what the ranks of a communicator do, in a mapped file. The ranks write it, and the program that started them looks for hangs in it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::{fmt, io};

use harness_allocator::named_enum;

use crate::mapping::{Mapped, SharedLayout};

/// The file name of a communicator, before its number.
pub const PREFIX: &str = "nccl-";
/// The file name of the Python stacks of a process, before its ID. The hook of `harness exec` uses the same name.
pub const STACKS: &str = "stacks-";
/// The signal, after the first real-time signal, for which that hook registers a handler that writes the stacks.
pub const STACK_SIGNAL: i32 = 13;
/// The file name of a process's note about calls with different sizes, before its ID.
pub const SIZES: &str = "sizes-";
/// The most ranks of a communicator.
pub const MOST_RANKS: usize = 1024;
/// Older collectives of a rank are forgotten.
const SLOTS: usize = 8;
/// Marks a wait for a message instead of a collective.
const MESSAGE: u32 = 1 << 31;

/// The file of a communicator. All words start at zero.
#[derive(Debug)]
#[repr(C)]
pub struct Ranks {
    size: AtomicU32,
    /// The number of the last collective that all ranks called, from 1.
    pub complete: AtomicU32,
    ranks: [Rank; MOST_RANKS],
}

#[derive(Debug)]
#[repr(C)]
pub struct Rank {
    /// The process, once it has joined.
    pub process: AtomicU32,
    /// The number of its last collective.
    pub published: AtomicU32,
    /// It has read the data of all collectives up to this number.
    pub read: AtomicU32,
    /// The number of messages to it.
    pub messages: AtomicU32,
    /// What it waits for: the number, 0 if it does not wait, and the rank plus 1, 0 for all ranks.
    waits: [AtomicU32; 2],
    has_left: AtomicU32,
    unused: AtomicU32,
    /// Its last collectives, each as the words of a [`Call`].
    calls: [[AtomicU64; 2]; SLOTS],
}

// SAFETY: all of it is atomics, for which any bytes are valid.
unsafe impl SharedLayout for Ranks {}

named_enum! {
    Operation {
        Split = "split",
        AllReduce = "all_reduce",
        AllGather = "all_gather",
        ReduceScatter = "reduce_scatter",
        Broadcast = "broadcast",
        Reduce = "reduce",
        Gather = "gather",
        Scatter = "scatter",
        AllToAll = "all_to_all",
        Shrink = "shrink",
        Grow = "grow",
    }
}

/// Data of up to this many bytes needs no file.
const SMALL: usize = 16 << 10;

/// The small data of a rank's last collectives, in a mapped file. Each begins with its number and length; 0 while it changes.
#[derive(Debug)]
#[repr(C)]
pub struct SmallData([[AtomicU64; 1 + SMALL / 8]; SLOTS]);

// SAFETY: all of it is atomics, for which any bytes are valid.
unsafe impl SharedLayout for SmallData {}

impl SmallData {
    /// Opens the data of a rank, which its first user creates.
    pub fn open(communicator: &Path, rank: usize) -> io::Result<Mapped<Self>> {
        let path = beside(communicator, &format!("-small-{rank}"));
        Mapped::create(&File::options().read(true).write(true).create(true).truncate(false).open(path)?)
    }

    /// Stores the data of a collective in place of an earlier one. Returns whether it is small enough.
    pub fn store(&self, number: u32, data: &[u8]) -> bool {
        let [head, words @ ..] = &self.0[number as usize % SLOTS];
        if data.len() > SMALL {
            return false;
        }
        head.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, bytes) in words.iter().zip(data.chunks(8)) {
            let mut value = [0; 8];
            value[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(value), Ordering::Relaxed);
        }
        head.store(u64::from(number) << 32 | data.len() as u64, Ordering::Release);
        true
    }

    /// The data of a collective, unless it was large or is replaced.
    pub fn load(&self, number: u32) -> Option<Vec<u8>> {
        let [head, words @ ..] = &self.0[number as usize % SLOTS];
        let found = head.load(Ordering::Acquire);
        let len = found as u32 as usize;
        if found >> 32 != u64::from(number) || len > SMALL {
            return None;
        }
        let mut data = vec![0; len.next_multiple_of(8)];
        data.as_chunks_mut::<8>().0.iter_mut().zip(words).for_each(|(bytes, word)| *bytes = word.load(Ordering::Relaxed).to_ne_bytes());
        data.truncate(len);
        fence(Ordering::Acquire);
        (head.load(Ordering::Relaxed) == found).then_some(data)
    }

    /// The collective whose data the next one with this number replaces, and that data.
    pub fn replaced(&self, number: u32) -> Option<(u32, Vec<u8>)> {
        let old = number.checked_sub(SLOTS as u32).filter(|old| *old > 0)?;
        Some((old, self.load(old)?))
    }
}

/// Names of `ncclDataType_t`.
const TYPES: [&str; 12] =
    ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"];

/// A collective as one rank calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub operation: Operation,
    pub root: Option<usize>,
    pub count: usize,
    /// `ncclDataType_t`.
    pub kind: u8,
}

impl Call {
    const fn words(self, number: u32, has_data: bool) -> [u64; 2] {
        let root = match self.root {
            Some(root) => root as u64 + 1,
            None => 0,
        };
        [
            (number as u64) << 32 | (self.operation as u64) << 24 | (self.kind as u64) << 16 | root,
            (self.count as u64) << 1 | has_data as u64,
        ]
    }

    fn of_words([call, count]: [u64; 2]) -> Option<(u32, Self, bool)> {
        let operation = *Operation::ALL.get((call >> 24 & 0xff) as usize)?;
        let root = (call & 0xffff).checked_sub(1).map(|root| root as usize);
        let call_of_rank = Self { operation, root, count: (count >> 1) as usize, kind: (call >> 16 & 0xff) as u8 };
        Some(((call >> 32) as u32, call_of_rank, count & 1 == 1))
    }

    pub const fn has_size(&self) -> bool {
        !matches!(self.operation, Operation::Split | Operation::Shrink | Operation::Grow)
    }

    pub fn element(&self) -> &'static str {
        TYPES.get(usize::from(self.kind)).copied().unwrap_or("unknown")
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation)?;
        if self.has_size() {
            write!(f, " of {} {}", self.count, self.element())?;
        }
        self.root.map_or(Ok(()), |root| write!(f, " with root {root}"))
    }
}

/// What a rank waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// A collective by its number, and the rank whose data it needs; `None` for all ranks.
    Collective(u32, Option<usize>),
    /// A message by its number, and its sender.
    Message(u32, usize),
}

impl Rank {
    /// Publishes the next collective. `has_data` means that a file has this rank's data.
    pub fn publish(&self, number: u32, call: Call, has_data: bool) {
        let slot = &self.calls[number as usize % SLOTS];
        slot.iter().zip(call.words(number, has_data)).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        self.published.store(number, Ordering::SeqCst);
    }

    /// The collective with this number, and whether a file has its data. `None` before it is published and after it is forgotten.
    pub fn call(&self, number: u32) -> Option<(Call, bool)> {
        let words = self.calls[number as usize % SLOTS].each_ref().map(|word| word.load(Ordering::Relaxed));
        let (found, call, has_data) = Call::of_words(words)?;
        (number > 0 && found == number).then_some((call, has_data))
    }

    pub fn set_wait(&self, wait: Option<Wait>) {
        let [number, rank] = match wait {
            None => [0, 0],
            Some(Wait::Collective(number, rank)) => [number, rank.map_or(0, |rank| rank as u32 + 1)],
            Some(Wait::Message(number, rank)) => [number, (rank as u32 + 1) | MESSAGE],
        };
        self.waits[1].store(rank, Ordering::Relaxed);
        self.waits[0].store(number, Ordering::Release);
    }

    pub fn wait(&self) -> Option<Wait> {
        let number = self.waits[0].load(Ordering::Acquire);
        let rank = self.waits[1].load(Ordering::Relaxed);
        let other = (rank & !MESSAGE).checked_sub(1).map(|rank| rank as usize);
        match (number, other) {
            (0, _) => None,
            (number, Some(sender)) if rank & MESSAGE != 0 => Some(Wait::Message(number, sender)),
            (number, rank) => Some(Wait::Collective(number, rank)),
        }
    }

    /// Records that the rank has destroyed its communicator.
    pub fn leave(&self) {
        self.has_left.store(1, Ordering::Release);
    }

    pub fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire) != 0
    }
}

impl Ranks {
    pub fn join(path: &Path, size: usize) -> io::Result<Mapped<Self>> {
        if size > MOST_RANKS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let ranks = Mapped::<Self>::create(&File::options().read(true).write(true).create(true).truncate(false).open(path)?)?;
        ranks.size.store(size as u32, Ordering::Relaxed);
        Ok(ranks)
    }

    pub fn all(&self) -> &[Rank] {
        &self.ranks[..(self.size.load(Ordering::Relaxed) as usize).min(MOST_RANKS)]
    }

    /// The communicators of a run by their files.
    pub fn read_folder(run: &Path) -> io::Result<Vec<(PathBuf, Mapped<Self>)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(run)? {
            let (entry, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
            // Files of data have further dashes.
            if name.to_str().and_then(|name| name.strip_prefix(PREFIX)).is_some_and(|number| !number.contains('-')) {
                // A file that is being created is not mapped yet.
                found.extend(
                    File::options()
                        .read(true)
                        .write(true)
                        .open(&entry)
                        .and_then(|file| Mapped::open(&file))
                        .ok()
                        .map(|ranks| (entry, ranks)),
                );
            }
        }
        Ok(found)
    }
}

/// The file next to the one of a communicator with the Python stacks of a rank that waits.
pub fn stack_file(communicator: &Path, rank: usize, wait: Wait) -> PathBuf {
    match wait {
        Wait::Collective(number, _) => beside(communicator, &format!("-stack-{rank}-{number}")),
        Wait::Message(number, from) => beside(communicator, &format!("-stack-{rank}-{number}-from-{from}")),
    }
}

/// The file of a message.
pub fn message_file(communicator: &Path, from: usize, to: usize, number: u32) -> PathBuf {
    beside(communicator, &format!("-{from}-to-{to}-{number}"))
}

/// A file whose name begins with that of a communicator.
pub fn beside(communicator: &Path, rest: &str) -> PathBuf {
    let mut path = communicator.as_os_str().to_owned();
    path.push(rest);
    path.into()
}
