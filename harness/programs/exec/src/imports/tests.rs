//! The imports of a compiled library, and the library of each name.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::tests::fixture::compile_torch;

#[test]
fn imports_belong_to_a_library_by_version_or_by_name() {
    let folder = tempfile::tempdir().unwrap();
    compile_torch(folder.path());
    let objects = shared_objects(folder.path()).unwrap();
    assert_eq!(objects, [folder.path().join("lib/libtorch_cuda.so")]);
    let imports = Imports::of(&objects, &[]).unwrap();
    let mut lines = Vec::new();
    for (soname, library) in &imports.libraries {
        for Symbol { name, node, kind } in library.symbols.values() {
            lines.push(format!(
                "{soname} {} {name} {kind:?}",
                node.as_deref().unwrap_or("-")
            ));
        }
    }
    // `customer` starts with `cu`, but a driver function has a capital letter next.
    assert_eq!(
        lines,
        [
            "libcuda.so.1 - cuFictional Function",
            "libcudart.so.13 libcudart.so.13 cudaFictional Function",
            "libcudart.so.13 libcudart.so.13 cudaMalloc Function",
            "libnccl.so.2 - ncclFictional Function",
            "libnvshmem_host.so.3 NVSHMEM nvshmem_init Function",
            "libnvshmem_host.so.3 NVSHMEM nvshmem_selected_device_transport Variable",
        ]
    );
    assert_eq!(
        (imports.soname("libcudart"), imports.soname("libcudnn")),
        (Some("libcudart.so.13"), None)
    );
}

#[test]
fn the_longest_prefix_selects_the_library_of_a_function() {
    let library = |name| library_of_symbol(name).unwrap_or("-");
    let names = [
        "cuMemCreate",
        "cudaMalloc",
        "__cudaRegisterFunction",
        "cublasCreate_v2",
        "cublasLtCreate",
        "cuFileRead",
        "cusparseLtInit",
        "nvmlInit_v2",
        "nvtxMarkA",
    ];
    let libraries = [
        "libcuda",
        "libcudart",
        "libcudart",
        "libcublas",
        "libcublasLt",
        "libcufile",
        "libcusparseLt",
        "libnvidia-ml",
        "libnvToolsExt",
    ];
    assert_eq!(names.map(library), libraries);
    assert_eq!(
        ["curl_easy_init", "cu", "malloc", "customer"].map(library),
        ["-"; 4]
    );
}

#[test]
fn only_the_exact_file_name_is_nvidias() {
    let library = |name| library_of_file(name).unwrap_or("-");
    let names = [
        "libcudart.so.13",
        "libcuda.so",
        "libcudart.8774224f.so.13",
        "libcudart_static.so",
        "libcudart.solution",
        "libc.so.6",
    ];
    assert_eq!(
        names.map(library),
        ["libcudart", "libcuda", "-", "-", "-", "-"]
    );
}

#[test]
fn only_copies_of_the_runtime_are_recognized_with_their_version() {
    let names = [
        "libcudart.8774224f.so.13",
        "libcudart-8774224f.so.12",
        "libcudart.so.13",
        "libcudart_stub.so.1",
        "libnvjpeg.36e11081.so.13",
    ];
    assert_eq!(
        names.map(version_of_copy),
        [Some("13"), Some("12"), None, None, None]
    );
}

#[test]
fn an_invalid_library_is_refused_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libtorch.so");
    fs::write(
        &path,
        "not ELF, but long enough to hold the header of a file that is",
    )
    .unwrap();
    let error = Imports::of(std::slice::from_ref(&path), &[])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("libtorch.so") && error.contains("is not a shared library for x86-64"),
        "{error}"
    );
    fs::remove_file(&path).unwrap();
    assert!(matches!(
        Imports::of(&[path], &[]),
        Err(ImportsError::Unreadable { .. })
    ));
}
