//! [`DeviceMemory`]: the memory of one device. The simulated device of `harness-allocator` charges
//! and addresses it. Memory of other processes is updated before each change and is not available.

use std::collections::BTreeMap;

use harness_allocator::device::sim::{
    AddressOrder, Completion, CostModel, GRANULARITY, SimConfig, SimDevice,
};
use harness_allocator::device::{
    Device as _, DeviceError, DevicePtr, Leaks, MappedDevice as _, MemoryRange, PoolId,
    PooledDevice as _, StreamId, TestDevice as _,
};
use harness_allocator::units::Bytes;

use crate::{backing::Backing, code::Code};
use harness_gpu_settings::driver::Kernels;
use harness_gpu_settings::settings::{Settings, Values};

/// The first address of the first device, above all host addresses of a program on x86-64.
pub(crate) const FIRST_ADDRESS: u64 = 1 << 47;
/// Addresses per device.
const ADDRESSES: u64 = 1 << 56;
/// The offset of the first device's addresses to those of `harness-allocator`, which start at
/// 0x7000_0000_0000.
const SHIFT: u64 = FIRST_ADDRESS - 0x7000_0000_0000;
/// The end of the addresses that `harness-allocator` reserves.
const RESERVATIONS_END: u64 = 1 << 60;

/// The memory of one device.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    sim: SimDevice,
    index: usize,
    /// The first use of memory creates the context of this process.
    has_context: bool,
    shift: u64,
    /// Bytes that libraries hold.
    libraries: Bytes,
    /// Page-locked memory of this process, if the device shares the host's memory.
    pinned: Bytes,
    /// Requested sizes by address.
    allocations: BTreeMap<u64, Bytes>,
    /// Reserved addresses: start to size.
    reservations: BTreeMap<u64, Bytes>,
    /// Physical memory by handle.
    pages: BTreeMap<u64, Page>,
    next_page: u64,
    /// Mappings by start.
    mapped: BTreeMap<u64, Mapped>,
    /// Pool allocations by address and number, until their free completes. A later allocation may
    /// get the address earlier.
    pooled: BTreeMap<(u64, u64), Pooled>,
    next_pooled: u64,
    /// With [`Values::Cpu`].
    contents: Option<Backing>,
}

/// A mapping of physical memory.
#[derive(Clone, Copy, Debug)]
struct Mapped {
    /// The handle of the physical memory.
    page: u64,
    /// The device may read and write it.
    accessible: bool,
}

#[derive(Clone, Copy, Debug)]
struct Pooled {
    size: Bytes,
    /// A free is queued.
    freed: bool,
}

/// Physical memory: freed after its last handle is released and its last mapping is removed.
#[derive(Debug)]
struct Page {
    size: Bytes,
    handles: u32,
    mappings: u32,
}

/// The device of an address.
pub(crate) const fn device_of(address: u64) -> Option<usize> {
    match address.checked_sub(SHIFT) {
        Some(address) if address >= 0x7000_0000_0000 => Some((address / ADDRESSES) as usize),
        _ => None,
    }
}

impl DeviceMemory {
    pub(crate) fn new(index: usize, settings: &Settings) -> Self {
        let executes = settings.kernels == Kernels::Execute;
        let config = SimConfig {
            total: settings.memory,
            context_overhead: settings.context_overhead,
            cost: CostModel::FREE_OF_CHARGE,
            completion: if executes {
                Completion::Timed
            } else {
                Completion::OnSynchronize
            },
            free_synchronizes: executes,
            addresses: settings.addresses,
            reservations: settings.addresses,
        };
        let shift = SHIFT + index as u64 * ADDRESSES;
        let first = FIRST_ADDRESS + index as u64 * ADDRESSES;
        let mut memory = Self {
            sim: SimDevice::new(config),
            index,
            has_context: false,
            shift,
            libraries: Bytes::ZERO,
            pinned: Bytes::ZERO,
            allocations: BTreeMap::new(),
            reservations: BTreeMap::new(),
            pages: BTreeMap::new(),
            next_page: 1,
            mapped: BTreeMap::new(),
            pooled: BTreeMap::new(),
            next_pooled: 0,
            contents: (settings.values == Values::Cpu)
                .then(|| Backing::new(first, ADDRESSES).ok())
                .flatten(),
        };
        if matches!(settings.addresses, AddressOrder::Down | AddressOrder::Linux) {
            // Downward reservations start below the addresses of the next device. One granule is
            // the gap after each reservation.
            let _ = memory
                .sim
                .reserve(Bytes(RESERVATIONS_END - ADDRESSES - GRANULARITY.0));
        }
        memory.set_others(settings.others);
        memory
    }

    /// Sets the memory of other processes.
    pub(crate) fn set_others(&mut self, held: Bytes) {
        // Limited to the free memory, so it never fails.
        let _ = self.sim.set_external_memory(held);
    }

    /// The simulated device, which charges memory, orders work and keeps time.
    /// [`DeviceMemory::shifted`] converts addresses.
    pub(crate) const fn sim(&mut self) -> &mut SimDevice {
        &mut self.sim
    }

    /// A range in the addresses of [`DeviceMemory::sim`].
    pub(crate) const fn shifted(&self, start: u64, len: u64) -> MemoryRange {
        MemoryRange::new(DevicePtr(start.wrapping_sub(self.shift)), Bytes(len))
    }

    pub(crate) const fn has_context(&self) -> bool {
        self.has_context
    }

    pub(crate) const fn index(&self) -> usize {
        self.index
    }

    /// Creates the context unless it exists, and sets the memory of other processes.
    pub(crate) fn open(&mut self, held_by_others: Bytes) -> Result<(), Code> {
        if !self.has_context
            && held_by_others > self.sim.info().total.saturating_sub(self.context())
        {
            return Err(Code::OutOfMemory);
        }
        self.has_context = true;
        self.sim
            .set_external_memory(held_by_others + self.pinned)
            .map_or(Err(Code::OutOfMemory), |_| Ok(()))
    }

    fn context(&self) -> Bytes {
        self.sim.own_context().unwrap_or_default()
    }

    /// Bytes that this process uses, with its context, libraries and page-locked memory.
    pub(crate) fn held(&mut self) -> Bytes {
        self.used()
            + self.libraries
            + self.pinned
            + if self.has_context {
                self.context()
            } else {
                Bytes::ZERO
            }
    }

    /// Free and total bytes.
    pub(crate) fn free_and_total(&mut self) -> (Bytes, Bytes) {
        (
            self.sim.free_memory().unwrap_or_default(),
            self.sim.info().total,
        )
    }

    /// Bytes that this process uses, without its context and libraries.
    pub(crate) fn used(&mut self) -> Bytes {
        let of_process = self
            .sim
            .memory()
            .ok()
            .and_then(|memory| Some(memory.process? - memory.context_overhead));
        of_process
            .unwrap_or_default()
            .saturating_sub(self.libraries)
    }

    /// Takes memory for a library until the end of the process. It has no address, so it does not
    /// change those of the program's memory.
    pub(crate) fn take_for_library(&mut self, size: Bytes) -> Result<(), Code> {
        self.sim.create_page(size)?;
        self.libraries += size;
        Ok(())
    }

    /// Returns memory of [`DeviceMemory::take_for_library`].
    pub(crate) fn return_of_library(&mut self, size: Bytes) {
        self.sim.release_page(size);
        self.libraries = self.libraries.saturating_sub(size);
    }

    /// Charges page-locked memory.
    pub(crate) fn pin(&mut self, size: Bytes) -> Result<(), Code> {
        if size > self.free_and_total().0 {
            return Err(Code::OutOfMemory);
        }
        self.pinned += size;
        Ok(())
    }

    /// Returns the charge of [`DeviceMemory::pin`].
    pub(crate) fn unpin(&mut self, size: Bytes) {
        self.pinned = self.pinned.saturating_sub(size);
    }

    pub(crate) const fn pinned(&self) -> Bytes {
        self.pinned
    }

    /// Allocates in whole pages of 2 MiB.
    pub(crate) fn allocate(&mut self, size: Bytes) -> Result<u64, Code> {
        let start = self.sim.malloc(size)?.0 + self.shift;
        self.allocations.insert(start, size);
        self.add_contents(start, size);
        Ok(start)
    }

    /// Frees an allocation, also one of a pool.
    pub(crate) fn free(&mut self, start: u64) -> Result<Bytes, Code> {
        let Some(size) = self.allocations.remove(&start) else {
            let number = self.free_in_order(start, StreamId::DEFAULT)?;
            return self.finish_free(start, number).ok_or(Code::InvalidValue);
        };
        self.sim.free(DevicePtr(start - self.shift))?;
        self.contents
            .iter_mut()
            .for_each(|contents| contents.remove(start));
        Ok(size)
    }

    /// Returns whether an allocation starts at this address.
    pub(crate) fn is_allocation(&self, start: u64) -> bool {
        self.allocations.contains_key(&start)
    }

    /// Returns whether the device may read and write all these bytes.
    pub(crate) fn is_accessible(&self, address: u64, len: u64) -> bool {
        let Some(end) = address.checked_add(len) else {
            return false;
        };
        let mut pooled = self
            .pooled
            .range(..=(address, u64::MAX))
            .rev()
            .map(|(&(start, _), pooled)| (start, pooled.size));
        let allocation = self
            .allocations
            .range(..=address)
            .next_back()
            .map(|(&start, &size)| (start, size));
        let contains = |(start, size): (u64, Bytes)| end <= start + size.0;
        pooled.any(contains)
            || allocation.is_some_and(contains)
            || self.is_accessibly_mapped(address, end)
    }

    fn is_accessibly_mapped(&self, address: u64, end: u64) -> bool {
        let mut next = address;
        while next < end {
            match self
                .mapped
                .range(..=next)
                .next_back()
                .map(|(start, mapped)| (start + self.pages[&mapped.page].size.0, mapped))
            {
                Some((mapped_end, mapped)) if mapped.accessible && next < mapped_end => {
                    next = mapped_end
                }
                _ => return false,
            }
        }
        address < end
    }

    /// Start and size of the live pool allocation around an address.
    pub(crate) fn pooled_around(&self, address: u64) -> Option<(u64, Bytes)> {
        let (&(start, _), pooled) = self.pooled.range(..=(address, u64::MAX)).next_back()?;
        let is_around = !pooled.freed && address - start < pooled.size.0;
        is_around.then_some((start, pooled.size))
    }

    /// Start and size of the allocation or mapping around an address.
    pub(crate) fn range_of(&self, address: u64) -> Option<(u64, Bytes)> {
        let allocation = self
            .allocations
            .range(..=address)
            .next_back()
            .map(|(&start, &size)| (start, size));
        let around = |range: &(u64, Bytes)| address - range.0 < range.1.0;
        let found = allocation.filter(around);
        found.or_else(|| self.pooled_around(address)).or_else(|| {
            self.mapping_around(address)
                .map(|(start, mapped)| (start, self.pages[&mapped.page].size))
        })
    }

    /// The mapping around an address, with its start.
    fn mapping_around(&self, address: u64) -> Option<(u64, Mapped)> {
        let (&start, &mapped) = self.mapped.range(..=address).next_back()?;
        (address - start < self.pages[&mapped.page].size.0).then_some((start, mapped))
    }

    /// Reserves addresses.
    pub(crate) fn reserve(&mut self, size: Bytes) -> Result<u64, Code> {
        let start = self.sim.reserve(size)?;
        if start.0 + size.0 > ADDRESSES {
            // Later addresses belong to the next device.
            self.sim.unreserve(start)?;
            return Err(Code::OutOfMemory);
        }
        self.reservations.insert(start.0 + self.shift, size);
        self.add_contents(start.0 + self.shift, size);
        Ok(start.0 + self.shift)
    }

    /// Frees a whole reservation without mappings.
    pub(crate) fn unreserve(&mut self, start: u64, size: Bytes) -> Result<(), Code> {
        if self.reservations.get(&start) != Some(&size) {
            return Err(Code::InvalidValue);
        }
        self.sim.unreserve(DevicePtr(start - self.shift))?;
        self.reservations.remove(&start);
        self.contents
            .iter_mut()
            .for_each(|contents| contents.remove(start));
        Ok(())
    }

    fn add_contents(&mut self, start: u64, size: Bytes) {
        self.contents
            .iter_mut()
            .for_each(|contents| contents.add(start, size.0));
    }

    pub(crate) const fn contents(&mut self) -> Option<&mut Backing> {
        self.contents.as_mut()
    }

    /// Creates physical memory and returns its handle.
    pub(crate) fn create(&mut self, size: Bytes) -> Result<u64, Code> {
        self.sim.create_page(size)?;
        let number = (self.index as u64) << 48 | self.next_page;
        self.next_page += 1;
        self.pages.insert(
            number,
            Page {
                size,
                handles: 1,
                mappings: 0,
            },
        );
        Ok(number)
    }

    /// Releases a handle. Returns whether the memory was freed.
    pub(crate) fn release(&mut self, number: u64) -> Result<bool, Code> {
        let page = self
            .pages
            .get_mut(&number)
            .filter(|page| page.handles > 0)
            .ok_or(Code::InvalidValue)?;
        page.handles -= 1;
        Ok(self.free_unused(number))
    }

    /// Frees physical memory without handles and mappings. Returns whether it was freed.
    fn free_unused(&mut self, number: u64) -> bool {
        let unused = self
            .pages
            .get(&number)
            .filter(|page| page.handles == 0 && page.mappings == 0)
            .map(|page| page.size);
        if let Some(size) = unused {
            self.pages.remove(&number);
            self.sim.release_page(size);
        }
        unused.is_some()
    }

    /// Adds a handle to the memory that is mapped at an address.
    pub(crate) fn retain(&mut self, address: u64) -> Result<u64, Code> {
        let (_, Mapped { page, .. }) = self.mapping_around(address).ok_or(Code::InvalidValue)?;
        self.pages.get_mut(&page).ok_or(Code::InvalidValue)?.handles += 1;
        Ok(page)
    }

    /// Maps a whole piece of physical memory.
    pub(crate) fn map(&mut self, start: u64, size: Bytes, number: u64) -> Result<(), Code> {
        let page = self
            .pages
            .get_mut(&number)
            .filter(|page| page.size == size && page.handles > 0)
            .ok_or(Code::InvalidValue)?;
        let range = MemoryRange::new(DevicePtr(start - self.shift), size);
        self.sim.map_page(range).map_err(|_| Code::InvalidValue)?;
        page.mappings += 1;
        self.mapped.insert(
            start,
            Mapped {
                page: number,
                accessible: false,
            },
        );
        Ok(())
    }

    /// Allows the device to read and write whole mappings.
    pub(crate) fn allow(&mut self, start: u64, size: Bytes) -> Result<(), Code> {
        let end = start.checked_add(size.0).ok_or(Code::InvalidValue)?;
        let mappings: Vec<(u64, u64)> = self
            .mapped
            .range(start..end)
            .map(|(&at, mapped)| (at, at + self.pages[&mapped.page].size.0))
            .collect();
        if mappings.iter().try_fold(start, |next, &(at, mapped_end)| {
            (at == next).then_some(mapped_end)
        }) != Some(end)
        {
            return Err(Code::InvalidValue);
        }
        for (at, _) in mappings {
            self.mapped
                .entry(at)
                .and_modify(|mapped| mapped.accessible = true);
        }
        Ok(())
    }

    /// Unmaps a range. Returns the number of freed pieces of memory, and whether pending work uses
    /// the range.
    pub(crate) fn unmap(&mut self, start: u64, size: Bytes) -> Result<(u64, bool), Code> {
        let range = self.shifted(start, size.0);
        let unmapped = self.sim.unmap_pages(range);
        let in_use = matches!(unmapped, Err(DeviceError::InUse { .. }));
        if let Err(error @ DeviceError::InUse { .. }) = &unmapped {
            eprintln!("simulated GPU: {error}");
        }
        if in_use {
            self.sim.unmap_pages_in_use(range)
        } else {
            unmapped
        }
        .map_err(|_| Code::InvalidValue)?;
        let mappings: Vec<(u64, u64)> = self
            .mapped
            .range(start..start + size.0)
            .map(|(&start, mapped)| (start, mapped.page))
            .collect();
        let mut freed = 0;
        for (start, number) in mappings {
            self.mapped.remove(&start);
            self.pages
                .entry(number)
                .and_modify(|page| page.mappings -= 1);
            freed += u64::from(self.free_unused(number));
        }
        self.contents
            .iter()
            .for_each(|contents| contents.clear(start, size.0));
        Ok((freed, in_use))
    }

    /// Allocates from a pool, in the order of a stream.
    pub(crate) fn allocate_in_order(
        &mut self,
        size: Bytes,
        pool: PoolId,
        stream: StreamId,
    ) -> Result<u64, Code> {
        let start = self.sim.malloc_async(pool, size, stream)?.0 + self.shift;
        self.next_pooled += 1;
        self.pooled
            .insert((start, self.next_pooled), Pooled { size, freed: false });
        self.add_contents(start, size);
        Ok(start)
    }

    /// Frees memory of a pool, in the order of a stream. Returns the number of the allocation.
    pub(crate) fn free_in_order(&mut self, start: u64, stream: StreamId) -> Result<u64, Code> {
        let last = self
            .pooled
            .range_mut((start, 0)..=(start, u64::MAX))
            .next_back();
        let ((_, number), pooled) = last
            .filter(|(_, pooled)| !pooled.freed)
            .ok_or(Code::InvalidValue)?;
        self.sim.free_async(DevicePtr(start - self.shift), stream)?;
        pooled.freed = true;
        Ok(*number)
    }

    /// Completes the free of a pool allocation. Returns its size.
    pub(crate) fn finish_free(&mut self, start: u64, number: u64) -> Option<Bytes> {
        self.contents
            .iter_mut()
            .for_each(|contents| contents.remove(start));
        self.pooled
            .remove(&(start, number))
            .map(|pooled| pooled.size)
    }

    /// Resources of the device that are not freed. The simulated device also counts a reservation
    /// of its own.
    pub(crate) fn left(&self) -> Leaks {
        Leaks {
            reservations: self.reservations.len() as u64,
            ..self.sim.leaks()
        }
    }

    /// The number of pieces of physical memory.
    pub(crate) fn pages(&self) -> usize {
        self.pages.len()
    }
}

impl From<DeviceError> for Code {
    /// The driver's code for an error of the simulated device.
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

/// The device of a handle of physical memory.
pub(crate) const fn device_of_page(number: u64) -> usize {
    (number >> 48) as usize
}

#[cfg(test)]
mod tests;
