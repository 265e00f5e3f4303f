//! What can be wrong with a file that should be a snapshot.

use std::io;

/// Why a file cannot be read as a memory snapshot. The caller names the file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum SnapshotError {
    /// Of the file system, or of gzip.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
    /// Something else, as its first bytes tell.
    #[error("is no pickle, but {looks_like}: {advice}")]
    NotPickle { looks_like: &'static str, advice: &'static str },
    /// Reading it would call code of the file's choice.
    #[error(
        "calls code at byte {offset} ({opcode}{name}): a memory snapshot is plain data. Only read it where you trust it: load it in Python, turn it into \
         dictionaries, lists, numbers and strings, and pickle.dump that"
    )]
    CallsCode {
        /// As Python's `pickletools` names it.
        opcode: &'static str,
        /// What would be called, where the opcode says it, with a space before it.
        name: String,
        offset: u64,
    },
    #[error("ends in the middle, at byte {offset}: copy it again, or have it written again")]
    Truncated { offset: u64 },
    #[error("is damaged at byte {offset}: {what}. Copy it again, or have it written again")]
    Damaged { offset: u64, what: String },
    /// More than any program records; so a small file cannot fill the memory.
    #[error(
        "holds more than {limit} {what}, which no recording needs. Have it written again, with fewer events (max_entries of \
         torch.cuda.memory._record_memory_history)"
    )]
    TooLarge { what: &'static str, limit: u64 },
    #[error("line {line} of the RMM log is `{text}`: expected {expected}")]
    LogLine {
        /// Counted from 1.
        line: u64,
        text: String,
        /// What would be accepted.
        expected: &'static str,
    },
    /// A pickle of something else.
    #[error(
        "is a pickle, but not of a memory snapshot: {what}. Expected is what torch.cuda.memory._dump_snapshot() writes, or the pickled list of \
         torch.cuda.memory_snapshot()"
    )]
    NotSnapshot { what: String },
    /// A key of the snapshot is not what PyTorch writes there.
    #[error(
        "is not a memory snapshot as PyTorch writes it: {path} should be {expected}, and is {found}. Give the file as torch.cuda.memory._dump_snapshot() wrote it"
    )]
    WrongType {
        /// Like `segments[3].blocks[1].size`.
        path: String,
        expected: &'static str,
        found: String,
    },
}

/// What a file looks like that is no pickle, and what to do with it.
pub(super) fn not_pickle(first: &[u8]) -> SnapshotError {
    const KNOWN: [(&[u8], &str, &str); 8] = [
        (b"PK\x03\x04", "a zip file, as torch.save() writes it", "load it with torch.load() and pickle.dump() the result"),
        (b"\x28\xb5\x2f\xfd", "a file packed by zstd", "unpack it first: zstd -d FILE"),
        (b"BZh", "a file packed by bzip2", "unpack it first: bunzip2 FILE"),
        (b"\xfd7zXZ", "a file packed by xz", "unpack it first: unxz FILE"),
        (b"{", "JSON, it seems", "give the pickle that torch.cuda.memory._dump_snapshot() wrote"),
        (b"[", "JSON, it seems", "give the pickle that torch.cuda.memory._dump_snapshot() wrote"),
        (b"<", "a web page, it seems", "give the pickle that torch.cuda.memory._dump_snapshot() wrote, not the page made of it"),
        (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file itself: git lfs pull"),
    ];
    let known = KNOWN.iter().find(|(magic, ..)| first.starts_with(magic));
    let is_text = first.iter().all(|byte| matches!(byte, b'\t' | b'\n' | b'\r' | b' '..=b'~'));
    let (looks_like, advice) = match known {
        Some(&(_, looks_like, advice)) => (looks_like, advice),
        None if first.is_empty() => ("an empty file", "have it written again"),
        None if is_text => ("text", "give the pickle that torch.cuda.memory._dump_snapshot() wrote"),
        None => ("something else", "give the pickle that torch.cuda.memory._dump_snapshot() wrote, as it is or packed by gzip"),
    };
    SnapshotError::NotPickle { looks_like, advice }
}
