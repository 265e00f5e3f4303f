//! The static check: knows what is live and what has a name at each point of a scenario, and resolves every name. The steps ask it in their
//! order.
//!
//! A scenario that passes cannot free twice, wait for an event that no step records, or look at a figure that does not exist yet. Only the
//! elements of numbered buffers, as `kv[i]`, are looked up while the scenario runs. The first mistake ends the check, because most later ones
//! would follow from it.
//!
//! * [`buffers`]: what is live;
//! * [`names`]: streams, events, ids, measures, arms, programs;
//! * [`values`]: sizes, counts and expectations.

mod buffers;
mod names;
mod values;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use harness_allocator::allocator::AllocatorSpec;
use harness_allocator::device::StreamId;
use harness_allocator::units::Bytes;
use harness_language::error::Problem;
use harness_language::expression::Value;
use harness_language::located::{Located, Position};
use harness_language::text::NameText;

pub use buffers::MAX_BUFFERS;
pub(crate) use buffers::{Freed, Served};
pub(crate) use names::is_reserved;
pub(crate) use values::{constant, size, unit_of};

use self::buffers::{Buffer, Elements};
use self::names::Id;
use crate::MAX_STREAMS;
use crate::metric::{BufferName, EventName, Expectation, MeasureName, PoolName, ProcessName, ProgramName, START, StreamName, VariableName};
use crate::{Process, Renamed};
use harness_language::expression::Unit;

/// Most operations of a scenario, loops unrolled: a step is one, a `storm` as many as it makes, a `train` one for each layer of each iteration.
pub const MAX_OPERATIONS: u64 = 10_000_000;
/// How deep loops and other blocks may be nested.
pub const MAX_NESTING: u32 = 8;

/// Values of the scenario's parameters, by name.
pub(crate) type Parameters = BTreeMap<String, Value>;

/// What is known at one point of the walk.
pub(crate) struct Checker<'a> {
    source: &'a str,
    /// Where the scenario lies.
    folder: &'a Path,
    pub(crate) parameters: &'a Parameters,
    allocators: &'a [AllocatorSpec],
    streams: &'a [StreamName],
    /// For the streams of traces, behind those of the scenario.
    streams_of_traces: Vec<StreamName>,
    programs: &'a [ProgramName],
    processes: &'a [Process],
    /// What the scenario needs.
    memory: Bytes,
    /// The process whose steps stand at this point, and what its names and those of the others mean.
    process: Option<ProcessName>,
    names_of_processes: BTreeMap<ProcessName, Names>,
    /// Ids and measures of the whole file, to tell "comes later" from "does not exist".
    announced: BTreeMap<String, Position>,
    names: Names,
    /// Those of the loops around this point, and all that there were.
    variables: Vec<(VariableName, Unit)>,
    variable_count: usize,
    growth_sites: u32,
    /// Expectations between arms, in the order of the file.
    comparisons: Vec<Located<Expectation>>,
    /// Buffers and storms that were named since this was emptied last.
    named: BTreeSet<String>,
    /// Steps that go on while those at this point are done: what they report is not known yet.
    unfinished: Vec<String>,
    nesting: u32,
    /// Loops around this point that a request which runs out of memory ends.
    loops_until_oom: u32,
    /// How often the step at hand runs; 0 where a body is walked again.
    multiplier: u64,
    operations: u64,
    /// Keys that the file writes by their earlier names.
    renamed: RefCell<BTreeSet<Renamed>>,
}

/// What names mean in one process.
struct Names {
    buffers: BTreeMap<String, (BufferName, Buffer)>,
    elements: BTreeMap<String, Elements>,
    events: BTreeMap<String, EventName>,
    ids: BTreeMap<String, Id>,
    measures: BTreeMap<String, (MeasureName, Position)>,
    pools: BTreeMap<String, PoolName>,
}

impl Default for Names {
    /// Before the first step.
    fn default() -> Self {
        let start = (MeasureName::new(0, START), Position::default());
        let (buffers, elements, events, ids, pools) = Default::default();
        Self { buffers, elements, events, ids, measures: BTreeMap::from([(START.to_owned(), start)]), pools }
    }
}

/// What a scenario declares at its top, for its steps to name.
#[derive(Clone, Copy)]
pub(crate) struct Declared<'a> {
    /// Where the scenario lies.
    pub(crate) folder: &'a Path,
    pub(crate) parameters: &'a Parameters,
    pub(crate) allocators: &'a [AllocatorSpec],
    pub(crate) streams: &'a [StreamName],
    pub(crate) programs: &'a [ProgramName],
    pub(crate) processes: &'a [Process],
    /// What the scenario needs.
    pub(crate) memory: Bytes,
}

impl<'a> Checker<'a> {
    /// `announced` are the ids and measures of the whole file.
    pub(crate) fn new(source: &'a str, declared: Declared<'a>, announced: BTreeMap<String, Position>) -> Self {
        let Declared { folder, parameters, allocators, streams, programs, processes, memory } = declared;
        Self {
            source,
            folder,
            parameters,
            allocators,
            streams,
            streams_of_traces: Vec::new(),
            programs,
            processes,
            memory,
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
            renamed: RefCell::default(),
        }
    }

    /// Counts what a step does, as often as it runs.
    pub(crate) fn count(&mut self, at: Position, operations: u64) -> Result<(), Problem> {
        self.operations = self.operations.saturating_add(self.multiplier.saturating_mul(operations));
        if self.operations <= MAX_OPERATIONS {
            return Ok(());
        }
        let message = format!("with this step the scenario does more than {MAX_OPERATIONS} operations");
        Err(Problem::new(at, message)
            .help("a step is one operation, a storm as many as it makes, a replay as many as its trace has, a training one for each layer of each iteration; lower one of them, or how often loops run"))
    }

    /// Checks steps inside a step by this function.
    pub(crate) fn nested<T>(&mut self, at: Position, body: impl FnOnce(&mut Self) -> Result<T, Problem>) -> Result<T, Problem> {
        if self.nesting == MAX_NESTING {
            let message = format!("steps are nested more than {MAX_NESTING} deep");
            return Err(Problem::new(at, message).help("multiply the inner loop into an outer one"));
        }
        self.nesting += 1;
        let checked = body(self)?;
        self.nesting -= 1;
        Ok(checked)
    }

    /// Checks steps of a process, which has names of its own: those that it had before, where it still runs.
    pub(crate) fn in_process<T>(
        &mut self,
        process: &ProcessName,
        body: impl FnOnce(&mut Self) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let names = self.names_of_processes.remove(process).unwrap_or_default();
        let outer = std::mem::replace(&mut self.names, names);
        let (programs, named) = (std::mem::take(&mut self.programs), std::mem::take(&mut self.named));
        self.process = Some(process.clone());
        let checked = body(self)?;
        self.process = None;
        self.programs = programs;
        let inner = std::mem::replace(&mut self.named, named);
        self.named.extend(inner.into_iter().map(|name| format!("{process}: {name}")));
        self.names_of_processes.insert(process.clone(), std::mem::replace(&mut self.names, outer));
        Ok(checked)
    }

    /// The process whose steps stand at this point, where it is not the main one.
    pub(crate) const fn process(&self) -> Option<&ProcessName> {
        self.process.as_ref()
    }

    /// A process ends, and with it everything that its names mean. Tells whether it was running.
    pub(crate) fn end_process(&mut self, process: &ProcessName) -> bool {
        self.names_of_processes.remove(process).is_some()
    }

    /// Checks the body of a loop by this function, twice where it runs more than once: what the first iteration leaves must suit the second.
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
                body(checker).map_err(|problem| problem.see(at, "seen in the second iteration of this loop"))?;
            }
            Ok(steps)
        })?;
        self.loops_until_oom -= u32::from(until_oom);
        self.multiplier = outer;
        Ok(steps)
    }

    /// Checks steps in which a variable has a value.
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

    /// Whether a request that runs out of memory here ends a loop.
    pub(crate) const fn is_in_loop_until_oom(&self) -> bool {
        self.loops_until_oom > 0
    }

    /// Checks two groups of steps of which the second is done between the operations of the first: they must not share a buffer, for which of
    /// them would come first depends on the run. What the first reports under its `id` is known behind both.
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
        let (outer_multiplier, outer_loops) = (self.multiplier, std::mem::take(&mut self.loops_until_oom));
        self.unfinished.extend(id.map(|id| id.text().to_owned()));
        let beside = self.nested(at, second)?;
        self.unfinished.truncate(self.unfinished.len() - usize::from(id.is_some()));
        (self.multiplier, self.loops_until_oom) = (outer_multiplier, outer_loops);
        let of_second = std::mem::take(&mut self.named);
        if let Some(shared) = of_first.intersection(&of_second).next() {
            let message = format!("`{shared}` is named by the step and by what is done meanwhile");
            return Err(Problem::new(at, message).help("which of them comes first depends on the run: give them buffers of their own"));
        }
        self.named = before.into_iter().chain(of_first).chain(of_second).collect();
        Ok((checked, beside))
    }

    /// Expectations between arms, in the order of the file, and the streams that stand for those of traces.
    pub(crate) fn finish(self) -> (Vec<Located<Expectation>>, Vec<StreamName>, Vec<Renamed>) {
        (self.comparisons, self.streams_of_traces, self.renamed.into_inner().into_iter().collect())
    }

    /// Notes a key that the file writes by its earlier name.
    pub(crate) fn renamed(&self, at: Position, old: &'static str, new: &'static str) {
        self.renamed.borrow_mut().insert(Renamed { at, old, new });
    }

    /// The memory that the scenario needs.
    pub(crate) const fn memory(&self) -> Bytes {
        self.memory
    }

    /// Where the scenario lies.
    pub(crate) const fn folder(&self) -> &'a Path {
        self.folder
    }

    /// Streams for those that a trace names. Traces share them: what is done on them is done at once.
    pub(crate) fn streams_of_trace(&mut self, at: Position, named: BTreeSet<StreamId>) -> Result<BTreeMap<StreamId, StreamName>, Problem> {
        let own = self.streams.len();
        // The default stream is among the scenario's own.
        if own - 1 + named.len() > MAX_STREAMS {
            let message = format!("with the {} streams of this trace there are more than {MAX_STREAMS}", named.len());
            return Err(Problem::new(at, message).help("use fewer streams"));
        }
        while self.streams_of_traces.len() < named.len() {
            let index = own + self.streams_of_traces.len();
            self.streams_of_traces.push(StreamName::new(index, &format!("stream {} of traces", self.streams_of_traces.len() + 1)));
        }
        Ok(named.into_iter().zip(self.streams_of_traces.iter().cloned()).collect())
    }
}
