//! Files that processes map as shared memory.

use std::ptr::{self, NonNull};
use std::{fs::File, io, ops::Deref, os::fd::AsRawFd as _};

use nix::fcntl::posix_fallocate;

/// A layout of shared memory.
///
/// # Safety
/// All bytes are valid values of the type, also those that several threads and processes change at
/// the same time.
pub unsafe trait SharedLayout {}

#[derive(Debug)]
pub struct Mapped<T: SharedLayout>(NonNull<T>);

// SAFETY: the mapping belongs to the process, not to a thread, and threads may share the layout.
unsafe impl<T: SharedLayout> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: SharedLayout> Sync for Mapped<T> {}

impl<T: SharedLayout> Mapped<T> {
    /// Reserves space for a `T` in a file and maps it; new space contains zeros. A file with only a
    /// length would end the process with SIGBUS once the disk is full.
    pub fn create(file: &File) -> io::Result<Self> {
        posix_fallocate(file, 0, size_of::<T>() as libc::off_t)?;
        Self::map(file)
    }

    pub(crate) fn open(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() == size_of::<T>() as u64 {
            Self::map(file)
        } else {
            Err(io::ErrorKind::InvalidData.into())
        }
    }

    fn map(file: &File) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the mapping is new and as long as the file.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size_of::<T>(),
                access,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(address) {
            Some(address) if address.as_ptr() != libc::MAP_FAILED => Ok(Self(address.cast())),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl<T: SharedLayout> Deref for Mapped<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the mapping is page-aligned, as large as a `T`, and lives as long as `self`.
        unsafe { self.0.as_ref() }
    }
}

impl<T: SharedLayout> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: `self` owns the mapping, and no reference to it is left.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<T>()) };
    }
}
