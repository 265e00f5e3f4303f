#![allow(clippy::unwrap_used)]

use std::fs::File;

use super::*;
use crate::stub_library::StubLibrary;

struct TempEnvironment(tempfile::TempDir);

impl TempEnvironment {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a shared object that needs a library.
    fn write(&self, name: &str, needs: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(
            path,
            StubLibrary {
                soname: "any.so",
                nodes: vec![],
                symbols: vec![],
                core: needs,
            }
            .bytes(),
        )
        .unwrap();
    }

    fn found(&self) -> Vec<String> {
        let found = extensions(
            &self.path("cache"),
            &[self.path("site-packages"), self.path("missing")],
        );
        let site = self.path("site-packages");
        found
            .iter()
            .map(|path| {
                path.strip_prefix(&site)
                    .unwrap()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect()
    }

    /// Sets the modification times of a folder and all inside.
    fn set_changed(&self, folder: &Path, time: SystemTime) {
        for entry in fs::read_dir(folder)
            .unwrap()
            .flatten()
            .filter(|entry| entry.file_type().unwrap().is_dir())
        {
            self.set_changed(&entry.path(), time);
        }
        File::open(folder).unwrap().set_modified(time).unwrap();
    }

    fn kept(&self) -> usize {
        fs::read_dir(self.path("cache/environments")).map_or(0, Iterator::count)
    }
}

#[test]
fn shared_objects_that_need_a_library_of_nvidia_are_found() {
    let environment = TempEnvironment::new();
    environment.write("site-packages/fast/_C.abi3.so", "libcudart.so.13");
    environment.write("site-packages/fast/deep/er/ops.so", "libcublas.so.13");
    environment.write(
        "site-packages/top.cpython-312-x86_64-linux-gnu.so",
        "libcuda.so.1",
    );
    environment.write("site-packages/numpy/core.so", "libc.so.6");
    environment.write(
        "site-packages/vision.libs/image.so",
        "libcudart.8774224f.so.13",
    );
    environment.write(
        "site-packages/torch/lib/libtorch_cuda.so",
        "libcudart.so.13",
    );
    environment.write(
        "site-packages/nvidia/cublas/lib/libcublas.so.13",
        "libcublasLt.so.13",
    );
    environment.write("site-packages/other/libcufft.so.12", "libcudart.so.13");
    fs::write(
        environment.path("site-packages/fast/script.so"),
        "GROUP ( libm.so.6 )",
    )
    .unwrap();
    fs::write(environment.path("site-packages/fast/model.py"), "").unwrap();
    assert_eq!(
        environment.found(),
        [
            "fast/_C.abi3.so",
            "fast/deep/er/ops.so",
            "top.cpython-312-x86_64-linux-gnu.so"
        ]
    );
}

#[test]
fn the_result_is_cached_until_a_folder_changes_but_not_while_one_may_still_change() {
    let environment = TempEnvironment::new();
    let (site, minute) = (environment.path("site-packages"), Duration::from_secs(60));
    environment.write("site-packages/fast/_C.so", "libcudart.so.13");
    // The check may begin late on a busy machine.
    environment.set_changed(&site, SystemTime::now() + minute);
    assert_eq!(
        (environment.found(), environment.kept()),
        (vec!["fast/_C.so".to_owned()], 0),
        "the folder changed too recently to cache"
    );
    environment.set_changed(&site, SystemTime::now() - minute);
    assert_eq!(
        (environment.found(), environment.kept()),
        (vec!["fast/_C.so".to_owned()], 1)
    );
    // A second scan would not find it: only the folders' times are checked.
    environment.write("site-packages/fast/_C.so", "libc.so.6");
    assert_eq!(environment.found(), ["fast/_C.so"]);
    for (name, folder) in [
        ("site-packages/other/ops.so", "other"),
        ("site-packages/fast/more.so", "fast"),
    ] {
        environment.write(name, "libcudart.so.13");
        assert!(
            environment
                .found()
                .iter()
                .any(|found| found.starts_with(folder) && found != "fast/_C.so"),
            "{:?}",
            environment.found()
        );
        environment.set_changed(&site, SystemTime::now() - minute);
    }
    assert_eq!(environment.found(), ["fast/more.so", "other/ops.so"]);
}
