//! Makes a stub library for each NVIDIA library that a program needs or opens.
//!
//! A stub library defines the names that the program imports and, for driver and runtime, all
//! functions of CUDA, because programs compile code at run time that links against them. It omits
//! the names that the core library has, except in the file for linkers. Every stub library depends
//! on the core, so the dynamic linker finds the other names there. The core's symbols are
//! unversioned and also satisfy versioned references.

use std::collections::{BTreeMap, BTreeSet};

use harness_gpu_settings::functions;

use crate::imports::{Imports, Library, library_of_file, library_of_symbol, version_of_copy};
use crate::stub_library::{StubLibrary, Symbol, SymbolKind};

/// Libraries that PyTorch opens by name, regardless of its imports: the driver and NVML.
const ALWAYS: [&str; 2] = [DRIVER, "libnvidia-ml.so.1"];
pub(crate) const DRIVER: &str = "libcuda.so.1";
/// The file that linkers read.
pub(crate) const LINKED_DRIVER: &str = "libcuda.so";

/// Returns the stub libraries for a PyTorch with these imports, by file name, usually the SONAME.
/// `exports` are the names that the core library defines.
pub fn stub_files(
    imports: &Imports,
    core: &str,
    exports: &BTreeSet<String>,
) -> BTreeMap<String, Vec<u8>> {
    let mut imports = imports.clone();
    // PyTorch also opens NVRTC by name, with the runtime's version.
    let runtime = imports
        .soname("libcudart")
        .map(|soname| soname.replacen("libcudart", "libnvrtc", 1));
    for soname in ALWAYS.into_iter().map(str::to_owned).chain(runtime) {
        imports.libraries.entry(soname).or_default();
    }
    add_functions(&mut imports);
    // Programs may find a bundled copy of the runtime first, as vLLM does in the memory map of its
    // process.
    let runtime = imports
        .libraries
        .iter()
        .find(|(soname, _)| library_of_file(soname) == Some("libcudart"));
    if let Some((soname, runtime)) =
        runtime.map(|(soname, library)| (soname.clone(), library.clone()))
    {
        let same = imports.copies.iter().filter(|copy| {
            version_of_copy(copy).is_some_and(|version| soname.ends_with(&format!(".{version}")))
        });
        imports
            .libraries
            .extend(same.map(|copy| (copy.clone(), runtime.clone())));
    }
    let stub = |soname: &str, library: &Library, omits: &dyn Fn(&Symbol) -> bool| {
        let symbols = library.symbols.values().filter(|symbol| !omits(symbol));
        StubLibrary {
            soname,
            nodes: library.nodes.iter().map(String::as_str).collect(),
            symbols: symbols.collect(),
            core,
        }
        .bytes()
    };
    let is_of_core = |symbol: &Symbol| exports.contains(&symbol.name);
    let file = |(soname, library): (&String, &Library)| {
        (soname.clone(), stub(soname, library, &is_of_core))
    };
    let mut files: BTreeMap<String, Vec<u8>> = imports.libraries.iter().map(file).collect();
    // Linkers look for this name, as with Triton's `-lcuda`. With `--as-needed` they need a library
    // only for names that it defines. Programs open the file with the version instead.
    if let Some(driver) = imports.libraries.get(DRIVER) {
        files.insert(LINKED_DRIVER.to_owned(), stub(DRIVER, driver, &|_| false));
    }
    files
}

/// Adds all functions of CUDA that the simulated GPU knows to the libraries that define them.
fn add_functions(imports: &mut Imports) {
    let mut of_library: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for name in functions::names() {
        if let Some(library) = library_of_symbol(name) {
            of_library.entry(library).or_default().push(name);
        }
    }
    for (soname, library) in &mut imports.libraries {
        let node = library.nodes.first().cloned();
        let names = library_of_file(soname).and_then(|known| of_library.get(known));
        for &name in names.into_iter().flatten() {
            let function = || Symbol {
                name: name.to_owned(),
                node: node.clone(),
                kind: SymbolKind::Function,
            };
            library
                .symbols
                .entry(name.to_owned())
                .or_insert_with(function);
        }
    }
}

#[cfg(test)]
mod tests;
