//! [`every_fault`] runs a program once per allocation, and fails that allocation. A second run
//! without failures shows first whether the program is deterministic. Before more memory or less
//! work counts against a recovery, `chance` repeats the runs.
//!
//! After one failed attempt PyTorch releases its cache and retries. So an OutOfMemoryError takes
//! two failures in a row: attempts n and n + 1. Other libraries request less, or try again more
//! often, so attempts fail until the library raises its error. A program that calls CUDA itself
//! gets each failure.

mod chance;

use std::collections::{BTreeMap, BTreeSet};

use harness_allocator::units::Bytes;
use harness_base::shard::Shard;
use harness_gpu_settings::attempts::{self, Attempt};
use harness_gpu_settings::{calls::Call, settings::Fault};
use serde::{Deserialize, Serialize};

use super::observed::{Observed, TrialEnd};
use super::part::Part;
use super::which::{Which, spread};
use super::{Trial, TrialProgram};
use crate::doubts::Doubt;
use crate::torch_record::Caller;
use crate::{errors::ErrorFrame, process::End, timeline::ProgramTimeline};

/// Attempts that also fail alone by default: enough to show that PyTorch's retry works.
const ALONE: usize = 3;
/// Extra memory at the end that still counts as recovered: 1 % of the first run's memory, but at
/// least this much.
const MORE: Bytes = Bytes::mib(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPlan<'a> {
    pub which: Which,
    /// `true` to also fail each selected attempt alone.
    pub alone: bool,
    /// Only the cases with these names, of all.
    pub only: Option<&'a BTreeSet<String>>,
}

/// Expected behavior of a program that runs out of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryExpectation {
    /// It ends like a run without failures and holds no more memory at the end. After the failed
    /// call of a library, it may also end with that error.
    Recovers,
    /// It recovers, or it ends with a nonzero exit code after an OutOfMemoryError, and no other
    /// exception or signal ends it.
    EndsCleanly,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultReport {
    pub first: First,
    /// What raises the out of memory errors.
    #[serde(default)]
    pub caller: Caller,
    /// The second run without failures, and what differs, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub second: Option<Second>,
    /// What two runs do differently, if chance explains that a run continues with more memory or
    /// less work. Then neither counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chance: Option<String>,
    /// Describes the selected attempts.
    pub chosen: String,
    pub cases: Vec<FaultCase>,
    /// Number of runs skipped after an interrupt.
    pub left_out: usize,
    /// Why the figures of the runs without failures may differ from those on a GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub doubts: Vec<Doubt>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
}

impl FaultReport {
    /// Returns the doubts about all runs.
    pub fn all_doubts(&self) -> Vec<Doubt> {
        let of_cases = self.cases.iter().map(|case| &case.doubts);
        Doubt::of_all([&self.doubts].into_iter().chain(of_cases))
    }

    /// Sets what explains that runs continue with more memory. Then no case holds memory.
    pub(super) fn explain_by(&mut self, chance: Option<String>) {
        if chance.is_some() {
            let cases = self.cases.iter_mut();
            cases.for_each(|case| case.holds_memory = false);
        }
        self.chance = chance;
    }

    /// The cases whose attempt failed. The others show nothing.
    pub fn injected(&self) -> impl Iterator<Item = &FaultCase> {
        let was_injected = |case: &&FaultCase| case.outcome != TrialOutcome::NotReached;
        self.cases.iter().filter(was_injected)
    }

    /// Returns whether no run made the attempt that should fail. A program that is not
    /// deterministic may end before it.
    pub fn is_untested(&self) -> bool {
        !self.cases.is_empty() && self.injected().next().is_none()
    }

    /// Returns whether the attempts of several ranks failed, each in turn.
    pub fn has_ranks(&self) -> bool {
        self.cases.iter().any(|case| case.rank.is_some())
    }
}

/// The run without failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct First {
    /// Device allocation attempts of all ranks, or else of the process that made the most.
    pub attempts: usize,
    /// Processes that used the GPU. The attempt fails in each of them.
    pub processes: usize,
    /// Bytes that PyTorch's allocator had allocated at the end.
    pub allocated_at_end: Option<u64>,
    /// Peak bytes that one process held on one device.
    pub peak_reserved: u64,
    /// Work items submitted to the GPU; 0 on a real one, where they are not counted.
    pub submitted: u64,
}

/// A second run without failures that differs from the first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Second {
    #[serde(flatten)]
    pub figures: First,
    /// What this run does differently, as in `it makes 7 attempts instead of 5`.
    pub difference: String,
    /// `true` if it ended in the same way and made an attempt of the first run. Then only attempts
    /// of both fail, and memory is compared with both, or with this run if `has_copies`.
    #[serde(default)]
    pub is_comparable: bool,
    /// `true` if the further runs are copies of this run: they have its random numbers.
    #[serde(default)]
    pub has_copies: bool,
}

/// A run in which an attempt and the next one failed, or a call of a library.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultCase {
    /// The rank, which is its device, if the program has several. Each rank counts its own
    /// attempts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The call of a library that failed, if it was one. Others are attempts to allocate device
    /// memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub call: Option<String>,
    /// The first failed attempt, counted from 1, or the number of the call among those of this
    /// name.
    pub attempt: u64,
    pub size: u64,
    #[serde(flatten)]
    pub outcome: TrialOutcome,
    /// The call stack of the OutOfMemoryError, or of the failed call of a library, without
    /// PyTorch's own frames, innermost first. Empty if there was no error or its stack is unknown.
    pub stack: Vec<ErrorFrame>,
    /// `true` if an OutOfMemoryError and nothing else ended the program, or it exited after it
    /// caught one. After a failed call of a library, the library's error replaces the
    /// OutOfMemoryError.
    pub is_clean_end: bool,
    /// Bytes allocated at the end, minus those of the first run, or of the nearer one of two runs
    /// that differ. 0 between them. If the further runs are copies, minus those of the second.
    pub more_at_end: Option<i64>,
    /// `true` if that exceeds 1 % of the bytes without failures, and 2 MiB, and chance does not
    /// explain it.
    pub holds_memory: bool,
    /// Peak bytes held, minus those of the first run, or of the nearer one of two runs that differ.
    /// 0 between them.
    pub more_at_peak: i64,
    /// The bytes that the next request to the driver asked for after the failed attempts.
    pub next_size: Option<u64>,
    /// Work items submitted to the GPU; 0 on a real one, where they are not counted.
    pub submitted: u64,
    /// The outcome of a run in which only this attempt failed, if there was one.
    pub alone: Option<TrialOutcome>,
    /// Why the figures of its runs may differ from those on a GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub doubts: Vec<Doubt>,
}

/// How a run with failed attempts ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum TrialOutcome {
    /// The run ended like the first one, although an OutOfMemoryError or the error of a library was
    /// raised.
    Recovered,
    /// The run ended like the first one without an error: the retry succeeded.
    ServedByRetry,
    /// With exit code 0, in the handler of the error. What comes after it did not run.
    EndedInHandler,
    /// With an uncaught OutOfMemoryError.
    OutOfMemory,
    /// With another exception, whose last line it is.
    OtherError { error: String },
    /// With another exit code and without an exception.
    ExitCode { exit_code: u8 },
    /// With a signal.
    Signal { signal: u8 },
    /// Ranks waited forever, as these lines describe, or the run exceeded its time limit, if there
    /// are none.
    Hang { ranks: Vec<String> },
    /// The run ended before the attempt that should fail.
    NotReached,
}

impl FaultCase {
    /// Returns whether the program continued to its usual end.
    pub const fn continues(&self) -> bool {
        matches!(
            self.outcome,
            TrialOutcome::Recovered | TrialOutcome::ServedByRetry
        )
    }

    /// The name among all cases of a program.
    pub fn name(&self) -> String {
        name(self.rank, self.call.as_deref(), self.attempt)
    }

    pub fn meets(&self, expectation: RecoveryExpectation) -> bool {
        let recovers = self.continues() && !self.holds_memory;
        match expectation {
            // PyTorch raises an error of the library, which programs rarely catch.
            RecoveryExpectation::Recovers => recovers || (self.call.is_some() && self.is_clean_end),
            RecoveryExpectation::EndsCleanly => recovers || self.is_clean_end,
        }
    }
}

/// The names and sizes of all cases of a program, in order.
pub fn all(run: &Observed) -> Vec<(String, Bytes)> {
    let places = places(run).into_iter().chain(calls_of_libraries(run));
    places.map(|place| (place.name(), place.size)).collect()
}

fn names(run: &Observed) -> BTreeSet<String> {
    all(run).into_iter().map(|(name, _)| name).collect()
}

pub fn every_fault<E: Send>(
    program: &TrialProgram<'_, E>,
    plan: FaultPlan<'_>,
) -> Result<FaultReport, E> {
    let first = program.first;
    let Cases {
        mut chosen,
        mut alone,
        described,
    } = cases(first, plan);
    let part = program.keep_shard(&mut chosen, Place::name);
    program.keep_shard(&mut alone, Place::name);
    let clean = (!chosen.is_empty()).then(|| program.trial.clone());
    let again = program.run(clean.as_slice())?.pop().flatten();
    let of_clean_runs = [first].into_iter().chain(&again).map(|run| &run.doubts);
    let doubts = Doubt::of_all(of_clean_runs);
    let again = again.and_then(|again| Some((first.difference(&again)?, again)));
    // A program that finds the files of its first run may fail, or have nothing to do.
    let is_comparable = again.as_ref().is_some_and(|(_, again)| {
        again.ending == first.ending && !names(first).is_disjoint(&names(again))
    });
    if let Some((_, again)) = again.as_ref().filter(|_| is_comparable) {
        // An attempt that only one of the runs makes shows nothing.
        let made = names(again);
        chosen.retain(|place| made.contains(&place.name()));
        alone.retain(|place| made.contains(&place.name()));
    }
    let trials = trials(program, &chosen, &alone);
    let mut runs = program.run(&trials)?;
    let lone_runs = runs.split_off(chosen.len());
    let all_runs = runs.iter().chain(&lone_runs);
    let left_out = all_runs.filter(|run| run.is_none()).count();
    let has_copies = again.as_ref().is_some_and(|(_, again)| again.is_copy)
        && runs.iter().flatten().all(|run| run.is_copy);
    let clean = Clean {
        first,
        again: again
            .as_ref()
            .filter(|_| is_comparable)
            .map(|(_, again)| again),
        has_copies,
    };
    let made = chosen.iter().zip(&trials).zip(&runs);
    let failed: Vec<Failed<'_>> = made
        .filter_map(|((place, trial), run)| clean.failed(place, trial, run.as_ref()?))
        .collect();
    let chance = chance::explanation(program, &clean, again.is_some(), &failed)?;
    let mut cases: Vec<FaultCase> = failed.into_iter().map(|failed| failed.case).collect();
    add_alone(&mut cases, first, &alone, lone_runs);
    let second = again.map(|(difference, again)| Second {
        figures: First::new(&again),
        difference,
        is_comparable,
        has_copies,
    });
    let mut report = FaultReport {
        first: First::new(first),
        caller: first.caller.clone(),
        second,
        chance: None,
        chosen: described,
        cases,
        left_out,
        doubts,
        part,
    };
    report.explain_by(chance);
    Ok(report)
}

/// The trials of the chosen places, followed by those in which one attempt fails alone.
fn trials<E>(program: &TrialProgram<'_, E>, chosen: &[Place], alone: &[Place]) -> Vec<Trial> {
    let has_end = program.trial.addresses.is_some();
    let trial = |place: &Place, count| Trial {
        faults: vec![place.failing(count)],
        faulty_device: place.rank,
        ..program.trial.clone()
    };
    let in_a_row = |place: &Place| place.in_a_row(&program.first.caller, has_end);
    let chosen = chosen.iter().map(|place| trial(place, in_a_row(place)));
    chosen
        .chain(alone.iter().map(|place| trial(place, 1)))
        .collect()
}

/// Adds the outcomes of the runs in which only one attempt failed.
fn add_alone(
    cases: &mut [FaultCase],
    first: &Observed,
    alone: &[Place],
    runs: Vec<Option<Observed>>,
) {
    for (place, run) in alone.iter().zip(runs) {
        let case = cases.iter_mut().find(|case| case.name() == place.name());
        if let (Some(run), Some(case)) = (run, case) {
            let (first, run) = (first.of_rank(place.rank), run.of_rank(place.rank));
            case.alone = Some(outcome(&place.failing(1), &first, &run));
            Doubt::add(&mut case.doubts, &run.doubts);
        }
    }
}

fn name(rank: Option<u32>, call: Option<&str>, attempt: u64) -> String {
    format!(
        "{rank:?} {}{attempt}",
        call.map_or_else(String::new, |call| format!("{call} "))
    )
}

/// An attempt or a call of a library, counted from 1, of a rank if there are several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    rank: Option<u32>,
    call: Option<Call>,
    attempt: u64,
    size: Bytes,
}

impl Place {
    fn name(&self) -> String {
        name(self.rank, self.call.map(Call::name), self.attempt)
    }

    const fn failing(&self, count: u64) -> Fault {
        Fault {
            call: self.call,
            first: self.attempt,
            count,
            min_size: Bytes::ZERO,
        }
    }

    /// The failures that the caller does not survive by itself. Nothing retries calls of libraries.
    /// On a simulated GPU, failures can end with the error.
    const fn in_a_row(&self, caller: &Caller, has_end: bool) -> u64 {
        match caller {
            _ if self.call.is_some() => 1,
            Caller::Library {
                shows_errors: true, ..
            } if has_end => Fault::UNTIL_ERROR,
            Caller::Torch | Caller::Library { .. } => 2,
            Caller::Program => 1,
        }
    }
}

/// The attempts of all ranks, or else of the process that made the most.
fn places(first: &Observed) -> Vec<Place> {
    let of = |rank: Option<u32>, attempts: &[Attempt]| {
        let place = |(index, attempt): (usize, &Attempt)| Place {
            rank,
            call: None,
            attempt: index as u64 + 1,
            size: attempt.size,
        };
        attempts.iter().enumerate().map(place).collect::<Vec<_>>()
    };
    if first.ranks.len() < 2 {
        return of(None, &first.attempts);
    }
    first
        .ranks
        .iter()
        .flat_map(|rank| of(Some(rank.device), &rank.of_device()[0]))
        .collect()
}

/// The calls of libraries of the same processes.
fn calls_of_libraries(first: &Observed) -> Vec<Place> {
    let of = |rank: Option<u32>, calls: &[Attempt]| {
        let mut made = BTreeMap::new();
        let place = |call: &Attempt| {
            let number = made.entry(call.call).or_insert(0);
            *number += 1;
            Place {
                rank,
                call: Some(call.call),
                attempt: *number,
                size: call.size,
            }
        };
        calls.iter().map(place).collect::<Vec<_>>()
    };
    if first.ranks.len() < 2 {
        return of(None, &first.calls_of_libraries);
    }
    first
        .ranks
        .iter()
        .flat_map(|rank| of(Some(rank.device), &rank.of_device()[1]))
        .collect()
}

struct Cases {
    /// Attempts that fail twice in a row, then calls of libraries.
    chosen: Vec<Place>,
    /// Attempts that also fail alone.
    alone: Vec<Place>,
    described: String,
}

fn cases(first: &Observed, plan: FaultPlan<'_>) -> Cases {
    let (places, calls) = (places(first), calls_of_libraries(first));
    // After a change of the program, there may be none of these.
    let only = plan.only.filter(|only| {
        let mut all = places.iter().chain(&calls);
        all.any(|place| only.contains(&place.name()))
    });
    let which = only.map_or(plan.which, |_| Which::All);
    let choose = |places: &[Place]| {
        let sizes: Vec<Bytes> = places.iter().map(|place| place.size).collect();
        which
            .choose(&sizes)
            .into_iter()
            .map(|number| places[number as usize - 1])
            .filter(|place| only.is_none_or(|only| only.contains(&place.name())))
            .collect::<Vec<Place>>()
    };
    let mut chosen = choose(&places);
    let alone = if plan.alone {
        chosen.clone()
    } else {
        spread(chosen.len(), ALONE).map(|at| chosen[at]).collect()
    };
    let mut described = which.described(places.len());
    if !calls.is_empty() && matches!(which, Which::Some | Which::All) {
        chosen.extend(choose(&calls));
        described += &format!(
            "; {} of the calls that create handles, plans and modules of libraries, once",
            which.described(calls.len())
        );
    }
    if only.is_some() {
        described = "those that failed in earlier runs".to_owned();
    }
    Cases {
        chosen,
        alone,
        described,
    }
}

/// Returns the number of runs that [`every_fault`] makes: fewer if the program is not
/// deterministic, and more if it continues with more memory or less work.
pub fn runs(first: &Observed, plan: FaultPlan<'_>, shard: Option<Shard>) -> usize {
    let Cases { chosen, alone, .. } = cases(first, plan);
    let with_failures = chosen
        .iter()
        .chain(&alone)
        .filter(|place| shard.is_none_or(|shard| shard.has(&place.name())))
        .count();
    with_failures + usize::from(with_failures > 0)
}

impl First {
    fn new(observed: &Observed) -> Self {
        let Observed {
            processes,
            allocated_at_end,
            peak_reserved,
            submitted,
            ..
        } = observed;
        let allocated_at_end = allocated_at_end.map(Bytes::get);
        Self {
            attempts: places(observed).len(),
            processes: *processes,
            allocated_at_end,
            peak_reserved: peak_reserved.0,
            submitted: *submitted,
        }
    }
}

/// The run of a place, and its case.
struct Failed<'a> {
    place: &'a Place,
    trial: &'a Trial,
    run: &'a Observed,
    case: FaultCase,
}

/// One run without failures, or two that differ.
struct Clean<'a> {
    first: &'a Observed,
    again: Option<&'a Observed>,
    /// `true` if all runs are copies of `again`.
    has_copies: bool,
}

impl<'a> Clean<'a> {
    /// The runs without failures that others are compared with.
    fn measure(&self) -> impl Iterator<Item = &'a Observed> {
        let own = self.again.filter(|_| self.has_copies);
        let both = [own.unwrap_or(self.first)].into_iter();
        both.chain(self.again.filter(|_| !self.has_copies))
    }

    fn failed<'b>(
        &self,
        place: &'b Place,
        trial: &'b Trial,
        run: &'b Observed,
    ) -> Option<Failed<'b>> {
        let case = self.case(place, trial.faults.first()?, run);
        Some(Failed {
            place,
            trial,
            run,
            case,
        })
    }

    fn case(&self, place: &Place, fault: &Fault, run: &Observed) -> FaultCase {
        let (first, run) = (&self.first.of_rank(place.rank), &run.of_rank(place.rank));
        let failed = fault.first as usize;
        let is_of_library = place.call.is_some();
        let size_of = |observed: &Observed, attempt: usize| {
            observed.attempts.get(attempt).map(|attempt| attempt.size.0)
        };
        let stack = if is_of_library {
            run.failed_calls.first()
        } else {
            let mut errors = run.errors.iter();
            let error = errors.find(|error| error.attempts >= fault.first);
            error.map(|error| &error.frames)
        };
        let at_end = self.interval(|run| run.allocated_at_end);
        let more_at_end = run
            .allocated_at_end
            .zip(at_end)
            .map(|(run, clean)| difference(run, clean));
        let bearable = at_end.map_or(MORE, |[_, most]| Bytes(most.0 / 100).max(MORE));
        let outcome = outcome(fault, first, run);
        let is_clean_end = match outcome {
            TrialOutcome::OutOfMemory | TrialOutcome::EndedInHandler => true,
            TrialOutcome::ExitCode { .. } if run.ended_out_of_memory => true,
            TrialOutcome::OtherError { .. } => is_of_library && run.ended_by_library,
            // Shells pass on a signal as 128 + n.
            TrialOutcome::ExitCode { exit_code } => {
                exit_code > 0
                    && exit_code < 128
                    && !run.is_end_unknown
                    && has_raised(fault, first, run)
            }
            _ => false,
        };
        FaultCase {
            rank: place.rank,
            call: place.call.map(|call| call.name().to_owned()),
            attempt: fault.first,
            size: if is_of_library {
                place.size.0
            } else {
                size_of(run, failed - 1)
                    .or_else(|| size_of(first, failed - 1))
                    .unwrap_or_default()
            },
            outcome,
            stack: stack.cloned().unwrap_or_default(),
            is_clean_end,
            more_at_end,
            holds_memory: more_at_end
                .is_some_and(|more| u64::try_from(more).is_ok_and(|more| Bytes(more) > bearable)),
            more_at_peak: self
                .interval(|run| Some(run.peak_reserved))
                .map_or(0, |clean| difference(run.peak_reserved, clean)),
            next_size: size_of(run, failed - 1 + failures(fault, run)).filter(|_| !is_of_library),
            submitted: run.submitted,
            alone: None,
            doubts: run.doubts.clone(),
        }
    }

    /// The least and the most of a figure in the runs without failures; `None` if the first of
    /// them has none.
    fn interval(&self, figure: impl Fn(&Observed) -> Option<Bytes>) -> Option<[Bytes; 2]> {
        let mut figures = self.measure().map(figure);
        let first = figures.next()??;
        let second = figures.next().flatten().unwrap_or(first);
        Some([first.min(second), first.max(second)])
    }

    /// Returns whether a run submitted less work than those without failures.
    fn has_less_work(&self, run: &Observed) -> bool {
        self.measure().all(|clean| run.submitted < clean.submitted)
    }
}

/// Returns how far the bytes are above or below an interval.
fn difference(bytes: Bytes, [least, most]: [Bytes; 2]) -> i64 {
    let nearest = bytes.clamp(least, most);
    // Memory sizes are far below 2^63.
    bytes.0 as i64 - nearest.0 as i64
}

fn outcome(fault: &Fault, first: &Observed, run: &Observed) -> TrialOutcome {
    let end = match run.ending {
        TrialEnd::Hang => return TrialOutcome::Hang { ranks: Vec::new() },
        TrialEnd::By(_)
            if !attempts::reach(
                if fault.call.is_some() {
                    &run.calls_of_libraries
                } else {
                    &run.attempts
                },
                fault,
            ) =>
        {
            return run
                .port_in_use
                .clone()
                .map_or(TrialOutcome::NotReached, |error| TrialOutcome::OtherError {
                    error,
                });
        }
        TrialEnd::By(end) => end,
    };
    if let Some(hang) = &run.hang {
        return TrialOutcome::Hang {
            ranks: hang.lines(),
        };
    }
    match end {
        End::Signal(signal) => TrialOutcome::Signal { signal },
        End::Code(0) if run.ended_in_handler && !first.ended_in_handler => {
            TrialOutcome::EndedInHandler
        }
        // Nothing retries a call of a library, or a program's own call, so the program did.
        End::Code(_)
            if run.ending == first.ending
                && (fault.call.is_some() || first.caller == Caller::Program) =>
        {
            TrialOutcome::Recovered
        }
        End::Code(_) if run.ending == first.ending && has_raised(fault, first, run) => {
            TrialOutcome::Recovered
        }
        End::Code(_) if run.ending == first.ending => TrialOutcome::ServedByRetry,
        End::Code(exit_code) => match &run.error {
            Some(error) => TrialOutcome::OtherError {
                error: error.clone(),
            },
            None if run.ended_out_of_memory && !run.caught_out_of_memory => {
                TrialOutcome::OutOfMemory
            }
            None => TrialOutcome::ExitCode { exit_code },
        },
    }
}

/// The number of attempts that failed because of this fault, if the program made enough.
fn failures(fault: &Fault, run: &Observed) -> usize {
    let is_injected = |attempt: &&Attempt| attempt.outcome == attempts::AttemptOutcome::Injected;
    if fault.count == Fault::UNTIL_ERROR {
        let after = run.attempts.iter().skip(fault.first as usize - 1);
        after.take_while(is_injected).count()
    } else {
        fault.count as usize
    }
}

/// Returns whether the failure caused an OutOfMemoryError.
fn has_raised(fault: &Fault, first: &Observed, run: &Observed) -> bool {
    let ooms = run.ooms.zip(first.ooms);
    ooms.is_some_and(|(run, first)| run > first)
        || run.errors.iter().any(|error| error.attempts >= fault.first)
}

pub fn not_reached<'a>(faults: &'a [Fault], by_process: &[ProgramTimeline]) -> Option<&'a Fault> {
    faults.iter().find(|fault| {
        !by_process
            .iter()
            .any(|process| attempts::reach(&process.attempts, fault))
    })
}

#[cfg(test)]
mod tests;
