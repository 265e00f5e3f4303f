//! Hashes the sources of this crate, which define the variables and files that the libraries inside
//! a program share with the program that starts it.

use std::hash::{DefaultHasher, Hasher as _};
use std::path::{Path, PathBuf};
use std::{fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=src");
    let mut files = Vec::new();
    find(Path::new("src"), &mut files)?;
    files.sort();
    let mut hash = DefaultHasher::new();
    for file in files {
        hash.write(file.as_os_str().as_encoded_bytes());
        hash.write(&fs::read(file)?);
    }
    println!("cargo::rustc-env=HARNESS_INTERFACE={:016x}", hash.finish());
    Ok(())
}

fn find(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            find(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
