//! The least memory of fake programs.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;

use super::*;
use crate::tests::fake::{ended_well, trial};

const PLENTY: Bytes = Bytes::gib(8);

fn search(exact: bool) -> Search {
    Search { exact, allow_ooms: false, context_overhead: Bytes::ZERO }
}

/// Searches with a program that reserves 1 GiB with plenty of memory and needs this much with each address order.
fn found(exact: bool, needs: impl Fn(AddressOrder) -> Bytes + Sync) -> LeastReport {
    let first = ended_well(&[512, 512]);
    let ooms = |trial: &Trial| u64::from(trial.memory < needs(trial.addresses.unwrap()));
    let run = |trial: &Trial| Ok::<_, Infallible>(Some(Observed { ooms: ooms(trial), ..first.clone() }));
    let program = Program { run: &run, trial: trial(PLENTY), first: &first, jobs: 3, progress: &|| {} };
    let Ok(report) = least(&program, search(exact), true);
    report.expect("nothing interrupts the search")
}

#[test]
fn the_least_memory_is_found_to_the_page_or_to_one_percent() {
    for need in [2, 62, 700, 1022, 1024, 5000] {
        let enough = |exact| found(exact, |_| Bytes::mib(need)).orders[0].enough;
        assert_eq!(enough(true), need << 20);
        let rough = enough(false);
        assert!(rough >= need << 20 && rough < (need << 20) + Bytes::mib(12).0, "{need} MiB: {rough}");
    }
}

#[test]
fn address_orders_are_compared_beginning_with_the_first_runs() {
    let report = found(true, |order| Bytes::mib(if order == AddressOrder::Reuse { 900 } else { 800 }));
    let orders: Vec<(&str, u64, u64)> =
        report.orders.iter().map(|order| (order.addresses.as_str(), order.enough >> 20, order.too_little >> 20)).collect();
    assert_eq!(orders, [("linux", 800, 798), ("reuse", 900, 898)]);
}

#[test]
fn a_real_gpu_has_one_address_order() {
    let first = ended_well(&[512, 512]);
    let ooms = |trial: &Trial| u64::from(trial.memory < Bytes::mib(800));
    let run = |trial: &Trial| Ok::<_, Infallible>(Some(Observed { ooms: ooms(trial), ..first.clone() }));
    let on_gpu = Trial { addresses: None, ..trial(PLENTY) };
    let program = Program { run: &run, trial: on_gpu, first: &first, jobs: 1, progress: &|| {} };
    let Ok(report) = least(&program, search(true), true);
    let orders = report.unwrap().orders;
    assert_eq!(orders.iter().map(|order| (order.addresses.as_str(), order.enough >> 20)).collect::<Vec<_>>(), [("driver", 800)]);
}

#[test]
fn survived_out_of_memory_errors_fail_unless_allowed() {
    let (first, survived) = (ended_well(&[20]), Observed { ooms: 2, ..ended_well(&[20]) });
    assert!(!is_enough(&first, &survived, false) && is_enough(&first, &survived, true));
    let hang = Observed { ending: super::super::observed::Ending::Hang, ..ended_well(&[20]) };
    assert!(!is_enough(&first, &hang, true));
}

#[test]
fn an_interrupt_ends_the_search() {
    let first = ended_well(&[512]);
    let run = |_: &Trial| Ok::<_, Infallible>(None);
    let program = Program { run: &run, trial: trial(PLENTY), first: &first, jobs: 2, progress: &|| {} };
    let Ok(report) = least(&program, search(true), true);
    assert_eq!(report, None);
}
