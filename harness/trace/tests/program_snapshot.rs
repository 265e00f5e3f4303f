//! A snapshot that was recovered as a program, and replayed, is the same snapshot again.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::path::{Path, PathBuf};

use harness_trace::program::RecordedProgram;
use harness_trace::snapshot::{Action, Snapshot};
use harness_trace::trace::TraceEvent;

/// The packed snapshots of a folder, by name; none where it is not there.
fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder);
    let entries = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.to_string_lossy().ends_with(".pickle.gz")).collect();
    files.sort();
    files
}

/// The first thing in which a snapshot that was told again is not the same.
fn difference(snapshot: &Snapshot, again: &Snapshot) -> Option<String> {
    let events = snapshot.traces.iter().flatten().zip(again.traces.iter().flatten()).enumerate();
    let mut different = events.filter(|(_, (recorded, told))| recorded != told);
    if let Some((index, (recorded, told))) = different.next() {
        return Some(format!("event {index}: {recorded:?}, told as {told:?}"));
    }
    let mut different = snapshot.segments.iter().zip(&again.segments).filter(|(recorded, told)| recorded != told);
    if let Some((recorded, told)) = different.next() {
        return Some(format!("{recorded:?}\ntold as {told:?}"));
    }
    (snapshot != again).then(|| "more or fewer events or segments, or other tables".to_owned())
}

fn told_again(path: &Path) -> Result<(), String> {
    let snapshot = Snapshot::read(path).unwrap();
    let device = snapshot.traces.iter().position(|events| !events.is_empty()).unwrap() as u32;
    let program = RecordedProgram::recover(&snapshot, device).unwrap();
    difference(&snapshot, &program.to_snapshot(&snapshot).unwrap())
        .map_or(Ok(()), |difference| Err(format!("{}: {difference}", path.display())))
}

#[test]
fn recordings_come_back_with_every_fact() {
    let files: Vec<PathBuf> = ["explain/tests/snapshots", "explain/tests/real_gpus"].into_iter().flat_map(files).collect();
    assert!(files.len() >= 6, "{files:?}");
    let wrong: Vec<String> = files.iter().filter_map(|path| told_again(path).err()).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_changed_program_is_told_with_what_it_would_do() {
    let path = &files("explain/tests/snapshots")[0];
    let snapshot = Snapshot::read(path).unwrap();
    let mut program = RecordedProgram::recover(&snapshot, 0).unwrap();
    let before = snapshot.traces[0].iter().filter(|event| event.action == Action::Alloc).count();
    // The program ends before its last allocation.
    let last = program.operations.iter().rposition(|operation| matches!(operation, TraceEvent::Allocate { .. })).unwrap();
    program.operations.truncate(last);
    program.origin.truncate(last);
    let told = program.to_snapshot(&snapshot).unwrap();
    let after = told.traces[0].iter().filter(|event| event.action == Action::Alloc).count();
    let refused = snapshot.traces[0].iter().filter(|event| event.action == Action::Oom).count();
    assert!(after == before || after + 1 == before, "{after} of {before}, {refused} refused");
    assert_ne!(told.traces, snapshot.traces);
}

/// All snapshots beside the project, where they are: they are large and others' property.
#[test]
fn recordings_beside_the_project_come_back_with_every_fact() {
    let files: Vec<PathBuf> = ["../../shared/snapshots", "../../shared/real-snapshots"].into_iter().flat_map(files).collect();
    if files.is_empty() {
        eprintln!("skipped: there are no snapshots beside the project");
    }
    let wrong: Vec<String> = files.iter().filter_map(|path| told_again(path).err()).collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), files.len(), wrong.join("\n"));
}
