//! A program recovered from a snapshot converts back into the same snapshot.

use std::fs;
use std::path::{Path, PathBuf};

use harness_trace::program::{Placement, RecordedProgram};
use harness_trace::snapshot::{Action, Snapshot};
use harness_trace::trace::TraceEvent;

/// The snapshot files of a folder, by name. Empty if the folder does not exist.
fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(folder);
    let entries = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries
        .filter(|path| path.to_string_lossy().ends_with(".pickle.gz"))
        .collect();
    files.sort();
    files
}

/// Describes the first difference between a snapshot and its conversion.
fn difference(snapshot: &Snapshot, again: &Snapshot) -> Option<String> {
    let events = snapshot
        .traces
        .iter()
        .flatten()
        .zip(again.traces.iter().flatten())
        .enumerate();
    let mut different = events.filter(|(_, (recorded, converted))| recorded != converted);
    if let Some((index, (recorded, converted))) = different.next() {
        return Some(format!(
            "event {index}: {recorded:?}, converted to {converted:?}"
        ));
    }
    let mut different = snapshot
        .segments
        .iter()
        .zip(&again.segments)
        .filter(|(recorded, converted)| recorded != converted);
    if let Some((recorded, converted)) = different.next() {
        return Some(format!("{recorded:?}\nconverted to {converted:?}"));
    }
    (snapshot != again).then(|| "more or fewer events or segments, or other tables".to_owned())
}

fn convert_again(path: &Path) -> Result<(), String> {
    let snapshot = Snapshot::read(path).unwrap();
    let device = snapshot
        .traces
        .iter()
        .position(|events| !events.is_empty())
        .unwrap() as u32;
    let program = RecordedProgram::recover(&snapshot, device).unwrap();
    difference(
        &snapshot,
        &program.to_snapshot(&snapshot, Placement::Recorded).unwrap(),
    )
    .map_or(Ok(()), |difference| {
        Err(format!("{}: {difference}", path.display()))
    })
}

#[test]
fn recordings_convert_without_loss() {
    let files: Vec<PathBuf> = [
        "snapshot/explain/tests/snapshots",
        "snapshot/explain/tests/real_gpus",
    ]
    .into_iter()
    .flat_map(files)
    .collect();
    assert!(files.len() >= 6, "{files:?}");
    let wrong: Vec<String> = files
        .iter()
        .filter_map(|path| convert_again(path).err())
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_changed_program_converts_to_its_own_snapshot() {
    let path = &files("snapshot/explain/tests/snapshots")[0];
    let snapshot = Snapshot::read(path).unwrap();
    let mut program = RecordedProgram::recover(&snapshot, 0).unwrap();
    let before = snapshot.traces[0]
        .iter()
        .filter(|event| event.action == Action::Alloc)
        .count();
    // The program ends before its last allocation.
    let last = program
        .operations
        .iter()
        .rposition(|operation| matches!(operation, TraceEvent::Allocate { .. }))
        .unwrap();
    program.operations.truncate(last);
    program.origin.truncate(last);
    let converted = program.to_snapshot(&snapshot, Placement::Recorded).unwrap();
    let after = converted.traces[0]
        .iter()
        .filter(|event| event.action == Action::Alloc)
        .count();
    let refused = snapshot.traces[0]
        .iter()
        .filter(|event| event.action == Action::Oom)
        .count();
    assert!(
        after == before || after + 1 == before,
        "{after} of {before}, {refused} refused"
    );
    assert_ne!(converted.traces, snapshot.traces);
}

/// Tests the snapshots next to the project, if present. They are too large to include, and their
/// owners are others.
#[test]
fn shared_recordings_convert_without_loss() {
    let files: Vec<PathBuf> = ["../../shared/snapshots", "../../shared/real-snapshots"]
        .into_iter()
        .flat_map(files)
        .collect();
    if files.is_empty() {
        eprintln!("skipped: no snapshots next to the project");
    }
    let wrong: Vec<String> = files
        .iter()
        .filter_map(|path| convert_again(path).err())
        .collect();
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        files.len(),
        wrong.join("\n")
    );
}
