//! [`Timeline`]: what a process did to its memory in the order of its work, from the files that it left in the folder of the run.

use std::fs;
use std::io;
use std::path::Path;

use harness_allocator::units::Bytes;
use harness_gpu_settings::attempts::{self, Attempt, Free};

use crate::limited::counters_folder;
use crate::record::numbered;
use crate::trials::observed::OutOfMemory;

/// What one process did.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Timeline {
    pub pid: u32,
    /// Its attempts to get memory, in order.
    pub attempts: Vec<Attempt>,
    /// Memory that it gave back to the driver, in order.
    pub frees: Vec<Free>,
    /// Its out of memory errors, in order, where they were noted.
    pub errors: Vec<OutOfMemory>,
    /// How much torch had allocated, where that was sampled.
    pub samples: Vec<Sample>,
}

/// How much torch had allocated on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Sample {
    /// As for an attempt.
    pub submitted: u64,
    /// The device, by the index that the process sees.
    pub device: u32,
    pub allocated: Bytes,
}

impl Timeline {
    /// Of all processes of a run on simulated GPUs that made attempts, by number.
    ///
    /// # Errors
    /// That the folder cannot be read.
    pub fn read_folder(run: &Path) -> io::Result<Vec<Self>> {
        Self::of_folders(run, run)
    }

    /// The same of a run on a real GPU.
    ///
    /// # Errors
    /// That the folder cannot be read.
    pub fn read_limited(run: &Path) -> io::Result<Vec<Self>> {
        Self::of_folders(run, &counters_folder(run))
    }

    fn of_folders(run: &Path, noted: &Path) -> io::Result<Vec<Self>> {
        let read = |(pid, path): &(u32, std::path::PathBuf)| {
            Ok(Self {
                pid: *pid,
                attempts: Attempt::read(path)?,
                frees: Free::read(&noted.join(format!("{pid}{}", attempts::FREES))).or_else(none_where_missing)?,
                errors: OutOfMemory::of_process(run, *pid),
                samples: samples(run, *pid),
            })
        };
        numbered(noted, "", attempts::ENDING)?.iter().map(read).collect()
    }
}

fn none_where_missing<T>(error: io::Error) -> io::Result<Vec<T>> {
    if error.kind() == io::ErrorKind::NotFound { Ok(Vec::new()) } else { Err(error) }
}

/// A line that a killed process could not write to its end says nothing.
fn samples(run: &Path, pid: u32) -> Vec<Sample> {
    let text = fs::read_to_string(run.join(format!("samples-{pid}"))).unwrap_or_default();
    let sample = |line: &str| {
        let mut words = line.split_whitespace();
        let sample = Sample {
            submitted: words.next()?.parse().ok()?,
            device: words.next()?.parse().ok()?,
            allocated: Bytes(words.next()?.parse().ok()?),
        };
        words.next().is_none().then_some(sample)
    };
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().filter_map(sample).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn samples_are_read_and_half_a_line_is_left_out() {
        let run = tempfile::tempdir().unwrap();
        fs::write(run.path().join("7.attempts"), "").unwrap();
        fs::write(run.path().join("samples-7"), "0 0 512\n12 1 1024\nnothing\n13 1 20").unwrap();
        let timelines = Timeline::read_folder(run.path()).unwrap();
        let sample = |submitted, device, allocated| Sample { submitted, device, allocated: Bytes(allocated) };
        assert_eq!(timelines, [Timeline { pid: 7, samples: vec![sample(0, 0, 512), sample(12, 1, 1024)], ..Timeline::default() }]);
    }
}
