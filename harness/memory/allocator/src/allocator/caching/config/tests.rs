use super::*;

#[test]
fn requests_round_to_512_bytes_and_never_to_less() {
    let config = Config::default();
    for (requested, rounded) in [
        (1, 512),
        (511, 512),
        (512, 512),
        (513, 1024),
        (43_008_000, 43_008_000),
        (1 << 20, 1 << 20),
    ] {
        assert_eq!(config.round(requested), Some(rounded));
    }
    assert_eq!(config.round(u64::MAX), None);
    assert_eq!(config.round(u64::MAX >> 1), Some(1 << 63));
}

#[test]
fn segments_are_small_large_or_fit_their_request() {
    let config = Config::default();
    let mib = 1 << 20;
    let cases = [
        (512, 2 * mib),
        (mib, 2 * mib),
        (mib + 512, 20 * mib),
        (10 * mib - 512, 20 * mib),
        (10 * mib, 10 * mib),
        (10 * mib + 512, 12 * mib),
    ];
    for (size, segment) in cases {
        assert_eq!(config.segment_size(size), Some(segment));
    }
}

#[test]
fn the_largest_rounding_reuses_no_oversize_block_as_in_pytorch() {
    let mib = 1 << 20;
    let with = |rounding| Config {
        max_split_size: Some(Bytes::mib(64)),
        max_non_split_rounding: rounding,
        ..Config::default()
    };
    assert!(with(Bytes::mib(1_000_000)).accepts(100 * mib, 120 * mib));
    assert!(!with(Bytes(u64::MAX - (mib - 1))).accepts(100 * mib, 120 * mib));
}

#[test]
fn power_of_two_divisions_apply_by_interval_of_the_request() {
    let config = Config {
        roundup_power2_divisions: [4; 16],
        ..Config::default()
    };
    assert_eq!(
        config.round(1200),
        Some(1536),
        "at most 512 · 4: plain rounding"
    );
    assert_eq!(config.round(5 << 20), Some(5 << 20));
    assert_eq!(config.round((5 << 20) + 1), Some(6 << 20));
    assert_eq!(config.round(8 << 20), Some(8 << 20));
    for (size, request) in [(5, 5), (9, 8), (11, 10), (15, 14), (16, 16)]
        .map(|(size, request): (u64, u64)| (size << 20, request << 20))
    {
        assert_eq!(config.round_down(size), request);
        assert!(config.round(request) <= Some(size) && config.round(request + 1) > Some(size));
    }
    let finest = Config {
        roundup_power2_divisions: [1 << 63; 16],
        ..Config::default()
    };
    assert_eq!(
        finest.round(3_000_000),
        Some(4 << 20),
        "as PyTorch's binary does"
    );
    assert_eq!(
        (
            finest.round_down(3_000_000),
            Config::default().round_down(512)
        ),
        (2 << 20, 512)
    );
    assert_eq!(
        (finest.round_down(0), Config::default().round_down(0)),
        (0, 0),
        "less than one page is free"
    );
    assert_eq!(
        (interval(1 << 20), interval(2 << 20), interval(1 << 40)),
        (0, 1, 15)
    );
}
