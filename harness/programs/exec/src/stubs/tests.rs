#![allow(clippy::unwrap_used)]

use std::fs;

use super::*;
use crate::{imports, tests::fixture::compile_torch};

#[test]
fn stub_libraries_define_the_imported_names_that_the_core_lacks() {
    let folder = tempfile::tempdir().unwrap();
    compile_torch(folder.path());
    let imports = Imports::of(&imports::shared_objects(folder.path()).unwrap(), &[]).unwrap();
    let core = BTreeSet::from(["cudaMalloc".to_owned()]);
    let mut lines = Vec::new();
    for (soname, bytes) in stub_files(&imports, "libcore.so", &core) {
        let path = folder.path().join(&soname);
        fs::write(&path, bytes).unwrap();
        let names: Vec<String> = imports::exports(&path)
            .unwrap()
            .into_iter()
            .filter(|name| !functions::names().any(|known| known == name))
            .collect();
        lines.push(format!("{soname}: {}", names.join(" ")));
    }
    assert_eq!(
        lines,
        [
            "libcuda.so: cuFictional",
            "libcuda.so.1: cuFictional",
            "libcudart.so.13: cudaFictional",
            "libnccl.so.2: ncclFictional",
            "libnvidia-ml.so.1: ",
            "libnvrtc.so.13: ",
            "libnvshmem_host.so.3: nvshmem_init nvshmem_selected_device_transport",
        ]
    );
}

#[test]
fn stub_libraries_define_every_function_of_driver_and_runtime_and_those_found_by_name() {
    let libraries = ["libcublasLt.so.13", "libcudart.so.13", "libcudnn.so.9"]
        .map(|soname| (soname.to_owned(), crate::imports::Library::default()));
    let imports = Imports {
        libraries: libraries.into(),
        ..Imports::default()
    };
    let core = BTreeSet::from(["cudaMalloc".to_owned()]);
    let folder = tempfile::tempdir().unwrap();
    let mut names = Vec::new();
    for (soname, bytes) in stub_files(&imports, "libcore.so", &core) {
        let path = folder.path().join(&soname);
        fs::write(&path, bytes).unwrap();
        names.extend(imports::exports(&path).unwrap());
    }
    let missing: Vec<&str> = functions::names()
        .filter(|function| !names.iter().any(|name| name == function))
        .collect();
    assert_eq!(missing, ["cudaMalloc"]);
}

#[test]
fn a_bundled_copy_of_the_same_runtime_has_the_functions_of_the_runtime() {
    let folder = tempfile::tempdir().unwrap();
    compile_torch(folder.path());
    let mut imports = Imports::of(&imports::shared_objects(folder.path()).unwrap(), &[]).unwrap();
    let names = [
        "libcudart.8774224f.so.13",
        "libcudart.8774224f.so.12",
        "libnvjpeg.36e11081.so.13",
    ];
    imports.add_extensions(&names.map(|name| folder.path().join(name)));
    let files = stub_files(&imports, "libcore.so", &BTreeSet::new());
    let copies: Vec<&String> = files
        .keys()
        .filter(|name| name.contains("8774224f") || name.contains("nvjpeg"))
        .collect();
    assert_eq!(copies, ["libcudart.8774224f.so.13"]);
    let exports = |name: &str| {
        let path = folder.path().join(name);
        fs::write(&path, &files[name]).unwrap();
        imports::exports(&path).unwrap()
    };
    assert_eq!(
        exports("libcudart.8774224f.so.13"),
        exports("libcudart.so.13")
    );
}

#[test]
fn a_linker_that_drops_unneeded_libraries_keeps_the_driver() {
    let folder = tempfile::tempdir().unwrap();
    let core = BTreeSet::from(["cuInit".to_owned()]);
    let files = stub_files(&Imports::default(), "libcore.so", &core);
    let driver = folder.path().join(LINKED_DRIVER);
    fs::write(&driver, &files[LINKED_DRIVER]).unwrap();
    let source = folder.path().join("program.c");
    fs::write(
        &source,
        "int cuInit(unsigned); int start(void) { return cuInit(0); }",
    )
    .unwrap();
    let linked = folder.path().join("program.so");
    let made = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-nostdlib", "-Wl,--as-needed", "-o"])
        .args([&linked, &source, &driver])
        .status()
        .unwrap();
    assert!(
        made.success(),
        "a C compiler is required, as for building this project"
    );
    let imports = Imports::of(&[linked], &[]).unwrap();
    assert_eq!(imports.soname("libcuda"), Some(DRIVER));
}
