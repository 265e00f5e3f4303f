//! `harness report`: nights of benchmarks that are there already, compared, merged, rendered and thinned.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use harness_base::files::StoreError;
use harness_bench::compare::{self, CompareError, Terms};
use harness_bench::record::{Change, Comparison, NightRecord};
use harness_bench::verdict::{self, Counts};
use harness_bench::{merge, nights};
use harness_report::{night, store};
use serde::Serialize;

use super::error::{CliError, Failures};
use super::exit::{self, Exit};
use super::{Format, runs, terminal};

const EXAMPLES: &str = "Examples:
  harness report compare reports/nightly/2026-11-19-sim reports/nightly/2026-11-20-sim
  harness report compare old/night.json new/night.json --across --format json
  harness report merge shard-1/night.json shard-2/night.json -o reports/nightly/2026-11-20-h200/night.json
  harness report render reports/nightly/*
  harness report index
  harness report trim --keep 30";

/// How nights are rendered.
pub(super) const RENDERER: nights::Renderer = nights::Renderer { night: night::render, index: night::index };

/// How many of the most important changes JSON repeats apart.
const MOST_IMPORTANT: usize = 3;

/// Compare, merge and render nights of benchmarks.
#[derive(Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::explained()), arg_required_else_help = true)]
pub(super) struct Report {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Compare(Compare),
    Merge(Merge),
    Render(Render),
    Index(Index),
    Trim(Trim),
}

impl Report {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        match self.command {
            Command::Compare(command) => command.run(),
            Command::Merge(command) => command.run(),
            Command::Render(command) => command.run(),
            Command::Index(command) => command.run(),
            Command::Trim(command) => command.run(),
        }
    }
}

/// Compare two nights; exit code 1 where something became worse or broke.
///
/// A change is flagged where it is significant (p below 0.01, corrected for the number of entries), beyond what two nights of one build
/// differ by, and larger than the suite's threshold, also against what all allocators of the suite changed by together, which the machine or
/// code that they share did: that is told, and no entry flagged for it. Where the new night lies among others, these tell by how much nights differ.
#[derive(Args)]
#[command(after_help = "Examples:
  harness report compare reports/nightly/2026-11-19-sim reports/nightly/2026-11-20-sim
  harness report compare old/night.json new/night.json --format json | jq .counts")]
struct Compare {
    /// The earlier night: its folder, or its `night.json`.
    base: PathBuf,
    /// The later one.
    new: PathBuf,
    /// Compare nights of different machines, too; what differs is then said.
    #[arg(long)]
    across: bool,
    /// What to print.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

impl Compare {
    fn run(self) -> Result<Exit, Failures> {
        if store::is_of_run(&self.base) && store::is_of_run(&self.new) {
            return runs::compare(&self.base, &self.new, self.format);
        }
        let (base, new) = match (nights::read(&self.base), nights::read(&self.new)) {
            (Ok(base), Ok(new)) => (base, new),
            (base, new) => return Err(Failures([base.err(), new.err()].into_iter().flatten().map(CliError::from).collect())),
        };
        // What is wrong with another night is no reason not to compare these two.
        let others = root_of(&self.new).map(|root| nights::load(&root).unwrap_or_default()).unwrap_or_default();
        let earlier: Vec<&NightRecord> = others.whole.iter().map(|(_, night)| night).collect();
        let terms = Terms { across: self.across, earlier: &earlier, seed: new.seed };
        let comparison = compare::compare(&base, &new, terms)?;
        match self.format {
            Format::Text => terminal::print(&night::comparison(&comparison, &base, &new))?,
            Format::Json => terminal::print_json(&Document::of(&comparison, &base, &new))?,
        }
        Ok(if Counts::of(&comparison.changes).is_regression() { Exit::Failed } else { Exit::Passed })
    }
}

/// A comparison for programs.
#[derive(Serialize)]
struct Document<'a> {
    counts: Counts,
    /// The first ones by importance.
    most_important: Vec<&'a Change>,
    /// Why measured times were not flagged, by night.
    base_contended: &'a [String],
    new_contended: &'a [String],
    comparison: &'a Comparison,
}

impl<'a> Document<'a> {
    fn of(comparison: &'a Comparison, base: &'a NightRecord, new: &'a NightRecord) -> Self {
        let mut most_important = verdict::by_importance(comparison);
        most_important.truncate(MOST_IMPORTANT);
        Self {
            counts: Counts::of(&comparison.changes),
            most_important,
            base_contended: &base.conditions.contended,
            new_contended: &new.conditions.contended,
            comparison,
        }
    }
}

/// Put shards of one night together.
///
/// They must be of one build, one seed and one kind of machine. An entry that two of them measured, a shard that is there twice, and one
/// that is missing are errors.
#[derive(Args)]
#[command(after_help = "Examples:
  harness report merge shards/*/night.json -o night.json
  harness report merge 1.json 3.json -o night.json --allow-missing")]
struct Merge {
    /// The shards: their `night.json` files, or the folders of these.
    #[arg(required = true, value_name = "SHARD")]
    shards: Vec<PathBuf>,
    /// Where to write the night.
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Merge where shards are missing, too. The night says which, and is no baseline for later ones.
    #[arg(long)]
    allow_missing: bool,
}

impl Merge {
    fn run(self) -> Result<Exit, Failures> {
        let (mut shards, mut failures) = (Vec::new(), Vec::new());
        for path in &self.shards {
            match nights::read(path) {
                Ok(night) => shards.push(night),
                Err(error) => failures.push(error.into()),
            }
        }
        if !failures.is_empty() {
            return Err(Failures(failures));
        }
        self.check_output()?;
        let night = merge::merge(&shards, self.allow_missing)
            .map_err(|error| CliError::input(error.to_string(), "shards come from `harness bench --shard I/N` with the same N and seed"))?;
        nights::write(&self.output, &night)?;
        terminal::print(&format!("night: {}\n", self.output.display()))?;
        Ok(Exit::Passed)
    }

    /// A shard that the night took the place of could not be merged again.
    fn check_output(&self) -> Result<(), CliError> {
        let Ok(output) = self.output.canonicalize() else { return Ok(()) };
        let record = |shard: &Path| if shard.is_dir() { shard.join(nights::NIGHT) } else { shard.to_owned() };
        let is_output = |shard: &&PathBuf| record(shard).canonicalize().is_ok_and(|shard| shard == output);
        match self.shards.iter().find(is_output) {
            None => Ok(()),
            Some(shard) => {
                let message = format!("{}: this is one of the shards, {}: nothing was written", self.output.display(), shard.display());
                Err(CliError::input(message, "choose another place for the night with `-o FILE`"))
            }
        }
    }
}

/// Render the reports and pictures of nights anew from their records, each in its own folder.
///
/// Trends are drawn from the nights of the same machine beside it. What cannot be read is told, and the others are rendered.
#[derive(Args)]
#[command(after_help = "Example:\n  harness report render reports/nightly/*")]
struct Render {
    /// The nights: their folders, or the `night.json` in these.
    #[arg(required = true, value_name = "NIGHT")]
    nights: Vec<PathBuf>,
}

impl Render {
    fn run(self) -> Result<Exit, Failures> {
        let mut failures: Vec<CliError> = Vec::new();
        for path in &self.nights {
            if store::is_of_run(path) {
                failures.extend(runs::render(path).err());
                continue;
            }
            let folder = folder_of(path);
            match render(folder) {
                Ok(()) => terminal::print(&format!("report: {}\n", folder.join(nights::REPORT).display()))?,
                Err(error) => failures.push(error.into()),
            }
        }
        if failures.is_empty() { Ok(Exit::Passed) } else { Err(Failures(failures)) }
    }
}

/// The folder of a night that is named by its folder or by the record in it.
fn folder_of(night: &Path) -> &Path {
    match night.parent() {
        Some(folder) if night.ends_with(nights::NIGHT) && night.is_file() => {
            if folder == Path::new("") {
                Path::new(".")
            } else {
                folder
            }
        }
        _ => night,
    }
}

fn render(folder: &Path) -> Result<(), StoreError> {
    let night = nights::read(&folder.join(nights::NIGHT))?;
    let others = root_of(folder).map(|root| nights::load(&root)).transpose()?.unwrap_or_default();
    nights::render_again(folder, &night, &others.whole, RENDERER)
}

/// Write the index of all nights anew. Nights that cannot be read are told, and left out.
#[derive(Args)]
#[command(after_help = "Examples:\n  harness report index\n  harness report index /srv/reports")]
struct Index {
    /// The folder that the index is written to, with the nights in `nightly` below.
    #[arg(default_value = nights::DEFAULT_ROOT, value_name = "ROOT")]
    root: PathBuf,
}

impl Index {
    fn run(self) -> Result<Exit, Failures> {
        check_root(&self.root)?;
        let broken = nights::save_index(&self.root, RENDERER)?;
        terminal::print(&format!("index: {}\n", self.root.join(nights::INDEX).display()))?;
        unless_broken(broken)
    }
}

/// Keep the last nights of each machine in full, and of older ones only medians.
///
/// Reports and pictures stay. The last night that may be a baseline is kept in full, too. May be stopped at any point, and done again.
#[derive(Args)]
#[command(after_help = "Examples:\n  harness report trim --keep 30\n  harness report trim --keep 30 /srv/reports")]
struct Trim {
    /// How many nights of each machine to keep in full.
    #[arg(long, value_name = "N")]
    keep: usize,
    /// The folder with the nights in `nightly` below.
    #[arg(default_value = nights::DEFAULT_ROOT, value_name = "ROOT")]
    root: PathBuf,
}

impl Trim {
    fn run(self) -> Result<Exit, Failures> {
        check_root(&self.root)?;
        let (thinned, broken) = nights::thin(&self.root, self.keep)?;
        for folder in thinned {
            terminal::print(&format!("medians only: {}\n", self.root.join(folder).display()))?;
        }
        unless_broken(broken)
    }
}

/// A root that is not there, or one that is too deep, is a slip of the pen: nothing is made of it.
fn check_root(root: &Path) -> Result<(), CliError> {
    const HELP: &str = "name the folder that `harness bench --reports DIR` saves nights below";
    if !root.is_dir() {
        let why = if root.exists() { "this is no folder" } else { "there is no such folder" };
        return Err(CliError::input(format!("{}: {why}", root.display()), HELP));
    }
    let Some(above) = too_deep(root) else { return Ok(()) };
    let message = format!("{}: nights are looked for in the folder `{}` below the one named", root.display(), nights::NIGHTLY);
    Err(CliError::input(message, format!("name the folder above: {}", above.display())))
}

/// The root that was meant where the folder of all nights is named instead, or that of one night in it.
fn too_deep(root: &Path) -> Option<PathBuf> {
    if root.join(nights::NIGHTLY).is_dir() {
        return None;
    }
    let here = root.canonicalize().ok()?;
    let above = if here.ends_with(nights::NIGHTLY) { here.parent()?.to_owned() } else { root_of(&here.join(nights::NIGHT))? };
    // As the user would write it, where that is the same.
    let written = root.ancestors().find(|ancestor| ancestor.canonicalize().is_ok_and(|ancestor| ancestor == above));
    Some(written.map_or(above, Path::to_owned))
}

fn unless_broken(broken: Vec<StoreError>) -> Result<Exit, Failures> {
    if broken.is_empty() { Ok(Exit::Passed) } else { Err(Failures(broken.into_iter().map(CliError::from).collect())) }
}

/// The root that a night's folder, or a file in it, lies in, where it lies in one.
fn root_of(night: &Path) -> Option<PathBuf> {
    let path = night.canonicalize().ok()?;
    let folder = if path.is_dir() { path.as_path() } else { path.parent()? };
    let nightly = folder.parent().filter(|nightly| nightly.ends_with(nights::NIGHTLY))?;
    Some(nightly.parent()?.to_owned())
}

impl From<CompareError> for CliError {
    fn from(error: CompareError) -> Self {
        let CompareError::DifferentMachines { .. } = error;
        Self::input(error.to_string(), "choose a baseline of the same machine, or compare across machines with `--across`")
    }
}
