//! cudarc on the simulated GPU: streams that it makes and this crate borrows, and what it finds where kernels are skipped.

use std::env;
use std::process::Command;

use cudarc::driver::result;
use cudarc::driver::sys;
use harness_allocator::allocator::Request;
use harness_allocator::allocator::caching::CachingAllocator;
use harness_allocator::allocator::shared::SharedAllocator;
use harness_allocator::device::{Device, DeviceError, StreamId, Tag, TestDevice};
use harness_allocator::units::{Bytes, Nanos};
use harness_cuda::CudaDevice;
use harness_gpu_settings::driver::Kernels;
use harness_gpu_settings::settings::{Events, Settings};
use harness_staging::{Staging, strict};

/// Says to a child which test it is.
const CHILD: &str = "STREAMS_TEST_CHILD";

/// Runs a test again as a child that sees two simulated GPUs, and says whether this is that child.
fn is_child(test: &str) -> bool {
    is_child_on(test, &Settings { devices: 2, ..strict() })
}

/// The same on a machine like this.
fn is_child_on(test: &str, machine: &Settings) -> bool {
    if env::var(CHILD).is_ok_and(|name| name == test) {
        return true;
    }
    let staging = Staging::new(machine).expect("the GPU is staged");
    let mut command = Command::new(env::current_exe().expect("this program has a path"));
    command.args(["--exact", test, "--nocapture"]).env(CHILD, test);
    staging.apply(&mut command);
    let output = command.output().expect("this program runs again");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{}\n{text}", output.status);
    false
}

/// A stream that cudarc makes in the primary context of a device.
fn stream_of_cudarc(ordinal: i32) -> sys::CUstream {
    result::init().expect("there is a driver");
    let device = result::device::get(ordinal).expect("there is such a device");
    // SAFETY: the context is retained until the process ends, and made this thread's.
    unsafe {
        let context = result::primary_ctx::retain(device).expect("it has a context");
        result::ctx::set_current(context).expect("it is this thread's");
    }
    result::stream::create(result::stream::StreamKind::NonBlocking).expect("a stream")
}

#[test]
fn memory_is_allocated_on_a_stream_that_cudarc_made_and_the_stream_stays_cudarcs() {
    if !is_child("memory_is_allocated_on_a_stream_that_cudarc_made_and_the_stream_stays_cudarcs") {
        return;
    }
    let theirs = stream_of_cudarc(0);
    let mut device = CudaDevice::open(0).expect("the GPU opens");
    // SAFETY: the stream is destroyed below, after the device.
    let stream = unsafe { device.borrow_stream(theirs.cast()) }.expect("it is of the same context");
    assert_eq!(device.raw_stream(stream).map(|raw| raw.cast()), Ok(theirs));
    let allocator = SharedAllocator::new(CachingAllocator::default(), device);
    let batch = allocator.allocate(Request::new(Bytes::mib(20)).on(stream)).expect("it fits");
    allocator.lock().device.busy(stream, Nanos::millis(20)).expect("it is queued");
    allocator.lock().device.fill(stream, batch.range(), Tag(7)).expect("it is queued");
    allocator.lock().device.verify(stream, batch.range(), Tag(7)).expect("it is intact");
    allocator.free(batch.ptr()).expect("it is live");
    allocator.close().expect("nothing is live");
    drop(allocator);
    // SAFETY: the stream lives, as nobody has destroyed it; nothing uses it any more.
    unsafe {
        result::stream::synchronize(theirs).expect("it is still there");
        result::stream::destroy(theirs).expect("it was not destroyed");
    }
}

#[test]
fn a_borrowed_stream_is_released_and_not_destroyed() {
    if !is_child("a_borrowed_stream_is_released_and_not_destroyed") {
        return;
    }
    let theirs = stream_of_cudarc(0);
    let mut device = CudaDevice::open(0).expect("the GPU opens");
    // SAFETY: nobody destroys the stream.
    let borrow = |device: &mut CudaDevice| unsafe { device.borrow_stream(theirs.cast()) }.expect("it is of the same context");
    let stream = borrow(&mut device);
    assert_eq!(borrow(&mut device), stream, "it keeps its number");
    assert_eq!(device.leaks().streams, 0, "it is nobody's to destroy here");
    assert_eq!(device.destroy_stream(stream), Err(DeviceError::UnknownHandle { kind: "stream of its own", number: stream.0 }));
    device.busy(stream, Nanos::millis(500)).expect("it is queued");
    let before = device.now();
    device.release_stream(stream).expect("it was borrowed");
    assert!(device.now().saturating_sub(before) < Nanos::millis(400), "nothing waits");
    assert_eq!(device.synchronize_stream(stream), Err(DeviceError::UnknownHandle { kind: "stream", number: stream.0 }));
    assert_ne!(borrow(&mut device), stream, "numbers are not used again");
    let own = device.create_stream().expect("a stream");
    for not_borrowed in [StreamId::DEFAULT, own, stream] {
        let refused = DeviceError::UnknownHandle { kind: "borrowed stream", number: not_borrowed.0 };
        assert_eq!(device.release_stream(not_borrowed), Err(refused));
    }
}

#[test]
fn streams_that_cannot_be_meant_are_refused() {
    if !is_child("streams_that_cannot_be_meant_are_refused") {
        return;
    }
    let elsewhere = stream_of_cudarc(1);
    let mut device = CudaDevice::open(0).expect("the GPU opens");
    // SAFETY: nobody destroys the stream, and the others are names that the driver has for its own.
    let mut borrow = |stream: usize| unsafe { device.borrow_stream(std::ptr::without_provenance_mut(stream)) };
    assert_eq!((borrow(0), borrow(1)), (Ok(StreamId::DEFAULT), Ok(StreamId::DEFAULT)), "both name the default stream");
    let per_thread = borrow(2).expect_err("it is another one in each thread").to_string();
    assert_eq!(per_thread, "a stream to borrow: CU_STREAM_PER_THREAD is another stream in each thread: make a stream");
    let other = borrow(elsewhere.addr()).expect_err("it is of the other GPU").to_string();
    assert_eq!(other, "a stream to borrow: it is of another context: make it in the primary context of this device");
}

/// The driver's functions on the simulated GPU as programs find it, which does no kernels: they are those of the runtime by other names.
#[test]
fn where_kernels_are_skipped_cudarc_has_streams_events_and_memory_too() {
    const NAME: &str = "where_kernels_are_skipped_cudarc_has_streams_events_and_memory_too";
    if !is_child_on(NAME, &Settings { kernels: Kernels::Skipped, events: Events::Synchronize, ..strict() }) {
        return;
    }
    let stream = stream_of_cudarc(0);
    let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).expect("an event");
    let (free, _) = result::mem_get_info().expect("memory is told");
    let mut read = [9_u8; 16];
    // SAFETY: stream, event and memory live until they are given back at the end.
    unsafe {
        let memory = result::malloc_sync(1 << 20).expect("it fits");
        assert_eq!(result::mem_get_info().expect("memory is told").0, free - (2 << 20));
        result::memset_d8_async(memory, 7, 16, stream).expect("it is queued");
        result::event::record(event, stream).expect("it is queued");
        assert_eq!(result::event::query(event).map_err(|error| error.0), Err(sys::CUresult::CUDA_ERROR_NOT_READY), "nobody has waited");
        result::stream::wait_event(stream, event, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT).expect("it is queued");
        result::stream::synchronize(stream).expect("it is waited for");
        result::event::query(event).expect("the stream was waited for");
        result::memcpy_dtoh_async(&mut read, memory, stream).expect("it is queued");
        assert_eq!(read, [0; 16], "memory has no contents");
        result::free_sync(memory).expect("it is live");
        assert!(result::free_sync(memory).is_err());
        result::event::destroy(event).expect("it is there");
        result::stream::destroy(stream).expect("it is there");
        assert!(result::stream::synchronize(stream).is_err());
    }
    assert_eq!(result::mem_get_info().expect("memory is told").0, free);
    let refused = CudaDevice::open(0).err().expect("its kernels are not done there").to_string();
    assert!(refused.starts_with("cuModuleGetGlobal_v2 failed: CUDA_ERROR_NOT_FOUND (500)"), "{refused}");
}
