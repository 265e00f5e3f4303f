//! The contract of an [`Allocator`], run with every allocator on every device. The harness's audit
//! checks each operation.

use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, AllocatorKind, AllocatorSpec, MemoryFraction, Request,
};
use harness_allocator::device::faulty::{
    CallRecord, Calls, Effect, Fault, Faulty, InjectedError, Injector, Numbered,
};
use harness_allocator::device::{DeviceError, StreamId, Tag, TestDevice};
use harness_allocator::stats::SegmentInfo;
use harness_allocator::units::{Bytes, Nanos};
use harness_run::rig::Audit;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{Case, Outcome, library};

type Call = fn(&mut Fixture<'_>) -> Outcome;

macro_rules! bodies {
    ($($body:ident),* $(,)?) => { [$((stringify!($body), $body as Call)),*] };
}

pub(crate) fn cases() -> Vec<Case> {
    let bodies = bodies![
        a_fresh_allocator_holds_nothing,
        a_request_for_nothing_is_null_and_costs_nothing,
        allocations_are_counted_and_disjoint,
        everything_is_released_after_the_last_free_and_empty_cache,
        an_out_of_memory_is_an_answer_that_changes_nothing_live,
        a_request_that_can_never_fit_is_reported,
        after_an_out_of_memory_a_smaller_request_fits,
        the_memory_fraction_refuses_without_asking_the_device,
        a_limit_equal_to_the_request_is_enough,
        external_memory_by_others_is_an_out_of_memory_like_any_other,
        freed_memory_is_not_handed_to_another_stream_that_could_race,
        memory_used_by_another_stream_is_not_handed_out_while_it_works,
        a_destroyed_stream_that_used_memory_blocks_nothing,
        memory_of_a_destroyed_stream_is_released,
        a_released_stream_leaks_nothing,
        memory_that_is_live_when_its_stream_is_released_stays_valid,
        peaks_stay_until_they_are_reset,
        an_allocation_of_another_allocator_is_refused,
        close_releases_everything_including_live_memory,
        close_waits_for_work_in_flight,
        each_failing_call_is_reported_and_leaks_nothing,
        after_a_lost_device_every_call_returns_that_error,
        at_every_memory_size_failures_leave_the_accounts_right,
        random_programs_keep_every_invariant,
    ];
    let kinds = AllocatorKind::ALL
        .iter()
        .map(|&kind| AllocatorSpec::from(kind));
    let arms = kinds.chain(library::allocators());
    let pairs = arms.flat_map(|arm| bodies.map(|(name, body)| (arm.clone(), name, body)));
    let case = |(arm, name, body): (AllocatorSpec, &str, Call)| Case {
        name: format!("allocator::{arm}::{name}"),
        run: Box::new(move |device| {
            let mut fixture = Fixture::new(&arm, device)?;
            body(&mut fixture)?;
            fixture.finish()
        }),
    };
    pairs
        .filter(|(arm, name, _)| can_be_told(arm, name))
        .map(case)
        .collect()
}

/// Returns whether a library's interface supports everything that a body uses.
fn can_be_told(arm: &AllocatorSpec, body: &str) -> bool {
    let Some(library) = arm.as_library() else {
        return true;
    };
    match body {
        // A library with a cache must know which other streams use a block.
        "memory_used_by_another_stream_is_not_handed_out_while_it_works" => {
            library.record_stream.is_some() || library.empty_cache.is_none()
        }
        // Libraries are not notified when a stream is destroyed.
        "a_destroyed_stream_that_used_memory_blocks_nothing"
        | "a_released_stream_leaks_nothing"
        | "memory_that_is_live_when_its_stream_is_released_stays_valid" => false,
        _ => true,
    }
}

/// An allocator, a device, and the audit of both.
struct Fixture<'a> {
    arm: &'a AllocatorSpec,
    allocator: Box<dyn Allocator>,
    device: &'a mut dyn TestDevice,
    audit: Audit,
    streams: Vec<StreamId>,
}

impl<'a> Fixture<'a> {
    fn new(arm: &'a AllocatorSpec, device: &'a mut dyn TestDevice) -> Result<Self, DeviceError> {
        let memory = device.memory()?;
        let audit = Audit::new(device, memory);
        Ok(Self {
            arm,
            allocator: arm.build(),
            device,
            audit,
            streams: Vec::new(),
        })
    }

    fn stream(&mut self) -> Result<StreamId, DeviceError> {
        let stream = self.device.create_stream()?;
        self.streams.push(stream);
        Ok(stream)
    }

    fn destroy_stream(&mut self, stream: StreamId) -> Outcome {
        self.streams.retain(|&there| there != stream);
        self.device.destroy_stream(stream)
    }

    fn allocate(&mut self, request: Request) -> Result<Option<Allocation>, DeviceError> {
        match self.allocator.allocate(self.device, request) {
            Ok(allocation) => {
                let found =
                    self.audit
                        .allocated(&*self.allocator, self.device, request, &allocation);
                found.unwrap_or_else(|findings| panic!("{findings:?}"));
                Ok(Some(allocation))
            }
            Err(AllocatorError::Device(error)) => Err(error),
            Err(error) => {
                let counted = matches!(error, AllocatorError::OutOfMemory(_));
                let found = self
                    .audit
                    .out_of_memory(&*self.allocator, self.device, counted);
                found.unwrap_or_else(|findings| panic!("{findings:?}"));
                Ok(None)
            }
        }
    }

    fn must_allocate(&mut self, size: Bytes) -> Result<Allocation, DeviceError> {
        Ok(self.allocate(Request::new(size))?.expect("there is room"))
    }

    fn free(&mut self, allocation: Allocation) -> Outcome {
        let address = allocation.ptr();
        self.allocator.free(self.device, allocation)?;
        let found = self.audit.freed(&*self.allocator, self.device, address);
        found.unwrap_or_else(|findings| panic!("{findings:?}"));
        Ok(())
    }

    fn empty_cache(&mut self) -> Outcome {
        self.allocator.empty_cache(self.device)?;
        let found = self.audit.everything(&*self.allocator, self.device);
        found.unwrap_or_else(|findings| panic!("{findings:?}"));
        Ok(())
    }

    /// Sets the memory fraction that gives this limit.
    fn set_limit(&mut self, limit: Bytes) -> Bytes {
        let total = self.device.info().total;
        // The half byte makes truncation give the limit itself.
        let fraction = MemoryFraction::new((limit.0 as f64 + 0.5) / total.0 as f64)
            .expect("less than there is");
        assert_eq!(fraction.limit(total), Some(limit));
        self.allocator.set_memory_fraction(self.device, fraction);
        limit
    }

    fn reserved(&self) -> u64 {
        self.allocator.stats().reserved_bytes.all.current
    }

    /// Releases everything that a body left, including handles.
    fn finish(mut self) -> Outcome {
        self.device.synchronize()?;
        self.device.set_external_memory(Bytes::ZERO)?;
        self.allocator.close(self.device)?;
        self.streams
            .iter()
            .try_for_each(|&stream| self.device.destroy_stream(stream))
    }
}

fn a_fresh_allocator_holds_nothing(fixture: &mut Fixture<'_>) -> Outcome {
    assert_eq!(fixture.allocator.name(), fixture.arm.kind_name());
    assert_eq!(fixture.allocator.stats(), Default::default());
    assert!(fixture.allocator.snapshot().is_empty());
    fixture.empty_cache()
}

fn a_request_for_nothing_is_null_and_costs_nothing(fixture: &mut Fixture<'_>) -> Outcome {
    let calls = fixture.device.calls();
    let nothing = fixture.must_allocate(Bytes::ZERO)?;
    assert!(nothing.is_null() && nothing.size() == Bytes::ZERO);
    fixture
        .allocator
        .record_stream(&nothing, StreamId::DEFAULT)?;
    fixture.free(nothing)?;
    assert_eq!(
        (fixture.allocator.stats(), fixture.device.calls()),
        (Default::default(), calls)
    );
    Ok(())
}

fn allocations_are_counted_and_disjoint(fixture: &mut Fixture<'_>) -> Outcome {
    let sizes = [
        1,
        511,
        512,
        513,
        4096,
        1 << 20,
        (1 << 20) + 1,
        3 << 20,
        11 << 20,
    ];
    let live = sizes
        .iter()
        .map(|&size| fixture.must_allocate(Bytes(size)))
        .collect::<Result<Vec<_>, _>>()?;
    let stats = fixture.allocator.stats();
    assert_eq!(stats.allocation.all.current, sizes.len() as u64);
    assert_eq!(stats.requested_bytes.all.current, sizes.iter().sum::<u64>());
    assert_eq!(
        Bytes(stats.allocated_bytes.all.current),
        live.iter().map(Allocation::size).sum()
    );
    for (index, allocation) in live.iter().enumerate() {
        fixture
            .device
            .fill(StreamId::DEFAULT, allocation.range(), Tag(index as u64 + 1))?;
    }
    for (index, allocation) in live.iter().enumerate() {
        fixture
            .device
            .verify(StreamId::DEFAULT, allocation.range(), Tag(index as u64 + 1))?;
        let segment = fixture
            .allocator
            .segment_at(allocation.ptr())
            .expect("every allocation is in a segment");
        assert!(
            segment.address <= allocation.ptr()
                && allocation.range().end() <= segment.address.offset(segment.size)
        );
    }
    live.into_iter()
        .try_for_each(|allocation| fixture.free(allocation))
}

fn everything_is_released_after_the_last_free_and_empty_cache(
    fixture: &mut Fixture<'_>,
) -> Outcome {
    let before = fixture.device.memory()?;
    let live = (0..20)
        .map(|n| fixture.must_allocate(Bytes(400_000 * (n % 5 + 1))))
        .collect::<Result<Vec<_>, _>>()?;
    live.into_iter()
        .try_for_each(|allocation| fixture.free(allocation))?;
    assert_eq!(fixture.allocator.stats().allocated_bytes.all.current, 0);
    fixture.empty_cache()?;
    assert_eq!(fixture.reserved(), 0);
    assert!(fixture.allocator.snapshot().is_empty());
    assert_eq!(fixture.device.memory()?.free, before.free);
    Ok(())
}

fn an_out_of_memory_is_an_answer_that_changes_nothing_live(fixture: &mut Fixture<'_>) -> Outcome {
    let kept = fixture.must_allocate(Bytes::mib(8))?;
    fixture
        .device
        .fill(StreamId::DEFAULT, kept.range(), Tag(7))?;
    let before = fixture.allocator.stats();
    // A driver that can remap a pool's memory merges free and unallocated reserved memory.
    let unallocated = Bytes(fixture.reserved() - before.allocated_bytes.all.current);
    let too_much = fixture.device.memory()?.free + unallocated + Bytes::mib(2);
    let error = fixture
        .allocator
        .allocate(fixture.device, Request::new(too_much))
        .expect_err("more than there is");
    let AllocatorError::OutOfMemory(oom) = &error else {
        panic!("{error:?}")
    };
    assert_eq!(
        (oom.requested, oom.allocated),
        (too_much, Bytes(before.allocated_bytes.all.current))
    );
    assert!(error.to_string().contains("out of memory"), "{error}");
    assert_eq!(fixture.allocator.stats().num_ooms, before.num_ooms + 1);
    fixture
        .device
        .verify(StreamId::DEFAULT, kept.range(), Tag(7))?;
    fixture.free(kept)
}

fn a_request_that_can_never_fit_is_reported(fixture: &mut Fixture<'_>) -> Outcome {
    let ask = |fixture: &mut Fixture<'_>, size| {
        fixture
            .allocator
            .allocate(fixture.device, Request::new(Bytes(size)))
    };
    let too_large = fixture.device.info().total.0 + 1;
    match ask(fixture, too_large).expect_err("more than the device has") {
        AllocatorError::OutOfMemory(oom) => assert!(oom.segment > oom.total),
        AllocatorError::TooLarge { .. } => {}
        AllocatorError::Device(error) => return Err(error),
    }
    assert!(
        ask(fixture, u64::MAX)
            .expect_err("no device has that")
            .is_out_of_memory()
    );
    assert_eq!(fixture.reserved(), 0);
    Ok(())
}

fn after_an_out_of_memory_a_smaller_request_fits(fixture: &mut Fixture<'_>) -> Outcome {
    let free = fixture.device.memory()?.free;
    let unit = fixture.allocator.reserve_unit(fixture.device);
    assert!(
        fixture
            .allocate(Request::new(free + unit + Bytes::mib(2)))?
            .is_none()
    );
    let all_but_one_granule = free.saturating_sub(fixture.device.info().granularity);
    let largest = (fixture.allocator).largest_request(fixture.device, all_but_one_granule);
    let most = fixture.must_allocate(largest)?;
    fixture.free(most)
}

fn the_memory_fraction_refuses_without_asking_the_device(fixture: &mut Fixture<'_>) -> Outcome {
    let limit = fixture.set_limit(Bytes::mib(16));
    let before = fixture.device.calls();
    assert!(
        fixture
            .allocate(Request::new(limit + Bytes::mib(2)))?
            .is_none()
    );
    assert_eq!(fixture.device.calls().malloc, before.malloc);
    fixture
        .allocator
        .set_memory_fraction(fixture.device, MemoryFraction::ALL);
    let fits = fixture.must_allocate(limit + Bytes::mib(2))?;
    fixture.free(fits)
}

fn a_limit_equal_to_the_request_is_enough(fixture: &mut Fixture<'_>) -> Outcome {
    let limit = fixture.set_limit(Bytes::mib(32));
    let all_of_it = fixture.must_allocate(limit)?;
    assert!(fixture.allocate(Request::new(Bytes(1)))?.is_none());
    fixture.free(all_of_it)
}

fn external_memory_by_others_is_an_out_of_memory_like_any_other(
    fixture: &mut Fixture<'_>,
) -> Outcome {
    let free = fixture.device.memory()?.free;
    fixture
        .device
        .set_external_memory(free.saturating_sub(Bytes::mib(4)))?;
    assert!(fixture.allocate(Request::new(Bytes::mib(12)))?.is_none());
    fixture.device.set_external_memory(Bytes::ZERO)?;
    let fits = fixture.must_allocate(Bytes::mib(12))?;
    fixture.free(fits)
}

fn freed_memory_is_not_handed_to_another_stream_that_could_race(
    fixture: &mut Fixture<'_>,
) -> Outcome {
    let (first, second) = (fixture.stream()?, fixture.stream()?);
    let size = Bytes::mib(4);
    let written = fixture
        .allocate(Request::new(size).on(first))?
        .expect("there is room");
    fixture.device.busy(first, Nanos::millis(20))?;
    fixture.device.fill(first, written.range(), Tag(1))?;
    fixture.free(written)?;
    let other = fixture
        .allocate(Request::new(size).on(second))?
        .expect("there is room");
    fixture.device.fill(second, other.range(), Tag(2))?;
    fixture.device.synchronize()?;
    fixture.device.verify(second, other.range(), Tag(2))?;
    fixture.free(other)
}

fn memory_used_by_another_stream_is_not_handed_out_while_it_works(
    fixture: &mut Fixture<'_>,
) -> Outcome {
    let side = fixture.stream()?;
    let size = Bytes::mib(4);
    let shared = fixture.must_allocate(size)?;
    fixture.allocator.record_stream(&shared, side)?;
    fixture.allocator.record_stream(&shared, side)?;
    fixture.device.busy(side, Nanos::millis(20))?;
    fixture.device.fill(side, shared.range(), Tag(1))?;
    fixture.free(shared)?;
    let next = fixture.must_allocate(size)?;
    fixture
        .device
        .fill(StreamId::DEFAULT, next.range(), Tag(2))?;
    fixture.device.synchronize()?;
    fixture
        .device
        .verify(StreamId::DEFAULT, next.range(), Tag(2))?;
    fixture.free(next)?;
    let later = fixture.must_allocate(size)?;
    fixture.free(later)?;
    assert_eq!(
        fixture.allocator.stats().active.all.current,
        0,
        "after the event nothing waits any more"
    );
    Ok(())
}

fn a_destroyed_stream_that_used_memory_blocks_nothing(fixture: &mut Fixture<'_>) -> Outcome {
    let (side, size) = (fixture.stream()?, Bytes::mib(4));
    let [before, after] = [fixture.must_allocate(size)?, fixture.must_allocate(size)?];
    for allocation in [&before, &after] {
        fixture.allocator.record_stream(allocation, side)?;
        fixture.device.busy(side, Nanos::millis(5))?;
        fixture.device.fill(side, allocation.range(), Tag(1))?;
    }
    // One block waits for an event of the stream. The other is freed when no stream is left to
    // record an event on.
    fixture.free(before)?;
    fixture.destroy_stream(side)?;
    fixture.free(after)?;
    let next = fixture.must_allocate(size)?;
    assert_eq!(
        fixture.allocator.stats().active.all.current,
        1,
        "nothing waits for the stream"
    );
    fixture
        .device
        .fill(StreamId::DEFAULT, next.range(), Tag(2))?;
    fixture
        .device
        .verify(StreamId::DEFAULT, next.range(), Tag(2))?;
    fixture.free(next)?;
    fixture.empty_cache()?;
    assert_eq!(fixture.reserved(), 0);
    Ok(())
}

fn memory_of_a_destroyed_stream_is_released(fixture: &mut Fixture<'_>) -> Outcome {
    let side = fixture.stream()?;
    let sizes = [Bytes(1000), Bytes::mib(3), Bytes::mib(24)];
    let mut live = Vec::new();
    for size in sizes {
        live.push(
            fixture
                .allocate(Request::new(size).on(side))?
                .expect("there is room"),
        );
    }
    fixture
        .allocator
        .record_stream(&live[1], StreamId::DEFAULT)?;
    fixture.device.fill(side, live[2].range(), Tag(1))?;
    fixture.free(live.remove(0))?;
    fixture.destroy_stream(side)?;
    live.into_iter()
        .try_for_each(|allocation| fixture.free(allocation))?;
    fixture.empty_cache()?;
    assert_eq!(fixture.reserved(), 0);
    Ok(())
}

fn a_released_stream_leaks_nothing(fixture: &mut Fixture<'_>) -> Outcome {
    // The first allocation may keep its memory, like a pool's initial size.
    let first = fixture.must_allocate(Bytes::mib(1))?;
    let side = fixture.stream()?;
    let [own, shared] = [
        Request::new(Bytes::mib(16)).on(side),
        Request::new(Bytes::mib(1)),
    ]
    .map(|request| fixture.allocate(request));
    let [own, shared] = [
        own?.expect("there is room"),
        shared?.expect("there is room"),
    ];
    fixture.device.busy(side, Nanos::millis(5))?;
    fixture.device.fill(side, own.range(), Tag(1))?;
    fixture.allocator.record_stream(&shared, side)?;
    fixture.free(own)?;
    fixture.free(shared)?;
    fixture.allocator.release_stream(fixture.device, side)?;
    fixture.destroy_stream(side)?;
    fixture.allocator.release_stream(fixture.device, side)?;
    assert_eq!(
        fixture.allocator.stats().active.all.current,
        1,
        "nothing waits for the stream"
    );
    let streams = |segment: SegmentInfo| {
        segment
            .blocks
            .into_iter()
            .map(|block| block.stream)
            .collect::<Vec<_>>()
    };
    assert!(
        fixture
            .allocator
            .snapshot()
            .into_iter()
            .flat_map(streams)
            .all(|stream| stream != side),
        "nothing is kept for the stream"
    );
    let again = fixture.must_allocate(Bytes::mib(24))?;
    fixture.free(again)?;
    fixture.free(first)
}

fn memory_that_is_live_when_its_stream_is_released_stays_valid(
    fixture: &mut Fixture<'_>,
) -> Outcome {
    let (side, size) = (fixture.stream()?, Bytes::mib(4));
    let live = fixture
        .allocate(Request::new(size).on(side))?
        .expect("there is room");
    fixture.device.fill(side, live.range(), Tag(1))?;
    fixture.allocator.release_stream(fixture.device, side)?;
    fixture.destroy_stream(side)?;
    let next = fixture.must_allocate(size)?;
    fixture
        .device
        .fill(StreamId::DEFAULT, next.range(), Tag(2))?;
    fixture
        .device
        .verify(StreamId::DEFAULT, live.range(), Tag(1))?;
    fixture.free(live)?;
    fixture.free(next)?;
    fixture.empty_cache()?;
    assert_eq!(fixture.reserved(), 0);
    Ok(())
}

fn peaks_stay_until_they_are_reset(fixture: &mut Fixture<'_>) -> Outcome {
    let allocation = fixture.must_allocate(Bytes::mib(6))?;
    let high = fixture.allocator.stats().allocated_bytes.all.peak;
    fixture.free(allocation)?;
    assert_eq!(fixture.allocator.stats().allocated_bytes.all.peak, high);
    fixture.allocator.reset_peaks();
    assert_eq!(fixture.allocator.stats().allocated_bytes.all.peak, 0);
    Ok(())
}

fn an_allocation_of_another_allocator_is_refused(fixture: &mut Fixture<'_>) -> Outcome {
    let mut other = fixture.arm.build();
    // An allocator that reserves most of the memory leaves room for the other one.
    fixture.set_limit(Bytes::mib(32));
    let ours = fixture.must_allocate(Bytes::mib(1))?;
    let theirs = other
        .allocate(fixture.device, Request::new(Bytes::mib(1)))
        .expect("there is room");
    let before = fixture.allocator.stats();
    let refused = fixture.allocator.record_stream(&theirs, StreamId::DEFAULT);
    assert!(
        matches!(refused, Err(DeviceError::InvalidFree { .. })),
        "{refused:?}"
    );
    let refused = fixture.allocator.free(fixture.device, theirs);
    assert!(
        matches!(refused, Err(DeviceError::InvalidFree { .. })),
        "{refused:?}"
    );
    assert_eq!(fixture.allocator.stats(), before);
    other.close(fixture.device)?;
    fixture.free(ours)
}

fn close_releases_everything_including_live_memory(fixture: &mut Fixture<'_>) -> Outcome {
    let free = fixture.device.memory()?.free;
    let side = fixture.stream()?;
    let live =
        [Bytes::kib(3), Bytes::mib(3), Bytes::mib(12)].map(|size| fixture.must_allocate(size));
    for allocation in live {
        let allocation = allocation?;
        fixture.allocator.record_stream(&allocation, side)?;
        if allocation.size() > Bytes::mib(10) {
            fixture.free(allocation)?;
        }
    }
    fixture.allocator.close(fixture.device)?;
    assert_eq!(fixture.device.memory()?.free, free);
    assert_eq!(fixture.device.leaks().events, 0);
    Ok(())
}

fn close_waits_for_work_in_flight(fixture: &mut Fixture<'_>) -> Outcome {
    let side = fixture.stream()?;
    let event = fixture.device.create_event()?;
    let [own, shared] = [Bytes::mib(3), Bytes::mib(3)].map(|size| fixture.must_allocate(size));
    let (own, shared) = (own?, shared?);
    fixture.allocator.record_stream(&shared, side)?;
    fixture
        .device
        .fill(StreamId::DEFAULT, own.range(), Tag(1))?;
    fixture.device.busy(side, Nanos::millis(20))?;
    fixture.device.fill(side, shared.range(), Tag(2))?;
    fixture.device.record_event(event, side)?;
    fixture.free(shared)?;
    fixture.allocator.close(fixture.device)?;
    assert!(
        fixture.device.event_done(event)?,
        "the memory was released while a stream worked on it"
    );
    fixture.device.destroy_event(event)
}

/// The same program with less and less memory, so that each request fails first once.
fn at_every_memory_size_failures_leave_the_accounts_right(fixture: &mut Fixture<'_>) -> Outcome {
    let free = fixture.device.memory()?.free;
    let mut left = Bytes::ZERO;
    while left <= free {
        fixture.device.set_external_memory(free - left)?;
        let mut live = Vec::new();
        for n in 1..=14_u64 {
            let request = Request::new(Bytes(n * n * 90_000));
            live.extend(fixture.allocate(request)?);
            if n % 3 == 0 && !live.is_empty() {
                fixture.free(live.remove(0))?;
            }
        }
        live.into_iter()
            .try_for_each(|allocation| fixture.free(allocation))?;
        fixture.empty_cache()?;
        assert_eq!(fixture.reserved(), 0);
        fixture.device.set_external_memory(Bytes::ZERO)?;
        left += Bytes::mib(4);
    }
    Ok(())
}

/// A program in which an allocator makes most kinds of device calls. It ends with `close`, while
/// memory is live, or with the first error.
fn small_program(
    allocator: &mut dyn Allocator,
    device: &mut dyn TestDevice,
    side: StreamId,
) -> Result<(), AllocatorError> {
    let mut live = Vec::new();
    for (size, stream) in [
        (Bytes::mib(3), StreamId::DEFAULT),
        (Bytes(512), side),
        (Bytes::mib(6), side),
        (Bytes::mib(30), side),
    ] {
        match allocator.allocate(device, Request { size, stream }) {
            Ok(allocation) => live.push(allocation),
            Err(error) if error.is_out_of_memory() => {}
            Err(error) => return Err(error),
        }
    }
    for allocation in live {
        allocator.record_stream(
            &allocation,
            if allocation.stream() == side {
                StreamId::DEFAULT
            } else {
                side
            },
        )?;
        allocator.free(device, allocation)?;
    }
    match allocator.allocate(device, Request::new(Bytes::mib(50))) {
        Ok(allocation) => allocator.free(device, allocation)?,
        Err(error) if error.is_out_of_memory() => {}
        Err(error) => return Err(error),
    }
    allocator.empty_cache(device)?;
    for stream in [StreamId::DEFAULT, side] {
        // They are released when the allocator is closed.
        match allocator.allocate(
            device,
            Request {
                size: Bytes::mib(12),
                stream,
            },
        ) {
            Ok(allocation) => allocator.record_stream(&allocation, side)?,
            Err(error) if error.is_out_of_memory() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(allocator.close(device)?)
}

/// Runs the small program with faults and releases everything without faults. After any failure,
/// the allocator must still know its memory.
fn with_faults(
    fixture: &mut Fixture<'_>,
    faults: &Injector,
) -> Result<Result<(), AllocatorError>, DeviceError> {
    let side = fixture.device.create_stream()?;
    let mut allocator = fixture.arm.build();
    let mut device = Faulty::new(&mut *fixture.device, faults.clone());
    let ended = small_program(&mut *allocator, &mut device, side);
    if faults.is_broken() {
        // The result of releasing on a broken device does not matter, as long as it returns.
        let _ = allocator.close(&mut device);
    }
    allocator.close(fixture.device)?;
    fixture.device.destroy_stream(side)?;
    let leaks = fixture.device.leaks();
    assert!(leaks.is_empty(), "{faults:?} leave {leaks}");
    Ok(ended)
}

/// The calls of the small program.
fn calls_of_the_small_program(fixture: &mut Fixture<'_>) -> Result<Vec<CallRecord>, DeviceError> {
    let faults = Injector::new(&[], 0).logging();
    with_faults(fixture, &faults)?.unwrap_or_else(|error| panic!("without faults: {error}"));
    Ok(faults
        .calls_made()
        .into_iter()
        .map(|noted| noted.made)
        .collect())
}

fn each_failing_call_is_reported_and_leaks_nothing(fixture: &mut Fixture<'_>) -> Outcome {
    let calls = calls_of_the_small_program(fixture)?;
    assert!(calls.len() > 4, "{calls:?}");
    for made in &calls {
        let numbered = Numbered {
            first: made.number,
            count: 1,
            min_size: Bytes::ZERO,
        };
        let faults = Injector::new(&[Fault::failing(Calls::Of(made.call), numbered)], 0)
            .with_budget(10 * calls.len() as u64);
        let ended = with_faults(fixture, &faults)?;
        assert_eq!(faults.injected_by(0).0, 1, "{made} is made again");
        if let Err(error) = ended {
            assert!(
                error.to_string().starts_with(made.call.name()),
                "{made}: {error}"
            );
        }
    }
    Ok(())
}

fn after_a_lost_device_every_call_returns_that_error(fixture: &mut Fixture<'_>) -> Outcome {
    let calls = calls_of_the_small_program(fixture)?;
    for made in &calls {
        let effect = Effect::Fails {
            error: InjectedError::DeviceLost,
            sticky: true,
        };
        let numbered = Numbered {
            first: made.number,
            count: 1,
            min_size: Bytes::ZERO,
        };
        let fault = Fault {
            effect,
            ..Fault::failing(Calls::Of(made.call), numbered)
        };
        let faults = Injector::new(&[fault], 0).with_budget(10 * calls.len() as u64);
        let error = with_faults(fixture, &faults)?
            .err()
            .unwrap_or_else(|| panic!("the error of {made} is lost"))
            .to_string();
        assert!(
            error.contains("CUDA_ERROR_DEVICE_UNAVAILABLE"),
            "{made}: {error}"
        );
    }
    Ok(())
}

fn random_programs_keep_every_invariant(fixture: &mut Fixture<'_>) -> Outcome {
    let streams = [StreamId::DEFAULT, fixture.stream()?, fixture.stream()?];
    let mut rng = ChaCha8Rng::seed_from_u64(20_261_120);
    let mut live: Vec<Allocation> = Vec::new();
    for _ in 0..1500 {
        match rng.random_range(0..20) {
            0..=9 => {
                let doublings = rng.random_range(4..=24);
                let size = Bytes(rng.random_range(1..=1_u64 << doublings));
                let stream = streams[rng.random_range(0..streams.len())];
                live.extend(fixture.allocate(Request { size, stream })?);
            }
            10..=16 if !live.is_empty() => {
                let allocation = live.swap_remove(rng.random_range(0..live.len()));
                fixture.free(allocation)?;
            }
            17 if !live.is_empty() => {
                let stream = streams[rng.random_range(0..streams.len())];
                fixture
                    .allocator
                    .record_stream(&live[rng.random_range(0..live.len())], stream)?;
                fixture.device.busy(stream, Nanos::micros(20))?;
            }
            18 => fixture
                .device
                .synchronize_stream(streams[rng.random_range(0..streams.len())])?,
            19 if rng.random_range(0..5) == 0 => fixture.empty_cache()?,
            _ => {}
        }
    }
    live.into_iter()
        .try_for_each(|allocation| fixture.free(allocation))?;
    fixture.empty_cache()?;
    assert_eq!(fixture.reserved(), 0);
    Ok(())
}
