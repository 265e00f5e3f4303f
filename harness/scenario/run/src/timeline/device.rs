//! A device wrapper that records calls and stream work on a timeline.

use harness_allocator::device::wrapper::{DeviceWrapper, TestDeviceWrapper};
use harness_allocator::device::{
    DeviceError, DevicePtr, EventId, HostId, HostMemory, Leaks, MappedDevice, MemoryRange, PoolId,
    PoolMemory, PooledDevice, StreamId, Tag, TestDevice,
};
use harness_allocator::units::{Bytes, Nanos};
use harness_record::timeline::{Entry, Track};

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
        self.tracer.push(Entry::Span {
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
            self.tracer.push(Entry::Span {
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

impl DeviceWrapper for TracedDevice {
    type Inner = dyn TestDevice;

    fn inner(&self) -> &Self::Inner {
        &*self.inner
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.inner
    }

    fn malloc(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        self.call("malloc", Some(size), |device| device.malloc(size))
    }

    fn free(&mut self, ptr: DevicePtr) -> Result<(), DeviceError> {
        self.call("free", None, |device| device.free(ptr))
    }

    fn synchronize_event(&mut self, event: EventId) -> Result<(), DeviceError> {
        self.call("synchronize_event", None, |device| {
            device.synchronize_event(event)
        })?;
        self.collect()
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Result<(), DeviceError> {
        self.call("synchronize_stream", None, |device| {
            device.synchronize_stream(stream)
        })?;
        self.collect()
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.call("synchronize", None, |device| device.synchronize())?;
        self.collect()
    }

    fn mapped(&mut self) -> Option<&mut dyn MappedDevice> {
        if self.inner_mut().mapped().is_some() {
            Some(self)
        } else {
            None
        }
    }

    fn pooled(&mut self) -> Option<&mut dyn PooledDevice> {
        if self.inner_mut().pooled().is_some() {
            Some(self)
        } else {
            None
        }
    }
}

impl TestDeviceWrapper for TracedDevice {
    fn fill(&mut self, stream: StreamId, range: MemoryRange, tag: Tag) -> Result<(), DeviceError> {
        self.work("fill", stream, Some(range.len), |device| {
            device.fill(stream, range, tag)
        })
    }

    fn verify(
        &mut self,
        stream: StreamId,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<(), DeviceError> {
        self.work("verify", stream, Some(range.len), |device| {
            device.verify(stream, range, tag)
        })
    }

    fn verify_later(
        &mut self,
        stream: StreamId,
        range: MemoryRange,
        tag: Tag,
    ) -> Result<(), DeviceError> {
        self.work("read", stream, Some(range.len), |device| {
            device.verify_later(stream, range, tag)
        })
    }

    fn busy(&mut self, stream: StreamId, duration: Nanos) -> Result<(), DeviceError> {
        self.work("work", stream, None, |device| device.busy(stream, duration))
    }

    fn host_alloc(&mut self, size: Bytes, memory: &HostMemory) -> Result<HostId, DeviceError> {
        self.call("host_alloc", Some(size), |device| {
            device.host_alloc(size, memory)
        })
    }

    fn host_free(&mut self, host: HostId) -> Result<(), DeviceError> {
        self.call("host_free", None, |device| device.host_free(host))
    }

    fn copy_to_host(
        &mut self,
        stream: StreamId,
        from: MemoryRange,
        to: HostId,
    ) -> Result<(), DeviceError> {
        self.work("copy to host", stream, Some(from.len), |device| {
            device.copy_to_host(stream, from, to)
        })
    }

    fn copy_to_device(
        &mut self,
        stream: StreamId,
        from: HostId,
        to: MemoryRange,
    ) -> Result<(), DeviceError> {
        self.work("copy to device", stream, Some(to.len), |device| {
            device.copy_to_device(stream, from, to)
        })
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
    fn reserve(&mut self, size: Bytes) -> Result<DevicePtr, DeviceError> {
        self.call("reserve", Some(size), |device| {
            device.required_mapped()?.reserve(size)
        })
    }

    fn unreserve(&mut self, start: DevicePtr) -> Result<(), DeviceError> {
        self.call("unreserve", None, |device| {
            device.required_mapped()?.unreserve(start)
        })
    }

    fn map(&mut self, range: MemoryRange, page: Bytes) -> Result<(), DeviceError> {
        self.call("map", Some(range.len), |device| {
            device.required_mapped()?.map(range, page)
        })
    }

    fn unmap(&mut self, range: MemoryRange) -> Result<(), DeviceError> {
        self.call("unmap", Some(range.len), |device| {
            device.required_mapped()?.unmap(range)
        })
    }
}

impl PooledDevice for TracedDevice {
    fn create_pool(&mut self, release_threshold: Bytes) -> Result<PoolId, DeviceError> {
        self.inner_mut()
            .required_pooled()?
            .create_pool(release_threshold)
    }

    fn destroy_pool(&mut self, pool: PoolId) -> Result<(), DeviceError> {
        self.call("destroy_pool", None, |device| {
            device.required_pooled()?.destroy_pool(pool)
        })
    }

    fn malloc_async(
        &mut self,
        pool: PoolId,
        size: Bytes,
        stream: StreamId,
    ) -> Result<DevicePtr, DeviceError> {
        self.call("malloc_async", Some(size), |device| {
            device.required_pooled()?.malloc_async(pool, size, stream)
        })
    }

    fn free_async(&mut self, ptr: DevicePtr, stream: StreamId) -> Result<(), DeviceError> {
        self.call("free_async", None, |device| {
            device.required_pooled()?.free_async(ptr, stream)
        })
    }

    fn trim_pool(&mut self, pool: PoolId, keep: Bytes) -> Result<(), DeviceError> {
        self.call("trim_pool", None, |device| {
            device.required_pooled()?.trim_pool(pool, keep)
        })
    }

    fn pool_reserved(&mut self, pool: PoolId) -> Result<Bytes, DeviceError> {
        self.inner_mut().required_pooled()?.pool_reserved(pool)
    }

    fn pool_memory(&mut self, pool: PoolId) -> Result<PoolMemory, DeviceError> {
        self.inner_mut().required_pooled()?.pool_memory(pool)
    }
}
