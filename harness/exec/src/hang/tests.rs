#![allow(clippy::unwrap_used)]

use harness_gpu_settings::collectives::Operation;

use super::*;

const CALL: Call = Call { operation: Operation::AllReduce, root: None, count: 8, kind: 7 };

/// Ranks of processes with these numbers, each with its last collective, and whether it waits in it.
fn ranks(run: &Path, name: &str, members: &[(u32, u32, bool)]) {
    let ranks = Ranks::join(&run.join(name), members.len()).unwrap();
    for (rank, (pid, number, waits)) in ranks.all().iter().zip(members) {
        rank.process.store(*pid, Ordering::Relaxed);
        if *number > 0 {
            rank.publish(*number, CALL, false);
        }
        rank.set_wait(waits.then_some(Wait::Collective(*number, None)));
    }
}

/// The lines of a hang in which the processes 1 to 9 run.
fn lines(run: &Path, can_start: bool) -> Vec<String> {
    let mut communicators = Ranks::read_folder(run).unwrap();
    communicators.sort_by_key(|(path, _)| path.clone());
    let mut is_running = |pid| (1..10).contains(&pid);
    let endless = endless(waits(&communicators, &mut is_running), || can_start);
    if endless.is_empty() { Vec::new() } else { describe(run, &communicators, &endless, &mut is_running).lines() }
}

#[test]
fn a_rank_that_computes_is_waited_for_and_one_that_has_ended_is_a_hang() {
    let run = tempfile::tempdir().unwrap();
    ranks(run.path(), "nccl-1", &[(1, 3, true), (2, 3, true), (3, 2, false)]);
    assert_eq!(lines(run.path(), false), Vec::<String>::new());
    ranks(run.path(), "nccl-1", &[(1, 3, true), (2, 3, true), (99, 2, false)]);
    let waits = "ranks 0-1 wait in all_reduce of 8 float32 (number 3) for rank 2";
    assert_eq!(lines(run.path(), false), [waits, "rank 2 has ended"]);
    let place = r#"{"attempts": 3, "frames": [{"file": "/a/train.py", "line": 41, "name": "main"}]}"#;
    fs::write(run.path().join("ooms-99.jsonl"), place).unwrap();
    assert_eq!(lines(run.path(), false), [waits, "rank 2 has ended after an OutOfMemoryError at train.py:41"]);
}

#[test]
fn a_cycle_of_communicators_is_a_hang_and_a_chain_that_ends_at_a_computing_rank_is_not() {
    let run = tempfile::tempdir().unwrap();
    ranks(run.path(), "nccl-1", &[(1, 1, true), (2, 0, false)]);
    ranks(run.path(), "nccl-2", &[(2, 5, true), (3, 4, false)]);
    assert_eq!(lines(run.path(), false), Vec::<String>::new());
    ranks(run.path(), "nccl-3", &[(3, 2, true), (1, 1, false)]);
    assert_eq!(lines(run.path(), false).len(), 3);
    ranks(run.path(), "nccl-2", &[(2, 5, true), (3, 5, false)]);
    assert_eq!(lines(run.path(), false), Vec::<String>::new(), "rank 1 goes on: its collective is complete");
}

#[test]
fn a_rank_that_has_not_joined_may_still_start_or_is_missing() {
    let run = tempfile::tempdir().unwrap();
    ranks(run.path(), "nccl-1", &[(1, 1, true), (0, 0, false)]);
    assert_eq!(lines(run.path(), true), Vec::<String>::new());
    assert_eq!(lines(run.path(), false)[1], "rank 1 has not joined the communicator");
}

#[test]
fn ranks_in_different_collectives_and_one_that_left_are_a_hang() {
    let run = tempfile::tempdir().unwrap();
    ranks(run.path(), "nccl-1", &[(1, 2, true), (2, 2, true)]);
    let shared = Ranks::join(&run.path().join("nccl-1"), 2).unwrap();
    shared.all()[1].publish(2, Call { operation: Operation::Broadcast, root: Some(0), ..CALL }, false);
    let hang = lines(run.path(), false);
    assert_eq!(hang[0], "rank 0 waits in all_reduce of 8 float32 (number 2) for rank 1");
    assert_eq!(hang[1], "rank 1 waits in broadcast of 8 float32 with root 0 (number 2) for rank 0");
    ranks(run.path(), "nccl-1", &[(1, 2, true), (2, 1, false)]);
    shared.all()[1].leave();
    assert_eq!(lines(run.path(), false)[1], "rank 1 has destroyed the communicator");
}

#[test]
fn a_stack_is_that_of_the_thread_that_waits_or_of_the_main_thread() {
    let text = "Thread 0x1 (most recent call first):
  File \"/v/lib/python3.11/site-packages/torch/x.py\", line 9 in wait

Current thread 0x2 (most recent call first):
  File \"/v/lib/python3.11/site-packages/torch/distributed/c10d.py\", line 2810 in all_reduce
  File \"/a/train.py\", line 88 in step

Thread 0x3 (most recent call first):
  File \"/run/python/cpu_values.py\", line 3 in call
  File \"/a/train.py\", line 90 in <module>
";
    let first = |text: &str| frames(text, Path::new("/run")).first().map(Frame::short);
    assert_eq!(first(text), Some("train.py:88".to_owned()));
    assert_eq!(first(&text.replace("Current thread", "Thread")), Some("train.py:90".to_owned()), "the main thread is the last");
    assert_eq!(first(""), None);
}
