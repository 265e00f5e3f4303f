//! Recovery policies of `on_oom`: actions between a failed request and the next attempt.
//!
//! A new policy needs a row of [`PolicyKind`], a variant of [`PolicyWire`](wire::PolicyWire) and a
//! variant of [`Policy`].

mod check;
mod wire;

use std::fmt;

use derive_more::Display;
use harness_allocator::{device::HostMemory, named_enum, units::Nanos};
use harness_base::words::{count, joined};
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::metric::BufferName;
use super::plan::{PlanPart, SpilledPart};

pub(crate) use check::{Recoverable, check};
pub(crate) use wire::ChainWire;

pub const MAX_RETRIES: u32 = 100;
pub const MAX_POLICIES: usize = 10;
/// The batch at which Lightning's finder stops.
pub const SCALE_LIMIT: u64 = 8192;

named_enum! {
    PolicyKind {
        GiveUp = "give_up",
        EmptyCache = "empty_cache",
        Free = "free",
        Synchronize = "synchronize",
        HalveBatch = "halve_batch",
        ShrinkBatch = "shrink_batch",
        BisectBatch = "bisect_batch",
        ScaleBatch = "scale_batch",
        SplitAndAccumulate = "split_and_accumulate",
        HalveMicroBatch = "halve_micro_batch",
        CheckpointMore = "checkpoint_more",
        HalfPrecision = "half_precision",
        SpillToHost = "spill_to_host",
        Evict = "evict",
        Wait = "wait",
    }
}

impl PolicyKind {
    /// The steps that can use the policy.
    pub fn steps(self) -> impl Iterator<Item = &'static str> {
        let steps = Recoverable::STEPS.into_iter();
        steps
            .filter(move |(_, parts)| self.needs().is_none_or(|part| parts.contains(&part)))
            .map(|(step, _)| step)
    }

    /// The part of a plan that a step must support; `None`: every step can use the policy.
    pub const fn needs(self) -> Option<PlanPart> {
        match self {
            Self::GiveUp | Self::EmptyCache | Self::Synchronize | Self::Wait => None,
            Self::Free | Self::Evict => Some(PlanPart::Buffers),
            Self::HalveBatch | Self::ShrinkBatch | Self::BisectBatch | Self::ScaleBatch => {
                Some(PlanPart::Batch)
            }
            Self::SplitAndAccumulate | Self::HalveMicroBatch => Some(PlanPart::MicroBatches),
            Self::CheckpointMore => Some(PlanPart::Checkpointing),
            Self::HalfPrecision => Some(PlanPart::Precision),
            Self::SpillToHost => Some(PlanPart::Spilled),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Fails without another attempt.
    GiveUp,
    /// Releases the allocator's cache to the driver.
    EmptyCache { retries: u32 },
    /// Frees the live ones of these buffers, then retries once.
    Free { buffers: Vec<BufferName> },
    /// Waits for the device.
    Synchronize { retries: u32 },
    /// Drops the failed iteration and retries it with another batch. `empty_cache` releases the
    /// cache to the driver before each retry.
    Batch {
        rule: BatchRule,
        floor: u64,
        retries: u32,
        empty_cache: bool,
    },
    /// Searches for a batch that fits as Lightning does, from the batch of the step on.
    ScaleBatch { mode: ScaleMode },
    /// Drops the failed iteration and retries it in twice as many parts, each of at least `floor`
    /// samples.
    SplitAndAccumulate { floor: u64 },
    /// Drops the failed iteration and retries it with half the samples per part, rounded down.
    HalveMicroBatch,
    /// Drops the failed iteration and keeps fewer activations, with at most `most` layers per
    /// checkpoint.
    CheckpointMore { most: u64 },
    /// Drops the failed iteration and uses 16-bit activations.
    HalfPrecision,
    /// Drops the failed iteration and moves a part of the training to host memory.
    SpillToHost {
        part: SpilledPart,
        memory: HostMemory,
    },
    /// Frees the least recently used of these buffers before each attempt. A name of numbered
    /// buffers names all of them. Empty: the caches of running requests.
    Evict { buffers: Vec<BufferName> },
    /// Waits before each attempt, `factor` times as long as before the last one.
    Wait {
        first: Nanos,
        factor: u32,
        retries: u32,
    },
}

/// The rule for a smaller batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchRule {
    Halve,
    Shrink,
    /// Half way to the largest batch that worked. After a success, half way to the smallest batch
    /// that failed.
    Bisect,
}

/// How Lightning's finder goes on after a batch that failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema, Display)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum ScaleMode {
    /// It takes half of it.
    #[default]
    #[display("power")]
    Power,
    /// It searches between it and the largest batch that worked, and takes 5 % off the result.
    #[display("binsearch")]
    Binsearch,
}

impl Policy {
    pub const fn kind(&self) -> PolicyKind {
        match self {
            Self::GiveUp => PolicyKind::GiveUp,
            Self::EmptyCache { .. } => PolicyKind::EmptyCache,
            Self::Free { .. } => PolicyKind::Free,
            Self::Synchronize { .. } => PolicyKind::Synchronize,
            Self::Batch {
                rule: BatchRule::Halve,
                ..
            } => PolicyKind::HalveBatch,
            Self::Batch {
                rule: BatchRule::Shrink,
                ..
            } => PolicyKind::ShrinkBatch,
            Self::Batch {
                rule: BatchRule::Bisect,
                ..
            } => PolicyKind::BisectBatch,
            Self::ScaleBatch { .. } => PolicyKind::ScaleBatch,
            Self::SplitAndAccumulate { .. } => PolicyKind::SplitAndAccumulate,
            Self::HalveMicroBatch => PolicyKind::HalveMicroBatch,
            Self::CheckpointMore { .. } => PolicyKind::CheckpointMore,
            Self::HalfPrecision => PolicyKind::HalfPrecision,
            Self::SpillToHost { .. } => PolicyKind::SpillToHost,
            Self::Evict { .. } => PolicyKind::Evict,
            Self::Wait { .. } => PolicyKind::Wait,
        }
    }

    pub const fn retries(&self) -> u32 {
        match self {
            Self::GiveUp => 0,
            Self::EmptyCache { retries }
            | Self::Synchronize { retries }
            | Self::Batch { retries, .. }
            | Self::Wait { retries, .. } => *retries,
            Self::Free { .. } | Self::HalfPrecision | Self::SpillToHost { .. } => 1,
            // These end when nothing is left to split, to recompute or to free.
            Self::ScaleBatch { .. }
            | Self::SplitAndAccumulate { .. }
            | Self::HalveMicroBatch
            | Self::CheckpointMore { .. }
            | Self::Evict { .. } => MAX_RETRIES,
        }
    }

    /// Buffers that may be freed after the step.
    pub fn may_free(&self) -> &[BufferName] {
        match self {
            Self::Free { buffers } | Self::Evict { buffers } => buffers,
            _ => &[],
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind();
        match self {
            Self::GiveUp | Self::HalfPrecision | Self::HalveMicroBatch => kind.fmt(f),
            Self::ScaleBatch { mode } => write!(f, "{kind} by {mode}"),
            Self::Evict { buffers } if buffers.is_empty() => write!(f, "{kind} requests"),
            Self::EmptyCache { retries } | Self::Synchronize { retries } => {
                write!(f, "{kind}, at most {}", count(*retries, "retry"))
            }
            Self::Free { buffers } | Self::Evict { buffers } => {
                write!(f, "{kind} {}", joined(buffers, ", "))
            }
            Self::Batch {
                floor,
                retries,
                empty_cache,
                ..
            } => {
                let cache = if *empty_cache {
                    ", empty_cache before each"
                } else {
                    ""
                };
                write!(
                    f,
                    "{kind} down to {floor}, at most {}{cache}",
                    count(*retries, "retry")
                )
            }
            Self::SplitAndAccumulate { floor } => write!(f, "{kind} down to {floor}"),
            Self::SpillToHost { part, memory } => write!(f, "{kind} {part}, in {memory}"),
            Self::CheckpointMore { most } => write!(
                f,
                "{kind}, at most {} per checkpoint",
                count(*most, "layer")
            ),
            Self::Wait {
                first,
                factor,
                retries,
            } => {
                write!(
                    f,
                    "{kind} {first}, {factor} times as long each time, at most {}",
                    count(*retries, "retry")
                )
            }
        }
    }
}

/// Policies in the order in which they are tried. The next one is tried if one has no retries left
/// or cannot help.
#[derive(Clone, Debug, PartialEq, Eq, Display)]
#[display("{}", joined(_0, ", then "))]
pub struct Chain(Vec<Policy>);

impl Chain {
    /// Never empty.
    pub fn policies(&self) -> &[Policy] {
        &self.0
    }

    pub fn most_attempts(&self) -> u64 {
        1 + self
            .0
            .iter()
            .map(|policy| u64::from(policy.retries()))
            .sum::<u64>()
    }

    /// The default of `infer`.
    pub(crate) fn evict_requests() -> Self {
        Self(vec![Policy::Evict {
            buffers: Vec::new(),
        }])
    }

    /// The mode of its `scale_batch`, if it has one.
    pub fn scales(&self) -> Option<ScaleMode> {
        self.0.iter().find_map(|policy| {
            if let Policy::ScaleBatch { mode } = policy {
                Some(*mode)
            } else {
                None
            }
        })
    }

    pub fn evicts_requests(&self) -> bool {
        self.0
            .iter()
            .any(|policy| matches!(policy, Policy::Evict { buffers } if buffers.is_empty()))
    }

    /// Removes a `wait` at the end. Returns the other policies, if any, and whether there was a
    /// `wait`.
    pub(crate) fn without_last_wait(mut self) -> (Option<Self>, bool) {
        let waits = self
            .0
            .pop_if(|last| last.kind() == PolicyKind::Wait)
            .is_some();
        ((!self.0.is_empty()).then_some(self), waits)
    }

    pub fn waits(&self) -> bool {
        self.0
            .iter()
            .any(|policy| policy.kind() == PolicyKind::Wait)
    }
}
