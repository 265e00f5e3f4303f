//! Processes of a scenario beside the main one: each a program of this kind with a context, an allocator and an audit of its own, on the same device.
//!
//! The main process reads the scenario, and tells another one step by step what to do, waiting for each answer: so a run is the same each time.
//!
//! * `wire`: what they say to each other; `serve`: the other side;
//! * `shared`: the device, whose memory they share by a ledger.

mod serve;
mod shared;
mod wire;

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use harness_allocator::allocator::AllocatorSpec;
use harness_allocator::allocator::library::program;
use harness_allocator::device::{Clock, DeviceError, TestDevice};
use harness_allocator::units::{Bytes, Nanos};
use harness_devices::DeviceSource;
use harness_exec::process::{End, Started};
use harness_gpu_settings::ledger::Ledger;
use harness_scenario::steps::process::Kill;
use harness_scenario::{ProcessName, Readings, Scenario, Step};
use tempfile::TempDir;

pub use self::serve::serve;
use self::shared::{Shared, unavailable};
use self::wire::{Order, Reply, Start};
use crate::control::DEFAULT_TIME_LIMIT;
use crate::rig::{Finding, Rig, Stop};
use crate::step_result::{StepResult, Unmet};

/// The subcommand of the program that a process runs. Whoever runs scenarios answers it by [`serve`].
pub const SUBCOMMAND: &str = "scenario-process";

/// The file that says who holds how much.
const LEDGER: &str = "ledger";
/// How often one looks whether a wait should be given up.
const PERIOD: Duration = Duration::from_millis(50);
/// How often one looks after a GPU's memory, and for how many times, when a process was killed: the driver gives it back by itself.
const LOOK: (Duration, u32) = (Duration::from_millis(10), 500);

/// What the processes of one run have in common.
#[derive(Debug)]
pub struct Family {
    folder: TempDir,
    /// What each of them is started with, but for its name.
    start: Start,
}

impl Family {
    /// Of a scenario that has processes, as it is run with an allocator.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] where the ledger cannot be made.
    pub fn new(
        scenario: &Scenario,
        allocator: &AllocatorSpec,
        (seed, audit): (u64, bool),
        source: &DeviceSource,
    ) -> Result<Self, DeviceError> {
        let folder = harness_exec::launch::folder_of_run().map_err(|error| unavailable(&error))?;
        let ledger = folder.path().join(LEDGER);
        Ledger::create(&ledger).map_err(|error| unavailable(&error))?;
        let start = Start {
            process: String::new(),
            source: scenario.source.clone().unwrap_or_default(),
            path: scenario.path.clone(),
            parameters: scenario.parameters.iter().cloned().collect(),
            memory: scenario.needs.memory,
            allocator: allocator.to_string(),
            seed,
            audit,
            device: source.arguments(),
            ledger,
        };
        Ok(Self { folder, start })
    }

    /// The device of the main process.
    ///
    /// # Errors
    /// [`DeviceError`] where the ledger cannot be opened, or the device cannot be limited.
    pub fn share(&self, device: Box<dyn TestDevice>, memory: Bytes) -> Result<Box<dyn TestDevice>, DeviceError> {
        let ledger = Ledger::open(&self.folder.path().join(LEDGER)).map_err(|error| unavailable(&error))?;
        Ok(Box::new(Shared::new(device, memory, ledger)?))
    }
}

/// The processes of a run, as the main one sees them. Those that still run are killed with this.
pub(crate) struct Processes {
    family: Family,
    running: BTreeMap<ProcessName, Process>,
    /// Where each of them stood when it answered last.
    readings: BTreeMap<ProcessName, Readings>,
}

/// Which process does the step at hand, and the loops around it, by their numbers, with their complete iterations.
#[derive(Clone, Debug)]
pub(crate) struct Inside {
    pub(crate) process: ProcessName,
    pub(crate) loops: Vec<(usize, u64)>,
}

struct Process {
    started: Started,
    socket: BufReader<UnixStream>,
}

/// What became of an order.
enum Heard {
    Reply(Reply),
    /// The process has ended before it answered.
    Gone(Option<End>),
    /// Nobody wanted to wait any longer: the process was killed.
    GivenUp,
}

impl Process {
    fn start() -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(PERIOD))?;
        let mut command = Command::new(program()?);
        // Standard output has the results of the harness.
        command.arg(SUBCOMMAND).stdin(OwnedFd::from(theirs)).stdout(Stdio::from(io::stderr()));
        let started = Started::start(&mut command)?;
        Ok(Self { started, socket: BufReader::new(ours) })
    }

    /// The next answer. `None` where it has gone or `give_up` says so.
    fn hear(&mut self, give_up: &mut dyn FnMut() -> bool) -> Option<Reply> {
        let mut line = Vec::new();
        loop {
            match self.socket.read_until(b'\n', &mut line) {
                Ok(_) => return wire::read(&line).ok(),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
                Err(_) => return None,
            }
            if give_up() {
                return None;
            }
        }
    }

    /// How it ended by itself; `None` where it has not.
    fn end(self) -> Option<End> {
        let mut looks = 0;
        let give_up = |_| {
            looks += 1;
            looks > LOOK.1
        };
        self.started.wait(give_up).ok().flatten()
    }
}

impl Processes {
    pub(crate) const fn new(family: Family) -> Self {
        Self { family, running: BTreeMap::new(), readings: BTreeMap::new() }
    }

    /// Where a process stood when it answered last.
    pub(crate) fn readings(&self, process: &ProcessName) -> Option<&Readings> {
        self.readings.get(process)
    }

    /// Gives a process an order and waits for the answer. A process that does not run is started first.
    fn order(&mut self, name: &ProcessName, order: &Order, give_up: &mut dyn FnMut() -> bool) -> Result<Heard, Stop> {
        if !self.running.contains_key(name) {
            let process = Process::start().map_err(|error| cannot_start(name, &error.to_string()))?;
            self.running.insert(name.clone(), process);
            let start = Start { process: name.to_string(), ..self.family.start.clone() };
            match self.tell(name, &Order::Start(Box::new(start)), give_up) {
                Heard::Reply(Reply::Done(_)) => {}
                Heard::Reply(Reply::Refused(why)) => {
                    self.running.remove(name);
                    return Err(cannot_start(name, &why));
                }
                Heard::Gone(end) => return Err(cannot_start(name, &how(end))),
                other @ (Heard::Reply(_) | Heard::GivenUp) => return Ok(other),
            }
        }
        Ok(self.tell(name, order, give_up))
    }

    fn tell(&mut self, name: &ProcessName, order: &Order, give_up: &mut dyn FnMut() -> bool) -> Heard {
        let Some(process) = self.running.get_mut(name) else { return Heard::Gone(None) };
        let mut given_up = false;
        // One that has gone is noticed by the answer that does not come.
        let _ = wire::send(process.socket.get_mut(), order);
        let reply = process.hear(&mut || {
            given_up = give_up();
            given_up
        });
        if let Some(reply) = reply {
            if let Reply::Done(done) = &reply {
                self.readings.insert(name.clone(), done.readings());
            }
            return Heard::Reply(reply);
        }
        let process = self.running.remove(name);
        if given_up { Heard::GivenUp } else { Heard::Gone(process.and_then(Process::end)) }
    }
}

/// Has a process do a step.
pub(crate) fn run(
    processes: &mut Option<Processes>,
    rig: &mut Rig,
    inside: &Inside,
    step: &Step,
    (number, step_number): (u32, usize),
) -> Result<StepResult, Stop> {
    let order = Order::Do(wire::Do { number, step: step_number, loops: inside.loops.clone() });
    let limit = step.time_limit.map_or(DEFAULT_TIME_LIMIT, |limit| Duration::from_nanos(limit.0));
    let doing = format!("it did step {number} (line {}: {} {})", step.position.line, step.action.kind(), step.action);
    match hear(processes, rig, &inside.process, &order, limit, &doing)? {
        Some(result) => Ok(result),
        None => {
            let time = Nanos(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
            let expected = format!("the process `{}` to do the step in {time}", inside.process);
            Ok(StepResult { unmet: vec![Unmet::at(step, expected, "it went on, and was killed")], ..StepResult::default() })
        }
    }
}

/// Has a process do something. `None` where its time was over, and it was killed.
fn hear(
    processes: &mut Option<Processes>,
    rig: &mut Rig,
    name: &ProcessName,
    order: &Order,
    limit: Duration,
    doing: &str,
) -> Result<Option<StepResult>, Stop> {
    let Some(processes) = processes else {
        return Err(cannot_start(name, "processes of a scenario are started by `harness run` and by its tests alone"));
    };
    let began = Instant::now();
    let mut give_up = || rig.is_interrupted() || began.elapsed() > limit;
    match processes.order(name, order, &mut give_up)? {
        Heard::Reply(Reply::Done(done)) => {
            done.findings.iter().cloned().for_each(|finding| rig.note(named(name, finding)));
            Ok(Some(done.into_result()))
        }
        Heard::Reply(Reply::Stopped { findings, device }) => {
            processes.running.remove(name);
            Err(match device {
                Some(seen) => Stop::Process { expected: format!("the device to do what the process `{name}` asks for"), seen },
                None => Stop::Violated(findings.into_iter().map(|finding| named(name, finding)).collect()),
            })
        }
        Heard::Reply(Reply::Refused(why)) => Err(cannot_start(name, &why)),
        Heard::Gone(end) => {
            Err(Stop::Process { expected: format!("the process `{name}` to do its steps"), seen: format!("{} while {doing}", how(end)) })
        }
        Heard::GivenUp if rig.is_interrupted() => Err(Stop::Interrupted),
        Heard::GivenUp => Ok(None),
    }
}

fn cannot_start(name: &ProcessName, why: &str) -> Stop {
    Stop::Process { expected: format!("the process `{name}` to start"), seen: why.to_owned() }
}

/// What was found in a process says so.
fn named(name: &ProcessName, (invariant, expected, seen): (harness_record::Invariant, String, String)) -> Finding {
    Finding { invariant, expected: format!("in the process `{name}`: {expected}"), seen }
}

/// How a process ended that should not have, in words.
fn how(end: Option<End>) -> String {
    match end {
        None => "it closed its connection".to_owned(),
        Some(End::Code(code)) => format!("it ended with exit code {code}"),
        Some(End::Signal(9)) => "SIGKILL ended it (as the system does where the host's memory runs out)".to_owned(),
        Some(End::Signal(signal)) => format!("signal {signal} ended it"),
    }
}

/// Ends a process by SIGKILL, and waits until the device has its memory back.
pub(crate) fn kill(processes: &mut Option<Processes>, rig: &mut Rig, step: &Step, kill: &Kill) -> Result<StepResult, Stop> {
    let name = &kill.process;
    let running = processes.as_mut().and_then(|processes| processes.running.remove(name));
    let Some(process) = running else {
        return Ok(StepResult {
            unmet: vec![Unmet::at(step, format!("the process `{name}` to run"), "it does not")],
            ..StepResult::default()
        });
    };
    let before = rig.memory()?;
    let readings = processes.as_ref().and_then(|processes| processes.readings(name));
    let reserved = readings.map_or(Bytes::ZERO, |readings| Bytes(readings.stats.reserved_bytes.all.current));
    let attributed = readings.and_then(|readings| readings.memory?.process);
    process.started.kill().map_err(|error| cannot_kill(name, &error))?;
    await_memory(rig, before.used.saturating_sub(attributed.unwrap_or(reserved)))?;
    let came_back = before.used.saturating_sub(rig.memory()?.used);
    let told = attributed.map_or_else(String::new, |bytes| format!(", {bytes} of the device were attributed to it"));
    let note = format!("SIGKILL ended it: {reserved} were reserved in it{told}, and {came_back} came back");
    Ok(StepResult { notes: vec![note], ..StepResult::default() })
}

fn cannot_kill(name: &ProcessName, error: &io::Error) -> Stop {
    Stop::Process { expected: format!("the process `{name}` to be killed"), seen: error.to_string() }
}

/// Waits, on a GPU, until no more than this is used of it, within its tolerance. Where it stays more, what the scenario expects says so.
pub(crate) fn await_memory(rig: &mut Rig, used: Bytes) -> Result<(), Stop> {
    let tolerance = rig.info().used_tolerance;
    for _ in 0..LOOK.1 {
        if rig.info().clock == Clock::Simulated || rig.memory()?.used <= used + tolerance {
            break;
        }
        std::thread::sleep(LOOK.0);
    }
    Ok(())
}

/// Has all processes that run free everything, check their ends, and end.
pub(crate) fn finish(processes: &mut Option<Processes>, rig: &mut Rig) -> Result<(), Stop> {
    let names: Vec<ProcessName> = processes.iter().flat_map(|processes| processes.running.keys().cloned()).collect();
    for name in names {
        let done = hear(processes, rig, &name, &Order::Finish, DEFAULT_TIME_LIMIT, "it gave everything back")?;
        if done.is_none() {
            return Err(Stop::Process { expected: format!("the process `{name}` to end"), seen: "it went on, and was killed".to_owned() });
        }
        let process = processes.as_mut().and_then(|processes| processes.running.remove(&name));
        match process.and_then(Process::end) {
            Some(End::Code(0)) => {}
            end => {
                return Err(Stop::Process { expected: format!("the process `{name}` to end well"), seen: how(end) });
            }
        }
    }
    Ok(())
}
