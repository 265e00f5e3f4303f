//! The cache of stub libraries: reuse, damage, concurrent writers, removal.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use super::*;
use crate::{stub_library::StubLibrary, tests::fixture::compile_torch};

struct TempEnvironment {
    folder: tempfile::TempDir,
    torch: PathBuf,
    core: PathBuf,
}

impl TempEnvironment {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (torch, core) = (
            folder.path().join("torch"),
            folder.path().join("libcore.so"),
        );
        compile_torch(&torch);
        let environment = Self {
            folder,
            torch,
            core,
        };
        environment.write_core("libcore.so.1");
        environment
    }

    /// Writes a core library with this SONAME.
    fn write_core(&self, soname: &str) {
        fs::write(
            &self.core,
            StubLibrary {
                soname,
                nodes: vec![],
                symbols: vec![],
                core: "libc.so.6",
            }
            .bytes(),
        )
        .unwrap();
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn libraries(&self) -> Libraries {
        self.find().unwrap()
    }

    fn find(&self) -> Result<Libraries, CacheError> {
        let objects = Objects {
            torch: Some(&self.torch),
            others: &[],
            cuda: Cuda::V13,
        };
        libraries(&self.cache(), objects, &self.core)
    }

    fn folders(&self) -> usize {
        fs::read_dir(self.cache().join(STUBS)).unwrap().count()
    }
}

#[test]
fn the_stubs_are_written_once_next_to_a_copy_of_the_core() {
    let environment = TempEnvironment::new();
    let first = environment.libraries();
    let expected = [
        "libcublas.so.13",
        "libcublasLt.so.13",
        "libcuda.so",
        "libcuda.so.1",
        "libcudart.so.13",
        "libcudnn.so.9",
        "libcufft.so.12",
        "libcupti.so.13",
        "libcurand.so.10",
        "libcusolver.so.12",
        "libcusparse.so.12",
        "libnccl.so.2",
        "libnvidia-ml.so.1",
        "libnvrtc.so.13",
        "libnvshmem_host.so.3",
    ];
    assert_eq!(first.stubs, expected);
    assert_eq!(
        fs::read(first.core()).unwrap(),
        fs::read(&environment.core).unwrap()
    );
    let inode = |name: &str| {
        use std::os::unix::fs::MetadataExt as _;
        first.folder.join(name).metadata().unwrap().ino()
    };
    let before = inode("libcuda.so.1");
    assert_eq!(
        (
            environment.libraries(),
            inode("libcuda.so.1"),
            environment.folders()
        ),
        (first.clone(), before, 1)
    );
    // Two names for one file confuse the dynamic linker.
    assert!(
        first
            .stubs
            .iter()
            .all(|name| !first.folder.join(name).is_symlink())
    );
}

#[test]
fn another_core_gets_another_folder() {
    let environment = TempEnvironment::new();
    let first = environment.libraries();
    environment.write_core("libcore.so.22");
    assert_ne!(environment.libraries().folder, first.folder);
    assert_eq!(environment.folders(), 2);
}

#[test]
fn a_damaged_folder_is_rewritten() {
    let environment = TempEnvironment::new();
    let first = environment.libraries();
    let whole = || {
        first
            .stubs
            .iter()
            .map(|name| fs::read(first.folder.join(name)).unwrap())
            .collect::<Vec<_>>()
    };
    let before = whole();
    let stub = first.folder.join("libcudart.so.13");
    let mut changed = fs::read(&stub).unwrap();
    changed[100] ^= 1;
    let damages: [&dyn Fn(); 5] = [
        &|| fs::write(&stub, &changed).unwrap(),
        &|| fs::write(&stub, "").unwrap(),
        &|| fs::remove_file(&stub).unwrap(),
        &|| fs::remove_file(first.core()).unwrap(),
        &|| fs::write(first.folder.join(MANIFEST), "{}").unwrap(),
    ];
    for damage in damages {
        damage();
        assert_eq!(environment.libraries(), first);
        assert_eq!((whole(), environment.folders()), (before.clone(), 1));
    }
}

#[test]
fn concurrent_writers_get_the_same_stubs() {
    let environment = TempEnvironment::new();
    let made: Vec<Libraries> = std::thread::scope(|scope| {
        let makers: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| environment.libraries()))
            .collect();
        makers
            .into_iter()
            .map(|maker| maker.join().unwrap())
            .collect()
    });
    assert!(made.iter().all(|one| *one == made[0]));
    assert_eq!(environment.folders(), 1);
}

#[test]
fn a_folder_unused_for_long_is_removed_when_another_one_is_written() {
    let environment = TempEnvironment::new();
    let first = environment.libraries();
    let long_ago = SystemTime::now() - 2 * KEPT;
    File::options()
        .append(true)
        .open(first.folder.join(MANIFEST))
        .unwrap()
        .set_modified(long_ago)
        .unwrap();
    environment.write_core("libcore.so.22");
    let second = environment.libraries();
    assert_eq!(
        (first.folder.exists(), second.folder.exists()),
        (false, true)
    );
}

#[test]
fn a_torch_with_static_cuda_is_refused() {
    let environment = TempEnvironment::new();
    fs::copy(
        &environment.core,
        environment.torch.join("lib/libtorch_cuda.so"),
    )
    .unwrap();
    assert!(matches!(environment.find(), Err(CacheError::StaticCuda(_))));
}

#[test]
fn variables_select_the_cache_folder() {
    let folder = |variables: &[(&str, &str)]| {
        let variables: BTreeMap<&str, &str> = variables.iter().copied().collect();
        folder(|name| variables.get(name).map(OsString::from)).map_err(|error| error.to_string())
    };
    let (own, user, home) = (
        ("HARNESS_CACHE", "/own"),
        ("XDG_CACHE_HOME", "/user"),
        ("HOME", "/home/x"),
    );
    assert_eq!(folder(&[own, user, home]), Ok("/own".into()));
    assert_eq!(
        folder(&[("HARNESS_CACHE", ""), user, home]),
        Ok("/user/harness".into())
    );
    assert_eq!(folder(&[home]), Ok("/home/x/.cache/harness".into()));
    assert!(
        folder(&[])
            .unwrap_err()
            .contains("set HARNESS_CACHE, XDG_CACHE_HOME or HOME")
    );
    assert!(
        folder(&[("HARNESS_CACHE", "/a b")])
            .unwrap_err()
            .contains("no colon, space or `$`")
    );
}
