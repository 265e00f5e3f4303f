//! [`Limited`]: any device with a smaller memory, so that an H200 and the simulated device run out of memory at the same byte.
//! [`admit`]: whether a run may take what it needs of a device that others use too.

use std::collections::BTreeMap;

use super::{
    CostFigure, Device, DeviceCalls, DeviceError, DeviceInfo, DeviceMemory, DevicePtr, EventId, Leaks, MappedDevice, MemoryRange, Place,
    PoolId, PoolMemory, PooledDevice, StreamId, Tag, TestDevice,
};
use crate::units::{Bytes, Nanos};

/// A device of which only a part may be allocated. Allocations are charged against the limit in whole granules, whatever the device
/// itself does; everything else is the device's own.
pub struct Limited {
    inner: Box<dyn TestDevice>,
    info: DeviceInfo,
    /// The charge of each living allocation.
    charges: BTreeMap<DevicePtr, Bytes>,
    /// Their sum.
    charged: Bytes,
    pressure: Bytes,
    /// Pools that live: what they have reserved is charged as the driver tells it, whenever the limit matters.
    pools: Vec<PoolId>,
    /// Pages that the limit refused to make, each a call to a driver of a device of this size.
    refused_pages: u64,
}

impl Limited {
    /// Limits a device. Nothing may be allocated on it yet.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where the limit is below one granule, or above what the device has free; the memory's own errors.
    pub fn new(mut device: Box<dyn TestDevice>, limit: Bytes) -> Result<Self, DeviceError> {
        let free = device.free_memory()?;
        let granularity = device.info().granularity;
        let refuse = |why| Err(DeviceError::Unavailable { what: format!("a limit of {limit}"), why });
        if limit < granularity {
            return refuse(format!("memory comes in pieces of {granularity}, so the limit must be at least that"));
        }
        if limit > free {
            let memory = device.memory()?;
            let others = held_by_others(&memory) + memory.pressure;
            let DeviceMemory { free, total, .. } = memory;
            return refuse(format!("only {free} of {total} are free and others hold {others}; lower the limit or free the device"));
        }
        let info = device.info();
        let info = DeviceInfo { total: limit, ..info.clone() };
        let (charges, charged, pools) = (BTreeMap::new(), Bytes::ZERO, Vec::new());
        Ok(Self { inner: device, info, charges, charged, pressure: Bytes::ZERO, pools, refused_pages: 0 })
    }

    /// Refuses an allocation. The device is asked for more than it has, so that a refusal is a driver call that fails, in its counts and in
    /// its time, as it would be on a device of this size.
    fn refuse(&mut self, requested: Bytes) -> DeviceError {
        let impossible = self.inner.info().total + self.info.granularity;
        let refused = match self.inner.malloc(impossible) {
            Err(error) if error.is_out_of_memory() => Ok(()),
            Err(error) => Err(error),
            // A driver that promises more than it has: what it gave goes back, and the limit stands.
            Ok(ptr) => self.inner.free(ptr),
        };
        refused.and_then(|()| self.out_of_memory(requested)).unwrap_or_else(|error| error)
    }

    /// The answer that there is no memory.
    fn out_of_memory(&mut self, requested: Bytes) -> Result<DeviceError, DeviceError> {
        Ok(DeviceError::OutOfMemory { requested, free: self.free_memory()? })
    }

    /// What the limit leaves.
    fn left(&mut self) -> Result<Bytes, DeviceError> {
        Ok(self.info.total.saturating_sub(self.all_charged()?).saturating_sub(self.pressure))
    }

    /// What is charged now, pools included.
    fn all_charged(&mut self) -> Result<Bytes, DeviceError> {
        let mut charged = self.charged;
        for index in 0..self.pools.len() {
            let pool = self.pools[index];
            charged += self.inner_pooled()?.pool_reserved(pool)?;
        }
        Ok(charged)
    }
}

impl Device for Limited {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_memory(&mut self) -> Result<Bytes, DeviceError> {
        Ok(self.left()?.min(self.inner.free_memory()?))
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        let left = self.left()?;
        let Some(charge) = size.checked_round_up(self.info.granularity).filter(|charge| *charge <= left) else {
            return Err(self.refuse(size));
        };
        let ptr = self.inner.malloc(size)?;
        self.charges.insert(ptr, charge);
        self.charged += charge;
        Ok(ptr)
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.inner.free(ptr)?;
        if let Some(charge) = self.charges.remove(&ptr) {
            self.charged -= charge;
        }
        Ok(())
    }

    fn create_stream(&mut self) -> Result<StreamId, DeviceError> {
        self.inner.create_stream()
    }

    fn destroy_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.inner.destroy_stream(stream)
    }

    fn release_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.inner.release_stream(stream)
    }

    fn create_event(&mut self) -> Result<EventId, DeviceError> {
        self.inner.create_event()
    }

    fn destroy_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.inner.destroy_event(event)
    }

    fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        self.inner.record_event(event, stream)
    }

    fn event_done(&mut self, event: EventId) -> Result<bool, DeviceError> {
        self.inner.event_done(event)
    }

    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        self.inner.wait_event(stream, event)
    }

    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.inner.synchronize_event(event)
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.inner.synchronize_stream(stream)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.inner.synchronize()
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        if self.inner.mapped().is_some() { Some(self) } else { None }
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        if self.inner.pooled().is_some() { Some(self) } else { None }
    }
}

impl TestDevice for Limited {
    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        let inner = self.inner.memory()?;
        Ok(DeviceMemory { total: self.info.total, free: self.left()?.min(inner.free), pressure: self.pressure, ..inner })
    }

    fn own_context(&self) -> Result<Bytes, DeviceError> {
        self.inner.own_context()
    }

    fn calls(&self) -> DeviceCalls {
        let inner = self.inner.calls();
        DeviceCalls { create: inner.create + self.refused_pages, ..inner }
    }

    fn set_pressure(&mut self, held: Bytes) -> Result<Bytes, DeviceError> {
        let most = self.info.total.saturating_sub(self.all_charged()?);
        self.pressure = self.inner.set_pressure(held.min(most))?;
        Ok(self.pressure)
    }

    fn now(&mut self) -> Nanos {
        self.inner.now()
    }

    fn set_place(&mut self, place: Place) {
        self.inner.set_place(place);
    }

    fn create_timed_event(&mut self) -> Result<EventId, DeviceError> {
        self.inner.create_timed_event()
    }

    fn elapsed(&mut self, start: EventId, end: EventId) -> Result<Nanos, DeviceError> {
        self.inner.elapsed(start, end)
    }

    fn fill(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        self.inner.fill(stream, range, tag)
    }

    fn verify(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        self.inner.verify(stream, range, tag)
    }

    fn verify_later(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        self.inner.verify_later(stream, range, tag)
    }

    fn finish_verifications(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.inner.finish_verifications(stream)
    }

    fn busy(&mut self, stream: StreamId, duration: Nanos) -> Result<(), DeviceError> {
        self.inner.busy(stream, duration)
    }

    fn cost_figures(&self) -> Vec<CostFigure> {
        self.inner.cost_figures()
    }

    fn leaks(&self) -> Leaks {
        self.inner.leaks()
    }
}

impl Limited {
    fn inner_mapped(&mut self) -> Result<&mut dyn MappedDevice, DeviceError> {
        let why = || DeviceError::Unavailable { what: "memory mapping".to_owned(), why: "the device behind the limit has none".to_owned() };
        self.inner.mapped().ok_or_else(why)
    }

    fn inner_pooled(&mut self) -> Result<&mut dyn PooledDevice, DeviceError> {
        let why = || DeviceError::Unavailable { what: "memory pools".to_owned(), why: "the device behind the limit has none".to_owned() };
        self.inner.pooled().ok_or_else(why)
    }

    /// Whether what the limit leaves and what the pool has unused are so much together. The pool is asked only where it matters.
    fn may_fit(&mut self, pool: PoolId, size: Bytes) -> Result<bool, DeviceError> {
        let left = self.left()?;
        if left >= size {
            return Ok(true);
        }
        let memory = self.inner_pooled()?.pool_memory(pool)?;
        Ok(left.0.saturating_add(memory.reserved.saturating_sub(memory.used).0) >= size.0)
    }

    /// A piece of the pool, if the pool then is within the limit. Where it is not, the piece goes back, and so does what the pool took for
    /// it: the pool gives memory back only behind a wait for the stream.
    fn try_pool(&mut self, pool: PoolId, size: Bytes, stream: StreamId) -> Result<Option<DevicePtr>, DeviceError> {
        let before = self.inner_pooled()?.pool_reserved(pool)?;
        let ptr = match self.inner_pooled()?.malloc_async(pool, size, stream) {
            Ok(ptr) => ptr,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        if self.all_charged()?.0.saturating_add(self.pressure.0) <= self.info.total.0 {
            return Ok(Some(ptr));
        }
        self.inner_pooled()?.free_async(ptr, stream)?;
        self.inner.synchronize_stream(stream)?;
        self.inner_pooled()?.trim_pool(pool, before)?;
        Ok(None)
    }
}

/// A pool is charged what it has reserved, as the driver tells it. At the limit it gives its unused memory back and is asked once more, as a
/// driver does at the end of its memory.
impl PooledDevice for Limited {
    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError> {
        let pool = self.inner_pooled()?.create_pool(release_threshold)?;
        self.pools.push(pool);
        Ok(pool)
    }

    fn destroy_pool(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        self.inner_pooled()?.destroy_pool(pool)?;
        self.pools.retain(|known| *known != pool);
        Ok(())
    }

    fn malloc_async(&mut self, pool: PoolId, size: Bytes, stream: StreamId) -> Result<DevicePtr, DeviceError> {
        if self.may_fit(pool, size)? {
            if let Some(ptr) = self.try_pool(pool, size, stream)? {
                return Ok(ptr);
            }
            self.inner_pooled()?.trim_pool(pool, Bytes::ZERO)?;
            if let Some(ptr) = self.try_pool(pool, size, stream)? {
                return Ok(ptr);
            }
        } else {
            // As other refusals: a call to the driver that fails.
            let impossible = self.inner.info().total + self.info.granularity;
            if let Ok(ptr) = self.inner_pooled()?.malloc_async(pool, impossible, stream) {
                self.inner_pooled()?.free_async(ptr, stream)?;
            }
        }
        Err(self.out_of_memory(size)?)
    }

    fn free_async(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        self.inner_pooled()?.free_async(ptr, stream)
    }

    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError> {
        self.inner_pooled()?.trim_pool(pool, keep)
    }

    fn pool_reserved(&mut self, pool: PoolId) -> Result<Bytes, DeviceError> {
        self.inner_pooled()?.pool_reserved(pool)
    }

    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError> {
        self.inner_pooled()?.pool_memory(pool)
    }
}

impl MappedDevice for Limited {
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        self.inner_mapped()?.reserve(size)
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        self.inner_mapped()?.unreserve(start)
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        let left = self.left()?;
        if range.len > left {
            // As on a device of this size: pages are made until one is refused, and those are given back. It takes time, so it is done.
            let fitting = MemoryRange::new(range.start, Bytes(left.0 - left.0.checked_rem(page.0).unwrap_or(left.0)));
            if fitting.len > Bytes::ZERO {
                self.inner_mapped()?.map(fitting, page)?;
                self.inner_mapped()?.unmap(fitting)?;
            }
            self.refused_pages += 1;
            let free = left.min(self.inner.free_memory()?);
            return Err(DeviceError::OutOfMemory { requested: range.len, free });
        }
        self.inner_mapped()?.map(range, page)?;
        self.charged += range.len;
        Ok(())
    }

    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        self.inner_mapped()?.unmap(range)?;
        self.charged -= range.len;
        Ok(())
    }
}

/// Below this, device used beside what is known to be ours is taken for the driver's own, not for somebody's work. It is half of what
/// the context alone of another process takes on a large GPU (555 MiB, <https://github.com/ggml-org/llama.cpp/pull/23604>).
const UNNOTICED: Bytes = Bytes::mib(256);

/// Left free on a device that others use: at least this, and at least a twentieth of the device.
const LEAST_MARGIN: Bytes = Bytes::gib(1);

/// Whether a run that takes `need` bytes may start on a device in this state. `others` is the number of other processes on it, where
/// that could be read; `whole_device` says that the user wants to take all of it even if that makes others fail.
///
/// A device counts as used by others where there are other processes, or where noticeably more is used than by this process. Of such
/// a device 1 GiB or 5 %, whichever is more, stays free, because a process that cannot get a few MiB for its next kernel fails.
///
/// # Errors
/// [`DeviceError::Unavailable`], which says what is free, who has the rest, and what would be let in.
pub fn admit(memory: &DeviceMemory, others: Option<u32>, need: Bytes, whole_device: bool) -> Result<(), DeviceError> {
    let DeviceMemory { free, total, .. } = *memory;
    let held = held_by_others(memory);
    let used_by = match others {
        Some(1) => format!("1 other process, {held} held by others"),
        Some(count) => format!("{count} other processes, {held} held by others"),
        None => format!("{held} held by others"),
    };
    let refuse = |why| Err(DeviceError::Unavailable { what: format!("{need} of device memory"), why });
    if need > free {
        return refuse(format!("only {free} of {total} are free ({used_by}); ask for less, or free the device"));
    }
    let shared = others.is_some_and(|count| count > 0) || held > UNNOTICED;
    let margin = LEAST_MARGIN.max(Bytes(total.0 / 20));
    if shared && !whole_device && need > free.saturating_sub(margin) {
        let most = free.saturating_sub(margin);
        return refuse(format!(
            "others use this device too ({used_by}), and of the {free} that are free {margin} stay free for them; ask for at most {most}, \
             or allow the full device"
        ));
    }
    Ok(())
}

/// Device used that is neither this process nor pressure it made. Where nothing tells what is this process's, its context overhead is
/// taken for it, which may hide what others held before.
fn held_by_others(memory: &DeviceMemory) -> Bytes {
    memory.used.saturating_sub(memory.process.unwrap_or(memory.context_overhead)).saturating_sub(memory.pressure)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::sim::{SimConfig, SimDevice};

    fn limited(limit: Bytes) -> Result<Limited, DeviceError> {
        Limited::new(Box::new(SimDevice::new(SimConfig { total: Bytes::gib(2), ..SimConfig::default() })), limit)
    }

    fn why(result: Result<Limited, DeviceError>) -> String {
        result.err().expect("the limit is refused").to_string()
    }

    #[test]
    fn a_limit_below_a_granule_or_above_what_is_free_is_refused_with_the_figures() -> Result<(), DeviceError> {
        assert_eq!(why(limited(Bytes::ZERO)), "a limit of 0 B: memory comes in pieces of 2 MiB, so the limit must be at least that");
        assert!(limited(Bytes(Bytes::mib(2).0 - 1)).is_err());
        let mut device = SimDevice::new(SimConfig { total: Bytes::gib(2), context_overhead: Bytes::ZERO, ..SimConfig::default() });
        device.set_pressure(Bytes::gib(1))?;
        assert_eq!(
            why(Limited::new(Box::new(device), Bytes::mib(1536))),
            "a limit of 1.50 GiB: only 1 GiB of 2 GiB are free and others hold 1 GiB; lower the limit or free the device"
        );
        Ok(())
    }

    #[test]
    fn a_refused_mapping_takes_as_long_as_making_the_pages_that_fit_and_leaves_nothing() -> Result<(), DeviceError> {
        let mut device = limited(Bytes::mib(64))?;
        let mapped = device.mapped().expect("the simulated device maps");
        let start = mapped.reserve(Bytes::mib(128))?;
        let page = Bytes::mib(2);
        let mut taken = |pages: u64| -> Result<(bool, Nanos, DeviceCalls), DeviceError> {
            let (before, calls) = (device.now(), device.calls());
            let range = MemoryRange::new(start, Bytes(pages * page.0));
            let mapped = device.mapped().expect("the simulated device maps");
            let served = mapped.map(range, page).is_ok();
            if served {
                mapped.unmap(range)?;
            }
            let after = device.calls();
            let calls =
                DeviceCalls { create: after.create - calls.create, release: after.release - calls.release, ..DeviceCalls::default() };
            Ok((served, device.now().saturating_sub(before), calls))
        };
        let (fits, made, _) = taken(32)?;
        let (too_large, refused, calls) = taken(33)?;
        assert_eq!((fits, too_large, refused), (true, false, made));
        assert_eq!((calls.create, calls.release), (33, 32), "one more was asked for");
        assert!(made > Nanos::ZERO);
        assert_eq!(device.memory()?.free, Bytes::mib(64));
        Ok(())
    }

    #[test]
    fn memory_ends_at_the_limit_to_the_byte() -> Result<(), DeviceError> {
        let mut device = limited(Bytes::mib(9))?;
        assert_eq!(device.info().name, "simulated");
        let used = device.memory()?.used;
        device.malloc(Bytes(1))?;
        let last = device.malloc(Bytes::mib(6))?;
        let full = DeviceError::OutOfMemory { requested: Bytes(1), free: Bytes::mib(1) };
        assert_eq!(device.malloc(Bytes(1)), Err(full), "half a granule is left, and no allocation fits it");
        assert_eq!(device.memory()?.used - used, Bytes::mib(8));
        device.free(last)?;
        assert!(device.free(last).is_err());
        assert_eq!(device.memory()?.free, Bytes::mib(7), "an invalid free gives nothing back");
        let calls = device.calls();
        assert_eq!((calls.malloc, calls.malloc_failures), (3, 1), "refusals are calls too");
        Ok(())
    }

    #[test]
    fn pressure_counts_against_the_limit_and_moves_device_used() -> Result<(), DeviceError> {
        let mut device = limited(Bytes::mib(16))?;
        let used = device.memory()?.used;
        device.malloc(Bytes::mib(4))?;
        assert_eq!(device.set_pressure(Bytes::gib(1))?, Bytes::mib(12));
        let memory = device.memory()?;
        assert_eq!((memory.free, memory.pressure, memory.used - used), (Bytes::ZERO, Bytes::mib(12), Bytes::mib(16)));
        assert_eq!(device.set_pressure(Bytes::mib(2))?, Bytes::mib(2));
        assert_eq!(device.memory()?.free, Bytes::mib(10));
        Ok(())
    }

    fn memory(total: Bytes, used: Bytes, process: Option<Bytes>) -> DeviceMemory {
        let context_overhead = Bytes::mib(500);
        DeviceMemory { total, free: total - used, used, process, context_overhead, pressure: Bytes::ZERO }
    }

    #[test]
    fn a_device_of_our_own_is_admitted_to_its_last_byte_and_no_further() {
        let idle = memory(Bytes::gib(80), Bytes::mib(500), Some(Bytes::mib(500)));
        assert_eq!(admit(&idle, Some(0), idle.free, false), Ok(()));
        assert_eq!(admit(&idle, None, idle.free, false), Ok(()));
        let error = admit(&idle, Some(0), Bytes::gib(80), true).expect_err("the context has a part");
        assert_eq!(
            error.to_string(),
            "80 GiB of device memory: only 79.51 GiB of 80 GiB are free (0 other processes, 0 B held by others); ask for less, or free the device"
        );
    }

    #[test]
    fn the_last_of_a_shared_device_is_taken_only_if_the_user_says_so() {
        let shared = memory(Bytes::gib(80), Bytes::gib(40), Some(Bytes::mib(500)));
        let most = Bytes::gib(36);
        assert_eq!(admit(&shared, Some(2), most, false), Ok(()), "all but 5 % of the device");
        assert_eq!(admit(&shared, Some(2), shared.free, true), Ok(()));
        let error = admit(&shared, Some(2), most + Bytes(1), false).expect_err("others need the rest");
        let text = error.to_string();
        assert!(text.contains("2 other processes, 39.51 GiB held by others"), "{text}");
        assert!(text.contains("4 GiB stay free for them; ask for at most 36 GiB, or allow the full device"), "{text}");
    }

    #[test]
    fn a_device_is_shared_where_processes_are_seen_or_memory_is_missing() {
        let small = memory(Bytes::gib(8), Bytes::mib(700), Some(Bytes::mib(500)));
        assert_eq!(admit(&small, Some(0), small.free, false), Ok(()), "200 MiB are the driver's own");
        assert!(admit(&small, Some(1), small.free, false).is_err());
        assert_eq!(admit(&small, Some(1), small.free - Bytes::gib(1), false), Ok(()), "1 GiB is more than 5 %");
        let unseen = memory(Bytes::gib(8), Bytes::gib(3), None);
        assert!(admit(&unseen, None, unseen.free, false).is_err(), "2.5 GiB belong to somebody");
    }
}
