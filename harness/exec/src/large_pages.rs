//! Large pages for this program's own code, for one that makes very many copies of itself ([`crate::forked`]).
//!
//! What is mapped from a file each copy has to map anew, 16 pages at a time, and to let go at its end; anonymous large pages it has from its first moment. So the code is
//! moved to such pages at its own addresses, as Node.js does for other reasons (`--use-largepages`, <https://nodejs.org/api/cli.html#--use-largepagesmode>).

use std::ops::Range;
use std::path::Path;
use std::{fs, io, ptr};

use libc::{c_int, c_void};

/// A large page of x86-64, and of ARM where pages have 4 KiB (<https://docs.kernel.org/admin-guide/mm/transhuge.html>).
const LARGE: usize = 2 << 20;

/// A part of the program as the system has mapped it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapped {
    addresses: Range<usize>,
    protection: c_int,
}

/// Moves this program's code and constants to large pages, as far as they fill such pages. Where the system does not let it, or has no large pages left, nothing is lost but
/// time. Done once, it holds for all copies.
///
/// # Errors
/// What the system says. What was moved by then stays so.
pub fn use_for_code() -> io::Result<()> {
    let program = fs::read_link("/proc/self/exe")?;
    mapped(&fs::read_to_string("/proc/self/maps")?, &program).iter().try_for_each(move_to_large_pages)
}

/// The parts of a program that nothing writes to, as `/proc/PID/maps` lists them (<https://man7.org/linux/man-pages/man5/proc_pid_maps.5.html>), in whole large pages.
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
        (Path::new(path) == program && !addresses.is_empty()).then_some(Mapped { addresses, protection })
    };
    maps.lines().filter_map(part).collect()
}

fn move_to_large_pages(part: &Mapped) -> io::Result<()> {
    let (start, size) = (part.addresses.start as *mut c_void, part.addresses.len());
    let (anonymous, writable) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the new memory is this function's own until it takes the place of the part, which has the same size, the same bytes and the same protection: whoever
    // runs or reads it, this function too, does not see the difference. The part is readable, and nobody writes to it. Where another thread comes to it while the system
    // exchanges the two, it waits for the lock of the address space, under which that is one change.
    unsafe {
        let room = libc::mmap(ptr::null_mut(), size + LARGE, writable, anonymous, -1, 0);
        if room == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let copy = room.byte_add(room.align_offset(LARGE));
        // A system that has no large pages for it gives it small ones.
        libc::madvise(copy, size, libc::MADV_HUGEPAGE);
        ptr::copy_nonoverlapping(start.cast::<u8>().cast_const(), copy.cast::<u8>(), size);
        let moved = libc::mprotect(copy, size, part.protection) == 0
            && libc::mremap(copy, size, size, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, start) != libc::MAP_FAILED;
        let error = io::Error::last_os_error();
        // What moved away is no part of it any more; the rest is.
        libc::munmap(room, size + LARGE);
        if moved { Ok(()) } else { Err(error) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use std::os::fd::AsRawFd as _;

    use super::*;
    use crate::forked::{Forked, fork, leave};
    use crate::process::End;

    #[test]
    fn the_parts_of_the_program_that_nobody_writes_to_are_found() {
        let maps = "\
555555400000-555555900000 r--p 00000000 fe:00 12 /usr/bin/program
555555900000-555556b00000 r-xp 00500000 fe:00 12 /usr/bin/program
555556b00000-555557b00000 rw-p 01700000 fe:00 12 /usr/bin/program
7ffff7c00000-7ffff7e00000 r-xp 00000000 fe:00 13 /usr/lib/libc.so.6
7ffff7fc0000-7ffff7fc2000 r-xp 00000000 00:00 0 [vdso]
7ffff7fc2000-7ffff7fc4000 rw-p 00000000 00:00 0
";
        let found = mapped(maps, Path::new("/usr/bin/program"));
        let code = libc::PROT_READ | libc::PROT_EXEC;
        let expected = [(0x5555_5540_0000..0x5555_5580_0000, libc::PROT_READ), (0x5555_55a0_0000..0x5555_56a0_0000, code)];
        assert_eq!(found, expected.map(|(addresses, protection)| Mapped { addresses, protection }));
        assert_eq!(mapped(maps, Path::new("/usr/bin/other")), []);
    }

    #[test]
    fn a_part_has_the_same_bytes_behind_the_move_and_is_no_part_of_the_file_any_more() {
        let bytes: Vec<u8> = (0..3 * LARGE).map(|at| (at % 251) as u8).collect();
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &bytes).unwrap();
        // SAFETY: new memory, which nobody else knows of.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes.len(), libc::PROT_READ, libc::MAP_PRIVATE, file.as_file().as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let parts = || mapped(&fs::read_to_string("/proc/self/maps").unwrap(), file.path());
        let part = parts().pop().unwrap();
        assert!(part.addresses.len() >= 2 * LARGE, "{part:?}");
        move_to_large_pages(&part).unwrap();
        assert_eq!(parts(), []);
        // SAFETY: the memory from above, part of which was moved to other pages at its own addresses.
        assert!(unsafe { std::slice::from_raw_parts(start.cast::<u8>().cast_const(), bytes.len()) } == bytes);
        // SAFETY: nobody reads it any more.
        unsafe { libc::munmap(start, bytes.len()) };
    }

    #[test]
    fn a_program_goes_on_with_its_code_on_other_pages() {
        match fork().unwrap() {
            Forked::Copy => {
                let code =
                    use_for_code().and_then(|()| Ok(mapped(&fs::read_to_string("/proc/self/maps")?, &fs::read_link("/proc/self/exe")?)));
                leave(if code.is_ok_and(|left| left.is_empty()) { 7 } else { 1 });
            }
            Forked::Original(copied) => assert_eq!(copied.wait().unwrap(), End::Code(7)),
        }
    }
}
