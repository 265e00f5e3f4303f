//! Checks policies for their step. A policy that cannot help the step is rejected.

use std::collections::BTreeSet;

use harness_allocator::{device::HostMemory, units::Nanos};

use super::wire::{
    BatchWire, ChainWire, CheckpointWire, HostMemoryWire, PolicyWire, SpillWire, SplitWire,
    WaitWire,
};
use super::{BatchRule, Chain, MAX_POLICIES, MAX_RETRIES, Policy, PolicyKind};
use crate::plan::{AttemptPlan, PlanPart, Precision, SpilledPart};
use crate::{checker::Checker, metric::BufferName};
use harness_language::error::{Problem, quoted};
use harness_language::located::{Located, Position};
use harness_language::text::{CountText, NameText, duration};
use harness_language::variant::Variant;

pub(crate) struct Recoverable {
    step: &'static str,
    parts: &'static [PlanPart],
    first: AttemptPlan,
    /// Layers with activations, or 0.
    layers: u64,
    has_state: bool,
}

impl Recoverable {
    /// Steps that can recover, with the parts of a plan that they support.
    pub(crate) const STEPS: [(&'static str, &'static [PlanPart]); 3] = [
        ("alloc", &[PlanPart::Buffers]),
        (
            "train",
            &[
                PlanPart::Batch,
                PlanPart::MicroBatches,
                PlanPart::Checkpointing,
                PlanPart::Precision,
                PlanPart::Spilled,
            ],
        ),
        ("infer", &[PlanPart::Buffers, PlanPart::Requests]),
    ];

    pub(crate) const fn alloc() -> Self {
        Self::of(0, AttemptPlan::of_batch(1), 0, false)
    }

    pub(crate) const fn train(first: AttemptPlan, layers: u64, has_state: bool) -> Self {
        Self::of(1, first, layers, has_state)
    }

    pub(crate) const fn infer() -> Self {
        Self::of(2, AttemptPlan::of_batch(1), 0, false)
    }

    const fn of(step: usize, first: AttemptPlan, layers: u64, has_state: bool) -> Self {
        let (step, parts) = Self::STEPS[step];
        Self {
            step,
            parts,
            first,
            layers,
            has_state,
        }
    }

    fn serves_requests(&self) -> bool {
        self.parts.contains(&PlanPart::Requests)
    }

    /// The policies that a step with these parts supports.
    pub(crate) fn accepted(parts: &'static [PlanPart]) -> impl Iterator<Item = PolicyKind> {
        PolicyKind::ALL
            .iter()
            .copied()
            .filter(|kind| kind.needs().is_none_or(|part| parts.contains(&part)))
    }

    fn names(&self) -> Vec<&'static str> {
        Self::accepted(self.parts).map(PolicyKind::name).collect()
    }
}

pub(crate) fn check(
    wire: &ChainWire,
    step: &Recoverable,
    checker: &mut Checker<'_>,
) -> Result<Chain, Problem> {
    let (wires, at) = wire.policies();
    if wires.is_empty() {
        return Err(
            Problem::new(at, "this list of policies is empty").help(format!(
                "write one or more of {}",
                quoted(&step.names(), ", ")
            )),
        );
    }
    if let Some(surplus) = wires.get(MAX_POLICIES) {
        let message = format!("more than {MAX_POLICIES} policies");
        return Err(Problem::new(surplus.at, message)
            .help(format!("use at most {MAX_POLICIES} policies per step")));
    }
    let policies = wires
        .iter()
        .map(|wire| check_one(wire, step, checker))
        .collect::<Result<Vec<_>, _>>()?;
    if let Some(last) = policies
        .iter()
        .position(|policy| ends_recovery(policy, step))
        && let Some(unreachable) = wires.get(last + 1)
    {
        let kind = policies[last].kind();
        return Err(Problem::new(
            unreachable.at,
            format!("this policy is never tried, because `{kind}` comes before it"),
        )
        .see(wires[last].at, "ends the recovery")
        .help(format!("move `{kind}` to the end, or remove it")));
    }
    Ok(Chain(policies))
}

/// Returns whether later policies are never tried. A waiting `infer` request has no time limit.
fn ends_recovery(policy: &Policy, step: &Recoverable) -> bool {
    match policy {
        Policy::GiveUp => true,
        Policy::Wait { .. } => step.serves_requests(),
        _ => false,
    }
}

fn check_one(
    wire: &Located<Variant<PolicyWire>>,
    step: &Recoverable,
    checker: &mut Checker<'_>,
) -> Result<Policy, Problem> {
    let at = wire.at;
    let (name, policy) = wire.value.known(at, &step.names())?;
    if !step.names().contains(&name) {
        let message = format!("`{}` does not support `{name}`", step.step);
        return Err(Problem::new(at, message).help(format!(
            "`{}` recovers with {}",
            step.step,
            quoted(&step.names(), ", ")
        )));
    }
    match policy {
        PolicyWire::GiveUp(_) => Ok(Policy::GiveUp),
        PolicyWire::EmptyCache(fields) => Ok(Policy::EmptyCache {
            retries: retries(fields.retries.as_ref(), 1, checker)?,
        }),
        PolicyWire::Synchronize(fields) => Ok(Policy::Synchronize {
            retries: retries(fields.retries.as_ref(), 1, checker)?,
        }),
        PolicyWire::Free(fields) => Ok(Policy::Free {
            buffers: buffers(&fields.buffers, name, at, &mut |name| {
                checker.live_named(name)
            })?,
        }),
        PolicyWire::Evict(fields) if fields.buffers.is_empty() && step.serves_requests() => {
            Ok(Policy::Evict {
                buffers: Vec::new(),
            })
        }
        PolicyWire::Evict(fields) => Ok(Policy::Evict {
            buffers: buffers(&fields.buffers, name, at, &mut |name| {
                checker.live_or_numbered(name)
            })?,
        }),
        PolicyWire::HalveBatch(fields) => batch(fields, BatchRule::Halve, step, checker),
        PolicyWire::ShrinkBatch(fields) => batch(fields, BatchRule::Shrink, step, checker),
        PolicyWire::BisectBatch(fields) => batch(fields, BatchRule::Bisect, step, checker),
        PolicyWire::ScaleBatch(fields) => Ok(Policy::ScaleBatch {
            mode: fields.mode.unwrap_or_default(),
        }),
        PolicyWire::HalveMicroBatch(_) if step.first.samples_at_once() == 1 => Err(nothing_to_do(
            at,
            "micro-batches have one sample already",
            "use a larger batch, or remove the policy",
        )),
        PolicyWire::HalveMicroBatch(_) => Ok(Policy::HalveMicroBatch),
        PolicyWire::SplitAndAccumulate(fields) => split_and_accumulate(fields, at, step, checker),
        PolicyWire::CheckpointMore(fields) => checkpoint_more(fields, at, step, checker),
        PolicyWire::HalfPrecision(_) => match step.first.precision {
            Precision::Fp32 => Ok(Policy::HalfPrecision),
            Precision::Mixed => Err(nothing_to_do(
                at,
                "the precision is mixed already",
                "start with `fp32`, or remove the policy",
            )),
        },
        PolicyWire::SpillToHost(fields) => spill(fields, at, step, checker),
        PolicyWire::Wait(fields) => wait(fields, at, step, checker),
    }
}

fn wait(
    WaitWire {
        first,
        factor,
        retries: tries,
    }: &WaitWire,
    at: Position,
    step: &Recoverable,
    checker: &mut Checker<'_>,
) -> Result<Policy, Problem> {
    if step.serves_requests() && (first.is_some() || factor.is_some() || tries.is_some()) {
        let message = format!("`wait` takes no fields in `{}`", step.step);
        return Err(Problem::new(at, message)
            .help("write `wait`; a request waits without a limit until other requests end"));
    }
    Ok(Policy::Wait {
        first: first.as_ref().map_or(Ok(Nanos::millis(10)), duration)?,
        factor: checker.whole_or(factor.as_ref(), "factor", 1..=10, 2)? as u32,
        retries: retries(tries.as_ref(), 5, checker)?,
    })
}

fn split_and_accumulate(
    fields: &SplitWire,
    at: Position,
    step: &Recoverable,
    checker: &Checker<'_>,
) -> Result<Policy, Problem> {
    let samples = step.first.samples_at_once();
    let floor = floor(fields.floor.as_ref(), samples, "part", "split", checker)?;
    if floor == samples {
        return Err(nothing_to_do(
            at,
            &format!("the batch in memory is at the floor, {floor}, already"),
            "use a larger batch or a lower floor",
        ));
    }
    Ok(Policy::SplitAndAccumulate { floor })
}

fn checkpoint_more(
    fields: &CheckpointWire,
    at: Position,
    step: &Recoverable,
    checker: &Checker<'_>,
) -> Result<Policy, Problem> {
    let most = checker.whole_or(
        fields.most.as_ref(),
        "most",
        2..=step.layers.max(2),
        step.layers.isqrt().max(2),
    )?;
    if step.layers < 2
        || step
            .first
            .checkpoint_every
            .is_some_and(|every| every >= most)
    {
        return Err(nothing_to_do(
            at,
            "no layers are left to checkpoint",
            "use more layers, or a larger `most`",
        ));
    }
    Ok(Policy::CheckpointMore { most })
}

fn nothing_to_do(at: Position, why: &str, help: &str) -> Problem {
    Problem::new(at, format!("this policy cannot help: {why}")).help(help.to_owned())
}

fn buffers(
    names: &[NameText],
    policy: &str,
    at: Position,
    find: &mut dyn FnMut(&NameText) -> Result<BufferName, Problem>,
) -> Result<Vec<BufferName>, Problem> {
    if names.is_empty() {
        return Err(Problem::new(at, format!("`{policy}` names no buffer"))
            .help(format!("as in `{policy}: {{ buffers: [cache] }}`")));
    }
    let (mut buffers, mut seen) = (Vec::new(), BTreeSet::new());
    for name in names {
        let buffer = find(name)?;
        if !seen.insert(buffer.index()) {
            return Err(
                Problem::new(name.at, format!("buffer `{buffer}` is named twice"))
                    .help("name it once"),
            );
        }
        buffers.push(buffer);
    }
    Ok(buffers)
}

fn batch(
    fields: &BatchWire,
    rule: BatchRule,
    step: &Recoverable,
    checker: &Checker<'_>,
) -> Result<Policy, Problem> {
    let (verb, default) = match rule {
        BatchRule::Halve => ("halve", 1),
        BatchRule::Shrink => ("shrink", MAX_RETRIES),
        BatchRule::Bisect => ("bisect", MAX_RETRIES),
    };
    Ok(Policy::Batch {
        rule,
        floor: floor(
            fields.floor.as_ref(),
            step.first.batch,
            "batch",
            verb,
            checker,
        )?,
        retries: retries(fields.retries.as_ref(), default, checker)?,
        empty_cache: fields.empty_cache,
    })
}

fn spill(
    fields: &SpillWire,
    at: Position,
    step: &Recoverable,
    checker: &Checker<'_>,
) -> Result<Policy, Problem> {
    let part = fields
        .what
        .as_ref()
        .map(|what| what.value)
        .unwrap_or_default();
    if part == SpilledPart::OptimizerState && !step.has_state {
        let at = fields.what.as_ref().map_or(at, |given| given.at);
        return Err(nothing_to_do(
            at,
            "the optimizer has no state",
            "use an `optimizer` with state, or `what: activations`",
        ));
    }
    let memory = match fields
        .memory
        .as_ref()
        .map_or(HostMemoryWire::Pinned, |memory| memory.value)
    {
        HostMemoryWire::Pinned => HostMemory::Pinned,
        HostMemoryWire::Pageable => HostMemory::Pageable,
        HostMemoryWire::MappedFile => HostMemory::MappedFile {
            folder: fields
                .folder
                .as_ref()
                .map(|folder| checker.declared.folder.join(&folder.value)),
        },
    };
    match (&fields.folder, &memory) {
        (Some(folder), HostMemory::Pinned | HostMemory::Pageable) => {
            Err(
                Problem::new(folder.at, "`folder` needs `memory: mapped_file`").help(
                    "add `memory: \
                 mapped_file`, or remove `folder`",
                ),
            )
        }
        (Some(folder), HostMemory::MappedFile { folder: Some(path) }) if !path.is_dir() => {
            Err(Problem::new(
                folder.at,
                format!("the folder {} does not exist", path.display()),
            )
            .help(
                "name an existing folder, relative to the scenario's, or remove `folder` for \
                     TMPDIR",
            ))
        }
        _ => Ok(Policy::SpillToHost { part, memory }),
    }
}

/// Parses a floor, which is at most the start value.
fn floor(
    given: Option<&CountText>,
    start: u64,
    what: &str,
    verb: &str,
    checker: &Checker<'_>,
) -> Result<u64, Problem> {
    let Some(given) = given else { return Ok(1) };
    let floor = checker.whole(given, "floor", 1..=u64::MAX)?;
    if floor <= start {
        return Ok(floor);
    }
    let message =
        format!("the floor {floor} is above the {what} {start}, so there is nothing to {verb}");
    Err(Problem::new(given.at, message).help(format!("use a floor from 1 to {start}")))
}

fn retries(given: Option<&CountText>, default: u32, checker: &Checker<'_>) -> Result<u32, Problem> {
    checker
        .whole_or(given, "retries", 1..=u64::from(MAX_RETRIES), default.into())
        .map(|retries| retries as u32)
}
