//! Replaying allocation traces on the simulated device, and comparing with recorded runs of PyTorch's allocator.
//!
//! A [`Replay`] applies operations one by one; a [`Front`] says by which of the allocator's fronts; a [`Column`] is a figure that recordings
//! keep; [`Streams`] are what a trace names and a device has; [`verify`] compares a recording with its own replay, row by row, and the final structure.

mod streams;
mod subject;

use std::fmt;
use std::io::{self, BufRead as _, Write};
use std::path::{Path, PathBuf};

use crate::trace::{self, TraceEvent};
use harness_allocator::allocator::caching::{ConfError, Config, Quirks};
use harness_allocator::allocator::{AllocatorError, PrivatePoolError, Request};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceError, TestDevice};
use harness_allocator::stats::{BlockState, MemoryStats, PoolKind, SegmentInfo, StatKey};
use harness_allocator::units::Bytes;
use serde::Deserialize;
use serde_json::json;

pub use self::streams::Streams;
use self::subject::{ByHandle, Shared, Subject};
use harness_base::packed;

/// A figure of a recording: column 0 is always [`Column::Result`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// How the operation ended, see [`OpResult`].
    Result,
    /// A key of `torch.cuda.memory_stats()`.
    Stat(StatKey),
    /// The device's own count.
    Device(DeviceColumn),
}

/// What the device counts itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceColumn {
    /// Calls of malloc, failed ones included.
    MallocCalls,
    /// Failed ones.
    MallocFails,
    /// Calls of free.
    FreeCalls,
    /// Physical pages asked for, failed ones included: none without expandable segments.
    CreateCalls,
    /// Physical pages given back.
    ReleaseCalls,
    /// Bytes free on the device.
    FreeBytes,
}

impl DeviceColumn {
    const ALL: [(Self, &'static str); 6] = [
        (Self::MallocCalls, "cudaMalloc_calls"),
        (Self::MallocFails, "cudaMalloc_fails"),
        (Self::FreeCalls, "cudaFree_calls"),
        (Self::CreateCalls, "cuMemCreate_calls"),
        (Self::ReleaseCalls, "cuMemRelease_calls"),
        (Self::FreeBytes, "device_free"),
    ];
}

impl Column {
    /// The columns of every recording, in their order.
    #[must_use]
    pub fn recorded() -> Vec<Self> {
        let pooled = ["allocated_bytes", "reserved_bytes"]
            .iter()
            .flat_map(|family| ["all", "small_pool", "large_pool"].map(|pool| format!("{family}.{pool}.current")));
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
        let names = pooled.chain(others.map(str::to_owned)).collect::<Vec<_>>();
        let stats = names.iter().filter_map(|name| Self::from_name(name));
        std::iter::once(Self::Result).chain(stats).chain(DeviceColumn::ALL.map(|(column, _)| Self::Device(column))).collect()
    }

    fn from_name(name: &str) -> Option<Self> {
        if name == "result" {
            return Some(Self::Result);
        }
        let device = DeviceColumn::ALL.into_iter().find(|&(_, known)| known == name);
        device.map(|(column, _)| Self::Device(column)).or_else(|| StatKey::from_name(name).map(Self::Stat))
    }
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Result => f.write_str("result"),
            Self::Stat(key) => write!(f, "{key}"),
            Self::Device(device) => {
                let name = DeviceColumn::ALL.iter().find(|(column, _)| column == device).map_or("", |&(_, name)| name);
                f.write_str(name)
            }
        }
    }
}

/// How an operation of a trace ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpResult {
    /// Done.
    Ok = 0,
    /// There was no memory.
    OutOfMemory = 1,
    /// The id is not live: nothing was done.
    Ignored = 2,
}

/// A trace that cannot be replayed to its end.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// An id is allocated while it is live: the trace is broken.
    #[error("operation {operation}: id {id} is allocated twice; an id must never be used again")]
    IdReused {
        /// Counted from 1.
        operation: usize,
        /// The id.
        id: u64,
    },
    /// A private pool is misused by the trace.
    #[error("operation {operation}: {source}")]
    PrivatePool {
        /// Counted from 1.
        operation: usize,
        /// What is wrong.
        source: PrivatePoolError,
    },
    /// The device or the allocator failed: a mistake in this program.
    #[error("operation {operation}: {source}")]
    Device {
        /// Counted from 1.
        operation: usize,
        /// What happened.
        source: DeviceError,
    },
}

/// By which front the caching allocator is used. The figures are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Front {
    /// [`harness_allocator::allocator::Allocator`]: the device is passed in, and a free goes by handle.
    #[default]
    Handle,
    /// [`harness_allocator::allocator::shared::SharedAllocator`]: locked, freeing by address; here with one core for all streams.
    Shared,
}

/// A trace being replayed: an allocator on a simulated device.
pub struct Replay {
    subject: Box<dyn Subject>,
    streams: Streams,
    pressure: Bytes,
    done: usize,
}

impl Replay {
    /// An empty device of that capacity, with the streams that these operations name, and an allocator that reproduces PyTorch's quirks.
    ///
    /// # Errors
    /// [`ReplayError::Device`]: the device cannot make that many streams.
    pub fn new(events: &[TraceEvent], config: Config, capacity: Bytes, front: Front) -> Result<Self, ReplayError> {
        let config = Config { quirks: Quirks::Torch211, ..config };
        let mut device = SimDevice::new(SimConfig::replay(capacity));
        // Nothing has been done, so it is the first operation that cannot be.
        let streams = Streams::make(events, &mut device).map_err(|source| ReplayError::Device { operation: 1, source })?;
        let subject: Box<dyn Subject> = match front {
            Front::Handle => Box::new(ByHandle::new(device, config)),
            Front::Shared => Box::new(Shared::new(device, config)),
        };
        Ok(Self { subject, streams, pressure: Bytes::ZERO, done: 0 })
    }

    /// Applies one operation, of those that this was made for.
    ///
    /// # Errors
    /// [`ReplayError`]; an out-of-memory is a result.
    pub fn apply(&mut self, event: &TraceEvent) -> Result<OpResult, ReplayError> {
        self.done += 1;
        let operation = self.done;
        let device_error = |source| ReplayError::Device { operation, source };
        let pool_error = |source| ReplayError::PrivatePool { operation, source };
        let subject = &mut *self.subject;
        match self.streams.on_device(*event) {
            TraceEvent::Allocate { id, size, stream } => return self.allocate(id, Request { size, stream }),
            TraceEvent::Free { id } if !subject.is_live(id) => return Ok(OpResult::Ignored),
            TraceEvent::Free { id } => subject.free(id).map_err(device_error)?,
            TraceEvent::RecordStream { id, .. } if !subject.is_live(id) => return Ok(OpResult::Ignored),
            TraceEvent::RecordStream { id, stream } => subject.record_stream(id, stream).map_err(device_error)?,
            TraceEvent::SynchronizeStream(stream) => subject.device().synchronize_stream(stream).map_err(device_error)?,
            TraceEvent::Synchronize => subject.device().synchronize().map_err(device_error)?,
            TraceEvent::EmptyCache => subject.empty_cache().map_err(device_error)?,
            TraceEvent::SetFraction(fraction) => subject.set_memory_fraction(fraction),
            TraceEvent::ResetPeaks => subject.reset_peaks(),
            TraceEvent::BeginPool(pool) => subject.begin(pool).map_err(pool_error)?,
            TraceEvent::EndPool(pool) => subject.end(pool).map_err(pool_error)?,
            TraceEvent::ReleasePool(pool) => match subject.release(pool) {
                Ok(()) => {}
                Err(PrivatePoolError::Unknown(_)) => return Ok(OpResult::Ignored),
                Err(error) => return Err(pool_error(error)),
            },
            TraceEvent::Pressure(change) => {
                let held = self.pressure.0.saturating_add_signed(change);
                self.pressure = subject.device().set_pressure(Bytes(held)).map_err(device_error)?;
            }
        }
        Ok(OpResult::Ok)
    }

    /// The figure of a column after the last operation.
    #[must_use]
    pub fn value(&mut self, column: Column, result: OpResult) -> u64 {
        let column = match column {
            Column::Result => return result as u64,
            Column::Stat(key) => return self.subject.stats().get(key),
            Column::Device(column) => column,
        };
        let mut device = self.subject.device();
        let calls = device.calls();
        match column {
            DeviceColumn::MallocCalls => calls.malloc,
            DeviceColumn::MallocFails => calls.malloc_failures,
            DeviceColumn::FreeCalls => calls.free,
            DeviceColumn::CreateCalls => calls.create,
            DeviceColumn::ReleaseCalls => calls.release,
            // The simulated device always answers.
            DeviceColumn::FreeBytes => device.memory().map_or(0, |memory| memory.free.0),
        }
    }

    /// The structure, in the form of a recording's last line.
    #[must_use]
    pub fn snapshot(&self) -> serde_json::Value {
        let segments: Vec<_> = self.subject.snapshot().iter().map(|segment| snapshot_segment(segment, &self.streams)).collect();
        json!({ "snapshot": segments })
    }

    fn allocate(&mut self, id: u64, request: Request) -> Result<OpResult, ReplayError> {
        let operation = self.done;
        if self.subject.is_live(id) {
            return Err(ReplayError::IdReused { operation, id });
        }
        match self.subject.allocate(id, request) {
            Ok(()) => Ok(OpResult::Ok),
            Err(AllocatorError::OutOfMemory(_) | AllocatorError::TooLarge { .. }) => Ok(OpResult::OutOfMemory),
            Err(AllocatorError::Device(source)) => Err(ReplayError::Device { operation, source }),
        }
    }
}

fn snapshot_segment(segment: &SegmentInfo, streams: &Streams) -> serde_json::Value {
    let blocks: Vec<_> = segment.blocks.iter().map(|block| json!([block.size.0, block.requested.0, state_code(block.state)])).collect();
    let pool = segment.private_pool.map_or(-1, i64::from);
    let large = u8::from(segment.pool == PoolKind::Large);
    let stream = segment.stream.map(|stream| streams.in_trace(stream).0);
    json!([stream, large, u8::from(segment.expandable), pool, segment.size.0, blocks])
}

fn state_code(state: BlockState) -> u8 {
    match state {
        BlockState::Inactive => 0,
        BlockState::PendingFree => 1,
        BlockState::Allocated => 2,
    }
}

/// Replays a trace and writes one array an operation behind a header object, then the snapshot: the form of a recording. Returns the
/// allocator's counters after the last operation.
///
/// # Errors
/// [`ReplayError`] inside, [`io::Error`] of the output outside.
pub fn write_stats(
    events: &[TraceEvent],
    config: Config,
    capacity: Bytes,
    front: Front,
    mut output: impl Write,
) -> io::Result<Result<MemoryStats, ReplayError>> {
    let columns = Column::recorded();
    let names: Vec<String> = columns.iter().map(Column::to_string).collect();
    writeln!(output, "{}", json!({ "capacity": capacity.0, "columns": names }))?;
    let mut replay = match Replay::new(events, config, capacity, front) {
        Ok(replay) => replay,
        Err(error) => return Ok(Err(error)),
    };
    for event in events {
        let result = match replay.apply(event) {
            Ok(result) => result,
            Err(error) => return Ok(Err(error)),
        };
        let row: Vec<u64> = columns.iter().map(|&column| replay.value(column, result)).collect();
        writeln!(output, "{}", json!(row))?;
    }
    writeln!(output, "{}", replay.snapshot())?;
    output.flush()?;
    Ok(Ok(replay.subject.stats()))
}

/// A recording that cannot be compared.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// Not readable. Check the path.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not a recording: see the format in the documentation of traces.
    #[error("{}: line {line}: {why}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        why: String,
    },
    /// Its settings are not supported.
    #[error("{}: {source}", path.display())]
    Settings {
        /// The file.
        path: PathBuf,
        /// Which, and why.
        source: ConfError,
    },
}

/// What a comparison found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Comparison {
    /// Operations compared.
    pub operations: usize,
    /// The first thing that differs, in full.
    pub difference: Option<Difference>,
}

/// The first thing that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// A row.
    Row {
        /// Counted from 1.
        operation: usize,
        /// The operation in the form of a trace.
        event: String,
        /// Column, recorded figure, replayed figure, of all columns.
        figures: Vec<(String, i64, i64)>,
    },
    /// The structure at the end.
    Snapshot {
        /// Counted from 0, in address order.
        segment: usize,
        /// As recorded; empty if there are fewer.
        recorded: String,
        /// As replayed; empty if there are fewer.
        replayed: String,
    },
    /// The replay stopped.
    Stopped {
        /// Why.
        why: String,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Row { operation, event, figures } => {
                writeln!(f, "first difference after operation {operation}, `{event}`:")?;
                for (column, recorded, replayed) in figures {
                    let mark = if recorded == replayed { ' ' } else { '>' };
                    writeln!(f, "  {mark} {column:<36} recorded {recorded:>16}   replayed {replayed:>16}")?;
                }
                Ok(())
            }
            Self::Snapshot { segment, recorded, replayed } => {
                writeln!(f, "all rows are equal, but segment {segment} of the final snapshot differs:")?;
                writeln!(f, "  recorded {recorded}\n  replayed {replayed}")
            }
            Self::Stopped { why } => writeln!(f, "the replay stopped: {why}"),
        }
    }
}

#[derive(Deserialize)]
struct Header {
    conf: String,
    capacity: u64,
    columns: Vec<String>,
    trace: Vec<String>,
}

/// Replays a recording's own trace and compares every column of every row and the final snapshot.
///
/// # Errors
/// [`RecordingError`] where the file is not a recording; a difference is an answer.
pub fn verify(path: &Path, front: Front) -> Result<Comparison, RecordingError> {
    let read_error = |source| RecordingError::Read { path: path.to_owned(), source };
    let malformed = |line: usize, why: String| RecordingError::Malformed { path: path.to_owned(), line, why };
    let mut lines = packed::open(path).map_err(read_error)?.lines();
    let first = lines.next().ok_or_else(|| malformed(1, "the file is empty".to_owned()))?.map_err(read_error)?;
    let header: Header = serde_json::from_str(&first).map_err(|error| malformed(1, format!("not a recording's header: {error}")))?;
    let column = |name: &String| Column::from_name(name).ok_or_else(|| malformed(1, format!("unknown column `{name}`")));
    let columns = header.columns.iter().map(column).collect::<Result<Vec<_>, _>>()?;
    let events = trace::parse_lines(header.trace.iter().map(String::as_str)).map_err(|error| malformed(1, error.to_string()))?;
    let config = Config::parse(&header.conf).map_err(|source| RecordingError::Settings { path: path.to_owned(), source })?;
    let stopped =
        |operations: usize, error: ReplayError| Comparison { operations, difference: Some(Difference::Stopped { why: error.to_string() }) };
    let mut replay = match Replay::new(&events, config, Bytes(header.capacity), front) {
        Ok(replay) => replay,
        Err(error) => return Ok(stopped(0, error)),
    };
    for (index, event) in events.iter().enumerate() {
        let line =
            lines.next().ok_or_else(|| malformed(index + 2, "the recording ends before its trace".to_owned()))?.map_err(read_error)?;
        let recorded: Vec<i64> = serde_json::from_str(&line).map_err(|error| malformed(index + 2, format!("not a row: {error}")))?;
        if recorded.len() != columns.len() {
            return Err(malformed(index + 2, format!("{} figures for {} columns", recorded.len(), columns.len())));
        }
        let result = match replay.apply(event) {
            Ok(result) => result,
            Err(error) => return Ok(stopped(index, error)),
        };
        let replayed: Vec<i64> = columns.iter().map(|&column| replay.value(column, result) as i64).collect();
        if recorded != replayed {
            let names = header.columns.iter().cloned();
            let figures = names.zip(recorded).zip(replayed).map(|((name, recorded), replayed)| (name, recorded, replayed)).collect();
            let difference = Difference::Row { operation: index + 1, event: event.to_string(), figures };
            return Ok(Comparison { operations: index + 1, difference: Some(difference) });
        }
    }
    let last = events.len() + 2;
    let line = lines.next().ok_or_else(|| malformed(last, "the snapshot is missing".to_owned()))?.map_err(read_error)?;
    let recorded: serde_json::Value = serde_json::from_str(&line).map_err(|error| malformed(last, format!("not a snapshot: {error}")))?;
    let difference = compare_snapshots(&recorded["snapshot"], &replay.snapshot()["snapshot"]);
    Ok(Comparison { operations: events.len(), difference })
}

fn compare_snapshots(recorded: &serde_json::Value, replayed: &serde_json::Value) -> Option<Difference> {
    if recorded == replayed {
        return None;
    }
    let text = |segments: &serde_json::Value, index: usize| segments.get(index).map(ToString::to_string).unwrap_or_default();
    let segments = [recorded, replayed].map(|value| value.as_array().map_or(0, Vec::len)).into_iter().max().unwrap_or_default();
    let segment = (0..segments).find(|&index| recorded.get(index) != replayed.get(index)).unwrap_or_default();
    Some(Difference::Snapshot { segment, recorded: text(recorded, segment), replayed: text(replayed, segment) })
}
