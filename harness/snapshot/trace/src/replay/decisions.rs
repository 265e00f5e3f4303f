//! Recordings of other libraries' allocators: for each operation, the calls of the device in
//! order, and the place of the allocation.
//!
//! A call is `malloc SIZE -> REGION`, `malloc SIZE -> oom`, `free REGION`, `record STREAM`,
//! `wait STREAM for STREAM`, `synchronize STREAM` or `synchronize all`, each followed by `; `. The
//! last part is `at REGION+OFFSET SIZE`, `oom`, `freed` or `ignored`. Regions are numbered in the
//! order of their allocation.

use std::fmt::Write as _;
use std::{collections::BTreeMap, ops::ControlFlow};

use harness_allocator::allocator::bfc::{BfcAllocator, BfcConfig};
use harness_allocator::allocator::cupy_pool::{CupyPool, CupyPoolConfig};
use harness_allocator::allocator::ort_arena::{ExtendStrategy, OrtArenaConfig};
use harness_allocator::allocator::rmm_arena::{RmmArena, RmmArenaConfig};
use harness_allocator::allocator::rmm_binning::{RmmBinning, RmmBinningConfig};
use harness_allocator::allocator::rmm_pool::{RmmPool, RmmPoolConfig};
use harness_allocator::allocator::xla_bfc::XlaBfcConfig;
use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, Request};
use harness_allocator::device::sim::{AddressOrder, SimConfig, SimDevice};
use harness_allocator::device::{DeviceError, DevicePtr, EventId, StreamId, TestDevice, wrapper};
use harness_allocator::units::Bytes;
use serde::Deserialize;

use super::ReplayError;
use crate::execute::{
    Executor, Kind, OperationObserver, OperationOutcome, PassStopped, Streams, Target,
};
use crate::trace::TraceEvent;

#[derive(Deserialize)]
pub(super) struct Header {
    #[serde(flatten)]
    settings: Settings,
    /// The memory that the allocator can get.
    capacity: u64,
    /// The memory of the device. Other programs hold the rest.
    total: Option<u64>,
    #[serde(default, rename = "va")]
    addresses: AddressOrder,
    pub(super) trace: Vec<String>,
}

#[derive(Deserialize)]
#[serde(tag = "allocator", content = "settings", rename_all = "snake_case")]
enum Settings {
    Bfc(BfcConfig),
    RmmPool(RmmPoolConfig),
    RmmArena(RmmArenaConfig),
    RmmBinning(Bins),
    OrtArena(OrtArenaSettings),
    XlaBfc(XlaBfcConfig),
    CupyPool(CupyPoolConfig),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RmmBinningSettings {
    pool: RmmPoolConfig,
    min_size_exponent: u32,
    max_size_exponent: u32,
}

#[derive(Deserialize)]
#[serde(try_from = "RmmBinningSettings")]
struct Bins(RmmBinningConfig);

impl TryFrom<RmmBinningSettings> for Bins {
    type Error = String;

    fn try_from(settings: RmmBinningSettings) -> Result<Self, String> {
        let (min, max) = (settings.min_size_exponent, settings.max_size_exponent);
        let possible = RmmBinningConfig::EXPONENTS;
        if min > max || ![min, max].iter().all(|given| possible.contains(given)) {
            return Err(format!(
                "the exponents of the bins rise within {} to {}, unlike {min} to {max}",
                possible.start(),
                possible.end()
            ));
        }
        Ok(Self(RmmBinningConfig {
            pool: settings.pool,
            min_size_exponent: min,
            max_size_exponent: max,
        }))
    }
}

/// A setting that is absent has the library's default.
#[derive(Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
struct OrtArenaSettings {
    max_mem: Option<u64>,
    #[serde(default)]
    same_as_requested: bool,
    initial_chunk_size_bytes: Option<u64>,
    max_dead_bytes_per_chunk: Option<u64>,
    initial_growth_chunk_size_bytes: Option<u64>,
    max_power_of_two_extend_bytes: Option<u64>,
}

impl OrtArenaSettings {
    fn config(self) -> OrtArenaConfig {
        let default = OrtArenaConfig::default();
        let given = |setting: Option<u64>, default| setting.map_or(default, Bytes);
        OrtArenaConfig {
            max_mem: self.max_mem.map(Bytes),
            arena_extend_strategy: if self.same_as_requested {
                ExtendStrategy::SameAsRequested
            } else {
                ExtendStrategy::NextPowerOfTwo
            },
            initial_chunk_size_bytes: given(
                self.initial_chunk_size_bytes,
                default.initial_chunk_size_bytes,
            ),
            max_dead_bytes_per_chunk: given(
                self.max_dead_bytes_per_chunk,
                default.max_dead_bytes_per_chunk,
            ),
            initial_growth_chunk_size_bytes: given(
                self.initial_growth_chunk_size_bytes,
                default.initial_growth_chunk_size_bytes,
            ),
            max_power_of_two_extend_bytes: given(
                self.max_power_of_two_extend_bytes,
                default.max_power_of_two_extend_bytes,
            ),
            shrinkage_keeps_first_region: !self.same_as_requested,
        }
    }
}

impl Settings {
    fn build(&self) -> Model {
        Model::Decided(match self {
            Self::Bfc(config) => Box::new(BfcAllocator::new(config.clone())),
            Self::RmmPool(config) => Box::new(RmmPool::new(config.clone())),
            Self::RmmArena(config) => Box::new(RmmArena::new(config.clone())),
            Self::RmmBinning(Bins(config)) => Box::new(RmmBinning::new(config.clone())),
            Self::OrtArena(settings) => Box::new(BfcAllocator::onnx_runtime(settings.config())),
            Self::XlaBfc(config) => Box::new(BfcAllocator::xla(config.clone())),
            Self::CupyPool(config) => return Model::Cupy(Box::new(CupyPool::new(config.clone()))),
        })
    }
}

enum Model {
    /// Its rules decide everything.
    Decided(Box<dyn Allocator>),
    /// Addresses on the host decide between equal chunks, so it takes the recorded one of them.
    Cupy(Box<CupyPool>),
}

impl Model {
    fn allocator(&mut self) -> &mut (dyn Allocator + 'static) {
        match self {
            Self::Decided(allocator) => &mut **allocator,
            Self::Cupy(pool) => &mut **pool,
        }
    }
}

/// Replays the operations of a recording and calls `each` with the line of each one.
pub(super) fn replay(
    header: &Header,
    events: &[TraceEvent],
    recorded: &[String],
    addresses: Option<AddressOrder>,
    each: impl FnMut(usize, &str) -> ControlFlow<()>,
) -> Result<(), ReplayError> {
    let total = header.total.unwrap_or(header.capacity);
    let mut device = SimDevice::new(SimConfig {
        context_overhead: Bytes(total.saturating_sub(header.capacity)),
        addresses: addresses.unwrap_or(header.addresses),
        ..SimConfig::replay(Bytes(total))
    });
    let mut executor = Executor::new(events, &mut device)?;
    let mut target = Recorded {
        model: header.settings.build(),
        recorded: recorded.iter(),
        device: Logged {
            inner: device,
            streams: executor.streams().clone(),
            line: String::new(),
            regions: Vec::new(),
            recorded: BTreeMap::new(),
        },
    };
    match executor.run(&mut target, &mut Lines { each }) {
        Ok(_) | Err(PassStopped::Observer(())) => Ok(()),
        Err(PassStopped::Device { operation, source }) => {
            Err(ReplayError::Device { operation, source })
        }
    }
}

struct Lines<F> {
    each: F,
}

impl<F: FnMut(usize, &str) -> ControlFlow<()>> OperationObserver<Recorded<'_>> for Lines<F> {
    /// `each` stopped the replay.
    type Error = ();

    fn after(
        &mut self,
        index: usize,
        kind: Kind,
        outcome: OperationOutcome,
        target: &mut Recorded<'_>,
    ) -> Result<(), ()> {
        let line = &mut target.device.line;
        match (kind, outcome) {
            (_, OperationOutcome::OutOfMemory | OperationOutcome::Unsupported) => {
                line.push_str("oom")
            }
            (_, OperationOutcome::Ignored) => line.push_str("ignored"),
            (Kind::Free, OperationOutcome::Done) => line.push_str("freed"),
            // The target has written the place of an allocation.
            (Kind::Allocate | Kind::Other, OperationOutcome::Done) => {}
        }
        let flow = (self.each)(index, line);
        line.clear();
        target.recorded.next();
        if flow.is_break() { Err(()) } else { Ok(()) }
    }
}

struct Recorded<'a> {
    model: Model,
    /// The recorded lines from that of the current operation on.
    recorded: std::slice::Iter<'a, String>,
    device: Logged,
}

impl Target for Recorded<'_> {
    type Live = Allocation;
    type Allocator = dyn Allocator;

    fn allocate(&mut self, request: Request) -> Result<Allocation, Box<AllocatorError>> {
        let line = self.recorded.as_slice().first();
        if let Model::Cupy(pool) = &mut self.model
            && let Some(place) = line.and_then(|line| self.device.place(line))
        {
            pool.choose(place);
        }
        let allocation = (self.model.allocator()).allocate(&mut self.device, request)?;
        self.device.note_place(&allocation);
        Ok(allocation)
    }

    fn free(&mut self, live: Allocation) -> Result<(), DeviceError> {
        self.model.allocator().free(&mut self.device, live)
    }

    fn record_stream(&mut self, live: &Allocation, stream: StreamId) -> Result<(), DeviceError> {
        self.model.allocator().record_stream(live, stream)
    }

    fn with<R>(&mut self, call: impl FnOnce(&mut Self::Allocator, &mut dyn TestDevice) -> R) -> R {
        call(self.model.allocator(), &mut self.device)
    }
}

/// A device that writes its calls.
struct Logged {
    inner: SimDevice,
    streams: Streams,
    line: String,
    /// The start and size of each region ever allocated.
    regions: Vec<(DevicePtr, Bytes)>,
    /// The stream of each event's last record.
    recorded: BTreeMap<EventId, StreamId>,
}

impl Logged {
    fn note(&mut self, call: std::fmt::Arguments<'_>) {
        // Writing to a string never fails.
        let _ = write!(self.line, "{call}");
    }

    /// The address in a recorded line, if its region exists.
    fn place(&self, line: &str) -> Option<DevicePtr> {
        let (_, place) = line.rsplit_once("at ")?;
        let (region, offset) = place.split_once(' ')?.0.split_once('+')?;
        let (start, _) = self.regions.get(region.parse::<usize>().ok()?)?;
        Some(start.offset(Bytes(offset.parse().ok()?)))
    }

    fn note_place(&mut self, allocation: &Allocation) {
        let address = allocation.ptr();
        let holds =
            |&(start, size): &(DevicePtr, Bytes)| start <= address && address < start.offset(size);
        match self.regions.iter().rposition(holds) {
            Some(region) => {
                let offset = address.0 - self.regions[region].0.0;
                self.note(format_args!("at {region}+{offset} {}", allocation.size().0));
            }
            None => self.note(format_args!("null")),
        }
    }
}

impl wrapper::DeviceWrapper for Logged {
    type Inner = SimDevice;

    fn inner(&self) -> &SimDevice {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut SimDevice {
        &mut self.inner
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        use harness_allocator::device::Device as _;
        let answer = self.inner.malloc(size);
        match answer {
            Ok(address) => {
                let region = self.regions.len();
                self.note(format_args!("malloc {} -> {region}; ", size.0));
                self.regions.push((address, size));
            }
            Err(_) => self.note(format_args!("malloc {} -> oom; ", size.0)),
        }
        answer
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        use harness_allocator::device::Device as _;
        if let Some(region) = self.regions.iter().rposition(|&(start, _)| start == ptr) {
            self.note(format_args!("free {region}; "));
        }
        self.inner.free(ptr)
    }

    fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        use harness_allocator::device::Device as _;
        self.recorded.insert(event, stream);
        let stream_in_trace = self.streams.in_trace(stream).0;
        self.note(format_args!("record {stream_in_trace}; "));
        self.inner.record_event(event, stream)
    }

    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        use harness_allocator::device::Device as _;
        let waiter = self.streams.in_trace(stream).0;
        match self
            .recorded
            .get(&event)
            .map(|&of| self.streams.in_trace(of).0)
        {
            Some(other) => self.note(format_args!("wait {waiter} for {other}; ")),
            None => self.note(format_args!("wait {waiter} for nothing; ")),
        }
        self.inner.wait_event(stream, event)
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        use harness_allocator::device::Device as _;
        let stream_in_trace = self.streams.in_trace(stream).0;
        self.note(format_args!("synchronize {stream_in_trace}; "));
        self.inner.synchronize_stream(stream)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        use harness_allocator::device::Device as _;
        self.note(format_args!("synchronize all; "));
        self.inner.synchronize()
    }
}

impl wrapper::TestDeviceWrapper for Logged {}
