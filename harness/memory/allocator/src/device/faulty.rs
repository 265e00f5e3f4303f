//! [`Faulty`]: injects failures into any device, by a plan: calls fail, take longer or return wrong
//! figures, and events never complete.
//!
//! The plan is a list of [`Fault`]s in an [`Injector`], which counts the calls and records the
//! injected failures. A failed call changes nothing on the device. A sticky error fails every later
//! call with the same error, as on CUDA. Only queries that need no device call (description, clock,
//! counts, leaks) still work.

mod call;
mod plan;
#[cfg(test)]
mod tests;

use std::{collections::BTreeSet, thread, time::Duration};

pub use call::{ANY, DeviceCall, Numbered};
pub use plan::{
    Call, CallRecord, Calls, Effect, Fault, FaultError, InjectedError, InjectedFault, Injector,
    InjectorState, LoggedCall,
};

use self::plan::{Decision, Failure, INJECTED};
use super::{
    CallSite, Clock, DeviceCalls, DeviceError, DeviceMemory, DevicePtr, EventId, HostId,
    HostMemory, MappedDevice, MemoryRange, PoolId, PoolMemory, PooledDevice, StreamId, Tag,
    TestDevice, wrapper,
};
use crate::units::{Bytes, Nanos};

/// The interval at which a wait that never returns checks whether it is abandoned.
const PERIOD: Duration = Duration::from_millis(10);

pub struct Faulty<D> {
    inner: D,
    injector: Injector,
    /// Calls that failed here and never reached the device.
    failed: DeviceCalls,
    /// Events and streams with work that never ends.
    stuck_events: BTreeSet<EventId>,
    stuck_streams: BTreeSet<StreamId>,
    /// True if a call has already waited for that work.
    waited: bool,
}

impl<D: TestDevice> Faulty<D> {
    /// Wraps a device. Keep a clone of the injector to read what it injected.
    pub fn new(inner: D, injector: Injector) -> Self {
        Self {
            inner,
            injector,
            failed: DeviceCalls::default(),
            stuck_events: BTreeSet::new(),
            stuck_streams: BTreeSet::new(),
            waited: false,
        }
    }

    fn call(&mut self, call: DeviceCall) -> Result<Decision, DeviceError> {
        self.call_of(Call {
            call,
            size: None,
            stream: None,
        })
    }

    fn call_on(&mut self, call: DeviceCall, stream: StreamId) -> Result<Decision, DeviceError> {
        self.call_of(Call {
            call,
            size: None,
            stream: Some(stream),
        })
    }

    /// Counts a call, and fails it if the plan says so.
    fn call_of(&mut self, call: Call) -> Result<Decision, DeviceError> {
        let decision = self.injector.decide(call);
        if decision.delay > Nanos::ZERO {
            self.inner.sleep(decision.delay);
        }
        match decision.failure {
            None => Ok(decision),
            Some(failure) => {
                self.count_failed(call.call, failure == Failure::OutOfMemory);
                Err(self.error(failure, call))
            }
        }
    }

    fn error(&mut self, failure: Failure, call: Call) -> DeviceError {
        match failure {
            Failure::Other(error) => error,
            Failure::OutOfMemory if call.call.gets_host_memory() => DeviceError::HostMemory {
                call: call.call.name(),
                requested: call.size.unwrap_or_default(),
                why: INJECTED.to_owned(),
            },
            Failure::OutOfMemory => match self.inner.free_memory() {
                Ok(free) => DeviceError::OutOfMemory {
                    requested: call.size.unwrap_or_default(),
                    free,
                },
                Err(error) => error,
            },
        }
    }

    const fn count_failed(&mut self, call: DeviceCall, is_out_of_memory: bool) {
        let failed = &mut self.failed;
        match call {
            DeviceCall::Malloc => {
                failed.malloc += 1;
                failed.malloc_failures += is_out_of_memory as u64;
            }
            DeviceCall::Free => failed.free += 1,
            DeviceCall::Create => failed.create += 1,
            DeviceCall::Unmap => failed.release += 1,
            DeviceCall::MallocAsync => failed.malloc_async += 1,
            DeviceCall::FreeAsync => failed.free_async += 1,
            DeviceCall::RecordEvent => failed.event_record += 1,
            DeviceCall::QueryEvent => failed.event_query += 1,
            DeviceCall::SynchronizeEvent
            | DeviceCall::SynchronizeStream
            | DeviceCall::Synchronize => failed.synchronize += 1,
            _ => {}
        }
    }

    /// Fails if the stream has work that never ends.
    fn wait_for(&mut self, call: DeviceCall, stream: StreamId) -> Result<(), DeviceError> {
        if self.stuck_streams.contains(&stream) {
            Err(self.never_returns(call))
        } else {
            Ok(())
        }
    }

    /// Fails if any stream has work that never ends.
    fn wait_for_all(&mut self, call: DeviceCall) -> Result<(), DeviceError> {
        if self.stuck_streams.is_empty() {
            Ok(())
        } else {
            Err(self.never_returns(call))
        }
    }

    /// On a real clock the first wait blocks until it is abandoned; later waits return immediately.
    /// On a simulated clock no wait blocks.
    fn never_returns(&mut self, call: DeviceCall) -> DeviceError {
        let is_measured = self.inner.info().clock == Clock::Measured;
        while is_measured && !self.waited && !self.injector.is_abandoned() {
            thread::sleep(PERIOD);
        }
        self.waited = true;
        DeviceError::NeverReturns { call: call.name() }
    }

    const fn off(bytes: Bytes, by: i64) -> Bytes {
        Bytes(bytes.0.saturating_add_signed(by))
    }
}

/// Methods that only count a call, with its size and stream, before the device makes it.
macro_rules! counted {
    ($(
        $method:ident($($name:ident: $type:ty),*) -> $output:ty =
            $call:ident($size:expr, $stream:expr) $(on $part:ident)?;
    )*) => {$(
        fn $method(&mut self, $($name: $type),*) -> Result<$output, DeviceError> {
            self.call_of(Call { call: DeviceCall::$call, size: $size, stream: $stream })?;
            self.inner$(.$part()?)?.$method($($name),*)
        }
    )*};
}

impl<D: TestDevice> wrapper::DeviceWrapper for Faulty<D> {
    type Inner = D;

    counted! {
        malloc(size: Bytes) -> DevicePtr = Malloc(Some(size), None);
        create_event() -> EventId = CreateEvent(None, None);
    }

    fn inner(&self) -> &D {
        &self.inner
    }

    fn inner_mut(&mut self) -> &mut D {
        &mut self.inner
    }

    fn free_memory(&mut self) -> Result<Bytes, DeviceError> {
        let decision = self.call(DeviceCall::MemGetInfo)?;
        Ok(Self::off(self.inner.free_memory()?, decision.off_by))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.call(DeviceCall::Free)?;
        self.wait_for_all(DeviceCall::Free)?;
        self.inner.free(ptr)
    }

    fn create_stream(&mut self) -> Result<StreamId, DeviceError> {
        self.call(DeviceCall::CreateStream)?;
        let stream = self.inner.create_stream()?;
        self.injector.stream_made(stream);
        Ok(stream)
    }

    fn destroy_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.call_on(DeviceCall::DestroyStream, stream)?;
        self.wait_for(DeviceCall::DestroyStream, stream)?;
        self.inner.destroy_stream(stream)
    }

    fn destroy_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.call(DeviceCall::DestroyEvent)?;
        self.inner.destroy_event(event)?;
        self.stuck_events.remove(&event);
        Ok(())
    }

    fn record_event(&mut self, event: EventId, stream: StreamId) -> Result<(), DeviceError> {
        let decision = self.call_on(DeviceCall::RecordEvent, stream)?;
        self.inner.record_event(event, stream)?;
        if decision.never_completes {
            self.stuck_streams.insert(stream);
        }
        match self.stuck_streams.contains(&stream) {
            true => drop(self.stuck_events.insert(event)),
            false => drop(self.stuck_events.remove(&event)),
        }
        Ok(())
    }

    fn event_done(&mut self, event: EventId) -> Result<bool, DeviceError> {
        self.call(DeviceCall::QueryEvent)?;
        if self.stuck_events.contains(&event) {
            Ok(false)
        } else {
            self.inner.event_done(event)
        }
    }

    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Result<(), DeviceError> {
        self.call_on(DeviceCall::WaitEvent, stream)?;
        self.inner.wait_event(stream, event)?;
        if self.stuck_events.contains(&event) {
            self.stuck_streams.insert(stream);
        }
        Ok(())
    }

    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.call(DeviceCall::SynchronizeEvent)?;
        if self.stuck_events.contains(&event) {
            return Err(self.never_returns(DeviceCall::SynchronizeEvent));
        }
        self.inner.synchronize_event(event)
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.call_on(DeviceCall::SynchronizeStream, stream)?;
        self.wait_for(DeviceCall::SynchronizeStream, stream)?;
        self.inner.synchronize_stream(stream)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.call(DeviceCall::Synchronize)?;
        self.wait_for_all(DeviceCall::Synchronize)?;
        self.inner.synchronize()
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        self.inner.mapped().is_some().then_some(self as _)
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        self.inner.pooled().is_some().then_some(self as _)
    }
}

impl<D: TestDevice> wrapper::TestDeviceWrapper for Faulty<D> {
    counted! {
        create_timed_event() -> EventId = CreateEvent(None, None);
        fill(stream: StreamId, range: MemoryRange, tag: Tag) -> () =
            LaunchKernel(None, Some(stream));
        verify_later(stream: StreamId, range: MemoryRange, tag: Tag) -> () =
            LaunchKernel(None, Some(stream));
        busy(stream: StreamId, duration: Nanos) -> () = LaunchKernel(None, Some(stream));
        copy_to_host(stream: StreamId, from: MemoryRange, to: HostId) -> () =
            CopyToHost(None, Some(stream));
        copy_to_device(stream: StreamId, from: HostId, to: MemoryRange) -> () =
            CopyToDevice(None, Some(stream));
    }

    fn memory(&mut self) -> Result<DeviceMemory, DeviceError> {
        let decision = self.call(DeviceCall::NvmlMemory)?;
        let memory = self.inner.memory()?;
        let process = memory
            .process
            .map(|process| Self::off(process, decision.off_by));
        Ok(DeviceMemory {
            used: Self::off(memory.used, decision.off_by),
            process,
            ..memory
        })
    }

    fn calls(&self) -> DeviceCalls {
        self.inner.calls().and(&self.failed)
    }

    fn set_call_site(&mut self, place: CallSite) {
        self.injector.set_call_site(place);
        self.inner.set_call_site(place);
    }

    fn elapsed(&mut self, start: EventId, end: EventId) -> Result<Nanos, DeviceError> {
        self.injector.check_whole(DeviceCall::QueryEvent)?;
        match [start, end]
            .into_iter()
            .find(|event| self.stuck_events.contains(event))
        {
            Some(event) => Err(DeviceError::NotReady(event.0)),
            None => self.inner.elapsed(start, end),
        }
    }

    fn verify(
        &mut self,
        stream: StreamId,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<(), DeviceError> {
        self.call_on(DeviceCall::LaunchKernel, stream)?;
        self.wait_for(DeviceCall::SynchronizeStream, stream)?;
        self.inner.verify(stream, range, tag)
    }

    fn finish_verifications(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.injector.check_whole(DeviceCall::SynchronizeStream)?;
        self.wait_for(DeviceCall::SynchronizeStream, stream)?;
        self.inner.finish_verifications(stream)
    }

    fn host_alloc(&mut self, size: Bytes, memory: &HostMemory) -> Result<HostId, DeviceError> {
        let call = if memory.is_pinned() {
            DeviceCall::HostAlloc
        } else {
            DeviceCall::HostMap
        };
        self.call_of(Call {
            call,
            size: Some(size),
            stream: None,
        })?;
        self.inner.host_alloc(size, memory)
    }

    fn host_free(&mut self, host: HostId) -> Result<(), DeviceError> {
        self.call(DeviceCall::HostFree)?;
        self.wait_for_all(DeviceCall::HostFree)?;
        self.inner.host_free(host)
    }

    /// Memory in use by others is not a call of this program, so only a sticky error applies.
    fn set_external_memory(&mut self, held: Bytes) -> Result<Bytes, DeviceError> {
        self.injector.check_whole(DeviceCall::Malloc)?;
        self.inner.set_external_memory(held)
    }
}

impl<D: TestDevice> MappedDevice for Faulty<D> {
    counted! {
        reserve(size: Bytes) -> DevicePtr = Reserve(Some(size), None) on required_mapped;
        unreserve(start: DevicePtr) -> () = Unreserve(None, None) on required_mapped;
        unmap(range: MemoryRange) -> () = Unmap(None, None) on required_mapped;
    }
    /// Each page is a call. If one fails, the pages before it are made and released, as on a full
    /// device.
    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        let pages = range.len.0.checked_div(page.0).unwrap_or(0);
        for made in 0..pages {
            if let Err(error) = self.call_of(Call {
                call: DeviceCall::Create,
                size: Some(page),
                stream: None,
            }) {
                let fitting = MemoryRange::new(range.start, Bytes(made * page.0));
                if made > 0 && !self.injector.is_broken() {
                    self.inner.required_mapped()?.map(fitting, page)?;
                    self.inner.required_mapped()?.unmap(fitting)?;
                }
                return Err(match error {
                    DeviceError::OutOfMemory { free, .. } => DeviceError::OutOfMemory {
                        requested: range.len,
                        free,
                    },
                    error => error,
                });
            }
        }
        self.inner.required_mapped()?.map(range, page)
    }
}

impl<D: TestDevice> PooledDevice for Faulty<D> {
    counted! {
        create_pool(release_threshold: Bytes) -> PoolId = CreatePool(None, None) on required_pooled;
        malloc_async(pool: PoolId, size: Bytes, stream: StreamId) -> DevicePtr =
            MallocAsync(Some(size), Some(stream)) on required_pooled;
        free_async(ptr: DevicePtr, stream: StreamId) -> () =
            FreeAsync(None, Some(stream)) on required_pooled;
        trim_pool(pool: PoolId, keep: Bytes) -> () = TrimPool(None, None) on required_pooled;
        pool_reserved(pool: PoolId) -> Bytes = PoolAttribute(None, None) on required_pooled;
        pool_memory(pool: PoolId) -> PoolMemory = PoolAttribute(None, None) on required_pooled;
    }
    fn destroy_pool(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        self.call(DeviceCall::DestroyPool)?;
        self.wait_for_all(DeviceCall::DestroyPool)?;
        self.inner.required_pooled()?.destroy_pool(pool)
    }
}
