use super::*;

#[test]
fn interruptions_do_not_affect_the_allocation_time() {
    let mut times = OperationTimes::default();
    for pass in 0..TIMED_PASSES {
        times.pass = pass;
        times.add(0, Kind::Allocate, 40);
        // One interruption of 20 ms.
        times.add(1, Kind::Allocate, if pass == 2 { 20_000_000 } else { 60 });
        times.add(2, Kind::Free, 30);
    }
    assert_eq!(
        (times.mean(Kind::Allocate), times.mean(Kind::Free)),
        (50.0, 30.0)
    );
    assert_eq!(times.mean(Kind::Other), 0.0, "there was none");
}

#[test]
fn consistently_slow_operations_count() {
    let mut times = OperationTimes::default();
    for pass in 0..TIMED_PASSES {
        times.pass = pass;
        times.add(0, Kind::Allocate, 5_000);
        times.add(7, Kind::Allocate, 50);
    }
    assert_eq!(times.mean(Kind::Allocate), 2_525.0);
}
