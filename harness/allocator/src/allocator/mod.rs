//! What an allocator does, whoever wrote it: requests in, allocations out, accounts of everything.
//!
//! The device is passed in with each call and not owned, so that one device can serve an allocator, an audit and a scenario.
//! [`caching`] is PyTorch's behaviour, [`bfc`] TensorFlow's, [`rmm_pool`] RMM's, [`async_pool`] the driver's own pool, [`direct`] the
//! baseline without any cache. [`shared`] is PyTorch's behaviour for many host threads; it owns its device and frees by pointer. [`resource`]
//! is one interface for all of them in a program of many threads, with [`adaptors`] and buffers that free themselves.

pub mod adaptors;
pub mod async_pool;
pub mod bfc;
pub mod caching;
pub mod direct;
pub mod library;
mod live;
mod pending;
mod regions;
pub mod resource;
pub mod rmm_pool;
pub mod shared;
mod slab;
mod spec;
pub mod wrapper;

/// The methods of an [`Allocator`] that one of its fields answers: the table of its memory, which has methods of the same names.
macro_rules! answered_by {
    ($table:ident) => {
        fn set_memory_fraction(&mut self, device: &dyn Device, fraction: $crate::allocator::MemoryFraction) {
            self.$table.set_memory_fraction(device, fraction);
        }

        fn reset_peaks(&mut self) {
            self.$table.reset_peaks();
        }

        fn stats(&self) -> $crate::stats::MemoryStats {
            self.$table.stats()
        }

        fn snapshot(&self) -> Vec<$crate::stats::SegmentInfo> {
            self.$table.snapshot()
        }

        fn segment_at(&self, address: $crate::device::DevicePtr) -> Option<$crate::stats::SegmentInfo> {
            self.$table.segment_at(address)
        }
    };
}
use answered_by;

use std::fmt;
use std::num::NonZeroU32;

use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, PoolId, StreamId};
use crate::stats::{MemoryStats, SegmentInfo};
use crate::units::Bytes;

pub use spec::{AllocatorKind, AllocatorSpec, LIBRARY, SpecError};

/// What a caller asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// How many bytes. Zero gives a null allocation that costs nothing.
    pub size: Bytes,
    /// The stream whose work will use the memory first.
    pub stream: StreamId,
}

impl Request {
    /// `size` bytes for the default stream.
    #[must_use]
    pub const fn new(size: Bytes) -> Self {
        Self { size, stream: StreamId::DEFAULT }
    }

    /// The same request for another stream.
    #[must_use]
    pub const fn on(self, stream: StreamId) -> Self {
        Self { stream, ..self }
    }
}

/// Memory handed out. It is neither cloned nor dropped silently: [`Allocator::free`] consumes it, so nothing is freed twice.
#[must_use = "memory that is not given to `Allocator::free` is leaked"]
#[derive(Debug, PartialEq, Eq)]
pub struct Allocation {
    ptr: DevicePtr,
    requested: Bytes,
    size: Bytes,
    stream: StreamId,
    handle: Handle,
}

/// Where the allocator keeps its account of an allocation: a slot of its own table, so that a free needs no look-up by address.
/// Never zero, so that an `Option<Allocation>` is as small as an [`Allocation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Handle(NonZeroU32);

impl Handle {
    /// No slot: no table has that many.
    const NULL: Self = Self(NonZeroU32::MAX);

    /// The handle of a slot.
    #[inline]
    pub(crate) const fn new(slot: u32) -> Self {
        Self(NonZeroU32::MIN.saturating_add(slot))
    }

    /// The slot.
    #[inline]
    pub(crate) const fn slot(self) -> u32 {
        self.0.get() - 1
    }
}

impl Allocation {
    #[inline]
    pub(crate) const fn new(range: MemoryRange, request: Request, handle: Handle) -> Self {
        Self { ptr: range.start, requested: request.size, size: range.len, stream: request.stream, handle }
    }

    /// The answer to a request for nothing.
    pub(crate) const fn null(request: Request) -> Self {
        Self { ptr: DevicePtr::NULL, requested: Bytes::ZERO, size: Bytes::ZERO, stream: request.stream, handle: Handle::NULL }
    }

    /// Its address; null for a request of zero bytes.
    #[must_use]
    pub const fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// What was asked for: the bytes that the caller may touch.
    #[must_use]
    pub const fn requested(&self) -> Bytes {
        self.requested
    }

    /// What it is charged as: at least what was asked for.
    #[must_use]
    pub const fn size(&self) -> Bytes {
        self.size
    }

    /// The stream it was made for.
    #[must_use]
    pub const fn stream(&self) -> StreamId {
        self.stream
    }

    /// The bytes that the caller may touch.
    #[must_use]
    pub const fn range(&self) -> MemoryRange {
        MemoryRange::new(self.ptr, self.requested)
    }

    #[inline]
    pub(crate) const fn handle(&self) -> Handle {
        self.handle
    }

    /// Whether it answers a request for nothing.
    #[must_use]
    pub const fn is_null(&self) -> bool {
        self.ptr.0 == 0
    }
}

/// A memory allocator over a device.
///
/// After any error the allocator's accounts are as consistent as before the call; an out-of-memory has changed nothing but given cached
/// memory back.
pub trait Allocator: Send {
    /// Its name in scenarios and reports.
    fn name(&self) -> &'static str;

    /// What it takes from the device for a large request comes in whole multiples of this.
    fn reserve_unit(&self, device: &dyn Device) -> Bytes {
        device.info().granularity
    }

    /// The largest request that `free` bytes of the device can serve: what is left when the request's own rounding is taken off.
    fn largest_request(&self, device: &dyn Device, free: Bytes) -> Bytes {
        Bytes(free.0 - free.0 % self.reserve_unit(device).0)
    }

    /// Whether it can work on a device at all.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`]: what the device lacks, or which setting does not suit it, and what to do.
    fn check_device(&self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let _ = device;
        Ok(())
    }

    /// Hands out memory.
    ///
    /// # Errors
    /// [`AllocatorError::OutOfMemory`] where the memory is not there now, [`AllocatorError::TooLarge`] where it never can be.
    fn allocate(&mut self, device: &mut dyn Device, request: Request) -> Result<Allocation, AllocatorError>;

    /// Takes memory back. Work in flight on the allocation's own stream needs no waiting for; streams told by
    /// [`Allocator::record_stream`] are waited for before the memory is handed out again.
    ///
    /// # Errors
    /// [`DeviceError`] of a broken device or a foreign allocation.
    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError>;

    /// Tells that work on `stream` uses the memory too. The null allocation is passed over.
    ///
    /// # Errors
    /// [`DeviceError::InvalidFree`] for an allocation that this allocator has not handed out.
    fn record_stream(&mut self, allocation: &Allocation, stream: StreamId) -> Result<(), DeviceError>;

    /// Tells that a stream is used no more: for no request, no work and no [`Allocator::record_stream`]. What is kept for the stream goes:
    /// its free memory is given back to the driver, or to other streams. Memory that is still handed out for the stream stays valid.
    /// Waits for the stream's work. Call it before or after [`Device::destroy_stream`].
    ///
    /// # Errors
    /// [`DeviceError`] of a broken device.
    fn release_stream(&mut self, device: &mut dyn Device, stream: StreamId) -> Result<(), DeviceError>;

    /// Gives all cached memory that can be given back to the driver.
    ///
    /// # Errors
    /// [`DeviceError`] of a broken device.
    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError>;

    /// Limits what may be held from the driver to a share of the device, from 0 to 1; 1 lifts the limit.
    fn set_memory_fraction(&mut self, device: &dyn Device, fraction: MemoryFraction);

    /// Makes the present values the high-water marks.
    fn reset_peaks(&mut self);

    /// The running counters: a copy, nothing is recomputed.
    fn stats(&self) -> MemoryStats;

    /// The structure that the counters must agree with: all segments in address order. Linear in blocks.
    fn snapshot(&self) -> Vec<SegmentInfo>;

    /// The segment that an address lies in. Linear in the blocks of that segment and logarithmic in segments.
    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo>;

    /// The pool of the driver that all its memory comes from, where it keeps none itself. What is reserved is then the driver's to tell:
    /// [`crate::device::PooledDevice::pool_memory`]. The snapshot shows what is handed out, and not what the pool holds beside.
    fn driver_pool(&self) -> Option<PoolId> {
        None
    }

    /// Private pools, where the allocator has them.
    fn private_pools(&mut self) -> Option<&mut dyn PrivatePools> {
        None
    }

    /// Gives everything it still holds from the device back, handles included. Allocations still live become invalid.
    ///
    /// # Errors
    /// [`DeviceError`] of a broken device.
    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError>;
}

/// Pools apart from the default one, as `torch.cuda.MemPool` and `use_mem_pool` make them.
pub trait PrivatePools {
    /// Sends the allocations of all streams to the pool, which is made on first use. Contexts nest; the innermost wins.
    ///
    /// # Errors
    /// [`PrivatePoolError::AlreadyOpen`].
    fn begin(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;

    /// Stops sending allocations there. Contexts may be closed in any order.
    ///
    /// # Errors
    /// [`PrivatePoolError::NotOpen`].
    fn end(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;

    /// The owner lets go of the pool: its cached memory goes back, blocks still live keep theirs until they are freed.
    ///
    /// # Errors
    /// [`PrivatePoolError::Unknown`], [`PrivatePoolError::ContextOpen`], [`PrivatePoolError::Device`].
    fn release(&mut self, device: &mut dyn Device, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;
}

/// A private pool's number, chosen by the caller and never reused after its release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrivatePoolId(pub u32);

/// Misuse of private pools. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrivatePoolError {
    /// Close the pool's context first.
    #[error("private pool {} is open already", .0.0)]
    AlreadyOpen(PrivatePoolId),
    /// Open the pool's context first.
    #[error("private pool {} is not open", .0.0)]
    NotOpen(PrivatePoolId),
    /// The pool was never made, or is released already.
    #[error("there is no private pool {}", .0.0)]
    Unknown(PrivatePoolId),
    /// A pool cannot be released while a context is open, of this or another pool.
    #[error("private pool {} cannot be released while a pool context is open", .0.0)]
    ContextOpen(PrivatePoolId),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A share of the device's memory, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct MemoryFraction(f64);

impl MemoryFraction {
    /// No limit.
    pub const ALL: Self = Self(1.0);

    /// `None` unless 0 ≤ `fraction` ≤ 1.
    #[must_use]
    pub fn new(fraction: f64) -> Option<Self> {
        (0.0..=1.0).contains(&fraction).then_some(Self(fraction))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> f64 {
        self.0
    }

    /// The limit in bytes on a device of `total`: floor(fraction · total), or `None` for no limit.
    #[must_use]
    pub fn limit(self, total: Bytes) -> Option<Bytes> {
        // As PyTorch computes it: the product in double precision, truncated.
        (self.0 < 1.0).then_some(Bytes((self.0 * total.0 as f64) as u64))
    }
}

/// Why an allocation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocatorError {
    /// The memory is not there now. Free something, ask for less, or wait for events; then ask again.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// More than this device could give in any state. Ask for less.
    #[error("{requested} can never fit: the device has {total}")]
    TooLarge {
        /// What was asked for.
        requested: Bytes,
        /// What the device has.
        total: Bytes,
    },
    /// The device failed in another way: stop.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl AllocatorError {
    /// Whether there was no memory, now or ever: what a recovery policy can act on.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory(_) | Self::TooLarge { .. })
    }
}

/// The figures behind an out-of-memory: enough to say why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct OutOfMemory {
    /// What was asked for.
    pub requested: Bytes,
    /// What the allocator could not do without: less than was asked for, where it would have joined new pages to memory that is free.
    pub lacking: Bytes,
    /// What was asked of the driver for it: a whole segment, or the pages that were still to be mapped.
    pub segment: Bytes,
    pub cause: OomCause,
    /// Handed out when it failed.
    pub allocated: Bytes,
    /// Held from the driver when it failed.
    pub reserved: Bytes,
    /// The largest free block that this request's stream and pool had, where the allocator knows its blocks: a pool of the driver does not
    /// tell.
    pub largest_free_block: Option<Bytes>,
    /// All the memory of the device.
    pub total: Bytes,
}

/// Who refused the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OomCause {
    /// The driver: this much was free.
    Device {
        /// Free on the device.
        free: Bytes,
    },
    /// The memory fraction: the driver was not asked.
    Fraction {
        /// The limit in force.
        limit: Bytes,
    },
    /// A limit that the program has set with [`adaptors::Limited`]: neither the allocator nor the driver was asked.
    Limit {
        /// The limit in force.
        limit: Bytes,
    },
}

impl OutOfMemory {
    /// Memory that was free in the allocator, though of no use to this request.
    #[must_use]
    pub const fn reserved_but_unallocated(&self) -> Bytes {
        self.reserved.saturating_sub(self.allocated)
    }

    /// Whether not even an empty device could serve the request: recovery can only ask for less.
    #[must_use]
    pub const fn is_hopeless(&self) -> bool {
        self.segment.0 > self.total.0
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory: {} requested ({} asked of the driver), ", self.requested, self.segment)?;
        match self.cause {
            OomCause::Device { free } => write!(f, "{free} free on the device")?,
            OomCause::Fraction { limit } => write!(f, "the memory fraction allows {limit}")?,
            OomCause::Limit { limit } => write!(f, "the program allows {limit}")?,
        }
        write!(
            f,
            "; {} allocated, {} reserved, so {} reserved but unallocated",
            self.allocated,
            self.reserved,
            self.reserved_but_unallocated(),
        )?;
        match self.largest_free_block {
            _ if self.reserved_but_unallocated() == Bytes::ZERO => Ok(()),
            Some(Bytes::ZERO) => f.write_str(", none of it for this stream and size"),
            Some(largest) => write!(f, ", in pieces of at most {largest} for this stream and size"),
            None => f.write_str(", in pieces of sizes that are not known"),
        }
    }
}
