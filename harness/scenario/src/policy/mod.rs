//! Recovery policies of `on_oom`: what is done between a failed request and the next try.
//!
//! A new policy is a row of [`PolicyKind`], a variant of [`PolicyWire`](wire::PolicyWire) and one of [`Policy`]; the matches say where it is missing.

mod check;
mod wire;

use std::fmt;

use harness_allocator::device::HostMemory;
use harness_allocator::units::Nanos;
use harness_base::words::count;

use super::metric::BufferName;
use super::plan::{PlanPart, SpilledPart};

pub(crate) use check::{Recoverable, check};
pub(crate) use wire::ChainWire;

/// Most retries that a policy may be given.
pub const MAX_RETRIES: u32 = 100;
/// Most policies of one step.
pub const MAX_POLICIES: usize = 10;

/// Declares the policies: variant, name in YAML, and the part of a plan that it changes.
macro_rules! kinds {
    ($($(#[doc = $about:literal])+ $variant:ident = $name:literal: $needs:expr;)*) => {
        /// Which policy it is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum PolicyKind { $($(#[doc = $about])+ $variant,)* }

        impl PolicyKind {
            /// Every one, in the order of the reference.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// Its name in YAML.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// The part of a plan that a step must understand for the policy to be of use; `None`: any step can have it.
            #[must_use]
            pub const fn needs(self) -> Option<PlanPart> {
                match self { $(Self::$variant => $needs),* }
            }

            /// Reads a name.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|kind| kind.name() == name)
            }
        }
    };
}

kinds! {
    /// The failure is final.
    GiveUp = "give_up": None;
    /// The cache goes back to the driver.
    EmptyCache = "empty_cache": None;
    /// Buffers are given up.
    Free = "free": Some(PlanPart::Buffers);
    /// The whole device is waited for.
    Synchronize = "synchronize": None;
    /// Half the batch.
    HalveBatch = "halve_batch": Some(PlanPart::Batch);
    /// Nine tenths of the batch.
    ShrinkBatch = "shrink_batch": Some(PlanPart::Batch);
    /// The largest batch that fits.
    BisectBatch = "bisect_batch": Some(PlanPart::Batch);
    /// The same batch in more parts.
    SplitAndAccumulate = "split_and_accumulate": Some(PlanPart::MicroBatches);
    /// Fewer activations are kept.
    CheckpointMore = "checkpoint_more": Some(PlanPart::Checkpointing);
    /// Smaller numbers.
    HalfPrecision = "half_precision": Some(PlanPart::Precision);
    /// Something is kept in host memory.
    SpillToHost = "spill_to_host": Some(PlanPart::Spilled);
    /// The buffer, or the request that is served, that was used longest ago is given up.
    Evict = "evict": Some(PlanPart::Buffers);
    /// Time passes.
    Wait = "wait": None;
}

impl PolicyKind {
    /// Whether it cannot do without fields.
    pub(crate) const fn needs_fields(self) -> bool {
        matches!(self, Self::Free)
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What is done between a failed request and the next try.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Nothing, and there is no next try.
    GiveUp,
    /// Gives the allocator's cache back to the driver, then tries again.
    EmptyCache {
        /// Most tries after the first.
        retries: u32,
    },
    /// Frees these buffers, as far as they are live, then tries once more.
    Free {
        /// What is given up.
        buffers: Vec<BufferName>,
    },
    /// Waits for the whole device, then tries again.
    Synchronize {
        /// Most tries after the first.
        retries: u32,
    },
    /// Drops the failed iteration and tries it again with another batch.
    Batch {
        /// How the next batch follows from the one that failed.
        rule: BatchRule,
        /// The smallest batch to try.
        floor: u64,
        /// Most tries after the first, for each iteration.
        retries: u32,
        /// Whether the cache goes back to the driver before each retry.
        empty_cache: bool,
    },
    /// Drops the failed iteration and does it again in twice as many parts.
    SplitAndAccumulate {
        /// The smallest part, in samples.
        floor: u64,
    },
    /// Drops the failed iteration and keeps fewer activations.
    CheckpointMore {
        /// The most layers of which only one input is kept.
        most: u64,
    },
    /// Drops the failed iteration and makes its activations of 16-bit numbers.
    HalfPrecision,
    /// Drops the failed iteration and keeps something in host memory.
    SpillToHost {
        /// What.
        part: SpilledPart,
        /// Where.
        memory: HostMemory,
    },
    /// Frees the one of these that was used longest ago, before each try.
    Evict {
        /// What may go. A name of numbered buffers stands for all of them. None: the caches of requests that are served.
        buffers: Vec<BufferName>,
    },
    /// Waits before each try.
    Wait {
        /// The first wait.
        first: Nanos,
        /// How much longer each wait is than the one before.
        factor: u32,
        /// Most tries after the first.
        retries: u32,
    },
}

/// How a smaller batch follows from one that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchRule {
    /// Half of it, rounded down.
    Halve,
    /// Nine tenths of it, rounded down.
    Shrink,
    /// Half way to the largest that worked; and after one that worked, half way to the smallest that failed.
    Bisect,
}

impl Policy {
    /// Which policy it is.
    #[must_use]
    pub const fn kind(&self) -> PolicyKind {
        match self {
            Self::GiveUp => PolicyKind::GiveUp,
            Self::EmptyCache { .. } => PolicyKind::EmptyCache,
            Self::Free { .. } => PolicyKind::Free,
            Self::Synchronize { .. } => PolicyKind::Synchronize,
            Self::Batch { rule: BatchRule::Halve, .. } => PolicyKind::HalveBatch,
            Self::Batch { rule: BatchRule::Shrink, .. } => PolicyKind::ShrinkBatch,
            Self::Batch { rule: BatchRule::Bisect, .. } => PolicyKind::BisectBatch,
            Self::SplitAndAccumulate { .. } => PolicyKind::SplitAndAccumulate,
            Self::CheckpointMore { .. } => PolicyKind::CheckpointMore,
            Self::HalfPrecision => PolicyKind::HalfPrecision,
            Self::SpillToHost { .. } => PolicyKind::SpillToHost,
            Self::Evict { .. } => PolicyKind::Evict,
            Self::Wait { .. } => PolicyKind::Wait,
        }
    }

    /// Most tries after the first.
    #[must_use]
    pub const fn retries(&self) -> u32 {
        match self {
            Self::GiveUp => 0,
            Self::EmptyCache { retries } | Self::Synchronize { retries } | Self::Batch { retries, .. } | Self::Wait { retries, .. } => {
                *retries
            }
            Self::Free { .. } | Self::HalfPrecision | Self::SpillToHost { .. } => 1,
            // These end by themselves, when there is nothing left to split, to keep or to free.
            Self::SplitAndAccumulate { .. } | Self::CheckpointMore { .. } | Self::Evict { .. } => MAX_RETRIES,
        }
    }

    /// Buffers of the scenario that may be gone behind the step.
    #[must_use]
    pub fn may_free(&self) -> &[BufferName] {
        match self {
            Self::Free { buffers } | Self::Evict { buffers } => buffers,
            _ => &[],
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |buffers: &[BufferName]| buffers.iter().map(BufferName::name).collect::<Vec<_>>().join(", ");
        let kind = self.kind();
        match self {
            Self::GiveUp | Self::HalfPrecision => kind.fmt(f),
            Self::Evict { buffers } if buffers.is_empty() => write!(f, "{kind} requests"),
            Self::EmptyCache { retries } | Self::Synchronize { retries } => write!(f, "{kind}, at most {}", count(*retries, "retry")),
            Self::Free { buffers } | Self::Evict { buffers } => write!(f, "{kind} {}", names(buffers)),
            Self::Batch { floor, retries, empty_cache, .. } => {
                let cache = if *empty_cache { ", empty_cache before each" } else { "" };
                write!(f, "{kind} down to {floor}, at most {}{cache}", count(*retries, "retry"))
            }
            Self::SplitAndAccumulate { floor } => write!(f, "{kind} down to {floor}"),
            Self::SpillToHost { part, memory } => write!(f, "{kind} {part}, in {memory}"),
            Self::CheckpointMore { most } => write!(f, "{kind}, of at most {} one input", count(*most, "layer")),
            Self::Wait { first, factor, retries } => {
                write!(f, "{kind} {first}, each time {factor} times as long, at most {}", count(*retries, "retry"))
            }
        }
    }
}

/// Policies in the order in which they are tried: the next one where one has no retries left, or nothing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain(Vec<Policy>);

impl Chain {
    /// The policies, in their order. There is at least one.
    #[must_use]
    pub fn policies(&self) -> &[Policy] {
        &self.0
    }

    /// Most tries of one request or iteration, the first included.
    #[must_use]
    pub fn most_attempts(&self) -> u64 {
        1 + self.0.iter().map(|policy| u64::from(policy.retries())).sum::<u64>()
    }

    /// The policy of a step with requests, where the file does not say.
    pub(crate) fn evict_requests() -> Self {
        Self(vec![Policy::Evict { buffers: Vec::new() }])
    }

    /// Whether it gives up requests that are served.
    #[must_use]
    pub fn evicts_requests(&self) -> bool {
        self.0.iter().any(|policy| matches!(policy, Policy::Evict { buffers } if buffers.is_empty()))
    }

    /// The same without the last policy, where that waits; `None`: no other policy is left. Tells whether it did.
    pub(crate) fn without_last_wait(mut self) -> (Option<Self>, bool) {
        let waits = self.0.pop_if(|last| last.kind() == PolicyKind::Wait).is_some();
        ((!self.0.is_empty()).then_some(self), waits)
    }

    /// Whether it waits for others.
    #[must_use]
    pub fn waits(&self) -> bool {
        self.0.iter().any(|policy| policy.kind() == PolicyKind::Wait)
    }
}

impl fmt::Display for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, policy) in self.0.iter().enumerate() {
            if number > 0 {
                f.write_str(", then ")?;
            }
            policy.fmt(f)?;
        }
        Ok(())
    }
}
