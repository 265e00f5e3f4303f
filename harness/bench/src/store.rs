//! Files of benchmark runs. Each run has a folder below `nightly` with its record, report and
//! pictures; the index of all runs is next to `nightly`. Callers render the contents.
//!
//! Runs and the index are replaced atomically, so a kill or a full disk leaves no partial file. If
//! the program is killed between a run and the index, the next run repairs the index.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use harness_allocator::device::Clock;

use super::compare;
use super::record::{BENCH_VERSION, BenchRun};
use harness_base::files::{self, DocumentKind, Folder, StoreError, slug};

pub const DEFAULT_ROOT: &str = "reports";

/// Default location of runs without the accepted build, relative to the root. They are not for a
/// repository.
pub const UNJUDGED: &str = "runs/bench";

pub const NIGHTLY: &str = "nightly";

pub const INDEX: &str = "README.md";

pub const REPORT: &str = "report.md";

/// The file that everything else is rendered from.
pub const RECORD: &str = DocumentKind::BENCHMARK.file_name;

/// Files by name and content. A linked file precedes the file that links to it.
pub type Files = Vec<(String, String)>;

#[derive(Clone, Copy, Debug)]
pub struct Renderer {
    /// Renders a run, given earlier runs on its device, oldest first.
    pub run: fn(&BenchRun, &[&BenchRun]) -> Files,
    /// Renders all runs, oldest first, with their folders relative to the index.
    pub index: fn(&[(String, BenchRun)]) -> Files,
}

pub fn is_of_benchmark(path: &Path) -> bool {
    if path.is_dir() {
        path.join(RECORD).is_file()
    } else {
        path.file_name().is_some_and(|name| name == RECORD)
    }
}

#[derive(Debug, Default)]
pub struct Runs {
    /// Readable runs, oldest first, with their folders relative to the root.
    pub whole: Vec<(String, BenchRun)>,
    pub broken: Vec<StoreError>,
}

#[derive(Debug)]
pub struct Saved {
    pub folder: PathBuf,
    /// Includes the comparison.
    pub run: BenchRun,
    /// Unreadable runs, absent from comparison and index.
    pub broken: Vec<StoreError>,
}

/// Checks before a run that it can be saved in `root`. Fails with [`StoreError::Unwritable`],
/// [`StoreError::DiskFull`]; [`StoreError::Foreign`] if another program's file has the index's
/// name.
pub fn check_root(root: &Path) -> Result<(), StoreError> {
    files::check_ours(root, INDEX, NIGHTLY, DocumentKind::BENCHMARK)?;
    files::check_writable(&root.join(NIGHTLY), DocumentKind::BENCHMARK)?;
    files::check_writable(root, DocumentKind::BENCHMARK)
}

pub fn check_folder(folder: &Path) -> Result<(), StoreError> {
    files::check_ours(folder, REPORT, RECORD, DocumentKind::BENCHMARK)?;
    files::check_writable(folder, DocumentKind::BENCHMARK)
}

/// Compares a run with the accepted build and the runs in `root`, renders it into a new folder, and
/// updates the index.
pub fn save(root: &Path, mut run: BenchRun, renderer: Renderer) -> Result<Saved, StoreError> {
    files::check_ours(root, INDEX, NIGHTLY, DocumentKind::BENCHMARK)?;
    let place = Folder::open(root, DocumentKind::BENCHMARK)?;
    let nightly = root.join(NIGHTLY);
    let runs = Folder::open(&nightly, DocumentKind::BENCHMARK)?;
    let Runs { mut whole, broken } = load(root)?;
    run.comparison = compare::compare(
        &run,
        &whole.iter().map(|(_, run)| run).collect::<Vec<_>>(),
        None,
    );
    let folder = runs.add(&files_of(&run, &whole, renderer), |nightly| {
        free_name(nightly, &run)
    })?;
    let name = folder
        .file_name()
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    whole.push((format!("{NIGHTLY}/{name}"), run.clone()));
    in_order(&mut whole);
    place.replace(&(renderer.index)(&whole))?;
    Ok(Saved {
        folder,
        run,
        broken,
    })
}

/// Compares a run with the accepted build only, and replaces the run in this folder.
pub fn save_into(
    folder: &Path,
    mut run: BenchRun,
    renderer: Renderer,
) -> Result<BenchRun, StoreError> {
    files::check_ours(folder, REPORT, RECORD, DocumentKind::BENCHMARK)?;
    run.comparison = compare::compare(&run, &[], None);
    Folder::open(folder, DocumentKind::BENCHMARK)?.replace(&files_of(&run, &[], renderer))?;
    Ok(run)
}

/// Renders a run again from its record; other files stay.
pub fn render_again(
    folder: &Path,
    run: &BenchRun,
    others: &[(String, BenchRun)],
    renderer: Renderer,
) -> Result<(), StoreError> {
    // The record, which is the first file, is unchanged.
    Folder::open(folder, DocumentKind::BENCHMARK)?.replace(&files_of(run, others, renderer)[1..])
}

/// Writes the index again, and returns the unreadable runs.
pub fn save_index(root: &Path, renderer: Renderer) -> Result<Vec<StoreError>, StoreError> {
    files::check_ours(root, INDEX, NIGHTLY, DocumentKind::BENCHMARK)?;
    let place = Folder::open(root, DocumentKind::BENCHMARK)?;
    let Runs { whole, broken } = load(root)?;
    place.replace(&(renderer.index)(&whole))?;
    Ok(broken)
}

pub fn write(file: &Path, run: &BenchRun) -> Result<(), StoreError> {
    write_text(file, document(run))
}

pub fn write_text(file: &Path, text: String) -> Result<(), StoreError> {
    files::write(file, text)
        .map_err(|source| StoreError::writing(DocumentKind::BENCHMARK, file, source))
}

/// Reads all runs; a missing root has no runs.
/// Fails with [`StoreError::Unreadable`]: the folder of runs itself cannot be read.
pub fn load(root: &Path) -> Result<Runs, StoreError> {
    let nightly = root.join(NIGHTLY);
    let unreadable = |source| StoreError::Unreadable {
        path: nightly.clone(),
        source,
    };
    let mut runs = Runs::default();
    let entries = match fs::read_dir(&nightly) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(runs),
        entries => entries.map_err(unreadable)?,
    };
    let mut names = entries
        .map(|entry| entry.map(|entry| entry.file_name()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(unreadable)?;
    names.sort();
    // Skips remains of killed processes and unrelated files.
    let names = names
        .iter()
        .filter_map(|name| name.to_str())
        .filter(|name| !name.starts_with('.'));
    for name in names.filter(|name| nightly.join(name).join(RECORD).exists()) {
        match read(&nightly.join(name)) {
            Ok(run) => runs.whole.push((format!("{NIGHTLY}/{name}"), run)),
            Err(error) => runs.broken.push(error),
        }
    }
    in_order(&mut runs.whole);
    Ok(runs)
}

pub fn read(path: &Path) -> Result<BenchRun, StoreError> {
    files::read(path, DocumentKind::BENCHMARK, BENCH_VERSION)
}

/// The record first, because the report links to it.
fn files_of(run: &BenchRun, others: &[(String, BenchRun)], renderer: Renderer) -> Files {
    let is_earlier = |other: &&BenchRun| {
        other.started < run.started
            && other.shard == run.shard
            && other.machine.is_same_device(&run.machine)
    };
    let earlier: Vec<&BenchRun> = others
        .iter()
        .map(|(_, other)| other)
        .filter(is_earlier)
        .collect();
    let record = (RECORD.to_owned(), document(run));
    [record]
        .into_iter()
        .chain((renderer.run)(run, &earlier))
        .collect()
}

/// One line per suite, so line-based diffs work.
fn document(run: &BenchRun) -> String {
    let suites: Vec<String> = run.suites.iter().map(to_json).collect();
    let whole = to_json(&BenchRun {
        suites: Vec::new(),
        ..run.clone()
    });
    whole.replacen(
        "\"suites\":[]",
        &format!("\"suites\":[\n{}\n]", suites.join(",\n")),
        1,
    ) + "\n"
}

fn to_json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value)
        .expect("a record is plain data with text keys, so it has a JSON form")
}

fn in_order(runs: &mut [(String, BenchRun)]) {
    runs.sort_by(|(folder_a, a), (folder_b, b)| {
        (&a.started, folder_a).cmp(&(&b.started, folder_b))
    });
}

/// `2026-11-20-nvidia-h200`, with a number appended if that exists.
fn free_name(nightly: &Path, run: &BenchRun) -> io::Result<String> {
    let date = slug(run.started.split('T').next().unwrap_or_default());
    let device = if run.machine.clock == Clock::Simulated {
        "sim".to_owned()
    } else {
        slug(&run.machine.device)
    };
    let shard = run.shard.map_or_else(String::new, |shard| {
        format!("-{}of{}", shard.index, shard.count)
    });
    let plain = format!("{date}-{device}{shard}");
    let names =
        std::iter::once(plain.clone()).chain((2_u32..).map(|number| format!("{plain}-{number}")));
    for name in names {
        if !nightly.join(&name).try_exists()? {
            return Ok(name);
        }
    }
    Err(ErrorKind::AlreadyExists.into())
}

#[cfg(test)]
mod tests;
