//! RMM's bins: a pool for large requests, and one list of equal blocks for each smaller size.
//!
//! It models `rmm::mr::binning_memory_resource`, whose bins are `fixed_size_memory_resource`s, on
//! top of `pool_memory_resource` (<https://github.com/rapidsai/rmm>). [`super::rmm_pool`] has the
//! rules of the pool. The decisions equal those recorded from RMM 26.10.
//!
//! * A request gets a block of the smallest bin that holds it, and all of the block. Larger
//!   requests go to the pool.
//! * A bin takes 128 blocks at once from the pool, which is one allocation there. Each bin does so
//!   at the start, for the default stream. So bins from 256 KiB to 4 MiB take 992 MiB before the
//!   first request. They never give any of it back.
//! * A bin has a free list per stream, in the order of the frees. It takes a block of another
//!   stream by the rules of the pool: after that stream's event.
//! * If a bin has no free block, it takes 128 more from the pool, on the stream of the request. If
//!   the pool cannot give them, the request fails. Neither a larger bin nor the pool serves it.
//!
//! A bin of one size alone decides as `fixed_size_memory_resource` with this block size, which
//! refuses larger requests.
//!
//! Deliberate differences:
//!
//! * Those of [`super::rmm_pool`]. The bins take their first blocks at the first request.
//! * If the pool cannot give them, RMM's constructor fails. Here there are no bins then, and the
//!   pool serves all requests. [`Allocator::construction_failure`] says so.
//! * [`Allocator::empty_cache`] also releases regions that have only free blocks of bins. A bin
//!   that has none left takes 128 more at its next request.

use std::ops::RangeInclusive;

use super::blocks::CHUNK_UNIT;
use super::ids::BlockId;
use super::lists::FreeList;
use super::regions;
use super::rmm_pool::{RmmPool, RmmPoolConfig};
use super::{Allocation, Allocator, AllocatorError, Request, answered_by};
use crate::device::{Device, DeviceError, StreamId};
use crate::units::Bytes;

/// The blocks that a bin takes from the pool at once: `default_blocks_to_preallocate` of RMM.
const BLOCKS: u64 = 128;

/// The settings, with RMM's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RmmBinningConfig {
    pub pool: RmmPoolConfig,
    /// The smallest bin has blocks of two to this power. The default is 18, as in RMM's example.
    pub min_size_exponent: u32,
    /// The largest bin has blocks of two to this power. The default is 22, as in RMM's example.
    pub max_size_exponent: u32,
}

impl Default for RmmBinningConfig {
    fn default() -> Self {
        Self {
            pool: RmmPoolConfig::default(),
            min_size_exponent: 18,
            max_size_exponent: 22,
        }
    }
}

impl RmmBinningConfig {
    /// The possible exponents: blocks have at least 256 B, and the size of 128 has 64 bits.
    pub const EXPONENTS: RangeInclusive<u32> = 8..=56;

    /// The block sizes of the bins, in ascending order.
    fn blocks(&self) -> impl Iterator<Item = u64> + use<> {
        (self.min_size_exponent..=self.max_size_exponent).map(|exponent| 1 << exponent)
    }

    /// What the bins take at the start.
    fn at_start(&self) -> u64 {
        self.blocks().map(|block| block * BLOCKS).sum()
    }
}

#[derive(Debug, Default)]
pub struct RmmBinning {
    config: RmmBinningConfig,
    pool: RmmPool,
    started: bool,
    /// The block sizes of the bins, in ascending order. Empty before the start.
    bins: Vec<u64>,
}

impl RmmBinning {
    pub fn new(config: RmmBinningConfig) -> Self {
        Self {
            pool: RmmPool::new(config.pool.clone()),
            config,
            ..Self::default()
        }
    }

    /// Makes the pool and the first blocks of all bins, or no bins if they do not fit.
    fn start(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.pool.start(device)?;
        for (bin, block) in self.config.blocks().enumerate() {
            let request = Request::new(Bytes(block));
            match self.expand(device, request, bin, block) {
                Ok(_) => {
                    self.bins.push(block);
                    let list = FreeList::Bin(bin, StreamId::DEFAULT);
                    self.pool.open_list(device, list)?;
                }
                Err(error) => {
                    self.restart(device)?;
                    if let AllocatorError::Device(error) = error {
                        return Err(error);
                    }
                    self.pool.regions.counters.num_ooms -= 1;
                    break;
                }
            }
        }
        self.started = true;
        Ok(())
    }

    /// Releases everything before anything is live.
    fn restart(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.started = false;
        self.bins.clear();
        self.pool.restart(device)
    }

    /// Takes more blocks from the pool and returns the first of them.
    fn expand(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        bin: usize,
        block: u64,
    ) -> Result<BlockId, AllocatorError> {
        let size = block * BLOCKS;
        let chunk = self.pool.chunk(device, request, size)?;
        let list = FreeList::Bin(bin, request.stream);
        self.pool.regions.divide(chunk, size, block, list);
        Ok(chunk)
    }

    fn block(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        bin: usize,
        block: u64,
    ) -> Result<BlockId, AllocatorError> {
        let list = FreeList::Bin(bin, request.stream);
        if let Some(chunk) = self.pool.regions.fit(list, block) {
            return Ok(chunk);
        }
        self.pool.retry_frees(device)?;
        match self.pool.find_in_lists(device, list, block)? {
            Some(chunk) => Ok(chunk),
            None => self.expand(device, request, bin, block),
        }
    }

    fn allocate_started(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
    ) -> Result<Allocation, AllocatorError> {
        let bins = self.bins.iter().copied().enumerate();
        let (chunk, size) = match bins.into_iter().find(|&(_, block)| size <= block) {
            Some((bin, block)) => (self.block(device, request, bin, block)?, block),
            None => (self.pool.chunk(device, request, size)?, size),
        };
        Ok(self.pool.regions.hand_out(chunk, request, size))
    }
}

impl Allocator for RmmBinning {
    fn name(&self) -> &'static str {
        "rmm_binning"
    }

    fn releases_before_failure(&self) -> bool {
        self.pool.releases_before_failure()
    }

    /// Blocks of a bin never merge.
    fn merges_free_neighbours(&self) -> bool {
        false
    }

    /// With bins, a block of a bin is certain to fit, and the rest of the initial pool or of the
    /// device.
    fn largest_request(&self, device: &dyn Device, free: Bytes) -> Bytes {
        if self.started {
            return self.pool.largest_request(device, free);
        }
        let initial = self.pool.initial_size(free);
        let of_bins = self.config.at_start();
        let rest = match initial >= of_bins {
            true => (initial - of_bins).max(free.0 - initial),
            false => 0,
        };
        let largest = self.config.blocks().last().unwrap_or(0).max(rest);
        Bytes(largest.min(self.pool.largest_request(device, free).0))
    }

    fn allocate(
        &mut self,
        device: &mut dyn Device,
        request: Request,
    ) -> Result<Allocation, AllocatorError> {
        if request.size == Bytes::ZERO {
            return Ok(Allocation::null(request));
        }
        let size = regions::rounded(device, request, CHUNK_UNIT)?;
        if self.started {
            return self.allocate_started(device, request, size);
        }
        if self.pool.is_above_limit(size) {
            return Err(self.pool.out_of_memory(device, request, size));
        }
        self.start(device)?;
        let allocation = self.allocate_started(device, request, size);
        if allocation.is_err() {
            self.restart(device)?;
        }
        allocation
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        self.pool.free(device, allocation)
    }

    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        self.pool.release_stream(device, stream)
    }

    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.pool.empty_cache(device)
    }

    fn construction_failure(&self) -> Option<String> {
        (self.started && self.bins.is_empty()).then(|| {
            format!(
                "the bins need {} at the start, which the pool cannot give: RMM's constructor \
                 fails here, and the pool alone serves the requests instead",
                Bytes(self.config.at_start())
            )
        })
    }

    answered_by!(pool.regions);

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.pool.close(device)?;
        *self = Self::new(self.config.clone());
        Ok(())
    }
}
