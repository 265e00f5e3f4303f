use std::os::unix::fs::MetadataExt as _;

use super::*;

fn read(folder: &Path) -> Vec<ProcessCounters> {
    ProcessCounters::read_folder(folder).expect("read the folder")
}

fn program() -> String {
    let program = std::env::current_exe().expect("know the program");
    program
        .file_name()
        .expect("it has a name")
        .to_string_lossy()
        .into_owned()
}

#[test]
fn counters_are_read_from_the_file_of_their_process() {
    let folder = tempfile::tempdir().expect("create a folder");
    let counters = OwnCounters::new(Some(folder.path()), 2, Bytes::gib(8));
    counters.count_allocation(1, Bytes::mib(6), false, true);
    counters.set_used(1, Bytes::mib(4));
    assert_eq!(
        counters.delay(&["cudaFree:1ns".parse().expect("it is valid")], Call::Free),
        Nanos(1)
    );
    counters.count_failed_call(Call::HostAlloc, true);
    counters.count_failed_call(Call::HostAlloc, false);
    counters.count_memory_read();
    counters.count_uncomputed_read();
    counters.count_uncomputed_read();
    assert_eq!(counters.uncomputed_reads(), 2);
    counters.note_workspace(512, 70);
    counters.note_workspace(30, 1024);
    counters.note_unmodelled(b"cufileRead");
    counters.count_wait_of_free();
    counters.count_graph_request();
    counters.note_unmodelled(&[b'x'; 80]);
    fs::write(folder.path().join("1.counters"), "damaged").expect("write a file");
    let none = DeviceCounters {
        memory: Bytes::gib(8),
        used: Bytes(0),
        peak: Bytes(0),
        mallocs: 0,
        frees: 0,
        failed: 0,
        injected: 0,
    };
    let expected = ProcessCounters {
        refusal: None,
        pid: std::process::id(),
        devices: vec![
            none,
            DeviceCounters {
                used: Bytes::mib(4),
                peak: Bytes::mib(6),
                mallocs: 1,
                failed: 1,
                ..none
            },
        ],
        submitted: 0,
        memory_reads: 1,
        uncomputed_reads: 2,
        waits_of_frees: 1,
        graph_requests: 1,
        workspace_bounds: [512, 1024],
        slow: vec![(Call::Free, 1)],
        failed_calls: vec![(Call::HostAlloc, [2, 1])],
        not_modelled: vec!["cufileRead".to_owned(), "x".repeat(NAME_BYTES)],
        program: program().chars().take(NAME_BYTES).collect(),
    };
    assert_eq!(read(folder.path()), [expected]);
    let file = fs::metadata(
        folder
            .path()
            .join(format!("{}{ENDING}", std::process::id())),
    )
    .expect("read the file's length");
    assert!(
        file.blocks() * 512 >= file.len(),
        "its disk space is reserved"
    );
}

#[test]
fn counters_continue_after_exec_and_start_anew_in_a_forked_child() {
    let folder = tempfile::tempdir().expect("create a folder");
    let before = OwnCounters::new(Some(folder.path()), 1, Bytes::gib(8));
    before.count_allocation(0, Bytes::mib(6), false, false);
    let after = OwnCounters::new(Some(folder.path()), 1, Bytes::gib(8));
    after.count_allocation(0, Bytes::mib(2), false, false);
    let DeviceCounters {
        used,
        peak,
        mallocs,
        ..
    } = read(folder.path())[0].devices[0];
    assert_eq!((used, peak, mallocs), (Bytes::mib(2), Bytes::mib(6), 2));
    fs::remove_file(
        folder
            .path()
            .join(format!("{}{ENDING}", std::process::id())),
    )
    .expect("remove the file");
    after.start_child();
    assert_eq!(
        read(folder.path()),
        [],
        "a child that counts nothing has no file"
    );
    after.count_allocation(0, Bytes::mib(1), false, false);
    assert_eq!(read(folder.path())[0].devices[0].mallocs, 1);
}

#[test]
fn without_a_folder_a_process_counts_in_private_memory() {
    let counters = OwnCounters::new(Some(Path::new("/nonexistent")), 1, Bytes::gib(1));
    counters.count_frees(0, Bytes::ZERO, 1);
    assert_eq!(counters.figures[0].frees.load(Ordering::Relaxed), 1);
}
