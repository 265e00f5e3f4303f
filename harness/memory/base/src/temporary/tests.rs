#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn what_killed_processes_left_is_removed_and_what_is_in_use_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let (in_use, (folder_in_use, _held)) = (
        file_in(folder.path()).unwrap(),
        folder_in(folder.path()).unwrap(),
    );
    fs::write(folder.path().join(".unfinished-left"), "half").unwrap();
    fs::create_dir(folder.path().join(".unfinished-folder")).unwrap();
    fs::write(folder.path().join(".unfinished-folder/half"), "half").unwrap();
    fs::write(folder.path().join("mine"), "whole").unwrap();
    let other = file_in(folder.path()).unwrap();
    assert!(
        [
            in_use.path(),
            folder_in_use.path(),
            other.path(),
            &folder.path().join("mine")
        ]
        .iter()
        .all(|path| path.exists())
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4);
}

#[test]
fn nothing_is_removed_while_somebody_else_holds_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let left = folder.path().join(".unfinished-left");
    fs::write(&left, "half").unwrap();
    let held = File::open(folder.path()).unwrap();
    held.lock().unwrap();
    let _in_use = file_in(folder.path()).unwrap();
    assert!(left.exists());
}
