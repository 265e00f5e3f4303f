//! What a file is that a command cannot use, judged by how it begins: [`of`]. The answer names the command that can.

use std::io::Read;
use std::path::Path;

use harness_base::{packed, shell};
use harness_trace::snapshot::RMM_LOG_HEADER;
use harness_trace::trace;

use super::error::CliError;

/// How much of a file is looked at: enough for the comments in front of a trace.
const BEGINNING: u64 = 4096;

/// A kind of file that some command takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// One operation a line.
    Trace,
    /// A run of PyTorch's allocator: settings, operations and statistics.
    Recording,
    /// What Python's `pickle` writes, as PyTorch's memory snapshots are.
    Pickle,
    /// What RMM's `logging_resource_adaptor` writes.
    RmmLog,
}

/// The kind of this file; `None` where it cannot be read or is none of them.
pub(crate) fn of(path: &Path) -> Option<Kind> {
    let mut bytes = Vec::new();
    // Only a file: what is read of a pipe is gone for the command that comes after.
    let file = path.metadata().ok()?.is_file().then(|| packed::open(path))?.ok()?;
    file.take(BEGINNING).read_to_end(&mut bytes).ok()?;
    kind(&bytes)
}

/// Pickles of protocol 2 and later begin with the opcode PROTO, 0x80 (<https://peps.python.org/pep-0307/>).
fn kind(beginning: &[u8]) -> Option<Kind> {
    if beginning.first() == Some(&0x80) {
        return Some(Kind::Pickle);
    }
    // The last line may be cut off in the middle of a character.
    let text = String::from_utf8_lossy(beginning);
    if text.starts_with(RMM_LOG_HEADER) {
        return Some(Kind::RmmLog);
    }
    if text.starts_with('{') {
        return (text.contains("\"torch\"") && text.contains("\"conf\"")).then_some(Kind::Recording);
    }
    let first = text.lines().find(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'))?;
    trace::parse_lines([first]).is_ok_and(|events| !events.is_empty()).then_some(Kind::Trace)
}

impl Kind {
    /// That this file was given where a file of another kind is wanted.
    pub(crate) fn instead_of(self, wanted: &str, path: &Path) -> CliError {
        let shown = path.display().to_string();
        let file = shell::quoted(&shown);
        let (is, help) = match self {
            Self::Trace => ("an allocation trace", format!("replay it, as in `harness replay {file} --memory 80GiB`")),
            Self::RmmLog => ("a log of RMM", format!("explain it, as in `harness explain {file} --memory 80GiB`")),
            Self::Recording => ("a recording of PyTorch's allocator", format!("compare it by `harness replay --verify {file}`")),
            Self::Pickle => ("a Python pickle, as PyTorch's memory snapshots are", format!("explain it by `harness explain {file}`")),
        };
        CliError::input(format!("{shown}: this is {is}, not {wanted}"), help)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_by_its_beginning() {
        for (beginning, expected) in [
            (b"# a trace\n\na 1 512 0\nf 1".as_slice(), Some(Kind::Trace)),
            (b"{\"torch\":\"2.11.0\",\"conf\":\"\",\"capacity\":1", Some(Kind::Recording)),
            (b"\x80\x04\x95", Some(Kind::Pickle)),
            (b"Thread,Time,Action,Pointer,Size,Stream\n", Some(Kind::RmmLog)),
            (b"about: x\nneeds: { memory: 1GiB }\n", None),
            (b"{ about: x, needs: { memory: 1GiB } }", None),
            (b"", None),
            (b"\xff\xfe", None),
        ] {
            assert_eq!(kind(beginning), expected, "{}", String::from_utf8_lossy(beginning));
        }
    }
}
