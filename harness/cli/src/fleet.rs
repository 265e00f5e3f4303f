//! `harness fleet`: the snapshots of many jobs as one table. Each core analyses one snapshot at a time and appends its row to a file.

mod cloud;

use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::UNIX_EPOCH;
use std::{collections::HashMap, panic};

use clap::{Args, Subcommand};
use harness_allocator::hash::{fnv1a, fnv1a_from};
use harness_allocator::units::Bytes;
use harness_base::parallel::{in_parallel, on_one_core};
use harness_base::{shard::Shard, words::count};
use harness_explain::fleet::{Analysis, Row, job_of};
use harness_report::fleet::{Summary, html, parquet, render};
use harness_trace::snapshot::Snapshot;

use self::cloud::Cloud;
use super::error::{CliError, Failures};
use super::{Format, built, device, exit::Exit, interrupt, snapshots, terminal};

const EXAMPLES: &str = "Examples:
  harness fleet /mnt/snapshots --out fleet
  harness fleet /mnt/snapshots --shard 3/16 --out fleet-3       # one of 16 machines
  harness fleet merge fleet-* --out fleet
  harness fleet s3://bucket/snapshots --out fleet               # also gs:// and az://

The folder of `--out` contains rows.jsonl (one line per snapshot, written as soon as it is analysed), fleet.parquet and fleet.html. Unchanged files are not
analysed again.";

/// Explain the out-of-memory errors of many jobs: causes, lines of code, and changes that a replay confirms, as one table.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct Fleet {
    /// Memory snapshots, and folders with *.pickle, *.pkl, *.pickle.gz and *.pkl.gz files, which are searched with their subfolders.
    /// A folder may be a URL: s3://, gs:// or az://, with credentials and endpoint in the usual variables of the environment.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<String>,
    #[command(flatten)]
    output: Output,
    /// The memory of all devices, as in `80GiB` [default: from each recording].
    #[arg(long, value_name = "SIZE", value_parser = device::memory)]
    memory: Option<Bytes>,
    /// Analyse only part I of N of the snapshots, as in `3/16`. Their names determine the parts.
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Args)]
struct Output {
    /// The folder for the rows, which the next run reads, and for the results.
    #[arg(long, value_name = "FOLDER", default_value = "fleet")]
    out: PathBuf,
    /// The format on standard output.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

#[derive(Subcommand)]
enum Command {
    Merge(Merge),
}

/// Join the rows of several shards into one table.
#[derive(Args)]
struct Merge {
    /// The folders of `--out` of the shards.
    #[arg(value_name = "FOLDER", required = true)]
    folders: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
}

const ROWS: &str = "rows.jsonl";

/// A snapshot that can be analysed.
struct Source {
    /// The path or URL.
    name: String,
    /// Changes when the file does.
    stamp: String,
    /// The number of its bucket, and its bytes. `None` for a local file.
    cloud: Option<(usize, u64)>,
}

impl Fleet {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        if let Some(Command::Merge(merge)) = self.command {
            return merge.run();
        }
        let (mut sources, clouds) = self.sources()?;
        if let Some(shard) = self.shard {
            sources.retain(|source| shard.has(&source.name));
        }
        let made_with = format!("{} {}", built::version(), self.memory.map(|memory| memory.to_string()).unwrap_or_default());
        let known = Known::new(read(&self.output.out)?, &made_with);
        fs::create_dir_all(&self.output.out).map_err(CliError::unwritten(&self.output.out))?;
        let journal = Journal::open(self.output.out.join(ROWS))?;
        let bar = terminal::progress(true, "{wide_bar} {pos}/{len} snapshots", Some(sources.len() as u64));
        let interrupted = interrupt::watch_with(&bar, "snapshots")?;
        let analyse = |source: &Source| {
            if interrupted.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let row = match known.unchanged(source) {
                Some(row) => row,
                None => {
                    let row = self.row(source, &clouds, &known, &made_with);
                    journal.add(&row)?;
                    row
                }
            };
            bar.inc(1);
            Ok::<_, CliError>(Some(row))
        };
        let rows: Vec<Option<Row>> = in_parallel(&sources, analyse)?;
        bar.finish_and_clear();
        if interrupted.load(Ordering::Relaxed) {
            let done = rows.iter().flatten().count();
            let kept = self.output.out.join(ROWS);
            terminal::message(format_args!(
                "{done} of {} are analysed and kept in {}; the same command continues",
                count(rows.len(), "snapshot"),
                kept.display()
            ));
            return Ok(Exit::Interrupted);
        }
        self.output.write(&rows.into_iter().flatten().collect::<Vec<_>>())
    }

    fn sources(&self) -> Result<(Vec<Source>, Vec<Cloud>), CliError> {
        let (mut sources, mut clouds) = (Vec::new(), Vec::new());
        for path in &self.paths {
            let before = sources.len();
            let local = Path::new(path);
            if cloud::is_url(path) {
                let cloud = Cloud::open(path)?;
                sources.extend(cloud.list(clouds.len())?);
                clouds.push(cloud);
            } else if local.is_dir() {
                walk(local, &mut sources)?
            } else {
                sources.push(Source::of(local))
            }
            if sources.len() == before {
                let message = format!("{path}: there is no snapshot in this folder or its subfolders");
                return Err(CliError::input(message, "name a folder with *.pickle, *.pkl, *.pickle.gz or *.pkl.gz files"));
            }
        }
        sources.sort_by(|a, b| a.name.cmp(&b.name));
        sources.dedup_by(|a, b| a.name == b.name);
        Ok((sources, clouds))
    }

    fn row(&self, source: &Source, clouds: &[Cloud], known: &Known, made_with: &str) -> Row {
        let (job, rank) = job_of(&source.name);
        let row =
            Row { file: source.name.clone(), job, rank, stamp: source.stamp.clone(), made_with: made_with.to_owned(), ..Row::default() };
        let read = || {
            let fetched = source.cloud.and_then(|(number, _)| clouds.get(number)).map(|cloud| cloud.fetch(source)).transpose()?;
            let path = fetched.as_ref().map_or(Path::new(&source.name), |file| file.path());
            let hash = hash(path)?;
            let analysis = known.of_content(&hash).unwrap_or_else(|| analyse(path, self.memory));
            Ok::<_, io::Error>((hash, analysis))
        };
        match read() {
            Ok((hash, analysis)) => Row { hash, analysis, ..row },
            Err(error) => Row { analysis: Analysis::unreadable(error.to_string()), ..row },
        }
    }
}

/// A panic is a bug, which costs this row only.
fn analyse(path: &Path, memory: Option<Bytes>) -> Analysis {
    let analyse = || match Snapshot::read(path) {
        Ok(snapshot) => on_one_core(|| Analysis::of(&snapshot, memory)),
        Err(error) => Analysis::unreadable(error.to_string()),
    };
    panic::catch_unwind(analyse).unwrap_or_else(|_| Analysis::unreadable("a bug in harness: report it with this file"))
}

impl Merge {
    fn run(self) -> Result<Exit, Failures> {
        let mut rows = HashMap::new();
        for folder in &self.folders {
            let found = read(folder)?;
            if found.is_empty() {
                let message = format!("{}: there are no rows in this folder", folder.display());
                return Err(CliError::input(message, "name the folders that `harness fleet --shard I/N --out FOLDER` wrote").into());
            }
            rows.extend(found.into_iter().map(|row| (row.file.clone(), row)));
        }
        let mut rows: Vec<Row> = rows.into_values().collect();
        rows.sort_by(|a, b| a.file.cmp(&b.file));
        let lines = rows.iter().map(line).collect::<Result<String, _>>()?;
        terminal::save(&self.output.out.join(ROWS), lines)?;
        self.output.write(&rows)
    }
}

impl Output {
    fn write(&self, rows: &[Row]) -> Result<Exit, Failures> {
        let summary = Summary::of(rows);
        let table = parquet::file(rows).map_err(|error| CliError::internal(error.to_string(), "report this with rows.jsonl"))?;
        terminal::save(&self.out.join("fleet.parquet"), table)?;
        terminal::save(&self.out.join("fleet.html"), html::page(rows, &summary))?;
        let (style, width) = (terminal::style(), terminal::width_of_output());
        self.format.print(&summary, || render(&summary, style, width))?;
        Ok(Exit::Passed)
    }
}

impl Source {
    /// A file that cannot be read fails later, as a row.
    fn of(path: &Path) -> Self {
        let stamp = path.metadata().ok().and_then(|metadata| {
            let modified = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
            Some(format!("{} {}", metadata.len(), modified.as_nanos()))
        });
        Self { name: path.display().to_string(), stamp: stamp.unwrap_or_default(), cloud: None }
    }
}

/// Finds the snapshots of a folder and its subfolders. Does not follow links to folders.
fn walk(folder: &Path, sources: &mut Vec<Source>) -> Result<(), CliError> {
    let unreadable = |error: io::Error| {
        CliError::input(
            format!("{}: the folder cannot be read: {error}", folder.display()),
            "make the folder readable, or name other folders",
        )
    };
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        if entry.file_type().map_err(unreadable)?.is_dir() {
            walk(&path, sources)?;
        } else if snapshots::is_named_so(&path) {
            sources.push(Source::of(&path));
        }
    }
    Ok(())
}

/// Earlier rows of the same version and options.
struct Known {
    by_file: HashMap<String, Row>,
    by_hash: HashMap<String, Analysis>,
}

impl Known {
    fn new(mut rows: Vec<Row>, made_with: &str) -> Self {
        rows.retain(|row| row.made_with == made_with);
        let by_hash = rows.iter().filter(|row| !row.hash.is_empty()).map(|row| (row.hash.clone(), row.analysis.clone())).collect();
        Self { by_file: rows.into_iter().map(|row| (row.file.clone(), row)).collect(), by_hash }
    }

    fn unchanged(&self, source: &Source) -> Option<Row> {
        self.by_file.get(&source.name).filter(|row| row.stamp == source.stamp && !row.hash.is_empty()).cloned()
    }

    fn of_content(&self, hash: &str) -> Option<Analysis> {
        self.by_hash.get(hash).cloned()
    }
}

/// The rows of a folder, in the order in which they were written. Ignores an unfinished last line. Empty without the file.
fn read(folder: &Path) -> Result<Vec<Row>, CliError> {
    let path = folder.join(ROWS);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => {
            Err(CliError::input(format!("{}: {error}", path.display()), "remove the file, or choose another folder with `--out`"))
        }
    }
}

fn line(row: &Row) -> Result<String, CliError> {
    let line = serde_json::to_string(row).map_err(|error| CliError::internal(error.to_string(), "report this with the snapshot"))?;
    Ok(line + "\n")
}

/// The file of the rows. A killed process loses no row.
struct Journal {
    path: PathBuf,
    file: Mutex<File>,
}

impl Journal {
    fn open(path: PathBuf) -> Result<Self, CliError> {
        let open = || {
            let mut file = File::options().read(true).append(true).create(true).open(&path)?;
            let mut text = Vec::new();
            file.read_to_end(&mut text)?;
            // Ends the line of a process that was killed while it wrote.
            if text.last().is_some_and(|&last| last != b'\n') {
                file.write_all(b"\n")?;
            }
            Ok(file)
        };
        let file = Mutex::new(open().map_err(CliError::unwritten(&path))?);
        Ok(Self { path, file })
    }

    fn add(&self, row: &Row) -> Result<(), CliError> {
        let line = line(row)?;
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.write_all(line.as_bytes()).map_err(CliError::unwritten(&self.path))
    }
}

/// A hash of the content and its length. Does not resist attacks, but a wrong row harms only the attacker's.
fn hash(path: &Path) -> io::Result<String> {
    let (mut file, mut buffer) = (File::open(path)?, vec![0; 1 << 18]);
    let (mut hash, mut length) = (fnv1a(&[]), 0_u64);
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(format!("{hash:016x}-{length}"));
        }
        hash = fnv1a_from(hash, &buffer[..read]);
        length += read as u64;
    }
}
