//! What each step does. The match in [`execute`] is the checklist: a new step does not compile until it is here.

use std::collections::BTreeMap;

use harness_allocator::allocator::Request;
use harness_allocator::units::{Bytes, Nanos};

use crate::recovery::{self, Recovered};
use crate::rig::Halt;
use crate::workload::{pins, storm, train};
use crate::world::{Done, LookUpError, Missed, World};
use harness_record::Outcome;
use harness_scenario::steps::alloc::Alloc;
use harness_scenario::steps::event::Synchronize;
use harness_scenario::steps::free::{Free, FreeTarget};
use harness_scenario::steps::{Action, Step};
use harness_scenario::{Amount, AmountError, Expectation, Expected, Located, ReportKey, Unit};

/// Does one step, `repeat` apart, which the loop unrolls.
pub(super) fn execute(world: &mut World, step: &Step) -> Result<Done, Halt> {
    match &step.action {
        Action::Alloc(alloc) => return allocate(world, step, alloc),
        Action::Free(free) => return free_some(world, step, free),
        Action::UseOn(use_on) => {
            let stream = world.stream(&use_on.stream);
            world.with_buffer(&use_on.buffer, |rig, buffer| {
                rig.use_on(buffer, stream)?;
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
            return Ok(Done { reports: BTreeMap::from([(ReportKey::FreedBytes, freed.0)]), ..Done::default() });
        }
        Action::ResetPeaks(_) => world.rig.reset_peaks(),
        Action::SetFraction(set) => world.rig.set_memory_fraction(set.fraction),
        Action::Pressure(pressure) => return press(world, step, &pressure.held),
        Action::Storm(storm) => return storm::run(world, step, storm),
        Action::Pins(pins) => return pins::list(world, &pins.storm),
        Action::Train(train) => return train::run(world, step, train),
        Action::Measure(measure) => world.measure(measure.name.clone())?,
        Action::Expect(expect) => {
            let mut done = Done::default();
            for expectation in expect.of(&world.arm) {
                done.missed.extend(check(world, expectation)?);
            }
            return Ok(done);
        }
        Action::Repeat(_) => {}
    }
    Ok(Done::default())
}

/// Evaluates an expectation; what was missed, with every figure in it.
pub(super) fn check(world: &mut World, expectation: &Located<Expectation>) -> Result<Option<Missed>, Halt> {
    let missed = |seen: String| {
        let expected = expectation.value.text.clone();
        Ok(Some(Missed { at: expectation.position(), expected, seen }))
    };
    let mut figures = Vec::new();
    let evaluated = expectation.value.evaluate(|metric| {
        let value = world.look_up(metric)?;
        figures.push(format!("{metric} = {}", figure(value, metric.unit())));
        Ok::<u64, LookUpError>(value)
    });
    match evaluated {
        Ok(evaluation) if evaluation.holds => Ok(None),
        Ok(_) => missed(figures.join(", ")),
        Err(LookUpError::Halt(halt)) => Err(halt),
        Err(error) => missed(error.to_string()),
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

fn allocate(world: &mut World, step: &Step, alloc: &Alloc) -> Result<Done, Halt> {
    let size = match amount(world, &alloc.size)? {
        Ok(size) => size,
        Err(why) => return Ok(Done { missed: vec![Missed::at(step, "a size", why)], ..Done::default() }),
    };
    let request = Request { size, stream: world.stream(&alloc.stream) };
    let recovered =
        recovery::recover(world, alloc.on_oom.as_ref(), size.0, |size| Bytes(size).to_string(), |world, _| world.rig.allocate(request))?;
    let mut done = Done { reports: recovered.reports(), ..Done::default() };
    let Recovered { answer, retries, .. } = recovered;
    match (answer, alloc.expect.of(&world.arm)) {
        (Ok(buffer), expected) => {
            done.outcome = Outcome::Fits { retries: retries as u32 };
            if expected == Some(Expected::Oom) {
                let seen = format!("it fits: {} handed out", buffer.size());
                done.missed.push(Missed::at(step, format!("the request for {size} to run out of memory"), seen));
            }
            world.keep(&alloc.buffer, buffer);
        }
        (Err(error), expected) => {
            done.outcome = Outcome::OutOfMemory;
            done.notes.push(error.to_string());
            done.shortage = Some(world.rig.shortage(request, &error)?);
            if expected == Some(Expected::Fits) {
                done.missed.push(Missed::at(step, format!("{size} to fit"), error.to_string()));
            }
        }
    }
    Ok(done)
}

/// An amount now; the inner error says in words why there is none.
pub(super) fn amount(world: &mut World, amount: &Amount) -> Result<Result<Bytes, String>, Halt> {
    match amount.evaluate(|metric| world.look_up(metric)) {
        Ok(bytes) => Ok(Ok(bytes)),
        Err(AmountError::LookUp(LookUpError::Halt(halt))) => Err(halt),
        Err(error) => Ok(Err(error.to_string())),
    }
}

fn free_some(world: &mut World, step: &Step, free: &Free) -> Result<Done, Halt> {
    let before = world.rig.stats();
    let mut done = Done::default();
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
            Ok(request) => done.notes.push(pins::free_for(world, storm, request)?),
            Err(why) => done.missed.push(Missed::at(step, "a size", why)),
        },
    }
    let after = world.rig.stats();
    let freed_blocks = before.allocation.all.current - after.allocation.all.current;
    let freed_bytes = before.allocated_bytes.all.current - after.allocated_bytes.all.current;
    done.reports = BTreeMap::from([(ReportKey::FreedBlocks, freed_blocks), (ReportKey::FreedBytes, freed_bytes)]);
    Ok(done)
}

fn synchronize(world: &mut World, target: &Synchronize) -> Result<(), Halt> {
    match target {
        Synchronize::Device => world.rig.synchronize(),
        Synchronize::Stream(stream) => world.rig.synchronize_stream(world.stream(stream)),
        Synchronize::Event(event) => {
            let event = world.event(event)?;
            world.rig.synchronize_event(event)
        }
    }
}

fn press(world: &mut World, step: &Step, held: &Amount) -> Result<Done, Halt> {
    let wanted = match amount(world, held)? {
        Ok(wanted) => wanted,
        Err(why) => return Ok(Done { missed: vec![Missed::at(step, "a size", why)], ..Done::default() }),
    };
    let held = world.rig.set_pressure(wanted)?;
    let unit = world.rig.info().granularity;
    let mut done = Done::default();
    if held < wanted && wanted.saturating_sub(held) >= unit {
        done.missed.push(Missed::at(step, format!("others to hold {wanted}"), format!("only {held} could be had")));
    }
    Ok(done)
}
