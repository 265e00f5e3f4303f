//! Places PyTorch's allocators, which contain its statistics, into a mapped file
//! ([`torch_statistics`](harness_gpu_settings::torch_statistics)).
//!
//! libc10_cuda requests the memory of each allocator with `operator new`, after it has counted the
//! devices. So its references to `operator new` and `operator delete` are replaced when a program
//! counts the devices. Only the allocators are placed into the file, because other libraries delete
//! other objects. A forked child gets private memory in place of its parent's file.

use std::arch::naked_asm;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::{fd::AsRawFd as _, unix::ffi::OsStrExt as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::{env, fs::OpenOptions, mem, ops::Range, path::Path, ptr, slice};

use harness_gpu_settings::settings::RUN;
use harness_gpu_settings::torch_statistics::{self, ENDING, MOST_OBJECTS, SLOT, SMALLEST};
use nix::fcntl::posix_fallocate;

const LIBRARY: &[u8] = b"/libc10_cuda.so";
const NEW: &CStr = c"_Znwm";
const DELETE: &CStr = c"_ZdlPvm";
const QUERY: &CStr = c"cudaEventQuery";
const RECORD: &CStr = c"cudaEventRecord";
/// The end of the mangled name of `NativeCachingAllocator::init(int)`, which creates the allocators
/// and nothing else of their size.
const CREATOR: &[u8] = b"NativeCachingAllocator4initEi";
/// The type of the section with all symbols of a library.
const SYMBOL_TABLE: u32 = 2;
const PAGE: usize = 4096;
/// Types of relocations that hold the address of a function.
const FUNCTIONS: [u64; 2] = [6, 7];
/// Tags of the dynamic section: the tables of strings, of symbols, and of relocations with their
/// sizes.
const STRINGS: i64 = 5;
const SYMBOLS: i64 = 6;
const RELOCATIONS: [(i64, i64); 2] = [(7, 8), (23, 2)];

type New = unsafe extern "C-unwind" fn(usize) -> *mut c_void;
/// The functions in place of `cudaEventQuery` and `cudaEventRecord`.
pub(crate) type Query = extern "C" fn(usize) -> c_int;
pub(crate) type Record = extern "C" fn(usize, usize) -> c_int;
type Delete = unsafe extern "C-unwind" fn(*mut c_void, usize);

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}

#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

/// The C++ library's functions.
static REAL_NEW: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static REAL_DELETE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static NEW_QUERY: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static NEW_RECORD: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
/// The code that creates allocators.
static CREATOR_BEGIN: AtomicUsize = AtomicUsize::new(0);
static CREATOR_END: AtomicUsize = AtomicUsize::new(0);
/// The mapped file; null before the first object.
static FILE: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
/// Slots of the file, the first of which has the sizes of the objects.
static SLOTS: AtomicUsize = AtomicUsize::new(0);
/// Used slots.
static USED: AtomicUsize = AtomicUsize::new(1);
/// A copy of the file, made before each fork.
static COPY: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Makes PyTorch's allocators of this many devices use the file of this process, once PyTorch's
/// library is loaded. PyTorch then calls these functions for its events.
pub(crate) fn keep_statistics(devices: usize, query: Query, record: Record) {
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    if IS_DONE.load(Ordering::Relaxed) || env::var_os(RUN).is_none() {
        return;
    }
    let Some((new, delete)) = real(NEW).zip(real(DELETE)) else {
        return;
    };
    REAL_NEW.store(new, Ordering::Release);
    REAL_DELETE.store(delete, Ordering::Release);
    NEW_QUERY.store(query as *mut c_void, Ordering::Release);
    NEW_RECORD.store(record as *mut c_void, Ordering::Release);
    SLOTS.store((1 + devices).min(MOST_OBJECTS), Ordering::Release);
    // SAFETY: the callback has the type that the function requires.
    if unsafe { libc::dl_iterate_phdr(Some(replace), ptr::null_mut()) } != 0 {
        IS_DONE.store(true, Ordering::Relaxed);
    }
}

/// A function of the C++ library that PyTorch uses.
fn real(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the names are strings, and the library stays loaded.
    let found = unsafe {
        let library = libc::dlopen(
            c"libstdc++.so.6".as_ptr(),
            libc::RTLD_LAZY | libc::RTLD_NOLOAD,
        );
        let global = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        if global.is_null() && !library.is_null() {
            libc::dlsym(library, name.as_ptr())
        } else {
            global
        }
    };
    (!found.is_null()).then_some(found)
}

/// Replaces the references of PyTorch's library. Returns 1 for that library, which ends the
/// iteration.
unsafe extern "C" fn replace(
    library: *mut libc::dl_phdr_info,
    _size: usize,
    _data: *mut c_void,
) -> c_int {
    // SAFETY: the dynamic linker passes a library with its name and its headers.
    let (base, name, headers) = unsafe {
        let library = &*library;
        (
            library.dlpi_addr,
            CStr::from_ptr(library.dlpi_name),
            slice::from_raw_parts(library.dlpi_phdr, library.dlpi_phnum.into()),
        )
    };
    if !name.to_bytes().ends_with(LIBRARY) {
        return 0;
    }
    let Some(creator) = std::fs::read(OsStr::from_bytes(name.to_bytes()))
        .ok()
        .and_then(|file| creator(&file))
    else {
        return 1;
    };
    CREATOR_BEGIN.store((base + creator.start) as usize, Ordering::Release);
    CREATOR_END.store((base + creator.end) as usize, Ordering::Release);
    let Some(dynamic) = headers
        .iter()
        .find(|header| header.p_type == libc::PT_DYNAMIC)
    else {
        return 1;
    };
    let entries = address::<Dynamic>(base + dynamic.p_vaddr);
    // SAFETY: the section ends with an entry whose tag is 0.
    let entries = (0..)
        .map(|index| unsafe { &*entries.add(index) })
        .take_while(|entry| entry.tag != 0);
    let entries: Vec<(i64, u64)> = entries.map(|entry| (entry.tag, entry.value)).collect();
    let value = |tag: i64| {
        let entry = entries.iter().find(|(of, _)| *of == tag);
        entry.map(|(_, value)| *value)
    };
    let Some((strings, symbols)) = value(STRINGS).zip(value(SYMBOLS)) else {
        return 1;
    };
    for (table, size) in RELOCATIONS
        .into_iter()
        .filter_map(|(table, size)| value(table).zip(value(size)))
    {
        // SAFETY: the table has this many bytes.
        let relocations = unsafe {
            slice::from_raw_parts(
                address::<Relocation>(table).cast_const(),
                size as usize / size_of::<Relocation>(),
            )
        };
        for relocation in relocations
            .iter()
            .filter(|relocation| FUNCTIONS.contains(&(relocation.info & 0xffff_ffff)))
        {
            // SAFETY: a relocation names a symbol of the table, and a symbol a string.
            let name = unsafe {
                let symbol = &*address::<Symbol>(symbols).add((relocation.info >> 32) as usize);
                CStr::from_ptr(address::<c_char>(strings).add(symbol.name as usize))
            };
            // SAFETY: the relocation describes a pointer of the library in its data.
            unsafe { replace_function(name, base + relocation.offset) };
        }
    }
    1
}

/// Replaces the pointer to a function of this name, if there is a replacement.
///
/// # Safety
/// The place holds a pointer to a function of this name, which other threads only read.
unsafe fn replace_function(name: &CStr, place: u64) {
    let replacement = match name {
        name if name == NEW => new_of_caller as New as *mut c_void,
        name if name == QUERY => NEW_QUERY.load(Ordering::Acquire),
        name if name == RECORD => NEW_RECORD.load(Ordering::Acquire),
        name if name == DELETE => delete as Delete as *mut c_void,
        _ => return,
    };
    let page = address::<c_void>(place / PAGE as u64 * PAGE as u64);
    // SAFETY: as the caller promises.
    unsafe {
        if libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_WRITE) == 0 {
            AtomicPtr::from_ptr(address(place)).store(replacement, Ordering::Release);
        }
    }
}

const fn address<T>(number: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(number as usize)
}

/// The position of the code that creates allocators, in the file of PyTorch's library; `None` if
/// the file has no such symbol.
fn creator(file: &[u8]) -> Option<Range<u64>> {
    let bytes = |at: u64, len: u64| {
        file.get(usize::try_from(at).ok()?..usize::try_from(at.checked_add(len)?).ok()?)
    };
    let number = |at: u64, len: u64| {
        let mut number = [0; 8];
        number[..len as usize].copy_from_slice(bytes(at, len)?);
        Some(u64::from_le_bytes(number))
    };
    let (sections, count) = (number(40, 8)?, number(60, 2)?);
    let section = |index: u64| sections + 64 * index;
    let table = (0..count)
        .map(section)
        .find(|at| number(at + 4, 4) == Some(SYMBOL_TABLE.into()))?;
    let strings = number(section(number(table + 40, 4)?) + 24, 8)?;
    let (begin, size) = (number(table + 24, 8)?, number(table + 32, 8)?);
    let symbol = (0..size / 24).map(|index| begin + 24 * index).find(|at| {
        let name =
            number(*at, 4).and_then(|name| file.get(usize::try_from(strings + name).ok()?..));
        name.and_then(|name| CStr::from_bytes_until_nul(name).ok())
            .is_some_and(|name| name.to_bytes().ends_with(CREATOR))
    })?;
    let value = number(symbol + 8, 8)?;
    Some(value..value + number(symbol + 16, 8)?)
}

/// `operator new` for PyTorch's library. It passes the address of its caller.
#[unsafe(naked)]
unsafe extern "C-unwind" fn new_of_caller(size: usize) -> *mut c_void {
    naked_asm!("mov rsi, [rsp]", "jmp {new}", new = sym new)
}

/// Allocates an object for the code at an address.
unsafe extern "C-unwind" fn new(size: usize, caller: usize) -> *mut c_void {
    let creator = CREATOR_BEGIN.load(Ordering::Acquire)..CREATOR_END.load(Ordering::Acquire);
    let is_allocator = (SMALLEST..=SLOT).contains(&size)
        && creator.contains(&caller)
        && !IS_CLOSED.load(Ordering::Acquire);
    let placed = if is_allocator { place(size) } else { None };
    placed.unwrap_or_else(|| {
        // SAFETY: this is the C++ library's function.
        unsafe { mem::transmute::<*mut c_void, New>(REAL_NEW.load(Ordering::Acquire))(size) }
    })
}

/// `operator delete` for PyTorch's library. Slots are not used again: their statistics are still to
/// be read.
unsafe extern "C-unwind" fn delete(object: *mut c_void, size: usize) {
    let file = FILE.load(Ordering::Acquire).expose_provenance();
    let end = file + SLOTS.load(Ordering::Acquire) * SLOT;
    if file == 0 || !(file..end).contains(&object.expose_provenance()) {
        // SAFETY: this is the C++ library's function.
        unsafe {
            mem::transmute::<*mut c_void, Delete>(REAL_DELETE.load(Ordering::Acquire))(object, size)
        }
    }
}

/// A slot for an object; `None` if there is none left.
fn place(size: usize) -> Option<*mut c_void> {
    let slots = SLOTS.load(Ordering::Acquire);
    let slot = USED.fetch_add(1, Ordering::AcqRel);
    let known = FILE.load(Ordering::Acquire);
    let file = if known.is_null() {
        open(slots)
    } else {
        Some(known)
    };
    let Some(file) = file.filter(|_| slot < slots) else {
        IS_CLOSED.store(true, Ordering::Release);
        return None;
    };
    // SAFETY: the file has this many slots, and its first one a word for each of them.
    unsafe {
        AtomicU64::from_ptr(file.cast::<u64>().add(slot - 1)).store(size as u64, Ordering::Release);
        Some(file.add(slot * SLOT).cast())
    }
}

/// Maps a new file of this process.
fn open(slots: usize) -> Option<*mut u8> {
    let path = Path::new(&env::var_os(RUN)?).join(format!("{}{ENDING}", std::process::id()));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .ok()?;
    let size = slots * SLOT;
    posix_fallocate(&file, 0, size as libc::off_t).ok()?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: both mappings are new, and the first is as long as the file.
    let [mapped, copy] = unsafe {
        [
            libc::mmap(
                ptr::null_mut(),
                size,
                access,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            ),
            libc::mmap(
                ptr::null_mut(),
                size,
                access,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            ),
        ]
    };
    if [mapped, copy].contains(&libc::MAP_FAILED) {
        return None;
    }
    COPY.store(copy.cast(), Ordering::Release);
    // Two threads may open the file. Then the mapping of the first remains.
    match FILE.compare_exchange(
        ptr::null_mut(),
        mapped.cast(),
        Ordering::AcqRel,
        Ordering::Acquire,
    ) {
        Ok(_) => Some(mapped.cast()),
        Err(first) => Some(first),
    }
}

/// The numbers of allocations and of frees of the allocator of a device so far; `None` before its
/// first allocation, and if they are unknown.
pub(crate) fn counts(device: usize) -> Option<[u64; 2]> {
    static POSITIONS: OnceLock<Vec<[usize; 2]>> = OnceLock::new();
    let file = FILE.load(Ordering::Acquire);
    if file.is_null() {
        return None;
    }
    let positions = POSITIONS.get().or_else(|| {
        let size = SLOTS.load(Ordering::Acquire) * SLOT;
        // SAFETY: the file has this size. The calling thread uses the allocator, or another one may
        // change words, which are only compared.
        let found = torch_statistics::counts(unsafe { slice::from_raw_parts(file, size) })?;
        Some(POSITIONS.get_or_init(|| found))
    })?;
    let number = |at: usize| {
        // SAFETY: the position is that of an aligned word in the file.
        unsafe { AtomicU64::from_ptr(file.add(at).cast()) }.load(Ordering::Relaxed)
    };
    positions.get(device).map(|counts| counts.map(number))
}

/// Copies the file for a child. The caller holds the lock of the state until the fork.
pub(crate) fn before_fork() {
    let (file, copy) = (FILE.load(Ordering::Acquire), COPY.load(Ordering::Acquire));
    if !file.is_null() {
        // SAFETY: both mappings have this size, and do not overlap.
        unsafe { ptr::copy_nonoverlapping(file, copy, SLOTS.load(Ordering::Acquire) * SLOT) };
    }
}

/// Gives a forked child private memory in place of its parent's file.
pub(crate) fn start_child() {
    let (file, copy, size) = (
        FILE.load(Ordering::Acquire),
        COPY.load(Ordering::Acquire),
        SLOTS.load(Ordering::Acquire) * SLOT,
    );
    if file.is_null() {
        return;
    }
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: this replaces the mapping of the file, whose content the copy has, and the child has
    // no other thread.
    unsafe {
        libc::mmap(
            file.cast(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            kind,
            -1,
            0,
        );
        ptr::copy_nonoverlapping(copy, file, size);
    }
    IS_CLOSED.store(true, Ordering::Release);
}
