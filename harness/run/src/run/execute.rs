//! What each step does. The match in [`execute`] is the checklist: a new step does not compile until it is here.

use std::collections::BTreeMap;

use harness_allocator::allocator::Request;
use harness_allocator::units::{Bytes, Nanos};

use crate::recovery::{self, Recovered, Tried};
use crate::rig::Stop;
use crate::workload::{pins, storm, train};
use crate::world::{LookUpError, StepResult, Unmet, World, asks_for_memory};
use harness_record::Outcome;
use harness_scenario::steps::alloc::Alloc;
use harness_scenario::steps::event::Synchronize;
use harness_scenario::steps::free::{Free, FreeTarget};
use harness_scenario::steps::{Action, Step};
use harness_scenario::{Amount, Expectation, Expected, Located, Metric, ReportKey, Unit};

/// Does one step, `repeat` apart, which the loop unrolls.
pub(super) fn execute(world: &mut World, step: &Step) -> Result<StepResult, Stop> {
    match &step.action {
        Action::Alloc(alloc) => return allocate(world, step, alloc),
        Action::Free(free) => return free_some(world, step, free),
        Action::RecordStream(use_by) => {
            let stream = world.stream(&use_by.stream);
            world.with_buffer(&use_by.buffer, |rig, buffer| {
                rig.record_stream(buffer, stream)?;
                Ok(())
            })?;
        }
        Action::Fill(fill) => {
            let stream = world.stream(&fill.stream);
            world.with_buffer(&fill.buffer, |rig, buffer| rig.fill(buffer, stream))?;
        }
        Action::Verify(verify) => {
            let stream = world.stream(&verify.stream);
            world.with_buffer(&verify.buffer, |rig, buffer| rig.verify(buffer, stream))?;
        }
        Action::Work(work) => world.rig.work(world.stream(&work.stream), work.duration)?,
        Action::Record(record) => {
            let event = world.event(&record.event)?;
            world.rig.record(event, world.stream(&record.stream))?;
        }
        Action::Wait(wait) => {
            let event = world.event(&wait.event)?;
            world.rig.wait(world.stream(&wait.stream), event)?;
        }
        Action::Synchronize(target) => synchronize(world, target)?,
        Action::EmptyCache(_) => {
            let freed = world.rig.empty_cache()?;
            return Ok(StepResult { reports: BTreeMap::from([(ReportKey::FreedBytes, freed.0)]), ..StepResult::default() });
        }
        Action::ResetPeaks(_) => world.rig.reset_peaks(),
        Action::SetFraction(set) => world.rig.set_memory_fraction(set.fraction),
        Action::Pressure(pressure) => return set_pressure(world, step, &pressure.held),
        Action::Storm(storm) => return storm::run(world, step, storm),
        Action::Pins(pins) => return pins::list(world, &pins.storm),
        Action::Train(train) => return train::run(world, step, train),
        Action::Measure(measure) => world.measure(measure.name.clone())?,
        Action::Expect(expect) => {
            let mut result = StepResult::default();
            for expectation in expect.of(&world.arm) {
                result.unmet.extend(check(world, expectation)?);
            }
            return Ok(result);
        }
        Action::Repeat(_) => {}
    }
    Ok(StepResult::default())
}

/// Evaluates an expectation; where it does not hold, every figure in it.
///
/// Times are judged in timed runs alone, the device's memory and the progress of retries in checked runs alone, and all else in both. All metrics of the present are read at
/// one moment.
pub(super) fn check(world: &mut World, expectation: &Located<Expectation>) -> Result<Option<Unmet>, Stop> {
    let metrics = || expectation.value.metrics();
    let (needs_times, needs_memory) = (metrics().any(|metric| metric.unit() == Unit::Time), metrics().any(asks_for_memory));
    let is_checked = |metric: &Metric| matches!(metric, Metric::Report(_, ReportKey::RetriesWithoutProgress));
    let (timed, needs_checks) = (world.rig.is_timed(), metrics().any(is_checked) || (needs_memory && !needs_times));
    let is_for_the_other_run = if timed { needs_checks } else { needs_times };
    if is_for_the_other_run {
        return Ok(None);
    }
    let unmet = |seen: String| {
        let expected = expectation.value.text.clone();
        Ok(Some(Unmet { at: expectation.position(), expected, seen }))
    };
    let now = world.readings(needs_memory)?;
    let mut figures = Vec::new();
    let evaluated = expectation.value.evaluate(|metric| {
        let value = world.look_up(metric, &now)?;
        figures.push(format!("{metric} = {}", figure(value, metric.unit())));
        Ok::<u64, LookUpError>(value)
    });
    match evaluated {
        Ok(evaluation) if evaluation.holds => Ok(None),
        Ok(_) => unmet(figures.join(", ")),
        Err(error) => unmet(error.to_string()),
    }
}

fn figure(value: u64, unit: Unit) -> String {
    match unit {
        Unit::Count => value.to_string(),
        Unit::Bytes if value < Bytes::kib(1).0 => Bytes(value).to_string(),
        Unit::Bytes => format!("{value} B ({})", Bytes(value)),
        Unit::Time => Nanos(value).to_string(),
    }
}

fn allocate(world: &mut World, step: &Step, alloc: &Alloc) -> Result<StepResult, Stop> {
    let size = match amount(world, &alloc.size)? {
        Ok(size) => size,
        Err(why) => return Ok(StepResult { unmet: vec![Unmet::at(step, "a size", why)], ..StepResult::default() }),
    };
    let request = Request { size, stream: world.stream(&alloc.stream) };
    world.rig.name_buffers(&alloc.buffer, step.position.line);
    let recovered = recovery::recover(world, alloc.on_oom.as_ref(), Tried::Request, size.0, |world, _| world.rig.allocate(request))?;
    let mut result = StepResult { reports: recovered.reports(), size: Some(size), ..StepResult::default() };
    let Recovered { answer, retries, .. } = recovered;
    match (answer, alloc.expect.of(&world.arm)) {
        (Ok(buffer), expected) => {
            result.outcome = Outcome::Fits { retries: retries as u32 };
            if expected == Some(Expected::Oom) {
                let seen = format!("it fits: {} handed out", buffer.size());
                result.unmet.push(Unmet::at(step, format!("the request for {size} to run out of memory"), seen));
            }
            world.keep(&alloc.buffer, buffer);
        }
        (Err(error), expected) => {
            result.outcome = Outcome::OutOfMemory;
            result.notes.push(error.to_string());
            result.shortage = world.rig.shortage(request, &error)?;
            if expected == Some(Expected::Fits) {
                result.unmet.push(Unmet::at(step, format!("{size} to fit"), error.to_string()));
            }
        }
    }
    Ok(result)
}

/// An amount now; the inner error says in words why there is none.
pub(super) fn amount(world: &mut World, amount: &Amount) -> Result<Result<Bytes, String>, Stop> {
    if let Amount::Fixed(bytes) = amount {
        return Ok(Ok(*bytes));
    }
    let now = world.readings(amount.metrics().any(asks_for_memory))?;
    Ok(amount.evaluate(|metric| world.look_up(metric, &now)).map_err(|error| error.to_string()))
}

fn free_some(world: &mut World, step: &Step, free: &Free) -> Result<StepResult, Stop> {
    let before = world.rig.stats();
    let mut result = StepResult::default();
    match free {
        Free::Targets(targets) => {
            for target in targets {
                match target {
                    FreeTarget::Buffer { buffer, .. } => {
                        if let Some(buffer) = world.take(buffer) {
                            world.rig.free(buffer)?;
                        }
                    }
                    FreeTarget::Storm(id) => {
                        for buffer in std::mem::take(world.storm(id)).into_buffers() {
                            world.rig.free(buffer)?;
                        }
                    }
                }
            }
        }
        Free::Pinning { storm, request } => match amount(world, request)? {
            Ok(request) => result.notes.push(pins::free_for(world, storm, request)?),
            Err(why) => result.unmet.push(Unmet::at(step, "a size", why)),
        },
    }
    let after = world.rig.stats();
    let freed_blocks = before.allocation.all.current - after.allocation.all.current;
    let freed_bytes = before.allocated_bytes.all.current - after.allocated_bytes.all.current;
    result.reports = BTreeMap::from([(ReportKey::FreedBlocks, freed_blocks), (ReportKey::FreedBytes, freed_bytes)]);
    Ok(result)
}

fn synchronize(world: &mut World, target: &Synchronize) -> Result<(), Stop> {
    match target {
        Synchronize::Device => world.rig.synchronize(),
        Synchronize::Stream(stream) => world.rig.synchronize_stream(world.stream(stream)),
        Synchronize::Event(event) => {
            let event = world.event(event)?;
            world.rig.synchronize_event(event)
        }
    }
}

fn set_pressure(world: &mut World, step: &Step, held: &Amount) -> Result<StepResult, Stop> {
    let wanted = match amount(world, held)? {
        Ok(wanted) => wanted,
        Err(why) => return Ok(StepResult { unmet: vec![Unmet::at(step, "a size", why)], ..StepResult::default() }),
    };
    let held = world.rig.set_pressure(wanted)?;
    let unit = world.rig.info().granularity;
    let mut result = StepResult::default();
    if held < wanted && wanted.saturating_sub(held) >= unit {
        result.unmet.push(Unmet::at(step, format!("others to hold {wanted}"), format!("only {held} could be had")));
    }
    Ok(result)
}
