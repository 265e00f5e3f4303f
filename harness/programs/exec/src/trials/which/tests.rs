use proptest::prelude::*;

use super::*;

fn sizes(sizes: &[u64]) -> Vec<Bytes> {
    sizes.iter().map(|size| Bytes::mib(*size)).collect()
}

#[test]
fn few_attempts_are_all_selected_and_many_are_sampled() {
    assert_eq!(
        Which::Some.choose(&sizes(&[2; 64])),
        (1..=64).collect::<Vec<_>>()
    );
    let mut many = vec![2; 1000];
    many[500] = 400;
    let chosen = Which::Some.choose(&sizes(&many));
    assert!(
        chosen.contains(&1) && chosen.contains(&1000) && chosen.contains(&501),
        "{chosen:?}"
    );
    assert!((64..=80).contains(&chosen.len()) && chosen.is_sorted());
    assert_eq!(
        Which::Largest(2).choose(&sizes(&[2, 20, 4, 20, 20])),
        [2, 4]
    );
    assert_eq!(Which::Sample(3).choose(&sizes(&[2; 9])), [1, 5, 9]);
    assert_eq!(Which::Some.choose(&[]), Vec::<u64>::new());
}

#[test]
fn the_selection_is_described() {
    assert_eq!(Which::Some.described(12), "all 12");
    assert_eq!(
        Which::Some.described(100),
        "64 evenly spread and the 16 largest of 100 (`--every-fault=all` for all)"
    );
    assert_eq!(Which::Sample(5).described(100), "5 evenly spread of 100");
    assert_eq!(Which::Largest(5).described(4), "all 4");
}

#[test]
fn selections_are_parsed_and_invalid_ones_are_refused() {
    for (text, which) in [
        ("some", Which::Some),
        ("all", Which::All),
        ("sample:3", Which::Sample(3)),
        ("largest:1", Which::Largest(1)),
    ] {
        assert_eq!(text.parse(), Ok(which));
    }
    for text in ["", "sample", "sample:0", "largest:-1", "all:3", "every"] {
        assert_eq!(text.parse::<Which>(), Err(WhichError(text.to_owned())));
    }
}

proptest! {
    #[test]
    fn a_spread_sample_has_the_requested_number_of_distinct_attempts(
        len in 1_usize..500, count in 1_usize..600
    ) {
        let chosen: BTreeSet<usize> = spread(len, count).collect();
        prop_assert_eq!(chosen.len(), count.min(len));
        prop_assert!(chosen.iter().all(|index| *index < len));
    }
}

#[test]
fn a_selection_is_written_as_it_is_read() {
    for text in ["some", "all", "sample:5", "largest:4"] {
        let which: Which = text.parse().expect("it is a selection");
        assert_eq!(which.to_string(), text);
    }
}
