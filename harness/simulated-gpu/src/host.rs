//! [`HostMemory`]: page-locked memory of the host, which programs ask about by address.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;

use crate::code::Code;

/// Memory that was allocated here or registered, by its first address.
#[derive(Debug, Default)]
pub(crate) struct HostMemory(BTreeMap<usize, Range>);

#[derive(Debug)]
struct Range {
    size: usize,
    /// Of memory that was allocated here.
    layout: Option<Layout>,
}

impl HostMemory {
    /// Zeroed memory in whole pages.
    pub(crate) fn allocate(&mut self, size: usize) -> Result<*mut u8, Code> {
        let layout = Layout::from_size_align(size.max(1), 4096).map_err(|_| Code::OutOfMemory)?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Err(Code::OutOfMemory);
        }
        self.0.insert(start.expose_provenance(), Range { size: layout.size(), layout: Some(layout) });
        Ok(start)
    }

    /// Gives back what [`HostMemory::allocate`] returned.
    pub(crate) fn free(&mut self, start: *mut u8) -> Result<(), Code> {
        let layout = self.0.get(&start.addr()).and_then(|range| range.layout).ok_or(Code::InvalidValue)?;
        self.0.remove(&start.addr());
        // SAFETY: it was allocated with this layout and is forgotten now, so that it is given back once.
        unsafe { dealloc(start, layout) };
        Ok(())
    }

    /// Notes memory of the program as page-locked.
    pub(crate) fn register(&mut self, start: usize, size: usize) {
        self.0.insert(start, Range { size, layout: None });
    }

    /// Forgets memory of the program.
    pub(crate) fn unregister(&mut self, start: usize) -> Result<(), Code> {
        self.0.get(&start).filter(|range| range.layout.is_none()).ok_or(Code::InvalidValue)?;
        self.0.remove(&start);
        Ok(())
    }

    /// Whether an address is page-locked.
    pub(crate) fn contains(&self, address: usize) -> bool {
        self.0.range(..=address).next_back().is_some_and(|(start, range)| address - start < range.size)
    }
}
