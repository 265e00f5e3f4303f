//! ONNX Runtime's memory arena: TensorFlow's allocator with other rules for the size of a region
//! and without garbage collection.
//!
//! It models `BFCArena` (<https://github.com/microsoft/onnxruntime>), which the CPU and the CUDA
//! execution providers share. [`super::bfc`] has what both libraries do. The decisions on one
//! stream equal those recorded from ONNX Runtime 1.31.
//!
//! * `kNextPowerOfTwo`: the first region has `initial_chunk_size_bytes`. The size doubles until the
//!   request fits, else it doubles for the next region, up to `max_power_of_two_extend_bytes`. It
//!   does so even if the driver refuses the region. A larger request still gets a larger region.
//! * `kSameAsRequested`: a region has the size of its request.
//! * If the driver refuses, the arena tries 0.9 of the size as TensorFlow does, but nothing below
//!   8 KiB. Then the request fails. Free regions are not released.
//! * A chunk is cut if it is at least twice the request, or if `max_dead_bytes_per_chunk` or more
//!   would be wasted.
//!
//! * [`super::Allocator::empty_cache`] shrinks the arena as the run option
//!   `memory.enable_memory_arena_shrinkage` does. It releases the free regions, and the next region
//!   has `initial_growth_chunk_size_bytes`. With `kNextPowerOfTwo`, ONNX Runtime keeps the first
//!   region.
//!
//! Deliberate differences:
//!
//! * A shrink releases the first region too, unless
//!   [`OrtArenaConfig::shrinkage_keeps_first_region`] is set. So nothing is reserved after the last
//!   free and a shrink, as for the other allocators.
//! * The memory fraction is a limit too.

use super::bfc_growth::Growth;
use super::blocks::CHUNK_UNIT;
use crate::units::Bytes;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExtendStrategy {
    #[default]
    NextPowerOfTwo,
    SameAsRequested,
}

/// The settings, with the names and defaults of `OrtArenaCfg`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrtArenaConfig {
    /// The limit on all regions together. By default there is none.
    pub max_mem: Option<Bytes>,
    pub arena_extend_strategy: ExtendStrategy,
    pub initial_chunk_size_bytes: Bytes,
    pub max_dead_bytes_per_chunk: Bytes,
    pub initial_growth_chunk_size_bytes: Bytes,
    pub max_power_of_two_extend_bytes: Bytes,
    /// True if a shrink keeps the first region, as ONNX Runtime does with `kNextPowerOfTwo`. The
    /// default is `false`.
    pub shrinkage_keeps_first_region: bool,
}

impl Default for OrtArenaConfig {
    fn default() -> Self {
        Self {
            max_mem: None,
            arena_extend_strategy: ExtendStrategy::default(),
            initial_chunk_size_bytes: Bytes::mib(1),
            max_dead_bytes_per_chunk: Bytes::mib(128),
            initial_growth_chunk_size_bytes: Bytes::mib(2),
            max_power_of_two_extend_bytes: Bytes::gib(1),
            shrinkage_keeps_first_region: false,
        }
    }
}

impl OrtArenaConfig {
    /// The least size that is tried after the driver refused a larger one.
    pub(super) const LEAST_AFTER_REFUSAL: u64 = 8 << 10;

    /// The next region for a request of `size`. `planned` is its size if the request is no larger.
    pub(super) fn growth(&self, planned: Option<u64>, limit: u64, size: u64) -> Growth {
        let first = self.initial_chunk_size_bytes.0.min(limit);
        let before = planned.unwrap_or(first.next_multiple_of(CHUNK_UNIT.0));
        match self.arena_extend_strategy {
            ExtendStrategy::SameAsRequested => Growth {
                region: size,
                after_refusal: before,
                after_success: before,
            },
            ExtendStrategy::NextPowerOfTwo => {
                let region = Growth::doubled(before, size);
                let next = if region == before {
                    (region.saturating_mul(2)).min(self.max_power_of_two_extend_bytes.0)
                } else {
                    region
                };
                Growth {
                    region,
                    after_refusal: next,
                    after_success: next,
                }
            }
        }
    }
}
