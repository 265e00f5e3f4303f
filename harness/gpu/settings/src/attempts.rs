//! [`Attempt`]: one call of a program that requests memory, and [`DriverFree`]: memory that it
//! released. Each process logs both in files, in order.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use harness_allocator::units::Bytes;

use crate::{calls::Call, settings::Fault};

/// The end of the name of a file of attempts, after the process number.
pub const ENDING: &str = ".attempts";
/// The end of the name of a file of frees, after the process number.
pub const FREES: &str = ".frees";
/// Words per attempt or free in its file.
const WORDS: usize = 4;
/// Bytes per attempt or free in its file.
pub const BYTES: usize = WORDS * 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub call: Call,
    pub size: Bytes,
    /// Kernels, graphs, copies, host functions and event records submitted before. On a real GPU
    /// nothing counts these: there it is the number of earlier attempts and frees.
    pub submitted: u64,
    pub outcome: AttemptOutcome,
    /// The index that the process sees; 0 for host memory.
    pub device: u32,
    /// The number of the device without `CUDA_VISIBLE_DEVICES`.
    pub number: u32,
    /// Bytes of the device that the process held before, without its context.
    pub held: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttemptOutcome {
    Served,
    /// The device ran out of memory.
    Refused,
    /// The failure was injected.
    Injected,
}

/// Memory of a device that a process returned to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverFree {
    /// Earlier attempts of the process, for host memory too.
    pub attempts: u64,
    pub submitted: u64,
    pub device: u32,
    /// Bytes of the device that the process still holds, without its context.
    pub held: Bytes,
}

impl DriverFree {
    /// Reads a file of frees. Ignores a truncated last record.
    pub fn read(path: &Path) -> io::Result<Vec<Self>> {
        let free = |[attempts, submitted, device, held]: [u64; WORDS]| {
            Some(Self {
                attempts,
                submitted,
                device: u32::try_from(device).ok()?,
                held: Bytes(held),
            })
        };
        Ok(rows(path)?.into_iter().filter_map(free).collect())
    }
}

fn rows(path: &Path) -> io::Result<Vec<[u64; WORDS]>> {
    let word = |bytes: &[u8; BYTES], index: usize| {
        bytes
            .as_chunks::<8>()
            .0
            .get(index)
            .map_or(0, |word| u64::from_le_bytes(*word))
    };
    Ok(fs::read(path)?
        .as_chunks::<BYTES>()
        .0
        .iter()
        .map(|bytes| std::array::from_fn(|index| word(bytes, index)))
        .collect())
}

fn row(words: [u64; WORDS]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (word, into) in words.into_iter().zip(bytes.as_chunks_mut::<8>().0) {
        *into = word.to_le_bytes();
    }
    bytes
}

impl AttemptOutcome {
    const ALL: [Self; 3] = [Self::Served, Self::Refused, Self::Injected];
}

impl Attempt {
    /// Reads a file of attempts. Ignores a truncated last record.
    pub fn read(path: &Path) -> io::Result<Vec<Self>> {
        Ok(rows(path)?.into_iter().filter_map(Self::of_row).collect())
    }

    fn row(&self) -> [u8; BYTES] {
        let kind = self.call as u64
            | (self.outcome as u64) << 8
            | (u64::from(self.device) & 0xffff) << 16
            | u64::from(self.number) << 32;
        row([kind, self.size.0, self.submitted, self.held.0])
    }

    fn of_row([kind, size, submitted, held]: [u64; WORDS]) -> Option<Self> {
        let call = *Call::ALL.get((kind & 0xff) as usize)?;
        let outcome = *AttemptOutcome::ALL.get((kind >> 8 & 0xff) as usize)?;
        let (device, number) = ((kind >> 16 & 0xffff) as u32, (kind >> 32) as u32);
        Some(Self {
            call,
            size: Bytes(size),
            submitted,
            outcome,
            device,
            number,
            held: Bytes(held),
        })
    }
}

/// Returns whether the process made enough attempts for the first failure of the fault.
pub fn reach(attempts: &[Attempt], fault: &Fault) -> bool {
    attempts
        .iter()
        .filter(|attempt| fault.counts(attempt.call, attempt.size))
        .count() as u64
        >= fault.first
}

/// Counts the attempts of this process for each fault; logs attempts and frees to separate files.
#[derive(Debug, Default)]
pub struct Attempts {
    counted: Vec<(Fault, u64)>,
    noted: u64,
    freed: u64,
    /// The folder of the files; `None` if attempts are not logged.
    folder: Option<PathBuf>,
    is_open: bool,
    file: Option<File>,
    frees: Option<File>,
}

impl Attempts {
    pub fn new(folder: Option<&Path>, faults: &[Fault]) -> Self {
        let counted = faults.iter().map(|fault| (*fault, 0)).collect();
        Self {
            counted,
            folder: folder.map(Path::to_owned),
            ..Self::default()
        }
    }

    /// Opens the files of this process, unless they are open. If a program before `exec` logged
    /// attempts, counting continues after them.
    pub fn open(&mut self) {
        if std::mem::replace(&mut self.is_open, true) {
            return;
        }
        let Some(folder) = &self.folder else { return };
        let open = |ending: &str| {
            let path = folder.join(format!("{}{ending}", std::process::id()));
            let file = OpenOptions::new().append(true).create(true).open(&path);
            let rows = file
                .as_ref()
                .ok()
                .and_then(|file| file.metadata().ok())
                .map_or(0, |file| file.len() / BYTES as u64);
            (path, file.map_err(|error| complain(&error)).ok(), rows)
        };
        let (path, file, noted) = open(ENDING);
        let (_, frees, freed) = open(FREES);
        let earlier = if noted > 0 {
            Attempt::read(&path).unwrap_or_default()
        } else {
            Vec::new()
        };
        for (fault, counted) in &mut self.counted {
            *counted = earlier
                .iter()
                .filter(|attempt| fault.counts(attempt.call, attempt.size))
                .count() as u64;
        }
        (self.file, self.frees, self.noted, self.freed) = (file, frees, noted, freed);
    }

    /// Starts the attempts of a forked child. It opens its files at its first attempt.
    pub fn start_child(&mut self) {
        let faults: Vec<Fault> = self.counted.iter().map(|(fault, _)| *fault).collect();
        *self = Self::new(self.folder.as_deref(), &faults);
    }

    /// Counts an attempt and returns whether a fault makes it fail.
    pub fn fails(&mut self, call: Call, size: Bytes) -> bool {
        self.open();
        let mut fails = false;
        for (fault, counted) in self
            .counted
            .iter_mut()
            .filter(|(fault, _)| fault.counts(call, size))
        {
            *counted += 1;
            fails |= (fault.first..fault.first.saturating_add(fault.count)).contains(counted);
        }
        fails
    }

    /// Ends the failures that last until an error of a library, if they have begun.
    pub fn end_failures(&mut self) {
        self.counted
            .retain(|(fault, counted)| fault.count != Fault::UNTIL_ERROR || *counted < fault.first);
    }

    /// Uncounts an attempt: the driver refused it for a reason other than memory.
    pub fn take_back(&mut self, call: Call, size: Bytes) {
        for (fault, counted) in &mut self.counted {
            *counted -= u64::from(fault.counts(call, size));
        }
    }

    /// The number of attempts and frees so far.
    pub const fn noted(&self) -> u64 {
        self.noted + self.freed
    }

    /// Logs an attempt. The program continues if the file cannot be written.
    pub fn note(&mut self, attempt: &Attempt) {
        self.noted += 1;
        append(&mut self.file, &attempt.row());
    }

    /// Logs a free; `held` is the remaining usage of the device.
    pub fn note_free(&mut self, submitted: u64, device: u32, held: Bytes) {
        self.freed += 1;
        append(
            &mut self.frees,
            &row([self.noted, submitted, device.into(), held.0]),
        );
    }
}

/// Appends a row. After an error the file ends, because later rows would have other numbers.
fn append(file: &mut Option<File>, row: &[u8; BYTES]) {
    let written = file.as_mut().map_or(Ok(()), |file| file.write_all(row));
    if let Err(error) = written {
        *file = None;
        complain(&error);
    }
}

fn complain(error: &io::Error) {
    // The standard error of the program may be closed.
    let _ = writeln!(
        io::stderr(),
        "harness: the list of allocations of process {} is incomplete: {error}",
        std::process::id()
    );
}

#[cfg(test)]
mod tests;
