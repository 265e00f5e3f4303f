//! Runs single steps. A new step does not compile until the match in [`execute`] covers it.

use std::collections::BTreeMap;

use harness_allocator::{allocator::Request, device::StreamId, units::Bytes};

use crate::context::{
    BufferKey, RunContext, buffer_name, look_up::LookUpError, needs::asks_for_memory,
};
use crate::recovery::{AttemptKind, Recovered, Recovery};
use crate::rig::{Buffer, Rig, Stop};
use crate::step_result::{StepResult, Unmet};
use crate::workload::{exec, infer, pins, replay, storm, train};
use crate::{between::Between, leaks};
use harness_record::Outcome;
use harness_scenario::steps::free::{FreeStep, FreeTarget};
use harness_scenario::steps::{
    Action, Step, alloc::Alloc, contents::Use, expect::Expect, streams::Synchronize,
};
use harness_scenario::{
    Amount, AttemptPlan, BufferRef, EvaluateError, Evaluation, Expectation, Located, Metric,
    ReportKey, Unit, Value,
};

pub(crate) fn execute(
    ctx: &mut RunContext,
    step: &Step,
    between: Between<'_>,
) -> Result<StepResult, Stop> {
    match &step.action {
        Action::Alloc(alloc) => return allocate(ctx, step, alloc, between),
        Action::Free(free) => return free_some(ctx, step, free),
        Action::RecordStream(used) => {
            let stream = ctx.stream(&used.stream);
            return use_buffer(ctx, step, &used.buffer, &mut |rig, buffer| {
                rig.record_stream(buffer, stream)
            });
        }
        Action::Fill(fill) => return use_buffers(ctx, step, fill, &mut Rig::fill),
        Action::Verify(given) => {
            let verify = &mut |rig: &mut Rig, buffer: &mut _, stream| rig.verify(buffer, stream);
            return use_buffers(ctx, step, given, verify);
        }
        Action::ReadAsync(given) => {
            let read = &mut |rig: &mut Rig, buffer: &mut _, stream| rig.read(buffer, stream);
            return use_buffers(ctx, step, given, read);
        }
        Action::Busy(busy) => ctx.rig.work(ctx.stream(&busy.stream), busy.duration)?,
        Action::Record(record) => {
            let event = ctx.event(&record.event)?;
            ctx.rig.record(event, ctx.stream(&record.stream))?;
        }
        Action::Wait(wait) => {
            let event = ctx.event(&wait.event)?;
            ctx.rig.wait(ctx.stream(&wait.stream), event)?;
        }
        Action::Synchronize(target) => synchronize(ctx, target)?,
        Action::EmptyCache(_) => {
            let freed = ctx.rig.empty_cache()?;
            return Ok(StepResult {
                reports: BTreeMap::from([(ReportKey::FreedBytes, freed.0)]),
                ..StepResult::default()
            });
        }
        Action::ResetPeakStats(_) => ctx.rig.reset_peaks(),
        Action::SetMemoryFraction(set) => ctx.rig.set_memory_fraction(set.fraction),
        Action::ExternalMemory(memory) => return set_external_memory(ctx, step, memory),
        Action::Storm(storm) => return storm::run(ctx, step, storm, between),
        Action::Pins(storm) => return pins::list(ctx, storm),
        Action::Train(train) => return train::run(ctx, step, train, between),
        Action::Infer(infer) => return infer::run(ctx, step, infer, between),
        Action::Replay(replay) => return replay::run(ctx, step, replay, between),
        Action::Exec(program) => return exec::run(ctx, step, program, between),
        Action::Compare(compare) => return Ok(leaks::compare(ctx, &compare.since)),
        Action::Measure(measure) => ctx.measure(measure.clone())?,
        Action::Expect(given) => return expect(ctx, given),
        // The expectations are checked after this step and after each later one.
        Action::Eventually(_) => {}
        Action::ReleasePool(pool) => {
            let pool = ctx.pool(pool);
            let released = ctx.rig.release_private_pool(pool)?;
            return Ok(refused(step, "the pool to be released", released.err()));
        }
        Action::PrivatePool(block) => {
            let pool = ctx.pool(&block.name);
            let why = ctx.rig.begin_private_pool(pool)?.err();
            return Ok(refused(step, "requests to be served from the pool", why));
        }
        Action::Kill(kill) => return ctx.processes.kill(&mut ctx.rig, step, kill),
        Action::For(_) | Action::Repeat(_) | Action::Program(_) | Action::Process(_) => {}
    }
    Ok(StepResult::default())
}

fn expect(ctx: &mut RunContext, given: &Expect) -> Result<StepResult, Stop> {
    let mut result = StepResult::default();
    for expected in given.of(&ctx.setup.arm, ctx.setup.device) {
        match expected.comparison {
            None => result.unmet.extend(check(ctx, &expected.expectation)?),
            Some(number) => keep_figures(ctx, number, &expected.expectation.value)?,
        }
    }
    Ok(result)
}

fn refused(step: &Step, expected: &str, why: Option<impl ToString>) -> StepResult {
    let unmet = why.map(|why| Unmet::at(step, expected, why.to_string()));
    StepResult {
        unmet: unmet.into_iter().collect(),
        ..StepResult::default()
    }
}

fn use_buffers(
    ctx: &mut RunContext,
    step: &Step,
    used: &Use,
    act: &mut dyn FnMut(&mut Rig, &mut Buffer, StreamId) -> Result<(), Stop>,
) -> Result<StepResult, Stop> {
    let stream = ctx.stream(&used.stream);
    let mut result = StepResult::default();
    for buffer in &used.buffers {
        result.unmet.extend(
            use_buffer(ctx, step, buffer, &mut |rig, buffer| {
                act(rig, buffer, stream)
            })?
            .unmet,
        );
    }
    Ok(result)
}

fn use_buffer(
    ctx: &mut RunContext,
    step: &Step,
    buffer: &BufferRef,
    act: &mut dyn FnMut(&mut Rig, &mut Buffer) -> Result<(), Stop>,
) -> Result<StepResult, Stop> {
    let key = match ctx.key(buffer)? {
        Ok(key) => key,
        Err(why) => return Ok(refused(step, "a whole number", Some(why))),
    };
    let was_there = ctx.with_buffer(&key, |rig, buffer| act(rig, buffer))?;
    Ok(if was_there {
        StepResult::default()
    } else {
        missing(ctx, step, &key)
    })
}

fn missing(ctx: &RunContext, step: &Step, (name, index): &BufferKey) -> StepResult {
    let Some(index) = index else {
        return StepResult::default();
    };
    let live = ctx.buffers.elements(name);
    let seen = match (live.first(), live.last()) {
        (Some(first), Some(last)) => format!(
            "{} of that name are live, from {name}[{first}] to {name}[{last}]",
            live.len()
        ),
        _ => "no buffer of that name is live".to_owned(),
    };
    refused(step, &format!("{name}[{index}] to be live"), Some(seen))
}

/// Evaluates an expectation. If it does not hold, the result lists every figure in it.
///
/// Only timed runs judge times. Only checked runs judge the device's memory, the bytes of sites and
/// the progress of retries. Both judge everything else. All current metrics are read at the same
/// moment. A growth without an earlier value is not judged.
pub(super) fn check(
    ctx: &mut RunContext,
    expectation: &Located<Expectation>,
) -> Result<Option<Unmet>, Stop> {
    if is_for_the_other_run(ctx, expectation.value.quantities()) {
        return Ok(None);
    }
    let needs_memory = expectation.value.quantities().any(asks_for_memory);
    let now = ctx.readings(needs_memory)?;
    let mut figures = Vec::new();
    let evaluated = expectation.value.evaluate(|metric| {
        let value = ctx.look_up(metric, &now)?;
        figures.push(format!(
            "{metric} = {}",
            Value {
                number: value,
                dimension: metric.unit().into()
            }
        ));
        Ok::<_, LookUpError>(value)
    });
    ctx.remember(expectation.value.quantities(), &now);
    let seen = match evaluated {
        Ok(evaluation) if evaluation.holds => return Ok(None),
        Ok(evaluation) => {
            let seen = describe_unmet(&expectation.value, &evaluation, figures);
            let advice = expectation
                .value
                .quantities()
                .find_map(|metric| match metric {
                    Metric::Report(storm, ReportKey::Ooms) => ctx.values.storm_advice.get(storm),
                    _ => None,
                });
            advice.map_or(seen.clone(), |advice| format!("{seen}; {advice}"))
        }
        Err(EvaluateError::LookUp(LookUpError::FirstTime(_) | LookUpError::NotRun(_))) => {
            return Ok(None);
        }
        Err(why) if figures.is_empty() => why.to_string(),
        Err(why) => format!("{why}: {}", figures.join(", ")),
    };
    Ok(Some(Unmet {
        at: expectation.at,
        expected: expectation.value.text.clone(),
        seen,
    }))
}

/// Describes an expectation that does not hold: the values of its computed sides, then every
/// figure.
pub(crate) fn describe_unmet(
    expectation: &Expectation,
    evaluation: &Evaluation,
    mut figures: Vec<String>,
) -> String {
    let value = |value: &Value| {
        if expectation.is_in_percent() {
            value.percent()
        } else {
            value.to_string()
        }
    };
    let sides = [
        (&expectation.left, &evaluation.left),
        (&expectation.right, &evaluation.right),
    ];
    let computed = sides
        .into_iter()
        .filter(|(side, _)| side.is_computed() && !side.quantities().is_empty());
    let computed: Vec<String> = computed
        .map(|(side, came_to)| format!("{side} = {}", value(came_to)))
        .collect();
    figures.dedup();
    match computed.is_empty() {
        true => figures.join(", "),
        false => format!("{}; {}", computed.join(", "), figures.join(", ")),
    }
}

/// Returns whether only the other kind of run, checked or timed, judges these metrics.
fn is_for_the_other_run<'m>(ctx: &RunContext, metrics: impl Iterator<Item = &'m Metric>) -> bool {
    let (mut needs_times, mut needs_memory, mut needs_checks) = (false, false, false);
    for metric in metrics {
        needs_times |= metric.unit() == Unit::Time && !matches!(metric, Metric::Variable(..));
        needs_times |= matches!(metric, Metric::Report(_, key) if key.is_timed());
        needs_memory |= asks_for_memory(metric);
        needs_checks |= matches!(
            metric,
            Metric::Report(
                _,
                ReportKey::RetriesWithoutProgress | ReportKey::GrownBytes | ReportKey::GrownSites
            )
        );
    }
    if ctx.rig.is_timed() {
        needs_checks || (needs_memory && !needs_times)
    } else {
        needs_times
    }
}

/// Stores this allocator's figures for a comparison between allocators.
fn keep_figures(
    ctx: &mut RunContext,
    number: usize,
    expectation: &Expectation,
) -> Result<(), Stop> {
    let own = |metric: &Metric, arm: &str| match metric {
        Metric::Arm(of, metric) if of == arm => Some((**metric).clone()),
        _ => None,
    };
    let wanted: Vec<(usize, Metric)> = expectation
        .quantities()
        .enumerate()
        .filter_map(|(place, metric)| Some((place, own(metric, &ctx.setup.arm)?)))
        .collect();
    let now = ctx.readings(wanted.iter().any(|(_, metric)| asks_for_memory(metric)))?;
    for (place, metric) in wanted {
        if !is_for_the_other_run(ctx, std::iter::once(&metric))
            && let Ok(figure) = ctx.look_up(&metric, &now)
        {
            ctx.values.figures.insert((number, place), figure);
        }
    }
    Ok(())
}

fn allocate(
    ctx: &mut RunContext,
    step: &Step,
    alloc: &Alloc,
    mut between: Between<'_>,
) -> Result<StepResult, Stop> {
    let size = match amount(ctx, &alloc.size)? {
        Ok(size) => size,
        Err(why) => return Ok(refused(step, "a size", Some(why))),
    };
    let key = match ctx.key(&alloc.buffer)? {
        Ok(key) if ctx.buffers.is_live(&key) && !alloc.leak && alloc.buffer.index.is_some() => {
            let expected = format!("no buffer {}", buffer_name(&key));
            let why = "it is already live; add `leak: true` to leak it";
            return Ok(refused(step, &expected, Some(why)));
        }
        Ok(key) => key,
        Err(why) => return Ok(refused(step, "a whole number", Some(why))),
    };
    let request = Request {
        size,
        stream: ctx.stream(&alloc.stream),
    };
    ctx.rig.name_buffers(&buffer_name(&key), step.position.line);
    let mut recovery = Recovery::new(alloc.on_oom.as_ref());
    let recovered = recovery.run(
        ctx,
        AttemptKind::Request(size),
        AttemptPlan::of_batch(1),
        &mut between,
        |ctx, _| ctx.rig.allocate(request),
    )?;
    let mut result = StepResult {
        reports: recovery.reports(),
        size: Some(size),
        ..StepResult::default()
    };
    result.recovery = recovery.into_record(ctx);
    let expected = alloc.expect.of(&ctx.setup.arm, ctx.setup.device);
    let Recovered {
        answer, retries, ..
    } = recovered;
    match answer {
        Ok(buffer) => {
            result.outcome = Outcome::Fits {
                retries: retries as u32,
            };
            let seen = format!("it fits: {} handed out", buffer.size());
            result.fits(
                step,
                expected,
                format!("the request for {size} {expected}"),
                seen,
            );
            ctx.buffers.keep(key, buffer);
        }
        Err(error) => {
            let failed_request = ctx.rig.failed_request(request, &error)?;
            result.runs_out(
                step,
                expected,
                error.to_string(),
                (format!("{size} to fit"), error.to_string()),
                failed_request,
            );
        }
    }
    Ok(result)
}

pub(super) fn amount(ctx: &mut RunContext, amount: &Amount) -> Result<Result<Bytes, String>, Stop> {
    if let Amount::Fixed(bytes) = amount {
        return Ok(Ok(*bytes));
    }
    let now = ctx.readings(amount.quantities().into_iter().any(asks_for_memory))?;
    Ok(amount
        .evaluate(|metric| ctx.look_up(metric, &now))
        .map_err(|error| error.to_string()))
}

fn free_some(ctx: &mut RunContext, step: &Step, free: &FreeStep) -> Result<StepResult, Stop> {
    let before = ctx.rig.stats();
    let mut result = StepResult::default();
    match free {
        FreeStep::Targets(targets) => {
            for target in targets {
                match target {
                    FreeTarget::Buffer {
                        buffer,
                        may_be_gone,
                    } => {
                        let unmet = match ctx.key(buffer)? {
                            Err(why) => Some(Unmet::at(step, "a whole number", why)),
                            Ok(key) => match ctx.buffers.take(&key) {
                                Some(buffer) => ctx.rig.free(buffer).map(|()| None)?,
                                None => missing(ctx, step, &key).unmet.pop(),
                            },
                        };
                        result.unmet.extend(unmet.filter(|_| !may_be_gone));
                    }
                    FreeTarget::Elements(name) => {
                        for index in ctx.buffers.elements(name) {
                            ctx.buffers
                                .take(&(name.clone(), Some(index)))
                                .into_iter()
                                .try_for_each(|buffer| ctx.rig.free(buffer))?;
                        }
                    }
                    FreeTarget::Storm(id) => {
                        std::mem::take(ctx.storm(id))
                            .into_blocks()
                            .try_for_each(|buffer| ctx.rig.free(buffer))?;
                    }
                }
            }
        }
        FreeStep::Pinning { storm, request } => match amount(ctx, request)? {
            Ok(request) => result.notes.push(pins::free_for(ctx, storm, request)?),
            Err(why) => result.unmet.push(Unmet::at(step, "a size", why)),
        },
    }
    let after = ctx.rig.stats();
    let freed_blocks = before.allocation.all.current - after.allocation.all.current;
    let freed_bytes = before.allocated_bytes.all.current - after.allocated_bytes.all.current;
    result.reports = BTreeMap::from([
        (ReportKey::FreedBlocks, freed_blocks),
        (ReportKey::FreedBytes, freed_bytes),
    ]);
    Ok(result)
}

fn synchronize(ctx: &mut RunContext, target: &Synchronize) -> Result<(), Stop> {
    match target {
        Synchronize::Device => ctx.rig.synchronize(),
        Synchronize::Stream(stream) => ctx.rig.synchronize_stream(ctx.stream(stream)),
        Synchronize::Event(event) => {
            let event = ctx.event(event)?;
            ctx.rig.synchronize_event(event)
        }
    }
}

fn set_external_memory(
    ctx: &mut RunContext,
    step: &Step,
    held: &Amount,
) -> Result<StepResult, Stop> {
    let wanted = match amount(ctx, held)? {
        Ok(wanted) => wanted,
        Err(why) => return Ok(refused(step, "a size", Some(why))),
    };
    let held = ctx.rig.set_external_memory(wanted)?;
    let unit = ctx.rig.info().granularity;
    let mut result = StepResult::default();
    if held < wanted && wanted.saturating_sub(held) >= unit {
        result.unmet.push(Unmet::at(
            step,
            format!("others to hold {wanted}"),
            format!("only {held} could be allocated"),
        ));
    }
    Ok(result)
}
