//! Jobs recovered from snapshots: the fidelity gate over the snapshots beside the project, where they are there.

use std::path::{Path, PathBuf};

use harness_explain::fidelity::{self, Fidelity};
use harness_trace::job::Job;
use harness_trace::snapshot::Snapshot;

/// A folder of data beside the project, if it is there.
fn shared(folder: &str) -> Option<Vec<PathBuf>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(folder);
    let entries = match std::fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(error) => {
            eprintln!("skipped: {}: {error}", folder.display());
            return None;
        }
    };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("the folder is readable").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "gz"));
    paths.sort();
    Some(paths)
}

fn fidelity_of(path: &Path, memory: Option<harness_allocator::units::Bytes>) -> Fidelity {
    let snapshot = Snapshot::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let job = Job::recover_with(&snapshot, 0, memory).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    for note in &job.notes {
        eprintln!("{}: {note}", path.file_name().unwrap_or_default().display());
    }
    let prepared = job.prepare().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    fidelity::check(&prepared, &snapshot).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn every_allocation_recorded_on_a_real_gpu_lands_on_its_address() {
    let Some(paths) = shared("real-snapshots") else { return };
    let (mut allocations, mut segments, mut unfaithful) = (0, 0, Vec::new());
    for path in &paths {
        let fidelity = fidelity_of(path, None);
        allocations += fidelity.at_recorded_address;
        segments += fidelity.segments_as_recorded;
        eprintln!("{}: {fidelity:?}", path.file_name().unwrap_or_default().display());
        if !fidelity.faithful {
            unfaithful.push(path);
        }
    }
    assert!(unfaithful.is_empty(), "{unfaithful:?}");
    assert_eq!((paths.len(), allocations, segments), (13, 35_325, 2_006));
}

#[test]
fn every_snapshot_of_pytorch_on_a_simulated_device_is_replayed_as_recorded() {
    let Some(paths) = shared("snapshots") else { return };
    let mut unfaithful = Vec::new();
    for path in &paths {
        let fidelity = fidelity_of(path, None);
        eprintln!("{}: {fidelity:?}", path.file_name().unwrap_or_default().display());
        if !fidelity.faithful {
            unfaithful.push(path);
        }
    }
    assert!(unfaithful.is_empty(), "{unfaithful:?}");
}
