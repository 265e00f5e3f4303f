//! Private pools through the rig: audited like all memory, refused if unsupported, released at the
//! end of a run.

use harness_allocator::allocator::{AllocatorKind, PrivatePoolError, PrivatePoolId, Request};
use harness_allocator::device::StreamId;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::units::Bytes;
use harness_run::rig::{Buffer, PoolRefused, ProgramId, Rig, RigOptions};

use crate::program::MEMORY;

fn rig(kind: AllocatorKind) -> Rig {
    let mut config = SimConfig::default();
    config.total = config.context_overhead + MEMORY;
    let mut rig = Rig::new(
        Box::new(SimDevice::new(config)),
        kind.build(),
        &RigOptions::default(),
    )
    .unwrap();
    rig.begin_scenario().unwrap();
    rig.begin_step(1);
    rig
}

fn allocate(rig: &mut Rig, size: Bytes) -> Buffer {
    let mut buffer = rig.allocate(Request::new(size)).unwrap().unwrap();
    rig.fill(&mut buffer, StreamId::DEFAULT).unwrap();
    buffer
}

fn reserved(rig: &Rig) -> Bytes {
    Bytes(rig.stats().reserved_bytes.all.current)
}

fn end(mut rig: Rig) {
    rig.end_step(false).unwrap();
    rig.finish().unwrap();
    rig.close(Vec::new(), Vec::new()).unwrap();
}

#[test]
fn memory_of_a_private_pool_stays_its_own_until_the_pool_is_released() {
    for kind in [AllocatorKind::Caching, AllocatorKind::Expandable] {
        let mut rig = rig(kind);
        let pool = rig.name_private_pool();
        rig.begin_private_pool(pool).unwrap().unwrap();
        let inside = allocate(&mut rig, Bytes::mib(12));
        rig.end_private_pool(pool).unwrap().unwrap();
        rig.free(inside).unwrap();
        let kept = reserved(&rig);
        assert!(kept >= Bytes::mib(12), "{kind:?} keeps {kept}");
        let outside = allocate(&mut rig, Bytes::mib(12));
        assert!(
            reserved(&rig) >= kept + Bytes::mib(12),
            "{kind:?}: a request outside of the pool is not served from it"
        );
        rig.end_step(false).unwrap();
        let before = reserved(&rig);
        rig.release_private_pool(pool).unwrap().unwrap();
        assert_eq!(before - reserved(&rig), kept, "{kind:?}");
        assert_eq!(
            rig.release_private_pool(pool).unwrap(),
            Err(PoolRefused::Misuse(PrivatePoolError::Unknown(pool)))
        );
        rig.free(outside).unwrap();
        end(rig);
    }
}

#[test]
fn a_block_that_lives_when_its_pool_is_released_stays_valid() {
    let mut rig = rig(AllocatorKind::Caching);
    let pool = rig.name_private_pool();
    rig.begin_private_pool(pool).unwrap().unwrap();
    let (gone, kept) = (
        allocate(&mut rig, Bytes::mib(12)),
        allocate(&mut rig, Bytes::mib(12)),
    );
    rig.end_private_pool(pool).unwrap().unwrap();
    rig.free(gone).unwrap();
    rig.release_private_pool(pool).unwrap().unwrap();
    rig.verify(&kept, StreamId::DEFAULT).unwrap();
    rig.free(kept).unwrap();
    end(rig);
}

#[test]
fn pools_that_are_still_open_at_the_end_of_a_run_go_back_with_everything_else() {
    let mut rig = rig(AllocatorKind::Caching);
    for _ in 0..3 {
        let pool = rig.name_private_pool();
        rig.begin_private_pool(pool).unwrap().unwrap();
        let buffer = allocate(&mut rig, Bytes::mib(3));
        rig.free(buffer).unwrap();
    }
    assert!(reserved(&rig) > Bytes::ZERO);
    end(rig);
}

#[test]
fn an_allocator_without_private_pools_refuses_them() {
    for kind in [
        AllocatorKind::Bfc,
        AllocatorKind::RmmPool,
        AllocatorKind::RmmArena,
        AllocatorKind::RmmBinning,
        AllocatorKind::OrtArena,
        AllocatorKind::XlaBfc,
        AllocatorKind::CupyPool,
        AllocatorKind::AsyncPool,
        AllocatorKind::Direct,
    ] {
        let mut rig = rig(kind);
        let pool = rig.name_private_pool();
        for answer in [
            rig.begin_private_pool(pool).unwrap(),
            rig.end_private_pool(pool).unwrap(),
            rig.release_private_pool(pool).unwrap(),
        ] {
            let refused = answer.expect_err("there are none");
            assert_eq!(
                refused.to_string(),
                format!(
                    "the allocator `{}` does not support private pools",
                    kind.name()
                )
            );
        }
        let buffer = allocate(&mut rig, Bytes::mib(3));
        rig.free(buffer).unwrap();
        end(rig);
    }
}

#[test]
fn misuse_is_answered_and_changes_nothing() {
    let mut rig = rig(AllocatorKind::Caching);
    let (pool, never_made) = (rig.name_private_pool(), PrivatePoolId(77));
    assert_eq!(
        rig.end_private_pool(pool).unwrap(),
        Err(PoolRefused::Misuse(PrivatePoolError::NotOpen(pool)))
    );
    rig.begin_private_pool(pool).unwrap().unwrap();
    assert_eq!(
        rig.begin_private_pool(pool).unwrap(),
        Err(PoolRefused::Misuse(PrivatePoolError::AlreadyOpen(pool)))
    );
    assert_eq!(
        rig.release_private_pool(pool).unwrap(),
        Err(PoolRefused::Misuse(PrivatePoolError::ContextOpen(pool)))
    );
    rig.end_private_pool(pool).unwrap().unwrap();
    assert_eq!(
        rig.release_private_pool(never_made).unwrap(),
        Err(PoolRefused::Misuse(PrivatePoolError::Unknown(never_made)))
    );
    end(rig);
}

/// 12 MiB are free, but in a pool that does not serve the request.
#[test]
fn memory_of_other_pools_is_not_free_for_a_request_that_fails() {
    let mut rig = rig(AllocatorKind::Caching);
    let pool = rig.name_private_pool();
    rig.begin_private_pool(pool).unwrap().unwrap();
    let inside = allocate(&mut rig, Bytes::mib(12));
    rig.free(inside).unwrap();
    let outcome = |rig: &mut Rig| {
        let request = Request::new(MEMORY);
        let error = rig
            .allocate(request)
            .unwrap()
            .expect_err("the pool keeps a part of the device");
        rig.failed_request(request, &error)
            .unwrap()
            .and_then(|failed_request| failed_request.lanes)
            .unwrap()
    };
    // An open pool releases nothing, and its memory serves the request.
    let largest = outcome(&mut rig).iter().map(|lane| lane.free.largest).max();
    assert_eq!(largest, Some(reserved(&rig)));
    rig.end_private_pool(pool).unwrap().unwrap();
    assert_eq!(
        (outcome(&mut rig), reserved(&rig) >= Bytes::mib(12)),
        (Vec::new(), true)
    );
    end(rig);
}

/// Each program has its own pools, even with equal numbers.
#[test]
fn programs_do_not_see_each_others_pools() {
    let mut rig = rig(AllocatorKind::Caching);
    let other = rig.add_program(AllocatorKind::Caching.build());
    let mine = rig.name_private_pool();
    rig.begin_private_pool(mine).unwrap().unwrap();
    rig.enter(other);
    let theirs = rig.name_private_pool();
    assert_eq!(mine, theirs);
    assert_eq!(
        rig.end_private_pool(theirs).unwrap(),
        Err(PoolRefused::Misuse(PrivatePoolError::NotOpen(theirs)))
    );
    let buffer = allocate(&mut rig, Bytes::mib(3));
    assert!(
        rig.snapshot()
            .iter()
            .all(|segment| segment.private_pool.is_none())
    );
    rig.free(buffer).unwrap();
    rig.enter(ProgramId::FIRST);
    end(rig);
}
