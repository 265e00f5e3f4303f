use super::*;

fn fault(text: &str) -> Fault {
    text.parse().expect("parse a fault")
}

#[test]
fn a_fault_fails_its_attempts_and_ignores_smaller_ones() {
    let faults = ["cudaMalloc:2:2:1MiB", "cudaMalloc:5"].map(fault);
    let mut attempts = Attempts::new(None, &faults);
    let sizes = [4096, 1 << 20, 2 << 20, 4096, 1 << 20, 3 << 20];
    let failed = sizes.map(|size| attempts.fails(Call::Malloc, Bytes(size)));
    assert_eq!(failed, [false, false, true, false, true, false]);
    assert!(!attempts.fails(Call::Create, Bytes::mib(2)));
}

#[test]
fn a_call_refused_for_another_reason_does_not_count() {
    let mut attempts = Attempts::new(None, &[fault("cuMemCreate:2")]);
    let mut fails = || attempts.fails(Call::Create, Bytes::mib(2));
    assert!(!fails() && fails());
    attempts.take_back(Call::Create, Bytes::mib(2));
    assert!(attempts.fails(Call::Create, Bytes::mib(2)));
}

#[test]
fn any_counts_all_calls_for_device_memory_together() {
    let mut attempts = Attempts::new(None, &[fault("any:2:2")]);
    let calls = [
        Call::Malloc,
        Call::HostAlloc,
        Call::Create,
        Call::MallocAsync,
        Call::Malloc,
    ];
    let failed = calls.map(|call| attempts.fails(call, Bytes::mib(2)));
    assert_eq!(failed, [false, false, true, true, false]);
}

#[test]
fn logged_attempts_are_read_and_a_truncated_one_is_ignored() {
    let folder = tempfile::tempdir().expect("create a folder");
    let noted = [
        (Call::Create, 20, AttemptOutcome::Served),
        (Call::HostAlloc, 1, AttemptOutcome::Refused),
        (Call::Malloc, 2, AttemptOutcome::Injected),
    ]
    .map(|(call, size, outcome)| Attempt {
        call,
        size: Bytes::mib(size),
        submitted: 7,
        outcome,
        device: 3,
        number: 5,
        held: Bytes::mib(9),
    });
    let mut attempts = Attempts::new(Some(folder.path()), &[]);
    attempts.open();
    noted.iter().for_each(|attempt| attempts.note(attempt));
    let path = folder
        .path()
        .join(format!("{}{ENDING}", std::process::id()));
    assert_eq!(Attempt::read(&path).expect("read the file"), noted);
    attempts.note_free(9, 3, Bytes::mib(5));
    assert_eq!(attempts.noted(), 4);
    let frees = DriverFree::read(&path.with_extension("frees")).expect("read the file");
    assert_eq!(
        frees,
        [DriverFree {
            attempts: 3,
            submitted: 9,
            device: 3,
            held: Bytes::mib(5)
        }]
    );
    let whole = fs::read(&path).expect("read the file");
    fs::write(&path, &whole[..whole.len() - 1]).expect("write the file");
    assert_eq!(Attempt::read(&path).expect("read the file"), noted[..2]);
}

#[test]
fn counting_continues_after_exec_and_starts_anew_in_a_forked_child() {
    let folder = tempfile::tempdir().expect("create a folder");
    let faults = [fault("cudaMalloc:3")];
    let one = Attempt {
        call: Call::Malloc,
        size: Bytes::mib(2),
        submitted: 0,
        outcome: AttemptOutcome::Served,
        device: 0,
        number: 0,
        held: Bytes::ZERO,
    };
    let attempt = |attempts: &mut Attempts| {
        let fails = attempts.fails(one.call, one.size);
        attempts.note(&one);
        fails
    };
    let mut before = Attempts::new(Some(folder.path()), &faults);
    assert!(!attempt(&mut before) && !attempt(&mut before));
    let mut after_exec = Attempts::new(Some(folder.path()), &faults);
    assert!(attempt(&mut after_exec));
    assert_eq!(after_exec.noted(), 3);
    let mut child = Attempts::new(None, &faults);
    child.open();
    assert!(!attempt(&mut child) && !attempt(&mut child));
    child.start_child();
    assert!(!attempt(&mut child) && !attempt(&mut child) && attempt(&mut child));
}

#[test]
fn a_fault_is_reached_by_its_first_attempt() {
    let attempts = [1, 2, 1].map(|size| Attempt {
        call: Call::Malloc,
        size: Bytes::mib(size),
        submitted: 0,
        outcome: AttemptOutcome::Served,
        device: 0,
        number: 0,
        held: Bytes::ZERO,
    });
    for (text, reached) in [
        ("cudaMalloc:3", true),
        ("any:3:2", true),
        ("cudaMalloc:4", false),
        ("cudaMalloc:2:1:2MiB", false),
        ("cudaHostAlloc:1", false),
    ] {
        assert_eq!(reach(&attempts, &fault(text)), reached, "{text}");
    }
}

#[test]
fn nothing_is_logged_after_an_error() {
    let folder = tempfile::tempdir().expect("create a folder");
    let file = format!("{}{ENDING}", std::process::id());
    std::os::unix::fs::symlink("/dev/full", folder.path().join(file)).expect("link");
    let mut attempts = Attempts::new(Some(folder.path()), &[]);
    attempts.open();
    assert!(attempts.file.is_some() && attempts.frees.is_some());
    attempts.note(&Attempt {
        call: Call::Malloc,
        size: Bytes::mib(2),
        submitted: 0,
        outcome: AttemptOutcome::Served,
        device: 0,
        number: 0,
        held: Bytes::ZERO,
    });
    assert!(attempts.file.is_none() && attempts.frees.is_some());
    assert_eq!(attempts.noted(), 1);
}
