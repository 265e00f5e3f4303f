//! Failures of the exported functions: the last one of each thread is kept as a C string. Failures
//! other than out of memory are also printed to standard error.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use harness_allocator::{allocator::AllocatorError, device::DeviceError, units::Bytes};

use crate::settings::SettingsError;

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// Out of memory: free some or request less.
    #[error("{0}")]
    OutOfMemory(AllocatorError),
    /// The device refused the call, or the address is not live: fix the program.
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("{0}")]
    Argument(String),
    #[error(
        "the allocator is not recorded: set HARNESS_ALLOCATOR_RECORD=1 before the program starts"
    )]
    NotRecorded,
    #[error("cannot write the snapshot to `{path}`: {why}")]
    Snapshot { path: String, why: String },
}

impl From<AllocatorError> for Failure {
    fn from(error: AllocatorError) -> Self {
        match error {
            AllocatorError::Device(error) => Self::Device(error),
            error => Self::OutOfMemory(error),
        }
    }
}

impl Failure {
    pub(crate) fn size(size: isize) -> Self {
        Self::Argument(format!(
            "{size} is not a size: sizes are from 0 to {}",
            Bytes(isize::MAX as u64)
        ))
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps the failure of a call for [`last`]. Prints it too, unless it is out of memory, which the
/// caller notices anyway.
pub(crate) fn keep(call: &str, failure: &Failure) {
    let text = format!("{call}: {failure}");
    if !matches!(failure, Failure::OutOfMemory(_)) {
        eprintln!("{text}");
    }
    // Only a path from the caller can contain a NUL byte.
    LAST.with_borrow_mut(|last| *last = CString::new(text.replace('\0', "?")).unwrap_or_default());
}

/// The last failure of the calling thread, empty if there was none. Valid until the next failure.
pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}
