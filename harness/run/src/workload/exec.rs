//! Runs an unmodified PyTorch program on a simulated GPU that is as large as the scenario's device, beside what the scenario holds and beside other
//! programs of its steps.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use harness_allocator::device::DeviceError;
use harness_allocator::stats::StatKey;
use harness_allocator::units::Nanos;
use harness_base::shell;
use harness_base::words::count;
use harness_exec::launch::{Launch, Prepared};
use harness_exec::process::{End, Started};
use harness_exec::record::Record;
use harness_exec::setup::{Setup, with_python};
use harness_exec::trials::faults;
use harness_exec::trials::observed::{Ending, Observed};
use harness_gpu_settings::settings::Settings;
use harness_record::Outcome;
use harness_scenario::steps::Step;
use harness_scenario::steps::exec::{Exec, ProgramEnd};
use harness_scenario::{DeviceKind, ReportKey};

use super::{Between, pause};
use crate::control::DEFAULT_TIME_LIMIT;
use crate::rig::Stop;
use crate::shared_memory::SharedMemory;
use crate::world::{StepResult, Unmet, World};

/// The file of the program's error output, in the folder of its run.
const ERROR_OUTPUT: &str = "stderr";

/// Why a program cannot be run, or not be seen.
fn unavailable(what: &Exec) -> impl Fn(&dyn std::fmt::Display) -> Stop {
    let what = what.to_string();
    move |why| Stop::Device(DeviceError::Unavailable { what: what.clone(), why: why.to_string() })
}

/// Why a program cannot be run beside this device and allocator.
pub(crate) fn cannot_run(exec: &Exec, device: DeviceKind, is_pytorchs: bool) -> Option<String> {
    if device == DeviceKind::Gpu {
        let on_gpu = format!("`harness exec --device cuda:0 --memory SIZE -- {exec}` runs one on a real GPU");
        return Some(format!("`exec` runs programs on a simulated GPU, and this device is none; {on_gpu}"));
    }
    if !is_pytorchs {
        return Some("`exec` runs programs with PyTorch's own allocator, and this is another one".to_owned());
    }
    let setup = Setup::of(&with_python(&exec.command), None);
    setup.err().map(|error| format!("`{exec}` cannot be run on a simulated GPU: {error}"))
}

/// Runs it to its end. `between` is done when it has started.
pub(crate) fn run(world: &mut World, step: &Step, exec: &Exec, mut between: Between<'_>) -> Result<StepResult, Stop> {
    if exec.optional
        && let Some(why) = cannot_run(exec, world.device, world.alloc_conf.is_some())
    {
        world.not_run.extend(step.id.clone());
        return Ok(StepResult { notes: vec![format!("not run: {why}")], ..StepResult::default() });
    }
    let stop = unavailable(exec);
    let command = with_python(&exec.command);
    let setup = Setup::of(&command, None).map_err(|error| stop(&error))?;
    let memory = world.rig.memory()?;
    let settings = Settings { faults: exec.fail.clone(), ..setup.settings(exec.gpu, memory.total) };
    if world.shared_memory.is_none() {
        world.shared_memory = Some(SharedMemory::new().map_err(|error| stop(&error))?);
    }
    let ledger = world.shared_memory.as_mut().map(|shared| {
        shared.hold(memory.total.saturating_sub(memory.free));
        shared.ledger()
    });
    let conf = exec.alloc_conf.clone().or_else(|| world.alloc_conf.as_ref().map(ToString::to_string));
    let launch = Launch {
        command: &command,
        settings: &settings,
        libraries: &setup.libraries,
        way: setup.way(),
        alloc_conf: conf.as_deref(),
        snapshot: false,
        ledger: ledger.as_deref(),
    };
    let mut prepared = launch.prepare().map_err(|error| stop(&error))?;
    let started = start(&mut prepared, exec).map_err(|error| stop(&error))?;
    pause(&mut between, world)?;
    let limit = step.time_limit.map_or(DEFAULT_TIME_LIMIT, |limit| Duration::from_nanos(limit.0));
    let mut is_over = false;
    let give_up = |age| {
        is_over = age > limit;
        is_over || world.rig.is_interrupted()
    };
    let end = started.wait(give_up).map_err(|error| stop(&error))?;
    if end.is_none() && !is_over {
        return Err(Stop::Interrupted);
    }
    let ended = prepared.ended(end.unwrap_or(End::Signal(9)));
    let (record, observed) = read(ended.folder(), &settings, end, ended.end).map_err(|error| stop(&error))?;
    if let Some(id) = &step.id {
        world.torch_stats.insert(id.clone(), torch_stats(&record));
    }
    let attempts = Record::attempts(ended.folder()).map_err(|error| stop(&error))?;
    let missed = faults::not_reached(&exec.fail, &attempts).map(ToString::to_string);
    let again = reproduce(exec, &settings, conf.as_deref());
    Ok(result(step, (exec.expected(&world.arm, world.device), limit), (&record, &observed), missed, again))
}

fn start(prepared: &mut Prepared, exec: &Exec) -> io::Result<Started> {
    let errors = File::create(prepared.folder().join(ERROR_OUTPUT))?;
    prepared.command.current_dir(&exec.folder).envs(exec.env.iter().map(|(name, value)| (name, value)));
    Started::start(prepared.command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors))
}

fn read(folder: &Path, settings: &Settings, end: Option<End>, told: End) -> io::Result<(Record, Observed)> {
    let record = Record::read(folder, told, settings)?;
    let observed = Observed::read(folder, &record, end.map_or(Ending::Hang, Ending::By), Some(&folder.join(ERROR_OUTPUT)))?;
    Ok((record, observed))
}

/// Counters of PyTorch's allocator, summed over the processes that told them. Empty where none did.
fn torch_stats(record: &Record) -> BTreeMap<StatKey, u64> {
    let torches: Vec<_> = record.processes.iter().filter_map(|process| process.torch.as_ref()).collect();
    let sum = |key: &StatKey| torches.iter().map(|torch| torch.sum(&key.to_string())).sum();
    StatKey::all().filter(|_| !torches.is_empty()).map(|key| (key, sum(&key))).collect()
}

/// What is said of the program, and what is not as it should be.
fn result(
    step: &Step,
    (expected, limit): (ProgramEnd, Duration),
    (record, observed): (&Record, &Observed),
    missed: Option<String>,
    again: String,
) -> StepResult {
    let devices = || record.processes.iter().flat_map(|process| &process.devices);
    let reports = BTreeMap::from([
        (ReportKey::ExitCode, record.exit_code.into()),
        (ReportKey::Processes, observed.processes as u64),
        (ReportKey::PeakReserved, observed.peak_reserved.0),
        (ReportKey::MallocCalls, devices().map(|device| device.mallocs).sum()),
        (ReportKey::MallocFailures, devices().map(|device| device.failed).sum()),
        (ReportKey::InjectedFailures, devices().map(|device| device.injected).sum()),
        (ReportKey::FreeCalls, devices().map(|device| device.frees).sum()),
        (ReportKey::Ooms, observed.ooms),
    ]);
    let is_as_expected = match (expected, observed.ending) {
        (ProgramEnd::Any, Ending::By(_)) => true,
        (ProgramEnd::Code(code), Ending::By(end)) => end == End::Code(code),
        (ProgramEnd::Oom, Ending::By(end)) => end.exit_code() != 0 && observed.ended_out_of_memory,
        (_, Ending::Hang) => false,
    };
    let mut unmet = Vec::new();
    if !is_as_expected {
        let expected = match observed.ending {
            Ending::Hang => format!("the program to end in {}", Nanos(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX))),
            Ending::By(_) => format!("the program {expected}"),
        };
        unmet.push(Unmet::at(step, expected, seen(record, observed)));
    }
    unmet.extend(missed.map(|fault| Unmet::at(step, format!("`{fault}` to be reached"), "the program made fewer attempts to get memory")));
    let outcome = if observed.ended_out_of_memory { Outcome::OutOfMemory } else { Outcome::Done };
    let mut notes = vec![figures(observed)];
    if !unmet.is_empty() {
        notes.push(again);
    }
    StepResult { outcome, reports, notes, unmet, ..StepResult::default() }
}

/// How it ended, in words.
fn seen(record: &Record, observed: &Observed) -> String {
    let end = match (observed.ending, record.signal) {
        (Ending::Hang, _) => return "it went on, and was killed".to_owned(),
        (Ending::By(_), Some(signal)) => format!("signal {signal} ended it"),
        (Ending::By(_), None) => format!("exit code {}", record.exit_code),
    };
    let oom = if observed.ended_out_of_memory { ", by an out of memory error" } else { "" };
    // The lines stand below each other, as the program wrote them.
    let lines: String = observed.last_lines.iter().map(|line| format!("\n            | {line}")).collect();
    format!("{end}{oom}{lines}")
}

fn figures(observed: &Observed) -> String {
    let Observed { peak_reserved, peak_allocated, retries, ooms, .. } = *observed;
    let (retries, ooms) = (count(retries, "retry"), count(ooms, "out of memory error"));
    format!("peak reserved {peak_reserved}, peak allocated {peak_allocated}, {retries}, {ooms}")
}

/// A command that does the same, alone on such a GPU.
fn reproduce(exec: &Exec, settings: &Settings, conf: Option<&str>) -> String {
    let env = exec.env.iter().map(|(name, value)| format!("{name}={} ", shell::quoted(value)));
    let faults = exec.fail.iter().map(|fault| format!(" --fail {fault}"));
    let conf = conf.map(|conf| format!(" --alloc-conf {}", shell::quoted(conf))).unwrap_or_default();
    format!(
        "alone on such a GPU: cd {} && {}harness exec --gpu {} --memory {}B{conf}{} -- {exec}",
        shell::quoted(&exec.folder.to_string_lossy()),
        env.collect::<String>(),
        settings.gpu.name,
        settings.memory.0,
        faults.collect::<String>(),
    )
}
