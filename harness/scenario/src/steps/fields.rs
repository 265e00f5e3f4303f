//! [`StepFields`], which every kind of step implements.

use schemars::JsonSchema;
use serde::Deserialize;

use super::StepWire;
use super::leaks::{LeakCheck, LeakCheckWire};
use crate::checker::Checker;
use crate::metric::ReportKey;
use harness_language::error::Problem;
use harness_language::located::{Located, Position};
use harness_language::text::NameText;

/// The YAML form of a step, and its check.
pub(crate) trait StepFields: for<'de> Deserialize<'de> + JsonSchema {
    type Checked;

    /// An example in YAML. It may use the streams `side` and `copy`, the program `server` and the process `helper`.
    const EXAMPLE: &'static str;

    /// Figures that a step with an `id` reports.
    const REPORTS: &'static [ReportKey] = &[];

    /// Keys that are allowed next to the step's own key. Only steps with steps inside have such keys.
    const BESIDE: &'static [Beside] = &[];

    /// Why a process cannot run the step, if so.
    const NOT_IN_PROCESSES: Option<&'static str> = None;

    /// The step if it is written as a bare name.
    fn bare() -> Option<Self> {
        None
    }

    /// The keys next to its own, for steps with steps inside.
    fn body(&self) -> Option<&Body> {
        None
    }

    fn id(&self) -> Option<&NameText> {
        self.body().and_then(|body| body.id.as_ref())
    }

    /// Sets the keys next to its own. Keys that are not allowed have been rejected before.
    fn take(&mut self, _: Body) {}

    /// Checks the step at this point of the scenario. `at` is the position of the whole step.
    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Self::Checked, Problem>;
}

/// The methods of [`StepFields`] for a step whose field `body` has the keys next to its own.
macro_rules! with_body {
    () => {
        fn body(&self) -> Option<&Body> {
            Some(&self.body)
        }

        fn take(&mut self, body: Body) {
            self.body = body;
        }
    };
}

/// A key next to the key of a step with steps inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beside {
    Steps,
    Until,
    Id,
    LeakCheck,
}

impl Beside {
    pub(super) const ALL: [Self; 4] = [Self::Steps, Self::Until, Self::Id, Self::LeakCheck];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Steps => "steps",
            Self::Until => "until",
            Self::Id => "id",
            Self::LeakCheck => "leak_check",
        }
    }

    pub(super) const fn about(self) -> &'static str {
        match self {
            Self::Steps => "The steps to run, in order.",
            Self::Until => {
                "`oom`: the first request that runs out of memory and has no `expect` ends the loop. If no request does, the step fails."
            }
            Self::Id => "A name for the step's figures.",
            Self::LeakCheck => "Most growth per iteration and allocation site. `{}` allows no growth. See `leak_check`.",
        }
    }
}

/// The keys next to the key of a step with steps inside.
#[derive(Clone, Debug, Default)]
pub(crate) struct Body {
    pub(super) steps: Option<Located<Vec<Located<StepWire>>>>,
    pub(super) until: Option<Located<String>>,
    pub(super) id: Option<NameText>,
    pub(super) leak_check: Option<Box<Located<LeakCheckWire>>>,
}

impl Body {
    /// The first key that is given but not accepted.
    pub(super) fn unexpected(&self, accepted: &[Beside]) -> Option<Located<String>> {
        let there = |beside: Beside| match beside {
            Beside::Steps => self.steps.as_ref().map(Located::position),
            Beside::Until => self.until.as_ref().map(Located::position),
            Beside::Id => self.id.as_ref().map(|id| id.position()),
            Beside::LeakCheck => self.leak_check.as_ref().map(|check| check.position()),
        };
        Beside::ALL.into_iter().filter(|beside| !accepted.contains(beside)).find_map(|beside| {
            let Position { line, column, length } = there(beside)?;
            Some(Located { value: beside.name().to_owned(), line, column, length })
        })
    }

    pub(super) fn steps(&self) -> &[Located<StepWire>] {
        self.steps.as_ref().map_or(&[], |steps| steps.value.as_slice())
    }

    /// Checks `leak_check` of a loop with at most this many iterations.
    pub(super) fn leak_check(&self, iterations: u64, checker: &Checker<'_>) -> Result<Option<LeakCheck>, Problem> {
        self.leak_check.as_ref().map(|check| check.value.check(check.position(), iterations, checker)).transpose()
    }

    /// Rejects a block without steps.
    pub(super) fn has_steps(&self, at: Position, step: &str) -> Result<(), Problem> {
        if !self.steps().is_empty() {
            return Ok(());
        }
        let at = self.steps.as_ref().map_or(at, Located::position);
        Err(Problem::new(at, format!("`{step}` has no steps"))
            .help("write them next to it: `- repeat: 3` and below it `  steps: [reset_peak_stats]`"))
    }
}
