//! [`StepFields`], which every kind of step implements, and the keys next to a step's own key.

use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::{StepWire, leaks::LeakCheckWire};
use crate::{checker::Checker, metric::ReportKey};
use harness_language::text::{DurationText, NameText};
use harness_language::{error::Problem, located::Located};

/// The YAML form of a step, and its check, which returns a `Checked`.
pub(crate) trait StepFields<Checked>: for<'de> Deserialize<'de> + JsonSchema {
    /// An example in YAML. It may use the streams `side` and `copy`, the program `server` and the
    /// process `helper`.
    const EXAMPLE: &'static str;

    /// Figures that a step with an `id` reports.
    const REPORTS: &'static [ReportKey] = &[];

    /// Keys that are allowed next to the step's own key. Only steps with steps inside have such
    /// keys.
    const BESIDE: &'static [&'static str] = &[];

    /// Why a process cannot run the step, if so.
    const NOT_IN_PROCESSES: Option<&'static str> = None;

    /// The step if it is written as a bare name.
    fn bare() -> Option<Self> {
        None
    }

    const ID: fn(&Self) -> Option<&NameText> = |_| None;

    fn check(
        &self,
        step: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<Checked, Problem>;
}

pub(super) const STEPS: &str = "steps";
pub(super) const UNTIL: &str = "until";
pub(super) const ID: &str = "id";
pub(super) const LEAK_CHECK: &str = "leak_check";
pub(super) const TIMEOUT: &str = "timeout";
pub(super) const MEANWHILE: &str = "meanwhile";

#[derive(Clone, Debug, Default)]
pub(crate) struct Keys {
    pub(super) steps: Option<Located<Vec<Located<StepWire>>>>,
    pub(super) until: Option<Located<String>>,
    pub(super) id: Option<NameText>,
    pub(super) leak_check: Option<Box<Located<LeakCheckWire>>>,
    pub(super) timeout: Option<DurationText>,
    pub(super) meanwhile: Option<Located<Vec<Located<StepWire>>>>,
}

impl Keys {
    /// Each key, with its documentation.
    pub(crate) const ALL: [(&'static str, &'static str); 6] = [
        (
            TIMEOUT,
            "Time limit of the step, on the clock of the machine that runs it. A step that takes \
             longer fails the run. Default: 5 min.",
        ),
        (
            MEANWHILE,
            "Steps that run while this step runs: one after each of its operations, and the rest \
             after its end. An operation is a request or \
             free of a `storm`, an iteration of a `train`, an operation of the trace of a \
             `replay`, a wait of the policy `wait` of an `alloc`, or a step \
             inside a block. An `exec` starts all of them after its own start. They must not name \
             the same buffers as this step.",
        ),
        (STEPS, "The steps to run, in order."),
        (
            UNTIL,
            "`oom`: the first request that runs out of memory and has no `expect` ends the loop. \
             If no request does, the step fails.",
        ),
        (ID, "A name for the step's figures."),
        (
            LEAK_CHECK,
            "Most growth per iteration and allocation site. `{}` allows no growth. See \
             `leak_check`.",
        ),
    ];

    pub(super) fn steps(&self) -> &[Located<StepWire>] {
        self.steps
            .as_ref()
            .map_or(&[], |steps| steps.value.as_slice())
    }
}

/// The steps inside a block, which has at least one. `name` is its key in YAML.
pub(super) fn steps_inside<'s>(
    step: &'s Located<StepWire>,
    name: &str,
) -> Result<&'s [Located<StepWire>], Problem> {
    let keys = &step.value.keys;
    if !keys.steps().is_empty() {
        return Ok(keys.steps());
    }
    let at = keys.steps.as_ref().map_or(step.at, |steps| steps.at);
    Err(Problem::new(at, format!("`{name}` has no steps"))
        .help("write them next to it: `- repeat: 3` and below it `  steps: [reset_peak_stats]`"))
}
