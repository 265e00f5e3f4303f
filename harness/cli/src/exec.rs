//! `harness exec`: an unmodified PyTorch program on a simulated GPU, many runs of it in `trials`; or on a real GPU, limited, in `limited`.

pub(crate) mod limited;
pub(crate) mod trials;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use clap::builder::PossibleValuesParser;
use harness_allocator::units::Bytes;
use harness_base::{files, shell};
use harness_devices::shipped::Shipped;
use harness_exec::cache::CacheError;
use harness_exec::launch::{self, Ended, Launch, LaunchError};
use harness_exec::record::Record;
use harness_exec::setup::{Setup, SetupError};
use harness_exec::summary;
use harness_exec::timeline::Timeline;
use harness_exec::torch::{Torch, TorchError};
use harness_exec::trials::faults;
use harness_exec::trials::runner::{Machine, On};
use harness_explain::causes::{self, Options};
use harness_gpu_settings::gpus::{GPUS, Gpu};
use harness_gpu_settings::latency::Latency;
use harness_gpu_settings::settings::{AddressOrder, CudnnWorkspace, Events, Fault, MOST_DEVICES, Settings, Values};
use harness_report::explain::text;
use harness_report::program::{self, Program};

use super::error::{CliError, Failures};
use super::exit::Exit;
use super::terminal::{self, Terminal};
use super::{device, snapshots};

/// What is simulated where `--gpu` names nothing else.
pub(crate) const DEFAULT_GPU: &str = "h100-80";

const EXAMPLES: &str = "Examples:
  harness exec --memory 24GiB -- python train.py
  harness exec --gpu a100-40 --snapshot oom.pickle -- python train.py --batch 64
  harness exec --memory 24GiB --report report.md --junit junit.xml -- python train.py
  harness exec --memory 8GiB --fail cudaMalloc:40:2 -- python -m pytest tests/test_recovery.py
  harness exec --every-fault --expect recovers -- python train.py
  harness exec --least-memory -- python train.py
  harness exec --memory 24GiB --alloc-conf '' --alloc-conf expandable_segments:True -- python train.py
  harness exec --device cuda:0 --memory 24GiB --fail cudaMalloc:40:2 -- python train.py
  harness exec --gpu h100-80 --devices 4 --record run.json -- torchrun --nproc-per-node 4 train.py

PyTorch's own allocator and host code run for real, so what is reserved, refused and retried is what it does on such a GPU. Kernels do nothing:
times mean nothing, and what the program reads back is zeros (`--values`). No GPU, driver or CUDA library is needed; torch has to be a build for CUDA 12 or 13.
The GPU's compute capability decides how much workspace libraries ask for, so `--gpu` changes the result.

The program has our standard input, output and error, and its exit code is ours (128 + n where signal n ended it). Nothing of it is run and the code is 2
where the command or the torch that it imports cannot be used; it is 4 where the results cannot be written.
Of many runs the first has our standard output and error, and none has our standard input. The exit code is 0, 1 where `--expect` or a failure asked for
was not met, where the first run does not end with 0, or where no setting ends well, and 130 after Ctrl-C, which shows what was done so far.
Libraries made for a torch are kept in ~/.cache/harness, or in the folder that HARNESS_CACHE names.";

/// Run a PyTorch program, as it is, on a simulated GPU with as much memory as you like, or on a real one with less.
#[derive(Args)]
#[command(after_help = EXAMPLES, arg_required_else_help = true)]
pub(super) struct Exec {
    /// Memory of each simulated GPU, as in `24GiB`, or of a real one for each process; all that the GPU has without it.
    #[arg(long, value_name = "SIZE", value_parser = device::memory)]
    memory: Option<Bytes>,
    /// Run on this real GPU instead of a simulated one, as in `cuda:0`: `--memory` limits how much of its memory the program gets, `--fail` lets attempts fail,
    /// and all else is real. NVIDIA's driver and the program's own CUDA libraries are used.
    #[arg(long, value_name = "cuda:N", value_parser = limited::ordinal, conflicts_with_all = [
        "gpu", "devices", "context_overhead", "events", "addresses", "cudnn_workspace", "values",
    ])]
    device: Option<u32>,
    /// The GPU that the program is told of.
    #[arg(long, value_name = "NAME", default_value = DEFAULT_GPU, value_parser = PossibleValuesParser::new(GPUS.map(|gpu| gpu.name)))]
    gpu: String,
    /// Number of simulated GPUs. All processes of the program see all of them, and share their memory.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_DEVICES)))]
    devices: u32,
    /// Memory that a process takes before its first allocation, for what the CUDA context and loaded libraries take on a real GPU.
    #[arg(long, value_name = "SIZE", default_value = "0B", value_parser = Bytes::parse)]
    context_overhead: Bytes,
    /// When events are complete: `instant`; `synchronize`, when the host waits for them; `lag:N`, also when N more pieces of work were submitted.
    #[arg(long, value_name = "MODEL", default_value = "instant")]
    events: Events,
    /// Which addresses allocations get: `up`, `down`, or `reuse`, the lowest that are free. PyTorch prefers low addresses, so it can change peaks.
    /// With `--least-memory` all are tried, and of several `--alloc-conf` each that comes close to the limit; how far they differ is said.
    #[arg(long, value_name = "ORDER", default_value = "up")]
    addresses: AddressOrder,
    /// How much workspace cuDNN asks for: `operands`, a model that goes by the operands of a convolution, or `none`.
    #[arg(long, value_name = "MODEL", default_value = "operands")]
    cudnn_workspace: CudnnWorkspace,
    /// What the program reads back: `zeros`; `copies`, what small copies wrote until a kernel may have overwritten it, the default where there are
    /// several devices, since processes that talk to each other read what they sent; or `small` (experimental): each operation of Python on tensors
    /// of at most 64 KiB is done on the CPU beside, so that masks, stop tests and `generate` decide by real values.
    #[arg(long, value_name = "WHAT")]
    values: Option<Values>,
    /// Let attempts of a call fail, counted from 1: COUNT of them (1), of those of at least MIN_SIZE. PyTorch tries again at once, so COUNT 2 makes
    /// an out-of-memory error. `any` counts all calls that get device memory together. May be repeated. Where the program does not come to the
    /// first attempt, the exit code is 1.
    #[arg(long, value_name = "CALL:FIRST[:COUNT][:MIN_SIZE]")]
    fail: Vec<Fault>,
    /// Let each call of a function take so much longer, as in `cudaFree:3ms`. `any` stands for the calls that get device memory, `all` for all that can
    /// be named: cudaMalloc, cuMemCreate, cudaMallocAsync, cudaHostAlloc, cudaFree, cudaFreeAsync and cuMemUnmap; of the driver's functions those that do the same
    /// count too. The program really waits, and times between events show it. May be repeated. Where the program makes no such call, the exit code is 1.
    #[arg(long, value_name = "CALL:DURATION")]
    latency: Vec<Latency>,
    /// Settings of PyTorch's allocator, as PYTORCH_ALLOC_CONF holds them. Several, each with this option, are compared: one run for each.
    #[arg(long, value_name = "CONF")]
    alloc_conf: Vec<String>,
    /// The Python whose torch the program imports, where the command does not tell.
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Write what each process did, as JSON.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Write a memory snapshot at the end; where an out-of-memory error ended the program, it is explained. Further processes write FILE.rankN.pickle.
    #[arg(long, value_name = "FILE")]
    snapshot: Option<PathBuf>,
    /// Write the run as a JUnit test case, which fails where the exit code is not 0.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    #[command(flatten)]
    many: trials::Options,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Exec {
    pub(super) fn run(self, terminal: &Terminal) -> Result<ExitCode, Failures> {
        let has_many = self.many.are_asked_for(&self.alloc_conf)?;
        if has_many && (self.record.is_some() || self.snapshot.is_some() || self.junit.is_some()) {
            let message = "`--record`, `--snapshot` and `--junit` are for one run, and many are asked for";
            return Err(CliError::input(message, "leave them out").into());
        }
        if let Some(ordinal) = self.device {
            let torch = Torch::find(&self.command, self.python.as_deref()).map_err(of_torch)?;
            return self.run_limited(ordinal, has_many, &torch, terminal);
        }
        let setup = Setup::of(&self.command, self.python.as_deref()).map_err(of_setup)?;
        let settings = self.settings(&setup)?;
        let launch = Launch {
            command: &self.command,
            settings: &settings,
            libraries: &setup.libraries,
            interposition: setup.interposition(),
            alloc_conf: self.alloc_conf.first().map(String::as_str),
            snapshot: self.snapshot.is_some(),
            ledger: None,
        };
        if has_many {
            return self.many.run(On::Simulated(launch), &self.alloc_conf, terminal);
        }
        let ended = launch.run(self.many.report().is_some()).map_err(of_launch)?;
        let record = Record::read(ended.folder(), ended.end, &settings).map_err(|error| lost(&error))?;
        let summary = summary::render(&record, &settings);
        self.finish(&ended, &record, &summary, (&Machine::Simulated(settings), None), terminal)
    }

    /// Tells what came of a run on a machine, which is a real GPU if it has a name.
    fn finish(
        &self,
        ended: &Ended,
        record: &Record,
        summary: &str,
        (machine, gpu): (&Machine, Option<&str>),
        terminal: &Terminal,
    ) -> Result<ExitCode, Failures> {
        self.tell(ended, record, summary, machine.memory(), terminal)?;
        let timelines = &machine.timelines(ended.folder()).map_err(|error| lost(&error))?;
        let missed = self.not_reached(record, timelines);
        let command: Vec<String> = self.command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let command = &shell::command(&command);
        let again = &self.again(machine, command);
        self.report(&Program { command, again, machine, gpu, record, timelines, missed: missed.as_deref() })?;
        Ok(exit_code(ended, missed.as_deref()))
    }

    /// The first failure or latency that was asked for and did not happen, as its option.
    fn not_reached(&self, record: &Record, timelines: &[Timeline]) -> Option<String> {
        let fault = faults::not_reached(&self.fail, timelines).map(|fault| format!("--fail {fault}"));
        fault.or_else(|| record.latency_not_reached(&self.latency).map(|latency| format!("--latency {latency}")))
    }

    fn settings(&self, setup: &Setup) -> Result<Settings, CliError> {
        let unknown = || CliError::input(format!("there is no GPU `{}`", self.gpu), "see `harness exec --help`");
        let gpu = Gpu::named(&self.gpu).ok_or_else(unknown)?;
        let memory = self.memory.or_else(|| Some(Shipped::named(&self.gpu)?.memory)).ok_or_else(unknown)?;
        if self.context_overhead >= memory {
            let message = format!("a context overhead of {} leaves nothing of {memory}", self.context_overhead);
            return Err(CliError::input(message, "give more `--memory`, or less `--context-overhead`"));
        }
        Ok(Settings {
            devices: self.devices,
            context_overhead: self.context_overhead,
            events: self.events,
            addresses: self.addresses,
            cudnn_workspace: self.cudnn_workspace,
            values: self.values.unwrap_or(if self.devices > 1 { Values::Copies } else { Values::Zeros }),
            faults: self.fail.clone(),
            latencies: self.latency.clone(),
            ..setup.settings(gpu, memory)
        })
    }

    /// Everything that is said of a run, to standard error: standard output is the program's.
    fn tell(&self, ended: &Ended, record: &Record, summary: &str, memory: Bytes, terminal: &Terminal) -> Result<(), Failures> {
        terminal::tell(format_args!("\n{}", summary.trim_end()));
        if let Some(path) = &self.record {
            let text = serde_json::to_string_pretty(record).map_err(|error| lost(&error.into()))?;
            files::write(path, &(text + "\n")).map_err(|error| unwritten(path, error))?;
        }
        if let Some(path) = &self.snapshot {
            self.keep_snapshots(path, ended, record, memory, terminal)?;
        }
        Ok(())
    }

    /// The report and the test case, where they are wanted.
    fn report(&self, run: &Program<'_>) -> Result<(), CliError> {
        let write = |path: &Path, text: &str| files::write(path, text).map_err(|error| unwritten(path, error));
        if let Some(path) = &self.junit {
            write(path, &program::junit(run))?;
        }
        let Some(path) = self.many.report() else { return Ok(()) };
        write_report(&path, program::picture(run).as_deref(), |picture| program::markdown(run, picture))
    }

    /// A command that does the same again.
    fn again(&self, machine: &Machine, command: &str) -> String {
        let on = match machine {
            Machine::Simulated(settings) => {
                let Settings { gpu, memory, devices, context_overhead, events, addresses, cudnn_workspace, values, .. } = settings;
                format!(
                    "--gpu {} --memory {}B --devices {devices} --context-overhead {}B --events {events} --addresses {addresses} \
                     --cudnn-workspace {cudnn_workspace} --values {values}",
                    gpu.name, memory.0, context_overhead.0
                )
            }
            Machine::Real(ordinal, limits) => {
                let memory = limits.memory.map(|memory| format!(" --memory {}B", memory.0));
                format!("--device cuda:{ordinal}{}", memory.unwrap_or_default())
            }
        };
        let conf = self.alloc_conf.iter().map(|conf| format!(" --alloc-conf {}", shell::quoted(conf)));
        let faults = self.fail.iter().map(|fault| format!(" --fail {fault}"));
        let latencies = self.latency.iter().map(|latency| format!(" --latency {latency}"));
        let rest: String = conf.chain(faults).chain(latencies).collect();
        format!("harness exec {on}{rest} -- {command}")
    }

    fn keep_snapshots(&self, path: &Path, ended: &Ended, record: &Record, memory: Bytes, terminal: &Terminal) -> Result<(), CliError> {
        let snapshots = record.snapshots(ended.folder()).map_err(|error| lost(&error))?;
        for (index, snapshot) in snapshots.iter().enumerate() {
            let rank = snapshot.rank.as_ref().map_or_else(|| format!("process{}", snapshot.pid), |rank| format!("rank{rank}"));
            let beside = if index == 0 { path.to_owned() } else { path.with_extension(format!("{rank}.pickle")) };
            copy(&snapshot.path, &beside).map_err(|error| unwritten(&beside, error))?;
            terminal::tell(format_args!("snapshot of process {}: {}", snapshot.pid, beside.display()));
        }
        match snapshots.first() {
            Some(first) if first.ended_out_of_memory => explain(path, memory, terminal),
            Some(_) => Ok(()),
            None => {
                terminal::tell("no snapshot: no process with torch used the GPU to its end");
                Ok(())
            }
        }
    }
}

/// Writes a report with its picture beside it, and says where it is. The page is told the name of the picture.
pub(crate) fn write_report(path: &Path, svg: Option<&str>, page: impl FnOnce(Option<&str>) -> String) -> Result<(), CliError> {
    let write = |path: &Path, text: &str| files::write(path, text).map_err(|error| unwritten(path, error));
    let picture = path.with_extension("svg");
    if let Some(svg) = svg {
        write(&picture, svg)?;
    }
    let name = picture.file_name().map(|name| name.to_string_lossy().into_owned()).filter(|_| svg.is_some());
    write(path, &page(name.as_deref()))?;
    terminal::tell(format_args!("report: {}", path.display()));
    Ok(())
}

/// The program's own, unless something that was asked for by this option did not happen.
fn exit_code(ended: &Ended, not_reached: Option<&str>) -> ExitCode {
    match not_reached {
        Some(option) => {
            terminal::tell(format_args!("`{option}` was not reached: no call was struck by it"));
            // What was to be tested was not; another exit code says more.
            ended.end.exit_code().max(Exit::Failed as u8).into()
        }
        None => ended.end.exit_code().into(),
    }
}

/// Why memory ran out, in the words of `harness explain`.
fn explain(path: &Path, memory: Bytes, terminal: &Terminal) -> Result<(), CliError> {
    let snapshot = snapshots::read(path)?;
    let options = Options { memory: Some(memory), ..Options::default() };
    for device in causes::devices(&snapshot) {
        let name = path.display().to_string();
        match causes::explain(&snapshot, device, options) {
            Ok(explanation) if explanation.request.is_some() => {
                let text = text::render(&name, &explanation, terminal.style_of_messages(), terminal::width_of_messages());
                terminal::tell(format_args!("\n{}", text.trim_end()));
            }
            Ok(_) => {}
            Err(error) => terminal::tell(format_args!("{name}: {error}")),
        }
    }
    Ok(())
}

/// Into a file that the user named.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if let Some(folder) = to.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder)?;
    }
    files::write_by(to, |file| io::copy(&mut File::open(from)?, file).map(Ok::<_, std::convert::Infallible>)).map(|_| ())
}

pub(crate) fn unwritten(path: &Path, error: io::Error) -> CliError {
    CliError::Output { target: Some(path.to_owned()), error, help: "choose another place, or make room" }
}

pub(crate) fn lost(error: &io::Error) -> CliError {
    let message = format!("what the program's processes left behind cannot be read: {error}");
    CliError::Internal { message, help: "see whether something clears the folder for temporary files; TMPDIR names another one" }
}

pub(crate) fn of_setup(error: SetupError) -> CliError {
    match error {
        SetupError::Torch(error) => of_torch(error),
        SetupError::Cache(error) => of_cache(error),
        SetupError::Launch(error) => of_launch(error),
    }
}

fn of_torch(error: TorchError) -> CliError {
    let help = match &error {
        TorchError::NoCommand { .. } => "give the program and its arguments behind `--`, as in `-- python train.py`",
        TorchError::NoPython { .. } => "activate the environment of the program, or name its Python by `--python PATH`",
        TorchError::Broken { .. } => "run the program without `harness exec` first, or name its Python by `--python PATH`",
        TorchError::NoTorch { .. } => {
            "activate the environment that has torch, or name its Python by `--python PATH`; `pip install torch` installs a build for CUDA"
        }
        TorchError::TooOld { .. } => "install a newer torch",
        TorchError::NotCuda { .. } | TorchError::OtherCuda { .. } => {
            "install a build for CUDA, as `pip install torch` does on Linux; it needs neither a GPU nor, with `--no-deps`, NVIDIA's packages"
        }
        TorchError::OtherMachine { .. } => "use a Python for x86-64 that is linked to the GNU C library",
        TorchError::SpecialRights { .. } => "use a Python without special rights, as that of a virtual environment",
    };
    CliError::input(error.to_string(), help)
}

fn of_cache(error: CacheError) -> CliError {
    let help = match &error {
        CacheError::Unwritable { .. } | CacheError::Nowhere | CacheError::UnloadablePath(_) | CacheError::Untrusted(_) => {
            "set HARNESS_CACHE to a folder of your own with a short path"
        }
        CacheError::Imports(_) => "install torch again",
        CacheError::StaticCuda(_) => "install torch from PyPI, which uses CUDA's shared libraries",
    };
    CliError::input(error.to_string(), help)
}

pub(crate) fn of_launch(error: LaunchError) -> CliError {
    match error {
        LaunchError::Start { .. } => CliError::input(error.to_string(), "give a program that can be started"),
        LaunchError::OldLibc(_) => CliError::input(error.to_string(), "use a newer system, or leave `--device` out for a simulated GPU"),
        LaunchError::UnloadablePath(_) => {
            CliError::input(error.to_string(), format!("let {} name a copy of it in another folder", launch::LIMITER_VARIABLE))
        }
        LaunchError::NotLoaded => CliError::input(error.to_string(), "see `LD_DEBUG=files` for the dynamic linker's reason"),
        LaunchError::NoCore | LaunchError::NoLimiter => {
            let help = "run `ci/install` in a copy of the project, or `pip install \"$(ci/wheel)\"` there: `cargo install` installs the program alone";
            CliError::Internal { message: error.to_string(), help }
        }
        LaunchError::Folder(_) => CliError::Internal { message: error.to_string(), help: "make room, or let TMPDIR name another folder" },
    }
}
