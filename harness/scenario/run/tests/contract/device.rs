//! The contract of a [`Device`]: the promises of each call, on real and simulated hardware.
//!
//! Properties that only a strict device checks (races, use after free) are tested with that device.
//! Bodies get a device without allocations and free everything. Work that must still run when the
//! host looks is long enough for a busy machine.

use harness_allocator::device::{
    DeviceCalls, DeviceError, DevicePtr, EventId, Leaks, MemoryRange, StreamId, Tag, TestDevice,
};
use harness_allocator::units::{Bytes, Nanos};

use crate::{Case, Outcome};

type Call = fn(&mut dyn TestDevice) -> Outcome;

/// Long enough that the host can check while it runs, even under load.
const LONG: Nanos = Nanos::millis(100);

/// Each byte differs from its neighbors and from the bytes of [`OTHER`].
const TAG: Tag = Tag(0x8877_6655_4433_2211);
const OTHER: Tag = Tag(0x1122_3344_5566_7788);

macro_rules! bodies {
    ($($body:ident),* $(,)?) => { [$((stringify!($body), $body as Call)),*] };
}

pub(crate) fn cases() -> Vec<Case> {
    let bodies = bodies![
        a_fresh_device_has_nothing_leaked_and_no_calls,
        memory_adds_up,
        malloc_returns_aligned_addresses_that_do_not_overlap,
        free_gives_the_memory_back_exactly,
        oom_changes_nothing_and_reports_free_memory,
        the_memory_can_be_allocated_to_the_last_granule,
        freeing_twice_is_an_error,
        freeing_an_address_that_is_no_allocation_is_an_error,
        a_free_waits_for_work_in_flight,
        used_moves_by_the_charge_of_an_allocation,
        external_memory_takes_at_most_the_free_memory,
        an_event_never_recorded_is_done,
        an_event_is_done_when_the_work_in_front_of_it_is,
        recording_again_forgets_the_earlier_record,
        events_of_a_stream_are_done_in_order,
        streams_do_not_wait_for_one_another,
        a_wait_orders_streams,
        waiting_for_an_event_never_recorded_delays_nothing,
        a_queued_wait_outlives_its_event,
        elapsed_needs_both_events_done,
        elapsed_is_refused_for_an_event_that_keeps_no_time,
        elapsed_covers_the_work_between,
        destroying_a_stream_waits_for_its_work,
        a_destroyed_stream_is_an_error,
        a_destroyed_event_is_an_error,
        the_default_stream_stays,
        what_was_not_lent_is_not_released,
        a_fill_verifies_at_every_size_and_alignment,
        a_part_of_a_fill_verifies_at_every_multiple_of_eight,
        a_fill_changes_only_its_range,
        the_first_wrong_byte_is_named,
        an_event_makes_contents_visible_to_another_stream,
        a_queued_read_takes_its_turn_in_its_stream_and_the_host_does_not_wait,
        a_queued_read_of_wrong_contents_is_reported_once_by_its_stream,
        as_many_reads_as_one_likes_can_be_queued,
        calls_are_counted_failed_ones_too,
        leaks_are_counted_and_cleared,
        time_goes_on_over_work_that_is_waited_for,
        time_goes_on_while_the_host_sleeps,
    ];
    bodies
        .into_iter()
        .map(|(name, body)| Case {
            name: format!("device::{name}"),
            run: Box::new(body),
        })
        .collect()
}

fn free_bytes(device: &mut dyn TestDevice) -> Result<Bytes, DeviceError> {
    Ok(device.memory()?.free)
}

/// The allocatable part of free memory: whole granules.
fn whole_granules(device: &mut dyn TestDevice) -> Result<Bytes, DeviceError> {
    let (free, granule) = (free_bytes(device)?, device.info().granularity);
    Ok(Bytes(free.0 / granule.0 * granule.0))
}

fn assert_moved(device: &dyn TestDevice, what: &str, before: Bytes, after: Bytes, by: Bytes) {
    let tolerance = device.info().used_tolerance;
    let moved = Bytes(before.0.abs_diff(after.0));
    assert!(
        moved.0.abs_diff(by.0) <= tolerance.0,
        "{what} moved by {moved} ({before} to {after}), expected {by} give or take {tolerance}"
    );
}

fn at_least(what: &str, time: Nanos, least: Nanos) {
    // Timers of real devices are rounded.
    assert!(
        time.0 >= least.0 - least.0 / 100,
        "{what} is {time}, expected {least} or more"
    );
}

fn a_fresh_device_has_nothing_leaked_and_no_calls(device: &mut dyn TestDevice) -> Outcome {
    assert_eq!(device.leaks(), Leaks::default());
    assert_eq!(device.calls(), DeviceCalls::default());
    Ok(())
}

fn memory_adds_up(device: &mut dyn TestDevice) -> Outcome {
    let memory = device.memory()?;
    assert_eq!(memory.total, device.info().total);
    assert!(
        memory.free > Bytes::ZERO && memory.free <= memory.total,
        "{memory:?}"
    );
    assert!(
        memory.used >= memory.process.unwrap_or_default(),
        "{memory:?}"
    );
    assert_eq!(
        (memory.external_memory, device.free_memory()?),
        (Bytes::ZERO, memory.free)
    );
    let ptr = device.malloc(Bytes::mib(3))?;
    assert_eq!(
        (device.free_memory()?, device.memory()?.free),
        (memory.free - Bytes::mib(4), memory.free - Bytes::mib(4))
    );
    device.free(ptr)
}

fn malloc_returns_aligned_addresses_that_do_not_overlap(device: &mut dyn TestDevice) -> Outcome {
    let sizes = [
        1,
        511,
        512,
        4096,
        (2 << 20) - 1,
        2 << 20,
        (2 << 20) + 1,
        5 << 20,
    ];
    let mut ranges = Vec::new();
    for size in sizes.map(Bytes) {
        let ptr = device.malloc(size)?;
        assert!(ptr != DevicePtr::NULL && ptr.0.is_multiple_of(256), "{ptr}");
        ranges.push(MemoryRange::new(ptr, size));
    }
    ranges.sort_by_key(|range| range.start);
    assert!(
        ranges.is_sorted_by(|a, b| a.end() <= b.start),
        "{ranges:x?}"
    );
    ranges.iter().try_for_each(|range| device.free(range.start))
}

fn free_gives_the_memory_back_exactly(device: &mut dyn TestDevice) -> Outcome {
    let free = free_bytes(device)?;
    let (first, second) = (device.malloc(Bytes(1))?, device.malloc(Bytes::mib(7))?);
    assert!(free_bytes(device)? < free);
    device.free(first)?;
    device.free(second)?;
    assert_eq!(free_bytes(device)?, free);
    Ok(())
}

fn oom_changes_nothing_and_reports_free_memory(device: &mut dyn TestDevice) -> Outcome {
    let ptr = device.malloc(Bytes::mib(4))?;
    let (memory, leaks) = (device.memory()?, device.leaks());
    for requested in [
        memory.free + Bytes(1),
        memory.total,
        Bytes::gib(1 << 20),
        Bytes(u64::MAX),
    ] {
        assert_eq!(
            device.malloc(requested),
            Err(DeviceError::OutOfMemory {
                requested,
                free: memory.free
            })
        );
        assert_eq!((free_bytes(device)?, device.leaks()), (memory.free, leaks));
    }
    device.free(ptr)
}

fn the_memory_can_be_allocated_to_the_last_granule(device: &mut dyn TestDevice) -> Outcome {
    let granule = device.info().granularity;
    let count = whole_granules(device)?.0 / granule.0;
    let mut all = (0..count)
        .map(|_| device.malloc(granule))
        .collect::<Result<Vec<_>, _>>()?;
    assert!(
        device
            .malloc(Bytes(1))
            .is_err_and(|error| error.is_out_of_memory()),
        "one more than fits"
    );
    for index in [0, all.len() / 2, all.len() - 1] {
        device.free(all[index])?;
        all[index] = device.malloc(granule)?;
        assert!(
            device
                .malloc(granule)
                .is_err_and(|error| error.is_out_of_memory()),
            "only what was freed fits again"
        );
    }
    all.iter().try_for_each(|ptr| device.free(*ptr))?;
    let most = whole_granules(device)?;
    assert_eq!(most, Bytes(count * granule.0));
    let whole = device.malloc(most)?;
    device.free(whole)
}

fn freeing_twice_is_an_error(device: &mut dyn TestDevice) -> Outcome {
    let (kept, freed) = (device.malloc(Bytes::mib(2))?, device.malloc(Bytes::mib(2))?);
    device.free(freed)?;
    let (free, leaks) = (free_bytes(device)?, device.leaks());
    let error = device.free(freed);
    assert!(
        matches!(error,
            Err(DeviceError::DoubleFree { ptr, .. } | DeviceError::InvalidFree { ptr, .. })
            if ptr == freed),
        "{error:?}"
    );
    assert_eq!(
        (free_bytes(device)?, device.leaks()),
        (free, leaks),
        "nothing changed"
    );
    device.free(kept)
}

fn freeing_an_address_that_is_no_allocation_is_an_error(device: &mut dyn TestDevice) -> Outcome {
    let ptr = device.malloc(Bytes::mib(4))?;
    let free = free_bytes(device)?;
    for wrong in [
        ptr.offset(Bytes(256)),
        ptr.offset(Bytes::mib(2)),
        ptr.offset(Bytes::mib(4)),
        DevicePtr::NULL,
        DevicePtr(4096),
    ] {
        let error = device.free(wrong);
        assert!(
            matches!(error, Err(DeviceError::InvalidFree { ptr, .. }) if ptr == wrong),
            "{wrong}: {error:?}"
        );
        assert_eq!(free_bytes(device)?, free, "nothing changed");
    }
    device.free(ptr)
}

fn a_free_waits_for_work_in_flight(device: &mut dyn TestDevice) -> Outcome {
    let ptr = device.malloc(Bytes::mib(2))?;
    let stream = device.create_stream()?;
    let start = device.now();
    device.busy(stream, LONG)?;
    device.fill(stream, MemoryRange::new(ptr, Bytes::mib(2)), TAG)?;
    device.free(ptr)?;
    at_least(
        "the time over the free",
        device.now().saturating_sub(start),
        LONG,
    );
    device.destroy_stream(stream)
}

fn used_moves_by_the_charge_of_an_allocation(device: &mut dyn TestDevice) -> Outcome {
    let before = device.memory()?;
    let size = Bytes::mib(16);
    let ptr = device.malloc(size)?;
    let during = device.memory()?;
    assert_moved(device, "device used", before.used, during.used, size);
    assert_eq!(before.free - during.free, size);
    if let (Some(before), Some(during)) = (before.process, during.process) {
        assert_moved(device, "the process's memory", before, during, size);
    }
    assert_eq!(before.context_overhead, during.context_overhead);
    device.free(ptr)?;
    let used = device.memory()?.used;
    assert_moved(device, "device used", before.used, used, Bytes::ZERO);
    Ok(())
}

fn external_memory_takes_at_most_the_free_memory(device: &mut dyn TestDevice) -> Outcome {
    let ptr = device.malloc(Bytes::mib(4))?;
    let before = device.memory()?;
    for wanted in [
        Bytes::mib(8),
        Bytes::mib(24),
        Bytes::mib(2),
        Bytes::gib(1 << 10),
    ] {
        let held = device.set_external_memory(wanted)?;
        assert!(held <= wanted && held <= before.free, "{held} of {wanted}");
        assert!(
            held == wanted || held == before.free,
            "at most the free memory: {held} of {wanted}"
        );
        let memory = device.memory()?;
        assert_eq!(
            (memory.external_memory, memory.free),
            (held, before.free - held)
        );
        assert_moved(device, "device used", before.used, memory.used, held);
    }
    assert!(
        device
            .malloc(Bytes(1))
            .is_err_and(|error| error.is_out_of_memory()),
        "others have everything"
    );
    assert_eq!(device.leaks().allocations, 1, "external memory is no leak");
    assert_eq!(device.set_external_memory(Bytes::ZERO)?, Bytes::ZERO);
    assert_eq!(free_bytes(device)?, before.free);
    device.free(ptr)
}

fn an_event_never_recorded_is_done(device: &mut dyn TestDevice) -> Outcome {
    let event = device.create_event()?;
    assert!(device.event_done(event)?);
    device.synchronize_event(event)?;
    device.destroy_event(event)
}

/// Two streams and two events, destroyed afterward.
fn with_handles(
    device: &mut dyn TestDevice,
    body: impl FnOnce(&mut dyn TestDevice, [StreamId; 2], [EventId; 2]) -> Outcome,
) -> Outcome {
    let streams = [device.create_stream()?, device.create_stream()?];
    let events = [device.create_event()?, device.create_event()?];
    body(device, streams, events)?;
    events
        .into_iter()
        .try_for_each(|event| device.destroy_event(event))?;
    streams
        .into_iter()
        .try_for_each(|stream| device.destroy_stream(stream))
}

fn an_event_is_done_when_the_work_in_front_of_it_is(device: &mut dyn TestDevice) -> Outcome {
    with_handles(device, |device, [stream, _], [event, _]| {
        type Wait<'a> = &'a dyn Fn(&mut dyn TestDevice) -> Outcome;
        let waits: [Wait<'_>; 3] = [
            &|device| device.synchronize_event(event),
            &|device| device.synchronize_stream(stream),
            &|device| device.synchronize(),
        ];
        for wait in waits {
            device.busy(stream, LONG)?;
            device.record_event(event, stream)?;
            assert!(
                !device.event_done(event)?,
                "the earlier work is still running"
            );
            wait(device)?;
            assert!(device.event_done(event)?, "it was waited for");
        }
        Ok(())
    })
}

fn recording_again_forgets_the_earlier_record(device: &mut dyn TestDevice) -> Outcome {
    with_handles(device, |device, [busy, idle], [event, end]| {
        device.busy(busy, LONG)?;
        device.record_event(event, busy)?;
        device.record_event(end, busy)?;
        device.record_event(event, idle)?;
        device.synchronize_event(event)?;
        assert!(device.event_done(event)?);
        assert!(
            !device.event_done(end)?,
            "waiting for the event was not waiting for where it was recorded first"
        );
        device.record_event(event, busy)?;
        assert!(
            !device.event_done(event)?,
            "that it was done once counts no more"
        );
        device.synchronize_event(event)
    })
}

fn events_of_a_stream_are_done_in_order(device: &mut dyn TestDevice) -> Outcome {
    with_handles(device, |device, [stream, _], [first, second]| {
        device.busy(stream, Nanos::millis(1))?;
        device.record_event(first, stream)?;
        device.busy(stream, LONG)?;
        device.record_event(second, stream)?;
        device.synchronize_event(first)?;
        assert!(device.event_done(first)? && !device.event_done(second)?);
        device.synchronize_event(second)?;
        assert!(device.event_done(first)?);
        Ok(())
    })
}

fn streams_do_not_wait_for_one_another(device: &mut dyn TestDevice) -> Outcome {
    with_handles(device, |device, [busy, idle], [end, event]| {
        device.busy(busy, LONG)?;
        device.record_event(end, busy)?;
        for stream in [idle, StreamId::DEFAULT] {
            device.record_event(event, stream)?;
            device.synchronize_stream(stream)?;
            assert!(
                device.event_done(event)? && !device.event_done(end)?,
                "stream {} waited for another",
                stream.0
            );
        }
        device.synchronize()
    })
}

fn a_wait_orders_streams(device: &mut dyn TestDevice) -> Outcome {
    with_handles(device, |device, [first, second], [event, end]| {
        device.busy(first, LONG)?;
        device.record_event(event, first)?;
        device.wait_event(second, event)?;
        device.record_event(end, second)?;
        assert!(
            !device.event_done(end)?,
            "the second stream waits for the first"
        );
        device.synchronize_event(end)?;
        assert!(device.event_done(event)?, "and so is behind it");
        Ok(())
    })
}

fn waiting_for_an_event_never_recorded_delays_nothing(device: &mut dyn TestDevice) -> Outcome {
    with_handles(device, |device, [stream, _], [never, end]| {
        device.wait_event(stream, never)?;
        device.record_event(end, stream)?;
        device.synchronize_event(end)?;
        assert!(device.event_done(end)?);
        Ok(())
    })
}

fn a_queued_wait_outlives_its_event(device: &mut dyn TestDevice) -> Outcome {
    with_handles(device, |device, [first, second], [end, _]| {
        let event = device.create_event()?;
        device.busy(first, LONG)?;
        device.record_event(event, first)?;
        device.wait_event(second, event)?;
        device.destroy_event(event)?;
        device.record_event(end, second)?;
        assert!(!device.event_done(end)?, "the wait is still queued");
        device.synchronize_event(end)
    })
}

/// Runs with a stream and two timed events, and destroys them.
fn with_timed_events(
    device: &mut dyn TestDevice,
    body: impl FnOnce(&mut dyn TestDevice, StreamId, [EventId; 2]) -> Outcome,
) -> Outcome {
    with_handles(device, |device, [stream, _], _| {
        let events = [device.create_timed_event()?, device.create_timed_event()?];
        body(device, stream, events)?;
        events
            .into_iter()
            .try_for_each(|event| device.destroy_event(event))
    })
}

fn elapsed_needs_both_events_done(device: &mut dyn TestDevice) -> Outcome {
    with_timed_events(device, |device, stream, [start, end]| {
        assert_eq!(
            device.elapsed(start, end),
            Err(DeviceError::NotReady(start.0)),
            "never recorded"
        );
        device.record_event(start, stream)?;
        device.synchronize_event(start)?;
        assert_eq!(
            device.elapsed(start, end),
            Err(DeviceError::NotReady(end.0)),
            "never recorded"
        );
        device.busy(stream, LONG)?;
        device.record_event(end, stream)?;
        assert_eq!(
            device.elapsed(start, end),
            Err(DeviceError::NotReady(end.0)),
            "not done"
        );
        device.synchronize_event(end)?;
        device.elapsed(start, end).map(drop)
    })
}

fn elapsed_is_refused_for_an_event_that_keeps_no_time(device: &mut dyn TestDevice) -> Outcome {
    with_timed_events(device, |device, stream, [timed, _]| {
        let plain = device.create_event()?;
        for event in [plain, timed] {
            device.record_event(event, stream)?;
            device.synchronize_event(event)?;
        }
        let refused = DeviceError::UnknownHandle {
            kind: "timed event",
            number: plain.0,
        };
        assert_eq!(device.elapsed(plain, timed), Err(refused.clone()));
        assert_eq!(device.elapsed(timed, plain), Err(refused));
        device.destroy_event(plain)
    })
}

fn elapsed_covers_the_work_between(device: &mut dyn TestDevice) -> Outcome {
    with_timed_events(device, |device, stream, [start, end]| {
        for duration in [Nanos::micros(500), Nanos::millis(10)] {
            device.record_event(start, stream)?;
            device.busy(stream, duration)?;
            device.record_event(end, stream)?;
            device.synchronize_event(end)?;
            at_least(
                "the time between the events",
                device.elapsed(start, end)?,
                duration,
            );
        }
        Ok(())
    })
}

fn destroying_a_stream_waits_for_its_work(device: &mut dyn TestDevice) -> Outcome {
    let stream = device.create_stream()?;
    let start = device.now();
    device.busy(stream, LONG)?;
    device.destroy_stream(stream)?;
    at_least("the time over it", device.now().saturating_sub(start), LONG);
    Ok(())
}

fn a_destroyed_stream_is_an_error(device: &mut dyn TestDevice) -> Outcome {
    let (ptr, event, stream) = (
        device.malloc(Bytes::mib(2))?,
        device.create_event()?,
        device.create_stream()?,
    );
    device.destroy_stream(stream)?;
    let next = device.create_stream()?;
    assert_ne!(next, stream, "numbers of streams are never reused");
    let range = MemoryRange::new(ptr, Bytes(64));
    let results = [
        device.destroy_stream(stream),
        device.record_event(event, stream),
        device.wait_event(stream, event),
        device.synchronize_stream(stream),
        device.busy(stream, Nanos::micros(1)),
        device.fill(stream, range, TAG),
        device.verify(stream, range, TAG),
        device.verify_later(stream, range, TAG),
        device.finish_verifications(stream),
    ];
    for (index, result) in results.into_iter().enumerate() {
        assert_eq!(
            result,
            Err(DeviceError::UnknownHandle {
                kind: "stream",
                number: stream.0
            }),
            "call {index}"
        );
    }
    device.destroy_stream(next)?;
    device.destroy_event(event)?;
    device.free(ptr)
}

fn a_destroyed_event_is_an_error(device: &mut dyn TestDevice) -> Outcome {
    let event = device.create_event()?;
    device.destroy_event(event)?;
    let results = [
        device.destroy_event(event),
        device.record_event(event, StreamId::DEFAULT),
        device.event_done(event).map(drop),
        device.wait_event(StreamId::DEFAULT, event),
        device.synchronize_event(event),
    ];
    for (index, result) in results.into_iter().enumerate() {
        assert_eq!(
            result,
            Err(DeviceError::UnknownHandle {
                kind: "event",
                number: event.0
            }),
            "call {index}"
        );
    }
    assert!(device.elapsed(event, event).is_err());
    Ok(())
}

fn the_default_stream_stays(device: &mut dyn TestDevice) -> Outcome {
    let error = device.destroy_stream(StreamId::DEFAULT);
    assert!(
        matches!(error, Err(DeviceError::UnknownHandle { number: 0, .. })),
        "{error:?}"
    );
    device.busy(StreamId::DEFAULT, Nanos::micros(10))?;
    device.synchronize_stream(StreamId::DEFAULT)
}

fn what_was_not_lent_is_not_released(device: &mut dyn TestDevice) -> Outcome {
    let (kept, gone) = (device.create_stream()?, device.create_stream()?);
    device.destroy_stream(gone)?;
    for stream in [StreamId::DEFAULT, kept, gone, StreamId(u32::MAX)] {
        let refused = device.release_stream(stream);
        assert!(
            matches!(refused, Err(DeviceError::UnknownHandle { number, .. }) if number == stream.0),
            "{refused:?}"
        );
    }
    device.busy(kept, Nanos::ZERO)?;
    device.destroy_stream(kept)
}

fn a_fill_verifies_at_every_size_and_alignment(device: &mut dyn TestDevice) -> Outcome {
    let ptr = device.malloc(Bytes::mib(4))?;
    for len in [1, 2, 3, 7, 8, 9, 15, 63, 64, 4097, (1 << 20) + 3] {
        for offset in [0, 1, 3, 4, 8, 13] {
            let range = MemoryRange::new(ptr.offset(Bytes(offset)), Bytes(len));
            device.fill(StreamId::DEFAULT, range, TAG)?;
            device.verify(StreamId::DEFAULT, range, TAG)?;
        }
    }
    let whole = MemoryRange::new(ptr, Bytes::mib(4));
    device.fill(StreamId::DEFAULT, whole, OTHER)?;
    device.verify(StreamId::DEFAULT, whole, OTHER)?;
    device.free(ptr)
}

fn a_part_of_a_fill_verifies_at_every_multiple_of_eight(device: &mut dyn TestDevice) -> Outcome {
    let ptr = device.malloc(Bytes::mib(2))?;
    let start = ptr.offset(Bytes(5));
    device.fill(StreamId::DEFAULT, MemoryRange::new(start, Bytes(4096)), TAG)?;
    for offset in [0, 8, 16, 1000, 4088] {
        for len in [1, 5, 8, 4096 - offset] {
            let part = MemoryRange::new(start.offset(Bytes(offset)), Bytes(len.min(4096 - offset)));
            device.verify(StreamId::DEFAULT, part, TAG)?;
        }
    }
    let shifted = MemoryRange::new(start.offset(Bytes(4)), Bytes(8));
    assert!(
        matches!(
            device.verify(StreamId::DEFAULT, shifted, TAG),
            Err(DeviceError::Corrupted { .. })
        ),
        "half a word on"
    );
    device.free(ptr)
}

fn a_fill_changes_only_its_range(device: &mut dyn TestDevice) -> Outcome {
    let ptr = device.malloc(Bytes::mib(2))?;
    let range = |offset, len| MemoryRange::new(ptr.offset(Bytes(offset)), Bytes(len));
    device.fill(StreamId::DEFAULT, range(0, 1024), TAG)?;
    device.fill(StreamId::DEFAULT, range(101, 37), OTHER)?;
    device.verify(StreamId::DEFAULT, range(0, 101), TAG)?;
    device.verify(StreamId::DEFAULT, range(101, 37), OTHER)?;
    device.verify(StreamId::DEFAULT, range(144, 880), TAG)?;
    // When two fills overlap, the second continues with the words of the first one, so together
    // they verify as one.
    let from_the_third_byte = Tag(TAG.0.rotate_right(16));
    device.fill(StreamId::DEFAULT, range(138, 6), from_the_third_byte)?;
    device.verify(StreamId::DEFAULT, range(138, 886), from_the_third_byte)?;
    device.free(ptr)
}

fn the_first_wrong_byte_is_named(device: &mut dyn TestDevice) -> Outcome {
    let ptr = device.malloc(Bytes::mib(2))?;
    let range = MemoryRange::new(ptr, Bytes(1 << 20));
    for offset in [0, 1, 7, 8, 1000, 65_537, (1 << 20) - 1] {
        device.fill(StreamId::DEFAULT, range, TAG)?;
        let at = ptr.offset(Bytes(offset));
        device.fill(StreamId::DEFAULT, MemoryRange::new(at, Bytes(1)), Tag(0))?;
        match device.verify(StreamId::DEFAULT, range, TAG) {
            Err(DeviceError::Corrupted {
                range: told,
                at: wrong,
                expected,
                found,
            }) => {
                assert_eq!((told, wrong, expected), (range, at, TAG.0));
                assert!(!found.is_empty());
            }
            other => panic!("a wrong byte at {offset} gives {other:?}"),
        }
    }
    device.free(ptr)
}

fn an_event_makes_contents_visible_to_another_stream(device: &mut dyn TestDevice) -> Outcome {
    with_handles(device, |device, [writer, reader], [event, _]| {
        let ptr = device.malloc(Bytes::mib(8))?;
        let range = MemoryRange::new(ptr, Bytes::mib(8));
        device.busy(writer, Nanos::millis(5))?;
        device.fill(writer, range, TAG)?;
        device.record_event(event, writer)?;
        device.wait_event(reader, event)?;
        device.verify(reader, range, TAG)?;
        device.fill(reader, range, OTHER)?;
        device.synchronize_stream(reader)?;
        device.verify(writer, range, OTHER)?;
        device.free(ptr)
    })
}

/// The read observes neither the contents at queue time nor those when the result is requested, and
/// the memory is freed before that.
fn a_queued_read_takes_its_turn_in_its_stream_and_the_host_does_not_wait(
    device: &mut dyn TestDevice,
) -> Outcome {
    let (stream, ptr) = (device.create_stream()?, device.malloc(Bytes::mib(2))?);
    let range = MemoryRange::new(ptr.offset(Bytes(3)), Bytes(4099));
    device.fill(stream, range, OTHER)?;
    device.synchronize_stream(stream)?;
    let start = device.now();
    device.busy(stream, LONG)?;
    device.fill(stream, range, TAG)?;
    device.verify_later(stream, range, TAG)?;
    device.fill(stream, range, OTHER)?;
    let queued = device.now().saturating_sub(start);
    assert!(queued < LONG, "{queued} to queue work after work of {LONG}");
    device.finish_verifications(stream)?;
    at_least(
        "the time until the read is done",
        device.now().saturating_sub(start),
        LONG,
    );
    device.synchronize_stream(stream)?;
    device.verify_later(stream, range, OTHER)?;
    device.synchronize_stream(stream)?;
    device.free(ptr)?;
    device.finish_verifications(stream)?;
    device.finish_verifications(stream)?;
    device.destroy_stream(stream)
}

fn a_queued_read_of_wrong_contents_is_reported_once_by_its_stream(
    device: &mut dyn TestDevice,
) -> Outcome {
    with_handles(device, |device, [stream, other], [_, _]| {
        let ptr = device.malloc(Bytes::mib(2))?;
        let range = MemoryRange::new(ptr.offset(Bytes(5)), Bytes(70_001));
        device.fill(stream, range, TAG)?;
        let at = range.start.offset(Bytes(65_537));
        device.fill(stream, MemoryRange::new(at, Bytes(1)), Tag(0))?;
        device.synchronize_stream(stream)?;
        let part = MemoryRange::new(range.start, Bytes(65_536));
        device.verify_later(stream, part, TAG)?;
        device.verify_later(stream, range, TAG)?;
        device.verify_later(other, part, TAG)?;
        device.verify_later(stream, part, OTHER)?;
        device.finish_verifications(other)?;
        match device.finish_verifications(stream) {
            Err(DeviceError::Corrupted {
                range: told,
                at: wrong,
                expected,
                found,
            }) => {
                assert_eq!(
                    (told, wrong, expected),
                    (range, at, TAG.0),
                    "the first read that met it"
                );
                assert!(!found.is_empty());
            }
            answer => panic!("a wrong byte gives {answer:?}"),
        }
        device.finish_verifications(stream)?;
        device.free(ptr)
    })
}

/// More than a device tracks at a time. The first one meets wrong contents.
fn as_many_reads_as_one_likes_can_be_queued(device: &mut dyn TestDevice) -> Outcome {
    with_handles(device, |device, [first, second], [_, _]| {
        let ptr = device.malloc(Bytes::mib(2))?;
        let range = MemoryRange::new(ptr, Bytes(64));
        device.fill(first, range, TAG)?;
        device.synchronize_stream(first)?;
        device.verify_later(first, range, OTHER)?;
        for _ in 0..700 {
            device.verify_later(second, range, TAG)?;
            device.verify_later(first, range, TAG)?;
        }
        device.finish_verifications(second)?;
        let told = device.finish_verifications(first);
        assert!(
            matches!(told, Err(DeviceError::Corrupted { expected, .. }) if expected == OTHER.0),
            "{told:?}"
        );
        device.free(ptr)
    })
}

fn calls_are_counted_failed_ones_too(device: &mut dyn TestDevice) -> Outcome {
    let (event, stream) = (device.create_event()?, device.create_stream()?);
    let ptr = device.malloc(Bytes::mib(2))?;
    let too_much = device.info().total + Bytes(1);
    assert!(
        device
            .malloc(too_much)
            .is_err_and(|error| error.is_out_of_memory())
    );
    device.free(ptr)?;
    assert!(device.free(DevicePtr::NULL).is_err());
    for _ in 0..3 {
        device.record_event(event, stream)?;
    }
    device.synchronize_event(event)?;
    device.synchronize_stream(stream)?;
    device.synchronize()?;
    for _ in 0..4 {
        device.event_done(event)?;
    }
    device.destroy_event(event)?;
    device.destroy_stream(stream)?;
    let expected = DeviceCalls {
        malloc: 2,
        malloc_failures: 1,
        free: 2,
        event_record: 3,
        event_query: 4,
        synchronize: 3,
        ..DeviceCalls::default()
    };
    assert_eq!(device.calls(), expected);
    Ok(())
}

fn leaks_are_counted_and_cleared(device: &mut dyn TestDevice) -> Outcome {
    let (first, second) = (device.malloc(Bytes(1))?, device.malloc(Bytes::mib(3))?);
    let (stream, event) = (device.create_stream()?, device.create_event()?);
    let granule = device.info().granularity;
    let bytes = [Bytes(1), Bytes::mib(3)]
        .iter()
        .filter_map(|size| size.checked_round_up(granule))
        .sum();
    assert_eq!(
        device.leaks(),
        Leaks {
            allocations: 2,
            reservations: 0,
            pools: 0,
            bytes,
            streams: 1,
            events: 1,
            host: 0
        }
    );
    device.free(first)?;
    device.destroy_event(event)?;
    assert_eq!(
        device.leaks(),
        Leaks {
            allocations: 1,
            reservations: 0,
            pools: 0,
            bytes: Bytes::mib(4),
            streams: 1,
            events: 0,
            host: 0
        }
    );
    device.free(second)?;
    device.destroy_stream(stream)?;
    assert!(device.leaks().is_empty());
    Ok(())
}

fn time_goes_on_while_the_host_sleeps(device: &mut dyn TestDevice) -> Outcome {
    let start = device.now();
    device.sleep(LONG);
    at_least("the time over it", device.now().saturating_sub(start), LONG);
    Ok(())
}

fn time_goes_on_over_work_that_is_waited_for(device: &mut dyn TestDevice) -> Outcome {
    let stream = device.create_stream()?;
    let mut last = device.now();
    for duration in [Nanos::micros(100), Nanos::millis(2), Nanos::millis(20)] {
        device.busy(stream, duration)?;
        assert!(device.now() >= last, "time goes back");
        device.synchronize_stream(stream)?;
        let now = device.now();
        at_least("the time over it", now.saturating_sub(last), duration);
        last = now;
    }
    device.destroy_stream(stream)
}
