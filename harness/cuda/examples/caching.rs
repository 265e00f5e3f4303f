//! A caching allocator in a program of your own: `cargo run --example caching`. On the first GPU, or on the simulated device where there
//! is none.

use std::error::Error;
use std::thread;

use harness_allocator::allocator::Request;
use harness_allocator::allocator::caching::{CachingAllocator, Config};
use harness_allocator::allocator::shared::SharedAllocator;
use harness_allocator::device::sim::{SimConfig, SimDevice};
use harness_allocator::device::{Device, Tag, TestDevice};
use harness_allocator::units::Bytes;
use harness_cuda::CudaDevice;

fn main() -> Result<(), Box<dyn Error>> {
    let mut device: Box<dyn TestDevice> = match CudaDevice::open(0) {
        Ok(gpu) => Box::new(gpu),
        Err(why) => {
            eprintln!("{why}; the simulated device is used instead");
            Box::new(SimDevice::new(SimConfig::default()))
        }
    };
    // A program that has streams already lends them instead: `CudaDevice::borrow_stream`.
    let streams = [device.create_stream()?, device.create_stream()?];
    let allocator = SharedAllocator::new(CachingAllocator::new(Config::parse("max_split_size_mb:256")?), device);

    // Each thread works on its own stream.
    thread::scope(|scope| {
        let workers = streams.map(|stream| {
            let allocator = &allocator;
            scope.spawn(move || -> Result<(), Box<dyn Error + Send + Sync>> {
                for step in 0..100 {
                    let batch = allocator.allocate(Request::new(Bytes::mib(64)).on(stream))?;
                    // Here your kernels would run, on the address `batch.ptr().0`.
                    allocator.lock().device.fill(stream, batch.range(), Tag(step))?;
                    allocator.free(batch.ptr())?;
                }
                Ok(())
            })
        });
        workers.into_iter().try_for_each(|worker| worker.join().expect("no worker panics"))
    })
    .map_err(|error| error.to_string())?;

    print!("{}", allocator.stats().summary());
    println!("{} driver allocations for 200 batches", allocator.lock().device.calls().malloc);
    allocator.close()?;
    Ok(())
}
