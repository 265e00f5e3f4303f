//! The doubles of NVIDIA's libraries: for each one that a PyTorch needs or opens, a thin library under its name.
//!
//! A double has stubs only for names that the core library lacks. Every double needs the core, so the dynamic linker finds the other names there: the core
//! is unversioned, and satisfies versioned references too.

use std::collections::BTreeSet;

use crate::imports::Imports;
use crate::thin::{Symbol, ThinLibrary};

/// The file of a double.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Double {
    /// Its file name, which is its SONAME.
    pub soname: String,
    pub bytes: Vec<u8>,
}

/// Libraries that PyTorch opens by name, whatever it imports: the driver and NVML.
const ALWAYS: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// The doubles for a PyTorch with these imports, each beside a core library of this file name with these exports.
#[must_use]
pub fn doubles(imports: &Imports, core: &str, exports: &BTreeSet<String>) -> Vec<Double> {
    let mut imports = imports.clone();
    // NVRTC is opened by name too, in the release of the runtime.
    let runtime = imports.soname("libcudart").map(|soname| soname.replacen("libcudart", "libnvrtc", 1));
    for soname in ALWAYS.into_iter().map(str::to_owned).chain(runtime) {
        imports.libraries.entry(soname).or_default();
    }
    let thin = |(soname, library): (&String, &crate::imports::Library)| {
        let symbols: Vec<&Symbol> = library.symbols.values().filter(|symbol| !exports.contains(&symbol.name)).collect();
        let nodes = library.nodes.iter().map(String::as_str).collect();
        Double { soname: soname.clone(), bytes: ThinLibrary { soname, nodes, symbols, core }.bytes() }
    };
    imports.libraries.iter().map(thin).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;

    use super::*;
    use crate::fixture::compile_torch;
    use crate::imports;

    #[test]
    fn doubles_have_stubs_for_what_the_core_lacks_and_exist_also_for_what_is_opened_by_name() {
        let folder = tempfile::tempdir().unwrap();
        compile_torch(folder.path());
        let imports = Imports::of(&imports::shared_objects(folder.path()).unwrap()).unwrap();
        let core = BTreeSet::from(["cudaMalloc".to_owned()]);
        let mut lines = Vec::new();
        for Double { soname, bytes } in doubles(&imports, "libcore.so", &core) {
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
