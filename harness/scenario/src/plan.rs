//! How much memory an attempt asks for: a [`Plan`], which a recovery policy turns into a smaller one after a failure.

use std::fmt;

use harness_allocator::device::HostMemory;
use harness_base::words::count;

/// How the next attempt of a step that can recover is done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Samples of one iteration, or requests that are served at once. At least 1.
    pub batch: u64,
    /// Parts in which the batch is done one after the other, their gradients added up. From 1 to `batch`.
    pub micro_batches: u64,
    /// Of each so many layers only the input is kept for the backward pass, and the rest is computed again there; `None`: everything is kept.
    pub checkpoint_every: Option<u64>,
    /// The numbers that activations are made of.
    pub precision: Precision,
    /// What is kept in host memory meanwhile.
    pub spilled: Spilled,
}

/// What of a training is kept in host memory while it is not used on the device; `None`: it stays on the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spilled {
    /// What is saved for the backward pass.
    pub activations: Option<HostMemory>,
    /// The optimizer's state, with the optimizer.
    pub optimizer_state: Option<HostMemory>,
}

/// A part of a training that can be kept in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the fields of `Spilled`")]
pub enum SpilledPart {
    Activations,
    OptimizerState,
}

impl Spilled {
    /// Nothing.
    pub const NOTHING: Self = Self { activations: None, optimizer_state: None };

    /// Where a part is kept.
    #[must_use]
    pub const fn part(&self, part: SpilledPart) -> Option<&HostMemory> {
        match part {
            SpilledPart::Activations => self.activations.as_ref(),
            SpilledPart::OptimizerState => self.optimizer_state.as_ref(),
        }
    }

    /// The same with a part in this memory.
    #[must_use]
    pub fn with(self, part: SpilledPart, memory: HostMemory) -> Self {
        match part {
            SpilledPart::Activations => Self { activations: Some(memory), ..self },
            SpilledPart::OptimizerState => Self { optimizer_state: Some(memory), ..self },
        }
    }

    /// Whether each part is in memory that is at least as easy to have as with another plan: the device's is the hardest.
    fn is_no_harder_than(&self, other: &Self) -> bool {
        let rank = |memory: Option<&HostMemory>| memory.map(HostMemory::rank);
        [SpilledPart::Activations, SpilledPart::OptimizerState].into_iter().all(|part| rank(self.part(part)) >= rank(other.part(part)))
    }
}

impl SpilledPart {
    /// As a plan says it.
    const fn words(self) -> &'static str {
        match self {
            Self::Activations => "saved activations",
            Self::OptimizerState => "optimizer state",
        }
    }
}

impl fmt::Display for SpilledPart {
    /// As the scenario says it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Activations => "activations",
            Self::OptimizerState => "optimizer_state",
        })
    }
}

/// The numbers that a training computes with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// 32-bit numbers throughout.
    Fp32,
    /// 16-bit activations, and 32-bit parameters, gradients and optimizer state.
    Mixed,
}

/// A part of a plan, which a step may understand or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are those of the plan's fields")]
pub enum PlanPart {
    Batch,
    MicroBatches,
    Checkpointing,
    Precision,
    Spilled,
    /// Which of the scenario's buffers stay on the device. Those that a policy gave up are gone, so the plan has no field for them.
    Buffers,
    /// Which requests are served. Those that a policy gave up wait again, so the plan has no field for them.
    Requests,
}

impl Plan {
    /// So many samples at once, with nothing saved.
    #[must_use]
    pub const fn of_batch(batch: u64) -> Self {
        Self { batch, micro_batches: 1, checkpoint_every: None, precision: Precision::Fp32, spilled: Spilled::NOTHING }
    }

    /// Samples that are in memory at once: those of the largest micro-batch.
    #[must_use]
    pub const fn samples_at_once(&self) -> u64 {
        self.batch.div_ceil(self.micro_batches)
    }

    /// Whether it asks for less memory than another plan, and in no part for more.
    #[must_use]
    pub fn asks_for_less_than(&self, other: &Self) -> bool {
        let checkpointed = |plan: &Self| plan.checkpoint_every.is_some();
        let is_mixed = |plan: &Self| plan.precision == Precision::Mixed;
        let not_more = self.samples_at_once() <= other.samples_at_once()
            && checkpointed(self) >= checkpointed(other)
            && is_mixed(self) >= is_mixed(other)
            && self.spilled.is_no_harder_than(&other.spilled);
        not_more && self != other
    }
}

impl fmt::Display for Plan {
    /// In words: `a batch of 32 in 4 parts, checkpointed every 2 layers, in mixed precision, optimizer state in pinned host memory`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a batch of {}", self.batch)?;
        if self.micro_batches > 1 {
            write!(f, " in {} parts", self.micro_batches)?;
        }
        if let Some(layers) = self.checkpoint_every {
            write!(f, ", checkpointed every {}", count(layers, "layer"))?;
        }
        match self.precision {
            Precision::Fp32 => {}
            Precision::Mixed => f.write_str(", in mixed precision")?,
        }
        for part in [SpilledPart::Activations, SpilledPart::OptimizerState] {
            if let Some(memory) = self.spilled.part(part) {
                write!(f, ", {} in {memory}", part.words())?;
            }
        }
        Ok(())
    }
}
