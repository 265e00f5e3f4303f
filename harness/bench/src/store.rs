//! Where benchmark runs lie on disk: a folder a run below `nightly`, with the record, the report and its pictures, and beside `nightly` the
//! index of all. How they are rendered is the business of those who call; this module knows names and files.
//!
//! Everything may be killed at any point, be done twice, or meet a full disk: a run appears whole or not at all, and the index is replaced
//! whole. An index that lacks a run, because the program was killed between the two, is put right by the next.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use harness_allocator::device::Clock;

use super::compare;
use super::record::{BENCH_VERSION, BenchRun};
use harness_base::files::slug;
use harness_base::files::{self, Document, Folder, StoreError};

/// Where runs and their index go unless the user says otherwise.
pub const DEFAULT_ROOT: &str = "reports";

/// The folder of runs in the root.
pub const NIGHTLY: &str = "nightly";

/// The page of all runs, beside it.
pub const INDEX: &str = "README.md";

/// What a person reads of a run, in its folder.
pub const REPORT: &str = "report.md";

/// The file of a run that everything else is rendered from.
pub const RECORD: &str = Document::Benchmark.file_name();

/// Files by name and content, what links after what it links to.
pub type Files = Vec<(String, String)>;

/// How a run and the index of all are rendered.
#[derive(Clone, Copy, Debug)]
pub struct Renderer {
    /// A run, with earlier runs on its device, oldest first.
    pub run: fn(&BenchRun, &[&BenchRun]) -> Files,
    /// All runs, with their folders relative to the index, oldest first.
    pub index: fn(&[(String, BenchRun)]) -> Files,
}

/// Whether a folder, or a file, is what `harness bench` leaves.
#[must_use]
pub fn is_of_benchmark(path: &Path) -> bool {
    if path.is_dir() { path.join(RECORD).is_file() } else { path.file_name().is_some_and(|name| name == RECORD) }
}

/// All runs of a root.
#[derive(Debug, Default)]
pub struct Runs {
    /// Those that can be read, oldest first, with their folders relative to the root.
    pub whole: Vec<(String, BenchRun)>,
    /// Why others cannot be read.
    pub broken: Vec<StoreError>,
}

/// A run that was saved.
#[derive(Debug)]
pub struct Saved {
    /// Where it was saved.
    pub folder: PathBuf,
    /// The run as it was saved, with its comparison.
    pub run: BenchRun,
    /// Runs that could not be read, and are not in the comparison and the index.
    pub broken: Vec<StoreError>,
}

/// Says before a run that it could not be saved in `root`: that nothing can be written there, or that what lies in the place of the index is
/// not one.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`], [`StoreError::Foreign`].
pub fn check_root(root: &Path) -> Result<(), StoreError> {
    files::check_ours(root, INDEX, NIGHTLY, Document::Benchmark)?;
    files::check_writable(&root.join(NIGHTLY), Document::Benchmark)?;
    files::check_writable(root, Document::Benchmark)
}

/// The same for [`save_into`].
///
/// # Errors
/// As [`check_root`].
pub fn check_folder(folder: &Path) -> Result<(), StoreError> {
    files::check_ours(folder, REPORT, RECORD, Document::Benchmark)?;
    files::check_writable(folder, Document::Benchmark)
}

/// Compares a run with the accepted build and the runs in `root`, renders it, writes it into a folder of its own, and writes the index anew.
/// Other processes that save runs wait meanwhile.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`], [`StoreError::Foreign`]. What was there before is intact then; the run itself may be
/// there, where only the index could not be written.
pub fn save(root: &Path, mut run: BenchRun, renderer: Renderer) -> Result<Saved, StoreError> {
    files::check_ours(root, INDEX, NIGHTLY, Document::Benchmark)?;
    let place = Folder::open(root, Document::Benchmark)?;
    let nightly = root.join(NIGHTLY);
    let runs = Folder::open(&nightly, Document::Benchmark)?;
    let Runs { mut whole, broken } = load(root)?;
    run.comparison = compare::compare(&run, &whole.iter().map(|(_, run)| run).collect::<Vec<_>>(), None);
    let folder = runs.add(&files_of(&run, &whole, renderer), |nightly| free_name(nightly, &run))?;
    let name = folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    whole.push((format!("{NIGHTLY}/{name}"), run.clone()));
    in_order(&mut whole);
    place.replace(&(renderer.index)(&whole))?;
    Ok(Saved { folder, run, broken })
}

/// Compares a run with the accepted build alone, renders it and writes it into this folder, in place of an earlier one. It stands in no index:
/// for shards, and for runs that are looked at once. Returns it with its comparison.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`]; what was there before is intact then.
pub fn save_into(folder: &Path, mut run: BenchRun, renderer: Renderer) -> Result<BenchRun, StoreError> {
    files::check_ours(folder, REPORT, RECORD, Document::Benchmark)?;
    run.comparison = compare::compare(&run, &[], None);
    Folder::open(folder, Document::Benchmark)?.replace(&files_of(&run, &[], renderer))?;
    Ok(run)
}

/// Renders a run anew from its record, in its own folder; other files stay.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`]; what was there before is intact then.
pub fn render_again(folder: &Path, run: &BenchRun, others: &[(String, BenchRun)], renderer: Renderer) -> Result<(), StoreError> {
    let files = files_of(run, others, renderer);
    // The record is what it was.
    let rendered: Vec<(String, String)> = files.into_iter().filter(|(name, _)| name != RECORD).collect();
    Folder::open(folder, Document::Benchmark)?.replace(&rendered)
}

/// Writes the index of all runs anew, and says which runs cannot be read.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`]; the old index is intact then.
pub fn save_index(root: &Path, renderer: Renderer) -> Result<Vec<StoreError>, StoreError> {
    files::check_ours(root, INDEX, NIGHTLY, Document::Benchmark)?;
    let place = Folder::open(root, Document::Benchmark)?;
    let Runs { whole, broken } = load(root)?;
    place.replace(&(renderer.index)(&whole))?;
    Ok(broken)
}

/// Writes one record to a file, in place of an earlier one.
///
/// # Errors
/// [`StoreError::Unwritable`], [`StoreError::DiskFull`]; an earlier file is intact then.
pub fn write(file: &Path, run: &BenchRun) -> Result<(), StoreError> {
    write_text(file, document(run))
}

/// Writes one text to a file of reports, whole or not at all.
///
/// # Errors
/// As [`write()`].
pub fn write_text(file: &Path, text: String) -> Result<(), StoreError> {
    let name = file.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| StoreError::writing(Document::Benchmark, file, ErrorKind::InvalidFilename.into()))?;
    let folder = file.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    Folder::open(folder, Document::Benchmark)?.replace(&[(name.to_owned(), text)])
}

/// Reads all runs. A root that is not there has none.
///
/// # Errors
/// [`StoreError::Unreadable`]: the folder of runs itself cannot be read.
pub fn load(root: &Path) -> Result<Runs, StoreError> {
    let nightly = root.join(NIGHTLY);
    let unreadable = |source| StoreError::Unreadable { path: nightly.clone(), source };
    let mut runs = Runs::default();
    let entries = match fs::read_dir(&nightly) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(runs),
        entries => entries.map_err(unreadable)?,
    };
    let mut names = entries.map(|entry| entry.map(|entry| entry.file_name())).collect::<io::Result<Vec<_>>>().map_err(unreadable)?;
    names.sort();
    // Not what a killed process left, and not what somebody else put there.
    let names = names.iter().filter_map(|name| name.to_str()).filter(|name| !name.starts_with('.'));
    for name in names.filter(|name| nightly.join(name).join(RECORD).exists()) {
        match read(&nightly.join(name)) {
            Ok(run) => runs.whole.push((format!("{NIGHTLY}/{name}"), run)),
            Err(error) => runs.broken.push(error),
        }
    }
    in_order(&mut runs.whole);
    Ok(runs)
}

/// Reads a run back, from the file or from the folder that holds it.
///
/// # Errors
/// [`StoreError::Unreadable`], [`StoreError::Truncated`], [`StoreError::TooNew`], [`StoreError::Malformed`].
pub fn read(path: &Path) -> Result<BenchRun, StoreError> {
    files::read(path, Document::Benchmark, BENCH_VERSION)
}

/// The record before the report, so that what links comes after what it links to.
fn files_of(run: &BenchRun, others: &[(String, BenchRun)], renderer: Renderer) -> Files {
    let is_earlier =
        |other: &&BenchRun| other.started < run.started && other.shard == run.shard && other.machine.is_same_device(&run.machine);
    let earlier: Vec<&BenchRun> = others.iter().map(|(_, other)| other).filter(is_earlier).collect();
    let record = (RECORD.to_owned(), document(run));
    [record].into_iter().chain((renderer.run)(run, &earlier)).collect()
}

/// One line a suite, so that two files can be compared line by line.
fn document(run: &BenchRun) -> String {
    let suites: Vec<String> = run.suites.iter().map(to_json).collect();
    let whole = to_json(&BenchRun { suites: Vec::new(), ..run.clone() });
    whole.replacen("\"suites\":[]", &format!("\"suites\":[\n{}\n]", suites.join(",\n")), 1) + "\n"
}

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("records are plain data with text keys, which always have a JSON form")
}

fn in_order(runs: &mut [(String, BenchRun)]) {
    runs.sort_by(|(folder_a, a), (folder_b, b)| (&a.started, folder_a).cmp(&(&b.started, folder_b)));
}

/// `2026-11-20-nvidia-h200`, or with a number behind it where that is taken.
fn free_name(nightly: &Path, run: &BenchRun) -> io::Result<String> {
    let date = slug(run.started.split('T').next().unwrap_or_default());
    let device = if run.machine.clock == Clock::Simulated { "sim".to_owned() } else { slug(&run.machine.device) };
    let shard = run.shard.map_or_else(String::new, |shard| format!("-{}of{}", shard.index, shard.count));
    let plain = format!("{date}-{device}{shard}");
    let names = std::iter::once(plain.clone()).chain((2_u32..).map(|number| format!("{plain}-{number}")));
    for name in names {
        if !nightly.join(&name).try_exists()? {
            return Ok(name);
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::examples::{self, Sampled};
    use crate::record::{Quantity, Shard};

    /// Renders just enough to show what it was given.
    const RENDERER: Renderer = Renderer {
        run: |run, earlier| vec![("report.md".to_owned(), format!("{} after {}", run.started, earlier.len()))],
        index: |runs| vec![("README.md".to_owned(), runs.iter().map(|(folder, _)| format!("{folder}\n")).collect())],
    };

    fn run(day: u32) -> BenchRun {
        examples::run(day, &[Sampled::noisy("caching", 20_000.0, 0.01), Sampled::exact("direct", Quantity::Memory, 4096.0)])
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| !name.starts_with('.'))
            .collect();
        names.sort();
        names
    }

    fn index(root: &Path) -> String {
        fs::read_to_string(root.join(INDEX)).unwrap()
    }

    /// A root with runs of these days.
    fn root(days: impl IntoIterator<Item = u32>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for day in days {
            save(root.path(), run(day), RENDERER).unwrap();
        }
        root
    }

    #[test]
    fn runs_read_back_as_they_were_in_the_order_of_their_beginning() {
        let root = root([12, 10, 11]);
        let runs = load(root.path()).unwrap();
        let started: Vec<&str> = runs.whole.iter().map(|(_, run)| &run.started[..10]).collect();
        assert_eq!(started, ["2026-11-10", "2026-11-11", "2026-11-12"]);
        let saved = save(root.path(), run(13), RENDERER).unwrap();
        assert_eq!(read(&saved.folder).unwrap(), saved.run);
        assert_eq!(read(&saved.folder.join(RECORD)).unwrap(), saved.run);
        assert_eq!(fs::read_to_string(saved.folder.join("report.md")).unwrap(), "2026-11-13T02:00:00Z after 3");
    }

    #[test]
    fn folders_are_named_by_date_device_and_shard_and_numbered_where_taken() {
        let root = root([10, 10, 11]);
        let mut gpu = run(10);
        gpu.machine.device = "NVIDIA H200".to_owned();
        gpu.machine.clock = Clock::Measured;
        gpu.shard = Some(Shard { index: 1, count: 2 });
        save(root.path(), gpu, RENDERER).unwrap();
        assert_eq!(
            names(&root.path().join(NIGHTLY)),
            ["2026-11-10-nvidia-h200-1of2", "2026-11-10-sim", "2026-11-10-sim-2", "2026-11-11-sim"]
        );
        assert_eq!(index(root.path()).lines().count(), 4);
        assert_eq!(names(&root.path().join("nightly/2026-11-10-sim")), [RECORD, "report.md"]);
    }

    #[test]
    fn a_broken_run_is_told_and_the_others_are_used() {
        let root = root([10, 11, 12, 13]);
        let file = |day| root.path().join(format!("nightly/2026-11-{day}-sim")).join(RECORD);
        let whole = fs::read_to_string(file(11)).unwrap();
        fs::write(file(11), &whole[..whole.len() / 2]).unwrap();
        fs::write(file(12), r#"{"version": 99}"#).unwrap();
        fs::remove_file(file(13)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", file(13)).unwrap();
        let saved = save(root.path(), run(14), RENDERER).unwrap();
        let told: Vec<String> = saved.broken.iter().map(|error| error.to_string().replace(root.path().to_str().unwrap(), "…")).collect();
        let expected = [
            "2026-11-11-sim/benchmark.json` is cut off at line 2",
            "has version 99, this harness reads up to version 4",
            "it has more than 268435456 bytes, which no document has",
        ];
        assert_eq!(told.len(), expected.len(), "{told:#?}");
        assert!(told.iter().zip(expected).all(|(told, expected)| told.contains(expected)), "{told:#?}");
        assert_eq!(fs::read_to_string(saved.folder.join("report.md")).unwrap(), "2026-11-14T02:00:00Z after 1");
        assert_eq!(index(root.path()), "nightly/2026-11-10-sim\nnightly/2026-11-14-sim\n");
    }

    #[test]
    fn an_index_that_cannot_be_written_leaves_the_old_one_and_the_next_puts_it_right() {
        let root = root([10]);
        let before = index(root.path());
        // A file of the index cannot be written, for a folder has its name.
        fs::create_dir(root.path().join("trend.svg")).unwrap();
        let with_trend = |runs: &[(String, BenchRun)]| {
            let trend = ("trend.svg".to_owned(), String::new());
            (RENDERER.index)(runs).into_iter().chain([trend]).collect()
        };
        save(root.path(), run(11), Renderer { index: with_trend, ..RENDERER }).unwrap_err();
        assert_eq!(index(root.path()), before);
        assert!(save_index(root.path(), RENDERER).unwrap().is_empty());
        assert_eq!(index(root.path()), "nightly/2026-11-10-sim\nnightly/2026-11-11-sim\n");
    }

    #[test]
    fn a_run_rendered_again_keeps_its_record() {
        let root = root([10, 11]);
        let runs = load(root.path()).unwrap().whole;
        let (folder, run) = &runs[1];
        let folder = root.path().join(folder);
        let before = fs::read(folder.join(RECORD)).unwrap();
        fs::write(folder.join("report.md"), "spoiled").unwrap();
        render_again(&folder, run, &runs, RENDERER).unwrap();
        assert_eq!(fs::read_to_string(folder.join("report.md")).unwrap(), "2026-11-11T02:00:00Z after 1");
        assert_eq!(fs::read(folder.join(RECORD)).unwrap(), before);
    }
}
