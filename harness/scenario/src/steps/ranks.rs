//! `ranks` of a `train`: a data-parallel training, in which each rank has memory of its own.

use std::collections::BTreeMap;
use std::fmt;

use harness_allocator::units::Bytes;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use crate::checker::Checker;
use crate::policy::{Chain, Policy, PolicyKind};
use harness_language::error::Problem;
use harness_language::located::{ListOr, Located, Position, Tree};
use harness_language::text::{AmountText, CountText};

/// Most ranks of one training.
pub const MAX_RANKS: u64 = 16;

/// Why a policy is of no use to ranks, if it is of none.
const fn no_use_for_ranks(kind: PolicyKind) -> Option<&'static str> {
    match kind {
        PolicyKind::Wait => Some("the memory of a rank is its own, and nobody gives any back to it"),
        PolicyKind::SpillToHost => Some("their passes are done on the device alone"),
        _ => None,
    }
}

/// The ranks of a data-parallel training, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    /// The most that each may hold, by number. There are at least two.
    pub limits: Vec<Bytes>,
    /// How gradients are averaged over the ranks.
    pub reduce: Reduce,
    /// Bytes of gradients at which every bucket of `reduce: ddp` is closed. `None`: the first at 1 MiB, the others at [`Ranks::BUCKET`].
    pub bucket: Option<Bytes>,
    /// Whether all ranks take the same batch for the next try.
    pub sync_batch: bool,
}

/// When the gradients of the ranks are averaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(inline)]
pub enum Reduce {
    /// By `DistributedDataParallel`: in buckets, each as soon as its gradients are there.
    Ddp,
    /// One by one, each as soon as it is there.
    Hooks,
    /// One by one, when the backward pass is over.
    AfterBackward,
}

impl Ranks {
    /// DDP's `bucket_cap_mb`, where nothing else is said (<https://docs.pytorch.org/docs/2.11/generated/torch.nn.parallel.DistributedDataParallel.html>).
    pub const BUCKET: Bytes = Bytes::mib(25);

    /// How many there are.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.limits.len()
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sync = if self.sync_batch { ", synchronized batch" } else { "" };
        write!(f, "{} ranks{sync}", self.count())
    }
}

/// A number of ranks, or a map.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(super) struct RanksWire(Located<ListOr<RanksFields>>);

/// A data-parallel training: each rank does every iteration with a model, an allocator, a limit and recovery policies of its own, on `batch` samples of its own. Rank 0 is the
/// program that has the step. The ranks take turns on the device; to each of them, its limit is all the memory that there is, as if it had a GPU to itself. Collectives (all-reduces, broadcasts) are
/// matched as NCCL does, the first of each rank with the first of every other, and so on. Where no rank can go on, or gradients of different kinds would be
/// added up, the training ends with a violation of `collectives_match` that says who waits for whom. Collectives take neither time nor memory here, but for DDP's buckets.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "ranks")]
struct RanksFields {
    /// How many, from 2 to 16.
    count: CountText,
    /// What each may hold at most: an equal part of the memory that the scenario needs, if not given.
    memory: Option<AmountText>,
    /// Ranks with another limit, at most `memory`: `{ 1: 2GiB }` limits rank 1 to 2 GiB, as if another process used the rest.
    #[schemars(with = "Option<BTreeMap<String, String>>")]
    memory_override: Option<Located<Tree>>,
    /// Earlier form of `memory_override`: how much less than `memory` a rank has.
    #[schemars(skip)]
    less: Option<Located<Tree>>,
    /// `ddp` (if not given): by PyTorch's `DistributedDataParallel`, which copies gradients into buckets that stay allocated, as large as all gradients together, and begins the
    /// all-reduce of each as soon as it is full; in the first iteration there is one bucket for everything; a rank that fails in the backward pass cannot try
    /// again, because DDP refuses the next forward pass; buffers of the model, as those of `batch_norm`, are broadcast before each forward pass. `hooks`: each gradient by itself as soon as it is there, as with
    /// `register_post_accumulate_grad_hook`. `after_backward`: each gradient by itself when the backward pass is over, as under `no_sync` with an `all_reduce` for each.
    reduce: Option<Reduce>,
    /// With `reduce: ddp`: bytes at which each bucket is closed (`bucket_cap_mb`). If not given, the first of the backward pass is closed at 1MiB and the others at 25MiB.
    bucket: Option<AmountText>,
    /// Whether the ranks tell each other in each try, before any gradient is reduced, whether they ran out of memory; if one did, all give the try up and take the smallest plan
    /// that a policy comes to: no, if not given. With `ddp` and `hooks` that is before the backward pass, whose failures then come too late for it.
    #[serde(default)]
    sync_batch: bool,
    /// The earlier name of `sync_batch`.
    #[schemars(skip)]
    agree: Option<Located<bool>>,
}

impl JsonSchema for RanksWire {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "count or ranks".into()
    }
    fn inline_schema() -> bool {
        true
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({ "anyOf": [generator.subschema_for::<CountText>(), generator.subschema_for::<RanksFields>()] })
    }
}

const FORMS: &str = "a number from 2 to 16, or a map, as in `{ count: 4, memory: 16GiB, memory_override: { 1: 2GiB }, sync_batch: true }`";

impl RanksWire {
    /// Checks it beside the policies of the training.
    pub(super) fn check(&self, on_oom: Option<&Chain>, checker: &Checker<'_>) -> Result<Ranks, Problem> {
        let at = self.0.position();
        let kinds = || on_oom.into_iter().flat_map(|chain| chain.policies().iter().map(Policy::kind));
        if let Some((kind, why)) = kinds().find_map(|kind| no_use_for_ranks(kind).map(|why| (kind, why))) {
            return Err(
                Problem::new(at, format!("`{kind}` can do nothing for ranks: {why}")).help(format!("leave `{kind}` out, or `ranks`"))
            );
        }
        match &self.0.value {
            ListOr::One(count) => {
                let count = checker.whole(&CountText(self.0.with(count.clone())), "ranks", 2..=MAX_RANKS)?;
                let memory = Self::memory(count, None, at, checker)?;
                Ok(Ranks { limits: vec![memory; count as usize], reduce: Reduce::Ddp, bucket: None, sync_batch: false })
            }
            ListOr::Many(_) => Err(Problem::new(at, "this does not say how many ranks there are").help(FORMS)),
            ListOr::Map(fields) => fields.check(at, checker),
        }
    }

    /// What each rank has, unless it has less.
    fn memory(count: u64, given: Option<&AmountText>, at: Position, checker: &Checker<'_>) -> Result<Bytes, Problem> {
        let (all, part) = (checker.memory(), Bytes(checker.memory().0 / count));
        let Some(given) = given else {
            return match part {
                Bytes::ZERO => Err(Problem::new(at, format!("{all} for {count} ranks are less than a byte for each")).help(FORMS)),
                part => Ok(part),
            };
        };
        let memory = checker.positive_size(given, "memory")?;
        if memory <= part {
            return Ok(memory);
        }
        let message = format!("{count} ranks with {memory} each need more than the {all} of this scenario");
        Err(Problem::new(given.position(), message).help(format!("at most {part} each, or more under `needs: {{ memory: … }}`")))
    }
}

impl RanksFields {
    fn check(&self, at: Position, checker: &Checker<'_>) -> Result<Ranks, Problem> {
        let count = checker.whole(&self.count, "count", 2..=MAX_RANKS)?;
        let memory = RanksWire::memory(count, self.memory.as_ref(), at, checker)?;
        let reduce = self.reduce.unwrap_or(Reduce::Ddp);
        if let Some(bucket) = self.bucket.as_ref().filter(|_| reduce != Reduce::Ddp) {
            return Err(Problem::new(bucket.position(), "there are buckets only with `reduce: ddp`").help("leave `bucket` out"));
        }
        let mut limits = vec![memory; count as usize];
        for (rank, limit) in self.overrides(count, memory, checker)? {
            limits[rank as usize] = limit;
        }
        let bucket = self.bucket.as_ref().map(|bucket| checker.positive_size(bucket, "bucket")).transpose()?;
        if let Some(old) = &self.agree {
            checker.renamed(old.position(), "agree", "sync_batch");
        }
        Ok(Ranks { limits, reduce, bucket, sync_batch: self.sync_batch || self.agree.as_ref().is_some_and(|agree| agree.value) })
    }

    /// The limits of the ranks that do not have `memory`, by rank.
    fn overrides(&self, count: u64, memory: Bytes, checker: &Checker<'_>) -> Result<BTreeMap<u64, Bytes>, Problem> {
        const FORM: &str = "ranks with their limits, as in `memory_override: { 1: 2GiB }`";
        let (given, is_difference) = match (&self.memory_override, &self.less) {
            (Some(given), None) => (given, false),
            (None, Some(given)) => {
                checker.renamed(given.position(), "less", "memory_override");
                (given, true)
            }
            (None, None) => return Ok(BTreeMap::new()),
            (Some(_), Some(less)) => {
                return Err(Problem::new(less.position(), "`less` and `memory_override` exclude each other").help("remove `less`"));
            }
        };
        let Tree::Map(entries) = &given.value else {
            return Err(Problem::new(given.position(), "this names no rank").help(FORM));
        };
        let mut limits = BTreeMap::new();
        for (rank, text) in entries {
            let number = checker.whole(&CountText(rank.clone()), "a rank", 0..=count - 1)?;
            let at = text.position();
            let text = text.text().ok_or_else(|| Problem::new(at, "this is not a size").help(FORM))?;
            let size = checker.positive_size(&AmountText(text), "the limit of a rank")?;
            let limit = if is_difference { memory.0.checked_sub(size.0).map(Bytes) } else { Some(size) };
            let Some(limit) = limit.filter(|limit| *limit > Bytes::ZERO && *limit <= memory) else {
                let message = format!("rank {number} cannot have this limit: every rank has {memory}");
                return Err(Problem::new(at, message).help(format!("give a limit of at most {memory}")));
            };
            if limits.insert(number, limit).is_some() {
                return Err(Problem::new(rank.position(), format!("rank {number} is named twice")).help(FORM));
            }
        }
        Ok(limits)
    }
}
