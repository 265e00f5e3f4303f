//! Makes a stub library for each NVIDIA library that a PyTorch needs or opens.
//!
//! A stub library defines only the names that the core library lacks. Every stub library depends on the core, so the dynamic
//! linker finds the other names there. The core's symbols are unversioned and also satisfy versioned references.

use std::collections::BTreeSet;

use crate::imports::Imports;
use crate::stub_library::{StubLibrary, Symbol};

/// A stub library's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StubFile {
    /// File name, equal to its SONAME.
    pub soname: String,
    pub bytes: Vec<u8>,
}

/// Libraries that PyTorch opens by name, regardless of its imports: the driver and NVML.
const ALWAYS: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// Returns the stub libraries for a PyTorch with these imports. `exports` are the names that the core library defines.
pub fn stub_files(imports: &Imports, core: &str, exports: &BTreeSet<String>) -> Vec<StubFile> {
    let mut imports = imports.clone();
    // PyTorch also opens NVRTC by name, with the runtime's version.
    let runtime = imports.soname("libcudart").map(|soname| soname.replacen("libcudart", "libnvrtc", 1));
    for soname in ALWAYS.into_iter().map(str::to_owned).chain(runtime) {
        imports.libraries.entry(soname).or_default();
    }
    let stub = |(soname, library): (&String, &crate::imports::Library)| {
        let symbols: Vec<&Symbol> = library.symbols.values().filter(|symbol| !exports.contains(&symbol.name)).collect();
        let nodes = library.nodes.iter().map(String::as_str).collect();
        StubFile { soname: soname.clone(), bytes: StubLibrary { soname, nodes, symbols, core }.bytes() }
    };
    imports.libraries.iter().map(stub).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use super::*;
    use crate::fixture::compile_torch;
    use crate::imports;

    #[test]
    fn stub_libraries_define_the_names_that_the_core_lacks() {
        let folder = tempfile::tempdir().unwrap();
        compile_torch(folder.path());
        let imports = Imports::of(&imports::shared_objects(folder.path()).unwrap()).unwrap();
        let core = BTreeSet::from(["cudaMalloc".to_owned()]);
        let mut lines = Vec::new();
        for StubFile { soname, bytes } in stub_files(&imports, "libcore.so", &core) {
            let path = folder.path().join(&soname);
            fs::write(&path, bytes).unwrap();
            let names: Vec<String> = imports::exports(&path).unwrap().into_iter().collect();
            lines.push(format!("{soname}: {}", names.join(" ")));
        }
        assert_eq!(
            lines,
            [
                "libcuda.so.1: cuFictional",
                "libcudart.so.13: cudaFictional",
                "libnccl.so.2: ncclFictional",
                "libnvidia-ml.so.1: ",
                "libnvrtc.so.13: ",
                "libnvshmem_host.so.3: nvshmem_init nvshmem_selected_device_transport",
            ]
        );
    }
}
