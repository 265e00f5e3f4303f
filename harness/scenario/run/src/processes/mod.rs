//! Processes of a scenario other than the main one. Each is a separate harness process with its own
//! context, allocator and audit on the same device.
//!
//! The main process reads the scenario and sends orders to the others, step by step. It waits for
//! each answer, so every run behaves the same.
//!
//! * `wire`: the messages; `session::scenario_process`: the side of the other process;
//! * `shared`: the device, whose memory the processes share through a ledger.

pub(crate) mod shared;
pub(crate) mod wire;

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, BufReader, ErrorKind, Read as _};
use std::os::{fd::OwnedFd, unix::net::UnixStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use harness_allocator::allocator::{AllocatorSpec, library::program};
use harness_allocator::device::{Clock, DeviceError, TestDevice, faulty::Injector};
use harness_allocator::units::{Bytes, Nanos};
use harness_devices::DeviceSource;
use harness_exec::forked::{Forked, ForkedChild, fork};
use harness_exec::launch::RunFolder;
use harness_exec::process::{End, Started};
use harness_gpu_settings::ledger::Ledger;
use harness_record::{Accounts, MemoryFigures, ProcessFigures, Rule};
use harness_scenario::{ProcessName, Readings, Scenario, Step};

use self::shared::{Shared, unavailable};
use self::wire::{Answer, Done, Order, Reply, Start};
use crate::rig::{Finding, Peaks, Rig, Stop, Totals};
use crate::step_result::{StepResult, Unmet};
use crate::{control::DEFAULT_TIME_LIMIT, faults::Faults};

/// The subcommand that starts such a process. Programs that run scenarios must handle it with
/// [`crate::session::serve_process`].
pub const SUBCOMMAND: &str = "scenario-process";

/// The file that records the memory of each process.
const LEDGER: &str = "ledger";
/// The interval between checks whether to stop waiting.
const PERIOD: Duration = Duration::from_millis(50);
/// The number of these intervals to wait for an exiting process.
const MOST_PERIODS: u32 = 100;
/// The interval and number of checks of a GPU's memory after a process was killed, because the
/// driver releases memory asynchronously.
const LOOK: (Duration, u32) = (Duration::from_millis(10), 500);

#[derive(Clone, Copy, Debug)]
pub enum StartedBy {
    /// As new programs, which read the scenario again.
    Exec,
    /// By forking this process, which must have a single thread. Faster; only for the simulated
    /// device.
    Fork(ServeCopy),
}

/// Serves the main process in a forked copy of it.
pub type ServeCopy = fn(UnixStream, &Inherited) -> !;

/// The data that a forked process inherits.
#[derive(Clone, Debug)]
pub struct Inherited {
    pub(crate) scenario: Scenario,
    pub(crate) arm: AllocatorSpec,
}

#[derive(Debug)]
pub struct ProcessGroup {
    folder: RunFolder,
    ledger: Ledger,
    /// The start message, without the process's name, step and faults.
    start: Start,
    forks: Option<(ServeCopy, Inherited)>,
}

impl ProcessGroup {
    /// Prepares the processes of a scenario; `None` if it has none.
    pub fn of(
        scenario: &Scenario,
        allocator: &AllocatorSpec,
        (seed, audit): (u64, bool),
        source: &DeviceSource,
        started_by: StartedBy,
    ) -> Result<Option<Self>, DeviceError> {
        if scenario.processes.is_empty() {
            return Ok(None);
        }
        let folder = RunFolder::new().map_err(|error| unavailable(&error))?;
        let ledger = folder.path().join(LEDGER);
        let shared = Ledger::create(&ledger).map_err(|error| unavailable(&error))?;
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
            step: 0,
            faults: None,
        };
        let forks = match started_by {
            StartedBy::Exec => None,
            StartedBy::Fork(serve) => Some((
                serve,
                Inherited {
                    scenario: scenario.clone(),
                    arm: allocator.clone(),
                },
            )),
        };
        Ok(Some(Self {
            folder,
            ledger: shared,
            start,
            forks,
        }))
    }

    /// Wraps the device of the main process.
    pub fn share(
        &self,
        device: Box<dyn TestDevice>,
        memory: Bytes,
    ) -> Result<Box<dyn TestDevice>, DeviceError> {
        let ledger =
            Ledger::open(&self.folder.path().join(LEDGER)).map_err(|error| unavailable(&error))?;
        Ok(Box::new(Shared::new(device, memory, ledger)?))
    }
}

/// The processes of a run, as the main one manages them. They are killed on drop.
#[derive(Default)]
pub(crate) struct Processes {
    /// `None` if the scenario has no processes.
    group: Option<ProcessGroup>,
    running: BTreeMap<ProcessName, Process>,
    readings: BTreeMap<ProcessName, Readings>,
    /// OOMs of all these processes.
    pub(crate) ooms: u64,
    /// The figures of these processes and of the programs of `exec` steps, in order of their first
    /// step.
    pub(crate) figures: Vec<ProcessFigures>,
    /// True if an `exec` step ran at the same time as other steps, so the peak of all together is
    /// unknown.
    pub(crate) has_parallel_programs: bool,
    faults: Option<Faults>,
}

/// The process of the current step, and the loops around the step: their step numbers and completed
/// iterations.
#[derive(Clone, Debug)]
pub(crate) struct Inside {
    pub(crate) process: ProcessName,
    pub(crate) loops: Vec<(usize, u64)>,
}

struct Process {
    running: Running,
    socket: BufReader<UnixStream>,
}

enum Running {
    Program(Started),
    Copy(ForkedChild),
}

impl Running {
    /// Waits for an exiting process.
    fn ending(self) -> io::Result<End> {
        match self {
            Self::Program(started) => started.ending(),
            Self::Copy(copied) => copied.wait(),
        }
    }

    fn kill(self) -> io::Result<()> {
        match self {
            Self::Program(started) => started.kill().map(drop),
            Self::Copy(copied) => {
                drop(copied);
                Ok(())
            }
        }
    }
}

enum Heard {
    Reply(Reply),
    /// The process ended before it answered.
    Gone(Option<End>),
    /// Waiting was aborted, and the process was killed.
    GivenUp,
}

fn is_not_yet(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

impl Process {
    fn start(forks: Option<&(ServeCopy, Inherited)>) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(PERIOD))?;
        let running = match forks {
            None => {
                let mut command = Command::new(program()?);
                // Standard output is reserved for the harness's results.
                command
                    .arg(SUBCOMMAND)
                    .stdin(OwnedFd::from(theirs))
                    .stdout(Stdio::from(io::stderr()));
                Running::Program(Started::start(&mut command)?)
            }
            Some((serve, inherited)) => match fork()? {
                Forked::Copy => {
                    drop(ours);
                    serve(theirs, inherited)
                }
                Forked::Original(copied) => Running::Copy(copied),
            },
        };
        Ok(Self {
            running,
            socket: BufReader::new(ours),
        })
    }

    /// Waits for the next answer. `None` if the process is gone or `give_up` returns true.
    fn hear(&mut self, give_up: &mut dyn FnMut() -> bool) -> Option<Answer> {
        let mut line = Vec::new();
        loop {
            match self.socket.read_until(b'\n', &mut line) {
                Ok(_) => return wire::read(&line).ok(),
                Err(error) if is_not_yet(&error) => {}
                Err(_) => return None,
            }
            if give_up() {
                return None;
            }
        }
    }

    fn end(mut self) -> Option<End> {
        // Its exit closes the connection.
        for _ in 0..MOST_PERIODS {
            match self.socket.read_to_end(&mut Vec::new()) {
                Ok(_) => return self.running.ending().ok(),
                Err(error) if is_not_yet(&error) => {}
                Err(_) => return None,
            }
        }
        None
    }
}

impl Processes {
    pub(crate) fn new(group: Option<ProcessGroup>, faults: Option<Faults>) -> Self {
        Self {
            group,
            running: BTreeMap::new(),
            readings: BTreeMap::new(),
            faults,
            ..Self::default()
        }
    }

    pub(crate) fn readings(&self, process: &ProcessName) -> Option<&Readings> {
        self.readings.get(process)
    }

    /// The memory of a process after its last step.
    pub(crate) fn accounts(&self, process: &ProcessName) -> Option<Accounts> {
        let readings = self.readings.get(process)?;
        Some(Accounts::new(&readings.stats, readings.memory?))
    }

    /// What the running processes hold, without one of them, and the counters of all.
    fn held(&self, without: Option<&ProcessName>) -> Totals {
        let running = self.running.keys().filter(|&name| Some(name) != without);
        let held = running
            .filter_map(|name| Some(Totals::of(&self.readings.get(name)?.stats)))
            .fold(Totals::default(), Totals::and);
        let sum = |counter: fn(&MemoryFigures) -> Option<u64>| {
            self.figures
                .iter()
                .filter_map(|one| counter(&one.figures))
                .sum()
        };
        Totals {
            ooms: sum(|figures| figures.ooms),
            retries: sum(|figures| figures.retries),
            ..held
        }
    }

    /// Notes the figures of the processes of an `exec` step. `held` is the most that all programs
    /// and processes ever held together, which counts if several ran at the same time.
    pub(crate) fn note_exec(
        &mut self,
        rig: &mut Rig,
        programs: &[ProcessFigures],
        held: Bytes,
        is_alone: bool,
    ) {
        for program in programs {
            self.add(&program.name, program.figures);
        }
        rig.set_elsewhere(self.held(None));
        match programs {
            [] => {}
            &[
                ProcessFigures {
                    figures:
                        MemoryFigures {
                            peak_reserved: Some(reserved),
                            peak_allocated,
                            ..
                        },
                    ..
                },
            ] if is_alone => rig.plot_exec(Peaks {
                reserved,
                allocated: peak_allocated.unwrap_or_default(),
            }),
            _ => {
                self.has_parallel_programs = true;
                rig.plot_parallel(held);
            }
        }
    }

    fn add(&mut self, name: &str, figures: MemoryFigures) {
        match self.figures.iter_mut().find(|one| one.name == name) {
            Some(one) => one.figures = one.figures.then(figures),
            None => self.figures.push(ProcessFigures {
                name: name.to_owned(),
                figures,
            }),
        }
    }

    fn faults_of(&self, process: &ProcessName) -> Option<&Injector> {
        self.faults.as_ref()?.of(Some(process))
    }

    /// Sends an order to a process and waits for the answer.
    fn order(
        &mut self,
        name: &ProcessName,
        order: &Order,
        step: u32,
        give_up: &mut dyn FnMut() -> bool,
    ) -> Result<Heard, Stop> {
        let Some(group) = &self.group else {
            return Err(cannot_start(
                name,
                "only `harness run` and its tests start the processes of a scenario",
            ));
        };
        if !self.running.contains_key(name) {
            let process = Process::start(group.forks.as_ref())
                .map_err(|error| cannot_start(name, &error.to_string()))?;
            let faults = self.faults_of(name).map(Injector::state_of_new_process);
            let start = Start {
                process: name.to_string(),
                step,
                faults,
                ..group.start.clone()
            };
            self.running.insert(name.clone(), process);
            match self.tell(name, &Order::Start(Box::new(start)), give_up) {
                Heard::Reply(Reply::Done(_)) => {}
                Heard::Gone(end) => return Err(cannot_start(name, &how(end))),
                other @ (Heard::Reply(_) | Heard::GivenUp) => {
                    self.end(name, drop);
                    return Ok(other);
                }
            }
        }
        Ok(self.tell(name, order, give_up))
    }

    fn tell(
        &mut self,
        name: &ProcessName,
        order: &Order,
        give_up: &mut dyn FnMut() -> bool,
    ) -> Heard {
        let Some(process) = self.running.get_mut(name) else {
            return Heard::Gone(None);
        };
        let mut given_up = false;
        // A missing answer reveals a dead process.
        let _ = wire::send(process.socket.get_mut(), order);
        let answer = process.hear(&mut || {
            given_up = give_up();
            given_up
        });
        if let Some(Answer { reply, faults }) = answer {
            self.faults_of(name)
                .zip(faults)
                .into_iter()
                .for_each(|(ours, sent)| ours.take_over(sent));
            if let Reply::Done(done) = &reply {
                self.note(name, done.readings);
            }
            return Heard::Reply(reply);
        }
        if given_up {
            self.end(name, drop);
            Heard::GivenUp
        } else {
            Heard::Gone(self.end(name, Process::end).flatten())
        }
    }

    /// Ends a process, if it runs, with the given function, and releases its memory in the ledger.
    fn end<T>(&mut self, name: &ProcessName, end: impl FnOnce(Process) -> T) -> Option<T> {
        let ended = self.running.remove(name).map(end);
        self.group
            .iter()
            .for_each(|group| group.ledger.release_ended());
        ended
    }

    fn note(&mut self, name: &ProcessName, now: Readings) {
        let before = self
            .readings
            .insert(name.clone(), now)
            .map(|before| before.stats)
            .unwrap_or_default();
        // The counters of a restarted process start at zero.
        let ooms = now.stats.num_ooms.saturating_sub(before.num_ooms);
        let retries = now
            .stats
            .num_alloc_retries
            .saturating_sub(before.num_alloc_retries);
        self.ooms += ooms;
        self.add(
            &name.to_string(),
            Peaks::of(&now.stats).figures(ooms, retries),
        );
    }

    pub(crate) fn run(
        &mut self,
        rig: &mut Rig,
        inside: &Inside,
        step: &Step,
        (number, step_number): (u32, usize),
    ) -> Result<StepResult, Stop> {
        let order = Order::Do(wire::Do {
            number,
            step: step_number,
            loops: inside.loops.clone(),
        });
        let limit = step
            .time_limit
            .map_or(DEFAULT_TIME_LIMIT, |limit| Duration::from_nanos(limit.0));
        let doing = format!(
            "it ran step {number} (line {}: {} {})",
            step.position.line,
            step.action.kind(),
            step.action
        );
        match self.hear(rig, &inside.process, &order, (number, limit), &doing)? {
            Some(result) => Ok(result),
            None => {
                let time = Nanos(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX));
                let expected = format!("the process `{}` to do the step in {time}", inside.process);
                Ok(Unmet::at(step, expected, "it continued and was killed").into())
            }
        }
    }

    /// Sends an order and converts the answer. `None` if the process exceeded the limit and was
    /// killed.
    fn hear(
        &mut self,
        rig: &mut Rig,
        name: &ProcessName,
        order: &Order,
        (step, limit): (u32, Duration),
        doing: &str,
    ) -> Result<Option<StepResult>, Stop> {
        let began = Instant::now();
        let mut give_up = || rig.is_interrupted() || began.elapsed() > limit;
        // A process that starts again has peaks of its own.
        let before = self
            .readings(name)
            .filter(|_| self.running.contains_key(name))
            .map(|before| Peaks::of(&before.stats))
            .unwrap_or_default();
        match self.order(name, order, step, &mut give_up)? {
            Heard::Reply(Reply::Done(done)) => {
                let Done {
                    mut result,
                    findings,
                    readings,
                    curve,
                } = *done;
                let risen = Peaks::of(&readings.stats).above(before);
                rig.plot_process(&curve, risen, self.held(Some(name)), self.held(None))?;
                findings
                    .into_iter()
                    .for_each(|finding| rig.note(named(name, finding)));
                let injected = result
                    .failed_request
                    .iter_mut()
                    .flat_map(|failed_request| &mut failed_request.injected);
                injected.for_each(|refused| refused.process = Some(name.to_string()));
                Ok(Some(result))
            }
            Heard::Reply(Reply::Closed) => Ok(Some(StepResult::default())),
            Heard::Reply(Reply::Violated(findings)) => Err(Stop::Violated(
                findings
                    .into_iter()
                    .map(|finding| named(name, finding))
                    .collect(),
            )),
            Heard::Reply(Reply::Failed {
                rule,
                expected,
                seen,
                fault,
            }) => {
                let (expected, fault) = (
                    in_process(name, &expected),
                    fault.map(|fault| (name.clone(), fault)),
                );
                Err(Stop::Process {
                    rule,
                    expected,
                    seen,
                    fault,
                })
            }
            Heard::Reply(Reply::Refused(why)) => Err(cannot_start(name, &why)),
            Heard::Gone(end) => Err(failed(
                format!("the process `{name}` to run its steps"),
                format!("{} while {doing}", how(end)),
            )),
            Heard::GivenUp if rig.is_interrupted() => Err(Stop::Interrupted),
            Heard::GivenUp => Ok(None),
        }
    }

    /// Kills a process with SIGKILL and waits until the device has released its memory.
    pub(crate) fn kill(
        &mut self,
        rig: &mut Rig,
        step: &Step,
        name: &ProcessName,
    ) -> Result<StepResult, Stop> {
        if !self.running.contains_key(name) {
            return Ok(Unmet::at(
                step,
                format!("the process `{name}` to be running"),
                "it is not",
            )
            .into());
        }
        let before = rig.memory()?;
        let readings = self.readings(name);
        let reserved = readings.map_or(Bytes::ZERO, |readings| {
            Bytes(readings.stats.reserved_bytes.all.current)
        });
        let attributed = readings.and_then(|readings| readings.memory?.process);
        let killed = self.end(name, |process| process.running.kill()).transpose();
        rig.set_elsewhere(self.held(None));
        killed.map_err(|error| {
            failed(
                format!("the process `{name}` to be killed"),
                error.to_string(),
            )
        })?;
        await_memory(
            rig,
            before.used.saturating_sub(attributed.unwrap_or(reserved)),
        )?;
        let released = before.used.saturating_sub(rig.memory()?.used);
        let told = attributed.map_or_else(String::new, |bytes| {
            format!(", {bytes} of device memory were attributed to it")
        });
        let note = format!(
            "SIGKILL ended it: {reserved} were reserved in it{told}, and {released} were released"
        );
        Ok(StepResult::with_note(note))
    }

    /// Finishes all running processes: each frees everything, checks its final state and exits.
    pub(crate) fn finish(&mut self, rig: &mut Rig, number: u32) -> Result<(), Stop> {
        for name in self.running.keys().cloned().collect::<Vec<_>>() {
            self.order_to_end(rig, &name, &Order::Finish(number), "it freed all memory")?;
            self.close_one(rig, &name)?;
        }
        Ok(())
    }

    /// Closes the processes that still run after an injected failure, if their devices still work.
    /// Returns the errors.
    pub(crate) fn close(&mut self, rig: &mut Rig) -> Vec<Stop> {
        let works = |name: &&ProcessName| {
            self.faults_of(name)
                .is_some_and(|faults| !faults.is_broken())
        };
        let names: Vec<ProcessName> = self.running.keys().filter(works).cloned().collect();
        names
            .iter()
            .map(|name| self.close_one(rig, name))
            .filter_map(Result::err)
            .collect()
    }

    fn order_to_end(
        &mut self,
        rig: &mut Rig,
        name: &ProcessName,
        order: &Order,
        doing: &str,
    ) -> Result<(), Stop> {
        let done = self.hear(rig, name, order, (0, DEFAULT_TIME_LIMIT), doing)?;
        done.map(drop).ok_or_else(|| {
            failed(
                format!("the process `{name}` to end"),
                "it continued and was killed".to_owned(),
            )
        })
    }

    /// Closes a process, which exits even if it cannot release everything.
    fn close_one(&mut self, rig: &mut Rig, name: &ProcessName) -> Result<(), Stop> {
        let closed = self.order_to_end(rig, name, &Order::Close, "it released everything");
        let end = self.end(name, Process::end);
        rig.set_elsewhere(self.held(None));
        closed.and_then(|()| match end.flatten() {
            Some(End::Code(0)) => Ok(()),
            end => Err(failed(
                format!("the process `{name}` to exit with code 0"),
                how(end),
            )),
        })
    }
}

fn failed(expected: String, seen: String) -> Stop {
    Stop::Process {
        rule: Rule::DeviceFailure,
        expected,
        seen,
        fault: None,
    }
}

fn cannot_start(name: &ProcessName, why: &str) -> Stop {
    failed(format!("the process `{name}` to start"), why.to_owned())
}

fn in_process(name: &ProcessName, expected: &str) -> String {
    format!("in the process `{name}`: {expected}")
}

fn named(name: &ProcessName, finding: Finding) -> Finding {
    Finding {
        expected: in_process(name, &finding.expected),
        ..finding
    }
}

fn how(end: Option<End>) -> String {
    match end {
        None => "it closed its connection".to_owned(),
        Some(End::Code(code)) => format!("it ended with exit code {code}"),
        Some(End::Signal(9)) => {
            "SIGKILL ended it (the kernel's OOM killer sends it if host memory runs out)".to_owned()
        }
        Some(End::Signal(signal)) => format!("signal {signal} ended it"),
    }
}

/// Waits on a real GPU until at most `used` is in use, within its tolerance.
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
