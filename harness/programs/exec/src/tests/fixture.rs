//! Test only: a fake torch whose shared objects import from NVIDIA's libraries like the real ones.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::{fs, process::Command};

use harness_gpu_settings::settings::Cuda;

use crate::stub_library::{StubLibrary, Symbol, SymbolKind};
use crate::{cache::Libraries, own_libraries::CORE, program::Program, setup::Setup};

/// Functions with their library's version node, functions without one, and a variable.
const LIBRARIES: [(&str, Option<&str>, &[&str]); 4] = [
    (
        "libcudart.so.13",
        Some("libcudart.so.13"),
        &["cudaMalloc", "cudaFictional"],
    ),
    ("libnvshmem_host.so.3", Some("NVSHMEM"), &["nvshmem_init"]),
    ("libnccl.so.2", None, &["ncclFictional"]),
    ("libcuda.so.1", None, &["cuFictional"]),
];
const VARIABLE: &str = "nvshmem_selected_device_transport";
const SOURCE: &str = "
extern int cudaMalloc(void **, unsigned long), cudaFictional(void), ncclFictional(void);
extern int nvshmem_init(void) __attribute__((weak)), cuFictional(void);
extern int nvshmem_selected_device_transport, customer;
int (*used[])(void) = {(int (*)(void))cudaMalloc, cudaFictional, nvshmem_init, ncclFictional,
    cuFictional};
int *variable[] = {&nvshmem_selected_device_transport, &customer};
";

/// Returns a setup with these stub libraries for a torch on this version of the C library.
pub(crate) fn setup(folder: &Path, stubs: &[&str], libc: (u32, u32)) -> Setup {
    let program = Program {
        libc,
        ..Program::default()
    };
    let stubs = stubs.iter().map(|stub| (*stub).to_owned()).collect();
    Setup {
        program,
        uses_cuda: true,
        cuda: Cuda::V13,
        warnings: Vec::new(),
        libraries: Libraries {
            folder: folder.to_owned(),
            core: CORE.to_owned(),
            stubs,
        },
    }
}

/// Compiles `lib/libtorch_cuda.so` into this torch folder.
pub(crate) fn compile_torch(torch: &Path) {
    let stubs = torch.join("stubs");
    fs::create_dir_all(&stubs).unwrap();
    fs::create_dir_all(torch.join("lib")).unwrap();
    let mut paths: Vec<PathBuf> = Vec::new();
    for (soname, node, names) in LIBRARIES {
        let symbol = |(name, kind): (&str, SymbolKind)| Symbol {
            name: name.to_owned(),
            node: node.map(str::to_owned),
            kind,
        };
        let variable = (node == Some("NVSHMEM")).then_some((VARIABLE, SymbolKind::Variable));
        let symbols: Vec<Symbol> = names
            .iter()
            .map(|name| (*name, SymbolKind::Function))
            .chain(variable)
            .map(symbol)
            .collect();
        let library = StubLibrary {
            soname,
            nodes: node.into_iter().collect(),
            symbols: symbols.iter().collect(),
            core: "libcore.so",
        };
        paths.push(stubs.join(soname));
        fs::write(stubs.join(soname), library.bytes()).unwrap();
    }
    let source = stubs.join("torch.c");
    fs::write(&source, SOURCE).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args([
        "-shared",
        "-fPIC",
        "-nostdlib",
        "-Wl,--no-as-needed",
        "-Wl,--allow-shlib-undefined",
        "-o",
    ]);
    let made = compiler
        .arg(torch.join("lib/libtorch_cuda.so"))
        .arg(&source)
        .args(&paths)
        .status()
        .unwrap();
    assert!(
        made.success(),
        "a C compiler is required, as for building this project"
    );
    fs::remove_dir_all(&stubs).unwrap();
}
