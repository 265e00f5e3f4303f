//! The static check: follows the steps in their order, tracks names and live buffers, and resolves
//! every name.
//!
//! A scenario that passes cannot free twice, wait for an event that no step records, or use a
//! figure that does not exist yet. Only numbered buffers, as in `kv[i]`, are looked up during the
//! run. The check stops at the first mistake, because most later ones would follow from it.
//!
//! * [`buffers`]: live buffers;
//! * [`names`]: streams, events, ids, measures, allocators, programs;
//! * [`values`]: sizes, counts and expectations.

mod buffers;
mod names;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::{path::Path, sync::Arc};

use harness_allocator::units::{Bytes, Nanos};
use harness_allocator::{allocator::AllocatorSpec, device::StreamId};
use harness_language::located::{Located, Position};
use harness_language::{error::Problem, expression::Value, text::NameText};

pub(crate) use buffers::Served;
pub use buffers::{FreeTarget, MAX_BUFFERS};
pub(crate) use names::has_no_meaning;
pub(crate) use values::{constant, in_order, size, unit_of};

use self::buffers::{Buffer, Elements};
use self::names::Id;
use crate::metric::{
    BufferName, EventName, Expectation, MeasureName, PoolName, ProcessName, ProgramName, START,
    StreamName, VariableName,
};
use crate::trace::Trace;
use crate::{MAX_STREAMS, Process};
use harness_language::expression::Unit;

/// Most operations of a scenario, with loops unrolled. A step is one, a `storm` counts its requests
/// and frees, a `train` counts its layers per iteration.
pub const MAX_OPERATIONS: u64 = 10_000_000;
pub const MAX_NESTING: u32 = 8;

pub(crate) type Parameters = BTreeMap<String, Value>;

pub(crate) struct Checker<'a> {
    source: &'a str,
    pub(crate) declared: Declared<'a>,
    pub(crate) time_limit: Option<Nanos>,
    pub(crate) streams_of_traces: Vec<StreamName>,
    /// The process at this point, unless it is the main one. `names` belongs to it, and the names
    /// of the others are in `names_of_processes`.
    pub(crate) process: Option<ProcessName>,
    names_of_processes: BTreeMap<ProcessName, Names>,
    /// Ids and measures of the whole file. They distinguish a name that is defined later from an
    /// unknown one.
    announced: BTreeMap<String, Position>,
    names: Names,
    /// Variables of the loops around this point, and the number of all variables so far.
    variables: Vec<(VariableName, Unit)>,
    variable_count: usize,
    growth_sites: u32,
    pub(crate) comparisons: Vec<Located<Expectation>>,
    /// Buffers and storms that were named since this set was last emptied.
    named: BTreeSet<String>,
    /// Steps that are still running at this point, so that their figures are unknown.
    unfinished: Vec<String>,
    nesting: u32,
    /// Loops with `until: oom` around this point.
    pub(crate) loops_until_oom: u32,
    /// How often the current step runs; 0 while a loop body is checked again.
    multiplier: u64,
    operations: u64,
}

struct Names {
    buffers: BTreeMap<String, (BufferName, Buffer)>,
    elements: BTreeMap<String, Elements>,
    events: BTreeMap<String, EventName>,
    ids: BTreeMap<String, Id>,
    measures: BTreeMap<String, (MeasureName, Position)>,
    pools: BTreeMap<String, PoolName>,
}

impl Default for Names {
    fn default() -> Self {
        let start = (MeasureName::new(0, START), Position::default());
        let (buffers, elements, events, ids, pools) = Default::default();
        Self {
            buffers,
            elements,
            events,
            ids,
            measures: BTreeMap::from([(START.to_owned(), start)]),
            pools,
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Declared<'a> {
    pub(crate) folder: &'a Path,
    /// The trace of `replay` steps. If there is none, they read their files.
    pub(crate) trace: Option<&'a Arc<Trace>>,
    pub(crate) parameters: &'a Parameters,
    pub(crate) allocators: &'a [AllocatorSpec],
    pub(crate) streams: &'a [StreamName],
    pub(crate) programs: &'a [ProgramName],
    pub(crate) processes: &'a [Process],
    pub(crate) memory: Bytes,
}

impl<'a> Checker<'a> {
    pub(crate) fn new(
        source: &'a str,
        declared: Declared<'a>,
        announced: BTreeMap<String, Position>,
    ) -> Self {
        Self {
            source,
            declared,
            time_limit: None,
            streams_of_traces: Vec::new(),
            process: None,
            names_of_processes: BTreeMap::new(),
            announced,
            names: Names::default(),
            variables: Vec::new(),
            variable_count: 0,
            growth_sites: 0,
            comparisons: Vec::new(),
            named: BTreeSet::new(),
            unfinished: Vec::new(),
            nesting: 0,
            loops_until_oom: 0,
            multiplier: 1,
            operations: 0,
        }
    }

    /// Counts the operations of a step, multiplied by the loops around it.
    pub(crate) fn count(&mut self, at: Position, operations: u64) -> Result<(), Problem> {
        self.operations = self
            .operations
            .saturating_add(self.multiplier.saturating_mul(operations));
        if self.operations <= MAX_OPERATIONS {
            return Ok(());
        }
        let message = format!("the scenario has more than {MAX_OPERATIONS} operations");
        Err(Problem::new(at, message).help(
            "a step is one operation, a storm or replay counts its requests and frees, a \
                 training counts its layers per iteration; use fewer operations or fewer \
                 iterations",
        ))
    }

    pub(crate) fn nested<T>(
        &mut self,
        at: Position,
        body: impl FnOnce(&mut Self) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        if self.nesting == MAX_NESTING {
            let message = format!("steps are nested more than {MAX_NESTING} deep");
            return Err(Problem::new(at, message).help("merge the inner loop into an outer one"));
        }
        self.nesting += 1;
        let checked = body(self)?;
        self.nesting -= 1;
        Ok(checked)
    }

    /// Checks steps of a process. The process has its own names, which it keeps while it runs.
    pub(crate) fn in_process<T>(
        &mut self,
        process: &ProcessName,
        body: impl FnOnce(&mut Self) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let names = self.names_of_processes.remove(process).unwrap_or_default();
        let outer = std::mem::replace(&mut self.names, names);
        let (programs, named) = (
            std::mem::take(&mut self.declared.programs),
            std::mem::take(&mut self.named),
        );
        self.process = Some(process.clone());
        let checked = body(self)?;
        self.process = None;
        self.declared.programs = programs;
        let inner = std::mem::replace(&mut self.named, named);
        self.named
            .extend(inner.into_iter().map(|name| format!("{process}: {name}")));
        self.names_of_processes
            .insert(process.clone(), std::mem::replace(&mut self.names, outer));
        Ok(checked)
    }

    /// Removes the names of a process. Returns whether it was running.
    pub(crate) fn end_process(&mut self, process: &ProcessName) -> bool {
        self.names_of_processes.remove(process).is_some()
    }

    /// Checks the body of a loop. It is checked twice if the loop runs more than once, because the
    /// second iteration starts in the state that the first one leaves.
    pub(crate) fn repeated<T>(
        &mut self,
        at: Position,
        times: u64,
        until_oom: bool,
        mut body: impl FnMut(&mut Self) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let outer = self.multiplier;
        self.multiplier = outer.saturating_mul(times);
        self.loops_until_oom += u32::from(until_oom);
        let steps = self.nested(at, |checker| {
            let steps = body(checker)?;
            if times > 1 {
                checker.multiplier = 0;
                body(checker).map_err(|problem| {
                    problem.see(at, "occurs in the second iteration of this loop")
                })?;
            }
            Ok(steps)
        })?;
        self.loops_until_oom -= u32::from(until_oom);
        self.multiplier = outer;
        Ok(steps)
    }

    pub(crate) fn with_variable<T>(
        &mut self,
        name: &NameText,
        unit: Unit,
        body: impl FnOnce(&mut Self, VariableName) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let text = self.new_variable(name)?;
        let variable = VariableName::new(self.variable_count, text);
        self.variable_count += 1;
        self.variables.push((variable.clone(), unit));
        let checked = body(self, variable)?;
        self.variables.pop();
        Ok(checked)
    }

    /// Checks two groups of steps that run interleaved.
    pub(crate) fn at_the_same_time<A, B>(
        &mut self,
        first: impl FnOnce(&mut Self) -> Result<A, Problem>,
        id: Option<&NameText>,
        at: Position,
        second: impl FnOnce(&mut Self) -> Result<B, Problem>,
    ) -> Result<(A, B), Problem> {
        let before = std::mem::take(&mut self.named);
        let checked = first(self)?;
        let of_first = std::mem::take(&mut self.named);
        let (outer_multiplier, outer_loops) =
            (self.multiplier, std::mem::take(&mut self.loops_until_oom));
        self.unfinished.extend(id.map(|id| id.text().to_owned()));
        let beside = self.nested(at, second)?;
        self.unfinished
            .truncate(self.unfinished.len() - usize::from(id.is_some()));
        (self.multiplier, self.loops_until_oom) = (outer_multiplier, outer_loops);
        let of_second = std::mem::take(&mut self.named);
        if let Some(shared) = of_first.intersection(&of_second).next() {
            let message = format!("`{shared}` is used by the step and under `meanwhile`");
            return Err(Problem::new(at, message)
                .help("use different buffers, because the order of the two depends on the run"));
        }
        self.named = before
            .into_iter()
            .chain(of_first)
            .chain(of_second)
            .collect();
        Ok((checked, beside))
    }

    /// Returns a stream for each stream of a trace. All traces share these streams, because their
    /// work completes immediately.
    pub(crate) fn streams_of_trace(
        &mut self,
        at: Position,
        named: BTreeSet<StreamId>,
    ) -> Result<BTreeMap<StreamId, StreamName>, Problem> {
        let own = self.declared.streams.len();
        // The default stream is one of the scenario's own.
        if own - 1 + named.len() > MAX_STREAMS {
            let message = format!(
                "this trace has {} streams, so the scenario has more than {MAX_STREAMS}",
                named.len()
            );
            return Err(Problem::new(at, message).help("use fewer streams"));
        }
        while self.streams_of_traces.len() < named.len() {
            let index = own + self.streams_of_traces.len();
            self.streams_of_traces.push(StreamName::new(
                index,
                &format!("stream {} of traces", self.streams_of_traces.len() + 1),
            ));
        }
        Ok(named
            .into_iter()
            .zip(self.streams_of_traces.iter().cloned())
            .collect())
    }
}
