use super::*;

#[test]
fn every_key_survives_a_round_trip() {
    assert_eq!(StatKey::all().count(), 9 * 3 * 4 + 5);
    for key in StatKey::all() {
        assert_eq!(StatKey::from_name(&key.to_string()), Some(key));
    }
    for wrong in [
        "",
        "num_oom",
        "reserved_bytes",
        "reserved_bytes.all",
        "reserved_bytes.all.now",
        "num_ooms.all.peak",
    ] {
        assert_eq!(StatKey::from_name(wrong), None, "{wrong}");
    }
}

#[test]
fn the_total_peak_is_the_peak_of_the_sum() {
    let mut stat = PooledStat::default();
    stat.increase(PoolKind::Small, 10);
    stat.decrease(PoolKind::Small, 10);
    stat.increase(PoolKind::Large, 12);
    assert_eq!(
        (stat.all.peak, stat.small_pool.peak, stat.large_pool.peak),
        (12, 10, 12)
    );
    assert_eq!((stat.all.allocated, stat.all.freed), (22, 10));
}
