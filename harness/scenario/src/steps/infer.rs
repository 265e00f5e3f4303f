//! `infer`: requests to a language model whose caches of keys and values grow with every word.

use std::fmt;
use std::ops::RangeInclusive;

use harness_allocator::units::Bytes;
use harness_base::words::count;
use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::ending::{Ending, EndingWire};
use crate::metric::{ReportKey, StepName, StreamName};
use crate::policy::{self, Chain, ChainWire, Recoverable};
use harness_language::error::Problem;
use harness_language::located::{Located, Position};
use harness_language::text::{CountText, NameText};

/// Most requests of one `infer`.
pub const MAX_REQUESTS: u64 = 100_000;
/// Most words of a prompt or an answer.
pub const MAX_TOKENS: u64 = 1 << 20;
/// Most layers, heads, and numbers of a head.
pub const MAX_WIDTH: u64 = 1 << 16;
/// Bytes of one number of a cache: caches are of 16-bit numbers.
const NUMBER: u64 = 2;

/// Requests to a model, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Infer {
    pub id: StepName,
    pub layers: u64,
    /// Keys, or values, of one word in one layer.
    pub token: Bytes,
    pub requests: u64,
    /// Steps of decoding between two arrivals.
    pub gap: RangeInclusive<u64>,
    /// Words of a prompt.
    pub prompt: RangeInclusive<u64>,
    /// Words of an answer.
    pub output: RangeInclusive<u64>,
    /// Requests that are served at once at most.
    pub max_running: u64,
    pub cache: Cache,
    /// What to do when there is no memory for a request, before it tries again.
    pub on_oom: Option<Chain>,
    /// Whether a request for which nothing else can be done waits until others are done.
    pub waits: bool,
    /// Where it runs.
    pub stream: StreamName,
    /// How it should end.
    pub expect: Ending,
}

/// How a cache grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Each layer's keys and values are one buffer each; with every word a larger one is made, the old one copied and freed, as by `torch.cat`.
    Growing,
    /// Pages of so many words, each with the keys and values of all layers.
    Paged(u64),
}

impl fmt::Display for Infer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, requests, max_running, cache, .. } = self;
        write!(f, "{id}, {}, at most {max_running} at once, ", count(*requests, "request"))?;
        match cache {
            Cache::Growing => f.write_str("growing caches"),
            Cache::Paged(words) => write!(f, "pages of {}", count(*words, "token")),
        }
    }
}

/// Serves requests to a language model: each has a cache of keys and values in every layer, as long as its prompt at first and one word longer with each
/// step of decoding. Contents are verified when a cache is copied or freed. Lengths and arrivals are drawn from the run's seed. Numbers have 16 bits.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "infer")]
pub(crate) struct InferWire {
    /// A name for what it reports.
    id: NameText,
    /// Layers of the model, each with keys and values.
    layers: CountText,
    /// Heads of keys and values.
    #[schemars(required)]
    kv_heads: Option<CountText>,
    /// The earlier name of `kv_heads`.
    #[schemars(skip)]
    heads: Option<CountText>,
    /// Numbers of one head.
    head_dim: CountText,
    /// How many requests, from 1 to 100000.
    requests: CountText,
    /// Steps of decoding between two arrivals, drawn evenly: all requests are there from the start, if not given.
    gap: Option<RangeWire>,
    /// Words of a prompt, drawn evenly.
    prompt: RangeWire,
    /// Words of an answer, drawn evenly.
    output: RangeWire,
    /// Requests that are served at once at most: as many as there are, if not given.
    max_running: Option<CountText>,
    /// Caches of pages of so many words, one buffer for all layers, as vLLM has them. If not given, each layer's keys and values are one buffer each, and every
    /// word makes a larger one, as `torch.cat` does.
    page: Option<CountText>,
    /// What to do where there is no memory for the next word of a request: `evict` if not given. A request that comes waits where the policies evict others, or say `wait`. Where a
    /// list comes to its end, or to `give_up`, serving ends.
    on_oom: Option<Box<Located<ChainWire>>>,
    /// `fits` (if not given): every request is served; `oom`, `{ oom: CAUSE }`: it ends for lack of memory; `any`. A map says it for each allocator.
    expect: Option<EndingWire>,
    /// The stream: `default` if not given.
    stream: Option<NameText>,
}

/// A number that is drawn evenly, both ends included.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "infer_range")]
struct RangeWire {
    /// The smallest.
    min: CountText,
    /// The largest.
    max: CountText,
}

impl RangeWire {
    fn check(&self, least: u64, checker: &Checker<'_>) -> Result<RangeInclusive<u64>, Problem> {
        let (min, max) = (checker.whole(&self.min, "min", least..=MAX_TOKENS)?, checker.whole(&self.max, "max", least..=MAX_TOKENS)?);
        if min > max {
            return Err(Problem::new(self.min.position(), format!("`min` is {min}, above `max`, {max}")).help("exchange the two"));
        }
        Ok(min..=max)
    }
}

impl InferWire {
    fn kv_heads(&self, at: Position, checker: &Checker<'_>) -> Result<&CountText, Problem> {
        if let Some(old) = &self.heads {
            checker.renamed(old.position(), "heads", "kv_heads");
        }
        self.kv_heads
            .as_ref()
            .or(self.heads.as_ref())
            .ok_or_else(|| Problem::new(at, "the field `kv_heads` is missing").help("add `kv_heads: …` to the fields of `infer`"))
    }
}

impl StepFields for InferWire {
    type Checked = Infer;

    const EXAMPLE: &'static str = "\
- infer:
    id: serving
    layers: 8
    kv_heads: 8
    head_dim: 64
    requests: 40
    prompt: { min: 100, max: 900 }
    output: { min: 10, max: 60 }
    max_running: 16
    page: 16
- expect: serving.served == 40";

    const REPORTS: &'static [ReportKey] =
        &[ReportKey::Served, ReportKey::Evicted, ReportKey::PeakRunning, ReportKey::RecomputedTokens, ReportKey::Ooms, ReportKey::Time];

    fn id(&self) -> Option<&NameText> {
        Some(&self.id)
    }

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Infer, Problem> {
        let width = |text, what| checker.whole(text, what, 1..=MAX_WIDTH);
        let layers = width(&self.layers, "layers")?;
        let token = Bytes(width(self.kv_heads(at, checker)?, "kv_heads")? * width(&self.head_dim, "head_dim")? * NUMBER);
        let requests = checker.whole(&self.requests, "requests", 1..=MAX_REQUESTS)?;
        let page = self.page.as_ref().map(|page| checker.whole(page, "page", 1..=MAX_TOKENS)).transpose()?;
        let output = self.output.check(1, checker)?;
        let buffers = if page.is_some() { 1 } else { 2 * layers };
        checker.count(at, requests.saturating_mul(*output.end()).saturating_mul(buffers))?;
        let max_running = match &self.max_running {
            Some(text) => checker.whole(text, "max_running", 1..=MAX_REQUESTS)?,
            None => requests,
        };
        let given = self.on_oom.as_ref().map(|wire| policy::check(wire, &Recoverable::infer(), checker)).transpose()?;
        let (on_oom, waits) = given.unwrap_or_else(Chain::evict_requests).without_last_wait();
        Ok(Infer {
            layers,
            token,
            requests,
            gap: self.gap.as_ref().map_or(Ok(0..=0), |gap| gap.check(0, checker))?,
            prompt: self.prompt.check(1, checker)?,
            output,
            max_running,
            cache: page.map_or(Cache::Growing, Cache::Paged),
            on_oom,
            waits,
            expect: EndingWire::check(self.expect.as_ref(), checker)?,
            stream: checker.stream(self.stream.as_ref())?,
            id: checker.declare_id(&self.id, "infer", Self::REPORTS)?,
        })
    }
}
