//! Files that processes map as shared memory.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::ptr::{self, NonNull};

/// A layout of shared memory.
///
/// # Safety
/// All bytes are valid values of the type, and several processes may change them at the same time.
pub(crate) unsafe trait SharedLayout {}

/// Reserves space for a `T` in a new file and maps it. A file with only a length would end the process with SIGBUS once the disk is full.
pub(crate) fn create<T: SharedLayout>(file: &File) -> io::Result<NonNull<T>> {
    // SAFETY: the call takes a descriptor and two numbers.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size_of::<T>() as libc::off_t) } {
        0 => map(file),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Maps a file that [`create`] made.
pub(crate) fn open<T: SharedLayout>(file: &File) -> io::Result<NonNull<T>> {
    if file.metadata()?.len() == size_of::<T>() as u64 { map(file) } else { Err(io::ErrorKind::InvalidData.into()) }
}

fn map<T: SharedLayout>(file: &File) -> io::Result<NonNull<T>> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the mapping is new and as long as the file.
    let address = unsafe { libc::mmap(ptr::null_mut(), size_of::<T>(), access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    match NonNull::new(address) {
        Some(address) if address.as_ptr() != libc::MAP_FAILED => Ok(address.cast()),
        _ => Err(io::Error::last_os_error()),
    }
}
