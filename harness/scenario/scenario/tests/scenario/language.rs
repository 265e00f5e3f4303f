//! What comes out of a scenario that is right: typed steps at their places, names resolved, sizes
//! and expectations parsed.

use std::path::Path;

use harness_allocator::allocator::{AllocatorKind, AllocatorSpec};
use harness_allocator::device::{DeviceCalls, DeviceMemory};
use harness_allocator::stats::{MemoryStats, PoolKind};
use harness_allocator::units::{Bytes, Nanos};
use harness_record::Invariant;
use harness_scenario::steps::free::{FreeStep, FreeTarget};
use harness_scenario::steps::loops::LoopRounds;
use harness_scenario::steps::storm::{Distribution, StormSizes};
use harness_scenario::{
    Account, Action, Amount, Chain, DeviceKind, DeviceMetric, Ending, Expected, Metric, Number,
    Policy, Readings, ReportKey, Scenario, StepKind,
};

const SOURCE: &str = "\
about: Everything at once.
needs: { memory: 1.5GiB }
allocators: [direct, caching]
streams: [side]
seed: 42
steps:
  - alloc: { buffer: weights, size: 400MiB }
  - alloc: { buffer: more, size: 2GiB, stream: side, expect: oom, \
        on_oom: { free: { buffers: [weights] } }, id: rescue }
  - free: weights
  - storm: { id: churn, operations: 100, sizes: { min: 512B, max: 1MiB }, live: 8MiB, \
        lifetime: { min: 1, max: 9 } }
  - alloc: { buffer: probe, size: churn.failed_request + 1MiB }
  - free: [churn, probe]
  - repeat: 3
    steps:
      - measure: before
      - busy: { stream: side, duration: 5ms }
      - expect: { caching: [ device.used - before.device.used == 0, rescue.retry_time < 1s ], \
            others: any }
  - empty_cache
invariants: [ reserved_bytes.all.peak <= start.device.free ]
expect_violation: retry_makes_progress
";

fn scenario() -> Scenario {
    Scenario::parse(SOURCE, Path::new("folder/everything.yaml")).unwrap()
}

#[test]
fn keys_of_the_file_are_parsed() {
    let scenario = scenario();
    assert_eq!(
        (scenario.name.as_str(), scenario.needs.memory, scenario.seed),
        ("everything", Bytes::mib(1536), 42)
    );
    assert_eq!(
        scenario.allocators,
        [AllocatorKind::Direct, AllocatorKind::Caching].map(AllocatorSpec::from)
    );
    let streams: Vec<(usize, &str)> = scenario
        .streams
        .iter()
        .map(|stream| (stream.index(), stream.name()))
        .collect();
    assert_eq!(streams, [(0, "default"), (1, "side")]);
    let step = scenario.steps[0].position;
    assert_eq!(
        scenario.place(step).to_string(),
        "folder/everything.yaml:7:5"
    );
    assert_eq!(scenario.info().about, "Everything at once.");
    assert_eq!(
        scenario
            .expect_violation
            .map(|found| (found.value, found.at.line)),
        Some((Invariant::RetryMakesProgress, 20))
    );
    let metrics: Vec<String> = scenario.invariants[0]
        .value
        .quantities()
        .map(ToString::to_string)
        .collect();
    assert_eq!(metrics, ["reserved_bytes.all.peak", "start.device.free"]);
}

#[test]
fn steps_have_a_kind_a_position_and_a_description() {
    let steps: Vec<(u32, u32, &str, String)> = scenario()
        .steps
        .iter()
        .map(|step| {
            (
                step.position.line,
                step.position.column,
                step.action.kind().name(),
                step.action.to_string(),
            )
        })
        .collect();
    let text = steps
        .iter()
        .map(|(line, column, kind, text)| format!("{line}:{column} {kind} {text}\n"))
        .collect::<String>();
    insta::assert_snapshot!(text, @r"
    7:5 alloc weights, 400 MiB
    8:5 alloc more, 2 GiB, on side, expected to fail, on out-of-memory: free weights
    9:5 free weights
    10:5 storm churn, 100 operations, 512 B to 1 MiB, at most 8 MiB live
    11:5 alloc probe, churn.failed_request + 1MiB
    12:5 free churn, probe
    13:5 repeat 3 steps, 3 times
    18:5 empty_cache
    ");
}

#[test]
fn fields_are_parsed_and_names_resolved() {
    let scenario = scenario();
    let [weights, more, free, storm, probe, both, repeat, _] = scenario.steps.as_slice() else {
        panic!("eight steps")
    };
    let Action::Alloc(more_fields) = &more.action else {
        panic!("alloc")
    };
    assert_eq!(
        (more_fields.size.clone(), more_fields.expect.clone()),
        (
            Amount::Fixed(Bytes::gib(2)),
            Ending::always(Expected::Oom(None))
        )
    );
    let Action::Alloc(weights) = &weights.action else {
        panic!("alloc")
    };
    let freed = Policy::Free {
        buffers: vec![weights.buffer.name.clone()],
    };
    assert_eq!(
        more_fields.on_oom.as_ref().map(Chain::policies),
        Some(&[freed][..])
    );
    let expected = FreeTarget::Buffer {
        buffer: weights.buffer.clone(),
        may_be_gone: true,
    };
    assert_eq!(
        free.action,
        Action::Free(FreeStep::Targets(vec![expected])),
        "a policy may have freed it"
    );
    let Action::Storm(churn) = &storm.action else {
        panic!("storm")
    };
    assert_eq!(
        churn.sizes,
        StormSizes::Range {
            min: Bytes(512),
            max: Bytes::mib(1),
            distribution: Distribution::LogUniform
        }
    );
    assert_eq!(storm.id.as_ref(), Some(&churn.id));
    let Action::Alloc(probe) = &probe.action else {
        panic!("alloc")
    };
    let looked_up = |metric: &Metric| {
        assert_eq!(
            *metric,
            Metric::Report(churn.id.clone(), ReportKey::FailedRequest)
        );
        Ok::<_, ()>(Number::from_integer(1 << 20))
    };
    assert_eq!(probe.size.evaluate(looked_up), Ok(Bytes::mib(2)));
    assert!(
        matches!(&both.action, Action::Free(FreeStep::Targets(targets))
        if targets[0] == FreeTarget::Storm(churn.id.clone()))
    );
    let Action::Repeat(repeat) = &repeat.action else {
        panic!("repeat")
    };
    assert_eq!(
        (&repeat.rounds, repeat.steps.len()),
        (&LoopRounds::Times(3), 3)
    );
    let Action::Busy(busy) = &repeat.steps[1].action else {
        panic!("busy")
    };
    assert_eq!((busy.duration, busy.stream.index()), (Nanos::millis(5), 1));
}

#[test]
fn an_expectation_has_its_allocator_and_its_position() {
    let scenario = scenario();
    let Action::Repeat(repeat) = &scenario.steps[6].action else {
        panic!("repeat")
    };
    let (Action::Measure(before), Action::Expect(expect)) =
        (&repeat.steps[0].action, &repeat.steps[2].action)
    else {
        panic!("measure, expect")
    };
    assert!(expect.of("direct", DeviceKind::Gpu).is_empty());
    let [first, second] = expect.of("caching", DeviceKind::Gpu) else {
        panic!("two expectations")
    };
    let (first, second) = (&first.expectation, &second.expectation);
    assert_eq!(
        (first.at.line, first.at.column, second.at.column),
        (17, 30, 69)
    );
    let metrics: Vec<&Metric> = first.value.quantities().collect();
    let used = Account::Device(DeviceMetric::Used);
    assert_eq!(
        metrics,
        [&Metric::Now(used), &Metric::At(before.clone(), used)]
    );
}

#[test]
fn every_account_can_be_read_from_the_readings() {
    let memory = DeviceMemory {
        total: Bytes(1),
        free: Bytes(2),
        used: Bytes(3),
        process: None,
        context_overhead: Bytes(4),
        external_memory: Bytes(5),
        processes: Bytes::ZERO,
        process_contexts: Bytes::ZERO,
    };
    let calls = DeviceCalls {
        malloc: 6,
        malloc_failures: 7,
        free: 8,
        synchronize: 9,
        ..DeviceCalls::default()
    };
    let mut stats = MemoryStats {
        num_ooms: 10,
        ..MemoryStats::default()
    };
    stats.reserved_bytes.increase(PoolKind::Small, 11);
    let readings = Readings {
        stats,
        memory: Some(memory),
        calls,
        now: Nanos(12),
    };
    let missing: Vec<Account> = Account::all()
        .filter(|&account| readings.get(account).is_none())
        .collect();
    assert_eq!(
        missing,
        [Account::Device(DeviceMetric::Process)],
        "NVML could not tell it"
    );
    let values = [
        ("device.total", 1),
        ("device.free", 2),
        ("device.used", 3),
        ("device.context_overhead", 4),
        ("device.external_memory", 5),
        ("device.malloc_calls", 6),
        ("device.malloc_failures", 7),
        ("device.free_calls", 8),
        ("device.memory_calls", 14),
        ("device.synchronizations", 9),
        ("num_ooms", 10),
        ("reserved_bytes.small_pool.peak", 11),
        ("time.now", 12),
    ];
    for (name, expected) in values {
        assert_eq!(
            readings.get(Account::from_name(name).unwrap()),
            Some(expected),
            "{name}"
        );
    }
}

#[test]
fn names_such_as_no_and_on_are_names() {
    let source = "about: x\nneeds: { memory: 1GiB }\nsteps:\n  - alloc: { buffer: y, size: 1 }\n  \
         - alloc: { buffer: on, size: 1 }\n  - free: [y, on]\n";
    assert_eq!(
        Scenario::parse(source, Path::new("names.yaml"))
            .unwrap()
            .steps
            .len(),
        3
    );
}

#[test]
fn files_with_other_line_ends_or_a_byte_order_mark_are_read() {
    let windows = format!("\u{feff}{}", SOURCE.replace('\n', "\r\n"));
    let scenario = Scenario::parse(&windows, Path::new("windows.yaml")).unwrap();
    assert_eq!(scenario.steps.len(), 8);
    assert_eq!(scenario.steps[7].position.line, 18);
}

#[test]
fn a_loop_body_that_frees_its_buffers_is_accepted() {
    let source = "about: x\nneeds: { memory: 1GiB }\nsteps:\n  - repeat: 9\n    steps:\n      \
         - storm: { id: s, operations: 9, sizes: 1MiB, live: 2MiB, lifetime: { \
         min: 1, max: 2 } }\n      - measure: m\n      - free: s\n      - empty_cache: { id: \
         e }\n      - expect: e.freed_bytes >= 0 + e.freed_bytes - m.device.used\n";
    let scenario = Scenario::parse(source, Path::new("body.yaml")).unwrap();
    assert_eq!(scenario.steps[0].action.kind(), StepKind::Repeat);
}

/// The arms of a scenario with these allocators: name and settings.
fn arms(allocators: &str) -> Vec<(String, Option<String>)> {
    let source =
        format!("about: x\nneeds: {{ memory: 1GiB }}\n{allocators}\nsteps: [empty_cache]\n");
    let scenario =
        Scenario::parse(&source, Path::new("arms.yaml")).unwrap_or_else(|error| panic!("{error}"));
    scenario
        .allocators
        .iter()
        .map(|arm| (arm.to_string(), arm.settings()))
        .collect()
}

#[test]
fn settings_as_a_string_and_as_fields_are_equal() {
    let conf = "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,>:4],\
         garbage_collection_threshold:0.8,expandable_segments:True";
    let divisions = [
        "[256:1, 512:2, \">:4\"]",
        "[256: 1, 512: 2, \">\": 4]",
        "\"[256:1,512:2,>:4]\"",
    ];
    let fields = divisions.map(|divisions| {
        format!(
            "{{ garbage_collection_threshold: 0.80, expandable_segments: true, \
             max_split_size_mb: 64, roundup_power2_divisions: {divisions} }}"
        )
    });
    for settings in [format!("{{ conf: \"{conf}\" }}")]
        .into_iter()
        .chain(fields)
    {
        assert_eq!(
            arms(&format!("allocator: {{ caching: {settings} }}")),
            [(format!("caching({conf})"), Some(conf.to_owned()))]
        );
    }
    let quoted =
        "allocator: { caching: { expandable_segments: \"True\", max_split_size_mb: \"64.5\" } }";
    assert_eq!(
        arms(quoted)[0].0,
        "caching(max_split_size_mb:64,expandable_segments:True)",
        "as PyTorch reads them"
    );
}

#[test]
fn allocators_have_the_names_of_their_settings_or_their_own() {
    let several = "allocators:
  - caching
  - caching: { conf: \"max_split_size_mb:512\" }
  - caching: { name: tuned, max_split_size_mb: 512 }
  - caching: { name: again }
  - direct: { name: baseline }
  - expandable: {}";
    let names: Vec<String> = arms(several).into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        names,
        [
            "caching",
            "caching(max_split_size_mb:512)",
            "tuned",
            "again",
            "baseline",
            "expandable"
        ]
    );
    assert_eq!(arms("allocator: direct"), [("direct".to_owned(), None)]);
    assert_eq!(arms(""), [("caching".to_owned(), None)]);
}

#[test]
fn a_request_may_end_differently_with_each_allocator() {
    let source = "about: x
needs: { memory: 1GiB }
allocators: [caching, { caching: { name: tuned, max_split_size_mb: 64 } }, direct]
steps:
  - alloc: { buffer: a, size: 2GiB, expect: { caching: oom, others: any, tuned: fits } }
  - free: a
";
    let scenario = Scenario::parse(source, Path::new("ends.yaml")).unwrap();
    let (Action::Alloc(alloc), Action::Free(free)) =
        (&scenario.steps[0].action, &scenario.steps[1].action)
    else {
        panic!("alloc, free")
    };
    let ends =
        ["caching", "tuned", "direct"].map(|arm| alloc.expect.of(arm, DeviceKind::Simulated));
    assert_eq!(ends, [Expected::Oom(None), Expected::Fits, Expected::Any]);
    assert_eq!(alloc.to_string(), "a, 2 GiB, expected to fail with caching");
    assert_eq!(
        *free,
        FreeStep::Targets(vec![FreeTarget::Buffer {
            buffer: alloc.buffer.clone(),
            may_be_gone: true
        }])
    );
}

fn parse(source: &str) -> Scenario {
    Scenario::parse(source, Path::new("test.yaml"))
        .unwrap_or_else(|error| panic!("{error}\n{source}"))
}

fn with_steps(steps: &str) -> Scenario {
    parse(&format!(
        "about: x\nneeds: {{ memory: 1GiB }}\nsteps:\n{steps}\n"
    ))
}

#[test]
fn short_names_stand_for_counters_over_all_pools() {
    for (short, full) in [
        ("reserved", "reserved_bytes.all.current"),
        ("allocated.peak", "allocated_bytes.all.peak"),
        ("active", "active_bytes.all.current"),
        ("inactive_split.freed", "inactive_split_bytes.all.freed"),
        ("requested.allocated", "requested_bytes.all.allocated"),
    ] {
        assert_eq!(
            Account::from_name(short),
            Account::from_name(full),
            "{short}"
        );
        assert!(Account::from_name(short).is_some(), "{short}");
    }
    assert_eq!(Account::from_name("reserved.now"), None);
}

#[test]
fn each_point_of_a_matrix_is_a_scenario() {
    let source = "about: x
matrix: { batch: [8, 16], memory: [1GiB, 2GiB] }
needs: { memory: memory / 2 }
steps:
  - alloc: { buffer: a, size: 4MiB * batch }
  - repeat: batch
    steps: [reset_peak_stats]
";
    let points = |set: &[(&str, &str)]| {
        let settings = set
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        Scenario::parse_points(source, Path::new("points.yaml"), &settings).unwrap()
    };
    let told = |scenario: &Scenario| {
        let (Action::Alloc(alloc), Action::Repeat(repeat)) =
            (&scenario.steps[0].action, &scenario.steps[1].action)
        else {
            panic!("steps")
        };
        (
            scenario.name.clone(),
            scenario.needs.memory,
            alloc.size.clone(),
            repeat.rounds.count(),
        )
    };
    let all: Vec<_> = points(&[]).iter().map(told).collect();
    let point = |name: &str, memory, size, count| {
        (
            name.to_owned(),
            Bytes::mib(memory),
            Amount::Fixed(Bytes::mib(size)),
            count,
        )
    };
    assert_eq!(
        all,
        [
            point("points[batch=8,memory=1GiB]", 512, 32, 8),
            point("points[batch=8,memory=2GiB]", 1024, 32, 8),
            point("points[batch=16,memory=1GiB]", 512, 64, 16),
            point("points[batch=16,memory=2GiB]", 1024, 64, 16),
        ]
    );
    let set: Vec<_> = points(&[("batch", "96"), ("memory", "4GiB"), ("other", "1")])
        .iter()
        .map(told)
        .collect();
    assert_eq!(set, [point("points[batch=96,memory=4GiB]", 2048, 384, 96)]);
}

#[test]
fn the_values_of_a_loop_are_a_range_or_a_list() {
    let values = |given: &str| {
        let scenario = with_steps(&format!(
            "  - for: {{ v: {given} }}\n    steps: [reset_peak_stats]"
        ));
        let Action::For(steps) = &scenario.steps[0].action else {
            panic!("for")
        };
        (0..steps.rounds.count())
            .filter_map(|round| steps.rounds.value(round))
            .map(|(_, value)| value.to_string())
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(values("1..4"), "1 2 3 4");
    assert_eq!(values("1..8 by 3"), "1 4 7");
    assert_eq!(values("3..1 by -1"), "3 2 1");
    assert_eq!(values("0.5..1 by 0.25"), "1/2 3/4 1");
    assert_eq!(values("1KiB..3KiB by 1KiB"), "1024 2048 3072");
    assert_eq!(values("[1MiB, 512KiB]"), "1048576 524288");
    assert_eq!(values("7..7"), "7");
}

#[test]
fn values_may_differ_by_device_and_allocator() {
    let source = "about: x
needs: { memory: 1GiB }
allocators: [caching, direct, bfc]
skip: { direct: too slow, gpu: not tried }
expected_to_fail: { bfc: known }
steps:
  - alloc: { buffer: a, size: 2GiB, \
        expect: { simulated: { caching: { oom: too_large }, others: oom }, gpu: any } }
";
    let scenario = parse(source);
    let Action::Alloc(alloc) = &scenario.steps[0].action else {
        panic!("alloc")
    };
    use DeviceKind::{Gpu, Simulated};
    assert_eq!(
        alloc.expect.of("caching", Simulated),
        Expected::Oom(harness_record::CauseKind::from_name("too_large"))
    );
    assert_eq!(alloc.expect.of("bfc", Simulated), Expected::Oom(None));
    assert_eq!(alloc.expect.of("bfc", Gpu), Expected::Any);
    assert_eq!(
        ["caching", "direct"].map(|arm| scenario.skip.of(arm, Simulated)),
        [None, Some("too slow")]
    );
    assert_eq!(scenario.skip.of("caching", Gpu), Some("not tried"));
    assert_eq!(
        ["bfc", "direct"].map(|arm| scenario.expected_to_fail.of(arm, Gpu)),
        [Some("known"), None]
    );
}

#[test]
fn a_comparison_of_allocators_is_kept_for_later() {
    let source = "about: x
needs: { memory: 1GiB }
allocators: [caching, direct]
steps:
  - expect: [ num_ooms == 0, caching.reserved.peak <= 2 * direct.reserved.peak ]
";
    let scenario = parse(source);
    assert_eq!(scenario.comparisons.len(), 1);
    let metrics: Vec<String> = scenario.comparisons[0]
        .value
        .quantities()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        metrics,
        [
            "caching.reserved_bytes.all.peak",
            "direct.reserved_bytes.all.peak"
        ]
    );
}

#[test]
fn the_time_limit_of_the_scenario_applies_to_steps_without_their_own() {
    let scenario = parse(
        "about: x\nneeds: { memory: 1GiB }\ntimeout: 2s\nsteps:\n  - repeat: 2\n    steps: \
         [reset_peak_stats]\n  - reset_peak_stats: {}\n    timeout: 1s\n",
    );
    assert_eq!(
        scenario.steps[0].action.steps()[0].time_limit,
        Some(Nanos::millis(2000))
    );
    assert_eq!(scenario.steps[1].time_limit, Some(Nanos::millis(1000)));
}
