//! `train`: iterations of training, with the memory that they take.

use std::fmt;

use harness_allocator::units::Bytes;
use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::ending::{Ending, EndingWire};
use crate::metric::{ReportKey, StepName, StreamName};
use crate::policy::{self, Policy, PolicyWire, Recoverable};
use harness_language::error::Problem;
use harness_language::located::{Located, Position};
use harness_language::text::{AmountText, CountText, NameText};

/// Most iterations of one `train`.
pub const MAX_ITERATIONS: u64 = 1_000_000;
/// Most layers.
pub const MAX_LAYERS: u64 = 10_000;
/// Largest batch.
pub const MAX_BATCH: u64 = 1_000_000;
/// Optimizer state for each byte of parameters: Adam keeps two moments (<https://arxiv.org/abs/1412.6980>).
pub const OPTIMIZER_COPIES: u64 = 2;

/// Training, checked.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Train {
    pub id: StepName,
    /// All parameters together. [`OPTIMIZER_COPIES`] of them fit in 64 bits.
    pub parameters: Bytes,
    /// Parts that the parameters and activations come in.
    pub layers: u64,
    /// Activations that one sample takes, all layers together. Those of a batch fit in 64 bits.
    pub activations_per_sample: Bytes,
    /// Samples of the first iteration.
    pub batch: u64,
    pub iterations: u64,
    /// What to do when an iteration fails.
    pub on_oom: Option<Policy>,
    /// Where it runs.
    pub stream: StreamName,
    /// How it should end.
    pub expect: Ending,
}

impl fmt::Display for Train {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, parameters, activations_per_sample, batch, iterations, .. } = self;
        write!(f, "{id}, {iterations} iterations, parameters {parameters}, batch {batch} of {activations_per_sample}")?;
        match &self.on_oom {
            Some(policy) => write!(f, ", on out-of-memory: {policy}"),
            None => Ok(()),
        }
    }
}

/// Trains: allocates parameters and optimizer state (twice as much, as Adam keeps), then in each iteration the activations layer by layer
/// forward, gradients backward, and an update that reads and writes all that stays. Contents are verified all the way. A failed iteration
/// gives back what it made and is counted in `ooms`; one that fails for good ends the training. Everything is freed at its end.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "train")]
pub(crate) struct TrainWire {
    /// A name for what it reports.
    id: NameText,
    /// All parameters together.
    parameters: AmountText,
    /// Parts that parameters and activations come in, from 1 to 10000: 4 if not given.
    layers: Option<CountText>,
    /// Activations that one sample takes, all layers together.
    activations_per_sample: AmountText,
    /// Samples of the first iteration, from 1 to 1000000.
    batch: CountText,
    /// How many, from 1 to 1000000.
    iterations: CountText,
    /// `fits` (if not given), `oom`, `{ oom: CAUSE }` or `any`: how the training ends, recovery included. Anything else fails the run. A map
    /// says it for each allocator.
    expect: Option<EndingWire>,
    /// What to do when an iteration fails, before trying it again: nothing, if not given.
    on_oom: Option<Located<PolicyWire>>,
    /// The stream: `default` if not given.
    stream: Option<NameText>,
}

impl StepFields for TrainWire {
    type Checked = Train;

    const EXAMPLE: &'static str = "\
- train:
    id: training
    parameters: 64MiB
    activations_per_sample: 4MiB
    batch: 256
    iterations: 10
    on_oom: { halve_batch: { floor: 16, retries: 3, empty_cache: true } }
- expect: training.final_batch >= 16";

    const REPORTS: &'static [ReportKey] = &[
        ReportKey::Iterations,
        ReportKey::FirstBatch,
        ReportKey::FinalBatch,
        ReportKey::Attempts,
        ReportKey::Retries,
        ReportKey::RetriesWithoutProgress,
        ReportKey::RetryTime,
        ReportKey::Ooms,
        ReportKey::RetainedAfterOom,
        ReportKey::Time,
    ];

    fn id(&self) -> Option<&NameText> {
        Some(&self.id)
    }

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Train, Problem> {
        let layers = self.layers.as_ref().map_or(Ok(4), |layers| checker.whole(layers, "layers", 1..=MAX_LAYERS))?;
        let iterations = checker.whole(&self.iterations, "iterations", 1..=MAX_ITERATIONS)?;
        checker.count(at, layers * iterations)?;
        let batch = checker.whole(&self.batch, "batch", 1..=MAX_BATCH)?;
        let on_oom = self.on_oom.as_ref().map(|wire| policy::check(wire, &Recoverable::Train { batch }, checker)).transpose()?;
        Ok(Train {
            parameters: countable(checker, &self.parameters, "parameters", OPTIMIZER_COPIES, "the optimizer's state")?,
            layers,
            activations_per_sample: countable(checker, &self.activations_per_sample, "activations_per_sample", batch, "a batch")?,
            batch,
            expect: EndingWire::check(self.expect.as_ref(), checker)?,
            iterations,
            on_oom,
            stream: checker.stream(self.stream.as_ref())?,
            id: checker.declare_id(&self.id, "train", Self::REPORTS)?,
        })
    }
}

/// A size of which that many together can still be counted.
fn countable(checker: &Checker<'_>, wire: &AmountText, field: &'static str, times: u64, what_for: &str) -> Result<Bytes, Problem> {
    let size = checker.positive_size(wire, field)?;
    match size.0.checked_mul(times) {
        Some(_) => Ok(size),
        None => {
            let message = format!("`{field}` is {size}, and {times} times that, for {what_for}, is more than 64 bits can count");
            Err(Problem::new(wire.position(), message).help(format!("at most {}B", u64::MAX / times)))
        }
    }
}
