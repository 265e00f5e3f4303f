//! A device wrapper that records calls and stream work on a timeline.

use harness_allocator::device::wrapper::{DeviceWrapper, TestDeviceWrapper};
use harness_allocator::device::{
    DeviceError, DevicePtr, EventId, HostId, HostMemory, Leaks, MappedDevice, MemoryRange, PoolId,
    PoolMemory, PooledDevice, StreamId, Tag, TestDevice,
};
use harness_allocator::units::{Bytes, Nanos};
use harness_record::timeline::{TimelineEntry, Track};

use super::Tracer;

/// The number of unfinished work items to track. Each needs two events.
const MAX_PENDING: usize = 256;

/// See the module. Two events, invisible to the caller, time each work item.
pub struct TracedDevice {
    inner: Box<dyn TestDevice>,
    tracer: Tracer,
    /// A completed event and its time on the device's clock.
    origin: (EventId, Nanos),
    pending: Vec<Pending>,
    spare: Vec<EventId>,
    /// The number of events created here, including the origin.
    events: u64,
}

struct Pending {
    stream: StreamId,
    name: &'static str,
    size: Option<Bytes>,
    start: EventId,
    end: EventId,
}

impl TracedDevice {
    /// Wraps a device before its first use.
    pub fn new(mut inner: Box<dyn TestDevice>, tracer: Tracer) -> Result<Self, DeviceError> {
        let device = &mut *inner;
        let event = device.create_timed_event()?;
        device.record_event(event, StreamId::DEFAULT)?;
        device.synchronize_event(event)?;
        let origin = (event, device.now());
        Ok(Self {
            inner,
            tracer,
            origin,
            pending: Vec::new(),
            spare: Vec::new(),
            events: 1,
        })
    }

    fn call<T>(
        &mut self,
        name: &'static str,
        size: Option<Bytes>,
        call: impl FnOnce(&mut dyn TestDevice) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let start = self.inner_mut().now();
        let answer = call(&mut *self.inner);
        let duration = self.inner_mut().now().saturating_sub(start);
        let failure = answer.as_ref().err().map(ToString::to_string);
        self.tracer.push(TimelineEntry::Span {
            track: Track::Calls,
            name: name.to_owned(),
            start,
            duration,
            size,
            failure,
        });
        answer
    }

    fn work<T>(
        &mut self,
        name: &'static str,
        stream: StreamId,
        size: Option<Bytes>,
        queue: impl FnOnce(&mut dyn TestDevice) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        if self.pending.len() >= MAX_PENDING {
            self.collect()?;
        }
        let (start, end) = (self.event()?, self.event()?);
        self.inner_mut().record_event(start, stream)?;
        let answer = queue(&mut *self.inner)?;
        self.inner_mut().record_event(end, stream)?;
        self.pending.push(Pending {
            stream,
            name,
            size,
            start,
            end,
        });
        Ok(answer)
    }

    fn event(&mut self) -> Result<EventId, DeviceError> {
        if let Some(event) = self.spare.pop() {
            return Ok(event);
        }
        self.events += 1;
        self.inner_mut().create_timed_event()
    }

    fn collect(&mut self) -> Result<(), DeviceError> {
        let mut waiting = Vec::new();
        for work in std::mem::take(&mut self.pending) {
            if !self.inner_mut().event_done(work.end)? {
                waiting.push(work);
                continue;
            }
            let Pending {
                stream,
                name,
                size,
                start,
                end,
            } = work;
            let (origin, opened) = self.origin;
            let began = self.inner_mut().elapsed(origin, start)?;
            let duration = self.inner_mut().elapsed(start, end)?;
            self.tracer.push(TimelineEntry::Span {
                track: Track::Stream(stream),
                name: name.to_owned(),
                start: opened + began,
                duration,
                size,
                failure: None,
            });
            self.spare.extend([start, end]);
        }
        self.pending = waiting;
        Ok(())
    }
}

/// Methods that make one call of the device, or queue one piece of work, with its name and size on
/// the timeline.
macro_rules! traced {
    ($(
        $method:ident($($name:ident: $type:ty),*) -> $output:ty
            = $as:ident($($about:expr),+) $(on $part:ident)? $(then $after:ident)?;
    )*) => {$(
        fn $method(&mut self, $($name: $type),*) -> Result<$output, DeviceError> {
            self.$as($($about,)+ |device| device$(.$part()?)?.$method($($name),*))
                $(.and_then(|answer| self.$after().map(|()| answer)))?
        }
    )*};
}

impl DeviceWrapper for TracedDevice {
    type Inner = dyn TestDevice;

    fn inner(&self) -> &Self::Inner {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.inner
    }

    traced! {
        malloc(size: Bytes) -> DevicePtr = call("malloc", Some(size));
        free(ptr: DevicePtr) -> () = call("free", None);
        synchronize_event(event: EventId) -> () = call("synchronize_event", None) then collect;
        synchronize_stream(stream: StreamId) -> () = call("synchronize_stream", None) then collect;
        synchronize() -> () = call("synchronize", None) then collect;
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        self.inner_mut().mapped().is_some().then_some(self as _)
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        self.inner_mut().pooled().is_some().then_some(self as _)
    }
}

impl TestDeviceWrapper for TracedDevice {
    traced! {
        fill(stream: StreamId, range: MemoryRange, tag: Tag) -> () =
            work("fill", stream, Some(range.len));
        verify(stream: StreamId, range: MemoryRange, tag: Tag) -> () =
            work("verify", stream, Some(range.len));
        verify_later(stream: StreamId, range: MemoryRange, tag: Tag) -> () =
            work("read", stream, Some(range.len));
        busy(stream: StreamId, duration: Nanos) -> () = work("work", stream, None);
        host_alloc(size: Bytes, memory: &HostMemory) -> HostId = call("host_alloc", Some(size));
        host_free(host: HostId) -> () = call("host_free", None);
        copy_to_host(stream: StreamId, from: MemoryRange, to: HostId) -> () =
            work("copy to host", stream, Some(from.len));
        copy_to_device(stream: StreamId, from: HostId, to: MemoryRange) -> () =
            work("copy to device", stream, Some(to.len));
    }

    fn leaks(&self) -> Leaks {
        let leaks = self.inner().leaks();
        Leaks {
            events: leaks.events.saturating_sub(self.events),
            ..leaks
        }
    }
}

impl MappedDevice for TracedDevice {
    traced! {
        reserve(size: Bytes) -> DevicePtr = call("reserve", Some(size)) on required_mapped;
        unreserve(start: DevicePtr) -> () = call("unreserve", None) on required_mapped;
        map(range: MemoryRange, page: Bytes) -> () =
            call("map", Some(range.len)) on required_mapped;
        unmap(range: MemoryRange) -> () = call("unmap", Some(range.len)) on required_mapped;
    }
}

impl PooledDevice for TracedDevice {
    traced! {
        destroy_pool(pool: PoolId) -> () = call("destroy_pool", None) on required_pooled;
        malloc_async(pool: PoolId, size: Bytes, stream: StreamId) -> DevicePtr =
            call("malloc_async", Some(size)) on required_pooled;
        free_async(ptr: DevicePtr, stream: StreamId) -> () =
            call("free_async", None) on required_pooled;
        trim_pool(pool: PoolId, keep: Bytes) -> () = call("trim_pool", None) on required_pooled;
    }

    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError> {
        self.inner_mut()
            .required_pooled()?
            .create_pool(release_threshold)
    }

    fn pool_reserved(&mut self, pool: PoolId) -> Result<Bytes, DeviceError> {
        self.inner_mut().required_pooled()?.pool_reserved(pool)
    }

    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError> {
        self.inner_mut().required_pooled()?.pool_memory(pool)
    }
}
