//! Tells the harness what it is built from: the commit with whether there are changes beside it, and the compiler with the profile.
//!
//! The commit is asked for in release builds only. A debug build is for working on the code, its figures are nobody's baseline, and to know
//! its commit it would have to be built anew with each one. A release build looks again when a commit is made or a source file changes,
//! and in the second case it is built anyway. `HARNESS_COMMIT` says the commit where git cannot, as in `HARNESS_COMMIT=1a2b3c` or
//! `HARNESS_COMMIT=1a2b3c-dirty`.

use std::env;
use std::path::Path;
use std::process::Command;

/// What the program is built from, seen from this package. Changes elsewhere, in scenarios or documents, do not make it another program.
const SOURCES: [&str; 15] = [
    "build.rs",
    "src",
    "Cargo.toml",
    "../allocator",
    "../base",
    "../bench",
    "../cuda",
    "../devices",
    "../language",
    "../record",
    "../report",
    "../run",
    "../scenario",
    "../trace",
    "../../Cargo.lock",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=HARNESS_COMMIT");
    let profile = env::var("PROFILE").unwrap_or_default();
    println!("cargo::rustc-env=HARNESS_BUILD_COMPILER={}, {profile}", compiler());
    let told = env::var("HARNESS_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = told.or_else(|| if profile == "release" { commit() } else { None });
    if let Some(commit) = commit {
        println!("cargo::rustc-env=HARNESS_BUILD_COMMIT={commit}");
    }
}

/// As in `rustc 1.95.0`.
fn compiler() -> String {
    let rustc = env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned());
    let version = answer(Command::new(rustc).arg("-V")).unwrap_or_default();
    let words: Vec<&str> = version.split_whitespace().take(2).collect();
    if words.is_empty() { "rustc of unknown version".to_owned() } else { words.join(" ") }
}

/// The commit, with `-dirty` behind it where sources differ from it. `None` without git, or where it knows nothing of this package.
fn commit() -> Option<String> {
    // A copy of the sources inside somebody else's repository has that one's commits, not ours.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    watch(&SOURCES);
    let branch = git(&["rev-parse", "--symbolic-full-name", "HEAD"]).unwrap_or_default();
    // The log gets a line with every commit and checkout; without one, the branch itself is watched. Git's index is not: it says nothing
    // that the sources do not say, and even looking at the status writes it.
    let places = ["logs/HEAD", "HEAD", "packed-refs", &branch].map(|name| git(&["rev-parse", "--git-path", name]).unwrap_or_default());
    watch(&places.each_ref().map(String::as_str));
    let commit = git(&["rev-parse", "HEAD"])?;
    let changes = git(&[["--no-optional-locks", "status", "--porcelain", "--"].as_slice(), &SOURCES].concat())?;
    Some(if changes.is_empty() { commit } else { format!("{commit}-dirty") })
}

/// Runs this script again when one of these changes. A place that is not there would make it run always.
fn watch(places: &[&str]) {
    for place in places.iter().filter(|place| !place.is_empty() && Path::new(place).exists()) {
        println!("cargo::rerun-if-changed={place}");
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    answer(Command::new("git").args(arguments))
}

/// What a command prints, where it succeeds.
fn answer(command: &mut Command) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}
