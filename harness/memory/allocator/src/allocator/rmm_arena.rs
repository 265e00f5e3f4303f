//! RMM's arena: one region of fixed size, cut into superblocks, which the arenas of the streams
//! take for their small requests.
//!
//! It models `rmm::mr::arena_memory_resource` on top of `cuda_memory_resource`
//! (<https://github.com/rapidsai/rmm>). Its decisions and waits equal those recorded from RMM
//! 26.10.
//!
//! * One region serves everything and never grows. By default it is half of the free memory.
//! * Sizes are multiples of 256 B. Every search takes the lowest address that fits (first fit), and
//!   cuts exactly.
//! * A request of more than 1 MiB gets a superblock from the global arena. A smaller one gets a
//!   block of a superblock that its stream's arena has. If none fits, the arena takes one more from
//!   the global arena: the lowest that has a large enough block, even if a large request uses the
//!   rest.
//! * A superblock is at least 1 MiB. A free one is cut to that or to a larger request, if at least
//!   1 MiB remains. Blocks merge within their superblock only, and only free superblocks of the
//!   global arena merge.
//! * A superblock with only free blocks stays in its stream's arena. If a request fails, the host
//!   waits for the device, and all arenas give all their superblocks back, also those in use. Then
//!   the request is tried again.
//! * A free of more than 1 MiB makes the host wait for the stream. So does a free of a smaller
//!   block whose superblock is no longer in the stream's arena. A large block waits twice if its
//!   superblock is in the arena of another stream.
//!
//! The default stream has an arena like any other. Only `cudaStreamPerThread` has one per thread,
//! and this model has one thread.
//!
//! Deliberate differences:
//!
//! * The region is allocated at the first request that it can hold, because each call passes the
//!   device in. [`Allocator::empty_cache`] releases it if nothing is live. RMM allocates it at its
//!   construction and keeps it until it is destroyed.
//! * RMM refuses a region of less than 1 MiB at its construction. Here requests fail.
//! * The memory fraction limits the region too.
//! * [`Allocator::record_stream`]: as in [`super::rmm_pool`].
//! * RMM keeps the superblocks of destroyed streams until a request fails. Here the global arena
//!   gets them.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::blocks::{Block, CHUNK_UNIT};
use super::ids::BlockId;
use super::lists::FreeList;
use super::pending::{Events, if_exists};
use super::regions::{self, Regions};
use super::{Allocation, Allocator, AllocatorError, OomCause, Request, answered_by};
use crate::device::{Device, DeviceError, StreamId};
use crate::units::Bytes;

/// The least size of a superblock, and the largest request that an arena of a stream serves.
const SUPERBLOCK: u64 = 1 << 20;

/// The setting, with RMM's name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RmmArenaConfig {
    /// The size of the region. The default is half of the free memory.
    // With this function, a recording without the field is an error.
    #[serde(deserialize_with = "Option::deserialize")]
    pub arena_size: Option<Bytes>,
}

#[derive(Clone, Copy, Debug)]
struct Superblock {
    size: u64,
    /// The stream whose arena has it. The global arena has the others.
    owner: Option<StreamId>,
    /// At least the size of its largest free block. A search that finds none lowers it.
    room: u64,
}

#[derive(Debug, Default)]
pub struct RmmArena {
    config: RmmArenaConfig,
    /// One region, or none before the first request.
    regions: Regions,
    /// By address.
    superblocks: BTreeMap<u64, Superblock>,
    /// Freed chunks, with the streams that use them, whose free the device failed to finish.
    unfinished: Vec<(BlockId, BTreeSet<StreamId>)>,
    events: Events,
}

impl RmmArena {
    pub fn new(config: RmmArenaConfig) -> Self {
        Self {
            config,
            ..Self::default()
        }
    }

    /// The size of the region without the memory fraction, on a device with this much free memory.
    fn own_size(&self, free: Bytes) -> u64 {
        let wanted = self.config.arena_size.map_or(free.0 / 2, |size| size.0);
        wanted / CHUNK_UNIT.0 * CHUNK_UNIT.0
    }

    /// The size of the region on a device with this much free memory.
    fn size(&self, free: Bytes) -> u64 {
        let limit = self.regions.limit.map_or(u64::MAX, |limit| limit.0);
        self.own_size(free).min(limit / CHUNK_UNIT.0 * CHUNK_UNIT.0)
    }

    /// Allocates the region as one superblock. Returns false if the request or a superblock exceeds
    /// it, or if the driver refuses.
    fn start(&mut self, device: &mut dyn Device, least: u64) -> Result<bool, DeviceError> {
        let size = self.size(device.free_memory()?);
        if size < least.max(SUPERBLOCK) {
            return Ok(false);
        }
        let Some(chunk) = self.regions.add(device, size, StreamId::DEFAULT)? else {
            return Ok(false);
        };
        let address = self.regions[chunk].address;
        let list = FreeList::Superblock(address, None);
        self.regions.take_over(StreamId::DEFAULT, list, u64::MAX);
        self.put(address, size);
        Ok(true)
    }

    /// Returns the first free block by address that fits, of an owner, and its superblock.
    fn first_fit(&mut self, owner: Option<StreamId>, size: u64) -> Option<(u64, BlockId)> {
        let fitting = (self.superblocks.iter_mut())
            .filter(|(_, superblock)| superblock.owner == owner && superblock.room >= size);
        for (&address, superblock) in fitting {
            let list = FreeList::Superblock(address, owner);
            if let Some(chunk) = self.regions.fit(list, size) {
                return Some((address, chunk));
            }
            superblock.room = self.regions.largest(list);
        }
        None
    }

    fn find(&mut self, stream: StreamId, size: u64) -> Option<BlockId> {
        let is_large = size > SUPERBLOCK;
        if !is_large && let Some((_, chunk)) = self.first_fit(Some(stream), size) {
            return Some(chunk);
        }
        let (address, chunk) = self.first_fit(None, size)?;
        let cut = size.max(SUPERBLOCK);
        let Superblock { size: whole, .. } = self.superblocks[&address];
        if self.is_free(address, whole) && whole >= cut + SUPERBLOCK {
            let rest = address + cut;
            let list = FreeList::Superblock(rest, None);
            self.regions.split_off(chunk, cut, list);
            self.put(address, cut);
            self.put(rest, whole - cut);
        }
        if !is_large {
            self.give(address, Some(stream));
        }
        Some(chunk)
    }

    /// Adds a free superblock to the global arena.
    fn put(&mut self, address: u64, size: u64) {
        let (owner, room) = (None, size);
        self.superblocks
            .insert(address, Superblock { size, owner, room });
    }

    /// Moves a superblock to the arena of a stream, or to the global one.
    fn give(&mut self, address: u64, owner: Option<StreamId>) {
        let Some(superblock) = self.superblocks.get_mut(&address) else {
            return;
        };
        let from = FreeList::Superblock(address, superblock.owner);
        superblock.owner = owner;
        let to = FreeList::Superblock(address, owner);
        self.regions.rename(from, to);
    }

    /// Whether the superblock of the global arena has only free blocks.
    fn is_free(&mut self, address: u64, size: u64) -> bool {
        let list = FreeList::Superblock(address, None);
        self.regions.starts_with(list, size)
    }

    /// Merges a superblock of the global arena with its neighbors there, if all of it is free.
    fn merge(&mut self, address: u64) {
        let mut address = address;
        let below = self.superblocks.range(..address).next_back();
        if let Some((&below, _)) = below
            && self.absorb_next(below)
        {
            address = below;
        }
        self.absorb_next(address);
    }

    /// Merges a superblock with the next one if both are free and in the global arena.
    fn absorb_next(&mut self, address: u64) -> bool {
        let mut from = self.superblocks.range(address..);
        let (Some((_, &lower)), Some((&next, &upper))) = (from.next(), from.next()) else {
            return false;
        };
        let merges = [(address, lower), (next, upper)]
            .iter()
            .all(|&(address, block)| block.owner.is_none() && self.is_free(address, block.size));
        if merges {
            let [from, to] = [next, address].map(|address| FreeList::Superblock(address, None));
            self.regions.join(from, to);
            self.superblocks.remove(&next);
            self.put(address, lower.size + upper.size);
        }
        merges
    }

    /// Gives the superblocks of these arenas back to the global one. The caller has waited for the
    /// streams.
    fn clean(&mut self, is_of: impl Fn(StreamId) -> bool) {
        let owned = (self.superblocks.iter())
            .filter(|(_, superblock)| superblock.owner.is_some_and(&is_of))
            .map(|(&address, _)| address)
            .collect::<Vec<_>>();
        for address in owned {
            self.give(address, None);
            self.merge(address);
        }
    }

    fn out_of_memory(
        &mut self,
        device: &mut dyn Device,
        request: Request,
        size: u64,
    ) -> AllocatorError {
        let is_usable = |superblock: &Superblock| match superblock.owner {
            Some(owner) => owner == request.stream && size <= SUPERBLOCK,
            None => true,
        };
        let usable = (self.superblocks.iter())
            .filter(|(_, superblock)| is_usable(superblock))
            .map(|(&address, superblock)| FreeList::Superblock(address, superblock.owner));
        let largest = usable.map(|list| self.regions.largest(list)).max();
        let limit = match (self.regions.reserved(), device.free_memory()) {
            (0, Ok(free)) => {
                let own = Some(Bytes(self.own_size(free)));
                self.regions.refusing_limit(size, own)
            }
            (0, Err(error)) => return error.into(),
            (region, _) => Some(OomCause::Allocator {
                limit: Bytes(region),
            }),
        };
        (self.regions).out_of_memory_beside(device, request, size, limit, largest.unwrap_or(0))
    }

    /// Frees a chunk after the work of all streams that use it. If the device fails, the chunk
    /// waits for [`Self::retry_frees`].
    fn finish_free(
        &mut self,
        device: &mut dyn Device,
        chunk: BlockId,
        users: BTreeSet<StreamId>,
    ) -> Result<(), DeviceError> {
        let stream = self.regions.list(chunk).stream();
        let Block { address, size, .. } = self.regions[chunk];
        let is_large = size > SUPERBLOCK;
        let superblock = self.superblocks.range_mut(..=address).next_back();
        let (&start, superblock) = superblock.expect("every chunk is in a superblock");
        let owner = superblock.owner;
        let is_found = owner == Some(stream) || is_large && owner.is_none();
        let waits = usize::from(is_large) + usize::from(!is_found);
        let waited = (self.events.order_behind(device, stream, &users)).and_then(|()| {
            (0..waits).try_for_each(|_| if_exists(device.synchronize_stream(stream)).map(drop))
        });
        if waited.is_err() {
            self.regions.postpone_free(chunk);
            self.unfinished.push((chunk, users));
            return waited;
        }
        let list = FreeList::Superblock(start, owner);
        self.regions.set_list(chunk, list);
        let merged = self.regions.complete_free(chunk);
        superblock.room = superblock.room.max(self.regions[merged].size);
        if owner.is_none() {
            self.merge(start);
        }
        Ok(())
    }

    /// Finishes the frees in which the device failed before.
    fn retry_frees(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        while let Some((chunk, users)) = self.unfinished.pop() {
            self.finish_free(device, chunk, users)?;
        }
        Ok(())
    }
}

impl Allocator for RmmArena {
    fn name(&self) -> &'static str {
        "rmm_arena"
    }

    /// Its region is a limit.
    fn releases_before_failure(&self) -> bool {
        false
    }

    /// Blocks of two superblocks never merge.
    fn merges_free_neighbours(&self) -> bool {
        false
    }

    /// The first request can get all of the region.
    fn largest_request(&self, _: &dyn Device, free: Bytes) -> Bytes {
        let size = self.size(free).min(free.0);
        let is_possible = self.superblocks.is_empty() && size >= SUPERBLOCK;
        Bytes(if is_possible { size } else { 0 })
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
        if self.superblocks.is_empty() && !self.start(device, size)? {
            return Err(self.out_of_memory(device, request, size));
        }
        let mut chunk = self.find(request.stream, size);
        if chunk.is_none() {
            self.retry_frees(device)?;
            device.synchronize()?;
            self.regions.counters.num_sync_all_streams += 1;
            self.clean(|_| true);
            chunk = self.find(request.stream, size);
        }
        match chunk {
            Some(chunk) => Ok(self.regions.hand_out(chunk, request, size)),
            None => Err(self.out_of_memory(device, request, size)),
        }
    }

    fn free(&mut self, device: &mut dyn Device, allocation: Allocation) -> Result<(), DeviceError> {
        if allocation.is_null() {
            return Ok(());
        }
        let chunk = self.regions.chunk_of(&allocation)?;
        let users = self.regions.begin_free(chunk);
        self.finish_free(device, chunk, users)
    }

    /// Gives the superblocks of the stream's arena to the global one.
    fn release_stream(
        &mut self,
        device: &mut dyn Device,
        stream: StreamId,
    ) -> Result<(), DeviceError> {
        if stream == StreamId::DEFAULT {
            return Ok(());
        }
        self.retry_frees(device)?;
        if_exists(device.synchronize_stream(stream))?;
        self.clean(|owner| owner == stream);
        Ok(())
    }

    /// Releases the region if nothing in it is live.
    fn empty_cache(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.retry_frees(device)?;
        if self.regions.release(device, 0)? {
            for (address, superblock) in std::mem::take(&mut self.superblocks) {
                let list = FreeList::Superblock(address, superblock.owner);
                self.regions.remove_list(list);
            }
        }
        Ok(())
    }

    answered_by!(regions);

    fn close(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.unfinished.clear();
        self.events.close(device)?;
        self.regions.close(device)?;
        *self = Self::new(self.config.clone());
        Ok(())
    }
}
