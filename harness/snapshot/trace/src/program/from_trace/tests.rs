use super::*;
use crate::program::{Placement, ReplaySetup};
use crate::trace;
use harness_allocator::device::sim::AddressOrder;
use harness_allocator::{allocator::AllocatorSpec, units::Bytes};

fn program(text: &str) -> RecordedProgram {
    RecordedProgram::from_trace(&trace::parse(text).expect("a trace"), Config::default())
        .expect("a program")
}

#[test]
fn ids_streams_and_pools_are_renumbered_in_order() {
    let program =
        program("a 70 512 9\nf 3\ng+ 5\na 7 1024 3000000000\ng- 5\nr 70 4\nf 70\ns 4\na 70 5 0\n");
    let text: Vec<String> = program
        .operations
        .iter()
        .map(TraceEvent::to_string)
        .collect();
    assert_eq!(
        text,
        [
            "a 0 512 2",
            "g+ 0",
            "a 1 1024 3",
            "g- 0",
            "r 0 1",
            "f 0",
            "s 1",
            "a 2 5 0"
        ]
    );
    assert_eq!(
        program.origin,
        [0, 2, 3, 4, 5, 6, 7, 8],
        "the free of what is not live is left out"
    );
    assert_eq!(program.streams, [0, 4, 9, 3_000_000_000]);
}

#[test]
fn a_trace_runs_out_of_memory_on_a_small_device() {
    let program = program("a 1 31457280 0\na 2 20971520 0\nf 1\na 3 31457280 0\n");
    let prepared = program.prepare().expect("it can run");
    let setup = |mib| ReplaySetup {
        allocator: AllocatorSpec::caching(Config::default()),
        memory: Bytes::mib(mib),
        placement: Placement::InOrder(AddressOrder::Up),
    };
    let replayed = prepared.replay(&setup(50)).expect("it runs");
    assert_eq!(
        (replayed.oom, replayed.stats.reserved_bytes.all.peak),
        (None, 50 << 20)
    );
    let refused = prepared
        .replay(&setup(40))
        .expect("it runs")
        .oom
        .expect("40 MiB are too little");
    assert_eq!(
        (refused.operation, refused.event, refused.requested),
        (1, 1, Bytes::mib(20))
    );
}
