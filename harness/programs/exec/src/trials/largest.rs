//! [`LargestSearch`] finds the largest value of a parameter, such as the batch size, with which a
//! program fits into the memory of each GPU.
//!
//! Recordings of two runs show each request as a function of the value. Replays predict the largest
//! value from them, and two runs confirm it: one that fits, and one with the next value. If they do
//! not, the search goes on between the values that are known.
//!
//! The GPU with the most memory is first, so other GPUs need smaller values than were recorded. A
//! GPU with the lowest compute capability is next. If the run with its predicted value makes the
//! predicted requests, its next value needs no run, and neither do the GPUs between the two.

mod agreement;
mod memory_curve;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::str::FromStr;

use harness_allocator::{named_enum, units::Bytes};
use harness_gpu_settings::attempts::{Attempt, AttemptOutcome};
use harness_trace::program::{RecordedProgram, Replayed, Scaled};
use harness_trace::snapshot::Snapshot;
use serde::Serialize;

pub use self::memory_curve::{CategoryPeak, MemoryCurve, MemoryPoint};
use super::observed::{Observed, TrialEnd};
use super::runner::FirstRun;
use super::{Trial, each, replay};
use crate::doubts::Doubt;
use crate::torch_record::Caller;

/// The most values of a parameter.
const MOST_VALUES: u64 = 1 << 20;
/// The ratio of the value that is tried first and the smallest one, and the least of the first two.
const FIRST: f64 = 8.0;
/// The part of a value that is tried after that value did not fit.
const NEAR: f64 = 0.9;
/// The ratio of values from which a range is split by factors.
const FAR: f64 = 4.0;
/// The compute capability of Hopper GPUs.
const HOPPER: (u32, u32) = (9, 0);
/// PyTorch's workspace for a handle of cuBLAS on Hopper GPUs, and on GPUs before and after
/// (`CublasHandlePool.cpp` of PyTorch 2.11).
const WORKSPACE_OF_HOPPER: Bytes = Bytes::mib(32);
const WORKSPACE: Bytes = Bytes(8320 << 10);
/// The forms of [`Parameter`] in options.
const FORMS: &str = "expected NAME=FIRST..LAST, NAME=FIRST..LAST:STEP or NAME=VALUE,VALUE…, as in \
     `batch=1..4096`, `batch=8..4096:8` or `length=512,1024,2048`";

/// The forms of [`Lever`] in options.
const LEVERS: &str = "expected `NAME: ARGUMENTS`, as in `half: --half` or `bf16: DTYPE=bfloat16`; \
     variables of the environment come first, and a word `--` ends them";

/// A parameter of a command. `{NAME}` in the command's arguments stands for its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    /// At least one, in rising order.
    pub values: Vec<u64>,
}

impl Parameter {
    pub fn placeholder(&self) -> String {
        format!("{{{}}}", self.name)
    }

    pub fn is_in(&self, text: &str) -> bool {
        !places(text, &self.name).is_empty()
    }
}

impl FromStr for Parameter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_name = |name: &str| {
            !name.is_empty()
                && name
                    .chars()
                    .all(|c| c.is_alphanumeric() || c == '_' || c == '-')
        };
        let (name, values) = text
            .split_once('=')
            .filter(|(name, _)| is_name(name))
            .ok_or(FORMS)?;
        let number = |text: &str| text.trim().parse::<u64>().map_err(|_| FORMS.to_owned());
        let mut values: Vec<u64> = match values.split_once("..") {
            Some((first, rest)) => {
                let (last, step) = rest.split_once(':').unwrap_or((rest, "1"));
                let [first, last, step] = [number(first)?, number(last)?, number(step)?];
                if step == 0 || last < first {
                    return Err(format!("the range `{values}` has no values; {FORMS}"));
                }
                if (last - first) / step >= MOST_VALUES {
                    return Err(format!(
                        "the range `{values}` has more than {MOST_VALUES} values: give a \
                         larger step"
                    ));
                }
                (0..=(last - first) / step)
                    .map(|index| first + index * step)
                    .collect()
            }
            None => values.split(',').map(number).collect::<Result<_, _>>()?,
        };
        values.sort_unstable();
        values.dedup();
        Ok(Self {
            name: name.to_owned(),
            values,
        })
    }
}

/// Returns where the placeholders of a parameter begin. `${batch}` is a variable of a shell or of
/// OmegaConf.
fn places(text: &str, name: &str) -> Vec<usize> {
    let placeholder = format!("{{{name}}}");
    let found = text.match_indices(&placeholder).map(|(at, _)| at);
    found.filter(|at| !text[..*at].ends_with('$')).collect()
}

/// Replaces the placeholder of each parameter by its value.
pub fn filled_in(text: &str, values: &BTreeMap<String, u64>) -> String {
    let mut text = text.to_owned();
    for (name, value) in values {
        for at in places(&text, name).into_iter().rev() {
            text.replace_range(at..at + name.len() + 2, &value.to_string());
        }
    }
    text
}

/// Replaces the placeholder of each parameter by its value.
pub fn with_values(command: &[OsString], values: &BTreeMap<String, u64>) -> Vec<OsString> {
    let replaced = |argument: &OsString| {
        let text = argument.to_str().map(|text| filled_in(text, values).into());
        text.unwrap_or_else(|| argument.clone())
    };
    command.iter().map(replaced).collect()
}

/// What may make larger values fit: arguments after the command, and variables of its environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lever {
    pub name: String,
    pub variables: Vec<String>,
    pub arguments: Vec<String>,
}

impl FromStr for Lever {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, words) = text.split_once(": ").ok_or(LEVERS)?;
        let (name, words) = (name.trim(), words.split_whitespace());
        let is_variable = |word: &&str| {
            let name = word.split_once('=').map_or("", |(name, _)| name);
            name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
        };
        let words: Vec<&str> = words.collect();
        let count = words.iter().take_while(|word| is_variable(word)).count();
        let (variables, arguments) = words.split_at(count);
        let arguments = arguments.strip_prefix(&["--"]).unwrap_or(arguments);
        if name.is_empty() || (variables.is_empty() && arguments.is_empty()) {
            return Err(LEVERS.to_owned());
        }
        let [variables, arguments] =
            [variables, arguments].map(|words| words.iter().map(|word| (*word).into()).collect());
        Ok(Self {
            name: name.to_owned(),
            variables,
            arguments,
        })
    }
}

impl Lever {
    pub fn added_to(&self, command: Vec<OsString>) -> Vec<OsString> {
        let env = Some("env").filter(|_| !self.variables.is_empty());
        let variables = self.variables.iter().map(OsString::from);
        let arguments = self.arguments.iter().map(OsString::from);
        env.map(OsString::from)
            .into_iter()
            .chain(variables)
            .chain(command)
            .chain(arguments)
            .collect()
    }
}

/// A GPU, settings of the allocator, and values of the other parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct LargestCase {
    pub gpu: String,
    /// Its compute capability and number of multiprocessors, on which libraries' requests depend.
    pub kind: (u32, u32, u32),
    pub others: BTreeMap<String, u64>,
    /// What is added to the command, if anything.
    pub lever: Option<Lever>,
    pub trial: Trial,
}

impl LargestCase {
    /// Returns whether a program makes the same requests in both cases, unless it looks at the
    /// GPU.
    fn is_like(&self, other: &Self) -> bool {
        self.kind == other.kind && self.has_command_of(other)
    }

    /// Returns whether a value gives the same command in both cases.
    fn has_command_of(&self, other: &Self) -> bool {
        (&self.others, &self.lever) == (&other.others, &other.lever)
    }

    /// Returns the command of this case with these values. The lever's words contain placeholders
    /// too.
    pub fn command(&self, command: &[OsString], values: &BTreeMap<String, u64>) -> Vec<OsString> {
        match &self.lever {
            Some(lever) => with_values(&lever.added_to(command.to_vec()), values),
            None => with_values(command, values),
        }
    }

    /// Returns the values of all parameters.
    pub fn values(&self, parameter: &str, value: u64) -> BTreeMap<String, u64> {
        let mut values = self.others.clone();
        values.insert(parameter.to_owned(), value);
        values
    }

    fn without_lever(&self) -> Self {
        Self {
            lever: None,
            ..self.clone()
        }
    }

    const fn capability(&self) -> (u32, u32) {
        (self.kind.0, self.kind.1)
    }
}

named_enum! {
    /// What shows the largest value of a row.
    #[derive(Serialize)]
    #[serde(rename_all = "kebab-case")]
    Evidence {
        /// Runs on this GPU with this value and the next one.
        Confirmed = "confirmed",
        /// A run on this GPU with this value, which made another GPU's requests, and a replay of
        /// these with the next value.
        NextPredicted = "next predicted",
        /// Replays of recordings of other rows.
        Predicted = "predicted",
        /// Nothing: the search ended early.
        Failed = "failed",
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LargestReport {
    pub parameter: String,
    pub smallest: u64,
    pub largest: u64,
    pub rows: Vec<LargestRow>,
    /// One for each command that replays predict, if runs record call stacks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub curves: Vec<MemoryCurve>,
    /// The number of runs, of all rows together.
    pub runs: usize,
    pub is_interrupted: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LargestRow {
    pub gpu: String,
    pub memory: u64,
    /// As in PYTORCH_ALLOC_CONF; `None` for the environment's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alloc_conf: Option<String>,
    /// The values of the other parameters.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub others: BTreeMap<String, u64>,
    /// The name of the lever; `None` for the command itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lever: Option<String>,
    /// How much less a lever's peak is, with the largest value of the command itself. `None` if a
    /// peak is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saves: Option<i64>,
    /// `None` if no value fits.
    pub largest: Option<u64>,
    /// Peak bytes that one process held with this value.
    pub peak_reserved: Option<u64>,
    /// The next value, which does not fit; `None` if every value fits.
    pub next: Option<Next>,
    pub basis: Evidence,
    pub runs: usize,
    /// `true` if a run refuted a prediction, so that more runs were needed.
    pub is_refuted: bool,
    /// A value that did not fit although a larger one did.
    pub exception: Option<u64>,
    /// Why the search ended early.
    pub failure: Option<String>,
    /// `true` if runs of its command with several values made the same requests.
    pub has_no_effect: bool,
    /// Why its figures may differ from those on a GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub doubts: Vec<Doubt>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Next {
    pub value: u64,
    /// The bytes that the device lacked for the first failed request; `None` if no run shows it.
    pub lacks: Option<u64>,
    /// The line of the program that made the request.
    pub location: Option<String>,
}

/// Runs a case with a value. Calls may run in parallel. Returns `None` if the user interrupted it.
pub type RunCase<'a, E> = dyn Fn(&LargestCase, u64) -> Result<Option<FirstRun>, E> + Sync + 'a;

/// A search. `E` says why the program cannot be run.
pub struct LargestSearch<'a, E> {
    pub parameter: &'a Parameter,
    pub cases: &'a [LargestCase],
    pub run: &'a RunCase<'a, E>,
    pub progress: &'a (dyn Fn() + Sync),
    pub context_overhead: Bytes,
    /// `true` if libraries take memory, which recordings do not contain.
    pub memory_of_libraries: bool,
    /// `true` to accept out of memory errors that the program survives.
    pub allow_ooms: bool,
    pub jobs: usize,
}

/// What a run showed about a value.
enum Tried {
    Fits {
        peak_reserved: Bytes,
    },
    TooLarge {
        lacks: Option<Bytes>,
        location: Option<String>,
    },
}

/// The values that were run, by their index.
#[derive(Default)]
struct Known(BTreeMap<usize, Tried>);

impl Known {
    fn fits(&self, index: usize) -> bool {
        matches!(self.0.get(&index), Some(Tried::Fits { .. }))
    }

    /// Returns the indices from which the answer is unknown: all values below the first are taken
    /// to fit, and that at the second, if there is one, does not.
    fn open(&self, count: usize) -> (usize, usize) {
        let fitting = self.0.keys().rev().find(|index| self.fits(**index));
        let low = fitting.map_or(0, |index| index + 1);
        let mut above = self.0.range(low..);
        (low, above.next().map_or(count, |(index, _)| *index))
    }

    /// Returns whether runs contradict this prediction.
    fn refutes(&self, fitting: usize) -> bool {
        let below = fitting.checked_sub(1).and_then(|index| self.0.get(&index));
        self.fits(fitting) || matches!(below, Some(Tried::TooLarge { .. }))
    }

    /// Returns a value that does not fit below one that does.
    fn exception(&self) -> Option<usize> {
        let (low, _) = self.open(usize::MAX);
        let below = self.0.range(..low).map(|(index, _)| *index);
        below.rev().find(|index| !self.fits(*index))
    }
}

/// The requests of cases that are alike.
struct Model {
    of: LargestCase,
    requests: Scaled,
    /// Those of its recordings, by value, if they have call stacks.
    snapshots: BTreeMap<u64, Snapshot>,
    /// `false` if the program may request what it finds free.
    is_usable: bool,
    /// `true` after runs have confirmed a prediction and its exact peak.
    is_confirmed: bool,
    /// `true` if a confirmed model of another GPU explains all its recordings, up to small sizes
    /// and workspaces of cuBLAS.
    is_of_another: bool,
    /// `true` if runs contradict one of its predictions: values between recordings may have other
    /// requests.
    is_refuted: bool,
    /// `true` if runs contradict a prediction of more recordings than a line needs.
    is_irregular: bool,
    /// Those of its runs.
    doubts: Vec<Doubt>,
}

impl Model {
    fn refuted_on(&mut self, case: &LargestCase) {
        self.is_refuted |= self.of.is_like(case);
        self.is_irregular |= self.of.is_like(case) && self.requests.len() > 2;
    }
}

/// What replays predict.
#[derive(Clone, Copy)]
struct Guess {
    /// How many values fit.
    fitting: usize,
    /// The peak of the largest value that fits.
    peak_reserved: Option<Bytes>,
    /// The index of the model.
    model: usize,
}

impl<E: Send> LargestSearch<'_, E> {
    /// Searches each case. Rows that follow an interrupt are missing.
    pub fn report(&self) -> Result<LargestReport, E> {
        let values = &self.parameter.values;
        let mut report = LargestReport {
            parameter: self.parameter.name.clone(),
            smallest: values[0],
            largest: values[values.len() - 1],
            rows: Vec::new(),
            curves: Vec::new(),
            runs: 0,
            is_interrupted: false,
        };
        let mut models: Vec<Model> = Vec::new();
        // Ranks of parallel runs would meet at one port.
        let mut jobs = 1;
        let mut rows: Vec<Option<LargestRow>> = self.cases.iter().map(|_| None).collect();
        for index in self.order() {
            let case = &self.cases[index];
            let base = self.base(case, &rows);
            let mut row = self.row(case, base.map(|(at, _)| at), &mut models, &mut jobs)?;
            report.is_interrupted = row.is_none();
            if let (Some((row, at_base)), Some((_, Some(peak)))) = (&mut row, base) {
                let own = at_base.or_else(|| self.peak(case, &models, base?.0));
                row.saves = own.map(|own| peak as i64 - own.0 as i64);
            }
            let row = row.map(|(row, _)| row);
            rows[index] = row;
            if report.is_interrupted {
                break;
            }
        }
        let is_constant = |model: &Model| model.is_usable && model.requests.is_constant();
        for (row, case) in rows.iter_mut().zip(self.cases) {
            let has_no_effect = |model: &Model| model.of.has_command_of(case) && is_constant(model);
            if let Some(row) = row {
                row.has_no_effect |= models.iter().any(has_no_effect);
            }
        }
        report.curves = self.curves(&models, &rows);
        report.rows = rows.into_iter().flatten().collect();
        let is_of_group = |one: &LargestRow, other: &LargestRow| {
            (&one.gpu, &one.alloc_conf, &one.others)
                == (&other.gpu, &other.alloc_conf, &other.others)
        };
        for group in report.rows.chunk_by_mut(is_of_group) {
            group.sort_by_key(|row| (row.lever.is_some(), Reverse(row.saves)));
        }
        report.runs = report.rows.iter().map(|row| row.runs).sum();
        Ok(report)
    }

    /// Predicts the memory of each command, up to the largest value that fits on a GPU.
    fn curves(&self, models: &[Model], rows: &[Option<LargestRow>]) -> Vec<MemoryCurve> {
        let curve = |(index, case): (usize, &LargestCase)| {
            if self.cases[..index].iter().any(|at| at.has_command_of(case)) {
                return None;
            }
            let has_curve = |model: &&Model| {
                let of_command = model.of.has_command_of(case);
                of_command && model.is_usable && !model.snapshots.is_empty()
            };
            let model = models.iter().find(has_curve)?;
            let of_command = self.cases.iter().zip(rows);
            let of_command = of_command.filter(|(at, _)| at.has_command_of(case));
            let largest = of_command
                .clone()
                .filter_map(|(_, row)| row.as_ref()?.largest);
            let largest = largest.max()?;
            let trial = Trial {
                memory: of_command.map(|(at, _)| at.trial.memory).max()?,
                ..model.of.trial.clone()
            };
            let values = &self.parameter.values;
            let values = &values[..values.partition_point(|value| *value <= largest)];
            let point = |value: u64| {
                let program = model.requests.at(value)?;
                let setup = replay::setup(&program, &trial, self.context_overhead)?;
                memory_curve::point(&model.requests, &model.snapshots, value, &setup)
            };
            let points = memory_curve::spread(values).into_iter().filter_map(point);
            Some(MemoryCurve {
                gpu: model.of.gpu.clone(),
                others: case.others.clone(),
                lever: case.lever.as_ref().map(|lever| lever.name.clone()),
                points: points.collect(),
            })
        };
        let curves = self.cases.iter().enumerate().filter_map(curve);
        curves.filter(|curve| !curve.points.is_empty()).collect()
    }

    /// Orders cases with the same other parameters: first the most memory, then the lowest and the
    /// highest compute capability, then the rest by memory.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.cases.len()).collect();
        order.sort_by_key(|index| {
            let case = &self.cases[*index];
            let place = self.cases.iter().position(|at| at.has_command_of(case));
            (place, Reverse(case.trial.memory))
        });
        let kind = |index: &usize| self.cases[*index].kind;
        for group in
            order.chunk_by_mut(|one, other| self.cases[*one].has_command_of(&self.cases[*other]))
        {
            let rest = group.get_mut(1..).unwrap_or_default();
            if let Some(lowest) = (0..rest.len()).min_by_key(|at| kind(&rest[*at])) {
                rest[..=lowest].rotate_right(1);
            }
            let rest = rest.get_mut(1..).unwrap_or_default();
            let highest = (0..rest.len()).max_by_key(|at| (kind(&rest[*at]), Reverse(*at)));
            if let Some(highest) = highest {
                rest[..=highest].rotate_right(1);
            }
        }
        order
    }

    /// Returns the index of the largest value of the command without the lever, and its peak.
    fn base(
        &self,
        case: &LargestCase,
        rows: &[Option<LargestRow>],
    ) -> Option<(usize, Option<u64>)> {
        case.lever.as_ref()?;
        let is_base = |at: &&LargestCase| at.lever.is_none() && **at == case.without_lever();
        let at = self.cases.iter().position(|at| is_base(&at))?;
        let row = rows[at].as_ref()?;
        let index = self.parameter.values.binary_search(&row.largest?).ok()?;
        Some((index, row.peak_reserved))
    }

    /// Also returns the peak with the value `base`, if that ran. Returns `None` if the user
    /// interrupted.
    fn row(
        &self,
        case: &LargestCase,
        base: Option<usize>,
        models: &mut Vec<Model>,
        jobs: &mut usize,
    ) -> Result<Option<(LargestRow, Option<Bytes>)>, E> {
        if let Some(row) = self.predicted(case, models) {
            return Ok(Some((row, None)));
        }
        let values = &self.parameter.values;
        let mut row = self.empty_row(case);
        let mut known = Known::default();
        let mut foretold = None; // a prediction that was right
        let mut requests = BTreeSet::new(); // of each run
        loop {
            let (low, high) = known.open(values.len());
            if low >= high {
                break;
            }
            let guess = self.boundary(case, models);
            if let Some(guess) = guess.filter(|guess| known.refutes(guess.fitting)) {
                models[guess.model].refuted_on(case);
            }
            if let Some(guess) = guess.filter(|guess| self.is_settled(case, models, &known, guess))
            {
                row.basis = Evidence::NextPredicted;
                confirm(&mut models[guess.model]);
                break;
            }
            let tried = self.next((case, base), models, &known, guess);
            let run = |index: &usize| (self.run)(case, values[*index]);
            let runs = each(*jobs, &tried, self.progress, run)?;
            let meets_at_port = runs.iter().flatten().any(|run| run.observed.port.is_some());
            *jobs = if meets_at_port { 1 } else { self.jobs };
            row.runs += tried.len();
            for (index, run) in tried.iter().copied().zip(runs) {
                let Some(run) = run else { return Ok(None) };
                Doubt::add(&mut row.doubts, &run.observed.doubts);
                requests.insert(own_requests(&run.observed));
                match self.judge(case, &run.observed) {
                    Ok(outcome) => known.0.insert(index, outcome),
                    Err(why) => {
                        let name = &self.parameter.name;
                        row.failure = Some(format!("with {name} {} it {why}", values[index]));
                        row.basis = Evidence::Failed;
                        return Ok(Some((row, None)));
                    }
                };
                let is_predictable = !self.memory_of_libraries;
                learn(models, case, (values[index], run), is_predictable);
            }
            let Some(guess) = guess else { continue };
            row.is_refuted |= known.refutes(guess.fitting) && models[guess.model].of.is_like(case);
            let is_closed = known.open(values.len()) == (guess.fitting, guess.fitting);
            if agreement::is_met(&guess, &known, &tried) {
                foretold = Some(guess);
            }
            let own = models.iter().position(|model| model.of.is_like(case));
            if let (Some(met), Some(own)) = (foretold, own)
                && (is_closed && met.fitting == guess.fitting)
                && (met.model == own || models[own].is_of_another)
            {
                confirm(&mut models[own]);
            }
        }
        self.fill(&mut row, &known);
        row.has_no_effect = row.runs > 1 && requests.len() == 1 && !requests.contains(&None);
        Ok(Some((row, base.and_then(|base| peak_at(&known, base)))))
    }

    /// Returns whether a run on this GPU fits as predicted, and the next value cannot fit: the run
    /// made the requests that another GPU predicts, up to small sizes and workspaces of cuBLAS, and
    /// runs of that GPU confirmed its prediction.
    fn is_settled(
        &self,
        case: &LargestCase,
        models: &[Model],
        known: &Known,
        guess: &Guess,
    ) -> bool {
        let (low, high) = known.open(self.parameter.values.len());
        let model = &models[guess.model];
        let is_predicted = model.of.is_like(case) && model.is_of_another;
        has_confirmed(models, case)
            && (low == guess.fitting && low < high)
            && is_predicted
            && has_peak(known, guess)
    }

    fn empty_row(&self, case: &LargestCase) -> LargestRow {
        LargestRow {
            gpu: case.gpu.clone(),
            memory: case.trial.memory.0,
            alloc_conf: case.trial.alloc_conf.clone(),
            others: case.others.clone(),
            lever: case.lever.as_ref().map(|lever| lever.name.clone()),
            saves: None,
            largest: None,
            peak_reserved: None,
            next: None,
            basis: Evidence::Confirmed,
            runs: 0,
            is_refuted: false,
            exception: None,
            failure: None,
            has_no_effect: false,
            doubts: Vec::new(),
        }
    }

    /// Enters the results of the runs.
    fn fill(&self, row: &mut LargestRow, known: &Known) {
        let values = &self.parameter.values;
        let (low, _) = known.open(values.len());
        if let Some(at) = low.checked_sub(1) {
            row.largest = Some(values[at]);
            row.peak_reserved = peak_at(known, at).map(|peak| peak.0);
        }
        row.next = values.get(low).map(|value| match known.0.get(&low) {
            Some(Tried::TooLarge { lacks, location }) => Next {
                value: *value,
                lacks: lacks.map(|lacks| lacks.0),
                location: location.clone(),
            },
            _ => Next {
                value: *value,
                ..Next::default()
            },
        });
        row.exception = known.exception().map(|index| values[index]);
    }

    /// Guesses from the requests of a case that is like this one, or at least of one with the same
    /// other parameters.
    fn boundary(&self, case: &LargestCase, models: &[Model]) -> Option<Guess> {
        let mut order: Vec<usize> = (0..models.len())
            .filter(|index| models[*index].of.has_command_of(case))
            .collect();
        order.sort_by_key(|index| {
            let of = &models[*index].of;
            (!of.is_like(case), is_hopper(of) != is_hopper(case))
        });
        order
            .into_iter()
            .find_map(|index| self.guess(case, models, index))
    }

    fn replay(&self, case: &LargestCase, model: &Model, index: usize) -> Option<Replayed> {
        let is_replaced = is_hopper(case) && !is_hopper(&model.of);
        let on_this_gpu = |size: Bytes| match size {
            WORKSPACE if is_replaced => WORKSPACE_OF_HOPPER,
            size => size,
        };
        let value = self.parameter.values[index];
        let program = model.requests.at_with(value, on_this_gpu)?;
        let setup = replay::setup(&program, &case.trial, self.context_overhead)?;
        program.prepare().ok()?.replay(&setup).ok()
    }

    fn guess(&self, case: &LargestCase, models: &[Model], index: usize) -> Option<Guess> {
        let model = &models[index];
        if !model.is_usable {
            return None;
        }
        let values = &self.parameter.values;
        let replay = |index: usize| self.replay(case, model, index);
        let fits = |index: usize| replay(index).is_some_and(|run| run.oom.is_none());
        let smallest = model.requests.smallest()?;
        let smallest = values.binary_search(&smallest).ok()?;
        let (mut fitting, mut too_many) = match replay(smallest)?.oom {
            None => (smallest + 1, values.len()),
            Some(_) => (0, smallest),
        };
        while fitting < too_many {
            let middle = fitting.midpoint(too_many);
            if fits(middle) {
                fitting = middle + 1;
            } else {
                too_many = middle;
            }
        }
        let peak = fitting.checked_sub(1).and_then(replay);
        let reserved = |run: Replayed| Bytes(run.stats.reserved_bytes.all.peak);
        Some(Guess {
            fitting,
            peak_reserved: peak.map(reserved),
            model: index,
        })
    }

    /// Chooses values to run: a side of the prediction, first the lower one; without a prediction,
    /// a small one, one that fits if memory grows at most with the square of the value, multiples
    /// of the largest that fits, or parts of the rest.
    fn next(
        &self,
        (case, base): (&LargestCase, Option<usize>),
        models: &[Model],
        known: &Known,
        guess: Option<Guess>,
    ) -> Vec<usize> {
        let values = &self.parameter.values;
        let (low, high) = known.open(values.len());
        let is_open = |index: &usize| (low..high).contains(index);
        if let Some(Guess { fitting, .. }) = guess {
            let sides = [fitting.checked_sub(1), Some(fitting)];
            // If the first run refutes the prediction, the second one would be in vain.
            if let Some(side) = sides.into_iter().flatten().find(is_open) {
                return vec![side];
            }
        }
        // After the first guess from another GPU.
        let is_near =
            known.0.len() == 1 && guess.is_some_and(|guess| !models[guess.model].of.is_like(case));
        let jobs = match guess {
            None if known.0.len() > 2 => self.jobs,
            _ => 1,
        };
        // Sizes can grow with the square of the value, so parts of a wide range are factors.
        let at = |value: f64| {
            let at = values.partition_point(|other| (*other as f64) < value);
            at.clamp(low, high - 1)
        };
        let least = values[low.saturating_sub(1)].max(1) as f64;
        let only = peak_at(known, low.saturating_sub(1)).filter(|_| known.0.len() == 1);
        let mut tried: Vec<usize> = if known.0.is_empty() {
            // Small values have other requests, as if a kernel splits its work.
            let is_wide = values[high - 1] as f64 >= least * FIRST * FIRST;
            let first = if is_wide { at(least * FIRST) } else { 0 };
            vec![base.unwrap_or(first)]
        } else if let (Some(peak), true) = (only, high == values.len()) {
            // Recordings near the largest value predict it better.
            let times = (case.trial.memory.0 as f64 / peak.0.max(1) as f64).sqrt();
            let below = values.partition_point(|other| (*other as f64) < least / FIRST);
            match low - 1 {
                0 => vec![at(least * FIRST.max(times))],
                _ if times >= 2.0 => vec![at(least * times)],
                first => vec![below.min(first - 1)],
            }
        } else if high == values.len() {
            (1..=jobs as i32)
                .map(|power| at(least * 2_f64.powi(power)))
                .collect()
        } else if is_near && low == 0 {
            // A GPU with a larger workspace: a little less shows how much.
            vec![at(NEAR * values[high] as f64)]
        } else {
            let most = values[high] as f64;
            let parts = jobs.min(high - low) + 1;
            let part = |part: usize| {
                let part = part as f64 / parts as f64;
                if most > FAR * least {
                    at(least * (most / least).powf(part))
                } else {
                    low + ((high - low) as f64 * part) as usize
                }
            };
            (1..parts).map(part).collect()
        };
        tried.dedup();
        tried
    }

    /// Returns what a run shows, or how it failed for another reason; the text follows "it".
    fn judge(&self, case: &LargestCase, run: &Observed) -> Result<Tried, String> {
        let last = || match run.error.as_ref().or(run.last_lines.last()) {
            Some(line) => format!(": {line}"),
            None => String::new(),
        };
        let is_refused = |made: &Attempt| made.outcome == AttemptOutcome::Refused;
        // A program that calls CUDA itself has no errors of a library.
        let is_refused_itself =
            run.caller == Caller::Program && run.attempts.iter().any(is_refused);
        let has_oom = run.ooms > Some(0) || run.ended_out_of_memory || is_refused_itself;
        let too_large = || Tried::TooLarge {
            lacks: self.lacking(case, run),
            location: run
                .errors
                .first()
                .and_then(|error| error.frames.first())
                .map(crate::errors::ErrorFrame::short),
        };
        match run.ending {
            TrialEnd::By(end) if end.exit_code() == 0 => match &run.unreported {
                Some(unreported) if !self.allow_ooms => Err(format!("is unknown: {unreported}")),
                _ if run.attempts.is_empty() => Err("allocates no device memory".to_owned()),
                _ if has_oom && !self.allow_ooms => Ok(too_large()),
                _ if run.ooms.is_none() && !self.allow_ooms => Err(
                    "is unknown: a library of the program does not report out-of-memory errors \
                     that the program survives; `--allow-ooms` accepts them"
                        .to_owned(),
                ),
                _ => Ok(Tried::Fits {
                    peak_reserved: run.peak_reserved,
                }),
            },
            TrialEnd::By(_) if has_oom && (run.ended_out_of_memory || run.error.is_none()) => {
                Ok(too_large())
            }
            TrialEnd::Hang if has_oom => Ok(too_large()),
            TrialEnd::By(end) => Err(format!("ends with exit code {}{}", end.exit_code(), last())),
            TrialEnd::Hang => Err("exceeds its time limit".to_owned()),
        }
    }

    /// Returns how much memory the device lacked at the first out of memory error. `None` if other
    /// processes or libraries hold memory too.
    fn lacking(&self, case: &LargestCase, run: &Observed) -> Option<Bytes> {
        if run.processes > 1 || self.memory_of_libraries {
            return None;
        }
        let before = run.errors.first().map_or(usize::MAX, |error| {
            usize::try_from(error.attempts).unwrap_or(usize::MAX)
        });
        let made = run
            .attempts
            .iter()
            .take(before)
            .rfind(|made| made.outcome == AttemptOutcome::Refused)?;
        let free = case
            .trial
            .memory
            .saturating_sub(self.context_overhead)
            .saturating_sub(made.held);
        Some(made.size.saturating_sub(free)).filter(|lacking| *lacking > Bytes::ZERO)
    }
}

/// The requests to the driver of a program that calls CUDA itself. `None` for a library, whose
/// requests to the driver do not show those of the program.
fn own_requests(run: &Observed) -> Option<Vec<Bytes>> {
    (run.caller == Caller::Program).then(|| run.attempts.iter().map(|made| made.size).collect())
}

fn peak_at(known: &Known, index: usize) -> Option<Bytes> {
    match known.0.get(&index) {
        Some(Tried::Fits { peak_reserved }) => Some(*peak_reserved),
        _ => None,
    }
}

fn is_hopper(case: &LargestCase) -> bool {
    case.capability() == HOPPER
}

fn has_peak(known: &Known, guess: &Guess) -> bool {
    let at = guess.fitting.checked_sub(1);
    guess.peak_reserved == at.and_then(|at| peak_at(known, at))
}

/// Returns whether runs confirmed a prediction for another GPU.
fn has_confirmed(models: &[Model], case: &LargestCase) -> bool {
    let is_base = |model: &Model| {
        model.is_confirmed && model.of.has_command_of(case) && !model.of.is_like(case)
    };
    models.iter().any(is_base)
}

/// Adds what a run requested to the model of its case.
fn learn(
    models: &mut Vec<Model>,
    case: &LargestCase,
    (value, run): (u64, FirstRun),
    is_predictable: bool,
) {
    let Some(recorded) = run.recorded else { return };
    let own = models.iter().position(|model| model.of.is_like(case));
    let index = own.unwrap_or(models.len());
    if own.is_none() {
        models.push(Model {
            of: case.clone(),
            requests: Scaled::default(),
            snapshots: BTreeMap::new(),
            is_usable: true,
            is_confirmed: false,
            is_of_another: false,
            is_refuted: false,
            is_irregular: false,
            doubts: Vec::new(),
        });
    }
    Doubt::add(&mut models[index].doubts, &run.observed.doubts);
    // PyTorch reads the amount of free memory for the text of an out-of-memory error.
    let adapts = run.observed.reads_free_memory && run.observed.ooms == Some(0);
    models[index].is_usable &= !adapts && is_predictable;
    // Failed runs do not show all requests, and other settings give other recordings.
    let is_comparable = models[index].of.trial.alloc_conf == case.trial.alloc_conf;
    let Some(program) = recorded.ok().filter(|_| is_comparable) else {
        return;
    };
    let shifted = Some(&models[..index])
        .filter(|_| models[index].requests.is_empty())
        .and_then(|others| shifted(others, case, (value, &program)));
    let model = &mut models[index];
    match shifted {
        Some((requests, is_confirmed, is_refuted)) => {
            model.requests = requests;
            model.is_of_another = is_confirmed;
            model.is_refuted = is_refuted;
        }
        None => {
            model.is_of_another &= model.requests.explains(value, &program);
            model.requests.add(value, program);
        }
    }
    model
        .snapshots
        .extend(run.snapshot.map(|snapshot| (value, snapshot)));
}

/// Returns the requests of another GPU if only small sizes and workspaces of cuBLAS differ from
/// this recording, and whether runs confirmed or refuted its predictions.
fn shifted(
    models: &[Model],
    case: &LargestCase,
    (value, program): (u64, &RecordedProgram),
) -> Option<(Scaled, bool, bool)> {
    let is_similar = |model: &&Model| model.is_usable && model.of.has_command_of(case);
    let mut similar: Vec<&Model> = models.iter().rev().filter(is_similar).collect();
    similar.sort_by_key(|model| !model.is_confirmed);
    similar.into_iter().find_map(|model| {
        let workspaces = [WORKSPACE, WORKSPACE_OF_HOPPER];
        let requests = model.requests.shifted(value, program, &workspaces)?;
        Some((requests, model.is_confirmed, model.is_refuted))
    })
}

/// Marks a model whose prediction was right.
const fn confirm(model: &mut Model) {
    model.is_confirmed |= !model.is_irregular;
}

#[cfg(test)]
mod tests;
