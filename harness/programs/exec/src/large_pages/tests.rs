#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::forked::{Forked, fork, leave};
use crate::process::End;

#[test]
fn the_read_only_mappings_of_the_program_are_found() {
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
    let expected = [
        (0x5555_5540_0000..0x5555_5580_0000, libc::PROT_READ),
        (0x5555_55a0_0000..0x5555_56a0_0000, code),
    ];
    assert_eq!(
        found,
        expected.map(|(addresses, protection)| Mapped {
            addresses,
            protection
        })
    );
    assert_eq!(mapped(maps, Path::new("/usr/bin/other")), []);
}

#[test]
fn a_moved_mapping_keeps_its_bytes_and_is_anonymous() {
    let bytes: Vec<u8> = (0..3 * LARGE).map(|at| (at % 251) as u8).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), &bytes).unwrap();
    // SAFETY: new memory, known to nothing else.
    let start = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes.len(),
            libc::PROT_READ,
            libc::MAP_PRIVATE,
            file.as_file().as_raw_fd(),
            0,
        )
    };
    assert_ne!(start, libc::MAP_FAILED);
    let parts = || mapped(&fs::read_to_string("/proc/self/maps").unwrap(), file.path());
    let part = parts().pop().unwrap();
    assert!(part.addresses.len() >= 2 * LARGE, "{part:?}");
    move_to_large_pages(&part).unwrap();
    assert_eq!(parts(), []);
    assert!(
        // SAFETY: the memory mapped above; part of it now lies on other pages at the same
        // addresses.
        unsafe { std::slice::from_raw_parts(start.cast::<u8>().cast_const(), bytes.len()) }
            == bytes
    );
    // SAFETY: nothing reads it any more.
    unsafe { libc::munmap(start, bytes.len()) };
}

#[test]
fn memory_that_another_thread_maps_during_the_move_stays_mapped() {
    let done = AtomicBool::new(false);
    let map = || {
        let (access, new) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
        );
        // SAFETY: new memory, known to nothing else.
        let start = unsafe { libc::mmap(ptr::null_mut(), LARGE, access, new, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        start
    };
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let start = map();
                // SAFETY: the memory just mapped.
                unsafe {
                    start.cast::<u8>().byte_add(LARGE / 2).write_volatile(1);
                    libc::munmap(start, LARGE);
                }
            }
        });
        let moved = (0..200).try_for_each(|_| {
            let start = map().cast::<u8>();
            let addresses = start.addr()..start.addr() + LARGE;
            let moved = move_to_large_pages(&Mapped {
                addresses,
                protection: libc::PROT_READ,
            });
            // SAFETY: the memory mapped above, on other pages.
            unsafe { libc::munmap(start.cast(), LARGE) };
            moved
        });
        done.store(true, Ordering::Relaxed);
        moved.unwrap();
    });
}

#[test]
fn a_program_runs_on_with_its_code_on_large_pages() {
    match fork().unwrap() {
        Forked::Copy => {
            let code = move_code().and_then(|()| {
                Ok(mapped(
                    &fs::read_to_string("/proc/self/maps")?,
                    &fs::read_link("/proc/self/exe")?,
                ))
            });
            leave(if code.is_ok_and(|left| left.is_empty()) {
                7
            } else {
                1
            });
        }
        Forked::Original(child) => assert_eq!(child.wait().unwrap(), End::Code(7)),
    }
}
