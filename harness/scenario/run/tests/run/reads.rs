//! Asynchronous reads: compared in stream order and reported at the next wait; races are reported
//! immediately.

use harness_allocator::allocator::{AllocatorKind, Request};
use harness_allocator::device::StreamId;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::{Bytes, Nanos};
use harness_record::Invariant;
use harness_run::rig::{Buffer, Rig, RigOptions, Stop};

use crate::lying::{Lie, Lying};
use crate::program::MEMORY;

fn rig_with(allocator: Box<dyn harness_allocator::allocator::Allocator>) -> (Rig, StreamId) {
    let mut config = SimConfig::default();
    config.total = config.context_overhead + MEMORY;
    let mut rig = Rig::new(
        Box::new(SimDevice::new(config)),
        allocator,
        &RigOptions::default(),
    )
    .unwrap();
    let side = rig.create_stream().unwrap();
    rig.begin_scenario().unwrap();
    rig.begin_step(1);
    (rig, side)
}

fn allocate(rig: &mut Rig, size: Bytes) -> Buffer {
    rig.allocate(Request::new(size)).unwrap().unwrap()
}

/// A filled buffer that the other stream may use.
fn handed_over(rig: &mut Rig, side: StreamId, tell: bool) -> Buffer {
    let mut buffer = allocate(rig, Bytes::mib(3));
    rig.fill(&mut buffer, StreamId::DEFAULT).unwrap();
    let event = rig.create_event().unwrap();
    rig.record(event, StreamId::DEFAULT).unwrap();
    rig.wait(side, event).unwrap();
    if tell {
        rig.record_stream(&mut buffer, side).unwrap();
    }
    buffer
}

fn accused(result: Result<(), Stop>) -> String {
    match result {
        Err(Stop::Violated(findings)) => {
            assert!(
                findings
                    .iter()
                    .all(|finding| finding.invariant == Invariant::ContentsAreIntact),
                "{findings:?}"
            );
            findings[0].seen.clone()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_queued_read_keeps_the_host_from_nothing_and_its_contents_are_compared_later() {
    let (mut rig, side) = rig_with(AllocatorKind::Caching.build());
    let buffer = handed_over(&mut rig, side, true);
    rig.work(side, Nanos::millis(40)).unwrap();
    let before = rig.now();
    rig.read(&buffer, side).unwrap();
    assert!(rig.now().saturating_sub(before) < Nanos::millis(1));
    rig.free(buffer).unwrap();
    let mut next = allocate(&mut rig, Bytes::mib(3));
    rig.fill(&mut next, StreamId::DEFAULT).unwrap();
    rig.end_step(false).unwrap();
    rig.synchronize_stream(side).unwrap();
    assert!(rig.now().saturating_sub(before) >= Nanos::millis(40));
    rig.free(next).unwrap();
    rig.finish().unwrap();
}

/// The free is too early: the block is reused while the other stream still reads it.
#[test]
fn memory_that_is_used_again_in_front_of_a_queued_read_is_a_race_found_at_once() {
    let (mut rig, side) = rig_with(AllocatorKind::Caching.build());
    let buffer = handed_over(&mut rig, side, false);
    rig.work(side, Nanos::millis(40)).unwrap();
    rig.read(&buffer, side).unwrap();
    rig.free(buffer).unwrap();
    let mut next = allocate(&mut rig, Bytes::mib(3));
    let seen = accused(rig.fill(&mut next, StreamId::DEFAULT));
    assert!(seen.contains("read on stream 1"), "{seen}");
}

type Wait = fn(&mut Rig) -> Result<(), Stop>;

/// The allocator silently moves a live buffer: the read detects it at the first wait.
#[test]
fn wrong_contents_are_told_at_the_next_wait_for_the_stream_and_at_the_latest_at_the_end() {
    let waits: [Wait; 4] = [
        |rig| rig.synchronize_stream(StreamId::DEFAULT),
        Rig::synchronize,
        |rig| {
            let mut other = rig.allocate(Request::new(Bytes(512)))?.unwrap();
            rig.fill(&mut other, StreamId::DEFAULT)?;
            rig.verify(&other, StreamId::DEFAULT)
        },
        Rig::finish,
    ];
    for wait in waits {
        let (mut rig, side) = rig_with(Box::new(Lying::new(Lie::LosesContents).0));
        let mut buffer = allocate(&mut rig, Bytes(512));
        rig.fill(&mut buffer, StreamId::DEFAULT).unwrap();
        drop(allocate(&mut rig, crate::lying::TOLD));
        rig.read(&buffer, StreamId::DEFAULT).unwrap();
        rig.synchronize_stream(side).unwrap();
        let seen = accused(wait(&mut rig));
        assert!(seen.contains("does not hold tag"), "{seen}");
    }
}

#[test]
fn a_buffer_never_written_has_nothing_to_compare() {
    let (mut rig, side) = rig_with(AllocatorKind::Direct.build());
    let buffer = allocate(&mut rig, Bytes::mib(3));
    rig.read(&buffer, side).unwrap();
    rig.synchronize().unwrap();
    rig.free(buffer).unwrap();
    rig.finish().unwrap();
}
