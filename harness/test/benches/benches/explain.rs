//! Measures explanation and replay of recorded programs: `cargo bench -p harness-explain --bench
//! explain`. The generated program is always the same. Each time covers the whole named task.

use criterion::{Criterion, criterion_group, criterion_main};
use harness_allocator::{allocator::caching::Config, units::Bytes};
use harness_explain::causes::{self, Options};
use harness_explain::grid::{Configuration, Grid};
use harness_explain::requests::Requests;
use harness_trace::{snapshot::Snapshot, trace::TraceEvent};

const MEMORY: Bytes = Bytes::gib(8);
const CONFIGURATIONS: usize = 64;

/// A training loop. Each step allocates 500 blocks of varying size at 500 lines and frees them in
/// reverse order. One in fifty lives for ten steps.
fn program(operations: u64) -> Requests {
    const BLOCKS: u64 = 500;
    let (mut events, mut step) = (Vec::new(), 0_u64);
    while (events.len() as u64) < operations {
        let id = |step: u64, block: u64| step * BLOCKS + block;
        for block in 0..BLOCKS {
            let size = Bytes(512 << ((block * 7919 + step) % 13)) + Bytes(block * 4096 % 100_000);
            events.push((
                TraceEvent::Allocate {
                    id: id(step, block),
                    size,
                    stream: Default::default(),
                },
                block,
            ));
        }
        let is_kept = |block: &u64| block.is_multiple_of(50);
        events.extend(
            (0..BLOCKS)
                .rev()
                .filter(|block| !is_kept(block))
                .map(|block| {
                    (
                        TraceEvent::Free {
                            id: id(step, block),
                        },
                        block,
                    )
                }),
        );
        if let Some(old) = step.checked_sub(10) {
            events.extend(
                (0..BLOCKS)
                    .filter(is_kept)
                    .map(|block| (TraceEvent::Free { id: id(old, block) }, block)),
            );
        }
        step += 1;
    }
    events.truncate(operations as usize);
    let places: Vec<String> = (1..=BLOCKS)
        .map(|line| format!("train.py:{line}"))
        .collect();
    let operations = events
        .into_iter()
        .zip(1..)
        .map(|((event, block), line)| (event, line, Some(places[block as usize].as_str())));
    Requests::of_trace("program.trace", operations)
}

/// The snapshot that PyTorch would write: one event per allocation, two per free, and segment
/// events.
fn snapshot(operations: u64) -> Snapshot {
    program(operations)
        .record(MEMORY)
        .expect("the program can be replayed")
}

fn replays(criterion: &mut Criterion) {
    let (program, _) = program(100_000)
        .program_with_places()
        .expect("the program can be replayed");
    let prepared = program.prepare().expect("the program can be replayed");
    let grid = Grid::new(&prepared, MEMORY);
    let configurations: Vec<Configuration> = Configuration::grid(&Config::default())
        .into_iter()
        .cycle()
        .take(CONFIGURATIONS)
        .collect();
    criterion.bench_function("replay/100,000 operations, 64 configurations", |bencher| {
        bencher.iter(|| {
            grid.run(&configurations, false, &|| ())
                .expect("the program can be replayed")
        });
    });
}

fn explanations(criterion: &mut Criterion) {
    let recorded = snapshot(66_000);
    let events = recorded.traces[0].len();
    criterion.bench_function(&format!("explain/{events} events"), |bencher| {
        bencher.iter(|| {
            causes::explain(&recorded, 0, Options::default()).expect("it can be explained")
        });
    });
    let mut written = Vec::new();
    snapshot(33_000)
        .write(&mut written)
        .expect("memory can be written to");
    criterion.bench_function(
        &format!(
            "read and explain/a pickle of {:.1} MiB",
            written.len() as f64 / (1 << 20) as f64
        ),
        |bencher| {
            bencher.iter(|| {
                let read = Snapshot::parse(&written).expect("it was just written");
                causes::explain(&read, 0, Options::default()).expect("it can be explained")
            });
        },
    );
    let mut written = Vec::new();
    snapshot(1_330_000)
        .write(&mut written)
        .expect("memory can be written to");
    criterion.bench_function("read/two million events", |bencher| {
        bencher.iter(|| Snapshot::parse(&written).expect("it was just written"))
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10);
    targets = replays, explanations
}
criterion_main!(benches);
