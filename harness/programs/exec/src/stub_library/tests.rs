//! Stub libraries are parsed by the rules of the dynamic linker, and loaded by it with the real
//! core library.
#![allow(clippy::unwrap_used)]

use std::ffi::{CStr, CString, c_void};
use std::{collections::BTreeSet, fs, os::unix::ffi::OsStrExt as _};

use object::{Endianness, read::elf::FileHeader as _};
use proptest::prelude::*;

use super::*;
use crate::own_libraries::{CORE, core_library};

fn symbol(name: &str, node: Option<&str>, kind: SymbolKind) -> Symbol {
    Symbol {
        name: name.to_owned(),
        node: node.map(str::to_owned),
        kind,
    }
}

/// Finds a symbol by its hash, like the dynamic linker, with its version node.
fn found(library: &[u8], name: &str) -> Option<(u8, Option<String>)> {
    let header = elf::FileHeader64::<Endianness>::parse(library).unwrap();
    let endian = header.endian().unwrap();
    let sections = header.sections(endian, library).unwrap();
    let symbols = sections.symbols(endian, library, elf::SHT_DYNSYM).unwrap();
    let versions = sections
        .versions(endian, library)
        .unwrap()
        .unwrap_or_default();
    let (table, _) = sections.gnu_hash(endian, library).unwrap().unwrap();
    let (index, symbol) = table.find(
        endian,
        name.as_bytes(),
        elf::gnu_hash(name.as_bytes()),
        None,
        &symbols,
        &versions,
    )?;
    let version = versions
        .version(versions.version_index(endian, index))
        .unwrap();
    Some((
        symbol.st_type(),
        version.map(|version| String::from_utf8(version.name().to_vec()).unwrap()),
    ))
}

proptest! {
    #[test]
    fn exactly_the_defined_symbols_are_found_by_hash_with_their_nodes(
        names in prop::collection::btree_set("[a-z_]{1,12}", 1..60),
        kinds in prop::collection::vec((any::<bool>(), 0..3_usize), 60),
        absent in "[A-Z]{1,12}",
    ) {
        let nodes = ["libx.so.1", "OTHER"];
        let symbols: Vec<Symbol> = names
            .iter()
            .zip(&kinds)
            .map(|(name, (is_function, node))| {
                symbol(
                    name,
                    nodes.get(*node).copied(),
                    if *is_function { SymbolKind::Function } else { SymbolKind::Variable },
                )
            })
            .collect();
        let library = StubLibrary {
            soname: "libx.so.1",
            nodes: nodes.to_vec(),
            symbols: symbols.iter().collect(),
            core: "libcore.so",
        }
        .bytes();
        for Symbol { name, node, kind } in &symbols {
            let kind = if *kind == SymbolKind::Function { elf::STT_FUNC } else { elf::STT_OBJECT };
            prop_assert_eq!(found(&library, name), Some((kind, node.clone())));
        }
        prop_assert_eq!(found(&library, &absent), None);
        prop_assert_eq!(found(&library, ANSWER), None, "imports are not exported");
    }
}

/// A library opened by the dynamic linker.
struct Opened(*mut c_void);

impl Opened {
    fn symbol(&self, name: &CStr, node: Option<&CStr>) -> *mut c_void {
        // SAFETY: the handle is open, and the strings are live.
        unsafe {
            match node {
                Some(node) => libc::dlvsym(self.0, name.as_ptr(), node.as_ptr()),
                None => libc::dlsym(self.0, name.as_ptr()),
            }
        }
    }
}

#[test]
fn the_core_answers_the_functions_of_a_loaded_stub_library() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(core_library().unwrap(), folder.path().join(CORE)).unwrap();
    let node = Some("libstub.so.7");
    // The second function writes zero through its seventh argument, which is on the stack.
    let symbols = [
        symbol("stubUnknown", node, SymbolKind::Function),
        symbol("cublasCgeqrfBatched", node, SymbolKind::Function),
        symbol("stubVariable", node, SymbolKind::Variable),
    ];
    let library = StubLibrary {
        soname: "libstub.so.7",
        nodes: vec!["libstub.so.7"],
        symbols: symbols.iter().collect(),
        core: CORE,
    };
    let path = folder.path().join("libstub.so.7");
    fs::write(&path, library.bytes()).unwrap();
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path is a C string; neither library has initializers.
    let opened = Opened(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) });
    // SAFETY: the linker's text lives until its next call in this thread.
    assert!(!opened.0.is_null(), "{:?}", unsafe {
        CStr::from_ptr(libc::dlerror())
    });
    let unknown = opened.symbol(c"stubUnknown", Some(c"libstub.so.7"));
    assert!(
        !unknown.is_null()
            && opened
                .symbol(c"stubUnknown", Some(c"libstub.so.6"))
                .is_null()
    );
    // SAFETY: a stub takes any arguments.
    let unknown: extern "C" fn(u64, f64) -> u64 = unsafe { std::mem::transmute(unknown) };
    assert_eq!((unknown(5, 0.5), unknown(6, 1.5)), (0, 0));
    let mut written = [7_u32; 2];
    type Batched = extern "C" fn(u64, u64, u64, u64, u64, u64, *mut u32) -> u32;
    // SAFETY: as above; the last argument points to four writable bytes.
    let batched: Batched =
        unsafe { std::mem::transmute(opened.symbol(c"cublasCgeqrfBatched", None)) };
    assert_eq!(
        (batched(0, 1, 2, 3, 4, 5, written.as_mut_ptr()), written),
        (0, [0, 7])
    );
    assert_eq!(
        // SAFETY: a variable has at least eight bytes.
        unsafe { *opened.symbol(c"stubVariable", None).cast::<u64>() },
        0
    );
    assert!(
        !opened.symbol(c"cudaMalloc", None).is_null(),
        "the core defines the names that a stub library lacks"
    );
}

#[test]
fn a_library_without_functions_imports_no_symbol() {
    let variable = symbol("stubVariable", None, SymbolKind::Variable);
    for symbols in [vec![], vec![&variable]] {
        let library = StubLibrary {
            soname: "libnvidia-ml.so.1",
            nodes: vec![],
            symbols: symbols.clone(),
            core: CORE,
        }
        .bytes();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnvidia-ml.so.1");
        fs::write(&path, library).unwrap();
        let exported: BTreeSet<String> = symbols.iter().map(|symbol| symbol.name.clone()).collect();
        assert_eq!(crate::imports::exports(&path).unwrap(), exported);
    }
}
