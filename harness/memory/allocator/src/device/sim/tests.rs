//! Errors that only a strict device reports: bugs that real hardware ignores or that corrupt memory
//! silently. Each error names both places.

use super::*;

fn device() -> SimDevice {
    SimDevice::new(SimConfig {
        total: Bytes::gib(2),
        ..SimConfig::default()
    })
}

fn range(start: DevicePtr, offset: u64, len: u64) -> MemoryRange {
    MemoryRange::new(start.offset(Bytes(offset)), Bytes(len))
}

/// A tag that looks the same from every offset.
const SEVENS: Tag = Tag(0x0707_0707_0707_0707);

/// The order between two accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Nothing,
    EventTooEarly,
    EventRerecordedElsewhere,
    SameStream,
    EventAndWait,
    ThroughAThirdStream,
    EventAndHost,
    HostSeesTheEventDone,
    HostSeesTheEventNotDone,
    StreamSynchronized,
    OtherStreamSynchronized,
    DeviceSynchronized,
    AnotherAllocationFreed,
    StreamDestroyed,
}

/// Each with whether it orders a write on one stream before an access on another.
const ORDERS: [(Order, bool); 14] = [
    (Order::Nothing, false),
    (Order::EventTooEarly, false),
    (Order::EventRerecordedElsewhere, false),
    (Order::SameStream, true),
    (Order::EventAndWait, true),
    (Order::ThroughAThirdStream, true),
    (Order::EventAndHost, true),
    (Order::HostSeesTheEventDone, true),
    (Order::HostSeesTheEventNotDone, false),
    (Order::StreamSynchronized, true),
    (Order::OtherStreamSynchronized, false),
    (Order::DeviceSynchronized, true),
    (Order::AnotherAllocationFreed, true),
    (Order::StreamDestroyed, true),
];

fn access(
    device: &mut SimDevice,
    kind: AccessKind,
    stream: StreamId,
    range: MemoryRange,
) -> Result<(), DeviceError> {
    match kind {
        AccessKind::Write => device.fill(stream, range, SEVENS),
        AccessKind::Read => device.verify(stream, range, SEVENS),
        AccessKind::Free => device.free_async(range.start, stream),
    }
}

/// Makes an access on one stream, then an ordering, then a second access that overlaps the first by
/// one byte. Returns the result of the second.
fn run(
    order: Order,
    first: AccessKind,
    second: AccessKind,
) -> Result<Result<(), DeviceError>, DeviceError> {
    let mut device = device();
    let ptr = device.malloc(Bytes::mib(4))?;
    let other = device.malloc(Bytes::mib(4))?;
    let (a, b, c) = (
        device.create_stream()?,
        device.create_stream()?,
        device.create_stream()?,
    );
    let (event, next) = (device.create_event()?, device.create_event()?);
    device.fill(a, range(ptr, 0, 2000), SEVENS)?;
    device.synchronize()?;
    if order == Order::EventTooEarly {
        device.record_event(event, a)?;
    }
    device.set_call_site(CallSite(1));
    access(&mut device, first, a, range(ptr, 0, 1000))?;
    device.busy(a, Nanos::millis(1))?;
    device.set_call_site(CallSite(2));
    let mut second_stream = b;
    match order {
        Order::Nothing => {}
        Order::EventTooEarly => device.wait_event(b, event)?,
        Order::EventRerecordedElsewhere => {
            device.record_event(event, a)?;
            device.record_event(event, c)?;
            device.wait_event(b, event)?;
        }
        Order::SameStream => second_stream = a,
        Order::EventAndWait => {
            device.record_event(event, a)?;
            device.wait_event(b, event)?;
        }
        Order::ThroughAThirdStream => {
            device.record_event(event, a)?;
            device.wait_event(c, event)?;
            device.record_event(next, c)?;
            device.wait_event(b, next)?;
        }
        Order::EventAndHost => {
            device.record_event(event, a)?;
            device.synchronize_event(event)?;
        }
        Order::HostSeesTheEventDone => {
            device.record_event(event, a)?;
            while !device.event_done(event)? {}
        }
        Order::HostSeesTheEventNotDone => {
            device.record_event(event, a)?;
            assert!(!device.event_done(event)?);
        }
        Order::StreamSynchronized => device.synchronize_stream(a)?,
        Order::OtherStreamSynchronized => device.synchronize_stream(c)?,
        Order::DeviceSynchronized => device.synchronize()?,
        Order::AnotherAllocationFreed => device.free(other)?,
        Order::StreamDestroyed => device.destroy_stream(a)?,
    }
    device.set_call_site(CallSite(3));
    Ok(
        access(&mut device, second, second_stream, range(ptr, 999, 1000)).inspect_err(|error| {
            if let DeviceError::Race {
                range: raced,
                first,
                second,
            } = error
            {
                assert_eq!(
                    *raced,
                    range(ptr, 999, 1),
                    "the race is on the bytes that both touch"
                );
                assert_eq!((first.stream, first.place), (a, CallSite(1)));
                assert_eq!((second.stream, second.place), (second_stream, CallSite(3)));
            }
        }),
    )
}

#[test]
fn two_streams_race_exactly_if_nothing_orders_them() {
    for (order, orders) in ORDERS {
        for second in [AccessKind::Write, AccessKind::Read] {
            // A verify waits for its result, so the host orders everything after it. Only a write
            // can come first in a race.
            for (first, races) in [(AccessKind::Write, !orders), (AccessKind::Read, false)] {
                let result = run(order, first, second).expect("only the second access may fail");
                let case = format!("{first:?}, {order:?}, {second:?}: {result:?}");
                match result {
                    Ok(()) => assert!(!races, "{case}"),
                    Err(DeviceError::Race { .. }) => assert!(races, "{case}"),
                    Err(_) => panic!("{case}"),
                }
            }
        }
    }
}

#[test]
fn a_free_that_does_not_wait_orders_nothing() -> Result<(), DeviceError> {
    let mut device = SimDevice::new(SimConfig {
        free_synchronizes: false,
        ..SimConfig::default()
    });
    let (ptr, other) = (device.malloc(Bytes::mib(2))?, device.malloc(Bytes::mib(2))?);
    let (a, b) = (device.create_stream()?, device.create_stream()?);
    device.fill(a, range(ptr, 0, 8), Tag(1))?;
    device.free(other)?;
    assert!(matches!(
        device.fill(b, range(ptr, 0, 8), Tag(1)),
        Err(DeviceError::Race { .. })
    ));
    Ok(())
}

#[test]
fn a_race_names_both_accesses_and_changes_nothing() -> Result<(), DeviceError> {
    let mut device = device();
    let ptr = device.malloc(Bytes::mib(2))?;
    let stream = device.create_stream()?;
    device.set_call_site(CallSite(4));
    device.fill(StreamId::DEFAULT, range(ptr, 0, 64), Tag(1))?;
    device.set_call_site(CallSite(9));
    let error = device
        .fill(stream, range(ptr, 32, 64), Tag(2))
        .expect_err("nothing orders the two");
    assert_eq!(
        error.to_string(),
        "0x700000000020..0x700000000040 is written on stream 1 at step 9 while it may still be \
         written on stream 0 at step 4: \
         no event or synchronization orders the two"
    );
    device.verify(StreamId::DEFAULT, range(ptr, 0, 64), Tag(1))?;
    device.fill(stream, range(ptr, 32, 64), Tag(2))
}

#[test]
fn streams_that_touch_neighbouring_bytes_do_not_race() -> Result<(), DeviceError> {
    let mut device = device();
    let ptr = device.malloc(Bytes::mib(2))?;
    let stream = device.create_stream()?;
    device.fill(StreamId::DEFAULT, range(ptr, 0, 33), Tag(1))?;
    device.fill(stream, range(ptr, 33, 31), Tag(1))
}

#[test]
fn a_stream_that_reuses_a_slot_is_ordered_after_the_destroyed_one() -> Result<(), DeviceError> {
    let mut device = device();
    let ptr = device.malloc(Bytes::mib(2))?;
    let bystander = device.create_stream()?;
    for round in 0..100 {
        let stream = device.create_stream()?;
        assert_eq!(stream, StreamId(round + 2), "numbers are never reused");
        device.fill(stream, range(ptr, 0, 64), Tag(1))?;
        assert!(matches!(
            device.fill(bystander, range(ptr, 0, 1), Tag(1)),
            Err(DeviceError::Race { .. })
        ));
        device.destroy_stream(stream)?;
    }
    device.fill(bystander, range(ptr, 0, 64), Tag(1))
}

#[test]
fn an_access_to_freed_memory_names_the_place_of_the_free() -> Result<(), DeviceError> {
    let mut device = device();
    let ptr = device.malloc(Bytes::mib(3))?;
    device.set_call_site(CallSite(5));
    device.free(ptr)?;
    device.set_call_site(CallSite(6));
    let error = device
        .fill(StreamId::DEFAULT, range(ptr, 100, 8), Tag(1))
        .expect_err("it is freed");
    assert_eq!(
        error.to_string(),
        "0x700000000064..0x70000000006c is written on stream 0 at step 6, but the allocation of 3 \
         MiB at 0x700000000000 was freed at step 5"
    );
    Ok(())
}

#[test]
fn an_access_must_be_within_one_allocation() -> Result<(), DeviceError> {
    let mut device = device();
    device.set_call_site(CallSite(1));
    let ptr = device.malloc(Bytes(1000))?;
    let next = device.malloc(Bytes(1000))?;
    device.fill(StreamId::DEFAULT, range(ptr, 0, 1000), Tag(1))?;
    let cases = [
        (
            range(ptr, 0, 1001),
            "it ends 1 B after the end of the allocation of 1000 B at 0x700000000000, made at step \
             1",
        ),
        (
            range(ptr, 1000, 1),
            "it ends 1 B after the end of the allocation of 1000 B at 0x700000000000, made at step \
             1",
        ),
        (
            range(ptr, 0, Bytes::mib(2).0 + 8),
            "it ends 2.00 MiB after the end of the allocation of 1000 B at 0x700000000000, made at \
             step 1",
        ),
        (
            range(next, Bytes::mib(2).0, 1),
            "there was never an allocation",
        ),
        (range(DevicePtr(64), 0, 1), "there was never an allocation"),
        (range(ptr, 8, 0), "it is empty"),
        (
            MemoryRange::new(ptr, Bytes(u64::MAX)),
            "it exceeds the address space",
        ),
    ];
    for (range, expected) in cases {
        for kind in [AccessKind::Write, AccessKind::Read] {
            match access(&mut device, kind, StreamId::DEFAULT, range) {
                Err(DeviceError::InvalidAccess { why, access, .. }) => {
                    assert_eq!(why, expected);
                    assert_eq!(
                        access,
                        Access {
                            kind,
                            stream: StreamId::DEFAULT,
                            place: CallSite(1)
                        }
                    );
                }
                other => panic!("{expected}: {other:?}"),
            }
        }
    }
    Ok(())
}

#[test]
fn invalid_frees_name_their_places() -> Result<(), DeviceError> {
    let mut device = device();
    let ptr = device.malloc(Bytes::mib(4))?;
    device.set_call_site(CallSite(2));
    assert_eq!(
        device.free(ptr.offset(Bytes::mib(2))),
        Err(DeviceError::InvalidFree {
            ptr: ptr.offset(Bytes::mib(2)),
            place: CallSite(2)
        })
    );
    assert_eq!(
        device.free(DevicePtr::NULL),
        Err(DeviceError::InvalidFree {
            ptr: DevicePtr::NULL,
            place: CallSite(2)
        })
    );
    device.free(ptr)?;
    device.set_call_site(CallSite(3));
    assert_eq!(
        device.free(ptr),
        Err(DeviceError::DoubleFree {
            ptr,
            first: CallSite(2),
            second: CallSite(3)
        })
    );
    assert_ne!(
        device.malloc(Bytes::mib(4))?,
        ptr,
        "no address is used twice"
    );
    Ok(())
}

#[test]
fn a_wrong_tag_and_unwritten_memory_are_reported_differently() -> Result<(), DeviceError> {
    let mut device = device();
    let ptr = device.malloc(Bytes::mib(2))?;
    device.set_call_site(CallSite(8));
    device.fill(StreamId::DEFAULT, range(ptr, 0, 100), Tag(0x11))?;
    let found = |result| match result {
        Err(DeviceError::Corrupted { at, found, .. }) => (at, found),
        other => panic!("{other:?}"),
    };
    let wrong = device.verify(StreamId::DEFAULT, range(ptr, 0, 100), Tag(0x22));
    assert_eq!(
        found(wrong),
        (
            ptr,
            "it has tag 0x11, written on stream 0 at step 8".to_owned()
        )
    );
    let beyond = device.verify(StreamId::DEFAULT, range(ptr, 0, 101), Tag(0x11));
    assert_eq!(
        found(beyond),
        (
            ptr.offset(Bytes(100)),
            "it was never written after its allocation".to_owned()
        )
    );
    Ok(())
}

#[test]
fn an_event_of_the_replay_device_completes_only_by_a_wait() -> Result<(), DeviceError> {
    let mut device = SimDevice::new(SimConfig::replay(Bytes::gib(1)));
    let stream = device.create_stream()?;
    let (first, second, other) = (
        device.create_event()?,
        device.create_event()?,
        device.create_event()?,
    );
    let ptr = device.malloc(Bytes::mib(2))?;
    device.record_event(first, stream)?;
    device.record_event(second, stream)?;
    device.record_event(other, StreamId::DEFAULT)?;
    device.free(ptr)?;
    assert!(
        !device.event_done(first)?,
        "a device free completes no event"
    );
    device.synchronize_event(first)?;
    assert_eq!(
        (
            device.event_done(first)?,
            device.event_done(second)?,
            device.event_done(other)?
        ),
        (true, false, false)
    );
    device.synchronize_stream(stream)?;
    assert_eq!(
        (device.event_done(second)?, device.event_done(other)?),
        (true, false)
    );
    device.record_event(second, stream)?;
    assert!(
        !device.event_done(second)?,
        "not even when the stream is idle"
    );
    device.synchronize()?;
    assert_eq!(
        (device.event_done(second)?, device.event_done(other)?),
        (true, true)
    );
    assert_eq!(device.now(), Nanos::ZERO, "nothing costs anything");
    Ok(())
}

#[test]
fn the_replay_device_charges_whole_granules_at_growing_addresses() -> Result<(), DeviceError> {
    let mut device = SimDevice::new(SimConfig::replay(Bytes::mib(10)));
    assert_eq!(device.malloc(Bytes(1))?, DevicePtr(0x7000_0000_0000));
    assert_eq!(device.malloc(Bytes::mib(3))?, DevicePtr(0x7000_0020_0000));
    device.free(DevicePtr(0x7000_0020_0000))?;
    assert_eq!(device.malloc(Bytes::mib(4))?, DevicePtr(0x7000_0060_0000));
    assert_eq!(device.memory()?.free, Bytes::mib(4));
    assert_eq!(
        device.set_external_memory(Bytes(1_000_001))?,
        Bytes(1_000_001),
        "others are not rounded"
    );
    let error = device
        .malloc(Bytes::mib(4))
        .expect_err("others have a part of it");
    assert_eq!(
        error,
        DeviceError::OutOfMemory {
            requested: Bytes::mib(4),
            free: Bytes(Bytes::mib(4).0 - 1_000_001)
        }
    );
    assert!(
        device
            .malloc(Bytes(u64::MAX))
            .is_err_and(|error| error.is_out_of_memory())
    );
    Ok(())
}

#[test]
fn only_the_cost_model_advances_the_virtual_clock() -> Result<(), DeviceError> {
    let mut device = device();
    let cost = CostModel::PUBLISHED;
    let ptr = device.malloc(Bytes::mib(512))?;
    let mut expected = cost.malloc_time(Bytes::mib(512));
    assert_eq!(device.now(), expected);
    let (start, end) = (device.create_timed_event()?, device.create_timed_event()?);
    device.record_event(start, StreamId::DEFAULT)?;
    device.fill(
        StreamId::DEFAULT,
        MemoryRange::new(ptr, Bytes::mib(512)),
        Tag(1),
    )?;
    device.record_event(end, StreamId::DEFAULT)?;
    expected +=
        Nanos(2 * cost.event_create.value.0 + 2 * cost.event_record.value.0 + cost.submit.value.0);
    assert_eq!(device.now(), expected, "queueing work does not wait for it");
    device.synchronize_event(end)?;
    assert_eq!(
        device.elapsed(start, end)?,
        cost.submit.value + cost.transfer_time(Bytes::mib(512))
    );
    device.free(ptr)?;
    let freed_at = device.now();
    device.busy(StreamId::DEFAULT, Nanos::millis(3))?;
    let next = device.malloc(Bytes::mib(2))?;
    device.free(next)?;
    assert!(
        device.now().0 >= freed_at.0 + 3_000_000,
        "a free waits for work in flight"
    );
    Ok(())
}

#[test]
fn an_access_to_unmapped_memory_is_invalid() -> Result<(), DeviceError> {
    let mut device = device();
    let start = device.reserve(Bytes::mib(8))?;
    device.map(
        range(start, Bytes::mib(2).0, Bytes::mib(4).0),
        Bytes::mib(2),
    )?;
    device.set_call_site(CallSite(4));
    for bad in [
        range(start, 0, 8),
        range(start, Bytes::mib(2).0 - 1, 2),
        range(start, Bytes::mib(5).0, Bytes::mib(2).0),
    ] {
        for kind in [AccessKind::Write, AccessKind::Read] {
            let accessed = Access {
                kind,
                stream: StreamId::DEFAULT,
                place: CallSite(4),
            };
            let why = "part of it has no mapped memory".to_owned();
            let expected = DeviceError::InvalidAccess {
                range: bad,
                access: accessed,
                why,
            };
            assert_eq!(
                access(&mut device, kind, StreamId::DEFAULT, bad),
                Err(expected)
            );
        }
    }
    Ok(())
}

#[test]
fn an_unmap_forgets_contents_and_accesses() -> Result<(), DeviceError> {
    let mut device = device();
    let (stream, other) = (device.create_stream()?, device.create_stream()?);
    let start = device.reserve(Bytes::mib(2))?;
    let page = range(start, 0, Bytes::mib(2).0);
    device.map(page, page.len)?;
    device.fill(stream, page, Tag(1))?;
    assert!(
        matches!(
            device.fill(other, page, Tag(1)),
            Err(DeviceError::Race { .. })
        ),
        "mapped memory is watched like any other"
    );
    device.synchronize()?;
    device.unmap(page)?;
    device.map(page, page.len)?;
    let error = device
        .verify(other, page, Tag(1))
        .expect_err("new memory holds nothing");
    assert!(
        matches!(error, DeviceError::Corrupted { at, .. } if at == start),
        "{error}"
    );
    Ok(())
}

const KEEP_ALL: Bytes = Bytes(u64::MAX);

#[test]
fn reuse_by_a_pool_after_an_event_does_not_race() -> Result<(), DeviceError> {
    let mut device = device();
    let pool = device.create_pool(KEEP_ALL)?;
    let (first, second, event) = (
        device.create_stream()?,
        device.create_stream()?,
        device.create_event()?,
    );
    let size = Bytes::mib(20);
    let written = device.malloc_async(pool, size, first)?;
    device.fill(first, range(written, 0, size.0), Tag(1))?;
    device.set_call_site(CallSite(3));
    device.free_async(written, first)?;
    device.record_event(event, first)?;
    device.wait_event(second, event)?;
    let again = device.malloc_async(pool, size, second)?;
    assert_eq!(again, written, "the piece fits best");
    device.fill(second, range(again, 0, size.0), Tag(2))?;
    device.verify(second, range(again, 0, size.0), Tag(2))?;
    // A third stream that uses the memory of the second one is not ordered after anything.
    device.set_call_site(CallSite(5));
    let third = device.create_stream()?;
    device.fill(second, range(again, 0, 8), Tag(3))?;
    assert!(matches!(
        device.fill(third, range(again, 0, 8), Tag(4)),
        Err(DeviceError::Race { .. })
    ));
    Ok(())
}

#[test]
fn a_stream_that_reuses_memory_must_be_ordered_after_its_free() -> Result<(), DeviceError> {
    let mut device = device();
    let pool = device.create_pool(KEEP_ALL)?;
    let (owner, user) = (device.create_stream()?, device.create_stream()?);
    let size = Bytes::mib(20);
    let before = device.malloc_async(pool, size, owner)?;
    device.set_call_site(CallSite(7));
    device.free_async(before, owner)?;
    let again = device.malloc_async(pool, size, owner)?;
    assert_eq!(again, before);
    let error = device
        .fill(user, range(again, 0, 8), Tag(1))
        .expect_err("the allocation is the owner's, and nothing orders the user");
    assert!(
        error.to_string().ends_with(
            "while it may still be freed on stream 1 at step 7: no event \
             or synchronization orders the two"
        ),
        "{error}"
    );
    Ok(())
}

#[test]
fn a_free_that_is_not_ordered_after_every_access_is_a_race() -> Result<(), DeviceError> {
    let mut device = device();
    let pool = device.create_pool(KEEP_ALL)?;
    let (owner, user) = (device.create_stream()?, device.create_stream()?);
    let ptr = device.malloc_async(pool, Bytes::mib(2), owner)?;
    device.fill(user, range(ptr, 0, 64), Tag(1))?;
    let (memory, calls) = (device.pool_memory(pool)?, device.calls().free_async);
    assert!(matches!(
        device.free_async(ptr, owner),
        Err(DeviceError::Race {
            second: Access {
                kind: AccessKind::Free,
                ..
            },
            ..
        })
    ));
    assert_eq!(
        (device.pool_memory(pool)?, device.calls().free_async),
        (memory, calls + 1)
    );
    device.synchronize_stream(user)?;
    device.free_async(ptr, owner)
}

#[test]
fn an_access_to_memory_freed_to_a_pool_names_the_place_of_the_free() -> Result<(), DeviceError> {
    let mut device = device();
    let pool = device.create_pool(KEEP_ALL)?;
    let ptr = device.malloc_async(pool, Bytes(1000), StreamId::DEFAULT)?;
    device.set_call_site(CallSite(5));
    device.free_async(ptr, StreamId::DEFAULT)?;
    let error = device
        .fill(StreamId::DEFAULT, range(ptr, 100, 8), Tag(1))
        .expect_err("it is freed");
    assert!(
        error
            .to_string()
            .ends_with("but the allocation of 1000 B at 0x8000000000000 was freed at step 5"),
        "{error}"
    );
    let again = device.malloc_async(pool, Bytes(500), StreamId::DEFAULT)?;
    assert_eq!(again, ptr);
    assert!(
        device
            .verify(StreamId::DEFAULT, range(again, 0, 8), Tag(1))
            .is_err(),
        "its old size is unknown"
    );
    let beyond = device
        .fill(StreamId::DEFAULT, range(again, 0, 501), Tag(1))
        .expect_err("beyond its end")
        .to_string();
    assert!(
        beyond.ends_with(
            "it ends 1 B after the end of the allocation of 500 B at \
         0x8000000000000, made at step 5"
        ),
        "{beyond}"
    );
    Ok(())
}

#[test]
fn a_pool_grows_and_shrinks_by_whole_chunks() -> Result<(), DeviceError> {
    let mut device = device();
    let pool = device.create_pool(KEEP_ALL)?;
    let reserved = |device: &mut SimDevice| device.pool_memory(pool).map(|memory| memory.reserved);
    let small = device.malloc_async(pool, Bytes(1), StreamId::DEFAULT)?;
    assert_eq!(reserved(&mut device)?, Bytes::mib(32));
    let large = device.malloc_async(pool, Bytes::mib(33), StreamId::DEFAULT)?;
    assert_eq!(reserved(&mut device)?, Bytes::mib(96));
    device.free_async(large, StreamId::DEFAULT)?;
    device.trim_pool(pool, Bytes::ZERO)?;
    assert_eq!(
        reserved(&mut device)?,
        Bytes::mib(96),
        "the host has not seen it freed"
    );
    device.synchronize()?;
    device.trim_pool(pool, Bytes::mib(33))?;
    assert_eq!(
        reserved(&mut device)?,
        Bytes::mib(96),
        "without its chunk less would stay"
    );
    device.trim_pool(pool, Bytes::mib(32))?;
    assert_eq!(reserved(&mut device)?, Bytes::mib(32));
    device.free_async(small, StreamId::DEFAULT)
}

#[test]
fn an_unmap_before_the_host_has_waited_is_refused() -> Result<(), DeviceError> {
    for kind in [AccessKind::Write, AccessKind::Read] {
        let mut device = device();
        let (stream, other, event) = (
            device.create_stream()?,
            device.create_stream()?,
            device.create_event()?,
        );
        let start = device.reserve(Bytes::mib(4))?;
        let (page, next) = (
            range(start, 0, Bytes::mib(2).0),
            range(start, Bytes::mib(2).0, Bytes::mib(2).0),
        );
        device.map(range(start, 0, Bytes::mib(4).0), Bytes::mib(2))?;
        device.set_call_site(CallSite(3));
        let part = range(start, 64, 8);
        match kind {
            AccessKind::Write => device.fill(stream, part, Tag(1))?,
            // Queued, as a kernel would be: `verify` waits for its result.
            _ => device.queue_access(stream, part, kind)?,
        }
        device.set_call_site(CallSite(4));
        let access = Access {
            kind,
            stream,
            place: CallSite(3),
        };
        let in_use = Err(DeviceError::InUse {
            range: part,
            access,
            place: CallSite(4),
        });
        assert_eq!(device.unmap(page), in_use);
        device.synchronize_stream(other)?;
        device.record_event(event, stream)?;
        device.wait_event(other, event)?;
        assert_eq!(
            device.unmap(page),
            in_use,
            "that a stream waits does not help the host"
        );
        assert!(
            device.leaks().bytes == Bytes::mib(4),
            "nothing was unmapped"
        );
        device.unmap(next)?;
        device.synchronize_event(event)?;
        device.unmap(page)?;
        assert_eq!(device.leaks().bytes, Bytes::ZERO);
    }
    Ok(())
}

#[test]
fn work_that_the_host_has_not_waited_for_still_races_after_a_forced_unmap()
-> Result<(), DeviceError> {
    let mut device = device();
    let (stream, other) = (device.create_stream()?, device.create_stream()?);
    let page = MemoryRange::new(device.reserve(Bytes::mib(2))?, Bytes::mib(2));
    device.map(page, page.len)?;
    device.fill(stream, page, Tag(1))?;
    assert!(matches!(device.unmap(page), Err(DeviceError::InUse { .. })));
    assert!(
        matches!(
            device.fill(other, page, Tag(2)),
            Err(DeviceError::Race { .. })
        ),
        "earlier work is still known"
    );
    Ok(())
}

#[test]
fn an_exhausted_address_range_is_out_of_memory() -> Result<(), DeviceError> {
    let pib = |n: u64| Bytes::gib(n << 20);
    let total = pib(2000);
    let mut device = SimDevice::new(SimConfig {
        total,
        context_overhead: Bytes::ZERO,
        ..SimConfig::default()
    });
    let out_of_memory = |requested, free| Some(DeviceError::OutOfMemory { requested, free });
    assert_eq!(
        device.reserve(pib(1020)).err(),
        out_of_memory(pib(1020), total),
        "1020 PiB less what stays unused between reservations"
    );
    let first = device.reserve(pib(1000))?;
    assert_eq!(device.reserve(pib(20)).err(), out_of_memory(pib(20), total));
    let second = device.reserve(pib(10))?;
    assert_eq!(second, first.offset(pib(1000) + GRANULARITY));
    let pool = device.create_pool(KEEP_ALL)?;
    let pooled = device.malloc_async(pool, pib(1), StreamId::DEFAULT)?;
    let free = total - pib(1);
    assert_eq!(
        device.malloc_async(pool, pib(1), StreamId::DEFAULT).err(),
        out_of_memory(pib(1), free)
    );
    assert_eq!(device.free_memory()?, free, "a refusal takes nothing");
    let plain = device.malloc(pib(1))?;
    assert!(
        plain.offset(pib(1)) < pooled && pooled.offset(pib(1)) < first,
        "no kind reaches into another"
    );
    let free = free - pib(1);
    assert_eq!(device.malloc(pib(1)).err(), out_of_memory(pib(1), free));
    assert_eq!(
        (
            device.calls().malloc,
            device.calls().malloc_failures,
            device.leaks().allocations
        ),
        (2, 1, 2)
    );
    assert!(
        device.malloc(Bytes::mib(2))? > plain,
        "there are addresses for less"
    );
    Ok(())
}

#[test]
fn freed_addresses_are_reused_before_they_run_out() -> Result<(), DeviceError> {
    let total = Bytes::gib(1 << 20);
    let mut device = SimDevice::new(SimConfig {
        total,
        context_overhead: Bytes::ZERO,
        ..SimConfig::default()
    });
    let pool = device.create_pool(Bytes::ZERO)?;
    for _ in 0..10 {
        let reserved = device.reserve(Bytes(total.0 * 200))?;
        device.unreserve(reserved)?;
        let plain = device.malloc(total)?;
        device.free(plain)?;
        let pooled = device.malloc_async(pool, total, StreamId::DEFAULT)?;
        device.free_async(pooled, StreamId::DEFAULT)?;
        device.synchronize()?;
    }
    Ok(())
}

fn reusing_addresses() -> SimDevice {
    SimDevice::new(SimConfig {
        addresses: AddressOrder::Reuse,
        reservations: AddressOrder::Reuse,
        ..SimConfig::default()
    })
}

#[test]
fn addresses_are_reused_if_configured() -> Result<(), DeviceError> {
    let mut device = reusing_addresses();
    let (first, second) = (device.malloc(Bytes::mib(4))?, device.malloc(Bytes::mib(4))?);
    device.fill(StreamId::DEFAULT, range(first, 0, 64), Tag(1))?;
    device.set_call_site(CallSite(2));
    device.free(first)?;
    assert_eq!(
        device.free(first),
        Err(DeviceError::DoubleFree {
            ptr: first,
            first: CallSite(2),
            second: CallSite(2)
        })
    );
    let half = device.malloc(Bytes(1))?;
    assert_eq!(half, first, "the lowest that fits");
    let unwritten = device
        .verify(StreamId::DEFAULT, range(half, 0, 1), Tag(1))
        .expect_err("its old contents are gone");
    assert!(
        matches!(unwritten, DeviceError::Corrupted { .. }),
        "{unwritten}"
    );
    let beyond = device
        .fill(StreamId::DEFAULT, range(half, 0, 64), Tag(1))
        .expect_err("it is smaller than before")
        .to_string();
    assert!(
        beyond.contains("after the end of the allocation of 1 B"),
        "{beyond}"
    );
    assert_eq!(device.malloc(Bytes::mib(2))?, first.offset(Bytes::mib(2)));
    assert!(device.malloc(Bytes::mib(2))? > second);
    device.free(second)?;
    device.free(half)?;

    let reserved = device.reserve(Bytes::mib(8))?;
    device.unreserve(reserved)?;
    assert_eq!(device.reserve(Bytes::mib(8))?, reserved);

    let pool = device.create_pool(Bytes::ZERO)?;
    let pooled = device.malloc_async(pool, Bytes::mib(2), StreamId::DEFAULT)?;
    device.free_async(pooled, StreamId::DEFAULT)?;
    device.synchronize()?;
    assert_eq!(device.pool_memory(pool)?.reserved, Bytes::ZERO);
    assert_eq!(
        device.malloc_async(pool, Bytes::mib(2), StreamId::DEFAULT)?,
        pooled
    );
    Ok(())
}

#[test]
fn a_borrowed_stream_is_released_with_its_work_in_flight() -> Result<(), DeviceError> {
    let mut device = device();
    let ptr = device.malloc(Bytes::mib(2))?;
    let (own, borrowed) = (device.create_stream()?, device.borrow_stream()?);
    assert_eq!(device.leaks().streams, 1, "a borrowed stream is no leak");
    assert!(
        matches!(
            device.destroy_stream(borrowed),
            Err(DeviceError::UnknownHandle { .. })
        ),
        "it is not the device's"
    );
    assert!(
        matches!(
            device.release_stream(own),
            Err(DeviceError::UnknownHandle { .. })
        ),
        "it is not the program's"
    );
    let begin = device.now();
    device.busy(borrowed, Nanos::millis(5))?;
    device.fill(borrowed, range(ptr, 0, 64), Tag(1))?;
    device.release_stream(borrowed)?;
    assert!(
        device.now().saturating_sub(begin) < Nanos::millis(5),
        "nothing waits"
    );
    let unknown = DeviceError::UnknownHandle {
        kind: "stream",
        number: borrowed.0,
    };
    assert_eq!(
        device.fill(borrowed, range(ptr, 0, 1), Tag(1)),
        Err(unknown)
    );
    // The work continues: a new stream races with it until the host has waited for the device.
    let next = device.create_stream()?;
    assert_ne!(next, borrowed);
    assert!(matches!(
        device.fill(next, range(ptr, 0, 1), Tag(2)),
        Err(DeviceError::Race { .. })
    ));
    device.synchronize()?;
    assert!(
        device.now().saturating_sub(begin) >= Nanos::millis(5),
        "the device is done when this work is done"
    );
    device.fill(next, range(ptr, 0, 1), Tag(2))
}

/// Host memory is checked for races like device memory, and a copy checks both.
#[test]
fn unordered_copies_race_even_if_the_host_waits() -> Result<(), DeviceError> {
    for memory in [
        HostMemory::Pinned,
        HostMemory::Pageable,
        HostMemory::MappedFile { folder: None },
    ] {
        let mut device = device();
        let (ptr, other, side) = (
            device.malloc(Bytes::mib(2))?,
            device.malloc(Bytes::mib(2))?,
            device.create_stream()?,
        );
        let (whole, there) = (range(ptr, 0, 2 << 20), range(other, 0, 2 << 20));
        let host = device.host_alloc(Bytes::mib(2), &memory)?;
        device.fill(StreamId::DEFAULT, whole, SEVENS)?;
        assert!(
            matches!(
                device.copy_to_host(side, whole, host),
                Err(DeviceError::Race { .. })
            ),
            "{memory}: the device's memory is written"
        );
        device.copy_to_host(StreamId::DEFAULT, whole, host)?;
        assert!(
            matches!(
                device.copy_to_device(side, host, there),
                Err(DeviceError::Race { .. })
            ),
            "{memory}: the host's memory is written"
        );
        assert!(
            matches!(
                device.fill(side, whole, SEVENS),
                Err(DeviceError::Race { .. })
            ),
            "{memory}: the copy reads"
        );
        let event = device.create_event()?;
        device.record_event(event, StreamId::DEFAULT)?;
        device.wait_event(side, event)?;
        device.copy_to_device(side, host, there)?;
        device.verify(side, there, SEVENS)?;
        device.fill(side, whole, SEVENS)?;
    }
    Ok(())
}

#[test]
fn the_host_waits_only_for_copies_of_pageable_memory() -> Result<(), DeviceError> {
    for memory in [HostMemory::Pinned, HostMemory::Pageable] {
        let mut device = device();
        let (cost, size) = (CostModel::PUBLISHED, Bytes::gib(1));
        let ptr = device.malloc(size)?;
        let start = device.now();
        let host = device.host_alloc(size, &memory)?;
        assert_eq!(
            device.now().saturating_sub(start),
            cost.host_alloc_time(size, memory.is_pinned())
        );
        let start = device.now();
        device.copy_to_host(StreamId::DEFAULT, MemoryRange::new(ptr, size), host)?;
        let copy = cost.copy_time(size, memory.is_pinned());
        let returned = device.now().saturating_sub(start);
        assert_eq!(
            returned,
            if memory.is_pinned() {
                cost.submit.value
            } else {
                later(cost.submit.value, copy)
            },
            "{memory}"
        );
        device.host_free(host)?;
        assert_eq!(
            device.now().saturating_sub(start),
            later(cost.submit.value, copy),
            "{memory}: giving it back waits"
        );
    }
    Ok(())
}

#[test]
fn copies_keep_unwritten_memory_unwritten() -> Result<(), DeviceError> {
    let mut device = device();
    let (ptr, host) = (
        device.malloc(Bytes::mib(2))?,
        device.host_alloc(Bytes(64), &HostMemory::Pinned)?,
    );
    device.fill(StreamId::DEFAULT, range(ptr, 0, 64), SEVENS)?;
    device.copy_to_device(StreamId::DEFAULT, host, range(ptr, 16, 8))?;
    let wrong = device.verify(StreamId::DEFAULT, range(ptr, 0, 64), SEVENS);
    assert!(
        matches!(wrong, Err(DeviceError::Corrupted { at, .. }) if at == ptr.offset(Bytes(16))),
        "{wrong:?}"
    );
    Ok(())
}
