//! The settings of the caching allocator, and the size arithmetic that follows from them: rounding,
//! segment sizes, splitting, oversize.
//!
//! The rules are those of PyTorch (c10/cuda/CUDACachingAllocator.cpp and
//! c10/core/AllocatorConfig.cpp in <https://github.com/pytorch/pytorch>).

use super::torch::TorchVersion;
use crate::allocator::{MemoryFraction, blocks::BLOCK_UNIT};
use crate::{stats::PoolKind, units::Bytes};

/// The segment size of the small pool.
const SMALL_SEGMENT: u64 = 2 << 20;
/// From this size on, a segment fits its request.
const MADE_TO_MEASURE: u64 = 10 << 20;
/// Segments that fit their request are multiples of this.
const SEGMENT_UNIT: u64 = 2 << 20;
/// A remainder of at most this size stays with a large block.
pub(super) const LARGEST_UNSPLIT_REMAINDER: u64 = 1 << 20;

/// The settings. The default is PyTorch's.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Blocks of at least this size are never split (`max_split_size_mb`). `None` allows all
    /// splits.
    pub max_split_size: Option<Bytes>,
    /// The allowed excess of an oversize block over its request (`max_non_split_rounding_mb`).
    pub max_non_split_rounding: Bytes,
    /// The segment size for large blocks below 10 MiB (`large_segment_size_mb`).
    pub large_segment_size: Bytes,
    /// Divisions between powers of two, by interval of the request's size
    /// (`roundup_power2_divisions`). 0 and 1 mean none.
    pub roundup_power2_divisions: [u64; 16],
    /// The fraction of the limit above which old cached blocks are released before a new segment
    /// (`garbage_collection_threshold`). Has no effect without a memory fraction.
    pub garbage_collection_threshold: Option<f64>,
    /// The limit on reserved memory as a fraction of the device (`per_process_memory_fraction`),
    /// until [`set_memory_fraction`](crate::allocator::Allocator::set_memory_fraction) changes it.
    pub memory_fraction: MemoryFraction,
    /// True if segments are reserved addresses that grow and shrink by pages
    /// (`expandable_segments`).
    pub expandable_segments: bool,
    /// The addresses that an expandable segment reserves (`expandable_segments_reserve`). `None`
    /// reserves 9/8 of the device.
    pub expandable_segments_reserve: Option<SegmentReserve>,
    /// True if a request fails without any release or retry when a new segment would exceed
    /// [`Self::memory_fraction`] of the device (`throw_on_cudamalloc_oom`).
    pub throw_on_malloc_oom: bool,
    pub torch: TorchVersion,
    /// The behavior in the cases in which PyTorch is unsafe.
    pub quirks: Quirks,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SegmentReserve {
    Fraction(f64),
    Bytes(Bytes),
}

impl SegmentReserve {
    /// The reserved bytes on a device, before they are rounded up to pages: at most 9/8 of its
    /// memory.
    pub fn of(self, total: Bytes) -> Bytes {
        let most = largest_reserve(total);
        match self {
            Self::Fraction(fraction) => Bytes((fraction * total.0 as f64) as u64).min(most),
            Self::Bytes(bytes) => bytes.min(most),
        }
    }
}

/// An eighth more than a device's memory, so memory unmapped at the start of a segment can be
/// mapped at its end.
pub(super) const fn largest_reserve(total: Bytes) -> Bytes {
    Bytes(total.0.saturating_add(total.0 / 8))
}

/// The behavior in a case in which PyTorch reuses memory that is still in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Quirks {
    #[default]
    Safe,
    /// As PyTorch, for comparisons with its recordings: while the context of a private pool counts
    /// as a capture, PyTorch forgets a stream recorded in it if the block is freed in it too. So it
    /// may reuse the block while that stream still works on it.
    AsTorch,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            max_split_size: None,
            max_non_split_rounding: Bytes::mib(20),
            large_segment_size: Bytes::mib(20),
            roundup_power2_divisions: [0; 16],
            garbage_collection_threshold: None,
            memory_fraction: MemoryFraction::ALL,
            expandable_segments: false,
            expandable_segments_reserve: None,
            throw_on_malloc_oom: false,
            torch: TorchVersion::default(),
            quirks: Quirks::Safe,
        }
    }
}

impl Config {
    /// The size of the block for a request, in bytes, or `None` if it exceeds 64 bits.
    pub fn round(&self, requested: u64) -> Option<u64> {
        if requested < BLOCK_UNIT {
            return Some(BLOCK_UNIT);
        }
        let divisions = self.roundup_power2_divisions[interval(requested)];
        // The product wraps in PyTorch too: divisions of at least 2⁵⁵ round everything to a
        // power of two.
        if divisions > 1 && requested > BLOCK_UNIT.wrapping_mul(divisions) {
            return round_to_division(requested, divisions);
        }
        requested.checked_next_multiple_of(BLOCK_UNIT)
    }

    /// The largest request that rounds to at most `size`, a multiple of the unit.
    pub(super) fn round_down(&self, size: u64) -> u64 {
        if size == 0 || self.round(size) == Some(size) {
            return size;
        }
        let power = 1 << size.ilog2();
        match power / self.roundup_power2_divisions[interval(size)] {
            0 => power,
            step => size - size % step,
        }
    }

    /// The size of the segment for a block of this size, in bytes, or `None` if it exceeds 64 bits.
    /// Expandable segments grow by [pages](Self::page) instead.
    pub fn segment_size(&self, size: u64) -> Option<u64> {
        match size {
            _ if size <= PoolKind::LARGEST_SMALL.0 => Some(SMALL_SEGMENT),
            _ if size < MADE_TO_MEASURE => Some(self.large_segment_size.0),
            _ => size.checked_next_multiple_of(SEGMENT_UNIT),
        }
    }

    /// The page size of an expandable segment in bytes.
    pub const fn page(&self, pool: PoolKind) -> u64 {
        match pool {
            PoolKind::Small => SMALL_SEGMENT,
            PoolKind::Large => self.large_segment_size.0,
        }
    }

    /// Returns true if a request of `wanted` bytes may use a free block of `found` bytes.
    #[inline]
    pub fn accepts(&self, wanted: u64, found: u64) -> bool {
        let Some(Bytes(max_split)) = self.max_split_size else {
            return true;
        };
        // The sum wraps in PyTorch too: with the largest rounding no oversize block is ever reused.
        if wanted < max_split {
            found < max_split
        } else {
            found < wanted.wrapping_add(self.max_non_split_rounding.0)
        }
    }
}

/// The interval of a size in `roundup_power2_divisions`: 0 below 2 MiB, then one per power of two,
/// and 15 from 32 GiB.
fn interval(size: u64) -> usize {
    (size.ilog2() as usize).saturating_sub(20).min(15)
}

fn round_to_division(size: u64, divisions: u64) -> Option<u64> {
    if size.is_power_of_two() {
        return Some(size);
    }
    match (1 << size.ilog2()) / divisions {
        0 => size.checked_next_power_of_two(),
        step => size.checked_next_multiple_of(step),
    }
}

#[cfg(test)]
mod tests;
