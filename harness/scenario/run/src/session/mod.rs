//! A session: scenarios × allocators × repetitions. Arms are interleaved, and each gets a fresh
//! device. The session reports [events](Event). [`supervise`] runs a session in a separate thread
//! and enforces its time limits.

mod comparisons;
pub mod every_fault;
mod repeated;
mod scenario_process;
mod supervise;

use std::sync::{Arc, atomic::AtomicBool, mpsc::Sender};
use std::{borrow::Cow, collections::BTreeSet};

#[cfg(doc)]
use harness_allocator::allocator::AllocatorKind;
use harness_allocator::device::{Clock, DeviceError, DeviceInfo, TestDevice};
use harness_allocator::{allocator::AllocatorSpec, units::Bytes};
use harness_base::words::count;

use self::comparisons::Comparisons;
use crate::context::{Figures, kind_of};
use crate::control::{Control, DEFAULT_TIME_LIMIT, Phase};
use crate::processes::{ProcessGroup, StartedBy};
use crate::run::{Run, RunObserver, RunRequest, RunResult};
use crate::workload::exec;
use harness_base::shell::quoted;
use harness_devices::DeviceSource;
use harness_record::{
    Collector, Event, PlannedRun, RECORD_VERSION, Records, Rule, RunRecord, SkipKind, Verdict,
    Violation, timeline::Timeline,
};
use harness_scenario::{FaultOrigin, Feature, Needs, PlannedFault, Scenario};
use harness_trace::snapshot::Snapshot;

pub use self::scenario_process::serve_process;
pub use self::supervise::{SupervisedEnd, supervise};

#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub scenarios: Vec<Scenario>,
    pub selection: Selection,
    /// Overrides the scenarios' seeds.
    pub seed: Option<u64>,
    /// Overrides the memory that the scenarios need.
    pub memory: Option<Bytes>,
    /// The number of runs of each arm.
    pub repetitions: u32,
    /// True if every operation is audited. Only measurements of the allocators' speed turn this
    /// off.
    pub audit: bool,
    /// Stops after the first failed run.
    pub fail_fast: bool,
    /// How the user started this program, for the reproduce command: `harness`, or `cargo run
    /// --release --`.
    pub program: String,
}

/// Receivers of additional output. `None` costs nothing.
#[derive(Clone, Debug, Default)]
pub struct Sinks {
    /// A snapshot of each checked run, sent before its [`Event::RunEnded`].
    pub snapshots: Option<Sender<Snapshot>>,
    /// A timeline of each arm, from an additional run.
    pub timelines: Option<Sender<Timeline>>,
}

#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// The names of the scenarios' allocators to run; `None`: all.
    pub only: Option<Vec<String>>,
    /// Additional allocators: PyTorch's for every scenario that lists it with any settings,
    /// libraries for every scenario.
    pub added: Vec<AllocatorSpec>,
    /// Restricts everything to these pairs of a scenario's [id](Scenario::id) and an allocator's
    /// name; `None`: no restriction.
    pub pairs: Option<BTreeSet<(String, String)>>,
}

impl Selection {
    /// Selects allocators by name.
    pub fn only(names: impl IntoIterator<Item = impl ToString>) -> Self {
        Self {
            only: Some(names.into_iter().map(|name| name.to_string()).collect()),
            ..Self::default()
        }
    }

    /// The allocators of a scenario in its order, then the added ones.
    pub fn of<'a>(&'a self, scenario: &'a Scenario) -> Vec<&'a AllocatorSpec> {
        let wanted = |arm: &&AllocatorSpec| {
            self.only
                .as_ref()
                .is_none_or(|only| only.contains(&arm.to_string()))
        };
        let mut arms: Vec<&AllocatorSpec> = scenario.allocators.iter().filter(wanted).collect();
        for added in self
            .added
            .iter()
            .filter(|added| !added.is_pytorch() || has_pytorchs(scenario))
        {
            let arm = listed_as(scenario, added).unwrap_or(added);
            if !arms.iter().any(|there| there.is_equivalent_to(arm)) {
                arms.push(arm);
            }
        }
        if let Some(pairs) = &self.pairs {
            arms.retain(|arm| pairs.contains(&(scenario.id(), arm.to_string())));
        }
        arms
    }
}

/// The allocator of the scenario that is equivalent to this one.
pub fn listed_as<'a>(scenario: &'a Scenario, added: &AllocatorSpec) -> Option<&'a AllocatorSpec> {
    scenario
        .allocators
        .iter()
        .find(|listed| listed.is_equivalent_to(added))
}

/// Returns whether the scenario lists PyTorch's allocator.
pub fn has_pytorchs(scenario: &Scenario) -> bool {
    scenario.allocators.iter().any(|arm| arm.is_pytorch())
}

/// One run of a plan, before it starts.
#[derive(Clone, Copy, Debug)]
pub struct ArmRun<'a> {
    pub scenario: &'a Scenario,
    pub allocator: &'a AllocatorSpec,
    pub repetition: u32,
}

impl ArmRun<'_> {
    /// Returns whether the user added this allocator. The scenario's expectations are then noted,
    /// not judged.
    pub fn only_observed(&self) -> bool {
        !self.scenario.allocators.contains(self.allocator)
    }

    fn observer<'o>(
        &self,
        control: &Arc<Control>,
        emit: Option<&'o mut dyn FnMut(Event)>,
        record: Option<&'o mut dyn FnMut(Snapshot)>,
    ) -> RunObserver<'o> {
        RunObserver {
            control: Arc::clone(control),
            only_observed: self.only_observed(),
            emit,
            record,
        }
    }
}

impl Plan {
    /// All runs in order. Repetitions form the outer loop, so drift of the machine affects all arms
    /// alike.
    pub fn arms(&self) -> impl Iterator<Item = ArmRun<'_>> {
        let arms = move |repetition| {
            self.scenarios.iter().flat_map(move |scenario| {
                self.selection
                    .of(scenario)
                    .into_iter()
                    .map(move |allocator| ArmRun {
                        scenario,
                        allocator,
                        repetition,
                    })
            })
        };
        (0..self.repetitions).flat_map(arms)
    }

    pub fn planned(&self) -> Vec<PlannedRun> {
        let planned = |arm: ArmRun<'_>| PlannedRun {
            scenario: arm.scenario.name.clone(),
            allocator: arm.allocator.to_string(),
            repetition: arm.repetition,
        };
        self.arms().map(planned).collect()
    }

    /// Runs everything in this thread and collects the records.
    pub fn run(
        &self,
        source: &DeviceSource,
        interrupt: &Arc<AtomicBool>,
    ) -> Result<Records, DeviceError> {
        let mut collector = Collector::default();
        let control = Arc::new(Control::new(Arc::clone(interrupt)));
        self.observe(source, &control, &Sinks::default(), &mut |event| {
            collector.add(event)
        })?;
        Ok(collector.into_records())
    }

    /// Runs everything and emits events; stops early on an interrupt.
    pub fn observe(
        &self,
        source: &DeviceSource,
        control: &Arc<Control>,
        sinks: &Sinks,
        emit: &mut dyn FnMut(Event),
    ) -> Result<(), DeviceError> {
        let harness = env!("CARGO_PKG_VERSION").to_owned();
        emit(Event::Started {
            version: RECORD_VERSION,
            harness,
            planned: self.planned(),
        });
        let mut device: Option<DeviceInfo> = None;
        let mut is_lost = false;
        let mut comparisons = Comparisons::default();
        for arm in self.arms() {
            if control.is_interrupted() {
                break;
            }
            let record = match &device {
                Some(device) if is_lost => {
                    let reason = "the device could not be opened for an earlier run".to_owned();
                    self.not_run(
                        &arm,
                        source,
                        device.clone(),
                        Verdict::Skipped {
                            reason,
                            kind: SkipKind::Insufficient,
                        },
                    )
                }
                _ => match (
                    self.observe_arm(&arm, source, control, sinks, emit),
                    &device,
                ) {
                    (Ok((mut record, figures)), _) => {
                        comparisons.add(arm.scenario, &mut record, figures);
                        judge_expected_failure(&arm, &mut record);
                        record
                    }
                    (Err(error), None) => return Err(error),
                    (Err(error), Some(device)) => {
                        is_lost = true;
                        self.not_run(
                            &arm,
                            source,
                            device.clone(),
                            device_failed(
                                "the device to open again, as for the run before",
                                &error,
                            ),
                        )
                    }
                },
            };
            device.get_or_insert_with(|| record.device.clone());
            let is_last = self.fail_fast && matches!(record.verdict, Verdict::Failed { .. });
            emit(Event::RunEnded(Box::new(record)));
            if is_last {
                break;
            }
        }
        control.leave();
        Ok(())
    }

    pub fn run_arm(
        &self,
        arm: &ArmRun<'_>,
        source: &DeviceSource,
        interrupt: &Arc<AtomicBool>,
    ) -> Result<RunRecord, DeviceError> {
        let control = Arc::new(Control::new(Arc::clone(interrupt)));
        let mut comparisons = Comparisons::default();
        let mut run = |arm: &ArmRun<'_>| -> Result<RunRecord, DeviceError> {
            let (mut record, figures) =
                self.observe_arm(arm, source, &control, &Sinks::default(), &mut |_| {})?;
            comparisons.add(arm.scenario, &mut record, figures);
            Ok(record)
        };
        let needed = comparisons::needed_for(arm.scenario, &arm.allocator.to_string());
        for allocator in arm
            .scenario
            .allocators
            .iter()
            .filter(|allocator| needed.contains(&allocator.to_string()))
        {
            run(&ArmRun { allocator, ..*arm })?;
        }
        let mut record = run(arm)?;
        judge_expected_failure(arm, &mut record);
        Ok(record)
    }

    /// Runs one arm with all checks, or returns the record of why it could not run.
    fn run_checked(
        &self,
        arm: &ArmRun<'_>,
        request: &RunRequest<'_>,
        source: &DeviceSource,
        observer: RunObserver<'_>,
    ) -> Result<Result<RunResult, RunRecord>, DeviceError> {
        let scenario = request.scenario;
        let group = ProcessGroup::of(
            scenario,
            arm.allocator,
            (request.seed, self.audit),
            source,
            StartedBy::Exec,
        )?;
        let device = match open(source, scenario, arm.allocator, group.as_ref())? {
            Ok(device) => device,
            Err((info, kind, reason)) => {
                let skipped = Verdict::Skipped { reason, kind };
                return Ok(Err(self.not_run(arm, source, info, skipped)));
            }
        };
        let run = Run::new(request, device).observed(observer);
        match run.with_processes(group).checked_with_figures() {
            // If an injected fault prevents the start, the run has failed; the device is not lost.
            Err(error) if !scenario.faults.is_empty() => {
                let info = source.open()?.info().clone();
                let expected =
                    "the device to create streams and report its memory before the first step";
                let failed = device_failed(expected, &error);
                Ok(Err(self.not_run(arm, source, info, failed)))
            }
            observed => observed.map(Ok),
        }
    }

    /// Runs one arm twice on fresh devices: with all checks and, if it passes, for its times.
    fn observe_arm(
        &self,
        arm: &ArmRun<'_>,
        source: &DeviceSource,
        control: &Arc<Control>,
        sinks: &Sinks,
        emit: &mut dyn FnMut(Event),
    ) -> Result<(RunRecord, Figures), DeviceError> {
        control.enter(Phase::Opening, DEFAULT_TIME_LIMIT);
        let scenario = &*self.sized(arm.scenario);
        let request = self.request(arm, scenario, source);
        let recordings = sinks
            .snapshots
            .as_ref()
            .filter(|_| arm.allocator.not_recorded().is_none());
        // The receiver is gone if the session was aborted.
        let mut send = recordings.map(|recordings| |snapshot| drop(recordings.send(snapshot)));
        let record = send.as_mut().map(|send| send as &mut dyn FnMut(Snapshot));
        let observer = arm.observer(control, Some(emit), record);
        let RunResult {
            mut record,
            mut figures,
            ..
        } = match self.run_checked(arm, &request, source, observer)? {
            Ok(result) => result,
            Err(record) => return Ok((record, Figures::new())),
        };
        // Another run on a fresh device, if one can still be opened.
        let again = || -> Result<Option<Run<'_, '_>>, DeviceError> {
            control.enter(Phase::Opening, DEFAULT_TIME_LIMIT);
            let device = open(source, scenario, arm.allocator, None)?.ok();
            Ok(device.map(|device| {
                Run::new(&request, device).observed(arm.observer(control, None, None))
            }))
        };
        // Programs and processes run only once, because their times mean nothing.
        let is_alone = scenario.execs().is_empty() && scenario.processes.is_empty();
        // Other processes on a real device could change the decisions of recovery policies.
        if record.verdict == Verdict::Passed
            && is_alone
            && record.device.clock == Clock::Simulated
            && repeated::has_recovered(&record)
            && let Some(run) = again()?
        {
            repeated::judge(&mut record, &run.checked()?);
        }
        // Thread interleaving differs from run to run, so times would too.
        let has_times = is_alone
            && !scenario.has_threads()
            && (record.device.clock == Clock::Simulated || arm.allocator.not_timed().is_none());
        if record.verdict == Verdict::Passed
            && has_times
            && let Some(run) = again()?
        {
            let timed = run.timed()?;
            figures.extend(timed.figures.clone());
            timed.add_times_to(&mut record);
        }
        if let Some(timelines) = sinks.timelines.as_ref().filter(|_| has_times)
            && let Some(run) = again()?
        {
            // The receiver is gone if the session was aborted.
            drop(timelines.send(run.traced()?));
        }
        Ok((record, figures))
    }

    /// The scenario with the memory of the plan.
    fn sized<'s>(&self, scenario: &'s Scenario) -> Cow<'s, Scenario> {
        match self.memory {
            Some(memory) => Cow::Owned(Scenario {
                needs: Needs {
                    memory,
                    ..scenario.needs.clone()
                },
                ..scenario.clone()
            }),
            None => Cow::Borrowed(scenario),
        }
    }

    fn seed_of(&self, arm: &ArmRun<'_>) -> u64 {
        self.seed.unwrap_or(arm.scenario.seed)
    }

    fn request<'a>(
        &self,
        arm: &ArmRun<'a>,
        scenario: &'a Scenario,
        source: &DeviceSource,
    ) -> RunRequest<'a> {
        let seed = self.seed_of(arm);
        let reproduce = self.reproduce(arm, source, seed);
        let ArmRun {
            allocator,
            repetition,
            ..
        } = *arm;
        RunRequest {
            scenario,
            allocator,
            seed,
            repetition,
            reproduce,
            audit: self.audit,
            interrupt: Arc::default(),
        }
    }

    fn not_run(
        &self,
        arm: &ArmRun<'_>,
        source: &DeviceSource,
        device: DeviceInfo,
        verdict: Verdict,
    ) -> RunRecord {
        self.request(arm, &self.sized(arm.scenario), source).record(
            device,
            arm.only_observed(),
            verdict,
        )
    }

    fn reproduce(&self, arm: &ArmRun<'_>, source: &DeviceSource, seed: u64) -> String {
        let memory = self
            .memory
            .map(|memory| format!(" --memory {}B", memory.0))
            .unwrap_or_default();
        let (program, path) = (&self.program, quoted(&arm.scenario.path.to_string_lossy()));
        let allocator = quoted(&arm.allocator.to_string());
        let audit = if self.audit { "" } else { " --skip-checks" };
        let set = |(name, value): &(String, String)| {
            format!(" --set {}", quoted(&format!("{name}={value}")))
        };
        let parameters: String = arm.scenario.parameters.iter().map(set).collect();
        let others = comparisons::needed_for(arm.scenario, &arm.allocator.to_string());
        let others: String = others
            .iter()
            .map(|other| format!("--allocator {} ", quoted(other)))
            .collect();
        let fail = |planned: &PlannedFault| match &planned.origin {
            FaultOrigin::File(_) => None,
            FaultOrigin::Option(text) => Some(format!(" --fail {text}")),
        };
        let faults: String = arm.scenario.faults.iter().filter_map(fail).collect();
        format!(
            "{program} run {path} --device {source} {others}--allocator {allocator} --seed \
             {seed}{parameters}{memory}{audit}{faults}"
        )
    }
}

/// The device of an arm, or its description and the reason why the arm does not run on it.
type Opened = Result<Box<dyn TestDevice>, (DeviceInfo, SkipKind, String)>;

fn open(
    source: &DeviceSource,
    scenario: &Scenario,
    allocator: &AllocatorSpec,
    group: Option<&ProcessGroup>,
) -> Result<Opened, DeviceError> {
    let mut device = source.open()?;
    let info = device.info().clone();
    let reason = scenario.skip.of(&allocator.to_string(), kind_of(&info));
    let skip = reason
        .map(|reason| (SkipKind::OnPurpose, reason.to_owned()))
        .or_else(|| {
            not_applicable(&info, scenario, allocator)
                .map(|reason| (SkipKind::NotApplicable, reason))
        })
        // A library fails here only if it is optional and was not built.
        .or_else(|| {
            let kind = if allocator.as_library().is_some() {
                SkipKind::OnPurpose
            } else {
                SkipKind::Insufficient
            };
            allocator
                .build()
                .check_device(&mut *device)
                .err()
                .map(|error| (kind, error.to_string()))
        })
        .or_else(|| {
            insufficient(&mut *device, source, scenario)
                .map(|reason| (SkipKind::Insufficient, reason))
        });
    if let Some((kind, reason)) = skip {
        return Ok(Err((info, kind, reason)));
    }
    let memory = scenario.needs.memory;
    let limited = match group {
        None => source.limit(device, memory),
        Some(group) => source
            .admit(&mut *device, memory)
            .and_then(|()| group.share(device, memory)),
    };
    match limited {
        Ok(device) => Ok(Ok(device)),
        Err(error @ DeviceError::Unavailable { .. }) => {
            Ok(Err((info, SkipKind::Insufficient, error.to_string())))
        }
        Err(error) => Err(error),
    }
}

/// Why the scenario is for another kind of device or for other allocators.
fn not_applicable(
    device: &DeviceInfo,
    scenario: &Scenario,
    allocator: &AllocatorSpec,
) -> Option<String> {
    if let Some(wanted) = scenario
        .needs
        .device
        .filter(|wanted| *wanted != kind_of(device))
    {
        return Some(format!(
            "the scenario needs the device `{}`, and this is `{}`",
            wanted.name(),
            kind_of(device).name()
        ));
    }
    let mut execs = scenario.execs().into_iter().filter(|exec| !exec.optional);
    if let Some(reason) =
        execs.find_map(|exec| exec::not_applicable(exec, device, allocator.effective().is_some()))
    {
        return Some(reason);
    }
    if scenario.has_threads() && allocator.effective().is_none() {
        return Some(format!(
            "a storm of the scenario needs threads, which `{allocator}` does not support"
        ));
    }
    (scenario.uses_private_pools() && allocator.build().private_pools().is_none())
        .then(|| format!("the scenario uses private pools, which `{allocator}` does not support"))
}

/// The first requirement of the scenario that the device or the machine does not meet.
fn insufficient(
    device: &mut dyn TestDevice,
    source: &DeviceSource,
    scenario: &Scenario,
) -> Option<String> {
    let Needs {
        devices, features, ..
    } = &scenario.needs;
    let there = source.devices();
    if *devices > there {
        return Some(format!(
            "the scenario needs {}, and {there} {} available",
            count(*devices, "device"),
            if there == 1 { "is" } else { "are" }
        ));
    }
    for feature in features {
        let is_there = match feature {
            Feature::VirtualMemory => device.mapped().is_some(),
            Feature::MemoryPools => device.pooled().is_some(),
            Feature::ProcessMemory => device.memory().is_ok_and(|memory| memory.process.is_some()),
        };
        if !is_there {
            return Some(format!(
                "the scenario needs `{}`, which this device does not have",
                feature.name()
            ));
        }
    }
    scenario
        .execs()
        .into_iter()
        .filter(|exec| !exec.optional)
        .find_map(|exec| exec::cannot_start(exec, device.info()))
}

/// Applies `expected_to_fail`. Comparisons between allocators have been judged before.
fn judge_expected_failure(arm: &ArmRun<'_>, record: &mut RunRecord) {
    let kind = kind_of(&record.device);
    let Some(reason) = arm
        .scenario
        .expected_to_fail
        .of(&record.allocator, kind)
        .filter(|_| !arm.only_observed())
    else {
        return;
    };
    let reason = reason.to_owned();
    record.verdict = match std::mem::replace(&mut record.verdict, Verdict::Passed) {
        Verdict::Failed { first, rest } => Verdict::FailedAsExpected {
            reason,
            first,
            rest,
        },
        Verdict::Passed => {
            let expected = format!("the run to fail: {reason}");
            Violation::before_steps(
                Rule::ExpectedFailure,
                expected,
                "it passed; remove `expected_to_fail`",
            )
            .into()
        }
        other => other,
    };
}

/// The verdict of an arm whose device failed before its first step.
fn device_failed(expected: &str, error: &DeviceError) -> Verdict {
    Violation::before_steps(Rule::DeviceFailure, expected, error.to_string()).into()
}
