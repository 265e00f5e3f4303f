//! Shell scripts as programs, for tests.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command};

use tempfile::TempDir;

/// Creates a program of that name that ignores its arguments and runs the script. It is deleted
/// with the folder.
///
/// Another process writes the file. If this process had it open for writing, a concurrently forked
/// child would inherit it, and starting the program would fail with "Text file busy".
pub(crate) fn program(name: &str, script: &str) -> (TempDir, PathBuf) {
    let folder = TempDir::new().expect("the temporary folder is writable");
    let (text, path) = (folder.path().join("script"), folder.path().join(name));
    fs::write(&text, format!("#!/bin/sh\n{script}\n")).expect("a script can be written there");
    fs::set_permissions(&text, fs::Permissions::from_mode(0o755))
        .expect("it is this program's own");
    let copied = Command::new("cp")
        .arg("-p")
        .args([&text, &path])
        .status()
        .expect("cp is there");
    assert!(copied.success(), "cp ended with {copied}");
    (folder, path)
}
