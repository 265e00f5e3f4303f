//! Moves this program's code to large pages, for programs that fork many copies of themselves
//! ([`crate::forked`]).
//!
//! Each fork faults file-backed pages in again, 16 pages at a time, and unmaps them when it ends.
//! Anonymous large pages need neither. So the code is moved to such pages at its own addresses, as
//! Node.js does for other reasons (`--use-largepages`,
//! <https://nodejs.org/api/cli.html#--use-largepagesmode>).

use std::{fs, io, ops::Range, path::Path, ptr, sync::Once};

use libc::{c_int, c_void};

/// The size of a large page on x86-64, and on ARM with 4 KiB pages
/// (<https://docs.kernel.org/admin-guide/mm/transhuge.html>).
const LARGE: usize = 2 << 20;

/// A mapping of the program's file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapped {
    addresses: Range<usize>,
    protection: c_int,
}

/// Moves this program's code and constants to large pages, where they fill whole ones. If the
/// system refuses or has no large pages left, the program only runs slower. The first call serves
/// all later copies; the others wait for it and do nothing.
pub fn use_for_code() {
    static MOVED: Once = Once::new();
    // Without large pages, copies only take longer.
    MOVED.call_once(|| drop(move_code()));
}

/// Fails if a system call fails. The mappings moved before it stay on large pages.
fn move_code() -> io::Result<()> {
    let program = fs::read_link("/proc/self/exe")?;
    mapped(&fs::read_to_string("/proc/self/maps")?, &program)
        .iter()
        .try_for_each(move_to_large_pages)
}

/// Returns the read-only mappings of a program, as `/proc/PID/maps` lists them
/// (<https://man7.org/linux/man-pages/man5/proc_pid_maps.5.html>), cut to whole large pages.
fn mapped(maps: &str, program: &Path) -> Vec<Mapped> {
    let part = |line: &str| {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let protection = match words.next()? {
            "r-xp" => libc::PROT_READ | libc::PROT_EXEC,
            "r--p" => libc::PROT_READ,
            _ => return None,
        };
        let path = words.nth(3)?;
        let address = |text| usize::from_str_radix(text, 16).ok();
        let addresses = address(start)?.next_multiple_of(LARGE)..address(end)? / LARGE * LARGE;
        (Path::new(path) == program && !addresses.is_empty()).then_some(Mapped {
            addresses,
            protection,
        })
    };
    maps.lines().filter_map(part).collect()
}

fn move_to_large_pages(part: &Mapped) -> io::Result<()> {
    let (start, size) = (part.addresses.start as *mut c_void, part.addresses.len());
    let (anonymous, writable) = (
        libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        libc::PROT_READ | libc::PROT_WRITE,
    );
    // SAFETY: the new memory belongs to this function until it replaces the old mapping, with the
    // same size, bytes and protection. So code that runs in it or reads it, including this
    // function, sees no difference. The old mapping is readable and never written. A thread that
    // touches it during the exchange waits for the lock of the address space.
    unsafe {
        let room = libc::mmap(ptr::null_mut(), size + LARGE, writable, anonymous, -1, 0);
        if room == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let before = room.align_offset(LARGE);
        let copy = room.byte_add(before);
        // Only the copy stays mapped, so nothing is left to unmap where it was: other threads may
        // map memory there at once.
        if before > 0 {
            libc::munmap(room, before);
        }
        libc::munmap(copy.byte_add(size), LARGE - before);
        // A system without large pages uses small ones.
        libc::madvise(copy, size, libc::MADV_HUGEPAGE);
        ptr::copy_nonoverlapping(start.cast::<u8>().cast_const(), copy.cast::<u8>(), size);
        if libc::mprotect(copy, size, part.protection) == 0
            && libc::mremap(
                copy,
                size,
                size,
                libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
                start,
            ) != libc::MAP_FAILED
        {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        libc::munmap(copy, size);
        Err(error)
    }
}

#[cfg(test)]
mod tests;
