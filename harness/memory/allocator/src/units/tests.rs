use super::*;

#[test]
fn only_binary_units_are_accepted() {
    assert_eq!(Bytes::parse("400MiB"), Ok(Bytes::mib(400)));
    assert_eq!(Bytes::parse("1.5 GiB"), Ok(Bytes::mib(1536)));
    assert_eq!(Bytes::parse("43008000"), Ok(Bytes(43_008_000)));
    assert_eq!(Bytes::parse("16777215.5KiB"), Ok(Bytes(17_179_868_672)));
    assert_eq!(Bytes::parse("18446744073709551615B"), Ok(Bytes(u64::MAX)));
    assert!(
        matches!(Bytes::parse("600MB"), Err(ParseBytesError::DecimalUnit { suggestion, .. })
            if suggestion == "600MiB")
    );
    assert!(matches!(
        Bytes::parse("-1"),
        Err(ParseBytesError::Negative(_))
    ));
    assert!(matches!(
        Bytes::parse("20EiB"),
        Err(ParseBytesError::TooLarge(_))
    ));
    assert!(matches!(
        Bytes::parse("0.3B"),
        Err(ParseBytesError::Fractional(_))
    ));
    for text in [
        "", "MiB", "1.", ".5KiB", "1..2B", "1e3", "4 miB", "0x10", "1 0",
    ] {
        assert!(
            matches!(Bytes::parse(text), Err(ParseBytesError::Malformed(_))),
            "{text}"
        );
    }
}

#[test]
fn durations_are_parsed_and_printed_with_their_unit() {
    assert_eq!(Nanos::parse("250us"), Ok(Nanos::micros(250)));
    assert_eq!(Nanos::parse("1.5 s"), Ok(Nanos::millis(1500)));
    assert_eq!(
        (Nanos::parse("20m"), Nanos::parse("0.5 min")),
        (Ok(Nanos::millis(1_200_000)), Ok(Nanos::millis(30_000)))
    );
    assert!(Nanos::parse("61min").is_err());
    assert!(Nanos::parse("5").is_err());
    assert!(Nanos::parse("2 h").is_err());
    assert_eq!(Nanos(850).to_string(), "850 ns");
    assert_eq!(Nanos(1_200).to_string(), "1.20 µs");
    assert_eq!(Nanos(34_100_000).to_string(), "34.1 ms");
}

#[test]
fn amounts_and_times_saturate_at_64_bits() {
    assert_eq!(
        (
            Bytes::kib(u64::MAX),
            Bytes::mib(1 << 44),
            Bytes::gib(1 << 34)
        ),
        (Bytes::MAX, Bytes::MAX, Bytes::MAX)
    );
    assert_eq!(
        (Bytes::mib((1 << 44) - 1), Bytes::MAX + Bytes(1)),
        (Bytes(u64::MAX - (1 << 20) + 1), Bytes::MAX)
    );
    assert_eq!(
        [Bytes::MAX, Bytes(1)].into_iter().sum::<Bytes>(),
        Bytes::MAX
    );
    let forever = Nanos(u64::MAX);
    assert_eq!(
        (
            Nanos::micros(u64::MAX),
            Nanos::millis(u64::MAX),
            forever + Nanos(1)
        ),
        (forever, forever, forever)
    );
    assert_eq!([forever, Nanos(1)].into_iter().sum::<Nanos>(), forever);
}

proptest::proptest! {
    #[test]
    fn every_whole_size_survives_a_round_trip(n in 0_u64..1 << 34) {
        for (unit, shift) in [("B", 0), ("KiB", 10), ("MiB", 20), ("GiB", 30)] {
            proptest::prop_assert_eq!(Bytes::parse(&format!("{n}{unit}")), Ok(Bytes(n << shift)));
        }
    }
}
