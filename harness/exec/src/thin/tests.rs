//! What is written is read back by the rules of the dynamic linker, and loaded by it beside the real core library.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;

use object::Endianness;
use object::read::elf::FileHeader as _;
use proptest::prelude::*;

use super::*;
use crate::launch::{CORE, core_library};

fn symbol(name: &str, node: Option<&str>, kind: Kind) -> Symbol {
    Symbol { name: name.to_owned(), node: node.map(str::to_owned), kind }
}

/// The symbol that a dynamic linker finds by hash, with its version node.
fn found(library: &[u8], name: &str) -> Option<(u8, Option<String>)> {
    let header = elf::FileHeader64::<Endianness>::parse(library).unwrap();
    let endian = header.endian().unwrap();
    let sections = header.sections(endian, library).unwrap();
    let symbols = sections.symbols(endian, library, elf::SHT_DYNSYM).unwrap();
    let versions = sections.versions(endian, library).unwrap().unwrap_or_default();
    let (table, _) = sections.gnu_hash(endian, library).unwrap().unwrap();
    let (index, symbol) = table.find(endian, name.as_bytes(), elf::gnu_hash(name.as_bytes()), None, &symbols, &versions)?;
    let version = versions.version(versions.version_index(endian, index)).unwrap();
    Some((symbol.st_type(), version.map(|version| String::from_utf8(version.name().to_vec()).unwrap())))
}

proptest! {
    #[test]
    fn every_symbol_is_found_by_its_hash_with_its_node_and_no_other_is(
        names in prop::collection::btree_set("[a-z_]{1,12}", 1..60),
        kinds in prop::collection::vec((any::<bool>(), 0..3_usize), 60),
        absent in "[A-Z]{1,12}",
    ) {
        let nodes = ["libx.so.1", "OTHER"];
        let symbols: Vec<Symbol> = names.iter().zip(&kinds).map(|(name, (is_function, node))| {
            symbol(name, nodes.get(*node).copied(), if *is_function { Kind::Function } else { Kind::Variable })
        }).collect();
        let library = ThinLibrary { soname: "libx.so.1", nodes: nodes.to_vec(), symbols: symbols.iter().collect(), core: "libcore.so" }.bytes();
        for Symbol { name, node, kind } in &symbols {
            let kind = if *kind == Kind::Function { elf::STT_FUNC } else { elf::STT_OBJECT };
            prop_assert_eq!(found(&library, name), Some((kind, node.clone())));
        }
        prop_assert_eq!(found(&library, &absent), None);
        prop_assert_eq!(found(&library, ANSWER), None, "what is imported is not exported");
    }
}

/// A library opened by the dynamic linker.
struct Opened(*mut c_void);

impl Opened {
    fn symbol(&self, name: &CStr, node: Option<&CStr>) -> *mut c_void {
        // SAFETY: the handle is open, the strings live.
        unsafe {
            match node {
                Some(node) => libc::dlvsym(self.0, name.as_ptr(), node.as_ptr()),
                None => libc::dlsym(self.0, name.as_ptr()),
            }
        }
    }
}

#[test]
fn a_library_of_stubs_is_loaded_and_its_functions_are_answered_by_the_core() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(core_library().unwrap(), folder.path().join(CORE)).unwrap();
    let node = Some("libthin.so.7");
    // The second function writes zero through its sixth argument, from 0 on: one on the stack.
    let symbols = [
        symbol("thinUnknown", node, Kind::Function),
        symbol("cublasCgeqrfBatched", node, Kind::Function),
        symbol("thinVariable", node, Kind::Variable),
    ];
    let library = ThinLibrary { soname: "libthin.so.7", nodes: vec!["libthin.so.7"], symbols: symbols.iter().collect(), core: CORE };
    let path = folder.path().join("libthin.so.7");
    fs::write(&path, library.bytes()).unwrap();
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path is a string; neither library does anything when it is loaded.
    let opened = Opened(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) });
    // SAFETY: the text is the linker's, and lives until its next call in this thread.
    assert!(!opened.0.is_null(), "{:?}", unsafe { CStr::from_ptr(libc::dlerror()) });
    let unknown = opened.symbol(c"thinUnknown", Some(c"libthin.so.7"));
    assert!(!unknown.is_null() && opened.symbol(c"thinUnknown", Some(c"libthin.so.6")).is_null());
    // SAFETY: a stub takes any arguments.
    let unknown: extern "C" fn(u64, f64) -> u64 = unsafe { std::mem::transmute(unknown) };
    assert_eq!((unknown(5, 0.5), unknown(6, 1.5)), (0, 0));
    let mut written = [7_u32; 2];
    type Batched = extern "C" fn(u64, u64, u64, u64, u64, u64, *mut u32) -> u32;
    // SAFETY: as above; the last argument is where it may write four bytes.
    let batched: Batched = unsafe { std::mem::transmute(opened.symbol(c"cublasCgeqrfBatched", None)) };
    assert_eq!((batched(0, 1, 2, 3, 4, 5, written.as_mut_ptr()), written), (0, [0, 7]));
    // SAFETY: a variable has room for more than that.
    assert_eq!(unsafe { *opened.symbol(c"thinVariable", None).cast::<u64>() }, 0);
    assert!(!opened.symbol(c"cudaMalloc", None).is_null(), "what a double lacks is found in the core behind it");
}

#[test]
fn a_library_without_functions_refers_to_no_symbol() {
    let variable = symbol("thinVariable", None, Kind::Variable);
    for symbols in [vec![], vec![&variable]] {
        let library = ThinLibrary { soname: "libnvidia-ml.so.1", nodes: vec![], symbols: symbols.clone(), core: CORE }.bytes();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("libnvidia-ml.so.1");
        fs::write(&path, library).unwrap();
        let exported: BTreeSet<String> = symbols.iter().map(|symbol| symbol.name.clone()).collect();
        assert_eq!(crate::imports::exports(&path).unwrap(), exported);
    }
}
