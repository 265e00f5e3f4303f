//! Recovers programs from snapshots, checks their fidelity, and explains their memory.

mod explanations;
mod shared;

use std::path::{Path, PathBuf};
use std::{collections::BTreeMap, process::ExitCode};

use flate2::{Compression, write::GzEncoder};
use harness_allocator::allocator::caching::{Config, TorchVersion};
use harness_allocator::allocator::{AllocatorKind, AllocatorSpec};
use harness_allocator::device::sim::AddressOrder;
use harness_allocator::units::Bytes;
use harness_explain::fidelity::{self, Fidelity};
use harness_explain::grid::{Configuration, Grid, UNLIMITED};
use harness_trace::program::{Placement, RecordedEnd, RecordedProgram, ReplaySetup, Replayed};
use harness_trace::snapshot::{ExtraId, RecordedSettings, Snapshot, StackId};
use serde::Deserialize;

use crate::shared::Test;

fn main() -> ExitCode {
    let with_data: [Test; 5] = [
        (
            "replays_match_the_addresses_of_real_gpus",
            replays_match_the_addresses_of_real_gpus,
        ),
        (
            "snapshots_of_simulated_devices_are_replayed_as_recorded",
            snapshots_of_simulated_devices_are_replayed_as_recorded,
        ),
        (
            "replays_of_successful_programs_match_pytorch",
            replays_of_successful_programs_match_pytorch,
        ),
        (
            "an_oom_repeats_at_the_same_request",
            an_oom_repeats_at_the_same_request,
        ),
        (
            "compact_recordings_match_their_originals",
            compact_recordings_match_their_originals,
        ),
    ];
    let others: [Test; 3] = [
        (
            "a_snapshot_of_pytorch_2_15_is_replayed_by_its_own_rules",
            a_snapshot_of_pytorch_2_15_is_replayed_by_its_own_rules,
        ),
        (
            "training_on_a_real_gpu_is_replayed_at_its_addresses",
            training_on_a_real_gpu_is_replayed_at_its_addresses,
        ),
        (
            "the_least_memory_includes_what_was_reserved_at_the_start",
            the_least_memory_includes_what_was_reserved_at_the_start,
        ),
    ];
    shared::run(
        with_data.into_iter().chain(explanations::WITH_DATA),
        &others,
    )
}

fn fidelity_of(path: &Path, memory: Option<Bytes>) -> Fidelity {
    let snapshot =
        Snapshot::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let program = RecordedProgram::recover_with(&snapshot, 0, memory)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let prepared = program
        .prepare()
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    fidelity::check(&prepared, &snapshot)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn replays_match_the_addresses_of_real_gpus() {
    let paths = shared::snapshots("real-snapshots");
    let (mut allocations, mut segments, mut unfaithful) = (0, 0, Vec::new());
    for path in &paths {
        let fidelity = fidelity_of(path, None);
        allocations += fidelity.at_recorded_address;
        segments += fidelity.segments_as_recorded;
        if !fidelity.faithful {
            unfaithful.push(path);
        }
    }
    assert!(unfaithful.is_empty(), "{unfaithful:?}");
    assert_eq!((paths.len(), allocations, segments), (13, 35_325, 2_006));
}

fn snapshots_of_simulated_devices_are_replayed_as_recorded() {
    let paths = shared::snapshots("snapshots");
    let mut unfaithful = Vec::new();
    for path in &paths {
        let fidelity = fidelity_of(path, None);
        if !fidelity.faithful {
            unfaithful.push(path);
        }
    }
    assert!(unfaithful.is_empty(), "{unfaithful:?}");
}

/// The program runs with PyTorch 2.15 on a device that reuses addresses, so its free blocks are not
/// in address order.
fn a_snapshot_of_pytorch_2_15_is_replayed_by_its_own_rules() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots/reused-addresses.pickle.gz");
    let mut snapshot = Snapshot::read(&path).expect("it is a snapshot");
    let at_recorded_address = |snapshot: &Snapshot| {
        let program = RecordedProgram::recover(snapshot, 0).expect("it is recovered");
        fidelity::check(&program.prepare().expect("it is prepared"), snapshot)
            .expect("it is replayed")
            .at_recorded_address
    };
    assert_eq!(
        (snapshot.torch(), at_recorded_address(&snapshot)),
        (TorchVersion::V2_15, 1576)
    );
    snapshot.given_torch = Some(TorchVersion::V2_11);
    assert!(at_recorded_address(&snapshot) < 1000);
}

/// PyTorch's own result with one setting.
#[derive(Debug, Deserialize)]
struct Truth {
    conf: String,
    outcome: String,
    peak_reserved: u64,
    peak_allocated: u64,
    num_alloc_retries: u64,
    num_ooms: u64,
}

#[derive(Debug, Deserialize)]
struct Truths {
    capacity: u64,
    confs: BTreeMap<String, Truth>,
}

/// The snapshots of the truth tables, with the name of their setting.
fn truths() -> Vec<(PathBuf, String, Truths)> {
    let with_truth = shared::snapshots("snapshots")
        .into_iter()
        .filter_map(|path| {
            let name = path
                .file_name()?
                .to_str()?
                .strip_suffix(".pickle.gz")?
                .to_owned();
            let (case, conf) = name.split_once('.')?;
            let table =
                std::fs::read_to_string(path.with_file_name(format!("{case}.truth.json"))).ok()?;
            Some((
                path,
                conf.to_owned(),
                serde_json::from_str(&table).expect("a truth table"),
            ))
        });
    with_truth.collect()
}

/// The result of a replay in the terms of the truth tables: outcome, peaks and retries.
fn outcome(replayed: &Replayed) -> (&'static str, u64, u64, u64) {
    let end = if replayed.oom.is_some() { "oom" } else { "ok" };
    let stats = &replayed.stats;
    (
        end,
        stats.reserved_bytes.all.peak,
        stats.allocated_bytes.all.peak,
        stats.num_alloc_retries,
    )
}

fn replays_of_successful_programs_match_pytorch() {
    let truths = truths();
    let (mut cells, mut exact, mut wrong) = (0, 0, Vec::new());
    for (path, own, truths) in &truths {
        if truths.confs[own].outcome != "ok" {
            continue;
        }
        let snapshot = Snapshot::read(path).expect("a snapshot");
        let program = RecordedProgram::recover_with(&snapshot, 0, Some(Bytes(truths.capacity)))
            .expect("a program");
        let prepared = program.prepare().expect("it can be replayed");
        for (name, truth) in &truths.confs {
            let config = Config::parse(&truth.conf).expect("a setting");
            let setup = ReplaySetup {
                allocator: AllocatorSpec::caching(config),
                memory: Bytes(truths.capacity),
                placement: Placement::InOrder(AddressOrder::Up),
            };
            let replayed = prepared.replay(&setup).expect("it can be replayed");
            let seen = outcome(&replayed);
            let survived = truth.num_ooms - u64::from(truth.outcome == "oom");
            let expected = (
                truth.outcome.as_str(),
                truth.peak_reserved,
                truth.peak_allocated,
                truth.num_alloc_retries,
            );
            let same = if survived == 0 {
                seen == expected
            } else {
                seen.0 == expected.0
            };
            cells += 1;
            exact += u32::from(survived == 0);
            if !same {
                wrong.push(format!(
                    "{} under {name}: {seen:?} instead of {expected:?}",
                    path.display()
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(cells == 32 && exact > 0);
}

fn an_oom_repeats_at_the_same_request() {
    let truths = truths();
    let mut seen = 0;
    for (path, own, truths) in &truths {
        let truth = &truths.confs[own];
        if truth.outcome != "oom" {
            continue;
        }
        let snapshot = Snapshot::read(path).expect("a snapshot");
        let program = RecordedProgram::recover(&snapshot, 0).expect("a program");
        assert_eq!(
            program.memory,
            Some(Bytes(truths.capacity)),
            "{}: reserved plus free memory",
            path.display()
        );
        let prepared = program.prepare().expect("it can be replayed");
        let allocator = AllocatorSpec::caching(Config::parse(&truth.conf).expect("a setting"));
        let setup = ReplaySetup {
            allocator,
            memory: Bytes(truths.capacity),
            placement: Placement::InOrder(AddressOrder::Up),
        };
        let replayed = prepared.replay(&setup).expect("it can be replayed");
        let expected = (
            truth.outcome.as_str(),
            truth.peak_reserved,
            truth.peak_allocated,
            truth.num_alloc_retries,
        );
        assert_eq!(outcome(&replayed), expected, "{}", path.display());
        let RecordedEnd::Oom {
            operation, event, ..
        } = program.ended
        else {
            panic!("{}: {:?}", path.display(), program.ended)
        };
        let refused = replayed.oom.expect("it ran out of memory");
        assert_eq!(
            (refused.operation, refused.event),
            (operation, event),
            "{}",
            path.display()
        );
        assert_eq!(
            replayed.survived_ooms + 1,
            truth.num_ooms,
            "{}",
            path.display()
        );
        seen += 1;
    }
    assert!(seen >= 8, "{seen} snapshots that ended in an out-of-memory");
}

/// Recordings of real GPUs without stacks, times and names: their names and original files.
const COMPACT: [(&str, &str); 2] = [
    (
        "training_mixed_precision",
        "NiuHuangxiaozi--forward_and_backward_memory_snapshot_200_mixed_precision.pickle.gz",
    ),
    (
        "forward_late_start",
        "silmont2000--memory_forward_bf16_128.pickle.gz",
    ),
];

fn compact(snapshot: &Snapshot) -> Snapshot {
    let mut compact = Snapshot {
        segments: snapshot.segments.clone(),
        traces: snapshot.traces.clone(),
        ..Snapshot::default()
    };
    compact.settings = snapshot.settings.as_ref().map(|settings| RecordedSettings {
        conf: settings.conf.clone(),
        all: Vec::new(),
    });
    for event in compact.traces.iter_mut().flatten() {
        (event.time_us, event.stack, event.extra) = (None, StackId::EMPTY, ExtraId::NONE);
    }
    for segment in &mut compact.segments {
        (segment.stack, segment.extra) = (StackId::EMPTY, ExtraId::NONE);
        for block in &mut segment.blocks {
            (block.stack, block.extra) = (StackId::EMPTY, ExtraId::NONE);
        }
    }
    compact
}

fn compact_path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/real_gpus")
        .join(format!("{name}.pickle.gz"))
}

fn compact_recordings_match_their_originals() {
    let paths = shared::snapshots("real-snapshots");
    for (name, file) in COMPACT {
        let original = paths
            .iter()
            .find(|path| path.ends_with(file))
            .expect("the original is there");
        let expected = compact(&Snapshot::read(original).expect("a snapshot"));
        let path = compact_path(name);
        if std::env::var_os("UPDATE").is_some() {
            let mut packed = GzEncoder::new(Vec::new(), Compression::best());
            expected.write(&mut packed).expect("memory can be written");
            std::fs::write(&path, packed.finish().expect("memory can be written"))
                .expect("the recording can be written");
        }
        let read = Snapshot::read(&path).expect("the recording is there; UPDATE=1 makes it");
        assert_eq!(
            (&read.segments, &read.traces),
            (&expected.segments, &expected.traces),
            "{name}"
        );
    }
}

fn training_on_a_real_gpu_is_replayed_at_its_addresses() {
    let fidelity = |name: &str| fidelity_of(&compact_path(name), None);
    let faithful = |allocations, segments| Fidelity {
        allocations,
        at_recorded_address: allocations,
        segments,
        segments_as_recorded: segments,
        refused: 0,
        refused_as_recorded: 0,
        faithful: true,
        first_divergence: None,
    };
    assert_eq!(
        fidelity("training_mixed_precision"),
        faithful(4404, 88),
        "from the start"
    );
    assert_eq!(
        fidelity("forward_late_start"),
        faithful(937, 0),
        "from a late start"
    );
}

fn the_least_memory_includes_what_was_reserved_at_the_start() {
    let snapshot = Snapshot::read(&compact_path("forward_late_start")).expect("a snapshot");
    let program = RecordedProgram::recover(&snapshot, 0).expect("a program");
    let prepared = program.prepare().expect("it can be replayed");
    // It reserves less than the recorded cache.
    let direct = Configuration::of_allocator(AllocatorKind::Direct);
    let (least, _) = Grid::new(&prepared, UNLIMITED)
        .least(&direct)
        .expect("it can be replayed");
    assert!(least.enough >= program.reserved_at_start(), "{least:?}");
}
