//! Tests each cause of a failed request with a scenario on the simulated device, if an allocator
//! can get there. Unit tests next to the code cover the other causes.

use std::sync::{Arc, atomic::AtomicBool};
use std::{fmt::Write as _, path::Path};

use harness_allocator::{allocator::AllocatorKind, stats::PoolKind, units::Bytes};
use harness_devices::DeviceSource;
use harness_record::{
    Cause, FailedRequest, Outcome, Pieces, PinnedSegment, RefusedCall, Verdict, causes,
};
use harness_run::session::{ArmRun, Plan, Selection};
use harness_scenario::Scenario;

/// The facts about the OOM of the last step.
fn failed_request(memory: &str, steps: &str, allocator: AllocatorKind) -> FailedRequest {
    failed_request_with("", memory, steps, allocator)
}

/// The same with more keys at the top of the scenario.
fn failed_request_with(
    more: &str,
    memory: &str,
    steps: &str,
    allocator: AllocatorKind,
) -> FailedRequest {
    let steps: String = steps
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .fold(String::new(), |mut text, step| {
            writeln!(text, "  - {step}").unwrap();
            text
        });
    let name = allocator.name();
    let text = format!(
        "about: A test.\nneeds: {{ memory: {memory} }}\nallocators: [{name}]\nstreams: \
         [side]\n{more}steps:\n{steps}"
    );
    let scenario = Scenario::parse(&text, Path::new("why.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    let (scenarios, selection, program) = (
        vec![scenario.clone()],
        Selection::default(),
        "harness".to_owned(),
    );
    let plan = Plan {
        scenarios,
        selection,
        seed: None,
        memory: None,
        repetitions: 1,
        audit: true,
        fail_fast: false,
        program,
    };
    let arm = ArmRun {
        scenario: &scenario,
        allocator: &allocator.into(),
        repetition: 0,
    };
    let run = plan
        .run_arm(
            &arm,
            &DeviceSource::simulated(),
            &Arc::new(AtomicBool::new(false)),
        )
        .unwrap();
    assert!(
        matches!(run.verdict, Verdict::Failed { .. }),
        "{:?}\n{text}",
        run.verdict
    );
    let last = run.steps.last().unwrap();
    assert_eq!(last.outcome, Outcome::OutOfMemory, "{text}");
    last.failed_request.clone().unwrap()
}

const fn mib(count: u64) -> Bytes {
    Bytes::mib(count)
}

/// The first call for 700 MiB and the retry of PyTorch's allocator both fail.
const REFUSED: &str = "
    alloc: { buffer: a, size: 4MiB }
    alloc: { buffer: b, size: 700MiB }";

#[test]
fn a_request_that_an_injected_failure_refuses_names_the_call() {
    let faults = "faults: [{ call: cudaMalloc, skip: 1, count: 2 }]\n";
    let failed_request = failed_request_with(faults, "1GiB", REFUSED, AllocatorKind::Caching);
    assert_eq!(
        failed_request.injected,
        Some(RefusedCall {
            process: None,
            call: "cudaMalloc".to_owned(),
            number: 3
        })
    );
    assert_eq!(causes(&failed_request), [Cause::Injected { number: 3 }]);
}

const SMALL_AGAINST_LARGE: &str = "
    alloc: { buffer: big, size: 62MiB }
    free: big
    alloc: { buffer: k, size: 20MiB }
    alloc: { buffer: s, size: 1MiB }
    alloc: { buffer: s2, size: 1MiB }
    alloc: { buffer: s3, size: 1MiB }";

const OF_ANOTHER_STREAM: &str = "
    alloc: { buffer: a, size: 800MiB, stream: side }
    free: a
    alloc: { buffer: k, size: 20MiB, stream: side }
    alloc: { buffer: b, size: 500MiB }";

const LARGER_THAN_ALL: &str = "
    alloc: { buffer: a, size: 4MiB }
    alloc: { buffer: b, size: 1GiB }";

const OTHERS: &str = "
    alloc: { buffer: a, size: 300MiB }
    external_memory: 1000MiB
    alloc: { buffer: b, size: 900MiB }";

const FRACTION: &str = "
    set_memory_fraction: 0.5
    alloc: { buffer: a, size: 400MiB }
    alloc: { buffer: b, size: 400MiB }
    free: a
    alloc: { buffer: c, size: 700MiB }";

const HOLES: &str = "
    alloc: { buffer: big, size: 400MiB }
    free: big
    alloc: { buffer: a, size: 100MiB }
    alloc: { buffer: b, size: 100MiB }
    alloc: { buffer: c, size: 100MiB }
    alloc: { buffer: d, size: 100MiB }
    free: [a, c]
    alloc: { buffer: e, size: 250MiB }";

const LIVE_IN_EACH_PAGE: &str = "
    alloc: { buffer: a1, size: 38MiB }
    alloc: { buffer: s1, size: 2MiB }
    alloc: { buffer: a2, size: 38MiB }
    alloc: { buffer: s2, size: 2MiB }
    alloc: { buffer: a3, size: 38MiB }
    alloc: { buffer: s3, size: 2MiB }
    free: [a1, a2, a3]
    alloc: { buffer: big, size: 150MiB }";

const LESS_THAN_A_PAGE: &str = "
    alloc: { buffer: a, size: 490MiB }
    alloc: { buffer: b, size: 12MiB }";

const LESS_THAN_A_PAGE_MORE: &str = "
    alloc: { buffer: a, size: 490MiB }
    alloc: { buffer: b, size: 22MiB }";

const LESS_THAN_A_SEGMENT: &str = "
    alloc: { buffer: a, size: 500MiB }
    alloc: { buffer: b, size: 4MiB }";

const WAITED_FOR: &str = "
    alloc: { buffer: a, size: 800MiB }
    record_stream: { buffer: a, stream: side }
    busy: { stream: side, duration: 1min }
    free: a
    alloc: { buffer: k, size: 300MiB }
    alloc: { buffer: b, size: 800MiB }";

#[test]
fn each_failure_has_the_causes_that_its_figures_bear_out_and_no_others() {
    use AllocatorKind::{AsyncPool, Bfc, Caching, Direct, Expandable, RmmPool};
    let pieces = |count, bytes, largest| Pieces {
        count,
        bytes: mib(bytes),
        largest: mib(largest),
    };
    let fragmented = |own, room, elsewhere| Cause::Fragmented {
        own,
        room: mib(room),
        elsewhere: mib(elsewhere),
    };
    let others = Cause::OthersHold {
        held: mib(1000),
        asked: mib(900),
    };
    // The last of the sizes that TensorFlow tries above the request.
    let others_beside_regions = Cause::OthersHold {
        held: mib(1000),
        asked: Bytes(966_367_744),
    };
    let fraction = |held, free| Cause::Fraction {
        limit: mib(1024),
        held: mib(held),
        free: mib(free),
    };
    let cases: Vec<(&str, &str, &str, AllocatorKind, Vec<Cause>)> = vec![
        (
            "small against large",
            "64MiB",
            SMALL_AGAINST_LARGE,
            Caching,
            vec![Cause::OtherPool {
                pool: PoolKind::Large,
                largest: mib(42),
            }],
        ),
        (
            "of another stream",
            "1GiB",
            OF_ANOTHER_STREAM,
            Caching,
            vec![Cause::OtherStream {
                stream: 1,
                wanted: 0,
                largest: mib(780),
            }],
        ),
        (
            "too large",
            "1GiB",
            LARGER_THAN_ALL,
            Caching,
            vec![Cause::TooLarge {
                free: mib(1004),
                cached: mib(16),
            }],
        ),
        (
            "too large for pages",
            "1GiB",
            LARGER_THAN_ALL,
            Expandable,
            vec![Cause::TooLarge {
                free: mib(1004),
                cached: mib(16),
            }],
        ),
        ("others", "2GiB", OTHERS, Caching, vec![others]),
        (
            "others beside regions",
            "2GiB",
            OTHERS,
            Bfc,
            vec![others_beside_regions],
        ),
        (
            "others beside a pool",
            "2GiB",
            OTHERS,
            RmmPool,
            vec![others],
        ),
        (
            "others beside a pool of the driver",
            "2GiB",
            OTHERS,
            AsyncPool,
            vec![others],
        ),
        (
            "others without a cache",
            "2GiB",
            OTHERS,
            Direct,
            vec![others],
        ),
        (
            "fraction",
            "2GiB",
            FRACTION,
            Caching,
            vec![fraction(400, 1648)],
        ),
        (
            "fraction of regions",
            "2GiB",
            FRACTION,
            Bfc,
            vec![fraction(1024, 1024)],
        ),
        (
            "fraction of a pool of the driver",
            "2GiB",
            FRACTION,
            AsyncPool,
            vec![fraction(400, 1216)],
        ),
        (
            "holes",
            "512MiB",
            HOLES,
            Caching,
            vec![fragmented(pieces(2, 200, 100), 112, 0)],
        ),
        (
            "holes in regions",
            "512MiB",
            HOLES,
            Bfc,
            vec![fragmented(pieces(3, 312, 112), 0, 0)],
        ),
        (
            "holes in a pool of the driver",
            "512MiB",
            HOLES,
            AsyncPool,
            vec![],
        ),
        (
            "pages",
            "200MiB",
            LIVE_IN_EACH_PAGE,
            Expandable,
            vec![fragmented(pieces(3, 54, 18), 140, 0)],
        ),
        (
            "less than a page",
            "512MiB",
            LESS_THAN_A_PAGE,
            Expandable,
            vec![Cause::Rounding {
                room: mib(12),
                asked: mib(20),
            }],
        ),
        (
            "less than a page more",
            "512MiB",
            LESS_THAN_A_PAGE_MORE,
            Expandable,
            vec![Cause::Rounding {
                room: mib(12),
                asked: mib(20),
            }],
        ),
        (
            "less than a segment",
            "512MiB",
            LESS_THAN_A_SEGMENT,
            Caching,
            vec![Cause::Rounding {
                room: mib(12),
                asked: mib(20),
            }],
        ),
        (
            "waited for",
            "1GiB",
            WAITED_FOR,
            Caching,
            vec![Cause::TooLarge {
                free: mib(724),
                cached: mib(0),
            }],
        ),
        (
            "waited for in regions",
            "1GiB",
            WAITED_FOR,
            Bfc,
            vec![Cause::TooLarge {
                free: mib(0),
                cached: mib(724),
            }],
        ),
    ];
    for (name, memory, steps, allocator, expected) in cases {
        let failed_request = failed_request(memory, steps, allocator);
        assert_eq!(
            causes(&failed_request),
            expected,
            "{name} with {}: {failed_request:#?}",
            allocator.name()
        );
    }
}

#[test]
fn a_failed_training_reports_the_state_at_its_failure() {
    let steps = "train: { id: t, parameters: 64MiB, layers: 50, activations_per_sample: 32MiB, \
         batch: 16, iterations: 1 }";
    let failed_request = failed_request("512MiB", steps, AllocatorKind::Caching);
    assert_eq!(
        (
            failed_request.accounts.allocated,
            failed_request.accounts.reserved
        ),
        (Bytes(473_126_400), mib(508))
    );
    assert!(
        matches!(causes(&failed_request)[..], [Cause::Fragmented { .. }]),
        "{:?}",
        causes(&failed_request)
    );
}

#[test]
fn pinning_buffers_and_workloads_are_named_with_their_line() {
    let pinned = |memory, steps, allocator| {
        let failed_request = failed_request(memory, steps, allocator);
        assert_eq!(
            failed_request.streams.values().collect::<Vec<_>>(),
            ["default", "side"]
        );
        let holders = |segment: &PinnedSegment| {
            segment
                .holders
                .iter()
                .map(|holder| (holder.name.clone(), holder.line))
                .collect::<Vec<_>>()
        };
        failed_request
            .pinned
            .iter()
            .map(|segment| (segment.free, holders(segment)))
            .collect::<Vec<_>>()
    };
    let named = |holders: &[(&str, u32)]| {
        holders
            .iter()
            .map(|(name, line)| ((*name).to_owned(), *line))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        pinned("512MiB", HOLES, AllocatorKind::Caching),
        [(mib(200), named(&[("b", 9), ("d", 11)]))]
    );
    // Releasing pages leaves three mapped ranges with one buffer each.
    let small = [("s1", 7), ("s2", 9), ("s3", 11)].map(|holder| (mib(18), named(&[holder])));
    assert_eq!(
        pinned("200MiB", LIVE_IN_EACH_PAGE, AllocatorKind::Expandable),
        small
    );
    let train = "train: { id: t, parameters: 64MiB, layers: 50, activations_per_sample: 32MiB, \
         batch: 16, iterations: 1 }";
    let of_training = pinned("512MiB", train, AllocatorKind::Caching);
    assert!(
        !of_training.is_empty()
            && of_training
                .iter()
                .all(|(_, holders)| *holders == named(&[("t", 6)])),
        "{of_training:?}"
    );
}

#[test]
fn many_pinned_segments_are_counted_and_not_listed() {
    // Each pair leaves 6 MiB of a 20 MiB segment free. Then the device is full.
    let steps: String = (0..24)
        .map(|n| format!("alloc: {{ buffer: b{n}, size: 7MiB }}\n"))
        .collect();
    let failed_request = failed_request(
        "240MiB",
        &format!("{steps}alloc: {{ buffer: last, size: 12MiB }}"),
        AllocatorKind::Caching,
    );
    assert_eq!(failed_request.pinned.len(), 10);
    let unlisted = failed_request.pinned_unlisted;
    assert!(
        unlisted.count > 0 && unlisted.free > Bytes::ZERO,
        "{unlisted:?}"
    );
    let free: Bytes = failed_request
        .pinned
        .iter()
        .map(|segment| segment.free)
        .sum::<Bytes>()
        + unlisted.free;
    assert_eq!(
        free,
        failed_request.cached(),
        "nothing is left out of the sum"
    );
}
