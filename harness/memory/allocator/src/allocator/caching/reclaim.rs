//! Returning cached memory to the driver: at an out of memory, by request, and by age.

use super::pools::{PoolId, Pools};
use super::{CachingAllocator, torch::unsupported};
use crate::allocator::PrivatePoolId;
use crate::allocator::ids::{BlockId, StreamPoolId};
use crate::device::{Device, DeviceError, DevicePtr};

impl CachingAllocator {
    /// Releases everything possible: whole free segments of the default pools after a wait for all
    /// events, and those of released private pools. Leaves the default pools alone while a pool
    /// context is open.
    pub(super) fn release_all_cached(
        &mut self,
        device: &mut dyn Device,
    ) -> Result<(), DeviceError> {
        if !self.pools.is_capturing() {
            self.counters.num_sync_all_streams += 1;
            self.finish_pending(device, None)?;
            self.release_whole_segments(device, Pools::LARGE)?;
            self.release_whole_segments(device, Pools::SMALL)?;
        }
        for (_, pools) in self.pools.released() {
            for pool in pools {
                self.release_whole_segments(device, pool)?;
            }
        }
        self.pools.forget_empty();
        self.released_streams.forget_empty(&mut self.pools);
        Ok(())
    }

    /// The same for one private pool that its owner has just released.
    pub(super) fn release_private(
        &mut self,
        device: &mut dyn Device,
        id: PrivatePoolId,
    ) -> Result<(), DeviceError> {
        self.counters.num_sync_all_streams += 1;
        self.finish_pending(device, Some(id))?;
        let pools = self
            .pools
            .released()
            .into_iter()
            .find(|&(released, _)| released == id)
            .map(|(_, pools)| pools);
        for pool in pools.into_iter().flatten() {
            self.release_whole_segments(device, pool)?;
        }
        self.pools.forget_empty();
        Ok(())
    }

    /// If a maximum split size is set: releases one large enough free block of the request's pool
    /// and stream, or else the largest oversize blocks until they add up to the size. Returns
    /// whether that was enough. Released blocks stay released.
    pub(super) fn release_available(
        &mut self,
        device: &mut dyn Device,
        stream_pool: StreamPoolId,
        size: u64,
    ) -> Result<bool, DeviceError> {
        let Some(max_split) = self.config.max_split_size else {
            return Ok(false);
        };
        let wanted = size.max(max_split.0);
        // Oversize blocks are whole segments, except in a restored state that was made with other
        // settings.
        let tries_expandable = self.config.torch.asserts_on_release_of_expandable();
        let ordinary = |&free: &BlockId| match self.blocks[free].expandable {
            true => tries_expandable,
            false => !self.blocks[free].is_split(),
        };
        if let Some(free) = self
            .pools
            .free(stream_pool)
            .best_fit(&self.blocks, wanted)
            .filter(ordinary)
        {
            self.release_segment(device, free)?;
            return Ok(true);
        }
        let mut sum = 0_u64;
        let oversize = |&free: &BlockId| self.blocks[free].size >= max_split.0;
        let free = self.pools.free(stream_pool).in_order(&self.blocks);
        let candidates: Vec<BlockId> = free
            .into_iter()
            .rev()
            .take_while(oversize)
            .filter(ordinary)
            .collect();
        for free in candidates {
            if sum >= wanted {
                break;
            }
            sum += self.blocks[free].size;
            self.release_segment(device, free)?;
        }
        Ok(sum >= wanted)
    }

    /// If a threshold and a limit are set: releases the older half of the cached large segments,
    /// round by round, until the reserved memory is below the threshold. A round is completed even
    /// if it reaches the target earlier.
    pub(super) fn collect_garbage(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        let Some(threshold) = self.config.garbage_collection_threshold else {
            return Ok(());
        };
        let Some(limit) = self.limit(device) else {
            return Ok(());
        };
        let allowed = (threshold * limit.0 as f64) as u64;
        let target = self
            .counters
            .reserved_bytes
            .current()
            .saturating_sub(allowed);
        let mut released = 0;
        while released < target {
            let lookups = self.pools[Pools::LARGE].lookups;
            let whole = |&free: &BlockId| !self.blocks[free].is_split();
            let candidates: Vec<BlockId> = self
                .pools
                .free_blocks(&self.blocks, Pools::LARGE)
                .into_iter()
                .filter(whole)
                .collect();
            let age = |free: BlockId| lookups - self.blocks.free_since(free);
            let total_age: u64 = candidates.iter().map(|&free| age(free)).sum();
            let old =
                |free: BlockId| age(free) as f64 >= total_age as f64 / candidates.len() as f64;
            let ordinary = |free: BlockId| {
                self.config.torch.asserts_on_release_of_expandable()
                    || !self.blocks[free].expandable
            };
            let round: Vec<BlockId> = candidates
                .iter()
                .copied()
                .filter(|&free| ordinary(free) && old(free))
                .collect();
            if round.is_empty() {
                break;
            }
            for free in round {
                released += self.blocks[free].size;
                self.release_segment(device, free)?;
            }
        }
        Ok(())
    }

    fn release_segment(
        &mut self,
        device: &mut dyn Device,
        whole: BlockId,
    ) -> Result<(), DeviceError> {
        let block = self.blocks[whole];
        if block.expandable {
            return Err(unsupported(
                self.config.torch,
                "releasing a block of an expandable segment as a whole",
                "fails in an assertion",
            ));
        }
        device.free(DevicePtr(block.address))?;
        self.pools
            .free_mut(block.stream_pool)
            .remove(&mut self.blocks, whole);
        self.pools.segment_removed(block.stream_pool);
        self.blocks.remove_segment(whole);
        self.counters
            .reserved_bytes
            .decrease(block.kind, block.size);
        self.counters.segments.decrease(block.kind, 1);
        self.counters.num_device_free += 1;
        Ok(())
    }

    /// Releases whole free segments, and whole free pages of expandable ones.
    fn release_whole_segments(
        &mut self,
        device: &mut dyn Device,
        pool: PoolId,
    ) -> Result<(), DeviceError> {
        self.release_whole(device, self.pools.free_blocks(&self.blocks, pool))
    }

    /// Releases blocks that span whole segments, and whole pages of expandable segments.
    pub(super) fn release_whole(
        &mut self,
        device: &mut dyn Device,
        free: Vec<BlockId>,
    ) -> Result<(), DeviceError> {
        let (expandable, ordinary): (Vec<BlockId>, Vec<BlockId>) = free
            .into_iter()
            .partition(|&free| self.blocks[free].expandable);
        let whole: Vec<BlockId> = ordinary
            .into_iter()
            .filter(|&free| !self.blocks[free].is_split())
            .collect();
        whole
            .into_iter()
            .try_for_each(|free| self.release_segment(device, free))?;
        expandable
            .into_iter()
            .try_for_each(|free| self.release_pages(device, free))
    }

    /// Waits for the events of pending frees and finishes those frees: all, or those of one private
    /// pool.
    fn finish_pending(
        &mut self,
        device: &mut dyn Device,
        owner: Option<PrivatePoolId>,
    ) -> Result<(), DeviceError> {
        let (blocks, pools) = (&self.blocks, &self.pools);
        let wanted = |block: BlockId| {
            owner.is_none() || pools[pools.owner(blocks[block].stream_pool).pool].owner == owner
        };
        let (done, waited) = self.pending.wait_for(device, wanted);
        done.into_iter().for_each(|block| self.finish_wait(block));
        waited
    }
}
