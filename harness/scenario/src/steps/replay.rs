//! `replay`: the operations of an allocation trace, one after the other.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harness_allocator::device::StreamId;
use harness_base::excerpt::shortened;
use harness_base::packed;
use harness_base::words::count;
use harness_trace::trace::{self, TraceEvent};
use schemars::JsonSchema;
use serde::Deserialize;

use super::fields::StepFields;
use super::storm::OF_REQUESTS;
use crate::checker::Checker;
use crate::ending::{Ending, EndingWire};
use crate::metric::{ReportKey, StepName, StreamName};
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

/// The operations of a trace, and what its comments say of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// In order; each id is allocated once.
    pub events: Vec<TraceEvent>,
    /// Of each operation the place in `sites` of what its comment says.
    site_of: Vec<u32>,
    /// Of each operation its line, counted from 1.
    lines: Vec<u32>,
    /// Comments, each once; the first is empty.
    sites: Vec<String>,
}

impl Trace {
    /// These operations, one on each line, without comments. Each id is allocated once.
    #[must_use]
    pub fn of(events: Vec<TraceEvent>) -> Self {
        Self { site_of: vec![0; events.len()], lines: (1..).take(events.len()).collect(), sites: vec![String::new()], events }
    }

    /// What stands behind the operation as a comment: where in the program it was, in a trace that was recorded from one. `None` where nothing does.
    #[must_use]
    pub fn site(&self, operation: usize) -> Option<&str> {
        let site = &self.sites[self.site_of[operation] as usize];
        (!site.is_empty()).then_some(site.as_str())
    }

    /// The line of an operation, counted from 1.
    #[must_use]
    pub fn line(&self, operation: usize) -> u32 {
        self.lines[operation]
    }

    /// Reads a trace, with the comments behind its operations. The error says in words what is wrong, and then what would be right.
    ///
    /// # Errors
    /// The first line that is not an operation, or an id that is allocated twice.
    pub fn parse(text: &str) -> Result<Self, (String, String)> {
        let mut trace = Self { sites: vec![String::new()], ..Self::default() };
        let mut known = BTreeMap::from([(String::new(), 0)]);
        let mut allocated = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            let line_number = index + 1;
            let wrong = |error: trace::TraceError| {
                (
                    format!("line {line_number}: `{}` is not an operation of an allocation trace", shortened(&error.text)),
                    error.expected.to_owned(),
                )
            };
            let events = trace::parse_lines([line]).map_err(wrong)?;
            let Some(&event) = events.first() else { continue };
            if let TraceEvent::Allocate { id, .. } = event
                && let Some(before) = allocated.insert(id, line_number)
            {
                let message = format!("line {line_number}: id {id} is allocated a second time, as in line {before}");
                return Err((message, "give each allocation an id of its own".to_owned()));
            }
            let site = line.split_once('#').map_or("", |(_, comment)| comment.trim());
            let next = trace.sites.len() as u32;
            let site = *known.entry(site.to_owned()).or_insert_with(|| {
                trace.sites.push(site.to_owned());
                next
            });
            trace.events.push(event);
            trace.site_of.push(site);
            trace.lines.push(line_number as u32);
        }
        if trace.events.is_empty() {
            return Err(("it has no operations".to_owned(), "name a trace with operations".to_owned()));
        }
        Ok(trace)
    }

    /// Reads a file, packed by gzip or not. The error is that of [`Trace::parse`].
    ///
    /// # Errors
    /// Where the file cannot be read, or is no trace.
    pub fn read(path: &Path) -> Result<Self, (String, String)> {
        Self::read_with_text(path).map(|(trace, _)| trace)
    }

    /// The same, with the text.
    ///
    /// # Errors
    /// As [`Trace::read`].
    pub fn read_with_text(path: &Path) -> Result<(Self, String), (String, String)> {
        let mut text = String::new();
        let read = packed::open(path).and_then(|mut file| file.read_to_string(&mut text));
        read.map_err(|error| {
            (format!("cannot be read: {error}"), "name a trace; in a scenario its path begins at the folder of the scenario".to_owned())
        })?;
        Ok((Self::parse(&text)?, text))
    }

    /// The streams that it names besides the default one.
    fn streams(&self) -> impl Iterator<Item = StreamId> + '_ {
        let streams = self.events.iter().filter_map(|event| match *event {
            TraceEvent::Allocate { stream, .. } | TraceEvent::RecordStream { stream, .. } | TraceEvent::SynchronizeStream(stream) => {
                Some(stream)
            }
            _ => None,
        });
        streams.filter(|&stream| stream != StreamId::DEFAULT)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_keeps_its_comments_and_says_what_is_wrong_with_a_line() {
        let trace = Trace::parse("# head\n\na 1 512 0 # model.py:41\na 2 512 0\nf 1 # model.py:41\n").expect("a trace");
        let sites: Vec<_> = (0..3).map(|operation| trace.site(operation)).collect();
        assert_eq!((sites, trace.sites.len()), (vec![Some("model.py:41"), None, Some("model.py:41")], 2));
        for (text, message) in [
            ("# nothing\n", "it has no operations"),
            ("d\na 1 x 0\n", "line 2: `a 1 x 0` is not an operation of an allocation trace"),
            ("a 1 5 0\nf 1\na 1 5 0\n", "line 3: id 1 is allocated a second time, as in line 1"),
        ] {
            assert_eq!(Trace::parse(text).expect_err(text).0, message);
        }
    }
}
