use std::collections::BTreeMap;

use harness_allocator::device::DeviceMemory;

use super::*;
use crate::{Accounts, RefusedCall, UnlistedSegments};

const fn mib(count: u64) -> Bytes {
    Bytes::mib(count)
}

fn memory(total: Bytes, free: Bytes, used: Bytes) -> DeviceMemory {
    DeviceMemory {
        total,
        free,
        used,
        ..DeviceMemory::default()
    }
}

/// A request on a device of 1 GiB. The allocator reserves 20 MiB, of which 16 MiB are free.
fn failed_request(requested: Bytes) -> FailedRequest {
    let accounts = Accounts {
        requested: mib(4),
        allocated: mib(4),
        active: mib(4),
        reserved: mib(20),
        peak_allocated: mib(4),
        peak_reserved: mib(20),
        retries: 1,
        ooms: 1,
        device: memory(mib(1024), mib(1004), mib(20)),
    };
    let free = Pieces {
        count: 1,
        bytes: mib(16),
        largest: mib(16),
    };
    FailedRequest {
        requested,
        stream: 0,
        lacking: requested,
        asked: requested,
        limit: None,
        allocator_limit: None,
        program_limit: None,
        injected: None,
        accounts,
        inactive_split: mib(16),
        lanes: Some(vec![StreamPool {
            pool: Some(PoolKind::Large),
            stream: 0,
            free,
            waiting: Pieces::default(),
        }]),
        other_private_pools: Pieces::default(),
        is_pool_inferred: false,
        streams: BTreeMap::new(),
        pinned: Vec::new(),
        pinned_unlisted: UnlistedSegments::default(),
        keeps_free_segments: false,
    }
}

#[test]
fn every_kind_has_a_name_of_its_own_that_is_read_back() {
    for &kind in CauseKind::ALL {
        assert_eq!(CauseKind::from_name(kind.name()), Some(kind));
    }
    assert_eq!(CauseKind::from_name("fraction"), Some(CauseKind::Fraction));
    assert_eq!(CauseKind::from_name("bad luck"), None);
}

#[test]
fn what_waits_for_other_streams_is_a_cause_where_it_would_have_been_enough() {
    // The allocators wait for events before they fail, so no run reaches this state.
    let waiting = Pieces {
        count: 1,
        bytes: mib(8),
        largest: mib(8),
    };
    let with = |requested| {
        let lanes = Some(vec![StreamPool {
            pool: Some(PoolKind::Large),
            stream: 0,
            free: Pieces::default(),
            waiting,
        }]);
        causes(&FailedRequest {
            lanes,
            ..failed_request(requested)
        })
    };
    assert_eq!(with(mib(1028)), [Cause::PendingFree(waiting)]);
    assert_eq!(
        with(mib(1029)),
        [Cause::TooLarge {
            free: mib(1004),
            cached: mib(16)
        }]
    );
}

#[test]
fn what_is_in_use_beyond_the_accounts_is_a_cause_where_the_driver_lacks_it() {
    let mut failed_request = failed_request(mib(900));
    failed_request.accounts.device = memory(mib(1024), mib(104), mib(920));
    assert_eq!(
        causes(&failed_request),
        [Cause::Unaccounted {
            used: mib(900),
            asked: mib(900)
        }]
    );
    // The same memory, in use by a known process.
    failed_request.accounts.device.external_memory = mib(900);
    assert_eq!(
        causes(&failed_request),
        [Cause::OthersHold {
            held: mib(900),
            asked: mib(900)
        }]
    );
    // Memory in use outside the limited part of the device does not count.
    failed_request.accounts.device.external_memory = Bytes::ZERO;
    failed_request.accounts.device.total = mib(124);
    assert_eq!(
        causes(&failed_request),
        [Cause::TooLarge {
            free: mib(104),
            cached: mib(16)
        }]
    );
}

#[test]
fn a_piece_of_its_own_that_was_not_taken_is_no_cause() {
    let mut failed_request = failed_request(mib(250));
    failed_request.accounts.device.free = mib(100);
    (
        failed_request.accounts.reserved,
        failed_request.accounts.device.total,
    ) = (mib(404), mib(504));
    let free = Pieces {
        count: 2,
        bytes: mib(400),
        largest: mib(300),
    };
    failed_request.lanes = Some(vec![StreamPool {
        pool: Some(PoolKind::Large),
        stream: 0,
        free,
        waiting: Pieces::default(),
    }]);
    assert_eq!(causes(&failed_request), []);
    // Rounding beyond the block is a cause.
    failed_request.asked = mib(320);
    assert_eq!(
        causes(&failed_request),
        [Cause::RoundedUp {
            largest: mib(300),
            asked: mib(320)
        }]
    );
}

#[test]
fn what_is_free_in_a_private_pool_is_a_cause_where_it_would_have_been_enough() {
    let mut failed_request = failed_request(mib(600));
    (
        failed_request.accounts.reserved,
        failed_request.accounts.device.free,
    ) = (mib(620), mib(404));
    failed_request.accounts.device.used = mib(620);
    let pieces = |count: u64, each: u64| Pieces {
        count,
        bytes: mib(count * each),
        largest: mib(each),
    };
    failed_request.other_private_pools = pieces(1, 600);
    assert_eq!(
        causes(&failed_request),
        [Cause::PrivatePool(pieces(1, 600))]
    );
    // Small blocks count together, because the driver would have their memory without the pool.
    failed_request.other_private_pools = pieces(20, 10);
    assert_eq!(
        causes(&failed_request),
        [Cause::PrivatePool(pieces(20, 10))]
    );
    failed_request.other_private_pools = pieces(10, 10);
    assert_eq!(causes(&failed_request), []);
}

#[test]
fn a_refusal_that_was_injected_is_a_cause_beside_those_that_the_figures_show() {
    let injected = Some(RefusedCall {
        process: None,
        call: "cudaMalloc".to_owned(),
        number: 2,
    });
    assert_eq!(
        causes(&FailedRequest {
            injected: injected.clone(),
            ..failed_request(mib(20))
        }),
        [Cause::Injected { number: 2 }]
    );
    let too_large = Cause::TooLarge {
        free: mib(1004),
        cached: mib(16),
    };
    assert_eq!(
        causes(&FailedRequest {
            injected,
            ..failed_request(mib(2048))
        }),
        [Cause::Injected { number: 2 }, too_large]
    );
}

#[test]
fn a_limit_of_the_program_is_the_only_cause_where_it_refused() {
    let mut failed_request = failed_request(mib(250));
    (
        failed_request.program_limit,
        failed_request.accounts.requested,
    ) = (Some(mib(200)), mib(3));
    assert_eq!(
        causes(&failed_request),
        [Cause::Limit {
            limit: mib(200),
            held: mib(3)
        }]
    );
}

#[test]
fn a_limit_of_the_allocator_is_no_memory_fraction_and_bounds_what_the_driver_can_give() {
    let limited = FailedRequest {
        allocator_limit: Some(mib(30)),
        ..failed_request(mib(20))
    };
    let limit = Cause::AllocatorLimit {
        limit: mib(30),
        held: mib(20),
        free: mib(1004),
    };
    let own = Pieces {
        count: 1,
        bytes: mib(16),
        largest: mib(16),
    };
    let fragmented = Cause::Fragmented {
        own,
        room: mib(10),
        elsewhere: Bytes::ZERO,
    };
    assert_eq!(causes(&limited), [limit, fragmented]);
}

#[test]
fn a_request_that_no_state_of_the_device_could_serve_is_too_large() {
    let too_large = [Cause::TooLarge {
        free: mib(1004),
        cached: mib(16),
    }];
    assert_eq!(causes(&failed_request(Bytes(u64::MAX))), too_large);
    // The same holds with a memory fraction.
    let mut failed_request = failed_request(Bytes(u64::MAX - 511));
    failed_request.limit = Some(mib(512));
    assert_eq!(causes(&failed_request).last(), too_large.last());
}
