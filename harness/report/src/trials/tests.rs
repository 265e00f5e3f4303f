//! What many runs came to, as it is shown.
#![allow(clippy::unwrap_used)]

use harness_exec::errors::ErrorFrame;
use harness_exec::matrix::{MatrixCell, MatrixRow, RunFigures};
use harness_exec::torch_record::Caller;
use harness_exec::trials::{faults::First, faults::Second, least::OrderLeast};

use super::*;

const MIB: u64 = 1 << 20;

fn case(attempt: u64, outcome: TrialOutcome, line: u64) -> FaultCase {
    let frame = ErrorFrame {
        file: "/home/me/train.py".to_owned(),
        line,
        name: "step".to_owned(),
    };
    FaultCase {
        rank: None,
        call: None,
        attempt,
        size: 20 * MIB,
        is_clean_end: outcome == TrialOutcome::OutOfMemory,
        stack: if outcome == TrialOutcome::ServedByRetry {
            Vec::new()
        } else {
            vec![frame]
        },
        outcome,
        more_at_end: Some(0),
        holds_memory: false,
        more_at_peak: -4 * MIB as i64,
        next_size: Some(10 * MIB),
        submitted: 180,
        alone: (attempt == 1).then_some(TrialOutcome::ServedByRetry),
        doubts: Vec::new(),
    }
}

fn report(cases: Vec<FaultCase>) -> FaultReport {
    let first = First {
        attempts: 64,
        processes: 1,
        allocated_at_end: Some(40 * MIB),
        peak_reserved: 300 * MIB,
        submitted: 200,
    };
    FaultReport {
        doubts: Vec::new(),
        first,
        caller: Caller::Torch,
        second: None,
        chance: None,
        chosen: "all 64".to_owned(),
        cases,
        left_out: 0,
        part: None,
    }
}

fn mixed() -> FaultReport {
    let mut cases = vec![
        case(1, TrialOutcome::OutOfMemory, 88),
        case(2, TrialOutcome::OutOfMemory, 88),
        case(3, TrialOutcome::Recovered, 50),
        case(4, TrialOutcome::ServedByRetry, 50),
        case(5, TrialOutcome::Recovered, 50),
        case(
            6,
            TrialOutcome::OtherError {
                error: "UnboundLocalError: cannot access local variable 'loss'".to_owned(),
            },
            50,
        ),
        case(7, TrialOutcome::Signal { signal: 11 }, 51),
        case(8, TrialOutcome::Hang { ranks: Vec::new() }, 51),
        case(9, TrialOutcome::ExitCode { exit_code: 3 }, 51),
        case(10, TrialOutcome::NotReached, 51),
    ];
    cases[8].is_clean_end = true;
    cases[4].more_at_end = Some(24 * MIB as i64);
    cases[4].holds_memory = true;
    report(cases)
}

#[test]
fn every_way_to_end_is_summed_up_in_a_sentence_and_shown_in_a_table() {
    let report = mixed();
    insta::assert_snapshot!(text(
        Trials::Faults(&report, Some(RecoveryExpectation::Recovers)),
        Style::Plain,
        None
    ));
}

#[test]
fn a_page_of_markdown_says_the_same() {
    let report = FaultReport {
        left_out: 3,
        first: First {
            processes: 2,
            ..mixed().first
        },
        ..mixed()
    };
    let expectation = Some(RecoveryExpectation::EndsCleanly);
    insta::assert_snapshot!(markdown(Trials::Faults(&report, expectation), None));
}

#[test]
fn the_difference_of_a_second_run_is_shown_with_what_is_compared() {
    let page = |is_comparable, has_copies, chance: Option<&str>| {
        let second = Second {
            figures: mixed().first,
            difference: "it makes 7 attempts instead of 5".to_owned(),
            is_comparable,
            has_copies,
        };
        let report = FaultReport {
            second: Some(second),
            chance: chance.map(str::to_owned),
            ..mixed()
        };
        markdown(Trials::Faults(&report, None), None)
    };
    let both = page(true, false, Some("the program is not deterministic"));
    assert!(
        both.contains("in a second run without failures, it makes 7 attempts instead of 5. Only")
            && both.contains("nearer one of the two")
            && both.contains(
                "Some runs continue with up to 24 MiB more allocated at their end or with less \
                 work. That may be chance, so it does not count: the program is not deterministic."
            )
            && !both.contains("results may be missing"),
        "{both}"
    );
    let copies = page(true, true, None);
    assert!(
        copies.contains("each is compared with that one")
            && copies.contains("are differences to the second run")
            && copies.contains("results may be missing"),
        "{copies}"
    );
    assert!(page(false, false, None).contains("each run is compared with the first one"));
}

#[test]
fn runs_without_their_failure_do_not_count_against_the_program() {
    let report = report(vec![
        case(1, TrialOutcome::Recovered, 50),
        case(7, TrialOutcome::NotReached, 51),
    ]);
    let text = text(
        Trials::Faults(&report, Some(RecoveryExpectation::Recovers)),
        Style::Plain,
        None,
    );
    assert!(
        text.starts_with("The program recovers from the injected failure.\n")
            && text.contains("Expectation met: it recovers.")
            && text.contains("did not make them again: 7."),
        "{text}"
    );
}

#[test]
fn no_expectation_is_met_if_no_run_reaches_its_failure() {
    for expectation in [
        RecoveryExpectation::Recovers,
        RecoveryExpectation::EndsCleanly,
    ] {
        let report = report(vec![case(7, TrialOutcome::NotReached, 51)]);
        let text = text(
            Trials::Faults(&report, Some(expectation)),
            Style::Plain,
            None,
        );
        assert!(
            text.starts_with("No failure was injected.\n")
                && text.contains("Expectation not met: no failure was injected."),
            "{text}"
        );
    }
}

#[test]
fn the_table_of_several_ranks_shows_who_waits_for_whom() {
    let waits = "rank 0 waits in all_reduce of 8 float32 (number 7) at train.py:90 for rank 1";
    let hang = TrialOutcome::Hang {
        ranks: vec![waits.to_owned(), "rank 1 has ended".to_owned()],
    };
    let of_rank = |rank, case: FaultCase| FaultCase {
        rank: Some(rank),
        ..case
    };
    let report = report(vec![
        of_rank(0, case(1, TrialOutcome::Recovered, 50)),
        of_rank(1, case(4, hang, 88)),
    ]);
    let text = text(
        Trials::Faults(&report, Some(RecoveryExpectation::EndsCleanly)),
        Style::Plain,
        None,
    );
    assert!(
        text.starts_with(
            "The program recovers from 1 of 2 injected failures; once its ranks hang.\n"
        ),
        "{text}"
    );
    for part in [
        "rank  attempt",
        &format!("   1        4  train.py:88 step  hang: {waits}\n"),
        "attempts: 4 of rank 1.",
    ] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

#[test]
fn the_sentence_says_all_or_none_where_that_is_so() {
    let sentence = |cases: Vec<FaultCase>| sentence_of_faults(&report(cases));
    assert_eq!(sentence(vec![]), "No failure was injected.");
    assert_eq!(
        sentence(vec![case(1, TrialOutcome::Recovered, 5)]),
        "The program recovers from the injected failure."
    );
    assert_eq!(
        sentence(vec![
            case(1, TrialOutcome::OutOfMemory, 5),
            case(2, TrialOutcome::OutOfMemory, 5)
        ]),
        "The program survives none of 2 injected failures; 2 times it ends with OutOfMemoryError \
         at train.py:5."
    );
    assert_eq!(
        sentence(vec![
            case(1, TrialOutcome::Recovered, 5),
            case(2, TrialOutcome::OutOfMemory, 88)
        ]),
        "The program recovers from 1 of 2 injected failures; once it ends with OutOfMemoryError at \
         train.py:88."
    );
}

#[test]
fn the_least_memory_is_shown_by_the_order_of_addresses() {
    let order = |name: &str, enough: u64, is_monotonic| {
        let addresses = name.to_owned();
        OrderLeast {
            addresses,
            enough: enough * MIB,
            too_little: (enough - 2) * MIB,
            is_monotonic,
            runs: 4,
            difference: None,
            doubts: Vec::new(),
        }
    };
    let orders = vec![
        order("up", 800, true),
        order("down", 804, false),
        order("reuse", 798, true),
    ];
    let report = LeastReport {
        doubts: vec![Doubt::UncomputedReads {
            reads: 1,
            at: Vec::new(),
            has_torch: true,
        }],
        plenty: 8192 * MIB,
        peak_reserved: 1024 * MIB,
        orders,
        part: None,
    };
    insta::assert_snapshot!(text(Trials::Least(&report), Style::Plain, None));
}

#[test]
fn two_sizes_that_look_alike_are_shown_in_bytes() {
    let order = OrderLeast {
        addresses: "up".to_owned(),
        enough: 1374 * MIB,
        too_little: 1372 * MIB,
        is_monotonic: true,
        runs: 4,
        difference: None,
        doubts: Vec::new(),
    };
    let report = LeastReport {
        doubts: Vec::new(),
        plenty: 8192 * MIB,
        peak_reserved: 1024 * MIB,
        orders: vec![order],
        part: None,
    };
    let text = text(Trials::Least(&report), Style::Plain, None);
    let sentence = "1.34 GiB (1440743424) are enough, 1.34 GiB (1438646272) are not.";
    assert!(text.starts_with(sentence), "{text}");
}

#[test]
fn the_doubts_about_all_runs_are_one_line() {
    let timing = |line: u64| {
        vec![Doubt::Timing {
            waits: 0,
            at: vec![format!("train.py:{line}")],
        }]
    };
    let row = |own: u64, least: u64| SettingsRow {
        doubts: timing(own),
        least_by_order: vec![OrderLeast {
            addresses: "linux".to_owned(),
            enough: 4 * MIB,
            too_little: 2 * MIB,
            is_monotonic: true,
            runs: 2,
            difference: None,
            doubts: timing(least),
        }],
        ..rows()[1].clone()
    };
    let other = OtherOrder {
        addresses: "reuse".to_owned(),
        row: row(5, 6),
    };
    let settings = SettingsReport {
        rows: vec![
            row(2, 3),
            SettingsRow {
                other_orders: vec![other],
                ..row(4, 3)
            },
        ],
        doubts: timing(1),
        ..SettingsReport::default()
    };
    let faults = FaultReport {
        doubts: timing(1),
        ..report(vec![
            case(1, TrialOutcome::Recovered, 12),
            FaultCase {
                doubts: timing(2),
                ..case(2, TrialOutcome::Recovered, 12)
            },
        ])
    };
    let least = LeastReport {
        plenty: 8192 * MIB,
        peak_reserved: 4 * MIB,
        orders: settings.rows[0].least_by_order.clone(),
        doubts: timing(1),
        part: None,
    };
    for (trials, lines) in [
        (
            Trials::Settings(&settings),
            "train.py:1, train.py:2, train.py:3, train.py:4, train.py:5, train.py:6",
        ),
        (Trials::Faults(&faults, None), "train.py:1, train.py:2"),
        (Trials::Least(&least), "train.py:1, train.py:3"),
    ] {
        let text = text(trials, Style::Plain, None);
        let line = format!(
            "Uncertain: the program asked whether the GPU had finished at {lines}, so peaks can \
             depend on timing."
        );
        assert_eq!(text.matches("Uncertain").count(), 1, "{text}");
        assert!(text.contains(&line), "{text}");
    }
}

fn rows() -> Vec<SettingsRow> {
    let row = |conf: &str, exit_code: Option<u8>, peak: u64| SettingsRow {
        alloc_conf: conf.to_owned(),
        basis: if conf.is_empty() {
            Basis::Confirmed
        } else {
            Basis::Predicted
        },
        exit_code,
        signal: None,
        is_hang: false,
        ended_out_of_memory: exit_code == Some(1),
        peak_reserved: peak * MIB,
        num_alloc_retries: Some(3),
        num_ooms: Some(0),
        driver_calls: 120,
        least_memory: None,
        least_by_order: Vec::new(),
        other_orders: Vec::new(),
        doubts: Vec::new(),
    };
    vec![
        row("", Some(1), 1000),
        row("expandable_segments:True", Some(0), 800),
        SettingsRow {
            is_hang: true,
            ..row("max_split_size_mb:32", None, 900)
        },
    ]
}

#[test]
fn settings_are_compared_in_a_table_with_the_best_in_a_sentence() {
    let report = SettingsReport {
        doubts: Vec::new(),
        memory: 1024 * MIB,
        rows: rows(),
        best: Some(1),
        is_interrupted: false,
        unpredicted: None,
        part: None,
    };
    insta::assert_snapshot!(text(Trials::Settings(&report), Style::Plain, None));
}

#[test]
fn the_least_memory_of_a_setting_is_a_column_and_no_good_setting_is_said() {
    let mut report = SettingsReport {
        doubts: Vec::new(),
        memory: 1024 * MIB,
        rows: rows(),
        best: Some(1),
        is_interrupted: true,
        unpredicted: None,
        part: None,
    };
    report.rows[1].least_memory = Some(700 * MIB);
    insta::assert_snapshot!(text(Trials::Settings(&report), Style::Plain, None));
    let none = SettingsReport {
        best: None,
        ..report
    };
    assert_eq!(
        sentence_of_settings(&none),
        "The program fails in 1 GiB with each of these settings."
    );
}

#[test]
fn how_far_the_orders_of_addresses_differ_is_said_of_each_setting() {
    let mut rows = rows();
    let other = |addresses: &str, row: &SettingsRow, code, more: u64| OtherOrder {
        addresses: addresses.to_owned(),
        row: SettingsRow {
            exit_code: Some(code),
            ended_out_of_memory: code == 1,
            peak_reserved: row.peak_reserved + more * MIB,
            ..row.clone()
        },
    };
    rows[0].other_orders = vec![
        other("down", &rows[0], 0, 20),
        other("reuse", &rows[0], 1, 0),
    ];
    rows[0].other_orders[0].row.basis = Basis::Predicted;
    rows[1].least_by_order = [("up", 700), ("down", 710), ("reuse", 700)]
        .map(|(name, enough)| OrderLeast {
            addresses: name.to_owned(),
            enough: enough * MIB,
            too_little: 690 * MIB,
            is_monotonic: true,
            runs: 4,
            difference: None,
            doubts: Vec::new(),
        })
        .to_vec();
    let unpredicted = Some("uses several GPUs".to_owned());
    let report = SettingsReport {
        doubts: Vec::new(),
        memory: 1024 * MIB,
        rows,
        best: Some(1),
        is_interrupted: false,
        unpredicted,
        part: None,
    };
    assert_eq!(
        notes_on_settings(&report),
        [
            "(no settings): with addresses down: success, peak reserved +20 MiB (predicted); with \
             addresses reuse: OutOfMemoryError, exit code 1, peak reserved the same.",
            "expandable_segments:True needs 700 MiB with addresses up, 710 MiB with down (+10 \
             MiB), 700 MiB with reuse (the same).",
            ORDERS,
            "predicted: by a replay of the first run; confirmed: by a run.",
            "Each setting was run, because the program uses several GPUs.",
        ]
    );
}

#[test]
fn calls_that_failed_in_their_turn_are_a_table_with_each_defect_and_its_command() {
    use harness_record::{FaultOutcome, FaultedArm, FaultedCase, NotTried};
    let case = |number, end| FaultedCase {
        process: (number == 9).then(|| "worker".to_owned()),
        call: "cudaMalloc".to_owned(),
        number,
        count: 1,
        size: Some(Bytes::mib(20)),
        step: 3,
        end,
        reproduce: format!(
            "harness run a.yaml --device sim --allocator caching --seed 0 --fail \
             {}cudaMalloc:{number}",
            if number == 9 { "worker/" } else { "" }
        ),
    };
    let arm = |allocator: &str, cases: Vec<FaultedCase>, not_tried| FaultedArm {
        scenario: "a".to_owned(),
        allocator: allocator.to_owned(),
        calls: 9,
        repeats: if cases.is_empty() { 0 } else { 3 },
        chosen: if cases.is_empty() {
            "all 9".to_owned()
        } else {
            "4 evenly spread of 9".to_owned()
        },
        cases,
        not_tried,
    };
    let told = FaultOutcome::NamedError {
        error: "cudaMalloc failed".to_owned(),
    };
    let defect = FaultOutcome::Defect {
        why: "invariant nothing_leaks: expected nothing left, seen 1 allocations".to_owned(),
    };
    let cases = vec![
        case(1, FaultOutcome::Healed),
        case(3, FaultOutcome::OutOfMemory),
        case(6, told),
        case(9, defect),
    ];
    let why = NotTried {
        why: "it has faults of its own".to_owned(),
        failed: false,
    };
    let mut runs = FaultedRuns {
        arms: vec![
            arm("caching", cases, None),
            arm("direct", Vec::new(), Some(why)),
        ],
        left_out: 2,
    };
    insta::assert_snapshot!(text(Trials::Calls(&runs), Style::Plain, None));
    assert!(!runs.passed());
    runs.arms
        .iter_mut()
        .for_each(|arm| arm.cases.retain(|case| !case.is_defect()));
    assert!(runs.passed());
    let ends = "Each run recovered, ended out of memory, or ended with an error that names the \
         call. 3 further calls were not tried because they \
                repeat one of them.";
    assert!(
        calls::sentence(&runs).ends_with(ends),
        "{}",
        calls::sentence(&runs)
    );
}

#[test]
fn a_matrix_shows_its_worst_runs_and_the_peaks_that_grew() {
    let row = |batch: u64, code: u8, peak: u64| MatrixRow {
        cell: MatrixCell {
            program: "train".to_owned(),
            values: [("batch", batch.to_string()), ("gpu", "h200".to_owned())]
                .map(|(name, value)| (name.to_owned(), value))
                .into(),
        },
        figures: RunFigures {
            exit_code: Some(code),
            failure: (code > 0).then(|| "OutOfMemoryError".to_owned()),
            peak_allocated: Some(peak * MIB),
            peak_reserved: Some(peak * MIB),
            num_ooms: Some(u64::from(code)),
            took_ms: Some(batch * 1500),
            ..RunFigures::default()
        },
        ..MatrixRow::default()
    };
    let rows: Vec<MatrixRow> = (1..12)
        .map(|batch| row(batch, u8::from(batch == 3), batch * 10))
        .chain([MatrixRow {
            figures: RunFigures::without_run("`srun` cannot start".to_owned()),
            ..row(12, 0, 0)
        }])
        .collect();
    let earlier = [row(1, 0, 10), row(2, 0, 18), row(3, 0, 20)];
    let report = MatrixReport::new(rows, Some(&earlier));
    insta::assert_snapshot!(text(Trials::Matrix(&report), Style::Plain, Some(100)));
}
