//! [`Attempt`]: one try of a program to get memory, and [`Free`]: memory that it gave back. Each process notes both in files, in their order.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use harness_allocator::units::Bytes;

use crate::calls::FaultyCall;
use crate::settings::Fault;

/// How the name of a file of attempts ends; in front of it stands the number of the process.
pub const ENDING: &str = ".attempts";
/// How the name of a file of frees ends; in front of it stands the number of the process.
pub const FREES: &str = ".frees";
/// Words of an attempt or a free in its file.
const WORDS: usize = 4;
/// Bytes of an attempt or a free in its file, so that its length tells how many there were.
pub const BYTES: usize = WORDS * 8;

/// One try to get memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Attempt {
    pub call: FaultyCall,
    /// What was asked for.
    pub size: Bytes,
    /// Kernels, graphs, copies, host functions and records submitted before; on a real GPU, where nobody counts these, attempts to get memory and frees.
    pub submitted: u64,
    pub outcome: Outcome,
    /// The device, by the index that the process sees; 0 for host memory.
    pub device: u32,
    /// What the process held of the device before, its context apart.
    pub held: Bytes,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// There was memory.
    Served,
    /// There was none.
    Refused,
    /// It failed because that was asked for.
    Injected,
}

/// Memory of a device that was given back to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Free {
    /// Attempts of the process to get memory before, those of host memory included.
    pub attempts: u64,
    /// As for an attempt.
    pub submitted: u64,
    /// The device, by the index that the process sees.
    pub device: u32,
    /// What the process holds of the device from then on, its context apart.
    pub held: Bytes,
}

impl Free {
    /// Reads a file of frees. What a killed process could not write to its end is left out.
    ///
    /// # Errors
    /// That the file cannot be read.
    pub fn read(path: &Path) -> io::Result<Vec<Self>> {
        let free = |[attempts, submitted, device, held]: [u64; WORDS]| {
            Some(Self { attempts, submitted, device: u32::try_from(device).ok()?, held: Bytes(held) })
        };
        Ok(rows(path)?.into_iter().filter_map(free).collect())
    }
}

/// The words of each row of a file.
fn rows(path: &Path) -> io::Result<Vec<[u64; WORDS]>> {
    let word = |bytes: &[u8; BYTES], index: usize| bytes.as_chunks::<8>().0.get(index).map_or(0, |word| u64::from_le_bytes(*word));
    Ok(fs::read(path)?.as_chunks::<BYTES>().0.iter().map(|bytes| std::array::from_fn(|index| word(bytes, index))).collect())
}

/// A row of a file.
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
    /// Reads a file of attempts. What a killed process could not write to its end is left out.
    ///
    /// # Errors
    /// That the file cannot be read.
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

/// Whether the attempts of a process went so far that the first one that this fault asks for failed.
#[must_use]
pub fn reach(attempts: &[Attempt], fault: &Fault) -> bool {
    attempts.iter().filter(|attempt| fault.counts(attempt.call, attempt.size)).count() as u64 >= fault.first
}

/// Attempts of this process: counted for each fault, and noted in its file, as its frees are in another.
#[derive(Debug, Default)]
pub struct Attempts {
    /// Attempts that each fault counted so far.
    counted: Vec<u64>,
    /// Attempts noted so far, and frees.
    noted: u64,
    freed: u64,
    /// Missing where there is no folder for it.
    file: Option<File>,
    frees: Option<File>,
}

impl Attempts {
    /// Attempts of a process that notes them and its frees in new files of this folder.
    pub fn of_this_process(folder: Option<&Path>) -> Self {
        let file = |ending: &str| {
            let path = folder.map(|folder| folder.join(format!("{}{ending}", std::process::id())));
            path.and_then(|path| OpenOptions::new().append(true).create(true).open(path).ok())
        };
        Self { counted: Vec::new(), noted: 0, freed: 0, file: file(ENDING), frees: file(FREES) }
    }

    /// Counts an attempt. Tells whether it is to fail.
    pub fn fails(&mut self, faults: &[Fault], call: FaultyCall, size: Bytes) -> bool {
        self.counted.resize(faults.len(), 0);
        let mut fails = false;
        for (fault, counted) in faults.iter().zip(&mut self.counted) {
            if fault.counts(call, size) {
                *counted += 1;
                fails |= (fault.first..fault.first.saturating_add(fault.count)).contains(counted);
            }
        }
        fails
    }

    /// An attempt that was counted was none: the call was refused for another reason than memory.
    pub fn take_back(&mut self, faults: &[Fault], call: FaultyCall, size: Bytes) {
        for (fault, counted) in faults.iter().zip(&mut self.counted) {
            *counted -= u64::from(fault.counts(call, size));
        }
    }

    /// How many attempts and frees were noted so far.
    #[must_use]
    pub const fn noted(&self) -> u64 {
        self.noted + self.freed
    }

    /// Notes how an attempt ended. A file that cannot be written any more is shorter; the program goes on.
    pub fn note(&mut self, attempt: &Attempt) {
        self.noted += 1;
        if let Some(file) = &mut self.file {
            let _ = file.write_all(&attempt.row());
        }
    }

    /// Notes that memory of a device was given back, after which the process holds so much of it. Written as attempts are.
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
        text.parse().expect("a fault")
    }

    #[test]
    fn the_attempts_that_were_asked_for_fail_and_smaller_ones_do_not_count() {
        let faults = ["cudaMalloc:2:2:1MiB", "cudaMalloc:5"].map(fault);
        let mut attempts = Attempts::default();
        let sizes = [4096, 1 << 20, 2 << 20, 4096, 1 << 20, 3 << 20];
        let failed = sizes.map(|size| attempts.fails(&faults, FaultyCall::Malloc, Bytes(size)));
        assert_eq!(failed, [false, false, true, false, true, false]);
        assert!(!attempts.fails(&faults, FaultyCall::Create, Bytes::mib(2)));
    }

    #[test]
    fn a_call_that_was_refused_for_another_reason_does_not_count() {
        let (faults, mut attempts) = ([fault("cuMemCreate:2")], Attempts::default());
        let mut fails = || attempts.fails(&faults, FaultyCall::Create, Bytes::mib(2));
        assert!(!fails() && fails());
        attempts.take_back(&faults, FaultyCall::Create, Bytes::mib(2));
        assert!(attempts.fails(&faults, FaultyCall::Create, Bytes::mib(2)));
    }

    #[test]
    fn any_counts_all_calls_that_get_device_memory_together() {
        let mut attempts = Attempts::default();
        let calls = [FaultyCall::Malloc, FaultyCall::HostAlloc, FaultyCall::Create, FaultyCall::MallocAsync, FaultyCall::Malloc];
        let failed = calls.map(|call| attempts.fails(&[fault("any:2:2")], call, Bytes::mib(2)));
        assert_eq!(failed, [false, false, true, true, false]);
    }

    #[test]
    fn attempts_are_read_back_as_they_were_noted_and_half_of_one_is_left_out() {
        let folder = tempfile::tempdir().expect("a folder can be made");
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
        let mut attempts = Attempts::of_this_process(Some(folder.path()));
        noted.iter().for_each(|attempt| attempts.note(attempt));
        let path = folder.path().join(format!("{}{ENDING}", std::process::id()));
        assert_eq!(Attempt::read(&path).expect("it can be read"), noted);
        attempts.note_free(9, 3, Bytes::mib(5));
        assert_eq!(attempts.noted(), 4);
        let frees = Free::read(&path.with_extension("frees")).expect("it can be read");
        assert_eq!(frees, [Free { attempts: 3, submitted: 9, device: 3, held: Bytes::mib(5) }]);
        let whole = fs::read(&path).expect("it can be read");
        fs::write(&path, &whole[..whole.len() - 1]).expect("it can be written");
        assert_eq!(Attempt::read(&path).expect("it can be read"), noted[..2]);
    }

    #[test]
    fn a_fault_is_reached_when_its_first_attempt_was_made() {
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
