use std::{collections::BTreeSet, fs::File, io, path::Path};

use object::read::elf::{FileHeader as _, Sym as _};
use object::{Endianness, ReadCache, elf};

use crate::files;

#[derive(Debug, thiserror::Error)]
pub enum SharedObjectError {
    #[error("cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    #[error("is a 32-bit shared library, but this harness needs a 64-bit one")]
    ThirtyTwoBits,
    #[error("is not a shared library: {0}")]
    NotALibrary(object::read::Error),
}

pub fn exports(path: &Path) -> Result<BTreeSet<String>, SharedObjectError> {
    let file = ReadCache::new(files::open(path)?);
    read_exports(&file).map_err(
        |error| match elf::FileHeader32::<Endianness>::parse(&file) {
            Ok(_) => SharedObjectError::ThirtyTwoBits,
            Err(_) => SharedObjectError::NotALibrary(error),
        },
    )
}

fn read_exports(file: &ReadCache<File>) -> object::read::Result<BTreeSet<String>> {
    let header = elf::FileHeader64::<Endianness>::parse(file)?;
    let endian = header.endian()?;
    let symbols = header
        .sections(endian, file)?
        .symbols(endian, file, elf::SHT_DYNSYM)?;
    let defined = symbols.iter().filter(|symbol| symbol.is_definition(endian));
    defined
        .map(|symbol| {
            symbol
                .name(endian, symbols.strings())
                .map(|name| String::from_utf8_lossy(name).into_owned())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(bytes: &[u8]) -> String {
        let folder = tempfile::tempdir().expect("a temporary folder can be created");
        let path = folder.path().join("library.so");
        std::fs::write(&path, bytes).expect("the file can be written");
        exports(&path)
            .expect_err("the file is not a library")
            .to_string()
    }

    #[test]
    fn what_is_no_shared_library_is_refused_with_what_it_is() {
        assert_eq!(
            refusal(b"#!/bin/sh\n"),
            "is not a shared library: Invalid ELF header size or alignment"
        );
        let mut thirty_two = [0; 52];
        thirty_two[..7].copy_from_slice(b"\x7fELF\x01\x01\x01");
        assert_eq!(
            refusal(&thirty_two),
            "is a 32-bit shared library, but this harness needs a 64-bit one"
        );
        let missing = exports(Path::new("no-such-library.so"))
            .expect_err("there is none")
            .to_string();
        assert!(
            missing.starts_with("cannot be read: No such file"),
            "{missing}"
        );
    }
}
