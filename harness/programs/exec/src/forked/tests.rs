#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;

use super::*;

#[test]
fn a_copy_continues_at_the_fork_and_leaves_the_original_unchanged() {
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let mut seen = vec![1, 2];
    match fork().unwrap() {
        Forked::Copy => {
            seen.push(3);
            let _ = theirs.write_all(&seen);
            leave(7);
        }
        Forked::Original(child) => {
            drop(theirs);
            assert_eq!(child.wait().unwrap(), End::Code(7));
            let mut received = Vec::new();
            ours.read_to_end(&mut received).unwrap();
            assert_eq!((received, seen), (vec![1, 2, 3], vec![1, 2]));
        }
    }
}

#[test]
fn dropping_the_handle_kills_the_copy() {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let Forked::Original(child) = fork().unwrap() else {
        loop {
            std::thread::park();
        }
    };
    drop((child, theirs));
    // The copy's end of the connection closes when the copy ends.
    assert_eq!(ours.read(&mut [0]).unwrap(), 0);
}
