//! Records read from the files of processes.
#![allow(clippy::unwrap_used)]

use harness_allocator::units::Bytes;
use harness_gpu_settings::{gpus::GPUS, settings::Settings};
use serde_json::json;

use super::*;

fn torch(ended_out_of_memory: bool, rank: Option<&str>) -> String {
    let stats = json!({"0": {"num_ooms": 2, "num_alloc_retries": 3}, "1": {"num_ooms": 1}});
    json!({"version": "2.11.0", "rank": rank, "ended_out_of_memory": ended_out_of_memory, "memory_stats": stats, "problem": null})
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
    assert_eq!((record.exit_code, record.signal, record.gpu.as_str()), (137, Some(9), &*GPUS[0].name));
    let processes: Vec<_> = record.processes.iter().map(|process| (process.pid, process.torch.is_some())).collect();
    assert_eq!(processes, [(9, true), (10, true), (11, false)]);
    let torch = record.processes[0].torch.as_ref().unwrap();
    assert_eq!((torch.sum("num_ooms"), torch.sum("num_alloc_retries"), torch.sum("unknown")), (3, 3, 0));
    let snapshots: Vec<_> =
        record.snapshots(run.path()).unwrap().into_iter().map(|one| (one.pid, one.rank, one.ended_out_of_memory)).collect();
    assert_eq!(snapshots, [(9, Some("0".to_owned()), true), (10, Some("1".to_owned()), false), (11, None, false)]);
}
