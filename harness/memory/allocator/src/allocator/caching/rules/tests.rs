use super::*;
use crate::units::Bytes;

#[test]
fn a_large_remainder_of_one_mebibyte_stays_with_the_block() {
    let rules = Rules::new(&Config::default());
    assert!(!rules.splits(PoolKind::Large, 19 << 20, 1 << 20));
    assert!(rules.splits(PoolKind::Large, (19 << 20) - 512, (1 << 20) + 512));
    assert!(rules.splits(PoolKind::Small, 512, 512));
    assert!(!rules.splits(PoolKind::Small, 512, 0));
}

#[test]
fn oversize_requests_take_whole_blocks_unless_segments_are_expandable() {
    let limited = Config {
        max_split_size: Some(Bytes::mib(64)),
        ..Config::default()
    };
    let expandable = Config {
        expandable_segments: true,
        ..limited.clone()
    };
    for (config, wanted, cut) in [
        (&limited, 63, true),
        (&limited, 64, false),
        (&expandable, 64, true),
    ] {
        assert_eq!(
            Rules::new(config).splits(PoolKind::Large, wanted << 20, 20 << 20),
            cut,
            "{wanted} MiB"
        );
    }
    assert!(Rules::new(&expandable).splits(PoolKind::Large, 64 << 20, 512));
    assert!(!Rules::new(&expandable).splits(PoolKind::Large, 64 << 20, 0));
}

#[test]
fn the_fast_rounding_equals_that_of_the_settings() {
    let plain = Config::default();
    let ones = Config {
        roundup_power2_divisions: [1; 16],
        ..Config::default()
    };
    let divided = Config {
        roundup_power2_divisions: [4; 16],
        ..Config::default()
    };
    for config in [plain, ones, divided] {
        let rules = Rules::new(&config);
        for requested in [
            1,
            511,
            512,
            513,
            1200,
            5 << 20,
            (5 << 20) + 1,
            u64::MAX >> 1,
            u64::MAX - 511,
            u64::MAX - 510,
            u64::MAX,
        ] {
            assert_eq!(
                rules.round(&config, requested),
                config.round(requested),
                "{requested}"
            );
        }
    }
}
