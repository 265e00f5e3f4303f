//! [`Attempt`]: one call of a program that requests memory, and [`Free`]: memory that it released. Each process logs both in files, in order.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use harness_allocator::units::Bytes;

use crate::calls::FaultyCall;
use crate::settings::Fault;

/// The end of the name of a file of attempts, after the process number.
pub const ENDING: &str = ".attempts";
/// The end of the name of a file of frees, after the process number.
pub const FREES: &str = ".frees";
/// Words per attempt or free in its file.
const WORDS: usize = 4;
/// Bytes per attempt or free in its file.
pub const BYTES: usize = WORDS * 8;

/// One call that requests memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempt {
    pub call: FaultyCall,
    /// The requested bytes.
    pub size: Bytes,
    /// Kernels, graphs, copies, host functions and event records submitted before. On a real GPU nothing counts these: there it is the number of
    /// earlier attempts and frees.
    pub submitted: u64,
    pub outcome: Outcome,
    /// The index that the process sees; 0 for host memory.
    pub device: u32,
    /// Bytes of the device that the process held before, without its context.
    pub held: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Served,
    /// The device ran out of memory.
    Refused,
    /// The failure was injected.
    Injected,
}

/// Memory of a device that a process returned to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Free {
    /// Earlier attempts of the process, for host memory too.
    pub attempts: u64,
    /// As in [`Attempt`].
    pub submitted: u64,
    /// The index that the process sees.
    pub device: u32,
    /// Bytes of the device that the process still holds, without its context.
    pub held: Bytes,
}

impl Free {
    /// Reads a file of frees. Ignores a truncated last record.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(path: &Path) -> io::Result<Vec<Self>> {
        let free = |[attempts, submitted, device, held]: [u64; WORDS]| {
            Some(Self { attempts, submitted, device: u32::try_from(device).ok()?, held: Bytes(held) })
        };
        Ok(rows(path)?.into_iter().filter_map(free).collect())
    }
}

/// Reads the rows of a file.
fn rows(path: &Path) -> io::Result<Vec<[u64; WORDS]>> {
    let word = |bytes: &[u8; BYTES], index: usize| bytes.as_chunks::<8>().0.get(index).map_or(0, |word| u64::from_le_bytes(*word));
    Ok(fs::read(path)?.as_chunks::<BYTES>().0.iter().map(|bytes| std::array::from_fn(|index| word(bytes, index))).collect())
}

fn row(words: [u64; WORDS]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (word, into) in words.into_iter().zip(bytes.as_chunks_mut::<8>().0) {
        *into = word.to_le_bytes();
    }
    bytes
}

impl Outcome {
    const ALL: [Self; 3] = [Self::Served, Self::Refused, Self::Injected];
}

impl Attempt {
    /// Reads a file of attempts. Ignores a truncated last record.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(path: &Path) -> io::Result<Vec<Self>> {
        Ok(rows(path)?.into_iter().filter_map(Self::of_row).collect())
    }

    fn row(&self) -> [u8; BYTES] {
        let kind = self.call as u64 | (self.outcome as u64) << 8 | u64::from(self.device) << 16;
        row([kind, self.size.0, self.submitted, self.held.0])
    }

    fn of_row([kind, size, submitted, held]: [u64; WORDS]) -> Option<Self> {
        let call = *FaultyCall::ALL.get((kind & 0xff) as usize)?;
        let outcome = *Outcome::ALL.get((kind >> 8 & 0xff) as usize)?;
        let device = u32::try_from(kind >> 16).ok()?;
        Some(Self { call, size: Bytes(size), submitted, outcome, device, held: Bytes(held) })
    }
}

/// Returns whether the process made enough attempts for the first failure of the fault.
#[must_use]
pub fn reach(attempts: &[Attempt], fault: &Fault) -> bool {
    attempts.iter().filter(|attempt| fault.counts(attempt.call, attempt.size)).count() as u64 >= fault.first
}

/// Counts the attempts of this process for each fault; logs attempts and frees to separate files.
#[derive(Debug, Default)]
pub struct Attempts {
    /// Attempts per fault.
    counted: Vec<u64>,
    noted: u64,
    freed: u64,
    /// The folder of the files; `None` if attempts are not logged.
    folder: Option<PathBuf>,
    is_open: bool,
    file: Option<File>,
    frees: Option<File>,
}

impl Attempts {
    #[must_use]
    pub fn new(folder: Option<&Path>) -> Self {
        Self { folder: folder.map(Path::to_owned), ..Self::default() }
    }

    /// Opens the files of this process, unless they are open. If a program before `exec` logged attempts, counting continues after them.
    pub fn open(&mut self, faults: &[Fault]) {
        if std::mem::replace(&mut self.is_open, true) {
            return;
        }
        self.counted = vec![0; faults.len()];
        let Some(folder) = &self.folder else { return };
        let open = |ending: &str| {
            let path = folder.join(format!("{}{ending}", std::process::id()));
            let file = OpenOptions::new().append(true).create(true).open(&path);
            let rows = file.as_ref().ok().and_then(|file| file.metadata().ok()).map_or(0, |file| file.len() / BYTES as u64);
            (path, file.ok(), rows)
        };
        let (path, file, noted) = open(ENDING);
        let (_, frees, freed) = open(FREES);
        let earlier = if noted > 0 { Attempt::read(&path).unwrap_or_default() } else { Vec::new() };
        for (fault, counted) in faults.iter().zip(&mut self.counted) {
            *counted = earlier.iter().filter(|attempt| fault.counts(attempt.call, attempt.size)).count() as u64;
        }
        (self.file, self.frees, self.noted, self.freed) = (file, frees, noted, freed);
    }

    /// Starts the attempts of a forked child. It opens its files at its first attempt.
    pub fn start_child(&mut self) {
        *self = Self { folder: self.folder.take(), ..Self::default() };
    }

    /// Counts an attempt and returns whether a fault makes it fail.
    pub fn fails(&mut self, faults: &[Fault], call: FaultyCall, size: Bytes) -> bool {
        self.open(faults);
        let mut fails = false;
        for (fault, counted) in faults.iter().zip(&mut self.counted) {
            if fault.counts(call, size) {
                *counted += 1;
                fails |= (fault.first..fault.first.saturating_add(fault.count)).contains(counted);
            }
        }
        fails
    }

    /// Uncounts an attempt: the driver refused it for a reason other than memory.
    pub fn take_back(&mut self, faults: &[Fault], call: FaultyCall, size: Bytes) {
        for (fault, counted) in faults.iter().zip(&mut self.counted) {
            *counted -= u64::from(fault.counts(call, size));
        }
    }

    /// The number of attempts and frees so far.
    #[must_use]
    pub const fn noted(&self) -> u64 {
        self.noted + self.freed
    }

    /// Logs an attempt. The program continues if the file cannot be written.
    pub fn note(&mut self, attempt: &Attempt) {
        self.noted += 1;
        if let Some(file) = &mut self.file {
            let _ = file.write_all(&attempt.row());
        }
    }

    /// Logs a free; `held` is the remaining usage of the device.
    pub fn note_free(&mut self, submitted: u64, device: u32, held: Bytes) {
        self.freed += 1;
        if let Some(file) = &mut self.frees {
            let _ = file.write_all(&row([self.noted, submitted, device.into(), held.0]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> Fault {
        text.parse().expect("parse a fault")
    }

    #[test]
    fn a_fault_fails_its_attempts_and_ignores_smaller_ones() {
        let faults = ["cudaMalloc:2:2:1MiB", "cudaMalloc:5"].map(fault);
        let mut attempts = Attempts::default();
        let sizes = [4096, 1 << 20, 2 << 20, 4096, 1 << 20, 3 << 20];
        let failed = sizes.map(|size| attempts.fails(&faults, FaultyCall::Malloc, Bytes(size)));
        assert_eq!(failed, [false, false, true, false, true, false]);
        assert!(!attempts.fails(&faults, FaultyCall::Create, Bytes::mib(2)));
    }

    #[test]
    fn a_call_refused_for_another_reason_does_not_count() {
        let (faults, mut attempts) = ([fault("cuMemCreate:2")], Attempts::default());
        let mut fails = || attempts.fails(&faults, FaultyCall::Create, Bytes::mib(2));
        assert!(!fails() && fails());
        attempts.take_back(&faults, FaultyCall::Create, Bytes::mib(2));
        assert!(attempts.fails(&faults, FaultyCall::Create, Bytes::mib(2)));
    }

    #[test]
    fn any_counts_all_calls_for_device_memory_together() {
        let mut attempts = Attempts::default();
        let calls = [FaultyCall::Malloc, FaultyCall::HostAlloc, FaultyCall::Create, FaultyCall::MallocAsync, FaultyCall::Malloc];
        let failed = calls.map(|call| attempts.fails(&[fault("any:2:2")], call, Bytes::mib(2)));
        assert_eq!(failed, [false, false, true, true, false]);
    }

    #[test]
    fn logged_attempts_are_read_and_a_truncated_one_is_ignored() {
        let folder = tempfile::tempdir().expect("create a folder");
        let noted = [
            (FaultyCall::Create, 20, Outcome::Served),
            (FaultyCall::HostAlloc, 1, Outcome::Refused),
            (FaultyCall::Malloc, 2, Outcome::Injected),
        ]
        .map(|(call, size, outcome)| Attempt {
            call,
            size: Bytes::mib(size),
            submitted: 7,
            outcome,
            device: 3,
            held: Bytes::mib(9),
        });
        let mut attempts = Attempts::new(Some(folder.path()));
        attempts.open(&[]);
        noted.iter().for_each(|attempt| attempts.note(attempt));
        let path = folder.path().join(format!("{}{ENDING}", std::process::id()));
        assert_eq!(Attempt::read(&path).expect("read the file"), noted);
        attempts.note_free(9, 3, Bytes::mib(5));
        assert_eq!(attempts.noted(), 4);
        let frees = Free::read(&path.with_extension("frees")).expect("read the file");
        assert_eq!(frees, [Free { attempts: 3, submitted: 9, device: 3, held: Bytes::mib(5) }]);
        let whole = fs::read(&path).expect("read the file");
        fs::write(&path, &whole[..whole.len() - 1]).expect("write the file");
        assert_eq!(Attempt::read(&path).expect("read the file"), noted[..2]);
    }

    #[test]
    fn counting_continues_after_exec_and_starts_anew_in_a_forked_child() {
        let folder = tempfile::tempdir().expect("create a folder");
        let faults = [fault("cudaMalloc:3")];
        let one =
            Attempt { call: FaultyCall::Malloc, size: Bytes::mib(2), submitted: 0, outcome: Outcome::Served, device: 0, held: Bytes::ZERO };
        let attempt = |attempts: &mut Attempts| {
            let fails = attempts.fails(&faults, one.call, one.size);
            attempts.note(&one);
            fails
        };
        let mut before = Attempts::new(Some(folder.path()));
        assert!(!attempt(&mut before) && !attempt(&mut before));
        let mut after_exec = Attempts::new(Some(folder.path()));
        assert!(attempt(&mut after_exec));
        assert_eq!(after_exec.noted(), 3);
        let mut child = Attempts::new(None);
        child.open(&faults);
        assert!(!attempt(&mut child) && !attempt(&mut child));
        child.start_child();
        assert!(!attempt(&mut child) && !attempt(&mut child) && attempt(&mut child));
    }

    #[test]
    fn a_fault_is_reached_by_its_first_attempt() {
        let attempts = [1, 2, 1].map(|size| Attempt {
            call: FaultyCall::Malloc,
            size: Bytes::mib(size),
            submitted: 0,
            outcome: Outcome::Served,
            device: 0,
            held: Bytes::ZERO,
        });
        for (text, reached) in
            [("cudaMalloc:3", true), ("any:3:2", true), ("cudaMalloc:4", false), ("cudaMalloc:2:1:2MiB", false), ("cudaHostAlloc:1", false)]
        {
            assert_eq!(reach(&attempts, &fault(text)), reached, "{text}");
        }
    }
}
