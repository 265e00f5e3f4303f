//! Time from a failing request to the end of the next successful step.

use harness_allocator::allocator::{Allocation, AllocatorError, Request};
use harness_allocator::units::Bytes;

use super::visit::{Fault, Reading, TestBench, Visit};
use crate::provider::MemoryLimit;

pub(super) fn visit(visit: &mut Visit<'_>, size: Bytes) -> Result<Vec<Reading>, Fault> {
    let timer = visit.timer();
    // More requests than fit, even without rounding.
    let most = visit.memory.0 / size.0 + 1;
    let samples = visit.sample(timer, |visit| {
        visit.bench(MemoryLimit::Enforced, |bench, _| {
            let live = fill(bench, Request::new(size), most)?;
            let TestBench { device, allocator } = bench;
            let (recovered, time) = timer.time(&mut **device, |device| -> Result<Vec<Allocation>, Fault> {
                match allocator.allocate(device, Request::new(size)) {
                    Err(error) if error.is_out_of_memory() => {}
                    Err(error) => return Err(error.into()),
                    Ok(_) => return Err(Fault::Failed("a request succeeded that failed before, although nothing was freed".to_owned())),
                }
                let half = live.len().div_ceil(2);
                for allocation in live {
                    allocator.free(device, allocation)?;
                }
                allocator.empty_cache(device)?;
                (0..half).map(|_| allocator.allocate(device, Request::new(size)).map_err(not_recovered)).collect()
            });
            for allocation in recovered? {
                bench.free(allocation)?;
            }
            Ok(time)
        })
    })?;
    Ok(vec![Reading::time(timer, 1, samples)])
}

/// Fills the device until a request fails.
fn fill(bench: &mut TestBench, request: Request, most: u64) -> Result<Vec<Allocation>, Fault> {
    let mut live = Vec::new();
    loop {
        match bench.allocate(request) {
            Ok(allocation) => live.push(allocation),
            Err(error) if error.is_out_of_memory() && !live.is_empty() => return Ok(live),
            Err(error) => return Err(error.into()),
        }
        if live.len() as u64 > most {
            return Err(Fault::Failed(format!("{most} × {} were allocated, more than the device has", request.size)));
        }
    }
}

fn not_recovered(error: AllocatorError) -> Fault {
    match error {
        AllocatorError::Device(error) => error.into(),
        error => Fault::Failed(format!("half of the freed memory cannot be allocated again: {error}")),
    }
}
