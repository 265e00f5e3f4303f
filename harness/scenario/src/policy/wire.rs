//! Policies as the file writes them: a name, a map from a name to fields, or a list of these.

use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::PolicyKind;
use harness_language::located::Located;
use harness_language::text::{CountText, DurationText, NameText};

/// One policy, or several that are tried in their order.
#[derive(Clone, Debug)]
pub(crate) enum ChainWire {
    One(PolicyWire),
    Many(Vec<Located<PolicyWire>>),
}

/// What is done when a request fails, before it is tried again. A name alone is the policy without any field.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(rename = "policy", rename_all = "snake_case")]
pub(crate) enum PolicyWire {
    /// Does nothing: the failure is final.
    GiveUp(NoFields),
    /// Gives the allocator's cache back to the driver, then tries again.
    EmptyCache(RetriesWire),
    /// Frees buffers of the scenario, then tries once more.
    Free(FreeWire),
    /// Waits for the whole device, then tries again.
    Synchronize(RetriesWire),
    /// Drops the failed iteration and tries it again with half the batch, rounded down, as in the published rule `max(16, batch // 2)`: at its floor it
    /// tries the same batch again.
    HalveBatch(BatchWire),
    /// Drops the failed iteration and tries it again with nine tenths of the batch, rounded down, as Accelerate's `find_executable_batch_size` does
    /// (<https://github.com/huggingface/accelerate/blob/main/src/accelerate/utils/memory.py>; it empties the cache before each try).
    ShrinkBatch(BatchWire),
    /// Looks for the largest batch that fits: after a failure it goes half way to the largest batch that worked, after an iteration that worked half way to the
    /// smallest that failed, as Lightning's batch size finder does in its mode `binsearch`
    /// (<https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/pytorch/tuner/batch_size_scaling.py>).
    BisectBatch(BatchWire),
    /// Drops the failed iteration and does it again in twice as many parts, whose gradients are added up: the effective batch stays, as with Composer's automatic
    /// microbatching (<https://docs.mosaicml.com/projects/composer/en/stable/notes/auto_microbatching.html>).
    SplitAndAccumulate(SplitWire),
    /// Keeps fewer activations and computes the others again in the backward pass: of each 2 layers only the input, then of each 4, and so on
    /// (<https://arxiv.org/abs/1604.06174>).
    CheckpointMore(CheckpointWire),
    /// Makes activations of 16-bit numbers.
    HalfPrecision(NoFields),
    /// Drops the failed iteration and does it again, and those behind it, with something of it in host memory, copied there and back.
    /// `activations`: what is saved for the backward pass is copied to the host in the forward pass and freed on the device, and copied back one operation
    /// at a time, as PyTorch's `torch.autograd.graph.save_on_cpu` does
    /// (<https://docs.pytorch.org/docs/2.11/autograd.html#torch.autograd.graph.save_on_cpu>). It copies everything that an operation saves, parameters too, and
    /// one copy for each that saves it. Of checkpointed layers the inputs are kept on the host.
    /// `optimizer_state`: state and optimizer are on the host; gradients are copied there and parameters back, as with ZeRO-Offload
    /// (<https://arxiv.org/abs/2101.06840>). What the optimizer computes there takes no time in the model of the simulated device.
    SpillToHost(SpillWire),
    /// Frees the buffer that was used longest ago, one before each try. At `infer`, without buffers, the request whose cache was used longest ago gives it up, and starts again
    /// later with the words that it has as part of its prompt.
    Evict(EvictWire),
    /// Waits, and tries again: for memory that others hold. The waits grow by a factor. At `infer` a request waits, without a limit, until others are done; it has no fields there.
    Wait(WaitWire),
    /// No policy has this name. It is kept, to be answered by the check, which knows the step.
    #[schemars(skip)]
    Unknown(Located<String>),
    /// A map of no policy, or of several.
    #[schemars(skip)]
    NotOne,
}

/// Nothing to set.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_without_fields")]
pub(crate) struct NoFields {}

/// How often.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_retries")]
pub(crate) struct RetriesWire {
    /// Most tries after the first: 1 if not given, at most 100.
    pub(super) retries: Option<CountText>,
}

/// What is given up.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_free")]
pub(crate) struct FreeWire {
    /// Live buffers, in the order in which they are freed. Whether they are live afterwards depends on the run: free them with `free`, which
    /// then skips those that are gone.
    pub(super) buffers: Vec<NameText>,
}

/// How far down.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_batch")]
pub(crate) struct BatchWire {
    /// The smallest batch to try: 1 if not given.
    pub(super) floor: Option<CountText>,
    /// Most tries after the first, for each iteration, at most 100: if not given 1 for `halve_batch`, and 100 for the others, which end at their
    /// floor.
    pub(super) retries: Option<CountText>,
    /// Whether the cache goes back to the driver before each retry: no, if not given.
    #[serde(default)]
    pub(super) empty_cache: bool,
}

/// How small the parts may become.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_split")]
pub(crate) struct SplitWire {
    /// The smallest part to try, in samples: 1 if not given.
    pub(super) floor: Option<CountText>,
}

/// How far apart what is kept may be.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_checkpoint")]
pub(crate) struct CheckpointWire {
    /// The most layers of which only one input is kept: if not given the square root of the number of layers, which keeps least.
    pub(super) most: Option<CountText>,
}

/// What is kept in host memory, and in which.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_spill")]
pub(crate) struct SpillWire {
    /// `activations` (if not given) or `optimizer_state`.
    pub(super) what: Option<Located<SpilledWire>>,
    /// `pinned` (if not given): page-locked memory, which the device copies by itself; `pageable`: plain memory, through a buffer of the driver;
    /// `mapped_file`: a temporary file that is mapped, for where the host has too little memory too. It has no name, so nothing stays of it.
    pub(super) memory: Option<Located<HostMemoryWire>>,
    /// With `mapped_file`: the folder of the file, from the folder of the scenario: where temporary files lie (`TMPDIR`), if not given.
    pub(super) folder: Option<Located<String>>,
}

/// What can be kept in host memory.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub(crate) enum SpilledWire {
    /// What is saved for the backward pass.
    Activations,
    /// The optimizer's state.
    OptimizerState,
}

/// Kinds of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub(crate) enum HostMemoryWire {
    /// Page-locked.
    Pinned,
    /// Plain.
    Pageable,
    /// A temporary file.
    MappedFile,
}

/// What may go.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_evict")]
pub(crate) struct EvictWire {
    /// Buffers that may go; at `infer` they can be left out. A name of numbered buffers stands for all of them. Making, filling, verifying or reading a buffer is a use of it. Afterwards only `free` may
    /// name them, which skips those that are gone.
    #[serde(default)]
    pub(super) buffers: Vec<NameText>,
}

/// How long, and how often.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "policy_wait")]
pub(crate) struct WaitWire {
    /// The first wait: 10ms if not given.
    pub(super) first: Option<DurationText>,
    /// How much longer each wait is than the one before, from 1 to 10: 2 if not given.
    pub(super) factor: Option<CountText>,
    /// Most tries after the first: 5 if not given, at most 100.
    pub(super) retries: Option<CountText>,
}

impl PolicyWire {
    /// The policy, where it is one.
    pub(super) const fn kind(&self) -> Option<PolicyKind> {
        Some(match self {
            Self::GiveUp(_) => PolicyKind::GiveUp,
            Self::EmptyCache(_) => PolicyKind::EmptyCache,
            Self::Free(_) => PolicyKind::Free,
            Self::Synchronize(_) => PolicyKind::Synchronize,
            Self::HalveBatch(_) => PolicyKind::HalveBatch,
            Self::ShrinkBatch(_) => PolicyKind::ShrinkBatch,
            Self::BisectBatch(_) => PolicyKind::BisectBatch,
            Self::SplitAndAccumulate(_) => PolicyKind::SplitAndAccumulate,
            Self::CheckpointMore(_) => PolicyKind::CheckpointMore,
            Self::HalfPrecision(_) => PolicyKind::HalfPrecision,
            Self::SpillToHost(_) => PolicyKind::SpillToHost,
            Self::Evict(_) => PolicyKind::Evict,
            Self::Wait(_) => PolicyKind::Wait,
            Self::Unknown(_) | Self::NotOne => return None,
        })
    }

    /// The policy with fields that are read from somewhere.
    fn of<E>(kind: PolicyKind, fields: impl Fields<E>) -> Result<Self, E> {
        Ok(match kind {
            PolicyKind::GiveUp => Self::GiveUp(fields.read()?),
            PolicyKind::EmptyCache => Self::EmptyCache(fields.read()?),
            PolicyKind::Free => Self::Free(fields.read()?),
            PolicyKind::Synchronize => Self::Synchronize(fields.read()?),
            PolicyKind::HalveBatch => Self::HalveBatch(fields.read()?),
            PolicyKind::ShrinkBatch => Self::ShrinkBatch(fields.read()?),
            PolicyKind::BisectBatch => Self::BisectBatch(fields.read()?),
            PolicyKind::SplitAndAccumulate => Self::SplitAndAccumulate(fields.read()?),
            PolicyKind::CheckpointMore => Self::CheckpointMore(fields.read()?),
            PolicyKind::HalfPrecision => Self::HalfPrecision(fields.read()?),
            PolicyKind::SpillToHost => Self::SpillToHost(fields.read()?),
            PolicyKind::Evict => Self::Evict(fields.read()?),
            PolicyKind::Wait => Self::Wait(fields.read()?),
        })
    }
}

/// Where the fields of a policy come from.
trait Fields<E> {
    fn read<T: serde::de::DeserializeOwned + Default>(self) -> Result<T, E>;
}

/// Of a bare name: none is given.
struct NoneGiven;

impl<E> Fields<E> for NoneGiven {
    fn read<T: Default>(self) -> Result<T, E> {
        Ok(T::default())
    }
}

/// Those behind the name.
struct Behind<'m, A>(&'m mut A);

impl<'de, A: MapAccess<'de>> Fields<A::Error> for Behind<'_, A> {
    fn read<T: serde::de::DeserializeOwned + Default>(self) -> Result<T, A::Error> {
        self.0.next_value()
    }
}

impl<'de> Deserialize<'de> for PolicyWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PolicyVisitor;
        impl<'de> Visitor<'de> for PolicyVisitor {
            type Value = PolicyWire;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a policy, as in `empty_cache` or `{ empty_cache: { retries: 2 } }`")
            }
            fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
                match PolicyKind::from_name(name) {
                    Some(kind) => PolicyWire::of(kind, NoneGiven),
                    // Its place is that of the whole value, which the check knows.
                    None => Ok(PolicyWire::Unknown(Located { value: name.to_owned(), line: 0, column: 0, length: 0 })),
                }
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let Some(key) = map.next_key::<Located<String>>()? else { return Ok(PolicyWire::NotOne) };
                let policy = match PolicyKind::from_name(&key.value) {
                    Some(kind) => PolicyWire::of(kind, Behind(&mut map))?,
                    None => {
                        map.next_value::<IgnoredAny>()?;
                        PolicyWire::Unknown(key)
                    }
                };
                let mut is_one = true;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    is_one = false;
                }
                Ok(if is_one { policy } else { PolicyWire::NotOne })
            }
        }
        deserializer.deserialize_any(PolicyVisitor)
    }
}

impl<'de> Deserialize<'de> for ChainWire {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ChainVisitor;
        impl<'de> Visitor<'de> for ChainVisitor {
            type Value = ChainWire;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a policy, as in `empty_cache` or `{ empty_cache: { retries: 2 } }`, or a list of policies")
            }
            fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
                PolicyWire::deserialize(serde::de::value::StrDeserializer::new(name)).map(ChainWire::One)
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                PolicyWire::deserialize(MapAccessDeserializer::new(map)).map(ChainWire::One)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(seq)).map(ChainWire::Many)
            }
        }
        deserializer.deserialize_any(ChainVisitor)
    }
}

impl JsonSchema for ChainWire {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "policies".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let policy = generator.subschema_for::<PolicyWire>();
        let bare: Vec<&str> = PolicyKind::ALL.iter().filter(|kind| !kind.needs_fields()).map(|kind| kind.name()).collect();
        let one = serde_json::json!({ "anyOf": [policy, { "enum": bare, "description": "A policy without any field." }] });
        json_schema!({ "anyOf": [policy, { "enum": bare }, { "type": "array", "minItems": 1, "items": one }] })
    }
}
