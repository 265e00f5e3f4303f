//! The other side: what a process of a scenario does, which the main one started. It has a device, an allocator and an audit of its own, and does the steps
//! that it is told.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::process::ExitCode;

use harness_allocator::device::limited::Limited;
use harness_allocator::device::{DeviceError, TestDevice};
use harness_devices::DeviceSource;
use harness_gpu_settings::ledger::Ledger;
use harness_scenario::steps::Action;
use harness_scenario::{Scenario, Step};

use super::shared::{Shared, unavailable};
use super::wire::{self, Do, Done, Order, Reply, Start};
use crate::rig::{Checks, Finding, Rig, RigOptions, Stop};
use crate::run::execute_step;
use crate::step_result::StepResult;
use crate::world::World;

/// Does what the main process orders on standard input, to the end of this process.
#[must_use]
pub fn serve() -> ExitCode {
    match converse() {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever waits for an answer sees the exit code, and this on standard error.
        Err(error) => {
            let _ = io::Write::write_all(&mut io::stderr(), format!("a process of a scenario: {error}\n").as_bytes());
            ExitCode::FAILURE
        }
    }
}

fn converse() -> io::Result<()> {
    let mut to = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut from = BufReader::new(to.try_clone()?);
    let Some(Order::Start(start)) = next(&mut from)? else { return Err(io::Error::other("it is started by `harness run` alone")) };
    let mut process = match Process::start(&start) {
        Ok(process) => process,
        Err(why) => return wire::send(&mut to, &Reply::Refused(why)),
    };
    let begun = process.done(Ok(StepResult::default()));
    wire::send(&mut to, &begun)?;
    while let Some(order) = next(&mut from)? {
        let reply = match order {
            Order::Start(_) => return Err(io::Error::other("it was started twice")),
            Order::Do(order) => process.act(&order),
            Order::Finish => return wire::send(&mut to, &process.finish()),
        };
        wire::send(&mut to, &reply)?;
    }
    Ok(())
}

/// The next order; `None` where the main process is gone.
fn next(from: &mut BufReader<File>) -> io::Result<Option<Order>> {
    let mut line = Vec::new();
    from.read_until(b'\n', &mut line)?;
    if line.is_empty() { Ok(None) } else { wire::read(&line).map(Some) }
}

/// This process.
struct Process {
    scenario: Scenario,
    world: World,
}

impl Process {
    /// Reads the scenario once more and opens the device. Why not, in words.
    fn start(start: &Start) -> Result<Self, String> {
        let mut points = Scenario::parse_points(&start.source, &start.path, &start.parameters).map_err(|error| error.to_string())?;
        let mut scenario = points.pop().ok_or("the scenario has no points")?;
        // Other programs are those of the main process.
        scenario.programs.clear();
        let listed = scenario.allocators.iter().find(|arm| arm.to_string() == start.allocator).cloned();
        let arm = listed.map_or_else(|| start.allocator.parse().map_err(|error| format!("{error}")), Ok)?;
        let device = open(start, &scenario).map_err(|error| error.to_string())?;
        let checks = if start.audit { Checks::Audit } else { Checks::Accounts };
        let options = RigOptions { checks, seed: start.seed, ..RigOptions::default() };
        let rig = Rig::new(device, arm.build(), &options).map_err(|error| error.to_string())?;
        let world = World::new(rig, &scenario, &arm, start.seed).map_err(|failed| format!("{:?}", failed.2))?;
        Ok(Self { scenario, world })
    }

    /// Does a step as a run does it.
    fn act(&mut self, order: &Do) -> Reply {
        let Some(step) = self.scenario.step_with_number(order.step) else {
            return Reply::Stopped { findings: Vec::new(), device: Some(format!("there is no step with the number {}", order.step)) };
        };
        let loops = order.loops.iter().filter_map(|(number, iterations)| value(self.scenario.step_with_number(*number)?, *iterations));
        self.world.set_variables(loops);
        self.world.rig.begin_step(order.number);
        let result = execute_step(&mut self.world, step);
        let ended = self.world.rig.end_step();
        if let (Ok(result), Some(id)) = (&result, &step.id) {
            self.world.report(id.clone(), result.reports_with(None));
        }
        self.done(result.and_then(|result| ended.map(|_| result)))
    }

    /// What is said of something that was done.
    fn done(&mut self, result: Result<StepResult, Stop>) -> Reply {
        let done = result.and_then(|result| Ok((result, self.world.readings(true)?)));
        match done {
            Ok((result, readings)) => Reply::Done(Box::new(Done::new(result, self.world.rig.take_findings(), &readings))),
            Err(stop) => stopped(stop),
        }
    }

    /// Frees everything, checks the end, and gives everything back.
    fn finish(mut self) -> Reply {
        let freed = self.world.free_everything().and_then(|()| self.world.rig.finish());
        let last = self.done(freed.map(|()| StepResult::default()));
        match self.world.close() {
            Err(stop) if matches!(last, Reply::Done(_)) => stopped(stop),
            _ => last,
        }
    }
}

fn stopped(stop: Stop) -> Reply {
    let (findings, device) = match stop {
        Stop::Violated(findings) => (findings, None),
        Stop::Device(error) => (Vec::new(), Some(error.to_string())),
        Stop::Interrupted => (Vec::new(), Some("it was interrupted".to_owned())),
        Stop::Process { seen, .. } => (Vec::new(), Some(seen)),
    };
    Reply::Stopped { findings: findings.into_iter().map(|finding: Finding| wire::of_finding(finding)).collect(), device }
}

/// The variable of a loop and its value.
fn value(step: &Step, iterations: u64) -> Option<(&harness_scenario::VariableName, harness_scenario::Number)> {
    match &step.action {
        Action::For(steps) | Action::Repeat(steps) => steps.rounds.value(iterations),
        _ => None,
    }
}

/// The device with what the process may have of it.
fn open(start: &Start, scenario: &Scenario) -> Result<Box<dyn TestDevice>, DeviceError> {
    let device = DeviceSource::of_arguments(&start.device)?.open()?;
    let ledger = Ledger::open(&start.ledger).map_err(|error| unavailable(&error))?;
    let shared: Box<dyn TestDevice> = Box::new(Shared::new(device, start.memory, ledger)?);
    let own = scenario.processes.iter().find(|process| process.name.name() == start.process).and_then(|process| process.memory);
    match own {
        Some(limit) => Ok(Box::new(Limited::shared(shared, limit)?)),
        None => Ok(shared),
    }
}
