use std::{fmt, ops::RangeInclusive};

use harness_allocator::{stats::StatKey, units::Bytes};
use harness_language::error::{Problem, choices, did_you_mean};
use harness_language::expression::{
    self, Dimension, ExpressionError, ResolvedName, Unit, Unresolved, Value,
};
use harness_language::located::{Located, Position};
use harness_language::text::{AmountText, CountText, ExpressionText, not_zero, out_of_bounds};

use super::{Checker, Parameters, names::Id};
use crate::metric::{
    Account, Amount, Expectation, Expression, GrowthSite, Metric, ProcessName, ProgramName,
    RankFigure, ReportKey,
};

const GROWTH: &str = "growth";

impl Checker<'_> {
    pub(crate) fn amount(&self, text: &AmountText) -> Result<Amount, Problem> {
        let resolve = |name: &str| match name.starts_with(GROWTH) {
            true => Err((
                format!("`{name}` works in expectations only"),
                "use a `measure` and the difference".to_owned(),
            )),
            false => self.resolve(name),
        };
        expression::parse_amount(text.text(), &resolve)
            .map_err(|error| self.locate(&text.0, 0, error))
    }

    pub(crate) fn size(&self, text: &AmountText) -> Result<Bytes, Problem> {
        size(text, self.declared.parameters, self.source)
    }

    pub(crate) fn positive_size(&self, text: &AmountText, what: &str) -> Result<Bytes, Problem> {
        not_zero(self.size(text)?, what, text.at)
    }

    pub(crate) fn whole(
        &self,
        text: &CountText,
        what: &str,
        bounds: RangeInclusive<u64>,
    ) -> Result<u64, Problem> {
        let value = constant(&text.0, self.declared.parameters, self.source)?;
        let whole = value
            .whole()
            .filter(|_| value.dimension == Dimension::NUMBER);
        let whole = whole
            .and_then(|whole| u64::try_from(whole).ok())
            .filter(|whole| bounds.contains(whole));
        whole.ok_or_else(|| out_of_bounds(text.at, what, &value, &bounds))
    }

    pub(crate) fn whole_or(
        &self,
        given: Option<&CountText>,
        what: &str,
        bounds: RangeInclusive<u64>,
        otherwise: u64,
    ) -> Result<u64, Problem> {
        given.map_or(Ok(otherwise), |text| self.whole(text, what, bounds))
    }

    pub(crate) fn range(
        &self,
        min: &CountText,
        max: &CountText,
        bounds: RangeInclusive<u64>,
    ) -> Result<RangeInclusive<u64>, Problem> {
        let at = min.at;
        let (min, max) = (
            self.whole(min, "min", bounds.clone())?,
            self.whole(max, "max", bounds)?,
        );
        in_order(&min, &max, at)?;
        Ok(min..=max)
    }

    pub(crate) fn constant(&self, text: &Located<String>) -> Result<Value, Problem> {
        constant(text, self.declared.parameters, self.source)
    }

    /// Parses the index of a numbered buffer. `offset` is the number of characters before it.
    pub(super) fn index(
        &self,
        text: &Located<String>,
        index: &str,
        offset: usize,
    ) -> Result<Expression, Problem> {
        expression::parse_count(index, &|name| self.resolve(name))
            .map_err(|error| self.locate(text, offset, error))
    }

    pub(crate) fn formula(&self, text: &Located<String>) -> Result<Expression, Problem> {
        let formula = expression::parse_formula(&text.value, &|name| self.resolve(name))
            .map_err(|error| self.locate(text, 0, error))?;
        match formula.dimension() {
            Dimension::TIME => Err(Problem::new(
                text.at,
                "a claim cannot use times, because its run is not timed",
            )
            .help("use bytes, counts, or a quotient of them")),
            _ => Ok(formula),
        }
    }

    pub(crate) fn expectation(&mut self, text: &Located<String>) -> Result<Expectation, Problem> {
        let sites = std::cell::Cell::new(self.growth_sites);
        let growth_of = |name: &str| {
            Some(
                name.strip_prefix(GROWTH)?
                    .strip_prefix('(')?
                    .strip_suffix(')')?
                    .to_owned(),
            )
        };
        let resolve = |name: &str| match growth_of(name) {
            None => self.resolve(name),
            Some(inner) => {
                sites.set(sites.get() + 1);
                growth(&inner, GrowthSite(sites.get() - 1)).map(ResolvedName::Quantity)
            }
        };
        let parsed = expression::parse_expectation(&text.value, &resolve);
        let expectation = parsed.map_err(|error| self.locate(text, 0, error))?;
        self.growth_sites = sites.get();
        self.is_of_one_kind(&expectation, text)?;
        Ok(expectation)
    }

    /// Checks that all metrics name an allocator, or none does.
    fn is_of_one_kind(
        &self,
        expectation: &Expectation,
        text: &Located<String>,
    ) -> Result<(), Problem> {
        let of_arm = |metric: &&Metric| matches!(metric, Metric::Arm(..));
        let is_between_arms = expectation.quantities().any(|metric| of_arm(&metric));
        match expectation
            .quantities()
            .find(|metric| is_between_arms && !of_arm(metric))
        {
            None => Ok(()),
            Some(metric) => Err(
                Problem::new(text.at, format!("`{metric}` needs an allocator")).help(format!(
                    "name the allocator of each metric, as in `{}.{metric}`",
                    self.arms().join("` or `")
                )),
            ),
        }
    }

    /// Keeps a comparison of allocators until all have run, and returns its number.
    pub(crate) fn put_aside(&mut self, expectation: Located<Expectation>) -> usize {
        let known = self
            .comparisons
            .iter()
            .position(|other| other.at == expectation.at);
        known.unwrap_or_else(|| {
            self.comparisons.push(expectation);
            self.comparisons.len() - 1
        })
    }

    /// Parses an expectation that is checked after every step. It can use only metrics that always
    /// exist.
    pub(crate) fn invariant(&self, text: &ExpressionText) -> Result<Expectation, Problem> {
        let resolve = |name: &str| match Account::from_name(name) {
            Some(account) => Ok(ResolvedName::Quantity(Metric::Now(account))),
            None if self.declared.parameters.contains_key(name) || name.starts_with("start.") => {
                self.resolve(name)
            }
            None => match name.split_once('.') {
                Some((head, rest)) if let Some(program) = self.program_named(head) => {
                    of_program(program, rest).map(ResolvedName::Quantity)
                }
                Some((head, _)) if self.process_named(head).is_some() => Err((
                    format!("`{name}` does not exist before the process starts"),
                    "use an `expect` step".to_owned(),
                )),
                Some((head, _)) if self.announced.contains_key(head) => {
                    let help = "invariants are checked after every step, so they can use counters \
                         and `start.…` only; use an `expect` step"
                        .to_owned();
                    Err((format!("`{name}` does not exist after every step"), help))
                }
                _ => Err(unknown_metric(name, &account_names())),
            },
        };
        expression::parse_expectation(text.text(), &resolve)
            .map_err(|error| self.locate(&text.0, 0, error))
    }

    /// Adds the position of an expression to the position of an error in it.
    fn locate(&self, text: &Located<String>, offset: usize, error: ExpressionError) -> Problem {
        locate(text, self.source, offset, error)
    }

    fn resolve(&self, name: &str) -> Result<ResolvedName<Metric>, Unresolved> {
        if let Some(account) = Account::from_name(name) {
            return Ok(ResolvedName::Quantity(Metric::Now(account)));
        }
        if let Some(value) = self.declared.parameters.get(name) {
            return Ok(ResolvedName::Constant(*value));
        }
        if let Some((variable, unit)) = self
            .variables
            .iter()
            .rev()
            .find(|(variable, _)| variable.name() == name)
        {
            return Ok(ResolvedName::Quantity(Metric::Variable(
                variable.clone(),
                *unit,
            )));
        }
        let (head, rest) = name.split_once('.').unwrap_or((name, ""));
        if let Some(program) = self.program_named(head) {
            return of_program(program, rest).map(ResolvedName::Quantity);
        }
        if let Some(process) = self.process_named(head) {
            return self.of_process(process, rest).map(ResolvedName::Quantity);
        }
        if !rest.is_empty() && self.arms().iter().any(|arm| arm == head) {
            if self.process.is_some() {
                return Err((
                    format!("`{name}` compares allocators, which a process cannot do"),
                    "move this out of the process".to_owned(),
                ));
            }
            return match self.resolve(rest)? {
                ResolvedName::Quantity(metric @ (Metric::Arm(..) | Metric::Variable(..))) => Err((
                    format!("`{metric}` does not belong to one allocator"),
                    format!("as in `{head}.reserved.peak`"),
                )),
                ResolvedName::Quantity(metric) => Ok(ResolvedName::Quantity(Metric::Arm(
                    head.to_owned(),
                    Box::new(metric),
                ))),
                constant @ ResolvedName::Constant(_) => Ok(constant),
            };
        }
        self.resolve_named(name, head, rest)
            .map(ResolvedName::Quantity)
    }

    pub(super) fn program_named(&self, name: &str) -> Option<&ProgramName> {
        let mut programs = self.declared.programs.iter();
        programs.find(|program| program.name() == name)
    }

    pub(super) fn process_named(&self, name: &str) -> Option<&ProcessName> {
        let mut names = self.declared.processes.iter().map(|process| &process.name);
        names.find(|process| process.name() == name)
    }

    fn of_process(&self, process: &ProcessName, rest: &str) -> Result<Metric, Unresolved> {
        if let Some(inside) = &self.process {
            let help =
                "steps of a process use its own metrics, as in `reserved`; move this out of \
                 the process"
                    .to_owned();
            return Err((
                format!("`{process}.{rest}` is unknown in the process `{inside}`"),
                help,
            ));
        }
        if !self.names_of_processes.contains_key(process) {
            return Err((
                format!("no earlier step starts the process `{process}`"),
                format!("start it with `process: {process}`"),
            ));
        }
        match Account::from_name(rest) {
            Some(account) if account.is_of_one_process() => {
                Ok(Metric::Process(process.clone(), account))
            }
            Some(_) => Err((
                format!("`{rest}` belongs to the device, not to the process `{process}`"),
                format!(
                    "write `{rest}`, or `{process}.device.process` for the memory of the process"
                ),
            )),
            None => Err((
                format!("process `{process}` has no metric `{rest}`"),
                format!(
                    "as in `{process}.reserved`, `{process}.device.process` (what NVML attributes \
                     to it) or `{process}.device.malloc_calls`"
                ),
            )),
        }
    }

    fn resolve_named(&self, name: &str, head: &str, rest: &str) -> Result<Metric, Unresolved> {
        if let Some((measure, _)) = self.names.measures.get(head) {
            return match Account::from_name(rest) {
                Some(account) => Ok(Metric::At(measure.clone(), account)),
                None => Err(unknown_metric_of(head, rest)),
            };
        }
        if self.unfinished.iter().any(|id| id == head) {
            let help = "move this after the step, out of its `meanwhile`".to_owned();
            return Err((
                format!("`{name}` is not known yet: the step `{head}` is still running"),
                help,
            ));
        }
        if let Some(id) = self.names.ids.get(head) {
            return of_step(id, rest);
        }
        if let Some(later) = self.announced.get(head) {
            return Err((
                format!(
                    "`{name}` is not known yet: the step `{head}` comes later, at line {}",
                    later.line
                ),
                "move this after that step".to_owned(),
            ));
        }
        Err(unknown_metric(name, &self.known_names()))
    }

    /// The names that may have been meant.
    fn known_names(&self) -> Vec<String> {
        let known = account_names();
        // Similar names are searched among this many measures and ids.
        const MOST: usize = 100;
        let heads = self.names.measures.keys().take(MOST).flat_map(|measure| {
            known
                .iter()
                .map(move |account| format!("{measure}.{account}"))
        });
        let reports = self
            .names
            .ids
            .iter()
            .take(MOST)
            .flat_map(|(id, known)| known.reports.iter().map(move |key| format!("{id}.{key}")));
        let variables = self
            .variables
            .iter()
            .map(|(variable, _)| variable.name().to_owned());
        let own = self.declared.parameters.keys().cloned().chain(variables);
        let accounts = known.iter().cloned();
        accounts.chain(own).chain(heads).chain(reports).collect()
    }
}

fn of_program(program: &ProgramName, rest: &str) -> Result<Metric, Unresolved> {
    if let Some(Account::Stat(key)) = Account::from_name(rest) {
        return Ok(Metric::Program(program.clone(), key));
    }
    let keys: Vec<String> = StatKey::all().map(|key| key.to_string()).collect();
    let names = Account::SHORT
        .into_iter()
        .chain(keys.iter().map(String::as_str));
    let hint = did_you_mean(rest, names);
    Err((
        format!("program `{program}` has no counter `{rest}`"),
        format!("{hint}as in `{program}.reserved`; metrics of the device belong to no program"),
    ))
}

/// A figure that a step reports, or one of its ranks, or its program's torch.
fn of_step(id: &Id, figure: &str) -> Result<Metric, Unresolved> {
    if let Some(rank) = figure.strip_prefix("rank").filter(|_| id.ranks > 0) {
        let (rank, figure) = rank.split_once('.').unwrap_or((rank, ""));
        return of_rank(id, rank, figure);
    }
    let (step, reports) = (id.name.clone(), id.reports);
    if let Some(key) = ReportKey::from_name(figure).filter(|key| reports.contains(key)) {
        return Ok(Metric::Report(step, key));
    }
    // A step with an exit code is a program, and its torch has counters.
    match Account::from_name(figure).filter(|_| reports.contains(&ReportKey::ExitCode)) {
        Some(Account::Stat(key)) => Ok(Metric::Torch(step, key)),
        _ => Err((
            format!("`{}` step `{step}` does not report `{figure}`", id.step),
            choices(figure, "it reports", reports.iter().map(|key| key.name())),
        )),
    }
}

fn of_rank(id: &Id, rank: &str, figure: &str) -> Result<Metric, Unresolved> {
    let step = &id.name;
    let Some(number) = rank.parse().ok().filter(|number| *number < id.ranks) else {
        return Err((
            format!("`{step}` has no rank `{rank}`"),
            format!(
                "its ranks are `{step}.rank0` to `{step}.rank{}`",
                id.ranks - 1
            ),
        ));
    };
    let own = ReportKey::from_name(figure)
        .filter(|key| RankFigure::REPORTS.contains(key))
        .map(RankFigure::Report);
    let of_allocator = match Account::from_name(figure) {
        Some(Account::Stat(key)) => Some(RankFigure::Stat(key)),
        Some(Account::Device(_)) | None => None,
    };
    match own.or(of_allocator) {
        Some(figure) => Ok(Metric::Rank(step.clone(), number, figure)),
        None => {
            let names: Vec<&str> = RankFigure::REPORTS
                .iter()
                .map(|key| key.name())
                .chain(["allocated.peak", "reserved.peak"])
                .collect();
            let help = choices(figure, "it has", names);
            Err((
                format!("rank {number} of `{step}` has no metric `{figure}`"),
                format!("{help}, and other counters of its allocator"),
            ))
        }
    }
}

fn growth(inner: &str, site: GrowthSite) -> Result<Metric, Unresolved> {
    match Account::from_name(inner) {
        Some(account) => Ok(Metric::Growth(site, account)),
        None => Err(unknown_metric(inner, &account_names())),
    }
}

pub(crate) fn size(
    text: &AmountText,
    parameters: &Parameters,
    source: &str,
) -> Result<Bytes, Problem> {
    match expression::parse_amount::<Metric>(text.text(), &|name| of_parameters(name, parameters)) {
        Ok(Amount::Fixed(bytes)) => Ok(bytes),
        Ok(Amount::Computed(_)) => Err(Problem::new(text.at, "this is known only during the run")),
        Err(error) => Err(locate(&text.0, source, 0, error)),
    }
}

pub(crate) fn constant(
    text: &Located<String>,
    parameters: &Parameters,
    source: &str,
) -> Result<Value, Problem> {
    let resolve = |name: &str| of_parameters(name, parameters);
    expression::parse_constant::<Metric>(&text.value, &resolve)
        .map_err(|error| locate(text, source, 0, error))
}

fn of_parameters(name: &str, parameters: &Parameters) -> Result<ResolvedName<Metric>, Unresolved> {
    match parameters.get(name) {
        Some(value) => Ok(ResolvedName::Constant(*value)),
        None if Account::from_name(name).is_some() => {
            let help = "only parameters of `matrix:` work here, because the value must be known \
                 before the run"
                .to_owned();
            Err((format!("`{name}` is known only during the run"), help))
        }
        None => Err((
            format!("unknown parameter `{name}`"),
            choices(name, "parameters", parameters.keys().map(String::as_str)),
        )),
    }
}

fn locate(text: &Located<String>, source: &str, offset: usize, error: ExpressionError) -> Problem {
    let at = text.within(source, offset + error.start, error.length);
    let problem = Problem::new(at, error.message);
    if error.help.is_empty() {
        problem
    } else {
        problem.help(error.help)
    }
}

pub(crate) fn in_order<T: PartialOrd + fmt::Display>(
    min: &T,
    max: &T,
    at: Position,
) -> Result<(), Problem> {
    if min <= max {
        return Ok(());
    }
    Err(Problem::new(at, format!("`min` is {min}, above `max`, which is {max}")).help("swap them"))
}

/// The unit of a value, if a loop variable can have it.
pub(crate) fn unit_of(value: &Value) -> Option<Unit> {
    [Unit::Count, Unit::Bytes, Unit::Time]
        .into_iter()
        .find(|&unit| Dimension::from(unit) == value.dimension)
}

fn account_names() -> Vec<String> {
    Account::SHORT
        .into_iter()
        .map(str::to_owned)
        .chain(Account::all().map(|account| account.to_string()))
        .collect()
}

fn unknown_metric(name: &str, names: &[String]) -> Unresolved {
    let hint = did_you_mean(name, names.iter().map(String::as_str));
    let forms = "a metric is `reserved`, `allocated` or another key of torch.cuda.memory_stats(), \
         `device.…`, `time.now`, one of these after `start.` or the name of a measure, or a figure \
         of a step with an `id`";
    (format!("unknown metric `{name}`"), format!("{hint}{forms}"))
}

fn unknown_metric_of(measure: &str, rest: &str) -> Unresolved {
    let names = account_names();
    let hint = did_you_mean(rest, names.iter().map(String::as_str));
    let hint = if hint.is_empty() {
        "as in `device.used` or `reserved.peak`"
    } else {
        hint.trim_end()
    };
    (
        format!("measure `{measure}` has no metric `{rest}`"),
        hint.to_owned(),
    )
}
