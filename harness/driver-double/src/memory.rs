//! What all parts of the double share: the driver's codes, the size of a granule, and memory of the host.

use std::ptr;

/// Device memory is charged in whole multiples of this.
pub(crate) const GRANULARITY: u64 = 2 << 20;

/// Codes of the CUDA driver API that the double answers with.
pub(crate) mod code {
    pub(crate) const INVALID_VALUE: u32 = 1;
    pub(crate) const OUT_OF_MEMORY: u32 = 2;
    pub(crate) const NOT_INITIALIZED: u32 = 3;
    pub(crate) const NO_DEVICE: u32 = 100;
    pub(crate) const INVALID_DEVICE: u32 = 101;
    pub(crate) const INVALID_CONTEXT: u32 = 201;
    pub(crate) const INVALID_PTX: u32 = 218;
    pub(crate) const INVALID_HANDLE: u32 = 400;
    pub(crate) const NOT_FOUND: u32 = 500;
    pub(crate) const NOT_READY: u32 = 600;
    pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
    pub(crate) const MISALIGNED_ADDRESS: u32 = 716;
    pub(crate) const NOT_SUPPORTED: u32 = 801;
}

/// Address space for `size` bytes, zeroed when touched.
pub(crate) fn map(size: u64) -> Result<u64, u32> {
    let size = usize::try_from(size).map_err(|_| code::OUT_OF_MEMORY)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new anonymous mapping wherever the system likes; it overlaps nothing.
    let address = unsafe { libc::mmap(ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if address == libc::MAP_FAILED { Err(code::OUT_OF_MEMORY) } else { Ok(address as u64) }
}

/// Gives back what [`map`] returned for `size`, or addresses of a reservation.
pub(crate) fn unmap(address: u64, size: u64) {
    // SAFETY: the mapping is the double's, of this size, and its owner has just forgotten it.
    let answer = unsafe { libc::munmap(address as *mut libc::c_void, size as usize) };
    if answer != 0 {
        eprintln!("driver double: munmap failed: {}", std::io::Error::last_os_error());
    }
}
