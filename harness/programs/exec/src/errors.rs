//! Out of memory errors of PyTorch, and the lines of a program that they name.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::files::read_lines;

/// An OutOfMemoryError of PyTorch, as recorded by the hook.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct OutOfMemoryError {
    /// Allocation attempts of the process before the error, including host memory.
    pub attempts: u64,
    /// The call stack without PyTorch's own frames, innermost first.
    pub frames: Vec<ErrorFrame>,
}

impl OutOfMemoryError {
    /// Reads the errors of a process, in order. Empty if none was recorded.
    pub(crate) fn of_process(folder: &Path, pid: u32) -> Vec<Self> {
        read_lines(&folder.join(format!("ooms-{pid}.jsonl")))
    }
}

/// Reads the call stacks of a process's calls of libraries that failed on request, without
/// PyTorch's own frames, innermost first. Empty if none was recorded.
pub(crate) fn failed_calls(folder: &Path, pid: u32) -> Vec<Vec<ErrorFrame>> {
    #[derive(Deserialize)]
    struct Failed {
        frames: Vec<ErrorFrame>,
    }
    read_lines::<Failed>(&folder.join(format!("calls-{pid}.jsonl")))
        .into_iter()
        .map(|failed| failed.frames)
        .collect()
}

/// A line in a Python program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ErrorFrame {
    pub file: String,
    pub line: u64,
    pub name: String,
}

impl ErrorFrame {
    /// Returns the file name without folders, and the line.
    pub fn short(&self) -> String {
        let name = Path::new(&self.file)
            .file_name()
            .map_or(self.file.as_str().into(), |name| name.to_string_lossy());
        format!("{name}:{}", self.line)
    }
}
