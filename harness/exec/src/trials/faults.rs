//! A program in which attempts to get device memory fail, one after the other: [`every_fault`].
//!
//! PyTorch answers one failed attempt by giving its cache back and asking again, so an OutOfMemoryError takes two in a row: attempts n and n + 1.

use harness_allocator::units::Bytes;
use harness_gpu_settings::attempts;
use harness_gpu_settings::settings::Fault;
use serde::Serialize;

use super::observed::{Ending, Frame, Observed};
use super::which::{Which, spread};
use super::{Program, Run, Trial};
use crate::process::End;
use crate::timeline::Timeline;

/// Attempts that fail alone where the user did not ask for more: enough to show that PyTorch's retry works.
const ALONE: usize = 3;
/// What a program may hold more at its end than the first run and still count as back to its memory: 1 % of that, and not less than this.
const MORE: Bytes = Bytes::mib(2);

/// What to let fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Which attempts.
    pub which: Which,
    /// Whether each of them fails alone too.
    pub alone: bool,
}

/// What a program that runs out of memory is expected to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expectation {
    /// It ends as it does without a failure, and holds no more memory at the end.
    Recovers,
    /// It recovers, or ends with an exit code that is not 0 and an OutOfMemoryError as the last of its error output.
    EndsCleanly,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FaultReport {
    /// The run without failures.
    pub first: First,
    /// Which attempts were made to fail, in words.
    pub chosen: String,
    /// A run for each of them, in their order.
    pub cases: Vec<Case>,
    /// Runs that an interrupt left out.
    pub left_out: usize,
}

/// The run without failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct First {
    /// Attempts to get device memory, of the process that made the most.
    pub attempts: usize,
    /// Processes that used the GPU. An attempt fails in each of them.
    pub processes: usize,
    /// Bytes that PyTorch's allocator had in use at the end.
    pub allocated_at_end: Option<u64>,
    /// The most bytes that a process held of a device.
    pub peak_reserved: u64,
    /// Pieces of work submitted to the GPU; 0 on a real one, where they are not counted.
    pub submitted: u64,
}

/// A run in which an attempt and the one behind it failed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    /// The first attempt that failed, counted from 1.
    pub attempt: u64,
    /// What it asked for, in bytes.
    pub size: u64,
    /// How the run ended.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// The stack of the OutOfMemoryError without PyTorch's own code, innermost first; empty where there was none or it is not known.
    pub stack: Vec<Frame>,
    /// The error output ends with an OutOfMemoryError, and the exit code is not 0.
    pub is_clean_end: bool,
    /// Bytes in use at the end, less those of the first run.
    pub more_at_end: Option<i64>,
    /// Whether that is more than a hundredth of what the first run had in use, and more than 2 MiB.
    pub holds_memory: bool,
    /// The most bytes held, less those of the first run.
    pub more_at_peak: i64,
    /// What was asked of the driver next after the failed attempts, in bytes.
    pub next_size: Option<u64>,
    /// Pieces of work submitted to the GPU; 0 on a real one, where they are not counted.
    pub submitted: u64,
    /// How a run ended in which only this attempt failed; `None` where there was no such run.
    pub alone: Option<Outcome>,
}

/// How a run with failed attempts ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names say what they are")]
pub enum Outcome {
    /// As the first run, after an OutOfMemoryError.
    Recovered,
    /// As the first run, without an error: asking again helped.
    ServedByRetry,
    /// With an OutOfMemoryError that nobody caught.
    OutOfMemory,
    /// With another error.
    OtherError {
        /// Its last line.
        error: String,
    },
    /// With another exit code, and no error of Python.
    ExitCode { exit_code: u8 },
    /// By a signal.
    Signal { signal: u8 },
    /// Not in the time that it had.
    Hang,
    /// It did not come to the attempt that was to fail.
    NotReached,
}

impl Case {
    /// Whether the program did what is expected of it.
    #[must_use]
    pub fn meets(&self, expectation: Expectation) -> bool {
        let recovers = matches!(self.outcome, Outcome::Recovered | Outcome::ServedByRetry) && !self.holds_memory;
        match expectation {
            Expectation::Recovers => recovers,
            Expectation::EndsCleanly => recovers || self.is_clean_end,
        }
    }
}

/// Runs a program once for each attempt chosen. The first run's attempts are counted, so it must have made some.
///
/// # Errors
/// What the program's runner says.
pub fn every_fault<R: Run>(program: &Program<'_, R>, plan: Plan) -> Result<FaultReport, R::Error> {
    let sizes = program.first.sizes();
    let chosen = plan.which.choose(&sizes);
    let alone: Vec<u64> = if plan.alone { chosen.clone() } else { spread(chosen.len(), ALONE).map(|at| chosen[at]).collect() };
    let faults: Vec<Fault> = chosen.iter().map(|first| failing(*first, 2)).chain(alone.iter().map(|first| failing(*first, 1))).collect();
    let trials: Vec<Trial> = faults.iter().map(|fault| Trial { faults: vec![*fault], ..program.trial.clone() }).collect();
    let mut runs = program.run(&trials)?;
    let lone_runs = runs.split_off(chosen.len());
    let left_out = runs.iter().chain(&lone_runs).filter(|run| run.is_none()).count();
    let mut cases: Vec<Case> = faults.iter().zip(runs).filter_map(|(fault, run)| Some(case(fault, program.first, &run?))).collect();
    for (first, run) in alone.iter().zip(lone_runs) {
        if let (Some(run), Some(case)) = (run, cases.iter_mut().find(|case| case.attempt == *first)) {
            case.alone = Some(outcome(&failing(*first, 1), program.first, &run));
        }
    }
    Ok(FaultReport { first: First::new(program.first), chosen: plan.which.described(sizes.len()), cases, left_out })
}

/// How many runs [`every_fault`] makes.
#[must_use]
pub fn runs(first: &Observed, plan: Plan) -> usize {
    let chosen = plan.which.choose(&first.sizes()).len();
    chosen + if plan.alone { chosen } else { chosen.min(ALONE) }
}

impl First {
    fn new(observed: &Observed) -> Self {
        let Observed { attempts, processes, allocated_at_end, peak_reserved, submitted, .. } = observed;
        let allocated_at_end = allocated_at_end.map(Bytes::get);
        Self { attempts: attempts.len(), processes: *processes, allocated_at_end, peak_reserved: peak_reserved.0, submitted: *submitted }
    }
}

const fn failing(first: u64, count: u64) -> Fault {
    Fault { call: None, first, count, min_size: Bytes::ZERO }
}

fn case(fault: &Fault, first: &Observed, run: &Observed) -> Case {
    let failed = fault.first as usize;
    let size_of = |observed: &Observed, attempt: usize| observed.attempts.get(attempt).map(|attempt| attempt.size.0);
    let error = run.errors.iter().find(|error| error.attempts >= fault.first);
    let more_at_end = run.allocated_at_end.zip(first.allocated_at_end).map(|(run, first)| difference(run, first));
    let bearable = first.allocated_at_end.map_or(MORE, |bytes| Bytes(bytes.0 / 100).max(MORE));
    let is_code = |ending: Ending| matches!(ending, Ending::By(End::Code(code)) if code != 0);
    Case {
        attempt: fault.first,
        size: size_of(run, failed - 1).or_else(|| size_of(first, failed - 1)).unwrap_or_default(),
        outcome: outcome(fault, first, run),
        stack: error.map(|error| error.frames.clone()).unwrap_or_default(),
        is_clean_end: is_code(run.ending) && is_out_of_memory(run.last_line()),
        more_at_end,
        holds_memory: more_at_end.is_some_and(|more| u64::try_from(more).is_ok_and(|more| Bytes(more) > bearable)),
        more_at_peak: difference(run.peak_reserved, first.peak_reserved),
        next_size: size_of(run, failed - 1 + fault.count as usize),
        submitted: run.submitted,
        alone: None,
    }
}

fn difference(bytes: Bytes, than: Bytes) -> i64 {
    // Amounts of memory are far below 2^63.
    bytes.0 as i64 - than.0 as i64
}

fn outcome(fault: &Fault, first: &Observed, run: &Observed) -> Outcome {
    let end = match run.ending {
        Ending::Hang => return Outcome::Hang,
        Ending::By(_) if !attempts::reach(&run.attempts, fault) => return Outcome::NotReached,
        Ending::By(end) => end,
    };
    let raised = run.ooms > first.ooms || run.errors.iter().any(|error| error.attempts >= fault.first);
    match end {
        End::Signal(signal) => Outcome::Signal { signal },
        End::Code(_) if run.ending == first.ending && raised => Outcome::Recovered,
        End::Code(_) if run.ending == first.ending => Outcome::ServedByRetry,
        End::Code(_) if run.ended_out_of_memory || is_out_of_memory(run.last_line()) => Outcome::OutOfMemory,
        End::Code(exit_code) => match run.last_lines.iter().rev().find(|line| exception(line).is_some()) {
            Some(error) => Outcome::OtherError { error: error.clone() },
            None => Outcome::ExitCode { exit_code },
        },
    }
}

/// The type of an exception, of the last line of its message: `torch.OutOfMemoryError: …`, `KeyError: 'x'`, `AssertionError`.
fn exception(line: &str) -> Option<&str> {
    let name = line.split(": ").next().unwrap_or_default();
    let last = name.rsplit('.').next().unwrap_or_default();
    let is_name =
        name.split('.').all(|part| !part.is_empty() && part.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_'));
    let is_exception = ["Error", "Exception", "Interrupt", "Exit"].iter().any(|ending| last.ends_with(ending));
    (is_name && is_exception).then_some(name)
}

fn is_out_of_memory(line: &str) -> bool {
    exception(line).is_some_and(|name| name.ends_with("OutOfMemoryError"))
}

/// The first of these faults that no process came to.
#[must_use]
pub fn not_reached<'a>(faults: &'a [Fault], by_process: &[Timeline]) -> Option<&'a Fault> {
    faults.iter().find(|fault| !by_process.iter().any(|process| attempts::reach(&process.attempts, fault)))
}

#[cfg(test)]
mod tests;
