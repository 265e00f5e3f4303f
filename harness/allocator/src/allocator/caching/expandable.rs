//! Expandable segments: reserved addresses, behind which pages of memory are mapped as they are needed and unmapped when they are free.
//!
//! A segment is a chain of mapped and unmapped blocks. There is one for each pool and stream, a little larger than the whole device, and
//! further ones only when no stretch of the first fits.

use super::blocks::{Block, State};
use super::ids::{BlockId, LaneId};
use super::pools::LaneOwner;
use super::{CachingAllocator, merge_free};
use crate::allocator::pending::if_exists;
use crate::device::{Device, DeviceError, DevicePtr, MappedDevice, MemoryRange};
use crate::stats::PoolKind;
use crate::units::Bytes;

impl CachingAllocator {
    /// Whether the device can map pages of the size that the settings want.
    pub(super) fn check_pages(&self, device: &mut dyn Device) -> Result<(), DeviceError> {
        mapper(device)?;
        let (page, granularity) = (Bytes(self.config.page(PoolKind::Large)), device.info().granularity);
        if page.0.is_multiple_of(granularity.0) {
            return Ok(());
        }
        Err(DeviceError::Unavailable {
            what: format!("expandable segments with pages of {page}"),
            why: format!("this device maps memory in multiples of {granularity}; set large_segment_size_mb to one of them"),
        })
    }

    /// A free block of at least `size`, made of free and unmapped blocks that lie side by side, taken out of its pool; `None` where the
    /// device has not enough memory. What was mapped on the way stays, as free memory.
    pub(super) fn try_expand(&mut self, device: &mut dyn Device, lane: LaneId, size: u64) -> Result<Option<BlockId>, DeviceError> {
        let mut candidate = match self.find_stretch(lane, size) {
            Some(block) => block,
            None => match self.reserve(device, lane) {
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
            // A free block is followed by an unmapped one here: otherwise the two would be one.
            let Block { next, size: available, .. } = self.blocks[candidate];
            if next.is_none() {
                return Ok(None);
            }
            match self.map_block(device, next, size - available)? {
                Some(mapped) => candidate = mapped,
                None => return Ok(None),
            }
        }
        self.pools.free_mut(lane).remove(&mut self.blocks, candidate);
        Ok(Some(candidate))
    }

    /// Gives back the whole pages inside a free block; its ragged ends stay free.
    pub(super) fn release_pages(&mut self, device: &mut dyn Device, free: BlockId) -> Result<(), DeviceError> {
        let Block { lane, kind, address, size, .. } = self.blocks[free];
        let page = self.config.page(kind);
        let start = self.blocks.reservation(free).start.0;
        let begin = start + (address - start).next_multiple_of(page);
        let end = start + (address + size - start) / page * page;
        if begin >= end {
            return Ok(());
        }
        // Unlike a device free, unmapping waits for nothing. A stream that was destroyed has no work left.
        if_exists(device.synchronize_stream(self.pools.owner(lane).stream))?;
        mapper(device)?.unmap(MemoryRange::new(DevicePtr(begin), Bytes(end - begin)))?;
        self.pools.free_mut(lane).remove(&mut self.blocks, free);
        let mut pages = free;
        if begin > address {
            pages = self.blocks.split(free, begin - address);
            self.blocks[free].requested = 0;
            self.put_into_pool(lane, free);
        }
        if end < address + size {
            let after = self.blocks.split(pages, end - begin);
            self.blocks[after].requested = 0;
            self.put_into_pool(lane, after);
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

    /// Gives a whole segment back, whatever lies in it.
    pub(super) fn close_reservation(&mut self, device: &mut dyn Device, first: BlockId) -> Result<(), DeviceError> {
        let reservation = self.blocks.reservation(first);
        let mapper = mapper(device)?;
        for stretch in self.blocks.mapped_stretches(first) {
            mapper.unmap(stretch)?;
            // Noted at once: where the device fails further on, closing goes on from here.
            self.blocks.note_unmapped(first, stretch);
        }
        mapper.unreserve(reservation.start)
    }

    /// The first place in address order where free and unmapped blocks add up to the wanted size.
    fn find_stretch(&self, lane: LaneId, size: u64) -> Option<BlockId> {
        let LaneOwner { pool, stream, .. } = self.pools.owner(lane);
        let of_stream = (stream, 0, BlockId(0))..=(stream, u64::MAX, BlockId(u32::MAX));
        let usable = |&id: &BlockId| matches!(self.blocks[id].state, State::Free | State::Unmapped);
        self.pools[pool].unmapped.range(of_stream).find_map(|&(_, _, unmapped)| {
            let start = Some(self.blocks[unmapped].previous).filter(usable).unwrap_or(unmapped);
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

    /// What is missing before a block of that size is there, where [`Self::try_expand`] would put it: in bytes, and in bytes of pages.
    pub(super) fn missing_pages(&self, lane: LaneId, size: u64) -> (u64, u64) {
        let page = self.config.page(self.pools[self.pools.owner(lane).pool].kind);
        let Some(start) = self.find_stretch(lane, size) else { return (size, whole_pages(size, page)) };
        let (mut wanted, mut missing, mut pages) = (size, 0, 0);
        for id in self.blocks.chain(start) {
            let Block { state, size: available, .. } = self.blocks[id];
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

    /// Reserves addresses for a pool and stream: an eighth more than the device has, so that what was unmapped early in the segment can be
    /// mapped again at its end.
    fn reserve(&mut self, device: &mut dyn Device, lane: LaneId) -> Result<BlockId, DeviceError> {
        self.check_pages(device)?;
        let LaneOwner { pool, stream, .. } = self.pools.owner(lane);
        let kind = self.pools[pool].kind;
        let total = device.info().total.0;
        let size = Bytes(whole_pages(total.saturating_add(total / 8), self.config.page(kind)));
        let start = mapper(device)?.reserve(size)?;
        let block = self.blocks.add_segment(MemoryRange::new(start, size), lane, kind, true);
        self.pools[pool].unmapped.insert((stream, start.0, block));
        self.pools.segment_added(lane);
        Ok(block)
    }

    fn unreserve(&mut self, device: &mut dyn Device, whole: BlockId) -> Result<(), DeviceError> {
        let Block { lane, address, .. } = self.blocks[whole];
        mapper(device)?.unreserve(DevicePtr(address))?;
        self.forget_unmapped(whole);
        self.blocks.remove_segment(whole);
        self.pools.segment_removed(lane);
        Ok(())
    }

    /// Maps pages to the front of an unmapped block, enough for `size` or all of it, and makes them free memory, in one block with what is
    /// free beside it. Returns that block, or nothing where the device has not enough memory: then nothing has changed.
    fn map_block(&mut self, device: &mut dyn Device, id: BlockId, size: u64) -> Result<Option<BlockId>, DeviceError> {
        let Block { lane, kind, address, size: available, .. } = self.blocks[id];
        let page = self.config.page(kind);
        let length = size.min(available).next_multiple_of(page);
        match mapper(device)?.map(MemoryRange::new(DevicePtr(address), Bytes(length)), Bytes(page)) {
            Ok(()) => {}
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        }
        self.forget_unmapped(id);
        if length < available {
            let rest = self.blocks.split(id, length);
            self.blocks[rest].requested = 0;
            self.remember_unmapped(rest);
        }
        let free = merge_free(&mut self.blocks, self.pools.free_mut(lane), id).block;
        self.put_into_pool(lane, free);
        self.counters.reserved_bytes.increase(kind, length);
        self.counters.num_device_alloc += 1;
        Ok(Some(free))
    }

    /// Joins an unmapped block with its unmapped neighbours.
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
        let Block { lane, address, .. } = self.blocks[id];
        let LaneOwner { pool, stream, .. } = self.pools.owner(lane);
        self.pools[pool].unmapped.insert((stream, address, id));
    }

    pub(super) fn forget_unmapped(&mut self, id: BlockId) {
        let Block { lane, address, .. } = self.blocks[id];
        let LaneOwner { pool, stream, .. } = self.pools.owner(lane);
        self.pools[pool].unmapped.remove(&(stream, address, id));
    }
}

/// Bytes of whole pages for `size`: at most all whole pages that 64 bits hold, more than any device has.
fn whole_pages(size: u64, page: u64) -> u64 {
    size.checked_next_multiple_of(page).unwrap_or(u64::MAX / page * page)
}

fn mapper(device: &mut dyn Device) -> Result<&mut dyn MappedDevice, DeviceError> {
    let unavailable = DeviceError::Unavailable {
        what: "expandable segments".to_owned(),
        why: "this device cannot map memory to reserved addresses; use the allocator without expandable_segments".to_owned(),
    };
    device.mapped().ok_or(unavailable)
}
