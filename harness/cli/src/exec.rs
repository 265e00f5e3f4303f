//! `harness exec`: runs an unmodified CUDA program on a simulated GPU, or with limits on a real
//! GPU, once or many times (`trials`).

mod annotations;
mod baseline;
mod failed_cases;
mod largest;
mod leave_free;
pub(crate) mod matrix;
mod trials;
mod values;

use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::{collections::BTreeSet, ffi::OsString, str::FromStr};

use clap::Args;
use harness_allocator::units::Bytes;
use harness_base::{files, shell};
use harness_cuda::machine::DeviceFound;
use harness_devices::DeviceChoice;
use harness_exec::doubts;
use harness_exec::launch::{EndedProgram, Launch, Prepared};
use harness_exec::trials::{faults, runner::RunnerError};
use harness_exec::{
    host_memory,
    machine::Machine,
    process,
    record::{HostAhead, Record},
    setup,
    setup::Setup,
    summary,
    timeline::ProgramTimeline,
    torch,
};
use harness_explain::causes::{self, Options};
use harness_gpu_settings::settings::{
    AddressOrder, Cuda, CudnnWorkspace, Events, Fault, MOST_DEVICES, NcclMemory, Settings,
    SharedMemory, UNMEASURED, Values,
};
use harness_gpu_settings::{
    calls::Call, context_overhead::ContextOverhead, gpus::Gpu, latency::Latency, limits::Limits,
    workspaces::HEADER,
};
use harness_report::explain::text;
use harness_report::program::{self, ProgramReport, REQUIRE_GPU};

use self::baseline::Comparison;
use super::error::{CliError, Failures};
use super::program::{name as program_name, shown};
use super::{arguments, device, exit::Exit, probe, snapshots, terminal};

pub(crate) const DEFAULT_GPU: &str = "h100-80";

const EXAMPLES: &str = "Examples:
  harness exec --memory 24GiB -- python train.py
  harness exec --gpu a100-40 --snapshot oom.pickle -- python train.py --batch 64
  harness exec --memory 24GiB --report report.md --junit junit.xml -- python train.py
  harness exec --memory 8GiB --fail cudaMalloc:40:2 -- python -m pytest tests/test_recovery.py
  harness exec --every-fault --expect recovers -- python train.py
  harness exec --every-fault --last-failed -- python train.py
  harness exec --every-fault --shard 1/2 --format json -- python train.py > 1.json
  harness exec --least-memory -- python train.py
  harness exec --largest batch=1..4096 --gpu h100-80 --gpu h200 -- python train.py {batch}
  harness exec --memory 24GiB --baseline peaks.json --code-quality lines.json -- python train.py
  harness exec --python old/bin/python --python new/bin/python -- train.py
  harness exec --alloc-conf '' --alloc-conf expandable_segments:True -- python train.py
  harness exec --matrix runs.yaml --shard 1/4 --compare earlier.jsonl
  harness exec --device cuda:0 --memory 24GiB --fail cudaMalloc:40:2 -- python train.py
  harness exec --leave-free 6GiB --report memory.md -- python train.py
  harness exec --gpu h100-80 --devices 4 --record run.json -- torchrun --nproc-per-node 4 train.py

The allocators and host code of PyTorch, JAX and others run unchanged, so reserved memory, refused
requests and retries are the same as on such a GPU. Kernels are no-ops: times have no meaning, and
the program reads zeros in place of computed values (see `--values`). The command needs no GPU,
driver or CUDA library. The program is built for CUDA 12 or 13. Libraries choose their workspace by
the GPU's compute capability, so `--gpu` changes the result.

The program uses our standard input, output and error. Our exit code is the program's exit code, or
128 + n if signal n ended it. The exit code is 2 if the command or its torch cannot be used; then
the program is not started. It is 2 too if a process needs a CUDA runtime that is linked in and
cannot be replaced, because its symbols are stripped; then the program ends at once. It is 4 if the
results cannot be written. It is 124 if ranks wait for each other or for ranks that never come: the
run is stopped, and the summary lists who waits for whom.

With `--leave-free`, the command allocates memory with the driver before the program starts, and
releases it after the program has ended, even if either process is killed. It does not react when
other processes allocate or release memory. The exit code is 3 if the GPU cannot be used or has too
little free memory; then the program is not started. `--record` and `--format json` have the curve
of device memory in use.

With `--baseline` or two `--python`, the exit code is 1 if a figure differs and the program ends
with 0.

With `--matrix`, no run uses our standard streams. The exit code is 1 if a run does not end with
exit code 0, or if a peak is larger than in the rows of `--compare`.

With many runs, the first run uses our standard output and error, and no run uses our standard
input. The exit code is 1 if the program does not meet `--expect`, if an injected failure never
happens, if the first run fails, or if every setting fails. It is 130 after Ctrl-C, which prints the
results so far.

The folder ~/.cache/harness, or HARNESS_CACHE, stores libraries that are built for a
program, and what programs did not survive.";

pub(crate) fn ordinal(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(DeviceChoice::Cuda(ordinal)) => Ok(ordinal),
        _ => Err(
            "expected a real GPU, as in `cuda:0`; without `--device` the GPU is simulated, or \
             cuda:0 with `--leave-free`"
                .to_owned(),
        ),
    }
}

/// Run an unmodified CUDA program on a simulated GPU with any amount of memory, or on a real GPU
/// with less memory.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Exec {
    /// Memory of each simulated GPU, as in `24GiB` [default: all memory of the GPU]. PyTorch's
    /// allocator can use all of it; on a GPU, the CUDA context and libraries take a part, which
    /// `--context-overhead` adds. With `--device`, it limits the memory of each process.
    #[arg(long, value_name = "SIZE", value_parser = arguments::memory)]
    memory: Option<Bytes>,
    /// Run on this real GPU instead of a simulated one, as in `cuda:0`. `--memory` limits the
    /// program's memory and `--fail` injects failures. The program uses NVIDIA's driver and its own
    /// CUDA libraries.
    #[arg(long, value_name = "cuda:N", value_parser = ordinal, conflicts_with_all = [
        "gpu", "devices", "cuda", "context_overhead", "events", "addresses", "cudnn_workspace",
        "nccl_memory", "unmeasured", "values", "shared_memory",
    ])]
    device: Option<u32>,
    /// The GPU to simulate: a name, as in `a100-40` or `h200`, or a file that describes a GPU, as
    /// in `my-gpu.yaml`. The page "GPUs" of the guide lists the names and describes the file.
    /// `--largest` takes several.
    #[arg(
        long,
        value_name = "GPU",
        default_value = DEFAULT_GPU,
        value_parser = device::gpu_or_file,
    )]
    gpu: Vec<String>,
    /// Number of simulated GPUs, at most 120. All processes of the program see all of them and
    /// share their memory.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_DEVICES)),
    )]
    devices: u32,
    /// The CUDA release that the program is built for, `12` or `13` [default: that of the program's
    /// own files, its torch, or its other packages].
    #[arg(long, value_name = "RELEASE")]
    cuda: Option<Cuda>,
    /// End with exit code 1 if no process of the program requests GPU memory, as when a library
    /// falls back to the CPU.
    #[arg(long)]
    require_gpu: bool,
    /// Memory that each process uses besides its allocations: a size, used from its start, or
    /// `h200`, as measured on an H200: 527 MiB for the context, and at their first use 68 MiB for
    /// cuBLAS, 90 MiB for its 16-bit products, 8 MiB for cuDNN and 106 MiB for cuSOLVER, whose
    /// calls fail without it.
    #[arg(long, value_name = "SIZE", default_value = "0B")]
    context_overhead: ContextOverhead,
    /// When CUDA events complete: `instant`; `synchronize`, when the host waits for them; `lag:N`,
    /// also after N further submissions of work. `range` runs the program with `instant`, and if
    /// its peaks depend on the timing again with `synchronize`, without its output [default:
    /// instant]
    #[arg(long, value_name = "MODEL")]
    events: Option<Timing>,
    /// The addresses of allocations: `linux`, as NVIDIA's driver chooses them there; `wsl` or
    /// `reuse`, the lowest free address, as under WSL; `up`; or `down`. PyTorch prefers low
    /// addresses, so the order can change peaks. If the option is repeated, one run per order
    /// compares them. `--least-memory` tries `linux` and `wsl`, and several `--alloc-conf` try them
    /// near the limit.
    #[arg(long, value_name = "ORDER", default_value = "linux")]
    addresses: Vec<AddressOrder>,
    /// The workspace that cuDNN requests: a path of cuDNN's own `libcudnn_graph.so.9`, which plans
    /// for the GPU (the default if the program's environment has cuDNN 9.8 or later); `estimate`, a
    /// rule (the default otherwise); a table of sizes measured on your GPU, as in `measured.tsv`,
    /// with estimates for the rest; `operands`, the size of those that are not channels-last; or
    /// `none`.
    #[arg(long, value_name = "MODEL", value_parser = cudnn_workspace)]
    cudnn_workspace: Option<CudnnWorkspace>,
    /// The memory of NCCL's buffers: a table with the columns `ranks`, `collective` and
    /// `point_to_point`, as in `2`, `544MiB` and `0B`. Each communicator uses the row with the most
    /// ranks up to its own. Without this option, NCCL uses no memory.
    #[arg(long, value_name = "FILE", value_parser = nccl_memory)]
    nccl_memory: Option<NcclMemory>,
    /// The host memory that counts as memory of a GPU that shares it, such as GB10 and Jetson:
    /// `pinned`, page-locked memory; `resident`, also the resident memory of the program's
    /// processes, as measured on this host, so runs can differ; or `none` [default: pinned].
    #[arg(long, value_name = "WHAT")]
    shared_memory: Option<SharedMemory>,
    /// Write the convolutions with estimated workspaces to this table. `harness calibrate
    /// --workspaces FILE` measures them on a GPU.
    #[arg(long, value_name = "FILE", value_parser = arguments::output())]
    unmeasured: Option<PathBuf>,
    /// The values that the program reads from GPU memory: `copies` (the default), values from small
    /// copies, and random numbers and results of operations in tensors of at most 64 elements, as
    /// far as their inputs are known, otherwise zeros; `zeros`; or `cpu`: the CPU also computes
    /// each operation of PyTorch, in half of the host's free memory, so losses, masks and
    /// `generate` are real. Without this option, a program that reads a value which nothing
    /// computed, and then ends with an error or a hang, runs again with `cpu`, unless it wrote
    /// files or opened sockets [default: the variable HARNESS_VALUES, else `values` in the file
    /// .harness.yml of this folder or its repository, else `copies`].
    #[arg(long, value_name = "WHAT")]
    values: Option<Values>,
    /// Fail COUNT calls (default: 1), starting with number FIRST, from 1. Calls for less than
    /// MIN_SIZE do not count. PyTorch retries a request for device memory once, so COUNT 2 causes
    /// an out-of-memory error. It does not retry cudaHostAlloc and the calls that create handles,
    /// plans and modules of libraries, such as cublasCreate and cuModuleLoadData. `any` counts all
    /// calls that allocate device memory together. May be repeated. The exit code is 1 if the
    /// program never reaches call FIRST.
    #[arg(long, value_name = "CALL:FIRST[:COUNT][:MIN_SIZE]")]
    fail: Vec<Fault>,
    /// Delay each call of a function, as in `cudaFree:3ms`. The functions are cudaMalloc,
    /// cuMemCreate, cudaMallocAsync, cudaHostAlloc, cudaFree, cudaFreeAsync and cuMemUnmap,
    /// including their driver equivalents, and cudaGraphLaunch if a graph needs more memory. `any`
    /// means those that allocate device memory, `all` means all of them. The program really waits,
    /// and event times include the delay. May be repeated. The exit code is 1 if the program never
    /// makes such a call.
    #[arg(long, value_name = "CALL:DURATION")]
    latency: Vec<Latency>,
    /// Settings of PyTorch's allocator in the format of PYTORCH_ALLOC_CONF. If the option is
    /// repeated, the settings are compared.
    #[arg(long, value_name = "CONF")]
    alloc_conf: Vec<String>,
    /// The Python whose torch the program imports, if the command does not show it. Given twice,
    /// runs the program with each of the two and compares its memory, by line. The exit code is 1
    /// if it differs.
    #[arg(long, value_name = "PATH")]
    python: Vec<PathBuf>,
    /// Write a JSON record of each process to this file; with `--leave-free`, one document with
    /// the curve of device memory in use.
    #[arg(long, value_name = "FILE", value_parser = arguments::output())]
    record: Option<PathBuf>,
    /// Write a memory snapshot at the end, and explain it if an out-of-memory error ended the
    /// program. Further processes write FILE.rankN.pickle.
    #[arg(long, value_name = "FILE", value_parser = arguments::output())]
    snapshot: Option<PathBuf>,
    /// Write the run as a JUnit test case, which fails if the exit code is not 0.
    #[arg(long, value_name = "FILE", value_parser = arguments::output())]
    junit: Option<PathBuf>,
    /// Compare the memory of the program with this file: peaks, retries, driver calls, and the
    /// bytes of each call site at the peak. The exit code is 1 if they differ. The program then
    /// runs up to three more times, without output, to find out whether it is deterministic.
    #[arg(long, value_name = "FILE", conflicts_with = "device", value_parser = arguments::output())]
    baseline: Option<PathBuf>,
    #[command(flatten)]
    annotations: annotations::Annotations,
    /// With `--baseline`: write the baseline instead, if two runs have the same figures.
    #[arg(long)]
    update: bool,
    /// Print no summary if the program ends with exit code 0.
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    many: trials::Options,
    #[command(flatten)]
    largest: largest::LargestOptions,
    #[command(flatten)]
    matrix: matrix::MatrixOptions,
    #[command(flatten)]
    leave_free: leave_free::LeaveFree,
    /// The program and its arguments.
    #[arg(
        last = true,
        required_unless_present = "matrix",
        value_name = "COMMAND"
    )]
    command: Vec<OsString>,
    /// The default of `values` for this shell or repository.
    #[arg(skip)]
    settled_values: Option<Values>,
}

/// The timing of CUDA events, or the range between the extremes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timing {
    One(Events),
    Range,
}

impl FromStr for Timing {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "range" => Ok(Self::Range),
            text => text
                .parse()
                .map(Self::One)
                .map_err(|error| format!("{error}, range")),
        }
    }
}

/// Refuses `options` without the option `needed`, which they change. `requires` of clap accepts
/// them if `needed` conflicts with another given option.
fn require(needed: &str, is_given: bool, options: &[(&str, bool)]) -> Result<(), CliError> {
    match options.iter().find(|(_, given)| *given && !is_given) {
        None => Ok(()),
        Some((option, _)) => Err(CliError::input(
            format!("`{option}` needs {needed}"),
            format!("add {needed}, or leave out `{option}`"),
        )),
    }
}

impl Exec {
    /// Runs `harness squeeze`.
    pub(super) fn squeeze(self) -> Result<ExitCode, Failures> {
        if self.leave_free.size().is_none() {
            return Err(CliError::input(
                "`harness squeeze` needs `--leave-free <SIZE>`",
                "add it, or run `harness exec` for a simulated GPU",
            )
            .into());
        }
        self.run()
    }

    pub(super) fn run(mut self) -> Result<ExitCode, Failures> {
        self.check_needed()?;
        if let Some(leave) = self.leave_free.size() {
            return self.run_with_free_memory(leave);
        }
        if self.values.is_none() && self.device.is_none() {
            self.settled_values = values::settled()?;
        }
        match self.matrix.files() {
            (Some(matrix), _) => return self.run_matrix(matrix),
            (None, Some(figures)) => return self.run_for_matrix(figures),
            (None, None) => {}
        }
        let is_search = self.largest.are_asked_for();
        let has_many = self
            .many
            .are_asked_for(&self.alloc_conf, &self.addresses, is_search)?;
        self.check(has_many, is_search)?;
        if let Some(warning) = host_memory::warning(self.devices) {
            terminal::message(warning);
        }
        let python = match self.python.as_slice() {
            [] => None,
            [python] => Some(python.as_path()),
            [before, after, ..] => return self.compare_environments(has_many, [before, after]),
        };
        if is_search {
            return self.search_largest(python);
        }
        let setup = self.setup(&self.command, python)?;
        let (machine, gpu) = match self.device {
            None => (Machine::Simulated(self.settings(&setup)?), None),
            Some(ordinal) => {
                let (machine, gpu) = self.real_machine(ordinal)?;
                (machine, Some(gpu))
            }
        };
        if has_many {
            return self.many.run(
                self.launch(&machine, &setup),
                &self.alloc_conf,
                &self.addresses,
            );
        }
        self.run_alone(&setup, machine, gpu.as_deref())
    }

    /// Refuses options without the option that they change.
    pub(super) fn check_needed(&self) -> Result<(), CliError> {
        self.many.check_needed(self.largest.are_asked_for())?;
        self.largest.check_needed()?;
        self.matrix.check_needed()?;
        self.leave_free.check_needed()?;
        let has_baseline = self.baseline.is_some();
        require("`--baseline`", has_baseline, &[("--update", self.update)])?;
        self.annotations.check_needed(has_baseline)
    }

    /// Refuses options that exclude each other.
    fn check(&self, has_many: bool, is_search: bool) -> Result<(), CliError> {
        let for_one = |options: &str| {
            let message =
                format!("{options} are for one run, but the other options request many runs");
            Err(CliError::input(message, "leave them out"))
        };
        let has_several = has_many || self.python.len() > 1;
        let is_range = self.events == Some(Timing::Range);
        if has_many && self.has_options_of_one_run() {
            return for_one("`--record`, `--snapshot`, `--junit`, `--unmeasured` and `--baseline`");
        }
        if has_several && (self.require_gpu || is_range) {
            return for_one("`--require-gpu` and `--events range`");
        }
        if self.baseline.is_some() && is_range {
            return Err(CliError::input(
                "`--baseline` compares the figures of one run, but `--events range` requests two",
                "leave one of them out",
            ));
        }
        if self.python.len() > 2 {
            return Err(CliError::input(
                "`--python` is given more than twice",
                "name two environments to compare",
            ));
        }
        if self.gpu.len() > 1 && !is_search {
            return Err(CliError::input(
                "`--gpu` is given more than once",
                "give one, or search with `--largest`",
            ));
        }
        Ok(())
    }

    fn has_options_of_one_run(&self) -> bool {
        let files = [
            &self.record,
            &self.snapshot,
            &self.junit,
            &self.unmeasured,
            &self.baseline,
        ];
        files.iter().any(|option| option.is_some())
    }

    /// Runs the program once, and again if values or a baseline demand it.
    fn run_alone(
        &self,
        setup: &Setup,
        mut machine: Machine,
        gpu: Option<&str>,
    ) -> Result<ExitCode, Failures> {
        let settings = || self.memory_settings(setup, &machine);
        let comparison = self
            .baseline
            .as_deref()
            .map(|path| Comparison::new(path, settings(), self.update))
            .transpose()?;
        let run = |machine: &Machine, is_silent: bool| {
            let mut prepared = self.launch(machine, setup).prepare()?;
            if is_silent {
                prepared
                    .command
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::null());
            }
            self.run_once(prepared, machine)
        };
        let (mut ended, mut record) = run(&machine, false)?;
        if record.effect.is_none() && process::is_input_used_up() {
            record.effect = Some("has read its standard input".to_owned());
        }
        let settings = if let Machine::Simulated(settings) = &mut machine {
            Some(settings)
        } else {
            None
        };
        if let Some(settings) = settings
            && let Some(end) = self.ended_by_values(&record)
        {
            terminal::message(format_args!(
                "\nThe program ended {end}, after it read values that nothing computed{}: it runs \
                 again with `--values cpu`; `--values {}` prevents this.\n",
                doubts::lines_of_reads(&record),
                settings.values
            ));
            settings.values = Values::Cpu;
            (ended, record) = run(&machine, false)?;
        }
        if comparison.is_none() {
            let silent = |machine: &Machine| run(machine, true);
            record.host_ahead = self.host_ahead(&record, &machine, silent)?;
        }
        let differences = || {
            comparison.map_or_else(
                || Ok(Vec::new()),
                |it| {
                    it.check(&record, ended.folder(), &self.annotations, || {
                        run(&machine, true)
                    })
                },
            )
        };
        self.finish(&ended, &record, &machine, gpu, differences)
    }

    /// Finds out what the program needs, and tells what is in doubt.
    fn setup(&self, command: &[OsString], python: Option<&Path>) -> Result<Setup, CliError> {
        let setup = if self.device.is_some() {
            Setup::for_real_gpu(command, python)
        } else {
            Setup::of(command, python, self.cuda)
        }?;
        setup.warnings.iter().for_each(terminal::message);
        if !setup.uses_cuda && torch::begins_with_python(command) {
            terminal::message(setup::without_cuda(setup.program.python.as_deref()));
        }
        let has_torch = setup.program.torch.is_some();
        if !has_torch && torch::begins_with_python(command) {
            self.check_without_torch(&setup)?;
        }
        if self.alloc_conf.is_empty() {
            torch::settings_without_effect(setup.torch_version(), |name| std::env::var(name).ok())
                .iter()
                .for_each(terminal::message);
        }
        Ok(setup)
    }

    /// Refuses options that change only torch.
    fn check_without_torch(&self, setup: &Setup) -> Result<(), CliError> {
        let why = if self.values == Some(Values::Cpu) {
            "`--values cpu` computes the operations of torch"
        } else if !self.alloc_conf.is_empty() && setup.uses_cuda {
            // A Python without any GPU library may start one that has torch.
            "`--alloc-conf` has settings of torch's allocator"
        } else {
            return Ok(());
        };
        Err(CliError::input(
            format!("{why}, and the program has no torch"),
            "leave it out",
        ))
    }

    /// Returns how the program ended, if it may end otherwise with computed values and can run
    /// again.
    fn ended_by_values(&self, record: &Record) -> Option<String> {
        (self.chosen_values().is_none() && record.obstacle_to_repetition().is_none())
            .then(|| record.end_by_values())
            .flatten()
    }

    /// The real GPU with its limits, and its name.
    fn real_machine(&self, ordinal: u32) -> Result<(Machine, String), CliError> {
        if let Some(fault) = self
            .fail
            .iter()
            .find(|fault| fault.call.is_some_and(Call::is_of_library))
        {
            let message = format!(
                "`--fail {fault}` needs a simulated GPU: on a real one, only requests for memory \
                 can fail"
            );
            return Err(CliError::input(
                message,
                "leave out `--device`, or fail a call such as cudaMalloc",
            ));
        }
        let device = self.real_device(ordinal)?;
        let limits = Limits {
            device: device.total,
            memory: self.memory,
            faults: self.fail.clone(),
            latencies: self.latency.clone(),
        };
        Ok((Machine::Real(ordinal, limits), device.name))
    }

    /// For the range of peaks, runs the program again with a host that runs ahead, if its peaks
    /// depend on the timing of the GPU.
    fn host_ahead(
        &self,
        record: &Record,
        machine: &Machine,
        run: impl FnOnce(&Machine) -> Result<(EndedProgram, Record), Failures>,
    ) -> Result<Option<HostAhead>, Failures> {
        let Machine::Simulated(settings) = machine else {
            return Ok(None);
        };
        if self.events != Some(Timing::Range) || !record.depends_on_timing() {
            return Ok(None);
        }
        let ahead = Machine::Simulated(Settings {
            events: Events::Synchronize,
            ..settings.clone()
        });
        let (ended, record) = run(&ahead)?;
        Ok(Some(HostAhead {
            peak_held: record.peak_held,
            exit_code: ended.end.exit_code(),
        }))
    }

    fn run_once(
        &self,
        prepared: Prepared,
        machine: &Machine,
    ) -> Result<(EndedProgram, Record), Failures> {
        let ended = prepared.run(self.many.report.is_some())?;
        let mut record =
            Record::read(ended.folder(), ended.end, machine).map_err(RunnerError::Lost)?;
        // A shell that becomes the program has effects of its own.
        record.is_watched &= torch::begins_with_python(&self.command);
        Ok((ended, record))
    }

    /// The settings that the figures of a run depend on.
    fn memory_settings(&self, setup: &Setup, machine: &Machine) -> Vec<String> {
        baseline::settings(
            setup.torch_version(),
            &machine.to_string(),
            self.alloc_conf.first().map(String::as_str),
        )
    }

    /// Runs the program in two environments and compares its memory.
    fn compare_environments(
        &self,
        has_many: bool,
        pythons: [&PathBuf; 2],
    ) -> Result<ExitCode, Failures> {
        if has_many
            || self.device.is_some()
            || self.many.report.is_some()
            || self.has_options_of_one_run()
        {
            let message = "two `--python` compare two runs on the simulated GPU, but other options \
                 request many runs, a real GPU or files";
            return Err(CliError::input(
                message,
                "leave the other options out, or give one `--python`",
            )
            .into());
        }
        let prepare = |python: &PathBuf| {
            let command = setup::run_by(python, &self.command);
            let setup = Setup::of(&command, Some(python), self.cuda)?;
            let machine = Machine::Simulated(self.settings(&setup)?);
            Ok::<_, CliError>((command, setup, machine))
        };
        let runs = Failures::all(pythons.into_iter().map(prepare))?;
        let mut done = Vec::new();
        for (command, setup, machine) in &runs {
            let launch = Launch {
                command,
                snapshot: true,
                ..self.launch(machine, setup)
            };
            let (ended, record) = self.run_once(launch.prepare()?, machine)?;
            terminal::message(format_args!(
                "\n{}\n{}",
                shown(command),
                summary::render(&record, machine, None).trim_end()
            ));
            done.push((ended, record, self.memory_settings(setup, machine)));
        }
        let least = if baseline::differ(&done)? {
            Exit::Failed
        } else {
            Exit::Passed
        };
        Ok(done
            .iter()
            .map(|(ended, ..)| ended.end.exit_code())
            .fold(least as u8, u8::max)
            .into())
    }

    fn launch<'a>(&'a self, machine: &'a Machine, setup: &'a Setup) -> Launch<'a> {
        Launch {
            command: &self.command,
            machine,
            setup,
            alloc_conf: self.alloc_conf.first().map(String::as_str),
            snapshot: self.snapshot.is_some() || self.baseline.is_some(),
            ledger: None,
        }
    }

    /// Prints and writes the results. `differences` compares them with the baseline.
    fn finish(
        &self,
        ended: &EndedProgram,
        record: &Record,
        machine: &Machine,
        gpu: Option<&str>,
        differences: impl FnOnce() -> Result<Vec<String>, Failures>,
    ) -> Result<ExitCode, Failures> {
        // Standard output belongs to the program.
        if !self.quiet || record.exit_code != 0 {
            terminal::message(format_args!(
                "\n{}",
                summary::render(record, machine, gpu).trim_end()
            ));
        }
        if let Some(path) = &self.record {
            terminal::save(path, &terminal::json(record)?)?;
        }
        if let Some(path) = &self.snapshot {
            self.keep_snapshots(path, ended, record, machine.memory())?;
        }
        if let Some(path) = &self.unmeasured {
            terminal::save(path, unmeasured(ended.folder()))?;
        }
        let differences = &differences()?;
        let timelines = &machine
            .timelines(ended.folder())
            .map_err(RunnerError::Lost)?;
        let missed = self.not_reached(record, timelines);
        let command = &shown(&self.command);
        let again = &self.again(machine, command);
        self.report(&ProgramReport {
            command,
            again,
            machine,
            gpu,
            record,
            timelines,
            missed: missed.as_deref(),
            differences,
        })?;
        Ok(exit_code(ended, missed.as_deref(), !differences.is_empty()))
    }

    /// The first `--fail` or `--latency` option without effect, or the requirement of a GPU that is
    /// not met.
    fn not_reached(&self, record: &Record, timelines: &[ProgramTimeline]) -> Option<String> {
        let fault =
            faults::not_reached(&self.fail, timelines).map(|fault| format!("--fail {fault}"));
        let latency = || {
            record
                .latency_not_reached(&self.latency)
                .map(|latency| format!("--latency {latency}"))
        };
        let is_idle = self.require_gpu && !record.requested_memory();
        fault
            .or_else(latency)
            .or_else(|| is_idle.then(|| REQUIRE_GPU.to_owned()))
    }

    /// Finds the GPU and checks that it has at least the memory of `--memory`.
    fn real_device(&self, ordinal: u32) -> Result<DeviceFound, CliError> {
        let probe = probe::probe()?;
        let unusable = |error: &dyn std::fmt::Display| {
            CliError::input(error.to_string(), "leave out `--device` to simulate a GPU")
        };
        probe.require(ordinal).map_err(|error| unusable(&error))?;
        let devices = probe.driver.map_err(|error| unusable(&error))?.devices;
        let device = devices
            .into_iter()
            .find(|device| device.ordinal == ordinal)
            .ok_or_else(|| unusable(&"the GPU is gone"))?;
        match self.memory.filter(|memory| *memory > device.total) {
            Some(memory) => {
                let message = format!(
                    "cuda:{ordinal} ({}) has {}, which is less than `--memory {memory}`",
                    device.name, device.total
                );
                Err(CliError::input(
                    message,
                    "give less `--memory`, or leave out `--device` to simulate a GPU",
                ))
            }
            None => Ok(device),
        }
    }

    /// The values that the option chooses, or else the variable or the file.
    fn chosen_values(&self) -> Option<Values> {
        self.values.or(self.settled_values)
    }

    fn gpu(&self) -> &str {
        self.gpu.first().map_or(DEFAULT_GPU, String::as_str)
    }

    fn settings(&self, setup: &Setup) -> Result<Settings, CliError> {
        self.settings_on(device::gpu(self.gpu())?, setup)
    }

    fn settings_on(&self, gpu: &'static Gpu, setup: &Setup) -> Result<Settings, CliError> {
        setup
            .without_code_for(gpu)
            .iter()
            .for_each(terminal::message);
        let memory = self.memory.unwrap_or(gpu.memory);
        let overhead = self.context_overhead.of_context();
        if overhead >= memory {
            let message = format!("a context overhead of {overhead} uses all of {memory}");
            return Err(CliError::input(
                message,
                "give more `--memory` or less `--context-overhead`",
            ));
        }
        let has_torch = setup.program.torch.is_some();
        self.check_shared_memory(gpu)?;
        let default = setup.settings(gpu, memory);
        Ok(self.context_overhead.applied_to(Settings {
            devices: self.devices,
            events: match self.events {
                None | Some(Timing::Range) => Events::Instant,
                Some(Timing::One(events)) => events,
            },
            addresses: self
                .addresses
                .first()
                .copied()
                .unwrap_or(AddressOrder::Linux),
            cudnn_workspace: self
                .cudnn_workspace
                .clone()
                .unwrap_or(default.cudnn_workspace),
            nccl_memory: self.nccl_memory.clone().map(Box::new),
            shared_memory: self.shared_memory.unwrap_or(default.shared_memory),
            values: match self.chosen_values().unwrap_or(default.values) {
                // Only the operations of torch are computed.
                Values::Cpu if !has_torch => Values::Copies,
                values => values,
            },
            faults: self.fail.clone(),
            latencies: self.latency.clone(),
            ..default
        }))
    }

    fn check_shared_memory(&self, gpu: &Gpu) -> Result<(), CliError> {
        match self.shared_memory {
            Some(_) if !gpu.has_memory_of_host() => Err(CliError::input(
                format!(
                    "`--shared-memory` is for GPUs that share the host's memory, but {} has memory \
                     of its own",
                    gpu.name
                ),
                "leave it out, or simulate another GPU, as in `--gpu gb10-128`",
            )),
            Some(SharedMemory::Resident) if self.devices > 1 => Err(CliError::input(
                format!(
                    "`--shared-memory resident` needs one GPU, but `--devices {}` simulates {0} \
                     machines, each with its own memory",
                    self.devices
                ),
                "leave out `--devices`, or give `--shared-memory pinned`",
            )),
            _ => Ok(()),
        }
    }

    fn report(&self, run: &ProgramReport<'_>) -> Result<(), CliError> {
        if let Some(path) = &self.junit {
            terminal::save(path, program::junit(run))?;
        }
        let Some(path) = &self.many.report else {
            return Ok(());
        };
        write_report(path, program::picture(run).as_deref(), |picture| {
            program::markdown(run, picture)
        })
    }

    /// The command that repeats this run.
    fn again(&self, machine: &Machine, command: &str) -> String {
        let on = match machine {
            Machine::Simulated(settings) => {
                let Settings {
                    memory,
                    devices,
                    cuda,
                    addresses,
                    cudnn_workspace,
                    values,
                    ..
                } = settings;
                let events = match self.events {
                    Some(Timing::Range) => "range".to_owned(),
                    None | Some(Timing::One(_)) => settings.events.to_string(),
                };
                format!(
                    "--gpu {} --memory {}B --devices {devices} --cuda {cuda} --context-overhead {} \
                     --events {events} --addresses {addresses} \
                     --cudnn-workspace {cudnn_workspace} --values {values}",
                    shell::quoted(self.gpu()),
                    memory.0,
                    self.context_overhead
                ) + &self
                    .nccl_memory
                    .iter()
                    .map(|table| format!(" --nccl-memory {}", shell::quoted(&table.to_string())))
                    .chain(
                        self.shared_memory
                            .map(|what| format!(" --shared-memory {what}")),
                    )
                    .collect::<String>()
            }
            Machine::Real(ordinal, limits) => {
                let memory = limits
                    .memory
                    .map(|memory| format!(" --memory {}B", memory.0));
                format!("--device cuda:{ordinal}{}", memory.unwrap_or_default())
            }
        };
        let conf = self
            .alloc_conf
            .iter()
            .map(|conf| format!(" --alloc-conf {}", shell::quoted(conf)));
        let faults = self.fail.iter().map(|fault| format!(" --fail {fault}"));
        let latencies = self
            .latency
            .iter()
            .map(|latency| format!(" --latency {latency}"));
        let required = self.require_gpu.then(|| format!(" {REQUIRE_GPU}"));
        let rest: String = conf
            .chain(faults)
            .chain(latencies)
            .chain(required)
            .collect();
        format!("{} exec {on}{rest} -- {command}", program_name())
    }

    fn keep_snapshots(
        &self,
        path: &Path,
        ended: &EndedProgram,
        record: &Record,
        memory: Bytes,
    ) -> Result<(), CliError> {
        let snapshots = record
            .snapshots(ended.folder())
            .map_err(RunnerError::Lost)?;
        for process in record.without_snapshot(&snapshots) {
            terminal::message(format_args!(
                "no snapshot of process {process}: it used the GPU, and ended before it could \
                 write one, or failed to write it"
            ));
        }
        let mut ranks = BTreeSet::new();
        for (index, snapshot) in snapshots.iter().enumerate() {
            // Children inherit the rank, and other characters give the same name.
            let rank = snapshot.rank.as_deref().map(files::slug);
            let rank = match rank.filter(|rank| ranks.insert(rank.clone())) {
                Some(rank) => format!("rank{rank}"),
                None => format!("process{}", snapshot.pid),
            };
            let file = if index == 0 {
                path.to_owned()
            } else {
                path.with_extension(format!("{rank}.pickle"))
            };
            terminal::save(
                &file,
                std::fs::read(&snapshot.path).map_err(RunnerError::Lost)?,
            )?;
            let moment = if snapshot.is_of_error {
                " at an out-of-memory error, the last one that it wrote before it ended"
            } else {
                ""
            };
            terminal::message(format_args!(
                "snapshot of process {}{moment}: {}",
                snapshot.pid,
                file.display()
            ));
        }
        match snapshots.first() {
            Some(first) if first.ended_out_of_memory || first.is_of_error => explain(path, memory)?,
            Some(_) => {}
            None if record.without_snapshot(&snapshots).next().is_none() => {
                terminal::message(
                    "no snapshot: no process with torch was using the GPU at its end",
                );
            }
            None => {}
        }
        Ok(())
    }
}

fn cudnn_workspace(text: &str) -> Result<CudnnWorkspace, String> {
    let model = CudnnWorkspace::parse(text, files::read_to_string);
    let model = model.map_err(|error| error.to_string())?;
    if let CudnnWorkspace::Library(path) = &model {
        files::open(Path::new(path)).map_err(|error| format!("{path}: {error}"))?;
    }
    Ok(model)
}

fn nccl_memory(file: &str) -> Result<NcclMemory, String> {
    NcclMemory::parse(file, files::read_to_string).map_err(|error| error.to_string())
}

/// The table of convolutions with estimated workspaces, without duplicates. A run without any has
/// no file.
fn unmeasured(run: &Path) -> String {
    let rows = std::fs::read_to_string(run.join(UNMEASURED)).unwrap_or_default();
    let rows: BTreeSet<&str> = rows.split_inclusive('\n').collect();
    std::iter::once(HEADER).chain(rows).collect()
}

/// Writes a report and its picture, and prints the report's path. `page` receives the picture's
/// file name.
pub(crate) fn write_report(
    path: &Path,
    svg: Option<&str>,
    page: impl FnOnce(Option<&str>) -> String,
) -> Result<(), CliError> {
    let picture = svg.map_or(Ok(None), |svg| terminal::save_picture(path, svg))?;
    terminal::save(path, page(picture.as_deref()))?;
    terminal::message(format_args!("report: {}", path.display()));
    Ok(())
}

/// The program's exit code, or 1 if the program ended with 0 but an option had no effect or the run
/// differs from its baseline.
fn exit_code(ended: &EndedProgram, not_reached: Option<&str>, differs: bool) -> ExitCode {
    match not_reached {
        Some(REQUIRE_GPU) => terminal::message(format_args!(
            "`{REQUIRE_GPU}` is not met: no process requested memory of a GPU"
        )),
        Some(option) => terminal::message(format_args!(
            "`{option}` had no effect: the program did not make such a call"
        )),
        None => {}
    }
    let least = if differs || not_reached.is_some() {
        Exit::Failed
    } else {
        Exit::Passed
    };
    ended.end.exit_code().max(least as u8).into()
}

/// Prints the explanation of `harness explain`.
fn explain(path: &Path, memory: Bytes) -> Result<(), CliError> {
    let snapshot = snapshots::read(path)?;
    let options = Options {
        memory: Some(memory),
        ..Options::default()
    };
    for device in snapshot.devices() {
        let name = path.display().to_string();
        match causes::explain(&snapshot, device, options) {
            Ok(explanation) if explanation.request.is_some() => {
                let text = text::render(
                    &name,
                    &explanation,
                    terminal::style_of_messages(),
                    terminal::width_of_messages(),
                );
                terminal::message(format_args!("\n{}", text.trim_end()));
            }
            Ok(_) => {}
            Err(error) => terminal::message(format_args!("{name}: {error}")),
        }
    }
    Ok(())
}
