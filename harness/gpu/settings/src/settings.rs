//! [`Settings`] of a simulated GPU. `harness` passes them to a program and its children in an
//! environment variable.

use std::{env, fmt, fs, io, path::Path, str::FromStr};

use harness_allocator::device::faulty::{ANY, Numbered};
pub use harness_allocator::device::sim::AddressOrder;
use harness_allocator::{named_enum, units::Bytes};
use serde::{Deserialize, Serialize};

use crate::driver::{Kernels, Refusal, Sensors, WrongWrite};
use crate::text::{expected, number, words};
use crate::{calls::Call, gpus::Gpu, latency::Latency};
pub use crate::{nccl_memory::NcclMemory, text::SettingsError, workspaces::CudnnWorkspace};

pub const SETTINGS: &str = "HARNESS_GPU";
/// The variable with the folder of the stub libraries that replace NVIDIA's.
pub const LIBRARIES: &str = "HARNESS_GPU_LIBRARIES";
/// The variable with the folder where each process writes its counters.
pub const RUN: &str = "HARNESS_GPU_RUN";
/// The file in the folder of [`RUN`] with a line for each destroyed context: the resources that
/// leaked in it.
pub const LEFT: &str = "left";
/// The file in the folder of [`RUN`] with the names of called functions in order, if
/// [`Settings::list_calls`] is set.
pub const CALLS: &str = "calls";
/// The file in the folder of [`RUN`] with a row for each estimated workspace of cuDNN.
pub const UNMEASURED: &str = "unmeasured";
/// The file in the folder of [`RUN`] that the first process which loads one of our libraries
/// removes ([`begin`](crate::audit::begin)).
pub const UNLOADED: &str = "unloaded";
/// The file in the folder of [`RUN`] with the reason why a process cannot run
/// ([`end_for_linked_runtime`]).
pub const LINKED_RUNTIME: &str = "linked-runtime";
/// The exit code of that process, and of `harness`.
const LINKED_RUNTIME_CODE: i32 = 2;
/// The most devices per machine, as in PyTorch (`C10_COMPILE_TIME_MAX_GPUS`).
pub const MOST_DEVICES: u32 = 120;

/// The folder in the folder of [`RUN`] with the hook of Python processes.
pub const HOOK: &str = "python";
/// A variable whose entry in the environment becomes PYTHONPATH ([`begin`](crate::audit::begin)).
pub const SPARE: &str = "HARNESS_GPU_SPARE";

/// Writes a file that appears with all of its text, also if several threads write it or the process
/// is killed meanwhile.
pub fn publish(file: &Path, text: &str) -> io::Result<()> {
    // SAFETY: the call only returns a number.
    let thread = unsafe { libc::gettid() };
    let unfinished = file.with_extension(format!("{thread}.unfinished"));
    fs::write(&unfinished, text)?;
    fs::rename(unfinished, file)
}

/// Ends the process, because a CUDA runtime that is linked into it would fail in its own way.
/// `harness` ends the program with the reason.
pub fn end_for_linked_runtime(reason: &str) -> ! {
    // Harness ends the program as soon as the file exists.
    let told = env::var_os(RUN)
        .is_some_and(|run| publish(&Path::new(&run).join(LINKED_RUNTIME), reason).is_ok());
    if !told {
        eprintln!("simulated GPU: {reason}");
    }
    // SAFETY: the call ends the process. Nothing else may run: its state is not usable.
    unsafe { libc::_exit(LINKED_RUNTIME_CODE) }
}

/// A simulated machine with equal devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    pub gpu: &'static Gpu,
    pub memory: Bytes,
    pub devices: u32,
    /// Memory that a process uses on a device before its first allocation.
    pub context_overhead: Bytes,
    /// Libraries take memory at their first use ([`crate::context_overhead::LibraryContext`]).
    #[serde(default)]
    pub memory_of_libraries: bool,
    pub events: Events,
    pub addresses: AddressOrder,
    pub cudnn_workspace: CudnnWorkspace,
    /// Without a table, NCCL takes no memory.
    pub nccl_memory: Option<Box<NcclMemory>>,
    pub values: Values,
    /// The most host memory for the contents of all devices, with [`Values::Cpu`].
    #[serde(default)]
    pub host_memory: Bytes,
    #[serde(default)]
    pub shared_memory: SharedMemory,
    /// The CUDA release of the program's libraries.
    pub cuda: Cuda,
    /// The version of cuDNN: major · 10000 + minor · 100 + patch.
    pub cudnn: u32,
    pub faults: Vec<Fault>,
    /// The only device whose attempts the faults count.
    pub faulty_device: Option<u32>,
    pub latencies: Vec<Latency>,
    pub kernels: Kernels,
    pub mapping: bool,
    pub pools: bool,
    pub nvml: bool,
    /// NVML shows the devices as MIG instances.
    pub mig: bool,
    /// NVML shows other process numbers than the processes see, as in a container.
    pub container: bool,
    /// Memory of each device in use by a process outside of the run.
    pub others: Bytes,
    /// Other processes use the devices at the same time; the ledger lists their memory.
    pub processes: bool,
    pub sensors: Sensors,
    /// Calls of the driver and of NVML are listed in [`CALLS`].
    pub list_calls: bool,
    pub refusals: Vec<Refusal>,
    pub wrong_write: Option<WrongWrite>,
    /// Verify kernels never find a difference.
    pub blind_verify: bool,
}

/// When an event completes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Events {
    #[default]
    Instant,
    /// When the host waits for it, for later work of its stream, or for the device.
    Synchronize,
    /// As [`Events::Synchronize`], or after this much more work: kernels, graphs, host functions,
    /// copies and event records.
    Lag(u64),
}

named_enum! {
    /// The values that a program reads from a device whose kernels are no-ops.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    Values {
        Zeros = "zeros",
        /// Small copies keep their bytes until a kernel may overwrite them. All other bytes are
        /// zeros.
        Copies = "copies",
        /// The CPU computes the operations of PyTorch.
        Cpu = "cpu",
    }
}

named_enum! {
    /// The host memory that counts as memory of the GPU.
    #[derive(Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    SharedMemory {
        /// The GPU has memory of its own.
        #[default]
        None = "none",
        /// The GPU shares the host's memory. Page-locked memory counts.
        Pinned = "pinned",
        /// As [`SharedMemory::Pinned`], and the resident memory of the run's processes counts too.
        Resident = "resident",
    }
}

named_enum! {
    /// A CUDA release. Structures differ between releases.
    #[derive(Serialize, Deserialize)]
    Cuda {
        V12 = "12",
        V13 = "13",
    }
}

/// The variable with the versions of NVIDIA's packages, as in `cublas=13.1.0.3,cufft=12.0.0.61`.
pub const VERSIONS: &str = "HARNESS_GPU_VERSIONS";

impl Cuda {
    /// The version that the driver returns: new enough for every program of the release.
    pub const fn driver_version(self) -> i32 {
        match self {
            Self::V12 => 12_090,
            Self::V13 => 13_020,
        }
    }
}

/// Injected out of memory failures: `CALL:FIRST[:COUNT][:MIN_SIZE]`. Attempts of at least
/// `min_size` bytes are counted from 1, over all devices of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// `None`, written `any`, counts all calls that request device memory together.
    pub call: Option<Call>,
    /// The number of the first attempt that fails.
    pub first: u64,
    /// How many attempts fail, or [`Self::UNTIL_ERROR`].
    pub count: u64,
    /// Smaller attempts do not count.
    pub min_size: Bytes,
}

impl Fault {
    /// Attempts fail until a library raises its out of memory error in the program.
    pub const UNTIL_ERROR: u64 = u64::MAX;

    pub fn counts(&self, call: Call, size: Bytes) -> bool {
        size >= self.min_size
            && self
                .call
                .map_or(call.requests_device_memory(), |counted| counted == call)
    }
}

impl Settings {
    /// A machine with one such GPU and the default settings.
    pub const fn new(gpu: &'static Gpu, memory: Bytes) -> Self {
        Self {
            gpu,
            memory,
            devices: 1,
            context_overhead: Bytes::ZERO,
            memory_of_libraries: false,
            events: Events::Instant,
            addresses: AddressOrder::Linux,
            cudnn_workspace: CudnnWorkspace::Estimate,
            nccl_memory: None,
            values: Values::Zeros,
            host_memory: Bytes::ZERO,
            shared_memory: if gpu.has_memory_of_host() {
                SharedMemory::Pinned
            } else {
                SharedMemory::None
            },
            cuda: Cuda::V13,
            cudnn: 91_900,
            faults: Vec::new(),
            faulty_device: None,
            latencies: Vec::new(),
            kernels: Kernels::NoOp,
            mapping: true,
            pools: true,
            nvml: true,
            mig: false,
            container: false,
            others: Bytes::ZERO,
            processes: false,
            sensors: Sensors::NOTHING,
            list_calls: false,
            refusals: Vec::new(),
            wrong_write: None,
            blind_verify: false,
        }
    }

    /// The name of the devices. If kernels execute, times are measured, and the name prevents
    /// confusion with times of a GPU.
    pub fn device_name(&self) -> &'static str {
        match self.kernels {
            Kernels::NoOp => &self.gpu.device,
            Kernels::Execute => "Simulated GPU",
        }
    }

    /// The release of the driver: the first one with the CUDA release. If kernels execute, the text
    /// prevents confusion with a GPU.
    pub const fn driver_release(&self) -> &'static str {
        match (self.kernels, self.cuda) {
            (Kernels::Execute, _) => "simulated",
            (Kernels::NoOp, Cuda::V12) => "575.51.03",
            (Kernels::NoOp, Cuda::V13) => "580.65.06",
        }
    }

    /// Makes the n-th call of a function, from 1, return an error code; 0 means every call.
    #[must_use]
    pub fn failing(mut self, function: &str, nth: u64, code: u32) -> Self {
        self.refusals.push(Refusal {
            function: function.to_owned(),
            nth,
            code: Some(code),
        });
        self
    }

    /// Makes the n-th call of a function, and every later call, never return.
    #[must_use]
    pub fn hanging(mut self, function: &str, nth: u64) -> Self {
        self.refusals.push(Refusal {
            function: function.to_owned(),
            nth,
            code: None,
        });
        self
    }
}

/// The text in records. It lacks the settings that only tests choose.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            gpu,
            memory,
            devices,
            context_overhead,
            events,
            addresses,
            cudnn_workspace,
            values,
            cuda,
            cudnn,
            faults,
            ..
        } = self;
        write!(
            f,
            "gpu={};memory={};devices={devices};context_overhead={};events={events}",
            gpu.name, memory.0, context_overhead.0
        )?;
        if self.memory_of_libraries {
            f.write_str(";memory_of_libraries=h200")?;
        }
        write!(
            f,
            ";addresses={addresses};cudnn_workspace={cudnn_workspace};values={values};cuda={cuda}\
             ;cudnn={cudnn}"
        )?;
        if self.shared_memory != SharedMemory::None {
            write!(f, ";shared_memory={}", self.shared_memory)?;
        }
        faults
            .iter()
            .try_for_each(|fault| write!(f, ";fail={fault}"))?;
        self.latencies
            .iter()
            .try_for_each(|latency| write!(f, ";latency={latency}"))
    }
}

words!(Values, "a mode of values");
words!(Cuda, "a CUDA release");
words!(SharedMemory, "host memory that counts as memory of the GPU");

impl fmt::Display for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Instant => f.write_str("instant"),
            Self::Synchronize => f.write_str("synchronize"),
            Self::Lag(work) => write!(f, "lag:{work}"),
        }
    }
}

impl FromStr for Events {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        match (text, text.strip_prefix("lag:")) {
            ("instant", _) => Ok(Self::Instant),
            ("synchronize", _) => Ok(Self::Synchronize),
            (_, Some(work)) => number(work).map(Self::Lag),
            _ => Err(expected(
                text,
                "a model of events",
                ["instant", "synchronize", "lag:N"].into_iter(),
            )),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}:{}:{}",
            self.call.map_or(ANY, Call::name),
            self.first,
            self.count,
            self.min_size.0
        )
    }
}

impl FromStr for Fault {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let (name, numbered) = Numbered::parse(text);
        let calls = || Call::ALL.iter().copied().filter(|call| call.can_fail());
        let named = calls().find(|call| call.name() == name);
        if named.is_none() && name != ANY {
            return Err(expected(
                name,
                "a call that can fail",
                calls().map(Call::name).chain([ANY]),
            ));
        }
        let form = || {
            SettingsError(format!(
                "`{text}` is not CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`"
            ))
        };
        let Numbered {
            first,
            count,
            min_size,
        } = numbered.ok_or_else(form)?;
        Ok(Self {
            call: named,
            first,
            count,
            min_size,
        })
    }
}

#[cfg(test)]
mod tests;
