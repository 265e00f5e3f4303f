//! The interface of an allocator, and its implementations.
//!
//! The caller passes the device to each call, so one device can serve an allocator, an audit and a
//! scenario. [`caching`] models PyTorch, [`bfc`] TensorFlow, ONNX Runtime ([`ort_arena`]) and JAX
//! ([`xla_bfc`]), [`rmm_pool`], [`rmm_arena`] and [`rmm_binning`] RMM, [`cupy_pool`] CuPy and
//! [`async_pool`] the driver's own pool; [`direct`] is the baseline without a cache. [`shared`]
//! protects one of them with a lock for many host threads and frees by address.

pub mod async_pool;
pub mod bfc;
mod bfc_growth;
mod bins;
mod blocks;
pub mod caching;
mod counters;
pub mod cupy_pool;
pub mod direct;
mod free_index;
mod ids;
pub mod library;
mod lists;
mod live;
pub mod ort_arena;
mod pending;
mod regions;
pub mod rmm_arena;
pub mod rmm_binning;
pub mod rmm_pool;
pub mod shared;
mod slab;
mod spec;
pub mod wrapper;
pub mod xla_bfc;

/// The methods of an [`Allocator`] that one of its fields answers, which has the live allocations,
/// the statistics and the memory limit.
macro_rules! answered_by {
    ($($table:ident).+) => {
        fn record_stream(
            &mut self,
            allocation: &$crate::allocator::Allocation,
            stream: $crate::device::StreamId,
        ) -> Result<(), $crate::device::DeviceError> {
            self.$($table).+.record_use(allocation, stream)
        }

        $crate::allocator::counted_by!($($table).+);
    };
}
use answered_by;

/// As [`answered_by`], without [`Allocator::record_stream`].
macro_rules! counted_by {
    ($($table:ident).+) => {
        fn set_memory_fraction(
            &mut self,
            device: &dyn Device,
            fraction: $crate::allocator::MemoryFraction,
        ) {
            self.$($table).+.limit = fraction.limit(device.info().total);
        }

        fn reset_peaks(&mut self) {
            self.$($table).+.reset_peaks();
        }

        fn stats(&self) -> $crate::stats::MemoryStats {
            self.$($table).+.stats()
        }

        fn snapshot(&self) -> Vec<$crate::stats::SegmentInfo> {
            self.$($table).+.snapshot()
        }

        fn segment_at(
            &self,
            address: $crate::device::DevicePtr,
        ) -> Option<$crate::stats::SegmentInfo> {
            self.$($table).+.segment_at(address)
        }
    };
}
use counted_by;

use std::{fmt, num::NonZeroU32};

use crate::device::{Device, DeviceError, DevicePtr, MemoryRange, PoolId, StreamId};
use crate::stats::{MemoryStats, SegmentInfo};
use crate::units::Bytes;

pub use spec::{AllocatorKind, AllocatorSpec, LIBRARY, SpecError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The requested bytes. Zero gives a null allocation, which costs nothing.
    pub size: Bytes,
    /// The stream whose work uses the memory first.
    pub stream: StreamId,
}

impl Request {
    pub const fn new(size: Bytes) -> Self {
        Self {
            size,
            stream: StreamId::DEFAULT,
        }
    }

    /// The same request for another stream.
    pub const fn on(self, stream: StreamId) -> Self {
        Self { stream, ..self }
    }
}

/// Allocated memory. It is neither `Clone` nor dropped silently: [`Allocator::free`] consumes it,
/// so a double free is impossible.
#[must_use = "memory that is not given to `Allocator::free` is leaked"]
#[derive(Debug, PartialEq, Eq)]
pub struct Allocation {
    ptr: DevicePtr,
    requested: Bytes,
    size: Bytes,
    stream: StreamId,
    handle: Handle,
}

/// The slot of an allocation in the allocator's own table, so a free needs no look-up by address.
/// Never zero, so an `Option<Allocation>` is as small as an [`Allocation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Handle(NonZeroU32);

impl Handle {
    /// Not a slot: no table is that large.
    const NULL: Self = Self(NonZeroU32::MAX);

    #[inline]
    pub(crate) const fn new(slot: u32) -> Self {
        Self(NonZeroU32::MIN.saturating_add(slot))
    }

    #[inline]
    pub(crate) const fn slot(self) -> u32 {
        self.0.get() - 1
    }
}

impl Allocation {
    #[inline]
    pub(crate) const fn new(range: MemoryRange, request: Request, handle: Handle) -> Self {
        Self {
            ptr: range.start,
            requested: request.size,
            size: range.len,
            stream: request.stream,
            handle,
        }
    }

    /// The answer to a request for zero bytes.
    pub(crate) const fn null(request: Request) -> Self {
        Self {
            ptr: DevicePtr::NULL,
            requested: Bytes::ZERO,
            size: Bytes::ZERO,
            stream: request.stream,
            handle: Handle::NULL,
        }
    }

    /// A second record of the same allocation, for a table of live addresses.
    #[inline]
    pub(crate) const fn duplicate(&self) -> Self {
        Self { ..*self }
    }

    /// Its address, null for a request of zero bytes.
    pub const fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// The requested bytes, which the caller may use.
    pub const fn requested(&self) -> Bytes {
        self.requested
    }

    /// The charged bytes, at least the requested ones.
    pub const fn size(&self) -> Bytes {
        self.size
    }

    pub const fn stream(&self) -> StreamId {
        self.stream
    }

    pub const fn range(&self) -> MemoryRange {
        MemoryRange::new(self.ptr, self.requested)
    }

    #[inline]
    pub(crate) const fn handle(&self) -> Handle {
        self.handle
    }

    /// Returns true if it answers a request for zero bytes.
    pub const fn is_null(&self) -> bool {
        self.ptr.0 == 0
    }
}

/// A memory allocator for a device.
///
/// After any error the allocator's counters and structure stay consistent. An out of memory changes
/// nothing, except that cached memory may have been released.
pub trait Allocator: Send {
    fn name(&self) -> &'static str;

    /// The unit of large reservations from the device.
    fn reserve_unit(&self, device: &dyn Device) -> Bytes {
        device.info().granularity
    }

    /// The largest request that is certain to fit into `free` bytes of the device, after the
    /// request's own rounding.
    fn largest_request(&self, device: &dyn Device, free: Bytes) -> Bytes {
        Bytes(free.0 - free.0 % self.reserve_unit(device).0)
    }

    /// Returns true if it releases free segments before it fails a request that the driver refused.
    fn releases_before_failure(&self) -> bool {
        true
    }

    /// Returns true if no two blocks that are free for the same stream are adjacent in a segment.
    fn merges_free_neighbours(&self) -> bool {
        true
    }

    /// Checks whether the allocator can work on a device. Fails with [`DeviceError::Unavailable`]:
    /// the missing feature or the unsuitable setting, and what to do.
    fn check_device(&self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let _ = device;
        Ok(())
    }

    /// Fails with [`AllocatorError::OutOfMemory`] if it does not fit now,
    /// [`AllocatorError::TooLarge`] if it never can.
    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError>;

    /// Frees memory. Work in flight on the allocation's own stream may still use it. Before the
    /// memory is reused, the allocator waits for the work of the streams recorded with
    /// [`Allocator::record_stream`]. Fails with [`DeviceError`] of a broken device or a foreign
    /// allocation.
    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError>;

    /// Records that work on `stream` uses the memory too. Ignores the null allocation.
    /// Fails with [`DeviceError::InvalidFree`] for a foreign allocation.
    fn record_stream(
        &mut self,
        allocation: &Allocation,
        stream: StreamId,
    ) -> Result<(), DeviceError>;

    /// Releases a stream that no later request, work or [`Allocator::record_stream`] uses. Its
    /// cached memory goes to the driver or to other streams. Its live allocations stay valid. Waits
    /// for the stream's work. Call it before or after [`Device::destroy_stream`]. An allocator that
    /// keeps nothing per stream does nothing.
    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        let _ = (device, stream);
        Ok(())
    }

    /// Returns all cached memory that can be released to the driver.
    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError>;

    /// Limits the reserved memory to a fraction of the device's memory. The fraction 1 means no
    /// limit.
    fn set_memory_fraction(&mut self, device: &dyn Device, fraction: MemoryFraction);

    fn reset_peaks(&mut self);

    /// Returns a copy of the running counters, without recomputation.
    fn stats(&self) -> MemoryStats;

    /// Returns all segments in address order. The counters must agree with them. Linear in blocks.
    fn snapshot(&self) -> Vec<SegmentInfo>;

    /// Returns the segment that contains an address. Linear in the blocks of that segment and
    /// logarithmic in segments.
    fn segment_at(&self, address: DevicePtr) -> Option<SegmentInfo>;

    /// Returns the driver's pool that serves all requests, if the allocator has no cache of its
    /// own. The driver then knows the reserved bytes: [`crate::device::PooledDevice::pool_memory`].
    /// The snapshot shows live allocations only.
    fn driver_pool(&self) -> Option<PoolId> {
        None
    }

    /// Why the modelled library could not be constructed on this device, if it could not. Known
    /// after the first request.
    fn construction_failure(&self) -> Option<String> {
        None
    }

    fn private_pools(&mut self) -> Option<&mut dyn PrivatePools> {
        None
    }

    /// Returns all memory and handles to the device. Live allocations become invalid.
    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError>;
}

/// Pools separate from the default one, as made by `torch.cuda.MemPool` and `use_mem_pool`.
pub trait PrivatePools {
    /// Directs the allocations of all streams to the pool, which is made on first use. Contexts
    /// nest; the innermost wins.
    fn begin(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;

    /// Stops directing allocations to the pool. Contexts may be closed in any order.
    fn end(&mut self, pool: PrivatePoolId) -> Result<(), PrivatePoolError>;

    /// Releases a pool: its cached memory returns to the driver. Live blocks stay valid until they
    /// are freed.
    fn release(
        &mut self,
        device: &mut dyn Device,
        pool: PrivatePoolId,
    ) -> Result<(), PrivatePoolError>;
}

/// The number of a private pool. The caller chooses it and never reuses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PrivatePoolId(pub u32);

/// A misuse of private pools. It has changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrivatePoolError {
    #[error("private pool {} is open already", .0.0)]
    AlreadyOpen(PrivatePoolId),
    #[error("private pool {} is not open", .0.0)]
    NotOpen(PrivatePoolId),
    /// The pool was never made or is already released.
    #[error("there is no private pool {}", .0.0)]
    Unknown(PrivatePoolId),
    /// A pool cannot be released while the context of any pool is open.
    #[error("private pool {} cannot be released while a pool context is open", .0.0)]
    ContextOpen(PrivatePoolId),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A fraction of the device's memory, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct MemoryFraction(f64);

impl MemoryFraction {
    /// No limit.
    pub const ALL: Self = Self(1.0);

    /// Returns `None` unless 0 ≤ `fraction` ≤ 1.
    pub fn new(fraction: f64) -> Option<Self> {
        (0.0..=1.0).contains(&fraction).then_some(Self(fraction))
    }

    pub const fn get(self) -> f64 {
        self.0
    }

    /// The limit in bytes on a device of `total`, or `None` for no limit.
    pub fn limit(self, total: Bytes) -> Option<Bytes> {
        (self.0 < 1.0).then(|| self.of(total))
    }

    /// floor(fraction · total), computed as in PyTorch: the product in double precision,
    /// truncated.
    pub fn of(self, total: Bytes) -> Bytes {
        Bytes((self.0 * total.0 as f64) as u64)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocatorError {
    /// The memory is not available now. Free some, request less, or wait for events; then try
    /// again.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// More memory than this device has. Request less.
    #[error("{requested} can never fit: the device has {total}")]
    TooLarge { requested: Bytes, total: Bytes },
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl AllocatorError {
    /// Returns true if the request failed for lack of memory, so a recovery policy can act.
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::OutOfMemory(_) | Self::TooLarge { .. })
    }
}

/// The figures that explain an out of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    pub requested: Bytes,
    /// The bytes that were missing: less than requested if new pages would have extended a free
    /// block.
    pub missing: Bytes,
    /// The bytes requested from the driver: a whole segment, or the pages still to be mapped.
    pub segment: Bytes,
    pub cause: OomCause,
    /// At the time of the failure.
    pub allocated: Bytes,
    /// At the time of the failure.
    pub reserved: Bytes,
    /// The largest free block for this stream and pool, or `None` if the allocator does not know
    /// its blocks, as with a pool of the driver.
    pub largest_free_block: Option<Bytes>,
    pub total: Bytes,
}

/// The limit that the request exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OomCause {
    /// The memory of the device.
    Device { free: Bytes },
    /// The memory fraction. The driver was not asked.
    Fraction { limit: Bytes },
    /// The allocator's own limit, a setting or the size of its only region. The driver was not
    /// asked.
    Allocator { limit: Bytes },
}

impl OomCause {
    /// Whether the driver refused the request.
    const fn is_of_driver(self) -> bool {
        match self {
            Self::Device { .. } => true,
            Self::Fraction { .. } | Self::Allocator { .. } => false,
        }
    }
}

impl OutOfMemory {
    /// Free memory of the allocator that the request could not use.
    pub const fn reserved_but_unallocated(&self) -> Bytes {
        self.reserved.saturating_sub(self.allocated)
    }
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from_whom = if self.cause.is_of_driver() {
            "asked of the driver"
        } else {
            "needed"
        };
        let Self {
            requested, segment, ..
        } = self;
        write!(
            f,
            "out of memory: {requested} requested ({segment} {from_whom}), "
        )?;
        match self.cause {
            OomCause::Device { free } => write!(f, "{free} free on the device")?,
            OomCause::Fraction { limit } => write!(f, "the memory fraction allows {limit}")?,
            OomCause::Allocator { limit } => write!(f, "the allocator's own limit is {limit}")?,
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
            Some(largest) => write!(
                f,
                ", in pieces of at most {largest} for this stream and size"
            ),
            None => f.write_str(", in pieces of unknown sizes"),
        }
    }
}
