//! [`HostMemory`]: page-locked and managed memory, which the host can access.

use std::{collections::BTreeMap, ptr};

use harness_allocator::units::Bytes;
use harness_gpu_settings::shared_memory::private_part;

use crate::code::Code;

/// Allocated and registered memory by address.
#[derive(Debug, Default)]
pub(crate) struct HostMemory(BTreeMap<usize, Range>);

pub(crate) const HOST_PAGE: usize = 4096;

#[derive(Clone, Copy, Debug)]
struct Range {
    size: usize,
    kind: Kind,
    /// The device to which page-locked memory is charged.
    charged: Option<usize>,
    /// The part of charged memory that the program allocated, and that is its own.
    registered: Bytes,
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
    /// `charged` is the device to which page-locked memory is charged.
    pub(crate) fn allocate(
        &mut self,
        size: usize,
        kind: Kind,
        charged: Option<usize>,
    ) -> Result<usize, Code> {
        let size = size.max(1);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // Memory that is charged to a device may be larger than the memory of the host.
        let reserve = if charged.is_some() || matches!(kind, Kind::Managed(_)) {
            libc::MAP_NORESERVE
        } else {
            0
        };
        // The kernel counts shared memory apart from the process's own memory.
        let sharing = if charged.is_some() {
            libc::MAP_SHARED
        } else {
            libc::MAP_PRIVATE
        };
        // SAFETY: the mapping is new.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size,
                access,
                sharing | libc::MAP_ANONYMOUS | reserve,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(Code::OutOfMemory);
        }
        let range = Range {
            size,
            kind,
            charged,
            registered: Bytes::ZERO,
        };
        self.0.insert(start.expose_provenance(), range);
        Ok(start.expose_provenance())
    }

    /// Frees page-locked memory of this library. Returns the device to which it was charged, and
    /// its size.
    pub(crate) fn free(&mut self, start: usize) -> Result<(Option<usize>, usize), Code> {
        match self.0.get(&start) {
            Some(&Range {
                size,
                kind: Kind::Pinned,
                charged,
                ..
            }) => {
                self.unmap(start, size);
                Ok((charged, size))
            }
            _ => Err(Code::InvalidValue),
        }
    }

    /// Frees managed memory and returns the address of its charge; `None` for other memory.
    pub(crate) fn free_managed(&mut self, start: usize) -> Option<u64> {
        let &Range {
            size,
            kind: Kind::Managed(charge),
            ..
        } = self.0.get(&start)?
        else {
            return None;
        };
        self.unmap(start, size);
        Some(charge)
    }

    /// Frees the managed memory whose charge `is_freed` accepts.
    pub(crate) fn free_all_managed(&mut self, is_freed: impl Fn(u64) -> bool) {
        let freed = self
            .0
            .iter()
            .filter_map(|(&start, range)| match range.kind {
                Kind::Managed(charge) if is_freed(charge) => Some((start, range.size)),
                Kind::Managed(_) | Kind::Pinned | Kind::Registered => None,
            });
        for (start, size) in freed.collect::<Vec<_>>() {
            self.unmap(start, size);
        }
    }

    /// The charged memory that the program allocated itself, without memory that processes share.
    pub(crate) fn registered(&self) -> Bytes {
        self.0.values().map(|range| range.registered).sum()
    }

    fn unmap(&mut self, start: usize, size: usize) {
        self.0.remove(&start);
        // SAFETY: the mapping has this size, and its entry was just removed.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), size) };
    }

    pub(crate) fn register(&mut self, start: usize, size: usize, charged: Option<usize>) {
        self.0.insert(
            start,
            Range {
                size,
                kind: Kind::Registered,
                charged,
                registered: charged.map_or(Bytes::ZERO, |_| private_part(start, size)),
            },
        );
    }

    /// Forgets memory of the program, and returns what [`HostMemory::free`] returns.
    pub(crate) fn unregister(&mut self, start: usize) -> Result<(Option<usize>, usize), Code> {
        let range = *self
            .0
            .get(&start)
            .filter(|range| range.kind == Kind::Registered)
            .ok_or(Code::InvalidValue)?;
        self.0.remove(&start);
        Ok((range.charged, range.size))
    }

    /// Whether the program registered memory around an address.
    pub(crate) fn is_registered(&self, address: usize) -> bool {
        self.around(address)
            .is_some_and(|(.., kind)| kind == Kind::Registered)
    }

    /// The memory around an address: its start, size and kind.
    pub(crate) fn around(&self, address: usize) -> Option<(usize, usize, Kind)> {
        let (start, range) = self.range_around(address)?;
        Some((start, range.size, range.kind))
    }

    fn range_around(&self, address: usize) -> Option<(usize, Range)> {
        let (&start, range) = self.0.range(..=address).next_back()?;
        (address - start < range.size).then_some((start, *range))
    }

    /// Writes zeros. Whole pages of pinned memory are given back to the host, because a program may
    /// copy all its weights there.
    ///
    /// # Safety
    /// The range belongs to the program.
    pub(crate) unsafe fn clear(&self, start: usize, size: usize) {
        let (first, last) = (
            start.next_multiple_of(HOST_PAGE),
            (start + size) / HOST_PAGE * HOST_PAGE,
        );
        let ours = self.range_around(start);
        let ours = ours.filter(|(_, range)| range.kind == Kind::Pinned);
        // To discard pages of shared memory leaves their contents.
        let advice = match ours {
            Some((_, range)) if range.charged.is_some() => libc::MADV_REMOVE,
            _ => libc::MADV_DONTNEED,
        };
        let pointer = ptr::with_exposed_provenance_mut::<u8>;
        // SAFETY: as the caller promises. Discarded pages of private memory without a file read as
        // zeros, and so do removed pages of shared memory.
        unsafe {
            if ours.is_some()
                && first < last
                && libc::madvise(pointer(first).cast(), last - first, advice) == 0
            {
                pointer(start).write_bytes(0, first - start);
                pointer(last).write_bytes(0, start + size - last);
            } else {
                pointer(start).write_bytes(0, size);
            }
        }
    }

    /// The address by which the device reads page-locked or managed memory: its own.
    pub(crate) fn device_pointer(&self, address: usize) -> Result<usize, Code> {
        self.around(address)
            .map(|_| address)
            .ok_or(Code::InvalidValue)
    }

    pub(crate) fn is_pinned(&self, address: usize) -> bool {
        self.around(address)
            .is_some_and(|(.., kind)| !matches!(kind, Kind::Managed(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cleared_pages_of_pinned_memory_are_given_back() {
        clears_pages(None);
    }

    #[test]
    fn cleared_pages_of_memory_that_the_gpu_shares_are_given_back() {
        clears_pages(Some(0));
    }

    fn clears_pages(charged: Option<usize>) {
        let mut host = HostMemory::default();
        let size = 8 * HOST_PAGE;
        let start = host.allocate(size, Kind::Pinned, charged).expect("memory");
        let resident = || {
            let mut pages = [0_u8; 8];
            // SAFETY: the range is mapped, and there is a byte per page.
            unsafe {
                libc::mincore(
                    ptr::with_exposed_provenance_mut(start),
                    size,
                    pages.as_mut_ptr(),
                )
            };
            pages.map(|page| page & 1)
        };
        // SAFETY: this memory has this size.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut::<u8>(start), size)
        };
        bytes.fill(7);
        assert_eq!(resident(), [1; 8]);
        // SAFETY: as above.
        unsafe { host.clear(start + 100, size - 200) };
        assert_eq!(resident(), [1, 0, 0, 0, 0, 0, 0, 1]);
        let is_right = |(at, byte): (usize, &u8)| {
            *byte
                == if (100..size - 100).contains(&at) {
                    0
                } else {
                    7
                }
        };
        assert!(bytes.iter().enumerate().all(is_right));
    }
}
