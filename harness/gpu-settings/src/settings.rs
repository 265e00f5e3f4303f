//! [`Settings`] of a simulated GPU: written to one environment variable by whoever starts a program, read from it in the program and in its
//! children.

use std::fmt;
use std::str::FromStr;

use harness_allocator::units::Bytes;

use crate::gpus::{GPUS, Gpu};

/// The variable that carries [`Settings`].
pub const SETTINGS: &str = "HARNESS_GPU";
/// The variable with the folder of the libraries that stand in for NVIDIA's.
pub const LIBRARIES: &str = "HARNESS_GPU_LIBRARIES";
/// The variable with the folder where each process writes its counters.
pub const RUN: &str = "HARNESS_GPU_RUN";
/// The most devices a machine can have.
pub const MOST_DEVICES: u32 = 16;

/// What the simulated machine is like. Each device is the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// What the program is told of the GPU besides its memory.
    pub gpu: &'static Gpu,
    /// Memory of each device.
    pub memory: Bytes,
    /// Number of devices.
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
    /// Driver calls that fail.
    pub faults: Vec<Fault>,
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
pub enum CudnnWorkspace {
    /// None.
    None,
    /// As much as the operands that are not channels-last, and for filter gradients four times the filter.
    Operands,
}

/// What a program reads back from a device on which kernels do nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Zeros.
    Zeros,
    /// What small copies wrote, until a kernel may have overwritten it; zeros otherwise.
    Copies,
    /// As [`Values::Copies`], and in Python what operations on small tensors give, which are done on the CPU beside.
    Small,
}

/// A CUDA release: structures differ between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cuda {
    /// CUDA 12.
    V12,
    /// CUDA 13.
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

/// A call that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultyCall {
    /// `cudaMalloc`.
    Malloc,
    /// `cuMemCreate`.
    Create,
    /// `cudaMallocAsync`.
    MallocAsync,
    /// `cudaHostAlloc`.
    HostAlloc,
}

impl FaultyCall {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Malloc, Self::Create, Self::MallocAsync, Self::HostAlloc];

    /// The function.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malloc => "cudaMalloc",
            Self::Create => "cuMemCreate",
            Self::MallocAsync => "cudaMallocAsync",
            Self::HostAlloc => "cudaHostAlloc",
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

/// All calls that get device memory, as the call of a [`Fault`].
const ANY: &str = "any";

impl Fault {
    /// Whether it counts this attempt.
    #[must_use]
    pub fn counts(&self, call: FaultyCall, size: Bytes) -> bool {
        size >= self.min_size && self.call.map_or(call != FaultyCall::HostAlloc, |counted| counted == call)
    }
}

/// Why a text is not a setting. The sentence says what is accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SettingsError(String);

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
        }
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, memory, devices, context_overhead, events, addresses, cudnn_workspace, values, cuda, cudnn, faults } = self;
        write!(f, "gpu={};memory={};devices={devices};context_overhead={};events={events}", gpu.name, memory.0, context_overhead.0)?;
        write!(f, ";addresses={addresses};cudnn_workspace={cudnn_workspace};values={values};cuda={cuda};cudnn={cudnn}")?;
        faults.iter().try_for_each(|fault| write!(f, ";fail={fault}"))
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
                _ => return Err(SettingsError(format!("`{key}` is not a setting of a simulated GPU"))),
            }
        }
        Ok(settings)
    }
}

fn devices(text: &str) -> Result<u32, SettingsError> {
    let devices = number(text)?;
    let most = format!("`{text}` devices: a simulated machine has 1 to {MOST_DEVICES}");
    (1..=MOST_DEVICES).contains(&devices).then_some(devices).ok_or(SettingsError(most))
}

fn number<T: FromStr>(text: &str) -> Result<T, SettingsError> {
    text.parse().map_err(|_| SettingsError(format!("`{text}` is not a number that fits")))
}

fn expected(text: &str, what: &str, accepted: impl Iterator<Item = &'static str>) -> SettingsError {
    SettingsError(format!("`{text}` is not {what}: write {}", accepted.collect::<Vec<_>>().join(", ")))
}

/// Display and parsing of an enumeration whose values are words.
macro_rules! words {
    ($type:ty, $what:literal, $($value:path = $word:literal),+) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($value => $word),+ })
            }
        }

        impl FromStr for $type {
            type Err = SettingsError;

            fn from_str(text: &str) -> Result<Self, SettingsError> {
                match text {
                    $($word => Ok($value),)+
                    _ => Err(expected(text, $what, [$($word),+].into_iter())),
                }
            }
        }
    };
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
        let form = || SettingsError(format!("`{text}` is not CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`"));
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let named = FaultyCall::ALL.into_iter().find(|call| call.name() == name);
        if named.is_none() && name != ANY {
            return Err(expected(name, "a call that can fail", FaultyCall::ALL.into_iter().map(FaultyCall::name).chain([ANY])));
        }
        let first = parts.next().and_then(|first| first.parse().ok()).filter(|first| *first > 0).ok_or_else(form)?;
        let count = parts.next().map_or(Ok(1), str::parse).map_err(|_| form())?;
        let min_size = parts.next().map_or(Ok(Bytes::ZERO), Bytes::parse).map_err(|_| form())?;
        if parts.next().is_some() {
            return Err(form());
        }
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
            ..settings
        };
        assert_eq!(settings.to_string().parse(), Ok(settings));
    }

    #[test]
    fn what_is_no_setting_says_what_is() {
        let message = |text: &str| text.parse::<Settings>().expect_err("it is wrong").to_string();
        assert_eq!(message("events=late"), "`late` is not a model of events: write instant, synchronize, lag:N");
        assert_eq!(message("colour=red"), "`colour` is not a setting of a simulated GPU");
        assert_eq!(message("devices=17"), "`17` devices: a simulated machine has 1 to 16");
        assert_eq!(
            message("fail=cudaFree:1"),
            "`cudaFree` is not a call that can fail: write cudaMalloc, cuMemCreate, cudaMallocAsync, cudaHostAlloc, any"
        );
        assert_eq!(message("fail=cudaMalloc:0"), "`cudaMalloc:0` is not CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`");
    }
}
