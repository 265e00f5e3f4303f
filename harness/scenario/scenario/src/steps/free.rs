//! `free`: returns memory to the allocator.

use derive_more::Display;
use harness_base::words::joined;
use harness_language::schema::JsonSchema;
use serde::Deserialize;

use super::{StepWire, fields::StepFields};
use crate::checker::Checker;
pub use crate::checker::FreeTarget;
use crate::metric::{Amount, ReportKey, StepName};
use harness_language::error::Problem;
use harness_language::located::{ListOr, Located};
use harness_language::text::{AmountText, BufferText, NameText};

#[derive(Clone, Debug, PartialEq, Display)]
pub enum FreeStep {
    #[display("{}", joined(_0, ", "))]
    Targets(Vec<FreeTarget>),
    /// The live blocks of a storm that pin just enough segments for a request.
    #[display("blocks of {storm} that pin segments, for {request}")]
    Pinning { storm: StepName, request: Amount },
}

/// Returns memory to the allocator: a buffer, a list of buffers, all numbered buffers of a name,
/// all live blocks of a storm (by its id), or the blocks that pin segments.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(transparent, rename = "free")]
pub(crate) struct FreeWire(Located<ListOr<BufferText, PinningWire>>);

/// Frees the live blocks of a storm that pin just enough segments for a request of the given size.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename = "free_pinning")]
struct PinningWire {
    /// The id of the storm.
    pinning: NameText,
    /// The size of the request that should fit afterwards.
    #[serde(rename = "for")]
    request: AmountText,
    /// A name for the step's figures.
    id: Option<NameText>,
}

impl StepFields<FreeStep> for FreeWire {
    const EXAMPLE: &'static str = "\
- alloc: { buffer: a, size: 4MiB }
- alloc: { buffer: b, size: 4MiB }
- storm: { id: churn, operations: 1000, sizes: [1MiB, 3MiB], live: 64MiB,
      lifetime: { min: 1, max: 100 } }
- free: a
- free: [b]
- for: { i: 1..4 }
  steps: [ alloc: { buffer: \"kv[i]\", size: 2MiB } ]
- free: kv[3]
- free: kv
- free: { pinning: churn, for: 40MiB, id: rescue }
- free: churn";

    const REPORTS: &'static [ReportKey] = &[
        ReportKey::FreedBlocks,
        ReportKey::FreedBytes,
        ReportKey::Time,
    ];

    const ID: fn(&Self) -> Option<&NameText> = |wire| wire.0.texts().err()?.id.as_ref();

    fn check(
        &self,
        step: &Located<StepWire>,
        checker: &mut Checker<'_>,
    ) -> Result<FreeStep, Problem> {
        match self.0.texts() {
            Err(pinning) => Ok(FreeStep::Pinning {
                storm: checker.live_storm(&pinning.pinning)?,
                request: checker.amount(&pinning.request)?,
            }),
            Ok(names) if names.is_empty() => Err(Problem::new(step.at, "`free` has an empty list")
                .help("as in `- free: a` or `- free: [a, b]`")),
            Ok(names) => Ok(FreeStep::Targets(
                names
                    .iter()
                    .map(|name| checker.free(name))
                    .collect::<Result<_, _>>()?,
            )),
        }
    }
}
