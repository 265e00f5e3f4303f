use std::path::{Path, PathBuf};

use clap::Args;
use harness_base::shell::quoted;
use harness_bench::store as benchmarks;
use harness_explain::causes::{self, Explanation, Options};
use harness_explain::compare::{self, Side, Whole};
use harness_explain::state::{At, History};
use harness_report::{explain::text, store as runs};
use harness_trace::snapshot::Snapshot;

use super::error::{CliError, Failures};
use super::{Format, exit::Exit, jobs, snapshots, terminal};

const EXAMPLES: &str = "Examples:
  harness compare before.pickle after.pickle
  harness compare before.pickle after.pickle --at end --format json | jq '.sites[:5]'

Two benchmark runs are compared by `harness report compare`.";

/// Compare two memory snapshots, for example before and after an upgrade: memory growth by site and
/// by cause.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Compare {
    /// The memory snapshot of the program before the change.
    #[arg(value_name = "BEFORE")]
    before: PathBuf,
    /// The memory snapshot of the program after the change.
    #[arg(value_name = "AFTER")]
    after: PathBuf,
    /// The moment at which causes and sites are compared.
    #[arg(long, value_name = "MOMENT", default_value = "peak")]
    at: MomentName,
    /// The index of the device.
    #[arg(long, value_name = "N", default_value_t = 0)]
    device: u32,
    /// The output format.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
}

/// A moment that every snapshot has.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum MomentName {
    /// The peak of allocated memory; for a snapshot without events, the end.
    Peak,
    /// The moment of the snapshot.
    End,
}

const fn side((explanation, whole): &(Explanation, Option<Whole>)) -> Side<'_> {
    Side {
        explanation,
        whole: *whole,
    }
}

impl Compare {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        self.refuse_records()?;
        let files = [self.before.clone(), self.after.clone()];
        let (sides, failures) = Failures::split(snapshots::each(&files, |path| {
            self.read(path, &snapshots::read(path)?)
        }));
        let [before, after] = sides.as_slice() else {
            return Err(Failures(failures));
        };
        let comparison = compare::compare(side(before), side(after));
        let [before, after] = files.each_ref().map(|file| file.display().to_string());
        let (style, width) = (terminal::style(), terminal::width_of_output());
        self.format.print(&comparison, || {
            text::render_comparison([&before, &after], &comparison, style, width)
        })?;
        Ok(Exit::Passed)
    }

    /// Rejects the records of runs and benchmark runs, and names the command that compares them.
    fn refuse_records(&self) -> Result<(), CliError> {
        let Self { before, after, .. } = self;
        let what = |path: &Path| match path {
            path if runs::is_of_run(path) => Some("a run"),
            path if benchmarks::is_of_benchmark(path) => Some("a benchmark run"),
            _ => None,
        };
        let Some((path, what)) = [before, after]
            .into_iter()
            .find_map(|path| Some((path, what(path)?)))
        else {
            return Ok(());
        };
        let [base, new] = [before, after].map(|path| quoted(&path.to_string_lossy()));
        let help = format!(
            "`harness report compare {base} {new}` compares two runs or two benchmark runs"
        );
        Err(CliError::input(
            format!(
                "{}: this is the record of {what}, not a memory snapshot",
                path.display()
            ),
            help,
        ))
    }

    fn read(
        &self,
        path: &Path,
        snapshot: &Snapshot,
    ) -> Result<(Explanation, Option<Whole>), CliError> {
        let invalid = |message: String, help: &str| {
            CliError::input(format!("{}: {message}", path.display()), help)
        };
        jobs::check_device(path, "device", self.device, &jobs::devices(path, snapshot)?)?;
        let has_events = snapshot
            .traces
            .get(self.device as usize)
            .is_some_and(|events| !events.is_empty());
        let at = if self.at == MomentName::Peak && has_events {
            At::Peak
        } else {
            At::End
        };
        let explanation = causes::explain(snapshot, self.device, Options { memory: None, at })
            .map_err(|error| invalid(error.to_string(), "choose another `--at`"))?;
        let history = History::new(snapshot, self.device, causes::config(snapshot));
        Ok((explanation, Whole::of(&history)))
    }
}
