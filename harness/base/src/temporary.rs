//! Temporary files and folders beside what they become. Each is locked while its owner lives, so that the next run tells those of killed
//! processes, which nobody holds, from those in use.

use std::fs::{self, File, Permissions, TryLockError};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::{NamedTempFile, TempDir};

/// What the names of temporary files and folders begin with.
pub const PREFIX: &str = ".unfinished-";

/// A temporary file in this folder, with the rights of a file that the user makes. What killed processes left there is removed, unless
/// somebody holds the folder's lock: that is not waited for, because anybody may hold it as long as they like.
///
/// # Errors
/// What the system says.
pub fn file_in(folder: &Path) -> io::Result<NamedTempFile> {
    let only_writer = File::open(folder).ok().filter(|folder| folder.try_lock().is_ok());
    if only_writer.is_some() {
        tidy(folder);
    }
    locked_file_in(folder)
}

/// The same for those who hold the folder's lock already.
pub(crate) fn locked_file_in(folder: &Path) -> io::Result<NamedTempFile> {
    loop {
        let everybody = Permissions::from_mode(0o666);
        let file = tempfile::Builder::new().prefix(PREFIX).permissions(everybody).tempfile_in(folder)?;
        // Before it was locked somebody may have removed it as abandoned: then another one is made.
        if file.as_file().lock().is_err() || file.path().exists() {
            return Ok(file);
        }
    }
}

/// A temporary folder in this folder, whose lock the caller holds, with the rights of a folder that the user makes, and what keeps it locked.
///
/// # Errors
/// What the system says.
pub fn folder_in(folder: &Path) -> io::Result<(TempDir, File)> {
    let everybody = Permissions::from_mode(0o777);
    let made = tempfile::Builder::new().prefix(PREFIX).permissions(everybody).tempdir_in(folder)?;
    let held = File::open(made.path())?;
    lock(&held);
    Ok((made, held))
}

/// File systems without locks hold nothing; there, nothing is removed either.
fn lock(file: &File) {
    let _ = file.try_lock();
}

/// Removes what killed processes left in this folder, whose lock the caller holds. What cannot be removed stays: its name is not a result's.
pub fn tidy(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX)) {
            let _ = remove_abandoned(&entry.path());
        }
    }
}

fn remove_abandoned(path: &Path) -> io::Result<()> {
    let there = path.symlink_metadata()?;
    if !(there.is_file() || there.is_dir()) {
        return Ok(());
    }
    // Held until it is removed.
    let held = File::open(path)?;
    match held.try_lock() {
        Ok(()) if there.is_dir() => fs::remove_dir_all(path),
        Ok(()) => fs::remove_file(path),
        Err(TryLockError::WouldBlock) => Ok(()),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_killed_processes_left_is_removed_and_what_is_in_use_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (in_use, (folder_in_use, _held)) = (file_in(folder.path()).unwrap(), folder_in(folder.path()).unwrap());
        fs::write(folder.path().join(".unfinished-left"), "half").unwrap();
        fs::create_dir(folder.path().join(".unfinished-folder")).unwrap();
        fs::write(folder.path().join(".unfinished-folder/half"), "half").unwrap();
        fs::write(folder.path().join("mine"), "whole").unwrap();
        let other = file_in(folder.path()).unwrap();
        assert!([in_use.path(), folder_in_use.path(), other.path(), &folder.path().join("mine")].iter().all(|path| path.exists()));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
    }

    #[test]
    fn nothing_is_removed_while_somebody_else_holds_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let left = folder.path().join(".unfinished-left");
        fs::write(&left, "half").unwrap();
        let held = File::open(folder.path()).unwrap();
        held.lock().unwrap();
        let _in_use = file_in(folder.path()).unwrap();
        assert!(left.exists());
    }
}
