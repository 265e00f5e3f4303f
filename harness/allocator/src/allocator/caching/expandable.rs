//! Expandable segments: reserved addresses, behind which pages of memory are mapped as they are needed and unmapped when they are free.
//!
//! A segment is a chain of mapped and unmapped blocks. There is one for each pool and stream, a little larger than the whole device, and
//! further ones only when no stretch of the first fits.

use super::CachingAllocator;
use super::blocks::Block;
use super::free_index::Free;
use super::ids::{BlockId, LaneId};
use super::pools::LaneOwner;
use crate::device::{Device, DeviceError, DevicePtr, MappedDevice, MemoryRange};
use crate::stats::BlockState;
use crate::units::Bytes;

impl CachingAllocator {
    /// A free block of at least `size`, made of free and unmapped blocks that lie side by side, taken out of its pool; `None` where the
    /// device has not enough memory. What was mapped on the way stays, as free memory.
    pub(super) fn try_expand(&mut self, device: &mut dyn Device, lane: LaneId, size: u64) -> Result<Option<BlockId>, DeviceError> {
        let mut candidate = match self.find_stretch(lane, size) {
            Some(block) => block,
            None => self.reserve(device, lane)?,
        };
        if !self.blocks[candidate].mapped && !self.map_block(device, candidate, size)? {
            return Ok(None);
        }
        while self.blocks[candidate].size < size {
            // A free block is followed by an unmapped one here: otherwise the two would be one.
            let Some(next) = self.blocks[candidate].next.get() else { return Ok(None) };
            let missing = size - self.blocks[candidate].size;
            if !self.map_block(device, next, missing)? {
                return Ok(None);
            }
            candidate = next;
        }
        self.pools.free.remove(lane, candidate);
        Ok(Some(candidate))
    }

    /// Gives back the whole pages inside a free block; its ragged ends stay free.
    pub(super) fn release_pages(&mut self, device: &mut dyn Device, free: Free) -> Result<(), DeviceError> {
        let Block { lane, kind, .. } = self.blocks[free.id];
        let page = self.config.page(kind);
        let start = self.blocks.reservation(free.id).start.0;
        let begin = start + (free.address - start).next_multiple_of(page);
        let end = start + (free.address + free.size - start) / page * page;
        if begin >= end {
            return Ok(());
        }
        // Unlike a device free, unmapping waits for nothing.
        device.synchronize_stream(self.pools.owner(lane).stream)?;
        mapper(device)?.unmap(MemoryRange::new(DevicePtr(begin), Bytes(end - begin)))?;
        self.pools.free.remove(lane, free.id);
        if begin > free.address {
            let before = self.blocks.split_front(free.id, begin - free.address);
            self.put_into_pool(before);
        }
        if end < free.address + free.size {
            let after = self.blocks.split_back(free.id, end - begin);
            self.put_into_pool(after);
        }
        self.blocks[free.id].mapped = false;
        self.join_unmapped(free.id);
        self.counters.reserved_bytes.decrease(kind, end - begin);
        self.counters.num_device_free += 1;
        if !self.blocks[free.id].is_split() {
            self.unreserve(device, free.id)?;
        }
        Ok(())
    }

    /// Gives a whole segment back, whatever lies in it.
    pub(super) fn close_reservation(&mut self, device: &mut dyn Device, first: BlockId) -> Result<(), DeviceError> {
        let reservation = self.blocks.reservation(first);
        let mapper = mapper(device)?;
        for stretch in self.blocks.mapped_stretches(first) {
            mapper.unmap(stretch)?;
        }
        mapper.unreserve(reservation.start)
    }

    /// The first place in address order where free and unmapped blocks add up to the wanted size.
    fn find_stretch(&self, lane: LaneId, size: u64) -> Option<BlockId> {
        let LaneOwner { pool, stream } = self.pools.owner(lane);
        let of_stream = (stream, 0, BlockId(0))..=(stream, u64::MAX, BlockId(u32::MAX));
        let usable = |id: &BlockId| self.blocks[*id].state == BlockState::Inactive;
        self.pools[pool].unmapped.range(of_stream).find_map(|&(_, _, unmapped)| {
            let start = self.blocks[unmapped].previous.get().filter(usable).unwrap_or(unmapped);
            let mut bytes = 0;
            for id in std::iter::successors(Some(start), |&id| self.blocks[id].next.get()).take_while(usable) {
                bytes += self.blocks[id].size;
                if bytes >= size {
                    return Some(start);
                }
            }
            None
        })
    }

    /// Reserves addresses for a pool and stream: an eighth more than the device has, so that what was unmapped early in the segment can be
    /// mapped again at its end.
    fn reserve(&mut self, device: &mut dyn Device, lane: LaneId) -> Result<BlockId, DeviceError> {
        let LaneOwner { pool, stream } = self.pools.owner(lane);
        let kind = self.pools[pool].kind;
        let total = device.info().total.0;
        let size = Bytes((total + total / 8).next_multiple_of(self.config.page(kind)));
        let start = mapper(device)?.reserve(size)?;
        let block = self.blocks.add_segment(MemoryRange::new(start, size), lane, kind, true);
        self.pools[pool].unmapped.insert((stream, start.0, block));
        self.pools.segment_added(pool);
        Ok(block)
    }

    fn unreserve(&mut self, device: &mut dyn Device, whole: BlockId) -> Result<(), DeviceError> {
        let Block { lane, address, .. } = self.blocks[whole];
        mapper(device)?.unreserve(DevicePtr(address))?;
        self.forget_unmapped(whole);
        self.blocks.remove_segment(whole);
        self.pools.segment_removed(self.pools.owner(lane).pool);
        Ok(())
    }

    /// Maps pages to the front of an unmapped block, enough for `size` or all of it, and makes them free memory. Says whether there were
    /// enough; if not, nothing has changed.
    fn map_block(&mut self, device: &mut dyn Device, id: BlockId, size: u64) -> Result<bool, DeviceError> {
        let Block { lane, kind, address, size: available, .. } = self.blocks[id];
        let page = self.config.page(kind);
        let length = size.min(available).next_multiple_of(page);
        match mapper(device)?.map(MemoryRange::new(DevicePtr(address), Bytes(length)), Bytes(page)) {
            Ok(()) => {}
            Err(error) if error.is_out_of_memory() => return Ok(false),
            Err(error) => return Err(error),
        }
        self.forget_unmapped(id);
        if length < available {
            let rest = self.blocks.split_back(id, length);
            self.remember_unmapped(rest);
        }
        self.blocks[id].mapped = true;
        let (previous, next) = self.blocks.mergeable(id);
        if let Some(previous) = previous {
            self.pools.free.remove(lane, previous);
            self.blocks.absorb_previous(id, previous);
        }
        if let Some(next) = next {
            self.pools.free.remove(lane, next);
            self.blocks.absorb_next(id, next);
        }
        self.put_into_pool(id);
        self.counters.reserved_bytes.increase(kind, length);
        self.counters.num_device_alloc += 1;
        Ok(true)
    }

    /// Joins an unmapped block with its unmapped neighbours.
    fn join_unmapped(&mut self, id: BlockId) {
        let (previous, next) = self.blocks.mergeable(id);
        if let Some(previous) = previous {
            self.forget_unmapped(previous);
            self.blocks.absorb_previous(id, previous);
        }
        if let Some(next) = next {
            self.forget_unmapped(next);
            self.blocks.absorb_next(id, next);
        }
        self.remember_unmapped(id);
    }

    fn remember_unmapped(&mut self, id: BlockId) {
        let Block { lane, address, .. } = self.blocks[id];
        let LaneOwner { pool, stream } = self.pools.owner(lane);
        self.pools[pool].unmapped.insert((stream, address, id));
    }

    fn forget_unmapped(&mut self, id: BlockId) {
        let Block { lane, address, .. } = self.blocks[id];
        let LaneOwner { pool, stream } = self.pools.owner(lane);
        self.pools[pool].unmapped.remove(&(stream, address, id));
    }
}

fn mapper(device: &mut dyn Device) -> Result<&mut dyn MappedDevice, DeviceError> {
    let unavailable = DeviceError::Unavailable {
        what: "expandable segments".to_owned(),
        why: "this device cannot map memory to reserved addresses; use the allocator without expandable_segments".to_owned(),
    };
    device.mapped().ok_or(unavailable)
}
