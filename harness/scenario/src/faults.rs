//! `faults:`: what goes wrong on the device while a scenario runs.

use std::fmt;
use std::str::FromStr;

use harness_allocator::device::faulty::{self, Calls, DeviceCall, Effect, Fault, InjectedError};
use harness_allocator::stats::PoolKind;
use harness_allocator::units::Bytes;
use harness_language::error::{Problem, choices};
use harness_language::located::{Located, Position};
use harness_language::text::{AmountText, CountText, DurationText, NameText, duration};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::checker::Checker;
use crate::metric::ProcessName;

/// Most faults of a scenario.
pub const MAX_FAULTS: usize = 100;

/// One thing that goes wrong, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedFault {
    /// The process whose calls it strikes; `None`: the main one.
    pub process: Option<ProcessName>,
    /// What goes wrong, and when.
    pub fault: Fault,
    /// Where it comes from.
    pub origin: Origin,
    /// Whether the run is to end with its error.
    pub ends_run: bool,
}

/// Who asks for a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The scenario, here.
    File(Position),
    /// The user, by this text: `cudaMalloc:3`.
    Option(String),
}

impl PlannedFault {
    /// Its place in the file, where it has one.
    #[must_use]
    pub const fn position(&self) -> Option<Position> {
        match &self.origin {
            Origin::File(position) => Some(*position),
            Origin::Option(_) => None,
        }
    }
}

impl fmt::Display for PlannedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            Origin::File(position) => write!(f, "the fault of line {}", position.line),
            Origin::Option(text) => write!(f, "`--fail {text}`"),
        }
    }
}

/// A fault that the user asks for, of whatever scenario: `[PROCESS/]CALL:FIRST[:COUNT][:MIN_SIZE]`.
#[derive(Clone, Debug, PartialEq)]
pub struct AskedFault {
    /// The process whose calls it strikes, by its name; `None`: the main one.
    process: Option<String>,
    fault: Fault,
    text: String,
}

/// A fault is asked for of a process that a scenario does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`--fail {fault}`: the scenario `{scenario}` has no process `{process}`")]
pub struct NoProcess {
    fault: String,
    scenario: String,
    process: String,
    /// Those that it has.
    pub help: String,
}

impl FromStr for AskedFault {
    type Err = faulty::FaultError;

    fn from_str(text: &str) -> Result<Self, faulty::FaultError> {
        let (process, fault) = text.split_once('/').map_or((None, text), |(process, fault)| (Some(process.to_owned()), fault));
        Ok(Self { process, fault: fault.parse()?, text: text.to_owned() })
    }
}

impl AskedFault {
    /// As a fault of the scenario with this name and these processes.
    ///
    /// # Errors
    /// [`NoProcess`] where the process is none of them.
    pub fn of<'a>(&self, scenario: &str, processes: impl Iterator<Item = &'a ProcessName> + Clone) -> Result<PlannedFault, NoProcess> {
        let process = self.process.as_ref().map(|name| {
            processes.clone().find(|process| process.name() == name).cloned().ok_or_else(|| NoProcess {
                fault: self.text.clone(),
                scenario: scenario.to_owned(),
                process: name.clone(),
                help: format!(
                    "{}; calls of the main process are named alone, as in `--fail {}`",
                    choices(name, "processes", processes.clone().map(ProcessName::name)),
                    self.text.split_once('/').map_or(self.text.as_str(), |(_, call)| call)
                ),
            })
        });
        Ok(PlannedFault { process: process.transpose()?, fault: self.fault, origin: Origin::Option(self.text.clone()), ends_run: false })
    }
}

/// Something that goes wrong on the device: calls fail, take longer or tell wrong figures, or an event never completes. Calls that match are counted from
/// the first step on. A fault that strikes no call fails the run.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "fault")]
pub(crate) struct FaultWire {
    /// The call, by the name that CUDA or NVML has for it, as in `cudaMalloc`; `any` for all that get device memory, counted together.
    #[schemars(with = "String")]
    call: Located<String>,
    /// The process whose calls are meant, counted on where it is started anew: the main one if not given.
    process: Option<NameText>,
    /// How many matching calls are left alone first: 0 if not given.
    skip: Option<CountText>,
    /// How many are struck at most: 1 if not given; with `probability`, `latency` or `off_by` all.
    count: Option<CountText>,
    /// The chance of each call to be struck, above 0 and at most 1, drawn from the seed: each is struck if not given.
    #[schemars(with = "Option<f64>")]
    probability: Option<Located<f64>>,
    /// Only calls that ask for at least this much.
    min_size: Option<AmountText>,
    /// Only calls for this stream, or made to serve a request for it.
    stream: Option<NameText>,
    /// `small` or `large`: only calls made to serve a request of at most 1 MiB, or of more.
    pool: Option<NameText>,
    /// The error that the call fails with: `out_of_memory`, if not given, of a call that gets memory; else `illegal_address`, `launch_failure`, `ecc`,
    /// `device_lost` or `unknown`.
    error: Option<NameText>,
    /// Whether every later call fails with the same error: yes, if not given, for `illegal_address`, `launch_failure`, `ecc` and `device_lost`, but not of NVML.
    #[schemars(with = "Option<bool>")]
    sticky: Option<Located<bool>>,
    /// The call takes so much longer: virtual time on the simulated device, real time on a GPU.
    latency: Option<DurationText>,
    /// What `cudaMemGetInfo` tells as free, or NVML as used, is so much off, as in `-100MiB`.
    #[schemars(with = "Option<String>")]
    off_by: Option<Located<String>>,
    /// `true`: the event that `cudaEventRecord` records never completes, nor does anything behind it on its stream, and waits for it never return.
    #[schemars(with = "Option<bool>")]
    never_completes: Option<Located<bool>>,
    /// `error`: the run ends with this error, or with a wait that never returns, and passes then.
    expect: Option<NameText>,
}

/// Checks all faults of a scenario.
pub(crate) fn check(given: &Located<Vec<Located<FaultWire>>>, checker: &Checker<'_>) -> Result<Vec<PlannedFault>, Problem> {
    match given.value.get(MAX_FAULTS) {
        Some(first_too_many) => {
            Err(Problem::new(first_too_many.position(), format!("more than {MAX_FAULTS} faults"))
                .help("`count` lets one strike many calls"))
        }
        None if given.value.is_empty() => {
            Err(Problem::new(given.position(), "`faults` has no fault").help("as in `faults: [{ call: cudaMalloc, skip: 2 }]`"))
        }
        None => given.value.iter().map(|fault| fault.value.check(fault.position(), checker)).collect(),
    }
}

impl FaultWire {
    fn check(&self, at: Position, checker: &Checker<'_>) -> Result<PlannedFault, Problem> {
        let calls = Calls::named(&self.call.value).ok_or_else(|| {
            Problem::new(self.call.position(), format!("there is no call `{}`", self.call.value)).help(choices(
                &self.call.value,
                "calls",
                Calls::names(),
            ))
        })?;
        let effect = self.effect(at, calls)?;
        let strikes_all = self.probability.is_some() || matches!(effect, Effect::Takes(_) | Effect::OffBy(_));
        let count = match &self.count {
            Some(count) => Some(checker.whole(count, "count", 1..=u64::MAX)?),
            None => (!strikes_all).then_some(1),
        };
        let fault = Fault {
            calls,
            skip: self.skip.as_ref().map_or(Ok(0), |skip| checker.whole(skip, "skip", 0..=u64::MAX))?,
            count,
            probability: self.probability.as_ref().map(probability).transpose()?,
            min_size: self.min_size(calls, checker)?,
            stream: self.stream(calls, checker)?,
            pool: self.pool(calls)?,
            effect,
        };
        let process = self.process.as_ref().map(|name| checker.declared_process(name)).transpose()?;
        Ok(PlannedFault { process, fault, origin: Origin::File(at), ends_run: self.ends_run(effect)? })
    }

    /// What goes wrong: one thing.
    fn effect(&self, at: Position, calls: Calls) -> Result<Effect, Problem> {
        let never = self.never_completes.as_ref().filter(|never| never.value);
        let given = [
            self.error.as_ref().map(|error| ("error", error.position())),
            self.latency.as_ref().map(|latency| ("latency", latency.position())),
            self.off_by.as_ref().map(|off_by| ("off_by", off_by.position())),
            never.map(|never| ("never_completes", never.position())),
        ];
        let mut given = given.into_iter().flatten();
        let first = given.next();
        if let (Some((one, _)), Some((other, position))) = (first, given.next()) {
            return Err(
                Problem::new(position, format!("a fault does one thing, and this has `{one}` and `{other}`")).help("make two faults of it")
            );
        }
        if let (Some(sticky), Some((other, _))) = (&self.sticky, first.filter(|(name, _)| *name != "error")) {
            return Err(
                Problem::new(sticky.position(), format!("`{other}` is no error, so it cannot be sticky")).help("leave `sticky` out")
            );
        }
        match (&self.latency, &self.off_by, never) {
            (Some(latency), ..) => Ok(Effect::Takes(duration(latency)?)),
            (_, Some(bytes), _) => off_by(bytes, calls),
            (.., Some(_)) if calls == Calls::Of(DeviceCall::RecordEvent) => Ok(Effect::NeverCompletes),
            (.., Some(never)) => Err(Problem::new(never.position(), format!("`{calls}` records no event"))
                .help("as in `{ call: cudaEventRecord, never_completes: true }`")),
            (None, None, None) => self.failure(at, calls),
        }
    }

    fn failure(&self, at: Position, calls: Calls) -> Result<Effect, Problem> {
        let error = match &self.error {
            None => InjectedError::usual(calls),
            Some(name) => InjectedError::ALL.into_iter().find(|error| error.name() == name.text()).ok_or_else(|| {
                Problem::new(name.position(), format!("there is no error `{}`", name.text())).help(choices(
                    name.text(),
                    "errors",
                    InjectedError::ALL.iter().map(|error| error.name()),
                ))
            })?,
        };
        let is_out_of_memory = error == InjectedError::OutOfMemory;
        if is_out_of_memory && !gets_memory(calls) && !gets_host_memory(calls) {
            let at = self.error.as_ref().map_or(at, |error| error.position());
            return Err(Problem::new(at, format!("`{calls}` gets no device memory, so it does not run out of it")).help(format!(
                "calls that do: {}; errors of the others: illegal_address, launch_failure, ecc, device_lost, unknown",
                names(DeviceCall::gets_memory)
            )));
        }
        match &self.sticky {
            Some(sticky) if is_out_of_memory && sticky.value => {
                Err(Problem::new(sticky.position(), "running out of memory is not sticky: the next call may succeed")
                    .help("say with `count` how many calls fail"))
            }
            sticky => Ok(Effect::Fails { error, sticky: sticky.as_ref().map_or_else(|| error.is_sticky(calls), |sticky| sticky.value) }),
        }
    }

    fn min_size(&self, calls: Calls, checker: &Checker<'_>) -> Result<Bytes, Problem> {
        match &self.min_size {
            None => Ok(Bytes::ZERO),
            Some(size) if gets_memory(calls) || gets_host_memory(calls) || calls == Calls::Of(DeviceCall::Reserve) => {
                checker.positive_size(size, "min_size")
            }
            Some(size) => Err(Problem::new(size.position(), format!("`{calls}` asks for no memory")).help("leave `min_size` out")),
        }
    }

    fn stream(&self, calls: Calls, checker: &Checker<'_>) -> Result<Option<usize>, Problem> {
        let is_of_a_stream = |call: DeviceCall| call.is_of_a_stream() || call.gets_memory();
        match (&self.stream, calls) {
            (Some(name), Calls::Of(call)) if !is_of_a_stream(call) => {
                Err(Problem::new(name.position(), format!("`{call}` is not about one stream"))
                    .help(format!("calls that are: {}", names(is_of_a_stream))))
            }
            (name, _) => name.as_ref().map(|name| Ok(checker.stream(Some(name))?.index())).transpose(),
        }
    }

    fn pool(&self, calls: Calls) -> Result<Option<PoolKind>, Problem> {
        let Some(name) = &self.pool else { return Ok(None) };
        let wrong = |message: String, help: &str| Err(Problem::new(name.position(), message).help(help));
        match name.text() {
            _ if !gets_memory(calls) => wrong(format!("`{calls}` gets no device memory for a request"), "leave `pool` out"),
            "small" => Ok(Some(PoolKind::Small)),
            "large" => Ok(Some(PoolKind::Large)),
            other => wrong(format!("there is no pool `{other}`"), "`small` is for requests of at most 1 MiB, `large` for all above"),
        }
    }

    fn ends_run(&self, effect: Effect) -> Result<bool, Problem> {
        let Some(expect) = &self.expect else { return Ok(false) };
        let wrong = |message: String, help: &str| Err(Problem::new(expect.position(), message).help(help));
        match effect {
            _ if expect.text() != "error" => {
                wrong(format!("a run does not end with `{}`", expect.text()), "`expect: error`, or leave it out where the run goes on")
            }
            Effect::Takes(_) | Effect::OffBy(_) => wrong("this is no error that a run could end with".to_owned(), "leave `expect` out"),
            Effect::Fails { error: InjectedError::OutOfMemory, .. } => {
                wrong("running out of memory does not end a run".to_owned(), "say `expect: oom` at the step that asks for the memory")
            }
            Effect::Fails { .. } | Effect::NeverCompletes => Ok(true),
        }
    }
}

fn probability(given: &Located<f64>) -> Result<f64, Problem> {
    let is_one = given.value > 0.0 && given.value <= 1.0;
    is_one.then_some(given.value).ok_or_else(|| {
        Problem::new(given.position(), format!("`probability` cannot be {}", given.value))
            .help("a number above 0 and at most 1, as in `0.25`")
    })
}

fn off_by(text: &Located<String>, calls: Calls) -> Result<Effect, Problem> {
    if !matches!(calls, Calls::Of(call) if call.tells_memory()) {
        return Err(Problem::new(text.position(), format!("`{calls}` does not tell how much memory there is"))
            .help(format!("calls that do: {}", names(DeviceCall::tells_memory))));
    }
    let (sign, size) = match text.value.split_at_checked(1) {
        Some(("-", size)) => (-1, size),
        Some(("+", size)) => (1, size),
        _ => (1, text.value.as_str()),
    };
    let wrong = |why: String| Problem::new(text.position(), why).label("a size, as in `-100MiB`");
    let bytes = Bytes::parse(size).map_err(|why| wrong(why.to_string()))?;
    match i64::try_from(bytes.0) {
        Ok(0) => Err(wrong("nothing is off by nothing".to_owned())),
        Ok(bytes) => Ok(Effect::OffBy(sign * bytes)),
        Err(_) => Err(wrong(format!("{bytes} is more than any device has"))),
    }
}

fn gets_memory(calls: Calls) -> bool {
    match calls {
        Calls::AnyMemory => true,
        Calls::Of(call) => call.gets_memory(),
    }
}

const fn gets_host_memory(calls: Calls) -> bool {
    matches!(calls, Calls::Of(call) if call.gets_host_memory())
}

/// The calls of which something is true.
fn names(is_so: impl Fn(DeviceCall) -> bool) -> String {
    DeviceCall::ALL.iter().filter(|call| is_so(**call)).map(|call| call.name()).collect::<Vec<_>>().join(", ")
}
