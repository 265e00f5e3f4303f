#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::thread;

use harness_gpu_settings::collectives::Operation;

use super::*;

const ALL_REDUCE: CollectiveCall = CollectiveCall {
    operation: Operation::AllReduce,
    root: None,
    count: 1,
    kind: 7,
};
const BROADCAST: CollectiveCall = CollectiveCall {
    operation: Operation::Broadcast,
    root: Some(1),
    count: 1,
    kind: 1,
};

fn ranks<const RANKS: usize, T: Send>(
    is_strict: bool,
    run: impl Fn(&Peers, usize) -> T + Sync,
) -> [T; RANKS] {
    let folder = tempfile::tempdir().unwrap();
    let run = &run;
    let found = thread::scope(|threads| {
        let started = std::array::from_fn::<_, RANKS, _>(|rank| {
            let peers = Peers::join(folder.path(), 7, RANKS, rank, is_strict).unwrap();
            threads.spawn(move || run(&peers, rank))
        });
        started.map(|thread| thread.join().unwrap())
    });
    let files: Vec<_> = folder
        .path()
        .read_dir()
        .unwrap()
        .map(|file| file.unwrap().file_name())
        .collect();
    let is_communicator = |name: &str| name.starts_with(PREFIX) && !name.contains("-stack-");
    assert_eq!(
        files
            .iter()
            .filter(|file| file.to_str().is_some_and(is_communicator))
            .count(),
        2,
        "{files:?}"
    );
    found
}

fn exchange(
    peers: &Peers,
    call: CollectiveCall,
    data: &[u8],
    needs: Needs,
) -> Result<Vec<Vec<u8>>, Failure> {
    let number = peers.publish(call, data).unwrap();
    peers.complete((number, call), |_| Ok(()))?;
    peers
        .collect((number, call), needs, None, |parts| Ok(parts.all()))
        .map(Option::unwrap)
}

/// Adds the elements of all ranks.
fn all_reduce(peers: &Peers, kind: u8, data: &[u8], into: &mut [u8]) {
    let call = CollectiveCall {
        count: data.len(),
        kind,
        ..ALL_REDUCE
    };
    let number = peers.publish(call, data).unwrap();
    let reduce = |parts: &Parts<'_>| {
        peers.reduce(number, parts, data.len(), |from, into| {
            let ranks = peers.shared.all().len();
            super::super::reduce::reduce(into, ranks, (kind.into(), 0, 1.0), |rank, into| {
                parts.read(rank, from, into)
            })
        })
    };
    peers
        .complete((number, call), |parts| {
            if data.len() <= PART {
                reduce(parts)
            } else {
                Ok(())
            }
        })
        .unwrap();
    let finish = |parts: &Parts<'_>| {
        reduce(parts)?;
        peers.wait_for_reduction(number)?;
        assert!(
            parts
                .of_len(data.len())
                .is_some_and(|rank| parts.read(rank, 0, into))
                || data.is_empty()
        );
        Ok(())
    };
    peers
        .collect((number, call), Needs::All, None, finish)
        .unwrap();
}

#[test]
fn ranks_reduce_small_and_large_data_together() {
    ranks::<5, _>(true, |peers, rank| {
        for len in [0, 1, PART, PART + 1, 3 * PART, 7] {
            let data: Vec<u8> = (0..len)
                .map(|index| (index % 51) as u8 + rank as u8)
                .collect();
            let mut sum = vec![0; len];
            all_reduce(peers, 1, &data, &mut sum);
            assert!(
                sum.iter()
                    .enumerate()
                    .all(|(index, sum)| *sum
                        == ((index % 51) as u8).wrapping_mul(5).wrapping_add(10)),
                "{len}"
            );
        }
    });
}

#[test]
fn data_that_all_ranks_have_read_is_overwritten() {
    let [first, second] = ranks::<2, _>(true, |peers, _| {
        (0..40).for_each(|_| drop(peers.exchange(ALL_REDUCE, &[7; 100_000]).unwrap()));
        let part = peers.shared.data_per_rank();
        peers.data.metadata().unwrap().len() % part
    });
    assert!(first.max(second) <= 3 * 100_100, "{first} {second}");
}

#[test]
fn each_rank_receives_the_data_of_the_ranks_that_it_needs() {
    let all = ranks::<3, _>(true, |peers, rank| {
        let first = peers.exchange(ALL_REDUCE, &[rank as u8]).unwrap();
        let second = exchange(
            peers,
            BROADCAST,
            if rank == 1 { &[9] } else { &[] },
            Needs::Rank(1),
        )
        .unwrap();
        let third = exchange(
            peers,
            ALL_REDUCE,
            &[],
            if rank == 2 {
                Needs::All
            } else {
                Needs::Nothing
            },
        )
        .unwrap();
        assert!(third.iter().all(Vec::is_empty));
        peers.exchange(ALL_REDUCE, &[]).unwrap();
        (first, second[1].clone())
    });
    assert_eq!(
        all,
        std::array::from_fn(|_| (vec![vec![0], vec![1], vec![2]], vec![9]))
    );
}

#[test]
fn a_root_may_be_far_ahead_with_small_and_large_data() {
    let sent = |number: usize| {
        vec![
            number as u8;
            if number.is_multiple_of(5) {
                20_000
            } else {
                3 * number
            }
        ]
    };
    let [received, _] = ranks::<2, _>(true, |peers, rank| {
        if rank == 1 {
            (1..30).for_each(|number| {
                drop(exchange(peers, BROADCAST, &sent(number), Needs::Nothing).unwrap())
            });
        }
        while peers.shared.all()[1].published.load(Ordering::Acquire) < 29 {
            thread::yield_now();
        }
        let mut receive = |_| {
            exchange(peers, BROADCAST, &[], Needs::Rank(1))
                .unwrap()
                .swap_remove(1)
        };
        let received = if rank == 0 {
            (1..30).map(&mut receive).collect()
        } else {
            Vec::new()
        };
        peers.exchange(ALL_REDUCE, &[]).unwrap();
        received
    });
    assert_eq!(received, (1..30).map(sent).collect::<Vec<_>>());
}

#[test]
fn the_calls_of_a_rank_that_is_far_ahead_stay_known() {
    let folder = tempfile::tempdir().unwrap();
    let peers = Peers::join(folder.path(), 7, 2, 0, true).unwrap();
    (1..30).for_each(|count| {
        assert_eq!(
            peers
                .publish(
                    CollectiveCall {
                        count,
                        ..ALL_REDUCE
                    },
                    &[]
                )
                .unwrap() as usize,
            count
        )
    });
    let found = |number| {
        peers
            .shared
            .find(&peers.data, 0, number)
            .unwrap()
            .map(|found| found.call.count)
    };
    assert_eq!(
        (1..=30).map(found).collect::<Vec<_>>(),
        (1..30).map(Some).chain([None]).collect::<Vec<_>>()
    );
}

#[test]
fn sends_do_not_wait_and_messages_arrive_in_order() {
    let all = ranks::<2, _>(true, |peers, rank| {
        peers.send(1 - rank, &[rank as u8]).unwrap();
        peers.send(1 - rank, &[10 + rank as u8, 0]).unwrap();
        [(); 2].map(|()| {
            peers
                .receive(1 - rank, peers.expect(1 - rank), None)
                .unwrap()
                .unwrap()
        })
    });
    assert_eq!(all, [[vec![1], vec![11, 0]], [vec![0], vec![10, 0]]]);
}

#[test]
fn messages_of_several_ranks_arrive_whole_and_received_ones_are_overwritten() {
    const RANKS: usize = 4;
    let sizes = ranks::<RANKS, _>(true, |peers, rank| {
        let data =
            |from: usize, number: u32| vec![from as u8 ^ number as u8; 1 + 1000 * number as usize];
        for number in 1..30 {
            (0..RANKS).for_each(|to| peers.send(to, &data(rank, number)).unwrap());
            for from in 0..RANKS {
                let received = peers.receive(from, peers.expect(from), None).unwrap();
                assert_eq!(received, Some(data(from, number)), "{from}, {number}");
            }
            peers.exchange(ALL_REDUCE, &[1]).unwrap();
        }
        peers.data.metadata().unwrap().len() % peers.shared.data_per_rank()
    });
    assert!(
        sizes.into_iter().max().unwrap() < 3 * RANKS as u64 * 30_000,
        "{sizes:?}"
    );
    let folder = tempfile::tempdir().unwrap();
    let peers = Peers::join(folder.path(), 7, 2, 0, true).unwrap();
    assert!(
        peers
            .receive(1, peers.expect(1), Some(Duration::from_millis(1)))
            .unwrap()
            .is_none()
    );
}

#[test]
fn a_mismatch_names_both_calls_and_different_counts_are_one_only_if_values_are_computed() {
    let mismatch = |is_strict, calls: [CollectiveCall; 2]| {
        let [first, _] = ranks::<2, _>(is_strict, |peers, rank| {
            exchange(peers, calls[rank], &[], Needs::All)
                .err()
                .map(|failure| failure.to_string())
        });
        first
    };
    let sizes = [
        ALL_REDUCE,
        CollectiveCall {
            count: 2,
            ..ALL_REDUCE
        },
    ];
    let named =
        "rank 0 calls all_reduce of 1 float32, number 1 of its communicator, where rank 1 calls ";
    assert_eq!(
        mismatch(true, sizes),
        Some(format!("{named}all_reduce of 2 float32"))
    );
    assert_eq!(mismatch(false, sizes), None);
    assert_eq!(
        mismatch(false, [ALL_REDUCE, BROADCAST]),
        Some(format!("{named}broadcast of 1 uint8 with root 1"))
    );
}

#[test]
fn a_wait_is_visible_to_others_until_it_ends_and_an_aborted_communicator_ends_it() {
    let folder = tempfile::tempdir().unwrap();
    let peers = Peers::join(folder.path(), 7, 2, 0, true).unwrap();
    let number = peers.publish(ALL_REDUCE, &[]).unwrap();
    let collect = |patience| {
        peers.collect((number, ALL_REDUCE), Needs::All, patience, |parts| {
            Ok(parts.all())
        })
    };
    assert_eq!(collect(Some(Duration::from_millis(1))).unwrap(), None);
    assert_eq!(peers.state().wait(), None);
    thread::scope(|threads| {
        let waiting = threads.spawn(|| collect(None));
        while peers.state().wait().is_none() {
            thread::yield_now();
        }
        let (_, shared) = CollectiveRanks::read_folder(folder.path())
            .unwrap()
            .remove(0);
        assert_eq!(
            shared.all()[0].wait(),
            Some(CollectiveWait::Collective(1, None))
        );
        let published = Published {
            number: 1,
            call: ALL_REDUCE,
            offset: 0,
            len: 0,
        };
        assert_eq!(
            (
                shared.find(&peers.data, 0, 1).unwrap(),
                shared.all()[0].has_left()
            ),
            (Some(published), false)
        );
        peers.leave(true);
        assert!(matches!(waiting.join().unwrap(), Err(Failure::Aborted)));
        assert!(shared.all()[0].has_left());
    });
}

/// The time of collectives: `cargo test -p harness-simulated-gpu --release -- --ignored
/// --nocapture`.
#[test]
#[ignore = "prints a measurement"]
fn the_time_of_a_collective() {
    fn measured<const RANKS: usize>() {
        for (len, times) in [(0, 200), (1 << 10, 200), (64 << 10, 50), (4 << 20, 5)] {
            let began = Instant::now();
            let data = vec![1; len];
            ranks::<RANKS, _>(true, |peers, _| {
                let mut into = vec![0; len];
                (0..times).for_each(|_| all_reduce(peers, 7, &data, &mut into));
            });
            println!(
                "{RANKS} ranks, {len} bytes: {:?} per all-reduce",
                began.elapsed() / times
            );
        }
    }
    let began = Instant::now();
    ranks::<64, _>(true, |peers, _| {
        (0..64).for_each(|to| peers.send(to, &[1; 1024]).unwrap());
        (0..64).for_each(|from| drop(peers.receive(from, peers.expect(from), None).unwrap()));
    });
    println!(
        "64 ranks, 1024 bytes: {:?} per exchange of messages",
        began.elapsed()
    );
    measured::<2>();
    measured::<8>();
    measured::<16>();
    measured::<64>();
}

#[test]
fn a_restarted_rank_cannot_join_the_communicator_of_an_earlier_attempt() {
    let folder = tempfile::tempdir().unwrap();
    let _first = Peers::join(folder.path(), 7, 2, 1, true).unwrap();
    let refused = Peers::join(folder.path(), 7, 2, 1, true)
        .unwrap_err()
        .to_string();
    assert_eq!(
        refused,
        format!(
            "rank 1 cannot join a communicator that process {} joined as rank 1",
            std::process::id()
        )
    );
}
