//! The folder of `--out`, which may be in a store: [`Place`].

use std::path::{Path, PathBuf};
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};
use std::{env, fs, io};

use super::cloud::{self, Cloud, HELP};
use super::rows::ROWS;
use crate::error::CliError;
use crate::journal;

/// A lost machine loses at most the rows of this time and of one upload.
const UPLOAD_EVERY: Duration = Duration::from_secs(10);

/// A folder, or the local copy of one in a store.
pub(super) struct Place {
    pub(super) folder: PathBuf,
    store: Option<Store>,
}

struct Store {
    url: String,
    cloud: Cloud,
    /// The end of the last upload of the rows.
    uploaded: Mutex<Instant>,
}

impl Place {
    /// Creates the folder. For a store it is a local copy with the store's rows. Fails if the store
    /// does not accept them.
    pub(super) fn open(out: &Path) -> Result<Self, CliError> {
        let Some(url) = cloud::url(out) else {
            fs::create_dir_all(out).map_err(CliError::unwritten(out))?;
            let folder = out.to_owned();
            return Ok(Self {
                folder,
                store: None,
            });
        };
        let cloud = Cloud::open(url)?;
        let rows = cloud.read(ROWS)?;
        let temporary = env::temp_dir();
        let unwritten = CliError::unwritten(&temporary);
        let copy = tempfile::Builder::new()
            .prefix("harness-fleet-")
            .tempdir()
            .map_err(&unwritten)?;
        fs::write(copy.path().join(ROWS), &rows).map_err(&unwritten)?;
        cloud
            .write(ROWS, rows)
            .map_err(|message| CliError::input(message, HELP))?;
        let store = Store {
            url: url.trim_end_matches('/').to_owned(),
            cloud,
            uploaded: Mutex::new(Instant::now()),
        };
        // An error, or a kill, must not remove the rows.
        let folder = copy.keep();
        Ok(Self {
            folder,
            store: Some(store),
        })
    }

    /// The path or URL of a file, for the user.
    pub(super) fn shown(&self, name: &str) -> String {
        match &self.store {
            Some(store) => format!("{}/{name}", store.url),
            None => self.folder.join(name).display().to_string(),
        }
    }

    /// Uploads the rows if the last upload is long ago.
    pub(super) fn keep_rows(&self) -> Result<(), CliError> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        let mut uploaded = match store.uploaded.try_lock() {
            Ok(uploaded) => uploaded,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            // Another core uploads them.
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        if uploaded.elapsed() >= UPLOAD_EVERY {
            self.upload(store, ROWS)?;
            *uploaded = Instant::now();
        }
        Ok(())
    }

    /// Uploads all files, and removes the copy.
    pub(super) fn close(&self) -> Result<(), CliError> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        let mut names = Vec::new();
        files(&self.folder, "", &mut names).map_err(CliError::unwritten(&self.folder))?;
        for name in names {
            self.upload(store, &name)?;
        }
        // Rows that stay here harm nothing.
        let _ = fs::remove_dir_all(&self.folder);
        Ok(())
    }

    fn upload(&self, store: &Store, name: &str) -> Result<(), CliError> {
        let content = journal::bytes(&self.folder.join(name))?;
        store.cloud.write(name, content).map_err(|message| {
            let kept = self.folder.display();
            let help = format!("{HELP}; `--out {kept}` continues with all rows of this run");
            CliError::input(message, help)
        })
    }
}

/// Finds the files of a folder and its subfolders, by their paths in it.
fn files(folder: &Path, prefix: &str, names: &mut Vec<String>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            files(&entry.path(), &format!("{name}/"), names)?;
        } else {
            names.push(name);
        }
    }
    Ok(())
}
