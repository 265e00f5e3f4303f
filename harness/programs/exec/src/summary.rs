use std::fmt::Write as _;

use harness_allocator::units::{Bytes, Nanos};
use harness_base::words::count;
use harness_gpu_settings::context_overhead::ContextOverhead;
use harness_gpu_settings::settings::{
    Cuda, CudnnWorkspace, Events, Settings, SharedMemory, Values,
};
use harness_gpu_settings::{latency::Latency, limits::Limits};

use crate::record::StartedProgram;
use crate::record::{DeviceRecord, FailedCalls, HostAhead, OwnError, Process, Record};
use crate::torch_record::{InferenceEngine, OtherLibrary, PEAK_ALLOCATED, Statistics, TorchRecord};
use crate::{doubts::Doubt, machine::Machine, process::cause_of, torch};

/// Further function names are only counted.
const NAMES: usize = 8;

pub fn render(record: &Record, machine: &Machine, gpu: Option<&str>) -> String {
    match machine {
        Machine::Simulated(settings) => simulated(record, settings),
        Machine::Real(_, limits) => limited(record, gpu.unwrap_or("unnamed"), limits),
    }
}

/// Lists the modelled parts too.
fn simulated(record: &Record, settings: &Settings) -> String {
    let mut text = machine(settings);
    text += &of_processes(record, settings.devices > 1);
    text += &without_requests(record);
    text += &without_variables(record);
    text += &own_errors(record);
    if record.used().count() > 1 {
        let unless = record.used().map(|process| record.unless(process));
        let unless = unless.max().unwrap_or_default();
        for (index, held) in record
            .peak_held
            .iter()
            .enumerate()
            .filter(|(_, held)| **held > 0)
        {
            let device = if settings.devices > 1 {
                format!("device {index}: ")
            } else {
                String::new()
            };
            let _ = writeln!(
                text,
                "all processes: {device}peak of {} held together, of {}{unless}",
                Bytes(*held),
                settings.memory
            );
        }
    }
    if let Some(memory) = &record.machine_memory {
        text += &memory.to_string();
    }
    text += &hang(record);
    text += &outlived(record);
    text += &how_it_ended(record);
    text += &missing_package(record, settings);
    text += &slow_calls(record, &settings.latencies);
    text += &models(record, settings);
    for warning in record.warnings_of_engines() {
        let _ = writeln!(text, "{warning}");
    }
    text += &timing(record, settings.events);
    if let Some(doubt) = Doubt::graph_memory(record) {
        let _ = writeln!(text, "{doubt}");
    }
    text += &without_libraries(record, settings);
    text += &not_modelled(record);
    record
        .used()
        .for_each(|process| text += &not_computed(process, settings));
    text += &uncomputed_reads(record);
    if let (Some(end), Some(obstacle)) = (record.end_by_values(), record.obstacle_to_repetition()) {
        let _ = writeln!(
            text,
            "the program ended {end}; it is not repeated with `--values cpu`, because it {obstacle}"
        );
    }
    // Without copies, reads are not counted.
    let may_wait = record.signal.is_some() || record.used().any(ended_by_an_error);
    if settings.values == Values::Zeros && may_wait {
        text += "if the end depends on values that the program read back, use `--values cpu`\n";
    }
    text
}

/// Texts of errors of CuPy, JAX and TensorFlow, and NVIDIA's packages that they lack.
const MISSING: [(&str, &[&str]); 3] = [
    (
        "Failed to find CUDA headers",
        &["nvidia-cuda-runtime", "nvidia-cuda-cccl"],
    ),
    (
        "No PTX compilation provider is available",
        &["nvidia-cuda-nvcc"],
    ),
    ("libdevice not found", &["nvidia-cuda-nvcc"]),
];

/// Names the package of NVIDIA that a library missed when its error ended the program.
fn missing_package(record: &Record, settings: &Settings) -> String {
    let mut torches = record
        .processes
        .iter()
        .filter_map(|process| process.torch.as_ref());
    let found = torches.find_map(|torch| {
        let error = torch.error.as_deref()?;
        MISSING.iter().find(|(text, _)| error.contains(text))
    });
    let suffix = match settings.cuda {
        Cuda::V12 => "-cu12",
        Cuda::V13 => "",
    };
    found.map_or_else(String::new, |(_, packages)| {
        let packages: Vec<String> = packages
            .iter()
            .map(|name| format!("{name}{suffix}"))
            .collect();
        format!(
            "the program lacks a part of CUDA, on a real GPU too: install {} for CUDA {}\n",
            packages.join(" and "),
            settings.cuda
        )
    })
}

/// Names what `--values cpu` did not compute.
fn not_computed(process: &Process, settings: &Settings) -> String {
    let Some(missing) = process
        .torch
        .as_ref()
        .and_then(|torch| torch.not_computed.as_ref())
    else {
        return String::new();
    };
    let operations: u64 = missing.operations.values().sum();
    let names: Vec<&str> = missing
        .operations
        .keys()
        .take(NAMES)
        .map(String::as_str)
        .collect();
    let parts = [
        (
            missing.kernels,
            format!(
                "{} of compiled code, CUDA graphs, extensions or foreign threads",
                count(missing.kernels, "launch")
            ),
        ),
        (
            operations,
            format!(
                "{} that the CPU lacks ({})",
                count(operations, "operation"),
                names.join(", ")
            ),
        ),
        (
            missing.beyond_limit,
            format!(
                "{} beyond {} of host memory",
                count(missing.beyond_limit, "operation"),
                settings.host_memory
            ),
        ),
    ];
    let parts: Vec<String> = parts
        .into_iter()
        .filter(|(number, _)| *number > 0)
        .map(|(_, text)| text)
        .collect();
    if parts.is_empty() {
        String::new()
    } else {
        format!("not computed: {}\n", parts.join("; "))
    }
}

/// Names the lines that read values which nothing has computed: what depends on them may differ on
/// a GPU.
fn uncomputed_reads(record: &Record) -> String {
    Doubt::reads(record).map_or_else(String::new, |doubt| format!("{doubt}\n"))
}

/// Returns whether an exception unrelated to memory or injected failures ended the process.
fn ended_by_an_error(process: &Process) -> bool {
    let is_other = |torch: &TorchRecord| !torch.traceback.is_empty() && !torch.ended_out_of_memory;
    let is_untouched = process.failed_calls.is_empty()
        && process.devices.iter().all(|device| device.injected == 0);
    process.torch.as_ref().is_some_and(is_other) && is_untouched
}

fn limited(record: &Record, name: &str, limits: &Limits) -> String {
    let Limits { device, memory, .. } = limits;
    let memory = memory.map_or_else(
        || format!("all of its {device}"),
        |memory| format!("{memory} of its {device} for each process"),
    );
    let mut text = format!("{} ({name}): {memory}\n", record.gpu);
    if record.used().next().is_none() {
        let _ = writeln!(text, "no process used {}", record.gpu);
    }
    text += &of_processes(record, false);
    text += &own_errors(record);
    text += &outlived(record);
    text += &how_it_ended(record);
    text += &slow_calls(record, &limits.latencies);
    text += "real: GPU, driver, CUDA and torch; reserved bytes and the limit exclude the CUDA \
         context\n";
    text
}

fn of_processes(record: &Record, several_devices: bool) -> String {
    let mut text = String::new();
    let used: Vec<&Process> = record.used().collect();
    for process in &used {
        let unless = record.unless(process);
        let who = if used.len() > 1 {
            named(process)
        } else {
            String::new()
        };
        for device in process.devices.iter().filter(|device| device.mallocs > 0) {
            let index = if several_devices {
                format!("device {}: ", device.index)
            } else {
                String::new()
            };
            let _ = writeln!(text, "{who}{index}{}", of_device(device, unless));
        }
        for FailedCalls {
            call,
            failed,
            injected,
        } in &process.failed_calls
        {
            let injected = if *injected > 0 {
                format!(", {injected} of them injected by `--fail`")
            } else {
                String::new()
            };
            let _ = writeln!(text, "{who}{call}: {failed} failed{injected}");
        }
        let _ = writeln!(text, "{who}{}", of_torch(process, unless));
        if let Some(host) = of_host(process) {
            let _ = writeln!(text, "{who}{host}");
        }
        if let Some(engine) = process
            .torch
            .as_ref()
            .and_then(|torch| torch.engine.as_ref())
        {
            let _ = writeln!(text, "{who}{}", of_engine(engine));
        }
    }
    text
}

/// Why no process requested memory, as far as its calls show it.
fn without_requests(record: &Record) -> String {
    if record.requested_memory() || record.used().any(Process::used_host_memory) {
        return String::new();
    }
    let mut asked = record
        .processes
        .iter()
        .filter(|process| !process.devices.is_empty())
        .peekable();
    if asked.peek().is_none() {
        let why = if record.is_watched {
            ""
        } else {
            "; a process without the variables of the run, as after `env -i` or `sudo`, does not \
             see the simulated GPU"
        };
        return format!("no process used the simulated GPU: none called CUDA or NVML{why}\n");
    }
    let refused = asked.find_map(|process| {
        let program = &process.program;
        let failed = match (&process.refusal, process.failed_calls.as_slice()) {
            (Some((function, error)), _) => {
                format!("{function} was the first call that failed, with error {error}")
            }
            (None, [FailedCalls { call, .. }, ..]) => format!("{call} failed"),
            (None, []) => format!("{} is not modelled", process.not_modelled.first()?),
        };
        Some(format!(
            ": {failed} in `{program}`; a library may have fallen back to the CPU"
        ))
    });
    format!(
        "CUDA or NVML was called, but no memory was requested{}\n",
        refused.unwrap_or_else(|| ", and no call failed".to_owned())
    )
}

/// Names the programs that were started without the simulated GPU.
fn without_variables(record: &Record) -> String {
    let mut started: Vec<String> = record
        .without_variables
        .iter()
        .map(StartedProgram::to_string)
        .collect();
    started.sort_unstable();
    started.dedup();
    if started.is_empty() {
        return String::new();
    }
    format!(
        "started without the variables of the run, so without the simulated GPU: {}; pass them \
         on, as in `env={{**os.environ, ...}}`\n",
        first_of(&started)
    )
}

/// Names the failures of our own code.
fn own_errors(record: &Record) -> String {
    let mut errors = record.own_errors.clone();
    errors.sort_unstable();
    errors.dedup();
    if errors.is_empty() {
        return String::new();
    }
    let errors: Vec<String> = errors.iter().map(OwnError::to_string).collect();
    format!(
        "the hook of harness failed within the program, which went on as without it: {}; what it \
         would have noted there is missing, so please report this\n",
        first_of(&errors)
    )
}

/// Lists the first of these names.
fn first_of(names: &[impl AsRef<str>]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMES).map(AsRef::as_ref).collect();
    let more = if names.len() > NAMES {
        format!(" and {} more", names.len() - NAMES)
    } else {
        String::new()
    };
    shown.join(", ") + &more
}

/// Who waits for whom, and ranks that call a collective with different sizes.
fn hang(record: &Record) -> String {
    let mut text = String::new();
    if let Some(hang) = &record.hang {
        text += "hang: the run was stopped, because ranks wait forever\n";
        hang.lines()
            .iter()
            .for_each(|line| text += &format!("  {line}\n"));
    }
    if let Some(sizes) = &record.different_sizes {
        let _ = writeln!(
            text,
            "different sizes: {sizes}; with `--values cpu`, which exchanges all data, this is an \
             error"
        );
    }
    text
}

fn outlived(record: &Record) -> String {
    record.of_outlived().map(|line| line + "\n").collect()
}

/// Names the exit code, the signal that ended the program, or the signal that ended a process whose
/// exit code a shell passed on as 128 + n.
fn how_it_ended(record: &Record) -> String {
    let of_shell = record
        .exit_code
        .checked_sub(128)
        .filter(|_| record.signal.is_none());
    match (record.signal, of_shell.and_then(cause_of)) {
        (Some(signal), _) => {
            let cause = cause_of(signal)
                .map(|cause| format!(": {cause}"))
                .unwrap_or_default();
            format!("signal {signal} ended the program{cause}\n")
        }
        (None, Some(cause)) => format!(
            "exit code {} means that a signal ended a process: {cause}\n",
            record.exit_code
        ),
        (None, None) if record.exit_code == 0 => String::new(),
        (None, None) => format!("the program ended with exit code {}\n", record.exit_code),
    }
}

/// Whether the peaks depend on the timing of the GPU, and their range if it is known.
fn timing(record: &Record, events: Events) -> String {
    let Some(doubt) = Doubt::timing(record) else {
        return String::new();
    };
    // A block that waits for long hides those behind it.
    let dependence = doubt.sentence(&match events {
        Events::Instant => format!(" {}", count(record.waits_of_frees(), "time")),
        Events::Synchronize | Events::Lag(_) => String::new(),
    });
    let extremes = record
        .host_ahead
        .as_ref()
        .and_then(|ahead| range_of_peaks(record, ahead));
    let others = extremes.or_else(|| replayed(record)).unwrap_or_else(|| {
        match events {
            Events::Instant => {
                let why = record.used().find_map(|process| process.not_replayed);
                let why = why.map_or_else(String::new, |why| format!(" (not replayed: {why})"));
                return format!(
                    "these assume that the GPU keeps up with the host; `--events range` also \
                     shows those of a host that runs ahead{why}"
                );
            }
            Events::Synchronize => {
                "these assume that the host runs ahead; `--events instant` assumes that the GPU \
                 keeps up with it"
            }
            Events::Lag(_) => "`--events instant` and `--events synchronize` show the extremes",
        }
        .to_owned()
    });
    format!("{dependence}: {others}\n")
}

/// Describes the least and the most memory of a place, such as ` of device 0`: that of a GPU that
/// keeps up with the host, and that of a host that runs ahead.
fn between([least, most]: [u64; 2], place: &str, verb: &str) -> String {
    let [least, most] = [least, most].map(Bytes);
    if least == most {
        format!("{least}{place} are {verb} at the peak in either case")
    } else {
        format!(
            "{least}{place} are {verb} at the peak if the GPU keeps up with the host, {most} if \
             the host runs ahead"
        )
    }
}

/// The reserved memory by a replay; `None` if that is unknown of a process.
fn replayed(record: &Record) -> Option<String> {
    if record.used().any(|process| process.not_replayed.is_some()) {
        return None;
    }
    let has_several = record.used().count() > 1;
    let peaks = record.used().flat_map(|process| {
        process.peaks_by_timing.iter().map(move |peak| {
            let mut place = String::new();
            if record.peak_held.len() > 1 {
                let _ = write!(place, " of device {}", peak.device);
            }
            if has_several {
                let _ = write!(place, " by process {}", process.pid);
            }
            let end = if peak.runs_out_of_memory {
                ", and then a request fails"
            } else {
                ""
            };
            between([peak.least, peak.most], &place, "reserved by torch") + end
        })
    });
    let peaks: Vec<String> = peaks.collect();
    let can_differ = record.used().any(|process| !process.polled_at.is_empty());
    let others = if can_differ {
        "; `--events range` runs the program instead"
    } else {
        ""
    };
    (!peaks.is_empty()).then(|| {
        format!(
            "{} (a replay of the same requests{others})",
            first_of(&peaks)
        )
    })
}

/// The device memory that all processes hold together at most, by two runs.
fn range_of_peaks(record: &Record, ahead: &HostAhead) -> Option<String> {
    let has_several = record.peak_held.len() > 1;
    let peaks = record.peak_held.iter().zip(&ahead.peak_held).enumerate();
    let used = peaks.filter(|(_, (least, most))| **least > 0 || **most > 0);
    let of_device = |(index, (least, most)): (usize, (&u64, &u64))| {
        let device = has_several.then(|| format!(" of device {index}"));
        between([*least, *most], &device.unwrap_or_default(), "held")
    };
    let peaks: Vec<String> = used.map(of_device).collect();
    if peaks.is_empty() {
        return None;
    }
    let end = if ahead.exit_code == record.exit_code {
        String::new()
    } else {
        format!("; then the program ends with exit code {}", ahead.exit_code)
    };
    Some(peaks.join("; ") + &end)
}

/// Whether the program fits only because context and libraries use no memory. After a refused
/// request, less memory changes nothing in principle.
fn without_libraries(record: &Record, settings: &Settings) -> String {
    let h200 = ContextOverhead::H200;
    let needed = h200.of_context().0 * record.used().count() as u64;
    let is_full = |held: &&u64| **held > 0 && settings.memory.0.saturating_sub(**held) < needed;
    let is_refused = record
        .used()
        .flat_map(|process| &process.devices)
        .any(|device| device.failed > device.injected);
    match record.peak_held.iter().find(is_full) {
        Some(held) if settings.context_overhead == Bytes::ZERO && !is_refused => format!(
            "at the peak, {} of the GPU were free: on an H200, the context of a process takes {}, \
             and with libraries up to {}; `--context-overhead h200` adds them\n",
            settings.memory.saturating_sub(Bytes(*held)),
            h200.of_context(),
            h200.with_libraries(),
        ),
        _ => String::new(),
    }
}

fn slow_calls(record: &Record, latencies: &[Latency]) -> String {
    let line = |latency: &Latency| {
        let calls = record.slow_calls(latency);
        let all = Nanos(latency.by.0.saturating_mul(calls));
        format!(
            "latency {latency}: {} delayed, {all} in total\n",
            count(calls, "call")
        )
    };
    latencies.iter().map(line).collect()
}

fn not_modelled(record: &Record) -> String {
    let mut text = String::new();
    let mut names: Vec<&str> = record
        .used()
        .flat_map(|process| process.not_modelled.iter().map(String::as_str))
        .collect();
    names.sort_unstable();
    names.dedup();
    if !names.is_empty() {
        let _ = writeln!(
            text,
            "not modelled (CUDA returned \"not supported\", other libraries success): {}",
            first_of(&names)
        );
    }
    text
}

fn machine(settings: &Settings) -> String {
    let Settings {
        gpu,
        memory,
        devices,
        context_overhead,
        nccl_memory,
        ..
    } = settings;
    let count = if *devices == 1 {
        String::new()
    } else {
        format!("{devices} × ")
    };
    let overhead = if *context_overhead == Bytes::ZERO {
        String::new()
    } else {
        format!(", {context_overhead} context overhead per process")
    };
    let overhead = if settings.memory_of_libraries {
        format!("{overhead}, and more for libraries, as on an H200")
    } else {
        overhead
    };
    let shared = match settings.shared_memory {
        SharedMemory::None => "",
        SharedMemory::Pinned | SharedMemory::Resident => " shared with the host",
    };
    let nccl = nccl_memory
        .as_ref()
        .map_or_else(String::new, |table| format!(", NCCL's memory from {table}"));
    let (major, minor) = gpu.capability;
    format!(
        "simulated GPU: {count}{} ({}, compute capability {major}.{minor}), \
         {memory}{shared}{overhead}{nccl}\n",
        gpu.device, gpu.name
    )
}

fn named(process: &Process) -> String {
    let rank = process.torch.as_ref().and_then(|torch| torch.rank.as_ref());
    rank.map_or_else(
        || format!("process {}: ", process.pid),
        |rank| format!("rank {rank}: "),
    )
}

fn of_device(device: &DeviceRecord, unless: &str) -> String {
    let DeviceRecord {
        memory,
        peak_reserved,
        mallocs,
        frees,
        failed,
        injected,
        ..
    } = *device;
    let percent = peak_reserved as f64 * 100.0 / (memory as f64).max(1.0);
    let injected = if injected > 0 {
        format!(", {injected} of them injected by `--fail`")
    } else {
        String::new()
    };
    format!(
        "peak reserved {} ({percent:.1} %){unless}; driver: {}, {}, {failed} failed{injected}",
        Bytes(peak_reserved),
        count(mallocs, "allocation"),
        count(frees, "free"),
    )
}

/// The hook is in PYTHONPATH, and the module `site` starts it.
const WITHOUT_HOOK: &str = "Python did not start the hook of harness, as with its options -I, -E \
     and -S; without them, errors are counted too";

/// Returns why there are no statistics of torch.
fn without_torch(process: &Process) -> String {
    let program = process.program.as_str();
    match process.imports.as_deref() {
        Some([]) => "the process imported no library that reports statistics".to_owned(),
        Some(names) if names.iter().any(|name| name == "torch") => {
            "no statistics from torch: the process ended without Python's exit handlers, before it \
             used the GPU through torch"
                .to_owned()
        }
        Some(names) => {
            let names = names.join(" and ");
            format!("the process imported {names}, and no library that reports statistics")
        }
        None if is_python(process) => {
            format!("no statistics from torch: {WITHOUT_HOOK}")
        }
        None if program.is_empty() => {
            "no statistics from torch: the process ended without Python's exit handlers, or it is \
             not Python"
                .to_owned()
        }
        None => {
            format!("plain calls of CUDA by `{program}`, without a library that reports statistics")
        }
    }
}

fn is_python(process: &Process) -> bool {
    torch::is_python(process.program.as_ref())
}

/// The figures that a library other than torch publishes.
fn of_library(library: &OtherLibrary, torch: &TorchRecord) -> String {
    let figures = [
        ("peak allocated", PEAK_ALLOCATED),
        ("allocated at the end", "allocated_bytes.all.current"),
        ("peak reserved", "reserved_bytes.all.peak"),
        ("reserved at the end", "reserved_bytes.all.current"),
    ];
    let known: Vec<String> = figures
        .iter()
        .filter(|(_, name)| torch.has(name))
        .map(|(text, name)| format!("{text} {}", Bytes(torch.sum(name))))
        .collect();
    let known = match (&torch.problem, torch.statistics) {
        (_, Statistics::AtLeast) if !known.is_empty() => format!(
            "{} at an earlier moment: the process ended before it could report",
            known.join(", ")
        ),
        _ if !known.is_empty() => known.join(", "),
        (Some(problem), _) => format!("no statistics: {problem}"),
        (None, Statistics::AtLeast) => "the process ended before it could report".to_owned(),
        (None, Statistics::Reported | Statistics::Kept) => "no statistics".to_owned(),
    };
    let end = if torch.ended_out_of_memory {
        "; an out of memory error ended the program"
    } else {
        ""
    };
    let OtherLibrary {
        name,
        allocator,
        errors,
        ..
    } = library;
    let errors = match errors {
        Some(0) | None => String::new(),
        Some(errors) => format!(", {}", count(*errors, "out of memory error")),
    };
    let name = format!("{name} {}", torch.version);
    format!("{}, {allocator}: {known}{errors}{end}", name.trim_end())
}

/// Why torch could not report, if only the memory of its allocator has its statistics.
fn without_handlers(process: &Process, torch: &TorchRecord) -> String {
    match torch.statistics {
        Statistics::Kept if process.imports.is_none() && is_python(process) => {
            format!("; {WITHOUT_HOOK}")
        }
        Statistics::Kept if process.imports.is_none() => {
            "; the process has no Python with the hook of harness".to_owned()
        }
        Statistics::Kept => "; the process ended without Python's exit handlers, or could not \
                             write its figures"
            .to_owned(),
        Statistics::Reported | Statistics::AtLeast => String::new(),
    }
}

fn of_torch(process: &Process, unless: &str) -> String {
    let Some(torch) = &process.torch else {
        return without_torch(process);
    };
    if let Some(library) = &torch.other_library {
        return of_library(library, torch);
    }
    let name = format!("torch {}", torch.version);
    let name = name.trim_end();
    if let Some(problem) = &torch.problem {
        return format!("{name} has no statistics: {problem}");
    }
    let allocated = Bytes(torch.sum(PEAK_ALLOCATED));
    if torch.statistics == Statistics::AtLeast {
        let known = if allocated == Bytes::ZERO {
            String::new()
        } else {
            format!(" (at least {allocated})")
        };
        return format!(
            "{name}: peak allocated unknown{known}: the process ended before torch could report"
        );
    }
    let gpus = torch
        .memory_stats
        .values()
        .filter_map(|stats| stats.get(PEAK_ALLOCATED)?.as_u64())
        .filter(|peak| *peak > 0)
        .count();
    let gpus = if gpus > 1 {
        format!(" on {}", count(gpus as u64, "GPU"))
    } else {
        String::new()
    };
    let (retries, ooms) = (torch.sum("num_alloc_retries"), torch.sum("num_ooms"));
    let end = if torch.ended_out_of_memory {
        "; one ended the program"
    } else {
        ""
    };
    let killed = without_handlers(process, torch);
    let resets = match torch.resets {
        0 => String::new(),
        resets => format!(
            "; the program reset its peaks {}, these are of the whole process",
            count(resets, "time")
        ),
    };
    let bounds = process
        .bounds_of_peak()
        .map(|bounds| bounds.map(|bound| bound.to_string()));
    let bounds = bounds
        .filter(|[least, most]| least != most)
        .map(|[least, most]| {
            format!(" (between {least} and {most}: cuDNN's workspaces are estimates)")
        });
    let bounds = bounds.unwrap_or_default();
    format!(
        "{name}: peak allocated {allocated}{gpus}{bounds}, {}, {}{end}{unless}{killed}{resets}",
        count(retries, "retry"),
        count(ooms, "out of memory error")
    )
}

/// Page-locked memory of the host, if the process used much of it and torch reported it.
fn of_host(process: &Process) -> Option<String> {
    let host = process.torch.as_ref()?.host_memory()?;
    let peaks = host.peaks();
    let end = match process.has_reported() {
        true => format!("at the end {}", host.now()),
        false => "later peaks are unknown".to_owned(),
    };
    host.is_of_program()
        .then(|| format!("pinned host memory: {peaks}; {end}"))
}

fn of_engine(engine: &InferenceEngine) -> String {
    let parts: Vec<_> = engine
        .parts()
        .into_iter()
        .map(|(name, amount)| format!("{name} {amount}"))
        .collect();
    format!("{}: {}", engine.name, parts.join("; "))
}

/// Names what differs from a real GPU.
fn models(record: &Record, settings: &Settings) -> String {
    let computed = if record.has_torch() {
        settings.values
    } else {
        Values::Zeros
    };
    let values = match computed {
        Values::Zeros => ", computed values (zeros)",
        Values::Copies => ", computed values of large tensors (zeros)",
        Values::Cpu => "",
    };
    let has_estimates = record.used().any(Process::has_estimates);
    let workspaces = match settings.cudnn_workspace {
        CudnnWorkspace::None => ", cuDNN's workspaces (none)",
        CudnnWorkspace::Operands => ", cuDNN's workspaces (a model)",
        CudnnWorkspace::Estimate | CudnnWorkspace::Measured { .. } | CudnnWorkspace::Library(_)
            if has_estimates =>
        {
            ", cuDNN's workspaces (estimates)"
        }
        CudnnWorkspace::Estimate | CudnnWorkspace::Measured { .. } | CudnnWorkspace::Library(_) => {
            ""
        }
    };
    let limit = match computed {
        Values::Cpu => format!(
            "; the CPU computes the values, in at most {} of host memory",
            settings.host_memory
        ),
        Values::Zeros | Values::Copies => String::new(),
    };
    format!("not real: times{values}{workspaces}{limit}\n")
}

/// Compares two amounts of bytes. `moment` follows the difference, as in ` at the peak`.
pub fn change(moment: &str, old: u64, new: u64) -> String {
    let direction = if new > old { "more" } else { "less" };
    let sides = [new, old].map(|bytes| Bytes(bytes).to_string());
    // Rounded sizes can be equal.
    let [after, before] = if sides[0] == sides[1] {
        [new, old].map(|bytes| format!("{bytes} B"))
    } else {
        sides
    };
    format!(
        "{} {direction}{moment}: {after} instead of {before}",
        Bytes(old.abs_diff(new))
    )
}

#[cfg(test)]
mod tests;
