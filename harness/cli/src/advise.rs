mod verify;

use std::path::PathBuf;

use clap::Args;
use harness_allocator::{allocator::caching::Config, units::Bytes};
use harness_base::words::count;
use harness_explain::advise::{Advice, is_complete};
use harness_explain::causes;
use harness_explain::fidelity::Fidelity;
use harness_explain::grid::{
    Configuration, Grid, GridRow, GridRowRecord, UNLIMITED, UntriedChange,
};
use harness_explain::program_advice::{self, ProgramAdvice, Unchanged};
use harness_report::advice;
use harness_report::text::Detail;
use harness_trace::program::{Placement, ProgramError, RecordedProgram};
use indicatif::ProgressBar;
use serde::Serialize;

use super::error::{CliError, Failures};
use super::jobs::{self, RecordingOptions, Recovered};
use super::{Format, arguments, exit::Exit, import::Program, snapshots, terminal};
use verify::Verified;

const EXAMPLES: &str = "Examples:
  harness advise memory_snapshot.pickle
  harness advise memory_snapshot.pickle --memory 24GiB
  harness advise oom.pickle --alloc-conf max_split_size_mb:200 --only
  harness advise program.trace --memory 24GiB       a trace or an RMM log
  harness advise oom.pickle --verify -- python train.py
  harness advise oom.pickle --format json | jq -r '.configurations[] | select(.oom | not) | .conf'

A recording that ends with an out-of-memory error contains the device's memory; for others, give
`--memory`. The recording stops at the error, so the result shows only whether settings get past
that point.

With `--verify`, the exit code is 1 if no settings are recommended, or if the program fails or has
an out-of-memory error with them.";

/// Replay a recorded PyTorch program with many settings of its allocator, and list those that would
/// have saved it, with their cost.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Advise {
    /// A memory snapshot of PyTorch (torch.cuda.memory._dump_snapshot), plain or compressed with
    /// gzip. An allocation trace or an RMM log needs `--memory`.
    #[arg(value_name = "SNAPSHOT")]
    snapshot: PathBuf,
    /// The device memory that the program may use, as in `24GiB`.
    #[arg(long, value_name = "SIZE", value_parser = arguments::memory)]
    memory: Option<Bytes>,
    #[command(flatten)]
    recording: RecordingOptions,
    /// Also try these settings, in the format of PYTORCH_ALLOC_CONF; may be repeated.
    #[arg(long = "alloc-conf", value_name = "CONF")]
    conf: Vec<String>,
    /// Try only the settings of `--alloc-conf`, without a search for the least memory and without
    /// advice.
    #[arg(long, requires = "conf")]
    only: bool,
    /// Continue even if a replay with the recorded settings differs from the recording.
    #[arg(long)]
    force: bool,
    /// Write the replay of the Nth recommended program change to the file of `--out`.
    #[arg(
        long,
        value_name = "N",
        requires = "out",
        conflicts_with = "only",
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    explain_advice: Option<u32>,
    /// The file for `--explain-advice`: a scenario, with its trace in the same folder; or if the
    /// name ends in `.pickle`, a memory snapshot of the changed program on the same memory.
    #[arg(
        long,
        value_name = "FILE.yaml",
        requires = "explain_advice",
        value_parser = arguments::output(),
    )]
    out: Option<PathBuf>,
    /// Print all settings that were tried, and all changes in the program.
    #[arg(long, short)]
    verbose: bool,
    /// The output format.
    #[arg(long, default_value = "text", value_name = "FORMAT")]
    format: Format,
    #[command(flatten)]
    verification: verify::Options,
}

#[derive(Default, Serialize)]
struct Document<'a> {
    faithful: bool,
    complete: bool,
    /// The index of the device in the recording.
    device: u32,
    /// Absent with `--only`, and for traces and RMM logs, which have no recording to compare with.
    #[serde(skip_serializing_if = "Option::is_none")]
    fidelity: Option<&'a Fidelity>,
    #[serde(skip_serializing_if = "Option::is_none")]
    recommended: Option<String>,
    /// As in `harness explain`: if a request fails with the recorded settings, its cause.
    #[serde(skip_serializing_if = "Option::is_none")]
    headline: Option<&'a str>,
    /// Recommended program changes; the change that saves most comes first.
    #[serde(skip_serializing_if = "Option::is_none")]
    program: Option<Vec<String>>,
    configurations: Vec<GridRowRecord>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    not_tried: &'a [UntriedChange],
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<&'a Verified>,
}

#[derive(Default)]
struct InProgram {
    changes: Vec<ProgramAdvice>,
    /// A sentence about a memory fraction that is enough.
    limit: Option<String>,
}

impl InProgram {
    fn sentences(&self) -> Vec<String> {
        self.changes
            .iter()
            .map(|change| change.sentence.clone())
            .chain(self.limit.clone())
            .collect()
    }
}

struct Results<'a> {
    program: &'a Recovered,
    memory: Option<Bytes>,
    endings: Vec<GridRow>,
    not_tried: Vec<UntriedChange>,
    in_program: InProgram,
    /// The headline of the explanation: with the recorded settings, the cause of the failure on
    /// this memory.
    headline: Option<String>,
}

impl Results<'_> {
    fn advice(&self) -> Option<Advice<'_>> {
        Advice::new(
            &self.program.job,
            &self.endings,
            self.memory.unwrap_or(UNLIMITED),
        )
    }
}

impl Advise {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        let program = self.read()?;
        let job = &program.job;
        let configuration = |conf: &String| {
            Configuration::of_settings(job.config.torch, conf)
                .map_err(|error| CliError::conf(&error, conf))
        };
        let given = self
            .conf
            .iter()
            .map(configuration)
            .collect::<Result<Vec<_>, _>>()?;
        let prepared = job.prepare().map_err(|error| self.of_job(&error))?;
        if let Some(fidelity) = program
            .fidelity
            .as_ref()
            .filter(|fidelity| !fidelity.faithful && !self.force)
        {
            return self.refuse(fidelity, &program);
        }
        let memory = self.memory.or(job.memory);
        let configurations = if self.only {
            given
        } else {
            with_grid(&job.config, given)
        };
        let bar = terminal::progress(
            true,
            "{bar:30} {pos}/{len} settings",
            Some(configurations.len() as u64),
        );
        let grid = Grid::new(&prepared, memory.unwrap_or(UNLIMITED));
        let (endings, not_tried) = grid
            .run(&configurations, !self.only, &|| bar.inc(1))
            .map_err(|error| self.of_job(&error))?;
        let in_program = if self.only {
            InProgram::default()
        } else {
            self.in_program(&program, &endings, memory, &bar)?
        };
        bar.finish_and_clear();
        let headline = if self.only {
            None
        } else {
            self.headline(&program, memory)
        };
        let results = Results {
            program: &program,
            memory,
            endings,
            not_tried,
            in_program,
            headline,
        };
        let verified = self.verify(&results)?;
        self.print(&results, verified.as_ref())?;
        self.explain(&results)?;
        Ok(match verified {
            Some(verified) => verified.exit(),
            None if self.verification.verify => Exit::Failed,
            None => Exit::Passed,
        })
    }

    fn read(&self) -> Result<Recovered, CliError> {
        let Some(requests) = jobs::requests(&self.snapshot, self.memory) else {
            return jobs::read(&self.snapshot, self.memory, &self.recording);
        };
        let (job, snapshot) = requests?
            .0
            .program_with_places()
            .map_err(|error| self.of_job(&error))?;
        Ok(Recovered {
            about_device: None,
            snapshot,
            job,
            fidelity: None,
        })
    }

    fn of_job(&self, error: &ProgramError) -> CliError {
        jobs::of_job(&self.snapshot, error)
    }

    fn in_program(
        &self,
        Recovered { job, snapshot, .. }: &Recovered,
        endings: &[GridRow],
        memory: Option<Bytes>,
        bar: &ProgressBar,
    ) -> Result<InProgram, CliError> {
        let Some((own, least)) = endings
            .first()
            .and_then(|own| Some((own, own.least?.enough)))
        else {
            return Ok(InProgram::default());
        };
        let progress = || {
            bar.inc_length(1);
            bar.inc(1);
        };
        let reserved = own
            .fits()
            .then_some(Bytes(own.replayed.stats.reserved_bytes.all.peak));
        let without = Unchanged {
            memory: memory.unwrap_or(UNLIMITED),
            least,
            reserved,
        };
        let changes =
            program_advice::program_advice(job, snapshot, &own.configuration, without, &progress);
        let changes = changes.map_err(|error| self.of_job(&error))?;
        let limit = match memory.filter(|&memory| own.fits() && least < memory) {
            Some(memory) => program_advice::fraction_advice(job, &own.configuration, least, memory)
                .map_err(|error| self.of_job(&error))?,
            None => None,
        };
        Ok(InProgram { changes, limit })
    }

    /// Explains the recording. If it has another memory, or contains only requests, explains a
    /// replay with the recorded settings.
    fn headline(
        &self,
        Recovered {
            job,
            snapshot,
            fidelity,
            ..
        }: &Recovered,
        memory: Option<Bytes>,
    ) -> Option<String> {
        if fidelity.is_some() && (memory == job.memory || memory.is_none()) {
            return causes::headline(snapshot, job.device).ok();
        }
        let job = RecordedProgram {
            memory,
            ..job.clone()
        };
        let replayed = job
            .to_snapshot(snapshot, Placement::InOrder(job.address_order()))
            .ok()?;
        causes::headline(&replayed, job.device).ok()
    }

    fn verify(&self, results: &Results<'_>) -> Result<Option<Verified>, CliError> {
        if !self.verification.verify {
            return Ok(None);
        }
        let memory = results.memory.ok_or_else(|| {
            let message = "the device's memory is unknown, because the recording does not end with \
                 an out-of-memory error";
            CliError::input(message, "give `--memory`")
        })?;
        let Some(ending) = results.advice().and_then(|advice| advice.recommended()) else {
            terminal::message("nothing to verify: no settings are recommended");
            return Ok(None);
        };
        self.verification
            .run(ending.record(false), memory)
            .map(Some)
    }

    fn explain(
        &self,
        Results {
            program,
            memory,
            in_program,
            ..
        }: &Results<'_>,
    ) -> Result<(), CliError> {
        let (Some(number), Some(out)) = (self.explain_advice, &self.out) else {
            return Ok(());
        };
        let Some(change) = in_program.changes.get(number as usize - 1) else {
            let message = format!(
                "there is no change {number}: `harness advise` recommends {}",
                count(in_program.changes.len() as u64, "change")
            );
            return Err(CliError::input(
                message,
                "give a number from the list that `harness advise` prints",
            ));
        };
        if out.extension().is_some_and(|ending| ending == "pickle") {
            let placement = Placement::InOrder(change.program.address_order());
            let changed = change
                .program
                .to_snapshot(&program.snapshot, placement)
                .map_err(|error| self.of_job(&error))?;
            return snapshots::write(out, &changed);
        }
        let about = format!(
            "The allocations and frees of a PyTorch program after a recommended change: {}.",
            change.sentence
        );
        Program::of_job(
            about,
            &change.program,
            &program.snapshot,
            memory.unwrap_or(change.least.enough),
        )?
        .write(out, &self.snapshot)
    }

    /// Gives no advice, because the replay differs from the recording.
    fn refuse(
        &self,
        fidelity: &Fidelity,
        Recovered {
            about_device, job, ..
        }: &Recovered,
    ) -> Result<Exit, Failures> {
        if self.format == Format::Json {
            let (complete, device) = (is_complete(job), job.device);
            terminal::print_json(&Document {
                complete,
                device,
                fidelity: Some(fidelity),
                ..Document::default()
            })?;
        }
        about_device.iter().for_each(terminal::message);
        print_notes(job);
        let divergence = fidelity
            .first_divergence
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default();
        terminal::message(format_args!(
            "{}: no advice: a replay with the recorded settings differs from the recording, so \
             replays with other settings are not reliable.\nFirst divergence \
             {divergence}\n`--force` shows the advice nevertheless",
            self.snapshot.display()
        ));
        Ok(Exit::Failed)
    }

    fn detail(&self) -> Detail {
        if self.verbose {
            Detail::Full
        } else {
            Detail::Brief
        }
    }

    fn print(&self, results: &Results<'_>, verified: Option<&Verified>) -> Result<(), CliError> {
        let Results {
            program:
                Recovered {
                    about_device,
                    job,
                    fidelity,
                    ..
                },
            memory,
            endings,
            not_tried,
            in_program,
            headline,
        } = results;
        let (fidelity, complete) = (fidelity.as_ref(), is_complete(job));
        let advice = if self.only { None } else { results.advice() };
        match self.format {
            Format::Json => terminal::print_json(&Document {
                faithful: fidelity.is_none_or(|fidelity| fidelity.faithful),
                complete,
                device: job.device,
                fidelity: fidelity.filter(|_| !self.only),
                recommended: advice
                    .and_then(|advice| advice.recommended())
                    .map(|ending| ending.configuration.name.clone()),
                headline: headline.as_deref(),
                program: (!self.only).then(|| in_program.sentences()),
                configurations: endings
                    .iter()
                    .map(|ending| ending.record(!self.only))
                    .collect(),
                not_tried,
                verified,
            }),
            Format::Text => {
                print_notes(job);
                let about_device = about_device
                    .iter()
                    .map(|about| format!("{about}\n\n"))
                    .collect::<String>();
                let text = match advice {
                    Some(advice) => advice::render(
                        &advice,
                        headline.as_deref(),
                        (endings, not_tried),
                        *memory,
                        fidelity,
                        &in_program.sentences(),
                        (self.detail(), &|ending| {
                            self.conf.contains(&ending.configuration.name)
                        }),
                    ),
                    None => advice::endings((endings, not_tried), fidelity, complete),
                };
                let verified = verified
                    .map(|verified| format!("\n{}", verified.sentences()))
                    .unwrap_or_default();
                terminal::print(&(about_device + &text + &verified))
            }
        }
    }
}

fn print_notes(job: &RecordedProgram) {
    for note in &job.notes {
        terminal::message(format_args!("note: {note}"));
    }
}

fn with_grid(recorded: &Config, given: Vec<Configuration>) -> Vec<Configuration> {
    let mut all = Configuration::grid(recorded);
    for configuration in given {
        all.retain(|known| {
            known.name == recorded.to_string()
                || !known.allocator.is_equivalent_to(&configuration.allocator)
        });
        all.push(configuration);
    }
    all
}
