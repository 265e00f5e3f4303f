//! Files written whole or not at all: to a temporary place first, then renamed, so that neither an error nor a kill leaves half a file;
//! files that the user names, which may also be devices, pipes or links; and versioned documents read back, each failure with what to do. What
//! is in the files is the business of those who call.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tempfile::NamedTempFile;

use crate::temporary;

pub use crate::temporary::PREFIX as TEMPORARY;

/// Largest document that is read, in bytes.
pub const MAX_DOCUMENT: u64 = 256 << 20;

/// What a file is to hold: the words of its errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Document {
    /// What `harness run` leaves behind.
    Records,
    /// What `harness bench` leaves behind.
    Benchmark,
}

impl Document {
    /// The name of its file.
    #[must_use]
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Records => "records.json",
            Self::Benchmark => "benchmark.json",
        }
    }

    const fn writer(self) -> &'static str {
        match self {
            Self::Records => "harness run",
            Self::Benchmark => "harness bench",
        }
    }

    /// How the user names another place.
    const fn elsewhere(self) -> &'static str {
        match self {
            Self::Records => "choose another place with `--report DIR`",
            Self::Benchmark => "choose another place",
        }
    }
}

impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Records => "records",
            Self::Benchmark => "a benchmark run",
        })
    }
}

/// Why a document could not be written or read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum StoreError {
    /// The place refuses files. Choose another place or change its rights.
    #[error("cannot write to `{}`: {source}. Make it writable, or {}.", path.display(), document.elsewhere())]
    Unwritable {
        /// What was to be written.
        path: PathBuf,
        /// Why it was not.
        source: io::Error,
        /// What it was to hold.
        document: Document,
    },
    /// No room. Free some, or choose another disk.
    #[error("cannot write to `{}`: the disk is full ({source}). Free some space, or {}.", path.display(), document.elsewhere())]
    DiskFull {
        /// What was to be written.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
        /// What it was to hold.
        document: Document,
    },
    /// A file of that name is there, and nothing beside it says that it is a report of ours. Choose another place, or move the file away.
    #[error("`{}` is there already, and not from `{}`: move it away, or {}.", path.display(), document.writer(), document.elsewhere())]
    Foreign {
        path: PathBuf,
        /// What was to be written there.
        document: Document,
    },
    /// Another process writes there now. Wait for it, or choose another place.
    #[error("`{}` is being written by another `{}`: wait until it ends, or {}.", path.display(), document.writer(), document.elsewhere())]
    Busy {
        path: PathBuf,
        /// What was to be written there.
        document: Document,
    },
    /// The file could not be read. Check the path and its rights.
    #[error("cannot read `{}`: {source}", path.display())]
    Unreadable {
        /// What was to be read.
        path: PathBuf,
        /// Why it was not.
        source: io::Error,
    },
    /// The file stops in the middle. Copy it again, or run again.
    #[error("`{}` is cut off at line {line}: it ends in the middle of a record. Copy it again, or run again.", path.display())]
    Truncated {
        path: PathBuf,
        /// Its last line, counted from 1.
        line: usize,
    },
    /// The file was written by a later harness. Use that one.
    #[error("`{}` has version {found}, this harness reads up to version {supported}: use the harness that wrote it, or a newer one.", path.display())]
    TooNew {
        path: PathBuf,
        found: u32,
        /// The version of this build.
        supported: u32,
    },
    /// The file is something else, or damaged. Name one that the harness wrote, or the folder that holds it.
    #[error("`{}` does not hold {document}: {source}. Name a `{}` that `{}` wrote, or its folder.", path.display(), document.file_name(), document.writer())]
    Malformed {
        path: PathBuf,
        source: serde_json::Error,
        /// What it was to hold.
        document: Document,
    },
}

impl StoreError {
    /// Whether what was given to read is to blame.
    #[must_use]
    pub const fn is_of_input(&self) -> bool {
        match self {
            Self::Unreadable { .. } | Self::Truncated { .. } | Self::TooNew { .. } | Self::Malformed { .. } => true,
            Self::Foreign { .. } | Self::Busy { .. } => true,
            Self::Unwritable { .. } | Self::DiskFull { .. } => false,
        }
    }

    /// That something could not be written, for this reason.
    #[must_use]
    pub fn writing(document: Document, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::DiskFull { path, source, document },
            _ => Self::Unwritable { path, source, document },
        }
    }
}

/// Tells before long work what would be told behind it: that nothing can be written to this folder. It is not made, and nothing stays in it.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`].
pub fn check_writable(folder: &Path, document: Document) -> Result<(), StoreError> {
    let failed = |source| StoreError::writing(document, folder, source);
    let there = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    if !there.is_dir() {
        return Err(failed(ErrorKind::NotADirectory.into()));
    }
    temporary::file_in(there).map(drop).map_err(failed)
}

/// The same for a file that the user names: that it cannot be written. Nothing is made, and an earlier file stays as it is.
///
/// # Errors
/// What the system says.
pub fn check_place(file: &Path) -> io::Result<()> {
    let Place::File(target) = Place::of(file)? else { return Ok(()) };
    let there = folder_of(&target).ancestors().map(|path| if path.as_os_str().is_empty() { Path::new(".") } else { path });
    match there.into_iter().find(|path| path.exists()) {
        Some(folder) if !folder.is_dir() => Err(ErrorKind::NotADirectory.into()),
        folder => temporary::file_in(folder.unwrap_or(Path::new("."))).map(drop).map_err(|error| io::Error::from(error.kind())),
    }
}

/// Refuses to write over a report that somebody else wrote: one that has no document of ours beside it, or, of an index, no folder.
///
/// # Errors
/// [`StoreError::Foreign`].
pub fn check_ours(folder: &Path, report: &str, beside: &str, document: Document) -> Result<(), StoreError> {
    let path = folder.join(report);
    let is_ours = !path.exists() || folder.join(beside).exists();
    if is_ours { Ok(()) } else { Err(StoreError::Foreign { path, document }) }
}

/// A folder that nobody else writes to through this module until it is dropped, cleared of what killed processes left there. On file
/// systems without locks, nothing is waited for and nothing removed.
#[derive(Debug)]
pub struct Folder<'a> {
    path: &'a Path,
    document: Document,
    _only_writer: File,
}

impl<'a> Folder<'a> {
    /// Makes the folder if it is not there, and waits until no other process writes to it.
    pub fn open(path: &'a Path, document: Document) -> Result<Self, StoreError> {
        let failed = |source| StoreError::writing(document, path, source);
        make_folder(path).map_err(failed)?;
        let only_writer = lock(path).map_err(failed)?;
        Ok(Self { path, document, _only_writer: only_writer })
    }

    /// Writes files, by name and content, into a new folder in this one, which appears whole or not at all under the name that `name`
    /// chooses last of all.
    pub fn add(&self, files: &[(String, String)], name: impl FnOnce(&Path) -> io::Result<String>) -> Result<PathBuf, StoreError> {
        let failed = |source| self.failed(self.path, source);
        let (folder, _held) = temporary::folder_in(self.path).map_err(failed)?;
        for (name, content) in files {
            let path = folder.path().join(name);
            File::create_new(&path)
                .and_then(|file| write_whole(&file, content))
                .map_err(|source| self.failed(&self.path.join(name), source))?;
        }
        sync_folder(folder.path()).map_err(failed)?;
        let place = self.path.join(name(self.path).map_err(failed)?);
        fs::rename(folder.path(), &place).map_err(failed)?;
        // It has another name now, and its owner has nothing left to remove.
        let _ = folder.keep();
        sync_folder(self.path).map_err(failed)?;
        Ok(place)
    }

    /// Writes files into this folder, or into folders in it, in place of earlier ones. Nothing is replaced before everything is written,
    /// then each file is replaced whole, in the order given.
    pub fn replace(&self, files: &[(String, String)]) -> Result<(), StoreError> {
        let mut written = Vec::new();
        for (name, content) in files {
            let target = self.path.join(name);
            let failed = |source| self.failed(&target, source);
            let file = temporary::locked_file_in(self.path).map_err(failed)?;
            write_whole(file.as_file(), content).map_err(failed)?;
            written.push((file, target));
        }
        self.refuse_folders(&written)?;
        for (file, target) in written {
            file.persist(&target).map_err(|error| self.failed(&target, error.error))?;
        }
        sync_folder(self.path).map_err(|source| self.failed(self.path, source))
    }

    /// Renaming onto a folder would fail half-way, after other files were replaced.
    fn refuse_folders(&self, written: &[(NamedTempFile, PathBuf)]) -> Result<(), StoreError> {
        match written.iter().find(|(_, target)| target.is_dir()) {
            Some((_, target)) => Err(self.failed(target, ErrorKind::IsADirectory.into())),
            None => Ok(()),
        }
    }

    fn failed(&self, path: &Path, source: io::Error) -> StoreError {
        StoreError::writing(self.document, path, source)
    }
}

/// Reads a document back, from the file or from the folder that holds it. It states its version, as `"version": 1`.
pub fn read<T: DeserializeOwned>(path: &Path, document: Document, supported: u32) -> Result<T, StoreError> {
    #[derive(Deserialize)]
    struct Head {
        version: u32,
    }
    let path = if path.is_dir() { path.join(document.file_name()) } else { path.to_owned() };
    let text = read_bounded(&path).map_err(|source| StoreError::Unreadable { path: path.clone(), source })?;
    let malformed = |source: serde_json::Error| match source.is_eof() {
        true => StoreError::Truncated { path: path.clone(), line: source.line() },
        false => StoreError::Malformed { path: path.clone(), source, document },
    };
    // The version first: a later version may mean something else by the rest.
    let Head { version } = serde_json::from_str(&text).map_err(malformed)?;
    if version > supported {
        return Err(StoreError::TooNew { path, found: version, supported });
    }
    serde_json::from_str(&text).map_err(malformed)
}

/// Bounded while it is read: a pipe or a device has no length beforehand.
fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_DOCUMENT + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_DOCUMENT {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("it has more than {MAX_DOCUMENT} bytes, which no document has")));
    }
    Ok(text)
}

/// Where a path leads that the user named for output.
#[derive(Debug)]
enum Place {
    /// Something that bytes are sent to: a pipe, a device, or a file that this process holds open, as `/dev/stdout` can be.
    Sink(File),
    /// A file, or where one is to be. Links are followed.
    File(PathBuf),
}

impl Place {
    fn of(path: &Path) -> io::Result<Self> {
        let is_sink = match path.metadata() {
            Ok(there) if there.is_dir() => return Err(ErrorKind::IsADirectory.into()),
            // A file below these is open already, by another name: to replace it would cut that name off.
            Ok(there) => !there.is_file() || path.starts_with("/dev") || path.starts_with("/proc"),
            Err(_) => false,
        };
        if is_sink {
            return File::options().append(true).open(path).map(Self::Sink);
        }
        Ok(Self::File(followed(path)))
    }
}

/// The path behind links, also where what they lead to is not there yet.
fn followed(path: &Path) -> PathBuf {
    /// As many as Linux follows (<https://man7.org/linux/man-pages/man7/path_resolution.7.html>).
    const MOST_LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&path) {
            Ok(target) => path = folder_of(&path).join(target),
            Err(_) => break,
        }
    }
    path
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Writes a file that the user named. A file is replaced whole, and its folder made if it is not there; links are followed; a pipe or a device
/// is written to.
///
/// # Errors
/// What the system says; an earlier file is intact then.
pub fn write(path: &Path, content: &str) -> io::Result<()> {
    if path.metadata().is_err() {
        make_folder(folder_of(&followed(path)))?;
    }
    write_by(path, |file| file.write_all(content.as_bytes()).map(Ok::<_, std::convert::Infallible>)).map(|_| ())
}

/// The same with content that is written bit by bit, into a folder that is there. A file is replaced only where everything was written and `write` says `Ok(Ok(…))`.
///
/// # Errors
/// What the system or `write` says; an earlier file is intact then.
pub fn write_by<T, E>(path: &Path, write: impl FnOnce(&mut File) -> io::Result<Result<T, E>>) -> io::Result<Result<T, E>> {
    let target = match Place::of(path)? {
        Place::Sink(mut sink) => return write(&mut sink),
        Place::File(target) => target,
    };
    let folder = folder_of(&target);
    folder.metadata()?;
    // The error's own text names the temporary file, which says nothing to the user.
    let mut file = temporary::file_in(folder).map_err(|error| io::Error::from(error.kind()))?;
    let written = match write(file.as_file_mut())? {
        Ok(written) => written,
        Err(error) => return Ok(Err(error)),
    };
    file.as_file().sync_all()?;
    file.persist(&target).map_err(|error| error.error)?;
    sync_folder(folder)?;
    Ok(Ok(written))
}

/// What stands in a file that is added to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Existing {
    /// In bytes; 0 for a pipe or a device, which is not read.
    pub length: u64,
    /// Whether an empty line ends it, or nothing is there.
    pub ends_with_empty_line: bool,
}

/// Adds to the end of a file that the user named, and makes it and its folder if they are not there; links are followed; a pipe or a device is
/// written to.
///
/// # Errors
/// What the system says; a file is as it was then.
pub fn append(path: &Path, content: impl FnOnce(Existing) -> String) -> io::Result<()> {
    let target = match Place::of(path)? {
        Place::Sink(mut sink) => {
            let content = content(Existing { length: 0, ends_with_empty_line: true });
            return sink.write_all(content.as_bytes());
        }
        Place::File(target) => target,
    };
    make_folder(folder_of(&target))?;
    let mut file = File::options().read(true).append(true).create(true).open(&target)?;
    let length = file.metadata()?.len();
    let mut end = [b'\n'; 2];
    if length >= 2 {
        file.seek(SeekFrom::End(-2))?;
        file.read_exact(&mut end)?;
    }
    let existing = Existing { length, ends_with_empty_line: length == 0 || (length >= 2 && end == *b"\n\n") };
    let added = file.write_all(content(existing).as_bytes()).and_then(|()| file.sync_all());
    if added.is_err() {
        // Half of it helps nobody. Where not even this can be done, the first error says why.
        let _ = file.set_len(length);
    }
    added
}

/// A text as part of a link or a file name: lower-case letters, digits, `_` and `-`; never empty, at most 60 long.
#[must_use]
pub fn slug(text: &str) -> String {
    let mut slug = String::new();
    for c in text.chars().map(|c| c.to_ascii_lowercase()) {
        match c {
            'a'..='z' | '0'..='9' | '_' => slug.push(c),
            _ if slug.is_empty() || slug.ends_with('-') => {}
            _ => slug.push('-'),
        }
    }
    slug.truncate(60);
    let trimmed = slug.trim_end_matches('-');
    if trimmed.is_empty() { "unnamed".to_owned() } else { trimmed.to_owned() }
}

fn make_folder(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path).map_err(|error| match error.kind() {
        // What exists and is no folder.
        ErrorKind::AlreadyExists => ErrorKind::NotADirectory.into(),
        _ => error,
    })
}

/// The lock ends with the returned file.
fn lock(folder: &Path) -> io::Result<File> {
    let file = File::open(folder)?;
    // Where the file system has no locks, nothing is removed, and what each writes is whole all the same.
    if file.lock().is_ok() {
        temporary::tidy(folder);
    }
    Ok(file)
}

fn write_whole(mut file: &File, content: &str) -> io::Result<()> {
    file.write_all(content.as_bytes())?;
    file.sync_all()
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        // Some file systems do not sync folders; the files themselves are on disk.
        Err(error) if matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_from_other_failures() {
        // A device that takes no byte stands for the full disk.
        let full = || File::options().write(true).open("/dev/full").and_then(|file| write_whole(&file, "report"));
        let told = |document| StoreError::writing(document, Path::new("reports/runs"), full().expect_err("it takes no byte"));
        assert!(matches!(told(Document::Records), StoreError::DiskFull { .. }));
        insta::assert_snapshot!(told(Document::Records), @"cannot write to `reports/runs`: the disk is full (No space left on device (os error 28)). Free some space, or choose another place with `--report DIR`.");
        insta::assert_snapshot!(told(Document::Benchmark), @"cannot write to `reports/runs`: the disk is full (No space left on device (os error 28)). Free some space, or choose another place.");
    }

    #[test]
    fn pipes_and_devices_are_written_to_and_links_are_followed() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let [real, link, dangling, made] = ["real", "link", "dangling", "made"].map(|name| folder.path().join(name));
        fs::write(&real, "before")?;
        std::os::unix::fs::symlink("real", &link)?;
        std::os::unix::fs::symlink("made", &dangling)?;
        write(&link, "after")?;
        write(&dangling, "new")?;
        assert_eq!((fs::read_to_string(&real)?, fs::read_to_string(&made)?), ("after".to_owned(), "new".to_owned()));
        assert!(link.is_symlink() && dangling.is_symlink());
        write(Path::new("/dev/null"), "nothing")?;
        append(Path::new("/dev/null"), |existing| format!("{existing:?}"))?;
        assert!(!Path::new("/dev/null").metadata()?.is_file());
        for full in [write(Path::new("/dev/full"), "x"), append(Path::new("/dev/full"), |_| "x".to_owned())] {
            assert_eq!(full.expect_err("it takes no byte").kind(), ErrorKind::StorageFull);
        }
        assert_eq!(write(folder.path(), "x").expect_err("it is a folder").kind(), ErrorKind::IsADirectory);
        Ok(())
    }

    #[test]
    fn what_is_added_knows_what_stands_before_it() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("new/summary.md");
        let mut seen = Vec::new();
        for text in ["# One\n", "\n", "# Two"] {
            append(&path, |existing| {
                seen.push((existing.length, existing.ends_with_empty_line));
                text.to_owned()
            })?;
        }
        assert_eq!((seen, fs::read_to_string(&path)?), (vec![(0, true), (6, false), (7, true)], "# One\n\n# Two".to_owned()));
        Ok(())
    }

    #[test]
    fn a_document_without_end_is_refused() {
        let error = read::<serde_json::Value>(Path::new("/dev/zero"), Document::Benchmark, 1).expect_err("it has no end");
        insta::assert_snapshot!(error, @"cannot read `/dev/zero`: it has more than 268435456 bytes, which no document has");
    }

    #[test]
    fn a_temporary_file_in_use_is_not_taken_for_one_that_a_killed_process_left() {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let left = folder.path().join(format!("{TEMPORARY}left"));
        let used = temporary::file_in(folder.path()).expect("it can be made");
        fs::write(&left, "half").expect("it can be written");
        Folder::open(folder.path(), Document::Records).expect("it can be opened");
        assert_eq!((left.exists(), used.path().exists()), (false, true));
    }

    #[test]
    fn slugs_are_safe_for_files_and_links() {
        for (text, expected) in
            [("NVIDIA H200", "nvidia-h200"), ("oom_retry", "oom_retry"), ("../../etc", "etc"), ("µ", "unnamed"), ("a--b-", "a-b")]
        {
            assert_eq!(slug(text), expected);
        }
        assert_eq!(slug(&"x".repeat(500)).len(), 60);
    }
}
