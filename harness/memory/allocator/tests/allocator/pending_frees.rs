//! Pending frees on a device that fails once. For every allocator and every event call of a
//! program, that call fails, and no free is lost.

use harness_allocator::allocator::{Allocation, Allocator, AllocatorError, AllocatorKind, Request};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceError, EventId, StreamId, TestDevice, wrapper};
use harness_allocator::units::{Bytes, Nanos};

/// A simulated device on which one event call fails.
struct FailingOnce {
    inner: SimDevice,
    /// The number of event calls before the failing one.
    left: u32,
    failed: bool,
}

impl FailingOnce {
    fn next_event_call(&mut self) -> Result<(), DeviceError> {
        if !self.failed && self.left == 0 {
            self.failed = true;
            return Err(DeviceError::Driver {
                call: "an event call",
                code: 999,
                name: "for the test".to_owned(),
                advice: "try again",
            });
        }
        self.left = self.left.saturating_sub(1);
        Ok(())
    }
}

impl wrapper::DeviceWrapper for FailingOnce {
    type Inner = SimDevice;

    fn inner(&self) -> &SimDevice {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut SimDevice {
        &mut self.inner
    }

    fn create_event(&mut self) -> Result<EventId, DeviceError> {
        self.next_event_call()?;
        self.inner.create_event()
    }

    fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        self.next_event_call()?;
        self.inner.record_event(event, stream)
    }

    fn event_done(&mut self, event: EventId) -> Result<bool, DeviceError> {
        self.next_event_call()?;
        self.inner.event_done(event)
    }

    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        self.next_event_call()?;
        self.inner.wait_event(stream, event)
    }

    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.next_event_call()?;
        self.inner.synchronize_event(event)
    }
}

/// Returns true if this is the injected error.
fn is_the_failure(error: &DeviceError) -> bool {
    matches!(error, DeviceError::Driver { code: 999, .. })
}

/// Runs the program with a failure at one call. Returns whether the program made that many calls.
fn fails_at(kind: AllocatorKind, call: u32) -> bool {
    let inner = SimDevice::new(SimConfig::replay(Bytes::mib(256)));
    let mut device = FailingOnce {
        inner,
        left: call,
        failed: false,
    };
    let streams = [(); 2].map(|()| device.create_stream().expect("streams can be made"));
    let mut allocator = kind.build();
    let mut failures = 0;
    let mut live: Vec<Allocation> = Vec::new();
    for round in 0..3 {
        for (index, size) in [Bytes(2000), Bytes::mib(3), Bytes::mib(24)]
            .into_iter()
            .enumerate()
        {
            match allocator.allocate(
                &mut device,
                Request::new(size).on(streams[(index + round) % 2]),
            ) {
                Ok(allocation) => live.push(allocation),
                Err(AllocatorError::Device(error)) if is_the_failure(&error) => failures += 1,
                Err(error) => panic!("{kind:?}, call {call}: {error}"),
            }
        }
        for allocation in live.drain(..) {
            for user in streams.into_iter().chain([StreamId::DEFAULT]) {
                allocator
                    .record_stream(&allocation, user)
                    .expect("it is live");
                device
                    .inner
                    .busy(user, Nanos::micros(200))
                    .expect("the stream is there");
            }
            match allocator.free(&mut device, allocation) {
                Ok(()) => {}
                Err(error) if is_the_failure(&error) => failures += 1,
                Err(error) => panic!("{kind:?}, call {call}: {error}"),
            }
        }
        if round == 1
            && let Err(error) = allocator.empty_cache(&mut device)
        {
            assert!(is_the_failure(&error), "{kind:?}, call {call}: {error}");
            failures += 1;
        }
    }
    // The failure has happened or happens now, so the second attempt succeeds.
    if allocator.empty_cache(&mut device).is_err() {
        failures += 1;
        allocator
            .empty_cache(&mut device)
            .unwrap_or_else(|error| panic!("{kind:?}, call {call}: {error}"));
    }
    assert_eq!(
        failures,
        u32::from(device.failed),
        "{kind:?}, call {call}: the failure is reported once"
    );
    let stats = allocator.stats();
    let left = [
        stats.allocated_bytes,
        stats.active_bytes,
        stats.reserved_bytes,
    ]
    .map(|bytes| bytes.all.current);
    assert_eq!(
        left, [0; 3],
        "{kind:?}, call {call}: no allocated, active or reserved bytes remain"
    );
    allocator.close(&mut device).expect("nothing is live");
    streams
        .into_iter()
        .for_each(|stream| device.destroy_stream(stream).expect("it is there"));
    assert!(
        device.inner.leaks().is_empty(),
        "{kind:?}, call {call}: {}",
        device.inner.leaks()
    );
    device.failed
}

#[test]
fn no_pending_free_is_lost_if_an_event_call_fails() {
    for &kind in AllocatorKind::ALL {
        let calls = (0..).take_while(|&call| fails_at(kind, call)).count();
        let makes_events = !matches!(kind, AllocatorKind::Direct);
        assert_eq!(
            calls > 20,
            makes_events,
            "{kind:?} makes {calls} calls about events"
        );
    }
}
