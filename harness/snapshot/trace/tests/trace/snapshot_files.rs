//! Reads snapshots that PyTorch wrote, on real and simulated GPUs, and compares them with
//! statistics that PyTorch counted. The files are large and belong to others, so the project does
//! not include them. The tests report when they skip them.

use std::path::{Path, PathBuf};
use std::{collections::BTreeMap, fs};

use harness_allocator::stats::BlockState;
use harness_trace::snapshot::{Recording, Snapshot};
use serde_json::Value;

/// The packed files of a folder next to the project. Reports a missing folder and returns no files.
fn files(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../../shared")
        .join(folder);
    let Ok(entries) = fs::read_dir(&folder) else {
        eprintln!("skipped: {} is not there", folder.display());
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "gz"))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "{}: no files", folder.display());
    files
}

fn read(path: &Path) -> Snapshot {
    Snapshot::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn recorded_snapshots_match_pytorchs_statistics() {
    for path in files("snapshots") {
        let snapshot = read(&path);
        let side_car: Value = serde_json::from_slice(
            &fs::read(path.to_string_lossy().replace(".pickle.gz", ".json")).unwrap(),
        )
        .unwrap();
        let figures = &side_car["snapshot"];
        let events: Vec<_> = snapshot.traces.iter().flatten().collect();
        let mut actions: BTreeMap<&str, u64> = BTreeMap::new();
        events
            .iter()
            .for_each(|event| *actions.entry(event.action.name()).or_default() += 1);
        let with_frames = events
            .iter()
            .filter(|event| snapshot.stacks.frames(event.stack).len() > 0)
            .count();
        let reserved: u64 = snapshot.segments.iter().map(|segment| segment.size.0).sum();
        let blocks = snapshot.segments.iter().flat_map(|segment| &segment.blocks);
        let allocated: u64 = blocks
            .filter(|block| block.state == BlockState::Allocated)
            .map(|block| block.size.0)
            .sum();
        let seen = serde_json::json!({
            "events": events.len(), "actions": actions, "segments": snapshot.segments.len(),
            "with_frames": with_frames,
            "reserved": reserved, "allocated": allocated,
            "conf": snapshot.settings.as_ref().unwrap().conf,
        });
        let counted = serde_json::json!({
            "events": figures["trace_events"], "actions": figures["actions"],
            "segments": figures["segments"], "with_frames": figures["events_with_frames"],
            "reserved": side_car["reserved_at_dump"], "allocated": side_car["allocated_at_dump"],
            "conf": side_car["conf"],
        });
        assert_eq!(seen, counted, "{}", path.display());
        assert_eq!(snapshot.notes, Vec::<String>::new(), "{}", path.display());
        let is_complete = side_car["recording"]["complete"] == true;
        let events_lost = side_car["recording"]["from_"] == "start" && !is_complete;
        let recording = Recording {
            from_start: is_complete,
            events_lost,
            missing: Vec::new(),
        };
        assert_eq!(snapshot.recording(0), Some(recording), "{}", path.display());
    }
}

#[test]
fn coverage_of_real_recordings_is_detected() {
    const FROM_START: [&str; 4] = [
        "forward_memory_snapshot_100",
        "forward_and_backward",
        "profile_grad",
        "mem_snapshot.pickle",
    ];
    const NOTHING_RECORDED: &str = "oom_snapshot";
    // One was recorded with `enabled="state"` (stacks of live blocks, and the last event). Two
    // programs had recorded before.
    const EVENTS_LOST: [&str; 3] = ["my_snapshot", "ctx256_fullstep", "ctx512_forward_mixed"];
    for path in files("real-snapshots") {
        let (name, snapshot) = (path.to_string_lossy(), read(&path));
        let from_start = FROM_START.iter().any(|part| name.contains(part));
        let recording = Recording {
            from_start,
            events_lost: EVENTS_LOST.iter().any(|part| name.contains(part)),
            missing: Vec::new(),
        };
        assert_eq!(
            snapshot.recording(0),
            (!name.contains(NOTHING_RECORDED)).then_some(recording),
            "{name}"
        );
    }
}

#[test]
fn snapshots_of_real_gpus_are_read_completely() {
    // Counts of segments, blocks, events and distinct stacks, from Python's own pickle module.
    const COUNTED: [(&str, [usize; 4]); 13] = [
        ("LfieLike--my_snapshot.pickle.gz", [259, 868, 1, 18]),
        (
            "NiuHuangxiaozi--forward_and_backward_memory_snapshot_200_mixed_precision.pickle.gz",
            [88, 229, 12976, 229],
        ),
        (
            "NiuHuangxiaozi--forward_memory_snapshot_100.pickle.gz",
            [31, 64, 2304, 112],
        ),
        (
            "Wedsonlin--medium_128_training_memory_snapshot.pickle.gz",
            [377, 918, 19136, 171],
        ),
        (
            "Wedsonlin--medium_512_training_memory_snapshot.pickle.gz",
            [400, 1041, 22332, 189],
        ),
        ("Yiyi-philosophy--oom_snapshot.pickle.gz", [176, 463, 1, 4]),
        (
            "cranberrii--memory_snapshot.pickle.gz",
            [215, 1079, 10307, 153],
        ),
        (
            "kkaitlyn111--memory_ctx128_forward.pickle.gz",
            [516, 1276, 4657, 87],
        ),
        (
            "kkaitlyn111--memory_ctx256_fullstep_.pickle.gz",
            [1021, 1711, 20128, 180],
        ),
        (
            "kkaitlyn111--memory_ctx512_forward_mixed.pickle.gz",
            [868, 1816, 6765, 111],
        ),
        ("shreyansh26--profile_grad.pkl.gz", [7, 9, 33, 10]),
        ("silmont2000--mem_snapshot.pickle.gz", [9, 20, 97, 43]),
        (
            "silmont2000--memory_forward_bf16_128.pickle.gz",
            [43, 178, 2811, 134],
        ),
    ];
    let files = files("real-snapshots");
    let read = files.iter().map(|path| {
        let snapshot = read(path);
        let blocks = snapshot
            .segments
            .iter()
            .map(|segment| segment.blocks.len())
            .sum();
        let events = snapshot.traces.iter().map(Vec::len).sum();
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(snapshot.notes, Vec::<String>::new(), "{name}");
        (
            name,
            [
                snapshot.segments.len(),
                blocks,
                events,
                snapshot.stacks.all().count(),
            ],
        )
    });
    let read: Vec<_> = read.collect();
    assert!(files.is_empty() || read == COUNTED, "{read:?}");
}

#[test]
fn snapshots_survive_writing_and_reading() {
    for path in files("snapshots")
        .into_iter()
        .chain(files("real-snapshots"))
    {
        let snapshot = read(&path);
        let mut written = Vec::new();
        snapshot.write(&mut written).unwrap();
        assert!(
            Snapshot::parse(&written).unwrap() == snapshot,
            "{}",
            path.display()
        );
    }
}
