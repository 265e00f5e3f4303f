//! Allocations at given addresses, to reproduce the addresses of a recorded program.

use std::collections::VecDeque;

use super::{GRANULARITY, SimDevice};
use crate::device::{DevicePtr, MemoryRange};
use crate::units::Bytes;

#[derive(Clone, Debug, Default)]
pub(super) struct Placement {
    allocations: VecDeque<DevicePtr>,
    reservations: VecDeque<DevicePtr>,
}

impl SimDevice {
    /// Places the next allocations at these addresses, one after the other. If an address is in
    /// use, its allocation gets a normal address.
    pub fn place_allocations(&mut self, addresses: impl IntoIterator<Item = DevicePtr>) {
        self.placement.allocations.extend(addresses);
    }

    /// Places the next reservations at these addresses.
    pub fn place_reservations(&mut self, addresses: impl IntoIterator<Item = DevicePtr>) {
        self.placement.reservations.extend(addresses);
    }

    /// Forgets the requested addresses that were not used.
    pub fn forget_placements(&mut self) {
        self.placement = Placement::default();
    }

    /// The address of an allocation with this charge.
    pub(super) fn next_address(&mut self, charged: Bytes) -> Option<u64> {
        let wanted = self.placement.allocations.pop_front();
        match wanted.filter(|&at| self.is_vacant(MemoryRange::new(at, charged))) {
            Some(at) => {
                self.addresses.take_at(at.0, charged);
                Some(at.0)
            }
            None => self.addresses.take(charged),
        }
    }

    /// The requested address of a reservation of this size, if it is free.
    pub(super) fn next_reservation(&mut self, size: Bytes) -> Option<DevicePtr> {
        let wanted = self.placement.reservations.pop_front();
        let aligned = |at: &DevicePtr| at.0.is_multiple_of(GRANULARITY.0);
        wanted
            .filter(aligned)
            .filter(|&at| self.is_vacant(MemoryRange::new(at, size)))
    }

    fn is_vacant(&self, range: MemoryRange) -> bool {
        let start = range.start.0;
        !self.allocations.is_in_use(range)
            && !self.mapping.table.overlaps(range)
            && start > 0
            && range.len.0 <= u64::MAX - start
    }
}

#[cfg(test)]
mod tests;
