use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use derive_more::Display;
use harness_allocator::device::StreamId;
use harness_base::words::count;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::{StepWire, fields::StepFields, storm::OF_REQUESTS};
use crate::ending::{Ending, EndingWire};
use crate::metric::{ReportKey, StepName, StreamName};
use crate::{checker::Checker, trace::Trace};
use harness_language::{error::Problem, located::Located, text::NameText};

#[derive(Clone, Debug, PartialEq, Display)]
#[display("{id}, {} of {}{expect}", count(trace.events.len(), "operation"), path.display())]
pub struct Replay {
    pub id: StepName,
    pub path: PathBuf,
    pub trace: Arc<Trace>,
    /// The scenario's stream for each stream of the trace.
    pub streams: BTreeMap<StreamId, StreamName>,
    pub expect: Ending,
    /// Fills every block, and verifies it before its free.
    pub fill: bool,
}

/// Replays an allocation trace, for example one that `harness import` wrote for a real program.
/// `harness replay --help` documents the format; the file may be compressed with gzip. Failed
/// requests are counted, and the replay continues. Work on other streams completes immediately.
/// Blocks that the trace leaves live stay until `free` names the replay. Private pools of the trace
/// are ignored if the allocator has none.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "replay")]
pub(crate) struct ReplayWire {
    /// A name for the step's figures, and for `free`.
    id: NameText,
    /// The file with the trace, relative to the folder of the scenario.
    trace: Located<String>,
    /// How the replay ends: `fits` (every request is served), `oom` or `{ oom: CAUSE }` (a request
    /// fails, the first for this cause) or `any`, or a map from allocators to one of these.
    /// Default: `fits`.
    expect: Option<EndingWire>,
    /// Fills every block, and verifies it before its free. Default: `true`.
    fill: Option<bool>,
}

impl StepFields<Replay> for ReplayWire {
    const EXAMPLE: &'static str = "\
- replay: { id: job, trace: bench/traces/kv.txt.gz }
- expect: job.ooms == 0
- free: job";

    const REPORTS: &'static [ReportKey] = OF_REQUESTS;

    const ID: fn(&Self) -> Option<&NameText> = |wire| Some(&wire.id);

    fn check(
        &self,
        step: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<Replay, Problem> {
        checker.storm_may_start(&self.id)?;
        let path = PathBuf::from(&self.trace.value);
        let trace = match checker.declared.trace {
            Some(trace) => Arc::clone(trace),
            None => {
                let read = Trace::read(&checker.declared.folder.join(&path));
                Arc::new(read.map_err(|(message, help)| {
                    Problem::new(self.trace.at, format!("{}: {message}", path.display())).help(help)
                })?)
            }
        };
        checker.count(step.at, trace.events.len() as u64)?;
        let streams = checker.streams_of_trace(self.trace.at, trace.streams().collect())?;
        let expect = EndingWire::check(self.expect.as_ref(), checker)?;
        let id = checker.declare_storm(&self.id, Self::REPORTS)?;
        Ok(Replay {
            id,
            path,
            trace,
            streams,
            expect,
            fill: self.fill.unwrap_or(true),
        })
    }
}
