//! The loop: a suite and a workshop in, a record of the suite out.
//!
//! Rounds are outermost. Each round does every entry once, in an order drawn anew from the seed, so that what drifts on the machine hits all
//! alike. The first rounds warm up and are dropped, those on a virtual clock excepted, which has nothing to warm. It ends when every interval
//! is narrow enough, or when rounds or time are used up.
//!
//! A visit that was skipped in one round, as where others had the device's memory for a moment, is a round without samples of that entry: what
//! other rounds measured stays. Three rules keep that honest. A case that is skipped from the first visit on, three times, cannot be done
//! here, and is not tried for the rest of the night. An entry that was skipped in more rounds than it was measured in has no figures: those of
//! the lucky rounds would say something of luck. And one failure is a failure of the whole entry, whenever it comes: something is broken.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use harness_allocator::allocator::{AllocatorKind, AllocatorSpec, MemoryFraction};
use harness_allocator::device::Clock;
use harness_allocator::units::Nanos;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::clock::{Stopwatch, overhead_ps, yardstick_ps};
use super::drift::code_of;
use super::layout::Layout;
use super::measure::torch::TorchVisit;
use super::measure::{self, Fault, Reading, Visit};
use super::record::{Entry, EntryOutcome, Measured, Quantity, Shard, Stopped, SuiteRecord};
use super::suite::{Case, Pieces, Suite};
use super::summary::{median, precision, summarize};
use super::workshop::Workshop;

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

/// How far a suite is.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Which.
    pub suite: &'a Suite,
    /// What is done next.
    pub case: &'a Case,
    /// By whom.
    pub arm: Performer<'a>,
    /// Counted from 1, those that warm up included.
    pub round: u32,
    /// The share of the budget that is used up, from 0 to 1.
    pub used: f64,
}

/// Who does a case.
#[derive(Clone, Copy, Debug)]
pub enum Performer<'a> {
    /// An allocator of ours.
    Ours(&'a AllocatorSpec),
    /// PyTorch's own.
    Torch(&'a TorchArm),
}

impl Performer<'_> {
    /// Whose code is measured, in one word: arms of one allocator with other settings are one, and so is PyTorch.
    fn allocator(&self) -> &'static str {
        match self {
            Self::Ours(arm) => code_of(arm.kind()),
            Self::Torch(_) => "torch",
        }
    }
}

impl fmt::Display for Performer<'_> {
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

/// PyTorch with the settings of one of the suite's arms.
#[derive(Clone, Debug, PartialEq)]
pub struct TorchArm {
    /// As in records: `torch`, and behind it the arm that it stands beside, where that has settings.
    pub name: String,
    /// In the form of `PYTORCH_ALLOC_CONF`.
    pub settings: String,
    /// The arm of ours that does the same.
    pub ours: AllocatorSpec,
}

/// PyTorch as each arm of the suite that is its allocator; as it is by default where there is none.
#[must_use]
pub fn torch_arms(suite: &Suite) -> Vec<TorchArm> {
    let mut arms: Vec<TorchArm> = Vec::new();
    let default = AllocatorSpec::from(AllocatorKind::Caching);
    for ours in suite.arms.iter().filter(|arm| arm.kind().is_pytorchs()) {
        // A share of the device is what each arm is given anyway.
        let settings = ours.effective().filter(|config| config.memory_fraction == MemoryFraction::ALL).map(|config| config.to_string());
        if let Some(settings) = settings.filter(|settings| arms.iter().all(|other| other.settings != *settings)) {
            let name = if ours.does_the_same(&default) { "torch".to_owned() } else { format!("torch_{ours}") };
            arms.push(TorchArm { name, settings, ours: ours.clone() });
        }
    }
    if arms.is_empty() {
        arms.push(TorchArm { name: "torch".to_owned(), settings: String::new(), ours: default });
    }
    arms
}

/// Runs a suite.
pub fn run_suite(suite: &Suite, workshop: &mut dyn Workshop, terms: &Terms, mut watch: impl FnMut(Progress<'_>)) -> SuiteRecord {
    let overhead_ps = overhead_ps();
    let cases = cases_of(suite, terms.shard);
    let torches = if workshop.torches().is_some() { torch_arms(suite) } else { Vec::new() };
    let torches_of = |case: &Case| if measure::torch::can(&case.measure) { torches.as_slice() } else { &[] };
    let performers = |case| suite.arms.iter().map(Performer::Ours).chain(torches_of(case).iter().map(Performer::Torch));
    let tasks: Vec<Task<'_>> = cases.flat_map(|case| performers(case).map(move |arm| Task::new(case, arm))).collect();
    let allocators = tasks.iter().map(|task| (task.arm.to_string(), task.arm.allocator().to_owned())).collect();
    let budget = terms.budget.unwrap_or(suite.budget);
    let mut run = Run { suite, terms, workshop, tasks, overhead_ps, yardstick_ps: Vec::new(), began: Stopwatch::start(), budget, round: 0 };
    let stopped = run.rounds(&mut watch);
    SuiteRecord {
        name: suite.name.clone(),
        about: suite.about.clone(),
        hash: suite.hash.clone(),
        threshold: suite.threshold,
        rounds: run.tasks.iter().map(Task::rounds).max().unwrap_or_default(),
        stopped,
        overhead_ps,
        yardstick_ps: run.yardstick_ps,
        allocators,
        entries: entries(run.tasks, run.workshop.clock()),
    }
}

struct Run<'a> {
    suite: &'a Suite,
    terms: &'a Terms,
    workshop: &'a mut dyn Workshop,
    /// By case, arms of one case next to each other.
    tasks: Vec<Task<'a>>,
    overhead_ps: u64,
    yardstick_ps: Vec<u64>,
    began: Stopwatch,
    budget: Nanos,
    /// Rounds begun, those that warm up included.
    round: u32,
}

impl<'a> Run<'a> {
    /// Does rounds until there is a reason to stop.
    fn rounds(&mut self, watch: &mut impl FnMut(Progress<'_>)) -> Stopped {
        let clock = self.workshop.clock();
        if self.tasks.iter().any(|task| !is_virtual(task.quantity(clock))) {
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
        let mut yardsticks = vec![yardstick_ps()];
        let done = self.visits(watch, warm_up, &mut yardsticks);
        if !warm_up {
            self.yardstick_ps.extend(median(&mut yardsticks));
        }
        done
    }

    /// Does the visits of a round, and tells what the yardstick took after each behind what it took before them.
    fn visits(&mut self, watch: &mut impl FnMut(Progress<'_>), warm_up: bool, yardsticks: &mut Vec<u64>) -> Result<(), Fault> {
        let clock = self.workshop.clock();
        let mut order: Vec<usize> = (0..self.tasks.len()).collect();
        let mut salt = Pieces::default();
        salt.add(&self.suite.name);
        salt.add(&self.round.to_string());
        let mut rng = ChaCha8Rng::seed_from_u64(self.terms.seed ^ salt.hash());
        order.shuffle(&mut rng);
        for index in order {
            let used = self.began.elapsed_ns() as f64 / self.budget.0.max(1) as f64;
            let task = &mut self.tasks[index];
            if task.is_settled() || (warm_up && is_virtual(task.quantity(clock))) {
                continue;
            }
            watch(Progress { suite: self.suite, case: task.case, arm: task.arm, round: self.round, used: used.min(1.0) });
            let visited =
                Layout::drawn(&mut rng).within(|| visit(task, self.suite, self.overhead_ps, self.workshop, &self.terms.interrupt));
            let before = yardsticks.last().copied().unwrap_or(u64::MAX);
            let after = yardstick_ps();
            yardsticks.push(after);
            match visited {
                // What was done in the moment of the interruption may have been cut short.
                _ if self.terms.interrupt.load(Ordering::Relaxed) => return Err(Fault::Interrupted),
                Err(Fault::Interrupted) => return Err(Fault::Interrupted),
                Err(Fault::Failed(reason)) => task.failure = Some(reason),
                Err(Fault::Skipped(reason)) => task.skip(reason, warm_up, clock),
                Ok(_) if warm_up => task.can_be_done = true,
                // An interruption only ever makes it longer.
                Ok(readings) => task.add(readings, self.yardstick_ps.len(), before.min(after)),
            }
        }
        Ok(())
    }
}

/// Does a case once.
fn visit(
    task: &mut Task<'_>,
    suite: &Suite,
    overhead_ps: u64,
    workshop: &mut dyn Workshop,
    interrupt: &Arc<AtomicBool>,
) -> Result<Vec<Reading>, Fault> {
    let (case, memory) = (task.case, suite.memory);
    match task.arm {
        Performer::Torch(arm) => measure::torch::visit(TorchVisit { workshop, arm, suite: &suite.name, case, memory, interrupt }),
        Performer::Ours(arm) => {
            let mut visit = Visit { workshop, arm, memory, overhead_ps, batch: &mut task.batch, interrupt };
            measure::visit(&case.measure, &mut visit)
        }
    }
}

const fn is_virtual(quantity: Quantity) -> bool {
    matches!(quantity, Quantity::ModelTime | Quantity::Memory)
}

/// A case done by an arm: what is visited once a round.
struct Task<'a> {
    case: &'a Case,
    arm: Performer<'a>,
    /// See [`Visit::batch`].
    batch: Option<u64>,
    /// Why it is broken.
    failure: Option<String>,
    /// Whether a visit, of those that warm up also, was not skipped.
    can_be_done: bool,
    /// Whether it will not be visited any more, because it cannot be done here.
    given_up: bool,
    /// Visits that were skipped, those that warm up included, and those without them.
    skipped: (u32, u32),
    /// Why the last of them was.
    why_skipped: Option<String>,
    /// By part of the case, in the order in which a visit tells them.
    series: Vec<Series>,
}

/// All samples of one part of a case.
struct Series {
    part: Option<&'static str>,
    quantity: Quantity,
    batch: u64,
    /// One for each round counted so far, without samples where there were none.
    rounds: Vec<Vec<u64>>,
    /// Of host times: as in [`Measured`].
    yardstick_ps: Vec<u64>,
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
        is_virtual(self.quantity) && self.measured().count() >= EQUAL_ROUNDS && measured.all(|round| Some(round) == first)
    }
}

impl<'a> Task<'a> {
    const fn new(case: &'a Case, arm: Performer<'a>) -> Self {
        Self {
            case,
            arm,
            batch: None,
            failure: None,
            can_be_done: false,
            given_up: false,
            skipped: (0, 0),
            why_skipped: None,
            series: Vec::new(),
        }
    }

    const fn quantity(&self, clock: Clock) -> Quantity {
        match self.arm {
            Performer::Ours(_) => measure::quantity(&self.case.measure, clock),
            Performer::Torch(_) => measure::torch::quantity(&self.case.measure),
        }
    }

    /// Takes what a visit measured in a round that has so many before it, and the yardstick beside the visit.
    fn add(&mut self, readings: Vec<Reading>, before: usize, yardstick: u64) {
        self.can_be_done = true;
        for Reading { part, quantity, batch, samples } in readings {
            let known = self.series.iter().position(|series| (series.part, series.quantity) == (part, quantity));
            let index = known.unwrap_or_else(|| {
                self.series.push(Series { part, quantity, batch, rounds: Vec::new(), yardstick_ps: Vec::new(), missing: None });
                self.series.len() - 1
            });
            let series = &mut self.series[index];
            match samples {
                Ok(samples) => {
                    // Each round stands at its index, with the suite's yardstick of it.
                    series.rounds.resize(before, Vec::new());
                    series.rounds.push(samples);
                    if quantity == Quantity::HostTime {
                        series.yardstick_ps.resize(before, yardstick);
                        series.yardstick_ps.push(yardstick);
                    }
                }
                Err(reason) => series.missing = Some(reason),
            }
        }
    }

    /// Notes a visit that was skipped.
    fn skip(&mut self, reason: String, warm_up: bool, clock: Clock) {
        self.skipped.0 += 1;
        self.skipped.1 += u32::from(!warm_up);
        self.why_skipped = Some(reason);
        self.given_up = !self.can_be_done && (self.skipped.0 >= GIVE_UP || is_virtual(self.quantity(clock)));
    }

    fn rounds(&self) -> u32 {
        self.series.iter().map(|series| u32::try_from(series.rounds.len()).unwrap_or(u32::MAX)).max().unwrap_or_default()
    }

    /// Whether further visits would tell nothing new: it is broken or cannot be done, or a virtual clock has given the same figures each time.
    fn is_settled(&self) -> bool {
        self.failure.is_some() || self.given_up || (!self.series.is_empty() && self.series.iter().all(Series::is_settled))
    }

    fn is_precise(&self, wanted: f64) -> bool {
        let precise =
            |series: &Series| precision(&summarize(&series.rounds), series.measured().count()).is_some_and(|reached| reached <= wanted);
        self.is_settled() || (!self.series.is_empty() && self.series.iter().filter(|series| series.quantity.is_time()).all(precise))
    }

    /// What it comes to: one entry a part, or the one that says why there are no figures.
    fn entries(self, clock: Clock) -> Vec<Entry> {
        let (case, arm, quantity) = (self.case, self.arm.to_string(), self.quantity(clock));
        let entry = |part: Option<&str>, quantity, outcome| Entry {
            group: part.map_or_else(|| case.group.clone(), |part| format!("{}: {part}", case.group)),
            point: case.point.clone(),
            arm: arm.clone(),
            quantity,
            outcome,
        };
        let without = |outcome| vec![entry(None, quantity, outcome)];
        if let Some(reason) = self.failure {
            return without(EntryOutcome::Failed { reason });
        }
        let measured = self.series.iter().map(|series| series.measured().count()).max().unwrap_or_default();
        let why = self.why_skipped.unwrap_or_else(|| "interrupted".to_owned());
        if measured == 0 {
            return without(EntryOutcome::Skipped { reason: why });
        }
        let skipped = self.skipped.1 as usize;
        if skipped > measured {
            let reason = format!("skipped in {skipped} of {} rounds, the last time because of this: {why}", skipped + measured);
            return without(EntryOutcome::Skipped { reason });
        }
        let outcome = |batch, rounds: Vec<Vec<u64>>, yardstick_ps, missing| match missing {
            Some(reason) if rounds.is_empty() => EntryOutcome::Skipped { reason },
            _ => EntryOutcome::Measured(Measured { batch, summary: summarize(&rounds), rounds, yardstick_ps }),
        };
        let each = self.series.into_iter();
        each.map(|Series { part, quantity, batch, rounds, yardstick_ps, missing }| {
            entry(part, quantity, outcome(batch, rounds, yardstick_ps, missing))
        })
        .collect()
    }
}

/// All entries: in the order of their first appearance, arms of one case next to each other.
fn entries(tasks: Vec<Task<'_>>, clock: Clock) -> Vec<Entry> {
    let mut cases: Vec<Vec<Entry>> = Vec::new();
    for entry in tasks.into_iter().flat_map(|task| task.entries(clock)) {
        let same = |first: &Entry| (&first.group, &first.point, first.quantity) == (&entry.group, &entry.point, entry.quantity);
        match cases.iter_mut().find(|arms| arms.first().is_some_and(same)) {
            Some(arms) => arms.push(entry),
            None => cases.push(vec![entry]),
        }
    }
    cases.into_iter().flatten().collect()
}
