//! `replay`: the operations of an allocation trace, one after the other.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use harness_allocator::device::StreamId;
use harness_base::words::count;
use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use super::storm::OF_REQUESTS;
use crate::checker::Checker;
use crate::ending::{Ending, EndingWire};
use crate::metric::{ReportKey, StepName, StreamName};
use crate::trace::Trace;
use harness_language::error::Problem;
use harness_language::located::{Located, Position};
use harness_language::text::NameText;

/// A replay of a trace, checked.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Replay {
    pub id: StepName,
    /// The file, as the scenario names it.
    pub path: PathBuf,
    /// What is in it.
    pub trace: Arc<Trace>,
    /// The scenario's streams that stand for those of the trace.
    pub streams: BTreeMap<StreamId, StreamName>,
    /// How its requests should end: all served, or one of them refused.
    pub expect: Ending,
    /// Whether every block is filled when it is made and verified before it is freed.
    pub fill: bool,
}

impl fmt::Display for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} of {}", self.id, count(self.trace.events.len(), "operation"), self.path.display())?;
        self.expect.fmt(f)
    }
}

/// Does the operations of an allocation trace (`harness replay --help` tells the format; it may be packed by gzip), as `harness import` writes one
/// of a real program. Requests that are refused are counted, and the replay goes on. Work on other streams is done at once. What the trace leaves live
/// stays until `free` names the replay. Where the allocator has no private pools, those of the trace are left out.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "replay")]
pub(crate) struct ReplayWire {
    /// Its name, for what it reports and for `free`.
    id: NameText,
    /// The file with the trace; its path begins at the folder of the scenario.
    trace: Located<String>,
    /// `fits` (if not given): every request is served; `oom`, `{ oom: CAUSE }`: one is refused, the first for that cause; `any`. A map says it for each
    /// allocator.
    expect: Option<EndingWire>,
    /// Whether every block is filled when it is made and verified before it is freed: yes, if not given.
    fill: Option<bool>,
}

impl StepFields for ReplayWire {
    type Checked = Replay;

    const EXAMPLE: &'static str = "\
- replay: { id: job, trace: imported_program.trace.gz }
- expect: job.ooms == 0
- free: job";

    const REPORTS: &'static [ReportKey] = &OF_REQUESTS;

    fn id(&self) -> Option<&NameText> {
        Some(&self.id)
    }

    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Replay, Problem> {
        checker.storm_may_start(&self.id)?;
        let path = PathBuf::from(&self.trace.value);
        let trace = Trace::read(&checker.folder().join(&path))
            .map_err(|(message, help)| Problem::new(self.trace.position(), format!("{}: {message}", path.display())).help(help))?;
        checker.count(at, trace.events.len() as u64)?;
        let streams = checker.streams_of_trace(self.trace.position(), trace.streams().collect())?;
        let expect = EndingWire::check(self.expect.as_ref(), checker)?;
        let id = checker.declare_storm(&self.id, Self::REPORTS)?;
        Ok(Replay { id, path, trace: Arc::new(trace), streams, expect, fill: self.fill.unwrap_or(true) })
    }
}
