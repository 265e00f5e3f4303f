//! Records read from the files of processes.
#![allow(clippy::unwrap_used)]

use harness_allocator::units::Bytes;
use harness_gpu_settings::{gpus::GPUS, settings::Settings};
use serde_json::json;

use super::*;
use crate::trials::observed::{Observed, TrialEnd};

fn torch(ended_out_of_memory: bool, rank: Option<&str>) -> String {
    let stats = json!({"0": {"num_ooms": 2, "num_alloc_retries": 3}, "1": {"num_ooms": 1}});
    json!({"version": "2.11.0", "rank": rank, "ended_out_of_memory": ended_out_of_memory,
        "memory_stats": stats, "problem": null})
    .to_string()
}

#[test]
fn the_files_of_processes_form_a_record_and_truncated_ones_are_ignored() {
    let run = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(run.path().join(name), text).unwrap();
    write("torch-10.json", &torch(false, Some("1")));
    write("torch-9.json", &torch(true, Some("0")));
    write("torch-11.json", "{");
    write("torch-12.json.unfinished", "{}");
    for pid in [9, 10, 11] {
        write(&format!("snapshot-{pid}.pickle"), "");
    }
    let settings = Settings::new(&GPUS[0], Bytes::gib(1));
    let record = Record::read(run.path(), End::Signal(9), &Machine::Simulated(settings)).unwrap();
    assert_eq!(
        (record.exit_code, record.signal, record.gpu.as_str()),
        (137, Some(9), &*GPUS[0].name)
    );
    let processes: Vec<_> = record
        .processes
        .iter()
        .map(|process| (process.pid, process.torch.is_some()))
        .collect();
    assert_eq!(processes, [(9, true), (10, true), (11, false)]);
    let torch = record.processes[0].torch.as_ref().unwrap();
    assert_eq!(
        (
            torch.sum("num_ooms"),
            torch.sum("num_alloc_retries"),
            torch.sum("unknown")
        ),
        (3, 3, 0)
    );
    let snapshots: Vec<_> = record
        .snapshots(run.path())
        .unwrap()
        .into_iter()
        .map(|one| (one.pid, one.rank, one.ended_out_of_memory))
        .collect();
    assert_eq!(
        snapshots,
        [
            (9, Some("0".to_owned()), true),
            (10, Some("1".to_owned()), false),
            (11, None, false)
        ]
    );
}

#[test]
fn a_killed_process_has_the_statistics_in_its_allocators_memory_and_those_before_resets() {
    let run = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &[u8]| fs::write(run.path().join(name), text).unwrap();
    let early = json!({"version": "2.11.0", "rank": null, "ended_out_of_memory": false,
        "memory_stats": {}, "problem": null, "statistics": "at_least", "resets": 2,
        "earlier": {"0": {"allocated_bytes.all.peak": 5 << 20, "num_ooms": 1}}});
    for pid in [9, 10] {
        write(&format!("torch-{pid}.json"), early.to_string().as_bytes());
    }
    // A block of 1 MiB in a segment of 2 MiB.
    let quantity = |amount: i64| {
        [
            amount, amount, amount, 0, 0, 0, 0, 0, amount, amount, amount, 0,
        ]
    };
    let mut words = [1, 1, 1, 0, 1 << 20, 2 << 20, 1 << 20, 1 << 20, 1 << 20]
        .map(quantity)
        .concat();
    words.extend([3, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, -1]);
    let mut file = vec![0; 2 * torch_statistics::SLOT];
    file[..8].copy_from_slice(&2904_u64.to_le_bytes());
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    file[torch_statistics::SLOT + 40..][..bytes.len()].copy_from_slice(&bytes);
    write("9.allocator", &file);
    write("11.allocator", &file);
    let settings = Settings::new(&GPUS[0], Bytes::gib(1));
    let record = Record::read(run.path(), End::Code(0), &Machine::Simulated(settings)).unwrap();
    let found: Vec<_> = record
        .processes
        .iter()
        .map(|process| process.torch.as_ref().unwrap())
        .collect();
    let figures = |torch: &TorchRecord| {
        (
            torch.statistics,
            torch.sum(PEAK_ALLOCATED),
            torch.sum("num_ooms"),
            torch.sum("num_alloc_retries"),
            torch.resets,
        )
    };
    assert_eq!(figures(found[0]), (Statistics::Kept, 5 << 20, 3, 3, 2));
    assert_eq!(figures(found[1]), (Statistics::AtLeast, 5 << 20, 1, 0, 2));
    assert_eq!(
        found.len(),
        2,
        "process 11 is not known to have used the GPU"
    );
}

#[test]
fn processes_with_lower_ids_than_that_of_harness_began_after_the_others() {
    let run = tempfile::tempdir().unwrap();
    let own = std::process::id();
    for pid in [own - 1, own + 1, own - 2, own + 2] {
        let path = run.path().join(format!("torch-{pid}.json"));
        fs::write(path, torch(true, None)).unwrap();
    }
    let machine = Machine::Simulated(Settings::new(&GPUS[0], Bytes::gib(1)));
    let record = Record::read(run.path(), End::Code(0), &machine).unwrap();
    let order: Vec<u32> = record.processes.iter().map(|one| one.pid).collect();
    assert_eq!(order, [own + 1, own + 2, own - 2, own - 1]);
}

#[test]
fn an_error_that_an_interactive_session_shows_did_not_end_a_program_with_exit_code_0() {
    let run = tempfile::tempdir().unwrap();
    for (pid, started) in [(9, 200), (10, 100)] {
        let torch =
            torch(true, None).replace("\"problem\"", &format!("\"started\":{started},\"problem\""));
        fs::write(run.path().join(format!("torch-{pid}.json")), torch).unwrap();
    }
    let machine = Machine::Simulated(Settings::new(&GPUS[0], Bytes::gib(1)));
    for (code, expected) in [(0, [true, false]), (1, [true, true])] {
        let record = Record::read(run.path(), End::Code(code), &machine).unwrap();
        let ended: Vec<_> = record
            .processes
            .iter()
            .map(|process| process.torch.as_ref().unwrap().ended_out_of_memory)
            .collect();
        assert_eq!(ended, expected);
    }
}

#[test]
fn a_figure_that_a_library_does_not_publish_is_unknown() {
    let run = tempfile::tempdir().unwrap();
    let library = json!({"name": "CuPy", "allocator": "CuPy's memory pool"});
    let text = |library: &serde_json::Value, stats: serde_json::Value| {
        json!({"version": "14.0", "library": library, "rank": null, "ended_out_of_memory": false,
            "memory_stats": stats, "problem": null, "statistics": "at_least"})
        .to_string()
    };
    let published = json!({"0": {"allocated_bytes.all.current": 4096}});
    fs::write(run.path().join("torch-9.json"), text(&library, published)).unwrap();
    // A process that only imports a library has no figures.
    fs::write(run.path().join("torch-10.json"), text(&library, json!({}))).unwrap();
    let settings = Settings::new(&GPUS[0], Bytes::gib(1));
    let machine = Machine::Simulated(settings);
    let mut record = Record::read(run.path(), End::Code(0), &machine).unwrap();
    record.processes[0].not_modelled = vec!["cuFunction".to_owned()];
    let ending = TrialEnd::By(End::Code(0));
    let observed = Observed::read(run.path(), run.path(), &record, ending, None).unwrap();
    assert_eq!(
        (observed.peak_allocated, observed.retries, observed.ooms),
        (None, None, None)
    );
    assert_eq!(observed.allocated_at_end, Some(Bytes(4096)));
    let unreported = observed.unreported.unwrap();
    assert!(
        unreported.starts_with("process 9 ended before CuPy could report"),
        "{unreported}"
    );
}
