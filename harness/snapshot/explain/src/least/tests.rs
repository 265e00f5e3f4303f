use std::convert::Infallible;

use super::*;

fn search(low: u64, high: u64, enough: impl Fn(u64) -> bool) -> Least {
    let answer: Result<Least, Infallible> =
        least_memory(Bytes::mib(low), Bytes::mib(high), Bytes::mib(2), |memory| {
            Ok(enough(memory.0 >> 20))
        });
    match answer {
        Ok(least) => least,
        Err(never) => match never {},
    }
}

#[test]
fn the_least_sufficient_memory_is_found() {
    for limit in [10, 64, 100, 999] {
        let least = search(2, 1000, |memory| memory >= limit);
        assert_eq!(
            (least.enough, least.is_monotonic),
            (Bytes::mib(limit.next_multiple_of(2)), true)
        );
        assert!(least.too_little < Bytes::mib(limit));
    }
    assert_eq!(
        search(2, 1000, |_| true),
        Least {
            enough: Bytes::mib(2),
            too_little: Bytes::ZERO,
            is_monotonic: true
        }
    );
    assert_eq!(search(600, 600, |_| true).enough, Bytes::mib(600));
}

#[test]
fn parallel_bisection_finds_the_same_in_fewer_rounds() {
    for limit in [2, 64, 101, 998] {
        let mut rounds = 0;
        let answer: Result<Least, Infallible> = least_memory_by(
            Bytes::mib(2),
            Bytes::mib(1000),
            Bytes::mib(2),
            4,
            |amounts| {
                rounds += 1;
                assert!(amounts.len() <= 4 && amounts.is_sorted());
                Ok(amounts
                    .iter()
                    .map(|memory| memory.0 >> 20 >= limit)
                    .collect())
            },
        );
        assert_eq!(answer, Ok(search(2, 1000, |memory| memory >= limit)));
        assert!(rounds <= 6, "{rounds}");
    }
}

#[test]
fn harmful_extra_memory_is_detected() {
    assert!(!search(2, 1000, |memory| memory >= 500 && memory != 504).is_monotonic);
}
