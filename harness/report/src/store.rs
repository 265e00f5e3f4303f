//! Reports on disk: one folder per session, with `report.md`, `records.json` and the pictures.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::{collections::BTreeSet, ffi::OsStr};

use harness_allocator::device::{Clock, DeviceInfo};

use crate::{Report, json, markdown};
use harness_base::files::{self, DocumentKind, Folder, slug};
use harness_record::{Collector, Event, PlannedRun, RECORD_VERSION, Records};

pub use harness_base::files::StoreError;

/// Default location of numbered folders.
pub const DEFAULT_ROOT: &str = "reports/runs";

pub const REPORT: &str = "report.md";

pub const EVENTS: &str = "events.jsonl";

pub const RECORDS: &str = DocumentKind::RECORDS.file_name;

/// Writes a report into a new folder of `root` with the next free number, and returns the folder.
/// The folder appears complete. Fails with [`StoreError::Unwritable`], [`StoreError::DiskFull`].
/// Only `root` may have been created then.
pub fn save_new(root: &Path, records: &Records) -> Result<PathBuf, StoreError> {
    let report = Report::new(records);
    let scenarios: Vec<&str> = report
        .scenarios
        .iter()
        .map(|scenario| scenario.info.name.as_str())
        .collect();
    let devices: Vec<&DeviceInfo> = report.devices.iter().map(|device| device.info).collect();
    let name = folder_name(&scenarios, &devices);
    Folder::open(root, DocumentKind::RECORDS)?.add(&files(&report), |root| {
        Ok(format!("{:04}-{name}", next_number(root)?))
    })
}

/// Checks before a session that its report can be written to `folder` and overwrites no foreign
/// report.
pub fn check_folder(folder: &Path) -> Result<(), StoreError> {
    files::check_ours(folder, REPORT, RECORDS, DocumentKind::RECORDS)?;
    files::check_writable(folder, DocumentKind::RECORDS)
}

/// Writes a report into `folder` and replaces an earlier report; other files stay. Nothing is
/// replaced until all files are written; then each file is replaced whole. Fails with
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`], [`StoreError::Foreign`]; an earlier report
/// is then unchanged.
pub fn save_into(folder: &Path, records: &Records) -> Result<(), StoreError> {
    files::check_ours(folder, REPORT, RECORDS, DocumentKind::RECORDS)?;
    let files = files(&Report::new(records));
    let locked = Folder::open(folder, DocumentKind::RECORDS)?;
    let earlier = files::read_to_string(&folder.join(REPORT)).unwrap_or_default();
    locked.replace(&files)?;
    // Removes pictures that only the earlier report links to. Other files stay.
    let linked = earlier
        .lines()
        .filter(|line| line.starts_with("!["))
        .filter_map(|line| line.rsplit_once("]("));
    let pictures = linked
        .map(|(_, name)| name.trim_end_matches(')'))
        .filter(|name| name.ends_with(".svg") && !name.contains('/'));
    for name in pictures.filter(|picture| files.iter().all(|(name, _)| name != picture)) {
        // An unused picture is harmless, so a failure to remove it is ignored.
        let _ = fs::remove_file(folder.join(name));
    }
    Ok(())
}

/// Reads records from a file or its folder. For a running or killed session, builds them from the
/// events.
pub fn read(path: &Path) -> Result<Records, StoreError> {
    let events = if path.is_dir() {
        path.join(EVENTS)
    } else {
        path.to_owned()
    };
    let has_events = events.file_name() == Some(OsStr::new(EVENTS)) && events.is_file();
    if has_events {
        read_events(&events)
    } else {
        files::read(path, DocumentKind::RECORDS, RECORD_VERSION)
    }
}

/// Renders a report again in its own folder, from its records or events.
/// Fails with [`StoreError`]; [`StoreError::Busy`] during the session.
pub fn render_again(folder: &Path) -> Result<(), StoreError> {
    let events = folder.join(EVENTS);
    let locked = if events.is_file() {
        Some(open_events(&events)?)
    } else {
        None
    };
    save_into(folder, &read(folder)?)?;
    if locked.is_some() {
        remove_events(folder)
    } else {
        Ok(())
    }
}

/// Returns whether a folder or file was written by `harness run`.
pub fn is_of_run(path: &Path) -> bool {
    let has = |name: &str| {
        if path.is_dir() {
            path.join(name).is_file()
        } else {
            path.file_name() == Some(OsStr::new(name))
        }
    };
    has(RECORDS) || has(EVENTS)
}

fn read_events(path: &Path) -> Result<Records, StoreError> {
    let text = files::read_to_string(path).map_err(|source| StoreError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    let mut collector = Collector::default();
    let mut lines = text.lines().enumerate().peekable();
    while let Some((index, line)) = lines.next() {
        match serde_json::from_str(line) {
            Ok(Event::Started { version, .. }) if version > RECORD_VERSION => {
                return Err(StoreError::TooNew {
                    path: path.to_owned(),
                    found: version,
                    supported: RECORD_VERSION,
                });
            }
            Ok(event) => collector.add(event),
            // The program was killed while it wrote this line.
            Err(_) if lines.peek().is_none() && index > 0 && !text.ends_with('\n') => {}
            Err(source) => {
                return Err(StoreError::Malformed {
                    path: path.to_owned(),
                    source,
                    document: DocumentKind::RECORDS,
                });
            }
        }
    }
    Ok(collector.into_records())
}

fn open_events(path: &Path) -> Result<File, StoreError> {
    let failed = |source| StoreError::writing(DocumentKind::RECORDS, path, source);
    let file = files::open_to_append(path).map_err(failed)?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(StoreError::Busy {
            path: path.parent().unwrap_or(path).to_owned(),
            document: DocumentKind::RECORDS,
        }),
        // Some file systems have no locks.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
    }
}

fn remove_events(folder: &Path) -> Result<(), StoreError> {
    let path = folder.join(EVENTS);
    fs::remove_file(&path)
        .map_err(|source| StoreError::writing(DocumentKind::RECORDS, &path, source))
}

/// Writes each event of a session to the report's folder when it occurs. A killed session keeps its
/// results.
#[derive(Debug)]
pub struct Journal {
    /// The report's folder. Before the first event of a new report, the folder in which it will be
    /// created.
    folder: PathBuf,
    /// `true` if this session creates the report's folder.
    is_new: bool,
    file: Option<File>,
    waiting: String,
    planned: Vec<PlannedRun>,
}

impl Journal {
    /// Creates a journal for a new numbered folder of `root`. The folder is created when the first
    /// run opens its device.
    pub fn in_new_folder(root: PathBuf) -> Self {
        Self {
            is_new: true,
            ..Self::in_folder(root)
        }
    }

    /// Creates a journal for a report in this folder, which replaces an earlier one.
    pub const fn in_folder(folder: PathBuf) -> Self {
        Self {
            folder,
            is_new: false,
            file: None,
            waiting: String::new(),
            planned: Vec::new(),
        }
    }

    /// Writes an event. Fails with [`StoreError::Unwritable`], [`StoreError::DiskFull`], and
    /// [`StoreError::Busy`] if another session writes to the folder.
    pub fn add(&mut self, event: &Event) -> Result<(), StoreError> {
        let line = serde_json::to_string(event)
            .expect("events are plain data with text keys, which always have a JSON form")
            + "\n";
        self.waiting.push_str(&line);
        match event {
            Event::Started { planned, .. } => self.planned.clone_from(planned),
            Event::RunStarted(run) | Event::RunEnded(run) if self.file.is_none() => {
                self.open(&run.device)?
            }
            _ => {}
        }
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        let written = file.write_all(std::mem::take(&mut self.waiting).as_bytes());
        written.map_err(|source| {
            StoreError::writing(DocumentKind::RECORDS, &self.folder.join(EVENTS), source)
        })
    }

    fn open(&mut self, device: &DeviceInfo) -> Result<(), StoreError> {
        let place = Folder::open(&self.folder, DocumentKind::RECORDS)?;
        if self.is_new {
            let scenarios: BTreeSet<&str> = self
                .planned
                .iter()
                .map(|run| run.scenario.as_str())
                .collect();
            let name = folder_name(&Vec::from_iter(scenarios), &[device]);
            self.folder = place.add(&[], |root| Ok(format!("{:04}-{name}", next_number(root)?)))?;
        }
        let path = self.folder.join(EVENTS);
        let file = open_events(&path)?;
        // This session replaces the events of an earlier one.
        file.set_len(0)
            .map_err(|source| StoreError::writing(DocumentKind::RECORDS, &path, source))?;
        self.file = Some(file);
        Ok(())
    }

    pub fn discard(self) -> Result<(), StoreError> {
        if self.file.is_some() {
            remove_events(&self.folder)?;
            if self.is_new {
                // Fails if the user put files there; the folder then stays.
                let _ = fs::remove_dir(&self.folder);
            }
        }
        Ok(())
    }

    /// Writes the report, removes the events, and returns the report's folder.
    /// Fails with [`StoreError`]; the events then remain.
    pub fn finish(self, records: &Records) -> Result<PathBuf, StoreError> {
        if self.is_new && self.file.is_none() {
            return save_new(&self.folder, records);
        }
        save_into(&self.folder, records)?;
        if self.file.is_some() {
            remove_events(&self.folder)?;
        }
        Ok(self.folder)
    }
}

/// Pictures first and the report last, so links never dangle.
fn files(report: &Report<'_>) -> Vec<(String, String)> {
    let mut files = markdown::render(report).files(REPORT);
    files.insert(
        files.len() - 1,
        (RECORDS.to_owned(), json::render(report, false)),
    );
    files
}

/// Names a session, for example `oom_retry-sim` or `12-scenarios-nvidia-h200`.
fn folder_name(scenarios: &[&str], devices: &[&DeviceInfo]) -> String {
    let what = match scenarios {
        [] => return "nothing".to_owned(),
        [only] => slug(only),
        several => format!("{}-scenarios", several.len()),
    };
    match devices {
        [] => what,
        [only] if only.clock == Clock::Simulated => format!("{what}-sim"),
        [only] => format!("{what}-{}", slug(&only.name)),
        several => format!("{what}-{}-devices", several.len()),
    }
}

fn next_number(root: &Path) -> io::Result<u64> {
    let taken = fs::read_dir(root)?
        .filter_map(|entry| number(&entry.ok()?.file_name()))
        .max()
        .unwrap_or(0);
    Ok(taken.saturating_add(1))
}

fn number(name: &OsStr) -> Option<u64> {
    let (digits, _) = name.to_str()?.split_once('-')?;
    digits.parse().ok()
}

#[cfg(test)]
mod tests;
