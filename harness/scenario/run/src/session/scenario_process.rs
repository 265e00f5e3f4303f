//! The other side: a process of a scenario that the main one started.

use std::io::{self, BufRead as _, BufReader};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{fs::File, process::ExitCode};

use harness_allocator::device::faulty::{Faulty, Injector};
use harness_allocator::device::{CallSite, DeviceError, TestDevice, limited::Limited};
use harness_allocator::units::Nanos;
use harness_devices::DeviceSource;
use harness_exec::forked::leave;
use harness_gpu_settings::ledger::Ledger;
use harness_record::Rule;
use harness_scenario::{Readings, Scenario, Step, steps::Action};

use crate::processes::Inherited;
use crate::processes::shared::{Shared, unavailable};
use crate::processes::wire::{self, Answer, Do, Done, Order, Reply, Start};
use crate::rig::{Checks, Rig, RigOptions, Stop};
use crate::run::{execute, of_device};
use crate::{context::RunContext, step_result::StepResult};

/// The exit code of a program that panicked.
const PANICKED: u8 = 101;

/// Serves the main process, connected to standard input, until it closes the connection.
#[must_use]
pub fn serve_process() -> ExitCode {
    let orders = || io::stdin().as_fd().try_clone_to_owned();
    ExitCode::from(exit_code(|| converse(File::from(orders()?), read)))
}

pub(super) fn serve_in_copy(socket: UnixStream, inherited: &Inherited) -> ! {
    let orders = File::from(OwnedFd::from(socket));
    let served = catch_unwind(AssertUnwindSafe(|| {
        exit_code(|| converse(orders, |_| Ok(inherited.clone())))
    }));
    // A panic must not unwind into the main process's code.
    leave(served.unwrap_or(PANICKED))
}

/// Converts an error to an exit code and prints it to standard error.
fn exit_code(converse: impl FnOnce() -> io::Result<()>) -> u8 {
    match converse() {
        Ok(()) => 0,
        Err(error) => {
            let _ = io::Write::write_all(
                &mut io::stderr(),
                format!("a process of a scenario: {error}\n").as_bytes(),
            );
            1
        }
    }
}

fn converse(
    mut to: File,
    read: impl FnOnce(&Start) -> Result<Inherited, String>,
) -> io::Result<()> {
    let mut from = BufReader::new(to.try_clone()?);
    let Some(Order::Start(start)) = next(&mut from)? else {
        return Err(io::Error::other("only `harness run` starts this process"));
    };
    let faults = start.faults.clone().map(Injector::from_state);
    let mut answer = |reply| {
        wire::send(
            &mut to,
            &Answer {
                reply,
                faults: faults.as_ref().map(Injector::take_state),
            },
        )
    };
    let mut process = match Process::start(&start, read, faults.as_ref()) {
        Ok(process) => process,
        Err(why) => return answer(why),
    };
    answer(process.done(Ok(StepResult::default())))?;
    while let Some(order) = next(&mut from)? {
        match order {
            Order::Start(_) => return Err(io::Error::other("it was started twice")),
            Order::Do(order) => answer(process.act(&order))?,
            Order::Finish(number) => answer(process.finish(number))?,
            Order::Close => return answer(process.close()),
        }
    }
    Ok(())
}

fn next(from: &mut BufReader<File>) -> io::Result<Option<Order>> {
    let mut line = Vec::new();
    from.read_until(b'\n', &mut line)?;
    if line.is_empty() {
        Ok(None)
    } else {
        wire::read(&line).map(Some)
    }
}

struct Process {
    scenario: Scenario,
    ctx: RunContext,
    faults: Option<Injector>,
}

impl Process {
    /// Reads the scenario and opens the device. An error is the reply to send.
    fn start(
        start: &Start,
        read: impl FnOnce(&Start) -> Result<Inherited, String>,
        faults: Option<&Injector>,
    ) -> Result<Self, Reply> {
        let Inherited { mut scenario, arm } = read(start).map_err(Reply::Refused)?;
        // Only the main process runs external programs.
        scenario.programs.clear();
        let device =
            open(start, &scenario, faults).map_err(|error| Reply::Refused(error.to_string()))?;
        let checks = if start.audit {
            Checks::Audit
        } else {
            Checks::Accounts
        };
        let options = RigOptions {
            checks,
            seed: start.seed,
            faults: faults.cloned(),
            ..RigOptions::default()
        };
        let rig = Rig::new(device, arm.build(), &options)
            .map_err(|error| Reply::Refused(error.to_string()))?;
        let ctx = RunContext::new(rig, &scenario, &arm, start.seed)
            .map_err(|stop| stopped(stop, faults))?;
        Ok(Self {
            scenario,
            ctx,
            faults: faults.cloned(),
        })
    }

    /// Runs a step in the same way as the main process.
    fn act(&mut self, order: &Do) -> Reply {
        let Some(step) = self.scenario.step_with_number(order.step) else {
            return Reply::Refused(format!("there is no step with the number {}", order.step));
        };
        let loops = order.loops.iter().filter_map(|(number, iterations)| {
            value(self.scenario.step_with_number(*number)?, *iterations)
        });
        self.ctx.set_variables(loops);
        self.ctx.rig.begin_step(order.number);
        let result = execute(&mut self.ctx, step, None);
        let ended = self.ctx.rig.end_step(result.is_err());
        if let (Ok(result), Some(id)) = (&result, &step.id) {
            self.ctx
                .values
                .reports
                .insert(id.clone(), result.reports_with(None));
        }
        self.done(result.and_then(|result| ended.map(|_| result)))
    }

    fn done(&mut self, result: Result<StepResult, Stop>) -> Reply {
        let done = result.and_then(|result| Ok((result, self.ctx.readings(true)?)));
        match done {
            Ok((result, readings)) => {
                let (findings, readings) = (
                    self.ctx.rig.take_findings(),
                    Readings {
                        now: Nanos::ZERO,
                        ..readings
                    },
                );
                let curve = self.ctx.rig.take_curve();
                Reply::Done(Box::new(Done {
                    result,
                    findings,
                    readings,
                    curve,
                }))
            }
            Err(stop) => stopped(stop, self.faults.as_ref()),
        }
    }

    fn finish(&mut self, number: u32) -> Reply {
        self.ctx.rig.begin_step(number);
        let freed = self
            .ctx
            .free_everything()
            .and_then(|()| self.ctx.rig.finish());
        self.done(freed.map(|()| StepResult::default()))
    }

    fn close(self) -> Reply {
        match self.ctx.close() {
            Ok(()) => Reply::Closed,
            Err(stop) => stopped(stop, self.faults.as_ref()),
        }
    }
}

fn stopped(stop: Stop, faults: Option<&Injector>) -> Reply {
    match stop {
        Stop::Violated(findings) => Reply::Violated(findings),
        Stop::Device(error) => {
            let (rule, expected) = of_device(&error);
            let fault = faults.and_then(|faults| faults.cause_of(&error));
            Reply::Failed {
                rule,
                expected: expected.to_owned(),
                seen: error.to_string(),
                fault,
            }
        }
        Stop::Process {
            rule,
            expected,
            seen,
            ..
        } => Reply::Failed {
            rule,
            expected,
            seen,
            fault: None,
        },
        Stop::Interrupted => {
            let (expected, seen) = ("it to go on".to_owned(), "it was interrupted".to_owned());
            Reply::Failed {
                rule: Rule::DeviceFailure,
                expected,
                seen,
                fault: None,
            }
        }
    }
}

fn read(start: &Start) -> Result<Inherited, String> {
    let mut points = Scenario::parse_points(&start.source, &start.path, &start.parameters)
        .map_err(|error| error.to_string())?;
    let scenario = points.pop().ok_or("the scenario has no points")?;
    let listed = scenario
        .allocators
        .iter()
        .find(|arm| arm.to_string() == start.allocator)
        .cloned();
    let arm = listed.map_or_else(
        || start.allocator.parse().map_err(|error| format!("{error}")),
        Ok,
    )?;
    Ok(Inherited { scenario, arm })
}

fn value(
    step: &Step,
    iterations: u64,
) -> Option<(&harness_scenario::VariableName, harness_scenario::Number)> {
    match &step.action {
        Action::For(steps) | Action::Repeat(steps) => steps.rounds.value(iterations),
        _ => None,
    }
}

/// Opens the device with the limits and faults of this process.
fn open(
    start: &Start,
    scenario: &Scenario,
    faults: Option<&Injector>,
) -> Result<Box<dyn TestDevice>, DeviceError> {
    let device = DeviceSource::of_arguments(&start.device)?.open()?;
    let ledger = Ledger::open(&start.ledger).map_err(|error| unavailable(&error))?;
    let shared: Box<dyn TestDevice> = Box::new(Shared::new(device, start.memory, ledger)?);
    let own = scenario
        .processes
        .iter()
        .find(|process| process.name.name() == start.process)
        .and_then(|process| process.memory);
    let limited: Box<dyn TestDevice> = match own {
        Some(limit) => Box::new(Limited::shared(shared, limit)?),
        None => shared,
    };
    let mut device: Box<dyn TestDevice> = match faults {
        Some(faults) => Box::new(Faulty::new(limited, faults.clone())),
        None => limited,
    };
    device.set_call_site(CallSite(start.step));
    Ok(device)
}
