//! [`Allocations`]: live and freed allocations by address. Freed ones stay until their addresses
//! are reused, so an error names the place of the free.

use std::collections::BTreeMap;

use crate::device::{CallSite, DeviceError, DevicePtr, MemoryRange, PoolId};
use crate::units::Bytes;

#[derive(Clone, Debug, Default)]
pub(super) struct Allocations(BTreeMap<u64, SimAllocation>);

#[derive(Clone, Copy, Debug)]
pub(super) struct SimAllocation {
    pub(super) size: Bytes,
    /// The length of its address range.
    pub(super) charged: Bytes,
    pub(super) pool: Option<PoolId>,
    pub(super) state: AllocationState,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum AllocationState {
    Live { made: CallSite },
    Freed { at: CallSite },
}

impl SimAllocation {
    const fn is_live(&self) -> bool {
        matches!(self.state, AllocationState::Live { .. })
    }
}

impl Allocations {
    pub(super) fn add(&mut self, start: u64, allocation: SimAllocation) {
        let range = MemoryRange::new(DevicePtr(start), allocation.charged);
        let replaced: Vec<u64> = self.overlapping(range).map(|(start, _)| start).collect();
        for start in replaced {
            self.0.remove(&start);
        }
        self.0.insert(start, allocation);
    }

    /// The live allocation at an address: from a pool if `pooled`, otherwise from the device. Fails
    /// with [`DeviceError::DoubleFree`] if it is freed; [`DeviceError::InvalidFree`] if there was
    /// none.
    pub(super) fn live(
        &mut self,
        ptr: DevicePtr,
        pooled: bool,
        place: CallSite,
    ) -> Result<&mut SimAllocation, DeviceError> {
        let found = self
            .0
            .get_mut(&ptr.0)
            .filter(|allocation| allocation.pool.is_some() == pooled);
        let allocation = found.ok_or(DeviceError::InvalidFree { ptr, place })?;
        match allocation.state {
            AllocationState::Live { .. } => Ok(allocation),
            AllocationState::Freed { at: first } => Err(DeviceError::DoubleFree {
                ptr,
                first,
                second: place,
            }),
        }
    }

    pub(super) fn all_live(&self) -> impl Iterator<Item = &SimAllocation> {
        self.0.values().filter(|allocation| allocation.is_live())
    }

    pub(super) fn is_in_use(&self, range: MemoryRange) -> bool {
        self.overlapping(range)
            .any(|(_, allocation)| allocation.is_live())
    }

    /// The allocation, live or freed, whose address range contains the address, and its start.
    pub(super) fn around(&self, ptr: DevicePtr) -> Option<(u64, &SimAllocation)> {
        self.overlapping(MemoryRange::new(ptr, Bytes(1))).next()
    }

    /// The allocations that overlap a range, from the highest address down.
    fn overlapping(&self, range: MemoryRange) -> impl Iterator<Item = (u64, &SimAllocation)> {
        let below = self
            .0
            .range(..range.end().0)
            .rev()
            .map(|(&start, allocation)| (start, allocation));
        below.take_while(move |(start, allocation)| start + allocation.charged.0 > range.start.0)
    }
}
