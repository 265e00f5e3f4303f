//! The folder of doubles: kept, checked, made anew, made by several at once.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use super::*;
use crate::fixture::compile_torch;
use crate::thin::ThinLibrary;

struct World {
    folder: tempfile::TempDir,
    torch: PathBuf,
    core: PathBuf,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (torch, core) = (folder.path().join("torch"), folder.path().join("libcore.so"));
        compile_torch(&torch);
        let world = Self { folder, torch, core };
        world.write_core("libcore.so.1");
        world
    }

    /// A core library that differs by its SONAME.
    fn write_core(&self, soname: &str) {
        fs::write(&self.core, ThinLibrary { soname, nodes: vec![], symbols: vec![], core: "libc.so.6" }.bytes()).unwrap();
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn libraries(&self) -> Libraries {
        libraries(&self.cache(), &self.torch, &[], &self.core).unwrap()
    }

    fn folders(&self) -> usize {
        fs::read_dir(self.cache().join("doubles")).unwrap().count()
    }
}

#[test]
fn the_doubles_are_made_once_and_lie_beside_a_copy_of_the_core() {
    let world = World::new();
    let first = world.libraries();
    let expected = ["libcuda.so.1", "libcudart.so.13", "libnccl.so.2", "libnvidia-ml.so.1", "libnvrtc.so.13", "libnvshmem_host.so.3"];
    assert_eq!(first.doubles, expected);
    assert_eq!(fs::read(first.core()).unwrap(), fs::read(&world.core).unwrap());
    let inode = |name: &str| {
        use std::os::unix::fs::MetadataExt as _;
        first.folder.join(name).metadata().unwrap().ino()
    };
    let before = inode("libcuda.so.1");
    assert_eq!((world.libraries(), inode("libcuda.so.1"), world.folders()), (first.clone(), before, 1));
    // Two names for one file confuse the dynamic linker.
    assert!(first.doubles.iter().all(|name| !first.folder.join(name).is_symlink()));
}

#[test]
fn another_core_gets_another_folder() {
    let world = World::new();
    let first = world.libraries();
    world.write_core("libcore.so.22");
    assert_ne!(world.libraries().folder, first.folder);
    assert_eq!(world.folders(), 2);
}

#[test]
fn a_damaged_folder_is_made_anew() {
    let world = World::new();
    let first = world.libraries();
    let whole = || first.doubles.iter().map(|name| fs::read(first.folder.join(name)).unwrap()).collect::<Vec<_>>();
    let before = whole();
    let double = first.folder.join("libcudart.so.13");
    let mut changed = fs::read(&double).unwrap();
    changed[100] ^= 1;
    let damages: [&dyn Fn(); 5] = [
        &|| fs::write(&double, &changed).unwrap(),
        &|| fs::write(&double, "").unwrap(),
        &|| fs::remove_file(&double).unwrap(),
        &|| fs::remove_file(first.core()).unwrap(),
        &|| fs::write(first.folder.join(MANIFEST), "{}").unwrap(),
    ];
    for damage in damages {
        damage();
        assert_eq!(world.libraries(), first);
        assert_eq!((whole(), world.folders()), (before.clone(), 1));
    }
}

#[test]
fn several_processes_at_once_get_the_same_doubles() {
    let world = World::new();
    let made: Vec<Libraries> = std::thread::scope(|scope| {
        let makers: Vec<_> = (0..4).map(|_| scope.spawn(|| world.libraries())).collect();
        makers.into_iter().map(|maker| maker.join().unwrap()).collect()
    });
    assert!(made.iter().all(|one| *one == made[0]));
    assert_eq!(world.folders(), 1);
}

#[test]
fn what_nobody_used_for_long_goes_when_another_one_is_made() {
    let world = World::new();
    let first = world.libraries();
    let long_ago = SystemTime::now() - 2 * KEPT;
    File::options().append(true).open(first.folder.join(MANIFEST)).unwrap().set_modified(long_ago).unwrap();
    world.write_core("libcore.so.22");
    let second = world.libraries();
    assert_eq!((first.folder.exists(), second.folder.exists()), (false, true));
}

#[test]
fn a_torch_with_cuda_linked_in_is_refused() {
    let world = World::new();
    fs::copy(&world.core, world.torch.join("lib/libtorch_cuda.so")).unwrap();
    assert!(matches!(libraries(&world.cache(), &world.torch, &[], &world.core), Err(CacheError::StaticCuda(_))));
}

#[test]
fn the_cache_is_where_the_variables_say() {
    let folder = |variables: &[(&str, &str)]| {
        let variables: BTreeMap<&str, &str> = variables.iter().copied().collect();
        folder(|name| variables.get(name).map(OsString::from)).map_err(|error| error.to_string())
    };
    let (own, user, home) = (("HARNESS_CACHE", "/own"), ("XDG_CACHE_HOME", "/user"), ("HOME", "/home/x"));
    assert_eq!(folder(&[own, user, home]), Ok("/own".into()));
    assert_eq!(folder(&[("HARNESS_CACHE", ""), user, home]), Ok("/user/harness".into()));
    assert_eq!(folder(&[home]), Ok("/home/x/.cache/harness".into()));
    assert!(folder(&[]).unwrap_err().contains("neither HARNESS_CACHE nor"));
    assert!(folder(&[("HARNESS_CACHE", "/a b")]).unwrap_err().contains("colon or a space"));
}
