//! The contract of a [`PooledDevice`]: the driver's stream-ordered pools, on real and simulated
//! hardware.
//!
//! The driver decides how much a pool reserves, so bodies only compare. Bodies get a device without
//! pools and free everything.

use harness_allocator::device::{
    DeviceError, DevicePtr, Leaks, MemoryRange, PoolId, PooledDevice, StreamId, Tag, TestDevice,
};
use harness_allocator::units::{Bytes, Nanos};

use crate::{Case, Outcome, is_made_for_tests};

type Call = fn(&mut dyn TestDevice) -> Outcome;

const TAG: Tag = Tag(0x8877_6655_4433_2211);
const OTHER: Tag = Tag(0x1122_3344_5566_7788);
/// The threshold of a pool that keeps all its memory.
const KEEP_ALL: Bytes = Bytes(u64::MAX);
/// Long enough that the host can check while it runs.
const LONG: Nanos = Nanos::millis(50);

macro_rules! bodies {
    ($($body:ident),* $(,)?) => { [$((stringify!($body), $body as Call)),*] };
}

pub(crate) fn cases() -> Vec<Case> {
    let bodies = bodies![
        a_new_pool_holds_nothing,
        a_pool_reserves_what_it_hands_out_and_device_used_follows,
        allocations_are_disjoint_and_keep_their_contents,
        a_pool_without_a_threshold_gives_unused_memory_back_at_a_wait,
        a_pool_keeps_up_to_its_threshold_until_it_is_trimmed,
        trimming_releases_only_memory_whose_free_has_completed,
        freed_memory_is_reused_on_its_stream_immediately,
        freed_memory_is_reused_on_another_stream_only_after_an_event,
        out_of_memory_is_an_answer_that_changes_nothing,
        unused_memory_of_a_pool_makes_room_for_another_size,
        a_free_takes_its_turn_in_the_stream,
        wrong_frees_are_errors,
        a_pool_that_is_not_there_is_an_error,
        a_pool_with_allocations_is_not_destroyed,
        pool_calls_are_counted_failed_ones_too,
    ];
    let case = |(name, body): (&str, Call)| Case {
        name: format!("pooled::{name}"),
        run: Box::new(move |device| {
            if has_pools(device) {
                body(device)
            } else {
                Ok(())
            }
        }),
    };
    bodies.into_iter().map(case).collect()
}

fn has_pools(device: &mut dyn TestDevice) -> bool {
    let has = device.pooled().is_some();
    assert!(
        has || !is_made_for_tests(device),
        "a device made for these tests has pools"
    );
    has
}

fn pooled(device: &mut dyn TestDevice) -> &mut dyn PooledDevice {
    device
        .pooled()
        .expect("the device has pools, as was asked before")
}

fn reserved(device: &mut dyn TestDevice, pool: PoolId) -> Result<Bytes, DeviceError> {
    Ok(pooled(device).pool_memory(pool)?.reserved)
}

fn free_bytes(device: &mut dyn TestDevice) -> Result<Bytes, DeviceError> {
    Ok(device.memory()?.free)
}

/// A pool, destroyed afterward. Then all memory must be free again.
fn with_pool(
    device: &mut dyn TestDevice,
    threshold: Bytes,
    body: impl FnOnce(&mut dyn TestDevice, PoolId) -> Outcome,
) -> Outcome {
    let free = free_bytes(device)?;
    let pool = pooled(device).create_pool(threshold)?;
    body(device, pool)?;
    pooled(device).destroy_pool(pool)?;
    assert_eq!(
        free_bytes(device)?,
        free,
        "a destroyed pool has given everything back"
    );
    Ok(())
}

fn a_new_pool_holds_nothing(device: &mut dyn TestDevice) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        assert_eq!(pooled(device).pool_memory(pool)?, Default::default());
        assert_eq!(
            device.leaks(),
            Leaks {
                pools: 1,
                ..Leaks::default()
            }
        );
        Ok(())
    })
}

fn a_pool_reserves_what_it_hands_out_and_device_used_follows(
    device: &mut dyn TestDevice,
) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let (before, tolerance) = (device.memory()?, device.info().used_tolerance.0);
        let mut live = Vec::new();
        let mut asked = Bytes::ZERO;
        for size in [Bytes(1), Bytes::kib(700), Bytes::mib(5), Bytes::mib(13)] {
            live.push(pooled(device).malloc_async(pool, size, StreamId::DEFAULT)?);
            asked += size;
            let (memory, now) = (pooled(device).pool_memory(pool)?, device.memory()?);
            assert!(
                asked <= memory.used && memory.used <= memory.reserved,
                "{asked} in {memory:?}"
            );
            assert_eq!(
                (memory.used_high, memory.reserved_high),
                (memory.used, memory.reserved),
                "nothing was freed yet"
            );
            assert!(
                (now.used - before.used).0.abs_diff(memory.reserved.0) <= tolerance,
                "{memory:?}"
            );
            assert!(
                (before.free - now.free).0.abs_diff(memory.reserved.0) <= tolerance,
                "{memory:?}"
            );
            assert_eq!(device.leaks().bytes, memory.reserved);
        }
        let high = pooled(device).pool_memory(pool)?;
        live.iter()
            .try_for_each(|ptr| pooled(device).free_async(*ptr, StreamId::DEFAULT))?;
        device.synchronize()?;
        let memory = pooled(device).pool_memory(pool)?;
        assert_eq!(
            (memory.used, memory.used_high, memory.reserved),
            (Bytes::ZERO, high.used_high, high.reserved),
            "it keeps all"
        );
        Ok(())
    })
}

fn allocations_are_disjoint_and_keep_their_contents(device: &mut dyn TestDevice) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let sizes = [1, 255, 512, 4097, 1 << 20, (3 << 20) + 1];
        let mut ranges = Vec::new();
        for size in sizes.map(Bytes) {
            let ptr = pooled(device).malloc_async(pool, size, StreamId::DEFAULT)?;
            assert!(ptr != DevicePtr::NULL && ptr.0.is_multiple_of(256), "{ptr}");
            ranges.push(MemoryRange::new(ptr, size));
        }
        for (range, tag) in ranges.iter().zip(1..) {
            device.fill(StreamId::DEFAULT, *range, Tag(tag))?;
        }
        for (range, tag) in ranges.iter().zip(1..) {
            device.verify(StreamId::DEFAULT, *range, Tag(tag))?;
        }
        ranges.sort_by_key(|range| range.start);
        assert!(
            ranges.is_sorted_by(|a, b| a.end() <= b.start),
            "{ranges:x?}"
        );
        for range in &ranges {
            let beyond = MemoryRange::new(range.start, range.len + Bytes(1));
            assert!(
                matches!(
                    device.fill(StreamId::DEFAULT, beyond, TAG),
                    Err(DeviceError::InvalidAccess { .. })
                ),
                "{beyond}"
            );
        }
        ranges
            .iter()
            .try_for_each(|range| pooled(device).free_async(range.start, StreamId::DEFAULT))
    })
}

fn a_pool_without_a_threshold_gives_unused_memory_back_at_a_wait(
    device: &mut dyn TestDevice,
) -> Outcome {
    with_pool(device, Bytes::ZERO, |device, pool| {
        let (stream, event) = (device.create_stream()?, device.create_event()?);
        type Wait<'a> = &'a dyn Fn(&mut dyn TestDevice) -> Outcome;
        let waits: [Wait<'_>; 3] = [
            &|device| device.synchronize_event(event),
            &|device| device.synchronize_stream(stream),
            &|device| device.synchronize(),
        ];
        for (index, wait) in waits.into_iter().enumerate() {
            let ptr = pooled(device).malloc_async(pool, Bytes::mib(20), stream)?;
            wait(device)?;
            assert!(
                reserved(device, pool)? >= Bytes::mib(20),
                "live memory stays reserved"
            );
            device.busy(stream, LONG)?;
            pooled(device).free_async(ptr, stream)?;
            device.record_event(event, stream)?;
            assert!(
                reserved(device, pool)? >= Bytes::mib(20),
                "the free has not taken its turn"
            );
            wait(device)?;
            assert_eq!(reserved(device, pool)?, Bytes::ZERO, "wait {index}");
        }
        device.destroy_event(event)?;
        device.destroy_stream(stream)
    })
}

fn a_pool_keeps_up_to_its_threshold_until_it_is_trimmed(device: &mut dyn TestDevice) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let ptr = pooled(device).malloc_async(pool, Bytes::mib(40), StreamId::DEFAULT)?;
        pooled(device).free_async(ptr, StreamId::DEFAULT)?;
        device.synchronize()?;
        let kept = reserved(device, pool)?;
        assert!(kept >= Bytes::mib(40));
        pooled(device).trim_pool(pool, kept)?;
        assert_eq!(reserved(device, pool)?, kept, "the memory to keep stays");
        pooled(device).trim_pool(pool, Bytes(1))?;
        assert!(reserved(device, pool)? >= Bytes(1));
        pooled(device).trim_pool(pool, Bytes::ZERO)?;
        assert_eq!(reserved(device, pool)?, Bytes::ZERO);
        Ok(())
    })
}

fn trimming_releases_only_memory_whose_free_has_completed(device: &mut dyn TestDevice) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let stream = device.create_stream()?;
        let kept = pooled(device).malloc_async(pool, Bytes::mib(10), stream)?;
        device.fill(stream, MemoryRange::new(kept, Bytes::mib(10)), TAG)?;
        let freed = pooled(device).malloc_async(pool, Bytes::mib(30), stream)?;
        device.busy(stream, LONG)?;
        pooled(device).free_async(freed, stream)?;
        device.synchronize_stream(stream)?;
        pooled(device).trim_pool(pool, Bytes::ZERO)?;
        assert!(reserved(device, pool)? >= Bytes::mib(10));
        device.verify(stream, MemoryRange::new(kept, Bytes::mib(10)), TAG)?;
        pooled(device).free_async(kept, stream)?;
        device.destroy_stream(stream)
    })
}

fn freed_memory_is_reused_on_its_stream_immediately(device: &mut dyn TestDevice) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let stream = device.create_stream()?;
        device.busy(stream, LONG)?;
        let first = pooled(device).malloc_async(pool, Bytes::mib(30), stream)?;
        let held = reserved(device, pool)?;
        device.fill(stream, MemoryRange::new(first, Bytes::mib(30)), TAG)?;
        pooled(device).free_async(first, stream)?;
        let second = pooled(device).malloc_async(pool, Bytes::mib(30), stream)?;
        assert_eq!(reserved(device, pool)?, held, "nothing more is needed");
        device.fill(stream, MemoryRange::new(second, Bytes::mib(30)), OTHER)?;
        device.verify(stream, MemoryRange::new(second, Bytes::mib(30)), OTHER)?;
        pooled(device).free_async(second, stream)?;
        device.destroy_stream(stream)
    })
}

fn freed_memory_is_reused_on_another_stream_only_after_an_event(
    device: &mut dyn TestDevice,
) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let (first, second, event) = (
            device.create_stream()?,
            device.create_stream()?,
            device.create_event()?,
        );
        let size = Bytes::mib(20);
        let written = pooled(device).malloc_async(pool, size, first)?;
        let held = reserved(device, pool)?;
        device.busy(first, LONG)?;
        device.fill(first, MemoryRange::new(written, size), TAG)?;
        pooled(device).free_async(written, first)?;
        let apart = pooled(device).malloc_async(pool, size, second)?;
        let more = reserved(device, pool)?;
        assert!(
            more.0 >= 2 * size.0,
            "nothing orders the streams, so each has its own memory: {more} after {held}"
        );
        device.fill(second, MemoryRange::new(apart, size), OTHER)?;
        device.record_event(event, first)?;
        device.wait_event(second, event)?;
        let behind = pooled(device).malloc_async(pool, size, second)?;
        assert_eq!(
            reserved(device, pool)?,
            more,
            "the event orders the allocation after the free"
        );
        device.fill(second, MemoryRange::new(behind, size), TAG)?;
        device.verify(second, MemoryRange::new(apart, size), OTHER)?;
        device.verify(second, MemoryRange::new(behind, size), TAG)?;
        for ptr in [apart, behind] {
            pooled(device).free_async(ptr, second)?;
        }
        device.destroy_event(event)?;
        device.destroy_stream(first)?;
        device.destroy_stream(second)
    })
}

fn out_of_memory_is_an_answer_that_changes_nothing(device: &mut dyn TestDevice) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let kept = pooled(device).malloc_async(pool, Bytes::mib(8), StreamId::DEFAULT)?;
        device.fill(
            StreamId::DEFAULT,
            MemoryRange::new(kept, Bytes::mib(8)),
            TAG,
        )?;
        let (free, leaks) = (free_bytes(device)?, device.leaks());
        for requested in [
            free + reserved(device, pool)?,
            device.info().total + Bytes(1),
            Bytes(u64::MAX),
        ] {
            let refused = pooled(device).malloc_async(pool, requested, StreamId::DEFAULT);
            assert_eq!(refused, Err(DeviceError::OutOfMemory { requested, free }));
            assert_eq!((free_bytes(device)?, device.leaks()), (free, leaks));
        }
        device.verify(
            StreamId::DEFAULT,
            MemoryRange::new(kept, Bytes::mib(8)),
            TAG,
        )?;
        pooled(device).free_async(kept, StreamId::DEFAULT)
    })
}

fn unused_memory_of_a_pool_makes_room_for_another_size(device: &mut dyn TestDevice) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let small =
            [(); 2].map(|()| pooled(device).malloc_async(pool, Bytes::mib(20), StreamId::DEFAULT));
        for ptr in small {
            pooled(device).free_async(ptr?, StreamId::DEFAULT)?;
        }
        device.synchronize()?;
        let large = pooled(device).malloc_async(pool, Bytes::mib(60), StreamId::DEFAULT)?;
        pooled(device).free_async(large, StreamId::DEFAULT)
    })
}

fn a_free_takes_its_turn_in_the_stream(device: &mut dyn TestDevice) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let stream = device.create_stream()?;
        let ptr = pooled(device).malloc_async(pool, Bytes::mib(2), stream)?;
        let start = device.now();
        device.busy(stream, Nanos::millis(200))?;
        device.fill(stream, MemoryRange::new(ptr, Bytes::mib(2)), TAG)?;
        pooled(device).free_async(ptr, stream)?;
        assert!(
            device.now().saturating_sub(start) < Nanos::millis(200),
            "the host does not wait"
        );
        device.synchronize_stream(stream)?;
        device.destroy_stream(stream)
    })
}

fn wrong_frees_are_errors(device: &mut dyn TestDevice) -> Outcome {
    let plain = device.malloc(Bytes::mib(2))?;
    with_pool(device, KEEP_ALL, |device, pool| {
        let ptr = pooled(device).malloc_async(pool, Bytes::mib(2), StreamId::DEFAULT)?;
        for bad in [DevicePtr::NULL, ptr.offset(Bytes(512)), plain] {
            let refused = pooled(device).free_async(bad, StreamId::DEFAULT);
            assert!(
                matches!(refused, Err(DeviceError::InvalidFree { ptr, .. }) if ptr == bad),
                "{refused:?}"
            );
        }
        let refused = device.free(ptr);
        assert!(
            matches!(refused, Err(DeviceError::InvalidFree { .. })),
            "{refused:?}"
        );
        pooled(device).free_async(ptr, StreamId::DEFAULT)?;
        let refused = pooled(device).free_async(ptr, StreamId::DEFAULT);
        assert!(
            matches!(refused, Err(DeviceError::DoubleFree { .. })),
            "{refused:?}"
        );
        let freed = MemoryRange::new(ptr, Bytes(8));
        assert!(matches!(
            device.fill(StreamId::DEFAULT, freed, TAG),
            Err(DeviceError::InvalidAccess { .. })
        ));
        device.synchronize()
    })?;
    device.free(plain)
}

fn a_pool_that_is_not_there_is_an_error(device: &mut dyn TestDevice) -> Outcome {
    let pool = pooled(device).create_pool(KEEP_ALL)?;
    pooled(device).destroy_pool(pool)?;
    let unknown = DeviceError::UnknownHandle {
        kind: "pool",
        number: pool.0,
    };
    assert_eq!(pooled(device).destroy_pool(pool), Err(unknown.clone()));
    assert_eq!(
        pooled(device).malloc_async(pool, Bytes(1), StreamId::DEFAULT),
        Err(unknown.clone())
    );
    assert_eq!(
        pooled(device).trim_pool(pool, Bytes::ZERO),
        Err(unknown.clone())
    );
    assert_eq!(pooled(device).pool_memory(pool), Err(unknown));
    let next = pooled(device).create_pool(KEEP_ALL)?;
    assert_ne!(next, pool, "numbers are never reused");
    pooled(device).destroy_pool(next)
}

fn a_pool_with_allocations_is_not_destroyed(device: &mut dyn TestDevice) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let ptr = pooled(device).malloc_async(pool, Bytes::mib(2), StreamId::DEFAULT)?;
        let refused = pooled(device).destroy_pool(pool);
        assert!(
            matches!(refused, Err(DeviceError::UnknownHandle { number, .. }) if number == pool.0),
            "{refused:?}"
        );
        device.fill(StreamId::DEFAULT, MemoryRange::new(ptr, Bytes::mib(2)), TAG)?;
        device.verify(StreamId::DEFAULT, MemoryRange::new(ptr, Bytes::mib(2)), TAG)?;
        assert_eq!((device.leaks().allocations, device.leaks().pools), (1, 1));
        pooled(device).free_async(ptr, StreamId::DEFAULT)
    })
}

fn pool_calls_are_counted_failed_ones_too(device: &mut dyn TestDevice) -> Outcome {
    with_pool(device, KEEP_ALL, |device, pool| {
        let ptr = pooled(device).malloc_async(pool, Bytes::mib(2), StreamId::DEFAULT)?;
        let too_much = device.info().total + Bytes(1);
        assert!(
            pooled(device)
                .malloc_async(pool, too_much, StreamId::DEFAULT)
                .is_err_and(|error| error.is_out_of_memory())
        );
        pooled(device).free_async(ptr, StreamId::DEFAULT)?;
        assert!(pooled(device).free_async(ptr, StreamId::DEFAULT).is_err());
        let calls = device.calls();
        assert_eq!(
            (calls.malloc_async, calls.free_async, calls.memory_calls()),
            (2, 2, 4)
        );
        Ok(())
    })
}
