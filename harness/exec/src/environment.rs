//! [`extensions`]: shared objects of other packages than torch that need NVIDIA's libraries, as those of bitsandbytes or flash-attn do.
//!
//! Reading an environment takes a look at every file of it, so what was found is kept, with the times at which its folders were changed last: the folders of packages
//! themselves, each package, and each folder that has a shared object. Where one of them was changed since, as by each installation, all is read again. What
//! is missed is a shared object in a new folder deep inside a package that was there before, without an installation.

use std::fs;
use std::hash::{DefaultHasher, Hasher as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use harness_base::files;
use serde::{Deserialize, Serialize};

use crate::imports;

/// To be raised when other files are looked for.
const FORMAT: u32 = 1;
/// The folder of what was found, in the cache.
const FOUND: &str = "environments";
/// Folders of packages that are not looked at: those of torch are read by themselves, and NVIDIA's own are what the doubles stand in for.
const OWN: [&str; 3] = ["torch", "functorch", "nvidia"];
/// Folders without shared objects.
const WITHOUT: [&str; 2] = [".dist-info", "__pycache__"];
/// A folder that was changed a shorter time ago may be changed once more without another time of its last change.
const SETTLED: Duration = Duration::from_secs(2);

/// What was found in the folders of packages of one environment.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Found {
    format: u32,
    packages: Vec<PathBuf>,
    /// When each folder was changed last, since 1970.
    changed: Vec<(PathBuf, Duration)>,
    extensions: Vec<PathBuf>,
}

/// The shared objects in these folders of packages that need one of NVIDIA's libraries, in order. What cannot be read is left out: the program that loads it
/// will say what is wrong with it.
#[must_use]
pub fn extensions(cache: &Path, packages: &[PathBuf]) -> Vec<PathBuf> {
    let mut hasher = DefaultHasher::new();
    packages.iter().for_each(|folder| hasher.write(folder.as_os_str().as_encoded_bytes()));
    let kept = cache.join(FOUND).join(format!("{:016x}.json", hasher.finish()));
    let read = fs::read(&kept).ok().and_then(|bytes| serde_json::from_slice::<Found>(&bytes).ok());
    if let Some(found) = read.filter(|found| found.format == FORMAT && found.packages == packages && found.is_still_so()) {
        return found.extensions;
    }
    let mut found = Found { format: FORMAT, packages: packages.to_vec(), ..Found::default() };
    for folder in packages {
        found.look_in(folder, 0);
    }
    found.extensions.sort();
    if found.is_settled()
        && let Ok(text) = serde_json::to_string(&found)
    {
        // Where it cannot be kept, the next start takes longer.
        let _ = files::write(&kept, &text);
    }
    found.extensions
}

impl Found {
    fn is_still_so(&self) -> bool {
        self.changed.iter().all(|(folder, then)| changed(folder) == Some(*then))
    }

    /// Whether a later change of each folder can be told.
    fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.changed.iter().all(|(_, then)| now.saturating_sub(*then) > SETTLED)
    }

    /// Looks at a folder and those in it. Links to folders are not followed.
    fn look_in(&mut self, folder: &Path, depth: u32) {
        // Before the folder is read, so that a change meanwhile is one since then.
        let (Some(changed), Ok(entries)) = (changed(folder), fs::read_dir(folder)) else { return };
        let mut has_objects = false;
        for entry in entries.flatten() {
            let (name, kind) = (entry.file_name(), entry.file_type());
            let (Some(name), Ok(kind)) = (name.to_str(), kind) else { continue };
            let is_own = depth == 0 && OWN.contains(&name);
            if kind.is_dir() {
                if !is_own && !WITHOUT.iter().any(|ending| name.ends_with(ending)) {
                    self.look_in(&entry.path(), depth + 1);
                }
            } else if imports::is_shared_object(name) {
                has_objects = true;
                let path = entry.path();
                if imports::needs_nvidia(&path) {
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
    fs::metadata(folder).ok()?.modified().ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs::File;

    use super::*;
    use crate::thin::ThinLibrary;

    struct World(tempfile::TempDir);

    impl World {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        /// A shared object that needs a library.
        fn write(&self, name: &str, needs: &str) {
            let path = self.path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, ThinLibrary { soname: "any.so", nodes: vec![], symbols: vec![], core: needs }.bytes()).unwrap();
        }

        fn found(&self) -> Vec<String> {
            let found = extensions(&self.path("cache"), &[self.path("site-packages"), self.path("missing")]);
            let site = self.path("site-packages");
            found.iter().map(|path| path.strip_prefix(&site).unwrap().to_string_lossy().into_owned()).collect()
        }

        /// All folders were changed so long ago.
        fn set_age(&self, folder: &Path, age: Duration) {
            for entry in fs::read_dir(folder).unwrap().flatten().filter(|entry| entry.file_type().unwrap().is_dir()) {
                self.set_age(&entry.path(), age);
            }
            File::open(folder).unwrap().set_modified(SystemTime::now() - age).unwrap();
        }

        fn kept(&self) -> usize {
            fs::read_dir(self.path("cache/environments")).map_or(0, Iterator::count)
        }
    }

    #[test]
    fn shared_objects_of_packages_are_found_that_need_a_library_of_nvidias() {
        let world = World::new();
        world.write("site-packages/fast/_C.abi3.so", "libcudart.so.13");
        world.write("site-packages/fast/deep/er/ops.so", "libcublas.so.13");
        world.write("site-packages/top.cpython-312-x86_64-linux-gnu.so", "libcuda.so.1");
        world.write("site-packages/numpy/core.so", "libc.so.6");
        world.write("site-packages/vision.libs/image.so", "libcudart.8774224f.so.13");
        world.write("site-packages/torch/lib/libtorch_cuda.so", "libcudart.so.13");
        world.write("site-packages/nvidia/cublas/lib/libcublas.so.13", "libcublasLt.so.13");
        world.write("site-packages/other/libcufft.so.12", "libcudart.so.13");
        fs::write(world.path("site-packages/fast/script.so"), "GROUP ( libm.so.6 )").unwrap();
        fs::write(world.path("site-packages/fast/model.py"), "").unwrap();
        assert_eq!(world.found(), ["fast/_C.abi3.so", "fast/deep/er/ops.so", "top.cpython-312-x86_64-linux-gnu.so"]);
    }

    #[test]
    fn what_was_found_is_kept_until_a_folder_changes_and_not_while_one_may_still_change() {
        let world = World::new();
        let (site, minute) = (world.path("site-packages"), Duration::from_secs(60));
        world.write("site-packages/fast/_C.so", "libcudart.so.13");
        assert_eq!((world.found(), world.kept()), (vec!["fast/_C.so".to_owned()], 0), "it was written just now");
        world.set_age(&site, minute);
        assert_eq!((world.found(), world.kept()), (vec!["fast/_C.so".to_owned()], 1));
        // Read once more it would not be found: nothing but the times of the folders is looked at.
        world.write("site-packages/fast/_C.so", "libc.so.6");
        assert_eq!(world.found(), ["fast/_C.so"]);
        for (name, folder) in [("site-packages/other/ops.so", "other"), ("site-packages/fast/more.so", "fast")] {
            world.write(name, "libcudart.so.13");
            assert!(world.found().iter().any(|found| found.starts_with(folder) && found != "fast/_C.so"), "{:?}", world.found());
            world.set_age(&site, minute);
        }
        assert_eq!(world.found(), ["fast/more.so", "other/ops.so"]);
    }
}
