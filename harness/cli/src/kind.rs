//! Recognizes files that belong to another command by their first bytes ([`of`]); the error names
//! that command.

use std::{io::Read, path::Path};

use harness_base::{packed, shell};
use harness_trace::{snapshot::RMM_LOG_HEADER, trace};

use super::error::CliError;

/// The inspected bytes of a file; enough for the comments before a trace.
const BEGINNING: u64 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An allocation trace: one operation per line.
    Trace,
    Recording,
    /// A file of Python's `pickle`, like PyTorch's memory snapshots.
    Pickle,
    /// A log of RMM's `logging_resource_adaptor`.
    RmmLog,
}

pub(crate) fn of(path: &Path) -> Option<Kind> {
    let mut bytes = Vec::new();
    // Only a regular file can be read twice; a pipe cannot.
    let file = path
        .metadata()
        .ok()?
        .is_file()
        .then(|| packed::open(path))?
        .ok()?;
    file.take(BEGINNING).read_to_end(&mut bytes).ok()?;
    kind(&bytes)
}

/// Pickles of protocol 2 and later begin with the opcode PROTO, 0x80
/// (<https://peps.python.org/pep-0307/>).
fn kind(beginning: &[u8]) -> Option<Kind> {
    if beginning.first() == Some(&0x80) {
        return Some(Kind::Pickle);
    }
    // The last line may end within a character.
    let text = String::from_utf8_lossy(beginning);
    if text.starts_with(RMM_LOG_HEADER) {
        return Some(Kind::RmmLog);
    }
    if text.starts_with('{') {
        return (text.contains("\"torch\"") && text.contains("\"conf\""))
            .then_some(Kind::Recording);
    }
    let first = text
        .lines()
        .find(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'))?;
    trace::parse_lines([first])
        .is_ok_and(|events| !events.is_empty())
        .then_some(Kind::Trace)
}

impl Kind {
    /// The error for this file in place of a file of the expected kind.
    pub(crate) fn instead_of(self, expected: &str, path: &Path) -> CliError {
        let shown = path.display().to_string();
        let file = shell::quoted(&shown);
        let (is, help) = match self {
            Self::Trace => (
                "an allocation trace",
                format!("replay it, as in `harness replay {file} --memory 80GiB`"),
            ),
            Self::RmmLog => (
                "an RMM log",
                format!("explain it, as in `harness explain {file} --memory 80GiB`"),
            ),
            Self::Recording => (
                "a recording of PyTorch's allocator",
                format!("compare it with its replay: `harness replay --verify {file}`"),
            ),
            Self::Pickle => (
                "a Python pickle, like PyTorch's memory snapshots",
                format!("explain it: `harness explain {file}`"),
            ),
        };
        CliError::input(format!("{shown}: this is {is}, not {expected}"), help)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_determine_the_kind() {
        for (beginning, expected) in [
            (b"# a trace\n\na 1 512 0\nf 1".as_slice(), Some(Kind::Trace)),
            (
                b"{\"torch\":\"2.11.0\",\"conf\":\"\",\"capacity\":1",
                Some(Kind::Recording),
            ),
            (b"\x80\x04\x95", Some(Kind::Pickle)),
            (
                b"Thread,Time,Action,Pointer,Size,Stream\n",
                Some(Kind::RmmLog),
            ),
            (b"about: x\nneeds: { memory: 1GiB }\n", None),
            (b"{ about: x, needs: { memory: 1GiB } }", None),
            (b"", None),
            (b"\xff\xfe", None),
        ] {
            assert_eq!(
                kind(beginning),
                expected,
                "{}",
                String::from_utf8_lossy(beginning)
            );
        }
    }
}
