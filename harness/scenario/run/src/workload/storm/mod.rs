//! Storms: random requests and frees drawn from one seed (`requests`), run by one thread or by
//! several (`threads`).

mod requests;
mod threads;

use std::ops::ControlFlow;

use harness_allocator::allocator::{AllocatorError, OomCause, Request};
use harness_allocator::{stats::MemoryStats, units::Bytes};
use harness_base::words::count;

use self::requests::{Operation, Requests};
use crate::between::{Between, pause};
use crate::step_result::{StepResult, Unmet};
use crate::{context::RunContext, rig::Stop};
use harness_record::{FailedRequest, Outcome};
use harness_scenario::steps::storm::{Storm, Until};
use harness_scenario::{ReportKey, Step};

#[derive(Debug, Default)]
struct Counts {
    operations: u64,
    allocations: u64,
    frees: u64,
    ooms: u64,
    peak_live: u64,
    failure: Option<Failure>,
    failed_request: Option<FailedRequest>,
}

const ABOUT_FAILURE: [ReportKey; 6] = [
    ReportKey::FailedRequest,
    ReportKey::FailedOperation,
    ReportKey::ReservedAtFailure,
    ReportKey::AllocatedAtFailure,
    ReportKey::LargestFreeAtFailure,
    ReportKey::DeviceFreeAtFailure,
];

#[derive(Debug, Default)]
struct Failure {
    figures: [u64; 6],
    is_fragmentation: bool,
    text: String,
}

impl Failure {
    fn new(operation: u64, requested: Bytes, stats: &MemoryStats, error: &AllocatorError) -> Self {
        let (reserved, allocated) = (
            stats.reserved_bytes.all.current,
            stats.allocated_bytes.all.current,
        );
        let (largest_free, device_free) = match error {
            AllocatorError::OutOfMemory(oom) => {
                let device_free = if let OomCause::Device { free } = oom.cause {
                    free
                } else {
                    Bytes::ZERO
                };
                (oom.largest_free_block.unwrap_or_default(), device_free)
            }
            AllocatorError::TooLarge { .. } | AllocatorError::Device(_) => {
                (Bytes::ZERO, Bytes::ZERO)
            }
        };
        let figures = [
            requested.0,
            operation,
            reserved,
            allocated,
            largest_free.0,
            device_free.0,
        ];
        // Enough memory was reserved but free, so only fragmentation made the request fail.
        let is_fragmentation = reserved.saturating_sub(allocated) >= requested.0;
        Self {
            figures,
            is_fragmentation,
            text: format!("operation {operation}: {error}"),
        }
    }
}

/// Runs a storm and calls `between` after each operation.
pub(crate) fn run(
    ctx: &mut RunContext,
    step: &Step,
    storm: &Storm,
    mut between: Between<'_>,
) -> Result<StepResult, Stop> {
    if let Some(threads) = storm.threads {
        return threads::run(ctx, step, storm, threads);
    }
    ctx.rig.name_buffers(&storm.id, step.position.line);
    let mut requests = Requests::new(ctx, storm, 0);
    let mut counts = Counts::default();
    while counts.operations < storm.operations {
        counts.operations += 1;
        if operate(ctx, storm, &mut requests, &mut counts)?.is_break() {
            break;
        }
        pause(&mut between, ctx)?;
    }
    Ok(conclude(ctx, step, storm, counts))
}

fn operate(
    ctx: &mut RunContext,
    storm: &Storm,
    requests: &mut Requests<'_>,
    counts: &mut Counts,
) -> Result<ControlFlow<()>, Stop> {
    let now = counts.operations;
    let (request, lifetime) = match requests.next_operation(ctx.storm(&storm.id), now) {
        Operation::Free(block) => {
            counts.frees += 1;
            ctx.rig.free(block)?;
            return Ok(ControlFlow::Continue(()));
        }
        Operation::Allocate(request, lifetime) => (request, lifetime),
    };
    match ctx.rig.allocate(request)? {
        Ok(mut buffer) => {
            if storm.fill {
                ctx.rig.fill(&mut buffer, request.stream)?;
            }
            let live = ctx.storm(&storm.id);
            live.insert(requests.due(now, lifetime), buffer);
            counts.allocations += 1;
            counts.peak_live = counts.peak_live.max(live.bytes());
            Ok(ControlFlow::Continue(()))
        }
        Err(error) => refused(ctx, storm, request, &error, counts),
    }
}

/// Handles a failed request. The storm continues unless it should end at this failure.
fn refused(
    ctx: &mut RunContext,
    storm: &Storm,
    request: Request,
    error: &AllocatorError,
    counts: &mut Counts,
) -> Result<ControlFlow<()>, Stop> {
    counts.ooms += 1;
    let failure = Failure::new(counts.operations, request.size, &ctx.rig.stats(), error);
    let ends = storm.until == Some(Until::Fragmented) && failure.is_fragmentation;
    if ends || counts.failure.is_none() {
        counts.failure = Some(failure);
        counts.failed_request = ctx.rig.failed_request(request, error)?;
    }
    Ok(if ends {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    })
}

/// How a storm that should fail can keep more memory live.
fn advice(storm: &Storm, peak_live: u64) -> String {
    let (peak, live) = (Bytes(peak_live), storm.live);
    // Most storms with long lifetimes come this close to `live`.
    if peak.0 < live.0 / 4 * 3 {
        let last = count(storm.lifetime.1, "operation");
        return format!(
            "at most {peak} of the {live} of `live` were allocated, since blocks live for at most \
             {last}: raise `lifetime`"
        );
    }
    format!(
        "at most {peak} were allocated: raise `live` towards the memory of `needs`, or mix small \
         and large `sizes`"
    )
}

fn conclude(ctx: &mut RunContext, step: &Step, storm: &Storm, counts: Counts) -> StepResult {
    if counts.ooms == 0 {
        let advice = advice(storm, counts.peak_live);
        ctx.values.storm_advice.insert(storm.id.clone(), advice);
    } else {
        ctx.values.storm_advice.remove(&storm.id);
    }
    let live = ctx.storm(&storm.id);
    let (live_blocks, live_bytes) = (live.count(), live.bytes());
    let mut result = StepResult::default();
    result.reports.extend([
        (ReportKey::Operations, counts.operations),
        (ReportKey::Allocations, counts.allocations),
        (ReportKey::Frees, counts.frees),
        (ReportKey::Ooms, counts.ooms),
        (ReportKey::LiveBlocks, live_blocks),
        (ReportKey::LiveBytes, live_bytes),
        (ReportKey::PeakLiveBytes, counts.peak_live),
    ]);
    if counts.failure.is_some() {
        result.outcome = Outcome::OutOfMemory;
        result.failed_request = counts.failed_request;
    }
    result
        .notes
        .extend(counts.failure.iter().map(|failure| failure.text.clone()));
    let Failure {
        figures,
        is_fragmentation,
        ..
    } = counts.failure.unwrap_or_default();
    result
        .reports
        .extend(ABOUT_FAILURE.into_iter().zip(figures));
    if storm.until == Some(Until::Fragmented) && !is_fragmentation {
        let (operations, failed) = (
            count(counts.operations, "operation"),
            count(counts.ooms, "failed request"),
        );
        let seen = format!(
            "{operations} with {failed}, none because of fragmentation; {}",
            advice(storm, counts.peak_live)
        );
        let expected = "a request that fails although reserved − allocated is at least its size";
        result.unmet.push(Unmet::at(step, expected, seen));
    }
    result
}
