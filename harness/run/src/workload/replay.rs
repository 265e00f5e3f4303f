//! Replays the operations of a trace on the rig.

use std::collections::BTreeMap;

use harness_allocator::allocator::{AllocatorError, PrivatePoolId, Request};
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;
use harness_trace::snapshot::StackId;
use harness_trace::trace::TraceEvent;

use crate::between::{Between, pause};
use crate::rig::{PoolRefused, Stop};
use crate::step_result::{StepResult, Unmet};
use crate::world::World;
use harness_record::{Outcome, Shortage};
use harness_scenario::steps::replay::Replay;
use harness_scenario::{Expected, ReportKey, Step};

#[derive(Debug, Default)]
struct Tally {
    allocations: u64,
    frees: u64,
    ooms: u64,
    peak_live: u64,
    /// The first refused request: its operation, counted from 1, its size, and the error.
    refused: Option<(u64, Bytes, String)>,
    /// The facts about the same request.
    shortage: Option<Shortage>,
    /// The first misuse of a private pool.
    misused: Option<String>,
}

/// Replays all operations of a trace and calls `between` after each. Each operation takes time logarithmic in live
/// blocks, plus the allocator and the audit.
pub(crate) fn run(world: &mut World, step: &Step, replay: &Replay, mut between: Between<'_>) -> Result<StepResult, Stop> {
    let mut tally = Tally::default();
    let (line, place) = (step.position.line, world.rig.place());
    let mut replayer = Replayer { replay, line, pools: BTreeMap::new(), pressure: Bytes::ZERO, place, named: None };
    for operation in 0..replay.trace.events.len() {
        replayer.operate(world, operation, &mut tally)?;
        pause(&mut between, world)?;
    }
    Ok(conclude(world, step, replay, tally))
}

struct Replayer<'a> {
    replay: &'a Replay,
    line: u32,
    /// The rig's id of each private pool in the trace.
    pools: BTreeMap<PrivatePoolId, PrivatePoolId>,
    /// The current external memory.
    pressure: Bytes,
    /// The step's call stack in the recording.
    place: Option<StackId>,
    /// The site of the current allocations; the outer `None` before the first one.
    named: Option<Option<&'a str>>,
}

impl<'a> Replayer<'a> {
    fn operate(&mut self, world: &mut World, operation: usize, tally: &mut Tally) -> Result<(), Stop> {
        match self.replay.trace.events[operation] {
            TraceEvent::Allocate { id, size, stream } => return self.allocate(world, operation, (id, size, stream), tally),
            TraceEvent::Free { id } => {
                if let Some(buffer) = world.storm(&self.replay.id).take_of(id) {
                    tally.frees += 1;
                    world.rig.free(buffer)?;
                }
            }
            TraceEvent::RecordStream { id, stream } => {
                let stream = self.stream(world, stream);
                if let Some(mut buffer) = world.storm(&self.replay.id).take_of(id) {
                    let recorded = world.rig.record_stream(&mut buffer, stream);
                    world.storm(&self.replay.id).insert(id, buffer);
                    recorded?;
                }
            }
            TraceEvent::SynchronizeStream(stream) => {
                let stream = self.stream(world, stream);
                world.rig.synchronize_stream(stream)?;
            }
            TraceEvent::Synchronize => world.rig.synchronize()?,
            TraceEvent::EmptyCache => drop(world.rig.empty_cache()?),
            TraceEvent::SetFraction(fraction) => world.rig.set_memory_fraction(fraction),
            TraceEvent::ResetPeaks => world.rig.reset_peaks(),
            TraceEvent::Pressure(change) => {
                self.pressure = world.rig.set_pressure(Bytes(self.pressure.0.saturating_add_signed(change)))?;
            }
            TraceEvent::BeginPool(pool) => {
                let pool = self.pool(world, pool);
                note_misuse(world.rig.begin_private_pool(pool)?, operation, tally);
            }
            TraceEvent::EndPool(pool) => {
                let pool = self.pool(world, pool);
                note_misuse(world.rig.end_private_pool(pool)?, operation, tally);
            }
            TraceEvent::ReleasePool(pool) => {
                let pool = self.pool(world, pool);
                note_misuse(world.rig.release_private_pool(pool)?, operation, tally);
            }
        }
        Ok(())
    }

    fn allocate(
        &mut self,
        world: &mut World,
        operation: usize,
        (id, size, stream): (u64, Bytes, StreamId),
        tally: &mut Tally,
    ) -> Result<(), Stop> {
        let site = self.replay.trace.site(operation);
        if self.named != Some(site) {
            match site {
                Some(site) => world.rig.name_buffers(&site, self.line),
                None => world.rig.name_buffers(&self.replay.id, self.line),
            }
            world.rig.set_site(self.place, site);
            self.named = Some(site);
        }
        let request = Request { size, stream: self.stream(world, stream) };
        match world.rig.allocate(request)? {
            Ok(mut buffer) => {
                let filled = if self.replay.fill { world.rig.fill(&mut buffer, request.stream) } else { Ok(()) };
                let live = world.storm(&self.replay.id);
                live.insert(id, buffer);
                tally.allocations += 1;
                tally.peak_live = tally.peak_live.max(live.bytes());
                filled
            }
            Err(error) => refused(world, operation, request, &error, tally),
        }
    }

    fn stream(&self, world: &World, stream: StreamId) -> StreamId {
        self.replay.streams.get(&stream).map_or(StreamId::DEFAULT, |name| world.stream(name))
    }

    fn pool(&mut self, world: &mut World, pool: PrivatePoolId) -> PrivatePoolId {
        *self.pools.entry(pool).or_insert_with(|| world.rig.name_private_pool())
    }
}

/// Handles a refused request. The replay continues, as the recorded program did or would have done.
fn refused(world: &mut World, operation: usize, request: Request, error: &AllocatorError, tally: &mut Tally) -> Result<(), Stop> {
    tally.ooms += 1;
    if tally.refused.is_none() {
        tally.refused = Some((operation as u64 + 1, request.size, error.to_string()));
        tally.shortage = world.rig.shortage(request, error)?;
    }
    Ok(())
}

/// Notes a misused pool. Allocators without private pools serve all requests from one pool, which is no misuse.
fn note_misuse(answer: Result<(), PoolRefused>, operation: usize, tally: &mut Tally) {
    if let Err(PoolRefused::Misuse(why)) = answer {
        tally.misused.get_or_insert_with(|| format!("operation {}: {why}", operation + 1));
    }
}

fn conclude(world: &mut World, step: &Step, replay: &Replay, tally: Tally) -> StepResult {
    let live = world.storm(&replay.id);
    let mut result = StepResult::default();
    let (operation, size) = tally.refused.as_ref().map_or((0, Bytes::ZERO), |&(operation, size, _)| (operation, size));
    result.reports.extend([
        (ReportKey::Operations, replay.trace.events.len() as u64),
        (ReportKey::Allocations, tally.allocations),
        (ReportKey::Frees, tally.frees),
        (ReportKey::Ooms, tally.ooms),
        (ReportKey::FailedRequest, size.0),
        (ReportKey::FailedOperation, operation),
        (ReportKey::LiveBlocks, live.count()),
        (ReportKey::LiveBytes, live.bytes()),
        (ReportKey::PeakLiveBytes, tally.peak_live),
    ]);
    result.unmet.extend(tally.misused.map(|why| Unmet::at(step, "private pools to be used correctly", why)));
    result.shortage = tally.shortage;
    let expected = replay.expect.of(&world.arm, world.device);
    match (tally.refused, expected) {
        (Some((operation, _, why)), expected) => {
            result.outcome = Outcome::OutOfMemory;
            result.notes.push(format!("operation {operation}: {why}"));
            match expected {
                Expected::Fits => {
                    let seen = format!("{} refused, the first in operation {operation}: {why}", tally.ooms);
                    result.unmet.push(Unmet::at(step, "every request of the trace to be served", seen));
                }
                Expected::Oom(Some(cause)) => result.unmet.extend(Unmet::other_cause(step, cause, result.shortage.as_ref())),
                Expected::Oom(None) | Expected::Any => {}
            }
        }
        (None, Expected::Oom(_)) => {
            let seen = format!("all {} are served", tally.allocations);
            result.unmet.push(Unmet::at(step, "a request of the trace to be refused", seen));
        }
        (None, Expected::Fits | Expected::Any) => {}
    }
    result
}
