//! [`HostMemory`]: page-locked and managed memory, which the host can access.

use std::{collections::BTreeMap, ptr};

use crate::code::Code;

/// Allocated and registered memory by address.
#[derive(Debug, Default)]
pub(crate) struct HostMemory(BTreeMap<usize, Range>);

const HOST_PAGE: usize = 4096;

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
        let reserve = if let Kind::Managed(_) = kind {
            libc::MAP_NORESERVE
        } else {
            0
        };
        // SAFETY: the mapping is new.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size,
                access,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | reserve,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(Code::OutOfMemory);
        }
        self.0
            .insert(start.expose_provenance(), Range { size, kind });
        Ok(start.expose_provenance())
    }

    pub(crate) fn free(&mut self, start: usize) -> Result<(), Code> {
        match self.0.get(&start) {
            Some(&Range {
                size,
                kind: Kind::Pinned,
            }) => {
                self.unmap(start, size);
                Ok(())
            }
            _ => Err(Code::InvalidValue),
        }
    }

    /// Frees managed memory and returns the address of its charge; `None` for other memory.
    pub(crate) fn free_managed(&mut self, start: usize) -> Option<u64> {
        let &Range {
            size,
            kind: Kind::Managed(charge),
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

    fn unmap(&mut self, start: usize, size: usize) {
        self.0.remove(&start);
        // SAFETY: the mapping has this size, and its entry was just removed.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(start), size) };
    }

    pub(crate) fn register(&mut self, start: usize, size: usize) {
        self.0.insert(
            start,
            Range {
                size,
                kind: Kind::Registered,
            },
        );
    }

    pub(crate) fn unregister(&mut self, start: usize) -> Result<(), Code> {
        self.0
            .get(&start)
            .filter(|range| range.kind == Kind::Registered)
            .ok_or(Code::InvalidValue)?;
        self.0.remove(&start);
        Ok(())
    }

    /// The memory around an address: its start, size and kind.
    pub(crate) fn around(&self, address: usize) -> Option<(usize, usize, Kind)> {
        let (&start, range) = self.0.range(..=address).next_back()?;
        (address - start < range.size).then_some((start, range.size, range.kind))
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
        let is_ours = self
            .around(start)
            .is_some_and(|(.., kind)| kind == Kind::Pinned);
        let pointer = ptr::with_exposed_provenance_mut::<u8>;
        // SAFETY: as the caller promises. Discarded pages of private memory without a file read as
        // zeros.
        unsafe {
            if is_ours
                && first < last
                && libc::madvise(pointer(first).cast(), last - first, libc::MADV_DONTNEED) == 0
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
        let mut host = HostMemory::default();
        let size = 8 * HOST_PAGE;
        let start = host.allocate(size, Kind::Pinned).expect("memory");
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
