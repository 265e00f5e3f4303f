//! `harness replay`: replays allocation traces on the simulated device, and compares recordings of
//! allocators with their replay.

use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::{convert::Infallible, sync::atomic::Ordering};

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use harness_allocator::allocator::caching::{Config, TorchVersion};
use harness_allocator::device::DeviceError;
use harness_allocator::device::sim::{AddressOrder, SimConfig};
use harness_allocator::{stats::MemoryStats, units::Bytes};
use harness_base::{excerpt::shortened, files, packed, parallel::in_parallel, words::count};
use harness_trace::execute::PrepareError;
use harness_trace::replay::{self, Front, RecordingError, ReplayComparison, ReplayError};
use harness_trace::replay_bench::{self, BenchResult};
use harness_trace::trace::{self, TraceError, TraceEvent};

use super::error::{CliError, Failures};
use super::interrupt::{self, Interrupt};
use super::kind::{self, Kind};
use super::{arguments, device, exit::Exit, terminal};

const EXAMPLES: &str = "Examples:
  harness replay job.trace --memory 80GiB --stats stats.jsonl
  harness replay job.trace --memory 8GiB --alloc-conf max_split_size_mb:64
  harness replay job.trace --memory 8GiB --stats /dev/null --memory-summary
  harness replay --verify recordings/*.jsonl.gz
  harness replay --verify recording.jsonl.gz --torch 2.15 --addresses down

A trace has one operation per line; `#` starts a comment:
  a ID SIZE STREAM   allocate            f ID         free
  r ID STREAM        record_stream       e            empty_cache
  s STREAM           synchronize it      d            synchronize the device
  m FRACTION         memory fraction     p            reset peaks
  x BYTES            other processes allocate memory, or release it (negative)
  g+ POOL  g- POOL   enter and leave a private pool
  gr POOL            release it
It may be compressed with gzip.

The statistics are a line with the names of the columns, an array of figures per operation, and the
segments at the end. The first column, `result`, is the outcome of the operation:
  0   success
  1   out of memory
  2   ignored: its id or pool is not live
  3   refused: this version of PyTorch does not support it";

/// The number of recordings after which results are printed.
const TOGETHER: usize = 32;

/// Replay an allocation trace on the simulated device, or compare recordings of allocators with
/// their replay.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Replay {
    /// An allocation trace.
    #[arg(
        value_name = "FILE",
        required_unless_present = "verify",
        requires = "memory"
    )]
    trace: Option<PathBuf>,
    /// The allocator's settings, in the format of PYTORCH_ALLOC_CONF or its older name
    /// PYTORCH_CUDA_ALLOC_CONF.
    #[arg(long, value_name = "CONF", default_value = "")]
    alloc_conf: String,
    /// The device's memory, 2MiB or more: a number of bytes, or a size as in `80GiB`.
    #[arg(long, value_name = "SIZE", value_parser = arguments::memory)]
    memory: Option<Bytes>,
    /// Write one row of statistics per operation to this file; `-` is standard output.
    #[arg(long, value_name = "OUT.jsonl", default_value = "-", value_parser = arguments::output())]
    stats: PathBuf,
    /// Print the counters after the last operation, in the layout of `torch.cuda.memory_summary()`.
    /// They go to standard error if the statistics go to standard output.
    #[arg(long)]
    memory_summary: bool,
    /// Time the allocator's host code instead: REPS passes over the trace, after two passes that
    /// warm the cache. Each pass frees the live blocks at its end, and these frees count.
    #[arg(
        long,
        value_name = "REPS",
        conflicts_with_all = ["stats", "verify", "memory_summary"],
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    bench: Option<u32>,
    /// Print the results of `--bench` as JSON.
    #[arg(long, requires = "bench")]
    json: bool,
    /// The version of PyTorch whose allocator is replayed. The default is that of the recording, or
    /// the newest.
    #[arg(long, value_name = "VERSION", value_parser = device::torch_version)]
    torch: Option<TorchVersion>,
    /// The addresses of the device's memory: `up`, `down`, `linux`, or `reuse` (the lowest free
    /// address; also `wsl`). The default is that of the recording, or `up`.
    #[arg(long, value_name = "ORDER")]
    addresses: Option<AddressOrder>,
    /// The interface of the allocator.
    #[arg(long, value_name = "FRONT", default_value = "handle", value_parser = fronts())]
    front: Front,
    /// Compare these recordings with their replay, row by row.
    #[arg(
        long,
        value_name = "RECORDING",
        num_args = 1..,
        conflicts_with_all = ["trace", "memory", "alloc_conf", "stats", "memory_summary"],
    )]
    verify: Vec<PathBuf>,
}

fn fronts() -> impl TypedValueParser<Value = Front> {
    let handle = PossibleValue::new("handle").help("one host thread, frees by handle");
    let shared =
        PossibleValue::new("shared").help("many host threads with a lock, frees by address");
    PossibleValuesParser::new([handle, shared]).map(|name| {
        if name == "shared" {
            Front::Shared
        } else {
            Front::Handle
        }
    })
}

impl Replay {
    pub(super) fn run(self) -> Result<Exit, Failures> {
        match (&self.trace, self.memory) {
            (Some(trace), Some(memory)) => self.replay(trace, memory),
            // The rules of the arguments exclude other cases.
            _ => verify_all(&self.verify, self.front, self.torch, self.addresses),
        }
    }

    fn replay(&self, path: &Path, memory: Bytes) -> Result<Exit, Failures> {
        let parsed = Config::parse_for(self.torch.unwrap_or_default(), &self.alloc_conf);
        let config = parsed.map_err(|error| CliError::conf(&error, &self.alloc_conf))?;
        let device = SimConfig {
            addresses: self.addresses.unwrap_or_default(),
            ..SimConfig::replay(memory)
        };
        let trace = Trace::read(path)?;
        config.idle_settings().iter().for_each(terminal::message);
        if let Some(repetitions) = self.bench {
            return self.time(&trace, config, device, repetitions);
        }
        let interrupt = interrupt::watch(|| {})?;
        let written = match self.stats_are_printed() {
            true => trace.write_stats(config, device, self.front, &interrupt, io::stdout()),
            false => files::write_by(&self.stats, |file| {
                trace.write_stats(config, device, self.front, &interrupt, file)
            }),
        };
        match written {
            Ok(Ok(stats)) => Ok(self.print_summary(&stats).map(|()| Exit::Passed)?),
            Ok(Err(error)) => Err(error.into()),
            Err(_) if interrupt.load(Ordering::Relaxed) => Ok(Exit::Interrupted),
            // The reader has closed the pipe.
            Err(error) if self.stats_are_printed() && error.kind() == ErrorKind::BrokenPipe => {
                Ok(Exit::Passed)
            }
            Err(error) => {
                let target = (!self.stats_are_printed()).then_some(self.stats.as_path());
                Err(CliError::output(
                    target,
                    &error,
                    "choose another file with `--stats`, or free disk space",
                )
                .into())
            }
        }
    }

    fn print_summary(&self, stats: &MemoryStats) -> Result<(), CliError> {
        match self.memory_summary {
            true if self.stats_are_printed() => terminal::message(stats.summary().trim_end()),
            true => terminal::print(&stats.summary())?,
            false => {}
        }
        Ok(())
    }

    fn stats_are_printed(&self) -> bool {
        self.stats == Path::new("-")
    }

    fn time(
        &self,
        trace: &Trace<'_>,
        config: Config,
        device: SimConfig,
        repetitions: u32,
    ) -> Result<Exit, Failures> {
        if !trace
            .events
            .iter()
            .any(|event| matches!(event, TraceEvent::Allocate { .. }))
        {
            let message = format!(
                "{}: the trace contains no allocations to time",
                trace.path.display()
            );
            return Err(CliError::input(
                message,
                "name a trace with allocations; `harness replay --help` describes the format",
            )
            .into());
        }
        let result = replay_bench::bench(&trace.events, config, device, repetitions, self.front)
            .map_err(|error| trace.locate(&error))?;
        if self.json {
            terminal::print_document(&format!("{}\n", serde_json::json!(result)))?;
            return Ok(Exit::Passed);
        }
        let BenchResult {
            operations,
            allocations,
            frees,
            ooms,
            device_calls,
            ..
        } = result;
        terminal::print(&format!(
            "{} per pass: {}, {}, {ooms} out of memory; {}
ns per operation: median {:.1}, min {:.1}
ns per allocation: {:.1}; ns per free: {:.1}
device calls in the timed passes: {device_calls}
",
            count(operations, "operation"),
            count(allocations, "allocation"),
            count(frees, "free"),
            count(repetitions, "pass"),
            result.ns_per_op,
            result.ns_per_op_min,
            result.allocate_ns,
            result.free_ns
        ))?;
        Ok(Exit::Passed)
    }
}

struct Trace<'a> {
    path: &'a Path,
    events: Vec<TraceEvent>,
    text: String,
}

impl<'a> Trace<'a> {
    fn read(path: &'a Path) -> Result<Self, CliError> {
        if let Some(kind) = kind::of(path).filter(|kind| *kind != Kind::Trace) {
            return Err(kind.instead_of("an allocation trace", path));
        }
        let mut text = String::new();
        packed::open(path)
            .and_then(|mut file| file.read_to_string(&mut text))
            .map_err(|error| {
                let why = match error.kind() {
                    ErrorKind::NotFound => "there is no such file".to_owned(),
                    ErrorKind::InvalidData => "the file is not UTF-8 text".to_owned(),
                    ErrorKind::IsADirectory => {
                        "this is a folder, not an allocation trace".to_owned()
                    }
                    _ => format!("the file cannot be read: {error}"),
                };
                CliError::input(
                    format!("{}: {why}", path.display()),
                    "name an allocation trace; `harness replay --help` describes the format",
                )
            })?;
        let events = trace::parse(&text).map_err(
            |TraceError {
                 line,
                 text,
                 expected,
             }| {
                let message = format!(
                    "{}:{line}: `{}` is not an operation of an allocation trace",
                    path.display(),
                    shortened(&text)
                );
                CliError::input(message, expected)
            },
        )?;
        if events.is_empty() {
            let message = format!("{}: the trace has no operations", path.display());
            return Err(CliError::input(
                message,
                "name a trace with operations; `harness replay --help` describes the format",
            ));
        }
        Ok(Self { path, events, text })
    }

    /// The outer error concerns the output, the inner one the trace.
    fn write_stats(
        &self,
        config: Config,
        device: SimConfig,
        front: Front,
        interrupt: &Interrupt,
        output: impl Write,
    ) -> io::Result<Result<MemoryStats, CliError>> {
        let output = BufWriter::new(Interruptible { output, interrupt });
        Ok(
            replay::write_stats(&self.events, config, device, front, output)?
                .map_err(|error| self.locate(&error)),
        )
    }

    fn locate(&self, error: &ReplayError) -> CliError {
        let is_operation = |(_, line): &(usize, &str)| {
            trace::parse_lines([*line]).is_ok_and(|events| !events.is_empty())
        };
        let line = (1..)
            .zip(self.text.lines())
            .filter(is_operation)
            .nth(error.operation().wrapping_sub(1));
        let place = format!(
            "{}{}",
            self.path.display(),
            line.map(|(line, _)| format!(":{line}")).unwrap_or_default()
        );
        match error {
            ReplayError::Device {
                source: source @ DeviceError::Unavailable { .. },
                ..
            } => CliError::input(
                source.to_string(),
                "give other settings with `--alloc-conf`",
            ),
            ReplayError::Device { .. } | ReplayError::Prepare(PrepareError::Device(_)) => {
                CliError::internal(
                    format!("{place}: {error}"),
                    "this is a bug in the harness: report it with the trace",
                )
            }
            ReplayError::Prepare(_) | ReplayError::PrivatePool { .. } => CliError::input(
                format!("{place}: {error}"),
                "correct this line of the trace",
            ),
        }
    }
}

struct Interruptible<'a, W> {
    output: W,
    interrupt: &'a Interrupt,
}

impl<W: Write> Write for Interruptible<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // ErrorKind::Interrupted would mean "try again".
        if self.interrupt.load(Ordering::Relaxed) {
            Err(io::Error::other("interrupted"))
        } else {
            self.output.write(bytes)
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

fn verify_all(
    paths: &[PathBuf],
    front: Front,
    torch: Option<TorchVersion>,
    addresses: Option<AddressOrder>,
) -> Result<Exit, Failures> {
    let mut counts = Counts::default();
    for paths in paths.chunks(TOGETHER) {
        let Ok(results) = in_parallel(paths, |path| {
            Ok::<_, Infallible>(replay::verify(path, front, torch, addresses))
        });
        for (path, verified) in paths.iter().zip(results) {
            terminal::print(&counts.add(path, verified))?;
        }
    }
    terminal::print(&counts.summary())?;
    Ok(counts.exit())
}

#[derive(Default)]
struct Counts {
    equal: usize,
    different: usize,
    unusable: usize,
    operations: usize,
}

impl Counts {
    /// Counts a result and describes it, in one line unless there is a difference.
    fn add(&mut self, path: &Path, verified: Result<ReplayComparison, RecordingError>) -> String {
        let path = path.display();
        match verified {
            Ok(ReplayComparison {
                operations,
                difference,
            }) => {
                self.operations += operations;
                let counted = if difference.is_some() {
                    &mut self.different
                } else {
                    &mut self.equal
                };
                *counted += 1;
                let equal = || format!("equal    {path}  {}\n", count(operations, "operation"));
                difference.map_or_else(equal, |difference| format!("differs  {path}\n{difference}"))
            }
            Err(error) => {
                self.unusable += 1;
                match error {
                    // The rule is one line without an excerpt.
                    RecordingError::Settings { source, .. } => {
                        format!("unusable {path}: {}\n", source.rule())
                    }
                    error @ (RecordingError::Read { .. }
                    | RecordingError::Malformed { .. }
                    | RecordingError::Torch { .. }
                    | RecordingError::OtherLibrary { .. }) => {
                        format!("unusable {error}\n")
                    }
                }
            }
        }
    }

    fn summary(&self) -> String {
        let Self {
            equal,
            different,
            unusable,
            ..
        } = self;
        format!(
            "{equal} equal, {different} differ, {unusable} unusable; {} compared\n",
            count(self.operations, "operation")
        )
    }

    const fn exit(&self) -> Exit {
        match self {
            Self { different: 1.., .. } => Exit::Failed,
            Self { unusable: 1.., .. } => Exit::Invalid,
            Self { .. } => Exit::Passed,
        }
    }
}
