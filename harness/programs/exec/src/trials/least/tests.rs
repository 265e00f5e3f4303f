//! The least memory of fake programs.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;

use harness_base::shard::Shard;

use super::*;
use crate::tests::fake::{ended_well, trial};

const PLENTY: Bytes = Bytes::gib(8);

fn search(exact: bool) -> Search {
    Search {
        exact,
        allow_ooms: false,
        confirmed: usize::MAX,
        context_overhead: Bytes::ZERO,
    }
}

/// Searches with a program that reserves 1 GiB with plenty of memory and needs this much with each
/// address order.
fn found(exact: bool, needs: impl Fn(AddressOrder) -> Bytes + Sync) -> LeastReport {
    let first = ended_well(&[512, 512]);
    let ooms = |trial: &Trial| Some(u64::from(trial.memory < needs(trial.addresses.unwrap())));
    let run = |trial: &Trial| {
        Ok::<_, Infallible>(Some(Observed {
            ooms: ooms(trial),
            ..first.clone()
        }))
    };
    let program = TrialProgram {
        run: &run,
        ..program(&first)
    };
    let Ok(report) = least(&program, search(exact));
    report.expect("nothing interrupts the search")
}

fn program(first: &Observed) -> TrialProgram<'_, Infallible> {
    let trial = trial(PLENTY);
    TrialProgram {
        run: &|_| Ok(None),
        trial,
        first,
        predict: &|_| None,
        unpredicted: None,
        shard: None,
        jobs: 3,
        progress: &|| {},
    }
}

/// Searches with a program that needs this much, and replays that need that much.
fn predicted(need: u64, in_replay: u64) -> OrderLeast {
    let first = ended_well(&[512, 512]);
    let run = |trial: &Trial| {
        Ok(Some(Observed {
            ooms: Some(u64::from(trial.memory < Bytes::mib(need))),
            ..first.clone()
        }))
    };
    let predict = |trial: &Trial| {
        Some(Observed {
            ooms: Some(u64::from(trial.memory < Bytes::mib(in_replay))),
            ..first.clone()
        })
    };
    let Ok(report) = least(
        &TrialProgram {
            run: &run,
            predict: &predict,
            ..program(&first)
        },
        search(true),
    );
    report.unwrap().orders.remove(0)
}

#[test]
fn an_order_has_the_doubts_about_the_first_run_and_its_own() {
    let doubts = |line: &str| Doubt::Timing {
        waits: 0,
        at: vec![line.to_owned()],
    };
    let first = Observed {
        doubts: vec![doubts("train.py:1")],
        ..ended_well(&[512, 512])
    };
    let run = |trial: &Trial| {
        let of_order = format!("{}.py:2", trial.addresses.unwrap());
        Ok::<_, Infallible>(Some(Observed {
            ooms: Some(u64::from(trial.memory < Bytes::mib(800))),
            doubts: vec![doubts(&of_order)],
            ..first.clone()
        }))
    };
    let program = TrialProgram {
        run: &run,
        ..program(&first)
    };
    let Ok(report) = least(&program, search(true));
    let report = report.unwrap();
    assert_eq!(report.doubts, first.doubts);
    for order in report.orders {
        let mut both = first.doubts.clone();
        Doubt::add(&mut both, &[doubts(&format!("{}.py:2", order.addresses))]);
        assert_eq!(order.doubts, both);
    }
}

#[test]
fn a_run_with_enough_memory_that_allocates_otherwise_is_described() {
    let first = ended_well(&[512, 512]);
    let of = |mib, at_end| {
        let run = |trial: &Trial| {
            Ok::<_, Infallible>(Some(Observed {
                ooms: Some(u64::from(trial.memory < Bytes::mib(800))),
                peak_allocated: Some(Bytes::mib(mib)),
                allocated_at_end: Some(Bytes::mib(at_end)),
                ..first.clone()
            }))
        };
        let program = TrialProgram {
            run: &run,
            ..program(&first)
        };
        let Ok(report) = least(&program, search(true));
        report.unwrap().orders.remove(0).difference
    };
    assert_eq!(of(1024, 10), None);
    assert_eq!(
        of(700, 10).unwrap(),
        "allocates at most 700 MiB instead of 1 GiB"
    );
    assert_eq!(
        of(1024, 12).unwrap(),
        "leaves 12 MiB allocated at its end instead of 10 MiB"
    );
}

#[test]
fn two_runs_confirm_replays_and_a_search_with_runs_replaces_wrong_ones() {
    let figures = |order: &OrderLeast| [order.enough >> 20, order.too_little >> 20];
    let right = predicted(800, 800);
    assert_eq!((figures(&right), right.runs), ([800, 798], 2));
    for wrong in [798, 802, 900, 100] {
        let found = predicted(800, wrong);
        assert_eq!(figures(&found), [800, 798], "{wrong}");
        assert!(found.runs > 4, "{wrong}: {}", found.runs);
    }
}

#[test]
fn a_shard_searches_with_its_address_orders() {
    let first = ended_well(&[512, 512]);
    let of = |index| {
        let run = |_: &Trial| Ok(Some(first.clone()));
        let shard = Some(Shard { index, count: 2 });
        let Ok(report) = least(
            &TrialProgram {
                run: &run,
                shard,
                ..program(&first)
            },
            search(true),
        );
        report.unwrap()
    };
    let [one, two] = [of(1), of(2)];
    assert_eq!(one.orders.len() + two.orders.len(), 2);
    assert_eq!(one.part.unwrap().names, ["linux", "reuse"]);
}

#[test]
fn the_least_memory_is_found_to_the_page_or_to_one_percent() {
    for need in [2, 62, 700, 1022, 1024, 5000] {
        assert_eq!(
            found(true, |_| Bytes::mib(need)).orders[0].enough,
            need << 20
        );
        let report = found(false, |_| Bytes::mib(need));
        let most = (need << 20) + ((need << 20) / 100).next_multiple_of(PAGE.0).max(PAGE.0);
        for order in &report.orders {
            assert!(
                order.enough >= need << 20 && order.enough <= most,
                "{need} MiB: {order:?}"
            );
        }
        assert!(
            report.orders[1].runs <= 6,
            "{need} MiB: {:?}",
            report.orders[1]
        );
    }
}

#[test]
fn address_orders_are_compared_beginning_with_the_first_runs() {
    let report = found(true, |order| {
        Bytes::mib(if order == AddressOrder::Reuse {
            900
        } else {
            800
        })
    });
    let orders: Vec<(&str, u64, u64)> = report
        .orders
        .iter()
        .map(|order| {
            (
                order.addresses.as_str(),
                order.enough >> 20,
                order.too_little >> 20,
            )
        })
        .collect();
    assert_eq!(orders, [("linux", 800, 798), ("reuse", 900, 898)]);
}

#[test]
fn a_real_gpu_has_one_address_order() {
    let first = ended_well(&[512, 512]);
    let ooms = |trial: &Trial| Some(u64::from(trial.memory < Bytes::mib(800)));
    let run = |trial: &Trial| {
        Ok::<_, Infallible>(Some(Observed {
            ooms: ooms(trial),
            ..first.clone()
        }))
    };
    let on_gpu = Trial {
        addresses: None,
        ..trial(PLENTY)
    };
    let program = TrialProgram {
        run: &run,
        trial: on_gpu,
        ..program(&first)
    };
    let Ok(report) = least(&program, search(true));
    let orders = report.unwrap().orders;
    assert_eq!(
        orders
            .iter()
            .map(|order| (order.addresses.as_str(), order.enough >> 20))
            .collect::<Vec<_>>(),
        [("driver", 800)]
    );
}

#[test]
fn survived_out_of_memory_errors_fail_unless_allowed() {
    let (first, survived) = (
        ended_well(&[20]),
        Observed {
            ooms: Some(2),
            ..ended_well(&[20])
        },
    );
    assert!(!is_enough(&first, &survived, false) && is_enough(&first, &survived, true));
    let unknown = Observed {
        ooms: None,
        ..ended_well(&[20])
    };
    assert!(!is_enough(&first, &unknown, false) && is_enough(&first, &unknown, true));
    let hang = Observed {
        ending: super::super::observed::TrialEnd::Hang,
        ..ended_well(&[20])
    };
    assert!(!is_enough(&first, &hang, true));
}

#[test]
fn an_interrupt_ends_the_search() {
    let first = ended_well(&[512]);
    let Ok(report) = least(&program(&first), search(true));
    assert_eq!(report, None);
}
