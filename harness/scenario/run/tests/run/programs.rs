//! Several programs on one device: each has its own allocator, counters and audit. The device's
//! memory is compared with their sum. To each program, the memory of the others is in use by other
//! processes.

use harness_allocator::allocator::{Allocator, AllocatorKind, Request};
use harness_allocator::device::StreamId;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::{Bytes, Nanos};
use harness_record::Invariant;
use harness_run::rig::{Buffer, Checks, ProgramId, Rig, RigOptions, Stop};

use crate::lying::{Lie, Lying, TOLD};
use crate::program::MEMORY;

fn rig(first: Box<dyn Allocator>, checks: Checks) -> Rig {
    rig_with(MEMORY, first, checks)
}

fn rig_with(memory: Bytes, first: Box<dyn Allocator>, checks: Checks) -> Rig {
    let mut config = SimConfig::default();
    config.total = config.context_overhead + memory;
    let options = RigOptions {
        checks,
        ..RigOptions::default()
    };
    let mut rig = Rig::new(Box::new(SimDevice::new(config)), first, &options).unwrap();
    rig.begin_scenario().unwrap();
    rig.begin_step(1);
    rig
}

fn two_programs(first: AllocatorKind, second: AllocatorKind) -> (Rig, ProgramId) {
    let mut rig = rig(first.build(), Checks::Audit);
    let id = rig.add_program(second.build());
    (rig, id)
}

fn allocate(rig: &mut Rig, size: Bytes) -> Buffer {
    let mut buffer = rig
        .allocate(Request::new(size))
        .unwrap()
        .unwrap_or_else(|error| panic!("{size}: {error}"));
    rig.fill(&mut buffer, StreamId::DEFAULT).unwrap();
    buffer
}

fn reserved(rig: &Rig, program: ProgramId) -> Bytes {
    Bytes(rig.stats_of(program).reserved_bytes.all.current)
}

/// Requests, frees in any order, emptied caches, ends of steps and of the run, for each pair of
/// allocators.
#[test]
fn programs_with_any_allocators_share_a_device_without_findings() {
    for &first in AllocatorKind::ALL {
        for &second in AllocatorKind::ALL {
            // XLA's allocator takes three quarters of the device at its first request.
            let mut rig = rig_with(Bytes::gib(4), first.build(), Checks::Audit);
            let other = rig.add_program(second.build());
            let mut buffers = Vec::new();
            for (round, size) in [Bytes(700), Bytes::mib(3), Bytes::kib(900), Bytes::mib(5)]
                .into_iter()
                .enumerate()
            {
                rig.enter(if round % 2 == 0 {
                    other
                } else {
                    ProgramId::FIRST
                });
                buffers.extend([allocate(&mut rig, size), allocate(&mut rig, size)]);
                rig.end_step(false)
                    .unwrap_or_else(|stop| panic!("{first:?} and {second:?}: {stop:?}"));
            }
            rig.enter(ProgramId::FIRST);
            for buffer in buffers.drain(..5) {
                rig.free(buffer).unwrap();
            }
            rig.enter(other);
            rig.empty_cache()
                .unwrap_or_else(|stop| panic!("{first:?} and {second:?}: {stop:?}"));
            rig.end_step(false)
                .unwrap_or_else(|stop| panic!("{first:?} and {second:?}: {stop:?}"));
            buffers
                .into_iter()
                .for_each(|buffer| rig.free(buffer).unwrap());
            rig.finish()
                .unwrap_or_else(|stop| panic!("{first:?} and {second:?}: {stop:?}"));
            rig.close(Vec::new(), Vec::new()).unwrap();
        }
    }
}

#[test]
fn a_buffer_is_freed_in_its_own_program_and_counters_are_of_the_current_one() {
    let (mut rig, other) = two_programs(AllocatorKind::Caching, AllocatorKind::Caching);
    let mine = allocate(&mut rig, Bytes::mib(3));
    rig.enter(other);
    assert_eq!(
        (rig.entered(), rig.stats().allocation.all.current),
        (other, 0)
    );
    let theirs = allocate(&mut rig, Bytes::mib(4));
    assert_eq!(
        (mine.program(), theirs.program()),
        (ProgramId::FIRST, other)
    );
    rig.free(mine).unwrap();
    assert_eq!(
        rig.entered(),
        other,
        "a free of another program's buffer leaves the entered program as it is"
    );
    assert_eq!(
        (
            rig.stats().allocation.all.current,
            rig.stats_of(ProgramId::FIRST).allocation.all.current
        ),
        (1, 0)
    );
    let accounts = rig.end_step(false).unwrap().accounts.unwrap();
    assert_eq!(
        (accounts.allocated, accounts.reserved),
        (Bytes::mib(4), reserved(&rig, other)),
        "of the entered program"
    );
    let used = accounts.device.used - accounts.device.context_overhead;
    assert_eq!(
        used,
        reserved(&rig, ProgramId::FIRST) + reserved(&rig, other),
        "of both"
    );
    rig.free(theirs).unwrap();
    rig.finish().unwrap();
    rig.close(Vec::new(), Vec::new()).unwrap();
}

#[test]
fn memory_of_another_program_counts_as_used_by_others() {
    for second in [
        AllocatorKind::Caching,
        AllocatorKind::Expandable,
        AllocatorKind::AsyncPool,
        AllocatorKind::Direct,
    ] {
        let (mut rig, other) = two_programs(AllocatorKind::Caching, second);
        rig.enter(other);
        let theirs = allocate(&mut rig, Bytes::mib(31));
        rig.set_external_memory(Bytes::mib(2)).unwrap();
        rig.enter(ProgramId::FIRST);
        let request = Request::new(Bytes::mib(40));
        let error = rig
            .allocate(request)
            .unwrap()
            .expect_err("others hold half of the device");
        let failed_request = rig
            .failed_request(request, &error)
            .unwrap()
            .expect("a checked run knows");
        let held = reserved(&rig, other)
            .checked_round_up(rig.info().granularity)
            .unwrap()
            + Bytes::mib(2);
        assert!(held >= Bytes::mib(33), "{second:?}: {held}");
        assert_eq!(
            failed_request.accounts.device.external_memory, held,
            "{second:?}: the program's memory plus the external memory"
        );
        assert_eq!(
            (
                failed_request.accounts.reserved,
                failed_request.accounts.device.free
            ),
            (Bytes::ZERO, MEMORY - held)
        );
        rig.free(theirs).unwrap();
        rig.finish().unwrap();
        rig.close(Vec::new(), Vec::new()).unwrap();
    }
}

fn findings(result: Result<(), Stop>) -> Vec<(Invariant, String)> {
    match result {
        Err(Stop::Violated(findings)) => findings
            .into_iter()
            .map(|finding| (finding.invariant, finding.expected))
            .collect(),
        other => panic!("{other:?}"),
    }
}

/// Memory that one program hides is not attributed to the other.
#[test]
fn a_lie_of_one_program_is_found_and_the_program_is_named() {
    for liar in [0, 1] {
        let allocators: [Box<dyn Allocator>; 2] = [
            Box::new(Lying::new(Lie::Hoards).0),
            AllocatorKind::Caching.build(),
        ];
        let [lying, honest] = allocators;
        let (first, second) = if liar == 0 {
            (lying, honest)
        } else {
            (honest, lying)
        };
        let mut rig = rig(first, Checks::Audit);
        let other = rig.add_program(second);
        let programs = [ProgramId::FIRST, other];
        rig.enter(programs[1 - liar]);
        let buffer = allocate(&mut rig, Bytes::mib(3));
        rig.enter(programs[liar]);
        let found = findings(rig.allocate(Request::new(TOLD)).map(drop));
        let [(invariant, expected)] = found.as_slice() else {
            panic!("{found:?}")
        };
        assert_eq!(*invariant, Invariant::DeviceUsedFollowsReserved);
        assert!(
            expected.starts_with(&format!("in program {}: ", liar + 1))
                && expected.contains("by all programs"),
            "{expected}"
        );
        drop(buffer);
    }
}

#[test]
fn the_end_of_a_run_is_checked_for_every_program() {
    for keeper in [0, 1] {
        let allocators: [Box<dyn Allocator>; 2] = [
            Box::new(Lying::new(Lie::KeepsTheCache).0),
            AllocatorKind::Caching.build(),
        ];
        let [keeping, honest] = allocators;
        let (first, second) = if keeper == 0 {
            (keeping, honest)
        } else {
            (honest, keeping)
        };
        let mut rig = rig(first, Checks::Audit);
        let other = rig.add_program(second);
        for program in [ProgramId::FIRST, other] {
            rig.enter(program);
            let buffer = allocate(&mut rig, TOLD);
            rig.free(buffer).unwrap();
        }
        let found = findings(rig.finish());
        assert!(
            matches!(found.as_slice(), [(Invariant::EverythingGoesBack, expected)]
                if expected.contains(&format!("program {}", keeper + 1)))
        );
        rig.close(Vec::new(), Vec::new()).unwrap();
    }
}

#[test]
fn closing_releases_the_memory_of_every_program() {
    let (mut rig, other) = two_programs(AllocatorKind::Expandable, AllocatorKind::AsyncPool);
    for program in [ProgramId::FIRST, other] {
        rig.enter(program);
        drop(allocate(&mut rig, Bytes::mib(3)));
    }
    rig.close(Vec::new(), Vec::new()).unwrap();
}

/// Entering another program makes no device call in a timed run.
#[test]
fn a_timed_run_has_the_times_of_all_programs_and_makes_no_calls_for_them() {
    let mut rig = rig(AllocatorKind::Caching.build(), Checks::Timing);
    let other = rig.add_program(AllocatorKind::Direct.build());
    let mut buffers = Vec::new();
    for program in [ProgramId::FIRST, other, ProgramId::FIRST, other] {
        let before = rig.now();
        rig.enter(program);
        assert_eq!(rig.now(), before);
        buffers.push(rig.allocate(Request::new(Bytes::mib(3))).unwrap().unwrap());
    }
    buffers
        .into_iter()
        .for_each(|buffer| rig.free(buffer).unwrap());
    assert!(
        rig.end_step(false)
            .unwrap()
            .duration
            .is_some_and(|time| time > Nanos::ZERO)
    );
    let timings = rig.take_timings();
    assert_eq!((timings.allocate.count, timings.free.count), (4, 4));
    rig.finish().unwrap();
    rig.close(Vec::new(), Vec::new()).unwrap();
}
