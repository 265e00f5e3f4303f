use std::{ffi::CStr, sync::Mutex};

use super::*;

static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "C" fn push(name: *const c_char) -> c_int {
    // SAFETY: the caller passes a C string.
    let name = unsafe { CStr::from_ptr(name) };
    SEEN.lock()
        .expect("the lock is not poisoned")
        .push(format!("begin {}", name.to_string_lossy()));
    0
}

unsafe extern "C" fn pop() -> c_int {
    SEEN.lock()
        .expect("the lock is not poisoned")
        .push("end".to_owned());
    0
}

/// Acts like a profiler: requests the table of core functions and writes its own functions.
unsafe extern "C" fn profiler(get_export_table: GetExportTable) -> c_int {
    assert!(get_export_table(2).is_null());
    // SAFETY: the tables have these types.
    unsafe {
        let version = &*get_export_table(VERSION_INFO).cast::<VersionInfo>();
        assert_eq!(
            (version.struct_size, version.version),
            (size_of::<VersionInfo>(), 3)
        );
        let callbacks = &*get_export_table(CALLBACKS).cast::<Callbacks>();
        let (mut table, mut size) = (ptr::null(), 0);
        assert_eq!(
            (callbacks.get_module_function_table)(2, &raw mut table, &raw mut size),
            0
        );
        assert_eq!(
            (callbacks.get_module_function_table)(CORE, &raw mut table, &raw mut size),
            1
        );
        assert_eq!(size, 16);
        let slot = |number: usize| &*(*table.add(number)).0.cast::<AtomicPtr<c_void>>();
        slot(RANGE_PUSH_A).store(push as *mut c_void, Ordering::Release);
        slot(RANGE_POP).store(pop as *mut c_void, Ordering::Release);
        assert!((*table).0.is_null() && (*table.add(16)).0.is_null());
    }
    1
}

unsafe extern "C" fn unwilling(_: GetExportTable) -> c_int {
    0
}

#[test]
fn a_profiler_that_sets_its_functions_receives_the_ranges() {
    // SAFETY: both act like a profiler's function.
    let (none, ranges) = unsafe { (NvtxRanges::attach(unwilling), NvtxRanges::attach(profiler)) };
    assert!(none.is_none());
    let ranges = ranges.expect("both functions are set");
    ranges.begin("train: 3 iterations");
    ranges.begin("alloc\0 a");
    ranges.end();
    ranges.end();
    assert_eq!(
        *SEEN.lock().expect("the lock is not poisoned"),
        ["begin train: 3 iterations", "begin alloc", "end", "end"]
    );
}
