//! What each kind of step supplies: [`StepFields`].

use schemars::JsonSchema;
use serde::Deserialize;

use super::StepWire;
use super::leaks::{LeakCheck, LeakCheckWire};
use crate::checker::Checker;
use crate::metric::ReportKey;
use harness_language::error::Problem;
use harness_language::located::{Located, Position};
use harness_language::text::NameText;

/// What the file says of a step, and how it is checked.
pub(crate) trait StepFields: for<'de> Deserialize<'de> + JsonSchema {
    /// What comes out of the check.
    type Checked;

    /// Steps that show it, in YAML; they may use the streams `side` and `copy`, the program `server` and the process `helper`.
    const EXAMPLE: &'static str;

    /// What a step of this kind counts of itself, for those that take an `id`.
    const REPORTS: &'static [ReportKey] = &[];

    /// The keys that may stand beside its own, for steps that have steps inside them.
    const BESIDE: &'static [Beside] = &[];

    /// What the name alone means, without any field.
    fn bare() -> Option<Self> {
        None
    }

    /// What stands beside its key, for steps that have steps inside them.
    fn body(&self) -> Option<&Body> {
        None
    }

    /// The same, to be filled.
    fn body_mut(&mut self) -> Option<&mut Body> {
        None
    }

    /// Its id, if it was given one.
    fn id(&self) -> Option<&NameText> {
        self.body().and_then(|body| body.id.as_ref())
    }

    /// Takes what stands beside its key. Keys that may not have been refused before.
    fn take(&mut self, beside: Body) {
        if let Some(body) = self.body_mut() {
            *body = beside;
        }
    }

    /// Checks it against what is known at this point. `at` is the place of the whole step.
    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Self::Checked, Problem>;
}

/// A key beside that of a step with steps inside it.
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
            Self::Steps => "What is done, in order.",
            Self::Until => {
                "`oom`: the first request inside that runs out of memory, and has no `expect` of its own, ends the loop. If none does, the step fails."
            }
            Self::Id => "A name for what the step reports.",
            Self::LeakCheck => "What may grow from iteration to iteration, by site: `{}` for nothing. See `leak_check`.",
        }
    }
}

/// What stands beside the key of a step with steps inside it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Body {
    pub(super) steps: Option<Located<Vec<Located<StepWire>>>>,
    pub(super) until: Option<Located<String>>,
    pub(super) id: Option<NameText>,
    pub(super) leak_check: Option<Box<Located<LeakCheckWire>>>,
}

impl Body {
    /// The first key that is there and is not among those accepted.
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

    /// What may grow from one of at most so many iterations to the next.
    pub(super) fn leak_check(&self, iterations: u64, checker: &Checker<'_>) -> Result<Option<LeakCheck>, Problem> {
        self.leak_check.as_ref().map(|check| check.value.check(check.position(), iterations, checker)).transpose()
    }

    /// Refuses a step that should have steps inside it and has none.
    pub(super) fn has_steps(&self, at: Position, step: &str) -> Result<(), Problem> {
        if !self.steps().is_empty() {
            return Ok(());
        }
        let at = self.steps.as_ref().map_or(at, Located::position);
        Err(Problem::new(at, format!("`{step}` has no steps"))
            .help("they stand beside it, as in `- repeat: 3` and below it `  steps: [reset_peak_stats]`"))
    }
}
