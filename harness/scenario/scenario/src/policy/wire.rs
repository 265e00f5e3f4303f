//! Policies in the file: a name, a map from a name to fields, or a list of these.

use harness_language::schema::JsonSchema;
#[cfg(feature = "schema")]
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use super::{PolicyKind, ScaleMode};
use crate::plan::SpilledPart;
use harness_language::located::{ListOr, Located, Position};
use harness_language::text::{CountText, DurationText, NameText};
use harness_language::variant::{Variant, Variants};

/// One policy, or several in the order in which they are tried.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline, description = "")]
pub(crate) struct ChainWire(
    #[schemars(schema_with = "policies")]
    Located<ListOr<Located<Variant<PolicyWire>>, Variant<PolicyWire>>>,
);

impl ChainWire {
    /// All policies, and the position of the list or of the only policy.
    pub(super) fn policies(&self) -> (Vec<Located<Variant<PolicyWire>>>, Position) {
        let policies = match &self.0.value {
            ListOr::One(name) => vec![self.0.with(Variant::of_name(name))],
            ListOr::Map(policy) => vec![self.0.with(policy.clone())],
            ListOr::Many(policies) => policies.clone(),
        };
        (policies, self.0.at)
    }
}

/// An action between a failed request and the next attempt. A bare name is the policy without
/// fields.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(rename = "policy", rename_all = "snake_case")]
pub(crate) enum PolicyWire {
    /// Fails without another attempt.
    GiveUp(NoFields),
    /// Releases the allocator's cache to the driver, then retries.
    EmptyCache(RetriesWire),
    /// Frees buffers of the scenario, then retries once.
    Free(FreeWire),
    /// Waits for the device, then retries.
    Synchronize(RetriesWire),
    /// Drops the failed iteration and retries with half the batch, rounded down, as in the rule
    /// `max(16, batch // 2)`. At its floor it retries with the same batch.
    HalveBatch(BatchWire),
    /// Drops the failed iteration and retries with nine tenths of the batch, rounded down, as
    /// `find_executable_batch_size` of Accelerate 1.15 does, and with it `auto_find_batch_size` of
    /// Transformers 5.24
    /// (<https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/memory.py>).
    /// Both empty the cache before each attempt (`empty_cache: true`) and start the training again.
    ShrinkBatch(BatchWire),
    /// Searches for the largest batch that fits. After a failure it goes half way to the largest
    /// batch that worked. After a success it goes half way to the smallest batch that failed. The
    /// batch of the step is the largest.
    BisectBatch(BatchWire),
    /// Searches for a batch as the batch-size finder of Lightning 2.6 does. It first runs three
    /// iterations with the batch of the step, which it counts as 2. After three iterations that
    /// work, it doubles. It stops at 8192, and uses that batch without a run. After a failure
    /// `power` halves, and stops if a batch has worked; `binsearch` searches between 1 or the
    /// largest batch that worked and the failed batch, and takes 5 % off its result. The cache is
    /// released to the driver before each batch. The training continues with the result, and a
    /// later failure ends it
    /// (<https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/tuner/batch_size_scaling.py>).
    ScaleBatch(ScaleWire),
    /// Drops the failed iteration and retries it in twice as many micro-batches, whose gradients
    /// are accumulated. The effective batch stays the same.
    SplitAndAccumulate(SplitWire),
    /// Drops the failed iteration and retries it with half the samples per micro-batch, rounded
    /// down, as the automatic microbatching of Composer 0.32 does: 10, 5, 2, 1. Gradients are
    /// accumulated, so the effective batch stays the same. Composer also halves after two batches
    /// with retries of the allocator in a row
    /// (<https://github.com/mosaicml/composer/blob/v0.32.1/composer/trainer/trainer.py>).
    HalveMicroBatch(NoFields),
    /// Keeps fewer activations and recomputes the others in the backward pass: first with one
    /// checkpoint per 2 layers, then per 4, and so on (<https://arxiv.org/abs/1604.06174>).
    CheckpointMore(CheckpointWire),
    /// Uses 16-bit activations.
    HalfPrecision(NoFields),
    /// Drops the failed iteration, and runs it and all later ones with a part of the training in
    /// host memory.
    ///
    /// `activations` copies every tensor that is saved for the backward pass to the host and frees
    /// it on the device. The backward pass copies it back, one operation at a time, as
    /// `torch.autograd.graph.save_on_cpu` does
    /// (<https://docs.pytorch.org/docs/2.11/autograd.html#torch.autograd.graph.save_on_cpu>).
    /// Parameters are copied too, once per operation that saves them. Checkpointed layers keep
    /// their inputs on the host.
    ///
    /// `optimizer_state` keeps the state on the host and runs the optimizer there. Gradients are
    /// copied to the host and parameters back, as in ZeRO-Offload
    /// (<https://arxiv.org/abs/2101.06840>). The simulated device does not model the time of the
    /// optimizer on the host.
    SpillToHost(SpillWire),
    /// Frees the least recently used buffer, one before each attempt. In `infer` without `buffers`
    /// it evicts the least recently used request, which starts again later with its tokens so far
    /// as part of its prompt.
    Evict(EvictWire),
    /// Waits for memory of other processes, then retries. Waits grow by a factor. In `infer`, a
    /// request waits without a limit until others end; `wait` takes no fields there.
    Wait(WaitWire),
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "policy_without_fields")]
pub(crate) struct NoFields {}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "policy_retries")]
pub(crate) struct RetriesWire {
    /// Most retries, at most 100. Default: 1.
    pub(super) retries: Option<CountText>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "policy_free")]
pub(crate) struct FreeWire {
    /// Live buffers, in the order in which they are freed. Later steps may only `free` them, which
    /// skips freed ones.
    pub(super) buffers: Vec<NameText>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "policy_batch")]
pub(crate) struct BatchWire {
    /// The smallest batch. Default: 1.
    pub(super) floor: Option<CountText>,
    /// Most retries per iteration, at most 100. Default: 1 for `halve_batch`, 100 for the others,
    /// which end at their floor.
    pub(super) retries: Option<CountText>,
    /// Releases the cache to the driver before each retry. Default: `false`.
    #[serde(default)]
    pub(super) empty_cache: bool,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "policy_scale")]
pub(crate) struct ScaleWire {
    /// `power` or `binsearch`. Default: `power`.
    pub(super) mode: Option<ScaleMode>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "policy_split")]
pub(crate) struct SplitWire {
    /// The smallest part, in samples. Default: 1.
    pub(super) floor: Option<CountText>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "policy_checkpoint")]
pub(crate) struct CheckpointWire {
    /// Most layers per checkpoint. Default: the square root of the number of layers, which keeps
    /// the least memory.
    pub(super) most: Option<CountText>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "policy_spill")]
pub(crate) struct SpillWire {
    /// `activations` or `optimizer_state`. Default: `activations`.
    pub(super) what: Option<Located<SpilledPart>>,
    /// `pinned`: page-locked memory, which the device copies directly. `pageable`: plain memory,
    /// copied through a buffer of the driver. `mapped_file`: a mapped temporary file without a
    /// name, for hosts with little memory. Default: `pinned`.
    pub(super) memory: Option<Located<HostMemoryWire>>,
    /// Folder of the `mapped_file`, relative to the folder of the scenario. Default: the folder for
    /// temporary files (`TMPDIR`).
    pub(super) folder: Option<Located<String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub(crate) enum HostMemoryWire {
    Pinned,
    Pageable,
    MappedFile,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "policy_evict")]
pub(crate) struct EvictWire {
    /// Buffers that may be evicted; optional in `infer`. A name of numbered buffers stands for all
    /// of them. `alloc`, `fill`, `verify` and `read_async` use a buffer. Later steps may only
    /// `free` these buffers, which skips freed ones.
    #[serde(default)]
    pub(super) buffers: Vec<NameText>,
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "policy_wait")]
pub(crate) struct WaitWire {
    /// The first wait. Default: 10ms.
    pub(super) first: Option<DurationText>,
    /// Ratio of each wait to the one before, from 1 to 10. Default: 2.
    pub(super) factor: Option<CountText>,
    /// Most retries, at most 100. Default: 5.
    pub(super) retries: Option<CountText>,
}

impl Variants for PolicyWire {
    const NOUN: &'static str = "policy";
    const NOUNS: &'static str = "policies";
    const EXAMPLE: &'static str = "{ free: { buffers: [cache] } }";

    fn is_known(name: &str) -> bool {
        PolicyKind::from_name(name).is_some()
    }

    #[cfg(feature = "schema")]
    fn schema(generator: &mut SchemaGenerator) -> Schema {
        Self::json_schema(generator)
    }
}

#[cfg(feature = "schema")]
fn policies(generator: &mut SchemaGenerator) -> Schema {
    let policy = generator.subschema_for::<Variant<PolicyWire>>();
    // `free` needs fields.
    let bare: Vec<&str> = PolicyKind::ALL
        .iter()
        .filter(|kind| **kind != PolicyKind::Free)
        .map(|kind| kind.name())
        .collect();
    let one = serde_json::json!({ "anyOf": [policy, { "enum": bare, "description": "A policy \
         without any field." }] });
    json_schema!({ "anyOf": [
        policy, { "enum": bare }, { "type": "array", "minItems": 1, "items": one }
    ] })
}
