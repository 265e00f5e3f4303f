//! Expandable segments: reserved addresses to which pages are mapped when needed and unmapped when
//! free.
//!
//! A segment is a chain of mapped and unmapped blocks. Each pool and stream has one that is a
//! little larger than the whole device. It gets another one only if no range of the first fits.

use super::{CachingAllocator, config::largest_reserve, merge_free, pools::StreamPool};
use crate::allocator::blocks::{Block, State};
use crate::allocator::ids::{BlockId, StreamPoolId};
use crate::device::{Device, DeviceError, DevicePtr, MappedDevice, MemoryRange};
use crate::{allocator::pending::if_exists, stats::PoolKind, units::Bytes};

impl CachingAllocator {
    /// Checks whether the device can map pages of the configured size.
    pub(super) fn check_pages(&self, device: &mut dyn Device) -> Result<(), DeviceError> {
        mapper(device)?;
        let (page, granularity) = (
            Bytes(self.config.page(PoolKind::Large)),
            device.info().granularity,
        );
        if page.0.is_multiple_of(granularity.0) {
            return Ok(());
        }
        Err(DeviceError::Unavailable {
            what: format!("expandable segments with pages of {page}"),
            why: format!(
                "this device maps memory in multiples of {granularity}; set large_segment_size_mb \
                 to such a multiple"
            ),
        })
    }

    /// Makes a free block of at least `size` from adjacent free and unmapped blocks. Returns `None`
    /// if the device has too little memory; pages mapped before that stay as free memory.
    pub(super) fn try_expand(
        &mut self,
        device: &mut dyn Device,
        stream_pool: StreamPoolId,
        size: u64,
    ) -> Result<Option<BlockId>, DeviceError> {
        let mut candidate = match self.find_stretch(stream_pool, size) {
            Some(block) => block,
            None => match self.reserve(device, stream_pool) {
                Ok(block)
                    if self.config.expandable_segments_reserve.is_some()
                        && self.blocks[block].size < size =>
                {
                    self.unreserve(device, block)?;
                    return Ok(None);
                }
                Ok(block) => block,
                Err(error) if error.is_out_of_memory() => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        if self.blocks[candidate].state == State::Unmapped {
            match self.map_block(device, candidate, size)? {
                Some(mapped) => candidate = mapped,
                None => return Ok(None),
            }
        }
        while self.blocks[candidate].size < size {
            // The block after a free one is unmapped here: adjacent free blocks are always merged.
            let Block {
                next,
                size: available,
                ..
            } = self.blocks[candidate];
            if next.is_none() {
                return Ok(None);
            }
            match self.map_block(device, next, size - available)? {
                Some(mapped) => candidate = mapped,
                None => return Ok(None),
            }
        }
        self.pools
            .free_mut(stream_pool)
            .remove(&mut self.blocks, candidate);
        Ok(Some(candidate))
    }

    /// Releases the whole pages inside a free block. The partial pages at its ends stay free.
    pub(super) fn release_pages(
        &mut self,
        device: &mut dyn Device,
        free: BlockId,
    ) -> Result<(), DeviceError> {
        let Block {
            stream_pool,
            kind,
            address,
            size,
            ..
        } = self.blocks[free];
        let page = self.config.page(kind);
        let start = self.blocks.reservation(free).start.0;
        let begin = start + (address - start).next_multiple_of(page);
        let end = start + (address + size - start) / page * page;
        if begin >= end {
            return Ok(());
        }
        // Unlike a device free, an unmap does not wait. A destroyed stream has no work left.
        if_exists(device.synchronize_stream(self.pools.owner(stream_pool).stream))?;
        mapper(device)?.unmap(MemoryRange::new(DevicePtr(begin), Bytes(end - begin)))?;
        self.pools
            .free_mut(stream_pool)
            .remove(&mut self.blocks, free);
        let mut pages = free;
        if begin > address {
            pages = self.blocks.split(free, begin - address);
            self.blocks[free].requested = 0;
            self.put_into_pool(stream_pool, free);
        }
        if end < address + size {
            let after = self.blocks.split_off(pages, end - begin);
            self.blocks[after].requested = 0;
            self.put_into_pool(stream_pool, after);
        }
        self.blocks[pages].state = State::Unmapped;
        let unmapped = self.join_unmapped(pages);
        self.counters.reserved_bytes.decrease(kind, end - begin);
        self.counters.num_device_free += 1;
        if !self.blocks[unmapped].is_split() {
            self.unreserve(device, unmapped)?;
        }
        Ok(())
    }

    /// Releases a whole segment with all its contents.
    pub(super) fn close_reservation(
        &mut self,
        device: &mut dyn Device,
        first: BlockId,
    ) -> Result<(), DeviceError> {
        let reservation = self.blocks.reservation(first);
        let mapper = mapper(device)?;
        for stretch in self.blocks.mapped_stretches(first) {
            mapper.unmap(stretch)?;
            // Recorded now: if the device fails below, a later `close` continues here.
            self.blocks.note_unmapped(first, stretch);
        }
        mapper.unreserve(reservation.start)
    }

    /// The first place in address order where adjacent free and unmapped blocks add up to the size.
    fn find_stretch(&self, stream_pool: StreamPoolId, size: u64) -> Option<BlockId> {
        let StreamPool { pool, stream, .. } = self.pools.owner(stream_pool);
        let of_stream = (stream, 0, BlockId(0))..=(stream, u64::MAX, BlockId(u32::MAX));
        let usable = |&id: &BlockId| matches!(self.blocks[id].state, State::Free | State::Unmapped);
        self.pools[pool]
            .unmapped
            .range(of_stream)
            .find_map(|&(_, _, unmapped)| {
                let start = Some(self.blocks[unmapped].previous)
                    .filter(usable)
                    .unwrap_or(unmapped);
                let mut bytes = 0;
                for id in self.blocks.chain(start).take_while(usable) {
                    bytes += self.blocks[id].size;
                    if bytes >= size {
                        return Some(start);
                    }
                }
                None
            })
    }

    /// The memory that [`Self::try_expand`] would have to map for a block of this size: in bytes,
    /// and in bytes of whole pages.
    pub(super) fn missing_pages(&self, stream_pool: StreamPoolId, size: u64) -> (u64, u64) {
        let page = self
            .config
            .page(self.pools[self.pools.owner(stream_pool).pool].kind);
        let Some(start) = self.find_stretch(stream_pool, size) else {
            return (size, whole_pages(size, page));
        };
        let (mut wanted, mut missing, mut pages) = (size, 0, 0);
        for id in self.blocks.chain(start) {
            let Block {
                state,
                size: available,
                ..
            } = self.blocks[id];
            let used = wanted.min(available);
            if state == State::Unmapped {
                missing += used;
                pages += whole_pages(used, page);
            }
            wanted -= used;
            if wanted == 0 {
                break;
            }
        }
        (missing, pages)
    }

    fn reserve(
        &mut self,
        device: &mut dyn Device,
        stream_pool: StreamPoolId,
    ) -> Result<BlockId, DeviceError> {
        self.check_pages(device)?;
        let StreamPool { pool, stream, .. } = self.pools.owner(stream_pool);
        let kind = self.pools[pool].kind;
        let total = device.info().total;
        let reserve = self
            .config
            .expandable_segments_reserve
            .map_or_else(|| largest_reserve(total), |reserve| reserve.of(total));
        let size = Bytes(whole_pages(reserve.0, self.config.page(kind)));
        let start = mapper(device)?.reserve(size)?;
        let block = self
            .blocks
            .add_segment(MemoryRange::new(start, size), stream_pool, kind, true);
        self.pools[pool].unmapped.insert((stream, start.0, block));
        self.pools.segment_added(stream_pool);
        Ok(block)
    }

    fn unreserve(&mut self, device: &mut dyn Device, whole: BlockId) -> Result<(), DeviceError> {
        let Block {
            stream_pool,
            address,
            ..
        } = self.blocks[whole];
        mapper(device)?.unreserve(DevicePtr(address))?;
        self.forget_unmapped(whole);
        self.blocks.remove_segment(whole);
        self.pools.segment_removed(stream_pool);
        Ok(())
    }

    /// Maps pages at the start of an unmapped block, for `size` bytes or the whole block, and
    /// merges them with adjacent free memory. Returns the merged block, or nothing if the device
    /// has too little memory. In that case nothing has changed.
    fn map_block(
        &mut self,
        device: &mut dyn Device,
        id: BlockId,
        size: u64,
    ) -> Result<Option<BlockId>, DeviceError> {
        let Block {
            stream_pool,
            kind,
            address,
            size: available,
            ..
        } = self.blocks[id];
        let page = self.config.page(kind);
        let length = size.min(available).next_multiple_of(page);
        match mapper(device)?.map(
            MemoryRange::new(DevicePtr(address), Bytes(length)),
            Bytes(page),
        ) {
            Ok(()) => {}
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        }
        self.forget_unmapped(id);
        if length < available {
            let rest = self.blocks.split_off(id, length);
            self.blocks[rest].requested = 0;
            self.remember_unmapped(rest);
        }
        let free = merge_free(&mut self.blocks, self.pools.free_mut(stream_pool), id).block;
        self.put_into_pool(stream_pool, free);
        self.counters.reserved_bytes.increase(kind, length);
        self.counters.num_device_alloc += 1;
        Ok(Some(free))
    }

    fn join_unmapped(&mut self, id: BlockId) -> BlockId {
        let mut joined = id;
        let Block { previous, next, .. } = self.blocks[id];
        if self.blocks[next].state == State::Unmapped {
            self.forget_unmapped(next);
            self.blocks.absorb_next(id);
        }
        if self.blocks[previous].state == State::Unmapped {
            self.forget_unmapped(previous);
            joined = self.blocks.absorb_into_previous(id);
        }
        self.remember_unmapped(joined);
        joined
    }

    pub(super) fn remember_unmapped(&mut self, id: BlockId) {
        let Block {
            stream_pool,
            address,
            ..
        } = self.blocks[id];
        let StreamPool { pool, stream, .. } = self.pools.owner(stream_pool);
        self.pools[pool].unmapped.insert((stream, address, id));
    }

    pub(super) fn forget_unmapped(&mut self, id: BlockId) {
        let Block {
            stream_pool,
            address,
            ..
        } = self.blocks[id];
        let StreamPool { pool, stream, .. } = self.pools.owner(stream_pool);
        self.pools[pool].unmapped.remove(&(stream, address, id));
    }
}

/// The whole pages for `size`, in bytes, limited to 64 bits.
fn whole_pages(size: u64, page: u64) -> u64 {
    size.checked_next_multiple_of(page)
        .unwrap_or(u64::MAX / page * page)
}

fn mapper(device: &mut dyn Device) -> Result<&mut dyn MappedDevice, DeviceError> {
    let unavailable = DeviceError::Unavailable {
        what: "expandable segments".to_owned(),
        why: "this device cannot map memory to reserved addresses; use the allocator without \
             expandable_segments"
            .to_owned(),
    };
    device.mapped().ok_or(unavailable)
}
