//! [`Accounts`]: the device memory that a process holds, charged as a simulated device charges it, and what is left under the limit.

use std::collections::BTreeMap;

use harness_allocator::device::sim::GRANULARITY;
use harness_allocator::units::Bytes;

/// What allocations from pools are rounded to.
const ALIGNMENT: Bytes = Bytes(512);

/// How memory is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// By itself, in whole pages.
    Pages,
    /// From a pool, whose allocations share pages.
    Pooled,
}

/// Memory that was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge {
    kind: Kind,
    bytes: Bytes,
}

/// Physical memory: given back when its handles are released and nothing is mapped to it.
#[derive(Clone, Copy, Debug)]
struct Physical {
    charge: Charge,
    handles: u32,
    mappings: u32,
}

/// What a process holds.
#[derive(Debug, Default)]
pub(crate) struct Accounts {
    limit: Option<Bytes>,
    pages: Bytes,
    pooled: Bytes,
    /// By address.
    allocations: BTreeMap<u64, Charge>,
    /// By handle.
    physical: BTreeMap<u64, Physical>,
    /// Where physical memory is mapped: address to handle.
    mapped: BTreeMap<u64, u64>,
}

impl Accounts {
    pub(crate) fn new(limit: Option<Bytes>) -> Self {
        Self { limit, ..Self::default() }
    }

    pub(crate) fn used(&self) -> Bytes {
        self.pages + self.pooled.checked_round_up(GRANULARITY).unwrap_or(self.pooled)
    }

    /// Free and all memory that the program is told of, given those of the device, and what other processes hold of the limit.
    pub(crate) fn seen(&self, others: Bytes, free: Bytes, total: Bytes) -> (Bytes, Bytes) {
        match self.limit {
            Some(limit) => (free.min(limit.saturating_sub(self.used()).saturating_sub(others)), total.min(limit)),
            None => (free, total),
        }
    }

    /// Charges memory before it is asked for, so that two threads cannot get the same rest; `None` above what other processes leave of the limit.
    pub(crate) fn charge(&mut self, others: Bytes, kind: Kind, size: Bytes) -> Option<Charge> {
        let unit = if kind == Kind::Pages { GRANULARITY } else { ALIGNMENT };
        let charge = Charge { kind, bytes: size.checked_round_up(unit)? };
        let before = *self.sum(kind);
        *self.sum(kind) = Bytes(before.0.checked_add(charge.bytes.0)?);
        if self.limit.is_none_or(|limit| self.used() <= limit.saturating_sub(others)) {
            return Some(charge);
        }
        *self.sum(kind) = before;
        None
    }

    /// Takes a charge back: the memory was refused or given back.
    pub(crate) fn discharge(&mut self, charge: Charge) {
        *self.sum(charge.kind) -= charge.bytes;
    }

    fn sum(&mut self, kind: Kind) -> &mut Bytes {
        match kind {
            Kind::Pages => &mut self.pages,
            Kind::Pooled => &mut self.pooled,
        }
    }

    /// Charged memory has this address now.
    pub(crate) fn place(&mut self, address: u64, charge: Charge) {
        // An address is handed out again only after its memory was given back, perhaps by a function that is not wrapped.
        if let Some(before) = self.allocations.insert(address, charge) {
            self.discharge(before);
        }
    }

    /// The memory at an address is about to be given back; `None` where it was not charged.
    pub(crate) fn take(&mut self, address: u64) -> Option<Charge> {
        let charge = self.allocations.remove(&address)?;
        self.discharge(charge);
        Some(charge)
    }

    /// The memory was not given back after all.
    pub(crate) fn put_back(&mut self, address: u64, charge: Charge) {
        *self.sum(charge.kind) += charge.bytes;
        self.place(address, charge);
    }

    /// The memory at an address is known now to be so large: what a driver chose is charged, though it were above the limit.
    pub(crate) fn correct(&mut self, address: u64, size: Bytes) {
        if let Some(charge) = self.take(address) {
            let bytes = size.checked_round_up(GRANULARITY).unwrap_or(charge.bytes);
            self.put_back(address, Charge { bytes, ..charge });
        }
    }

    /// Charged memory has this handle now.
    pub(crate) fn create(&mut self, handle: u64, charge: Charge) {
        if let Some(before) = self.physical.insert(handle, Physical { charge, handles: 1, mappings: 0 }) {
            self.discharge(before.charge);
        }
    }

    /// One more handle.
    pub(crate) fn retain(&mut self, handle: u64) {
        self.physical.entry(handle).and_modify(|physical| physical.handles += 1);
    }

    /// One handle less. Tells whether memory was given back.
    pub(crate) fn release(&mut self, handle: u64) -> bool {
        self.physical.entry(handle).and_modify(|physical| physical.handles = physical.handles.saturating_sub(1));
        self.give_back_unused(handle)
    }

    pub(crate) fn map(&mut self, address: u64, handle: u64) {
        if let Some(physical) = self.physical.get_mut(&handle) {
            physical.mappings += 1;
            self.mapped.insert(address, handle);
        }
    }

    /// Tells how many pieces of memory were given back.
    pub(crate) fn unmap(&mut self, address: u64, size: u64) -> u64 {
        let inside: Vec<(u64, u64)> =
            self.mapped.range(address..address.saturating_add(size)).map(|(&address, &handle)| (address, handle)).collect();
        let mut given_back = 0;
        for (address, handle) in inside {
            self.mapped.remove(&address);
            self.physical.entry(handle).and_modify(|physical| physical.mappings -= 1);
            given_back += u64::from(self.give_back_unused(handle));
        }
        given_back
    }

    fn give_back_unused(&mut self, handle: u64) -> bool {
        let unused = self.physical.get(&handle).filter(|physical| physical.handles == 0 && physical.mappings == 0).copied();
        if let Some(physical) = unused {
            self.physical.remove(&handle);
            self.discharge(physical.charge);
        }
        unused.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts() -> Accounts {
        Accounts::new(Some(Bytes::mib(8)))
    }

    #[test]
    fn whole_pages_are_charged_and_nothing_above_the_limit() {
        let mut accounts = accounts();
        let charges = [Bytes(1), Bytes::mib(3)].map(|size| accounts.charge(Bytes::ZERO, Kind::Pages, size).expect("it fits"));
        assert_eq!(accounts.used(), Bytes::mib(6));
        assert_eq!(accounts.charge(Bytes::ZERO, Kind::Pages, Bytes::mib(3)), None);
        assert_eq!(accounts.charge(Bytes::ZERO, Kind::Pages, Bytes(u64::MAX)), None);
        assert_eq!(accounts.used(), Bytes::mib(6), "what was refused is not charged");
        accounts.discharge(charges[1]);
        assert!(accounts.charge(Bytes::ZERO, Kind::Pages, Bytes::mib(6)).is_some());
    }

    #[test]
    fn allocations_of_pools_share_pages() {
        let mut accounts = accounts();
        for _ in 0..4 {
            assert!(accounts.charge(Bytes::ZERO, Kind::Pooled, Bytes::kib(500)).is_some());
        }
        assert_eq!(accounts.used(), Bytes::mib(2));
        assert!(accounts.charge(Bytes::ZERO, Kind::Pooled, Bytes::kib(500)).is_some());
        assert_eq!(accounts.used(), Bytes::mib(4));
    }

    #[test]
    fn the_program_sees_the_limit_and_never_more_than_the_device_has() {
        let mut accounts = accounts();
        assert!(accounts.charge(Bytes::ZERO, Kind::Pages, Bytes::mib(2)).is_some());
        assert_eq!(accounts.seen(Bytes::ZERO, Bytes::gib(70), Bytes::gib(80)), (Bytes::mib(6), Bytes::mib(8)));
        assert_eq!(accounts.seen(Bytes::ZERO, Bytes::mib(1), Bytes::gib(80)), (Bytes::mib(1), Bytes::mib(8)));
        assert_eq!(Accounts::new(None).seen(Bytes::ZERO, Bytes::gib(70), Bytes::gib(80)), (Bytes::gib(70), Bytes::gib(80)));
    }

    #[test]
    fn what_other_processes_hold_is_not_left_of_the_limit() {
        let mut accounts = accounts();
        assert_eq!(accounts.charge(Bytes::mib(6), Kind::Pages, Bytes::mib(3)), None);
        assert!(accounts.charge(Bytes::mib(6), Kind::Pages, Bytes::mib(2)).is_some());
        assert_eq!(accounts.charge(Bytes(u64::MAX), Kind::Pages, Bytes::mib(1)), None);
        assert_eq!(accounts.seen(Bytes::mib(4), Bytes::gib(70), Bytes::gib(80)), (Bytes::mib(2), Bytes::mib(8)));
        assert_eq!(accounts.seen(Bytes::mib(7), Bytes::gib(70), Bytes::gib(80)), (Bytes::ZERO, Bytes::mib(8)));
    }

    #[test]
    fn memory_that_could_not_be_given_back_is_charged_again() {
        let mut accounts = accounts();
        let charge = accounts.charge(Bytes::ZERO, Kind::Pages, Bytes::mib(2)).expect("it fits");
        accounts.place(0x1000, charge);
        assert_eq!((accounts.take(0x1000), accounts.used()), (Some(charge), Bytes::ZERO));
        accounts.put_back(0x1000, charge);
        assert_eq!((accounts.used(), accounts.take(0x2000), accounts.take(0x1000)), (Bytes::mib(2), None, Some(charge)));
    }

    #[test]
    fn memory_whose_size_the_driver_chose_is_charged_by_that() {
        let mut accounts = accounts();
        let charge = accounts.charge(Bytes::ZERO, Kind::Pages, Bytes::mib(2)).expect("it fits");
        accounts.place(0x1000, charge);
        accounts.correct(0x1000, Bytes::mib(5));
        assert_eq!(accounts.used(), Bytes::mib(6));
        accounts.correct(0x9000, Bytes::mib(5));
        assert!(accounts.take(0x1000).is_some() && accounts.used() == Bytes::ZERO);
    }

    #[test]
    fn physical_memory_goes_with_its_last_handle_and_its_last_mapping() {
        let mut accounts = accounts();
        let charge = accounts.charge(Bytes::ZERO, Kind::Pages, Bytes::mib(2)).expect("it fits");
        accounts.create(7, charge);
        accounts.map(0x20_0000, 7);
        accounts.retain(7);
        assert!(!accounts.release(7) && !accounts.release(7), "it is still mapped");
        assert_eq!((accounts.used(), accounts.unmap(0, 0x40_0000), accounts.used()), (Bytes::mib(2), 1, Bytes::ZERO));
    }
}
