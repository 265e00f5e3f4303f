//! Which core handed out the memory at an address, and under which handle: read without a lock.
//!
//! A slot for every address where a block can begin. Blocks of the small pool are at least 512 B long, so no two begin in the same 512
//! bytes; those of the large pool are handed out longer than 1 MiB ([`PoolKind`]), so no two begin in the same mebibyte. A large block
//! therefore has its slot in a [`Chunk`] of one mebibyte itself, a small one in a *leaf* of the chunk, made when the first small block
//! begins there.
//!
//! A slot is written when a block is handed out, and never cleared: the reader asks the core whether the block is live. For a live block the
//! slot is right. It was written before the allocator returned the address, and it is not written again while the block is live. A
//! thread that has the address got it, directly or not, from the thread that allocated it, so it sees that write. This needs no further
//! ordering.
//!
//! Cost: 24 B for a mebibyte of addresses ever used by large blocks, 16 KiB for one ever used by small ones. A hit on a block that comes
//! back to the slot it had writes nothing.

use super::sync::{AtomicU64, Ordering};
use super::table::Table;
use crate::allocator::Handle;
use crate::device::DevicePtr;
use crate::stats::PoolKind;
use crate::units::Bytes;
use std::sync::OnceLock;

/// Where a block's account is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) key: u32,
    /// The slot in the core's own table.
    pub(super) handle: Handle,
}

/// Bytes of a small block's slot, as a power of two.
const SLOT_BITS: u32 = 9;
/// Bytes of a chunk, as a power of two.
const CHUNK_BITS: u32 = 20;
/// Bytes of a region, as a power of two.
const REGION_BITS: u32 = 30;
const SLOTS: usize = 1 << (CHUNK_BITS - SLOT_BITS);
const CHUNKS: usize = 1 << (REGION_BITS - CHUNK_BITS);

#[derive(Default)]
pub(super) struct Addresses {
    regions: Table<AddressRegion, 1024>,
}

struct AddressRegion {
    chunks: Box<[Chunk; CHUNKS]>,
}

#[derive(Default)]
struct Chunk {
    large: Slot,
    small: OnceLock<Box<[Slot; SLOTS]>>,
}

/// An owner in 64 bits. A slot that was never written reads as core 0 and its first block; the core says that this is not the address of
/// that block.
#[derive(Default)]
struct Slot(AtomicU64);

impl Addresses {
    /// Notes which core has handed a block out.
    #[inline]
    pub(super) fn set(&self, ptr: DevicePtr, size: Bytes, owner: Owner) {
        let region = self.regions.get_or_insert(ptr.0 >> REGION_BITS, || AddressRegion { chunks: defaults() });
        let chunk = region.chunk(ptr);
        match (PoolKind::of_block(size), chunk.small.get()) {
            (PoolKind::Small, None) => chunk.small.get_or_init(defaults)[slot_of(ptr)].set(owner),
            // Where there is a leaf it is asked first, so it is told of large blocks too.
            (PoolKind::Large, Some(slots)) => {
                slots[slot_of(ptr)].set(owner);
                chunk.large.set(owner);
            }
            (PoolKind::Small, Some(slots)) => slots[slot_of(ptr)].set(owner),
            (PoolKind::Large, None) => chunk.large.set(owner),
        }
    }

    /// The cores that a live block at this address can belong to. It is the first, unless the leaf was made after a large block was handed
    /// out there.
    #[inline]
    pub(super) fn owners(&self, ptr: DevicePtr) -> impl Iterator<Item = Owner> {
        let chunk = self.regions.get(ptr.0 >> REGION_BITS).map(|region| region.chunk(ptr));
        let small = chunk.and_then(|chunk| chunk.small.get()).map(|slots| slots[slot_of(ptr)].get());
        let large = chunk.map(|chunk| &chunk.large);
        small.into_iter().chain(large.into_iter().map(Slot::get))
    }
}

impl AddressRegion {
    #[inline]
    fn chunk(&self, ptr: DevicePtr) -> &Chunk {
        &self.chunks[(ptr.0 >> CHUNK_BITS) as usize & (CHUNKS - 1)]
    }
}

impl Slot {
    #[inline]
    fn set(&self, owner: Owner) {
        let packed = u64::from(owner.key) << 32 | u64::from(owner.handle.slot());
        if self.0.load(Ordering::Relaxed) != packed {
            self.0.store(packed, Ordering::Relaxed);
        }
    }

    #[inline]
    fn get(&self) -> Owner {
        let packed = self.0.load(Ordering::Relaxed);
        Owner { key: (packed >> 32) as u32, handle: Handle::new(packed as u32) }
    }
}

#[inline]
fn slot_of(ptr: DevicePtr) -> usize {
    (ptr.0 >> SLOT_BITS) as usize & (SLOTS - 1)
}

/// Made on the heap: a whole region would not fit every thread's stack.
fn defaults<T: Default, const LENGTH: usize>() -> Box<[T; LENGTH]> {
    let all: Box<[T]> = std::iter::repeat_with(T::default).take(LENGTH).collect();
    all.try_into().unwrap_or_else(|_| unreachable!("as many were made as are wanted"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(addresses: &Addresses, ptr: u64) -> Vec<(u32, u32)> {
        addresses.owners(DevicePtr(ptr)).map(|owner| (owner.key, owner.handle.slot())).collect()
    }

    #[test]
    fn an_address_leads_to_whom_it_was_noted_for_last() {
        shuttle::check_random(
            || {
                let addresses = Addresses::default();
                let note = |ptr, size, key, handle| addresses.set(DevicePtr(ptr), size, Owner { key, handle: Handle::new(handle) });
                const BASE: u64 = 0x7000_0000_0000;
                assert!(owners(&addresses, BASE).is_empty(), "nothing was noted anywhere near");
                note(BASE, Bytes(512), 3, 7);
                note(BASE + 512, Bytes::mib(1), 4, 8);
                assert_eq!((owners(&addresses, BASE)[0], owners(&addresses, BASE + 512)[0]), ((3, 7), (4, 8)));
                note(BASE, Bytes(512), u32::MAX, u32::MAX - 1);
                assert_eq!(owners(&addresses, BASE)[0], (u32::MAX, u32::MAX - 1));
                note(BASE + (5 << 30), Bytes::mib(2), 1, 2);
                assert_eq!(owners(&addresses, BASE + (5 << 30)), [(1, 2)], "a large block alone has one candidate");
                note(BASE + (1 << 20) - 512, Bytes::mib(2), 5, 6);
                assert_eq!(owners(&addresses, BASE + (1 << 20) - 512), [(5, 6), (5, 6)], "the leaf was there first");
                note(BASE + (7 << 20) + 512, Bytes::mib(2), 7, 8);
                note(BASE + (7 << 20), Bytes(512), 9, 9);
                assert_eq!(owners(&addresses, BASE + (7 << 20) + 512)[1], (7, 8), "the leaf came later");
            },
            1,
        );
    }
}
