use harness_gpu_settings::{attempts::DriverFree, calls::Call};

use super::*;

#[test]
fn what_is_reserved_falls_where_memory_was_given_back() {
    let attempt = |size, submitted, held, device| Attempt {
        call: Call::Malloc,
        size: Bytes::mib(size),
        submitted,
        outcome: AttemptOutcome::Served,
        device,
        number: device,
        held: Bytes::mib(held),
    };
    let free = |attempts, submitted, held| DriverFree {
        attempts,
        submitted,
        device: 0,
        held: Bytes::mib(held),
    };
    let timeline = ProgramTimeline {
        attempts: vec![
            attempt(20, 0, 0, 0),
            attempt(8, 2, 0, 1),
            attempt(4, 5, 0, 0),
        ],
        frees: vec![free(1, 3, 0), free(3, 9, 0)],
        ..ProgramTimeline::default()
    };
    let curve = Curve {
        timeline: &timeline,
        device: 0,
        title: String::new(),
    };
    let changes = curve
        .reserved()
        .into_iter()
        .map(|(x, held)| (x, svg::mib(held)));
    let mut points: Vec<(u64, u64)> = svg::stairs(changes, curve.end())
        .into_iter()
        .map(|(x, mib)| (x as u64, mib as u64))
        .collect();
    points.dedup();
    assert_eq!(
        points,
        [
            (0, 0),
            (0, 20),
            (3, 20),
            (3, 0),
            (5, 0),
            (5, 4),
            (9, 4),
            (9, 0)
        ]
    );
}
