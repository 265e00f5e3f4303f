//! cudarc on the simulated GPU: streams that it creates and this crate borrows, and its behavior if
//! kernels are no-ops.

use std::{env, process::Command};

use cudarc::driver::{result, sys};
use harness_allocator::allocator::{Request, caching::CachingAllocator, shared::SharedAllocator};
use harness_allocator::device::{Device, DeviceError, StreamId, Tag, TestDevice};
use harness_allocator::units::{Bytes, Nanos};
use harness_cuda::CudaDevice;
use harness_gpu_settings::driver::Kernels;
use harness_gpu_settings::settings::{Events, Settings};
use harness_staging::{Staging, strict};

/// Names the test for a child process.
const CHILD: &str = "STREAMS_TEST_CHILD";

/// Runs a test again in a child process with two simulated GPUs. Returns whether this is that
/// child.
fn is_child(test: &str) -> bool {
    is_child_on(
        test,
        &Settings {
            devices: 2,
            ..strict()
        },
    )
}

/// Runs a test again in a child process on this machine.
fn is_child_on(test: &str, machine: &Settings) -> bool {
    if env::var(CHILD).is_ok_and(|name| name == test) {
        return true;
    }
    let staging = Staging::new(machine).expect("the simulated GPU is set up");
    let mut command = Command::new(env::current_exe().expect("the test program has a path"));
    command
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, test);
    staging.apply(&mut command);
    let output = command.output().expect("the test program starts");
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{}\n{text}",
        output.status
    );
    false
}

/// Creates a stream with cudarc in the primary context of a device.
fn stream_of_cudarc(ordinal: i32) -> sys::CUstream {
    result::init().expect("the driver initializes");
    let device = result::device::get(ordinal).expect("the device exists");
    // SAFETY: the context is retained until the process ends, and is made current.
    unsafe {
        let context = result::primary_ctx::retain(device).expect("the primary context is retained");
        result::ctx::set_current(context).expect("the context is made current");
    }
    result::stream::create(result::stream::StreamKind::NonBlocking).expect("a stream")
}

#[test]
fn memory_is_allocated_on_a_borrowed_stream_of_cudarc() {
    if !is_child("memory_is_allocated_on_a_borrowed_stream_of_cudarc") {
        return;
    }
    let theirs = stream_of_cudarc(0);
    let mut device = CudaDevice::open(0).expect("the GPU opens");
    // SAFETY: the stream is destroyed below, after the device.
    let stream =
        unsafe { device.borrow_stream(theirs) }.expect("the stream belongs to the same context");
    assert_eq!(device.raw_stream(stream), Ok(theirs));
    let allocator = SharedAllocator::new(CachingAllocator::default(), device);
    let batch = allocator
        .allocate(Request::new(Bytes::mib(20)).on(stream))
        .expect("it fits");
    allocator
        .lock()
        .device
        .busy(stream, Nanos::millis(20))
        .expect("it is queued");
    allocator
        .lock()
        .device
        .fill(stream, batch.range(), Tag(7))
        .expect("it is queued");
    allocator
        .lock()
        .device
        .verify(stream, batch.range(), Tag(7))
        .expect("it is intact");
    allocator.free(batch.ptr()).expect("it is live");
    allocator.close().expect("nothing is live");
    drop(allocator);
    // SAFETY: the stream still lives, and nothing uses it any more.
    unsafe {
        result::stream::synchronize(theirs).expect("the stream still exists");
        result::stream::destroy(theirs).expect("the stream was not destroyed");
    }
}

#[test]
fn releasing_a_borrowed_stream_does_not_destroy_it() {
    if !is_child("releasing_a_borrowed_stream_does_not_destroy_it") {
        return;
    }
    let theirs = stream_of_cudarc(0);
    let mut device = CudaDevice::open(0).expect("the GPU opens");
    let borrow = |device: &mut CudaDevice| {
        // SAFETY: nothing destroys the stream.
        unsafe { device.borrow_stream(theirs) }.expect("the stream belongs to the same context")
    };
    let stream = borrow(&mut device);
    assert_eq!(borrow(&mut device), stream, "the stream keeps its number");
    assert_eq!(
        device.leaks().streams,
        0,
        "a borrowed stream cannot be destroyed"
    );
    assert_eq!(
        device.destroy_stream(stream),
        Err(DeviceError::UnknownHandle {
            kind: "own stream",
            number: stream.0
        })
    );
    device
        .busy(stream, Nanos::millis(500))
        .expect("it is queued");
    let before = device.now();
    device.release_stream(stream).expect("it was borrowed");
    assert!(
        device.now().saturating_sub(before) < Nanos::millis(400),
        "nothing waits"
    );
    assert_eq!(
        device.synchronize_stream(stream),
        Err(DeviceError::UnknownHandle {
            kind: "stream",
            number: stream.0
        })
    );
    assert_ne!(borrow(&mut device), stream, "numbers are not reused");
    let own = device.create_stream().expect("a stream");
    for not_borrowed in [StreamId::DEFAULT, own, stream] {
        let refused = DeviceError::UnknownHandle {
            kind: "borrowed stream",
            number: not_borrowed.0,
        };
        assert_eq!(device.release_stream(not_borrowed), Err(refused));
    }
}

#[test]
fn ambiguous_and_foreign_streams_are_refused() {
    if !is_child("ambiguous_and_foreign_streams_are_refused") {
        return;
    }
    let elsewhere = stream_of_cudarc(1);
    let mut device = CudaDevice::open(0).expect("the GPU opens");
    // SAFETY: nothing destroys the stream, and the other handles are constants of the driver.
    let mut borrow =
        |stream: usize| unsafe { device.borrow_stream(std::ptr::without_provenance_mut(stream)) };
    assert_eq!(
        (borrow(0), borrow(1)),
        (Ok(StreamId::DEFAULT), Ok(StreamId::DEFAULT)),
        "both handles are the default stream"
    );
    let per_thread = borrow(2)
        .expect_err("each thread has a different stream")
        .to_string();
    assert_eq!(
        per_thread,
        "stream to borrow: CU_STREAM_PER_THREAD is a different stream in each thread: create a \
         stream"
    );
    let other = borrow(elsewhere.addr())
        .expect_err("the stream belongs to the other GPU")
        .to_string();
    assert_eq!(
        other,
        "stream to borrow: it belongs to another context: create it in the primary context of this \
         device"
    );
}

/// The simulated GPU with no-op kernels: the driver's functions share their implementation with the
/// runtime.
#[test]
fn cudarc_uses_streams_events_and_memory_with_no_op_kernels() {
    const NAME: &str = "cudarc_uses_streams_events_and_memory_with_no_op_kernels";
    if !is_child_on(
        NAME,
        &Settings {
            kernels: Kernels::NoOp,
            events: Events::Synchronize,
            ..strict()
        },
    ) {
        return;
    }
    let stream = stream_of_cudarc(0);
    let event =
        result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).expect("an event");
    let (free, _) = result::mem_get_info().expect("memory is told");
    let mut read = [9_u8; 16];
    // SAFETY: stream, event and memory live until they are released at the end.
    unsafe {
        let memory = result::malloc_sync(1 << 20).expect("it fits");
        assert_eq!(
            result::mem_get_info().expect("memory is told").0,
            free - (2 << 20)
        );
        result::memset_d8_async(memory, 7, 16, stream).expect("it is queued");
        result::event::record(event, stream).expect("it is queued");
        assert_eq!(
            result::event::query(event).map_err(|error| error.0),
            Err(sys::CUresult::CUDA_ERROR_NOT_READY),
            "nobody has waited"
        );
        result::stream::wait_event(
            stream,
            event,
            sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
        )
        .expect("it is queued");
        result::stream::synchronize(stream).expect("the wait succeeds");
        result::event::query(event).expect("the stream is idle");
        result::memcpy_dtoh_async(&mut read, memory, stream).expect("it is queued");
        assert_eq!(read, [0; 16], "simulated memory reads as zeros");
        result::free_sync(memory).expect("it is live");
        assert!(result::free_sync(memory).is_err());
        result::event::destroy(event).expect("it is there");
        result::stream::destroy(stream).expect("it is there");
        assert!(result::stream::synchronize(stream).is_err());
    }
    assert_eq!(result::mem_get_info().expect("memory is told").0, free);
    let refused = CudaDevice::open(0)
        .err()
        .expect("a machine with no-op kernels is refused")
        .to_string();
    assert!(
        refused.starts_with("cuModuleGetGlobal_v2 failed: CUDA_ERROR_NOT_FOUND (500)"),
        "{refused}"
    );
}
