#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn folders_of_dead_processes_are_removed_with_their_programs_and_others_are_kept() {
    let temporary = tempfile::tempdir().unwrap();
    let folder = |name: &str| {
        let path = temporary.path().join(name);
        fs::create_dir(&path).unwrap();
        path
    };
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    let dead = folder(&format!("{PREFIX}{}-a", ended.id()));
    let locked = folder(&format!("{PREFIX}{}-b", ended.id()));
    let live = folder(&format!("{PREFIX}{}-c", std::process::id()));
    let (other, unnumbered) = (
        folder("harness-other-1-d"),
        folder(&format!("{PREFIX}mine")),
    );
    let lock = File::open(&locked).unwrap();
    lock.lock().unwrap();
    let mut program = std::process::Command::new("sleep")
        .arg("1000")
        .env(RUN, &dead)
        .spawn()
        .unwrap();
    // The variables of a new program appear shortly after its start.
    while fs::read(format!("/proc/{}/environ", program.id()))
        .unwrap()
        .is_empty()
    {
        std::thread::yield_now();
    }
    sweep(temporary.path());
    assert_eq!(program.wait().unwrap().code(), None);
    assert!(!dead.exists());
    assert!(
        [locked, live, other, unnumbered]
            .iter()
            .all(|path| path.exists())
    );
}
