//! Measures reading and writing of a snapshot: `cargo bench -p harness-trace --bench snapshot`.
//! Divide the time by [`EVENTS`] for one event.

use criterion::{Criterion, criterion_group, criterion_main};
use harness_allocator::units::Bytes;
use harness_trace::snapshot::{Action, Event, ExtraId, Frame, FrameId, Snapshot, StackId, Value};

/// About as many events as a minute of training records.
const EVENTS: u64 = 50_000;

/// A program with 500 call stacks of 12 frames. It repeatedly allocates and frees a block.
fn snapshot() -> Snapshot {
    let mut snapshot = Snapshot::default();
    let stacks: Vec<StackId> = (0..500)
        .map(|number| stack(&mut snapshot, number))
        .collect();
    let context = vec![
        ("compile_context".to_owned(), Value::Text("N/A".to_owned())),
        ("user_metadata".to_owned(), Value::Text(String::new())),
    ];
    let extra = snapshot.extras.intern(context);
    let event = |index: u64| Event {
        action: [Action::Alloc, Action::FreeRequested, Action::FreeCompleted][(index % 3) as usize],
        address: 0x7f00_0000_0000 + index / 3 % 1000 * 4096,
        size: Bytes(4096 - index / 3 % 7),
        stream: 0,
        time_us: Some(1_795_166_450_042_919 + index),
        stack: stacks[(index * 7919 % 500) as usize],
        extra,
    };
    snapshot.traces.push((0..EVENTS).map(event).collect());
    snapshot
}

fn stack(snapshot: &mut Snapshot, number: u32) -> StackId {
    let frames: Vec<FrameId> = (0..12)
        .map(|depth| {
            let (name, file) = (
                format!("step_{depth}"),
                format!("/srv/model/part_{}.py", depth % 4),
            );
            snapshot.stacks.intern_frame(Frame {
                name,
                file,
                line: number % (depth + 2),
                extra: ExtraId::NONE,
            })
        })
        .collect();
    snapshot.stacks.intern(&frames)
}

fn read_and_write(criterion: &mut Criterion) {
    let snapshot = snapshot();
    let mut written = Vec::new();
    snapshot
        .write(&mut written)
        .expect("memory can be written to");
    criterion.bench_function("snapshot/read 50,000 events", |bencher| {
        bencher.iter(|| Snapshot::parse(&written).expect("it was just written"))
    });
    criterion.bench_function("snapshot/write 50,000 events", |bencher| {
        bencher.iter(|| {
            snapshot
                .write(std::io::sink())
                .expect("nothing can go wrong")
        });
    });
}

criterion_group!(benches, read_and_write);
criterion_main!(benches);
