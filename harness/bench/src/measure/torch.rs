//! PyTorch's own allocator as an arm: which cases it can do, and how it is asked.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use harness_allocator::units::Bytes;

use super::recorder::Recorder;
use super::{Fault, MOST_SAMPLES, Reading, SLICE_NS, pipeline, scenario};
use crate::clock::{Stopwatch, Timer};
use crate::execute::TorchArm;
use crate::provider::DeviceProvider;
use crate::record::Quantity;
use crate::suite::{Case, LatencyCase, Measure};
use crate::torch::{Answer, Pass, Question, Samples, Task, Torch};
use harness_run::session::has_pytorchs;
use harness_scenario::Scenario;
use harness_scenario::steps::{Action, Step};

/// Pairs that are timed together in a hit: a call from Python takes about a microsecond, reading its clock a tenth of that.
const PAIRS: u64 = 1000;
/// Cycles with tensors that are timed together; each takes some ten calls.
const CYCLES: u64 = 100;

/// Whether PyTorch can do a case. Threads of Python take turns whatever the allocator does, and of the start little would be PyTorch's
/// allocator.
pub(crate) const fn can(measure: &Measure) -> bool {
    match measure {
        Measure::Latency { .. }
        | Measure::Trace { .. }
        | Measure::Scenario(_)
        | Measure::Recovery { .. }
        | Measure::Pipeline { .. }
        | Measure::EmptyCache { .. }
        | Measure::RecordStream { .. } => true,
        Measure::Threads { .. } | Measure::StartUp => false,
    }
}

/// Whose clock the times are of.
pub(crate) const fn quantity(measure: &Measure) -> Quantity {
    match measure {
        Measure::Pipeline { .. } => Quantity::DeviceTime,
        _ => Quantity::HostTime,
    }
}

/// A case, PyTorch as one of the arms, the memory that the suite needs, and its name.
pub(crate) struct TorchVisit<'a> {
    pub(crate) provider: &'a mut dyn DeviceProvider,
    pub(crate) arm: &'a TorchArm,
    pub(crate) suite: &'a str,
    pub(crate) case: &'a Case,
    pub(crate) memory: Bytes,
    pub(crate) interrupt: &'a Arc<AtomicBool>,
}

/// Does a case once, as [`super::visit`] does with an allocator of ours.
pub(crate) fn visit(mut visit: TorchVisit<'_>) -> Result<Vec<Reading>, Fault> {
    let measure = &visit.case.measure;
    let single = |task| (task, 1);
    let (task, batch) = match measure {
        Measure::Latency { size, case } => {
            let batch = if matches!(case, LatencyCase::Hit) { PAIRS } else { 1 };
            (Task::Latency { case: case.name(), size: *size, batch }, batch)
        }
        Measure::EmptyCache { segments, size } => single(Task::EmptyCache { segments: *segments, size: *size }),
        Measure::Recovery { size } => single(Task::Recovery { size: *size }),
        Measure::RecordStream { streams, size } => (Task::RecordStream { streams: *streams, size: *size, batch: CYCLES }, CYCLES),
        Measure::Pipeline { size } => (Task::Pipeline { size: *size, turns: pipeline::TURNS }, pipeline::TURNS),
        Measure::Trace { events } => {
            // As with ours, an allocator that refuses requests has no figures.
            return visit.trace(visit.memory, |_| Ok((events.iter().map(ToString::to_string).collect(), 0)));
        }
        Measure::Scenario(scenario) => {
            let readings = visit.trace(scenario.needs.memory, |visit| visit.record(scenario))?;
            // A trace has the scenario's requests, and not its work on the device: that time is not the scenario's.
            return Ok(readings.into_iter().filter(|reading| reading.quantity == Quantity::Memory).collect());
        }
        Measure::Threads { .. } | Measure::StartUp => return Err(Fault::Skipped("it is not PyTorch's to do".to_owned())),
    };
    let samples = visit.samples(task, visit.memory)?.samples_ps;
    Ok(vec![Reading { part: None, quantity: quantity(measure), batch, samples: Ok(samples) }])
}

impl TorchVisit<'_> {
    fn torch(&mut self) -> Result<&mut Torch, Fault> {
        match self.provider.torches() {
            Some(torches) => torches.with(&self.arm.settings).map_err(Fault::Skipped),
            None => Err(Fault::Skipped("PyTorch was not asked for".to_owned())),
        }
    }

    /// Asks for samples for a slice of time.
    fn samples(&mut self, task: Task<'_>, memory: Bytes) -> Result<Samples, Fault> {
        let torch = self.torch()?;
        let watch = Stopwatch::start();
        let mut all = Samples::default();
        while all.samples_ps.is_empty() || (all.samples_ps.len() < MOST_SAMPLES && watch.elapsed_ns() < SLICE_NS) {
            let Samples { samples_ps, pass } = done(torch.ask(&Question { task, memory }))?;
            if samples_ps.is_empty() {
                return Err(Fault::Failed("PyTorch gave no samples".to_owned()));
            }
            all.samples_ps.extend(samples_ps);
            all.pass = pass;
        }
        Ok(all)
    }

    /// Passes over a trace, which is made the first time.
    fn trace(&mut self, memory: Bytes, make: impl FnOnce(&mut Self) -> Result<(Vec<String>, u64), Fault>) -> Result<Vec<Reading>, Fault> {
        let name = format!("{}: {}", self.suite, self.case.name());
        if !self.torch()?.has(&name) {
            let (events, refused) = make(self)?;
            done(self.torch()?.load(&name, &events, refused))?;
        }
        let Samples { samples_ps, pass } = self.samples(Task::Trace { trace: &name }, memory)?;
        let Some(Pass { operations, reserved, unused }) = pass else {
            return Err(Fault::Failed("PyTorch did not tell what memory the trace took".to_owned()));
        };
        Ok(vec![
            Reading::time(Timer::Host, operations.max(1), samples_ps),
            Reading::memory("peak reserved", reserved),
            Reading::memory("not allocated at the peak", unused),
        ])
    }

    /// The requests of a scenario, as our allocator with the same settings has them, and how many of them it refuses.
    fn record(&mut self, scenario: &Scenario) -> Result<(Vec<String>, u64), Fault> {
        if !has_pytorchs(scenario) {
            return Err(Fault::Skipped(format!("`{}` lists no allocator of PyTorch's", scenario.path.display())));
        }
        if sets_pressure(&scenario.steps) {
            return Err(Fault::Skipped("it takes memory as another program would, which a trace of its requests does not tell".to_owned()));
        }
        let arm = &self.arm.ours;
        let (recorder, recording) = Recorder::new(self.provider.allocator(arm));
        let record = scenario::run(self.provider, scenario, arm, Box::new(recorder), self.interrupt)?;
        // Behind its last step a run tries whether all memory is to be had again.
        let (events, refused) = recording.first(record.stats.allocation.all.allocated).map_err(Fault::Skipped)?;
        Ok((events, refused))
    }
}

/// Whether a step has others hold memory.
fn sets_pressure(steps: &[Step]) -> bool {
    steps.iter().any(|step| match &step.action {
        Action::Pressure(_) => true,
        Action::Repeat(repeat) => sets_pressure(&repeat.steps),
        _ => false,
    })
}

fn done(answer: Answer) -> Result<Samples, Fault> {
    match answer {
        Answer::Done(samples) => Ok(samples),
        Answer::Skipped { skipped } => Err(Fault::Skipped(skipped)),
        Answer::Failed { failed } => Err(Fault::Failed(failed)),
    }
}
