//! Measures the harness's own overhead on the simulated device. Compare only figures of the same
//! run, because the machine's speed drifts.
//!
//! * `start-up`: a scenario with one step, from the command line to the end.
//! * `catalogue`: the whole catalogue.
//! * `storm/…`: one operation without and with checks, with little and with much idle memory.
//! * `hit/…`: a cache hit compared with a driver call.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{hint::black_box, sync::Arc, time::Duration};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use harness_allocator::allocator::{AllocatorKind, Request};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::Bytes;
use harness_devices::DeviceSource;
use harness_record::Verdict;
use harness_run::session::{Plan, Selection};
use harness_scenario::{ParameterSettings, Scenario};

fn plan(scenarios: Vec<Scenario>, selection: Selection, audit: bool) -> Plan {
    Plan {
        scenarios,
        selection,
        seed: None,
        memory: None,
        repetitions: 1,
        audit,
        fail_fast: false,
        program: "harness".to_owned(),
    }
}

/// Runs a plan. All runs must pass.
fn run(plan: &Plan) {
    let records = plan
        .run(&DeviceSource::simulated(), &Arc::default())
        .expect("the simulated device opens");
    assert!(
        records
            .runs
            .iter()
            .all(|run| run.verdict == Verdict::Passed),
        "a run did not pass"
    );
    black_box(records);
}

fn start_up(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("the temporary folder can be created");
    let path = folder.path().join("one_step.yaml");
    let text =
        "about: One step.\nneeds: { memory: 64MiB }\nsteps:\n  - alloc: { buffer: a, size: 1B }\n";
    std::fs::write(&path, text).expect("a temporary file can be written");
    // In the folder above that of this benchmark: `cargo build --profile dist` builds it there.
    let this = std::env::current_exe().expect("this program has a path");
    let program = this
        .ancestors()
        .nth(2)
        .expect("it is in a folder of the build")
        .join("harness");
    assert!(
        program.exists(),
        "{} does not exist: build it first, with the same profile",
        program.display()
    );
    criterion.bench_function("start-up", |bencher| {
        bencher.iter(|| {
            let mut command = Command::new(&program);
            let status = command
                .arg("run")
                .arg(&path)
                .args(["--no-report", "--quiet"])
                .stderr(Stdio::null())
                .status();
            assert!(
                status.is_ok_and(|status| status.success()),
                "the scenario passes"
            );
        });
    });
}

fn catalogue(criterion: &mut Criterion) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../scenarios");
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("the catalogue exists")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "yaml"));
    paths.sort();
    let load = |path: &PathBuf| {
        Scenario::load_points(path, &ParameterSettings::new()).expect("the catalogue is valid")
    };
    criterion.bench_function("catalogue", |bencher| {
        bencher.iter(|| {
            run(&plan(
                paths.iter().flat_map(load).collect(),
                Selection::default(),
                true,
            ))
        })
    });
}

/// A storm of operations next to `idle` blocks of memory that it never touches.
fn storm(operations: u64, idle: u64) -> Scenario {
    let text = format!(
        "about: A storm next to idle memory.
needs: {{ memory: 64GiB }}
streams: [idle]
steps:
  - storm: {{ id: still, operations: {idle}, sizes: {{ min: 64KiB, max: 4MiB }}, live: 60GiB,
        lifetime: {{ min: 1000000, max: 1000000 }}, streams: [idle] }}
  - storm: {{ id: storm, operations: {operations}, sizes: {{ min: 4KiB, max: 16MiB }}, live: 2GiB,
        lifetime: {{ min: 10, max: 1000 }} }}
"
    );
    Scenario::parse(&text, Path::new("storm.yaml")).expect("the scenario is valid")
}

fn storms(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("storm");
    group
        .sample_size(10)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3));
    for audit in [false, true] {
        for (operations, idle) in [(100_000, 1), (1_000_000, 1), (100_000, 10_000)] {
            let name = if audit { "audited" } else { "plain" };
            let plan = plan(
                vec![storm(operations, idle)],
                Selection::only(["caching"]),
                audit,
            );
            group.throughput(Throughput::Elements(operations));
            group.bench_function(
                BenchmarkId::new(name, format!("{operations} operations, {idle} idle blocks")),
                |bencher| {
                    bencher.iter(|| run(&plan));
                },
            );
        }
    }
    group.finish();
}

fn hits(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hit");
    for kind in AllocatorKind::ALL {
        let mut device = SimDevice::new(SimConfig::default());
        let mut allocator = kind.build();
        group.bench_function(
            BenchmarkId::new("allocate and free 1 MiB", kind.name()),
            |bencher| {
                bencher.iter(|| {
                    let allocation = allocator
                        .allocate(&mut device, Request::new(Bytes::mib(1)))
                        .expect("enough memory is free");
                    allocator
                        .free(&mut device, black_box(allocation))
                        .expect("the allocation is live");
                });
            },
        );
    }
    group.finish();
}

criterion_group!(benches, start_up, catalogue, storms, hits);
criterion_main!(benches);
