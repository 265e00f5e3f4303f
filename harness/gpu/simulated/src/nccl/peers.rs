//! [`Peers`]: the ranks of a communicator, as processes of one run. They meet in memory that all of
//! them map, and exchange data through one file. A rank writes its data over data that all ranks
//! have read, so the file stays in the page cache and grows only while ranks are behind.
//!
//! A rank publishes each collective and waits only for the ranks whose data it needs, so sends and
//! roots of broadcasts never wait. A wait has no end: the program that started the run sees who
//! waits for whom, and ends a run that hangs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{cell::RefCell, io, os::unix::fs::FileExt as _};

use harness_allocator::sync::lock;
use harness_allocator::units::Bytes;
use harness_gpu_settings::collectives::{
    CollectiveCall, CollectiveRanks, CollectiveWait, HEAD, Message, NO_PATIENCE, PREFIX, Published,
    Rank, SIZES, data_file, stack_file,
};
use harness_gpu_settings::{mapping::Mapped, settings::publish};

use crate::stack::write_stacks;

/// The longest sleep within a wait. Longer waits record their Python stack.
const LOOK: Duration = Duration::from_millis(100);
/// How long a call waits for other ranks, if values are not computed.
pub(super) const PATIENCE: Duration = Duration::from_millis(300);
/// The bytes that a rank reduces at a time. They fit in a processor's cache.
pub(super) const PART: usize = 256 << 10;

#[derive(Debug)]
pub(super) struct Peers {
    /// The path of the shared file; the names of other files begin with it.
    path: PathBuf,
    id: u64,
    rank: usize,
    shared: Mapped<CollectiveRanks>,
    data: File,
    /// `true` if different counts are an error. If values are not computed, a program may choose
    /// counts that ranks would have agreed on.
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
    /// The ends of the own data in the file that some ranks have not read, by their starts and
    /// numbers.
    data: BTreeMap<(u64, u32), u64>,
    /// The starts and ends of own messages that are not received, in order.
    messages: VecDeque<(u64, u64)>,
    /// The messages that this rank has found, by sender and number.
    found: BTreeMap<(usize, u32), Message>,
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
    #[error(
        "rank {own} calls {call}, number {number} of its communicator, where rank {rank} calls \
         {theirs}"
    )]
    Mismatch {
        own: usize,
        call: CollectiveCall,
        number: u32,
        rank: usize,
        theirs: CollectiveCall,
    },
    #[error("the communicator was aborted")]
    Aborted,
    #[error("NCCL needs {0} for its buffers, and the device has less free memory")]
    Memory(Bytes),
    #[error("ranks cannot exchange data: {0}")]
    Io(#[from] io::Error),
}

/// The data of ranks in a collective.
pub(super) struct Parts<'a> {
    source: Source<'a>,
    /// Offset and length of each rank's data.
    places: Vec<(u64, u64)>,
    /// The last failure to read.
    error: RefCell<Option<io::Error>>,
}

enum Source<'a> {
    File(&'a File),
    Memory(&'a [u8]),
}

impl<'a> Parts<'a> {
    /// Equal data of all ranks.
    pub(super) fn equal(data: &'a [u8], ranks: usize) -> Self {
        Self {
            source: Source::Memory(data),
            places: vec![(0, data.len() as u64); ranks],
            error: RefCell::default(),
        }
    }

    /// Reads the data of a rank from an offset. Returns `false` if they are zeros, or the rank has
    /// less.
    pub(super) fn read(&self, rank: usize, from: usize, into: &mut [u8]) -> bool {
        let Some((offset, _)) = self
            .places
            .get(rank)
            .filter(|(_, len)| (from + into.len()) as u64 <= *len)
        else {
            return false;
        };
        match self.source {
            Source::File(file) => file
                .read_exact_at(into, offset + from as u64)
                .map_err(|error| self.error.replace(Some(error)))
                .is_ok(),
            Source::Memory(data) => data
                .get(from..from + into.len())
                .map(|data| into.copy_from_slice(data))
                .is_some(),
        }
    }

    /// How many bytes of a rank's data there are from an offset, at most `len`.
    pub(super) fn sent(&self, rank: usize, from: usize, len: usize) -> usize {
        let all = self.places.get(rank).map_or(0, |(_, len)| *len as usize);
        all.saturating_sub(from).min(len)
    }

    /// The first rank with data of this length.
    pub(super) fn of_len(&self, len: usize) -> Option<usize> {
        self.places
            .iter()
            .position(|(_, found)| *found == len as u64)
    }

    fn all(&self) -> Vec<Vec<u8>> {
        let read = |(rank, (_, len)): (usize, &(u64, u64))| {
            let mut bytes = vec![0; *len as usize];
            self.read(rank, 0, &mut bytes);
            bytes
        };
        self.places.iter().enumerate().map(read).collect()
    }
}

impl Peers {
    pub(super) fn join(
        folder: &Path,
        id: u64,
        ranks: usize,
        rank: usize,
        is_strict: bool,
    ) -> io::Result<Self> {
        let path = folder.join(format!("{PREFIX}{id:x}"));
        let shared = CollectiveRanks::join(&path, ranks)?;
        let process = &shared
            .all()
            .get(rank)
            .ok_or(io::ErrorKind::InvalidInput)?
            .process;
        // A restarted rank may read the ID of an earlier attempt from its store. NCCL cannot
        // connect then.
        process
            .compare_exchange(0, std::process::id(), Ordering::AcqRel, Ordering::Acquire)
            .map_err(|earlier| {
                io::Error::other(format!(
                    "rank {rank} cannot join a communicator that process \
                 {earlier} joined as rank {rank}"
                ))
            })?;
        let (has_noted_sizes, is_aborted) = Default::default();
        let data = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(data_file(&path))?;
        Ok(Self {
            path,
            id,
            rank,
            shared,
            data,
            is_strict,
            has_noted_sizes,
            is_aborted,
            own: Mutex::default(),
        })
    }

    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    fn state(&self) -> &Rank {
        &self.shared.all()[self.rank]
    }

    fn own(&self) -> MutexGuard<'_, Own> {
        lock(&self.own)
    }

    /// Publishes the next collective with this rank's data, and returns its number. Empty data are
    /// zeros. [`Self::complete`] follows.
    pub(super) fn publish(&self, call: CollectiveCall, data: &[u8]) -> io::Result<u32> {
        let own = &mut *self.own();
        own.collectives += 1;
        let number = own.collectives;
        own.unread.insert(number);
        let replaced = self.state().words(number);
        let read = self.least(|rank| &rank.read);
        let mut published = Published {
            number,
            call,
            offset: 0,
            len: data.len() as u64,
        };
        if !data.is_empty()
            || Published::of_words(replaced).is_some_and(|replaced| replaced.number > read)
        {
            own.data.retain(|(_, number), _| *number > read);
            let start = self.gap(own, HEAD + published.len)?;
            own.data
                .insert((start, number), start + HEAD + published.len);
            published.offset = self.offset(start);
            self.data.write_all_at(
                replaced.map(u64::to_ne_bytes).as_flattened(),
                published.offset - HEAD,
            )?;
            self.data.write_all_at(data, published.offset)?;
        }
        self.state().publish(published);
        wake(&self.state().published);
        Ok(number)
    }

    /// Completes a collective for all, if all ranks have published it. The last rank first does
    /// `work`.
    pub(super) fn complete(
        &self,
        (number, call): (u32, CollectiveCall),
        work: impl FnOnce(&Parts<'_>) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let least = self.least(|rank| &rank.published);
        if least >= number {
            // `collect` reports a mismatch.
            self.parts((number, call), Needs::All)
                .map_or(Ok(()), |parts| work(&parts))?;
            if self.shared.complete.fetch_max(least, Ordering::SeqCst) < least {
                wake(&self.shared.complete);
            }
        }
        Ok(())
    }

    fn least(&self, word: impl Fn(&Rank) -> &AtomicU32) -> u32 {
        self.shared
            .all()
            .iter()
            .map(|rank| word(rank).load(Ordering::SeqCst))
            .min()
            .unwrap_or(0)
    }

    /// Waits for the needed ranks to publish the collective, and passes their data to `finish`.
    /// `None` if they do not publish it within `patience`.
    pub(super) fn collect<T>(
        &self,
        (number, call): (u32, CollectiveCall),
        needs: Needs,
        patience: Option<Duration>,
        finish: impl FnOnce(&Parts<'_>) -> Result<T, Failure>,
    ) -> Result<Option<T>, Failure> {
        let ranks = self.shared.all();
        let (word, from) = match needs {
            Needs::Rank(rank) => (
                &ranks
                    .get(rank)
                    .ok_or(io::Error::from(io::ErrorKind::InvalidInput))?
                    .published,
                Some(rank),
            ),
            Needs::All | Needs::Nothing => (&self.shared.complete, None),
        };
        let is_done = || needs == Needs::Nothing || word.load(Ordering::Acquire) >= number;
        if !self.wait(
            CollectiveWait::Collective(number, from),
            word,
            patience,
            is_done,
        )? {
            return Ok(None);
        }
        let parts = self.parts((number, call), needs)?;
        let finished = finish(&parts)?;
        if let Some(error) = parts.error.into_inner() {
            return Err(error.into());
        }
        let own = &mut *self.own();
        own.unread.remove(&number);
        self.state().read.store(
            own.unread
                .first()
                .map_or(own.collectives, |unread| unread - 1),
            Ordering::SeqCst,
        );
        Ok(Some(finished))
    }

    /// The places of the data of the needed ranks, which have published the collective. Fails if
    /// they called another one.
    fn parts(
        &self,
        (number, call): (u32, CollectiveCall),
        needs: Needs,
    ) -> Result<Parts<'_>, Failure> {
        let mut places = vec![(0, 0); self.shared.all().len()];
        let is_needed = |rank: usize| needs == Needs::All || needs == Needs::Rank(rank);
        for (rank, place) in places
            .iter_mut()
            .enumerate()
            .filter(|(rank, _)| is_needed(*rank))
        {
            let Published {
                call: theirs,
                offset,
                len,
                ..
            } = loop {
                match self.shared.find(&self.data, rank, number)? {
                    Some(found) => break found,
                    None => std::thread::yield_now(),
                }
            };
            if theirs != call
                && (self.is_strict
                    || CollectiveCall {
                        count: call.count,
                        ..theirs
                    } != call)
            {
                return Err(Failure::Mismatch {
                    own: self.rank,
                    call,
                    number,
                    rank,
                    theirs,
                });
            }
            if theirs.count != call.count && !self.has_noted_sizes.swap(true, Ordering::Relaxed) {
                let note = Failure::Mismatch {
                    own: self.rank,
                    call,
                    number,
                    rank,
                    theirs,
                }
                .to_string();
                let name = format!("{SIZES}{}", std::process::id());
                publish(&self.path.with_file_name(name), &note)?;
            }
            *place = (offset, len);
        }
        Ok(Parts {
            source: Source::File(&self.data),
            places,
            error: RefCell::default(),
        })
    }

    /// Reduces the parts of a collective that no other rank reduces. The result replaces the data
    /// of one rank. `reduce` reduces the data from an offset.
    pub(super) fn reduce(
        &self,
        number: u32,
        parts: &Parts<'_>,
        len: usize,
        reduce: impl Fn(usize, &mut [u8]) -> bool,
    ) -> Result<(), Failure> {
        let count = len.div_ceil(PART).max(1) as u32;
        let start = parts.of_len(len).map_or(0, |rank| parts.places[rank].0);
        while let Some(part) = self.shared.take_part(number, count) {
            let from = part as usize * PART;
            let mut reduced = vec![0; PART.min(len - from)];
            if reduce(from, &mut reduced) {
                self.data.write_all_at(&reduced, start + from as u64)?;
            }
            if self.shared.finish_part(count) {
                self.shared.reduced.fetch_max(number, Ordering::SeqCst);
                wake(&self.shared.reduced);
            }
        }
        Ok(())
    }

    pub(super) fn wait_for_reduction(&self, number: u32) -> Result<(), Failure> {
        let word = &self.shared.reduced;
        self.wait(CollectiveWait::Collective(number, None), word, None, || {
            word.load(Ordering::Acquire) >= number
        })
        .map(drop)
    }

    /// Publishes the next collective, waits for all ranks and returns the data of all.
    pub(super) fn exchange(
        &self,
        call: CollectiveCall,
        data: &[u8],
    ) -> Result<Vec<Vec<u8>>, Failure> {
        let number = self.publish(call, data)?;
        self.complete((number, call), |_| Ok(()))?;
        Ok(self
            .collect((number, call), Needs::All, None, |parts| Ok(parts.all()))?
            .unwrap_or_default())
    }

    /// The first place in this rank's part of the file of data where `len` bytes fit between the
    /// data that is not read.
    fn gap(&self, own: &Own, len: u64) -> io::Result<u64> {
        let messages = own.messages.iter().copied();
        let mut ranges: Vec<(u64, u64)> = own
            .data
            .iter()
            .map(|((start, _), end)| (*start, *end))
            .chain(messages)
            .collect();
        ranges.sort_unstable();
        let mut gap = 0;
        for (start, end) in ranges {
            if gap + len <= start {
                break;
            }
            gap = gap.max(end);
        }
        if gap + len > self.shared.data_per_rank() {
            Err(io::ErrorKind::FileTooLarge.into())
        } else {
            Ok(gap)
        }
    }

    /// The offset in the file of data after a head in this rank's part.
    fn offset(&self, start: u64) -> u64 {
        self.rank as u64 * self.shared.data_per_rank() + start + HEAD
    }

    pub(super) fn send(&self, to: usize, data: &[u8]) -> Result<(), Failure> {
        let receiver = self
            .shared
            .all()
            .get(to)
            .ok_or(io::Error::from(io::ErrorKind::InvalidInput))?;
        let own = &mut *self.own();
        while let Some((start, _)) = own.messages.front()
            && Message::is_received(&self.data, self.offset(*start))?
        {
            own.messages.pop_front();
        }
        let len = data.len() as u64;
        let start = self.gap(own, HEAD + len)?;
        own.messages.push_back((start, start + HEAD + len));
        let message = Message {
            from: self.rank,
            number: next(&mut own.sent, to),
            offset: self.offset(start),
            len,
        };
        self.data.write_all_at(data, message.offset)?;
        message.post(&self.data, receiver)?;
        wake(&receiver.messages);
        Ok(())
    }

    /// The number of the next message from a rank.
    pub(super) fn expect(&self, from: usize) -> u32 {
        next(&mut self.own().received, from)
    }

    /// Waits for a message of a rank; `None` if it does not arrive within `patience`.
    pub(super) fn receive(
        &self,
        from: usize,
        number: u32,
        patience: Option<Duration>,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let found = || {
            let own = &mut *self.own();
            own.found.extend(
                self.state()
                    .find_messages(&self.data)?
                    .into_iter()
                    .map(|message| ((message.from, message.number), message)),
            );
            Ok::<_, io::Error>(own.found.get(&(from, number)).copied())
        };
        let is_done = || !matches!(found(), Ok(None));
        if !self.wait(
            CollectiveWait::Message(number, from),
            &self.state().messages,
            patience,
            is_done,
        )? {
            return Ok(None);
        }
        let Some(message) = found()? else {
            return Ok(None);
        };
        let mut data = vec![0; message.len as usize];
        self.data.read_exact_at(&mut data, message.offset)?;
        message.receive(&self.data)?;
        self.own().found.remove(&(from, number));
        Ok(Some(data))
    }

    /// Waits until `is_done`, which depends on a word that other ranks change. Returns whether it
    /// is.
    fn wait(
        &self,
        wait: CollectiveWait,
        word: &AtomicU32,
        patience: Option<Duration>,
        is_done: impl Fn() -> bool,
    ) -> Result<bool, Failure> {
        if self.is_aborted.load(Ordering::Acquire) {
            return Err(Failure::Aborted);
        }
        if is_done() || patience == Some(Duration::ZERO) {
            return Ok(is_done());
        }
        self.state().set_wait(Some(wait));
        let began = Instant::now();
        let mut has_stack = false;
        let run = self.path.parent().unwrap_or(&self.path);
        let result = loop {
            let value = word.load(Ordering::Acquire);
            if is_done() {
                break Ok(true);
            }
            if self.is_aborted.load(Ordering::Acquire) {
                break Err(Failure::Aborted);
            }
            let has_waited = |patience| {
                let waited = began.elapsed();
                waited >= patience || waited >= PATIENCE && run.join(NO_PATIENCE).exists()
            };
            if patience.is_some_and(has_waited) {
                break Ok(false);
            }
            let time = libc::timespec {
                tv_sec: 0,
                tv_nsec: LOOK.subsec_nanos().into(),
            };
            // SAFETY: the word stays mapped; other processes wake its waiters, or the time ends.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    word.as_ptr(),
                    libc::FUTEX_WAIT,
                    value,
                    &raw const time,
                )
            };
            if !has_stack && began.elapsed() >= LOOK && !is_done() {
                has_stack = true;
                // The call of a collective that is late has written it.
                let file = stack_file(&self.path, self.rank, wait);
                if !file.exists() {
                    write_stacks(run, &file);
                }
            }
        };
        self.state().set_wait(None);
        result
    }

    /// Waits for a collective that never completes, because another rank calls another one.
    pub(super) fn wait_in_vain(&self, number: u32) -> Failure {
        let wait = CollectiveWait::Collective(number, None);
        self.wait(wait, &self.shared.complete, None, || false)
            .err()
            .unwrap_or(Failure::Aborted)
    }

    /// Leaves the communicator. If it is aborted, all waits of this rank end.
    pub(super) fn leave(&self, is_aborted: bool) {
        self.is_aborted.fetch_or(is_aborted, Ordering::Release);
        self.state().leave();
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
