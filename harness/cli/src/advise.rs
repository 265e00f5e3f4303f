//! `harness advise`: which settings would have saved a recorded program; `verify` runs it with them.

mod verify;

use std::path::PathBuf;

use clap::Args;
use harness_allocator::allocator::caching::Config;
use harness_allocator::units::Bytes;
use harness_explain::advise::{Advice, is_complete};
use harness_explain::fidelity::Fidelity;
use harness_explain::grid::{Configuration, Ending, EndingRecord, Grid, UNLIMITED};
use harness_explain::program_advice::{self, ProgramAdvice};
use harness_report::advice;
use harness_trace::program::RecordedProgram;
use harness_trace::snapshot::Snapshot;
use indicatif::ProgressBar;
use serde::Serialize;

use super::error::{CliError, Failures};
use super::exit::Exit;
use super::import::Program;
use super::jobs::{self, Recovered};
use super::{Format, device, snapshots, terminal};
use verify::{Predicted, Verified};

const EXAMPLES: &str = "Examples:
  harness advise memory_snapshot.pickle
  harness advise memory_snapshot.pickle --memory 24GiB
  harness advise oom.pickle --conf max_split_size_mb:200 --only
  harness advise program.trace --memory 24GiB       a trace, or a log of RMM
  harness advise oom.pickle --verify -- python train.py
  harness advise oom.pickle --format json | jq -r '.configurations[] | select(.oom | not) | .conf'

The device's memory is known where the recording ends with an out-of-memory; else `--memory` tells it. A recording that ends with an
out-of-memory tells only whether settings get past that point. With `--verify` the exit code is 1 where nothing is recommended, and where the program, run with
what is, does not end with 0 or has an out of memory error.";

/// Replay a recorded PyTorch program under many settings of its allocator, and tell which would have saved it, and at what price.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Advise {
    /// A memory snapshot of PyTorch (torch.cuda.memory._dump_snapshot), packed by gzip or not; or an allocation trace or a log of RMM, which need `--memory`.
    #[arg(value_name = "SNAPSHOT")]
    snapshot: PathBuf,
    /// The device's memory, as in `24GiB`: what the program can have of it.
    #[arg(long, value_name = "SIZE", value_parser = device::memory)]
    memory: Option<Bytes>,
    /// Try these settings too, as PYTORCH_ALLOC_CONF would hold them; may be repeated.
    #[arg(long, value_name = "CONF")]
    conf: Vec<String>,
    /// Try the settings of `--conf` only, and neither look for the least memory nor advise.
    #[arg(long, requires = "conf")]
    only: bool,
    /// Go on where a replay under the recorded settings does something else than the recording has.
    #[arg(long)]
    force: bool,
    /// Write the replay that shows the Nth change of the program into the file of `--out`.
    #[arg(long, value_name = "N", requires = "out", conflicts_with = "only", value_parser = clap::value_parser!(u32).range(1..))]
    explain_advice: Option<u32>,
    /// Where `--explain-advice` writes the scenario, with its trace beside it; where the name ends in `.pickle`, the memory snapshot that the changed program
    /// would leave on the same memory.
    #[arg(long, value_name = "FILE.yaml", requires = "explain_advice")]
    out: Option<PathBuf>,
    /// What to print.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
    #[command(flatten)]
    verification: verify::Options,
}

/// What is printed with `--format json`.
#[derive(Serialize)]
struct Document<'a> {
    faithful: bool,
    complete: bool,
    /// Left out where only given settings are tried, and where there is no recording: of traces and logs of RMM.
    #[serde(skip_serializing_if = "Option::is_none")]
    fidelity: Option<&'a Fidelity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recommended: Option<String>,
    /// What could be changed in the program, what saves most first.
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<Vec<String>>,
    configurations: Vec<EndingRecord>,
    /// What the program itself did with the recommended settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<&'a Verified>,
}

/// What could be changed in the program.
#[derive(Default)]
struct InProgram {
    changes: Vec<ProgramAdvice>,
    /// To what share of the device it can be limited.
    limit: Option<String>,
}

impl InProgram {
    fn sentences(&self) -> Vec<String> {
        self.changes.iter().map(|change| change.sentence.clone()).chain(self.limit.clone()).collect()
    }
}

impl Advise {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let given =
            self.conf.iter().map(|conf| Configuration::of_settings(conf).map_err(|error| CliError::conf_of("--conf", &error, conf)));
        let given = given.collect::<Result<Vec<_>, _>>()?;
        let of_job = |error| jobs::of_job(&self.snapshot, &error);
        let (snapshot, job, fidelity) = self.read()?;
        let prepared = job.prepare().map_err(of_job)?;
        if let Some(fidelity) = fidelity.as_ref().filter(|fidelity| !fidelity.faithful && !self.force) {
            return self.refuse(fidelity, &job);
        }
        let memory = self.memory.or(job.memory);
        let configurations = if self.only { given } else { with_grid(&job.config, given) };
        let bar = terminal::progress(true, "{bar:30} {pos}/{len} settings", configurations.len() as u64);
        let grid = Grid::new(&prepared, memory.unwrap_or(UNLIMITED));
        let endings = grid.run(&configurations, !self.only, &|| bar.inc(1)).map_err(of_job)?;
        let in_program = if self.only { InProgram::default() } else { self.in_program(&snapshot, &endings, &job, memory, &bar)? };
        bar.finish_and_clear();
        let verified = self.verify(&grid, &endings, memory)?;
        self.print(&grid, &endings, memory, fidelity.as_ref(), &in_program, verified.as_ref())?;
        self.explain(&in_program, &snapshot, memory)?;
        Ok(match verified {
            Some(verified) => verified.exit(),
            None if self.verification.verify => Exit::Failed,
            None => Exit::Passed,
        })
    }

    /// The program, and how far a replay does what was recorded; of a trace or a log of RMM there is no recording.
    fn read(&self) -> Result<(Snapshot, RecordedProgram, Option<Fidelity>), CliError> {
        let Some(requests) = jobs::requests(&self.snapshot, self.memory) else {
            let Recovered { snapshot, job, fidelity } = jobs::read(&self.snapshot, self.memory)?;
            return Ok((snapshot, job, Some(fidelity)));
        };
        let (job, snapshot) = requests?.0.program_with_places().map_err(|error| jobs::of_job(&self.snapshot, &error))?;
        Ok((snapshot, job, None))
    }

    /// What could be changed in the program.
    fn in_program(
        &self,
        snapshot: &Snapshot,
        endings: &[Ending],
        job: &RecordedProgram,
        memory: Option<Bytes>,
        bar: &ProgressBar,
    ) -> Result<InProgram, CliError> {
        let of_job = |error| jobs::of_job(&self.snapshot, &error);
        let Some((own, least)) = endings.first().and_then(|own| Some((own, own.least?.enough))) else { return Ok(InProgram::default()) };
        let changes = program_advice::changes(job, snapshot);
        bar.inc_length(changes.len() as u64);
        let changes = program_advice::program_advice(changes, &own.configuration, least, &|| bar.inc(1)).map_err(of_job)?;
        let limit = match memory.filter(|&memory| own.fits() && least < memory) {
            Some(memory) => program_advice::fraction_advice(job, &own.configuration, least, memory).map_err(of_job)?,
            None => None,
        };
        Ok(InProgram { changes, limit })
    }

    /// Runs the program with what is recommended, where that is wanted and something is.
    fn verify(&self, grid: &Grid<'_>, endings: &[Ending], memory: Option<Bytes>) -> Result<Option<Verified>, CliError> {
        if !self.verification.verify {
            return Ok(None);
        }
        let memory = memory.ok_or_else(|| {
            let message = "how much memory the program is to have is not known: the recording does not end with an out-of-memory";
            CliError::input(message, "give `--memory`")
        })?;
        let advice = Advice::new(grid.program(), endings, memory);
        let recommended = advice.as_ref().and_then(|advice| advice.recommended());
        let Some(ending) = endings.iter().find(|ending| Some(ending.configuration.name.as_str()) == recommended) else {
            terminal::tell("nothing to verify: no settings are recommended");
            return Ok(None);
        };
        let ending = ending.record(false);
        let predicted = Predicted { conf: ending.conf, memory, peak_reserved: Bytes(ending.peak_reserved) };
        self.verification.run(predicted).map(Some)
    }

    /// Writes the replay that shows a change.
    fn explain(&self, in_program: &InProgram, snapshot: &Snapshot, memory: Option<Bytes>) -> Result<(), CliError> {
        let (Some(number), Some(out)) = (self.explain_advice, &self.out) else { return Ok(()) };
        let Some(change) = in_program.changes.get(number as usize - 1) else {
            let message = format!("there is no change {number} of the program: {} save memory", in_program.changes.len());
            return Err(CliError::input(message, "give a number of those that `harness advise` shows"));
        };
        if out.extension().is_some_and(|ending| ending == "pickle") {
            let told = change.program.to_snapshot(snapshot).map_err(|error| jobs::of_job(&self.snapshot, &error))?;
            return snapshots::write(out, &told, "make room, choose another place with `--out`, or make this one writable");
        }
        let about = format!("What a PyTorch program would allocate and free, changed by advice: {}.", change.sentence);
        Program::of_job(about, &change.program, snapshot, memory.unwrap_or(change.least.enough)).write(out, &self.snapshot)
    }

    /// A replay that is not what was recorded backs no advice.
    fn refuse(&self, fidelity: &Fidelity, job: &RecordedProgram) -> Result<Exit, Failures> {
        if self.format == Format::Json {
            terminal::print_json(&Document {
                faithful: false,
                complete: is_complete(job),
                fidelity: Some(fidelity),
                recommended: None,
                program: None,
                configurations: Vec::new(),
                verified: None,
            })?;
        }
        tell_notes(job);
        let divergence = fidelity.first_divergence.as_ref().map(ToString::to_string).unwrap_or_default();
        terminal::tell(format_args!(
            "{}: no advice: a replay under the recorded settings does something else than the recording has, so what it says of other settings is not backed.\nFirst divergence {divergence}\n`--force` shows it all the same",
            self.snapshot.display()
        ));
        Ok(Exit::Failed)
    }

    fn print(
        &self,
        grid: &Grid<'_>,
        endings: &[Ending],
        memory: Option<Bytes>,
        fidelity: Option<&Fidelity>,
        in_program: &InProgram,
        verified: Option<&Verified>,
    ) -> Result<(), CliError> {
        let advice = if self.only { None } else { Advice::new(grid.program(), endings, memory.unwrap_or(UNLIMITED)) };
        match self.format {
            Format::Json => terminal::print_json(&Document {
                faithful: fidelity.is_none_or(|fidelity| fidelity.faithful),
                complete: is_complete(grid.program()),
                fidelity: fidelity.filter(|_| !self.only),
                recommended: advice.as_ref().and_then(|advice| advice.recommended()).map(str::to_owned),
                program: (!self.only).then(|| in_program.sentences()),
                configurations: endings.iter().map(|ending| ending.record(!self.only)).collect(),
                verified,
            }),
            Format::Text => {
                let text = match advice {
                    Some(advice) => advice::render(&advice, endings, memory, fidelity, &in_program.sentences()),
                    None => advice::endings(endings, fidelity, is_complete(grid.program())),
                };
                tell_notes(grid.program());
                let verified = verified.map(|verified| format!("\n{}", verified.sentences())).unwrap_or_default();
                terminal::print(&(text + &verified))
            }
        }
    }
}

/// What is not known of the job or was assumed.
fn tell_notes(job: &RecordedProgram) {
    for note in &job.notes {
        terminal::tell(format_args!("note: {note}"));
    }
}

/// The recorded settings, those given and those of the grid, each once.
fn with_grid(recorded: &Config, given: Vec<Configuration>) -> Vec<Configuration> {
    let mut all = Configuration::grid(recorded);
    for configuration in given {
        all.retain(|known| known.name == recorded.to_string() || !known.allocator.is_equivalent_to(&configuration.allocator));
        all.push(configuration);
    }
    all
}
