#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::thread;

use super::*;

fn ranks<const RANKS: usize, T: Send>(run: impl Fn(Peers, usize) -> T + Sync) -> [T; RANKS] {
    let folder = tempfile::tempdir().unwrap();
    let run = &run;
    let join = |rank| Peers::join(folder.path(), 7, RANKS, rank).unwrap();
    let found = thread::scope(|threads| {
        let started = std::array::from_fn::<_, RANKS, _>(|rank| {
            let peers = join(rank);
            threads.spawn(move || run(peers, rank))
        });
        started.map(|thread| thread.join().unwrap())
    });
    // The last collective of each rank, and the shared file.
    assert!(folder.path().read_dir().unwrap().count() <= RANKS + 1);
    found
}

#[test]
fn each_rank_receives_the_data_of_the_ranks_that_it_needs() {
    let all = ranks::<3, _>(|peers, rank| {
        let first = peers.exchange("all_gather".to_owned(), vec![rank as u8], |_| true).unwrap();
        let second = peers.exchange("broadcast".to_owned(), if rank == 1 { vec![9] } else { Vec::new() }, |needed| needed == 1).unwrap();
        peers.exchange("barrier".to_owned(), Vec::new(), |_| true).unwrap();
        (first, second[1].clone())
    });
    assert_eq!(all, std::array::from_fn(|_| (vec![vec![0], vec![1], vec![2]], vec![9])));
}

#[test]
fn sends_do_not_wait_and_messages_arrive_in_order() {
    let all = ranks::<2, _>(|peers, rank| {
        peers.send(1 - rank, &[rank as u8]).unwrap();
        peers.send(1 - rank, &[10 + rank as u8, 0]).unwrap();
        [peers.receive(1 - rank).unwrap(), peers.receive(1 - rank).unwrap()]
    });
    assert_eq!(all, [[vec![1], vec![11, 0]], [vec![0], vec![10, 0]]]);
}

#[test]
fn a_mismatch_names_both_calls() {
    let all = ranks::<2, _>(|peers, rank| {
        let call = ["all_reduce of 4 bytes", "all_reduce of 8 bytes"][rank].to_owned();
        peers.exchange(call, Vec::new(), |_| true).unwrap_err().to_string()
    });
    assert_eq!(all[0], "rank 0 calls all_reduce of 4 bytes, number 1 of its communicator, where rank 1 calls all_reduce of 8 bytes");
}

#[test]
fn a_wait_ends_when_the_process_of_the_other_rank_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let peers = Peers::join(folder.path(), 7, 2, 0).unwrap();
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    peers.shared.0[1].process.store(ended.id(), Ordering::Relaxed);
    ended.wait().unwrap();
    let failure = peers.exchange("all_reduce of 4 bytes".to_owned(), Vec::new(), |_| true).unwrap_err();
    assert_eq!(failure.to_string(), format!("rank 0 waits in all_reduce of 4 bytes for rank 1, whose process {} has ended", ended.id()));
}
