//! [`DeviceMemory`]: the memory of one device, charged and addressed by the simulated device of `harness-allocator`. What other processes hold of the
//! device is told before each change, and cannot be had.

use std::collections::BTreeMap;

use harness_allocator::device::sim::{AddressOrder as Order, Completion, CostModel, SimConfig, SimDevice};
use harness_allocator::device::{
    Device as _, DeviceError, DevicePtr, MappedDevice as _, MemoryRange, PoolId, PooledDevice as _, StreamId, TestDevice as _,
};
use harness_allocator::units::Bytes;

use crate::code::Code;
use harness_gpu_settings::driver::Kernels;
use harness_gpu_settings::settings::{AddressOrder, Settings};

/// The first address of the first device: behind all addresses that a program on x86-64 has on the host.
pub(crate) const FIRST_ADDRESS: u64 = 1 << 47;
/// Addresses of one device.
const ADDRESSES: u64 = 1 << 56;
/// How far the first device's addresses lie behind those of `harness-allocator`, which begin at 0x7000_0000_0000.
const SHIFT: u64 = FIRST_ADDRESS - 0x7000_0000_0000;

/// The memory of one device.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    sim: SimDevice,
    index: usize,
    /// Whether this process has a context on the device: its first use of memory makes one.
    has_context: bool,
    shift: u64,
    /// Sizes that were asked for, by address.
    allocations: BTreeMap<u64, Bytes>,
    /// Addresses without memory: start to size.
    reservations: BTreeMap<u64, Bytes>,
    /// Physical memory by its number, which is the driver's handle.
    pages: BTreeMap<u64, Page>,
    next_page: u64,
    /// Where it is mapped, by start.
    mapped: BTreeMap<u64, Mapped>,
    /// Allocations of pools by address and number, until the free takes its turn: the next one may have the address before that.
    pooled: BTreeMap<(u64, u64), Pooled>,
    next_pooled: u64,
}

/// Physical memory behind addresses.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    /// The number of the memory.
    page: u64,
    /// Whether the device was allowed to read and write it.
    accessible: bool,
}

#[derive(Clone, Copy, Debug)]
struct Pooled {
    size: Bytes,
    /// Whether a free was queued.
    freed: bool,
}

/// What a device holds that was not given back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left {
    pub(crate) allocations: usize,
    pub(crate) reservations: usize,
    pub(crate) pages: usize,
    pub(crate) pools: u64,
    pub(crate) events: u64,
}

/// Physical memory: given back when its handle is released and nothing is mapped to it.
#[derive(Debug)]
struct Page {
    size: Bytes,
    handles: u32,
    mappings: u32,
}

/// The device that an address lies on.
pub(crate) const fn device_of(address: u64) -> Option<usize> {
    match address.checked_sub(SHIFT) {
        Some(address) if address >= 0x7000_0000_0000 => Some((address / ADDRESSES) as usize),
        _ => None,
    }
}

impl DeviceMemory {
    pub(crate) fn new(index: usize, settings: &Settings) -> Self {
        let done = settings.kernels == Kernels::Done;
        let config = SimConfig {
            total: settings.memory,
            context_overhead: settings.context_overhead,
            cost: CostModel::FREE_OF_CHARGE,
            completion: if done { Completion::Timed } else { Completion::OnSynchronize },
            free_synchronizes: done,
            addresses: match settings.addresses {
                AddressOrder::Up => Order::Up,
                AddressOrder::Down => Order::Down,
                AddressOrder::Reuse => Order::Reuse,
            },
        };
        let shift = SHIFT + index as u64 * ADDRESSES;
        let mut memory = Self {
            sim: SimDevice::new(config),
            index,
            has_context: false,
            shift,
            allocations: BTreeMap::new(),
            reservations: BTreeMap::new(),
            pages: BTreeMap::new(),
            next_page: 1,
            mapped: BTreeMap::new(),
            pooled: BTreeMap::new(),
            next_pooled: 0,
        };
        memory.set_others(settings.others);
        memory
    }

    /// What others hold of the device, from now on.
    pub(crate) fn set_others(&mut self, held: Bytes) {
        // At most what is free, so that it is never refused.
        let _ = self.sim.set_external_memory(held);
    }

    /// The device that charges memory, orders work and keeps time. Its addresses lie [`DeviceMemory::shifted`] in front.
    pub(crate) const fn sim(&mut self) -> &mut SimDevice {
        &mut self.sim
    }

    /// A range as [`DeviceMemory::sim`] knows it.
    pub(crate) const fn shifted(&self, start: u64, len: u64) -> MemoryRange {
        MemoryRange::new(DevicePtr(start.wrapping_sub(self.shift)), Bytes(len))
    }

    pub(crate) const fn has_context(&self) -> bool {
        self.has_context
    }

    pub(crate) const fn index(&self) -> usize {
        self.index
    }

    /// Has a context on the device, while others hold this much of it.
    pub(crate) fn open(&mut self, held_by_others: Bytes) -> Result<(), Code> {
        if !self.has_context && held_by_others > self.sim.info().total.saturating_sub(self.context()) {
            return Err(Code::OutOfMemory);
        }
        self.has_context = true;
        self.sim.set_external_memory(held_by_others).map_or(Err(Code::OutOfMemory), |_| Ok(()))
    }

    fn context(&self) -> Bytes {
        self.sim.own_context().unwrap_or_default()
    }

    /// What this process holds, its context included once it has one.
    pub(crate) fn held(&mut self) -> Bytes {
        self.used() + if self.has_context { self.context() } else { Bytes::ZERO }
    }

    /// Free bytes and all bytes.
    pub(crate) fn free_and_total(&mut self) -> (Bytes, Bytes) {
        (self.sim.free_memory().unwrap_or_default(), self.sim.info().total)
    }

    /// Bytes that this process uses, the context apart.
    pub(crate) fn used(&mut self) -> Bytes {
        let of_process = self.sim.memory().ok().and_then(|memory| Some(memory.process? - memory.context_overhead));
        of_process.unwrap_or_default()
    }

    /// Allocates in whole pages of 2 MiB.
    pub(crate) fn allocate(&mut self, size: Bytes) -> Result<u64, Code> {
        let start = self.sim.malloc(size)?.0 + self.shift;
        self.allocations.insert(start, size);
        Ok(start)
    }

    pub(crate) fn free(&mut self, start: u64) -> Result<Bytes, Code> {
        let size = self.allocations.remove(&start).ok_or(Code::InvalidValue)?;
        self.sim.free(DevicePtr(start - self.shift))?;
        Ok(size)
    }

    /// Whether an allocation begins there.
    pub(crate) fn is_allocation(&self, start: u64) -> bool {
        self.allocations.contains_key(&start)
    }

    /// Whether every one of the bytes is in memory that the device may read and write.
    pub(crate) fn is_accessible(&self, address: u64, len: u64) -> bool {
        let Some(end) = address.checked_add(len) else { return false };
        let mut pooled = self.pooled.range(..=(address, u64::MAX)).rev().map(|(&(start, _), pooled)| (start, pooled.size));
        let allocation = self.allocations.range(..=address).next_back().map(|(&start, &size)| (start, size));
        let inside = |(start, size): (u64, Bytes)| end <= start + size.0;
        pooled.any(inside) || allocation.is_some_and(inside) || self.is_accessibly_mapped(address, end)
    }

    fn is_accessibly_mapped(&self, address: u64, end: u64) -> bool {
        let mut next = address;
        while next < end {
            match self.mapped.range(..=next).next_back().map(|(start, mapped)| (start + self.pages[&mapped.page].size.0, mapped)) {
                Some((behind, mapped)) if mapped.accessible && next < behind => next = behind,
                _ => return false,
            }
        }
        address < end
    }

    /// The allocation or mapping that an address lies in: start and size.
    pub(crate) fn range_of(&self, address: u64) -> Option<(u64, Bytes)> {
        let allocation = self.allocations.range(..=address).next_back().map(|(&start, &size)| (start, size));
        let mapping = || self.mapped.range(..=address).next_back().map(|(&start, mapped)| (start, self.pages[&mapped.page].size));
        let around = |range: &(u64, Bytes)| address - range.0 < range.1.0;
        allocation.filter(around).or_else(|| mapping().filter(around))
    }

    /// Addresses without memory.
    pub(crate) fn reserve(&mut self, size: Bytes) -> Result<u64, Code> {
        let start = self.sim.reserve(size)?;
        // Reservations beyond the addresses of this device would lie on the next one.
        if start.0 + size.0 > ADDRESSES - SHIFT {
            return Err(Code::OutOfMemory);
        }
        self.reservations.insert(start.0 + self.shift, size);
        Ok(start.0 + self.shift)
    }

    /// Gives all of a reservation back, to which nothing is mapped.
    pub(crate) fn unreserve(&mut self, start: u64, size: Bytes) -> Result<(), Code> {
        if self.reservations.get(&start) != Some(&size) {
            return Err(Code::InvalidValue);
        }
        self.sim.unreserve(DevicePtr(start - self.shift))?;
        self.reservations.remove(&start);
        Ok(())
    }

    /// Physical memory without addresses: its handle.
    pub(crate) fn create(&mut self, size: Bytes) -> Result<u64, Code> {
        self.sim.create_page(size)?;
        let number = (self.index as u64) << 48 | self.next_page;
        self.next_page += 1;
        self.pages.insert(number, Page { size, handles: 1, mappings: 0 });
        Ok(number)
    }

    /// Releases a handle. Tells whether the memory was given back.
    pub(crate) fn release(&mut self, number: u64) -> Result<bool, Code> {
        let page = self.pages.get_mut(&number).filter(|page| page.handles > 0).ok_or(Code::InvalidValue)?;
        page.handles -= 1;
        Ok(self.give_back_unused(number))
    }

    /// Gives memory back that has neither handle nor mapping. Tells whether it was that.
    fn give_back_unused(&mut self, number: u64) -> bool {
        let unused = self.pages.get(&number).filter(|page| page.handles == 0 && page.mappings == 0).map(|page| page.size);
        if let Some(size) = unused {
            self.pages.remove(&number);
            self.sim.release_page(size);
        }
        unused.is_some()
    }

    /// One more handle of the memory mapped at an address.
    pub(crate) fn retain(&mut self, address: u64) -> Result<u64, Code> {
        let (_, &Mapped { page, .. }) = self.mapped.range(..=address).next_back().ok_or(Code::InvalidValue)?;
        self.pages.get_mut(&page).ok_or(Code::InvalidValue)?.handles += 1;
        Ok(page)
    }

    /// Puts all of a piece of physical memory behind addresses.
    pub(crate) fn map(&mut self, start: u64, size: Bytes, number: u64) -> Result<(), Code> {
        let page = self.pages.get_mut(&number).filter(|page| page.size == size && page.handles > 0).ok_or(Code::InvalidValue)?;
        let range = MemoryRange::new(DevicePtr(start - self.shift), size);
        self.sim.map_page(range).map_err(|_| Code::InvalidValue)?;
        page.mappings += 1;
        self.mapped.insert(start, Mapped { page: number, accessible: false });
        Ok(())
    }

    /// Lets the device read and write whole mappings.
    pub(crate) fn allow(&mut self, start: u64, size: Bytes) -> Result<(), Code> {
        let end = start.checked_add(size.0).ok_or(Code::InvalidValue)?;
        let inside: Vec<(u64, u64)> =
            self.mapped.range(start..end).map(|(&at, mapped)| (at, at + self.pages[&mapped.page].size.0)).collect();
        let behind = inside.iter().try_fold(start, |next, &(at, behind)| (at == next).then_some(behind));
        if behind != Some(end) {
            return Err(Code::InvalidValue);
        }
        for (at, _) in inside {
            self.mapped.entry(at).and_modify(|mapped| mapped.accessible = true);
        }
        Ok(())
    }

    /// Takes the memory from behind addresses. Tells how many pieces of it were given back, and whether work on it was not waited for.
    pub(crate) fn unmap(&mut self, start: u64, size: Bytes) -> Result<(u64, bool), Code> {
        let range = self.shifted(start, size.0);
        let unmapped = self.sim.unmap_pages(range);
        let in_use = matches!(unmapped, Err(DeviceError::InUse { .. }));
        if let Err(error @ DeviceError::InUse { .. }) = &unmapped {
            eprintln!("simulated GPU: {error}");
        }
        if in_use { self.sim.unmap_pages_in_use(range) } else { unmapped }.map_err(|_| Code::InvalidValue)?;
        let inside: Vec<(u64, u64)> = self.mapped.range(start..start + size.0).map(|(&start, mapped)| (start, mapped.page)).collect();
        let mut gone = 0;
        for (start, number) in inside {
            self.mapped.remove(&start);
            self.pages.entry(number).and_modify(|page| page.mappings -= 1);
            gone += u64::from(self.give_back_unused(number));
        }
        Ok((gone, in_use))
    }

    /// Takes memory of a pool, in the order of a stream.
    pub(crate) fn allocate_in_order(&mut self, size: Bytes, pool: PoolId, stream: StreamId) -> Result<u64, Code> {
        let start = self.sim.malloc_async(pool, size, stream)?.0 + self.shift;
        self.next_pooled += 1;
        self.pooled.insert((start, self.next_pooled), Pooled { size, freed: false });
        Ok(start)
    }

    /// Gives memory back to its pool, in the order of a stream. Returns the number of the allocation.
    pub(crate) fn free_in_order(&mut self, start: u64, stream: StreamId) -> Result<u64, Code> {
        let last = self.pooled.range_mut((start, 0)..=(start, u64::MAX)).next_back();
        let ((_, number), pooled) = last.filter(|(_, pooled)| !pooled.freed).ok_or(Code::InvalidValue)?;
        self.sim.free_async(DevicePtr(start - self.shift), stream)?;
        pooled.freed = true;
        Ok(*number)
    }

    /// A free of a pool takes its turn. Returns the size of what was given back.
    pub(crate) fn finish_free(&mut self, start: u64, number: u64) -> Option<Bytes> {
        self.pooled.remove(&(start, number)).map(|pooled| pooled.size)
    }

    /// What was not given back.
    pub(crate) fn left(&self) -> Left {
        let leaks = self.sim.leaks();
        Left {
            allocations: self.allocations.len() + self.pooled.values().filter(|pooled| !pooled.freed).count(),
            reservations: self.reservations.len(),
            pages: self.pages.len(),
            pools: leaks.pools,
            events: leaks.events,
        }
    }
}

impl From<DeviceError> for Code {
    /// The driver's answer to what the simulated device refuses.
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::OutOfMemory { .. } => Self::OutOfMemory,
            DeviceError::UnknownHandle { .. } => Self::InvalidHandle,
            DeviceError::NotReady(_) => Self::NotReady,
            DeviceError::InvalidAccess { .. } | DeviceError::InUse { .. } => Self::IllegalAddress,
            DeviceError::Race { .. } => Self::LaunchFailed,
            _ => Self::InvalidValue,
        }
    }
}

/// The device that a handle of physical memory is of.
pub(crate) const fn device_of_page(number: u64) -> usize {
    (number >> 48) as usize
}

#[cfg(test)]
mod tests {
    use harness_gpu_settings::gpus::GPUS;

    use super::*;

    #[test]
    fn physical_memory_goes_with_its_last_handle_and_its_last_mapping() {
        let mut memory = DeviceMemory::new(0, &Settings::new(&GPUS[0], Bytes::mib(64)));
        let (start, page) = (memory.reserve(Bytes::mib(4)).expect("addresses"), memory.create(Bytes::mib(2)).expect("it fits"));
        memory.map(start, Bytes::mib(2), page).expect("nothing is mapped there");
        assert_eq!(memory.release(page), Ok(false), "it is still mapped");
        assert_eq!(memory.release(page), Err(Code::InvalidValue), "there is no other handle");
        assert_eq!(memory.map(start + (2 << 20), Bytes::mib(2), page), Err(Code::InvalidValue), "the handle is gone");
        assert_eq!(memory.allow(start, Bytes::mib(4)), Err(Code::InvalidValue), "half of it has no memory");
        assert_eq!(memory.unreserve(start, Bytes::mib(4)), Err(Code::InvalidValue), "something is mapped in it");
        assert_eq!((memory.used(), memory.unmap(start, Bytes::mib(2))), (Bytes::mib(2), Ok((1, false))));
        assert_eq!(memory.used(), Bytes::ZERO);
        assert_eq!(memory.unreserve(start, Bytes::mib(2)), Err(Code::InvalidValue), "it is larger");
        assert_eq!(memory.unreserve(start, Bytes::mib(4)), Ok(()));
    }
}
