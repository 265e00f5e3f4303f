//! [`SimDevice`]: a simulated GPU that is stricter than a real one.
//!
//! It models the address space, streams of timed work on a virtual clock ([`CostModel`]), the
//! contents of memory as tags, and the order of all work. Addresses are not reused unless
//! [`SimConfig::addresses`] says so or the address space is exhausted. Real hardware ignores some
//! bugs or corrupts memory silently. Here they are errors that name both places: a double free, a
//! free of an address without an allocation, an access to memory that is not (or no longer)
//! allocated, an access race of two streams, and an unmap before the host has waited for the work
//! on the memory.

mod addresses;
mod allocations;
mod contents;
mod cost;
mod driver;
mod host;
mod mapping;
mod pieces;
mod placement;
mod pool;
mod races;
mod ranges;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use addresses::AddressOrder;
pub use cost::{CostModel, PCIE_3, PCIE_4, PCIE_5, Sourced};
pub use driver::EventTime;

use self::addresses::{ALLOCATIONS, Addresses, POOLS};
use self::allocations::{AllocationState, Allocations, SimAllocation};
use self::races::{Conflict, Races, Slot, VectorClock};
use self::{
    contents::MemoryTags, host::SimHost, mapping::Mapping, placement::Placement, pool::SimPools,
};
use super::{
    Access, AccessKind, CallSite, Clock, CostFigure, Device, DeviceCalls, DeviceError, DeviceInfo,
    DeviceMemory, DevicePtr, EventId, Fingerprint, HostId, HostMemory, Leaks, MappedDevice,
    MemoryRange, PooledDevice, StreamId, Tag, TestDevice,
};
use crate::units::{Bytes, Nanos};

/// The charge of an allocation is a multiple of this, the page size of a GPU ("2MiB currently",
/// says PyTorch's `c10/cuda/CUDACachingAllocator.cpp` about expandable segments;
/// <https://github.com/signalnine/q27/issues/1> shows it for `cudaMalloc`).
pub const GRANULARITY: Bytes = Bytes::mib(2);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimConfig {
    pub total: Bytes,
    /// The part that is used before the first allocation.
    pub context_overhead: Bytes,
    pub cost: CostModel,
    pub completion: Completion,
    /// True if a device free waits for all work of all streams, as `cudaFree` does: "Managing
    /// memory allocations using `cudaMalloc` and `cudaFree` causes the GPU to synchronize across
    /// all executing CUDA streams" (CUDA C++ Programming Guide, Stream Ordered Memory Allocator,
    /// <https://docs.nvidia.com/cuda/cuda-c-programming-guide/#stream-ordered-memory-allocator>).
    /// An allocation does not wait, as with current drivers
    /// (<https://github.com/cupy/cupy/pull/2898>).
    pub free_synchronizes: bool,
    pub addresses: AddressOrder,
    pub reservations: AddressOrder,
}

impl Default for SimConfig {
    /// The device for scenarios: 80 GiB as on an H100, a context, published costs, and a free that
    /// synchronizes.
    fn default() -> Self {
        let cost = CostModel::PUBLISHED;
        Self {
            total: Bytes::gib(80),
            context_overhead: cost.context_overhead.value,
            cost,
            completion: Completion::Timed,
            free_synchronizes: true,
            addresses: AddressOrder::Up,
            reservations: AddressOrder::Up,
        }
    }
}

impl SimConfig {
    /// The device for comparisons with recordings of PyTorch's allocator: no context overhead, no
    /// costs, events that complete only when waited for, and a free that does not wait.
    pub fn replay(capacity: Bytes) -> Self {
        Self {
            total: capacity,
            context_overhead: Bytes::ZERO,
            cost: CostModel::FREE_OF_CHARGE,
            completion: Completion::OnSynchronize,
            free_synchronizes: false,
            addresses: AddressOrder::Up,
            reservations: AddressOrder::Up,
        }
    }
}

/// The condition for an event to count as complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// The virtual clock has passed the end of the work before it. If a query costs nothing,
    /// repeated queries do not advance the clock: wait instead.
    Timed,
    /// The host has waited for the event, for later work of its stream, or for the device. So
    /// events complete at the same points of the program, whatever the costs.
    OnSynchronize,
}

#[derive(Clone, Debug)]
pub struct SimDevice {
    config: SimConfig,
    info: DeviceInfo,
    now: Nanos,
    place: CallSite,
    calls: DeviceCalls,
    /// All allocations, including those of pools.
    allocations: Allocations,
    addresses: Addresses,
    placement: Placement,
    /// The charged bytes of allocations, mapped pages and pools.
    charged: Bytes,
    external_memory: Bytes,
    /// By stream number. Numbers are never reused, so a stale one is noticed.
    streams: BTreeMap<u32, Stream>,
    next_stream: u32,
    /// By event number. Numbers are never reused.
    events: BTreeMap<u32, Event>,
    next_event: u32,
    races: Races,
    contents: MemoryTags,
    /// For each stream, the first queued read that found wrong contents, until its result is
    /// requested.
    wrong_reads: BTreeMap<u32, DeviceError>,
    mapping: Mapping,
    pools: SimPools,
    host: SimHost,
    /// The completion time of all work of released borrowed streams.
    released_ready: Nanos,
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// The completion time of all its work so far.
    ready: Nanos,
    slot: Slot,
    /// True if the program made it, not the device.
    borrowed: bool,
}

#[derive(Clone, Debug, Default)]
struct Event {
    record: Option<Record>,
    timed: bool,
    /// All work that is complete when the last record is. Kept between records to reuse its memory.
    clock: VectorClock,
}

/// The last record of an event.
#[derive(Clone, Copy, Debug)]
struct Record {
    /// The completion time of the work before it.
    at: Nanos,
    slot: Slot,
    tick: u64,
}

impl SimDevice {
    /// Makes a device with the default stream and no allocations.
    pub fn new(config: SimConfig) -> Self {
        let info = DeviceInfo {
            name: "simulated".to_owned(),
            clock: Clock::Simulated,
            total: config.total,
            granularity: GRANULARITY,
            used_tolerance: Bytes::ZERO,
            fingerprint: Fingerprint {
                memory: Some(config.total),
                cost_model: Some(config.cost.name.to_string()),
                ..Fingerprint::default()
            },
        };
        let mut races = Races::default();
        let default_stream = Stream {
            ready: Nanos::ZERO,
            slot: races.add_stream(),
            borrowed: false,
        };
        let (order, reservations) = (config.addresses, config.reservations);
        Self {
            config,
            info,
            now: Nanos::ZERO,
            place: CallSite::default(),
            calls: DeviceCalls::default(),
            allocations: Allocations::default(),
            addresses: Addresses::new(ALLOCATIONS, Bytes::ZERO, order),
            placement: Placement::default(),
            charged: Bytes::ZERO,
            external_memory: Bytes::ZERO,
            streams: BTreeMap::from([(StreamId::DEFAULT.0, default_stream)]),
            next_stream: 1,
            events: BTreeMap::new(),
            next_event: 0,
            races,
            contents: MemoryTags::default(),
            wrong_reads: BTreeMap::new(),
            mapping: Mapping::new(reservations),
            pools: SimPools::new(order),
            host: SimHost::new(order),
            released_ready: Nanos::ZERO,
        }
    }

    /// Adds a stream that the program owns, as `CudaDevice::borrow_stream` does, for tests. It
    /// never counts as leaked; release it with [`Device::release_stream`].
    pub fn borrow_stream(&mut self) -> Result<StreamId, DeviceError> {
        self.add_stream("borrow_stream", true)
    }

    fn add_stream(&mut self, call: &'static str, borrowed: bool) -> Result<StreamId, DeviceError> {
        let number = self.next_stream;
        self.next_stream = number
            .checked_add(1)
            .ok_or_else(|| refused(call, "all stream numbers are used"))?;
        self.streams.insert(
            number,
            Stream {
                ready: self.now,
                slot: self.races.add_stream(),
                borrowed,
            },
        );
        Ok(StreamId(number))
    }

    fn add_event(&mut self, timed: bool) -> Result<EventId, DeviceError> {
        let number = self.next_event;
        self.next_event = number
            .checked_add(1)
            .ok_or_else(|| refused("create_event", "all event numbers are used"))?;
        self.spend(self.config.cost.event_create.value);
        self.events.insert(
            number,
            Event {
                timed,
                ..Event::default()
            },
        );
        Ok(EventId(number))
    }

    fn free_bytes(&self) -> Bytes {
        self.config
            .total
            .saturating_sub(self.config.context_overhead)
            .saturating_sub(self.charged)
            .saturating_sub(self.external_memory)
    }

    fn spend(&mut self, cost: Nanos) {
        self.now = later(self.now, cost);
    }

    /// Advances the virtual clock to this time, unless it is already later.
    pub fn wait_until(&mut self, at: Nanos) {
        self.now = self.now.max(at);
    }

    fn stream(&mut self, stream: StreamId) -> Result<&mut Stream, DeviceError> {
        self.streams
            .get_mut(&stream.0)
            .ok_or(DeviceError::unknown_handle("stream", stream.0))
    }

    fn event(&mut self, event: EventId) -> Result<&mut Event, DeviceError> {
        self.events.get_mut(&event.0).ok_or(unknown_event(event))
    }

    /// Queues work of this duration after the stream's work so far.
    fn submit(&mut self, stream: StreamId, duration: Nanos) -> Result<(), DeviceError> {
        self.stream(stream)?;
        self.spend(self.config.cost.submit.value);
        let now = self.now;
        let stream = self.stream(stream)?;
        stream.ready = later(stream.ready.max(now), duration);
        Ok(())
    }

    /// Makes the host wait for all work of all streams.
    fn wait_for_all(&mut self) {
        self.wait_until(self.all_done_at());
        self.races.host_joins_all();
    }

    fn wait_for_stream(&mut self, stream: StreamId) -> Result<Slot, DeviceError> {
        let Stream { ready, slot, .. } = *self.stream(stream)?;
        self.wait_until(ready);
        self.races.host_joins_stream(slot);
        Ok(slot)
    }

    fn is_done(&self, record: Record) -> bool {
        match self.config.completion {
            Completion::Timed => self.now >= record.at,
            Completion::OnSynchronize => self.races.host_has_seen(record.slot, record.tick),
        }
    }

    /// The completion time of a timed event's last record, if it is complete.
    fn done_at(&self, event: EventId) -> Result<Nanos, DeviceError> {
        let known = self.events.get(&event.0).ok_or(unknown_event(event))?;
        if !known.timed {
            return Err(DeviceError::unknown_handle("timed event", event.0));
        }
        known
            .record
            .filter(|record| self.is_done(*record))
            .map(|record| record.at)
            .ok_or(DeviceError::NotReady(event.0))
    }

    /// Queues work that reads or writes a range but does not change its recorded contents.
    pub fn queue_access(
        &mut self,
        stream: StreamId,
        range: MemoryRange,
        kind: AccessKind,
    ) -> Result<(), DeviceError> {
        let access = Access {
            kind,
            stream,
            place: self.place,
        };
        self.check_allocated(range, access)?;
        self.order(range, access)?;
        self.submit(stream, self.config.cost.transfer_time(range.len))
    }

    /// Checks an access for races and returns its entry of the stream.
    fn order(&mut self, range: MemoryRange, access: Access) -> Result<u64, DeviceError> {
        let slot = self.stream(access.stream)?.slot;
        let race = |conflict: Conflict| DeviceError::Race {
            range: conflict.range,
            first: conflict.first,
            second: access,
        };
        self.races.access(slot, range, access).map_err(race)
    }

    fn check_allocated(&self, range: MemoryRange, access: Access) -> Result<(), DeviceError> {
        let Some(end) = range.start.0.checked_add(range.len.0) else {
            let range = MemoryRange::new(range.start, Bytes(u64::MAX - range.start.0));
            return Err(DeviceError::InvalidAccess {
                range,
                access,
                why: "it exceeds the address space".to_owned(),
            });
        };
        let reserved = self.mapping.contains(range.start);
        let why = match self.allocations.around(range.start) {
            _ if reserved && self.mapping.table.is_mapped(range) => return Ok(()),
            _ if reserved => "part of it has no mapped memory".to_owned(),
            _ if range.len == Bytes::ZERO => "it is empty".to_owned(),
            None if POOLS.contains(&range.start.0) => "the pool has no allocation there".to_owned(),
            None => "there was never an allocation".to_owned(),
            Some((
                start,
                SimAllocation {
                    size,
                    state: AllocationState::Freed { at },
                    ..
                },
            )) => {
                format!(
                    "the allocation of {size} at {} was freed at {at}",
                    DevicePtr(start)
                )
            }
            Some((
                start,
                SimAllocation {
                    size,
                    state: AllocationState::Live { made },
                    ..
                },
            )) if end > start + size.0 => {
                let beyond = Bytes(end - start - size.0);
                format!(
                    "it ends {beyond} after the end of the allocation of {size} at {}, made at \
                     {made}",
                    DevicePtr(start)
                )
            }
            Some(_) => return Ok(()),
        };
        Err(DeviceError::InvalidAccess { range, access, why })
    }

    fn compare(&self, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        match self.contents.mismatch(range, tag) {
            None => Ok(()),
            Some(mismatch) => Err(DeviceError::Corrupted {
                range,
                at: mismatch.at,
                expected: tag.0,
                found: self.describe(&mismatch),
            }),
        }
    }

    /// Describes the bytes found instead of a tag.
    fn describe(&self, mismatch: &contents::Mismatch) -> String {
        let Some(found) = mismatch.found else {
            return "it was never written after its allocation".to_owned();
        };
        let writer = self
            .races
            .last_write(mismatch.at)
            .map(|access| format!(", {access}"))
            .unwrap_or_default();
        format!("it has tag {:#x}{writer}", found.0)
    }
}

impl Device for SimDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_memory(&mut self) -> Result<Bytes, DeviceError> {
        Ok(self.free_bytes())
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        self.calls.malloc += 1;
        if size == Bytes::ZERO {
            return Err(refused("malloc", "request at least one byte"));
        }
        let free = self.free_bytes();
        let charged = size
            .checked_round_up(GRANULARITY)
            .filter(|charged| *charged <= free);
        // The address space may be exhausted before the memory.
        let placed = charged.and_then(|charged| Some((charged, self.next_address(charged)?)));
        let Some((charged, start)) = placed else {
            self.calls.malloc_failures += 1;
            self.spend(self.config.cost.malloc.value);
            return Err(DeviceError::OutOfMemory {
                requested: size,
                free,
            });
        };
        self.spend(self.config.cost.malloc_time(charged));
        self.charged += charged;
        let state = AllocationState::Live { made: self.place };
        self.allocations.add(
            start,
            SimAllocation {
                size,
                charged,
                pool: None,
                state,
            },
        );
        Ok(DevicePtr(start))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.calls.free += 1;
        let place = self.place;
        let allocation = self.allocations.live(ptr, false, place)?;
        allocation.state = AllocationState::Freed { at: place };
        let charged = allocation.charged;
        self.charged -= charged;
        let range = MemoryRange::new(ptr, charged);
        self.addresses.give_back(ptr.0, charged);
        self.contents.forget(range);
        self.races.forget(range);
        if self.config.free_synchronizes {
            self.wait_for_all();
        }
        self.spend(self.config.cost.free_time(charged));
        Ok(())
    }

    fn create_stream(&mut self) -> Result<StreamId, DeviceError> {
        let stream = self.add_stream("create_stream", false)?;
        self.spend(self.config.cost.stream_create.value);
        Ok(stream)
    }

    fn destroy_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        if stream == StreamId::DEFAULT || self.stream(stream)?.borrowed {
            return Err(DeviceError::unknown_handle("removable stream", stream.0));
        }
        let slot = self.wait_for_stream(stream)?;
        self.spend(self.config.cost.synchronize.value);
        self.races.remove_stream(slot);
        self.streams.remove(&stream.0);
        self.wrong_reads.remove(&stream.0);
        Ok(())
    }

    fn release_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let not_borrowed = DeviceError::unknown_handle("borrowed stream", stream.0);
        let Stream { ready, slot, .. } = *self
            .streams
            .get(&stream.0)
            .filter(|stream| stream.borrowed)
            .ok_or(not_borrowed)?;
        self.released_ready = self.released_ready.max(ready);
        self.races.release_stream(slot);
        self.streams.remove(&stream.0);
        self.wrong_reads.remove(&stream.0);
        Ok(())
    }

    fn create_event(&mut self) -> Result<EventId, DeviceError> {
        self.add_event(false)
    }

    fn destroy_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.events
            .remove(&event.0)
            .map(drop)
            .ok_or(unknown_event(event))
    }

    fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        self.calls.event_record += 1;
        let Stream { ready, slot, .. } = *self.stream(stream)?;
        let known = self.events.get_mut(&event.0).ok_or(unknown_event(event))?;
        let tick = self.races.record(slot, &mut known.clock);
        self.now = later(self.now, self.config.cost.event_record.value);
        known.record = Some(Record {
            at: ready.max(self.now),
            slot,
            tick,
        });
        Ok(())
    }

    fn event_done(&mut self, event: EventId) -> Result<bool, DeviceError> {
        self.calls.event_query += 1;
        self.spend(self.config.cost.event_query.value);
        let known = self.events.get(&event.0).ok_or(unknown_event(event))?;
        let Some(record) = known.record else {
            return Ok(true);
        };
        let done = self.is_done(record);
        if done {
            self.races.host_joins(&known.clock);
        }
        Ok(done)
    }

    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        let at = self.event(event)?.record.map(|record| record.at);
        self.submit(stream, Nanos::ZERO)?;
        let Some(at) = at else { return Ok(()) };
        let waiter = self.stream(stream)?;
        waiter.ready = waiter.ready.max(at);
        let slot = waiter.slot;
        let known = self.events.get(&event.0).ok_or(unknown_event(event))?;
        self.races.stream_joins(slot, &known.clock);
        Ok(())
    }

    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.calls.synchronize += 1;
        let known = self.events.get(&event.0).ok_or(unknown_event(event))?;
        self.races.host_joins(&known.clock);
        let at = known.record.map_or(Nanos::ZERO, |record| record.at);
        self.wait_until(at);
        self.spend(self.config.cost.synchronize.value);
        self.pools_release();
        Ok(())
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.calls.synchronize += 1;
        self.wait_for_stream(stream)?;
        self.spend(self.config.cost.synchronize.value);
        self.pools_release();
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.calls.synchronize += 1;
        self.wait_for_all();
        self.spend(self.config.cost.synchronize.value);
        self.pools_release();
        Ok(())
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        Some(self)
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        Some(self)
    }
}

impl TestDevice for SimDevice {
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        let SimConfig {
            total,
            context_overhead,
            ..
        } = self.config;
        let process = context_overhead + self.charged;
        let (free, external_memory) = (self.free_bytes(), self.external_memory);
        Ok(DeviceMemory {
            total,
            free,
            used: process + external_memory,
            process: Some(process),
            context_overhead,
            external_memory,
            processes: Bytes::ZERO,
            process_contexts: Bytes::ZERO,
        })
    }

    fn own_context(&self) -> Result<Bytes, DeviceError> {
        Ok(self.config.context_overhead)
    }

    fn now(&mut self) -> Nanos {
        self.now
    }

    fn calls(&self) -> DeviceCalls {
        self.calls
    }

    fn set_call_site(&mut self, place: CallSite) {
        self.place = place;
    }

    fn create_timed_event(&mut self) -> Result<EventId, DeviceError> {
        self.add_event(true)
    }

    fn elapsed(&mut self, start: EventId, end: EventId) -> Result<Nanos, DeviceError> {
        let (start, end) = (self.done_at(start)?, self.done_at(end)?);
        Ok(end.saturating_sub(start))
    }

    fn fill(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        self.queue_access(stream, range, AccessKind::Write)?;
        self.contents.fill(range, tag);
        Ok(())
    }

    fn verify(
        &mut self,
        stream: StreamId,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<(), DeviceError> {
        self.queue_access(stream, range, AccessKind::Read)?;
        self.wait_for_stream(stream)?;
        self.spend(self.config.cost.synchronize.value);
        self.compare(range, tag)
    }

    /// Contents change in order of submission. For all work that does not race with the read, that
    /// is also the order of the stream, so the comparison can happen here.
    fn verify_later(
        &mut self,
        stream: StreamId,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<(), DeviceError> {
        self.queue_access(stream, range, AccessKind::Read)?;
        if let Err(wrong) = self.compare(range, tag) {
            self.wrong_reads.entry(stream.0).or_insert(wrong);
        }
        Ok(())
    }

    fn finish_verifications(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.wait_for_stream(stream)?;
        self.wrong_reads.remove(&stream.0).map_or(Ok(()), Err)
    }

    fn busy(&mut self, stream: StreamId, duration: Nanos) -> Result<(), DeviceError> {
        self.submit(stream, duration)
    }

    fn sleep(&mut self, duration: Nanos) {
        self.spend(duration);
    }

    fn set_external_memory(&mut self, held: Bytes) -> Result<Bytes, DeviceError> {
        self.external_memory = held.min(self.free_bytes() + self.external_memory);
        Ok(self.external_memory)
    }

    fn host_alloc(&mut self, size: Bytes, memory: &HostMemory) -> Result<HostId, DeviceError> {
        self.take_host(size, memory)
    }

    fn host_free(&mut self, host: HostId) -> Result<(), DeviceError> {
        self.give_host_back(host)
    }

    fn copy_to_host(
        &mut self,
        stream: StreamId,
        from: MemoryRange,
        to: HostId,
    ) -> Result<(), DeviceError> {
        let host = self.host_range(to, from.len)?;
        self.copy(stream, to, from, host)
    }

    fn copy_to_device(
        &mut self,
        stream: StreamId,
        from: HostId,
        to: MemoryRange,
    ) -> Result<(), DeviceError> {
        let host = self.host_range(from, to.len)?;
        self.copy(stream, from, host, to)
    }

    fn cost_figures(&self) -> Vec<CostFigure> {
        self.config.cost.figures()
    }

    fn leaks(&self) -> Leaks {
        Leaks {
            allocations: self.allocations.all_live().count() as u64,
            pools: self.pools.count(),
            reservations: self.mapping.table.reservations().len() as u64,
            bytes: self.charged,
            streams: self
                .streams
                .values()
                .filter(|stream| !stream.borrowed)
                .count() as u64
                - 1,
            events: self.events.len() as u64,
            host: self.host.count(),
        }
    }
}

fn later(time: Nanos, by: Nanos) -> Nanos {
    Nanos(time.0.saturating_add(by.0))
}

fn unknown_event(event: EventId) -> DeviceError {
    DeviceError::unknown_handle("event", event.0)
}

/// The error that the real driver returns as `CUDA_ERROR_INVALID_VALUE`.
fn refused(call: &'static str, advice: &'static str) -> DeviceError {
    DeviceError::Driver {
        call,
        code: 1,
        name: "CUDA_ERROR_INVALID_VALUE".to_owned(),
        advice,
    }
}
