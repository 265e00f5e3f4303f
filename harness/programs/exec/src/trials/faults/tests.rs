//! Classification of fake runs.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::hang::{Hang, HangingRank, RankState};
use crate::tests::fake::{ended_well, error, trial};
use crate::trials::observed::RankAttempts;

/// A run that ends with this exit code after an OutOfMemoryError.
fn code(code: u8) -> Observed {
    Observed {
        ending: TrialEnd::By(End::Code(code)),
        errors: vec![error(3, 88)],
        ..ended_well(&[2, 20, 20])
    }
}

/// An OutOfMemoryError that ended the run.
fn uncaught() -> Observed {
    Observed {
        ended_out_of_memory: true,
        ..code(1)
    }
}

#[test]
fn a_program_that_exits_while_it_handles_the_error_ends_with_its_exit_code() {
    let run = Observed {
        caught_out_of_memory: true,
        ..uncaught()
    };
    assert_eq!(of(&run), TrialOutcome::ExitCode { exit_code: 1 });
    assert_eq!(of(&uncaught()), TrialOutcome::OutOfMemory);
    let report = reports(Which::All, true, |_| Some(run.clone()));
    assert!(report.cases.iter().all(|case| case.is_clean_end));
}

#[test]
fn a_program_that_exits_with_code_0_in_the_handler_of_the_error_has_not_recovered() {
    let run = Observed {
        ended_in_handler: true,
        ..code(0)
    };
    assert_eq!(of(&run), TrialOutcome::EndedInHandler);
    assert_eq!(of(&code(0)), TrialOutcome::Recovered);
    let report = reports(Which::All, true, |_| Some(run.clone()));
    for case in &report.cases {
        assert!(!case.meets(RecoveryExpectation::Recovers));
        assert!(case.meets(RecoveryExpectation::EndsCleanly));
    }
}

fn of(run: &Observed) -> TrialOutcome {
    outcome(&"any:2:2".parse().unwrap(), &ended_well(&[2, 20]), run)
}

fn reports(
    which: Which,
    alone: bool,
    run: impl Fn(&Trial) -> Option<Observed> + Sync,
) -> FaultReport {
    let first = ended_well(&[2, 20, 4]);
    let run = |trial: &Trial| {
        Ok::<_, std::convert::Infallible>(if trial.faults.is_empty() {
            Some(first.clone())
        } else {
            run(trial)
        })
    };
    let trial = trial(Bytes::gib(1));
    let program = TrialProgram {
        run: &run,
        trial,
        first: &first,
        predict: &|_| None,
        unpredicted: None,
        shard: None,
        jobs: 2,
        progress: &|| {},
    };
    let Ok(report) = every_fault(
        &program,
        FaultPlan {
            which,
            alone,
            only: None,
        },
    );
    report
}

#[test]
fn each_case_has_the_doubts_about_its_own_runs() {
    let timing = |line: u64| Doubt::Timing {
        waits: 0,
        at: vec![format!("train.py:{line}")],
    };
    let report = reports(Which::All, true, |trial| {
        let Fault { first, count, .. } = trial.faults[0];
        Some(Observed {
            doubts: vec![timing(10 * first + count)],
            ..ended_well(&[2, 20, 4])
        })
    });
    assert_eq!(report.doubts, []);
    for case in &report.cases {
        let mut both = vec![timing(10 * case.attempt + 2)];
        Doubt::add(&mut both, &[timing(10 * case.attempt + 1)]);
        assert_eq!(case.doubts, both);
    }
    assert_eq!(report.all_doubts().len(), 1);
}

#[test]
fn each_outcome_is_classified() {
    let raised = Observed {
        errors: vec![error(3, 88)],
        ..ended_well(&[2, 20, 20, 10])
    };
    assert_eq!(of(&raised), TrialOutcome::Recovered);
    assert_eq!(
        of(&Observed {
            errors: Vec::new(),
            ooms: Some(1),
            ..raised.clone()
        }),
        TrialOutcome::Recovered,
        "a backend without observers"
    );
    assert_eq!(of(&ended_well(&[2, 20, 20])), TrialOutcome::ServedByRetry);
    assert_eq!(
        of(&Observed {
            errors: vec![error(1, 5)],
            ..ended_well(&[2, 20, 20])
        }),
        TrialOutcome::ServedByRetry,
        "an error before the fault"
    );
    assert_eq!(of(&uncaught()), TrialOutcome::OutOfMemory);
    let unbound = "UnboundLocalError: cannot access local variable 'loss'".to_owned();
    assert_eq!(
        of(&Observed {
            error: Some(unbound.clone()),
            ..uncaught()
        }),
        TrialOutcome::OtherError { error: unbound }
    );
    assert_eq!(of(&code(3)), TrialOutcome::ExitCode { exit_code: 3 });
    assert_eq!(
        of(&Observed {
            ending: TrialEnd::By(End::Signal(11)),
            ..code(0)
        }),
        TrialOutcome::Signal { signal: 11 }
    );
    assert_eq!(
        of(&Observed {
            ending: TrialEnd::Hang,
            ..code(0)
        }),
        TrialOutcome::Hang { ranks: Vec::new() }
    );
    assert_eq!(of(&ended_well(&[2])), TrialOutcome::NotReached);
    let error =
        "The server socket has failed to listen on any local network address. name: EADDRINUSE"
            .to_owned();
    assert_eq!(
        of(&Observed {
            port_in_use: Some(error.clone()),
            ..ended_well(&[2])
        }),
        TrialOutcome::OtherError { error }
    );
}

#[test]
fn the_attempts_of_each_rank_fail_and_a_hang_is_reported_with_its_ranks() {
    let of_rank = |device: u32, sizes: &[u64]| {
        let attempts = ended_well(sizes)
            .attempts
            .into_iter()
            .map(|attempt| Attempt {
                number: device,
                ..attempt
            })
            .collect();
        RankAttempts {
            device,
            attempts,
            calls_of_libraries: Vec::new(),
            errors: vec![error(2, 88)],
            failed_calls: Vec::new(),
        }
    };
    let run = |sizes: [&[u64]; 2]| Observed {
        ranks: vec![of_rank(0, sizes[0]), of_rank(1, sizes[1])],
        ..ended_well(sizes[0])
    };
    let first = Observed {
        ranks: vec![of_rank(0, &[2, 4]), of_rank(1, &[8])],
        ..ended_well(&[2, 4])
    };
    let state = RankState::Missing;
    let hang = Hang {
        ranks: vec![HangingRank {
            rank: 0,
            pid: None,
            state,
            out_of_memory: None,
        }],
    };
    let hung = Observed {
        ending: TrialEnd::By(End::Code(124)),
        hang: Some(hang),
        ..run([&[2, 4], &[8, 8, 16]])
    };
    let runs = |trial: &Trial| {
        if trial.faults.is_empty() {
            return Ok(Some(first.clone()));
        }
        let hangs = trial.faulty_device == Some(1) && trial.faults[0].count == 2;
        Ok::<_, std::convert::Infallible>(Some(if hangs {
            hung.clone()
        } else {
            run([&[2, 4, 4], &[8]])
        }))
    };
    let trial = trial(Bytes::gib(1));
    let program = TrialProgram {
        run: &runs,
        trial,
        first: &first,
        predict: &|_| None,
        unpredicted: None,
        shard: None,
        jobs: 1,
        progress: &|| {},
    };
    let Ok(report) = every_fault(
        &program,
        FaultPlan {
            which: Which::All,
            alone: false,
            only: None,
        },
    );
    let places: Vec<_> = report
        .cases
        .iter()
        .map(|case| (case.rank, case.attempt, case.size >> 20, case.next_size))
        .collect();
    assert_eq!(
        places,
        [
            (Some(0), 1, 2, Some(4 << 20)),
            (Some(0), 2, 4, None),
            (Some(1), 1, 8, Some(16 << 20))
        ]
    );
    let hangs = TrialOutcome::Hang {
        ranks: vec!["rank 0 has not joined".to_owned()],
    };
    assert_eq!(
        (&report.cases[1].outcome, &report.cases[2].outcome),
        (&TrialOutcome::Recovered, &hangs)
    );
    assert!(!report.cases[2].meets(RecoveryExpectation::EndsCleanly));
    assert_eq!((report.first.attempts, runs_of(&first)), (3, 7));
}

#[test]
fn runs_whose_ranks_meet_at_the_same_port_are_made_one_after_another() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let most_at_once = |port_of: fn(u64) -> u16| {
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let run = |trial: &Trial| {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            // Time for another run to begin.
            std::thread::sleep(std::time::Duration::from_millis(20));
            running.fetch_sub(1, Ordering::SeqCst);
            let number = trial.faults.first().map_or(0, |fault| fault.first);
            Ok::<_, std::convert::Infallible>(Some(Observed {
                port: Some(port_of(number)),
                ..ended_well(&[2; 6])
            }))
        };
        let first = Observed {
            port: Some(29500),
            ..ended_well(&[2; 6])
        };
        let program = TrialProgram {
            run: &run,
            trial: trial(Bytes::gib(1)),
            first: &first,
            predict: &|_| None,
            unpredicted: None,
            shard: None,
            jobs: 4,
            progress: &|| {},
        };
        let Ok(report) = every_fault(
            &program,
            FaultPlan {
                which: Which::All,
                alone: false,
                only: None,
            },
        );
        assert_eq!(report.cases.len(), 6);
        most.into_inner()
    };
    assert_eq!(most_at_once(|_| 29500), 1);
    // On a busy machine, runs may miss each other.
    assert!((0..100).any(|_| most_at_once(|attempt| attempt as u16) > 1));
}

fn runs_of(first: &Observed) -> usize {
    runs(
        first,
        FaultPlan {
            which: Which::All,
            alone: false,
            only: None,
        },
        None,
    )
}

#[test]
fn pairs_of_attempts_fail_and_some_fail_alone() {
    let report = reports(Which::All, false, |trial| {
        let [fault] = trial.faults[..] else {
            panic!("one fault per run")
        };
        assert_eq!((fault.call, fault.min_size), (None, Bytes::ZERO));
        if fault.count == 1 {
            return Some(ended_well(&[2, 20, 20, 4]));
        }
        Some(if fault.first == 2 {
            uncaught()
        } else {
            Observed {
                errors: vec![error(fault.first + 1, 50)],
                ..ended_well(&[2, 20, 4, 4, 1])
            }
        })
    });
    let outcomes: Vec<(u64, &TrialOutcome, Option<&TrialOutcome>)> = report
        .cases
        .iter()
        .map(|case| (case.attempt, &case.outcome, case.alone.as_ref()))
        .collect();
    let alone = Some(&TrialOutcome::ServedByRetry);
    assert_eq!(
        outcomes,
        [
            (1, &TrialOutcome::Recovered, alone),
            (2, &TrialOutcome::OutOfMemory, alone),
            (3, &TrialOutcome::Recovered, alone)
        ]
    );
    assert_eq!(
        (
            report.cases[1].size,
            report.cases[1].is_clean_end,
            report.cases[1].next_size
        ),
        (20 << 20, true, None)
    );
    assert_eq!(report.cases[0].next_size, Some(4 << 20));
}

#[test]
fn a_program_that_continues_with_more_memory_has_not_recovered() {
    let holding = |more: u64| {
        reports(Which::Sample(1), false, move |_| {
            Some(Observed {
                allocated_at_end: Some(Bytes(Bytes::mib(10).0 + more)),
                errors: vec![error(2, 9)],
                ..ended_well(&[2, 2, 20])
            })
        })
    };
    let (little, much) = (holding(2 << 20), holding((2 << 20) + 1));
    assert!(little.cases[0].meets(RecoveryExpectation::Recovers));
    assert!(
        !much.cases[0].meets(RecoveryExpectation::Recovers)
            && !much.cases[0].meets(RecoveryExpectation::EndsCleanly)
    );
    assert_eq!(much.cases[0].more_at_end, Some((2 << 20) + 1));
}

fn at_end(mib: u64, run: Observed) -> Observed {
    Observed {
        allocated_at_end: Some(Bytes::mib(mib)),
        ..run
    }
}

/// A run that continues after an OutOfMemoryError of attempt 1, with this memory at its end.
fn continued(mib: u64) -> Observed {
    let run = Observed {
        errors: vec![error(2, 9)],
        ..ended_well(&[2, 2, 20, 4])
    };
    at_end(mib, run)
}

/// The first run, and the report of runs that this function returns by their number, counted from 0
/// for the runs without failures and for those with failures of attempt 1.
fn report_of(
    first: &Observed,
    of: impl Fn(bool, usize) -> Observed + Sync,
    which: Which,
) -> (FaultReport, usize) {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let numbers = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let run = |trial: &Trial| {
        if trial.faults.iter().any(|fault| fault.count == 1) {
            return Ok(Some(first.clone()));
        }
        let fails = !trial.faults.is_empty();
        let number = numbers[usize::from(fails)].fetch_add(1, Ordering::Relaxed);
        Ok::<_, std::convert::Infallible>(Some(of(fails, number)))
    };
    let program = TrialProgram {
        run: &run,
        trial: trial(Bytes::gib(1)),
        first,
        predict: &|_| None,
        unpredicted: None,
        shard: None,
        jobs: 1,
        progress: &|| {},
    };
    let plan = FaultPlan {
        which,
        alone: false,
        only: None,
    };
    let Ok(report) = every_fault(&program, plan);
    let made = numbers.into_iter().map(AtomicUsize::into_inner).sum();
    (report, made)
}

#[test]
fn more_memory_counts_if_equal_runs_repeat_it() {
    let clean = || at_end(10, ended_well(&[2, 20, 4]));
    let of = |mib| {
        let run = |fails, _| if fails { continued(mib) } else { clean() };
        report_of(&clean(), run, Which::Sample(1))
    };
    let (little, made) = of(12);
    assert!(little.cases[0].meets(RecoveryExpectation::Recovers));
    assert_eq!((little.chance, made), (None, 2), "nothing to confirm");
    let (much, made) = of(13);
    assert!(!much.cases[0].meets(RecoveryExpectation::Recovers));
    assert_eq!(much.cases[0].more_at_end, Some(3 << 20));
    assert_eq!((much.chance, made), (None, 2 + 3 + 3));
}

#[test]
fn more_memory_or_less_work_does_not_count_if_chance_explains_it() {
    let clean = || at_end(10, ended_well(&[2, 20, 4]));
    let less = |run: Observed| Observed {
        submitted: 60,
        ..run
    };
    let explained = |of: &(dyn Fn(bool, usize) -> Observed + Sync)| {
        let (report, _) = report_of(&clean(), of, Which::Sample(1));
        assert!(report.cases[0].meets(RecoveryExpectation::Recovers));
        report.chance.unwrap()
    };
    let fails_or = |fails, run| if fails { continued(24) } else { run };
    assert_eq!(
        explained(&|fails, number| fails_or(fails, at_end(10 + 14 * (number as u64 / 3), clean()))),
        "in another run without failures, it leaves 24 MiB allocated at its end instead of 10 MiB"
    );
    assert_eq!(
        explained(&|fails, number| fails_or(
            fails,
            if number == 2 {
                ended_well(&[2, 8, 4])
            } else {
                clean()
            }
        )),
        "in another run without failures, attempt 2 requests 8 MiB instead of 20 MiB"
    );
    assert_eq!(
        explained(&|fails, number| match (fails, number) {
            (true, 0) => continued(24),
            (true, _) => continued(10),
            _ => clean(),
        }),
        "after the same failure of attempt 1, it leaves 10 MiB allocated at its end instead of 24 \
         MiB in another run"
    );
    assert_eq!(
        explained(&|fails, number| match (fails, number) {
            (true, 0) => less(continued(10)),
            (true, _) => continued(10),
            _ => clean(),
        }),
        "after the same failure of attempt 1, it submits 100 operations to the GPU instead of 60 \
         in another run"
    );
    assert_eq!(
        explained(&|fails, number| match (fails, number) {
            (true, _) => less(continued(10)),
            (false, 1) => less(clean()),
            _ => clean(),
        }),
        "in another run without failures, it submits 60 operations to the GPU instead of 100"
    );
    assert_eq!(
        explained(&|fails, _| fails_or(fails, at_end(18, clean()))),
        "the program is not deterministic"
    );
}

#[test]
fn no_run_repeats_if_a_run_differs_before_its_failure() {
    let clean = || at_end(10, ended_well(&[2, 20, 4]));
    let failed = |sizes: &[u64]| Observed {
        attempts: ended_well(sizes).attempts,
        ..continued(24)
    };
    let run = |fails, number| match (fails, number) {
        (false, _) => clean(),
        (true, 2) => failed(&[2, 30, 4, 4]),
        (true, _) => failed(&[2, 20, 4, 4]),
    };
    let (report, made) = report_of(&clean(), run, Which::All);
    assert_eq!(
        report.chance.unwrap(),
        "before the failure of attempt 3, attempt 2 requests 30 MiB instead of 20 MiB"
    );
    assert_eq!(made, 1 + 3);
    assert!(report.cases.iter().all(|case| !case.holds_memory));
}

#[test]
fn of_many_cases_with_more_memory_some_repeat() {
    let clean = || at_end(10, ended_well(&[2; 20]));
    let failed = || Observed {
        attempts: ended_well(&[2; 21]).attempts,
        ..continued(24)
    };
    let run = |fails, _| if fails { failed() } else { clean() };
    let (report, made) = report_of(&clean(), run, Which::All);
    assert!(report.cases.iter().all(|case| case.holds_memory));
    assert_eq!(made, 1 + 20 + 3 + 8);
    assert_eq!(
        [1, 2, 3, 9].map(|count| chance::repeated(count).len()),
        [3, 4, 3, 8]
    );
}

#[test]
fn copies_of_a_random_program_do_not_count_against_its_recovery() {
    let first = at_end(10, ended_well(&[2, 20, 4]));
    let copy = |run| Observed {
        is_copy: true,
        ..run
    };
    let random = || copy(at_end(30, ended_well(&[2, 8, 4])));
    let of = |mib| {
        let run = |fails, _| {
            if fails {
                copy(continued(mib))
            } else {
                random()
            }
        };
        report_of(&first, run, Which::Sample(1)).0
    };
    let (same, more) = (of(30), of(33));
    assert!(same.second.unwrap().has_copies);
    assert_eq!(same.cases[0].more_at_end, Some(0));
    assert!(same.cases[0].meets(RecoveryExpectation::Recovers));
    assert_eq!(
        (more.cases[0].more_at_end, more.chance.as_deref()),
        (Some(3 << 20), Some("the program is not deterministic"))
    );
    assert!(more.cases[0].meets(RecoveryExpectation::Recovers));
}

#[test]
fn a_second_run_is_compared_with_the_first() {
    let first = at_end(10, ended_well(&[2, 20, 4]));
    let report = |again: &Observed, mib| {
        let run = |fails, _| {
            if fails { continued(mib) } else { again.clone() }
        };
        report_of(&first, run, Which::All).0
    };
    let difference = |again| report(&again, 10).second.map(|second| second.difference);
    assert_eq!(difference(first.clone()), None);
    let more = at_end(18, first.clone());
    assert_eq!(
        difference(more.clone()).unwrap(),
        "it leaves 18 MiB allocated at its end instead of 10 MiB"
    );
    let nearest = [5, 10, 14, 18, 27].map(|mib| report(&more, mib).cases[0].more_at_end);
    assert_eq!(
        nearest.map(|more| more.unwrap() >> 20),
        [-5, 0, 0, 0, 9],
        "the nearer run"
    );
    assert_eq!(
        difference(at_end(10, ended_well(&[2, 8, 4]))).unwrap(),
        "attempt 2 requests 8 MiB instead of 20 MiB"
    );
    let ends = Observed {
        ending: TrialEnd::By(End::Code(3)),
        ..first.clone()
    };
    assert_eq!(
        difference(ends).unwrap(),
        "it ends with exit code 3 instead of exit code 0"
    );
    let fewer = report(&at_end(10, ended_well(&[2, 20])), 10);
    assert_eq!(
        fewer.second.unwrap().difference,
        "it makes 2 attempts instead of 3"
    );
    assert_eq!(
        fewer
            .cases
            .iter()
            .map(|case| case.attempt)
            .collect::<Vec<_>>(),
        [1, 2],
        "only attempts that both make"
    );
}

#[test]
fn a_clean_end_is_a_nonzero_exit_code_after_an_out_of_memory_error_without_another_exception() {
    let ends = |run: Observed| {
        reports(Which::Sample(1), false, move |_| Some(run.clone()))
            .cases
            .remove(0)
            .meets(RecoveryExpectation::EndsCleanly)
    };
    assert!(ends(uncaught()) && ends(code(3)));
    assert!(
        ends(Observed {
            is_end_unknown: true,
            ..uncaught()
        }),
        "a process that was terminated, whose error another one raised again"
    );
    assert!(
        !ends(Observed {
            is_end_unknown: true,
            ..code(1)
        }),
        "perhaps a signal ended the worker"
    );
    assert!(!ends(Observed {
        error: Some("KeyError: 'loss'".to_owned()),
        ..uncaught()
    }));
    assert!(
        !ends(Observed {
            errors: Vec::new(),
            ..code(3)
        }),
        "without an OutOfMemoryError"
    );
    assert!(!ends(code(139)), "a shell passes on a signal");
    assert!(!ends(Observed {
        ending: TrialEnd::By(End::Signal(11)),
        ..uncaught()
    }));
}

#[test]
fn each_call_of_a_library_fails_once_and_its_own_error_is_a_clean_end() {
    let call = |call: Call| Attempt {
        call,
        size: Bytes::ZERO,
        ..ended_well(&[2]).attempts[0]
    };
    let with = |calls: &[Call], run: Observed| Observed {
        calls_of_libraries: calls.iter().copied().map(call).collect(),
        ..run
    };
    let calls = [Call::CublasCreate, Call::CublasCreate, Call::CudnnCreate];
    let first = with(&calls, ended_well(&[2]));
    let failed = |text: &str, by_library| Observed {
        error: Some(text.to_owned()),
        ended_by_library: by_library,
        failed_calls: vec![error(0, 12).frames],
        ..with(
            &calls[..2],
            Observed {
                ending: TrialEnd::By(End::Code(1)),
                ..ended_well(&[2])
            },
        )
    };
    let run = |trial: &Trial| {
        if trial.faults.is_empty() {
            return Ok(Some(first.clone()));
        }
        let [
            Fault {
                call,
                first: number,
                count,
                ..
            },
        ] = trial.faults[..]
        else {
            panic!("one fault per run")
        };
        assert!(
            call.is_none() || count == 1,
            "PyTorch does not retry {call:?}"
        );
        Ok::<_, std::convert::Infallible>(Some(match (call, number) {
            (Some(Call::CublasCreate), 1) => first.clone(),
            (Some(Call::CublasCreate), _) => {
                failed("RuntimeError: CUBLAS_STATUS_ALLOC_FAILED", true)
            }
            (Some(_), _) => failed("KeyError: 'loss'", false),
            (None, _) => ended_well(&[2, 2, 2]),
        }))
    };
    let trial = trial(Bytes::gib(1));
    let program = TrialProgram {
        run: &run,
        trial,
        first: &first,
        predict: &|_| None,
        unpredicted: None,
        shard: None,
        jobs: 1,
        progress: &|| {},
    };
    let Ok(report) = every_fault(
        &program,
        FaultPlan {
            which: Which::Some,
            alone: false,
            only: None,
        },
    );
    let found: Vec<_> = report
        .cases
        .iter()
        .map(|case| {
            (
                case.name(),
                &case.outcome,
                case.meets(RecoveryExpectation::EndsCleanly),
            )
        })
        .collect();
    let lines = report
        .cases
        .iter()
        .map(|case| case.stack.first().map(|frame| frame.line));
    assert_eq!(
        lines.collect::<Vec<_>>(),
        [None, None, Some(12), Some(12)],
        "recovered from the first, as `first` shows"
    );
    let names = [
        "None 1",
        "None cublasCreate 1",
        "None cublasCreate 2",
        "None cudnnCreate 1",
    ];
    assert_eq!(
        found
            .iter()
            .map(|(name, ..)| name.as_str())
            .collect::<Vec<_>>(),
        names
    );
    assert_eq!(
        (found[1].1, found[3].1),
        (&TrialOutcome::Recovered, &TrialOutcome::NotReached)
    );
    assert_eq!(
        found
            .iter()
            .map(|(.., is_clean)| *is_clean)
            .collect::<Vec<_>>(),
        [true, true, true, false]
    );
    assert!(
        report.cases[2].meets(RecoveryExpectation::Recovers)
            && !report.cases[3].meets(RecoveryExpectation::Recovers)
    );
    assert!(
        report.chosen.ends_with(
            "; all 3 of the calls that create handles, plans and modules of libraries, once"
        ),
        "{}",
        report.chosen
    );
    for which in [Which::Largest(9), Which::Sample(9)] {
        let Ok(only) = every_fault(
            &program,
            FaultPlan {
                which,
                alone: false,
                only: None,
            },
        );
        assert_eq!(only.cases.len(), 1, "{which:?} counts allocations");
    }
}

#[test]
fn runs_skipped_after_an_interrupt_are_counted() {
    let report = reports(Which::All, true, |trial| {
        (trial.faults[0].first == 1).then(|| ended_well(&[2, 2, 20, 4]))
    });
    assert_eq!((report.cases.len(), report.left_out), (1, 4));
    let first = ended_well(&[2, 20, 4]);
    assert_eq!(
        runs(
            &first,
            FaultPlan {
                which: Which::All,
                alone: true,
                only: None,
            },
            None
        ),
        7
    );
}

#[test]
fn an_unreached_fault_is_found() {
    let faults = ["any:2:2", "any:3"].map(|text| text.parse::<Fault>().unwrap());
    let processes = [&[2][..], &[2, 2]].map(|sizes| ProgramTimeline {
        attempts: ended_well(sizes).attempts,
        ..ProgramTimeline::default()
    });
    assert_eq!(not_reached(&faults, &processes), Some(&faults[1]));
    assert_eq!(not_reached(&faults[..1], &processes), None);
}

#[test]
fn a_run_that_could_not_use_a_port_beside_others_runs_again_alone() {
    use std::sync::atomic::{AtomicUsize, Ordering};

    let number = AtomicUsize::new(0);
    let report = reports(Which::All, false, |_| {
        // The third run meets the port of another one.
        let is_unlucky = number.fetch_add(1, Ordering::Relaxed) == 2;
        let error = "DistNetworkError: code: -98, name: EADDRINUSE".to_owned();
        Some(Observed {
            error: is_unlucky.then_some(error),
            ..ended_well(&[2, 20, 4])
        })
    });
    assert_eq!(
        (number.into_inner(), report.cases.len()),
        (7, 3),
        "two runs for each case, and one again"
    );
}

#[test]
fn failures_last_as_long_as_the_caller_retries() {
    let place = Place {
        rank: None,
        call: None,
        attempt: 2,
        size: Bytes::mib(20),
    };
    let library = |shows_errors| Caller::Library {
        name: "JAX".to_owned(),
        shows_errors,
    };
    assert_eq!(place.in_a_row(&Caller::Torch, true), 2);
    assert_eq!(place.in_a_row(&library(true), true), Fault::UNTIL_ERROR);
    assert_eq!(place.in_a_row(&library(true), false), 2, "on a real GPU");
    assert_eq!(
        place.in_a_row(&library(false), true),
        2,
        "before Python 3.12"
    );
    assert_eq!(place.in_a_row(&Caller::Program, true), 1);
    let first = Observed {
        caller: Caller::Program,
        ..ended_well(&[2, 20])
    };
    let run = ended_well(&[2, 20, 20]);
    assert_eq!(
        outcome(&place.failing(1), &first, &run),
        TrialOutcome::Recovered
    );
}
