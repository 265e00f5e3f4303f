//! Temporary files and folders, created next to the final path. The owner holds a lock, so the next
//! run can detect and remove those of killed processes.

use std::fs::{self, File, Permissions, TryLockError};
use std::{io, os::unix::fs::PermissionsExt, path::Path};

use tempfile::{NamedTempFile, TempDir};

pub const PREFIX: &str = ".unfinished-";

/// Creates a temporary file in this folder, with the permissions of an ordinary file. Removes files
/// of killed processes first, unless another process holds the folder's lock. It does not wait for
/// the lock, which any user can hold.
pub fn file_in(folder: &Path) -> io::Result<NamedTempFile> {
    let only_writer = File::open(folder)
        .ok()
        .filter(|folder| folder.try_lock().is_ok());
    if only_writer.is_some() {
        tidy(folder);
    }
    locked_file_in(folder)
}

/// Like [`file_in`], for a caller that holds the folder's lock.
pub(crate) fn locked_file_in(folder: &Path) -> io::Result<NamedTempFile> {
    loop {
        let everybody = Permissions::from_mode(0o666);
        let file = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(everybody)
            .tempfile_in(folder)?;
        // Another process may have removed the file before it was locked. Then a new one is
        // created.
        if file.as_file().lock().is_err() || file.path().exists() {
            return Ok(file);
        }
    }
}

/// Creates a temporary folder in a folder whose lock the caller holds.
pub fn folder_in(folder: &Path) -> io::Result<(TempDir, File)> {
    let everybody = Permissions::from_mode(0o777);
    let made = tempfile::Builder::new()
        .prefix(PREFIX)
        .permissions(everybody)
        .tempdir_in(folder)?;
    let held = File::open(made.path())?;
    lock(&held);
    Ok((made, held))
}

/// On file systems without locks this does nothing, and nothing is removed.
fn lock(file: &File) {
    let _ = file.try_lock();
}

/// Removes the files of killed processes from a folder whose lock the caller holds. Ignores
/// failures, because a temporary name is never read as a result.
pub fn tidy(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(PREFIX))
        {
            let _ = remove_abandoned(&entry.path());
        }
    }
}

fn remove_abandoned(path: &Path) -> io::Result<()> {
    let there = path.symlink_metadata()?;
    if !(there.is_file() || there.is_dir()) {
        return Ok(());
    }
    // The lock is held until the path is removed.
    let held = File::open(path)?;
    match held.try_lock() {
        Ok(()) if there.is_dir() => fs::remove_dir_all(path),
        Ok(()) => fs::remove_file(path),
        Err(TryLockError::WouldBlock) => Ok(()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests;
