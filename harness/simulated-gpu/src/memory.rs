//! [`DeviceMemory`]: the memory of one device, charged and addressed by the simulated device of `harness-allocator`. What other processes hold of the
//! device is told before each change, and cannot be had.

use std::collections::BTreeMap;

use harness_allocator::device::sim::{AddressOrder as Order, Completion, CostModel, SimConfig, SimDevice};
use harness_allocator::device::{Device as _, DevicePtr, MappedDevice as _, MemoryRange, TestDevice as _};
use harness_allocator::units::Bytes;

use crate::code::Code;
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
    /// Physical memory by its number, which is the driver's handle.
    pages: BTreeMap<u64, Page>,
    next_page: u64,
    /// Where it is mapped: start to the number of the memory.
    mapped: BTreeMap<u64, u64>,
}

/// Physical memory: given back when its handle is released and nothing is mapped to it.
#[derive(Debug)]
struct Page {
    size: Bytes,
    /// Handles and mappings.
    references: u32,
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
        let config = SimConfig {
            total: settings.memory,
            context_overhead: settings.context_overhead,
            cost: CostModel::FREE_OF_CHARGE,
            completion: Completion::OnSynchronize,
            free_synchronizes: false,
            addresses: match settings.addresses {
                AddressOrder::Up => Order::Up,
                AddressOrder::Down => Order::Down,
                AddressOrder::Reuse => Order::Reuse,
            },
        };
        let shift = SHIFT + index as u64 * ADDRESSES;
        let (allocations, pages, mapped) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { sim: SimDevice::new(config), index, has_context: false, shift, allocations, pages, next_page: 1, mapped }
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
        self.sim.set_pressure(held_by_others).map_or(Err(Code::OutOfMemory), |_| Ok(()))
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
        let start = self.sim.malloc(size).map_err(|_| Code::OutOfMemory)?.0 + self.shift;
        self.allocations.insert(start, size);
        Ok(start)
    }

    pub(crate) fn free(&mut self, start: u64) -> Result<Bytes, Code> {
        let size = self.allocations.remove(&start).ok_or(Code::InvalidValue)?;
        self.sim.free(DevicePtr(start - self.shift)).map_err(|_| Code::InvalidValue)?;
        Ok(size)
    }

    /// The allocation or mapping that an address lies in: start and size.
    pub(crate) fn range_of(&self, address: u64) -> Option<(u64, Bytes)> {
        let allocation = self.allocations.range(..=address).next_back().map(|(&start, &size)| (start, size));
        let mapping = || self.mapped.range(..=address).next_back().map(|(&start, number)| (start, self.pages[number].size));
        let around = |range: &(u64, Bytes)| address - range.0 < range.1.0;
        allocation.filter(around).or_else(|| mapping().filter(around))
    }

    /// Addresses without memory.
    pub(crate) fn reserve(&mut self, size: Bytes) -> Result<u64, Code> {
        let start =
            self.sim.reserve(size).map_err(|error| if error.is_out_of_memory() { Code::OutOfMemory } else { Code::InvalidValue })?;
        // Reservations beyond the addresses of this device would lie on the next one.
        if start.0 + size.0 > ADDRESSES - SHIFT {
            return Err(Code::OutOfMemory);
        }
        Ok(start.0 + self.shift)
    }

    pub(crate) fn unreserve(&mut self, start: u64) -> Result<(), Code> {
        self.sim.unreserve(DevicePtr(start - self.shift)).map_err(|_| Code::InvalidValue)
    }

    /// Physical memory without addresses: its handle.
    pub(crate) fn create(&mut self, size: Bytes) -> Result<u64, Code> {
        self.sim.create_page(size).map_err(|error| if error.is_out_of_memory() { Code::OutOfMemory } else { Code::InvalidValue })?;
        let number = (self.index as u64) << 48 | self.next_page;
        self.next_page += 1;
        self.pages.insert(number, Page { size, references: 1 });
        Ok(number)
    }

    /// Releases a handle, or with a mapping's reference the memory behind it. Tells whether the memory was given back.
    pub(crate) fn release(&mut self, number: u64) -> Result<bool, Code> {
        let page = self.pages.get_mut(&number).ok_or(Code::InvalidValue)?;
        page.references -= 1;
        let (size, gone) = (page.size, page.references == 0);
        if gone {
            self.pages.remove(&number);
            self.sim.release_page(size);
        }
        Ok(gone)
    }

    /// One more handle of the memory mapped at an address.
    pub(crate) fn retain(&mut self, address: u64) -> Result<u64, Code> {
        let (_, &number) = self.mapped.range(..=address).next_back().ok_or(Code::InvalidValue)?;
        self.pages.get_mut(&number).ok_or(Code::InvalidValue)?.references += 1;
        Ok(number)
    }

    /// Puts all of a piece of physical memory behind addresses.
    pub(crate) fn map(&mut self, start: u64, size: Bytes, number: u64) -> Result<(), Code> {
        let page = self.pages.get_mut(&number).filter(|page| page.size == size).ok_or(Code::InvalidValue)?;
        let range = MemoryRange::new(DevicePtr(start - self.shift), size);
        self.sim.map_page(range).map_err(|_| Code::InvalidValue)?;
        page.references += 1;
        self.mapped.insert(start, number);
        Ok(())
    }

    /// Takes the memory from behind addresses. Returns how many pieces of it were given back.
    pub(crate) fn unmap(&mut self, start: u64, size: Bytes) -> Result<u64, Code> {
        let range = MemoryRange::new(DevicePtr(start - self.shift), size);
        self.sim.unmap_pages(range).map_err(|_| Code::InvalidValue)?;
        let inside: Vec<(u64, u64)> = self.mapped.range(start..start + size.0).map(|(&start, &number)| (start, number)).collect();
        let mut gone = 0;
        for (start, number) in inside {
            self.mapped.remove(&start);
            gone += u64::from(self.release(number)?);
        }
        Ok(gone)
    }
}

/// The device that a handle of physical memory is of.
pub(crate) const fn device_of_page(number: u64) -> usize {
    (number >> 48) as usize
}
