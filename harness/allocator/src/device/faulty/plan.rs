//! [`Fault`]: what goes wrong at which calls; and [`Injector`]: the faults of one run, which counts the calls and tells which faults took effect.

mod injector_state;

use std::collections::BTreeSet;
use std::fmt;
use std::hash::{Hash as _, Hasher as _};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

pub use self::injector_state::InjectorState;
use super::call::{ANY, DeviceCall, Numbered};
use crate::allocator::Request;
use crate::device::{DeviceError, Place, StreamId};
use crate::hash::Mixer;
use crate::stats::PoolKind;
use crate::units::{Bytes, Nanos};

/// What goes wrong at some calls of a device. Calls that match are counted; those behind the skipped ones are struck, each with the
/// probability, until so many were.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Fault {
    pub calls: Calls,
    /// Matching calls that are left alone first.
    pub skip: u64,
    /// How many calls are struck at most; `None`: all.
    pub count: Option<u64>,
    /// The chance of each call to be struck, from 0 to 1, drawn from the seed; `None`: each is.
    pub probability: Option<f64>,
    /// Calls for less do not match, nor do calls without a size where this is not 0.
    pub min_size: Bytes,
    /// Only calls for this stream, by its number among the streams of the device in the order of their making; 0 is the default stream.
    pub stream: Option<usize>,
    /// Only calls that are made to serve a request of this size.
    pub pool: Option<PoolKind>,
    /// What goes wrong.
    pub effect: Effect,
}

/// The calls that a fault is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Calls {
    /// All that get device memory, counted together.
    AnyMemory,
    /// One kind.
    Of(DeviceCall),
}

impl Calls {
    /// The calls of that name, or `any`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        if name == ANY { Some(Self::AnyMemory) } else { DeviceCall::named(name).map(Self::Of) }
    }

    /// Every name.
    pub fn names() -> impl Iterator<Item = &'static str> {
        [ANY].into_iter().chain(DeviceCall::ALL.iter().map(|call| call.name()))
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

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Effect {
    /// The call fails and changes nothing.
    Fails {
        /// With this.
        error: InjectedError,
        /// Whether every later call fails with the same.
        sticky: bool,
    },
    /// The call takes so much longer.
    Takes(Nanos),
    /// The free or used memory that it tells is so many bytes off.
    OffBy(i64),
    /// The event that is recorded never completes, nor does anything behind it on its stream.
    NeverCompletes,
}

/// Errors that can be injected: names in scenarios, the driver's name and code
/// (<https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html>, `CUresult`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InjectedError {
    /// There is no memory: data for an allocator.
    OutOfMemory,
    /// A kernel touched memory that it may not touch.
    IllegalAddress,
    /// A kernel ended with an exception.
    LaunchFailure,
    /// Memory is damaged, and error correction could not mend it.
    Ecc,
    /// The GPU does not answer any more.
    DeviceLost,
    /// Something else.
    Unknown,
}

impl InjectedError {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::OutOfMemory, Self::IllegalAddress, Self::LaunchFailure, Self::Ecc, Self::DeviceLost, Self::Unknown];

    /// Its name in scenarios.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutOfMemory => "out_of_memory",
            Self::IllegalAddress => "illegal_address",
            Self::LaunchFailure => "launch_failure",
            Self::Ecc => "ecc",
            Self::DeviceLost => "device_lost",
            Self::Unknown => "unknown",
        }
    }

    /// What a call fails with where nothing else is said: memory that is not there, or an error that says nothing.
    #[must_use]
    pub const fn usual(calls: Calls) -> Self {
        match calls {
            Calls::AnyMemory => Self::OutOfMemory,
            Calls::Of(call) if call.gets_memory() || call.gets_host_memory() => Self::OutOfMemory,
            Calls::Of(_) => Self::Unknown,
        }
    }

    /// Whether CUDA reports it from every later call too: "This leaves the process in an inconsistent state and any further CUDA work will
    /// return the same error. To continue using CUDA, the process must be terminated and relaunched", says the driver's documentation of the first two; of the others it is so
    /// because the device is out of order. NVML's errors are its own.
    #[must_use]
    pub const fn is_sticky(self, calls: Calls) -> bool {
        let is_nvml = matches!(calls, Calls::Of(DeviceCall::NvmlMemory));
        !is_nvml && matches!(self, Self::IllegalAddress | Self::LaunchFailure | Self::Ecc | Self::DeviceLost)
    }

    /// The driver's code and name, or NVML's.
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

impl fmt::Display for InjectedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Advice of a call that was made to fail.
pub(super) const INJECTED: &str = "The failure was injected: neither driver nor GPU is at fault";
/// Advice of each call behind a sticky error.
const SINCE: &str = "An injected failure was sticky, and every call fails since";

impl Fault {
    /// Calls of one kind that fail as they usually do: for lack of memory, or without a reason.
    #[must_use]
    pub const fn failing(calls: Calls, numbered: Numbered) -> Self {
        let Numbered { first, count, min_size } = numbered;
        let effect = Effect::Fails { error: InjectedError::usual(calls), sticky: false };
        Self { calls, skip: first.saturating_sub(1), count: Some(count), probability: None, min_size, stream: None, pool: None, effect }
    }

    fn matches(&self, call: Call, request: Option<Request>, streams: &[StreamId]) -> bool {
        let stream = call.stream.or(request.map(|request| request.stream));
        let wanted_stream = self.stream.map(|number| streams.get(number).copied());
        let serves = |kind: PoolKind| request.is_some_and(|request| kind == PoolKind::of_block(request.size));
        self.calls.include(call.call)
            && (self.min_size == Bytes::ZERO || call.size.is_some_and(|size| size >= self.min_size))
            && wanted_stream.is_none_or(|wanted| wanted.is_some() && wanted == stream)
            && self.pool.is_none_or(serves)
    }
}

/// Why a text is not a failure of calls.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FaultError(String);

impl FromStr for Fault {
    type Err = FaultError;

    /// `CALL:FIRST[:COUNT][:MIN_SIZE]`, as in `cudaMalloc:40:2`.
    fn from_str(text: &str) -> Result<Self, FaultError> {
        let (name, numbered) = Numbered::parse(text);
        let names = || Calls::names().collect::<Vec<_>>().join(", ");
        let calls = Calls::named(name).ok_or_else(|| FaultError(format!("`{name}` is not a call that can fail: write {}", names())))?;
        let form = || FaultError(format!("`{text}` is not CALL:FIRST[:COUNT][:MIN_SIZE], as in `cudaMalloc:40:2`"));
        numbered.map(|numbered| Self::failing(calls, numbered)).ok_or_else(form)
    }
}

/// A call while it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Call {
    pub call: DeviceCall,
    /// What it asks for, where it asks for memory.
    pub size: Option<Bytes>,
    /// The stream that it is about.
    pub stream: Option<StreamId>,
}

/// A call that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Made {
    pub call: DeviceCall,
    /// Counted from 1 among the calls of its kind.
    pub number: u64,
    pub size: Option<Bytes>,
    /// The step of the caller's program.
    pub place: Place,
}

impl fmt::Display for Made {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.call, self.number)?;
        self.size.map_or(Ok(()), |size| write!(f, " ({size})"))
    }
}

/// A call that was made, as it is noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Noted {
    /// The call.
    pub made: Made,
    /// How many operations had begun by then ([`Injector::begin_operation`]).
    pub operation: u64,
    /// A hash of what was there in front of the call ([`Injector::stands`]), and of the call but for its number. Calls of the same kind with equal ones
    /// are the same call in the same state, as far as whoever tells the state knows it.
    pub state: u64,
}

/// A call that a fault struck.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Struck {
    /// The fault, by its place in the plan.
    pub fault: usize,
    pub made: Made,
    pub effect: Effect,
}

impl fmt::Display for Struck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { made, effect, .. } = self;
        match effect {
            Effect::Fails { error, sticky } => {
                write!(f, "{made} fails with {error}{}", if *sticky { ", and so does every later call" } else { "" })
            }
            Effect::Takes(duration) => write!(f, "{made} takes {duration} longer"),
            Effect::OffBy(bytes) if *bytes < 0 => write!(f, "{made} tells {} too little", Bytes(bytes.unsigned_abs())),
            Effect::OffBy(bytes) => write!(f, "{made} tells {} too much", Bytes(bytes.unsigned_abs())),
            Effect::NeverCompletes => write!(f, "{made}: the event never completes"),
        }
    }
}

/// What is to become of a call.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Decision {
    /// How much longer it takes.
    pub(super) delay: Nanos,
    /// How many bytes what it tells is off.
    pub(super) off_by: i64,
    pub(super) never_completes: bool,
    pub(super) failure: Option<Failure>,
}

/// Why a call fails.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Failure {
    OutOfMemory,
    Other(DeviceError),
}

/// Most struck calls that are kept until somebody asks for them: a fault may strike each of very many.
const MOST_KEPT: usize = 64;

/// The faults of one run. Clones share their state: one half is with the device ([`super::Faulty`]), one with whoever runs it.
#[derive(Clone)]
pub struct Injector(Arc<Mutex<State>>);

struct State {
    faults: Vec<Progress>,
    /// Calls of each kind, by the order of [`DeviceCall::ALL`].
    counts: Vec<u64>,
    total: u64,
    /// More calls than this are an error: they would never end.
    budget: Option<u64>,
    log: Option<Log>,
    /// Operations that have begun.
    operations: u64,
    struck: Vec<Struck>,
    /// The sticky error, and the fault that it is of.
    broken: Option<(usize, InjectedError)>,
    last_failed: Option<usize>,
    stuck: Option<usize>,
    request: Option<Request>,
    /// Of the calls that get memory for the request, the last one, where it was made to fail for lack of it.
    refused: Option<Made>,
    place: Place,
    streams: Vec<StreamId>,
    paused: u32,
    gives_up: Option<Box<dyn Fn() -> bool + Send>>,
}

/// Notes of calls, with what is known of the state in front of each.
#[derive(Default)]
struct Log {
    calls: Vec<Noted>,
    /// What the caller tells of it.
    stands: u64,
    /// Calls since the operation began, but for work on streams.
    in_operation: u64,
    /// Changes that the caller's word does not cover: no state behind one equals a state in front of it.
    changes: u64,
    /// Streams with work that the host has not waited for.
    working: BTreeSet<StreamId>,
}

impl Log {
    fn note(&mut self, call: Call, made: Made, operation: u64, request: Option<Request>) {
        let mut hasher = Mixer::default();
        (call.call, call.size, call.stream, made.place, self.stands, self.changes, &self.working).hash(&mut hasher);
        // Work on a stream is none of an allocator's operation. Of other calls it counts what the operation is about and how far it has come.
        if call.call != DeviceCall::LaunchKernel {
            (request.map(|request| (request.size, request.stream)), self.in_operation).hash(&mut hasher);
            self.in_operation += 1;
        }
        self.calls.push(Noted { made, operation, state: hasher.finish() });
        self.has_been_made(call);
    }

    /// What a call that is made changes.
    fn has_been_made(&mut self, call: Call) {
        match (call.call, call.stream) {
            (DeviceCall::LaunchKernel, Some(stream)) => drop(self.working.insert(stream)),
            (DeviceCall::SynchronizeStream, Some(stream)) => drop(self.working.remove(&stream)),
            (DeviceCall::Synchronize | DeviceCall::Free, _) => self.working.clear(),
            // Memory is in what the caller tells, and the others change nothing.
            (DeviceCall::Malloc | DeviceCall::Create | DeviceCall::Unmap | DeviceCall::MemGetInfo | DeviceCall::NvmlMemory, _) => {}
            _ => self.changes += 1,
        }
    }
}

/// How far a fault has come.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Progress {
    fault: Fault,
    random: Random,
    matched: u64,
    struck: u64,
}

/// SplitMix64, a small generator of random numbers (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014,
/// <https://doi.org/10.1145/2660193.2660195>).
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Random(u64);

impl Random {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    /// Whether something of this probability happens.
    fn chance(&mut self, probability: f64) -> bool {
        self.0 = self.0.wrapping_add(Self::STEP);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        // The upper 53 bits are a fraction below 1, exactly.
        (((mixed ^ mixed >> 31) >> 11) as f64) < probability * (1_u64 << 53) as f64
    }
}

impl fmt::Debug for Injector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Injector").field("faults", &state.faults.len()).field("calls", &state.total).finish_non_exhaustive()
    }
}

impl Injector {
    /// The faults of a run. Probabilities are drawn from the seed.
    #[must_use]
    pub fn new(faults: &[Fault], seed: u64) -> Self {
        let progress = |(index, fault): (usize, &Fault)| {
            let random = Random(seed ^ (index as u64 + 1).wrapping_mul(Random::STEP));
            Progress { fault: *fault, random, matched: 0, struck: 0 }
        };
        Self(Arc::new(Mutex::new(State {
            faults: faults.iter().enumerate().map(progress).collect(),
            counts: vec![0; DeviceCall::ALL.len()],
            total: 0,
            budget: None,
            log: None,
            operations: 0,
            struck: Vec::new(),
            broken: None,
            last_failed: None,
            stuck: None,
            request: None,
            refused: None,
            place: Place::default(),
            streams: vec![StreamId::DEFAULT],
            paused: 0,
            gives_up: None,
        })))
    }

    /// Notes every call, for [`Self::calls_made`].
    #[must_use]
    pub fn logging(self) -> Self {
        self.state().log = Some(Log::default());
        self
    }

    /// Whether every call is noted: only then somebody wants to know how things stand.
    #[must_use]
    pub fn is_logging(&self) -> bool {
        self.state().log.is_some()
    }

    /// An operation begins, in which calls may be made. Returns how many have begun.
    pub fn begin_operation(&self) -> u64 {
        let mut state = self.state();
        state.operations += 1;
        state.log.iter_mut().for_each(|log| log.in_operation = 0);
        state.operations
    }

    /// How many operations have begun.
    #[must_use]
    pub fn operations(&self) -> u64 {
        self.state().operations
    }

    /// How things stand from now on: a hash of all that calls change, and that decides what comes of one that fails.
    pub fn stands(&self, hash: u64) {
        self.state().log.iter_mut().for_each(|log| log.stands = hash);
    }

    /// Something changes that is in no hash.
    pub fn changes(&self) {
        self.state().log.iter_mut().for_each(|log| log.changes += 1);
    }

    /// From now on these calls of a kind fail as they usually do, as if that had been planned from the beginning. They were not made yet.
    pub fn fails(&self, call: DeviceCall, first: u64, count: u64) {
        let mut state = self.state();
        let fault = Fault::failing(Calls::Of(call), Numbered { first, count, min_size: Bytes::ZERO });
        let matched = state.calls_of(call);
        state.faults.push(Progress { fault, random: Random(0), matched, struck: 0 });
    }

    /// After so many calls every call fails: a caller that goes on and on is then told so.
    #[must_use]
    pub fn with_budget(self, calls: u64) -> Self {
        self.state().budget = Some(calls);
        self
    }

    /// On a device with a measured clock a wait that never returns waits until this says that nobody waits for it any more. Without it, and on a simulated
    /// device, it fails at once.
    pub fn gives_up_when(&self, asked: impl Fn() -> bool + Send + 'static) {
        self.state().gives_up = Some(Box::new(asked));
    }

    /// The calls that follow are made to serve this request, or none.
    pub fn serves(&self, request: Option<Request>) {
        let mut state = self.state();
        state.request = request;
        if request.is_some() {
            state.refused = None;
        }
    }

    /// Of the calls that were made to get memory for the last request, the last one, where a fault refused it.
    #[must_use]
    pub fn refused(&self) -> Option<Made> {
        self.state().refused
    }

    /// Until [`Self::resume`], calls are neither counted nor struck: they are the harness's own. What is broken already stays broken.
    pub fn pause(&self) {
        self.state().paused += 1;
    }

    /// Undoes one [`Self::pause`].
    pub fn resume(&self) {
        let mut state = self.state();
        state.paused = state.paused.saturating_sub(1);
    }

    /// All calls so far, in their order, where they are noted.
    #[must_use]
    pub fn calls_made(&self) -> Vec<Noted> {
        self.state().log.as_ref().map(|log| log.calls.clone()).unwrap_or_default()
    }

    /// How many calls were made.
    #[must_use]
    pub fn total_calls(&self) -> u64 {
        self.state().total
    }

    /// How many calls of a kind were made.
    #[must_use]
    pub fn calls_of(&self, call: DeviceCall) -> u64 {
        self.state().calls_of(call)
    }

    /// Struck calls since the last time that this was asked: the first ones, where there are very many.
    pub fn take_struck(&self) -> Vec<Struck> {
        std::mem::take(&mut self.state().struck)
    }

    /// How many calls a fault struck, and how many matched, by its place in the plan.
    #[must_use]
    pub fn struck_by(&self, fault: usize) -> (u64, u64) {
        self.state().faults.get(fault).map_or((0, 0), |progress| (progress.struck, progress.matched))
    }

    /// The fault that an error comes from, by its place in the plan; `None` where it was not injected.
    #[must_use]
    pub fn cause_of(&self, error: &DeviceError) -> Option<usize> {
        let state = self.state();
        match error {
            DeviceError::Driver { advice, .. } if *advice == INJECTED || *advice == SINCE => {
                state.broken.map(|(fault, _)| fault).or(state.last_failed)
            }
            DeviceError::NeverReturns { .. } => state.stuck,
            _ => None,
        }
    }

    /// Whether the device is beyond use: a sticky error, or work that never ends.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        let state = self.state();
        state.broken.is_some() || state.stuck.is_some()
    }

    pub(super) fn set_place(&self, place: Place) {
        self.state().place = place;
    }

    pub(super) fn stream_made(&self, stream: StreamId) {
        self.state().streams.push(stream);
    }

    pub(super) fn gives_up(&self) -> bool {
        self.state().gives_up.as_ref().is_none_or(|asked| asked())
    }

    /// Fails where an earlier call broke the device.
    pub(super) fn check_whole(&self, call: DeviceCall) -> Result<(), DeviceError> {
        match self.state().broken {
            Some((_, error)) => Err(driver_error(error, call, SINCE)),
            None => Ok(()),
        }
    }

    /// Counts a call, and says what is to become of it.
    pub(super) fn decide(&self, call: Call) -> Decision {
        let mut state = self.state();
        if let Some((_, error)) = state.broken {
            return Decision { failure: Some(Failure::Other(driver_error(error, call.call, SINCE))), ..Decision::default() };
        }
        if state.paused > 0 { Decision::default() } else { state.decide(call) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked with the lock in hand left a whole value.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn calls_of(&self, call: DeviceCall) -> u64 {
        self.counts.get(call as usize).copied().unwrap_or_default()
    }

    fn decide(&mut self, call: Call) -> Decision {
        let number = self.counts.get_mut(call.call as usize).map_or(0, |count| {
            *count += 1;
            *count
        });
        let made = Made { call: call.call, number, size: call.size, place: self.place };
        self.total += 1;
        let (operation, request) = (self.operations, self.request);
        self.log.iter_mut().for_each(|log| log.note(call, made, operation, request));
        if self.budget.is_some_and(|budget| self.total > budget) {
            let why = format!("{} calls were made to it, and they do not come to an end", self.total - 1);
            let failure = DeviceError::Unavailable { what: "the device".to_owned(), why };
            return Decision { failure: Some(Failure::Other(failure)), ..Decision::default() };
        }
        let mut decision = Decision::default();
        for index in 0..self.faults.len() {
            if let Some(effect) = self.strikes(index, call, made) {
                self.add(index, effect, call, &mut decision);
            }
        }
        if call.call.gets_memory() {
            self.refused = (decision.failure == Some(Failure::OutOfMemory)).then_some(made);
        }
        decision
    }

    /// Whether a fault strikes this call.
    fn strikes(&mut self, index: usize, call: Call, made: Made) -> Option<Effect> {
        let (request, progress) = (self.request, self.faults.get_mut(index)?);
        let Fault { skip, count, probability, effect, .. } = progress.fault;
        if !progress.fault.matches(call, request, &self.streams) {
            return None;
        }
        progress.matched += 1;
        let is_due = progress.matched > skip && count.is_none_or(|count| progress.struck < count);
        let strikes = is_due && probability.is_none_or(|probability| progress.random.chance(probability));
        if !strikes {
            return None;
        }
        progress.struck += 1;
        let is_told = progress.struck == 1 || matches!(effect, Effect::Fails { .. } | Effect::NeverCompletes);
        if is_told && self.struck.len() < MOST_KEPT {
            self.struck.push(Struck { fault: index, made, effect });
        }
        Some(effect)
    }

    fn add(&mut self, fault: usize, effect: Effect, call: Call, decision: &mut Decision) {
        match effect {
            Effect::Takes(duration) => decision.delay += duration,
            Effect::OffBy(bytes) => decision.off_by += bytes,
            Effect::NeverCompletes => {
                decision.never_completes = true;
                self.stuck.get_or_insert(fault);
            }
            Effect::Fails { error: InjectedError::OutOfMemory, .. } => {
                decision.failure.get_or_insert(Failure::OutOfMemory);
            }
            Effect::Fails { error, sticky } => {
                if sticky {
                    self.broken.get_or_insert((fault, error));
                }
                self.last_failed = Some(fault);
                decision.failure.get_or_insert(Failure::Other(driver_error(error, call.call, INJECTED)));
            }
        }
    }
}

fn driver_error(error: InjectedError, call: DeviceCall, advice: &'static str) -> DeviceError {
    let (code, name) = error.code(call);
    DeviceError::Driver { call: call.name(), code, name: name.to_owned(), advice }
}
