//! `empty_cache`, by the number of segments in the cache.

use harness_allocator::allocator::{Allocation, Request};
use harness_allocator::units::Bytes;

use super::visit::{Fault, Reading, TestBench, Visit};
use crate::provider::MemoryLimit;

pub(super) fn visit(visit: &mut Visit<'_>, segments: u64, size: Bytes) -> Result<Vec<Reading>, Fault> {
    let timer = visit.timer();
    let samples = visit.bench(MemoryLimit::Reported, |bench, visit| {
        visit.sample(timer, |_| {
            let live: Vec<Allocation> = (0..segments).map(|_| bench.allocate(Request::new(size))).collect::<Result<_, _>>()?;
            for allocation in live {
                bench.free(allocation)?;
            }
            let TestBench { device, allocator } = bench;
            let (emptied, time) = timer.time(&mut **device, |device| allocator.empty_cache(device));
            emptied?;
            Ok(time)
        })
    })?;
    Ok(vec![Reading::time(timer, 1, samples)])
}
