//! The contract of a [`MappedDevice`]: addresses and physical memory apart, on hardware and
//! simulated alike.
//!
//! Bodies get a device with nothing reserved and give everything back. Memory may be unmapped once
//! the host has waited for the work on it; before that a simulated device refuses, and a GPU's
//! context breaks.

use harness_allocator::device::{
    Clock, DeviceCalls, DeviceError, DevicePtr, EventId, Leaks, MappedDevice, MemoryRange,
    StreamId, Tag, TestDevice,
};
use harness_allocator::units::{Bytes, Nanos};

use crate::{Case, Outcome, is_made_for_tests};

type Call = fn(&mut dyn TestDevice) -> Outcome;

const TAG: Tag = Tag(0x8877_6655_4433_2211);
const OTHER: Tag = Tag(0x1122_3344_5566_7788);
/// The page size of most bodies.
const PAGE: Bytes = Bytes::mib(2);

macro_rules! bodies {
    ($($body:ident),* $(,)?) => { [$((stringify!($body), $body as Call)),*] };
}

pub(crate) fn cases() -> Vec<Case> {
    let bodies = bodies![
        a_reservation_takes_addresses_and_no_memory,
        reservations_do_not_overlap,
        a_mapping_takes_its_pages_to_the_byte_and_unmapping_gives_them_back,
        reservations_and_pages_are_whole_granules,
        a_page_that_cannot_be_had_takes_those_before_it_back,
        the_memory_can_be_mapped_to_the_last_granule,
        mapping_mapped_memory_is_an_error,
        only_reserved_addresses_are_mapped,
        half_a_page_is_not_unmapped,
        a_reservation_with_pages_is_not_given_back,
        releasing_unreserved_addresses_is_an_error,
        contents_survive_changes_in_their_neighbors,
        pages_side_by_side_are_one_range,
        memory_that_is_not_mapped_is_not_accessed,
        memory_is_unmapped_once_the_host_has_waited_for_its_work,
        memory_with_work_in_flight_is_not_unmapped,
        more_addresses_than_there_are_is_out_of_memory,
        allocations_and_pages_share_one_memory,
        leaks_of_reservations_and_pages_are_counted,
        pages_are_counted_as_calls,
    ];
    let case = |(name, body): (&str, Call)| Case {
        name: format!("mapped::{name}"),
        run: Box::new(move |device| {
            if has_mapping(device) {
                body(device)
            } else {
                Ok(())
            }
        }),
    };
    bodies.into_iter().map(case).collect()
}

fn has_mapping(device: &mut dyn TestDevice) -> bool {
    let has = device.mapped().is_some();
    assert!(
        has || !is_made_for_tests(device),
        "a device made for these tests has mapping"
    );
    has
}

fn mapped(device: &mut dyn TestDevice) -> &mut dyn MappedDevice {
    device
        .mapped()
        .expect("the device has mapping, as was asked before")
}

fn free_bytes(device: &mut dyn TestDevice) -> Result<Bytes, DeviceError> {
    Ok(device.memory()?.free)
}

fn range(start: DevicePtr, offset: Bytes, len: Bytes) -> MemoryRange {
    MemoryRange::new(start.offset(offset), len)
}

/// Reserves addresses and releases them afterward. The body must unmap everything.
fn with_reservation(
    device: &mut dyn TestDevice,
    size: Bytes,
    body: impl FnOnce(&mut dyn TestDevice, DevicePtr) -> Outcome,
) -> Outcome {
    let start = mapped(device).reserve(size)?;
    body(device, start)?;
    mapped(device).unreserve(start)
}

fn invalid_free(result: Outcome, at: DevicePtr) {
    assert!(
        matches!(&result, Err(DeviceError::InvalidFree { ptr, .. }) if *ptr == at),
        "{result:?}"
    );
}

fn invalid_access(result: Outcome, of: MemoryRange) {
    assert!(
        matches!(&result, Err(DeviceError::InvalidAccess { range, .. }) if *range == of),
        "{result:?}"
    );
}

fn a_reservation_takes_addresses_and_no_memory(device: &mut dyn TestDevice) -> Outcome {
    let before = device.memory()?;
    // More addresses than memory, as for a segment that can grow to the whole device.
    let size = Bytes(before.total.0 * 2)
        .checked_round_up(PAGE)
        .expect("it is no more than a device's memory twice");
    with_reservation(device, size, |device, start| {
        assert!(
            start != DevicePtr::NULL && start.0.is_multiple_of(device.info().granularity.0),
            "{start}"
        );
        assert_eq!(
            (device.memory()?.free, device.memory()?.used),
            (before.free, before.used)
        );
        Ok(())
    })
}

fn reservations_do_not_overlap(device: &mut dyn TestDevice) -> Outcome {
    let sizes = [Bytes::mib(2), Bytes::mib(40), Bytes::mib(6), Bytes::gib(1)];
    let mut ranges = Vec::new();
    for size in sizes {
        ranges.push(MemoryRange::new(mapped(device).reserve(size)?, size));
    }
    let ptr = device.malloc(Bytes::mib(2))?;
    ranges.push(MemoryRange::new(ptr, Bytes::mib(2)));
    ranges.sort_by_key(|range| range.start);
    assert!(
        ranges.is_sorted_by(|a, b| a.end() <= b.start),
        "{ranges:x?}"
    );
    device.free(ptr)?;
    ranges
        .iter()
        .filter(|range| range.start != ptr)
        .try_for_each(|range| mapped(device).unreserve(range.start))
}

fn a_mapping_takes_its_pages_to_the_byte_and_unmapping_gives_them_back(
    device: &mut dyn TestDevice,
) -> Outcome {
    with_reservation(device, Bytes::mib(40), |device, start| {
        let before = device.memory()?;
        let tolerance = device.info().used_tolerance.0;
        let mut held = Bytes::ZERO;
        for (offset, len, page) in [(0, 20, 20), (20, 4, 2), (30, 6, 6)] {
            let whole = range(start, Bytes::mib(offset), Bytes::mib(len));
            mapped(device).map(whole, Bytes::mib(page))?;
            held += whole.len;
            let now = device.memory()?;
            assert_eq!(now.free, before.free - held);
            assert!(
                (now.used - before.used).0.abs_diff(held.0) <= tolerance,
                "{} for {held}",
                now.used - before.used
            );
        }
        for (offset, len) in [(20, 2), (0, 20), (30, 6), (22, 2)] {
            mapped(device).unmap(range(start, Bytes::mib(offset), Bytes::mib(len)))?;
            held -= Bytes::mib(len);
            assert_eq!(free_bytes(device)?, before.free - held);
        }
        Ok(())
    })
}

fn reservations_and_pages_are_whole_granules(device: &mut dyn TestDevice) -> Outcome {
    for size in [Bytes::ZERO, Bytes(PAGE.0 - 1), Bytes(PAGE.0 + 512)] {
        assert!(
            matches!(
                mapped(device).reserve(size),
                Err(DeviceError::Driver { .. })
            ),
            "{size}"
        );
    }
    with_reservation(device, Bytes::mib(8), |device, start| {
        let free = free_bytes(device)?;
        let whole = range(start, Bytes::ZERO, Bytes::mib(6));
        for (bad, page) in [
            (whole, Bytes::mib(4)),
            (whole, Bytes::ZERO),
            (whole, Bytes::mib(3)),
            (range(start, Bytes::mib(1), PAGE), PAGE),
            (range(start, Bytes::ZERO, Bytes::ZERO), PAGE),
        ] {
            invalid_access(mapped(device).map(bad, page), bad);
        }
        assert_eq!(free_bytes(device)?, free);
        Ok(())
    })
}

fn a_page_that_cannot_be_had_takes_those_before_it_back(device: &mut dyn TestDevice) -> Outcome {
    let free = free_bytes(device)?;
    let fitting = free.0 / PAGE.0;
    let size = Bytes((fitting + 3) * PAGE.0);
    with_reservation(device, size, |device, start| {
        let (before, leaks) = (device.calls(), device.leaks());
        let all = range(start, Bytes::ZERO, size);
        assert_eq!(
            mapped(device).map(all, PAGE),
            Err(DeviceError::OutOfMemory {
                requested: size,
                free
            })
        );
        assert_eq!(
            (free_bytes(device)?, device.leaks()),
            (free, leaks),
            "nothing of it stays"
        );
        let calls = device.calls();
        assert_eq!(
            (calls.create - before.create, calls.release - before.release),
            (fitting + 1, fitting),
            "the last one was refused"
        );
        invalid_access(
            device.fill(StreamId::DEFAULT, range(start, Bytes::ZERO, PAGE), TAG),
            range(start, Bytes::ZERO, PAGE),
        );
        let most = range(start, Bytes::ZERO, Bytes(fitting * PAGE.0));
        mapped(device).map(most, PAGE)?;
        mapped(device).unmap(most)
    })
}

fn the_memory_can_be_mapped_to_the_last_granule(device: &mut dyn TestDevice) -> Outcome {
    let count = free_bytes(device)?.0 / PAGE.0;
    with_reservation(device, Bytes((count + 1) * PAGE.0), |device, start| {
        let page = |index: u64| range(start, Bytes(index * PAGE.0), PAGE);
        for index in 0..count {
            mapped(device).map(page(index), PAGE)?;
        }
        let full = |result: Outcome| {
            assert!(
                result.as_ref().is_err_and(DeviceError::is_out_of_memory),
                "one more than fits: {result:?}"
            )
        };
        full(mapped(device).map(page(count), PAGE));
        full(device.malloc(Bytes(1)).map(drop));
        mapped(device).unmap(page(count / 2))?;
        mapped(device).map(page(count), PAGE)?;
        full(mapped(device).map(page(count / 2), PAGE));
        (0..=count)
            .filter(|index| *index != count / 2)
            .try_for_each(|index| mapped(device).unmap(page(index)))
    })
}

fn mapping_mapped_memory_is_an_error(device: &mut dyn TestDevice) -> Outcome {
    with_reservation(device, Bytes::mib(12), |device, start| {
        let whole = range(start, Bytes::mib(4), Bytes::mib(4));
        mapped(device).map(whole, Bytes::mib(4))?;
        let free = free_bytes(device)?;
        for (offset, len) in [(4, 4), (4, 2), (6, 2), (6, 4), (2, 4), (0, 12)] {
            let bad = range(start, Bytes::mib(offset), Bytes::mib(len));
            invalid_access(mapped(device).map(bad, PAGE), bad);
        }
        assert_eq!(free_bytes(device)?, free);
        mapped(device).unmap(whole)
    })
}

fn only_reserved_addresses_are_mapped(device: &mut dyn TestDevice) -> Outcome {
    let ptr = device.malloc(Bytes::mib(4))?;
    let aligned = DevicePtr(ptr.0.next_multiple_of(PAGE.0));
    let mut gone = DevicePtr::NULL;
    with_reservation(device, Bytes::mib(4), |device, start| {
        gone = start;
        for bad in [
            range(start, Bytes::ZERO, Bytes::mib(6)),
            range(start, Bytes::mib(4), PAGE),
            range(aligned, Bytes::ZERO, PAGE),
        ] {
            invalid_access(mapped(device).map(bad, PAGE), bad);
        }
        Ok(())
    })?;
    invalid_access(
        mapped(device).map(range(gone, Bytes::ZERO, PAGE), PAGE),
        range(gone, Bytes::ZERO, PAGE),
    );
    device.free(ptr)
}

fn half_a_page_is_not_unmapped(device: &mut dyn TestDevice) -> Outcome {
    with_reservation(device, Bytes::mib(16), |device, start| {
        let whole = range(start, Bytes::mib(4), Bytes::mib(8));
        mapped(device).map(whole, Bytes::mib(4))?;
        let (free, calls) = (free_bytes(device)?, device.calls());
        for (offset, len) in [
            (4, 2),
            (6, 2),
            (6, 6),
            (4, 6),
            (2, 6),
            (4, 10),
            (0, 2),
            (4, 0),
        ] {
            let bad = range(start, Bytes::mib(offset), Bytes::mib(len));
            invalid_free(mapped(device).unmap(bad), bad.start);
        }
        assert_eq!(
            (free_bytes(device)?, device.calls().release),
            (free, calls.release)
        );
        mapped(device).unmap(whole)?;
        invalid_free(mapped(device).unmap(whole), whole.start);
        Ok(())
    })
}

fn a_reservation_with_pages_is_not_given_back(device: &mut dyn TestDevice) -> Outcome {
    let start = mapped(device).reserve(Bytes::mib(8))?;
    let page = range(start, Bytes::mib(6), PAGE);
    mapped(device).map(page, PAGE)?;
    invalid_free(mapped(device).unreserve(start), start);
    device.fill(StreamId::DEFAULT, page, TAG)?;
    device.verify(StreamId::DEFAULT, page, TAG)?;
    mapped(device).unmap(page)?;
    mapped(device).unreserve(start)?;
    invalid_free(mapped(device).unreserve(start), start);
    Ok(())
}

fn releasing_unreserved_addresses_is_an_error(device: &mut dyn TestDevice) -> Outcome {
    let ptr = device.malloc(Bytes::mib(2))?;
    with_reservation(device, Bytes::mib(8), |device, start| {
        for bad in [DevicePtr::NULL, start.offset(PAGE), ptr] {
            invalid_free(mapped(device).unreserve(bad), bad);
        }
        invalid_free(device.free(start), start);
        Ok(())
    })?;
    device.free(ptr)
}

fn contents_survive_changes_in_their_neighbors(device: &mut dyn TestDevice) -> Outcome {
    with_reservation(device, Bytes::mib(12), |device, start| {
        let page = |index: u64| range(start, Bytes(index * PAGE.0), PAGE);
        mapped(device).map(page(2), PAGE)?;
        device.fill(StreamId::DEFAULT, page(2), TAG)?;
        for neighbour in [1, 3] {
            mapped(device).map(page(neighbour), PAGE)?;
            device.fill(StreamId::DEFAULT, page(neighbour), OTHER)?;
        }
        device.verify(StreamId::DEFAULT, page(2), TAG)?;
        mapped(device).map(range(start, Bytes::mib(8), Bytes::mib(4)), Bytes::mib(4))?;
        device.synchronize()?;
        mapped(device).unmap(page(1))?;
        mapped(device).unmap(page(3))?;
        device.verify(StreamId::DEFAULT, page(2), TAG)?;
        // Newly mapped memory has no defined contents, and is written like any other.
        mapped(device).map(page(1), PAGE)?;
        device.fill(StreamId::DEFAULT, page(1), OTHER)?;
        device.verify(StreamId::DEFAULT, page(1), OTHER)?;
        device.verify(StreamId::DEFAULT, page(2), TAG)?;
        mapped(device).unmap(range(start, PAGE, Bytes::mib(4)))?;
        mapped(device).unmap(range(start, Bytes::mib(8), Bytes::mib(4)))
    })
}

fn pages_side_by_side_are_one_range(device: &mut dyn TestDevice) -> Outcome {
    with_reservation(device, Bytes::mib(10), |device, start| {
        mapped(device).map(range(start, Bytes::ZERO, Bytes::mib(4)), PAGE)?;
        mapped(device).map(range(start, Bytes::mib(4), Bytes::mib(4)), Bytes::mib(4))?;
        let stream = device.create_stream()?;
        for (offset, len) in [
            (0, 8 << 20),
            (1, (8 << 20) - 1),
            ((2 << 20) - 3, 7),
            ((4 << 20) - 8, 16),
            (100, 5 << 20),
        ] {
            let part = range(start, Bytes(offset), Bytes(len));
            device.fill(stream, part, TAG)?;
            device.verify(stream, part, TAG)?;
        }
        let beyond = range(start, Bytes::mib(6), Bytes(Bytes::mib(2).0 + 1));
        invalid_access(device.fill(stream, beyond, TAG), beyond);
        device.destroy_stream(stream)?;
        mapped(device).unmap(range(start, Bytes::ZERO, Bytes::mib(8)))
    })
}

fn memory_that_is_not_mapped_is_not_accessed(device: &mut dyn TestDevice) -> Outcome {
    let start = mapped(device).reserve(Bytes::mib(12))?;
    let page = |index: u64| range(start, Bytes(index * PAGE.0), PAGE);
    for index in [1, 3] {
        mapped(device).map(page(index), PAGE)?;
    }
    let hole = range(start, PAGE, Bytes::mib(6));
    for bad in [
        page(0),
        page(2),
        hole,
        range(start, Bytes(PAGE.0 - 1), Bytes(2)),
        range(start, Bytes::mib(4), Bytes(1)),
        page(6),
    ] {
        invalid_access(device.fill(StreamId::DEFAULT, bad, TAG), bad);
        invalid_access(device.verify(StreamId::DEFAULT, bad, TAG), bad);
    }
    mapped(device).unmap(page(1))?;
    invalid_access(device.fill(StreamId::DEFAULT, page(1), TAG), page(1));
    device.fill(StreamId::DEFAULT, page(3), TAG)?;
    device.verify(StreamId::DEFAULT, page(3), TAG)?;
    mapped(device).unmap(page(3))?;
    mapped(device).unreserve(start)?;
    invalid_access(device.fill(StreamId::DEFAULT, page(3), TAG), page(3));
    device.synchronize()
}

fn memory_is_unmapped_once_the_host_has_waited_for_its_work(
    device: &mut dyn TestDevice,
) -> Outcome {
    type Wait = fn(&mut dyn TestDevice, StreamId, EventId) -> Outcome;
    let waits: [Wait; 4] = [
        |device, _, event| device.synchronize_event(event),
        |device, stream, _| device.synchronize_stream(stream),
        |device, _, _| device.synchronize(),
        |device, _, event| {
            while !device.event_done(event)? {}
            Ok(())
        },
    ];
    let (stream, event) = (device.create_stream()?, device.create_event()?);
    with_reservation(device, PAGE, |device, start| {
        let page = range(start, Bytes::ZERO, PAGE);
        for wait in waits {
            mapped(device).map(page, PAGE)?;
            device.busy(stream, Nanos::millis(2))?;
            device.fill(stream, page, TAG)?;
            device.record_event(event, stream)?;
            wait(device, stream, event)?;
            mapped(device).unmap(page)?;
        }
        device.synchronize()
    })?;
    device.destroy_event(event)?;
    device.destroy_stream(stream)
}

/// Only on the simulated device: on a GPU, this breaks the context.
fn memory_with_work_in_flight_is_not_unmapped(device: &mut dyn TestDevice) -> Outcome {
    if device.info().clock != Clock::Simulated {
        return Ok(());
    }
    let stream = device.create_stream()?;
    with_reservation(device, Bytes::mib(4), |device, start| {
        let whole = range(start, Bytes::ZERO, Bytes::mib(4));
        mapped(device).map(whole, PAGE)?;
        let (free, calls) = (free_bytes(device)?, device.calls());
        device.fill(stream, range(start, Bytes::mib(3), Bytes(64)), TAG)?;
        let refused = mapped(device).unmap(whole);
        assert!(
            matches!(&refused, Err(DeviceError::InUse { access, .. }) if access.stream == stream),
            "{refused:?}"
        );
        assert_eq!(
            (free_bytes(device)?, device.calls().release),
            (free, calls.release),
            "nothing was unmapped"
        );
        mapped(device).unmap(range(start, Bytes::ZERO, PAGE))?;
        device.verify(stream, range(start, Bytes::mib(3), Bytes(64)), TAG)?;
        mapped(device).unmap(range(start, PAGE, PAGE))
    })?;
    device.destroy_stream(stream)
}

fn more_addresses_than_there_are_is_out_of_memory(device: &mut dyn TestDevice) -> Outcome {
    let free = free_bytes(device)?;
    let refused = mapped(device)
        .reserve(Bytes(1 << 62))
        .expect_err("no address space is that large");
    assert!(
        refused.is_out_of_memory() || !is_made_for_tests(device),
        "{refused}"
    );
    assert_eq!(
        (free_bytes(device)?, device.leaks()),
        (free, Leaks::default()),
        "nothing of it stays"
    );
    with_reservation(device, PAGE, |_, _| Ok(()))
}

fn allocations_and_pages_share_one_memory(device: &mut dyn TestDevice) -> Outcome {
    let free = free_bytes(device)?;
    let ptr = device.malloc(Bytes::mib(10))?;
    let rest = Bytes((free.0 - Bytes::mib(10).0) / PAGE.0 * PAGE.0);
    with_reservation(device, rest + PAGE, |device, start| {
        let too_much = range(start, Bytes::ZERO, rest + PAGE);
        assert!(
            mapped(device)
                .map(too_much, PAGE)
                .is_err_and(|error| error.is_out_of_memory())
        );
        let most = range(start, Bytes::ZERO, rest);
        mapped(device).map(most, PAGE)?;
        assert!(
            device
                .malloc(PAGE)
                .is_err_and(|error| error.is_out_of_memory())
        );
        mapped(device).unmap(most)?;
        let held = device.set_external_memory(Bytes::gib(1 << 10))?;
        assert!(
            mapped(device)
                .map(range(start, Bytes::ZERO, PAGE), PAGE)
                .is_err_and(|error| error.is_out_of_memory()),
            "{held} held"
        );
        device.set_external_memory(Bytes::ZERO).map(drop)
    })?;
    device.free(ptr)
}

fn leaks_of_reservations_and_pages_are_counted(device: &mut dyn TestDevice) -> Outcome {
    let first = mapped(device).reserve(Bytes::mib(8))?;
    let second = mapped(device).reserve(Bytes::mib(2))?;
    assert_eq!(
        device.leaks(),
        Leaks {
            reservations: 2,
            ..Leaks::default()
        }
    );
    mapped(device).map(range(first, Bytes::mib(2), Bytes::mib(6)), PAGE)?;
    assert_eq!(
        device.leaks(),
        Leaks {
            reservations: 2,
            bytes: Bytes::mib(6),
            ..Leaks::default()
        }
    );
    mapped(device).unmap(range(first, Bytes::mib(4), PAGE))?;
    mapped(device).unreserve(second)?;
    assert_eq!(
        device.leaks(),
        Leaks {
            reservations: 1,
            bytes: Bytes::mib(4),
            ..Leaks::default()
        }
    );
    mapped(device).unmap(range(first, Bytes::mib(2), PAGE))?;
    mapped(device).unmap(range(first, Bytes::mib(6), PAGE))?;
    mapped(device).unreserve(first)?;
    assert!(device.leaks().is_empty());
    Ok(())
}

fn pages_are_counted_as_calls(device: &mut dyn TestDevice) -> Outcome {
    with_reservation(device, Bytes::mib(8), |device, start| {
        let whole = range(start, Bytes::ZERO, Bytes::mib(8));
        mapped(device).map(whole, PAGE)?;
        assert!(
            mapped(device).map(whole, PAGE).is_err(),
            "refused before any page was asked for"
        );
        mapped(device).unmap(whole)?;
        mapped(device).map(whole, Bytes::mib(8))?;
        mapped(device).unmap(whole)?;
        assert_eq!(
            device.calls(),
            DeviceCalls {
                create: 5,
                release: 5,
                ..DeviceCalls::default()
            }
        );
        Ok(())
    })
}
