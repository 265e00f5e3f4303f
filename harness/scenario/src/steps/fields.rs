//! What each kind of step supplies: [`StepFields`].

use schemars::JsonSchema;
use serde::Deserialize;

use crate::checker::Checker;
use crate::metric::ReportKey;
use harness_language::error::Problem;
use harness_language::located::Position;
use harness_language::text::NameText;

/// What the file says of a step, and how it is checked.
pub(crate) trait StepFields: for<'de> Deserialize<'de> + JsonSchema {
    /// What comes out of the check.
    type Checked;

    /// Steps that show it, in YAML; they may use the streams `side` and `copy`.
    const EXAMPLE: &'static str;

    /// What a step of this kind counts of itself, for those that take an `id`.
    const REPORTS: &'static [ReportKey] = &[];

    /// What the name alone means, without any field.
    fn bare() -> Option<Self> {
        None
    }

    /// Its id, if it was given one.
    fn id(&self) -> Option<&NameText> {
        None
    }

    /// Checks it against what is known at this point. `at` is the place of the whole step.
    fn check(&self, at: Position, checker: &mut Checker<'_>) -> Result<Self::Checked, Problem>;
}
