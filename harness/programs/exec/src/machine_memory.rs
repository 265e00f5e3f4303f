//! [`MachineMemory`]: the memory of a machine whose GPU shares it with the host, as the processes
//! of a run noted it.

use std::path::Path;
use std::{fmt, fs, io};

use harness_allocator::units::Bytes;
use harness_gpu_settings::shared_memory::{MemoryInUse, MemoryNotes, MemoryShare, NOTES, STACK};
use serde::Serialize;

use crate::errors::ErrorFrame;
use crate::files::numbered;
use crate::hang::processes::{of_program, stack};

/// The most frames that the summary shows.
const FRAMES: usize = 3;

/// The memory in use was read at each request for GPU or page-locked memory, at each read of the
/// free memory, and when a process with torch exited. What files and the system use is unknown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MachineMemory {
    /// The machine's memory in bytes.
    pub memory: u64,
    /// The most memory in use.
    pub most: MemoryInUse,
    /// The first moment at which more was in use than the machine has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub short: Option<ShortMemory>,
}

/// A moment at which the processes use more than the machine's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ShortMemory {
    /// The process that noticed it.
    pub pid: u32,
    /// Its call stack without PyTorch's own frames, innermost first. Empty without Python.
    pub stack: Vec<ErrorFrame>,
    pub in_use: MemoryInUse,
}

impl MachineMemory {
    /// Reads the notes in the folder of a run. `None` if no process wrote any.
    pub(crate) fn read(run: &Path, memory: Bytes) -> io::Result<Option<Self>> {
        let mut notes = Vec::new();
        for (pid, path) in numbered(run, NOTES, "")? {
            let found = serde_json::from_slice::<MemoryNotes>(&fs::read(path)?)?;
            notes.push((pid, found));
        }
        let first = notes
            .iter()
            .filter_map(|(pid, notes)| Some((notes.short.as_ref()?, *pid)))
            .min_by_key(|((time, _), pid)| (*time, *pid));
        let short = first.map(|((_, in_use), pid)| {
            let text = fs::read_to_string(run.join(format!("{STACK}{pid}"))).unwrap_or_default();
            ShortMemory {
                pid,
                stack: of_program(stack(&text, run), run),
                in_use: in_use.clone(),
            }
        });
        let most = notes.into_iter().map(|(_, notes)| notes.most);
        Ok(most.max_by_key(MemoryInUse::total).map(|most| Self {
            memory: memory.0,
            most,
            short,
        }))
    }

    fn of(&self, in_use: &MemoryInUse) -> String {
        let shares = shares(
            in_use.sum(|share| share.gpu),
            in_use.sum(|share| share.pinned),
            in_use.sum(|share| share.pageable),
        );
        let each: String = match in_use.processes.as_slice() {
            [_] => String::new(),
            several => several.iter().map(of_process).collect(),
        };
        format!(
            "about {} of {} in use: {shares}{each}",
            in_use.total(),
            Bytes(self.memory)
        )
    }
}

fn of_process(share: &MemoryShare) -> String {
    let shares = shares(Bytes(share.gpu), Bytes(share.pinned), Bytes(share.pageable));
    format!("\n  process {}: {shares}", share.pid)
}

fn shares(gpu: Bytes, pinned: Bytes, pageable: Bytes) -> String {
    format!("GPU {gpu}, pinned {pinned}, other memory about {pageable}")
}

/// Lines of the summary.
impl fmt::Display for MachineMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(short) = &self.short {
            let frames = short.stack.iter().take(FRAMES);
            let frames: Vec<String> = frames
                .map(|frame| format!("{} {}", frame.short(), frame.name))
                .collect();
            let at = match frames.as_slice() {
                [] => format!("in process {}", short.pid),
                _ => format!("at {}", frames.join(", called at ")),
            };
            writeln!(
                f,
                "short of memory {at}: {}\n  There the system drops cached files, swaps, or ends \
                 processes, and the machine may hang",
                self.of(&short.in_use)
            )?;
        }
        writeln!(f, "memory of the machine: at most {}", self.of(&self.most))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn note(run: &Path, pid: u32, most: [u64; 3], short: Option<(u64, u64)>) {
        let in_use = |[gpu, pinned, pageable]: [u64; 3]| MemoryInUse {
            processes: vec![MemoryShare {
                pid,
                gpu,
                pinned,
                pageable,
            }],
        };
        let notes = MemoryNotes {
            most: in_use(most),
            short: short.map(|(time, gpu)| (time, in_use([gpu, 0, 0]))),
        };
        let text = serde_json::to_string(&notes).unwrap();
        fs::write(run.join(format!("{NOTES}{pid}")), text).unwrap();
    }

    #[test]
    fn the_most_memory_and_the_first_lack_of_it_may_be_of_two_processes() {
        let run = tempfile::tempdir().unwrap();
        let read = || MachineMemory::read(run.path(), Bytes(100)).unwrap();
        assert_eq!(read(), None);
        note(run.path(), 7, [80, 10, 15], Some((2_000, 101)));
        note(run.path(), 9, [60, 0, 43], Some((1_000, 102)));
        note(run.path(), 12, [50, 0, 0], None);
        let stack = "Current thread 0x1 (most recent call first):\n  \
             File \"/home/me/serve.py\", line 31 in profile_run\n";
        fs::write(run.path().join(format!("{STACK}9")), stack).unwrap();
        let memory = read().unwrap();
        assert_eq!(memory.most.total(), Bytes(105));
        let short = memory.short.unwrap();
        assert_eq!((short.pid, short.in_use.total()), (9, Bytes(102)));
        let names: Vec<&str> = short.stack.iter().map(|frame| &*frame.name).collect();
        assert_eq!(names, ["profile_run"]);
    }
}
