//! Storms: many requests and frees of random sizes and lifetimes, all drawn from one seed.

use harness_allocator::allocator::{AllocatorError, Request};
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::rig::Stop;
use crate::world::{StepResult, Unmet, World};
use harness_record::{Outcome, Shortage};
use harness_scenario::steps::storm::{Storm, StormSizes, Until};
use harness_scenario::{ReportKey, Step};

/// What a storm counts.
#[derive(Debug, Default)]
struct Tally {
    operations: u64,
    allocations: u64,
    frees: u64,
    ooms: u64,
    peak_live: u64,
    failure: Option<Failure>,
    /// Of the same request.
    shortage: Option<Shortage>,
}

/// The request that is reported: the first that failed, or the one that ended the storm.
#[derive(Debug)]
struct Failure {
    operation: u64,
    requested: Bytes,
    reserved: Bytes,
    allocated: Bytes,
    largest_free: Bytes,
    device_free: Bytes,
    text: String,
}

impl Failure {
    /// Whether the memory was there, but in pieces.
    fn is_fragmentation(&self) -> bool {
        self.reserved.saturating_sub(self.allocated) >= self.requested
    }
}

/// Runs a storm. Logarithmic in live blocks for each operation, apart from the allocator and the audit.
pub(crate) fn run(world: &mut World, step: &Step, storm: &Storm) -> Result<StepResult, Stop> {
    // Each storm of a scenario draws from a sequence of its own.
    let mut rng = ChaCha8Rng::seed_from_u64(world.seed.wrapping_add(storm.id.index() as u64));
    let streams: Vec<StreamId> = storm.streams.iter().map(|stream| world.stream(stream)).collect();
    world.rig.name_buffers(&storm.id, step.position.line);
    let mut tally = Tally::default();
    while tally.operations < storm.operations {
        tally.operations += 1;
        let now = tally.operations;
        if let Some(due) = world.storm(&storm.id).take_due(now) {
            world.rig.free(due)?;
            tally.frees += 1;
            continue;
        }
        let (size, stream) = (draw_size(&mut rng, &storm.sizes), *streams.choose(&mut rng).unwrap_or(&StreamId::DEFAULT));
        let lifetime = rng.random_range(storm.lifetime.0..=storm.lifetime.1);
        let live = world.storm(&storm.id);
        if live.bytes().checked_add(size.0).is_none_or(|bytes| bytes > storm.live.0)
            && let Some(next_due) = live.take_due(u64::MAX)
        {
            world.rig.free(next_due)?;
            tally.frees += 1;
            continue;
        }
        match world.rig.allocate(Request { size, stream })? {
            Ok(mut buffer) => {
                if storm.fill {
                    world.rig.fill(&mut buffer, stream)?;
                }
                let live = world.storm(&storm.id);
                live.insert(now + lifetime, buffer);
                tally.allocations += 1;
                tally.peak_live = tally.peak_live.max(live.bytes());
            }
            Err(error) => {
                tally.ooms += 1;
                let failure = failure(now, size, &error, world);
                let ends = storm.until == Some(Until::Fragmented) && failure.is_fragmentation();
                if ends || tally.failure.is_none() {
                    tally.failure = Some(failure);
                    tally.shortage = world.rig.shortage(Request { size, stream }, &error)?;
                }
                if ends {
                    break;
                }
            }
        }
    }
    Ok(conclude(world, step, storm, tally))
}

fn draw_size(rng: &mut ChaCha8Rng, sizes: &StormSizes) -> Bytes {
    match sizes {
        StormSizes::Choices(choices) => choices.choose(rng).copied().unwrap_or_default(),
        // Every doubling is equally likely, and every size within it: integers only, so that all machines draw the same. A doubling includes
        // both its ends, so that a largest size that is a power of two is no doubling of its own.
        StormSizes::LogUniform { min, max } => {
            let doubling = rng.random_range(min.0.ilog2()..=(max.0 - 1).max(min.0).ilog2());
            let (lowest, highest) = (min.0.max(1 << doubling), max.0.min((1_u64 << doubling).saturating_mul(2)));
            Bytes(rng.random_range(lowest..=highest))
        }
    }
}

fn failure(operation: u64, requested: Bytes, error: &AllocatorError, world: &World) -> Failure {
    let stats = world.rig.stats();
    let mut failure = Failure {
        operation,
        requested,
        reserved: Bytes(stats.reserved_bytes.all.current),
        allocated: Bytes(stats.allocated_bytes.all.current),
        largest_free: Bytes::ZERO,
        device_free: Bytes::ZERO,
        text: error.to_string(),
    };
    if let AllocatorError::OutOfMemory(oom) = error {
        failure.largest_free = oom.largest_free_block.unwrap_or_default();
        if let harness_allocator::allocator::OomCause::Device { free } = oom.cause {
            failure.device_free = free;
        }
    }
    failure
}

fn conclude(world: &mut World, step: &Step, storm: &Storm, tally: Tally) -> StepResult {
    let live = world.storm(&storm.id);
    let (live_blocks, live_bytes) = (live.count(), live.bytes());
    let mut result = StepResult::default();
    result.reports.extend([
        (ReportKey::Operations, tally.operations),
        (ReportKey::Allocations, tally.allocations),
        (ReportKey::Frees, tally.frees),
        (ReportKey::Ooms, tally.ooms),
        (ReportKey::LiveBlocks, live_blocks),
        (ReportKey::LiveBytes, live_bytes),
        (ReportKey::PeakLiveBytes, tally.peak_live),
    ]);
    let figure = |of: fn(&Failure) -> u64| tally.failure.as_ref().map_or(0, of);
    result.reports.extend([
        (ReportKey::FailedRequest, figure(|failure| failure.requested.0)),
        (ReportKey::FailedOperation, figure(|failure| failure.operation)),
        (ReportKey::ReservedAtFailure, figure(|failure| failure.reserved.0)),
        (ReportKey::AllocatedAtFailure, figure(|failure| failure.allocated.0)),
        (ReportKey::LargestFreeAtFailure, figure(|failure| failure.largest_free.0)),
        (ReportKey::DeviceFreeAtFailure, figure(|failure| failure.device_free.0)),
    ]);
    let fragmented = tally.failure.as_ref().is_some_and(Failure::is_fragmentation);
    if let Some(failure) = tally.failure {
        result.outcome = Outcome::OutOfMemory;
        result.shortage = tally.shortage;
        result.notes.push(format!("operation {}: {}", failure.operation, failure.text));
    }
    match storm.until {
        Some(Until::Fragmented) if !fragmented => {
            let seen = format!("{} operations with {} failed requests, none of them so", tally.operations, tally.ooms);
            let expected = "a request that fails although reserved − allocated is at least its size";
            result.unmet.push(Unmet::at(step, expected, seen));
        }
        Some(Until::Fragmented) | None => {}
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_uniform_sizes_stay_in_range_and_every_doubling_gets_its_share() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let sizes = StormSizes::LogUniform { min: Bytes::mib(1), max: Bytes::mib(64) };
        let mut shares = [0_u32; 6];
        for _ in 0..60_000 {
            let size = draw_size(&mut rng, &sizes).0;
            assert!((1 << 20..=64 << 20).contains(&size), "{size}");
            shares[((size - 1).ilog2() as usize).saturating_sub(20).min(5)] += 1;
        }
        assert!(shares.iter().all(|share| (9_500..10_500).contains(share)), "{shares:?}");
        let one = StormSizes::LogUniform { min: Bytes(1), max: Bytes(1) };
        assert_eq!(draw_size(&mut rng, &one), Bytes(1));
    }
}
