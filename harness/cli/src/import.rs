use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use harness_allocator::allocator::caching::{Config, TorchVersion};
use harness_allocator::device::sim::AddressOrder;
use harness_allocator::units::Bytes;
use harness_base::packed;
use harness_explain::grid::UNLIMITED;
use harness_explain::plain::{PendingFrees, plain};
use harness_explain::sites::Sites;
use harness_language::text::exact_size;
use harness_record::RunRecord;
use harness_scenario::{ParameterSettings, Scenario, Trace};
use harness_trace::program::{Placement, RecordedProgram, ReplaySetup};
use harness_trace::snapshot::Snapshot;

use super::error::{CliError, Failures};
use super::jobs::{self, RecordingOptions, Recovered};
use super::kind::{self, Kind};
use super::{arguments, exit::Exit, inputs, simulated, terminal};

const EXAMPLES: &str = "Examples:
  harness import memory_snapshot.pickle --out scenarios/our_training.yaml
  harness import oom.pickle --memory 24GiB --out scenarios/our_oom.yaml

The compressed trace next to the scenario contains every allocation and free of the program with its
line. `harness run` replays it on the simulated device or on a GPU, where it really allocates,
writes and verifies every block. The scenario expects the results of a replay on the simulated
device.";

/// Turn a recorded PyTorch program into a scenario that replays its allocations and frees.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Import {
    /// A memory snapshot of PyTorch, plain or compressed with gzip.
    #[arg(value_name = "SNAPSHOT")]
    snapshot: PathBuf,
    /// The device's memory [default: the memory in the recording, else the memory that the program
    /// reserves].
    #[arg(long, value_name = "SIZE", value_parser = arguments::memory)]
    memory: Option<Bytes>,
    #[command(flatten)]
    recording: RecordingOptions,
    /// The scenario file to write. The trace goes into the same folder.
    #[arg(long, value_name = "FILE.yaml", value_parser = arguments::output())]
    out: PathBuf,
}

impl Import {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        if self.out.extension().is_none_or(|ending| ending != "yaml") {
            let message = format!(
                "{}: the name of a scenario file must end in .yaml",
                self.out.display()
            );
            return Err(CliError::input(
                message,
                "name it as in `--out scenarios/our_training.yaml`",
            )
            .into());
        }
        Program::read(&self.snapshot, self.memory, &self.recording)?
            .write(&self.out, &self.snapshot)?;
        Ok(Exit::Passed)
    }
}

fn ending(record: &RunRecord) -> &'static str {
    if figure(record, "ooms") == 0 {
        "fits"
    } else {
        "oom"
    }
}

fn expectations(record: &RunRecord) -> String {
    format!(
        "  - expect: [ program.ooms == {}, program.peak_live_bytes == {}, reserved.peak == {} ]\n",
        figure(record, "ooms"),
        exact_size(Bytes(figure(record, "peak_live_bytes"))),
        exact_size(Bytes(record.stats.reserved_bytes.all.peak))
    )
}

fn figure(record: &RunRecord, report: &str) -> u64 {
    record
        .steps
        .iter()
        .find_map(|step| step.reports.get(report))
        .copied()
        .unwrap_or_default()
}

/// The trace of a program, with its settings and its memory.
pub(crate) struct Program {
    about: String,
    config: Config,
    memory: Bytes,
    trace: Arc<Trace>,
}

impl Program {
    fn read(
        path: &Path,
        memory: Option<Bytes>,
        recording: &RecordingOptions,
    ) -> Result<Self, CliError> {
        let Recovered {
            about_device,
            snapshot,
            job,
            ..
        } = jobs::read(path, memory, recording)?;
        about_device.iter().for_each(terminal::message);
        let memory = match memory.or(job.memory) {
            Some(memory) => memory,
            None => reserved(path, &job)?,
        };
        let mut about = format!(
            "The allocations and frees of a PyTorch program, as recorded in {}.",
            file_name(path)
        );
        about.extend(
            about_device
                .is_some()
                .then(|| format!(" Of several devices, it contains device {}.", job.device)),
        );
        about.extend(job.notes.iter().map(|note| format!("\n\nNote: {note}.")));
        Self::of_job(about, &job, &snapshot, memory)
    }

    /// Uses a program that a command has changed.
    pub(crate) fn of_job(
        about: String,
        job: &RecordedProgram,
        snapshot: &Snapshot,
        memory: Bytes,
    ) -> Result<Self, CliError> {
        let sites = Sites::new(snapshot, job.device);
        let plain = plain(job, PendingFrees::Late);
        let operations = plain.events.iter().enumerate().map(|(index, event)| {
            let site = plain.site(index, job, &sites);
            (*event, site.unwrap_or_default())
        });
        let trace = Trace::commented(operations);
        Ok(Self {
            about,
            config: job.config.clone(),
            memory,
            trace: Arc::new(trace.map_err(|(why, help)| CliError::input(why, help))?),
        })
    }

    fn of_trace(path: &Path, memory: Option<Bytes>) -> Result<Self, CliError> {
        let (trace, memory) = jobs::trace(path, memory)?;
        Ok(Self {
            about: format!("The allocation trace {}.", file_name(path)),
            config: Config::default(),
            memory,
            trace: Arc::new(trace),
        })
    }

    /// Replays the trace on the simulated device, then writes the trace and a scenario that expects
    /// the same results.
    pub(crate) fn write(&self, out: &Path, snapshot: &Path) -> Result<(), CliError> {
        let trace_file = out.with_extension("trace.gz");
        let name = file_name(&trace_file);
        let records = simulated::run(&self.scenario(&name, "any", ""), Some(&self.trace))?;
        let failed = || {
            let message = format!(
                "{}: the replay of the program violates an invariant",
                snapshot.display()
            );
            CliError::internal(message, "report this with the snapshot")
        };
        let record = records.first().ok_or_else(failed)?;
        let text = self.scenario(&name, ending(record), &expectations(record));
        if !simulated::pass(&simulated::run(&text, Some(&self.trace))?) {
            return Err(failed());
        }
        let packed = packed::pack(&self.trace.to_string());
        terminal::save(&trace_file, &packed)?;
        terminal::save(out, &text)?;
        let end = if ending(record) == "fits" {
            "every request succeeds"
        } else {
            "the program runs out of memory"
        };
        terminal::message(format_args!(
            "{} and {} ({} bytes): {end}",
            out.display(),
            trace_file.display(),
            packed.len()
        ));
        Ok(())
    }

    fn scenario(&self, trace: &str, ending: &str, expectations: &str) -> String {
        let about: String = self
            .about
            .lines()
            .map(|line| format!("{}\n", format!("  {line}").trim_end()))
            .collect();
        let Config { torch, .. } = self.config;
        let torch = (torch != TorchVersion::default()).then(|| format!("torch: \"{torch}\""));
        let conf = Some(self.config.to_string())
            .filter(|conf| !conf.is_empty())
            .map(|conf| format!("conf: \"{conf}\""));
        let fields: Vec<String> = torch.into_iter().chain(conf).collect();
        let allocator = if fields.is_empty() {
            "caching".to_owned()
        } else {
            format!("{{ caching: {{ {} }} }}", fields.join(", "))
        };
        format!(
            "about: |\n{about}needs: {{ memory: {} }}\nallocator: {allocator}\nsteps:\n  - replay: \
             {{ id: program, trace: {trace}, expect: {ending} }}\n{expectations}",
            exact_size(self.memory)
        )
    }
}

/// The memory that a program reserves on a device without a limit.
fn reserved(path: &Path, job: &RecordedProgram) -> Result<Bytes, CliError> {
    // Scenarios run on a device with rising addresses.
    let setup = ReplaySetup {
        memory: UNLIMITED,
        placement: Placement::InOrder(AddressOrder::Up),
        ..job.recorded_setup()
    };
    let replayed = job
        .prepare()
        .and_then(|prepared| prepared.replay(&setup))
        .map_err(|error| jobs::of_job(path, &error))?;
    Ok(Bytes(
        replayed
            .stats
            .reserved_bytes
            .all
            .peak
            .next_multiple_of(2 << 20),
    ))
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Like [`inputs::load`], and turns a memory snapshot or a trace into a scenario that replays it on
/// a device with that memory.
pub(crate) fn load_with_programs(
    paths: &[PathBuf],
    settings: &ParameterSettings,
    memory: Option<Bytes>,
) -> Result<Vec<Scenario>, Failures> {
    inputs::load_by(paths, |path| {
        as_scenario(path, memory).map_or_else(
            || inputs::points(path, settings),
            |scenario| Ok(vec![scenario?]),
        )
    })
}

/// Turns a snapshot or a trace into a scenario with one step, in which every request must succeed;
/// `None` for other files.
fn as_scenario(path: &Path, memory: Option<Bytes>) -> Option<Result<Scenario, CliError>> {
    let program = match kind::of(path)? {
        Kind::Pickle => Program::read(path, memory, &RecordingOptions::default()),
        Kind::Trace => Program::of_trace(path, memory),
        Kind::Recording | Kind::RmmLog => return None,
    };
    Some(program.and_then(|program| {
        let text = program.scenario("program.trace.gz", "fits", "");
        Ok(Scenario::parse_with_trace(
            &text,
            path,
            Some(&program.trace),
        )?)
    }))
}
