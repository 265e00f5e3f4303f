//! [`SimDevice`]: a simulated GPU, stricter than a real one.
//!
//! It keeps an address space in which no address is used twice ([`SimConfig::addresses`] changes that, and so does the end of the address space), streams as queues of timed work on a virtual clock ([`CostModel`]),
//! the contents of memory as tags, and an order of all work from which it tells races. What real hardware forgives or corrupts in
//! silence is an error here that names both places: freeing twice, freeing what is not an allocation, touching memory that is not (or
//! no longer) allocated, touching memory from two streams with nothing to order them, and unmapping memory before the host has waited for
//! the work on it.

mod addresses;
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
pub use cost::{CostModel, Figure, PCIE_3, PCIE_4, PCIE_5};
pub use driver::EventTime;

use self::addresses::{ALLOCATIONS, Addresses};
use self::contents::Contents;
use self::host::SimHost;
use self::mapping::Mapping;
use self::placement::Placement;
use self::pool::SimPools;
use self::races::{Conflict, Races, Slot, VectorClock};
use super::{
    Access, AccessKind, Clock, CostFigure, Device, DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, DevicePtr, EventId, Fingerprint,
    HostId, HostMemory, Leaks, MappedDevice, MemoryRange, Place, PooledDevice, StreamId, Tag, TestDevice,
};
use crate::units::{Bytes, Nanos};

/// Every allocation is charged in whole multiples of this, the size of a GPU's pages ("2MiB currently", says PyTorch's
/// `c10/cuda/CUDACachingAllocator.cpp` on expandable segments; for `cudaMalloc` seen in <https://github.com/signalnine/q27/issues/1>).
pub const GRANULARITY: Bytes = Bytes::mib(2);

/// What a simulated device is like.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct SimConfig {
    /// All of its memory.
    pub total: Bytes,
    /// Of it, what is used before the first allocation. Nothing can be allocated where this is all of it.
    pub context_overhead: Bytes,
    /// What calls and work cost.
    pub cost: CostModel,
    pub completion: Completion,
    /// Whether a device free waits for all work of all streams, as `cudaFree` does: "Managing memory allocations using `cudaMalloc` and
    /// `cudaFree` causes the GPU to synchronize across all executing CUDA streams" (CUDA C++ Programming Guide, Stream Ordered Memory
    /// Allocator, <https://docs.nvidia.com/cuda/cuda-c-programming-guide/#stream-ordered-memory-allocator>). The allocation does not
    /// wait here, as current drivers do not (<https://github.com/cupy/cupy/pull/2898>).
    pub free_synchronizes: bool,
    pub addresses: AddressOrder,
}

impl Default for SimConfig {
    /// The device that scenarios run on: 80 GiB as an H100 has, a context, published costs, a free that synchronizes.
    fn default() -> Self {
        let cost = CostModel::PUBLISHED;
        Self {
            total: Bytes::gib(80),
            context_overhead: cost.context_overhead.value,
            cost,
            completion: Completion::Timed,
            free_synchronizes: true,
            addresses: AddressOrder::Up,
        }
    }
}

impl SimConfig {
    /// The device on which runs are compared with recordings of PyTorch's allocator, byte by byte: no context overhead, no costs, events
    /// that complete only when waited for, and a free that waits for nothing.
    #[must_use]
    pub fn replay(capacity: Bytes) -> Self {
        Self {
            total: capacity,
            context_overhead: Bytes::ZERO,
            cost: CostModel::FREE_OF_CHARGE,
            completion: Completion::OnSynchronize,
            free_synchronizes: false,
            addresses: AddressOrder::Up,
        }
    }
}

/// When an event counts as done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// When the virtual clock has passed the end of the work in front of it. Where the cost model lets a query cost nothing, asking again
    /// and again never gets there: wait instead.
    Timed,
    /// When the host has waited for it, for later work of its stream, or for the device; never by itself. So a program's events complete
    /// at the same points of the program whatever work costs.
    OnSynchronize,
}

/// The simulated device.
#[derive(Clone, Debug)]
pub struct SimDevice {
    config: SimConfig,
    info: DeviceInfo,
    now: Nanos,
    place: Place,
    calls: DeviceCalls,
    /// Everything ever allocated, in the order of addresses. What was freed is remembered until its addresses are handed out again.
    allocations: Vec<SimAllocation>,
    addresses: Addresses,
    placement: Placement,
    held: Held,
    pressure: Bytes,
    /// By stream number. Numbers are never reused, so that a stale one is noticed.
    streams: BTreeMap<u32, Stream>,
    next_stream: u32,
    /// By event number, likewise.
    events: BTreeMap<u32, Event>,
    next_event: u32,
    races: Races,
    contents: Contents,
    /// By stream: the first queued read whose result nobody has asked for yet, and that met wrong contents.
    wrong_reads: BTreeMap<u32, DeviceError>,
    mapping: Mapping,
    pools: SimPools,
    host: SimHost,
    /// When all work of the borrowed streams that were released is done.
    released_ready: Nanos,
}

/// Allocations that live.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    allocations: u64,
    charged: Bytes,
}

/// An allocation, living or freed.
#[derive(Clone, Copy, Debug)]
struct SimAllocation {
    start: u64,
    size: Bytes,
    charged: Bytes,
    state: AllocationState,
}

#[derive(Clone, Copy, Debug)]
enum AllocationState {
    Live { made: Place },
    Freed { at: Place },
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    /// When all of its work so far is done.
    ready: Nanos,
    slot: Slot,
    /// Whether it is the program's, not the device's.
    borrowed: bool,
}

#[derive(Clone, Debug, Default)]
struct Event {
    record: Option<Record>,
    /// Whether it was made to keep the time of its record.
    timed: bool,
    /// All that is done when the last record is; kept between records for its memory.
    clock: VectorClock,
}

/// The last time that an event was recorded.
#[derive(Clone, Copy, Debug)]
struct Record {
    /// When the work in front of it is done.
    at: Nanos,
    slot: Slot,
    tick: u64,
}

impl SimDevice {
    /// A device with nothing allocated and the default stream.
    #[must_use]
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
        let default_stream = Stream { ready: Nanos::ZERO, slot: races.add_stream(), borrowed: false };
        let order = config.addresses;
        Self {
            config,
            info,
            now: Nanos::ZERO,
            place: Place::default(),
            calls: DeviceCalls::default(),
            allocations: Vec::new(),
            addresses: Addresses::new(ALLOCATIONS, Bytes::ZERO, order),
            placement: Placement::default(),
            held: Held::default(),
            pressure: Bytes::ZERO,
            streams: BTreeMap::from([(StreamId::DEFAULT.0, default_stream)]),
            next_stream: 1,
            events: BTreeMap::new(),
            next_event: 0,
            races,
            contents: Contents::default(),
            wrong_reads: BTreeMap::new(),
            mapping: Mapping::new(order),
            pools: SimPools::new(order),
            host: SimHost::new(order),
            released_ready: Nanos::ZERO,
        }
    }

    /// Numbers a stream that the program has itself, as `CudaDevice::borrow_stream` does: to test what becomes of it. It counts as no leak,
    /// and goes by [`Device::release_stream`].
    ///
    /// # Errors
    /// [`DeviceError::Driver`] where every number was used.
    pub fn borrow_stream(&mut self) -> Result<StreamId, DeviceError> {
        self.add_stream("borrow_stream", true)
    }

    fn add_stream(&mut self, call: &'static str, borrowed: bool) -> Result<StreamId, DeviceError> {
        let number = self.next_stream;
        self.next_stream = number.checked_add(1).ok_or_else(|| refused(call, "every stream number was used"))?;
        self.streams.insert(number, Stream { ready: self.now, slot: self.races.add_stream(), borrowed });
        Ok(StreamId(number))
    }

    fn add_event(&mut self, timed: bool) -> Result<EventId, DeviceError> {
        let number = self.next_event;
        self.next_event = number.checked_add(1).ok_or_else(|| refused("create_event", "every event number was used"))?;
        self.spend(self.config.cost.event_create.value);
        self.events.insert(number, Event { timed, ..Event::default() });
        Ok(EventId(number))
    }

    /// Notes an allocation in the place of what was freed where it lies.
    fn remember(&mut self, allocation: SimAllocation) {
        let from = self.allocations.partition_point(|known| known.start + known.charged.0 <= allocation.start);
        let to = self.allocations.partition_point(|known| known.start < allocation.start + allocation.charged.0);
        self.allocations.splice(from..to, [allocation]);
    }

    fn free_bytes(&self) -> Bytes {
        self.config.total.saturating_sub(self.config.context_overhead).saturating_sub(self.held.charged).saturating_sub(self.pressure)
    }

    /// A host call takes its time.
    fn spend(&mut self, cost: Nanos) {
        self.now = later(self.now, cost);
    }

    fn wait_until(&mut self, at: Nanos) {
        self.now = self.now.max(at);
    }

    fn stream(&mut self, stream: StreamId) -> Result<&mut Stream, DeviceError> {
        self.streams.get_mut(&stream.0).ok_or(DeviceError::UnknownHandle { kind: "stream", number: stream.0 })
    }

    fn event(&mut self, event: EventId) -> Result<&mut Event, DeviceError> {
        self.events.get_mut(&event.0).ok_or(unknown_event(event))
    }

    /// Queues work that takes `duration` behind the stream's work so far.
    fn submit(&mut self, stream: StreamId, duration: Nanos) -> Result<(), DeviceError> {
        self.stream(stream)?;
        self.spend(self.config.cost.submit.value);
        let now = self.now;
        let stream = self.stream(stream)?;
        stream.ready = later(stream.ready.max(now), duration);
        Ok(())
    }

    /// The host waits for all work of all streams.
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

    /// When the last record of an event that keeps time was done, if it is.
    fn done_at(&self, event: EventId) -> Result<Nanos, DeviceError> {
        let known = self.events.get(&event.0).ok_or(unknown_event(event))?;
        if !known.timed {
            return Err(DeviceError::UnknownHandle { kind: "timed event", number: event.0 });
        }
        known.record.filter(|record| self.is_done(*record)).map(|record| record.at).ok_or(DeviceError::NotReady(event.0))
    }

    /// Checks an access against what is allocated and what else touched the memory, and queues it.
    fn access(&mut self, stream: StreamId, range: MemoryRange, kind: AccessKind) -> Result<(), DeviceError> {
        let access = Access { kind, stream, place: self.place };
        self.check_allocated(range, access)?;
        self.order(range, access)?;
        self.submit(stream, self.config.cost.transfer_time(range.len))
    }

    /// Checks an access against what else touched the memory.
    fn order(&mut self, range: MemoryRange, access: Access) -> Result<(), DeviceError> {
        let slot = self.stream(access.stream)?.slot;
        let race = |conflict: Conflict| DeviceError::Race { range: conflict.range, first: conflict.first, second: access };
        self.races.access(slot, range, access).map(drop).map_err(race)
    }

    fn check_allocated(&self, range: MemoryRange, access: Access) -> Result<(), DeviceError> {
        let Some(end) = range.start.0.checked_add(range.len.0) else {
            let range = MemoryRange::new(range.start, Bytes(u64::MAX - range.start.0));
            return Err(DeviceError::InvalidAccess { range, access, why: "it goes beyond the address space".to_owned() });
        };
        let why = match self.allocation_around(range.start) {
            _ if SimPools::contains(range.start) => match self.pools.refusal(range) {
                None => return Ok(()),
                Some(why) => why,
            },
            _ if self.mapping.contains(range.start) && self.mapping.table.is_mapped(range) => return Ok(()),
            _ if self.mapping.contains(range.start) => "no memory is mapped to all of it".to_owned(),
            _ if range.len == Bytes::ZERO => "it is empty".to_owned(),
            None => "nothing was ever allocated there".to_owned(),
            Some(SimAllocation { start, size, state: AllocationState::Freed { at }, .. }) => {
                format!("the allocation of {size} at {} was freed at {at}", DevicePtr(*start))
            }
            Some(SimAllocation { start, size, state: AllocationState::Live { made }, .. }) if end > start + size.0 => {
                let beyond = Bytes(end - start - size.0);
                format!("it ends {beyond} behind the allocation of {size} at {}, made at {made}", DevicePtr(*start))
            }
            Some(_) => return Ok(()),
        };
        Err(DeviceError::InvalidAccess { range, access, why })
    }

    /// The allocation, living or freed, whose charge the address lies in.
    fn allocation_around(&self, ptr: DevicePtr) -> Option<&SimAllocation> {
        let behind = self.allocations.partition_point(|allocation| allocation.start <= ptr.0);
        let allocation = self.allocations[..behind].last()?;
        (ptr.0 < allocation.start + allocation.charged.0).then_some(allocation)
    }

    /// Compares what memory holds now with a tag.
    fn compare(&self, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        match self.contents.mismatch(range, tag) {
            None => Ok(()),
            Some(mismatch) => Err(DeviceError::Corrupted { range, at: mismatch.at, expected: tag.0, found: self.describe(&mismatch) }),
        }
    }

    /// What was found instead of a tag, in words.
    fn describe(&self, mismatch: &contents::Mismatch) -> String {
        let Some(found) = mismatch.found else { return "it was never written since it was allocated".to_owned() };
        let writer = self.races.last_write(mismatch.at).map(|access| format!(", {access}")).unwrap_or_default();
        format!("it is of tag {:#x}{writer}", found.0)
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
            return Err(refused("malloc", "ask for at least one byte"));
        }
        let free = self.free_bytes();
        let charged = size.checked_round_up(GRANULARITY).filter(|charged| *charged <= free);
        // Addresses may run out before memory does.
        let placed = charged.and_then(|charged| Some((charged, self.next_address(charged)?)));
        let Some((charged, start)) = placed else {
            self.calls.malloc_failures += 1;
            self.spend(self.config.cost.malloc.value);
            return Err(DeviceError::OutOfMemory { requested: size, free });
        };
        self.spend(self.config.cost.malloc_time(charged));
        self.held.allocations += 1;
        self.held.charged += charged;
        self.remember(SimAllocation { start, size, charged, state: AllocationState::Live { made: self.place } });
        Ok(DevicePtr(start))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.calls.free += 1;
        let place = self.place;
        let found = self.allocations.binary_search_by_key(&ptr.0, |allocation| allocation.start);
        let allocation = found.ok().map(|index| &mut self.allocations[index]).ok_or(DeviceError::InvalidFree { ptr, place })?;
        if let AllocationState::Freed { at: first } = allocation.state {
            return Err(DeviceError::DoubleFree { ptr, first, second: place });
        }
        allocation.state = AllocationState::Freed { at: place };
        let SimAllocation { charged, .. } = *allocation;
        self.held.allocations -= 1;
        self.held.charged -= charged;
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
            return Err(DeviceError::UnknownHandle { kind: "removable stream", number: stream.0 });
        }
        let slot = self.wait_for_stream(stream)?;
        self.spend(self.config.cost.synchronize.value);
        self.races.remove_stream(slot);
        self.streams.remove(&stream.0);
        self.wrong_reads.remove(&stream.0);
        Ok(())
    }

    fn release_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        let not_borrowed = DeviceError::UnknownHandle { kind: "borrowed stream", number: stream.0 };
        let Stream { ready, slot, .. } = *self.streams.get(&stream.0).filter(|stream| stream.borrowed).ok_or(not_borrowed)?;
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
        self.events.remove(&event.0).map(drop).ok_or(unknown_event(event))
    }

    fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        self.calls.event_record += 1;
        let Stream { ready, slot, .. } = *self.stream(stream)?;
        let known = self.events.get_mut(&event.0).ok_or(unknown_event(event))?;
        let tick = self.races.record(slot, &mut known.clock);
        self.now = later(self.now, self.config.cost.event_record.value);
        known.record = Some(Record { at: ready.max(self.now), slot, tick });
        Ok(())
    }

    fn event_done(&mut self, event: EventId) -> Result<bool, DeviceError> {
        self.calls.event_query += 1;
        self.spend(self.config.cost.event_query.value);
        let known = self.events.get(&event.0).ok_or(unknown_event(event))?;
        let Some(record) = known.record else { return Ok(true) };
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
        let SimConfig { total, context_overhead, .. } = self.config;
        let process = context_overhead + self.held.charged;
        let (free, pressure) = (self.free_bytes(), self.pressure);
        Ok(DeviceMemory {
            total,
            free,
            used: process + pressure,
            process: Some(process),
            context_overhead,
            pressure,
            processes: Bytes::ZERO,
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

    fn set_place(&mut self, place: Place) {
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
        self.access(stream, range, AccessKind::Write)?;
        self.contents.fill(range, tag);
        Ok(())
    }

    fn verify(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        self.access(stream, range, AccessKind::Read)?;
        self.wait_for_stream(stream)?;
        self.spend(self.config.cost.synchronize.value);
        self.compare(range, tag)
    }

    /// Contents are kept in the order in which work was submitted. That is the order of the stream for everything that does not race with the
    /// read, so it can be compared here.
    fn verify_later(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        self.access(stream, range, AccessKind::Read)?;
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

    fn set_pressure(&mut self, held: Bytes) -> Result<Bytes, DeviceError> {
        self.pressure = held.min(self.free_bytes() + self.pressure);
        Ok(self.pressure)
    }

    fn host_alloc(&mut self, size: Bytes, memory: &HostMemory) -> Result<HostId, DeviceError> {
        self.take_host(size, memory)
    }

    fn host_free(&mut self, host: HostId) -> Result<(), DeviceError> {
        self.give_host_back(host)
    }

    fn copy_to_host(&mut self, stream: StreamId, from: MemoryRange, to: HostId) -> Result<(), DeviceError> {
        let host = self.host_range(to, from.len)?;
        self.copy(stream, to, from, host)
    }

    fn copy_to_device(&mut self, stream: StreamId, from: HostId, to: MemoryRange) -> Result<(), DeviceError> {
        let host = self.host_range(from, to.len)?;
        self.copy(stream, from, host, to)
    }

    fn cost_figures(&self) -> Vec<CostFigure> {
        self.config.cost.figures()
    }

    fn leaks(&self) -> Leaks {
        let (pooled, pools) = self.pools.left();
        Leaks {
            allocations: self.held.allocations + pooled,
            pools,
            reservations: self.mapping.table.reservations().len() as u64,
            bytes: self.held.charged,
            streams: self.streams.values().filter(|stream| !stream.borrowed).count() as u64 - 1,
            events: self.events.len() as u64,
            host: self.host.count(),
        }
    }
}

fn later(time: Nanos, by: Nanos) -> Nanos {
    Nanos(time.0.saturating_add(by.0))
}

fn unknown_event(event: EventId) -> DeviceError {
    DeviceError::UnknownHandle { kind: "event", number: event.0 }
}

/// The simulated driver refuses a call as the real one does with `CUDA_ERROR_INVALID_VALUE`.
fn refused(call: &'static str, advice: &'static str) -> DeviceError {
    DeviceError::Driver { call, code: 1, name: "CUDA_ERROR_INVALID_VALUE".to_owned(), advice }
}
