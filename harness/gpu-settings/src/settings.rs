//! [`Settings`] of a simulated GPU: written to one environment variable by whoever starts a program, read from it in the program and in its
//! children.

use std::fmt;
use std::str::FromStr;

use harness_allocator::device::faulty::{ANY, Numbered};
use harness_allocator::units::Bytes;

use crate::calls::FaultyCall;
use crate::driver::{Kernels, Refusal, Sensors, WrongWrite};
use crate::gpus::{GPUS, Gpu};
use crate::latency::Latency;
pub use crate::text::SettingsError;
use crate::text::{expected, number, words};

/// The variable that carries [`Settings`].
pub const SETTINGS: &str = "HARNESS_GPU";
/// The variable with the folder of the libraries that stand in for NVIDIA's.
pub const LIBRARIES: &str = "HARNESS_GPU_LIBRARIES";
/// The variable with the folder where each process writes its counters.
pub const RUN: &str = "HARNESS_GPU_RUN";
/// The file in the folder of [`RUN`] with a line for each context that was given back: what was left in it.
pub const LEFT: &str = "left";
/// The file in the folder of [`RUN`] with the names of functions that were called, in their order, where that is asked for.
pub const CALLS: &str = "calls";
/// The most devices a machine can have.
pub const MOST_DEVICES: u32 = 16;

/// What the simulated machine is like. Each device is the same.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Settings {
    /// What the program is told of the GPU besides its memory.
    pub gpu: &'static Gpu,
    /// Memory of each device.
    pub memory: Bytes,
    pub devices: u32,
    /// What a process takes of a device before its first allocation.
    pub context_overhead: Bytes,
    /// When an event is complete.
    pub events: Events,
    /// Which addresses allocations get.
    pub addresses: AddressOrder,
    /// How much workspace cuDNN asks for.
    pub cudnn_workspace: CudnnWorkspace,
    /// What a program reads back.
    pub values: Values,
    /// The CUDA release that the program's libraries are of.
    pub cuda: Cuda,
    /// The version that cuDNN tells: major · 10000 + minor · 100 + patch.
    pub cudnn: u32,
    /// Attempts to get memory that fail.
    pub faults: Vec<Fault>,
    /// Calls that take longer.
    pub latencies: Vec<Latency>,
    pub kernels: Kernels,
    /// Whether addresses and physical memory can be had apart (virtual memory management).
    pub mapping: bool,
    /// Whether there are stream-ordered pools.
    pub pools: bool,
    /// Whether there is an NVML library: whoever starts the program leaves it out.
    pub nvml: bool,
    /// Whether NVML names the devices as multi-instance slices.
    pub mig: bool,
    /// Whether NVML numbers this process otherwise than it sees itself, as in a container.
    pub container: bool,
    /// What another process holds of each device.
    pub others: Bytes,
    /// Whether other processes use the devices meanwhile; the ledger says what each of them holds.
    pub processes: bool,
    /// What the sensors of the devices tell.
    pub sensors: Sensors,
    /// Whether the name of each function of the driver and of NVML is written to [`CALLS`] when it is called.
    pub list_calls: bool,
    /// Calls of the driver and of NVML that are refused.
    pub refusals: Vec<Refusal>,
    /// A fill kernel that writes one byte wrongly.
    pub wrong_write: Option<WrongWrite>,
    /// Whether verify kernels find nothing, whatever memory holds.
    pub blind_verify: bool,
}

/// When an event is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Events {
    /// At once.
    Instant,
    /// When the host waits for it, for later work of its stream, or for the device.
    Synchronize,
    /// As [`Events::Synchronize`], and by itself when so much more work was submitted: kernels, graphs, host functions, copies and records.
    Lag(u64),
}

/// Which addresses allocations get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressOrder {
    /// Upwards; none is used twice.
    Up,
    /// Downwards; none is used twice.
    Down,
    /// The lowest that are free.
    Reuse,
}

/// How much workspace cuDNN asks for. A model: real figures depend on the algorithm that cuDNN chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum CudnnWorkspace {
    None,
    /// As much as the operands that are not channels-last, and for filter gradients four times the filter.
    Operands,
}

/// What a program reads back from a device on which kernels do nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Values {
    Zeros,
    /// What small copies wrote, until a kernel may have overwritten it; zeros otherwise.
    Copies,
    /// As [`Values::Copies`], and in Python what operations on small tensors give, which are done on the CPU beside.
    Small,
}

/// A CUDA release: structures differ between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Cuda {
    V12,
    V13,
}

impl Cuda {
    /// The version as the driver tells it, not older than any program of the release was built for.
    #[must_use]
    pub const fn driver_version(self) -> i32 {
        match self {
            Self::V12 => 12_090,
            Self::V13 => 13_020,
        }
    }
}

/// Attempts that fail for lack of memory though there is some: `CALL:FIRST[:COUNT][:MIN_SIZE]`. Attempts of at least `min_size` bytes are
/// counted from 1, over all devices of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The call; `None`, written `any`, for all that get device memory, counted together.
    pub call: Option<FaultyCall>,
    /// The first attempt that fails.
    pub first: u64,
    /// How many fail.
    pub count: u64,
    /// Smaller attempts neither count nor fail.
    pub min_size: Bytes,
}

impl Fault {
    /// Whether it counts this attempt.
    #[must_use]
    pub fn counts(&self, call: FaultyCall, size: Bytes) -> bool {
        size >= self.min_size && self.call.map_or(call != FaultyCall::HostAlloc, |counted| counted == call)
    }
}

impl Settings {
    /// A machine with one such GPU: events complete at once, addresses go upwards, no workspaces, zeros.
    #[must_use]
    pub const fn new(gpu: &'static Gpu, memory: Bytes) -> Self {
        Self {
            gpu,
            memory,
            devices: 1,
            context_overhead: Bytes::ZERO,
            events: Events::Instant,
            addresses: AddressOrder::Up,
            cudnn_workspace: CudnnWorkspace::Operands,
            values: Values::Zeros,
            cuda: Cuda::V13,
            cudnn: 91_900,
            faults: Vec::new(),
            latencies: Vec::new(),
            kernels: Kernels::Skipped,
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

    /// The name that the devices have. Where kernels are done, times are measured: nobody must take them for those of a GPU.
    #[must_use]
    pub const fn device_name(&self) -> &'static str {
        match self.kernels {
            Kernels::Skipped => self.gpu.device,
            Kernels::Done => "Simulated GPU",
        }
    }

    /// The same machine, on which the n-th call of a function, counted from 1, or every one where that is 0, answers with this code.
    #[must_use]
    pub fn failing(mut self, function: &str, nth: u64, code: u32) -> Self {
        self.refusals.push(Refusal { function: function.to_owned(), nth, code: Some(code) });
        self
    }

    /// The same machine, on which the n-th call of a function never returns, nor any call after it.
    #[must_use]
    pub fn hanging(mut self, function: &str, nth: u64) -> Self {
        self.refusals.push(Refusal { function: function.to_owned(), nth, code: None });
        self
    }

    /// Switches, by the names that they have in the text.
    fn switches(&mut self) -> [(&'static str, &mut bool); 8] {
        [
            ("mapping", &mut self.mapping),
            ("pools", &mut self.pools),
            ("nvml", &mut self.nvml),
            ("mig", &mut self.mig),
            ("container", &mut self.container),
            ("processes", &mut self.processes),
            ("list_calls", &mut self.list_calls),
            ("blind_verify", &mut self.blind_verify),
        ]
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, memory, devices, context_overhead, events, addresses, cudnn_workspace, values, cuda, cudnn, faults, .. } = self;
        write!(f, "gpu={};memory={};devices={devices};context_overhead={};events={events}", gpu.name, memory.0, context_overhead.0)?;
        write!(f, ";addresses={addresses};cudnn_workspace={cudnn_workspace};values={values};cuda={cuda};cudnn={cudnn}")?;
        faults.iter().try_for_each(|fault| write!(f, ";fail={fault}"))?;
        self.latencies.iter().try_for_each(|latency| write!(f, ";latency={latency}"))?;
        // What tests alone choose is told where it was chosen.
        let Self { kernels, others, sensors, refusals, wrong_write, .. } = self;
        let mut usual = Self::new(gpu, *memory);
        let mut tell = |is_usual: bool, setting: fmt::Arguments<'_>| if is_usual { Ok(()) } else { write!(f, ";{setting}") };
        tell(*kernels == usual.kernels, format_args!("kernels={kernels}"))?;
        tell(*others == usual.others, format_args!("others={}", others.0))?;
        tell(*sensors == usual.sensors, format_args!("sensors={sensors}"))?;
        for ((name, on), (_, usual)) in self.clone().switches().into_iter().zip(usual.switches()) {
            tell(*on == *usual, format_args!("{name}={}", u8::from(*on)))?;
        }
        refusals.iter().try_for_each(|refusal| write!(f, ";refuse={refusal}"))?;
        wrong_write.iter().try_for_each(|wrong| write!(f, ";wrong_write={wrong}"))
    }
}

impl FromStr for Settings {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let mut settings = Self::new(&GPUS[0], Bytes::ZERO);
        for pair in text.split(';') {
            let (key, value) = pair.split_once('=').ok_or_else(|| SettingsError(format!("`{pair}` is not KEY=VALUE")))?;
            match key {
                "gpu" => settings.gpu = Gpu::named(value).ok_or_else(|| expected(value, "a GPU", GPUS.iter().map(|gpu| gpu.name)))?,
                "memory" => settings.memory = Bytes(number(value)?),
                "devices" => settings.devices = devices(value)?,
                "context_overhead" => settings.context_overhead = Bytes(number(value)?),
                "events" => settings.events = value.parse()?,
                "addresses" => settings.addresses = value.parse()?,
                "cudnn_workspace" => settings.cudnn_workspace = value.parse()?,
                "values" => settings.values = value.parse()?,
                "cuda" => settings.cuda = value.parse()?,
                "cudnn" => settings.cudnn = number(value)?,
                "fail" => settings.faults.push(value.parse()?),
                "latency" => settings.latencies.push(value.parse()?),
                "kernels" => settings.kernels = value.parse()?,
                "others" => settings.others = Bytes(number(value)?),
                "sensors" => settings.sensors = value.parse()?,
                "refuse" => settings.refusals.push(value.parse()?),
                "wrong_write" => settings.wrong_write = Some(value.parse()?),
                _ if let Some((_, switch)) = settings.switches().into_iter().find(|switch| switch.0 == key) => *switch = is_on(value)?,
                _ => return Err(SettingsError(format!("`{key}` is not a setting of a simulated GPU"))),
            }
        }
        Ok(settings)
    }
}

fn is_on(text: &str) -> Result<bool, SettingsError> {
    match text {
        "0" => Ok(false),
        "1" => Ok(true),
        _ => Err(expected(text, "a switch", ["0", "1"].into_iter())),
    }
}

fn devices(text: &str) -> Result<u32, SettingsError> {
    let devices = number(text)?;
    let most = format!("`{text}` devices: a simulated machine has at most {MOST_DEVICES}");
    (devices <= MOST_DEVICES).then_some(devices).ok_or(SettingsError(most))
}

words!(AddressOrder, "an order of addresses", AddressOrder::Up = "up", AddressOrder::Down = "down", AddressOrder::Reuse = "reuse");
words!(CudnnWorkspace, "a model of cuDNN's workspaces", CudnnWorkspace::None = "none", CudnnWorkspace::Operands = "operands");
words!(Values, "what a program reads back", Values::Zeros = "zeros", Values::Copies = "copies", Values::Small = "small");
words!(Cuda, "a CUDA release", Cuda::V12 = "12", Cuda::V13 = "13");

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
            _ => Err(expected(text, "a model of events", ["instant", "synchronize", "lag:N"].into_iter())),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}:{}", self.call.map_or(ANY, FaultyCall::name), self.first, self.count, self.min_size.0)
    }
}

impl FromStr for Fault {
    type Err = SettingsError;

    fn from_str(text: &str) -> Result<Self, SettingsError> {
        let (name, numbered) = Numbered::parse(text);
        let named = FaultyCall::ALL.into_iter().find(|call| call.name() == name);
        if named.is_none() && name != ANY {
            return Err(expected(name, "a call that can fail", FaultyCall::ALL.into_iter().map(FaultyCall::name).chain([ANY])));
        }
        let form = || SettingsError(format!("`{text}` is not CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`"));
        let Numbered { first, count, min_size } = numbered.ok_or_else(form)?;
        Ok(Self { call: named, first, count, min_size })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_back_as_they_were_written() {
        let mut settings = Settings::new(Gpu::named("a100-80").expect("it is shipped"), Bytes::gib(24));
        assert_eq!(settings.to_string().parse(), Ok(settings.clone()));
        settings = Settings {
            devices: 4,
            context_overhead: Bytes::mib(500),
            events: Events::Lag(64),
            addresses: AddressOrder::Reuse,
            cudnn_workspace: CudnnWorkspace::None,
            values: Values::Copies,
            cuda: Cuda::V12,
            cudnn: 90_100,
            faults: vec![
                "cudaMalloc:40:2".parse().expect("a fault"),
                "cuMemCreate:1:1:20MiB".parse().expect("another"),
                "any:3:2".parse().expect("a third"),
            ],
            latencies: vec!["cudaFree:3ms".parse().expect("a latency")],
            kernels: Kernels::Done,
            mapping: false,
            mig: true,
            others: Bytes::mib(7),
            sensors: Sensors { power_mw: 250_000, celsius: 40, reasons: 4 },
            list_calls: true,
            wrong_write: Some(WrongWrite { nth: 2, offset: 77 }),
            blind_verify: true,
            ..settings
        }
        .failing("cuMemAlloc_v2", 3, 9999)
        .hanging("cuInit", 1);
        assert_eq!(settings.to_string().parse(), Ok(settings));
    }

    #[test]
    fn what_is_no_setting_says_what_is() {
        let message = |text: &str| text.parse::<Settings>().expect_err("it is wrong").to_string();
        assert_eq!(message("events=late"), "`late` is not a model of events: write instant, synchronize, lag:N");
        assert_eq!(message("colour=red"), "`colour` is not a setting of a simulated GPU");
        assert_eq!(message("devices=17"), "`17` devices: a simulated machine has at most 16");
        assert_eq!(
            message("fail=cudaFree:1"),
            "`cudaFree` is not a call that can fail: write cudaMalloc, cuMemCreate, cudaMallocAsync, cudaHostAlloc, any"
        );
        assert_eq!(message("mapping=on"), "`on` is not a switch: write 0, 1");
        assert_eq!(message("refuse=cuInit"), "`cuInit` is not FUNCTION:NTH:CODE, as in `cuInit:1:999`, or FUNCTION:NTH:hangs");
        assert_eq!(message("wrong_write=1"), "`1` is not NTH:OFFSET");
        assert_eq!(message("sensors=1:2"), "`1:2` is not MILLIWATTS:CELSIUS:REASONS");
        assert_eq!(message("fail=cudaMalloc:0"), "`cudaMalloc:0` is not CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`");
    }
}
