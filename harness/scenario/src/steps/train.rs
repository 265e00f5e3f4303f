//! `train`: iterations of training, with the memory that they take.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use harness_allocator::units::Bytes;
use harness_base::words::count;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::fields::StepFields;
use super::leaks::{LeakCheck, LeakCheckWire};
use super::ranks::{Ranks, RanksWire};
use crate::checker::Checker;
use crate::ending::{Ending, EndingWire};
use crate::metric::{ReportKey, StepName, StreamName};
use crate::model::{self, Model, Program, Shape, Uniform};
use crate::plan::{Plan, Precision};
use crate::policy::{self, Chain, ChainWire, Recoverable};
use harness_language::error::Problem;
use harness_language::located::{ListOr, Located, NoMap, Position};
use harness_language::text::{AmountText, CountText, NameText};

/// Most iterations of one `train`.
pub const MAX_ITERATIONS: u64 = 1_000_000;
/// Most layers.
pub const MAX_LAYERS: u64 = 10_000;
/// Largest batch.
pub const MAX_BATCH: u64 = 1_000_000;
/// Most batches of a list.
pub const MAX_BATCHES: usize = 1_000;

/// Training, checked.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Train {
    pub id: StepName,
    /// What is trained.
    pub model: Trained,
    /// Samples of each iteration, one after the other and from the front again; never empty.
    pub batches: Vec<u64>,
    /// Words of each sample, in the same way; 1 where samples are no sequences.
    pub lengths: Vec<u64>,
    /// How the first iteration is done, and those behind it until a policy changes it.
    pub plan: Plan,
    pub iterations: u64,
    pub optimizer: Optimizer,
    pub zero_grad: ZeroGrad,
    /// Whether what each iteration saves for its backward pass stays to the end of the training.
    pub retain_graph: bool,
    /// What may grow from iteration to iteration.
    pub leak_check: Option<LeakCheck>,
    /// What to do when an iteration fails.
    pub on_oom: Option<Chain>,
    /// Who else trains the same on other samples.
    pub ranks: Option<Ranks>,
    /// Where it runs.
    pub stream: StreamName,
    /// How it should end.
    pub expect: Ending,
}

/// What is trained.
#[derive(Clone, Debug, PartialEq)]
pub enum Trained {
    /// A model of which nothing is known but sizes.
    Uniform(Uniform),
    /// A model with layers.
    Model(Arc<Model>),
}

impl Trained {
    /// The sizes of the parameters.
    #[must_use]
    pub fn parameters(&self) -> Vec<Bytes> {
        match self {
            Self::Uniform(uniform) => vec![uniform.parameters_per_layer(); uniform.layers as usize],
            Self::Model(model) => model.parameters(),
        }
    }

    /// The sizes of what lives as long as the parameters and is not trained.
    #[must_use]
    pub fn constants(&self) -> Vec<Bytes> {
        match self {
            Self::Uniform(_) => Vec::new(),
            Self::Model(model) => model.constants(),
        }
    }

    /// What one pass over so many samples of this length does.
    #[must_use]
    pub fn program(&self, samples: u64, length: u64, precision: Precision) -> Program {
        match self {
            Self::Uniform(uniform) => uniform.program(samples, precision),
            Self::Model(model) => model.program(samples, length, precision),
        }
    }
}

/// What turns gradients into new parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Optimizer {
    /// Without state.
    Sgd,
    /// One copy of the parameters: the momentum.
    Momentum,
    /// Two copies of the parameters: the moments (<https://arxiv.org/abs/1412.6980>).
    Adam,
}

impl Optimizer {
    /// Bytes of state for each byte of parameters.
    #[must_use]
    pub const fn copies(self) -> u64 {
        match self {
            Self::Sgd => 0,
            Self::Momentum => 1,
            Self::Adam => 2,
        }
    }
}

/// What becomes of the gradients when they have been used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum ZeroGrad {
    /// They are freed, and made again by the next backward pass, as `zero_grad(set_to_none=True)` does.
    SetToNone,
    /// They stay and are set to zero; those of the next backward pass are added to them.
    Zero,
}

/// The numbers of a training, as the file says them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
enum PrecisionWire {
    /// 32-bit numbers throughout.
    Fp32,
    /// 16-bit activations, and 32-bit parameters, gradients and optimizer state.
    Mixed,
}

impl fmt::Display for Train {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, model, batches, plan, iterations, .. } = self;
        write!(f, "{id}, {}, ", count(*iterations, "iteration"))?;
        match model {
            Trained::Uniform(Uniform { parameters, activations_per_sample, .. }) => {
                write!(f, "parameters {parameters}, {plan} of {activations_per_sample}")?;
            }
            Trained::Model(model) => write!(f, "{}, {plan}", model.name)?,
        }
        if batches.len() > 1 {
            let batches: Vec<String> = batches.iter().map(u64::to_string).collect();
            write!(f, ", batches {}", batches.join(", "))?;
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

/// Trains: allocates parameters and optimizer state, then in each iteration the activations layer by layer forward, gradients backward, and an
/// update that reads and writes all that stays. Contents are verified all the way. A failed iteration gives back what it made and is counted in
/// `ooms`; one that fails for good ends the training. Everything is freed at its end. What is trained is a `model` with layers, which takes the memory
/// that PyTorch takes for it ([models](models)), or only sizes: `parameters` and `activations_per_sample`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "train")]
pub(crate) struct TrainWire {
    /// A name for what it reports.
    id: NameText,
    /// The file of a model; its path begins at the folder of the scenario. Its optimizer makes its state in the first update, as PyTorch's do.
    model: Option<Located<String>>,
    /// Without a `model`: all parameters together. The optimizer has its state from the start.
    parameters: Option<AmountText>,
    /// Without a `model`: parts that parameters and activations come in, from 1 to 10000: 4 if not given.
    layers: Option<CountText>,
    /// Without a `model`: activations that one sample takes, all layers together, in 32-bit numbers.
    activations_per_sample: Option<AmountText>,
    /// Samples of each iteration, from 1 to 1000000, or a list of such numbers: one for each iteration, and from the front again.
    batch: CountsWire,
    /// With a `model` of sequences: the words of each sample, or a list of such numbers, as for `batch`; as many as the model takes, if not given.
    length: Option<CountsWire>,
    /// How many, from 1 to 1000000.
    iterations: CountText,
    /// Parts in which each batch is done one after the other, their gradients added up, from 1 to the batch: 1 if not given.
    accumulate: Option<CountText>,
    /// Of each so many layers, or blocks of a model that has some, only the input is kept for the backward pass, and the rest is made again there. If
    /// not given, everything is kept.
    checkpoint_every: Option<CountText>,
    /// `fp32` (if not given): 32-bit numbers throughout; `mixed`: 16-bit activations, and 32-bit parameters, gradients and optimizer state.
    precision: Option<PrecisionWire>,
    /// `sgd`, `momentum` or `adam` (if not given), which keep none, one or two copies of the parameters.
    optimizer: Option<Optimizer>,
    /// `set_to_none` (if not given): gradients are freed behind each iteration; `zero`: they stay, and the next ones are added to them.
    zero_grad: Option<ZeroGrad>,
    /// Whether what each iteration saves for its backward pass stays to the end of the training, as where a program keeps losses with
    /// `retain_graph=True`: no, if not given.
    #[serde(default)]
    retain_graph: bool,
    /// What may grow from iteration to iteration, by site: `{}` for nothing.
    #[schemars(with = "Option<LeakCheckWire>")]
    leak_check: Option<Box<Located<LeakCheckWire>>>,
    /// `fits` (if not given), `oom`, `{ oom: CAUSE }` or `any`: how the training ends, recovery included. Anything else fails the run. A map
    /// says it for each allocator.
    expect: Option<EndingWire>,
    /// What to do when an iteration fails, before trying it again: nothing, if not given. Of a list the next policy is tried where one has no retries left, or nothing to do.
    on_oom: Option<Box<Located<ChainWire>>>,
    /// Who trains together, each rank on samples of its own (data parallel): a number of ranks, or a map. If not given, one program trains.
    ranks: Option<RanksWire>,
    /// The stream: `default` if not given.
    stream: Option<NameText>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
struct CountsWire(Located<ListOr<NoMap>>);

impl JsonSchema for CountsWire {
    fn schema_name() -> Cow<'static, str> {
        "counts".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let count = generator.subschema_for::<CountText>();
        json_schema!({
            "description": "A number, or a list of them: one for each iteration, and from the front again.",
            "anyOf": [count, { "type": "array", "items": count, "minItems": 1, "maxItems": MAX_BATCHES }]
        })
    }
}

impl CountsWire {
    fn check(&self, what: &str, most: u64, checker: &Checker<'_>) -> Result<Vec<u64>, Problem> {
        let texts = match self.0.texts() {
            Ok(texts) => texts,
            Err(never) => match *never {},
        };
        if texts.is_empty() || texts.len() > MAX_BATCHES {
            return Err(Problem::new(self.0.position(), format!("`{what}` has {} entries", texts.len()))
                .help(format!("a number, or a list of 1 to {MAX_BATCHES} of them")));
        }
        texts.into_iter().map(|text| checker.whole(&CountText(text), what, 1..=most)).collect()
    }
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

    fn id(&self) -> Option<&NameText> {
        Some(&self.id)
    }

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Train, Problem> {
        let iterations = checker.whole(&self.iterations, "iterations", 1..=MAX_ITERATIONS)?;
        let batches = self.batch.check("batch", MAX_BATCH, checker)?;
        let (smallest, largest) = batches.iter().fold((MAX_BATCH, 1), |(least, most), &batch| (least.min(batch), most.max(batch)));
        let plan = self.plan(batches[0], smallest, checker)?;
        let optimizer = self.optimizer.unwrap_or(Optimizer::Adam);
        let model = self.model(at, optimizer, largest, checker)?;
        let lengths = self.lengths(&model, checker)?;
        let layers = match &model {
            Trained::Uniform(uniform) => uniform.layers,
            Trained::Model(model) => model.program(1, 1, Precision::Fp32).operations.len() as u64,
        };
        let first = Recoverable::train(Plan { batch: smallest, ..plan.clone() }, layers, optimizer.copies() > 0);
        let on_oom = self.on_oom.as_ref().map(|wire| policy::check(wire, &first, checker)).transpose()?;
        let ranks = self.ranks.as_ref().map(|ranks| ranks.check(on_oom.as_ref(), checker)).transpose()?;
        if let (Some(check), true) = (&self.leak_check, ranks.is_some()) {
            return Err(Problem::new(check.position(), "a training with `ranks` is not checked for leaks")
                .help("leave `leak_check` out, or `ranks`"));
        }
        let trainings = ranks.as_ref().map_or(1, Ranks::count) as u64;
        checker.count(at, layers.saturating_mul(iterations).saturating_mul(plan.micro_batches).saturating_mul(trainings))?;
        // What only ranks report stands last.
        let reports = if ranks.is_some() { Self::REPORTS } else { &Self::REPORTS[..Self::REPORTS.len() - 3] };
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
            leak_check: self.leak_check.as_ref().map(|check| check.value.check(check.position(), iterations, checker)).transpose()?,
            expect: EndingWire::check(self.expect.as_ref(), checker)?,
            iterations,
            on_oom,
            ranks,
            stream: checker.stream(self.stream.as_ref())?,
            id,
        })
    }
}

impl TrainWire {
    /// What is trained: a model, or sizes.
    fn model(&self, at: Position, optimizer: Optimizer, largest: u64, checker: &Checker<'_>) -> Result<Trained, Problem> {
        const FORMS: &str = "either `model: models/gpt2.yaml`, or `parameters: 64MiB` and `activations_per_sample: 4MiB`";
        match (&self.model, &self.parameters, &self.activations_per_sample) {
            (Some(path), None, None) if self.layers.is_none() => Ok(Trained::Model(Arc::new(model::load_for(checker.folder(), path)?))),
            (None, Some(parameters), Some(activations)) => Ok(Trained::Uniform(Uniform {
                parameters: countable(checker, parameters, "parameters", optimizer.copies(), "the optimizer's state")?,
                layers: self.layers.as_ref().map_or(Ok(4), |layers| checker.whole(layers, "layers", 1..=MAX_LAYERS))?,
                activations_per_sample: countable(checker, activations, "activations_per_sample", largest, "a batch")?,
            })),
            (Some(path), ..) => {
                Err(Problem::new(path.position(), "a `model` has its sizes from its layers, and others are given beside it").help(FORMS))
            }
            (None, ..) => Err(Problem::new(at, "`train` does not say what is trained").help(FORMS)),
        }
    }

    fn lengths(&self, model: &Trained, checker: &Checker<'_>) -> Result<Vec<u64>, Problem> {
        match (&self.length, model) {
            (None, Trained::Uniform(_)) => Ok(vec![1]),
            (None, Trained::Model(model)) => Ok(vec![model.length]),
            (Some(length), Trained::Model(model)) if model.input == Shape::Tokens => length.check("length", model.length, checker),
            (Some(length), _) => Err(Problem::new(length.0.position(), "`length` is for models of sequences")
                .help("leave it out, or name a model whose `input` is `{ tokens: … }`")),
        }
    }

    fn plan(&self, batch: u64, smallest: u64, checker: &Checker<'_>) -> Result<Plan, Problem> {
        let whole = |given: &Option<CountText>, what, bounds| given.as_ref().map(|text| checker.whole(text, what, bounds)).transpose();
        Ok(Plan {
            micro_batches: whole(&self.accumulate, "accumulate", 1..=smallest)?.unwrap_or(1),
            checkpoint_every: whole(&self.checkpoint_every, "checkpoint_every", 1..=MAX_LAYERS)?,
            precision: match self.precision {
                None | Some(PrecisionWire::Fp32) => Precision::Fp32,
                Some(PrecisionWire::Mixed) => Precision::Mixed,
            },
            ..Plan::of_batch(batch)
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
