//! Names of allocations, for reports.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::pass_on;
use crate::allocator::resource::MemoryResource;
use crate::allocator::{Allocation, AllocatorError, MemoryFraction, Request};
use crate::device::{DeviceError, DevicePtr, StreamId};
use crate::stats::{MemoryStats, SegmentInfo};
use crate::units::Bytes;

/// Keeps a name for each allocation that is given one. What has no name costs a look-up when it is freed.
#[derive(Debug)]
pub struct Named<R> {
    inner: R,
    live: Mutex<BTreeMap<DevicePtr, Entry>>,
}

#[derive(Clone, Debug)]
struct Entry {
    name: String,
    requested: Bytes,
}

/// What is live under one name.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct LiveName {
    pub name: String,
    pub count: u64,
    pub requested: Bytes,
}

impl<R: MemoryResource> Named<R> {
    /// A resource whose allocations can be named.
    #[must_use]
    pub const fn new(inner: R) -> Self {
        Self { inner, live: Mutex::new(BTreeMap::new()) }
    }

    /// [`MemoryResource::allocate`] with a name.
    ///
    /// # Errors
    /// As [`MemoryResource::allocate`].
    pub fn allocate_named(&self, request: Request, name: impl Into<String>) -> Result<Allocation, AllocatorError> {
        let allocation = self.inner.allocate(request)?;
        if !allocation.is_null() {
            self.lock().insert(allocation.ptr(), Entry { name: name.into(), requested: request.size });
        }
        Ok(allocation)
    }

    /// The name of the allocation that begins at an address.
    #[must_use]
    pub fn name_of(&self, ptr: DevicePtr) -> Option<String> {
        self.lock().get(&ptr).map(|entry| entry.name.clone())
    }

    /// What is live by name, the most bytes first. Linear in named allocations.
    #[must_use]
    pub fn live_names(&self) -> Vec<LiveName> {
        let mut by_name: BTreeMap<String, LiveName> = BTreeMap::new();
        for Entry { name, requested } in self.lock().values() {
            let live = by_name.entry(name.clone()).or_insert_with(|| LiveName { name: name.clone(), count: 0, requested: Bytes::ZERO });
            live.count += 1;
            live.requested += *requested;
        }
        let mut live: Vec<LiveName> = by_name.into_values().collect();
        live.sort_by_key(|live| std::cmp::Reverse(live.requested));
        live
    }

    /// The table is right even where a thread panicked that held it: each change is one insertion or removal.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<DevicePtr, Entry>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R: MemoryResource> MemoryResource for Named<R> {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocatorError> {
        self.inner.allocate(request)
    }

    fn free(&self, allocation: Allocation) -> Result<(), DeviceError> {
        // Before the free: afterwards another thread may get the address, and give it a name.
        let (ptr, entry) = (allocation.ptr(), self.lock().remove(&allocation.ptr()));
        let freed = self.inner.free(allocation);
        if let (Err(DeviceError::InvalidFree { .. }), Some(entry)) = (&freed, entry) {
            self.lock().insert(ptr, entry);
        }
        freed
    }

    fn close(&self) -> Result<(), DeviceError> {
        self.lock().clear();
        self.inner.close()
    }

    pass_on!(record_stream, release_stream, empty_cache, set_memory_fraction, stats, snapshot);
}
