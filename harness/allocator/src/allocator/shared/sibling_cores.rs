//! What a core asks of the other cores on the same device, while its thread holds the slow-path lock.

use super::held::Held;
use super::{Core, SharedAllocator};
use crate::allocator::Allocator;
use crate::allocator::caching::{Siblings, StreamOrder};
use crate::device::{Device, DeviceError};
use crate::stats::{MemoryStats, PoolKind};

/// All cores but one. The caller holds the lock of that one, and the slow-path lock.
pub(super) struct SiblingCores<'a, D> {
    shared: &'a SharedAllocator<D>,
    own: u32,
    held: &'a mut Held,
}

impl<'a, D: Device> SiblingCores<'a, D> {
    pub(super) const fn of(shared: &'a SharedAllocator<D>, own: u32, held: &'a mut Held) -> Self {
        Self { shared, own, held }
    }

    fn cores(&self) -> impl Iterator<Item = (u32, &'a Core)> + use<'a, D> {
        let own = self.own;
        let cores = self.shared.table.by_key().into_iter().map(|(key, core)| (key as u32, core));
        cores.filter(move |&(key, _)| key != own)
    }
}

impl<D: Device> Siblings for SiblingCores<'_, D> {
    fn reserved(&self) -> u64 {
        self.held.reserved_by_siblings(self.own)
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

    fn release_default_pool(&mut self, device: &mut dyn Device, kind: PoolKind, order: StreamOrder) -> Result<(), DeviceError> {
        let own = self.own;
        let in_order = |&(key, _): &(u32, _)| (key < own) == (order == StreamOrder::Lower);
        for (key, core) in self.cores().filter(in_order) {
            let mut core = core.0.lock();
            let released = core.release_default_pool(device, kind);
            self.held.set(key, &core.stats());
            released?;
        }
        Ok(())
    }
}
