//! [`HostMemory`]: page-locked and managed memory, which the host can access.

use std::{collections::BTreeMap, ptr};

use crate::code::Code;

/// Allocated and registered memory by address.
#[derive(Debug, Default)]
pub(crate) struct HostMemory(BTreeMap<usize, Range>);

#[derive(Clone, Copy, Debug)]
struct Range {
    size: usize,
    kind: Kind,
}

/// The origin of page-locked or managed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Page-locked memory of this library.
    Pinned,
    /// Page-locked memory of the program.
    Registered,
    /// Managed memory. It is charged as the device allocation at this address.
    Managed(u64),
}

impl HostMemory {
    pub(crate) fn allocate(&mut self, size: usize, kind: Kind) -> Result<usize, Code> {
        let size = size.max(1);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // Managed memory may be larger than the memory of the host.
        let reserve = if let Kind::Managed(_) = kind { libc::MAP_NORESERVE } else { 0 };
        // SAFETY: the mapping is new.
        let start = unsafe { libc::mmap(ptr::null_mut(), size, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | reserve, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(Code::OutOfMemory);
        }
        self.0.insert(start.expose_provenance(), Range { size, kind });
        Ok(start.expose_provenance())
    }

    pub(crate) fn free(&mut self, start: usize) -> Result<(), Code> {
        match self.0.get(&start) {
            Some(&Range { size, kind: Kind::Pinned }) => {
                self.unmap(start, size);
                Ok(())
            }
            _ => Err(Code::InvalidValue),
        }
    }

    /// Frees managed memory and returns the address of its charge; `None` for other memory.
    pub(crate) fn free_managed(&mut self, start: usize) -> Option<u64> {
        let &Range { size, kind: Kind::Managed(charge) } = self.0.get(&start)? else { return None };
        self.unmap(start, size);
        Some(charge)
    }

    fn unmap(&mut self, start: usize, size: usize) {
        self.0.remove(&start);
        // SAFETY: the mapping has this size, and its entry was just removed.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), size) };
    }

    pub(crate) fn register(&mut self, start: usize, size: usize) {
        self.0.insert(start, Range { size, kind: Kind::Registered });
    }

    pub(crate) fn unregister(&mut self, start: usize) -> Result<(), Code> {
        self.0.get(&start).filter(|range| range.kind == Kind::Registered).ok_or(Code::InvalidValue)?;
        self.0.remove(&start);
        Ok(())
    }

    /// The memory around an address: its start, size and kind.
    pub(crate) fn around(&self, address: usize) -> Option<(usize, usize, Kind)> {
        let (&start, range) = self.0.range(..=address).next_back()?;
        (address - start < range.size).then_some((start, range.size, range.kind))
    }

    /// The address by which the device reads page-locked or managed memory: its own.
    pub(crate) fn device_pointer(&self, address: usize) -> Result<usize, Code> {
        self.around(address).map(|_| address).ok_or(Code::InvalidValue)
    }

    pub(crate) fn is_pinned(&self, address: usize) -> bool {
        self.around(address).is_some_and(|(.., kind)| !matches!(kind, Kind::Managed(_)))
    }
}
