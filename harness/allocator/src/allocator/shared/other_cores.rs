//! What a core asks of the other cores on the same device, while its thread holds the slow lock.

use super::held::Held;
use super::{Core, SharedAllocator};
use crate::allocator::Allocator;
use crate::allocator::caching::{Others, Side};
use crate::device::{Device, DeviceError};
use crate::stats::{MemoryStats, PoolKind};

/// All cores but one. The caller holds the lock of that one, and the slow lock.
pub(super) struct CoresBeside<'a, D> {
    shared: &'a SharedAllocator<D>,
    own: u32,
    held: &'a mut Held,
}

impl<'a, D: Device> CoresBeside<'a, D> {
    pub(super) const fn of(shared: &'a SharedAllocator<D>, own: u32, held: &'a mut Held) -> Self {
        Self { shared, own, held }
    }

    fn cores(&self) -> impl Iterator<Item = (u32, &'a Core)> + use<'a, D> {
        let own = self.own;
        let cores = self.shared.table.by_key().into_iter().map(|(key, core)| (key as u32, core));
        cores.filter(move |&(key, _)| key != own)
    }
}

impl<D: Device> Others for CoresBeside<'_, D> {
    fn reserved(&self) -> u64 {
        self.held.reserved_by_others(self.own)
    }

    fn allocated(&self) -> u64 {
        self.cores().map(|(_, core)| core.0.lock().stats().allocated_bytes.all.current).sum()
    }

    fn before_release(&mut self, own: &MemoryStats) {
        self.held.set(self.own, own);
    }

    fn finish_pending(&mut self, device: &mut dyn Device) -> Result<(), DeviceError> {
        self.cores().try_for_each(|(_, core)| core.0.lock().finish_pending(device, None))
    }

    fn release_default_pool(&mut self, device: &mut dyn Device, kind: PoolKind, side: Side) -> Result<(), DeviceError> {
        let own = self.own;
        let on_side = |&(key, _): &(u32, _)| (key < own) == (side == Side::Before);
        for (key, core) in self.cores().filter(on_side) {
            let mut core = core.0.lock();
            let released = core.release_default_pool(device, kind);
            self.held.set(key, &core.stats());
            released?;
        }
        Ok(())
    }
}
