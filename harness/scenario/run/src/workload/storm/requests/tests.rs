use super::*;

#[test]
fn log_uniform_sizes_stay_in_range_and_every_interval_gets_its_share() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let sizes = StormSizes::Range {
        min: Bytes::mib(1),
        max: Bytes::mib(64),
        distribution: Distribution::LogUniform,
    };
    let mut shares = [0_u32; 6];
    for _ in 0..60_000 {
        let size = draw_size(&mut rng, &sizes).0;
        assert!((1 << 20..=64 << 20).contains(&size), "{size}");
        shares[((size - 1).ilog2() as usize).saturating_sub(20).min(5)] += 1;
    }
    assert!(
        shares.iter().all(|share| (9_500..10_500).contains(share)),
        "{shares:?}"
    );
    let one = StormSizes::Range {
        min: Bytes(1),
        max: Bytes(1),
        distribution: Distribution::LogUniform,
    };
    assert_eq!(draw_size(&mut rng, &one), Bytes(1));
}

#[test]
fn sizes_follow_their_distribution() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let (min, max) = (Bytes::kib(4), Bytes::mib(64));
    let mut drawn = |sizes: &StormSizes| -> Vec<u64> {
        (0..10_000).map(|_| draw_size(&mut rng, sizes).0).collect()
    };
    let uniform = drawn(&StormSizes::Range {
        min,
        max,
        distribution: Distribution::Uniform,
    });
    let below_half = uniform.iter().filter(|size| **size < max.0 / 2).count();
    assert!((4_800..5_200).contains(&below_half), "{below_half}");
    let bimodal = drawn(&StormSizes::Range {
        min,
        max,
        distribution: Distribution::Bimodal,
    });
    let small = bimodal
        .iter()
        .filter(|size| (min.0..=min.0 * 2).contains(size))
        .count();
    let large = bimodal
        .iter()
        .filter(|size| (max.0 / 2..=max.0).contains(size))
        .count();
    assert!(
        small + large == 10_000 && (4_800..5_200).contains(&small),
        "{small} small, {large} large"
    );
    let recorded = drawn(&StormSizes::Recorded(
        [Bytes(7), Bytes(7), Bytes(7), Bytes(9)].into(),
    ));
    let sevens = recorded.iter().filter(|size| **size == 7).count();
    assert!((7_300..7_700).contains(&sevens), "{sevens}");
}
