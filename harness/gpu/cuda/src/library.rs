//! Loads the driver's libraries on first use. Nothing is linked.

use std::error::Error;
use std::ffi::{c_char, c_uint};

use libloading::Library;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadError {
    /// The loader finds no file with this name.
    Absent,
    /// The loader finds a file but cannot load it, for this reason.
    Unloadable(String),
}

/// A failed call of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) call: &'static str,
    /// The result code, not 0; [`MISSING`] if the library lacks the function.
    pub(crate) code: u32,
}

/// Code of a [`Refusal`] for a function that the library lacks. No library returns it.
pub(crate) const MISSING: u32 = u32::MAX;

/// Loads the library with this file name from the loader's search path. It stays loaded until the
/// process ends, because its own threads may use it.
pub(crate) fn load(name: &str) -> Result<&'static Library, LoadError> {
    // SAFETY: the initializers of NVIDIA's libraries have no precondition.
    match unsafe { Library::new(name) } {
        Ok(library) => Ok(Box::leak(Box::new(library))),
        Err(error) => Err(LoadError::new(name, &error)),
    }
}

impl LoadError {
    /// Classifies an error of libloading, whose source is the system loader's text.
    pub(crate) fn new(name: &str, error: &dyn Error) -> Self {
        Self::of_text(name, error.source().unwrap_or(error).to_string())
    }

    /// Distinguishes a missing file from one that cannot be loaded. glibc's text begins with the
    /// file that it could not open; another name there is a missing dependency.
    fn of_text(name: &str, text: String) -> Self {
        let is_absent = text.starts_with(name) && text.contains("No such file or directory");
        if is_absent {
            Self::Absent
        } else {
            Self::Unloadable(text)
        }
    }
}

/// The address of a function, whose type the caller knows.
pub(crate) type Address = unsafe extern "C" fn();

pub(crate) fn find(library: &Library, name: &str) -> Option<Address> {
    // SAFETY: the symbol is a function or null, and nothing calls it with this type.
    unsafe { library.get::<Option<Address>>(name) }
        .ok()
        .and_then(|symbol| *symbol)
}

/// Reads a text of at most 255 characters.
pub(crate) fn text(
    read: impl FnOnce(*mut c_char, c_uint) -> Result<(), Refusal>,
) -> Result<String, Refusal> {
    let mut buffer = [0_u8; 256];
    // One byte is left for a final NUL.
    read(buffer.as_mut_ptr().cast(), 255)?;
    let text = buffer.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok(String::from_utf8_lossy(text).into_owned())
}

#[cfg(test)]
mod tests;
