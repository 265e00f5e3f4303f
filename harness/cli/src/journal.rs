//! A file of rows, one JSON document per line, that a killed process leaves whole.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use harness_allocator::sync::lock;
use harness_base::files;
use serde::{Serialize, de::DeserializeOwned};

use super::error::CliError;

/// The file of the rows during a run. A killed process loses no row.
pub(crate) struct Journal {
    path: PathBuf,
    file: Mutex<File>,
}

impl Journal {
    pub(crate) fn open(path: &Path) -> Result<Self, CliError> {
        let file = files::open_to_append(path).map_err(CliError::unwritten(path))?;
        let file = Mutex::new(file);
        Ok(Self {
            path: path.to_owned(),
            file,
        })
    }

    /// Fails if another process has this file open as its only writer.
    pub(crate) fn become_only_writer(&self) -> Result<(), CliError> {
        let file = lock(&self.file);
        match file.try_lock() {
            Err(std::fs::TryLockError::WouldBlock) => Err(CliError::input(
                format!(
                    "{}: another process is writing this file",
                    self.path.display()
                ),
                "wait until it ends, or choose another file",
            )),
            // Some file systems have no locks.
            Ok(()) | Err(std::fs::TryLockError::Error(_)) => Ok(()),
        }
    }

    /// Ends the line of a process that was killed while it wrote.
    pub(crate) fn end_torn_line(&self) -> Result<(), CliError> {
        let mut file = lock(&self.file);
        let mut end = || {
            let mut text = Vec::new();
            file.read_to_end(&mut text)?;
            match text.last() {
                None | Some(b'\n') => Ok(()),
                Some(_) => file.write_all(b"\n"),
            }
        };
        end().map_err(CliError::unwritten(&self.path))
    }

    pub(crate) fn add(&self, row: &impl Serialize) -> Result<(), CliError> {
        let line = line(row)?;
        let mut file = lock(&self.file);
        file.write_all(line.as_bytes())
            .map_err(CliError::unwritten(&self.path))
    }
}

pub(crate) fn line(of: &impl Serialize) -> Result<String, CliError> {
    let line = serde_json::to_string(of)
        .map_err(|error| CliError::internal(error.to_string(), "report this with the file"))?;
    Ok(line + "\n")
}

/// The lines of a file that can be read, in the order in which they were written. Empty without the
/// file.
pub(crate) fn usable<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>, CliError> {
    Ok(bytes(path)?
        .split(|&byte| byte == b'\n')
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect())
}

/// Empty without the file.
pub(crate) fn bytes(path: &Path) -> Result<Vec<u8>, CliError> {
    let mut bytes = Vec::new();
    match files::open(path).and_then(|mut file| file.read_to_end(&mut bytes)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(CliError::input(
            format!("{}: {error}", path.display()),
            "remove the file, or choose another place",
        )),
        _ => Ok(bytes),
    }
}
