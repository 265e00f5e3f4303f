//! Errors of reading a snapshot file.

use std::io;

use harness_allocator::units::Bytes;

#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// Another file format, recognized by its first bytes.
    #[error("is not a pickle but {looks_like}: {advice}")]
    NotPickle {
        looks_like: &'static str,
        advice: &'static str,
    },
    /// Reading the file in Python would call code that the file chooses: ` NAME`, or nothing if the
    /// opcode does not name it.
    #[error(
        "calls code at byte {offset} ({opcode}{name}), but a memory snapshot is plain data. If you \
         trust the file, load it in Python, convert it to \
         dictionaries, lists, numbers and strings, and pickle.dump the result"
    )]
    CallsCode {
        opcode: &'static str,
        name: String,
        offset: u64,
    },
    #[error("is truncated at byte {offset}: copy or record it again")]
    Truncated { offset: u64 },
    #[error("is damaged at byte {offset}: {what}. Copy or record it again")]
    Damaged { offset: u64, what: String },
    /// More than any recording needs, so small files cannot exhaust memory.
    #[error(
        "contains more than {limit} {what}, more than any recording needs. Record it again with \
         fewer events (max_entries of \
         torch.cuda.memory._record_memory_history)"
    )]
    TooLarge { what: &'static str, limit: u64 },
    /// A small file can describe more memory than the host has, through compression or shared
    /// objects.
    #[error(
        "takes more than {limit} of memory to read, more than any recording needs. Record it again \
         with fewer events (max_entries of \
         torch.cuda.memory._record_memory_history)"
    )]
    TooMuchMemory { limit: Bytes },
    #[error("line {line} of the RMM log is `{text}`: expected {expected}")]
    LogLine {
        line: u64,
        text: String,
        expected: &'static str,
    },
    #[error(
        "is a pickle, but not a memory snapshot: {what}. Use a file of \
         torch.cuda.memory._dump_snapshot(), or a pickled list of \
         torch.cuda.memory_snapshot()"
    )]
    NotSnapshot { what: String },
    /// A value that PyTorch does not write for this key, such as `segments[3].blocks[1].size`.
    #[error(
        "is not a valid memory snapshot: {path} should be {expected}, but is {found}. Use the \
         unchanged file of torch.cuda.memory._dump_snapshot()"
    )]
    WrongType {
        path: String,
        expected: &'static str,
        found: String,
    },
}

/// Guesses the format of a file that is not a pickle, with advice.
pub(super) fn not_pickle(first: &[u8]) -> SnapshotError {
    const KNOWN: [(&[u8], &str, &str); 8] = [
        (
            b"PK\x03\x04",
            "a zip file, as torch.save() writes it",
            "load it with torch.load() and pickle.dump() the result",
        ),
        (
            b"\x28\xb5\x2f\xfd",
            "a file packed by zstd",
            "unpack it first: zstd -d FILE",
        ),
        (
            b"BZh",
            "a file packed by bzip2",
            "unpack it first: bunzip2 FILE",
        ),
        (
            b"\xfd7zXZ",
            "a file packed by xz",
            "unpack it first: unxz FILE",
        ),
        (
            b"{",
            "probably JSON",
            "use the pickle that torch.cuda.memory._dump_snapshot() wrote",
        ),
        (
            b"[",
            "probably JSON",
            "use the pickle that torch.cuda.memory._dump_snapshot() wrote",
        ),
        (
            b"<",
            "probably a web page",
            "use the pickle that torch.cuda.memory._dump_snapshot() wrote, not its visualization",
        ),
        (
            b"version https://git-lfs",
            "a Git LFS pointer",
            "download the file: git lfs pull",
        ),
    ];
    let known = KNOWN.iter().find(|(magic, ..)| first.starts_with(magic));
    let is_text = first
        .iter()
        .all(|byte| matches!(byte, b'\t' | b'\n' | b'\r' | b' '..=b'~'));
    let (looks_like, advice) = match known {
        Some(&(_, looks_like, advice)) => (looks_like, advice),
        None if first.is_empty() => ("an empty file", "record it again"),
        None if is_text => (
            "text",
            "use the pickle that torch.cuda.memory._dump_snapshot() wrote",
        ),
        None => (
            "an unknown format",
            "use the pickle that torch.cuda.memory._dump_snapshot() wrote, plain or packed by gzip",
        ),
    };
    SnapshotError::NotPickle { looks_like, advice }
}
