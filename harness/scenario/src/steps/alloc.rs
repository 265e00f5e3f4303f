//! `alloc`: a request for memory.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::ending::{Ending, EndingWire};
use crate::metric::{Amount, BufferRef, ReportKey, StreamName};
use crate::policy::{self, Chain, ChainWire, Policy, Recoverable};
use harness_language::error::Problem;
use harness_language::located::{Located, Position};
use harness_language::text::{AmountText, BufferText, NameText};

/// A request for memory, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Alloc {
    /// Under which name it is kept.
    pub buffer: BufferRef,
    /// How much.
    pub size: Amount,
    /// The stream whose work uses it first.
    pub stream: StreamName,
    /// How it should end.
    pub expect: Ending,
    /// What to do when it fails.
    pub on_oom: Option<Chain>,
    /// Whether a buffer of that name that is still live is kept without a name, as a program does that forgets to free it.
    pub leak: bool,
}

impl fmt::Display for Alloc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.buffer, self.size)?;
        if self.stream.index() != 0 {
            write!(f, ", on {}", self.stream)?;
        }
        self.expect.fmt(f)?;
        match &self.on_oom {
            Some(policy) => write!(f, ", on out-of-memory: {policy}"),
            None => Ok(()),
        }
    }
}

/// Asks the allocator for memory and keeps it under a name until `free`. Whatever is live after the last step is freed then.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "alloc")]
pub(crate) struct AllocWire {
    /// The name to keep it under; with a number in brackets, as in `kv[3]` or `"kv[i]"`, for one of many.
    buffer: BufferText,
    /// How much to ask for.
    size: AmountText,
    /// The stream whose work uses it first: `default` if not given.
    stream: Option<NameText>,
    /// `fits` (if not given), `oom`, `{ oom: CAUSE }` or `any`: how the request ends, recovery included. Anything else fails the run. A map
    /// says it for each allocator. Where the request may fail, only `free` may name the buffer afterwards.
    expect: Option<EndingWire>,
    /// What to do when the request fails, before trying again: nothing, if not given. Of a list the next policy is tried where one has no retries left, or nothing to do.
    on_oom: Option<Located<ChainWire>>,
    /// `true`: a buffer of this name that is still live stays allocated, and nothing can free it any more before the end of the run. Without
    /// it, that is a mistake.
    #[serde(default)]
    leak: bool,
    /// A name for what the step reports.
    id: Option<NameText>,
}

impl StepFields for AllocWire {
    type Checked = Alloc;

    const EXAMPLE: &'static str = "\
- alloc: { buffer: cache, size: 400MiB }
- alloc: { buffer: weights, size: 1.5GiB, stream: side, expect: oom }
- alloc: { buffer: activations, size: 700MiB, on_oom: { free: { buffers: [cache] } }, id: request }
- alloc: { buffer: more, size: 8GiB, expect: { oom: too_large } }
- alloc: { buffer: \"kv[1]\", size: 3GiB, expect: { caching: any } }";

    const REPORTS: &'static [ReportKey] = &[
        ReportKey::Retries,
        ReportKey::Attempts,
        ReportKey::RetriesWithoutProgress,
        ReportKey::RetryTime,
        ReportKey::RetainedAfterOom,
        ReportKey::GivenBack,
        ReportKey::Time,
    ];

    fn id(&self) -> Option<&NameText> {
        self.id.as_ref()
    }

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Alloc, Problem> {
        let size = checker.amount(&self.size)?;
        let stream = checker.stream(self.stream.as_ref())?;
        let on_oom = self.on_oom.as_ref().map(|wire| policy::check(wire, &Recoverable::alloc(), checker)).transpose()?;
        let expect = EndingWire::check(self.expect.as_ref(), checker)?;
        let buffer = checker.make_buffer(&self.buffer, expect.served(), self.leak)?;
        for given_up in on_oom.iter().flat_map(Chain::policies).flat_map(Policy::may_free) {
            checker.may_be_gone(given_up, at);
        }
        Ok(Alloc { buffer, size, stream, expect, on_oom, leak: self.leak })
    }
}
