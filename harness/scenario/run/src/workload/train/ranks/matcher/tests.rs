use proptest::prelude::*;

use super::*;

fn collective(bucket: usize, bytes: u64, iteration: u64) -> Collective {
    Collective {
        purpose: Purpose::Bucket(bucket),
        bytes: Bytes(bytes),
        iteration,
        attempt: 1,
    }
}

/// Matches these calls, rank by rank or interleaved, and returns the last result.
fn matched(ranks: &[Vec<Collective>], in_turns: bool) -> (Matcher, Option<Mismatch>) {
    let mut matcher = Matcher::new(ranks.len());
    if in_turns {
        for place in 0..ranks.iter().map(Vec::len).max().unwrap_or(0) {
            for (rank, calls) in ranks.iter().enumerate() {
                calls
                    .get(place)
                    .into_iter()
                    .for_each(|call| matcher.call(rank, *call));
                matcher.advance();
            }
        }
    } else {
        ranks
            .iter()
            .enumerate()
            .for_each(|(rank, calls)| calls.iter().for_each(|call| matcher.call(rank, *call)));
    }
    (0..ranks.len()).for_each(|rank| matcher.end(rank, "completed all its iterations".to_owned()));
    let mismatch = matcher.advance();
    (matcher, mismatch)
}

fn sequences() -> impl Strategy<Value = Vec<Collective>> {
    prop::collection::vec(
        (0..4_usize, 1..4_u64, 1..5_u64)
            .prop_map(|(bucket, bytes, iteration)| collective(bucket, bytes, iteration)),
        1..40,
    )
}

proptest! {
    #[test]
    fn ranks_with_equal_calls_never_wait(
        calls in sequences(), ranks in 2..6_usize, in_turns: bool
    ) {
        let (matcher, mismatch) = matched(&vec![calls.clone(); ranks], in_turns);
        prop_assert_eq!((matcher.matched, mismatch), (calls.len() as u64, None));
    }

    #[test]
    fn the_first_difference_is_found(
        calls in sequences(), ranks in 2..6_usize, odd in 0..6_usize, place: prop::sample::Index,
        kind in 0..4_u8, in_turns: bool
    ) {
        let (odd, place) = (odd % ranks, place.index(calls.len()));
        let mut all = vec![calls.clone(); ranks];
        let expected = match kind {
            0 => {
                all[odd][place].bytes += Bytes(7);
                Trouble::Hang
            }
            1 => {
                all[odd][place].iteration += 7;
                Trouble::Mixed
            }
            2 => {
                all[odd].truncate(place);
                Trouble::Hang
            }
            _ => {
                all[odd][place].purpose = Purpose::Buckets;
                Trouble::Hang
            }
        };
        let (_, mismatch) = matched(&all, in_turns);
        let mismatch = mismatch.expect("they differ");
        prop_assert_eq!((mismatch.trouble, mismatch.number), (expected, place as u64 + 1));
        for (rank, standing) in mismatch.ranks.iter().enumerate().filter(|(rank, _)| *rank != odd) {
            prop_assert_eq!(standing, &Standing::Called(calls[place], vec![odd]), "rank {}", rank);
        }
    }
}

#[test]
fn a_slow_rank_is_awaited_but_an_ended_one_is_not() {
    let mut matcher = Matcher::new(2);
    matcher.call(0, collective(0, 1, 1));
    assert_eq!(matcher.advance(), None);
    matcher.end(1, "gave up".to_owned());
    let mismatch = matcher.advance();
    let standings = vec![
        Standing::Called(collective(0, 1, 1), vec![1]),
        Standing::Ended("gave up".to_owned()),
    ];
    assert_eq!(
        mismatch,
        Some(Mismatch {
            trouble: Trouble::Hang,
            number: 1,
            ranks: standings
        })
    );
}

#[test]
fn another_attempt_at_an_iteration_matches_it_but_not_its_agreement() {
    let of = |purpose, attempt| Collective {
        purpose,
        bytes: Bytes(8),
        iteration: 1,
        attempt,
    };
    let trouble = |purpose| {
        matched(&[vec![of(purpose, 1)], vec![of(purpose, 2)]], false)
            .1
            .map(|mismatch| mismatch.trouble)
    };
    assert_eq!(
        (trouble(Purpose::Bucket(0)), trouble(Purpose::Agreement)),
        (None, Some(Trouble::Mixed))
    );
}
