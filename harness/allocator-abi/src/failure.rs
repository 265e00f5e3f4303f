//! What went wrong: kept for each thread, as a C string, and said on standard error where it is more than a lack of memory.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use harness_allocator::allocator::AllocatorError;
use harness_allocator::device::DeviceError;
use harness_allocator::units::Bytes;

use crate::settings::SettingsError;

/// Why a call did not do what it was asked for.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// There is no memory. Free some, or ask for less.
    #[error("{0}")]
    OutOfMemory(AllocatorError),
    /// The device refused, or the address is not live. Correct the program.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Correct the environment.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Correct the call.
    #[error("{0}")]
    Argument(String),
    /// Set the variable before the allocator is used first.
    #[error("nothing is recorded: set HARNESS_ALLOCATOR_RECORD=1 before the program starts")]
    NotRecorded,
    /// Choose another file.
    #[error("the snapshot cannot be written to `{path}`: {why}")]
    Snapshot {
        path: String,
        /// What the system says.
        why: String,
    },
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
    /// A size that is none.
    pub(crate) fn size(size: isize) -> Self {
        Self::Argument(format!("{size} is no size: it is 0 or more, and at most {}", Bytes(isize::MAX as u64)))
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps the failure of a call for whoever asks, and says it where nobody may ask. A lack of memory is an answer, which the caller sees.
pub(crate) fn keep(call: &str, failure: &Failure) {
    let text = format!("{call}: {failure}");
    if !matches!(failure, Failure::OutOfMemory(_)) {
        eprintln!("{text}");
    }
    // A NUL byte can only be in a path of the caller's.
    LAST.with_borrow_mut(|last| *last = CString::new(text.replace('\0', "?")).unwrap_or_default());
}

/// The last failure of the calling thread, empty where there was none. Valid until its next one.
pub(crate) fn last() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}
