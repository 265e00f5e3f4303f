//! [`CollectiveRanks`]: what the ranks of a communicator do, in a mapped file. The ranks write it,
//! and the program that started them looks for hangs in it.

use std::cmp::Ordering::{Equal, Less};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::{fmt, io, os::unix::fs::FileExt as _};

use harness_allocator::named_enum;

use crate::mapping::{Mapped, SharedLayout};

/// The file name of a communicator, before its number.
pub const PREFIX: &str = "nccl-";
/// The file name of the Python stacks of a process, before its ID. The hook of `harness exec` uses
/// the same name.
pub const STACKS: &str = "stacks-";
/// The signal, after the first real-time signal, for which that hook registers a handler that
/// writes the stacks.
pub const STACK_SIGNAL: i32 = 13;
/// The file name of a process's note about calls with different sizes, before its ID.
pub const SIZES: &str = "sizes-";
/// The file of a run whose ranks may wait forever: those that can go on without the data of others
/// do so.
pub const NO_PATIENCE: &str = "no-patience";
/// The most ranks of a communicator.
pub const MOST_RANKS: usize = 1024;
/// Later collectives of a rank replace older ones.
const SLOTS: usize = 8;
/// Marks a wait for a message instead of a collective.
const MESSAGE: u32 = 1 << 31;
/// Data follows the words of the collective that its publication replaced, which ranks that are far
/// behind still need.
pub const HEAD: u64 = size_of::<[u64; 4]>() as u64;
/// The length of a file of data, most of which is never written. Ext4 allows 16 TiB.
const DATA: u64 = 8 << 40;

/// The file of a communicator. All words start at zero.
#[derive(Debug)]
#[repr(C)]
pub struct CollectiveRanks {
    size: AtomicU32,
    /// The number of the last collective that all ranks called, from 1.
    pub complete: AtomicU32,
    /// The number of the last collective whose reduction is done.
    pub reduced: AtomicU32,
    /// The finished parts of the reduction in progress.
    finished: AtomicU32,
    /// Its number, and the parts that ranks have taken.
    taken: AtomicU64,
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
    /// The place of the data of the last message that it has not found; 0 for none.
    inbox: AtomicU64,
    /// What it waits for: the number, 0 if it does not wait, and the rank plus 1, 0 for all ranks.
    waits: [AtomicU32; 2],
    has_left: AtomicU32,
    unused: AtomicU32,
    /// Its last collectives, as [`Published::words`].
    calls: [[AtomicU64; 4]; SLOTS],
}

// SAFETY: all of it is atomics, for which any bytes are valid.
unsafe impl SharedLayout for CollectiveRanks {}

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

/// Names of `ncclDataType_t`.
const TYPES: [&str; 12] = [
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8_e4m3",
    "float8_e5m2",
];

/// A collective as one rank calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveCall {
    pub operation: Operation,
    pub root: Option<usize>,
    pub count: usize,
    /// `ncclDataType_t`.
    pub kind: u8,
}

/// A collective as a rank published it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Counted from 1.
    pub number: u32,
    pub call: CollectiveCall,
    /// The place of the rank's data in the file of data. Empty data are zeros.
    pub offset: u64,
    pub len: u64,
}

impl Published {
    const fn words(self) -> [u64; 4] {
        let Self {
            number,
            call,
            offset,
            len,
        } = self;
        let root = match call.root {
            Some(root) => root as u64 + 1,
            None => 0,
        };
        [
            (number as u64) << 32 | (call.operation as u64) << 24 | (call.kind as u64) << 16 | root,
            call.count as u64,
            offset,
            len,
        ]
    }

    pub fn of_words([call, count, offset, len]: [u64; 4]) -> Option<Self> {
        let operation = *Operation::ALL.get((call >> 24 & 0xff) as usize)?;
        let root = (call & 0xffff).checked_sub(1).map(|root| root as usize);
        let call_of_rank = CollectiveCall {
            operation,
            root,
            count: count as usize,
            kind: (call >> 16 & 0xff) as u8,
        };
        Some(Self {
            number: (call >> 32) as u32,
            call: call_of_rank,
            offset,
            len,
        })
        .filter(|found| found.number > 0)
    }
}

impl CollectiveCall {
    pub const fn has_size(&self) -> bool {
        !matches!(
            self.operation,
            Operation::Split | Operation::Shrink | Operation::Grow
        )
    }

    pub fn element(&self) -> &'static str {
        TYPES
            .get(usize::from(self.kind))
            .copied()
            .unwrap_or("unknown")
    }
}

impl fmt::Display for CollectiveCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.operation)?;
        if self.has_size() {
            write!(f, " of {} {}", self.count, self.element())?;
        }
        self.root
            .map_or(Ok(()), |root| write!(f, " with root {root}"))
    }
}

/// A message in the file of data. Its words follow the place of the previous message to the same
/// rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub from: usize,
    /// Counted from 1, among the messages of its sender to its receiver.
    pub number: u32,
    /// The place of its data in the file.
    pub offset: u64,
    pub len: u64,
}

impl Message {
    /// Adds a message, whose data the file has, to those that a rank has not found.
    pub fn post(self, data: &File, to: &Rank) -> io::Result<()> {
        let Self {
            from,
            number,
            offset,
            len,
        } = self;
        let mut previous = to.inbox.load(Ordering::Acquire);
        loop {
            data.write_all_at(
                [previous, (from as u64) << 32 | u64::from(number), len, 0]
                    .map(u64::to_ne_bytes)
                    .as_flattened(),
                offset - HEAD,
            )?;
            match to
                .inbox
                .compare_exchange(previous, offset, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => break,
                Err(later) => previous = later,
            }
        }
        to.messages.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Records that the receiver has read the data, which its sender may overwrite.
    pub fn receive(self, data: &File) -> io::Result<()> {
        data.write_all_at(&1_u64.to_ne_bytes(), self.offset - 8)
    }

    /// Returns whether the receiver has read the data with this offset.
    pub fn is_received(data: &File, offset: u64) -> io::Result<bool> {
        Ok(head(data, offset)?[3] != 0)
    }

    fn chain(data: &File, last: u64) -> io::Result<Vec<Self>> {
        let (mut offset, mut found) = (last, Vec::new());
        while offset > 0 {
            let [previous, name, len, _] = head(data, offset)?;
            found.push(Self {
                from: (name >> 32) as usize,
                number: name as u32,
                offset,
                len,
            });
            offset = previous;
        }
        Ok(found)
    }
}

/// The words before the data with this offset.
fn head(data: &File, offset: u64) -> io::Result<[u64; 4]> {
    let mut head = [0; HEAD as usize];
    data.read_exact_at(&mut head, offset.saturating_sub(HEAD))?;
    let mut words = head
        .as_chunks()
        .0
        .iter()
        .map(|bytes| u64::from_ne_bytes(*bytes));
    Ok(std::array::from_fn(|_| words.next().unwrap_or_default()))
}

/// What a rank waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CollectiveWait {
    /// A collective by its number, and the rank whose data it needs; `None` for all ranks.
    Collective(u32, Option<usize>),
    /// A message by its number, and its sender.
    Message(u32, usize),
}

impl Rank {
    pub fn publish(&self, published: Published) {
        let slot = &self.calls[published.number as usize % SLOTS];
        slot[0].store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        let [first, rest @ ..] = published.words();
        slot[1..]
            .iter()
            .zip(rest)
            .for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        slot[0].store(first, Ordering::Release);
        self.published.store(published.number, Ordering::SeqCst);
    }

    /// The words of the collective with this number, or of a later one that has replaced it. Zeros
    /// before it is published, and while it is replaced.
    pub fn words(&self, number: u32) -> [u64; 4] {
        let slot = &self.calls[number as usize % SLOTS];
        let first = slot[0].load(Ordering::Acquire);
        let mut words = slot.each_ref().map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        words[0] = if slot[0].load(Ordering::Relaxed) == first {
            first
        } else {
            0
        };
        words
    }

    /// The messages to this rank that it has not found.
    pub fn messages_in(&self, data: &File) -> io::Result<Vec<Message>> {
        Message::chain(data, self.inbox.load(Ordering::Acquire))
    }

    /// Finds these messages.
    pub fn find_messages(&self, data: &File) -> io::Result<Vec<Message>> {
        Message::chain(data, self.inbox.swap(0, Ordering::AcqRel))
    }

    pub fn set_wait(&self, wait: Option<CollectiveWait>) {
        let [number, rank] = match wait {
            None => [0, 0],
            Some(CollectiveWait::Collective(number, rank)) => {
                [number, rank.map_or(0, |rank| rank as u32 + 1)]
            }
            Some(CollectiveWait::Message(number, rank)) => [number, (rank as u32 + 1) | MESSAGE],
        };
        self.waits[1].store(rank, Ordering::Relaxed);
        self.waits[0].store(number, Ordering::Release);
    }

    pub fn wait(&self) -> Option<CollectiveWait> {
        let number = self.waits[0].load(Ordering::Acquire);
        let rank = self.waits[1].load(Ordering::Relaxed);
        let other = (rank & !MESSAGE).checked_sub(1).map(|rank| rank as usize);
        match (number, other) {
            (0, _) => None,
            (number, Some(sender)) if rank & MESSAGE != 0 => {
                Some(CollectiveWait::Message(number, sender))
            }
            (number, rank) => Some(CollectiveWait::Collective(number, rank)),
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

impl CollectiveRanks {
    pub fn join(path: &Path, size: usize) -> io::Result<Mapped<Self>> {
        if size > MOST_RANKS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let ranks = Mapped::<Self>::create(
            &File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path)?,
        )?;
        ranks.size.store(size as u32, Ordering::Relaxed);
        Ok(ranks)
    }

    /// The bytes of each rank in the file of data.
    pub fn data_per_rank(&self) -> u64 {
        DATA / self.all().len().max(1) as u64
    }

    /// A collective that a rank has published, from the file of data if a later one has replaced
    /// it. `None` while it is replaced, and once all ranks have read it.
    pub fn find(&self, data: &File, rank: usize, number: u32) -> io::Result<Option<Published>> {
        let mut found = Published::of_words(self.all()[rank].words(number));
        while let Some(later) = found.filter(|found| found.number > number && found.offset >= HEAD)
        {
            found = Published::of_words(head(data, later.offset)?);
        }
        Ok(found.filter(|found| found.number == number))
    }

    /// Takes the next part of a reduction, which the ranks of a collective share.
    pub fn take_part(&self, number: u32, parts: u32) -> Option<u32> {
        let taken = self
            .taken
            .fetch_update(
                Ordering::AcqRel,
                Ordering::Acquire,
                |taken| match ((taken >> 32) as u32).cmp(&number) {
                    Less => Some(u64::from(number) << 32 | 1),
                    Equal if (taken as u32) < parts => Some(taken + 1),
                    _ => None,
                },
            );
        // The first part begins a reduction.
        taken.ok().map(|taken| {
            if (taken >> 32) as u32 == number {
                taken as u32
            } else {
                0
            }
        })
    }

    /// Records that a part of the reduction in progress is done. Returns whether it was the last.
    pub fn finish_part(&self, parts: u32) -> bool {
        let is_last = self.finished.fetch_add(1, Ordering::AcqRel) + 1 == parts;
        if is_last {
            self.finished.store(0, Ordering::Release);
        }
        is_last
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
            if name
                .to_str()
                .and_then(|name| name.strip_prefix(PREFIX))
                .is_some_and(|number| !number.contains('-'))
            {
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
pub fn stack_file(communicator: &Path, rank: usize, wait: CollectiveWait) -> PathBuf {
    match wait {
        CollectiveWait::Collective(number, _) => {
            beside(communicator, &format!("-stack-{rank}-{number}"))
        }
        CollectiveWait::Message(number, from) => {
            beside(communicator, &format!("-stack-{rank}-{number}-from-{from}"))
        }
    }
}

/// The file with the data of collectives, in which each rank has an equal part.
pub fn data_file(communicator: &Path) -> PathBuf {
    beside(communicator, "-data")
}

/// A file whose name begins with that of a communicator.
pub fn beside(communicator: &Path, rest: &str) -> PathBuf {
    let mut path = communicator.as_os_str().to_owned();
    path.push(rest);
    path.into()
}
