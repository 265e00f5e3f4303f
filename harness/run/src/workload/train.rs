//! Training as a pattern of allocations: parameters and optimizer state live all the time, the forward pass makes activations, the backward pass
//! frees them and makes gradients, and the optimizer reads and writes parameters and state. Contents are verified on the way, so that memory that
//! was handed out twice is found.

use harness_allocator::allocator::{AllocatorError, Request};
use harness_allocator::device::StreamId;
use harness_allocator::units::{Bytes, Nanos};

use super::{Between, pause};
use crate::recovery::{self, Tried};
use crate::rig::{Buffer, Finding, Stop};
use crate::world::{StepResult, Unmet, World};
use harness_record::Invariant;
use harness_record::{Outcome, Shortage};
use harness_scenario::steps::train::{OPTIMIZER_COPIES, Train};
use harness_scenario::{DeviceKind, Expected};
use harness_scenario::{Plan, ReportKey, Step};

type Answer<T> = Result<Result<T, AllocatorError>, Stop>;

/// Parameters and optimizer state, which live as long as the training.
struct Model {
    stream: StreamId,
    /// The parameters of each layer, then the optimizer state of each layer.
    buffers: Vec<Buffer>,
    parameters_per_layer: Bytes,
    layers: u64,
}

/// The buffers of one iteration, and why its last failed request failed.
#[derive(Default)]
struct Iteration {
    activations: Vec<Buffer>,
    gradients: Vec<Buffer>,
    shortage: Option<Shortage>,
}

#[derive(Default)]
struct Tally {
    iterations: u64,
    final_batch: u64,
    attempts: u64,
    retries: u64,
    without_progress: u64,
    ooms: u64,
    retained: u64,
    lost: Nanos,
    /// Of the last request that failed.
    shortage: Option<Shortage>,
}

/// Runs a training, with something else after each of its iterations.
pub(crate) fn run(world: &mut World, step: &Step, train: &Train, between: Between<'_>) -> Result<StepResult, Stop> {
    let stream = world.stream(&train.stream);
    match &step.id {
        Some(id) => world.rig.name_buffers(id, step.position.line),
        None => world.rig.name_buffers(&step.action.kind(), step.position.line),
    }
    let parameters_per_layer = Bytes(train.parameters.0 / train.layers);
    let mut model = Model { stream, buffers: Vec::new(), parameters_per_layer, layers: train.layers };
    let mut tally = Tally::default();
    let failed = match model.build(world, &mut tally.shortage)? {
        Ok(()) => iterate(world, train, &mut model, &mut tally, between)?,
        Err(error) => {
            tally.ooms += 1;
            Some(error)
        }
    };
    free_all(world, model.buffers)?;
    Ok(conclude(&world.arm, world.device, step, train, tally, failed))
}

/// Does all iterations. Returns the error that ended them early, if one did.
fn iterate(
    world: &mut World,
    train: &Train,
    model: &mut Model,
    tally: &mut Tally,
    mut between: Between<'_>,
) -> Result<Option<AllocatorError>, Stop> {
    let mut plan = Plan::of_batch(train.batch);
    for _ in 0..train.iterations {
        let recovered = recovery::recover(world, train.on_oom.as_ref(), Tried::Iteration, plan, |world, plan| {
            let per_layer = Bytes(train.activations_per_sample.0 * plan.batch / train.layers);
            model.iterate(world, per_layer, tally)
        })?;
        tally.attempts += recovered.retries + 1;
        tally.retries += recovered.retries;
        tally.without_progress += recovered.without_progress;
        tally.lost += recovered.lost;
        match recovered.answer {
            Ok(()) => {
                // The smaller batch stays: going back up would only fail again.
                plan = recovered.plan;
                tally.final_batch = plan.batch;
                tally.iterations += 1;
                pause(&mut between, world)?;
            }
            Err(error) => return Ok(Some(error)),
        }
    }
    Ok(None)
}

impl Model {
    fn build(&mut self, world: &mut World, shortage: &mut Option<Shortage>) -> Answer<()> {
        for size in [self.parameters_per_layer, Bytes(self.parameters_per_layer.0 * OPTIMIZER_COPIES)] {
            for _ in 0..self.layers {
                match make(world, size, self.stream, shortage)? {
                    Ok(buffer) => self.buffers.push(buffer),
                    Err(error) => return Ok(Err(error)),
                }
            }
        }
        Ok(Ok(()))
    }

    /// Does one iteration. Where it fails, everything that it made is freed, and the model is verified.
    fn iterate(&mut self, world: &mut World, activation: Bytes, tally: &mut Tally) -> Answer<()> {
        let before = world.rig.stats().allocated_bytes.all.current;
        let mut iteration = Iteration::default();
        let answer = match self.forward(world, activation, &mut iteration)? {
            Ok(()) => self.backward(world, activation, &mut iteration)?,
            Err(error) => Err(error),
        };
        if answer.is_ok() {
            self.update(world)?;
        } else {
            tally.ooms += 1;
            tally.shortage = iteration.shortage.take();
        }
        free_all(world, iteration.activations)?;
        free_all(world, iteration.gradients)?;
        let after = world.rig.stats().allocated_bytes.all.current;
        if answer.is_err() {
            tally.retained = tally.retained.max(after.saturating_sub(before));
            // A check that is no part of the training: a timed run goes without.
            if !world.rig.is_timed() {
                self.verify(world)?;
            }
        }
        if after != before {
            world.rig.note(Finding {
                invariant: Invariant::OomChangesOnlyTheCache,
                expected: format!("{before} B allocated after an iteration as before it"),
                seen: format!("{after} B"),
            });
        }
        Ok(answer)
    }

    fn forward(&self, world: &mut World, activation: Bytes, iteration: &mut Iteration) -> Answer<()> {
        for _ in 0..self.layers {
            match make(world, activation, self.stream, &mut iteration.shortage)? {
                Ok(buffer) => iteration.activations.push(buffer),
                Err(error) => return Ok(Err(error)),
            }
        }
        Ok(Ok(()))
    }

    /// Goes from the last layer to the first. The gradient of an activation lives while its layer is worked on, that of the parameters until the
    /// iteration ends.
    fn backward(&self, world: &mut World, activation: Bytes, iteration: &mut Iteration) -> Answer<()> {
        while let Some(output) = iteration.activations.pop() {
            let made = match make(world, activation, self.stream, &mut iteration.shortage)? {
                Ok(incoming) => {
                    let made = make(world, self.parameters_per_layer, self.stream, &mut iteration.shortage)?;
                    world.rig.verify(&output, self.stream)?;
                    world.rig.free(incoming)?;
                    made
                }
                Err(error) => Err(error),
            };
            world.rig.free(output)?;
            match made {
                Ok(gradient) => iteration.gradients.push(gradient),
                Err(error) => return Ok(Err(error)),
            }
        }
        Ok(Ok(()))
    }

    /// The optimizer reads and writes parameters and state.
    fn update(&mut self, world: &mut World) -> Result<(), Stop> {
        for buffer in &mut self.buffers {
            world.rig.verify(buffer, self.stream)?;
            world.rig.fill(buffer, self.stream)?;
        }
        Ok(())
    }

    fn verify(&self, world: &mut World) -> Result<(), Stop> {
        self.buffers.iter().try_for_each(|buffer| world.rig.verify(buffer, self.stream))
    }
}

/// Makes a buffer with contents. Where there is no memory for it, notes why, before anything is freed.
fn make(world: &mut World, size: Bytes, stream: StreamId, shortage: &mut Option<Shortage>) -> Answer<Buffer> {
    let request = Request { size, stream };
    let mut answer = world.rig.allocate(request)?;
    match &mut answer {
        Ok(buffer) => world.rig.fill(buffer, stream)?,
        Err(error) => *shortage = world.rig.shortage(request, error)?,
    }
    Ok(answer)
}

fn free_all(world: &mut World, buffers: Vec<Buffer>) -> Result<(), Stop> {
    buffers.into_iter().try_for_each(|buffer| world.rig.free(buffer))
}

fn conclude(arm: &str, device: DeviceKind, step: &Step, train: &Train, tally: Tally, failed: Option<AllocatorError>) -> StepResult {
    let mut result = StepResult::default();
    result.reports.extend([
        (ReportKey::Iterations, tally.iterations),
        (ReportKey::FirstBatch, train.batch),
        (ReportKey::FinalBatch, tally.final_batch),
        (ReportKey::Attempts, tally.attempts),
        (ReportKey::Retries, tally.retries),
        (ReportKey::RetriesWithoutProgress, tally.without_progress),
        (ReportKey::RetryTime, tally.lost.0),
        (ReportKey::Ooms, tally.ooms),
        (ReportKey::RetainedAfterOom, tally.retained),
    ]);
    let completed = format!("{} of {} iterations", tally.iterations, train.iterations);
    match (failed, train.expect.of(arm, device)) {
        (None, expected) => {
            result.outcome = Outcome::Fits { retries: tally.retries as u32 };
            if tally.retries > 0 {
                result.notes.push(format!("{} retries: batch {} became {}", tally.retries, train.batch, tally.final_batch));
            }
            if let Expected::Oom(_) = expected {
                result.unmet.push(Unmet::at(step, "training to run out of memory", completed));
            }
        }
        (Some(error), expected) => {
            result.outcome = Outcome::OutOfMemory;
            result.shortage = tally.shortage;
            result.notes.push(format!("{completed}, then {error}"));
            if let Expected::Oom(Some(cause)) = expected {
                result.unmet.extend(Unmet::other_cause(step, cause, result.shortage.as_ref()));
            }
            if expected == Expected::Fits {
                result.unmet.push(Unmet::at(step, "training to its end", format!("{completed}, then {error}")));
            }
        }
    }
    result
}
