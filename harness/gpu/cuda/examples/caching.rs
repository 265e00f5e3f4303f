//! Uses a caching allocator in your own program: `cargo run --example caching`. Runs on the first
//! GPU, or on the simulated device if there is none.

use std::{error::Error, thread};

use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::{Request, shared::SharedAllocator};
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, Tag, TestDevice};
use harness_allocator::units::Bytes;
use harness_cuda::CudaDevice;

fn main() -> Result<(), Box<dyn Error>> {
    let mut device: Box<dyn TestDevice> = match CudaDevice::open(0) {
        Ok(gpu) => Box::new(gpu),
        Err(why) => {
            eprintln!("{why}; using the simulated device");
            Box::new(SimDevice::new(SimConfig::default()))
        }
    };
    // A program with its own streams can lend them instead: `CudaDevice::borrow_stream`.
    let streams = [device.create_stream()?, device.create_stream()?];
    let allocator = SharedAllocator::new(
        CachingAllocator::new(Config::parse("max_split_size_mb:256")?),
        device,
    );

    // Each thread uses its own stream.
    thread::scope(|scope| {
        let workers = streams.map(|stream| {
            let allocator = &allocator;
            scope.spawn(move || -> Result<(), Box<dyn Error + Send + Sync>> {
                for step in 0..100 {
                    let batch = allocator.allocate(Request::new(Bytes::mib(64)).on(stream))?;
                    // Your kernels would run here, on the address `batch.ptr().0`.
                    allocator
                        .lock()
                        .device
                        .fill(stream, batch.range(), Tag(step))?;
                    allocator.free(batch.ptr())?;
                }
                Ok(())
            })
        });
        workers
            .into_iter()
            .try_for_each(|worker| worker.join().expect("no worker panics"))
    })
    .map_err(|error| error.to_string())?;

    print!("{}", allocator.stats().summary());
    println!(
        "{} driver allocations for 200 batches",
        allocator.lock().device.calls().malloc
    );
    allocator.close()?;
    Ok(())
}
