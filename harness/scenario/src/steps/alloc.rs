//! `alloc`: a request for memory.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use crate::checker::Checker;
use crate::ending::{Ending, EndingWire, Expected};
use crate::metric::{Amount, BufferName, ReportKey, StreamName};
use crate::policy::{self, Policy, PolicyWire, Recoverable};
use harness_language::error::Problem;
use harness_language::located::{Located, Position};
use harness_language::text::{AmountText, NameText};

/// A request for memory, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Alloc {
    /// Under which name it is kept.
    pub buffer: BufferName,
    /// How much.
    pub size: Amount,
    /// The stream whose work uses it first.
    pub stream: StreamName,
    /// How it should end.
    pub expect: Ending,
    /// What to do when it fails.
    pub on_oom: Option<Policy>,
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
    /// The name to keep it under.
    buffer: NameText,
    /// How much to ask for.
    size: AmountText,
    /// The stream whose work uses it first: `default` if not given.
    stream: Option<NameText>,
    /// `fits` (if not given) or `oom`: how the request ends, recovery included. Anything else fails the run. After `oom` there is no buffer.
    /// A map says it for each allocator; with those not named it may end either way, and only `free` may name the buffer afterwards.
    expect: Option<EndingWire>,
    /// What to do when the request fails, before trying again: nothing, if not given.
    on_oom: Option<Located<PolicyWire>>,
    /// A name for what the step reports.
    id: Option<NameText>,
}

impl StepFields for AllocWire {
    type Checked = Alloc;

    const EXAMPLE: &'static str = "\
- alloc: { buffer: cache, size: 400MiB }
- alloc: { buffer: weights, size: 1.5GiB, stream: side, expect: oom }
- alloc: { buffer: activations, size: 700MiB, on_oom: { free: { buffers: [cache] } }, id: request }
- alloc: { buffer: more, size: 3GiB, expect: { caching: oom } }";

    const REPORTS: &'static [ReportKey] =
        &[ReportKey::Retries, ReportKey::Attempts, ReportKey::RetriesWithoutProgress, ReportKey::RetryTime, ReportKey::Time];

    fn id(&self) -> Option<&NameText> {
        self.id.as_ref()
    }

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Alloc, Problem> {
        let size = checker.amount(&self.size)?;
        let stream = checker.stream(self.stream.as_ref())?;
        let on_oom = self.on_oom.as_ref().map(|wire| policy::check(wire, &Recoverable::Alloc, checker)).transpose()?;
        let expect = EndingWire::check(self.expect.as_ref(), checker)?;
        let buffer = checker.make_buffer(&self.buffer, expect == Ending::Always(Expected::Oom))?;
        if let Ending::PerAllocator(_) = expect {
            checker.may_be_gone(&buffer, self.buffer.position());
        }
        if let Some(Policy::Free { buffers }) = &on_oom {
            for given_up in buffers {
                checker.may_be_gone(given_up, at);
            }
        }
        Ok(Alloc { buffer, size, stream, expect, on_oom })
    }
}
