//! Comparison of settings with fake programs.

use std::sync::atomic::{AtomicUsize, Ordering};

use harness_allocator::units::Bytes;
use harness_gpu_settings::settings::AddressOrder;

use super::*;
use crate::tests::fake::{ended_well, trial};

const SETTINGS: [&str; 3] = ["", "expandable_segments:True", "max_split_size_mb:32"];

fn compared(
    search: Option<Search>,
    of: impl Fn(&Trial) -> Option<Observed> + Sync,
) -> SettingsReport {
    predicted(search, &|_| None, of)
}

/// Compares settings with this prediction of each run.
fn predicted(
    search: Option<Search>,
    predict: &(dyn Fn(&Trial) -> Option<Observed> + Sync),
    of: impl Fn(&Trial) -> Option<Observed> + Sync,
) -> SettingsReport {
    let settings = SETTINGS.map(str::to_owned);
    let run = |trial: &Trial| Ok::<_, std::convert::Infallible>(of(trial));
    let first = Trial {
        alloc_conf: Some(String::new()),
        ..trial(Bytes::gib(1))
    };
    let observed = of(&first).unwrap_or_else(|| ended_well(&[2]));
    let program = TrialProgram {
        run: &run,
        trial: first,
        first: &observed,
        predict,
        unpredicted: None,
        shard: None,
        jobs: 2,
        progress: &|| {},
    };
    let Ok(report) = compare(&program, &settings, search, &[]);
    report
}

fn index(trial: &Trial) -> usize {
    SETTINGS
        .iter()
        .position(|conf| trial.alloc_conf.as_deref() == Some(conf))
        .unwrap_or_default()
}

#[test]
fn the_best_setting_succeeds_without_errors_with_the_lowest_peak_and_the_fewest_calls() {
    let report = compared(None, |trial| {
        Some(ended_well([&[90][..], &[30, 30], &[60]][index(trial)]))
    });
    assert_eq!(report.best, Some(2), "as low a peak with fewer calls");
    let failing = |trial: &Trial| match index(trial) {
        2 => Observed {
            ending: TrialEnd::By(End::Code(1)),
            ended_out_of_memory: true,
            ..ended_well(&[1])
        },
        1 => Observed {
            ooms: Some(1),
            ..ended_well(&[30])
        },
        _ => ended_well(&[90]),
    };
    let report = compared(None, |trial| Some(failing(trial)));
    assert_eq!(report.best, Some(0));
    assert_eq!(
        report
            .rows
            .iter()
            .map(|row| row.exit_code)
            .collect::<Vec<_>>(),
        [Some(0), Some(0), Some(1)]
    );
    let none = compared(None, |_| {
        Some(Observed {
            ending: TrialEnd::Hang,
            ..ended_well(&[1])
        })
    });
    assert_eq!((none.best, none.rows[0].is_hang), (None, true));
}

fn timing(line: u64) -> Vec<Doubt> {
    vec![Doubt::Timing {
        waits: 0,
        at: vec![format!("train.py:{line}")],
    }]
}

#[test]
fn each_row_has_the_doubts_about_its_own_runs() {
    let run = |trial: &Trial| Observed {
        doubts: timing(index(trial) as u64),
        ..ended_well(&[[90, 60, 30][index(trial)]])
    };
    let report = compared(None, |trial| Some(run(trial)));
    let of_rows: Vec<_> = report.rows.iter().map(|row| row.doubts.clone()).collect();
    assert_eq!(of_rows, [timing(0), timing(1), timing(2)]);
    // A prediction repeats the first run, and other doubts do not refute it.
    let replay = |trial: &Trial| {
        Some(Observed {
            doubts: timing(0),
            ..run(trial)
        })
    };
    let report = predicted(None, &replay, |trial| Some(run(trial)));
    let of_rows: Vec<_> = report
        .rows
        .iter()
        .map(|row| (row.basis, row.doubts.clone()))
        .collect();
    assert_eq!(
        of_rows,
        [
            (Basis::Confirmed, timing(0)),
            (Basis::Predicted, timing(0)),
            (Basis::Confirmed, timing(2)),
        ]
    );
}

#[test]
fn a_search_ranks_by_least_memory() {
    let search = Search {
        exact: true,
        allow_ooms: false,
        confirmed: usize::MAX,
        context_overhead: Bytes::ZERO,
    };
    let report = compared(Some(search), |trial| {
        let needs = Bytes::mib([100, 60, 80][index(trial)]);
        Some(Observed {
            ooms: Some(u64::from(trial.memory < needs)),
            ..ended_well(&[100])
        })
    });
    assert_eq!(
        report
            .rows
            .iter()
            .map(|row| row.least_memory.map(|bytes| bytes >> 20))
            .collect::<Vec<_>>(),
        [Some(100), Some(60), Some(80)]
    );
    assert_eq!(report.best, Some(1));
}

#[test]
fn a_run_close_to_the_limit_is_repeated_with_each_address_order() {
    let report = compared(None, |trial| {
        let of_order = match trial.addresses {
            Some(AddressOrder::Reuse) => Observed {
                ending: TrialEnd::By(End::Code(1)),
                ended_out_of_memory: true,
                ..ended_well(&[1000])
            },
            _ => ended_well(&[960]),
        };
        Some(
            [
                of_order,
                ended_well(&[30]),
                Observed {
                    retries: Some(1),
                    ..ended_well(&[60])
                },
            ][index(trial)]
            .clone(),
        )
    });
    let others = |row: &SettingsRow| {
        row.other_orders
            .iter()
            .map(|other| (other.addresses.clone(), other.row.exit_code))
            .collect::<Vec<_>>()
    };
    let reuse = |code| vec![("reuse".to_owned(), Some(code))];
    assert_eq!(
        report.rows.iter().map(others).collect::<Vec<_>>(),
        [reuse(1), Vec::new(), reuse(0)]
    );
}

#[test]
fn the_search_covers_each_address_order() {
    let search = Search {
        exact: true,
        allow_ooms: false,
        confirmed: usize::MAX,
        context_overhead: Bytes::ZERO,
    };
    let report = compared(Some(search), |trial| {
        let needs = Bytes::mib(if trial.addresses == Some(AddressOrder::Reuse) {
            70
        } else {
            60
        });
        Some(Observed {
            ooms: Some(u64::from(trial.memory < needs)),
            ..ended_well(&[100])
        })
    });
    for row in &report.rows {
        let orders: Vec<(&str, u64)> = row
            .least_by_order
            .iter()
            .map(|order| (order.addresses.as_str(), order.enough >> 20))
            .collect();
        assert_eq!(
            (orders, row.least_memory),
            (vec![("linux", 60), ("reuse", 70)], Some(60 << 20))
        );
    }
}

#[test]
fn an_interrupt_keeps_the_finished_rows() {
    let report = compared(None, |trial| (index(trial) < 2).then(|| ended_well(&[2])));
    assert_eq!((report.rows.len(), report.is_interrupted), (2, true));
}

/// A program that needs 60, 40 and 50 MiB.
fn adapts(trial: &Trial) -> Observed {
    let needs = [60, 40, 50][index(trial)];
    Observed {
        ooms: Some(u64::from(trial.memory < Bytes::mib(needs))),
        ..ended_well(&[needs, 10])
    }
}

#[test]
fn three_more_runs_confirm_the_best_of_the_predicted_settings() {
    let search = Search {
        exact: true,
        allow_ooms: false,
        confirmed: usize::MAX,
        context_overhead: Bytes::ZERO,
    };
    let run = AtomicUsize::new(0);
    let of = |trial: &Trial| {
        run.fetch_add(1, Ordering::Relaxed);
        Some(adapts(trial))
    };
    for (search, most) in [(None, 2), (Some(search), 4)] {
        run.store(0, Ordering::Relaxed);
        let mut report = predicted(search, &|trial| Some(adapts(trial)), of);
        assert_eq!(run.load(Ordering::Relaxed), most);
        let is_first_known = if search.is_some() {
            Basis::Predicted
        } else {
            Basis::Confirmed
        };
        assert_eq!(
            report.rows.iter().map(|row| row.basis).collect::<Vec<_>>(),
            [is_first_known, Basis::Confirmed, Basis::Predicted]
        );
        let mut searched = compared(search, of);
        for row in report.rows.iter_mut().chain(&mut searched.rows) {
            row.basis = Basis::Confirmed;
            row.least_by_order
                .iter_mut()
                .for_each(|order| order.runs = 0);
        }
        assert_eq!(report, searched);
    }
}

#[test]
fn runs_replace_predictions_if_the_best_setting_is_not_confirmed() {
    let wrong = |trial: &Trial| {
        Some(Observed {
            driver_calls: 1,
            ..adapts(trial)
        })
    };
    let report = predicted(None, &wrong, |trial| Some(adapts(trial)));
    assert_eq!(
        report.rows,
        compared(None, |trial| Some(adapts(trial))).rows
    );
    assert_eq!(
        report.unpredicted.as_deref(),
        Some("reacts to its settings")
    );
}

#[test]
fn a_program_that_reads_the_free_memory_or_runs_out_of_memory_is_not_predicted() {
    let reads = predicted(None, &|trial| Some(adapts(trial)), |trial| {
        Some(Observed {
            reads_free_memory: true,
            ..adapts(trial)
        })
    });
    assert!(
        reads.rows.iter().all(|row| row.basis == Basis::Confirmed) && reads.unpredicted.is_some(),
        "{reads:?}"
    );
    let fails = |trial: &Trial| {
        Some(Observed {
            ooms: Some(u64::from(index(trial) > 0)),
            ..adapts(trial)
        })
    };
    let survives = |trial: &Trial| {
        fails(trial).map(|run| Observed {
            retries: run.ooms,
            ..run
        })
    };
    let report = predicted(None, &fails, survives);
    assert_eq!(
        (report.rows[1].basis, report.rows[1].num_alloc_retries),
        (Basis::Confirmed, Some(1))
    );
}
