use std::path::{Path, PathBuf};
use std::process::{Command as Process, Stdio};
use std::time::SystemTime;

use clap::{Args, Subcommand};
use harness_base::{date::Date, shard};
use harness_bench::accepted::{self, AcceptedBuild};
use harness_bench::record::{BenchComparison, Change, Counts};
use harness_bench::{compare, gate, merge, store, suite::Suite};
use harness_exec::trials::merge as parts;
use harness_report::trials::{Trials, text};
use harness_report::{bench, runs, store as scenario_runs};
use serde::Serialize;

use super::error::{CliError, Failures};
use super::exec::matrix;
use super::exit::{self, Exit};
use super::inputs::{self, SUITES};
use super::{Format, arguments, terminal};

const EXAMPLES: &str = "Examples:
  harness report compare reports/nightly/2026-11-19-sim reports/nightly/2026-11-20-sim
  harness report accept --reason \"faster hits\"
  harness report accept v0.2.0
  harness report merge shard-1/benchmark.json shard-2/benchmark.json -o benchmark.json
  harness report render reports/nightly/*
  harness report index";

pub(super) const RENDERER: store::Renderer = store::Renderer {
    run: bench::render,
    index: bench::index,
};

/// The length of `most_important` in JSON.
const MOST_IMPORTANT: usize = 3;

/// Compare, accept, merge and render benchmark runs.
#[derive(Args)]
#[command(
    after_help = format!("{EXAMPLES}\n\n{}", exit::explained()),
    arg_required_else_help = true,
)]
pub(super) struct Report {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Compare(Compare),
    Accept(Accept),
    Merge(Merge),
    Render(Render),
    Index(Index),
}

impl Report {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        match self.command {
            Command::Compare(command) => command.run(),
            Command::Accept(command) => command.run(),
            Command::Merge(command) => command.run(),
            Command::Render(command) => command.run(),
            Command::Index(command) => command.run(),
        }
    }
}

/// Compare the records of two runs. The exit code is 1 if an entry is worse or broken, and 5 if too
/// many entries are unsure.
///
/// Model times and memory are exact, so every difference counts, on all machines. Measured times of
/// different runs count if they differ by 15 % on the same kind of processor. `harness bench
/// --accepted` compares side by side, which is more precise.
#[derive(Args)]
#[command(after_help = "Examples:
  harness report compare reports/nightly/2026-11-19-sim reports/nightly/2026-11-20-sim
  harness report compare old/benchmark.json new/benchmark.json --format json | jq .counts")]
struct Compare {
    /// The earlier run: its folder or its `benchmark.json`.
    base: PathBuf,
    /// The later run.
    new: PathBuf,
    /// The output format.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

impl Compare {
    fn run(self) -> Result<Exit, Failures> {
        if scenario_runs::is_of_run(&self.base) && scenario_runs::is_of_run(&self.new) {
            let (base, new) = Failures::both(
                scenario_runs::read(&self.base),
                scenario_runs::read(&self.new),
            )?;
            let compared = runs::compare(&base, &new);
            self.format.print(&compared, || compared.text.clone())?;
            // A configuration fails that passed before.
            return Ok(if compared.is_worse {
                Exit::Failed
            } else {
                Exit::Passed
            });
        }
        let (base, mut new) = Failures::both(store::read(&self.base), store::read(&self.new))?;
        // The user names the base, so the accepted build of the new run does not count.
        new.accepted.missing = Some("the comparison is between two records".to_owned());
        new.accepted.is_required = false;
        for entry in new.suites.iter_mut().flat_map(|suite| &mut suite.entries) {
            entry.accepted = None;
        }
        new.comparison = compare::compare(&new, &[], Some(&base));
        let counts = Counts::of(
            new.comparison
                .iter()
                .flat_map(|comparison| &comparison.changes),
        );
        let comparison = new.comparison.as_ref();
        let most_important = comparison
            .into_iter()
            .flat_map(compare::by_importance)
            .take(MOST_IMPORTANT)
            .collect();
        self.format.print(
            &Document {
                counts: &counts,
                most_important,
                comparison,
            },
            || bench::comparison(&new),
        )?;
        Ok(match counts.is_regression() || new.has_losses() {
            true => Exit::Failed,
            false if new.inconclusive().is_some() => Exit::Inconclusive,
            false => Exit::Passed,
        })
    }
}

#[derive(Serialize)]
struct Document<'a> {
    counts: &'a Counts,
    most_important: Vec<&'a Change>,
    comparison: Option<&'a BenchComparison>,
}

/// Accept a build. Later runs are compared with it side by side, until another build is accepted.
///
/// The command writes `accepted.json` to the reports folder. Commit that file.
#[derive(Args)]
#[command(after_help = "Examples:
  harness report accept                             # the build of the last run
  harness report accept v0.2.0 --reason \"release\"")]
struct Accept {
    /// A commit, branch or tag of the current repository [default: the commit of the last run].
    commit: Option<String>,
    /// The reason, in a sentence.
    #[arg(long, default_value = "accepted")]
    reason: String,
    /// The folder of the reports.
    #[arg(long, default_value = store::DEFAULT_ROOT, value_name = "ROOT")]
    reports: PathBuf,
}

impl Accept {
    fn run(self) -> Result<Exit, Failures> {
        check_root(&self.reports)?;
        let named = self.commit.as_deref();
        let commit = named.map_or_else(|| last_measured(&self.reports), resolved)?;
        let suites = gate::definitions(&suites_of(&commit)?);
        let build = AcceptedBuild {
            suites,
            commit,
            date: Date::of(SystemTime::now()).to_string(),
            reason: self.reason,
        };
        let file = self.reports.join(accepted::FILE);
        store::write_text(&file, accepted::document(&build)).map_err(CliError::from)?;
        terminal::print(&format!(
            "accepted: {} in {}\n",
            build.commit,
            file.display()
        ))?;
        Ok(Exit::Passed)
    }
}

/// The suites of a commit, which judge later runs. The list is empty if the commit has no such
/// folder.
fn suites_of(commit: &str) -> Result<Vec<Suite>, CliError> {
    let failed = |error: &dyn std::fmt::Display| {
        CliError::input(
            format!("cannot read the suites of {commit}: {error}"),
            "accept a commit whose suites this build can read",
        )
    };
    let folder = tempfile::tempdir().map_err(|error| failed(&error))?;
    let archive = folder.path().join("suites.tar");
    let archived = Process::new("git")
        .args(["archive", "--output"])
        .arg(&archive)
        .args([commit, "scenarios"])
        .stderr(Stdio::null())
        .status();
    if !archived.is_ok_and(|status| status.success()) {
        return Ok(Vec::new());
    }
    let unpacked = Process::new("tar")
        .arg("--extract")
        .arg("--file")
        .arg(&archive)
        .arg("--directory")
        .arg(folder.path())
        .status();
    if !unpacked.is_ok_and(|status| status.success()) {
        return Err(failed(&"tar failed"));
    }
    let suites = folder.path().join(SUITES);
    if !suites.is_dir() {
        return Ok(Vec::new());
    }
    inputs::files(&[suites], "suite")?
        .iter()
        .map(|path| Suite::load(path).map_err(|error| failed(&error)))
        .collect()
}

fn last_measured(root: &Path) -> Result<String, CliError> {
    let mut runs = store::load(root)?.whole;
    runs.extend(store::load(&root.join(store::UNJUDGED))?.whole);
    let Some((folder, last)) = runs
        .iter()
        .max_by(|(_, a), (_, b)| a.started.cmp(&b.started))
    else {
        return Err(CliError::input(
            format!("{}: there is no run yet", root.display()),
            "run `harness bench` first, or name a commit",
        ));
    };
    if let Some(profile) = last.machine.other_profile() {
        let message = format!(
            "{folder}: this run measured a build with the profile `{profile}`, and only one with \
             `dist` can be accepted"
        );
        return Err(CliError::input(
            message,
            "measure with `cargo run --profile dist -- bench`, or name a commit",
        ));
    }
    match (&last.build.commit, last.build.dirty) {
        (Some(commit), Some(false)) => Ok(commit.clone()),
        _ => {
            let message = format!(
                "{folder}: this run measured uncommitted changes or an unknown commit, so its \
                 build cannot be repeated"
            );
            Err(CliError::input(message, "name a commit"))
        }
    }
}

fn resolved(name: &str) -> Result<String, CliError> {
    let revision = format!("{name}^{{commit}}");
    let output = Process::new("git")
        .args([
            "rev-parse",
            "--quiet",
            "--verify",
            "--end-of-options",
            &revision,
        ])
        .output();
    let found = output
        .ok()
        .filter(|output| output.status.success())
        .and_then(|output| String::from_utf8(output.stdout).ok());
    let help = "name a commit, branch or tag of the current repository, as in `harness report \
         accept HEAD`";
    found.map(|hash| hash.trim().to_owned()).ok_or_else(|| {
        CliError::input(
            format!("`{name}` is not a commit of the current repository"),
            help,
        )
    })
}

/// Merge the shards of a run of `harness bench` or `harness exec`.
///
/// The shards must have the same build, seed and kind of device, or be of the same program and
/// options. Missing and repeated shards are errors. Results of `harness exec` are also printed.
#[derive(Args)]
#[command(after_help = "Examples:
  harness report merge 1.json 2.json -o all.json    # of `harness exec --every-fault --shard I/2`
  harness report merge 1.jsonl 2.jsonl -o all.jsonl    # of `harness exec --matrix --shard I/2`
  harness report merge runs.jsonl -o runs.parquet      # of `harness exec --matrix`, for SQL
  harness report merge shards/*/benchmark.json -o benchmark.json
  harness report merge 1.json 3.json -o benchmark.json --allow-missing")]
struct Merge {
    /// The shards: their `benchmark.json` files or the folders of these, results of `harness exec
    /// --format json`, or rows of `harness exec --matrix`.
    #[arg(required = true, value_name = "SHARD")]
    shards: Vec<PathBuf>,
    /// The file for the merged run. If it ends with `.parquet`, rows of `harness exec --matrix`
    /// have this format.
    #[arg(long, short, value_name = "FILE", value_parser = arguments::output())]
    output: PathBuf,
    /// Allow missing shards. The merged run lists them.
    #[arg(long)]
    allow_missing: bool,
}

impl Merge {
    fn run(self) -> Result<Exit, Failures> {
        self.check_output()?;
        if let Some((report, missing)) =
            matrix::merged(&self.shards, &self.output, self.allow_missing)?
        {
            return self.show(Trials::Matrix(&report), missing);
        }
        if matrix::is_parquet(&self.output) {
            let message = format!(
                "{}: only rows of `harness exec --matrix` are written as Parquet",
                self.output.display()
            );
            return Err(CliError::input(message, "choose a file with another ending").into());
        }
        if self.shards.first().is_some_and(|path| trials(path).is_ok()) {
            return self.of_trials();
        }
        let shards = Failures::all(self.shards.iter().map(|path| store::read(path)))?;
        let mut run = merge::merge(&shards, self.allow_missing).map_err(|error| {
            CliError::input(
                error.to_string(),
                "shards come from `harness bench --shard I/N` with the same N and seed",
            )
        })?;
        run.comparison = compare::compare(&run, &[], None);
        store::write(&self.output, &run)?;
        terminal::print(&format!("run: {}\n", self.output.display()))?;
        Ok(Exit::Passed)
    }

    /// Merges results of `harness exec`.
    fn of_trials(self) -> Result<Exit, Failures> {
        let help = "shards come from `harness exec --shard I/N --format json` with the same N, \
             program and options";
        let merged = parts::merge(Failures::all(self.shards.iter().map(|path| trials(path)))?);
        let (report, missing) = merged.map_err(|error| CliError::input(error, help))?;
        if !missing.is_empty() && !self.allow_missing {
            return Err(CliError::input(shard::named(&missing), help).into());
        }
        terminal::save(&self.output, terminal::json(&report)?)?;
        let trials = match &report {
            parts::Report::Faults(report) => Trials::Faults(report, None),
            parts::Report::Least(report) => Trials::Least(report),
            parts::Report::Settings(report) => Trials::Settings(report),
        };
        self.show(
            trials,
            (!missing.is_empty()).then(|| shard::named(&missing)),
        )
    }

    /// Prints a merged report of `harness exec`, and what it lacks.
    fn show(&self, trials: Trials<'_>, missing: Option<String>) -> Result<Exit, Failures> {
        terminal::print(&text(
            trials,
            terminal::style(),
            terminal::width_of_output(),
        ))?;
        missing.iter().for_each(terminal::message);
        Ok(Exit::Passed)
    }

    /// Rejects an output file that would replace a shard.
    fn check_output(&self) -> Result<(), CliError> {
        let Ok(output) = self.output.canonicalize() else {
            return Ok(());
        };
        let record = |shard: &Path| {
            if shard.is_dir() {
                shard.join(store::RECORD)
            } else {
                shard.to_owned()
            }
        };
        let is_output = |shard: &&PathBuf| {
            record(shard)
                .canonicalize()
                .is_ok_and(|shard| shard == output)
        };
        match self.shards.iter().find(is_output) {
            None => Ok(()),
            Some(shard) => {
                let message = format!(
                    "{}: the output would replace the shard {}",
                    self.output.display(),
                    shard.display()
                );
                Err(CliError::input(
                    message,
                    "choose another output with `-o FILE`",
                ))
            }
        }
    }
}

/// Reads a result of `harness exec`.
fn trials(path: &Path) -> Result<parts::Document, CliError> {
    let text = harness_base::files::read_to_string(path).map_err(|error| error.to_string());
    let report = text.and_then(|text| {
        parts::Document::read(&text)
            .map_err(|_| "this is not a result of `harness exec`".to_owned())
    });
    report.map_err(|error| {
        CliError::input(
            format!("{}: {error}", path.display()),
            "name files with the output of `harness exec --format json`",
        )
    })
}

/// Render the reports and pictures of runs from their records, each in its own folder.
///
/// Trends use the runs on the same device in the same parent folder. The command names unreadable
/// runs, and renders the others.
#[derive(Args)]
#[command(after_help = "Example:\n  harness report render reports/nightly/*")]
struct Render {
    /// The runs: their folders or the `benchmark.json` files in these.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
}

impl Render {
    fn run(self) -> Result<Exit, Failures> {
        Failures::all(self.runs.iter().map(|path| render(path))).map(|_| Exit::Passed)
    }
}

fn render(path: &Path) -> Result<(), CliError> {
    let folder = folder_of(path);
    let report = if scenario_runs::is_of_run(path) {
        scenario_runs::render_again(folder)?;
        scenario_runs::REPORT
    } else {
        let run = store::read(&folder.join(store::RECORD))?;
        let others = root_of(folder)
            .map(|root| store::load(&root))
            .transpose()?
            .unwrap_or_default();
        store::render_again(folder, &run, &others.whole, RENDERER)?;
        store::REPORT
    };
    terminal::print(&format!("report: {}\n", folder.join(report).display()))
}

/// The folder of a run, given the folder or its record.
fn folder_of(run: &Path) -> &Path {
    if !run.is_file() || !(run.ends_with(store::RECORD) || scenario_runs::is_of_run(run)) {
        return run;
    }
    run.parent()
        .filter(|folder| *folder != Path::new(""))
        .unwrap_or(Path::new("."))
}

/// Write the index of all runs. The command names unreadable runs, and leaves them out.
#[derive(Args)]
#[command(after_help = "Examples:\n  harness report index\n  harness report index /srv/reports")]
struct Index {
    /// The folder for the index. Its subfolder `nightly` contains the runs.
    #[arg(default_value = store::DEFAULT_ROOT, value_name = "ROOT")]
    root: PathBuf,
}

impl Index {
    fn run(self) -> Result<Exit, Failures> {
        check_root(&self.root)?;
        let broken = store::save_index(&self.root, RENDERER)?;
        terminal::print(&format!(
            "index: {}\n",
            self.root.join(store::INDEX).display()
        ))?;
        Failures::all(broken.into_iter().map(Err::<(), _>)).map(|_| Exit::Passed)
    }
}

fn check_root(root: &Path) -> Result<(), CliError> {
    const HELP: &str = "name the folder of `harness bench --reports DIR`";
    if !root.is_dir() {
        let why = if root.exists() {
            "this is not a folder"
        } else {
            "there is no such folder"
        };
        return Err(CliError::input(format!("{}: {why}", root.display()), HELP));
    }
    let Some(above) = too_deep(root) else {
        return Ok(());
    };
    let message = format!(
        "{}: this folder has no subfolder `{}` with runs",
        root.display(),
        store::NIGHTLY
    );
    Err(CliError::input(
        message,
        format!("name the reports folder: {}", above.display()),
    ))
}

/// The reports folder, if `root` is its subfolder with all runs or with one run.
fn too_deep(root: &Path) -> Option<PathBuf> {
    if root.join(store::NIGHTLY).is_dir() {
        return None;
    }
    let here = root.canonicalize().ok()?;
    let above = if here.ends_with(store::NIGHTLY) {
        here.parent()?.to_owned()
    } else {
        root_of(&here.join(store::RECORD))?
    };
    // Prefer the user's own spelling of the path.
    let written = root.ancestors().find(|ancestor| {
        ancestor
            .canonicalize()
            .is_ok_and(|ancestor| ancestor == above)
    });
    Some(written.map_or(above, Path::to_owned))
}

/// The reports folder that contains this run's folder or a file of it.
fn root_of(run: &Path) -> Option<PathBuf> {
    let path = run.canonicalize().ok()?;
    let folder = if path.is_dir() {
        path.as_path()
    } else {
        path.parent()?
    };
    let nightly = folder
        .parent()
        .filter(|nightly| nightly.ends_with(store::NIGHTLY))?;
    Some(nightly.parent()?.to_owned())
}
