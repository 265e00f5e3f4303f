//! Accepted and refused texts, and the round trip of every setting.

use super::*;
use proptest::prelude::*;

fn parse(text: &str) -> Config {
    Config::parse(text).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_empty_string_and_blanks_are_the_default() {
    for text in [
        "",
        "  ",
        "backend:native",
        "expandable_segments:False,",
        "pinned_use_background_threads:True",
    ] {
        assert_eq!(parse(text), Config::default(), "{text}");
    }
    assert_eq!(Config::default().to_string(), "");
}

#[test]
fn a_number_ends_at_the_first_other_character_and_wraps_below_zero() {
    let largest = Bytes(u64::MAX - 0xF_FFFF);
    let sizes = [
        ("64", Bytes::mib(64)),
        ("64.5", Bytes::mib(64)),
        ("64abc", Bytes::mib(64)),
        (" 6 4 ", Bytes::mib(64)),
    ];
    for (text, size) in sizes.into_iter().chain([
        ("+20", Bytes::mib(20)),
        ("-1", largest),
        ("18446744073709551615", largest),
    ]) {
        assert_eq!(
            parse(&format!("max_split_size_mb:{text},")).max_split_size,
            Some(size),
            "{text}"
        );
    }
    for (text, value) in [
        (".5", 0.5),
        ("5e-1", 0.5),
        ("0.25xyz", 0.25),
        ("0.25e", 0.25),
        ("+0.25", 0.25),
    ] {
        assert_eq!(
            parse(&format!("garbage_collection_threshold:{text}")).garbage_collection_threshold,
            Some(value),
            "{text}"
        );
    }
    assert_eq!(
        parse("per_process_memory_fraction:-0.0")
            .memory_fraction
            .limit(Bytes::gib(1)),
        Some(Bytes::ZERO)
    );
}

#[test]
fn the_segment_size_applies_to_other_settings_at_any_position() {
    let config = parse("max_split_size_mb:11,large_segment_size_mb:11");
    assert_eq!(
        (config.max_split_size, config.max_non_split_rounding),
        (Some(Bytes::mib(11)), Bytes::mib(11))
    );
    let error =
        Config::parse("max_split_size_mb:32,large_segment_size_mb:64").expect_err("32 is below 64");
    assert_eq!(
        error.rule(),
        "max_split_size_mb must be at least large_segment_size_mb, which is 64"
    );
    assert_eq!((error.offset(), error.length()), (18, 2));
}

#[test]
fn the_last_value_of_a_repeated_setting_counts() {
    assert_eq!(
        parse("max_split_size_mb:64,max_split_size_mb:128").max_split_size,
        Some(Bytes::mib(128))
    );
    let config = parse("roundup_power2_divisions:4,roundup_power2_divisions:[64:8]");
    assert_eq!(
        config.roundup_power2_divisions,
        [8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    );
    assert!(
        Config::parse("max_split_size_mb:19,max_split_size_mb:128").is_err(),
        "each is checked"
    );
}

#[test]
fn intervals_missing_in_a_list_are_not_rounded() {
    for (list, expected) in [
        (
            "[64:8,256:4,>:1]",
            [8, 8, 8, 8, 8, 8, 8, 0, 4, 1, 1, 1, 1, 1, 1, 1],
        ),
        (
            "[64:8,256:4]",
            [8, 8, 8, 8, 8, 8, 8, 0, 4, 0, 0, 0, 0, 0, 0, 0],
        ),
        ("[>:4]", [0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4]),
        (
            "[>:4,2:8]",
            [8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4],
        ),
        ("[1048576:2,]", [2; 16]),
        ("[32768:0,>:2]", [0; 16]),
        ("[]", [0; 16]),
    ] {
        assert_eq!(
            parse(&format!("roundup_power2_divisions:{list}")).roundup_power2_divisions,
            expected,
            "{list}"
        );
    }
}

#[test]
fn settings_that_pytorch_refuses_are_refused_with_their_place() {
    for (text, offset, length) in [
        ("max_split_size_mb:19", 18, 2),
        ("max_split_size_mb:x", 18, 1),
        ("max_split_size_mb:18446744073709551616", 18, 20),
        ("max_split_size_mb:[64]", 18, 1),
        ("max_split_size_mb", 17, 0),
        ("max_split_size_mb:", 18, 0),
        ("max_split_size_mb=64", 0, 20),
        ("max_split_size_mb:64,,backend:native", 21, 1),
        (",max_split_size_mb:64", 0, 1),
        (",", 0, 1),
        ("MAX_SPLIT_SIZE_MB:64", 0, 17),
        ("large_segment_size_mb:10", 22, 2),
        ("max_non_split_rounding_mb:19", 26, 2),
        ("garbage_collection_threshold:0", 29, 1),
        ("garbage_collection_threshold:1", 29, 1),
        ("garbage_collection_threshold:nan", 29, 3),
        ("garbage_collection_threshold:1e-400", 29, 6),
        ("garbage_collection_threshold:1e-310", 29, 6),
        ("per_process_memory_fraction:1.01", 28, 4),
        ("per_process_memory_fraction:-0.1", 28, 4),
        ("expandable_segments:true", 20, 4),
        ("backend:cudaMallocAsync", 8, 15),
        ("roundup_power2_divisions:0", 25, 1),
        ("roundup_power2_divisions:[64:8", 30, 0),
        ("roundup_power2_divisions:[,64:8]", 26, 1),
        ("roundup_power2_divisions:[64:8,,128:4]", 31, 1),
        ("roundup_power2_divisions:[64]", 28, 1),
        ("roundup_power2_divisions:[63:8]", 26, 2),
        ("roundup_power2_divisions:[64:3]", 29, 1),
        (
            "roundup_power2_divisions:[64:8]max_split_size_mb:64",
            31,
            17,
        ),
        ("pinned_use_background_threads:1", 30, 1),
        ("pinned_num_register_threads:256", 28, 3),
        ("pinned_reserve_segment_size_mb:0", 31, 1),
        ("throw_on_cudamalloc_oom:true", 24, 4),
        ("expandable_segments_reserve:40GB", 28, 4),
        ("expandable_segments_reserve:0", 28, 1),
        ("expandable_segments_reserve:-1G", 28, 3),
        ("expandable_segments_reserve_by_class:[a:0.5,b]", 45, 1),
        // Deliberately stricter than PyTorch.
        ("max_split_size_mb,64", 17, 1),
        ("roundup_power2_divisions:[64:8:128:4]", 30, 1),
        ("per_process_memory_fraction:0x1p-1", 28, 6),
    ] {
        let error = Config::parse(text).expect_err(text);
        assert_eq!(
            (error.offset(), error.length()),
            (offset, length),
            "{error}"
        );
    }
}

#[test]
fn settings_and_their_rules_depend_on_the_version() {
    let parse_for = |version, text| Config::parse_for(version, text);
    let error = parse_for(
        TorchVersion::V2_9,
        "max_split_size_mb:64,per_process_memory_fraction:0.5",
    )
    .expect_err("2.10 added it");
    assert_eq!(
        error.rule(),
        "PyTorch 2.9 has no setting `per_process_memory_fraction`: PyTorch 2.10 added it"
    );
    assert_eq!((error.offset(), error.length()), (21, 27));
    assert_eq!(
        parse_for(TorchVersion::V2_9, "max_split_size_mb:20")
            .expect_err("too small")
            .rule(),
        "max_split_size_mb must be at least 21"
    );
    assert!(parse_for(TorchVersion::V2_10, "max_split_size_mb:20").is_ok());
    let list = "roundup_power2_divisions:[64:8,256:4,>:1]";
    let divisions = |version| {
        parse_for(version, list)
            .expect("it is valid")
            .roundup_power2_divisions[8]
    };
    assert_eq!(
        (
            divisions(TorchVersion::V2_9),
            divisions(TorchVersion::V2_10)
        ),
        (1, 4)
    );
    let reserve = |text: &str| {
        parse(&format!("expandable_segments_reserve:{text}"))
            .expandable_segments_reserve
            .map(|reserve| reserve.of(Bytes::gib(80)))
    };
    assert_eq!(
        ["0.5", "2", "40G", "1.5g"].map(|text| reserve(text).expect("it is given").0 >> 29),
        [80, 180, 80, 3]
    );
}

#[test]
fn an_error_quotes_the_string_and_points_at_the_character() {
    let error = Config::parse("backend:native, roundup_power2_divisions:[64:3]")
        .expect_err("3 is no power of two");
    let shown = "the divisions of an interval must be a power of two, or 0 for none\n\
                 \x20 `backend:native, roundup_power2_divisions:[64:3]`\n\
                 \x20                                               ^";
    assert_eq!(error.to_string(), shown);
    assert!(parse("expandable_segments:True").expandable_segments);
    assert!(
        !parse("expandable_segments:True,expandable_segments:False").expandable_segments,
        "the last value counts"
    );
}

fn divisions() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), (0_u32..64).prop_map(|shift| 1 << shift)]
}

prop_compose! {
    fn configs()(
        large in 11_u64..200,
        split in proptest::option::of(0_u64..1 << 45),
        rounding in prop_oneof![Just(0), 0_u64..1 << 45],
        roundup in prop_oneof![divisions().prop_map(|value| [value; 16]),
            prop::array::uniform16(divisions())],
        threshold in proptest::option::of((1_u32..u32::MAX)
            .prop_map(|n| f64::from(n) / f64::from(u32::MAX))),
        fraction in 0.0_f64..=1.0,
        expandable_segments in any::<bool>(),
        expandable_segments_reserve in proptest::option::of(prop_oneof![
            (1_u32..u32::MAX).prop_map(|n| SegmentReserve::Fraction(f64::from(n) / 1e9)),
            (1_u64..1 << 45).prop_map(|bytes| SegmentReserve::Bytes(Bytes(bytes))),
        ]),
        throw_on_malloc_oom in any::<bool>(),
    ) -> Config {
        Config {
            max_split_size: split.map(|more| mebibytes(large + more)),
            max_non_split_rounding: mebibytes(large + rounding),
            large_segment_size: Bytes::mib(large),
            roundup_power2_divisions: roundup,
            garbage_collection_threshold: threshold,
            memory_fraction: MemoryFraction::new(fraction).expect("in range"),
            expandable_segments,
            expandable_segments_reserve,
            throw_on_malloc_oom,
            ..Config::default()
        }
    }
}

proptest! {
    #[test]
    fn every_config_survives_a_round_trip(config in configs()) {
        let text = config.to_string();
        prop_assert_eq!(Config::parse(&text), Ok(config), "{}", text);
    }

    #[test]
    fn any_text_is_parsed_or_refused_with_a_place_inside_it(text in "[a-z_:,\\[\\]>0-9. \
         é-]{0,40}|(max_split_size_mb|backend)[:,][ -~]{0,20}") {
        if let Err(error) = Config::parse(&text) {
            prop_assert!(error.offset() + error.length() <= text.len());
            prop_assert_eq!(error.to_string().lines().count(), 3);
        }
    }
}

#[test]
fn a_setting_without_effect_names_the_missing_one() {
    let idle = |text: &str| Config::parse(text).expect(text).idle_settings().join("; ");
    let threshold = "garbage_collection_threshold has no effect without \
         per_process_memory_fraction, unless the program sets a fraction itself";
    assert_eq!(idle("garbage_collection_threshold:0.6"), threshold);
    assert_eq!(
        idle("garbage_collection_threshold:0.6,per_process_memory_fraction:1.0"),
        threshold,
        "1 means no limit"
    );
    assert_eq!(
        idle("garbage_collection_threshold:0.6,per_process_memory_fraction:0.9"),
        ""
    );
    assert_eq!(
        idle("expandable_segments_reserve:0.5"),
        "expandable_segments_reserve has no effect without expandable_segments"
    );
    assert_eq!(
        idle("expandable_segments_reserve:0.5,expandable_segments:True"),
        ""
    );
    assert_eq!(
        idle("max_non_split_rounding_mb:64"),
        "max_non_split_rounding_mb has no effect without max_split_size_mb"
    );
    assert_eq!(
        idle("max_non_split_rounding_mb:64,max_split_size_mb:64"),
        ""
    );
    assert_eq!(idle(""), "");
}

#[test]
fn an_error_late_in_a_long_text_is_shown_at_its_place() {
    let conf = format!("{}max_splt:1", "max_split_size_mb:200,".repeat(4_000));
    let told = Config::parse(&conf)
        .expect_err("there is no such setting")
        .to_string();
    let carets = told.lines().last().expect("the last line has the carets");
    assert_eq!(
        (
            told.contains("max_splt"),
            carets.trim_start().chars().all(|c| c == '^')
        ),
        (true, true)
    );
}
