use derive_more::Display;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::{StepWire, fields::StepFields};
use crate::checker::Checker;
use crate::metric::{MeasureName, ReportKey};
use harness_language::{error::Problem, located::Located, text::NameText};

/// Keeps the current value of every counter under a name. Later steps use
/// `NAME.reserved_bytes.all.current`, `NAME.device.used` or `NAME.time.now`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "measure")]
pub(crate) struct MeasureWire(NameText);

impl MeasureWire {
    pub(crate) const fn name(&self) -> &NameText {
        &self.0
    }
}

impl StepFields<MeasureName> for MeasureWire {
    const EXAMPLE: &'static str = "\
- measure: before
- alloc: { buffer: a, size: 400MiB }
- expect: device.used - before.device.used == 400MiB";

    fn check(
        &self,
        _: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<MeasureName, Problem> {
        checker.declare_measure(&self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Display)]
#[display("since {since}")]
pub struct Compare {
    pub since: MeasureName,
}

/// Compares the allocated bytes of each allocation site with an earlier `measure`. The report shows
/// the sites that grew, largest growth first. A site is a step with the name of its buffer, or a
/// kind of tensor of a training. All numbered buffers of a step are one site. Timed runs skip this
/// step.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "compare")]
pub(crate) struct CompareWire {
    /// The name of a `measure` before this step, or `start`.
    since: NameText,
    /// A name for the step's figures.
    id: Option<NameText>,
}

impl StepFields<Compare> for CompareWire {
    const EXAMPLE: &'static str = "\
- measure: warm
- alloc: { buffer: kept, size: 4MiB }
- compare: { since: warm, id: since_warm }
- expect: [ since_warm.grown_bytes == 4MiB, since_warm.grown_sites == 1 ]";

    const REPORTS: &'static [ReportKey] = &[ReportKey::GrownBytes, ReportKey::GrownSites];

    const ID: fn(&Self) -> Option<&NameText> = |wire| wire.id.as_ref();

    fn check(&self, _: &Located<StepWire>, checker: &mut Checker<'_>) -> Result<Compare, Problem> {
        Ok(Compare {
            since: checker.measure(&self.since)?,
        })
    }
}
