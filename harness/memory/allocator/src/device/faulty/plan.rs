//! [`Fault`]: which calls fail, and how. [`Injector`]: the faults of one run; it counts the calls
//! and records the injected failures.

mod injector_state;

use std::hash::{Hash as _, Hasher as _};
use std::sync::{Arc, Mutex, MutexGuard};
use std::{collections::BTreeSet, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

pub use self::injector_state::InjectorState;
use super::call::{ANY, DeviceCall, Numbered};
use crate::device::{CallSite, DeviceError, StreamId};
use crate::sync::lock;
use crate::units::{Bytes, Nanos};
use crate::{allocator::Request, hash::Mixer, named::named_enum, stats::PoolKind};

/// A planned failure. It applies to the matching calls after the skipped ones, each with the
/// probability, until `count` calls have failed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fault {
    pub calls: Calls,
    /// The number of matching calls to skip first.
    pub skip: u64,
    /// The maximum number of calls to affect, or `None` for all.
    pub count: Option<u64>,
    /// The probability for each call, from 0 to 1, drawn from the seed. `None` affects each call.
    pub probability: Option<f64>,
    /// Smaller calls do not match. If this is not 0, calls without a size do not match either.
    pub min_size: Bytes,
    /// Matches only calls on this stream, numbered in order of creation; 0 is the default stream.
    pub stream: Option<usize>,
    /// Matches only calls that serve a request of this pool's sizes.
    pub pool: Option<PoolKind>,
    pub effect: Effect,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Calls {
    /// All calls that allocate device memory, counted together.
    AnyMemory,
    Of(DeviceCall),
}

impl Calls {
    /// Parses the name of a call, or `any`.
    pub fn named(name: &str) -> Option<Self> {
        if name == ANY {
            Some(Self::AnyMemory)
        } else {
            DeviceCall::from_name(name).map(Self::Of)
        }
    }

    pub fn names() -> impl Iterator<Item = &'static str> {
        [ANY]
            .into_iter()
            .chain(DeviceCall::ALL.iter().map(|call| call.name()))
    }

    fn include(self, call: DeviceCall) -> bool {
        match self {
            Self::AnyMemory => call.gets_memory(),
            Self::Of(one) => one == call,
        }
    }
}

impl fmt::Display for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AnyMemory => f.write_str(ANY),
            Self::Of(call) => call.fmt(f),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Effect {
    /// The call fails and changes nothing. If the error is sticky, every later call fails with it.
    Fails { error: InjectedError, sticky: bool },
    /// The call takes this much longer.
    Takes(Nanos),
    /// The returned amount of free or used memory is wrong by this many bytes.
    OffBy(i64),
    /// The recorded event never completes, nor does later work on its stream.
    NeverCompletes,
}

named_enum! {
    /// The errors that can be injected, with their names in scenarios and the driver's codes
    /// (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html>, `CUresult`).
    #[derive(Serialize, Deserialize)]
    InjectedError {
        OutOfMemory = "out_of_memory",
        /// A kernel accessed invalid memory.
        IllegalAddress = "illegal_address",
        /// A kernel ended with an exception.
        LaunchFailure = "launch_failure",
        /// Memory has an error that ECC could not correct.
        Ecc = "ecc",
        /// The GPU does not respond any more.
        DeviceLost = "device_lost",
        Unknown = "unknown",
    }
}

impl InjectedError {
    /// The default error of a call: out of memory for calls that allocate, otherwise an unknown
    /// error.
    pub const fn usual(calls: Calls) -> Self {
        match calls {
            Calls::AnyMemory => Self::OutOfMemory,
            Calls::Of(call) if call.gets_memory() || call.gets_host_memory() => Self::OutOfMemory,
            Calls::Of(_) => Self::Unknown,
        }
    }

    /// Returns true if CUDA returns it from every later call too. The driver's documentation says
    /// so of the first two: "This leaves the process in an inconsistent state and any further CUDA
    /// work will return the same error." The others mean that the device is unusable. NVML has its
    /// own errors.
    pub const fn is_sticky(self, calls: Calls) -> bool {
        let is_nvml = matches!(calls, Calls::Of(DeviceCall::NvmlMemory));
        !is_nvml
            && matches!(
                self,
                Self::IllegalAddress | Self::LaunchFailure | Self::Ecc | Self::DeviceLost
            )
    }

    const fn code(self, call: DeviceCall) -> (u32, &'static str) {
        match (self, call) {
            (Self::DeviceLost, DeviceCall::NvmlMemory) => (15, "NVML_ERROR_GPU_IS_LOST"),
            (_, DeviceCall::NvmlMemory) => (999, "NVML_ERROR_UNKNOWN"),
            (Self::OutOfMemory, _) => (2, "CUDA_ERROR_OUT_OF_MEMORY"),
            (Self::IllegalAddress, _) => (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
            (Self::LaunchFailure, _) => (719, "CUDA_ERROR_LAUNCH_FAILED"),
            (Self::Ecc, _) => (214, "CUDA_ERROR_ECC_UNCORRECTABLE"),
            (Self::DeviceLost, _) => (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
            (Self::Unknown, _) => (999, "CUDA_ERROR_UNKNOWN"),
        }
    }
}

pub(super) const INJECTED: &str = "The failure was injected: neither driver nor GPU is at fault";
const STICKY: &str = "An injected failure was sticky, so every later call fails";

impl Fault {
    /// Makes these calls fail with their default error.
    pub const fn failing(calls: Calls, numbered: Numbered) -> Self {
        let Numbered {
            first,
            count,
            min_size,
        } = numbered;
        let effect = Effect::Fails {
            error: InjectedError::usual(calls),
            sticky: false,
        };
        Self {
            calls,
            skip: first.saturating_sub(1),
            count: Some(count),
            probability: None,
            min_size,
            stream: None,
            pool: None,
            effect,
        }
    }

    fn matches(&self, call: Call, request: Option<Request>, streams: &[StreamId]) -> bool {
        let stream = call.stream.or(request.map(|request| request.stream));
        let wanted_stream = self.stream.map(|number| streams.get(number).copied());
        let serves = |kind: PoolKind| {
            request.is_some_and(|request| kind == PoolKind::of_block(request.size))
        };
        self.calls.include(call.call)
            && (self.min_size == Bytes::ZERO || call.size.is_some_and(|size| size >= self.min_size))
            && wanted_stream.is_none_or(|wanted| wanted.is_some() && wanted == stream)
            && self.pool.is_none_or(serves)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FaultError(String);

impl FromStr for Fault {
    type Err = FaultError;

    /// Parses `CALL:FIRST[:COUNT][:MIN_SIZE]`, such as `cudaMalloc:40:2`.
    fn from_str(text: &str) -> Result<Self, FaultError> {
        let (name, numbered) = Numbered::parse(text);
        let names = || Calls::names().collect::<Vec<_>>().join(", ");
        let calls = Calls::named(name).ok_or_else(|| {
            FaultError(format!(
                "`{name}` is not a call that can fail: write {}",
                names()
            ))
        })?;
        let form = || {
            FaultError(format!(
                "`{text}` is not CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`"
            ))
        };
        numbered
            .map(|numbered| Self::failing(calls, numbered))
            .ok_or_else(form)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    pub call: DeviceCall,
    /// The requested bytes of a call that allocates.
    pub size: Option<Bytes>,
    pub stream: Option<StreamId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallRecord {
    pub call: DeviceCall,
    /// The number among the calls of its kind, from 1.
    pub number: u64,
    pub size: Option<Bytes>,
    pub place: CallSite,
}

impl fmt::Display for CallRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.call, self.number)?;
        self.size.map_or(Ok(()), |size| write!(f, " ({size})"))
    }
}

/// An entry of the call log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedCall {
    pub made: CallRecord,
    /// The number of operations begun before ([`Injector::begin_operation`]).
    pub operation: u64,
    /// A hash of the state before the call ([`Injector::set_state_hash`]) and of the call without
    /// its number. Calls with equal hashes are the same call in the same state, as far as the
    /// caller describes its state.
    pub state: u64,
}

/// A call that a fault affected.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct InjectedFault {
    /// The index of the fault in the plan.
    pub fault: usize,
    pub made: CallRecord,
    pub effect: Effect,
}

impl fmt::Display for InjectedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { made, effect, .. } = self;
        match effect {
            Effect::Fails { error, sticky } => {
                write!(
                    f,
                    "{made} fails with {error}{}",
                    if *sticky {
                        ", as does every later call"
                    } else {
                        ""
                    }
                )
            }
            Effect::Takes(duration) => write!(f, "{made} takes {duration} longer"),
            Effect::OffBy(bytes) if *bytes < 0 => write!(
                f,
                "{made} returns {} too little",
                Bytes(bytes.unsigned_abs())
            ),
            Effect::OffBy(bytes) => {
                write!(f, "{made} returns {} too much", Bytes(bytes.unsigned_abs()))
            }
            Effect::NeverCompletes => write!(f, "{made}: the event never completes"),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Decision {
    pub(super) delay: Nanos,
    /// The error of a returned amount, in bytes.
    pub(super) off_by: i64,
    pub(super) never_completes: bool,
    pub(super) failure: Option<Failure>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Failure {
    OutOfMemory,
    Other(DeviceError),
}

/// The maximum number of injected faults kept until [`Injector::take_injected`].
const MAX_KEPT: usize = 64;

/// The faults of one run. Clones share their state: the device ([`super::Faulty`]) has one and its
/// owner another.
#[derive(Clone)]
pub struct Injector(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    plan: Plan,
    log: Option<Log>,
    struck: Vec<InjectedFault>,
    last_failed: Option<usize>,
    request: Option<Request>,
    /// The last allocating call for the request, if a fault failed it.
    refused: Option<CallRecord>,
    place: CallSite,
    streams: Vec<StreamId>,
    paused: u32,
    abandoned: Option<Box<dyn Fn() -> bool + Send>>,
}

/// The faults and their progress, which processes of one run pass on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Plan {
    faults: Vec<Progress>,
    /// The number of calls of each kind, in the order of [`DeviceCall::ALL`].
    counts: Vec<u64>,
    total: u64,
    /// The number of operations begun.
    operations: u64,
    /// Calls beyond this number fail, to end a program that never stops.
    budget: Option<u64>,
    /// The sticky error and the fault it comes from.
    broken: Option<(usize, InjectedError)>,
    stuck: Option<usize>,
}

/// The log of calls, each with a description of the state before it.
#[derive(Default)]
struct Log {
    calls: Vec<LoggedCall>,
    state_hash: u64,
    /// The number of calls since the operation began, without kernel launches.
    in_operation: u64,
    /// Counts changes that the caller's hash does not cover. States on either side of such a change
    /// are never equal.
    changes: u64,
    /// Streams with work that the host has not waited for.
    working: BTreeSet<StreamId>,
}

impl Log {
    fn note(&mut self, call: Call, made: CallRecord, operation: u64, request: Option<Request>) {
        let mut hasher = Mixer::default();
        (
            call.call,
            call.size,
            call.stream,
            made.place,
            self.state_hash,
            self.changes,
            &self.working,
        )
            .hash(&mut hasher);
        // A kernel launch is not part of an allocator's operation. For other calls the request and
        // their position in the operation matter.
        if call.call != DeviceCall::LaunchKernel {
            (
                request.map(|request| (request.size, request.stream)),
                self.in_operation,
            )
                .hash(&mut hasher);
            self.in_operation += 1;
        }
        self.calls.push(LoggedCall {
            made,
            operation,
            state: hasher.finish(),
        });
        self.record_change(call);
    }

    fn record_change(&mut self, call: Call) {
        match (call.call, call.stream) {
            (DeviceCall::LaunchKernel, Some(stream)) => drop(self.working.insert(stream)),
            (DeviceCall::SynchronizeStream, Some(stream)) => drop(self.working.remove(&stream)),
            (DeviceCall::Synchronize | DeviceCall::Free, _) => self.working.clear(),
            // The caller's hash covers memory. The remaining calls change nothing.
            (
                DeviceCall::Malloc
                | DeviceCall::Create
                | DeviceCall::Unmap
                | DeviceCall::MemGetInfo
                | DeviceCall::NvmlMemory,
                _,
            ) => {}
            _ => self.changes += 1,
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Progress {
    fault: Fault,
    random: Random,
    matched: u64,
    struck: u64,
}

/// SplitMix64, a small random number generator (Steele, Lea, Flood: Fast Splittable Pseudorandom
/// Number Generators, OOPSLA 2014, <https://doi.org/10.1145/2660193.2660195>).
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Random(u64);

impl Random {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    fn chance(&mut self, probability: f64) -> bool {
        self.0 = self.0.wrapping_add(Self::STEP);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        // The upper 53 bits are an exact fraction below 1.
        (((mixed ^ mixed >> 31) >> 11) as f64) < probability * (1_u64 << 53) as f64
    }
}

impl fmt::Debug for Injector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Injector")
            .field("faults", &state.plan.faults.len())
            .field("calls", &state.plan.total)
            .finish_non_exhaustive()
    }
}

impl Injector {
    /// Plans the faults of a run. The seed determines the random choices.
    pub fn new(faults: &[Fault], seed: u64) -> Self {
        let progress = |(index, fault): (usize, &Fault)| {
            let random = Random(seed ^ (index as u64 + 1).wrapping_mul(Random::STEP));
            Progress {
                fault: *fault,
                random,
                matched: 0,
                struck: 0,
            }
        };
        let faults = faults.iter().enumerate().map(progress).collect();
        let plan = Plan {
            faults,
            counts: vec![0; DeviceCall::ALL.len()],
            ..Plan::default()
        };
        Self(Arc::new(Mutex::new(State {
            plan,
            streams: vec![StreamId::DEFAULT],
            ..State::default()
        })))
    }

    /// Logs every call, for [`Self::calls_made`].
    pub fn logging(self) -> Self {
        self.state().log = Some(Log::default());
        self
    }

    /// Returns true if calls are logged. Only then is [`Self::set_state_hash`] useful.
    pub fn is_logging(&self) -> bool {
        self.state().log.is_some()
    }

    /// Begins an operation and returns the number of operations begun.
    pub fn begin_operation(&self) -> u64 {
        let mut state = self.state();
        state.plan.operations += 1;
        state.log.iter_mut().for_each(|log| log.in_operation = 0);
        state.plan.operations
    }

    pub fn operations(&self) -> u64 {
        self.state().plan.operations
    }

    /// Sets the hash of the caller's state: of everything that calls change and that affects the
    /// outcome of a failure.
    pub fn set_state_hash(&self, hash: u64) {
        self.state()
            .log
            .iter_mut()
            .for_each(|log| log.state_hash = hash);
    }

    /// Records a change that no hash covers.
    pub fn state_changed(&self) {
        self.state().log.iter_mut().for_each(|log| log.changes += 1);
    }

    /// Adds a fault: these calls of a kind fail with their default error. The calls must be in the
    /// future.
    pub fn add_failure(&self, call: DeviceCall, first: u64, count: u64) {
        let mut state = self.state();
        let fault = Fault::failing(
            Calls::Of(call),
            Numbered {
                first,
                count,
                min_size: Bytes::ZERO,
            },
        );
        let matched = state.calls_of(call);
        state.plan.faults.push(Progress {
            fault,
            random: Random(0),
            matched,
            struck: 0,
        });
    }

    /// Fails every call after this many, to end a program that never stops.
    pub fn with_budget(self, calls: u64) -> Self {
        self.state().plan.budget = Some(calls);
        self
    }

    /// Ends the blocked waits of a device with a real clock when `asked` returns true. Without it,
    /// waits that never return fail immediately.
    pub fn abandon_waits_when(&self, asked: impl Fn() -> bool + Send + 'static) {
        self.state().abandoned = Some(Box::new(asked));
    }

    /// Sets the request that the following calls serve, or none.
    pub fn set_request(&self, request: Option<Request>) {
        let mut state = self.state();
        state.request = request;
        if request.is_some() {
            state.refused = None;
        }
    }

    /// Returns the last allocating call for the last request, if a fault failed it.
    pub fn refused(&self) -> Option<CallRecord> {
        self.state().refused
    }

    /// Stops counting and injecting until [`Self::resume`], for the harness's own calls. Sticky
    /// errors still apply.
    pub fn pause(&self) {
        self.state().paused += 1;
    }

    pub fn resume(&self) {
        let mut state = self.state();
        state.paused = state.paused.saturating_sub(1);
    }

    pub fn calls_made(&self) -> Vec<LoggedCall> {
        self.state()
            .log
            .as_ref()
            .map(|log| log.calls.clone())
            .unwrap_or_default()
    }

    pub fn total_calls(&self) -> u64 {
        self.state().plan.total
    }

    pub fn calls_of(&self, call: DeviceCall) -> u64 {
        self.state().calls_of(call)
    }

    /// Takes the faults injected since the last call of this function, limited to the first ones.
    pub fn take_injected(&self) -> Vec<InjectedFault> {
        std::mem::take(&mut self.state().struck)
    }

    /// Returns how many calls the fault with this index affected, and how many it matched.
    pub fn injected_by(&self, fault: usize) -> (u64, u64) {
        self.state()
            .plan
            .faults
            .get(fault)
            .map_or((0, 0), |progress| (progress.struck, progress.matched))
    }

    /// Returns the index of the fault that caused an error, or `None` if the error was not
    /// injected.
    pub fn cause_of(&self, error: &DeviceError) -> Option<usize> {
        let state = self.state();
        match error {
            DeviceError::Driver { advice, .. } if *advice == INJECTED || *advice == STICKY => state
                .plan
                .broken
                .map(|(fault, _)| fault)
                .or(state.last_failed),
            DeviceError::NeverReturns { .. } => state.plan.stuck,
            _ => None,
        }
    }

    /// Returns true if the device is unusable because of a sticky error or work that never ends.
    pub fn is_broken(&self) -> bool {
        let state = self.state();
        state.plan.broken.is_some() || state.plan.stuck.is_some()
    }

    pub(super) fn set_call_site(&self, place: CallSite) {
        self.state().place = place;
    }

    pub(super) fn stream_made(&self, stream: StreamId) {
        self.state().streams.push(stream);
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.state().abandoned.as_ref().is_none_or(|asked| asked())
    }

    /// Fails if an earlier call broke the device.
    pub(super) fn check_whole(&self, call: DeviceCall) -> Result<(), DeviceError> {
        match self.state().plan.broken {
            Some((_, error)) => Err(driver_error(error, call, STICKY)),
            None => Ok(()),
        }
    }

    pub(super) fn decide(&self, call: Call) -> Decision {
        let mut state = self.state();
        if let Some((_, error)) = state.plan.broken {
            return Decision {
                failure: Some(Failure::Other(driver_error(error, call.call, STICKY))),
                ..Decision::default()
            };
        }
        if state.paused > 0 {
            Decision::default()
        } else {
            state.decide(call)
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl State {
    fn calls_of(&self, call: DeviceCall) -> u64 {
        self.plan
            .counts
            .get(call as usize)
            .copied()
            .unwrap_or_default()
    }

    fn decide(&mut self, call: Call) -> Decision {
        let number = self
            .plan
            .counts
            .get_mut(call.call as usize)
            .map_or(0, |count| {
                *count += 1;
                *count
            });
        let made = CallRecord {
            call: call.call,
            number,
            size: call.size,
            place: self.place,
        };
        self.plan.total += 1;
        let (operation, request) = (self.plan.operations, self.request);
        self.log
            .iter_mut()
            .for_each(|log| log.note(call, made, operation, request));
        if self
            .plan
            .budget
            .is_some_and(|budget| self.plan.total > budget)
        {
            let why = format!(
                "stopped after {} calls: the program seems to call it forever",
                self.plan.total - 1
            );
            let failure = DeviceError::Unavailable {
                what: "the device".to_owned(),
                why,
            };
            return Decision {
                failure: Some(Failure::Other(failure)),
                ..Decision::default()
            };
        }
        let mut decision = Decision::default();
        for index in 0..self.plan.faults.len() {
            if let Some(effect) = self.strikes(index, call, made) {
                self.add(index, effect, call, &mut decision);
            }
        }
        if call.call.gets_memory() {
            self.refused = (decision.failure == Some(Failure::OutOfMemory)).then_some(made);
        }
        decision
    }

    fn strikes(&mut self, index: usize, call: Call, made: CallRecord) -> Option<Effect> {
        let (request, progress) = (self.request, self.plan.faults.get_mut(index)?);
        let Fault {
            skip,
            count,
            probability,
            effect,
            ..
        } = progress.fault;
        if !progress.fault.matches(call, request, &self.streams) {
            return None;
        }
        progress.matched += 1;
        let is_due = progress.matched > skip && count.is_none_or(|count| progress.struck < count);
        let strikes =
            is_due && probability.is_none_or(|probability| progress.random.chance(probability));
        if !strikes {
            return None;
        }
        progress.struck += 1;
        let is_told =
            progress.struck == 1 || matches!(effect, Effect::Fails { .. } | Effect::NeverCompletes);
        if is_told && self.struck.len() < MAX_KEPT {
            self.struck.push(InjectedFault {
                fault: index,
                made,
                effect,
            });
        }
        Some(effect)
    }

    fn add(&mut self, fault: usize, effect: Effect, call: Call, decision: &mut Decision) {
        match effect {
            Effect::Takes(duration) => decision.delay += duration,
            Effect::OffBy(bytes) => decision.off_by += bytes,
            Effect::NeverCompletes => {
                decision.never_completes = true;
                self.plan.stuck.get_or_insert(fault);
            }
            Effect::Fails {
                error: InjectedError::OutOfMemory,
                ..
            } => {
                decision.failure.get_or_insert(Failure::OutOfMemory);
            }
            Effect::Fails { error, sticky } => {
                if sticky {
                    self.plan.broken.get_or_insert((fault, error));
                }
                self.last_failed = Some(fault);
                decision
                    .failure
                    .get_or_insert(Failure::Other(driver_error(error, call.call, INJECTED)));
            }
        }
    }
}

fn driver_error(error: InjectedError, call: DeviceCall, advice: &'static str) -> DeviceError {
    let (code, name) = error.code(call);
    DeviceError::Driver {
        call: call.name(),
        code,
        name: name.to_owned(),
        advice,
    }
}
