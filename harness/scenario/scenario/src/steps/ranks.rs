//! `ranks` of a `train`: data-parallel training, in which each rank has its own memory.

use std::collections::BTreeMap;

use derive_more::Display;
use harness_allocator::units::Bytes;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use crate::checker::Checker;
use crate::policy::{Chain, Policy, PolicyKind};
use harness_language::error::Problem;
use harness_language::located::{ListOr, Located, Position, Tree};
use harness_language::text::{AmountText, CountText};

pub const MAX_RANKS: u64 = 16;

/// Why ranks cannot use a policy.
const fn no_use_for_ranks(kind: PolicyKind) -> Option<&'static str> {
    match kind {
        PolicyKind::Wait => Some("no other process releases memory to a rank"),
        PolicyKind::ScaleBatch => Some("it searches in one process"),
        PolicyKind::SpillToHost => Some("ranks run on the device only"),
        _ => None,
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Display)]
#[display("{} ranks{}", self.count(), if *sync_batch { ", synchronized batch" } else { "" })]
pub struct Ranks {
    /// Most memory of each rank. There are at least two ranks.
    pub limits: Vec<Bytes>,
    pub reduce: Reduce,
    /// Bytes of gradients per bucket of `reduce: ddp`. `None`: 1 MiB for the first bucket and
    /// [`Ranks::BUCKET`] for the others.
    pub bucket: Option<Bytes>,
    /// All ranks take the same batch for a retry.
    pub sync_batch: bool,
}

/// When gradients are averaged over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Reduce {
    /// `DistributedDataParallel`: in buckets, each as soon as its gradients are ready.
    Ddp,
    /// Each gradient as soon as it is ready.
    Hooks,
    /// Each gradient after the backward pass.
    AfterBackward,
}

impl Ranks {
    /// Default of DDP's `bucket_cap_mb`
    /// (<https://docs.pytorch.org/docs/2.11/generated/torch.nn.parallel.DistributedDataParallel.html>).
    pub const BUCKET: Bytes = Bytes::mib(25);

    pub const fn count(&self) -> usize {
        self.limits.len()
    }
}

#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub(super) struct RanksWire(
    #[schemars(schema_with = "harness_language::located::one_or_map::<CountText, RanksFields>")]
    Located<ListOr<CountText, RanksFields>>,
);

/// Data-parallel training. Each rank has its own model, allocator, memory limit, recovery policies
/// and samples. Rank 0 is the program that has the step. The ranks take turns on the device, and
/// each sees its limit as the memory of a whole GPU.
///
/// Collectives (all-reduce, broadcast) are matched as in NCCL: the first of each rank with the
/// first of every other rank, and so on. If no rank can continue, or if different gradients would
/// be summed, the training ends with a violation of `collectives_match`, which says which rank
/// waits for which. Collectives take no time, and no memory except DDP's buckets.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "ranks")]
struct RanksFields {
    /// Number of ranks, from 2 to 16.
    count: CountText,
    /// Memory limit of each rank. Default: an equal part of `needs.memory`.
    memory: Option<AmountText>,
    /// Memory limits of single ranks, at most `memory`: `{ 1: 2GiB }` limits rank 1 to 2 GiB, as if
    /// another process used the rest.
    #[schemars(with = "Option<BTreeMap<String, String>>")]
    memory_override: Option<Located<Tree>>,
    /// When gradients are averaged. Default: `ddp`.
    ///
    /// `ddp` is PyTorch's `DistributedDataParallel`. It copies gradients into buckets, which stay
    /// allocated and take as much memory as all gradients. It starts the all-reduce of a bucket as
    /// soon as the bucket is full. The first iteration has one bucket. A rank that fails in the
    /// backward pass cannot retry, because DDP rejects the next forward pass. Buffers of the model,
    /// such as those of `batch_norm`, are broadcast before each forward pass.
    ///
    /// `hooks` reduces each gradient as soon as it is ready, as with
    /// `register_post_accumulate_grad_hook`. `after_backward` reduces each gradient after the
    /// backward pass, as under `no_sync` with one `all_reduce` per gradient.
    reduce: Option<Reduce>,
    /// Bytes per bucket with `reduce: ddp` (`bucket_cap_mb`). Default: 1MiB for the first bucket,
    /// 25MiB for the others.
    bucket: Option<AmountText>,
    /// Makes the ranks exchange, before any gradient is reduced, if one of them ran out of memory.
    /// If one did, all ranks drop the attempt and take the smallest batch. With `ddp` and `hooks`
    /// the exchange is before the backward pass, so it misses failures in that pass. Default:
    /// `false`.
    #[serde(default)]
    sync_batch: bool,
}

const FORMS: &str = "write a number from 2 to 16, or a map, as in `{ count: 4, memory: 16GiB, \
     memory_override: { 1: 2GiB }, sync_batch: true }`";

impl RanksWire {
    pub(super) fn check(
        &self,
        on_oom: Option<&Chain>,
        checker: &Checker<'_>,
    ) -> Result<Ranks, Problem> {
        let at = self.0.at;
        let kinds = || {
            on_oom
                .into_iter()
                .flat_map(|chain| chain.policies().iter().map(Policy::kind))
        };
        if let Some((kind, why)) =
            kinds().find_map(|kind| no_use_for_ranks(kind).map(|why| (kind, why)))
        {
            return Err(
                Problem::new(at, format!("ranks cannot use the policy `{kind}`: {why}"))
                    .help(format!("remove `{kind}`, or `ranks`")),
            );
        }
        match &self.0.value {
            ListOr::One(count) => {
                let count = checker.whole(
                    &CountText(self.0.with(count.clone())),
                    "ranks",
                    2..=MAX_RANKS,
                )?;
                let memory = Self::memory(count, None, at, checker)?;
                Ok(Ranks {
                    limits: vec![memory; count as usize],
                    reduce: Reduce::Ddp,
                    bucket: None,
                    sync_batch: false,
                })
            }
            ListOr::Many(_) => Err(Problem::new(at, "expected the number of ranks").help(FORMS)),
            ListOr::Map(fields) => fields.check(at, checker),
        }
    }

    fn memory(
        count: u64,
        given: Option<&AmountText>,
        at: Position,
        checker: &Checker<'_>,
    ) -> Result<Bytes, Problem> {
        let (all, part) = (
            checker.declared.memory,
            Bytes(checker.declared.memory.0 / count),
        );
        let Some(given) = given else {
            return match part {
                Bytes::ZERO => Err(Problem::new(
                    at,
                    format!("{all} for {count} ranks is less than one byte per rank"),
                )
                .help(FORMS)),
                part => Ok(part),
            };
        };
        let memory = checker.positive_size(given, "memory")?;
        if memory <= part {
            return Ok(memory);
        }
        let message =
            format!("{count} ranks with {memory} each need more than the {all} of this scenario");
        Err(Problem::new(given.at, message).help(format!(
            "use at most {part} per rank, or raise `needs: {{ memory: … }}`"
        )))
    }
}

impl RanksFields {
    fn check(&self, at: Position, checker: &Checker<'_>) -> Result<Ranks, Problem> {
        let count = checker.whole(&self.count, "count", 2..=MAX_RANKS)?;
        let memory = RanksWire::memory(count, self.memory.as_ref(), at, checker)?;
        let reduce = self.reduce.unwrap_or(Reduce::Ddp);
        if let Some(bucket) = self.bucket.as_ref().filter(|_| reduce != Reduce::Ddp) {
            return Err(
                Problem::new(bucket.at, "only `reduce: ddp` has buckets").help("remove `bucket`")
            );
        }
        let mut limits = vec![memory; count as usize];
        for (rank, limit) in self.overrides(count, memory, checker)? {
            limits[rank as usize] = limit;
        }
        let bucket = self
            .bucket
            .as_ref()
            .map(|bucket| checker.positive_size(bucket, "bucket"))
            .transpose()?;
        Ok(Ranks {
            limits,
            reduce,
            bucket,
            sync_batch: self.sync_batch,
        })
    }

    fn overrides(
        &self,
        count: u64,
        memory: Bytes,
        checker: &Checker<'_>,
    ) -> Result<BTreeMap<u64, Bytes>, Problem> {
        const FORM: &str = "write ranks with their limits, as in `memory_override: { 1: 2GiB }`";
        let Some(given) = &self.memory_override else {
            return Ok(BTreeMap::new());
        };
        let Tree::Map(entries) = &given.value else {
            return Err(Problem::new(given.at, "expected a map from ranks to limits").help(FORM));
        };
        let mut limits = BTreeMap::new();
        for (rank, text) in entries {
            let number = checker.whole(&CountText(rank.clone()), "a rank", 0..=count - 1)?;
            let at = text.at;
            let text = text
                .text()
                .ok_or_else(|| Problem::new(at, "expected a size").help(FORM))?;
            let limit = checker.positive_size(&AmountText(text), "the limit of a rank")?;
            if limit > memory {
                let message = format!("the limit of rank {number} must be at most {memory}");
                return Err(Problem::new(at, message).help(FORM));
            }
            if limits.insert(number, limit).is_some() {
                return Err(
                    Problem::new(rank.at, format!("rank {number} is named twice")).help(FORM),
                );
            }
        }
        Ok(limits)
    }
}
