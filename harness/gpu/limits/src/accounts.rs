//! [`Accounts`]: the device memory of a process, rounded as on a simulated device, and the memory
//! left under the limit.

use std::collections::BTreeMap;

use harness_allocator::{device::sim::GRANULARITY, units::Bytes};
use harness_gpu_settings::calls::Call;

/// The granularity of allocations from pools.
const ALIGNMENT: Bytes = Bytes(512);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge {
    /// An allocation from a pool shares pages with others.
    is_pooled: bool,
    bytes: Bytes,
}

/// Physical memory: freed after its last handle is released and its last mapping is removed.
#[derive(Clone, Copy, Debug)]
struct Physical {
    charge: Charge,
    handles: u32,
    mappings: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Accounts {
    limit: Option<Bytes>,
    pages: Bytes,
    pooled: Bytes,
    allocations: BTreeMap<u64, Charge>,
    physical: BTreeMap<u64, Physical>,
    /// Mappings: address to handle.
    mapped: BTreeMap<u64, u64>,
}

impl Accounts {
    pub(crate) fn new(limit: Option<Bytes>) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    pub(crate) fn used(&self) -> Bytes {
        self.pages
            + self
                .pooled
                .checked_round_up(GRANULARITY)
                .unwrap_or(self.pooled)
    }

    /// Free and total memory that the program sees, from those of the device and the memory that
    /// other processes use under the limit.
    pub(crate) fn visible_memory(
        &self,
        others: Bytes,
        free: Bytes,
        total: Bytes,
    ) -> (Bytes, Bytes) {
        match self.limit {
            Some(limit) => (
                free.min(limit.saturating_sub(self.used()).saturating_sub(others)),
                total.min(limit),
            ),
            None => (free, total),
        }
    }

    /// Charges memory before the request, so two threads cannot get the same remaining memory.
    /// `None` if others leave too little of the limit.
    pub(crate) fn charge(&mut self, others: Bytes, call: Call, size: Bytes) -> Option<Charge> {
        let is_pooled = call == Call::MallocAsync;
        let charge = Charge {
            is_pooled,
            bytes: size.checked_round_up(if is_pooled { ALIGNMENT } else { GRANULARITY })?,
        };
        let before = *self.sum(charge);
        *self.sum(charge) = Bytes(before.0.checked_add(charge.bytes.0)?);
        if self
            .limit
            .is_none_or(|limit| self.used() <= limit.saturating_sub(others))
        {
            return Some(charge);
        }
        *self.sum(charge) = before;
        None
    }

    pub(crate) fn discharge(&mut self, charge: Charge) {
        *self.sum(charge) -= charge.bytes;
    }

    const fn sum(&mut self, charge: Charge) -> &mut Bytes {
        if charge.is_pooled {
            &mut self.pooled
        } else {
            &mut self.pages
        }
    }

    pub(crate) fn place(&mut self, address: u64, charge: Charge) {
        // If the address has an old charge, a function without a wrapper freed that memory.
        if let Some(before) = self.allocations.insert(address, charge) {
            self.discharge(before);
        }
    }

    /// Removes the charge of an address before its memory is freed; `None` if nothing is charged
    /// there.
    pub(crate) fn take(&mut self, address: u64) -> Option<Charge> {
        let charge = self.allocations.remove(&address)?;
        self.discharge(charge);
        Some(charge)
    }

    /// Restores a charge after a failed free.
    pub(crate) fn put_back(&mut self, address: u64, charge: Charge) {
        *self.sum(charge) += charge.bytes;
        self.place(address, charge);
    }

    /// Corrects the size of an allocation to the driver's choice, even above the limit.
    pub(crate) fn correct(&mut self, address: u64, size: Bytes) {
        if let Some(charge) = self.take(address) {
            let bytes = size.checked_round_up(GRANULARITY).unwrap_or(charge.bytes);
            self.put_back(address, Charge { bytes, ..charge });
        }
    }

    pub(crate) fn create(&mut self, handle: u64, charge: Charge) {
        if let Some(before) = self.physical.insert(
            handle,
            Physical {
                charge,
                handles: 1,
                mappings: 0,
            },
        ) {
            self.discharge(before.charge);
        }
    }

    pub(crate) fn retain(&mut self, handle: u64) {
        self.physical
            .entry(handle)
            .and_modify(|physical| physical.handles += 1);
    }

    /// Returns whether memory was freed.
    pub(crate) fn release(&mut self, handle: u64) -> bool {
        self.physical
            .entry(handle)
            .and_modify(|physical| physical.handles = physical.handles.saturating_sub(1));
        self.free_unused(handle)
    }

    pub(crate) fn map(&mut self, address: u64, handle: u64) {
        if let Some(physical) = self.physical.get_mut(&handle) {
            physical.mappings += 1;
            self.mapped.insert(address, handle);
        }
    }

    /// Returns the number of freed pieces of physical memory.
    pub(crate) fn unmap(&mut self, address: u64, size: u64) -> u64 {
        let mappings: Vec<(u64, u64)> = self
            .mapped
            .range(address..address.saturating_add(size))
            .map(|(&address, &handle)| (address, handle))
            .collect();
        let mut freed = 0;
        for (address, handle) in mappings {
            self.mapped.remove(&address);
            self.physical
                .entry(handle)
                .and_modify(|physical| physical.mappings -= 1);
            freed += u64::from(self.free_unused(handle));
        }
        freed
    }

    fn free_unused(&mut self, handle: u64) -> bool {
        let unused = self
            .physical
            .get(&handle)
            .filter(|physical| physical.handles == 0 && physical.mappings == 0)
            .copied();
        if let Some(physical) = unused {
            self.physical.remove(&handle);
            self.discharge(physical.charge);
        }
        unused.is_some()
    }
}

#[cfg(test)]
mod tests;
