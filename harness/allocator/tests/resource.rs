//! The contract of a [`MemoryResource`], written once and run on every implementation: the shared allocator, each plain allocator behind
//! a lock, and each adaptor. Below it: what each adaptor adds.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use harness_allocator::allocator::adaptors::{Limited, Logged, Named, OnOutOfMemory};
use harness_allocator::allocator::caching::Config;
use harness_allocator::allocator::resource::{Buffer, Locked, MemoryResource};
use harness_allocator::allocator::shared::{Cores, SharedAllocator};
use harness_allocator::allocator::{
    Allocation, Allocator, AllocatorError, AllocatorKind, AllocatorSpec, MemoryFraction, OomCause, Request,
};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, DeviceError, StreamId, TestDevice};
use harness_allocator::units::{Bytes, Nanos};

const MEMORY: Bytes = Bytes::mib(256);

/// Lends the device of a row.
type WithDevice = Box<dyn Fn(&mut dyn FnMut(&mut SimDevice))>;

/// A resource and what a test does to its device.
struct Row {
    name: String,
    resource: Box<dyn MemoryResource>,
    device: WithDevice,
}

impl Row {
    fn device<T>(&self, call: impl Fn(&mut SimDevice) -> T) -> T {
        let mut answer = None;
        (self.device)(&mut |device| answer = Some(call(device)));
        answer.expect("the function was called")
    }

    fn allocate(&self, size: Bytes) -> Allocation {
        self.resource.allocate(Request::new(size)).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    fn current(&self) -> [u64; 3] {
        let stats = self.resource.stats();
        [stats.allocated_bytes, stats.active_bytes, stats.reserved_bytes].map(|bytes| bytes.all.current)
    }
}

fn device() -> SimDevice {
    // As on a GPU, a device free waits for work in flight.
    SimDevice::new(SimConfig { free_synchronizes: true, ..SimConfig::replay(MEMORY) })
}

fn shared(cores: Cores) -> Arc<SharedAllocator<SimDevice>> {
    Arc::new(SharedAllocator::new(device(), Config::default(), cores))
}

fn row_of_shared<R: MemoryResource + 'static>(name: &str, cores: Cores, wrap: impl Fn(Arc<SharedAllocator<SimDevice>>) -> R) -> Row {
    let allocator = shared(cores);
    let resource = Box::new(wrap(Arc::clone(&allocator)));
    Row { name: name.to_owned(), resource, device: Box::new(move |call| call(&mut allocator.device())) }
}

/// Every implementation.
fn rows() -> Vec<Row> {
    let locked = AllocatorKind::ALL.iter().map(|&kind| {
        let resource = Arc::new(Locked::new(kind.build(), device()));
        let for_device = Arc::clone(&resource);
        let device = Box::new(move |call: &mut dyn FnMut(&mut SimDevice)| for_device.with_device(|device| call(device)));
        Row { name: format!("locked {}", kind.name()), resource: Box::new(resource), device }
    });
    let shared = [
        row_of_shared("shared, one core", Cores::One, |shared| shared),
        row_of_shared("shared, a core per stream", Cores::PerStream, |shared| shared),
        row_of_shared("limited", Cores::PerStream, |shared| Limited::new(shared, MEMORY)),
        row_of_shared("logged", Cores::PerStream, |shared| Logged::new(shared, |_| {})),
        row_of_shared("named", Cores::PerStream, Named::new),
        row_of_shared("on out of memory", Cores::PerStream, |shared| OnOutOfMemory::new(shared, |_, _| false)),
        row_of_shared("all adaptors", Cores::One, |shared| {
            Named::new(Limited::new(Logged::new(OnOutOfMemory::new(shared, |_, calls| calls < 2), |_| {}), MEMORY))
        }),
    ];
    locked.chain(shared).collect()
}

#[test]
fn what_is_allocated_is_counted_and_goes_back() {
    for row in rows() {
        let live = [Bytes::ZERO, Bytes(100), Bytes::mib(3), Bytes::mib(24)].map(|size| row.allocate(size));
        assert!(live[0].is_null());
        assert_eq!(row.resource.stats().allocation.all.current, 3, "{}", row.name);
        assert!(row.resource.snapshot().iter().map(|segment| segment.size).sum::<Bytes>() >= Bytes::mib(27), "{}", row.name);
        live.into_iter().for_each(|allocation| row.resource.free(allocation).expect("it is live"));
        row.resource.empty_cache().expect("the device is sound");
        assert_eq!(row.current(), [0; 3], "{}", row.name);
        row.resource.close().expect("nothing is live");
        assert!(row.device(|device| device.leaks()).is_empty(), "{}", row.name);
    }
}

#[test]
fn memory_that_is_not_there_is_an_error_that_changes_nothing() {
    for row in rows() {
        let kept = row.allocate(Bytes::mib(1));
        let error = row.resource.allocate(Request::new(MEMORY + Bytes::mib(2))).expect_err("more than there is");
        assert!(error.is_out_of_memory(), "{}: {error}", row.name);
        let half = MemoryFraction::new(0.5).expect("a share");
        row.resource.set_memory_fraction(half);
        assert!(row.resource.allocate(Request::new(Bytes::mib(200))).is_err(), "{}", row.name);
        row.resource.set_memory_fraction(MemoryFraction::ALL);
        row.resource.free(kept).expect("it is live");
        row.resource.empty_cache().expect("the device is sound");
        let most = row.allocate(Bytes::mib(200));
        row.resource.free(most).expect("it is live");
        row.resource.close().expect("nothing is live");
    }
}

#[test]
fn memory_of_another_resource_is_refused() {
    for (row, other) in rows().into_iter().zip(rows()) {
        for size in [Bytes::mib(3), Bytes::mib(3), Bytes::mib(3)] {
            let foreign = other.allocate(size);
            for refused in [row.resource.record_stream(&foreign, StreamId::DEFAULT), row.resource.free(foreign)] {
                assert!(matches!(refused, Err(DeviceError::InvalidFree { .. })), "{}: {refused:?}", row.name);
            }
        }
        assert_eq!(row.current(), [0; 3], "{}", row.name);
    }
}

#[test]
fn a_destroyed_stream_blocks_nothing_and_a_released_one_leaves_nothing() {
    for row in rows() {
        let [side, other] = [(); 2].map(|()| row.device(|device| device.create_stream().expect("streams can be made")));
        let shared = [row.allocate(Bytes::mib(3)), row.allocate(Bytes::mib(3))];
        let own = row.resource.allocate(Request::new(Bytes::mib(24)).on(side)).expect("there is room");
        for allocation in &shared {
            row.resource.record_stream(allocation, side).expect("it is live");
            row.device(|device| device.busy(side, Nanos::millis(5)).expect("the stream is there"));
        }
        let [early, late] = shared;
        row.resource.free(early).expect("it is live");
        row.device(|device| device.destroy_stream(side).expect("the stream is there"));
        row.resource.free(late).expect("it is live");
        row.resource.free(own).expect("it is live");
        row.resource.release_stream(side).expect("the device is sound");
        row.resource.release_stream(other).expect("the device is sound");
        let next = row.allocate(Bytes::mib(3));
        assert_eq!(row.resource.stats().active.all.current, 1, "{}", row.name);
        row.resource.free(next).expect("it is live");
        row.resource.empty_cache().expect("the device is sound");
        assert_eq!(row.current(), [0; 3], "{}", row.name);
        row.device(|device| device.destroy_stream(other).expect("the stream is there"));
        row.resource.close().expect("nothing is live");
        assert!(row.device(|device| device.leaks()).is_empty(), "{}", row.name);
    }
}

#[test]
fn close_waits_for_work_in_flight() {
    let expandable = Config { expandable_segments: true, ..Config::default() };
    let mut rows = rows();
    for cores in [Cores::One, Cores::PerStream] {
        let allocator = Arc::new(SharedAllocator::new(device(), expandable.clone(), cores));
        let of_device = Arc::clone(&allocator);
        let name = format!("shared expandable, {cores:?}");
        rows.push(Row { name, resource: Box::new(allocator), device: Box::new(move |call| call(&mut of_device.device())) });
    }
    for row in rows {
        let side = row.device(|device| device.create_stream().expect("streams can be made"));
        let event = row.device(|device| device.create_event().expect("events can be made"));
        let allocation = row.allocate(Bytes::mib(3));
        row.resource.record_stream(&allocation, side).expect("it is live");
        row.device(|device| {
            device.busy(side, Nanos::millis(20)).expect("the stream is there");
            device.record_event(event, side).expect("the stream is there");
        });
        row.resource.close().expect("the device is sound");
        assert!(row.device(|device| device.event_done(event).expect("the event is there")), "{}", row.name);
    }
}

#[test]
fn threads_share_a_resource() {
    for row in rows() {
        let resource = &row.resource;
        thread::scope(|scope| {
            for size in [Bytes(700), Bytes::mib(2), Bytes::mib(12)] {
                scope.spawn(move || {
                    for _ in 0..50 {
                        let buffer = Buffer::new(resource, Request::new(size)).expect("there is room");
                        assert_eq!(buffer.size(), size);
                    }
                });
            }
        });
        assert_eq!(row.resource.stats().allocated_bytes.all.current, 0, "{}", row.name);
        row.resource.close().expect("nothing is live");
    }
}

#[test]
fn a_buffer_frees_itself_when_it_is_dropped_and_says_how_when_it_is_freed() {
    let allocator = shared(Cores::PerStream);
    let allocated = || allocator.stats().allocated_bytes.all.current;
    {
        let buffer = Buffer::new(&*allocator, Request::new(Bytes::mib(3))).expect("there is room");
        buffer.record_stream(StreamId::DEFAULT).expect("it is live");
        assert_eq!((buffer.range().start, buffer.range().len, allocated()), (buffer.ptr(), Bytes::mib(3), Bytes::mib(3).0));
    }
    assert_eq!(allocated(), 0);
    let sent = Buffer::new(Arc::clone(&allocator), Request::new(Bytes::mib(3))).expect("there is room");
    thread::spawn(move || sent.free()).join().expect("no panic").expect("it is live");
    assert_eq!(allocated(), 0);
    let closed = Buffer::new(&*allocator, Request::new(Bytes::mib(3))).expect("there is room");
    allocator.close().expect("the device is sound");
    assert!(matches!(closed.free(), Err(DeviceError::InvalidFree { .. })));
}

#[test]
fn a_limit_counts_what_is_live_and_asks_nobody_below() {
    let allocator = shared(Cores::One);
    let limited = Limited::new(&*allocator, Bytes::mib(10));
    let most = limited.allocate(Request::new(Bytes::mib(10))).expect("as much as is allowed");
    let error = limited.allocate(Request::new(Bytes(1))).expect_err("no more is allowed");
    let AllocatorError::OutOfMemory(why) = &error else { panic!("{error}") };
    assert_eq!((why.cause, allocator.stats().num_ooms), (OomCause::Limit { limit: Bytes::mib(10) }, 0));
    assert!(error.to_string().contains("the program allows 10 MiB"), "{error}");
    limited.free(most).expect("it is live");
    assert_eq!(limited.remaining(), Bytes::mib(10));
    allocator.set_memory_fraction(MemoryFraction::new(0.0).expect("a share"));
    allocator.empty_cache().expect("the device is sound");
    assert!(limited.allocate(Request::new(Bytes::mib(4))).is_err(), "refused below");
    assert_eq!(limited.remaining(), Bytes::mib(10), "what was refused below is not live");
}

#[test]
fn the_log_tells_each_call_and_its_end() {
    let lines = Mutex::new(Vec::new());
    let logged = Logged::new(shared(Cores::One), |call| lines.lock().expect("no holder panics").push(call.to_string()));
    let allocation = logged.allocate(Request::new(Bytes::mib(3))).expect("there is room");
    let ptr = allocation.ptr();
    logged.allocate(Request::new(MEMORY + Bytes(1))).expect_err("more than there is");
    logged.free(allocation).expect("it is live");
    logged.empty_cache().expect("the device is sound");
    let lines = lines.into_inner().expect("no holder panics");
    let [allocated, refused, freed, emptied] = lines.as_slice() else { panic!("{lines:?}") };
    assert_eq!(*allocated, format!("allocate 3 MiB on stream 0: {ptr}"));
    assert!(refused.contains(": out of memory: "), "{refused}");
    assert_eq!((freed.clone(), emptied.as_str()), (format!("free {ptr}, 3 MiB on stream 0"), "empty_cache"));
}

#[test]
fn the_callback_makes_room_until_it_says_no() {
    let allocator = shared(Cores::One);
    let spare = Mutex::new(Some(allocator.allocate(Request::new(Bytes::mib(200))).expect("there is room")));
    let asked = AtomicU64::new(0);
    let resource = OnOutOfMemory::new(Arc::clone(&allocator), |_, calls| {
        asked.store(calls.into(), Ordering::Relaxed);
        spare.lock().expect("no holder panics").take().is_some_and(|spare| allocator.free_allocation(spare).is_ok())
    });
    let fits = resource.allocate(Request::new(Bytes::mib(100))).expect("the callback freed enough");
    assert_eq!(asked.load(Ordering::Relaxed), 1);
    let error = resource.allocate(Request::new(Bytes::mib(200))).expect_err("nothing more to free");
    assert!(matches!(error, AllocatorError::OutOfMemory(_)), "{error}");
    resource.free(fits).expect("it is live");
}

#[test]
fn names_tell_what_is_live() {
    let named = Named::new(Locked::new(AllocatorSpec::from(AllocatorKind::Bfc).build(), device()));
    let request = |mib| Request::new(Bytes::mib(mib));
    let weights = named.allocate_named(request(3), "weights").expect("there is room");
    let [one, other] = [4, 5].map(|mib| named.allocate_named(request(mib), "activations").expect("there is room"));
    let unnamed = named.allocate(request(1)).expect("there is room");
    assert_eq!((named.name_of(weights.ptr()).as_deref(), named.name_of(unnamed.ptr())), (Some("weights"), None));
    let live = |named: &Named<_>| -> Vec<(String, u64, Bytes)> {
        let live: Vec<_> = Named::<Locked<Box<dyn Allocator>, SimDevice>>::live_names(named);
        live.into_iter().map(|live| (live.name, live.count, live.requested)).collect()
    };
    assert_eq!(live(&named), [("activations".to_owned(), 2, Bytes::mib(9)), ("weights".to_owned(), 1, Bytes::mib(3))]);
    named.free(one).expect("it is live");
    named.free(weights).expect("it is live");
    assert_eq!(live(&named), [("activations".to_owned(), 1, Bytes::mib(5))]);
    named.free(other).expect("it is live");
    named.free(unnamed).expect("it is live");
    assert!(live(&named).is_empty());
}
