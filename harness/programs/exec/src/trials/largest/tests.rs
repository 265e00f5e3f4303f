//! Searches with fake programs.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::sync::Mutex;
use std::time::Duration;

use harness_allocator::device::StreamId;
use harness_trace::program::{RecordedAllocation, RecordedProgram};
use harness_trace::trace::TraceEvent;

use super::*;
use crate::process::End;
use crate::tests::fake::{ended_well, error, trial};

/// Converts MiB. 8 MiB stand for a workspace of cuBLAS, which is a little larger.
const fn size(mib: u64) -> Bytes {
    match mib {
        8 => WORKSPACE,
        _ => Bytes::mib(mib),
    }
}

/// A program whose requests, in MiB, depend on the value.
fn recording(sizes: &[u64]) -> RecordedProgram {
    let allocation = |mib: &u64| RecordedAllocation {
        address: None,
        refused: false,
        requested: size(*mib),
        stream: StreamId(0),
        stack: Default::default(),
    };
    let allocate = |(id, mib): (usize, &u64)| TraceEvent::Allocate {
        id: id as u64,
        size: size(*mib),
        stream: StreamId(0),
    };
    RecordedProgram {
        operations: sizes.iter().enumerate().map(allocate).collect(),
        origin: (0..sizes.len() as u32).collect(),
        allocations: sizes.iter().map(allocation).collect(),
        streams: vec![0],
        ..RecordedProgram::default()
    }
}

fn case(gpu: &str, mib: u64) -> LargestCase {
    LargestCase {
        gpu: gpu.to_owned(),
        kind: (9, 0, 132),
        others: BTreeMap::new(),
        lever: None,
        trial: trial(Bytes::mib(mib)),
    }
}

/// What a run observes if it makes these requests, of which one of less than 10 MiB is in the
/// segment of the workspace before it.
fn run_of(case: &LargestCase, sizes: &[u64]) -> FirstRun {
    let mut room = 0;
    let mut whole = |size: &u64| match size {
        ..10 if *size <= room => {
            room -= size;
            0
        }
        ..10 => {
            room = 20 - size.next_multiple_of(10);
            20
        }
        _ => size.next_multiple_of(2),
    };
    let needed = sizes.iter().map(&mut whole).sum::<u64>();
    let lacks = needed.saturating_sub(case.trial.memory.0 >> 20);
    let mut observed = ended_well(sizes);
    observed.peak_reserved = Bytes::mib(needed);
    if lacks > 0 {
        let last = observed.attempts.last_mut().unwrap();
        last.outcome = AttemptOutcome::Refused;
        last.size = Bytes::mib(lacks);
        last.held = case.trial.memory;
        observed.ooms = Some(1);
        observed.ended_out_of_memory = true;
        observed.reads_free_memory = true; // for the text of the error
        observed.ending = TrialEnd::By(End::Code(1));
        observed.errors = vec![error(sizes.len() as u64, 31)];
    }
    let recorded = if lacks > 0 {
        Err("runs out of memory in its first run")
    } else {
        Ok(recording(sizes))
    };
    FirstRun {
        observed,
        took: Duration::ZERO,
        recorded: Some(recorded),
        snapshot: None,
    }
}

/// Searches, and returns the report with the values that were run.
fn search_by(
    values: &str,
    cases: &[LargestCase],
    run: impl Fn(&LargestCase, u64) -> FirstRun + Sync,
) -> (LargestReport, Vec<u64>) {
    let made = Mutex::new(Vec::new());
    let run = |case: &LargestCase, value: u64| {
        made.lock().unwrap().push(value);
        Ok::<_, Infallible>(Some(run(case, value)))
    };
    let Ok(report) = (LargestSearch {
        parameter: &values.parse().unwrap(),
        cases,
        run: &run,
        progress: &|| {},
        context_overhead: Bytes::ZERO,
        memory_of_libraries: false,
        allow_ooms: false,
        jobs: 2,
    })
    .report();
    (report, made.into_inner().unwrap())
}

fn requests(value: u64) -> Vec<u64> {
    vec![100, 20 + 3 * value, 22 + value * value]
}

/// The largest value that fits, by trying all.
fn by_trying(case: &LargestCase, values: std::ops::RangeInclusive<u64>) -> Option<u64> {
    values
        .take_while(|value| !run_of(case, &requests(*value)).observed.ended_out_of_memory)
        .last()
}

#[test]
fn a_program_without_recordings_that_ignores_the_value_has_no_effect() {
    let run = |sizes: &[u64], caller| {
        let mut run = run_of(&case("one", 4096), sizes);
        run.observed.caller = caller;
        run.recorded = None;
        run
    };
    let has_no_effect = |of: &(dyn Fn(u64) -> FirstRun + Sync)| {
        let (report, _) = search_by("n=1..100", &[case("one", 4096)], |_, value| of(value));
        assert_eq!(report.rows[0].largest, Some(100));
        report.rows[0].has_no_effect
    };
    assert!(has_no_effect(&|_| run(&[10, 20], Caller::Program)));
    assert!(!has_no_effect(&|value| run(&[200, value], Caller::Program)));
    assert!(!has_no_effect(&|_| run(&[10, 20], Caller::Torch)));
}

#[test]
fn predictions_find_what_trying_every_value_finds_with_few_runs() {
    let cases = [
        case("one", 4096),
        case("two", 24 << 10),
        case("three", 80 << 10),
    ];
    let (report, runs) = search_by("batch=1..4096", &cases, |case, value| {
        run_of(case, &requests(value))
    });
    for (case, row) in cases.iter().zip(&report.rows) {
        assert_eq!(row.largest, by_trying(case, 1..=4096), "{row:?}");
        assert_eq!(row.next.as_ref().unwrap().value, row.largest.unwrap() + 1);
    }
    let first = &report.rows[2];
    assert_eq!(first.basis, Evidence::Confirmed);
    assert_eq!(
        first.next.as_ref().unwrap().location.as_deref(),
        Some("train.py:31")
    );
    assert!(first.next.as_ref().unwrap().lacks > Some(0));
    assert_eq!(
        report.rows[1].basis,
        Evidence::Predicted,
        "{runs:?} {report:?}"
    );
    assert!(runs.len() <= 8, "{runs:?}");
    assert_eq!(report.runs, runs.len());
}

/// Ten GPUs of six compute capabilities.
fn ten() -> Vec<LargestCase> {
    let of = |(index, (kind, gib)): (usize, &((u32, u32, u32), u64))| LargestCase {
        kind: *kind,
        ..case(&format!("gpu {index}"), gib << 10)
    };
    [
        ((8, 9, 142), 44),
        ((9, 0, 132), 140),
        ((9, 0, 132), 79),
        ((8, 0, 108), 79),
        ((8, 0, 108), 39),
        ((8, 6, 84), 47),
        ((12, 0, 170), 31),
        ((8, 9, 128), 23),
        ((8, 9, 58), 21),
        ((7, 5, 40), 14),
    ]
    .iter()
    .enumerate()
    .map(of)
    .collect()
}

#[test]
fn a_table_of_ten_gpus_takes_five_runs_if_all_make_the_same_requests() {
    let of = |_: &LargestCase, value: u64| vec![100, 20 + 3 * value, 22 + 7 * value];
    let (report, runs) = search_of_ten(&ten(), of);
    assert_eq!(runs.len(), 5, "{runs:?}");
    for row in &report.rows {
        assert!(row.peak_reserved.is_some() && !row.is_refuted);
    }
    let basis = |gpu: usize| report.rows[gpu].basis;
    assert_eq!(
        [1, 9, 0].map(basis),
        [
            Evidence::Confirmed,
            Evidence::NextPredicted,
            Evidence::Predicted
        ]
    );
}

/// Searches the ten GPUs, and checks each answer.
fn search_of_ten(
    cases: &[LargestCase],
    of: impl Fn(&LargestCase, u64) -> Vec<u64> + Sync,
) -> (LargestReport, Vec<u64>) {
    let (report, runs) = search_by("batch=1..100000", cases, |case, value| {
        run_of(case, &of(case, value))
    });
    for (case, row) in cases.iter().zip(&report.rows) {
        let fits = |value: u64| !run_of(case, &of(case, value)).observed.ended_out_of_memory;
        assert!(
            fits(row.largest.unwrap()) && !fits(row.largest.unwrap() + 1),
            "{row:?}"
        );
    }
    (report, runs)
}

#[test]
fn workspaces_of_hopper_gpus_take_no_runs() {
    let mut cases = ten();
    cases[1].kind = (10, 0, 148); // the most memory, but no Hopper
    // The small request takes no memory of its own if the workspace leaves room in its segment.
    let of = |case: &LargestCase, value: u64| {
        let workspace = if is_hopper(case) { 32 } else { 8 };
        vec![workspace, 6, 100 + 30 * value]
    };
    let (report, runs) = search_of_ten(&cases, of);
    assert_eq!(runs.len(), 5, "{runs:?}");
    let hopper = &report.rows[2];
    let peak = (32 + 20 + 100 + 30 * hopper.largest.unwrap()) << 20;
    assert_eq!(
        (hopper.basis, hopper.peak_reserved),
        (Evidence::Predicted, Some(peak))
    );
}

#[test]
fn gpus_whose_requests_differ_by_more_than_workspaces_of_cublas_are_run() {
    let cases = ten();
    let of = |case: &LargestCase, value: u64| {
        vec![
            40 + u64::from(case.kind.2),
            value / 100 + 20,
            100 + 700 * value,
        ]
    };
    let (report, _) = search_of_ten(&cases, of);
    for (case, row) in cases.iter().zip(&report.rows) {
        let mut alike = cases.iter().zip(&report.rows);
        let ran = alike.any(|(other, row)| other.is_like(case) && row.runs > 0);
        assert!(ran && row.peak_reserved.is_some(), "{row:?}");
    }
}

#[test]
fn an_older_gpu_and_a_refuted_prediction_are_run() {
    // The oldest GPU has no kernel without attention scores, and one step needs twice the memory.
    let of = |case: &LargestCase, value: u64| match case.capability() {
        (7, _) => vec![100, 20 + 9 * value, value * value],
        _ if value > 3000 => vec![100, 40 + 18 * value],
        _ => vec![100, 20 + 9 * value],
    };
    let (report, _) = search_of_ten(&ten(), of);
    assert!(report.rows[1].is_refuted, "{report:?}");
}

#[test]
fn a_gpu_with_another_workspace_takes_few_runs() {
    for workspaces in [[32, 64], [64, 32]] {
        let other = LargestCase {
            kind: (8, 0, 108),
            ..case("other", 24 << 10)
        };
        let of = |case: &LargestCase, value: u64| {
            let workspace = workspaces[usize::from(case.kind.0 == 8)] * 8;
            run_of(case, &[workspace, 100 + 21 * value])
        };
        let cases = [case("one", 12 << 10), other];
        let (report, _) = search_by("batch=1..4096", &cases, of);
        let largest = ((24 << 10) - workspaces[1] * 8 - 100) / 21;
        assert_eq!(report.rows[1].largest, Some(largest));
        assert!(report.rows[1].runs <= 5, "{report:?}");
    }
}

/// Two GPUs, one of which needs less for each value.
fn with_slopes(sizes: impl Fn(&LargestCase, u64) -> Vec<u64> + Sync, smaller: u64) -> LargestRow {
    let other = LargestCase {
        kind: (8, 0, 108),
        ..case("other", smaller)
    };
    let cases = [case("one", smaller * 2), other];
    let (report, _) = search_by("batch=1..4096", &cases, |case, value| {
        run_of(case, &sizes(case, value))
    });
    for (case, row) in cases.iter().zip(&report.rows) {
        let fits = |value: &u64| {
            let run = run_of(case, &sizes(case, *value));
            !run.observed.ended_out_of_memory
        };
        let largest = (1..=4096).take_while(fits).last();
        assert_eq!(row.largest, largest, "{report:?}");
    }
    report.rows[1].clone()
}

#[test]
fn the_next_value_runs_if_more_than_a_constant_workspace_differs() {
    let sizes = |case: &LargestCase, value: u64| {
        let slope = if case.kind.0 == 8 { 8 } else { 9 };
        vec![100, 20 + slope * value]
    };
    // One GPU's requests let 8 values fit, and the other's 9.
    let row = with_slopes(sizes, 192);
    assert_eq!((row.largest, row.basis), (Some(9), Evidence::Confirmed));
    for memory in [400, 4000, 20_000] {
        assert_eq!(with_slopes(sizes, memory).basis, Evidence::Confirmed);
    }
}

#[test]
fn the_next_value_runs_if_a_workspace_is_constant_on_the_other_gpu_only() {
    let sizes = |case: &LargestCase, value: u64| {
        let workspace = if case.kind.0 == 8 { 3 * value } else { 80 };
        vec![20 + workspace, 20 + 8 * value]
    };
    for memory in [400, 4000, 20_000] {
        with_slopes(sizes, memory);
    }
}

#[test]
fn programs_whose_number_of_requests_changes_are_searched_by_runs() {
    let requests = |value: u64| vec![20; value as usize];
    let (report, runs) = search_by("n=1..1000", &[case("one", 4096)], |case, value| {
        run_of(case, &requests(value))
    });
    assert_eq!(report.rows[0].largest, Some(4096 / 20));
    assert!(runs.len() < 24, "{runs:?}");
}

#[test]
fn a_program_that_looks_at_free_memory_is_not_predicted() {
    let run = |case: &LargestCase, value: u64| {
        let mut run = run_of(case, &requests(value));
        run.observed.reads_free_memory = true;
        run
    };
    let cases = [case("one", 4096), case("two", 8192)];
    let (report, _) = search_by("batch=1..4096", &cases, run);
    assert!(
        report
            .rows
            .iter()
            .all(|row| row.basis == Evidence::Confirmed)
    );
    assert_eq!(report.rows[1].largest, by_trying(&cases[1], 1..=4096));
}

#[test]
fn values_that_all_fit_or_none_of_which_fits_are_told() {
    let (report, runs) = search_by("batch=1..8", &[case("one", 4096)], |case, value| {
        run_of(case, &requests(value))
    });
    assert_eq!(
        (report.rows[0].largest, &report.rows[0].next),
        (Some(8), &None)
    );
    assert!(runs.len() <= 4, "{runs:?}");
    let (report, runs) = search_by("batch=1..8", &[case("one", 100)], |case, value| {
        run_of(case, &requests(value))
    });
    let row = &report.rows[0];
    assert_eq!((row.largest, row.next.as_ref().unwrap().value), (None, 1));
    assert_eq!(runs, [1]);
}

#[test]
fn a_parameter_without_effect_is_told() {
    let (report, _) = search_by("batch=1..8", &[case("one", 4096)], |case, _| {
        run_of(case, &requests(1))
    });
    assert!(report.rows[0].has_no_effect);
    let (report, _) = search_by("batch=1..8", &[case("one", 4096)], |case, value| {
        run_of(case, &requests(value))
    });
    assert!(!report.rows[0].has_no_effect);
}

#[test]
fn a_value_that_does_not_fit_below_one_that_does_is_told() {
    // Multiples of the largest value that fits run in pairs.
    let (report, _) = search_by("batch=1..4096", &[case("one", 4096)], |case, value| {
        let size = if (170..200).contains(&value) {
            8192
        } else {
            20 + value
        };
        let mut run = run_of(case, &[100, size]);
        run.observed.reads_free_memory = true;
        run
    });
    let row = &report.rows[0];
    assert_eq!((row.largest, row.exception), (Some(3976), Some(184)));
}

#[test]
fn a_failure_for_another_reason_ends_the_search_of_its_row() {
    let run = |case: &LargestCase, value: u64| {
        let mut run = run_of(case, &requests(value));
        if value % 2 == 1 && case.gpu == "one" {
            run.observed.ending = TrialEnd::By(End::Code(1));
            run.observed.error = Some("ValueError: odd".to_owned());
        }
        run
    };
    let (report, _) = search_by("batch=1..64", &[case("one", 4096), case("two", 4096)], run);
    let failure = report.rows[0].failure.as_deref();
    assert_eq!(
        failure,
        Some("with batch 49 it ends with exit code 1: ValueError: odd")
    );
    assert_eq!(report.rows[1].failure, None);
    let bases = [0, 1].map(|row| report.rows[row].basis);
    assert_eq!(bases, [Evidence::Failed, Evidence::Confirmed]);
}

#[test]
fn parameters_have_ranges_steps_and_lists() {
    let values = |text: &str| text.parse::<Parameter>().map(|parameter| parameter.values);
    assert_eq!(values("batch=8..40:8").unwrap(), [8, 16, 24, 32, 40]);
    assert_eq!(values("n=4,1,4").unwrap(), [1, 4]);
    assert_eq!(values("n=3..3").unwrap(), [3]);
    for wrong in [
        "batch",
        "=1..2",
        "n=",
        "n=a..b",
        "n=1..",
        "n=5..4",
        "n=1..9:0",
        "n=0..9999999",
    ] {
        assert!(values(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn placeholders_are_replaced_in_every_argument_and_other_braces_stay() {
    let command = [
        "env",
        "SEQ={seq}",
        "python",
        "-c",
        "{1}",
        "--batch={batch}x{seq}",
        "${batch} {{batch}} {batch",
    ];
    let values = BTreeMap::from([("seq".to_owned(), 512), ("batch".to_owned(), 7)]);
    let replaced = with_values(&command.map(OsString::from), &values);
    assert_eq!(
        replaced,
        [
            "env",
            "SEQ=512",
            "python",
            "-c",
            "{1}",
            "--batch=7x512",
            "${batch} {7} {batch"
        ]
        .map(OsString::from)
    );
}

#[test]
fn placeholders_of_levers_and_of_the_command_are_replaced() {
    let case = LargestCase {
        others: BTreeMap::from([("seq".to_owned(), 512)]),
        lever: Some(
            "cut: N={batch} --micro {batch} --length={seq}"
                .parse()
                .unwrap(),
        ),
        ..case("one", 4096)
    };
    let command = ["train", "--batch={batch}"].map(OsString::from);
    let words = [
        "env",
        "N=7",
        "train",
        "--batch=7",
        "--micro",
        "7",
        "--length=512",
    ];
    let values = case.values("batch", 7);
    assert_eq!(case.command(&command, &values), words.map(OsString::from));
    let plain = case.without_lever();
    assert_eq!(
        plain.command(&command, &values),
        ["train", "--batch=7"].map(OsString::from)
    );
}

#[test]
fn a_lever_has_its_own_largest_value_and_the_one_that_saves_most_is_first() {
    let levers = ["half: --half", "none: --none", "checkpoint: --checkpoint"];
    let of = |case: &LargestCase, value: u64| match case.lever.as_ref().map(|it| it.name.as_str()) {
        Some("checkpoint") => vec![100, 20 + 2 * value],
        Some("half") => vec![100, 20 + 4 * value],
        _ => vec![100, 20 + 8 * value],
    };
    let cases: Vec<LargestCase> = [case("one", 40 << 10), case("two", 20 << 10)]
        .iter()
        .flat_map(|base| {
            let levers = levers.iter().map(|lever| Some(lever.parse().unwrap()));
            [None].into_iter().chain(levers).map(|lever| LargestCase {
                lever,
                ..base.clone()
            })
        })
        .collect();
    let (report, runs) = search_by("batch=1..100000", &cases, |case, value| {
        run_of(case, &of(case, value))
    });
    let found: Vec<_> = report
        .rows
        .iter()
        .map(|row| {
            (
                row.lever.as_deref(),
                row.largest.unwrap(),
                row.saves.map(|saves| saves >> 20),
            )
        })
        .collect();
    let base = ((40 << 10) - 120) / 8;
    let expected = [
        (None, base, None),
        (
            Some("checkpoint"),
            ((40 << 10) - 120) / 2,
            Some(6 * base as i64),
        ),
        (Some("half"), ((40 << 10) - 120) / 4, Some(4 * base as i64)),
        (Some("none"), base, Some(0)),
    ];
    assert_eq!(found[..4], expected);
    assert_eq!(found[5].0, Some("checkpoint"), "{found:?}");
    assert!(runs.len() <= 4 * 4 + 1, "{runs:?}");
}

#[test]
fn predicted_rows_show_what_a_lever_saves_and_a_lever_can_be_without_effect() {
    let of = |case: &LargestCase, value: u64| match case.lever.as_ref().map(|it| it.name.as_str()) {
        Some("half") => vec![100, 20 + 4 * value],
        Some("fixed") => vec![100, 20],
        _ => vec![100, 20 + 8 * value],
    };
    let kinds = [
        ("one", (9, 0, 132), 40),
        ("two", (8, 0, 108), 20),
        ("three", (8, 6, 84), 10),
    ];
    let cases: Vec<LargestCase> = kinds
        .iter()
        .flat_map(|(gpu, kind, gib)| {
            let levers = ["half: --half", "fixed: --fixed"].map(|lever| lever.parse().ok());
            [None]
                .into_iter()
                .chain(levers)
                .map(move |lever| LargestCase {
                    kind: *kind,
                    lever,
                    ..case(gpu, gib << 10)
                })
        })
        .collect();
    let (report, _) = search_by("batch=1..100000", &cases, |case, value| {
        run_of(case, &of(case, value))
    });
    let rows: Vec<_> = report
        .rows
        .iter()
        .map(|row| (row.lever.as_deref(), row.saves.map(|saves| saves >> 20)))
        .collect();
    let base = ((10 << 10) - 120) / 8;
    let saves = [
        (None, None),
        (Some("fixed"), Some(8 * base)),
        (Some("half"), Some(4 * base)),
    ];
    assert_eq!(rows[6..], saves);
    assert_eq!(report.rows[8].basis, Evidence::Predicted);
    for row in &report.rows {
        assert_eq!(row.has_no_effect, row.lever.as_deref() == Some("fixed"));
    }
}

#[test]
fn levers_have_names_variables_and_arguments() {
    let lever: Lever = "bf16: DTYPE=bfloat16 --batch=8 A=b".parse().unwrap();
    let added = lever.added_to(["python", "train.py"].map(OsString::from).to_vec());
    let words = [
        "env",
        "DTYPE=bfloat16",
        "python",
        "train.py",
        "--batch=8",
        "A=b",
    ];
    assert_eq!(added, words.map(OsString::from));
    let plain: Lever = "deep: --layers 2".parse().unwrap();
    assert_eq!(
        plain.added_to(vec!["a".into()]),
        ["a", "--layers", "2"].map(OsString::from)
    );
    let split = |text: &str| {
        let lever: Lever = text.parse().unwrap();
        (lever.variables.join(" "), lever.arguments.join(" "))
    };
    for (text, variables, arguments) in [
        ("x: A=b -- model=small +c=d", "A=b", "model=small +c=d"),
        ("x: -- model=small -- e", "", "model=small -- e"),
        ("x: A=b --", "A=b", ""),
        ("x: --half -- A=b", "", "--half -- A=b"),
    ] {
        assert_eq!(split(text), (variables.to_owned(), arguments.to_owned()));
    }
    for wrong in ["--half", "half:", ": --half", "half:--half", "half: --"] {
        assert!(wrong.parse::<Lever>().is_err(), "{wrong}");
    }
}

#[test]
fn rows_of_runs_and_of_predictions_have_the_doubts_of_the_runs() {
    let doubts = vec![Doubt::Timing {
        waits: 1,
        at: Vec::new(),
    }];
    let (report, _) = search_by(
        "batch=1..4096",
        &[case("one", 4096), case("two", 24 << 10)],
        |case, value| {
            let mut run = run_of(case, &requests(value));
            run.observed.doubts.clone_from(&doubts);
            run
        },
    );
    for basis in [Evidence::Confirmed, Evidence::Predicted] {
        let has = |row: &LargestRow| row.basis == basis;
        assert!(report.rows.iter().any(has), "{report:?}");
    }
    assert!(report.rows.iter().all(|row| row.doubts == doubts));
}
