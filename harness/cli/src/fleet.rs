//! `harness fleet`: the snapshots of many jobs as one table. Each core analyses one snapshot at a
//! time and appends its row to a file.

mod cloud;
mod place;
mod rows;
mod sources;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, Subcommand};
use harness_allocator::hash::fnv1a;
use harness_allocator::units::Bytes;
use harness_base::parallel::{in_parallel, on_one_core};
use harness_base::{files, shard::Shard, words::count};
use harness_explain::fleet::{Analysis, FleetOutcome, Row};
use harness_report::fleet::{FleetSummary, html, render};

use self::cloud::Cloud;
use self::place::Place;
use self::rows::{Found, ROWS, Table};
use self::sources::{Source, Sources};
use super::browser::Browser;
use super::error::{CliError, Failures};
use super::journal::{self, Journal};
use super::{Format, arguments, built, exit::Exit, explain::Explain, interrupt, terminal};

const EXAMPLES: &str = "Examples:
  harness fleet /mnt/snapshots --out fleet
  harness fleet /mnt/snapshots --shard 3/16 --out fleet-3       # one of 16 machines
  harness fleet merge fleet-* --out fleet
  harness fleet s3://bucket/snapshots --out s3://bucket/fleet   # also gs:// and az://

The folder of `--out` contains rows.jsonl (one line per snapshot, written as soon as it is
analysed), fleet.parquet and fleet.html. Unchanged files are not analysed again. `merge` refuses a
set of shards from which a row is missing.";

/// Explain the out-of-memory errors of many jobs: causes, lines of code, and changes that a replay
/// confirms, as one table.
#[derive(Args)]
#[command(
    after_help = EXAMPLES,
    arg_required_else_help = true,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
)]
pub(super) struct Fleet {
    /// Memory snapshots, and folders with *.pickle, *.pkl, *.pickle.gz and *.pkl.gz files, which
    /// are searched with their subfolders. A folder may be a URL: s3://, gs:// or az://, with
    /// credentials and endpoint in the usual variables of the environment.
    #[arg(value_name = "PATH", required = true)]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
    /// The memory of all devices, as in `80GiB` [default: from each recording].
    #[arg(long, value_name = "SIZE", value_parser = arguments::memory)]
    memory: Option<Bytes>,
    /// Analyse only part I of N of the snapshots, as in `3/16`. Their names determine the parts.
    #[arg(long, value_name = "I/N")]
    shard: Option<Shard>,
    #[command(subcommand)]
    command: Option<Command>,
}

/// The files of the results in the folder.
const PAGE: &str = "fleet.html";
const COLUMNS: &str = "fleet.parquet";

#[derive(Args)]
struct Output {
    /// The folder for the rows, which the next run reads, and for the results. May be a URL.
    #[arg(long, value_name = "FOLDER", default_value = "fleet")]
    out: PathBuf,
    /// Also write the explanation of each job, as the page of `harness explain` for all its
    /// snapshots, and link it. The snapshots must be local files.
    #[arg(long)]
    pages: bool,
    /// The format on standard output.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
    #[command(flatten)]
    browser: Browser,
}

#[derive(Subcommand)]
enum Command {
    Merge(Merge),
}

/// Join the rows of several shards into one table.
#[derive(Args)]
struct Merge {
    /// The folders of `--out` of the shards. May be URLs.
    #[arg(value_name = "FOLDER", required = true)]
    folders: Vec<PathBuf>,
    #[command(flatten)]
    output: Output,
}

impl Fleet {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        if let Some(Command::Merge(merge)) = self.command {
            return merge.run();
        }
        let Sources { all, clouds } = Sources::find(&self.paths)?;
        let found = Found::by_shard(all.iter().map(|source| &*source.name), self.shard);
        let sources: Vec<Source> = all
            .into_iter()
            .filter(|source| self.shard.is_none_or(|shard| shard.has(&source.name)))
            .collect();
        let memory = self.memory.map(|memory| memory.to_string());
        let made_with = format!("{} {}", built::identity(), memory.unwrap_or_default());
        let place = self.output.place()?;
        let kept = rows::path(&place.folder);
        let known = Known::new(journal::usable(&kept)?, &made_with);
        let journal = Journal::open(&kept)?;
        journal.end_torn_line()?;
        let bar = terminal::progress(
            true,
            "{wide_bar} {pos}/{len} snapshots",
            Some(sources.len() as u64),
        );
        let interrupted = interrupt::watch_with(&bar, "snapshots")?;
        let analyse = |source: &Source| {
            let Some(row) = self.row(source, &clouds, &known, &interrupted) else {
                return Ok(None);
            };
            let row = Row {
                made_with: made_with.clone(),
                ..row
            };
            if known.unchanged(source).is_none() {
                journal.add(&row)?;
                place.keep_rows()?;
            }
            bar.inc(1);
            Ok::<_, CliError>(Some(row))
        };
        let rows: Vec<Option<Row>> = in_parallel(&sources, analyse)?;
        bar.finish_and_clear();
        if interrupted.load(Ordering::Relaxed) {
            place.close()?;
            let done = rows.iter().flatten().count();
            terminal::message(format_args!(
                "{done} of {} are analysed and kept in {}; the same command continues",
                count(rows.len(), "snapshot"),
                place.shown(ROWS)
            ));
            return Ok(Exit::Interrupted);
        }
        let rows = rows.into_iter().flatten().collect();
        let paths = self
            .paths
            .iter()
            .map(|path| sources::name_of(path))
            .collect();
        let table = Table {
            shard: self.shard,
            paths,
            memory: self.memory,
            made_with,
            found,
            rows,
        };
        let paths = sources
            .iter()
            .map(|source| (source.name.as_str(), source.path.as_path()))
            .collect();
        self.output.write(&place, &table, &paths, &interrupted)
    }

    /// Returns `None` after Ctrl-C.
    fn row(
        &self,
        source: &Source,
        clouds: &[Cloud],
        known: &Known,
        interrupted: &AtomicBool,
    ) -> Option<Row> {
        if interrupted.load(Ordering::Relaxed) {
            return None;
        }
        if let Some(row) = known.unchanged(source) {
            return Some(row.clone());
        }
        let row = source.row(
            clouds,
            self.memory,
            |hash| known.by_hash.get(hash).cloned(),
            interrupted,
        );
        // Ctrl-C ends the reading of a file, so its row is none.
        (!interrupted.load(Ordering::Relaxed) || row.analysis.outcome != FleetOutcome::Unreadable)
            .then_some(row)
    }
}

impl Merge {
    fn run(self) -> Result<Exit, Failures> {
        let table = rows::merged(&self.folders, &self.output.out)?;
        let place = self.output.place()?;
        let paths = table
            .rows
            .iter()
            .map(|row| (row.file.as_str(), Path::new(&row.file)))
            .collect();
        self.output
            .write(&place, &table, &paths, &AtomicBool::new(false))
    }
}

impl Output {
    fn place(&self) -> Result<Place, CliError> {
        if self.browser.is_asked_for() && cloud::url(&self.out).is_some() {
            let message = "`--open` opens a page on this machine, and `--out` is a URL";
            return Err(CliError::input(message, "leave out `--open`"));
        }
        let place = Place::open(&self.out)?;
        for file in [PAGE, COLUMNS].map(|name| place.folder.join(name)) {
            files::check_output(&file).map_err(CliError::unwritten(&file))?;
        }
        Ok(place)
    }

    /// `paths`: the path of each row's file.
    fn write(
        &self,
        place: &Place,
        table: &Table,
        paths: &HashMap<&str, &Path>,
        interrupted: &AtomicBool,
    ) -> Result<Exit, Failures> {
        let Table { rows, memory, .. } = table;
        let summary = FleetSummary::of(rows);
        terminal::save(&rows::path(&place.folder), table.document()?)?;
        let links = if self.pages {
            self.explain(&place.folder, rows, *memory, paths, interrupted)
        } else {
            BTreeMap::new()
        };
        if interrupted.load(Ordering::Relaxed) {
            place.close()?;
            terminal::message(
                "all snapshots are analysed and kept; the same command writes the pages",
            );
            return Ok(Exit::Interrupted);
        }
        let page = place.folder.join(PAGE);
        write_columns(&place.folder.join(COLUMNS), rows)?;
        terminal::save(&page, html::page(rows, &summary, &links))?;
        place.close()?;
        let (style, width) = (terminal::style(), terminal::width_of_output());
        let shown = format!("page: {}", place.shown(PAGE));
        if self.format == Format::Json {
            terminal::message(&shown);
        }
        self.format.print(&summary, || {
            format!("{}\n{shown}\n", render(&summary, style, width))
        })?;
        self.browser.show(&page);
        Ok(Exit::Passed)
    }

    /// Writes the page of each job with a readable snapshot, until Ctrl-C. Returns the link of each
    /// page by its job.
    fn explain(
        &self,
        folder: &Path,
        rows: &[Row],
        memory: Option<Bytes>,
        paths: &HashMap<&str, &Path>,
        interrupted: &AtomicBool,
    ) -> BTreeMap<String, String> {
        let mut jobs: BTreeMap<&str, Vec<PathBuf>> = BTreeMap::new();
        for row in rows
            .iter()
            .filter(|row| row.analysis.outcome != FleetOutcome::Unreadable)
        {
            jobs.entry(&row.job)
                .or_default()
                .extend(paths.get(row.file.as_str()).map(|path| path.to_path_buf()));
        }
        let jobs: Vec<(&str, Vec<PathBuf>)> = jobs.into_iter().collect();
        let bar = terminal::progress(
            true,
            "{wide_bar} {pos}/{len} pages",
            Some(jobs.len() as u64),
        );
        let write = |(job, paths): &(&str, Vec<PathBuf>)| {
            if interrupted.load(Ordering::Relaxed) {
                return Ok(Ok(None));
            }
            // The hash keeps jobs apart whose names differ in other characters only.
            let link = format!(
                "pages/{}-{:08x}.html",
                files::slug(job),
                fnv1a(job.as_bytes()) & 0xffff_ffff
            );
            let written = on_one_core(|| Explain::page(paths.clone(), memory, folder.join(&link)));
            bar.inc(1);
            Ok::<_, std::convert::Infallible>(written.map(|()| Some(((*job).to_owned(), link))))
        };
        let Ok(written) = in_parallel(&jobs, write);
        bar.finish_and_clear();
        let without = written.iter().filter(|written| written.is_err()).count();
        if let Some(first) = written
            .iter()
            .filter_map(|written| written.as_ref().err()?.0.first())
            .next()
        {
            terminal::message(format_args!(
                "{} of {} without a page: {first}",
                count(without, "job"),
                jobs.len()
            ));
        }
        written.into_iter().flatten().flatten().collect()
    }
}

#[cfg(feature = "parquet")]
fn write_columns(file: &Path, rows: &[Row]) -> Result<(), CliError> {
    let columns = harness_report::fleet::parquet::file(rows);
    let columns = columns
        .map_err(|error| CliError::internal(error.to_string(), "report this with rows.jsonl"))?;
    terminal::save(file, columns)
}

#[cfg(not(feature = "parquet"))]
fn write_columns(file: &Path, _: &[Row]) -> Result<(), CliError> {
    let state = if file.exists() {
        "is from an earlier run"
    } else {
        "is not written"
    };
    let help = super::error::with_feature("parquet");
    terminal::message(format_args!(
        "{COLUMNS} {state}: this harness is built without Parquet; {help}"
    ));
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
        let by_hash = rows
            .iter()
            .filter(|row| !row.hash.is_empty())
            .map(|row| (row.hash.clone(), row.analysis.clone()))
            .collect();
        Self {
            by_file: rows
                .into_iter()
                .map(|row| (row.file.clone(), row))
                .collect(),
            by_hash,
        }
    }

    fn unchanged(&self, source: &Source) -> Option<&Row> {
        self.by_file
            .get(&source.name)
            .filter(|row| row.stamp == source.stamp && !row.stamp.is_empty())
    }
}
