//! The loop: a scenario, a device and an allocator in, a record out. Errors of the run are data in the record.

mod execute;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use harness_allocator::allocator::{Allocator, AllocatorSpec};
use harness_allocator::device::{Device, DeviceError, TestDevice};

use crate::rig::{Finding, Halt, Rig, RigOptions};
use crate::world::{Done, Missed, World};
use harness_record::{Outcome, Rule, RunRecord, StepRecord, Verdict, Violation};
use harness_scenario::Scenario;
use harness_scenario::steps::{Action, Step};

/// Steps beyond this are counted but not recorded: a record is for reading.
const MOST_STEPS: usize = 10_000;

/// What is to be run, apart from the device.
#[derive(Clone, Debug)]
pub struct RunRequest<'a> {
    /// The scenario.
    pub scenario: &'a Scenario,
    /// The allocator.
    pub allocator: &'a AllocatorSpec,
    /// Every random choice comes from this.
    pub seed: u64,
    /// Counted from 0.
    pub repetition: u32,
    /// A command that does the same again.
    pub reproduce: String,
    /// Whether every operation is audited. Off only where the allocator's own speed is measured.
    pub audit: bool,
    /// Set by somebody else when the run should stop.
    pub interrupt: Arc<AtomicBool>,
}

/// Runs a scenario on a device that is as large as the scenario wants it.
///
/// # Errors
/// [`DeviceError`] where the device cannot even tell its memory; whatever happens later is in the record.
pub fn run(request: &RunRequest<'_>, device: Box<dyn TestDevice>) -> Result<RunRecord, DeviceError> {
    run_with(request, device, request.allocator.build())
}

/// Runs a scenario with an allocator that somebody else made, in the place of the one that the request names.
///
/// # Errors
/// As [`run`].
pub fn run_with(request: &RunRequest<'_>, device: Box<dyn TestDevice>, allocator: Box<dyn Allocator>) -> Result<RunRecord, DeviceError> {
    let options = RigOptions { audit: request.audit, seed: request.seed, interrupt: Arc::clone(&request.interrupt) };
    let device_info = device.info().clone();
    let cost_figures = device.cost_figures();
    let rig = Rig::new(device, allocator, &options)?;
    let mut runner =
        Runner { request, steps: Vec::new(), unrecorded_steps: 0, number: 0, violations: Vec::new(), interrupted: false, contended: None };
    let mut world = match World::new(rig, request.scenario, request.allocator.to_string(), request.seed) {
        Ok(world) => world,
        Err(failed) => {
            let (rig, streams, halt) = *failed;
            // The run has failed already; what closing adds would only hide why.
            let _ = rig.close(streams.into_iter().skip(1).collect(), Vec::new());
            return Err(device_error(halt));
        }
    };
    let completed = matches!(runner.run_steps(&mut world, &request.scenario.steps), Next::Continue);
    let (stats, calls) = (world.rig.stats(), world.rig.calls());
    let (timings, curve) = world.rig.take_measurements();
    runner.finish(world, completed);
    Ok(RunRecord {
        scenario: request.scenario.info(),
        device: device_info,
        allocator: request.allocator.to_string(),
        settings: request.allocator.settings(),
        seed: request.seed,
        repetition: request.repetition,
        reproduce: request.reproduce.clone(),
        verdict: runner.verdict(),
        steps: runner.steps,
        unrecorded_steps: runner.unrecorded_steps,
        curve,
        timings,
        calls,
        stats,
        cost_figures,
    })
}

fn device_error(halt: Halt) -> DeviceError {
    match halt {
        Halt::Device(error) => error,
        Halt::Violated(findings) => {
            let why = findings.into_iter().map(|finding| finding.seen).collect::<Vec<_>>().join("; ");
            DeviceError::Unavailable { what: "the device".to_owned(), why }
        }
        Halt::Contended(why) => DeviceError::Unavailable { what: "the device".to_owned(), why },
        Halt::Interrupted => DeviceError::Unavailable { what: "the device".to_owned(), why: "interrupted".to_owned() },
    }
}

/// What should have been, where a device says that something is wrong: whether to look at the allocator or at the machine.
const fn expected_of_device(error: &DeviceError) -> &'static str {
    match error {
        DeviceError::DoubleFree { .. } | DeviceError::InvalidFree { .. } | DeviceError::InvalidAccess { .. } => {
            "the allocator to hand out and free only memory that is allocated on the device"
        }
        DeviceError::UnknownHandle { .. } | DeviceError::NotReady(_) => "streams and events to be used only while they exist",
        DeviceError::Race { .. } | DeviceError::Corrupted { .. } => "memory to hold what was written",
        DeviceError::OutOfMemory { .. } => "memory for the harness's own needs",
        DeviceError::Driver { .. } | DeviceError::Unavailable { .. } => "the driver to do as it is told",
    }
}

struct Runner<'a> {
    request: &'a RunRequest<'a>,
    steps: Vec<StepRecord>,
    unrecorded_steps: u64,
    number: u32,
    violations: Vec<Violation>,
    interrupted: bool,
    /// What other processes did, where that ended the run.
    contended: Option<String>,
}

/// Whether the run goes on.
enum Next {
    Continue,
    Stop,
}

impl Runner<'_> {
    fn run_steps(&mut self, world: &mut World, steps: &[Step]) -> Next {
        for step in steps {
            // Not every step allocates, and only an allocation looks by itself.
            if world.rig.is_interrupted() {
                self.interrupted = true;
                return Next::Stop;
            }
            let next = match &step.action {
                Action::Repeat(repeat) => self.repeat(world, repeat.times, &repeat.steps),
                _ => self.run_step(world, step),
            };
            if matches!(next, Next::Stop) {
                return Next::Stop;
            }
        }
        Next::Continue
    }

    fn repeat(&mut self, world: &mut World, times: u64, steps: &[Step]) -> Next {
        for _ in 0..times {
            if matches!(self.run_steps(world, steps), Next::Stop) {
                return Next::Stop;
            }
        }
        Next::Continue
    }

    fn run_step(&mut self, world: &mut World, step: &Step) -> Next {
        self.number += 1;
        world.rig.begin_step(self.number);
        let executed = execute::execute(world, step);
        let seen = self.violations.len();
        let done = match executed {
            Ok(mut done) => {
                for missed in std::mem::take(&mut done.missed) {
                    self.miss(missed);
                }
                Some(done)
            }
            Err(halt) => {
                self.halt(halt, step);
                None
            }
        };
        let ended = match (world.rig.end_step(), &done) {
            (Ok(ended), _) => Some(ended),
            // A step that failed already has said why; what the audit adds would only hide it.
            (Err(_), None) => None,
            (Err(halt), Some(_)) => {
                self.halt(halt, step);
                None
            }
        };
        for finding in world.rig.take_findings() {
            self.find(finding, Some(step));
        }
        if done.is_some() && ended.is_some() {
            self.check_invariants(world, step);
        }
        let failed = self.violations.len() > seen;
        let stops = self.interrupted || self.contended.is_some() || (failed && !self.only_expected_violations()) || ended.is_none();
        let accounts = ended.or_else(|| Some((Default::default(), world.rig.accounts().ok()?)));
        // A step that was interrupted is neither done nor failed.
        if let Some((duration, accounts)) = accounts.filter(|_| !self.interrupted) {
            let done = done.unwrap_or_else(|| Done { outcome: Outcome::Failed, ..Done::default() });
            if let Some(id) = &step.id {
                world.report(id.clone(), done.reports_with_time(duration));
            }
            let outcome = if failed && done.missed.is_empty() && done.outcome == Outcome::Done { Outcome::Failed } else { done.outcome };
            let step = StepRecord {
                number: self.number,
                line: step.position.line,
                kind: step.action.kind().name().to_owned(),
                text: step.action.to_string(),
                outcome,
                accounts,
                duration,
                // Without a name nobody asked for the figures.
                reports: step.id.iter().flat_map(|_| &done.reports).map(|(key, value)| (key.name().to_owned(), *value)).collect(),
                notes: done.notes,
                tables: done.tables,
                shortage: done.shortage,
            };
            // The step that ends a run is the one that people look for.
            if self.steps.len() < MOST_STEPS || stops { self.steps.push(step) } else { self.unrecorded_steps += 1 }
        }
        if stops { Next::Stop } else { Next::Continue }
    }

    /// Frees what is live, checks the end where all steps were done, and closes the device.
    fn finish(&mut self, mut world: World, completed: bool) {
        let mut clean = completed;
        if completed {
            world.rig.begin_step(self.number + 1);
            let ended = world.free_everything().and_then(|()| world.rig.finish());
            if let Err(halt) = ended {
                clean = false;
                self.halt_at(halt, None);
            }
        }
        if let Err(halt) = world.close()
            && clean
        {
            self.halt_at(halt, None);
        }
    }

    fn check_invariants(&mut self, world: &mut World, step: &Step) {
        for invariant in &self.request.scenario.invariants {
            match execute::check(world, invariant) {
                Ok(missed) => missed.into_iter().for_each(|missed| self.miss(missed)),
                Err(halt) => return self.halt(halt, step),
            }
        }
    }

    fn halt(&mut self, halt: Halt, step: &Step) {
        self.halt_at(halt, Some(step));
    }

    fn halt_at(&mut self, halt: Halt, step: Option<&Step>) {
        match halt {
            Halt::Interrupted => self.interrupted = true,
            Halt::Contended(reason) => self.contended = Some(reason),
            Halt::Violated(findings) => findings.into_iter().for_each(|finding| self.find(finding, step)),
            Halt::Device(error) => self.violations.push(Violation {
                step: self.number,
                at: step.map(|step| self.request.scenario.place(step.position)),
                rule: Rule::DeviceFailure,
                expected: expected_of_device(&error).to_owned(),
                seen: error.to_string(),
            }),
        }
    }

    fn find(&mut self, finding: Finding, step: Option<&Step>) {
        let Finding { invariant, expected, seen } = finding;
        let at = step.map(|step| self.request.scenario.place(step.position));
        self.violations.push(Violation { step: self.number, at, rule: Rule::Invariant(invariant), expected, seen });
    }

    fn miss(&mut self, missed: Missed) {
        let at = Some(self.request.scenario.place(missed.at));
        let Missed { expected, seen, .. } = missed;
        self.violations.push(Violation { step: self.number, at, rule: Rule::Expectation, expected, seen });
    }

    /// Whether everything seen so far is what `violates:` asks for.
    fn only_expected_violations(&self) -> bool {
        let expected = self.request.scenario.violates.as_ref().map(|violates| Rule::Invariant(violates.value));
        self.violations.iter().all(|violation| Some(&violation.rule) == expected.as_ref())
    }

    fn verdict(&mut self) -> Verdict {
        if self.interrupted {
            return Verdict::Interrupted;
        }
        if let Some(reason) = self.contended.take() {
            return Verdict::Contended { reason };
        }
        if let Some(violates) = &self.request.scenario.violates {
            if self.violations.is_empty() {
                let expected = format!("the run to violate `{}`: {} must not hold", violates.value, violates.value.promise());
                self.violations.push(Violation {
                    step: self.number,
                    at: Some(self.request.scenario.place(violates.position())),
                    rule: Rule::ExpectedViolation,
                    expected,
                    seen: "it holds all the time".to_owned(),
                });
            } else if self.only_expected_violations() {
                return Verdict::Passed;
            }
        }
        let mut violations = std::mem::take(&mut self.violations).into_iter();
        match violations.next() {
            None => Verdict::Passed,
            Some(first) => Verdict::Failed { first, rest: violations.collect() },
        }
    }
}
