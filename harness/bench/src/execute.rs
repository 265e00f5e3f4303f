//! The loop: a suite and a provider of devices in, a record of the suite out.
//!
//! Rounds are outermost. Each round does every entry once, in an order drawn anew from the seed, so that what drifts on the machine hits all
//! alike. Where the accepted build is measured too, its visit stands next to ours, sometimes before and sometimes behind it. The first rounds
//! warm up and are dropped, those on a virtual clock excepted, which has nothing to warm. It ends when every interval is narrow enough, or when
//! rounds or time are used up.
//!
//! A visit that was skipped in one round, as where others had the device's memory for a moment, is a round without samples of that entry: what
//! other rounds measured stays. A case that is skipped from the first visit on, three times, cannot be done here, and is not tried again. An
//! entry that was skipped in more rounds than it was measured in has no figures: those of the lucky rounds would not be typical. One failure is
//! a failure of the whole entry, whenever it comes; so is running out of memory.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::allocator::AllocatorSpec;
use harness_allocator::device::Clock;
use harness_allocator::units::Nanos;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::builds::{Builds, Request, Side};
use super::clock::{Stopwatch, overhead_ps};
use super::measure;
use super::measure::visit::{Fault, Reading, Visit};
use super::provider::DeviceProvider;
use super::record::{Entry, Measured, Outcome, Quantity, Shard, Stopped, SuiteRecord};
use super::suite::{Case, Pieces, Suite};
use super::summary::{median, precision, summarize};
use super::torch::{TorchArm, Torches, torch_arms};

/// Rounds that are dropped.
const WARM_UP: u32 = 2;
/// Equal rounds after which figures of a virtual clock are taken for deterministic.
const EQUAL_ROUNDS: usize = 2;

/// Skipped visits, from the first on, after which a case is taken not to be possible here; on a virtual clock the first one tells.
const GIVE_UP: u32 = 3;

/// How a suite is run, apart from what it says itself.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Every random choice comes from this.
    pub seed: u64,
    /// This time instead of the suite's own budget.
    pub budget: Option<Nanos>,
    /// Only this part of the cases.
    pub shard: Option<Shard>,
    /// Set by somebody else when it should stop.
    pub interrupt: Arc<AtomicBool>,
}

/// Other processes that take part, where they are wanted.
#[derive(Debug, Default)]
pub struct Processes {
    /// This build and the accepted one, to be measured side by side.
    pub builds: Option<Builds>,
    /// PyTorch's own allocator beside ours.
    pub torches: Option<Torches>,
}

/// How far a suite is.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the names say what they are")]
pub struct Progress<'a> {
    /// The suite that is run.
    pub suite: &'a Suite,
    /// What is done next.
    pub case: &'a Case,
    pub arm: Arm<'a>,
    /// Counted from 1, those that warm up included.
    pub round: u32,
    /// The share of the budget that is used up, from 0 to 1.
    pub used: f64,
}

/// What does a case.
#[derive(Clone, Copy, Debug)]
pub enum Arm<'a> {
    /// An allocator of ours.
    Ours(&'a AllocatorSpec),
    /// PyTorch's own.
    Torch(&'a TorchArm),
}

impl Arm<'_> {
    /// The hash of what an entry of this arm measures. An arm's own name says nothing of its settings, so they are part of it.
    fn hash(&self, case: &Case) -> String {
        match self {
            Self::Ours(arm) if arm.has_own_name() => {
                Pieces::hash_of([case.hash.as_str(), arm.kind_name(), arm.settings().unwrap_or_default().as_str()])
            }
            Self::Ours(_) => case.hash.clone(),
            Self::Torch(arm) => Pieces::hash_of([case.hash.as_str(), &arm.settings]),
        }
    }
}

impl fmt::Display for Arm<'_> {
    /// The arm's name in records.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ours(arm) => arm.fmt(f),
            Self::Torch(arm) => f.write_str(&arm.name),
        }
    }
}

/// The cases of a suite that belong to a part: all arms of a case belong to the same one, whatever else the suites contain.
pub fn cases_of(suite: &Suite, shard: Option<Shard>) -> impl Iterator<Item = &Case> {
    // No name has a line's end in it.
    suite.cases.iter().filter(move |case| shard.is_none_or(|shard| shard.has(&format!("{}\n{}", suite.name, case.name()))))
}

/// Runs a suite.
pub fn run_suite(
    suite: &Suite,
    provider: &mut dyn DeviceProvider,
    processes: &mut Processes,
    terms: &Terms,
    mut watch: impl FnMut(Progress<'_>),
) -> SuiteRecord {
    let overhead_ps = overhead_ps();
    let torches = if processes.torches.is_some() { torch_arms(suite) } else { Vec::new() };
    let torches_of = |case: &Case| if measure::torch::can(&case.measure) { torches.as_slice() } else { &[] };
    let arms = |case| suite.arms.iter().map(Arm::Ours).chain(torches_of(case).iter().map(Arm::Torch));
    let (clock, has_accepted) = (provider.clock(), processes.builds.is_some());
    let task = |case, arm| Task::new(case, arm, clock, has_accepted && matches!(arm, Arm::Ours(_)));
    let tasks = cases_of(suite, terms.shard).flat_map(|case| arms(case).map(move |arm| task(case, arm))).collect();
    let budget = terms.budget.unwrap_or(suite.budget);
    let mut run = Run { suite, terms, provider, processes, tasks, overhead_ps, began: Stopwatch::start(), budget, round: 0, counted: 0 };
    let stopped = run.rounds(&mut watch);
    SuiteRecord {
        name: suite.name.clone(),
        about: suite.about.clone(),
        threshold: suite.threshold,
        rounds: run.tasks.iter().map(|task| task.this.rounds()).max().unwrap_or_default(),
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
    /// By case, arms of one case next to each other.
    tasks: Vec<Task<'a>>,
    overhead_ps: u64,
    began: Stopwatch,
    budget: Nanos,
    /// Rounds begun, those that warm up included.
    round: u32,
    /// Rounds done, those that warm up excluded.
    counted: usize,
}

impl Run<'_> {
    /// Does rounds until there is a reason to stop.
    fn rounds(&mut self, watch: &mut impl FnMut(Progress<'_>)) -> Stopped {
        if self.tasks.iter().any(|task| !task.quantity.is_exact()) {
            for _ in 0..WARM_UP {
                if self.round(watch, true).is_err() {
                    return Stopped::Interrupted;
                }
                if self.time_is_up(0) {
                    break;
                }
            }
        }
        for counted in 1.. {
            let began = self.began.elapsed_ns();
            if self.round(watch, false).is_err() {
                return Stopped::Interrupted;
            }
            if self.tasks.iter().all(Task::is_settled) {
                return Stopped::Deterministic;
            }
            if counted >= self.suite.rounds.least && self.tasks.iter().all(|task| task.is_precise(self.suite.precision)) {
                return Stopped::Precise;
            }
            if counted >= self.suite.rounds.most || self.time_is_up(self.began.elapsed_ns() - began) {
                break;
            }
        }
        Stopped::Budget
    }

    /// Whether another round of that many nanoseconds would go beyond the budget.
    fn time_is_up(&self, round: u64) -> bool {
        self.began.elapsed_ns().saturating_add(round) > self.budget.0
    }

    /// Does every entry once. Entries that can tell nothing new are passed over.
    fn round(&mut self, watch: &mut impl FnMut(Progress<'_>), warm_up: bool) -> Result<(), Fault> {
        self.round += 1;
        if let Some(builds) = &mut self.processes.builds {
            builds.renew();
        }
        let mut order: Vec<usize> = (0..self.tasks.len()).collect();
        let mut salt = Pieces::default();
        salt.add(&self.suite.name);
        salt.add(&self.round.to_string());
        let mut rng = ChaCha8Rng::seed_from_u64(self.terms.seed ^ salt.hash());
        order.shuffle(&mut rng);
        for index in order {
            let used = self.began.elapsed_ns() as f64 / self.budget.0.max(1) as f64;
            let task = &self.tasks[index];
            let sides = if rng.random() { [Side::This, Side::Accepted] } else { [Side::Accepted, Side::This] };
            if task.is_settled() || (warm_up && task.quantity.is_exact()) {
                continue;
            }
            watch(Progress { suite: self.suite, case: task.case, arm: task.arm, round: self.round, used: used.min(1.0) });
            for side in sides {
                if side == Side::Accepted && self.tasks[index].accepted.is_none() {
                    continue;
                }
                let visited = self.visit(index, side);
                // What was done in the moment of the interruption may have been cut short.
                if self.terms.interrupt.load(Ordering::Relaxed) || visited == Err(Fault::Interrupted) {
                    return Err(Fault::Interrupted);
                }
                self.tasks[index].note(side, visited, warm_up, self.counted);
            }
        }
        self.counted += usize::from(!warm_up);
        Ok(())
    }

    /// Does a case once.
    fn visit(&mut self, index: usize, side: Side) -> Result<Vec<Reading>, Fault> {
        let (task, suite, interrupt) = (&mut self.tasks[index], self.suite, &self.terms.interrupt);
        let (case, memory, provider) = (task.case, suite.memory, &mut *self.provider);
        match (task.arm, &mut self.processes.builds) {
            (Arm::Torch(arm), _) => match &mut self.processes.torches {
                Some(torches) => {
                    let torch = torches.with(&arm.settings).map_err(Fault::Skipped)?;
                    measure::torch::visit(torch, &suite.name, case, memory)
                }
                None => Err(Fault::Skipped("PyTorch was not asked for".to_owned())),
            },
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
                measure::visit(&case.measure, &mut Visit { provider, arm, memory, overhead_ps, batch: &mut task.batch, interrupt })
            }
        }
    }
}

/// A case done by an arm: what is visited once a round.
struct Task<'a> {
    case: &'a Case,
    arm: Arm<'a>,
    /// What the first of its figures are.
    quantity: Quantity,
    /// See [`Visit::batch`].
    batch: Option<u64>,
    this: Results,
    /// Of the accepted build, where it is measured.
    accepted: Option<Results>,
}

/// What visits with one build came to.
#[derive(Default)]
struct Results {
    /// Why there will be no figures: it failed or ran out of memory.
    ended: Option<Outcome>,
    /// Whether a visit, of those that warm up also, was not skipped.
    can_be_done: bool,
    /// Whether it will not be visited any more, because it cannot be done here.
    given_up: bool,
    /// Visits that were skipped, those that warm up included.
    skipped: u32,
    /// Those of them that did not warm up.
    skipped_rounds: usize,
    /// Why the last of them was.
    why_skipped: Option<String>,
    /// By part of the case, in the order in which a visit gives them.
    series: Vec<Series>,
}

/// All samples of one part of a case.
struct Series {
    part: Option<Cow<'static, str>>,
    quantity: Quantity,
    batch: u64,
    /// One for each round counted so far, without samples where there were none.
    rounds: Vec<Vec<u64>>,
    /// Why this part cannot be had here, where it cannot.
    missing: Option<String>,
}

impl Series {
    /// The rounds that have samples.
    fn measured(&self) -> impl Iterator<Item = &Vec<u64>> {
        self.rounds.iter().filter(|round| !round.is_empty())
    }

    /// Whether a virtual clock has given the same figures each time.
    fn is_settled(&self) -> bool {
        let mut measured = self.measured();
        let first = measured.next();
        self.quantity.is_exact() && self.measured().count() >= EQUAL_ROUNDS && measured.all(|round| Some(round) == first)
    }

    fn outcome(self) -> Outcome {
        match self.missing {
            Some(reason) if self.rounds.is_empty() => Outcome::Skipped { reason },
            _ => {
                let summary = summarize(&self.rounds);
                let rounds = self.rounds.into_iter().map(|mut round| median(&mut round)).collect();
                Outcome::Measured(Measured { batch: self.batch, rounds, summary })
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
        Self { case, arm, quantity, batch: None, this: Results::default(), accepted: with_accepted.then(Results::default) }
    }

    /// Notes what a visit came to, in a round that has so many before it.
    fn note(&mut self, side: Side, visited: Result<Vec<Reading>, Fault>, warm_up: bool, before: usize) {
        let results = if side == Side::This { &mut self.this } else { self.accepted.get_or_insert_default() };
        match visited {
            Err(Fault::Failed(reason)) => results.ended = Some(Outcome::Failed { reason }),
            Err(Fault::OutOfMemory(reason)) => results.ended = Some(Outcome::OutOfMemory { reason }),
            Err(Fault::Skipped(reason)) => results.skip(reason, warm_up, self.quantity),
            Ok(readings) if !warm_up => results.add(readings, before),
            Ok(_) => results.can_be_done = true,
            Err(Fault::Interrupted) => {}
        }
    }

    fn is_settled(&self) -> bool {
        self.this.is_settled() && self.accepted.as_ref().is_none_or(Results::is_settled)
    }

    fn is_precise(&self, wanted: f64) -> bool {
        self.this.is_precise(wanted) && self.accepted.as_ref().is_none_or(|accepted| accepted.is_precise(wanted))
    }

    /// What it comes to: one entry a part, or the one that says why there are no figures.
    fn entries(self) -> Vec<Entry> {
        let (case, arm, first, hash) = (self.case, self.arm.to_string(), self.quantity, self.arm.hash(self.case));
        let accepted: Vec<_> = self.accepted.map(|results| results.outcomes(first)).unwrap_or_default();
        let entry = |(part, quantity, outcome): (Option<Cow<'static, str>>, Quantity, Outcome)| {
            let known = accepted.iter().position(|(other, kind, _)| (other, *kind) == (&part, quantity));
            // One that failed has a single outcome for all of its parts.
            let whole = || accepted.iter().position(|(.., outcome)| outcome.measured().is_none());
            let accepted = known.or_else(whole).map(|at| accepted[at].2.clone());
            Entry {
                group: part.map_or_else(|| case.group.clone(), |part| format!("{}: {part}", case.group)),
                point: case.point.clone(),
                arm: arm.clone(),
                quantity,
                hash: hash.clone(),
                outcome,
                accepted,
            }
        };
        self.this.outcomes(first).into_iter().map(entry).collect()
    }
}

impl Results {
    /// Takes what a visit measured in a round that has so many before it.
    fn add(&mut self, readings: Vec<Reading>, before: usize) {
        self.can_be_done = true;
        for Reading { part, quantity, batch, samples } in readings {
            let known = self.series.iter().position(|series| (&series.part, series.quantity) == (&part, quantity));
            let index = known.unwrap_or_else(|| {
                self.series.push(Series { part, quantity, batch, rounds: Vec::new(), missing: None });
                self.series.len() - 1
            });
            let series = &mut self.series[index];
            match samples {
                Ok(samples) => {
                    // Each round stands at its index, so that both builds' rounds can be put side by side.
                    series.rounds.resize(before, Vec::new());
                    series.rounds.push(samples);
                }
                Err(reason) => series.missing = Some(reason),
            }
        }
    }

    /// Notes a visit that was skipped.
    fn skip(&mut self, reason: String, warm_up: bool, quantity: Quantity) {
        self.skipped += 1;
        self.skipped_rounds += usize::from(!warm_up);
        self.why_skipped = Some(reason);
        self.given_up = !self.can_be_done && (self.skipped >= GIVE_UP || quantity.is_exact());
    }

    fn rounds(&self) -> u32 {
        self.series.iter().map(|series| u32::try_from(series.rounds.len()).unwrap_or(u32::MAX)).max().unwrap_or_default()
    }

    /// Whether further visits would say nothing new: it has failed or cannot be done, or a virtual clock has given the same figures each time.
    fn is_settled(&self) -> bool {
        self.ended.is_some() || self.given_up || (!self.series.is_empty() && self.series.iter().all(Series::is_settled))
    }

    fn is_precise(&self, wanted: f64) -> bool {
        let precise =
            |series: &Series| precision(&summarize(&series.rounds), series.measured().count()).is_some_and(|reached| reached <= wanted);
        self.is_settled() || (!self.series.is_empty() && self.series.iter().filter(|series| series.quantity.is_time()).all(precise))
    }

    /// One outcome a part, or the one that says why there are no figures.
    fn outcomes(self, first: Quantity) -> Vec<(Option<Cow<'static, str>>, Quantity, Outcome)> {
        if let Some(ended) = self.ended {
            return vec![(None, first, ended)];
        }
        let measured = self.series.iter().map(|series| series.measured().count()).max().unwrap_or_default();
        let why = self.why_skipped.unwrap_or_else(|| "interrupted".to_owned());
        if measured == 0 {
            return vec![(None, first, Outcome::Skipped { reason: why })];
        }
        let skipped = self.skipped_rounds;
        if skipped > measured {
            let reason = format!("skipped in {skipped} of {} rounds, the last time because of this: {why}", skipped + measured);
            return vec![(None, first, Outcome::Skipped { reason })];
        }
        self.series.into_iter().map(|series| (series.part.clone(), series.quantity, series.outcome())).collect()
    }
}

/// All entries: in the order of their first appearance, arms of one case next to each other.
fn entries(tasks: Vec<Task<'_>>) -> Vec<Entry> {
    let mut cases: Vec<Vec<Entry>> = Vec::new();
    for entry in tasks.into_iter().flat_map(Task::entries) {
        let same = |first: &Entry| (&first.group, &first.point, first.quantity) == (&entry.group, &entry.point, entry.quantity);
        match cases.iter_mut().find(|arms| arms.first().is_some_and(same)) {
            Some(arms) => arms.push(entry),
            None => cases.push(vec![entry]),
        }
    }
    cases.into_iter().flatten().collect()
}
