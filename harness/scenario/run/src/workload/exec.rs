//! Runs an unmodified PyTorch program on a simulated GPU with the memory of the scenario's device,
//! or on the run's real GPU under that limit. The scenario and other programs share the memory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs::File, io, process::Stdio, time::Duration};

use harness_allocator::device::{Clock, DeviceError, DeviceInfo, DeviceMemory};
use harness_allocator::stats::StatKey;
use harness_allocator::units::{Bytes, Nanos};
use harness_base::{shell, words::count};
use harness_exec::launch::{Launch, LaunchError, Prepared};
use harness_exec::process::{End, Started};
use harness_exec::record::{Process, Record};
use harness_exec::setup::{Setup, SetupError, with_python};
use harness_exec::torch_record::{PEAK_ALLOCATED, TorchRecord};
use harness_exec::trials::faults;
use harness_exec::trials::observed::{Observed, TrialEnd};
use harness_exec::{hang::Hang, machine::Machine};
use harness_gpu_settings::{limits::Limits, settings::Settings};
use harness_record::{MemoryFigures, Outcome, ProcessFigures};
use harness_scenario::ReportKey;
use harness_scenario::steps::Step;
use harness_scenario::steps::exec::{Exec, ProgramEnd};

use crate::between::{Between, pause};
use crate::rig::{Rig, Stop};
use crate::step_result::{StepResult, Unmet};
use crate::{
    context::RunContext, control::DEFAULT_TIME_LIMIT, processes::await_memory,
    shared_memory::SharedMemory,
};

/// The program's standard error, in the folder of its run.
const ERROR_OUTPUT: &str = "stderr";

/// Builds the error for a program that cannot run or be observed.
fn unavailable(what: &Exec) -> impl Fn(&dyn std::fmt::Display) -> Stop {
    let what = what.to_string();
    move |why| {
        Stop::Device(DeviceError::Unavailable {
            what: what.clone(),
            why: why.to_string(),
        })
    }
}

/// Finds the installation that a program needs.
fn setup(exec: &Exec, device: &DeviceInfo) -> Result<Setup, SetupError> {
    let command = with_python(&exec.command);
    let setup = match device.clock {
        Clock::Simulated => Setup::of(&command, None, None),
        Clock::Measured => Setup::for_real_gpu(&command, None),
    };
    setup?.with_cuda()?.with_modules(&exec.modules)
}

/// Prepares the command. All programs share the scenario's memory through `ledger`. Also returns
/// the machine that the program sees.
fn prepare(
    setup: &Setup,
    exec: &Exec,
    rig: &Rig,
    alloc_conf: Option<&str>,
    ledger: &Path,
) -> Result<(Prepared, Machine), LaunchError> {
    let (info, faults) = (rig.info(), exec.fail.clone());
    let machine = match info.clock {
        Clock::Simulated => Machine::Simulated(Settings {
            faults,
            devices: exec.ranks,
            ..setup.settings(exec.simulated_gpu(), info.total)
        }),
        Clock::Measured => {
            let device = info.fingerprint.memory.unwrap_or(info.total);
            // A real device has an ordinal.
            Machine::Real(
                rig.ordinal().unwrap_or_default(),
                Limits {
                    device,
                    memory: Some(info.total),
                    faults,
                    latencies: Vec::new(),
                },
            )
        }
    };
    let command = with_python(&exec.command);
    let launch = Launch {
        command: &command,
        machine: &machine,
        setup,
        alloc_conf,
        snapshot: false,
        ledger: Some(ledger),
    };
    Ok((launch.prepare()?, machine))
}

/// Why a program is for another GPU or another allocator, if so.
pub(crate) fn not_applicable(
    exec: &Exec,
    device: &DeviceInfo,
    is_pytorchs: bool,
) -> Option<String> {
    if !is_pytorchs {
        return Some(
            "`exec` runs programs with PyTorch's own allocator, and this allocator is a \
             different one"
                .to_owned(),
        );
    }
    if exec.ranks > 1 && device.clock == Clock::Measured {
        return Some(format!("`{exec}` requires {} simulated GPUs", exec.ranks));
    }
    let gpu = exec
        .gpu
        .filter(|gpu| device.clock == Clock::Measured && gpu.device != device.name)?;
    Some(format!(
        "`{exec}` requires the GPU {} ({}), but this GPU is {}",
        gpu.name, gpu.device, device.name
    ))
}

/// Why a program cannot start on this machine, if so.
pub(crate) fn cannot_start(exec: &Exec, device: &DeviceInfo) -> Option<String> {
    let error = setup(exec, device).err()?;
    let gpu = if device.clock == Clock::Simulated {
        "a simulated GPU"
    } else {
        "a real GPU"
    };
    Some(format!("`{exec}` cannot run on {gpu}: {error}"))
}

/// Runs the program to its end. `between` is called once after the start.
pub(crate) fn run(
    ctx: &mut RunContext,
    step: &Step,
    exec: &Exec,
    between: Between<'_>,
) -> Result<StepResult, Stop> {
    if exec.optional
        && let Some(why) = not_applicable(exec, ctx.rig.info(), ctx.setup.alloc_conf.is_some())
            .or_else(|| cannot_start(exec, ctx.rig.info()))
    {
        ctx.values.not_run.extend(step.id.clone());
        return Ok(StepResult::with_note(format!("not run: {why}")));
    }
    let stop = unavailable(exec);
    let setup = setup(exec, ctx.rig.info()).map_err(|error| stop(&error))?;
    let memory = ctx.rig.memory()?;
    let ledger = shared_memory(ctx, memory).map_err(|error| stop(&error))?;
    let conf = exec
        .alloc_conf
        .clone()
        .or_else(|| ctx.setup.alloc_conf.as_ref().map(ToString::to_string));
    let (prepared, machine) =
        prepare(&setup, exec, &ctx.rig, conf.as_deref(), &ledger).map_err(|error| stop(&error))?;
    let limit = step
        .time_limit
        .map_or(DEFAULT_TIME_LIMIT, |limit| Duration::from_nanos(limit.0));
    let (end, prepared) = run_prepared(ctx, exec, prepared, limit, between)?;
    // The driver may release a process's memory shortly after its end.
    if ctx.rig.running_programs == 0 {
        await_memory(&mut ctx.rig, memory.used)?;
    }
    let ended = prepared
        .ended(end.unwrap_or(End::Signal(9)))
        .map_err(|error| stop(&error))?;
    let ending = (
        ended.end,
        end.map_or(TrialEnd::Hang, |_| TrialEnd::By(ended.end)),
    );
    let (record, observed) = machine
        .read(
            ended.folder(),
            ending,
            Some(&ended.folder().join(ERROR_OUTPUT)),
        )
        .map_err(|error| stop(&error))?;
    if let Some(id) = &step.id {
        ctx.values
            .torch_stats
            .insert(id.clone(), torch_stats(&record));
    }
    let timelines = machine
        .timelines(ended.folder())
        .map_err(|error| stop(&error))?;
    let is_alone = step.meanwhile.is_empty() && ctx.rig.running_programs == 0;
    let shared = ctx.shared_memory.as_ref().filter(|_| is_alone);
    let together = shared.map(SharedMemory::peak_of_programs);
    let missed = faults::not_reached(&exec.fail, &timelines).map(ToString::to_string);
    let again = reproduce(exec, &machine, conf.as_deref());
    Ok(result(
        step,
        (exec.expected(&ctx.setup.arm, ctx.setup.device), limit),
        (&record, &observed, together),
        missed,
        again,
    ))
}

fn shared_memory(ctx: &mut RunContext, memory: DeviceMemory) -> io::Result<PathBuf> {
    if ctx.shared_memory.is_none() {
        ctx.shared_memory = Some(SharedMemory::new()?);
    }
    // While other programs run, the scenario is idle, and on a real GPU their memory would be
    // counted twice.
    let held = (ctx.rig.running_programs == 0).then(|| memory.total.saturating_sub(memory.free));
    Ok(ctx
        .shared_memory
        .as_mut()
        .map_or_else(PathBuf::new, |shared| {
            held.into_iter().for_each(|held| shared.hold(held));
            shared.ledger()
        }))
}

/// Runs the command to its end; `None` if it exceeded the limit and was killed.
fn run_prepared(
    ctx: &mut RunContext,
    exec: &Exec,
    mut prepared: Prepared,
    limit: Duration,
    mut between: Between<'_>,
) -> Result<(Option<End>, Prepared), Stop> {
    let stop = unavailable(exec);
    let errors =
        File::create(prepared.folder().join(ERROR_OUTPUT)).map_err(|error| stop(&error))?;
    prepared
        .command
        .current_dir(&exec.folder)
        .envs(exec.env.iter().map(|(name, value)| (name, value)));
    prepared
        .command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors);
    let started = Started::start(&mut prepared.command).map_err(|error| stop(&error))?;
    ctx.rig.running_programs += 1;
    let paused = pause(&mut between, ctx);
    let mut is_over = false;
    let give_up = |age| {
        is_over = age > limit;
        is_over || ctx.rig.is_interrupted()
    };
    // If `pause` failed, dropping `started` kills the program.
    let end = paused.and_then(|()| {
        started
            .wait(
                give_up,
                |program| prepared.look(program),
                |program| prepared.remaining(program),
            )
            .map_err(|error| stop(&error))
    });
    ctx.rig.running_programs -= 1;
    match end? {
        None if !is_over => Err(Stop::Interrupted),
        end => Ok((end, prepared)),
    }
}

/// Counters of the allocator of PyTorch or another library, summed over the processes that reported
/// them. Without those that a library does not publish.
fn torch_stats(record: &Record) -> BTreeMap<StatKey, u64> {
    let torches: Vec<_> = record
        .processes
        .iter()
        .filter_map(|process| process.torch.as_ref())
        .collect();
    let sum = |key: &StatKey| {
        let figures = torches.iter().map(|torch| torch.figure(&key.to_string()));
        figures.sum::<Option<u64>>()
    };
    StatKey::all()
        .filter(|_| !torches.is_empty())
        .filter_map(|key| Some((key, sum(&key)?)))
        .collect()
}

fn reports(record: &Record, observed: &Observed) -> BTreeMap<ReportKey, u64> {
    let devices = record.processes.iter().flat_map(|process| &process.devices);
    let mut reports = BTreeMap::from([
        (ReportKey::ExitCode, record.exit_code.into()),
        (ReportKey::Processes, observed.processes as u64),
        (ReportKey::PeakReserved, observed.peak_reserved.0),
        (ReportKey::MallocCalls, 0),
        (ReportKey::MallocFailures, 0),
        (ReportKey::InjectedFailures, 0),
        (ReportKey::FreeCalls, 0),
    ]);
    reports.extend(observed.ooms.map(|ooms| (ReportKey::Ooms, ooms)));
    for device in devices {
        for (key, calls) in [
            (ReportKey::MallocCalls, device.mallocs),
            (ReportKey::MallocFailures, device.failed),
            (ReportKey::InjectedFailures, device.injected),
            (ReportKey::FreeCalls, device.frees),
        ] {
            *reports.entry(key).or_default() += calls;
        }
    }
    reports
}

fn result(
    step: &Step,
    (expected, limit): (ProgramEnd, Duration),
    (record, observed, together): (&Record, &Observed, Option<Bytes>),
    missed: Option<String>,
    again: String,
) -> StepResult {
    let is_as_expected = match (expected, observed.ending) {
        (ProgramEnd::Any, TrialEnd::By(_)) => true,
        (ProgramEnd::Code(code), TrialEnd::By(end)) => end == End::Code(code),
        (ProgramEnd::Oom, TrialEnd::By(end)) => {
            end.exit_code() != 0 && observed.ended_out_of_memory
        }
        (_, TrialEnd::Hang) => false,
    };
    let mut unmet = Vec::new();
    if !is_as_expected {
        let expected = match observed.ending {
            TrialEnd::Hang => format!(
                "the program to end in {}",
                Nanos(u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX))
            ),
            TrialEnd::By(_) => format!("the program {expected}"),
        };
        unmet.push(Unmet::at(step, expected, seen(record, observed)));
    }
    unmet.extend(missed.map(|fault| {
        let seen = "the program made too few allocation attempts";
        Unmet::at(step, format!("`{fault}` to be reached"), seen)
    }));
    let outcome = match observed.ended_out_of_memory {
        true => Outcome::OutOfMemory,
        false => Outcome::Done,
    };
    let figures = figures(record, observed, together);
    let known = |figure: Option<String>| figure.unwrap_or_else(|| "unknown".to_owned());
    let per_process = if observed.processes > 1 {
        " of a process"
    } else {
        ""
    };
    let (retries, ooms) = (
        figures.retries.map(|many| count(many, "retry")),
        figures.ooms.map(|many| count(many, "out of memory error")),
    );
    let mut notes = vec![format!(
        "peak reserved{per_process} {}, peak allocated {}, {}, {}",
        observed.peak_reserved,
        known(figures.peak_allocated.map(|peak| peak.to_string())),
        known(retries.or_else(|| Some("retries unknown".to_owned()))),
        known(ooms.or_else(|| Some("out of memory errors unknown".to_owned()))),
    )];
    notes.extend(observed.unreported.clone());
    notes.extend(record.hang.iter().flat_map(Hang::lines));
    if !unmet.is_empty() {
        notes.push(again);
    }
    StepResult {
        outcome,
        reports: reports(record, observed),
        notes,
        unmet,
        program: Some(figures),
        programs: by_process(record, figures),
        ..StepResult::default()
    }
}

/// The program's figures, as far as they are known. Peaks of several processes or devices need not
/// coincide. `together` is what all held on a device at the same time, if nothing else ran.
fn figures(record: &Record, observed: &Observed, together: Option<Bytes>) -> MemoryFigures {
    let is_known = observed.unreported.is_none()
        && record
            .processes
            .iter()
            .any(|process| process.torch.is_some());
    let used = record.processes.iter().flat_map(|process| &process.devices);
    let is_single =
        observed.processes <= 1 && used.filter(|device| device.peak_reserved > 0).count() <= 1;
    MemoryFigures {
        peak_reserved: match is_single {
            true => Some(observed.peak_reserved),
            false => together,
        },
        peak_allocated: observed.peak_allocated.filter(|_| is_known && is_single),
        ooms: observed.ooms.filter(|_| is_known),
        retries: observed.retries.filter(|_| is_known),
    }
}

/// The figures of each process, named as `rank 0 of ` or `process 1 of `. A name is empty if there
/// is one process.
fn by_process(record: &Record, all: MemoryFigures) -> Vec<ProcessFigures> {
    let used = || record.processes.iter().filter(|process| process.used_gpu());
    let named = |name, figures| ProcessFigures { name, figures };
    if used().count() < 2 {
        return vec![named(String::new(), all)];
    }
    let rank = |process: &Process| process.torch.as_ref()?.rank.clone();
    // Children of a rank inherit its number.
    let ranks: BTreeSet<String> = used().filter_map(rank).collect();
    let are_ranks = ranks.len() == used().count();
    let name = |number: usize, process: &Process| match rank(process).filter(|_| are_ranks) {
        Some(rank) => format!("rank {rank} of "),
        None => format!("process {number} of "),
    };
    (1..)
        .zip(used())
        .map(|(number, process)| named(name(number, process), figures_of_process(process)))
        .collect()
}

/// Peaks of several devices need not coincide.
fn figures_of_process(process: &Process) -> MemoryFigures {
    let devices = process.devices.iter().map(|device| device.peak_reserved);
    let peaks: Vec<u64> = devices.filter(|peak| *peak > 0).collect();
    let reported = process.torch.as_ref();
    let reported = reported.filter(|_| process.unreported().is_none());
    MemoryFigures {
        peak_reserved: (peaks.len() < 2).then(|| Bytes(peaks.iter().sum())),
        peak_allocated: reported
            .filter(|_| peaks.len() < 2)
            .and_then(|torch| torch.figure(PEAK_ALLOCATED))
            .map(Bytes),
        ooms: reported.and_then(TorchRecord::ooms),
        retries: reported.and_then(|torch| torch.figure("num_alloc_retries")),
    }
}

fn seen(record: &Record, observed: &Observed) -> String {
    let end = match (observed.ending, record.signal) {
        (TrialEnd::Hang, _) => return "it continued and was killed".to_owned(),
        (TrialEnd::By(_), Some(signal)) => format!("signal {signal} ended it"),
        (TrialEnd::By(_), None) => format!("exit code {}", record.exit_code),
    };
    let oom = if observed.ended_out_of_memory {
        ", by an out of memory error"
    } else {
        ""
    };
    // The program's last lines, each on its own line.
    let lines: String = observed
        .last_lines
        .iter()
        .map(|line| format!("\n            | {line}"))
        .collect();
    format!("{end}{oom}{lines}")
}

/// A command that repeats the program alone on such a GPU.
fn reproduce(exec: &Exec, machine: &Machine, conf: Option<&str>) -> String {
    let env = exec
        .env
        .iter()
        .map(|(name, value)| format!("{name}={} ", shell::quoted(value)));
    let faults = exec.fail.iter().map(|fault| format!(" --fail {fault}"));
    let conf = conf
        .map(|conf| format!(" --alloc-conf {}", shell::quoted(conf)))
        .unwrap_or_default();
    let on = match machine {
        Machine::Simulated(settings) => {
            let devices = if exec.ranks > 1 {
                format!(" --devices {}", exec.ranks)
            } else {
                String::new()
            };
            format!(
                "--gpu {} --memory {}B{devices}",
                settings.gpu.name, settings.memory.0
            )
        }
        Machine::Real(ordinal, limits) => {
            format!("--device cuda:{ordinal} --memory {}B", limits.visible().0)
        }
    };
    format!(
        "alone on such a GPU: cd {} && {}harness exec {on}{conf}{} -- {exec}",
        shell::quoted(&exec.folder.to_string_lossy()),
        env.collect::<String>(),
        faults.collect::<String>(),
    )
}
