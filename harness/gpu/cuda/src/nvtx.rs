//! NVTX ranges for profilers, so Nsight Systems shows the harness's steps. This implements what
//! NVIDIA's headers do in a C program.
//!
//! NVTX has no library to link. A profiler names its library in the variable
//! `NVTX_INJECTION64_PATH`. The program loads it and calls its `InitializeInjectionNvtx2`, and the
//! profiler writes its functions into a table that it requests: see
//! <https://github.com/NVIDIA/NVTX/blob/release-v3/c/include/nvtx3/nvtxDetail/nvtxInit.h> and
//! `nvtxTypes.h` in the same folder. Without a profiler nothing is loaded, and a range costs one
//! load.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::library;

/// The variable with the profiler's library.
const VARIABLE: &str = "NVTX_INJECTION64_PATH";
const VERSION: u32 = 3;
const CALLBACKS: u32 = 1;
const VERSION_INFO: u32 = 3;
const CORE: c_uint = 1;
/// `NVTX_CBID_CORE_SIZE`, and the indexes of two functions.
const FUNCTIONS: usize = 16;
const RANGE_PUSH_A: usize = 9;
const RANGE_POP: usize = 11;

type GetExportTable = extern "C" fn(u32) -> *const c_void;
type Initialize = unsafe extern "C" fn(GetExportTable) -> c_int;
type RangePushA = unsafe extern "C" fn(*const c_char) -> c_int;
type RangePop = unsafe extern "C" fn() -> c_int;

#[repr(C)]
struct Callbacks {
    struct_size: usize,
    get_module_function_table: extern "C" fn(c_uint, *mut *const Slot, *mut c_uint) -> c_int,
}

#[repr(C)]
struct VersionInfo {
    struct_size: usize,
    version: u32,
    reserved: u32,
    set_injection_version: extern "C" fn(u32),
}

/// The address at which the profiler writes a function.
#[repr(transparent)]
struct Slot(*const AtomicPtr<c_void>);

// SAFETY: it points to a static that is only accessed atomically.
unsafe impl Sync for Slot {}

static CALLBACKS_TABLE: Callbacks = Callbacks {
    struct_size: size_of::<Callbacks>(),
    get_module_function_table,
};
static VERSION_TABLE: VersionInfo = VersionInfo {
    struct_size: size_of::<VersionInfo>(),
    version: VERSION,
    reserved: 0,
    set_injection_version: ignore_version,
};
static FUNCTION: [AtomicPtr<c_void>; FUNCTIONS] =
    [const { AtomicPtr::new(ptr::null_mut()) }; FUNCTIONS];
/// A null-terminated array of function addresses, as in the headers. Index 0 is unused.
static SLOTS: [Slot; FUNCTIONS + 1] = {
    let mut slots = [const { Slot(ptr::null()) }; FUNCTIONS + 1];
    let mut number = 1;
    while number < FUNCTIONS {
        slots[number] = Slot(&raw const FUNCTION[number]);
        number += 1;
    }
    slots
};

extern "C" fn ignore_version(_: u32) {}

extern "C" fn get_export_table(table: u32) -> *const c_void {
    match table {
        CALLBACKS => (&raw const CALLBACKS_TABLE).cast(),
        VERSION_INFO => (&raw const VERSION_TABLE).cast(),
        _ => ptr::null(),
    }
}

/// Returns 1 if the module exists.
extern "C" fn get_module_function_table(
    module: c_uint,
    table: *mut *const Slot,
    size: *mut c_uint,
) -> c_int {
    if module != CORE {
        return 0;
    }
    if !table.is_null() {
        // SAFETY: the profiler passes a valid output.
        unsafe { *table = SLOTS.as_ptr() };
    }
    if !size.is_null() {
        // SAFETY: the profiler passes a valid output.
        unsafe { *size = FUNCTIONS as c_uint };
    }
    1
}

/// Nested ranges that a profiler shows.
#[derive(Clone, Copy, Debug)]
pub struct NvtxRanges {
    push: RangePushA,
    pop: RangePop,
}

impl NvtxRanges {
    /// Returns the ranges of this process's profiler; `None` without a profiler that supports NVTX.
    /// Looks for it once.
    pub fn of_profiler() -> Option<Self> {
        static RANGES: OnceLock<Option<NvtxRanges>> = OnceLock::new();
        *RANGES.get_or_init(|| {
            let path = std::env::var_os(VARIABLE).filter(|path| !path.is_empty())?;
            let profiler = library::load(path.to_str()?).ok()?;
            let initialize = library::find(profiler, "InitializeInjectionNvtx2")?;
            // SAFETY: NVTX's protocol defines this function's type, and the library stays loaded.
            unsafe {
                Self::attach(std::mem::transmute::<library::Address, Initialize>(
                    initialize,
                ))
            }
        })
    }

    /// Calls the profiler, which writes its functions.
    ///
    /// # Safety
    /// `initialize` must be a profiler's `InitializeInjectionNvtx2`.
    unsafe fn attach(initialize: Initialize) -> Option<Self> {
        // SAFETY: guaranteed by the caller.
        if unsafe { initialize(get_export_table) } == 0 {
            return None;
        }
        let function = |number: usize| ptr::NonNull::new(FUNCTION[number].load(Ordering::Acquire));
        let (push, pop) = (function(RANGE_PUSH_A)?, function(RANGE_POP)?);
        // SAFETY: the profiler has written functions of these types.
        unsafe {
            Some(Self {
                push: std::mem::transmute::<ptr::NonNull<c_void>, RangePushA>(push),
                pop: std::mem::transmute::<ptr::NonNull<c_void>, RangePop>(pop),
            })
        }
    }

    /// Begins a range inside this thread's open ranges. The name is cut at a zero byte.
    pub fn begin(&self, name: &str) {
        let name = name.split('\0').next().unwrap_or_default();
        if let Ok(name) = CString::new(name) {
            // SAFETY: the profiler's function reads the string before it returns.
            unsafe { (self.push)(name.as_ptr()) };
        }
    }

    pub fn end(&self) {
        // SAFETY: it has no precondition.
        unsafe { (self.pop)() };
    }
}

#[cfg(test)]
mod tests;
