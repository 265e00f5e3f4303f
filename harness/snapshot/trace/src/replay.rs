//! Replays allocation traces on the simulated device and compares them with recorded runs of
//! PyTorch's allocator, or of another library's (`decisions`).
//!
//! [`write_stats`] writes one row of statistics per operation. [`verify`] replays a recording and
//! compares every row, then the final segments. [`Front`] selects the allocator's interface.

mod decisions;

use std::io::{self, BufRead as _, Write};
use std::path::{Path, PathBuf};
use std::{fmt, mem, ops::ControlFlow};

use harness_allocator::allocator::caching::{
    CachingAllocator, ConfError, Config, Quirks, TorchVersion, TorchVersionError,
};
use harness_allocator::allocator::{Allocator as _, PrivatePoolError, shared::SharedAllocator};
use harness_allocator::device::sim::{AddressOrder, SimConfig, SimDevice};
use harness_allocator::device::{DeviceCalls, DeviceError};
use harness_allocator::stats::{MemoryStats, PoolKind, SegmentInfo, StatKey};
use harness_allocator::units::Bytes;
use harness_base::packed;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::json;

use crate::execute::{
    ByHandle, ByPointer, Executor, Kind, OperationObserver, OperationOutcome, PassStopped,
    PrepareError, Streams, Target,
};
use crate::trace::{self, TraceEvent};

#[derive(Clone, Copy)]
enum Column {
    /// The operation's [`OperationOutcome`] as a number.
    Result,
    Stat(StatKey),
    Device(&'static str, fn(&State) -> u64),
}

impl Column {
    /// Counts include failed calls. `cuMem…` counts physical pages, so it is zero without
    /// expandable segments.
    const DEVICE: [Self; 6] = [
        Self::Device("cudaMalloc_calls", |state| state.calls.malloc),
        Self::Device("cudaMalloc_fails", |state| state.calls.malloc_failures),
        Self::Device("cudaFree_calls", |state| state.calls.free),
        Self::Device("cuMemCreate_calls", |state| state.calls.create),
        Self::Device("cuMemRelease_calls", |state| state.calls.release),
        Self::Device("device_free", |state| state.free.0),
    ];

    fn recorded() -> Vec<Self> {
        let pooled = ["allocated_bytes", "reserved_bytes"]
            .iter()
            .flat_map(|family| {
                ["all", "small_pool", "large_pool"].map(|pool| format!("{family}.{pool}.current"))
            });
        let others = [
            "active_bytes.all.current",
            "inactive_split_bytes.all.current",
            "requested_bytes.all.current",
            "allocation.all.current",
            "segment.all.current",
            "active.all.current",
            "inactive_split.all.current",
            "allocated_bytes.all.peak",
            "reserved_bytes.all.peak",
            "num_alloc_retries",
            "num_ooms",
            "num_sync_all_streams",
            "num_device_alloc",
            "num_device_free",
        ];
        let stats = pooled
            .chain(others.map(str::to_owned))
            .filter_map(|name| Self::from_name(&name));
        std::iter::once(Self::Result)
            .chain(stats)
            .chain(Self::DEVICE)
            .collect()
    }

    fn from_name(name: &str) -> Option<Self> {
        let mut others = std::iter::once(Self::Result).chain(Self::DEVICE);
        others
            .find(|column| column.to_string() == name)
            .or_else(|| StatKey::from_name(name).map(Self::Stat))
    }

    fn figure(self, state: &State) -> u64 {
        match self {
            Self::Result => state.outcome as u64,
            Self::Stat(key) => state.stats.get(key),
            Self::Device(_, figure) => figure(state),
        }
    }
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Result => f.write_str("result"),
            Self::Stat(key) => write!(f, "{key}"),
            Self::Device(name, _) => f.write_str(name),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error("operation {operation}: {source}")]
    PrivatePool {
        operation: usize,
        source: PrivatePoolError,
    },
    /// The device or the allocator failed: a bug in this program.
    #[error("operation {operation}: {source}")]
    Device {
        operation: usize,
        source: DeviceError,
    },
}

impl ReplayError {
    pub const fn operation(&self) -> usize {
        match self {
            Self::Prepare(
                PrepareError::IdReused { operation, .. }
                | PrepareError::TooManyStreams { operation },
            )
            | Self::PrivatePool { operation, .. }
            | Self::Device { operation, .. } => *operation,
            Self::Prepare(PrepareError::Device(_)) => 1,
        }
    }
}

/// The interface through which the caching allocator is called. Both give the same statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Front {
    /// [`harness_allocator::allocator::Allocator`]: the caller passes the device and frees by
    /// handle.
    #[default]
    Handle,
    /// [`harness_allocator::allocator::shared::SharedAllocator`]: thread-safe, frees by address.
    Shared,
}

struct State {
    outcome: OperationOutcome,
    stats: MemoryStats,
    calls: DeviceCalls,
    free: Bytes,
}

struct End {
    stats: MemoryStats,
    /// The segments, in the format of a recording's last line.
    snapshot: serde_json::Value,
}

struct AfterEach<F> {
    each: F,
}

impl<T: Target, F: FnMut(usize, &State) -> ControlFlow<()>> OperationObserver<T> for AfterEach<F> {
    /// `None` if `each` stopped the replay.
    type Error = Option<ReplayError>;

    fn after(
        &mut self,
        index: usize,
        _: Kind,
        outcome: OperationOutcome,
        target: &mut T,
    ) -> Result<(), Self::Error> {
        // The simulated device never fails this query.
        let (calls, free) = target.with_device(|device| {
            (
                device.calls(),
                device.memory().map_or(Bytes::ZERO, |memory| memory.free),
            )
        });
        let flow = (self.each)(
            index,
            &State {
                outcome,
                stats: target.stats(),
                calls,
                free,
            },
        );
        if flow.is_break() { Err(None) } else { Ok(()) }
    }

    fn pool_misused(&mut self, index: usize, source: PrivatePoolError) -> Result<(), Self::Error> {
        Err(Some(ReplayError::PrivatePool {
            operation: index + 1,
            source,
        }))
    }
}

/// Replays a trace on an empty device. The allocator reproduces PyTorch's quirks. Calls `each`
/// after each operation. Returns `None` if `each` stopped the replay.
fn replay(
    events: &[TraceEvent],
    config: Config,
    device: SimConfig,
    front: Front,
    each: impl FnMut(usize, &State) -> ControlFlow<()>,
) -> Result<Option<End>, ReplayError> {
    let config = Config {
        quirks: Quirks::AsTorch,
        ..config
    };
    let mut device = SimDevice::new(device);
    let fits = CachingAllocator::new(config.clone()).check_device(&mut device);
    fits.map_err(|source| ReplayError::Device {
        operation: 1,
        source,
    })?;
    match front {
        Front::Handle => {
            let executor = Executor::new(events, &mut device)?.continuing_unsupported();
            let mut allocator = CachingAllocator::new(config);
            replay_on(
                &mut ByHandle {
                    device: &mut device,
                    allocator: &mut allocator,
                },
                executor,
                each,
            )
        }
        Front::Shared => {
            let executor = Executor::new(events, &mut device)?.continuing_unsupported();
            let allocator = SharedAllocator::new(CachingAllocator::new(config), device);
            replay_on(&mut ByPointer(&allocator), executor, each)
        }
    }
}

fn replay_on<T: Target>(
    target: &mut T,
    mut executor: Executor<T::Live>,
    each: impl FnMut(usize, &State) -> ControlFlow<()>,
) -> Result<Option<End>, ReplayError> {
    match executor.run(target, &mut AfterEach { each }) {
        Ok(_) => {}
        Err(PassStopped::Device { operation, source }) => {
            return Err(ReplayError::Device { operation, source });
        }
        Err(PassStopped::Observer(Some(error))) => return Err(error),
        Err(PassStopped::Observer(None)) => return Ok(None),
    }
    let segments: Vec<_> = target
        .snapshot()
        .iter()
        .map(|segment| snapshot_segment(segment, executor.streams()))
        .collect();
    Ok(Some(End {
        stats: target.stats(),
        snapshot: json!({ "snapshot": segments }),
    }))
}

fn snapshot_segment(segment: &SegmentInfo, streams: &Streams) -> serde_json::Value {
    let blocks: Vec<_> = segment
        .blocks
        .iter()
        .map(|block| json!([block.size.0, block.requested.0, block.state as u8]))
        .collect();
    let pool = segment.private_pool.map_or(-1, i64::from);
    let large = u8::from(segment.pool == PoolKind::Large);
    let stream = segment.stream.map(|stream| streams.in_trace(stream).0);
    json!([
        stream,
        large,
        u8::from(segment.expandable),
        pool,
        segment.size.0,
        blocks
    ])
}

/// Replays a trace and writes it in the format of a recording: a header object, one array per
/// operation, and the final segments. Returns the allocator's final counters. The inner error is a
/// [`ReplayError`]; the outer one comes from `output`.
pub fn write_stats(
    events: &[TraceEvent],
    config: Config,
    device: SimConfig,
    front: Front,
    mut output: impl Write,
) -> io::Result<Result<MemoryStats, ReplayError>> {
    let columns = Column::recorded();
    let names: Vec<String> = columns.iter().map(Column::to_string).collect();
    let (torch, addresses) = (config.torch.name(), device.addresses.name());
    writeln!(
        output,
        "{}",
        json!({ "torch": torch, "capacity": device.total.0, "va": addresses, "columns": names })
    )?;
    let mut written = Ok(());
    let replayed = replay(events, config, device, front, |_, state| {
        let row: Vec<u64> = columns.iter().map(|column| column.figure(state)).collect();
        written = writeln!(output, "{}", json!(row));
        if written.is_ok() {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    });
    written?;
    match replayed {
        Ok(Some(End { stats, snapshot })) => {
            writeln!(output, "{snapshot}")?;
            output.flush()?;
            Ok(Ok(stats))
        }
        Ok(None) => unreachable!("only an error of `output` stops the replay"),
        Err(error) => Ok(Err(error)),
    }
}

#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    #[error("{}: cannot be read: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: line {line}: {why}", path.display())]
    Malformed {
        path: PathBuf,
        line: usize,
        why: String,
    },
    #[error("{}: {source}", path.display())]
    Settings { path: PathBuf, source: ConfError },
    #[error("{}: line 1: {source}", path.display())]
    Torch {
        path: PathBuf,
        source: TorchVersionError,
    },
    #[error(
        "{}: line 1: this is a recording of {library}, which has neither versions of PyTorch nor a \
         shared front: leave out `--torch` and `--front`",
        path.display()
    )]
    OtherLibrary { path: PathBuf, library: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayComparison {
    pub operations: usize,
    pub difference: Option<ReplayDifference>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplayDifference {
    /// Each column with its recorded and its replayed value.
    Row {
        operation: usize,
        event: String,
        figures: Vec<(String, i64, i64)>,
    },
    /// The calls of the device and the place of the allocation.
    Decision {
        operation: usize,
        event: String,
        recorded: String,
        replayed: String,
    },
    /// Segments count from 0 in address order. A missing one is empty.
    Snapshot {
        segment: usize,
        recorded: String,
        replayed: String,
    },
    Stopped {
        why: String,
    },
}

impl fmt::Display for ReplayDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row {
                operation,
                event,
                figures,
            } => {
                writeln!(
                    f,
                    "first difference after operation {operation}, `{event}`:"
                )?;
                for (column, recorded, replayed) in figures {
                    let mark = if recorded == replayed { ' ' } else { '>' };
                    writeln!(
                        f,
                        "  {mark} {column:<36} recorded {recorded:>16}   replayed {replayed:>16}"
                    )?;
                }
                Ok(())
            }
            Self::Decision {
                operation,
                event,
                recorded,
                replayed,
            } => {
                writeln!(f, "first difference at operation {operation}, `{event}`:")?;
                writeln!(f, "  recorded {recorded}\n  replayed {replayed}")
            }
            Self::Snapshot {
                segment,
                recorded,
                replayed,
            } => {
                writeln!(
                    f,
                    "all rows are equal, but segment {segment} of the final snapshot differs:"
                )?;
                writeln!(f, "  recorded {recorded}\n  replayed {replayed}")
            }
            Self::Stopped { why } => writeln!(f, "the replay stopped: {why}"),
        }
    }
}

#[derive(Deserialize)]
struct Header {
    torch: Option<String>,
    conf: String,
    capacity: u64,
    #[serde(default, rename = "va")]
    addresses: AddressOrder,
    /// If PyTorch ended before the trace did.
    stopped: Option<StoppedTorch>,
    columns: Vec<String>,
    trace: Vec<String>,
}

/// The key that distinguishes recordings of other libraries from those of PyTorch.
#[derive(Deserialize)]
struct RecordedKind {
    #[serde(rename = "library")]
    source: Option<String>,
}

/// The end of PyTorch in an error of its own.
#[derive(Deserialize)]
struct StoppedTorch {
    /// Empty if it crashed.
    message: String,
    next_op: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Figure {
    Number(i64),
    Error(IgnoredAny),
}

impl Figure {
    fn number(self) -> i64 {
        match self {
            Self::Number(number) => number,
            Self::Error(_) => OperationOutcome::Unsupported as i64,
        }
    }
}

/// Replays a recording's own trace and compares every column of every row, then the final segments.
/// The version of PyTorch and the order of addresses are those of the recording, unless they are
/// given. If PyTorch ended in an assertion, the replay must refuse that operation too.
pub fn verify(
    path: &Path,
    front: Front,
    torch: Option<TorchVersion>,
    addresses: Option<AddressOrder>,
) -> Result<ReplayComparison, RecordingError> {
    let read_error = |source| RecordingError::Read {
        path: path.to_owned(),
        source,
    };
    let malformed = |line, why| malformed(path, line, why);
    let lines = packed::open(path).map_err(read_error)?.lines();
    let mut lines = lines.map(|line| line.map_err(read_error));
    let first = lines
        .next()
        .ok_or_else(|| malformed(1, "the file is empty".to_owned()))??;
    let not_a_header = |error| malformed(1, format!("not a recording's header: {error}"));
    let kind: RecordedKind = serde_json::from_str(&first).map_err(not_a_header)?;
    if let Some(library) = kind.source {
        if torch.is_some() || front != Front::Handle {
            let path = path.to_owned();
            return Err(RecordingError::OtherLibrary { path, library });
        }
        let header = serde_json::from_str(&first).map_err(not_a_header)?;
        return verify_decisions(&header, addresses, lines, malformed);
    }
    let header: Header = serde_json::from_str(&first).map_err(not_a_header)?;
    let config = header.config(path, torch)?;
    let device = SimConfig {
        addresses: addresses.unwrap_or(header.addresses),
        ..SimConfig::replay(Bytes(header.capacity))
    };
    Rows::new(path, &header, lines)?.verify(config, device, front)
}

fn malformed(path: &Path, line: usize, why: String) -> RecordingError {
    RecordingError::Malformed {
        path: path.to_owned(),
        line,
        why,
    }
}

impl Header {
    /// Returns the recorded settings, with the given version of PyTorch or the recorded one.
    fn config(&self, path: &Path, torch: Option<TorchVersion>) -> Result<Config, RecordingError> {
        let version = |text: &str| text.split(' ').next().unwrap_or_default().parse();
        let recorded = self.torch.as_deref().map(version).transpose();
        let recorded = recorded.map_err(|source| RecordingError::Torch {
            path: path.to_owned(),
            source,
        })?;
        let torch = torch.or(recorded).unwrap_or_default();
        Config::parse_for(torch, &self.conf).map_err(|source| RecordingError::Settings {
            path: path.to_owned(),
            source,
        })
    }

    /// Returns the trace, with the operation that PyTorch refused.
    fn events(&self) -> Result<Vec<TraceEvent>, trace::TraceError> {
        let refused = self
            .stopped
            .as_ref()
            .filter(|stopped| !stopped.message.is_empty())
            .map(|stopped| &stopped.next_op);
        trace::parse_lines(self.trace.iter().chain(refused).map(String::as_str))
    }
}

/// The rows of a recording of PyTorch, one per operation, and the final snapshot.
struct Rows<'a, L> {
    path: &'a Path,
    header: &'a Header,
    columns: Vec<Column>,
    events: Vec<TraceEvent>,
    lines: L,
    /// The number of compared operations.
    operations: usize,
}

impl<'a, L: Iterator<Item = Result<String, RecordingError>>> Rows<'a, L> {
    fn new(path: &'a Path, header: &'a Header, lines: L) -> Result<Self, RecordingError> {
        let column = |name: &String| {
            Column::from_name(name)
                .ok_or_else(|| malformed(path, 1, format!("unknown column `{name}`")))
        };
        Ok(Self {
            path,
            header,
            columns: header
                .columns
                .iter()
                .map(column)
                .collect::<Result<_, _>>()?,
            events: (header.events()).map_err(|error| malformed(path, 1, error.to_string()))?,
            lines,
            operations: 0,
        })
    }

    fn verify(
        mut self,
        config: Config,
        device: SimConfig,
        front: Front,
    ) -> Result<ReplayComparison, RecordingError> {
        let events = mem::take(&mut self.events);
        let mut compared = Ok(None);
        let replayed = replay(&events, config, device, front, |index, state| {
            compared = self.compare(index, &events[index], state);
            if matches!(compared, Ok(None)) {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        });
        let difference = match (compared?, replayed) {
            (None, Ok(Some(_))) if self.header.stopped.is_some() => None,
            (None, Ok(Some(end))) => self.compare_end(events.len() + 2, &end)?,
            (difference, Ok(_)) => difference,
            (None, Err(error)) if self.is_refusal(&error) => None,
            (_, Err(error)) => Some(ReplayDifference::Stopped {
                why: error.to_string(),
            }),
        };
        Ok(ReplayComparison {
            operations: self.operations,
            difference,
        })
    }

    /// Returns whether the replay refused the operation in which PyTorch ended.
    fn is_refusal(&self, error: &ReplayError) -> bool {
        matches!(
            error,
            ReplayError::Device {
                operation,
                source: DeviceError::Unavailable { .. },
            } if *operation > self.header.trace.len()
        )
    }

    /// Compares the state after an operation with its row.
    fn compare(
        &mut self,
        index: usize,
        event: &TraceEvent,
        state: &State,
    ) -> Result<Option<ReplayDifference>, RecordingError> {
        if index == self.header.trace.len() {
            let is_refused = state.outcome == OperationOutcome::Unsupported;
            return Ok((!is_refused).then(|| ReplayDifference::Stopped {
                why: format!("PyTorch refused `{event}`, and the replay did not"),
            }));
        }
        let recorded = self.row(index + 2)?;
        self.operations = index + 1;
        let figure = |column: &Column| column.figure(state) as i64;
        let replayed: Vec<i64> = self.columns.iter().map(figure).collect();
        if recorded == replayed {
            return Ok(None);
        }
        let names = self.header.columns.iter().cloned();
        let figures = names
            .zip(recorded)
            .zip(replayed)
            .map(|((name, recorded), replayed)| (name, recorded, replayed))
            .collect();
        Ok(Some(ReplayDifference::Row {
            operation: self.operations,
            event: event.to_string(),
            figures,
        }))
    }

    /// Reads the next row.
    fn row(&mut self, number: usize) -> Result<Vec<i64>, RecordingError> {
        let malformed = |why: String| malformed(self.path, number, why);
        let line = self
            .lines
            .next()
            .ok_or_else(|| malformed("the recording ends before its trace".to_owned()))??;
        let row: Vec<Figure> = serde_json::from_str(&line)
            .map_err(|error| malformed(format!("not a row: {error}")))?;
        if row.len() != self.columns.len() {
            return Err(malformed(format!(
                "{} figures for {} columns",
                row.len(),
                self.columns.len()
            )));
        }
        Ok(row.into_iter().map(Figure::number).collect())
    }

    /// Compares the segments at the end with the recorded snapshot.
    fn compare_end(
        &mut self,
        number: usize,
        end: &End,
    ) -> Result<Option<ReplayDifference>, RecordingError> {
        let malformed = |why: String| malformed(self.path, number, why);
        let line = self
            .lines
            .next()
            .ok_or_else(|| malformed("the snapshot is missing".to_owned()))??;
        let recorded: serde_json::Value = serde_json::from_str(&line)
            .map_err(|error| malformed(format!("not a snapshot: {error}")))?;
        Ok(compare_snapshots(
            &recorded["snapshot"],
            &end.snapshot["snapshot"],
        ))
    }
}

/// Replays the recording of another library's allocator and compares each line.
fn verify_decisions(
    header: &decisions::Header,
    addresses: Option<AddressOrder>,
    lines: impl Iterator<Item = Result<String, RecordingError>>,
    malformed: impl Fn(usize, String) -> RecordingError,
) -> Result<ReplayComparison, RecordingError> {
    let events = trace::parse_lines(header.trace.iter().map(String::as_str))
        .map_err(|error| malformed(1, error.to_string()))?;
    let recorded: Vec<String> = (lines.zip(2..))
        .map(|(line, number)| {
            serde_json::from_str(&line?)
                .map_err(|error| malformed(number, format!("not a line of a decision: {error}")))
        })
        .collect::<Result<_, _>>()?;
    let mut operations = 0;
    let mut compare = |index: usize, replayed: &str| {
        let recorded = recorded.get(index).ok_or_else(|| {
            malformed(index + 2, "the recording ends before its trace".to_owned())
        })?;
        operations = index + 1;
        Ok((recorded != replayed).then(|| ReplayDifference::Decision {
            operation: operations,
            event: events[index].to_string(),
            recorded: recorded.clone(),
            replayed: replayed.to_owned(),
        }))
    };
    let mut compared = Ok(None);
    let replayed = decisions::replay(header, &events, &recorded, addresses, |index, line| {
        compared = compare(index, line);
        if matches!(compared, Ok(None)) {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    });
    let difference = compared?.or_else(|| {
        let why = replayed.err()?.to_string();
        Some(ReplayDifference::Stopped { why })
    });
    Ok(ReplayComparison {
        operations,
        difference,
    })
}

fn compare_snapshots(
    recorded: &serde_json::Value,
    replayed: &serde_json::Value,
) -> Option<ReplayDifference> {
    if recorded == replayed {
        return None;
    }
    let text = |segments: &serde_json::Value, index: usize| {
        segments
            .get(index)
            .map(ToString::to_string)
            .unwrap_or_default()
    };
    let same =
        |index: &usize| recorded.get(index).is_some() && recorded.get(index) == replayed.get(index);
    let segment = (0..).take_while(same).count();
    Some(ReplayDifference::Snapshot {
        segment,
        recorded: text(recorded, segment),
        replayed: text(replayed, segment),
    })
}
