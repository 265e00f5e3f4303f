//! Reports on disk: one folder per session, with `report.md`, `records.json` and the pictures. During a session, `events.jsonl`
//! ([`Journal`]) is written. If the session is killed, a report can be rendered from it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use harness_allocator::device::Clock;

use crate::{Report, json, markdown};
use harness_base::files::slug;
use harness_base::files::{self, Document, Folder};
use harness_record::{Collector, Event, PlannedRun, RECORD_VERSION, Records};

pub use harness_base::files::StoreError;

/// Default location of numbered folders.
pub const DEFAULT_ROOT: &str = "reports/runs";

pub const REPORT: &str = "report.md";

/// The events of a running or killed session: one [`Event`] per line.
pub const EVENTS: &str = "events.jsonl";

/// The records of the report.
pub const RECORDS: &str = Document::Records.file_name();

/// Writes a report into a new folder of `root` with the next free number, and returns the folder. The folder appears complete.
/// Fails with [`StoreError::Unwritable`], [`StoreError::DiskFull`]. Only `root` may have been created then.
pub fn save_new(root: &Path, records: &Records) -> Result<PathBuf, StoreError> {
    let files = files(records);
    let name = folder_name(records);
    Folder::open(root, Document::Records)?.add(&files, |root| Ok(format!("{:04}-{name}", next_number(root)?)))
}

/// Checks before a session that its report can be written to `folder` and overwrites no foreign report.
/// Fails with [`StoreError::Unwritable`], [`StoreError::DiskFull`], [`StoreError::Foreign`].
pub fn check_folder(folder: &Path) -> Result<(), StoreError> {
    files::check_ours(folder, REPORT, RECORDS, Document::Records)?;
    files::check_writable(folder, Document::Records)
}

/// Writes a report into `folder` and replaces an earlier report; other files stay. Nothing is replaced until all files are
/// written; then each file is replaced whole.
/// Fails with [`StoreError::Unwritable`], [`StoreError::DiskFull`], [`StoreError::Foreign`]; an earlier report is then unchanged.
pub fn save_into(folder: &Path, records: &Records) -> Result<(), StoreError> {
    files::check_ours(folder, REPORT, RECORDS, Document::Records)?;
    let files = files(records);
    let locked = Folder::open(folder, Document::Records)?;
    let earlier = pictures_of_earlier_report(folder);
    locked.replace(&files)?;
    let kept: BTreeSet<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
    for name in earlier.iter().filter(|name| !kept.contains(name.as_str())) {
        // An unused picture is harmless, so a failure to remove it is ignored.
        let _ = fs::remove_file(folder.join(name));
    }
    Ok(())
}

/// Reads records from a file or its folder. For a running or killed session, builds them from the events.
/// Fails with all other kinds of [`StoreError`].
pub fn read(path: &Path) -> Result<Records, StoreError> {
    let events = if path.is_dir() { path.join(EVENTS) } else { path.to_owned() };
    let has_events = events.file_name() == Some(OsStr::new(EVENTS)) && events.is_file();
    if has_events { read_events(&events) } else { files::read(path, Document::Records, RECORD_VERSION) }
}

/// Renders a report again in its own folder, from its records or events.
/// Fails with [`StoreError`]; [`StoreError::Busy`] during the session.
pub fn render_again(folder: &Path) -> Result<(), StoreError> {
    let events = folder.join(EVENTS);
    let locked = if events.is_file() { Some(open_events(&events)?) } else { None };
    save_into(folder, &read(folder)?)?;
    if locked.is_some() { remove_events(folder) } else { Ok(()) }
}

/// Returns whether a folder or file was written by `harness run`.
pub fn is_of_run(path: &Path) -> bool {
    let names = [OsStr::new(RECORDS), OsStr::new(EVENTS)];
    if path.is_dir() {
        names.iter().any(|name| path.join(name).is_file())
    } else {
        path.file_name().is_some_and(|name| names.contains(&name))
    }
}

fn read_events(path: &Path) -> Result<Records, StoreError> {
    let text = fs::read_to_string(path).map_err(|source| StoreError::Unreadable { path: path.to_owned(), source })?;
    let mut collector = Collector::default();
    let mut lines = text.lines().enumerate().peekable();
    while let Some((index, line)) = lines.next() {
        match serde_json::from_str(line) {
            Ok(Event::Started { version, .. }) if version > RECORD_VERSION => {
                return Err(StoreError::TooNew { path: path.to_owned(), found: version, supported: RECORD_VERSION });
            }
            Ok(event) => collector.add(event),
            // The program was killed while it wrote this line.
            Err(_) if lines.peek().is_none() && index > 0 && !text.ends_with('\n') => {}
            Err(source) => return Err(StoreError::Malformed { path: path.to_owned(), source, document: Document::Records }),
        }
    }
    Ok(collector.into_records())
}

/// Opens the file of events and locks it.
fn open_events(path: &Path) -> Result<File, StoreError> {
    let failed = |source| StoreError::writing(Document::Records, path, source);
    let file = File::options().create(true).append(true).open(path).map_err(failed)?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            Err(StoreError::Busy { path: path.parent().unwrap_or(path).to_owned(), document: Document::Records })
        }
        // Some file systems have no locks.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
    }
}

fn remove_events(folder: &Path) -> Result<(), StoreError> {
    let path = folder.join(EVENTS);
    fs::remove_file(&path).map_err(|source| StoreError::writing(Document::Records, &path, source))
}

/// Writes each event of a session to the report's folder when it occurs. A killed session keeps its results.
#[derive(Debug)]
pub struct Journal {
    target: Target,
    file: Option<File>,
    /// Events before the folder had a name.
    waiting: String,
    planned: Vec<PlannedRun>,
    /// `true` if this session created the folder.
    is_new: bool,
}

#[derive(Debug)]
enum Target {
    /// A new numbered folder within this one.
    NewIn(PathBuf),
    Folder(PathBuf),
}

impl Journal {
    /// Creates a journal for a new numbered folder of `root`. The folder is created when the first run opens its device.
    pub const fn in_new_folder(root: PathBuf) -> Self {
        Self { target: Target::NewIn(root), file: None, waiting: String::new(), planned: Vec::new(), is_new: true }
    }

    /// Creates a journal for a report in this folder, which replaces an earlier one.
    pub const fn in_folder(folder: PathBuf) -> Self {
        Self { target: Target::Folder(folder), file: None, waiting: String::new(), planned: Vec::new(), is_new: false }
    }

    /// Writes an event.
    /// Fails with [`StoreError::Unwritable`], [`StoreError::DiskFull`], and [`StoreError::Busy`] if another session writes to the
    /// folder.
    pub fn add(&mut self, event: &Event) -> Result<(), StoreError> {
        let line = serde_json::to_string(event).expect("events are plain data with text keys, which always have a JSON form") + "\n";
        let clock = match event {
            Event::Started { planned, .. } => {
                self.planned.clone_from(planned);
                None
            }
            Event::RunStarted(run) | Event::RunEnded(run) => Some(&run.device),
            Event::StepEnded(_) => None,
        };
        match (&mut self.file, clock) {
            (Some(_), _) => self.write(&line),
            (None, None) => {
                self.waiting.push_str(&line);
                Ok(())
            }
            (None, Some(device)) => {
                let device = if device.clock == Clock::Simulated { "sim".to_owned() } else { slug(&device.name) };
                self.open(&device)?;
                let waiting = std::mem::take(&mut self.waiting);
                self.write(&(waiting + &line))
            }
        }
    }

    fn open(&mut self, device: &str) -> Result<(), StoreError> {
        let folder = match &self.target {
            Target::Folder(folder) => {
                Folder::open(folder, Document::Records)?;
                folder.clone()
            }
            Target::NewIn(root) => {
                let scenarios: BTreeSet<&str> = self.planned.iter().map(|run| run.scenario.as_str()).collect();
                let what = match scenarios.first() {
                    Some(only) if scenarios.len() == 1 => slug(only),
                    _ => format!("{}-scenarios", scenarios.len()),
                };
                Folder::open(root, Document::Records)?.add(&[], |root| Ok(format!("{:04}-{what}-{device}", next_number(root)?)))?
            }
        };
        let path = folder.join(EVENTS);
        let file = open_events(&path)?;
        // This session replaces the events of an earlier one.
        file.set_len(0).map_err(|source| StoreError::writing(Document::Records, &path, source))?;
        (self.target, self.file) = (Target::Folder(folder), Some(file));
        Ok(())
    }

    fn write(&mut self, text: &str) -> Result<(), StoreError> {
        let path = match &self.target {
            Target::Folder(folder) => folder.join(EVENTS),
            Target::NewIn(root) => root.clone(),
        };
        let written = self.file.as_mut().map_or(Ok(()), |file| file.write_all(text.as_bytes()));
        written.map_err(|source| StoreError::writing(Document::Records, &path, source))
    }

    /// Removes the files of a session in which no run ended.
    /// Fails with [`StoreError::Unwritable`].
    pub fn discard(self) -> Result<(), StoreError> {
        if let (Target::Folder(folder), Some(_)) = (&self.target, &self.file) {
            remove_events(folder)?;
            if self.is_new {
                // Fails if the user put files there; the folder then stays.
                let _ = fs::remove_dir(folder);
            }
        }
        Ok(())
    }

    /// Writes the report, removes the events, and returns the report's folder.
    /// Fails with [`StoreError`]; the events then remain.
    pub fn finish(self, records: &Records) -> Result<PathBuf, StoreError> {
        match self.target {
            Target::NewIn(root) => save_new(&root, records),
            Target::Folder(folder) => {
                save_into(&folder, records)?;
                if self.file.is_some() {
                    remove_events(&folder)?;
                }
                Ok(folder)
            }
        }
    }
}

/// Pictures first and the report last, so links never dangle.
fn files(records: &Records) -> Vec<(String, String)> {
    let report = Report::new(records);
    let mut files = markdown::render(&report).files(REPORT);
    files.insert(files.len() - 1, (RECORDS.to_owned(), json::render(&report)));
    files
}

/// Names a session, for example `oom_retry-sim` or `12-scenarios-nvidia-h200`.
fn folder_name(records: &Records) -> String {
    let report = Report::new(records);
    let what = match report.scenarios.as_slice() {
        [] => return "nothing".to_owned(),
        [only] => slug(&only.info.name),
        several => format!("{}-scenarios", several.len()),
    };
    let device = match report.devices.as_slice() {
        [] => return what,
        [only] if only.info.clock == Clock::Simulated => "sim".to_owned(),
        [only] => slug(&only.info.name),
        several => format!("{}-devices", several.len()),
    };
    format!("{what}-{device}")
}

/// The next free number of a folder in `root`.
fn next_number(root: &Path) -> io::Result<u64> {
    let taken = fs::read_dir(root)?.filter_map(|entry| number(&entry.ok()?.file_name())).max().unwrap_or(0);
    Ok(taken.saturating_add(1))
}

/// The number at the start of a folder name.
fn number(name: &OsStr) -> Option<u64> {
    let (digits, _) = name.to_str()?.split_once('-')?;
    digits.parse().ok()
}

/// Pictures in `folder` that an earlier report links to. Other files are not removed.
fn pictures_of_earlier_report(folder: &Path) -> Vec<String> {
    let text = fs::read_to_string(folder.join(REPORT)).unwrap_or_default();
    let links = text.lines().filter(|line| line.starts_with("![")).filter_map(|line| Some(line.rsplit_once("](")?.1.trim_end_matches(')')));
    links.filter(|name| name.ends_with(".svg") && !name.contains('/')).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::examples;
    use harness_base::files::TEMPORARY;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn one_scenario() -> Records {
        Records { runs: vec![examples::oom_retry("caching", 0)], ..examples::every_ending() }
    }

    /// An error without the folder of this test.
    fn told(error: &StoreError, folder: &Path) -> String {
        error.to_string().replace(folder.to_str().unwrap(), "…")
    }

    #[test]
    fn records_read_back_as_they_were_from_the_folder_and_from_the_file() {
        let root = tempfile::tempdir().unwrap();
        let folder = save_new(root.path(), &examples::every_ending()).unwrap();
        assert_eq!(read(&folder).unwrap(), examples::every_ending());
        assert_eq!(read(&folder.join(RECORDS)).unwrap(), examples::every_ending());
    }

    #[test]
    fn somebody_elses_report_is_left_alone_and_an_earlier_one_of_ours_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join(REPORT), "mine").unwrap();
        let told = |result: Result<(), StoreError>| result.unwrap_err().to_string().replace(&*root.path().to_string_lossy(), "…");
        insta::assert_snapshot!(told(save_into(root.path(), &one_scenario())), @"`…/report.md` already exists and was not written by `harness run`: move it, or choose another place with `--report DIR`.");
        assert_eq!(told(check_folder(root.path())), told(save_into(root.path(), &one_scenario())));
        assert_eq!(names(root.path()), [REPORT]);
        fs::remove_file(root.path().join(REPORT)).unwrap();
        for _ in 0..2 {
            check_folder(root.path()).unwrap();
            save_into(root.path(), &one_scenario()).unwrap();
        }
        assert_eq!(names(root.path()), ["oom_retry-simulated.svg", RECORDS, REPORT]);
    }

    #[test]
    fn folders_are_numbered_and_named_after_what_ran() {
        let root = tempfile::tempdir().unwrap();
        let measured = Records { runs: vec![examples::measured("direct", 0)], ..examples::every_ending() };
        for records in [examples::every_ending(), one_scenario(), measured] {
            save_new(root.path(), &records).unwrap();
        }
        assert_eq!(names(root.path()), ["0001-5-scenarios-2-devices", "0002-oom_retry-sim", "0003-oom_retry-example-gpu"]);
        assert_eq!(names(&root.path().join("0002-oom_retry-sim")), ["oom_retry-simulated.svg", RECORDS, REPORT]);
        fs::create_dir(root.path().join("9999-x")).unwrap();
        assert!(save_new(root.path(), &one_scenario()).unwrap().ends_with("10000-oom_retry-sim"));
    }

    #[test]
    fn writers_at_the_same_time_get_numbers_of_their_own() {
        let root = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| save_new(root.path(), &one_scenario()).unwrap());
            }
        });
        let expected: Vec<String> = (1..=8).map(|number| format!("{number:04}-oom_retry-sim")).collect();
        assert_eq!(names(root.path()), expected);
    }

    #[test]
    fn files_and_folders_are_as_readable_as_any_other() {
        let root = tempfile::tempdir().unwrap();
        let (plain_folder, plain_file) = (root.path().join("plain"), root.path().join("file"));
        fs::create_dir(&plain_folder).unwrap();
        fs::write(&plain_file, "").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let folder = save_new(&root.path().join("runs"), &one_scenario()).unwrap();
        save_into(&root.path().join("fixed"), &one_scenario()).unwrap();
        assert_eq!(mode(&folder), mode(&plain_folder));
        assert_eq!(mode(&folder.join(REPORT)), mode(&plain_file));
        assert_eq!(mode(&root.path().join("fixed").join(REPORT)), mode(&plain_file));
    }

    #[test]
    fn what_a_killed_process_left_is_removed_by_the_next() {
        let root = tempfile::tempdir().unwrap();
        let left = root.path().join(format!("{TEMPORARY}abc"));
        fs::create_dir(&left).unwrap();
        fs::write(left.join(RECORDS), "{\"ver").unwrap();
        fs::write(root.path().join(format!("{TEMPORARY}file")), "half").unwrap();
        let folder = save_new(root.path(), &one_scenario()).unwrap();
        assert_eq!(names(root.path()), ["0001-oom_retry-sim"]);
        fs::write(folder.join(format!("{TEMPORARY}file")), "half").unwrap();
        save_into(&folder, &one_scenario()).unwrap();
        assert_eq!(names(&folder), ["oom_retry-simulated.svg", RECORDS, REPORT]);
    }

    #[test]
    fn a_new_report_replaces_the_earlier_one_and_leaves_other_files_alone() {
        let folder = tempfile::tempdir().unwrap();
        save_into(folder.path(), &examples::every_ending()).unwrap();
        fs::write(folder.path().join("mine.svg"), "mine").unwrap();
        save_into(folder.path(), &one_scenario()).unwrap();
        assert_eq!(names(folder.path()), ["mine.svg", "oom_retry-simulated.svg", RECORDS, REPORT]);
        assert_eq!(read(folder.path()).unwrap(), one_scenario());
    }

    #[test]
    fn a_write_that_fails_half_way_leaves_the_earlier_report_intact() {
        let folder = tempfile::tempdir().unwrap();
        save_into(folder.path(), &one_scenario()).unwrap();
        let before = fs::read(folder.path().join(RECORDS)).unwrap();
        // A folder has the name of one of the later report's pictures, so it cannot be written.
        fs::create_dir(folder.path().join("storm-simulated.svg")).unwrap();
        let error = save_into(folder.path(), &examples::every_ending()).unwrap_err();
        insta::assert_snapshot!(told(&error, folder.path()), @"cannot write to `…/storm-simulated.svg`: is a directory. Make it writable, or choose another place with `--report DIR`.");
        assert_eq!(fs::read(folder.path().join(RECORDS)).unwrap(), before);
        assert_eq!(names(folder.path()), ["oom_retry-simulated.svg", RECORDS, REPORT, "storm-simulated.svg"]);
    }

    #[test]
    fn a_place_that_cannot_be_written_to_is_named_with_what_to_do() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("taken");
        fs::write(&file, "a file, not a folder").unwrap();
        insta::assert_snapshot!(told(&save_new(&file, &one_scenario()).unwrap_err(), root.path()), @"cannot write to `…/taken`: not a directory. Make it writable, or choose another place with `--report DIR`.");
        insta::assert_snapshot!(told(&save_into(&file.join("below"), &one_scenario()).unwrap_err(), root.path()), @"cannot write to `…/taken/below`: Not a directory (os error 20). Make it writable, or choose another place with `--report DIR`.");
        assert_eq!(fs::read_to_string(&file).unwrap(), "a file, not a folder");
    }

    #[test]
    fn records_that_cannot_be_read_are_refused_with_a_sentence() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(RECORDS);
        let refusal = |text: &str| {
            fs::write(&file, text).unwrap();
            told(&read(root.path()).unwrap_err(), root.path())
        };
        let whole = json::render(&Report::new(&one_scenario()));
        insta::assert_snapshot!(refusal(&whole[..whole.len() / 2]), @"`…/records.json` is cut off at line 2: it ends in the middle of a record. Copy it again, or run again.");
        insta::assert_snapshot!(refusal(""), @"`…/records.json` is cut off at line 1: it ends in the middle of a record. Copy it again, or run again.");
        insta::assert_snapshot!(refusal(r#"{"version": 99, "everything": "else"}"#), @"`…/records.json` has version 99, this harness reads up to version 1: use the harness that wrote it, or a newer one.");
        insta::assert_snapshot!(refusal(r#"{"version": 1, "harness": "0.1.0"}"#), @"`…/records.json` does not hold records: missing field `runs` at line 1 column 34. Name a `records.json` that `harness run` wrote, or its folder.");
        insta::assert_snapshot!(refusal("# A report"), @"`…/records.json` does not hold records: expected value at line 1 column 1. Name a `records.json` that `harness run` wrote, or its folder.");
        insta::assert_snapshot!(told(&read(&root.path().join("missing")).unwrap_err(), root.path()), @"cannot read `…/missing`: No such file or directory (os error 2)");
    }

    #[test]
    fn records_cut_off_anywhere_are_never_read_as_whole() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(RECORDS);
        let whole = json::render(&Report::new(&one_scenario()));
        for end in (0..whole.trim_end().len()).filter(|&end| whole.is_char_boundary(end)).step_by(97) {
            fs::write(&file, &whole[..end]).unwrap();
            assert!(matches!(read(&file), Err(StoreError::Truncated { .. })), "cut at byte {end}");
        }
    }

    #[test]
    fn records_without_settings_are_read() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(RECORDS);
        let mut records = one_scenario();
        let older = json::render(&Report::new(&records));
        assert!(!older.contains("\"settings\""), "an arm without settings has the earlier format");
        fs::write(&file, &older).unwrap();
        assert_eq!(read(&file).unwrap(), records);
        records.runs[0].settings = Some("max_split_size_mb:512".to_owned());
        let newer = json::render(&Report::new(&records));
        assert_eq!(newer.replace(",\"settings\":\"max_split_size_mb:512\"", ""), older);
        fs::write(&file, newer).unwrap();
        assert_eq!(read(&file).unwrap(), records);
    }

    #[test]
    fn records_without_cost_figures_are_read() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join(RECORDS);
        let records = Records { runs: vec![examples::measured("direct", 0)], ..examples::every_ending() };
        let text = json::render(&Report::new(&records));
        let older = text.replace(",\"cost_figures\":[]", "");
        assert_ne!(older, text);
        fs::write(&file, older).unwrap();
        assert_eq!(read(&file).unwrap(), records);
    }
}
