//! Reads and writes files. A file is written to a temporary name and then renamed, so neither an
//! error nor a kill leaves half a file. Paths from the user may also name links, devices, and pipes
//! that this process has.
//! Errors of versioned documents say what to do.

use std::fs::{self, File, FileType};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, de::DeserializeOwned};

use crate::temporary;

pub use crate::temporary::PREFIX as TEMPORARY;

/// Largest document that is read, in bytes.
pub const MAX_DOCUMENT: u64 = 256 << 20;

/// A kind of document. Errors are worded with these texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocumentKind {
    name: &'static str,
    pub file_name: &'static str,
    writer: &'static str,
    elsewhere: &'static str,
}

impl DocumentKind {
    pub const RECORDS: Self = Self {
        name: "records",
        file_name: "records.json",
        writer: "harness run",
        elsewhere: "choose another place with `--report DIR`",
    };
    pub const BENCHMARK: Self = Self {
        name: "a benchmark run",
        file_name: "benchmark.json",
        writer: "harness bench",
        elsewhere: "choose another place",
    };
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(
        "cannot write to `{}`: {source}. Make it writable, or {}.",
        path.display(),
        document.elsewhere,
    )]
    Unwritable {
        path: PathBuf,
        source: io::Error,
        document: DocumentKind,
    },
    #[error(
        "cannot write to `{}`: the disk is full ({source}). Free some space, or {}.",
        path.display(),
        document.elsewhere,
    )]
    DiskFull {
        path: PathBuf,
        source: io::Error,
        document: DocumentKind,
    },
    /// A file of this name exists, but the folder is not a report of the harness.
    #[error(
        "`{}` already exists and was not written by `{}`: move it, or {}.",
        path.display(),
        document.writer,
        document.elsewhere,
    )]
    Foreign {
        path: PathBuf,
        document: DocumentKind,
    },
    #[error(
        "`{}` is being written by another `{}`: wait until it ends, or {}.",
        path.display(),
        document.writer,
        document.elsewhere,
    )]
    Busy {
        path: PathBuf,
        document: DocumentKind,
    },
    #[error("cannot read `{}`: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("`{}` is cut off at line {line}: it ends in the middle of a record. Copy it again, or \
         run again.", path.display())]
    Truncated { path: PathBuf, line: usize },
    #[error("`{}` has version {found}, this harness reads up to version {supported}: use the \
         harness that wrote it, or a newer one.", path.display())]
    TooNew {
        path: PathBuf,
        found: u32,
        supported: u32,
    },
    #[error(
        "`{}` does not hold {}: {source}. Name a `{}` that `{}` wrote, or its folder.",
        path.display(),
        document.name,
        document.file_name,
        document.writer,
    )]
    Malformed {
        path: PathBuf,
        source: serde_json::Error,
        document: DocumentKind,
    },
}

impl StoreError {
    /// Returns whether the input is at fault, rather than the output location.
    pub const fn is_of_input(&self) -> bool {
        !matches!(self, Self::Unwritable { .. } | Self::DiskFull { .. })
    }

    pub fn writing(document: DocumentKind, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Self::DiskFull {
                path,
                source,
                document,
            },
            _ => Self::Unwritable {
                path,
                source,
                document,
            },
        }
    }
}

/// Checks before a long run that files can be written to this folder. Creates nothing.
pub fn check_writable(folder: &Path, document: DocumentKind) -> Result<(), StoreError> {
    let failed = |source| StoreError::writing(document, folder, source);
    let there = folder
        .ancestors()
        .find(|path| path.exists())
        .unwrap_or(Path::new("."));
    if !there.is_dir() {
        return Err(failed(ErrorKind::NotADirectory.into()));
    }
    temporary::file_in(there).map(drop).map_err(failed)
}

/// Checks that the user's output file can be written. Creates nothing and keeps an existing file.
pub fn check_place(file: &Path) -> io::Result<()> {
    let Output::File(target) = Output::at(file)? else {
        return Ok(());
    };
    let there = folder_of(&target).ancestors().map(|path| {
        if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        }
    });
    match there.into_iter().find(|path| path.exists()) {
        Some(folder) if !folder.is_dir() => Err(ErrorKind::NotADirectory.into()),
        folder => temporary::file_in(folder.unwrap_or(Path::new(".")))
            .map(drop)
            .map_err(|error| io::Error::from(error.kind())),
    }
}

/// Refuses to overwrite a report that the harness did not write: `report` exists, but `beside` does
/// not.
pub fn check_ours(
    folder: &Path,
    report: &str,
    beside: &str,
    document: DocumentKind,
) -> Result<(), StoreError> {
    let path = folder.join(report);
    let is_ours = !path.exists() || folder.join(beside).exists();
    if is_ours {
        Ok(())
    } else {
        Err(StoreError::Foreign { path, document })
    }
}

/// A folder that only this process writes to. Opening it removes temporary files of killed
/// processes. File systems without locks skip both.
#[derive(Debug)]
pub struct Folder<'a> {
    path: &'a Path,
    document: DocumentKind,
    _only_writer: File,
}

impl<'a> Folder<'a> {
    /// Creates the folder if needed, and waits until no other process writes to it.
    pub fn open(path: &'a Path, document: DocumentKind) -> Result<Self, StoreError> {
        let failed = |source| StoreError::writing(document, path, source);
        make_folder(path).map_err(failed)?;
        let only_writer = File::open(path).map_err(failed)?;
        // Without locks nothing is removed, and each file is still written whole.
        if only_writer.lock().is_ok() {
            temporary::tidy(path);
        }
        Ok(Self {
            path,
            document,
            _only_writer: only_writer,
        })
    }

    /// Writes files, given by name and content, into a new folder within this one. The folder
    /// appears only when every file is written. `name` then returns its name.
    pub fn add(
        &self,
        files: &[(String, String)],
        name: impl FnOnce(&Path) -> io::Result<String>,
    ) -> Result<PathBuf, StoreError> {
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
        // The folder has its final name, so the temporary owner must not delete it.
        let _ = folder.keep();
        sync_folder(self.path).map_err(failed)?;
        Ok(place)
    }

    /// Writes files into this folder or its subfolders and replaces earlier ones. Nothing is
    /// replaced until all files are written; then each file is replaced whole, in the given order.
    pub fn replace(&self, files: &[(String, String)]) -> Result<(), StoreError> {
        let mut written = Vec::new();
        for (name, content) in files {
            let target = self.path.join(name);
            let failed = |source| self.failed(&target, source);
            let file = temporary::locked_file_in(self.path).map_err(failed)?;
            write_whole(file.as_file(), content).map_err(failed)?;
            written.push((file, target));
        }
        // Renaming a file onto a folder would fail after other files were replaced.
        if let Some((_, target)) = written.iter().find(|(_, target)| target.is_dir()) {
            return Err(self.failed(target, ErrorKind::IsADirectory.into()));
        }
        for (file, target) in written {
            file.persist(&target)
                .map_err(|error| self.failed(&target, error.error))?;
        }
        sync_folder(self.path).map_err(|source| self.failed(self.path, source))
    }

    fn failed(&self, path: &Path, source: io::Error) -> StoreError {
        StoreError::writing(self.document, path, source)
    }
}

/// Reads a document from a file or the folder that contains it. The document states its version,
/// for example `"version": 1`.
pub fn read<T: DeserializeOwned>(
    path: &Path,
    document: DocumentKind,
    supported: u32,
) -> Result<T, StoreError> {
    #[derive(Deserialize)]
    struct Head {
        version: u32,
    }
    let path = if path.is_dir() {
        path.join(document.file_name)
    } else {
        path.to_owned()
    };
    let text = read_to_string(&path).map_err(|source| StoreError::Unreadable {
        path: path.clone(),
        source,
    })?;
    let malformed = |source: serde_json::Error| match source.is_eof() {
        true => StoreError::Truncated {
            path: path.clone(),
            line: source.line(),
        },
        false => StoreError::Malformed {
            path: path.clone(),
            source,
            document,
        },
    };
    // The version is read first, because a later version may change the meaning of other fields.
    let Head { version } = serde_json::from_str(&text).map_err(malformed)?;
    if version > supported {
        return Err(StoreError::TooNew {
            path,
            found: version,
            supported,
        });
    }
    serde_json::from_str(&text).map_err(malformed)
}

/// Opens an input file that the user names or that a folder contains. Fails without waiting for a
/// named pipe, a device or a socket: reading one may never end. Pipes that this process already has
/// are accepted, such as `/dev/stdin`.
pub fn open(path: &Path) -> io::Result<File> {
    let kind = path.metadata()?.file_type();
    if kind.is_file() || (kind.is_fifo() && names_open_file(path)) {
        return File::open(path);
    }
    Err(refusal(kind))
}

/// The error of a path that names something else than a file.
fn refusal(kind: FileType) -> io::Error {
    let other = match () {
        () if kind.is_dir() => return ErrorKind::IsADirectory.into(),
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    };
    io::Error::new(
        ErrorKind::InvalidInput,
        format!("this is {other}, not a file"),
    )
}

/// Returns whether a path below the system's folders names a file that is already open. `/dev/shm`
/// has ordinary files.
fn names_open_file(path: &Path) -> bool {
    path.starts_with("/proc") || (path.starts_with("/dev") && !path.starts_with("/dev/shm"))
}

/// Like [`std::fs::read_to_string`], with the checks of [`open`] and a limit, [`MAX_DOCUMENT`]. The
/// limit applies during reading, because a pipe has no length.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open(path)?
        .take(MAX_DOCUMENT + 1)
        .read_to_string(&mut text)?;
    if text.len() as u64 > MAX_DOCUMENT {
        return Err(io::Error::new(
            ErrorKind::FileTooLarge,
            format!("it is larger than the limit of {MAX_DOCUMENT} bytes"),
        ));
    }
    Ok(text)
}

enum Output {
    /// A device, or an open file or pipe such as `/dev/stdout`.
    Stream(File),
    /// A file, which need not exist. Links are resolved.
    File(PathBuf),
}

impl Output {
    fn at(path: &Path) -> io::Result<Self> {
        let target = followed(path);
        let Some(kind) = kind_of_output(path)? else {
            return Ok(Self::File(target));
        };
        // Replacing an open file would detach it.
        if kind.is_file() && !names_open_file(&target) {
            return Ok(Self::File(target));
        }
        File::options().append(true).open(path).map(Self::Stream)
    }
}

/// Returns the kind of what an output's path names, or `None` if there is nothing yet. Fails for a
/// folder, and for a named pipe or a socket, which another process may never open. Those that this
/// process already has are accepted, such as `/dev/stdout`.
fn kind_of_output(path: &Path) -> io::Result<Option<FileType>> {
    let Ok(there) = path.metadata() else {
        return Ok(None);
    };
    let kind = there.file_type();
    let waits = kind.is_fifo() || kind.is_socket();
    if kind.is_dir() || (waits && !names_open_file(&followed(path))) {
        return Err(refusal(kind));
    }
    Ok(Some(kind))
}

/// Checks that the user's output path names a file, nothing yet, or a device or pipe that takes
/// bytes without waiting. Opens nothing.
pub fn check_output(path: &Path) -> io::Result<()> {
    kind_of_output(path).map(drop)
}

/// Opens a file for appending and reading, and creates it if there is none. Fails without waiting
/// for a named pipe.
pub fn open_to_append(path: &Path) -> io::Result<File> {
    check_output(path)?;
    File::options()
        .read(true)
        .append(true)
        .create(true)
        .open(path)
}

/// Follows links up to a path that names an open file, such as `/dev/stdout`.
fn followed(path: &Path) -> PathBuf {
    /// The limit of Linux (<https://man7.org/linux/man-pages/man7/path_resolution.7.html>).
    const MOST_LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match fs::read_link(&path) {
            Ok(target) if !names_open_file(&path) => path = folder_of(&path).join(target),
            _ => break,
        }
    }
    path
}

fn folder_of(path: &Path) -> &Path {
    path.parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."))
}

/// Writes the user's output file. Creates its folder, follows links, and replaces a file whole.
/// Pipes and devices receive the bytes directly. Fails with the system's error; an earlier file is
/// then unchanged.
pub fn write(path: &Path, content: impl AsRef<[u8]>) -> io::Result<()> {
    if path.metadata().is_err() {
        make_folder(folder_of(&followed(path)))?;
    }
    write_by(path, |file| {
        file.write_all(content.as_ref())
            .map(Ok::<_, std::convert::Infallible>)
    })
    .map(|_| ())
}

/// Like [`write()`], with incremental output into an existing folder. The file is replaced only if
/// `write` returns `Ok(Ok(…))`. Fails with the error of the system or of `write`; an earlier file
/// is then unchanged.
pub fn write_by<T, E>(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<Result<T, E>>,
) -> io::Result<Result<T, E>> {
    let target = match Output::at(path)? {
        Output::Stream(mut stream) => return write(&mut stream),
        Output::File(target) => target,
    };
    let folder = folder_of(&target);
    folder.metadata()?;
    // The original error names the temporary file, which the user does not know.
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

/// The state of a file before text is appended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Existing {
    /// In bytes; 0 for a pipe or a device.
    pub length: u64,
    /// `true` if the file is empty or ends with an empty line.
    pub ends_with_empty_line: bool,
}

/// Appends to the user's output file. Creates the file and its folder, and follows links. Pipes and
/// devices receive the bytes directly. Fails with the system's error; the file is then unchanged.
pub fn append(path: &Path, content: impl FnOnce(Existing) -> String) -> io::Result<()> {
    let target = match Output::at(path)? {
        Output::Stream(mut stream) => {
            let content = content(Existing {
                length: 0,
                ends_with_empty_line: true,
            });
            return stream.write_all(content.as_bytes());
        }
        Output::File(target) => target,
    };
    make_folder(folder_of(&target))?;
    let mut file = open_to_append(&target)?;
    let length = file.metadata()?.len();
    let mut end = [b'\n'; 2];
    if length >= 2 {
        file.seek(SeekFrom::End(-2))?;
        file.read_exact(&mut end)?;
    }
    let existing = Existing {
        length,
        ends_with_empty_line: length == 0 || (length >= 2 && end == *b"\n\n"),
    };
    let added = file
        .write_all(content(existing).as_bytes())
        .and_then(|()| file.sync_all());
    if added.is_err() {
        // Removes a partial write. If that fails too, the first error is reported.
        let _ = file.set_len(length);
    }
    added
}

/// Converts a text to a part of a link or file name: lower-case letters, digits, `_` and `-`. The
/// result has 1 to 60 characters.
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
    if trimmed.is_empty() {
        "unnamed".to_owned()
    } else {
        trimmed.to_owned()
    }
}

fn make_folder(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path).map_err(|error| match error.kind() {
        // The path exists but is not a folder.
        ErrorKind::AlreadyExists => ErrorKind::NotADirectory.into(),
        _ => error,
    })
}

fn write_whole(mut file: &File, content: &str) -> io::Result<()> {
    file.write_all(content.as_bytes())?;
    file.sync_all()
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        // Some file systems cannot sync folders; the files themselves are synced.
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::InvalidInput | ErrorKind::Unsupported
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests;
