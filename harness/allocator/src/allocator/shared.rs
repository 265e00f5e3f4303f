//! The caching allocator for many host threads on one device: [`SharedAllocator`], `Send` and `Sync`, freeing by pointer.
//!
//! Words: a *core* is a [`CachingAllocator`] behind a lock of its own; the *slow-path lock* guards what all cores together hold from the device;
//! the device has a lock of its own too. [`Cores`] says how many cores there are. `table` is read without a lock, `addresses` finds the core
//! of an address, `held` counts what all cores hold, `sibling_cores` is what a core asks of the others, `sync` names the primitives.
//!
//! PyTorch's free blocks, blocks and segments belong to one stream each, so with a core for each stream a hit or an unshared free touches
//! that stream's core only, and threads on different streams never wait for each other there. A miss unlocks the core, takes the slow-path lock
//! and the device, then the core again, tries the cache again, and only then calls the driver; meanwhile other streams' hits go on. Decisions
//! are those of the plain allocator: the sequence of driver calls is one and the same code.
//!
//! Three rules keep this free of deadlocks, and the tests explore them with every lock and atomic as a scheduling point:
//!
//! 1. a thread that holds a core waits neither for the slow-path lock nor for the device;
//! 2. a thread that holds the device does not wait for the slow-path lock;
//! 3. a second core is locked only under the slow-path lock.

mod addresses;
mod held;
mod sibling_cores;
mod sync;
mod table;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};

use self::addresses::{Addresses, Owner};
use self::held::Held;
use self::sibling_cores::SiblingCores;
use self::sync::{Guard, Lock};
use self::table::Table;
use super::caching::{CachingAllocator, Config, Freed};
use super::{Allocation, Allocator, AllocatorError, MemoryFraction, PrivatePoolError, PrivatePoolId, PrivatePools, Request};
use crate::device::{Device, DeviceError, DevicePtr, Place, StreamId};
use crate::stats::{MemoryStats, SegmentInfo};

/// How many cores a [`SharedAllocator`] has, each with a lock of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cores {
    /// One for all streams, as PyTorch's one mutex for each device: threads wait for each other, and every figure is exact.
    One,
    /// One for each stream: threads on different streams do not wait for each other on hits. See [`SharedAllocator::stats`] for the
    /// figures that become bounds. Without private pools and garbage collection.
    PerStream,
}

/// How many released streams with live memory are looked at again only on their own release or when the cache is emptied.
const FEW_RELEASED: usize = 64;

///
/// A pointer that was freed may be handed out again at once, to another thread: freeing it twice is noticed only while it is not.
pub struct SharedAllocator<D = Box<dyn Device>> {
    config: Config,
    cores: Cores,
    /// Made on first use; with one core under key 0, otherwise under the stream's number.
    table: Table<Core, 64>,
    addresses: Addresses,
    slow_path: Lock<SlowPath>,
    /// Apart from the slow-path lock, because callers hold it too: where one of them panics, the accounts of the allocator are still right.
    device: Lock<D>,
}

/// Apart from its neighbours in memory: two cache lines, since processors fetch them in pairs.
#[repr(align(128))]
struct Core(Lock<CachingAllocator>);

/// What only calls that go to the driver need.
struct SlowPath {
    held: Held,
    /// Of all cores; each takes it over before it goes to the driver.
    fraction: MemoryFraction,
    /// Cores of released streams that still hold memory.
    released: BTreeSet<u32>,
    /// How many of those there may be before all of them are looked at again: twice what the last look has left. So each release costs
    /// constant time on average.
    released_limit: usize,
}

/// The device of a [`SharedAllocator`], borrowed by [`SharedAllocator::device`].
pub struct DeviceGuard<'a, D>(Guard<'a, D>);

impl<D> Deref for DeviceGuard<'_, D> {
    type Target = D;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<D> DerefMut for DeviceGuard<'_, D> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl<D: Device> SharedAllocator<D> {
    /// An empty allocator on this device.
    ///
    /// With a garbage collection threshold there is one core whatever `cores` says, since ages are counted over all streams; see
    /// [`SharedAllocator::cores`].
    #[must_use]
    pub fn new(device: D, config: Config, cores: Cores) -> Self {
        let cores = if config.garbage_collection_threshold.is_some() { Cores::One } else { cores };
        let fraction = config.memory_fraction;
        let slow_path = Lock::new(SlowPath { held: Held::default(), fraction, released: BTreeSet::new(), released_limit: FEW_RELEASED });
        Self { config, cores, table: Table::default(), addresses: Addresses::default(), slow_path, device: Lock::new(device) }
    }

    /// How many cores are in force.
    #[must_use]
    pub const fn cores(&self) -> Cores {
        self.cores
    }

    /// Hands out memory. Give it back with [`SharedAllocator::free`] and its address, or with [`SharedAllocator::free_allocation`], on any
    /// thread.
    ///
    /// # Errors
    /// As [`Allocator::allocate`].
    #[inline]
    pub fn allocate(&self, request: Request) -> Result<Allocation, AllocatorError> {
        let key = self.key(request.stream);
        let core = self.core(key);
        {
            let mut core = core.0.lock();
            if let Some(allocation) = core.allocate_cached(request) {
                self.record_owner(key, &allocation);
                return Ok(allocation);
            }
        }
        self.allocate_with_device(key, request)
    }

    /// Takes memory back, given its address. The null pointer is passed over.
    ///
    /// # Errors
    /// [`DeviceError::InvalidFree`] where nothing is handed out at this address: it was freed before, or never was ours.
    /// [`DeviceError`] of a broken device.
    #[inline]
    pub fn free(&self, ptr: DevicePtr) -> Result<(), DeviceError> {
        for owner in self.addresses.owners(ptr) {
            let Some(core) = self.table.get(owner.key.into()) else { continue };
            let freed = core.0.lock().free_without_device(ptr, owner.handle);
            match freed {
                Freed::Done => return Ok(()),
                Freed::NeedsDevice => return self.free_with_device(core, ptr, owner),
                Freed::NotLive => {}
            }
        }
        if ptr == DevicePtr::NULL { Ok(()) } else { Err(not_live(ptr)) }
    }

    /// Takes memory back, given the allocation itself.
    ///
    /// # Errors
    /// As [`SharedAllocator::free`].
    #[inline]
    pub fn free_allocation(&self, allocation: Allocation) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let owner = Owner { key: self.key(allocation.stream()), handle: allocation.handle() };
        let core = self.core(owner.key);
        let freed = core.0.lock().free_without_device(allocation.ptr(), owner.handle);
        match freed {
            Freed::Done => Ok(()),
            Freed::NeedsDevice => self.free_with_device(core, allocation.ptr(), owner),
            Freed::NotLive => Err(not_live(allocation.ptr())),
        }
    }

    /// Tells that work on `stream` uses the memory at this address too. The null pointer is passed over.
    ///
    /// # Errors
    /// [`DeviceError::InvalidFree`] where nothing is handed out at this address.
    pub fn record_stream(&self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        for owner in self.addresses.owners(ptr) {
            let Some(core) = self.table.get(owner.key.into()) else { continue };
            let mut core = core.0.lock();
            if let Some(allocation) = core.allocation_at(ptr, owner.handle) {
                return core.record_stream(&allocation, stream);
            }
        }
        if ptr == DevicePtr::NULL { Ok(()) } else { Err(not_live(ptr)) }
    }

    /// Tells that a stream is used no more: for no request, no work and no [`SharedAllocator::record_stream`], by any thread. What is kept for
    /// the stream goes: its free memory is given back to the driver, and its core serves another stream. Memory that is still handed out
    /// for the stream stays valid. Waits for the stream's work. Call it before or after [`Device::destroy_stream`], and before
    /// [`Device::release_stream`]. The default stream is passed over.
    ///
    /// # Errors
    /// [`DeviceError`] of a broken device.
    pub fn release_stream(&self, stream: StreamId) -> Result<(), DeviceError> {
        let mut slow_path = self.slow_path.lock();
        let mut device = self.device.lock_after_panics();
        let key = self.key(stream);
        let Some(core) = self.table.get(key.into()) else { return Ok(()) };
        {
            let mut core = core.0.lock();
            let released = core.release_stream(&mut *device, stream);
            slow_path.held.set(key, &core.stats());
            released?;
        }
        if self.cores == Cores::PerStream && stream != StreamId::DEFAULT {
            slow_path.released.insert(key);
            self.retire_empty_cores(&mut slow_path, key);
        }
        Ok(())
    }

    /// Makes the cores of released streams that hold nothing available for other streams: one of them, or all if there are many.
    fn retire_empty_cores(&self, slow_path: &mut SlowPath, key: u32) {
        let many = slow_path.released.len() > slow_path.released_limit;
        let candidates: Vec<u32> = if many { slow_path.released.iter().copied().collect() } else { vec![key] };
        for key in candidates {
            let Some(core) = self.table.get(key.into()) else { continue };
            if core.0.lock().holds_nothing() {
                self.table.retire(key.into());
                slow_path.held.remove(key);
                slow_path.released.remove(&key);
            }
        }
        if many {
            slow_path.released_limit = FEW_RELEASED.max(2 * slow_path.released.len());
        }
    }

    /// Gives the cached memory of all streams back to the driver.
    ///
    /// # Errors
    /// [`DeviceError`] of a broken device.
    pub fn empty_cache(&self) -> Result<(), DeviceError> {
        let mut slow_path = self.slow_path.lock();
        let mut device = self.device.lock_after_panics();
        let SlowPath { held, .. } = &mut *slow_path;
        let key = self.table.by_key().first().map_or(0, |&(key, _)| key as u32);
        let mut core = self.core(key).0.lock();
        let released = core.release_all_cached(&mut *device, &mut SiblingCores::of(self, key, held));
        held.set(key, &core.stats());
        released
    }

    /// Limits what all cores together may hold from the driver to a share of the device, from 0 to 1; 1 lifts the limit.
    pub fn set_memory_fraction(&self, fraction: MemoryFraction) {
        let mut slow_path = self.slow_path.lock();
        slow_path.fraction = fraction;
        let device = self.device.lock_after_panics();
        for core in self.table.values() {
            core.0.lock().set_memory_fraction(&*device, fraction);
        }
    }

    /// Makes the present values the high-water marks.
    pub fn reset_peaks(&self) {
        let mut slow_path = self.slow_path.lock();
        let mut all = self.lock_all();
        all.iter_mut().for_each(|core| core.reset_peaks());
        slow_path.held.reset_peaks();
    }

    /// The counters of all streams at one moment.
    ///
    /// All sums are exact. Peaks are exact for one core, while one stream only has been used, and always those of reserved bytes and
    /// segments. The other peaks of several cores are upper bounds, at most the sum of the streams' own peaks (which may have been at
    /// different times) and, for bytes, at most the peak of reserved bytes. What waits for events of a stream is active until that
    /// stream's core has looked, which it does at its next allocation.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        let slow_path = self.slow_path.lock();
        let parts: Vec<MemoryStats> = self.lock_all().iter().map(|core| core.stats()).collect();
        match (self.cores, &parts[..]) {
            (Cores::One, [stats]) => *stats,
            _ => slow_path.held.sum(&parts),
        }
    }

    /// The structure of all streams at one moment: all segments in address order.
    #[must_use]
    pub fn snapshot(&self) -> Vec<SegmentInfo> {
        let _slow_path = self.slow_path.lock();
        let cores = self.lock_all();
        let mut segments: Vec<SegmentInfo> = cores.iter().flat_map(|core| core.snapshot()).collect();
        segments.sort_by_key(|segment| segment.address);
        segments
    }

    /// Opens a private pool's context, as [`PrivatePools::begin`].
    ///
    /// # Errors
    /// [`PrivatePoolError`]; [`PrivatePoolError::Device`] with [`DeviceError::Unavailable`] where each stream has its own core.
    pub fn begin_pool(&self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.only_core()?.0.lock().begin(pool)
    }

    /// Closes a private pool's context, as [`PrivatePools::end`].
    ///
    /// # Errors
    /// As [`SharedAllocator::begin_pool`].
    pub fn end_pool(&self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        self.only_core()?.0.lock().end(pool)
    }

    /// Lets go of a private pool, as [`PrivatePools::release`].
    ///
    /// # Errors
    /// As [`SharedAllocator::begin_pool`].
    pub fn release_pool(&self, pool: PrivatePoolId) -> Result<(), PrivatePoolError> {
        let core = self.only_core()?;
        let mut slow_path = self.slow_path.lock();
        let mut device = self.device.lock_after_panics();
        let mut core = core.0.lock();
        let released = core.release(&mut *device, pool);
        slow_path.held.set(0, &core.stats());
        released
    }

    /// The device, for the caller's own use: to make streams, to wait for work. Until the guard is dropped misses of other threads wait,
    /// hits do not; the thread that has it must not call this allocator, or it waits for ever. A panic of that thread does the allocator no
    /// harm.
    #[must_use]
    pub fn device(&self) -> DeviceGuard<'_, D> {
        DeviceGuard(self.device.lock_after_panics())
    }

    /// Gives everything back to the device, handles included. Allocations still live become invalid; the allocator is empty and can be
    /// used on.
    ///
    /// # Errors
    /// [`DeviceError`] of a broken device.
    pub fn close(&self) -> Result<(), DeviceError> {
        let mut slow_path = self.slow_path.lock();
        let mut device = self.device.lock_after_panics();
        for (key, core) in self.table.by_key() {
            let mut core = core.0.lock();
            let closed = core.close(&mut *device);
            slow_path.held.set(key as u32, &core.stats());
            closed?;
        }
        // Retired cores hold no memory, but they may keep events.
        self.table.values().try_for_each(|core| core.0.lock().close(&mut *device))
    }

    #[cold]
    fn allocate_with_device(&self, key: u32, request: Request) -> Result<Allocation, AllocatorError> {
        let mut slow_path = self.slow_path.lock();
        let mut device = self.device.lock_after_panics();
        let SlowPath { held, fraction, .. } = &mut *slow_path;
        // Looked up under the slow-path lock: the core may have been retired since the caller looked.
        let mut core = self.core(key).0.lock();
        core.set_memory_fraction(&*device, *fraction);
        let allocated = core.allocate_with_siblings(&mut *device, request, &mut SiblingCores::of(self, key, held));
        held.set(key, &core.stats());
        if let Ok(allocation) = &allocated {
            self.record_owner(key, allocation);
        }
        allocated
    }

    /// A free that records events.
    #[cold]
    fn free_with_device(&self, core: &Core, ptr: DevicePtr, owner: Owner) -> Result<(), DeviceError> {
        let mut device = self.device.lock_after_panics();
        let mut core = core.0.lock();
        // Another thread may have freed it meanwhile.
        let allocation = core.allocation_at(ptr, owner.handle).ok_or_else(|| not_live(ptr))?;
        core.free(&mut *device, allocation)
    }

    /// Notes which core has handed out the address, for the free. The caller holds the lock of that core, so that a slot changes only as its
    /// core does.
    #[inline]
    fn record_owner(&self, key: u32, allocation: &Allocation) {
        if !allocation.is_null() {
            self.addresses.set(allocation.ptr(), allocation.size(), Owner { key, handle: allocation.handle() });
        }
    }

    #[inline]
    fn key(&self, stream: StreamId) -> u32 {
        match self.cores {
            Cores::One => 0,
            Cores::PerStream => stream.0,
        }
    }

    #[inline]
    fn core(&self, key: u32) -> &Core {
        self.table.get_or_insert(key.into(), || Core(Lock::new(CachingAllocator::new(self.config.clone()))))
    }

    fn only_core(&self) -> Result<&Core, PrivatePoolError> {
        match self.cores {
            Cores::One => Ok(self.core(0)),
            Cores::PerStream => Err(PrivatePoolError::Device(DeviceError::Unavailable {
                what: "private pools".to_owned(),
                why: "here each stream has a core of its own, and a private pool takes the allocations of all streams; make the allocator \
                      with `Cores::One`"
                    .to_owned(),
            })),
        }
    }

    /// All cores at once, retired ones included. The caller holds the slow-path lock.
    fn lock_all(&self) -> Vec<Guard<'_, CachingAllocator>> {
        self.table.values().map(|core| core.0.lock()).collect()
    }
}

impl<D> std::fmt::Debug for SharedAllocator<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedAllocator").field("config", &self.config).field("cores", &self.cores).finish_non_exhaustive()
    }
}

fn not_live(ptr: DevicePtr) -> DeviceError {
    DeviceError::InvalidFree { ptr, place: Place::default() }
}
