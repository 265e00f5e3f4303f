//! [`Held`]: the memory that a library holds, and its CUDA calls, made on the device.
//!
//! Pools: no driver reports which memory of a pool is free. So either all of a library's memory
//! comes from one pool, whose reserved bytes count, or none of it does. The device's pool keeps all
//! memory until the library waits or trims it, or the cache is emptied. Waits of the program do not
//! count.
//!
//! Mapping: the device allocates memory when it is mapped ([`crate::device::MappedDevice`]).
//! `cuMemCreate` succeeds if the memory is free, minus what it created before. The memory is
//! released when it is unmapped everywhere and released by the library.

use std::collections::{BTreeMap, BTreeSet};

use super::accounts::{Accounts, Source};
use super::wire::{LibraryCall, PoolFigure};
use crate::device::{
    Device, DeviceError, DevicePtr, EventId, MappedDevice, MemoryRange, PoolId, PooledDevice,
    StreamId,
};
use crate::units::Bytes;

/// The threshold of the device's pool: it keeps all memory until a trim.
const KEEP_ALL: Bytes = Bytes(u64::MAX);

const TWO_SOURCES: &str = "it mixes a driver pool with another pool or with memory outside pools, \
     so its free memory cannot be determined";

#[derive(Debug)]
pub(super) struct Held {
    /// The library's file, for errors.
    path: String,
    pub(super) accounts: Accounts,
    streams: BTreeSet<StreamId>,
    events: BTreeSet<EventId>,
    pools: BTreeMap<u32, Pool>,
    reservations: BTreeMap<DevicePtr, Bytes>,
    /// Memory of `cuMemCreate` that is not released or still mapped.
    memory: BTreeMap<u64, Memory>,
    next: u64,
}

/// A pool from the library's view.
#[derive(Clone, Copy, Debug, Default)]
struct Pool {
    threshold: Bytes,
    /// The device's pool, made with the first allocation.
    on_device: Option<PoolId>,
}

#[derive(Clone, Copy, Debug)]
struct Memory {
    size: Bytes,
    at: Option<DevicePtr>,
    is_released: bool,
}

fn pooled(device: &mut dyn Device) -> Result<&mut dyn PooledDevice, DeviceError> {
    let unsupported = || DeviceError::Unavailable {
        what: "a pool of the driver".to_owned(),
        why:
            "this device has no stream-ordered memory pools; the library has to use cudaMalloc here"
                .to_owned(),
    };
    device.pooled().ok_or_else(unsupported)
}

fn mapped(device: &mut dyn Device) -> Result<&mut dyn MappedDevice, DeviceError> {
    let unsupported = || DeviceError::Unavailable {
        what: "memory mapping".to_owned(),
        why: "this device does not support it; the library has to use cudaMalloc here".to_owned(),
    };
    device.mapped().ok_or_else(unsupported)
}

impl Held {
    pub(super) fn new(path: String) -> Self {
        let (streams, events, reservations) = (BTreeSet::new(), BTreeSet::new(), BTreeMap::new());
        let pools = BTreeMap::from([(0, Pool::default())]);
        Self {
            path,
            accounts: Accounts::default(),
            streams,
            events,
            pools,
            reservations,
            memory: BTreeMap::new(),
            next: 1,
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// The pool that has the library's memory.
    pub(super) fn pool(&self) -> Option<PoolId> {
        self.pools.values().find_map(|pool| pool.on_device)
    }

    pub(super) fn call(
        &mut self,
        device: &mut dyn Device,
        call: LibraryCall,
    ) -> Result<u64, DeviceError> {
        match call {
            LibraryCall::Allocate(size) => return self.allocate(device, Bytes(size)),
            LibraryCall::Free(address) => self.free(device, DevicePtr(address))?,
            LibraryCall::FreeMemory => {
                return Ok(device.free_memory()?.saturating_sub(self.promised()).0);
            }
            LibraryCall::TotalMemory => return Ok(device.info().total.0),
            LibraryCall::Synchronize => {
                device.synchronize()?;
                self.trim(device)?;
            }
            LibraryCall::SynchronizeStream(stream) => {
                device.synchronize_stream(StreamId(stream))?;
                self.trim(device)?;
            }
            LibraryCall::CreateStream => return self.create_stream(device),
            LibraryCall::DestroyStream(stream) => self.destroy_stream(device, StreamId(stream))?,
            LibraryCall::CreateEvent => return self.create_event(device),
            LibraryCall::DestroyEvent(event) => self.destroy_event(device, EventId(event))?,
            LibraryCall::RecordEvent { event, stream } => {
                device.record_event(EventId(event), StreamId(stream))?;
            }
            LibraryCall::QueryEvent(event) if device.event_done(EventId(event))? => {}
            LibraryCall::QueryEvent(event) => return Err(DeviceError::NotReady(event)),
            LibraryCall::SynchronizeEvent(event) => {
                device.synchronize_event(EventId(event))?;
                self.trim(device)?;
            }
            LibraryCall::WaitEvent { stream, event } => {
                device.wait_event(StreamId(stream), EventId(event))?;
            }
            LibraryCall::CreatePool => return Ok(self.create_pool()),
            LibraryCall::DestroyPool(pool) => self.destroy_pool(device, pool)?,
            LibraryCall::AllocateFrom { pool, size, stream } => {
                return self.allocate_from(device, pool, Bytes(size), StreamId(stream));
            }
            LibraryCall::FreeAsync { address, stream } => {
                self.free_async(device, DevicePtr(address), StreamId(stream))?;
            }
            LibraryCall::TrimPool { pool, keep } => self.trim_pool(device, pool, Bytes(keep))?,
            LibraryCall::SetThreshold { pool, bytes } => self.set_threshold(pool, Bytes(bytes))?,
            LibraryCall::Pool { pool, figure } => return self.figure(device, pool, figure),
            LibraryCall::Reserve(size) => return self.reserve(device, Bytes(size)),
            LibraryCall::Unreserve(address) => self.unreserve(device, DevicePtr(address))?,
            LibraryCall::Create(size) => return self.create(device, Bytes(size)),
            LibraryCall::Release(memory) => self.release(memory)?,
            LibraryCall::Map {
                address,
                size,
                memory,
            } => {
                let range = MemoryRange::new(DevicePtr(address), Bytes(size));
                self.map(device, range, memory)?;
            }
            LibraryCall::Unmap { address, size } => {
                self.unmap(device, MemoryRange::new(DevicePtr(address), Bytes(size)))?;
            }
            LibraryCall::Granularity => return Ok(device.info().granularity.0),
            LibraryCall::HasPools => return Ok(device.pooled().is_some().into()),
            LibraryCall::HasMapping => return Ok(device.mapped().is_some().into()),
        }
        Ok(0)
    }

    fn allocate(&mut self, device: &mut dyn Device, size: Bytes) -> Result<u64, DeviceError> {
        self.no_pool()?;
        let address = device.malloc(size)?;
        self.accounts
            .took(MemoryRange::new(address, size), Source::Driver);
        Ok(address.0)
    }

    fn create_stream(&mut self, device: &mut dyn Device) -> Result<u64, DeviceError> {
        let stream = device.create_stream()?;
        self.streams.insert(stream);
        Ok(stream.0.into())
    }

    fn destroy_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        device.destroy_stream(stream)?;
        self.streams.remove(&stream);
        Ok(())
    }

    fn create_event(&mut self, device: &mut dyn Device) -> Result<u64, DeviceError> {
        let event = device.create_event()?;
        self.events.insert(event);
        Ok(event.0.into())
    }

    fn destroy_event(
        &mut self,
        device: &mut dyn Device,
        event: EventId,
    ) -> Result<(), DeviceError> {
        device.destroy_event(event)?;
        self.events.remove(&event);
        Ok(())
    }

    fn create_pool(&mut self) -> u64 {
        let number = self.number();
        self.pools.insert(number as u32, Pool::default());
        number
    }

    fn trim_pool(
        &mut self,
        device: &mut dyn Device,
        number: u32,
        keep: Bytes,
    ) -> Result<(), DeviceError> {
        if let Some(id) = self.pool_of(number)?.on_device {
            pooled(device)?.trim_pool(id, keep)?;
            self.observe(device, id)?;
        }
        Ok(())
    }

    fn set_threshold(&mut self, number: u32, threshold: Bytes) -> Result<(), DeviceError> {
        self.pool_of(number)?;
        self.pools
            .entry(number)
            .and_modify(|pool| pool.threshold = threshold);
        Ok(())
    }

    fn reserve(&mut self, device: &mut dyn Device, size: Bytes) -> Result<u64, DeviceError> {
        let start = mapped(device)?.reserve(size)?;
        self.reservations.insert(start, size);
        Ok(start.0)
    }

    fn unreserve(&mut self, device: &mut dyn Device, start: DevicePtr) -> Result<(), DeviceError> {
        mapped(device)?.unreserve(start)?;
        self.reservations.remove(&start);
        Ok(())
    }

    fn free(&mut self, device: &mut dyn Device, start: DevicePtr) -> Result<(), DeviceError> {
        if self.accounts.is_pooled(start) {
            // `cudaFree` waits for the work on the memory, however it was allocated.
            device.synchronize()?;
            self.free_async(device, start, StreamId::DEFAULT)?;
            return self.trim(device);
        }
        device.free(start)?;
        self.accounts.gave_back(start);
        Ok(())
    }

    fn two_sources(&self) -> DeviceError {
        DeviceError::Library {
            path: self.path.clone(),
            why: TWO_SOURCES.to_owned(),
        }
    }

    fn no_pool(&self) -> Result<(), DeviceError> {
        if self.pool().is_some() {
            Err(self.two_sources())
        } else {
            Ok(())
        }
    }

    fn pool_of(&self, number: u32) -> Result<Pool, DeviceError> {
        self.pools
            .get(&number)
            .copied()
            .ok_or(DeviceError::unknown_handle("pool", number))
    }

    fn allocate_from(
        &mut self,
        device: &mut dyn Device,
        number: u32,
        size: Bytes,
        stream: StreamId,
    ) -> Result<u64, DeviceError> {
        let pool = match self.pool_of(number)?.on_device {
            Some(pool) => pool,
            None if self.pool().is_some() || self.accounts.first().is_some() => {
                return Err(self.two_sources());
            }
            None => {
                let made = pooled(device)?.create_pool(KEEP_ALL)?;
                self.pools
                    .entry(number)
                    .and_modify(|pool| pool.on_device = Some(made));
                made
            }
        };
        let served = pooled(device)?.malloc_async(pool, size, stream);
        self.observe(device, pool)?;
        let start = served?;
        self.accounts
            .took(MemoryRange::new(start, size), Source::Pool);
        Ok(start.0)
    }

    fn free_async(
        &mut self,
        device: &mut dyn Device,
        start: DevicePtr,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        pooled(device)?.free_async(start, stream)?;
        self.accounts.gave_back(start);
        self.pool()
            .map_or(Ok(()), |pool| self.observe(device, pool))
    }

    fn destroy_pool(&mut self, device: &mut dyn Device, number: u32) -> Result<(), DeviceError> {
        if number == 0 {
            return Err(DeviceError::unknown_handle("pool to destroy", number));
        }
        if let Some(id) = self.pool_of(number)?.on_device {
            pooled(device)?.destroy_pool(id)?;
            self.accounts.set_reserved(Bytes::ZERO);
        }
        self.pools.remove(&number);
        Ok(())
    }

    fn observe(&mut self, device: &mut dyn Device, pool: PoolId) -> Result<(), DeviceError> {
        let reserved = pooled(device)?.pool_reserved(pool)?;
        self.accounts.set_reserved(reserved);
        Ok(())
    }

    /// After a wait of the host, trims the pool to its threshold.
    fn trim(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let Some((pool, threshold)) = self
            .pools
            .values()
            .find_map(|pool| pool.on_device.map(|id| (id, pool.threshold)))
        else {
            return Ok(());
        };
        if self.accounts.reserved() <= threshold {
            return Ok(());
        }
        pooled(device)?.trim_pool(pool, threshold)?;
        self.observe(device, pool)
    }

    /// After the cache was emptied, trims the pool to its threshold.
    pub(super) fn empty_pool(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if self.pool().is_some() {
            device.synchronize()?;
            self.trim(device)?;
        }
        Ok(())
    }

    fn figure(
        &self,
        device: &mut dyn Device,
        number: u32,
        figure: PoolFigure,
    ) -> Result<u64, DeviceError> {
        let pool = self.pool_of(number)?;
        let memory = match pool.on_device {
            Some(id) => pooled(device)?.pool_memory(id)?,
            None => Default::default(),
        };
        let bytes = match figure {
            PoolFigure::Threshold => pool.threshold,
            PoolFigure::Reserved => memory.reserved,
            PoolFigure::ReservedHigh => memory.reserved_high,
            PoolFigure::Used => memory.used,
            PoolFigure::UsedHigh => memory.used_high,
        };
        Ok(bytes.0)
    }

    /// The bytes that are created but not mapped.
    fn promised(&self) -> Bytes {
        self.memory
            .values()
            .filter(|memory| memory.at.is_none())
            .map(|memory| memory.size)
            .sum()
    }

    fn create(&mut self, device: &mut dyn Device, size: Bytes) -> Result<u64, DeviceError> {
        self.no_pool()?;
        mapped(device)?;
        let free = device.free_memory()?.saturating_sub(self.promised());
        if size > free {
            return Err(DeviceError::OutOfMemory {
                requested: size,
                free,
            });
        }
        let number = self.number();
        self.memory.insert(
            number,
            Memory {
                size,
                at: None,
                is_released: false,
            },
        );
        Ok(number)
    }

    fn memory_of(&self, number: u64) -> Result<Memory, DeviceError> {
        let known = self
            .memory
            .get(&number)
            .copied()
            .filter(|memory| !memory.is_released);
        known.ok_or(DeviceError::unknown_handle(
            "memory",
            u32::try_from(number).unwrap_or(u32::MAX),
        ))
    }

    fn release(&mut self, number: u64) -> Result<(), DeviceError> {
        let memory = self.memory_of(number)?;
        match memory.at {
            Some(_) => drop(self.memory.insert(
                number,
                Memory {
                    is_released: true,
                    ..memory
                },
            )),
            None => drop(self.memory.remove(&number)),
        }
        Ok(())
    }

    fn map(
        &mut self,
        device: &mut dyn Device,
        range: MemoryRange,
        number: u64,
    ) -> Result<(), DeviceError> {
        let memory = self.memory_of(number)?;
        if memory.at.is_some() || memory.size != range.len {
            let why = format!(
                "it maps {} of memory {number}, which has {}{}",
                range.len,
                memory.size,
                if memory.at.is_some() {
                    " and is already mapped"
                } else {
                    ""
                }
            );
            return Err(DeviceError::Library {
                path: self.path.clone(),
                why,
            });
        }
        mapped(device)?.map(range, range.len)?;
        self.memory.insert(
            number,
            Memory {
                at: Some(range.start),
                ..memory
            },
        );
        let reservation = self.reservations.range(..=range.start).next_back();
        let reservation =
            reservation.map_or(range, |(&start, &size)| MemoryRange::new(start, size));
        self.accounts.mapped(range, reservation);
        Ok(())
    }

    fn unmap(&mut self, device: &mut dyn Device, range: MemoryRange) -> Result<(), DeviceError> {
        mapped(device)?.unmap(range)?;
        self.accounts.unmapped(range);
        let inside = |memory: &Memory| {
            memory
                .at
                .is_some_and(|at| range.start <= at && at < range.end())
        };
        self.memory
            .retain(|_, memory| !(memory.is_released && inside(memory)));
        self.memory
            .values_mut()
            .filter(|memory| inside(memory))
            .for_each(|memory| memory.at = None);
        Ok(())
    }

    pub(super) fn clear(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        if self.pool().is_some() || !self.reservations.is_empty() {
            device.synchronize()?;
        }
        while let Some((range, source)) = self.accounts.first() {
            match source {
                Source::Driver => {
                    device.free(range.start)?;
                    self.accounts.gave_back(range.start);
                }
                Source::Pool => self.free_async(device, range.start, StreamId::DEFAULT)?,
                Source::Mapping => self.unmap(device, range)?,
            }
        }
        self.memory.clear();
        self.accounts.forget_all();
        while let Some((&start, _)) = self.reservations.first_key_value() {
            mapped(device)?.unreserve(start)?;
            self.reservations.remove(&start);
        }
        if let Some(pool) = self.pool() {
            device.synchronize()?;
            pooled(device)?.destroy_pool(pool)?;
            self.accounts.set_reserved(Bytes::ZERO);
        }
        self.pools = BTreeMap::from([(0, Pool::default())]);
        while let Some(&event) = self.events.first() {
            device.destroy_event(event)?;
            self.events.remove(&event);
        }
        while let Some(&stream) = self.streams.first() {
            device.destroy_stream(stream)?;
            self.streams.remove(&stream);
        }
        Ok(())
    }
}
