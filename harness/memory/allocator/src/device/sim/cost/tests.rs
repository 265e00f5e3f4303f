use super::*;

#[test]
fn times_follow_the_named_figures() {
    let model = CostModel::PUBLISHED;
    assert_eq!(model.malloc_time(Bytes::mib(2)), Nanos::micros(52));
    assert_eq!(model.free_time(Bytes::gib(1)), Nanos::micros(14 + 2048));
    assert_eq!(model.transfer_time(Bytes::gib(2)), Nanos(641_040));
    assert_eq!(model.copy_time(Bytes::gib(2), true), Nanos(40_695_200));
    assert_eq!(model.copy_time(Bytes::gib(2), false), Nanos(390_452_000));
    assert_eq!(
        model.host_alloc_time(Bytes::mib(3), true),
        Nanos::micros(1140)
    );
    assert_eq!(
        CostModel::FREE_OF_CHARGE.transfer_time(Bytes(u64::MAX)),
        Nanos::ZERO
    );
}

#[test]
fn every_figure_names_a_source_or_says_that_it_is_assumed() {
    for CostFigure {
        name,
        value,
        source,
    } in CostModel::PUBLISHED.figures()
    {
        assert!(!value.is_empty(), "{name}");
        assert!(
            source.starts_with("https://") || source.starts_with("assumed: "),
            "{name}: {source}"
        );
    }
}
