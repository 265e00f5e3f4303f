//! [`extensions`] finds shared objects of packages other than torch that use NVIDIA's libraries,
//! such as bitsandbytes, flash-attn or JAX's plugin.
//!
//! A scan reads every folder of an environment, so the result is cached with the modification times
//! of its folders: the package folders, each package, and each folder with a shared object. If one
//! of them has changed, as after an installation, everything is scanned again. The scan misses a
//! shared object that is placed in a new folder deep inside an existing package without an
//! installation.

use std::fs;
use std::hash::{DefaultHasher, Hasher as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use harness_base::files;
use serde::{Deserialize, Serialize};

use crate::imports;

/// Increase this when the scan looks for different files.
const FORMAT: u32 = 3;
const FOUND: &str = "environments";
/// Package folders that the scan skips: torch is read separately, and the stub libraries replace
/// NVIDIA's.
const OWN: [&str; 3] = ["torch", "functorch", "nvidia"];
/// Folders without shared objects.
const WITHOUT: [&str; 2] = [".dist-info", "__pycache__"];
/// A folder changed more recently than this may change again without a new modification time.
const SETTLED: Duration = Duration::from_secs(2);

#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    format: u32,
    packages: Vec<PathBuf>,
    /// The modification time of each folder, since 1970.
    changed: Vec<(PathBuf, Duration)>,
    extensions: Vec<PathBuf>,
}

/// Returns the shared objects in these package folders that use one of NVIDIA's libraries or are a
/// copy of the CUDA runtime, in order. Unreadable files are skipped: the program that loads them
/// reports the problem.
pub fn extensions(cache: &Path, packages: &[PathBuf]) -> Vec<PathBuf> {
    let mut hasher = DefaultHasher::new();
    packages
        .iter()
        .for_each(|folder| hasher.write(folder.as_os_str().as_encoded_bytes()));
    let kept = cache
        .join(FOUND)
        .join(format!("{:016x}.json", hasher.finish()));
    let read = fs::read(&kept)
        .ok()
        .and_then(|bytes| serde_json::from_slice::<Found>(&bytes).ok());
    if let Some(found) = read
        .filter(|found| found.format == FORMAT && found.packages == packages && found.is_still_so())
    {
        return found.extensions;
    }
    let mut found = Found {
        format: FORMAT,
        packages: packages.to_vec(),
        ..Found::default()
    };
    for folder in packages {
        found.look_in(folder, 0);
    }
    found.extensions.sort();
    if found.is_settled()
        && let Ok(text) = serde_json::to_string(&found)
    {
        // If it cannot be cached, the next start only takes longer.
        let _ = files::write(&kept, &text);
    }
    found.extensions
}

impl Found {
    fn is_still_so(&self) -> bool {
        self.changed
            .iter()
            .all(|(folder, then)| changed(folder) == Some(*then))
    }

    /// Returns whether later changes of every folder will be visible in its modification time.
    fn is_settled(&self) -> bool {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        self.changed
            .iter()
            .all(|(_, then)| now.saturating_sub(*then) > SETTLED)
    }

    /// Scans a folder and its subfolders. Does not follow links to folders.
    fn look_in(&mut self, folder: &Path, depth: u32) {
        // Read before the folder's entries, so a concurrent change invalidates the result.
        let (Some(changed), Ok(entries)) = (changed(folder), fs::read_dir(folder)) else {
            return;
        };
        let mut has_objects = false;
        for entry in entries.flatten() {
            let (name, kind) = (entry.file_name(), entry.file_type());
            let (Some(name), Ok(kind)) = (name.to_str(), kind) else {
                continue;
            };
            let is_own = depth == 0 && OWN.contains(&name);
            if kind.is_dir() {
                if !is_own && !WITHOUT.iter().any(|ending| name.ends_with(ending)) {
                    self.look_in(&entry.path(), depth + 1);
                }
            } else if imports::is_shared_object(name) {
                has_objects = true;
                let path = entry.path();
                if imports::version_of_copy(name).is_some() || imports::uses_nvidia(&path) {
                    self.extensions.push(path);
                }
            }
        }
        if depth < 2 || has_objects {
            self.changed.push((folder.to_owned(), changed));
        }
    }
}

fn changed(folder: &Path) -> Option<Duration> {
    fs::metadata(folder)
        .ok()?
        .modified()
        .ok()?
        .duration_since(SystemTime::UNIX_EPOCH)
        .ok()
}

#[cfg(test)]
mod tests;
