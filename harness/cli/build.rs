//! Records the compiler, the profile and the commit in the program, including whether there are
//! uncommitted changes.
//!
//! Debug builds do not record the commit, because they would have to be rebuilt after each commit.
//! This script runs again after each commit and after each change of a source file.
//! `HARNESS_COMMIT` replaces git, as in `HARNESS_COMMIT=1a2b3c` or `HARNESS_COMMIT=1a2b3c-dirty`.

use std::{env, path::Path, process::Command};

/// The sources of all packages, relative to this one. Changes in other places do not change the
/// program.
fn sources() -> Vec<String> {
    let inside = |folder: String| {
        let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        names
            .map(|name| format!("{folder}/{name}"))
            .collect::<Vec<_>>()
    };
    let rooms = inside("..".to_owned());
    let packages = rooms
        .iter()
        .cloned()
        .chain(rooms.iter().cloned().flat_map(inside));
    let sources = packages.flat_map(|package| {
        ["src", "build.rs", "Cargo.toml"].map(|part| format!("{package}/{part}"))
    });
    sources
        .chain(["../../Cargo.lock".to_owned()])
        .filter(|source| Path::new(source).exists())
        .collect()
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=HARNESS_COMMIT");
    println!(
        "cargo::rustc-env=HARNESS_BUILD_COMPILER={}, {}",
        compiler(),
        profile()
    );
    let given = env::var("HARNESS_COMMIT")
        .ok()
        .filter(|commit| !commit.is_empty());
    // Cargo reports `debug` or `release` here, whichever a profile inherits.
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = given.or_else(|| if is_release { commit() } else { None });
    if let Some(commit) = commit {
        println!("cargo::rustc-env=HARNESS_BUILD_COMMIT={commit}");
    }
}

/// The name of the profile, which Cargo gives only as a folder: `target/PROFILE/build/PACKAGE/out`.
/// That of `dev` is `debug`.
fn profile() -> String {
    let out = env::var("OUT_DIR").unwrap_or_default();
    Path::new(&out)
        .ancestors()
        .nth(3)
        .and_then(Path::file_name)
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// The name and version of the compiler, as in `rustc 1.95.0`.
fn compiler() -> String {
    let rustc = env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let version = answer(Command::new(rustc).arg("-V")).unwrap_or_default();
    let words: Vec<&str> = version.split_whitespace().take(2).collect();
    if words.is_empty() {
        "rustc of unknown version".to_owned()
    } else {
        words.join(" ")
    }
}

/// The commit, with the suffix `-dirty` if sources differ from it. `None` without git or outside of
/// the project's repository.
fn commit() -> Option<String> {
    // A copy of the sources in another repository must not report that repository's commits.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let sources = sources();
    watch(&sources);
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"]).unwrap_or_default();
    // The log gets a line with every commit and checkout. Without a log, the branch itself is
    // watched. The index is not watched, because even `git status` writes it.
    let places = ["logs/HEAD", "HEAD", "packed-refs", &branch]
        .map(|name| git(&["rev-parse", "--git-path", name]).unwrap_or_default());
    watch(&places);
    let commit = git(&["rev-parse", "HEAD"])?;
    let mut status = vec!["--no-optional-locks", "status", "--porcelain", "--"];
    status.extend(sources.iter().map(String::as_str));
    let changes = git(&status)?;
    Some(if changes.is_empty() {
        commit
    } else {
        format!("{commit}-dirty")
    })
}

/// Runs this script again when one of these paths changes. A missing path would make it run always.
fn watch(places: &[String]) {
    for place in places
        .iter()
        .filter(|place| !place.is_empty() && Path::new(place).exists())
    {
        println!("cargo::rerun-if-changed={place}");
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    answer(Command::new("git").args(arguments))
}

fn answer(command: &mut Command) -> Option<String> {
    let output = command
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
