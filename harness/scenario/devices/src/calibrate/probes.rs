//! Measures each figure in a round, and computes the figures from the samples.

use harness_allocator::device::{DeviceError, MemoryRange, PoolId, StreamId, Tag, TestDevice};
use harness_allocator::units::{Bytes, Nanos};

use super::fit::{Curve, constant, error_of, line, of_curve};
use crate::profile::{Figures, MeasuredFigure, UnitText};

/// Number of calls timed together if one is too short for the clock. 64 calls of 100 ns are well
/// above the clock's own cost, and 64 launches still fit into a stream's queue without waiting.
const BATCH: u64 = 64;
/// Number of streams created together. Smaller, because each takes device memory.
const STREAMS: u64 = 8;
/// The smallest allocation. Each further size doubles.
const SMALLEST: Bytes = Bytes::mib(2);
/// Page sizes of expandable segments, for small and large blocks (`kSmallBuffer` and `kLargeBuffer`
/// of PyTorch's `c10/core/AllocatorConfig.h`).
const PAGES: [Bytes; 2] = [Bytes::mib(2), Bytes::mib(20)];
/// Numbers of pages mapped by one call.
const PAGE_COUNTS: [u64; 3] = [1, 2, 4];
/// Smallest and largest fill: long enough for the events' clock, which counts half microseconds
/// (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__EVENT.html>), and short enough to
/// repeat.
const FILLS: (Bytes, Bytes) = (Bytes::mib(16), Bytes::gib(1));
/// Keeps the stream busy while a fill and its two events are queued, so they run without a gap.
const HEAD_START: Nanos = Nanos::micros(500);

pub(super) struct Probes {
    stream: StreamId,
    /// Maximum number of bytes filled or mapped at once.
    room: Bytes,
    pool: Option<PoolId>,
    samples: Samples,
}

/// In nanoseconds per call. Curves are per MiB, for the fill per GiB.
#[derive(Default)]
struct Samples {
    malloc: Curve,
    free: Curve,
    map: Vec<f64>,
    unmap: Vec<f64>,
    pool: Vec<f64>,
    submit: Vec<f64>,
    stream_create: Vec<f64>,
    event_create: Vec<f64>,
    event_record: Vec<f64>,
    event_query: Vec<f64>,
    synchronize: Vec<f64>,
    transfer: Curve,
}

impl Probes {
    /// Creates the stream and the pool of all rounds. Allocations take at most a quarter of the
    /// free memory.
    pub(super) fn new(device: &mut dyn TestDevice, free: Bytes) -> Result<Self, DeviceError> {
        let stream = device.create_stream()?;
        let pool = device
            .pooled()
            .map(|device| device.create_pool(Bytes(u64::MAX)))
            .transpose()?;
        let quarter = Bytes(free.0 / 4);
        let room = quarter.min(FILLS.1);
        let curve = |sizes: Vec<Bytes>, unit: Bytes| {
            sizes
                .iter()
                .map(|size| (in_units(*size, unit), Vec::new()))
                .collect::<Curve>()
        };
        let malloc = curve(doubling(SMALLEST, quarter), Bytes::mib(1));
        let transfer = curve(doubling(FILLS.0, room), Bytes::gib(1));
        let samples = Samples {
            free: malloc.clone(),
            malloc,
            transfer,
            ..Samples::default()
        };
        Ok(Self {
            stream,
            room,
            pool,
            samples,
        })
    }

    pub(super) fn forget(&mut self) {
        let empty = |curve: &Curve| curve.iter().map(|(size, _)| (*size, Vec::new())).collect();
        self.samples = Samples {
            malloc: empty(&self.samples.malloc),
            free: empty(&self.samples.free),
            transfer: empty(&self.samples.transfer),
            ..Samples::default()
        };
    }

    /// Measures everything once. Sizes ascend in one round and descend in the next.
    pub(super) fn round(
        &mut self,
        device: &mut dyn TestDevice,
        number: u32,
    ) -> Result<(), DeviceError> {
        self.allocations(device, number % 2 == 1)?;
        self.pages(device)?;
        self.pool_calls(device)?;
        self.streams(device)?;
        self.events(device)?;
        self.fills(device)
    }

    pub(super) fn finish(&self, device: &mut dyn TestDevice) -> Result<(), DeviceError> {
        if let (Some(pool), Some(device)) = (self.pool, device.pooled()) {
            device.destroy_pool(pool)?;
        }
        device.destroy_stream(self.stream)
    }

    fn allocations(
        &mut self,
        device: &mut dyn TestDevice,
        downward: bool,
    ) -> Result<(), DeviceError> {
        let Samples { malloc, free, .. } = &mut self.samples;
        let sizes = malloc.len();
        for index in 0..sizes {
            let index = if downward { sizes - 1 - index } else { index };
            let ((mib, mallocs), (_, frees)) = (&mut malloc[index], &mut free[index]);
            let size = Bytes::mib(*mib as u64);
            let start = timed(device, mallocs, 1, |device| device.malloc(size))?;
            timed(device, frees, 1, |device| device.free(start))?;
        }
        Ok(())
    }

    fn pages(&mut self, device: &mut dyn TestDevice) -> Result<(), DeviceError> {
        for (page, count) in PAGES
            .into_iter()
            .flat_map(|page| PAGE_COUNTS.map(|count| (page, count)))
        {
            let size = Bytes(page.0 * count);
            if size > self.room {
                continue;
            }
            let Some(mapped) = device.mapped() else {
                return Ok(());
            };
            let range = MemoryRange::new(mapped.reserve(size)?, size);
            let absent = || refused("map");
            timed(device, &mut self.samples.map, count, |device| {
                device.mapped().ok_or_else(absent)?.map(range, page)
            })?;
            timed(device, &mut self.samples.unmap, count, |device| {
                device.mapped().ok_or_else(absent)?.unmap(range)
            })?;
            device.mapped().ok_or_else(absent)?.unreserve(range.start)?;
        }
        Ok(())
    }

    /// Measures pairs of an allocation and a free on one stream, served by the pool's reserved
    /// memory.
    fn pool_calls(&mut self, device: &mut dyn TestDevice) -> Result<(), DeviceError> {
        let (Some(pool), stream) = (self.pool, self.stream) else {
            return Ok(());
        };
        let pairs = |device: &mut dyn TestDevice, count: u64| {
            let pooled = device.pooled().ok_or_else(|| refused("malloc_async"))?;
            for _ in 0..count {
                let start = pooled.malloc_async(pool, SMALLEST, stream)?;
                pooled.free_async(start, stream)?;
            }
            Ok(())
        };
        // The first pair grows the pool if necessary.
        pairs(device, 1)?;
        timed(device, &mut self.samples.pool, BATCH, |device| {
            pairs(device, BATCH / 2)
        })?;
        device.synchronize()
    }

    fn streams(&mut self, device: &mut dyn TestDevice) -> Result<(), DeviceError> {
        let Samples {
            stream_create,
            submit,
            synchronize,
            ..
        } = &mut self.samples;
        let stream = self.stream;
        let create = |device: &mut dyn TestDevice| {
            (0..STREAMS)
                .map(|_| device.create_stream())
                .collect::<Result<Vec<_>, _>>()
        };
        let made = timed(device, stream_create, STREAMS, create)?;
        made.into_iter()
            .try_for_each(|stream| device.destroy_stream(stream))?;
        timed(device, submit, BATCH, |device| {
            (0..BATCH).try_for_each(|_| device.busy(stream, Nanos(1)))
        })?;
        device.synchronize()?;
        timed(device, synchronize, BATCH, |device| {
            (0..BATCH).try_for_each(|_| device.synchronize())
        })
    }

    fn events(&mut self, device: &mut dyn TestDevice) -> Result<(), DeviceError> {
        let Samples {
            event_create,
            event_record,
            event_query,
            ..
        } = &mut self.samples;
        let stream = self.stream;
        let create = |device: &mut dyn TestDevice| {
            (0..BATCH)
                .map(|_| device.create_event())
                .collect::<Result<Vec<_>, _>>()
        };
        let events = timed(device, event_create, BATCH, create)?;
        timed(device, event_record, BATCH, |device| {
            events
                .iter()
                .try_for_each(|event| device.record_event(*event, stream))
        })?;
        device.synchronize()?;
        timed(device, event_query, BATCH, |device| {
            events
                .iter()
                .try_for_each(|event| device.event_done(*event).map(drop))
        })?;
        events
            .into_iter()
            .try_for_each(|event| device.destroy_event(event))
    }

    /// Measures the device time of fills, between events queued around them after other work.
    fn fills(&mut self, device: &mut dyn TestDevice) -> Result<(), DeviceError> {
        let stream = self.stream;
        let start = device.malloc(self.room)?;
        let (before, behind) = (device.create_timed_event()?, device.create_timed_event()?);
        for (gib, samples) in &mut self.samples.transfer {
            let range = MemoryRange::new(start, Bytes((*gib * Bytes::gib(1).0 as f64) as u64));
            device.busy(stream, HEAD_START)?;
            device.record_event(before, stream)?;
            device.fill(stream, range, Tag(0x5eed_ca11_b4a7_e000))?;
            device.record_event(behind, stream)?;
            device.synchronize_event(behind)?;
            samples.push(device.elapsed(before, behind)?.0 as f64);
        }
        device.destroy_event(before)?;
        device.destroy_event(behind)?;
        device.free(start)
    }

    /// Computes the figures from all samples.
    pub(super) fn figures(&self, context: Bytes) -> Figures {
        let samples = &self.samples;
        let (malloc, malloc_per_mib) = by_size(&samples.malloc);
        let (free, free_per_mib) = by_size(&samples.free);
        Figures {
            context_overhead: MeasuredFigure::exact(context.0),
            malloc,
            malloc_per_mib,
            free,
            free_per_mib,
            map_page: where_measured(&samples.map),
            unmap_page: where_measured(&samples.unmap),
            pool_call: where_measured(&samples.pool),
            submit: constant(&samples.submit),
            stream_create: constant(&samples.stream_create),
            event_create: constant(&samples.event_create),
            event_record: constant(&samples.event_record),
            event_query: constant(&samples.event_query),
            synchronize: constant(&samples.synchronize),
            transfer_per_gib: transfer(&samples.transfer),
        }
    }
}

/// Returns a base and a cost per MiB. The base has the spread of the smallest size, the cost per
/// MiB that of the largest.
fn by_size<A: UnitText, B: UnitText>(curve: &Curve) -> (MeasuredFigure<A>, MeasuredFigure<B>) {
    let line = line(curve);
    let error = error_of(curve, |mib| line.base + line.slope * mib);
    let (first, last) = (curve.first(), curve.last());
    let largest = last.map_or(1.0, |(mib, _)| *mib);
    (
        of_curve(line.base, curve, first, 1.0, error),
        of_curve(line.slope, curve, last, largest, error),
    )
}

/// Returns a cost per GiB. The model has no constant part for fills, and the fit error includes it.
fn transfer<U: UnitText>(curve: &Curve) -> MeasuredFigure<U> {
    let slope = line(curve).slope;
    let largest = curve.last().map_or(1.0, |(gib, _)| *gib);
    of_curve(
        slope,
        curve,
        curve.last(),
        largest,
        error_of(curve, |gib| slope * gib),
    )
}

/// Returns `None` if the device lacks these calls.
fn where_measured<U: UnitText>(samples: &[f64]) -> Option<MeasuredFigure<U>> {
    (!samples.is_empty()).then(|| constant(samples))
}

/// Times `calls` calls by the device's clock. Adds the nanoseconds per call to the samples, and
/// returns the result.
fn timed<R>(
    device: &mut dyn TestDevice,
    samples: &mut Vec<f64>,
    calls: u64,
    make: impl FnOnce(&mut dyn TestDevice) -> Result<R, DeviceError>,
) -> Result<R, DeviceError> {
    let before = device.now();
    let answer = make(device)?;
    samples.push(device.now().saturating_sub(before).0 as f64 / calls as f64);
    Ok(answer)
}

/// Returns sizes from `least`, doubling up to `most`.
fn doubling(least: Bytes, most: Bytes) -> Vec<Bytes> {
    std::iter::successors(Some(least), |size| Some(Bytes(size.0.checked_mul(2)?)))
        .take_while(|size| *size <= most)
        .collect()
}

fn in_units(size: Bytes, unit: Bytes) -> f64 {
    size.0 as f64 / unit.0 as f64
}

/// Returns the error for a feature that disappeared during the calibration.
fn refused(call: &'static str) -> DeviceError {
    DeviceError::Unavailable {
        what: call.to_owned(),
        why: "the device had this feature when calibration began and no longer has it".to_owned(),
    }
}
