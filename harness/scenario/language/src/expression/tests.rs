#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use super::*;

#[derive(Clone, Debug, PartialEq)]
struct Named(&'static str, Unit);

impl Quantity for Named {
    fn dimension(&self) -> Dimension {
        self.1.into()
    }
}

fn resolve(name: &str) -> Result<ResolvedName<Named>, Unresolved> {
    if name == "batch" {
        return Ok(ResolvedName::Constant(Value::count(8)));
    }
    let known = [
        ("num_ooms", Unit::Count),
        ("reserved", Unit::Bytes),
        ("allocated", Unit::Bytes),
        ("device.free", Unit::Bytes),
        ("growth(reserved)", Unit::Bytes),
        ("time.now", Unit::Time),
    ];
    let found = known
        .into_iter()
        .find(|(known, _)| *known == name)
        .map(|(name, unit)| ResolvedName::Quantity(Named(name, unit)));
    found.ok_or_else(|| (format!("no {name}"), String::new()))
}

fn number(n: i128) -> Number {
    Number::from_integer(n)
}

/// Evaluates an expectation in which every name has this value.
fn seen(text: &str, value: i128) -> Evaluation {
    parse_expectation(text, &resolve)
        .unwrap()
        .evaluate(|_| Ok::<_, ()>(number(value)))
        .unwrap()
}

fn refused(text: &str) -> (String, String) {
    let error = parse_expectation(text, &resolve).unwrap_err();
    (error.message, error.help)
}

#[test]
fn sums_are_taken_from_left_to_right_and_may_be_negative() {
    let evaluation = seen("num_ooms - 5 + 2 == 0 - 2", 1);
    assert_eq!(
        (
            evaluation.left.number,
            evaluation.right.number,
            evaluation.holds
        ),
        (number(-2), number(-2), true)
    );
    assert_eq!(
        seen("reserved-1.5 GiB<1KiB", 1 << 30).left.number,
        number(-(1 << 29))
    );
    assert_eq!(
        seen("time.now >= 5ms", 5_000_000).left.dimension,
        Dimension::TIME
    );
}

#[test]
fn products_bind_closer_than_sums_and_parentheses_closest() {
    assert_eq!(seen("num_ooms + 2 * 3 == 0", 1).left.number, number(7));
    assert_eq!(seen("(num_ooms + 2) * 3 == 0", 1).left.number, number(9));
    assert_eq!(seen("12 / num_ooms / 2 == 0", 3).left.number, number(2));
    assert_eq!(
        seen("reserved <= 4MiB * batch / 8", 1).right.number,
        number(4 << 20)
    );
}

#[test]
fn a_quotient_of_two_amounts_is_a_plain_number_and_is_exact() {
    assert!(seen("reserved / (3 * allocated) == 1 / 3", 1 << 40).holds);
    assert!(seen("(reserved - allocated) / reserved < 20%", 7).holds);
    assert!(seen("reserved <= 1.1 * allocated", 10).holds);
    assert!(!seen("11 * reserved < 11.0 * allocated", 10).holds);
}

#[test]
fn least_and_greatest_take_values_of_one_unit() {
    assert_eq!(seen("min(num_ooms, 3, 5) == 0", 9).left.number, number(3));
    assert_eq!(seen("max(num_ooms, 3) == 0", 9).left.number, number(9));
    assert!(
        refused("max(num_ooms, 3MiB) == 0")
            .0
            .contains("cannot be combined")
    );
    assert!(refused("min(num_ooms) == 0").0.contains("need two values"));
}

#[test]
fn a_tolerance_is_a_share_of_the_right_side_or_an_amount() {
    assert!(seen("reserved == 100B +- 5%", 95).holds && seen("reserved == 100B ± 5%", 105).holds);
    assert!(!seen("reserved == 100B +- 5%", 94).holds);
    assert!(seen("reserved == 100B +- 6B", 94).holds && seen("reserved != 100B +- 6B", 93).holds);
    assert!(
        refused("reserved < 100B +- 5%")
            .0
            .contains("take a tolerance")
    );
    assert!(
        refused("reserved == 100B +- 5")
            .0
            .contains("cannot be combined")
    );
}

#[test]
fn a_plain_number_beside_bytes_or_time_is_refused_with_the_unit_to_give_it() {
    assert_eq!(
        refused("reserved == 400").1,
        "give the number a unit, as in `400MiB` or `512B`; only 0 needs none"
    );
    assert_eq!(
        refused("time.now < 5").1,
        "give the number a unit, as in `5ms` or `200us`; only 0 needs none"
    );
    assert!(seen("reserved == 0", 0).holds && seen("time.now >= 0", 0).holds);
}

#[test]
fn a_division_by_zero_and_a_value_beyond_128_bits_are_errors_with_their_text() {
    let evaluate = |text: &str, value: i128| {
        parse_expectation(text, &resolve)
            .unwrap()
            .evaluate(|_| Ok::<_, ()>(number(value)))
    };
    let by_zero = evaluate("(reserved - allocated) / reserved < 20%", 0).unwrap_err();
    assert_eq!(
        by_zero,
        EvaluateError::Arithmetic(ArithmeticError::DivisionByZero(
            "(reserved - allocated) / reserved".to_owned()
        ))
    );
    let beyond = evaluate(
        "reserved * reserved / reserved < 1GiB",
        i128::from(u64::MAX) << 32,
    )
    .unwrap_err();
    assert_eq!(beyond, EvaluateError::Arithmetic(ArithmeticError::Overflow));
    assert!(refused("num_ooms / 0 == 1").0.contains("division by zero"));
}

#[test]
fn a_function_of_a_name_is_looked_up_as_a_whole() {
    assert_eq!(
        seen("growth( reserved ) / 2 == 0", 8).left.number,
        number(4)
    );
    assert_eq!(refused("fell(reserved) == 0").0, "no fell(reserved)");
}

#[test]
fn every_comparison_means_what_it_says() {
    for (sign, below, equal, above) in [
        ("==", false, true, false),
        ("!=", true, false, true),
        ("<", true, false, false),
        ("<=", true, true, false),
        (">", false, false, true),
        (">=", false, true, true),
    ] {
        let holds = |value| seen(&format!("num_ooms {sign} 7"), value).holds;
        assert_eq!(
            (holds(6), holds(7), holds(8)),
            (below, equal, above),
            "{sign}"
        );
    }
}

#[test]
fn the_longest_sums_do_not_overflow_and_longer_ones_are_refused() {
    let long = vec!["reserved"; MAX_TERMS - 1].join(" + ");
    let all = i128::from(u64::MAX) * (MAX_TERMS as i128 - 1);
    assert_eq!(
        seen(&format!("{long} > 0"), u64::MAX.into()).left.number,
        number(all)
    );
    assert!(
        refused(&format!("{long} + reserved > 0"))
            .0
            .contains("more than 64 terms")
    );
    let deep = format!(
        "{}num_ooms{} == 0",
        "(".repeat(MAX_DEPTH + 1),
        ")".repeat(MAX_DEPTH + 1)
    );
    assert!(refused(&deep).0.contains("nested more than 16 deep"));
}

#[test]
fn an_amount_that_comes_out_negative_is_an_error_and_not_a_huge_size() {
    let amount = parse_amount("device.free - 2MiB", &resolve).unwrap();
    assert_eq!(
        amount.evaluate(|_| Ok::<_, ()>(number(3 << 20))),
        Ok(Bytes::mib(1))
    );
    assert_eq!(
        amount.evaluate(|_| Ok::<_, ()>(number(0))),
        Err(AmountError::OutOfRange(-(2 << 20)))
    );
    assert_eq!(
        parse_amount("1MiB + 512B", &resolve),
        Ok(AmountOf::Fixed(Bytes((1 << 20) + 512)))
    );
    assert_eq!(
        parse_amount("512", &resolve),
        Ok(AmountOf::Fixed(Bytes(512)))
    );
    assert_eq!(
        parse_amount("10B / 4", &resolve),
        Ok(AmountOf::Fixed(Bytes(2)))
    );
    assert!(
        parse_amount("4 * 8", &resolve)
            .unwrap_err()
            .help
            .contains("`4MiB * 8`")
    );
}

#[test]
fn values_are_told_in_their_unit() {
    let of = |number: Number, unit: Unit| Value {
        number,
        dimension: unit.into(),
    };
    assert_eq!(of(number(4096), Unit::Bytes).to_string(), "4096 B (4 KiB)");
    assert_eq!(of(number(-12), Unit::Bytes).to_string(), "-12 B");
    assert_eq!(of(number(1_500_000), Unit::Time).to_string(), "1.50 ms");
    assert_eq!(of(Number::new(1, 3), Unit::Count).to_string(), "0.3333");
    assert_eq!(of(Number::new(1, 3), Unit::Count).percent(), "33.33 %");
    assert_eq!(
        of(Number::new(12_345_678, 10), Unit::Count).to_string(),
        "1234568"
    );
    let rate = Dimension::BYTES.over(Dimension::TIME).unwrap();
    assert_eq!(
        Value {
            number: Number::new(2 << 20, 10_000_000),
            dimension: rate
        }
        .to_string(),
        "200 MiB/s"
    );
    assert_eq!(
        Value {
            number: Number::new(-1, 1_000_000_000),
            dimension: rate
        }
        .to_string(),
        "-1 B/s"
    );
}

proptest::proptest! {
    #[test]
    fn a_sum_of_literals_is_their_sum(
        first in 0_u64..1 << 40,
        rest in proptest::collection::vec((proptest::bool::ANY, 0_u64..1 << 40), 0..20),
    ) {
        let mut text = format!("num_ooms + {first}");
        let mut expected = 1 + i128::from(first);
        for (minus, number) in rest {
            text += &format!(" {} {number}", if minus { '-' } else { '+' });
            expected += i128::from(number) * if minus { -1 } else { 1 };
        }
        proptest::prop_assert_eq!(seen(&format!("{text} == 0"), 1).left.number, number(expected));
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "[-+*/()%<>=!., a-z0-9_±]{0,40}") {
        let _ = parse_expectation(&text, &resolve);
        let _ = parse_amount(&text, &resolve);
        let _ = parse_count(&text, &resolve);
        let _ = parse_constant(&text, &resolve);
    }
}
