//! `infer`: requests to a language model, whose KV caches grow with every token.

use std::{fmt, ops::RangeInclusive};

use harness_allocator::units::Bytes;
use harness_base::words::count;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::{StepWire, fields::StepFields};
use crate::checker::Checker;
use crate::ending::{Ending, EndingWire};
use crate::metric::{ReportKey, StepName, StreamName};
use crate::policy::{self, Chain, ChainWire, Recoverable};
use harness_language::text::{CountText, NameText};
use harness_language::{error::Problem, located::Located};

pub const MAX_REQUESTS: u64 = 100_000;
pub const MAX_TOKENS: u64 = 1 << 20;
/// Largest number of layers, heads, and elements of a head.
pub const MAX_WIDTH: u64 = 1 << 16;
/// Bytes of one element of a cache, in 16-bit precision.
const NUMBER: u64 = 2;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Infer {
    pub id: StepName,
    pub layers: u64,
    /// Size of the keys, or the values, of one token in one layer.
    pub token: Bytes,
    pub requests: u64,
    /// Decoding steps between two arrivals.
    pub gap: RangeInclusive<u64>,
    /// Tokens.
    pub prompt: RangeInclusive<u64>,
    /// Tokens.
    pub output: RangeInclusive<u64>,
    /// Most requests that run at the same time.
    pub max_running: u64,
    pub cache: Cache,
    /// Recovery of a request without memory.
    pub on_oom: Option<Chain>,
    /// `true` if a request that cannot recover waits until other requests end.
    pub waits: bool,
    pub stream: StreamName,
    pub expect: Ending,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cache {
    /// One buffer each for the keys and values of a layer. Every token allocates a larger buffer,
    /// copies the old one and frees it, as `torch.cat` does.
    Growing,
    /// Pages of this many tokens, each with the keys and values of all layers.
    Paged(u64),
}

impl fmt::Display for Infer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            id,
            requests,
            max_running,
            cache,
            ..
        } = self;
        write!(
            f,
            "{id}, {}, at most {max_running} at once, ",
            count(*requests, "request")
        )?;
        match cache {
            Cache::Growing => f.write_str("growing caches"),
            Cache::Paged(words) => write!(f, "pages of {}", count(*words, "token")),
        }
    }
}

/// Serves requests to a language model. Each request has a KV cache in every layer. The cache
/// starts with the tokens of the prompt and grows by one token per decoding step. Contents are
/// verified when a cache is copied or freed. Lengths and arrivals are drawn from the seed of the
/// run. Cache elements have 16 bits.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "infer")]
pub(crate) struct InferWire {
    /// A name for the step's figures.
    id: NameText,
    /// Layers of the model.
    layers: CountText,
    /// Key/value heads per layer.
    kv_heads: CountText,
    /// Elements per head.
    head_dim: CountText,
    /// Number of requests, from 1 to 100000.
    requests: CountText,
    /// Decoding steps between two arrivals, drawn uniformly. Default: all requests arrive at the
    /// start.
    gap: Option<RangeWire>,
    /// Tokens of a prompt, drawn uniformly.
    prompt: RangeWire,
    /// Tokens of an output, drawn uniformly.
    output: RangeWire,
    /// Most requests that run at the same time. Default: no limit.
    max_running: Option<CountText>,
    /// Tokens per page of a paged cache, with one buffer per page for all layers, as in vLLM.
    /// Default: no pages; the keys and the values of a layer are one buffer each, and every token
    /// allocates a larger one, as `torch.cat` does.
    page: Option<CountText>,
    /// Recovery if there is no memory for the next token of a request. A new request waits if the
    /// policies evict other requests or contain `wait`. Serving ends at the end of the list or at
    /// `give_up`. Default: `evict`.
    on_oom: Option<Box<ChainWire>>,
    /// How serving ends: `fits` (every request is served), `oom`, `{ oom: CAUSE }` or `any`, or a
    /// map from allocators to one of these. Default: `fits`.
    expect: Option<EndingWire>,
    /// The stream. Default: `default`.
    stream: Option<NameText>,
}

/// A range for uniform random numbers, both ends included.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "infer_range")]
struct RangeWire {
    /// Smallest number.
    min: CountText,
    /// Largest number.
    max: CountText,
}

impl RangeWire {
    fn check(&self, least: u64, checker: &Checker<'_>) -> Result<RangeInclusive<u64>, Problem> {
        checker.range(&self.min, &self.max, least..=MAX_TOKENS)
    }
}

impl StepFields<Infer> for InferWire {
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

    const REPORTS: &'static [ReportKey] = &[
        ReportKey::Served,
        ReportKey::Evicted,
        ReportKey::PeakRunning,
        ReportKey::RecomputedTokens,
        ReportKey::Ooms,
        ReportKey::Time,
    ];

    const ID: fn(&Self) -> Option<&NameText> = |wire| Some(&wire.id);

    fn check(&self, step: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Infer, Problem> {
        let width = |text, what| checker.whole(text, what, 1..=MAX_WIDTH);
        let layers = width(&self.layers, "layers")?;
        let token =
            Bytes(width(&self.kv_heads, "kv_heads")? * width(&self.head_dim, "head_dim")? * NUMBER);
        let requests = checker.whole(&self.requests, "requests", 1..=MAX_REQUESTS)?;
        let page = self
            .page
            .as_ref()
            .map(|page| checker.whole(page, "page", 1..=MAX_TOKENS))
            .transpose()?;
        let output = self.output.check(1, checker)?;
        let buffers = if page.is_some() { 1 } else { 2 * layers };
        checker.count(
            step.at,
            requests
                .saturating_mul(*output.end())
                .saturating_mul(buffers),
        )?;
        let given = self
            .on_oom
            .as_ref()
            .map(|wire| policy::check(wire, &Recoverable::infer(), checker))
            .transpose()?;
        let (on_oom, waits) = given
            .unwrap_or_else(Chain::evict_requests)
            .without_last_wait();
        Ok(Infer {
            layers,
            token,
            requests,
            gap: self
                .gap
                .as_ref()
                .map_or(Ok(0..=0), |gap| gap.check(0, checker))?,
            prompt: self.prompt.check(1, checker)?,
            output,
            max_running: checker.whole_or(
                self.max_running.as_ref(),
                "max_running",
                1..=MAX_REQUESTS,
                requests,
            )?,
            cache: page.map_or(Cache::Growing, Cache::Paged),
            on_oom,
            waits,
            expect: EndingWire::check(self.expect.as_ref(), checker)?,
            stream: checker.stream(self.stream.as_ref())?,
            id: checker.declare_id(&self.id, "infer", Self::REPORTS)?,
        })
    }
}
