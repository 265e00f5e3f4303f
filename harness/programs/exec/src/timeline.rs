//! [`ProgramTimeline`] lists the memory events of a process in order. It is read from the files in
//! the folder of the run.

use std::{fs, io, path::Path};

use harness_allocator::units::Bytes;
use harness_gpu_settings::attempts::{self, Attempt, DriverFree};

use crate::{errors::OutOfMemoryError, files::numbered, machine::Machine};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProgramTimeline {
    pub pid: u32,
    pub attempts: Vec<Attempt>,
    /// Memory that it released to the driver, in order.
    pub frees: Vec<DriverFree>,
    /// Its OutOfMemoryErrors, in order, if recorded.
    pub errors: Vec<OutOfMemoryError>,
    /// The bytes that torch had allocated, if sampled.
    pub samples: Vec<Sample>,
}

/// The bytes that torch had allocated on a device at one point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Work submitted by then, counted as for an attempt.
    pub submitted: u64,
    pub device: u32,
    pub allocated: Bytes,
}

impl Machine {
    pub fn timelines(&self, run: &Path) -> io::Result<Vec<ProgramTimeline>> {
        ProgramTimeline::read_folder(run, &self.counters(run))
    }
}

impl ProgramTimeline {
    /// Reads the timelines of a run, by process ID; `noted` is the folder of the counters. Skips
    /// processes without attempts.
    pub(crate) fn read_folder(run: &Path, noted: &Path) -> io::Result<Vec<Self>> {
        let read = |(pid, path): &(u32, std::path::PathBuf)| {
            Ok(Self {
                pid: *pid,
                attempts: Attempt::read(path)?,
                frees: DriverFree::read(&noted.join(format!("{pid}{}", attempts::FREES)))
                    .or_else(none_where_missing)?,
                errors: OutOfMemoryError::of_process(run, *pid),
                samples: samples(run, *pid),
            })
        };
        numbered(noted, "", attempts::ENDING)?
            .iter()
            .map(read)
            .collect()
    }
}

fn none_where_missing<T>(error: io::Error) -> io::Result<Vec<T>> {
    if error.kind() == io::ErrorKind::NotFound {
        Ok(Vec::new())
    } else {
        Err(error)
    }
}

/// Ignores a line truncated by the process's end.
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
mod tests;
