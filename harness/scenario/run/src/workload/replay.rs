//! Replays the operations of a trace on the rig.

use std::collections::BTreeMap;

use harness_allocator::allocator::{AllocatorError, PrivatePoolId, Request};
use harness_allocator::{device::StreamId, units::Bytes};
use harness_trace::{snapshot::StackId, trace::TraceEvent};

use crate::between::{Between, pause};
use crate::context::RunContext;
use crate::rig::{PoolRefused, Stop};
use crate::step_result::{StepResult, Unmet};
use harness_record::FailedRequest;
use harness_scenario::{ReportKey, Step, steps::replay::Replay};

#[derive(Debug, Default)]
struct Counts {
    allocations: u64,
    frees: u64,
    ooms: u64,
    peak_live: u64,
    /// The first refused request: its operation, counted from 1, its size, and the error.
    refused: Option<(u64, Bytes, String)>,
    failed_request: Option<FailedRequest>,
    /// The first misuse of a private pool.
    misused: Option<String>,
}

/// Replays all operations of a trace and calls `between` after each.
pub(crate) fn run(
    ctx: &mut RunContext,
    step: &Step,
    replay: &Replay,
    mut between: Between<'_>,
) -> Result<StepResult, Stop> {
    let mut counts = Counts::default();
    let (line, place) = (step.position.line, ctx.rig.place());
    let mut replayer = Replayer {
        replay,
        line,
        pools: BTreeMap::new(),
        external_memory: Bytes::ZERO,
        place,
        named: None,
    };
    for operation in 0..replay.trace.events.len() {
        replayer.operate(ctx, operation, &mut counts)?;
        pause(&mut between, ctx)?;
    }
    Ok(conclude(ctx, step, replay, counts))
}

struct Replayer<'a> {
    replay: &'a Replay,
    line: u32,
    pools: BTreeMap<PrivatePoolId, PrivatePoolId>,
    external_memory: Bytes,
    /// The step's call stack in the recording.
    place: Option<StackId>,
    /// The site of the current allocations; the outer `None` before the first one.
    named: Option<Option<&'a str>>,
}

impl<'a> Replayer<'a> {
    fn operate(
        &mut self,
        ctx: &mut RunContext,
        operation: usize,
        counts: &mut Counts,
    ) -> Result<(), Stop> {
        match self.replay.trace.events[operation] {
            TraceEvent::Allocate { id, size, stream } => {
                return self.allocate(ctx, operation, (id, size, stream), counts);
            }
            TraceEvent::Free { id } => {
                if let Some(buffer) = ctx.storm(&self.replay.id).take_of(id) {
                    counts.frees += 1;
                    ctx.rig.free(buffer)?;
                }
            }
            TraceEvent::RecordStream { id, stream } => {
                let stream = self.stream(ctx, stream);
                if let Some(mut buffer) = ctx.storm(&self.replay.id).take_of(id) {
                    let recorded = ctx.rig.record_stream(&mut buffer, stream);
                    ctx.storm(&self.replay.id).insert(id, buffer);
                    recorded?;
                }
            }
            TraceEvent::SynchronizeStream(stream) => {
                let stream = self.stream(ctx, stream);
                ctx.rig.synchronize_stream(stream)?;
            }
            TraceEvent::Synchronize => ctx.rig.synchronize()?,
            TraceEvent::EmptyCache => drop(ctx.rig.empty_cache()?),
            TraceEvent::SetFraction(fraction) => ctx.rig.set_memory_fraction(fraction),
            TraceEvent::ResetPeaks => ctx.rig.reset_peaks(),
            TraceEvent::ExternalMemory(change) => {
                self.external_memory = ctx.rig.set_external_memory(Bytes(
                    self.external_memory.0.saturating_add_signed(change),
                ))?;
            }
            TraceEvent::BeginPool(pool) => {
                let pool = self.pool(ctx, pool);
                note_misuse(ctx.rig.begin_private_pool(pool)?, operation, counts);
            }
            TraceEvent::EndPool(pool) => {
                let pool = self.pool(ctx, pool);
                note_misuse(ctx.rig.end_private_pool(pool)?, operation, counts);
            }
            TraceEvent::ReleasePool(pool) => {
                let pool = self.pool(ctx, pool);
                note_misuse(ctx.rig.release_private_pool(pool)?, operation, counts);
            }
        }
        Ok(())
    }

    fn allocate(
        &mut self,
        ctx: &mut RunContext,
        operation: usize,
        (id, size, stream): (u64, Bytes, StreamId),
        counts: &mut Counts,
    ) -> Result<(), Stop> {
        let site = self.replay.trace.site(operation);
        if self.named != Some(site) {
            match site {
                Some(site) => ctx.rig.name_buffers(&site, self.line),
                None => ctx.rig.name_buffers(&self.replay.id, self.line),
            }
            ctx.rig.set_site(self.place, site);
            self.named = Some(site);
        }
        let request = Request {
            size,
            stream: self.stream(ctx, stream),
        };
        match ctx.rig.allocate(request)? {
            Ok(mut buffer) => {
                let filled = if self.replay.fill {
                    ctx.rig.fill(&mut buffer, request.stream)
                } else {
                    Ok(())
                };
                let live = ctx.storm(&self.replay.id);
                live.insert(id, buffer);
                counts.allocations += 1;
                counts.peak_live = counts.peak_live.max(live.bytes());
                filled
            }
            Err(error) => refused(ctx, operation, request, &error, counts),
        }
    }

    fn stream(&self, ctx: &RunContext, stream: StreamId) -> StreamId {
        self.replay
            .streams
            .get(&stream)
            .map_or(StreamId::DEFAULT, |name| ctx.stream(name))
    }

    fn pool(&mut self, ctx: &mut RunContext, pool: PrivatePoolId) -> PrivatePoolId {
        *self
            .pools
            .entry(pool)
            .or_insert_with(|| ctx.rig.name_private_pool())
    }
}

/// Handles a refused request. The replay continues, as the recorded program did or would have done.
fn refused(
    ctx: &mut RunContext,
    operation: usize,
    request: Request,
    error: &AllocatorError,
    counts: &mut Counts,
) -> Result<(), Stop> {
    counts.ooms += 1;
    if counts.refused.is_none() {
        counts.refused = Some((operation as u64 + 1, request.size, error.to_string()));
        counts.failed_request = ctx.rig.failed_request(request, error)?;
    }
    Ok(())
}

/// Notes a misused pool. Allocators without private pools serve all requests from one pool, which
/// is no misuse.
fn note_misuse(answer: Result<(), PoolRefused>, operation: usize, counts: &mut Counts) {
    if let Err(PoolRefused::Misuse(why)) = answer {
        counts
            .misused
            .get_or_insert_with(|| format!("operation {}: {why}", operation + 1));
    }
}

fn conclude(ctx: &mut RunContext, step: &Step, replay: &Replay, counts: Counts) -> StepResult {
    let live = ctx.storm(&replay.id);
    let mut result = StepResult::default();
    let (operation, size) = counts
        .refused
        .as_ref()
        .map_or((0, Bytes::ZERO), |&(operation, size, _)| (operation, size));
    result.reports.extend([
        (ReportKey::Operations, replay.trace.events.len() as u64),
        (ReportKey::Allocations, counts.allocations),
        (ReportKey::Frees, counts.frees),
        (ReportKey::Ooms, counts.ooms),
        (ReportKey::FailedRequest, size.0),
        (ReportKey::FailedOperation, operation),
        (ReportKey::LiveBlocks, live.count()),
        (ReportKey::LiveBytes, live.bytes()),
        (ReportKey::PeakLiveBytes, counts.peak_live),
    ]);
    result.unmet.extend(
        counts
            .misused
            .map(|why| Unmet::at(step, "private pools to be used correctly", why)),
    );
    let expected = replay.expect.of(&ctx.setup.arm, ctx.setup.device);
    match counts.refused {
        Some((operation, _, why)) => {
            let seen = format!(
                "{} refused, the first in operation {operation}: {why}",
                counts.ooms
            );
            let wanted = ("every request of the trace to be served", seen);
            result.runs_out(
                step,
                expected,
                format!("operation {operation}: {why}"),
                wanted,
                counts.failed_request,
            );
        }
        None => {
            let seen = format!("all {} are served", counts.allocations);
            result.fits(step, expected, "a request of the trace to be refused", seen);
        }
    }
    result
}
