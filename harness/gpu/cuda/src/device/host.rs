//! Host memory for copies: pinned by the driver, or mapped by the system.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, RawFd};
use std::{ffi::c_void, io, ptr};

use nix::fcntl::posix_fallocate;

use super::driver::{self, Driver, cuda};
use crate::library::Refusal;
use harness_allocator::device::{DeviceError, HostId, HostMemory, StreamId};
use harness_allocator::units::Bytes;

#[derive(Default)]
pub(super) struct Host {
    held: BTreeMap<u32, Piece>,
    next: u32,
}

struct Piece {
    start: *mut c_void,
    size: usize,
    pinned: bool,
    /// Streams with copies that may be unfinished.
    copying: BTreeSet<StreamId>,
}

impl Host {
    pub(super) fn count(&self) -> u64 {
        self.held.len() as u64
    }

    pub(super) fn take(
        &mut self,
        driver: &Driver,
        size: Bytes,
        memory: &HostMemory,
    ) -> Result<HostId, DeviceError> {
        let refused = |why: String| DeviceError::HostMemory {
            call: memory.call(),
            requested: size,
            why,
        };
        let bytes = usize::try_from(size.0).ok().filter(|bytes| *bytes > 0);
        let bytes = bytes.ok_or_else(|| refused("the size is zero or too large".to_owned()))?;
        let next = self
            .next
            .checked_add(1)
            .ok_or_else(|| refused("all numbers for host memory are used up".to_owned()))?;
        let start = match memory {
            HostMemory::Pinned => {
                let mut start = ptr::null_mut();
                match cuda!(driver, cuMemHostAlloc(&mut start, bytes, 0)) {
                    Ok(()) => start,
                    Err(Refusal {
                        code: driver::OUT_OF_MEMORY,
                        ..
                    }) => {
                        return Err(refused(
                            "the driver cannot pin this much host memory \
                             (CUDA_ERROR_OUT_OF_MEMORY)"
                                .to_owned(),
                        ));
                    }
                    Err(refusal) => return Err(refusal.into()),
                }
            }
            HostMemory::Pageable => map(bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
                .map_err(|error| refused(error.to_string()))?,
            HostMemory::MappedFile { folder } => {
                let folder = folder.clone().unwrap_or_else(std::env::temp_dir);
                let failed = |error: io::Error| {
                    refused(format!("a temporary file in {}: {error}", folder.display()))
                };
                // The file has no name. The mapping keeps its contents alive.
                let file = tempfile::tempfile_in(&folder).map_err(failed)?;
                // Reserves the disk space, so later writes cannot run out of it. A length that is
                // negative is too large.
                posix_fallocate(&file, 0, bytes as libc::off_t)
                    .map_err(|error| failed(error.into()))?;
                map(bytes, libc::MAP_SHARED, file.as_raw_fd()).map_err(failed)?
            }
        };
        let number = std::mem::replace(&mut self.next, next);
        self.held.insert(
            number,
            Piece {
                start,
                size: bytes,
                pinned: memory.is_pinned(),
                copying: BTreeSet::new(),
            },
        );
        Ok(HostId(number))
    }

    pub(super) fn copied(
        &mut self,
        host: HostId,
        len: Bytes,
        stream: StreamId,
    ) -> Result<*mut c_void, DeviceError> {
        let piece = self.held.get_mut(&host.0).ok_or(unknown(host))?;
        if len.0 > piece.size as u64 {
            return Err(DeviceError::HostRange {
                number: host.0,
                copied: len,
                size: Bytes(piece.size as u64),
            });
        }
        piece.copying.insert(stream);
        Ok(piece.start)
    }

    /// Returns the streams that may still copy.
    pub(super) fn copying(&self, host: HostId) -> Result<Vec<StreamId>, DeviceError> {
        self.held
            .get(&host.0)
            .map(|piece| piece.copying.iter().copied().collect())
            .ok_or(unknown(host))
    }

    /// Returns whether copies may be unfinished on the stream.
    pub(super) fn is_copying(&self, stream: StreamId) -> bool {
        self.held
            .values()
            .any(|piece| piece.copying.contains(&stream))
    }

    pub(super) fn free(&mut self, driver: &Driver, host: HostId) -> Result<(), DeviceError> {
        let piece = self.held.get(&host.0).ok_or(unknown(host))?;
        piece.release(driver)?;
        self.held.remove(&host.0);
        Ok(())
    }

    /// Frees everything and ignores errors, when the device is dropped and idle.
    pub(super) fn release(&mut self, driver: &Driver) {
        for (_, piece) in std::mem::take(&mut self.held) {
            let _ = piece.release(driver);
        }
    }
}

impl Piece {
    fn release(&self, driver: &Driver) -> Result<(), Refusal> {
        if self.pinned {
            return cuda!(driver, cuMemFreeHost(self.start));
        }
        // SAFETY: the mapping has this size, and the table drops it. Unmapping a whole mapping
        // cannot fail.
        unsafe { libc::munmap(self.start, self.size) };
        Ok(())
    }
}

const fn unknown(host: HostId) -> DeviceError {
    DeviceError::UnknownHandle {
        kind: "host memory",
        number: host.0,
    }
}

fn map(bytes: usize, flags: i32, file: RawFd) -> io::Result<*mut c_void> {
    // SAFETY: without a requested address, no existing mapping is replaced.
    let start = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            file,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(start)
    }
}
