//! [`Backing`]: the contents of a device's memory in host memory, for [`Values::Cpu`].
//!
//! [`Values::Cpu`]: harness_gpu_settings::settings::Values::Cpu

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::fs::MetadataExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{collections::BTreeMap, io, ptr};

use harness_allocator::units::Bytes;

/// Changes whenever contents are unmapped.
#[unsafe(no_mangle)]
pub(crate) static harness_values_generation: AtomicU64 = AtomicU64::new(0);

/// The contents of a device: a file in memory, which other processes can open. An address is an
/// offset in it.
#[derive(Debug)]
pub(crate) struct Backing {
    file: File,
    /// The address of the file's start.
    base: u64,
    /// Mapped ranges by start.
    ranges: BTreeMap<u64, Mapped>,
}

/// Host memory with the contents of a range, or of another process's range.
#[derive(Debug)]
struct Mapped {
    host: usize,
    size: u64,
    is_own: bool,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let before = self.host % PAGE;
        // SAFETY: the mapping begins with this page and has this size, and its entry is gone.
        unsafe {
            libc::munmap(
                ptr::with_exposed_provenance_mut(self.host - before),
                self.size as usize + before,
            )
        };
    }
}

/// The unit of mappings. Parts of a file that share a page have it in both of their mappings.
const PAGE: usize = 4096;

/// Maps a part of a file. Pages use memory once they are written or read.
fn map(file: &File, offset: u64, size: u64) -> io::Result<usize> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
    let before = offset % PAGE as u64;
    // SAFETY: the mapping is new.
    let start = unsafe {
        libc::mmap(
            ptr::null_mut(),
            (size + before) as usize,
            access,
            flags,
            file.as_raw_fd(),
            (offset - before) as libc::off_t,
        )
    };
    if start == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(start.expose_provenance() + before as usize)
    }
}

impl Backing {
    /// The contents of a device with addresses from `base` to `base + size`.
    pub(crate) fn new(base: u64, size: u64) -> io::Result<Self> {
        // SAFETY: the name is a C string, and the descriptor is new.
        let file = unsafe {
            match libc::memfd_create(c"simulated-gpu".as_ptr(), libc::MFD_CLOEXEC) {
                -1 => return Err(io::Error::last_os_error()),
                descriptor => File::from_raw_fd(descriptor),
            }
        };
        file.set_len(size)?;
        Ok(Self {
            file,
            base,
            ranges: BTreeMap::new(),
        })
    }

    pub(crate) fn add(&mut self, start: u64, size: u64) {
        if let Ok(host) = map(&self.file, start - self.base, size) {
            self.ranges.insert(
                start,
                Mapped {
                    host,
                    size,
                    is_own: true,
                },
            );
        }
    }

    /// Adds the range of another process, which starts at an address there.
    pub(crate) fn add_of(
        &mut self,
        start: u64,
        size: u64,
        (process, descriptor, address): (u64, u64, u64),
    ) -> io::Result<()> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/{process}/fd/{descriptor}"))?;
        // The devices of both processes have equal bases.
        let host = map(&file, address - self.base, size)?;
        self.ranges.insert(
            start,
            Mapped {
                host,
                size,
                is_own: false,
            },
        );
        Ok(())
    }

    pub(crate) fn remove(&mut self, start: u64) {
        harness_values_generation.fetch_add(1, Ordering::Relaxed);
        if let Some(range) = self.ranges.remove(&start).filter(|range| range.is_own) {
            self.clear(start, range.size);
        }
    }

    /// Frees the host memory of a range, which reads as zeros afterwards.
    pub(crate) fn clear(&self, start: u64, size: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the descriptor is open. A failure leaves old contents, which a device may do too.
        unsafe {
            libc::fallocate(
                self.file.as_raw_fd(),
                mode,
                (start - self.base) as libc::off_t,
                size as libc::off_t,
            )
        };
    }

    /// The range around an address: start, size, host address.
    pub(crate) fn around(&self, address: u64) -> Option<(u64, u64, usize)> {
        let (&start, range) = self.ranges.range(..=address).next_back()?;
        (address - start < range.size).then_some((start, range.size, range.host))
    }

    pub(crate) fn descriptor(&self) -> u64 {
        self.file.as_raw_fd() as u64
    }

    /// The host memory in use.
    pub(crate) fn in_use(&self) -> Bytes {
        Bytes(
            self.file
                .metadata()
                .map_or(0, |metadata| 512 * metadata.blocks()),
        )
    }
}
