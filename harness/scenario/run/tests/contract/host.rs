//! The contract of host memory and of copies, for each kind of host memory.

use harness_allocator::device::{
    DeviceError, DevicePtr, HostMemory, MemoryRange, StreamId, Tag, TestDevice,
};
use harness_allocator::units::{Bytes, Nanos};

use crate::{Case, Outcome};

type Call = fn(&mut dyn TestDevice, &HostMemory) -> Outcome;

/// Long enough that the host can check while it runs, even under load.
const LONG: Nanos = Nanos::millis(100);
/// Each byte differs from its neighbors and from the bytes of [`OTHER`].
const TAG: Tag = Tag(0x8877_6655_4433_2211);
const OTHER: Tag = Tag(0x1122_3344_5566_7788);

macro_rules! bodies {
    ($($body:ident),* $(,)?) => { [$((stringify!($body), $body as Call)),*] };
}

pub(crate) fn cases() -> Vec<Case> {
    let kinds = [
        ("pinned", HostMemory::Pinned),
        ("pageable", HostMemory::Pageable),
        ("mapped_file", HostMemory::MappedFile { folder: None }),
    ];
    let bodies = bodies![
        what_was_copied_to_the_host_comes_back_wherever_it_goes,
        a_copy_to_the_device_changes_only_its_range,
        a_copy_to_the_host_sees_earlier_writes_of_its_stream,
        a_copy_takes_its_turn_in_its_stream,
        giving_host_memory_back_waits_for_copies_on_it,
        a_copy_larger_than_the_host_memory_is_an_error,
        a_copy_of_free_device_memory_is_an_error,
        host_memory_that_was_given_back_is_an_error,
        more_host_memory_than_there_is_names_the_call_that_failed,
        host_memory_is_counted_as_left_until_it_is_given_back,
    ];
    let of_kind = |(name, body): (&'static str, Call)| {
        kinds.clone().map(|(kind, memory)| Case {
            name: format!("host::{kind}::{name}"),
            run: Box::new(move |device: &mut dyn TestDevice| body(device, &memory)),
        })
    };
    bodies.into_iter().flat_map(of_kind).collect()
}

fn range(start: DevicePtr, offset: u64, len: u64) -> MemoryRange {
    MemoryRange::new(start.offset(Bytes(offset)), Bytes(len))
}

fn what_was_copied_to_the_host_comes_back_wherever_it_goes(
    device: &mut dyn TestDevice,
    memory: &HostMemory,
) -> Outcome {
    const LEN: u64 = (3 << 20) + 5;
    let host = device.host_alloc(Bytes(LEN), memory)?;
    for (from, to) in [(0, 0), (3, 3), (8, 1), (1, 6)] {
        let ptr = device.malloc(Bytes::mib(4))?;
        device.fill(StreamId::DEFAULT, range(ptr, from, LEN), TAG)?;
        device.copy_to_host(StreamId::DEFAULT, range(ptr, from, LEN), host)?;
        device.synchronize_stream(StreamId::DEFAULT)?;
        device.free(ptr)?;
        let back = device.malloc(Bytes::mib(6))?;
        device.fill(StreamId::DEFAULT, range(back, 0, 6 << 20), OTHER)?;
        device.copy_to_device(StreamId::DEFAULT, host, range(back, to, LEN))?;
        device.verify(StreamId::DEFAULT, range(back, to, LEN), TAG)?;
        device.free(back)?;
    }
    device.host_free(host)
}

fn a_copy_to_the_device_changes_only_its_range(
    device: &mut dyn TestDevice,
    memory: &HostMemory,
) -> Outcome {
    let (ptr, host) = (
        device.malloc(Bytes::mib(2))?,
        device.host_alloc(Bytes(100), memory)?,
    );
    device.fill(StreamId::DEFAULT, range(ptr, 4096, 100), TAG)?;
    device.copy_to_host(StreamId::DEFAULT, range(ptr, 4096, 100), host)?;
    device.fill(StreamId::DEFAULT, range(ptr, 0, 2 << 20), OTHER)?;
    // Part of the copied bytes, at a different offset.
    device.copy_to_device(StreamId::DEFAULT, host, range(ptr, 16, 40))?;
    device.verify(StreamId::DEFAULT, range(ptr, 0, 16), OTHER)?;
    device.verify(StreamId::DEFAULT, range(ptr, 16, 40), TAG)?;
    device.verify(StreamId::DEFAULT, range(ptr, 56, (2 << 20) - 56), OTHER)?;
    let wrong = device.verify(StreamId::DEFAULT, range(ptr, 16, 41), TAG);
    assert!(
        matches!(wrong, Err(DeviceError::Corrupted { at, .. }) if at == ptr.offset(Bytes(56))),
        "{wrong:?}"
    );
    device.host_free(host)?;
    device.free(ptr)
}

fn a_copy_to_the_host_sees_earlier_writes_of_its_stream(
    device: &mut dyn TestDevice,
    memory: &HostMemory,
) -> Outcome {
    let (ptr, stream) = (device.malloc(Bytes::mib(2))?, device.create_stream()?);
    let (whole, host) = (
        range(ptr, 0, 2 << 20),
        device.host_alloc(Bytes::mib(2), memory)?,
    );
    device.busy(stream, LONG)?;
    device.fill(stream, whole, TAG)?;
    device.copy_to_host(stream, whole, host)?;
    device.fill(stream, whole, OTHER)?;
    device.verify(stream, whole, OTHER)?;
    device.copy_to_device(stream, host, whole)?;
    device.verify(stream, whole, TAG)?;
    device.destroy_stream(stream)?;
    device.host_free(host)?;
    device.free(ptr)
}

/// With pinned memory, the host does not wait.
fn a_copy_takes_its_turn_in_its_stream(
    device: &mut dyn TestDevice,
    memory: &HostMemory,
) -> Outcome {
    let (ptr, stream, event) = (
        device.malloc(Bytes::mib(2))?,
        device.create_stream()?,
        device.create_event()?,
    );
    let host = device.host_alloc(Bytes(64), memory)?;
    device.fill(stream, range(ptr, 0, 64), TAG)?;
    device.busy(stream, LONG)?;
    device.copy_to_host(stream, range(ptr, 0, 64), host)?;
    device.copy_to_device(stream, host, range(ptr, 4096, 64))?;
    device.record_event(event, stream)?;
    if memory.is_pinned() {
        assert!(
            !device.event_done(event)?,
            "the host waited for a copy of pinned memory"
        );
    }
    device.synchronize_event(event)?;
    device.verify(stream, range(ptr, 4096, 64), TAG)?;
    device.destroy_event(event)?;
    device.destroy_stream(stream)?;
    device.host_free(host)?;
    device.free(ptr)
}

fn giving_host_memory_back_waits_for_copies_on_it(
    device: &mut dyn TestDevice,
    memory: &HostMemory,
) -> Outcome {
    let (ptr, stream) = (device.malloc(Bytes::mib(2))?, device.create_stream()?);
    let host = device.host_alloc(Bytes(64), memory)?;
    let start = device.now();
    device.fill(stream, range(ptr, 0, 64), TAG)?;
    device.busy(stream, LONG)?;
    device.copy_to_host(stream, range(ptr, 0, 64), host)?;
    device.host_free(host)?;
    let taken = device.now().saturating_sub(start);
    assert!(taken.0 >= LONG.0 - LONG.0 / 100, "it took {taken}");
    device.destroy_stream(stream)?;
    device.free(ptr)
}

fn a_copy_larger_than_the_host_memory_is_an_error(
    device: &mut dyn TestDevice,
    memory: &HostMemory,
) -> Outcome {
    let (ptr, host) = (
        device.malloc(Bytes::mib(2))?,
        device.host_alloc(Bytes(64), memory)?,
    );
    let refused = Err(DeviceError::HostRange {
        number: host.0,
        copied: Bytes(65),
        size: Bytes(64),
    });
    assert_eq!(
        device.copy_to_host(StreamId::DEFAULT, range(ptr, 0, 65), host),
        refused
    );
    assert_eq!(
        device.copy_to_device(StreamId::DEFAULT, host, range(ptr, 0, 65)),
        refused
    );
    device.host_free(host)?;
    device.free(ptr)
}

fn a_copy_of_free_device_memory_is_an_error(
    device: &mut dyn TestDevice,
    memory: &HostMemory,
) -> Outcome {
    let (ptr, host) = (
        device.malloc(Bytes::mib(2))?,
        device.host_alloc(Bytes(64), memory)?,
    );
    device.free(ptr)?;
    for copied in [
        device.copy_to_host(StreamId::DEFAULT, range(ptr, 0, 64), host),
        device.copy_to_device(StreamId::DEFAULT, host, range(ptr, 0, 64)),
    ] {
        assert!(
            matches!(copied, Err(DeviceError::InvalidAccess { .. })),
            "{copied:?}"
        );
    }
    device.host_free(host)
}

fn host_memory_that_was_given_back_is_an_error(
    device: &mut dyn TestDevice,
    memory: &HostMemory,
) -> Outcome {
    let (ptr, host) = (
        device.malloc(Bytes::mib(2))?,
        device.host_alloc(Bytes(64), memory)?,
    );
    device.host_free(host)?;
    let unknown = Err(DeviceError::UnknownHandle {
        kind: "host memory",
        number: host.0,
    });
    assert_eq!(
        device.copy_to_host(StreamId::DEFAULT, range(ptr, 0, 64), host),
        unknown
    );
    assert_eq!(
        device.copy_to_device(StreamId::DEFAULT, host, range(ptr, 0, 64)),
        unknown
    );
    assert_eq!(device.host_free(host), unknown);
    let other = device.host_alloc(Bytes(64), memory)?;
    assert_ne!(other, host, "numbers are not used again");
    device.host_free(other)?;
    device.free(ptr)
}

fn more_host_memory_than_there_is_names_the_call_that_failed(
    device: &mut dyn TestDevice,
    memory: &HostMemory,
) -> Outcome {
    for size in [Bytes::ZERO, Bytes(u64::MAX)] {
        let refused = device.host_alloc(size, memory);
        let names_it = matches!(&refused, Err(DeviceError::HostMemory { call, requested, .. })
            if *call == memory.call() && *requested == size);
        assert!(names_it, "{size}: {refused:?}");
    }
    assert!(device.leaks().is_empty());
    Ok(())
}

fn host_memory_is_counted_as_left_until_it_is_given_back(
    device: &mut dyn TestDevice,
    memory: &HostMemory,
) -> Outcome {
    let (first, second) = (
        device.host_alloc(Bytes(1), memory)?,
        device.host_alloc(Bytes::mib(3), memory)?,
    );
    assert_eq!(device.leaks().host, 2);
    device.host_free(first)?;
    assert_eq!(device.leaks().host, 1);
    device.host_free(second)?;
    assert!(device.leaks().is_empty());
    Ok(())
}
