use std::fmt;

use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::{StepWire, fields::StepFields};
use crate::checker::Checker;
use crate::ending::{Ending, EndingWire};
use crate::metric::{Amount, BufferRef, ReportKey, StreamName};
use crate::policy::{self, Chain, ChainWire, Policy, Recoverable};
use harness_language::text::{AmountText, BufferText, NameText};
use harness_language::{error::Problem, located::Located};

#[derive(Clone, Debug, PartialEq)]
pub struct Alloc {
    pub buffer: BufferRef,
    pub size: Amount,
    pub stream: StreamName,
    pub expect: Ending,
    pub on_oom: Option<Chain>,
    /// Leaks a live buffer of the same name, as in a program that forgets to free it.
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

/// Requests memory from the allocator and keeps it under a name until `free`. Buffers that are live
/// after the last step are freed then.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "alloc")]
pub(crate) struct AllocWire {
    /// The name of the buffer. A number in brackets makes one of many, as in `kv[3]` or `"kv[i]"`.
    buffer: BufferText,
    /// The requested size.
    size: AmountText,
    /// The stream of the block. Default: `default`.
    stream: Option<NameText>,
    /// How the request ends, after recovery: `fits`, `oom`, `{ oom: CAUSE }` or `any`, or a map
    /// from allocators to one of these. Any other end fails the run. If the request may fail, only
    /// `free` may name the buffer afterwards. Default: `fits`.
    expect: Option<EndingWire>,
    /// A recovery policy, or a list of policies, for a failed request. The next policy of the list
    /// is tried if one has no retries left or cannot help.
    on_oom: Option<Box<ChainWire>>,
    /// Leaks a live buffer of this name: it stays allocated until the end of the run. Otherwise a
    /// second buffer of the same name is an error. Default: `false`.
    #[serde(default)]
    leak: bool,
    /// A name for the step's figures.
    id: Option<NameText>,
}

impl StepFields<Alloc> for AllocWire {
    const EXAMPLE: &'static str = "\
- alloc: { buffer: cache, size: 2GiB }
- alloc: { buffer: weights, size: 3GiB, stream: side, expect: oom }
- alloc: { buffer: activations, size: 2.5GiB, on_oom: { free: { buffers: [cache] } }, id: request }
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

    const ID: fn(&Self) -> Option<&NameText> = |wire| wire.id.as_ref();

    fn check(&self, step: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Alloc, Problem> {
        let size = checker.amount(&self.size)?;
        let stream = checker.stream(self.stream.as_ref())?;
        let on_oom = self
            .on_oom
            .as_ref()
            .map(|wire| policy::check(wire, &Recoverable::alloc(), checker))
            .transpose()?;
        let expect = EndingWire::check(self.expect.as_ref(), checker)?;
        let buffer = checker.make_buffer(&self.buffer, expect.served(), self.leak)?;
        for given_up in on_oom
            .iter()
            .flat_map(Chain::policies)
            .flat_map(Policy::may_free)
        {
            checker.may_be_gone(given_up, step.at);
        }
        Ok(Alloc {
            buffer,
            size,
            stream,
            expect,
            on_oom,
            leak: self.leak,
        })
    }
}
