//! Shell scripts as programs, for tests.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

/// A program of that name that ignores its arguments and does what the script says. It lies in the folder, which goes with it.
///
/// Another process writes it: a file that this one has open for writing, a child of another thread has open too between its fork and its exec, and what anybody may write
/// to the system does not start ("Text file busy").
pub(crate) fn program(name: &str, script: &str) -> (TempDir, PathBuf) {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let (text, path) = (folder.path().join("script"), folder.path().join(name));
    fs::write(&text, format!("#!/bin/sh\n{script}\n")).expect("a script can be written there");
    fs::set_permissions(&text, fs::Permissions::from_mode(0o755)).expect("it is this program's own");
    let copied = Command::new("cp").arg("-p").args([&text, &path]).status().expect("cp is there");
    assert!(copied.success(), "cp ended with {copied}");
    (folder, path)
}
