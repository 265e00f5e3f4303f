//! Runs a suite: takes a suite and a provider of devices, returns the suite's record.
//!
//! Each round runs every entry once, in an order drawn from the seed, so drift of the machine
//! affects all entries alike. The accepted build's visit is adjacent to ours, in random order. The
//! first rounds warm up and are dropped, except on a virtual clock. The suite ends when every
//! interval is narrow enough, or when rounds or time are used up.
//!
//! Side by side with the accepted build, a verdict needs many rounds. So measured cases take turns
//! in blocks: each block runs until its entries are decided, then the next one begins. Cases whose
//! last measurement is the oldest come first. A case that the time does not reach is skipped
//! ([`NOT_IN_TURN`]), and a later run begins with it.
//!
//! A visit may be skipped in one round, for example while other processes hold the device's memory.
//! Only that round lacks samples. An entry that is skipped on its first three visits is dropped. An
//! entry that was skipped more often than measured has no figures, because its lucky rounds are not
//! typical. A failure or an out-of-memory error in any round is the outcome of the whole entry.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use derive_more::Display;
use harness_allocator::{allocator::AllocatorSpec, device::Clock, units::Nanos};
use indexmap::IndexMap;
use rand::{Rng, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

use super::builds::{Builds, Request, Side};
use super::clock::{Stopwatch, overhead_ps};
use super::inference::centre;
use super::measure::visit::{Fault, Reading, Visit};
use super::measure::{self};
use super::provider::DeviceProvider;
use super::record::{
    BenchRun, Entry, EntryResult, Measured, NOT_IN_TURN, Quantity, Shard, Stopped, SuiteRecord,
};
use super::suite::{Case, Suite, hash_of, hash_text};
use super::summary::{median, precision, summarize};
use super::torch::{TorchArm, Torches, torch_arms};

const WARM_UP: u32 = 2;
/// Equal rounds after which figures of a virtual clock count as deterministic.
const EQUAL_ROUNDS: usize = 2;

/// Skipped first visits after which a case is dropped; one is enough on a virtual clock.
const GIVE_UP: u32 = 3;

/// Entries of a block, so that its cases are measured in the same minute. A case is never divided.
const BLOCK: usize = 12;
/// The share of a suite's budget that one block may use: a noisy case must not take the time of all
/// others.
const MOST_OF_BUDGET: f64 = 0.25;

#[derive(Clone, Debug, Default)]
pub struct Terms {
    pub seed: u64,
    pub budget: Option<Nanos>,
    pub shard: Option<Shard>,
    pub interrupt: Arc<AtomicBool>,
    pub turns: Turns,
}

/// When each case was last measured side by side with the accepted build.
#[derive(Clone, Debug, Default)]
pub struct Turns(BTreeMap<(String, String), String>);

impl Turns {
    /// From earlier runs with the same accepted build on the same device, in any order.
    pub fn after<'r>(runs: impl IntoIterator<Item = &'r BenchRun>) -> Self {
        let mut last = BTreeMap::new();
        for run in runs {
            for (suite, entry) in run.entries().filter(|(_, entry)| {
                entry
                    .accepted
                    .as_ref()
                    .is_some_and(|other| other.measured().is_some())
            }) {
                let started: &mut String =
                    last.entry((suite.name.clone(), entry.case())).or_default();
                *started = std::mem::take(started).max(run.started.clone());
            }
        }
        Self(last)
    }

    /// Returns when the last run that measured a case began. Empty if no run did, so that the case
    /// comes first. The entries of a case with parts have names that begin with that of the case.
    fn last(&self, suite: &str, case: &Case) -> &str {
        let of_case = |(of, name): &(String, String)| {
            of == suite && (*name == case.name() || name.starts_with(&format!("{}: ", case.group)))
        };
        self.0
            .iter()
            .filter(|(entry, _)| of_case(entry))
            .map(|(_, started)| started.as_str())
            .min()
            .unwrap_or_default()
    }
}

#[derive(Debug, Default)]
pub struct Processes {
    pub builds: Option<Builds>,
    pub torches: Option<Torches>,
}

#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    pub suite: &'a Suite,
    pub case: &'a Case,
    pub arm: Arm<'a>,
    /// Counted from 1, including warm-up rounds.
    pub round: u32,
    pub used: f64,
}

#[derive(Clone, Copy, Debug, Display)]
pub enum Arm<'a> {
    Ours(&'a AllocatorSpec),
    #[display("{}", _0.name)]
    Torch(&'a TorchArm),
}

impl Arm<'_> {
    /// Hash of the work that an entry of this arm measures. It includes the settings, because an
    /// arm's name may hide them.
    pub(crate) fn hash(&self, case: &Case) -> String {
        match self {
            Self::Ours(arm) if arm.has_own_name() => hash_text([
                case.hash.as_str(),
                arm.kind_name(),
                arm.settings().unwrap_or_default().as_str(),
            ]),
            Self::Ours(_) => case.hash.clone(),
            Self::Torch(arm) => hash_text([case.hash.as_str(), &arm.settings]),
        }
    }
}

/// The cases of a shard. All arms of a case are in the same shard, independent of other suites.
pub fn cases_of(suite: &Suite, shard: Option<Shard>) -> impl Iterator<Item = &Case> {
    // No name contains a newline.
    suite.cases.iter().filter(move |case| {
        shard.is_none_or(|shard| shard.has(&format!("{}\n{}", suite.name, case.name())))
    })
}

pub fn run_suite(
    suite: &Suite,
    provider: &mut dyn DeviceProvider,
    processes: &mut Processes,
    terms: &Terms,
    mut watch: impl FnMut(Progress<'_>),
) -> SuiteRecord {
    let overhead_ps = overhead_ps();
    let torches = if processes.torches.is_some() {
        torch_arms(suite)
    } else {
        Vec::new()
    };
    let torches_of = |case: &Case| {
        if measure::torch::can(&case.measure) {
            torches.as_slice()
        } else {
            &[]
        }
    };
    let arms = |case| {
        suite
            .arms
            .iter()
            .map(Arm::Ours)
            .chain(torches_of(case).iter().map(Arm::Torch))
    };
    let (clock, has_accepted) = (provider.clock(), processes.builds.is_some());
    let task = |case, arm| {
        Task::new(
            case,
            arm,
            clock,
            has_accepted && matches!(arm, Arm::Ours(_)),
        )
    };
    let tasks = cases_of(suite, terms.shard)
        .flat_map(|case| arms(case).map(move |arm| task(case, arm)))
        .collect();
    let budget = terms.budget.unwrap_or(suite.budget);
    let mut run = Run {
        suite,
        terms,
        provider,
        processes,
        tasks,
        overhead_ps,
        began: Stopwatch::start(),
        budget,
        round: 0,
        counted: 0,
    };
    let stopped = run.rounds(&mut watch).unwrap_or(Stopped::Interrupted);
    SuiteRecord {
        name: suite.name.clone(),
        about: suite.about.clone(),
        threshold: suite.threshold,
        rounds: run
            .tasks
            .iter()
            .map(|task| task.this.rounds())
            .max()
            .unwrap_or_default(),
        stopped,
        overhead_ps,
        entries: entries(run.tasks),
    }
}

struct Run<'a> {
    suite: &'a Suite,
    terms: &'a Terms,
    provider: &'a mut dyn DeviceProvider,
    processes: &'a mut Processes,
    /// Sorted by case; the arms of a case are adjacent.
    tasks: Vec<Task<'a>>,
    overhead_ps: u64,
    began: Stopwatch,
    budget: Nanos,
    /// Rounds begun, including warm-up.
    round: u32,
    /// Rounds finished, without warm-up.
    counted: usize,
}

impl Run<'_> {
    fn rounds(&mut self, watch: &mut impl FnMut(Progress<'_>)) -> Result<Stopped, Fault> {
        if self
            .tasks
            .iter()
            .any(|task| task.accepted.is_some() && !task.quantity.is_exact())
        {
            return self.in_turns(watch);
        }
        let all: Vec<usize> = (0..self.tasks.len()).collect();
        if self.tasks.iter().any(|task| !task.quantity.is_exact()) {
            for _ in 0..WARM_UP {
                self.round(&all, watch, true)?;
                if self.time_is_up(0) {
                    break;
                }
            }
        }
        for counted in 1.. {
            let began = self.began.elapsed_ns();
            self.round(&all, watch, false)?;
            let time_is_up = self.time_is_up(self.began.elapsed_ns() - began);
            if let Some(stopped) = stopped(&self.tasks, self.suite, counted, time_is_up) {
                return Ok(stopped);
            }
        }
        Ok(Stopped::Budget)
    }

    /// Runs the blocks one after another, each until it is decided. At least one block with
    /// measured times runs, however short the time is.
    fn in_turns(&mut self, watch: &mut impl FnMut(Progress<'_>)) -> Result<Stopped, Fault> {
        let (mut stopped, mut has_measured) = (Stopped::Precise, false);
        for block in self.blocks() {
            if has_measured && self.time_is_up(0) {
                stopped = Stopped::Budget;
                block
                    .iter()
                    .for_each(|&index| self.tasks[index].is_in_turn = false);
                continue;
            }
            if !self.block(&block, watch)? {
                stopped = Stopped::Budget;
            }
            has_measured |= block
                .iter()
                .any(|&index| !self.tasks[index].quantity.is_exact());
        }
        Ok(stopped)
    }

    /// All tasks in groups of whole cases: exact figures first, because they take two rounds; then
    /// the cases that were not measured for the longest time.
    fn blocks(&self) -> Vec<Vec<usize>> {
        let mut cases: Vec<Vec<usize>> = Vec::new();
        for (index, task) in self.tasks.iter().enumerate() {
            match cases
                .last_mut()
                .filter(|case| std::ptr::eq(self.tasks[case[0]].case, task.case))
            {
                Some(case) => case.push(index),
                None => cases.push(vec![index]),
            }
        }
        let first = |case: &Vec<usize>| &self.tasks[case[0]];
        cases.sort_by_key(|case| {
            (
                !first(case).quantity.is_exact(),
                self.terms.turns.last(&self.suite.name, first(case).case),
            )
        });
        let mut blocks: Vec<Vec<usize>> = Vec::new();
        for case in cases {
            match blocks
                .last_mut()
                .filter(|block| block.len() + case.len() <= BLOCK)
            {
                Some(block) => block.extend(case),
                None => blocks.push(case),
            }
        }
        blocks
    }

    /// Runs rounds of some tasks until all of them are decided. Returns `false` if rounds or time
    /// were used up before that.
    fn block(
        &mut self,
        block: &[usize],
        watch: &mut impl FnMut(Progress<'_>),
    ) -> Result<bool, Fault> {
        let most = self
            .began
            .elapsed_ns()
            .saturating_add((self.budget.0 as f64 * MOST_OF_BUDGET) as u64);
        self.counted = 0;
        for _ in 0..WARM_UP {
            self.round(block, watch, true)?;
        }
        for counted in 1.. {
            let began = self.began.elapsed_ns();
            self.round(block, watch, false)?;
            let (threshold, least) = (self.suite.threshold, self.suite.rounds.least as usize);
            block
                .iter()
                .for_each(|&index| self.tasks[index].decide(threshold, least));
            if block.iter().all(|&index| self.tasks[index].is_done()) {
                return Ok(true);
            }
            let now = self.began.elapsed_ns();
            if counted >= self.suite.rounds.most || now > most || self.time_is_up(now - began) {
                break;
            }
        }
        Ok(false)
    }

    fn time_is_up(&self, round: u64) -> bool {
        self.began.elapsed_ns().saturating_add(round) > self.budget.0
    }

    /// Visits each of these tasks once, unless it is done.
    fn round(
        &mut self,
        tasks: &[usize],
        watch: &mut impl FnMut(Progress<'_>),
        warm_up: bool,
    ) -> Result<(), Fault> {
        self.round += 1;
        self.processes.builds.iter_mut().for_each(Builds::renew);
        let mut order = tasks.to_vec();
        let salt = hash_of([self.suite.name.as_str(), &self.round.to_string()]);
        let mut rng = ChaCha8Rng::seed_from_u64(self.terms.seed ^ salt);
        order.shuffle(&mut rng);
        for index in order {
            let used = self.began.elapsed_ns() as f64 / self.budget.0.max(1) as f64;
            let task = &self.tasks[index];
            let sides = if rng.random() {
                [Side::This, Side::Accepted]
            } else {
                [Side::Accepted, Side::This]
            };
            if task.is_done() || (warm_up && task.quantity.is_exact()) {
                continue;
            }
            watch(Progress {
                suite: self.suite,
                case: task.case,
                arm: task.arm,
                round: self.round,
                used: used.min(1.0),
            });
            let has_accepted = task.accepted.is_some();
            for side in sides
                .into_iter()
                .filter(|side| has_accepted || *side == Side::This)
            {
                let visited = self.visit(index, side);
                // The interruption may have cut this visit short.
                if self.terms.interrupt.load(Ordering::Relaxed)
                    || visited == Err(Fault::Interrupted)
                {
                    return Err(Fault::Interrupted);
                }
                self.tasks[index].note(side, visited, warm_up, self.counted);
            }
        }
        self.counted += usize::from(!warm_up);
        Ok(())
    }

    fn visit(&mut self, index: usize, side: Side) -> Result<Vec<Reading>, Fault> {
        let (task, suite, interrupt) = (&mut self.tasks[index], self.suite, &self.terms.interrupt);
        let (case, memory, provider) = (task.case, suite.memory, &mut *self.provider);
        match (task.arm, &mut self.processes.builds) {
            (Arm::Torch(arm), _) => {
                let torches = self
                    .processes
                    .torches
                    .as_mut()
                    .ok_or_else(|| Fault::Skipped("PyTorch was not requested".to_owned()))?;
                measure::torch::visit(
                    torches.with(&arm.settings).map_err(Fault::Skipped)?,
                    &suite.name,
                    case,
                    memory,
                )
            }
            (Arm::Ours(arm), Some(builds)) => {
                let request = Request {
                    suite: Cow::Borrowed(&suite.path),
                    case: case.name().into(),
                    arm: arm.to_string().into(),
                    hash: Cow::Borrowed(&case.hash),
                    batch: task.batch,
                };
                let (readings, batch) = builds.visit(side, &request)?;
                task.batch = task.batch.or(batch);
                Ok(readings)
            }
            (Arm::Ours(arm), None) => {
                let overhead_ps = self.overhead_ps;
                measure::visit(
                    &case.measure,
                    &mut Visit {
                        provider,
                        arm,
                        memory,
                        overhead_ps,
                        batch: &mut task.batch,
                        interrupt,
                    },
                )
            }
        }
    }
}

/// Why no round follows this many counted ones, or `None` if another one does.
fn stopped(tasks: &[Task<'_>], suite: &Suite, counted: u32, time_is_up: bool) -> Option<Stopped> {
    if tasks.iter().all(Task::is_settled) {
        return Some(Stopped::Deterministic);
    }
    let is_precise = |task: &Task<'_>| task.is_precise(suite.precision);
    if counted >= suite.rounds.least && tasks.iter().all(is_precise) {
        return Some(Stopped::Precise);
    }
    (counted >= suite.rounds.most || time_is_up).then_some(Stopped::Budget)
}

struct Task<'a> {
    case: &'a Case,
    arm: Arm<'a>,
    quantity: Quantity,
    batch: Option<u64>,
    this: Results,
    /// Results of the accepted build, if it is measured.
    accepted: Option<Results>,
    /// `true` if the ratio of the two builds is known well enough for a verdict.
    is_decided: bool,
    /// `false` if the time was used up before its block began.
    is_in_turn: bool,
}

#[derive(Default)]
struct Results {
    ended: Option<EntryResult>,
    /// `true` if any visit, including warm-up, was not skipped.
    can_be_done: bool,
    /// `true` if it is dropped because it cannot run here.
    given_up: bool,
    /// Skipped visits, including warm-up.
    skipped: u32,
    /// Skipped visits without warm-up.
    skipped_rounds: usize,
    why_skipped: Option<String>,
    /// By part of the case and quantity, in the order of the visit's readings.
    series: IndexMap<(Option<Cow<'static, str>>, Quantity), Series>,
}

struct Series {
    batch: u64,
    /// One per round; empty if the round has no samples.
    rounds: Vec<Vec<u64>>,
    /// Why this part cannot be measured here.
    missing: Option<String>,
}

impl Series {
    fn measured(&self) -> impl Iterator<Item = &Vec<u64>> {
        self.rounds.iter().filter(|round| !round.is_empty())
    }

    /// The logarithms of the ratios to another build, by round.
    fn log_ratios(&self, other: &Self) -> Vec<f64> {
        let log =
            |round: &Vec<u64>| median(&mut round.clone()).map(|figure| (figure.max(1) as f64).ln());
        self.rounds
            .iter()
            .zip(&other.rounds)
            .filter_map(|(new, old)| Some(log(new)? - log(old)?))
            .collect()
    }

    fn is_steady(&self) -> bool {
        let mut measured = self.measured();
        let first = measured.next();
        self.measured().count() >= EQUAL_ROUNDS && measured.all(|round| Some(round) == first)
    }

    fn outcome(self) -> EntryResult {
        match self.missing {
            Some(reason) if self.rounds.is_empty() => EntryResult::Skipped { reason },
            _ => {
                let summary = summarize(&self.rounds);
                let rounds = self
                    .rounds
                    .into_iter()
                    .map(|mut round| median(&mut round))
                    .collect();
                EntryResult::Measured(Measured {
                    batch: self.batch,
                    rounds,
                    summary,
                })
            }
        }
    }
}

impl<'a> Task<'a> {
    fn new(case: &'a Case, arm: Arm<'a>, clock: Clock, with_accepted: bool) -> Self {
        let quantity = match arm {
            Arm::Ours(_) => measure::quantity(&case.measure, clock),
            Arm::Torch(_) => measure::torch::quantity(&case.measure),
        };
        let accepted = with_accepted.then(Results::default);
        Self {
            case,
            arm,
            quantity,
            batch: None,
            this: Results::default(),
            accepted,
            is_decided: false,
            is_in_turn: true,
        }
    }

    /// Records a visit; `before` is the number of earlier rounds.
    fn note(
        &mut self,
        side: Side,
        visited: Result<Vec<Reading>, Fault>,
        warm_up: bool,
        before: usize,
    ) {
        let results = if side == Side::This {
            &mut self.this
        } else {
            self.accepted.get_or_insert_default()
        };
        match visited {
            Err(Fault::Failed(reason)) => results.ended = Some(EntryResult::Failed { reason }),
            Err(Fault::OutOfMemory(reason)) => {
                results.ended = Some(EntryResult::OutOfMemory { reason })
            }
            Err(Fault::Skipped(reason)) => results.skip(reason, warm_up, self.quantity),
            Ok(readings) if !warm_up => results.add(readings, before),
            Ok(_) => results.can_be_done = true,
            Err(Fault::Interrupted) => {}
        }
    }

    fn is_settled(&self) -> bool {
        self.this.is_settled() && self.accepted.as_ref().is_none_or(Results::is_settled)
    }

    /// Decides the task if the interval of the builds' ratio is narrower than the threshold. Only
    /// its width counts: a rule that looked at the ratio after each round would stop at a chance
    /// difference.
    fn decide(&mut self, threshold: f64, least: usize) {
        let Some(accepted) = &self.accepted else {
            return;
        };
        let is_narrow = |(part, new): (&(Option<Cow<'static, str>>, Quantity), &Series)| {
            part.1.is_exact()
                || accepted.series.get(part).is_none_or(|old| {
                    let logs = new.log_ratios(old);
                    logs.len() >= least
                        && centre(&logs)
                            .is_some_and(|ratio| ratio.high - ratio.low <= threshold.ln_1p())
                })
        };
        self.is_decided |= !self.this.series.is_empty() && self.this.series.iter().all(is_narrow);
    }

    fn is_done(&self) -> bool {
        self.is_decided || self.is_settled()
    }

    fn is_precise(&self, wanted: f64) -> bool {
        self.this.is_precise(wanted)
            && self
                .accepted
                .as_ref()
                .is_none_or(|accepted| accepted.is_precise(wanted))
    }

    /// One entry per part, or one with the reason for missing figures.
    fn entries(self) -> Vec<Entry> {
        let (case, arm, first, hash) = (
            self.case,
            self.arm.to_string(),
            self.quantity,
            self.arm.hash(self.case),
        );
        let not_in_turn = || {
            vec![(
                None,
                first,
                EntryResult::Skipped {
                    reason: NOT_IN_TURN.to_owned(),
                },
            )]
        };
        let accepted: Vec<_> = self
            .accepted
            .map(|results| results.outcomes(first))
            .unwrap_or_default();
        let entry =
            |(part, quantity, outcome): (Option<Cow<'static, str>>, Quantity, EntryResult)| {
                let known = accepted
                    .iter()
                    .position(|(other, kind, _)| (other, *kind) == (&part, quantity));
                // A failed task has one outcome for all parts.
                let whole = || {
                    accepted
                        .iter()
                        .position(|(.., outcome)| outcome.measured().is_none())
                };
                let accepted = known.or_else(whole).map(|at| accepted[at].2.clone());
                Entry {
                    group: part.map_or_else(
                        || case.group.clone(),
                        |part| format!("{}: {part}", case.group),
                    ),
                    point: case.point.clone(),
                    arm: arm.clone(),
                    quantity,
                    hash: hash.clone(),
                    outcome,
                    accepted,
                }
            };
        let outcomes = if self.is_in_turn {
            self.this.outcomes(first)
        } else {
            not_in_turn()
        };
        outcomes.into_iter().map(entry).collect()
    }
}

impl Results {
    fn add(&mut self, readings: Vec<Reading>, before: usize) {
        self.can_be_done = true;
        for Reading {
            part,
            quantity,
            batch,
            samples,
        } in readings
        {
            let new = || Series {
                batch,
                rounds: Vec::new(),
                missing: None,
            };
            let series = self.series.entry((part, quantity)).or_insert_with(new);
            match samples {
                Ok(samples) => {
                    // A round keeps its index, so both builds' rounds can be paired.
                    series.rounds.resize(before, Vec::new());
                    series.rounds.push(samples);
                }
                Err(reason) => series.missing = Some(reason),
            }
        }
    }

    fn skip(&mut self, reason: String, warm_up: bool, quantity: Quantity) {
        self.skipped += 1;
        self.skipped_rounds += usize::from(!warm_up);
        self.why_skipped = Some(reason);
        self.given_up = !self.can_be_done && (self.skipped >= GIVE_UP || quantity.is_exact());
    }

    fn rounds(&self) -> u32 {
        self.series
            .values()
            .map(|series| u32::try_from(series.rounds.len()).unwrap_or(u32::MAX))
            .max()
            .unwrap_or_default()
    }

    /// Returns whether further visits add nothing: it failed, was dropped, or a virtual clock
    /// returned the same figures each time.
    fn is_settled(&self) -> bool {
        let is_steady = |((_, quantity), series): (&(_, Quantity), &Series)| {
            quantity.is_exact() && series.is_steady()
        };
        self.ended.is_some()
            || self.given_up
            || (!self.series.is_empty() && self.series.iter().all(is_steady))
    }

    fn is_precise(&self, wanted: f64) -> bool {
        let precise = |((_, quantity), series): (&(_, Quantity), &Series)| {
            let reached = || precision(&summarize(&series.rounds), series.measured().count());
            !quantity.is_time() || reached().is_some_and(|reached| reached <= wanted)
        };
        self.is_settled() || (!self.series.is_empty() && self.series.iter().all(precise))
    }

    /// One outcome per part, or one with the reason for missing figures.
    fn outcomes(self, first: Quantity) -> Vec<(Option<Cow<'static, str>>, Quantity, EntryResult)> {
        if let Some(ended) = self.ended {
            return vec![(None, first, ended)];
        }
        let measured = self
            .series
            .values()
            .map(|series| series.measured().count())
            .max()
            .unwrap_or_default();
        let (skipped, why) = (
            self.skipped_rounds,
            self.why_skipped.unwrap_or_else(|| "interrupted".to_owned()),
        );
        let reason = match measured {
            0 => why,
            _ if skipped > measured => format!(
                "skipped in {skipped} of {} rounds; last reason: {why}",
                skipped + measured
            ),
            _ => {
                return self
                    .series
                    .into_iter()
                    .map(|((part, quantity), series)| (part, quantity, series.outcome()))
                    .collect();
            }
        };
        vec![(None, first, EntryResult::Skipped { reason })]
    }
}

/// All entries in the order of first appearance; the arms of a case are adjacent.
fn entries(tasks: Vec<Task<'_>>) -> Vec<Entry> {
    let mut cases: IndexMap<_, Vec<Entry>> = IndexMap::new();
    for entry in tasks.into_iter().flat_map(Task::entries) {
        cases
            .entry((entry.group.clone(), entry.point.clone(), entry.quantity))
            .or_default()
            .push(entry);
    }
    cases.into_values().flatten().collect()
}

#[cfg(test)]
mod tests;
