use std::{fmt, str::FromStr};

use harness_allocator::device::faulty::{self, Calls, DeviceCall, Effect, Fault, InjectedError};
use harness_allocator::{stats::PoolKind, units::Bytes};
use harness_language::error::{Problem, choices, named};
use harness_language::located::{Located, Position};
use harness_language::schema::JsonSchema;
use harness_language::text::{AmountText, CountText, DurationText, NameText, duration};
use serde::Deserialize;

use crate::{checker::Checker, metric::ProcessName};

pub const MAX_FAULTS: usize = 100;

#[derive(Clone, Debug, PartialEq)]
pub struct PlannedFault {
    /// The process whose calls it affects; `None`: the main process.
    pub process: Option<ProcessName>,
    pub fault: Fault,
    pub origin: FaultOrigin,
    /// `true` if the run must end with this error.
    pub ends_run: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultOrigin {
    /// The scenario, at this position.
    File(Position),
    Option(String),
}

impl PlannedFault {
    pub const fn position(&self) -> Option<Position> {
        match &self.origin {
            FaultOrigin::File(position) => Some(*position),
            FaultOrigin::Option(_) => None,
        }
    }
}

impl fmt::Display for PlannedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.origin {
            FaultOrigin::File(position) => write!(f, "the fault in line {}", position.line),
            FaultOrigin::Option(text) => write!(f, "`--fail {text}`"),
        }
    }
}

/// A fault from the command line: `[PROCESS/]CALL:FIRST[:COUNT][:MIN_SIZE]`.
#[derive(Clone, Debug, PartialEq)]
pub struct AskedFault {
    /// The name of the process whose calls it affects; `None`: the main process.
    process: Option<String>,
    fault: Fault,
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`--fail {fault}`: the scenario `{scenario}` has no process `{process}`")]
pub struct NoProcess {
    fault: String,
    scenario: String,
    process: String,
    pub help: String,
}

impl FromStr for AskedFault {
    type Err = faulty::FaultError;

    fn from_str(text: &str) -> Result<Self, faulty::FaultError> {
        let (process, fault) = text
            .split_once('/')
            .map_or((None, text), |(process, fault)| {
                (Some(process.to_owned()), fault)
            });
        Ok(Self {
            process,
            fault: fault.parse()?,
            text: text.to_owned(),
        })
    }
}

impl AskedFault {
    /// Converts it to a fault of a scenario with this name and these processes.
    pub fn of<'a>(
        &self,
        scenario: &str,
        processes: impl Iterator<Item = &'a ProcessName> + Clone,
    ) -> Result<PlannedFault, NoProcess> {
        let process = self.process.as_ref().map(|name| {
            processes.clone().find(|process| process.name() == name).cloned()
                .ok_or_else(|| NoProcess {
                fault: self.text.clone(),
                scenario: scenario.to_owned(),
                process: name.clone(),
                help: format!(
                    "{}; for calls of the main process leave out the process, as in `--fail {}`",
                    choices(name, "processes", processes.clone().map(ProcessName::name)),
                    self.text.split_once('/').map_or(self.text.as_str(), |(_, call)| call)
                ),
            })
        });
        Ok(PlannedFault {
            process: process.transpose()?,
            fault: self.fault,
            origin: FaultOrigin::Option(self.text.clone()),
            ends_run: false,
        })
    }
}

/// An injected failure: calls fail, take longer or report wrong values, or an event never
/// completes. Matching calls are counted from the first step. A fault that no call matches fails
/// the run.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "fault")]
pub(crate) struct FaultWire {
    /// The CUDA or NVML name of the call, as in `cudaMalloc`, or `any` for all calls that allocate
    /// device memory, counted together.
    call: Located<String>,
    /// The process whose calls match. The count continues if the process is started again. Default:
    /// the main process.
    process: Option<NameText>,
    /// Matching calls before the first affected one. Default: 0.
    skip: Option<CountText>,
    /// Largest number of affected calls. Default: 1, or no limit with `probability`, `latency` or
    /// `off_by`.
    count: Option<CountText>,
    /// Probability that a matching call is affected, above 0 and at most 1, drawn from the seed.
    /// Default: 1.
    probability: Option<Located<f64>>,
    /// Matches only calls that request at least this much.
    min_size: Option<AmountText>,
    /// Matches only calls on this stream, or calls that serve a request on it.
    stream: Option<NameText>,
    /// `small` matches only calls for requests of at most 1 MiB, `large` only calls for larger
    /// requests.
    pool: Option<NameText>,
    /// The error of the call: `out_of_memory`, `illegal_address`, `launch_failure`, `ecc`,
    /// `device_lost` or `unknown`. Calls that allocate memory fail with `out_of_memory` by default.
    error: Option<NameText>,
    /// Every later call fails with the same error. Default: `true` for `illegal_address`,
    /// `launch_failure`, `ecc` and `device_lost` of CUDA calls.
    sticky: Option<Located<bool>>,
    /// Additional duration of the call: virtual time on the simulated device, real time on a GPU.
    latency: Option<DurationText>,
    /// Error of the free memory that `cudaMemGetInfo` reports, or of the used memory that NVML
    /// reports, as in `-100MiB`.
    off_by: Option<Located<String>>,
    /// `true`: the event of `cudaEventRecord` never completes, later work on its stream never runs,
    /// and waits for it never return.
    never_completes: Option<Located<bool>>,
    /// `error`: the run passes only if it ends with this error, or with a wait that never returns.
    expect: Option<NameText>,
}

pub(crate) fn check(
    given: &Located<Vec<Located<FaultWire>>>,
    checker: &Checker<'_>,
) -> Result<Vec<PlannedFault>, Problem> {
    match given.value.get(MAX_FAULTS) {
        Some(first_too_many) => Err(Problem::new(
            first_too_many.at,
            format!("more than {MAX_FAULTS} faults"),
        )
        .help("use `count` to affect several calls with one fault")),
        None if given.value.is_empty() => Err(Problem::new(given.at, "`faults` is empty")
            .help("as in `faults: [{ call: cudaMalloc, skip: 2 }]`")),
        None => given
            .value
            .iter()
            .map(|fault| fault.value.check(fault.at, checker))
            .collect(),
    }
}

impl FaultWire {
    fn check(&self, at: Position, checker: &Checker<'_>) -> Result<PlannedFault, Problem> {
        let calls = named(&self.call, ["call", "calls"], Calls::named, Calls::names())?;
        let effect = self.effect(at, calls)?;
        let strikes_all =
            self.probability.is_some() || matches!(effect, Effect::Takes(_) | Effect::OffBy(_));
        let count = match &self.count {
            Some(count) => Some(checker.whole(count, "count", 1..=u64::MAX)?),
            None => (!strikes_all).then_some(1),
        };
        let fault = Fault {
            calls,
            skip: checker.whole_or(self.skip.as_ref(), "skip", 0..=u64::MAX, 0)?,
            count,
            probability: self.probability.as_ref().map(probability).transpose()?,
            min_size: self.min_size(calls, checker)?,
            stream: self.stream(calls, checker)?,
            pool: self.pool(calls)?,
            effect,
        };
        let process = self
            .process
            .as_ref()
            .map(|name| checker.declared_process(name))
            .transpose()?;
        Ok(PlannedFault {
            process,
            fault,
            origin: FaultOrigin::File(at),
            ends_run: self.ends_run(effect)?,
        })
    }

    /// The effect of the fault. There is exactly one.
    fn effect(&self, at: Position, calls: Calls) -> Result<Effect, Problem> {
        let never = self.never_completes.as_ref().filter(|never| never.value);
        let given = [
            self.error.as_ref().map(|error| ("error", error.at)),
            self.latency.as_ref().map(|latency| ("latency", latency.at)),
            self.off_by.as_ref().map(|off_by| ("off_by", off_by.at)),
            never.map(|never| ("never_completes", never.at)),
        ];
        let mut given = given.into_iter().flatten();
        let first = given.next();
        if let (Some((one, _)), Some((other, position))) = (first, given.next()) {
            return Err(Problem::new(
                position,
                format!("`{one}` and `{other}` exclude each other"),
            )
            .help("write two faults"));
        }
        if let (Some(sticky), Some((other, _))) =
            (&self.sticky, first.filter(|(name, _)| *name != "error"))
        {
            return Err(Problem::new(
                sticky.at,
                format!("`sticky` works with errors only, not with `{other}`"),
            )
            .help("remove `sticky`"));
        }
        match (&self.latency, &self.off_by, never) {
            (Some(latency), ..) => Ok(Effect::Takes(duration(latency)?)),
            (_, Some(bytes), _) => off_by(bytes, calls),
            (.., Some(_)) if calls == Calls::Of(DeviceCall::RecordEvent) => {
                Ok(Effect::NeverCompletes)
            }
            (.., Some(never)) => Err(
                Problem::new(never.at, format!("`{calls}` records no event"))
                    .help("as in `{ call: cudaEventRecord, never_completes: true }`"),
            ),
            (None, None, None) => self.failure(at, calls),
        }
    }

    fn failure(&self, at: Position, calls: Calls) -> Result<Effect, Problem> {
        let error = match &self.error {
            None => InjectedError::usual(calls),
            Some(name) => named(
                name,
                ["error", "errors"],
                InjectedError::from_name,
                InjectedError::ALL.iter().map(|error| error.name()),
            )?,
        };
        let is_out_of_memory = error == InjectedError::OutOfMemory;
        if is_out_of_memory && !gets_memory(calls) && !gets_host_memory(calls) {
            let at = self.error.as_ref().map_or(at, |error| error.at);
            return Err(Problem::new(
                at,
                format!(
                    "`{calls}` does not allocate memory, so it cannot \
                 run out of memory"
                ),
            )
            .help(format!(
                "calls that allocate memory: {}; errors of other calls: illegal_address, \
                 launch_failure, ecc, device_lost, unknown",
                names(DeviceCall::gets_memory)
            )));
        }
        match &self.sticky {
            Some(sticky) if is_out_of_memory && sticky.value => Err(Problem::new(
                sticky.at,
                "`out_of_memory` cannot be sticky, because the next call may succeed",
            )
            .help("use `count` for several failed calls")),
            sticky => Ok(Effect::Fails {
                error,
                sticky: sticky
                    .as_ref()
                    .map_or_else(|| error.is_sticky(calls), |sticky| sticky.value),
            }),
        }
    }

    fn min_size(&self, calls: Calls, checker: &Checker<'_>) -> Result<Bytes, Problem> {
        match &self.min_size {
            None => Ok(Bytes::ZERO),
            Some(size)
                if gets_memory(calls)
                    || gets_host_memory(calls)
                    || calls == Calls::Of(DeviceCall::Reserve) =>
            {
                checker.positive_size(size, "min_size")
            }
            Some(size) => Err(
                Problem::new(size.at, format!("`{calls}` does not request memory"))
                    .help("remove `min_size`"),
            ),
        }
    }

    fn stream(&self, calls: Calls, checker: &Checker<'_>) -> Result<Option<usize>, Problem> {
        let is_of_a_stream = |call: DeviceCall| call.is_of_a_stream() || call.gets_memory();
        match (&self.stream, calls) {
            (Some(name), Calls::Of(call)) if !is_of_a_stream(call) => {
                Err(
                    Problem::new(name.at, format!("`{call}` does not use a stream")).help(format!(
                        "calls that use a stream: {}",
                        names(is_of_a_stream)
                    )),
                )
            }
            (name, _) => name
                .as_ref()
                .map(|name| Ok(checker.stream(Some(name))?.index()))
                .transpose(),
        }
    }

    fn pool(&self, calls: Calls) -> Result<Option<PoolKind>, Problem> {
        let Some(name) = &self.pool else {
            return Ok(None);
        };
        let wrong = |message: String, help: &str| Err(Problem::new(name.at, message).help(help));
        match name.text() {
            _ if !gets_memory(calls) => wrong(
                format!("`{calls}` does not allocate device memory"),
                "remove `pool`",
            ),
            "small" => Ok(Some(PoolKind::Small)),
            "large" => Ok(Some(PoolKind::Large)),
            other => wrong(
                format!("unknown pool `{other}`"),
                "write `small` for requests of at most 1 MiB, or `large` for larger requests",
            ),
        }
    }

    fn ends_run(&self, effect: Effect) -> Result<bool, Problem> {
        let Some(expect) = &self.expect else {
            return Ok(false);
        };
        let wrong = |message: String, help: &str| Err(Problem::new(expect.at, message).help(help));
        match effect {
            _ if expect.text() != "error" => wrong(
                format!("unknown end of a run `{}`", expect.text()),
                "write `expect: error`, or remove it if the run continues",
            ),
            Effect::Takes(_) | Effect::OffBy(_) => wrong(
                "this fault is not an error, so it cannot end a run".to_owned(),
                "remove `expect`",
            ),
            Effect::Fails {
                error: InjectedError::OutOfMemory,
                ..
            } => wrong(
                "`out_of_memory` does not end a run".to_owned(),
                "write `expect: oom` at the step that requests the memory",
            ),
            Effect::Fails { .. } | Effect::NeverCompletes => Ok(true),
        }
    }
}

fn probability(given: &Located<f64>) -> Result<f64, Problem> {
    let is_one = given.value > 0.0 && given.value <= 1.0;
    is_one.then_some(given.value).ok_or_else(|| {
        Problem::new(given.at, format!("`probability` cannot be {}", given.value))
            .help("write a number above 0 and at most 1, as in `0.25`")
    })
}

fn off_by(text: &Located<String>, calls: Calls) -> Result<Effect, Problem> {
    if !matches!(calls, Calls::Of(call) if call.tells_memory()) {
        return Err(Problem::new(
            text.at,
            format!("`{calls}` does not report an amount of memory"),
        )
        .help(format!(
            "calls that report one: {}",
            names(DeviceCall::tells_memory)
        )));
    }
    let (sign, size) = match text.value.split_at_checked(1) {
        Some(("-", size)) => (-1, size),
        Some(("+", size)) => (1, size),
        _ => (1, text.value.as_str()),
    };
    let wrong = |why: String| Problem::new(text.at, why).label("a size, as in `-100MiB`");
    let bytes = Bytes::parse(size).map_err(|why| wrong(why.to_string()))?;
    match i64::try_from(bytes.0) {
        Ok(0) => Err(wrong("`off_by` cannot be 0".to_owned())),
        Ok(bytes) => Ok(Effect::OffBy(sign * bytes)),
        Err(_) => Err(wrong(format!(
            "{bytes} is more than the memory of any device"
        ))),
    }
}

fn gets_memory(calls: Calls) -> bool {
    !matches!(calls, Calls::Of(call) if !call.gets_memory())
}

const fn gets_host_memory(calls: Calls) -> bool {
    matches!(calls, Calls::Of(call) if call.gets_host_memory())
}

fn names(is_so: impl Fn(DeviceCall) -> bool) -> String {
    DeviceCall::ALL
        .iter()
        .filter(|call| is_so(**call))
        .map(|call| call.name())
        .collect::<Vec<_>>()
        .join(", ")
}
