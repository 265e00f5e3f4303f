//! The snapshots that can be analysed: [`Sources`]. A file or folder that cannot be read is a row
//! with the reason.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{panic, time::UNIX_EPOCH};

use harness_allocator::hash::{fnv1a, fnv1a_from};
use harness_allocator::units::Bytes;
use harness_base::{files, parallel::on_one_core};
use harness_explain::fleet::{Analysis, Row, job_of};
use harness_trace::snapshot::{Snapshot, SnapshotError};

use super::cloud::{self, Cloud};
use crate::error::{CliError, Failures};
use crate::snapshots;

pub(super) struct Sources {
    /// Sorted by name.
    pub(super) all: Vec<Source>,
    pub(super) clouds: Vec<Cloud>,
}

/// A snapshot, or a folder that cannot be read.
pub(super) struct Source {
    /// The path or URL as text.
    pub(super) name: String,
    /// Empty for a URL.
    pub(super) path: PathBuf,
    /// Changes when the file does. Empty if the file cannot be read.
    pub(super) stamp: String,
    /// The number of its bucket, and its bytes. `None` for a local file.
    pub(super) cloud: Option<(usize, u64)>,
    /// Why a folder cannot be read.
    pub(super) problem: Option<String>,
}

impl Sources {
    /// Fails if a path does not exist or has no snapshot, or if no file that the user named can be
    /// a snapshot.
    pub(super) fn find(paths: &[PathBuf]) -> Result<Self, Failures> {
        let (mut clouds, mut unusable) = (Vec::new(), Vec::new());
        let find = |path: &PathBuf| {
            let shown = path.display();
            let found = if let Some(url) = cloud::url(path) {
                let cloud = Cloud::open(url)?;
                let found = cloud.list(clouds.len())?;
                clouds.push(cloud);
                found
            } else if path.is_dir() {
                let mut found = Vec::new();
                walk(path, &mut found).map_err(|error| {
                    CliError::input(
                        format!("{shown}: the folder cannot be read: {error}"),
                        "make the folder readable, or name other folders",
                    )
                })?;
                found
            } else {
                match snapshots::check(path) {
                    Err(error) if path.metadata().is_err() => return Err(error),
                    checked => unusable.extend(checked.err()),
                }
                vec![Source::of(path)]
            };
            if found.is_empty() {
                let message =
                    format!("{shown}: there is no snapshot in this folder or its subfolders");
                return Err(CliError::input(
                    message,
                    "name a folder with *.pickle, *.pkl, *.pickle.gz or *.pkl.gz files",
                ));
            }
            Ok(found)
        };
        let mut all: Vec<Source> = Failures::all(paths.iter().map(find))?
            .into_iter()
            .flatten()
            .collect();
        if unusable.len() == all.len() {
            return Err(Failures(unusable));
        }
        all.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
        // Several paths, such as `jobs` and `./jobs`, may name one file.
        let mut seen = HashSet::new();
        all.retain(|source| match source.cloud {
            Some(_) => seen.insert(PathBuf::from(&source.name)),
            None => seen.insert(
                source
                    .path
                    .canonicalize()
                    .unwrap_or_else(|_| source.path.clone()),
            ),
        });
        Ok(Self { all, clouds })
    }
}

/// Finds the snapshots of a folder and its subfolders. Does not follow links to folders. Subfolders
/// that cannot be read are sources with a problem.
fn walk(folder: &Path, sources: &mut Vec<Source>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if let Err(error) = walk(&path, sources) {
                let problem = Some(format!("the folder cannot be read: {error}"));
                sources.push(Source {
                    problem,
                    ..Source::without_stamp(&path)
                });
            }
        } else if snapshots::is_named_so(&path) {
            sources.push(Source::of(&path));
        }
    }
    Ok(())
}

impl Source {
    /// A file that cannot be read fails later, as a row.
    fn of(path: &Path) -> Self {
        let stamp = path.metadata().ok().and_then(|metadata| {
            let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
            Some(format!("{} {}", metadata.len(), modified.as_nanos()))
        });
        Self {
            stamp: stamp.unwrap_or_default(),
            ..Self::without_stamp(path)
        }
    }

    fn without_stamp(path: &Path) -> Self {
        Self {
            name: name_of(path),
            path: path.to_owned(),
            stamp: String::new(),
            cloud: None,
            problem: None,
        }
    }

    /// The row of this source. `known` returns the analysis of a content by its hash.
    pub(super) fn row(
        &self,
        clouds: &[Cloud],
        memory: Option<Bytes>,
        known: impl Fn(&str) -> Option<Analysis>,
        interrupted: &AtomicBool,
    ) -> Row {
        let (job, rank) = job_of(&self.name);
        let row = Row {
            file: self.name.clone(),
            job,
            rank,
            ..Row::default()
        };
        if let Some(problem) = &self.problem {
            return Row {
                analysis: Analysis::unreadable(problem),
                ..row
            };
        }
        let cloud = self.cloud.and_then(|(number, _)| clouds.get(number));
        let opened = match cloud {
            Some(cloud) => cloud.fetch(self),
            None => files::open(&self.path),
        };
        let opened = opened.and_then(|file| Content::of(file, interrupted));
        let mut content = match opened {
            Ok(opened) => opened,
            Err(error) => {
                return Row {
                    analysis: Analysis::unreadable(SnapshotError::Io(error).to_string()),
                    ..row
                };
            }
        };
        // A panic is a bug, which costs this row only.
        let analysed = panic::catch_unwind(panic::AssertUnwindSafe(|| {
            let snapshot = Snapshot::read_from(&mut content)?;
            let hash = content.hash();
            let analysis =
                known(&hash).unwrap_or_else(|| on_one_core(|| Analysis::of(&snapshot, memory)));
            Ok::<_, SnapshotError>((hash, analysis))
        }));
        let stamp = if content.failed {
            String::new()
        } else {
            self.stamp.clone()
        };
        let unreadable = |problem: &str| (String::new(), Analysis::unreadable(problem));
        let (hash, analysis) = match analysed {
            Ok(Ok(analysed)) => analysed,
            Ok(Err(error)) => unreadable(&error.to_string()),
            Err(_) => unreadable("a bug in harness: report it with this file"),
        };
        Row {
            stamp,
            hash,
            analysis,
            ..row
        }
    }
}

/// A path as text. Bytes that are not UTF-8 are written as in `\xff`.
pub(super) fn name_of(path: &Path) -> String {
    let chunks = path.as_os_str().as_bytes().utf8_chunks();
    chunks
        .map(|chunk| format!("{}{}", chunk.valid(), chunk.invalid().escape_ascii()))
        .collect()
}

/// Reads a file and hashes the bytes that were read. Ends where the file ended when it was opened,
/// and fails after Ctrl-C.
struct Content<'a> {
    file: io::Take<File>,
    hash: u64,
    length: u64,
    /// An error of the system, not of the file's content.
    failed: bool,
    interrupted: &'a AtomicBool,
}

impl<'a> Content<'a> {
    fn of(file: File, interrupted: &'a AtomicBool) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let limit = if metadata.is_file() {
            metadata.len()
        } else {
            u64::MAX
        };
        Ok(Self {
            file: file.take(limit),
            hash: fnv1a(&[]),
            length: 0,
            failed: false,
            interrupted,
        })
    }

    /// The hash and the length. Does not resist attacks, but a wrong row harms only the attacker's.
    fn hash(&self) -> String {
        format!("{:016x}-{}", self.hash, self.length)
    }
}

impl Read for Content<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = if self.interrupted.load(Ordering::Relaxed) {
            Err(io::Error::other("interrupted"))
        } else {
            self.file.read(buffer)
        };
        self.failed |= read.is_err();
        let read = read?;
        self.hash = fnv1a_from(self.hash, &buffer[..read]);
        self.length += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_name_that_is_not_utf_8_is_text_with_escaped_bytes() {
        let name = |bytes: &[u8]| name_of(Path::new(OsStr::from_bytes(bytes)));
        assert_eq!(name("jobs/ä.pickle".as_bytes()), "jobs/ä.pickle");
        assert_eq!(name(b"jobs/\xffa\xc3.pickle"), r"jobs/\xffa\xc3.pickle");
        assert_ne!(name(b"\xff"), name(b"\xfe"));
    }

    #[test]
    fn a_file_that_grows_while_it_is_read_ends_and_ctrl_c_ends_any_file() -> io::Result<()> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(b"0123456789")?;
        let interrupted = AtomicBool::new(false);
        let mut content = Content::of(files::open(file.path())?, &interrupted)?;
        let mut read = Vec::new();
        while content
            .read(&mut [0; 4])
            .map(|length| read.push(length))
            .is_ok()
            && read.last() != Some(&0)
        {
            file.write_all(b"more")?;
        }
        assert_eq!((read.iter().sum::<usize>(), content.failed), (10, false));
        let mut content = Content::of(files::open(file.path())?, &interrupted)?;
        interrupted.store(true, Ordering::Relaxed);
        assert!(content.read_to_end(&mut Vec::new()).is_err() && content.failed);
        Ok(())
    }
}
