#![allow(clippy::unwrap_used)]

use std::sync::atomic::Ordering;

use harness_gpu_settings::collectives::{
    CollectiveCall, CollectiveRanks, CollectiveWait, Message, Operation, Published, data_file,
};
use harness_staging::wait_for;

use super::detector::{Found, Lacks, Outside, endless, waits};
use super::processes::{Processes, numbers, of_program, sleeping, stack, waiting_function};
use super::*;

const CALL: CollectiveCall = CollectiveCall {
    operation: Operation::AllReduce,
    root: None,
    count: 8,
    kind: 7,
};

const fn published(number: u32, call: CollectiveCall) -> Published {
    Published {
        number,
        call,
        offset: 0,
        len: 0,
    }
}

/// Ranks of processes with these numbers, each with its last collective, and whether it waits in
/// it.
fn ranks(run: &Path, name: &str, members: &[(u32, u32, bool)]) {
    let ranks = CollectiveRanks::join(&run.join(name), members.len()).unwrap();
    fs::write(data_file(&run.join(name)), "").unwrap();
    for (rank, (pid, number, waits)) in ranks.all().iter().zip(members) {
        rank.process.store(*pid, Ordering::Relaxed);
        if *number > 0 {
            rank.publish(published(*number, CALL));
        }
        rank.set_wait(waits.then_some(CollectiveWait::Collective(*number, None)));
    }
}

/// The lines of a hang in which the processes 1 to 9 run, of which these wait outside of
/// communicators.
fn lines_with(run: &Path, can_start: bool, outside: &[(u32, &str)]) -> Vec<String> {
    let mut communicators = CollectiveRanks::read_folder(run).unwrap();
    communicators.sort_by_key(|(path, _)| path.clone());
    let numbers = numbers(run).unwrap();
    let mut waits = waits(&communicators, &|pid| (1..10).contains(&pid));
    let lacks = waits.iter().map(|waiting| {
        (
            waiting.pid,
            waiting.lacks.iter().map(|(_, lacks)| *lacks).collect(),
        )
    });
    let lacks: Vec<_> = lacks
        .chain(outside.iter().map(|(pid, _)| (*pid, vec![Lacks::Others])))
        .collect();
    let running = numbers
        .values()
        .map(|(pid, _)| *pid)
        .filter(|pid| (1..10).contains(pid))
        .collect();
    let stopped = endless(&lacks, &running, || can_start);
    waits.retain(|waiting| stopped.contains(&waiting.pid));
    let frame = || ErrorFrame {
        file: "/a/train.py".to_owned(),
        line: 7,
        name: "main".to_owned(),
    };
    let outside = outside.iter().filter(|(pid, _)| stopped.contains(pid));
    let outside: Vec<_> = outside
        .map(|(pid, name)| Outside {
            pid: *pid,
            function: (*name).to_owned(),
            stack: vec![frame()],
        })
        .collect();
    let processes = Processes::running(1..10);
    Found {
        run,
        communicators: &communicators,
        numbers: &numbers,
        waits: &waits,
        outside: &outside,
        processes: &processes,
    }
    .describe()
    .lines()
}

fn lines(run: &Path, can_start: bool) -> Vec<String> {
    lines_with(run, can_start, &[])
}

#[test]
fn a_rank_that_computes_is_waited_for_and_one_that_has_ended_is_a_hang() {
    let run = tempfile::tempdir().unwrap();
    ranks(
        run.path(),
        "nccl-1",
        &[(1, 3, true), (2, 3, true), (3, 2, false)],
    );
    assert_eq!(lines(run.path(), false), Vec::<String>::new());
    ranks(
        run.path(),
        "nccl-1",
        &[(1, 3, true), (2, 3, true), (99, 2, false)],
    );
    let waits = "ranks 0-1 wait in all_reduce of 8 float32 (number 3) for rank 2";
    assert_eq!(lines(run.path(), false), [waits, "rank 2 has ended"]);
    let place =
        r#"{"attempts": 3, "frames": [{"file": "/a/train.py", "line": 41, "name": "main"}]}"#;
    fs::write(run.path().join("ooms-99.jsonl"), place).unwrap();
    assert_eq!(
        lines(run.path(), false),
        [
            waits,
            "rank 2 has ended after an OutOfMemoryError at train.py:41"
        ]
    );
    ranks(
        run.path(),
        "nccl-1",
        &[(1, 3, true), (2, 3, true), (99, 3, false)],
    );
    assert_eq!(
        lines(run.path(), false)[0],
        waits,
        "rank 2 has ended while it reduced"
    );
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
    assert_eq!(
        lines(run.path(), false),
        Vec::<String>::new(),
        "rank 1 goes on: its collective is complete"
    );
}

#[test]
fn a_receive_waits_for_its_sender_until_the_message_has_arrived() {
    let run = tempfile::tempdir().unwrap();
    ranks(run.path(), "nccl-1", &[(1, 1, false), (99, 1, false)]);
    let shared = CollectiveRanks::join(&run.path().join("nccl-1"), 2).unwrap();
    shared.all()[0].set_wait(Some(CollectiveWait::Message(2, 1)));
    let data = fs::File::options()
        .read(true)
        .write(true)
        .open(data_file(&run.path().join("nccl-1")))
        .unwrap();
    let post = |number| {
        Message {
            from: 1,
            number,
            offset: 100 * u64::from(number),
            len: 0,
        }
        .post(&data, &shared.all()[0])
        .unwrap()
    };
    post(1);
    assert_eq!(
        lines(run.path(), false)[0],
        "rank 0 waits in receive (number 2) for rank 1"
    );
    post(2);
    assert_eq!(lines(run.path(), false), Vec::<String>::new());
}

#[test]
fn a_rank_that_has_not_joined_may_still_start_or_is_missing() {
    let run = tempfile::tempdir().unwrap();
    ranks(run.path(), "nccl-1", &[(1, 1, true), (0, 0, false)]);
    assert_eq!(lines(run.path(), true), Vec::<String>::new());
    assert_eq!(lines(run.path(), false)[1], "rank 1 has not joined");
}

#[test]
fn ranks_in_different_collectives_and_one_that_left_are_a_hang() {
    let run = tempfile::tempdir().unwrap();
    ranks(run.path(), "nccl-1", &[(1, 2, true), (2, 2, true)]);
    let shared = CollectiveRanks::join(&run.path().join("nccl-1"), 2).unwrap();
    shared.all()[1].publish(published(
        2,
        CollectiveCall {
            operation: Operation::Broadcast,
            root: Some(0),
            ..CALL
        },
    ));
    let hang = lines(run.path(), false);
    assert_eq!(
        hang[0],
        "rank 0 waits in all_reduce of 8 float32 (number 2) for rank 1"
    );
    assert_eq!(
        hang[1],
        "rank 1 waits in broadcast of 8 float32 with root 0 (number 2) for rank 0"
    );
    ranks(run.path(), "nccl-1", &[(1, 2, true), (2, 1, false)]);
    shared.all()[1].leave();
    assert_eq!(
        lines(run.path(), false)[1],
        "rank 1 has destroyed the communicator"
    );
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
    let run = Path::new("/run");
    let first = |text: &str| {
        of_program(stack(text, run), run)
            .first()
            .map(ErrorFrame::short)
    };
    assert_eq!(first(text), Some("train.py:88".to_owned()));
    assert_eq!(
        first(&text.replace("Current thread", "Thread")),
        Some("train.py:90".to_owned()),
        "the main thread is the last"
    );
    assert_eq!(first(""), None);
}

#[test]
fn ranks_that_wait_in_a_store_are_a_hang_unless_another_rank_goes_on() {
    let run = tempfile::tempdir().unwrap();
    for (pid, text) in [(1, "0 3"), (2, "1 3"), (99, "2 3")] {
        fs::write(run.path().join(format!("rank-{pid}")), text).unwrap();
    }
    let both = [(1, "init_process_group"), (2, "init_process_group")];
    let found = lines_with(run.path(), false, &both);
    assert_eq!(
        found,
        [
            "ranks 0-1 wait in init_process_group at train.py:7 for rank 2",
            "rank 2 has ended"
        ]
    );
    assert_eq!(
        lines_with(run.path(), true, &both),
        Vec::<String>::new(),
        "a process may start"
    );
    assert_eq!(
        lines_with(run.path(), false, &both[..1]),
        Vec::<String>::new(),
        "rank 1 goes on"
    );
    ranks(
        run.path(),
        "nccl-1",
        &[(1, 1, false), (2, 2, true), (99, 2, false)],
    );
    let found = lines_with(run.path(), false, &both[..1]);
    let store = "rank 0 waits in init_process_group at train.py:7 for ranks 1-2";
    assert_eq!(
        found[..2],
        [
            store,
            "rank 1 waits in all_reduce of 8 float32 (number 2) for rank 0"
        ]
    );
    fs::remove_file(run.path().join("rank-99")).unwrap();
    assert_eq!(
        lines_with(run.path(), false, &both)[1],
        "rank 2 has not joined"
    );
}

#[test]
fn a_rank_that_has_ended_is_shown_with_its_exit_code_or_signal() {
    let line = |error: Option<&str>, end| {
        line(
            &RankState::ended(error.map(str::to_owned), Some(end)),
            None,
            &[1],
            false,
        )
    };
    assert_eq!(
        line(None, End::Code(3)),
        "rank 1 has ended with exit code 3"
    );
    assert_eq!(line(None, End::Signal(9)), "rank 1 was killed by SIGKILL");
    assert_eq!(
        line(Some("KeyError: 'x'"), End::Code(1)),
        "rank 1 has ended with exit code 1 and `KeyError: 'x'`"
    );
}

#[test]
fn a_wait_outside_of_communicators_is_a_function_of_torch_or_a_method_of_a_store() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("train.py");
    fs::write(
        &program,
        "import torch\nx = group._get_store().get('ready')\ntime.sleep(9)\n",
    )
    .unwrap();
    let frame = |file: &str, line: u64, name: &str| ErrorFrame {
        file: file.to_owned(),
        line,
        name: name.to_owned(),
    };
    let torch =
        |file: &str, name: &str| frame(&format!("/v/lib/site-packages/torch/{file}"), 5, name);
    let of_program = |line| frame(program.to_str().unwrap(), line, "main");
    let function = |stack: &[ErrorFrame]| waiting_function(stack, Path::new("/run"));
    assert_eq!(function(&[of_program(2)]).as_deref(), Some("store.get"));
    assert_eq!(function(&[of_program(3)]), None);
    let stack = [
        torch("distributed/rendezvous.py", "_create_c10d_store"),
        torch("distributed/distributed_c10d.py", "init_process_group"),
        torch("distributed/c10d_logger.py", "wrapper"),
        frame("/run/python/sitecustomize.py", 5, "init_process_group"),
        of_program(1),
    ];
    assert_eq!(function(&stack).as_deref(), Some("init_process_group"));
    assert_eq!(
        function(&[torch("utils/data/dataloader.py", "next"), of_program(1)]),
        None
    );
    let backward = [
        torch("autograd/graph.py", "_engine_run_backward"),
        torch("_tensor.py", "backward"),
        of_program(1),
    ];
    assert_eq!(function(&backward).as_deref(), Some("_engine_run_backward"));
}

#[test]
fn a_thread_that_sleeps_again_has_woken_and_one_that_waits_for_a_lock_does_not_sleep() {
    let (send, receive) = std::sync::mpsc::channel();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let of_thread = || u64::try_from(nix::unistd::gettid().as_raw()).unwrap();
    std::thread::scope(|threads| {
        threads.spawn(move || {
            send.send(of_thread()).unwrap();
            while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            send.send(of_thread()).unwrap();
            let _ = stopped.recv();
        });
        let thread = receive.recv().unwrap();
        let sleeps = || {
            sleeping(std::process::id())
                .into_iter()
                .find(|(of, _)| *of == thread)
        };
        let found = wait_for("a sleep", sleeps);
        wait_for("the next sleep", || {
            sleeps().filter(|later| *later != found)
        });
        stop.send(()).unwrap();
        receive.recv().unwrap();
        assert_eq!(sleeps(), None);
        drop(stop);
    });
}
