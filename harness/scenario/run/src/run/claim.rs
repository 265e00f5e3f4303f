//! The figures of a scenario's claim, taken after its last step.

use harness_allocator::units::Bytes;
use harness_record::ClaimFigure;
use harness_scenario::{Dimension, Expression, Value, claim::Figure};

use crate::context::RunContext;

/// The figures that this run can provide, as text. Empty for a timed run or if the device no longer
/// responds.
pub(super) fn figures(ctx: &mut RunContext, figures: &[Figure]) -> Vec<ClaimFigure> {
    if figures.is_empty() || ctx.rig.is_timed() {
        return Vec::new();
    }
    let Ok(now) = ctx.readings(true) else {
        return Vec::new();
    };
    let text = |formula: &Expression| {
        let number = formula
            .evaluate(&mut |metric| ctx.look_up(metric, &now))
            .ok()?;
        let bytes = (formula.dimension() == Dimension::BYTES)
            .then(|| u64::try_from(number.round().to_integer()).ok())
            .flatten();
        Some(bytes.map_or_else(
            || {
                Value {
                    number,
                    dimension: formula.dimension(),
                }
                .to_string()
            },
            |bytes| Bytes(bytes).to_string(),
        ))
    };
    let figure = |figure: &Figure| ClaimFigure {
        name: figure.name.clone(),
        pytorch: figure.pytorch.as_ref().and_then(text),
        harness: figure.harness.as_ref().and_then(text),
    };
    figures.iter().map(figure).collect()
}
