mod picture;

use std::collections::BTreeMap;

use harness_allocator::units::Bytes;
use harness_base::words::count;
use harness_exec::record::{Process, Record};
use harness_exec::torch_record::InferenceEngine;
use harness_exec::{machine::Machine, process, summary, timeline::ProgramTimeline};
use harness_gpu_settings::attempts::{Attempt, AttemptOutcome};
use harness_gpu_settings::limits::Limits;
use harness_gpu_settings::settings::{CudnnWorkspace, Settings, Values};
use quick_junit::{Report as Document, TestCase, TestCaseStatus, TestSuite};

use self::picture::{Clock, Curve};
use super::escape::{fenced, prose};
use super::words::{self, Grid};
use super::{junit, page::Page};

const MOST_CURVES: usize = 8;
const MOST_ERRORS: usize = 16;

#[derive(Clone, Copy, Debug)]
pub struct ProgramReport<'a> {
    /// The command, quoted for a shell.
    pub command: &'a str,
    pub again: &'a str,
    pub machine: &'a Machine,
    pub gpu: Option<&'a str>,
    pub record: &'a Record,
    /// Calls of the processes, in order.
    pub timelines: &'a [ProgramTimeline],
    /// An injected failure or latency that matched no call, or [`REQUIRE_GPU`], as its command-line
    /// option.
    pub missed: Option<&'a str>,
    /// The differences from the baseline, if there is one.
    pub differences: &'a [String],
}

/// The option that the program misses if it requests no memory of a GPU.
pub const REQUIRE_GPU: &str = "--require-gpu";

impl ProgramReport<'_> {
    fn is_bad(&self) -> bool {
        self.record.exit_code != 0 || self.missed.is_some() || !self.differences.is_empty()
    }

    fn sentence(&self) -> String {
        let end = match self.record.signal {
            Some(signal) => {
                let cause = process::cause_of(signal)
                    .map(|cause| format!(" ({cause})"))
                    .unwrap_or_default();
                format!("Signal {signal}{cause} ended the program")
            }
            None if self.record.hang.is_some() => {
                "The run was stopped, because its ranks wait forever".to_owned()
            }
            None if self.record.exit_code == 0 => "The program ended well".to_owned(),
            None if self.ended_out_of_memory() => {
                format!(
                    "An out of memory error ended the program, with exit code {}",
                    self.record.exit_code
                )
            }
            None => format!("The program ended with exit code {}", self.record.exit_code),
        };
        let missed = self
            .missed
            .map(|option| match option {
                REQUIRE_GPU => format!("; `{option}` is not met"),
                _ => format!("; `{option}` was not reached"),
            })
            .unwrap_or_default();
        let differences = match self.differences.len() {
            0 => String::new(),
            number => format!("; {} from the baseline", count(number as u64, "difference")),
        };
        let peak = self
            .used()
            .flat_map(|process| &process.devices)
            .map(|device| device.peak_reserved)
            .max()
            .unwrap_or_default();
        format!(
            "{end}{missed}{differences}. It reserved at most {} of {}.",
            Bytes(peak),
            self.machine.memory()
        )
    }

    fn ended_out_of_memory(&self) -> bool {
        self.record
            .processes
            .iter()
            .filter_map(|process| process.torch.as_ref())
            .any(|torch| torch.ended_out_of_memory)
    }

    fn used(&self) -> impl Iterator<Item = &Process> {
        self.record
            .processes
            .iter()
            .filter(|process| process.used_gpu())
    }

    /// The traceback of the error that ended the program, from the first process that has one.
    fn traceback(&self) -> Option<String> {
        let mut torches = self
            .record
            .processes
            .iter()
            .filter_map(|process| process.torch.as_ref());
        torches
            .find(|torch| !torch.traceback.is_empty())
            .map(|torch| torch.traceback.join("\n"))
    }
}

pub fn picture(program: &ProgramReport<'_>) -> Option<String> {
    let mut curves = Vec::new();
    for process in program.used() {
        let Some(timeline) = program
            .timelines
            .iter()
            .find(|timeline| timeline.pid == process.pid)
        else {
            continue;
        };
        for device in process.devices.iter().filter(|device| device.mallocs > 0) {
            curves.push(Curve {
                timeline,
                device: device.index as u32,
                title: format!("{}, device {}", named(process), device.index),
            });
        }
    }
    curves.truncate(MOST_CURVES);
    picture::draw(&curves, program.machine.memory(), clock(program.machine))
}

const fn clock(machine: &Machine) -> Clock {
    match machine {
        Machine::Simulated(_) => Clock {
            name: "the work that the program submitted",
            axis: "work submitted: kernels, copies and the like",
        },
        Machine::Real(..) => Clock {
            name: "the calls of the program for memory",
            axis: "memory calls: allocations and frees",
        },
    }
}

pub fn markdown(program: &ProgramReport<'_>, picture: Option<&str>) -> String {
    let mut page = Page::default();
    page.block(format!("# {}", prose(program.command)));
    page.block(format!("**{}**", prose(&program.sentence())));
    if let Some(hang) = &program.record.hang {
        page.list(hang.lines().iter().map(|line| prose(line)));
    }
    if let Some(picture) = picture {
        page.block(format!(
            "![Reserved and allocated over {}]({picture})",
            clock(program.machine).name
        ));
    }
    if let Some(traceback) = program.traceback() {
        page.block("## Error");
        page.block(fenced("text", &traceback));
    }
    if !program.differences.is_empty() {
        page.block("## Differences from the baseline");
        page.list(program.differences.iter().map(|line| prose(line)));
    }
    page.block("## Processes");
    page.grid(&processes(program));
    let unless = |process| program.record.unless(process);
    if program.used().any(|process| !unless(process).is_empty()) {
        page.block(format!(
            "{UNSURE} Unless a branch depends on a value that nothing computed. The summary names \
             the lines that read them."
        ));
    }
    if !program.record.peak_held.iter().all(|held| *held == 0) && program.used().count() > 1 {
        let held = program
            .record
            .peak_held
            .iter()
            .enumerate()
            .map(|(index, held)| format!("device {index}: {}", Bytes(*held)));
        page.block(format!(
            "Peak over all processes: {}.",
            words::joined(held, ", ")
        ));
    }
    add_engines(&mut page, program);
    page.block("## Summary");
    page.block(fenced(
        "text",
        summary::render(program.record, program.machine, program.gpu).trim_end(),
    ));
    page.block("## Driver calls");
    page.grid(&calls(program));
    let errors = errors(program);
    if !errors.is_empty() {
        page.block("## Out of memory errors");
        page.list(errors);
    }
    let (heading, lines) = match program.machine {
        Machine::Simulated(settings) => ("## Simulated parts", models(program, settings)),
        Machine::Real(_, limits) => ("## Limits", limited(program, limits)),
    };
    page.block(heading);
    page.list(lines.iter().map(|line| prose(line)));
    page.block("## Reproduce");
    page.command(program.again);
    page.ended().text
}

/// Adds how an inference engine divides the memory in each of its workers.
fn add_engines(page: &mut Page, program: &ProgramReport<'_>) {
    let engines: Vec<_> = program
        .used()
        .filter_map(|process| Some((process, process.torch.as_ref()?.engine.as_ref()?)))
        .collect();
    if let Some((_, engine)) = engines.first() {
        page.block(format!("## {}", engine.name));
        let parts = engine.parts();
        let heads = ["process"]
            .into_iter()
            .chain(parts.iter().map(|(name, _)| *name));
        let row = |(process, engine): &(&Process, &InferenceEngine)| -> Vec<String> {
            [named(process)]
                .into_iter()
                .chain(engine.parts().into_iter().map(|(_, amount)| amount))
                .collect()
        };
        page.grid(&Grid::new("lr", heads, engines.iter().map(row)));
    }
}

fn named(process: &Process) -> String {
    let rank = process.torch.as_ref().and_then(|torch| torch.rank.as_ref());
    rank.map_or_else(
        || format!("process {}", process.pid),
        |rank| format!("rank {rank}"),
    )
}

/// Follows a figure that may depend on values that nothing has computed.
const UNSURE: &str = "†";

fn processes(program: &ProgramReport<'_>) -> Grid {
    let heads = [
        "process",
        "peak reserved",
        "peak allocated",
        "retries",
        "OOMs",
        "allocations",
        "frees",
        "submitted work",
    ];
    let cells = |process: &Process| {
        let torch = |name: &str| process.torch.as_ref()?.figure(name);
        let device = |figure: fn(&harness_exec::record::DeviceRecord) -> u64| {
            process.devices.iter().map(figure)
        };
        let unless = match program.record.unless(process) {
            "" => String::new(),
            _ => format!(" {UNSURE}"),
        };
        let reserved = device(|device| device.peak_reserved).max();
        let allocated =
            torch("allocated_bytes.all.peak").map(|peak| format!("{}{unless}", Bytes(peak)));
        vec![
            named(process),
            format!("{}{unless}", Bytes(reserved.unwrap_or_default())),
            words::or_nothing(allocated),
            words::or_nothing(torch("num_alloc_retries")),
            words::or_nothing(torch("num_ooms")),
            device(|device| device.mallocs).sum::<u64>().to_string(),
            device(|device| device.frees).sum::<u64>().to_string(),
            process.submitted.to_string(),
        ]
    };
    // A real GPU does not count submitted work.
    let is_shown =
        |head: &str| matches!(program.machine, Machine::Simulated(_)) || head != "submitted work";
    Grid::new("lr", heads, program.used().map(cells)).with_columns(is_shown)
}

fn calls(program: &ProgramReport<'_>) -> Grid {
    let mut counts: BTreeMap<&str, [u64; 4]> = BTreeMap::new();
    for Attempt {
        call,
        size,
        outcome,
        ..
    } in program
        .timelines
        .iter()
        .flat_map(|timeline| &timeline.attempts)
    {
        let [all, refused, injected, bytes] = counts.entry(call.name()).or_default();
        *all += 1;
        match outcome {
            AttemptOutcome::Served => *bytes += size.0,
            AttemptOutcome::Refused => *refused += 1,
            AttemptOutcome::Injected => *injected += 1,
        }
    }
    let rows = counts
        .into_iter()
        .map(|(name, [all, refused, injected, bytes])| {
            vec![
                name.to_owned(),
                all.to_string(),
                refused.to_string(),
                injected.to_string(),
                Bytes(bytes).to_string(),
            ]
        });
    Grid::new(
        "lr",
        [
            "function",
            "calls",
            "refused",
            "injected failures",
            "bytes served",
        ],
        rows,
    )
}

fn errors(program: &ProgramReport<'_>) -> Vec<String> {
    let several = program.timelines.len() > 1;
    let of_process = |timeline: &ProgramTimeline| -> Vec<String> {
        let who = if several {
            format!("process {}, ", timeline.pid)
        } else {
            String::new()
        };
        let place = |error: &harness_exec::errors::OutOfMemoryError| {
            let frames: Vec<String> = error
                .frames
                .iter()
                .map(|frame| format!("{} {}", frame.short(), frame.name))
                .collect();
            let frames = if frames.is_empty() {
                "at a location without Python frames".to_owned()
            } else {
                frames.join(" ← ")
            };
            prose(&format!("{who}after attempt {}: {frames}", error.attempts))
        };
        timeline.errors.iter().map(place).collect()
    };
    words::at_most(
        program.timelines.iter().flat_map(of_process).collect(),
        MOST_ERRORS,
        |more| format!("and {more} more"),
    )
}

/// Differences from a run without the harness on a real GPU.
fn limited(program: &ProgramReport<'_>, limits: &Limits) -> Vec<String> {
    let Limits {
        device,
        memory,
        faults,
        latencies,
    } = limits;
    let gpu = program.gpu.unwrap_or_default();
    let memory = memory.map_or_else(|| "all".to_owned(), |memory| format!("at most {memory}"));
    let mut lines = vec![
        format!(
            "The GPU is {} ({gpu}). Each process may use {memory} of its {device}, in addition to \
             its CUDA context.",
            program.record.gpu
        ),
        "GPU, driver, CUDA and torch are real, including sizes, order and addresses of \
         allocations, retries and errors."
            .to_owned(),
        "Allocated memory is sampled; reserved memory changes at driver allocations and frees."
            .to_owned(),
    ];
    lines.extend(
        faults
            .iter()
            .map(|fault| format!("Injected failures: {fault}.")),
    );
    lines.extend(
        latencies
            .iter()
            .map(|latency| format!("Injected latency: {latency}.")),
    );
    lines
}

fn models(program: &ProgramReport<'_>, settings: &Settings) -> Vec<String> {
    let Settings {
        values,
        cudnn_workspace,
        nccl_memory,
        context_overhead,
        gpu,
        events,
        addresses,
        ..
    } = settings;
    let values = match values {
        Values::Zeros => "Kernels are no-ops: the program reads zeros.",
        Values::Copies => {
            "Kernels are no-ops: the program reads the values of small copies and small tensors, \
             else zeros."
        }
        Values::Cpu => "Kernels are no-ops: the CPU computes what the program reads.",
    };
    let workspace = match cudnn_workspace {
        CudnnWorkspace::Library(file) if !program.used().any(Process::has_estimates) => {
            format!("cuDNN's own library, {file}, chooses its workspaces.")
        }
        CudnnWorkspace::Operands | CudnnWorkspace::Estimate | CudnnWorkspace::Library(_) => {
            "cuDNN workspaces are estimated from the operands of a convolution.".to_owned()
        }
        CudnnWorkspace::Measured { file, .. } => {
            format!("cuDNN workspaces come from {file}, others are estimates.")
        }
        CudnnWorkspace::None => "cuDNN uses no workspaces.".to_owned(),
    };
    let of_libraries = if settings.memory_of_libraries {
        ", and more for libraries, as on an H200"
    } else {
        ""
    };
    let mut lines = vec![
        format!(
            "Programs see the GPU {} ({}); events: {events}; addresses: {addresses}.",
            gpu.device, gpu.name
        ),
        format!("Each process uses {context_overhead} for its CUDA context{of_libraries}."),
        values.to_owned(),
        workspace,
        "Allocators and host code of torch and other libraries are real, including sizes, order \
         and addresses of allocations, retries and errors."
            .to_owned(),
        "Allocated memory is sampled; reserved memory changes at driver allocations and frees."
            .to_owned(),
    ];
    lines.extend(
        program
            .record
            .warnings_of_engines()
            .into_iter()
            .map(|warning| format!("{warning}.")),
    );
    lines.extend(
        nccl_memory
            .iter()
            .map(|table| format!("The memory of NCCL comes from {table}.")),
    );
    lines
}

/// The run as a test case. It fails if the exit code is not 0, an injected failure matched no call,
/// or a figure differs from the baseline.
pub fn junit(program: &ProgramReport<'_>) -> String {
    let status = match program.is_bad() {
        false => TestCaseStatus::success(),
        true => {
            let details = program
                .traceback()
                .into_iter()
                .chain(program.differences.iter().cloned());
            junit::failure(
                "program",
                &program.sentence(),
                &harness_base::words::joined(details, "\n"),
            )
        }
    };
    let mut case = TestCase::new(program.command, status);
    case.set_classname("harness exec");
    case.add_property(("settings", program.record.settings.as_str()));
    case.add_property(("reproduce", program.again));
    let mut suite = TestSuite::new("harness exec");
    suite.add_test_case(case);
    let mut document = Document::new("harness exec");
    document.add_test_suite(suite);
    junit::written(&document)
}

#[cfg(test)]
mod tests;
