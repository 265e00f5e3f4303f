//! [`AttemptPlan`]: the settings of one attempt. After a failure a recovery policy replaces it with
//! a smaller one.

use std::{collections::BTreeMap, fmt};

use derive_more::Display;
use harness_allocator::device::HostMemory;
use harness_base::words::count;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptPlan {
    /// Samples per iteration, or requests that run at the same time. At least 1.
    pub batch: u64,
    /// The number of micro-batches, unless `micro_batch` gives their size.
    pub micro_batches: u64,
    /// Samples per micro-batch. The last one may have fewer.
    pub micro_batch: Option<u64>,
    /// Layers per checkpoint. `None`: no activation checkpointing.
    pub checkpoint_every: Option<u64>,
    pub precision: Precision,
    pub spilled: Spilled,
}

/// The host memory of each part of a training that moved to the host.
pub type Spilled = BTreeMap<SpilledPart, HostMemory>;

/// A part of a training that can move to host memory.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, JsonSchema, Display,
)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum SpilledPart {
    /// Tensors that are saved for the backward pass.
    #[default]
    #[display("activations")]
    Activations,
    /// The optimizer's state.
    #[display("optimizer_state")]
    OptimizerState,
}

impl SpilledPart {
    const fn words(self) -> &'static str {
        match self {
            Self::Activations => "saved activations",
            Self::OptimizerState => "optimizer state",
        }
    }
}

/// The precision of a training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Precision {
    /// 32-bit throughout.
    #[default]
    Fp32,
    /// 16-bit activations; 32-bit parameters, gradients and optimizer state.
    Mixed,
}

/// A part of a plan. Each step supports some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlanPart {
    Batch,
    MicroBatches,
    Checkpointing,
    Precision,
    Spilled,
    /// Buffers that stay on the device. Evicted buffers are gone, so the plan has no field for
    /// them.
    Buffers,
    /// Requests that run. Evicted requests wait again, so the plan has no field for them.
    Requests,
}

impl AttemptPlan {
    /// A plan with this batch and no savings.
    pub const fn of_batch(batch: u64) -> Self {
        Self {
            batch,
            micro_batches: 1,
            micro_batch: None,
            checkpoint_every: None,
            precision: Precision::Fp32,
            spilled: Spilled::new(),
        }
    }

    /// Samples in memory at the same time: those of the largest micro-batch.
    pub const fn samples_at_once(&self) -> u64 {
        self.samples_of(0)
    }

    /// The number of micro-batches.
    pub const fn parts(&self) -> u64 {
        match self.micro_batch {
            Some(size) => self.batch.div_ceil(size),
            None => self.micro_batches,
        }
    }

    /// Samples of a micro-batch. If the batch does not divide evenly, the first ones are larger.
    pub const fn samples_of(&self, part: u64) -> u64 {
        match self.micro_batch {
            Some(size) => {
                let left = self.batch.saturating_sub(size.saturating_mul(part));
                if left < size { left } else { size }
            }
            None => {
                self.batch / self.micro_batches + (part < self.batch % self.micro_batches) as u64
            }
        }
    }

    /// Returns whether it needs less memory than another plan, and no part of it needs more.
    pub fn asks_for_less_than(&self, other: &Self) -> bool {
        let checkpointed = |plan: &Self| plan.checkpoint_every.is_some();
        let is_mixed = |plan: &Self| plan.precision == Precision::Mixed;
        // Device memory is the scarcest.
        let rank = |plan: &Self, part| plan.spilled.get(&part).map(HostMemory::rank);
        let parts = [SpilledPart::Activations, SpilledPart::OptimizerState];
        let not_more = self.samples_at_once() <= other.samples_at_once()
            && checkpointed(self) >= checkpointed(other)
            && is_mixed(self) >= is_mixed(other)
            && parts
                .into_iter()
                .all(|part| rank(self, part) >= rank(other, part));
        not_more && self != other
    }
}

impl fmt::Display for AttemptPlan {
    /// Describes the plan: `a batch of 32 in 4 parts, checkpointed every 2 layers, in mixed
    /// precision, optimizer state in pinned host memory`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a batch of {}", self.batch)?;
        if self.parts() > 1 {
            write!(f, " in {} parts", self.parts())?;
        }
        if let Some(layers) = self.checkpoint_every {
            write!(f, ", checkpointed every {}", count(layers, "layer"))?;
        }
        match self.precision {
            Precision::Fp32 => {}
            Precision::Mixed => f.write_str(", in mixed precision")?,
        }
        self.spilled
            .iter()
            .try_for_each(|(part, memory)| write!(f, ", {} in {memory}", part.words()))
    }
}
