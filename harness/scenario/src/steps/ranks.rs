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
    /// Whether the ranks agree on the next try.
    pub agree: bool,
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
        let agree = if self.agree { ", which agree" } else { "" };
        write!(f, "{} ranks{agree}", self.count())
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
    /// Ranks that have less, as in `{ 1: 2GiB }`: rank 1 has 2 GiB less than the others, as where another process holds that much.
    #[schemars(with = "Option<BTreeMap<String, String>>")]
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
    agree: bool,
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

const FORMS: &str = "a number from 2 to 16, or a map, as in `{ count: 4, memory: 16GiB, less: { 1: 2GiB }, agree: true }`";

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
                Ok(Ranks { limits: vec![memory; count as usize], reduce: Reduce::Ddp, bucket: None, agree: false })
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
        for (rank, less) in self.less(count, memory, checker)? {
            limits[rank as usize] = memory.saturating_sub(less);
        }
        let bucket = self.bucket.as_ref().map(|bucket| checker.positive_size(bucket, "bucket")).transpose()?;
        Ok(Ranks { limits, reduce, bucket, agree: self.agree })
    }

    /// The ranks that have less, and how much.
    fn less(&self, count: u64, memory: Bytes, checker: &Checker<'_>) -> Result<BTreeMap<u64, Bytes>, Problem> {
        const FORM: &str = "ranks with what they have less, as in `less: { 1: 2GiB }`";
        let Some(given) = &self.less else { return Ok(BTreeMap::new()) };
        let Tree::Map(entries) = &given.value else {
            return Err(Problem::new(given.position(), "`less` does not say which rank has less").help(FORM));
        };
        let mut ranks = BTreeMap::new();
        for (rank, less) in entries {
            let number = checker.whole(&CountText(rank.clone()), "a rank", 0..=count - 1)?;
            let text = less.text().ok_or_else(|| Problem::new(less.position(), "this is no size").help(FORM))?;
            let size = checker.positive_size(&AmountText(text), "less")?;
            if size >= memory {
                let message = format!("rank {number} would have nothing: each has {memory}, and this one {size} less");
                return Err(Problem::new(less.position(), message).help(format!("less than {memory}")));
            }
            if ranks.insert(number, size).is_some() {
                return Err(Problem::new(rank.position(), format!("rank {number} is named twice")).help(FORM));
            }
        }
        Ok(ranks)
    }
}
