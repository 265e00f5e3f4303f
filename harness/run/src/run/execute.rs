//! Runs single steps. A new step does not compile until the match in [`execute`] covers it.

use std::collections::BTreeMap;

use harness_allocator::allocator::Request;
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;

use crate::between::Between;
use crate::leaks;
use crate::processes;
use crate::recovery::{Recovered, Recovery, Tried};
use crate::rig::{Buffer, Rig, Stop};
use crate::step_result::{StepResult, Unmet};
use crate::workload::{exec, infer, pins, replay, storm, train};
use crate::world::look_up::LookUpError;
use crate::world::needs::asks_for_memory;
use crate::world::{BufferKey, World};
use harness_record::Outcome;
use harness_scenario::steps::alloc::Alloc;
use harness_scenario::steps::contents::Use;
use harness_scenario::steps::event::Synchronize;
use harness_scenario::steps::expect::Expected as Expectations;
use harness_scenario::steps::free::{Free, FreeTarget};
use harness_scenario::steps::{Action, Step};
use harness_scenario::{
    Amount, BufferRef, EvaluateError, Evaluation, Expectation, Expected, Located, Metric, Plan, ReportKey, Unit, Value,
};

/// Runs one step without inner steps and without work between its operations.
pub(crate) fn execute_step(world: &mut World, step: &Step) -> Result<StepResult, Stop> {
    execute(world, step, None)
}

/// Runs one step without inner steps. `between` runs between the operations of a storm or a replay, between the
/// iterations of a training, and while a recovery policy waits.
pub(super) fn execute(world: &mut World, step: &Step, between: Between<'_>) -> Result<StepResult, Stop> {
    match &step.action {
        Action::Alloc(alloc) => return allocate(world, step, alloc, between),
        Action::Free(free) => return free_some(world, step, free),
        Action::RecordStream(used) => {
            let stream = world.stream(&used.stream);
            return use_buffer(world, step, &used.buffer, &mut |rig, buffer| rig.record_stream(buffer, stream));
        }
        Action::Fill(fill) => return use_buffers(world, step, &fill.0, &mut Rig::fill),
        Action::Verify(verify) => return use_buffers(world, step, &verify.0, &mut |rig, buffer, stream| rig.verify(buffer, stream)),
        Action::ReadAsync(read) => return use_buffers(world, step, &read.0, &mut |rig, buffer, stream| rig.read(buffer, stream)),
        Action::Busy(busy) => world.rig.work(world.stream(&busy.stream), busy.duration)?,
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
        Action::ResetPeakStats(_) => world.rig.reset_peaks(),
        Action::SetMemoryFraction(set) => world.rig.set_memory_fraction(set.fraction),
        Action::ExternalMemory(memory) => return set_pressure(world, step, &memory.held),
        Action::Storm(storm) => return storm::run(world, step, storm, between),
        Action::Pins(pins) => return pins::list(world, &pins.storm),
        Action::Train(train) => return train::run(world, step, train, between),
        Action::Infer(infer) => return infer::run(world, step, infer, between),
        Action::Replay(replay) => return replay::run(world, step, replay, between),
        Action::Exec(program) => return exec::run(world, step, program, between),
        Action::Compare(compare) => return Ok(leaks::compare(world, &compare.since)),
        Action::Measure(measure) => world.measure(measure.name.clone())?,
        Action::Expect(expect) => {
            let mut result = StepResult::default();
            for expected in expect.of(&world.arm, world.device) {
                match expected {
                    Expectations::Here(expectation) => result.unmet.extend(check(world, expectation)?),
                    Expectations::BetweenArms { number, expectation } => keep_figures(world, *number, &expectation.value)?,
                }
            }
            return Ok(result);
        }
        // The expectations are checked after this step and after each later one.
        Action::Eventually(_) => {}
        Action::ReleasePool(release) => {
            let pool = world.pool(&release.pool);
            let released = world.rig.release_private_pool(pool)?;
            return Ok(refused(step, "the pool to be released", released.err()));
        }
        Action::PrivatePool(block) => {
            let pool = world.pool(&block.pool);
            let begun = world.rig.begin_private_pool(pool)?;
            return Ok(refused(step, "requests to be served from the pool", begun.err()));
        }
        Action::Kill(kill) => return processes::kill(&mut world.processes, &mut world.rig, step, kill),
        Action::For(_) | Action::Repeat(_) | Action::Program(_) | Action::Process(_) => {}
    }
    Ok(StepResult::default())
}

/// The result of a step that may have been refused.
fn refused(step: &Step, expected: &str, why: Option<impl ToString>) -> StepResult {
    let unmet = why.map(|why| Unmet::at(step, expected, why.to_string()));
    StepResult { unmet: unmet.into_iter().collect(), ..StepResult::default() }
}

/// Calls `act` with each of the buffers.
fn use_buffers(
    world: &mut World,
    step: &Step,
    used: &Use,
    act: &mut dyn FnMut(&mut Rig, &mut Buffer, StreamId) -> Result<(), Stop>,
) -> Result<StepResult, Stop> {
    let stream = world.stream(&used.stream);
    let mut result = StepResult::default();
    for buffer in &used.buffers {
        result.unmet.extend(use_buffer(world, step, buffer, &mut |rig, buffer| act(rig, buffer, stream))?.unmet);
    }
    Ok(result)
}

fn use_buffer(
    world: &mut World,
    step: &Step,
    buffer: &BufferRef,
    act: &mut dyn FnMut(&mut Rig, &mut Buffer) -> Result<(), Stop>,
) -> Result<StepResult, Stop> {
    let key = match world.key(buffer)? {
        Ok(key) => key,
        Err(why) => return Ok(refused(step, "a whole number", Some(why))),
    };
    let was_there = world.with_buffer(&key, |rig, buffer| act(rig, buffer))?;
    Ok(if was_there { StepResult::default() } else { missing(world, step, &key) })
}

/// Explains a missing buffer. A recovery policy may have freed a buffer without a number, so that is no error. A
/// numbered buffer must exist.
fn missing(world: &World, step: &Step, (name, index): &BufferKey) -> StepResult {
    let Some(index) = index else { return StepResult::default() };
    let live = world.elements(name);
    let seen = match (live.first(), live.last()) {
        (Some(first), Some(last)) => format!("{} of that name are live, from {name}[{first}] to {name}[{last}]", live.len()),
        _ => "no buffer of that name is live".to_owned(),
    };
    refused(step, &format!("{name}[{index}] to be live"), Some(seen))
}

/// Evaluates an expectation. If it does not hold, the result lists every figure in it.
/// || Only timed runs judge times. Only checked runs judge the device's memory, the bytes of sites and the progress of
/// retries. Both judge everything else. All current metrics are read at the same moment. A growth without an earlier
/// value is not judged.
pub(super) fn check(world: &mut World, expectation: &Located<Expectation>) -> Result<Option<Unmet>, Stop> {
    if is_for_the_other_run(world, expectation.value.quantities()) {
        return Ok(None);
    }
    let needs_memory = expectation.value.quantities().any(asks_for_memory);
    let now = world.readings(needs_memory)?;
    let mut figures = Vec::new();
    let evaluated = expectation.value.evaluate(|metric| {
        let value = world.look_up(metric, &now)?;
        figures.push(format!("{metric} = {}", Value { number: value, dimension: metric.unit().into() }));
        Ok::<_, LookUpError>(value)
    });
    world.remember(expectation.value.quantities(), &now);
    let seen = match evaluated {
        Ok(evaluation) if evaluation.holds => return Ok(None),
        Ok(evaluation) => seen(&expectation.value, &evaluation, figures),
        Err(EvaluateError::LookUp(LookUpError::FirstTime(_) | LookUpError::NotRun(_))) => return Ok(None),
        Err(why) if figures.is_empty() => why.to_string(),
        Err(why) => format!("{why}: {}", figures.join(", ")),
    };
    Ok(Some(Unmet { at: expectation.position(), expected: expectation.value.text.clone(), seen }))
}

/// Describes an expectation that does not hold: the values of its computed sides, then every figure.
pub(crate) fn seen(expectation: &Expectation, evaluation: &Evaluation, mut figures: Vec<String>) -> String {
    let value = |value: &Value| if expectation.is_in_percent() { value.percent() } else { value.to_string() };
    let sides = [(&expectation.left, &evaluation.left), (&expectation.right, &evaluation.right)];
    let computed = sides.into_iter().filter(|(side, _)| side.is_computed() && !side.quantities().is_empty());
    let computed: Vec<String> = computed.map(|(side, came_to)| format!("{side} = {}", value(came_to))).collect();
    figures.dedup();
    match computed.is_empty() {
        true => figures.join(", "),
        false => format!("{}; {}", computed.join(", "), figures.join(", ")),
    }
}

/// Whether only the other kind of run, checked or timed, judges these metrics.
fn is_for_the_other_run<'m>(world: &World, metrics: impl Iterator<Item = &'m Metric>) -> bool {
    let (mut needs_times, mut needs_memory, mut needs_checks) = (false, false, false);
    for metric in metrics {
        needs_times |= metric.unit() == Unit::Time && !matches!(metric, Metric::Variable(..));
        needs_times |= matches!(metric, Metric::Report(_, key) if key.is_timed());
        needs_memory |= asks_for_memory(metric);
        needs_checks |=
            matches!(metric, Metric::Report(_, ReportKey::RetriesWithoutProgress | ReportKey::GrownBytes | ReportKey::GrownSites));
    }
    if world.rig.is_timed() { needs_checks || (needs_memory && !needs_times) } else { needs_times }
}

/// Stores this allocator's figures for a comparison between allocators. If a figure is unavailable, the comparison is
/// not judged.
fn keep_figures(world: &mut World, number: usize, expectation: &Expectation) -> Result<(), Stop> {
    let own = |metric: &Metric, arm: &str| match metric {
        Metric::Arm(of, metric) if of == arm => Some((**metric).clone()),
        _ => None,
    };
    let wanted: Vec<(usize, Metric)> =
        expectation.quantities().enumerate().filter_map(|(place, metric)| Some((place, own(metric, &world.arm)?))).collect();
    let now = world.readings(wanted.iter().any(|(_, metric)| asks_for_memory(metric)))?;
    for (place, metric) in wanted {
        if !is_for_the_other_run(world, std::iter::once(&metric))
            && let Ok(figure) = world.look_up(&metric, &now)
        {
            world.keep_figure(number, place, figure);
        }
    }
    Ok(())
}

fn allocate(world: &mut World, step: &Step, alloc: &Alloc, mut between: Between<'_>) -> Result<StepResult, Stop> {
    let size = match amount(world, &alloc.size)? {
        Ok(size) => size,
        Err(why) => return Ok(refused(step, "a size", Some(why))),
    };
    let key = match world.key(&alloc.buffer)? {
        Ok(key) if world.is_live(&key) && !alloc.leak && alloc.buffer.index.is_some() => {
            let (name, index) = (&key.0, key.1.unwrap_or_default());
            return Ok(refused(step, &format!("no buffer {name}[{index}]"), Some("it is already live; add `leak: true` to leak it")));
        }
        Ok(key) => key,
        Err(why) => return Ok(refused(step, "a whole number", Some(why))),
    };
    let request = Request { size, stream: world.stream(&alloc.stream) };
    world.rig.name_buffers(&buffer_name(&key), step.position.line);
    let mut recovery = Recovery::new(alloc.on_oom.as_ref());
    let recovered = recovery.run(world, Tried::Request(size), Plan::of_batch(1), &mut between, |world, _| world.rig.allocate(request))?;
    let mut result = StepResult { reports: recovery.reports(), size: Some(size), ..StepResult::default() };
    result.recovery = recovery.into_record(world);
    let expected = alloc.expect.of(&world.arm, world.device);
    let Recovered { answer, retries, .. } = recovered;
    match answer {
        Ok(buffer) => {
            result.outcome = Outcome::Fits { retries: retries as u32 };
            if let Expected::Oom(_) = expected {
                let seen = format!("it fits: {} handed out", buffer.size());
                result.unmet.push(Unmet::at(step, format!("the request for {size} {expected}"), seen));
            }
            world.keep(key, buffer);
        }
        Err(error) => {
            result.outcome = Outcome::OutOfMemory;
            result.notes.push(error.to_string());
            result.shortage = world.rig.shortage(request, &error)?;
            match expected {
                Expected::Fits => result.unmet.push(Unmet::at(step, format!("{size} to fit"), error.to_string())),
                Expected::Oom(Some(cause)) => result.unmet.extend(Unmet::other_cause(step, cause, result.shortage.as_ref())),
                Expected::Oom(None) | Expected::Any => {}
            }
        }
    }
    Ok(result)
}

/// A buffer's name in reports.
fn buffer_name((name, index): &BufferKey) -> String {
    index.map_or_else(|| name.to_string(), |index| format!("{name}[{index}]"))
}

/// The current value of an amount. The inner error explains why it has none.
pub(super) fn amount(world: &mut World, amount: &Amount) -> Result<Result<Bytes, String>, Stop> {
    if let Amount::Fixed(bytes) = amount {
        return Ok(Ok(*bytes));
    }
    let now = world.readings(amount.quantities().into_iter().any(asks_for_memory))?;
    Ok(amount.evaluate(|metric| world.look_up(metric, &now)).map_err(|error| error.to_string()))
}

fn free_some(world: &mut World, step: &Step, free: &Free) -> Result<StepResult, Stop> {
    let before = world.rig.stats();
    let mut result = StepResult::default();
    match free {
        Free::Targets(targets) => {
            for target in targets {
                match target {
                    FreeTarget::Buffer { buffer, may_be_gone } => {
                        let missing = free_one(world, step, buffer)?;
                        result.unmet.extend(missing.filter(|_| !may_be_gone));
                    }
                    FreeTarget::Elements(name) => {
                        for buffer in world.take_elements(name) {
                            world.rig.free(buffer)?;
                        }
                    }
                    FreeTarget::Storm(id) => {
                        for buffer in std::mem::take(world.storm(id)).into_blocks() {
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

/// Frees a buffer. Returns the failed expectation if it does not exist.
fn free_one(world: &mut World, step: &Step, buffer: &BufferRef) -> Result<Option<Unmet>, Stop> {
    let key = match world.key(buffer)? {
        Ok(key) => key,
        Err(why) => return Ok(Some(Unmet::at(step, "a whole number", why))),
    };
    match world.take(&key) {
        Some(buffer) => world.rig.free(buffer).map(|()| None),
        None => Ok(missing(world, step, &key).unmet.pop()),
    }
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
        Err(why) => return Ok(refused(step, "a size", Some(why))),
    };
    let held = world.rig.set_pressure(wanted)?;
    let unit = world.rig.info().granularity;
    let mut result = StepResult::default();
    if held < wanted && wanted.saturating_sub(held) >= unit {
        result.unmet.push(Unmet::at(step, format!("others to hold {wanted}"), format!("only {held} could be allocated")));
    }
    Ok(result)
}
