#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};
use std::{fs, io::Write as _, os::unix::fs::MetadataExt as _};

use super::*;
use crate::process::Program;

/// The account of another living process.
fn account_of(ledger: Ledger, pid: u32) -> LedgerAccount {
    let entry = ledger.lock().enter(pid.into());
    LedgerAccount {
        ledger: Some(ledger),
        entry,
    }
}

fn folder() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger");
    (folder, path)
}

/// Changes the usage to `bytes` if no more than 10 bytes are used together.
fn hold(account: &mut LedgerAccount, bytes: u64) -> Result<(), Bytes> {
    account.change(0, |others| {
        if others.0 + bytes > 10 {
            (Err(others), Bytes::ZERO)
        } else {
            (Ok(()), Bytes(bytes))
        }
    })
}

#[test]
fn processes_share_the_memory_of_a_device() {
    let (_folder, path) = folder();
    let mut first = LedgerAccount::new(Some(Ledger::create(&path).unwrap()));
    let mut second = account_of(
        Ledger::open(&path).unwrap(),
        std::os::unix::process::parent_id(),
    );
    assert_eq!(
        (hold(&mut first, 7), hold(&mut second, 4)),
        (Ok(()), Err(Bytes(7)))
    );
    let ledger = first.ledger().unwrap();
    assert_eq!(
        ledger.holdings(0),
        [Holding {
            pid: std::process::id(),
            held: Bytes(7),
            pinned: Bytes::ZERO,
            registered: Bytes::ZERO,
        }]
    );
    assert_eq!((ledger.holdings(1), ledger.peak(0)), (vec![], Bytes(7)));
    first.released(0, Bytes(5));
    assert_eq!(
        (hold(&mut second, 4), first.ledger().unwrap().peak(0)),
        (Ok(()), Bytes(9))
    );
}

#[test]
fn memory_of_a_killed_process_is_released_before_and_after_its_parent_waits() {
    let (_folder, path) = folder();
    let mut first = LedgerAccount::new(Some(Ledger::create(&path).unwrap()));
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let mut killed = account_of(Ledger::open(&path).unwrap(), child.id());
    assert_eq!(
        (hold(&mut killed, 6), hold(&mut first, 5)),
        (Ok(()), Err(Bytes(6)))
    );
    child.kill().unwrap();
    // Before the wait, the process is still listed in /proc.
    while Program::of_process(child.id().into()).is_some() {
        std::thread::yield_now();
    }
    assert_eq!(hold(&mut first, 5), Ok(()));
    child.wait().unwrap();
    assert_eq!(first.ledger().unwrap().holdings(0).len(), 1);
}

#[test]
fn memory_entered_for_another_process_is_held_until_its_end() {
    let (_folder, path) = folder();
    let mut first = LedgerAccount::new(Some(Ledger::create(&path).unwrap()));
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let ledger = Ledger::open(&path).unwrap();
    ledger.enter(child.id(), 0, Bytes(9)).unwrap();
    ledger.enter(child.id(), 0, Bytes(6)).unwrap();
    assert_eq!(
        (hold(&mut first, 5), hold(&mut first, 4)),
        (Err(Bytes(6)), Ok(()))
    );
    assert_eq!(ledger.holdings(0).len(), 2, "one entry per process");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(hold(&mut first, 5), Ok(()));
    assert!(
        ledger.enter(child.id(), 0, Bytes(6)).is_err(),
        "the process has ended"
    );
}

#[test]
fn a_process_that_reuses_a_number_does_not_hold_the_memory_of_the_earlier_process() {
    let (_folder, path) = folder();
    let mut first = LedgerAccount::new(Some(Ledger::create(&path).unwrap()));
    let mut earlier = account_of(
        Ledger::open(&path).unwrap(),
        std::os::unix::process::parent_id(),
    );
    hold(&mut earlier, 8).unwrap();
    // A reused number belongs to a process with another start time.
    let started = &earlier.ledger().unwrap().0.entries[earlier.entry.unwrap()].started;
    started.fetch_sub(1, Ordering::Relaxed);
    assert_eq!(hold(&mut first, 9), Ok(()));
}

#[test]
fn exec_releases_the_memory_of_the_earlier_program_for_others() {
    let (_folder, path) = folder();
    let mut first = LedgerAccount::new(Some(Ledger::create(&path).unwrap()));
    let mut child = Command::new("sh")
        .args(["-c", "read line; exec sleep 60"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    // A new process runs this program until its own exec, which changes the name first and the
    // stack later.
    let program = || Program::of_process(pid.into()).unwrap();
    while fs::read_to_string(format!("/proc/{pid}/comm"))
        .unwrap()
        .trim()
        != "sh"
        || program().stack == 0
    {
        std::thread::yield_now();
    }
    let shell = program();
    let mut before = account_of(Ledger::open(&path).unwrap(), pid);
    assert_eq!(
        (hold(&mut before, 8), hold(&mut first, 5)),
        (Ok(()), Err(Bytes(8)))
    );
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    while program().is(shell) {
        std::thread::yield_now();
    }
    assert_eq!(hold(&mut first, 5), Ok(()));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn exec_releases_the_memory_of_the_earlier_program_for_the_process_itself() {
    let (_folder, path) = folder();
    let mut before = LedgerAccount::new(Some(Ledger::create(&path).unwrap()));
    hold(&mut before, 8).unwrap();
    // After exec the process opens the ledger again.
    let mut after = LedgerAccount::new(Some(Ledger::open(&path).unwrap()));
    assert_eq!(hold(&mut after, 7), Ok(()));
    assert_eq!(
        after.ledger().unwrap().holdings(0),
        [Holding {
            pid: std::process::id(),
            held: Bytes(7),
            pinned: Bytes::ZERO,
            registered: Bytes::ZERO,
        }]
    );
}

#[test]
fn the_disk_space_of_a_ledger_is_reserved() {
    let (_folder, path) = folder();
    let _ledger = Ledger::create(&path).unwrap();
    let file = fs::metadata(&path).unwrap();
    assert!(
        file.blocks() * 512 >= file.len(),
        "{} blocks for {} bytes",
        file.blocks(),
        file.len()
    );
}

#[test]
fn the_lock_is_free_again_when_the_thread_that_holds_it_ends() {
    let (_folder, path) = folder();
    let ledger = Ledger::create(&path).unwrap();
    std::thread::scope(|scope| {
        scope
            .spawn(|| std::mem::forget(ledger.lock()))
            .join()
            .unwrap()
    });
    assert_eq!(hold(&mut LedgerAccount::new(Some(ledger)), 10), Ok(()));
}

#[test]
fn two_threads_with_their_own_accounts_never_exceed_the_memory() {
    let (_folder, path) = folder();
    let ledger = Ledger::create(&path).unwrap();
    let most = AtomicU64::new(0);
    let go = |ledger: Ledger, pid: u32| {
        let mut account = account_of(ledger, pid);
        for bytes in (0..2000).map(|round| round % 11) {
            if hold(&mut account, bytes).is_ok() {
                let all: u64 = account
                    .ledger()
                    .unwrap()
                    .holdings(0)
                    .iter()
                    .map(|holding| holding.held.0)
                    .sum();
                most.fetch_max(all, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| go(Ledger::open(&path).unwrap(), std::process::id()));
        go(
            Ledger::open(&path).unwrap(),
            std::os::unix::process::parent_id(),
        );
    });
    assert!(
        (1..=10).contains(&most.into_inner()) && ledger.peak(0) <= Bytes(10),
        "{}",
        ledger.peak(0)
    );
}

#[test]
fn other_files_are_refused_and_a_ledger_is_never_created_twice() {
    let (_folder, path) = folder();
    fs::write(&path, "something else").unwrap();
    assert_eq!(
        Ledger::open(&path).unwrap_err().kind(),
        io::ErrorKind::InvalidData
    );
    assert!(Ledger::create(&path).is_err());
}

#[test]
fn an_ended_process_does_not_count_in_later_peaks() {
    let (_folder, path) = folder();
    let mut own = LedgerAccount::new(Some(Ledger::create(&path).unwrap()));
    let mut child = std::process::Command::new("cat")
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut other = account_of(Ledger::open(&path).unwrap(), child.id());
    hold(&mut own, 3).unwrap();
    hold(&mut other, 4).unwrap();
    assert_eq!(own.ledger().unwrap().peak(0), Bytes(7));
    child.kill().unwrap();
    child.wait().unwrap();
    hold(&mut own, 5).unwrap();
    assert_eq!(own.ledger().unwrap().peak(0), Bytes(7));
    own.ledger().unwrap().begin_peaks();
    assert_eq!(own.ledger().unwrap().peak(0), Bytes(5));
}
