//! Memory of the host for copies: pinned by the driver, or mapped by the system.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

use super::driver::{self, Driver};
use crate::library::Refusal;
use harness_allocator::device::{DeviceError, HostId, HostMemory, StreamId};
use harness_allocator::units::Bytes;

/// What callers hold.
#[derive(Default)]
pub(super) struct Host {
    held: BTreeMap<u32, Piece>,
    next: u32,
}

struct Piece {
    start: *mut c_void,
    size: usize,
    pinned: bool,
    /// Streams with copies on it that were not waited for, as far as this is known.
    copying: BTreeSet<StreamId>,
}

impl Host {
    /// How many pieces are held.
    pub(super) fn count(&self) -> u64 {
        self.held.len() as u64
    }

    /// Takes memory.
    pub(super) fn take(&mut self, driver: &Driver, size: Bytes, memory: &HostMemory) -> Result<HostId, DeviceError> {
        let refused = |why: String| DeviceError::HostMemory { call: memory.call(), requested: size, why };
        let bytes = usize::try_from(size.0).ok().filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| refused("no host has so much, or so little".to_owned()))?;
        let next = self.next.checked_add(1).ok_or_else(|| refused("every number of host memory was used".to_owned()))?;
        let start = match memory {
            HostMemory::Pinned => {
                let mut start = ptr::null_mut();
                // SAFETY: `start` is a place for the answer; no flag asks for anything that a device may lack.
                match unsafe { driver.allocate_host(&raw mut start, bytes, 0) } {
                    Ok(()) => start,
                    Err(Refusal { code: driver::OUT_OF_MEMORY, .. }) => {
                        return Err(refused("the driver cannot lock so many pages of the host (CUDA_ERROR_OUT_OF_MEMORY)".to_owned()));
                    }
                    Err(refusal) => return Err(refusal.into()),
                }
            }
            HostMemory::Pageable => map(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1).map_err(|error| refused(error.to_string()))?,
            HostMemory::MappedFile { folder } => {
                let folder = folder.clone().unwrap_or_else(std::env::temp_dir);
                let failed = |error: io::Error| refused(format!("a temporary file in {}: {error}", folder.display()));
                // It has no name, or loses it here. What the mapping keeps of it goes with the mapping.
                let file = tempfile::tempfile_in(&folder).map_err(failed)?;
                reserve(file.as_raw_fd(), bytes).map_err(failed)?;
                map(bytes, libc::MAP_SHARED, file.as_raw_fd()).map_err(failed)?
            }
        };
        let number = std::mem::replace(&mut self.next, next);
        self.held.insert(number, Piece { start, size: bytes, pinned: memory.is_pinned(), copying: BTreeSet::new() });
        Ok(HostId(number))
    }

    /// Where the memory is, for a copy of so many bytes on a stream.
    pub(super) fn copied(&mut self, host: HostId, len: Bytes, stream: StreamId) -> Result<*mut c_void, DeviceError> {
        let piece = self.held.get_mut(&host.0).ok_or(unknown(host))?;
        if len.0 > piece.size as u64 {
            return Err(DeviceError::HostRange { number: host.0, copied: len, size: Bytes(piece.size as u64) });
        }
        piece.copying.insert(stream);
        Ok(piece.start)
    }

    /// Streams that may still copy.
    pub(super) fn copying(&self, host: HostId) -> Result<Vec<StreamId>, DeviceError> {
        self.held.get(&host.0).map(|piece| piece.copying.iter().copied().collect()).ok_or(unknown(host))
    }

    /// Gives memory back on which no copy is queued.
    pub(super) fn give_back(&mut self, driver: &Driver, host: HostId) -> Result<(), DeviceError> {
        let piece = self.held.get(&host.0).ok_or(unknown(host))?;
        piece.release(driver)?;
        self.held.remove(&host.0);
        Ok(())
    }

    /// Gives everything back as far as the driver lets it; for the end of the device, when no work is left.
    pub(super) fn release(&mut self, driver: &Driver) {
        for (_, piece) in std::mem::take(&mut self.held) {
            let _ = piece.release(driver);
        }
    }
}

impl Piece {
    fn release(&self, driver: &Driver) -> Result<(), Refusal> {
        if self.pinned {
            // SAFETY: the driver gave it, and it is forgotten once it is given back.
            return unsafe { driver.free_host(self.start) };
        }
        // SAFETY: the mapping was made with this size, nobody else knows it, and it is forgotten. It cannot fail for a whole mapping.
        unsafe { libc::munmap(self.start, self.size) };
        Ok(())
    }
}

const fn unknown(host: HostId) -> DeviceError {
    DeviceError::UnknownHandle { kind: "host memory", number: host.0 }
}

/// New memory that can be read and written.
fn map(bytes: usize, flags: i32, file: RawFd) -> io::Result<*mut c_void> {
    // SAFETY: no address is asked for, so that nothing that is mapped is replaced.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, file, 0) };
    if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start) }
}

/// Takes the room of a file on its disk, so that writing to the mapping cannot run out of it.
fn reserve(file: RawFd, bytes: usize) -> io::Result<()> {
    let bytes = libc::off_t::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: the file is open.
    match unsafe { libc::posix_fallocate(file, 0, bytes) } {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}
