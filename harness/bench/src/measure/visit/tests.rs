#![allow(clippy::unwrap_used)]

use super::*;

/// Operations of 20 ns, the first one cold; the listed regions are interrupted for 1 ms.
fn regions(interrupted: &[u64]) -> impl FnMut(u64) -> Result<u64, Fault> {
    let mut count = 0;
    move |batch| {
        count += 1;
        let cold = if count == 1 { 3_000_000 } else { 0 };
        let interruption = if interrupted.contains(&count) {
            1_000_000_000
        } else {
            0
        };
        Ok(batch * 20_000 + cold + interruption)
    }
}

#[test]
fn an_interruption_does_not_settle_how_many_operations_are_timed_together() {
    let length = 3_000_000;
    assert_eq!(
        batch_of(length, regions(&[])).unwrap(),
        256,
        "128 take 2.56 µs, 256 take 5.12 µs"
    );
    for interrupted in [
        &[1][..],
        &[2],
        &[3, 4],
        &[5, 6, 7, 8],
        &[1, 2, 4, 6, 8, 10, 12],
    ] {
        assert_eq!(
            batch_of(length, regions(interrupted)).unwrap(),
            256,
            "{interrupted:?}"
        );
    }
    assert_eq!(
        batch_of(u64::MAX, regions(&[])).unwrap(),
        MOST_BATCH,
        "it ends"
    );
}

#[test]
fn a_fault_of_a_region_is_told() {
    assert_eq!(
        batch_of(1, |_| Err(Fault::Interrupted)),
        Err(Fault::Interrupted)
    );
}
