//! `harness demo`: what the program answers, on recordings that are part of it.

use std::path::{Path, PathBuf};

use clap::Args;
use harness_base::shell::quoted;
use harness_exec::trials::faults::{FaultReport, RecoveryExpectation};
use harness_explain::causes::{self, Options};
use harness_explain::fleet::Analysis;
use harness_report::explain::text;
use harness_report::trials::{self, Trials};
use harness_trace::snapshot::Snapshot;

use super::browser::Browser;
use super::error::{CliError, Failures};
use super::{exit::Exit, explain::Explain, program, snapshots, terminal};

const EXAMPLES: &str = "Examples:
  harness demo
  harness demo --open
  harness demo --out /tmp/demo";

/// A memory snapshot that PyTorch 2.11 wrote when memory ran out.
const SNAPSHOT: &[u8] =
    include_bytes!("../../snapshot/explain/tests/snapshots/kept-features.pickle.gz");
const SNAPSHOT_NAME: &str = "oom.pickle.gz";
const PAGE_NAME: &str = "oom.html";

/// The program that runs out of memory in the second part, and the recording of its failures.
const PROGRAM: &str = include_str!("../tests/programs/broken_recovery.py");
const PROGRAM_NAME: &str = "broken_recovery.py";
const RECOVERY: &str = include_str!("demo/broken_recovery.json");

/// Explain a recorded out-of-memory error and show a program that does not survive one, without
/// torch, a GPU or a network.
///
/// The folder of `--out` gets the snapshot, its page, and the program.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Demo {
    /// The folder for the files.
    #[arg(long, value_name = "FOLDER", default_value = "harness-demo")]
    out: PathBuf,
    #[command(flatten)]
    browser: Browser,
}

impl Demo {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let [snapshot, page, program] =
            [SNAPSHOT_NAME, PAGE_NAME, PROGRAM_NAME].map(|name| self.out.join(name));
        std::fs::create_dir_all(&self.out).map_err(CliError::unwritten(&self.out))?;
        terminal::save(&snapshot, SNAPSHOT)?;
        terminal::save(&program, PROGRAM)?;
        Explain::page(vec![snapshot.clone()], None, page.clone())?;
        terminal::print(&explained(&snapshot, &page)?)?;
        terminal::print(&tested(&program)?)?;
        terminal::print(&next_commands())?;
        self.browser.show(&page);
        Ok(Exit::Passed)
    }
}

fn heading(text: &str) -> String {
    format!("{text}\n{}\n", "-".repeat(text.len()))
}

fn shell(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

fn explained(path: &Path, page: &Path) -> Result<String, CliError> {
    let snapshot = snapshots::read(path)?;
    let name = path.display().to_string();
    let explanation = causes::explain(&snapshot, 0, Options::default())
        .map_err(|error| CliError::internal(format!("{name}: {error}"), "report this"))?;
    let causes = text::render_causes(
        &name,
        &explanation,
        terminal::style(),
        terminal::width_of_output(),
    );
    Ok(format!(
        "{}{causes}\n{}The page with timeline and flame graph: {}\nMore: {harness} explain {file}; \
         {harness} advise {file}\n\n",
        heading("Why did a program run out of memory?"),
        cure(&snapshot),
        page.display(),
        harness = program::name(),
        file = shell(path),
    ))
}

/// The first change that prevents the error in a replay.
fn cure(snapshot: &Snapshot) -> String {
    let analysis = Analysis::of(snapshot, None);
    let cures = analysis.cures.first();
    cures.map_or_else(String::new, |cure| {
        format!("A replay of the recording confirms that this prevents the error: {cure}\n")
    })
}

fn tested(program: &Path) -> Result<String, CliError> {
    let report: FaultReport = serde_json::from_str(RECOVERY)
        .map_err(|error| CliError::internal(error.to_string(), "report this"))?;
    let table = trials::text(
        Trials::Faults(&report, Some(RecoveryExpectation::Recovers)),
        terminal::style(),
        terminal::width_of_output(),
    );
    Ok(format!(
        "{}Recorded with PyTorch 2.11, by this command, which needs torch and no GPU:\n  {} exec \
         --memory 4GiB --every-fault=sample:4 --expect recovers -- python {}\n\n{table}\n",
        heading("Does a program survive running out of memory?"),
        program::name(),
        shell(program),
    ))
}

fn next_commands() -> String {
    let harness = program::name();
    let exec = format!("{harness} exec --memory 24GiB");
    format!(
        "{}Does it fit into 24 GiB?\n  {exec} -- python train.py\n\
         Does it survive running out of memory?\n  \
         {exec} --every-fault --expect recovers -- python train.py\n\
         Which setting makes it fit?\n  \
         {exec} --snapshot oom.pickle -- python train.py; {harness} advise oom.pickle\n",
        heading("Your program, without a GPU"),
    )
}
