use std::{fmt, sync::Arc};

use harness_allocator::units::Bytes;
use harness_base::words::{count, joined};
use harness_language::schema::JsonSchema;
#[cfg(feature = "schema")]
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::leaks::{self, LeakCheck, LeakCheckWire};
use super::ranks::{Ranks, RanksWire};
use super::{StepWire, fields::StepFields};
use crate::checker::Checker;
use crate::ending::{Ending, EndingWire};
use crate::metric::{ReportKey, StepName, StreamName};
use crate::model::{self, Model, ModelProgram, Shape, Uniform};
use crate::plan::{AttemptPlan, Precision};
use crate::policy::{self, Chain, ChainWire, Recoverable, SCALE_LIMIT};
use harness_language::error::Problem;
use harness_language::located::{Located, Position, Tree};
use harness_language::text::{AmountText, CountText, NameText};

pub const MAX_ITERATIONS: u64 = 1_000_000;
pub const MAX_LAYERS: u64 = 10_000;
pub const MAX_BATCH: u64 = 1_000_000;
pub const MAX_BATCHES: usize = 1_000;

#[derive(Clone, Debug, PartialEq)]
pub struct Train {
    pub id: StepName,
    pub model: TrainedModel,
    /// Samples per iteration. The list is repeated. Never empty.
    pub batches: Vec<u64>,
    /// Tokens per sample, repeated in the same way; 1 if samples are not sequences.
    pub lengths: Vec<u64>,
    /// The plan of the first iteration. Later iterations keep it until a policy changes it.
    pub plan: AttemptPlan,
    pub iterations: u64,
    pub optimizer: Optimizer,
    pub zero_grad: ZeroGrad,
    /// Keeps the tensors that each iteration saves for its backward pass until the end.
    pub retain_graph: bool,
    pub leak_check: Option<LeakCheck>,
    pub on_oom: Option<Chain>,
    pub ranks: Option<Ranks>,
    pub stream: StreamName,
    pub expect: Ending,
}

#[derive(Clone, Debug, PartialEq)]
pub enum TrainedModel {
    Uniform(Uniform),
    Model(Arc<Model>),
}

impl TrainedModel {
    pub fn parameters(&self) -> Vec<Bytes> {
        match self {
            Self::Uniform(uniform) => vec![uniform.parameters_per_layer(); uniform.layers as usize],
            Self::Model(model) => model.parameters(),
        }
    }

    /// Sizes of tensors that live as long as the parameters and are not trained.
    pub fn constants(&self) -> Vec<Bytes> {
        match self {
            Self::Uniform(_) => Vec::new(),
            Self::Model(model) => model.constants(),
        }
    }

    pub fn program(&self, samples: u64, length: u64, precision: Precision) -> ModelProgram {
        match self {
            Self::Uniform(uniform) => uniform.program(samples, precision),
            Self::Model(model) => model.program(samples, length, precision),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Optimizer {
    /// No state.
    Sgd,
    /// One copy of the parameters: the momentum.
    Momentum,
    /// Two copies of the parameters: the moments (<https://arxiv.org/abs/1412.6980>).
    Adam,
}

impl Optimizer {
    /// Bytes of state per byte of parameters.
    pub const fn copies(self) -> u64 {
        match self {
            Self::Sgd => 0,
            Self::Momentum => 1,
            Self::Adam => 2,
        }
    }
}

/// How gradients are reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum ZeroGrad {
    /// Gradients are freed, and the next backward pass allocates them again, as with
    /// `zero_grad(set_to_none=True)`.
    SetToNone,
    /// Gradients stay allocated and are set to zero.
    Zero,
}

impl fmt::Display for Train {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            id,
            model,
            batches,
            plan,
            iterations,
            ..
        } = self;
        write!(f, "{id}, {}, ", count(*iterations, "iteration"))?;
        match model {
            TrainedModel::Uniform(Uniform {
                parameters,
                activations_per_sample,
                ..
            }) => {
                write!(
                    f,
                    "parameters {parameters}, {plan} of {activations_per_sample}"
                )?;
            }
            TrainedModel::Model(model) => write!(f, "{}, {plan}", model.name)?,
        }
        if batches.len() > 1 {
            write!(f, ", batches {}", joined(batches, ", "))?;
        }
        if let Some(ranks) = &self.ranks {
            write!(f, ", {ranks}")?;
        }
        match &self.on_oom {
            Some(policy) => write!(f, ", on out-of-memory: {policy}"),
            None => Ok(()),
        }
    }
}

/// Trains a model. It allocates parameters and optimizer state. Each iteration then allocates
/// activations layer by layer in the forward pass and gradients in the backward pass, and the
/// update reads and writes everything that stays. Contents are verified. A failed iteration frees
/// its memory and counts in `ooms`; an iteration without recovery ends the training. Everything is
/// freed at the end.
///
/// The model is either a file with layers, which takes the same memory as in PyTorch, or two sizes:
/// `parameters` and `activations_per_sample`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "train")]
pub(crate) struct TrainWire {
    /// A name for the step's figures.
    id: NameText,
    /// The file of a model, relative to the folder of the scenario. The optimizer allocates its
    /// state in the first update, as in PyTorch.
    model: Option<Located<String>>,
    /// Without a `model`: size of all parameters. The optimizer has its state from the start.
    parameters: Option<AmountText>,
    /// Without a `model`: number of layers, from 1 to 10000, which share parameters and activations
    /// equally. Default: 4.
    layers: Option<CountText>,
    /// Without a `model`: size of one sample's activations in all layers, in 32-bit precision.
    activations_per_sample: Option<AmountText>,
    /// Samples per iteration, from 1 to 1000000, or a list with one number per iteration, which is
    /// repeated.
    batch: CountsWire,
    /// Tokens per sample for a `model` of sequences, or a list as for `batch`. Default: the largest
    /// length of the model.
    length: Option<CountsWire>,
    /// Number of iterations, from 1 to 1000000.
    iterations: CountText,
    /// Micro-batches per batch, from 1 to the batch. Their gradients are accumulated. Default: 1.
    accumulate: Option<CountText>,
    /// Activation checkpointing: keeps only the input of each group of this many layers (or blocks,
    /// if the model has blocks) and recomputes the rest in the backward pass. Default: no
    /// checkpointing.
    checkpoint_every: Option<CountText>,
    /// `fp32`, or `mixed`: 16-bit activations with 32-bit parameters, gradients and optimizer
    /// state. Default: `fp32`.
    precision: Option<Precision>,
    /// `sgd`, `momentum` or `adam`, whose state is none, one or two copies of the parameters.
    /// Default: `adam`.
    optimizer: Option<Optimizer>,
    /// `set_to_none` frees gradients after each iteration; `zero` keeps them allocated. Default:
    /// `set_to_none`.
    zero_grad: Option<ZeroGrad>,
    /// Keeps the tensors that each iteration saves for its backward pass until the end of the
    /// training, as in a program that keeps losses with `retain_graph=True`. Default: `false`.
    #[serde(default)]
    retain_graph: bool,
    /// Most growth per iteration and allocation site. `{}` allows no growth.
    leak_check: Option<Box<Located<LeakCheckWire>>>,
    /// How the training ends, after recovery: `fits`, `oom`, `{ oom: CAUSE }` or `any`, or a map
    /// from allocators to one of these. Any other end fails the run. Default: `fits`.
    expect: Option<EndingWire>,
    /// A recovery policy, or a list of policies, for a failed iteration. The next policy of the
    /// list is tried if one has no retries left or cannot help.
    on_oom: Option<Box<ChainWire>>,
    /// Data-parallel training: a number of ranks, or a map. Default: one program trains.
    ranks: Option<RanksWire>,
    /// The stream. Default: `default`.
    stream: Option<NameText>,
}

/// A number, or a list with one number per iteration, which is repeated.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "counts")]
struct CountsWire(#[schemars(schema_with = "count_or_list")] Located<Tree>);

#[cfg(feature = "schema")]
fn count_or_list(generator: &mut SchemaGenerator) -> Schema {
    let count = generator.subschema_for::<CountText>();
    json_schema!({ "anyOf": [
        count, { "type": "array", "items": count, "minItems": 1, "maxItems": MAX_BATCHES }
    ] })
}

impl CountsWire {
    fn check(&self, what: &str, most: u64, checker: &Checker<'_>) -> Result<Vec<u64>, Problem> {
        let texts = self.0.texts().unwrap_or_default();
        if texts.is_empty() || texts.len() > MAX_BATCHES {
            return Err(
                Problem::new(self.0.at, format!("`{what}` has {} entries", texts.len())).help(
                    format!("write a number, or a list of 1 to {MAX_BATCHES} numbers"),
                ),
            );
        }
        texts
            .into_iter()
            .map(|text| checker.whole(&CountText(text), what, 1..=most))
            .collect()
    }
}

impl StepFields<Train> for TrainWire {
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
        ReportKey::EffectiveBatch,
        ReportKey::Attempts,
        ReportKey::Retries,
        ReportKey::RetriesWithoutProgress,
        ReportKey::RetryTime,
        ReportKey::Ooms,
        ReportKey::RetainedAfterOom,
        ReportKey::GivenBack,
        ReportKey::HostPeak,
        ReportKey::HostCopied,
        ReportKey::Throughput,
        ReportKey::Time,
        ReportKey::Collectives,
        ReportKey::UnequalBatches,
        ReportKey::WaitedForRanks,
    ];

    const ID: fn(&Self) -> Option<&NameText> = |wire| Some(&wire.id);

    fn check(&self, step: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Train, Problem> {
        let iterations = checker.whole(&self.iterations, "iterations", 1..=MAX_ITERATIONS)?;
        let batches = self.batch.check("batch", MAX_BATCH, checker)?;
        let smallest = batches.iter().copied().fold(MAX_BATCH, u64::min);
        let largest = batches.iter().copied().fold(1, u64::max);
        let plan = self.plan(batches[0], smallest, checker)?;
        let optimizer = self.optimizer.unwrap_or(Optimizer::Adam);
        let model = self.model(step.at, optimizer, largest, checker)?;
        let lengths = self.lengths(&model, checker)?;
        let layers = match &model {
            TrainedModel::Uniform(uniform) => uniform.layers,
            TrainedModel::Model(model) => {
                model.program(1, 1, Precision::Fp32).operations.len() as u64
            }
        };
        let first = Recoverable::train(
            AttemptPlan {
                batch: smallest,
                ..plan.clone()
            },
            layers,
            optimizer.copies() > 0,
        );
        let on_oom = self
            .on_oom
            .as_ref()
            .map(|wire| policy::check(wire, &first, checker))
            .transpose()?;
        if on_oom.as_ref().and_then(Chain::scales).is_some() {
            one_batch(step.at, &batches)?;
            self.model(step.at, optimizer, SCALE_LIMIT, checker)?;
        }
        let ranks = self.checked_ranks(on_oom.as_ref(), checker)?;
        let trainings = ranks.as_ref().map_or(1, Ranks::count) as u64;
        checker.count(
            step.at,
            layers
                .saturating_mul(iterations)
                .saturating_mul(plan.parts())
                .saturating_mul(trainings),
        )?;
        // The last three figures exist for ranks only.
        let reports = if ranks.is_some() {
            Self::REPORTS
        } else {
            &Self::REPORTS[..Self::REPORTS.len() - 3]
        };
        let id = checker.declare_id(&self.id, "train", reports)?;
        if let Some(ranks) = &ranks {
            checker.declare_ranks(&id, ranks.count());
        }
        Ok(Train {
            model,
            batches,
            lengths,
            plan,
            optimizer,
            zero_grad: self.zero_grad.unwrap_or(ZeroGrad::SetToNone),
            retain_graph: self.retain_graph,
            leak_check: leaks::check(self.leak_check.as_deref(), iterations, checker)?,
            expect: EndingWire::check(self.expect.as_ref(), checker)?,
            iterations,
            on_oom,
            ranks,
            stream: checker.stream(self.stream.as_ref())?,
            id,
        })
    }
}

fn one_batch(at: Position, batches: &[u64]) -> Result<(), Problem> {
    if batches.len() > 1 {
        let message = "`scale_batch` chooses the batch, but `batch` lists several";
        return Err(Problem::new(at, message).help("write one `batch`"));
    }
    Ok(())
}

impl TrainWire {
    fn checked_ranks(
        &self,
        on_oom: Option<&Chain>,
        checker: &mut Checker<'_>,
    ) -> Result<Option<Ranks>, Problem> {
        if let (Some(check), Some(_)) = (&self.leak_check, &self.ranks) {
            let message = "`leak_check` does not work with `ranks`";
            return Err(Problem::new(check.at, message).help("remove `leak_check`, or `ranks`"));
        }
        let ranks = self.ranks.as_ref();
        ranks.map(|ranks| ranks.check(on_oom, checker)).transpose()
    }

    fn model(
        &self,
        at: Position,
        optimizer: Optimizer,
        largest: u64,
        checker: &Checker<'_>,
    ) -> Result<TrainedModel, Problem> {
        const FORMS: &str = "write `model: models/gpt2.yaml`, or `parameters: 64MiB` and \
             `activations_per_sample: 4MiB`";
        match (&self.model, &self.parameters, &self.activations_per_sample) {
            (Some(path), None, None) if self.layers.is_none() => Ok(TrainedModel::Model(Arc::new(
                model::load_for(checker.declared.folder, path)?,
            ))),
            (None, Some(parameters), Some(activations)) => Ok(TrainedModel::Uniform(Uniform {
                parameters: countable(
                    checker,
                    parameters,
                    "parameters",
                    optimizer.copies(),
                    "the optimizer's state",
                )?,
                layers: checker.whole_or(self.layers.as_ref(), "layers", 1..=MAX_LAYERS, 4)?,
                activations_per_sample: countable(
                    checker,
                    activations,
                    "activations_per_sample",
                    largest,
                    "a batch",
                )?,
            })),
            (Some(path), ..) => Err(Problem::new(
                path.at,
                "`model` excludes the sizes `parameters`, `layers` and `activations_per_sample`",
            )
            .help(FORMS)),
            (None, ..) => Err(Problem::new(at, "`train` needs a model").help(FORMS)),
        }
    }

    fn lengths(&self, model: &TrainedModel, checker: &Checker<'_>) -> Result<Vec<u64>, Problem> {
        match (&self.length, model) {
            (None, TrainedModel::Uniform(_)) => Ok(vec![1]),
            (None, TrainedModel::Model(model)) => Ok(vec![model.length]),
            (Some(length), TrainedModel::Model(model)) if model.input == Shape::Tokens => {
                length.check("length", model.length, checker)
            }
            (Some(length), _) => Err(Problem::new(
                length.0.at,
                "`length` works with models of sequences only",
            )
            .help("remove it, or name a model whose `input` is `{ tokens: … }`")),
        }
    }

    fn plan(
        &self,
        batch: u64,
        smallest: u64,
        checker: &Checker<'_>,
    ) -> Result<AttemptPlan, Problem> {
        let checkpoint_every = self
            .checkpoint_every
            .as_ref()
            .map(|text| checker.whole(text, "checkpoint_every", 1..=MAX_LAYERS));
        Ok(AttemptPlan {
            micro_batches: checker.whole_or(
                self.accumulate.as_ref(),
                "accumulate",
                1..=smallest,
                1,
            )?,
            checkpoint_every: checkpoint_every.transpose()?,
            precision: self.precision.unwrap_or_default(),
            ..AttemptPlan::of_batch(batch)
        })
    }
}

/// Checks that a multiple of a size fits into 64 bits.
fn countable(
    checker: &Checker<'_>,
    wire: &AmountText,
    field: &'static str,
    times: u64,
    what_for: &str,
) -> Result<Bytes, Problem> {
    let size = checker.positive_size(wire, field)?;
    match size.0.checked_mul(times) {
        Some(_) => Ok(size),
        None => {
            let message = format!(
                "`{field}` is {size}, and {times} times this size, for {what_for}, needs more than \
                 64 bits"
            );
            Err(Problem::new(wire.at, message).help(format!("use at most {}B", u64::MAX / times)))
        }
    }
}
